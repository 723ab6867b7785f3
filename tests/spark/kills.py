"""This module is what a run with kills is made of: the job, who fills its topic, and the killing.

A kill meets the job inside a batch, which Spark's checkpoints tell (what a batch reads is noted and
that it is done is not), or between two, when all that was sent has arrived. Both are waited for, so
that no kill is spent on a job that only starts.
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
from collections.abc import Callable
from pathlib import Path
from random import Random

from sluice import Message, Producer
from sluice.errors import SluiceError
from tests.interop.sluice_process import SluiceProcess

KILLS = int(os.environ.get("SPARK_TEST_KILLS", "30"))
KILL_SECONDS = float(os.environ.get("SPARK_TEST_KILL_SECONDS", "inf"))  # none after so long
KINDS = ("broker", "worker", "driver")
LIMIT_SECONDS = 3600
_BETWEEN_EVERY = 5  # has no factor in common with the kinds: each is killed in both ways
_POLL_SECONDS = 0.1


def until(condition: Callable[[], bool], what: str) -> None:
    """Wait for something that has to happen."""
    limit = time.monotonic() + LIMIT_SECONDS
    while not condition():
        assert time.monotonic() < limit, what
        time.sleep(_POLL_SECONDS)


class Job:
    """A driver as a process of its own, which can be killed and started again.

    Its program is given a directory for the checkpoints of its queries, one folder each.
    """

    def __init__(self, directory: Path, program: str, *words: str) -> None:
        file = directory / "job.py"
        file.write_text(textwrap.dedent(program), encoding="utf-8")
        self._checkpoints = directory / "checkpoints"
        self._words = [sys.executable, str(file), str(self._checkpoints), *words]
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
    def is_inside(self) -> bool:
        """Whether a batch of any query is begun and not done."""
        return any(
            _last(place / "offsets") > _last(place / "commits")
            for place in self._checkpoints.glob("*")
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
        """One Python process of the job."""

        def is_one_killed() -> bool:
            self.keep_running()
            own = self._workers()
            if own:
                os.kill(random.choice(own), signal.SIGKILL)
            return bool(own)

        until(is_one_killed, "the job starts no Python process")

    def _workers(self) -> list[int]:
        own = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    words = (entry / "cmdline").read_bytes()
                    if b"pyspark.daemon" in words and os.getsid(int(entry.name)) == self._group:
                        own.append(int(entry.name))
                except OSError:
                    continue
        return own

    def close(self) -> None:
        self.kill()
        self._log.close()


def _last(folder: Path) -> int:
    """The newest batch that a folder of a checkpoint names."""
    try:
        names = os.listdir(folder)
    except FileNotFoundError:
        return -1
    return max((int(name) for name in names if name.isdigit()), default=-1)


class Sender(threading.Thread):
    """Sends messages by their numbers, each until it is acknowledged; some may be there twice."""

    def __init__(self, address: str, make: Callable[[int], Message]) -> None:
        super().__init__(daemon=True)
        self._address = address
        self._make = make
        self._is_over = threading.Event()
        self._may_send = threading.Event()
        self._may_send.set()
        self._is_idle = threading.Event()
        self.sent = 0

    def run(self) -> None:
        with Producer(nameservers=[self._address]) as producer:
            while not self._is_over.is_set():
                if not self._may_send.is_set():
                    self._is_idle.set()
                    self._may_send.wait()
                    continue
                try:
                    producer.send(self._make(self.sent))
                except SluiceError:
                    time.sleep(0.2)
                    continue
                self.sent += 1
                time.sleep(0.005)

    def hold(self) -> None:
        """Send nothing until `go_on`; what is under way is done when this returns."""
        self._is_idle.clear()
        self._may_send.clear()
        assert self._is_idle.wait(LIMIT_SECONDS)

    def go_on(self) -> None:
        self._may_send.set()

    def end(self) -> None:
        self._is_over.set()
        self._may_send.set()
        self.join(LIMIT_SECONDS)
        assert not self.is_alive()


class Killing:
    """Kills in turn brokers, workers and drivers of a job that is at work."""

    def __init__(
        self,
        process: SluiceProcess,
        job: Job,
        sender: Sender,
        *,
        sent: Callable[[], int],
        arrived: Callable[[], int],
        random: Random,
    ) -> None:
        """`sent` and `arrived` count messages before the job and behind it."""
        self._process = process
        self._job = job
        self._sender = sender
        self._sent = sent
        self._arrived = arrived
        self._random = random
        self.done: Counter[str] = Counter()

    def run(self, kills: int, then: Callable[[int], None] = lambda _: None) -> None:
        """So many kills, and after each `then` with its number; at the end all has arrived."""
        limit = time.monotonic() + KILL_SECONDS
        for number in range(kills):
            self._progress()
            if time.monotonic() > limit:
                break
            is_between = number % _BETWEEN_EVERY == _BETWEEN_EVERY - 1
            if is_between:
                self._sender.hold()
                self._caught_up()
            else:
                time.sleep(self._random.uniform(0, 2))
                self._wait_for(lambda: self._job.is_inside, "no batch begins")
                time.sleep(self._random.uniform(0, 0.5))
            where = "inside" if self._job.is_inside else "between"
            kind = KINDS[number % len(KINDS)]
            self._kill(kind)
            self.done.update((kind, where))
            self._sender.go_on()
            then(number)
        self._sender.end()
        self._caught_up()

    def _kill(self, kind: str) -> None:
        if kind == "broker":
            self._process.kill()
            time.sleep(self._random.uniform(0, 3))
            self._process.start()
        elif kind == "worker":
            self._job.kill_worker(self._random)
        else:
            self._job.kill()

    def _progress(self) -> None:
        """Until something has arrived, so that a kill meets the job at work."""
        before = self._arrived()
        self._wait_for(lambda: self._arrived() > before, "the job does not go on")

    def _caught_up(self) -> None:
        wanted = self._sent()
        self._wait_for(
            lambda: self._arrived() >= wanted and not self._job.is_inside,
            "the job does not catch up",
        )

    def _wait_for(self, condition: Callable[[], bool], what: str) -> None:
        def is_so() -> bool:
            self._job.keep_running()
            return condition()

        until(is_so, what)

    def told(self, messages: int) -> str:
        """The closing line of a run."""
        kinds = ", ".join(f"{self.done[kind]} {kind}s" for kind in KINDS)
        where = f"{self.done['inside']} inside a batch, {self.done['between']} between two"
        return (
            f"{sum(self.done[kind] for kind in KINDS)} kills ({kinds}; {where}), "
            f"{self._job.starts} starts of the job, "
            f"{messages:,} messages: each there once\n"
        )
