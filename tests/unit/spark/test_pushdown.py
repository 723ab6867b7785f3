"""Filters of a query: which the source answers exactly, and which it gives back."""

from __future__ import annotations

from datetime import UTC, datetime

from pyspark.sql.datasource import (
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    IsNotNull,
    LessThan,
    LessThanOrEqual,
    Not,
    StringStartsWith,
)

from sluice.spark.pushdown import Pruning

WHEN = datetime(2026, 11, 16, 7, 0, 0, 123_456, UTC)


def pushed(*filters: Filter) -> tuple[Pruning, list[Filter]]:
    pruning = Pruning()
    return pruning, pruning.push(list(filters))


def test_topics_partitions_offsets_and_tags_are_exact() -> None:
    pruning, rest = pushed(
        IsNotNull(("topic",)),
        In(("topic",), ("a", "b")),
        EqualTo(("topic",), "b"),
        In(("partition",), (1, 2, 9)),
        LessThan(("partition",), 5),
        GreaterThan(("offset",), 10),
        LessThanOrEqual(("offset",), 20),
        In(("tag",), ("A", "B")),
        EqualTo(("tag",), "A"),
    )
    assert rest == []
    assert pruning.takes_topic("b")
    assert not pruning.takes_topic("a")
    assert [number for number in range(12) if pruning.takes_partition(number)] == [1, 2]
    assert (pruning.offset_low, pruning.offset_stop) == (11, 21)
    assert pruning.tags == {"A"}


def test_times_and_keys_only_narrow() -> None:
    filters: list[Filter] = [
        GreaterThanOrEqual(("timestamp",), WHEN),
        LessThan(("timestamp",), WHEN),
        EqualTo(("key",), b"k1"),
        In(("offset",), (7, 3)),
    ]
    pruning, rest = pushed(*filters)
    assert rest == filters
    stamp = int(WHEN.timestamp() * 1000)
    assert (pruning.begin_ms, pruning.end_ms, pruning.key) == (stamp, stamp, "k1")
    assert (pruning.offset_low, pruning.offset_stop) == (3, 8)


def test_everything_else_is_given_back_and_changes_nothing() -> None:
    filters: list[Filter] = [
        Not(EqualTo(("topic",), "a")),
        StringStartsWith(("topic",), "a"),
        EqualTo(("value",), b"x"),
        EqualTo(("headers", "key"), "x"),
        EqualTo(("topic",), None),
        EqualTo(("tag",), " A"),
        EqualTo(("tag",), "A || B"),
        In(("tag",), ()),
        EqualTo(("key",), b"two words"),
        EqualTo(("key",), b"\xff"),
        GreaterThan(("timestamp",), datetime(2026, 1, 1)),
        IsNotNull(("tag",)),
    ]
    pruning, rest = pushed(*filters)
    assert rest == filters
    assert pruning == Pruning()
