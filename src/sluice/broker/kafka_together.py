"""This module reads batches of several queues in one go, for `kafka_ahead.py`.

A consumer of eight partitions gets some sixty batches of each, which lie between each other in the
same megabytes of the log. Read queue by queue that is eight times the same forty calls of numpy,
each with little to do, and by a processor that has forgotten them since the last time. Together
they are as many calls as for one queue. Only what is plain is read so: reads that are ended by
their limit, within the units that are taken at once, of one file of the log that is in memory.
Whatever is not is left out, and `SliceReader.read` says why.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from sluice.broker.kafka_slices import (
    RUN_UNITS_MIN,
    STRETCH_BYTES,
    UNIT_AS_IT_LIES,
    SliceReader,
    Slices,
    Walk,
    as_it_lies,
    batches_at,
    besides_max,
)
from sluice.model import Buffer
from sluice.storage.queue_index import BATCH_ROW, BATCH_UNIT, BatchQueueIndex, QueueIndex
from sluice.storage.store import ColdRead

Place = tuple[QueueIndex, int]  # a queue and an offset
TOGETHER_MAX: Final = 16  # reads, of up to a hundred units each
_SPAN_BYTES_MAX: Final = 16 * STRETCH_BYTES  # of the log, that holds all of them


class _Wanted(NamedTuple):
    """A read that may be found with others: its units are `begin` to `stop` among those of all."""

    place: Place
    walk: Walk
    bytes_max: int
    begin: int
    stop: int


class TogetherReader(SliceReader):
    """Reads batches of one store, of many queues at a time."""

    def read_together(self, places: Mapping[Place, int]) -> dict[Place, Slices]:
        """What reads from these places with these limits find, as far as it is plain."""
        wanted: list[_Wanted] = []
        unit_count = 0
        for place, bytes_max in places.items():
            walk = self._known(*place)
            if walk is not None:
                begin, unit_count = unit_count, unit_count + len(walk.raw) // BATCH_UNIT.size
                wanted.append(_Wanted(place, walk, bytes_max, begin, unit_count))
        return self._read(wanted) if wanted else {}

    def _known(self, queue: QueueIndex, offset: int) -> Walk | None:
        """Where a read begins, if a read before it has ended there."""
        older, at = queue.older, self._places.get((queue, offset), -1)
        if queue.kind != BatchQueueIndex.kind or (older is not None and offset < older.upto):
            return None
        if at < queue.first:
            return None
        visible = self._store.reader.visible_units(queue, self._store.confirmed)
        try:
            raw = self._units(queue, at, visible)
        except ColdRead:
            return None
        if len(raw) < RUN_UNITS_MIN * BATCH_UNIT.size or BATCH_UNIT.unpack_from(raw)[4] != offset:
            return None
        return Walk(queue, at, visible, raw)

    def _read(self, wanted: Sequence[_Wanted]) -> dict[Place, Slices]:
        raw = b"".join([each.walk.raw for each in wanted])
        units = np.frombuffer(raw, BATCH_ROW)
        least = units["size"].astype(np.int64)
        for each in wanted:
            least[each.begin : each.stop] -= besides_max(each.walk.queue)
        ends = least.cumsum()
        is_taken = np.zeros(len(units), np.bool_)
        queue_lies = np.empty(len(units), np.uint32)
        taken: list[tuple[_Wanted, int]] = []
        for each in wanted:
            begin, stop = each.begin, each.stop
            before = int(ends[begin - 1]) if begin else 0
            count = int(ends[begin:stop].searchsorted(before + each.bytes_max, "right"))
            if 0 < count < stop - begin:
                is_taken[begin : begin + count] = True
                queue_lies[begin : begin + count] = as_it_lies(each.walk.queue.key.queue_id)
                taken.append((each, count))
        if not taken:
            return {}
        chosen = np.flatnonzero(is_taken)
        positions = units["position"][chosen].astype(np.int64)
        entry_ends = positions + units["size"][chosen]
        low, high = int(positions.min()), int(entry_ends.max())
        ground = self._ground(low, high - low) if high - low <= _SPAN_BYTES_MAX else None
        if ground is None or not ground.low <= low < high <= ground.high:
            return {}
        found = batches_at(
            ground.view,
            np.frombuffer(raw, UNIT_AS_IT_LIES)[chosen],
            positions - ground.base,
            entry_ends - positions,
            queue_lies[chosen],
        )
        if found is None:
            return {}
        slices, sizes = found
        return self._shared_out(taken, slices, sizes.cumsum())

    def _shared_out(
        self,
        taken: Iterable[tuple[_Wanted, int]],
        slices: list[memoryview],
        body_ends: npt.NDArray[np.int64],
    ) -> dict[Place, Slices]:
        """To each read those of the batches looked at for it that have room."""
        shares: dict[Place, Slices] = {}
        at = before = 0
        for each, count in taken:
            own_ends = body_ends[at : at + count]
            # The first is given whatever its size.
            fit = max(1, int(own_ends.searchsorted(before + each.bytes_max, "right")))
            last = BATCH_UNIT.unpack_from(each.walk.raw, (fit - 1) * BATCH_UNIT.size)
            position, size, _, _, first, narrow, _, wide = last
            own = Slices(
                list[Buffer](slices[at : at + fit]),
                int(own_ends[fit - 1]) - before,
                first + (wide or narrow),
            )
            shares[each.place] = self._found(each.walk, each.walk.at + fit, position + size, own)
            at, before = at + count, int(own_ends[-1])
        return shares
