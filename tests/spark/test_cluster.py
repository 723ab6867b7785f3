"""A job on a standalone cluster of two workers, submitted with the commands of docs/spark.md.

Marked soak, because six Java processes start: `script/test -m soak tests/spark/test_cluster.py`.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import sys
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

pytest.importorskip("pyspark", reason="pyspark is not installed: script/setup does it")

import pyspark

from peers import PeerUnavailable
from peers.java import java_command
from peers.process import PeerProcess, free_ports, log_tail
from sluice import PullConsumer
from tests.interop.sluice_process import SluiceProcess
from tests.spark.kit import Server, forget_last_commit, messages

pytestmark = pytest.mark.soak

PAGE = Path(__file__).parents[2] / "docs/spark.md"
MESSAGES = 1200
WAIT_SECONDS = 600.0
_HOME = Path(pyspark.__file__).parent
_SMALL_JAVA = "-XX:+UseSerialGC -XX:TieredStopAtLevel=1"
# Beside what the page says: small processes, tasks for both workers, and a log to count them by.
_DEFAULTS = {
    "spark.driver.host": "127.0.0.1",
    "spark.driver.memory": "512m",
    "spark.executor.memory": "512m",
    "spark.driver.extraJavaOptions": _SMALL_JAVA,
    "spark.executor.extraJavaOptions": _SMALL_JAVA,
    "spark.ui.enabled": "false",
    "spark.network.timeout": "600s",
    "spark.scheduler.minRegisteredResourcesRatio": "1.0",
    "spark.scheduler.maxRegisteredResourcesWaitingTime": "600s",
    "spark.eventLog.enabled": "true",
    "spark.eventLog.compress": "false",
    "spark.eventLog.rolling.enabled": "false",
}


def until(condition: Callable[[], bool], what: str) -> None:
    limit = time.monotonic() + WAIT_SECONDS
    while not condition():
        assert time.monotonic() < limit, what
        time.sleep(0.1)


class StandaloneCluster:
    """A master and two workers on loopback, and jobs for them: the commands of the page."""

    def __init__(self, directory: Path, page: str, changes: dict[str, str]) -> None:
        """`changes` are the addresses and places of the page, and what they are here."""
        self._directory = directory
        (block,) = re.findall(
            r"^<!-- tested on a cluster -->\n```console\n(.*?)^```$", page, re.DOTALL | re.MULTILINE
        )
        for old, new in changes.items():
            assert old in block, f"the page does not say {old}"
            block = block.replace(old, new)
        commands = [shlex.split(line[2:]) for line in block.splitlines()]
        self._services = [words[:-1] for words in commands if words[-1] == "&"]
        (self._submit,) = [words for words in commands if words[0] == "spark-submit"]
        self.events = directory / "events"
        self.events.mkdir()
        settings = {
            **_DEFAULTS,
            "spark.eventLog.dir": self.events.as_uri(),
            "spark.sql.warehouse.dir": (directory / "warehouse").as_uri(),
        }
        lines = "".join(f"{name} {value}\n" for name, value in settings.items())
        (directory / "spark-defaults.conf").write_text(lines, encoding="utf-8")
        self._environment = {
            "SPARK_HOME": str(_HOME),
            "SPARK_CONF_DIR": str(directory),
            "SPARK_LOCAL_IP": "127.0.0.1",
            "SPARK_LOCAL_DIRS": str(directory / "local"),
            "SPARK_DAEMON_MEMORY": "256m",
            # A machine that stands still for a while is not a worker that is gone.
            "SPARK_DAEMON_JAVA_OPTS": f"{_SMALL_JAVA} -Dspark.worker.timeout=600",
            "PYSPARK_PYTHON": sys.executable,
            "PYSPARK_DRIVER_PYTHON": sys.executable,
        }
        self._running: list[PeerProcess] = []

    def _start(self, name: str, words: list[str]) -> PeerProcess:
        process = PeerProcess(
            name,
            [str(_HOME / "bin" / words[0]), *words[1:]],
            log=self._directory / f"{name}.log",
            environment=self._environment,
        )
        self._running.append(process)
        return process

    def __enter__(self) -> StandaloneCluster:
        master, *workers = self._services
        self._start("master", master).wait_ready("New state: ALIVE", WAIT_SECONDS)
        started = [self._start(f"worker-{n}", words) for n, words in enumerate(workers, 1)]
        for worker in started:
            worker.wait_ready("Successfully registered with master", WAIT_SECONDS)
        return self

    def __exit__(self, *_: object) -> None:
        for process in reversed(self._running):
            process.stop()

    def submitted(self, name: str) -> PeerProcess:
        """A job that runs."""
        return self._start(name, self._submit)

    def finished(self, job: PeerProcess) -> None:
        until(lambda: not job.running, f"{job.name} does not end")


def executors_of(work: Path) -> dict[str, int]:
    """The executors that a worker started, and their processes where they live."""
    found = {path.name: 0 for path in work.glob("app-*/*") if path.name.isdigit()}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                place = (entry / "cwd").readlink()
                words = (entry / "cmdline").read_bytes()
            except OSError:
                continue
            if work in place.parents and b"CoarseGrainedExecutorBackend" in words:
                found[place.name] = int(entry.name)
    return found


def tasks_done(events: Path) -> Counter[str]:
    """How many tasks each executor ended well."""
    found: Counter[str] = Counter()
    for file in events.iterdir():
        for line in file.read_text(encoding="utf-8").splitlines():
            event = json.loads(line)
            is_end = event["Event"] == "SparkListenerTaskEnd"
            if is_end and event["Task End Reason"]["Reason"] == "Success":
                found[event["Task Info"]["Executor ID"]] += 1
    return found


def bodies(server: Server, topic: str) -> list[str]:
    """All messages of a topic, sorted."""
    count = sum(server.ends(topic))
    found: list[str] = []
    group = f"g{uuid.uuid4().hex}"  # begins at the first message each time
    with PullConsumer(server.address, group=group, topics=topic, start_at="first") as consumer:

        def are_all_there() -> bool:
            found.extend(each.body.decode() for each in consumer.poll(timeout_seconds=1))
            return len(found) >= count

        until(are_all_there, f"{topic} has less than its offsets say")
    return sorted(found)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    try:
        java_command()
    except PeerUnavailable as error:
        pytest.skip(f"Spark needs Java 17: {error.reason}")
    with SluiceProcess(tmp_path / "broker", "--flush", "async") as process:
        yield Server(process)


def test_a_cluster_of_two_workers_reads_and_writes_every_message_once(
    server: Server, tmp_path: Path
) -> None:
    page = PAGE.read_text(encoding="utf-8")
    (program,) = re.findall(
        r"^<!-- copies.py -->\n```python\n(.*?)^```$", page, re.DOTALL | re.MULTILINE
    )
    (tmp_path / "copies.py").write_text(program, encoding="utf-8")
    server.make("gifts")
    server.make("gift-copies")
    server.send("gifts", MESSAGES)
    port, master_ui, *worker_ui = free_ports(4)
    works = [tmp_path / f"work-{number}" for number in (1, 2)]
    checkpoint = tmp_path / "checkpoint"
    changes = {
        "--webui-port 8080": f"--webui-port {master_ui}",
        "--webui-port 8081": f"--webui-port {worker_ui[0]}",
        "--webui-port 8082": f"--webui-port {worker_ui[1]}",
        "7077": str(port),
        "127.0.0.1:9876": server.address,
        "/var/spark/work-1": str(works[0]),
        "/var/spark/work-2": str(works[1]),
        "/data/copies-checkpoint": str(checkpoint),
        " copies.py": f" {tmp_path / 'copies.py'}",
    }
    with StandaloneCluster(tmp_path, page, changes) as cluster:
        job = cluster.submitted("copies-1")
        commits = checkpoint / "commits"
        until(
            lambda: not job.running or (commits.exists() and any(commits.iterdir())),
            "no batch is done",
        )
        assert job.running, log_tail(job.log)
        # An executor dies with what it had in hand; the worker starts another.
        victim = max(executors_of(works[0]).values())
        assert victim, "an executor of the first worker"
        os.kill(victim, signal.SIGKILL)
        cluster.finished(job)
        assert bodies(server, "gift-copies") == messages(0, MESSAGES)
        done = tasks_done(cluster.events)
        for work in works:
            assert sum(done[name] for name in executors_of(work)) > 0, (work.name, done)
        # As after a driver that died before it could note that its last batch is done.
        last = forget_last_commit(str(checkpoint))
        again = cluster.submitted("copies-2")
        cluster.finished(again)
        assert (commits / str(last)).exists(), log_tail(again.log)
        assert bodies(server, "gift-copies") == messages(0, MESSAGES)
