"""Edges of the door that RocketMQ's clients use: what they hear where its brokers say it too."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from sluice.broker import groups
from sluice.broker.groups import Client, Clients
from sluice.broker.topics import TopicSettings
from sluice.config import NameserverConfig
from sluice.errors import MessageIllegal
from sluice.link import RemotingLink
from sluice.nameserver import Nameserver
from sluice.protocol import remoting_clients as bodies
from sluice.protocol.message_batches import join_batch
from sluice.protocol.remoting import BINARY, JSON, RemotingCommand
from sluice.protocol.remoting_codes import RequestCode as Request
from sluice.protocol.remoting_codes import ResponseCode as Response
from tests.unit.broker.broker_kit import (
    BROKER,
    CLUSTER,
    FLAG_SUBSCRIPTION,
    FLAG_SUSPEND,
    Rig,
    offset_fields,
    running,
    send_fields,
)
from tests.unit.broker.pop_kit import messages
from tests.unit.loops import run_once, until

TWIN = "10.0.0.1@DEFAULT"
KNOWN = "the message is illegal, maybe msg body or properties length not matched. "


async def heartbeat(
    rig: Rig,
    wanted: dict[str, str],
    *,
    link: RemotingLink | None = None,
    model: str = "CLUSTERING",
    version: int = 1,
    producer_groups: tuple[str, ...] = (),
) -> RemotingCommand:
    """A heartbeat of consumers that want something of `orders`, by group."""
    consumers = tuple(
        bodies.ConsumerData(
            group,
            "CONSUME_PASSIVELY",
            model,
            "CONSUME_FROM_LAST_OFFSET",
            (bodies.Subscription("orders", tags, version),),
        )
        for group, tags in wanted.items()
    )
    said = bodies.Heartbeat(TWIN, producer_groups, consumers)
    return await rig.ask(Request.HEART_BEAT, body=bodies.write_heartbeat(said), link=link)


# ------------------------------------------------------------------------- consumers of one name


@pytest.mark.parametrize("is_killed", [False, True])
def test_a_broadcasting_consumer_outlives_one_of_its_name(is_killed: bool) -> None:
    async def work() -> None:
        async with running() as rig:
            await rig.make_topic("orders")
            await rig.send("orders")
            other = await rig.connect()
            for link in (rig.link, other):
                await heartbeat(rig, {"readers": "*"}, link=link, model="BROADCASTING")
            asked = {"consumerGroup": "readers"}
            found = await rig.json(Request.GET_CONSUMER_CONNECTION_LIST, asked)
            assert [row["clientId"] for row in found["connectionSet"]] == [TWIN, TWIN]
            assert len({row["clientAddr"] for row in found["connectionSet"]}) == 2
            listed = await rig.done(Request.GET_CONSUMER_LIST_BY_GROUP, asked)
            assert bodies.read_consumer_ids(listed.body) == (TWIN,)
            if is_killed:
                await other.close()
            else:
                fields = {"clientID": TWIN, **asked}
                await rig.ask(Request.UNREGISTER_CLIENT, fields, link=other)
            group = rig.broker.core.clients.consumers["readers"]
            await until(lambda: len(group.connections) == 1)
            assert (await rig.pull("orders", 0, flags=0)).code == Response.SUCCESS

    run_once(work())


def said(clients: Clients, client_id: str, channel: object, now_ms: int = 0) -> bool:
    changed, _ = clients.consumer_said(
        "g",
        Client(client_id, channel, "JAVA", 513, now_ms),
        consume_type="CONSUME_PASSIVELY",
        message_model="CLUSTERING",
        from_where="CONSUME_FROM_LAST_OFFSET",
        subscriptions=[],
    )
    return changed


def test_who_connects_anew_is_asked_over_the_new_connection_and_leaves_with_it() -> None:
    clients = Clients()
    assert said(clients, "one", "old")
    assert said(clients, "two", "other")
    assert said(clients, "one", "new")
    assert clients.consumers["g"].members["one"].channel == "new"
    assert clients.closed("old") == [], "its queues stay with it"
    assert clients.is_consumer("g", "one")
    assert clients.closed("new") == ["g"]
    assert list(clients.consumers["g"].members) == ["two"]
    assert not clients.is_consumer("g", "one")


def test_who_is_left_of_one_name_is_the_one_who_is_asked() -> None:
    clients = Clients()
    said(clients, "one", "first", now_ms=7)
    said(clients, "one", "second")
    said(clients, "one", "first", now_ms=8)
    group = clients.consumers["g"]
    assert group.members["one"].channel == "second"
    assert clients.leave("one", "second", "", "g") == []
    assert (group.members["one"].channel, group.members["one"].heard_ms) == ("first", 8)
    assert list(group.wanted) == [("one", "first")]
    assert clients.expire(200_000) == ["g"]
    assert clients.consumers == {}


def test_who_connects_anew_has_room_in_a_full_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(groups, "CLIENTS_PER_GROUP_MAX", 1)
    clients = Clients()
    assert said(clients, "one", "old")
    assert said(clients, "one", "new")
    for client_id, channel in (("two", "other"), ("one", "newer")):
        with pytest.raises(MessageIllegal, match="has 1 consumers already"):
            said(clients, client_id, channel)


# --------------------------------------------------------------------------- pulls that have waited


async def held(rig: Rig, flags: int) -> asyncio.Task[RemotingCommand]:
    """A pull of `orders` that waits for messages."""
    polls = rig.broker.core.polls
    link = await rig.connect()
    pulling = asyncio.create_task(rig.pull("orders", 0, flags=FLAG_SUSPEND | flags, link=link))
    await until(lambda: polls.held_count == 1)
    return pulling


@pytest.mark.parametrize("flags", [0, FLAG_SUBSCRIPTION])
def test_a_group_that_was_switched_off_gets_nothing_though_its_pull_waited(flags: int) -> None:
    async def work() -> None:
        async with running() as rig:
            await rig.make_topic("orders")
            await heartbeat(rig, {"readers": "*"})
            pulling = await held(rig, flags)
            await rig.make_group("readers", consumeEnable=False)
            await rig.send("orders")
            answer = await pulling
            assert (answer.code, bytes(answer.body)) == (Response.NO_PERMISSION, b"")

    run_once(work())


def test_a_topic_that_may_not_be_read_any_more_is_not_read_by_a_pull_that_waited() -> None:
    async def work() -> None:
        async with running() as rig:
            await rig.make_topic("orders")
            await heartbeat(rig, {"readers": "*"})
            pulling = await held(rig, 0)
            await rig.make_topic("orders", perm=2)
            await rig.send("orders")
            assert (await pulling).code == Response.NO_PERMISSION

    run_once(work())


def test_a_pull_that_waited_goes_by_what_its_group_wants_now() -> None:
    async def work() -> None:
        async with running() as rig:
            await rig.make_topic("orders")
            await heartbeat(rig, {"readers": "TagA"})
            pulling = await held(rig, 0)
            await heartbeat(rig, {"readers": "TagB"}, version=2)
            await rig.send("orders", b"a", TAGS="TagA")
            await rig.send("orders", b"b", TAGS="TagB")
            answer = await pulling
            assert [bytes(entry.body) for entry in messages(answer)] == [b"b"]

    run_once(work())


# ------------------------------------------------------------------------------------------ routes


@asynccontextmanager
async def registered(**changes: Any) -> AsyncIterator[tuple[Nameserver, Rig]]:
    """A nameserver and a broker that it knows."""
    here = Nameserver(NameserverConfig(listen_port=0))
    await here.start()
    try:
        async with running(nameserver_addresses=(here.address,), **changes) as rig:
            yield here, rig
    finally:
        await here.stop()


def perm_of(here: Nameserver, topic: str) -> int | None:
    route = here.table.route(topic)
    return None if route is None else route.queues[0].perm


def test_a_broker_that_was_taken_out_of_sending_stays_out_when_a_topic_is_made() -> None:
    async def work() -> None:
        async with registered() as (here, rig):
            await rig.make_topic("orders")
            here.table.wipe_write_permission(BROKER)
            await rig.make_topic("more")
            assert perm_of(here, "more") == 6
            assert perm_of(here, "orders") == 4

    run_once(work())


def test_the_topic_that_others_are_made_after_is_told_where_they_may_be_made() -> None:
    async def work() -> None:
        async with registered(auto_create_topics="off") as (here, rig):
            await rig.make_topic("orders")
            assert perm_of(here, "TBW102") is None
            assert perm_of(here, "orders") == 6
            for word, perm in (("true", 7), ("false", 0), ("true", 7)):
                change = f"autoCreateTopicEnable={word}".encode()
                await rig.done(Request.UPDATE_BROKER_CONFIG, body=change)
                assert perm_of(here, "TBW102") == perm

    run_once(work())


def test_other_topics_may_be_inherited_though_none_is_made_by_itself() -> None:
    async def work() -> None:
        async with running(auto_create_topics="off") as rig:
            fields = {**send_fields("orders"), "c": CLUSTER}
            await rig.done(Request.SEND_MESSAGE_V2, fields, b"x")
            assert rig.broker.core.topics.get("orders") == TopicSettings("orders", 4, 4)
            code, remark = await rig.refused_send("others")
            assert (code, "auto_create_topics is off" in remark) == (17, True)
            fields = {**send_fields("others"), "c": "SELF_TEST_TOPIC"}  # gives nothing on
            code, remark = await rig.refused(Request.SEND_MESSAGE_V2, fields, b"x")
            assert (code, "auto_create_topics" in remark) == (17, False)

    run_once(work())


# ----------------------------------------------------------------------------------------- queries


def test_messages_with_a_key_come_in_the_order_they_were_stored_in_the_newest_of_them() -> None:
    async def work() -> None:
        async with running() as rig:
            await rig.make_topic("orders")
            for number in range(5):
                await rig.send("orders", b"%d" % number, KEYS="k")
            span = {"beginTimestamp": 0, "endTimestamp": 1 << 62}
            fields = {"topic": "orders", "key": "k", "maxNum": 3, **span}
            found = messages(await rig.done(Request.QUERY_MESSAGE, fields))
            assert [bytes(entry.body) for entry in found] == [b"2", b"3", b"4"]

    run_once(work())


def test_an_offset_that_nobody_committed() -> None:
    async def work() -> None:
        async with running() as rig:
            await rig.make_topic("orders")
            await rig.send("orders")
            first = Request.QUERY_CONSUMER_OFFSET
            young, empty = (offset_fields("readers", "orders", queue) for queue in (0, 1))
            never, always = {"setZeroIfNotFound": "false"}, {"setZeroIfNotFound": "true"}
            assert (await rig.done(first, young | always)).ext["offset"] == "0"
            assert await rig.refused(first, young | never) == (
                Response.QUERY_NOT_FOUND,
                "Not found, do not set to zero, maybe this group boot first",
            )
            absent = await rig.refused(first, empty)
            assert absent[0] == Response.QUERY_NOT_FOUND
            assert await rig.refused(first, empty | always) == absent
            await rig.make_group("readers")
            await rig.commit("readers", "orders", 1)
            assert (await rig.done(first, young | never)).ext["offset"] == "1"

    run_once(work())


# ------------------------------------------------------------------------------------------- sends

BATCH = join_batch([(0, b"one", b"UNIQ_KEY\x01U1\x02"), (0, b"two", b"UNIQ_KEY\x01U2\x02")])
SENT_ALONE = {
    "producerGroup": "senders",
    "topic": "orders",
    "defaultTopic": "TBW102",
    "defaultTopicQueueNums": 4,
    "queueId": 0,
    "sysFlag": 0,
    "bornTimestamp": time.time_ns() // 1_000_000,
    "flag": 0,
    "properties": "",
    "batch": "true",
}


@pytest.mark.parametrize("serialization", [JSON, BINARY])
@pytest.mark.parametrize(
    ("code", "fields"),
    [
        (Request.SEND_MESSAGE, SENT_ALONE),
        (Request.SEND_MESSAGE_V2, {**send_fields("orders"), "m": "true"}),
        (Request.SEND_MESSAGE_V2, {**send_fields("orders", UNIQ_KEY="U0"), "m": "true"}),
    ],
)
def test_what_is_called_a_batch_is_one_whatever_it_is_sent_as(
    code: int, fields: dict[str, Any], serialization: int
) -> None:
    async def work() -> None:
        async with running() as rig:
            await rig.make_topic("orders")
            link = await RemotingLink.open(rig.broker.address, serialization=serialization)
            answer = await rig.ask(code, fields, BATCH, link=link)
            await link.close()
            assert answer.code == Response.SUCCESS, answer.remark
            assert answer.ext["msgId"].count(",") == 1
            found = messages(await rig.pull("orders", 0))
            assert [bytes(entry.body) for entry in found] == [b"one", b"two"]

    run_once(work())


@pytest.mark.parametrize("serialization", [JSON, BINARY])
def test_a_batch_to_a_retry_topic_is_an_illegal_message(serialization: int) -> None:
    async def work() -> None:
        async with running() as rig:
            await rig.make_group("readers")
            link = await RemotingLink.open(rig.broker.address, serialization=serialization)
            fields = {**send_fields("%RETRY%readers", UNIQ_KEY="U"), "m": "true"}
            answer = await rig.ask(Request.SEND_BATCH_MESSAGE, fields, BATCH, link=link)
            await link.close()
            assert answer.code == Response.MESSAGE_ILLEGAL
            assert answer.remark == "batch request does not support retry group %RETRY%readers"

    run_once(work())


@pytest.mark.parametrize("serialization", [JSON, BINARY])
@pytest.mark.parametrize(
    ("body", "properties", "ours"),
    [
        (b"x" * 65_537, {}, "body of 65537 bytes is over the limit of 65536 (message_bytes_max)"),
        (b"x", {"a": "b" * 32_767}, "bytes are over the limit of 32747"),
    ],
    ids=["body", "properties"],
)
def test_what_is_too_large_is_refused_in_the_words_that_clients_know(
    body: bytes, properties: dict[str, str], ours: str, serialization: int
) -> None:
    async def work() -> None:
        async with running() as rig:
            await rig.make_topic("orders")
            link = await RemotingLink.open(rig.broker.address, serialization=serialization)
            fields = send_fields("orders", 0, UNIQ_KEY="U", **properties)
            answer = await rig.ask(Request.SEND_MESSAGE_V2, fields, body, link=link)
            await link.close()
            limits = "msg body length limit 65536B, msg properties length limit 32KB."
            assert answer.code == Response.MESSAGE_ILLEGAL
            assert (answer.remark or "").startswith(KNOWN + limits)
            assert ours in (answer.remark or "")

    run_once(work())


@pytest.mark.parametrize(
    ("code", "fields"),
    [
        (Request.SEND_MESSAGE, {**SENT_ALONE, "batch": "false"}),
        (Request.SEND_MESSAGE_V2, send_fields("orders")),
        (Request.SEND_MESSAGE_V2, send_fields("orders", DELAY="1")),
        (Request.SEND_MESSAGE_V2, send_fields("orders", TRAN_MSG="true", PGROUP="p")),
    ],
)
def test_a_message_without_a_body_is_refused(code: int, fields: dict[str, Any]) -> None:
    async def work() -> None:
        async with running() as rig:
            await rig.make_topic("orders")
            refused, remark = await rig.refused(code, fields, b"")
            assert refused == Response.MESSAGE_ILLEGAL
            assert remark.startswith(KNOWN)
            assert rig.broker.core.store.max_offset("orders", 0) == 0

    run_once(work())


# ------------------------------------------------------------------------------------------ groups


def test_a_group_that_cannot_be_made_keeps_no_other_from_being_heard(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "sluice.broker")

    async def work() -> None:
        async with running() as rig:
            await rig.make_topic("orders")
            wanted = {"a b": "*", "g" * 121: "*", "readers": "*"}
            answer = await heartbeat(rig, wanted, producer_groups=("shop",))
            assert answer.code == Response.SUCCESS
            clients = rig.broker.core.clients
            assert (list(clients.consumers), list(clients.producers)) == (["readers"], ["shop"])
            assert rig.broker.core.groups.get("a b") is None
            assert rig.broker.core.topics.get("%RETRY%a b") is None
            assert (await rig.pull("orders", 0, flags=0)).code == Response.PULL_NOT_FOUND

    run_once(work())
    assert len([line for line in caplog.messages if "is left out" in line]) == 2
