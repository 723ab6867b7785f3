"""This module tests how bytes of a file become lines and events."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.collector.lines import Cut, Line, Rules, cut

EVENTS = Rules(start=re.compile(rb"^\d", re.MULTILINE))


def whole(chunk: bytes, offset: int, part: int, rules: Rules, **how: bool) -> Cut:
    """Without bounds on what is cut at a time."""
    return cut(chunk, offset, part, rules, bytes_max=1 << 30, count_max=1 << 30, **how)


def bodies(chunk: bytes, rules: Rules = Rules(), **how: bool) -> list[bytes]:  # noqa: B008
    return [line.body for line in whole(chunk, 0, 0, rules, **how).lines]


def test_lines_have_their_places_and_no_ends() -> None:
    done = whole(b"one\ntwo\r\n\nthree", 100, 0, Rules())
    assert done.lines == [Line(100, b"one"), Line(104, b"two")]
    assert done.used_bytes == len(b"one\ntwo\r\n\n")


def test_the_last_line_without_an_end_is_sent_when_nothing_follows() -> None:
    assert bodies(b"one\ntwo") == [b"one"]
    assert bodies(b"one\ntwo", is_final=True) == [b"one", b"two"]


def test_bytes_are_left_alone() -> None:
    assert bodies(b"\xff\xfe \x00 \xe4\n") == [b"\xff\xfe \x00 \xe4"]


def test_a_hole_is_left_out() -> None:
    assert bodies(b"\0" * 1000 + b"after\n") == [b"after"]
    assert bodies(b"\0" * 1000 + b"\n") == []


def test_a_line_that_is_too_long_comes_in_parts() -> None:
    rules = Rules(line_bytes_max=4)
    done = whole(b"abcdefghij\nkl\nmnop\n", 0, 0, rules)
    assert done.lines == [
        Line(0, b"abcd", 1),
        Line(4, b"efgh", 2),
        Line(8, b"ij", 3),
        Line(11, b"kl", 0),
        Line(14, b"mnop", 0),
    ]
    assert done.part == 0


def test_a_part_goes_on_in_the_next_chunk() -> None:
    rules = Rules(line_bytes_max=4)
    first = whole(b"abcdef", 0, 0, rules)
    assert (first.lines, first.used_bytes, first.part) == ([Line(0, b"abcd", 1)], 4, 1)
    second = whole(b"ef\n", 4, first.part, rules)
    assert (second.lines, second.part) == ([Line(4, b"ef", 2)], 0)


def test_a_cut_is_bounded() -> None:
    chunk = b"aaaa\nbbbb\ncccc\n"
    assert len(cut(chunk, 0, 0, Rules(), bytes_max=8, count_max=9).lines) == 2
    assert len(cut(chunk, 0, 0, Rules(), bytes_max=1, count_max=9).lines) == 1
    assert len(cut(chunk, 0, 0, Rules(), bytes_max=99, count_max=2).lines) == 2


def test_events_begin_with_a_line_that_matches() -> None:
    text = b"1 error\n  at a\n  at b\n2 fine\n3 error\n  at c\n"
    assert bodies(text, EVENTS) == [b"1 error\n  at a\n  at b", b"2 fine"]
    assert bodies(text, EVENTS, is_quiet=True)[-1] == b"3 error\n  at c"


def test_lines_before_the_first_event_are_an_event() -> None:
    assert bodies(b"  at z\n  at y\n1 fine\n2 fine\n", EVENTS) == [b"  at z\n  at y", b"1 fine"]


def test_a_quiet_event_waits_for_its_unfinished_line() -> None:
    done = whole(b"1 error\n  at a", 0, 0, EVENTS, is_quiet=True)
    assert (done.lines, done.used_bytes) == ([Line(0, b"1 error")], len(b"1 error\n"))


@pytest.mark.parametrize(
    "rules", [EVENTS._replace(event_lines_max=2), EVENTS._replace(line_bytes_max=9)]
)
def test_an_event_that_is_too_long_comes_in_parts(rules: Rules) -> None:
    done = whole(b"1 a\n  b\n  c\n  d\n2 e\n3 f\n", 0, 0, rules)
    assert done.lines == [
        Line(0, b"1 a\n  b", 1),
        Line(8, b"  c\n  d", 2),
        Line(16, b"2 e", 0),
    ]


def test_an_event_ends_where_the_next_line_does_not_fit_any_more() -> None:
    rules = EVENTS._replace(line_bytes_max=10)
    done = whole(b"1 a\n  unfin", 0, 0, rules)
    assert done.lines == [Line(0, b"1 a", 1)]
    done = whole(b"1 a\n2 unfin", 0, 0, rules)
    assert done.lines == [Line(0, b"1 a", 0)]


texts = st.lists(
    st.sampled_from([b"1 x", b"  y", b"", b"long " * 5, b"\0\0z", b"q\r"]), max_size=12
).map(lambda lines: b"".join(line + b"\n" for line in lines))


@given(text=texts, sizes=st.lists(st.integers(1, 40), min_size=1), is_events=st.booleans())
def test_chunks_of_any_size_give_the_same_bytes(
    text: bytes, sizes: list[int], is_events: bool
) -> None:
    """Whatever is read at a time: every byte is used once, bodies are what lies at their places."""
    rules = (EVENTS if is_events else Rules())._replace(line_bytes_max=12)
    at = part = turn = 0
    lines: list[Line] = []
    while at < len(text):
        wanted = sizes[turn % len(sizes)]
        turn += 1
        done = whole(text[at : at + wanted], at, part, rules, is_final=at + wanted >= len(text))
        if not done.used_bytes:
            done = whole(text[at:], at, part, rules, is_final=True)
        assert done.used_bytes
        lines += done.lines
        at, part = at + done.used_bytes, done.part
    for line in lines:
        assert line.body
        assert line.body in text[line.offset : line.offset + 40]
    sent = b"".join(line.body for line in lines)
    ignored = b"\n\r\0"
    assert sent.translate(None, ignored) == text.translate(None, ignored)
    if not is_events:
        assert all(len(line.body) <= 12 for line in lines)
