"""This module measures the door for Kafka's clients beside Apache Kafka, with Kafka's own programs
(ProducerPerformance, ConsumerPerformance, EndToEndLatency: the same jars for both sides) and with
librdkafka.

Both brokers run at one time; the one whose turn it is not is stopped. They take turns for each
program, and who begins changes from round to round: what a machine does to one side for a minute it
mostly does to the other, too. The first round warms both sides and is not counted, and producers
send for some seconds before they are measured: until then their JVM compiles them, on the same two
cores. Neither side waits for the disk, which is Kafka's default.

Each group of programs has brokers of its own, whose directories go when it is over: what all turns
send together would not fit on many a disk.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from bench.harness import Figure, Run
from bench.kafka_programs import Rates, Rdkafka, Tools
from bench.processes import cpu_seconds
from bench.rocketmq_servers import Sluice
from bench.sides import Samples, Side, wanted_figures
from peers.artifacts import KAFKA
from peers.fetch import Jars, fetch
from peers.kafka import Kafka
from peers.process import free_ports

PEER = "Apache Kafka 4.3.0"
PARTITIONS = 8
MANY_PARTITIONS = 1_000
LARGE_BYTES, SMALL_BYTES = 1024, 100
PACE = 50_000  # records a second: less than half of what either side can do
STOPPED_MS_MAX = 3_600_000
UNITS = {
    "kafka_produce_1k_all": "records/s",
    "kafka_produce_1k_1": "records/s",
    "kafka_produce_100": "records/s",
    "kafka_produce_100_1": "records/s",
    "kafka_produce_1k_first": "records/s",  # while the producer's JVM compiles it
    "kafka_produce_100_first": "records/s",
    "kafka_consume_1k": "records/s",
    "kafka_produce_1k_1000p": "records/s",
    "kafka_consume_1k_1000p": "records/s",
    "kafka_rdkafka_produce_1k": "records/s",
    "kafka_rdkafka_consume_1k": "records/s",
    "kafka_paced_ms": "ms",
    "kafka_paced_p99_ms": "ms",
    "kafka_e2e_ms": "ms",
    "kafka_cpu_s": "s",  # of the broker, for a million records of 1 KiB with acks=all
}


@dataclass(frozen=True, slots=True)
class Amounts:
    """How many records each program sends, and how often each side has its turn."""

    large: int  # of 1 KiB, at least; as many come before, from a producer that has just started
    small: int  # of 100 bytes, likewise
    producing_s: float  # how long a producer of those is to send before and while it is measured
    most: int  # times as many of those, at the most
    consumed: int  # of 1 KiB
    rdkafka: int  # of 1 KiB
    many: int  # of 1 KiB, over many partitions
    paced: int  # of 1 KiB, so many a second; as many again come before and are not counted
    latency: int  # one after the other; of 5,000 half of the mean is the client's compiler
    rounds: int


FULL = Amounts(
    large=1_000_000,
    small=3_000_000,
    producing_s=7,
    most=3,
    consumed=2_000_000,
    rdkafka=1_000_000,
    many=300_000,
    paced=250_000,
    latency=30_000,
    rounds=3,
)
QUICK = Amounts(
    large=100_000,
    small=300_000,
    producing_s=0,
    most=1,
    consumed=200_000,
    rdkafka=100_000,
    many=50_000,
    paced=50_000,
    latency=1_000,
    rounds=1,
)


class OurSide(Sluice):
    """`sluice serve` as it is, with Kafka's door on a port of its own."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory, flush="async")
        (port,) = free_ports(1)
        self.address = f"127.0.0.1:{port}"
        self._command += ["--kafka", "on", "--kafka-port", str(port)]


class Contestant:
    """One side: where it is, and who it is to the system."""

    def __init__(self, side: Side, address: str, pid: int) -> None:
        self.side = side
        self.address = address
        self.pid = pid

    def cpu_seconds(self) -> float:
        return cpu_seconds([self.pid])

    @contextlib.contextmanager
    def turn(self) -> Iterator[None]:
        os.sync()  # so that the disk is at rest: the other side has written, too
        os.killpg(self.pid, signal.SIGCONT)
        try:
            yield
        finally:
            os.killpg(self.pid, signal.SIGSTOP)


class Counts:
    """How many records a warm producer sends to a kind of topic, and as many before: those of some
    seconds. A machine that is three times as quick needs three times as many, or its producer is
    compiled while it is measured. The first round, which is not counted, tells how quick it is.
    """

    def __init__(self, amounts: Amounts) -> None:
        self._amounts = amounts
        self._rates: dict[str, float] = {}

    def of(self, kind: str, least: int) -> int:
        wanted = int(self._rates.get(kind, 0.0) * self._amounts.producing_s)
        return max(least, min(wanted, least * self._amounts.most))

    def learn(self, kind: str, rate: float) -> None:
        """The quicker side counts: both send as many."""
        self._rates[kind] = max(rate, self._rates.get(kind, 0.0))


def measure(run: Run) -> list[Figure]:
    """All figures that are wanted, each the median of its rounds."""
    wanted = wanted_figures(run, UNITS)
    samples = Samples(UNITS, dict.fromkeys(UNITS, PEER))
    for place, parts in enumerate(GROUPS):
        if not wanted.isdisjoint(figure for part in parts for figure in part.figures):
            _measure_group(run, run.directory / f"group-{place}", parts, wanted, samples)
    return [samples.figure(name) for name in UNITS if name in wanted]


def _measure_group(
    run: Run, directory: Path, parts: Sequence[Part], wanted: set[str], samples: Samples
) -> None:
    amounts = QUICK if run.quick else FULL
    counts = Counts(amounts)
    with contextlib.ExitStack() as started:
        started.callback(shutil.rmtree, directory, ignore_errors=True)
        tools, contestants = _start(run, directory, started)
        for number in range(amounts.rounds + 1):
            turns = [
                Turn(tools, Rdkafka(), contestant, amounts, counts, number, wanted)
                for contestant in contestants[:: -1 if number % 2 else 1]
            ]
            for part in parts:
                for turn in turns:
                    for figure, value in turn.take(part).items():
                        run.progress(f"round {number}: {figure} {turn.side} {value:,.2f}")
                        if number:  # the first one only warms its side
                            samples.add(figure, turn.side, value)


def peer_broker(directory: Path, jars: Jars) -> Kafka:
    """Apache's broker, which is stopped whenever it is not its turn: its controller must not take
    it for dead because of that.
    """
    config = {"broker.session.timeout.ms": STOPPED_MS_MAX}
    return Kafka(directory, config=config, heap_mb=1024, java_options=(), jars=jars)


def _start(
    run: Run, directory: Path, started: contextlib.ExitStack
) -> tuple[Tools, list[Contestant]]:
    jars = fetch(KAFKA)
    ours = OurSide(directory / "ours")
    ours.start()
    started.callback(ours.kill)
    contestants = [Contestant("ours", ours.address, ours.pids()[0])]
    if not run.ours_only:
        peer = peer_broker(directory / "peer", jars)
        started.enter_context(peer)
        contestants.append(Contestant("peer", peer.address, peer.pid))
    for contestant in contestants:
        # Nobody is killed while it is stopped, so that leaving never waits for it.
        started.callback(os.killpg, contestant.pid, signal.SIGCONT)
        os.killpg(contestant.pid, signal.SIGSTOP)
    return Tools(jars), contestants


class Turn:
    """One turn of one side: what it measures, and on which topics."""

    def __init__(
        self,
        tools: Tools,
        rdkafka: Rdkafka,
        contestant: Contestant,
        amounts: Amounts,
        counts: Counts,
        number: int,
        wanted: set[str],
    ) -> None:
        self._tools = tools
        self._rdkafka = rdkafka
        self._contestant = contestant
        self._address = contestant.address
        self._amounts = amounts
        self._counts = counts
        self._number = number
        self._wanted = wanted
        self._measured: dict[str, float] = {}

    @property
    def side(self) -> Side:
        return self._contestant.side

    def take(self, part: Part) -> dict[str, float]:
        """Measure what is wanted of a part, while only this side runs."""
        if not self._wants(*part.figures):
            return {}
        self._measured = {}
        with self._contestant.turn():
            part.measure(self)
        return self._measured

    def _wants(self, *figures: str) -> bool:
        return not self._wanted.isdisjoint(figures)

    def _note(self, figure: str, value: float) -> None:
        if figure in self._wanted:
            self._measured[figure] = value

    def _topic(self, name: str, partitions: int = PARTITIONS) -> str:
        """A topic of this turn."""
        topic = f"bench-{self._number}-{name}"
        self._tools.make_topic(self._address, topic, partitions)
        return topic

    def _produce(self, kind: str, least: int, size: int, acks: str) -> tuple[Rates, int]:
        """The rates of a producer that gets warm first, and how many records it sent in all."""
        count = self._counts.of(kind, least)
        rates = self._tools.produce_warm(self._address, self._topic(kind), count, size, acks)
        if not self._number:
            self._counts.learn(kind, rates.steady)
        return rates, 2 * count

    def large(self) -> None:
        before_s = self._contestant.cpu_seconds()
        rates, count = self._produce("large", self._amounts.large, LARGE_BYTES, "all")
        cpu_s = self._contestant.cpu_seconds() - before_s
        self._note("kafka_produce_1k_all", rates.steady)
        self._note("kafka_produce_1k_first", rates.first)
        self._note("kafka_cpu_s", cpu_s / (count / 1_000_000))

    def large_acks_1(self) -> None:
        rates, _ = self._produce("large-acks-1", self._amounts.large, LARGE_BYTES, "1")
        self._note("kafka_produce_1k_1", rates.steady)

    def small(self) -> None:
        rates, _ = self._produce("small", self._amounts.small, SMALL_BYTES, "all")
        self._note("kafka_produce_100", rates.steady)
        self._note("kafka_produce_100_first", rates.first)

    def small_acks_1(self) -> None:
        rates, _ = self._produce("small-acks-1", self._amounts.small, SMALL_BYTES, "1")
        self._note("kafka_produce_100_1", rates.steady)

    def consumed(self) -> None:
        topic, count = self._topic("consumed"), self._amounts.consumed
        self._tools.produce(self._address, topic, count, LARGE_BYTES, "all")
        self._note("kafka_consume_1k", self._tools.consume(self._address, topic, count))

    def many_partitions(self) -> None:
        """All turns have this topic in common: the peer would have thousands of files for each."""
        topic, count = "bench-many", self._amounts.many
        if not self._number:
            self._tools.make_topic(self._address, topic, MANY_PARTITIONS)
        rate = self._tools.produce(self._address, topic, count, LARGE_BYTES, "all")
        self._note("kafka_produce_1k_1000p", rate)
        if self._wants("kafka_consume_1k_1000p"):
            self._note("kafka_consume_1k_1000p", self._tools.consume(self._address, topic, count))

    def with_rdkafka(self) -> None:
        place = self._address, self._topic("rdkafka"), self._amounts.rdkafka, LARGE_BYTES
        self._note("kafka_rdkafka_produce_1k", self._rdkafka.produce(*place))
        if self._wants("kafka_rdkafka_consume_1k"):
            self._note("kafka_rdkafka_consume_1k", self._rdkafka.consume(*place))

    def paced(self) -> None:
        place = self._address, self._topic("paced"), self._amounts.paced, LARGE_BYTES
        mean_ms, p99_ms = self._tools.paced_ms(*place, PACE)
        self._note("kafka_paced_ms", mean_ms)
        self._note("kafka_paced_p99_ms", p99_ms)

    def latency(self) -> None:
        topic = self._topic("latency", 1)
        latency_ms = self._tools.latency_ms(self._address, topic, self._amounts.latency)
        self._note("kafka_e2e_ms", latency_ms)


class Part(NamedTuple):
    """Programs of one turn, one after the other, and the figures that they are run for."""

    measure: Callable[[Turn], None]
    figures: tuple[str, ...]


GROUPS = (
    (Part(Turn.large, ("kafka_produce_1k_all", "kafka_produce_1k_first", "kafka_cpu_s")),),
    (Part(Turn.large_acks_1, ("kafka_produce_1k_1",)),),
    (
        Part(Turn.small, ("kafka_produce_100", "kafka_produce_100_first")),
        Part(Turn.small_acks_1, ("kafka_produce_100_1",)),
    ),
    (
        Part(Turn.consumed, ("kafka_consume_1k",)),
        Part(Turn.many_partitions, ("kafka_produce_1k_1000p", "kafka_consume_1k_1000p")),
        Part(Turn.with_rdkafka, ("kafka_rdkafka_produce_1k", "kafka_rdkafka_consume_1k")),
        Part(Turn.paced, ("kafka_paced_ms", "kafka_paced_p99_ms")),
        Part(Turn.latency, ("kafka_e2e_ms",)),
    ),
)
