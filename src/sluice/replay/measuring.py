"""This module counts what happens in a replay, second by second, and says when it is enough. Pure.

Seconds are those since the replay began. A series has a bounded number of intervals: a replay of
hours has longer ones. Times of answers are counted in buckets that are 4 % wide, so that a
percentile is right within that.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Final

from sluice.replay.pacing import Floats

INTERVALS_MAX: Final = 2048
OUTCOMES_MIN: Final = 20  # fewer say nothing about a share, unless a whole window has no more
_LOWEST_MS: Final = 0.01
_STEP: Final = math.log(1.04)


class Times:
    """Times in milliseconds, in buckets."""

    __slots__ = ("_counts", "highest_ms")

    def __init__(self) -> None:
        self._counts: Counter[int] = Counter()
        self.highest_ms = 0.0

    def add(self, time_ms: float, count: int = 1) -> None:
        bucket = math.ceil(math.log(time_ms / _LOWEST_MS) / _STEP) if time_ms > _LOWEST_MS else 0
        self._counts[bucket] += count
        self.highest_ms = max(self.highest_ms, time_ms)

    def join(self, other: Times) -> None:
        self._counts.update(other._counts)
        self.highest_ms = max(self.highest_ms, other.highest_ms)

    def percentile(self, share: float) -> float:
        """The time below which this share of them lies; 0 where there is none."""
        left = math.ceil(sum(self._counts.values()) * share)
        for bucket in sorted(self._counts):
            left -= self._counts[bucket]
            if left <= 0:
                return min(_LOWEST_MS * math.exp(bucket * _STEP), self.highest_ms)
        return 0.0


@dataclass(slots=True)
class Interval:
    """What happened in some seconds."""

    wanted: int = 0  # messages that were due
    sent: int = 0  # that a broker acknowledged
    failed: int = 0
    late_ms: float = 0.0  # how far behind its time a message went out, the worst
    answers: Times = field(default_factory=Times)

    def join(self, other: Interval) -> None:
        self.wanted += other.wanted
        self.sent += other.sent
        self.failed += other.failed
        self.late_ms = max(self.late_ms, other.late_ms)
        self.answers.join(other.answers)


class Series:
    """A replay as a list of intervals."""

    def __init__(self, intervals_max: int = INTERVALS_MAX) -> None:
        self._intervals_max = intervals_max
        self.seconds = 1  # of one interval
        self.intervals: list[Interval] = []

    def at(self, second: float) -> Interval:
        """The interval of a second; earlier ones are never forgotten, only joined."""
        index = max(0, int(second)) // self.seconds
        while index >= self._intervals_max:
            self._halve()
            index = max(0, int(second)) // self.seconds
        while index >= len(self.intervals):
            self.intervals.append(Interval())
        return self.intervals[index]

    def _halve(self) -> None:
        """Join intervals two by two."""
        for left, right in zip(self.intervals[::2], self.intervals[1::2], strict=False):
            left.join(right)
        self.intervals = self.intervals[::2]
        self.seconds *= 2

    def want(self, due: Floats) -> None:
        """Messages are due at these seconds, which go up."""
        at = 0
        while at < len(due):
            second = int(due[at])
            stop = int(due.searchsorted(second + 1, "left"))
            self.at(second).wanted += stop - at
            at = stop

    def total(self) -> Interval:
        result = Interval()
        for interval in self.intervals:
            result.join(interval)
        return result


class ErrorWatch:
    """Whether the share of errors in the last seconds is above a limit."""

    def __init__(self, limit: float | None, window_seconds: float) -> None:
        """`limit`: None for never."""
        self._limit = limit
        self._window = window_seconds
        self._outcomes: deque[tuple[float, int, int]] = deque()  # (second, sent, failed)
        self._begun: float | None = None
        self._sent = 0
        self._failed = 0

    def note(self, second: float, sent: int, failed: int) -> None:
        if self._begun is None:
            self._begun = second
        self._outcomes.append((second, sent, failed))
        self._sent += sent
        self._failed += failed
        self._forget(second)

    def _forget(self, second: float) -> None:
        while self._outcomes and self._outcomes[0][0] <= second - self._window:
            _, sent, failed = self._outcomes.popleft()
            self._sent -= sent
            self._failed -= failed

    @property
    def share(self) -> float:
        """Of what was answered within the window."""
        return self._failed / max(1, self._sent + self._failed)

    def is_over(self, second: float) -> bool:
        """Whether it is time to stop."""
        if self._limit is None or self._begun is None:
            return False
        self._forget(second)
        is_enough = self._sent + self._failed >= OUTCOMES_MIN
        if not is_enough and second - self._begun < self._window:
            return False
        return self.share > self._limit
