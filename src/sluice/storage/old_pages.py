"""This module gives back the memory of what was written to the log a while ago and nobody reads,
where new memory is slow to get.

The system keeps what was written in memory for as long as there is room, so that each page of the
log takes new memory. Where a host hands that out page by page (`slow_pages.py`) it is most of what
an append costs, while gigabytes lie there that nobody asks for. Then the oldest of them make room,
some megabytes ahead of the writes, and the system takes those pages for the next ones. The newest
part of the log stays (`log_cached_bytes_min`), and so do files that were read in the last seconds:
who lags behind asks again and again. Nothing of the log changes by it, and nothing relies on it:
what is read again comes from the disk, as it does when the system itself runs out of memory.

The methods belong to the owner's thread.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from time import monotonic_ns
from typing import Final, Protocol

from sluice.storage.background import Background
from sluice.storage.files import OpenFile

_LEAD_BYTES: Final = 64 << 20  # so much memory is free for what comes next
_STEP_BYTES: Final = 16 << 20
_ALIGNED_BYTES: Final = 2 << 20
_LASTS_NS: Final = 600_000_000_000  # from when memory was last seen to be slow
_UNREAD_NS: Final = 8_000_000_000
_NEVER: Final = 1 << 62
_MEMORY_PART: Final = 16  # of the machine's memory, one part is for the newest of the log
_KEPT_BYTES_MIN: Final = 256 << 20
_LANE: Final = "old-pages"

log_lines = logging.getLogger("sluice.storage")

Part = tuple[OpenFile, int, int]


class Holder(Protocol):
    """A file of the log."""

    file: OpenFile


def kept_bytes(wanted: int) -> int:
    """How much of the newest log keeps its memory, by the setting; 0: by the machine's memory."""
    if not wanted:
        memory_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        wanted = memory_bytes // _MEMORY_PART
    return max(wanted, _KEPT_BYTES_MIN)


class OldPages:
    """The pages of one log, of which `segments` are the files by their first position."""

    def __init__(
        self,
        background: Background,
        segments: Mapping[int, Holder],
        segment_bytes: int,
        kept_bytes: int,
        now_ns: Callable[[], int] = monotonic_ns,
    ) -> None:
        self._background = background
        self._segments = segments
        self._segment_bytes = segment_bytes
        self._kept_bytes = kept_bytes
        self._now_ns = now_ns
        self._first = 0
        self._given: dict[int, int] = {}  # by file: up to where it gave its pages back
        self._read_ns: dict[int, int] = {}  # by file: when it was seen to have been read
        self._until_ns = 0
        self._ready_to = 0  # the position in the log that there is free memory for
        self._is_busy = False
        self.due_at = _NEVER  # when the log has come so far `make_room` is to be asked

    def start_at(self, position: int) -> None:
        """The log goes on here: what was there before may not be in memory at all."""
        self._first = position

    def note_reads(self) -> None:
        """See which files were read since this was asked last, some seconds ago at most."""
        now_ns = self._now_ns()
        for base, segment in self._segments.items():
            if segment.file.was_viewed():
                self._read_ns[base] = now_ns

    def begin(self) -> None:
        """Memory is slow to get now."""
        if self.due_at == _NEVER:
            log_lines.info("memory is slow to get: older pages of the log make room for new ones")
            self.due_at = 0
        self._until_ns = self._now_ns() + _LASTS_NS

    def make_room(self, end: int) -> None:
        """The log ends here now: see to it that there is free memory for what comes next."""
        now_ns = self._now_ns()
        if now_ns >= self._until_ns:
            self.due_at = _NEVER
            return
        if self._is_busy:
            return
        ready_to = max(self._ready_to, end)
        parts = self._take(end, end + _LEAD_BYTES - ready_to, now_ns)
        taken_bytes = sum(stop - start for _, start, stop in parts)
        if not taken_bytes:
            self.due_at = end + _STEP_BYTES
            return
        self._ready_to = ready_to + taken_bytes
        self.due_at = max(end, self._ready_to - _LEAD_BYTES + _STEP_BYTES)
        self._is_busy = True

        def work() -> None:
            for file, start, stop in parts:
                file.forget(start, stop)

        def done(_: None, error: BaseException | None) -> None:
            self._is_busy = False
            if error is not None:
                log_lines.warning("pages of the log could not be given back: %s", error)
                self.due_at = _NEVER

        self._background.submit(_LANE, work, done)

    def _take(self, end: int, byte_count: int, now_ns: int) -> list[Part]:
        """The oldest parts of the log that nobody reads, of so many bytes together."""
        parts: list[Part] = []
        limit = end - self._kept_bytes
        for base, segment in self._segments.items():
            if base >= limit or byte_count < _ALIGNED_BYTES:
                break
            start = self._given.get(base, max(0, self._first - base))
            start += -start % _ALIGNED_BYTES
            stop = min(start + byte_count, self._segment_bytes, limit - base)
            stop -= stop % _ALIGNED_BYTES
            if stop <= start or now_ns - self._read_ns.get(base, -_UNREAD_NS) < _UNREAD_NS:
                continue
            parts.append((segment.file, start, stop))
            self._given[base] = stop
            byte_count -= stop - start
        return parts

    def forget(self, base: int) -> None:
        """A file is gone."""
        self._given.pop(base, None)
        self._read_ns.pop(base, None)
