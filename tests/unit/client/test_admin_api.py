"""The administrator's client: what `sluice admin` does, as methods with typed results."""

from __future__ import annotations

import asyncio
import inspect
import re
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

import sluice
from sluice import Admin, GroupConfig, Message, MessageQueue, Producer, PullConsumer, TopicConfig
from sluice import aio as sluice_aio
from sluice.errors import (
    BrokerRefused,
    ClientClosed,
    ConfigError,
    GroupMissing,
    LinkLost,
    NoNameserver,
    NotFound,
    PartlyDone,
    TopicMissing,
)
from tests.unit.client.admin_kit import BROKER, CLUSTER, Site

WAIT_S = 120.0
DOCUMENTED = Path(__file__).parents[3] / "docs" / "client.md"


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    site = Site(transaction_timeout_ms=600_000, recall_messages=True)
    site.start()
    yield site
    site.stop()


@pytest.fixture
def admin(site: Site) -> Iterator[Admin]:
    with Admin(site.nameserver.address) as admin:
        yield admin


def send(site: Site, topic: str, *bodies: str, **options: Any) -> list[sluice.SendResult]:
    with Producer(site.nameserver.address) as producer:
        queue = producer.queues(topic)[0]
        return [producer.send(Message(topic, body, **options), queue=queue) for body in bodies]


def until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not holds():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)


# ----------------------------------------------------------------------------------------- the face


def methods(kind: type) -> dict[str, inspect.Signature]:
    return {
        name: inspect.signature(value)
        for name, value in inspect.getmembers(kind, inspect.isfunction)
        if not name.startswith("_")
    }


def test_the_blocking_face_says_the_same() -> None:
    """Every method is there for asyncio with the same words, and the page lists it."""
    ours, theirs = methods(Admin), methods(sluice_aio.Admin)
    page = DOCUMENTED.read_text()
    for name, signature in ours.items():
        assert list(signature.parameters.values()) == list(theirs[name].parameters.values()), name
        returned = str(theirs[name].return_annotation).replace("AsyncIterator", "Iterator")
        assert str(signature.return_annotation) == returned, name
        assert f"`{name}`" in page or name in ("start", "close"), f"docs/client.md lacks {name}"
    listed = re.findall(r"^\| [^|`]+ \| (`.*`) \|$", page, re.MULTILINE)
    named = {name for cell in listed for name in re.findall(r"`([a-z_]+)`", cell)}
    assert named - ours.keys() == set()


def test_nameservers_are_found_as_by_other_clients(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NAMESRV_ADDR", raising=False)
    with pytest.raises(NoNameserver, match="NAMESRV_ADDR"):
        Admin().start()
    address = site.nameserver.address
    with Admin(properties={"rocketmq.namesrv.addr": address}) as admin:
        assert admin.nameservers == [address]
    monkeypatch.setenv("NAMESRV_ADDR", address)
    with Admin() as admin:
        assert admin.clusters() == [CLUSTER]
    with pytest.raises(ClientClosed, match="make a new one"):
        admin.topics()
    with pytest.raises(ConfigError, match="no setting is called colour"):
        Admin(colour="red")


# ------------------------------------------------------------------------------------------- topics


def test_topics(admin: Admin) -> None:
    made = admin.create_topic("api-orders", queues=2)
    assert made.config == TopicConfig("api-orders", 2, 2)
    assert list(made.brokers.values()) == [""]
    (address,) = made.brokers
    assert "api-orders" in admin.topics()
    assert admin.topic_configs("api-orders")[address].write_queue_count == 2
    changed = admin.update_topic("api-orders", read_queue_count=4, write_queue_count=4)
    assert changed.config.perm == 6
    assert admin.topic_configs("api-orders")[address].read_queue_count == 4
    permission = admin.set_topic_permission("api-orders", 4)
    assert (permission.before, permission.permission) == ({address: 6}, 4)
    assert [queue.perm for queue in admin.route("api-orders").queues] == [4]
    assert len(admin.topic_stats("api-orders").spans) == 4
    assert [row.topic for row in admin.topic_readers() if row.topic == "api-orders"]
    (activity,) = admin.topic_activity("api-orders")
    assert (activity.group, activity.behind) == ("", 0)
    deleted = admin.delete_topic("api-orders")
    assert deleted.cluster == CLUSTER
    with pytest.raises(TopicMissing):
        admin.route("api-orders")


def test_an_ordered_topic_is_in_the_nameservers_table(admin: Admin) -> None:
    made = admin.create_topic(TopicConfig("api-ordered", 2, 2, order=True), cluster=CLUSTER)
    assert made.order_config == f"{BROKER}:2"
    assert admin.value("ORDER_TOPIC_CONFIG", "api-ordered") == f"{BROKER}:2"


def test_attributes_are_a_table_or_changes(admin: Admin) -> None:
    made = admin.create_topic("api-attributes", attributes={"message.type": "NORMAL"})
    (address,) = made.brokers
    config = admin.topic_configs("api-attributes")[address]
    assert config.attributes["message.type"] == "NORMAL"
    with pytest.raises(BrokerRefused) as caught:
        admin.create_topic("api-attributes", attributes="+no.such.attribute=1")
    assert caught.value.code


def test_what_is_not_there_or_not_so(admin: Admin) -> None:
    with pytest.raises(NotFound, match="no cluster elsewhere"):
        admin.create_topic("x", cluster="elsewhere")
    with pytest.raises(ConfigError, match="not both"):
        admin.create_topic("x", broker="h:1", cluster=CLUSTER)
    with pytest.raises(ConfigError, match="no setting of a topic is called queues"):
        admin.update_topic("x", queues=3)
    with pytest.raises(ConfigError, match="no setting of a group is called retries"):
        admin.update_group("x", retries=3)
    with pytest.raises(TopicMissing):
        admin.delete_topic("api-nowhere")
    with pytest.raises(GroupMissing, match="create_group"):
        admin.group_configs("api-nobody")


# ------------------------------------------------------------------------------------------- groups


def test_groups_and_their_members(site: Site, admin: Admin) -> None:
    made = admin.create_group(GroupConfig("api-billing", retry_max=3))
    (address,) = made.brokers
    changed = admin.update_group("api-billing", retry_max=5)
    assert changed.config.retry_max == 5
    config = admin.group_configs("api-billing")[address]
    assert (config.retry_max, config.consume_enabled) == (5, True)
    admin.create_topic("api-members", queues=2)
    queue = MessageQueue("api-members", BROKER, 0)
    wanted = {queue: {"commitOffset": 0}, queue._replace(queue_id=1): {"commitOffset": 0}}
    site.join("api-billing", {"api-members": "*"}, queues=wanted, producer_groups=("api-shop",))
    # They are found by their retry topics, which the nameserver is told of a moment later.
    until(lambda: "api-billing" in admin.groups())
    connected = admin.consumer_connection("api-billing")
    assert [row.client_id for row in connected.connections] == ["10.0.0.1@1"]
    assert [row.client_id for row in admin.producer_connection("api-shop", "api-members")]
    assert admin.queue_owners("api-billing") == dict.fromkeys(wanted, "10.0.0.1@1")
    health = admin.group_health("api-billing")
    assert (health.disagreements, health.problems) == ([], [])
    _, members = admin.group_members("api-billing")
    assert members[0].info is not None
    assert admin.running_info("api-billing", "10.0.0.1@1").user == {"colour": "blue"}
    (overview,) = [row for row in admin.group_overviews() if row.group == "api-billing"]
    assert overview.connected is not None
    assert admin.set_group_mode("api-billing", "api-members", "PULL") == {address: ""}
    assert admin.groups_of_topic("api-members") == ["api-billing"]
    admin.create_group("api-short")
    deleted = admin.delete_group("api-short", offsets=True)
    assert deleted.brokers == {address: ""}
    assert [row.topic for row in deleted.topics] == ["%RETRY%api-short", "%DLQ%api-short"]
    with pytest.raises(GroupMissing):
        admin.group_configs("api-short")


# ------------------------------------------------------------------------------------------ offsets


def test_offsets_are_moved_every_way(site: Site, admin: Admin) -> None:
    admin.create_topic("api-moved", queues=1)
    admin.create_group("api-reader")
    admin.create_group("api-twin")
    queue = MessageQueue("api-moved", BROKER, 0)
    with pytest.raises(NotFound, match="has no offsets on api-moved"):
        admin.offsets("api-reader", "api-moved")
    before = datetime.now(UTC) - timedelta(hours=1)
    send(site, "api-moved", *(f"m{i}" for i in range(10)))
    admin.set_offset("api-reader", queue, 4)
    assert admin.offsets("api-reader") == {queue: 4}
    assert admin.lag("api-reader", "api-moved") == 6
    assert admin.consume_stats("api-reader").queues[queue].broker_offset == 10
    assert admin.clone_offsets("api-reader", "api-twin", "api-moved") == {queue: 4}
    assert admin.reset_to_end("api-reader", "api-moved") == {queue: 10}
    assert admin.reset_to_begin("api-reader", "api-moved") == {queue: 0}
    assert admin.reset_to_offset("api-reader", queue, 7) == {queue: 7}
    assert admin.reset_to_time("api-reader", "api-moved", before) == {queue: 0}
    later = datetime.now(UTC).timestamp() + 3600
    assert admin.reset_to_time("api-reader", "api-moved", later) == {queue: 10}
    with pytest.raises(ConfigError, match="before 1970"):
        admin.reset_to_time("api-reader", "api-moved", -1.0)
    with pytest.raises(ConfigError, match="below 0"):
        admin.reset_to_offset("api-reader", queue, -1)


# ----------------------------------------------------------------------------------------- messages


def test_messages_are_found_every_way(site: Site, admin: Admin) -> None:
    admin.create_topic("api-found", queues=2)
    begun = datetime.now(UTC) - timedelta(seconds=1)
    first, second = send(site, "api-found", "one", "two", keys="order-1", tags="A")
    by_key = admin.messages_by_key("api-found", "order-1", begin=begun)
    assert [message.body for message in by_key] == [b"one", b"two"]
    assert admin.messages_by_key("api-found", "order-2") == []
    assert admin.messages_by_key("api-found", "order-1", end=begun) == []
    assert admin.message_by_id("api-found", second.offset_id).body == b"two"
    (unique,) = admin.messages_by_unique_key("api-found", first.message_id)
    assert unique.body == b"one"
    assert admin.message_in(first.queue, first.queue_offset).message_id == first.message_id
    with pytest.raises(NotFound, match="no message at offset 99"):
        admin.message_in(first.queue, 99)
    assert [m.body for m in admin.messages("api-found")] == [b"one", b"two"]
    assert [m.body for m in admin.messages("api-found", begin=begun, tags="B")] == []
    other = first.queue._replace(queue_id=1)
    assert list(admin.messages("api-found", queues=[other])) == []
    again = admin.send_again(unique)
    assert again.queue_id == first.queue.queue_id
    assert admin.track(unique) == []
    assert len(admin.messages_by_unique_key("api-found", first.message_id)) == 2


def test_a_running_consumer_handles_a_message_now(site: Site, admin: Admin) -> None:
    admin.create_topic("api-now", queues=1)
    (sent,) = send(site, "api-now", "now")
    message = admin.message_in(sent.queue, sent.queue_offset)
    site.join("api-now", {"api-now": "*"}, client_id="10.0.0.7@1")
    assert admin.consume_now("api-now", "10.0.0.7@1", message).result == "CR_SUCCESS"
    assert [track.group for track in admin.track(message)] == ["api-now"]
    site.join("api-pull", {"api-now": "*"}, client_id="10.0.0.8@1", consume_type="CONSUME_ACTIVELY")
    with pytest.raises(NotFound, match="no push consumer"):
        admin.consume_now("api-pull", "10.0.0.8@1", message)


# ------------------------------------------------------------------- what Sluice's brokers tell


def test_dead_letters(site: Site, admin: Admin) -> None:
    with pytest.raises(NotFound, match="has no dead letters"):
        list(admin.dead_letters("api-nobody"))
    admin.create_topic("api-dying", queues=1)
    admin.create_group("api-weak")
    for sent in send(site, "api-dying", "a", "b", "c", keys="bad"):
        site.give_up("api-weak", int(sent.offset_id[16:], 16))
    letters = list(admin.dead_letters("api-weak"))
    assert [letter.origin_topic for letter in letters] == ["api-dying"] * 3
    assert [letter.is_resent for letter in letters] == [False] * 3
    assert len(list(admin.dead_letters("api-weak", count=2))) == 2
    assert list(admin.dead_letters("api-weak", key="other")) == []
    assert list(admin.dead_letters("api-weak", end=1.0)) == []
    assert len(list(admin.dead_letters("api-weak", topic="api-dying", begin=1.0))) == 3
    with pytest.raises(ConfigError, match="say which"):
        admin.resend_dead_letters("api-weak")
    with pytest.raises(ConfigError, match="say which"):
        admin.resend_dead_letters("api-weak", ids=["x"], everything=True)
    report = admin.resend_dead_letters("api-weak", ids=[letters[0].message_id])
    assert (report.counts, report.failed) == ({"resent": 1}, [])
    report = admin.resend_dead_letters("api-weak", key="bad")
    assert (report.counts, report.failed) == ({"resent": 2}, [])
    assert all(letter.is_resent for letter in admin.dead_letters("api-weak"))


def test_delayed_messages_and_taking_them_back(site: Site, admin: Admin) -> None:
    with Producer(site.nameserver.address) as producer:
        producer.send(Message("api-later", "timed", delay_seconds=3600, keys="k"))
        handle = producer.send(Message("api-later", "gone", delay_seconds=7200)).recall_handle
        producer.send(Message("api-later", "level", delay_level=18))
        assert admin.recall(handle)
    found = admin.delayed("api-later")
    timed = [row for row in found.messages if not row.delay_level]
    assert [row.keys for row in timed] == ["k"]
    assert found.totals.level_count == 1
    (level,) = [row for row in found.messages if row.delay_level]
    with pytest.raises(ConfigError, match="delay level"):
        admin.recall(level)
    assert admin.recall(timed[0]) == timed[0].unique_key
    assert [row.delay_level for row in admin.delayed("api-later").messages] == [18]
    assert len(admin.delayed(count=1).messages) == 1


def test_open_transactions(site: Site, admin: Admin) -> None:
    begun = site.begin("api-half", "api-shop", "U-api-1")
    (half,) = admin.open_transactions(topic="api-half")
    assert (half.producer_group, half.transaction_id) == ("api-shop", "U-api-1")
    assert admin.open_transactions(group="api-other") == []
    assert admin.resume_check(begun["msgId"]).broker_name == BROKER
    with pytest.raises(ConfigError, match="not the id"):
        admin.resume_check("U-api-1")
    with pytest.raises(NotFound, match="no broker has"):
        admin.resume_check("7F0000010000000000000000000000FF")


# ------------------------------------------------------------------------------------------ brokers


def test_brokers_and_nameservers(site: Site, admin: Admin) -> None:
    (broker,) = admin.brokers()
    assert (broker.cluster, broker.name) == (CLUSTER, BROKER)
    (status,) = admin.broker_statuses()
    assert status.is_active
    assert status.error == ""
    assert 0.0 <= status.disk_ratio <= 1.0
    assert status.runtime == admin.runtime_info(status.address) | status.runtime
    address = broker.addresses[0]
    assert admin.set_broker_config("autoCreateTopicEnable", "false") == {address: ""}
    assert admin.broker_config(address)["autoCreateTopicEnable"] == "false"
    admin.set_broker_config("autoCreateTopicEnable", "true", broker=address, replicas=True)
    with pytest.raises(BrokerRefused):
        admin.set_broker_config("noSuchSetting", "1")
    admin.create_topic("api-wiped", queues=1)
    assert admin.set_write_permission(BROKER, False).topic_counts[site.nameserver.address] > 0
    assert admin.route("api-wiped").queues[0].perm == 4
    admin.set_write_permission(BROKER, True)
    assert admin.route("api-wiped").queues[0].perm == 6
    admin.set_value("api", "colour", "blue")
    assert admin.value("api", "colour") == "blue"
    admin.delete_value("api", "colour")
    assert admin.value("api", "colour") is None


def test_what_some_did_and_some_did_not() -> None:
    """The error carries who did what, so that nothing has to be found out twice."""
    site = Site()
    site.start()
    try:
        site.register_elsewhere("ghost", CLUSTER, "127.0.0.1:1")
        with Admin(site.nameserver.address) as admin:
            with pytest.raises(PartlyDone, match="1 of 2 failed") as caught:
                admin.create_topic("api-partly", queues=1)
            outcomes = caught.value.result.brokers
            assert outcomes[site.broker.address] == ""
            assert "cannot connect" in outcomes["127.0.0.1:1"]
            statuses = {row.name: row for row in admin.broker_statuses()}
            assert "cannot connect" in statuses["ghost"].error
            assert statuses[BROKER].is_active
            with pytest.raises(LinkLost):
                admin.broker_config("127.0.0.1:1")
    finally:
        site.stop()


def test_with_asyncio(site: Site) -> None:
    async def work() -> None:
        async with sluice_aio.Admin(site.nameserver.address) as admin:
            await admin.create_topic("api-aio", queues=1)
            await asyncio.to_thread(send, site, "api-aio", "x", "y")
            found = [message.body async for message in admin.messages("api-aio")]
            assert found == [b"x", b"y"]

    asyncio.run(work())


def test_an_iterator_may_be_left_early(site: Site, admin: Admin) -> None:
    admin.create_topic("api-many", queues=1)
    send(site, "api-many", *(f"m{i}" for i in range(100)))
    for message in admin.messages("api-many"):
        assert message.body == b"m0"
        break
    with PullConsumer(site.nameserver.address, group="api-many") as consumer:
        assert len(consumer.queues("api-many")) == 1
