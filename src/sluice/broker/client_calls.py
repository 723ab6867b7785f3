"""This module asks and tells clients something, over the connection that they opened themselves.

An answer is found by its number; it comes, or the connection closes, or its time is over: whoever
asked hears exactly once. The number of questions without an answer is bounded.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from sluice.errors import Busy
from sluice.net import Connection
from sluice.protocol import remoting
from sluice.protocol.framing import Frame
from sluice.protocol.remoting import RemotingCommand

WAITING_MAX: Final = 4096

Then = Callable[[RemotingCommand | None], None]


class ClientCalls:
    """What one broker asks its clients."""

    def __init__(self) -> None:
        self._waiting: dict[tuple[Connection, int], Then] = {}
        self._opaque = 0

    def next_opaque(self) -> int:
        self._opaque = (self._opaque + 1) & 0x7FFFFFFF
        return self._opaque

    def tell(
        self, connection: Connection, code: int, ext: dict[str, str], body: Frame = b""
    ) -> None:
        """Tell a client something; nobody learns what became of it."""
        command = RemotingCommand(code, self.next_opaque(), remoting.FLAG_ONEWAY, ext, body)
        connection.send(remoting.encode(command))

    def ask(
        self,
        connection: Connection,
        code: int,
        ext: dict[str, str],
        body: Frame,
        timeout_seconds: float,
        then: Then,
    ) -> None:
        """Ask a client something; `then` gets its answer, None where none comes in time."""
        if len(self._waiting) >= WAITING_MAX:
            raise Busy(f"{WAITING_MAX} requests to clients wait for an answer; try again")
        key = (connection, self.next_opaque())

        def answered(command: RemotingCommand | None) -> None:
            timer.cancel()
            then(command)

        def overdue() -> None:
            if self._waiting.pop(key, None) is not None:
                then(None)

        timer = asyncio.get_running_loop().call_later(timeout_seconds, overdue)
        self._waiting[key] = answered
        connection.send(remoting.encode(RemotingCommand(code, key[1], 0, ext, body)))

    def answered(self, connection: Connection, command: RemotingCommand) -> None:
        """An answer came; one that nobody waits for any more is dropped."""
        waiting = self._waiting.pop((connection, command.opaque), None)
        if waiting is not None:
            waiting(command)

    def closed(self, connection: Connection) -> None:
        """A connection is gone: its answers will not come."""
        for key in [key for key in self._waiting if key[0] is connection]:
            self._waiting.pop(key)(None)
