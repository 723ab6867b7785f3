"""This module counts what a broker does: totals, and rates over seconds, a minute, an hour, a day.

Counting is an addition to an integer; rates come from samples that `tick` takes. Time is an
argument of the clock given; nothing here is a door to the outside.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from typing import Final, NamedTuple, TypeVar

from sluice.telemetry import Durations

_SAMPLE_MS: Final = 1_000
_SAMPLES_MAX: Final = 601
_SPANS_SECONDS: Final = (10, 60, 600)
# How often a sample is taken for each span, and how many are kept: as RocketMQ's broker does.
_MINUTE: Final = (10_000, 7)
_HOUR: Final = (600_000, 7)
_DAY: Final = (3_600_000, 25)

COUNTED: Final = ("put", "put_bytes", "get", "get_bytes", "get_found", "get_miss")

GroupKey = tuple[str, str]  # (topic, group)
K = TypeVar("K")


class Counted(NamedTuple):
    """Sums since the start; `calls` is the number of sends or pulls that made them."""

    messages: int = 0
    bytes: int = 0
    calls: int = 0


class Window(NamedTuple):
    """What happened in a span of time."""

    messages: int
    bytes: int
    calls: int
    elapsed_ms: int

    def rate(self, amount: int) -> float:
        """Per second."""
        return amount * 1000 / self.elapsed_ms if self.elapsed_ms > 0 else 0.0


class Mornings(NamedTuple):
    """Totals as they were at the last two midnights."""

    put_yesterday: int = 0
    put_today: int = 0
    get_yesterday: int = 0
    get_today: int = 0


class _Sample(NamedTuple):
    taken_ms: int
    puts: dict[str, Counted]
    gets: dict[GroupKey, Counted]


class Series:
    """Samples of all counters at a distance, the oldest first."""

    def __init__(self, every_ms: int, count_max: int) -> None:
        self._every_ms = every_ms
        self._samples: deque[_Sample] = deque(maxlen=count_max)

    def is_due(self, now_ms: int) -> bool:
        return not self._samples or now_ms - self._samples[-1].taken_ms >= self._every_ms

    def add(self, sample: _Sample) -> None:
        self._samples.append(sample)

    @property
    def oldest(self) -> _Sample:
        return self._samples[0]


class BrokerStats:
    """Counters of one broker. Each total is an attribute; `rates` looks at the samples."""

    def __init__(self, now_ms: Callable[[], int]) -> None:
        self._now_ms = now_ms
        self.put = 0  # messages stored
        self.put_bytes = 0
        self.get = 0  # messages handed out
        self.get_bytes = 0
        self.get_found = 0  # reads that found something
        self.get_miss = 0  # reads that found nothing
        self.refused: Counter[int] = Counter()  # requests, by the code of the answer
        # From a frame to its answer: sends, pulls, and pulls that waited for a message.
        self.send_times = Durations()
        self.pull_times = Durations()
        self.held_times = Durations()
        self.mornings = Mornings()
        # Lists, because they are added to with every message: messages, bytes, calls.
        self._puts: dict[str, list[int]] = {}
        self._gets: dict[GroupKey, list[int]] = {}
        self._samples: deque[tuple[int, dict[str, int]]] = deque(maxlen=_SAMPLES_MAX)
        self._sampled_ms = 0
        self._day = _day_of(now_ms())
        self.minute, self.hour, self.day = Series(*_MINUTE), Series(*_HOUR), Series(*_DAY)
        for series in (self.minute, self.hour, self.day):
            series.add(_Sample(now_ms(), {}, {}))

    # ------------------------------------------------------------------------------------- counting

    def stored(self, topic: str, count: int, byte_count: int, calls: int = 1) -> None:
        self.put += count
        self.put_bytes += byte_count
        counts = self._puts.get(topic)
        if counts is None:
            counts = self._puts[topic] = [0, 0, 0]
        counts[0] += count
        counts[1] += byte_count
        counts[2] += calls

    def handed_out(self, topic: str, group: str, count: int, byte_count: int) -> None:
        self.get += count
        self.get_bytes += byte_count
        self.get_found += 1
        counts = self._gets.get((topic, group))
        if counts is None:
            counts = self._gets[topic, group] = [0, 0, 0]
        counts[0] += count
        counts[1] += byte_count
        counts[2] += 1

    def forget_topic(self, topic: str) -> None:
        self._puts.pop(topic, None)
        for key in [key for key in self._gets if key[0] == topic]:
            del self._gets[key]

    def forget_group(self, group: str) -> None:
        for key in [key for key in self._gets if key[1] == group]:
            del self._gets[key]

    # -------------------------------------------------------------------------------------- looking

    def totals(self) -> dict[str, int]:
        return {name: getattr(self, name) for name in COUNTED}

    def puts(self) -> dict[str, Counted]:
        """What was stored, by topic."""
        return {key: Counted(*counts) for key, counts in self._puts.items()}

    def gets(self) -> dict[GroupKey, Counted]:
        """What was handed out, by topic and group."""
        return {key: Counted(*counts) for key, counts in self._gets.items()}

    def put_window(self, series: Series, topic: str) -> Window | None:
        """What was stored in a topic in a span (`minute`, `hour`, `day`); None if never."""
        counts = self._puts.get(topic)
        return None if counts is None else self._window(series, counts, series.oldest.puts, topic)

    def get_window(self, series: Series, topic: str, group: str) -> Window | None:
        """What was handed out to a group in a span; None if nothing ever was."""
        key = (topic, group)
        counts = self._gets.get(key)
        return None if counts is None else self._window(series, counts, series.oldest.gets, key)

    def all_puts_window(self, series: Series) -> Window:
        return self._sum_window(series, self._puts, series.oldest.puts)

    def all_gets_window(self, series: Series) -> Window:
        return self._sum_window(series, self._gets, series.oldest.gets)

    def _window(
        self, series: Series, counts: list[int], before: Mapping[K, Counted], key: K
    ) -> Window:
        old = before.get(key, Counted())
        if old.messages > counts[0]:
            old = Counted()  # deleted and made again since
        elapsed_ms = self._now_ms() - series.oldest.taken_ms
        return Window(
            counts[0] - old.messages, counts[1] - old.bytes, counts[2] - old.calls, elapsed_ms
        )

    def _sum_window(
        self,
        series: Series,
        now: Mapping[K, list[int]],
        before: Mapping[K, Counted],
    ) -> Window:
        windows = [self._window(series, counts, before, key) for key, counts in now.items()]
        return Window(
            sum(window.messages for window in windows),
            sum(window.bytes for window in windows),
            sum(window.calls for window in windows),
            self._now_ms() - series.oldest.taken_ms,
        )

    def rates(self, name: str) -> tuple[float, float, float]:
        """Per second, over the last 10, 60 and 600 seconds."""
        now_ms = self._now_ms()
        now_value = getattr(self, name)
        result = []
        for seconds in _SPANS_SECONDS:
            since = next((s for s in self._samples if s[0] >= now_ms - seconds * 1000), None)
            elapsed_ms = now_ms - since[0] if since is not None else 0
            value = since[1][name] if since is not None else 0
            result.append((now_value - value) * 1000 / elapsed_ms if elapsed_ms > 0 else 0.0)
        return result[0], result[1], result[2]

    def topic_rate(self, topic: str) -> float:
        """Messages stored per second in the last minute."""
        window = self.put_window(self.minute, topic)
        return 0.0 if window is None else window.rate(window.messages)

    def group_rate(self, topic: str, group: str) -> float:
        """Messages handed out to a group per second in the last minute."""
        window = self.get_window(self.minute, topic, group)
        return 0.0 if window is None else window.rate(window.messages)

    # -------------------------------------------------------------------------------------- samples

    def tick(self, now_ms: int) -> None:
        if now_ms - self._sampled_ms < _SAMPLE_MS:
            return
        self._sampled_ms = now_ms
        self._samples.append((now_ms, self.totals()))
        due = [series for series in (self.minute, self.hour, self.day) if series.is_due(now_ms)]
        if due:
            sample = _Sample(now_ms, self.puts(), self.gets())
            for series in due:
                series.add(sample)
        today = _day_of(now_ms)
        if today != self._day:
            self._day = today
            old = self.mornings
            self.mornings = Mornings(old.put_today, self.put, old.get_today, self.get)


def _day_of(now_ms: int) -> tuple[int, int]:
    """Which day it is where this process runs."""
    local = time.localtime(now_ms / 1000)
    return local.tm_year, local.tm_yday
