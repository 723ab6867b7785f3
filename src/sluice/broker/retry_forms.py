"""This module makes the copies of a message that consumers could not handle: the one that is tried
again, the dead letter, and the dead letter that is sent once more.

Every copy says where the message came from: RETRY_TOPIC and ORIGIN_MESSAGE_ID as RocketMQ has them,
ORIGIN_QUEUE_ID and ORIGIN_QUEUE_OFFSET beside them. They are taken from the entry itself; of its
properties only where the broker wrote them, in the group's own retry topic: a producer can write
anything there. The copy's origin is the entry it was made from. Pure: values in, values out.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from sluice.broker.delay_forms import without
from sluice.broker.topics import DEAD_PREFIX, RETRY_PREFIX
from sluice.model import Message, message_id
from sluice.protocol import records

_TIMED: Final = (
    *(b"DELAY", b"TIMER_DELIVER_MS", b"TIMER_DELAY_MS", b"TIMER_DELAY_SEC", b"TIMER_OUT_MS"),
    *(b"TIMER_DEL_UNIQKEY", b"TIMER_ENQUEUE_MS", b"TIMER_DEQUEUE_MS", b"TIMER_ROLL_TIMES"),
    *(b"TIMER_ROLL_LABEL", b"REAL_TOPIC", b"REAL_QID"),
)
_ORIGIN: Final = (
    *(b"RETRY_TOPIC", b"ORIGIN_MESSAGE_ID", b"ORIGIN_QUEUE_ID", b"ORIGIN_QUEUE_OFFSET"),
    *(b"DLQ_ORIGIN_TOPIC", b"DLQ_ORIGIN_MESSAGE_ID"),
)
_TRIED: Final = (b"RECONSUME_TIME", b"MAX_RECONSUME_TIMES", b"POP_CK", b"TRAN_MSG", b"WAIT")
# What a copy gets anew, or has no more.
_DROPPED: Final = frozenset((*_TIMED, *_ORIGIN, *_TRIED, b"__CRC32#"))


class Origin(NamedTuple):
    """Where a message was before anybody failed with it; queue and offset may be unknown."""

    topic: bytes
    message_id: bytes
    queue_id: bytes
    queue_offset: bytes

    def properties(self) -> bytes:
        text = b"RETRY_TOPIC\x01%s\x02ORIGIN_MESSAGE_ID\x01%s\x02" % self[:2]
        if self.queue_id and self.queue_offset:
            text += b"ORIGIN_QUEUE_ID\x01%s\x02ORIGIN_QUEUE_OFFSET\x01%s\x02" % self[2:]
        return text


class Wait(NamedTuple):
    """How long a copy waits: a delay level, or a time; neither: not at all."""

    level: int = 0
    until_ms: int = 0

    def properties(self) -> bytes:
        if self.until_ms:
            return b"TIMER_DELIVER_MS\x01%d\x02" % self.until_ms
        return b"DELAY\x01%d\x02" % self.level if self.level else b""


NO_WAIT: Final = Wait()


def origin_of(entry: records.Entry, group: str) -> Origin:
    """Where the message of an entry came from, for a group that failed with it."""
    own = Origin(
        entry.topic.encode(),
        message_id(entry.store_host, entry.position).encode(),
        b"%d" % entry.queue_id,
        b"%d" % entry.queue_offset,
    )
    if entry.topic not in (f"{RETRY_PREFIX}{group}", f"{DEAD_PREFIX}{group}"):
        return own
    said = [records.property_value(entry.properties, name) or b"" for name in _ORIGIN[:4]]
    return Origin(said[0] or own.topic, said[1] or own.message_id, said[2], said[3])


def retry_form(
    entry: records.Entry, group: str, queue_id: int, times: int, wait: Wait = NO_WAIT
) -> Message:
    """The copy that the group gets again; it waits in its retry topic's name."""
    properties = (
        without(entry.properties, _DROPPED)
        + origin_of(entry, group).properties()
        + b"WAIT\x01false\x02"
        + wait.properties()
    )
    return _copy(entry, f"{RETRY_PREFIX}{group}", queue_id, properties, times)


def dead_form(entry: records.Entry, group: str, times: int) -> Message:
    """The dead letter of a group. RocketMQ's proxy reads the two properties that begin with DLQ."""
    origin = origin_of(entry, group)
    unique = records.property_value(entry.properties, b"UNIQ_KEY") or origin.message_id
    properties = (
        without(entry.properties, _DROPPED)
        + origin.properties()
        + b"WAIT\x01false\x02DLQ_ORIGIN_TOPIC\x01%s\x02" % origin.topic
        + b"DLQ_ORIGIN_MESSAGE_ID\x01%s\x02" % unique
    )
    return _copy(entry, f"{DEAD_PREFIX}{group}", 0, properties, times)


def topic_form(entry: records.Entry, topic: str, queue_id: int) -> Message:
    """A dead letter once more in the topic that it came from, for all who read it."""
    return _copy(entry, topic, queue_id, without(entry.properties, _DROPPED), 0)


def stray_form(message: Message, group: str, *, dead: bool) -> Message:
    """What is stored for a message that a client sends to a retry topic, of unknown origin."""
    properties = without(message.properties, (b"RECONSUME_TIME", b"MAX_RECONSUME_TIMES"))
    topic, queue_id = message.topic, message.queue_id
    if dead:
        topic, queue_id = f"{DEAD_PREFIX}{group}", 0
        origin = records.property_value(properties, b"RETRY_TOPIC") or message.topic.encode()
        unique = records.property_value(properties, b"UNIQ_KEY") or b""
        properties = without(properties, (*_TIMED, *_ORIGIN[4:]))
        properties += b"DLQ_ORIGIN_TOPIC\x01%s\x02" % origin
        if unique:
            properties += b"DLQ_ORIGIN_MESSAGE_ID\x01%s\x02" % unique
    return Message(
        topic,
        queue_id,
        message.body,
        properties,
        message.flag,
        # Where it is stored it can be read, so it is no part of a transaction.
        message.sys_flag & ~records.SYS_TX_MASK,
        message.born_ms,
        message.born_host,
        message.reconsume_times,
    )


def _copy(
    entry: records.Entry, topic: str, queue_id: int, properties: bytes, times: int
) -> Message:
    return Message(
        topic,
        queue_id,
        bytes(entry.body),
        properties,
        entry.flag,
        entry.sys_flag & ~records.SYS_TX_MASK,
        entry.born_ms,
        entry.born_host,
        times,
        entry.position,
    )
