"""This module answers what Kafka's clients ask about committed offsets: commit, fetch, delete.

It only translates; the behaviour is in `kafka_offsets.py`. Clients name topics by Kafka's name or
id, offsets are kept by the name in the store.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

from sluice.broker.core import BrokerCore
from sluice.broker.kafka_api import Answer, KafkaApi, Request
from sluice.broker.kafka_group_values import State
from sluice.broker.kafka_groups import CONSUMER_PROTOCOL
from sluice.broker.kafka_offsets import NO_OFFSET, Committed, Partition
from sluice.broker.kafka_partitions import KafkaTopic, KafkaTopics
from sluice.errors import MessageIllegal, SluiceError
from sluice.protocol import kafka_codes as codes

_MISSING_FROM: Final = 9  # version of OffsetCommit
_GROUPS_FROM: Final = 8  # version of OffsetFetch
_UNSTABLE: Final = {"committed_offset": NO_OFFSET, "committed_leader_epoch": -1, "metadata": ""}


def install(api: KafkaApi, core: BrokerCore, topics: KafkaTopics) -> None:
    """Answer these requests."""
    offsets = OffsetRequests(core, topics)
    api.register(codes.OFFSET_COMMIT, 2, 10, offsets.commit)
    api.register(codes.OFFSET_FETCH, 1, 10, offsets.fetch)
    api.register(codes.OFFSET_DELETE, 0, 0, offsets.delete)


class Commits:
    """The offsets of one request, checked one by one; the answer has them in the same order."""

    def __init__(
        self, core: BrokerCore, topics: KafkaTopics, named: Iterable[Any], retention_ms: int = -1
    ) -> None:
        self._core = core
        self._rows: list[dict[str, Any]] = []
        self._good: list[dict[str, Any]] = []  # rows of partitions that can be committed
        self._long: list[dict[str, Any]] = []  # ... could, if their texts were shorter
        self.offsets: list[tuple[Partition, Committed]] = []
        now_ms = core.now_ms()
        expires_ms = now_ms + retention_ms if retention_ms >= 0 else -1
        for each in named:
            topic = find_topic(topics, each)
            row: dict[str, Any] = {**name_of(each), "partitions": []}
            self._rows.append(row)
            for partition in each.partitions:
                code = self._check(each, topic, partition)
                line = {"partition_index": partition.partition_index, "error_code": code}
                row["partitions"].append(line)
                if code == codes.OFFSET_METADATA_TOO_LARGE:
                    self._long.append(line)
                elif not code and topic is not None:
                    self._good.append(line)
                    committed = Committed(
                        partition.committed_offset,
                        getattr(partition, "committed_leader_epoch", -1),
                        partition.committed_metadata or "",
                        now_ms,
                        expires_ms,
                    )
                    where = (topic.stored, partition.partition_index)
                    self.offsets.append((where, committed))

    def _check(self, named: Any, topic: KafkaTopic | None, partition: Any) -> int:
        if topic is None:
            has_name = hasattr(named, "name")
            return codes.UNKNOWN_TOPIC_OR_PARTITION if has_name else codes.UNKNOWN_TOPIC_ID
        if not 0 <= partition.partition_index < topic.partitions:
            return codes.UNKNOWN_TOPIC_OR_PARTITION
        if len(partition.committed_metadata or "") > self._core.config.kafka_offset_metadata_max:
            return codes.OFFSET_METADATA_TOO_LARGE
        return 0

    @property
    def has_places(self) -> bool:
        """Whether one of the partitions is there."""
        return bool(self._good or self._long)

    def answer(self, code: int, *, of_group: bool = False) -> dict[str, Any]:
        """The answer, where those that could be committed have a code together. `of_group`: it is
        the group that is refused, whatever its offsets are.
        """
        for line in (*self._good, *self._long) if of_group else self._good:
            line["error_code"] = code
        return {"topics": self._rows}


class OffsetRequests:
    """The requests about offsets of one broker."""

    def __init__(self, core: BrokerCore, topics: KafkaTopics) -> None:
        self._core = core
        self._topics = topics

    def commit(self, request: Request, answer: Answer) -> None:
        core, body = self._core, request.body
        retention = getattr(body, "retention_time", None)
        retention_ms = -1 if retention is None else round(retention.total_seconds() * 1000)
        commits = Commits(core, self._topics, body.topics, retention_ms)
        if not commits.has_places:  # nobody becomes a group by that
            answer(commits.answer(0))
            return
        code = core.kafka_groups.check_commit(
            body.group_id,
            body.member_id,
            getattr(body, "group_instance_id", None),
            body.generation_id_or_member_epoch,
            missing_code=(
                codes.GROUP_ID_NOT_FOUND
                if request.version >= _MISSING_FROM
                else codes.ILLEGAL_GENERATION
            ),
        )
        if code:
            answer(commits.answer(code, of_group=True))
            return
        core.kafka_offsets.commit(
            body.group_id,
            commits.offsets,
            lambda error: answer(commits.answer(code_of(error))),
        )

    # ------------------------------------------------------------------------------------- fetching

    def fetch(self, request: Request, answer: Answer) -> None:
        body = request.body
        stable = getattr(body, "require_stable", False)
        if request.version >= _GROUPS_FROM:
            groups = [
                {"group_id": each.group_id, "topics": self._fetched(each, stable)}
                for each in body.groups
            ]
            answer({"groups": groups})
        else:
            answer({"topics": self._fetched(body, stable)})

    def _fetched(self, asked: Any, stable: bool) -> list[dict[str, Any]]:
        if asked.topics is None:
            return self._all(asked.group_id, stable)
        rows = []
        for each in asked.topics:
            topic = find_topic(self._topics, each)
            row: dict[str, Any] = {**name_of(each), "partitions": []}
            for partition in each.partition_indexes:
                if topic is None:
                    code = 0 if hasattr(each, "name") else codes.UNKNOWN_TOPIC_ID
                    line = {**_UNSTABLE, "error_code": code, "partition_index": partition}
                else:
                    line = self._line(asked.group_id, topic.stored, partition, stable)
                row["partitions"].append(line)
            rows.append(row)
        return rows

    def _all(self, group: str, stable: bool) -> list[dict[str, Any]]:
        rows: dict[str, dict[str, Any]] = {}
        for stored, partition in sorted(self._core.kafka_offsets.of(group)):
            if stored not in rows:
                name = self._topics.kafka_name(stored)
                topic = None if name is None else self._topics.find(name)
                if topic is None:
                    continue
                rows[stored] = {"name": topic.name, "topic_id": topic.id, "partitions": []}
            line = self._line(group, stored, partition, stable)
            rows[stored]["partitions"].append(line)
        return list(rows.values())

    def _line(self, group: str, stored: str, partition: int, stable: bool) -> dict[str, Any]:
        offsets = self._core.kafka_offsets
        line: dict[str, Any] = {**_UNSTABLE, "partition_index": partition}
        if stable and offsets.is_unstable(group, stored, partition):
            line["error_code"] = codes.UNSTABLE_OFFSET_COMMIT
            return line
        committed = offsets.get(group, stored, partition)
        if committed is not None:
            line["committed_offset"] = committed.offset
            line["committed_leader_epoch"] = committed.leader_epoch
            line["metadata"] = committed.text
        return line

    # ------------------------------------------------------------------------------------- deleting

    def delete(self, request: Request, answer: Answer) -> None:
        """Forget offsets of topics that nobody in the group reads."""
        core, body = self._core, request.body
        code = self._refusal(body.group_id)
        if code:
            answer({"error_code": code})
            return
        group = core.kafka_groups.get(body.group_id)
        is_in_use = group is not None and group.state != State.EMPTY
        # Where nobody can tell what members read, it may be all.
        subscribed = core.kafka_groups.subscribed(body.group_id)
        places: list[Partition] = []
        rows = []
        for each in body.topics:
            topic = self._topics.find(each.name)
            lines = []
            for partition in each.partitions:
                code = 0
                if topic is None or not 0 <= partition.partition_index < topic.partitions:
                    code = codes.UNKNOWN_TOPIC_OR_PARTITION
                elif is_in_use and (subscribed is None or each.name in subscribed):
                    code = codes.GROUP_SUBSCRIBED_TO_TOPIC
                else:
                    places.append((topic.stored, partition.partition_index))
                lines.append({"partition_index": partition.partition_index, "error_code": code})
            rows.append({"name": each.name, "partitions": lines})

        def done(error: SluiceError | None) -> None:
            if error is None:
                answer({"topics": rows})
            else:
                answer({"error_code": code_of(error)})

        core.kafka_offsets.delete(body.group_id, places, done)

    def _refusal(self, name: str) -> int:
        if not name:
            return codes.INVALID_GROUP_ID
        group = self._core.kafka_groups.get(name)
        if group is None:
            return codes.GROUP_ID_NOT_FOUND
        if group.state != State.EMPTY and group.protocol_type != CONSUMER_PROTOCOL:
            return codes.NON_EMPTY_GROUP
        return 0


def find_topic(topics: KafkaTopics, named: Any) -> KafkaTopic | None:
    """A topic that a request names, by name or by id."""
    if hasattr(named, "name"):
        return topics.find(named.name)
    return None if named.topic_id is None else topics.by_id(named.topic_id)


def name_of(named: Any) -> dict[str, Any]:
    """How a request names a topic, for the answer."""
    if hasattr(named, "name"):
        return {"name": named.name}
    return {"topic_id": named.topic_id}


def code_of(error: SluiceError | None) -> int:
    """What a client is told where something could not be stored."""
    if error is None:
        return 0
    if isinstance(error, MessageIllegal):
        return codes.INVALID_COMMIT_OFFSET_SIZE
    return codes.COORDINATOR_NOT_AVAILABLE
