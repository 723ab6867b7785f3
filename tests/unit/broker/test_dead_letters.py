"""The desk for dead letters: pages, filters, and every letter sent again once."""

from __future__ import annotations

from unittest import mock

import orjson
import pytest

from sluice.broker import dead_letters, retry_notes
from sluice.broker.dead_letters import ALREADY, FAILED, MISSING, RESENT, Filter, Letter, Outcome
from sluice.broker.topics import TopicSettings
from sluice.errors import DiskFull, NoPermission, ParameterInvalid, SluiceError, TopicMissing
from sluice.link import RemotingLink
from sluice.model import message_id
from sluice.protocol import records
from sluice.protocol.remoting import BINARY, JSON
from sluice.protocol.remoting_codes import RequestCode as Request
from sluice.protocol.remoting_codes import ResponseCode as Response
from tests.unit.broker.broker_kit import Rig, running, send_fields
from tests.unit.broker.retry_kit import HOST, Broker, value
from tests.unit.loops import run_once


@pytest.fixture
def broker() -> Broker:
    broker = Broker()
    broker.make()
    return broker


def kill(broker: Broker, count: int, **properties: str) -> None:
    """Messages become dead letters, one in every second."""
    for number in range(count):
        broker.now_ms += 1_000
        placed = broker.send(key=f"U{number}", KEYS=f"order-{number} all", **properties)
        broker.send_back(placed.position, -1)


def page(
    broker: Broker, offset: int = 0, count: int = 100, wanted: Filter | None = None
) -> tuple[list[Letter], int, int]:
    told: list[tuple[list[Letter] | None, int, int, SluiceError | None]] = []
    broker.core.dead_letters.page(
        "g", 0, offset, count, wanted or Filter(), lambda *answer: told.append(answer)
    )
    ((letters, next_offset, end, error),) = told
    if letters is None:
        assert error is not None
        raise error
    return letters, next_offset, end


def resend(broker: Broker, *offsets: int, to_topic: bool = False) -> list[Outcome]:
    told: list[tuple[list[Outcome] | None, SluiceError | None]] = []
    broker.core.dead_letters.resend(
        "g", 0, list(offsets), to_topic=to_topic, done=lambda *answer: told.append(answer)
    )
    broker.settle()
    ((outcomes, error),) = told
    if outcomes is None:
        assert error is not None
        raise error
    return outcomes


def said(outcomes: list[Outcome]) -> list[tuple[int, str]]:
    return [(outcome.offset, outcome.outcome) for outcome in outcomes]


# ------------------------------------------------------------------------------------------ looking


def test_a_letter_says_where_it_came_from(broker: Broker) -> None:
    placed = broker.send(key="U0", KEYS="order-0", TAGS="TagA")
    broker.send_back(placed.position, -1)
    (letter,), next_offset, end = page(broker)
    assert (next_offset, end) == (1, 1)
    row = letter.to_json()
    assert row == {
        "offset": 0,
        "queueId": 0,
        "msgId": message_id(HOST, letter.entry.position),
        "uniqKey": "U0",
        "keys": "order-0",
        "tags": "TagA",
        "originTopic": "orders",
        "originMsgId": message_id(HOST, placed.position),
        "originQueueId": 0,
        "originOffset": 0,
        "bornTimestamp": broker.now_ms,
        "deadTimestamp": broker.now_ms,
        "reconsumeTimes": 1,
        "bodyBytes": 4,
        "resent": False,
    }


def test_pages_reach_every_letter(broker: Broker) -> None:
    kill(broker, 25)
    offset, found = 0, []
    while True:
        letters, offset, end = page(broker, offset, 10)
        found += [letter.entry.queue_offset for letter in letters]
        if offset >= end:
            break
    assert found == list(range(25))
    assert page(broker, 25)[0] == []
    assert page(broker, 10**12)[0] == []


def test_letters_are_chosen_by_time_key_and_topic(broker: Broker) -> None:
    begin_ms = broker.now_ms
    kill(broker, 10)

    def offsets(**wanted: object) -> list[int]:
        letters, _, _ = page(broker, wanted=Filter(**wanted))  # type: ignore[arg-type]
        return [letter.entry.queue_offset for letter in letters]

    assert offsets(begin_ms=begin_ms + 3_000, end_ms=begin_ms + 5_000) == [2, 3, 4]
    assert offsets(begin_ms=begin_ms + 3_001) == list(range(3, 10))
    assert offsets(key="order-7") == [7]
    assert offsets(key="U7") == [7]
    assert offsets(key="all") == list(range(10))
    assert offsets(key="order-77") == []
    assert offsets(origin_topic="orders") == list(range(10))
    assert offsets(origin_topic="payroll") == []


def test_where_there_are_no_letters(broker: Broker) -> None:
    with pytest.raises(TopicMissing, match="no dead letters"):
        page(broker)
    kill(broker, 1)
    for count in (0, -1, dead_letters.PAGE_MAX + 1):
        with pytest.raises(ParameterInvalid, match="maxNum"):
            page(broker, 0, count)
    with pytest.raises(ParameterInvalid, match="queueId"):
        broker.core.dead_letters.page("g", 1, 0, 1, Filter(), lambda *_: None)


# ------------------------------------------------------------------------------------------ sending


def test_a_letter_goes_back_to_its_group_and_counts_from_the_beginning(broker: Broker) -> None:
    kill(broker, 2)
    (outcome,) = resend(broker, 1)
    assert outcome.outcome == RESENT
    (copy,) = broker.entries("%RETRY%g")
    assert outcome.message_id == message_id(HOST, copy.position)
    assert copy.reconsume_times == 0
    assert (value(copy, "RETRY_TOPIC"), value(copy, "UNIQ_KEY")) == ("orders", "U1")
    assert value(copy, "ORIGIN_QUEUE_OFFSET") == "1"
    assert (value(copy, "DELAY"), value(copy, "DLQ_ORIGIN_TOPIC")) == (None, None)
    assert copy.prepared_offset == broker.dead()[1].position
    assert [letter.resent for letter in page(broker)[0]] == [False, True]
    broker.send_back(copy.position)
    assert value(broker.copies()[0], "DELAY") == "3", "tried again as if it were new"


def test_twice_is_once(broker: Broker) -> None:
    kill(broker, 3)
    assert said(resend(broker, 0, 2)) == [(0, RESENT), (2, RESENT)]
    assert said(resend(broker, 0, 1, 2)) == [(0, ALREADY), (1, RESENT), (2, ALREADY)]
    assert said(resend(broker, 1, to_topic=True)) == [(1, ALREADY)]
    assert len(broker.entries("%RETRY%g")) == 3


def test_the_same_letter_twice_in_one_request(broker: Broker) -> None:
    kill(broker, 1)
    assert said(resend(broker, 0, 0)) == [(0, RESENT), (0, ALREADY)]
    assert len(broker.entries("%RETRY%g")) == 1


def test_twice_is_once_also_after_a_kill(broker: Broker) -> None:
    kill(broker, 4)
    resend(broker, 0)
    broker = broker.restarted()
    assert said(resend(broker, 0, 1)) == [(0, ALREADY), (1, RESENT)]
    with mock.patch.object(retry_notes, "_WALK_BYTES", 0):
        broker.run(2_000)
    with mock.patch.object(retry_notes, "made_since", return_value=[]):
        broker = broker.restarted()
    assert said(resend(broker, 0, 1, 2)) == [(0, ALREADY), (1, ALREADY), (2, RESENT)]
    assert len(broker.entries("%RETRY%g")) == 3


def test_a_letter_goes_back_to_its_topic_and_queue(broker: Broker) -> None:
    kill(broker, 1)
    assert said(resend(broker, 0, to_topic=True)) == [(0, RESENT)]
    first, second = broker.entries("orders")
    assert (second.queue_id, second.reconsume_times) == (first.queue_id, 0)
    assert bytes(second.body) == bytes(first.body)
    for name in ("RETRY_TOPIC", "ORIGIN_MESSAGE_ID", "DLQ_ORIGIN_TOPIC", "ORIGIN_QUEUE_ID"):
        assert value(second, name) is None
    broker = broker.restarted()
    assert said(resend(broker, 0, to_topic=True)) == [(0, ALREADY)]


def test_a_topic_that_is_gone_or_closed(broker: Broker) -> None:
    kill(broker, 2)
    broker.core.topics.put([TopicSettings("orders", 2, 2, perm=4)])
    (closed,) = resend(broker, 0, to_topic=True)
    assert (closed.outcome, "forbidden" in closed.remark) == (FAILED, True)
    broker.core.topics.delete("orders")
    broker.core.ask_turn()
    broker.settle()
    (gone,) = resend(broker, 1, to_topic=True)
    assert (gone.outcome, "not exist" in gone.remark) == (FAILED, True)
    assert said(resend(broker, 0, 1)) == [(0, RESENT), (1, RESENT)]


def test_letters_that_are_not_there(broker: Broker) -> None:
    kill(broker, 1)
    assert said(resend(broker, -1, 0, 1, 2**62)) == [
        (-1, MISSING),
        (0, RESENT),
        (1, MISSING),
        (2**62, MISSING),
    ]


def test_what_could_not_be_written_can_be_sent_again(broker: Broker) -> None:
    kill(broker, 1)
    with mock.patch.object(broker.core.store.log, "write", side_effect=DiskFull("no room")):
        assert said(resend(broker, 0, 0)) == [(0, FAILED), (0, FAILED)]
    broker.core.store.log.unstage()
    assert said(resend(broker, 0)) == [(0, RESENT)]


def test_limits_of_a_request(broker: Broker) -> None:
    kill(broker, 1)
    with pytest.raises(ParameterInvalid, match="0 dead letters"):
        resend(broker)
    with pytest.raises(ParameterInvalid, match="257 dead letters"):
        resend(broker, *range(257))
    broker.core.config = mock.Mock(wraps=broker.core.config, permission="r", broker_name="a")
    with pytest.raises(NoPermission):
        resend(broker, 0)


def test_notes_of_letters_have_a_bound(broker: Broker) -> None:
    kill(broker, 4)
    with mock.patch.object(retry_notes, "DEAD_RANGES_MAX", 1):
        first, second, third = resend(broker, 0, 2, 1)
    assert (first.outcome, second.outcome, third.outcome) == (RESENT, FAILED, RESENT)
    assert "no neighbours" in second.remark
    assert len(broker.entries("%RETRY%g")) == 2


def test_notes_go_with_the_letters(broker: Broker) -> None:
    kill(broker, 1)
    resend(broker, 0)
    broker.core.topics.delete("%DLQ%g")
    broker.core.ask_turn()
    broker.run(2_000)
    kill(broker, 1)
    assert said(resend(broker, 0)) == [(0, RESENT)]


# --------------------------------------------------------------------------------------- the wire


async def send_back(
    rig: Rig, message_id: str, level: int = -1, **changes: object
) -> tuple[int, str]:
    position = int(message_id[16:], 16)
    fields = {"group": "readers", "offset": position, "delayLevel": level, "originTopic": "orders"}
    answer = await rig.ask(Request.CONSUMER_SEND_MSG_BACK, {**fields, **changes})
    return answer.code, answer.remark or ""


def test_the_requests_over_the_wire() -> None:
    async def work() -> None:
        async with running() as rig:
            await rig.make_topic("orders")
            await rig.make_group("readers")
            for _ in range(3):
                sent = await rig.send("orders", key="A", TAGS="TagA")
                assert await send_back(rig, sent["msgId"]) == (Response.SUCCESS, "")
                assert await send_back(rig, sent["msgId"]) == (Response.SUCCESS, "")
            fields = {"group": "readers", "queueId": 0, "offset": 0, "maxNum": 2}
            answer = await rig.done(Request.SLUICE_LIST_DEAD_LETTERS, fields)
            assert answer.ext == {"nextOffset": "2", "maxOffset": "3"}
            rows = orjson.loads(answer.body)["letters"]
            assert [(row["offset"], row["tags"], row["resent"]) for row in rows] == [
                (0, "TagA", False),
                (1, "TagA", False),
            ]
            target = {"group": "readers", "queueId": 0}
            for expected in ("resent", "already resent"):
                body = orjson.dumps({"offsets": [0, 2]})
                answer = await rig.done(Request.SLUICE_RESEND_DEAD_LETTERS, target, body)
                outcomes = orjson.loads(answer.body)["outcomes"]
                assert [(row["offset"], row["outcome"]) for row in outcomes] == [
                    (0, expected),
                    (2, expected),
                ]
            pulled = await rig.pull("%RETRY%readers", 0)
            first = records.decode(pulled.body)
            assert (first.topic, first.reconsume_times) == ("%RETRY%readers", 0)

    run_once(work())


@pytest.mark.parametrize("body", [b"", b"[]", b"{}", b'{"offsets":3}', b'{"offsets":["1"]}'])
def test_a_body_that_makes_no_sense(body: bytes) -> None:
    async def work() -> None:
        async with running() as rig:
            target = {"group": "readers", "queueId": 0}
            code, remark = await rig.refused(Request.SLUICE_RESEND_DEAD_LETTERS, target, body)
            assert code == Response.SYSTEM_ERROR
            assert "offsets" in remark

    run_once(work())


def test_refusals_over_the_wire() -> None:
    async def work() -> None:
        async with running(auto_create_groups=False) as rig:
            await rig.make_topic("orders")
            sent = (await rig.send("orders"))["msgId"]
            assert (await send_back(rig, sent))[0] == Response.SUBSCRIPTION_GROUP_NOT_EXIST
            await rig.make_group("readers")
            code, remark = await send_back(rig, "0" * 32)
            assert (code, remark) == (
                Response.SYSTEM_ERROR,
                "look message by offset failed, 0",
            ) or (
                code == Response.INVALID_PARAMETER  # an entry of the broker's own begins there
            )
            code, remark = await send_back(rig, sent, offset=2**40)
            assert (code, remark) == (1, f"look message by offset failed, {2**40}")
            code, remark = await send_back(rig, sent, maxReconsumeTimes=-1)
            assert (code, "maxReconsumeTimes -1" in remark) == (Response.INVALID_PARAMETER, True)
            code, remark = await send_back(rig, sent, originTopic="payroll")
            assert (code, "not of payroll" in remark) == (Response.INVALID_PARAMETER, True)
            assert (await send_back(rig, sent, delayLevel="soon"))[0] == Response.SYSTEM_ERROR
            assert (await rig.pull("%DLQ%readers", 0)).code == Response.TOPIC_NOT_EXIST

    run_once(work())


@pytest.mark.parametrize("serialization", [JSON, BINARY])
def test_tries_of_a_message_that_was_never_tried_are_not_believed(serialization: int) -> None:
    async def work() -> None:
        async with running() as rig:
            await rig.make_topic("orders")
            await rig.make_group("readers")
            link = await RemotingLink.open(rig.broker.address, serialization=serialization)
            fields = {**send_fields("orders", UNIQ_KEY="U1"), "j": 16, "k": "false", "m": "false"}
            for more in ({}, {"l": 1}):
                answer = await rig.ask(
                    Request.SEND_MESSAGE_V2, {**fields, **more}, b"hello", link=link
                )
                assert answer.code == Response.SUCCESS
            await link.close()
            body = bytes((await rig.pull("orders", 0)).body)
            first = records.decode(body)
            second = records.decode(body, first.size)
            assert (first.reconsume_times, second.reconsume_times) == (0, 0)

    run_once(work())
