"""This module answers what Kafka's producers ask about transactions, and what administrators want
to know of them.

It only translates; the behaviour is in `kafka_transactions.py`. InitProducerId is answered where
producers without transactions are, too (`kafka_produce.py`).
"""

from __future__ import annotations

import re
from typing import Any, Final

from sluice.broker.core import BrokerCore
from sluice.broker.kafka_api import Answer, KafkaApi, Request
from sluice.broker.kafka_offset_api import Commits, code_of
from sluice.broker.kafka_partitions import KafkaTopics, is_name
from sluice.broker.kafka_transaction_state import Partition, Phase, Transaction
from sluice.protocol import kafka_codes as codes

_FENCED_FROM: Final = 2  # versions whose clients know that word
_IMPLICIT_FROM: Final = 5  # version of TxnOffsetCommit that adds its group by itself
_ABORTABLE_FROM: Final = 4  # version of it whose clients know the word
_BUMPS_FROM: Final = 5  # version of EndTxn that raises the epoch
_FEATURE: Final = "transaction.version"
_NEWEST_KIND: Final = 2
_NOBODY: Final = (-1, "")  # generation and member of one that does not say
_PATTERN: Final = re.compile(r"(?:[A-Za-z0-9_-]|\.(?!\*)|\\\.|\.\*){0,249}")  # what is understood
_WILDCARDS_MAX: Final = 3
_PASSING_STATES: Final = {"PrepareEpochFence", "Dead"}  # Kafka's; nothing stays in them here


def install(api: KafkaApi, core: BrokerCore, topics: KafkaTopics) -> None:
    """Answer these requests."""
    requests = TransactionRequests(core, topics)
    api.register(codes.ADD_PARTITIONS_TO_TXN, 0, 3, requests.add_partitions)
    api.register(codes.ADD_OFFSETS_TO_TXN, 0, 4, requests.add_offsets)
    api.register(codes.END_TXN, 0, 5, requests.end)
    api.register(codes.TXN_OFFSET_COMMIT, 0, 5, requests.commit_offsets)
    api.register(codes.DESCRIBE_PRODUCERS, 0, 0, requests.describe_producers)
    api.register(codes.DESCRIBE_TRANSACTIONS, 0, 0, requests.describe)
    api.register(codes.LIST_TRANSACTIONS, 0, 2, requests.list)
    # Clients that know it (KIP-890) add partitions by writing to them, from now on.
    api.features.append((_FEATURE, 0, _NEWEST_KIND))


class TransactionRequests:
    """The requests about transactions of one broker."""

    def __init__(self, core: BrokerCore, topics: KafkaTopics) -> None:
        self._core = core
        self._topics = topics

    def add_partitions(self, request: Request, answer: Answer) -> None:
        body = request.body
        named = [
            (topic.name, partition)
            for topic in body.v3_and_below_topics
            for partition in topic.partitions
        ]
        places = [self._place(name, partition) for name, partition in named]
        known: list[Partition] = [place for place in places if place is not None]

        def told(code: int) -> None:
            code = _known_word(code, request.version)
            rows: dict[str, list[dict[str, int]]] = {}
            for name, partition in named:
                each = code
                if len(known) < len(named):  # none is added where one of them is not there
                    is_known = self._place(name, partition) is not None
                    each = (
                        codes.OPERATION_NOT_ATTEMPTED
                        if is_known
                        else codes.UNKNOWN_TOPIC_OR_PARTITION
                    )
                line = {"partition_index": partition, "partition_error_code": each}
                rows.setdefault(name, []).append(line)
            answer(
                {
                    "results_by_topic_v3_and_below": [
                        {"name": name, "results_by_partition": lines}
                        for name, lines in rows.items()
                    ]
                }
            )

        if len(known) < len(named):
            told(0)
            return
        self._core.kafka_transactions.add_partitions(
            body.v3_and_below_transactional_id,
            body.v3_and_below_producer_id,
            body.v3_and_below_producer_epoch,
            known,
            told,
        )

    def _place(self, name: str, partition: int) -> Partition | None:
        topic = self._topics.find(name)
        if topic is None or not topic.batches or not 0 <= partition < topic.partitions:
            return None
        return topic.stored, partition

    def add_offsets(self, request: Request, answer: Answer) -> None:
        body = request.body
        self._core.kafka_transactions.add_group(
            body.transactional_id,
            body.producer_id,
            body.producer_epoch,
            body.group_id,
            lambda code: answer({"error_code": _known_word(code, request.version)}),
        )

    def commit_offsets(self, request: Request, answer: Answer) -> None:
        core, body = self._core, request.body
        commits = Commits(core, self._topics, body.topics)
        if not body.group_id or not commits.has_places:
            answer(commits.answer(0 if body.group_id else codes.INVALID_GROUP_ID))
            return
        # A producer that was shut out is told so, whatever became of its group meanwhile.
        code = core.kafka_transactions.check_offsets(
            body.transactional_id,
            body.producer_id,
            body.producer_epoch,
            body.group_id,
            implicit=request.version >= _IMPLICIT_FROM,
        )
        if code == codes.INVALID_TXN_STATE and request.version >= _ABORTABLE_FROM:
            code = codes.TRANSACTION_ABORTABLE
        elif code == codes.NOT_ENOUGH_REPLICAS:  # "in a moment", of a coordinator
            code = codes.COORDINATOR_NOT_AVAILABLE
        elif not code:
            code = core.kafka_groups.check_commit(
                body.group_id,
                getattr(body, "member_id", _NOBODY[1]),
                getattr(body, "group_instance_id", None),
                getattr(body, "generation_id", _NOBODY[0]),
                transactional=True,
            )
        if code:
            answer(commits.answer(code, of_group=True))
            return
        core.kafka_offsets.commit_pending(
            body.producer_id,
            body.group_id,
            commits.offsets,
            lambda error: answer(commits.answer(code_of(error))),
        )

    def end(self, request: Request, answer: Answer) -> None:
        body = request.body

        def told(code: int, producer_id: int, epoch: int) -> None:
            answer(
                {
                    "error_code": _known_word(code, request.version),
                    "producer_id": producer_id,
                    "producer_epoch": epoch,
                }
            )

        self._core.kafka_transactions.end(
            body.transactional_id,
            body.producer_id,
            body.producer_epoch,
            commit=body.committed,
            bumps=request.version >= _BUMPS_FROM,
            then=told,
        )

    # ------------------------------------------------------------------------------- administrators

    def describe_producers(self, request: Request, answer: Answer) -> None:
        answer(
            {
                "topics": [
                    {
                        "name": topic.name,
                        "partitions": [
                            self._producers(topic.name, each) for each in topic.partition_indexes
                        ],
                    }
                    for topic in request.body.topics
                ]
            }
        )

    def _producers(self, name: str, partition: int) -> dict[str, Any]:
        place = self._place(name, partition)
        if place is None:
            is_free = is_name(name)
            code = codes.UNKNOWN_TOPIC_OR_PARTITION if is_free else codes.INVALID_TOPIC_EXCEPTION
            return {"partition_index": partition, "error_code": code}
        states = self._core.producers.partition(*place)
        ended = self._core.kafka_transactions.producer_ids()
        rows = []
        for producer_id, producer in states.producers.items():
            first = states.stable.first_offset(producer_id)
            rows.append(
                {
                    "producer_id": producer_id,
                    "producer_epoch": producer.epoch,
                    "last_sequence": producer.batches[-1][1] if producer.batches else -1,
                    "last_timestamp": producer.last_ms,
                    # It is that of the last marker, which only producers of transactions get.
                    "coordinator_epoch": 0 if first is None and producer_id in ended else -1,
                    "current_txn_start_offset": -1 if first is None else first,
                }
            )
        return {"partition_index": partition, "active_producers": rows}

    def describe(self, request: Request, answer: Answer) -> None:
        rows = [self._described(name) for name in request.body.transactional_ids]
        answer({"transaction_states": rows})

    def _described(self, name: str) -> dict[str, Any]:
        found = self._core.kafka_transactions.get(name)
        if found is None:
            code = codes.TRANSACTIONAL_ID_NOT_FOUND if name else codes.INVALID_REQUEST
            return {"transactional_id": name, "error_code": code}
        topics: dict[str, list[int]] = {}
        for stored, partition in sorted(found.partitions):
            topics.setdefault(self._topics.kafka_name(stored) or stored, []).append(partition)
        return {
            "transactional_id": name,
            "transaction_state": found.phase.value,
            "transaction_timeout": found.timeout_ms,
            "transaction_start_time": found.start_ms,
            "producer_id": found.producer_id,
            "producer_epoch": found.epoch,
            "topics": [
                {"topic": topic, "partitions": partitions} for topic, partitions in topics.items()
            ],
        }

    def list(self, request: Request, answer: Answer) -> None:
        body, now_ms = request.body, self._core.now_ms()
        known = {each.value for each in Phase} | _PASSING_STATES
        states = set(body.state_filters)
        producers = set(body.producer_id_filters)
        least_ms = getattr(body, "duration_filter", -1)
        text = getattr(body, "transactional_id_pattern", None) or ""
        if not _PATTERN.fullmatch(text) or text.count(".*") > _WILDCARDS_MAX:
            answer({"error_code": codes.INVALID_REGULAR_EXPRESSION})
            return
        pattern = re.compile(text) if text else None

        def is_asked_for(found: Transaction) -> bool:
            if states and found.phase.value not in states:
                return False
            if producers and found.producer_id not in producers:
                return False
            # Kafka's broker takes what has not begun (-1) for what began in 1970.
            if least_ms >= 0 and now_ms - found.start_ms <= least_ms:
                return False
            return pattern is None or pattern.fullmatch(found.transactional_id) is not None

        answer(
            {
                "unknown_state_filters": sorted(states - known),
                "transaction_states": [
                    {
                        "transactional_id": found.transactional_id,
                        "producer_id": found.producer_id,
                        "transaction_state": found.phase.value,
                    }
                    for found in self._core.kafka_transactions.all()
                    if is_asked_for(found)
                ],
            }
        )


def _known_word(code: int, version: int) -> int:
    """An error code as clients of a version know it."""
    if code == codes.PRODUCER_FENCED and version < _FENCED_FROM:
        return codes.INVALID_PRODUCER_EPOCH
    return code
