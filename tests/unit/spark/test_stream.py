"""Where a stream's batches begin and end, when the world has changed since Spark wrote it down."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("pyspark", reason="pyspark is not installed: script/setup does it")

from pyspark.sql.streaming.datasource import ReadAllAvailable
from pyspark.sql.types import StructType

from sluice.errors import ConfigError
from sluice.spark import stream
from sluice.spark.batch import QueueRange
from sluice.spark.cluster import Queue, Span
from sluice.spark.options import read_options
from sluice.spark.reading import DataLost
from sluice.spark.stream import StreamReader

OPTIONS = {"sluice.bootstrap.servers": "a:1", "subscribe": "t,u"}


class FakeCluster:
    """Topics that hold what a test says, by broker and queue."""

    def __init__(self, topics: dict[str, dict[tuple[str, int], Span]]) -> None:
        self.topics = topics
        self.brokers = {"a", "b"}

    def broker_names(self) -> set[str]:
        return self.brokers

    def greet(self) -> None:
        """They are there."""

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


def test_the_first_batch_waits_for_nothing_and_the_next_ones_for_enough(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As with Spark's Kafka source: what a query finds when it is started is handled at once."""
    cluster = FakeCluster({"t": {("a", 0): Span(0, 5)}, "u": {}})
    limits = {"startingOffsets": "earliest", "minOffsetsPerTrigger": "10"}
    source, _ = reader(monkeypatch, cluster, **limits)
    start, limit = source.initialOffset(), source.getDefaultReadLimit()
    first = source.latestOffset(start, limit)
    assert first == {"t": {"0": 5}}
    cluster.topics["t"] = {("a", 0): Span(0, 9), ("a", 1): Span(0, 2)}
    assert source.latestOffset(first, limit) == first, "six are not ten"
    cluster.topics["t"] = {("a", 0): Span(0, 13), ("a", 1): Span(0, 2)}
    assert source.latestOffset(first, limit) == {"t": {"0": 13, "1": 2}}


def test_a_queue_that_came_later_begins_at_its_first_message_of_all(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What retention took of it before it was read is lost, also when a batch is replayed."""
    cluster = FakeCluster({"t": {("a", 0): Span(0, 5), ("a", 1): Span(3, 9)}, "u": {}})
    source, _ = reader(monkeypatch, cluster, startingOffsets="earliest")
    assert source.initialOffset() == {"t": {"0": 0, "1": 3}}, "the first start is what there is"
    start, end = {"t": {"0": 5}}, {"t": {"0": 5, "1": 9}}
    with pytest.raises(
        DataLost, match="1 of broker a: offset 0 is gone; the next good offset is 3"
    ):
        source.partitions(start, end)
    source, _ = reader(monkeypatch, cluster, failOnDataLoss="false")
    with caplog.at_level(logging.WARNING, "sluice.spark"):
        (task,) = source.partitions(start, end)
    assert isinstance(task, QueueRange)
    assert (task.queue_id, task.start, task.stop) == (1, 3, 9)
    assert "offset 0 is gone" in caplog.text


def test_a_topic_that_was_made_again_tells_where_it_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cluster = FakeCluster({"t": {("a", 0): Span(0, 5)}, "u": {}})
    source, _ = reader(monkeypatch, cluster)
    with pytest.raises(DataLost, match=r"ends at offset 5, and 9 is next.*good offset is 5"):
        source.latestOffset({"t": {"0": 9}}, ReadAllAvailable())


def test_a_query_that_ends_by_itself_misses_what_is_gone_before_it_came_to_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    cluster = FakeCluster({"t": {("a", 0): Span(0, 15), ("a", 1): Span(0, 4)}, "u": {}})
    limits = {"startingOffsets": "earliest", "maxOffsetsPerTrigger": "5"}
    source, _ = reader(monkeypatch, cluster, **limits)
    source.prepareForTriggerAvailableNow()
    first = source.latestOffset(source.initialOffset(), source.getDefaultReadLimit())
    cluster.topics["t"] = {("a", 0): Span(0, 10), ("a", 1): Span(0, 4)}
    with pytest.raises(DataLost, match="queue 0 of broker a ends at offset 10, and up to 15"):
        source.latestOffset(first, source.getDefaultReadLimit())
    cluster.topics["t"] = {("a", 0): Span(0, 15)}
    with pytest.raises(DataLost, match="queue 1 of broker a"):
        source.latestOffset({"t": {"0": 5}}, source.getDefaultReadLimit())
    source, _ = reader(monkeypatch, cluster, **limits, failOnDataLoss="false")
    source.prepareForTriggerAvailableNow()
    cluster.topics["t"] = {("a", 0): Span(0, 10)}
    with caplog.at_level(logging.WARNING, "sluice.spark"):
        assert source.latestOffset({"t": {"0": 8}}, ReadAllAvailable()) == {"t": {"0": 10}}
    assert "up to 15" in caplog.text


def test_a_query_that_ends_by_itself_leaves_queues_that_came_later_to_the_next_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cluster = FakeCluster({"t": {("a", 0): Span(0, 5)}, "u": {}})
    source, _ = reader(monkeypatch, cluster, startingOffsets="earliest")
    source.prepareForTriggerAvailableNow()
    start = source.initialOffset()
    cluster.topics["t"] = {("a", 0): Span(0, 7), ("a", 1): Span(0, 2)}
    assert source.latestOffset(start, ReadAllAvailable()) == {"t": {"0": 5}}


def test_a_cluster_that_shows_nothing_does_not_make_a_query_forget_where_it_was(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Or all would be read again from the first message on, when the topics are back."""
    cluster = FakeCluster({"t": {("a", 0): Span(0, 5)}, "u": {}})
    source, _ = reader(monkeypatch, cluster, failOnDataLoss="false")
    cluster.topics["t"] = {}
    with caplog.at_level(logging.WARNING, "sluice.spark"):
        assert source.latestOffset({"t": {"0": 4}}, ReadAllAvailable()) == {"t": {"0": 4}}
    assert "is not there any more" in caplog.text
    cluster.topics["t"] = {("a", 0): Span(0, 5)}
    assert source.latestOffset({"t": {"0": 4}}, ReadAllAvailable()) == {"t": {"0": 5}}


def test_an_assigned_queue_that_vanishes_is_data_that_is_lost(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    cluster = FakeCluster({"t": {("a", 0): Span(0, 5)}})
    given = {"assign": '{"t": [0, 1]}', "sluice.bootstrap.servers": "a:1"}
    monkeypatch.setattr(stream, "cluster_for", lambda *_: cluster)
    source = StreamReader(read_options(given), StructType())
    with pytest.raises(ConfigError, match="option assign: t has no queue 1"):
        source.initialOffset()
    start = {"t": {"0": 5, "1": 3}}
    with pytest.raises(DataLost, match="queue 1 of broker a is not there any more"):
        source.latestOffset(start, ReadAllAvailable())
    source = StreamReader(read_options({**given, "failOnDataLoss": "false"}), StructType())
    with caplog.at_level(logging.WARNING, "sluice.spark"):
        assert source.latestOffset(start, ReadAllAvailable()) == {"t": {"0": 5}}
    assert "queue 1 of broker a" in caplog.text


@pytest.mark.parametrize(
    "wrong", [{"logOffset": 3}, {"t": [1]}, {"t": {"0": "5"}}, {"t": {"zero": 5}}]
)
def test_a_checkpoint_of_another_source_is_named(
    monkeypatch: pytest.MonkeyPatch, wrong: dict[str, Any]
) -> None:
    cluster = FakeCluster({"t": {("a", 0): Span(0, 5)}, "u": {}})
    source, _ = reader(monkeypatch, cluster)
    with pytest.raises(ConfigError, match="the checkpoint: "):
        source.latestOffset(wrong, ReadAllAvailable())


class Clock:
    """Time that passes only where somebody waits; what happens meanwhile is the test's."""

    def __init__(self, meanwhile: Callable[[], None] = lambda: None) -> None:
        self.now = 1000.0
        self._meanwhile = meanwhile

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        if self.now > 1030:
            self._meanwhile()


def two_brokers() -> FakeCluster:
    both = {("a", 0): Span(0, 9), ("b", 0): Span(0, 9)}
    return FakeCluster({"t": both, "u": {("b", 0): Span(0, 4)}})


def test_a_broker_that_is_away_is_waited_for_also_by_the_driver(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """While it restarts the routes do not name its queues; nothing of them is gone."""
    cluster = two_brokers()
    source, _ = reader(monkeypatch, cluster, startingOffsets="earliest")
    start = source.initialOffset()
    assert start == {"t": {"a/0": 0, "b/0": 0}, "u": {"0": 0}}
    whole = dict(cluster.topics)

    def goes() -> None:
        cluster.topics = {"t": {("a", 0): Span(0, 9)}, "u": {}}
        cluster.brokers = {"a"}

    def comes() -> None:
        cluster.topics, cluster.brokers = whole, {"a", "b"}

    monkeypatch.setattr(stream, "time", Clock(comes))
    goes()
    end = source.latestOffset(start, ReadAllAvailable())
    assert end == {"t": {"a/0": 9, "b/0": 9}, "u": {"0": 4}}
    monkeypatch.setattr(stream, "time", Clock(comes))
    goes()
    tasks = source.partitions(start, end)
    assert [each.partition for each in tasks if isinstance(each, QueueRange)] == [0, 1, 0]


def test_a_broker_that_stays_away_is_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for may_lose in ("true", "false"):
        cluster = two_brokers()
        source, _ = reader(monkeypatch, cluster, failOnDataLoss=may_lose)
        start = source.initialOffset()
        cluster.topics, cluster.brokers = {"t": {("a", 0): Span(0, 9)}, "u": {}}, {"a"}
        clock = Clock()
        monkeypatch.setattr(stream, "time", clock)
        words = "topic t, queue 0 of broker b is not there any more: no nameserver knows broker b"
        if may_lose == "true":
            with pytest.raises(DataLost, match=words):
                source.latestOffset(start, ReadAllAvailable())
        else:
            with caplog.at_level(logging.WARNING, "sluice.spark"):
                assert source.latestOffset(start, ReadAllAvailable()) == {"t": {"0": 9}}
            assert words in caplog.text
        assert 1110 < clock.now <= 1120, "as long as kafkaConsumer.pollTimeoutMs says"
