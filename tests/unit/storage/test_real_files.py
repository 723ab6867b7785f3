"""The real disk: its system calls, its locks between processes, and what it refuses.

What it has in common with the simulated disk is tested in test_files.py.
"""

import errno
import mmap
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sluice.storage import files as files_module
from sluice.storage import page_cache, system_calls
from sluice.storage.files import Buffer, RealFiles
from sluice.storage.system_calls import find_cachestat

_TRY_LOCK = """
import fcntl, os, sys
fd = os.open(sys.argv[1], os.O_RDWR)
try:
    fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, int(sys.argv[2]))
except BlockingIOError:
    sys.exit(17)
"""


def _other_process_is_refused(path: str, byte_index: int) -> bool:
    command = [sys.executable, "-c", _TRY_LOCK, path, str(byte_index)]
    code = subprocess.run(command, check=False).returncode
    assert code in {0, 17}
    return code == 17


def test_another_process_is_locked_out_of_the_first_byte(tmp_path: Path) -> None:
    path = f"{tmp_path}/lock"
    lock = RealFiles().lock(path)
    with pytest.raises(BlockingIOError):
        RealFiles().lock(path)
    assert _other_process_is_refused(path, 0)
    assert not _other_process_is_refused(path, 1)
    lock.release()
    assert not _other_process_is_refused(path, 0)


def test_a_lock_of_another_process_is_respected(tmp_path: Path) -> None:
    path = f"{tmp_path}/lock"
    Path(path).write_bytes(b"lock")
    script = (
        "import fcntl, os, sys\n"
        "fd = os.open(sys.argv[1], os.O_RDWR)\n"
        "fcntl.lockf(fd, fcntl.LOCK_EX, 1)\n"
        "os.write(1, b'locked')\n"
        "os.read(0, 1)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script, path], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.read(6) == b"locked"
        with pytest.raises(BlockingIOError):
            RealFiles().lock(path)
        holder.communicate(b"x")
    RealFiles().lock(path).release()


def test_what_the_kernel_does_not_call_resident_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = RealFiles().create(f"{tmp_path}/a", 4096)
    file.warm(0, 4096)
    monkeypatch.setattr(page_cache, "_cachestat", None)

    def answer(error: int) -> bool:
        def refuse(*_: object) -> int:
            raise OSError(error, "not now")

        monkeypatch.setattr(os, "preadv", refuse)
        return file.resident(0, 4096)

    assert not answer(errno.EAGAIN)
    with pytest.raises(OSError, match="not now"):
        answer(errno.EIO)
    monkeypatch.setattr(os, "preadv", lambda *_: 100)
    assert not file.resident(0, 4096)
    monkeypatch.setattr(os, "preadv", lambda *_: 4096)
    assert file.resident(0, 4096) == (sys.platform == "linux")
    assert (file.pread_now(4096, 0) is not None) == (sys.platform == "linux")
    assert not answer(errno.EOPNOTSUPP), "and it was not warmed since it refused to tell"
    file = RealFiles().open(f"{tmp_path}/a")
    monkeypatch.setattr(page_cache, "NOWAIT", 0)
    assert not file.resident(0, 4096)
    assert file.pread_now(4096, 0) is None


def test_what_is_in_memory_is_read_without_a_wait(tmp_path: Path) -> None:
    file = RealFiles().create(f"{tmp_path}/a", 100)
    file.pwritev([b"abc"], 50)
    if sys.platform == "linux":
        assert file.pread_now(4, 49) == bytearray(b"\0abc")
    assert file.pread_now(51, 50) is None, "the file ends before"
    assert file.pread_now(1, -1) is None


def test_links_are_not_followed(tmp_path: Path) -> None:
    files = RealFiles()
    target = tmp_path / "target"
    target.write_bytes(b"precious")
    link = tmp_path / "link"
    link.symlink_to(target)
    (tmp_path / "settings.tmp").symlink_to(target)
    for call in (
        lambda: files.open(str(link)),
        lambda: files.read(str(link), 100),
        lambda: files.size(str(link)),
        lambda: files.create(str(link), 1),
        lambda: files.lock(str(link)),
        lambda: files.replace(f"{tmp_path}/settings", b"x"),
    ):
        with pytest.raises(OSError, match=r"symbolic link|regular|exists"):
            call()
    assert target.read_bytes() == b"precious"


def test_new_files_are_sparse_and_readable_by_others(tmp_path: Path) -> None:
    umask = os.umask(0o022)
    try:
        RealFiles().create(f"{tmp_path}/a", 1 << 30)
        RealFiles().replace(f"{tmp_path}/b", b"x")
        RealFiles().make_directory(f"{tmp_path}/d")
    finally:
        os.umask(umask)
    modes = [oct((tmp_path / name).stat().st_mode & 0o777) for name in "abd"]
    assert modes == ["0o644", "0o644", "0o755"]
    assert (tmp_path / "a").stat().st_blocks * 512 < 1 << 20


@settings(deadline=None)
@given(
    sizes=st.lists(st.integers(0, 20), max_size=20),
    takes=st.lists(st.integers(1, 9), min_size=1, max_size=10),
    group=st.integers(1, 5),
)
def test_short_writes_are_gone_on_with(sizes: list[int], takes: list[int], group: int) -> None:
    buffers = [bytes([65 + index]) * size for index, size in enumerate(sizes)]
    written = bytearray(500)
    calls = 0

    def pwritev(_fd: int, parts: Sequence[Buffer], offset: int) -> int:
        nonlocal calls
        assert len(parts) <= group
        data = b"".join(parts)[: takes[calls % len(takes)]]
        calls += 1
        written[offset : offset + len(data)] = data
        return len(data)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "pwritev", pwritev)
        patch.setattr(files_module, "IOV_MAX_COUNT", group)
        total_bytes = files_module.RealFile(-1, "a").pwritev(buffers, 3)
    assert total_bytes == sum(sizes)
    assert written == (bytes(3) + b"".join(buffers)).ljust(500, b"\0")


def test_short_reads_are_gone_on_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = RealFiles().create(f"{tmp_path}/a", 0)
    file.pwritev([b"0123456789"], 0)
    pread = os.pread
    monkeypatch.setattr(os, "pread", lambda fd, size, offset: pread(fd, min(size, 3), offset))
    assert file.pread(8, 1) == b"12345678"
    assert file.pread(99, 1) == b"123456789"


def test_a_disk_that_takes_nothing_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "pwritev", lambda *_: 0)
    with pytest.raises(OSError, match="took no bytes"):
        files_module.RealFile(-1, "a").pwritev([b"x"], 0)


def test_a_failed_replace_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = RealFiles()
    files.replace(f"{tmp_path}/a", b"old")

    def refuse(_fd: int) -> None:
        raise OSError(errno.EIO, "broken")

    monkeypatch.setattr(files_module, "_sync_data", refuse)
    with pytest.raises(OSError, match="broken"):
        files.replace(f"{tmp_path}/a", b"new")
    assert files.names(str(tmp_path)) == ["a"]
    assert files.read(f"{tmp_path}/a", 9) == b"old"


def test_sync_many_without_syncfs_syncs_each_file_and_directory_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = RealFiles()
    paths = [f"{tmp_path}/{index % 2}/{index}" for index in range(65)]
    for directory in "01":
        files.make_directory(f"{tmp_path}/{directory}")
    for path in paths:
        files.create(path, 1).close()
    inodes: list[int] = []
    monkeypatch.setattr(files_module, "_sync_all", lambda fd: inodes.append(os.fstat(fd).st_ino))
    monkeypatch.setattr(files_module, "_find_syncfs", lambda: None)
    files.sync_many(paths)
    assert inodes == [os.stat(p).st_ino for p in [*paths, f"{tmp_path}/0", f"{tmp_path}/1"]]
    inodes.clear()
    synced: list[int] = []
    monkeypatch.setattr(files_module, "_find_syncfs", lambda: synced.append)
    files.sync_many(paths)
    assert (inodes, len(synced)) == ([], 1)
    files.sync_many(paths[:64])
    assert (len(inodes), len(synced)) == (66, 1)


@pytest.mark.parametrize(
    ("release", "trusted"),
    [
        ("5.7.19", False),
        ("5.8.0-53-generic", True),
        ("6.18.44", True),
        ("4.19", False),
        ("x", False),
    ],
)
def test_syncfs_is_trusted_only_where_it_reports_errors(release: str, trusted: bool) -> None:
    assert system_calls.reports_syncfs_errors(release) is trusted


@pytest.mark.skipif(sys.platform != "linux", reason="syncfs is a call of Linux")
def test_syncfs_raises_what_the_kernel_says() -> None:
    syncfs = system_calls.find_syncfs()
    if syncfs is None:
        pytest.skip("a kernel before 5.8")
    with pytest.raises(OSError, match="Bad file descriptor"):
        syncfs(-1)


def test_work_apart_happens_and_its_memory_does_not(tmp_path: Path) -> None:
    seen: list[int] = []

    def work() -> None:
        seen.append(1)
        (tmp_path / "made").write_bytes(b"by the child")

    RealFiles().apart(work)
    assert (tmp_path / "made").read_bytes() == b"by the child"
    assert seen == []


def test_an_error_of_work_apart_is_raised_here(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="missing") as raised:
        RealFiles().apart(lambda: os.close(os.open(tmp_path / "missing", os.O_RDONLY)))
    assert raised.value.errno == errno.ENOENT


def test_work_apart_that_breaks_is_an_error_here() -> None:
    def broken() -> None:
        raise ValueError("a mistake of ours")

    with pytest.raises(OSError, match="ended with status"):
        RealFiles().apart(broken)


def test_pages_in_memory_are_counted_where_the_system_can(tmp_path: Path) -> None:
    if find_cachestat() is None:
        pytest.skip("cachestat needs Linux 6.5 and a container that lets it pass")
    page = mmap.PAGESIZE
    file = RealFiles().create(f"{tmp_path}/a", 64 * page)
    file.pwritev([b"x" * 64 * page], 0)
    file.sync()
    assert file.cached(0, 64 * page)
    assert file.cached(page - 1, page + 1)
    assert not file.cached(0, 65 * page)  # there is no such page
    assert not file.cached(5, 5)
    with open(f"{tmp_path}/a", "rb") as opened:
        os.posix_fadvise(opened.fileno(), 8 * page, page, os.POSIX_FADV_DONTNEED)
    if not file.cached(8 * page, 9 * page):  # the kernel may keep it
        assert not file.cached(0, 64 * page)
        assert file.cached(9 * page, 64 * page)
    file.close()
    assert not file.cached(0, page)


def test_without_that_call_nothing_is_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page_cache, "_cachestat", None)
    file = RealFiles().create(f"{tmp_path}/a", 1 << 17)
    file.pwritev([b"x" * (1 << 17)], 0)
    assert not file.cached(0, 1 << 17)
    assert file.resident(0, 1 << 17) == (sys.platform == "linux")
