"""This module is the only door between the storage code and a disk.

`Files` and `OpenFile` say what storage may ask of a disk; `RealFiles` does it with system calls,
and `memory_files.MemoryFiles` does it in memory, with crashes and faults. One test suite runs over
both, so whatever is promised here holds for both.

What a caller can rely on, and no more:

    written   pwritev returned          every reader on this machine sees it, also through `view`
    durable   sync returned             bytes and length of this one file survive a power cut
    named     sync_directory returned   names made, changed or removed in it survive a power cut

A file whose data is durable and whose name is not is lost by a power cut: both are needed.
`replace` and `sync_many` give both. After a failed `sync` the kernel may have thrown the dirty
pages away and forgotten the error, so a second `sync` that succeeds proves nothing: never retry
one.

This module may not know what is inside a file, import anything else of this package, start a
thread, or read a clock.
"""

import errno
import fcntl
import os
import stat
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from struct import Struct
from typing import Final, Protocol

from sluice.storage import page_cache
from sluice.storage.residency import Residency
from sluice.storage.system_calls import find_syncfs as _find_syncfs
from sluice.storage.system_calls import run_apart

Buffer = bytes | bytearray | memoryview

# The kernel takes at most this many buffers in one pwritev (IOV_MAX of Linux and of macOS).
IOV_MAX_COUNT: Final = 1024

UNREAD: Final = 1 << 62  # behind the end of every file

# Up to here one fsync a file is cheaper than making the whole file system durable, which also waits
# for whatever other programs have written.
SYNC_EACH_COUNT_MAX: Final = 64

LOCK_TEXT: Final = b"lock"

# The umask takes away from these; a broker that runs as another user must be able to read.
_FILE_MODE: Final = 0o644
_DIRECTORY_MODE: Final = 0o755
# A link planted under a name of ours must not lead us to somebody else's file.
_SAFE_FLAGS: Final = os.O_CLOEXEC | os.O_NOFOLLOW

_SEEK_DATA: Final[int] = getattr(os, "SEEK_DATA", 0)


@dataclass(frozen=True, slots=True)
class DiskUsage:
    """Space of a file system; `free_bytes` is what an ordinary user may still write."""

    total_bytes: int
    free_bytes: int

    @property
    def used_ratio(self) -> float:
        """0.0 = empty, 1.0 = full. A file system of no size counts as full."""
        if self.total_bytes <= 0:
            return 1.0
        return (self.total_bytes - self.free_bytes) / self.total_bytes


class FileLock(Protocol):
    """A lock that is held until `release` or until the process ends."""

    def release(self) -> None:
        """Give the lock back. A second call does nothing."""


class OpenFile(Protocol):
    """One open file. Every method but `close` raises OSError(EBADF) after `close`."""

    @property
    def path(self) -> str:
        """The path it was opened with; a later rename does not change it."""

    @property
    def size(self) -> int:
        """The length of the file now, in bytes."""

    def pwritev(self, buffers: Sequence[Buffer], offset: int) -> int:
        """Write all the buffers one after the other at `offset`, and return their bytes in total.

        Either all bytes are written or OSError is raised, and then any prefix of them may be in the
        file. A write past the end makes the file longer and drops the cached view. Items of a
        memoryview must be single bytes.
        """

    def pread(self, size: int, offset: int) -> bytes:
        """Read `size` bytes, fewer only at the end of the file. May wait for the disk."""

    def pread_now(self, size: int, offset: int) -> bytes | bytearray | None:
        """Read so many bytes if all of them are in memory, as `resident` tells it; None where they
        are not, and where the file ends before.
        """

    def view(self, at: int = 0) -> memoryview:
        """Return a read-only view of the whole file that shows later writes at once. `at`: from
        where on it will be read.

        The same object each time, until the file changes its length; slices handed out before that
        stay readable up to the shorter of the two lengths, but whoever wants current bytes asks
        again. Raises ValueError for an empty file.
        """

    def viewed_from(self) -> int:
        """From where on its views were to be read since this was asked last; `UNREAD`: none was."""

    def forget(self, start: int, stop: int) -> None:
        """Let the system use the memory of a range of whole pages otherwise; what is not on the
        disk yet stays. Any thread may ask.
        """

    def resident(self, start: int, stop: int) -> bool:
        """Say whether reading the range would not wait for the disk.

        Where the system cannot tell it is False, but for what was warmed: that is taken to be in
        memory until the next question, and for some seconds after each.
        """

    def cached(self, start: int, stop: int) -> bool:
        """The same, but it only says True where it need not look at each byte for it."""

    def warm(self, start: int, stop: int) -> None:
        """Bring the range into memory. May wait for the disk, so it runs on a thread.

        The next question whether it is `resident` is answered with True, unless the system knows
        better: who asks, warms and asks again gets on, on every file system.
        """

    def fetch(self, start: int, stop: int) -> None:
        """The same for a range that is not empty. From then on whoever looks at the file by its
        view sees to it that what he looks at is in memory.
        """

    def data_from(self, start: int) -> int:
        """The first byte from `start` on that may be other than zero; the size where none is.

        A file system that knows its holes steps over them, so that an empty GiB costs nothing.
        """

    def sync(self) -> None:
        """Make everything written so far, and the length, durable. Never retry it."""

    def resize(self, size: int) -> None:
        """Cut the file, or make it longer with zero bytes. Drops the cached view."""

    def close(self) -> None:
        """Close the file; views handed out stay valid. A second call does nothing."""


class Files(Protocol):
    """A disk. A missing file is FileNotFoundError wherever nothing else is said."""

    def create(self, path: str, size: int) -> OpenFile:
        """Make a new sparse file of `size` zero bytes; FileExistsError when the name is taken.

        Neither its name nor its length is durable yet: `sync` the file, then its directory.
        """

    def open(self, path: str, *, writable: bool = True) -> OpenFile:
        """Open a file that is there. A link or a directory in its place is an OSError."""

    def exists(self, path: str) -> bool:
        """Say whether the name is taken, by a file or by a directory."""

    def size(self, path: str) -> int:
        """Return the length of a file in bytes."""

    def names(self, directory: str) -> list[str]:
        """Return the sorted names in a directory; nothing when the directory is missing."""

    def is_directory(self, path: str) -> bool:
        """Say whether the path is a directory."""

    def make_directory(self, path: str) -> None:
        """Make a directory and the directories above it; fine when it is there."""

    def read(self, path: str, limit_bytes: int) -> bytes:
        """Read a whole file; OSError(EFBIG) when it is longer than the limit."""

    def replace(self, path: str, data: bytes) -> None:
        """Make `data` the content of a file, durably; a crash leaves the old content or the new.

        Uses `path + ".tmp"` on the way, which a crash may leave behind; one caller at a time per
        path.
        """

    def rename(self, old: str, new: str) -> None:
        """Rename a file, over a file of the new name. Durable when both directories are synced."""

    def remove(self, path: str) -> None:
        """Remove a file. Open files and views of it stay valid."""

    def sync_directory(self, path: str) -> None:
        """Make the names in a directory durable."""

    def sync_many(self, paths: Sequence[str]) -> None:
        """Make the data and the names of all these files durable."""

    def apart(self, work: Callable[[], None]) -> None:
        """Run work that uses only files, in thousands of calls, away from everybody else.

        What it changes in memory is lost. Raises OSError where it failed; waits, so a thread asks.
        """

    def usage(self, path: str) -> DiskUsage:
        """Return the space of the file system that holds this path."""

    def lock(self, path: str) -> FileLock:
        """Take the exclusive lock of this file, or raise BlockingIOError when somebody has it.

        A missing file is made, with the text `lock`. The lock is the one Java's FileChannel.lock(0,
        1) takes, so Apache's broker and ours exclude each other. POSIX gives such a lock back when
        the process closes *any* descriptor of the file: nobody may open or read a locked file's
        path.
        """


# --------------------------------------------------------------------------------------- real files


class RealFile:
    """An `OpenFile` on a file descriptor."""

    __slots__ = ("_fd", "_path", "_residency", "_view", "_viewed_from")

    def __init__(self, fd: int, path: str) -> None:
        self._fd = fd  # -1 once closed, so that a number the kernel gave away again is never used
        self._path = path
        self._view: memoryview | None = None
        self._viewed_from = UNREAD
        self._residency = Residency()

    @property
    def path(self) -> str:
        return self._path

    @property
    def size(self) -> int:
        return os.fstat(self._fd).st_size

    def pwritev(self, buffers: Sequence[Buffer], offset: int) -> int:
        if offset < 0:
            # -1 would not be refused: it means "where the last write ended" to pwritev2.
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL), self._path)
        total_bytes = sum(map(len, buffers))
        if len(buffers) <= IOV_MAX_COUNT:
            written_bytes = os.pwritev(self._fd, buffers, offset)
        else:
            written_bytes = 0
        if written_bytes != total_bytes:
            self._write_rest(buffers, offset, written_bytes)
        view = self._view
        if view is not None and offset + total_bytes > len(view):
            self._view = None
        return total_bytes

    def _write_rest(self, buffers: Sequence[Buffer], offset: int, written_bytes: int) -> None:
        """Go on after a short write, in groups the kernel takes."""
        rest = [memoryview(buffer) for buffer in buffers if len(buffer)]
        first = 0  # index of the first buffer not written to its end
        step_bytes = written_bytes
        while True:
            offset += step_bytes
            while first < len(rest) and step_bytes >= len(rest[first]):
                step_bytes -= len(rest[first])
                first += 1
            if first == len(rest):
                return
            rest[first] = rest[first][step_bytes:]
            step_bytes = os.pwritev(self._fd, rest[first : first + IOV_MAX_COUNT], offset)
            if step_bytes == 0:
                # Not an error by the letter of POSIX, and an endless loop if we went on.
                raise OSError(errno.EIO, "the disk took no bytes", self._path)

    def pread(self, size: int, offset: int) -> bytes:
        data = os.pread(self._fd, size, offset)
        if len(data) == size:
            return data
        pieces = [data]
        got_bytes = len(data)
        while data and got_bytes < size:
            data = os.pread(self._fd, size - got_bytes, offset + got_bytes)
            pieces.append(data)
            got_bytes += len(data)
        return b"".join(pieces)

    def view(self, at: int = 0) -> memoryview:
        view = self._view
        if at < self._viewed_from:  # noqa: PLR1730 - a third of the time of min()
            self._viewed_from = at
        if view is None:
            # fstat first: mmap would take descriptor -1 for "memory without a file".
            if os.fstat(self._fd).st_size == 0:
                raise ValueError(f"an empty file has no view: {self._path}")
            self._view = view = memoryview(page_cache.mapped(self._fd))
            self._residency.mapped(view)
        return view

    def viewed_from(self) -> int:
        viewed_from, self._viewed_from = self._viewed_from, UNREAD
        return viewed_from

    def forget(self, start: int, stop: int) -> None:
        self._residency.forget(self._fd, self._view, start, stop)

    def pread_now(self, size: int, offset: int) -> bytearray | None:
        return self._residency.read_now(self._fd, size, offset)

    def resident(self, start: int, stop: int) -> bool:
        if start >= stop:
            return True
        return start >= 0 and self._residency.holds(self._fd, start, stop)

    def cached(self, start: int, stop: int) -> bool:
        return page_cache.holds(self._fd, start, stop)

    def warm(self, start: int, stop: int) -> None:
        if start >= stop:
            return
        if start < 0:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL), self._path)
        self._residency.warm(self._fd, start, stop)

    def fetch(self, start: int, stop: int) -> None:
        self._residency.fetch(self._fd, self._view, start, stop)

    def data_from(self, start: int) -> int:
        size = self.size
        if start >= size:
            return size
        try:
            return os.lseek(self._fd, start, _SEEK_DATA) if _SEEK_DATA else start
        except OSError as error:
            if error.errno == errno.ENXIO:
                return size
            if error.errno == errno.EINVAL:
                return start  # a file system that does not know its holes
            raise

    def sync(self) -> None:
        if self._fd < 0:
            # Alone among the calls used here, Python's fdatasync says ValueError for it.
            raise OSError(errno.EBADF, os.strerror(errno.EBADF), self._path)
        _sync_data(self._fd)

    def resize(self, size: int) -> None:
        self._view = None
        os.ftruncate(self._fd, size)

    def close(self) -> None:
        fd, self._fd = self._fd, -1
        self._view = None  # the mapping lives on in the slices that others hold
        if fd >= 0:
            os.close(fd)

    def __del__(self) -> None:
        # Files that retention deleted or a cache dropped are let go of by their last reader.
        self.close()


class RealFiles:
    """A `Files` made of system calls. It has no state, so one instance or many is the same."""

    __slots__ = ()

    def create(self, path: str, size: int) -> RealFile:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | _SAFE_FLAGS, _FILE_MODE)
        try:
            os.ftruncate(fd, size)
        except BaseException:
            os.close(fd)
            os.unlink(path)
            raise
        return RealFile(fd, path)

    def open(self, path: str, *, writable: bool = True) -> RealFile:
        fd = os.open(path, (os.O_RDWR if writable else os.O_RDONLY) | _SAFE_FLAGS)
        try:
            _require_file(os.fstat(fd), path)
        except BaseException:
            os.close(fd)
            raise
        return RealFile(fd, path)

    def exists(self, path: str) -> bool:
        return os.path.lexists(path)

    def size(self, path: str) -> int:
        status = os.lstat(path)
        _require_file(status, path)
        return status.st_size

    def names(self, directory: str) -> list[str]:
        try:
            return sorted(os.listdir(directory))
        except FileNotFoundError:
            return []

    def is_directory(self, path: str) -> bool:
        return os.path.isdir(path)

    def make_directory(self, path: str) -> None:
        os.makedirs(path, _DIRECTORY_MODE, exist_ok=True)

    def read(self, path: str, limit_bytes: int) -> bytes:
        file = self.open(path, writable=False)
        try:
            # One byte more than allowed, so that a file that grows meanwhile is noticed as well.
            data = file.pread(min(file.size, limit_bytes) + 1, 0)
        finally:
            file.close()
        if len(data) > limit_bytes:
            raise OSError(errno.EFBIG, f"longer than {limit_bytes} bytes", path)
        return data

    def replace(self, path: str, data: bytes) -> None:
        temporary = path + ".tmp"
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | _SAFE_FLAGS
        file = RealFile(os.open(temporary, flags, _FILE_MODE), temporary)
        try:
            try:
                file.pwritev([data], 0)
                file.sync()
            finally:
                file.close()
            os.rename(temporary, path)
        except BaseException:
            with suppress(OSError):
                os.unlink(temporary)
            raise
        self.sync_directory(_directory_of(path))

    def rename(self, old: str, new: str) -> None:
        _require_file(os.lstat(old), old)
        os.rename(old, new)

    def remove(self, path: str) -> None:
        if stat.S_ISDIR(os.lstat(path).st_mode):
            # unlink says EPERM on some systems; one answer everywhere.
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
        os.unlink(path)

    def sync_directory(self, path: str) -> None:
        with _descriptor(path, os.O_DIRECTORY) as fd:
            _sync_all(fd)

    def sync_many(self, paths: Sequence[str]) -> None:
        # Every path is looked at first, so that a wrong one is an error on both ways.
        device_paths = {os.lstat(path).st_dev: path for path in paths}
        syncfs = _find_syncfs() if len(paths) > SYNC_EACH_COUNT_MAX else None
        if syncfs is not None:
            for path in device_paths.values():
                with _descriptor(_directory_of(path), os.O_DIRECTORY) as fd:
                    syncfs(fd)
            return
        for path in paths:
            with _descriptor(path, os.O_NOFOLLOW) as fd:
                _sync_all(fd)
        for directory in dict.fromkeys(map(_directory_of, paths)):
            self.sync_directory(directory)

    def apart(self, work: Callable[[], None]) -> None:
        run_apart(work)

    def usage(self, path: str) -> DiskUsage:
        status = os.statvfs(path)
        # As df counts: what is kept for root is neither used nor free, and not ours to fill.
        total_blocks = status.f_blocks - status.f_bfree + status.f_bavail
        return DiskUsage(total_blocks * status.f_frsize, status.f_bavail * status.f_frsize)

    def lock(self, path: str) -> "RealLock":
        with _registry_mutex:
            with suppress(FileNotFoundError):
                # Before the file is opened: closing a second descriptor of a file that this process
                # has locked would give the lock away.
                if _identity(os.lstat(path)) in _held_locks:
                    raise BlockingIOError(errno.EAGAIN, "locked by this process", path)
            fd = os.open(path, os.O_RDWR | os.O_CREAT | _SAFE_FLAGS, _FILE_MODE)
            try:
                _lock_first_byte(fd, path)
                status = os.fstat(fd)
                if status.st_size == 0:
                    os.pwrite(fd, LOCK_TEXT, 0)
                    _sync_all(fd)
                    self.sync_directory(_directory_of(path))
            except BaseException:
                os.close(fd)
                raise
            _held_locks.add(_identity(status))
            return RealLock(fd, _identity(status))


# --------------------------------------------------------------------------------------- real locks

# POSIX range locks belong to the process: it can take its own lock twice without noticing. So the
# process keeps a list, by device and inode because one file has many paths.
_held_locks: Final[set[tuple[int, int]]] = set()
_registry_mutex: Final = threading.Lock()
_FLOCK: Final = Struct("hhqqi4x")  # struct flock of 64-bit Linux: type, whence, start, length, pid


class RealLock:
    """A `FileLock` that is a POSIX range lock on the first byte."""

    __slots__ = ("_fd", "_identity")

    def __init__(self, fd: int, identity: tuple[int, int]) -> None:
        self._fd = fd
        self._identity = identity

    def release(self) -> None:
        with _registry_mutex:
            fd, self._fd = self._fd, -1
            if fd >= 0:
                _held_locks.discard(self._identity)
                os.close(fd)


def _identity(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino


def _lock_first_byte(fd: int, path: str) -> None:
    try:
        fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, 0, os.SEEK_SET)
    except PermissionError as error:
        # POSIX lets a system say EACCES instead of EAGAIN for "somebody has it".
        raise BlockingIOError(errno.EAGAIN, "locked by another process", path) from error


def lock_holder(path: str) -> int | None:
    """The process that holds a lock, None where nobody seems to; takes and gives away no lock."""
    with _registry_mutex:
        try:
            if _identity(os.lstat(path)) in _held_locks:
                return os.getpid()
            if sys.platform != "linux":
                return None  # struct flock looks different everywhere
            with _descriptor(path, os.O_NOFOLLOW) as fd:
                asked = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 1, 0)
                answer = _FLOCK.unpack(fcntl.fcntl(fd, fcntl.F_GETLK, asked))
        except OSError:
            return None
    return None if answer[0] == fcntl.F_UNLCK else int(answer[4])


# ------------------------------------------------------------------------------ system call helpers


def _sync_data(fd: int) -> None:
    """Make data and length durable; the times in the inode may stay behind."""
    if sys.platform == "darwin":
        # fsync of macOS stops at the drive's own cache.
        fcntl.fcntl(fd, fcntl.F_FULLFSYNC)
    else:
        os.fdatasync(fd)


def _sync_all(fd: int) -> None:
    if sys.platform == "darwin":
        fcntl.fcntl(fd, fcntl.F_FULLFSYNC)
    else:
        os.fsync(fd)


def _directory_of(path: str) -> str:
    return os.path.dirname(path) or "."


@contextmanager
def _descriptor(path: str, flags: int) -> Iterator[int]:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | flags)
    try:
        yield fd
    finally:
        os.close(fd)


def _require_file(status: os.stat_result, path: str) -> None:
    if stat.S_ISDIR(status.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, "not a regular file", path)
