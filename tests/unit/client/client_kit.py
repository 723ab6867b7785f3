"""This module plays nameserver and brokers for a client: they answer what a test tells them to.

It also has what tests of consumers share.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from sluice.aio import Producer
from sluice.client.core.messages import Message, ReceivedMessage
from sluice.net import Connection, Limits, Listener
from sluice.protocol import remoting
from sluice.protocol.framing import Frame
from sluice.protocol.remoting import RemotingCommand
from sluice.protocol.remoting_bodies import BrokerData, QueueData, Route, write_route
from sluice.protocol.remoting_codes import RequestCode as Request
from tests.unit.client.admin_kit import Site

# Code, fields, remark; None: no answer at all.
Answer = tuple[int, dict[str, str], str | None] | None
Answering = Callable[[RemotingCommand], Answer]

SENT = {"msgId": "7F00000100002A9F0000000000000001", "queueId": "0", "queueOffset": "5"}
SENDS = (Request.SEND_MESSAGE_V2, Request.SEND_BATCH_MESSAGE)


def stored(command: RemotingCommand) -> Answer:
    return 0, SENT, None


class FakeServer:
    """One address: answers, and remembers what it was asked."""

    def __init__(self, answer: Answering) -> None:
        self.answer = answer
        self.asked: list[RemotingCommand] = []
        self.listener = Listener(self, Limits())
        self.cut_next = False  # close the connection instead of an answer to a send

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.listener.address[1]}"

    def count(self, *codes: int) -> int:
        return sum(command.code in codes for command in self.asked)

    def opened(self, connection: Connection) -> None:
        pass

    def closed(self, connection: Connection) -> None:
        pass

    def received(self, connection: Connection, frames: list[Frame]) -> None:
        for frame in frames:
            command = remoting.decode(frame)
            self.asked.append(command)
            if self.cut_next and command.code in SENDS:
                connection.abort("as the test wants it")
                return
            answer = self.answer(command) if command.code in SENDS else (0, {}, None)
            if answer is not None and not command.is_oneway:
                code, ext, remark = answer
                connection.send(remoting.answer(command, code, ext, remark))


class FakeCluster:
    """A nameserver that knows one topic, on brokers that answer sends as they are told."""

    def __init__(self, **brokers: Answering) -> None:
        self.brokers = {name: FakeServer(answer) for name, answer in brokers.items()}
        self.topic = "orders"
        self._nameserver = Listener(self, Limits())
        self.perm = 6

    @property
    def nameserver(self) -> str:
        return f"127.0.0.1:{self._nameserver.address[1]}"

    def opened(self, connection: Connection) -> None:
        pass

    def closed(self, connection: Connection) -> None:
        pass

    def received(self, connection: Connection, frames: list[Frame]) -> None:
        for frame in frames:
            command = remoting.decode(frame)
            if command.ext.get("topic") != self.topic:
                connection.send(remoting.answer(command, 17, {}, "no such topic"))
                continue
            route = Route(
                tuple(
                    BrokerData("C", name, {0: server.address})
                    for name, server in self.brokers.items()
                ),
                tuple(QueueData(name, 2, 2, self.perm) for name in self.brokers),
            )
            connection.send(remoting.answer(command, 0, {}, None, write_route(route, quoted=True)))

    async def start(self) -> None:
        await self._nameserver.start("127.0.0.1", 0)
        for server in self.brokers.values():
            await server.listener.start("127.0.0.1", 0)

    async def stop(self) -> None:
        for server in self.brokers.values():
            await server.listener.stop(0)
        await self._nameserver.stop(0)


@asynccontextmanager
async def fake_cluster(**brokers: Answering) -> AsyncIterator[FakeCluster]:
    cluster = FakeCluster(**brokers)
    await cluster.start()
    try:
        yield cluster
    finally:
        await cluster.stop()


async def send(site: Site, topic: str, *bodies: str, **options: Any) -> None:
    async with Producer(site.nameserver.address) as producer:
        for body in bodies:
            await producer.send(Message(topic, body, **options))


class Seen:
    """A handler that remembers what it got."""

    def __init__(self) -> None:
        self.bodies: list[str] = []

    def plain(self, message: ReceivedMessage) -> None:
        self.bodies.append(message.body.decode())

    async def soon(self, message: ReceivedMessage) -> None:
        self.bodies.append(message.body.decode())

    def batch(self, messages: list[ReceivedMessage]) -> None:
        assert isinstance(messages, list)
        self.bodies += [message.body.decode() for message in messages]
