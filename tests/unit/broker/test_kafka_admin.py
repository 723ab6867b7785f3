"""Groups of Kafka's clients as administrators see them: over RocketMQ's protocol, and measured."""

from __future__ import annotations

import asyncio
from typing import Any

from sluice.broker import kafka_admin_api
from sluice.broker.kafka_group_values import Joined, JoinRequest, Synced, SyncRequest
from sluice.broker.kafka_offsets import Committed
from sluice.protocol.remoting_codes import RequestCode as Request
from sluice.telemetry import Page
from tests.unit.broker.broker_kit import Rig, running
from tests.unit.loops import run_once

TOPIC = "orders"


async def soon(answers: list[Any]) -> None:
    """Wait for an answer."""
    async with asyncio.timeout(60):
        while not answers:  # noqa: ASYNC110  # nothing tells of it
            await asyncio.sleep(0.01)


async def commit(rig: Rig, group: str, offset: int) -> None:
    """A group commits offsets of two partitions."""
    core = rig.broker.core
    rows = [((TOPIC, partition), Committed(offset, -1, "", core.now_ms())) for partition in (0, 1)]
    core.kafka_groups.check_commit(group, "", None, -1)
    done: list[Any] = []
    core.kafka_offsets.commit(group, rows, done.append)
    await soon(done)
    assert done == [None]


async def join(rig: Rig, group: str) -> None:
    """A member joins and gets its part."""
    joined: list[Joined] = []
    request = JoinRequest(
        *("", None, "client", "/10.0.0.1", 10_000, 10_000, "consumer"),
        (("range", b"x"),),
        "client-1",
    )
    rig.broker.core.kafka_groups.join(group, request, joined.append)
    synced: list[Synced] = []
    rig.broker.core.kafka_groups.sync(group, SyncRequest("client-1", None, 1), synced.append)
    await soon(synced)
    assert (joined[0].code, synced[0].code) == (0, 0)


def test_groups_are_listed() -> None:
    async def run() -> None:
        async with running(kafka_initial_rebalance_delay_ms=0) as rig:
            await rig.make_topic(TOPIC)
            for _ in range(3):
                await rig.send(TOPIC)
            await join(rig, "a group")
            await commit(rig, "b", 2)
            body = await rig.json(Request.SLUICE_LIST_KAFKA_GROUPS)
            assert [(each["group"], each["state"]) for each in body["groups"]] == [
                ("a group", "Stable"),
                ("b", "Empty"),
            ]
            assert body["groups"][0]["members"] == [
                {
                    "memberId": "client-1",
                    "instanceId": "",
                    "clientId": "client",
                    "host": "10.0.0.1",
                }
            ]
            offsets = body["groups"][1]["offsets"]
            assert [(o["queueId"], o["brokerOffset"], o["consumerOffset"]) for o in offsets] == [
                (0, 3, 2),
                (1, 0, 0),
            ]
            body = await rig.json(Request.SLUICE_LIST_KAFKA_GROUPS, {"group": "b"})
            assert [each["group"] for each in body["groups"]] == ["b"]
            body = await rig.json(Request.SLUICE_LIST_KAFKA_GROUPS, {"group": "nobody"})
            assert body["groups"] == []
            # Those who ask for the progress of all groups find them marked.
            body = await rig.json(Request.GET_BROKER_CONSUME_STATS, {"isOrder": "false"})
            found = {name: rows for each in body["consumeStatsList"] for name, rows in each.items()}
            assert len(found["kafka:b"]) == 1
            assert body["totalDiff"] == 1

    run_once(run())


def test_a_long_list_comes_in_pages() -> None:
    async def run() -> None:
        async with running() as rig:
            count = kafka_admin_api.GROUPS_A_PAGE + 5
            for number in range(count):
                rig.broker.core.kafka_groups.check_commit(f"g{number:04}", "", None, -1)
            first = await rig.done(Request.SLUICE_LIST_KAFKA_GROUPS)
            assert first.ext["after"] == f"g{kafka_admin_api.GROUPS_A_PAGE - 1:04}"
            body = await rig.json(Request.SLUICE_LIST_KAFKA_GROUPS, {"after": first.ext["after"]})
            assert [each["group"] for each in body["groups"]] == [
                f"g{number:04}" for number in range(count - 5, count)
            ]

    run_once(run())


def test_what_is_measured() -> None:
    async def run() -> None:
        async with running(kafka_initial_rebalance_delay_ms=0) as rig:
            await rig.make_topic(TOPIC)
            for _ in range(5):
                await rig.send(TOPIC)
            await join(rig, "a")
            await commit(rig, "b", 2)
            page = Page()
            await rig.broker.metrics.collect(page)
            text = page.text()
            for line in (
                'sluice_kafka_groups{state="Empty"} 1',
                'sluice_kafka_groups{state="Stable"} 1',
                'sluice_kafka_group_members{group="a"} 1',
                'sluice_kafka_group_lag_messages{topic="orders",group="b"} 3',
                "sluice_kafka_offset_commits_total 2",
                "sluice_kafka_transactions_open 0",
            ):
                assert line in text, line

    run_once(run())
