"""This module tells Kafka's clients where topics are, where their offsets stand, and gives ids to
producers.

One broker leads all partitions; its epoch never changes. A topic that nobody has made is made by
the first client that asks for it, where messages may create topics too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final
from uuid import UUID

from sluice.broker.core import BrokerCore
from sluice.broker.kafka_api import Answer, KafkaApi, Node, Request, TransactionDesk
from sluice.broker.kafka_partitions import KafkaTopic, has_collisions, is_name, unify
from sluice.broker.producer_states import LEADER_EPOCH
from sluice.errors import SluiceError
from sluice.protocol import kafka, kafka_codes

_NO_OPERATIONS: Final = -2147483648  # nobody asked what is allowed
ALL_TOPIC_OPERATIONS: Final = sum(1 << bit for bit in (3, 4, 5, 6, 7, 8, 10, 11))
ALL_CLUSTER_OPERATIONS: Final = sum(1 << bit for bit in (5, 7, 8, 9, 10, 11, 12))
_BROKERS: Final = 1
_CONTROLLERS: Final = 2
_CACHED_MAX: Final = 64
_IDS_FROM: Final = 12  # version of Metadata that asks by ids; two older ones only know the word
_FENCED_FROM: Final = 4  # older clients know no word for a producer that another one replaced


class KafkaMetadata:
    """What clients ask before they send or read anything."""

    def __init__(self, core: BrokerCore, transactions: TransactionDesk | None = None) -> None:
        self._core = core
        self._transactions = transactions
        self._all: dict[
            tuple[int, tuple[bool, bool], Node], tuple[int, list[KafkaTopic], bytes]
        ] = {}

    def register(self, api: KafkaApi) -> None:
        api.register(kafka_codes.METADATA, 0, 13, self.metadata)
        api.register(kafka_codes.DESCRIBE_CLUSTER, 0, 2, self.describe_cluster)
        api.register(kafka_codes.INIT_PRODUCER_ID, 0, 5, self.init_producer_id)

    # ------------------------------------------------------------------------------------- metadata

    def metadata(self, request: Request, answer: Answer) -> None:
        body, core = request.body, self._core
        asked = body.topics
        if asked is None or (request.version == 0 and not asked):
            self._answer_all(request, answer)
            return
        may_create = getattr(body, "allow_auto_topic_creation", True) and core.config.creates_topics
        topics = []
        for name, topic_id in dict.fromkeys(
            (each.name, getattr(each, "topic_id", None)) for each in asked
        ):
            if name is None or topic_id is not None:
                topics.append(self._by_id(topic_id or UUID(int=0), request))
            else:
                topics.append(self._by_name(name, request, may_create=may_create))
        answer(self._around(request, topics))

    def _answer_all(self, request: Request, answer: Answer) -> None:
        """All topics: the same bytes as long as none changes."""
        topics = self._core.kafka_topics.all()
        body = request.body
        wishes = (
            bool(getattr(body, "include_topic_authorized_operations", False)),
            bool(getattr(body, "include_cluster_authorized_operations", False)),
        )
        place = (request.version, wishes, request.peer.node)
        cached = self._all.get(place)
        if cached is None or cached[1] != topics:
            shown = [self._shown(topic, request) for topic in topics]
            data = kafka.encode(kafka_codes.METADATA, request.version, self._around(request, shown))
            if len(self._all) >= _CACHED_MAX:
                self._all.clear()
            cached = self._all[place] = (0, topics, data)
        answer([cached[2]])

    def _around(self, request: Request, topics: list[dict[str, Any]]) -> dict[str, Any]:
        node = request.peer.node
        wants_operations = getattr(request.body, "include_cluster_authorized_operations", False)
        return {
            "brokers": [{"node_id": node.node_id, "host": node.host, "port": node.port}],
            "cluster_id": self._core.config.cluster_name,
            "controller_id": node.node_id,
            "topics": topics,
            "cluster_authorized_operations": (
                ALL_CLUSTER_OPERATIONS if wants_operations else _NO_OPERATIONS
            ),
        }

    def _by_id(self, topic_id: UUID, request: Request) -> dict[str, Any]:
        if request.version < _IDS_FROM:
            return {"error_code": kafka_codes.INVALID_REQUEST, "name": "", "topic_id": topic_id}
        topic = self._core.kafka_topics.by_id(topic_id)
        if topic is not None:
            return self._shown(topic, request)
        return {"error_code": kafka_codes.UNKNOWN_TOPIC_ID, "name": None, "topic_id": topic_id}

    def _by_name(self, name: str, request: Request, *, may_create: bool) -> dict[str, Any]:
        topics = self._core.kafka_topics
        if not is_name(name):
            return {"error_code": kafka_codes.INVALID_TOPIC_EXCEPTION, "name": name}
        topic = topics.find(name)
        if topic is None and may_create and not topics.is_taken(name):
            if has_collisions(name) and unify(name) in topics.unified():
                return {"error_code": kafka_codes.INVALID_TOPIC_EXCEPTION, "name": name}
            try:
                topic = topics.create(name, self._core.config.default_queue_count, {})
            except SluiceError:
                return {"error_code": kafka_codes.LEADER_NOT_AVAILABLE, "name": name}
        if topic is None:
            return {"error_code": kafka_codes.UNKNOWN_TOPIC_OR_PARTITION, "name": name}
        return self._shown(topic, request)

    def _shown(self, topic: KafkaTopic, request: Request) -> dict[str, Any]:
        node_id = request.peer.node.node_id
        wants_operations = getattr(request.body, "include_topic_authorized_operations", False)
        return {
            "name": topic.name,
            "topic_id": topic.id,
            # Patterns of consumers leave internal topics out.
            "is_internal": bool(topic.dead_group),
            "partitions": [
                {
                    "partition_index": partition,
                    "leader_id": node_id,
                    "leader_epoch": LEADER_EPOCH,
                    "replica_nodes": (node_id,),
                    "isr_nodes": (node_id,),
                }
                for partition in range(topic.partitions)
            ],
            "topic_authorized_operations": (
                ALL_TOPIC_OPERATIONS if wants_operations else _NO_OPERATIONS
            ),
        }

    def describe_cluster(self, request: Request, answer: Answer) -> None:
        node = request.peer.node
        wants_operations = request.body.include_cluster_authorized_operations
        wanted = getattr(request.body, "endpoint_type", _BROKERS)
        if wanted != _BROKERS:
            is_known = wanted == _CONTROLLERS
            code = (
                kafka_codes.MISMATCHED_ENDPOINT_TYPE
                if is_known
                else kafka_codes.UNSUPPORTED_ENDPOINT_TYPE
            )
            answer({"error_code": code, "error_message": "this is a broker, and no controller"})
            return
        answer(
            {
                "endpoint_type": _BROKERS,
                "cluster_id": self._core.config.cluster_name,
                "controller_id": node.node_id,
                "brokers": [{"broker_id": node.node_id, "host": node.host, "port": node.port}],
                "cluster_authorized_operations": (
                    ALL_CLUSTER_OPERATIONS if wants_operations else _NO_OPERATIONS
                ),
            }
        )

    # ------------------------------------------------------------------------------------ producers

    def init_producer_id(self, request: Request, answer: Answer) -> None:
        body = request.body

        def given(code: int, producer_id: int, epoch: int) -> None:
            if code == kafka_codes.PRODUCER_FENCED and request.version < _FENCED_FROM:
                code = kafka_codes.INVALID_PRODUCER_EPOCH
            answer({"error_code": code, "producer_id": producer_id, "producer_epoch": epoch})

        known_id = int(getattr(body, "producer_id", -1))
        known_epoch = int(getattr(body, "producer_epoch", -1))
        if (known_id < 0) != (known_epoch < 0):
            given(kafka_codes.INVALID_REQUEST, -1, -1)
            return
        if body.transactional_id is not None:
            timeout_ms = round(body.transaction_timeout.total_seconds() * 1000)
            self._init_transactional(
                body.transactional_id, timeout_ms, (known_id, known_epoch), given
            )
            return

        def told(producer_id: int) -> None:
            if producer_id < 0:
                given(kafka_codes.COORDINATOR_NOT_AVAILABLE, -1, -1)
            else:
                given(kafka_codes.NONE, producer_id, 0)

        self._core.producers.new_producer_id(told)

    def _init_transactional(
        self,
        transactional_id: str,
        timeout_ms: int,
        known: tuple[int, int],
        given: Callable[[int, int, int], None],
    ) -> None:
        if not transactional_id:
            given(kafka_codes.INVALID_REQUEST, -1, -1)
        elif self._transactions is None:
            given(kafka_codes.COORDINATOR_NOT_AVAILABLE, -1, -1)
        else:
            self._transactions.init(transactional_id, timeout_ms, *known, given)
