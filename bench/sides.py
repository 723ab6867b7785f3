"""This module lets two sides take turns: they are started, warmed, measured, and stopped between.

Only the side whose turn it is has a processor. A turn starts a program, waits until its messages
flow, lets client and broker get warm, and then measures.
"""

import contextlib
import os
import shutil
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, TypeVar

from bench.harness import Failed, Figure, Run, Unusable
from bench.rocketmq_programs import (
    REPORT_SPAN_S,
    Load,
    Programs,
    Report,
    RunningLoad,
    reported_rate,
)
from bench.rocketmq_servers import Apache, Server, Sluice
from peers.fetch import Jars

Flush = Literal["async", "sync"]
Side = Literal["ours", "peer"]
Servers = dict[tuple[Side, Flush], Server]
Result = TypeVar("Result")

MILLION = 1_000_000
PEER = "Apache RocketMQ"
START = "start_s"
FLOW_TIMEOUT_S = 90.0
REPEATS = 2
POLL_INTERVAL_S = 0.1
# How far the program's own rate may be from the one counted at the broker over the same seconds.
# They differ where the rate still climbs, because a report ends up to a second before or after.
AGREEMENT = 0.5


@dataclass(frozen=True, slots=True)
class Pace:
    """How long things take: a side's first warm-up, a turn's own, what is measured, how often."""

    broker_warm_s: float
    warm_s: float
    measured_s: float
    rounds: int

    def for_seconds(self, seconds: float | None) -> "Pace":
        """The same, but measured for as long as was asked for."""
        return self if seconds is None else replace(self, measured_s=seconds)


class ColdStart(Failed):
    """It went wrong before it was measured."""


class Turn(NamedTuple):
    """What one turn of one side gave."""

    rate: float
    cpu_s_per_million: float


class Samples:
    """Measured values by figure and side; a figure is the median of each."""

    def __init__(self, units: Mapping[str, str], peer_names: Mapping[str, str]) -> None:
        self._units = units
        self._peer_names = peer_names
        self._values: dict[tuple[str, Side], list[float]] = defaultdict(list)

    def add(self, figure: str, side: Side, value: float) -> None:
        self._values[figure, side].append(value)

    def count(self, figure: str, side: Side) -> int:
        return len(self._values[figure, side])

    def median(self, figure: str, side: Side) -> float:
        return statistics.median(self._values[figure, side])

    def figure(self, name: str) -> Figure:
        """Ours is 0 where Sluice refused what was to be measured."""
        unit, ours = self._units[name], self._values[name, "ours"] or [0.0]
        if peer := self._values[name, "peer"]:
            peer_name = self._peer_names.get(name, PEER)
            return Figure(name, unit, statistics.median(ours), statistics.median(peer), peer_name)
        return Figure(name, unit, statistics.median(ours))


def wanted_figures(run: Run, there: Mapping[str, str]) -> set[str]:
    """The figures that were asked for, all of them by default; Unusable with a wrong name."""
    if unknown := run.only - there.keys():
        raise Unusable(f"no such figure: {', '.join(sorted(unknown))}; there are {list(there)}")
    return set(run.only or there)


class Sides:
    """One run: its sides, its programs, what has been measured so far."""

    def __init__(
        self,
        run: Run,
        jars: Jars,
        pace: Pace,
        samples: Samples,
        *,
        peer_config: Mapping[str, object] | None = None,
    ) -> None:
        """`peer_config` are settings of Apache's broker that are not its defaults."""
        self._run = run
        self._jars = jars
        self._pace = pace.for_seconds(run.seconds)
        self._peer_config = peer_config or {}
        self._programs = Programs(run.directory / "programs", jars)
        self.samples = samples

    def _start(
        self,
        started: contextlib.ExitStack,
        servers: Servers,
        side: Side,
        flush: Flush,
        *,
        load: Load | None,
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
            server = Apache(directory, self._jars, flush=flush, config=self._peer_config)
        try:
            yield server
        finally:
            server.kill()
            shutil.rmtree(directory)

    def _turn(self, server: Server, work: Callable[[], Result]) -> Result:
        os.sync()  # so that the disk is at rest: the other side has written, too
        return take_turn(server, work, self._run.progress)

    def _warm(self, server: Server, load: Load) -> None:
        """Whether sends fail is of no interest yet."""
        with self._flowing(server, load, "warm", lambda: server.stored_count("warm")):
            time.sleep(self._pace.broker_warm_s)

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

    def _measured(
        self,
        server: Server,
        program: RunningLoad,
        count: Callable[[], int],
        *,
        warm_part: float = 1.0,
    ) -> Turn:
        """Wait for the warm-up, or a part of it, to pass, and measure for a while."""
        time.sleep(self._pace.warm_s * warm_part)
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
        """All reports with the next one: it comes within a second and ends nearest to now.

        None of a program that reports more rarely: its lines cover other seconds than ours.
        """
        if not program.load.program.reports_each_second:
            return []
        before = program.reports()
        if self._pace.measured_s < REPORT_SPAN_S:
            return before
        deadline = time.monotonic() + REPORT_SPAN_S
        while len(reports := program.reports()) == len(before) and time.monotonic() < deadline:
            time.sleep(POLL_INTERVAL_S)
        program.check()
        return reports


def take_turn(server: Server, work: Callable[[], Result], say: Callable[[str], None]) -> Result:
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
