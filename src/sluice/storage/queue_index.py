"""This module maps (queue, offset) to places in the log: one fixed-width unit per entry, in files.

    consumequeue/<topic>/<queue id>/<byte offset of the file>        simple: one unit per offset
        i64 position · i32 size · i64 tags code                                            20 bytes
    batchconsumequeue/<topic>/<queue id>/<byte offset of the file>   batch: a unit counts N offsets
        i64 position · i32 size · i64 tags code · i64 store ms · i64 base offset ·
        i16 count · i32 compacted offset (-1) · i32 true count where i16 cannot hold it    46 bytes

The newest units live in memory (`tail`) and go to the files in batches, when a checkpoint asks: a
unit can always be made again from the log, so there is no reason to touch a file per message, and
10,000 queues cost what 8 do. A file gets only units whose entries are durable in the log, so it
never points past the log.

Where the log has lost entries (a damaged part that was given up, a queue that starts in the middle)
stand fillers (position 0, size 7fffffff), as Apache writes them; readers step over them.

Each file's checksum is kept in the checkpoint's snapshot and compared when the file is first read
after a start: a flipped bit in a tags code would otherwise hide a message from its subscriber.

Methods belong to the owner's thread unless they say otherwise. This module reads no log and no
clock.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from struct import Struct
from typing import Final, NamedTuple

import numpy as np
from isal.isal_zlib import crc32

from sluice.errors import StoreCorrupt
from sluice.model import QueueKey
from sluice.storage.files import Files, OpenFile

SIMPLE_UNIT: Final = Struct(">qiq")
BATCH_UNIT: Final = Struct(">qiqqqhii")
# The same as columns.
SIMPLE_ROW: Final = np.dtype([("position", ">i8"), ("size", ">i4"), ("code", ">i8")])
BATCH_ROW: Final = np.dtype(
    [
        *(("position", ">i8"), ("size", ">i4"), ("code", ">i8"), ("store_ms", ">i8")),
        *(("offset", ">i8"), ("count", ">i2"), ("compacted", ">i4"), ("true_count", ">i4")),
    ]
)
assert (SIMPLE_ROW.itemsize, BATCH_ROW.itemsize) == (SIMPLE_UNIT.size, BATCH_UNIT.size)
_MANY_BYTES: Final = 32 * BATCH_UNIT.size  # to add up sizes in one go is worth its while from here
FILLER_SIZE: Final = 0x7FFFFFFF
SIMPLE_FILLER: Final = SIMPLE_UNIT.pack(0, FILLER_SIZE, 0)
COUNT_I16_MAX: Final = 32767
# Units that stay in memory after they were written, so that readers at the end touch no file.
KEPT_UNIT_COUNT: Final = 128
OPEN_FILES_MAX: Final = 256


class ColdRead(Exception):
    """What is asked for may be on the disk only: run `work` on a thread, then ask again.

    What `work` has warmed is taken then, also where the system cannot say what is in memory
    (`OpenFile.warm`). Another part may have to be waited for: a read ends after as many rounds as
    it looks at places.
    """

    def __init__(self, work: Callable[[], None]) -> None:
        super().__init__("not in memory")
        self.work = work


# One entry of a queue: position, size, tags code, offset, count. For a simple queue the offset is
# the unit's index and the count is 1. A plain tuple, because a read makes one per message.
Unit = tuple[int, int, int, int, int]


class FilePart(NamedTuple):
    """Bytes that a checkpoint writes into one file of one queue."""

    path: str
    at: int
    data: bytes


class QueueWrite(NamedTuple):
    """What a checkpoint does for one queue, and what holds for it when that is durable."""

    queue: QueueIndex
    stop: int
    end_offset: int
    parts: list[FilePart]
    sums: dict[int, int]


@dataclass(slots=True)
class Older:
    """What compaction has kept of the beginning of a queue; see `compacted`."""

    queue: QueueIndex  # where it is, at the same offsets
    upto: int  # offsets below this are read from there
    clean: int  # below this, each key is there once
    start: int  # the lowest offset that can be read


class QueueFiles:
    """The open files of all queues: a bounded number, the least recently used one goes.

    A file that falls out is not closed here: a read on another thread may hold it still.
    """

    def __init__(self, files: Files) -> None:
        self.files = files
        self._open: OrderedDict[str, OpenFile] = OrderedDict()
        # By threads, on their way to the owner; each with the queue that asked, because a queue of
        # a deleted topic may have had a file of the same name.
        self._opened: dict[str, tuple[QueueIndex, OpenFile]] = {}

    def get(self, path: str, queue: QueueIndex) -> OpenFile | None:
        """The file if it is open: opening may wait for the disk, so `open` does it on a thread."""
        file = self._open.get(path)
        if file is not None:
            self._open.move_to_end(path)
            return file
        opener, file = self._opened.pop(path, (None, None))
        if file is None or opener is not queue:
            return None
        self._open[path] = file
        if len(self._open) > OPEN_FILES_MAX:
            self._open.popitem(last=False)
        return file

    def open(self, path: str, queue: QueueIndex) -> OpenFile:
        """Open a file for the owner's next `get`; runs on any thread."""
        file = self.files.open(path, writable=False)
        self._opened[path] = (queue, file)
        return file

    def forget(self, path: str) -> None:
        self._open.pop(path, None)
        self._opened.pop(path, None)


class QueueIndex:
    """The units of one queue: in files up to `written`, in memory from `tail_first` on."""

    __slots__ = (
        "count",
        "directory",
        "dirty",
        "file_units",
        "first",
        "key",
        "next_offset",
        "older",
        "sums",
        "tail",
        "tail_first",
        "topic_bytes",
        "unverified",
        "written",
        "written_offset",
    )

    unit_bytes = SIMPLE_UNIT.size
    tree = "consumequeue"
    kind = "s"

    def __init__(self, key: QueueKey, root: str, file_units: int) -> None:
        self.key = key
        self.topic_bytes = key.topic.encode()
        self.directory = f"{root}/{self.tree}/{key.topic}/{key.queue_id}"
        self.file_units = file_units
        self.first = 0  # lowest unit that points into the log
        self.count = 0  # units made; for a simple queue also the offset after the newest entry
        self.written = 0  # units that the files hold
        self.written_offset = 0  # the offset after the last of them
        self.next_offset = 0  # the next to give away; ahead of `count` while entries are staged
        self.tail = bytearray()
        self.tail_first = 0
        self.sums: dict[int, int] = {}  # first unit of a file -> checksum of its used part
        self.unverified: dict[
            int, tuple[int, int]
        ] = {}  # ... -> used units and checksum at the start
        self.dirty = False
        self.older: Older | None = None

    # ------------------------------------------------------------------------------ starting points

    def start_at(self, unit: int, offset: int) -> None:
        """An empty queue begins (or goes on) at this unit and offset."""
        assert not self.tail, "only before the first unit"
        self.first = self.count = self.written = self.tail_first = unit
        self.next_offset = self.written_offset = offset

    def go_on_at(self, offset: int) -> None:
        """Offsets below this one were given away, but their entries are gone."""
        if self.count > self.first:
            self.tail += SIMPLE_FILLER * (offset - self.count)
            self.count = self.next_offset = offset
        else:
            self.start_at(offset, offset)

    def restore(
        self, first: int, start_offset: int, written: int, end_offset: int, sums: dict[int, int]
    ) -> None:
        """Be as a snapshot says; what the files hold is compared with `sums` at the first read."""
        self.first = first
        self.count = self.written = self.tail_first = written
        self.next_offset = self.written_offset = end_offset
        self.sums = sums
        self.unverified = {
            base: (min(written - base, self.file_units), checksum)
            for base, checksum in sums.items()
        }

    # --------------------------------------------------------------------------------------- making

    def pack(
        self, position: int, size: int, tags_code: int, store_ms: int, offset: int, count: int
    ) -> bytes:
        """The unit of an entry."""
        return SIMPLE_UNIT.pack(position, size, tags_code)

    def add(self, units: bytes) -> None:
        """Take the units of entries that are in the log now."""
        self.tail += units
        self.count += len(units) // self.unit_bytes

    def add_found(self, unit: bytes, offset: int, count: int) -> bool:
        """Recovery found this entry in the log; False where the queue has its offset already."""
        if offset < self.count:
            return False
        if offset > self.count:
            if self.count == self.written == 0 and not self.sums:
                self.start_at(offset, offset)
            else:
                self.tail += SIMPLE_FILLER * (offset - self.count)
                self.count = offset
        self.add(unit)
        self.next_offset = self.count
        return True

    # ---------------------------------------------------------------------------------- checkpoints

    def collect(self, durable: int) -> QueueWrite | None:
        """The units that are not in files yet and whose entries lie below `durable`."""
        stop = self.count
        while stop > self.written:
            position, size = self._place_in_tail(stop - 1)
            if size == FILLER_SIZE or position + size <= durable:
                break
            stop -= 1
        if stop <= self.written:
            return None
        parts: list[FilePart] = []
        sums: dict[int, int] = {}
        at = self.written
        while at < stop:
            base = at - at % self.file_units
            upto = min(stop, base + self.file_units)
            data = self._tail_slice(at, upto)
            known = self.sums.get(base)
            if known is None and at > base:
                data = self._padding(at - base) + data
                at = base
            sums[base] = crc32(data, known or 0)
            parts.append(FilePart(self.path_of(base), (at - base) * self.unit_bytes, data))
            at = upto
        return QueueWrite(self, stop, self._offset_after(stop), parts, sums)

    def collected(self, write: QueueWrite) -> None:
        """A checkpoint made these units durable: most of them need not stay in memory."""
        self.written = write.stop
        self.written_offset = write.end_offset
        self.sums.update(write.sums)
        keep_from = max(self.tail_first, min(self.written, self.count - KEPT_UNIT_COUNT))
        if keep_from > self.tail_first:
            del self.tail[: (keep_from - self.tail_first) * self.unit_bytes]
            self.tail_first = keep_from

    def _padding(self, unit_count: int) -> bytes:
        return SIMPLE_FILLER * unit_count

    def _tail_slice(self, start: int, stop: int) -> bytes:
        width = self.unit_bytes
        return bytes(
            self.tail[(start - self.tail_first) * width : (stop - self.tail_first) * width]
        )

    def _place_in_tail(self, index: int) -> tuple[int, int]:
        fields = SIMPLE_UNIT.unpack_from(self.tail, (index - self.tail_first) * self.unit_bytes)
        return fields[0], fields[1]

    def _offset_after(self, stop: int) -> int:
        """The offset after the unit before `stop`, which is in the tail."""
        return stop

    def path_of(self, base: int) -> str:
        return f"{self.directory}/{base * self.unit_bytes:020d}"

    # -------------------------------------------------------------------------------------- reading

    @property
    def end_offset(self) -> int:
        """The offset after the newest entry that is in the log."""
        return self.count

    @property
    def start_offset(self) -> int:
        """The lowest offset that can be read."""
        return self.first

    def seek(self, offset: int, store: QueueFiles, *, wait: bool) -> int:
        """The unit that holds this offset (which is between start and end), or else the next."""
        return offset

    def units(self, start: int, stop: int, store: QueueFiles, *, wait: bool) -> bytes | bytearray:
        """The raw units [start, stop), which must be there.

        With `wait` the call may block on the disk (a thread's call); without, it raises `ColdRead`.
        """
        width = self.unit_bytes
        tail_first = self.tail_first
        if start >= tail_first:
            return self.tail[(start - tail_first) * width : (stop - tail_first) * width]
        data = bytearray()
        at = start
        while at < min(stop, tail_first):
            base = at - at % self.file_units
            upto = min(stop, tail_first, base + self.file_units)
            data += self._from_file(base, at, upto, store, wait)
            at = upto
        if stop > tail_first:
            data += self.units(tail_first, stop, store, wait=wait)
        return data

    def _from_file(
        self, base: int, start: int, stop: int, store: QueueFiles, wait: bool
    ) -> bytes | bytearray:
        path = self.path_of(base)
        width = self.unit_bytes
        begin, size = (start - base) * width, (stop - start) * width
        if wait:
            self._verify(base, path, store.files)
            file = store.files.open(path, writable=False)
            try:
                return self._whole(file.pread(size, begin), size, path, begin)
            finally:
                file.close()
        opened = store.get(path, self)
        if opened is not None and base not in self.unverified:
            found = opened.pread_now(size, begin)
            if found is not None:
                return found

        def work() -> None:
            self._verify(base, path, store.files)
            (opened or store.open(path, self)).warm(begin, begin + size)

        raise ColdRead(work)

    @staticmethod
    def _whole(data: bytes, size: int, path: str, at: int) -> bytes:
        if len(data) != size:
            raise StoreCorrupt(
                path, at + len(data), "the queue file is shorter than it was; " + REBUILD
            )
        return data

    def _verify(self, base: int, path: str, files: Files) -> None:
        """Compare a file with its checksum, once after a start. May run on any thread."""
        expected = self.unverified.get(base)
        if expected is None:
            return
        used_units, checksum = expected
        file = files.open(path, writable=False)
        try:
            data = file.pread(used_units * self.unit_bytes, 0)
        finally:
            file.close()
        if len(data) != used_units * self.unit_bytes or crc32(data) != checksum:
            raise StoreCorrupt(path, 0, "the queue file does not match its checksum; " + REBUILD)
        self.unverified.pop(base, None)

    def iterate(self, raw: bytes | bytearray, start: int) -> list[Unit]:
        """Raw units, the first of which is unit number `start`, taken apart."""
        return [
            (position, size, tags_code, offset, 1)
            for offset, (position, size, tags_code) in enumerate(
                SIMPLE_UNIT.iter_unpack(raw), start
            )
        ]

    def iterate_within(self, raw: bytes | bytearray, start: int, bytes_max: int) -> list[Unit]:
        """The same; those may be left out that a read of so many bytes does not reach."""
        return self.iterate(raw, start)

    # ------------------------------------------------------------------------------------- deleting

    def freeze(self) -> QueueIndex:
        """A copy that another thread can search while this queue goes on."""
        copy = type(self)(self.key, "", self.file_units)
        copy.directory = self.directory
        copy.restore(self.first, self.start_offset, self.written, self.end_offset, self.sums)
        copy.unverified = self.unverified
        copy.count = self.count
        copy.tail_first = self.tail_first
        copy.tail = self.tail[:]
        return copy

    def find_first(self, log_start: int, store: QueueFiles) -> tuple[int, int]:
        """The first unit whose entry is not below `log_start`, and its offset; may block."""
        low, high = self.first, self.count
        while low < high:
            middle = probe = (low + high) // 2
            # Fillers have no position: the next real unit decides for them.
            while probe < high and self._unit(probe, store)[1] == FILLER_SIZE:
                probe += 1
            if probe == high or self._unit(probe, store)[0] >= log_start:
                high = middle
            else:
                low = probe + 1
        while low < self.count and self._unit(low, store)[1] == FILLER_SIZE:
            low += 1
        return low, self._unit(low, store)[3] if low < self.count else self.end_offset

    def _unit(self, index: int, store: QueueFiles) -> Unit:
        return self.iterate(self.units(index, index + 1, store, wait=True), index)[0]

    def begin_at(self, unit: int, offset: int) -> None:
        """Nobody reads below this unit and offset any more; its files go when the log's do."""
        self.first = max(self.first, unit)

    def drop_before(self, first: int, offset: int) -> list[str]:
        """Units below `first` point nowhere any more; returns the files that are not needed.

        The newest file stays whatever it holds: it says where the queue's offsets go on.
        """
        self.first = max(self.first, first)
        newest = (max(self.written, 1) - 1) // self.file_units * self.file_units
        gone = [b for b in self.sums if b + self.file_units <= self.first and b < newest]
        for base in gone:
            del self.sums[base]
            self.unverified.pop(base, None)
        return [self.path_of(base) for base in gone]


class BatchQueueIndex(QueueIndex):
    """A queue in which one entry may count many offsets; found by binary search on the base
    offset.
    """

    __slots__ = ("_end_offset", "_start_offset")

    unit_bytes = BATCH_UNIT.size
    tree = "batchconsumequeue"
    kind = "b"

    def __init__(self, key: QueueKey, root: str, file_units: int) -> None:
        super().__init__(key, root, file_units)
        self._end_offset = 0
        self._start_offset = 0

    def start_at(self, unit: int, offset: int) -> None:
        super().start_at(unit, offset)
        self._end_offset = self._start_offset = offset

    def go_on_at(self, offset: int) -> None:
        if self.count > self.first:
            self._end_offset = self.next_offset = offset  # units carry their offsets: no fillers
        else:
            self.start_at(self.count, offset)

    def restore(
        self, first: int, start_offset: int, written: int, end_offset: int, sums: dict[int, int]
    ) -> None:
        super().restore(first, start_offset, written, end_offset, sums)
        self._start_offset = start_offset
        self._end_offset = end_offset

    def pack(
        self, position: int, size: int, tags_code: int, store_ms: int, offset: int, count: int
    ) -> bytes:
        narrow, true_count = (count, 0) if count <= COUNT_I16_MAX else (COUNT_I16_MAX, count)
        return BATCH_UNIT.pack(position, size, tags_code, store_ms, offset, narrow, -1, true_count)

    def add(self, units: bytes) -> None:
        size = len(units)
        self.tail += units
        self.count += size // BATCH_UNIT.size
        _, _, _, _, base, narrow, _, wide = BATCH_UNIT.unpack_from(units, size - BATCH_UNIT.size)
        self._end_offset = base + (wide or narrow)

    def add_found(self, unit: bytes, offset: int, count: int) -> bool:
        if offset < self._end_offset:
            return False
        if self.count == 0:
            self._start_offset = offset
        # Holes need no fillers here: units carry their offsets.
        self.add(unit)
        self.next_offset = self._end_offset
        return True

    def _padding(self, unit_count: int) -> bytes:
        raise AssertionError("a batch queue always starts at unit 0 or goes on where it was")

    @property
    def end_offset(self) -> int:
        return self._end_offset

    @property
    def start_offset(self) -> int:
        return self._start_offset if self.older is None else self.older.start

    def iterate(self, raw: bytes | bytearray, start: int) -> list[Unit]:
        return [
            (fields[0], fields[1], fields[2], fields[4], fields[7] or fields[5])
            for fields in BATCH_UNIT.iter_unpack(raw)
        ]

    def iterate_within(self, raw: bytes | bytearray, start: int, bytes_max: int) -> list[Unit]:
        if len(raw) >= _MANY_BYTES and bytes_max:
            ends = np.frombuffer(raw, BATCH_ROW)["size"].cumsum(dtype=np.int64)
            reached = max(1, int(ends.searchsorted(bytes_max, side="right")))
            raw = raw[: reached * BATCH_UNIT.size]
        return self.iterate(raw, start)

    def seek(self, offset: int, store: QueueFiles, *, wait: bool) -> int:
        low, high = self.first, self.count
        while low < high:
            middle = (low + high) // 2
            (unit,) = self.iterate(self.units(middle, middle + 1, store, wait=wait), middle)
            if unit[3] + unit[4] <= offset:
                low = middle + 1
            else:
                high = middle
        return low

    def begin_at(self, unit: int, offset: int) -> None:
        super().begin_at(unit, offset)
        self._start_offset = max(self._start_offset, offset)
        if self.older is not None:
            self.older.start = max(self.older.start, offset)

    def drop_before(self, first: int, offset: int) -> list[str]:
        self._start_offset = max(self._start_offset, offset)
        return super().drop_before(first, offset)

    def _offset_after(self, stop: int) -> int:
        fields = BATCH_UNIT.unpack_from(self.tail, (stop - 1 - self.tail_first) * self.unit_bytes)
        return int(fields[4] + (fields[7] or fields[5]))


REBUILD: Final = "remove consumequeue/ and batchconsumequeue/ and start again to rebuild them"
