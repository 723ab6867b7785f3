"""This module measures Sluice beside Apache RocketMQ, with RocketMQ's own benchmark programs.

The sides take turns, and only the side whose turn it is has a processor. A turn starts a program,
waits until its messages flow, lets client and broker get warm, and then measures. README.md of
this folder says what each figure means.
"""

import contextlib
import os
import shutil
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

from bench.harness import Failed, Figure, Run, Unusable
from bench.rocketmq_programs import (
    BATCH_PRODUCER,
    CONSUMER,
    PRODUCER,
    REPORT_SPAN_S,
    Load,
    Programs,
    Report,
    RunningLoad,
    reported_rate,
)
from bench.rocketmq_servers import Apache, Server, Sluice
from peers.artifacts import ROCKETMQ
from peers.fetch import Jars, fetch

Flush = Literal["async", "sync"]
Side = Literal["ours", "peer"]

MILLION = 1_000_000
FLOW_TIMEOUT_S = 90.0
REPEATS = 2
POLL_INTERVAL_S = 0.1
# How far the program's own rate may be from the one counted at the broker over the same seconds.
# They differ where the rate still climbs, because a report ends up to a second before or after.
AGREEMENT = 0.5

SYNC_128 = Load("send_sync_128", PRODUCER, ("-w", "64", "-s", "128"))
SYNC_1K = Load("send_sync_1k", PRODUCER, ("-w", "64", "-s", "1024"))
SYNC_1K_1T = Load("send_sync_1k_1t", PRODUCER, ("-w", "1", "-s", "1024"))
ASYNC_1K = Load("send_async_1k", PRODUCER, ("-y", "true", "-s", "1024"))
BATCH_1K = Load("send_batch_1k", BATCH_PRODUCER, ("-w", "4", "-s", "1024", "-b", "32"))
DURABLE_1K = Load("send_sync_1k_durable", PRODUCER, SYNC_1K.options)
CONSUME_1K = Load("consume_1k", CONSUMER, ())

VS_ASYNC = "send_sync_1k_durable_vs_async"
START, PRIVATE, CPU = "start_s", "private_mb", "cpu_s_per_million_sends"
# In the order in which they are printed, with their units.
FIGURES = {
    SYNC_1K.figure: "msg/s",
    SYNC_128.figure: "msg/s",
    ASYNC_1K.figure: "msg/s",
    BATCH_1K.figure: "msg/s",
    CONSUME_1K.figure: "msg/s",
    DURABLE_1K.figure: "msg/s",
    VS_ASYNC: "msg/s",
    SYNC_1K_1T.figure: "msg/s",
    START: "s",
    PRIVATE: "MB",
    CPU: "s",
}
PEER_NAMES = {
    DURABLE_1K.figure: "Apache RocketMQ, sync flush",
    VS_ASYNC: "Apache RocketMQ, async flush",
}
OF_SYNC_1K = {SYNC_1K.figure, PRIVATE, CPU}
OF_DURABLE = {DURABLE_1K.figure, VS_ASYNC}


@dataclass(frozen=True, slots=True)
class Pace:
    """How long things take: a side's first warm-up, a turn's own, what is measured, how often."""

    broker_warm_s: float
    warm_s: float
    measured_s: float
    rounds: int
    preload_count: int


FULL = Pace(10.0, 10.0, 10.0, 3, 4_000_000)
QUICK = Pace(3.0, 3.0, 3.0, 1, 1_200_000)


class ColdStart(Failed):
    """It went wrong before it was measured."""


class Turn(NamedTuple):
    """What one turn of one side gave."""

    rate: float
    cpu_s_per_million: float


class Samples:
    """Measured values by figure and side; a figure is the median of each."""

    def __init__(self) -> None:
        self._values: dict[tuple[str, Side], list[float]] = defaultdict(list)

    def add(self, figure: str, side: Side, value: float) -> None:
        self._values[figure, side].append(value)

    def count(self, figure: str, side: Side) -> int:
        return len(self._values[figure, side])

    def figure(self, name: str) -> Figure:
        ours, peer = self._values[name, "ours"], self._values[name, "peer"]
        if not peer:
            return Figure(name, FIGURES[name], statistics.median(ours))
        peer_name = PEER_NAMES.get(name, "Apache RocketMQ")
        medians = statistics.median(ours), statistics.median(peer)
        return Figure(name, FIGURES[name], *medians, peer_name)


def measure(run: Run) -> list[Figure]:
    """The figures that are wanted, all of them by default."""
    if unknown := run.only - FIGURES.keys():
        raise Unusable(f"no such figure: {', '.join(sorted(unknown))}; there are {list(FIGURES)}")
    wanted = set(run.only or FIGURES)
    session = Session(run, wanted, fetch(ROCKETMQ))
    session.measure_sends()
    session.measure_batches()
    session.measure_starts()
    return [session.samples.figure(name) for name in FIGURES if name in wanted]


class Session:
    """One run: its sides, its programs, what has been measured so far."""

    def __init__(self, run: Run, wanted: set[str], jars: Jars) -> None:
        pace = QUICK if run.quick else FULL
        if run.seconds is not None:
            pace = Pace(
                pace.broker_warm_s, pace.warm_s, run.seconds, pace.rounds, pace.preload_count
            )
        self._run = run
        self._wanted = wanted
        self._jars = jars
        self._pace = pace
        self._programs = Programs(run.directory / "programs", jars)
        self.samples = Samples()

    # ---------------------------------------------------------------------------------- the figures

    def measure_sends(self) -> None:
        """Single sends: first those with asynchronous flush only, then the headline with both.

        In the second part up to four brokers take turns, so that each of its ratios is of turns
        that were neighbours.
        """
        loads = [load for load in (SYNC_128, SYNC_1K_1T, ASYNC_1K) if load.figure in self._wanted]
        plain, durable = bool(self._wanted & OF_SYNC_1K), bool(self._wanted & OF_DURABLE)
        sides: list[Side] = ["ours", "peer"]
        with contextlib.ExitStack() as started:
            servers: dict[tuple[Side, Flush], Server] = {}
            for side in sides:
                only_beside = side == "peer" and VS_ASYNC in self._wanted
                if loads or plain or only_beside:
                    self._start(started, servers, side, "async")
            for load in loads:
                for _ in range(self._pace.rounds):
                    for (side, _flush), server in servers.items():
                        self.samples.add(load.figure, side, self._send(server, load).rate)
            for side in sides:
                if durable and (side == "ours" or DURABLE_1K.figure in self._wanted):
                    self._start(started, servers, side, "sync")
            if plain or durable:
                for _ in range(self._pace.rounds):
                    for (side, flush), server in servers.items():
                        self._headline(side, flush, server)

    def _headline(self, side: Side, flush: Flush, server: Server) -> None:
        add = self.samples.add
        if flush == "sync":
            turn = self._send(server, DURABLE_1K)
            add(DURABLE_1K.figure, side, turn.rate)
            if side == "ours":
                add(VS_ASYNC, side, turn.rate)
            return
        turn = self._send(server, SYNC_1K)
        add(SYNC_1K.figure, side, turn.rate)
        add(CPU, side, turn.cpu_s_per_million)
        add(PRIVATE, side, server.private_bytes() / 1e6)
        if side == "peer":
            add(VS_ASYNC, side, turn.rate)

    def measure_batches(self) -> None:
        """Batches; the topic of the first round is filled until it is worth reading, and read."""
        consuming = CONSUME_1K.figure in self._wanted
        if not (consuming or BATCH_1K.figure in self._wanted):
            return
        with contextlib.ExitStack() as started:
            servers: dict[tuple[Side, Flush], Server] = {}
            self._start(started, servers, "ours", "async", load=BATCH_1K)
            self._start(started, servers, "peer", "async", load=BATCH_1K)
            for number in range(self._pace.rounds):
                filled = consuming and number == 0
                for (side, _), server in servers.items():
                    topic = f"{BATCH_1K.figure}-{number}"
                    fill = self._pace.preload_count if filled else 0
                    turn = self._send(server, BATCH_1K, topic=topic, fill=fill)
                    self.samples.add(BATCH_1K.figure, side, turn.rate)
                for _ in range(self._pace.rounds if filled else 0):
                    for (side, _), server in servers.items():
                        turn = self._consume(server, f"{BATCH_1K.figure}-0")
                        self.samples.add(CONSUME_1K.figure, side, turn.rate)
                if BATCH_1K.figure not in self._wanted:
                    return

    def measure_starts(self) -> None:
        """Each start of a broker was timed; start more if there were too few."""
        if START not in self._wanted:
            return
        while self.samples.count(START, "ours") < self._pace.rounds:
            with contextlib.ExitStack() as started:
                servers: dict[tuple[Side, Flush], Server] = {}
                self._start(started, servers, "ours", "async", load=None)
                self._start(started, servers, "peer", "async", load=None)

    # ------------------------------------------------------------------------------------ the turns

    def _start(
        self,
        started: contextlib.ExitStack,
        servers: dict[tuple[Side, Flush], Server],
        side: Side,
        flush: Flush,
        *,
        load: Load | None = SYNC_1K,
    ) -> None:
        """Start a side that takes part, warm it with the load, and stop it until its turn."""
        if side == "peer" and self._run.ours_only:
            return
        server = started.enter_context(self._server(side, flush))
        self._run.progress(f"{server.name}: starts")
        self.samples.add(START, side, server.start_until_first_send())
        servers[side, flush] = server
        server.pause()
        if load is not None:
            self._run.progress(f"{server.name}: gets warm")
            self._turn(server, lambda: self._warm(server, load))

    @contextlib.contextmanager
    def _server(self, side: Side, flush: Flush) -> Iterator[Server]:
        """A side on an empty store, which is deleted afterwards."""
        directory = self._run.directory / f"{side}-{flush}"
        server: Server
        if side == "ours":
            server = Sluice(directory, flush=flush)
        else:
            server = Apache(directory, self._jars, flush=flush)
        try:
            yield server
        finally:
            server.kill()
            shutil.rmtree(directory)

    def _turn(self, server: Server, work: Callable[[], Turn]) -> Turn:
        os.sync()  # so that the disk is at rest: the other side has written, too
        return take_turn(server, work, self._run.progress)

    def _warm(self, server: Server, load: Load) -> Turn:
        with self._flowing(server, load, "warm", lambda: server.stored_count("warm")):
            time.sleep(self._pace.broker_warm_s)
        return Turn(0.0, 0.0)  # whether sends failed is of no interest yet

    def _send(self, server: Server, load: Load, *, topic: str | None = None, fill: int = 0) -> Turn:
        """One turn of a producer; it goes on, off the clock, until the topic holds `fill`."""
        return self._turn(server, lambda: self._sent(server, load, topic or load.figure, fill))

    def _sent(self, server: Server, load: Load, topic: str, fill: int) -> Turn:
        def stored() -> int:
            return server.stored_count(topic)

        with self._flowing(server, load, topic, stored) as program:
            turn = self._measured(server, program, stored)
            if fill:
                self._run.progress(f"{server.name}: the topic is filled up")
            while stored() < fill:
                time.sleep(POLL_INTERVAL_S)
                program.check()
        return turn

    def _consume(self, server: Server, topic: str) -> Turn:
        """One turn of a consumer that reads the topic from its beginning."""
        return self._turn(server, lambda: self._consumed(server, topic))

    def _consumed(self, server: Server, topic: str) -> Turn:
        group = server.create_group(topic)
        load = Load(CONSUME_1K.figure, CONSUMER, ("-g", group))

        def consumed() -> int:
            return server.consumed_count(topic, group)

        with self._flowing(server, load, topic, consumed) as program:
            turn = self._measured(server, program, consumed)
            if consumed() == server.stored_count(topic):
                raise Failed("the consumer came to the end before it was measured")
        return turn

    @contextlib.contextmanager
    def _flowing(
        self, server: Server, load: Load, topic: str, count: Callable[[], int]
    ) -> Iterator[RunningLoad]:
        """A program is started on a topic, and its first messages have come through."""
        server.create_topic(topic)
        before = count()
        with self._programs.running(load, server.nameserver, topic) as program:
            deadline = time.monotonic() + FLOW_TIMEOUT_S
            while count() <= before:
                check_warm(program)
                if time.monotonic() > deadline:
                    raise ColdStart(f"{load.program.name} does nothing at {server.name}")
                time.sleep(POLL_INTERVAL_S)
            yield program

    def _measured(self, server: Server, program: RunningLoad, count: Callable[[], int]) -> Turn:
        """Wait for the warm-up to pass, and measure for a while."""
        time.sleep(self._pace.warm_s)
        check_warm(program)
        begin, begin_count, begin_cpu_s = time.perf_counter(), count(), server.cpu_seconds()
        time.sleep(self._pace.measured_s)
        seconds = time.perf_counter() - begin
        done, cpu_s = count() - begin_count, server.cpu_seconds() - begin_cpu_s
        program.check()
        counted = done / seconds
        reported = reported_rate(self._last_reports(program), self._pace.measured_s)
        rate = agreed_rate(reported, counted)
        turn = Turn(rate, cpu_s / done * MILLION)
        self._run.progress(
            f"{server.name}: {program.load.figure} {rate:,.0f} msg/s "
            f"(at the broker {counted:,.0f}), {turn.cpu_s_per_million:.1f} CPU s a million"
        )
        return turn

    def _last_reports(self, program: RunningLoad) -> list[Report]:
        """All reports with the next one: it comes within a second and ends nearest to now."""
        before = program.reports()
        if self._pace.measured_s < REPORT_SPAN_S:
            return before
        deadline = time.monotonic() + REPORT_SPAN_S
        while len(reports := program.reports()) == len(before) and time.monotonic() < deadline:
            time.sleep(POLL_INTERVAL_S)
        program.check()
        return reports


def take_turn(server: Server, work: Callable[[], Turn], say: Callable[[str], None]) -> Turn:
    """Let only this side run, for as long as the work takes.

    A send of ours that fails while it is measured ends the benchmark. Where the machine is busy
    with other things, a cold client gives up some of its first sends, and Apache's broker refuses
    or delays some at any time: such a turn is repeated, and the run says so.
    """
    for repeats_left in range(REPEATS, -1, -1):
        server.resume()
        try:
            return work()
        except Failed as error:
            excused = isinstance(error, ColdStart) or server.is_peer
            if not (excused and repeats_left):
                raise
            say(f"{server.name}: again, because {error}")
        finally:
            server.pause()
    raise AssertionError("the last turn returns or raises")


def check_warm(program: RunningLoad) -> None:
    """Raise ColdStart if something went wrong already."""
    try:
        program.check()
    except Failed as error:
        raise ColdStart(str(error)) from error


def agreed_rate(reported: float | None, counted: float) -> float:
    """What the program says where it says something: it must be what the broker holds."""
    if counted <= 0:
        raise Failed("no message came through while it was measured")
    if reported is None:
        return counted
    if abs(reported / counted - 1) > AGREEMENT:
        raise Failed(f"the program reports {reported:,.0f} msg/s, but {counted:,.0f} came through")
    return reported
