"""This module asks the system what of a file is in memory, and reads what is, without a wait.

Where the system cannot tell, nothing is. It keeps nothing and may run on any thread.
"""

from __future__ import annotations

import errno
import mmap
import os
from contextlib import suppress
from typing import Final

from sluice.storage.system_calls import find_cachestat

NOWAIT: Final[int] = getattr(os, "RWF_NOWAIT", 0)  # Linux only; 0 = we cannot ask
_cachestat: Final = find_cachestat()
_CANNOT_ASK: Final = frozenset({errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS})


def read_now(fd: int, into: bytearray | memoryview, offset: int) -> bool:
    """Whether the whole buffer could be filled from `offset` on without a wait for the disk."""
    if offset < 0 or not NOWAIT:
        return False
    try:
        return os.preadv(fd, [into], offset, NOWAIT) == len(into)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno in _CANNOT_ASK:
            return False
        raise


def holds(fd: int, start: int, stop: int) -> bool:
    """Whether a range of a file is in memory, if that can be counted."""
    if _cachestat is None or not 0 <= start < stop:
        return False
    with suppress(OSError):
        page_count = (stop - 1) // mmap.PAGESIZE - start // mmap.PAGESIZE + 1
        return _cachestat(fd, start, stop - start) >= page_count
    return False
