"""This module kills `sluice collect` with SIGKILL again and again while logs grow and are rotated.

A broker process of its own takes the lines, and is killed once as well. Every line must be there in
the end. Lines are there twice only where the collector died before it had noted them, and then with
the same file and offset.
"""

from __future__ import annotations

import json
import shutil
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest

from peers.process import PeerProcess
from sluice import PullConsumer
from tests.interop.sluice_process import SluiceProcess

WAIT_SECONDS = 120.0
TOPIC = "logs-app"
LINES = 1500  # that are written while one collector lives, and may be left to the next


class Writer:
    """A program that writes a log, and rotates it in both ways, as much as it is allowed to."""

    def __init__(self, directory: Path) -> None:
        self.allowed = 0
        self._directory = directory
        self._log = directory / "app.log"
        self.lines: list[str] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        rotations = 0
        while not self._stop.wait(0.01):
            if len(self.lines) >= self.allowed:
                continue
            with self._log.open("a", encoding="utf-8") as file:
                for _ in range(20):
                    self.lines.append(f"line {len(self.lines)} of a program that says much, " * 2)
                    file.write(self.lines[-1] + "\n")
            if len(self.lines) % 600 == 0:
                rotations += 1
                old = self._directory / f"app.log.{rotations}"
                if rotations % 2:
                    self._log.rename(old)
                else:
                    shutil.copy(self._log, old)
                    with self._log.open("r+b") as file_to_empty:
                        file_to_empty.truncate(0)

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()


class Site:
    """A broker, a collector, their directory."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.logs = directory / "logs"
        self.logs.mkdir()
        self.broker = SluiceProcess(directory / "broker")
        self.writer = Writer(self.logs)
        self._starts = 0

    def start_collector(self) -> PeerProcess:
        self._starts += 1
        words = [
            *("collect", str(self.logs / "app.log*"), "--topic", "logs-{name}", "--verbose"),
            *("--state", str(self.directory / "state"), "-n", self.broker.nameserver_address),
            *("--poll-ms", "20", "--linger-ms", "20"),
        ]
        return PeerProcess(
            "sluice collect",
            [sys.executable, "-m", "sluice", *words],
            log=self.directory / f"collect.{self._starts}.log",
            environment={"PYTHONPATH": ":".join(sys.path)},
        )

    def noted_bytes(self) -> int:
        """How much the collector has noted as sent, of all files together."""
        try:
            text = (self.directory / "state" / "places.json").read_text()
        except FileNotFoundError:
            return 0
        return sum(place["offset"] for place in json.loads(text)["places"])

    def run_and_kill(self, random: Random) -> None:
        self.writer.allowed += LINES
        collector = self.start_collector()
        before = self.noted_bytes()
        wait_for(lambda: abs(self.noted_bytes() - before) > random.randrange(1, 20_000), collector)
        time.sleep(random.random() * 0.05)
        collector.kill()

    def kill_broker(self) -> None:
        """The broker dies under the collector, and comes back."""
        collector = self.start_collector()
        self.writer.allowed += LINES
        before = self.noted_bytes()
        wait_for(lambda: self.noted_bytes() != before, collector)
        self.broker.kill()
        self.writer.allowed += LINES
        wait_for(lambda: "reading waits" in collector.output(), collector)
        self.broker.start()
        wait_for(lambda: "reading goes on" in collector.output(), collector)
        collector.stop()
        assert "Traceback" not in collector.output()
        assert collector.output().splitlines()[-1].startswith("sent ")


def wait_for(holds: Callable[[], bool], collector: PeerProcess) -> None:
    deadline = time.monotonic() + WAIT_SECONDS
    while not holds():
        assert collector.running, collector.output()[-2000:]
        assert time.monotonic() < deadline, collector.output()[-2000:]
        time.sleep(0.01)


def read_back(site: Site, lines: set[str]) -> list[tuple[str, int, str]]:
    """File, offset and body of all messages, when all lines are among them."""
    found: list[tuple[str, int, str]] = []
    missing = set(lines)
    address = site.broker.nameserver_address
    deadline = time.monotonic() + WAIT_SECONDS
    with PullConsumer(address, group="reader", topics=TOPIC, start_at="first") as consumer:
        while missing:
            assert time.monotonic() < deadline, f"{len(missing)} lines are lost: {min(missing)}"
            messages = consumer.poll(timeout_seconds=1.0, count=1000)
            if messages:
                deadline = time.monotonic() + WAIT_SECONDS
            for message in messages:
                body = bytes(message.body).decode()
                place = message.properties["file"], int(message.properties["offset"])
                found.append((*place, body))
                missing.discard(body)
    return found


def kill_many(directory: Path, kill_count: int, seed: int) -> None:
    random = Random(seed)
    site = Site(directory)
    with site.broker:
        try:
            for _ in range(kill_count):
                site.run_and_kill(random)
            site.kill_broker()
        finally:
            site.writer.stop()
        lines = site.writer.lines
        collector = site.start_collector()
        try:
            found = read_back(site, set(lines))
        finally:
            collector.stop()
    assert {body for _, _, body in found} == set(lines), "a message that is no line"
    numbers = {line: number for number, line in enumerate(lines)}
    known: dict[tuple[str, int], str] = {}
    for file, offset, body in found:
        assert known.setdefault((file, offset), body) == body
    last: dict[str, int] = {}
    for (file, _), body in known.items():  # as they came first, queue by queue
        assert last.get(file, -1) < numbers[body], "a file is out of order"
        last[file] = numbers[body]


@pytest.mark.slow
def test_kill(tmp_path: Path) -> None:
    kill_many(tmp_path, kill_count=3, seed=4)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(10))
def test_kill_soak(tmp_path: Path, seed: int) -> None:
    """300 kills in all."""
    kill_many(tmp_path, kill_count=30, seed=seed)
