"""This module asks through Kafka's door what only clusters have, and expects what Kafka's broker
says where it is alone.
"""

from __future__ import annotations

from typing import Any

import pytest

from sluice.protocol import kafka_codes as codes
from tests.unit.broker.kafka_door_kit import KafkaClient, KafkaRig
from tests.unit.broker.test_kafka_edges import door


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
