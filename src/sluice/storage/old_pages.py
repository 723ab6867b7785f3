"""This module gives back the memory of what was written to the log a while ago and nobody reads,
where new memory is slow to get.

The system keeps what was written in memory for as long as there is room, so that each page of the
log takes new memory. Where a host hands that out page by page (`slow_pages.py`) it is most of what
an append costs, while gigabytes lie there that nobody asks for. Then the oldest of them make room,
some megabytes ahead of the writes, and the system takes those pages for the next ones. The newest
part of the log stays (`log_cached_bytes_min`), and so does what follows a place that was read in
the last seconds, in its file and the next one: who lags behind reads on. Nothing of the log changes
by it, and nothing relies on it: what is read again comes from the disk, as it does when the system
itself runs out of memory.

Who appends does it itself, little by little: pages that another thread gives back, or many at once,
are not those that the system takes next. The methods belong to the owner's thread.
"""

from __future__ import annotations

import logging
import os
from collections import deque
from collections.abc import Callable, Mapping
from time import monotonic_ns
from typing import Final, Protocol

from sluice.storage.files import UNREAD, OpenFile

_LEAD_BYTES: Final = 8 << 20  # so much memory is free for what comes next
_STEP_BYTES: Final = 2 << 20
_ALIGNED_BYTES: Final = 2 << 20
_LASTS_NS: Final = 600_000_000_000  # from when memory was last seen to be slow
_UNREAD_NS: Final = 8_000_000_000
_READS_MAX: Final = 16  # it is asked about reads every second
_NEVER: Final = 1 << 62
_MEMORY_PART: Final = 8  # of the machine's memory, one part is for the newest of the log
_KEPT_BYTES_MIN: Final = 256 << 20

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
        segments: Mapping[int, Holder],
        segment_bytes: int,
        kept_bytes: int,
        now_ns: Callable[[], int] = monotonic_ns,
    ) -> None:
        self._segments = segments
        self._segment_bytes = segment_bytes
        self._kept_bytes = kept_bytes
        self._now_ns = now_ns
        self._first = 0
        self._oldest = 0  # the first file that may have something to give
        self._given: dict[int, int] = {}  # by file: up to where it gave its pages back
        # By file: from where on it was read, and when that was seen, in the last seconds.
        self._reads: dict[int, deque[tuple[int, int]]] = {}
        self._until_ns = 0
        self._ready_to = 0  # the position in the log that there is free memory for
        self._flushed = 0
        self._has_failed = False
        self.is_giving = False  # what is written next finds memory that was given back
        self.due_at = _NEVER  # when the log has come so far `make_room` is to be asked

    @property
    def is_active(self) -> bool:
        """Whether memory was slow to get a while ago, so that it is given back where it can be."""
        return self.due_at != _NEVER

    def start_at(self, position: int) -> None:
        """The log goes on here: what was there before may not be in memory at all."""
        self._first = self._flushed = position
        self._oldest = position - position % self._segment_bytes

    def flushed(self, position: int) -> None:
        """The log is on the disk up to here: the rest has to stay in memory, to be written."""
        self._flushed = position

    def note_reads(self) -> None:
        """See which files were read since this was asked last, some seconds ago at most."""
        now_ns = self._now_ns()
        for base, segment in self._segments.items():
            viewed_from = segment.file.viewed_from()
            if viewed_from != UNREAD:
                self._reads.setdefault(base, deque(maxlen=_READS_MAX)).append((viewed_from, now_ns))

    def begin(self) -> None:
        """Memory is slow to get now."""
        if self._has_failed:
            return
        if self.due_at == _NEVER:
            log_lines.info("memory is slow to get: older pages of the log make room for new ones")
            self.due_at = 0
        self._until_ns = self._now_ns() + _LASTS_NS

    def make_room(self, end: int) -> None:
        """The log ends here now: see to it that there is free memory for what comes next."""
        now_ns = self._now_ns()
        if now_ns >= self._until_ns:
            self.due_at = _NEVER
            self.is_giving = False
            return
        ready_to = max(self._ready_to, end)
        parts = self._take(end, end + _LEAD_BYTES - ready_to, now_ns)
        self._ready_to = ready_to + sum(stop - start for _, start, stop in parts)
        self.is_giving = self._ready_to > end
        self.due_at = max(end, self._ready_to - _LEAD_BYTES) + _STEP_BYTES
        try:
            for file, start, stop in parts:
                file.forget(start, stop)
        except OSError as error:
            log_lines.warning("pages of the log could not be given back: %s", error)
            self.due_at = _NEVER
            self.is_giving = False
            self._has_failed = True

    def _take(self, end: int, byte_count: int, now_ns: int) -> list[Part]:
        """The oldest parts of the log that nobody reads, of so many bytes together."""
        parts: list[Part] = []
        limit = min(end - self._kept_bytes, self._flushed)
        base = self._oldest
        while base < limit and byte_count >= _ALIGNED_BYTES:
            segment = self._segments.get(base)
            start = self._given.get(base, max(0, self._first - base))
            start += -start % _ALIGNED_BYTES
            if segment is None or start + _ALIGNED_BYTES > self._segment_bytes:
                if base == self._oldest:
                    self._oldest += self._segment_bytes
            else:
                is_next = self._read_from(base - self._segment_bytes, now_ns) != UNREAD
                read_from = 0 if is_next else self._read_from(base, now_ns)
                stop = min(start + byte_count, self._segment_bytes, limit - base, read_from)
                stop -= stop % _ALIGNED_BYTES
                if stop > start:
                    parts.append((segment.file, start, stop))
                    self._given[base] = stop
                    byte_count -= stop - start
            base += self._segment_bytes
        return parts

    def _read_from(self, base: int, now_ns: int) -> int:
        """From where on a file was read in the last seconds."""
        reads = self._reads.get(base)
        if reads is None:
            return UNREAD
        while reads and now_ns - reads[0][1] >= _UNREAD_NS:
            reads.popleft()
        if not reads:
            del self._reads[base]
        return min((place for place, _ in reads), default=UNREAD)

    def forget(self, base: int) -> None:
        """A file is gone."""
        self._given.pop(base, None)
        self._reads.pop(base, None)
