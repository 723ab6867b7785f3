"""This module tests what Kafka's consumers are told of partitions that begin later than before, or
are gone.
"""

from __future__ import annotations

from typing import Any

import pytest

from sluice.protocol import kafka_batches, kafka_codes
from sluice.protocol.kafka_batches import Record
from tests.unit.broker.kafka_door_kit import KafkaClient, KafkaRig, batch, fetched, produced
from tests.unit.broker.test_kafka_edges import (
    DELETE,
    DELETE_RECORDS,
    FETCH,
    INIT_PRODUCER,
    LIST_OFFSETS,
    PRODUCE,
    WAIT_MS,
    door,
)

NAME = "a.transaction"
COMMITTED = 1


async def offsets(client: KafkaClient, *times: int, isolation: int = 0) -> list[tuple[int, int]]:
    """Codes and offsets of one partition at some times."""
    parts = [
        {"partition_index": 0, "current_leader_epoch": -1, "timestamp": each} for each in times
    ]
    topics = [{"name": "t", "partitions": parts}]
    asked = {"replica_id": -1, "isolation_level": isolation, "topics": topics}
    answer = await client.ask(LIST_OFFSETS, 11, {**asked, "timeout": 9})
    return [(int(each.error_code), each.offset) for each in answer.topics[0].partitions]


async def delete_records(client: KafkaClient, offset: int) -> int:
    topics = [{"name": "t", "partitions": [{"partition_index": 0, "offset": offset}]}]
    answer = await client.ask(DELETE_RECORDS, 2, {"topics": topics, "timeout": 1000})
    return int(answer.topics[0].partitions[0].low_watermark)


async def send_in_transaction(client: KafkaClient) -> None:
    asked = {"transactional_id": NAME, "transaction_timeout": 60_000}
    named = await client.ask(INIT_PRODUCER, 4, {**asked, "producer_id": -1, "producer_epoch": -1})
    data = kafka_batches.build(
        *(0, 1000, 1000, [Record(0, 0, None, b"open")]),
        attributes=kafka_batches.TRANSACTIONAL,
        producer=(named.producer_id, named.producer_epoch, 0),
    )
    wanted = {**produced("t", data), "transactional_id": NAME}
    answer = await client.ask(PRODUCE, 12, wanted)
    assert answer.responses[0].partition_responses[0].error_code == 0


def test_no_record_is_found_before_the_beginning() -> None:
    async def test(rig: KafkaRig, client: KafkaClient) -> None:
        await client.create("t")
        await client.produce("t", batch(b"a", b"b", b"c", ms=1000))
        assert await delete_records(client, 2) == 2
        assert await offsets(client, 0) == [(0, 2)]
        assert await offsets(client, -3) == [(0, 2)]

    door(test)


def test_what_is_stable_does_not_end_before_the_beginning() -> None:
    async def test(rig: KafkaRig, client: KafkaClient) -> None:
        await client.create("t")
        await send_in_transaction(client)
        await client.produce("t", batch(b"behind"))
        assert await offsets(client, -1, isolation=COMMITTED) == [(0, 0)]
        assert await delete_records(client, -1) == 2
        assert await offsets(client, -1, isolation=COMMITTED) == [(0, 2)]
        found = await client.fetch("t", 2, isolation=COMMITTED)
        assert (found.error_code, found.log_start_offset, found.last_stable_offset) == (0, 2, 2)

    door(test)


@pytest.mark.parametrize("offset", [0, 1])
def test_who_waits_at_a_topic_that_is_deleted_hears_that_it_is_gone(offset: int) -> None:
    """An offset out of range would have it begin anew, or end."""

    async def test(rig: KafkaRig, client: KafkaClient) -> None:
        await client.create("t")
        if offset:
            await client.produce("t", batch(b"a"))
        wanted = fetched({"t": {0: offset}}, wait_ms=WAIT_MS)
        client.send(FETCH, 12, wanted)
        other = await rig.connect()
        gone = await other.ask(DELETE, 5, {"topic_names": ["t"], "timeout": 9})
        assert gone.responses[0].error_code == 0
        _, answer = await client.receive(FETCH, 12)
        (part,) = answer.responses[0].partitions
        assert part.error_code == kafka_codes.UNKNOWN_TOPIC_OR_PARTITION

    door(test)


def test_a_partition_that_is_asked_for_twice_is_told_of_once() -> None:
    async def test(rig: KafkaRig, client: KafkaClient) -> None:
        await client.create("t")
        assert await offsets(client, -1, -2) == [(kafka_codes.INVALID_REQUEST, -1)]

    door(test)


def test_nothing_is_on_its_way_to_another_tier() -> None:
    async def test(rig: KafkaRig, client: KafkaClient) -> None:
        await client.create("t")
        await client.produce("t", batch(b"a"))
        found: list[Any] = [await offsets(client, each) for each in (-4, -5, -6)]
        assert found == [[(0, 0)], [(0, -1)], [(0, -1)]]

    door(test)
