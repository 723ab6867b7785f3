"""This module answers what Kafka's administrators ask of a cluster, where one broker is all of it:
leaders are never elected, no replica is on its way to another broker, and nobody keeps permissions.

That is what Kafka's broker says in the same case; tools ask for it before they do anything else.
"""

from __future__ import annotations

from typing import Any, Final

from sluice.broker.core import BrokerCore
from sluice.broker.kafka_api import Answer, KafkaApi, Request
from sluice.protocol import kafka_codes as codes

_NO_PERMISSIONS: Final = {
    "error_code": codes.SECURITY_DISABLED,
    "error_message": "this broker keeps no permissions",
}


class KafkaCluster:
    """A cluster of one broker."""

    def __init__(self, core: BrokerCore) -> None:
        self._core = core

    def register(self, api: KafkaApi) -> None:
        api.register(codes.DESCRIBE_ACLS, 1, 3, self.describe_acls)
        api.register(codes.CREATE_ACLS, 1, 3, self.create_acls)
        api.register(codes.DELETE_ACLS, 1, 3, self.delete_acls)
        api.register(codes.ELECT_LEADERS, 0, 2, self.elect_leaders)
        api.register(codes.LIST_PARTITION_REASSIGNMENTS, 0, 0, self.list_reassignments)

    def describe_acls(self, request: Request, answer: Answer) -> None:
        answer(_NO_PERMISSIONS)

    def create_acls(self, request: Request, answer: Answer) -> None:
        answer({"results": [_NO_PERMISSIONS for _ in request.body.creations]})

    def delete_acls(self, request: Request, answer: Answer) -> None:
        answer({"filter_results": [_NO_PERMISSIONS for _ in request.body.filters]})

    def elect_leaders(self, request: Request, answer: Answer) -> None:
        """Each partition has its leader; who names none is told of those that have a new one."""
        answer(
            {
                "replica_election_results": [
                    {
                        "topic": each.topic,
                        "partition_result": [
                            self._elected(each.topic, partition) for partition in each.partitions
                        ],
                    }
                    for each in request.body.topic_partitions or ()
                ]
            }
        )

    def _elected(self, name: str, partition: int) -> dict[str, Any]:
        topic = self._core.kafka_topics.find(name)
        if topic is None or not 0 <= partition < topic.partitions:
            code, reason = codes.UNKNOWN_TOPIC_OR_PARTITION, "there is no such partition"
        else:
            code, reason = codes.ELECTION_NOT_NEEDED, "its leader is the one broker there is"
        return {"partition_id": partition, "error_code": code, "error_message": reason}

    def list_reassignments(self, request: Request, answer: Answer) -> None:
        answer({"topics": []})
