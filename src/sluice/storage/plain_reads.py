"""This module answers the usual read in one walk: everything of a queue from an offset on.

It finds what `Reader` finds in the plain case: units that point to entries of one file, which this
process wrote or scanned, in memory. Each unit is compared with its entry, as there. Of everything
else it says nothing (None), also where something is not as it must be, and the general way finds
out and has the words for it.
"""

from __future__ import annotations

from struct import Struct
from typing import Final

from sluice.storage.commit_log import CommitLog
from sluice.storage.queue_index import SIMPLE_UNIT

_HEAD: Final = Struct(">i8xi4xqq")  # size, queue id, queue offset, position

# Slices of the log that are so many entries with so many bytes.
Found = tuple[list[memoryview], int, int]


def plain_slices(
    log: CommitLog,
    queue_id: int,
    raw: bytes | bytearray,
    offset: int,
    bytes_max: int,
    trusted_from: int,
    hot_from: int,
) -> Found | None:
    """The entries of some units, the first of which has this offset: that one whatever its size,
    then within the limit.
    """
    if not raw:
        return None
    first, _, _ = SIMPLE_UNIT.unpack_from(raw)
    last, last_size, _ = SIMPLE_UNIT.unpack_from(raw, len(raw) - SIMPLE_UNIT.size)
    base = first - first % log.segment_bytes
    end = last + last_size
    segment = log.segments.get(base)
    if segment is None or not trusted_from <= first < end <= base + log.segment_bytes:
        return None
    if first < hot_from and not segment.file.resident(first - base, end - base):
        return None
    view, unpack = segment.file.view(first - base), _HEAD.unpack_from
    slices: list[memoryview] = []
    run, run_end, count, byte_count = first, first, 0, 0
    for position, size, _ in SIMPLE_UNIT.iter_unpack(raw):
        if size < _HEAD.size or not run_end <= position <= end - size:
            return None
        if count and byte_count + size > bytes_max:
            break
        if unpack(view, position - base) != (size, queue_id, offset, position):
            return None
        if position != run_end:
            # Neighbours in the log go out as one slice.
            slices.append(view[run - base : run_end - base])
            run = position
        run_end = position + size
        byte_count += size
        count += 1
        offset += 1
    slices.append(view[run - base : run_end - base])
    return slices, count, byte_count
