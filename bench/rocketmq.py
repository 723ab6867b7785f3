"""This module measures Sluice beside Apache RocketMQ, with RocketMQ's own benchmark programs.

The sides take turns, and only the side whose turn it is has a processor. A turn starts a program,
waits until its messages flow, lets client and broker get warm, and then measures. README.md of
this folder says what each figure means.
"""

import contextlib
import time

from bench.harness import Failed, Figure, Run
from bench.rocketmq_programs import ASYNC_PRODUCER, BATCH_PRODUCER, CONSUMER, PRODUCER, Load
from bench.rocketmq_servers import Server
from bench.sides import (
    POLL_INTERVAL_S,
    START,
    Flush,
    Pace,
    Samples,
    Servers,
    Side,
    Sides,
    Turn,
    wanted_figures,
)
from peers.artifacts import ROCKETMQ
from peers.fetch import Jars, fetch

SYNC_128 = Load("send_sync_128", PRODUCER, ("-w", "64", "-s", "128"))
SYNC_1K = Load("send_sync_1k", PRODUCER, ("-w", "64", "-s", "1024"))
SYNC_1K_1T = Load("send_sync_1k_1t", PRODUCER, ("-w", "1", "-s", "1024"))
ASYNC_1K = Load("send_async_1k", ASYNC_PRODUCER, ("-f", "1000", "-s", "1024"))
BATCH_1K = Load("send_batch_1k", BATCH_PRODUCER, ("-w", "4", "-s", "1024", "-b", "32"))
DURABLE_1K = Load("send_sync_1k_durable", PRODUCER, SYNC_1K.options)
CONSUME_1K = Load("consume_1k", CONSUMER, ())

VS_ASYNC = "send_sync_1k_durable_vs_async"
PRIVATE, CPU = "private_mb", "cpu_s_per_million_sends"
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


FULL = Pace(10.0, 10.0, 10.0, 3)
QUICK = Pace(3.0, 3.0, 3.0, 1)
FULL_PRELOAD_COUNT = 5_000_000
QUICK_PRELOAD_COUNT = 1_200_000


def measure(run: Run) -> list[Figure]:
    """The figures that are wanted, all of them by default."""
    wanted = wanted_figures(run, FIGURES)
    session = Session(run, wanted, fetch(ROCKETMQ))
    session.measure_sends()
    session.measure_batches()
    session.measure_starts()
    return [session.samples.figure(name) for name in FIGURES if name in wanted]


class Session(Sides):
    """One run: its sides, its programs, what has been measured so far."""

    def __init__(self, run: Run, wanted: set[str], jars: Jars) -> None:
        super().__init__(run, jars, QUICK if run.quick else FULL, Samples(FIGURES, PEER_NAMES))
        self._wanted = wanted
        self._preload_count = QUICK_PRELOAD_COUNT if run.quick else FULL_PRELOAD_COUNT

    def measure_sends(self) -> None:
        """Single sends: first those with asynchronous flush only, then the headline with both.

        In the second part up to four brokers take turns, so that each of its ratios is of turns
        that were neighbours.
        """
        loads = [load for load in (SYNC_128, SYNC_1K_1T, ASYNC_1K) if load.figure in self._wanted]
        plain, durable = bool(self._wanted & OF_SYNC_1K), bool(self._wanted & OF_DURABLE)
        sides: list[Side] = ["ours", "peer"]
        with contextlib.ExitStack() as started:
            servers: Servers = {}
            for side in sides:
                only_beside = side == "peer" and VS_ASYNC in self._wanted
                if loads or plain or only_beside:
                    self._start(started, servers, side, "async", load=SYNC_1K)
            for load in loads:
                for _ in range(self._pace.rounds):
                    for (side, _flush), server in servers.items():
                        self.samples.add(load.figure, side, self._send(server, load).rate)
            for side in sides:
                if durable and (side == "ours" or DURABLE_1K.figure in self._wanted):
                    self._start(started, servers, side, "sync", load=SYNC_1K)
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
            servers: Servers = {}
            self._start(started, servers, "ours", "async", load=BATCH_1K)
            self._start(started, servers, "peer", "async", load=BATCH_1K)
            for number in range(self._pace.rounds):
                filled = consuming and number == 0
                for (side, _), server in servers.items():
                    topic = f"{BATCH_1K.figure}-{number}"
                    fill = self._preload_count if filled else 0
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
                servers: Servers = {}
                self._start(started, servers, "ours", "async", load=None)
                self._start(started, servers, "peer", "async", load=None)

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
            # Of the whole warm-up, what there is to read would not be left.
            turn = self._measured(server, program, consumed, warm_part=0.5)
            if consumed() == server.stored_count(topic):
                raise Failed("the consumer came to the end before it was measured")
        return turn
