"""This module is the table of open half messages: which, where, and when each is looked at.

Half messages lie in one queue, so their offsets are dense and their positions ascend: the table is
a window of arrays from the lowest open one to the newest, some 20 bytes for each. Who has to be
looked at next comes out of a heap of whole numbers, another 40 bytes. A million of them are some
60 MB.

A half message is named by the position it was first stored at. Mostly that is where it lies; for
those that were copied to the end of the queue the table knows which copy stands for it.

It is a plain data structure: it knows neither store nor time.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Iterator
from heapq import heapify, heappop, heappush
from typing import Final

NEVER_MS: Final = -1  # nobody looks at it by itself
_OFFSET_BITS: Final = 56
_OFFSET_MASK: Final = (1 << _OFFSET_BITS) - 1
_ASKED_MAX: Final = 65_535
_TRIMMED_SLOTS: Final = 4096


class HalfTable:
    """The open half messages of one broker."""

    def __init__(self, first: int = 0) -> None:
        self._base = first  # the offset of the first slot
        self._head = 0  # no slot below is open
        self._is_open = bytearray()
        self._positions = array("q")
        self._due_ms = array("q")
        self._asked = array("H")
        self._heap: list[int] = []
        self._copies: dict[int, int] = {}  # first position -> offset of the copy
        self._firsts: dict[int, int] = {}  # ... and back
        self.open_count = 0

    # -------------------------------------------------------------------------------------- looking

    @property
    def next_offset(self) -> int:
        """The offset that the next half message has."""
        return self._base + len(self._is_open)

    @property
    def lowest_open(self) -> int:
        """Everything below this offset is done."""
        at = self._is_open.find(1, self._head)
        self._head = at if at >= 0 else len(self._is_open)
        return self._base + self._head

    def is_open(self, offset: int) -> bool:
        at = offset - self._base
        return 0 <= at < len(self._is_open) and self._is_open[at] == 1

    def position(self, offset: int) -> int:
        return self._positions[offset - self._base]

    def asked(self, offset: int) -> int:
        """How often it was asked about since it lies there."""
        return self._asked[offset - self._base]

    def due_ms(self, offset: int) -> int:
        """When it is looked at next."""
        return self._due_ms[offset - self._base]

    def first_position(self, offset: int) -> int:
        """The name of a half message: where it was first stored."""
        first = self._firsts.get(offset)
        return self.position(offset) if first is None else first

    def find(self, position: int) -> int | None:
        """The offset of what lies there or was first stored there; None where the table has none.

        What is found may be done.
        """
        offset = self._copies.get(position)
        if offset is not None:
            return offset
        at = bisect_left(self._positions, position)
        if at < len(self._positions) and self._positions[at] == position:
            return self._base + at
        return None

    def open_from(self, offset: int) -> Iterator[int]:
        """The offsets of the open ones, from one on; they may be closed meanwhile."""
        at = max(self._head, offset - self._base)
        while (at := self._is_open.find(1, at)) >= 0:
            # Slots may be trimmed while the caller works: only offsets stay what they are.
            offset = self._base + at
            yield offset
            at = offset + 1 - self._base
            at = max(at, 0)

    # ------------------------------------------------------------------------------------- changing

    def add(self, offset: int, position: int, due_ms: int) -> None:
        """The next half message of the queue."""
        self.add_slot(offset, position, due_ms)
        heappush(self._heap, due_ms << _OFFSET_BITS | offset)

    def add_slot(self, offset: int, position: int, due_ms: int) -> None:
        """One of many, as a start finds them: `order` comes after the last."""
        if not self._is_open:
            self._base, self._head = offset, 0
        assert offset >= self.next_offset, "half messages come in the order of their offsets"
        last = self._positions[-1] if self._positions else 0
        for _ in range(offset - self.next_offset):  # offsets that hold nothing
            self._push(0, last, NEVER_MS)
        assert position > last or not self._positions, "their positions ascend"
        self._push(1, position, due_ms)
        self.open_count += 1

    def _push(self, is_open: int, position: int, due_ms: int) -> None:
        self._is_open.append(is_open)
        self._positions.append(position)
        self._due_ms.append(due_ms)
        self._asked.append(0)

    def skip_to(self, offset: int) -> None:
        """Offsets below this one hold nothing any more."""
        while self.next_offset < offset:
            last = self._positions[-1] if self._positions else 0
            if not self._is_open:
                self._base = offset
                return
            self._push(0, last, NEVER_MS)

    def order(self) -> None:
        """Everything open is looked at when it is due."""
        due_ms, base = self._due_ms, self._base
        self._heap = [due_ms[o - base] << _OFFSET_BITS | o for o in self.open_from(base)]
        heapify(self._heap)

    def close(self, offset: int) -> None:
        """It is done."""
        at = offset - self._base
        assert self._is_open[at] == 1, "what is done is not done again"
        self._is_open[at] = 0
        self.open_count -= 1
        first = self._firsts.pop(offset, None)
        if first is not None and self._copies.get(first) == offset:
            del self._copies[first]

    def reopen(self, offset: int, position: int, first_position: int, due_ms: int) -> None:
        """What was to be done could not be stored: it is open as before."""
        at = offset - self._base
        assert at >= 0, "what is not done for good stays in the window"
        assert self._is_open[at] == 0, "it was closed"
        assert self._positions[at] == position, "it lies where it lay"
        self._is_open[at] = 1
        self.open_count += 1
        self._head = min(self._head, at)
        if first_position != position:
            self.note_copy(offset, first_position)
        self.schedule(offset, due_ms)

    def note_copy(self, offset: int, first_position: int) -> None:
        """What lies at an offset, or will, stands for what was first stored elsewhere."""
        self._copies[first_position] = offset
        self._firsts[offset] = first_position

    def forget_copy(self, offset: int) -> None:
        """The copy could not be stored."""
        first = self._firsts.pop(offset)
        if self._copies.get(first) == offset:
            del self._copies[first]

    def note_asked(self, offset: int) -> None:
        at = offset - self._base
        if 0 <= at < len(self._asked):
            self._asked[at] = min(self._asked[at] + 1, _ASKED_MAX)

    def trim(self, below: int) -> None:
        """Slots at the front go, many at a time; all below this offset are done for good."""
        done = min(below, self.lowest_open) - self._base
        if done >= _TRIMMED_SLOTS and done * 2 >= len(self._is_open):
            # One stays, whatever is open: the next offset is counted from the first.
            done -= done == len(self._is_open)
            for column in (self._is_open, self._positions, self._due_ms, self._asked):
                del column[:done]
            self._base += done
            self._head = max(0, self._head - done)

    # ---------------------------------------------------------------------------------------- times

    def schedule(self, offset: int, due_ms: int) -> None:
        """It is looked at then, and not at any other time that was planned."""
        self._due_ms[offset - self._base] = due_ms
        if due_ms != NEVER_MS:
            heappush(self._heap, due_ms << _OFFSET_BITS | offset)

    def next_ms(self) -> int | None:
        """When the next one is looked at; None where none is."""
        heap = self._heap
        while heap:
            due_ms, offset = heap[0] >> _OFFSET_BITS, heap[0] & _OFFSET_MASK
            if self.is_open(offset) and self.due_ms(offset) == due_ms:
                return due_ms
            heappop(heap)  # planned once, and otherwise since
        return None

    def pop_due(self, now_ms: int) -> int | None:
        """The next one that is due; None where none is."""
        heap = self._heap
        while heap and heap[0] >> _OFFSET_BITS <= now_ms:
            due_ms, offset = heap[0] >> _OFFSET_BITS, heap[0] & _OFFSET_MASK
            heappop(heap)
            if self.is_open(offset) and self.due_ms(offset) == due_ms:
                self._due_ms[offset - self._base] = NEVER_MS
                return offset
        return None
