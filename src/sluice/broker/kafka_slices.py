"""This module finds the batches of a partition in the log, many for one fetch, as they lie there.

It finds what `Store.read` and a walk over its entries find, in the plain case: batches of Kafka's
producers that this process wrote and that are in memory. Of everything else it says nothing (None),
also where something is not as it must be, and the general way finds out.

A consumer asks, reads the answer, works on it, and asks again when it has nothing left. While a
fetch is looked for nobody works, so it has to be quick:

    where a read ended the next one begins: its unit is remembered and not searched for
    the system is asked by stretches of the log what is in memory, once for all partitions, whose
    batches lie between each other, and for the fetches of the next moment
    unit, entry and batch are compared in one go, those of many units column by column, and nothing
    is made of them but the slice
    what a consumer will ask next is looked for while it works (`kafka_ahead.py`), for all its
    partitions together (`kafka_together.py`)
"""

from __future__ import annotations

from collections.abc import Callable
from struct import Struct, error
from sys import byteorder
from time import monotonic_ns
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from sluice.model import Buffer
from sluice.protocol import kafka_batches, kafka_entries, records
from sluice.storage.queue_index import BATCH_ROW, BATCH_UNIT, BatchQueueIndex, QueueIndex

if TYPE_CHECKING:
    from sluice.storage.store import Store

UNITS_MAX: Final = 800  # that one read looks at
_UNITS_AT_ONCE: Final = 96  # about as many as a megabyte of usual batches has
_PLACES_MAX: Final = 4096
STRETCH_BYTES: Final = 4 * 1024 * 1024
# What is in memory and read by somebody does not go away as quickly.
_REMEMBERED_NS: Final = 50_000_000
_CACHED_MAX: Final = 1024
_STRETCHES_MAX: Final = 64  # of one read, to be asked about again
# Of an entry with IPv4 hosts: size, queue, offset, position, system flag, body size; of the batch
# that is its body: base offset, length, magic.
_ENTRY: Final = Struct(">i8xi4xqqi44xiqi4xb")
_BODY_AT: Final = 88
_LENGTH_END: Final = 12  # the bytes of a batch that its length does not count
# What an entry has besides its batch and the name of its topic, at most: so a unit, which tells the
# size of an entry only, tells the least size of a batch. Of an entry that has more, as somebody
# else may write it, it tells too much: then a read ends earlier than it had to.
_BESIDES_MAX: Final = (
    _BODY_AT
    + 2  # how long the name is
    + 2  # how long the properties are
    + len(kafka_entries.properties_of((1 << 31) - 1, (1 << 63) - 1, (1 << 63) - 1))
    + records.CRC_PROPERTY_BYTES
)
# The same as columns, with the numbers as they lie there: most are only compared with each other.
_HEAD: Final = np.dtype(
    {
        "names": [
            "size",
            "queue",
            "offset",
            "position",
            "flags",
            "body",
            "base",
            "length",
            "magic",
        ],
        "formats": ["u4", "u4", "u8", "u8", "u4", ">i4", "u8", ">i4", "i1"],
        "offsets": [0, 12, 20, 28, 36, 84, 88, 96, 104],
        "itemsize": 105,
    }
)
UNIT_AS_IT_LIES: Final = np.dtype(
    {
        "names": ["position", "size", "offset"],
        "formats": ["u8", "u4", "u8"],
        "offsets": [0, 8, 28],
        "itemsize": BATCH_UNIT.size,
    }
)
assert _HEAD.itemsize == _ENTRY.size
_BYTES: Final = np.dtype(f"V{_HEAD.itemsize}")
RUN_UNITS_MIN: Final = 16  # of fewer, one after the other is as quick
_FLAGS: Final = kafka_entries.KAFKA_FLAGS | records.SYS_BORN_V6 | records.SYS_STORE_V6


def as_it_lies(number: int) -> int:
    return int.from_bytes(number.to_bytes(4, "big"), byteorder)


_FLAGS_LIE: Final = np.uint32(as_it_lies(_FLAGS))
_KAFKA_LIES: Final = as_it_lies(kafka_entries.KAFKA_FLAGS)


def besides_max(queue: QueueIndex) -> int:
    """The bytes that an entry of this queue has besides its batch, at most."""
    return _BESIDES_MAX + len(queue.topic_bytes)


class Slices(NamedTuple):
    """Batches back to back; `next_offset` follows the last of them.

    `unit` is the number of the first one's unit; from `begin` to `end` they lie in the log, among
    others. `has_more`: the limits left out what follows, however much may come behind it.
    """

    slices: list[Buffer]
    byte_count: int
    next_offset: int
    unit: int = 0
    begin: int = 0
    end: int = 0
    has_more: bool = False


class Walk(NamedTuple):
    """Where a walk begins: a unit's number, how many can be seen, and some of them from it on."""

    queue: QueueIndex
    at: int
    visible: int
    raw: bytes | bytearray


class _Ground(NamedTuple):
    """A part of the log, from `low` to `high`, that can be read at once: its file begins at
    `base`.
    """

    view: memoryview
    base: int
    low: int
    high: int


class SliceReader:
    """Reads batches of one store. Belongs to the store's owner."""

    def __init__(self, store: Store, now_ns: Callable[[], int] = monotonic_ns) -> None:
        self._store = store
        self._now_ns = now_ns
        # The stretches that were seen to be in memory, and until when that counts.
        self._cached_until_ns: dict[int, int] = {}
        # By queue and offset: the number of the unit that begins there. The oldest go.
        self._places: dict[tuple[QueueIndex, int], int] = {}

    def read(self, queue: QueueIndex, offset: int, stop: int, bytes_max: int) -> Slices | None:
        """Batches from `offset` on that begin below `stop`: the first whatever its size, then
        within the limit, which counts the bytes of batches, as Kafka does. None: the general way
        has to look.

        May raise `ColdRead`.
        """
        older = queue.older
        if queue.kind != BatchQueueIndex.kind or (older is not None and offset < older.upto):
            return None
        visible = self._store.reader.visible_units(queue, self._store.confirmed)
        at = self._places.get((queue, offset), -1)
        raw = self._units(queue, at, visible) if at >= queue.first else b""
        if not raw or BATCH_UNIT.unpack_from(raw)[4] != offset:
            at = queue.seek(offset, self._store.queue_files, wait=False)
            raw = self._units(queue, at, visible)
        begin = Walk(queue, at, visible, raw)
        is_run = len(raw) >= RUN_UNITS_MIN * BATCH_UNIT.size
        return (self._run if is_run else self._walk)(begin, offset, stop, bytes_max)

    def _units(self, queue: QueueIndex, at: int, visible: int) -> bytes | bytearray:
        """Some units from `at` on; empty where there is none."""
        if at >= visible:
            return b""
        stop = min(at + _UNITS_AT_ONCE, visible)
        return queue.units(at, stop, self._store.queue_files, wait=False)

    def _walk(self, begin: Walk, offset: int, stop: int, bytes_max: int) -> Slices | None:
        """Take batches, unit by unit."""
        queue, at, visible, raw = begin
        last, queue_number = min(at + UNITS_MAX, visible), queue.key.queue_id
        besides = besides_max(queue)
        slices: list[Buffer] = []
        byte_count = low = high = base = end = 0
        next_offset, view, unpack = offset, memoryview(b""), _ENTRY.unpack_from
        while raw:
            for position, size, _, _, first, narrow, _, wide in BATCH_UNIT.iter_unpack(raw):
                # What surely has no room is not looked at: it may be on the disk.
                if first >= stop or (slices and byte_count + size - besides > bytes_max):
                    return self._found(begin, at, end, Slices(slices, byte_count, next_offset))
                if not low <= position <= high - size:
                    ground = self._ground(position, size)
                    if ground is None:
                        return None
                    view, base, low, high = ground
                start = position - base
                try:
                    seen = unpack(view, start)
                except error:
                    return None
                flags, body_bytes, length = seen[4], seen[5], seen[7]
                if (
                    seen[:4] != (size, queue_number, first, position)
                    or flags & _FLAGS != kafka_entries.KAFKA_FLAGS
                    or seen[6] != first
                    or not 0 < length == body_bytes - _LENGTH_END < size - _BODY_AT
                    or seen[8] != kafka_batches.MAGIC
                ):
                    return None
                if slices and byte_count + body_bytes > bytes_max:
                    return self._found(begin, at, end, Slices(slices, byte_count, next_offset))
                start += _BODY_AT
                slices.append(view[start : start + body_bytes])
                byte_count += body_bytes
                next_offset, end = first + (wide or narrow), position + size
                at += 1
            raw = self._units(queue, at, last)
        return self._found(begin, at, end, Slices(slices, byte_count, next_offset))

    def _run(self, begin: Walk, offset: int, stop: int, bytes_max: int) -> Slices | None:
        """The same as `_walk`, many units at a time.

        The least sizes of batches, which units tell, say how many may have room. Those are looked
        at in one go, and their true sizes say how many are taken: of usual batches the same.
        """
        queue, at, visible, raw = begin
        last, besides = min(at + UNITS_MAX, visible), besides_max(queue)
        slices: list[Buffer] = []
        byte_count, next_offset, end = 0, offset, 0
        while raw:
            units = np.frombuffer(raw, BATCH_ROW)
            sizes = units["size"].astype(np.int64)
            room = bytes_max - byte_count
            count = int((sizes - besides).cumsum().searchsorted(room, "right"))
            if not count and not slices:
                count = 1
            if stop <= BATCH_UNIT.unpack_from(raw, len(raw) - BATCH_UNIT.size)[4]:
                count = min(count, int(units["offset"].searchsorted(stop)))
            if not count:
                break
            positions = units["position"][:count].astype(np.int64)
            entry_ends = positions + sizes[:count]
            cut = self._cut(queue, raw, positions, entry_ends, slices, room)
            if cut is None:
                return None
            taken, added = cut
            if not taken:
                break
            byte_count += added
            _, _, _, _, first, narrow, _, wide = BATCH_UNIT.unpack_from(
                raw, (taken - 1) * BATCH_UNIT.size
            )
            next_offset, end = first + (wide or narrow), int(entry_ends[taken - 1])
            at += taken
            if taken < len(units):
                break
            raw = self._units(queue, at, last)
        return self._found(begin, at, end, Slices(slices, byte_count, next_offset))

    def _cut(
        self,
        queue: QueueIndex,
        raw: bytes | bytearray,
        positions: npt.NDArray[np.int64],
        ends: npt.NDArray[np.int64],
        slices: list[Buffer],
        bytes_max: int,
    ) -> tuple[int, int] | None:
        """Add the batches of the first of these units, whose entries lie from `positions` to
        `ends`, as far as they have room: how many, and their bytes. None where one is not as it
        must be or cannot be read at once.
        """
        units = np.frombuffer(raw, UNIT_AS_IT_LIES)
        at, count, byte_count = 0, len(positions), 0
        while at < count:
            ground = self._ground(int(positions[at]), int(ends[at] - positions[at]))
            if ground is None:
                return None
            view, base, _, high = ground
            upto = int(ends.searchsorted(high, "right"))
            found = batches_at(
                view,
                units[at:upto],
                positions[at:upto] - base,
                ends[at:upto] - positions[at:upto],
                as_it_lies(queue.key.queue_id),
            )
            if found is None:
                return None
            body_ends = found[1].cumsum()
            fit = int(body_ends.searchsorted(bytes_max - byte_count, "right"))
            if not fit and not slices:
                fit = 1  # the first of all, whatever its size
            if fit:
                slices += found[0][:fit]
                byte_count += int(body_ends[fit - 1])
            at += fit
            if at < upto:
                break
        return at, byte_count

    def _found(self, begin: Walk, at: int, end: int, found: Slices) -> Slices:
        """Remember where it ended: before the unit `at`, and in the log at `end`."""
        slices, byte_count, next_offset, *_ = found
        if not slices:
            return found
        places = self._places
        places[(begin.queue, next_offset)] = at
        if len(places) > _PLACES_MAX:
            del places[next(iter(places))]
        position = BATCH_UNIT.unpack_from(begin.raw)[0]
        has_more = at < begin.visible
        return Slices(slices, byte_count, next_offset, begin.at, position, end, has_more)

    def is_still_so(self, queue: QueueIndex, offset: int, found: Slices) -> bool:
        """Whether a read would find again what one from this offset on has found, as far as it is
        not for the limits to say: nothing of it was deleted or compacted, all is in memory.
        """
        older, log = queue.older, self._store.log
        if found.unit < queue.first or (older is not None and offset < older.upto):
            return False
        if found.begin < log.start:
            return False
        end = min(found.end, self._store.reader.hot_from)
        numbers = range(found.begin // STRETCH_BYTES, -(-end // STRETCH_BYTES))
        if len(numbers) > _STRETCHES_MAX:
            return False
        now_ns, cached_until_ns = self._now_ns(), self._cached_until_ns
        for number in numbers:
            if cached_until_ns.get(number, 0) <= now_ns and not self._holds(number, now_ns):
                return False
        return True

    def _ground(self, position: int, size: int) -> _Ground | None:
        """What can be read around an entry, without a look at the disk and without checksums."""
        reader, log = self._store.reader, self._store.log
        base = position - position % log.segment_bytes
        segment = log.segments.get(base)
        if segment is None or position < reader.trusted_from:
            return None
        low = max(base, reader.trusted_from)
        hot_from = reader.hot_from
        if position >= hot_from:
            view = segment.file.view(position - base)
            return _Ground(view, base, max(low, hot_from), base + log.segment_bytes)
        number = position // STRETCH_BYTES
        low, high, end = max(low, number * STRETCH_BYTES), number * STRETCH_BYTES, position + size
        cached_until_ns, now_ns = self._cached_until_ns, self._now_ns()
        # Those behind it that are known, too: the batches of one partition may lie far apart.
        while (is_known := cached_until_ns.get(number, 0) > now_ns) or high < end:
            stop = high + STRETCH_BYTES
            if not is_known and not self._holds(number, now_ns):
                return None
            high = stop
            number += 1
        view = segment.file.view(position - base)
        return _Ground(view, base, low, min(high, base + log.segment_bytes))

    def _holds(self, number: int, now_ns: int) -> bool:
        """Whether a stretch of the log is in memory, as far as that is known or quickly told."""
        cached_until_ns, log = self._cached_until_ns, self._store.log
        if cached_until_ns.get(number, 0) > now_ns:
            return True
        start = number * STRETCH_BYTES
        if not log.is_cached(start, min(start + STRETCH_BYTES, log.written)):
            return False
        if len(cached_until_ns) >= _CACHED_MAX:
            cached_until_ns.clear()
        cached_until_ns[number] = now_ns + _REMEMBERED_NS
        return True


def batches_at(
    view: memoryview,
    units: npt.NDArray[np.void],
    starts: npt.NDArray[np.int64],
    sizes: npt.NDArray[np.int64],
    queue_lies: int | npt.NDArray[np.uint32],
) -> tuple[list[memoryview], npt.NDArray[np.int64]] | None:
    """The batches of entries that begin at `starts` in a file of the log, and their sizes; None
    where one is not as its unit tells, or not a whole one. `units` and the numbers of their queues
    are as they lie.
    """
    if int(starts.max()) + _HEAD.itemsize > len(view):
        return None
    every = np.ndarray((len(view) - _HEAD.itemsize + 1,), _BYTES, view, 0, (1,))
    heads = every[starts].view(_HEAD)
    offsets = units["offset"]
    bodies = heads["body"].astype(np.int64)
    is_as_told = (
        (heads["size"] == units["size"])
        & (heads["queue"] == queue_lies)
        & (heads["offset"] == offsets)
        & (heads["position"] == units["position"])
        & (heads["flags"] & _FLAGS_LIE == _KAFKA_LIES)
        & (heads["base"] == offsets)
        & (heads["length"] == bodies - _LENGTH_END)
        & (heads["magic"] == kafka_batches.MAGIC)
        & (bodies > _LENGTH_END)
        & (bodies < sizes - _BODY_AT)
    )
    if not is_as_told.all():
        return None
    bodies_at = starts + _BODY_AT
    places = bodies_at.tolist(), (bodies_at + bodies).tolist()
    return [view[start:stop] for start, stop in zip(*places, strict=True)], bodies
