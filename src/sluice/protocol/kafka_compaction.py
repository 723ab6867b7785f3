"""This module compacts batches and messages: of the records of each key the newest stays.

It is told which record of a key is the newest, and gives back what is left of an entry: all of it,
a batch with fewer records, or nothing. Offsets never change; a batch from which records were taken
has the same first and last offset as before, as with Kafka's broker.

    a record whose key has a newer one                 goes
    a record without a key, of Kafka's producers       goes: nobody can replace it
    a message without a key, of RocketMQ's producers   stays: it was accepted, and is not lost
    a record without a value, a tombstone              stays for a time, so that readers learn of it
    marks of transactions, what was rolled back        goes

The first time that a tombstone is met, its batch gets the time until which it stays (its horizon),
in Kafka's own form: flag 0x40, and that time as the base timestamp, from which the records' times
are counted. What stays belongs to no producer and no transaction any more: those were decided, and
sequence numbers are known from elsewhere. Pure.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from typing import Final, NamedTuple

from sluice.protocol import kafka_batches, kafka_entries, kafka_views, records
from sluice.protocol.kafka_batches import BadBatch, BatchHead, Record

_SHORT_KEY_BYTES: Final = 24
_KEPT_ATTRIBUTES: Final = kafka_batches.CODEC_MASK | kafka_batches.APPEND_TIME


class Rules(NamedTuple):
    """What decides whether a record stays."""

    newest: Mapping[bytes, int]  # key, in its short form -> the offset of its newest record
    now_ms: int
    tombstone_ms: int  # how long tombstones stay
    unpacked_max: int


class Kept(NamedTuple):
    """What is left of an entry: a batch, or the message as it is where `batch` is None."""

    batch: bytes | None
    head: BatchHead | None
    record_count: int


def short(key: bytes) -> bytes:
    """A key, or what stands for a long one."""
    if len(key) <= _SHORT_KEY_BYTES:
        return key
    return hashlib.blake2b(key, digest_size=_SHORT_KEY_BYTES + 1).digest()


def head_of(entry: records.Entry) -> BatchHead | None:
    """The head of the batch that an entry holds; None for a message."""
    return kafka_batches.read_head(entry.body) if kafka_entries.is_kafka(entry.sys_flag) else None


def end_of(entry: records.Entry) -> int:
    """The offset behind an entry."""
    if not entry.sys_flag & records.SYS_INNER_BATCH:
        return entry.queue_offset + 1
    return entry.queue_offset + records.offset_count(entry.sys_flag, entry.properties)


def keys_of(entry: records.Entry, unpacked_max: int) -> Iterator[tuple[bytes, int]]:
    """The keys of an entry's records, in their short form, with the records' offsets."""
    head = head_of(entry)
    if head is None:
        key = _message_key(entry)
        if key is not None:
            yield short(key), entry.queue_offset
        return
    for record in kafka_batches.read_records(head, entry.body, unpacked_max):
        if record.key is not None:
            yield short(record.key), entry.queue_offset + record.offset_delta


def kept_of(entry: records.Entry, rules: Rules) -> Kept | None:
    """What stays of an entry that no transaction has rolled back; None: nothing.

    Raises `BadBatch` where the entry cannot be read.
    """
    head = head_of(entry)
    if head is None:
        return _kept_message(entry, rules)
    if head.is_control:
        return None
    has_horizon = head.attributes & kafka_batches.HORIZON != 0
    is_over = has_horizon and head.base_ms <= rules.now_ms
    found = kafka_batches.read_records(head, entry.body, rules.unpacked_max)
    left = [
        record
        for record in found
        if record.key is not None
        and rules.newest.get(short(record.key), -1) <= entry.queue_offset + record.offset_delta
        and not (is_over and record.value is None)
    ]
    if not left:
        return None
    has_tombstone = any(record.value is None for record in left)
    if len(left) == len(found) and has_horizon == has_tombstone:
        attributes = head.attributes & (_KEPT_ATTRIBUTES | kafka_batches.HORIZON)
        inside = bytes(entry.body[kafka_batches.HEAD_BYTES :])
        return _kept(head, head.base_ms, head.max_ms, attributes, inside, len(left))
    base_ms = head.base_ms
    if has_tombstone != has_horizon:
        base_ms = rules.now_ms + rules.tombstone_ms if has_tombstone else head.max_ms
    return _rebuilt(head, left, base_ms, has_horizon=has_tombstone)


def _rebuilt(head: BatchHead, left: list[Record], base_ms: int, *, has_horizon: bool) -> Kept:
    """A batch of these records, whose times are counted from `base_ms`."""
    inside = bytearray()
    for record in left:
        time_delta = head.base_ms + record.time_delta - base_ms
        kafka_batches.put_record(inside, record._replace(time_delta=time_delta))
    max_ms = head.max_ms
    if not head.attributes & kafka_batches.APPEND_TIME:
        max_ms = head.base_ms + max(record.time_delta for record in left)
    codec, packed = kafka_batches.pack(head.codec, inside)
    attributes = head.attributes & kafka_batches.APPEND_TIME | codec
    if has_horizon:
        attributes |= kafka_batches.HORIZON
    return _kept(head, base_ms, max_ms, attributes, packed, len(left))


def _kept(
    head: BatchHead, base_ms: int, max_ms: int, attributes: int, inside: bytes, count: int
) -> Kept:
    batch = kafka_batches.wrap(
        head.base_offset,
        base_ms,
        max_ms,
        inside,
        last_delta=head.last_delta,
        count=count,
        attributes=attributes,
    )
    return Kept(batch, kafka_batches.read_head(batch), count)


def _kept_message(entry: records.Entry, rules: Rules) -> Kept | None:
    key = _message_key(entry)
    if key is not None and rules.newest.get(short(key), -1) > entry.queue_offset:
        return None
    if key is None or entry.body or "__KAFKA_NULL" not in _properties(entry):
        return Kept(None, None, 1)
    # A tombstone needs a horizon, which only a batch can have.
    batch = kafka_views.batch_of([entry], rules.unpacked_max, append_time=False)
    head = kafka_batches.read_head(batch)
    if head is None:
        raise BadBatch(0, "a message cannot be shown as a batch")
    found = kafka_batches.read_records(head, batch, rules.unpacked_max)
    return _rebuilt(head, found, rules.now_ms + rules.tombstone_ms, has_horizon=True)


def _properties(entry: records.Entry) -> dict[str, str]:
    return records.parse_properties(records.without_checksum(entry.properties))


def _message_key(entry: records.Entry) -> bytes | None:
    if entry.sys_flag & records.SYS_INNER_BATCH:
        return None  # many messages of RocketMQ's, stored whole: they stay together
    return kafka_views.record_of(0, 0, b"x", _properties(entry)).key
