"""This module is the reader of a batch query: a topic, or a part of it, as a table.

`partitions` runs on the driver, once per query: it asks the brokers what there is now, so the query
sees one state. `read` runs on executors, on a pickled copy: all that it needs is in its partition.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

import pyarrow as pa
from pyspark.sql.datasource import DataSourceReader, Filter, InputPartition
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import StructType

from sluice.errors import ConfigError
from sluice.spark import planning
from sluice.spark.cluster import Cluster, Queue, Span, cluster_for, name_of
from sluice.spark.options import EARLIEST, LATEST, Bound, Filters, ReadOptions
from sluice.spark.planning import Range
from sluice.spark.pushdown import Pruning
from sluice.spark.reading import batches, lost
from sluice.spark.selection import Selection
from sluice.spark.workers import settle

_ROW_BYTES = 1024  # what a message is taken for where a broker cannot tell


class QueueRange(InputPartition):
    """What one task reads."""

    def __init__(self, part: Range, partition: int, filters: Filters) -> None:
        super().__init__(None)
        self.topic, self.broker, self.queue_id = part.queue
        self.start, self.stop = part.start, part.stop
        self.partition = partition
        self.filters = filters


def arrow_schema(schema: StructType) -> pa.Schema:
    """The schema that Spark compares batches with."""
    return to_arrow_schema(schema, timezone="UTC")


def read_partition(
    options: ReadOptions, schema: StructType, partition: InputPartition
) -> Iterator[pa.RecordBatch]:
    """What both readers do on an executor."""
    settle()
    if not isinstance(partition, QueueRange):
        return  # Spark asks once also where there is nothing
    queue = Queue(partition.topic, partition.broker, partition.queue_id)
    yield from batches(
        cluster_for(options.connection, options.poll_ms),
        options,
        arrow_schema(schema),
        queue,
        partition.partition,
        partition.start,
        partition.stop,
        partition.filters,
    )


def plan(
    cluster: Cluster,
    options: ReadOptions,
    selection: Selection,
    ranges: list[Range],
    filters: Filters,
) -> list[InputPartition]:
    """The tasks of a batch."""
    ranges = [each for each in ranges if each.rows > 0]
    sizes = {each: each.rows * _ROW_BYTES for each in ranges}
    if options.min_partitions is not None or options.max_partition_bytes is not None:
        for each in ranges:
            told = cluster.range_bytes(each.queue, [(each.start, each.stop)])
            if told is not None:
                sizes[each] = told[0]
    parts = planning.divided(
        ranges,
        sizes,
        min_tasks=options.min_partitions,
        rows_max=options.max_records,
        bytes_max=options.max_partition_bytes,
    )
    numbers = selection.partitions
    return [QueueRange(part, numbers[part.queue], filters) for part in parts]


class BatchReader(DataSourceReader):
    """Reads what lies between two bounds."""

    def __init__(self, options: ReadOptions, schema: StructType) -> None:
        options.check_batch()
        self._options = options
        self._schema = schema
        self._pruning = Pruning()

    def partitions(self) -> list[InputPartition]:
        options, pruning = self._options, self._pruning
        cluster = cluster_for(options.connection, options.poll_ms)
        cluster.greet()
        cluster.forget_routes()
        if pruning.topics is not None and not options.pattern:
            wanted = tuple(topic for topic in options.topics if pruning.takes_topic(topic))
            if not wanted:
                return []
        selection = Selection(cluster, options).look().require_all()
        start = selection.at(options.start or Bound(all_at=EARLIEST), "starting")
        stop = selection.at(options.end or Bound(all_at=LATEST), "ending")
        ranges = []
        for queue, span in selection.spans.items():
            begin, end = start[queue], stop[queue]
            _check_order(queue, begin, end, span, options)
            if begin < span.low and begin < end:
                lost(
                    f"{name_of(queue)}: offset {begin} is gone; the next good offset is {span.low}",
                    options,
                )
                begin = min(span.low, end)
            if end > span.high:
                lost(f"{name_of(queue)}: offset {end} was never there, it ends at {span.high}",
                     options)  # fmt: skip
                end = span.high
            if pruning.takes_topic(queue.topic) and pruning.takes_partition(
                selection.partitions[queue]
            ):
                ranges.append(self._narrowed(cluster, Range(queue, begin, end)))
        if pruning.tags is not None and not pruning.tags:
            return []
        return plan(cluster, options, selection, ranges, self._filters())

    def _narrowed(self, cluster: Cluster, part: Range) -> Range:
        pruning = self._pruning
        start = max(part.start, pruning.offset_low)
        stop = min(part.stop, pruning.offset_stop)
        if start < stop and pruning.begin_ms is not None:
            start = max(start, cluster.offset_at(part.queue, pruning.begin_ms)[0])
        if start < stop and pruning.end_ms is not None:
            end, is_ordered = cluster.offset_at(part.queue, pruning.end_ms + 1)
            if is_ordered:
                stop = min(stop, end)
        return Range(part.queue, start, max(start, stop))

    def _filters(self) -> Filters:
        filters = self._options.filters
        tags, key = self._pruning.tags, self._pruning.key
        if tags is not None:
            filters = replace(filters, tags=" || ".join(sorted(tags)))
        if key and not filters.keys:
            filters = replace(filters, keys=(key,))
        return filters

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return read_partition(self._options, self._schema, partition)


class PushReader(BatchReader):
    """The same for sessions that push filters: Spark refuses it in all others."""

    def pushFilters(self, filters: list[Filter]) -> Iterable[Filter]:  # noqa: N802
        rest = self._pruning.push(filters)
        given = self._options.filters.tags
        if self._pruning.tags is not None and given:
            named = {tag.strip() for tag in given.split("||")}
            self._pruning.tags &= named
        return rest


def _check_order(queue: Queue, begin: int, end: int, span: Span, options: ReadOptions) -> None:
    if begin > end:
        named = [name for name in options.given if name.startswith(("starting", "ending"))]
        raise ConfigError(
            f"{'options' if len(named) > 1 else 'option'} {' and '.join(named)}: {name_of(queue)} "
            f"would be read from offset {begin} to {end}; it has {span.low} to {span.high}. Where "
            "the offsets are from before the topic was made anew they mean nothing now"
        )
