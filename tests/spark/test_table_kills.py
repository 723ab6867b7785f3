"""A stream into a Parquet table while brokers, workers and drivers are killed: every message once.

Marked soak: `script/test -m soak tests/spark/test_table_kills.py`. TABLE_KILLS says how many.
"""

from __future__ import annotations

import os
import textwrap
import threading
import time
from collections import Counter
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING

import pytest

from sluice import Message, Producer, tables
from sluice.errors import SluiceError
from tests.interop.sluice_process import SluiceProcess
from tests.spark.kit import Server
from tests.spark.test_kills import LIMIT_SECONDS, Job

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.soak, pytest.mark.filterwarnings("ignore")]

KILLS = int(os.environ.get("TABLE_KILLS", "30"))
JOB = """
    import sys
    from pyspark.sql import SparkSession
    from sluice import tables

    address, checkpoint = sys.argv[1:]
    spark = (
        SparkSession.builder.master("local[2,4]")
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .config("spark.driver.memory", "1g")
        .getOrCreate()
    )
    spark.sparkContext.setLogLevel("ERROR")
    stream = (
        spark.readStream.format("sluice")
        .option("sluice.bootstrap.servers", address)
        .option("subscribe", "in")
        .option("startingOffsets", "earliest")
        .option("maxOffsetsPerTrigger", 5000)
        .option("minPartitions", 3)
        .load()
    )
    query = tables.write_stream(
        stream,
        checkpoint.replace("checkpoint", "table"),
        checkpoint=checkpoint,
        schema="number INT NOT NULL",
        dead_letter_topic="dead",
        servers=address,
    )
    query.awaitTermination()
"""


class TableJob(Job):
    """The same job with another program."""

    def __init__(self, directory: Path, address: str) -> None:
        super().__init__(directory, address)
        self._program.write_text(textwrap.dedent(JOB), encoding="utf-8")


class Sender(threading.Thread):
    """Sends numbers, each tenth as one that does not fit; each until it is acknowledged."""

    def __init__(self, address: str) -> None:
        super().__init__(daemon=True)
        self._address = address
        self.is_over = threading.Event()
        self.sent = 0

    def run(self) -> None:
        with Producer(nameservers=[self._address]) as producer:
            while not self.is_over.is_set():
                word = "none" if self.sent % 10 == 9 else "number"
                try:
                    producer.send(Message("in", f'{{"{word}": {self.sent}}}'))
                except SluiceError:
                    time.sleep(0.2)
                    continue
                self.sent += 1
                time.sleep(0.005)


def test_every_message_is_in_the_table_once_whoever_is_killed(
    spark: SparkSession, tmp_path: Path
) -> None:
    random = Random(7)
    path = tmp_path / "table"
    with SluiceProcess(tmp_path / "broker") as process:
        server = Server(process)
        for topic in ("in", "dead"):
            server.make(topic)
        job = TableJob(tmp_path, server.address)
        sender = Sender(server.address)
        sender.start()
        try:
            for number in range(KILLS):
                progress(job, path)
                time.sleep(random.uniform(0, 3))
                kind = ("driver", "worker", "driver", "broker")[number % 4]
                if kind == "broker":
                    process.kill()
                    time.sleep(random.uniform(0, 3))
                    process.start()
                elif kind == "worker":
                    job.kill_worker(random)
                else:
                    job.kill()
                if number % 3 == 2 and (path / "_sluice").exists():
                    tables.compact(path)
            sender.is_over.set()
            sender.join(120)
            until = time.monotonic() + LIMIT_SECONDS
            wanted = Counter(server.values(spark, "in"))
            bad = Counter({value: count for value, count in wanted.items() if "none" in value})
            while rows_in(path) + sum(server.ends("dead")) < sum(wanted.values()):
                assert time.monotonic() < until, "the job does not catch up"
                job.keep_running()
                time.sleep(2)
        finally:
            job.close()
        assert len(wanted) == sender.sent
        assert Counter(server.values(spark, "dead")) == bad
        found = Counter(f'{{"number": {row.number}}}' for row in tables.read(spark, path).collect())
        assert found + bad == wanted


def progress(job: Job, path: Path) -> None:
    """Until the job has committed something, so that a kill meets it at work."""
    before = rows_in(path)
    until = time.monotonic() + LIMIT_SECONDS
    while rows_in(path) == before:
        assert time.monotonic() < until, "the job does not go on"
        job.keep_running()
        time.sleep(0.2)


def rows_in(path: Path) -> int:
    from sluice.tables.log import TableLog

    if not (path / "_sluice/table.json").exists():
        return 0
    return sum(file.rows for file in TableLog(path).refresh().files.values())
