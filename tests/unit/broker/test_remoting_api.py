"""The clients' door, and above all what it does with requests that make no sense."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import pytest

from sluice.protocol.message_batches import join_batch
from sluice.protocol.remoting_codes import RequestCode as Request
from sluice.protocol.remoting_codes import ResponseCode as Response
from sluice.storage.memory_files import MemoryFiles
from tests.unit.broker.broker_kit import (
    FLAG_SUBSCRIPTION,
    FLAG_SUSPEND,
    offset_fields,
    pull_fields,
    running,
    send_fields,
    topic_fields,
)
from tests.unit.loops import run_once, until

SEND = Request.SEND_MESSAGE_V2
BATCH = Request.SEND_BATCH_MESSAGE
# The last one alone would be harmless.
DELAYED = join_batch([(0, b"later", b"DELAY\x013\x02"), (0, b"now", b"DELAY\x010\x02")])
PULL = Request.PULL_MESSAGE
COMMIT = Request.UPDATE_CONSUMER_OFFSET


def without(fields: dict[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in fields.items() if key != name}


PULLS = pull_fields("orders", 0, 0, "readers", FLAG_SUBSCRIPTION)
COMMITS = {**offset_fields("readers", "orders", 0), "commitOffset": 1}

BAD_REQUESTS: list[tuple[int, dict[str, Any], bytes, int, str]] = [
    (9999, {}, b"", 3, " request type 9999 not supported"),
    (Request.GET_TOPIC_NAME_LIST, {}, b"", 3, " request type 23 not supported"),
    (SEND, without(send_fields("orders"), "b"), b"x", 1, "the custom field <b> is null"),
    (SEND, send_fields("orders") | {"e": "one"}, b"x", 1, "the custom field <e> is no int32"),
    (SEND, send_fields("or ders"), b"x", 29, "contains illegal characters"),
    (SEND, send_fields("SCHEDULE_TOPIC_XXXX"), b"x", 16, "is forbidden"),
    (SEND, send_fields("orders", 77), b"x", 29, "request queueId[77] is illegal"),
    (SEND, send_fields("orders"), b"x" * (64 * 1024 + 1), 13, "over the limit of 65536"),
    (SEND, send_fields("closed"), b"x", 16, "Sending message to topic[closed] is forbidden."),
    (SEND, send_fields("fresh") | {"c": "orders"}, b"x", 17, "topic[fresh] not exist"),
    (SEND, send_fields("orders", DELAY="-3"), b"x", 13, "delay level '-3' is not"),
    (BATCH, send_fields("orders"), DELAYED, 13, "a batch cannot hold delayed messages"),
    (BATCH, send_fields("orders") | {"f": 4}, DELAYED, 13, "transactional messages are not"),
    (BATCH, send_fields("orders"), DELAYED[:-1], 13, "does not fit into its size"),
    (SEND, send_fields("orders") | {"f": 4}, b"x", 13, "its property TRAN_MSG does not"),
    (PULL, without(PULLS, "subVersion"), b"", 1, "the custom field <subVersion> is null"),
    (PULL, PULLS | {"queueOffset": "x"}, b"", 1, "the custom field <queueOffset> is no int64"),
    (PULL, PULLS | {"topic": "none"}, b"", 17, "topic[none] not exist, apply first please!"),
    (PULL, PULLS | {"topic": "closed"}, b"", 16, "the topic[closed] pulling message is forbidden"),
    (PULL, PULLS | {"queueId": 2}, b"", 29, "queueId[2] is illegal, topic:[orders]"),
    (PULL, PULLS | {"queueId": -1}, b"", 29, "queueId[-1] is illegal"),
    (PULL, PULLS | {"consumerGroup": "a b"}, b"", 26, "contains illegal characters"),
    (PULL, PULLS | {"sysFlag": 0}, b"", 24, "the consumer's group info not exist"),
    (PULL, PULLS | {"subscription": "||"}, b"", 23, "names no tag"),
    (PULL, PULLS | {"expressionType": "SQL92"}, b"", 23, "wrong at character 1"),
    (PULL, PULLS | {"expressionType": "Groovy"}, b"", 23, "filters of type 'Groovy' are not known"),
    (PULL, PULLS | {"queueOffset": 9}, b"", 21, "OFFSET_OVERFLOW_BADLY"),
    (PULL, PULLS | {"queueOffset": -1}, b"", 21, "OFFSET_TOO_SMALL"),
    (COMMIT, COMMITS | {"consumerGroup": "none"}, b"", 26, "Group none not exist!"),
    (COMMIT, COMMITS | {"topic": "none"}, b"", 17, "Topic none not exist!"),
    (COMMIT, COMMITS | {"queueId": 2}, b"", 29, "queueId[2] is illegal"),
    (COMMIT, COMMITS | {"commitOffset": -5}, b"", 29, "cannot be committed"),
    (Request.QUERY_CONSUMER_OFFSET, offset_fields("new", "orders", 1), b"", 22, "Not found"),
    (Request.HEART_BEAT, {}, b"{", 1, "the body is not JSON"),
    (Request.HEART_BEAT, {}, b"{}", 1, "clientID is missing or no text"),
    (Request.LOCK_BATCH_MQ, {}, b'{"clientId":"c"}', 1, "consumerGroup is missing"),
    (Request.GET_CONSUMER_LIST_BY_GROUP, {"consumerGroup": "x"}, b"", 1, "no consumer for this"),
    (Request.VIEW_MESSAGE_BY_ID, {"offset": 1 << 50}, b"", 1, "can not find message by the offset"),
]


@pytest.mark.parametrize(
    ("code", "fields", "body", "expected", "remark"), BAD_REQUESTS, ids=range(len(BAD_REQUESTS))
)
def test_what_cannot_be_done_is_answered_as_clients_know_it(
    code: int, fields: dict[str, Any], body: bytes, expected: int, remark: str
) -> None:
    async def work() -> None:
        async with running() as rig:
            await rig.make_topic("orders")
            await rig.make_topic("closed", perm=0)
            await rig.make_group("readers")
            await rig.send("orders")
            stored = rig.broker.core.stats.put
            found = await rig.refused(code, fields, body)
            assert found[0] == expected
            assert remark in found[1]
            # The connection and the broker go on as if nothing had happened.
            assert (await rig.pull("orders", 0)).code == Response.SUCCESS
            assert rig.broker.core.stats.put == stored

    run_once(work())


def test_who_wants_no_answer_gets_none_not_even_an_error() -> None:
    async def work() -> None:
        async with running() as rig:
            seen: list[int] = []
            link = await rig.connect(lambda link, request: seen.append(request.code))
            link.oneway(9999)
            link.oneway(COMMIT, {"topic": "none"})
            link.oneway(PULL, {name: str(value) for name, value in PULLS.items()})
            link.oneway(Request.UPDATE_AND_CREATE_TOPIC, {"topic": "x"})
            fields = {name: str(value) for name, value in topic_fields("made").items()}
            link.oneway(Request.UPDATE_AND_CREATE_TOPIC, fields)
            # Answers come in order of the work: whatever was to come came before this one.
            answer = await rig.ask(Request.GET_BROKER_CONFIG, link=link)
            assert answer.code == Response.SUCCESS
            await until(lambda: rig.broker.core.topics.get("made") is not None)
            assert link.waiting_count == 0
            assert seen == []

    run_once(work())


def test_a_message_is_sent_found_and_read() -> None:
    async def work() -> None:
        async with running() as rig:
            sent = await rig.send("auto-made", b"one", KEYS="k1", TAGS="TagA")
            assert (sent["queueOffset"], sent["queueId"]) == ("0", "0")
            pulled = await rig.pull("auto-made", 0)
            assert pulled.code == Response.SUCCESS
            assert b"one" in bytes(pulled.body)
            assert pulled.ext["nextBeginOffset"] == "1"
            position = int(sent["msgId"][16:], 16)
            viewed = await rig.done(Request.VIEW_MESSAGE_BY_ID, {"offset": position})
            assert bytes(viewed.body) == bytes(pulled.body)
            nothing = await rig.pull("auto-made", 0, subscription="TagB")
            assert (nothing.code, nothing.ext["nextBeginOffset"]) == (
                Response.PULL_RETRY_IMMEDIATELY,
                "1",
            )

    run_once(work())


def test_a_damaged_message_is_called_damaged_and_not_missing() -> None:
    async def work() -> None:
        files = MemoryFiles()
        async with running(files=files) as rig:
            sent = await rig.send("orders-made", b"one", KEYS="k1")
            position = int(sent["msgId"][16:], 16)
            path = f"/store/commitlog/{0:020d}"
            files.flip(path, (position + 90) * 8)
            files.flip(path, 90 * 8)  # and the first entry of all, whose time is told
            code, remark = await rig.refused(Request.VIEW_MESSAGE_BY_ID, {"offset": position})
            assert code == Response.SYSTEM_ERROR
            assert remark.startswith(f"{path}: at byte {position}: the whole-message checksum")
            asked = {"topic": "orders-made", "key": "k1", "maxNum": 8, "beginTimestamp": 0}
            asked["endTimestamp"] = 1 << 50
            _, remark = await rig.refused(Request.QUERY_MESSAGE, asked)
            assert remark.startswith(f"{path}: at byte {position}: the whole-message checksum")
            table = (await rig.json(Request.GET_BROKER_RUNTIME_INFO))["table"]
            assert table["earliestMessageTimeStamp"] == "-1"

    run_once(work())


def test_messages_are_found_by_key_unique_key_and_tag() -> None:
    async def work() -> None:
        async with running() as rig:
            await rig.make_topic("orders")
            for number in range(3):
                tag = "TagB" if number == 1 else "TagA"
                await rig.send("orders", KEYS=f"k{number} all", UNIQ_KEY=f"U{number}", TAGS=tag)
            fields = {"topic": "orders", "maxNum": 32, "beginTimestamp": 0, "endTimestamp": 1 << 62}

            async def found(key: str, **changes: str) -> list[str]:
                asked = {**fields, "key": key, **changes}
                body = bytes((await rig.done(Request.QUERY_MESSAGE, asked)).body)
                return sorted(re.findall(r"UNIQ_KEY\x01(U\d)", body.decode("latin-1")))

            assert await found("k1") == ["U1"]
            assert await found("all") == ["U0", "U1", "U2"]
            assert await found("U2", _UNIQUE_KEY_QUERY="true") == ["U2"]
            assert await found("TagA", indexType="T") == ["U0", "U2"]
            assert await found("all", maxNum="1") == ["U2"]  # the newest
            missing = await rig.ask(Request.QUERY_MESSAGE, {**fields, "key": "TagA"})
            assert missing.code == Response.QUERY_NOT_FOUND
            assert set(missing.ext) == {"indexLastUpdateTimestamp", "indexLastUpdatePhyoffset"}

    run_once(work())


def test_a_pull_waits_for_a_message_that_it_wants() -> None:
    async def work() -> None:
        async with running() as rig:
            await rig.make_topic("orders")
            flags = FLAG_SUBSCRIPTION | FLAG_SUSPEND
            link = await rig.connect()
            waits = asyncio.create_task(
                rig.pull("orders", 0, flags=flags, subscription="TagB", link=link)
            )
            await until(lambda: rig.broker.core.polls.held_count == 1)
            await rig.send("orders", TAGS="TagA")
            assert rig.broker.core.polls.held_count == 1
            await rig.send("orders", TAGS="TagB")
            found = await waits
            assert found.code == Response.SUCCESS
            assert found.ext["nextBeginOffset"] == "2"

    run_once(work())


def test_a_pull_that_waits_is_answered_when_the_broker_stops() -> None:
    async def work() -> None:
        async with running() as rig:
            await rig.make_topic("orders")
            flags = FLAG_SUBSCRIPTION | FLAG_SUSPEND
            waits = asyncio.create_task(rig.pull("orders", 0, flags=flags))
            await until(lambda: rig.broker.core.polls.held_count == 1)
            rig.broker.core.polls.shut()
            answer = await waits
            assert (answer.code, answer.remark) == (
                Response.PULL_NOT_FOUND,
                "NO_MESSAGE_IN_QUEUE",
            )

    run_once(work())


def test_members_of_a_group_hear_of_each_other() -> None:
    async def work() -> None:
        async with running() as rig:
            heard: list[str] = []

            def notice(_: Any, request: Any) -> None:
                assert request.code == Request.NOTIFY_CONSUMER_IDS_CHANGED
                assert request.is_oneway
                heard.append(request.ext["consumerGroup"])

            first = await rig.connect(notice)
            await rig.join("readers", {"orders": "*"}, link=first)
            await until(lambda: len(heard) == 1)
            second = await rig.connect()
            await rig.join("readers", {"orders": "*"}, client_id="client-2", link=second)
            await until(lambda: len(heard) == 2)
            members = await rig.json(
                Request.GET_CONSUMER_LIST_BY_GROUP, {"consumerGroup": "readers"}
            )
            assert members == {"consumerIdList": ["client-1", "client-2"]}
            await second.close()
            await until(lambda: len(heard) == 3)
            # The group's topic for messages that come again was made, with its route.
            assert rig.broker.core.topics.get("%RETRY%readers") is not None

    run_once(work())
