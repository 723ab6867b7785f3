"""Screens of SQL filters: they let pass all that a filter wants, and little else."""

from __future__ import annotations

import operator
import random
import re

import pytest

from sluice.broker import sql_screen
from sluice.broker.sql_filter import read_filter
from sluice.errors import SubscriptionIllegal
from tests.interop.sql_cases import Expressions, properties, stored_form

OPERATORS = {
    "=": operator.eq,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}


def framed(**values: object) -> bytes:
    return f"\x02{stored_form({name: str(value) for name, value in values.items()})}\x02".encode()


def passes(text: str, **values: object) -> bool | None:
    """Whether a filter's screen lets a message pass; None where it has none."""
    screen = read_filter(text).test.screen
    return None if screen is None else screen.search(framed(**values)) is not None


@pytest.mark.parametrize("seed", range(4))
def test_what_a_filter_wants_passes_its_screen(seed: int) -> None:
    chance, expressions = random.Random(seed), Expressions(seed)
    messages = [f"\x02{stored_form(properties(chance))}\x02".encode() for _ in range(60)]
    wanted = kept_back = 0
    for _ in range(1500):
        try:
            test = read_filter(expressions.one()).test
        except SubscriptionIllegal:
            continue
        if test.screen is not None:
            for message in messages:
                is_wanted, passed = test.test(message), test.screen.search(message) is not None
                assert passed or not is_wanted, (test.screen.pattern, message)
                wanted += is_wanted
                kept_back += not passed
    assert wanted > 100
    assert kept_back > 1000


@pytest.mark.parametrize("symbol", OPERATORS)
def test_whole_numbers_are_told_apart_exactly(symbol: str) -> None:
    chance = random.Random(symbol)
    limits = [*range(2, 130), 999, 1000, 1999, 19900, *(chance.randrange(10**9) for _ in range(40))]
    for limit in limits:
        screen = re.compile(sql_screen.compares("a", symbol, limit).pattern)
        numbers = {*range(1, 140), limit - 1, limit, limit + 1, limit * 10, limit // 10 or 1}
        for number in numbers:
            passed = screen.search(framed(a=number)) is not None
            assert passed is OPERATORS[symbol](number, limit), (number, limit, screen.pattern)


@pytest.mark.parametrize("value", ["0", "07", "+7", "-7", " 7", "7 ", "٣", "1٣", "7.5", "x", "1x"])
def test_what_is_no_plain_number_is_left_to_the_filter(value: str) -> None:
    for text in ("a > 1000000", "a < 5", "a = 12", "a BETWEEN 100 AND 200"):
        assert passes(text, a=value)


@pytest.mark.parametrize(
    ("text", "passing", "kept_back"),
    [
        ("a = 'red'", "red", "reddish"),
        ("a IN ('red', 'b.e')", "b.e", "bye"),
        ("a BETWEEN 100 AND 200", "150", "201"),
        ("a BETWEEN 0 AND 200", "150", "201"),
        ("a STARTSWITH 're'", "red", "are"),
        ("a > 5 AND b IS NULL", "6", "5"),
        ("b IS NULL AND a > 5", "6", "5"),
        ("a > 5.5 AND a = '7'", "7", "6"),
        ("a = 'x' OR a = 'y'", "y", "z"),
        ("a = 'x' OR (a > 10 AND b = 'z')", "x", "9"),
    ],
)
def test_a_screen_keeps_back_what_a_filter_cannot_want(
    text: str, passing: str, kept_back: str
) -> None:
    assert passes(text, a=passing)
    assert passes(text, a=kept_back) is False
    assert passes(text, ab=passing) is False


@pytest.mark.parametrize("text", ["a NOT IN ('x')", "a NOT CONTAINS 'x'", "a > 1.5"])
def test_the_property_must_at_least_be_there(text: str) -> None:
    assert passes(text, a="y")
    assert passes(text, b="y") is False


@pytest.mark.parametrize("text", ["a IS NULL", "a <> 'x'", "NOT a = 'x'", "a = 'x' OR b IS NULL"])
def test_where_nothing_is_known_there_is_no_screen(text: str) -> None:
    assert passes(text) is None


def test_a_screen_is_bounded() -> None:
    texts = [f"t{number}" for number in range(65)]
    many = f"a IN ({', '.join(map(repr, texts))})"
    long = f"a = '{'x' * 5000}'"
    for text in (many, long):
        assert passes(text, a="anything")
        assert passes(text, b="anything") is False
    wide = " OR ".join(f"a = '{'x' * 300}{number}'" for number in range(20))
    assert passes(wide) is None
