"""One suite over the real disk and the simulated one: what `Files` promises holds for both."""

import errno
import os
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sluice.storage import page_cache
from sluice.storage.files import Buffer, DiskUsage, Files, OpenFile, RealFiles
from sluice.storage.memory_files import MemoryFiles


@dataclass(frozen=True)
class Disk:
    files: Files
    root: str

    def path(self, name: str) -> str:
        return f"{self.root}/{name}"

    def create(self, name: str = "a", size: int = 0, data: bytes = b"") -> OpenFile:
        file = self.files.create(self.path(name), size)
        if data:
            file.pwritev([data], 0)
        return file


@pytest.fixture(params=["real", "silent", "memory"])
def disk(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Disk:
    if request.param == "silent":
        # One that cannot say what is in memory.
        monkeypatch.setattr(page_cache, "NOWAIT", 0)
        monkeypatch.setattr(page_cache, "_cachestat", None)
    if request.param != "memory":
        return Disk(RealFiles(), str(tmp_path))
    files = MemoryFiles()
    files.make_directory("/store")
    return Disk(files, "/store")


# ------------------------------------------------------------------------------ reading and writing


def test_a_new_file_is_zeros_of_the_size_asked_for(disk: Disk) -> None:
    file = disk.create(size=5000)
    assert file.size == 5000
    assert file.path == disk.path("a")
    assert file.pread(6000, 0) == bytes(5000)
    assert disk.files.size(disk.path("a")) == 5000


def test_create_refuses_a_name_that_is_taken(disk: Disk) -> None:
    disk.create(data=b"first")
    with pytest.raises(FileExistsError):
        disk.create(size=9)
    assert disk.files.read(disk.path("a"), 100) == b"first"


def test_create_needs_its_directory_and_a_size(disk: Disk) -> None:
    with pytest.raises(FileNotFoundError):
        disk.create("missing/a")
    disk.create("file")
    with pytest.raises(NotADirectoryError):
        disk.create("file/a")
    with pytest.raises(OSError, match="Invalid"):
        disk.create("negative", size=-1)
    assert not disk.files.exists(disk.path("negative"))


def test_pwritev_joins_its_buffers(disk: Disk) -> None:
    file = disk.create(size=16)
    buffers: list[Buffer] = [b"ab", bytearray(b"cd"), memoryview(b"xefx")[1:3], b""]
    assert file.pwritev(buffers, 4) == 6
    assert file.pread(16, 0) == b"\0\0\0\0abcdef" + bytes(6)
    assert file.pwritev([], 0) == 0


@pytest.mark.parametrize("count", [1023, 1024, 1025, 2049])
def test_pwritev_takes_more_buffers_than_the_kernel(disk: Disk, count: int) -> None:
    file = disk.create()
    buffers = [index.to_bytes(2, "big") for index in range(count)]
    buffers[1022] = b""  # an empty buffer on the border between two groups
    assert file.pwritev(buffers, 3) == 2 * count - 2
    assert file.pread(5000, 3) == b"".join(buffers)


def test_pwritev_beyond_the_end_makes_the_file_longer(disk: Disk) -> None:
    file = disk.create(data=b"ab")
    assert len(file.view()) == 2
    file.pwritev([b"cd"], 4)
    assert file.size == 6
    assert bytes(file.view()) == b"ab\0\0cd"


def test_pread_is_short_only_at_the_end(disk: Disk) -> None:
    file = disk.create(data=b"0123456789")
    assert file.pread(4, 3) == b"3456"
    assert file.pread(4, 8) == b"89"
    assert file.pread(4, 10) == b""
    assert file.pread(4, 100) == b""
    assert file.pread(0, 0) == b""


def test_negative_places_are_refused(disk: Disk) -> None:
    file = disk.create(size=4)
    for call in (
        lambda: file.pread(1, -1),
        lambda: file.pread(-1, 0),
        lambda: file.pwritev([b"x"], -1),
        lambda: file.resize(-1),
        lambda: file.warm(-1, 2),
    ):
        with pytest.raises(OSError, match="Invalid argument"):
            call()
    assert not file.resident(-1, 2)
    assert file.pread(9, 0) == bytes(4)


def test_a_file_opened_for_reading_cannot_be_changed(disk: Disk) -> None:
    disk.create(data=b"abc")
    file = disk.files.open(disk.path("a"), writable=False)
    with pytest.raises(OSError, match="Bad file descriptor"):
        file.pwritev([b"x"], 0)
    with pytest.raises(OSError, match="Invalid argument"):
        file.resize(1)
    assert file.pread(9, 0) == bytes(file.view()) == b"abc"


def test_two_openings_see_each_other(disk: Disk) -> None:
    first = disk.create(size=4)
    second = disk.files.open(disk.path("a"))
    second.pwritev([b"zz"], 1)
    assert first.pread(4, 0) == b"\0zz\0"
    second.resize(2)
    assert first.size == 2


def test_open_needs_a_file(disk: Disk) -> None:
    with pytest.raises(FileNotFoundError):
        disk.files.open(disk.path("missing"))
    disk.files.make_directory(disk.path("directory"))
    for writable in (True, False):
        with pytest.raises(IsADirectoryError):
            disk.files.open(disk.path("directory"), writable=writable)


def test_a_closed_file_answers_nothing(disk: Disk) -> None:
    file = disk.create(size=4)
    file.close()
    file.close()
    for call in (
        lambda: file.size,
        lambda: file.pread(1, 0),
        lambda: file.pwritev([b"x"], 0),
        file.view,
        file.sync,
        lambda: file.resize(1),
        lambda: file.resident(0, 1),
        lambda: file.warm(0, 1),
    ):
        with pytest.raises(OSError, match="Bad file descriptor"):
            call()


# ------------------------------------------------------------------------------------------- views


def test_a_view_is_live_read_only_and_cached(disk: Disk) -> None:
    file = disk.create(size=8192)
    view = file.view()
    part = view[4096:4099]
    file.pwritev([b"abc"], 4096)
    assert bytes(part) == b"abc"
    assert view.readonly
    assert file.view() is view


def test_an_empty_file_has_no_view(disk: Disk) -> None:
    with pytest.raises(ValueError, match="empty file"):
        disk.create().view()


def test_views_outlive_close_and_remove(disk: Disk) -> None:
    file = disk.create(data=b"still here")
    part = file.view()[6:]
    disk.files.remove(disk.path("a"))
    assert file.pread(5, 0) == b"still"
    file.close()
    assert bytes(part) == b"here"


def test_resize_cuts_fills_with_zeros_and_drops_the_view(disk: Disk) -> None:
    file = disk.create(data=b"abcdef")
    before = file.view()
    file.resize(3)
    assert file.size == 3
    file.resize(5)
    after = file.view()
    assert after is not before
    assert bytes(after) == b"abc\0\0"
    file.pwritev([b"z"], 4)
    assert after[4] == ord("z")


@settings(deadline=None)
@given(
    writes=st.lists(st.tuples(st.integers(0, 5000), st.binary(max_size=6000)), max_size=8),
    size=st.integers(1, 9000),
)
def test_views_show_every_write(writes: list[tuple[int, bytes]], size: int) -> None:
    files = MemoryFiles()
    file = files.create("a", size)
    model = bytearray(size)
    view = file.view()
    for offset, data in writes:
        kept = data[: max(0, size - offset)]
        file.pwritev([kept[:7], kept[7:]], min(offset, size))
        model[offset : offset + len(kept)] = kept
        assert bytes(view) == model
        assert file.view() is view
        assert file.pread(size, 0) == model


# --------------------------------------------------------------------------------------- residency


def test_an_empty_range_is_resident_and_the_space_after_the_end_is_not(disk: Disk) -> None:
    file = disk.create(data=b"abc")
    assert file.resident(1, 1)
    assert not file.resident(0, 4)


def test_warm_stops_at_the_end_of_the_file(disk: Disk) -> None:
    file = disk.create(data=b"abc")
    file.warm(0, 1 << 22)
    file.warm(10, 20)
    file.warm(2, 2)
    assert file.pread(3, 0) == b"abc"


def test_warmed_is_resident(disk: Disk) -> None:
    size = (2 << 20) + 4096
    file = disk.create(data=os.urandom(size))
    file.sync()
    if isinstance(disk.files, MemoryFiles):
        disk.files.cold(disk.path("a"), 1 << 20, size)
        assert not file.resident(0, size)
    else:
        # Only advice, and the question itself starts to read: a fast disk may be done already.
        fd = os.open(disk.path("a"), os.O_RDONLY)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)
    file.warm(0, size)
    assert file.resident(0, size)


# ------------------------------------------------------------------------------------------- names


def test_names_are_sorted_and_a_missing_directory_has_none(disk: Disk) -> None:
    for name in ("b", "a", "10", "9"):
        disk.create(name)
    disk.files.make_directory(disk.path("c/d"))
    assert disk.files.names(disk.root) == ["10", "9", "a", "b", "c"]
    assert disk.files.names(disk.path("c")) == ["d"]
    assert disk.files.names(disk.path("c/d")) == []
    assert disk.files.names(disk.path("missing")) == []
    with pytest.raises(NotADirectoryError):
        disk.files.names(disk.path("a"))


def test_exists_and_is_directory(disk: Disk) -> None:
    disk.create("a")
    disk.files.make_directory(disk.path("d"))
    disk.files.make_directory(disk.path("d"))
    asked = [(disk.files.exists(p), disk.files.is_directory(p)) for p in map(disk.path, "adx")]
    assert asked == [(True, False), (True, True), (False, False)]


def test_make_directory_does_not_replace_a_file(disk: Disk) -> None:
    disk.create("a")
    with pytest.raises(FileExistsError):
        disk.files.make_directory(disk.path("a"))
    with pytest.raises(NotADirectoryError):
        disk.files.make_directory(disk.path("a/b"))


def test_size_needs_a_file(disk: Disk) -> None:
    with pytest.raises(FileNotFoundError):
        disk.files.size(disk.path("missing"))
    with pytest.raises(IsADirectoryError):
        disk.files.size(disk.root)


def test_read_is_bounded(disk: Disk) -> None:
    disk.create(data=b"12345")
    assert disk.files.read(disk.path("a"), 5) == b"12345"
    with pytest.raises(OSError, match="longer than 4 bytes") as caught:
        disk.files.read(disk.path("a"), 4)
    assert caught.value.errno == errno.EFBIG
    with pytest.raises(FileNotFoundError):
        disk.files.read(disk.path("missing"), 4)


def test_replace_makes_and_overwrites(disk: Disk) -> None:
    path = disk.path("settings")
    for data in (b"first, and longer", b"second", b""):
        disk.files.replace(path, data)
        assert disk.files.read(path, 100) == data
    assert disk.files.names(disk.root) == ["settings"]
    with pytest.raises(FileNotFoundError):
        disk.files.replace(disk.path("missing/settings"), b"x")


def test_replace_leaves_open_files_alone(disk: Disk) -> None:
    file = disk.create(data=b"old")
    view = file.view()
    disk.files.replace(disk.path("a"), b"new")
    assert bytes(view) == b"old"
    assert disk.files.read(disk.path("a"), 9) == b"new"


def test_replace_refuses_a_directory(disk: Disk) -> None:
    disk.files.make_directory(disk.path("d"))
    with pytest.raises(IsADirectoryError):
        disk.files.replace(disk.path("d"), b"x")
    assert disk.files.names(disk.root) == ["d"]


def test_rename_moves_over_another_file(disk: Disk) -> None:
    file = disk.create("a", data=b"a")
    disk.create("b", data=b"b")
    disk.files.make_directory(disk.path("d"))
    disk.files.rename(disk.path("a"), disk.path("b"))
    disk.files.rename(disk.path("b"), disk.path("d/c"))
    assert disk.files.names(disk.root) == ["d"]
    assert disk.files.read(disk.path("d/c"), 9) == b"a"
    file.pwritev([b"A"], 0)
    assert disk.files.read(disk.path("d/c"), 9) == b"A"


def test_rename_is_for_files(disk: Disk) -> None:
    disk.files.make_directory(disk.path("d"))
    disk.create("a")
    for old, new, error in (
        ("missing", "x", FileNotFoundError),
        ("a", "missing/x", FileNotFoundError),
        ("d", "x", IsADirectoryError),
        ("a", "d", IsADirectoryError),
    ):
        with pytest.raises(error):
            disk.files.rename(disk.path(old), disk.path(new))
    disk.files.rename(disk.path("a"), disk.path("a"))
    assert disk.files.names(disk.root) == ["a", "d"]


def test_remove_is_for_files(disk: Disk) -> None:
    disk.create("a")
    disk.files.remove(disk.path("a"))
    assert not disk.files.exists(disk.path("a"))
    with pytest.raises(FileNotFoundError):
        disk.files.remove(disk.path("a"))
    with pytest.raises(IsADirectoryError):
        disk.files.remove(disk.root)
    disk.create("a", size=3)
    assert disk.files.size(disk.path("a")) == 3


# ------------------------------------------------------------------------------- syncing and space


def test_sync_calls_need_what_they_name(disk: Disk) -> None:
    disk.create("a", data=b"x").sync()
    disk.files.sync_directory(disk.root)
    disk.files.sync_many([])
    with pytest.raises(FileNotFoundError):
        disk.files.sync_directory(disk.path("missing"))
    with pytest.raises(NotADirectoryError):
        disk.files.sync_directory(disk.path("a"))
    with pytest.raises(FileNotFoundError):
        disk.files.sync_many([disk.path("a"), disk.path("missing")])


@pytest.mark.parametrize("count", [1, 64, 65])
def test_sync_many(disk: Disk, count: int) -> None:
    names = [f"f{index}" for index in range(count)]
    for name in names:
        disk.create(name, data=name.encode())
    paths = [disk.path(name) for name in names]
    disk.files.sync_many(paths)
    assert [disk.files.read(path, 9).decode() for path in paths] == names


def test_usage(disk: Disk) -> None:
    usage = disk.files.usage(disk.root)
    assert 0 <= usage.free_bytes <= usage.total_bytes
    assert 0.0 <= usage.used_ratio <= 1.0
    with pytest.raises(FileNotFoundError):
        disk.files.usage(disk.path("missing"))


def test_used_ratio() -> None:
    assert DiskUsage(1000, 250).used_ratio == 0.75
    assert DiskUsage(0, 0).used_ratio == 1.0


# ------------------------------------------------------------------------------------------- locks


def test_a_lock_is_held_until_released(disk: Disk) -> None:
    path = disk.path("lock")
    lock = disk.files.lock(path)
    for _ in range(2):  # the refused try must not have given the lock away
        with pytest.raises(BlockingIOError):
            disk.files.lock(path)
    lock.release()
    assert disk.files.read(path, 10) == b"lock"
    second = disk.files.lock(path)
    lock.release()  # a second time: not the other's lock
    with pytest.raises(BlockingIOError):
        disk.files.lock(path)
    second.release()
    disk.files.lock(path).release()


def test_a_lock_leaves_the_text_of_the_file(disk: Disk) -> None:
    disk.files.replace(disk.path("lock"), b"something else")
    disk.files.lock(disk.path("lock")).release()
    assert disk.files.read(disk.path("lock"), 100) == b"something else"
    with pytest.raises(FileNotFoundError):
        disk.files.lock(disk.path("missing/lock"))


def test_data_from_steps_over_holes_but_never_over_data(disk: Disk) -> None:
    """A start looks for bytes behind the log's end: a GiB of holes must cost nothing."""
    file = disk.create(size=1 << 30)
    assert file.data_from(1 << 30) == 1 << 30
    file.pwritev([b"x"], 700 << 20)
    assert 0 <= file.data_from(0) <= 700 << 20
    assert file.data_from(700 << 20) == 700 << 20
    assert file.data_from(5 << 30) == 1 << 30
