"""This module is a real disk that fails when a test tells it to: fsyncs, a full disk, sudden death.

It is `RealFiles` with a look at what was ordered before every call that changes something. Calls
come from the broker's thread and from those that work for it in the background. An fsync may fail
and may hang, but the disk is not asked: no test outlives a power cut, and many brokers in one
suite would wait for it all the time.
"""

from __future__ import annotations

import builtins
import errno
import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from sluice.storage.files import LOCK_TEXT, Buffer, DiskUsage, RealFile, RealFiles, RealLock

PATIENCE_SECONDS: Final = 60.0
_LOG: Final = "commitlog"


@dataclass(slots=True)
class _Fault:
    """The nth call of an operation on a path like this fails."""

    operation: str
    path_part: str
    nth: int
    code: int


class FaultyFile(RealFile):
    """An open file of such a disk."""

    __slots__ = ("_disk",)

    def __init__(self, disk: FaultyFiles, file: RealFile) -> None:
        # The descriptor changes hands: the file that was opened must not close it.
        super().__init__(file._fd, file.path)
        file._fd = -1
        self._disk = disk

    def pwritev(self, buffers: Sequence[Buffer], offset: int) -> int:
        self._disk.before("write", self.path)
        return super().pwritev(buffers, offset)

    def sync(self) -> None:
        self._disk.before("fsync", self.path)

    def resize(self, size: int) -> None:
        self._disk.before("resize", self.path)  # needs no room: files are sparse
        super().resize(size)


class FaultyFiles(RealFiles):
    """A disk that fails as ordered. `is_dead`: nothing changes any more, as after a kill -9."""

    __slots__ = ("_faults", "_gate", "_lock", "fsync_count", "fsyncs_begun", "is_dead", "is_full")

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._faults: list[_Fault] = []
        self._gate = threading.Event()
        self._gate.set()
        self.fsyncs_begun = 0  # of files of the log
        self.fsync_count = 0  # those that came to an end, well or badly
        self.is_full = False
        self.is_dead = False

    # --------------------------------------------------------------------------------------- orders

    def fail(self, operation: str, nth: int, code: int, path_part: str) -> None:
        """The nth call from now on of "fsync" or "write" on such a path raises OSError(code)."""
        with self._lock:
            self._faults.append(_Fault(operation, path_part, nth, code))

    def hold_fsync(self) -> None:
        """Every fsync waits from now on."""
        self._gate.clear()

    def let_fsync(self) -> None:
        self._gate.set()

    def heal(self) -> None:
        """All that was ordered is over; what is dead stays dead."""
        with self._lock:
            self._faults.clear()
        self.is_full = False
        self._gate.set()

    def before(self, operation: str, path: str) -> None:
        """Fail where something was ordered."""
        if operation == "fsync":
            with self._lock:
                self.fsyncs_begun += _LOG in path
            self._gate.wait(PATIENCE_SECONDS)
        if self.is_dead:
            raise OSError(errno.EIO, "the process was killed", path)
        if self.is_full and operation == "write":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)
        with self._lock:
            self.fsync_count += operation == "fsync" and _LOG in path
            code = self._ordered(operation, path)
        if code:
            raise OSError(code, os.strerror(code), path)

    def _ordered(self, operation: str, path: str) -> int:
        due = 0
        for fault in list(self._faults):
            if fault.operation == operation and fault.path_part in path:
                fault.nth -= 1
                if fault.nth <= 0:
                    self._faults.remove(fault)
                    due = due or fault.code
        return due

    # ---------------------------------------------------------------------------------------- files

    def create(self, path: str, size: int) -> RealFile:
        self.before("write", path)
        return FaultyFile(self, super().create(path, size))

    def open(self, path: str, *, writable: bool = True) -> RealFile:
        return FaultyFile(self, super().open(path, writable=writable))

    def make_directory(self, path: str) -> None:
        self.before("write", path)
        super().make_directory(path)

    def replace(self, path: str, data: bytes) -> None:
        self.before("write", path)
        self.before("fsync", path)
        temporary = path + ".tmp"
        with builtins.open(temporary, "wb") as file:
            file.write(data)
        os.rename(temporary, path)

    def rename(self, old: str, new: str) -> None:
        self.before("name", old)
        super().rename(old, new)

    def remove(self, path: str) -> None:
        self.before("name", path)
        super().remove(path)

    def sync_directory(self, path: str) -> None:
        self.before("name", path)

    def sync_many(self, paths: Sequence[str]) -> None:
        for path in paths:
            self.before("fsync", path)

    def lock(self, path: str) -> RealLock:
        if not os.path.exists(path):
            with builtins.open(path, "wb") as file:
                file.write(LOCK_TEXT)  # else it would be made durable
        return super().lock(path)

    def usage(self, path: str) -> DiskUsage:
        found = super().usage(path)
        return DiskUsage(found.total_bytes, 0) if self.is_full else found
