"""This module tests how times, sizes, speeds and curves are read."""

from __future__ import annotations

import pytest

from sluice.errors import ConfigError
from sluice.replay.texts import (
    Pace,
    read_curve,
    read_rate,
    read_share,
    read_size,
    read_span,
    read_speed,
    read_time,
    time_text,
)

NOW_MS = 1_700_000_000_000


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("500ms", 0.5), ("90s", 90), ("90", 90), ("2m", 120), ("1.5h", 5400), ("1d", 86_400)],
)
def test_spans(text: str, seconds: float) -> None:
    assert read_span("--ramp", text) == seconds


@pytest.mark.parametrize(("text", "size"), [("4096", 4096), ("64k", 65536), ("2G", 1 << 31)])
def test_sizes(text: str, size: int) -> None:
    assert read_size("--max-bytes", text) == size


@pytest.mark.parametrize(
    ("text", "when_ms"),
    [
        ("2023-11-14T22:13:20Z", NOW_MS),
        ("2023-11-15T06:13:20.250+08:00", NOW_MS + 250),
        (str(NOW_MS), NOW_MS),
        ("now-10m", NOW_MS - 600_000),
        ("now+1h", NOW_MS + 3_600_000),
    ],
)
def test_times(text: str, when_ms: int) -> None:
    assert read_time("--from", text, NOW_MS) == when_ms


def test_times_are_shown_to_the_millisecond() -> None:
    assert time_text(NOW_MS + 7) == "2023-11-14T22:13:20.007+00:00"


def test_speeds_and_rates() -> None:
    assert read_speed("--speed", "5x") == Pace(((0.0, 5.0),), text="5x")
    assert read_speed("--speed", "0.5x").points == ((0.0, 0.5),)
    assert read_speed("--speed", "max") == Pace()
    assert read_rate("--rate", "5000/s", 0) == Pace(((0.0, 5000.0),), is_rate=True, text="5000/s")
    assert read_rate("--rate", "5000/s", 30).points == ((0.0, 0.0), (30.0, 5000.0))


def test_curves() -> None:
    pace = read_curve("--curve", "0s:1x, 60s:5x,2m:20x")
    assert (pace.points, pace.is_rate) == (((0.0, 1.0), (60.0, 5.0), (120.0, 20.0)), False)
    pace = read_curve("--curve", "0s:100/s,10s:100/s,10s:900/s")
    assert (pace.points[-1], pace.is_rate) == ((10.0, 900.0), True)


def test_shares() -> None:
    assert read_share("--stop-errors", "1%") == 0.01
    assert read_share("--stop-errors", "0%") == 0
    assert read_share("--stop-errors", "never") is None


@pytest.mark.parametrize("text", ["0x", "-1x", "x", "", "5y", "nan", "inf", "1e3x", "10001x"])
def test_speeds_that_make_no_sense(text: str) -> None:
    with pytest.raises(ConfigError, match="--speed"):
        read_speed("--speed", text)


@pytest.mark.parametrize(
    "text", ["", "1x", "0s:0x", "0s:1x,5s", "5s:1x,4s:2x", "0s:1x,5s:100/s", "0s:-1/s", "a:1x"]
)
def test_curves_that_make_no_sense(text: str) -> None:
    with pytest.raises(ConfigError, match="--curve"):
        read_curve("--curve", text)


def test_a_curve_has_a_bounded_number_of_points() -> None:
    with pytest.raises(ConfigError, match="1000 at most"):
        read_curve("--curve", ",".join(f"{second}s:1x" for second in range(1001)))


@pytest.mark.parametrize(
    "text", ["yesterday", "", "12", "-5m", "now", "now-", "now-x", "99999-01-01", "1960-01-01"]
)
def test_times_that_make_no_sense(text: str) -> None:
    with pytest.raises(ConfigError, match="--from"):
        read_time("--from", text, NOW_MS)


@pytest.mark.parametrize("text", ["0", "x", "5q", "-1", "", "9999999999999t"])
def test_sizes_that_make_no_sense(text: str) -> None:
    with pytest.raises(ConfigError, match="--max-bytes"):
        read_size("--max-bytes", text)


@pytest.mark.parametrize("text", ["1", "101%", "-1%", "x%", ""])
def test_shares_that_make_no_sense(text: str) -> None:
    with pytest.raises(ConfigError, match="--stop-errors"):
        read_share("--stop-errors", text)


@pytest.mark.parametrize("text", ["0/s", "5000", "5000x", "-1/s"])
def test_rates_that_make_no_sense(text: str) -> None:
    with pytest.raises(ConfigError, match="--rate"):
        read_rate("--rate", text, 0)
