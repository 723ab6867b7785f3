"""Where the system cannot say what is in memory: what was warmed is taken, and every read ends."""

from __future__ import annotations

import errno
import mmap
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import pytest

from sluice.model import LOOPBACK_HOST, Message
from sluice.protocol import records
from sluice.storage import page_cache
from sluice.storage.background import Inline
from sluice.storage.bulk_reads import read_stretch
from sluice.storage.files import RealFiles
from sluice.storage.opening import open_store
from sluice.storage.staging import StagingArea
from sluice.storage.store import ColdRead, Store
from sluice.storage.warmed import REMEMBERED_NS, Warmed
from tests.unit.storage.store_kit import BEGIN_MS, small_config

T = TypeVar("T")
PAGE = mmap.PAGESIZE
SHARED_MEMORY = Path("/dev/shm")
COUNT = 600
ROUNDS_MAX = 40  # more than any of these reads has places to look at


class Clock:
    def __init__(self) -> None:
        self.now_ns = 10**12
        self.warmed = Warmed(lambda: self.now_ns)

    def hold(self, first: int, count: int = 1) -> bool:
        return self.warmed.hold(first * PAGE, (first + count) * PAGE)


def test_what_was_warmed_is_held_and_nothing_else() -> None:
    clock = Clock()
    assert not clock.hold(0)
    clock.warmed.note(2 * PAGE, 4 * PAGE)
    assert [clock.hold(page) for page in range(6)] == [False, False, True, True, False, False]
    assert clock.hold(2, 2)
    assert not clock.hold(1, 2)
    assert not clock.hold(3, 2)
    clock.warmed.note(4 * PAGE + 5, 4 * PAGE + 6)
    assert clock.hold(2, 3), "what lies next to each other is one; a page is there or not"


def test_it_is_held_until_it_is_asked_for_and_some_seconds_after_each_question() -> None:
    clock = Clock()
    clock.warmed.note(0, PAGE)
    clock.now_ns += 100 * REMEMBERED_NS
    for _ in range(5):
        assert clock.hold(0)
        clock.now_ns += REMEMBERED_NS
    assert clock.hold(0)
    clock.now_ns += 2 * REMEMBERED_NS
    assert not clock.hold(0), "nobody has asked for a while"


def test_what_others_ask_for_does_not_keep_a_page() -> None:
    clock = Clock()
    clock.warmed.note(0, 2 * PAGE)
    assert clock.hold(0)
    for _ in range(3):
        clock.now_ns += REMEMBERED_NS
        assert clock.hold(1)
    assert not clock.hold(0)


def test_what_was_given_back_is_not_held() -> None:
    clock = Clock()
    clock.warmed.note(0, 4 * PAGE)
    clock.warmed.drop(PAGE, 2 * PAGE)
    clock.warmed.drop(3 * PAGE, 100 * PAGE)
    clock.warmed.drop(200 * PAGE, 300 * PAGE)
    assert [clock.hold(page) for page in range(5)] == [True, False, True, False, False]


def test_behind_the_end_of_a_file_nothing_is_noted() -> None:
    clock = Clock()
    clock.warmed.note(1 << 60, 1 << 60)
    assert not clock.hold(0)


# -------------------------------------------------------------------- file systems that do not tell


def refuse_to_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    """No file system knows a read that does not wait, as tmpfs and overlayfs."""
    preadv = os.preadv

    def without_nowait(
        fd: int, buffers: Sequence[bytearray | memoryview], offset: int, flags: int = 0
    ) -> int:
        if flags:
            raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))
        return preadv(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", without_nowait)


@pytest.fixture(params=["no count", "a count of nothing", "a count", "another system"])
def silent(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    refuse_to_tell(monkeypatch)
    if request.param == "another system":
        monkeypatch.setattr(page_cache, "NOWAIT", 0)
    if request.param == "a count of nothing":
        monkeypatch.setattr(page_cache, "_cachestat", lambda *_: 0)
    elif request.param != "a count":
        monkeypatch.setattr(page_cache, "_cachestat", None)


def open_at(directory: Path) -> Store:
    config = small_config(str(directory), segment_bytes=1 << 16, hot_bytes=1)
    return open_store(config, RealFiles(), Inline(), lambda: BEGIN_MS, LOOPBACK_HOST)


def filled(directory: Path) -> Store:
    """A store most of which is in files, of the log and of the queues."""
    store = open_at(directory)
    for number in range(COUNT):
        store.stage(Message("t", 0, b"%0200d" % number, b"TAGS\x01a\x02"))
        if number % 10 == 0:
            store.write_staged()
    store.write_staged()
    store.housekeeping.checkpoint()
    return store


def ended(ask: Callable[[], T]) -> T:
    """The answer of a read; it must get on."""
    for _ in range(ROUNDS_MAX):
        try:
            return ask()
        except ColdRead as cold:
            cold.work()
    raise AssertionError("what was warmed is not taken")


def read_everything(store: Store) -> None:
    """Each kind of read, from the beginning to the end."""
    offset, bodies = 0, []
    while offset < COUNT:
        result = ended(partial(store.read, "t", 0, offset))
        bodies += [int(bytes(records.decode(entry).body)) for entry in result.messages]
        offset = result.next_offset
    assert bodies == list(range(COUNT))
    offset = 0
    while offset < COUNT:
        limits: Any = {"to_offset": COUNT, "bytes_max": 1 << 20}
        result, _ = ended(partial(read_stretch, store, "t", 0, offset, **limits))
        assert result.count
        offset = result.next_offset
    assert ended(lambda: store.offset_for_time("t", 0, BEGIN_MS, upper=True)) == COUNT - 1
    assert ended(lambda: store.earliest_ms("t", 0)) == BEGIN_MS
    assert ended(lambda: store.entry_at(0)) is not None


@pytest.mark.usefixtures("silent")
def test_reads_end_where_the_system_cannot_say_what_is_in_memory(tmp_path: Path) -> None:
    store = filled(tmp_path)
    read_everything(store)
    closed: list[object] = []
    store.shut(closed.append)
    assert closed == [None]
    store = open_at(tmp_path)
    read_everything(store)
    store.shut(closed.append)


@pytest.fixture
def shared_memory() -> Iterator[Path]:
    if not SHARED_MEMORY.is_dir() or not os.access(SHARED_MEMORY, os.W_OK):
        pytest.skip(f"there is no {SHARED_MEMORY} to write to")
    directory = Path(tempfile.mkdtemp(dir=SHARED_MEMORY))
    yield directory
    shutil.rmtree(directory)


def test_reads_end_on_a_file_system_in_memory(shared_memory: Path) -> None:
    store = filled(shared_memory)
    read_everything(store)
    store.shut(lambda _: None)
    store = open_at(shared_memory)
    read_everything(store)
    store.shut(lambda _: None)


@pytest.mark.usefixtures("silent")
def test_staged_entries_are_read_there_too(tmp_path: Path) -> None:
    area = StagingArea(RealFiles(), f"{tmp_path}/staging", Inline(), lambda: BEGIN_MS, 1 << 16)
    position = area.put(b"about", [b"x" * 20_000])
    assert position is not None
    entry = ended(lambda: area.get(position))
    assert entry is not None
    assert bytes(entry.body) == b"x" * 20_000


@pytest.mark.usefixtures("silent")
def test_a_file_that_was_warmed_is_resident_up_to_its_end(tmp_path: Path) -> None:
    file = RealFiles().create(f"{tmp_path}/a", 0)
    file.pwritev([b"x" * 5000], 0)
    file.warm(0, 1 << 20)
    assert file.resident(0, 5000)
    assert file.resident(4999, 5000)
    assert file.pread_now(1000, 4000) == bytearray(b"x" * 1000)
    assert not file.resident(0, 5001), "the page goes on, the file does not"
    assert file.pread_now(1001, 4000) is None
    file.close()
    with pytest.raises(OSError, match="Bad file"):
        file.resident(0, 5000)


def test_what_was_given_back_is_warmed_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse_to_tell(monkeypatch)
    monkeypatch.setattr(page_cache, "_cachestat", None)
    file = RealFiles().create(f"{tmp_path}/a", 4 * PAGE)
    file.warm(0, 4 * PAGE)
    file.forget(PAGE, 2 * PAGE)
    pages = [file.resident(page * PAGE, (page + 1) * PAGE) for page in range(3)]
    assert pages == [True, False, True]


def test_where_the_system_tells_it_is_believed_whatever_was_warmed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def not_now(*_: object) -> int:
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    file = RealFiles().create(f"{tmp_path}/a", PAGE)
    monkeypatch.setattr(page_cache, "NOWAIT", 8)
    monkeypatch.setattr(page_cache, "warm", lambda fd, start, stop: stop)
    monkeypatch.setattr(os, "preadv", not_now)
    file.warm(0, PAGE)
    assert not file.resident(0, PAGE)
    assert file.pread_now(PAGE, 0) is None
