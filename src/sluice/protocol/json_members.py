"""This module reads members of JSON objects that came over the wire, and never trusts them.

Each reader takes the object, the member's name and what to use where it is missing or null. A
value of another type raises RequestInvalid with the name. Numbers may come as text: Go sends tag
codes as strings. Writers for the two kinds of maps that are not quite JSON are here as well.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final, NamedTuple

import orjson

from sluice.errors import RequestInvalid
from sluice.model import Buffer
from sluice.protocol import lenient_json

# Parsing a body stops the event loop: about 10 ms for each MiB of it, at worst. Clients send a few
# KiB. Who expects more (a broker that registers its topics) passes another limit.
BODY_BYTES_MAX: Final = 1024 * 1024
_INT64: Final = 1 << 63
_NUMBER_CHARACTERS_MAX: Final = 20


def read_object(body: Buffer, bytes_max: int = BODY_BYTES_MAX) -> dict[str, Any]:
    """The object that a body holds, strict JSON or as RocketMQ writes it."""
    if len(body) > bytes_max:
        raise RequestInvalid(f"a JSON body of {len(body)} bytes is over {bytes_max}")
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError:
        try:
            value = lenient_json.loads(bytes(body))
        except ValueError as error:
            raise RequestInvalid(f"the body is not JSON: {error}") from None
    return as_object(value, "the body")


def as_object(value: Any, name: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise RequestInvalid(f"{name} is no JSON object")
    return value


def text(members: Mapping[str, Any], name: str, default: str | None = None) -> str:
    """A text; without a default it has to be there."""
    value = members.get(name)
    if value is None:
        value = default
    if not isinstance(value, str):
        raise RequestInvalid(f"{name} is missing or no text")
    return value


def number(members: Mapping[str, Any], name: str, default: int | None = None) -> int:
    """A 64-bit integer, or its text; without a default it has to be there."""
    value = members.get(name)
    if value is None:
        value = default
    return as_number(value, name)


def as_number(value: Any, name: str) -> int:
    if isinstance(value, str) and len(value) <= _NUMBER_CHARACTERS_MAX:
        digits = value[1:] if value[:1] == "-" else value
        if digits.isdecimal():
            value = int(value)
    if not isinstance(value, int) or isinstance(value, bool) or not -_INT64 <= value < _INT64:
        raise RequestInvalid(f"{name} is missing or no number")
    return value


def flag(members: Mapping[str, Any], name: str, default: bool = False) -> bool:
    value = members.get(name)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise RequestInvalid(f"{name} is neither true nor false")
    return value


def items(members: Mapping[str, Any], name: str) -> list[Any]:
    """A list; empty where it is missing."""
    value = members.get(name)
    if value is None:
        return []
    if not isinstance(value, list):
        raise RequestInvalid(f"{name} is no JSON list")
    return value


def texts(members: Mapping[str, Any], name: str) -> tuple[str, ...]:
    """A list of texts; empty where it is missing."""
    values = items(members, name)
    if not all(isinstance(value, str) for value in values):
        raise RequestInvalid(f"{name} holds something that is no text")
    return tuple(values)


def objects(members: Mapping[str, Any], name: str) -> list[dict[str, Any]]:
    """A list of objects; empty where it is missing."""
    return [as_object(value, f"a value of {name}") for value in items(members, name)]


def mapping(members: Mapping[str, Any], name: str) -> dict[str, Any]:
    """An object; empty where it is missing."""
    value = members.get(name)
    return {} if value is None else as_object(value, name)


def text_map(members: Mapping[str, Any], name: str) -> dict[str, str]:
    """An object of texts; empty where it is missing."""
    values = mapping(members, name)
    if not all(isinstance(value, str) for value in values.values()):
        raise RequestInvalid(f"{name} holds something that is no text")
    return values


# --------------------------------------------------------------------------- keys without quotes


class MessageQueue(NamedTuple):
    """One queue as clients name it; equal when all three are."""

    topic: str
    broker_name: str
    queue_id: int


def queue_object(queue: MessageQueue) -> dict[str, Any]:
    return {
        "brokerName": queue.broker_name,
        "queueId": queue.queue_id,
        "topic": queue.topic,
    }


def read_queue(members: Mapping[str, Any]) -> MessageQueue:
    return MessageQueue(
        text(members, "topic"), text(members, "brokerName"), number(members, "queueId")
    )


def bare_keys(table: Mapping[int, Any]) -> orjson.Fragment:
    """{0:value,1:value}: a map of integers as RocketMQ writes it; also for Go, without a blank."""
    parts = [b"%d:%b" % (key, orjson.dumps(table[key])) for key in sorted(table)]
    return orjson.Fragment(b"{%b}" % b",".join(parts))


def quoted_keys(table: Mapping[int, Any]) -> dict[str, Any]:
    """{"0":value}: a map of integers as the JSON standard has it, in numeric order."""
    return {str(key): table[key] for key in sorted(table)}


def queue_keys(table: Iterable[tuple[MessageQueue, Any]]) -> orjson.Fragment:
    """{{"brokerName":...}:value}: a map of queues. Java refuses these keys as strings."""
    parts = [
        b"%b:%b" % (orjson.dumps(queue_object(queue)), orjson.dumps(value))
        for queue, value in table
    ]
    return orjson.Fragment(b"{%b}" % b",".join(parts))


def read_integer_keys(table: Mapping[str, Any], name: str) -> dict[int, Any]:
    """A map of integers, with or without quotes on the wire."""
    return {as_number(key, f"a key of {name}"): value for key, value in table.items()}


def read_queue_keys(members: Mapping[str, Any], name: str) -> dict[MessageQueue, Any]:
    """A map of queues; its keys are the texts of the objects that stood there."""
    table = {}
    for key, value in mapping(members, name).items():
        try:
            queue = orjson.loads(key)
        except orjson.JSONDecodeError:
            raise RequestInvalid(f"a key of {name} is no queue") from None
        table[read_queue(as_object(queue, f"a key of {name}"))] = value
    return table
