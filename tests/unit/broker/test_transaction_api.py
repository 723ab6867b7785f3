"""Transactions over the wire: the answer of a send, ends, questions, and administrators."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from functools import wraps
from typing import Any, ParamSpec

import pytest

from sluice.link import RemotingLink
from sluice.protocol import records
from sluice.protocol import remoting_clients as bodies
from sluice.protocol.remoting import RemotingCommand
from sluice.protocol.remoting_codes import RequestCode as Request
from sluice.protocol.remoting_codes import ResponseCode as Response
from sluice.protocol.remoting_transactions import OpenHalf, read_open_halves
from tests.unit.broker.broker_kit import Rig, running, send_fields
from tests.unit.loops import run_once

P = ParamSpec("P")

GROUP = "shop"
FAST = {"transaction_timeout_ms": 50, "transaction_check_interval_ms": 100}


def served(test: Callable[P, Coroutine[Any, Any, None]]) -> Callable[P, None]:
    """Run a test on an event loop."""

    @wraps(test)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        run_once(test(*args, **kwargs))

    return run


async def begin(
    rig: Rig, topic: str = "orders", queue_id: int = 1, /, **changes: str
) -> dict[str, str]:
    """Send a half message; the fields of its answer."""
    properties = {"TRAN_MSG": "true", "PGROUP": GROUP, "UNIQ_KEY": "U1", **changes}
    fields = {**send_fields(topic, queue_id, **properties), "f": 4}
    return (await rig.done(Request.SEND_MESSAGE_V2, fields, b"body")).ext


def ending(sent: dict[str, str], verdict: int = 8, /, **changes: object) -> dict[str, object]:
    return {
        "topic": "orders",
        "producerGroup": GROUP,
        "tranStateTableOffset": sent["queueOffset"],
        "commitLogOffset": int(sent["msgId"][-16:], 16),
        "commitOrRollback": verdict,
        "fromTransactionCheck": "false",
        "msgId": sent["transactionId"],
        "transactionId": sent["transactionId"],
        **changes,
    }


async def heartbeat(rig: Rig, link: RemotingLink, *groups: str) -> None:
    body = bodies.write_heartbeat(bodies.Heartbeat("producer-1", groups, ()))
    assert (await rig.ask(Request.HEART_BEAT, body=body, link=link)).code == Response.SUCCESS


async def listed(rig: Rig, **fields: object) -> tuple[dict[str, str], list[OpenHalf]]:
    answer = await rig.done(Request.SLUICE_LIST_TRANSACTIONS, fields)
    return answer.ext, read_open_halves(answer.body)


@served
async def test_a_transaction_over_the_wire() -> None:
    async with running() as rig:
        await rig.make_topic("orders")
        sent = await begin(rig)
        assert (sent["queueId"], sent["queueOffset"], sent["transactionId"]) == ("1", "0", "U1")
        assert (await rig.pull("orders", 0, 1)).code == Response.PULL_NOT_FOUND
        await rig.done(Request.END_TRANSACTION, ending(sent))
        answer = await rig.pull("orders", 0, 1)
        assert answer.code == Response.SUCCESS
        entry = records.decode(bytes(answer.body))
        assert bytes(entry.body) == b"body"
        await rig.done(Request.END_TRANSACTION, ending(sent))  # again
        code, remark = await rig.refused(Request.END_TRANSACTION, ending(sent, 12))
        assert (code, remark) == (
            604,
            "the transaction was committed before, so it cannot be rolled back; "
            "the first word counts",
        )
        assert (await rig.pull("orders", 1, 1)).code == Response.PULL_NOT_FOUND


@pytest.mark.parametrize(
    ("changes", "code", "text"),
    [
        ({"producerGroup": "thieves"}, 1, "The producer group wrong"),
        ({"tranStateTableOffset": 3}, 1, "The transaction state table offset wrong"),
        ({"commitLogOffset": 7}, 1, "Find prepared transaction message failed"),
        ({"commitLogOffset": -1}, 1, "Find prepared transaction message failed"),
        ({"commitOrRollback": 4}, 29, "commitOrRollback is 4"),
        ({"commitOrRollback": "x"}, 1, "the custom field <commitOrRollback> is no int32"),
    ],
)
@served
async def test_a_bad_end_is_refused(changes: dict[str, object], code: int, text: str) -> None:
    async with running() as rig:
        await rig.make_topic("orders")
        sent = await begin(rig)
        found = await rig.refused(Request.END_TRANSACTION, ending(sent, **changes))
        assert found[0] == code
        assert found[1].startswith(text)
        assert (await rig.pull("orders", 0, 1)).code == Response.PULL_NOT_FOUND
        await rig.done(Request.END_TRANSACTION, ending(sent, 0))
        assert len((await listed(rig))[1]) == 1


@served
async def test_an_end_that_wants_no_answer_gets_none() -> None:
    async with running() as rig:
        await rig.make_topic("orders")
        sent = await begin(rig)
        fields = {name: str(value) for name, value in ending(sent, producerGroup="x").items()}
        rig.link.oneway(Request.END_TRANSACTION, fields)
        # Requests of one connection are served in order.
        assert (await rig.ask(Request.END_TRANSACTION, ending(sent))).code == Response.SUCCESS


@served
async def test_a_producer_is_asked_and_its_word_ends_the_transaction() -> None:
    questions: asyncio.Queue[RemotingCommand] = asyncio.Queue()
    async with running(**FAST) as rig:
        await rig.make_topic("orders")
        sent = await begin(rig)
        producer = await rig.connect(lambda _, command: questions.put_nowait(command))
        await heartbeat(rig, producer, GROUP, "another")
        question = await asyncio.wait_for(questions.get(), 30)
        assert question.code == Request.CHECK_TRANSACTION_STATE
        assert question.is_oneway
        place = int(sent["msgId"][-16:], 16)
        assert question.ext == {
            "topic": "RMQ_SYS_TRANS_HALF_TOPIC",
            "tranStateTableOffset": "0",
            "commitLogOffset": str(place),
            "msgId": "U1",
            "transactionId": "U1",
            "offsetMsgId": sent["msgId"],
            "bname": "broker-a",
        }
        entry = records.decode(bytes(question.body))
        assert (entry.topic, entry.queue_id, bytes(entry.body)) == ("orders", 1, b"body")
        properties = records.parse_properties(entry.properties)
        assert properties["TRANSACTION_CHECK_TIMES"] == "1"
        assert (properties["PGROUP"], properties["UNIQ_KEY"]) == (GROUP, "U1")
        again = await asyncio.wait_for(questions.get(), 30)
        properties = records.parse_properties(records.decode(bytes(again.body)).properties)
        assert properties["TRANSACTION_CHECK_TIMES"] == "2"
        await rig.done(Request.END_TRANSACTION, ending(sent, fromTransactionCheck="true"))
        assert (await rig.pull("orders", 0, 1)).code == Response.SUCCESS
        assert (await listed(rig))[1] == []


@served
async def test_open_transactions_are_listed_with_the_reason() -> None:
    async with running() as rig:
        await rig.make_topic("orders")
        await rig.make_topic("bills")
        sent = [await begin(rig, UNIQ_KEY=f"U{number}") for number in range(5)]
        await begin(rig, "bills", 0, UNIQ_KEY="B", PGROUP="till")
        await rig.done(Request.END_TRANSACTION, ending(sent[2]))
        ext, rows = await listed(rig)
        assert ext == {"nextOffset": "-1", "openCount": "5"}
        assert [row.transaction_id for row in rows] == ["U0", "U1", "U3", "U4", "B"]
        assert rows[0].message_id == sent[0]["msgId"]
        last = rows[-1]
        assert (last.topic, last.producer_group, last.queue_id) == ("bills", "till", 0)
        assert (last.check_times, last.next_check_ms) == (0, -1)
        assert last.waits_for == "no producer of group till is connected"
        ext, rows = await listed(rig, maxNum=2, offset=1)
        assert [row.transaction_id for row in rows] == ["U1", "U3"]
        ext, rows = await listed(rig, maxNum=2, offset=ext["nextOffset"])
        assert [row.transaction_id for row in rows] == ["U4", "B"]
        assert [row.transaction_id for row in (await listed(rig, group="till"))[1]] == ["B"]
        assert len((await listed(rig, topic="orders"))[1]) == 4
        assert (await listed(rig, topic="orders", group="till"))[1] == []
        assert (await listed(rig, offset=-5, maxNum=-1))[0]["nextOffset"] == "1"


@served
async def test_a_parked_one_is_resumed_by_its_id() -> None:
    async with running(**FAST, transaction_check_count_max=1) as rig:
        await rig.make_topic("orders")
        await begin(rig)
        questions: asyncio.Queue[RemotingCommand] = asyncio.Queue()
        producer = await rig.connect(lambda _, command: questions.put_nowait(command))
        await heartbeat(rig, producer, GROUP)
        await asyncio.wait_for(questions.get(), 30)
        parked: Any = None
        while parked is None or parked.code != Response.SUCCESS:
            await asyncio.sleep(0.02)
            parked = await rig.pull("TRANS_CHECK_MAX_TIME_TOPIC", 0)
        entry = records.decode(bytes(parked.body))
        store_host = rig.broker.store.encoder.store_host
        message_id = (store_host + entry.position.to_bytes(8, "big")).hex().upper()
        for bad in ("", "xyz", "7F", message_id[:-1] + "Z"):
            fields = {"topic": "orders", "msgId": bad}
            code, remark = await rig.refused(Request.RESUME_CHECK_HALF_MESSAGE, fields)
            assert (code, "is not the id of a stored message" in remark) == (1, True)
        fields = {"topic": "orders", "msgId": message_id}
        await rig.done(Request.RESUME_CHECK_HALF_MESSAGE, fields)
        question = await asyncio.wait_for(questions.get(), 30)
        again = {
            "tranStateTableOffset": question.ext["tranStateTableOffset"],
            "commitLogOffset": question.ext["commitLogOffset"],
        }
        sent = {"queueOffset": "0", "msgId": message_id, "transactionId": "U1"}
        await rig.done(Request.END_TRANSACTION, ending(sent, **again))
        assert (await rig.pull("orders", 0, 1)).code == Response.SUCCESS
        code, _ = await rig.refused(Request.RESUME_CHECK_HALF_MESSAGE, fields)
        assert code == 604


@served
async def test_transactions_are_not_taken_in_a_batch() -> None:
    async with running() as rig:
        await rig.make_topic("orders")
        fields = {**send_fields("orders"), "f": 4, "m": "true"}
        part = b"TRAN_MSG\x01true\x02PGROUP\x01shop\x02"
        size = 4 + 4 + 4 + 4 + 4 + 1 + 2 + len(part)
        body = size.to_bytes(4, "big") + bytes(12) + (1).to_bytes(4, "big") + b"x"
        body += len(part).to_bytes(2, "big") + part
        for flag in (4, 0):
            code, remark = await rig.refused(
                Request.SEND_BATCH_MESSAGE, {**fields, "f": flag}, body
            )
            assert (code, "transactional messages are not taken in a batch" in remark) == (13, True)
