"""This module tests what is counted in a replay, and when it is enough."""

from __future__ import annotations

import numpy as np
import pytest

from sluice.replay.measuring import OUTCOMES_MIN, ErrorWatch, Series, Times


def test_percentiles_are_right_within_four_percent() -> None:
    times = Times()
    for time in range(1, 1001):
        times.add(float(time))
    assert times.percentile(0.5) == pytest.approx(500, rel=0.05)
    assert times.percentile(0.99) == pytest.approx(990, rel=0.05)
    assert times.percentile(1) == times.highest_ms == 1000
    assert Times().percentile(0.5) == 0


def test_times_count_messages_and_not_batches() -> None:
    times = Times()
    times.add(1, 99)
    times.add(1000, 1)
    assert times.percentile(0.98) == pytest.approx(1, rel=0.05)
    times.add(0.0)
    assert times.percentile(0.001) == pytest.approx(0.01)


def test_what_is_wanted_counts_in_the_second_in_which_it_is_due() -> None:
    series = Series()
    series.want(np.array([0.0, 0.5, 1.0, 1.999, 5.0]))
    assert [interval.wanted for interval in series.intervals] == [2, 2, 0, 0, 0, 1]
    series.want(np.array([5.5]))
    assert series.intervals[5].wanted == 2


def test_a_long_replay_has_longer_intervals() -> None:
    series = Series(intervals_max=4)
    for second in range(20):
        interval = series.at(second)
        interval.wanted += 1
        interval.late_ms = float(second)
        interval.answers.add(second + 1.0)
    assert (series.seconds, len(series.intervals)) == (8, 3)
    assert [interval.wanted for interval in series.intervals] == [8, 8, 4]
    assert [interval.late_ms for interval in series.intervals] == [7, 15, 19]
    total = series.total()
    assert (total.wanted, total.late_ms, total.answers.highest_ms) == (20, 19, 20)


def test_a_share_of_errors_above_the_limit_is_enough() -> None:
    watch = ErrorWatch(0.01, 10)
    assert not watch.is_over(0)
    watch.note(0, 990, 10)
    assert not watch.is_over(0)  # exactly 1 %
    watch.note(1, 0, 1)
    assert watch.is_over(1)
    assert watch.share == pytest.approx(11 / 1001)


def test_what_is_older_than_the_window_does_not_count() -> None:
    watch = ErrorWatch(0.5, 10)
    watch.note(0, 0, 100)
    assert watch.is_over(9)
    watch.note(11, 50, 0)
    assert not watch.is_over(11)


def test_a_few_outcomes_say_nothing_until_a_window_is_over() -> None:
    watch = ErrorWatch(0.5, 10)
    watch.note(0, 0, OUTCOMES_MIN - 1)
    assert not watch.is_over(1)
    watch.note(9, 0, 1)
    assert watch.is_over(9)
    slow = ErrorWatch(0.5, 10)
    for second in range(0, 11, 5):
        slow.note(second, 0, 1)
    assert slow.is_over(10)


def test_without_a_limit_it_is_never_enough() -> None:
    watch = ErrorWatch(None, 10)
    watch.note(0, 0, 1000)
    assert not watch.is_over(100)
