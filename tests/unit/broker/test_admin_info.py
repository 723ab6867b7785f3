"""What administrators ask about the broker itself: settings, rates, state."""

from __future__ import annotations

import orjson
import pytest

from sluice.protocol.remoting_codes import RequestCode as Request
from sluice.protocol.remoting_codes import ResponseCode as Response
from tests.unit.broker.broker_kit import CLUSTER, running, send_fields
from tests.unit.loops import run_once

# What mqadmin clusterList reads; a missing one makes it print a trace or nonsense.
CLUSTER_LIST_KEYS = {
    *("brokerActive", "putTps", "getTransferredTps", "brokerVersionDesc"),
    *("sendThreadPoolQueueSize", "pullThreadPoolQueueSize", "ackThreadPoolQueueSize"),
    *("sendThreadPoolQueueHeadWaitTimeMills", "pullThreadPoolQueueHeadWaitTimeMills"),
    *("ackThreadPoolQueueHeadWaitTimeMills", "pageCacheLockTimeMills"),
    *("earliestMessageTimeStamp", "commitLogDiskRatio", "timerReadBehind", "timerOffsetBehind"),
    *("timerCongestNum", "timerEnqueueTps", "timerDequeueTps"),
    *("msgPutTotalYesterdayMorning", "msgPutTotalTodayMorning", "msgPutTotalTodayNow"),
    *("msgGetTotalYesterdayMorning", "msgGetTotalTodayMorning", "msgGetTotalTodayNow"),
}


def test_runtime_info_has_what_tools_read() -> None:
    async def work() -> None:
        async with running() as rig:
            await rig.make_topic("orders")
            for _ in range(3):
                await rig.send("orders")
            await rig.pull("orders", 0)
            table = (await rig.json(Request.GET_BROKER_RUNTIME_INFO))["table"]
            assert set(table) >= CLUSTER_LIST_KEYS
            assert (table["msgPutTotalTodayNow"], table["msgGetTotalTodayNow"]) == ("3", "3")
            assert len([float(rate) for rate in table["putTps"].split(" ")]) == 3
            assert int(table["commitLogMaxOffset"]) > int(table["commitLogMinOffset"])
            assert int(table["earliestMessageTimeStamp"]) > 0
            assert 0.0 <= float(table["commitLogDiskRatio"]) <= 1.0
            assert table["unequalSubscriptions"] == "none"
            assert table["storeRefuses"] == "nothing"

    run_once(work())


def test_unequal_subscriptions_are_reported_until_they_are_gone(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def work() -> None:
        async with running() as rig:
            other = await rig.connect()
            await rig.join("readers", {"orders": "TagA"})
            await rig.join("readers", {"orders": "TagB"}, client_id="client-2", link=other)
            table = (await rig.json(Request.GET_BROKER_RUNTIME_INFO))["table"]
            assert (
                "readers: orders: 'TagA' by client-1; 'TagB' by client-2"
                in (table["unequalSubscriptions"])
            )
            assert "subscribe differently" in caplog.text
            fields = {"clientID": "client-2", "consumerGroup": "readers"}
            await rig.done(Request.UNREGISTER_CLIENT, fields)
            table = (await rig.json(Request.GET_BROKER_RUNTIME_INFO))["table"]
            assert table["unequalSubscriptions"] == "none"

    run_once(work())


def test_settings_are_shown_by_rocketmqs_names_and_changed() -> None:
    async def work() -> None:
        async with running() as rig:
            answer = await rig.done(Request.GET_BROKER_CONFIG)
            lines = bytes(answer.body).decode().splitlines()
            assert lines == sorted(lines)
            assert "autoCreateTopicEnable=true" in lines
            assert "brokerName=broker-a" in lines
            assert set(orjson.loads(answer.ext["version"])) == {
                "counter",
                "stateVersion",
                "timestamp",
            }
            await rig.done(Request.UPDATE_BROKER_CONFIG, body=b"autoCreateTopicEnable=false\n")
            answer = await rig.done(Request.GET_BROKER_CONFIG)
            assert b"autoCreateTopicEnable=false\n" in bytes(answer.body)
            missing = await rig.pull("fresh", 0)
            assert missing.code == Response.TOPIC_NOT_EXIST
            await rig.done(Request.UPDATE_BROKER_CONFIG, body=b"flushIntervalCommitLog=77")
            assert rig.broker.store.config.flush_interval_ms == 77

    run_once(work())


BAD_CHANGES = [
    (b"brokerConfigPath=/etc/passwd", 16, "Can not update config in black list."),
    (b"noSuchThing=1", 1, "is not known"),
    (b"autoCreateTopicEnable=perhaps", 1, "is neither true nor false"),
    (b"maxTransferCountOnMessageInMemory=0", 1, "is out of limits"),
    (b"brokerName=other", 1, "cannot be changed while running"),
    (b"fileReservedTime=1", 1, "cannot be changed while running"),
    (b"sendMessageThreadPoolNums=8", 1, "no effect here: sendMessageThreadPoolNums"),
    (b"aclEnable=true", 1, "is refused"),
]


@pytest.mark.parametrize(("body", "code", "remark"), BAD_CHANGES)
def test_settings_that_cannot_be_changed_are_refused(body: bytes, code: int, remark: str) -> None:
    async def work() -> None:
        async with running() as rig:
            before = rig.broker.core.config
            found = await rig.refused(Request.UPDATE_BROKER_CONFIG, body=body)
            assert found[0] == code
            assert remark in found[1]
            assert rig.broker.core.config == before

    run_once(work())


def test_without_permission_nobody_sends_or_pulls() -> None:
    async def work() -> None:
        async with running() as rig:
            await rig.make_topic("orders")
            await rig.send("orders")
            await rig.done(Request.UPDATE_BROKER_CONFIG, body=b"brokerPermission=4")
            code = Request.SEND_MESSAGE_V2
            assert await rig.refused(code, send_fields("orders"), b"x") == (
                Response.NO_PERMISSION,
                "Sending message to topic[orders] is forbidden.",
            )
            assert (await rig.pull("orders", 0)).code == Response.SUCCESS
            await rig.done(Request.UPDATE_BROKER_CONFIG, body=b"brokerPermission=2")
            assert (await rig.pull("orders", 0)).code == Response.NO_PERMISSION
            await rig.send("orders")

    run_once(work())


def test_statistics_by_topic_and_group() -> None:
    async def work() -> None:
        async with running() as rig:
            await rig.make_topic("orders")
            for _ in range(4):
                await rig.send("orders")
            await rig.pull("orders", 0)
            code = Request.VIEW_BROKER_STATS_DATA

            async def sums(name: str, key: str) -> list[int]:
                found = await rig.json(code, {"statsName": name, "statsKey": key})
                return [found[span]["sum"] for span in ("statsMinute", "statsHour", "statsDay")]

            assert await sums("TOPIC_PUT_NUMS", "orders") == [4, 4, 4]
            assert await sums("GROUP_GET_NUMS", "orders@readers") == [4, 4, 4]
            assert await sums("BROKER_PUT_NUMS", CLUSTER) == [4, 4, 4]
            assert await sums("BROKER_GET_NUMS", CLUSTER) == [4, 4, 4]
            assert (await sums("TOPIC_PUT_SIZE", "orders"))[0] > 4 * 91
            assert (await sums("GROUP_GET_SIZE", "orders@readers"))[0] > 4 * 91
            found = await rig.json(
                code, {"statsName": "GROUP_GET_NUMS", "statsKey": "orders@readers"}
            )
            assert found["statsMinute"]["avgpt"] == 4.0  # one pull had them all
            for name, key in (("TOPIC_PUT_NUMS", "none"), ("SNDBCK_PUT_NUMS", "orders@readers")):
                assert await rig.refused(code, {"statsName": name, "statsKey": key}) == (
                    1,
                    f"The stats <{name}> <{key}> not exist",
                )

    run_once(work())


def test_a_single_master_and_clean_ups() -> None:
    async def work() -> None:
        async with running() as rig:
            status = await rig.json(Request.GET_BROKER_HA_STATUS)
            assert status["master"] is True
            assert status["masterCommitLogMaxOffset"] > 0
            assert status["haConnectionInfo"] == []
            assert await rig.refused(Request.GET_BROKER_EPOCH_CACHE) == (
                1,
                "this request only for controllerMode ",
            )
            for code in (
                Request.CLEAN_EXPIRED_CONSUMEQUEUE,
                Request.CLEAN_UNUSED_TOPIC,
                Request.DELETE_EXPIRED_COMMITLOG,
            ):
                await rig.done(code)

    run_once(work())
