"""Records of Kafka's producers that come later, on topics that allow it."""

from __future__ import annotations

import asyncio
import struct
from dataclasses import replace
from typing import Any, NamedTuple

import pytest

from sluice.broker.topics import TIMER_TOPIC, TopicSettings
from sluice.protocol import kafka_batches, kafka_codes
from sluice.protocol.kafka_batches import Header, Record
from sluice.storage.memory_files import KeepAll, MemoryFiles
from tests.unit.broker.broker_kit import broker_config
from tests.unit.broker.kafka_door_kit import KafkaClient, KafkaRig, kafka_rig, produced

WAIT_SECONDS = 60
MS = 1_700_000_000_000
SOON: tuple[Header, ...] = (("TIMER_DELAY_MS", b"200"), ("color", b"red"))
NEVER: tuple[Header, ...] = (("TIMER_DELAY_SEC", b"3600"),)


class Found(NamedTuple):
    """A record as a consumer gets it."""

    offset: int
    key: bytes | None
    value: bytes | None
    headers: tuple[Header, ...]
    time_ms: int


def sent(*records: tuple[bytes, tuple[Header, ...]], **more: Any) -> bytes:
    """A batch; value and headers of each record."""
    return kafka_batches.build(
        0,
        MS,
        MS + len(records) - 1,
        [Record(at, at, b"k", value, headers) for at, (value, headers) in enumerate(records)],
        **more,
    )


def found_in(data: bytes) -> list[Found]:
    """The records of batches that follow each other, whatever is missing in them."""
    result, at = [], 0
    while at < len(data):
        (length,) = struct.unpack_from(">i", data, at + 8)
        one = data[at : at + 12 + length]
        head = kafka_batches.read_head(one)
        assert head is not None
        for record in kafka_batches.read_records(head, one, 1 << 20):
            place = head.base_offset + record.offset_delta
            time_ms = head.base_ms + record.time_delta
            result.append(Found(place, record.key, record.value, record.headers, time_ms))
        at += 12 + length
    return result


def waiting(rig: KafkaRig) -> int:
    """How many messages were stored that wait for a time."""
    return rig.broker.store.max_offset(TIMER_TOPIC, 0)


async def all_of(client: KafkaClient, topic: str, count: int, offset: int = 0) -> list[Found]:
    """Everything from an offset on, when there are so many."""
    async with asyncio.timeout(WAIT_SECONDS):
        while True:
            part = await client.fetch(topic, offset, wait_ms=100)
            assert part.error_code == 0
            found = found_in(part.records or b"")
            if len(found) >= count:
                return found
            await asyncio.sleep(0.02)


def test_a_record_leaves_its_batch_and_comes_later() -> None:
    async def run() -> None:
        async with kafka_rig() as rig:
            client = await rig.connect()
            await client.create("t", sluice_delay_headers="true")
            data = sent((b"a", ()), (b"later", SOON), (b"b", (("x", None),)))
            part = await client.produce("t", data)
            assert (part.error_code, part.base_offset) == (0, 0)
            now = found_in((await client.fetch("t", 0)).records)[:2]
            assert [(each.offset, each.value) for each in now] == [(0, b"a"), (2, b"b")]
            assert now[1].headers == (("x", None),)
            *_, last = await all_of(client, "t", 3)
            assert last == Found(3, b"k", b"later", SOON, MS + 1), "as it was sent"
            assert (await client.produce("t", sent((b"c", ())))).base_offset == 4

    asyncio.run(run())


@pytest.mark.parametrize("codec", [0, 1, 2, 3, 4])
def test_what_stays_of_a_packed_batch(codec: int) -> None:
    async def run() -> None:
        async with kafka_rig() as rig:
            client = await rig.connect()
            await client.create("t", sluice_delay_headers="true")
            inside = bytearray()
            for at, headers in enumerate(((), NEVER, ())):
                kafka_batches.put_record(inside, Record(at, 0, None, b"%d" % at, headers))
            used, packed = kafka_batches.pack(codec, inside)
            data = kafka_batches.wrap(0, MS, MS, packed, last_delta=2, count=3, attributes=used)
            assert (await client.produce("t", data)).error_code == 0
            found = await all_of(client, "t", 2)
            assert [(each.offset, each.value) for each in found] == [(0, b"0"), (2, b"2")]

    asyncio.run(run())


def test_sequence_numbers_count_what_waits() -> None:
    """A batch of nothing but waiting records is known again, after a crash too."""

    def numbered(first: int, headers: tuple[Header, ...]) -> bytes:
        return sent((b"%d" % first, headers), (b"too", headers), producer=(7, 0, first))

    async def run() -> None:
        files = MemoryFiles()
        async with kafka_rig(files) as rig:
            client = await rig.connect()
            await client.create("t", sluice_delay_headers="true")
            for first in (0, 2):
                part = await client.produce("t", numbered(first, NEVER))
                assert (part.error_code, part.base_offset) == (0, first)
            again = await client.produce("t", numbered(2, NEVER))
            assert (again.error_code, again.base_offset) == (0, 2)
            assert waiting(rig) == 4, "nothing waits twice"
            crashed = files.crash(KeepAll())
        async with kafka_rig(crashed) as rig:
            client = await rig.connect()
            again = await client.produce("t", numbered(2, NEVER))
            assert (again.error_code, again.base_offset) == (0, 2)
            part = await client.produce("t", numbered(4, ()))
            assert (part.error_code, part.base_offset) == (0, 4)
            found = await all_of(client, "t", 2)
            assert [each.offset for each in found] == [4, 5], "empty batches are passed over"
            assert waiting(rig) == 4

    asyncio.run(run())


def test_what_asks_for_no_time_is_refused_whole() -> None:
    async def run() -> None:
        async with kafka_rig() as rig:
            client = await rig.connect()
            await client.create("t", sluice_delay_headers="true")
            wrong: list[tuple[Header, ...]] = [
                (("DELAY", b"soon"),),
                (("TIMER_DELIVER_MS", None),),
                (("TIMER_DELAY_SEC", b"9" * 30),),
                (("TIMER_DELAY_SEC", b"99999999999"),),  # too far ahead
                (("TIMER_DELAY_SEC", b"5"), ("TIMER_DELIVER_MS", b"99999")),  # two times
            ]
            for headers in wrong:
                part = await client.produce("t", sent((b"a", ()), (b"b", headers)))
                assert part.error_code == kafka_codes.INVALID_RECORD, headers
            data = sent((b"a", NEVER), attributes=0x10, producer=(7, 0, 0))
            asked = {**produced("t", data), "transactional_id": "till"}
            (topic,) = (await client.ask(0, 9, asked)).responses
            assert topic.partition_responses[0].error_code == kafka_codes.INVALID_RECORD
            assert (await client.fetch("t", 0)).high_watermark == 0
            assert waiting(rig) == 0

    asyncio.run(run())


def test_elsewhere_such_headers_are_headers() -> None:
    async def run() -> None:
        async with kafka_rig() as rig:
            client = await rig.connect()
            await client.create("t")
            await client.produce("t", sent((b"a", NEVER), (b"b", (("DELAY", b"soon"),))))
            found = await all_of(client, "t", 2)
            assert [each.headers for each in found] == [NEVER, (("DELAY", b"soon"),)]

    asyncio.run(run())


async def allow(rig: KafkaRig, client: KafkaClient, topic: str) -> None:
    """A topic of RocketMQ's clients that allows it."""
    rig.broker.core.topics.put([TopicSettings(topic, 1, 1)])
    rig.broker.core.ask_turn()
    config = {"name": "sluice.delay.headers", "config_operation": 0, "value": "true"}
    resource = {"resource_type": 2, "resource_name": topic, "configs": [config]}
    answer = await client.ask(44, 1, {"resources": [resource], "validate_only": False})
    assert answer.responses[0].error_code == 0, answer.responses[0].error_message


def test_topics_of_rocketmqs_clients_may_allow_it_too() -> None:
    async def run() -> None:
        store = replace(broker_config().store, delay_levels="1s 1h")
        async with kafka_rig(store=store) as rig:
            client = await rig.connect()
            await allow(rig, client, "plain")
            level: tuple[Header, ...] = (("DELAY", b"1"),)
            part = await client.produce("plain", sent((b"later", level), (b"now", ())))
            assert (part.error_code, part.base_offset) == (0, 0), "of the first that is there"
            first, second = await all_of(client, "plain", 2)
            assert (first.offset, first.value) == (0, b"now")
            assert second == Found(1, b"k", b"later", level, MS)
            part = await client.produce("plain", sent((b"never", (("DELAY", b"2"),))))
            assert (part.error_code, part.base_offset) == (0, -1)
            bad = await client.produce("plain", sent((b"bad", (("DELAY", b"x"),))))
            assert bad.error_code == kafka_codes.INVALID_RECORD

    asyncio.run(run())
