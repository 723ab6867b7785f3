"""This module makes screens of SQL filters: patterns that what a filter wants must hold. Pure.

A filter that few messages pass is asked about very many. A screen is a pattern of bytes that is
searched for in the properties of many messages at once; where it is not found the filter would say
no. Where it is, the filter decides: a screen may let pass too much and never too little.

The properties stand as name 0x01 value 0x02, and a longer name with the same end passes too. What
Java reads as a number has many spellings (signs, zeros before it, the digits of other scripts), so
only values of plain digits that begin with none of the zeros are judged here; all others pass.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final, NamedTuple

_TEXTS_MAX: Final = 64
_BYTES_MAX: Final = 4096
# A value that is no number in plain digits, or begins with a zero.
_UNUSUAL: Final = rb"0|[0-9]*[^0-9\x02]"


class Screen(NamedTuple):
    """A pattern. A sharp one judges a value; others only ask whether the property is there."""

    pattern: bytes
    is_sharp: bool = False


def compiled(screen: Screen | None) -> re.Pattern[bytes] | None:
    return None if screen is None else re.compile(screen.pattern)


def has(name: str) -> Screen:
    """The property is there."""
    return Screen(_key(name))


def equals_text(name: str, *texts: bytes) -> Screen:
    """The property is one of these texts."""
    if len(texts) > _TEXTS_MAX:
        return has(name)
    choices = b"|".join(sorted(map(re.escape, texts)))
    return _bounded(name, rb"(?:%b)\x02" % choices)


def starts_with(name: str, text: bytes) -> Screen:
    return _bounded(name, re.escape(text))


def compares(name: str, symbol: str, limit: int) -> Screen:
    """The property, a whole number, is =, <, <=, > or >= the limit."""
    usual = _usual(symbol, limit)
    return has(name) if usual is None else _bounded(name, rb"(?:%b|%b)" % (usual, _UNUSUAL))


def is_between(name: str, low: int, high: int) -> Screen:
    first, last = _usual(">=", low), _usual("<=", high)
    if first is None or last is None:
        return compares(name, ">=", low) if last is None else compares(name, "<=", high)
    return _bounded(name, rb"(?:(?=%b)(?:%b)|%b)" % (first, last, _UNUSUAL))


def all_of(screens: Sequence[Screen | None]) -> Screen | None:
    """One of them is enough; a sharp one, if there is one."""
    there = [screen for screen in screens if screen is not None]
    return next((screen for screen in there if screen.is_sharp), there[0] if there else None)


def any_of(screens: Sequence[Screen | None]) -> Screen | None:
    """All of them are needed: what one does not judge may pass by it."""
    patterns = []
    for screen in screens:
        if screen is None:
            return None
        patterns.append(screen.pattern)
    joined = b"|".join(patterns)
    if len(joined) > _BYTES_MAX:
        return None
    return Screen(joined, all(screen is not None and screen.is_sharp for screen in screens))


def _key(name: str) -> bytes:
    return rb"%b\x01" % re.escape(name.encode())


def _bounded(name: str, value: bytes) -> Screen:
    pattern = _key(name) + value
    return Screen(pattern, is_sharp=True) if len(pattern) <= _BYTES_MAX else has(name)


def _usual(symbol: str, limit: int) -> bytes | None:
    """A pattern of whole numbers of plain digits without a sign that compare so; None: of any."""
    if symbol in ("<", ">="):
        # Of whole numbers, so that only the others are left.
        symbol, limit = ("<=", limit - 1) if symbol == "<" else (">", limit - 1)
    if limit < 1:
        return None
    digits = str(limit)
    if symbol == "=":
        return rb"%b\x02" % digits.encode()
    same = b""
    choices = []
    for index, digit in enumerate(digits):
        left = len(digits) - index - 1
        lowest = "0" if index else "1"
        first, last = (chr(ord(digit) + 1), "9") if symbol == ">" else (lowest, chr(ord(digit) - 1))
        if first <= last:
            choices.append(rb"%b[%b-%b][0-9]{%d}" % (same, first.encode(), last.encode(), left))
        same += digit.encode()
    if symbol == ">":
        # With more digits; those with as many may be followed by more.
        return b"|".join([*choices, rb"[1-9][0-9]{%d}" % len(digits)])
    shorter = [rb"[1-9][0-9]{0,%d}" % (len(digits) - 2)] if len(digits) > 1 else []
    return rb"(?:%b)\x02" % b"|".join([*choices, same, *shorter])
