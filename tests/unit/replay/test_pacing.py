"""This module tests when messages are due: exactly, and for any curve."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.replay.pacing import Curve, Pacer, Schedule
from sluice.replay.texts import Pace, read_curve, read_rate, read_speed

FIRST_MS = 1_700_000_000_000


def due(pace: Pace, *times_ms: int, copies: int = 1) -> list[float]:
    schedule = Schedule(pace, FIRST_MS, copies)
    times = np.array([FIRST_MS + time for time in times_ms], np.int64)
    return [round(second, 9) for second in schedule.due(times).tolist()]


@pytest.mark.parametrize(
    ("speed", "seconds"),
    [
        ("1x", [0, 0.001, 1, 60]),
        ("5x", [0, 0.0002, 0.2, 12]),
        ("100x", [0, 0.00001, 0.01, 0.6]),
        ("0.5x", [0, 0.002, 2, 120]),
        ("max", [0, 0, 0, 0]),
    ],
)
def test_one_speed(speed: str, seconds: list[float]) -> None:
    assert due(read_speed("--speed", speed), 0, 1, 1000, 60_000) == seconds


def test_a_slope() -> None:
    """From 1x to 3x within 10 s: after w seconds w + w * w / 10 of the recording are over."""
    pace = read_curve("--curve", "0s:1x,10s:3x")
    assert due(pace, 0, 1100, 7500, 20_000, 23_000) == [0, 1, 5, 10, 11]


def test_a_step() -> None:
    pace = read_curve("--curve", "0s:1x,10s:1x,10s:5x")
    assert due(pace, 9_000, 10_000, 10_500, 15_000) == [9, 10, 10.1, 11]


def test_before_the_first_point_its_speed_holds() -> None:
    assert due(read_curve("--curve", "10s:2x,20s:2x"), 2000, 40_000, 60_000) == [1, 20, 30]


def test_a_rate_does_not_look_at_times() -> None:
    assert due(read_rate("--rate", "10/s", 0), 0, 0, 0, 5_000) == [0, 0.1, 0.2, 0.3]


def test_a_rate_with_a_ramp() -> None:
    """100/s after 2 s: 100 messages by then, the one in the middle after the root of 2."""
    seconds = due(read_rate("--rate", "100/s", 2), *([0] * 301))
    assert (seconds[0], seconds[50], seconds[100], seconds[300]) == (0, 1.414213562, 2, 4)


def test_copies_are_due_together_or_count() -> None:
    assert due(read_speed("--speed", "2x"), 0, 1000, copies=2) == [0, 0, 0.5, 0.5]
    assert due(read_rate("--rate", "10/s", 0), 0, 0, copies=2) == [0, 0.1, 0.2, 0.3]


def test_a_schedule_goes_on_where_it_was() -> None:
    schedule = Schedule(read_rate("--rate", "10/s", 0), FIRST_MS)
    times = np.full(3, FIRST_MS, np.int64)
    assert schedule.due(times).tolist() == pytest.approx([0, 0.1, 0.2])
    assert schedule.due(times).tolist() == pytest.approx([0.3, 0.4, 0.5])
    assert schedule.due(times[:0]).tolist() == []


def test_a_time_that_goes_back_does_not_go_back() -> None:
    schedule = Schedule(read_speed("--speed", "1x"), FIRST_MS)
    assert schedule.due(np.array([FIRST_MS + 2000, FIRST_MS + 1000])).tolist() == [2, 2]
    assert schedule.due(np.array([FIRST_MS - 5, FIRST_MS + 3000])).tolist() == [2, 3]


def test_how_long_it_takes() -> None:
    assert Schedule(read_speed("--speed", "5x"), FIRST_MS).length(9, FIRST_MS + 60_000) == 12
    assert Schedule(read_rate("--rate", "10/s", 0), FIRST_MS, 2).length(50, 0) == 9.9
    assert Schedule(read_speed("--speed", "max"), FIRST_MS).length(9, FIRST_MS + 60_000) == 0


def test_what_is_due_is_taken_together() -> None:
    pacer = Pacer(np.array([0.0, 0.5, 0.5, 2.0]))
    assert pacer.wait(0) == 0
    assert pacer.take(0.1, 10) == range(1)
    assert pacer.wait(0.1) == pytest.approx(0.4)
    assert pacer.take(0.4, 10) == range(1, 1)
    assert pacer.take(1.0, 1) == range(1, 2)  # there is room for one
    assert pacer.wait(1.0) == -0.5
    assert pacer.take(1.0, 0) == range(2, 2)
    assert pacer.take(3.0, 9) == range(2, 4)
    assert pacer.is_over


POINTS = st.lists(
    st.tuples(st.integers(0, 1_000_000).map(lambda ms: ms / 1000), st.floats(0.01, 100)),
    min_size=1,
    max_size=6,
).map(sorted)


@given(
    POINTS,
    st.lists(st.floats(0, 100_000), min_size=1, max_size=50).map(sorted),
)
def test_times_go_up_and_have_the_right_speed(
    points: list[tuple[float, float]], coordinates: list[float]
) -> None:
    """For any curve: due times never go back, and at each of them exactly as much of the recording
    is over as the curve's integral says, so its speed between two of them is the curve's.
    """
    curve = Curve(points)
    seconds = curve.seconds(np.array(coordinates))
    assert (np.diff(seconds) >= -1e-9).all()
    for second, coordinate in zip(seconds.tolist(), coordinates, strict=True):
        assert curve.coordinate(second) == pytest.approx(coordinate, rel=1e-9, abs=1e-6)
        assert curve.coordinate(second) == pytest.approx(
            integral(points, second), rel=1e-6, abs=1e-6
        )


def integral(points: list[tuple[float, float]], second: float) -> float:
    """The area below the curve, by trapezoids between its points: another way to the same sum."""
    total, at, value = 0.0, 0.0, points[0][1]
    for time, next_value in points:
        if time >= second:
            share = (second - at) / (time - at) if time > at else 0.0
            there = value + (next_value - value) * share
            return total + (second - at) * (value + there) / 2
        total += (time - at) * (value + next_value) / 2
        at, value = time, next_value
    return total + (second - at) * value


@given(
    POINTS,
    st.lists(st.integers(0, 10_000_000), min_size=1, max_size=60),
    st.integers(1, 3),
    st.booleans(),
)
def test_a_schedule_never_goes_back(
    points: list[tuple[float, float]], times: list[int], copies: int, is_rate: bool
) -> None:
    """Whatever the recorded times are, and wherever windows end."""
    schedule = Schedule(Pace(tuple(points), is_rate), FIRST_MS, copies)
    last = 0.0
    for start in range(0, len(times), 7):
        window = np.array(times[start : start + 7], np.int64) + FIRST_MS
        seconds = schedule.due(window).tolist()
        assert len(seconds) == len(window) * copies
        for second in seconds:
            assert second >= last
            last = second
