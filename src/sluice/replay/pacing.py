"""This module decides when a recorded message is due again. Pure: no clock, no file.

A message has a coordinate: the milliseconds since the first recorded one or, where a rate is asked
for, its number. A curve says how fast the coordinate goes up while time passes: its value at second
w is v(w), straight between its points, the first value before and the last one behind them. So

    coordinate(w) = integral of v from 0 to w          due(coordinate) = its inverse

which is a square root on a slope and a division on a flat piece. Nothing is added up message by
message, so no error grows with their number, and a change of speed loses or invents no time.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Final

import numpy as np
import numpy.typing as npt

from sluice.replay.texts import Pace

_STEP_SECONDS: Final = 1e-6  # points that are closer are a step

Floats = npt.NDArray[np.float64]
Millis = npt.NDArray[np.int64]


class Curve:
    """How fast a coordinate goes up: pieces that each begin at a second and a coordinate."""

    def __init__(self, points: Sequence[tuple[float, float]]) -> None:
        """Seconds that do not go down, values above 0 (the first of a slope may be 0)."""
        assert points, "a curve has a point"
        begins: list[float] = [0.0]
        values: list[float] = [points[0][1]]
        slopes: list[float] = [0.0]
        for (at, value), (after, next_value) in pairwise(points):
            if after - at > _STEP_SECONDS:
                begins.append(at)
                values.append(value)
                slopes.append((next_value - value) / (after - at))
        begins.append(points[-1][0])
        values.append(points[-1][1])
        slopes.append(0.0)
        self._begins = np.array(begins)
        self._values = np.array(values)
        self._slopes = np.array(slopes)
        spans = np.diff(self._begins)
        gained = spans * (self._values[:-1] + self._slopes[:-1] * spans / 2)
        self._reached = np.concatenate(([0.0], np.cumsum(gained)))

    def seconds(self, coordinates: Floats) -> Floats:
        """When each of these coordinates is reached."""
        piece = np.searchsorted(self._reached, coordinates, "right") - 1
        left = coordinates - self._reached[piece]
        value = self._values[piece]
        root = np.sqrt(np.maximum(value * value + 2 * self._slopes[piece] * left, 0.0))
        # 2c / (v + root) is the smaller root in the form that also holds without a slope.
        spent = np.divide(2 * left, value + root, out=np.zeros_like(left), where=left > 0)
        ends = np.append(self._begins[1:], np.inf)[piece]
        found: Floats = np.minimum(self._begins[piece] + spent, ends)
        return found

    def coordinate(self, second: float) -> float:
        """How far it is after so many seconds."""
        piece = int(np.searchsorted(self._begins, second, "right")) - 1
        spent = second - float(self._begins[piece])
        gained = spent * (float(self._values[piece]) + float(self._slopes[piece]) * spent / 2)
        return float(self._reached[piece]) + gained


class Schedule:
    """When the messages of a replay are due, in seconds since it began."""

    def __init__(self, pace: Pace, first_ms: int, copies: int = 1) -> None:
        """`first_ms` is the time of the first recorded message; each is sent `copies` times."""
        self._curve = Curve(pace.points) if pace.points else None
        self._is_rate = pace.is_rate
        self._first_ms = first_ms
        self._copies = copies
        self._count = 0
        self._last = 0.0

    def due(self, times_ms: Millis) -> Floats:
        """When the next messages are due, given their recorded times; one number for each copy.

        Numbers never go down, whatever the times do: the order of messages is that of the calls.
        """
        count = len(times_ms) * self._copies
        seconds = self._seconds(times_ms, count)
        self._count += count
        if count:
            seconds = np.maximum(np.maximum.accumulate(seconds), self._last)
            self._last = float(seconds[-1])
        return seconds

    def _seconds(self, times_ms: Millis, count: int) -> Floats:
        if self._curve is None:
            return np.zeros(count)
        if self._is_rate:
            return self._curve.seconds(np.arange(self._count, self._count + count, dtype=float))
        spans = np.maximum(times_ms - self._first_ms, 0) / 1000
        return np.repeat(self._curve.seconds(spans), self._copies)

    def length(self, count: int, last_ms: int) -> float:
        """How long all of it takes where nothing holds it up; `count` without the copies."""
        if self._curve is None or not count:
            return 0.0
        last = count * self._copies - 1 if self._is_rate else (last_ms - self._first_ms) / 1000
        return float(self._curve.seconds(np.array([max(0.0, last)]))[0])


class Pacer:
    """The messages of one stretch that are still to go: which are due, and how long to wait."""

    def __init__(self, due: Floats) -> None:
        """`due` goes up."""
        self._due = due
        self.at = 0

    @property
    def is_over(self) -> bool:
        return self.at >= len(self._due)

    def take(self, second: float, room: int) -> range:
        """The numbers of the messages that are due by now, at most so many."""
        due = int(np.searchsorted(self._due, second, "right"))
        begin = self.at
        self.at = max(begin, min(due, begin + room))
        return range(begin, self.at)

    def wait(self, second: float) -> float:
        """How long until the next one is due; below 0 where it should have gone already."""
        return float(self._due[self.at]) - second
