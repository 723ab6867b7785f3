"""This module reads and writes what pop consumption has on the wire beside plain fields.

A client is told of the messages of one answer in three texts, of which it makes for each message a
ticket (RocketMQ's extraInfo, the property POP_CK) that it shows to acknowledge the message:

    startOffsetInfo   mark queue start;...           mark 0: the topic's own, 1: of its retry topic
    msgOffsetInfo     mark queue offset,offset;...
    orderCountInfo    mark queue count;... or mark qo<queue>%<offset> count;...
    ticket            start popTime invisibleTime reviveQid mark broker queue offset

Nothing of a ticket is believed: the broker compares it with what it knows.
"""

from __future__ import annotations

from base64 import b64decode
from binascii import Error as Base64Error
from collections.abc import Iterable, Sequence
from typing import Any, Final, NamedTuple

from sluice.errors import RequestInvalid
from sluice.model import Buffer
from sluice.protocol.json_members import as_object, number, read_object, text

_TICKET_CHARACTERS_MAX: Final = 1024
_TICKET_PARTS: Final = 9  # the last, a position in the log, is what Apache's proxy adds
_TICKET_PARTS_LEAST: Final = 4
_DIGITS_MAX: Final = 19
_ACKS_MAX: Final = 4096
_BITS_CHARACTERS_MAX: Final = 4096  # some 24,000 messages of one pop, which has 32 at most
_SHOWN_MAX: Final = 80


class PopTicket(NamedTuple):
    """What a client shows of a popped message; the last four may be missing."""

    start: int
    pop_ms: int
    invisible_ms: int
    revive_queue: int
    mark: str | None = None
    broker: str | None = None
    queue_id: int | None = None
    offset: int | None = None


class BatchAck(NamedTuple):
    """Messages of one pop that are acknowledged together."""

    group: str
    topic: str
    mark: str
    queue_id: int
    ticket: PopTicket
    offsets: list[int]


def read_ticket(extra_info: str) -> PopTicket:
    """Take a ticket apart; raises RequestInvalid."""
    parts = extra_info[:_TICKET_CHARACTERS_MAX].split(" ")
    whole = _TICKET_PARTS_LEAST <= len(parts) <= _TICKET_PARTS
    if not whole or len(extra_info) > _TICKET_CHARACTERS_MAX:
        raise RequestInvalid(f"extraInfo is no ticket of a popped message: {_shown(extra_info)}")
    start, taken, invisible, revive_queue = (_whole(part, extra_info) for part in parts[:4])
    mark, broker, queue_id, offset = (parts[4:] + [""] * 4)[:4]
    for position in parts[8:]:
        _whole(position, extra_info)
    return PopTicket(
        start,
        taken,
        invisible,
        revive_queue,
        mark or None,
        broker or None,
        _whole(queue_id, extra_info) if len(parts) > 6 else None,
        _whole(offset, extra_info) if len(parts) > 7 else None,
    )


def _whole(part: str, extra_info: str) -> int:
    if not part.isascii() or not part.isdigit() or len(part) > _DIGITS_MAX:
        raise RequestInvalid(f"extraInfo is no ticket of a popped message: {_shown(extra_info)}")
    return int(part)


def _shown(extra_info: str) -> str:
    return repr(extra_info[:_SHOWN_MAX])


def start_info(rows: Iterable[tuple[str, int, int]]) -> str:
    """Of (mark, queue, start): startOffsetInfo."""
    return ";".join([f"{mark} {queue_id} {start}" for mark, queue_id, start in rows])


def offset_info(rows: Iterable[tuple[str, int, Sequence[int]]]) -> str:
    """Of (mark, queue, offsets): msgOffsetInfo."""
    return ";".join(
        [f"{mark} {queue_id} {','.join(map(str, offsets))}" for mark, queue_id, offsets in rows]
    )


def count_info(rows: Iterable[tuple[str, int, int, int]]) -> str:
    """Of (mark, queue, offset or -1 for all of the queue, count): orderCountInfo."""
    return ";".join(
        [
            f"{mark} {queue_id} {count}" if offset < 0 else f"{mark} qo{queue_id}%{offset} {count}"
            for mark, queue_id, offset, count in rows
        ]
    )


def read_batch_acks(body: Buffer) -> tuple[str, list[BatchAck]]:
    """The broker's name and what is acknowledged (200151)."""
    members = read_object(body)
    acks = members.get("acks") or []
    if not isinstance(acks, list) or len(acks) > _ACKS_MAX:
        raise RequestInvalid(f"acks is no list of at most {_ACKS_MAX}")
    return text(members, "brokerName", ""), [_batch_ack(ack) for ack in acks]


def _batch_ack(value: Any) -> BatchAck:
    """Each member has a short and a long name."""
    members = as_object(value, "an ack")
    for short, long in _NAMES.items():
        if short not in members and long in members:
            members[short] = members[long]
    start = number(members, "so")
    ticket = PopTicket(start, number(members, "pt"), number(members, "it"), number(members, "rq"))
    offsets = [start + bit for bit in _bits(text(members, "b", ""))]
    return BatchAck(
        text(members, "c"),
        text(members, "t"),
        text(members, "r", "0"),
        number(members, "q"),
        ticket,
        offsets,
    )


_NAMES: Final = {
    "c": "consumerGroup",
    "t": "topic",
    "r": "retry",
    "so": "startOffset",
    "q": "queueId",
    "rq": "reviveQueueId",
    "pt": "popTime",
    "it": "invisibleTime",
    "b": "bitSet",
}


def _bits(value: str) -> list[int]:
    """The bits that are set in a BitSet of Java: bytes with the least bit first, as base64."""
    if len(value) > _BITS_CHARACTERS_MAX:
        raise RequestInvalid(
            f"a bit set of {len(value)} characters; {_BITS_CHARACTERS_MAX} at most"
        )
    try:
        data = b64decode(value, validate=True)
    except (Base64Error, ValueError):
        raise RequestInvalid("a bit set is no base64") from None
    return [8 * at + bit for at, byte in enumerate(data) for bit in range(8) if byte >> bit & 1]
