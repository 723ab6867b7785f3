"""This module lets records of Kafka's producers come later, on topics that allow it.

A record says when in a header of RocketMQ's name: DELAY (a level), TIMER_DELAY_SEC, TIMER_DELAY_MS
or TIMER_DELIVER_MS, a whole number as text. It is taken out of its batch and waits as a message of
RocketMQ's does. What is left of the batch is stored as what compaction would leave: its offsets and
sequence numbers are all taken, so producers go on as ever, and a batch that comes twice is known.
When its time has come the record is at the end of the partition, with all its headers.

Only topics with sluice.delay.headers=true do that: elsewhere such headers are headers.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final, NamedTuple

from sluice.model import Buffer, Message
from sluice.protocol import kafka_batches, kafka_codes, kafka_views
from sluice.protocol.kafka_batches import BadBatch, BatchHead, Record

if TYPE_CHECKING:
    from sluice.broker.core import BrokerCore

NAMES: Final = frozenset({"DELAY", "TIMER_DELAY_SEC", "TIMER_DELAY_MS", "TIMER_DELIVER_MS"})
_DIGITS_MAX: Final = 19


class Split(NamedTuple):
    """What is stored now, and what waits."""

    head: BatchHead
    batch: Buffer
    waiting: list[Message]


def split(
    core: BrokerCore, topic: str, queue_id: int, head: BatchHead, data: Buffer, born_host: bytes
) -> Split:
    """Part a batch; raises `BadBatch` or `MessageIllegal` where a record asks for no time."""
    kept: list[Record] = []
    waiting: list[Message] = []
    for record in kafka_batches.read_records(head, data, core.config.kafka_unpacked_bytes_max):
        message = kafka_views.message_of(topic, queue_id, head, record, born_host)
        stored = waiting_form(core, message, record)
        if stored is None:
            kept.append(record)
        else:
            waiting.append(stored)
    if not waiting:
        return Split(head, data, waiting)
    if head.is_transactional:
        raise BadBatch(
            kafka_codes.INVALID_RECORD, "a record of a transaction cannot come later than it"
        )
    inside = bytearray()
    for record in kept:
        kafka_batches.put_record(inside, record)
    codec, packed = kafka_batches.pack(head.codec, inside) if kept else (0, b"")
    batch = kafka_batches.wrap(
        *(0, head.base_ms, head.max_ms, packed),
        last_delta=head.last_delta,
        count=len(kept),
        attributes=head.attributes & ~kafka_batches.CODEC_MASK | codec,
        producer=(head.producer_id, head.producer_epoch, head.base_sequence),
    )
    return Split(kafka_batches.read_sent(batch), batch, waiting)


def waiting_form(core: BrokerCore, message: Message, record: Record) -> Message | None:
    """What waits for a record that is stored as this message; None where it comes at once."""
    asked = _asked(record)
    if not asked:
        return None
    wanted = replace(message, properties=message.properties + asked)
    stored = core.delays.requested_form(wanted)
    return None if stored is wanted else stored


def _asked(record: Record) -> bytes:
    """The properties by which a record says when it is due; empty where it does not."""
    found = b""
    for name, value in record.headers:
        if name not in NAMES:
            continue
        if value is None or not value.isdigit() or len(value) > _DIGITS_MAX:
            raise BadBatch(
                kafka_codes.INVALID_RECORD, f"the header {name} is no whole number as text"
            )
        found += b"%s\x01%s\x02" % (name.encode(), value)
    return found
