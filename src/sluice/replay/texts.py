"""This module reads what people write on the command line: times, spans, sizes, speeds, curves.

Pure. What cannot be understood is a ConfigError that names the flag and shows a good value.
"""

from __future__ import annotations

import math
import re
from datetime import UTC, datetime
from typing import Final, NamedTuple

from sluice.errors import ConfigError

SPEED_MAX: Final = 10_000.0
RATE_MAX: Final = 10_000_000.0
SPAN_SECONDS_MAX: Final = 366 * 86_400.0
POINTS_MAX: Final = 1000
_NUMBER: Final = r"[0-9]{1,12}(?:\.[0-9]{1,6})?"
_SPAN: Final = re.compile(rf"({_NUMBER})(ms|s|m|h|d)?")
_SPAN_UNITS: Final = {"ms": 0.001, "s": 1.0, None: 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}
_SIZE: Final = re.compile(r"([0-9]{1,15})([kmgt]?)(?:i?b)?", re.IGNORECASE)
_SIZE_UNITS: Final = {"": 0, "k": 10, "m": 20, "g": 30, "t": 40}
_SPEED: Final = re.compile(rf"({_NUMBER})x?")
_RATE: Final = re.compile(rf"({_NUMBER})/s")
_PERCENT: Final = re.compile(rf"({_NUMBER})%")
_MILLIS: Final = re.compile(r"[0-9]{12,14}")


class Pace(NamedTuple):
    """How fast a replay is: points of (seconds, value), straight lines between them.

    The value is a multiple of the recorded speed or, with `is_rate`, messages a second. Without
    points it is as fast as it goes.
    """

    points: tuple[tuple[float, float], ...] = ()
    is_rate: bool = False
    text: str = "max"


def read_span(flag: str, text: str) -> float:
    """Seconds out of "500ms", "90s", "2m", "1h"."""
    match = _SPAN.fullmatch(text.strip())
    if match is None:
        raise ConfigError(f"{flag} {text}: a span is written as 500ms, 90s, 2m or 1h")
    seconds = float(match[1]) * _SPAN_UNITS[match[2]]
    if seconds > SPAN_SECONDS_MAX:
        raise ConfigError(f"{flag} {text}: at most 366d")
    return seconds


def read_size(flag: str, text: str) -> int:
    """Bytes out of "4096", "64m", "2g"."""
    match = _SIZE.fullmatch(text.strip())
    size = int(match[1]) << _SIZE_UNITS[match[2].lower()] if match is not None else 0
    if not 0 < size < 1 << 62:
        raise ConfigError(f"{flag} {text}: a size is written as 4096, 64m or 2g")
    return size


def read_time(flag: str, text: str, now_ms: int) -> int:
    """Milliseconds since 1970 out of an ISO time, such milliseconds, "now-10m" or "now+1h"."""
    text = text.strip()
    if text.startswith(("now-", "now+")):
        span_ms = round(read_span(flag, text[4:]) * 1000)
        return now_ms - span_ms if text[3] == "-" else now_ms + span_ms
    if _MILLIS.fullmatch(text):
        return int(text)
    try:
        time = datetime.fromisoformat(text)
        if time.tzinfo is None:
            time = time.astimezone()
        found = round(time.timestamp() * 1000)
    except (ValueError, OverflowError):
        found = -1
    if found < 0:
        raise ConfigError(
            f"{flag} {text}: a time is written as 2024-05-01T12:00:00 (with +08:00 or Z, else of "
            "this machine), as milliseconds since 1970, or as now-10m"
        )
    return found


def time_text(when_ms: int) -> str:
    """A time for people and for JSON."""
    return datetime.fromtimestamp(when_ms / 1000, UTC).isoformat(timespec="milliseconds")


def read_share(flag: str, text: str) -> float | None:
    """0.01 out of "1%"; None out of "never"."""
    if text.strip() == "never":
        return None
    match = _PERCENT.fullmatch(text.strip())
    share = float(match[1]) / 100 if match is not None else -1.0
    if not 0 <= share <= 1:
        raise ConfigError(f"{flag} {text}: a share is written as 1% (0% to 100%), or never")
    return share


def read_speed(flag: str, text: str) -> Pace:
    """A pace of one speed out of "5x", "0.5x" or "max"."""
    if text.strip() == "max":
        return Pace()
    return Pace(((0.0, _speed(flag, text)),), text=f"{_speed(flag, text):g}x")


def read_rate(flag: str, text: str, ramp_seconds: float) -> Pace:
    """A pace of one rate out of "5000/s", reached in a straight line from nothing."""
    rate = _rate(flag, text)
    if ramp_seconds:
        words = f"{rate:g}/s after {ramp_seconds:g}s"
        return Pace(((0.0, 0.0), (ramp_seconds, rate)), is_rate=True, text=words)
    return Pace(((0.0, rate),), is_rate=True, text=f"{rate:g}/s")


def read_curve(flag: str, text: str) -> Pace:
    """A pace out of "0s:1x,60s:5x,120s:20x", or of rates: "0s:100/s,60s:5000/s".

    Two points at the same time are a step.
    """
    points: list[tuple[float, float]] = []
    kinds: set[bool] = set()
    parts = text.split(",")
    if len(parts) > POINTS_MAX:
        raise ConfigError(f"{flag}: {len(parts)} points, {POINTS_MAX} at most")
    for part in parts:
        time, colon, value = part.strip().partition(":")
        if not colon:
            raise ConfigError(f"{flag} {part}: a point is written as 60s:5x or 60s:5000/s")
        is_rate = value.strip().endswith("/s")
        kinds.add(is_rate)
        seconds = read_span(flag, time)
        if points and seconds < points[-1][0]:
            raise ConfigError(f"{flag} {part}: the points' times go up, {time} does not")
        points.append((seconds, _rate(flag, value) if is_rate else _speed(flag, value)))
    if len(kinds) > 1:
        raise ConfigError(f"{flag} {text}: either all points are speeds (5x) or all rates (100/s)")
    return Pace(tuple(points), is_rate=kinds == {True}, text=text)


def _speed(flag: str, text: str) -> float:
    match = _SPEED.fullmatch(text.strip())
    speed = float(match[1]) if match is not None else math.nan
    if not 0 < speed <= SPEED_MAX:
        raise ConfigError(
            f"{flag} {text}: a speed is written as 5x or 0.5x, above 0 and up to {SPEED_MAX:g}x"
        )
    return speed


def _rate(flag: str, text: str) -> float:
    match = _RATE.fullmatch(text.strip())
    rate = float(match[1]) if match is not None else math.nan
    if not 0 < rate <= RATE_MAX:
        raise ConfigError(
            f"{flag} {text}: a rate is written as 5000/s, above 0 and up to {RATE_MAX:g}/s"
        )
    return rate
