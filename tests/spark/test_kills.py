"""A stream from topic to topic while brokers, workers and drivers are killed: every message once.

Marked soak: `script/test -m soak tests/spark/test_kills.py`.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections import Counter
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING

import pytest

from sluice import Message, Producer
from sluice.errors import SluiceError
from tests.interop.sluice_process import SluiceProcess
from tests.spark.kit import Server

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.soak, pytest.mark.filterwarnings("ignore")]

KILLS = 30
LIMIT_SECONDS = 3600
JOB = """
    import sys
    from pyspark.sql import SparkSession

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
        .option("maxOffsetsPerTrigger", 300)
        .option("minPartitions", 3)
        .option("groupId", "kills")
        .load()
    )
    query = (
        stream.select("value", "key")
        .writeStream.format("sluice")
        .option("sluice.bootstrap.servers", address)
        .option("topic", "out")
        .option("checkpointLocation", checkpoint)
        .start()
    )
    query.awaitTermination()
"""


class Job:
    """A driver as a process of its own, which can be killed and started again."""

    def __init__(self, directory: Path, address: str) -> None:
        self._program = directory / "job.py"
        self._program.write_text(textwrap.dedent(JOB), encoding="utf-8")
        self._words = [sys.executable, str(self._program), address, str(directory / "checkpoint")]
        self._log = (directory / "job.log").open("ab")
        self._process: subprocess.Popen[bytes] | None = None
        self.starts = 0

    def keep_running(self) -> None:
        """Start it where it has ended; a query that failed is started again by its operator."""
        if self._process is None or self._process.poll() is not None:
            self.starts += 1
            self._process = subprocess.Popen(
                self._words,
                stdout=self._log,
                stderr=self._log,
                env={**os.environ, "PYSPARK_PYTHON": sys.executable},
                start_new_session=True,
            )

    @property
    def _group(self) -> int:
        assert self._process is not None
        return self._process.pid

    def kill(self) -> None:
        """The driver with its JVM and its workers, all at once."""
        if self._process is not None and self._process.poll() is None:
            os.killpg(self._group, signal.SIGKILL)
            self._process.wait()

    def kill_worker(self, random: Random) -> None:
        """One Python process of the job, if there is one."""
        own = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    words = (entry / "cmdline").read_bytes()
                    if b"pyspark.daemon" in words and os.getsid(int(entry.name)) == self._group:
                        own.append(int(entry.name))
                except OSError:
                    continue
        if own:
            os.kill(random.choice(own), signal.SIGKILL)

    def close(self) -> None:
        self.kill()
        self._log.close()


class Sender(threading.Thread):
    """Sends numbers, each until it is acknowledged; some may be there more than once."""

    def __init__(self, address: str) -> None:
        super().__init__(daemon=True)
        self._address = address
        self.is_over = threading.Event()
        self.sent = 0

    def run(self) -> None:
        with Producer(nameservers=[self._address]) as producer:
            while not self.is_over.is_set():
                try:
                    producer.send(Message("in", f"m{self.sent}", keys=f"k{self.sent % 7}"))
                except SluiceError:
                    time.sleep(0.2)
                    continue
                self.sent += 1
                time.sleep(0.005)


def test_every_message_once_whoever_is_killed(spark: SparkSession, tmp_path: Path) -> None:
    random = Random(5)
    with SluiceProcess(tmp_path / "broker") as process:
        server = Server(process)
        server.make("in")
        server.make("out")
        job = Job(tmp_path, server.address)
        sender = Sender(server.address)
        sender.start()
        try:
            for number in range(KILLS):
                job.keep_running()
                time.sleep(random.uniform(2, 15))
                kind = ("broker", "worker", "driver")[number % 3]
                if kind == "broker":
                    process.kill()
                    time.sleep(random.uniform(0, 3))
                    process.start()
                elif kind == "worker":
                    job.kill_worker(random)
                else:
                    job.kill()
            sender.is_over.set()
            sender.join(120)
            until = time.monotonic() + LIMIT_SECONDS
            while sum(server.ends("out")) < sum(server.ends("in")):
                assert time.monotonic() < until, "the job does not catch up"
                job.keep_running()
                time.sleep(2)
        finally:
            job.close()
        wanted = Counter(server.values(spark, "in"))
        assert len(wanted) == sender.sent
        assert Counter(server.values(spark, "out")) == wanted
