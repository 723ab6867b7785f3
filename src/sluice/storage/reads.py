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

import re
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum
from struct import Struct
from typing import Final

from sluice.errors import RecordDamaged
from sluice.model import PropertyFilter
from sluice.protocol import records
from sluice.storage.cold_parts import ColdParts
from sluice.storage.commit_log import CommitLog
from sluice.storage.compacted import under_topic
from sluice.storage.plain_reads import plain_slices
from sluice.storage.property_scan import UNIT_BYTES, Places, Table, gather
from sluice.storage.queue_index import (
    FILLER_SIZE,
    SIMPLE_UNIT,
    ColdRead,
    Older,
    QueueFiles,
    QueueIndex,
    Unit,
)

_HEAD: Final = Struct(">iI4xi4xqq")  # size, magic, queue id, queue offset, position
_MAGICS: Final = (records.MAGIC_V1, records.MAGIC_V2)
_BODY_HEAD: Final = Struct(">i24xqi44xi")  # size, position, sys flag, body size: with IPv4 only
_MISMATCH: Final = "the queue's unit does not match the entry"
_V6_HOSTS: Final = records.SYS_BORN_V6 | records.SYS_STORE_V6
SCAN_UNITS_MAX: Final = 800  # units looked at in one read, matching or not: bounds a filter's work
SCREENED_UNITS_MAX: Final = 4_000  # the same where most of them are passed over together
# The same for filters by properties, which have to look at the entries themselves.
SCAN_BYTES_MAX: Final = 16 * 1024 * 1024
SCAN_WORK_MAX: Final = 1 << 26  # steps, each as long as the properties that it looks through
_FIRST_UNITS: Final = 64  # beyond those wanted: so many are looked at first, then the rest
_TOGETHER_MIN: Final = 24  # fewer entries are looked at one by one
_STEP_WORK: Final = 256  # of a step by itself
_HOT_MS: Final = 30_000

Accept = Callable[[int], bool] | PropertyFilter


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
    """Reads for one store; entries from `trusted_from` on this process wrote or scanned."""

    def __init__(
        self, log: CommitLog, store: QueueFiles, trusted_from: int, hot_bytes: int
    ) -> None:
        self._log = log
        self._store = store
        self._trusted_from = trusted_from
        self._opened_at = log.written
        self.hot_bytes = hot_bytes
        self._ends: deque[tuple[int, int]] = deque()  # where the log ended, and when: lately
        self._aged = 0  # what lies before this was written longer ago
        self._cold_parts = ColdParts(log)
        self.real_topics: dict[bytes, bytes] = {}  # of what compaction has kept: where it belongs

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
            return queue.start_offset if queue.older is None else queue.older.upto
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
        if not low <= offset < high:
            return outside(offset, low, high)
        older = queue.older
        if older is not None and offset < older.upto:
            at = max(offset, older.queue.start_offset)
            if at < older.queue.end_offset:
                kept = older.queue
                found = self.read(
                    kept, at, confirmed, count_max=count_max, bytes_max=bytes_max, accept=accept
                )
                return shown_as(found, older, queue.topic_bytes, low, high)
            offset = older.upto
            if offset >= high:
                return ReadResult(ReadStatus.NO_MATCHED_MESSAGE, high, low, high)
        start = queue.seek(offset, self._store, wait=False)
        visible = self.visible_units(queue, confirmed)
        if isinstance(accept, PropertyFilter):
            limits = (count_max, bytes_max)
            chosen, stop, byte_count = self._choose_screened(
                queue, start, visible, *limits, accept
            ) or self._choose_by_properties(queue, start, visible, *limits, accept)
            next_offset = self._offset_of(queue, stop)
        else:
            # With a filter more units are looked at than are returned.
            reach = SCAN_UNITS_MAX if accept is not None else min(count_max, SCAN_UNITS_MAX)
            stop = min(start + reach, visible)
            raw = queue.units(start, stop, self._store, wait=False)
            if accept is None and queue.unit_bytes == UNIT_BYTES:
                place = (self._log, queue.key.queue_id, raw, start, bytes_max)
                plain = plain_slices(*place, self._trusted_from, self.hot_from)
                if plain is not None:
                    return ReadResult(ReadStatus.FOUND, start + plain[1], low, high, *plain)
            units = queue.iterate_within(raw, start, bytes_max if accept is None else 0)
            chosen, next_offset, byte_count = _choose(units, offset, count_max, bytes_max, accept)
        if not chosen:
            if stop >= visible:
                next_offset = high  # the offsets up to there were given away, but hold nothing
            return ReadResult(ReadStatus.NO_MATCHED_MESSAGE, next_offset, low, high)
        slices = self._slices(queue, chosen)
        return ReadResult(ReadStatus.FOUND, next_offset, low, high, slices, len(chosen), byte_count)

    def _within_reach(self, units: list[Unit], steps: int) -> list[Unit]:
        """The first units, as many as one read may look at the entries of; one at least.

        Raises `ColdRead` where they are on the disk.
        """
        total_bytes = sum([unit[1] for unit in units])
        work = steps * (total_bytes + len(units) * _STEP_WORK)
        # Units of one queue lie in the log in their order, and a filler is longer than any limit.
        if total_bytes <= SCAN_BYTES_MAX and work <= SCAN_WORK_MAX and units[0][0] >= self.hot_from:
            return units
        reach_bytes, work = 0, 0
        places: list[tuple[int, int]] = []
        for index, (position, size, *_) in enumerate(units):
            if size != FILLER_SIZE:
                reach_bytes += size
                work += steps * (min(size, records.PROPERTIES_BYTES_MAX) + _STEP_WORK)
                if places and (reach_bytes > SCAN_BYTES_MAX or work > SCAN_WORK_MAX):
                    units = units[:index]
                    break
                places.append((position, position + size))
        self.require_memory(places)
        return units

    def _offset_of(self, queue: QueueIndex, stop: int) -> int:
        """The offset behind the last of the units below a number."""
        raw = queue.units(stop - 1, stop, self._store, wait=False)
        ((_, _, _, offset, count),) = queue.iterate(raw, stop - 1)
        return offset + count

    def _choose_screened(
        self,
        queue: QueueIndex,
        start: int,
        visible: int,
        count_max: int,
        bytes_max: int,
        wanted: PropertyFilter,
    ) -> tuple[list[Unit], int, int] | None:
        """What `_choose_by_properties` does, where a screen can be searched for in all at once.

        A whole topic may go through here for a few messages: the others cost next to nothing, so
        more of them are looked at in one read. None: it has to be done that other way.
        """
        chosen: list[Unit] = []
        byte_count, at, stop = 0, start, min(start + SCREENED_UNITS_MAX, visible)
        part_units = count_max + _FIRST_UNITS
        while at < stop:
            raw = queue.units(at, min(at + part_units, stop), self._store, wait=False)
            table = self._table(queue, raw, wanted)
            if table is None or wanted.screen is None:
                return (chosen, at, byte_count) if at > start else None
            for index, data in table.framed(wanted.screen):
                if wanted.test(data):
                    unit_at = index * UNIT_BYTES
                    (unit,) = queue.iterate(raw[unit_at : unit_at + UNIT_BYTES], at + index)
                    if chosen and byte_count + unit[1] > bytes_max:
                        return chosen, at + index, byte_count
                    chosen.append(unit)
                    byte_count += unit[1]
                    if len(chosen) >= count_max:
                        return chosen, at + index + 1, byte_count
            at += len(raw) // UNIT_BYTES
            part_units = SCREENED_UNITS_MAX
        return chosen, at, byte_count

    def _table(
        self, queue: QueueIndex, raw: bytes | bytearray, wanted: PropertyFilter
    ) -> Table | None:
        """Properties of entries that lie in one file and that this process wrote; None: others."""
        if wanted.screen is None or queue.unit_bytes != UNIT_BYTES:
            return None
        if len(raw) < _TOGETHER_MIN * UNIT_BYTES:
            return None
        first, last = (SIMPLE_UNIT.unpack_from(raw, at)[0] for at in (0, len(raw) - UNIT_BYTES))
        base = first - first % self._log.segment_bytes
        if first < max(self._trusted_from, self.hot_from):
            return None
        if not base <= last < base + self._log.segment_bytes:
            return None
        view = self._log.segments[base].file.view(first - base)
        try:
            places = Places(view, base, raw, queue.topic_bytes)
        except ValueError:
            return None
        total_bytes = int((places.ends - places.ats).sum())
        work = wanted.steps * (total_bytes + len(places.ats) * _STEP_WORK)
        if total_bytes > SCAN_BYTES_MAX or work > SCAN_WORK_MAX:
            return None
        return places.table()

    def _choose_by_properties(
        self,
        queue: QueueIndex,
        start: int,
        visible: int,
        count_max: int,
        bytes_max: int,
        wanted: PropertyFilter,
    ) -> tuple[list[Unit], int, int]:
        """The units to return, the number of the first that was not looked at, and the bytes of
        those to return.
        """
        raw = queue.units(start, min(start + SCAN_UNITS_MAX, visible), self._store, wait=False)
        units = queue.iterate(raw, start)
        assert units, "between the bounds of a queue there is a unit"
        units = self._within_reach(units, wanted.steps)
        test = wanted.test
        chosen: list[Unit] = []
        byte_count, seen_count, part_units = 0, 0, count_max + _FIRST_UNITS
        while seen_count < len(units):
            part = slice(seen_count, seen_count + part_units)
            for index, data in self._framed(queue, raw, units, part, wanted.screen):
                if test(data):
                    size = units[index][1]
                    if chosen and byte_count + size > bytes_max:
                        return chosen, start + index, byte_count
                    chosen.append(units[index])
                    byte_count += size
                    if len(chosen) >= count_max:
                        return chosen, start + index + 1, byte_count
            seen_count += part_units
            part_units = SCAN_UNITS_MAX
        return chosen, start + len(units), byte_count

    def _framed(
        self,
        queue: QueueIndex,
        raw: bytes | bytearray,
        units: list[Unit],
        part: slice,
        screen: re.Pattern[bytes] | None,
    ) -> Iterator[tuple[int, bytes]]:
        """Numbers and framed properties of a part of the units: of those at least that the screen
        lets pass.
        """
        own = units[part]
        first, last = own[0][0], own[-1][0]
        base = first - first % self._log.segment_bytes
        # Mostly they lie in one file and were written by this process; for few it is not worth it.
        if (
            len(own) >= _TOGETHER_MIN
            and queue.unit_bytes == UNIT_BYTES
            and self._trusted_from <= first
            and base <= last < base + self._log.segment_bytes
        ):
            own_raw = raw[part.start * UNIT_BYTES : (part.start + len(own)) * UNIT_BYTES]
            view = self._log.segments[base].file.view(first - base)
            gathered = gather(view, base, own_raw, queue.topic_bytes)
            if gathered is not None:
                for index, data in gathered.framed(screen):
                    yield part.start + index, data
                return
        for index, unit in enumerate(own, part.start):
            if unit[1] != FILLER_SIZE:
                yield index, self._framed_one(queue, unit)

    def _framed_one(self, queue: QueueIndex, unit: Unit) -> bytes:
        position, size, _, offset, _ = unit
        at = position % self._log.segment_bytes
        view = self._log.segments[position - at].file.view(at)
        own_size, own_position, sys_flag, body_bytes = _BODY_HEAD.unpack_from(view, at)
        if position < self._trusted_from or sys_flag & _V6_HOSTS:
            return b"\x02%b\x02" % self._check_whole(queue, view, at, position, size, offset)
        # After the head and the body: the topic with its size, and the size of the properties.
        start = at + 91 + body_bytes + len(queue.topic_bytes) + (len(queue.topic_bytes) > 127)
        if own_position != position or own_size != size or not at < start <= at + size:
            raise self.damaged(position, offset, _MISMATCH)
        return b"".join((b"\x02", view[start : at + size], b"\x02"))

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
        self.require_memory(runs)
        trusted_from = self._trusted_from
        queue_id = queue.key.queue_id
        base, view = -1, memoryview(b"")
        for position, size, _, offset, _ in chosen:
            at = position % segment_bytes
            if position - at != base:
                base = position - at
                view = log.segments[base].file.view(at)
            if position < trusted_from:
                self._check_whole(queue, view, at, position, size, offset)
                continue
            seen = _HEAD.unpack_from(view, at)
            if seen[0] != size or seen[2] != queue_id or seen[3] != offset or seen[4] != position:
                raise self.damaged(position, offset, _MISMATCH)
        return [log.view(start, stop - start) for start, stop in runs]

    @property
    def trusted_from(self) -> int:
        """Entries from here on were written or scanned by this process."""
        return self._trusted_from

    @property
    def hot_from(self) -> int:
        """What this process wrote a short while ago is in memory."""
        return max(self._opened_at, self._aged, self._log.written - self.hot_bytes)

    def note_time(self, now_ms: int) -> None:
        """Once in a while: the system may have taken what nobody has read for so long."""
        self._ends.append((now_ms, self._log.written))
        while self._ends[0][0] <= now_ms - _HOT_MS:
            _, self._aged = self._ends.popleft()

    def require_memory(self, runs: list[tuple[int, int]]) -> None:
        """Raise `ColdRead` where a part may have to come from the disk."""
        self._cold_parts.require(runs, self.hot_from)

    def _check_whole(
        self, queue: QueueIndex, view: memoryview, at: int, position: int, size: int, offset: int
    ) -> bytes:
        """The properties of an entry whose every checksum holds."""
        try:
            entry = records.summarize(view, at, position)
        except records.BadRecord as error:
            raise self.damaged(position, offset, str(error)) from error
        same = (entry.size, entry.queue_id, entry.queue_offset, entry.topic) == (
            size, queue.key.queue_id, offset, queue.topic_bytes,
        )  # fmt: skip
        if not same:
            raise self.damaged(position, offset, _MISMATCH)
        return entry.properties

    def damaged(self, position: int, offset: int, reason: str) -> RecordDamaged:
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
        view = file.view(at)
        size, magic, _, _, own_position = _HEAD.unpack_from(view, at)
        if magic not in _MAGICS and own_position != position:
            return None
        if 0 < size <= len(view) - at:
            self.require_memory([(position, position + size)])
        try:
            topic = records.summarize(view, at, position).topic
        except records.BadRecord as error:
            path, at = log.path_of(position)
            raise RecordDamaged(path, at, str(error)) from error
        found = view[at : at + size]
        real = self.real_topics.get(topic)
        return found if real is None else memoryview(under_topic(found, real))

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
        self.require_memory([(position, position + 88)])
        at = position % log.segment_bytes
        return records.store_time_ms(log.segments[position - at].file.view(at), at)

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
        if queue.older is not None:
            first = queue.seek(queue.older.upto, self._store, wait=False)

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
        if queue.older is not None and low == first:
            return queue.start_offset  # when the entries before it were stored nobody knows
        if not upper:
            return offset_of(low) if low < stop else self.max_offset(queue, confirmed)
        return offset_of(low - 1) if low > first else offset_of(first)


_PLACE: Final = Struct(">qi")


def shown_as(found: ReadResult, older: Older, topic: bytes, low: int, high: int) -> ReadResult:
    """What was read of a queue's older part, as entries of the queue itself."""
    next_offset = found.next_offset
    if next_offset >= older.queue.end_offset:
        next_offset = older.upto
    slices = [memoryview(under_topic(view, topic)) for view in found.messages]
    byte_count = sum(map(len, slices))
    return ReadResult(found.status, next_offset, low, high, slices, found.count, byte_count)


def outside(offset: int, low: int, high: int) -> ReadResult:
    """The answer to a read below or above what a queue holds, which may be nothing."""
    if low == high:
        return _nothing_there(offset, low, high)
    if offset < low:
        return ReadResult(ReadStatus.OFFSET_TOO_SMALL, low, low, high)
    status = ReadStatus.OFFSET_OVERFLOW_ONE
    if offset > high:
        status = ReadStatus.OFFSET_OVERFLOW_BADLY
    return ReadResult(status, high, low, high)


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
    units: list[Unit],
    offset: int,
    count_max: int,
    bytes_max: int,
    accept: Callable[[int], bool] | None,
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
