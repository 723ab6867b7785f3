"""This module knows the body of the answer about open half messages, which is Sluice's own."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import orjson

from sluice.errors import ProtocolError
from sluice.protocol import lenient_json


class OpenHalf(NamedTuple):
    """A half message that nobody has ended yet."""

    message_id: str
    transaction_id: str
    topic: str
    producer_group: str
    queue_id: int
    queue_offset: int
    since_ms: int
    check_times: int
    next_check_ms: int  # -1 where that depends on somebody else
    waits_for: str


_MEMBERS = {
    "msgId": str,
    "transactionId": str,
    "topic": str,
    "producerGroup": str,
    "queueId": int,
    "queueOffset": int,
    "sinceTimestamp": int,
    "checkTimes": int,
    "nextCheckTimestamp": int,
    "waitsFor": str,
}


def half_members(half: OpenHalf) -> dict[str, Any]:
    """The members of one half message, by their names."""
    return dict(zip(_MEMBERS, half, strict=True))


def write_open_halves(halves: Iterable[OpenHalf]) -> bytes:
    return orjson.dumps({"transactions": [half_members(half) for half in halves]})


def read_open_halves(body: bytes | memoryview) -> list[OpenHalf]:
    """What a broker says; raises ProtocolError where that cannot be read."""
    try:
        rows = lenient_json.loads(bytes(body))["transactions"]
        return [OpenHalf(*(kind(row[name]) for name, kind in _MEMBERS.items())) for row in rows]
    except (KeyError, TypeError, ValueError) as error:
        raise ProtocolError(f"the list of half messages cannot be read: {error}") from None
