"""This module reads partitions for Kafka's clients: batches as they lie in the log, and messages of
RocketMQ's producers as batches that show them.

Neighbouring messages become one batch. What a batch of Kafka's says of its own place is compared
with the place that it has: bytes that somebody else wrote as if they were one are not served.
"""

from __future__ import annotations

from functools import partial
from struct import Struct
from typing import Final, NamedTuple

from sluice.broker.core import BrokerCore
from sluice.broker.kafka_partitions import KafkaTopic
from sluice.broker.kafka_slices import UNITS_MAX, SliceReader
from sluice.broker.retry_forms import origin_of
from sluice.errors import RecordDamaged
from sluice.model import Buffer
from sluice.protocol import kafka_batches, kafka_entries, kafka_views, records
from sluice.protocol.kafka_batches import Header
from sluice.storage.store import ReadResult, ReadStatus

_HEAD: Final = Struct(">i16xq8xi44xi")  # size, queue offset, sys flag, body size: with IPv4 hosts
_BODY_SIZE: Final = Struct(">i")
_V6_HOSTS: Final = records.SYS_BORN_V6 | records.SYS_STORE_V6
_BATCH: Final = Struct(">qi4xb")  # base offset, length, magic
_OUTSIDE: Final = (ReadStatus.OFFSET_TOO_SMALL, ReadStatus.OFFSET_OVERFLOW_BADLY)


class Read(NamedTuple):
    """What one partition has from an offset on; `is_outside`: there is no such offset."""

    slices: list[Buffer]
    byte_count: int
    next_offset: int
    is_outside: bool = False


def read_batches(
    core: BrokerCore,
    topic: KafkaTopic,
    partition: int,
    offset: int,
    stop: int,
    bytes_max: int,
    reader: SliceReader | None = None,
) -> Read:
    """Batches from `offset` on that begin below `stop`, up to which all is confirmed. May raise
    `ColdRead`.

    `reader` remembers where reads ended, and what is in memory.
    """
    queue = core.store.queues.get((topic.stored, partition))
    if queue is not None and queue.start_offset <= offset < stop:
        found = (reader or SliceReader(core.store)).read(queue, offset, stop, bytes_max)
        if found is not None:
            return Read(*found[:3])
    result = core.store.read(
        topic.stored, partition, offset, count_max=UNITS_MAX, bytes_max=bytes_max
    )
    low, high = result.min_offset, result.max_offset
    if result.status is ReadStatus.NO_MATCHED_LOGIC_QUEUE:
        return Read([], 0, offset, offset != 0)
    if result.status is not ReadStatus.FOUND:
        is_outside = result.status in _OUTSIDE or not low <= offset <= high
        return Read([], 0, offset, is_outside)
    return _batches(core, topic, result, stop)


def _batches(core: BrokerCore, topic: KafkaTopic, result: ReadResult, stop: int) -> Read:
    slices: list[Buffer] = []
    plain: list[records.Entry] = []
    byte_count, next_offset = 0, result.next_offset
    append_time = topic.append_time
    unpacked_max = core.config.kafka_unpacked_bytes_max
    more = partial(_of_dead_letter, core, topic.dead_group) if topic.dead_group else None

    def flush() -> None:
        nonlocal byte_count
        if plain:
            shown = kafka_views.batch_of(plain, unpacked_max, append_time=append_time, more=more)
            slices.append(shown)
            byte_count += len(shown)
            plain.clear()

    for piece in result.slices:
        at, end = 0, len(piece)
        while at < end:
            size, offset, sys_flag, body_bytes = _HEAD.unpack_from(piece, at)
            if offset >= stop:
                next_offset = offset
                flush()
                return Read(slices, byte_count, next_offset)
            if sys_flag & kafka_entries.KAFKA_FLAGS == kafka_entries.KAFKA_FLAGS:
                flush()
                body_at = at + 88
                if sys_flag & _V6_HOSTS:
                    body_at = at + records.origin_place(sys_flag) + 12
                    (body_bytes,) = _BODY_SIZE.unpack_from(piece, body_at - 4)
                base, length, magic = _BATCH.unpack_from(piece, body_at)
                if base != offset or length + 12 != body_bytes or magic != kafka_batches.MAGIC:
                    raise RecordDamaged(topic.stored, offset, "no batch is where one must be")
                slices.append(piece[body_at : body_at + body_bytes])
                byte_count += body_bytes
            else:
                entry = records.decode(piece, at)
                if plain and entry.queue_offset != plain[-1].queue_offset + 1:
                    flush()
                plain.append(entry)
            at += size
    flush()
    return Read(slices, byte_count, next_offset)


def _of_dead_letter(core: BrokerCore, group: str, entry: records.Entry) -> tuple[Header, ...]:
    """Headers that say where a dead letter came from; of which group it is, the topic says."""
    origin = origin_of(entry, group)
    stored = origin.topic.decode("utf-8", "replace")
    name = core.kafka_topics.kafka_name(stored) or stored
    found = (
        ("rmq.origin.topic", name.encode()),
        ("rmq.origin.partition", origin.queue_id),
        ("rmq.origin.offset", origin.queue_offset),
        ("rmq.origin.msgid", origin.message_id),
        ("rmq.reconsume.times", b"%d" % entry.reconsume_times),
    )
    return tuple((header, value) for header, value in found if value)
