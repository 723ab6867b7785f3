"""Where a stream's batches begin and end, when the world has changed since Spark wrote it down."""

from __future__ import annotations

import logging

import pytest

pytest.importorskip("pyspark", reason="pyspark is not installed: script/setup does it")

from pyspark.sql.types import StructType

from sluice.spark import stream
from sluice.spark.cluster import Queue, Span
from sluice.spark.options import read_options
from sluice.spark.reading import DataLost
from sluice.spark.stream import StreamReader

OPTIONS = {"sluice.bootstrap.servers": "a:1", "subscribe": "t,u"}


class FakeCluster:
    """Topics that hold what a test says, by broker and queue."""

    def __init__(self, topics: dict[str, dict[tuple[str, int], Span]]) -> None:
        self.topics = topics

    def forget_routes(self) -> None:
        """They are as they are."""

    def spans(self, topic: str) -> dict[Queue, Span]:
        return {Queue(topic, *place): span for place, span in sorted(self.topics[topic].items())}


def reader(
    monkeypatch: pytest.MonkeyPatch, cluster: FakeCluster, **options: str
) -> tuple[StreamReader, FakeCluster]:
    monkeypatch.setattr(stream, "cluster_for", lambda *_: cluster)
    return StreamReader(read_options({**OPTIONS, **options}), StructType()), cluster


def test_a_first_batch_that_ends_before_its_start_is_data_that_is_lost(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The start at 'latest' is found anew after a crash, the end is the one that was logged."""
    cluster = FakeCluster({"t": {("a", 0): Span(0, 200)}, "u": {}})
    words = "topic t, queue 0 of broker a: a batch that ends at offset 100 would begin at 200"
    source, _ = reader(monkeypatch, cluster)
    start = source.initialOffset()
    assert start == {"t": {"0": 200}}
    with pytest.raises(DataLost, match=words):
        source.partitions(start, {"t": {"0": 100}})
    assert source.partitions(start, start) == []
    source, _ = reader(monkeypatch, cluster, failOnDataLoss="false")
    with caplog.at_level(logging.WARNING, "sluice.spark"):
        assert source.partitions(start, {"t": {"0": 100}}) == []
    assert words in caplog.text


def test_numbers_without_a_broker_mean_the_broker_that_their_topic_had(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    topics = {"t": {("a", 0): Span(0, 9)}, "u": {("b", 0): Span(0, 9)}}
    source, cluster = reader(monkeypatch, FakeCluster(topics), startingOffsets="earliest")
    start = source.initialOffset()
    assert start == {"t": {"0": 0}, "u": {"0": 0}}
    both = {("a", 0): Span(0, 9), ("b", 0): Span(0, 9)}
    cluster.topics = {"t": both, "u": both}
    selection = source._look()
    assert set(selection.parse(start)) == {Queue("t", "a", 0), Queue("u", "b", 0)}


def test_the_option_says_whose_numbers_without_a_broker_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    both = {("a", 0): Span(0, 9), ("b", 0): Span(0, 9)}
    topics = {"t": both, "u": {("b", 0): Span(0, 9)}}
    source, _ = reader(monkeypatch, FakeCluster(topics), brokerOfPlainOffsets="a")
    source._look()
    assert set(source._look().parse({"t": {"0": 5}})) == {Queue("t", "a", 0)}
