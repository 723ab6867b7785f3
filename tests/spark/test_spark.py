"""The data source `sluice` on a real SparkSession, against a real broker.

All in one file, so that one process runs them: a second SparkSession would take as long to start as
all of these take to run.
"""

from __future__ import annotations

import json
import re
import runpy
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("pyspark", reason="pyspark is not installed: script/setup does it")

from pyspark.sql import functions, types
from pyspark.sql.streaming.datasource import ReadAllAvailable

from sluice import Message, Producer
from sluice.errors import SluiceError
from sluice.spark.batch import QueueRange
from sluice.spark.options import read_options
from sluice.spark.stream import StreamReader
from tests.spark.kit import (
    Server,
    end_offsets,
    forget_last_commit,
    into,
    messages,
    patiently,
)

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def gifts(server: Server) -> str:
    """A topic with 200 messages in four queues, for who only reads."""
    server.make("gifts")
    server.send("gifts", 200)
    return "gifts"


# ------------------------------------------------------------------------------------ batch queries


def test_a_topic_is_a_table(spark: SparkSession, server: Server, gifts: str) -> None:
    frame = server.read(spark, gifts)
    assert frame.schema.simpleString() == (
        "struct<key:binary,value:binary,topic:string,partition:int,offset:bigint,"
        "timestamp:timestamp,timestampType:int>"
    )
    rows = frame.collect()
    assert sorted(bytes(row.value).decode() for row in rows) == messages(0, 200)
    assert {(row.partition, row.offset) for row in rows} == {
        (number, offset) for number, end in enumerate(server.ends(gifts)) for offset in range(end)
    }
    assert {(row.topic, row.timestampType) for row in rows} == {("gifts", 1)}
    by_value = {bytes(row.value): bytes(row.key) for row in rows}
    assert by_value[b"m13"] == b"k3"


def test_columns_are_chosen_by_option_or_schema(
    spark: SparkSession, server: Server, gifts: str
) -> None:
    names = "value,tag,keys,headers,bornTimestamp,messageId,broker"
    row = server.read(spark, gifts, columns=names).where("value = 'm5'").collect()[0]
    assert (row.tag, row["keys"], row.broker) == ("B", ["k5"], "broker-a")
    assert ("price", b"5") in [(h.key, bytes(h.value)) for h in row.headers]
    assert len(row.messageId) == 32
    reader = spark.read.format("sluice").option("sluice.bootstrap.servers", server.address)
    own = reader.option("subscribe", gifts).schema("offset BIGINT, value BINARY").load()
    assert own.columns == ["offset", "value"]
    assert own.count() == 200


COLUMNS = "value,tag,partition,offset,timestamp,key,topic"


def test_filters_of_a_query_are_answered_by_the_source(
    spark: SparkSession, server: Server, gifts: str
) -> None:
    def some(condition: Any) -> DataFrame:
        frame = server.read(spark, gifts, columns=COLUMNS, pushFilters="true")
        return frame.where(condition)

    ends = server.ends(gifts)
    found = some("topic = 'gifts' and partition = 0 and offset >= 3 and offset < 9")
    assert sorted(row.offset for row in found.collect()) == list(range(3, 9))
    assert found.rdd.getNumPartitions() == 1, "one queue is read"
    assert some("tag = 'A'").count() == 100
    assert some("tag in ('A', 'B') and partition in (1, 2)").count() == sum(ends[1:3])
    assert some("topic = 'other'").count() == 0
    assert some("key = 'k4'").count() == 20
    assert some(f"partition = 0 and offset > {ends[0] - 1}").count() == 0
    rows = server.read(spark, gifts, columns="timestamp").collect()
    stamps = sorted(row.timestamp for row in rows)
    later = some(functions.col("timestamp") >= stamps[150])
    assert later.count() == sum(stamp >= stamps[150] for stamp in stamps)
    before = some(functions.col("timestamp") < stamps[50])
    assert before.count() == sum(stamp < stamps[50] for stamp in stamps)


def test_one_dataframe_answers_many_queries(
    spark: SparkSession, server: Server, gifts: str
) -> None:
    frame = server.read(spark, gifts, columns=COLUMNS)
    ends = server.ends(gifts)
    two = frame.where("partition = 0").union(frame.where("partition = 1"))
    assert two.count() == ends[0] + ends[1]
    assert frame.where("partition = 2").count() == ends[2]
    assert frame.count() == 200


def test_why_filters_are_pushed_only_on_request(
    spark: SparkSession, server: Server, gifts: str
) -> None:
    """When this fails Spark has learnt to keep queries apart, and pushFilters can be the
    default.
    """
    frame = server.read(spark, gifts, columns=COLUMNS, pushFilters="true")
    assert frame.where("partition = 0").count() == server.ends(gifts)[0]
    assert frame.count() != 200


def test_a_session_that_pushes_no_filters_has_the_same_rows(
    spark: SparkSession, server: Server, gifts: str
) -> None:
    spark.conf.set("spark.sql.python.filterPushdown.enabled", "false")
    try:
        frame = server.read(spark, gifts, columns="partition,tag", pushFilters="true")
        assert frame.where("tag = 'A' and partition < 4").count() == 100
    finally:
        spark.conf.set("spark.sql.python.filterPushdown.enabled", "true")


def test_options_filter_at_the_broker(spark: SparkSession, server: Server, gifts: str) -> None:
    assert server.values(spark, gifts, filter_tags="A") == sorted(f"m{n}" for n in range(0, 200, 2))
    assert len(server.values(spark, gifts, filter_keys="k1,k2")) == 40
    assert server.values(spark, gifts, filter_sql="price > 197") == ["m198", "m199"]
    assert server.values(spark, gifts, filter_sql="price > 197", bulkFetch="false") == [
        "m198",
        "m199",
    ]
    assert len(server.values(spark, gifts, bulkFetch="false", fetchBytes="1k")) == 200


def test_ranges_are_divided_and_bounded(spark: SparkSession, server: Server, gifts: str) -> None:
    assert server.read(spark, gifts, minPartitions="9").rdd.getNumPartitions() == 9
    parts = server.read(spark, gifts, maxRecordsPerPartition="20")
    assert parts.rdd.getNumPartitions() >= 10
    assert parts.count() == 200
    ends = server.ends(gifts)
    start = {gifts: {str(n): end - 2 for n, end in enumerate(ends)}}
    stop = {gifts: {str(n): end - 1 for n, end in enumerate(ends)}}
    text = {"startingOffsets": str(start), "endingOffsets": str(stop)}
    quoted = {name: value.replace("'", '"') for name, value in text.items()}
    assert server.read(spark, gifts, **quoted).count() == 4
    one = spark.read.format("sluice").option("sluice.bootstrap.servers", server.address)
    assert one.option("assign", '{"gifts": [2]}').load().count() == ends[2]
    pattern = spark.read.format("sluice").option("sluice.bootstrap.servers", server.address)
    assert pattern.option("subscribePattern", "gif.*").load().count() == 200
    assert server.read(spark, gifts, startingTimestamp="1").count() == 200


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"startingOffset": "earliest"}, "did you mean startingOffsets"),
        ({"columns": "body"}, "option columns: 'body' is no column"),
        ({"assign": "{}"}, "subscribe and assign are given"),
    ],
)
def test_wrong_options_fail_when_the_dataframe_is_made(
    spark: SparkSession, server: Server, options: dict[str, str], words: str
) -> None:
    from pyspark.errors import AnalysisException

    with pytest.raises(AnalysisException, match=words):
        server.read(spark, "gifts", **options)


def test_what_cannot_be_read_is_named(spark: SparkSession, server: Server, gifts: str) -> None:
    def failing(topic: str, **options: str) -> str:
        with pytest.raises(Exception, match="sluice") as caught:
            server.read(spark, topic, **options).count()
        return str(caught.value)

    assert "topic nowhere does not exist" in failing("nowhere")
    assert "cannot start at 'latest'" in failing(gifts, startingOffsets="latest")
    beyond = str({gifts: dict.fromkeys(map(str, range(4)), 1000)}).replace("'", '"')
    assert "failOnDataLoss" in failing(gifts, endingOffsets=beyond)
    frame = server.read(spark, gifts, endingOffsets=beyond, failOnDataLoss="false")
    assert frame.count() == 200
    assert "no message at or after" in failing(gifts, startingTimestamp="99999999999999")
    reader = spark.read.format("sluice").schema("value BINARY").option("subscribe", gifts)
    reader = reader.option("sluice.bootstrap.servers", server.address)
    with pytest.raises(Exception, match="option columns asks for tag, and the schema for value"):
        reader.option("columns", "tag").load().count()
    words = f"option startingOffsets: topic {gifts}, queue 0 of broker "
    assert words in failing(gifts, startingOffsets=beyond)


# ------------------------------------------------------------------------------------------ streams


def test_a_stream_that_cannot_be_says_why_last(
    spark: SparkSession, server: Server, gifts: str, checkpoint: str
) -> None:
    frames = {
        "option endingOffsets is for batch": server.stream(spark, gifts, endingOffsets="latest"),
        "the schema says that value is string": spark.readStream.format("sluice")
        .options(**{"sluice.bootstrap.servers": server.address, "subscribe": gifts})
        .schema("value STRING")
        .load(),
    }
    for words, frame in frames.items():
        with pytest.raises(Exception, match=words) as caught:
            batches_of(frame, checkpoint)
        assert "During handling of the above exception" not in str(caught.value)


def batches_of(frame: DataFrame, checkpoint: str) -> list[list[str]]:
    """The bodies of each batch, of everything that is there now."""
    found: list[list[str]] = []

    def take(rows: DataFrame, batch: int) -> None:
        values = [bytes(row.value).decode() for row in rows.select("value").collect()]
        if values:
            found.append(values)

    into(frame, checkpoint, take)
    return found


def test_a_stream_goes_on_where_its_checkpoint_says(
    spark: SparkSession, server: Server, topic: str, checkpoint: str
) -> None:
    server.make(topic)
    server.send(topic, 100)

    def run() -> list[list[str]]:
        options = {"startingOffsets": "earliest", "groupId": f"g{topic}"}
        frame = server.stream(spark, topic, maxOffsetsPerTrigger="60", **options)
        return batches_of(frame, checkpoint)

    found = run()
    assert sorted(value for batch in found for value in batch) == messages(0, 100)
    assert [len(batch) for batch in found] == [60, 40]
    ends = server.ends(topic)
    assert end_offsets(checkpoint, 1) == {topic: {str(n): end for n, end in enumerate(ends)}}
    assert server.committed(f"g{topic}", topic) == ends, "the lag of the query is seen"
    server.send(topic, 30, 100)
    (last,) = run()
    assert sorted(last) == messages(100, 130)


def driver(server: Server, topic: str, **options: str) -> StreamReader:
    """What Spark's driver asks: no session is needed for that."""
    given = {"sluice.bootstrap.servers": server.address, "subscribe": topic, **options}
    return StreamReader(read_options(given), types.StructType([]))


def ends_of(server: Server, topic: str, queues: int = 4) -> dict[str, dict[str, int]]:
    ends = server.ends(topic, queues)
    return {topic: {str(number): end for number, end in enumerate(ends)}}


def test_a_stream_is_bounded_by_bytes_and_picks_up_new_queues(server: Server, topic: str) -> None:
    server.make(topic, 1)
    server.send(topic, 40)
    reader = driver(server, topic, startingOffsets="earliest", maxBytesPerTrigger="6k")
    begin = reader.initialOffset()
    limit = reader.getDefaultReadLimit()
    end = reader.latestOffset(begin, limit)
    assert 0 < end[topic]["0"] < 40
    assert len(reader.partitions(begin, end)) == 1
    assert reader.latestOffset(begin, ReadAllAvailable()) == {topic: {"0": 40}}
    server.make(topic, 3)
    server.send(topic, 60, 40)
    reader = driver(server, topic, startingOffsets="earliest")
    end = reader.latestOffset({topic: {"0": 40}}, ReadAllAvailable())
    assert end == ends_of(server, topic, 3)
    ranges = reader.partitions({topic: {"0": 40}}, end)
    found = sorted((p.queue_id, p.start) for p in ranges if isinstance(p, QueueRange))
    assert found == [(0, 40), (1, 0), (2, 0)]


def test_few_messages_wait_for_more_unless_the_query_ends_with_them(
    server: Server, topic: str
) -> None:
    server.make(topic)
    server.send(topic, 10)
    options = {"startingOffsets": "earliest", "minOffsetsPerTrigger": "50"}
    reader = driver(server, topic, **options)
    late = driver(server, topic, **options, maxTriggerDelay="0ms")
    limit = reader.getDefaultReadLimit()
    begin = ends_of(server, topic)
    assert reader.latestOffset(reader.initialOffset(), limit) == begin, "the first does not wait"
    assert late.latestOffset(late.initialOffset(), limit) == begin
    server.send(topic, 10, 10)
    assert reader.latestOffset(begin, limit) == begin
    assert late.latestOffset(begin, limit) == ends_of(server, topic)
    reader.prepareForTriggerAvailableNow()
    ends = ends_of(server, topic)
    server.send(topic, 60, 20)
    assert reader.latestOffset(begin, limit) == ends, "not what came after the query began"


def test_latest_is_where_the_query_began_also_after_a_crash_in_its_first_batch(
    server: Server, topic: str
) -> None:
    server.make(topic)
    server.send(topic, 10)
    group = {"groupId": f"g{topic}"}
    begin = driver(server, topic, **group).initialOffset()
    assert begin == ends_of(server, topic)
    server.send(topic, 10, 10)
    assert driver(server, topic, **group).initialOffset() == begin, "nothing between is lost"
    later = driver(server, topic, **group)
    assert later.initialOffset() == begin
    end = later.latestOffset(begin, ReadAllAvailable())
    assert end == ends_of(server, topic)
    later.commit(end)
    server.send(topic, 10, 20)
    again = driver(server, topic, **group).initialOffset()
    assert again == ends_of(server, topic), "a new query of the group begins anew"


def test_a_checkpoint_of_other_topics_is_refused(server: Server, gifts: str, topic: str) -> None:
    reader = driver(server, gifts)
    with pytest.raises(SluiceError, match="belongs to one set of topics"):
        reader.latestOffset({topic: {"0": 3}}, ReadAllAvailable())
    reader = driver(server, gifts, failOnDataLoss="false")
    assert reader.latestOffset({topic: {"0": 3}}, ReadAllAvailable()) == ends_of(server, gifts)
    beyond = {gifts: dict.fromkeys(map(str, range(4)), 1000)}
    with pytest.raises(SluiceError, match="ends at offset"):
        driver(server, gifts).latestOffset(beyond, ReadAllAvailable())


# ------------------------------------------------------------------------------------------- writes


def numbered(spark: SparkSession, count: int) -> DataFrame:
    frame = spark.range(0, count, 1, 4)
    return frame.selectExpr(
        "concat('m', id) as value", "cast(id % 10 as string) as key", "'T' as tag"
    )


def test_a_dataframe_is_written_and_read_again(
    spark: SparkSession, server: Server, topic: str
) -> None:
    server.make(topic)
    frame = numbered(spark, 300).selectExpr(
        "*", "array(struct('h' as key, cast(key as binary) as value)) as headers"
    )
    server.write(frame, topic)
    names = "value,key,tag,headers,partition"
    rows = server.read(spark, topic, columns=names).collect()
    assert sorted(bytes(row.value).decode() for row in rows) == messages(0, 300)
    assert {row.tag for row in rows} == {"T"}
    assert all([bytes(h.value) for h in row.headers] == [bytes(row.key)] for row in rows)
    assert len({(bytes(row.key), row.partition) for row in rows}) == 10, "one queue for each key"


def test_a_dataframe_that_cannot_be_written_is_refused_before_anything_is(
    spark: SparkSession, server: Server, topic: str
) -> None:
    server.make(topic)
    bad = numbered(spark, 40).selectExpr("value", "array(if(key = 3, 'a b', key)) as keys")
    with pytest.raises(Exception, match="column keys holds a key with a blank"):
        server.write(bad, topic)
    if not server.is_apache:
        assert server.ends(topic) == [0, 0, 0, 0], "nothing is half published"


def test_values_that_are_empty_or_null_come_back_as_they_were(
    spark: SparkSession, server: Server, topic: str
) -> None:
    server.make(topic)
    values = "CASE key WHEN 3 THEN '' WHEN 4 THEN NULL ELSE value END AS value"
    frame = numbered(spark, 40).selectExpr("key", values)
    if server.is_apache:
        with pytest.raises(Exception, match="brokers take no message without one"):
            server.write(frame, topic)
        return
    server.write(frame, topic)
    written = [(bytes(row.key), row.value) for row in server.read(spark, topic).collect()]
    assert [value for key, value in written if key == b"3"] == [b""] * 4
    assert [value for key, value in written if key == b"4"] == [None] * 4
    assert len(written) == 40


def test_a_task_that_fails_and_is_tried_again_writes_once(
    spark: SparkSession, server: Server, topic: str
) -> None:
    if server.is_apache:
        pytest.skip("Apache's broker cannot stage: at least once")
    server.make(topic)

    def fail_once(batches: Iterator[Any]) -> Iterator[Any]:
        from pyspark import TaskContext

        context = TaskContext.get()
        assert context is not None
        yield from batches
        if context.attemptNumber() == 0 and context.partitionId() in (1, 3):
            raise RuntimeError("the first try fails when all of its rows are written")

    frame = numbered(spark, 400).select("value")
    failing = frame.mapInArrow(fail_once, frame.schema)
    server.write(failing, topic, batchBytes="1k")
    assert server.values(spark, topic) == messages(0, 400)


def test_a_stream_is_written_exactly_once_also_when_a_batch_is_replayed(
    spark: SparkSession, server: Server, topic: str, checkpoint: str
) -> None:
    if server.is_apache:
        pytest.skip("Apache's broker cannot stage: at least once")
    server.make(topic)
    server.make(f"{topic}-out")
    server.send(topic, 90)

    def run(**options: str) -> None:
        frame = server.stream(spark, topic, startingOffsets="earliest", **options)
        server.write_stream(frame.select("value", "key"), f"{topic}-out", checkpoint)

    run()
    assert server.values(spark, f"{topic}-out") == messages(0, 90)
    assert forget_last_commit(checkpoint) == 0
    run(minPartitions="7")
    assert server.values(spark, f"{topic}-out") == messages(0, 90), "the replay changed nothing"
    server.send(topic, 10, 90)
    run()
    assert server.values(spark, f"{topic}-out") == messages(0, 100)


def test_at_least_once_and_named_batches(spark: SparkSession, server: Server, topic: str) -> None:
    server.make(topic)
    server.write(numbered(spark, 50), topic, delivery="atLeastOnce")
    assert server.values(spark, topic) == messages(0, 50)
    if server.is_apache:
        with pytest.raises(Exception, match="delivery=atLeastOnce can"):
            server.write(numbered(spark, 5), topic, delivery="exactlyOnce")
        return
    for _ in range(2):
        server.write(numbered(spark, 50), topic, txnAppId="job", txnVersion="7")
    assert len(server.values(spark, topic)) == 100, "version 7 was written once"
    server.write(numbered(spark, 50), topic, txnAppId="job", txnVersion="8")
    assert len(server.values(spark, topic)) == 150
    server.make(f"{topic}-2")
    server.write(numbered(spark, 50), f"{topic}-2", txnAppId="job", txnVersion="7")
    assert len(server.values(spark, f"{topic}-2")) == 50, "a version counts for each topic"
    with pytest.raises(Exception, match="txnVersion"):
        server.write(numbered(spark, 50), topic, txnAppId="job")


# ---------------------------------------------------------------------------------------- documents


def test_the_blocks_of_the_page_run(spark: SparkSession, server: Server, tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs/spark.md").read_text(encoding="utf-8")
    blocks = re.findall(
        r"^<!-- tested with spark -->\n```python\n(.*?)^```$", page, re.DOTALL | re.MULTILINE
    )
    assert len(blocks) == 3
    with Producer(nameservers=[server.address]) as producer:
        for host, coins in (("mia", 5), ("ben", 7), ("mia", 1)):
            producer.send(Message("page-gifts", json.dumps({"host": host, "coins": coins})))
    text = "\n".join(blocks).replace("127.0.0.1:9876", server.address)
    # Its own topics: the ones of the page may be there already.
    text = text.replace('"gifts"', '"page-gifts"').replace('"gift-', '"page-gift-')
    program = tmp_path / "page.py"
    program.write_text(text, encoding="utf-8")
    names = patiently(lambda: runpy.run_path(str(program)))
    assert {(row.host, row["sum(coins)"]) for row in names["first"].collect()} == {
        ("mia", 6),
        ("ben", 7),
    }
    assert server.values(spark, "page-gift-board") == ["6", "7"]
    assert len(server.values(spark, "page-gift-copies")) == 3
