"""Which queues a query reads, and where it begins in them."""

from __future__ import annotations

from typing import cast

import pytest

from sluice.errors import ConfigError
from sluice.spark.cluster import Cluster, Queue, Span
from sluice.spark.options import Bound, read_options
from sluice.spark.selection import Selection


class FakeCluster:
    """Topics of one queue each, with five messages of the times 100, 200 ... 500."""

    def __init__(self, *topics: str) -> None:
        self._topics = topics

    def topics(self) -> list[str]:
        return list(self._topics)

    def spans(self, topic: str) -> dict[Queue, Span]:
        return {Queue(topic, "a", 0): Span(0, 5)}

    def offset_at(self, queue: Queue, when_ms: int) -> tuple[int, bool]:
        return min(5, -(-when_ms // 100) - 1), True


def selection(cluster: FakeCluster, **options: str) -> Selection:
    given = {"sluice.bootstrap.servers": "a:1", **options}
    return Selection(cast(Cluster, cluster), read_options(given)).look()


@pytest.mark.parametrize(
    ("pattern", "topics"),
    [
        ("gift", ["gifts", "old-gifts"]),
        ("^gift", ["gifts"]),
        ("gift$", []),
        ("gifts|orders", ["gifts", "old-gifts", "orders"]),
    ],
)
def test_a_pattern_is_looked_for_in_names_as_kafkas_source_does(
    pattern: str, topics: list[str]
) -> None:
    found = selection(FakeCluster("gifts", "old-gifts", "orders"), subscribePattern=pattern)
    assert sorted({queue.topic for queue in found.spans}) == topics


@pytest.mark.parametrize(
    ("name", "bound"),
    [
        ("startingTimestamp", Bound(timestamp_ms=501)),
        ("startingOffsetsByTimestamp", Bound(timestamps_ms={"t": {"0": 501}})),
    ],
)
def test_a_time_after_all_messages_is_an_error_of_the_option_that_says_it(
    name: str, bound: Bound
) -> None:
    found = selection(FakeCluster("t"), subscribe="t")
    with pytest.raises(ConfigError, match=f"option {name}: topic t, queue 0 of broker a has no"):
        found.at(bound, "starting")
    assert found.at(bound, "ending") == {Queue("t", "a", 0): 5}
    latest = selection(FakeCluster("t"), subscribe="t", startingOffsetsByTimestampStrategy="latest")
    assert latest.at(bound, "starting") == {Queue("t", "a", 0): 5}
