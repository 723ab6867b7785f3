"""This module reads SQL filters: text -> a test of a message's properties. Pure: no clock, no file.

The language is RocketMQ 5.5's (its grammar is SQL-92's conditions without LIKE and arithmetic, and
with CONTAINS, STARTSWITH and ENDSWITH):

    or          and {OR and}
    and         equality {AND equality}
    equality    comparison {("=" | "<>") comparison | IS [NOT] NULL}
    comparison  unary { (">" | ">=" | "<" | "<=") unary
                      | [NOT] (CONTAINS | STARTSWITH | ENDSWITH) text
                      | [NOT] BETWEEN unary AND unary | [NOT] IN "(" text {"," text} ")" }
    unary       {"+" | "-" | NOT} (literal | property | "(" or ")")

As there, reading stops where the filter is whole, and what follows is not looked at: the caller
learns where that was. Nothing is evaluated but what was built here, part by part. The size of a
text, the depth of its nesting and the number of its parts are bounded.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import lru_cache
from typing import Final, NamedTuple

from sluice.broker import sql_nodes as nodes
from sluice.broker.sql_nodes import Node
from sluice.broker.sql_screen import compiled
from sluice.broker.sql_values import INT_MAX, LONG_MAX, CannotCompare, Kind
from sluice.errors import SubscriptionIllegal
from sluice.model import PropertyFilter

TEXT_MAX: Final = 8192  # characters
DEPTH_MAX: Final = 32
PARTS_MAX: Final = 2048  # properties, literals and operators; the texts of an IN are not counted
# Filters, also wrong ones, that are kept: 25 MB of short ones at most, and 10 MB of long ones.
_SHORT_MAX: Final = 1024  # characters
_SHORT_KEPT_MAX: Final = 512
_LONG_KEPT_MAX: Final = 32
_QUOTED_MAX: Final = 40
_DIGITS_MAX: Final = 20  # what is longer is too large

# What is between two words. A pattern of its own, so that nothing of it is tried again as a word;
# possessive groups would do that too, but before Python 3.11.5 they can end at a wrong place.
_BETWEEN: Final = re.compile(
    r"(?:[ \t\n\r\f]|--[^\n\r]*(?:\r\n|\n|\r)|/\*[^*]*\*(?:\*|[^*/][^*]*\*)*/)*"
)
_TOKEN: Final = re.compile(
    r"""(?: (?P<float> [0-9]+\.[0-9]*(?:[eE][+-]?[0-9]+)? | \.[0-9]+(?:[eE][+-]?[0-9]+)?
                 | [0-9]+[eE][+-]?[0-9]+ )
      | (?P<whole> 0 | [1-9][0-9]*[lL]? )
      | (?P<text> '[^']*(?:''[^']*)*' )
      | (?P<word> [A-Za-z_$][A-Za-z0-9_$]* )
      | (?P<sign> <> | <= | >= | [=<>(),+\-] )
      | (?P<end> \Z ) )""",
    re.VERBOSE,
)
_LITERALS: Final = {"TRUE": True, "FALSE": False, "NULL": None}
_WORDS: Final = {"NOT", "AND", "OR", "BETWEEN", "IN", "IS", *_LITERALS, *nodes.PARTS}


class Token(NamedTuple):
    """One word of a filter. `kind` is a group of the pattern, or for signs and the language's own
    words the word itself.
    """

    kind: str
    text: str
    at: int


class SqlFilter(NamedTuple):
    """A filter that was understood."""

    test: PropertyFilter
    ignored_at: int  # where reading stopped, -1 where that was the text's end


def read_filter(text: str) -> SqlFilter:
    """The filter of an SQL text; raises SubscriptionIllegal with the place of the fault.

    A filter takes some sixty times the memory of its text. So callers keep texts, and ask for the
    filter each time: those in use are kept here.
    """
    result = _read_short(text) if len(text) <= _SHORT_MAX else _read_long(text)
    if isinstance(result, str):
        raise SubscriptionIllegal(result)
    return result


def _read(text: str) -> SqlFilter | str:
    if len(text) > TEXT_MAX:
        return f"the SQL filter has {len(text)} characters, {TEXT_MAX} at most"
    parser = _Parser(text)
    try:
        root = parser.whole()
    except SubscriptionIllegal as error:
        return str(error)
    test = PropertyFilter(_test_of(root.run), root.steps, compiled(root.screen))
    return SqlFilter(test, parser.ignored_at())


_read_short = lru_cache(maxsize=_SHORT_KEPT_MAX)(_read)
_read_long = lru_cache(maxsize=_LONG_KEPT_MAX)(_read)


def _test_of(run: nodes.Run) -> Callable[[bytes], bool]:
    def test(data: bytes) -> bool:
        # Not `in`: for bytes that makes an error first, and costs three times as much.
        if data.find(b"\x01\x02") >= 0:
            data = nodes.without_empty(data)
        try:
            return run(data) is True
        except CannotCompare:
            return False

    return test


class _Parser:
    """Reads one text, a token ahead of what it has understood."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._parts = 0
        self._depth = 0
        self._next = self._scan(0)

    def whole(self) -> Node:
        at = self._next.at
        return self._made(at, nodes.boolean, self._or())

    def ignored_at(self) -> int:
        return -1 if self._next.kind == "end" else self._next.at

    # --------------------------------------------------------------------------------------- tokens

    def _scan(self, at: int) -> Token:
        between = _BETWEEN.match(self._text, at)
        assert between is not None, "the pattern matches nothing too"
        match = _TOKEN.match(self._text, between.end())
        if match is None:
            self._end = between.end()
            raise self._wrong(self._end, "no word of a filter begins with")
        self._end = match.end()
        kind = match.lastgroup
        assert kind is not None, "every alternative has a name"
        text = match[kind]
        start = match.start(kind)
        if kind == "sign":
            return Token(text, text, start)
        if kind == "word" and text.upper() in _WORDS:
            return Token(text.upper(), text, start)
        return Token(kind, text, start)

    def _take(self) -> Token:
        token = self._next
        self._next = self._scan(self._end)
        return token

    def _skip(self, kind: str) -> None:
        if self._next.kind != kind:
            raise self._wrong(self._next.at, f"{kind} expected, found")
        self._take()

    def _took(self, kind: str) -> bool:
        if self._next.kind != kind:
            return False
        self._take()
        return True

    def _wrong(self, at: int, why: str) -> SubscriptionIllegal:
        found = self._text[at : at + _QUOTED_MAX]
        return SubscriptionIllegal(
            f"the SQL filter is wrong at character {at + 1}: {why} {found!r}"
            if found
            else f"the SQL filter is wrong at character {at + 1}: {why} its end"
        )

    def _made(self, at: int, make: Callable[..., Node], *arguments: object, **more: object) -> Node:
        """A part, if it may stand there and there is room for it."""
        try:
            node = make(*arguments, **more)
        except nodes.Illegal as error:
            raise SubscriptionIllegal(
                f"the SQL filter is wrong at character {at + 1}: {error}"
            ) from None
        self._parts += 1
        if self._parts > PARTS_MAX:
            raise SubscriptionIllegal(
                f"the SQL filter has more than {PARTS_MAX} parts up to character {at + 1}"
            )
        self._check_depth(at, node.depth)
        return node

    @staticmethod
    def _check_depth(at: int, depth: int) -> None:
        if depth > DEPTH_MAX:
            raise SubscriptionIllegal(
                f"the SQL filter is nested more than {DEPTH_MAX} deep at character {at + 1}"
            )

    # -------------------------------------------------------------------------------------- grammar

    def _or(self) -> Node:
        return self._chain("OR", self._and, nodes.any_of)

    def _and(self) -> Node:
        return self._chain("AND", self._equality, nodes.all_of)

    def _chain(self, word: str, read: Callable[[], Node], join: Callable[..., Node]) -> Node:
        at = self._next.at
        parts = [read()]
        while self._took(word):
            parts.append(read())
        return parts[0] if len(parts) == 1 else self._made(at, join, parts)

    def _equality(self) -> Node:
        left = self._comparison()
        while True:
            at = self._next.at
            if self._took("="):
                left = self._made(at, nodes.equal, left, self._comparison())
            elif self._took("<>"):
                left = self._made(at, nodes.equal, left, self._comparison())
                left = self._made(at, nodes.negated, left)
            elif self._took("IS"):
                is_not = self._took("NOT")
                self._skip("NULL")
                left = self._made(at, nodes.is_null, left)
                if is_not:
                    left = self._made(at, nodes.negated, left)
            else:
                return left

    def _comparison(self) -> Node:
        left = self._unary()
        while True:
            at, kind = self._next.at, self._next.kind
            if kind in ("<", "<=", ">", ">="):
                self._take()
                left = self._made(at, nodes.ordered, kind, left, self._unary())
                continue
            wanted = not self._took("NOT")
            if self._next.kind in nodes.PARTS:
                word = self._take().kind
                text = self._text_literal()
                left = self._made(at, nodes.part_of, word, left, text, wanted=wanted)
            elif self._took("BETWEEN"):
                low = self._unary()
                self._skip("AND")
                make = nodes.between if wanted else nodes.not_between
                left = self._made(at, make, left, low, self._unary())
            elif self._took("IN"):
                left = self._made(at, nodes.one_of, left, self._texts(), wanted=wanted)
            elif wanted:
                return left
            else:
                raise self._wrong(self._next.at, "after NOT a comparison is expected, found")

    def _texts(self) -> list[str]:
        self._skip("(")
        texts = [self._text_literal()]
        while self._took(","):
            texts.append(self._text_literal())
        self._skip(")")
        return texts

    def _text_literal(self) -> str:
        if self._next.kind != "text":
            raise self._wrong(self._next.at, "a text in quotes is expected, found")
        return self._take().text[1:-1].replace("''", "'")

    def _unary(self) -> Node:
        self._depth += 1
        at = self._next.at
        self._check_depth(at, self._depth)
        if self._took("+"):
            node = self._unary()
        elif self._took("-"):
            node = self._made(at, nodes.negative, self._unary())
        elif self._took("NOT"):
            node = self._made(at, nodes.negated, self._unary())
        elif self._took("("):
            node = self._or()
            self._skip(")")
        else:
            node = self._leaf(at)
        self._depth -= 1
        return node

    def _leaf(self, at: int) -> Node:
        kind = self._next.kind
        if kind == "text":
            text = self._text_literal()
            return self._made(
                at, nodes.literal, Kind.TEXT, text.encode("utf-8", "replace"), f"'{text}'"
            )
        if kind == "word":
            return self._made(at, nodes.prop, self._take().text)
        if kind in _LITERALS:
            return self._made(at, nodes.literal, Kind.BOOLEAN, _LITERALS[self._take().kind], kind)
        if kind == "whole":
            digits = self._next.text.rstrip("lL")
            value = int(digits) if len(digits) < _DIGITS_MAX else LONG_MAX + 1
            if value > LONG_MAX:
                raise self._wrong(at, f"a whole number is {LONG_MAX} at most, found")
            whole_kind = Kind.INT if value <= INT_MAX else Kind.LONG
            return self._made(at, nodes.literal, whole_kind, value, self._take().text)
        if kind == "float":
            number = float(self._next.text)
            if not 0 < number < float("inf"):
                raise self._wrong(at, "too small or too large for a number:")
            return self._made(at, nodes.literal, Kind.DOUBLE, number, self._take().text)
        raise self._wrong(at, "a property or a value is expected, found")
