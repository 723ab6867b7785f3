"""What administrators ask about the broker itself: settings, rates, state."""

from __future__ import annotations

import errno
import time

import orjson
import pytest

from sluice.clock import wall_ms
from sluice.model import Message
from sluice.protocol.remoting_codes import RequestCode as Request
from sluice.protocol.remoting_codes import ResponseCode as Response
from sluice.storage.memory_files import MemoryFiles
from sluice.storage.store import SETTING_TABLE, STATE_TOPIC
from tests.unit.broker.broker_kit import CLUSTER, running, send_fields
from tests.unit.loops import run_once, until

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
            await rig.ask(Request.UNREGISTER_CLIENT, fields, link=other)
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
    (b"autoCreateTopicEnable=perhaps", 1, "is none of auto, on and off"),
    (b"maxTransferCountOnMessageInMemory=0", 1, "is out of limits"),
    (b"brokerName=other", 1, "takes effect at start only"),
    (b"flushDiskType=SYNC_FLUSH", 1, "takes effect at start only"),
    (b"fileReservedTim=1", 1, "did you mean fileReservedTime?"),
    (b"fileReservedTime=0", 1, "is out of limits"),
    (b"fileReservedTime=1\nbrokerName=other", 1, "takes effect at start only"),
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


def test_changed_settings_take_effect_at_once() -> None:
    async def work() -> None:
        async with running() as rig:
            store = rig.broker.store
            body = b"fileReservedTime=1\ndeleteWhen=04;16\ndiskMaxUsedSpaceRatio=50\n"
            await rig.done(Request.UPDATE_BROKER_CONFIG, body=body)
            rules = store.housekeeping._rules
            assert (rules.retention_hours, rules.clean_ratio) == (1, 0.5)
            assert rules.hours_of_day == {4, 16}
            await rig.make_topic("orders")
            await rig.done(Request.UPDATE_BROKER_CONFIG, body=b"maxMessageSize=1024")
            code = Request.SEND_MESSAGE_V2
            refused = await rig.refused(code, send_fields("orders"), b"x" * 1025)
            assert refused[0] == Response.MESSAGE_ILLEGAL
            await rig.send("orders", b"x" * 1024)
            await rig.done(Request.UPDATE_BROKER_CONFIG, body=b"defaultTopicQueueNums=3")
            await rig.send("fresh")
            assert (await rig.json(Request.GET_TOPIC_CONFIG, {"topic": "fresh"}))[
                "writeQueueNums"
            ] == 3
            # Settings are entries of the log, and have a limit of their own.
            rows = [topic_config(f"t{number}") for number in range(40)]
            body = orjson.dumps({"topicConfigList": rows})
            assert len(body) > 1024
            await rig.done(Request.UPDATE_AND_CREATE_TOPIC_LIST, body=body)

    run_once(work())


def topic_config(name: str) -> dict[str, object]:
    return {
        "topicName": name,
        "readQueueNums": 1,
        "writeQueueNums": 1,
        "perm": 6,
        "topicFilterType": "SINGLE_TAG",
        "topicSysFlag": 0,
        "order": False,
    }


def test_changed_settings_outlive_the_broker_but_not_a_flag() -> None:
    files = MemoryFiles()

    async def change() -> None:
        async with running(files=files) as rig:
            body = b"fileReservedTime=24\nmaxMessageSize=2048"
            await rig.done(Request.UPDATE_BROKER_CONFIG, body=body)

    async def look(hours: int, **changes: object) -> None:
        async with running(files=files, **changes) as rig:
            config = rig.broker.store.config
            assert config == rig.broker.core.config.store
            assert (config.retention_hours, config.message_bytes_max) == (hours, 2048)
            shown = bytes((await rig.done(Request.GET_BROKER_CONFIG)).body)
            assert f"fileReservedTime={hours}\n".encode() in shown

    run_once(change())
    run_once(look(24))
    run_once(look(72, pinned={"retention_hours"}))


def test_a_change_that_cannot_be_written_does_not_hold() -> None:
    async def work() -> None:
        async with running() as rig:
            before = rig.broker.core.config
            files = rig.broker._files
            assert isinstance(files, MemoryFiles)
            files.fail("pwritev", error=errno.ENOSPC, within="/commitlog/")
            code, remark = await rig.refused(
                Request.UPDATE_BROKER_CONFIG, body=b"fileReservedTime=24"
            )
            assert code == Response.SERVICE_NOT_AVAILABLE
            assert "no room" in remark
            assert rig.broker.core.config == before

    run_once(work())


def test_what_a_start_cannot_understand_is_left_out(caplog: pytest.LogCaptureFixture) -> None:
    files = MemoryFiles()

    async def spoil() -> None:
        async with running(files=files) as rig:
            rows = [("retention_hours", "yes"), ("of_another_version", "1"), ("broker_name", "x")]
            rig.broker.store.change([(SETTING_TABLE, *row) for row in rows])
            rig.broker.store.change([(SETTING_TABLE, "hot_bytes", "1MiB")])

    async def look() -> None:
        async with running(files=files) as rig:
            assert rig.broker.store.config.hot_bytes == 1 << 20
            assert rig.broker.store.config.retention_hours == 72
            assert rig.broker.core.config.broker_name == "broker-a"

    run_once(spoil())
    run_once(look())
    for name in ("retention_hours", "of_another_version", "broker_name"):
        assert name in caplog.text


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


def test_a_single_master() -> None:
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

    run_once(work())


def test_topics_without_settings_are_cleaned() -> None:
    async def work() -> None:
        async with running() as rig:
            await rig.make_topic("orders")
            await rig.send("orders")
            store = rig.broker.store
            store.stage(Message("left-over", 0, b"x"))
            store.stage(Message("left-over", 3, b"x"))
            store.write_staged()
            await rig.done(Request.CLEAN_UNUSED_TOPIC)
            topics = {topic for topic, _ in store.queues}
            assert "left-over" not in topics
            assert topics >= {"orders", STATE_TOPIC}
            await rig.done(Request.CLEAN_UNUSED_TOPIC)

    run_once(work())


def test_files_that_are_old_go_when_asked_for_whatever_the_hour() -> None:
    async def work() -> None:
        files = MemoryFiles()
        async with running(files=files) as rig:
            store, core = rig.broker.store, rig.broker.core
            await rig.make_topic("orders")
            for _ in range(60):
                await rig.send("orders", b"x" * 60_000)
            assert len(store.log.segments) > 2
            checkpoints: list[BaseException | None] = []
            store.housekeeping.checkpoint(checkpoints.append)
            await until(lambda: checkpoints)
            hour = (time.localtime(store.now_ms() / 1000 + 100 * 3_600).tm_hour + 12) % 24
            body = f"deleteWhen={hour:02d}".encode()
            await rig.done(Request.UPDATE_BROKER_CONFIG, body=body)
            store.now_ms = core.now_ms = lambda: wall_ms() + 100 * 3_600_000
            await rig.done(Request.DELETE_EXPIRED_COMMITLOG)
            await until(lambda: len(store.log.segments) == 1)
            await until(lambda: len(files.names("/store/commitlog")) <= 2)

    run_once(work())


def test_queue_files_that_nobody_needs_go_when_asked_for() -> None:
    async def work() -> None:
        files = MemoryFiles()
        async with running(files=files) as rig:
            await rig.make_topic("orders")
            await rig.send("orders")
            path = "/store/consumequeue/nobodys/0/00000000000000000000"
            files.make_directory(path.rpartition("/")[0])
            files.create(path, 20).close()
            await rig.done(Request.CLEAN_EXPIRED_CONSUMEQUEUE)
            await until(lambda: not files.exists(path))
            assert (await rig.pull("orders", 0)).code == Response.SUCCESS

    run_once(work())
