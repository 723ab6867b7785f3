"""This module tests a whole nameserver over its socket: every code, bad input, loss, and its file.

What Apache's nameserver answers to the same requests is compared in tests/interop.
"""

from __future__ import annotations

import asyncio
import errno
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any
from zlib import crc32

import orjson
import pytest

from sluice.config import NameserverConfig
from sluice.errors import ConfigError, LinkLost
from sluice.link import RemotingLink
from sluice.nameserver import Nameserver
from sluice.nameserver.api import NameserverApi
from sluice.nameserver.kv import KvTable
from sluice.nameserver.routes import RouteTable
from sluice.net import Connection, Limits, Listener
from sluice.protocol import remoting
from sluice.protocol import remoting_bodies as bodies
from sluice.protocol.framing import Frame, frame_of
from sluice.protocol.remoting import RemotingCommand
from sluice.protocol.remoting_schemas import REQUESTS
from sluice.storage.memory_files import MemoryFiles
from tests.unit.loops import run_once, until

BROKER = {
    "brokerName": "a",
    "brokerAddr": "10.0.0.1:10911",
    "clusterName": "C",
    "haServerAddr": "10.0.0.1:10912",
    "brokerId": "0",
}
VERSION = bodies.DataVersion(1, 0, 1700000000000)
TOPICS = bodies.Registration(
    {
        "T": bodies.TopicConfig("T", 4, 4, 6),
        "U": bodies.TopicConfig("U", 8, 8, 6, sys_flag=2),
    },
    VERSION,
)


class Site:
    """A nameserver, its clock, and a link to it."""

    def __init__(self, **settings: Any) -> None:
        self.now_ms = 1_000_000
        files = settings.pop("files", None)
        limits = settings.pop("limits", None)
        config = NameserverConfig(listen_port=0, **settings)
        self.nameserver = Nameserver(config, lambda: self.now_ms, files=files, limits=limits)
        self.links: list[RemotingLink] = []

    async def link(self) -> RemotingLink:
        self.links.append(await RemotingLink.open(self.nameserver.address))
        return self.links[-1]

    async def ask(
        self, code: int, body: bytes = b"", link: RemotingLink | None = None, /, **ext: str
    ) -> RemotingCommand:
        return await (link or self.links[0]).request(code, ext, body, timeout_seconds=30)

    async def register(
        self,
        registration: bodies.Registration = TOPICS,
        link: RemotingLink | None = None,
        /,
        **ext: str,
    ) -> RemotingCommand:
        body = bodies.write_registration(registration)
        answer = await self.ask(103, body, link, **{**BROKER, **ext})
        assert (answer.code, answer.remark) == (0, None)
        return answer


@asynccontextmanager
async def site(**settings: Any) -> AsyncIterator[Site]:
    here = Site(**settings)
    await here.nameserver.start()
    try:
        await here.link()
        yield here
    finally:
        for link in here.links:
            await link.close()
        await here.nameserver.stop()


def on_site(work: Callable[[Site], Coroutine[Any, Any, None]], **settings: Any) -> None:
    async def run() -> None:
        async with site(**settings) as here:
            await work(here)

    run_once(run())


def error_of(answer: RemotingCommand) -> tuple[int, str | None]:
    assert answer.is_answer
    assert len(answer.body) == 0
    return answer.code, answer.remark


def members(answer: RemotingCommand) -> Any:
    assert (answer.code, answer.remark) == (0, None)
    return orjson.loads(answer.body)


# Every code -------------------------------------------------------------------------------------


def test_every_request_to_a_nameserver_in_the_table_is_served() -> None:
    api = NameserverApi(NameserverConfig(), RouteTable(), KvTable(), lambda: 0, lambda _: None)
    wanted = {row.code for row in REQUESTS.values() if row.direction.endswith(">ns")}
    assert api.codes == wanted


def test_a_route() -> None:
    async def work(here: Site) -> None:
        await here.register()
        answer = await here.ask(105, topic="T")
        assert answer.body == (
            b'{"brokerDatas":[{"brokerAddrs":{"0":"10.0.0.1:10911"},"brokerName":"a",'
            b'"cluster":"C","enableActingMaster":false}],"filterServerTable":{},'
            b'"queueDatas":[{"brokerName":"a","perm":6,"readQueueNums":4,"topicSysFlag":0,'
            b'"writeQueueNums":4}]}'
        )
        assert error_of(await here.ask(105, topic="N")) == (
            17,
            "No topic route info in name server for the topic: N\n"
            "See https://rocketmq.apache.org/docs/bestPractice/06FAQ for further details.",
        )

    on_site(work)


def test_who_asks_with_an_old_version_gets_keys_without_quotes() -> None:
    def question(version: int, ext: dict[str, str]) -> bytes:
        return remoting.encode(RemotingCommand(105, 1, 0, ext, version=version, language="GO"))

    async def work(here: Site) -> None:
        await here.register()
        reader, writer = await asyncio.open_connection(*here.nameserver.address.split(":"))
        bare = b'"brokerAddrs":{0:"10.0.0.1:10911"}'
        quoted = b'"brokerAddrs":{"0":"10.0.0.1:10911"}'
        for version, standard, wanted in (
            (317, "", bare),
            (400, "false", bare),
            (317, "true", quoted),
            (401, "", quoted),
        ):
            writer.write(question(version, {"topic": "T", "acceptStandardJsonOnly": standard}))
            size = int.from_bytes(await reader.readexactly(4), "big")
            assert wanted in bytes(remoting.decode(await reader.readexactly(size)).body)
        writer.close()
        await writer.wait_closed()

    on_site(work)


def test_a_route_of_a_zone() -> None:
    async def work(here: Site) -> None:
        await here.register(__ZONE_NAME="north")
        other = {"brokerName": "b", "brokerAddr": "10.0.0.2:10911", "__ZONE_NAME": "south"}
        await here.register(**other)
        both = members(await here.ask(105, topic="T"))
        assert [broker["zoneName"] for broker in both["brokerDatas"]] == ["north", "south"]
        near = await here.ask(105, topic="T", __ZONE_MODE="true", __ZONE_NAME="south")
        assert b'"brokerAddrs":{0:"10.0.0.2:10911"}' in bytes(near.body)
        assert b"10.0.0.1" not in bytes(near.body)

    on_site(work)


def test_a_registration_is_checked() -> None:
    async def work(here: Site) -> None:
        body = bodies.write_registration(TOPICS)
        refused = await here.ask(103, body, **{**BROKER, "bodyCrc32": "1"})
        assert error_of(refused) == (1, "crc32 not match")
        one = bodies.write_registration(bodies.Registration({"T": bodies.TopicConfig("T")}))
        assert error_of(await here.ask(103, one, **BROKER)) == (1, "register broker failed")
        for junk in (b"junk", b"[]", b'{"topicConfigSerializeWrapper":7}'):
            code, remark = error_of(await here.ask(103, junk, **BROKER))
            assert (code, str(remark)[:35]) == (1, "Failed to decode RegisterBrokerBody")
        assert members(await here.ask(206)) == {"topicList": []}
        checksum = str(crc32(body) & 0x7FFFFFFF)
        assert (await here.ask(103, body, **{**BROKER, "bodyCrc32": checksum})).code == 0
        assert members(await here.ask(206)) == {"topicList": ["T", "U"]}
        packed = bodies.write_registration(
            bodies.Registration({"T": bodies.TopicConfig("T"), "V": bodies.TopicConfig("V")}),
            compressed=True,
        )
        assert (await here.ask(103, packed, **{**BROKER, "compressed": "true"})).code == 0
        assert members(await here.ask(206)) == {"topicList": ["T", "U", "V"]}
        bomb = b"x\x9c" + packed[2:40]
        assert (await here.ask(103, bomb, **{**BROKER, "compressed": "true"})).code == 1

    on_site(work)


def test_a_copy_learns_where_its_leader_is_and_all_learn_the_ordered_topics() -> None:
    async def work(here: Site) -> None:
        assert (await here.register()).body == b""
        await here.ask(100, namespace="ORDER_TOPIC_CONFIG", key="T", value="a:4")
        answer = await here.register(brokerId="1", brokerAddr="10.0.0.3:10911")
        assert answer.ext == {"haServerAddr": "10.0.0.1:10912", "masterAddr": "10.0.0.1:10911"}
        assert members(answer) == {"table": {"T": "a:4"}}
        assert "orderTopicConf" not in members(await here.ask(105, topic="T"))
        group = await here.ask(901, clusterName="C", brokerName="a")
        assert group.body == (
            b'{"brokerMemberGroup":{"brokerAddrs":{0:"10.0.0.1:10911",1:"10.0.0.3:10911"},'
            b'"brokerName":"a","cluster":"C"}}'
        )

    on_site(work)


def test_ordered_topics_are_in_routes_only_where_that_is_set() -> None:
    async def work(here: Site) -> None:
        await here.ask(100, namespace="ORDER_TOPIC_CONFIG", key="T", value="a:4")
        assert (await here.register()).body == b""
        assert members(await here.ask(105, topic="T"))["orderTopicConf"] == "a:4"
        assert "orderTopicConf" not in members(await here.ask(105, topic="U"))

    on_site(work, order_topics_in_routes=True, order_topics_to_brokers=False)


def test_cluster_info() -> None:
    async def work(here: Site) -> None:
        assert members(await here.ask(106)) == {"brokerAddrTable": {}, "clusterAddrTable": {}}
        await here.register()
        assert (await here.ask(106)).body == (
            b'{"brokerAddrTable":{"a":{"brokerAddrs":{0:"10.0.0.1:10911"},"brokerName":"a",'
            b'"cluster":"C","enableActingMaster":false}},"clusterAddrTable":{"C":["a"]}}'
        )

    on_site(work)


def test_lists_of_topics() -> None:
    async def work(here: Site) -> None:
        await here.register()
        assert members(await here.ask(224, cluster="C")) == {"topicList": ["T", "U"]}
        assert members(await here.ask(224, cluster="X")) == {"topicList": []}
        assert members(await here.ask(304)) == {
            "topicList": ["C", "a"],
            "brokerAddr": "10.0.0.1:10911",
        }
        assert members(await here.ask(311)) == {"topicList": []}
        assert members(await here.ask(312)) == {"topicList": ["U"]}
        assert members(await here.ask(313)) == {"topicList": ["U"]}

    on_site(work)


def test_lists_can_be_disabled() -> None:
    async def work(here: Site) -> None:
        for code in (206, 224, 311, 312, 313):
            assert error_of(await here.ask(code, cluster="C")) == (1, "disable")

    on_site(work, list_all_topics=False, list_topics=False)


def test_the_data_version() -> None:
    async def work(here: Site) -> None:
        told = orjson.dumps(VERSION.members())
        unknown = await here.ask(322, told, **BROKER)
        assert (unknown.code, unknown.ext, unknown.body) == (0, {"changed": "true"}, b"")
        await here.register()
        same = await here.ask(322, told, **BROKER)
        assert same.ext == {"changed": "false"}
        assert members(same) == VERSION.members()
        for told in (orjson.dumps({"counter": 2}), b""):
            assert (await here.ask(322, told, **BROKER)).ext == {"changed": "true"}
        code, remark = error_of(await here.ask(322, b"junk", **BROKER))
        assert (code, str(remark)[:20]) == (1, "the body is not JSON")

    on_site(work)


def test_permissions_and_topics_can_be_changed() -> None:
    async def work(here: Site) -> None:
        await here.register()
        assert (await here.ask(205, brokerName="a")).ext == {"wipeTopicCount": "2"}
        assert members(await here.ask(105, topic="T"))["queueDatas"][0]["perm"] == 4
        assert (await here.ask(327, brokerName="a")).ext == {"addTopicCount": "2"}
        assert members(await here.ask(105, topic="T"))["queueDatas"][0]["perm"] == 6
        queues = {"queueDatas": [bodies.QueueData("a", 1, 1, 6).members()]}
        assert (await here.ask(217, orjson.dumps(queues), topic="N")).code == 0
        assert members(await here.ask(105, topic="N"))["queueDatas"] == queues["queueDatas"]
        assert (await here.ask(217, topic="M")).code == 0
        foreign = {"queueDatas": [bodies.QueueData("nobody", 1, 1, 6).members()]}
        assert (await here.ask(217, orjson.dumps(foreign), topic="M")).code == 0
        assert (await here.ask(216, topic="N", clusterName="C")).code == 0
        assert (await here.ask(216, topic="T")).code == 0
        assert members(await here.ask(206)) == {"topicList": ["U"]}

    on_site(work)


def test_values() -> None:
    async def work(here: Site) -> None:
        missing = (22, "No config item, Namespace: n Key: k")
        assert error_of(await here.ask(101, namespace="n", key="k")) == missing
        assert error_of(await here.ask(219, namespace="n")) == (22, "No config item, Namespace: n")
        assert (await here.ask(100, namespace="n", key="k", value="ü=1")).code == 0
        assert (await here.ask(101, namespace="n", key="k")).ext == {"value": "ü=1"}
        assert members(await here.ask(219, namespace="n")) == {"table": {"k": "ü=1"}}
        assert (await here.ask(102, namespace="n", key="k")).code == 0
        assert (await here.ask(102, namespace="m", key="k")).code == 0
        assert error_of(await here.ask(101, namespace="n", key="k")) == missing
        assert members(await here.ask(219, namespace="n")) == {"table": {}}

    on_site(work)


def test_settings_over_the_wire_are_an_allowlist() -> None:
    async def work(here: Site) -> None:
        text = bytes((await here.ask(319)).body).decode()
        assert "scanNotActiveBrokerInterval=5000\n" in text
        assert "enableTopicList=true\n" in text
        for key in ("kvConfigPath", "configStorePath", "rocketmqHome", "configBlackList"):
            refused = await here.ask(318, f"{key}=/tmp/x\n".encode())
            assert error_of(refused) == (16, "Can not update config in black list.")
        for line, reason in (
            ("listenPort=1", "takes effect at start only"),
            ("nonsense=1", "is not known"),
            ("scanNotActiveBrokerInterval=x", "scanNotActiveBrokerInterval"),
            ("scanNotActiveBrokerInterval=0", "out of limits"),
        ):
            code, remark = error_of(await here.ask(318, line.encode()))
            assert code == 1
            assert reason in str(remark)
        changes = b"enableTopicList=false\nscanNotActiveBrokerInterval=10000\n"
        assert (await here.ask(318, changes)).code == 0
        assert error_of(await here.ask(224, cluster="C")) == (1, "disable")
        assert b"scanNotActiveBrokerInterval=10000\n" in bytes((await here.ask(319)).body)
        assert (await here.ask(318)).code == 0

    on_site(work)


# Bad input --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "ext", "remark"),
    [
        (105, {}, "the custom field <topic> is null"),
        (103, {**BROKER, "brokerId": "x"}, "the custom field <brokerId> is no int64: 'x'"),
        (104, {}, "the custom field <brokerName> is null"),
        (205, {}, "the custom field <brokerName> is null"),
        (224, {}, "the custom field <cluster> is null"),
        (2, {}, " request type 2 not supported"),
        (310, {}, " request type 310 not supported"),
    ],
)
def test_a_bad_request_is_answered_and_the_connection_stays(
    code: int, ext: dict[str, str], remark: str
) -> None:
    async def work(here: Site) -> None:
        answer_code, text = error_of(await here.ask(code, **ext))
        assert answer_code == (3 if "not supported" in remark else 1)
        assert str(text).startswith(remark)
        assert (await here.ask(106)).code == 0

    on_site(work)


@pytest.mark.parametrize("frame", [b"junk", b"\0\0\0\1{", b"\7\0\0\2{}", b"\0\xff\xff\xff{}"])
def test_a_frame_that_cannot_be_trusted_closes_its_connection_only(frame: bytes) -> None:
    async def work(here: Site) -> None:
        await here.register()
        reader, writer = await asyncio.open_connection(*here.nameserver.address.split(":"))
        writer.write(frame_of(frame))
        assert await reader.read() == b""
        writer.close()
        await writer.wait_closed()
        assert (await here.ask(105, topic="T")).code == 0

    on_site(work)


def test_a_oneway_request_gets_no_answer_not_even_an_error() -> None:
    async def work(here: Site) -> None:
        link = here.links[0]
        before = link._opaque
        link.oneway(105)
        link.oneway(2)
        link.oneway(100, {"namespace": "n", "key": "k", "value": "v"})
        assert (await here.ask(101, namespace="n", key="k")).ext == {"value": "v"}
        assert link._opaque == before + 4

    on_site(work)


def test_questions_of_who_does_not_read_are_refused_with_the_reason() -> None:
    async def work(here: Site) -> None:
        await here.register()
        answers = await asyncio.gather(*(here.ask(105, topic="T") for _ in range(300)))
        assert answers[0].code == 0
        refusals = [str(answer.remark) for answer in answers if answer.code == 2]
        assert "bytes of answers to this connection are unread" in refusals[0]
        assert (await here.ask(105, topic="T")).code == 0

    on_site(work, limits=Limits(unsent_bytes_max=2_000))


def test_many_questions_at_once_are_all_answered() -> None:
    async def work(here: Site) -> None:
        await here.register()
        answers = await asyncio.gather(*(here.ask(105, topic="T") for _ in range(2_000)))
        assert {answer.code for answer in answers} == {0}

    on_site(work, limits=Limits(unsent_bytes_max=40_000))


# Loss -------------------------------------------------------------------------------------------


def test_a_broker_leaves_with_its_connection() -> None:
    async def work(here: Site) -> None:
        first, second = await here.link(), await here.link()
        await here.register(TOPICS, first)
        await here.register(TOPICS, second)  # it connected anew before the old end was noticed
        await first.close()
        assert (await here.ask(105, topic="T")).code == 0
        await second.close()
        await until(lambda: not here.nameserver.table.brokers())
        assert (await here.ask(105, topic="T")).code == 17

    on_site(work)


def test_a_broker_leaves_when_it_says_so() -> None:
    async def work(here: Site) -> None:
        await here.register()
        assert (await here.ask(104, **BROKER)).code == 0
        assert (await here.ask(105, topic="T")).code == 17

    on_site(work)


def test_a_silent_broker_is_taken_out_and_disconnected() -> None:
    async def work(here: Site) -> None:
        broker, beating = await here.link(), await here.link()
        await here.register(TOPICS, broker)
        other = {**BROKER, "brokerName": "b", "brokerAddr": "10.0.0.2:10911"}
        await here.register(TOPICS, beating, **other)
        here.now_ms += 119_000
        assert (await here.ask(904, **other)).code == 0
        assert len(here.nameserver.table.brokers()) == 2
        here.now_ms += 2000
        await until(lambda: not broker.is_open)
        assert [b.name for b in here.nameserver.table.brokers()] == ["b"]
        assert beating.is_open

    on_site(work, scan_interval_ms=10)


class Told:
    """A broker that hears about a new lowest id."""

    def __init__(self) -> None:
        self.commands: list[RemotingCommand] = []

    def opened(self, connection: Connection) -> None:
        pass

    def received(self, connection: Connection, frames: list[Frame]) -> None:
        self.commands += map(remoting.decode, frames)

    def closed(self, connection: Connection) -> None:
        pass


@pytest.mark.parametrize("enabled", [True, False])
def test_brokers_are_told_about_a_new_lowest_id_where_that_is_set(enabled: bool) -> None:
    async def work(here: Site) -> None:
        told = Told()
        listener = Listener(told, Limits())
        await listener.start("127.0.0.1", 0)
        copy = {"brokerId": "1", "brokerAddr": "{}:{}".format(*listener.address)}
        leader = await here.link()
        await here.register(enableActingMaster="true", **copy)
        await here.register(TOPICS, leader, enableActingMaster="true")
        if enabled:
            await until(lambda: told.commands)
            command = told.commands.pop()
            assert (command.code, command.is_oneway) == (905, True)
            assert command.ext == {
                "minBrokerId": "0",
                "minBrokerAddr": "10.0.0.1:10911",
                "haBrokerAddr": "10.0.0.1:10912",
            }
        await leader.close()
        if enabled:
            await until(lambda: told.commands)
            assert told.commands[0].ext["offlineBrokerAddr"] == "10.0.0.1:10911"
        else:
            await until(lambda: len(here.nameserver.table.brokers()[0].addresses) == 1)
            await here.ask(106)
            assert told.commands == []
        await listener.stop()

    on_site(work, notify_lowest_id=enabled)


# The file ---------------------------------------------------------------------------------------


def test_values_survive_a_restart() -> None:
    files = MemoryFiles()

    async def put(here: Site) -> None:
        await asyncio.gather(
            *(here.ask(100, namespace="n", key=str(n), value="v") for n in range(50))
        )
        await here.ask(102, namespace="n", key="7")

    async def look(here: Site) -> None:
        table = members(await here.ask(219, namespace="n"))["table"]
        assert table == {str(n): "v" for n in range(50) if n != 7}

    on_site(put, files=files, directory="/ns")
    assert orjson.loads(files.read("/ns/kvConfig.json", 10_000))["configTable"]["n"]["1"] == "v"
    on_site(look, files=files, directory="/ns")


def test_a_value_that_cannot_be_saved_is_not_called_saved() -> None:
    files = MemoryFiles()

    async def work(here: Site) -> None:
        files.fail("replace", error=errno.ENOSPC)
        code, remark = error_of(await here.ask(100, namespace="n", key="k", value="v"))
        assert (code, "cannot be saved" in str(remark)) == (1, True)
        assert (await here.ask(100, namespace="n", key="k", value="w")).code == 0

    on_site(work, files=files, directory="/ns")


def test_a_directory_that_cannot_be_used() -> None:
    files = MemoryFiles()

    async def work(here: Site) -> None:
        other = Site(files=files, directory="/ns")
        with pytest.raises(ConfigError, match="another nameserver uses it"):
            await other.nameserver.start()
        taken = int(here.nameserver.address.rpartition(":")[2])
        third = Nameserver(NameserverConfig(listen_port=taken, directory="/x"), files=files)
        with pytest.raises(ConfigError, match="is in use"):
            await third.start()
        files.lock("/x/lock").release()  # it was given back

    on_site(work, files=files, directory="/ns")
    files.replace("/ns/kvConfig.json", b"junk")
    with pytest.raises(ConfigError, match=r"kvConfig\.json: the body is not JSON.*move it away"):
        on_site(work, files=files, directory="/ns")


def test_a_stopped_nameserver_is_gone() -> None:
    async def work() -> None:
        async with site() as here:
            await here.register()
            await here.nameserver.stop()
            await here.nameserver.stop()
            with pytest.raises(LinkLost):
                await here.ask(106)

    run_once(work())
