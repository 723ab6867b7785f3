"""What administrators do with groups: settings, progress, resets; over a real connection."""

from __future__ import annotations

import asyncio
from typing import Any

import orjson
import pytest

from sluice.link import RemotingLink
from sluice.protocol import lenient_json
from sluice.protocol.remoting import RemotingCommand
from sluice.protocol.remoting_codes import RequestCode as Request
from sluice.protocol.remoting_codes import ResponseCode as Response
from sluice.storage.memory_files import MemoryFiles
from tests.unit.broker.broker_kit import (
    BROKER,
    FLAG_SUBSCRIPTION,
    FLAG_SUSPEND,
    Rig,
    queue_table,
    running,
)
from tests.unit.loops import run_once, until

UPDATE = Request.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP


# ---------------------------------------------------------------------------------------- settings


def test_a_group_is_made_changed_and_deleted() -> None:
    async def work() -> None:
        files = MemoryFiles()
        async with running(files=files) as rig:
            await rig.make_group("readers", retryMaxTimes=3, consumeEnable=False)
            made = await rig.json(Request.GET_SUBSCRIPTIONGROUP_CONFIG, {"group": "readers"})
            assert made == {
                "attributes": {},
                "brokerId": 0,
                "consumeBroadcastEnable": True,
                "consumeEnable": False,
                "consumeFromMinEnable": True,
                "consumeMessageOrderly": False,
                "consumeTimeoutMinute": 15,
                "groupName": "readers",
                "groupRetryPolicy": {"type": "CUSTOMIZED"},
                "groupSysFlag": 0,
                "notifyConsumerIdsChangedEnable": True,
                "retryMaxTimes": 3,
                "retryQueueNums": 1,
                "whichBrokerWhenConsumeSlowly": 1,
            }
        async with running(files=files, auto_create_groups=False) as rig:
            kept = await rig.json(Request.GET_SUBSCRIPTIONGROUP_CONFIG, {"group": "readers"})
            assert kept == made
            await rig.make_topic("orders")
            assert (await rig.pull("orders", 0)).code == Response.NO_PERMISSION
            await rig.done(Request.DELETE_SUBSCRIPTIONGROUP, {"groupName": "readers"})
            assert (await rig.pull("orders", 0)).code == Response.SUBSCRIPTION_GROUP_NOT_EXIST
            asked = {"group": "readers"}
            assert await rig.refused(Request.GET_SUBSCRIPTIONGROUP_CONFIG, asked) == (
                Response.SUBSCRIPTION_GROUP_NOT_EXIST,
                "No group in this broker",
            )

    run_once(work())


@pytest.mark.parametrize(("clean", "left"), [(True, []), (False, ["orders"])])
def test_offsets_go_with_the_group_if_asked(clean: bool, left: list[str]) -> None:
    async def work() -> None:
        files = MemoryFiles()
        async with running(files=files) as rig:
            await rig.make_topic("orders")
            await rig.make_group("readers")
            await rig.commit("readers", "orders", 7)
            fields = {"groupName": "readers", "cleanOffset": str(clean).lower()}
            await rig.done(Request.DELETE_SUBSCRIPTIONGROUP, fields)
            assert rig.broker.core.offsets.topics_of("readers") == left
        async with running(files=files) as rig:
            assert rig.broker.core.offsets.topics_of("readers") == left

    run_once(work())


BAD_GROUPS: list[tuple[bytes, int, str]] = [
    (b"", 1, "the body is not JSON"),
    (b'{"groupName": 7}', 1, "groupName is missing or no text"),
    (b'{"groupName": "a b"}', 29, "contains illegal characters"),
    (b'{"groupName": ""}', 29, "the specified group is blank"),
    (b'{"groupName": "%s"}' % (b"g" * 121), 29, "is longer than group max length"),
    (b'{"groupName": "g", "consumeEnable": 1}', 1, "consumeEnable is neither true nor false"),
    (b'{"groupName": "g", "retryMaxTimes": "x"}', 1, "retryMaxTimes is missing or no number"),
    (b'{"groupName": "g", "retryMaxTimes": 2147483648}', 1, "does not fit into 32 bits"),
    (b'{"groupName": "g", "retryQueueNums": -1}', 29, "-1 retry queues"),
    (b'{"groupName": "g", "attributes": {"+a": "b"}}', 1, "unsupported key: a"),
    (b'{"groupName": "g", "x": "%s"}' % (b"x" * (1 << 20)), 1, "is over 1048576"),
]


@pytest.mark.parametrize(("body", "code", "remark"), BAD_GROUPS, ids=range(len(BAD_GROUPS)))
def test_settings_that_no_group_can_have_are_refused(body: bytes, code: int, remark: str) -> None:
    async def work() -> None:
        async with running() as rig:
            found = await rig.refused(UPDATE, body=body)
            assert found[0] == code
            assert remark in found[1]
            assert rig.broker.core.groups.get("g") is None

    run_once(work())


def test_a_list_of_groups_and_all_groups_in_pages() -> None:
    async def work() -> None:
        async with running() as rig:
            rows = [{"groupName": f"g{number}", "brokerId": number} for number in range(3)]
            code = Request.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP_LIST
            await rig.done(code, body=orjson.dumps({"groupConfigList": rows}))
            answer = await rig.done(Request.GET_ALL_SUBSCRIPTIONGROUP_CONFIG)
            table = orjson.loads(answer.body)
            names = sorted(table["subscriptionGroupTable"])
            assert answer.ext == {"totalGroupNum": str(len(names))}
            assert {"g0", "g1", "g2", "TOOLS_CONSUMER"} <= set(names)
            assert table["subscriptionGroupTable"]["g2"]["brokerId"] == 2
            assert table["forbiddenTable"] == {}
            fields = {
                "groupSeq": 2,
                "maxGroupNum": 3,
                "dataVersion": orjson.dumps(table["dataVersion"]).decode(),
            }
            page = await rig.json(Request.GET_ALL_SUBSCRIPTIONGROUP_CONFIG, fields)
            assert sorted(page["subscriptionGroupTable"]) == names[2:5]

    run_once(work())


# ---------------------------------------------------------------------------------------- progress


async def with_progress(rig: Rig) -> None:
    """Topic "orders" with 5 messages in queue 0; "readers" has 3 and has pulled all."""
    await rig.make_topic("orders")
    await rig.make_group("readers")
    for _ in range(5):
        await rig.send("orders")
    assert (await rig.pull("orders", 0)).code == Response.SUCCESS
    await rig.commit("readers", "orders", 3)


def test_how_far_a_group_has_read() -> None:
    async def work() -> None:
        async with running() as rig:
            await with_progress(rig)
            stats = await rig.json(Request.GET_CONSUME_STATS, {"consumerGroup": "readers"})
            table = queue_table(stats)
            assert table[0]["lastTimestamp"] > 0
            del table[0]["lastTimestamp"]
            assert table == {
                0: {"brokerOffset": 5, "consumerOffset": 3, "pullOffset": 5},
                1: {
                    "brokerOffset": 0,
                    "consumerOffset": 0,
                    "pullOffset": 0,
                    "lastTimestamp": 0,
                },
            }
            assert stats["consumeTps"] > 0
            fields = {"consumerGroup": "readers", "topic": "none"}
            assert (await rig.json(Request.GET_CONSUME_STATS, fields))["offsetTable"] == {}
            fields = {"consumerGroup": "others", "topicList": "none;orders"}
            listed = await rig.json(Request.GET_CONSUME_STATS, fields)
            assert queue_table(listed)[0]["consumerOffset"] == 0
            # A topic that the members do not subscribe to any more is left out.
            await rig.join("readers", {"elsewhere": "*"})
            stats = await rig.json(Request.GET_CONSUME_STATS, {"consumerGroup": "readers"})
            assert stats["offsetTable"] == {}

    run_once(work())


def test_how_far_all_groups_have_read() -> None:
    async def work() -> None:
        async with running() as rig:
            await with_progress(rig)
            await rig.make_topic("ordered", order="true")
            await rig.commit("readers", "ordered", 0)
            code = Request.GET_BROKER_CONSUME_STATS
            found = await rig.json(code, {"isOrder": "false"})
            rows = {
                group: stats for row in found["consumeStatsList"] for group, stats in row.items()
            }
            assert len(rows["readers"]) == 2
            assert found["totalDiff"] == 2
            assert found["brokerAddr"] == rig.broker.address
            ordered = await rig.json(code, {"isOrder": "true"})
            assert ordered["totalDiff"] == 0

    run_once(work())


def test_time_spans_of_a_group() -> None:
    async def work() -> None:
        async with running() as rig:
            await with_progress(rig)
            fields = {"topic": "orders", "group": "readers"}
            found = await rig.json(Request.QUERY_CONSUME_TIME_SPAN, fields)
            spans = {row["messageQueue"]["queueId"]: row for row in found["consumeTimeSpanSet"]}
            first = spans[0]
            assert 0 < first["minTimeStamp"] <= first["consumeTimeStamp"] <= first["maxTimeStamp"]
            assert first["delayTime"] >= 0
            assert (spans[1]["minTimeStamp"], spans[1]["delayTime"]) == (-1, 0)
            fields = {"topic": "none", "group": "readers"}
            assert await rig.refused(Request.QUERY_CONSUME_TIME_SPAN, fields) == (
                Response.TOPIC_NOT_EXIST,
                "topic[none] not exist",
            )

    run_once(work())


def test_all_offsets_for_a_copy_of_this_broker() -> None:
    async def work() -> None:
        async with running() as rig:
            await with_progress(rig)
            answer = await rig.done(Request.GET_ALL_CONSUMER_OFFSET)
            assert b'"orders@readers":{0:3}' in bytes(answer.body)
            delays = await rig.json(Request.GET_ALL_DELAY_OFFSET)
            assert delays["offsetTable"] == {}

    run_once(work())


def test_offsets_are_cloned() -> None:
    async def work() -> None:
        async with running() as rig:
            await with_progress(rig)
            fields = {"srcGroup": "readers", "destGroup": "copy", "offline": "true"}
            await rig.done(Request.CLONE_GROUP_OFFSET, fields)
            assert await rig.committed("copy", "orders") == 3

    run_once(work())


# ------------------------------------------------------------------------------------------ resets


def reset_fields(**changes: Any) -> dict[str, Any]:
    return {
        "group": "readers",
        "topic": "orders",
        "timestamp": -1,
        "isForce": "true",
        **changes,
    }


def test_a_reset_is_told_to_the_next_pull_and_older_commits_are_ignored() -> None:
    async def work() -> None:
        async with running() as rig:
            await with_progress(rig)
            code = Request.INVOKE_BROKER_TO_RESET_OFFSET
            found = await rig.json(code, reset_fields(timestamp=0))
            assert queue_table(found) == {0: 0, 1: 0}
            ignored = await rig.commit("readers", "orders", 5)
            assert (ignored.code, ignored.remark) == (0, "Offset has been previously reset")
            assert await rig.committed("readers", "orders") == 0
            # Another group is not concerned.
            assert (await rig.pull("orders", 0, group="others")).code == Response.SUCCESS
            told = await rig.pull("orders", 5, commitOffset=5, sysFlag=1 | FLAG_SUBSCRIPTION)
            assert (told.code, told.remark) == (Response.PULL_OFFSET_MOVED, "OFFSET_RESET")
            assert told.ext["nextBeginOffset"] == "0"
            assert (told.ext["minOffset"], told.ext["maxOffset"]) == ("0", "5")
            assert told.ext["suggestWhichBrokerId"] == "0"
            # Once told, the consumer's word counts again.
            assert (await rig.pull("orders", 0)).code == Response.SUCCESS
            await rig.commit("readers", "orders", 2)
            assert await rig.committed("readers", "orders") == 2

    run_once(work())


def test_a_reset_wakes_a_consumer_that_waits_and_nobody_else() -> None:
    async def work() -> None:
        async with running() as rig:
            await with_progress(rig)
            flags = FLAG_SUBSCRIPTION | FLAG_SUSPEND
            other = await rig.connect()
            waits = asyncio.create_task(rig.pull("orders", 5, flags=flags))
            stays = asyncio.create_task(
                rig.pull("orders", 5, group="others", flags=flags, link=other)
            )
            await until(lambda: rig.broker.core.polls.held_count == 2)
            await rig.done(Request.INVOKE_BROKER_TO_RESET_OFFSET, reset_fields(timestamp=0))
            told = await waits
            assert (told.code, told.remark) == (Response.PULL_OFFSET_MOVED, "OFFSET_RESET")
            assert rig.broker.core.polls.held_count == 1
            assert not stays.done()
            await rig.send("orders")
            assert (await stays).code == Response.SUCCESS

    run_once(work())


def test_a_reset_works_without_any_consumer_and_is_durable() -> None:
    async def work() -> None:
        files = MemoryFiles()
        async with running(files=files) as rig:
            await with_progress(rig)
            code = Request.INVOKE_BROKER_TO_RESET_OFFSET
            assert queue_table(await rig.json(code, reset_fields())) == {0: 5, 1: 0}
            one = await rig.json(code, reset_fields(queueId=0, offset=4))
            assert queue_table(one) == {0: 4}
        async with running(files=files) as rig:
            assert await rig.committed("readers", "orders") == 4

    run_once(work())


class Told:
    """A consumer that notes what the broker tells it."""

    def __init__(self) -> None:
        self.resets: list[RemotingCommand] = []

    def __call__(self, link: RemotingLink, request: RemotingCommand) -> None:
        if request.code == Request.RESET_CONSUMER_CLIENT_OFFSET:
            self.resets.append(request)


def test_where_consumers_are_to_be_told_all_of_them_are() -> None:
    async def work() -> None:
        async with running(server_side_reset=False) as rig:
            await with_progress(rig)
            told = [Told(), Told()]
            for number, each in enumerate(told):
                link = await rig.connect(each)
                await rig.join("readers", {"orders": "*"}, client_id=f"c{number}", link=link)
            await rig.commit("readers", "orders", 0, queue_id=1)
            code = Request.INVOKE_BROKER_TO_RESET_OFFSET
            found = await rig.json(code, reset_fields(timestamp=0))
            assert queue_table(found) == {0: 0, 1: 0}
            await until(lambda: all(each.resets for each in told))
            for each in told:
                (reset,) = each.resets
                assert reset.is_oneway
                assert (reset.ext["topic"], reset.ext["group"]) == ("orders", "readers")
                assert queue_table(lenient_json.loads(bytes(reset.body))) == {0: 0, 1: 0}
            # They commit by themselves where they go on; nothing is ahead of them.
            assert await rig.committed("readers", "orders") == 3
            assert (await rig.commit("readers", "orders", 0)).remark is None
            assert (await rig.pull("orders", 0)).code == Response.SUCCESS

    run_once(work())


def test_without_force_nobody_is_told_to_skip_messages() -> None:
    async def work() -> None:
        async with running(server_side_reset=False) as rig:
            await with_progress(rig)
            await rig.join("readers", {"orders": "*"})
            await rig.commit("readers", "orders", 0, queue_id=1)
            code = Request.INVOKE_BROKER_TO_RESET_OFFSET
            gentle = await rig.json(code, reset_fields(timestamp=-1, isForce="false"))
            assert queue_table(gentle) == {0: 3, 1: 0}
            forced = await rig.json(code, reset_fields(timestamp=-1, isForce="true"))
            assert queue_table(forced) == {0: 5, 1: 0}

    run_once(work())


def test_consumers_in_cpp_get_a_list() -> None:
    async def work() -> None:
        async with running(server_side_reset=False) as rig:
            await with_progress(rig)
            told = Told()
            link = await rig.connect(told)
            await rig.join("readers", {"orders": "*"}, link=link)
            await rig.commit("readers", "orders", 0, queue_id=1)
            (member,) = rig.broker.core.clients.consumers["readers"].members.values()
            member.language = "CPP"
            await rig.done(Request.INVOKE_BROKER_TO_RESET_OFFSET, reset_fields(timestamp=0))
            await until(lambda: told.resets)
            rows = orjson.loads(bytes(told.resets[0].body))["offsetTable"]
            assert rows[0] == {"brokerName": BROKER, "offset": 0, "queueId": 0, "topic": "orders"}

    run_once(work())


def test_telling_consumers_needs_some() -> None:
    async def work() -> None:
        async with running(server_side_reset=False) as rig:
            await with_progress(rig)
            code = Request.INVOKE_BROKER_TO_RESET_OFFSET
            assert await rig.refused(code, reset_fields(timestamp=0)) == (
                1,
                "THe consumer group <readers> not exist",
            )
            await rig.commit("readers", "orders", 0, queue_id=1)
            assert await rig.refused(code, reset_fields(timestamp=0)) == (
                Response.CONSUMER_NOT_ONLINE,
                "Consumer not online, so can not reset offset, Group: readers Topic: orders "
                "Timestamp: 0",
            )
            assert (await rig.refused(code, reset_fields(topic="none")))[0] == 17

    run_once(work())


def test_a_group_is_forbidden_a_topic_and_allowed_again() -> None:
    files = MemoryFiles()
    asked = {"group": "readers", "topic": "orders"}
    code = Request.UPDATE_AND_GET_GROUP_FORBIDDEN

    async def forbid() -> None:
        async with running(files=files) as rig:
            await with_progress(rig)
            assert (await rig.json(code, asked))["readable"] is True
            found = await rig.json(code, {**asked, "readable": "false"})
            assert found == {**asked, "readable": False}

    async def look() -> None:
        async with running(files=files) as rig:
            await rig.join("readers", {"orders": "*"})
            refused = await rig.pull("orders", 0, flags=0)
            assert (refused.code, refused.remark) == (
                Response.NO_PERMISSION,
                "the consumer group[readers] is forbidden for topic[orders]",
            )
            table = await rig.json(Request.GET_ALL_SUBSCRIPTIONGROUP_CONFIG)
            assert table["forbiddenTable"] == {"readers": {"orders": 4}}
            await rig.done(code, {**asked, "readable": "true"})
            assert (await rig.pull("orders", 0, flags=0)).code == Response.SUCCESS
            await rig.done(code, {**asked, "readable": "false"})
            await rig.done(Request.DELETE_SUBSCRIPTIONGROUP, {"groupName": "readers"})
            await rig.make_group("readers")
            assert (await rig.json(code, asked))["readable"] is True
            for name in ("group", "topic"):
                fields = {**asked, name: "none", "readable": "false"}
                assert (await rig.refused(code, fields))[0] in (17, 26)

    run_once(forbid())
    written = orjson.loads(files.read("/store/config/subscriptionGroup.json", 1 << 20))
    assert written["forbiddenTable"] == {"readers": {"orders": 4}}, "Apache's broker reads it there"
    run_once(look())


def test_broadcasting_can_be_forbidden() -> None:
    async def work() -> None:
        async with running() as rig:
            await with_progress(rig)
            await rig.make_group("readers", consumeBroadcastEnable=False)
            await rig.join("readers", {"orders": "*"})
            assert (await rig.pull("orders", 0, flags=0)).code == Response.SUCCESS
            rig.broker.core.clients.consumers["readers"].message_model = "BROADCASTING"
            refused = await rig.pull("orders", 0, flags=0)
            assert (refused.code, refused.remark) == (
                Response.NO_PERMISSION,
                "the consumer group[readers] can not consume by broadcast way",
            )

    run_once(work())


BAD_RESETS: list[tuple[dict[str, Any], int, str]] = [
    ({"topic": "none"}, 17, "Topic none does not exist"),
    ({"group": "none"}, 26, "Group none does not exist"),
    ({"queueId": 2}, 29, "topic orders has 2 queues"),
    ({"queueId": 0, "offset": 6}, 1, "Target offset 6 not in consume queue range [0-5]"),
    ({"timestamp": "now"}, 1, "the custom field <timestamp> is no int64: 'now'"),
]


@pytest.mark.parametrize(("changes", "code", "remark"), BAD_RESETS)
def test_a_reset_to_nowhere_is_refused(changes: dict[str, Any], code: int, remark: str) -> None:
    async def work() -> None:
        async with running() as rig:
            await with_progress(rig)
            fields = reset_fields(**changes)
            assert await rig.refused(Request.INVOKE_BROKER_TO_RESET_OFFSET, fields) == (
                code,
                remark,
            )
            assert await rig.committed("readers", "orders") == 3

    run_once(work())
