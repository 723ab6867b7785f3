"""Planning: how a limit is shared, how ranges are divided, what offsets look like."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.errors import ConfigError
from sluice.spark import positions
from sluice.spark.cluster import Queue
from sluice.spark.planning import Range, divided, limited, limited_bytes

A, B, C = (Queue("t", "broker-a", number) for number in range(3))


def test_a_limit_is_shared_in_proportion_and_everybody_gets_one() -> None:
    start = {A: 0, B: 100, C: 7}
    latest = {A: 900, B: 190, C: 7}
    assert limited(start, latest, 10_000) == latest
    assert limited(start, latest, 99) == {A: 90, B: 109, C: 7}
    assert limited({A: 0, B: 0}, {A: 1_000_000, B: 1}, 10) == {A: 9, B: 1}
    assert limited(start, {A: 900, B: 50, C: 7}, 10) == {A: 10, B: 50, C: 7}, "B went back"


def test_a_limit_in_bytes_takes_the_part_of_the_rows_that_the_bytes_are() -> None:
    start = {A: 0, B: 0}
    latest = {A: 100, B: 100}
    assert limited_bytes(start, latest, {A: 1000, B: 3000}, 4000) == latest
    assert limited_bytes(start, latest, {A: 1000, B: 3000}, 400) == {A: 10, B: 10}
    assert limited_bytes(start, latest, {A: 1000, B: 3000}, 1) == {A: 1, B: 1}


def test_ranges_are_divided_by_their_bytes() -> None:
    one, two = Range(A, 0, 100), Range(B, 50, 60)
    sizes = {one: 1000, two: 3000}
    nothing = {"min_tasks": None, "rows_max": None, "bytes_max": None}
    assert divided([one, two, Range(C, 5, 5)], sizes, **nothing) == [one, two]
    parts = divided([one, two], sizes, **{**nothing, "min_tasks": 4})
    assert parts == [one, Range(B, 50, 53), Range(B, 53, 56), Range(B, 56, 60)]
    parts = divided([one, two], sizes, **{**nothing, "rows_max": 40})
    assert parts == [Range(A, 0, 33), Range(A, 33, 66), Range(A, 66, 100), two]
    parts = divided([one, two], sizes, **{**nothing, "bytes_max": 1500})
    assert parts == [one, Range(B, 50, 55), Range(B, 55, 60)]
    assert len(divided([Range(A, 0, 3)], {Range(A, 0, 3): 9}, **{**nothing, "min_tasks": 9})) == 3


@given(
    st.lists(st.tuples(st.integers(0, 1000), st.integers(0, 5000)), max_size=6),
    st.none() | st.integers(1, 40),
    st.none() | st.integers(1, 700),
    st.none() | st.integers(1, 3000),
)
def test_whatever_is_divided_is_whole_and_the_same_each_time(
    spans: list[tuple[int, int]],
    min_tasks: int | None,
    rows_max: int | None,
    bytes_max: int | None,
) -> None:
    ranges = [Range(Queue("t", "b", n), 10, 10 + rows) for n, (rows, _) in enumerate(spans)]
    sizes = {each: size for each, (_, size) in zip(ranges, spans, strict=True)}
    wanted = {"min_tasks": min_tasks, "rows_max": rows_max, "bytes_max": bytes_max}
    parts = divided(ranges, sizes, **wanted)
    assert parts == divided(ranges, sizes, **wanted)
    for whole in ranges:
        own = [part for part in parts if part.queue == whole.queue]
        assert sum(part.rows for part in own) == whole.rows
        assert [part.start for part in own[1:]] == [part.stop for part in own[:-1]]
        if rows_max is not None:
            assert all(part.rows <= rows_max for part in own)
    if min_tasks is not None:
        assert len(parts) >= min(min_tasks, sum(each.rows for each in ranges))


def test_offsets_look_like_kafkas_while_a_topic_has_one_broker() -> None:
    offsets = {Queue("u", "b", 10): 4, Queue("u", "b", 2): 3, Queue("t", "a", 0): 1}
    text = positions.to_json(offsets)
    assert str(text) == "{'t': {'0': 1}, 'u': {'2': 3, '10': 4}}"
    brokers = {"t": {"a"}, "u": {"b"}}
    assert positions.from_json(text, brokers, "", "x") == offsets


def test_offsets_name_their_brokers_where_a_topic_has_several() -> None:
    offsets = {Queue("t", "b", 0): 4, Queue("t", "a", 0): 3}
    text = positions.to_json(offsets)
    assert str(text) == "{'t': {'a/0': 3, 'b/0': 4}}"
    assert positions.from_json(text, {"t": {"a", "b"}}, "", "x") == offsets
    assert positions.from_json(text, {"t": {"b"}}, "", "x") == offsets
    with pytest.raises(ConfigError, match="option brokerOfPlainOffsets"):
        positions.from_json({"t": {"0": 1}}, {"t": {"a", "b"}}, "", "the checkpoint")
    found = positions.from_json({"t": {"0": 1}}, {"t": {"a", "b"}}, "b", "x")
    assert found == {Queue("t", "b", 0): 1}
    assert positions.from_json({"t": {"0": 1}}, {}, "", "x") == {Queue("t", "?", 0): 1}


@pytest.mark.parametrize("key", ["", "x", "/1", "a/", "-1", "1.5"])
def test_keys_that_are_no_queue(key: str) -> None:
    with pytest.raises(ConfigError, match="neither a queue's number"):
        positions.queue_of("t", key, {"a"}, "", "option assign")
    with pytest.raises(ConfigError, match="is no offset"):
        positions.from_json({"t": {"1": "5"}}, {"t": {"a"}}, "", "x")
