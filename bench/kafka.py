"""This module measures the door for Kafka's clients beside Apache Kafka, with Kafka's own programs:
ProducerPerformance, ConsumerPerformance and EndToEndLatency, the same jars for both sides.

Both brokers run at one time; the one whose turn it is not is stopped. The first turn of each side
warms it and is not counted. Neither side waits for the disk, which is Kafka's default.
"""

import contextlib
import os
import re
import signal
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from bench.harness import Failed, Figure, Run
from bench.processes import cpu_seconds
from bench.rocketmq_servers import Sluice
from bench.sides import Samples, Side, wanted_figures
from peers.artifacts import KAFKA
from peers.fetch import Jars, fetch
from peers.java import java_command
from peers.kafka import Kafka
from peers.process import free_ports

PEER = "Apache Kafka 4.3.0"
PARTITIONS = 8
PROGRAM_TIMEOUT_S = 600
UNITS = {
    "kafka_produce_1k_all": "records/s",
    "kafka_produce_1k_1": "records/s",
    "kafka_produce_100": "records/s",
    "kafka_consume_1k": "records/s",
    "kafka_e2e_ms": "ms",
    "kafka_cpu_s": "s",  # of the broker, for a million records of 1 KiB with acks=all
}
_RATE = re.compile(r"^\d+ records sent, ([\d.]+) records/sec", re.MULTILINE)
_LATENCY = re.compile(r"Avg latency: ([\d.]+) ms")


@dataclass(frozen=True, slots=True)
class Amounts:
    """How many records each program sends, and how often each side has its turn."""

    large: int  # of 1 KiB
    small: int  # of 100 bytes
    latency: int
    rounds: int


FULL = Amounts(1_000_000, 3_000_000, 5_000, 3)
QUICK = Amounts(200_000, 500_000, 1_000, 1)


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
        os.killpg(self.pid, signal.SIGCONT)
        try:
            yield
        finally:
            os.killpg(self.pid, signal.SIGSTOP)


class Tools:
    """Kafka's programs."""

    def __init__(self, jars: Jars) -> None:
        self._jars = jars

    def run(self, program: str, *words: str) -> str:
        """What a program says; Failed where it says nothing good."""
        done = subprocess.run(
            [
                *(java_command(), "-Xmx512m"),
                "-Dorg.slf4j.simpleLogger.defaultLogLevel=error",
                *("-cp", self._jars.class_path, f"org.apache.kafka.tools.{program}", *words),
            ],
            capture_output=True,
            text=True,
            timeout=PROGRAM_TIMEOUT_S,
            check=False,
        )
        if done.returncode:
            raise Failed(f"{program}: {done.stdout[-500:]} {done.stderr[-500:]}")
        return done.stdout

    def make_topic(self, address: str, topic: str, partitions: int) -> None:
        self.run(
            *("TopicCommand", "--bootstrap-server", address, "--create", "--topic", topic),
            *("--partitions", str(partitions)),
        )

    def produce(self, address: str, topic: str, count: int, size: int, acks: str) -> float:
        """Records a second, over the whole run."""
        said = self.run(
            *("ProducerPerformance", "--topic", topic, "--num-records", str(count)),
            *("--record-size", str(size), "--throughput", "-1", "--producer-props"),
            *(f"bootstrap.servers={address}", f"acks={acks}"),
        )
        return float(_RATE.findall(said)[-1])

    def consume(self, address: str, topic: str, count: int) -> float:
        """Records a second while they flow: without the time in which the group forms."""
        said = self.run(
            *("ConsumerPerformance", "--bootstrap-server", address, "--topic", topic),
            *("--num-records", str(count)),
        )
        return float(said.strip().splitlines()[-1].split(",")[9])

    def latency_ms(self, address: str, topic: str, count: int) -> float:
        """From a record's send to its arrival at a consumer, one record at a time."""
        said = self.run("EndToEndLatency", address, topic, str(count), "all", "1024")
        found = _LATENCY.search(said)
        if found is None:
            raise Failed(f"EndToEndLatency: {said[-500:]}")
        return float(found.group(1))


def measure(run: Run) -> list[Figure]:
    """All figures that are wanted, each the median of its rounds."""
    wanted = wanted_figures(run, UNITS)
    amounts = QUICK if run.quick else FULL
    samples = Samples(UNITS, dict.fromkeys(UNITS, PEER))
    with contextlib.ExitStack() as started:
        tools, contestants = _start(run, started)
        for number in range(amounts.rounds + 1):
            for contestant in contestants:
                run.progress(f"round {number}: {contestant.side}")
                with contestant.turn():
                    _round(tools, contestant, amounts, wanted, samples, number)
    return [samples.figure(name) for name in UNITS if name in wanted]


def _start(run: Run, started: contextlib.ExitStack) -> tuple[Tools, list[Contestant]]:
    jars = fetch(KAFKA)
    ours = OurSide(run.directory / "ours")
    ours.start()
    started.callback(ours.kill)
    contestants = [Contestant("ours", ours.address, ours.pids()[0])]
    if not run.ours_only:
        peer = Kafka(run.directory / "peer", heap_mb=1024, java_options=(), jars=jars)
        started.enter_context(peer)
        contestants.append(Contestant("peer", peer.address, peer.pid))
    for contestant in contestants:
        # Nobody is killed while it is stopped, so that leaving never waits for it.
        started.callback(os.killpg, contestant.pid, signal.SIGCONT)
        os.killpg(contestant.pid, signal.SIGSTOP)
    return Tools(jars), contestants


def _round(
    tools: Tools,
    contestant: Contestant,
    amounts: Amounts,
    wanted: set[str],
    samples: Samples,
    number: int,
) -> None:
    """One turn of one side; the first one only warms it."""
    address, side = contestant.address, contestant.side

    def note(figure: str, measured: Callable[[], float]) -> None:
        if figure in wanted:
            value = measured()
            if number:
                samples.add(figure, side, value)

    topic = f"bench-{number}"
    tools.make_topic(address, topic, PARTITIONS)
    before_s = contestant.cpu_seconds()
    rate = tools.produce(address, topic, amounts.large, 1024, "all")
    cpu_s = (contestant.cpu_seconds() - before_s) / (amounts.large / 1_000_000)
    note("kafka_produce_1k_all", lambda: rate)
    note("kafka_cpu_s", lambda: cpu_s)
    note("kafka_consume_1k", lambda: tools.consume(address, topic, amounts.large))
    for figure, count, size, acks in (
        ("kafka_produce_1k_1", amounts.large, 1024, "1"),
        ("kafka_produce_100", amounts.small, 100, "all"),
    ):
        if figure in wanted:
            other = f"{topic}-{size}-{acks}"
            tools.make_topic(address, other, PARTITIONS)
            note(figure, partial(tools.produce, address, other, count, size, acks))
    if "kafka_e2e_ms" in wanted:
        tools.make_topic(address, f"{topic}-latency", 1)
    note("kafka_e2e_ms", lambda: tools.latency_ms(address, f"{topic}-latency", amounts.latency))
