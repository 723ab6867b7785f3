"""This module writes the lines of RocketMQ's message trace, as its console reads them.

A line has its parts separated by 0x01 and ends with 0x02. Lines of several events go together into
one message of the trace topic, whose keys are the ids and keys of the messages that they are about.
"""

from __future__ import annotations

from typing import Final

_PART: Final = "\x01"
_END: Final = "\x02"
_REGION: Final = "DefaultRegion"
NORMAL, HALF, _COMMITTED, DELAYED, ORDERED = range(5)
# How a consumer's work went: the ordinals of RocketMQ's list.
SUCCESS, TIME_OUT, EXCEPTION, RETURN_NULL, FAILED = range(5)


def _line(*parts: object) -> str:
    return _PART.join(_text(part) for part in parts) + _END


def _text(part: object) -> str:
    if isinstance(part, bool):
        return "true" if part else "false"
    return str(part)


def published(
    now_ms: int,
    group: str,
    topic: str,
    message_id: str,
    tags: str,
    keys: str,
    store_host: str,
    body_bytes: int,
    took_ms: int,
    kind: int,
    offset_id: str,
    succeeded: bool,
) -> str:
    """A message was sent."""
    return _line(
        *("Pub", now_ms, _REGION, group, topic, message_id, tags, keys, store_host),
        *(body_bytes, took_ms, kind, offset_id, succeeded),
    )


def consuming(
    now_ms: int, group: str, request_id: str, message_id: str, retry_times: int, keys: str
) -> str:
    """A handler begins with a message."""
    return _line("SubBefore", now_ms, _REGION, group, request_id, message_id, retry_times, keys)


def consumed(
    request_id: str,
    message_id: str,
    took_ms: int,
    succeeded: bool,
    keys: str,
    outcome: int,
    now_ms: int,
    group: str,
) -> str:
    """A handler is done with a message."""
    return _line(
        *("SubAfter", request_id, message_id, took_ms, succeeded, keys, outcome, now_ms, group)
    )


def ended_transaction(
    now_ms: int,
    group: str,
    topic: str,
    message_id: str,
    tags: str,
    keys: str,
    store_host: str,
    transaction_id: str,
    state: str,
    from_check: bool,
) -> str:
    """A half message was committed or rolled back."""
    return _line(
        *("EndTransaction", now_ms, _REGION, group, topic, message_id, tags, keys, store_host),
        *(HALF, transaction_id, state, from_check),
    )
