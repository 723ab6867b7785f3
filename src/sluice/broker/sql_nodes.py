"""This module makes the parts of an SQL filter: what is allowed to stand where, and a function that
works it out for a message. Pure: no clock, no file.

A part's function takes the message's properties between two separators (0x02) and gives the
part's value, or None where it has none. It looks for the properties that it names and for no other.
Logic has three values, as in SQL: what is missing makes neither true nor false. These are the rules
of RocketMQ 5.5, with what is odd in them: NOT binds closer than a comparison, two missing
properties are equal, and where a value cannot be compared the whole filter says no.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

from sluice.broker import sql_screen as screens
from sluice.broker import sql_values as values
from sluice.broker.sql_screen import Screen
from sluice.broker.sql_values import NUMBERS, Kind

Run = Callable[[bytes], Any]

_END: Final = b"\x02"
_EMPTY: Final = re.compile(rb"(?<=\x02)[^\x01\x02]*\x01\x02")
_QUOTED_MAX: Final = 80


class Illegal(ValueError):
    """A part that may not stand where it does; the text says why."""


def _quoted(node: Node) -> str:
    return node.text if len(node.text) <= _QUOTED_MAX else f"{node.text[:_QUOTED_MAX]}..."


class Node(NamedTuple):
    """One part of a filter."""

    kind: Kind
    run: Run
    text: str  # as errors quote it
    is_constant: bool = False  # a literal; a negative number is not one, which RocketMQ holds too
    value: Any = None  # of a number, or of a literal
    name: str = ""  # of a property
    depth: int = 1
    steps: int = 1
    screen: Screen | None = None  # what its being true needs; None: nothing is known


def without_empty(data: bytes) -> bytes:
    """Framed properties without those that have no value: RocketMQ does not see them."""
    return _EMPTY.sub(b"", data)


# ------------------------------------------------------------------------------------------- leaves


def literal(kind: Kind, value: Any, text: str) -> Node:
    return Node(kind, lambda data: value, text, is_constant=True, value=value)


def prop(name: str) -> Node:
    """A property of the message; where a name stands twice the last one counts."""
    return Node(Kind.TEXT, _getter(name), name, name=name)


# These three find a property in the same way, each by itself: a call costs as much as the search.


def _getter(name: str) -> Run:
    key = b"\x02%b\x01" % name.encode()
    key_bytes = len(key)

    def run(data: bytes) -> bytes | None:
        at = data.rfind(key)
        if at < 0:
            return None
        at += key_bytes
        return data[at : data.find(_END, at)]

    return run


def _with_number(name: str, symbol: str, number: Node) -> Run:
    """A property compared with a number."""
    key = b"\x02%b\x01" % name.encode()
    key_bytes = len(key)
    limit, read = number.value, values.reader_of(number.kind)
    compare = values.with_number(symbol, number.kind)

    def run(data: bytes) -> bool | None:
        at = data.rfind(key)
        if at < 0:
            return None
        at += key_bytes
        value = data[at : data.find(_END, at)]
        if value.isdigit() and len(value) <= values.QUICK_DIGITS:
            return compare(int(value), limit)
        return compare(read(value), limit)

    return run


def _among(name: str, choices: frozenset[bytes], *, wanted: bool) -> Run:
    """A property compared with texts."""
    key = b"\x02%b\x01" % name.encode()
    key_bytes = len(key)

    def run(data: bytes) -> bool | None:
        at = data.rfind(key)
        if at < 0:
            return None
        at += key_bytes
        return (data[at : data.find(_END, at)] in choices) is wanted

    return run


def negative(node: Node) -> Node:
    """Of a number; of anything else RocketMQ makes nothing, without a word."""
    text, inner = f"-{node.text}", node.run
    if node.kind not in NUMBERS:

        def nothing(data: bytes) -> None:
            inner(data)  # which may show that the message is not wanted at all

        return Node(Kind.NOTHING, nothing, text, depth=node.depth + 1, steps=node.steps + 1)
    value = -node.value
    return Node(node.kind, lambda data: value, text, value=value, depth=node.depth + 1)


# -------------------------------------------------------------------------------------------- logic


def boolean(node: Node) -> Node:
    """A part where one that is true or false must stand."""
    if node.kind is Kind.BOOLEAN:
        return node
    if not node.name:
        raise Illegal(f"{_quoted(node)} is neither true nor false")
    # A property is a text, and a text by itself is never true.
    get = node.run
    return _parent(lambda data: None if get(data) is None else False, node.text, node)


def negated(node: Node) -> Node:
    run = boolean(node).run

    def negation(data: bytes) -> bool | None:
        value = run(data)
        return None if value is None else not value

    return _parent(negation, f"NOT {node.text}", node)


def all_of(nodes: Sequence[Node]) -> Node:
    """AND: false where one is, whatever the others are."""
    runs = [boolean(node).run for node in nodes]
    screen = screens.all_of([node.screen for node in nodes])
    return _parent(_joined(runs, decisive=False), "an AND", *nodes, screen=screen)


def any_of(nodes: Sequence[Node]) -> Node:
    """OR: true where one is, whatever the others are."""
    runs = [boolean(node).run for node in nodes]
    screen = screens.any_of([node.screen for node in nodes])
    return _parent(_joined(runs, decisive=True), "an OR", *nodes, screen=screen)


def _joined(runs: Sequence[Run], *, decisive: bool) -> Run:
    """From left to right, up to the first that decides."""
    if len(runs) == 2:
        first, second = runs

        def both(data: bytes) -> bool | None:
            left: bool | None = first(data)
            if left is decisive:
                return decisive
            right: bool | None = second(data)
            if right is decisive:
                return decisive
            return None if left is None or right is None else not decisive

        return both

    def every(data: bytes) -> bool | None:
        result: bool | None = not decisive
        for run in runs:
            value: bool | None = run(data)
            if value is decisive:
                return decisive
            if value is None:
                result = None
        return result

    return every


# -------------------------------------------------------------------------------------- comparisons


def equal(left: Node, right: Node) -> Node:
    for node in (left, right):
        if node.is_constant and node.value is None:
            raise Illegal("nothing is equal to NULL; write IS NULL")
    literals = left.is_constant and right.is_constant
    if literals and left.kind is Kind.BOOLEAN and right.kind is not Kind.BOOLEAN:
        raise Illegal(f"{_quoted(left)} cannot be compared with {_quoted(right)}")
    text = f"{left.text} = {right.text}"
    if left.name and right.kind in NUMBERS:
        screen = _number_screen(left.name, "=", right)
        return _parent(_with_number(left.name, "=", right), text, left, screen=screen)
    if left.name and right.is_constant and right.kind is Kind.TEXT:
        screen = screens.equals_text(left.name, right.value)
        among = _among(left.name, frozenset([right.value]), wanted=True)
        return _parent(among, text, left, screen=screen)
    first, second = left.run, right.run
    same = values.comparison("=", left.kind, right.kind)

    def run(data: bytes) -> bool | None:
        a, b = first(data), second(data)
        if a is None:
            return True if b is None else None
        return False if b is None else same(a, b)

    return _parent(run, text, left, right)


def _number_screen(name: str, symbol: str, number: Node) -> Screen:
    if number.kind is Kind.DOUBLE:
        return screens.has(name)
    return screens.compares(name, symbol, number.value)


def is_null(node: Node) -> Node:
    run = node.run
    return _parent(lambda data: run(data) is None, f"{node.text} IS NULL", node)


def ordered(symbol: str, left: Node, right: Node) -> Node:
    """One of < <= > >=."""
    for node in (left, right):
        if node.kind is Kind.BOOLEAN or (node.is_constant and node.kind is Kind.TEXT):
            raise Illegal(f"{_quoted(node)} has no order, so {symbol} cannot compare it")
    text = f"{left.text} {symbol} {right.text}"
    if left.name and right.kind in NUMBERS:
        screen = _number_screen(left.name, symbol, right)
        return _parent(_with_number(left.name, symbol, right), text, left, screen=screen)
    first, second = left.run, right.run
    test = values.comparison(symbol, left.kind, right.kind)

    def run(data: bytes) -> bool | None:
        a = first(data)
        if a is None:
            return None
        b = second(data)
        return None if b is None else test(a, b)

    return _parent(run, text, left, right)


def between(node: Node, low: Node, high: Node) -> Node:
    if low.is_constant and high.is_constant and low.kind in NUMBERS and high.kind in NUMBERS:
        above = values.comparison(">", low.kind, high.kind)
        if above(low.value, high.value):
            raise Illegal(
                f"BETWEEN {_quoted(low)} AND {_quoted(high)}: the first is above the second"
            )
    parts = [ordered(">=", node, low), ordered("<=", node, high)]
    if not node.name or low.kind not in NUMBERS or high.kind not in NUMBERS:
        return all_of(parts)
    # The usual case looks for the property once.
    get, first, last = node.run, low.value, high.value
    read_first, read_last = values.reader_of(low.kind), values.reader_of(high.kind)
    from_first = values.with_number(">=", low.kind)
    to_last = values.with_number("<=", high.kind)

    def run(data: bytes) -> bool | None:
        value = get(data)
        if value is None:
            return None
        return from_first(read_first(value), first) and to_last(read_last(value), last)

    screen = screens.all_of([part.screen for part in parts])
    if Kind.DOUBLE not in (low.kind, high.kind):
        screen = screens.is_between(node.name, first, last)
    return _parent(run, "a BETWEEN", *parts, screen=screen)


def not_between(node: Node, low: Node, high: Node) -> Node:
    return any_of([ordered("<", node, low), ordered(">", node, high)])


def one_of(node: Node, texts: Sequence[str], *, wanted: bool) -> Node:
    """IN and NOT IN."""
    if not node.name:
        raise Illegal(f"{_quoted(node)} is no property, and IN takes only one")
    choices = frozenset(text.encode("utf-8", "replace") for text in texts)
    screen = screens.equals_text(node.name, *choices) if wanted else screens.has(node.name)
    among = _among(node.name, choices, wanted=wanted)
    return _parent(among, f"{node.text} IN", node, screen=screen)


def _contains(value: bytes, part: bytes) -> bool:
    return value.find(part) >= 0


PARTS: Final[dict[str, Callable[[bytes, bytes], bool]]] = {
    "CONTAINS": _contains,
    "STARTSWITH": bytes.startswith,
    "ENDSWITH": bytes.endswith,
}


def part_of(word: str, node: Node, text: str, *, wanted: bool) -> Node:
    """CONTAINS, STARTSWITH, ENDSWITH: false, never unknown, where there is no text to look in."""
    get, part, test = node.run, text.encode("utf-8", "replace"), PARTS[word]

    def run(data: bytes) -> bool:
        value = get(data)
        return value is not None and test(value, part) is wanted

    def nowhere(data: bytes) -> bool:
        get(data)  # which may show that the message is not wanted at all
        return False

    if not part:
        run = _false
    elif node.kind is not Kind.TEXT:
        run = nowhere
    screen = None
    if node.name:
        is_start = word == "STARTSWITH" and wanted
        screen = screens.starts_with(node.name, part) if is_start else screens.has(node.name)
    return _parent(run, f"{node.text} {word}", node, screen=screen)


def _false(data: bytes) -> bool:
    return False


def _parent(run: Run, text: str, *children: Node, screen: Screen | None = None) -> Node:
    return Node(
        Kind.BOOLEAN,
        run,
        text,
        depth=1 + max(child.depth for child in children),
        steps=1 + sum(child.steps for child in children),
        screen=screen,
    )
