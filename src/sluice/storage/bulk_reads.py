"""This module reads long stretches of a queue: megabytes of entries in few steps, as they lie.

An ordinary read looks at each entry by itself; that is right for a consumer that wants some tens
of them, and too slow for whoever reads a topic from end to end. Here the queue's units and the
heads of the entries are compared column by column. Checksums are left to the reader, which has to
compute them anyway to know that nothing broke on the way: so the entry's body is not touched here.

It sees nothing above the confirmed position, and raises `ColdRead` where the disk must be asked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from sluice.model import PropertyFilter
from sluice.storage.queue_index import FILLER_SIZE, SIMPLE_ROW, QueueIndex
from sluice.storage.reads import SCAN_UNITS_MAX, Accept, ReadResult, ReadStatus, outside

if TYPE_CHECKING:
    from sluice.storage.store import Store

Numbers = npt.NDArray[np.int64]

UNITS_MAX: Final = 16_384  # looked at in one read: a millisecond or two of the event loop
_RUNS_MAX: Final = 64  # more pieces than this are joined: the socket takes few long ones better
_SAMPLES: Final = 32  # stretches by which the bytes of a long range are told ...
_SAMPLE_UNITS: Final = 64  # ... and units of each
# Where an entry has its size, queue, offset and position.
_SIZE: Final = (0, ">i4")
_QUEUE: Final = (12, ">i4")
_OFFSET: Final = (20, ">i8")
_POSITION: Final = (28, ">i8")
_HEAD_BYTES: Final = 36


class Stretch(NamedTuple):
    """What a bulk read found: a `ReadResult`, and the size of each of its entries."""

    result: ReadResult
    sizes: Numbers


def read_stretch(
    store: Store,
    topic: str,
    queue_id: int,
    offset: int,
    *,
    to_offset: int,
    bytes_max: int,
    accept: Accept | None = None,
) -> Stretch:
    """Entries from `offset` on and below `to_offset`: the first whatever its size, then at most
    `bytes_max`. With a filter, `next_offset` may go forward although nothing was found.
    """
    queue = store.queues.get((topic, queue_id))
    is_plain = queue is not None and queue.unit_bytes == SIMPLE_ROW.itemsize
    if queue is None or not is_plain or isinstance(accept, PropertyFilter):
        result = store.read(
            topic,
            queue_id,
            offset,
            count_max=max(1, min(SCAN_UNITS_MAX, to_offset - offset)),
            bytes_max=bytes_max,
            accept=accept,
        )
        return Stretch(result, np.array([len(one) for one in result.messages], np.int64))
    reader = store.reader
    low, high = queue.start_offset, reader.max_offset(queue, store.confirmed)
    nothing = np.zeros(0, np.int64)
    if not low <= offset < high:
        return Stretch(outside(offset, low, high), nothing)
    stop = min(reader.visible_units(queue, store.confirmed), to_offset, offset + UNITS_MAX)
    if stop <= offset:
        return Stretch(ReadResult(ReadStatus.NO_MATCHED_MESSAGE, offset, low, high), nothing)
    rows = np.frombuffer(queue.units(offset, stop, store.queue_files, wait=False), SIMPLE_ROW)
    chosen = _wanted(rows, accept)
    sizes = rows["size"][chosen].astype(np.int64)
    count = len(sizes)
    if count:
        count = max(1, int(np.searchsorted(np.cumsum(sizes), bytes_max, "right")))
    next_offset = offset + int(chosen[count]) if count < len(chosen) else stop
    chosen, sizes = chosen[:count], sizes[:count]
    if not count:
        return Stretch(ReadResult(ReadStatus.NO_MATCHED_MESSAGE, next_offset, low, high), nothing)
    slices = _slices(store, queue, rows["position"][chosen].astype(np.int64), sizes, chosen, offset)
    byte_count = int(sizes.sum())
    result = ReadResult(ReadStatus.FOUND, next_offset, low, high, slices, count, byte_count)
    return Stretch(result, sizes)


def _wanted(rows: npt.NDArray[Any], accept: Callable[[int], bool] | None) -> Numbers:
    """The numbers of the units that are entries, and wanted."""
    wanted = rows["size"] != FILLER_SIZE
    if accept is not None:
        # Tags are few: each is asked about once.
        codes, which = np.unique(rows["code"], return_inverse=True)
        verdicts = np.fromiter(map(accept, codes.tolist()), np.bool_, len(codes))
        wanted = wanted & verdicts[which]
    return np.flatnonzero(wanted)


def _slices(
    store: Store,
    queue: QueueIndex,
    positions: Numbers,
    sizes: Numbers,
    chosen: Numbers,
    first_offset: int,
) -> list[memoryview]:
    log = store.log
    ends = positions + sizes
    # Neighbours in the log go out as one slice; a file's end is never inside of one.
    breaks = np.flatnonzero((ends[:-1] != positions[1:]) | (positions[1:] % log.segment_bytes == 0))
    firsts = np.concatenate(([0], breaks + 1))
    lasts = np.concatenate((breaks, [len(positions) - 1]))
    runs = list(zip(positions[firsts].tolist(), ends[lasts].tolist(), strict=True))
    store.reader.require_memory(runs)
    _check_heads(store, queue, positions, sizes, chosen + first_offset)
    pieces = [log.view(start, stop - start) for start, stop in runs]
    return pieces if len(pieces) <= _RUNS_MAX else [memoryview(b"".join(pieces))]


def _check_heads(
    store: Store, queue: QueueIndex, positions: Numbers, sizes: Numbers, offsets: Numbers
) -> None:
    """Compare entries with what the queue says of them; raises RecordDamaged with the first that
    is something else.
    """
    log = store.log
    bases = positions - positions % log.segment_bytes
    for base in np.unique(bases).tolist():
        own = np.flatnonzero(bases == base)
        ats = positions[own] - base
        view = log.segments[base].file.view(int(ats[0]))
        fields = _columns(view, ats)
        wrong = next(fields) != sizes[own]
        wrong |= next(fields) != queue.key.queue_id
        wrong |= next(fields) != offsets[own]
        wrong |= next(fields) != positions[own]
        if wrong.any():
            at = int(own[int(np.argmax(wrong))])
            reason = "the queue's unit does not match the entry"
            raise store.reader.damaged(int(positions[at]), int(offsets[at]), reason)


def _columns(view: memoryview, ats: Numbers) -> Iterator[Numbers]:
    """Size, queue, offset and position in the heads at these places, all of each at once."""
    for offset, kind in (_SIZE, _QUEUE, _OFFSET, _POSITION):
        # The file as if every byte began an entry; of these, those that do.
        every: npt.NDArray[Any] = np.ndarray(
            (len(view) - _HEAD_BYTES + 1,), kind, view, offset, (1,)
        )
        yield every[ats].astype(np.int64)


def stretch_bytes(store: Store, topic: str, queue_id: int, start: int, stop: int) -> int:
    """How many bytes the entries of [start, stop) have; of long ranges told by samples.

    0 where nothing of it is there. May raise `ColdRead`.
    """
    queue = store.queues.get((topic, queue_id))
    start = max(start, store.min_offset(topic, queue_id))
    stop = min(stop, store.max_offset(topic, queue_id))
    if stop <= start:
        return 0
    if queue is None or queue.unit_bytes != SIMPLE_ROW.itemsize:
        found = store.read(topic, queue_id, start, count_max=_SAMPLE_UNITS, bytes_max=1 << 20)
        # An entry may have many offsets.
        return found.byte_count * (stop - start) // max(1, found.next_offset - start)
    if stop - start <= _SAMPLES * _SAMPLE_UNITS:
        return int(_sizes(store, queue, start, stop).sum())
    step = (stop - start - _SAMPLE_UNITS) // (_SAMPLES - 1)
    firsts = [start + index * step for index in range(_SAMPLES)]
    seen = sum(int(_sizes(store, queue, at, at + _SAMPLE_UNITS).sum()) for at in firsts)
    return seen * (stop - start) // (_SAMPLES * _SAMPLE_UNITS)


def _sizes(store: Store, queue: QueueIndex, start: int, stop: int) -> Numbers:
    rows = np.frombuffer(queue.units(start, stop, store.queue_files, wait=False), SIMPLE_ROW)
    sizes = rows["size"].astype(np.int64)
    sizes[sizes == FILLER_SIZE] = 0
    return sizes
