"""Routes that a fresh process looks up while brokers are away, start, or do not have the topic."""

from __future__ import annotations

from typing import Any

import pytest

from sluice.client import blocking
from sluice.client.blocking import LinkPool
from sluice.errors import ConfigError, LinkLost, NoNameserver, TopicMissing
from sluice.protocol.remoting import RemotingCommand
from sluice.protocol.remoting_bodies import (
    BrokerData,
    QueueData,
    Route,
    write_cluster_info,
    write_route,
)
from sluice.protocol.remoting_codes import RequestCode as Request
from sluice.protocol.remoting_codes import ResponseCode as Response
from sluice.spark import cluster as cluster_module
from sluice.spark.cluster import Cluster, Queue
from sluice.spark.options import Connection

BROKER = BrokerData("c", "b", {0: "127.0.0.1:1"})
AUTO_CREATE_TOPIC = "TBW102"


class Nameserver:
    """Answers for a broker that registers when it was asked for so many waits."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, topics: set[str], starts_after: float
    ) -> None:
        self._topics = topics
        self.queue_counts: dict[str, int] = {}  # where they are not two
        self._starts_after = starts_after
        self.refuses = False
        self.wait_count = 0
        self._now = 0.0
        monkeypatch.setattr(LinkPool, "request", self._request)
        monkeypatch.setattr(cluster_module, "time", self)

    def monotonic(self) -> float:
        return self._now

    def sleep(self, seconds: float) -> None:
        self.wait_count += 1
        self._now += seconds

    def _request(self, address: str, code: int, ext: dict[str, str], **_: Any) -> RemotingCommand:
        if self.refuses:
            raise LinkLost("ns:1: cannot connect")
        is_there = self.wait_count >= self._starts_after
        if code == Request.GET_BROKER_CLUSTER_INFO:
            body = write_cluster_info([BROKER] if is_there else [])
        elif is_there and ext["topic"] in self._topics:
            count = self.queue_counts.get(ext["topic"], 2)
            body = write_route(Route((BROKER,), (QueueData("b", count, count, 6),)), quoted=True)
        else:
            return RemotingCommand(Response.TOPIC_NOT_EXIST, 1)
        return RemotingCommand(Response.SUCCESS, 1, body=body)


def fresh() -> Cluster:
    return Cluster(Connection(("ns:1",)))


@pytest.mark.parametrize("topics", [{"t", AUTO_CREATE_TOPIC}, {AUTO_CREATE_TOPIC}])
def test_a_writer_waits_for_a_broker_that_registers_again(
    topics: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    nameserver = Nameserver(monkeypatch, topics, starts_after=20)
    assert fresh().queues_to_send("t") == [Queue("t", "b", 0), Queue("t", "b", 1)]
    assert nameserver.wait_count == 20


def test_a_broker_that_never_comes_is_waited_for_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    nameserver = Nameserver(monkeypatch, set(), starts_after=float("inf"))
    with pytest.raises(LinkLost, match="ns:1: waited for a broker with topic t; none has"):
        fresh().queues_to_send("t")
    assert 100 < nameserver.monotonic() <= 120


def test_an_address_that_is_wrong_is_not_waited_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    nameserver = Nameserver(monkeypatch, {"t"}, starts_after=0)
    cluster = fresh()
    nameserver.refuses = True
    with pytest.raises(
        NoNameserver, match=r"option sluice\.bootstrap\.servers: no nameserver answ"
    ):
        cluster.greet()
    assert 20 < nameserver.monotonic() <= 30
    nameserver.refuses = False
    cluster.greet()
    nameserver.refuses = True
    cluster.greet()  # once is enough: from then on it is only away
    begin = nameserver.monotonic()
    with pytest.raises(NoNameserver):
        cluster.queues("t")
    assert 100 < nameserver.monotonic() - begin <= 120


def test_a_brokers_address_is_no_nameservers(monkeypatch: pytest.MonkeyPatch) -> None:
    answer = RemotingCommand(Response.REQUEST_CODE_NOT_SUPPORTED, 1)
    monkeypatch.setattr(LinkPool, "request", lambda *_, **__: answer)
    words = r"option sluice\.bootstrap\.servers: a broker answers there; it names nameservers"
    with pytest.raises(ConfigError, match=words):
        fresh().greet()


def test_a_topic_that_brokers_do_not_have_is_an_error_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    nameserver = Nameserver(monkeypatch, set(), starts_after=0)
    with pytest.raises(TopicMissing, match="topic t is not known"):
        fresh().queues("t")
    with pytest.raises(TopicMissing, match="topic t is not known"):
        fresh().queues_to_send("t")
    assert nameserver.wait_count == 0


def test_a_topic_that_was_made_by_sending_is_looked_up_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A worker that writes again must not take the queues of its pattern for those of the topic."""
    topics = {AUTO_CREATE_TOPIC}
    Nameserver(monkeypatch, topics, starts_after=0).queue_counts = {AUTO_CREATE_TOPIC: 8, "t": 3}
    cluster = fresh()
    assert [queue.queue_id for queue in cluster.queues_to_send("t")] == [0, 1, 2, 3]
    assert [queue.queue_id for queue in cluster.queues_to_send("t")] == [0, 1, 2, 3], "not yet made"
    topics.add("t")
    assert [queue.queue_id for queue in cluster.queues_to_send("t")] == [0, 1, 2]


def test_the_brokers_that_a_nameserver_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    Nameserver(monkeypatch, set(), starts_after=0)
    assert fresh().broker_names() == {"b"}
    Nameserver(monkeypatch, set(), starts_after=1)
    assert fresh().broker_names() == set()


def test_requests_are_signed_where_the_options_have_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """Brokers with access control answer nobody else."""
    asked: list[dict[str, str]] = []

    class Link:
        address = "ns:1"

        def __init__(self, *_: object) -> None:
            """Nobody is connected to."""

        def request(self, code: int, ext: dict[str, str], *_: object) -> RemotingCommand:
            asked.append(dict(ext))
            return RemotingCommand(Response.SUCCESS, 1, body=b'{"topicList": []}')

    monkeypatch.setattr(blocking, "BlockingLink", Link)
    assert Cluster(Connection(("ns:1",), access_key="ann", secret_key="shh")).topics() == []
    assert Cluster(Connection(("ns:1",))).topics() == []
    signed, plain = asked
    assert (signed["AccessKey"], plain) == ("ann", {})
    assert signed["Signature"]
    assert "shh" not in str(signed)
