"""This module decides which offsets a batch takes, and how they are divided into tasks. Pure: the
same offsets always give the same tasks.

Both are done as Spark's Kafka source does it, so that the same options mean the same: a limit is
shared in proportion to what each queue has, with one message for each at least; a queue is one task
unless more are asked for. What goes beyond that counts bytes, not rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import NamedTuple

from sluice.spark.cluster import Queue


class Range(NamedTuple):
    """Offsets [start, stop) of a queue."""

    queue: Queue
    start: int
    stop: int

    @property
    def rows(self) -> int:
        return self.stop - self.start


def limited(
    start: Mapping[Queue, int], latest: Mapping[Queue, int], rows_max: int
) -> dict[Queue, int]:
    """Where a batch of about so many messages ends."""
    lags = {queue: max(0, stop - start[queue]) for queue, stop in latest.items()}
    total = sum(lags.values())
    if total <= rows_max:
        return dict(latest)
    result = {}
    for queue, stop in latest.items():
        share = rows_max * lags[queue] / total
        # One at least, or a queue with little would wait for ever beside one with much.
        taken = int(share) if share >= 1 else (1 if lags[queue] else 0)
        result[queue] = min(start[queue] + taken, stop) if lags[queue] else stop
    return result


def limited_bytes(
    start: Mapping[Queue, int],
    latest: Mapping[Queue, int],
    sizes: Mapping[Queue, int],
    bytes_max: int,
) -> dict[Queue, int]:
    """Where a batch of about so many bytes ends; `sizes`: bytes of each queue up to `latest`."""
    total = sum(sizes.get(queue, 0) for queue in latest)
    if total <= bytes_max:
        return dict(latest)
    result = {}
    for queue, stop in latest.items():
        lag = max(0, stop - start[queue])
        taken = max(1, lag * bytes_max // total) if lag else 0
        result[queue] = min(start[queue] + taken, stop) if lag else stop
    return result


def divided(
    ranges: list[Range],
    sizes: Mapping[Range, int],
    *,
    min_tasks: int | None,
    rows_max: int | None,
    bytes_max: int | None,
) -> list[Range]:
    """The ranges of the tasks. `sizes`: about how many bytes each range has."""
    parts = [each for each in ranges if each.rows > 0]
    wanted = dict.fromkeys(parts, 1)
    if min_tasks is not None and parts and min_tasks > len(parts):
        total = sum(sizes[each] for each in parts) or 1
        for each in parts:
            share = round(min_tasks * sizes[each] / total)
            wanted[each] = min(each.rows, max(1, share))
        _reach(wanted, sizes, min_tasks)
    for each in parts:
        if rows_max is not None:
            wanted[each] = max(wanted[each], -(-each.rows // rows_max))
        if bytes_max is not None:
            wanted[each] = max(wanted[each], -(-sizes[each] // bytes_max))
    return [
        piece for each in parts for piece in _pieces(each, min(wanted[each], each.rows), rows_max)
    ]


def _reach(wanted: dict[Range, int], sizes: Mapping[Range, int], least: int) -> None:
    """Rounding may have given too few tasks: whoever has the largest ones gets more."""
    while sum(wanted.values()) < least:
        able = [each for each in wanted if wanted[each] < each.rows]
        if not able:
            return
        largest = max(able, key=lambda each: sizes[each] / wanted[each])
        wanted[largest] += 1


def _pieces(whole: Range, count: int, rows_max: int | None) -> list[Range]:
    """So many ranges of nearly equal length."""
    bounds = [whole.start + whole.rows * index // count for index in range(count + 1)]
    pieces = [Range(whole.queue, begin, end) for begin, end in pairwise(bounds) if end > begin]
    assert rows_max is None or all(piece.rows <= rows_max for piece in pieces)
    return pieces
