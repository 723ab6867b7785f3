"""This module tests metrics on their way to text: values, labels, times in buckets, limits."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.telemetry import Durations, Fold, Metric, Page
from tests.unit.prometheus_text import read_page

SEEN = Metric("seen_total", "counter", "Things that were seen.", ("kind", "place"))
DEPTH = Metric("depth", "gauge", 'How "deep" \\ it is,\nnow.')
TOOK = Metric("took_seconds", "histogram", "How long it took.", ("kind",))


def test_a_page_is_what_prometheus_reads() -> None:
    page = Page()
    page.add(SEEN, 3, "bird", "sky")
    page.add(DEPTH, -1.5)
    page.add(SEEN, 2**53, "fish", "sea")
    read = read_page(page.text())
    assert read.kinds == {"seen_total": "counter", "depth": "gauge"}
    assert read.helps["depth"] == DEPTH.help
    assert read.value("seen_total", kind="bird", place="sky") == 3
    assert read.value("seen_total", kind="fish", place="sea") == 2**53
    assert read.value("depth") == -1.5


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_a_label_may_hold_any_text(text: str) -> None:
    page = Page()
    page.add(SEEN, 1, text, "x")
    (labels,) = read_page(page.text()).labelled("seen_total")
    assert dict(labels)["kind"] == text


def test_labels_are_those_of_the_metric() -> None:
    with pytest.raises(ValueError, match="argument"):
        Page().add(SEEN, 1, "bird")


@given(st.lists(st.tuples(st.integers(0, 2**40), st.integers(1, 5))))
def test_buckets_count_what_is_not_above_their_bound(times: list[tuple[int, int]]) -> None:
    durations = Durations()
    for elapsed_ns, count in times:
        durations.add(elapsed_ns, count)
    page = Page()
    page.add_durations(TOOK, durations, "x")
    read = read_page(page.text())
    assert read.kinds == {"took_seconds": "histogram"}
    total = sum(count for _, count in times)
    assert read.value("took_seconds_count", kind="x") == total
    wanted = sum(elapsed_ns * count for elapsed_ns, count in times) / 1e9
    assert math.isclose(read.value("took_seconds_sum", kind="x"), wanted)
    buckets = read.labelled("took_seconds_bucket")
    assert len(buckets) == 23
    for labels, value in buckets.items():
        bound = float(dict(labels)["le"])
        assert value == sum(count for elapsed_ns, count in times if elapsed_ns <= bound * 1e9)


def test_a_bound_belongs_to_its_bucket() -> None:
    durations = Durations()
    for elapsed_ns in (0, 1, 2**14, 2**14 + 1, 2**35, 2**35 + 1, 2**50):
        durations.add(elapsed_ns)
    page = Page()
    page.add_durations(TOOK, durations, "x")
    buckets = read_page(page.text()).labelled("took_seconds_bucket")
    by_bound = {dict(labels)["le"]: value for labels, value in buckets.items()}
    assert by_bound["1.6384e-05"] == 3
    assert by_bound["3.2768e-05"] == 4
    assert by_bound[repr(2**35 / 1e9)] == 5
    assert by_bound["+Inf"] == 7


def test_since_takes_the_time() -> None:
    durations = Durations()
    durations.since(0)
    assert durations.count == 1
    assert durations.total_ns > 0


def test_the_first_keys_have_lines_of_their_own_and_the_others_share_one() -> None:
    fold: Fold[str] = Fold(2)
    rows = {"a": (1, 10), "b": (2, 20), "c": (3, 30), "d": (4, 40)}
    assert fold.counters(rows) == {"a": (1, 10), "b": (2, 20), None: (7, 70)}
    rows |= {"c": (5, 50), "e": (1, 1)}
    assert fold.counters(rows) == {"a": (1, 10), "b": (2, 20), None: (10, 91)}


def test_the_shared_counter_never_goes_back() -> None:
    fold: Fold[str] = Fold(1)
    assert fold.counters({"a": (1,), "b": (5,), "c": (7,)})[None] == (12,)
    assert fold.counters({"a": (1,), "c": (7,)})[None] == (12,)
    # Made again after it was deleted: it counts from nothing.
    assert fold.counters({"a": (1,), "b": (2,), "c": (7,)})[None] == (14,)
    assert fold.counters({"a": (1,), "b": (1,), "c": (7,)})[None] == (15,)


def test_a_key_that_shares_a_line_goes_on_sharing_it() -> None:
    fold: Fold[str] = Fold(1)
    fold.counters({"a": (1,), "b": (5,)})
    assert fold.counters({"b": (6,), "c": (1,)}) == {"c": (1,), None: (6,)}


def test_present_values_are_folded_too() -> None:
    fold: Fold[str] = Fold(1)
    assert fold.gauges({"a": 1, "b": 2, "c": 3}) == {"a": 1, None: 5}
    assert fold.gauges({"a": 1, "b": 0}) == {"a": 1, None: 0}
    assert fold.gauges({"a": 9}) == {"a": 9}
