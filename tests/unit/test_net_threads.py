"""Event loops on several threads of one process do not receive into each other's buffers."""

from __future__ import annotations

import asyncio
import threading

import uvloop

from sluice.link import RemotingLink
from sluice.net import Connection, Limits, Listener
from sluice.protocol import remoting
from sluice.protocol.framing import Frame

LOOPS = 3
REQUESTS = 300


class Echo:
    """Answers every request with its own body."""

    def opened(self, connection: Connection) -> None:
        pass

    def closed(self, connection: Connection) -> None:
        pass

    def received(self, connection: Connection, frames: list[Frame]) -> None:
        for frame in frames:
            command = remoting.decode(frame)
            connection.send(remoting.answer(command, 0, {}, None, command.body))


async def talk(number: int) -> None:
    """A listener and a client of this thread; what comes back is what was sent."""
    listener = Listener(Echo(), Limits())
    await listener.start("127.0.0.1", 0)
    link = await RemotingLink.open(f"127.0.0.1:{listener.address[1]}")
    mark = bytes([65 + number])
    for size in range(1, REQUESTS):
        bodies = [mark * (37 * size), mark * 5, mark * (11 * size)]
        answers = await asyncio.gather(
            *(link.request(1, {}, body, timeout_seconds=60) for body in bodies)
        )
        assert [bytes(answer.body) for answer in answers] == bodies
    await link.close()
    await listener.stop(0)


def test_each_thread_has_its_own_buffer() -> None:
    failures: list[BaseException] = []

    def run(number: int) -> None:
        try:
            uvloop.run(talk(number)) if number else asyncio.run(talk(number))
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(LOOPS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert failures == []
