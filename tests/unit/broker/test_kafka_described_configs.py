"""This module tests how a topic's configurations are described to Kafka's administrators: with the
names that its tools show and look for.
"""

from __future__ import annotations

import asyncio
from typing import Any

from sluice.protocol import kafka_codes
from tests.unit.broker.kafka_door_kit import KafkaClient, kafka_rig

CREATE, DESCRIBE_CONFIGS = 19, 32
TOPIC = 2
SET_HERE, DEFAULT = 1, 5


async def described(client: KafkaClient, topic: str, *, synonyms: bool) -> dict[str, Any]:
    asked = {
        "resources": [{"resource_type": TOPIC, "resource_name": topic, "configuration_keys": None}],
        "include_synonyms": synonyms,
        "include_documentation": False,
    }
    (result,) = (await client.ask(DESCRIBE_CONFIGS, 4, asked)).results
    assert result.error_code == 0
    return {each.name: each for each in result.configs}


def synonyms_of(config: Any) -> list[tuple[str, str, int]]:
    return [(each.name, each.value, each.source) for each in config.synonyms]


def test_who_asks_is_told_where_a_value_comes_from() -> None:
    async def run() -> None:
        async with kafka_rig() as rig:
            client = await rig.connect()
            await client.create("t", 1, segment_bytes="2000000", retention_ms="5000")
            found = await described(client, "t", synonyms=True)
            assert synonyms_of(found["segment.bytes"]) == [
                ("segment.bytes", "2000000", SET_HERE),
                ("log.segment.bytes", "1073741824", DEFAULT),
            ]
            assert synonyms_of(found["retention.ms"]) == [("retention.ms", "5000", SET_HERE)]
            assert synonyms_of(found["max.message.bytes"]) == [
                ("message.max.bytes", found["max.message.bytes"].value, DEFAULT)
            ]
            assert synonyms_of(found["segment.ms"]) == []
            found = await described(client, "t", synonyms=False)
            assert all(synonyms_of(config) == [] for config in found.values())

    asyncio.run(run())


def test_configurations_that_mean_nothing_here_are_kept() -> None:
    async def run() -> None:
        async with kafka_rig() as rig:
            client = await rig.connect()
            given = {
                "compression_gzip_level": "1",
                "compression_lz4_level": "3",
                "compression_zstd_level": "-5",
                "local_retention_ms": "1000",
                "remote_storage_enable": "false",
            }
            await client.create("t", 1, **given)
            found = await described(client, "t", synonyms=False)
            for name, value in given.items():
                assert found[name.replace("_", ".")].value == value

    asyncio.run(run())


def test_a_topic_that_exists_is_named_in_the_refusal() -> None:
    async def run() -> None:
        async with kafka_rig() as rig:
            client = await rig.connect()
            await client.create("t")
            topic = {"name": "t", "num_partitions": 1, "replication_factor": 1}
            (made,) = (await client.ask(CREATE, 7, {"topics": [topic], "timeout": 1000})).topics
            assert made.error_code == kafka_codes.TOPIC_ALREADY_EXISTS
            assert made.error_message == "Topic 't' already exists."

    asyncio.run(run())
