"""This module translates what RocketMQ's clients ask into calls of services, and back into answers.

One frame is one command; a request has a handler by its code, an answer belongs to something we
asked. Whatever goes wrong becomes the code and the remark that RocketMQ's clients know; a request
that wants no answer gets none. Handlers do not block and do not decide: that is the services' part.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from time import perf_counter_ns
from typing import Any

from sluice.broker import filters, kafka_queries
from sluice.broker.client_calls import ClientCalls
from sluice.broker.core import BrokerCore
from sluice.broker.groups import Client
from sluice.broker.pulling import OffsetReset, Pull, Pulling, ReadResult, ReadStatus
from sluice.broker.quick_sends import QuickSends
from sluice.broker.send_api import SendApi
from sluice.broker.topics import RETRY_PREFIX, UNIT_SUBSCRIPTION
from sluice.errors import (
    GroupMissing,
    MessageIllegal,
    NotFound,
    ParameterInvalid,
    SluiceError,
    TopicMissing,
)
from sluice.net import Connection
from sluice.protocol import remoting
from sluice.protocol import remoting_clients as bodies
from sluice.protocol.framing import Frame
from sluice.protocol.remoting import RemotingCommand
from sluice.protocol.remoting_codes import RequestCode as Request
from sluice.protocol.remoting_codes import ResponseCode as Response
from sluice.protocol.remoting_fast import pull_answer_head, read_pull
from sluice.protocol.remoting_schemas import REQUESTS, ext_of, parse_fields

Handle = Callable[[Connection, RemotingCommand], None]

log_lines = logging.getLogger("sluice.broker")

_PULL_CODES = {
    ReadStatus.FOUND: Response.SUCCESS,
    ReadStatus.NO_MATCHED_MESSAGE: Response.PULL_RETRY_IMMEDIATELY,
    ReadStatus.OFFSET_OVERFLOW_ONE: Response.PULL_NOT_FOUND,
    ReadStatus.NO_MESSAGE_IN_QUEUE: Response.PULL_NOT_FOUND,
    ReadStatus.OFFSET_OVERFLOW_BADLY: Response.PULL_OFFSET_MOVED,
    ReadStatus.OFFSET_TOO_SMALL: Response.PULL_OFFSET_MOVED,
}
_QUERY_BODY_BYTES_MAX = 4 * 1024 * 1024


class RemotingApi:
    """The handler of all connections of a broker."""

    def __init__(self, core: BrokerCore) -> None:
        self._core = core
        self._sends = SendApi(core, self)
        self._quick = QuickSends(core, self, self._sends.sending)
        self._pulling = Pulling(core)
        self.connections: set[Connection] = set()
        self.calls = ClientCalls()
        # Calls back when the nameservers know the topics as they are now.
        self.when_registered: Callable[[Callable[[], None]], None] = lambda done: done()
        self.handlers: dict[int, Handle] = {
            Request.SEND_MESSAGE: self._sends.send,
            Request.SEND_MESSAGE_V2: self._sends.send,
            Request.SEND_BATCH_MESSAGE: self._sends.send_batch,
            Request.PULL_MESSAGE: self._pull,
            Request.LITE_PULL_MESSAGE: self._pull,
            Request.QUERY_CONSUMER_OFFSET: self._query_offset,
            Request.UPDATE_CONSUMER_OFFSET: self._commit_offset,
            Request.HEART_BEAT: self._heartbeat,
            Request.UNREGISTER_CLIENT: self._unregister,
            Request.CHECK_CLIENT_CONFIG: self._check_client,
            Request.GET_CONSUMER_LIST_BY_GROUP: self._consumer_list,
            Request.LOCK_BATCH_MQ: self._lock,
            Request.UNLOCK_BATCH_MQ: self._unlock,
            Request.GET_MAX_OFFSET: self._max_offset,
            Request.GET_MIN_OFFSET: self._min_offset,
            Request.GET_EARLIEST_MSG_STORETIME: self._earliest_time,
            Request.SEARCH_OFFSET_BY_TIMESTAMP: self._search_offset,
            Request.VIEW_MESSAGE_BY_ID: self._view_message,
            Request.QUERY_MESSAGE: self._query_message,
        }

    # ---------------------------------------------------------------------------------- connections

    def opened(self, connection: Connection) -> None:
        self.connections.add(connection)

    def closed(self, connection: Connection) -> None:
        self.connections.discard(connection)
        self._core.polls.drop(connection)
        self.calls.closed(connection)
        for group in self._core.clients.closed(connection):
            self.tell_members(group)

    def received(self, connection: Connection, frames: list[Frame]) -> None:
        quick = self._quick.serve
        self._core.serve(connection)
        try:
            for frame in frames:
                if not quick(connection, frame):
                    self.serve(connection, remoting.decode(frame))
        finally:
            self._quick.end_group(connection)
            self._core.served()

    def serve(self, connection: Connection, command: RemotingCommand) -> None:
        """Do what a command asks for, or answer why not."""
        if command.is_answer:
            self.calls.answered(connection, command)
            return
        handle = self.handlers.get(command.code)
        if handle is None:
            self._not_served(connection, command)
            return
        try:
            handle(connection, command)
        except Exception as error:
            self.failed(connection, command, error)

    def _not_served(self, connection: Connection, command: RemotingCommand) -> None:
        code = command.code
        connection.log_share.line(
            log_lines, logging.INFO, "%s: request code %d is not served", connection, code
        )
        remark = f" request type {code} not supported"
        self.answer(connection, command, Response.REQUEST_CODE_NOT_SUPPORTED, remark=remark)

    def guard(
        self, connection: Connection, command: RemotingCommand, work: Callable[[], None]
    ) -> None:
        """Do a part of a request; what goes wrong becomes its answer."""
        try:
            work()
        except Exception as error:
            self.failed(connection, command, error)

    # -------------------------------------------------------------------------------------- answers

    def answer(
        self,
        connection: Connection,
        request: RemotingCommand,
        code: int = Response.SUCCESS,
        ext: dict[str, str] | None = None,
        remark: str | None = None,
        body: Frame = b"",
    ) -> None:
        if not request.is_oneway:
            connection.send(remoting.answer(request, code, ext, remark, body))

    def refuse(self, connection: Connection, request: RemotingCommand, error: SluiceError) -> None:
        """Say what went wrong, in the words that clients know; once in the log, with the peer."""
        self._core.stats.refused[error.rocketmq_code] += 1
        connection.log_share.line(
            log_lines,
            logging.INFO,
            "%s: request %d refused: %s",
            *(connection, request.code, error),
        )
        self.answer(connection, request, error.rocketmq_code, {}, str(error))

    def failed(self, connection: Connection, request: RemotingCommand, error: Exception) -> None:
        """What a handler raised becomes the answer."""
        if isinstance(error, SluiceError):
            self.refuse(connection, request, error)
            return
        log_lines.error("%s: request %d failed", connection, request.code, exc_info=error)
        self.answer(
            connection,
            request,
            Response.SYSTEM_ERROR,
            remark=f"{type(error).__name__}: the request failed inside the broker",
        )

    def tell_members(self, group: str) -> None:
        """The members of a group are to divide its queues anew."""
        settings = self._core.groups.get(group)
        members = self._core.clients.consumers.get(group)
        if members is None or (settings is not None and not settings.notify_changes):
            return
        if members.message_model == "BROADCASTING":
            return
        for client in members.connections.values():
            assert isinstance(client.channel, Connection)
            self.calls.tell(
                client.channel, Request.NOTIFY_CONSUMER_IDS_CHANGED, {"consumerGroup": group}
            )

    # -------------------------------------------------------------------------------------- pulling

    def _pull(self, connection: Connection, command: RemotingCommand) -> None:
        start_ns, stats = perf_counter_ns(), self._core.stats
        request = read_pull(command)
        pull = Pull(
            request.consumer_group,
            request.topic,
            request.queue_id,
            request.queue_offset,
            request.message_count_max,
            request.sys_flag,
            request.commit_offset,
            request.suspend_ms,
            request.subscription,
            request.expression_type,
            request.sub_version,
        )

        def pulled(result: ReadResult | OffsetReset | None, error: SluiceError | None) -> None:
            (stats.held_times if pull.held else stats.pull_times).since(start_ns)
            if result is None:
                assert error is not None
                self.refuse(connection, command, error)
            elif command.is_oneway:
                return
            elif isinstance(result, OffsetReset):
                moved = Response.PULL_OFFSET_MOVED
                connection.send(pull_answer_head(command, moved, "OFFSET_RESET", *result, 0))
            else:
                head = pull_answer_head(
                    command,
                    _PULL_CODES[result.status],
                    result.status.value,
                    result.next_offset,
                    result.min_offset,
                    result.max_offset,
                    result.byte_count,
                )
                connection.send(head, *result.slices)

        self._pulling.pull(pull, connection, pulled)

    # -------------------------------------------------------------------------------------- offsets

    def _query_offset(self, connection: Connection, command: RemotingCommand) -> None:
        fields = parse_fields(REQUESTS[command.code], command.ext)
        group, topic, queue_id = fields["consumerGroup"], fields["topic"], fields["queueId"]
        store = self._core.store
        offset = self._core.offsets.committed(group, topic, queue_id)
        if offset is None:
            if fields["setZeroIfNotFound"] is False:
                raise NotFound("Not found, do not set to zero, maybe this group boot first")
            # A young topic is read from its first message, whatever the consumer's setting: nothing
            # was lost of it yet. Otherwise the consumer decides where it begins.
            low, high = store.min_offset(topic, queue_id), store.max_offset(topic, queue_id)
            offset = store.memory.base(topic, queue_id)
            if not offset == low < high:
                raise NotFound("Not found, V3_0_6_SNAPSHOT maybe this group consumer boot first")
        self.answer(connection, command, ext={"offset": str(offset)})

    def _commit_offset(self, connection: Connection, command: RemotingCommand) -> None:
        fields = parse_fields(REQUESTS[command.code], command.ext)
        group, topic, queue_id = fields["consumerGroup"], fields["topic"], fields["queueId"]
        core = self._core
        if core.groups.get(group) is None:
            raise GroupMissing(f"Group {group} not exist!")
        settings = core.topics.get(topic)
        if settings is None:
            raise TopicMissing(f"Topic {topic} not exist!")
        if not 0 <= queue_id < max(settings.read_queues, settings.write_queues):
            raise ParameterInvalid(
                f"queueId[{queue_id}] is illegal, topic:[{topic}] "
                f"topicConfig.readQueueNums:[{settings.read_queues}]"
            )
        if fields["commitOffset"] < 0:
            raise ParameterInvalid(f"an offset of {fields['commitOffset']} cannot be committed")
        taken = core.offsets.commit(group, topic, queue_id, fields["commitOffset"])
        remark = None if taken else "Offset has been previously reset"
        self.answer(connection, command, remark=remark)

    def _max_offset(self, connection: Connection, command: RemotingCommand) -> None:
        fields = parse_fields(REQUESTS[command.code], command.ext)
        store = self._core.store
        self._later(
            connection,
            command,
            lambda: store.max_offset(fields["topic"], fields["queueId"]),
            lambda offset: {"offset": str(offset)},
        )

    def _min_offset(self, connection: Connection, command: RemotingCommand) -> None:
        fields = parse_fields(REQUESTS[command.code], command.ext)
        offset = self._core.store.min_offset(fields["topic"], fields["queueId"])
        self.answer(connection, command, ext={"offset": str(offset)})

    def _earliest_time(self, connection: Connection, command: RemotingCommand) -> None:
        fields = parse_fields(REQUESTS[command.code], command.ext)
        store = self._core.store
        self._later(
            connection,
            command,
            lambda: store.earliest_ms(fields["topic"], fields["queueId"]),
            lambda when_ms: {"timestamp": str(when_ms)},
        )

    def _search_offset(self, connection: Connection, command: RemotingCommand) -> None:
        fields = parse_fields(REQUESTS[command.code], command.ext)
        store = self._core.store
        upper = fields["boundaryType"] == "UPPER"
        self._later(
            connection,
            command,
            lambda: store.offset_for_time(
                fields["topic"], fields["queueId"], fields["timestamp"], upper=upper
            ),
            lambda offset: {"offset": str(offset)},
        )

    def _later(
        self,
        connection: Connection,
        command: RemotingCommand,
        ask: Callable[[], Any],
        to_ext: Callable[[Any], dict[str, str]],
    ) -> None:
        """Answer with what the store says, which may have to come from the disk first."""

        def done(result: Any, error: BaseException | None) -> None:
            if error is not None:
                self.refuse(connection, command, SluiceError(str(error)))
            else:
                self.answer(connection, command, ext=to_ext(result))

        self._core.store.call(ask, done)

    # -------------------------------------------------------------------------------------- queries

    def _view_message(self, connection: Connection, command: RemotingCommand) -> None:
        position = parse_fields(REQUESTS[command.code], command.ext)["offset"]

        def done(entry: memoryview | None, error: BaseException | None) -> None:
            if entry is None:
                remark = str(error) if error else f"can not find message by the offset, {position}"
                self.answer(connection, command, Response.SYSTEM_ERROR, {}, remark)
            else:
                self.answer(connection, command, body=entry)

        self._core.store.call(lambda: self._core.store.entry_at(position), done)

    def _query_message(self, connection: Connection, command: RemotingCommand) -> None:
        fields = parse_fields(REQUESTS[command.code], command.ext)
        core = self._core
        count_max = min(max(1, fields["maxNum"]), core.config.query_count_max)

        def done(entries: list[memoryview] | None, error: BaseException | None) -> None:
            if error is not None:
                self.refuse(connection, command, SluiceError(str(error)))
                return
            chosen: list[memoryview] = []
            byte_count = 0
            for entry in kafka_queries.with_key(core, entries or [], fields["key"]):
                byte_count += len(entry)
                if chosen and byte_count > _QUERY_BODY_BYTES_MAX:
                    break
                chosen.append(entry)
            chosen.reverse()  # the newest are chosen, and told in the order they were stored in
            ext = ext_of(
                {
                    "indexLastUpdateTimestamp": core.store.last_ms,
                    "indexLastUpdatePhyoffset": core.store.log.written,
                }
            )
            if chosen:
                self.answer(connection, command, ext=ext, body=b"".join(chosen))
            else:
                self.answer(
                    connection,
                    command,
                    Response.QUERY_NOT_FOUND,
                    ext,
                    "can not find message, maybe time range not correct",
                )

        # The index holds tags beside keys, told apart as RocketMQ does it.
        key = f"T#{fields['key']}" if fields["indexType"] == "T" else fields["key"]
        if kafka_queries.by_id(core, fields["topic"], key, done):
            return
        core.store.query_key(
            fields["topic"],
            key,
            done,
            count_max=count_max,
            begin_ms=max(0, fields["beginTimestamp"]),
            end_ms=fields["endTimestamp"],
        )

    # -------------------------------------------------------------------------------------- clients

    def _heartbeat(self, connection: Connection, command: RemotingCommand) -> None:
        heartbeat = bodies.read_heartbeat(command.body)
        client = Client(
            heartbeat.client_id,
            connection,
            command.language,
            command.version,
            self._core.now_ms(),
        )
        clients, keep = self._core.clients, heartbeat.without_subscriptions
        for group in heartbeat.producer_groups:
            said = partial(clients.producer_said, group, client)
            self._take_group(connection, group, said)
        for consumer in heartbeat.consumers:
            said = partial(self._consumer_said, client, consumer, keep=keep)
            self._take_group(connection, consumer.group, said)
        self.answer(
            connection,
            command,
            ext={"IS_SUPPORT_HEART_BEAT_V2": "true", "IS_SUB_CHANGE": "true"},
        )

    def _take_group(self, connection: Connection, group: str, said: Callable[[], None]) -> None:
        """Take what a heartbeat says of one group; the others are not to blame for a bad one."""
        try:
            said()
        except (GroupMissing, MessageIllegal) as error:
            connection.log_share.line(
                log_lines,
                logging.INFO,
                "%s: group %s of a heartbeat is left out: %s",
                *(connection, group, error),
            )

    def _consumer_said(self, client: Client, consumer: bodies.ConsumerData, *, keep: bool) -> None:
        core = self._core
        group = consumer.group
        settings = core.groups.require(group)
        flag = UNIT_SUBSCRIPTION if consumer.unit_mode else 0
        core.topics.create_inner(f"{RETRY_PREFIX}{group}", settings.retry_queues, sys_flag=flag)
        core.ask_turn()
        subscriptions = [_subscription(one) for one in consumer.subscriptions]
        known = core.clients.consumers.get(group)
        if keep and known is not None:
            # A short heartbeat says nothing of subscriptions: they are as they were.
            who = (client.client_id, client.channel)
            subscriptions = list(known.wanted.get(who, known.subscriptions).values())
        self._tell_faults(client, group, subscriptions)
        changed, disagreements = core.clients.consumer_said(
            group,
            client,
            consume_type=consumer.consume_type,
            message_model=consumer.message_model,
            from_where=consumer.consume_from_where,
            subscriptions=subscriptions,
        )
        for line in disagreements:
            log_lines.error(
                "consumers of group %s subscribe differently, so messages will be missed: %s",
                group,
                line,
            )
        if changed:
            self.tell_members(group)

    def _tell_faults(
        self, client: Client, group: str, subscriptions: list[filters.Subscription]
    ) -> None:
        """Log what is wrong with subscriptions that were not heard before."""
        for wanted in subscriptions:
            known = self._core.clients.subscription(group, wanted.topic)
            if (wanted.fault or wanted.warning) and (known is None or not known.same_as(wanted)):
                assert isinstance(client.channel, Connection)
                client.channel.log_share.line(
                    log_lines,
                    logging.WARNING,
                    "consumer %s of group %s, subscription to %s: %s",
                    *(client.client_id, group, wanted.topic, wanted.fault or wanted.warning),
                )

    def _unregister(self, connection: Connection, command: RemotingCommand) -> None:
        fields = parse_fields(REQUESTS[command.code], command.ext)
        groups = (fields["producerGroup"] or "", fields["consumerGroup"] or "")
        changed = self._core.clients.leave(fields["clientID"], connection, *groups)
        self.answer(connection, command)
        for group in changed:
            self.tell_members(group)

    def _check_client(self, connection: Connection, command: RemotingCommand) -> None:
        wanted = _subscription(bodies.read_client_check(command.body).subscription)
        filters.check_usable(wanted, sql_filter=self._core.config.sql_filter)
        self.answer(connection, command)

    def _consumer_list(self, connection: Connection, command: RemotingCommand) -> None:
        group = parse_fields(REQUESTS[command.code], command.ext)["consumerGroup"]
        members = self._core.clients.consumers.get(group)
        if members is None:
            raise SluiceError(f"no consumer for this group, {group}")
        self.answer(connection, command, body=bodies.write_consumer_ids(members.members))

    def _lock(self, connection: Connection, command: RemotingCommand) -> None:
        request = bodies.read_lock_request(command.body)
        names = [(queue.topic, queue.queue_id) for queue in request.queues]

        def done(owned: list[tuple[str, int]], error: SluiceError | None) -> None:
            if error is not None:
                self.refuse(connection, command, error)
                return
            locked = [q for q in request.queues if (q.topic, q.queue_id) in owned]
            self.answer(connection, command, body=bodies.write_locked_queues(locked))

        self._core.ordering.lock(request.group, (request.client_id, connection), names, done)

    def _unlock(self, connection: Connection, command: RemotingCommand) -> None:
        request = bodies.read_lock_request(command.body)
        names = [(queue.topic, queue.queue_id) for queue in request.queues]

        def done(error: SluiceError | None) -> None:
            if error is not None:
                self.refuse(connection, command, error)
            else:
                self.answer(connection, command)

        self._core.ordering.unlock(request.group, (request.client_id, connection), names, done)


def _subscription(said: bodies.Subscription) -> filters.Subscription:
    """A subscription as a heartbeat tells it."""
    return filters.parse_or_keep(said.topic, said.expression, said.expression_type, said.version)
