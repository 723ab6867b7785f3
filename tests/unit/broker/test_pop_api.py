"""Pop consumption over the wire: fields, tickets, codes and remarks."""

from __future__ import annotations

import asyncio
from base64 import b64encode
from typing import Any

import orjson
import pytest

from sluice.protocol import records
from sluice.protocol.remoting_codes import RequestCode as Request
from sluice.protocol.remoting_codes import ResponseCode as Response
from tests.unit.broker.broker_kit import BROKER, Rig, running
from tests.unit.broker.pop_kit import GROUP, TOPIC, messages, pop_fields, ticket
from tests.unit.loops import run_once, until


async def filled(rig: Rig, count: int = 2) -> None:
    await rig.make_topic(TOPIC)
    await rig.make_group(GROUP)
    for number in range(count):
        await rig.send(TOPIC, b"%d" % number)


def test_a_pop_its_answer_and_the_acknowledgement() -> None:
    async def work() -> None:
        async with running() as rig:
            await filled(rig, 3)
            answer = await rig.done(Request.POP_MESSAGE, pop_fields(maxMsgNums=2))
            assert answer.remark == "FOUND"
            assert [bytes(entry.body) for entry in messages(answer)] == [b"0", b"1"]
            ext = answer.ext
            assert ext["startOffsetInfo"] == "0 0 0"
            assert ext["msgOffsetInfo"] == "0 0 0,1"
            assert (ext["invisibleTime"], ext["restNum"]) == ("60000", "1")
            assert 0 <= int(ext["reviveQid"]) < 8
            assert "orderCountInfo" not in ext
            for number in range(2):
                await rig.done(Request.ACK_MESSAGE, ticket(answer, number))
            code, remark = await rig.refused(Request.ACK_MESSAGE, ticket(answer))
            assert (code, "acknowledged already" in remark) == (208, True)
            rest = await rig.done(Request.POP_MESSAGE, pop_fields())
            assert rest.ext["msgOffsetInfo"] == "0 0 2"

    run_once(work())


def test_nothing_to_pop_is_said_in_rocketmqs_words() -> None:
    async def work() -> None:
        async with running(held_polls_max=1) as rig:
            await filled(rig, 0)
            answer = await rig.ask(Request.POP_MESSAGE, pop_fields(pollTime=50))
            assert answer.code == Response.POLLING_TIMEOUT
            assert answer.remark == "NO_MESSAGE_IN_QUEUE"
            assert answer.ext.get("startOffsetInfo", "") == ""
            fields = pop_fields(pollTime=30_000)
            link = await rig.connect()
            held = asyncio.ensure_future(rig.ask(Request.POP_MESSAGE, fields, link=link))
            await until(lambda: rig.broker.core.polls.held_count == 1)
            queue = {"consumerGroup": GROUP, "topic": TOPIC, "queueId": -1}
            assert (await rig.done(Request.POLLING_INFO, queue)).ext == {"pollingNum": "1"}
            full = await rig.ask(Request.POP_MESSAGE, fields)
            assert full.code == Response.POLLING_FULL
            assert "(held_polls_max)" in (full.remark or "")
            await rig.send(TOPIC, b"late", queue_id=1)
            assert [bytes(entry.body) for entry in messages(await held)] == [b"late"]

    run_once(work())


def test_old_requests_are_answered_by_nobody() -> None:
    async def work() -> None:
        async with running() as rig:
            await filled(rig)
            fields = pop_fields(bornTime=rig.broker.core.now_ms() - 60_000, pollTime=15_000)
            answer = await rig.ask(Request.POP_MESSAGE, fields)
            assert answer.code == Response.POLLING_TIMEOUT
            assert "timeout too much" in (answer.remark or "")
            assert answer.ext["restNum"] == answer.ext["popTime"] == "0", "Java reads them"
            del fields["bornTime"]
            assert len(messages(await rig.done(Request.POP_MESSAGE, fields))) == 2

    run_once(work())


def test_a_changed_time_gives_a_new_ticket_and_the_message_comes_again() -> None:
    async def work() -> None:
        async with running() as rig:
            await filled(rig, 1)
            first = await rig.done(Request.POP_MESSAGE, pop_fields())
            changed = await rig.done(
                Request.CHANGE_MESSAGE_INVISIBLETIME, {**ticket(first), "invisibleTime": 20}
            )
            assert changed.ext["invisibleTime"] == "20"
            assert int(changed.ext["popTime"]) >= int(first.ext["popTime"])
            again = await rig.done(Request.POP_MESSAGE, pop_fields(pollTime=20_000))
            assert again.ext["startOffsetInfo"] == "1 0 0"
            (entry,) = messages(again)
            assert (entry.topic, entry.reconsume_times) == (TOPIC, 1)
            shown = records.parse_properties(entry.properties)["POP_CK"]
            assert shown == ticket(again)["extraInfo"]
            await rig.done(Request.ACK_MESSAGE, ticket(again))
            row = (await progress(rig))["%RETRY%readers_orders", 0]
            assert (row["brokerOffset"], row["consumerOffset"]) == (1, 1)

    run_once(work())


async def progress(rig: Rig) -> dict[tuple[str, int], dict[str, int]]:
    """What consumerProgress shows, by topic and queue."""
    found = await rig.json(Request.GET_CONSUME_STATS, {"consumerGroup": GROUP})
    rows = {}
    for key, row in found["offsetTable"].items():
        queue = orjson.loads(key) if isinstance(key, str) else key
        rows[queue["topic"], queue["queueId"]] = row
    return rows


def test_what_is_in_flight_is_seen() -> None:
    async def work() -> None:
        async with running() as rig:
            await filled(rig, 3)
            answer = await rig.done(Request.POP_MESSAGE, pop_fields(maxMsgNums=2))
            row = (await progress(rig))[TOPIC, 0]
            assert (row["brokerOffset"], row["consumerOffset"], row["pullOffset"]) == (3, 0, 2)
            # Apache's proxy adds the position in the log.
            shown = ticket(answer, 1)
            shown["extraInfo"] = f"{shown['extraInfo']} 71413"
            await rig.done(Request.ACK_MESSAGE, shown)
            row = (await progress(rig))[TOPIC, 0]
            assert (row["consumerOffset"], row["pullOffset"]) == (1, 2)
            assert await rig.committed(GROUP, TOPIC) == 2

    run_once(work())


def bits(*numbers: int) -> str:
    value = sum(1 << number for number in numbers)
    return b64encode(value.to_bytes(2, "little")).decode()


def test_many_are_acknowledged_at_once() -> None:
    async def work() -> None:
        async with running() as rig:
            await filled(rig, 10)
            answer = await rig.done(Request.POP_MESSAGE, pop_fields())
            ext = answer.ext
            ack = {
                "c": GROUP,
                "t": TOPIC,
                "r": "0",
                "so": 0,
                "q": 0,
                "rq": int(ext["reviveQid"]),
                "pt": int(ext["popTime"]),
                "it": 60_000,
                "b": bits(0, 9),
            }

            def body(**changes: object) -> bytes:
                return orjson.dumps({"brokerName": BROKER, "acks": [{**ack, **changes}]})

            asked = Request.BATCH_ACK_MESSAGE
            done = await rig.done(asked, body=body())
            assert not done.remark
            assert rig.broker.core.pops.state.in_flight == 8
            some = await rig.done(asked, body=body(b=bits(0, 1)))
            assert (some.remark or "").startswith("1 of 2 were refused, the first: offset 0 of")
            for changes, code in (
                ({"b": bits(0, 1)}, 208),
                ({"b": ""}, 208),
                ({"r": "1"}, 17),
                ({"r": "2"}, 1),
                ({"b": "?"}, 1),
                ({"b": "A" * 5000}, 1),
                ({"c": "others"}, 208),
                ({"q": 5}, 13),
                ({"pt": 1}, 208),
                ({"so": None}, 1),
            ):
                assert (await rig.refused(asked, body=body(**changes)))[0] == code, changes
            assert (await rig.refused(asked, body=b""))[0] == 1
            assert (await rig.refused(asked, body=b'{"acks":{}}'))[0] == 208
            other = orjson.dumps({"brokerName": "broker-z", "acks": [ack]})
            assert (await rig.refused(asked, body=other))[0] == 208
            assert rig.broker.core.pops.state.in_flight == 7

    run_once(work())


BAD_POPS: list[tuple[dict[str, object], int]] = [
    ({"maxMsgNums": 33}, 29),
    ({"maxMsgNums": 0}, 29),
    ({"invisibleTime": -1}, 29),
    ({"invisibleTime": 1 << 50}, 29),
    ({"queueId": 2}, 29),
    ({"topic": "none"}, 17),
    ({"exp": "a >", "expType": "SQL92"}, 23),
    ({"exp": "a", "expType": "XPATH"}, 23),
    ({"invisibleTime": "soon"}, 1),
]


@pytest.mark.parametrize(("changes", "code"), BAD_POPS)
def test_pops_that_are_refused(changes: dict[str, object], code: int) -> None:
    async def work() -> None:
        async with running() as rig:
            await filled(rig)
            found, remark = await rig.refused(Request.POP_MESSAGE, pop_fields(**changes))
            assert (found, bool(remark)) == (code, True)
            assert rig.broker.core.pops.state.in_flight == 0

    run_once(work())


BAD_TICKETS: list[tuple[dict[str, object], int]] = [
    ({"extraInfo": ""}, 1),
    ({"extraInfo": "0 1 2"}, 1),
    ({"extraInfo": "a b c d"}, 1),
    ({"extraInfo": "0 -1 2 3"}, 1),
    ({"extraInfo": "0 1 2 3 0 b 0 0 0 0"}, 1),
    ({"extraInfo": "0 1 2 3 0 b 0 0 x"}, 1),
    ({"extraInfo": "0 " * 4000}, 1),
    ({"extraInfo": "0 " + "9" * 300 + " 2 3"}, 1),
    ({"extraInfo": "0 1 60000 0"}, 208),
    ({"offset": 1}, 208),
    ({"offset": 7}, 208),
    ({"queueId": 1}, 208),
    ({"consumerGroup": "others"}, 208),
    ({"topic": "none"}, 17),
]


@pytest.mark.parametrize(("changes", "code"), BAD_TICKETS)
def test_tickets_that_are_refused(changes: dict[str, object], code: int) -> None:
    async def work() -> None:
        async with running() as rig:
            await filled(rig)
            answer = await rig.done(Request.POP_MESSAGE, pop_fields())
            fields = {**ticket(answer), **changes}
            assert (await rig.refused(Request.ACK_MESSAGE, fields))[0] == code
            fields["invisibleTime"] = 5_000
            refused = await rig.ask(Request.CHANGE_MESSAGE_INVISIBLETIME, fields)
            assert (refused.code, bool(refused.remark)) == (code, True)
            assert sorted(refused.ext) == ["invisibleTime", "popTime", "reviveQid"]
            assert rig.broker.core.pops.state.in_flight == 2

    run_once(work())


def test_queues_that_do_not_exist_have_rocketmqs_code() -> None:
    async def work() -> None:
        async with running() as rig:
            await filled(rig)
            fields = {**ticket(await rig.done(Request.POP_MESSAGE, pop_fields()))}
            fields |= {"queueId": 9}
            assert (await rig.refused(Request.ACK_MESSAGE, fields))[0] == 13
            fields |= {"extraInfo": "0 1 60000 0"}
            assert (await rig.refused(Request.ACK_MESSAGE, fields))[0] == 13

    run_once(work())


def test_order_over_the_wire() -> None:
    async def work() -> None:
        async with running() as rig:
            await filled(rig)
            fields = pop_fields(order="true", queueId=0, maxMsgNums=1)
            first = await rig.done(Request.POP_MESSAGE, fields)
            assert (first.ext["reviveQid"], first.ext["orderCountInfo"]) == ("999", "0 0 0")
            blocked = await rig.ask(Request.POP_MESSAGE, fields)
            assert blocked.code == Response.POLLING_TIMEOUT
            assert (blocked.ext["reviveQid"], blocked.ext["orderCountInfo"]) == ("999", "")
            changed = await rig.done(
                Request.CHANGE_MESSAGE_INVISIBLETIME, {**ticket(first), "invisibleTime": 20}
            )
            assert changed.ext["popTime"] == first.ext["popTime"]
            again = await rig.done(Request.POP_MESSAGE, {**fields, "pollTime": 20_000})
            assert again.ext["orderCountInfo"] == "0 qo0%0 1;0 0 1"
            await rig.done(Request.ACK_MESSAGE, ticket(again))
            assert await rig.committed(GROUP, TOPIC) == 1
            last = await rig.done(Request.POP_MESSAGE, fields)
            assert last.ext["msgOffsetInfo"] == "0 0 1"

    run_once(work())


def test_notices_peeks_and_a_rollback() -> None:
    async def work() -> None:
        async with running() as rig:
            await filled(rig, 0)
            fields = pop_fields()
            assert (await rig.done(Request.NOTIFICATION, fields)).ext["hasMsg"] == "false"
            assert (await rig.ask(Request.PEEK_MESSAGE, fields)).code == Response.PULL_NOT_FOUND
            await rig.send(TOPIC, b"1")
            assert (await rig.done(Request.NOTIFICATION, fields)).ext["hasMsg"] == "true"
            peeked = await rig.done(Request.PEEK_MESSAGE, fields)
            assert [bytes(entry.body) for entry in messages(peeked)] == [b"1"]
            assert peeked.ext["restNum"] == "1"
            await rig.done(Request.POP_ROLLBACK)
            assert rig.broker.core.pops.state.in_flight == 0

    run_once(work())


def test_deleting_topic_and_group_forgets_what_was_popped() -> None:
    async def work() -> None:
        async with running() as rig:
            core = rig.broker.core
            await filled(rig)
            answer = await rig.done(Request.POP_MESSAGE, pop_fields())
            await rig.done(
                Request.CHANGE_MESSAGE_INVISIBLETIME, {**ticket(answer), "invisibleTime": 0}
            )
            await until(lambda: core.topics.get("%RETRY%readers_orders") is not None)
            await rig.done(Request.DELETE_TOPIC_IN_BROKER, {"topic": TOPIC})
            await until(lambda: core.topics.get("%RETRY%readers_orders") is None)
            assert core.pops.state.in_flight == 0
            assert (await rig.refused(Request.ACK_MESSAGE, ticket(answer, 1)))[0] == 17
            await filled(rig, 1)
            assert len(messages(await rig.done(Request.POP_MESSAGE, pop_fields()))) == 1
            fields: dict[str, Any] = {"groupName": GROUP, "cleanOffset": "true"}
            await rig.done(Request.DELETE_SUBSCRIPTIONGROUP, fields)
            assert core.pops.state.in_flight == 0
            await rig.make_group(GROUP)
            assert len(messages(await rig.done(Request.POP_MESSAGE, pop_fields()))) == 1

    run_once(work())


def test_nobody_sends_to_the_revive_topic() -> None:
    async def work() -> None:
        async with running() as rig:
            code, _ = await rig.refused_send("rmq_sys_REVIVE_LOG_DefaultCluster")
            assert code == Response.NO_PERMISSION

    run_once(work())
