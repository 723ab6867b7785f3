"""This module tests what clients are told of the leader's epochs: there is one, and it ends where
the partition does.
"""

from __future__ import annotations

import asyncio

from sluice.protocol import kafka_codes
from tests.unit.broker.kafka_door_kit import batch, kafka_rig

OFFSET_FOR_LEADER_EPOCH = 23


def test_an_epoch_that_never_was_has_no_end() -> None:
    async def run() -> None:
        async with kafka_rig() as rig:
            client = await rig.connect()
            await client.create("t")
            await client.produce("t", batch(b"a", b"b"))
            found: dict[int, tuple[int, int, int]] = {}
            for epoch in (-1, 0, 5):
                part = {"partition": 0, "current_leader_epoch": -1, "leader_epoch": epoch}
                asked = {"replica_id": -1, "topics": [{"topic": "t", "partitions": [part]}]}
                answer = await client.ask(OFFSET_FOR_LEADER_EPOCH, 4, asked)
                (end,) = answer.topics[0].partitions
                found[epoch] = (end.error_code, end.leader_epoch, end.end_offset)
            assert found == {-1: (0, -1, -1), 0: (0, 0, 2), 5: (0, -1, -1)}

    asyncio.run(run())


def test_a_client_with_another_leader_is_told_so() -> None:
    async def run() -> None:
        async with kafka_rig() as rig:
            client = await rig.connect()
            await client.create("t")
            part = {"partition": 0, "current_leader_epoch": 3, "leader_epoch": 0}
            asked = {"replica_id": -1, "topics": [{"topic": "t", "partitions": [part]}]}
            (end,) = (await client.ask(OFFSET_FOR_LEADER_EPOCH, 4, asked)).topics[0].partitions
            assert end.error_code == kafka_codes.UNKNOWN_LEADER_EPOCH

    asyncio.run(run())
