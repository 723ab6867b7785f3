"""This module knows the forms of a transactional message, from the half message to its end.

    half       RMQ_SYS_TRANS_HALF_TOPIC, queue 0: what a producer sent, with REAL_TOPIC and REAL_QID
    copy       the same once more at the end of that queue, because its first place goes away;
               its origin is the first place, TRAN_PREPARED_QUEUE_OFFSET the offset it had there
    committed  the message in its real topic; its origin is the half message's first place
    parked     TRANS_CHECK_MAX_TIME_TOPIC: nobody knew what became of it
    operation  RMQ_SYS_TRANS_OP_HALF_TOPIC: "5,7," with the tag "d" says that the half messages at
               these offsets are done. With the tag "c" it says that they were asked about once
               more; Apache's broker, which writes copies instead, passes over it.

A half message is known by the place it was first stored at: that is what its producer was told, and
it never changes. This module decides by values alone; it neither stores nor reads nor knows the
time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final, NamedTuple

from sluice.broker.delay_forms import without
from sluice.broker.topics import CHECK_MAX_TOPIC, HALF_TOPIC, OP_TOPIC
from sluice.errors import IllegalOperation, MessageIllegal, NoPermission, SluiceError
from sluice.model import Message
from sluice.protocol import records

COMMIT: Final = records.SYS_TX_COMMIT
ROLLBACK: Final = records.SYS_TX_ROLLBACK
UNKNOWN: Final = 0
VERDICTS: Final = {COMMIT: "committed", ROLLBACK: "rolled back"}

DONE_TAG: Final = b"d"
ASKED_TAG: Final = b"c"
OP_BYTES_MAX: Final = 4096

_PREPARED: Final = b"TRAN_MSG"
_GROUP: Final = b"PGROUP"
_UNIQUE: Final = b"UNIQ_KEY"
_REAL_TOPIC: Final = b"REAL_TOPIC"
_REAL_QUEUE: Final = b"REAL_QID"
_ID: Final = b"__transactionId__"
_CHECKS: Final = b"TRANSACTION_CHECK_TIMES"
_IMMUNITY: Final = b"CHECK_IMMUNITY_TIME_IN_SECONDS"
_FIRST_OFFSET: Final = b"TRAN_PREPARED_QUEUE_OFFSET"
_SINCE: Final = b"SLUICE_HALF_SINCE_MS"

# A message that was received and is sent on carries these along: it gets its own instead.
_ANEW: Final = (_REAL_TOPIC, _REAL_QUEUE, _ID, _CHECKS)
# These were never in a message that anybody received.
_FORGED: Final = (_FIRST_OFFSET, _SINCE)
_OF_A_COPY: Final = frozenset((_CHECKS, _FIRST_OFFSET, _SINCE))
_OF_A_HALF: Final = frozenset((_REAL_TOPIC, _REAL_QUEUE, *_OF_A_COPY))
_TOPIC_MARK: Final = b"REAL_TOPIC\x01"
_QUEUE_MARK: Final = b"REAL_QID\x01"
_COPY_BYTES: Final = 160  # what a copy's own properties take at most
ROOM_BYTES: Final = records.PROPERTIES_BYTES_MAX - records.CRC_PROPERTY_BYTES - _COPY_BYTES
_TIMES: Final = (b"TIMER_DELAY_SEC", b"TIMER_DELAY_MS", b"TIMER_DELIVER_MS")
GROUP_BYTES_MAX: Final = 255
_DIGITS_MAX: Final = 18


class Half(NamedTuple):
    """A half message as it is stored."""

    offset: int
    position: int
    first_offset: int
    first_position: int
    topic: str
    queue_id: int
    group: str
    unique_key: str
    since_ms: int
    checks: int  # how often it was asked about before this copy of it was written
    immunity_ms: int  # its own word on when it is first asked about; 0 for none
    entry: records.Entry


class Ending(NamedTuple):
    """What a producer says of a half message, and how it names it."""

    group: str
    offset: int
    position: int
    verdict: int
    from_check: bool


# ---------------------------------------------------------------------------------------- beginning


def begun(message: Message, *, rejected: bool) -> Message:
    """What is stored for a message that says of itself that it is transactional.

    That is the half message; or the message itself, where it is one that is tried again and only
    remembers that it was transactional once. Raises why it cannot be stored.
    """
    properties = message.properties
    if (records.property_value(properties, _PREPARED) or b"").lower() != b"true":
        if message.sys_flag & records.SYS_TX_MASK:
            raise MessageIllegal(
                "sysFlag says that the message is part of a transaction, its property TRAN_MSG "
                "does not; send it as a transactional message or without the flag"
            )
        return message
    # Looked for as mere bytes first: hardly any message has one of these.
    delay = records.property_value(properties, b"DELAY") if b"DELAY" in properties else None
    is_delayed = (delay or b"0").strip(b"0") != b""
    if is_delayed and message.reconsume_times > 0:
        return _plain(message)  # as consumers before 4.6.1 send back what they could not consume
    if rejected:
        raise NoPermission(
            "sending transaction message is forbidden by this broker (reject_transactions)"
        )
    times = _TIMES if b"TIMER_DEL" in properties else ()
    if is_delayed or any(records.property_value(properties, name) for name in times):
        raise MessageIllegal(
            "a transactional message cannot be delayed: it is delivered when it is committed"
        )
    for name in _FORGED:
        if name in properties and records.property_value(properties, name) is not None:
            raise MessageIllegal(
                f"the property {name.decode()} is the broker's own; send the message without it"
            )
    return _half(message)


def _half(message: Message) -> Message:
    properties = message.properties
    group = records.property_value(properties, _GROUP)
    if not group or len(group) > GROUP_BYTES_MAX:
        raise MessageIllegal(
            "a transactional message must name its producer's group (PGROUP), which is asked "
            "what became of it"
        )
    unique = records.property_value(properties, _UNIQUE) or b""
    if any(name in properties for name in _ANEW):
        properties = without(properties, _ANEW)
    elif properties[-1] != 2:
        properties += b"\x02"
    properties += b"__transactionId__\x01%b\x02REAL_TOPIC\x01%b\x02REAL_QID\x01%d\x02" % (
        unique, message.topic.encode(), message.queue_id,
    )  # fmt: skip
    if len(properties) > ROOM_BYTES:
        raise MessageIllegal(
            f"properties of {len(properties)} bytes are over the limit of {ROOM_BYTES} for a "
            "transactional message; put large values into the body"
        )
    return Message(
        HALF_TOPIC,
        0,
        message.body,
        properties,
        message.flag,
        message.sys_flag & ~records.SYS_TX_MASK,
        message.born_ms,
        message.born_host,
        message.reconsume_times,
    )


def _plain(message: Message) -> Message:
    return Message(
        message.topic,
        message.queue_id,
        message.body,
        message.properties,
        message.flag,
        message.sys_flag & ~records.SYS_TX_MASK,
        message.born_ms,
        message.born_host,
        message.reconsume_times,
        message.prepared_offset,
    )


# ------------------------------------------------------------------------------------------ reading


def read_half(stored: memoryview, at: int = 0, position: int | None = None) -> Half | None:
    """A half message from its entry; None where it is none, or does not say whose it is."""
    entry = records.decode(stored, at, position)
    if entry.topic != HALF_TOPIC:
        return None
    properties = entry.properties
    # What was written last stands last; the unique key, topic and queue of a half message do.
    own = properties[properties.rfind(b"__transactionId__\x01") + 18 :].split(b"\x02", 3)
    if len(own) == 4 and own[1].startswith(_TOPIC_MARK) and own[2].startswith(_QUEUE_MARK):
        unique, topic, queue_text = own[0], own[1][len(_TOPIC_MARK) :], own[2][len(_QUEUE_MARK) :]
    else:
        unique = records.property_value(properties, _UNIQUE) or b""
        topic = records.property_value(properties, _REAL_TOPIC) or b""
        queue_text = records.property_value(properties, _REAL_QUEUE) or b""
    queue_id = _as_number(queue_text)
    if not topic or queue_id is None:
        return None
    first_offset = since_ms = None
    if entry.prepared_offset:
        first_offset = _number(properties, _FIRST_OFFSET)
        since_ms = _number(properties, _SINCE)
    has_checks, has_immunity = _CHECKS in properties, _IMMUNITY in properties
    return Half(
        entry.queue_offset,
        entry.position,
        entry.queue_offset if first_offset is None else first_offset,
        entry.position if first_offset is None else entry.prepared_offset,
        topic.decode("utf-8", "replace"),
        queue_id,
        (records.property_value(properties, _GROUP) or b"").decode("utf-8", "replace"),
        unique.decode("utf-8", "replace"),
        entry.store_ms if since_ms is None else since_ms,
        (has_checks and _number(properties, _CHECKS)) or 0,
        1000 * ((has_immunity and _number(properties, _IMMUNITY)) or 0),
        entry,
    )


def _number(properties: bytes, name: bytes) -> int | None:
    text = records.property_value(properties, name)
    return None if text is None else _as_number(text)


def _as_number(text: bytes) -> int | None:
    return int(text) if text.isdigit() and len(text) <= _DIGITS_MAX else None


# ------------------------------------------------------------------------------------------- making


def committed_form(half: Half, checks: int, queue_id: int) -> Message:
    """The message in its real topic."""
    properties = records.without_checksum(half.entry.properties)
    own = properties.rfind(b"\x02REAL_TOPIC\x01") + 1
    if own and properties.count(b"\x02", own) == 2 and not half.entry.prepared_offset:
        properties = properties[:own]  # as it was sent; the rest is the half message's own
    else:
        properties = without(properties, _OF_A_HALF)
    if checks:
        properties += b"TRANSACTION_CHECK_TIMES\x01%d\x02" % checks
    sys_flag = half.entry.sys_flag & ~records.SYS_TX_MASK | records.SYS_TX_COMMIT
    return _from(half.entry, half.topic, queue_id, properties, sys_flag, half.first_position)


def copied_form(half: Half, checks: int) -> Message:
    """The half message once more: it stays what it is, at another place."""
    properties = without(records.without_checksum(half.entry.properties), _OF_A_COPY)
    properties += b"%b\x01%d\x02%b\x01%d\x02%b\x01%d\x02" % (
        *(_CHECKS, checks),
        *(_FIRST_OFFSET, half.first_offset),
        *(_SINCE, half.since_ms),
    )
    return _from(half.entry, HALF_TOPIC, 0, properties, half.entry.sys_flag, half.first_position)


def parked_form(entry: records.Entry, first_position: int, checks: int) -> Message:
    """The half message where those are kept of which nobody knew what became of them."""
    properties = without(records.without_checksum(entry.properties), _OF_A_COPY)
    properties += b"TRANSACTION_CHECK_TIMES\x01%d\x02" % checks
    return _from(entry, CHECK_MAX_TOPIC, 0, properties, entry.sys_flag, first_position)


def resumed_form(entry: records.Entry) -> Message:
    """A parked half message as a half message again, which nobody was asked about yet."""
    properties = without(records.without_checksum(entry.properties), _OF_A_COPY)
    return _from(entry, HALF_TOPIC, 0, properties, entry.sys_flag, entry.position)


def asked_form(half: Half, checks: int) -> Message:
    """The half message as its producer is shown it."""
    properties = without(records.without_checksum(half.entry.properties), _OF_A_COPY)
    properties += b"TRANSACTION_CHECK_TIMES\x01%d\x02" % checks
    return _from(half.entry, half.topic, half.queue_id, properties, half.entry.sys_flag, 0)


def _from(
    entry: records.Entry, topic: str, queue_id: int, properties: bytes, sys_flag: int, origin: int
) -> Message:
    return Message(
        topic,
        queue_id,
        entry.body,
        properties,
        entry.flag,
        sys_flag,
        entry.born_ms,
        entry.born_host,
        entry.reconsume_times,
        origin,
    )


def operations(
    tag: bytes, offsets: Iterable[int], now_ms: int
) -> Iterator[tuple[Message, list[int]]]:
    """The operations that say something of half messages, each with those that it is about."""
    body, chosen = b"", []
    for offset in offsets:
        body += b"%d," % offset
        chosen.append(offset)
        if len(body) >= OP_BYTES_MAX:
            yield Message(OP_TOPIC, 0, body, b"TAGS\x01%b\x02" % tag, born_ms=now_ms), chosen
            body, chosen = b"", []
    if chosen:
        yield Message(OP_TOPIC, 0, body, b"TAGS\x01%b\x02" % tag, born_ms=now_ms), chosen


def read_operation(stored: memoryview) -> tuple[bytes, list[int]]:
    """The tag of an operation and the offsets that it is about."""
    entry = records.decode(stored)
    tag = records.property_value(entry.properties, b"TAGS") or b""
    texts = bytes(entry.body).split(b",")
    return tag, [int(text) for text in texts if text.isdigit() and len(text) <= _DIGITS_MAX]


# ----------------------------------------------------------------------------------------- deciding


def check_ending(half: Half | None, ending: Ending) -> Half:
    """Refuse the end of a transaction that nobody began, or that is named wrongly."""
    if half is None:
        raise SluiceError("Find prepared transaction message failed: no half message is there")
    if half.group != ending.group:
        raise SluiceError("The producer group wrong: another group has sent the half message")
    if ending.offset not in (half.first_offset, half.offset):
        raise SluiceError(
            "The transaction state table offset wrong: the half message has another one"
        )
    places = ((half.first_position, half.first_offset), (half.position, half.offset))
    if (ending.position, ending.offset) not in places:
        raise SluiceError("The commit log offset wrong: the half message has another one")
    return half


def check_in_time(half: Half, ending: Ending, now_ms: int, timeout_ms: int) -> None:
    """Who sets a time for the first question may not end the transaction after it, unless asked."""
    if half.immunity_ms and not ending.from_check:
        limit_ms = max(half.immunity_ms, timeout_ms)
        if now_ms - half.since_ms > limit_ms:
            raise IllegalOperation(
                f"the transaction could be ended for {limit_ms} ms (CHECK_IMMUNITY_TIME_IN_SECONDS)"
                "; now its producer's group is asked first"
            )


def check_repeated(before: str, ending: Ending) -> None:
    """A transaction has ended: its end may be said again, but not another one."""
    wanted = VERDICTS[ending.verdict]
    if before != wanted:
        raise IllegalOperation(
            f"the transaction was {before} before, so it cannot be {wanted}; the first word counts"
        )


class Rules(NamedTuple):
    """What the settings say of questions."""

    timeout_ms: int
    interval_ms: int
    count_max: int
    age_max_ms: int


PARK: Final = "park"
ASK: Final = "ask"
WAIT: Final = "wait"


def next_step(half: Half, checks: int, now_ms: int, rules: Rules) -> tuple[str, int]:
    """What is to be done with a half message now, and until when it waits where it has to."""
    age_ms = now_ms - half.since_ms
    if checks >= rules.count_max or age_ms > rules.age_max_ms:
        return PARK, now_ms
    first_ms = half.since_ms + min(max(half.immunity_ms, rules.timeout_ms), rules.age_max_ms + 1)
    if checks == 0 and now_ms < first_ms:
        return WAIT, first_ms
    return ASK, now_ms
