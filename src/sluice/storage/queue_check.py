"""This module holds every unit of every queue against the log, while somebody else walks the log.

Entries of one queue come in the order of their offsets, and so do its units: each queue has a
cursor that is moved along. A unit that names another place, size or tag than the entry, or one for
which no entry comes, is wrong. Each queue with wrong units is one problem, which names the first of
them and counts the rest.

Reads only; units are fetched some hundred at a time: memory stays small with 10,000 queues.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from struct import Struct
from typing import Final, NamedTuple

from isal.isal_zlib import crc32

from sluice.protocol import kafka_entries, lifetimes, records
from sluice.storage.files import Files, OpenFile
from sluice.storage.queue_index import BATCH_UNIT, FILLER_SIZE, REBUILD, SIMPLE_UNIT

_CHUNK_UNITS: Final = 256
_SUM_BYTES: Final = 1 << 20
_TREES: Final = {"s": ("consumequeue", SIMPLE_UNIT), "b": ("batchconsumequeue", BATCH_UNIT)}
# Apache's broker may keep a place in consumequeue_ext there instead of a hash.
_EXT_ADDRESS_BELOW: Final = -(1 << 31) - 1

Key = tuple[bytes, int]


@dataclass(slots=True)
class Problem:
    """Something in a file that is not as it must be."""

    path: str
    offset: int
    reason: str


class QueueRow(NamedTuple):
    """A queue's line in the snapshot."""

    topic: str
    queue_id: int
    kind: str
    first: int
    start: int
    written: int
    end: int
    sums: Mapping[str, int]

    def directory(self, root: str) -> str:
        return f"{root}/{_TREES[self.kind][0]}/{self.topic}/{self.queue_id}"

    def paths(self, root: str) -> list[str]:
        """The files that the snapshot vouches for."""
        width = _TREES[self.kind][1].size
        return [f"{self.directory(root)}/{int(base) * width:020d}" for base in self.sums]


class _Cursor:
    """The units of one queue, one after the other, from files that may be of any length."""

    def __init__(
        self, files: Files, directory: str, unit: Struct, row: QueueRow | None, floor: int
    ) -> None:
        self._files = files
        self._directory = directory
        self._unit = unit
        self._floor = floor  # units that point below it are left over from a deleted topic
        names = [name for name in files.names(directory) if name.isdigit()]
        size = max((files.size(f"{directory}/{name}") for name in names), default=0)
        self.file_units = size // unit.size
        self._stop = row.written if row is not None else None
        self.index = row.first if row is not None else int(min(names, default="0")) // unit.size
        self._chunk = b""
        self._chunk_at = 0
        self.wrong_count = 0
        self.first_wrong: Problem | None = None

    def peek(self) -> tuple[int, ...] | None:
        """The unit at `index`; None where there are no more."""
        if self.file_units == 0 or (self._stop is not None and self.index >= self._stop):
            return None
        inside = (self.index - self._chunk_at) * self._unit.size
        if not 0 <= inside < len(self._chunk):
            self._fetch()
            inside = 0
        if inside + self._unit.size > len(self._chunk):
            return None
        unit: tuple[int, ...] = self._unit.unpack_from(self._chunk, inside)
        # Where nobody says how many there are, the first empty one ends the queue.
        return unit if self._stop is not None or _is_used(unit, self._floor) else None

    def place(self) -> tuple[str, int]:
        """File and byte of the unit at `index`."""
        width = self._unit.size
        base = self.index - self.index % self.file_units
        return f"{self._directory}/{base * width:020d}", (self.index - base) * width

    def _fetch(self) -> None:
        path, at = self.place()
        self._chunk_at, self._chunk = self.index, b""
        if not self._files.exists(path):
            return
        file = self._files.open(path, writable=False)
        try:
            self._chunk = file.pread(_CHUNK_UNITS * self._unit.size, at)
        finally:
            file.close()

    def wrong(self, reason: str) -> None:
        self.wrong_count += 1
        if self.first_wrong is None:
            self.first_wrong = Problem(*self.place(), reason)


class QueueCheck:
    """Compares queue files with a log. `rows` is None for a store without a usable snapshot;
    entries of a topic below its floor belong to no queue, the topic was deleted.
    """

    def __init__(
        self,
        files: Files,
        root: str,
        rows: Mapping[Key, QueueRow] | None,
        log_start: int,
        floors: Mapping[bytes, int],
    ) -> None:
        self._files = files
        self._root = root
        self._rows = rows
        self._log_start = log_start
        self._floors = floors
        self._cursors: dict[Key, _Cursor | None] = {}

    def on_entry(self, position: int, entry: records.Summary) -> None:
        """An intact entry of the log, in the order of the log."""
        key = (entry.topic, entry.queue_id)
        if key not in self._cursors:
            self._cursors[key] = self._open(key)
        cursor = self._cursors[key]
        if cursor is None:
            return
        offset = entry.queue_offset
        while (unit := cursor.peek()) is not None:
            unit_offset = unit[4] if len(unit) > 3 else cursor.index
            if unit_offset > offset:
                return
            if unit_offset == offset:
                self._compare(cursor, unit, position, entry)
                cursor.index += 1
                return
            self._pass_by(cursor, unit)

    def forget(self, topic: bytes) -> None:
        """The log deletes this topic here: what was compared so far says nothing of its queues."""
        for key in [key for key in self._cursors if key[0] == topic]:
            del self._cursors[key]

    def finish(self) -> list[Problem]:
        """The log is over: what is left in the files points nowhere."""
        for key in self._rows if self._rows is not None else ():
            self._cursors.setdefault(key, self._open(key))
        problems = []
        for key, cursor in self._cursors.items():
            if cursor is None:
                continue
            while (unit := cursor.peek()) is not None:
                self._pass_by(cursor, unit)
            if cursor.first_wrong is not None:
                first = cursor.first_wrong
                more = f" ({cursor.wrong_count} such units)" if cursor.wrong_count > 1 else ""
                problems.append(Problem(first.path, first.offset, first.reason + more))
            if self._rows is not None:
                problems += self._check_sums(self._rows[key], cursor.file_units)
        return problems

    def _open(self, key: Key) -> _Cursor | None:
        topic = key[0].decode("utf-8", "replace")
        if self._rows is not None:
            row = self._rows.get(key)
            if row is None:
                return None  # newer than the snapshot: no file vouches for it yet
            unit = _TREES[row.kind][1]
            return _Cursor(self._files, row.directory(self._root), unit, row, 0)
        for tree, unit in _TREES.values():
            directory = f"{self._root}/{tree}/{topic}/{key[1]}"
            if self._files.is_directory(directory):
                floor = self._floors.get(key[0], 0)
                return _Cursor(self._files, directory, unit, None, floor)
        return None

    def _pass_by(self, cursor: _Cursor, unit: tuple[int, ...]) -> None:
        # Units below the log's start are left over in files that retention has not deleted.
        if unit[1] != FILLER_SIZE and unit[0] >= self._log_start:
            cursor.wrong(f"points to position {unit[0]}, where the log has no such entry")
        cursor.index += 1

    @staticmethod
    def _compare(
        cursor: _Cursor, unit: tuple[int, ...], position: int, entry: records.Summary
    ) -> None:
        if (unit[0], unit[1]) != (position, entry.size):
            cursor.wrong(
                f"points to position {unit[0]}, {unit[1]} bytes; the entry lies at {position} and "
                f"has {entry.size} bytes"
            )
            return
        # Delivery times depend on the broker's delay levels, which a store does not tell; and of a
        # timed message Apache's broker writes the tag there.
        if entry.topic in records.TIMED_TOPICS or unit[2] < _EXT_ADDRESS_BELOW:
            return
        if kafka_entries.is_kafka(entry.sys_flag):
            code = kafka_entries.code_in(entry.properties)
        else:
            code = records.tags_code(entry.topic, entry.properties, entry.store_ms, ())
        # Apache's broker writes units without the end of a message's life.
        if unit[2] != code and (code < lifetimes.LEAST or unit[2] != lifetimes.without_end(code)):
            cursor.wrong(f"has the tags code {unit[2]}, the entry has {code}")

    def _check_sums(self, row: QueueRow, file_units: int) -> list[Problem]:
        width = _TREES[row.kind][1].size
        problems = []
        for path, (base, expected) in zip(row.paths(self._root), row.sums.items(), strict=True):
            left = min(row.written - int(base), file_units) * width
            checksum = at = 0
            file = self._files.open(path, writable=False)
            try:
                while left > 0 and (data := file.pread(min(left, _SUM_BYTES), at)):
                    checksum = crc32(data, checksum)
                    at += len(data)
                    left -= len(data)
            finally:
                file.close()
            if left or checksum != expected:
                problems.append(
                    Problem(path, 0, f"the queue file does not match its checksum; {REBUILD}")
                )
        return problems


def ends_in_files(files: Files, root: str, floors: Mapping[bytes, int]) -> dict[Key, int]:
    """For each queue that has files the offset after its last unit, whatever the log says."""
    ends: dict[Key, int] = {}
    for tree, unit in _TREES.values():
        for topic in files.names(f"{root}/{tree}"):
            for queue_id in files.names(f"{root}/{tree}/{topic}"):
                directory = f"{root}/{tree}/{topic}/{queue_id}"
                if queue_id.isdigit() and files.is_directory(directory):
                    floor = floors.get(topic.encode(), 0)
                    ends[topic.encode(), int(queue_id)] = _end_in(files, directory, unit, floor)
    return ends


def _is_used(unit: tuple[int, ...], floor: int) -> bool:
    return unit[1] == FILLER_SIZE or (unit[1] != 0 and unit[0] >= floor)


def _end_in(files: Files, directory: str, unit: Struct, floor: int) -> int:
    names = [name for name in files.names(directory) if name.isdigit()]
    for name in reversed(names):
        file = files.open(f"{directory}/{name}", writable=False)
        try:
            used = _used_units(file, unit, floor)
            if used and unit is SIMPLE_UNIT:
                return int(name) // unit.size + used
            if used:
                fields = unit.unpack(file.pread(unit.size, (used - 1) * unit.size))
                return int(fields[4] + (fields[7] or fields[5]))
        finally:
            file.close()
    return 0


def _used_units(file: OpenFile, unit: Struct, floor: int) -> int:
    """The units of a file before the first empty one; used ones come first, so halving finds it."""
    low, high = 0, file.size // unit.size
    while low < high:
        middle = (low + high) // 2
        if _is_used(unit.unpack(file.pread(unit.size, middle * unit.size)), floor):
            low = middle + 1
        else:
            high = middle
    return low
