"""This module answers reads: which entries of a queue, as slices of the log, checked before they
leave.

A read never blocks on the disk: where the queue file or the log may be on the disk only it raises
`ColdRead`, whose work runs on a thread, and is asked again. It sees nothing above the confirmed
position.

What is checked: every unit is compared with the entry it points to (size, queue, offset, own
position). Entries that this process neither wrote nor scanned at its start are checked whole, with
their checksums, each time: a bit that rotted on the disk is an error with file and place, never a
message.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum
from struct import Struct
from typing import Final

from sluice.errors import RecordDamaged
from sluice.protocol import records
from sluice.storage.commit_log import CommitLog
from sluice.storage.queue_index import FILLER_SIZE, ColdRead, QueueFiles, QueueIndex, Unit

_HEAD: Final = Struct(">iI4xi4xqq")  # size, magic, queue id, queue offset, position
_MAGICS: Final = (records.MAGIC_V1, records.MAGIC_V2)
SCAN_UNITS_MAX: Final = 800  # units looked at in one read, matching or not: bounds a filter's work

Accept = Callable[[int], bool]


class ReadStatus(Enum):
    """How a read ended, in RocketMQ's words: clients get the name as a remark."""

    FOUND = "FOUND"
    NO_MATCHED_MESSAGE = "NO_MATCHED_MESSAGE"
    OFFSET_OVERFLOW_ONE = "OFFSET_OVERFLOW_ONE"
    OFFSET_OVERFLOW_BADLY = "OFFSET_OVERFLOW_BADLY"
    OFFSET_TOO_SMALL = "OFFSET_TOO_SMALL"
    NO_MESSAGE_IN_QUEUE = "NO_MESSAGE_IN_QUEUE"
    NO_MATCHED_LOGIC_QUEUE = "NO_MATCHED_LOGIC_QUEUE"


@dataclass(slots=True)
class ReadResult:
    """Entries as they lie in the log: `slices` back to back are `count` whole entries."""

    status: ReadStatus
    next_offset: int
    min_offset: int
    max_offset: int
    slices: list[memoryview] = field(default_factory=list)
    count: int = 0
    byte_count: int = 0

    @property
    def messages(self) -> list[memoryview]:
        """The entries one by one; for tools and tests, a door sends the slices."""
        result = []
        for piece in self.slices:
            at = 0
            while at < len(piece):
                size, _ = records.peek(piece, at)
                result.append(piece[at : at + size])
                at += size
        return result


class Reader:
    """Reads for one store. `trusted_from`: positions above were written or scanned by this
    process.
    """

    def __init__(
        self, log: CommitLog, store: QueueFiles, trusted_from: int, hot_bytes: int
    ) -> None:
        self._log = log
        self._store = store
        self._trusted_from = trusted_from
        self._opened_at = log.written
        self.hot_bytes = hot_bytes

    # ----------------------------------------------------------------------------------- visibility

    def visible_units(self, queue: QueueIndex, confirmed: int) -> int:
        """The number of units whose entries lie below the confirmed position."""
        tail_units = queue.count - queue.tail_first
        if not tail_units:
            return queue.count
        width = queue.unit_bytes

        def end_of(index: int) -> int:
            position, size = _PLACE.unpack_from(queue.tail, index * width)
            return 0 if size == FILLER_SIZE else int(position + size)

        if end_of(tail_units - 1) <= confirmed:
            return queue.count
        return queue.tail_first + bisect_right(range(tail_units), confirmed, key=end_of)

    def max_offset(self, queue: QueueIndex, confirmed: int) -> int:
        """The offset after the newest visible entry."""
        units = self.visible_units(queue, confirmed)
        if units == queue.count:
            return queue.end_offset
        if units <= queue.first:
            return queue.start_offset
        raw = queue.units(units - 1, units, self._store, wait=False)
        _, _, _, offset, count = queue.iterate(raw, units - 1)[0]
        return offset + count

    # -------------------------------------------------------------------------------------- reading

    def read(
        self,
        queue: QueueIndex,
        offset: int,
        confirmed: int,
        *,
        count_max: int,
        bytes_max: int,
        accept: Accept | None = None,
    ) -> ReadResult:
        """Entries from `offset` on: the first one whatever its size, then within the limits."""
        low, high = queue.start_offset, self.max_offset(queue, confirmed)
        if low == high:
            return _nothing_there(offset, low, high)
        if offset < low:
            return ReadResult(ReadStatus.OFFSET_TOO_SMALL, low, low, high)
        if offset >= high:
            status = ReadStatus.OFFSET_OVERFLOW_ONE
            if offset > high:
                status = ReadStatus.OFFSET_OVERFLOW_BADLY
            return ReadResult(status, high, low, high)
        start = queue.seek(offset, self._store, wait=False)
        # With a filter more units are looked at than are returned.
        reach = SCAN_UNITS_MAX if accept is not None else min(count_max, SCAN_UNITS_MAX)
        visible = self.visible_units(queue, confirmed)
        stop = min(start + reach, visible)
        units = queue.iterate(queue.units(start, stop, self._store, wait=False), start)
        chosen, next_offset, byte_count = _choose(units, offset, count_max, bytes_max, accept)
        if not chosen:
            if stop >= visible:
                next_offset = high  # the offsets up to there were given away, but hold nothing
            return ReadResult(ReadStatus.NO_MATCHED_MESSAGE, next_offset, low, high)
        slices = self._slices(queue, chosen)
        return ReadResult(ReadStatus.FOUND, next_offset, low, high, slices, len(chosen), byte_count)

    def _slices(self, queue: QueueIndex, chosen: list[Unit]) -> list[memoryview]:
        log = self._log
        segment_bytes = log.segment_bytes
        runs: list[tuple[int, int]] = []
        run_start, run_end = chosen[0][0], chosen[0][0]
        for position, size, *_ in chosen:
            # Neighbours in the log go out as one slice; a file's end is never inside of one.
            if position != run_end or position % segment_bytes == 0:
                runs.append((run_start, run_end))
                run_start = position
            run_end = position + size
        runs.append((run_start, run_end))
        runs = [run for run in runs if run[0] != run[1]]
        self._require_memory(runs)
        trusted_from = self._trusted_from
        queue_id = queue.key.queue_id
        base, view = -1, memoryview(b"")
        for position, size, _, offset, _ in chosen:
            at = position % segment_bytes
            if position - at != base:
                base = position - at
                view = log.segments[base].file.view()
            if position < trusted_from:
                self._check_whole(queue, view, at, position, size, offset)
                continue
            seen = _HEAD.unpack_from(view, at)
            if seen[0] != size or seen[2] != queue_id or seen[3] != offset or seen[4] != position:
                raise self._damaged(position, offset, "the queue's unit does not match the entry")
        return [log.view(start, stop - start) for start, stop in runs]

    def _require_memory(self, runs: list[tuple[int, int]]) -> None:
        """Raise `ColdRead` where a part may have to come from the disk."""
        log = self._log
        hot_from = max(self._opened_at, log.written - self.hot_bytes)
        segment_bytes = log.segment_bytes
        cold = []
        for start, stop in runs:
            if start < hot_from:
                at = start % segment_bytes
                file = log.segments[start - at].file
                if not file.resident(at, at + stop - start):
                    cold.append((file, at, at + stop - start))
        if cold:

            def work() -> None:
                for file, begin, end in cold:
                    file.warm(begin, end)

            raise ColdRead(work)

    def _check_whole(
        self, queue: QueueIndex, view: memoryview, at: int, position: int, size: int, offset: int
    ) -> None:
        try:
            entry = records.summarize(view, at, position)
        except records.BadRecord as error:
            raise self._damaged(position, offset, str(error)) from error
        same = (entry.size, entry.queue_id, entry.queue_offset, entry.topic) == (
            size, queue.key.queue_id, offset, queue.topic_bytes,
        )  # fmt: skip
        if not same:
            raise self._damaged(position, offset, "the queue's unit does not match the entry")

    def _damaged(self, position: int, offset: int, reason: str) -> RecordDamaged:
        path, at = self._log.path_of(position)
        return RecordDamaged(path, at, reason, offset + 1)

    def entry(self, position: int, confirmed: int) -> memoryview | None:
        """The entry at a position, checked; None where no entry starts there.

        Anybody may ask for any position, so most bytes that are no entry are the middle of one. But
        what has an entry's magic or names its own place was an entry: then it is `RecordDamaged`.
        """
        log = self._log
        if not log.start <= position < confirmed:
            return None
        at = position % log.segment_bytes
        if log.segment_bytes - at < _HEAD.size:
            return None
        file = log.segments[position - at].file
        if not file.resident(at, at + _HEAD.size):
            raise ColdRead(lambda: file.warm(at, at + _HEAD.size))
        view = file.view()
        size, magic, _, _, own_position = _HEAD.unpack_from(view, at)
        if magic not in _MAGICS and own_position != position:
            return None
        if 0 < size <= len(view) - at:
            self._require_memory([(position, position + size)])
        try:
            records.summarize(view, at, position)
        except records.BadRecord as error:
            path, at = log.path_of(position)
            raise RecordDamaged(path, at, str(error)) from error
        return view[at : at + size]

    # ----------------------------------------------------------------------------------------- time

    def store_ms(self, position: int) -> int:
        """When the entry at a position was stored. Raises `RecordDamaged` where nobody can tell."""
        log = self._log
        if position < self._trusted_from:
            entry = self.entry(position, log.written)
            if entry is None:
                path, at = log.path_of(position)
                raise RecordDamaged(path, at, "no entry starts here")
            return records.store_time_ms(entry, 0)
        self._require_memory([(position, position + 88)])
        at = position % log.segment_bytes
        return records.store_time_ms(log.segments[position - at].file.view(), at)

    def earliest_ms(self, queue: QueueIndex, confirmed: int) -> int:
        """When the oldest readable entry was stored, -1 where there is none."""
        for index in range(queue.first, self.visible_units(queue, confirmed)):
            raw = queue.units(index, index + 1, self._store, wait=False)
            position, size, *_ = queue.iterate(raw, index)[0]
            # A damaged entry has no time; the next one tells it nearly as well.
            with suppress(RecordDamaged):
                if size != FILLER_SIZE:
                    return self.store_ms(position)
        return -1

    def offset_for_time(
        self, queue: QueueIndex, confirmed: int, when_ms: int, *, upper: bool
    ) -> int:
        """RocketMQ's search: lower = the first entry stored at or after, upper = the last at or
        before.
        """
        first, stop = queue.first, self.visible_units(queue, confirmed)

        def unit_ms(index: int) -> int:
            while index < stop:
                raw = queue.units(index, index + 1, self._store, wait=False)
                position, size, *_ = queue.iterate(raw, index)[0]
                # For what has no time, because it is damaged or gone, the next entry decides.
                with suppress(RecordDamaged):
                    if size != FILLER_SIZE:
                        return self.store_ms(position)
                index += 1
            return 1 << 62

        def offset_of(index: int) -> int:
            raw = queue.units(index, index + 1, self._store, wait=False)
            return queue.iterate(raw, index)[0][3]

        if first >= stop:
            return queue.start_offset
        low, high = first, stop
        while low < high:
            middle = (low + high) // 2
            if unit_ms(middle) < when_ms + upper:
                low = middle + 1
            else:
                high = middle
        if not upper:
            return offset_of(low) if low < stop else self.max_offset(queue, confirmed)
        return offset_of(low - 1) if low > first else offset_of(first)


_PLACE: Final = Struct(">qi")


def _nothing_there(offset: int, low: int, high: int) -> ReadResult:
    """A queue that holds no entry: empty from the start, or everything was deleted."""
    if offset == high:
        status = ReadStatus.NO_MESSAGE_IN_QUEUE if high == 0 else ReadStatus.OFFSET_OVERFLOW_ONE
    elif offset < high:
        status = ReadStatus.OFFSET_TOO_SMALL
    else:
        status = ReadStatus.OFFSET_OVERFLOW_BADLY if high else ReadStatus.NO_MESSAGE_IN_QUEUE
    return ReadResult(status, high, low, high)


def _choose(
    units: list[Unit], offset: int, count_max: int, bytes_max: int, accept: Accept | None
) -> tuple[list[Unit], int, int]:
    """The units to return, the offset to go on from, and their bytes."""
    if accept is None and 0 < len(units) <= count_max:
        # Mostly all are returned. A filler is longer than any limit, so it goes the other way.
        byte_count = sum([unit[1] for unit in units])
        if byte_count <= bytes_max:
            return units, units[-1][3] + units[-1][4], byte_count
    chosen: list[Unit] = []
    byte_count = 0
    next_offset = offset
    for unit in units:
        _, size, tags_code, unit_offset, count = unit
        if size != FILLER_SIZE and (accept is None or accept(tags_code)):
            if chosen and (byte_count + size > bytes_max or len(chosen) >= count_max):
                break
            chosen.append(unit)
            byte_count += size
        next_offset = unit_offset + count
    return chosen, next_offset, byte_count
