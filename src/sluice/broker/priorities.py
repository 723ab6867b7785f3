"""This module chooses the queue of a message by its priority. Pure: no clock, no file.

A queue holds messages of one priority: the number is the queue, and what is above the last queue
goes into the last. Consumers that pop take the last queue first. As in RocketMQ 5.5, a message that
is delayed, transactional or ordered by a sharding key has no priority: the property is taken off.
What is no number, or below zero, is left as it is and means nothing.
"""

from __future__ import annotations

import re
from typing import Final

from sluice.protocol import records

PRIORITY_NAME: Final = b"_SYS_MSG_PRIORITY_"

_NUMBER: Final = re.compile(rb"\+?[0-9]{1,10}")
_INT_MAX: Final = (1 << 31) - 1
# Messages with one of these are of another kind, which comes first.
_OTHER_KINDS: Final = (
    *(b"DELAY", b"TIMER_DELIVER_MS", b"TIMER_DELAY_SEC", b"TIMER_DELAY_MS"),
    b"__SHARDINGKEY",
)


def priority_of(properties: bytes) -> int | None:
    """A message's priority; None where it has none."""
    text = records.property_value(properties, PRIORITY_NAME)
    if text is None or _NUMBER.fullmatch(text) is None or int(text) > _INT_MAX:
        return None
    return int(text)


def routed(properties: bytes, queue_id: int, write_queues: int) -> tuple[bytes, int]:
    """Properties and queue of a message that may have a priority and is sent to `queue_id`."""
    priority = priority_of(properties)
    if priority is None:
        return properties, queue_id
    if _is_other(properties):
        return without(properties, PRIORITY_NAME), queue_id
    return properties, min(priority, write_queues - 1)


def without(properties: bytes, name: bytes) -> bytes:
    """Properties without those of this name."""
    parts = [part for part in properties.split(b"\x02") if part]
    return b"".join(part + b"\x02" for part in parts if part.partition(b"\x01")[0] != name)


def _is_other(properties: bytes) -> bool:
    half = records.property_value(properties, b"TRAN_MSG")
    if half is not None and half.lower() == b"true":
        return True
    return any(records.property_value(properties, name) for name in _OTHER_KINDS)
