"""This module is one task's read: chunks of a queue are fetched ahead and become record batches.

Runs on executors. A thread fetches while the chunk before is taken apart and handed to Spark; how
far it may be ahead is bounded. What is gone fails the task, or is passed over with a warning, as
the option failOnDataLoss says.
"""

from __future__ import annotations

import logging
import queue as queues
import threading
from collections.abc import Iterator
from typing import Final

import pyarrow as pa

from sluice.errors import BrokerRefused, SluiceError
from sluice.protocol.remoting_codes import ResponseCode as Response
from sluice.spark.cluster import Chunk, Cluster, Gone, Queue, name_of
from sluice.spark.decode import Decoder, Place
from sluice.spark.options import Filters, ReadOptions

log_lines = logging.getLogger("sluice.spark")

LOSS_HINT: Final = (
    "Set option failOnDataLoss to false to go on without what is gone; what was lost is then only "
    "logged."
)


class DataLost(SluiceError):
    """Messages that a query was to read are gone."""


def lost(text: str, options: ReadOptions) -> None:
    """Fail, or log and go on."""
    if options.fail_on_data_loss:
        raise DataLost(f"{text}. {LOSS_HINT}")
    log_lines.warning("%s; it is passed over (failOnDataLoss is false)", text)


def batches(
    cluster: Cluster,
    options: ReadOptions,
    schema: pa.Schema,
    queue: Queue,
    partition: int,
    start: int,
    stop: int,
    filters: Filters,
) -> Iterator[pa.RecordBatch]:
    """The messages of [start, stop) of a queue, some megabytes at a time."""
    place = Place(queue.topic, queue.broker, queue.queue_id, partition)
    decoder = Decoder(schema, place, filters.tags, filters.keys)
    for begin, chunk in _ahead(_chunks(cluster, options, queue, start, stop, filters), options):
        if len(chunk.sizes):
            for batch in decoder.batches(chunk.data, chunk.sizes, begin, stop, chunk.topic_id):
                if batch.num_rows:
                    yield batch


def _chunks(
    cluster: Cluster, options: ReadOptions, queue: Queue, start: int, stop: int, filters: Filters
) -> Iterator[tuple[int, Chunk]]:
    offset = start
    while offset < stop:
        try:
            chunk = cluster.fetch(
                queue, offset, stop, filters, options.fetch_bytes, bulk=options.bulk
            )
        except Gone as gone:
            lost(str(gone), options)
            if gone.next_offset <= offset:
                return  # nothing is there from here on
            offset = gone.next_offset
            continue
        except BrokerRefused as refused:
            if refused.code != Response.TOPIC_NOT_EXIST:
                raise
            lost(
                f"{name_of(queue)}: the topic was deleted, and offset {offset} was next, up to "
                f"{stop}",
                options,
            )
            return
        if chunk.next_offset <= offset:
            raise SluiceError(f"{name_of(queue)}: no way to get on from offset {offset}")
        yield offset, chunk
        offset = chunk.next_offset


def _ahead(
    chunks: Iterator[tuple[int, Chunk]], options: ReadOptions
) -> Iterator[tuple[int, Chunk]]:
    """The same, fetched by a thread that is a bounded number of chunks ahead."""
    if not options.prefetch:
        yield from chunks
        return
    ready: queues.Queue[tuple[int, Chunk] | BaseException | None] = queues.Queue(options.prefetch)
    is_over = threading.Event()

    def put(item: tuple[int, Chunk] | BaseException | None) -> bool:
        while not is_over.is_set():
            try:
                ready.put(item, timeout=0.2)
            except queues.Full:
                continue
            return True
        return False

    def work() -> None:
        try:
            for each in chunks:
                if not put(each):
                    return
            put(None)
        except BaseException as error:
            put(error)

    thread = threading.Thread(target=work, name="sluice-fetch", daemon=True)
    thread.start()
    try:
        while True:
            item = ready.get()
            if item is None:
                return
            if isinstance(item, BaseException):
                raise item
            yield item
    finally:
        is_over.set()  # whoever stops reading early, a LIMIT for instance, stops the thread
