"""The harness itself: fetching is atomic and says why it failed, and Apache alone behaves with it.

Without this file a failing interop test could mean a broken harness as well as a broken store.
"""

import os
from pathlib import Path

import pytest

from peers import Artifact, ArtifactSet, Jars, PeerFailed, PeerUnavailable, RocketMQ, fetch
from peers.process import PeerProcess
from tests.interop.clients import JavaClients, SendPlan, kind

SMALL = ArtifactSet("small", (Artifact("group", "name", "1"),))

TOPICS = ("PeersOrders", "PeersPayments")
SEGMENT_BYTES = 4 * 1024 * 1024


def fake_tools(directory: Path, maven: str) -> str:
    """A PATH that holds a `java` that does nothing and a `mvn` with the given text."""
    directory.mkdir()
    for name, text in (("java", "exit 0"), ("mvn", maven)):
        tool = directory / name
        tool.write_text(f"#!/bin/sh\n{text}\n", encoding="utf-8")
        tool.chmod(0o755)
    return f"{directory}{os.pathsep}/usr/bin{os.pathsep}/bin"


def test_without_maven_the_peer_is_unavailable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(PeerUnavailable, match="mvn is not installed"):
        fetch(SMALL, cache=tmp_path)


def test_a_failed_download_says_why_and_leaves_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = fake_tools(tmp_path / "bin", "echo no route to the registry; exit 1")
    monkeypatch.setenv("PATH", path)
    cache = tmp_path / "cache"
    cache.mkdir()
    with pytest.raises(PeerUnavailable, match="no route to the registry"):
        fetch(SMALL, cache=cache)
    assert [name.name for name in cache.iterdir() if name.is_dir()] == []


def test_a_fetched_set_is_not_fetched_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = tmp_path / "calls"
    script = (
        f"echo called >> {calls}\n"
        'for option in "$@"; do case "$option" in\n'
        '  -DoutputDirectory=*) mkdir -p "${option#*=}"; touch "${option#*=}/a.jar";;\n'
        "esac; done"
    )
    monkeypatch.setenv("PATH", fake_tools(tmp_path / "bin", script))
    cache = tmp_path / "cache"
    cache.mkdir()
    first = fetch(SMALL, cache=cache)
    second = fetch(SMALL, cache=cache)
    assert first == second
    assert [jar.name for jar in first.directory.iterdir()] == ["a.jar"]
    assert calls.read_text(encoding="utf-8") == "called\n"


def test_a_program_that_ends_early_shows_its_log(tmp_path: Path) -> None:
    command = ["/bin/sh", "-c", "echo cannot bind; exit 3"]
    process = PeerProcess("the program", command, log=tmp_path / "log")
    with pytest.raises(PeerFailed, match=r"ended with code 3:\ncannot bind"):
        process.wait_ready("ready", timeout_s=30)


def test_apache_delivers_what_apache_stored(
    rocketmq_jars: Jars, java_clients: JavaClients, tmp_path: Path
) -> None:
    with RocketMQ(tmp_path / "apache", jars=rocketmq_jars) as apache:
        nameserver = apache.nameserver_address
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
        pushed = java_clients.receive_push(nameserver, TOPICS, count=200, group="peers-push")
        progress = java_clients.progress(nameserver, "peers-push")
        shown = apache.mqadmin("consumerProgress", "-g", "peers-push").stdout
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
    assert "PeersPayments" in shown


def test_apache_keeps_what_it_acknowledged_when_it_is_killed(
    rocketmq_jars: Jars, java_clients: JavaClients, tmp_path: Path
) -> None:
    config = {"mappedFileSizeCommitLog": SEGMENT_BYTES, "flushDiskType": "SYNC_FLUSH"}
    with RocketMQ(tmp_path / "apache", config=config, jars=rocketmq_jars) as apache:
        nameserver = apache.nameserver_address
        plan = SendPlan("k", TOPICS, count=1_000_000, body_bytes=2_000, threads=4)
        with java_clients.sending(nameserver, plan) as producer:
            producer.wait_for("sent", 2_000, timeout_s=120)
            apache.kill()
            events = producer.finish(timeout_s=120)
        acknowledged = {
            row["id"]: row["bodySha256"]
            for row in kind(events, "sent")
            if row["status"] == "SEND_OK"
        }
        assert kind(events, "failed")
        assert (apache.store_directory / "abort").exists()
        apache.start()
        received = java_clients.receive_all(nameserver, TOPICS)
        assert len(list((apache.store_directory / "commitlog").iterdir())) > 1
    seen = {row["properties"]["id"]: row["bodySha256"] for row in received}
    assert {identity: seen.get(identity) for identity in acknowledged} == acknowledged
