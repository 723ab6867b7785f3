"""This module asks through Kafka's door what only clusters have, and expects what Kafka's broker
says where it is alone.
"""

from __future__ import annotations

from typing import Any
from uuid import UUID

import pytest

from sluice.protocol import kafka_codes as codes
from tests.unit.broker.kafka_door_kit import KafkaClient, KafkaRig
from tests.unit.broker.test_kafka_edges import door, node_id


@pytest.mark.parametrize("version", [1, 2, 3])
def test_nobody_keeps_permissions(version: int) -> None:
    async def test(rig: KafkaRig, client: KafkaClient) -> None:
        wanted = {"resource_name_filter": None, "principal_filter": None, "host_filter": None}
        described = await client.ask(codes.DESCRIBE_ACLS, version, wanted)
        assert (described.error_code, described.resources) == (codes.SECURITY_DISABLED, ())
        given = {"resource_name": "t", "principal": "User:me", "host": "*"}
        created = await client.ask(codes.CREATE_ACLS, version, {"creations": [given] * 2})
        assert [each.error_code for each in created.results] == [codes.SECURITY_DISABLED] * 2
        deleted = await client.ask(codes.DELETE_ACLS, version, {"filters": [wanted]})
        assert [each.error_code for each in deleted.filter_results] == [codes.SECURITY_DISABLED]

    door(test)


@pytest.mark.parametrize("version", [0, 1, 2])
def test_every_partition_has_its_leader(version: int) -> None:
    async def test(rig: KafkaRig, client: KafkaClient) -> None:
        await client.create("t", 2)

        async def elect(partitions: Any) -> list[tuple[str, int, int]]:
            asked = {"topic_partitions": partitions, "timeout": 1000}
            answer = await client.ask(codes.ELECT_LEADERS, version, asked)
            return [
                (topic.topic, part.partition_id, int(part.error_code))
                for topic in answer.replica_election_results
                for part in topic.partition_result
            ]

        asked = [{"topic": "t", "partitions": [1, 2]}, {"topic": "no", "partitions": [0]}]
        missing = codes.UNKNOWN_TOPIC_OR_PARTITION
        assert await elect(asked) == [
            ("t", 1, codes.ELECTION_NOT_NEEDED),
            ("t", 2, missing),
            ("no", 0, missing),
        ]
        assert await elect(None) == []

    door(test)


def test_an_election_that_does_not_exist() -> None:
    async def test(rig: KafkaRig, client: KafkaClient) -> None:
        await client.create("t", 2)
        named = [{"topic": "t", "partitions": [0, 9]}]
        asked = {"election_type": 2, "topic_partitions": named, "timeout": 1000}
        answer = await client.ask(codes.ELECT_LEADERS, 2, asked)
        (topic,) = answer.replica_election_results
        found = [answer.error_code, *(part.error_code for part in topic.partition_result)]
        assert found == [codes.INVALID_REQUEST] * 3

    door(test)


def test_no_replica_is_on_its_way() -> None:
    async def test(rig: KafkaRig, client: KafkaClient) -> None:
        for topics in (None, [{"name": "t", "partition_indexes": [0]}]):
            asked = {"topics": topics, "timeout": 1000}
            answer = await client.ask(codes.LIST_PARTITION_REASSIGNMENTS, 0, asked)
            assert (answer.error_code, answer.topics) == (0, ())

    door(test)


@pytest.mark.parametrize(
    ("wanted", "code"),
    [(1, 0), (2, codes.MISMATCHED_ENDPOINT_TYPE), (3, codes.UNSUPPORTED_ENDPOINT_TYPE)],
)
def test_a_broker_is_no_controller(wanted: int, code: int) -> None:
    async def test(rig: KafkaRig, client: KafkaClient) -> None:
        answer = await client.ask(codes.DESCRIBE_CLUSTER, 1, {"endpoint_type": wanted})
        assert answer.error_code == code
        assert len(answer.brokers) == (0 if code else 1)

    door(test)


def test_replicas_stay_where_they_are() -> None:
    async def test(rig: KafkaRig, client: KafkaClient) -> None:
        await client.create("t", 1)
        here = await node_id(client)

        async def reassign(name: str, replicas: list[int] | None) -> int:
            part = {"partition_index": 0, "replicas": replicas}
            topics = [{"name": name, "partitions": [part]}]
            codes_of = set()
            for version in (0, 1):
                asked = {"topics": topics, "timeout": 1000}
                answer = await client.ask(codes.ALTER_PARTITION_REASSIGNMENTS, version, asked)
                codes_of.add(int(answer.responses[0].partitions[0].error_code))
            (code,) = codes_of
            return code

        assert await reassign("t", [here]) == 0
        assert await reassign("t", [here, here + 1]) == codes.INVALID_REPLICA_ASSIGNMENT
        assert await reassign("t", None) == codes.NO_REASSIGNMENT_IN_PROGRESS
        assert await reassign("no", [here]) == codes.UNKNOWN_TOPIC_OR_PARTITION

        async def move(path: str, name: str) -> int:
            asked = {"dirs": [{"path": path, "topics": [{"name": name, "partitions": [0]}]}]}
            answer = await client.ask(codes.ALTER_REPLICA_LOG_DIRS, 2, asked)
            return int(answer.results[0].partitions[0].error_code)

        (found,) = (await client.ask(codes.DESCRIBE_LOG_DIRS, 4, {"topics": None})).results
        assert await move(found.log_dir, "t") == 0
        assert await move(found.log_dir, "no") == codes.UNKNOWN_TOPIC_OR_PARTITION
        assert await move("/elsewhere", "t") == codes.LOG_DIR_NOT_FOUND

    door(test)


@pytest.mark.parametrize("version", [0, 1, 2])
def test_the_quorum_is_the_broker(version: int) -> None:
    async def test(rig: KafkaRig, client: KafkaClient) -> None:
        names = ("__cluster_metadata", "other")
        topics = [{"topic_name": name, "partitions": [{"partition_index": 0}]} for name in names]
        answer = await client.ask(codes.DESCRIBE_QUORUM, version, {"topics": topics})
        own, other = (topic.partitions[0] for topic in answer.topics)
        here = await node_id(client)
        assert (own.error_code, own.leader_id, own.leader_epoch) == (0, here, 0)
        assert [each.replica_id for each in own.current_voters] == [here]
        assert other.error_code == codes.UNKNOWN_TOPIC_OR_PARTITION

    door(test)


def test_what_has_configurations() -> None:
    async def test(rig: KafkaRig, client: KafkaClient) -> None:
        await client.create("t", 1)
        here = str(await node_id(client))

        async def listed(*kinds: int) -> list[tuple[int, str]]:
            asked = {"resource_types": kinds}
            answer = await client.ask(codes.LIST_CONFIG_RESOURCES, 1, asked)
            assert answer.error_code == 0
            return [(each.resource_type, each.resource_name) for each in answer.config_resources]

        assert await listed() == [(2, "t"), (4, here)]
        assert await listed(4, 32) == [(4, here)]
        assert await listed(16) == []
        old = await client.ask(codes.LIST_CONFIG_RESOURCES, 0, {})
        assert (old.error_code, old.config_resources) == (0, ())
        odd = await client.ask(codes.LIST_CONFIG_RESOURCES, 1, {"resource_types": [7]})
        assert odd.error_code == codes.UNSUPPORTED_VERSION

    door(test)


def test_topics_are_described_a_page_at_a_time() -> None:
    async def test(rig: KafkaRig, client: KafkaClient) -> None:
        await client.create("a", 3)
        await client.create("b", 2)
        await client.create("c", 1)

        async def page(limit: int, cursor: Any = None, names: tuple[str, ...] = ()) -> Any:
            asked = {
                "topics": [{"name": name} for name in names],
                "response_partition_limit": limit,
                "cursor": cursor,
            }
            return await client.ask(codes.DESCRIBE_TOPIC_PARTITIONS, 0, asked)

        def seen(answer: Any) -> dict[str, list[int]]:
            return {
                topic.name: [part.partition_index for part in topic.partitions]
                for topic in answer.topics
            }

        whole = await page(2000)
        assert seen(whole) == {"a": [0, 1, 2], "b": [0, 1], "c": [0]}
        assert whole.next_cursor is None
        cursor, pages = None, []
        while True:
            answer = await page(2, cursor)
            pages.append(seen(answer))
            if answer.next_cursor is None:
                break
            found = answer.next_cursor
            cursor = {"topic_name": found.topic_name, "partition_index": found.partition_index}
        assert pages == [{"a": [0, 1]}, {"a": [2], "b": [0]}, {"b": [1], "c": [0]}]
        full = await page(3)
        assert (full.next_cursor.topic_name, full.next_cursor.partition_index) == ("b", 0)
        some = await page(9, names=("c", "no", "(bad)"))
        assert [(topic.name, int(topic.error_code)) for topic in some.topics] == [
            ("(bad)", codes.INVALID_TOPIC_EXCEPTION),
            ("c", 0),
            ("no", codes.UNKNOWN_TOPIC_OR_PARTITION),
        ]
        for wrong in (
            {"topic_name": "z", "partition_index": 0},
            {"topic_name": "c", "partition_index": -1},
        ):
            (refused,) = (await page(9, wrong, names=("c",))).topics
            assert refused.error_code == codes.INVALID_REQUEST

    door(test)


def test_topics_that_are_asked_for_twice() -> None:
    async def test(rig: KafkaRig, client: KafkaClient) -> None:
        await client.create("t")
        by_name = {"topics": [{"name": "t"}, {"name": "t"}, {"name": "no"}, {"name": "no"}]}
        found = (await client.ask(codes.METADATA, 12, by_name)).topics
        missing = codes.UNKNOWN_TOPIC_OR_PARTITION
        assert [(each.name, each.error_code) for each in found] == [("t", 0), ("no", missing)]
        topic_id = found[0].topic_id
        for name, asked, version, code in (
            (None, topic_id, 12, 0),
            ("t", UUID(int=7), 12, codes.UNKNOWN_TOPIC_ID),
            ("t", topic_id, 11, codes.INVALID_REQUEST),
        ):
            by_id = {"topics": [{"name": name, "topic_id": asked}]}
            (one,) = (await client.ask(codes.METADATA, version, by_id)).topics
            assert one.error_code == code

    door(test, auto_create_topics="off")
