"""This module tells what of one open file is in memory: the system is asked, in the way that costs
least, and where it cannot say, what was warmed is remembered.

It knows neither names nor contents of files. A file is a descriptor here, which the caller keeps.
"""

from __future__ import annotations

import os
from functools import partial
from typing import Final

from sluice.storage import page_cache
from sluice.storage.stretches import Stretches
from sluice.storage.warmed import Warmed

_COUNTED_BYTES: Final = 1 << 16  # from here on counting pages is faster than a copy


class Residency:
    """What is known of one file."""

    __slots__ = ("_is_fetched", "_is_mute", "_stretches", "_warmed")

    def __init__(self) -> None:
        self._stretches = Stretches()
        self._warmed = Warmed()
        # The file system was asked for a read that does not wait, and knows none. It never will.
        self._is_mute = False
        self._is_fetched = False  # parts of it, before anybody looks at them

    def mapped(self, view: memoryview) -> None:
        """This is the file's mapping from now on."""
        if self._is_fetched:
            page_cache.read_nothing_ahead(view)

    def read_now(self, fd: int, size: int, offset: int) -> bytearray | None:
        """So many bytes, if all of them are in memory."""
        found = bytearray(size)
        is_read = None if self._is_mute else page_cache.read_now(fd, found, offset)
        if is_read is None:
            self._is_mute = True
            is_there = self._seems_held(fd, offset, offset + size)
            is_read = is_there and os.preadv(fd, [found], offset) == size
        return found if is_read else None

    def holds(self, fd: int, start: int, stop: int) -> bool:
        """Whether a range that is not empty is in memory."""
        if stop - start >= _COUNTED_BYTES and page_cache.holds(fd, start, stop):
            return True
        if fd >= 0 and self._stretches.hold(start, stop, partial(page_cache.holds, fd)):
            return True
        is_read = None if self._is_mute else page_cache.is_resident(fd, start, stop)
        if is_read is None:
            self._is_mute = True
            return self._seems_held(fd, start, stop)
        return is_read

    def _seems_held(self, fd: int, start: int, stop: int) -> bool:
        """The same where no read can be told not to wait: by a count, or because it was warmed."""
        # Pages are counted and remembered, not bytes: the end may lie within one.
        if start < 0 or stop > os.fstat(fd).st_size:
            return False
        return page_cache.holds(fd, start, stop) or self._warmed.hold(start, stop)

    def warm(self, fd: int, start: int, stop: int) -> None:
        """Bring a range into memory; any thread may call this."""
        end = page_cache.warm(fd, start, stop)
        # Asked here, too: whoever opens a file to warm it has not asked anything yet.
        if self._is_mute or page_cache.read_now(fd, bytearray(1), start) is None:
            self._is_mute = True
            self._warmed.note(start, end)

    def fetch(self, fd: int, view: memoryview | None, start: int, stop: int) -> None:
        """The same for who looks at the mapping, which is `view`, from then on."""
        if not self._is_fetched:
            self._is_fetched = True
            if view is not None:
                page_cache.read_nothing_ahead(view)
        self.warm(fd, start, stop)

    def forget(self, fd: int, view: memoryview | None, start: int, stop: int) -> None:
        """Let the memory of a range go; `view` as `page_cache.forget` takes it."""
        self._warmed.drop(start, stop)
        page_cache.forget(fd, view, start, stop)
