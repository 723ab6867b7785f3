"""Queues that the broker divides, and how groups read topics."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from sluice.broker.allocation import allocate
from sluice.config import NameserverConfig
from sluice.nameserver.server import Nameserver
from sluice.protocol.remoting_codes import RequestCode as Request
from sluice.protocol.remoting_codes import ResponseCode as Response
from sluice.storage.memory_files import MemoryFiles
from tests.unit.broker.broker_kit import BROKER, Rig, running
from tests.unit.loops import run_once, until

QUEUES = [("a", number) for number in range(5)] + [("b", number) for number in range(3)]


@pytest.mark.parametrize("strategy", ["AVG", "AVG_BY_CIRCLE"])
@pytest.mark.parametrize("member_count", [1, 2, 3, 8, 11])
def test_every_queue_has_one_reader_and_nobody_much_more(strategy: str, member_count: int) -> None:
    members = [f"m{number}" for number in range(member_count)]
    shares = [allocate(strategy, QUEUES, reversed(members), member) for member in members]
    found = [queue for share in shares for queue in share or ()]
    assert sorted(found) == QUEUES
    sizes = [len(share or ()) for share in shares]
    assert max(sizes) - min(sizes) <= 1


def test_as_rocketmqs_clients_divide() -> None:
    members = ["m0", "m1", "m2"]
    assert allocate("AVG", QUEUES, members, "m0") == QUEUES[0:3]
    assert allocate("AVG", QUEUES, members, "m2") == QUEUES[6:8]
    assert allocate("AVG_BY_CIRCLE", QUEUES, members, "m1") == QUEUES[1::3]
    assert allocate("AVG", QUEUES, members, "stranger") == ()
    assert allocate("CONFIG", QUEUES, members, "m0") is None
    assert allocate("AVG", QUEUES, [], "m0") is None


def query(**changes: str) -> bytes:
    members = {
        "clientId": "client-1",
        "consumerGroup": "readers",
        "messageModel": "CLUSTERING",
        "strategyName": "AVG",
        "topic": "orders",
    }
    return orjson.dumps({**members, **changes})


async def assigned(rig: Rig, **changes: str) -> list[tuple[str, int]] | None:
    found = await rig.json(Request.QUERY_ASSIGNMENT, body=query(**changes))
    if "messageQueueAssignments" not in found:
        return None
    rows: list[dict[str, Any]] = found["messageQueueAssignments"]
    assert len({row["mode"] for row in rows}) <= 1
    return [(row["messageQueue"]["brokerName"], row["messageQueue"]["queueId"]) for row in rows]


def test_members_get_their_share() -> None:
    async def work() -> None:
        async with running() as rig:
            await rig.make_topic("orders", 3)
            assert await assigned(rig) is None, "nobody of the group is there"
            await rig.join("readers", {"orders": "*"})
            assert await assigned(rig) == [(BROKER, 0), (BROKER, 1), (BROKER, 2)]
            other = await rig.connect()
            await rig.join("readers", {"orders": "*"}, client_id="client-2", link=other)
            assert await assigned(rig) == [(BROKER, 0), (BROKER, 1)]
            assert await assigned(rig, clientId="client-2") == [(BROKER, 2)]
            assert await assigned(rig, clientId="stranger") == []
            assert await assigned(rig, messageModel="BROADCASTING", clientId="stranger") == [
                (BROKER, number) for number in range(3)
            ]
            assert await assigned(rig, topic="none") is None
            assert await assigned(rig, strategyName="none") is None
            assert (await rig.refused(Request.QUERY_ASSIGNMENT, body=b"{}"))[0] == 1

    run_once(work())


def test_the_queues_are_those_of_all_brokers() -> None:
    async def work() -> None:
        nameserver = Nameserver(NameserverConfig(listen_port=0))
        await nameserver.start()
        try:
            known = {"nameserver_addresses": (nameserver.address,), "register_interval_ms": 200}
            async with (
                running(**known) as rig,
                running(**known, broker_name="broker-b") as other,
            ):
                for each in (rig, other):
                    await each.make_topic("orders", 2)
                    await each.broker.registrar.registered()
                await rig.join("readers", {"orders": "*"})
                assert await assigned(rig) == [
                    (name, number) for name in (BROKER, "broker-b") for number in range(2)
                ]
                await nameserver.stop()
                await until(lambda: rig.broker.registrar.registered_count == 0)
                assert await assigned(rig) == [(BROKER, 0), (BROKER, 1)], "as far as it knows"
        finally:
            await nameserver.stop()

    run_once(work())


def mode(**changes: object) -> bytes:
    members = {"consumerGroup": "readers", "mode": "PULL", "popShareQueueNum": 0, "topic": "orders"}
    return orjson.dumps({**members, **changes})


def test_members_of_a_group_that_pops_share_queues() -> None:
    async def work() -> None:
        async with running() as rig:
            await rig.make_topic("orders", 3)
            await rig.join("readers", {"orders": "*"})
            await rig.done(Request.SET_MESSAGE_REQUEST_MODE, body=mode(mode="POP"))
            found = await rig.json(Request.QUERY_ASSIGNMENT, body=query())
            (row,) = found["messageQueueAssignments"]
            assert (row["mode"], row["messageQueue"]["queueId"]) == ("POP", -1)
            for number in (2, 3):
                link = await rig.connect()
                name = f"client-{number}"
                await rig.join("readers", {"orders": "*"}, client_id=name, link=link)
            body = mode(mode="POP", popShareQueueNum=1)
            await rig.done(Request.SET_MESSAGE_REQUEST_MODE, body=body)
            assert await assigned(rig) == [(BROKER, 0), (BROKER, 1)]
            assert await assigned(rig, clientId="client-3") == [(BROKER, 2), (BROKER, 0)]
            await rig.done(Request.SET_MESSAGE_REQUEST_MODE, body=mode())
            assert await assigned(rig) == [(BROKER, 0)]

    run_once(work())


def test_modes_are_kept() -> None:
    files = MemoryFiles()

    async def change() -> None:
        async with running(files=files) as rig:
            await rig.make_topic("orders")
            await rig.make_group("readers")
            await rig.make_group("others")
            await rig.done(Request.SET_MESSAGE_REQUEST_MODE, body=mode())
            await rig.done(Request.SET_MESSAGE_REQUEST_MODE, body=mode(consumerGroup="others"))

    async def look() -> None:
        async with running(files=files) as rig:
            found = await rig.json(Request.GET_ALL_MESSAGE_REQUEST_MODE)
            groups = found["messageRequestModeMap"]["orders"]
            assert sorted(groups) == ["others", "readers"]
            assert groups["readers"]["mode"] == "PULL"

    run_once(change())
    written = orjson.loads(files.read("/store/config/messageRequestMode.json", 1 << 20))
    assert "readers" in written["messageRequestModeMap"]["orders"]
    run_once(look())


def test_a_mode_is_set_before_the_group_is_known() -> None:
    async def work() -> None:
        async with running() as rig:
            await rig.make_topic("orders")
            await rig.done(Request.SET_MESSAGE_REQUEST_MODE, body=mode(mode="POP"))
            assert rig.broker.core.groups.get("readers") is not None
            await rig.join("readers", {"orders": "*"})
            found = await rig.json(Request.QUERY_ASSIGNMENT, body=query())
            assert [row["mode"] for row in found["messageQueueAssignments"]] == ["POP"]

    run_once(work())


BAD_MODES: list[tuple[dict[str, object], int, str]] = [
    ({"topic": "%RETRY%readers"}, 16, "retry topic is not allowed to set mode"),
    ({"topic": "none"}, 17, "topic[none] not exist"),
    (
        {"consumerGroup": "none"},
        26,
        "subscription group [none] does not exist, apply first please!",
    ),
    ({"mode": "PUSH"}, 29, "mode 'PUSH'; allowed: PULL, POP"),
    ({"popShareQueueNum": 1 << 40}, 1, "popShareQueueNum does not fit into 32 bits"),
]


@pytest.mark.parametrize(("changes", "code", "remark"), BAD_MODES)
def test_modes_that_cannot_be_had(changes: dict[str, object], code: int, remark: str) -> None:
    async def work() -> None:
        async with running(auto_create_groups=False) as rig:
            await rig.make_topic("orders")
            await rig.make_group("readers")
            asked = Request.SET_MESSAGE_REQUEST_MODE
            assert await rig.refused(asked, body=mode(**changes)) == (code, remark)
            found = await rig.json(Request.GET_ALL_MESSAGE_REQUEST_MODE)
            assert found == {"messageRequestModeMap": {}}

    run_once(work())


def test_addresses_for_replicas() -> None:
    async def work() -> None:
        async with running() as rig:
            code = Request.EXCHANGE_BROKER_HA_INFO
            found = (await rig.done(code)).ext
            assert found["masterAddress"] == found["masterHaAddress"] == rig.broker.address
            assert int(found["masterFlushOffset"]) == rig.broker.store.recovery.end
            told = await rig.done(code, {"masterHaAddress": "10.0.0.1:1", "masterFlushOffset": 7})
            assert "masterAddress" not in told.ext
            await rig.done(Request.RESET_MASTER_FLUSH_OFFSET, {"masterFlushOffset": 7})
            assert (await rig.ask(Request.RESET_MASTER_FLUSH_OFFSET)).code == Response.SUCCESS

    run_once(work())
