"""Streams into tables on a real SparkSession, against a real broker: every row once."""

from __future__ import annotations

import io
import json
import os
import re
import runpy
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("pyspark", reason="pyspark is not installed: script/setup does it")

import fastavro
import pyarrow.parquet as pq

from sluice import Message, Producer, tables
from sluice.errors import ConfigError
from sluice.tables.log import TableLog
from tests.spark.kit import QUERY_SECONDS, Server, forget_last_commit, messages, patiently

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = pytest.mark.filterwarnings("ignore")

GIFT = "host STRING NOT NULL, coins INT"
GOOD, BAD = 40, 4
QUEUES = 2  # a task each


@pytest.fixture(scope="module")
def gifts(server: Server) -> str:
    """A topic with 40 gifts in two queues, and four messages that are none."""
    if server.is_apache:
        pytest.skip("Apache's broker cannot stage: dead letters come at least once")
    server.make("table-gifts", QUEUES)
    send_gifts(server, "table-gifts", 0, GOOD)
    with Producer(nameservers=[server.address]) as producer:
        for value in ("garbage", '{"coins": 3}', '{"host": "x", "coins": 1.5}', "[]"):
            producer.send(Message("table-gifts", value, keys="bad"))
    return "table-gifts"


def send_gifts(server: Server, topic: str, first: int, stop: int) -> None:
    with Producer(nameservers=[server.address]) as producer:
        for number in range(first, stop):
            producer.send(Message(topic, json.dumps({"host": f"h{number}", "coins": number})))


def run(frame: DataFrame, path: Path, checkpoint: str, **options: Any) -> None:
    """Everything that is there now goes into a table."""

    def work() -> None:
        query = tables.write_stream(
            frame, path, checkpoint=checkpoint, trigger={"availableNow": True}, **options
        )
        assert query.awaitTermination(QUERY_SECONDS), "the query did not end"

    patiently(work)


def hosts(spark: SparkSession, path: Path) -> list[int]:
    return sorted(int(row.host[1:]) for row in tables.read(spark, path).collect())


def letters(spark: SparkSession, server: Server, topic: str) -> list[dict[str, str]]:
    """The dead letters of a topic, their properties and values."""
    rows = server.read(spark, topic, columns="value,key,headers").collect()
    found = [
        {
            **{header.key: bytes(header.value).decode() for header in row.headers},
            "value": bytes(row.value).decode(),
        }
        for row in rows
    ]
    return sorted(found, key=lambda letter: letter["value"])


def check_letters(found: list[dict[str, str]], topic: str) -> None:
    assert [letter["value"] for letter in found] == [
        *("[]", "garbage", '{"coins": 3}', '{"host": "x", "coins": 1.5}'),
    ]
    assert {letter["originTopic"] for letter in found} == {topic}
    assert len({(letter["originQueue"], letter["originOffset"]) for letter in found}) == BAD
    reasons = [letter["reason"] for letter in found]
    assert reasons[0] == "is no JSON object but []"
    assert reasons[1].startswith("is no JSON: ")
    assert reasons[2] == "field host is missing, and is NOT NULL"
    assert reasons[3] == "field coins: 1.5 is no INT"


def ends_of(server: Server, topic: str) -> dict[str, dict[str, int]]:
    return {topic: {str(number): end for number, end in enumerate(server.ends(topic, QUEUES))}}


class Fault(Exception):
    """What a test breaks a batch with, where a driver could have been killed."""


def test_every_row_is_in_the_table_once_or_a_dead_letter_once_wherever_a_batch_breaks(
    spark: SparkSession,
    server: Server,
    gifts: str,
    topic: str,
    tmp_path: Path,
    checkpoint: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = tmp_path / "table"
    frame = server.stream(spark, gifts, startingOffsets="earliest")
    server.make(topic, 1)
    options: dict[str, Any] = {
        "schema": GIFT,
        "dead_letter_topic": topic,
        "servers": server.address,
        "partition_by": ["_date"],
    }

    def breaks(*_: Any) -> None:
        raise Fault("broken here")

    with monkeypatch.context() as patch:  # the files are written, nothing is committed
        patch.setattr(TableLog, "commit", breaks)
        with pytest.raises(Exception, match="broken here"):
            run(frame, path, checkpoint, **options)
    assert tables.read(spark, path).count() == 0
    assert list((path / "_data").rglob("*.parquet"))
    with monkeypatch.context() as patch:  # committed, and no dead letter sent
        patch.setattr("sluice.tables.parquet.publish_dead_letters", breaks)
        with pytest.raises(Exception, match="broken here"):
            run(frame, path, checkpoint, **options)
    run(frame, path, checkpoint, **options)
    assert hosts(spark, path) == list(range(GOOD))
    check_letters(letters(spark, server, topic), gifts)
    assert json.loads(tables.starting_offsets(path)) == ends_of(server, gifts)
    forget_last_commit(checkpoint)  # committed and sent, and Spark does not know
    run(frame, path, checkpoint, **options)
    assert hosts(spark, path) == list(range(GOOD))
    assert len(letters(spark, server, topic)) == BAD
    assert tables.read(spark, path).columns == [
        *("host", "coins", "_topic", "_partition", "_offset", "_timestamp", "_date"),
    ]
    done = tables.compact(path)
    assert (done.files_after, done.rows) == (1, GOOD)
    assert hosts(spark, path) == list(range(GOOD))
    (file,) = tables.files(path)
    assert pq.ParquetFile(file).metadata.num_rows == GOOD


def test_a_worker_that_is_killed_in_its_batch_writes_once(
    spark: SparkSession, server: Server, topic: str, tmp_path: Path, checkpoint: str
) -> None:
    server.make(topic, QUEUES)
    server.send(topic, 50)

    def killed_once(batches: Iterator[Any]) -> Iterator[Any]:
        from pyspark import TaskContext

        context = TaskContext.get()
        assert context is not None
        yield from batches
        if context.attemptNumber() == 0 and context.partitionId() == 1:
            os.kill(os.getpid(), signal.SIGKILL)

    frame = server.stream(spark, topic, startingOffsets="earliest")
    run(frame.mapInArrow(killed_once, frame.schema), tmp_path / "table", checkpoint)
    rows = tables.read(spark, tmp_path / "table").collect()
    assert sorted(bytes(row.value).decode() for row in rows) == messages(0, 50)
    assert tables.read(spark, tmp_path / "table").schema == frame.schema


def test_a_table_knows_its_offsets_and_schema(
    spark: SparkSession, server: Server, topic: str, tmp_path: Path
) -> None:
    path = tmp_path / "table"
    server.make(topic, QUEUES)
    send_gifts(server, topic, 0, 20)

    def go(name: str, **options: Any) -> None:
        starting = options.pop("startingOffsets", "earliest")
        frame = server.stream(spark, topic, startingOffsets=starting)
        run(frame, path, str(tmp_path / name), **{"schema": "json", **options})

    go("first")
    assert tables.read(spark, path).schema["coins"].dataType.simpleString() == "bigint"
    send_gifts(server, topic, 20, 30)
    with pytest.raises(Exception, match="holds rows of this stream that the checkpoint does not"):
        go("second")
    with pytest.raises(ConfigError, match=r"option schema: the table .* has the columns"):
        go("fourth", schema=GIFT)
    with pytest.raises(ConfigError, match=r"option partition_by: the table .* by nothing"):
        go("fourth", partition_by=["host"])
    assert hosts(spark, path) == list(range(20)), "nothing of all this was written"
    go("second-again", startingOffsets=tables.starting_offsets(path, queues=QUEUES))
    assert hosts(spark, path) == list(range(30))


def test_rows_that_do_not_fit_fail_the_query_where_there_is_no_place_for_them(
    spark: SparkSession, server: Server, gifts: str, tmp_path: Path, checkpoint: str
) -> None:
    frame = server.stream(spark, gifts, startingOffsets="earliest")
    with pytest.raises(Exception, match="4 rows do not fit the schema, the first is topic table-g"):
        run(frame, tmp_path / "table", checkpoint, schema=GIFT)
    assert tables.read(spark, tmp_path / "table").count() == 0
    assert list((tmp_path / "table/_data").rglob("*.parquet")) == []
    ends = server.ends(gifts, QUEUES)
    own: dict[str, Any] = {"dead_letter_topic": gifts, "servers": server.address}
    with pytest.raises(Exception, match="option dead_letter_topic: this stream reads table-gifts"):
        run(frame, tmp_path / "other", f"{checkpoint}-other", schema=GIFT, **own)
    assert server.ends(gifts, QUEUES) == ends
    assert tables.read(spark, tmp_path / "other").count() == 0


AVRO = {
    "type": "record",
    "name": "Gift",
    "fields": [{"name": "host", "type": "string"}, {"name": "coins", "type": ["null", "long"]}],
}


def test_avro_values_are_rows(
    spark: SparkSession, server: Server, topic: str, tmp_path: Path, checkpoint: str
) -> None:
    server.make(topic, 1)
    with Producer(nameservers=[server.address]) as producer:
        for number in range(10):
            stream = io.BytesIO()
            gift = {"host": f"h{number}", "coins": number or None}
            fastavro.schemaless_writer(stream, fastavro.parse_schema(AVRO), gift)
            producer.send(Message(topic, stream.getvalue()))
    frame = server.stream(spark, topic, startingOffsets="earliest")
    path = tmp_path / "table"
    run(frame, path, checkpoint, schema=json.dumps(AVRO), partition_by=["host"])
    assert hosts(spark, path) == list(range(10))
    assert len(tables.files(path)) == 10
    (row,) = tables.read(spark, path).where("coins is null").collect()
    assert row.host == "h0"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"schema": "host NOTHING"}, "option schema: 'host NOTHING' is neither 'json' nor DDL"),
        ({"schema": "host INTERVAL"}, "option schema"),
        ({"schema": "a INT, A INT"}, "option schema: column a is there twice"),
        ({"schema": "_offset INT"}, "option schema: column _offset is there twice"),
        ({"schema": "{}"}, "option schema: is no Avro schema"),
        ({"schema": GIFT, "partition_by": ["day"]}, "option partition_by: 'day' is no column"),
        ({"schema": "a DOUBLE", "partition_by": ["a"]}, "option partition_by: .* double"),
        ({"schema": "a INT, b VARIANT"}, "option schema: VARIANT cannot be read from JSON"),
        ({"schema": "a MAP<STRING, ARRAY<VARIANT>>"}, "option schema: VARIANT"),
        ({"schema": "variant INT, geometry INT", "partition_by": ["c"]}, "partition_by: 'c' is no"),
        ({"schema": GIFT, "dead_letter_topic": "d"}, "option sluice.bootstrap.servers is needed"),
        ({"schema": GIFT, "servers": "x:1"}, "name their topic"),
        ({"dead_letter_topic": "d", "servers": "x:1"}, "without a schema every row fits"),
        ({"target_file_bytes": 1}, "option target_file_bytes"),
        ({"checkpoint": ""}, "option checkpoint is empty"),
    ],
)
def test_wrong_options_fail_at_once(
    spark: SparkSession, tmp_path: Path, options: dict[str, Any], words: str
) -> None:
    frame = spark.readStream.format("rate").load()
    frame = frame.selectExpr(
        "encode(string(value), 'utf-8') as value", "'t' as topic", "1 as partition",
        "value as offset", "timestamp",
    )  # fmt: skip
    with pytest.raises(ConfigError, match=words):
        tables.write_stream(frame, tmp_path / "table", **{"checkpoint": "c", **options})
    assert not (tmp_path / "table/_sluice").exists()


def test_a_frame_without_the_columns_is_refused(spark: SparkSession, tmp_path: Path) -> None:
    frame = spark.readStream.format("rate").load()
    with pytest.raises(ConfigError, match="the DataFrame has no column topic"):
        tables.write_stream(frame, tmp_path / "table", checkpoint="c", schema=GIFT)
    with pytest.raises(ConfigError, match="_date is the day of the column timestamp"):
        tables.write_stream(
            frame.select("value"), tmp_path / "table", checkpoint="c", partition_by=["_date"]
        )


# ------------------------------------------------------------------------------------------- Delta


@pytest.fixture
def delta(spark: SparkSession) -> None:
    if "Delta" not in (spark.conf.get("spark.sql.extensions", "") or ""):
        pytest.skip("Delta Lake has no jars for this PySpark, or Maven could not fetch them")


def test_a_session_without_delta_is_told_so(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sluice.tables.delta._EXTENSION", "NoSuchExtension")
    frame = spark.readStream.format("rate").load()
    with pytest.raises(ConfigError, match="option format: this session has no Delta Lake"):
        tables.write_stream(frame, tmp_path / "table", checkpoint="c", format="delta")


@pytest.mark.usefixtures("delta")
def test_every_row_is_in_a_delta_table_once_wherever_a_batch_breaks(
    spark: SparkSession,
    server: Server,
    gifts: str,
    topic: str,
    tmp_path: Path,
    checkpoint: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = tmp_path / "table"
    frame = server.stream(spark, gifts, startingOffsets="earliest")
    server.make(topic, 1)
    options: dict[str, Any] = {
        "format": "delta",
        "schema": GIFT,
        "dead_letter_topic": topic,
        "servers": server.address,
        "partition_by": ["_date"],
    }

    def breaks(*_: Any) -> None:
        raise Fault("broken here")

    with monkeypatch.context() as patch:  # committed, and no dead letter sent
        patch.setattr("sluice.tables.delta.publish_dead_letters", breaks)
        with pytest.raises(Exception, match="broken here"):
            run(frame, path, checkpoint, **options)
    assert hosts(spark, path) == list(range(GOOD))
    run(frame, path, checkpoint, **options)
    check_letters(letters(spark, server, topic), gifts)
    assert hosts(spark, path) == list(range(GOOD)), "the batch that came again was not written"
    ends = ends_of(server, gifts)
    assert json.loads(tables.starting_offsets(path, spark=spark)) == ends
    words = spark.sql(f"DESCRIBE HISTORY delta.`{path}`").collect()[-1].userMetadata
    assert json.loads(words)["sluice"]["ranges"] == {
        gifts: {queue: [0, end] for queue, end in ends[gifts].items()}
    }
    done = tables.compact(path, spark=spark)
    assert done.files_after == 1
    assert hosts(spark, path) == list(range(GOOD))
    with pytest.raises(ConfigError, match="holds a Delta table; use format='delta'"):
        run(frame, path, checkpoint, **{**options, "format": "parquet"})
    with pytest.raises(ConfigError, match=r"option schema: the table .* has the columns"):
        run(frame, path, checkpoint, **{**options, "schema": "host STRING"})


# ---------------------------------------------------------------------------------------- documents


def test_the_blocks_of_the_page_run(spark: SparkSession, server: Server, tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs/tables.md").read_text(encoding="utf-8")
    blocks = re.findall(
        r"^<!-- tested with spark -->\n```python\n(.*?)^```$", page, re.DOTALL | re.MULTILINE
    )
    assert blocks
    for topic in ("page-table-gifts", "page-table-gifts-dead"):
        server.make(topic, 1)
    send_gifts(server, "page-table-gifts", 0, 5)
    with Producer(nameservers=[server.address]) as producer:
        producer.send(Message("page-table-gifts", "garbage"))
    text = "\n".join(blocks).replace("127.0.0.1:9876", server.address)
    # Its own topics and places: the ones of the page may be there already.
    text = text.replace('"gifts', '"page-table-gifts').replace('"/data/', f'"{tmp_path}/')
    program = tmp_path / "page.py"
    program.write_text(text, encoding="utf-8")
    names = patiently(lambda: runpy.run_path(str(program)))
    assert names["table"].count() == 5
    assert names["archive"].count() == 6
    assert len(server.values(spark, "page-table-gifts-dead")) == 1
    assert names["joined"].files_after == 1
