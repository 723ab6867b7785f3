"""This module tests how a topic's configurations are described to Kafka's administrators: with the
names that its tools show and look for.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from sluice.broker.topic_retention import Limits, limits_of
from sluice.protocol import kafka_codes
from tests.unit.broker.kafka_door_kit import KafkaClient, kafka_rig

METADATA, CREATE, CREATE_PARTITIONS = 3, 19, 37
DESCRIBE_CONFIGS, ALTER, ALTER_SOME = 32, 33, 44
TOPIC, BROKER = 2, 4
SET, DELETE, ADD, TAKE = range(4)
SET_HERE, SET_FOR_ALL, DEFAULT = 1, 3, 5


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
            name = "min.insync.replicas"
            assert synonyms_of(found[name]) == [(name, "1", SET_FOR_ALL), (name, "1", DEFAULT)]
            others = {each.name for each in found.values() if each.config_source != DEFAULT}
            assert others == {name, "segment.bytes", "retention.ms"}
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


@pytest.mark.parametrize(
    ("count", "reason"),
    [
        (2, "The topic t currently has 2 partition(s); 2 would not be an increase."),
        (1, "The topic t currently has 2 partition(s); 1 would not be an increase."),
        (0, "a topic has 1 to 65536 partitions"),
    ],
)
def test_partitions_that_a_topic_has_are_told_in_the_refusal(count: int, reason: str) -> None:
    async def run() -> None:
        async with kafka_rig() as rig:
            client = await rig.connect()
            await client.create("t", 2)
            wanted = {"topics": [{"name": "t", "count": count, "assignments": None}], "timeout": 9}
            (told,) = (await client.ask(CREATE_PARTITIONS, 3, wanted)).results
            assert told.error_code == kafka_codes.INVALID_PARTITIONS
            assert told.error_message == reason

    asyncio.run(run())


async def asked(client: KafkaClient, kind: int, name: str, keys: list[str] | None = None) -> Any:
    resource = {"resource_type": kind, "resource_name": name, "configuration_keys": keys}
    (result,) = (await client.ask(DESCRIBE_CONFIGS, 4, {"resources": [resource]})).results
    return result


def test_who_names_no_configuration_is_told_all() -> None:
    async def run() -> None:
        async with kafka_rig() as rig:
            client = await rig.connect()
            await client.create("t")
            node = (await client.ask(METADATA, 12, {"topics": []})).controller_id
            for kind, name, key in (
                (TOPIC, "t", "retention.ms"),
                (BROKER, str(node), "num.partitions"),
            ):
                all_of_them = (await asked(client, kind, name)).configs
                assert (await asked(client, kind, name, [])).configs == all_of_them
                assert len(all_of_them) > 5
                assert [each.name for each in (await asked(client, kind, name, [key])).configs] == [
                    key
                ]
            (set_for_all,) = (await asked(client, BROKER, "")).configs
            assert (set_for_all.name, set_for_all.value) == ("min.insync.replicas", "1")
            assert (await asked(client, BROKER, "", ["other"])).configs == ()

    asyncio.run(run())


def test_names_that_no_topic_can_have() -> None:
    async def run() -> None:
        async with kafka_rig() as rig:
            client = await rig.connect()
            for name, described_as, altered_as in (
                ("(invalid)", kafka_codes.INVALID_TOPIC_EXCEPTION, 17),
                ("", kafka_codes.INVALID_TOPIC_EXCEPTION, kafka_codes.INVALID_REQUEST),
                ("unknown", kafka_codes.UNKNOWN_TOPIC_OR_PARTITION, 3),
            ):
                assert (await asked(client, TOPIC, name)).error_code == described_as
                change = {"name": "flush.ms", "value": "1", "config_operation": SET}
                assert await altered(client, change, topic=name) == altered_as

    asyncio.run(run())


async def altered(client: KafkaClient, *changes: dict[str, Any], topic: str = "t") -> int:
    resource = {"resource_type": TOPIC, "resource_name": topic, "configs": list(changes)}
    asked = {"resources": [resource], "validate_only": False}
    (told,) = (await client.ask(ALTER_SOME, 1, asked)).responses
    return int(told.error_code)


def test_what_is_added_to_a_list_comes_last_and_once() -> None:
    async def run() -> None:
        async with kafka_rig() as rig:
            client = await rig.connect()
            await client.create("t", 1, cleanup_policy="compact,delete")

            async def change(name: str, value: str | None, operation: int) -> int:
                row = {"name": name, "value": value, "config_operation": operation}
                return await altered(client, row)

            async def policy() -> str:
                found = await described(client, "t", synonyms=False)
                return str(found["cleanup.policy"].value)

            assert await change("cleanup.policy", "compact", ADD) == 0
            assert await policy() == "compact,delete"
            assert await change("cleanup.policy", "compact", TAKE) == 0
            assert await policy() == "delete"
            assert await change("cleanup.policy", "compact,delete", ADD) == 0
            assert await policy() == "delete,compact"
            assert await change("cleanup.policy", "compact", TAKE) == 0
            assert await change("cleanup.policy", "delete", TAKE) == 0
            assert await policy() == "", "neither is done"
            topic = rig.broker.core.kafka_topics.find("t")
            assert topic is not None
            assert limits_of(topic.settings) == Limits()
            assert await change("nobody.knows.it", None, DELETE) == 0, "it is not set afterwards"
            assert await change("nobody.knows.it", "1", SET) == kafka_codes.INVALID_CONFIG

    asyncio.run(run())


def test_records_are_compacted_after_no_more_than_the_longest_time() -> None:
    low, high = "min.compaction.lag.ms", "max.compaction.lag.ms"
    invalid = kafka_codes.INVALID_CONFIG

    async def run() -> None:
        async with kafka_rig() as rig:
            client = await rig.connect()
            lags = [{"name": low, "value": "10"}, {"name": high, "value": "5"}]
            wanted = {"num_partitions": 1, "replication_factor": 1, "configs": lags}
            asked = {"topics": [{"name": "t", **wanted}], "timeout": 9}
            (made,) = (await client.ask(CREATE, 7, asked)).topics
            assert made.error_code == invalid
            await client.create("t")

            async def change(key: int, **configs: str) -> int:
                rows = [
                    {"name": f"{name}.compaction.lag.ms", "value": value, "config_operation": SET}
                    for name, value in configs.items()
                ]
                resource = {"resource_type": TOPIC, "resource_name": "t", "configs": rows}
                (told,) = (await client.ask(key, 1, {"resources": [resource]})).responses
                return int(told.error_code)

            for key in (ALTER, ALTER_SOME):
                assert await change(key, min="10", max="5") == invalid
            assert await change(ALTER_SOME, max="10") == 0
            assert await change(ALTER_SOME, min="11") == invalid
            assert await change(ALTER_SOME, min="10") == 0

    asyncio.run(run())
