"""This module answers what Kafka's administrators ask of a cluster, where one broker is all of it:
leaders are never elected, no replica is on its way to another broker or directory, the quorum is
the broker itself, and nobody keeps permissions.

That is what Kafka's broker says in the same case; tools ask for it before they do anything else.
"""

from __future__ import annotations

from typing import Any, Final

from sluice.broker.core import BrokerCore
from sluice.broker.kafka_api import Answer, KafkaApi, Request
from sluice.broker.kafka_configs import BROKER_RESOURCE, TOPIC_RESOURCE
from sluice.broker.kafka_metadata import ALL_TOPIC_OPERATIONS
from sluice.broker.kafka_partitions import is_name
from sluice.broker.producer_states import LEADER_EPOCH
from sluice.protocol import kafka_codes as codes

_QUORUM: Final = ("__cluster_metadata", 0)  # the partition in which Kafka keeps its own state
_ELECTIONS: Final = (0, 1)  # of the preferred replica, and of one that may have less
_PAGE_MAX: Final = 2000  # partitions that are described at once
_SOME_RESOURCES: Final = {8, 16, 32}  # loggers, metrics of clients, groups: none has configurations
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
        api.register(codes.ALTER_PARTITION_REASSIGNMENTS, 0, 1, self.reassign)
        api.register(codes.LIST_PARTITION_REASSIGNMENTS, 0, 0, self.list_reassignments)
        api.register(codes.ALTER_REPLICA_LOG_DIRS, 1, 2, self.move)
        api.register(codes.DESCRIBE_QUORUM, 0, 2, self.describe_quorum)
        api.register(codes.LIST_CONFIG_RESOURCES, 0, 1, self.list_resources)
        api.register(codes.DESCRIBE_TOPIC_PARTITIONS, 0, 0, self.describe_partitions)

    # ---------------------------------------------------------------------------------- permissions

    def describe_acls(self, request: Request, answer: Answer) -> None:
        answer(_NO_PERMISSIONS)

    def create_acls(self, request: Request, answer: Answer) -> None:
        answer({"results": [_NO_PERMISSIONS for _ in request.body.creations]})

    def delete_acls(self, request: Request, answer: Answer) -> None:
        answer({"filter_results": [_NO_PERMISSIONS for _ in request.body.filters]})

    # ---------------------------------------------------------------------------- leaders, replicas

    def elect_leaders(self, request: Request, answer: Answer) -> None:
        """Each partition has its leader; who names none is told of those that have a new one."""
        is_known = getattr(request.body, "election_type", _ELECTIONS[0]) in _ELECTIONS
        answer(
            {
                "error_code": 0 if is_known else codes.INVALID_REQUEST,
                "replica_election_results": [
                    {
                        "topic": each.topic,
                        "partition_result": [
                            self._elected(each.topic, partition, is_known=is_known)
                            for partition in each.partitions
                        ],
                    }
                    for each in request.body.topic_partitions or ()
                ],
            }
        )

    def _elected(self, name: str, partition: int, *, is_known: bool) -> dict[str, Any]:
        if not is_known:
            code, reason = codes.INVALID_REQUEST, "there is no such election"
        elif not self._is_there(name, partition):
            code, reason = codes.UNKNOWN_TOPIC_OR_PARTITION, "there is no such partition"
        else:
            code, reason = codes.ELECTION_NOT_NEEDED, "its leader is the one broker there is"
        return {"partition_id": partition, "error_code": code, "error_message": reason}

    def list_reassignments(self, request: Request, answer: Answer) -> None:
        answer({"topics": []})

    def reassign(self, request: Request, answer: Answer) -> None:
        """Replicas stay where they are: only that can be asked for."""
        here = (request.peer.node.node_id,)
        answer(
            {
                "allow_replication_factor_change": getattr(
                    request.body, "allow_replication_factor_change", True
                ),
                "responses": [
                    {
                        "name": topic.name,
                        "partitions": [
                            {
                                "partition_index": part.partition_index,
                                "error_code": self._why_not_there(topic.name, part, here),
                            }
                            for part in topic.partitions
                        ],
                    }
                    for topic in request.body.topics
                ],
            }
        )

    def _why_not_there(self, name: str, part: Any, here: tuple[int]) -> int:
        if not self._is_there(name, part.partition_index):
            return codes.UNKNOWN_TOPIC_OR_PARTITION
        if part.replicas is None:
            return codes.NO_REASSIGNMENT_IN_PROGRESS
        return 0 if tuple(part.replicas) == here else codes.INVALID_REPLICA_ASSIGNMENT

    def move(self, request: Request, answer: Answer) -> None:
        """There is one directory; who asks for it is satisfied."""
        own = self._core.config.store.directory
        answer(
            {
                "results": [
                    {
                        "topic_name": topic.name,
                        "partitions": [
                            {
                                "partition_index": partition,
                                "error_code": self._moved(each.path == own, topic.name, partition),
                            }
                            for partition in topic.partitions
                        ],
                    }
                    for each in request.body.dirs
                    for topic in each.topics
                ]
            }
        )

    def _moved(self, is_own: bool, name: str, partition: int) -> int:
        if not is_own:
            return codes.LOG_DIR_NOT_FOUND
        return 0 if self._is_there(name, partition) else codes.UNKNOWN_TOPIC_OR_PARTITION

    def _is_there(self, name: str, partition: int) -> bool:
        topic = self._core.kafka_topics.find(name)
        return topic is not None and 0 <= partition < topic.partitions

    # ---------------------------------------------------------------------------- what is described

    def describe_quorum(self, request: Request, answer: Answer) -> None:
        node = request.peer.node
        listener = {"name": "PLAINTEXT", "host": node.host, "port": node.port}
        answer(
            {
                "topics": [
                    {
                        "topic_name": topic.topic_name,
                        "partitions": [
                            self._quorum(topic.topic_name, part.partition_index, node.node_id)
                            for part in topic.partitions
                        ],
                    }
                    for topic in request.body.topics
                ],
                "nodes": [{"node_id": node.node_id, "listeners": [listener]}],
            }
        )

    def _quorum(self, name: str, partition: int, node_id: int) -> dict[str, Any]:
        row: dict[str, Any] = {"partition_index": partition}
        if (name, partition) != _QUORUM:
            return {**row, "error_code": codes.UNKNOWN_TOPIC_OR_PARTITION}
        end, now_ms = self._core.store.log.end, self._core.now_ms()
        voter = {
            "replica_id": node_id,
            "log_end_offset": end,
            "last_fetch_timestamp": now_ms,
            "last_caught_up_timestamp": now_ms,
        }
        return {
            **row,
            "leader_id": node_id,
            "leader_epoch": LEADER_EPOCH,
            "high_watermark": end,
            "current_voters": [voter],
        }

    def list_resources(self, request: Request, answer: Answer) -> None:
        """What has configurations; the first version asks for clients' metrics alone."""
        found = {
            TOPIC_RESOURCE: [topic.name for topic in self._core.kafka_topics.all()],
            BROKER_RESOURCE: [str(request.peer.node.node_id)],
        }
        wanted = getattr(request.body, "resource_types", None)
        if wanted is None:
            found = {}
        elif not set(wanted) <= found.keys() | _SOME_RESOURCES:
            answer({"error_code": codes.UNSUPPORTED_VERSION})
            return
        answer(
            {
                "config_resources": [
                    {"resource_name": name, "resource_type": kind}
                    for kind, names in found.items()
                    if not wanted or kind in wanted
                    for name in names
                ]
            }
        )

    def describe_partitions(self, request: Request, answer: Answer) -> None:
        """Topics by name, a page at a time: the next one begins where this one ends."""
        body, cursor = request.body, request.body.cursor
        first = "" if cursor is None else cursor.topic_name
        asked = {each.name for each in body.topics}
        if cursor is not None and (
            cursor.partition_index < 0 or (asked and cursor.topic_name not in asked)
        ):
            code = codes.INVALID_REQUEST
            answer({"topics": [{"name": name, "error_code": code} for name in sorted(asked)]})
            return
        names = asked or {topic.name for topic in self._core.kafka_topics.all()}
        left = max(1, min(_PAGE_MAX, body.response_partition_limit))
        rows: list[dict[str, Any]] = []
        following: dict[str, Any] | None = None
        for name in sorted(each for each in names if each >= first):
            if not left:
                following = {"topic_name": name, "partition_index": 0}
                break
            begin = cursor.partition_index if cursor is not None and name == first else 0
            row, end = self._page(name, begin, left, request.peer.node.node_id)
            rows.append(row)
            left -= len(row.get("partitions", ()))
            if end:
                following = {"topic_name": name, "partition_index": end}
                break
        answer({"topics": rows, "next_cursor": following})

    def _page(self, name: str, begin: int, count: int, node_id: int) -> tuple[dict[str, Any], int]:
        """Some partitions of a topic, and the one that follows them; 0: none does."""
        topic = self._core.kafka_topics.find(name)
        if topic is None:
            is_free = is_name(name)
            code = codes.UNKNOWN_TOPIC_OR_PARTITION if is_free else codes.INVALID_TOPIC_EXCEPTION
            return {"name": name, "error_code": code}, 0
        end = min(topic.partitions, begin + count)
        row = {
            "name": name,
            "topic_id": topic.id,
            "is_internal": bool(topic.dead_group),
            "topic_authorized_operations": ALL_TOPIC_OPERATIONS,
            "partitions": [
                {
                    "partition_index": partition,
                    "leader_id": node_id,
                    "leader_epoch": LEADER_EPOCH,
                    "replica_nodes": (node_id,),
                    "isr_nodes": (node_id,),
                    "eligible_leader_replicas": (),
                    "last_known_elr": (),
                }
                for partition in range(begin, end)
            ],
        }
        return row, end if end < topic.partitions else 0
