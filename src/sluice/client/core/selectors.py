"""This module chooses a queue by what is sent: by hash, at random, by machine room.

A selector is any function of (queues, message, argument). The hash is Java's, so that a Java
and a Python producer send one key to one queue.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

from sluice.client.core.messages import Message
from sluice.errors import MessageInvalid, NoRoute
from sluice.protocol import records
from sluice.protocol.json_members import MessageQueue

Selector = Callable[[Sequence[MessageQueue], Message, Any], MessageQueue]

_INT32: Final = 1 << 31
_INT64: Final = 1 << 63


def java_hash_of(value: object) -> int:
    """What Java's hashCode gives for a String, Integer, Long or Boolean of the same value."""
    if isinstance(value, str):
        return records.java_hash(value.encode("utf-8", "surrogatepass"))
    if isinstance(value, bool):
        return 1231 if value else 1237
    if isinstance(value, int) and -_INT64 <= value < _INT64:
        if -_INT32 <= value < _INT32:
            return value
        bits = value & 0xFFFFFFFFFFFFFFFF
        folded = (bits ^ bits >> 32) & 0xFFFFFFFF
        return folded - (1 << 32) if folded & 0x80000000 else folded
    raise MessageInvalid(f"a hash needs a text or a 64-bit number, not {type(value).__name__}")


def hash_selector(
    queues: Sequence[MessageQueue], message: Message, argument: object
) -> MessageQueue:
    """By the hash of the argument, of the sharding key where there is none."""
    value = java_hash_of(message.sharding_key if argument is None else argument)
    # Java's remainder keeps the sign, and is made positive afterwards.
    return queues[abs(value) % len(queues)]


def random_selector(
    queues: Sequence[MessageQueue], message: Message, argument: object
) -> MessageQueue:
    """Any queue."""
    return random.choice(queues)


def machine_room_selector(rooms: Iterable[str]) -> Selector:
    """Only queues of brokers whose name begins with one of these rooms and `@`; at random."""
    wanted = frozenset(rooms)

    def select(queues: Sequence[MessageQueue], message: Message, argument: object) -> MessageQueue:
        near = [queue for queue in queues if queue.broker_name.partition("@")[0] in wanted]
        if not near:
            raise NoRoute(
                f"no broker of the rooms {', '.join(sorted(wanted))} serves {message.topic}; "
                "brokers are named room@name"
            )
        return random.choice(near)

    return select
