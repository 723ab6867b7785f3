"""Reading ahead of the log's writes: only where they are slow, only as long, never too far."""

from __future__ import annotations

from typing import cast

import pytest

from sluice.storage.background import Steps
from sluice.storage.commit_log import CommitLog
from sluice.storage.files import OpenFile
from sluice.storage.memory_files import MemoryFiles
from sluice.storage.slow_pages import SlowPages

MIB = 1 << 20
FILE_BYTES = 256 * MIB
WRITE_BYTES = 64 << 10
SLOW_US, QUICK_US = 20, 1


class File:
    """Notes what is read ahead of it, and lets time pass."""

    size = FILE_BYTES

    def __init__(self) -> None:
        self.own_ns = self.now_ns = 1
        self.page_us = QUICK_US
        self.warmed: list[tuple[int, int]] = []
        self.error: OSError | None = None

    def take(self, byte_count: int) -> None:
        self.own_ns += byte_count // 4096 * self.page_us * 1000

    def warm(self, start: int, stop: int) -> None:
        if self.error is not None:
            raise self.error
        self.warmed.append((start, stop))
        self.take(stop - start)


class Log:
    """Writes of one size, one after the other, in the file that begins at `base`."""

    def __init__(self, base: int = 0) -> None:
        self.file = File()
        self.background = Steps()
        self.slow_count = 0
        self.pages = SlowPages(
            self.background,
            on_slow=self.note_slow,
            own_ns=lambda: self.file.own_ns,
            now_ns=lambda: self.file.now_ns,
        )
        self.base = self.end = base

    def note_slow(self) -> None:
        self.slow_count += 1

    def is_ahead(self) -> bool:
        return self.pages.is_ahead

    def write(self, mib: float, *, write_ns: int = 100_000, run: bool = True) -> None:
        for _ in range(int(mib * MIB) // WRITE_BYTES):
            since_ns = self.pages.begin()
            if not any(start <= self.end - self.base < stop for start, stop in self.file.warmed):
                self.file.take(WRITE_BYTES)
            self.file.now_ns += write_ns
            begin, self.end = self.end, self.end + WRITE_BYTES
            self.pages.wrote(self.base, cast(OpenFile, self.file), begin, self.end, since_ns)
            if run:
                self.background.run_all()

    def write_early(self, mib: int, turn_mib: int = 4, *, run: bool = True) -> None:
        """Megabytes a turn, as they are published."""
        for _ in range(mib // turn_mib):
            since_ns = self.file.own_ns
            if not any(start <= self.end - self.base < stop for start, stop in self.file.warmed):
                self.file.take(turn_mib * MIB)
            self.file.now_ns += 10_000_000
            self.end += turn_mib * MIB
            file, took_ns = cast(OpenFile, self.file), self.file.own_ns - since_ns
            self.pages.wrote_early(self.base, file, self.end, turn_mib * MIB, took_ns)
            if run:
                self.background.run_all()


def test_quick_writes_are_left_alone() -> None:
    log = Log()
    log.write(64)
    assert log.file.warmed == []


def test_slow_writes_that_are_few_are_left_alone() -> None:
    log = Log()
    log.file.page_us = SLOW_US
    log.write(64, write_ns=10_000_000)
    assert log.file.warmed == []


@pytest.mark.parametrize("base", [0, FILE_BYTES])
def test_where_writes_are_slow_what_comes_next_is_read_before(base: int) -> None:
    log = Log(base)
    log.file.page_us = SLOW_US
    log.write(9)
    assert log.is_ahead()
    log.write(40)
    begin, end = log.file.warmed[0][0], log.file.warmed[-1][1]
    assert 0 < begin <= 9 * MIB
    assert 49 * MIB < end <= (49 + 12) * MIB
    starts, stops = zip(*log.file.warmed, strict=True)
    assert starts[1:] == stops[:-1], "each page once"


def test_one_step_at_a_time_and_never_behind_the_writes() -> None:
    log = Log()
    log.file.page_us = SLOW_US
    log.write(9, run=False)
    log.write(30, run=False)
    assert len(log.background.waiting["ahead"]) == 1
    log.background.run_all()
    log.write(1)
    first, second, *_ = log.file.warmed
    assert first[1] < 39 * MIB <= second[0]


def test_two_steps_at_a_time_for_what_is_written_early() -> None:
    log = Log()
    log.file.page_us = SLOW_US
    log.write_early(8, run=False)
    assert {lane: len(jobs) for lane, jobs in log.background.waiting.items()} == {
        "ahead": 1,
        "ahead-too": 1,
    }
    log.background.run_all()
    log.write_early(100)
    starts, stops = zip(*sorted(log.file.warmed), strict=True)
    assert starts[1:] == stops[:-1], "each page once"
    assert 96 * MIB <= stops[-1] - log.end < (96 + 16) * MIB
    log.write(1)
    assert len(log.file.warmed) == len(starts), "enough for any other writes"


def test_quick_early_writes_are_left_alone() -> None:
    log = Log()
    log.write_early(64)
    assert log.file.warmed == []


def test_it_ends_where_memory_is_quick_and_begins_again() -> None:
    log = Log()
    log.file.page_us = SLOW_US
    log.write(20)
    log.file.page_us = QUICK_US
    log.write(8)
    assert log.is_ahead(), "slow memory lies between quick one"
    log.write(60)
    assert not log.is_ahead()
    count = len(log.file.warmed)
    log.write(30)
    assert len(log.file.warmed) == count
    log.file.page_us = SLOW_US
    log.write(20)
    assert log.is_ahead()


def test_it_says_so_as_long_as_memory_is_slow() -> None:
    log = Log()
    log.write(20)
    assert log.slow_count == 0
    log.file.page_us = SLOW_US
    log.write(20)
    first = log.slow_count
    assert first
    log.write(20)
    second = log.slow_count
    assert second > first, "writes are quick then, and what is made ahead is not"
    log.file.page_us = QUICK_US
    log.write(20)
    assert log.slow_count == second


def test_it_stays_within_the_file() -> None:
    log = Log()
    log.file.page_us = SLOW_US
    log.write(256)
    assert log.file.warmed[-1][1] == FILE_BYTES
    log.base = log.end
    log.file.warmed.clear()
    log.write(16)
    assert log.file.warmed[0][0] < MIB


def test_what_cannot_be_read_ends_it() -> None:
    log = Log()
    log.file.page_us = SLOW_US
    log.file.error = OSError("gone")
    log.write(9)
    assert not log.is_ahead()
    assert log.file.warmed == []


def test_the_log_has_its_large_writes_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, int, int]] = []

    def wrote(_: SlowPages, base: int, file: object, begin: int, end: int, since_ns: int) -> None:
        seen.append((base, begin, end))

    monkeypatch.setattr(SlowPages, "wrote", wrote)
    log = CommitLog(MemoryFiles(), "/log", Steps(), 100_000)
    log.load()
    log.finish_load(0)
    for size in (100, 40_000, 4_095, 4_096, 60_000):
        log.position_for(size)
        log.stage(bytes(size))
        log.write()
    assert seen == [(0, 100, 40_100), (0, 44_195, 48_291), (100_000, 100_000, 160_000)]
    log.close()


def test_the_log_has_its_early_writes_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, int, int]] = []

    def wrote(
        _: SlowPages, base: int, file: object, end: int, byte_count: int, took_ns: int
    ) -> None:
        seen.append((base, end, byte_count))

    monkeypatch.setattr(SlowPages, "wrote_early", wrote)
    log = CommitLog(MemoryFiles(), "/log", Steps(), 100_000)
    log.load()
    log.finish_load(0)
    for size, is_early in ((40_000, True), (30_000, False), (90_000, True), (5_000, True)):
        log.position_for(size)
        log.stage(bytes(size))
        if is_early:
            log.write_early()
        if size != 90_000:
            log.write()
    # With the mark at the end of the file that was full: it is written in its order.
    assert seen == [(0, 40_000, 40_000), (100_000, 195_000, 95_008)]
    log.close()
