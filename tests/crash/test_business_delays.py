"""This module crashes brokers while delayed messages are delivered: each comes once, and not early.

On a simulated disk the power goes before every operation of the delivery, and of what was not
synced nothing, everything, or any part is left. A real process is killed, too.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest

from sluice.broker import delay_rescue, delays
from sluice.broker.delay_desk import DelayDesk
from sluice.broker.delay_forms import Handle
from sluice.storage.memory_files import KeepAll, KeepNothing, KeepPolicy, KeepPrefix, MemoryFiles
from tests.unit.broker.delay_kit import TOPIC, Box
from tests.unit.storage.store_kit import BEGIN_MS

_CHANGES = ("pwritev", "sync", "replace")


class WatchedFiles(MemoryFiles):
    """A disk that keeps pictures of itself: what would be left if the power went now."""

    def __init__(self) -> None:
        super().__init__()
        self.pictures: list[tuple[int, MemoryFiles]] | None = None
        self.now_ms = 0
        self.random = Random(5)

    def _call(self, operation: str, path: str) -> None:
        if self.pictures is not None and operation in _CHANGES:
            self.pictures += [(self.now_ms, self.crash(keep)) for keep in self._policies()]
        super()._call(operation, path)

    def _policies(self) -> Iterator[KeepPolicy]:
        yield KeepNothing()
        yield KeepAll()
        unsynced = self.unsynced_bytes()
        for count in self.random.sample(range(unsynced), min(unsynced, 4)):
            yield KeepPrefix(count)


class WatchedBox(Box):
    """Services on such a disk."""

    def __init__(self, files: MemoryFiles | None = None, now_ms: int = BEGIN_MS) -> None:
        self._first_files: MemoryFiles | None = files if files is not None else WatchedFiles()
        self._first_ms = now_ms
        super().__init__(flush="sync", segment_bytes=16 << 10, retention_hours=1)

    def open(self) -> None:
        if self._first_files is not None:
            self.disk.files, self._first_files = self._first_files, None
            self.disk.now_ms = self._first_ms
        super().open()

    def watched_ms(self, elapsed_ms: int) -> None:
        self.disk.now_ms += elapsed_ms
        if isinstance(self.disk.files, WatchedFiles):
            self.disk.files.now_ms = self.disk.now_ms
        self.tick()


@pytest.fixture
def small_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few in a turn, and a note after every one, so that there are many places to crash at."""
    monkeypatch.setattr(delays, "_TURN_COUNT_MAX", 2)
    monkeypatch.setattr(delays, "_BATCH_MAX", 5)
    monkeypatch.setattr(delays, "_NOTE_MS", 300)
    monkeypatch.setattr(delay_rescue, "_TURN_COUNT_MAX", 2)


def filled() -> tuple[WatchedBox, Counter[bytes]]:
    """A broker in which levels and timers wait, and the bodies that must come out."""
    box = WatchedBox()
    box.make_topic()
    for number in range(5):
        box.send(b"level %d" % number, DELAY=str(1 + number % 2))
        box.send(b"timer %d" % number, TIMER_DELAY_MS=str(1_000 + 400 * number))
        box.send(b"same %d" % number, TIMER_DELAY_MS="1500")
    return box, Counter(box.waiting_bodies())


def check(files: MemoryFiles, now_ms: int, expected: Counter[bytes], wait_ms: int) -> None:
    """Whatever was delivered before, in the end everything was, once; also after another crash."""
    box = WatchedBox(files, now_ms)
    already = Counter(box.bodies())
    assert already <= expected, "delivered twice, or what must not be"
    box.pass_ms(0)
    for entry in box.entries():
        due = box.due_of(entry)
        assert due <= box.now_ms, "early"
    for _ in range(3):
        box.pass_ms(wait_ms // 2)
    assert Counter(box.bodies()) == expected
    box.crash(KeepAll())
    box.pass_ms(wait_ms)
    assert Counter(box.bodies()) == expected


def test_power_cuts_while_timers_fire(small_turns: None) -> None:
    box, expected = filled()
    files = box.disk.files
    assert isinstance(files, WatchedFiles)
    files.pictures = []
    for _ in range(12):
        box.watched_ms(500)
    pictures, files.pictures = files.pictures, None
    assert Counter(box.bodies()) == expected
    assert len(pictures) > 100
    for now_ms, picture in pictures:
        check(picture, now_ms, expected, 6_000)


def test_power_cuts_while_messages_are_taken_back(small_turns: None) -> None:
    box, expected = filled()
    box.send(b"back", TIMER_DELAY_MS="3000", UNIQ_KEY="u1")
    box.tick()
    files = box.disk.files
    assert isinstance(files, WatchedFiles)
    files.pictures = []
    told: list[Any] = []
    handle = Handle(TOPIC, "broker-a", BEGIN_MS + 3_000, "u1")
    DelayDesk(box.core, box.core.delays).recall(handle, "", told.append)
    box.settle()
    assert told == [None]
    recalled_at = len(files.pictures)
    for _ in range(12):
        box.watched_ms(500)
    pictures, files.pictures = files.pictures, None
    assert Counter(box.bodies()) == expected
    for now_ms, picture in pictures[recalled_at:]:
        check(picture, now_ms, expected, 6_000)


def test_power_cuts_while_old_entries_are_written_anew(small_turns: None) -> None:
    box = WatchedBox()
    box.make_topic()
    for number in range(6):
        box.send(b"timer %d" % number, TIMER_DELAY_MS=str(10 * 3_600_000 + number))
        box.send(b"level %d" % number, DELAY="18")
    expected = Counter(box.waiting_bodies())
    for _ in range(40):
        box.send(bytes(1_000), queue_id=1)
    files = box.disk.files
    assert isinstance(files, WatchedFiles)
    box.core.store.housekeeping.checkpoint()
    start = box.core.store.log.start
    files.pictures = []
    for step in range(12):
        if step % 4 == 0:
            box.core.store.housekeeping.delete_expired()
        box.watched_ms(3_600_000 if step == 0 else 1_100)
        box.send(bytes(1_000), queue_id=1)
    pictures, files.pictures = files.pictures, None
    assert box.core.store.log.start > start, "old files went"
    assert box.core.delays.rescue.moved >= 12
    for now_ms, picture in Random(1).sample(pictures, min(len(pictures), 150)):
        check(picture, now_ms, expected, 12 * 3_600_000)


# ---------------------------------------------------------------------------------- a real process

CHILD = Path(__file__).with_name("timer_broker.py")


def run_child(directory: Path, first: int, point: str, count: int) -> list[list[str]]:
    """Let the process run until it kills itself, or is done; its whole lines."""
    words = [sys.executable, str(CHILD), str(directory), str(first), point, str(count)]
    python_path = {"PYTHONPATH": ":".join(sys.path)}
    done = subprocess.run(words, check=False, stdout=subprocess.PIPE, env=python_path, timeout=300)
    assert done.returncode == (0 if point == "drain" else -signal.SIGKILL)
    lines = done.stdout.splitlines(keepends=True)
    return [line.decode().split() for line in lines if line.endswith(b"\n")]


def test_kill_while_timers_fire(tmp_path: Path) -> None:
    """At each point the process dies some hundred deliveries after its start."""
    due: dict[int, int] = {}
    first = 0
    points = [("deliver", 333), ("note", 2), ("confirmed", 25), ("written", 60), ("deliver", 1)]
    for point, count in points:
        for _, number, due_ms in run_child(tmp_path, first, point, count):
            due[int(number)] = int(due_ms)
        first += 100_000
    got = [(int(number), int(ms)) for _, number, ms in run_child(tmp_path, 0, "drain", 0)]
    numbers = Counter(number for number, _ in got)
    assert max(numbers.values()) == 1, "delivered twice"
    assert sorted(due.keys() - numbers.keys()) == [], "acknowledged and lost"
    assert len(due) > 300
    for identity, store_ms in got:
        assert store_ms >= due.get(identity, 0), "early"
