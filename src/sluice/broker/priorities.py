"""This module chooses the queue of a message by its priority. Pure: no clock, no file.

A queue holds messages of one priority: the number is the queue, and what is above the last queue
goes into the last. Consumers that pop take the last queue first. As in RocketMQ 5.5, a message that
is delayed, transactional or ordered by a sharding key has no priority: the property is taken off.
What is no number, or below zero, is left as it is and means nothing.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

from sluice.errors import SluiceError
from sluice.protocol import records

PRIORITY_NAME: Final = b"_SYS_MSG_PRIORITY_"
# An attribute of a group: how many of a hundred of its pops go by priority. The others see to it
# that what has a low one is read at all.
FACTOR_NAME: Final = "priority.factor"
FACTOR_MAX: Final = 100

_NUMBER: Final = re.compile(rb"\+?[0-9]{1,10}")
_INT_MAX: Final = (1 << 31) - 1
_FACTOR: Final = re.compile(r"[0-9]{1,3}")
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


def priority_factor(attributes: Mapping[str, object]) -> int:
    """How many of a hundred pops go by priority for a group with these attributes."""
    text = str(attributes.get(FACTOR_NAME, FACTOR_MAX))
    return int(text) if _FACTOR.fullmatch(text) else FACTOR_MAX


def altered_attributes(
    current: Mapping[str, str] | None, changes: Mapping[str, object]
) -> dict[str, str]:
    """A group's attributes after a change, as `attributes.altered` has a topic's; `current` is None
    for a new group.
    """
    result = dict(current or {})
    for signed, value in changes.items():
        sign, name = signed[:1], signed[1:]
        if sign not in ("+", "-"):
            raise SluiceError(f"wrong format key: {signed[:100]}")
        if name != FACTOR_NAME:
            raise SluiceError(f"unsupported key: {name[:100]}")
        if f"+{name}" in changes and f"-{name}" in changes:
            raise SluiceError(f"alter duplication key. key: {name}")
        if sign == "-":
            if current is None:
                raise SluiceError(
                    f"only add attribute is supported while creating a group. key: {name}"
                )
            if result.pop(name, None) is None:
                raise SluiceError(f"attempt to delete a nonexistent key: {name}")
        else:
            text = str(value)
            if _FACTOR.fullmatch(text) is None or int(text) > FACTOR_MAX:
                raise SluiceError(f"{name} is {text[:100]!r}; allowed: 0 to {FACTOR_MAX}")
            result[name] = text
    return result


def without(properties: bytes, name: bytes) -> bytes:
    """Properties without those of this name."""
    parts = [part for part in properties.split(b"\x02") if part]
    return b"".join(part + b"\x02" for part in parts if part.partition(b"\x01")[0] != name)


def _is_other(properties: bytes) -> bool:
    half = records.property_value(properties, b"TRAN_MSG")
    if half is not None and half.lower() == b"true":
        return True
    return any(records.property_value(properties, name) for name in _OTHER_KINDS)
