"""What administrators do with topics, over a real connection."""

from __future__ import annotations

import asyncio
import errno
from typing import Any

import orjson
import pytest

from sluice.protocol.remoting_codes import RequestCode as Request
from sluice.protocol.remoting_codes import ResponseCode as Response
from sluice.storage.memory_files import MemoryFiles
from tests.unit.broker.broker_kit import (
    BROKER,
    CLUSTER,
    FLAG_SUBSCRIPTION,
    FLAG_SUSPEND,
    queue_table,
    running,
    topic_fields,
)
from tests.unit.loops import run_once, until


def test_a_topic_is_made_changed_and_deleted() -> None:
    async def work() -> None:
        files = MemoryFiles()
        async with running(files=files) as rig:
            await rig.make_topic("orders", 3, attributes="+message.type=FIFO")
            made = await rig.json(Request.GET_TOPIC_CONFIG, {"topic": "orders"})
            assert made == {
                "attributes": {"message.type": "FIFO"},
                "order": False,
                "perm": 6,
                "readQueueNums": 3,
                "topicFilterType": "SINGLE_TAG",
                "topicName": "orders",
                "topicSysFlag": 0,
                "writeQueueNums": 3,
            }
            await rig.make_topic("orders", 5, perm=4, attributes="+message.type=NORMAL")
            changed = await rig.json(Request.GET_TOPIC_CONFIG, {"topic": "orders"})
            assert (changed["readQueueNums"], changed["perm"]) == (5, 4)
            assert changed["attributes"] == {"message.type": "NORMAL"}
        async with running(files=files) as rig:
            # Settings are durable when they are answered.
            kept = await rig.json(Request.GET_TOPIC_CONFIG, {"topic": "orders"})
            assert kept == changed
            await rig.done(Request.DELETE_TOPIC_IN_BROKER, {"topic": "orders"})
            await rig.done(Request.DELETE_TOPIC_IN_BROKER, {"topic": "orders"})
            assert await rig.refused(Request.GET_TOPIC_CONFIG, {"topic": "orders"}) == (
                Response.TOPIC_NOT_EXIST,
                "No topic in this broker. topic: orders",
            )

    run_once(work())


def test_the_same_settings_again_change_nothing() -> None:
    async def work() -> None:
        async with running() as rig:
            await rig.make_topic("orders")
            before = rig.broker.core.topics.data_version()
            await rig.make_topic("orders")
            assert rig.broker.core.topics.data_version() == before

    run_once(work())


def test_deleting_a_topic_forgets_offsets_on_it() -> None:
    async def work() -> None:
        files = MemoryFiles()
        async with running(files=files) as rig:
            for topic in ("orders", "bills"):
                await rig.make_topic(topic)
                await rig.send(topic)
                await rig.make_group("readers")
                await rig.commit("readers", topic, 1)
            await rig.done(Request.DELETE_TOPIC_IN_BROKER, {"topic": "orders"})
            kept = await rig.json(Request.QUERY_TOPICS_BY_CONSUMER, {"group": "readers"})
            assert kept["topicList"] == ["bills"]
            assert kept["brokerAddr"] == rig.broker.address
        async with running(files=files) as rig:
            assert rig.broker.core.offsets.topics_of("readers") == ["bills"]

    run_once(work())


def test_a_topic_of_the_same_name_starts_anew() -> None:
    files = MemoryFiles()

    async def delete() -> None:
        async with running(files=files) as rig:
            await rig.make_topic("orders")
            for _ in range(3):
                await rig.send("orders", KEYS="one")
            await rig.commit("readers", "orders", 2)
            await rig.done(Request.DELETE_TOPIC_IN_BROKER, {"topic": "orders"})
            assert (await rig.pull("orders", 0)).code == Response.TOPIC_NOT_EXIST
            await rig.make_topic("orders")
            assert (await rig.pull("orders", 0)).code == Response.PULL_NOT_FOUND
            assert (await rig.send("orders", b"new", KEYS="one"))["queueOffset"] == "0"

    async def look() -> None:
        async with running(files=files) as rig:
            assert b"new" in bytes((await rig.pull("orders", 0)).body)
            assert rig.broker.store.max_offset("orders", 0) == 1
            assert rig.broker.core.offsets.of("readers", "orders") == {}
            span = {"maxNum": 10, "beginTimestamp": 0, "endTimestamp": 1 << 62}
            found = await rig.done(Request.QUERY_MESSAGE, {"topic": "orders", "key": "one", **span})
            assert bytes(found.body).count(b"KEYS") == 1

    run_once(delete())
    run_once(look())


def test_who_waits_for_messages_of_a_topic_hears_that_it_is_gone() -> None:
    async def work() -> None:
        async with running() as rig:
            await rig.make_topic("orders")
            flags = FLAG_SUBSCRIPTION | FLAG_SUSPEND
            other = await rig.connect()
            waits = asyncio.create_task(rig.pull("orders", 0, flags=flags, link=other))
            await until(lambda: rig.broker.core.polls.held_count == 1)
            await rig.done(Request.DELETE_TOPIC_IN_BROKER, {"topic": "orders"})
            assert (await waits).code == Response.TOPIC_NOT_EXIST

    run_once(work())


def test_a_topic_that_cannot_be_deleted_is_as_it_was() -> None:
    async def work() -> None:
        files = MemoryFiles()
        async with running(files=files) as rig:
            await rig.make_topic("orders")
            await rig.send("orders")
            await rig.make_group("readers")
            await rig.commit("readers", "orders", 1)
            files.fail("pwritev", error=errno.ENOSPC, within="/commitlog/")
            code, _ = await rig.refused(Request.DELETE_TOPIC_IN_BROKER, {"topic": "orders"})
            assert code == Response.SERVICE_NOT_AVAILABLE
            assert await rig.committed("readers", "orders") == 1
            assert (await rig.send("orders"))["queueOffset"] == "1"
            assert (await rig.pull("orders", 0)).code == Response.SUCCESS

    run_once(work())


def test_nothing_is_written_for_a_topic_that_never_was() -> None:
    async def work() -> None:
        async with running() as rig:
            before = rig.broker.store.log.end
            await rig.done(Request.DELETE_TOPIC_IN_BROKER, {"topic": "never"})
            assert rig.broker.store.log.end == before

    run_once(work())


def test_static_topics_are_refused_with_the_reason() -> None:
    async def work() -> None:
        async with running() as rig:
            code = Request.UPDATE_AND_CREATE_STATIC_TOPIC
            found = await rig.refused(code, topic_fields("orders"), b"{}")
            assert found[0] == 1
            assert "static topics are not in this version" in found[1]
            assert (await rig.refused(code, topic_fields("TBW102"), b"{}"))[0] == 29

    run_once(work())


BAD_SETTINGS: list[tuple[dict[str, Any], int, str]] = [
    ({"topic": "bad topic"}, 29, "contains illegal characters"),
    ({"topic": "t" * 128}, 29, "topic max length"),
    ({"topic": " "}, 29, "The specified topic is blank."),
    ({"topic": "TBW102"}, 29, "The topic[TBW102] is conflict with system topic."),
    ({"topic": CLUSTER}, 29, "is conflict with system topic."),
    ({"topic": BROKER}, 29, "is conflict with system topic."),
    ({"topic": "rmq_sys_mine"}, 29, "is conflict with system topic."),
    ({"readQueueNums": 0}, 29, "0 read queues; allowed: 1 to 65536"),
    ({"writeQueueNums": 65_537}, 29, "65537 write queues; allowed: 1 to 65536"),
    ({"perm": 16}, 29, "permission 16; allowed: 0 to 15"),
    ({"topicFilterType": "NONE"}, 29, "allowed: SINGLE_TAG, MULTI_TAG"),
    ({"perm": "rw"}, 1, "the custom field <perm> is no int32: 'rw'"),
    ({"readQueueNums": ""}, 1, "the custom field <readQueueNums> is null"),
    ({"attributes": "message.type=NORMAL"}, 1, "add/alter attribute format is wrong"),
    ({"attributes": "+color=red"}, 1, "unsupported key: color"),
    ({"attributes": "+message.type=MIXED"}, 29, "MIXED message type is not supported."),
    ({"attributes": "+message.type=X"}, 1, "value is not in set"),
    ({"attributes": "-message.type"}, 1, "only add attribute is supported while creating topic"),
    ({"attributes": "+reserve.time=soon"}, 1, "reserve.time is no whole number"),
]


@pytest.mark.parametrize(("changes", "code", "remark"), BAD_SETTINGS)
def test_settings_that_no_topic_can_have_are_refused(
    changes: dict[str, Any], code: int, remark: str
) -> None:
    async def work() -> None:
        async with running() as rig:
            fields = topic_fields("orders") | changes
            found = await rig.refused(Request.UPDATE_AND_CREATE_TOPIC, fields)
            assert found[0] == code
            assert remark in found[1]
            assert rig.broker.core.topics.get("orders") is None

    run_once(work())


def test_what_decides_the_layout_of_queues_cannot_be_changed() -> None:
    async def work() -> None:
        async with running() as rig:
            await rig.make_topic("batches", attributes="+queue.type=BatchCQ")
            fields = topic_fields("batches", attributes="+queue.type=SimpleCQ")
            assert await rig.refused(Request.UPDATE_AND_CREATE_TOPIC, fields) == (
                1,
                "attempt to update an unchangeable attribute. key: queue.type",
            )

    run_once(work())


def test_a_list_of_topics_is_made_whole_or_not_at_all() -> None:
    def row(name: str) -> dict[str, Any]:
        return {"topicName": name, "readQueueNums": 2, "writeQueueNums": 2, "perm": 6}

    async def work() -> None:
        async with running() as rig:
            code = Request.UPDATE_AND_CREATE_TOPIC_LIST
            body = orjson.dumps({"topicConfigList": [row("one"), row("t o")]})
            assert (await rig.refused(code, body=body))[0] == Response.INVALID_PARAMETER
            assert rig.broker.core.topics.get("one") is None
            await rig.done(code, body=orjson.dumps({"topicConfigList": [row("one"), row("two")]}))
            assert rig.broker.core.topics.get("one") is not None
            assert rig.broker.core.topics.get("two") is not None
            assert await rig.refused(code, body=b"[]") == (1, "the body is no JSON object")

    run_once(work())


def test_all_topics_come_in_pages() -> None:
    async def work() -> None:
        async with running() as rig:
            for number in range(5):
                await rig.make_topic(f"page-{number}")
            everything = await rig.done(Request.GET_ALL_TOPIC_CONFIG)
            table = orjson.loads(everything.body)
            names = sorted(table["topicConfigTable"])
            assert everything.ext == {"totalTopicNum": str(len(names))}
            assert "page-3" in names
            version = orjson.dumps(table["dataVersion"]).decode()
            seen: list[str] = []
            while len(seen) < len(names):
                fields = {"topicSeq": len(seen), "maxTopicNum": 4, "dataVersion": version}
                page = await rig.json(Request.GET_ALL_TOPIC_CONFIG, fields)
                assert 0 < len(page["topicConfigTable"]) <= 4
                seen += sorted(page["topicConfigTable"])
            assert seen == names
            # Who goes on with an old version begins anew.
            old = {"topicSeq": 4, "maxTopicNum": 4, "dataVersion": "{}"}
            page = await rig.json(Request.GET_ALL_TOPIC_CONFIG, old)
            assert sorted(page["topicConfigTable"]) == names[:4]

    run_once(work())


def test_the_offsets_of_a_topic() -> None:
    async def work() -> None:
        async with running() as rig:
            await rig.make_topic("orders", 2)
            assert await rig.refused(Request.GET_TOPIC_STATS_INFO, {"topic": "none"}) == (
                Response.TOPIC_NOT_EXIST,
                "topic[none] not exist",
            )
            before_ms = rig.broker.store.now_ms()
            for _ in range(3):
                await rig.send("orders", queue_id=1)
            answer = await rig.done(Request.GET_TOPIC_STATS_INFO, {"topic": "orders"})
            assert b'{{"brokerName":"broker-a","queueId":0,"topic":"orders"}:' in bytes(answer.body)
            stats = await rig.json(Request.GET_TOPIC_STATS_INFO, {"topic": "orders"})
            table = queue_table(stats)
            assert table[0] == {"lastUpdateTimestamp": 0, "maxOffset": 0, "minOffset": 0}
            assert (table[1]["minOffset"], table[1]["maxOffset"]) == (0, 3)
            assert table[1]["lastUpdateTimestamp"] >= before_ms
            assert stats["topicPutTps"] > 0

    run_once(work())


def test_a_topic_with_thousands_of_queues_is_asked_in_turns() -> None:
    async def work() -> None:
        async with running() as rig:
            await rig.make_topic("wide", 3000)
            table = queue_table(await rig.json(Request.GET_TOPIC_STATS_INFO, {"topic": "wide"}))
            assert sorted(table) == list(range(3000))

    run_once(work())


def test_who_consumes_a_topic() -> None:
    async def work() -> None:
        async with running() as rig:
            await rig.make_topic("orders")
            await rig.join("online", {"orders": "*"})
            await rig.make_group("offline")
            await rig.commit("offline", "orders", 0)
            found = await rig.json(Request.QUERY_TOPIC_CONSUME_BY_WHO, {"topic": "orders"})
            assert found == {"groupList": ["offline", "online"]}
            nobody = await rig.json(Request.QUERY_TOPIC_CONSUME_BY_WHO, {"topic": "none"})
            assert nobody == {"groupList": []}

    run_once(work())


def test_system_topics_are_listed() -> None:
    async def work() -> None:
        async with running() as rig:
            found = await rig.json(Request.GET_SYSTEM_TOPIC_LIST_FROM_BROKER)
            assert {"TBW102", "SCHEDULE_TOPIC_XXXX", CLUSTER, BROKER} <= set(found["topicList"])

    run_once(work())


def test_entries_of_a_queue() -> None:
    async def work() -> None:
        async with running() as rig:
            await rig.make_topic("orders")
            sent = [await rig.send("orders", TAGS="TagA") for _ in range(3)]
            await rig.join("readers", {"orders": "TagA"})
            fields = {"topic": "orders", "queueId": 0, "index": 1, "count": 10}
            asked = fields | {"consumerGroup": "readers"}
            found = await rig.json(Request.QUERY_CONSUME_QUEUE, asked)
            assert (found["minQueueIndex"], found["maxQueueIndex"]) == (0, 3)
            assert found["subscriptionData"]["tagsSet"] == ["TagA"]
            assert [row["physicOffset"] for row in found["queueData"]] == [
                int(one["msgId"][16:], 16) for one in sent[1:]
            ]
            assert {row["tagsCode"] for row in found["queueData"]} == {2598919}
            asked = fields | {"consumerGroup": "others", "count": 1}
            offline = await rig.json(Request.QUERY_CONSUME_QUEUE, asked)
            assert offline["filterData"] == "others@orders is not online!"
            assert len(offline["queueData"]) == 1
            beyond = await rig.json(Request.QUERY_CONSUME_QUEUE, fields | {"index": 77})
            assert beyond["queueData"] == []
            assert await rig.refused(Request.QUERY_CONSUME_QUEUE, fields | {"queueId": 1}) == (
                1,
                "1@orders is not exist!",
            )

    run_once(work())


def test_correction_offsets_are_the_lowest_of_all_groups() -> None:
    async def work() -> None:
        async with running() as rig:
            await rig.make_topic("orders")
            for group, offset in (("slow", 2), ("quick", 9), ("other", 5)):
                await rig.make_group(group)
                await rig.commit(group, "orders", offset)
            code = Request.QUERY_CORRECTION_OFFSET
            fields = {"topic": "orders", "compareGroup": "quick"}
            assert (await rig.json(code, fields))["correctionOffsets"] == {"0": 2}
            found = await rig.json(code, fields | {"filterGroups": "slow"})
            assert found["correctionOffsets"] == {"0": 5}
            found = await rig.json(
                code, {"topic": "orders", "compareGroup": "slow", "filterGroups": "slow"}
            )
            assert found["correctionOffsets"] == {"0": (1 << 63) - 1}

    run_once(work())
