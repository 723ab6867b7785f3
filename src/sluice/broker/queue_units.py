"""This module reads the units of a queue column by column: places, sizes and times of thousands of
entries in one step, without a look at the log.

A queue that was compacted has two parts: what was kept of its beginning, and what came since.
Nothing here waits for the disk; where it would have to, `ColdRead` is raised.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from sluice.storage.queue_index import BATCH_ROW, SIMPLE_ROW, QueueIndex

if TYPE_CHECKING:
    from sluice.storage.store import Store

Columns = npt.NDArray[Any]
UNITS_AT_ONCE: Final = 65_536
_FILLER_SIZE: Final = 0x7FFFFFFF
# A tag's hash has 32 bits; a code above it is of a batch, and tells its time.
_TIMED_FROM: Final = 1 << 40


class Part(NamedTuple):
    """Units [first, stop) of a queue."""

    queue: QueueIndex
    first: int
    stop: int


def parts_of(store: Store, queue: QueueIndex) -> list[Part]:
    """The units that readers see, in the order of their offsets."""
    visible, older = store.reader.visible_units(queue, store.confirmed), queue.older
    if older is None:
        return [Part(queue, queue.first, visible)]
    files = store.queue_files
    first = queue.seek(max(older.upto, older.start), files, wait=False)
    kept = older.queue
    if older.start >= older.upto or kept.count <= kept.first:
        return [Part(queue, first, visible)]
    kept_first = kept.seek(older.start, files, wait=False)
    return [Part(kept, kept_first, kept.count), Part(queue, first, visible)]


def columns(store: Store, part: Part) -> Iterator[tuple[int, Columns]]:
    """The units of a part, many at once, with the number of the first of them."""
    queue, at, stop = part
    shape = BATCH_ROW if queue.kind == "b" else SIMPLE_ROW
    while at < stop:
        upto = min(stop, at + UNITS_AT_ONCE)
        raw = queue.units(at, upto, store.queue_files, wait=False)
        yield at, np.frombuffer(bytes(raw), shape)
        at = upto


def times_ms(units: Columns) -> Columns:
    """The highest timestamp of each batch; the store's time where a unit tells none."""
    codes = units["code"]
    return np.where(codes >= _TIMED_FROM, codes >> 16, units["store_ms"])


def ends(units: Columns) -> Columns:
    """The offset behind each batch."""
    counts = np.where(units["true_count"] > 0, units["true_count"], units["count"])
    return units["offset"].astype(np.int64) + counts


def sizes(units: Columns) -> npt.NDArray[np.int64]:
    """The bytes that each entry has in the log."""
    result = units["size"].astype(np.int64)
    result[result == _FILLER_SIZE] = 0
    return result
