"""This module lets the Kafka clients that Python has produce and consume against `sluice serve`:
confluent-kafka (librdkafka), kafka-python and aiokafka, with every codec and kind of acks.
"""

from __future__ import annotations

import asyncio
import importlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import aiokafka
import confluent_kafka
import pytest

from peers.process import free_ports
from tests.interop.kafka_reading import WAIT_S, consume, until
from tests.interop.sluice_process import SluiceProcess

confluent_admin: Any = importlib.import_module("confluent_kafka.admin")

COUNT = 300
CODECS = ("none", "gzip", "snappy", "lz4", "zstd")


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Where Kafka's clients connect to; one broker for all tests of the module."""
    (port,) = free_ports(1)
    directory: Path = tmp_path_factory.mktemp("kafka")
    with SluiceProcess(directory, "--kafka", "on", "--kafka-port", str(port)):
        yield f"127.0.0.1:{port}"


def make_topic(
    address: str, name: str, partitions: int = 1, config: dict[str, str] | None = None
) -> None:
    admin = confluent_admin.AdminClient({"bootstrap.servers": address})
    made = admin.create_topics([confluent_admin.NewTopic(name, partitions, 1, config=config or {})])
    made[name].result(WAIT_S)


def produce(address: str, topic: str, values: list[bytes], **settings: Any) -> list[int]:
    """Values to partition 0 by librdkafka; their offsets."""
    offsets: list[int] = []

    def told(error: Any, message: Any) -> None:
        assert error is None, error
        offsets.append(message.offset())

    producer = confluent_kafka.Producer({"bootstrap.servers": address, "linger.ms": 5, **settings})
    for value in values:
        producer.produce(topic, value, partition=0, on_delivery=told)
    assert producer.flush(WAIT_S) == 0
    return offsets


@pytest.mark.parametrize("codec", CODECS)
def test_librdkafka_with_every_codec(address: str, codec: str) -> None:
    topic = f"confluent.{codec}"
    make_topic(address, topic)
    values = [b"%b-%d" % (codec.encode(), number) for number in range(COUNT)]
    settings = {"compression.type": codec, "enable.idempotence": True}
    assert produce(address, topic, values, **settings) == list(range(COUNT))
    found = consume(address, topic, COUNT)
    assert [message.value() for message in found] == values
    assert [message.offset() for message in found] == list(range(COUNT))


@pytest.mark.parametrize("acks", ["0", "1", "all"])
def test_librdkafka_with_every_kind_of_acks(address: str, acks: str) -> None:
    topic = f"acks-{acks}"
    make_topic(address, topic)
    values = [b"%d" % number for number in range(COUNT)]
    produce(address, topic, values, acks=acks)
    assert [message.value() for message in consume(address, topic, COUNT)] == values


def test_keys_headers_nulls_and_times_come_back(address: str) -> None:
    make_topic(address, "shapes")
    headers: list[tuple[str, str | bytes | None]] = [
        ("a", b"1"),
        ("a", b"2"),
        ("none", None),
        ("", b""),
    ]
    producer = confluent_kafka.Producer({"bootstrap.servers": address})
    producer.produce("shapes", b"v", b"k", headers=headers, timestamp=1_700_000_000_123)
    producer.produce("shapes", None, b"gone")
    assert producer.flush(WAIT_S) == 0
    first, second = consume(address, "shapes", 2)
    assert (first.key(), first.value(), first.headers()) == (b"k", b"v", headers)
    assert first.timestamp() == (confluent_kafka.TIMESTAMP_CREATE_TIME, 1_700_000_000_123)
    assert (second.key(), second.value()) == (b"gone", None)


def test_the_broker_can_stamp_records_itself(address: str) -> None:
    make_topic(address, "stamped", config={"message.timestamp.type": "LogAppendTime"})
    before_ms = int(time.time() * 1000) - 60_000
    producer = confluent_kafka.Producer({"bootstrap.servers": address, "compression.type": "lz4"})
    producer.produce("stamped", b"v", timestamp=1000)
    assert producer.flush(WAIT_S) == 0
    (message,) = consume(address, "stamped", 1)
    kind, when_ms = message.timestamp()
    assert kind == confluent_kafka.TIMESTAMP_LOG_APPEND_TIME
    assert when_ms > before_ms


def test_offsets_by_time(address: str) -> None:
    make_topic(address, "times")
    producer = confluent_kafka.Producer({"bootstrap.servers": address})
    for number in range(10):
        producer.produce("times", b"%d" % number, timestamp=1_700_000_000_000 + number * 1000)
        if number % 3 == 0:
            assert producer.flush(WAIT_S) == 0
    assert producer.flush(WAIT_S) == 0
    consumer = confluent_kafka.Consumer({"bootstrap.servers": address, "group.id": "nobody"})
    for when_ms, expected in ((0, 0), (1_700_000_003_500, 4), (1_700_000_009_000, 9)):
        asked = confluent_kafka.TopicPartition("times", 0, when_ms)
        (at,) = consumer.offsets_for_times([asked], timeout=WAIT_S)
        assert at.offset == expected, when_ms
    assert consumer.get_watermark_offsets(
        confluent_kafka.TopicPartition("times", 0), timeout=WAIT_S
    ) == (0, 10)
    consumer.close()


def test_topics_partitions_and_configurations(address: str) -> None:
    admin = confluent_admin.AdminClient({"bootstrap.servers": address})
    name = f"managed.{uuid4().hex[:8]}"
    make_topic(address, name, 2, {"retention.ms": "1000000"})
    with pytest.raises(confluent_kafka.KafkaException, match="TOPIC_ALREADY_EXISTS"):
        make_topic(address, name)
    with pytest.raises(confluent_kafka.KafkaException, match="INVALID_CONFIG"):
        make_topic(address, "compacted", config={"cleanup.policy": "squeeze"})
    with pytest.raises(confluent_kafka.KafkaException, match="TOPIC_EXCEPTION"):
        make_topic(address, "no/name")
    admin.create_partitions([confluent_admin.NewPartitions(name, 5)])[name].result(WAIT_S)
    metadata = admin.list_topics(timeout=WAIT_S)
    assert sorted(metadata.topics[name].partitions) == list(range(5))
    assert not any(each.startswith(("rmq_sys", "RMQ_SYS", "%")) for each in metadata.topics)
    resource = confluent_admin.ConfigResource(confluent_admin.ConfigResource.Type.TOPIC, name)
    configs = admin.describe_configs([resource])[resource].result(WAIT_S)
    assert configs["retention.ms"].value == "1000000"
    assert configs["cleanup.policy"].value == "delete"
    admin.delete_topics([name])[name].result(WAIT_S)
    assert name not in admin.list_topics(timeout=WAIT_S).topics


def test_a_batch_that_is_too_large_is_refused_and_the_next_one_stored(address: str) -> None:
    make_topic(address, "small", config={"max.message.bytes": "2000"})
    producer = confluent_kafka.Producer({"bootstrap.servers": address})
    told: list[Any] = []
    producer.produce("small", bytes(5000), on_delivery=lambda error, _: told.append(error))
    assert producer.flush(WAIT_S) == 0
    assert told[0].code() == confluent_kafka.KafkaError.MSG_SIZE_TOO_LARGE
    assert produce(address, "small", [b"fits"]) == [0]


def test_a_consumer_waits_for_what_comes(address: str) -> None:
    make_topic(address, "awaited")
    consumer = confluent_kafka.Consumer({"bootstrap.servers": address, "group.id": "nobody"})
    consumer.assign([confluent_kafka.TopicPartition("awaited", 0, 0)])
    assert consumer.poll(1.0) is None
    produce(address, "awaited", [b"now"])
    found: list[Any] = []

    def poll() -> bool:
        message = consumer.poll(1.0)
        if message is not None:
            found.append(message.value())
        return bool(found)

    until(poll)
    assert found == [b"now"]
    consumer.close()


@pytest.mark.filterwarnings("ignore")  # the library's own: it reads its schemas in an old way
def test_kafka_python_produces_and_consumes(address: str) -> None:
    kafka = importlib.import_module("kafka")
    make_topic(address, "python", 2)
    for codec in (None, "gzip"):
        producer = kafka.KafkaProducer(bootstrap_servers=address, compression_type=codec)
        sent = [
            producer.send("python", b"%d" % number, key=b"k", partition=0)
            for number in range(COUNT)
        ]
        for future in sent:
            future.get(WAIT_S)
        producer.close()
    part = kafka.TopicPartition("python", 0)
    consumer = kafka.KafkaConsumer(bootstrap_servers=address)
    consumer.assign([part])
    consumer.seek_to_beginning(part)
    found: list[bytes] = []

    def poll() -> bool:
        for messages in consumer.poll(1000).values():
            found.extend(message.value for message in messages)
        return len(found) >= 2 * COUNT

    until(poll)
    assert found == [b"%d" % number for number in range(COUNT)] * 2
    assert consumer.end_offsets([part]) == {part: 2 * COUNT}
    consumer.close()


def test_aiokafka_produces_and_consumes(address: str) -> None:
    make_topic(address, "aio")

    async def run() -> list[bytes]:
        for codec in (None, "gzip", "snappy", "lz4", "zstd"):
            producer = aiokafka.AIOKafkaProducer(
                bootstrap_servers=address, compression_type=codec, enable_idempotence=True
            )
            await producer.start()
            sent = [await producer.send("aio", b"%d" % n, partition=0) for n in range(COUNT)]
            await asyncio.gather(*sent)
            await producer.stop()
        consumer = aiokafka.AIOKafkaConsumer(
            bootstrap_servers=address, auto_offset_reset="earliest", enable_auto_commit=False
        )
        await consumer.start()
        consumer.assign([aiokafka.TopicPartition("aio", 0)])
        found: list[bytes] = []
        async with asyncio.timeout(WAIT_S):
            while len(found) < 5 * COUNT:
                for messages in (await consumer.getmany(timeout_ms=1000)).values():
                    found += [message.value for message in messages]
        await consumer.stop()
        return found

    assert asyncio.run(run()) == [b"%d" % number for number in range(COUNT)] * 5
