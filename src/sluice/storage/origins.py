"""This module finds entries that were made from other entries: a timer that fired, a transaction
that was committed, a message that is tried again.

Such an entry names the position of the one it was made from, its origin. A service that keeps how
far it has come writes that down from time to time; after a crash it walks the log from there on and
knows exactly what was made since, so nothing is made twice and nothing is left out. Only the broker
can write an origin: no request carries one.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Final, NamedTuple

from sluice.protocol import records
from sluice.storage.commit_log import CommitLog

_HEAD: Final = struct.Struct(">ii28xi")  # size, magic, sys flag
_ORIGIN: Final = struct.Struct(">q")


class Made(NamedTuple):
    """An entry that was made from another one."""

    origin: int
    position: int
    size: int
    topic: str


def origin_at(log: CommitLog, position: int) -> int:
    """The origin of the entry at a position, 0 where it has none; reads the log as it lies."""
    at = position % log.segment_bytes
    view = log.segments[position - at].file.view()
    _, _, sys_flag = _HEAD.unpack_from(view, at)
    (origin,) = _ORIGIN.unpack_from(view, at + records.origin_place(sys_flag))
    return int(origin)


def made_since(log: CommitLog, position: int) -> Iterator[Made]:
    """All entries from `position` on that have an origin; `position` is where an entry begins.

    Entries that retention took are left out. It reads the log, which may wait for the disk: it is
    for the start of a broker, before anybody is served.
    """
    position = max(position, log.start)
    while position < log.written:
        at = position % log.segment_bytes
        view = log.segments[position - at].file.view()
        if log.segment_bytes - at < records.BLANK_BYTES:
            position += log.segment_bytes - at
            continue
        size, magic = records.peek(view, at)
        if magic == records.MAGIC_BLANK:
            position += log.segment_bytes - at
            continue
        _, _, sys_flag = _HEAD.unpack_from(view, at)
        (origin,) = _ORIGIN.unpack_from(view, at + records.origin_place(sys_flag))
        if origin:
            yield Made(origin, position, size, records.decode(view, at, position).topic)
        position += size
