"""This module keeps a set of queue offsets as ranges: neighbours take no more room than one.

Pure: it knows nothing of groups or queues.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable


class OffsetRanges:
    """A set of offsets. `pairs` is its stored form: [first, after the last] of every range."""

    __slots__ = ("_ends", "_starts")

    def __init__(self, pairs: Iterable[Iterable[int]] = ()) -> None:
        self._starts: list[int] = []
        self._ends: list[int] = []
        for start, end in pairs:
            self._starts.append(int(start))
            self._ends.append(int(end))

    def __len__(self) -> int:
        """How many ranges there are: what it costs."""
        return len(self._starts)

    def __contains__(self, offset: int) -> bool:
        at = bisect_right(self._starts, offset) - 1
        return at >= 0 and offset < self._ends[at]

    def pairs(self) -> list[list[int]]:
        return [[start, end] for start, end in zip(self._starts, self._ends, strict=True)]

    def count(self) -> int:
        """How many offsets are in it."""
        return sum(self._ends) - sum(self._starts)

    def grows(self, offset: int) -> bool:
        """Whether one more range is needed to add an offset."""
        at = bisect_right(self._starts, offset) - 1
        if at >= 0 and offset <= self._ends[at]:
            return False
        return not (at + 1 < len(self._starts) and self._starts[at + 1] == offset + 1)

    def add(self, offset: int) -> None:
        starts, ends = self._starts, self._ends
        at = bisect_right(starts, offset) - 1
        if at >= 0 and offset < ends[at]:
            return
        joins_next = at + 1 < len(starts) and starts[at + 1] == offset + 1
        if at >= 0 and ends[at] == offset:
            ends[at] = offset + 1
            if joins_next:
                ends[at] = ends.pop(at + 1)
                del starts[at + 1]
        elif joins_next:
            starts[at + 1] = offset
        else:
            starts.insert(at + 1, offset)
            ends.insert(at + 1, offset + 1)

    def discard(self, offset: int) -> None:
        starts, ends = self._starts, self._ends
        at = bisect_right(starts, offset) - 1
        if at < 0 or offset >= ends[at]:
            return
        start, end = starts[at], ends[at]
        left = [(start, offset), (offset + 1, end)]
        kept = [(first, stop) for first, stop in left if first < stop]
        starts[at : at + 1] = [first for first, _ in kept]
        ends[at : at + 1] = [stop for _, stop in kept]

    def drop_below(self, offset: int) -> bool:
        """Forget all offsets below one; whether there were any."""
        starts, ends = self._starts, self._ends
        gone = bisect_right(ends, offset)
        del starts[:gone], ends[:gone]
        if starts and starts[0] < offset:
            starts[0] = offset
            return True
        return gone > 0

    def drop_from(self, offset: int) -> bool:
        """Forget an offset and all above it; whether there were any."""
        starts, ends = self._starts, self._ends
        kept = bisect_right(starts, offset - 1)
        changed = kept < len(starts)
        del starts[kept:], ends[kept:]
        if ends and ends[-1] > offset:
            ends[-1] = offset
            changed = True
        return changed
