"""This module finds the batches of a partition in the log, many for one fetch, as they lie there.

It finds what `Store.read` and a walk over its entries find, in the plain case: batches of Kafka's
producers that this process wrote and that are in memory. Of everything else it says nothing (None),
also where something is not as it must be, and the general way finds out.

A consumer asks, reads the answer, works on it, and asks again when it has nothing left. While a
fetch is looked for nobody works, so it has to be quick:

    where a read ended the next one begins: its unit is remembered and not searched for
    the system is asked by stretches of the log what is in memory, once for all partitions of a
    fetch, whose batches lie between each other
    unit, entry and batch are compared in one go, and nothing is made of them but the slice
"""

from __future__ import annotations

from struct import Struct, error
from typing import TYPE_CHECKING, Final, NamedTuple

from sluice.model import Buffer
from sluice.protocol import kafka_batches, kafka_entries, records
from sluice.storage.queue_index import BATCH_UNIT, BatchQueueIndex, QueueIndex

if TYPE_CHECKING:
    from sluice.storage.store import Store

UNITS_MAX: Final = 800  # that one read looks at
_UNITS_AT_ONCE: Final = 96  # about as many as a megabyte of usual batches has
_PLACES_MAX: Final = 4096
_STRETCH_BYTES: Final = 4 * 1024 * 1024
# Of an entry with IPv4 hosts: size, queue, offset, position, system flag, body size; of the batch
# that is its body: base offset, length, magic.
_ENTRY: Final = Struct(">i8xi4xqqi44xiqi4xb")
_BODY_AT: Final = 88
_LENGTH_END: Final = 12  # the bytes of a batch that its length does not count
_FLAGS: Final = kafka_entries.KAFKA_FLAGS | records.SYS_BORN_V6 | records.SYS_STORE_V6


class Slices(NamedTuple):
    """Batches back to back; `next_offset` follows the last of them."""

    slices: list[Buffer]
    byte_count: int
    next_offset: int


class _Walk(NamedTuple):
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

    def __init__(self, store: Store) -> None:
        self._store = store
        # By queue and offset: the number of the unit that begins there. The oldest go.
        self._places: dict[tuple[QueueIndex, int], int] = {}

    def read(
        self, queue: QueueIndex, offset: int, stop: int, bytes_max: int, cached: set[int]
    ) -> Slices | None:
        """Batches from `offset` on that begin below `stop`: the first whatever its size, then
        within the limit, which counts entries. None: the general way has to look.

        `cached` has the stretches of the log that were seen to be in memory, and gets more of them.
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
        return self._walk(_Walk(queue, at, visible, raw), offset, stop, bytes_max, cached)

    def _units(self, queue: QueueIndex, at: int, visible: int) -> bytes | bytearray:
        """Some units from `at` on; empty where there is none."""
        if at >= visible:
            return b""
        stop = min(at + _UNITS_AT_ONCE, visible)
        return queue.units(at, stop, self._store.queue_files, wait=False)

    def _walk(
        self, begin: _Walk, offset: int, stop: int, bytes_max: int, cached: set[int]
    ) -> Slices | None:
        """Take batches, unit by unit."""
        queue, at, visible, raw = begin
        last, queue_number = min(at + UNITS_MAX, visible), queue.key.queue_id
        slices: list[Buffer] = []
        byte_count = entry_bytes = low = high = base = 0
        next_offset, view, unpack = offset, memoryview(b""), _ENTRY.unpack_from
        while raw:
            for position, size, _, _, first, narrow, _, wide in BATCH_UNIT.iter_unpack(raw):
                entry_bytes += size
                if first >= stop or (slices and entry_bytes > bytes_max):
                    return self._found(queue, at, Slices(slices, byte_count, next_offset))
                if not low <= position <= high - size:
                    ground = self._ground(position, size, cached)
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
                start += _BODY_AT
                slices.append(view[start : start + body_bytes])
                byte_count += body_bytes
                next_offset = first + (wide or narrow)
                at += 1
            raw = self._units(queue, at, last)
        return self._found(queue, at, Slices(slices, byte_count, next_offset))

    def _found(self, queue: QueueIndex, at: int, found: Slices) -> Slices:
        """Remember where it ended."""
        places = self._places
        if found.slices:
            places[(queue, found.next_offset)] = at
            if len(places) > _PLACES_MAX:
                del places[next(iter(places))]
        return found

    def _ground(self, position: int, size: int, cached: set[int]) -> _Ground | None:
        """What can be read around an entry, without a look at the disk and without checksums."""
        reader, log = self._store.reader, self._store.log
        base = position - position % log.segment_bytes
        segment = log.segments.get(base)
        if segment is None or position < reader.trusted_from:
            return None
        low = max(base, reader.trusted_from)
        hot_from = reader.hot_from
        if position >= hot_from:
            return _Ground(segment.file.view(), base, max(low, hot_from), base + log.segment_bytes)
        number = position // _STRETCH_BYTES
        low, high, end = max(low, number * _STRETCH_BYTES), number * _STRETCH_BYTES, position + size
        # Those behind it that are known, too: the batches of one partition may lie far apart.
        while high < end or number in cached:
            if number not in cached:
                if not log.is_cached(high, min(high + _STRETCH_BYTES, log.written)):
                    return None
                cached.add(number)
            high += _STRETCH_BYTES
            number += 1
        return _Ground(segment.file.view(), base, low, min(high, base + log.segment_bytes))
