"""This module tells the C library to keep the memory that a server frees, for its next requests.

A broker takes a few hundred KiB for each large request and frees them a moment later. By its own
rules glibc gives such memory back to the system each time while it happens to lie at the end of its
heap, and has it again, page by page, for the next request: 35 page faults and 85 us and more for a
request of 124 KiB. Whether that happens is chance.

It knows nothing of who uses the memory.
"""

from __future__ import annotations

import ctypes
from typing import Final

# The numbers of glibc's malloc.h.
_TRIM_THRESHOLD: Final = -1
_MMAP_THRESHOLD: Final = -3
KEPT_BYTES_MAX: Final = 32 * 1024 * 1024  # more than this at the end of the heap goes back
HEAP_BYTES_MAX: Final = 4 * 1024 * 1024  # what is larger is had from the system, and goes back


def keep_freed_memory() -> bool:
    """Keep up to `KEPT_BYTES_MAX`; False where the C library has no such setting."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):
        return False
    mallopt.argtypes = (ctypes.c_int, ctypes.c_int)
    mallopt.restype = ctypes.c_int
    return bool(
        mallopt(_TRIM_THRESHOLD, KEPT_BYTES_MAX) and mallopt(_MMAP_THRESHOLD, HEAP_BYTES_MAX)
    )
