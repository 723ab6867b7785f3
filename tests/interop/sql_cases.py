"""This module makes messages and filters for comparisons with RocketMQ, from a seed.

Properties are few and their values come from a short list, so that most filters want some messages
and not others. Filters are made by the grammar; a part of them is then broken, so that what is
refused is compared too.
"""

from __future__ import annotations

import random
from collections.abc import Callable

NAMES = ("a", "b", "c", "$d_1", "TAGS", "missing")
NUMBERS = ("0", "1", "2", "5", "10", "-1", "-5", "+3", "007", "2147483647", "2147483648")
MORE_NUMBERS = ("-2147483648", "-2147483649", "9223372036854775807", "9223372036854775808")
FRACTIONS = ("1.5", "2.0", "-0.0", "0.0", ".5", "5.", "1e3", "1E-3", "5d", "2f", "0x1p3", "1e400")
WORDS = ("x", "red", "blue", "TRUE", "true", "False", "NaN", "Infinity", "-Infinity", "null")
ODD = (
    " 5",
    "5 ",
    "1_0",
    "0x10",
    "café",
    "中文",
    "😀",
    "it's",
    "a''b",
    "٣",
    "\uff11",
    "--",
    "%",
    "5\x01x",
)
VALUES = (*NUMBERS, *MORE_NUMBERS, *FRACTIONS, *WORDS, *ODD)
TAGS = ("TagA", "TagB", "TagC", "x")

LITERALS = (
    *("0", "1", "2", "5", "10", "7L", "2147483647", "2147483648", "9223372036854775807", "1.5"),
    *("2.0", ".5", "5.", "1e3", "1E-3", "0.1", "3l", "0L"),
)
BAD_LITERALS = ("0.0", "1e400", "1e-400", "9223372036854775808", "00", "08", "1__0", "0x1", "1e")
BROKEN = (
    "",
    "AND",
    "=",
    "(",
    ")",
    "'",
    "!=",
    "==",
    "LIKE 'x'",
    "#",
    "NOT",
    ",",
    "IS",
    "-",
    "+",
    ".",
)
SPACES = (" ", "  ", "\t", "\n", " /* no * AND ** matter */ ", " -- to the end\n", "\r\n", "\f")


def properties(chance: random.Random) -> dict[str, str]:
    """The properties of one message, its tag among them."""
    found: dict[str, str] = {}
    for name in NAMES[:-1]:
        if chance.random() < 0.7:
            found[name] = chance.choice(TAGS if name == "TAGS" else VALUES)
    return found


def stored_form(values: dict[str, str]) -> str:
    return "".join(f"{name}\x01{value}\x02" for name, value in values.items())


class Expressions:
    """Filters after RocketMQ's grammar; `broken` is how many of 100 are changed afterwards."""

    def __init__(self, seed: int, broken: int = 15) -> None:
        self._chance = random.Random(seed)
        self._broken = broken

    def one(self) -> str:
        chance = self._chance
        text = self._or(chance.choice((1, 1, 2, 3, 4)))
        if chance.randrange(100) < self._broken:
            words = text.split(" ")
            at = chance.randrange(len(words))
            words[at : at + chance.randrange(2)] = [chance.choice((*BROKEN, *BAD_LITERALS))]
            text = " ".join(words)
        if chance.random() < 0.1:
            text = text.replace(" ", chance.choice(SPACES))
        return text

    def _or(self, depth: int) -> str:
        return self._chain(" OR ", lambda: self._chain(" AND ", lambda: self._condition(depth)))

    def _condition(self, depth: int) -> str:
        if depth > 0 and self._chance.random() < 0.3:
            return f"{self._chance.choice(('', 'NOT '))}({self._or(depth - 1)})"
        return self._equality(depth)

    def _chain(self, word: str, make: Callable[[], str]) -> str:
        parts = [make() for _ in range(self._chance.choice((1, 1, 1, 2, 2, 3)))]
        return self._cased(word).join(parts)

    def _equality(self, depth: int) -> str:
        kind = self._chance.randrange(10)
        if kind < 3:
            return (
                f"{self._operand(depth)} {self._chance.choice(('=', '<>'))} {self._operand(depth)}"
            )
        if kind < 5:
            return self._cased(
                f"{self._operand(depth)} IS{self._chance.choice((' NOT', ''))} NULL", " "
            )
        if kind == 5:
            left, right = self._comparison(depth), self._operand(depth)
            return f"{left} {self._chance.choice(('=', '<>'))} {right}"
        return self._comparison(depth)

    def _comparison(self, depth: int) -> str:
        chance = self._chance
        negation = chance.choice(("", "NOT "))
        match chance.randrange(5):
            case 0 | 1:
                sign = chance.choice(("<", "<=", ">", ">="))
                return f"{self._number(depth)} {sign} {self._number(depth)}"
            case 2:
                words = self._cased(f"{negation}BETWEEN")
                low, high = self._number(depth), self._number(depth)
                return f"{self._number(depth)} {words} {low} AND {high}"
            case 3:
                left = chance.choice(NAMES) if chance.random() < 0.95 else self._operand(depth)
                words = self._cased(f"{negation}IN")
                texts = ", ".join(self._text() for _ in range(chance.choice((1, 2, 6))))
                return f"{left} {words} ({texts})"
            case _:
                left = self._operand(depth)
                word = chance.choice(("CONTAINS", "STARTSWITH", "ENDSWITH"))
                return f"{left} {self._cased(f'{negation}{word}')} {self._text()}"

    def _number(self, depth: int) -> str:
        """Something that has an order; seldom something that has none."""
        chance = self._chance
        kind = chance.randrange(30)
        if kind == 0:
            return self._operand(depth)
        if kind < 16:
            return chance.choice(NAMES)
        return chance.choice(("", "", "", "-", "+", "--")) + chance.choice(LITERALS)

    def _operand(self, depth: int) -> str:
        chance = self._chance
        kind = chance.randrange(40)
        if kind < 20:
            return chance.choice(NAMES)
        if kind < 29:
            return chance.choice(LITERALS)
        if kind < 35:
            return self._text()
        if kind == 35:
            return f"{chance.choice(('-', '+', '- ', '--'))}{self._operand(0)}"
        if kind == 36:
            return self._cased(chance.choice(("TRUE", "FALSE", "TRUE", "FALSE", "NULL")))
        if kind == 37:
            return f"{self._cased('NOT')} {self._operand(depth)}"
        if depth <= 0:
            return chance.choice(NAMES)
        return f"({self._or(depth - 1)})"

    def _text(self) -> str:
        chance = self._chance
        value = chance.choice((*VALUES, *TAGS, ""))
        if value and chance.random() < 0.3:
            value = value[: chance.randrange(len(value)) + 1]
        return "'" + value.replace("'", "''") + "'"

    def _cased(self, text: str, *parts: str) -> str:
        """Keywords in any case; with a part, only what stands after its first place."""
        if parts and parts[0] in text:
            head, _, tail = text.rpartition(" IS")
            return f"{head}{self._cased(' IS' + tail)}"
        return self._chance.choice((text, text, text.lower(), text.title()))
