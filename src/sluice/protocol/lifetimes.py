"""This module writes the end of a message's life into the queue entry that leads to it.

A message that is not to be delivered after some time says so in a property of the broker's own, in
milliseconds since 1970. The third field of its queue entry has that time in its upper half, in
whole seconds, and the tag's hash in the lower half as always: a read decides without looking at the
message, and whoever compares tags looks at the lower half only. This module may not do IO, read a
clock, or log.
"""

from __future__ import annotations

from typing import Final

EXPIRES_NAME: Final = b"_SYS_MSG_EXPIRES_MS_"
LEAST: Final = 1 << 32  # queue entries below it have no end of life

_EPOCH_S: Final = 1_577_836_800  # 2020-01-01: 31 bits of seconds reach the year 2088
_SECONDS_MAX: Final = 0x7FFFFFFF
_DIGITS_MAX: Final = 16


def read_ms(text: bytes | None) -> int | None:
    """The property's value as a time; None where it is none."""
    if text is None or not text.isdigit() or len(text) > _DIGITS_MAX:
        return None
    return int(text)


def code_of(when_ms: int) -> int:
    """A time as queue entries carry it: seconds, rounded up. A later time has a greater code."""
    seconds = -(-when_ms // 1000) - _EPOCH_S
    return max(1, min(seconds, _SECONDS_MAX)) << 32


def with_end(tags_code: int, text: bytes | None) -> int:
    """The field of a message with this tag's hash whose property has this value."""
    when_ms = read_ms(text)
    return tags_code if when_ms is None else code_of(when_ms) | tags_code & 0xFFFFFFFF


def without_end(code: int) -> int:
    """The tag's hash alone, as a message without an end has it."""
    low = code & 0xFFFFFFFF
    return low - LEAST if low & 0x80000000 else low


def alive_from(now_ms: int) -> int:
    """Queue entries from `LEAST` up to below this one lead to messages whose life is over."""
    return (max(0, now_ms // 1000 - _EPOCH_S) + 1) << 32
