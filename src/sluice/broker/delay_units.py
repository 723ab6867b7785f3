"""This module reads the index of a queue whose entries wait for their time: one by one or in bulk.

Such a queue's units say when each entry is due (`protocol/records.py`, `tags_code`), so that a
million of them are known after a start without reading a single entry. What Apache's broker wrote
has something else there where it is a timer: no plausible time, and the entry has to be read.

Everything here may raise ColdRead but for what is told to wait.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from sluice.broker.timer_index import Numbers
from sluice.storage.queue_index import SIMPLE_ROW, SIMPLE_UNIT
from sluice.storage.store import Store

_FILLER_BYTES: Final = 0x7FFFFFFF
_WINDOW_UNITS: Final = 64
# Times in ms between 2001 and 5138. No tag's hash is so large, and no end of a life so small.
LEAST_TIME_MS: Final = 10**12
_TIME_BELOW_MS: Final = 10**14


class Units(NamedTuple):
    """Consecutive units of a queue."""

    first: int
    positions: Numbers
    codes: Numbers
    there: npt.NDArray[np.bool_]  # whether the log still has the entry

    @property
    def offsets(self) -> Numbers:
        return np.arange(self.first, self.first + len(self.positions), dtype=np.int64)

    @property
    def timed(self) -> npt.NDArray[np.bool_]:
        """Where the code is a time, or a time below zero."""
        sizes = np.abs(self.codes)
        return (sizes >= LEAST_TIME_MS) & (sizes < _TIME_BELOW_MS)


class WaitingQueue:
    """One queue, as far as its entries are confirmed. It may not have been made yet."""

    def __init__(self, store: Store, topic: str, queue_id: int) -> None:
        self._store = store
        self._key = (topic, queue_id)
        self._window: tuple[int, int, bytes | bytearray] = (0, 0, b"")

    @property
    def first(self) -> int:
        """The lowest offset whose entry may still be there."""
        queue = self._store.queues.get(self._key)
        return queue.first if queue is not None else 0

    @property
    def stop(self) -> int:
        """The offset after the newest entry that can be read."""
        queue = self._store.queues.get(self._key)
        if queue is None:
            return 0
        return self._store.reader.visible_units(queue, self._store.confirmed)

    def many(self, start: int, stop: int, *, wait: bool = False) -> Units:
        """The units of these offsets, which must be there."""
        raw = self._raw(start, stop, wait=wait)
        units: npt.NDArray[Any] = np.frombuffer(bytes(raw), SIMPLE_ROW)
        positions = units["position"].astype(np.int64)
        there = (units["size"] != _FILLER_BYTES) & (positions >= self._store.log.start)
        return Units(start, positions, units["code"].astype(np.int64), there)

    def one(self, offset: int) -> tuple[int, int, int]:
        """Position, size and code of one entry; position -1 where the log does not have it."""
        start, stop, raw = self._window
        if not start <= offset < stop:
            start, stop = offset, min(offset + _WINDOW_UNITS, self.stop)
            assert start < stop, "an offset that waits is in the queue"
            raw = self._raw(start, stop)
            self._window = (start, stop, raw)
        position, size, code = SIMPLE_UNIT.unpack_from(raw, (offset - start) * SIMPLE_UNIT.size)
        if size == _FILLER_BYTES or position < self._store.log.start:
            return -1, 0, code
        return position, size, code

    def first_where(self, start: int, stop: int, holds: Callable[[int, int], bool]) -> int:
        """The first offset whose (position, code) is such that all later ones are so too."""
        while start < stop:
            middle = (start + stop) // 2
            position, _, code = SIMPLE_UNIT.unpack_from(self._raw(middle, middle + 1), 0)
            if holds(position, code):
                stop = middle
            else:
                start = middle + 1
        return start

    def _raw(self, start: int, stop: int, *, wait: bool = False) -> bytes | bytearray:
        queue = self._store.queues[self._key]
        return queue.units(start, stop, self._store.queue_files, wait=wait)
