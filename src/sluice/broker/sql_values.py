"""This module compares values of SQL filters as RocketMQ's broker does. Pure: no clock, no file.

A message's properties are texts; a filter compares them with each other and with numbers. What a
text means as a number, and how numbers are ordered, are Java's rules: `Integer.valueOf` takes no
blank, `Double.valueOf` does and knows "NaN" too, which is above everything. A text that is no
number where one is needed raises `CannotCompare`: the whole filter then says no, whatever the rest
of it would have said.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable
from enum import Enum
from typing import Any, Final

Compare = Callable[[Any, Any], bool]


class CannotCompare(Exception):
    """Two values have no order: the message is not wanted."""


class Kind(Enum):
    """What a part of a filter gives, if it gives anything at all for a message."""

    TEXT = "text"  # bytes
    INT = "int"
    LONG = "long"
    DOUBLE = "double"
    BOOLEAN = "boolean"
    NOTHING = "nothing"  # never a value: the negative of something that is no number


NUMBERS: Final = (Kind.INT, Kind.LONG, Kind.DOUBLE)
INT_MAX: Final = (1 << 31) - 1
LONG_MAX: Final = (1 << 63) - 1
QUICK_DIGITS: Final = 9  # fit into both whole types
_LONG_DIGITS: Final = 19
_BLANKS: Final = bytes(range(0x21))
_DECIMAL: Final = re.compile(rb"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?[fFdD]?")
_HEXADECIMAL: Final = re.compile(
    rb"[+-]?0[xX](?:[0-9a-fA-F]+\.?[0-9a-fA-F]*|\.[0-9a-fA-F]+)[pP][+-]?[0-9]+[fFdD]?"
)
_WORDS: Final = {
    sign + word: float((sign + word).decode())
    for sign in (b"", b"+", b"-")
    for word in (b"NaN", b"Infinity")
}


# ------------------------------------------------------------------------------------------ reading


def int_of(text: bytes) -> int:
    """Java's `Integer.valueOf`."""
    if len(text) <= QUICK_DIGITS and text.isdigit():
        return int(text)
    return _whole(text, INT_MAX)


def long_of(text: bytes) -> int:
    """Java's `Long.valueOf`."""
    if len(text) <= QUICK_DIGITS and text.isdigit():
        return int(text)
    return _whole(text, LONG_MAX)


def _whole(text: bytes, largest: int) -> int:
    digits = text[1:] if text[:1] in (b"+", b"-") else text
    if not digits.isdigit():
        digits = _ascii_digits(digits)
    digits = digits.lstrip(b"0") or b"0"
    value = int(digits) if len(digits) <= _LONG_DIGITS else largest + 2
    if text[:1] == b"-":
        value = -value
    if not -largest - 1 <= value <= largest:
        raise CannotCompare
    return value


def _ascii_digits(text: bytes) -> bytes:
    """Java reads the digits of every script, as long as each is one UTF-16 unit."""
    try:
        letters = text.decode()
    except UnicodeDecodeError:
        raise CannotCompare from None
    if not letters.isdecimal() or max(letters) > "\uffff":
        raise CannotCompare
    return "".join(str(int(letter)) for letter in letters).encode()


def double_of(text: bytes) -> float:
    """Java's `Double.valueOf`."""
    if len(text) <= QUICK_DIGITS and text.isdigit():
        return float(text)
    text = text.strip(_BLANKS)
    if _DECIMAL.fullmatch(text) is not None:
        return float(text.rstrip(b"fFdD"))
    if text in _WORDS:
        return _WORDS[text]
    if _HEXADECIMAL.fullmatch(text) is None:
        raise CannotCompare
    # The suffixes d and f are digits of a mantissa too; behind the exponent they are suffixes.
    mantissa, _, exponent = text.lower().partition(b"p")
    try:
        return float.fromhex(f"{mantissa.decode()}p{exponent.rstrip(b'fd').decode()}")
    except OverflowError:
        return -math.inf if text.startswith(b"-") else math.inf


def boolean_of(text: bytes) -> bool:
    """Java's `Boolean.valueOf`: every text but one is false."""
    return text.lower() == b"true"


_READERS: Final[dict[Kind, Callable[[bytes], Any]]] = {
    Kind.INT: int_of,
    Kind.LONG: long_of,
    Kind.DOUBLE: double_of,
    Kind.BOOLEAN: boolean_of,
}


def reader_of(kind: Kind) -> Callable[[bytes], Any]:
    """How a text becomes what it is compared with."""
    return _READERS[kind]


# ---------------------------------------------------------------------------------------- comparing


def double_order(left: float, right: float) -> int:
    """Java's `Double.compare`: -0.0 is below 0.0, NaN is above all and equal to itself."""
    if left < right:
        return -1
    if left > right:
        return 1
    if left == right:
        return int(math.copysign(1, left) - math.copysign(1, right)) if left == 0 else 0
    return int(math.isnan(left)) - int(math.isnan(right))


_OPERATORS: Final[dict[str, Compare]] = {
    "=": operator.eq,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}
MIRRORED: Final = {"=": "=", "<": ">", "<=": ">=", ">": "<", ">=": "<="}


def with_number(symbol: str, kind: Kind) -> Compare:
    """Compares what a text was read as with a number of a filter, which is neither NaN nor 0.0."""
    if kind is Kind.DOUBLE and symbol in (">", ">="):
        # NaN is above every number, and Python says no to whatever one asks about it.
        below = _OPERATORS["<=" if symbol == ">" else "<"]
        return lambda left, right: not below(left, right)
    return _OPERATORS[symbol]


def comparison(symbol: str, left: Kind, right: Kind) -> Compare:
    """Compares two values of these kinds."""
    if left is Kind.NOTHING or right is Kind.NOTHING:
        return _never
    if left is Kind.BOOLEAN and right is Kind.TEXT:
        return _no_order  # RocketMQ reads the wrong side as a boolean and fails
    if left is Kind.TEXT and right is Kind.TEXT:
        return operator.eq if symbol == "=" else _as_doubles(_OPERATORS[symbol])
    if left is Kind.TEXT:
        read, compare = reader_of(right), with_number(symbol, right)
        return lambda a, b: compare(read(a), b)
    if right is Kind.TEXT:
        mirrored = comparison(MIRRORED[symbol], right, left)
        return lambda a, b: mirrored(b, a)
    if left is Kind.BOOLEAN or right is Kind.BOOLEAN:
        return operator.is_ if left is right else _never
    if Kind.DOUBLE in (left, right):
        compare = _OPERATORS[symbol]
        return lambda a, b: compare(float(a), float(b))
    return _OPERATORS[symbol]


def _as_doubles(compare: Compare) -> Compare:
    """Texts have no order of their own; RocketMQ tries whether they are numbers."""
    return lambda a, b: compare(double_order(double_of(a), double_of(b)), 0)


def _never(left: Any, right: Any) -> bool:
    return False


def _no_order(left: Any, right: Any) -> bool:
    raise CannotCompare
