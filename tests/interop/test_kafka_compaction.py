"""This module lets Kafka's clients write to compacted topics and read what compaction leaves of
them; and compares that with what Apache Kafka leaves of the same records.
"""

from __future__ import annotations

import importlib
import subprocess
import time
from collections.abc import Iterator
from random import Random
from typing import Any
from uuid import uuid4

import confluent_kafka
import pytest

from peers import PeerUnavailable, fetch
from peers.artifacts import KAFKA
from peers.java import java_command
from peers.kafka import Kafka
from peers.process import free_ports
from tests.interop.kafka_reading import WAIT_S, until
from tests.interop.sluice_process import SluiceProcess

confluent_admin: Any = importlib.import_module("confluent_kafka.admin")

CODECS = ("none", "gzip", "snappy", "lz4", "zstd")
COMPACTED = {"cleanup.policy": "compact", "min.cleanable.dirty.ratio": "0.01"}
SEGMENT_S = 0.3  # after so long, Apache's broker begins a new file
Seen = list[tuple[int, bytes, bytes | None]]


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    (port,) = free_ports(1)
    directory = tmp_path_factory.mktemp("compaction")
    flags = ("--kafka", "on", "--kafka-port", str(port), "--compaction-interval-ms", "100")
    with SluiceProcess(directory, *flags):
        yield f"127.0.0.1:{port}"


def make_topic(address: str, name: str, config: dict[str, str]) -> None:
    admin = confluent_admin.AdminClient({"bootstrap.servers": address})
    made = admin.create_topics([confluent_admin.NewTopic(name, 1, 1, config=config)])
    made[name].result(WAIT_S)


def produce(
    address: str, topic: str, pairs: list[tuple[bytes, bytes | None]], **settings: Any
) -> None:
    """One batch, or a few."""
    producer = confluent_kafka.Producer(
        {"bootstrap.servers": address, "linger.ms": 20, "enable.idempotence": True, **settings}
    )
    for key, value in pairs:
        producer.produce(topic, value, key, partition=0)
    assert producer.flush(WAIT_S) == 0


def transact(address: str, topic: str, pairs: list[tuple[bytes, bytes]], *, commit: bool) -> None:
    producer = confluent_kafka.Producer(
        {"bootstrap.servers": address, "transactional.id": f"{topic}-writer"}
    )
    producer.init_transactions(WAIT_S)
    producer.begin_transaction()
    for key, value in pairs:
        producer.produce(topic, value, key, partition=0)
    if commit:
        producer.commit_transaction(WAIT_S)
    else:
        producer.abort_transaction(WAIT_S)


def read(address: str, topic: str) -> Seen:
    """All that a partition has, up to its end."""
    consumer = confluent_kafka.Consumer(
        {
            "bootstrap.servers": address,
            "group.id": "nobody",
            "enable.auto.commit": False,
            "enable.partition.eof": True,
            "isolation.level": "read_committed",
        }
    )
    consumer.assign([confluent_kafka.TopicPartition(topic, 0, 0)])
    seen: Seen = []

    def is_over() -> bool:
        message = consumer.poll(1.0)
        if message is None:
            return False
        error = message.error()
        if error is None:
            offset, key = message.offset(), message.key()
            assert offset is not None
            assert key is not None
            seen.append((offset, key, message.value()))
            return False
        assert error.code() == confluent_kafka.KafkaError._PARTITION_EOF, error
        return True

    try:
        until(is_over)
    finally:
        consumer.close()
    return seen


def is_compacted(seen: Seen) -> bool:
    """Whether each key is there once, but for the newest record, which is not looked at."""
    keys = [key for _, key, _ in seen[:-1]]
    return len(keys) == len(set(keys))


def compacted(address: str, topic: str) -> Seen:
    """What is left of a topic when all of it was compacted."""
    found: Seen = []

    def is_done() -> bool:
        found[:] = read(address, topic)
        return is_compacted(found)

    until(is_done)
    return found


def write_keys(address: str, topic: str) -> dict[bytes, bytes]:
    """Twenty keys, each once in batches of every codec; what each has in the end."""
    newest: dict[bytes, bytes] = {}
    for number, codec in enumerate(CODECS):
        keys = Random(number).sample(range(20), 15)
        pairs = [(b"key-%d" % key, b"%b-%d" % (codec.encode(), key) * 20) for key in keys]
        produce(address, topic, list(pairs), **{"compression.type": codec})
        newest.update(pairs)
    produce(address, topic, [(b"end", b"end")])
    newest[b"end"] = b"end"
    return newest


def test_the_newest_of_each_key_stays(address: str) -> None:
    topic = f"table-{uuid4().hex}"
    make_topic(address, topic, COMPACTED)
    newest = write_keys(address, topic)
    seen = compacted(address, topic)
    assert {key: value for _, key, value in seen} == newest
    assert [offset for offset, _, _ in seen] == sorted(offset for offset, _, _ in seen)
    assert seen[-1][0] == 15 * len(CODECS)
    assert refusal(address, topic) == confluent_kafka.KafkaError.INVALID_RECORD


def refusal(address: str, topic: str) -> int:
    """The error that a record without a key gets."""
    errors: list[Any] = []
    producer = confluent_kafka.Producer({"bootstrap.servers": address})
    producer.produce(
        topic, b"no key", partition=0, on_delivery=lambda error, _: errors.append(error)
    )
    assert producer.flush(WAIT_S) == 0
    assert errors[0] is not None
    return int(errors[0].code())


# ------------------------------------------------------------------------------ beside Apache's own


@pytest.fixture(scope="module")
def apache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    config = {"log.cleaner.backoff.ms": 200, "log.retention.check.interval.ms": 500}
    try:
        peer = Kafka(tmp_path_factory.mktemp("apache"), config=config)
    except PeerUnavailable as error:
        pytest.skip(error.reason)
    with peer:
        yield peer.address


def write_all(address: str, topic: str) -> None:
    """Batches of all codecs, tombstones and transactions; the last record in a file of its own."""
    random = Random(5)
    for number in range(12):
        codec = CODECS[number % len(CODECS)]
        pairs: list[tuple[bytes, bytes | None]] = [
            (b"k%d" % random.randrange(12), None if random.random() < 0.2 else b"v%d" % number * 30)
            for _ in range(10)
        ]
        produce(address, topic, pairs, **{"compression.type": codec})
        if number in (3, 7):
            transact(address, topic, [(b"k1", b"t%d" % number)], commit=number == 3)
    time.sleep(SEGMENT_S)
    produce(address, topic, [(b"end", b"end")])


@pytest.mark.soak
@pytest.mark.parametrize("tombstones", ["stay", "go"])
def test_apache_leaves_the_same(address: str, apache: str, tombstones: str) -> None:
    topic = f"same-{tombstones}"
    config = {**COMPACTED, "delete.retention.ms": "100000000" if tombstones == "stay" else "1"}
    for each in (apache, address):
        make_topic(each, topic, {**config, "segment.ms": "100"})
        write_all(each, topic)
    theirs, ours = compacted(apache, topic), compacted(address, topic)
    if tombstones == "stay":
        assert ours == theirs
        assert any(value is None for _, _, value in ours)
        return
    # When the next record has made work, those whose time is over go.
    found: list[Seen] = []

    def is_done() -> bool:
        found[:] = []
        for each in (apache, address):
            produce(each, topic, [(b"more", b"more")])
            time.sleep(SEGMENT_S)
            produce(each, topic, [(b"end", b"end")])
            found.append(compacted(each, topic))
        return all(value is not None for seen in found for _, _, value in seen)

    until(is_done)
    assert found[0] == found[1]


@pytest.mark.soak
def test_java_reads_what_is_left(address: str) -> None:
    try:
        jars = fetch(KAFKA)
    except PeerUnavailable as error:
        pytest.skip(error.reason)
    make_topic(address, "for-java", {**COMPACTED, "delete.retention.ms": "100000000"})
    write_all(address, "for-java")
    expected = compacted(address, "for-java")
    done = subprocess.run(
        [
            *(java_command(), "-Xmx256m", "-XX:TieredStopAtLevel=1"),
            *("-cp", jars.class_path, "org.apache.kafka.tools.consumer.ConsoleConsumer"),
            *("--bootstrap-server", address, "--topic", "for-java", "--from-beginning"),
            *("--max-messages", str(len(expected)), "--isolation-level", "read_committed"),
            *("--formatter-property", "print.key=true"),
            *("--formatter-property", "print.offset=true"),
        ],
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    seen = []
    for line in done.stdout.splitlines():
        offset, key, value = line.split("\t")
        seen.append((int(offset.partition(":")[2]), key.encode(), value.encode()))
    assert seen == [(at, key, b"null" if value is None else value) for at, key, value in expected]
