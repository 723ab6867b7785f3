"""This module translates what administrators ask about groups: settings, progress, resets."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final

import orjson

from sluice.broker.admin_base import (
    AdminPart,
    as_error,
    client_channel,
    log_lines,
    page,
    version_of,
)
from sluice.broker.browsing import ask_each, message_ms
from sluice.broker.groups import (
    SYSTEM_GROUPS,
    GroupSettings,
    check_group,
    group_from_json,
)
from sluice.broker.kafka_admin_api import MARK, Ask, progress_asks
from sluice.broker.priorities import altered_attributes
from sluice.broker.remoting_api import Handle
from sluice.broker.retry_policy import check_policy
from sluice.broker.topics import QUEUES_MAX
from sluice.errors import (
    ConsumerOffline,
    GroupMissing,
    MessageIllegal,
    ParameterInvalid,
    SluiceError,
    TopicMissing,
)
from sluice.net import Connection
from sluice.protocol import remoting_admin, remoting_bodies
from sluice.protocol.json_members import MessageQueue
from sluice.protocol.remoting import RemotingCommand
from sluice.protocol.remoting_bodies import QueueProgress
from sluice.protocol.remoting_codes import RequestCode as Request
from sluice.storage.store import DELAY_TABLE

PAGE_MAX: Final = 2000
_TOPIC_SEPARATOR: Final = ";"
_CPP: Final = "CPP"

Progress = tuple[MessageQueue, QueueProgress]


class AdminGroups(AdminPart):
    """Consumer groups of one broker, for administrators."""

    def handlers(self) -> dict[int, Handle]:
        return {
            Request.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP: self._update,
            Request.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP_LIST: self._update_list,
            Request.DELETE_SUBSCRIPTIONGROUP: self._delete,
            Request.GET_SUBSCRIPTIONGROUP_CONFIG: self._get,
            Request.GET_ALL_SUBSCRIPTIONGROUP_CONFIG: self._get_all,
            Request.UPDATE_AND_GET_GROUP_FORBIDDEN: self._forbid,
            Request.GET_CONSUME_STATS: self._progress,
            Request.GET_BROKER_CONSUME_STATS: self._all_progress,
            Request.QUERY_CONSUME_TIME_SPAN: self._time_spans,
            Request.CLONE_GROUP_OFFSET: self._clone,
            Request.INVOKE_BROKER_TO_RESET_OFFSET: self._reset,
            Request.GET_ALL_CONSUMER_OFFSET: self._all_offsets,
            Request.GET_ALL_DELAY_OFFSET: self._delay_offsets,
        }

    # ------------------------------------------------------------------------------------- settings

    def _update(self, connection: Connection, command: RemotingCommand) -> None:
        self._put(connection, command, [remoting_admin.read_group_config(command.body)])

    def _update_list(self, connection: Connection, command: RemotingCommand) -> None:
        self._put(connection, command, remoting_admin.read_group_configs(command.body))

    def _put(
        self, connection: Connection, command: RemotingCommand, rows: list[dict[str, Any]]
    ) -> None:
        core = self._core
        groups = [_checked(row, core.groups.get(row["groupName"])) for row in rows]
        changed = [settings for settings in groups if core.groups.get(settings.name) != settings]
        if not changed:
            self._answer(connection, command)
            return
        for settings in changed:
            log_lines.info("%s sets group %s: %s", connection, settings.name, settings.to_json())
        core.groups.put(changed, self._when_durable(connection, command))
        core.ask_turn()

    def _delete(self, connection: Connection, command: RemotingCommand) -> None:
        core = self._core
        fields = self._fields(command)
        group = fields["groupName"]
        log_lines.info("%s deletes group %s", connection, group)
        answer = self._when_durable(connection, command)

        def deleted(error: SluiceError | None) -> None:
            if error is None:
                core.pops.forget_group(group)
            if error is not None or not fields["cleanOffset"]:
                answer(error)
            else:
                core.offsets.forget_group(group, answer)
                core.ask_turn()

        core.stats.forget_group(group)
        core.groups.delete(group, deleted)
        core.retry_notes.forget_group(group)
        core.ask_turn()

    def _get(self, connection: Connection, command: RemotingCommand) -> None:
        settings = self._core.groups.get(self._fields(command)["group"])
        if settings is None:
            raise GroupMissing("No group in this broker")
        self._answer(connection, command, body=orjson.dumps(settings.to_json()))

    def _get_all(self, connection: Connection, command: RemotingCommand) -> None:
        fields = self._fields(command)
        groups = self._core.groups
        table = {name: GroupSettings(name) for name in SYSTEM_GROUPS}
        table.update({settings.name: settings for settings in groups.all()})
        version = version_of(groups.data_version())
        same = fields["dataVersion"] == remoting_admin.data_version_text(version)
        names = page(sorted(table), fields["groupSeq"], fields["maxGroupNum"], same, PAGE_MAX)
        rows = {name: table[name].to_json() for name in names}
        forbidden = {name: row for name, row in groups.forbidden().items() if name in rows}
        self._answer(
            connection,
            command,
            ext={"totalGroupNum": str(len(table))},
            body=remoting_admin.write_group_table(rows, forbidden, version),
        )

    def _forbid(self, connection: Connection, command: RemotingCommand) -> None:
        """Forbid a group to read a topic or allow it, where that is asked; say which it is."""
        core = self._core
        fields = self._fields(command)
        group, topic = fields["group"], fields["topic"]

        def done(error: SluiceError | None) -> None:
            if error is not None:
                self._api.refuse(connection, command, error)
                return
            readable = core.groups.may_read(group, topic)
            body = remoting_admin.write_forbidden(group, topic, readable=readable)
            self._answer(connection, command, remark="", body=body)

        if fields["readable"] is None:
            done(None)
            return
        if core.groups.get(group) is None:
            raise GroupMissing(f"subscription group [{group}] does not exist, apply first please!")
        if core.topics.get(topic) is None:
            raise TopicMissing(f"topic[{topic}] not exist")
        log_lines.info(
            "%s lets group %s read topic %s: %s", connection, group, topic, fields["readable"]
        )
        core.groups.forbid(group, topic, readable=fields["readable"], done=done)
        core.ask_turn()

    # ------------------------------------------------------------------------------------- progress

    def _progress(self, connection: Connection, command: RemotingCommand) -> None:
        core = self._core
        fields = self._fields(command)
        group = fields["consumerGroup"]
        listed = [t for t in (fields["topicList"] or "").split(_TOPIC_SEPARATOR) if t]
        if listed:
            topics = listed
        elif (fields["topic"] or "").strip():
            topics = [fields["topic"]]
        else:
            topics = sorted(core.offsets.topics_of(group))
        if not listed:
            topics = [topic for topic in topics if core.clients.reads(group, topic)]
        tps = sum(core.stats.group_rate(topic, group) for topic in topics)
        self._ask_each(
            connection,
            command,
            [ask for topic in topics for ask in self._progress_asks(group, topic)],
            lambda rows: remoting_bodies.write_consume_stats(dict(rows), tps),
        )

    def _progress_asks(self, group: str, topic: str) -> list[Callable[[], Progress]]:
        """A question for each queue of a topic; none for a topic that is not here."""
        core = self._core
        settings = core.topics.get(topic)

        def ask(queue_id: int) -> Callable[[], Progress]:
            def progress() -> Progress:
                committed = core.offsets.committed(group, topic, queue_id) or 0
                pulled = core.offsets.pulled_to(group, topic, queue_id)
                # What is popped counts as read only when it is acknowledged.
                popped = min(committed, core.pops.in_flight(group, topic, queue_id))
                row = QueueProgress(
                    core.store.max_offset(topic, queue_id),
                    committed - popped,
                    pulled,
                    max(0, message_ms(core.store, topic, queue_id, committed - 1)),
                )
                return self._queue(topic, queue_id), row

            return progress

        return [ask(queue_id) for queue_id in range(settings.read_queues if settings else 0)]

    def _all_progress(self, connection: Connection, command: RemotingCommand) -> None:
        core = self._core
        only_ordered = self._fields(command)["isOrder"]
        pairs: list[tuple[str, str]] = []
        for group in sorted(settings.name for settings in core.groups.all()):
            for topic in sorted(core.offsets.topics_of(group)):
                settings = core.topics.get(topic)
                if settings is None or (only_ordered and not settings.order):
                    continue
                if core.clients.reads(group, topic):
                    pairs.append((group, topic))
        owners = [
            (group, topic, ask)
            for group, topic in pairs
            for ask in self._progress_asks(group, topic)
        ]
        owners += self._kafka_progress(only_ordered=only_ordered)

        def body(rows: list[Progress]) -> bytes:
            tables: dict[tuple[str, str], dict[MessageQueue, QueueProgress]] = {}
            behind = 0
            for (group, topic, _), (queue, row) in zip(owners, rows, strict=True):
                tables.setdefault((group, topic), {})[queue] = row
                behind += row.broker_offset - row.consumer_offset
            groups: dict[str, list[dict[str, Any]]] = {
                settings.name: [] for settings in core.groups.all()
            }
            for (group, topic), table in tables.items():
                tps = core.stats.group_rate(topic, group)
                groups.setdefault(group, []).append(remoting_bodies.consume_stats(table, tps))
            return remoting_admin.write_broker_consume_stats(core.address, groups.items(), behind)

        self._ask_each(connection, command, [ask for _, _, ask in owners], body)

    def _kafka_progress(
        self, *, only_ordered: bool
    ) -> list[tuple[str, str, Callable[[], Progress]]]:
        """The same of Kafka's groups, whose names are marked."""

        def ask(topic: str, partition: int, inner: Ask) -> Callable[[], Progress]:
            return lambda: (self._queue(topic, partition), inner())

        return [
            (f"{MARK}{group.name}", topic, ask(topic, partition, inner))
            for group in self._core.kafka_groups.all()
            for topic, partition, inner in progress_asks(self._core, group.name)
            if not only_ordered
        ]

    def _time_spans(self, connection: Connection, command: RemotingCommand) -> None:
        core = self._core
        fields = self._fields(command)
        topic, group = fields["topic"], fields["group"]
        settings = core.topics.get(topic)
        if settings is None:
            raise TopicMissing(f"topic[{topic}] not exist")

        def ask(queue_id: int) -> Callable[[], remoting_admin.TimeSpan]:
            def span() -> remoting_admin.TimeSpan:
                store = core.store
                low_ms = store.earliest_ms(topic, queue_id)
                high = store.max_offset(topic, queue_id)
                committed = core.offsets.committed(group, topic, queue_id) or 0
                consumed_ms, delay_ms = low_ms, 0
                if committed > 0:
                    consumed_ms = message_ms(store, topic, queue_id, committed - 1)
                if committed < high:
                    delay_ms = core.now_ms() - message_ms(store, topic, queue_id, committed)
                high_ms = message_ms(store, topic, queue_id, high - 1)
                queue = self._queue(topic, queue_id)
                return remoting_admin.TimeSpan(queue, low_ms, high_ms, consumed_ms, delay_ms)

            return span

        self._ask_each(
            connection,
            command,
            [ask(queue_id) for queue_id in range(settings.write_queues)],
            remoting_admin.write_time_spans,
        )

    # -------------------------------------------------------------------------------------- offsets

    def _clone(self, connection: Connection, command: RemotingCommand) -> None:
        core = self._core
        fields = self._fields(command)
        source, target = fields["srcGroup"], fields["destGroup"]
        core.groups.require(target)
        topics = [fields["topic"]] if fields["topic"] else core.offsets.topics_of(source)
        for topic in topics:
            if core.topics.get(topic) is None:
                continue
            if fields["offline"] or core.clients.reads(source, topic):
                core.offsets.clone(source, target, topic)
        log_lines.info("%s clones offsets of group %s to %s", connection, source, target)
        self._answer(connection, command)

    def _reset(self, connection: Connection, command: RemotingCommand) -> None:
        core = self._core
        fields = self._fields(command)
        topic, group, when_ms = fields["topic"], fields["group"], fields["timestamp"]
        if not core.config.server_side_reset:
            self._reset_clients(connection, command)
            return
        settings = core.topics.get(topic)
        if settings is None:
            raise TopicMissing(f"Topic {topic} does not exist")
        if core.groups.get(group) is None:
            raise GroupMissing(f"Group {group} does not exist")
        queue_id = -1 if fields["queueId"] is None else fields["queueId"]
        if queue_id >= settings.read_queues:
            raise ParameterInvalid(f"topic {topic} has {settings.read_queues} queues")
        queues = range(settings.read_queues) if queue_id < 0 else range(queue_id, queue_id + 1)
        wanted = fields["offset"] if queue_id >= 0 and fields["offset"] != -1 else None

        def ask(queue_id: int) -> Callable[[], int]:
            # With force or without: RocketMQ's brokers reset by themselves alike.
            return lambda: self._reset_offset(topic, queue_id, when_ms, wanted)

        def found(offsets: list[int] | None, error: BaseException | None) -> None:
            if offsets is None:
                self._api.refuse(connection, command, as_error(error))
                return
            table = dict(zip(queues, offsets, strict=True))
            log_lines.info("%s resets group %s on topic %s to %s", connection, group, topic, table)

            def safe(error: SluiceError | None) -> None:
                if error is not None:
                    self._api.refuse(connection, command, error)
                    return
                rows = {self._queue(topic, q): offset for q, offset in table.items()}
                self._answer(connection, command, body=_offset_table(rows))

            try:
                core.offsets.reset(group, topic, table, safe)
            except SluiceError as refusal:
                safe(refusal)
                return
            core.ask_turn()
            # Consumers that wait for messages hear of it now, not when their wait is over.
            for queue_id in table:
                core.polls.wake((topic, queue_id))

        ask_each(core, [ask(queue_id) for queue_id in queues], found)

    def _reset_clients(self, connection: Connection, command: RemotingCommand) -> None:
        """RocketMQ's older way: the connected consumers are told to go on elsewhere."""
        core = self._core
        fields = self._fields(command)
        topic, group, when_ms = fields["topic"], fields["group"], fields["timestamp"]
        settings = core.topics.get(topic)
        if settings is None:
            raise TopicMissing(
                f"[reset-offset] reset offset failed, no topic in this broker. topic={topic}"
            )

        def ask(queue_id: int) -> Callable[[], tuple[MessageQueue, int]]:
            def offset() -> tuple[MessageQueue, int]:
                committed = core.offsets.committed(group, topic, queue_id)
                if committed is None:
                    raise SluiceError(f"THe consumer group <{group}> not exist")
                wanted = self._reset_offset(topic, queue_id, when_ms, None)
                if not fields["isForce"]:
                    wanted = min(wanted, committed)
                return self._queue(topic, queue_id), wanted

            return offset

        def body(offsets: list[tuple[MessageQueue, int]]) -> bytes:
            table = dict(offsets)
            members = core.clients.consumers.get(group)
            if members is None:
                raise ConsumerOffline(
                    f"Consumer not online, so can not reset offset, Group: {group} "
                    f"Topic: {topic} Timestamp: {when_ms}"
                )
            log_lines.info("%s tells group %s to go on at %s", connection, group, offsets)
            for queue, offset in offsets:
                core.offsets.rewound(group, topic, queue.queue_id, offset)
            for client in members.connections.values():
                is_cpp = _CPP in (client.language, command.language)
                self._api.calls.tell(
                    client_channel(client),
                    Request.RESET_CONSUMER_CLIENT_OFFSET,
                    {"topic": topic, "group": group, "timestamp": str(when_ms), "isForce": "false"},
                    (remoting_admin.write_reset_list if is_cpp else _offset_table)(table),
                )
            return _offset_table(table)

        asks = [ask(queue_id) for queue_id in range(settings.write_queues)]
        self._ask_each(connection, command, asks, body)

    def _reset_offset(self, topic: str, queue_id: int, when_ms: int, wanted: int | None) -> int:
        """The offset to go on at: the one named, or that of a time; a negative time is the end."""
        store = self._core.store
        high = store.max_offset(topic, queue_id)
        if wanted is None:
            return high if when_ms < 0 else store.offset_for_time(topic, queue_id, when_ms)
        low = store.min_offset(topic, queue_id)
        if not low <= wanted <= high:
            raise SluiceError(f"Target offset {wanted} not in consume queue range [{low}-{high}]")
        return wanted

    def _all_offsets(self, connection: Connection, command: RemotingCommand) -> None:
        version = version_of(self._core.groups.data_version())
        body = remoting_bodies.write_consumer_offsets(self._core.offsets.all(), version)
        self._answer(connection, command, body=body)

    def _delay_offsets(self, connection: Connection, command: RemotingCommand) -> None:
        version = version_of(self._core.groups.data_version())
        table = self._core.store.table(DELAY_TABLE)
        offsets = {int(level): int(offset) for level, offset in table.items()}
        body = remoting_bodies.write_delay_offsets(offsets, version)
        self._answer(connection, command, body=body)


def _offset_table(offsets: dict[MessageQueue, int]) -> bytes:
    return remoting_bodies.write_queue_offsets(offsets)


def _checked(row: dict[str, Any], before: GroupSettings | None) -> GroupSettings:
    """Settings that a group can have after a change; raises what is wrong with them."""
    try:
        check_group(row["groupName"])
    except MessageIllegal as error:
        raise ParameterInvalid(str(error)) from None
    known = None if before is None else before.extra.get("attributes") or {}
    attributes = altered_attributes(known, row["attributes"])
    settings = group_from_json(row["groupName"], row)
    if not 0 <= settings.retry_queues <= QUEUES_MAX:
        raise ParameterInvalid(
            f"group {settings.name}: {settings.retry_queues} retry queues; "
            f"allowed: 0 to {QUEUES_MAX}"
        )
    check_policy(settings)
    # Made by default anyway: a group that differs in nothing else is the same group.
    extra = {name: value for name, value in settings.extra.items() if name != "attributes"}
    if extra.get("groupRetryPolicy") == {"type": "CUSTOMIZED"}:
        del extra["groupRetryPolicy"]
    if attributes:
        extra["attributes"] = attributes
    return replace(settings, extra=extra)
