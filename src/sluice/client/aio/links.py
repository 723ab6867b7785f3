"""This module is a connection of the client's: `link.py`, with a short way for sends.

A send makes neither a task nor a timer. It is an object in a table, by the number of its request;
whoever gets the answer looks at nothing but number and code. Overdue ones are found by a sweep.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Any, Final, Protocol

from sluice.errors import LinkLost, RequestTimedOut, SluiceError
from sluice.link import ANSWER_HEADER_BYTES_MAX, RemotingLink
from sluice.model import Buffer
from sluice.net import Connection
from sluice.protocol import remoting
from sluice.protocol.client_frames import SendTemplate, SentFields, answer_mark
from sluice.protocol.framing import Frame
from sluice.protocol.remoting import FLAG_ONEWAY
from sluice.protocol.remoting_codes import ResponseCode

PENDING_MAX: Final = 8192
_FEW: Final = 4
UNSENT_BYTES_MAX: Final = 16 * 1024 * 1024
_CREDIT_BYTES_MAX: Final = 64 * 1024


class Pending(Protocol):
    """A send that waits for its answer."""

    deadline: float  # by the event loop's clock

    def succeeded(self, frame: Frame, now: float) -> None: ...

    def answered(self, code: int, fields: SentFields, remark: str | None) -> None: ...

    def failed(self, error: SluiceError) -> None: ...


class ClientLink(RemotingLink):
    """One connection to a broker or a nameserver. Belongs to the event loop's thread."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._sends: dict[int, Pending] = {}
        self._queueing: deque[asyncio.Future[None]] = deque()
        self.pending_max = PENDING_MAX
        self._credit_bytes = 0  # may go out before it is looked at again what is unsent

    def has_room(self, body_bytes: int = 0) -> bool:
        """Whether one more send may go out now."""
        connection = self._connection
        count = len(self._sends)
        if connection is None or count >= self.pending_max:
            return False
        if body_bytes < self._credit_bytes:
            # What the peer did not take yet is asked for once for many sends.
            self._credit_bytes -= body_bytes + 1
            return True
        if not connection.is_open:
            return False
        unsent_bytes = connection.unsent_bytes
        self._credit_bytes = min(UNSENT_BYTES_MAX - unsent_bytes, _CREDIT_BYTES_MAX)
        # Few sends cannot be many bytes that the peer did not take.
        return count < _FEW or unsent_bytes < UNSENT_BYTES_MAX

    async def room(self) -> None:
        """Wait until one more send may go out, or the connection is gone."""
        while self.is_open and not self.has_room():
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._queueing.append(waiter)
            await waiter

    def _let_in(self) -> None:
        """Wake as many of those who wait as there is room for; all where there is no hope."""
        room = self.pending_max - len(self._sends) if self.is_open else len(self._queueing)
        while self._queueing and room > 0:
            waiter = self._queueing.popleft()
            if not waiter.done():
                waiter.set_result(None)
                room -= 1

    def check_open(self) -> None:
        if not self.is_open:
            raise LinkLost(f"{self}: the connection is lost: {self.lost_reason or 'closing'}")

    def transmit(
        self,
        pending: Pending,
        template: SendTemplate,
        born_ms: int,
        properties: bytes,
        body: Buffer,
    ) -> None:
        """Send; the answer or the failure goes to `pending`. There has to be room."""
        connection, sends = self._connection, self._sends
        assert connection is not None, "asked for room before"
        number = self._next_opaque()
        while number in sends:
            number = self._next_opaque()
        sends[number] = pending
        connection.send(template.frame(number, 0, born_ms, properties, body))

    def transmit_oneway(
        self, template: SendTemplate, born_ms: int, properties: bytes, body: Buffer
    ) -> None:
        """Send without an answer."""
        assert self._connection is not None, "asked for room before"
        number = self._next_opaque()
        self._connection.send(template.frame(number, FLAG_ONEWAY, born_ms, properties, body))

    def sweep(self, now: float) -> None:
        """Fail what has waited too long for its answer."""
        sends = self._sends
        late = [number for number, pending in sends.items() if pending.deadline <= now]
        for number in late:
            pending = sends.pop(number, None)
            if pending is not None:
                pending.failed(RequestTimedOut(f"{self} did not answer a send in time"))
        if self._queueing:
            self._let_in()

    # ------------------------------------------------------------------------ the connection's side

    def received(self, connection: Connection, frames: list[Frame]) -> None:
        sends = self._sends
        others: list[Frame] = []
        now = self._loop.time()
        for frame in frames:
            mark = answer_mark(frame)
            if mark is None:
                others.append(frame)
                continue
            pending = sends.pop(mark[0], None)
            if pending is None:
                others.append(frame)
            elif mark[1] == ResponseCode.SUCCESS:
                pending.succeeded(frame, now)
            else:
                command = remoting.decode(frame, ANSWER_HEADER_BYTES_MAX)
                pending.answered(mark[1], SentFields(None, command.ext), command.remark)
        if others:
            self._received_plainly(connection, others, sends)
        if self._queueing:
            self._let_in()

    def _received_plainly(
        self, connection: Connection, frames: list[Frame], sends: dict[int, Pending]
    ) -> None:
        """JSON headers, and answers to all that is no send."""
        if not sends:
            super().received(connection, frames)
            return
        for frame in frames:
            command = remoting.decode(frame, ANSWER_HEADER_BYTES_MAX)
            pending = sends.pop(command.opaque, None) if command.is_answer else None
            if pending is None:
                super().received(connection, [frame])
            else:
                pending.answered(command.code, SentFields(None, command.ext), command.remark)

    def closed(self, connection: Connection) -> None:
        sends, reason = dict(self._sends), connection.close_reason
        self._sends.clear()
        super().closed(connection)
        self._let_in()
        for pending in sends.values():
            pending.failed(
                LinkLost(f"{self}: the connection was lost before the answer came: {reason}")
            )
