"""This module is the reader of a stream. All but `read` runs in one process on the driver.

What is processed is Spark's to remember, in its checkpoint. A consumer group on the broker, where
the option groupId names one, is told of it so that people see the lag; nothing is resumed from it.

Spark does not write the first offsets down before the first batch is: after a crash in between it
asks for them again, and "latest" would be somewhere else by then, with messages lost in between. So
where there is a group, the first offsets are pinned on the broker (in a group of their own, first
come first kept) until the first batch is known to be done.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from typing import Any, Final

import pyarrow as pa
from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxBytes,
    ReadMaxRows,
    ReadMinRows,
    SupportsTriggerAvailableNow,
)
from pyspark.sql.types import StructType

from sluice.errors import SluiceError
from sluice.spark import planning, positions
from sluice.spark.batch import plan, read_partition
from sluice.spark.cluster import Cluster, Queue, cluster_for, name_of
from sluice.spark.options import LATEST, Bound, ReadOptions
from sluice.spark.planning import Range
from sluice.spark.positions import Offsets
from sluice.spark.reading import lost
from sluice.spark.selection import Selection

log_lines = logging.getLogger("sluice.spark")

PIN_SUFFIX: Final = "-start"
_ROUTES_SECONDS: Final = 10.0  # how often new queues and brokers are looked for
_AWAY_SECONDS: Final = 1.0  # from one look for a broker that is away to the next
_ROW_BYTES: Final = 1024

Position = dict[str, Any]


class StreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Reads a stream, a batch of offsets at a time."""

    def __init__(self, options: ReadOptions, schema: StructType) -> None:
        options.check_stream()
        self._options = options
        self._schema = schema
        self._plain_brokers: dict[str, str] = {}
        self._initial: Position | None = None
        self._target: Offsets | None = None  # of a query that ends with what is there now
        self._seen: Position | None = None
        self._waiting_since: float | None = None  # None: no batch was asked for yet
        self._routes_at = 0.0
        self._told: Position | None = None
        self._away: set[str] = set()  # brokers of queues that were read, and that are not there
        bound = options.start or Bound(all_at=LATEST)
        self._may_be_pinned = bool(options.group) and _moves(bound)

    # ------------------------------------------------------------------------------------- the edge

    def _cluster(self) -> Cluster:
        return cluster_for(self._options.connection, self._options.poll_ms)

    def _look(self) -> Selection:
        cluster = self._cluster()
        cluster.greet()
        if time.monotonic() - self._routes_at > _ROUTES_SECONDS:
            cluster.forget_routes()
            self._routes_at = time.monotonic()
        # A topic that is known from when it had one broker keeps its numbers' meaning.
        selection = Selection(cluster, self._options, self._plain_brokers).look()
        for topic, brokers in selection.brokers.items():
            if len(brokers) == 1:
                self._plain_brokers.setdefault(topic, next(iter(brokers)))
        return selection

    def _look_for(self, position: Position) -> Selection:
        """The same where some queues are known: a broker of theirs that is away is waited for.

        Routes do not name the queues of such a broker. They would be taken for deleted, and those
        of other brokers would have other numbers.
        """
        until = time.monotonic() + self._options.poll_ms / 1000
        while True:
            selection = self._look()
            missing = {q.broker for q in selection.parse(position) if q not in selection.spans}
            missing.discard(positions.UNKNOWN)
            away = missing - self._cluster().broker_names() if missing else missing
            if away and not self._away:
                log_lines.warning("broker %s is away; it is waited for", ", ".join(sorted(away)))
            self._away = away
            if not away or time.monotonic() + _AWAY_SECONDS > until:
                return selection
            time.sleep(_AWAY_SECONDS)
            self._cluster().forget_routes()

    # -------------------------------------------------------------------------------------- offsets

    def initialOffset(self) -> Position:  # noqa: N802
        if self._initial is None:
            selection = self._look().require_all()
            bound = self._options.start or Bound(all_at=LATEST)
            offsets = selection.at(bound, "starting")
            if self._may_be_pinned:
                offsets = self._pinned(selection, offsets)
            self._initial = positions.to_json(offsets)
        return self._initial

    def _pinned(self, selection: Selection, offsets: Offsets) -> Offsets:
        """The first offsets that a query of this group began with, and never finished a batch."""
        cluster, group = self._cluster(), self._options.group + PIN_SUFFIX
        kept = cluster.committed(group, list(offsets))
        if len(kept) == len(offsets) and kept:
            spans = selection.spans
            if all(offset <= spans[queue].high for queue, offset in kept.items()):
                return {queue: max(offset, spans[queue].low) for queue, offset in kept.items()}
        for queue, offset in offsets.items():
            cluster.commit(group, queue, offset)
        return offsets

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        options = self._options
        if options.max_offsets is not None:
            return ReadMaxRows(options.max_offsets)
        if options.max_bytes is not None:
            return ReadMaxBytes(options.max_bytes)
        if options.min_offsets is not None:
            return ReadMinRows(options.min_offsets)
        return ReadAllAvailable()

    def latestOffset(self, start: Position, limit: ReadLimit) -> Position:  # noqa: N802
        self._done(start)
        selection = self._look_for(start)
        known = selection.parse(start)
        begin = self._begin(selection, known)
        if not begin:
            # No queue at all. Written down, it would mean that all are new when they are back, and
            # all would be read again.
            return start
        latest = self._latest(selection, begin)
        self._seen = positions.to_json(latest)
        if self._target is not None:
            latest = self._within(self._target, known, latest)
        if isinstance(limit, ReadAllAvailable):
            return positions.to_json(latest)
        if self._is_too_early(begin, latest):
            return start
        options = self._options
        if options.max_offsets is not None:
            latest = planning.limited(begin, latest, options.max_offsets)
        if options.max_bytes is not None:
            sizes = self._sizes(begin, latest)
            latest = planning.limited_bytes(begin, latest, sizes, options.max_bytes)
        return positions.to_json(latest)

    def _begin(self, selection: Selection, known: Offsets) -> Offsets:
        """Where a batch begins: queues that have come since begin at their first message."""
        begin = {queue: known.get(queue, span.low) for queue, span in selection.spans.items()}
        for queue in known:
            if queue not in begin:
                why = ", or not read any more. A checkpoint belongs to one set of topics"
                if queue.broker in self._away:
                    why = f": no nameserver knows broker {queue.broker}"
                lost(
                    f"{name_of(queue)} is not there any more{why}; offset {known[queue]} was next",
                    self._options,
                )
        return begin

    def _latest(self, selection: Selection, begin: Offsets) -> Offsets:
        latest = {}
        for queue, span in selection.spans.items():
            if span.high < begin[queue]:
                lost(
                    f"{name_of(queue)} ends at offset {span.high}, and {begin[queue]} is next: the "
                    "topic was deleted and made again, or the broker lost messages; the next good "
                    f"offset is {span.high}",
                    self._options,
                )
            latest[queue] = span.high
        return latest

    def _within(self, target: Offsets, known: Offsets, latest: Offsets) -> Offsets:
        """How far a query goes that ends with what was there when it began. Queues that have come
        since are left to the next one.
        """
        for queue, stop in target.items():
            if latest.get(queue, -1) < stop:
                there = f"ends at offset {latest[queue]}" if queue in latest else "is gone"
                lost(
                    f"{name_of(queue)} {there}, and up to {stop} was to be read: the topic was "
                    "deleted and made again, or the broker lost messages",
                    self._options,
                )
        return {
            queue: min(stop, target.get(queue, known.get(queue, stop)))
            for queue, stop in latest.items()
            if queue in target or queue in known
        }

    def _is_too_early(self, begin: Offsets, latest: Offsets) -> bool:
        """Whether minOffsetsPerTrigger says to wait for more."""
        options = self._options
        if options.min_offsets is None or self._target is not None:
            return False
        rows = sum(max(0, stop - begin[queue]) for queue, stop in latest.items())
        now, since = time.monotonic(), self._waiting_since
        # What a query finds when it is started does not wait, as with Spark's Kafka source.
        is_enough = since is None or rows >= options.min_offsets
        if is_enough or (rows and (now - (since or 0.0)) * 1000 >= options.max_delay_ms):
            self._waiting_since = now
            return False
        return True

    def _sizes(self, begin: Offsets, latest: Offsets) -> dict[Queue, int]:
        sizes = {}
        for queue, stop in latest.items():
            rows = max(0, stop - begin[queue])
            told = self._cluster().range_bytes(queue, [(begin[queue], stop)]) if rows else [0]
            sizes[queue] = told[0] if told else rows * _ROW_BYTES
        return sizes

    def reportLatestOffset(self) -> Position | None:  # noqa: N802
        return self._seen

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        selection = self._look().require_all()
        self._target = {queue: span.high for queue, span in selection.spans.items()}

    # ---------------------------------------------------------------------------------------- tasks

    def partitions(self, start: Position, end: Position) -> list[InputPartition]:
        cluster = self._cluster()
        selection = self._look_for(end)
        first, last = selection.parse(start), selection.parse(end)
        ranges = []
        for queue, stop in sorted(last.items()):
            span = selection.spans.get(queue)
            if span is None:
                lost(f"{name_of(queue)} is gone, up to offset {stop} was to be read", self._options)
                continue
            # A queue that has come since had its first message at 0; what of it is gone is lost.
            begin = first.get(queue, 0)
            if begin > stop:
                lost(
                    f"{name_of(queue)}: a batch that ends at offset {stop} would begin at {begin}. "
                    "Where a query was to begin at 'latest' and died in its first batch, 'latest' "
                    "is further on now, and what lay between is not read; option groupId keeps "
                    "where such a query began",
                    self._options,
                )
            if begin < span.low and begin < stop:
                lost(
                    f"{name_of(queue)}: offset {begin} is gone; the next good offset is {span.low}",
                    self._options,
                )
                begin = min(span.low, stop)
            ranges.append(Range(queue, begin, max(begin, stop)))
        return plan(cluster, self._options, selection, ranges, self._options.filters)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return read_partition(self._options, self._schema, partition)

    # ------------------------------------------------------------------------------------- progress

    def commit(self, end: Position) -> None:
        self._done(end)

    def _done(self, end: Position) -> None:
        """Everything below `end` is processed: Spark asks for what comes after it."""
        group = self._options.group
        if not group or end in (self._told, self._initial):
            return
        # A report for people must not stop the query.
        try:
            cluster = self._cluster()
            selection = self._look()
            for queue, offset in selection.parse(end).items():
                cluster.commit(group, queue, offset)
            if self._may_be_pinned:
                cluster.forget_group(group + PIN_SUFFIX, list(selection.spans))
            self._may_be_pinned = False
            self._told = end
        except SluiceError as error:
            log_lines.warning("the progress of group %s could not be reported: %s", group, error)

    def stop(self) -> None:
        self._cluster().close()


class RefusedReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """What stands for a reader that cannot be: whatever it is asked for first, it says why.

    Where a reader cannot be made Spark 4.2 stops it all the same, and an error of its own
    (UnboundLocalError) is the last word that users see.
    """

    def __init__(self, error: SluiceError) -> None:
        self._error = error

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        raise self._error

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        raise self._error

    def initialOffset(self) -> Position:  # noqa: N802
        raise self._error

    def latestOffset(self, start: Position, limit: ReadLimit) -> Position:  # noqa: N802
        raise self._error

    def partitions(self, start: Position, end: Position) -> list[InputPartition]:
        raise self._error

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        raise self._error

    def stop(self) -> None:
        """There is nothing to stop."""


def _moves(bound: Bound) -> bool:
    """Whether the offsets of a bound are others a while later."""
    if bound.timestamp_ms is not None or bound.timestamps_ms is not None:
        return False
    if bound.offsets is not None:
        return any(LATEST in own.values() for own in bound.offsets.values())
    return bound.all_at == LATEST
