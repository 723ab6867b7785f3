"""This module translates what administrators ask about topics: settings, offsets, queue entries."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import orjson

from sluice.broker import attributes
from sluice.broker.admin_base import (
    AdminPart,
    log_lines,
    page,
    version_of,
    wire_subscription,
)
from sluice.broker.browsing import Unit, message_ms, queue_units
from sluice.broker.remoting_api import Handle
from sluice.broker.topic_deletion import delete_topic
from sluice.broker.topics import (
    CHECK_MAX_TOPIC,
    CLOSED_TOPICS,
    QUEUES_MAX,
    TopicSettings,
    check_name,
)
from sluice.errors import MessageIllegal, ParameterInvalid, SluiceError, TopicMissing
from sluice.net import Connection
from sluice.protocol import remoting_admin, remoting_bodies
from sluice.protocol.remoting import RemotingCommand
from sluice.protocol.remoting_bodies import QueueSpan
from sluice.protocol.remoting_codes import RequestCode as Request

PAGE_MAX: Final = 2000
_PERM_MAX: Final = 15
_FILTER_TYPES: Final = ("SINGLE_TAG", "MULTI_TAG")
_INT64_MAX: Final = (1 << 63) - 1


class AdminTopics(AdminPart):
    """Topics of one broker, for administrators."""

    def handlers(self) -> dict[int, Handle]:
        return {
            Request.UPDATE_AND_CREATE_TOPIC: self._update,
            Request.UPDATE_AND_CREATE_TOPIC_LIST: self._update_list,
            Request.UPDATE_AND_CREATE_STATIC_TOPIC: self._update_static,
            Request.DELETE_TOPIC_IN_BROKER: self._delete,
            Request.GET_TOPIC_CONFIG: self._get,
            Request.GET_ALL_TOPIC_CONFIG: self._get_all,
            Request.GET_TOPIC_STATS_INFO: self._stats,
            Request.QUERY_TOPIC_CONSUME_BY_WHO: self._who_consumes,
            Request.QUERY_TOPICS_BY_CONSUMER: self._topics_of_group,
            Request.GET_SYSTEM_TOPIC_LIST_FROM_BROKER: self._system_topics,
            Request.QUERY_CONSUME_QUEUE: self._queue_entries,
            Request.QUERY_CORRECTION_OFFSET: self._corrections,
        }

    # ------------------------------------------------------------------------------------- settings

    def _update(self, connection: Connection, command: RemotingCommand) -> None:
        fields = self._fields(command)
        name = fields["topic"]
        self._check_name(name)
        old = self._core.topics.get(name)
        changes = attributes.parse_changes(fields["attributes"] or "")
        new = TopicSettings(
            name,
            fields["readQueueNums"],
            fields["writeQueueNums"],
            fields["perm"],
            fields["topicFilterType"],
            fields["topicSysFlag"] or 0,
            fields["order"],
            attributes.altered(None if old is None else old.attributes, changes),
        )
        self._put(connection, command, [new])

    def _update_list(self, connection: Connection, command: RemotingCommand) -> None:
        topics = []
        for row in remoting_bodies.read_topic_configs(command.body):
            self._check_name(row.name)
            old = self._core.topics.get(row.name)
            topics.append(
                TopicSettings(
                    row.name,
                    row.read_queue_count,
                    row.write_queue_count,
                    row.perm,
                    row.filter_type,
                    row.sys_flag,
                    row.order,
                    attributes.altered(None if old is None else old.attributes, row.attributes),
                )
            )
        self._put(connection, command, topics)

    def _update_static(self, connection: Connection, command: RemotingCommand) -> None:
        self._check_name(self._fields(command)["topic"])
        raise SluiceError(
            "static topics are not in this version: queues have the numbers of their broker; "
            "make the topic with updateTopic"
        )

    def _check_name(self, name: str) -> None:
        try:
            check_name(name)
        except MessageIllegal as error:
            raise ParameterInvalid(str(error)) from None
        self._refuse_system(name)

    def _refuse_system(self, name: str) -> None:
        if self._core.topics.is_system(name) or name in CLOSED_TOPICS:
            raise ParameterInvalid(f"The topic[{name}] is conflict with system topic.")

    def _put(
        self, connection: Connection, command: RemotingCommand, topics: list[TopicSettings]
    ) -> None:
        core = self._core
        for settings in topics:
            _check_settings(settings)
        changed = [settings for settings in topics if core.topics.get(settings.name) != settings]
        if not changed:
            self._answer(connection, command)
            return
        for settings in changed:
            log_lines.info("%s sets topic %s: %s", connection, settings.name, settings.to_json())
        core.topics.put(changed, self._when_durable(connection, command, routes=True))
        core.ask_turn()

    def _delete(self, connection: Connection, command: RemotingCommand) -> None:
        core = self._core
        name = self._fields(command)["topic"]
        if not name.strip():
            raise ParameterInvalid("The specified topic is blank.")
        self._refuse_system(name)
        log_lines.info("%s deletes topic %s", connection, name)
        delete_topic(core, name, self._when_durable(connection, command, routes=True))

    def _get(self, connection: Connection, command: RemotingCommand) -> None:
        name = self._fields(command)["topic"]
        settings = self._core.topics.get(name)
        if settings is None:
            raise TopicMissing(f"No topic in this broker. topic: {name}")
        self._answer(connection, command, body=orjson.dumps(settings.to_json()))

    def _get_all(self, connection: Connection, command: RemotingCommand) -> None:
        fields = self._fields(command)
        topics = self._core.topics
        version = version_of(topics.data_version())
        same = fields["dataVersion"] == remoting_admin.data_version_text(version)
        names = page(
            sorted(topics.names()), fields["topicSeq"], fields["maxTopicNum"], same, PAGE_MAX
        )
        rows: dict[str, dict[str, Any]] = {}
        for name in names:
            settings = topics.get(name)
            assert settings is not None, "the table has what it lists"
            rows[name] = settings.to_json()
        self._answer(
            connection,
            command,
            ext={"totalTopicNum": str(len(topics))},
            body=remoting_admin.write_topic_table(rows, version),
        )

    def _system_topics(self, connection: Connection, command: RemotingCommand) -> None:
        names = {*self._core.topics.system_names, *CLOSED_TOPICS, CHECK_MAX_TOPIC}
        self._answer(connection, command, body=remoting_bodies.write_topic_list(sorted(names)))

    # -------------------------------------------------------------------------------------- offsets

    def _stats(self, connection: Connection, command: RemotingCommand) -> None:
        core = self._core
        name = self._fields(command)["topic"]
        settings = core.topics.get(name)
        if settings is None:
            raise TopicMissing(f"topic[{name}] not exist")

        def ask(queue_id: int) -> Callable[[], QueueSpan]:
            def span() -> QueueSpan:
                high = core.store.max_offset(name, queue_id)
                changed_ms = message_ms(core.store, name, queue_id, high - 1) if high else 0
                stable = None
                queue = core.store.queues.get((name, queue_id))
                if queue is not None and queue.kind == "b":
                    stable = core.producers.stable_offsets(name, queue_id).stable(high)
                low = core.store.min_offset(name, queue_id)
                return QueueSpan(low, high, changed_ms, stable if stable != high else None)

            return span

        count = max(settings.read_queues, settings.write_queues)
        self._ask_each(
            connection,
            command,
            [ask(queue_id) for queue_id in range(count)],
            lambda spans: remoting_bodies.write_topic_stats(
                {self._queue(name, queue_id): span for queue_id, span in enumerate(spans)},
                core.stats.topic_rate(name),
            ),
        )

    def _who_consumes(self, connection: Connection, command: RemotingCommand) -> None:
        core = self._core
        topic = self._fields(command)["topic"]
        groups = {*core.clients.groups_of(topic), *core.offsets.groups_of(topic)}
        self._answer(connection, command, body=remoting_bodies.write_group_list(sorted(groups)))

    def _topics_of_group(self, connection: Connection, command: RemotingCommand) -> None:
        core = self._core
        topics = sorted(core.offsets.topics_of(self._fields(command)["group"]))
        body = remoting_bodies.write_topic_list(topics, core.address)
        self._answer(connection, command, body=body)

    def _queue_entries(self, connection: Connection, command: RemotingCommand) -> None:
        core = self._core
        fields = self._fields(command)
        topic, queue_id = fields["topic"] or "", fields["queueId"] or 0
        index, count = fields["index"] or 0, max(0, fields["count"] or 0)
        group = fields["consumerGroup"]
        wanted = None if group is None else core.clients.subscription(group, topic)
        filter_text = None
        if group is not None:
            filter_text = "null" if wanted is not None else f"{group}@{topic} is not online!"

        def body(answers: list[list[Unit] | None]) -> bytes:
            units = answers[0]
            if units is None:
                raise SluiceError(f"{queue_id}@{topic} is not exist!")
            return remoting_admin.write_queue_units(
                [remoting_admin.QueueUnit(*unit[:3]) for unit in units],
                core.store.min_offset(topic, queue_id),
                core.store.max_offset(topic, queue_id),
                None if wanted is None else wire_subscription(wanted),
                filter_text,
            )

        self._ask_each(
            connection,
            command,
            [lambda: queue_units(core.store, topic, queue_id, index, count)],
            body,
        )

    def _corrections(self, connection: Connection, command: RemotingCommand) -> None:
        """The lowest offset of all groups on each queue; none where the compared group is ahead."""
        core = self._core
        fields = self._fields(command)
        topic = fields["topic"]
        left_out = set((fields["filterGroups"] or "").split(","))
        lowest: dict[int, int] = {}
        for group in core.offsets.groups_of(topic):
            if group in left_out:
                continue
            for queue_id, offset in core.offsets.of(group, topic).items():
                if offset >= core.store.min_offset(topic, queue_id):
                    lowest[queue_id] = min(offset, lowest.get(queue_id, offset))
        for queue_id, offset in core.offsets.of(fields["compareGroup"], topic).items():
            if lowest.get(queue_id, offset) > offset:
                lowest[queue_id] = _INT64_MAX
        self._answer(connection, command, body=remoting_admin.write_corrections(lowest))


def _check_settings(settings: TopicSettings) -> None:
    """Refuse what no topic can have."""
    for what, count in (("read", settings.read_queues), ("write", settings.write_queues)):
        if not 0 < count <= QUEUES_MAX:
            raise ParameterInvalid(
                f"topic[{settings.name}]: {count} {what} queues; allowed: 1 to {QUEUES_MAX}"
            )
    if not 0 <= settings.perm <= _PERM_MAX:
        raise ParameterInvalid(
            f"topic[{settings.name}]: permission {settings.perm}; allowed: 0 to {_PERM_MAX}"
        )
    if settings.filter_type not in _FILTER_TYPES:
        raise ParameterInvalid(
            f"topic[{settings.name}]: filter type {settings.filter_type[:50]!r}; "
            f"allowed: {', '.join(_FILTER_TYPES)}"
        )
