"""This module turns a message that asks for a later time into what waits for it, and back.

What waits is an ordinary entry of a topic of the broker's own, as Apache's broker writes it:

    DELAY=level                      SCHEDULE_TOPIC_XXXX, queue level - 1
    TIMER_DELAY_SEC, TIMER_DELAY_MS,
    TIMER_DELIVER_MS                 rmq_sys_wheel_timer, queue 0; TIMER_OUT_MS is when it is due

with REAL_TOPIC and REAL_QID for where it goes then. This module decides by values alone: the time
is an argument, and it neither stores nor reads.
"""

from __future__ import annotations

from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Container
from typing import Final, NamedTuple

from sluice.broker.topics import DEAD_PREFIX, RETRY_PREFIX, SCHEDULE_TOPIC, TIMER_TOPIC
from sluice.errors import IllegalOperation, MessageIllegal
from sluice.model import Message
from sluice.protocol import records

# What a producer may ask for; where several are given the first of them decides, as in RocketMQ.
_ASKED: Final = (b"TIMER_DELAY_SEC", b"TIMER_DELAY_MS", b"TIMER_DELIVER_MS")
# What only the broker writes. A message that is tried again by its consumer carries them along.
_OWN: Final = (
    *(b"TIMER_OUT_MS", b"TIMER_DEL_UNIQKEY", b"TIMER_ENQUEUE_MS", b"TIMER_DEQUEUE_MS"),
    *(b"TIMER_ROLL_TIMES", b"TIMER_ROLL_LABEL"),
)
_PLACE: Final = (b"REAL_TOPIC", b"REAL_QID")
_TIMED: Final = frozenset((*_ASKED, *_OWN))
_REPLACED: Final = frozenset((*_TIMED, *_PLACE))
_AGAIN: Final = frozenset((*_OWN, *_PLACE))  # what a timed message gets anew
_DIGITS_MAX: Final = 19  # of Java's long
# Two properties that say when may differ by what passes between the calls that set them.
_SAME_TIME_MS: Final = 1_000
PLACE_MARK: Final = b"\x02REAL_TOPIC\x01"
_PLACE_BYTES_MAX: Final = 300
RECALL_TAG: Final = "_RECALL_TAG_"
# How often an entry was written anew while it waited. It is RocketMQ's name for that too.
MOVED_NAME: Final = b"TIMER_ROLL_TIMES"
# What is added to a waiting message's properties in its life must have room.
ROOM_BYTES: Final = 192


class Limits(NamedTuple):
    """What the settings allow."""

    levels: int
    timer_max_delay_ms: int


def requested(message: Message, now_ms: int, limits: Limits) -> Message:
    """What is stored for a message that a client sent; raises MessageIllegal with the reason."""
    properties = message.properties
    if b"TIMER_" in properties:
        for name in () if _is_sent_again(message) else _OWN:
            if records.property_value(properties, name):
                raise MessageIllegal(
                    f"the property {name.decode()} is the broker's own; send the message without it"
                )
    stored = waiting_form(message, now_ms, limits)
    bytes_max = records.PROPERTIES_BYTES_MAX - ROOM_BYTES
    if stored is not message and len(stored.properties) > bytes_max:
        raise MessageIllegal(
            f"properties of {len(stored.properties)} bytes are over the limit of {bytes_max} for "
            "messages that wait; put large values into the body"
        )
    return stored


def waiting_form(message: Message, now_ms: int, limits: Limits) -> Message:
    """What is stored for a message: what waits in its place, or itself where its time is now."""
    properties = message.properties
    level = _level(properties, limits.levels)
    if level:
        dropped = _REPLACED
        if records.property_value(properties, b"DELAY") != b"%d" % level:
            dropped |= {b"DELAY"}
            properties = without(properties, dropped) + b"DELAY\x01%d\x02" % level
        else:
            properties = without(properties, dropped)
        return _moved(message, SCHEDULE_TOPIC, level - 1, properties + _place_of(message))
    if b"TIMER_" not in properties:
        return message
    if records.property_value(properties, b"TIMER_OUT_MS"):
        # It has waited already, and is sent once more by somebody who kept all that it carried.
        return _moved(message, message.topic, message.queue_id, without(properties, _TIMED))
    due_ms = _due_ms(properties, now_ms, limits)
    if due_ms is None or due_ms <= now_ms:
        return message
    properties = without(properties, _AGAIN) + _place_of(message)
    properties += b"TIMER_OUT_MS\x01%d\x02" % due_ms
    return _moved(message, TIMER_TOPIC, 0, properties)


def timer_form(entry: records.Entry, due_ms: int) -> Message:
    """A waiting entry once more, further up in the log: its origin is what it stands for."""
    properties = records.without_checksum(entry.properties)
    times = records.property_value(properties, MOVED_NAME)
    count = int(times) + 1 if times is not None and times.isdigit() and len(times) < 9 else 1
    properties = without(properties, (b"TIMER_OUT_MS", MOVED_NAME))
    properties += b"TIMER_OUT_MS\x01%d\x02%s\x01%d\x02" % (due_ms, MOVED_NAME, count)
    return _from_entry(entry, TIMER_TOPIC, 0, properties)


def place_of(properties: bytes) -> tuple[bytes, bytes] | None:
    """Topic and queue that a waiting entry is for, as its properties have them; None: for none."""
    begin = properties.rfind(PLACE_MARK)
    if begin >= 0:
        # As it is written here: one after the other.
        begin += len(PLACE_MARK)
        topic, _, rest = properties[begin : begin + _PLACE_BYTES_MAX].partition(b"\x02")
        name, _, number = rest.partition(b"\x02")[0].partition(b"\x01")
        if topic and name == b"REAL_QID" and number.isdigit() and len(number) <= 9:
            return topic, number
    return _separate_place(properties)


def _separate_place(properties: bytes) -> tuple[bytes, bytes] | None:
    topic = records.property_value(properties, b"REAL_TOPIC")
    queue_id = records.property_value(properties, b"REAL_QID")
    if not topic or queue_id is None or not queue_id.isdigit() or len(queue_id) > 9:
        return None
    return topic, queue_id


def fired_properties(properties: bytes, is_timer: bool, store_ms: int, now_ms: int) -> bytes:
    """The properties of what is delivered, without the store's checksum; they end whole."""
    if properties[-1:] != b"\x02":
        properties += b"\x02"
    if not is_timer:
        return properties
    return properties + b"TIMER_ENQUEUE_MS\x01%d\x02TIMER_DEQUEUE_MS\x01%d\x02" % (
        store_ms,
        now_ms,
    )


def fired_form(entry: records.Entry, topic: str, queue_id: int, now_ms: int) -> Message:
    """What is delivered for a waiting entry."""
    properties = records.without_checksum(entry.properties)
    is_timer = entry.topic == TIMER_TOPIC
    properties = fired_properties(properties, is_timer, entry.store_ms, now_ms)
    return _from_entry(entry, topic, queue_id, properties)


def recall_form(entry: records.Entry, handle: Handle, producer_group: str, now_ms: int) -> Message:
    """What says that a waiting entry is not to be delivered, as Apache's broker writes it too."""
    properties = records.format_properties(
        {
            "TAGS": RECALL_TAG,
            "TIMER_DEL_UNIQKEY": handle.unique_key,
            "UNIQ_KEY": handle.unique_key,
            "TIMER_DELIVER_MS": str(handle.due_ms + 1),
            "TIMER_OUT_MS": str(handle.due_ms),
            "BORN_TIMESTAMP": str(now_ms),
            **({"PGROUP": producer_group} if producer_group else {}),
            "REAL_TOPIC": handle.topic,
            "REAL_QID": "0",
        }
    )
    return Message(TIMER_TOPIC, 0, b"0", properties, born_ms=now_ms, prepared_offset=entry.position)


# -------------------------------------------------------------------------------------------- parts


def _is_sent_again(message: Message) -> bool:
    """Whether a message may carry what the broker once gave it: its consumer sends it back, or
    somebody (mqadmin for one) sends a message again that was delivered.
    """
    if message.topic.startswith((RETRY_PREFIX, DEAD_PREFIX)):
        return True
    properties = message.properties
    return (
        records.property_value(properties, b"TIMER_OUT_MS") is not None
        and records.property_value(properties, b"TIMER_DEQUEUE_MS") is not None
        and records.property_value(properties, b"TIMER_DEL_UNIQKEY") is None
    )


def without(properties: bytes, names: Container[bytes]) -> bytes:
    """Properties but for some; every one that is left ends in its separator."""
    kept = [
        item
        for item in properties.split(b"\x02")
        if item and item.partition(b"\x01")[0] not in names
    ]
    return b"".join([item + b"\x02" for item in kept])


def _level(properties: bytes, level_max: int) -> int:
    """The delay level that a message asks for, 0 for none."""
    text = records.property_value(properties, b"DELAY") if b"DELAY" in properties else None
    if not text or text == b"0":
        return 0
    if not text.isdigit() or len(text) > _DIGITS_MAX:
        raise MessageIllegal(
            f"delay level {_shown(text)} is not a number from 0 to {level_max} (delay_levels)"
        )
    return min(int(text), level_max)


def _due_ms(properties: bytes, now_ms: int, limits: Limits) -> int | None:
    """When a message is due that says so in any of RocketMQ's ways; None where it does not."""
    found: list[tuple[bytes, int]] = []
    for name in _ASKED:
        text = records.property_value(properties, name)
        if not text:
            continue
        if not text.isdigit() or len(text) > _DIGITS_MAX:
            raise MessageIllegal(f"{name.decode()}={_shown(text)} is not a time: a whole number")
        value = int(text)
        if name == b"TIMER_DELAY_SEC":
            value *= 1000
        found.append((name, value if name == b"TIMER_DELIVER_MS" else now_ms + value))
    if not found:
        return None
    due_ms = found[0][1]
    for name, other_ms in found[1:]:
        if abs(other_ms - due_ms) > _SAME_TIME_MS:
            raise MessageIllegal(
                f"{found[0][0].decode()} and {name.decode()} name different times; give one of them"
            )
    if due_ms - now_ms > limits.timer_max_delay_ms:
        raise MessageIllegal(
            f"timer message illegal: it is due in {(due_ms - now_ms) // 1000} s, the limit is "
            f"{limits.timer_max_delay_ms // 1000} s (timer_max_delay_ms)"
        )
    return due_ms


def _shown(text: bytes) -> str:
    return repr(text[:40].decode("utf-8", "replace"))


def _place_of(message: Message) -> bytes:
    return b"REAL_TOPIC\x01%s\x02REAL_QID\x01%d\x02" % (message.topic.encode(), message.queue_id)


def _moved(message: Message, topic: str, queue_id: int, properties: bytes) -> Message:
    return Message(
        topic,
        queue_id,
        message.body,
        properties,
        message.flag,
        message.sys_flag,
        message.born_ms,
        message.born_host,
        message.reconsume_times,
        message.prepared_offset,
    )


def _from_entry(entry: records.Entry, topic: str, queue_id: int, properties: bytes) -> Message:
    return Message(
        topic,
        queue_id,
        entry.body,
        properties,
        entry.flag,
        entry.sys_flag,
        entry.born_ms,
        entry.born_host,
        entry.reconsume_times,
        entry.position,
    )


# ------------------------------------------------------------------------------------------- recall


class Handle(NamedTuple):
    """What a producer gets for a timed message, to take it back with."""

    topic: str
    broker_name: str
    due_ms: int
    unique_key: str

    def text(self) -> str:
        """RocketMQ's form. Its time is one more than what is stored: there it is rounded down."""
        plain = f"v1 {self.topic} {self.broker_name} {self.due_ms + 1} {self.unique_key}"
        return urlsafe_b64encode(plain.encode()).decode()


def handle_of(message: Message, broker_name: str, unique_key: str) -> str:
    """The handle of a message in its stored form; empty where it cannot be taken back."""
    if message.topic != TIMER_TOPIC:
        return ""
    due = records.property_value(message.properties, b"TIMER_OUT_MS") or b"0"
    topic = (records.property_value(message.properties, b"REAL_TOPIC") or b"").decode()
    # Not of a message that is tried again; and where the words do not part it could not be read.
    if topic.startswith(RETRY_PREFIX) or not unique_key or " " in unique_key + broker_name:
        return ""
    return Handle(topic, broker_name, int(due), unique_key).text()


def read_handle(text: str) -> Handle:
    """A handle that a client shows; raises what Apache's broker says of a bad one."""
    invalid = IllegalOperation("recall handle is invalid")
    try:
        # Java's decoder takes a handle without the padding too.
        parts = urlsafe_b64decode(text.encode() + b"=" * (-len(text) % 4)).decode().split(" ")
    except ValueError:
        raise invalid from None
    if len(parts) < 5 or parts[0] != "v1":
        raise invalid
    _, topic, broker_name, time_text, unique_key = parts[:5]
    if not (time_text.isascii() and time_text.isdigit()) or len(time_text) > _DIGITS_MAX:
        raise IllegalOperation("recall failed, timestamp invalid")
    return Handle(topic, broker_name, int(time_text) - 1, unique_key)
