"""This module stages runs: a producer's batch to one queue, as fast as a batch can be.

It does what `Store.stage_batch` does for messages that have all but their bodies, flags and
properties in common. It keeps nothing; everything belongs to the store.
"""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

from sluice.errors import MessageIllegal
from sluice.protocol import records
from sluice.protocol.record_runs import Run, encode_run, measure_run
from sluice.storage.flush import Confirmed
from sluice.storage.indexing import indexed
from sluice.storage.key_batches import Found
from sluice.storage.queue_index import SIMPLE_UNIT, QueueIndex

if TYPE_CHECKING:
    from sluice.storage.store import Store

Keys = tuple[bytes, bytes, bytes]


class PlacedRun(NamedTuple):
    """Where the messages of a run went: one after the other in the log and in their queue."""

    positions: list[int]
    byte_count: int
    queue_offset: int


def stage_run(store: Store, run: Run, keys: list[Keys], done: Confirmed) -> PlacedRun:
    """Give all messages of a run their places, or raise why none gets one; `keys` are what
    `records.message_keys` finds in each.
    """
    store.require_writable()
    if not run.parts:
        raise MessageIllegal("an empty batch")
    queue = store.queues.get((run.topic, run.queue_id)) or store.new_queue(run.message(0))
    topic = queue.topic_bytes
    plain = queue.kind == QueueIndex.kind and topic != records.SCHEDULE_TOPIC
    if not plain or run.sys_flag & records.SYS_INNER_BATCH:
        messages = [run.message(index) for index in range(len(run.parts))]
        placed = store.stage_batch(messages, done, keys)
        positions = [place.position for place in placed]
        return PlacedRun(positions, placed[-1].end - positions[0], placed[0].queue_offset)
    sizes = measure_run(store.encoder, run, topic)
    byte_count = sum(sizes)
    store.require_room(byte_count)
    store_ms = store.turn_ms()
    offset = queue.next_offset
    position = store.log.position_for(byte_count)
    entries = encode_run(store.encoder, run, topic, sizes, offset, position, store_ms)
    *positions, end = accumulate(sizes, initial=position)
    java_hash = records.java_hash
    codes = [java_hash(tag) if tag else 0 for _, _, tag in keys]
    units = b"".join(map(SIMPLE_UNIT.pack, positions, sizes, codes))
    found: list[Found] = []
    if indexed(run.sys_flag):
        found = [(topic, key, at, store_ms) for key, at in zip(keys, positions, strict=True)]
    store.log.stage(b"".join(entries))
    assert sum(map(len, entries)) == byte_count, "the sizes decided the places"
    queue.next_offset = offset + len(sizes)
    store.staged.append((queue, units, len(sizes), found, end, done, False))
    return PlacedRun(positions, byte_count, offset)
