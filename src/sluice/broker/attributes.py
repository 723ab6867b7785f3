"""This module knows the attributes of a topic and how they are changed. Pure: no clock, no file.

A change is text, "+name=value,-name": add or alter, and take away. Some attributes decide how the
topic's queues are stored and cannot be changed once the topic is there. Names that RocketMQ does
not have are Sluice's own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple

from sluice.errors import ParameterInvalid, SluiceError

QUEUE_TYPE: Final = "queue.type"
BATCHES: Final = "BatchCQ"  # of topics that hold batches whole
MESSAGE_TYPE: Final = "message.type"
STORAGE: Final = "storage"
IN_MEMORY: Final = "memory"
MEMORY_BYTES: Final = "memory.bytes.max"
MEMORY_FULL: Final = "memory.when.full"
DEDUP_WINDOW: Final = "dedup.window.ms"
MESSAGE_TTL: Final = "message.ttl.ms"
PRIORITY: Final = "PRIORITY"

DAY_MS: Final = 24 * 3_600_000
TTL_MS_MAX: Final = 365 * DAY_MS
DEDUP_WINDOW_MS_MAX: Final = DAY_MS
MEMORY_BYTES_MIN: Final = 64 * 1024
MEMORY_BYTES_MAX: Final = 1 << 40
_CHANGES_MAX: Final = 64


class _Attribute(NamedTuple):
    changeable: bool
    values: tuple[str, ...]  # none: a whole number
    limits: tuple[int, int] | None = None  # of that number; None: any


_KNOWN: Final = {
    QUEUE_TYPE: _Attribute(False, ("SimpleCQ", BATCHES)),
    "cleanup.policy": _Attribute(False, ("DELETE",)),
    MESSAGE_TYPE: _Attribute(
        True, ("UNSPECIFIED", "NORMAL", "FIFO", "DELAY", "TRANSACTION", PRIORITY)
    ),
    "reserve.time": _Attribute(True, ()),
    DEDUP_WINDOW: _Attribute(True, (), (1, DEDUP_WINDOW_MS_MAX)),
    MESSAGE_TTL: _Attribute(True, (), (1, TTL_MS_MAX)),
    STORAGE: _Attribute(False, ("log", IN_MEMORY)),
    MEMORY_BYTES: _Attribute(True, (), (MEMORY_BYTES_MIN, MEMORY_BYTES_MAX)),
    MEMORY_FULL: _Attribute(True, ("drop", "refuse")),
}


def parse_changes(text: str) -> dict[str, str]:
    """Signed names with their values, as "+name=value,-name" has them."""
    changes: dict[str, str] = {}
    for part in filter(None, text.split(",")):
        name, equals, value = part.partition("=")
        if equals and not name.startswith("+"):
            raise SluiceError(f"add/alter attribute format is wrong: {name[:100]}")
        if not equals and not name.startswith("-"):
            raise SluiceError(f"delete attribute format is wrong: {name[:100]}")
        if name in changes:
            raise SluiceError(f"key duplication: {name[:100]}")
        changes[name] = value
    return changes


def altered(current: Mapping[str, str] | None, changes: Mapping[str, str]) -> dict[str, str]:
    """A topic's attributes after a change; `current` is None for a new topic."""
    if len(changes) > _CHANGES_MAX:
        raise ParameterInvalid(f"{len(changes)} attributes at once, {_CHANGES_MAX} at most")
    if changes.get(f"+{MESSAGE_TYPE}") == "MIXED":
        raise ParameterInvalid("MIXED message type is not supported.")
    result = dict(current or {})
    seen: set[str] = set()
    for signed, value in changes.items():
        sign, name = signed[:1], signed[1:]
        if name in seen:
            raise SluiceError(f"alter duplication key. key: {name[:100]}")
        seen.add(name)
        if sign not in ("+", "-"):
            raise SluiceError(f"wrong format key: {signed[:100]}")
        if sign == "-" and current is None:
            raise SluiceError(
                f"only add attribute is supported while creating topic. key: {name[:100]}"
            )
        if sign == "-" and name not in result:
            raise SluiceError(f"attempt to delete a nonexistent key: {name[:100]}")
        _check(name, value if sign == "+" else None, is_new=current is None)
        if sign == "+":
            result[name] = value
        else:
            del result[name]
    _check_together(result)
    return result


def _check_together(values: Mapping[str, str]) -> None:
    """Refuse what contradicts itself."""
    if values.get(STORAGE) != IN_MEMORY:
        for name in (MEMORY_BYTES, MEMORY_FULL):
            if name in values:
                raise ParameterInvalid(f"{name} is for topics with {STORAGE}={IN_MEMORY} only")
        return
    if values.get(QUEUE_TYPE) == BATCHES:
        raise ParameterInvalid(f"a topic with {STORAGE}={IN_MEMORY} has no queue.type=BatchCQ")
    kind = values.get(MESSAGE_TYPE)
    if kind in ("DELAY", "TRANSACTION"):
        raise ParameterInvalid(
            f"a topic with {STORAGE}={IN_MEMORY} takes no messages of message.type={kind}"
        )


def _check(name: str, value: str | None, *, is_new: bool) -> None:
    known = _KNOWN.get(name)
    if known is None:
        raise SluiceError(f"unsupported key: {name[:100]}")
    if not is_new and not known.changeable:
        raise SluiceError(f"attempt to update an unchangeable attribute. key: {name}")
    if value is None:
        return
    if known.values:
        if value not in known.values:
            allowed = ", ".join(known.values)
            raise SluiceError(f"value is not in set: {value[:100]!r}; allowed: {allowed}")
    elif not value.removeprefix("-").isdecimal() or len(value) > 19:
        raise SluiceError(f"{name} is no whole number: {value[:100]!r}")
    elif known.limits is not None and not known.limits[0] <= int(value) <= known.limits[1]:
        low, high = known.limits
        raise SluiceError(f"{name} is out of range: {value}; allowed: {low} to {high}")
