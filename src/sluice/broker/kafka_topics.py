"""This module answers Kafka's administrators who make, grow and delete topics.

A topic that is made here stores batches whole (queue.type=BatchCQ). There is one broker, so the
replication factor is 1, or left to the broker.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final
from uuid import UUID

from sluice.broker.core import BrokerCore
from sluice.broker.kafka_api import Answer, KafkaApi, Request, code_of
from sluice.broker.kafka_configs import check_configs, shown_configs
from sluice.broker.kafka_partitions import (
    KafkaTopic,
    has_collisions,
    is_name,
    settings_of,
    shown,
    unify,
)
from sluice.broker.topic_deletion import delete_topic
from sluice.broker.topics import QUEUES_MAX
from sluice.errors import SluiceError
from sluice.protocol import kafka_codes

_REASONS: Final = {
    kafka_codes.INVALID_TOPIC_EXCEPTION: "a topic's name has 1 to 249 letters, digits and . _ -",
    kafka_codes.TOPIC_ALREADY_EXISTS: "a topic of this name exists",
    kafka_codes.INVALID_REPLICATION_FACTOR: "there is one broker: the replication factor is 1",
    kafka_codes.INVALID_PARTITIONS: f"a topic has 1 to {QUEUES_MAX} partitions",
    kafka_codes.INVALID_REPLICA_ASSIGNMENT: "replicas can only be on the one broker there is",
    kafka_codes.TOPIC_AUTHORIZATION_FAILED: "dead letters are only read here",
    kafka_codes.INVALID_REQUEST: "the topic is named twice, by name and id, or not at all",
}
_DEFAULT: Final = -1
CLUSTER_METADATA: Final = "__cluster_metadata"  # where Kafka keeps its own state


class KafkaAdminTopics:
    """Topics of one broker, for Kafka's administrators."""

    def __init__(self, core: BrokerCore) -> None:
        self._core = core

    def register(self, api: KafkaApi) -> None:
        api.register(kafka_codes.CREATE_TOPICS, 2, 7, self.create)
        api.register(kafka_codes.DELETE_TOPICS, 1, 6, self.delete)
        api.register(kafka_codes.CREATE_PARTITIONS, 0, 3, self.grow)

    # --------------------------------------------------------------------------------------- making

    def create(self, request: Request, answer: Answer) -> None:
        times = Counter(each.name for each in request.body.topics)
        asked = _each_once(request.body.topics)
        collisions: dict[str, str] = {}
        if any(has_collisions(name) for name in times):
            collisions = self._core.kafka_topics.unified()
        results: list[dict[str, Any]] = [{} for _ in asked]
        gathering = _Gathering(len(asked), lambda: answer({"topics": results}))
        for at, each in enumerate(asked):
            code, reason = self._why_not(each, request.peer.node.node_id, collisions)
            if times[each.name] > 1:
                code, reason = kafka_codes.INVALID_REQUEST, ""
            if code:
                results[at] = _refused(each.name, code, reason)
                gathering.done()
                continue
            collisions[unify(each.name)] = each.name
            if request.body.validate_only:
                count, configs = self._wanted(each)
                topic = shown(each.name, settings_of(each.name, count, configs), UUID(int=0))
                results[at] = self._made(topic)
                gathering.done()
            else:
                self._create(each, results, at, gathering)
        gathering.done()

    def _why_not(self, asked: Any, node_id: int, collisions: dict[str, str]) -> tuple[int, str]:
        """What keeps a topic from being made: an error code, and words where they say more."""
        name, count, copies = asked.name, asked.num_partitions, asked.replication_factor
        if not is_name(name):
            return kafka_codes.INVALID_TOPIC_EXCEPTION, ""
        if name == CLUSTER_METADATA:
            return kafka_codes.INVALID_REQUEST, f"Creation of internal topic {name} is prohibited."
        if self._core.kafka_topics.is_taken(name):
            return kafka_codes.TOPIC_ALREADY_EXISTS, f"Topic '{name}' already exists."
        other = collisions.get(unify(name))
        if other is not None:
            reason = f"Topic '{name}' differs from '{other}' in dots and underscores alone."
            return kafka_codes.INVALID_TOPIC_EXCEPTION, reason
        wrong = check_configs({each.name: each.value for each in asked.configs})
        if wrong:
            return kafka_codes.INVALID_CONFIG, wrong
        if asked.assignments:
            return self._why_not_there(asked, node_id), ""
        if count != _DEFAULT and not 0 < count <= QUEUES_MAX:
            return kafka_codes.INVALID_PARTITIONS, ""
        if copies not in (_DEFAULT, 1):
            return kafka_codes.INVALID_REPLICATION_FACTOR, ""
        return 0, ""

    def _why_not_there(self, asked: Any, node_id: int) -> int:
        """What is wrong with partitions whose places are named."""
        if (asked.num_partitions, asked.replication_factor) != (_DEFAULT, _DEFAULT):
            return kafka_codes.INVALID_REQUEST
        indexes = sorted(each.partition_index for each in asked.assignments)
        places = {tuple(each.broker_ids) for each in asked.assignments}
        if indexes != list(range(len(indexes))) or places != {(node_id,)}:
            return kafka_codes.INVALID_REPLICA_ASSIGNMENT
        return 0

    def _create(
        self, asked: Any, results: list[dict[str, Any]], at: int, gathering: _Gathering
    ) -> None:
        core, name = self._core, asked.name
        count, configs = self._wanted(asked)

        def made(error: SluiceError | None) -> None:
            found = core.kafka_topics.find(name)
            if error is not None:
                results[at] = _refused(name, code_of(error), str(error))
            elif found is None:  # somebody deleted it in between
                results[at] = {"name": name, "num_partitions": count, "replication_factor": 1}
            else:
                results[at] = self._made(found)
            gathering.done()

        try:
            core.kafka_topics.create(name, count, configs, made)
        except SluiceError as error:
            made(error)

    def _wanted(self, asked: Any) -> tuple[int, dict[str, str]]:
        """How many partitions, and which configurations."""
        count = len(asked.assignments) or asked.num_partitions
        if count == _DEFAULT:
            count = self._core.config.default_queue_count
        return count, {each.name: each.value for each in asked.configs}

    def _made(self, topic: KafkaTopic) -> dict[str, Any]:
        return {
            "name": topic.name,
            "topic_id": topic.id,
            "num_partitions": topic.partitions,
            "replication_factor": 1,
            "configs": shown_configs(self._core, topic),
        }

    # ------------------------------------------------------------------------------------- deleting

    def delete(self, request: Request, answer: Answer) -> None:
        body, core = request.body, self._core
        topics = core.kafka_topics
        asked: list[tuple[str | None, Any]]
        if request.version >= 6:
            asked = [(each.name, each.topic_id) for each in body.topics]
        else:
            asked = [(name, None) for name in body.topic_names]
        times = Counter(asked)
        named = [topics.find(name) for name, _ in asked if name is not None]
        twice = {topic.id for topic in named if topic is not None and (None, topic.id) in times}
        asked = [each for each in times if each[0] is not None or each[1] not in twice]
        results: list[dict[str, Any]] = [{} for _ in asked]
        gathering = _Gathering(len(asked), lambda: answer({"responses": results}))
        for at, (name, topic_id) in enumerate(asked):
            topic: KafkaTopic | None = None
            if (name is None) == (topic_id is None) or times[name, topic_id] > 1:
                code = kafka_codes.INVALID_REQUEST
            elif name is not None:
                topic, code = topics.find(name), kafka_codes.UNKNOWN_TOPIC_OR_PARTITION
                if topic is not None and topic.id in twice:
                    topic_id, topic, code = topic.id, None, kafka_codes.INVALID_REQUEST
            else:
                topic, code = topics.by_id(topic_id), kafka_codes.UNKNOWN_TOPIC_ID
            if topic is not None and topic.dead_group:
                topic, code = None, kafka_codes.TOPIC_AUTHORIZATION_FAILED
            if topic is None:
                results[at] = {**_refused(name, code, ""), "topic_id": topic_id}
                gathering.done()
                continue
            self._delete(topic, results, at, gathering)
        gathering.done()

    def _delete(
        self, topic: KafkaTopic, results: list[dict[str, Any]], at: int, gathering: _Gathering
    ) -> None:
        def gone(error: SluiceError | None) -> None:
            code = 0 if error is None else code_of(error)
            reason = None if error is None else str(error)
            results[at] = {
                "name": topic.name,
                "topic_id": topic.id,
                "error_code": code,
                "error_message": reason,
            }
            gathering.done()

        try:
            delete_topic(self._core, topic.stored, gone)
        except SluiceError as error:
            gone(error)

    # -------------------------------------------------------------------------------------- growing

    def grow(self, request: Request, answer: Answer) -> None:
        """More partitions; there are never fewer."""
        times = Counter(each.name for each in request.body.topics)
        asked = _each_once(request.body.topics)
        results: list[dict[str, Any]] = [{} for _ in asked]
        gathering = _Gathering(len(asked), lambda: answer({"results": results}))
        for at, each in enumerate(asked):
            topic = self._core.kafka_topics.find(each.name)
            code, reason = 0, ""
            if times[each.name] > 1:
                code = kafka_codes.INVALID_REQUEST
            elif topic is None:
                code = kafka_codes.UNKNOWN_TOPIC_OR_PARTITION
            elif topic.dead_group:
                code = kafka_codes.TOPIC_AUTHORIZATION_FAILED
            elif not topic.partitions < each.count <= QUEUES_MAX:
                code = kafka_codes.INVALID_PARTITIONS
                if 0 < each.count <= QUEUES_MAX:
                    reason = (
                        f"The topic {each.name} currently has {topic.partitions} partition(s); "
                        f"{each.count} would not be an increase."
                    )
            elif each.assignments is not None:
                places = [tuple(new.broker_ids) for new in each.assignments]
                if places != [(request.peer.node.node_id,)] * (each.count - topic.partitions):
                    code = kafka_codes.INVALID_REPLICA_ASSIGNMENT
            if code or topic is None or request.body.validate_only:
                results[at] = _refused(each.name, code, reason)
                gathering.done()
                continue
            self._grow(topic, each.count, results, at, gathering)
        gathering.done()

    def _grow(
        self,
        topic: KafkaTopic,
        count: int,
        results: list[dict[str, Any]],
        at: int,
        gathering: _Gathering,
    ) -> None:
        def grown(error: SluiceError | None) -> None:
            code = 0 if error is None else code_of(error)
            results[at] = _refused(topic.name, code, "" if error is None else str(error))
            gathering.done()

        settings = replace(topic.settings, read_queues=count, write_queues=count)
        try:
            self._core.topics.put([settings], grown)
        except SluiceError as error:
            grown(error)
            return
        self._core.ask_turn()


class _Gathering:
    """Answers when all parts are done, and the one who gathers them."""

    def __init__(self, count: int, answer: Any) -> None:
        self._left = count + 1
        self._answer = answer

    def done(self) -> None:
        self._left -= 1
        if not self._left:
            self._answer()


def _each_once(asked: Sequence[Any]) -> list[Any]:
    """Topics of a request; of those that have one name the first."""
    first: dict[str, Any] = {}
    for each in asked:
        first.setdefault(each.name, each)
    return list(first.values())


def _refused(name: str | None, code: int, reason: str) -> dict[str, Any]:
    text = (reason or _REASONS.get(code)) if code else None
    return {"name": name, "error_code": code, "error_message": text, "configs": ()}
