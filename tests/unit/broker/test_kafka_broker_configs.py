"""This module tests the configurations of the broker itself: what Kafka's administrators see of
them, and what becomes of those that they change.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from sluice.protocol import kafka_codes
from sluice.storage.memory_files import MemoryFiles
from tests.unit.broker.kafka_door_kit import KafkaClient, KafkaRig, kafka_rig

DESCRIBE_CONFIGS, ALTER, ALTER_SOME = 32, 33, 44
TOPIC, BROKER, GROUP = 2, 4, 32
SET, DELETE, ADD, TAKE = range(4)
FOR_THIS, FOR_ALL, FROM_FILE, DEFAULT = 2, 3, 4, 5
NODE = "1"
BACKOFF = "log.cleaner.backoff.ms"


async def alter(
    client: KafkaClient,
    *changes: tuple[str, int, str | None],
    node: str = NODE,
    kind: int = BROKER,
    only_check: bool = False,
) -> tuple[int, str]:
    """Make single changes; the error's code and reason."""
    configs = [
        {"name": name, "config_operation": operation, "value": value}
        for name, operation, value in changes
    ]
    resource = {"resource_type": kind, "resource_name": node, "configs": configs}
    asked = {"resources": [resource], "validate_only": only_check}
    (result,) = (await client.ask(ALTER_SOME, 1, asked)).responses
    return result.error_code, result.error_message or ""


async def replace(client: KafkaClient, values: dict[str, str]) -> int:
    """Set these, and nothing else; the error's code."""
    configs = [{"name": name, "value": value} for name, value in values.items()]
    resource = {"resource_type": BROKER, "resource_name": NODE, "configs": configs}
    asked = {"resources": [resource], "validate_only": False}
    (result,) = (await client.ask(ALTER, 2, asked)).responses
    return int(result.error_code)


async def described(client: KafkaClient, node: str = NODE, **more: Any) -> dict[str, Any]:
    resource = {"resource_type": BROKER, "resource_name": node, "configuration_keys": None}
    asked = {"resources": [resource], "include_synonyms": True, **more}
    (result,) = (await client.ask(DESCRIBE_CONFIGS, 4, asked)).results
    assert result.error_code == 0
    return {each.name: each for each in result.configs}


def seen(config: Any) -> tuple[str, int, list[tuple[str, int]]]:
    """Value, where it is from, and all that it could be."""
    synonyms = [(each.value, each.source) for each in config.synonyms]
    return config.value, config.config_source, synonyms


def test_what_tunes_kafkas_threads_is_kept_and_shown() -> None:
    async def run() -> None:
        async with kafka_rig() as rig:
            client = await rig.connect()
            before = (await described(client))[BACKOFF]
            assert seen(before) == ("15000", DEFAULT, [("15000", DEFAULT)])
            assert not before.read_only
            assert await alter(client, (BACKOFF, SET, "15001")) == (0, "")
            assert await alter(client, (BACKOFF, SET, "17000"), node="") == (0, "")
            levels = [("15001", FOR_THIS), ("17000", FOR_ALL), ("15000", DEFAULT)]
            assert seen((await described(client))[BACKOFF]) == ("15001", FOR_THIS, levels)
            for_all = (await described(client, ""))[BACKOFF]
            assert (for_all.value, for_all.config_source) == ("17000", FOR_ALL)
            assert await alter(client, (BACKOFF, DELETE, None)) == (0, "")
            assert seen((await described(client))[BACKOFF]) == ("17000", FOR_ALL, levels[1:])
            assert await alter(client, (BACKOFF, DELETE, None), node="") == (0, "")
            assert seen((await described(client))[BACKOFF]) == seen(before)

    asyncio.run(run())


def settings(rig: KafkaRig) -> tuple[int, int, int]:
    config = rig.broker.core.config
    return (
        config.kafka_batch_bytes_max,
        config.store.retention_hours,
        config.kafka_producer_expiry_ms,
    )


def test_what_a_setting_says_changes_the_setting() -> None:
    async def run() -> None:
        async with kafka_rig() as rig:
            client = await rig.connect()
            before = settings(rig)
            changed = [
                ("message.max.bytes", SET, "2000000"),
                ("log.retention.ms", SET, str(2 * 3_600_000 + 1)),
                ("producer.id.expiration.ms", SET, "7000"),
            ]
            assert await alter(client, *changed, only_check=True) == (0, "")
            assert settings(rig) == before, "it was only to be checked"
            assert await alter(client, *changed) == (0, "")
            assert settings(rig) == (2_000_000, 3, 7000)
            found = await described(client)
            assert seen(found["message.max.bytes"])[:2] == ("2000000", FOR_THIS)
            assert found["log.retention.ms"].value == str(3 * 3_600_000), "whole hours"
            by_default = str(72 * 3_600_000)
            assert seen(found["log.retention.ms"])[2] == [
                ("7200001", FOR_THIS),
                (by_default, DEFAULT),
            ]
            # For all brokers: what was set for this one comes before it, and holds until it goes.
            assert await alter(client, ("message.max.bytes", SET, "3000000"), node="") == (0, "")
            assert settings(rig)[0] == 2_000_000
            assert await alter(client, ("message.max.bytes", DELETE, None)) == (0, "")
            assert settings(rig)[0] == 3_000_000
            # Who names all that is to hold takes away the rest.
            assert await replace(client, {"producer.id.expiration.ms": "8000"}) == 0
            assert settings(rig) == (3_000_000, before[1], 8000)
            assert await alter(client, ("message.max.bytes", DELETE, None), node="") == (0, "")
            assert await replace(client, {}) == 0
            assert settings(rig) == before
            assert seen((await described(client))["message.max.bytes"])[1] == FROM_FILE

    asyncio.run(run())


def test_changes_hold_after_a_restart() -> None:
    files = MemoryFiles()

    async def run() -> None:
        async with kafka_rig(files) as rig:
            client = await rig.connect()
            changes = [(BACKOFF, SET, "15001"), ("message.max.bytes", SET, "2000000")]
            assert await alter(client, *changes) == (0, "")
        async with kafka_rig(files) as rig:
            found = await described(await rig.connect())
            assert seen(found[BACKOFF])[:2] == ("15001", FOR_THIS)
            assert seen(found["message.max.bytes"])[:2] == ("2000000", FOR_THIS)
            assert settings(rig)[0] == 2_000_000

    asyncio.run(run())


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (
            ("num.partitions", SET, "3"),
            "Cannot update these configs dynamically: [num.",
        ),
        (("no.such", SET, "1"), "no.such is not a configuration that changes here"),
        ((BACKOFF, SET, "x"), f"Invalid value x for configuration {BACKOFF}: not a number"),
        ((BACKOFF, SET, "-1"), f"Invalid value -1 for configuration {BACKOFF}: it is from 0"),
        ((BACKOFF, SET, ""), "not a number"),
        ((BACKOFF, SET, None), "has no value"),
        ((BACKOFF, ADD, "1"), "is no list"),
        ((BACKOFF, TAKE, "1"), "is no list"),
        ((BACKOFF, 9, "1"), "unknown operation 9"),
        (("log.cleaner.io.buffer.load.factor", SET, "nan"), "Invalid value nan"),
        (("log.retention.ms", SET, "-1"), "Invalid value -1"),
        (("message.max.bytes", SET, "999999999"), "kafka_batch_bytes_max"),
    ],
)
def test_what_cannot_be_changed_is_refused(
    change: tuple[str, int, str | None], reason: str
) -> None:
    async def run() -> None:
        async with kafka_rig() as rig:
            client = await rig.connect()
            before = settings(rig), await described(client)
            for only_check in (True, False):
                good = ("producer.id.expiration.ms", SET, "7000")
                code, said = await alter(client, good, change, only_check=only_check)
                assert code == kafka_codes.INVALID_REQUEST
                assert reason in said
            assert (settings(rig), await described(client)) == before, "all of them or none"

    asyncio.run(run())


def test_other_brokers_and_groups_are_not_changed_here() -> None:
    async def run() -> None:
        async with kafka_rig() as rig:
            client = await rig.connect()
            code, said = await alter(client, (BACKOFF, SET, "1"), node="9")
            assert (code, said) == (kafka_codes.INVALID_REQUEST, "this is broker 1, not 9")
            code, _ = await alter(client, ("a", SET, "1"), node="g", kind=GROUP)
            assert code == kafka_codes.INVALID_REQUEST

    asyncio.run(run())


def test_who_asks_for_the_documentation_gets_it() -> None:
    async def run() -> None:
        async with kafka_rig() as rig:
            client = await rig.connect()
            await client.create("t")
            found = await described(client, include_documentation=True)
            assert all(config.documentation for config in found.values())
            assert not any(config.documentation for config in (await described(client)).values())
            topic = {"resource_type": TOPIC, "resource_name": "t", "configuration_keys": None}
            asked = {"resources": [topic], "include_documentation": True}
            (result,) = (await client.ask(DESCRIBE_CONFIGS, 4, asked)).results
            assert all(config.documentation for config in result.configs)

    asyncio.run(run())
