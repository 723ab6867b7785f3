"""This module says what Apache's Java client must get from a broker: from Apache's and from ours.

The same checks run against both (test_peers.py, test_broker.py), so that the one is the measure of
the other, and a failure with Apache's broker means that the checks are wrong.
"""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from tests.interop.clients import (
    STOP_TIMEOUT_S,
    JavaClients,
    SendPlan,
    kind,
    progress,
    received,
)

TOPICS = ("OutcomeOrders", "OutcomePayments")
GROUP = "outcome-push"
SEGMENT_BYTES = 4 * 1024 * 1024
_WAIT_S = 240.0


class Place(Protocol):
    """A broker that can be killed and started again where it was."""

    @property
    def nameserver_address(self) -> str: ...

    @property
    def store_directory(self) -> Path: ...

    def kill(self) -> None: ...

    def start(self) -> None: ...


def check_delivery(clients: JavaClients, nameserver: str) -> None:
    """What is sent is read, pushed, found and counted; `GROUP` has read all of it afterwards."""
    sent = clients.send(nameserver, SendPlan("p", TOPICS, count=200, queues=4))
    places = {row["id"]: (row["topic"], row["queueId"], row["queueOffset"]) for row in sent}
    with clients.receiving(nameserver, TOPICS, "all:outcome-all", f"push:{GROUP}") as program:
        program.wait_for("received", 2 * len(sent), timeout_s=_WAIT_S)
        rows = received(program.stop(STOP_TIMEOUT_S))
    for reader in (0, 1):
        assert {
            row["id"]: (row["topic"], row["queueId"], row["queueOffset"])
            for row in rows
            if row["reader"] == reader
        } == places
    first = sent[0]
    found = clients.query(
        nameserver,
        first["topic"],
        keys=[first["id"], "no-such-key"],
        unique_keys=[first["msgId"]],
        message_ids=[first["offsetMsgId"]],
        group=GROUP,
    )
    assert [row["by"] for row in kind(found, "found")] == ["key", "unique", "id"]
    assert {row["properties"]["id"] for row in kind(found, "found")} == {first["id"]}
    assert [row["asked"] for row in kind(found, "missing")] == ["no-such-key"]
    offsets = progress(found)
    assert {queue: end for queue, (_, end) in offsets.items() if queue[0] in TOPICS} == {
        (topic, queue): 25 for topic in TOPICS for queue in range(4)
    }
    assert all(committed == end for committed, end in offsets.values())


def check_kept_when_killed(clients: JavaClients, place: Place) -> None:
    """A broker that is killed under load has everything that it acknowledged when it is back.

    Its log files must be so small that the load fills more than one.
    """
    plan = SendPlan("k", TOPICS, count=1_000_000, body_bytes=2_000, threads=4)
    with clients.sending(place.nameserver_address, plan) as producer:
        producer.wait_for("sent", 2_000, timeout_s=_WAIT_S)
        place.kill()
        events = producer.finish(timeout_s=_WAIT_S)
    acknowledged = {
        row["id"]: row["bodySha256"] for row in kind(events, "sent") if row["status"] == "SEND_OK"
    }
    assert len(acknowledged) >= 2_000
    assert kind(events, "failed")
    assert (place.store_directory / "abort").exists()
    place.start()
    rows = clients.receive_all(place.nameserver_address, TOPICS)
    assert len(list((place.store_directory / "commitlog").iterdir())) > 1
    seen = {row["properties"]["id"]: row["bodySha256"] for row in rows}
    assert {identity: seen.get(identity) for identity in acknowledged} == acknowledged
