"""SQL filters: what they say to messages, what is refused and where, and that they are bounded.

What RocketMQ itself says to thousands of filters is compared in `tests/interop`; here are the rules
one by one.
"""

from __future__ import annotations

import sys
from types import FrameType

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.broker import sql_filter
from sluice.broker.sql_filter import DEPTH_MAX, PARTS_MAX, TEXT_MAX, read_filter
from sluice.errors import SubscriptionIllegal


def stored(**properties: str) -> bytes:
    return "".join(f"{name}\x01{value}\x02" for name, value in properties.items()).encode()


MESSAGE = stored(
    a="5",
    big="3000000000",
    price="1.5",
    color="blue",
    flag="TRUE",
    text="it's 5 o'clock",
    tag="café",
)

WANTED = [
    "a = 5",
    "a = '5'",
    "5 = a",
    "a <> 6",
    "a < 6 AND a <= 5 AND a > 4 AND a >= 5",
    "6 > a AND 4 < a",
    "a BETWEEN 1 AND 5",
    "a NOT BETWEEN 6 AND 9",
    "a between 1 and 5",
    "a BETWEEN 5 AND price OR TRUE",
    "price > 1.25",
    "price = 1.5",
    "-1 < a",
    "- -5 = a",
    "+5 = a",
    "a = 5L",
    "big > 2147483648",
    "color IN ('red', 'blue')",
    "color NOT IN ('red')",
    "color CONTAINS 'lu' AND color STARTSWITH 'bl' AND color ENDSWITH 'ue'",
    "color NOT CONTAINS 'x' AND color NOT STARTSWITH 'x' AND color NOT ENDSWITH 'x'",
    "tag ENDSWITH 'é'",
    "text = 'it''s 5 o''clock'",
    "flag = TRUE",
    "color = FALSE",  # every text but "true" is false
    "missing IS NULL",
    "a IS NOT NULL",
    "missing = absent",  # both have nothing
    "NOT (a = 6)",
    "NOT color",  # a text by itself is not true
    "missing = 1 OR a = 5",
    "a = 5 -- so it is\n",
    "2 BETWEEN 3 AND --2.0 OR a = 5",  # no comment: those end with their line
    "a /* the * first ** */ = 5",
    "a < price OR a > price",
    "a = 5 and (color = 'red' Or color = 'blue')",
    "TRUE",
    "'abc' CONTAINS 'b'",
    "a = 5 = TRUE",
    "NOT (missing CONTAINS 'x')",
    "-(a = 5) = missing",  # the negative of a boolean is nothing
]
UNWANTED = [
    "a = 6",
    "a <> 5",
    "color = 'red'",
    "color = 'BLUE'",
    "Color = 'blue'",  # names are as they are written
    "missing = 1",
    "missing <> 1",
    "NOT (missing = 1)",
    "missing > 1 OR missing <= 1",
    "missing IN ('x')",
    "missing NOT IN ('x')",
    "missing NOT CONTAINS 'x'",
    "color CONTAINS ''",
    "color NOT CONTAINS ''",
    "color",
    "FALSE",
    "NULL",
    "NULL OR a = 6",
    "NOT a = 6",  # NOT binds closer than =, so this compares a boolean with a number
    "a CONTAINS '5' AND missing IS NOT NULL",
    "color = 1 OR a = 5",  # no number: the whole filter says no
    "color > 1 OR a = 5",
    "price = 1 OR a = 5",  # no whole number
    "big = 1 OR a = 5",  # not one of 32 bits
    "TRUE = flag OR a = 5",
    "color < tag OR a = 5",
    "-a = -5",  # the negative of a text is nothing
    "-color IS NOT NULL",
    "1 = TRUE",
    "5 CONTAINS '5'",
    "-(color > 1) = missing OR a = 5",  # what the negative is of has to be looked at, too
]
REFUSED = [
    ("", 1),
    ("   ", 4),
    ("a =", 4),
    ("a = 1 AND", 10),
    ("a ! 1", 3),
    ("a == 1", 4),
    ("a = 'x", 5),
    ("(a = 1", 7),
    ("a = NULL", 3),
    ("NULL <> a", 6),
    ("a > 'x'", 3),
    ("a > TRUE", 3),
    ("'x' < a", 5),
    ("a > 1 > 0", 7),
    ("NOT a > 1", 7),
    ("a BETWEEN 5 AND 1", 3),
    ("a BETWEEN 'a' AND 'b'", 3),
    ("a BETWEEN 1", 12),
    ("a IN (1)", 7),
    ("a IN ()", 7),
    ("a IN ('x'", 10),
    ("5 IN ('5')", 3),
    ("a CONTAINS b", 12),
    ("a NOT 5", 7),
    ("a IS 5", 6),
    ("a IS NOT", 9),
    ("TRUE = 1", 6),
    ("5", 1),
    ("-5", 1),
    ("'x'", 1),
    ("a AND 5", 1),
    ("NOT 5", 1),
    ("0.0 = a", 1),
    ("1e999 = a", 1),
    ("9223372036854775808 = a", 1),
    (f"{'9' * 5000} = a", 1),
    ("a = 1 #", 7),
    ("a LIKE 'x' #", -1),  # what follows a whole filter is not looked at
]


@pytest.mark.parametrize("text", WANTED)
def test_a_message_is_wanted(text: str) -> None:
    assert read_filter(text).test.matches(MESSAGE)


@pytest.mark.parametrize("text", UNWANTED)
def test_a_message_is_not_wanted(text: str) -> None:
    assert not read_filter(text).test.matches(MESSAGE)


@pytest.mark.parametrize(("text", "place"), REFUSED)
def test_what_is_wrong_is_refused_with_its_place(text: str, place: int) -> None:
    if place < 0:
        assert read_filter(text).ignored_at == text.index("LIKE")
        return
    with pytest.raises(
        SubscriptionIllegal, match=rf"^the SQL filter is wrong at character {place}:"
    ):
        read_filter(text)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("a = 1" + " " * TEXT_MAX, f"{TEXT_MAX} at most"),
        ("(" * (DEPTH_MAX + 1) + "a = 1", f"more than {DEPTH_MAX} deep"),
        ("NOT " * (DEPTH_MAX + 1) + "a", f"more than {DEPTH_MAX} deep"),
        ("+" * 2000 + "a", f"more than {DEPTH_MAX} deep"),
        ("a" + " IS NULL" * (DEPTH_MAX + 1), f"more than {DEPTH_MAX} deep"),
        ("a = 1" + " = TRUE" * (DEPTH_MAX + 1), f"more than {DEPTH_MAX} deep"),
        ("a OR " * (PARTS_MAX // 2) * 2 + "a", f"{TEXT_MAX} at most"),
        ("a=1OR " * (PARTS_MAX // 3) + "b=1 or c=2", f"more than {PARTS_MAX} parts"),
    ],
)
def test_what_is_too_large_is_refused(text: str, why: str) -> None:
    with pytest.raises(SubscriptionIllegal, match=why):
        read_filter(text)


def test_a_long_chain_is_not_deep() -> None:
    text = " OR ".join(f"a={number}" for number in range(100, 700))
    assert not read_filter(text).test.matches(MESSAGE)
    assert read_filter(text).test.matches(stored(a="699"))
    assert read_filter(" AND ".join(["a=5"] * 600)).test.matches(MESSAGE)


@pytest.mark.parametrize(
    ("properties", "wanted"),
    [
        (b"a\x011\x02a\x015\x02", True),  # the last one counts
        (b"a\x015\x02a\x011\x02", False),
        (b"a\x015\x02a\x01\x02", True),  # one without a value is none
        (b"a\x01\x02" * 3, False),
        (b"b\x01a\x015\x02", False),  # a value may look like a property
        (b"ba\x015\x02", False),
        (b"a\x015", True),
        (b"a\x015\x01\x02", False),
        (b"\x015\x02", False),
        (b"", False),
        (b"\x02\x02\x01\x02", False),
    ],
)
def test_properties_are_seen_as_rocketmq_sees_them(properties: bytes, wanted: bool) -> None:
    assert read_filter("a = 5").test.matches(properties) is wanted


@pytest.mark.parametrize(
    ("value", "wanted"),
    [
        ("NaN", True),
        ("Infinity", True),
        ("+Infinity", True),
        ("-Infinity", False),
        (" 2.5 ", True),
        ("2.5d", True),
        ("2.5F", True),
        ("0x1p3", True),
        ("0x1.8p1d", True),
        ("0x1p9999", True),
        ("-0x1p9999", False),
        ("1e400", True),
        ("nan", False),
        ("inf", False),
        ("1_0", False),
        ("0x10", False),
        ("\u0663", False),
        ("", False),
    ],
)
def test_texts_are_numbers_by_javas_rules(value: str, wanted: bool) -> None:
    assert read_filter("a > 1.5").test.matches(stored(a=value)) is wanted


@pytest.mark.parametrize(
    ("value", "wanted"),
    [
        *(
            ("+3", True),
            ("003", True),
            ("0" * 5000 + "3", True),
            ("\u0663", True),
            ("\uff13", True),
        ),
        *((" 3", False), ("3 ", False), ("3.0", False), ("1_3", False), ("\U0001d7d1", False)),
        *(("2147483648", False), ("-2147483649", False), ("9" * 5000, False), ("-", False)),
    ],
)
def test_texts_are_whole_numbers_by_javas_rules(value: str, wanted: bool) -> None:
    # Where the text is no number, the second half is not asked any more.
    assert read_filter("a = 3 AND TRUE").test.matches(stored(a=value)) is wanted
    assert not read_filter("NOT (a = 3)").test.matches(stored(a=value))


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("a < b", True),  # -0.0 is below 0.0
        ("a >= b", False),
        ("n > b", True),
        ("n >= n AND NOT (n < n)", True),
        ("b < n", True),
    ],
)
def test_doubles_are_ordered_by_javas_rules(text: str, wanted: bool) -> None:
    assert read_filter(text).test.matches(stored(a="-0.0", b="0.0", n="NaN")) is wanted


def test_what_follows_a_whole_filter_is_told() -> None:
    assert read_filter("a = 5").ignored_at == -1
    assert read_filter("a = 5 /* end */ ").ignored_at == -1
    assert read_filter("a = 5 b = 7 ###").ignored_at == 6
    assert read_filter("a = 05").ignored_at == 5


def test_wrong_and_right_filters_are_read_once() -> None:
    short, long = sql_filter._read_short, sql_filter._read_long
    for kept in (short, long):
        kept.cache_clear()
    for _ in range(3):
        read_filter("a = 5")
        read_filter("a = 5" + " " * 2000)
        with pytest.raises(SubscriptionIllegal):
            read_filter("a = ")
    assert (short.cache_info().misses, long.cache_info().misses) == (2, 1)


def test_the_filters_that_are_kept_are_bounded() -> None:
    for number in range(2000):
        read_filter(f"a = {number}")
        read_filter(f"a = {number}" + " " * 2000)
    assert sql_filter._read_short.cache_info().currsize == 512
    assert sql_filter._read_long.cache_info().currsize == 32


WORDS = st.sampled_from(
    [
        *("a", "b", "5", "1.5", "'x'", "(", ")", "AND", "OR", "NOT", "=", "<>", "<", ">=", "IS"),
        *("NULL", "TRUE", "BETWEEN", "IN", ",", "CONTAINS", "-", "+", "--", "/*", "*/", "'", "\n"),
    ]
)


@given(
    st.one_of(
        st.text(max_size=200),
        st.lists(WORDS, max_size=60).map(" ".join),
        st.lists(WORDS, max_size=3)
        .map("".join)
        .flatmap(
            lambda text: st.integers(1, TEXT_MAX).map(lambda count: (text * count)[: TEXT_MAX + 1])
        ),
    ),
    st.binary(max_size=200),
)
def test_any_text_is_read_or_refused(text: str, properties: bytes) -> None:
    try:
        found = read_filter(text)
    except SubscriptionIllegal:
        return
    assert found.test.matches(properties) in (True, False)
    assert found.test.matches(MESSAGE) in (True, False)
    assert 0 < found.test.steps <= 4 * PARTS_MAX


def test_the_deepest_filter_needs_little_of_the_stack() -> None:
    text = "(" * (DEPTH_MAX - 1) + "a = 1" + ")" * (DEPTH_MAX - 1)
    deepest = "NOT " * (DEPTH_MAX - 3) + "a"
    limit = sys.getrecursionlimit()
    frame_count = len(_frames())
    sys.setrecursionlimit(frame_count + 10 * DEPTH_MAX)
    try:
        sql_filter._read_short.cache_clear()
        assert not read_filter(text).test.matches(MESSAGE)
        assert read_filter(deepest).test.matches(MESSAGE) in (True, False)
    finally:
        sys.setrecursionlimit(limit)


def _frames() -> list[FrameType]:
    frames = []
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        frames.append(frame)
        frame = frame.f_back
    return frames
