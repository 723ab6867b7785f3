"""This module translates replies: from consumers to the broker, from the broker to who asked.

The reply is pushed to the requester first. Whoever sent it hears when the requester has it and the
reply is stored, or why the requester does not have it: then it is stored all the same.
"""

from __future__ import annotations

from typing import Final

from sluice.broker.admin_base import AdminPart, client_channel
from sluice.broker.core import BrokerCore
from sluice.broker.remoting_api import Handle, RemotingApi
from sluice.broker.sending import REGION, Sending
from sluice.errors import SluiceError
from sluice.model import Message, message_id
from sluice.net import Connection
from sluice.protocol import records
from sluice.protocol.message_batches import address_text
from sluice.protocol.remoting import RemotingCommand
from sluice.protocol.remoting_codes import RequestCode as Request
from sluice.protocol.remoting_codes import ResponseCode as Response
from sluice.protocol.remoting_fast import SendRequest, read_send
from sluice.protocol.remoting_schemas import ext_of

PUSH_SECONDS: Final = 10.0  # as RocketMQ: how long a requester may take to say that it has a reply


class ReplyApi(AdminPart):
    """Replies of all connections of one broker."""

    def __init__(self, api: RemotingApi, core: BrokerCore) -> None:
        super().__init__(api, core)
        self._sending = Sending(core)
        self._store_host = core.store.encoder.store_host

    def handlers(self) -> dict[int, Handle]:
        return {
            Request.SEND_REPLY_MESSAGE: self._reply,
            Request.SEND_REPLY_MESSAGE_V2: self._reply,
        }

    def _reply(self, connection: Connection, command: RemotingCommand) -> None:
        request = read_send(command)
        sending, replies = self._sending, self._core.replies
        settings = sending.topic_for(
            request.topic, request.default_topic, request.default_queue_count
        )
        queue_id = sending.queue_for(settings, request.queue_id)
        properties = request.properties.encode()
        replies.check(request.sys_flag, properties)
        message = Message(
            request.topic,
            queue_id,
            command.body,
            properties,
            request.flag,
            request.sys_flag,
            request.born_ms,
            connection.packed_peer(),
            request.reconsume_times,
        )

        def pushed(problem: str) -> None:
            replies.told(delivered=not problem)
            self._api.guard(
                connection, command, lambda: self._store(connection, command, message, problem)
            )

        try:
            client = replies.requester(properties)
        except SluiceError as error:
            pushed(str(error))
            return

        def answered(answer: RemotingCommand | None) -> None:
            is_there = answer is not None and answer.code == Response.SUCCESS
            pushed("" if is_there else f"push reply message to {client.client_id} fail.")

        self._api.calls.ask(
            client_channel(client),
            Request.PUSH_REPLY_MESSAGE_TO_CLIENT,
            self._push_fields(connection, request, properties),
            command.body,
            PUSH_SECONDS,
            answered,
        )

    def _push_fields(
        self, connection: Connection, request: SendRequest, properties: bytes
    ) -> dict[str, str]:
        return ext_of(
            {
                "producerGroup": request.producer_group,
                "topic": request.topic,
                "defaultTopic": request.default_topic,
                "defaultTopicQueueNums": request.default_queue_count,
                "queueId": request.queue_id,
                "sysFlag": request.sys_flag,
                "bornTimestamp": request.born_ms,
                "flag": request.flag,
                "properties": self._core.replies.pushed_form(properties).decode(),
                "reconsumeTimes": request.reconsume_times,
                "unitMode": request.unit_mode,
                "bornHost": address_text(connection.packed_peer()),
                "storeHost": address_text(self._store_host),
                "storeTimestamp": self._core.now_ms(),
            }
        )

    def _store(
        self, connection: Connection, command: RemotingCommand, message: Message, problem: str
    ) -> None:
        def stored(error: SluiceError | None) -> None:
            if error is not None:
                self._api.refuse(connection, command, error)
                return
            ext = {
                "msgId": message_id(self._store_host, placed.position),
                "queueId": str(message.queue_id),
                "queueOffset": str(placed.queue_offset),
                "MSG_REGION": REGION,
                "TRACE_ON": "true",
            }
            code = Response.SYSTEM_ERROR if problem else Response.SUCCESS
            self._answer(connection, command, code, ext, problem or None)
            if self._core.polls.is_awaited:
                tag = keys[2]
                code_of_tag = records.java_hash(tag) if tag else 0
                self._core.polls.arrived((message.topic, message.queue_id), code_of_tag)

        keys = records.message_keys(message.properties)
        placed = self._sending.send(message, keys, stored)
