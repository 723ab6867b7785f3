"""This module tells the C library and the system how a server uses its memory.

    kept      A server keeps the memory that it frees, for its next requests.
    large     What is there when it begins to serve (modules, code, tables) lies in large pages.

A broker takes a few hundred KiB for each large request and frees them a moment later. By its own
rules glibc gives such memory back to the system each time while it happens to lie at the end of its
heap, and has it again, page by page, for the next request: 35 page faults and 85 us and more for a
request of 124 KiB. Whether that happens is chance.

An interpreter looks at memory here and there, some 20 MB of it again and again, and a processor
knows only the places of so many pages at a time. In pages of 2 MiB a request of a Kafka client took
3 to 5 % less processor time on a virtual machine, where finding a page takes longest. Most systems
give such pages only to who asks.

It knows nothing of who uses the memory.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Iterator
from typing import Final

# The numbers of glibc's malloc.h.
_TRIM_THRESHOLD: Final = -1
_MMAP_THRESHOLD: Final = -3
KEPT_BYTES_MAX: Final = 32 * 1024 * 1024  # more than this at the end of the heap goes back
# Of Linux: the pages of a range are gathered into large ones now (6.1 and newer).
_COLLAPSE: Final = 25
_LARGE_PAGE_BYTES: Final = 2 << 20
_OWN_MEMORY: Final = re.compile(r"^([0-9a-f]+)-([0-9a-f]+) rw.p \S+ \S+ 0\s*(?:\[heap\])?$", re.M)
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


def use_large_pages() -> int:
    """Move what this process has in memory now into large pages, where that can be had; returns
    how many bytes are in such pages by it.
    """
    try:
        with open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:
            text = maps.read()
        madvise = ctypes.CDLL(None).madvise
    except (AttributeError, OSError):
        return 0
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    madvise.restype = ctypes.c_int
    ranges = list(large_ranges(text))
    return sum(
        stop - start for start, stop in ranges if not madvise(start, stop - start, _COLLAPSE)
    )


def large_ranges(maps: str) -> Iterator[tuple[int, int]]:
    """Where whole large pages fit into memory that is a process's own, by Linux's list of it."""
    for found in _OWN_MEMORY.finditer(maps):
        start, stop = (int(text, 16) for text in found.groups())
        start = -(-start // _LARGE_PAGE_BYTES) * _LARGE_PAGE_BYTES
        stop = stop // _LARGE_PAGE_BYTES * _LARGE_PAGE_BYTES
        if start < stop:
            yield start, stop
