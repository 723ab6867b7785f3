"""This module asks the system what of a file is in memory, reads what is, without a wait, and tells
it what nobody needs.

Where the system cannot tell, it says so. It keeps nothing and may run on any thread.
"""

from __future__ import annotations

import errno
import mmap
import os
import sys
from contextlib import suppress
from typing import Final

from sluice.storage.system_calls import find_cachestat

NOWAIT: Final[int] = getattr(os, "RWF_NOWAIT", 0)  # Linux only; 0 = we cannot ask
_cachestat: Final = find_cachestat()
_CANNOT_ASK: Final = frozenset({errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS})
# What is read in one call: the scratch buffer stays in the processor's cache.
_STEP_BYTES: Final = 1 << 20
# Filled and never read, so it does not matter who else writes into it.
_scratch: Final = memoryview(bytearray(_STEP_BYTES))


def read_now(fd: int, into: bytearray | memoryview, offset: int) -> bool | None:
    """Whether the whole buffer could be filled from `offset` on without a wait for the disk; None
    where the system or the file system knows no read that does not wait.
    """
    if offset < 0:
        return False
    if not NOWAIT:
        return None
    try:
        return os.preadv(fd, [into], offset, NOWAIT) == len(into)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno in _CANNOT_ASK:
            return None
        raise


def is_resident(fd: int, start: int, stop: int) -> bool | None:
    """Whether a range of a file can be read without a wait, by reading it; None as above."""
    while start < stop:
        step_bytes = min(stop - start, _STEP_BYTES)
        is_read = read_now(fd, _scratch[:step_bytes], start)
        if not is_read:
            return is_read
        start += step_bytes
    return True


def warm(fd: int, start: int, stop: int) -> int:
    """Bring a range of a file into memory; returns where it ended, at the file's end at most."""
    # A buffer of its own: preadv runs without the interpreter's lock, on several threads at once.
    scratch = memoryview(bytearray(min(stop - start, _STEP_BYTES)))
    while start < stop:
        got_bytes = os.preadv(fd, [scratch[: stop - start]], start)
        if got_bytes == 0:
            break  # the end of the file
        start += got_bytes
    return start


def mapped(fd: int) -> mmap.mmap:
    """Map a whole file for reading; pwritev uses the same pages, so writes show at once."""
    if sys.version_info >= (3, 13):
        # Without it every mapping keeps a second descriptor open.
        return mmap.mmap(fd, 0, mmap.MAP_SHARED, mmap.PROT_READ, trackfd=False)
    return mmap.mmap(fd, 0, mmap.MAP_SHARED, mmap.PROT_READ)


def read_nothing_ahead(view: memoryview) -> None:
    """Tell the system that who looks at a mapping has seen to it that its pages are in memory: it
    is not to guess what he looks at next.
    """
    if isinstance(view.obj, mmap.mmap) and hasattr(mmap, "MADV_RANDOM"):
        view.obj.madvise(mmap.MADV_RANDOM)


def holds(fd: int, start: int, stop: int) -> bool:
    """Whether a range of a file is in memory, if that can be counted."""
    if _cachestat is None or not 0 <= start < stop:
        return False
    with suppress(OSError):
        page_count = (stop - 1) // mmap.PAGESIZE - start // mmap.PAGESIZE + 1
        return _cachestat(fd, start, stop - start) >= page_count
    return False


def forget(fd: int, view: memoryview | None, start: int, stop: int) -> None:
    """Let the system use the memory of a range for something else, as far as it is on the disk.

    `view`: the file's mapping, through which pages may be held; they stay readable.
    """
    if view is not None and isinstance(view.obj, mmap.mmap) and hasattr(mmap, "MADV_DONTNEED"):
        view.obj.madvise(mmap.MADV_DONTNEED, start, stop - start)
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(fd, start, stop - start, os.POSIX_FADV_DONTNEED)
