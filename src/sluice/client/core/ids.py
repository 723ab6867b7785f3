"""This module makes the ids of messages: 32 hexadecimal digits, as RocketMQ's are.

An id goes out as the first property of a message. It is made in that form, and becomes a text when
somebody asks for it. This module does no IO and asks no clock.
"""

from __future__ import annotations

from itertools import count
from typing import Final, NamedTuple

_KEY_AT: Final = len(b"UNIQ_KEY\x01")
_KEY_END: Final = _KEY_AT + 32


def key_of(properties: bytes) -> str:
    """The id of a message, from properties that begin with it."""
    return properties[_KEY_AT:_KEY_END].decode()


class KeyRange(NamedTuple):
    """The ids of a batch: one stamp, and numbers that follow each other."""

    stamp: bytes  # the property with the id, up to the number
    first: int
    number: int

    def at(self, index: int) -> str:
        return f"{self.stamp[_KEY_AT:].decode()}{self.first + index & 0xFFFF:04X}"


class UniqueKeys:
    """Ids that no other message has: who makes them, the time, a number. For any thread."""

    __slots__ = ("_last", "_maker", "_next")

    def __init__(self, maker: bytes) -> None:
        assert len(maker) == 10
        self._maker = maker
        self._next = count().__next__
        self._last = (-1, b"")  # the time of the last stamp, and the stamp

    def make(self, now_ms: int) -> str:
        """32 hexadecimal digits, as RocketMQ's are."""
        return key_of(self.mark(now_ms))

    def mark(self, now_ms: int) -> bytes:
        """The property that holds a new id, as it goes over the wire."""
        last_ms, stamp = self._last
        if last_ms != now_ms:
            stamp = _stamp(self._maker, now_ms)
            self._last = (now_ms, stamp)
        return b"%b%04X\x02" % (stamp, self._next() & 0xFFFF)


class BatchKeys:
    """As `UniqueKeys`, many at a time. For one thread."""

    __slots__ = ("_maker", "_next")

    def __init__(self, maker: bytes) -> None:
        assert len(maker) == 10
        self._maker = maker
        self._next = 0

    def take(self, now_ms: int, number: int) -> KeyRange:
        """So many ids that follow each other."""
        first = self._next
        self._next = first + number & 0xFFFF
        return KeyRange(_stamp(self._maker, now_ms), first, number)


def _stamp(maker: bytes, now_ms: int) -> bytes:
    return b"UNIQ_KEY\x01%b%08X" % (maker.hex().upper().encode(), now_ms & 0xFFFFFFFF)
