"""This module says what has to be read from the disk before a part of the log can be looked at.

A read of one queue wants pieces that lie between those of other queues. To fetch each by itself is
right for a queue that has few of them: nothing else is read. But who reads a whole topic asks for
the pieces between them a moment later, and a disk gives megabytes in the time of some pieces. So a
stretch of the log is read whole where one read wants a good part of it, or where another one wanted
something of it before.

It reads nothing itself. The methods belong to the owner's thread.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from sluice.storage.commit_log import CommitLog
from sluice.storage.files import OpenFile
from sluice.storage.queue_index import ColdRead
from sluice.storage.stretches import STRETCH_BYTES

_WHOLE_PART: Final = 16  # of a stretch, one part wanted by one read is a good part
_TOUCHED_MAX: Final = 1024  # stretches: 4 GiB of a log
# Where what is wanted is one of so many parts of what lies between its ends, one look at all of
# that costs no more than one at each piece: a look goes over every page.
_CLOSE_PART: Final = 16

Part = tuple[int, int]  # where in the log it begins and ends; it lies in one file
Place = tuple[OpenFile, int, int]  # the same in that file


class ColdParts:
    """What is not in memory, of one log."""

    def __init__(self, log: CommitLog) -> None:
        self._log = log
        # The stretches of which pieces were read, by their beginning; the oldest are the first.
        self._touched: dict[int, None] = {}

    def require(self, parts: Sequence[Part], hot_from: int) -> None:
        """Raise `ColdRead` where one of these parts, if there are any, which follow each other, may
        have to come from the disk; what lies behind `hot_from` is in memory.
        """
        log = self._log
        if len(parts) > 1 and parts[0][0] < hot_from and self._is_cached_together(parts):
            return
        cold: list[Part] = []
        for start, stop in parts:
            if start < hot_from:
                at = start % log.segment_bytes
                if not log.segments[start - at].file.resident(at, at + stop - start):
                    cold.append((start, stop))
        if cold:
            raise self._read_of(cold)

    def _is_cached_together(self, parts: Sequence[Part]) -> bool:
        """Whether one look says so, where it costs no more than one at each part."""
        start, stop = parts[0][0], parts[-1][1]
        wanted_bytes = sum(end - begin for begin, end in parts)
        return stop - start <= wanted_bytes * _CLOSE_PART and self._log.is_cached(start, stop)

    def _read_of(self, cold: Iterable[Part]) -> ColdRead:
        """What reads as much as these parts need."""
        pieces: dict[int, list[Part]] = {}
        for part in cold:
            pieces.setdefault(self._stretch(part[0]), []).append(part)
        alone: list[Place] = []
        whole: list[tuple[Place, list[Place]]] = []  # with what of it is wanted
        for stretch, parts in pieces.items():
            places = [self._place(part) for part in parts]
            if self._is_whole(stretch, parts):
                last = self._stretch(parts[-1][1] - 1)  # its end may lie in the next one
                whole.append((self._place((stretch, self._end(last))), places))
            else:
                alone += places

        def work() -> None:
            rest = list(alone)
            for (file, start, stop), places in whole:
                try:
                    file.fetch(start, stop)
                except OSError:  # of something between them, perhaps
                    rest += places
            for file, start, stop in rest:
                file.fetch(start, stop)

        return ColdRead(work)

    def _place(self, part: Part) -> Place:
        start, stop = part
        base = start - start % self._log.segment_bytes
        return self._log.segments[base].file, start - base, stop - base

    def _stretch(self, position: int) -> int:
        """Where the stretch begins that has this position."""
        return position - position % self._log.segment_bytes % STRETCH_BYTES

    def _end(self, stretch: int) -> int:
        segment_bytes = self._log.segment_bytes
        file_end = stretch - stretch % segment_bytes + segment_bytes
        return min(stretch + STRETCH_BYTES, file_end, self._log.written)

    def _is_whole(self, stretch: int, parts: Iterable[Part]) -> bool:
        touched = self._touched
        byte_count = sum(stop - start for start, stop in parts)
        if stretch in touched or byte_count * _WHOLE_PART >= STRETCH_BYTES:
            touched.pop(stretch, None)
            return True
        if len(touched) >= _TOUCHED_MAX:
            del touched[next(iter(touched))]
        touched[stretch] = None
        return False
