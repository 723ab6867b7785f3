"""This module writes DataFrames: each task sends or stages its rows, the driver publishes.

    exactlyOnce   tasks stage, where nobody sees it; the driver's commit publishes what the
                  successful tries staged, once for a sink and a batch. Killed tasks and drivers,
                  retries and speculation neither lose nor repeat, because Spark replays a batch
                  under the same number. The default, where the broker can do it.
    atLeastOnce   tasks send; a try that fails leaves what it sent. The default with brokers that
                  cannot stage, Apache's for instance.

A batch is published by one broker, or it could not be one step: a sink writes to the queues of one
broker, chosen by the sink's name. If the broker is another one later, those of the others are asked
whether they have published the batch already.
"""

from __future__ import annotations

import hashlib
import logging
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final

import pyarrow as pa
from isal.isal_zlib import crc32
from pyspark import TaskContext
from pyspark.sql.datasource import (
    DataSourceArrowWriter,
    DataSourceStreamArrowWriter,
    WriterCommitMessage,
)
from pyspark.sql.types import StructType

from sluice.errors import ConfigError, SluiceError
from sluice.spark.cluster import Cluster, Queue, cluster_for, stored_name
from sluice.spark.encode import Portion, check_columns, portions
from sluice.spark.options import WriteOptions
from sluice.spark.workers import settle

log_lines = logging.getLogger("sluice.spark")

EXACTLY_ONCE: Final = "exactlyOnce"
AT_LEAST_ONCE: Final = "atLeastOnce"
PATIENCE_MS: Final = 120_000
_SINK_CHARS_MAX: Final = 255  # as brokers take them, printable ASCII
_LANES: Final = 2  # portions to different queues that are under way at one time
_HELD_BYTES_MAX: Final = 32 << 20  # of small portions that wait for more of their kind
_BATCH_PROPERTY: Final = "streaming.sql.batchId"
_QUERY_PROPERTY: Final = "sql.streaming.queryId"


@dataclass
class Written(WriterCommitMessage):
    """What one task has staged, or that it has sent."""

    sink: str
    batch: int
    broker: str  # empty where nothing was staged
    topic: str
    handles: tuple[str, ...]


class _Lanes:
    """Work of several threads; what has one key is done in its order."""

    def __init__(self) -> None:
        self._threads = [ThreadPoolExecutor(1, "sluice-write") for _ in range(_LANES)]
        self._pending: deque[Future[str]] = deque()
        self._results: list[str] = []

    def submit(self, key: Queue, work: Callable[[], str]) -> None:
        """Do it soon; waits where too much is under way, and raises what went wrong before."""
        lane = self._threads[crc32(f"{key.broker}/{key.queue_id}".encode()) % _LANES]
        self._pending.append(lane.submit(work))
        while len(self._pending) > 2 * _LANES:
            self._results.append(self._pending.popleft().result())

    def finish(self) -> list[str]:
        """The results in the order in which the work was submitted."""
        while self._pending:
            self._results.append(self._pending.popleft().result())
        return self._results

    def close(self) -> None:
        for thread in self._threads:
            thread.shutdown(wait=True, cancel_futures=True)


class _Gathering:
    """Joins small portions of following record batches: few large requests are cheaper."""

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._held: dict[tuple[str, int], Portion] = {}
        self._held_bytes = 0

    def add(self, portion: Portion) -> list[Portion]:
        """What is to be sent now; what is for one queue stays in its order."""
        place = (portion.topic, portion.partition)
        if 2 * portion.byte_count <= self._bytes_max:
            portion = portion.apart()
        held = self._held.pop(place, None)
        ready: list[Portion] = []
        if held is not None:
            self._held_bytes -= held.byte_count
            if held.has_room(portion, self._bytes_max):
                portion = held.joined(portion)
            else:
                ready.append(held)
        if 2 * portion.byte_count > self._bytes_max:
            return [*ready, portion]
        self._held[place] = portion
        self._held_bytes += portion.byte_count
        return ready if self._held_bytes <= _HELD_BYTES_MAX else [*ready, *self.rest()]

    def rest(self) -> list[Portion]:
        """All that waits."""
        rest = list(self._held.values())
        self._held.clear()
        self._held_bytes = 0
        return rest


class _Task:
    """One try of one task."""

    def __init__(self, options: WriteOptions, sink: str, batch: int, number: int) -> None:
        self._options = options
        self._cluster = cluster_for(options.connection, PATIENCE_MS)
        self._sink = sink
        self._batch = batch
        self._turn = number  # so that tasks begin with different queues
        self._stages = options.delivery != AT_LEAST_ONCE
        self._broker = ""
        self._topic = ""
        self._queues: dict[str, list[Queue]] = {}

    def run(self, batches: Iterable[pa.RecordBatch]) -> Written:
        settle()
        lanes = _Lanes()
        gathering = _Gathering(self._options.batch_bytes)
        try:
            for batch in batches:
                for portion in self._portions(batch):
                    for ready in gathering.add(portion):
                        self._submit(lanes, ready)
            for ready in gathering.rest():
                self._submit(lanes, ready)
            handles = lanes.finish()
        finally:
            lanes.close()
        if not self._stages:
            handles = []
        return Written(
            self._sink,
            self._batch,
            self._broker if self._stages else "",
            self._topic,
            tuple(handles),
        )

    def _portions(self, batch: pa.RecordBatch) -> Iterator[Portion]:
        return portions(
            batch,
            self._options.topic,
            lambda topic: len(self._queues_of(topic)),
            self._options.batch_bytes,
            lambda topic: stored_name(topic).encode() if self._stages else None,
        )

    def _submit(self, lanes: _Lanes, portion: Portion) -> None:
        queue = self._queue(portion)
        lanes.submit(queue, self._work(queue, portion))

    def _queues_of(self, topic: str) -> list[Queue]:
        queues = self._queues.get(topic)
        if queues is None:
            queues = self._cluster.queues_to_send(topic)
            if self._stages:
                queues = self._at_home(topic, queues)
            self._queues[topic] = queues
        return queues

    def _at_home(self, topic: str, queues: list[Queue]) -> list[Queue]:
        """The queues of the broker that this sink writes to."""
        brokers = sorted({queue.broker for queue in queues})
        if not self._broker:
            broker = brokers[crc32(self._sink.encode()) % len(brokers)]
            if not self._cluster.can_stage(broker, topic, self._sink):
                if self._options.delivery == EXACTLY_ONCE:
                    raise ConfigError(
                        f"option delivery: broker {broker} cannot stage messages, so exactlyOnce "
                        "cannot be kept; delivery=atLeastOnce can"
                    )
                log_lines.warning("broker %s cannot stage messages: at least once", broker)
                self._stages = False
                return queues
            self._broker, self._topic = broker, topic
        if self._broker not in brokers:
            raise ConfigError(
                f"option delivery: topics of one sink must be on one broker for exactlyOnce, and "
                f"{topic} is not on {self._broker}; delivery=atLeastOnce needs no such thing"
            )
        return [queue for queue in queues if queue.broker == self._broker]

    def _queue(self, portion: Portion) -> Queue:
        queues = self._queues_of(portion.topic)
        if portion.partition >= 0:
            return queues[portion.partition]
        self._turn += 1
        return queues[self._turn % len(queues)]

    def _work(self, queue: Queue, portion: Portion) -> Callable[[], str]:
        cluster, sink, batch = self._cluster, self._sink, self._batch
        if self._stages:
            body, count = portion.with_sizes(), len(portion.sizes)
            return lambda: cluster.stage(queue, sink, batch, body, count)

        def send() -> str:
            cluster.send_batch(queue, portion.parts, time.time_ns() // 1_000_000)
            return ""

        return send


def _publish(cluster: Cluster, messages: list[WriterCommitMessage | None], *, once: bool) -> None:
    """Make everything visible that the tasks staged."""
    written = [message for message in messages if isinstance(message, Written)]
    staged = [message for message in written if message.broker]
    if not staged:
        return
    broker, topic = staged[0].broker, staged[0].topic
    if any(message.broker != broker for message in staged):
        names = ", ".join(sorted({message.broker for message in staged}))
        raise SluiceError(
            f"the tasks of batch {staged[0].batch} staged on several brokers ({names}): the routes "
            "changed meanwhile. Nothing was published; run the batch again"
        )
    handles = [handle for message in staged for handle in message.handles]
    sink, batch = staged[0].sink, staged[0].batch
    if not cluster.publish(broker, topic, sink, batch, handles, once=once) and not once:
        log_lines.warning(
            "batch %d of sink %s, or a later one, was published before, so nothing was published: "
            "the batch came again, or its txnVersion was used already",
            batch,
            sink,
        )


def sink_name(options: WriteOptions) -> str:
    """What a broker knows a sink by; empty where the options do not name it.

    With the topic: a program that writes one version to several topics writes to each of them.
    """
    if not options.sink_id or not options.topic:
        return options.sink_id
    name = f"{options.sink_id}/{options.topic}"
    if len(name) <= _SINK_CHARS_MAX and name.isascii() and name.isprintable():
        return name
    return f"{options.sink_id}/{hashlib.sha256(options.topic.encode()).hexdigest()[:32]}"


def checked(options: WriteOptions, schema: StructType, overwrite: bool) -> WriteOptions:
    """Refuse what cannot be written, before anything is."""
    if overwrite:
        raise ConfigError("a topic cannot be overwritten; use mode('append')")
    check_columns([(f.name, f.dataType.simpleString()) for f in schema.fields], options.topic)
    return options


class BatchWriter(DataSourceArrowWriter):
    """`df.write`: one batch."""

    def __init__(self, options: WriteOptions) -> None:
        if options.sink_id and options.version is None:
            raise ConfigError(
                "option txnAppId needs option txnVersion in a batch write: the number of the "
                "batch in foreachBatch, or one that grows with every write"
            )
        self._options = options
        # One object on the driver, and its copies on the executors: all have the same name.
        self._sink = sink_name(options) or f"spark-batch-{uuid.uuid4()}"
        self._batch = options.version or 0

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Written:
        number = _task_number()
        return _Task(self._options, self._sink, self._batch, number).run(iterator)

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        cluster = cluster_for(self._options.connection, PATIENCE_MS)
        _publish(cluster, messages, once=not self._options.sink_id)

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        """What was staged and not published is nothing."""


class StreamWriter(DataSourceStreamArrowWriter):
    """`df.writeStream`: a batch after the other, each with its number."""

    def __init__(self, options: WriteOptions) -> None:
        if options.version is not None:
            raise ConfigError("option txnVersion is for batch writes; a stream counts by itself")
        self._options = options

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Written:
        context = TaskContext.get()
        assert context is not None, "runs in a task"
        query = context.getLocalProperty(_QUERY_PROPERTY)
        batch = context.getLocalProperty(_BATCH_PROPERTY)
        if batch is None or (query is None and not self._options.sink_id):
            raise SluiceError(
                "Spark does not tell the number of the batch; name the sink with option txnAppId, "
                "or use delivery=atLeastOnce"
            )
        sink = sink_name(self._options) or f"spark-{query}"
        return _Task(self._options, sink, int(batch), _task_number()).run(iterator)

    def commit(
        self,
        messages: list[WriterCommitMessage | None],
        batchId: int,  # noqa: N803
    ) -> None:
        _publish(cluster_for(self._options.connection, PATIENCE_MS), messages, once=False)

    def abort(
        self,
        messages: list[WriterCommitMessage | None],
        batchId: int,  # noqa: N803
    ) -> None:
        """What was staged and not published is nothing; what was published stays."""


def _task_number() -> int:
    context = TaskContext.get()
    return int(context.partitionId()) if context is not None else 0
