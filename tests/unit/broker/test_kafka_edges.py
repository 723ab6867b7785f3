"""This module asks through Kafka's door what clients rarely ask, and expects what Kafka's broker
answers: the codes of what is malformed, times, limits, and what administrators are told.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from sluice.broker.topics import DEAD_PREFIX, TopicSettings
from sluice.protocol import kafka_batches, kafka_codes
from sluice.protocol.kafka_batches import Record
from sluice.storage.memory_files import MemoryFiles
from tests.unit.broker.kafka_door_kit import (
    KafkaClient,
    KafkaRig,
    batch,
    fetched,
    kafka_rig,
    produced,
    values_in,
)
from tests.unit.broker.kafka_kit import TOPIC, KafkaBroker
from tests.unit.broker.test_kafka_group_api import GROUP, commit

PRODUCE, FETCH, LIST_OFFSETS, METADATA, OFFSET_COMMIT = 0, 1, 2, 3, 8
CREATE, DELETE, DELETE_RECORDS, INIT_PRODUCER, END_TXN = 19, 20, 21, 22, 26
LOG_DIRS, CREATE_PARTITIONS, ALTER_SOME = 35, 37, 44
TOPIC_RESOURCE = 2
NO_OPERATIONS = -2147483648
LONG_MAX = (1 << 63) - 1
WAIT_MS = 5 * 60_000  # longer than a test waits for an answer
FAR_MS = 1 << 45
SENT_MS = 1_700_000_000_000


def door(test: Callable[[KafkaRig, KafkaClient], Awaitable[None]], **changes: Any) -> None:
    """Run a test with a broker and a connection to it."""

    async def run() -> None:
        async with kafka_rig(**changes) as rig:
            await test(rig, await rig.connect())

    asyncio.run(run())


async def create(client: KafkaClient, *names: str, only: bool = False, **values: Any) -> list[Any]:
    """What is answered to who makes topics."""
    wanted = {"num_partitions": 1, "replication_factor": 1, **values}
    asked = {
        "topics": [{"name": name, **wanted} for name in names],
        "timeout": 1000,
        "validate_only": only,
    }
    return list((await client.ask(CREATE, 7, asked)).topics)


async def node_id(client: KafkaClient) -> int:
    return int((await client.ask(METADATA, 12, {"topics": []})).controller_id)


async def topic_id(client: KafkaClient, name: str) -> Any:
    (topic,) = (await client.ask(METADATA, 12, {"topics": [{"name": name}]})).topics
    return topic.topic_id


# ------------------------------------------------------------------------------------------- topics


def test_configurations_are_looked_at_where_partitions_have_places() -> None:
    async def test(rig: KafkaRig, client: KafkaClient) -> None:
        places = [{"partition_index": 0, "broker_ids": [await node_id(client)]}]
        configs = [{"name": "max.message.bytes", "value": "abc"}]
        placed: dict[str, Any] = {
            "num_partitions": -1,
            "replication_factor": -1,
            "assignments": places,
        }
        (made,) = await create(client, "t", **placed, configs=configs)
        assert made.error_code == kafka_codes.INVALID_CONFIG
        (made,) = await create(client, "t", **placed)
        assert (made.error_code, made.num_partitions) == (0, 1)

    door(test)


def test_an_attribute_that_is_no_number_breaks_nothing() -> None:
    async def test(rig: KafkaRig, client: KafkaClient) -> None:
        attributes = {"kafka.max.message.bytes": "abc", "kafka.message.timestamp.after.max.ms": ""}
        rig.broker.core.topics.put([TopicSettings("t", 1, 1, attributes=attributes)])
        (topic,) = (await client.ask(METADATA, 12, {"topics": None})).topics
        assert topic.name == "t"
        (gone,) = (await client.ask(DELETE, 5, {"topic_names": ["t"], "timeout": 9})).responses
        assert gone.error_code == 0

    door(test)


def test_who_only_checks_is_told_what_would_be_made() -> None:
    async def test(rig: KafkaRig, client: KafkaClient) -> None:
        configs = [{"name": "retention.ms", "value": "5000"}]
        wanted: dict[str, Any] = {"num_partitions": -1, "replication_factor": -1}
        wanted["configs"] = configs
        (checked,) = await create(client, "t", only=True, **wanted)
        assert (await client.ask(METADATA, 12, {"topics": None})).topics == ()
        (made,) = await create(client, "t", **wanted)
        assert checked.configs == made.configs
        assert len(made.configs) > 20
        for told in (checked, made):
            assert told.num_partitions == rig.broker.core.config.default_queue_count
            assert told.replication_factor == 1

    door(test)


def test_a_topic_that_is_named_twice_is_told_of_once() -> None:
    async def test(rig: KafkaRig, client: KafkaClient) -> None:
        invalid = kafka_codes.INVALID_REQUEST
        refused = await create(client, "a", "b", "a", "a")
        assert [(each.name, each.error_code) for each in refused] == [("a", invalid), ("b", 0)]
        assert refused[0].configs == ()
        wanted = [{"name": "b", "count": 3, "assignments": None}] * 2
        asked = {"topics": wanted, "timeout": 9, "validate_only": False}
        (row,) = (await client.ask(CREATE_PARTITIONS, 3, asked)).results
        assert row.error_code == invalid

    door(test)


def test_nobody_makes_the_topic_of_a_cluster() -> None:
    async def test(rig: KafkaRig, client: KafkaClient) -> None:
        (refused,) = await create(client, "__cluster_metadata")
        assert refused.error_code == kafka_codes.INVALID_REQUEST

    door(test)


def test_names_that_differ_in_dots_and_underscores_alone_collide() -> None:
    async def test(rig: KafkaRig, client: KafkaClient) -> None:
        invalid = kafka_codes.INVALID_TOPIC_EXCEPTION
        rig.broker.core.topics.put([TopicSettings("of_rocketmq", 1, 1)])
        made = await create(client, "a.b", "a_b", "a-b", "of.rocketmq", "a.b.c")
        assert [each.error_code for each in made] == [0, invalid, 0, invalid, 0]
        assert "'a.b'" in made[1].error_message
        (made_again,) = await create(client, "a.b")
        assert made_again.error_code == kafka_codes.TOPIC_ALREADY_EXISTS
        asked = {"topics": [{"name": "a_b.c"}], "allow_auto_topic_creation": True}
        (found,) = (await client.ask(METADATA, 12, asked)).topics
        assert found.error_code == invalid, "nor does the first who asks for it make one"

    door(test, auto_create_topics="on")


def test_what_can_be_deleted() -> None:
    async def test(rig: KafkaRig, client: KafkaClient) -> None:
        await client.create("t")
        for group in ("losers", "others"):
            rig.broker.core.topics.create_inner(f"{DEAD_PREFIX}{group}", 1)
        dead = "rmq.dlq.losers"
        by_id = {"name": None, "topic_id": await topic_id(client, "t")}
        asked = [
            {"name": None, "topic_id": None},
            {"name": "twice"},
            {"name": "twice"},
            {"name": "t"},
            by_id,
        ]
        invalid = kafka_codes.INVALID_REQUEST
        gone = (await client.ask(DELETE, 6, {"topics": asked, "timeout": 9})).responses
        codes = [(each.name, each.topic_id, each.error_code) for each in gone]
        assert codes == [
            (None, None, invalid),
            ("twice", None, invalid),
            ("t", by_id["topic_id"], invalid),
        ]
        asked = [
            {**by_id, "name": "t"},
            {"name": dead},
            {"name": None, "topic_id": await topic_id(client, "rmq.dlq.others")},
        ]
        gone = (await client.ask(DELETE, 6, {"topics": asked, "timeout": 9})).responses
        denied = kafka_codes.TOPIC_AUTHORIZATION_FAILED
        assert [each.error_code for each in gone] == [invalid, denied, denied]
        names = {each.name for each in (await client.ask(METADATA, 12, {"topics": None})).topics}
        assert names == {"t", dead, "rmq.dlq.others"}

    door(test)


def test_new_partitions_are_on_this_broker() -> None:
    async def test(rig: KafkaRig, client: KafkaClient) -> None:
        await client.create("t")
        here = {"broker_ids": [await node_id(client)]}
        elsewhere = {"broker_ids": [await node_id(client) + 1]}

        async def grow(*places: Any, names: tuple[str, ...] = ("t",)) -> set[int]:
            wanted = [{"name": name, "count": 3, "assignments": places} for name in names]
            asked = {"topics": wanted, "timeout": 9, "validate_only": False}
            return {
                int(row.error_code)
                for row in (await client.ask(CREATE_PARTITIONS, 3, asked)).results
            }

        wrong = {kafka_codes.INVALID_REPLICA_ASSIGNMENT}
        assert await grow(here) == wrong, "two partitions are new"
        assert await grow(here, elsewhere) == wrong
        assert await grow() == wrong
        assert await grow(here, here, names=("t", "t")) == {kafka_codes.INVALID_REQUEST}
        assert await grow(here, here) == {0}

    door(test)


# ----------------------------------------------------------------------------------- configurations


def test_changes_that_are_malformed() -> None:
    async def test(rig: KafkaRig, client: KafkaClient) -> None:
        await client.create("t")

        async def change(*configs: tuple[str, str | None], count: int = 1) -> set[int]:
            rows = [
                {"name": name, "value": value, "config_operation": 0} for name, value in configs
            ]
            resource = {"resource_type": TOPIC_RESOURCE, "resource_name": "t", "configs": rows}
            asked = {"resources": [resource] * count, "validate_only": False}
            answer = await client.ask(ALTER_SOME, 1, asked)
            return {int(each.error_code) for each in answer.responses}

        malformed = {kafka_codes.INVALID_REQUEST}
        assert await change(("retention.ms", "1"), ("retention.ms", "2")) == malformed
        assert await change(("retention.ms", None)) == malformed
        assert await change(("retention.ms", "1"), count=2) == malformed
        assert await change(("retention.ms", "1")) == {0}

    door(test)


@pytest.mark.parametrize(
    ("name", "value", "code"),
    [
        ("leader.replication.throttled.replicas", "*", 0),
        ("follower.replication.throttled.replicas", "0:1, 1:0", 0),
        ("follower.replication.throttled.replicas", "all", kafka_codes.INVALID_CONFIG),
        ("preallocate", "TRUE", 0),
        ("preallocate", "yes", kafka_codes.INVALID_CONFIG),
        ("cleanup.policy", "COMPACT", kafka_codes.INVALID_CONFIG),
    ],
)
def test_what_configurations_may_be(name: str, value: str, code: int) -> None:
    async def test(rig: KafkaRig, client: KafkaClient) -> None:
        (made,) = await create(client, "t", configs=[{"name": name, "value": value}])
        assert made.error_code == code
        if not code:
            assert (name, value) in [(each.name, each.value) for each in made.configs]

    door(test)


def test_delays_are_allowed_in_capitals_too() -> None:
    async def test(rig: KafkaRig, client: KafkaClient) -> None:
        await client.create("t", sluice_delay_headers="True")
        topic = rig.broker.core.kafka_topics.find("t")
        assert topic is not None
        assert topic.delays

    door(test)


# ------------------------------------------------------------------------------------------ records


def test_times_of_records_where_the_broker_gives_them() -> None:
    async def test(rig: KafkaRig, client: KafkaClient) -> None:
        await client.create("t", 1, message_timestamp_type="LogAppendTime")
        assert (await client.produce("t", batch(b"x", ms=FAR_MS))).error_code == 0
        stamped = kafka_batches.build(
            0, 5, 5, [Record(0, 0, None, b"x")], attributes=kafka_batches.APPEND_TIME
        )
        code = (await client.produce("t", stamped)).error_code
        assert code == kafka_codes.INVALID_TIMESTAMP, "no producer knows the append's time"

    door(test)


def test_an_append_time_that_nobody_asked_for_is_a_create_time() -> None:
    async def test(rig: KafkaRig, client: KafkaClient) -> None:
        await client.create("t")
        records = [Record(0, 0, None, b"x")]
        mark = kafka_batches.APPEND_TIME
        stamped = kafka_batches.build(0, 5, 5, records, attributes=mark)
        for _ in range(2):  # the second one comes to a partition that is known
            assert (await client.produce("t", stamped)).error_code == 0
        stored = (await client.fetch("t", 0)).records
        assert values_in(stored) == [(0, b"x"), (1, b"x")], "the checksum holds"
        head = kafka_batches.read_head(stored)
        assert head is not None
        assert (head.attributes, head.max_ms) == (0, 5)
        without = kafka_batches.build(0, -1, -1, records, attributes=mark)
        code = (await client.produce("t", without)).error_code
        assert code == kafka_codes.INVALID_TIMESTAMP

    door(test)


def test_how_old_and_how_far_ahead_records_may_be() -> None:
    async def test(rig: KafkaRig, client: KafkaClient) -> None:
        minute, hour = 60_000, 3_600_000
        await client.create("t", 1, message_timestamp_before_max_ms=str(minute))
        await client.create("later", 1, message_timestamp_after_max_ms=str(10 * hour))
        await client.create("soon", 1, message_timestamp_after_max_ms=str(minute))

        async def code(topic: str, ahead_ms: int) -> int:
            now_ms = rig.broker.core.now_ms()
            return int((await client.produce(topic, batch(b"x", ms=now_ms + ahead_ms))).error_code)

        assert [await code("t", ahead) for ahead in (0, -minute // 2)] == [0, 0]
        assert await code("t", -2 * minute) == kafka_codes.INVALID_TIMESTAMP
        now_ms = rig.broker.core.now_ms()
        mixed = [Record(0, 0, None, b"new"), Record(1, -hour, None, b"old")]
        refused = await client.produce("t", kafka_batches.build(0, now_ms, now_ms, mixed))
        assert refused.error_code == kafka_codes.INVALID_TIMESTAMP, "each record counts"
        assert (await client.produce("t", batch(b"x", ms=-1))).error_code == 0, "it has no time"
        for _ in range(2):  # the second one comes to a partition that is known
            assert await code("later", 9 * hour) == 0
            assert await code("soon", -hour) == 0
            assert await code("soon", 2 * minute) == kafka_codes.INVALID_TIMESTAMP

    door(test)


def test_records_far_ahead_are_found_by_their_time() -> None:
    async def test(rig: KafkaRig, client: KafkaClient) -> None:
        await client.create("t", 1, message_timestamp_after_max_ms=str(LONG_MAX))
        await client.produce("t", batch(b"x", ms=FAR_MS))
        assert await offset_at(client, FAR_MS - 1) == (0, 0, FAR_MS)

    door(test)


def test_records_that_lie_are_not_stored() -> None:
    async def test(rig: KafkaRig, client: KafkaClient) -> None:
        await client.create("t")
        await client.produce("t", batch(b"x"))  # from now on the partition is known
        inside = bytearray()
        for _ in range(5):
            kafka_batches.put_record(inside, Record(0, 0, None, b"value"))
        for count in (3, 5):  # looked at one by one, and as a column
            some = bytes(inside[: len(inside) * count // 5])
            lie = kafka_batches.wrap(0, 5, 5, some, last_delta=count - 1, count=count)
            assert (await client.produce("t", lie)).error_code == kafka_codes.INVALID_RECORD
        assert (await client.fetch("t", 0)).high_watermark == 1

    door(test)


async def offset_at(client: KafkaClient, timestamp: int, version: int = 7) -> tuple[int, int, int]:
    """Error code, offset and time."""
    part = {"partition_index": 0, "current_leader_epoch": -1, "timestamp": timestamp}
    asked = {"replica_id": -1, "topics": [{"name": "t", "partitions": [part]}]}
    (found,) = (await client.ask(LIST_OFFSETS, version, asked)).topics[0].partitions
    return int(found.error_code), found.offset, found.timestamp


@pytest.mark.parametrize(
    ("when", "version", "code"),
    [(-9, 11, 35), (-3, 6, 35), (-6, 10, 35), (-6, 11, 0), (-4, 7, 35), (-4, 8, 0)],
)
def test_times_that_a_version_does_not_know(when: int, version: int, code: int) -> None:
    async def test(rig: KafkaRig, client: KafkaClient) -> None:
        await client.create("t")
        assert (await offset_at(client, when, version))[0] == code

    door(test)


def test_only_where_records_may_be_deleted_they_are() -> None:
    async def test(rig: KafkaRig, client: KafkaClient) -> None:
        await client.create("kept", 1, cleanup_policy="compact")
        await client.create("both", 1, cleanup_policy="compact,delete")

        async def delete(topic: str) -> int:
            part = {"partition_index": 0, "offset": 0}
            asked = {"topics": [{"name": topic, "partitions": [part]}], "timeout": 9}
            (found,) = (await client.ask(DELETE_RECORDS, 2, asked)).topics[0].partitions
            return int(found.error_code)

        assert await delete("kept") == kafka_codes.POLICY_VIOLATION
        assert await delete("both") == 0

    door(test)


# ---------------------------------------------------------------------------------------- fetching


def test_a_fetch_of_nothing_is_answered_at_once() -> None:
    async def test(rig: KafkaRig, client: KafkaClient) -> None:
        answer = await client.ask(FETCH, 12, fetched({}, wait_ms=WAIT_MS))
        assert answer.responses == ()

    door(test)


def test_a_fetch_waits_for_no_more_than_it_takes() -> None:
    async def test(rig: KafkaRig, client: KafkaClient) -> None:
        await client.create("t")
        for _ in range(2):
            await client.produce("t", batch(bytes(1000)))
        limits = {"min_bytes": 1 << 20, "max_bytes": 1000, "wait_ms": WAIT_MS}
        assert len(values_in((await client.fetch("t", 0, **limits)).records)) == 1

    door(test)


# ------------------------------------------------------------------------------------ transactions


async def begin(client: KafkaClient, name: str = "till") -> tuple[int, int]:
    """Id and epoch of a producer with transactions."""
    asked = {
        "transactional_id": name,
        "transaction_timeout": 60_000,
        "producer_id": -1,
        "producer_epoch": -1,
    }
    given = await client.ask(INIT_PRODUCER, 4, asked)
    assert given.error_code == 0
    return given.producer_id, given.producer_epoch


async def send(
    client: KafkaClient, version: int, name: str | None, producer: tuple[int, int]
) -> int:
    """Write one record of a transaction."""
    data = kafka_batches.build(
        *(0, SENT_MS, SENT_MS, [Record(0, 0, None, b"x")]),
        attributes=kafka_batches.TRANSACTIONAL,
        producer=(*producer, 0),
    )
    asked = {**produced("t", data), "transactional_id": name}
    answer = await client.ask(PRODUCE, version, asked)
    return int(answer.responses[0].partition_responses[0].error_code)


def test_words_for_what_is_no_part_of_a_transaction() -> None:
    async def test(rig: KafkaRig, client: KafkaClient) -> None:
        await client.create("t")
        producer = await begin(client)
        refused = kafka_codes.TRANSACTIONAL_ID_AUTHORIZATION_FAILED
        assert await send(client, 12, None, producer) == refused
        assert await send(client, 10, "till", producer) == kafka_codes.INVALID_TXN_STATE
        assert await send(client, 11, "till", producer) == kafka_codes.TRANSACTION_ABORTABLE
        assert (await client.fetch("t", 0)).high_watermark == 0
        assert await send(client, 12, "till", producer) == 0

    door(test)


@pytest.mark.parametrize(
    ("version", "code"),
    [(3, kafka_codes.INVALID_TXN_STATE), (4, kafka_codes.TRANSACTION_ABORTABLE), (5, 0)],
)
def test_words_for_offsets_that_are_no_part_of_a_transaction(version: int, code: int) -> None:
    broker = KafkaBroker()
    broker.topic()
    told: list[tuple[int, int, int]] = []
    broker.core.kafka_transactions.init("till", 60_000, -1, -1, lambda *each: told.append(each))
    broker.settle()
    ((_, producer_id, epoch),) = told
    line = {"partition_index": 0, "committed_offset": 1, "committed_metadata": ""}
    body = broker.ask(
        kafka_codes.TXN_OFFSET_COMMIT,
        version,
        transactional_id="till",
        group_id=GROUP,
        producer_id=producer_id,
        producer_epoch=epoch,
        generation_id=-1,
        topics=[{"name": TOPIC, "partitions": [line]}],
    )
    assert body.topics[0].partitions[0].error_code == code


def test_the_highest_time_may_be_that_of_a_marker() -> None:
    async def test(rig: KafkaRig, client: KafkaClient) -> None:
        await client.create("t")
        producer = await begin(client)
        assert await send(client, 12, "till", producer) == 0
        asked = {
            "transactional_id": "till",
            "producer_id": producer[0],
            "producer_epoch": producer[1],
            "committed": True,
        }
        assert (await client.ask(END_TXN, 4, asked)).error_code == 0
        code, offset, time_ms = await offset_at(client, -3)
        assert (code, offset) == (0, 1)
        assert time_ms > SENT_MS

    door(test)


@pytest.mark.parametrize("known", [(7, -1), (-1, 3)])
def test_half_a_name_of_a_producer(known: tuple[int, int]) -> None:
    async def test(rig: KafkaRig, client: KafkaClient) -> None:
        for name in (None, "till"):
            asked = {
                "transactional_id": name,
                "transaction_timeout": 60_000,
                "producer_id": known[0],
                "producer_epoch": known[1],
            }
            given = await client.ask(INIT_PRODUCER, 4, asked)
            assert given.error_code == kafka_codes.INVALID_REQUEST

    door(test)


# ------------------------------------------------------------------------------ what is described


def test_who_asks_what_may_be_done_with_a_group_is_told() -> None:
    broker = KafkaBroker()
    broker.topic()
    assert commit(broker) == 0

    def told(version: int, name: str, **values: Any) -> int:
        (row,) = broker.ask(kafka_codes.DESCRIBE_GROUPS, version, groups=[name], **values).groups
        return int(row.authorized_operations)

    for version in (3, 6):
        wanted = told(version, GROUP, include_authorized_operations=True)
        assert wanted == sum(1 << bit for bit in (3, 6, 8, 10, 11)), "as Kafka 4 has it"
        assert told(version, GROUP) == NO_OPERATIONS
    assert told(6, "nobody", include_authorized_operations=True) == NO_OPERATIONS


def test_who_asks_what_may_be_done_with_the_cluster_is_told() -> None:
    async def test(rig: KafkaRig, client: KafkaClient) -> None:
        await client.create("t")
        seen = []
        for wish in (False, True, False):
            asked = {"topics": None, "include_cluster_authorized_operations": wish}
            answer = await client.ask(METADATA, 9, asked)
            seen.append(answer.cluster_authorized_operations != NO_OPERATIONS)
        assert seen == [False, True, False]

    door(test)


def test_the_size_of_the_disk_is_told() -> None:
    async def test(rig: KafkaRig, client: KafkaClient) -> None:
        (told,) = (await client.ask(LOG_DIRS, 4, {"topics": None})).results
        assert told.total_bytes == 1 << 30
        assert 0 < told.usable_bytes < told.total_bytes

    door(test, files=MemoryFiles(capacity_bytes=1 << 30))


# ----------------------------------------------------------------------------------------- offsets


def test_offsets_of_partitions_that_are_not_there_are_not_deleted() -> None:
    broker = KafkaBroker()
    broker.topic(partitions=2)
    assert commit(broker) == 0
    parts = [{"partition_index": 0}, {"partition_index": 2}, {"partition_index": -1}]
    topics = [{"name": TOPIC, "partitions": parts}]
    body = broker.ask(kafka_codes.OFFSET_DELETE, 0, group_id=GROUP, topics=topics)
    missing = kafka_codes.UNKNOWN_TOPIC_OR_PARTITION
    assert [each.error_code for each in body.topics[0].partitions] == [0, missing, missing]


@pytest.mark.parametrize("retention_ms", [LONG_MAX, -LONG_MAX, -1, 5000])
@pytest.mark.parametrize("version", [2, 4])
def test_offsets_may_be_kept_for_ever(version: int, retention_ms: int) -> None:
    async def test(rig: KafkaRig, client: KafkaClient) -> None:
        await client.create("t")
        part = struct.pack(">iq", 0, 5) + b"\0\0"
        topics = struct.pack(">ih", 1, 1) + b"t" + struct.pack(">i", 1) + part
        body = b"\0\x01g" + struct.pack(">i", -1) + b"\0\0" + struct.pack(">q", retention_ms)
        client.send(OFFSET_COMMIT, version, {}, body + topics)
        _, answer = await client.receive(OFFSET_COMMIT, version)
        assert answer.topics[0].partitions[0].error_code == 0

    door(test)
