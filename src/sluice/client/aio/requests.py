"""This module is the producer that users have: a sender that can also ask through messages.

A request is a message with a number; whoever consumes it sends a reply with the same number, and
the broker hands that to the requester's connection. `ask` waits for it. A consumer answers with
`reply`.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Iterable
from functools import partial
from typing import Any, Final

from sluice.client.aio.observed_sends import (
    GuardedObserver,
    ObservedBatcher,
    Watch,
    send_oneway_watched,
    send_watched,
)
from sluice.client.aio.producer import Sender
from sluice.client.core.messages import Message, ReceivedMessage, Reply, SendResult, unpacked
from sluice.client.core.selectors import Selector
from sluice.client.core.sends import batch_of
from sluice.errors import MessageInvalid, NoReply, ProtocolError
from sluice.link import RemotingLink
from sluice.protocol import records
from sluice.protocol.client_frames import SEND_REPLY
from sluice.protocol.json_members import MessageQueue
from sluice.protocol.remoting import RemotingCommand
from sluice.protocol.remoting_codes import RequestCode as Request
from sluice.protocol.remoting_codes import ResponseCode as Response

log_lines = logging.getLogger("sluice.client")

_TIMEOUT_SECONDS: Final = 3.0


class Producer(Sender):
    """Sends messages. Use it as `async with Producer("host:9876", group="orders") as producer`.

    Every setting of `ProducerSettings` can be given by name. `observers` see every send (hooks).
    """

    _watch: Watch | None = None

    async def start(self) -> None:
        """Find the nameservers. Routes and connections come with the first messages."""
        await super().start()
        if self._observers:
            self._observers = [GuardedObserver(observer) for observer in self._observers]
            self._watch = Watch(self._observers, self._keys)
            if self._batcher is not None:
                parts = (self.settings, self._send_batch, self._loop)
                self._batcher = ObservedBatcher(self._watch, *parts)
        self._waiting: dict[str, asyncio.Future[Reply]] = {}
        self.session.requests[Request.PUSH_REPLY_MESSAGE_TO_CLIENT] = self._replied

    async def send_batch(
        self,
        messages: Iterable[Message],
        *,
        queue: MessageQueue | None = None,
        timeout_ms: int = 0,
    ) -> list[SendResult]:
        """Send messages of one topic in one request; all of them are stored, or none."""
        send = partial(super().send_batch, queue=queue, timeout_ms=timeout_ms)
        if self._watch is None:
            return await send(messages)
        return await send_watched(self._watch, batch_of(messages), send)

    async def send_oneway(
        self,
        message: Message,
        *,
        queue: MessageQueue | None = None,
        selector: Selector | None = None,
        argument: Any = None,
        mark: bytes = b"",
    ) -> None:
        """Send without an answer: nobody learns whether it is stored. `mark`: the id it gets."""
        send = partial(super().send_oneway, queue=queue, selector=selector, argument=argument)
        if self._watch is None or mark or type(message) is not Message:
            await send(message, mark=mark)
        else:
            await send_oneway_watched(self._watch, message, send)

    async def ask(self, message: Message, *, timeout_seconds: float = _TIMEOUT_SECONDS) -> Reply:
        """Send a request and wait for its reply; raises NoReply."""
        self.session.check_open()
        if type(message) is not Message:
            raise MessageInvalid(f"ask takes a Message, not {type(message).__name__}")
        number = uuid.uuid4().hex
        request = message.with_extra(
            CORRELATION_ID=number,
            REPLY_TO_CLIENT=self.client_id,
            TTL=str(int(timeout_seconds * 1000)),
        )
        reply: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        self._waiting[number] = reply
        try:
            async with asyncio.timeout(timeout_seconds):
                # The reply comes over a connection that the broker knows as this producer's.
                await self.publishing(message.topic)
                await self.session.greet_new()
                await self.send(request)
                return await reply
        except TimeoutError:
            raise NoReply(
                f"no reply to a request on {message.topic} within {timeout_seconds:g} s; does a "
                "consumer of it reply?"
            ) from None
        finally:
            self._waiting.pop(number, None)

    def _replied(self, link: RemotingLink, command: RemotingCommand) -> None:
        properties = records.parse_properties(command.ext.get("properties", "").encode())
        waiting = self._waiting.get(properties.get("CORRELATION_ID", ""))
        if waiting is None or waiting.done():
            log_lines.info("a reply comes too late: %s", properties.get("CORRELATION_ID"))
        else:
            try:
                # Java's clients pack replies from 4 KiB on, and brokers hand them on as they are.
                sys_flag = int(command.ext.get("sysFlag") or 0)
                waiting.set_result(Reply(unpacked(bytes(command.body), sys_flag), properties))
            except (ProtocolError, ValueError) as error:
                failure = ProtocolError(f"a reply came that cannot be read: {error}")
                waiting.set_exception(failure)
        link.answer(command, Response.SUCCESS)

    async def reply(self, request: ReceivedMessage, body: bytes | str) -> SendResult:
        """Answer a request that a consumer got."""
        properties = request.properties
        names = ("CORRELATION_ID", "REPLY_TO_CLIENT", "TTL")
        try:
            extra = {name: properties[name] for name in names}
            topic = f"{properties['CLUSTER']}_REPLY_TOPIC"
        except KeyError as missing:
            raise MessageInvalid(f"{request} is no request: it has no {missing}") from None
        answer = Message(topic, body).with_extra(MSG_TYPE="reply", **extra)
        queue = MessageQueue(topic, request.broker_name, 0)
        return await self.send_as(answer, SEND_REPLY, queue)
