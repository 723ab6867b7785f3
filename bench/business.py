"""This module measures business messages beside Apache RocketMQ: transactions, delays, filters.

Transactions, timers and plain sends come from RocketMQ's own benchmark programs; the rest from
`bench.business_loads`, the same for both sides. README.md of this folder says what each figure
means.
"""

import contextlib
import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from bench.business_loads import (
    SQL,
    SQL_SHARE,
    Done,
    log_positions,
    now_ms,
    pop_and_acknowledge,
    receive_burst,
    scan,
    send_back,
    send_offers,
    send_timed,
    try_transaction,
)
from bench.harness import Failed, Figure, Run
from bench.raw_client import Refused
from bench.rocketmq_programs import PRODUCER, TIMER_PRODUCER, TRANSACTION_PRODUCER, Load
from bench.rocketmq_servers import Server
from bench.sides import Pace, Samples, Servers, Side, Sides, wanted_figures
from peers.artifacts import ROCKETMQ
from peers.fetch import Jars, fetch

SEND_1K = Load("send_1k", PRODUCER, ("-w", "64", "-s", "1024"))
SEND_WAITING = Load("send_1m_waiting", PRODUCER, SEND_1K.options)
# The program's defaults.
TRANSACTIONS = Load("transactions", TRANSACTION_PRODUCER, ("-w", "32", "-s", "2048"))
# Due from two minutes on, in 1,000 slots over 44 hours, so that next to none falls due meanwhile.
TIMERS = Load(
    "delay_in_1m_waiting",
    TIMER_PRODUCER,
    ("-tc", "16", "-ms", "1024", "-st", "1000", "-mt", "500", "-sd", "160000"),
)
KEPT, WAITING_MB, OUT = "send_1m_waiting_kept", "delay_1m_waiting_mb", "delay_out"
SQL_COST, SQL_RATE = "sql_filter", "sql_filter_scan"
ALL_COST, ALL_RATE = "no_filter", "no_filter_scan"
RETRY, POP = "retry", "pop"

# In the order in which they are printed, with their units.
FIGURES = {
    TRANSACTIONS.figure: "msg/s",
    TIMERS.figure: "msg/s",
    OUT: "msg/s",
    SEND_WAITING.figure: "msg/s",
    KEPT: "x",
    WAITING_MB: "MB",
    SQL_COST: "us",
    SQL_RATE: "msg/s",
    ALL_COST: "us",
    ALL_RATE: "msg/s",
    RETRY: "msg/s",
    POP: "msg/s",
}
OF_WAITING = {TIMERS.figure, OUT, SEND_WAITING.figure, KEPT, WAITING_MB}
OF_OFFERS = {SQL_COST, SQL_RATE, ALL_COST, ALL_RATE, RETRY, POP}
# Its own default is to refuse subscriptions with SQL.
PEER_CONFIG = {"enablePropertyFilter": "true"}

HOUR_MS = 3_600_000
# When the timers are due that wait while something else is measured: Apache's broker takes up to
# three days, and moves those of more than two days from time to time.
WAITING_FROM_MS = 12 * HOUR_MS
WAITING_SPAN_MS = 32 * HOUR_MS
SETTLE_TIMEOUT_S = 300.0
SETTLE_INTERVAL_S = 0.5
# How long before they are due the timers of a burst must have been sent.
LEAD_LEFT_MS = 1500
BURST_TIMEOUT_S = 240.0


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much there is of what is measured, and how long a burst takes to send, at first."""

    waiting: int
    burst: int
    offers: int
    burst_lead_ms: int


FULL = Pace(10.0, 10.0, 10.0, 3)
QUICK = Pace(3.0, 2.0, 3.0, 1)
FULL_SIZES = Sizes(waiting=1_000_000, burst=100_000, offers=200_000, burst_lead_ms=20_000)
QUICK_SIZES = Sizes(waiting=60_000, burst=20_000, offers=40_000, burst_lead_ms=6_000)


def measure(run: Run) -> list[Figure]:
    """The figures that are wanted, all of them by default."""
    wanted = wanted_figures(run, FIGURES)
    session = Session(run, wanted, fetch(ROCKETMQ))
    session.measure()
    return [session.samples.figure(name) for name in FIGURES if name in wanted]


class Session(Sides):
    """One run, with one broker of each side, asynchronous flush on both."""

    def __init__(self, run: Run, wanted: set[str], jars: Jars) -> None:
        pace = QUICK if run.quick else FULL
        super().__init__(run, jars, pace, Samples(FIGURES, {}), peer_config=PEER_CONFIG)
        self._wanted = wanted
        self._sizes = QUICK_SIZES if run.quick else FULL_SIZES
        self._servers: list[tuple[Side, Server]] = []
        self._refusals: set[tuple[str, Side]] = set()
        self._bursts = itertools.count(1)

    def measure(self) -> None:
        with contextlib.ExitStack() as started:
            servers: Servers = {}
            self._start(started, servers, "ours", "async", load=SEND_1K)
            self._start(started, servers, "peer", "async", load=SEND_1K)
            self._servers = [(side, server) for (side, _), server in servers.items()]
            if TRANSACTIONS.figure in self._wanted:
                self._in_turns(TRANSACTIONS.figure, self._transactions)
            if self._wanted & OF_OFFERS:
                self._measure_offers()
            if self._wanted & OF_WAITING:
                self._measure_waiting()

    def _measure_offers(self) -> None:
        """What is done with messages that are there: they are read, filtered, popped, retried."""
        self._in_turns("offers", self._offers, rounds=1)
        if self._wanted & {SQL_COST, SQL_RATE}:
            self._in_turns(SQL_COST, self._scan_sql)
        if self._wanted & {ALL_COST, ALL_RATE}:
            self._in_turns(ALL_COST, self._scan_all)
        if RETRY in self._wanted:
            self._in_turns(RETRY, self._retry)
        if POP in self._wanted:
            self._in_turns(POP, self._pop)

    def _measure_waiting(self) -> None:
        """What goes on while very many timers wait, and before they do."""
        if KEPT in self._wanted:
            self._in_turns(SEND_1K.figure, self._plain)
        self._in_turns(WAITING_MB, self._fill, rounds=1)
        if TIMERS.figure in self._wanted:
            self._in_turns(TIMERS.figure, self._timers)
        if self._wanted & {SEND_WAITING.figure, KEPT}:
            self._in_turns(SEND_WAITING.figure, self._plain_waiting)
        if OUT in self._wanted:
            self._in_turns(OUT, self._burst)

    def _in_turns(
        self, figure: str, work: Callable[[Side, Server], None], *, rounds: int | None = None
    ) -> None:
        """Let the sides work in turns; one of ours that refuses is not asked again."""
        for _ in range(rounds or self._pace.rounds):
            for side, server in self._servers:
                if (figure, side) in self._refusals:
                    continue
                try:
                    self._turn(server, partial(self._work, work, side, server))
                except Refused as error:
                    self._refusals.add((figure, side))
                    self._run.progress(f"{server.name}: {figure} is not served: {error}")

    @staticmethod
    def _work(work: Callable[[Side, Server], None], side: Side, server: Server) -> None:
        """Apache's broker has all of it: where it refuses, it is overloaded, and may try again."""
        try:
            work(side, server)
        except Refused as error:
            if server.is_peer:
                raise Failed(f"refused: {error}") from error
            raise

    def _note(self, server: Server, text: str) -> None:
        self._run.progress(f"{server.name}: {text}")

    # ------------------------------------------------------------------------- RocketMQ's programs

    def _transactions(self, side: Side, server: Server) -> None:
        topic = TRANSACTIONS.figure
        server.create_topic(topic)
        try_transaction(server.broker_port, topic)
        self._run_load(side, server, TRANSACTIONS, topic)

    def _plain(self, side: Side, server: Server) -> None:
        self._run_load(side, server, SEND_1K, "plain")

    def _plain_waiting(self, side: Side, server: Server) -> None:
        rate = self._run_load(side, server, SEND_WAITING, "plain")
        if KEPT in self._wanted:
            alone = self.samples.median(SEND_1K.figure, side)
            self.samples.add(KEPT, side, rate / alone)

    def _run_load(self, side: Side, server: Server, load: Load, topic: str) -> float:
        """What comes into a topic through one of RocketMQ's programs."""

        def stored() -> int:
            return server.stored_count(topic)

        with self._flowing(server, load, topic, stored) as program:
            rate = self._measured(server, program, stored).rate
        self.samples.add(load.figure, side, rate)
        return rate

    def _timers(self, side: Side, server: Server) -> None:
        """They are counted where they wait: the topic itself gets them only when they are due."""
        server.create_topic(TIMERS.figure)
        # The program would go on though all its sends were refused.
        send_timed(server.broker_port, TIMERS.figure, 1, lambda _: now_ms() + WAITING_FROM_MS)
        with self._flowing(server, TIMERS, TIMERS.figure, server.timer_count) as program:
            turn = self._measured(server, program, server.timer_count)
        self.samples.add(TIMERS.figure, side, turn.rate)

    # ------------------------------------------------------------------------------------ our own

    def _fill(self, side: Side, server: Server) -> None:
        """Let very many timers wait, and see what memory that takes."""
        count, topic = self._sizes.waiting, "waiting"
        server.create_topic(topic)
        from_ms = now_ms() + WAITING_FROM_MS
        step_ms = WAITING_SPAN_MS / count
        before_bytes, begin = server.private_bytes(), time.perf_counter()
        # In no order: the i-th of those that wait is seldom the i-th that was sent.
        send_timed(
            server.broker_port,
            topic,
            count,
            lambda i: from_ms + int(i * 7919 % count * step_ms),
        )
        sent_s = time.perf_counter() - begin
        self._settle(server)
        grown_bytes = server.private_bytes() - before_bytes
        self.samples.add(WAITING_MB, side, grown_bytes / 1e6)
        self._note(
            server,
            f"{count:,} timers wait, sent in {sent_s:.0f} s ({count / sent_s:,.0f} msg/s), "
            f"{grown_bytes / 1e6:,.0f} MB more",
        )

    def _settle(self, server: Server) -> None:
        """Wait until the broker has sorted in all timers that it was sent."""
        deadline = time.monotonic() + SETTLE_TIMEOUT_S
        while (behind := server.timers_behind()) > 0:
            if time.monotonic() > deadline:
                raise Failed(f"{server.name} is still {behind:,} timers behind")
            time.sleep(SETTLE_INTERVAL_S)

    def _burst(self, side: Side, server: Server) -> None:
        """Timers that are all due at once, taken by a consumer that waits for them."""
        count, lead_ms = self._sizes.burst, self._sizes.burst_lead_ms
        topic, due_ms = self._send_burst(server, count, lead_ms)
        while (left_ms := due_ms - now_ms()) < LEAD_LEFT_MS:
            self._note(server, f"took {lead_ms - left_ms} ms to send {count:,} timers; once more")
            lead_ms *= 2
            topic, due_ms = self._send_burst(server, count, lead_ms)
        group = server.create_group(topic)
        came = receive_burst(server.broker_port, group, topic, count, timeout_s=BURST_TIMEOUT_S)
        if came.first_ms < due_ms and not server.is_peer:
            raise Failed(f"a timer came {due_ms - came.first_ms} ms early")
        self.samples.add(OUT, side, came.rate)
        self._note(
            server,
            f"{OUT} {came.rate:,.0f} msg/s, the first {came.first_ms - due_ms} ms and the last "
            f"{came.last_ms - due_ms} ms after they were due",
        )

    def _send_burst(self, server: Server, count: int, lead_ms: int) -> tuple[str, int]:
        """Where they will come, and when."""
        topic = f"burst-{next(self._bursts)}"
        server.create_topic(topic)
        due_ms = now_ms() + lead_ms
        send_timed(server.broker_port, topic, count, lambda _: due_ms)
        return topic, due_ms

    def _offers(self, _side: Side, server: Server) -> None:
        server.create_topic("offers")
        send_offers(server.broker_port, "offers", self._sizes.offers)

    def _scan_sql(self, side: Side, server: Server) -> None:
        self._scan(side, server, SQL, SQL_COST, SQL_RATE, SQL_SHARE)

    def _scan_all(self, side: Side, server: Server) -> None:
        self._scan(side, server, None, ALL_COST, ALL_RATE, 1.0)

    def _scan(
        self, side: Side, server: Server, sql: str | None, cost: str, rate: str, share: float
    ) -> None:
        group = server.create_group("offers")
        place = server.broker_port, group, "offers"
        scan(*place, sql=sql, seconds=self._pace.warm_s)
        before_s = server.cpu_seconds()
        seen = scan(*place, sql=sql, seconds=self._pace.measured_s)
        cpu_us = (server.cpu_seconds() - before_s) / seen.count * 1e6
        check_share(seen.passed / seen.count, share)
        self.samples.add(rate, side, seen.count / seen.seconds)
        self.samples.add(cost, side, cpu_us)
        self._note(
            server, f"{cost} {cpu_us:.2f} CPU us a message, {seen.count / seen.seconds:,.0f} msg/s"
        )

    def _retry(self, side: Side, server: Server) -> None:
        """Each message once for each group, and a group for each turn, as consumers do it."""
        group = server.create_group("offers")
        positions = iter(log_positions(server.broker_port, group, "offers", self._sizes.offers))
        place = server.broker_port, group, "offers", positions
        send_back(*place, seconds=self._pace.warm_s / 2)
        done = send_back(*place, seconds=self._pace.measured_s)
        self._done(side, server, RETRY, done)

    def _pop(self, side: Side, server: Server) -> None:
        place = server.broker_port, server.create_group("offers"), "offers"
        broker = server.broker_name("offers")
        pop_and_acknowledge(*place, broker=broker, seconds=self._pace.warm_s / 2)
        done = pop_and_acknowledge(*place, broker=broker, seconds=self._pace.measured_s)
        self._done(side, server, POP, done)

    def _done(self, side: Side, server: Server, figure: str, done: Done) -> None:
        if not done.count:
            raise Failed(f"{server.name}: no message was left to measure {figure}")
        self.samples.add(figure, side, done.rate)
        self._note(server, f"{figure} {done.rate:,.0f} msg/s, of {done.count:,}")


def check_share(passed: float, expected: float) -> None:
    """Raise Failed unless a subscription lets pass what it must; a part was gone through only."""
    if not expected * 0.8 <= passed <= expected * 1.2:
        raise Failed(f"{passed:.2%} of the messages passed where {expected:.2%} are to")
