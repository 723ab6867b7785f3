"""This module stages images: megabytes of messages to one queue that came in the log's own layout.

It does what `Lane.place_batch` does for a producer's batch, and no message of it is looked at by
itself (`protocol/record_images.py`), unless it has properties beside its key. An entry that only
holds them for later goes to the log as it came, without a copy (`stage_large`). This module keeps
nothing; everything belongs to the store.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np
from isal.isal_zlib import crc32

from sluice.model import Buffer
from sluice.protocol import records
from sluice.protocol.record_images import Images, completed, rest_bytes
from sluice.protocol.record_runs import BatchShape
from sluice.storage.commit_log import CommitLog
from sluice.storage.flush import Confirmed
from sluice.storage.key_batches import KeyColumns, Noted
from sluice.storage.lanes import Lane
from sluice.storage.queue_index import SIMPLE_ROW

if TYPE_CHECKING:
    from sluice.storage.store import Store

_HOST_BYTES: Final = Lane.HOST_BYTES
_BLOCK_BYTES: Final = 2 << 20
_EARLY_BYTES: Final = 512 << 10  # what is less is written with its turn
_MASK_31: Final = 0x7FFFFFFF


class PlacedImages(NamedTuple):
    """What the messages of images have become."""

    message_count: int
    byte_count: int
    tags_codes: set[int]


def stage_large(
    store: Store,
    topic: str,
    parts: Sequence[Buffer],
    properties: bytes,
    born_ms: int,
    born_host: bytes,
    done: Confirmed,
) -> int:
    """Stage an entry without keys in queue 0 of a topic of the broker's own; its position. `parts`
    are its body, which no limit of messages holds for; `done` is called exactly once.
    """
    store.require_writable()
    queue, encoder = store.queue(topic, 0), store.encoder
    shape, magic, field, sys_flag = encoder.shape(queue.topic_bytes, 0, born_host)
    body_bytes, crc_bytes = sum(map(len, parts)), encoder.crc_bytes
    tail = b"".join((field, (len(properties) + crc_bytes).to_bytes(2, "big"), properties))
    size = shape.size + body_bytes + len(tail) + crc_bytes
    store.require_room(size)
    store_ms = store.turn_ms()
    position, offset = store.log.position_for(size), queue.next_offset
    head = shape.pack(
        *(size, magic, _crc_of(parts) & _MASK_31, 0, 0, offset, position, sys_flag),
        *(born_ms, born_host, store_ms, encoder.store_host, 0, 0, body_bytes),
    )
    if crc_bytes:
        tail += records.crc_property(_crc_of((head, *parts, tail)))
    for part in (head, *parts, tail):
        store.log.stage(part)
    unit = queue.pack(position, size, 0, store_ms, offset, 1)
    queue.next_offset = offset + 1
    store.staged.append((queue, unit, 1, (), position + size, done, False))
    return position


def _crc_of(parts: Sequence[Buffer]) -> int:
    found = 0
    for part in parts:
        found = crc32(part, found)
    return found


def takes_images(store: Store, topic: str, queue_id: int, born_host: bytes) -> bool:
    """Whether entries of a queue have the form that images have."""
    return (
        Lane.fits(store, topic, queue_id, 0, born_host)
        and len(store.encoder.store_host) == _HOST_BYTES
    )


def place_images(
    store: Store,
    images: Images,
    topic: str,
    queue_id: int,
    born_ms: int,
    born_host: bytes,
    origin: int,
) -> PlacedImages:
    """Give the messages of sealed images their places, one after the other, with the position of
    the entry that they are made from. The queue is to be one that `takes_images`; nobody is told
    when they are confirmed, see `lanes.tell`.
    """
    store.require_writable()
    byte_count, count = len(images.data), len(images)
    store.require_room(byte_count)
    queue = store.queue(topic, queue_id)
    encoder, name = store.encoder, queue.topic_bytes
    _, magic, field, sys_flag = encoder.shape(name, 0, born_host)
    shape = BatchShape(
        *(magic, field, sys_flag, queue_id, rest_bytes(name), encoder.body_bytes_max),
        *(encoder.properties_bytes_max, encoder.entry_bytes_max, encoder.store_host),
    )
    store_ms = store.turn_ms()
    middle = shape.middle(born_ms, born_host, store_ms, origin)
    position, offset = store.log.position_for(byte_count), queue.next_offset
    _stage(store.log, images, shape, middle, offset)
    codes, found = _noted(images, name, position, store_ms)
    units = np.empty(count, SIMPLE_ROW)
    units["position"] = images.starts + position
    units["size"] = images.sizes
    units["code"] = codes
    queue.next_offset = offset + count
    end = position + byte_count
    store.staged.append((queue, units.tobytes(), count, found, end, None, False))
    return PlacedImages(count, byte_count, set(codes))


def _stage(log: CommitLog, images: Images, shape: BatchShape, middle: bytes, offset: int) -> None:
    """Stage the entries block by block: one is written while the next is made."""
    is_large = len(images.data) >= _EARLY_BYTES
    for block in completed(images, shape, middle, offset, log.end, _BLOCK_BYTES):
        log.stage(block)
        if is_large:
            log.write_early()


def _noted(
    images: Images, topic: bytes, position: int, store_ms: int
) -> tuple[list[int], Sequence[Noted]]:
    """The code of each message's tag (one for all where they are the same), and the keys."""
    keys = images.keys()
    if keys is not None:
        places = position + images.starts[keys.rows]
        columns = KeyColumns(topic, keys.joined, keys.lengths, places, store_ms)
        return [0], (columns,) if len(keys.rows) else ()
    several = [records.message_keys(properties) for _, _, properties in images.parts()]
    java_hash = records.java_hash
    codes = [java_hash(tag) if tag else 0 for _, _, tag in several]
    positions = (images.starts + position).tolist()
    return codes, [(topic, each, at, store_ms) for each, at in zip(several, positions, strict=True)]
