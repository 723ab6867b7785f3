"""One task's read, when what it was to read is gone."""

from __future__ import annotations

import logging
from typing import cast

import numpy as np
import pyarrow as pa
import pytest

from sluice.errors import BrokerRefused
from sluice.protocol.remoting_codes import ResponseCode as Response
from sluice.spark.cluster import Chunk, Cluster, Gone, Queue
from sluice.spark.options import Filters, read_options
from sluice.spark.reading import DataLost, batches

QUEUE = Queue("t", "a", 0)


class FakeCluster:
    """A queue without messages up to an offset, and a fault from there on."""

    def __init__(self, good_to: int, fault: Exception) -> None:
        self._good_to = good_to
        self._fault = fault
        self.asked: list[int] = []

    def fetch(self, queue: Queue, offset: int, *_: object, **__: object) -> Chunk:
        self.asked.append(offset)
        if offset >= self._good_to:
            raise self._fault
        return Chunk(b"", np.zeros(0, np.int64), self._good_to)


def read(cluster: FakeCluster, **options: str) -> int:
    given = {"sluice.bootstrap.servers": "a:1", "subscribe": "t", "prefetch": "0", **options}
    found = batches(
        cast(Cluster, cluster),
        read_options(given),
        pa.schema([("value", pa.binary())]),
        QUEUE,
        0,
        0,
        9,
        Filters(),
    )
    return sum(batch.num_rows for batch in found)


def test_a_topic_that_is_deleted_while_a_task_reads_it_is_data_that_is_lost(
    caplog: pytest.LogCaptureFixture,
) -> None:
    missing = BrokerRefused(Response.TOPIC_NOT_EXIST, "topic[t] not exist", "reading")
    words = "topic t, queue 0 of broker a: the topic was deleted, and offset 5 was next"
    with pytest.raises(DataLost, match=words):
        read(FakeCluster(5, missing))
    cluster = FakeCluster(5, missing)
    with caplog.at_level(logging.WARNING, "sluice.spark"):
        assert read(cluster, failOnDataLoss="false") == 0
    assert words in caplog.text
    assert cluster.asked == [0, 5], "there is nothing to go on with"


def test_what_a_broker_refuses_otherwise_fails_the_task() -> None:
    refused = BrokerRefused(Response.NO_PERMISSION, "no", "reading")
    with pytest.raises(BrokerRefused):
        read(FakeCluster(0, refused), failOnDataLoss="false")
    with pytest.raises(DataLost, match="nothing there"):
        read(FakeCluster(0, Gone("nothing there", 0)))
