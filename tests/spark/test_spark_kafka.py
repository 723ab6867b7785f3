"""One topic, two doors and Spark: the source `sluice` reads what Kafka's producers wrote beside
what RocketMQ's did, and Spark's own Kafka source and sink work on the same broker.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import confluent_kafka
import pytest

from peers import PeerUnavailable, fetch
from peers.artifacts import SPARK_KAFKA
from peers.process import free_ports
from sluice import Message, Producer
from tests.interop.kafka_reading import WAIT_S, consume
from tests.interop.sluice_process import SluiceProcess, wait_for_route
from tests.spark.kit import Server, finished, into

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

confluent_admin: Any = importlib.import_module("confluent_kafka.admin")

pytestmark = pytest.mark.filterwarnings("ignore")

BEGIN_MS = 1_700_000_000_000


class Doors(Server):
    """A broker with both doors."""

    def __init__(self, process: SluiceProcess, port: int) -> None:
        super().__init__(process)
        self.kafka = f"127.0.0.1:{port}"

    def make_kafka(
        self, topic: str, partitions: int = 1, configs: dict[str, str] | None = None
    ) -> None:
        admin = confluent_admin.AdminClient({"bootstrap.servers": self.kafka})
        made = confluent_admin.NewTopic(topic, partitions, 1, config=configs or {})
        admin.create_topics([made])[topic].result(WAIT_S)
        wait_for_route(self.address, topic.replace(".", "%2E"))

    def producer(self, **settings: Any) -> Any:
        return confluent_kafka.Producer(
            {"bootstrap.servers": self.kafka, "linger.ms": 20, **settings}
        )

    def read_kafka(self, spark: SparkSession, topic: str, **options: Any) -> DataFrame:
        reader = spark.read.format("kafka").option("kafka.bootstrap.servers", self.kafka)
        return reader.option("subscribe", topic).options(**options).load()

    def stream_kafka(self, spark: SparkSession, topic: str, **options: Any) -> DataFrame:
        reader = spark.readStream.format("kafka").option("kafka.bootstrap.servers", self.kafka)
        return reader.option("subscribe", topic).options(**options).load()


@pytest.fixture(scope="module")
def doors(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Doors]:
    (port,) = free_ports(1)
    directory = tmp_path_factory.mktemp("doors")
    settings = ("--flush", "async", "--kafka", "on", "--kafka-port", str(port))
    with SluiceProcess(directory, *settings) as process:
        yield Doors(process, port)


@pytest.fixture
def kafka_source(spark: SparkSession) -> None:
    try:
        fetch(SPARK_KAFKA)
    except PeerUnavailable as error:
        pytest.skip(error.reason)


def write_both(doors: Doors, topic: str) -> None:
    """Records of all kinds, a message of RocketMQ's behind each group of them."""
    with Producer(nameservers=[doors.address], batching=False) as rocketmq:
        for codec in ("none", "gzip", "snappy", "lz4", "zstd"):
            producer = doors.producer(**{"compression.type": codec})
            for number in range(20):
                producer.produce(
                    topic,
                    None if number == 3 else f"{codec} {number}".encode(),
                    None if number % 4 == 0 else b"\xff%d" % number,
                    partition=0,
                    timestamp=BEGIN_MS + number,
                    headers=[("codec", codec.encode()), ("rmq.tags", b"odd"), ("none", None)]
                    if number % 2
                    else None,
                )
            assert producer.flush(WAIT_S) == 0
            message = Message(topic, f"by rocketmq {codec}", tags="odd", keys=codec)
            assert rocketmq.send(message).status.name == "OK"
    for verb in ("abort_transaction", "commit_transaction"):
        producer = doors.producer(**{"transactional.id": f"{topic}-till"})
        producer.init_transactions(WAIT_S)
        producer.begin_transaction()
        for number in range(5):
            producer.produce(topic, f"{verb} {number}".encode(), partition=0, timestamp=BEGIN_MS)
        getattr(producer, verb)(WAIT_S)


def sorted_rows(frame: DataFrame) -> list[Any]:
    return sorted(frame.collect(), key=lambda row: row.offset)


def as_record(row: Any) -> tuple[Any, ...]:
    headers = [(each.key, each.value and bytes(each.value)) for each in row.headers or ()]
    value = None if row.value is None else bytes(row.value)
    return row.offset, None if row.key is None else bytes(row.key), value, headers


def test_both_kinds_of_entries_are_one_table(
    spark: SparkSession, doors: Doors, topic: str, checkpoint: str, kafka_source: None
) -> None:
    doors.make_kafka(topic)
    write_both(doors, topic)
    rows = sorted_rows(doors.read(spark, topic, includeHeaders="true"))
    # What librdkafka reads, without the two headers that show RocketMQ's tag and id to it.
    expected = []
    committed: dict[str, Any] = {"isolation.level": "read_committed"}
    for found in consume(doors.kafka, topic, 110, **committed):
        by_rocketmq = (found.value() or b"").startswith(b"by rocketmq")
        headers = [] if by_rocketmq else found.headers() or []
        expected.append((found.offset(), found.key(), found.value(), headers))
    assert [as_record(row) for row in rows] == expected
    times = {(row.timestampType, row.timestamp.timestamp() * 1000 < BEGIN_MS + 20) for row in rows}
    assert times == {(0, True), (1, False)}, "a record has its own time, a message the store's"

    # Spark's own source on the Kafka door has the same rows, but for RocketMQ's messages.
    options = {"kafka.isolation.level": "read_committed", "includeHeaders": "true"}
    theirs = sorted_rows(doors.read_kafka(spark, topic, **options))
    ours = {row.offset: row for row in rows}
    assert [row.offset for row in theirs] == [row.offset for row in rows]
    for row in theirs:
        mine = ours[row.offset]
        assert (row.key, row.value, row.partition, row.topic) == (*mine[:2], 0, topic)
        if mine.timestampType == 0:
            assert (row.timestamp, row.timestampType) == (mine.timestamp, 0)
            assert row.headers == mine.headers, "null where there are none"

    odd = doors.read(spark, topic, columns="offset,tag", filter_tags="odd").collect()
    assert sorted(row.offset for row in odd) == [
        row.offset for row in rows if row.timestampType == 1 or row.headers
    ]

    # A stream is held by a transaction that is open, and goes on when it has ended.
    producer = doors.producer(**{"transactional.id": f"{topic}-open"})
    producer.init_transactions(WAIT_S)
    producer.begin_transaction()
    producer.produce(topic, b"late", partition=0)
    assert producer.flush(WAIT_S) == 0
    seen: list[int] = []

    def take(frame: DataFrame, _: int) -> None:
        seen.extend(row.offset for row in frame.collect())

    def run() -> None:
        into(doors.stream(spark, topic, startingOffsets="earliest"), checkpoint, take)

    run()
    assert sorted(seen) == [row.offset for row in rows]
    producer.commit_transaction(WAIT_S)
    run()
    assert len(seen) == len(set(seen)) == len(rows) + 1


def test_sparks_own_source_and_sink(
    spark: SparkSession, doors: Doors, topic: str, checkpoint: str, kafka_source: None
) -> None:
    """Batch, stream, and a restart from the checkpoint, all through the Kafka door."""
    doors.make_kafka(topic, 3)
    copies = f"{topic}.copies"
    doors.make_kafka(copies, 2)

    def write(first: int, stop: int) -> None:
        frame = spark.range(first, stop).selectExpr(
            "cast(id % 10 as string) as key",
            "concat('v', id) as value",
            "array(struct('n' as key, cast(cast(id as string) as binary) as value)) as headers",
        )
        writer = frame.write.format("kafka").option("kafka.bootstrap.servers", doors.kafka)
        writer.option("topic", topic).option("includeHeaders", "true").save()

    def values(frame: DataFrame) -> list[int]:
        rows = frame.selectExpr("cast(value as string) as value").collect()
        return sorted(int(row.value[1:]) for row in rows)

    def copy() -> None:
        stream = doors.stream_kafka(
            spark, topic, startingOffsets="earliest", maxOffsetsPerTrigger="70"
        )
        writer = stream.select("key", "value").writeStream.format("kafka")
        writer = writer.option("kafka.bootstrap.servers", doors.kafka).option("topic", copies)
        finished(writer.option("checkpointLocation", checkpoint))

    write(0, 100)
    table = doors.read_kafka(spark, topic, includeHeaders="true")
    assert values(table) == list(range(100))
    assert {row.partition for row in table.collect()} <= {0, 1, 2}
    (seventh,) = table.filter("value = 'v7'").collect()
    assert bytes(seventh.headers[0].value) == b"7"
    copy()
    assert values(doors.read_kafka(spark, copies)) == list(range(100))
    write(100, 150)
    copy()
    assert values(doors.read_kafka(spark, copies)) == list(range(150))
    assert values(doors.read(spark, copies)) == list(range(150)), "and the other source"
    parts = doors.read_kafka(spark, copies, minPartitions="6")
    assert parts.rdd.getNumPartitions() >= 6
    assert values(parts) == list(range(150))


def test_a_name_with_dots_and_what_comes_later(
    spark: SparkSession, doors: Doors, topic: str, kafka_source: None
) -> None:
    """Java's consumer passes over a batch of which nothing is there yet, and so does ours."""
    name = f"{topic}.later"
    doors.make_kafka(name, configs={"sluice.delay.headers": "true"})
    for value, headers in ((b"later", [("TIMER_DELAY_SEC", b"3600")]), (b"now", None)):
        producer = doors.producer()
        producer.produce(name, value, partition=0, headers=headers)
        assert producer.flush(WAIT_S) == 0
    for frame in (doors.read_kafka(spark, name), doors.read(spark, name)):
        (row,) = frame.collect()
        assert (bytes(row.value), row.offset, row.topic) == (b"now", 1, name)
    doors.write(spark.sql("select cast('more' as binary) as value"), name)
    assert doors.values(spark, name) == ["more", "now"]
    by_pattern = spark.read.format("sluice").option("sluice.bootstrap.servers", doors.address)
    rows = by_pattern.option("subscribePattern", rf"{topic}\.la.*").load().collect()
    assert {row.topic for row in rows} == {name}


def test_times_are_those_of_the_records(spark: SparkSession, doors: Doors, topic: str) -> None:
    """They need not be in order; what is narrowed by them is still exact."""
    doors.make_kafka(topic)
    producer = doors.producer()
    for number in (5, 1, 9, 3, 7):
        producer.produce(topic, b"%d" % number, partition=0, timestamp=BEGIN_MS + number * 1000)
        assert producer.flush(WAIT_S) == 0
    found = doors.values(spark, topic, startingTimestamp=BEGIN_MS + 6000)
    assert found == ["3", "7", "9"], "from the first record of that time on"
    table = doors.read(spark, topic, pushFilters="true")
    low, high = BEGIN_MS + 3000, BEGIN_MS + 7000
    rows = table.filter(
        f"timestamp >= timestamp_millis({low}) and timestamp <= timestamp_millis({high})"
    ).collect()
    assert sorted(bytes(row.value) for row in rows) == [b"3", b"5", b"7"]
