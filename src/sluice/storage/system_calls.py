"""This module holds what Python's `os` does not offer ready made: syncfs, cachestat, work apart.

Only `files.py` uses it. It knows no store and no file of it.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import sys
import warnings
from collections.abc import Callable
from struct import Struct
from typing import Final

_FAILURE: Final = Struct(">i")
_TEXT_BYTES_MAX: Final = 1000


def run_apart(work: Callable[[], None]) -> None:
    """Run `work` in a child of this process, and wait for it.

    A thread that makes ten thousand system calls has to ask for the interpreter's lock after each
    of them, and takes it from the event loop each time: measured, appends went at half their speed
    while 10,000 queue files were written. A child has a lock of its own and the other core. It
    starts no program and ends with os._exit, so nothing of the parent (its event loop, its sockets,
    its exit handlers) is run twice.
    """
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        # Python warns that a child of a process with threads may find locks taken: `work` takes
        # none.
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        _work_and_exit(work, writing)
    os.close(writing)
    try:
        report = b""
        while piece := os.read(reading, 4096):
            report += piece
    finally:
        os.close(reading)
        _, status = os.waitpid(child, 0)
    if status != 0 or len(report) < _FAILURE.size:
        raise OSError(0, f"the writing process ended with status {status}")
    (number,) = _FAILURE.unpack_from(report)
    if number != 0:
        raise OSError(number, report[_FAILURE.size :].decode("utf-8", "replace"))


def _work_and_exit(work: Callable[[], None], writing: int) -> None:
    """In the child: report 0, or the error's number and text; never return."""
    status = 1
    try:
        try:
            work()
            report = _FAILURE.pack(0)
        except OSError as error:
            text = str(error).encode("utf-8", "replace")[:_TEXT_BYTES_MAX]
            report = _FAILURE.pack(error.errno or -1) + text
        os.write(writing, report)
        status = 0
    finally:
        os._exit(status)


def find_syncfs() -> Callable[[int], None] | None:
    """Return the system call that makes a whole file system durable, where it can be trusted."""
    if sys.platform != "linux" or not reports_syncfs_errors(platform.release()):
        return None
    library = ctypes.CDLL(None, use_errno=True)
    if not hasattr(library, "syncfs"):
        return None
    function = library.syncfs
    function.argtypes = [ctypes.c_int]
    function.restype = ctypes.c_int

    def syncfs(fd: int) -> None:
        if function(fd) != 0:
            error = ctypes.get_errno()
            raise OSError(error, os.strerror(error))

    return syncfs


def reports_syncfs_errors(release: str) -> bool:
    """Before Linux 5.8 syncfs answered 0 although pages could not be written."""
    numbers = release.partition("-")[0].split(".")[:2]
    if len(numbers) < 2 or not all(number.isdecimal() for number in numbers):
        return False
    return (int(numbers[0]), int(numbers[1])) >= (5, 8)


_CACHESTAT: Final = 451  # its number on every architecture; since Linux 6.5


def find_cachestat() -> Callable[[int, int, int], int] | None:
    """Return the system call that counts the pages of a file's range which are in memory."""
    if sys.platform != "linux":
        return None
    asked_type, found_type = ctypes.c_uint64 * 2, ctypes.c_uint64 * 5
    function = ctypes.CDLL(None, use_errno=True).syscall
    pointer = ctypes.c_void_p
    function.argtypes = [ctypes.c_long, ctypes.c_int, pointer, pointer, ctypes.c_uint]
    function.restype = ctypes.c_long

    def cachestat(fd: int, start: int, byte_count: int) -> int:
        found = found_type()
        if function(_CACHESTAT, fd, asked_type(start, byte_count), found, 0) != 0:
            error = ctypes.get_errno()
            raise OSError(error, os.strerror(error))
        return found[0]

    try:
        cachestat(-1, 0, 1)
    except OSError as error:
        # No such file: the call itself is there. Some containers forbid what they do not know.
        return cachestat if error.errno == errno.EBADF else None
    return None
