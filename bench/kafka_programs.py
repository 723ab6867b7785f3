"""This module runs the programs that `kafka.py` measures with: Kafka's own, which are Java, and
librdkafka, the library in C that most other languages' clients are made of.
"""

import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from bench.clients.loads import Job, reported
from bench.harness import ROOT, Failed
from bench.spark_senders import make_kafka_topic
from peers.fetch import Jars
from peers.java import java_command

PROGRAM_TIMEOUT_S = 600
# A consumer of librdkafka is warm after this time, or after a part of its topic.
WARM_S = 1.0
_RATE = re.compile(r"^\d+ records sent, ([\d.]+) records/sec", re.MULTILINE)
_STEADY_RATE = re.compile(r"^\d+ steady state records sent, ([\d.]+) records/sec", re.MULTILINE)
_PACED = re.compile(
    r"^\d+ steady state records sent.* ([\d.]+) ms avg .* ([\d.]+) ms 99th", re.MULTILINE
)
_LATENCY = re.compile(r"Avg latency: ([\d.]+) ms")
# The tools print what went wrong with a record, and end as if all were well.
_ERROR = re.compile(r"^org\.apache\.kafka\.common\.errors\.\w+: .*", re.MULTILINE)
_TAIL_CHARS = 500


def _output(name: str, command: Sequence[str], environment: Mapping[str, str] | None = None) -> str:
    """What a program says; Failed where it says nothing good."""
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=PROGRAM_TIMEOUT_S,
        check=False,
        env=None if environment is None else {**os.environ, **environment},
    )
    if done.returncode:
        raise Failed(f"{name}: {done.stdout[-_TAIL_CHARS:]} {done.stderr[-_TAIL_CHARS:]}")
    if error := _ERROR.search(done.stderr):
        raise Failed(f"{name}: {error.group()}")
    return done.stdout


class Rates(NamedTuple):
    """Records a second of a producer: of the first half, in which its JVM compiles it, and of the
    second one.
    """

    first: float
    steady: float


def produced_rates(said: str, count: int) -> Rates:
    """What ProducerPerformance says of so many records after as many that warmed it."""
    whole, steady = _RATE.findall(said), _STEADY_RATE.findall(said)
    if not whole or not steady:
        raise Failed(f"ProducerPerformance: {said[-_TAIL_CHARS:]}")
    whole_s, steady_s = 2 * count / float(whole[-1]), count / float(steady[-1])
    return Rates(count / (whole_s - steady_s), float(steady[-1]))


class Tools:
    """Kafka's programs."""

    def __init__(self, jars: Jars) -> None:
        self._jars = jars

    def run(self, program: str, *words: str) -> str:
        return _output(
            program,
            [
                *(java_command(), "-Xmx512m"),
                "-Dorg.slf4j.simpleLogger.defaultLogLevel=error",
                *("-cp", self._jars.class_path, f"org.apache.kafka.tools.{program}", *words),
            ],
        )

    def make_topic(self, address: str, topic: str, partitions: int) -> None:
        """Without a program of theirs: its start takes longer than all the rest."""
        make_kafka_topic(address, topic, partitions)

    def produce(self, address: str, topic: str, count: int, size: int, acks: str) -> float:
        """Records a second, over the whole run: those of a program that has just started."""
        said = self._perform(address, topic, count, size, acks)
        return float(_RATE.findall(said)[-1])

    def _perform(
        self,
        address: str,
        topic: str,
        count: int,
        size: int,
        acks: str,
        *,
        pace: int = -1,
        warm: int = 0,
    ) -> str:
        """What ProducerPerformance says of so many records, of which the first ones warm it."""
        return self.run(
            *("ProducerPerformance", "--topic", topic, "--num-records", str(count)),
            *(("--warmup-records", str(warm)) if warm else ()),
            *("--record-size", str(size), "--throughput", str(pace), "--producer-props"),
            *(f"bootstrap.servers={address}", f"acks={acks}"),
        )

    def produce_warm(self, address: str, topic: str, count: int, size: int, acks: str) -> Rates:
        """The rates of so many records, and of as many behind them."""
        said = self._perform(address, topic, 2 * count, size, acks, warm=count)
        return produced_rates(said, count)

    def paced_ms(
        self, address: str, topic: str, count: int, size: int, pace: int
    ) -> tuple[float, float]:
        """From a record's send to its acknowledgement by all, at so many records a second: the mean
        and the 99th percentile, after as many records that only warm.
        """
        said = self._perform(address, topic, 2 * count, size, "all", pace=pace, warm=count)
        found = _PACED.search(said)
        if found is None:
            raise Failed(f"ProducerPerformance: {said[-_TAIL_CHARS:]}")
        return float(found.group(1)), float(found.group(2))

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
            raise Failed(f"EndToEndLatency: {said[-_TAIL_CHARS:]}")
        return float(found.group(1))


class Rdkafka:
    """librdkafka with its default settings, driven by a few lines of Python."""

    def produce(self, address: str, topic: str, count: int, size: int) -> float:
        """Records a second with acks=all, until the last one is confirmed."""
        return self._rate(Job("fill", address, topic, "", size, 0, 0, count))

    def consume(self, address: str, topic: str, count: int, size: int) -> float:
        """Records a second of a topic that holds so many, after a fifth of it at the latest."""
        words = ("consume", address, topic, f"{topic}-readers", size)
        return self._rate(Job(*words, WARM_S, PROGRAM_TIMEOUT_S, count))

    def _rate(self, job: Job) -> float:
        command = [sys.executable, "-m", "bench.clients.kafka_confluent", job.words()]
        said = _output(f"librdkafka, {job.kind}", command, {"PYTHONPATH": str(ROOT)})
        report = reported(said)
        if report is None:
            raise Failed(f"librdkafka, {job.kind}: no rate came out of it: {said[-_TAIL_CHARS:]}")
        return report["count"] / report["seconds"]
