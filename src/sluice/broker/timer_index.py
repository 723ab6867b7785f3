"""This module knows which timers wait: when each is due, and where it is in its queue and the log.

A million of them cost sixteen bytes each. They lie in buckets of an hour, each a plain array of
numbers in any order; when an hour comes it is cut into seconds, and when a second comes its timers
are put in order. So a timer is looked at three times in its life, mostly together with thousands
of others.

A bucket has two numbers for each timer: `time << 40 | offset`, with the time counted from the
hour's beginning, and the position. Those of the second that has come lie in order. What is added
to it then goes into a heap, in which both are one number, and times count from 1970. Comparing
them compares times, then offsets. This module keeps no time of its own and reads nothing.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from heapq import heapify, heappop, heappush
from itertools import islice, pairwise
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

Numbers = npt.NDArray[np.int64]

OFFSET_BITS: Final = 40
OFFSET_MASK: Final = (1 << OFFSET_BITS) - 1
_KEY_MAX: Final = (1 << 63) - 1
_POSITION_BITS: Final = 63
_POSITION_MASK: Final = (1 << _POSITION_BITS) - 1
_HEAP_TIME_SHIFT: Final = OFFSET_BITS + _POSITION_BITS
_SECOND_MS: Final = 1_000
_HOUR_MS: Final = 3_600_000
_HOUR_SECONDS: Final = 3_600


class Timer(NamedTuple):
    """One that waits; `offset` is that of its queue, `position` that of the log."""

    due_ms: int
    offset: int
    position: int


class Timers(NamedTuple):
    """Timers in columns."""

    due_ms: Numbers
    offsets: Numbers
    positions: Numbers

    @classmethod
    def of(cls, rows: list[tuple[int, int, int]]) -> Timers:
        table = np.array(rows, np.int64).reshape(-1, 3)
        return cls(table[:, 0], table[:, 1], table[:, 2])

    def where(self, chosen: npt.NDArray[np.bool_]) -> Timers:
        return Timers(self.due_ms[chosen], self.offsets[chosen], self.positions[chosen])


def key_of(due_ms: int, offset: int) -> int:
    """A number that sorts timers: by time, then by offset."""
    return due_ms << OFFSET_BITS | offset


def pair_of(key: int) -> tuple[int, int]:
    """Time and offset of a key."""
    return key >> OFFSET_BITS, key & OFFSET_MASK


class TimerIndex:
    """The timers of one broker that wait."""

    def __init__(self) -> None:
        self._hours: dict[int, array[int]] = {}  # hours after `_open_to`
        self._open_to = -1
        self._seconds: dict[int, array[int]] = {}  # of open hours, after `_near_to`
        self._near_to = -1
        self._near = np.empty((0, 2), np.int64)  # the second `_near_to`, in order
        self._near_hour = 0
        self._late: list[int] = []  # a heap: what was added up to that second since it came
        self.count = 0

    # --------------------------------------------------------------------------------------- adding

    def add_many(self, timers: Timers) -> None:
        """Timers that begin to wait; none of them may be there already."""
        hours = timers.due_ms // _HOUR_MS
        keys = (timers.due_ms - hours * _HOUR_MS) << OFFSET_BITS | timers.offsets
        rows = np.column_stack((keys, timers.positions))
        for hour, part in _groups(hours, rows):
            if hour > self._open_to:
                self._hours.setdefault(hour, array("q")).frombytes(part.tobytes())
            else:
                self._add_to_seconds(hour, part)
        self.count += len(rows)

    def _add_to_seconds(self, hour: int, rows: Numbers) -> None:
        seconds = hour * _HOUR_SECONDS + (rows[:, 0] >> OFFSET_BITS) // _SECOND_MS
        for second, part in _groups(seconds, rows):
            if second > self._near_to:
                self._seconds.setdefault(second, array("q")).frombytes(part.tobytes())
            else:
                for number in _heap_numbers(hour, part):
                    heappush(self._late, number)

    # --------------------------------------------------------------------------------------- taking

    def take(self, now_ms: int, count_max: int) -> list[tuple[int, int, int]]:
        """Timers that are due, the earliest first; they do not wait here any more."""
        taken: list[tuple[int, int, int]] = []
        while len(taken) < count_max:
            if not (len(self._near) or self._late or self._come_near(now_ms)):
                break
            part = self._take_near(now_ms, count_max - len(taken))
            if not part:
                break
            taken += part
        self.count -= len(taken)
        return taken

    def _take_near(self, now_ms: int, count_max: int) -> list[tuple[int, int, int]]:
        """Some that are due of those in order, or the first of those that came late."""
        near, late = self._near, self._late
        begin_ms = self._near_hour * _HOUR_MS
        limit = (now_ms + 1 - begin_ms) << OFFSET_BITS
        if late and late[0] >> _HEAP_TIME_SHIFT <= now_ms:
            first = (late[0] >> _POSITION_BITS) - (begin_ms << OFFSET_BITS)
            if not len(near) or first < near[0, 0]:
                return [_timer_of(heappop(late))]
            limit = min(limit, first)
        if not len(near):
            return []
        keys = near[:count_max, 0]
        keys = keys[: int(np.searchsorted(keys, min(limit, _KEY_MAX)))]
        positions = near[: len(keys), 1]
        self._near = near[len(keys) :]
        due_ms = (keys >> OFFSET_BITS) + begin_ms
        offsets = keys & OFFSET_MASK
        return list(zip(due_ms.tolist(), offsets.tolist(), positions.tolist(), strict=True))

    def _come_near(self, now_ms: int) -> bool:
        """None is near: the next second that has begun comes, if there is one."""
        while not self._seconds:
            hour = min(self._hours, default=None)
            if hour is None or hour * _HOUR_MS > now_ms:
                return False
            self._open_to = hour
            self._add_to_seconds(hour, _rows(self._hours.pop(hour)))
        second = min(self._seconds)
        if second * _SECOND_MS > now_ms:
            return False
        rows = _rows(self._seconds.pop(second))
        self._near = rows[np.argsort(rows[:, 0])]
        self._near_hour = second // _HOUR_SECONDS
        self._near_to = second
        return True

    def remove(self, due_ms: int, offset: int) -> bool:
        """A timer does not wait any more; False where it did not."""
        second, hour = due_ms // _SECOND_MS, due_ms // _HOUR_MS
        if second <= self._near_to:
            key = key_of(due_ms, offset)
            late = [number for number in self._late if number >> _POSITION_BITS != key]
            near = self._near[self._near[:, 0] != _key_in_hour(due_ms, offset, self._near_hour)]
            is_there = len(late) + len(near) < len(self._late) + len(self._near)
            self._late, self._near = late, near
            heapify(late)
            self.count -= is_there
            return is_there
        table, name = (self._hours, hour) if hour > self._open_to else (self._seconds, second)
        bucket = table.get(name)
        if bucket is None:
            return False
        places = np.flatnonzero(_rows(bucket)[:, 0] == _key_in_hour(due_ms, offset))
        if not len(places):
            return False
        place = 2 * int(places[0])
        bucket[place : place + 2] = bucket[-2:]  # its place is taken by the last one
        del bucket[-2:]
        if not bucket:
            del table[name]
        self.count -= 1
        return True

    # -------------------------------------------------------------------------------------- looking

    def has(self, due_ms: int, offset: int) -> bool:
        """Whether a timer waits."""
        second, hour = due_ms // _SECOND_MS, due_ms // _HOUR_MS
        if second <= self._near_to:
            key = key_of(due_ms, offset)
            if any(number >> _POSITION_BITS == key for number in self._late):
                return True
            return bool((self._near[:, 0] == _key_in_hour(due_ms, offset, self._near_hour)).any())
        bucket = self._hours.get(hour) if hour > self._open_to else self._seconds.get(second)
        key = _key_in_hour(due_ms, offset)
        return bucket is not None and bool((_rows(bucket)[:, 0] == key).any())

    def after(self, key: int, count_max: int) -> list[Timer]:
        """The timers that come after a key, in order."""
        return [_timer_of(number) for number in islice(self._sorted_after(key), count_max)]

    def _sorted_after(self, key: int) -> Iterator[int]:
        yield from (each for each in sorted(self._near_numbers()) if each >> _POSITION_BITS > key)
        for table, width, hour_width in (
            (self._seconds, _SECOND_MS, _HOUR_SECONDS),
            (self._hours, _HOUR_MS, 1),
        ):
            for name in sorted(table):
                if (name + 1) * width <= key >> OFFSET_BITS:
                    continue
                hour = name // hour_width
                rows = _rows(table[name])
                if key >> OFFSET_BITS >= hour * _HOUR_MS:
                    rows = rows[rows[:, 0] > _key_in_hour(*pair_of(key), hour)]
                yield from _heap_numbers(hour, rows[np.argsort(rows[:, 0])])

    def _near_numbers(self) -> list[int]:
        return [*_heap_numbers(self._near_hour, self._near), *self._late]

    def below(self, offset: int, count_max: int) -> list[Timer]:
        """Some of the timers with a lower offset: those whose entries may have to move."""
        near = map(_timer_of, self._near_numbers())
        found = [timer for timer in near if timer.offset < offset]
        for table, hour_width in ((self._seconds, _HOUR_SECONDS), (self._hours, 1)):
            for name, bucket in table.items():
                if len(found) >= count_max:
                    return found[:count_max]
                rows = _rows(bucket)
                lower = rows[(rows[:, 0] & OFFSET_MASK) < offset][: count_max - len(found)]
                found += map(_timer_of, _heap_numbers(name // hour_width, lower))
        return found[:count_max]


def _rows(bucket: array[int]) -> Numbers:
    """A bucket's numbers, two in a row. While somebody holds them the bucket cannot grow."""
    return np.frombuffer(bucket, np.int64).reshape(-1, 2)


def _heap_numbers(hour: int, rows: Numbers) -> list[int]:
    begin = hour * _HOUR_MS << OFFSET_BITS
    return [begin + key << _POSITION_BITS | position for key, position in rows.tolist()]


def _timer_of(number: int) -> Timer:
    key = number >> _POSITION_BITS
    return Timer(key >> OFFSET_BITS, key & OFFSET_MASK, number & _POSITION_MASK)


def _key_in_hour(due_ms: int, offset: int, hour: int | None = None) -> int:
    begin_ms = (due_ms // _HOUR_MS if hour is None else hour) * _HOUR_MS
    return (due_ms - begin_ms) << OFFSET_BITS | offset


def _groups(names: Numbers, rows: Numbers) -> Iterator[tuple[int, Numbers]]:
    """The rows of each name."""
    if not len(names):
        return
    if names[0] == names[-1] and bool((names == names[0]).all()):
        yield int(names[0]), rows
        return
    order = np.argsort(names, kind="stable")
    names, rows = names[order], rows[order]
    starts = [0, *(np.flatnonzero(np.diff(names)) + 1).tolist(), len(names)]
    for start, stop in pairwise(starts):
        yield int(names[start]), rows[start:stop]
