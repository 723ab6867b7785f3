"""Edges that were wrong once: groups that go and come again, flags, forged properties."""

from __future__ import annotations

import pytest

from sluice.broker.topic_deletion import delete_topic
from sluice.link import RemotingLink
from sluice.protocol import records
from sluice.protocol import remoting_clients as bodies
from sluice.protocol.message_batches import join_batch
from sluice.protocol.remoting import BINARY, JSON
from sluice.protocol.remoting_codes import RequestCode as Request
from sluice.protocol.remoting_codes import ResponseCode as Response
from tests.unit.broker.broker_kit import Rig, queue_table, running, send_fields
from tests.unit.broker.pop_kit import messages
from tests.unit.broker.retry_kit import Broker
from tests.unit.loops import run_once, until

# ------------------------------------------------------------------- groups that are made once more


def failed_once() -> tuple[Broker, int]:
    """A message that came again; and where it was first."""
    broker = Broker()
    broker.make()
    position = broker.send().position
    broker.send_back(position)
    broker.run(11_000)
    assert len(broker.entries("%RETRY%g")) == 1
    return broker, position


@pytest.mark.parametrize("kill", [False, True])
def test_a_group_that_is_made_anew_may_fail_with_the_same_messages_again(kill: bool) -> None:
    broker, position = failed_once()
    core = broker.core
    core.groups.delete("g", lambda error: None)
    core.retry_notes.forget_group("g")
    core.offsets.forget_group("g", lambda error: None)
    delete_topic(core, "%RETRY%g", lambda error: None)
    broker.settle()
    broker.make()
    if kill:
        broker = broker.restarted()
    broker.send_back(position)
    broker.run(11_000)
    assert len(broker.entries("%RETRY%g")) == 1, "what it gets again is not lost"


@pytest.mark.parametrize("kill", [False, True])
def test_a_retry_topic_that_was_deleted_holds_nothing_back(kill: bool) -> None:
    broker, position = failed_once()
    delete_topic(broker.core, "%RETRY%g", lambda error: None)
    broker.settle()
    if kill:
        broker = broker.restarted()
    broker.send_back(position)
    broker.run(11_000)
    assert len(broker.entries("%RETRY%g")) == 1


def test_another_groups_notes_stay() -> None:
    broker, position = failed_once()
    broker.make("h")
    broker.send_back(position, group="h")
    broker.core.retry_notes.forget_group("h")
    broker.send_back(position)
    assert len(broker.copies()) == 1


def test_deleting_a_group_over_the_wire_forgets_what_it_sent_back() -> None:
    async def work() -> None:
        async with running() as rig:
            await rig.make_topic("orders")
            await rig.make_group("readers")
            sent = await rig.send("orders")
            back = {
                "group": "readers",
                "offset": int(sent["msgId"][-16:], 16),
                "delayLevel": 1,
                "maxReconsumeTimes": 16,
            }
            retries = rig.broker.core.retries
            await rig.done(Request.CONSUMER_SEND_MSG_BACK, back)
            await rig.done(Request.CONSUMER_SEND_MSG_BACK, back)
            assert (retries.sent_back_count, retries.suppressed_count) == (1, 1)
            await rig.done(Request.DELETE_SUBSCRIPTIONGROUP, {"groupName": "readers"})
            await rig.make_group("readers")
            await rig.done(Request.CONSUMER_SEND_MSG_BACK, back)
            assert (retries.sent_back_count, retries.suppressed_count) == (2, 1)

    run_once(work())


# --------------------------------------------------------------------------- groups without retries


def test_a_group_that_wanted_no_retries_and_wants_them_now_gets_them() -> None:
    async def work() -> None:
        async with running() as rig:
            await rig.make_topic("orders")
            await rig.make_group("readers", retryQueueNums=0)
            await rig.join("readers", {"orders": "*"})
            await rig.make_group("readers", retryQueueNums=1)
            await rig.join("readers", {"orders": "*"})
            asked = {"topic": "%RETRY%readers"}
            found = await rig.json(Request.GET_TOPIC_CONFIG, asked)
            assert (found["readQueueNums"], found["writeQueueNums"]) == (1, 1)
            fields = send_fields("%RETRY%readers", -1)
            await rig.done(Request.SEND_MESSAGE_V2, fields, b"x")
            assert (await rig.pull("%RETRY%readers", 0)).code == Response.SUCCESS

    run_once(work())


# ----------------------------------------------------------------------------------------- resets


@pytest.mark.parametrize("force", ["true", "false"])
def test_a_reset_goes_where_it_is_told_with_force_or_without(force: str) -> None:
    """As RocketMQ's brokers do it since they reset by themselves."""

    async def work() -> None:
        async with running() as rig:
            await rig.make_topic("orders")
            await rig.make_group("readers")
            for _ in range(5):
                await rig.send("orders")
            await rig.commit("readers", "orders", 3)
            fields = {"group": "readers", "topic": "orders", "isForce": force}
            code = Request.INVOKE_BROKER_TO_RESET_OFFSET
            assert queue_table(await rig.json(code, {**fields, "timestamp": -1})) == {0: 5, 1: 0}
            assert await rig.committed("readers", "orders") == 5
            assert queue_table(await rig.json(code, {**fields, "timestamp": 0})) == {0: 0, 1: 0}
            assert await rig.committed("readers", "orders") == 0

    run_once(work())


# ------------------------------------------------------------------------------- strangers, twins


async def listed(rig: Rig) -> list[str]:
    """The members of the group."""
    answer = await rig.ask(Request.GET_CONSUMER_LIST_BY_GROUP, {"consumerGroup": "readers"})
    return list(bodies.read_consumer_ids(answer.body)) if answer.code == 0 else []


def test_nobody_takes_leave_for_another_connection() -> None:
    async def work() -> None:
        async with running() as rig:
            await rig.make_topic("orders")
            await rig.join("readers", {"orders": "*"}, producer_groups=("shop",))
            twin = await rig.connect()
            for group in ("consumerGroup", "producerGroup"):
                name = "readers" if group == "consumerGroup" else "shop"
                fields = {"clientID": "client-1", group: name}
                await rig.ask(Request.UNREGISTER_CLIENT, fields, link=twin)
            assert await listed(rig) == ["client-1"]
            assert "shop" in rig.broker.core.clients.producers
            fields = {"clientID": "client-1", "consumerGroup": "readers", "producerGroup": "shop"}
            await rig.done(Request.UNREGISTER_CLIENT, fields)
            assert await listed(rig) == []
            assert "shop" not in rig.broker.core.clients.producers

    run_once(work())


# ------------------------------------------------------------------------------- forged properties


@pytest.mark.parametrize("more", [{}, {"TIMER_DELAY_MS": "1"}])
@pytest.mark.parametrize("serialization", [JSON, BINARY])
def test_a_ticket_that_a_message_carries_along_is_taken_off(
    more: dict[str, str], serialization: int
) -> None:
    """Java's client would acknowledge by it instead of by what it is told."""

    async def work() -> None:
        async with running() as rig:
            await rig.make_topic("orders")
            text = {"POP_CK": "0 1 2 3 0 broker-a 0 7", "UNIQ_KEY": "U1", "a": "b", **more}
            link = await RemotingLink.open(rig.broker.address, serialization=serialization)
            fields = send_fields("orders", 0, **text)
            await rig.ask(Request.SEND_MESSAGE_V2, fields, b"x", link=link)
            if not more:
                batch = join_batch([(0, b"x", records.format_properties(text))])
                fields = {**send_fields("orders"), "m": "true"}
                await rig.ask(Request.SEND_BATCH_MESSAGE, fields, batch, link=link)
            await link.close()
            count, store = 1 if more else 2, rig.broker.core.store
            await until(lambda: store.max_offset("orders", 0) == count)
            found = messages(await rig.pull("orders", 0))
            assert len(found) == count
            for entry in found:
                read = records.parse_properties(entry.properties)
                assert "POP_CK" not in read
                assert (read["UNIQ_KEY"], read["a"]) == ("U1", "b")

    run_once(work())
