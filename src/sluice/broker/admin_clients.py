"""This module translates what administrators ask about connected clients, and asks these clients.

Some questions only a running consumer can answer: they are passed on over its connection, and its
answer is passed back as it is.
"""

from __future__ import annotations

import re
from functools import partial
from typing import Final

from sluice.broker.admin_base import (
    AdminPart,
    as_error,
    client_channel,
    log_lines,
    wire_subscription,
)
from sluice.broker.groups import Client
from sluice.broker.remoting_api import Handle
from sluice.errors import Busy, ConsumerOffline, RequestInvalid, SluiceError
from sluice.net import Connection
from sluice.protocol import remoting_admin, remoting_bodies
from sluice.protocol import remoting_clients as bodies
from sluice.protocol.framing import Frame
from sluice.protocol.json_members import MessageQueue
from sluice.protocol.remoting import RemotingCommand
from sluice.protocol.remoting_codes import RequestCode as Request
from sluice.protocol.remoting_codes import ResponseCode as Response

CALL_SECONDS: Final = 10.0
STATUS_SECONDS: Final = 5.0
# Address and port of a store, then a position in its log: IPv4 or IPv6, in hex.
_MESSAGE_ID: Final = re.compile(r"(?:[0-9a-fA-F]{16}|[0-9a-fA-F]{40})([0-9a-fA-F]{16})")


class AdminClients(AdminPart):
    """Connected clients of one broker, for administrators."""

    def handlers(self) -> dict[int, Handle]:
        return {
            Request.GET_CONSUMER_CONNECTION_LIST: self._consumers,
            Request.GET_PRODUCER_CONNECTION_LIST: self._producers,
            Request.GET_ALL_PRODUCER_INFO: self._all_producers,
            Request.QUERY_SUBSCRIPTION_BY_CONSUMER: self._subscription,
            Request.GET_CONSUMER_RUNNING_INFO: self._running_info,
            Request.CONSUME_MESSAGE_DIRECTLY: self._consume_directly,
            Request.INVOKE_BROKER_TO_GET_CONSUMER_STATUS: self._status,
        }

    # --------------------------------------------------------------------------------- connections

    def _consumers(self, connection: Connection, command: RemotingCommand) -> None:
        group = self._fields(command)["consumerGroup"]
        members = self._core.clients.consumers.get(group)
        if members is None:
            raise ConsumerOffline(f"the consumer group[{group}] not online")
        wanted = members.subscriptions.items()
        body = bodies.write_consumer_connection(
            bodies.ConsumerConnection(
                tuple(_connection_info(client) for client in members.connections.values()),
                members.consume_type,
                members.message_model,
                members.from_where,
                {topic: wire_subscription(one) for topic, one in wanted},
                tuple(self._core.clients.disagreements().get(group, ())),
            )
        )
        self._answer(connection, command, body=body)

    def _producers(self, connection: Connection, command: RemotingCommand) -> None:
        group = self._fields(command)["producerGroup"]
        members = self._core.clients.producers.get(group)
        if members is None:
            raise SluiceError(f"the producer group[{group}] not exist")
        infos = [_connection_info(client) for client in members.values()]
        self._answer(connection, command, body=bodies.write_producer_connection(infos))

    def _all_producers(self, connection: Connection, command: RemotingCommand) -> None:
        producers = self._core.clients.producers
        groups = {
            group: [_connection_info(client) for client in members.values()]
            for group, members in producers.items()
        }
        seen_ms = {
            client.client_id: client.heard_ms
            for members in producers.values()
            for client in members.values()
        }
        self._answer(connection, command, body=bodies.write_producer_table(groups, seen_ms))

    def _subscription(self, connection: Connection, command: RemotingCommand) -> None:
        fields = self._fields(command)
        group, topic = fields["group"], fields["topic"] or ""
        wanted = self._core.clients.subscription(group, topic)
        body = remoting_admin.write_subscription_of(
            group, topic, None if wanted is None else wire_subscription(wanted)
        )
        self._answer(connection, command, body=body)

    # ----------------------------------------------------------------------------- asking consumers

    def _running_info(self, connection: Connection, command: RemotingCommand) -> None:
        fields = self._fields(command)
        self._pass_on(
            connection, command, fields["consumerGroup"], fields["clientId"], command.ext, b""
        )

    def _consume_directly(self, connection: Connection, command: RemotingCommand) -> None:
        core = self._core
        fields = self._fields(command)
        group, client_id = fields["consumerGroup"], fields["clientId"] or ""
        match = _MESSAGE_ID.fullmatch(fields["msgId"] or "")
        if match is None:
            raise RequestInvalid("the custom field <msgId> is no message id")
        position = int(match[1], 16)
        ext = {**command.ext, "brokerName": core.config.broker_name}
        topic = core.topics.get(fields["topic"] or "")
        if topic is not None:
            ext["topicSysFlag"] = str(topic.sys_flag)
        settings = core.groups.get(group)
        if settings is not None:
            ext["groupSysFlag"] = str(settings.sys_flag)

        def found(entry: memoryview | None, error: BaseException | None) -> None:
            if entry is None:
                missing = SluiceError(f"can not find message by the offset, {position}")
                self._api.refuse(connection, command, as_error(error) if error else missing)
            else:
                self._api.guard(
                    connection,
                    command,
                    partial(
                        self._pass_on, connection, command, group, client_id, ext, bytes(entry)
                    ),
                )

        core.store.call(lambda: core.store.entry_at(position), found)

    def _pass_on(
        self,
        connection: Connection,
        command: RemotingCommand,
        group: str,
        client_id: str,
        ext: dict[str, str],
        body: Frame,
    ) -> None:
        """Ask one consumer the same, and answer what it answers."""
        members = self._core.clients.consumers.get(group)
        client = None if members is None else members.members.get(client_id)
        if client is None:
            raise SluiceError(f"The Consumer <{group}> <{client_id}> not online")
        channel = client_channel(client)

        def answered(answer: RemotingCommand | None) -> None:
            if answer is not None:
                self._answer(
                    connection, command, answer.code, answer.ext, answer.remark, answer.body
                )
            elif channel.is_open:
                remark = (
                    f"consumer <{group}> <{client_id}> Timeout: no answer in {CALL_SECONDS:g} s"
                )
                self._answer(connection, command, Response.CONSUME_MSG_TIMEOUT, {}, remark)
            else:
                remark = f"invoke consumer <{group}> <{client_id}> Exception: its connection closed"
                self._answer(connection, command, Response.SYSTEM_ERROR, {}, remark)

        self._api.calls.ask(channel, command.code, ext, body, CALL_SECONDS, answered)

    def _status(self, connection: Connection, command: RemotingCommand) -> None:
        """Ask all consumers of a group, or one, for the offsets that they hold."""
        fields = self._fields(command)
        group, topic, only = fields["group"], fields["topic"], fields["clientAddr"] or ""
        members = self._core.clients.consumers.get(group)
        if members is None:
            raise SluiceError(f"No Any Consumer online in the consumer group: [{group}]")
        clients = [c for c in members.connections.values() if not only or c.client_id == only]
        tables: dict[str, dict[MessageQueue, int]] = {}
        open_count = len(clients)

        def answered(client_id: str, answer: RemotingCommand | None) -> None:
            nonlocal open_count
            open_count -= 1
            if answer is not None and answer.code == Response.SUCCESS and answer.body:
                try:
                    table = remoting_bodies.read_queue_offsets(answer.body, "messageQueueTable")
                    tables[client_id] = table
                except RequestInvalid as error:
                    log_lines.warning("client %s answers nonsense: %s", client_id, error)
            if open_count == 0:
                body = remoting_admin.write_consumer_status(tables)
                self._answer(connection, command, body=body)

        if not clients:
            self._answer(connection, command, body=remoting_admin.write_consumer_status({}))
        code = Request.GET_CONSUMER_STATUS_FROM_CLIENT
        ext = {"topic": topic, "group": group}
        for client in clients:
            then = partial(answered, client.client_id)
            try:
                self._api.calls.ask(client_channel(client), code, ext, b"", STATUS_SECONDS, then)
            except Busy as error:
                log_lines.warning("client %s is not asked: %s", client.client_id, error)
                then(None)


def _connection_info(client: Client) -> bodies.ConnectionInfo:
    return bodies.ConnectionInfo(
        client.client_id, str(client_channel(client)), client.language, client.version
    )
