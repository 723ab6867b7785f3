"""Kafka Streams, killed in the middle of its work: an application that counts words exactly once
has counted each of them once, with its store, its changelog and its topics for itself at Sluice.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Iterable
from pathlib import Path

import pytest
from confluent_kafka import Consumer, Producer, TopicPartition

from peers import PeerUnavailable, fetch
from peers.artifacts import KAFKA_STREAMS
from peers.java import JavaPrograms
from peers.programs import RunningProgram
from tests.interop.kafka_scenarios import LIMIT_S, PARTITIONS, make_topic
from tests.interop.test_kafka_groups import KafkaSluice

LINES, COUNTS = "lines", "counts"
STEP = 10  # lines that are written at a time, while it works
MORE = 1000  # lines after it was killed
COMMITTED, OPEN = 100, 20  # counts that are there when it is killed, and those that it began with
JAVA_OPTIONS = ("-Dorg.slf4j.simpleLogger.defaultLogLevel=error",)
pytestmark = pytest.mark.soak


def line(number: int) -> str:
    return f"all w{number % 3} w{number % 7} w{number % 11}"


def write(address: str, numbers: Iterable[int]) -> None:
    producer = Producer({"bootstrap.servers": address, "enable.idempotence": True})
    for number in numbers:
        producer.produce(LINES, line(number).encode(), partition=number % PARTITIONS)
    assert producer.flush(LIMIT_S) == 0


class Reader:
    """Reads the counts of each word."""

    def __init__(self, address: str, isolation: str = "read_committed") -> None:
        self.total = 0
        self.counts: dict[str, list[int]] = defaultdict(list)
        self._consumer = Consumer(
            {
                "bootstrap.servers": address,
                "group.id": "reader",
                "isolation.level": isolation,
                "enable.auto.commit": False,
            }
        )
        self._consumer.assign([TopicPartition(COUNTS, p, 0) for p in range(PARTITIONS)])

    def read_out(self) -> None:
        """Up to the end, whoever writes no more."""
        places = [TopicPartition(COUNTS, p) for p in range(PARTITIONS)]
        ends = [self._consumer.get_watermark_offsets(place, LIMIT_S)[1] for place in places]
        deadline = time.monotonic() + LIMIT_S
        while [place.offset for place in self._consumer.position(places)] != ends:
            assert time.monotonic() < deadline
            self.take()
        self._consumer.close()

    def take(self) -> None:
        """What is there by now."""
        for message in self._consumer.consume(500, 0.05):
            assert message.error() is None, message.error()
            key, value = message.key(), message.value()
            assert key is not None
            assert value is not None
            self.counts[key.decode()].append(int(value))
            self.total += 1


def in_the_middle(address: str, committed: Reader, application: RunningProgram) -> int:
    """Write lines until the application has begun with more than it has committed; how many."""
    begun = Reader(address, "read_uncommitted")
    written = 0
    deadline = time.monotonic() + LIMIT_S
    while committed.total < COMMITTED or begun.total < committed.total + OPEN:
        write(address, range(written, written + STEP))
        written += STEP
        committed.take()
        begun.take()
        assert application.running, application.tail()
        assert time.monotonic() < deadline, application.tail()
    return written


def test_an_application_that_is_killed_counts_once(tmp_path: Path) -> None:
    try:
        programs = JavaPrograms(
            Path(__file__).parent / "kafka_java",
            fetch(KAFKA_STREAMS),
            home=tmp_path / "java",
            options=JAVA_OPTIONS,
        )
    except PeerUnavailable as error:
        pytest.skip(error.reason)
    with KafkaSluice(tmp_path / "sluice") as sluice:
        address = sluice.kafka_address
        for topic in (LINES, COUNTS):
            make_topic(address, topic, records=0)
        reader = Reader(address)
        arguments = (address, LINES, COUNTS, str(tmp_path / "store"))
        with programs.started("Counting", *arguments) as application:
            written = in_the_middle(address, reader, application)
            application.kill()
        write(address, range(written, written + MORE))
        words = Counter(word for number in range(written + MORE) for word in line(number).split())
        with programs.started("Counting", *arguments) as application:
            deadline = time.monotonic() + LIMIT_S
            while reader.total < words.total():
                assert application.running, application.tail()
                assert time.monotonic() < deadline, f"{application.tail()}\n{reader.counts}"
                reader.take()
            application.stop(LIMIT_S)
        reader.read_out()
    assert reader.counts == {word: [*range(1, count + 1)] for word, count in words.items()}
