"""Pages of the log that nobody reads make room where memory is slow to get: the oldest ones, never
the newest, and only then.
"""

from __future__ import annotations

from pathlib import Path
from typing import cast

import pytest

from sluice.config import StoreConfig
from sluice.model import Message
from sluice.storage import page_cache
from sluice.storage.background import Inline, Steps
from sluice.storage.commit_log import CommitLog
from sluice.storage.files import UNREAD, OpenFile, RealFiles
from sluice.storage.memory_files import MemoryFiles
from sluice.storage.old_pages import OldPages, kept_bytes
from sluice.storage.opening import open_store
from sluice.storage.slow_pages import SlowPages

MIB = 1 << 20
FILE_BYTES = 256 * MIB
KEPT_BYTES = 128 * MIB
SECOND_NS = 1_000_000_000


class File:
    """Notes what it gave back."""

    def __init__(self) -> None:
        self.forgotten: list[tuple[int, int]] = []
        self.read_from = UNREAD
        self.error: OSError | None = None

    def viewed_from(self) -> int:
        read_from, self.read_from = self.read_from, UNREAD
        return read_from

    def forget(self, start: int, stop: int) -> None:
        if self.error is not None:
            raise self.error
        self.forgotten.append((start, stop))


class Segment:
    def __init__(self) -> None:
        self.noted = File()
        self.file = cast(OpenFile, self.noted)


class Log:
    """A log that is written a megabyte at a time."""

    def __init__(self, begin: int = 0) -> None:
        self.now_ns = 100 * SECOND_NS
        self.segments = {base: Segment() for base in range(0, 8 * FILE_BYTES, FILE_BYTES)}
        self.pages = OldPages(self.segments, FILE_BYTES, KEPT_BYTES, lambda: self.now_ns)
        self.pages.start_at(begin)
        self.end = begin
        self.is_flushed = True

    def write(self, mib: int) -> None:
        for _ in range(mib):
            self.end += MIB
            if self.is_flushed:
                self.pages.flushed(self.end)
            if self.end >= self.pages.due_at:
                self.pages.make_room(self.end)

    def forgotten(self) -> list[tuple[int, int]]:
        """What was given back, as positions in the log."""
        return [
            (base + start, base + stop)
            for base, segment in self.segments.items()
            for start, stop in segment.noted.forgotten
        ]

    def forgotten_mib(self) -> int:
        return sum(stop - start for start, stop in self.forgotten()) // MIB


def test_where_memory_is_quick_nothing_is_given_back() -> None:
    log = Log()
    log.write(1000)
    assert log.forgotten() == []


def test_the_oldest_pages_make_room_and_the_newest_stay() -> None:
    log = Log()
    log.write(600)
    log.pages.begin()
    log.write(300)
    parts = log.forgotten()
    starts, stops = zip(*parts, strict=True)
    assert starts[0] == 0
    assert starts[1:] == stops[:-1], "each page once, in order"
    # As much as was written, and some megabytes more.
    assert 300 <= log.forgotten_mib() <= 300 + 8
    assert max(stop - start for start, stop in parts[1:]) == 2 * MIB, "little by little"
    assert log.pages.is_giving
    log.write(1000)
    assert log.forgotten()[-1][1] <= log.end - KEPT_BYTES


def test_a_young_log_has_nothing_to_give() -> None:
    log = Log()
    log.pages.begin()
    log.write(128)
    assert log.forgotten() == []
    log.write(40)
    assert 0 < log.forgotten_mib() <= 40


def test_what_was_there_before_the_start_is_left_alone() -> None:
    log = Log(begin=300 * MIB + 5)
    log.write(400)
    log.pages.begin()
    log.write(10)
    assert log.forgotten()[0][0] == 302 * MIB, "the next border that pages have"


def test_it_ends_a_while_after_memory_was_slow() -> None:
    log = Log()
    log.write(600)
    log.pages.begin()
    log.write(100)
    count = len(log.forgotten())
    assert count
    log.now_ns += 601 * SECOND_NS
    log.write(100)
    assert len(log.forgotten()) == count
    log.pages.begin()
    log.write(100)
    assert len(log.forgotten()) > count


def test_what_follows_a_place_that_is_read_keeps_its_pages() -> None:
    log = Log()
    log.write(1000)
    first, second, third, *_ = [segment.noted for segment in log.segments.values()]
    first.read_from = 0
    log.pages.note_reads()
    log.pages.begin()
    log.write(100)
    assert (first.forgotten, second.forgotten) == ([], []), "who reads the file goes on in the next"
    assert third.forgotten != []
    log.now_ns += 5 * SECOND_NS
    first.read_from = 101 * MIB
    log.pages.note_reads()
    log.write(50)
    assert first.forgotten == [], "it was read from its beginning on within the last seconds"
    log.now_ns += 5 * SECOND_NS
    log.pages.note_reads()
    log.write(200)
    assert first.forgotten[-1][1] == 100 * MIB, "in between it was read from there on"
    assert second.forgotten == []
    log.now_ns += 5 * SECOND_NS
    log.write(200)
    assert first.forgotten[-1][1] == FILE_BYTES
    assert second.forgotten != []


def test_much_that_is_written_at_once_has_as_much_room_made() -> None:
    log = Log()
    log.write(600)
    log.pages.begin()
    for _ in range(10):
        log.end += 16 * MIB
        log.pages.flushed(log.end)
        assert log.end >= log.pages.due_at
        log.pages.make_room(log.end)
    assert 80 <= log.forgotten_mib() <= 168


def test_what_is_not_on_the_disk_stays() -> None:
    log = Log()
    log.write(100)
    log.is_flushed = False
    log.write(500)
    log.pages.begin()
    log.write(300)
    assert log.forgotten()[-1][1] == 100 * MIB
    assert not log.pages.is_giving, "nothing is left of what was given"
    log.is_flushed = True
    log.write(10)
    assert log.forgotten()[-1][1] > 100 * MIB


def test_it_is_giving_as_long_as_memory_is_left() -> None:
    log = Log()
    log.pages.begin()
    log.write(KEPT_BYTES // MIB + 3)
    assert log.pages.is_giving
    # All that may be given was: the border moves with the end of the log.
    for _ in range(200):
        log.write(1)
        assert log.pages.is_giving
    log.now_ns += 601 * SECOND_NS
    log.write(10)
    assert not log.pages.is_giving


def test_a_failure_ends_it_and_harms_nobody() -> None:
    log = Log()
    log.write(600)
    log.segments[0].noted.error = OSError("no such call")
    log.pages.begin()
    log.write(100)
    assert log.forgotten() == []
    assert not log.pages.is_giving
    log.segments[0].noted.error = None
    log.pages.begin()
    log.write(100)
    assert log.forgotten() == [], "it is not tried again and again"


def test_files_that_are_gone_are_forgotten() -> None:
    log = Log()
    log.write(600)
    log.pages.begin()
    log.write(50)
    del log.segments[0]
    log.pages.forget(0)
    log.write(300)
    assert log.segments[FILE_BYTES].noted.forgotten[0][0] == 0


def test_a_part_of_the_memory_stays() -> None:
    assert kept_bytes(0) >= 256 * MIB
    assert kept_bytes(1) == 256 * MIB
    assert kept_bytes(1 << 40) == 1 << 40


def test_the_log_asks_when_writes_were_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(OldPages, "make_room", lambda _, end: asked.append(end))
    log = CommitLog(MemoryFiles(), "/log", Steps(), 100_000)
    log.load()
    log.finish_load(0)

    def write() -> None:
        log.position_for(5_000)
        log.stage(bytes(5_000))
        log.write()

    write()
    assert asked == []
    log._pages._on_slow()
    write()
    assert asked == [10_000]
    log.close()


def test_while_memory_is_given_back_nothing_is_made_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    monkeypatch.setattr(SlowPages, "wrote", lambda *_: seen.append("wrote"))
    monkeypatch.setattr(SlowPages, "wrote_early", lambda *_: seen.append("early"))
    log = CommitLog(MemoryFiles(), "/log", Steps(), 100_000)
    log.load()
    log.finish_load(0)

    def write() -> None:
        log.position_for(10_000)
        log.stage(bytes(5_000))
        log.write_early()
        log.stage(bytes(5_000))
        log.write()

    write()
    assert seen == ["wrote", "early"]
    log._old_pages.is_giving = True
    write()
    assert seen == ["wrote", "early"]
    log.close()


def test_the_log_knows_what_is_on_the_disk() -> None:
    store = open_store(
        StoreConfig(directory="/store", segment_bytes=MIB, flush="async"),
        MemoryFiles(),
        Inline(),
        lambda: 1_000_000,
        bytes(8),
    )
    store.stage(Message("orders", 0, b"x"))
    store.write_staged()
    assert store.log._old_pages._flushed < store.log.written
    store.flusher.flush_to(store.log.written)
    assert store.log._old_pages._flushed == store.log.written
    store.release()


def test_the_store_notes_what_is_read() -> None:
    disk, now_ms = MemoryFiles(), 1_000_000
    store = open_store(
        StoreConfig(directory="/store", segment_bytes=MIB), disk, Inline(), lambda: now_ms, bytes(8)
    )
    file = store.log.segments[0].file
    file.view(77)
    now_ms += 3_600_000
    store.tick()
    assert file.viewed_from() == UNREAD, "somebody has asked"
    assert store.log._old_pages._reads[0][0][0] <= 77
    store.release()


def test_a_range_of_a_file_is_out_of_memory_and_can_be_read_all_the_same(tmp_path: Path) -> None:
    file = RealFiles().create(f"{tmp_path}/a", 4 * MIB)
    file.pwritev([b"x" * (4 * MIB)], 0)
    file.sync()
    assert file.viewed_from() == UNREAD
    view = file.view(MIB)
    assert file.view(2 * MIB) is view
    assert view[MIB] == ord("x")
    assert (file.viewed_from(), file.viewed_from()) == (MIB, UNREAD)
    file.forget(0, 2 * MIB)
    if page_cache._cachestat is not None and file.cached(2 * MIB, 4 * MIB):
        assert not file.cached(0, 2 * MIB)
    assert bytes(view[: 4 * MIB]) == b"x" * (4 * MIB)
    file.close()
