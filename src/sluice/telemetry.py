"""This module is how numbers leave a process: metrics, times in buckets, Prometheus's text format.

Who counts adds to plain integers of its own; a `Page` is made of them when somebody asks. The only
thing here that runs for a request is `Durations.since`. Names of topics and groups come from
clients, so the number of them that a page shows is bounded (`Fold`).

It opens no socket and knows nothing of brokers.
"""

from __future__ import annotations

from collections.abc import Mapping
from time import perf_counter_ns
from typing import Final, Generic, Literal, NamedTuple, TypeVar

Kind = Literal["counter", "gauge", "histogram"]
K = TypeVar("K")

# No topic and no group can have this name: it has characters that theirs may not have.
OTHER: Final = "(other)"
CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"

# A bucket holds times of one bit length. Those outside of 2**14 ns (16 us) to 2**35 ns (34 s) are
# counted, but their bounds are not worth a line of the page.
_BITS_MAX: Final = 64
_BITS_SHOWN: Final = range(14, 36)
_ESCAPES: Final = str.maketrans({"\\": r"\\", "\n": r"\n", '"': r"\""})


class Metric(NamedTuple):
    """One line of docs/metrics.md, and one family of a page."""

    name: str
    kind: Kind
    help: str
    labels: tuple[str, ...] = ()
    rocketmq: str = ""  # what the exporter of Apache's broker calls the same thing


class Durations:
    """How long something took, counted in buckets of powers of two nanoseconds.

    The number of a time's bucket is its bit length: no search, for this runs with every request.
    """

    __slots__ = ("counts", "total_ns")

    def __init__(self) -> None:
        self.counts = [0] * _BITS_MAX  # counts[b]: times of more than 2**(b-1), up to 2**b ns
        self.total_ns = 0

    def add(self, elapsed_ns: int, count: int = 1) -> None:
        """So long it took; `count` where it took so long for several at once."""
        self.counts[(elapsed_ns - 1).bit_length()] += count
        self.total_ns += elapsed_ns * count

    def since(self, start_ns: int) -> None:
        """Something is over that began at a time of `time.perf_counter_ns`."""
        self.add(perf_counter_ns() - start_ns)

    @property
    def count(self) -> int:
        return sum(self.counts)


class Page:
    """Metrics with their values, on the way to becoming text."""

    def __init__(self) -> None:
        self._lines: dict[Metric, list[str]] = {}

    def add(self, metric: Metric, value: float, *labels: str) -> None:
        """One value; `labels` are those of the metric, in its order."""
        assert metric.kind != "histogram", "times are added with add_durations"
        self._put(metric, metric.name, _label_text(metric.labels, labels), value)

    def add_durations(self, metric: Metric, durations: Durations, *labels: str) -> None:
        """A histogram, in seconds."""
        assert metric.kind == "histogram", "a single value is added with add"
        below = sum(durations.counts[: _BITS_SHOWN.start])
        names = (*metric.labels, "le")
        for bits in _BITS_SHOWN:
            below += durations.counts[bits]
            bound = _label_text(names, (*labels, repr(2**bits / 1e9)))
            self._put(metric, f"{metric.name}_bucket", bound, below)
        count = durations.count
        self._put(metric, f"{metric.name}_bucket", _label_text(names, (*labels, "+Inf")), count)
        own = _label_text(metric.labels, labels)
        self._put(metric, f"{metric.name}_sum", own, durations.total_ns / 1e9)
        self._put(metric, f"{metric.name}_count", own, count)

    def _put(self, metric: Metric, name: str, labels: str, value: float) -> None:
        self._lines.setdefault(metric, []).append(f"{name}{labels} {value!r}\n")

    def text(self) -> str:
        """Everything that was added, in Prometheus's text format."""
        parts: list[str] = []
        for metric, lines in self._lines.items():
            parts.append(f"# HELP {metric.name} {_escaped_help(metric.help)}\n")
            parts.append(f"# TYPE {metric.name} {metric.kind}\n")
            parts += lines
        return "".join(parts)


class Fold(Generic[K]):
    """Which keys have lines of their own: the first ones, up to a limit. The others share one.

    A key that shares the line goes on sharing it, and the line's counters never go back: what a
    deleted topic had counted stays in them. So rates over it are right.
    """

    def __init__(self, own_max: int) -> None:
        self._own_max = own_max
        self._own: set[K] = set()
        self._others: dict[K, tuple[int, ...]] = {}  # as they were counted last
        self._other_sums: tuple[int, ...] = ()

    def counters(self, rows: Mapping[K, tuple[int, ...]]) -> dict[K | None, tuple[int, ...]]:
        """Totals by key, and under None those of all keys that share a line."""
        self._forget_missing(rows)
        result: dict[K | None, tuple[int, ...]] = {}
        for key, values in rows.items():
            if self._has_own(key):
                result[key] = values
                continue
            before = self._others.get(key, ())
            if len(before) != len(values) or any(
                b > v for b, v in zip(before, values, strict=True)
            ):
                before = (0,) * len(values)  # new, or deleted and made again
            sums = self._other_sums or (0,) * len(values)
            rises = (v - b for v, b in zip(values, before, strict=True))
            self._other_sums = tuple(s + r for s, r in zip(sums, rises, strict=True))
            self._others[key] = values
        if self._other_sums:
            result[None] = self._other_sums
        return result

    def gauges(self, rows: Mapping[K, int]) -> dict[K | None, int]:
        """Present values by key, and under None the sum of all keys that share a line."""
        self._forget_missing(rows)
        result: dict[K | None, int] = {}
        for key, value in rows.items():
            if self._has_own(key):
                result[key] = value
            else:
                self._others[key] = ()
                result[None] = result.get(None, 0) + value
        return result

    def _has_own(self, key: K) -> bool:
        if key in self._own:
            return True
        if key in self._others or len(self._own) >= self._own_max:
            return False
        self._own.add(key)
        return True

    def _forget_missing(self, rows: Mapping[K, object]) -> None:
        """What is gone leaves its place to what comes next."""
        self._own.intersection_update(rows)
        for key in [key for key in self._others if key not in rows]:
            del self._others[key]


def _label_text(names: tuple[str, ...], values: tuple[str, ...]) -> str:
    pairs = zip(names, values, strict=True)
    text = ",".join(f'{name}="{value.translate(_ESCAPES)}"' for name, value in pairs)
    return f"{{{text}}}" if text else ""


def _escaped_help(text: str) -> str:
    return text.replace("\\", r"\\").replace("\n", r"\n")
