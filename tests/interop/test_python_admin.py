"""The administrator's client: one suite, against Sluice and against Apache RocketMQ's broker."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from peers import Jars, RocketMQ
from sluice import (
    Admin,
    GroupConfig,
    Message,
    MessageQueue,
    Producer,
    PullConsumer,
    PushConsumer,
    ReceivedMessage,
)
from sluice.errors import BrokerRefused, GroupMissing, NotFound, TopicMissing
from tests.interop.sluice_process import SluiceProcess
from tests.interop.watching import wait_until

Server = SluiceProcess | RocketMQ


@pytest.fixture(scope="module", params=["sluice", pytest.param("apache", marks=pytest.mark.soak)])
def server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    directory = tmp_path_factory.mktemp(request.param)
    if request.param == "sluice":
        with SluiceProcess(directory, "--recall-messages") as process:
            yield process
        return
    jars: Jars = request.getfixturevalue("rocketmq_jars")
    config = {"mappedFileSizeCommitLog": 64 << 20, "recallMessageEnable": "true"}
    with RocketMQ(directory, config=config, jars=jars) as peer:
        yield peer


@pytest.fixture
def admin(server: Server) -> Iterator[Admin]:
    with Admin(server.nameserver_address) as admin:
        yield admin


def make(admin: Admin, topic: str, queues: int) -> None:
    """A topic that the nameserver knows when this returns."""
    admin.create_topic(topic, queues=queues)
    wait_until(lambda: topic in admin.topics(), lambda: str(admin.topics()))


def test_topics(server: Server, admin: Admin) -> None:
    make(admin, "AdminTopics", 3)
    (config,) = admin.topic_configs("AdminTopics").values()
    assert (config.read_queue_count, config.write_queue_count, config.perm) == (3, 3, 6)
    admin.update_topic("AdminTopics", write_queue_count=4, read_queue_count=4)
    (config,) = admin.topic_configs("AdminTopics").values()
    assert (config.read_queue_count, config.perm) == (4, 6)
    wait_until(
        lambda: admin.route("AdminTopics").queues[0].read_queue_count == 4,
        lambda: str(admin.route("AdminTopics")),
    )
    changed = admin.set_topic_permission("AdminTopics", 4)
    assert list(changed.before.values()) == [6]
    wait_until(
        lambda: admin.route("AdminTopics").queues[0].perm == 4,
        lambda: str(admin.route("AdminTopics")),
    )
    assert len(admin.topic_stats("AdminTopics").spans) == 4
    admin.delete_topic("AdminTopics")
    with pytest.raises(TopicMissing):
        admin.route("AdminTopics")


def test_groups_members_and_offsets(server: Server, admin: Admin) -> None:
    make(admin, "AdminOffsets", 2)
    admin.create_group(GroupConfig("admin-readers", retry_max=7))
    admin.update_group("admin-readers", retry_queue_count=2)
    (config,) = admin.group_configs("admin-readers").values()
    assert (config.retry_max, config.retry_queue_count) == (7, 2)
    with Producer(server.nameserver_address, group="admin-writers") as producer:
        for i in range(20):
            producer.send(Message("AdminOffsets", f"m{i}"))
        connected = admin.producer_connection("admin-writers", "AdminOffsets")
        assert [row.client_id for row in connected] == [producer.client_id]
    seen: set[bytes] = set()

    def handle(message: ReceivedMessage) -> None:
        seen.add(message.body)

    with PushConsumer(
        server.nameserver_address,
        group="admin-readers",
        topics="AdminOffsets",
        start_at="first",
        handler=handle,
        commit_ms=200,
    ) as consumer:
        wait_until(lambda: len(seen) == 20, lambda: f"{len(seen)} of 20")
        health = admin.group_health("admin-readers")
        assert [row.connection.client_id for row in health.members] == [consumer.client_id]
        assert (health.disagreements, health.problems) == ([], [])
        owners = admin.queue_owners("admin-readers")
        mine = {queue: owner for queue, owner in owners.items() if queue.topic == "AdminOffsets"}
        assert set(mine.values()) == {consumer.client_id}
        assert len(mine) == 2
        wait_until(
            lambda: admin.lag("admin-readers", "AdminOffsets") == 0,
            lambda: str(admin.consume_stats("admin-readers")),
        )
        # While it runs: it goes back, and everything comes once more.
        seen.clear()
        admin.reset_to_begin("admin-readers", "AdminOffsets")
        wait_until(lambda: len(seen) == 20, lambda: f"{len(seen)} of 20 once more")
    (broker,) = admin.brokers()
    queues = [MessageQueue("AdminOffsets", broker.name, number) for number in range(2)]
    offsets = admin.reset_to_end("admin-readers", "AdminOffsets")
    assert sorted(offsets) == queues
    assert sum(offsets.values()) == 20
    admin.create_group("admin-twin")
    assert admin.clone_offsets("admin-readers", "admin-twin", "AdminOffsets") == offsets
    admin.set_offset("admin-twin", queues[0], 1)
    assert admin.offsets("admin-twin", "AdminOffsets")[queues[0]] == 1
    past = time.time() - 3600
    assert set(admin.reset_to_time("admin-twin", "AdminOffsets", past).values()) == {0}
    deleted = admin.delete_group("admin-twin", offsets=True)
    assert list(deleted.brokers.values()) == [""]
    if isinstance(server, SluiceProcess):  # Apache's broker makes a group that it is asked for
        with pytest.raises(GroupMissing):
            admin.group_configs("admin-twin")


def test_messages(server: Server, admin: Admin) -> None:
    make(admin, "AdminMessages", 1)
    with Producer(server.nameserver_address, group="admin-writers") as producer:
        sent = [
            producer.send(Message("AdminMessages", f"m{i}", tags="AB"[i % 2], keys=f"key-{i}"))
            for i in range(6)
        ]
    queue = sent[0].queue

    def indexed() -> bool:
        return len(admin.messages_by_key("AdminMessages", "key-3")) == 1

    wait_until(indexed, lambda: "the index does not have key-3 yet")
    assert admin.messages_by_key("AdminMessages", "key-3")[0].body == b"m3"
    assert admin.message_by_id("AdminMessages", sent[2].offset_id).body == b"m2"
    assert admin.message_by_id("AdminMessages", sent[2].message_id).body == b"m2"
    unique = admin.messages_by_unique_key("AdminMessages", sent[4].message_id)
    assert [message.body for message in unique] == [b"m4"]
    assert admin.message_in(queue, 5).body == b"m5"
    with pytest.raises(NotFound):
        admin.message_in(queue, 6)
    bodies = [message.body for message in admin.messages("AdminMessages", tags="B")]
    assert bodies == [b"m1", b"m3", b"m5"]
    begin = time.time() - 3600
    assert len(list(admin.messages("AdminMessages", begin=begin))) == 6
    again = admin.send_again(unique[0])
    assert again.queue_offset == 6
    with PullConsumer(
        server.nameserver_address, group="admin-look", topics="AdminMessages", start_at="first"
    ) as consumer:
        found: list[bytes] = []

        def enough() -> bool:
            found.extend(message.body for message in consumer.poll(1.0))
            return len(found) == 7

        wait_until(enough, lambda: str(found))
    assert found[6] == b"m4"


def test_brokers(server: Server, admin: Admin) -> None:
    (broker,) = admin.brokers()
    (status,) = admin.broker_statuses()
    assert (status.name, status.error) == (broker.name, "")
    assert status.address == server.broker_address
    assert status.version
    config = admin.broker_config(server.broker_address)
    assert config["brokerName"] == broker.name
    admin.set_broker_config("autoCreateTopicEnable", "false")
    assert admin.broker_config(server.broker_address)["autoCreateTopicEnable"] == "false"
    admin.set_broker_config("autoCreateTopicEnable", "true")
    admin.set_value("admin-test", "colour", "blue")
    assert admin.value("admin-test", "colour") == "blue"
    admin.delete_value("admin-test", "colour")
    assert admin.value("admin-test", "colour") is None


def test_what_only_sluice_tells(server: Server, admin: Admin) -> None:
    """Apache's broker says that it does not know the request; nothing worse happens."""
    make(admin, "AdminLater", 1)
    with Producer(server.nameserver_address, group="admin-writers") as producer:
        sent = producer.send(Message("AdminLater", "later", delay_seconds=3600))
        other = producer.send(Message("AdminLater", "other", delay_seconds=3600))
    assert admin.recall(other.recall_handle) == other.message_id
    if isinstance(server, RocketMQ):
        with pytest.raises(BrokerRefused):
            admin.delayed()
        with pytest.raises(BrokerRefused):
            admin.open_transactions()
        return
    (waiting,) = admin.delayed("AdminLater").messages
    assert waiting.unique_key == sent.message_id
    assert admin.recall(waiting) == sent.message_id
    assert admin.delayed("AdminLater").messages == []
    assert admin.open_transactions() == []
