"""Streams from a topic to a topic, a Parquet table and a Delta table, while brokers, workers and
drivers are killed: every message is in each of them once.

Marked soak: `script/test -m soak -s tests/spark/test_kills.py`. SPARK_TEST_KILLS says how many.
All three run in one driver, so that one run of kills is one for all of them.
"""

from __future__ import annotations

import functools
import json
import sys
from collections import Counter
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING

import pytest

from sluice import Message, tables
from sluice.tables.log import TableLog
from tests.interop.sluice_process import SluiceProcess
from tests.spark.conftest import delta_settings
from tests.spark.kills import KILLS, Job, Killing, Sender
from tests.spark.kit import Server

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.soak, pytest.mark.filterwarnings("ignore")]

JOB = """
    import json
    import sys
    import time
    from pyspark.sql import SparkSession
    from sluice import tables

    checkpoints, address, paths, settings = sys.argv[1:]
    spark = (
        SparkSession.builder.master("local[2,4]")
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .config("spark.driver.memory", "1g")
        .config("spark.driver.extraJavaOptions", "-XX:+UseSerialGC -XX:TieredStopAtLevel=1")
        .config("spark.sql.shuffle.partitions", "2")
        .config(map=json.loads(settings))
        .getOrCreate()
    )
    spark.sparkContext.setLogLevel("ERROR")

    def stream():
        return (
            spark.readStream.format("sluice")
            .option("sluice.bootstrap.servers", address)
            .option("subscribe", "in")
            .option("startingOffsets", "earliest")
            .option("maxOffsetsPerTrigger", 2000)
            .option("minPartitions", 3)
            .load()
        )

    def begin(start):
        # Spark gives the Python process of a stream ten seconds to start, which a busy machine may
        # not have: one query after the other, and again where nothing has happened.
        while True:
            query = start()
            while query.isActive and query.status["message"].startswith("Initializing"):
                time.sleep(0.1)
            if query.isActive:
                return
            if "Python worker failed to connect back" not in str(query.exception()):
                raise query.exception()
            spark.streams.resetTerminated()

    def start_topic():
        writer = stream().select("value", "key").writeStream.format("sluice")
        writer = writer.option("sluice.bootstrap.servers", address).option("topic", "out")
        return writer.option("checkpointLocation", f"{checkpoints}/out").start()

    def start_table(kind, path):
        return tables.write_stream(
            stream(),
            path,
            checkpoint=f"{checkpoints}/{kind}",
            format=kind,
            schema="number INT NOT NULL",
            dead_letter_topic=f"dead-{kind}",
            servers=address,
        )

    begin(start_topic)
    for kind, path in json.loads(paths).items():
        begin(lambda: start_table(kind, path))
    spark.streams.awaitAnyTermination()
"""
_COMPACT_EVERY = 3


def message(number: int) -> Message:
    """Each tenth does not fit a table."""
    word = "none" if number % 10 == 9 else "number"
    return Message("in", f'{{"{word}": {number}}}', keys=f"k{number % 7}")


def test_every_message_once_whoever_is_killed(spark: SparkSession, tmp_path: Path) -> None:
    settings = delta_settings()
    if not settings:
        pytest.skip("Delta Lake's jars could not be fetched with Maven")
    paths = {kind: tmp_path / kind for kind in ("parquet", "delta")}
    with SluiceProcess(tmp_path / "broker") as process:
        server = Server(process)
        for topic in ("in", "out", "dead-parquet", "dead-delta"):
            server.make(topic)
        words = [json.dumps({kind: str(path) for kind, path in paths.items()})]
        job = Job(tmp_path, JOB, server.address, *words, json.dumps(settings))
        sender = Sender(server.address, message)

        def arrived() -> int:
            """What is in all three of them."""
            return min(
                sum(server.ends("out")),
                parquet_rows(paths["parquet"]) + sum(server.ends("dead-parquet")),
                delta_rows(paths["delta"]) + sum(server.ends("dead-delta")),
            )

        killing = Killing(
            process,
            job,
            sender,
            sent=lambda: sum(server.ends("in")),
            arrived=arrived,
            random=Random(5),
        )

        def compact(number: int) -> None:
            if number % _COMPACT_EVERY == _COMPACT_EVERY - 1:
                for path in paths.values():
                    tables.compact(path, spark=spark)

        sender.start()
        try:
            killing.run(KILLS, compact)
        finally:
            job.close()
        wanted = Counter(server.values(spark, "in"))
        assert len(wanted) == sender.sent
        assert Counter(server.values(spark, "out")) == wanted
        bad = Counter({value: count for value, count in wanted.items() if "none" in value})
        for kind, path in paths.items():
            assert Counter(server.values(spark, f"dead-{kind}")) == bad
            rows = tables.read(spark, path).collect()
            assert Counter(f'{{"number": {row.number}}}' for row in rows) + bad == wanted, kind
        assert killing.done["inside"]
        sys.stdout.write(f"topic, Parquet, Delta: {killing.told(wanted.total())}")


def parquet_rows(path: Path) -> int:
    if not (path / "_sluice/table.json").exists():
        return 0
    return sum(file.rows for file in TableLog(path).refresh().files.values())


def delta_rows(path: Path) -> int:
    return sum(_rows_added(file) for file in (path / "_delta_log").glob("*.json"))


@functools.cache
def _rows_added(commit: Path) -> int:
    """What a commit of a stream added; those of OPTIMIZE change no data."""
    rows = 0
    for line in commit.read_text(encoding="utf-8").splitlines():
        added = json.loads(line).get("add")
        if added is not None and added["dataChange"]:
            rows += int(json.loads(added["stats"])["numRecords"])
    return rows
