"""This module knows what transactions mean for the readers of one partition: up to where all is
decided, and what was rolled back.

It is told of every transactional batch and every marker in the order of their offsets, when they
are appended and when a start reads the log, and keeps nothing else. Pure: no clock, no store.

    open       producers that have written and whose end has not come: their first offsets
    closing    ends that are written and not confirmed yet: a reader must not see that far
    aborted    (end, first, producer, stable) of what was rolled back, in the order of the ends;
               no later one begins below `stable`
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from typing import Any, NamedTuple


class Aborted(NamedTuple):
    """Records of one producer from `first` up to `last`, its marker, are not to be seen."""

    last: int
    first: int
    producer_id: int
    stable: int  # up to where everything was decided with it


class _Closing(NamedTuple):
    last: int
    first: int
    producer_id: int


class StableOffsets:
    """The transactions of one partition."""

    __slots__ = ("_aborted", "_closing", "_open")

    def __init__(self) -> None:
        self._open: dict[int, int] = {}  # in the order of their first offsets
        self._closing: list[_Closing] = []
        self._aborted: list[Aborted] = []

    # --------------------------------------------------------------------------------------- noting

    def data(self, producer_id: int, base_offset: int) -> None:
        """A transactional batch was appended."""
        self._open.setdefault(producer_id, base_offset)

    def marker(self, producer_id: int, offset: int, *, commit: bool) -> None:
        """A producer's transaction has ended; it may have written nothing here."""
        first = self._open.pop(producer_id, None)
        if first is None:
            return
        self._closing.append(_Closing(offset, first, producer_id))
        if not commit:
            stable = min(self._open.values(), default=offset + 1)
            self._aborted.append(Aborted(offset, first, producer_id, stable))

    def discard_from(self, offset: int) -> None:
        """What was appended from an offset on could not be written."""
        undone = [each for each in self._closing if each.last >= offset]
        self._closing = [each for each in self._closing if each.last < offset]
        while self._aborted and self._aborted[-1].last >= offset:
            self._aborted.pop()
        starts = self._open | {each.producer_id: each.first for each in reversed(undone)}
        kept = sorted((first, name) for name, first in starts.items() if first < offset)
        self._open = {name: first for first, name in kept}

    def forget_below(self, log_start: int) -> None:
        """Retention has taken everything below an offset."""
        del self._aborted[: bisect_left(self._aborted, (log_start,))]

    # -------------------------------------------------------------------------------------- looking

    @property
    def is_trivial(self) -> bool:
        """Whether no transaction was ever open here, or nothing of them is left."""
        return not (self._open or self._closing or self._aborted)

    def is_open(self, producer_id: int) -> bool:
        return producer_id in self._open

    def first_offset(self, producer_id: int) -> int | None:
        """Where the open transaction of a producer begins."""
        return self._open.get(producer_id)

    def stable(self, high: int) -> int:
        """The offset below which everything is decided; `high`: up to where all is confirmed."""
        if not self._open and not self._closing:
            return high
        if self._closing:
            self._closing = [each for each in self._closing if each.last >= high]
        # A dictionary keeps its order, so the first of the open ones is the oldest.
        oldest = next(iter(self._open.values()), high)
        return min(oldest, high, *(each.first for each in self._closing))

    def aborted(self, start: int, stop: int) -> list[tuple[int, int]]:
        """(producer id, first offset) of what was rolled back between two offsets."""
        return [(each.producer_id, each.first) for each in self.rolled_back(start, stop)]

    def rolled_back(self, start: int, stop: int) -> list[Aborted]:
        """What was rolled back between two offsets, from where to where."""
        found = []
        for at in range(bisect_left(self._aborted, (start,)), len(self._aborted)):
            each = self._aborted[at]
            if each.first < stop:
                found.append(each)
            if each.stable >= stop:
                break
        return found

    # --------------------------------------------------------------------------------------- saving

    def row(self) -> dict[str, Any]:
        """All of it, as JSON can have it. Ends that are not confirmed count as ends."""
        return {
            "open": [[name, first] for name, first in self._open.items()],
            "aborted": [list(each) for each in self._aborted],
        }

    @classmethod
    def from_row(cls, row: Mapping[str, Any]) -> StableOffsets:
        """What `row` was made from."""
        result = cls()
        result._open = {int(name): int(first) for name, first in row.get("open", ())}
        result._aborted = [Aborted(*each) for each in row.get("aborted", ())]
        return result
