"""Apache's Java client 5.5.0 against Sluice: send, read, push, query, and a broker killed under it.

The same programs as in test_peers.py, where they run against Apache's own broker: the outcome has
to be the same.
"""

from __future__ import annotations

from pathlib import Path

from tests.interop.clients import JavaClients, SendPlan, kind
from tests.interop.sluice_process import SluiceProcess

TOPICS = ("DoorOrders", "DoorPayments")
SEGMENT_BYTES = 4 * 1024 * 1024


def test_java_clients_get_from_sluice_what_they_get_from_apache(
    java_clients: JavaClients, tmp_path: Path
) -> None:
    with SluiceProcess(tmp_path / "sluice") as sluice:
        nameserver = sluice.nameserver_address
        sent = java_clients.send(nameserver, SendPlan("p", TOPICS, count=200, queues=4))
        received = java_clients.receive_all(nameserver, TOPICS)
        first = sent[0]
        found = java_clients.query(
            nameserver,
            first["topic"],
            keys=[first["id"], "no-such-key"],
            unique_keys=[first["msgId"]],
            message_ids=[first["offsetMsgId"]],
        )
        pushed = java_clients.receive_push(nameserver, TOPICS, count=200, group="door-push")
        progress = java_clients.progress(nameserver, "door-push")
    places = {row["id"]: (row["topic"], row["queueId"], row["queueOffset"]) for row in sent}
    for rows in (received, pushed):
        assert {
            row["properties"]["id"]: (row["topic"], row["queueId"], row["queueOffset"])
            for row in rows
        } == places
    assert [row["by"] for row in kind(found, "found")] == ["key", "unique", "id"]
    assert {row["properties"]["id"] for row in kind(found, "found")} == {first["id"]}
    assert [row["asked"] for row in kind(found, "missing")] == ["no-such-key"]
    assert {queue: end for queue, (_, end) in progress.items() if queue[0] in TOPICS} == {
        (topic, queue): 25 for topic in TOPICS for queue in range(4)
    }
    assert all(committed == end for committed, end in progress.values())


def test_sluice_keeps_what_it_acknowledged_when_it_is_killed(
    java_clients: JavaClients, tmp_path: Path
) -> None:
    flags = ("--segment-bytes", str(SEGMENT_BYTES))
    with SluiceProcess(tmp_path / "sluice", *flags) as sluice:
        nameserver = sluice.nameserver_address
        plan = SendPlan("k", TOPICS, count=1_000_000, body_bytes=2_000, threads=4)
        with java_clients.sending(nameserver, plan) as producer:
            producer.wait_for("sent", 2_000, timeout_s=120)
            sluice.kill()
            events = producer.finish(timeout_s=120)
        acknowledged = {
            row["id"]: row["bodySha256"]
            for row in kind(events, "sent")
            if row["status"] == "SEND_OK"
        }
        assert len(acknowledged) >= 2_000
        sluice.start()
        received = java_clients.receive_all(nameserver, TOPICS)
        assert len(list((sluice.store_directory / "commitlog").iterdir())) > 1
    seen = {row["properties"]["id"]: row["bodySha256"] for row in received}
    assert {identity: seen.get(identity) for identity in acknowledged} == acknowledged


def test_a_push_consumer_gets_only_the_tags_it_asked_for(
    java_clients: JavaClients, tmp_path: Path
) -> None:
    with SluiceProcess(tmp_path / "sluice") as sluice:
        nameserver = sluice.nameserver_address
        sent = java_clients.send(nameserver, SendPlan("t", TOPICS[:1], count=90, queues=2))
        everything = java_clients.receive_all(nameserver, TOPICS[:1])
        tags = {row["properties"]["id"]: row["properties"].get("TAGS") for row in everything}
        tag = next(value for value in tags.values() if value is not None)
        wanted = {identity for identity, value in tags.items() if value == tag}
        pushed = java_clients.receive_push(
            nameserver, TOPICS[:1], count=len(wanted), group="door-tags", tags=tag
        )
    assert len(sent) == 90
    assert 0 < len(wanted) < 90
    assert {row["properties"]["id"] for row in pushed} == wanted
