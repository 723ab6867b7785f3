"""This module holds the value classes that every layer shares; it knows no wire, no disk and no
clock.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, NamedTuple

# An address as messages carry it: 4 or 16 address bytes, then the port as a big-endian int32.
LOOPBACK_HOST: Final = b"\x7f\x00\x00\x01\x00\x00\x00\x00"

Buffer = bytes | bytearray | memoryview


class QueueKey(NamedTuple):
    """One queue of one topic in this broker group: the unit of order and of offsets."""

    topic: str
    queue_id: int

    def __str__(self) -> str:
        return f"{self.topic}/{self.queue_id}"


@dataclass(slots=True)
class Message:
    """A message on its way into the store; offsets, position and store time are not decided yet.

    `properties` is the wire form (name 0x01 value 0x02, repeated): it is kept as the producer sent
    it, so that nothing is decoded and encoded again. `count` is the number of queue offsets the
    entry takes: 1, or more for a batch that is stored whole.
    """

    topic: str
    queue_id: int
    body: Buffer
    properties: bytes = b""
    flag: int = 0
    sys_flag: int = 0
    born_ms: int = 0
    born_host: bytes = LOOPBACK_HOST
    reconsume_times: int = 0
    prepared_offset: int = 0
    count: int = 1


class Placed(NamedTuple):
    """Where an appended message went: its place in the log and in its queue."""

    position: int
    size: int
    queue_offset: int
    store_ms: int

    @property
    def end(self) -> int:
        return self.position + self.size


class PropertyFilter(NamedTuple):
    """A test of a message that has to see its properties; one by tags needs the tag's code only.

    `test` takes them between two separators: 0x02, the properties, 0x02.
    """

    test: Callable[[bytes], bool]
    steps: int  # that one test takes at most
    # Where it is not found in properties, also of many messages together, the test says no. It does
    # not ask for the separator before a property; the one behind is always there.
    screen: re.Pattern[bytes] | None = None

    def matches(self, properties: Buffer) -> bool:
        return self.test(b"".join((b"\x02", properties, b"\x02")))


def message_id(store_host: bytes, position: int) -> str:
    """RocketMQ's "offset message id": the store's address and the position in its log, in hex."""
    return (store_host + position.to_bytes(8, "big")).hex().upper()
