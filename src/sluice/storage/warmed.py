"""This module remembers which pages of a file were read a short while ago, where nobody else can
say what is in memory.

Some file systems take no question about it: overlayfs (the files of a container that lie on no
volume) and others answer neither a read that must not wait nor a count of pages, tmpfs only the
count. There a read that was brought into memory would be asked for for ever. So what
was warmed counts as in memory until somebody asks about it, however long that takes, and then for
some seconds after each question: what is read does not go away as quickly, and where it does, one
read waits for the disk.

It reads no file. Any thread may call it.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable
from threading import Lock
from time import monotonic_ns
from typing import Final

# A search that asks for one place after the other, each on a thread, is over by then.
REMEMBERED_NS: Final = 10_000_000_000
# What a page's byte says.
_ASKED_EARLIER: Final = 1
_ASKED: Final = 2
_WARMED: Final = 3
# What each of them, and 0 for a page that nothing is known of, becomes with time.
_LATER: Final = bytes((0, 0, _ASKED_EARLIER, _WARMED)) + bytes(252)


class Warmed:
    """The pages of one file: a byte for each, up to the last one that was warmed."""

    __slots__ = ("_lock", "_now_ns", "_pages", "_until_ns")

    def __init__(self, now_ns: Callable[[], int] = monotonic_ns) -> None:
        self._now_ns = now_ns
        self._lock = Lock()
        self._pages = bytearray()
        self._until_ns = 0

    def note(self, start: int, stop: int) -> None:
        """A range of the file was read just now."""
        if start >= stop:
            return  # behind the end of the file, which may be far
        first, last = _pages_of(start, stop)
        with self._lock:
            self._pages += bytes(max(0, last - len(self._pages)))
            self._pages[first:last] = bytes((_WARMED,)) * (last - first)

    def hold(self, start: int, stop: int) -> bool:
        """Whether all of a range counts as in memory."""
        first, last = _pages_of(start, stop)
        with self._lock:
            self._grow_older()
            pages = self._pages[first:last]
            if len(pages) < last - first or 0 in pages:
                return False
            self._pages[first:last] = bytes((_ASKED,)) * (last - first)
            return True

    def drop(self, start: int, stop: int) -> None:
        """A range need not be in memory any more."""
        first, last = _pages_of(start, stop)
        with self._lock:
            last = min(last, len(self._pages))
            self._pages[first:last] = bytes(max(0, last - first))

    def _grow_older(self) -> None:
        now_ns = self._now_ns()
        if now_ns < self._until_ns:
            return
        turns = 2 if now_ns >= self._until_ns + REMEMBERED_NS else 1
        self._until_ns = now_ns + REMEMBERED_NS
        for _ in range(turns):
            self._pages = self._pages.translate(_LATER)


def _pages_of(start: int, stop: int) -> tuple[int, int]:
    """The numbers of the first page of a range, and of the one behind its last."""
    return start // mmap.PAGESIZE, -(-stop // mmap.PAGESIZE)
