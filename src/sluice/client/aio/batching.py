"""This module sends messages together that were sent alone: a batch for each topic, by a timer.

Who sends gets a ticket. All tickets of a batch wait for one future, so that a message costs no
future of its own. Ids and bytes are made when the batch leaves, for all of its messages at once.
"""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Awaitable, Callable, Generator
from typing import Any, Final

from sluice.client.core.batches import Accumulator, OpenBatch
from sluice.client.core.messages import COMPRESSED_ZLIB, Message, SendResult, SentBatch
from sluice.client.core.sends import PROPERTIES_BYTES_MAX, check_size
from sluice.client.core.settings import ProducerSettings
from sluice.model import Buffer
from sluice.protocol.client_frames import KEY_BYTES, KEYED_BYTES

Results = asyncio.Future[SentBatch]
SendBatch = Callable[[str, int, list[Buffer], list[bytes], dict[int, int], Results], None]
_TAIL_BYTES_MAX: Final = PROPERTIES_BYTES_MAX - KEY_BYTES


class Ticket(Awaitable[SendResult]):
    """What becomes of one message of a batch."""

    __slots__ = ("_index", "_results")

    def __init__(self, results: Results, index: int) -> None:
        self._results = results
        self._index = index

    def __await__(self) -> Generator[Any, None, SendResult]:
        results = self._results
        if not results.done():
            # Who is cancelled while it waits goes alone: the others want the batch.
            yield from asyncio.shield(results)
        return results.result().result(self._index)

    @property
    def place(self) -> tuple[Results, int]:
        """The future of its batch, and where in it it stands."""
        return self._results, self._index


class Batcher:
    """The open batches of one producer, and the timer that sends them."""

    def __init__(
        self,
        settings: ProducerSettings,
        send: SendBatch,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        self._settings = settings
        self._body_bytes_max = settings.message_bytes_max
        self._pack_bytes_min = settings.compress_bytes_min or settings.message_bytes_max + 1
        self._send = send
        self._loop = loop
        self._batches: Accumulator[Results] = Accumulator(
            min(settings.batch_bytes, settings.message_bytes_max),
            settings.batch_count,
            settings.linger_ms / 1000,
        )
        self._timer: asyncio.TimerHandle | None = None

    def add(self, message: Message) -> Ticket:
        """Put a message into the batch of its topic."""
        body, sys_flag, tail = message.body, 0, message.wire_tail()
        if len(body) > self._body_bytes_max or len(tail) > _TAIL_BYTES_MAX:
            check_size(message, KEY_BYTES + len(tail), self._body_bytes_max)
        if len(body) >= self._pack_bytes_min:
            body, sys_flag = self._packed(body)
        size_bytes = len(body) + len(tail) + KEYED_BYTES
        batches = self._batches
        batch = batches.find(message.topic, sys_flag)
        if batch is not None and not batches.has_room(batch, size_bytes):
            batches.close(batch)
            self._ship(batch)
            batch = None
        if batch is None:
            results: Results = self._loop.create_future()
            batch = batches.begin(message.topic, sys_flag, self._loop.time(), results)
            if self._timer is None:
                self._timer = self._loop.call_at(batch.due, self._ripe)
        index = batch.add(body, tail, message.flag, size_bytes)
        if batches.is_full(batch):
            batches.close(batch)
            self._ship(batch)
        return Ticket(batch.outcome, index)

    def _packed(self, body: Buffer) -> tuple[Buffer, int]:
        packed = zlib.compress(body, self._settings.compress_level)
        return (packed, COMPRESSED_ZLIB) if len(packed) < len(body) else (body, 0)

    def _ripe(self) -> None:
        self._timer = None
        for batch in self._batches.due(self._loop.time()):
            self._ship(batch)
        due = self._batches.next_due()
        if due is not None:
            self._timer = self._loop.call_at(due, self._ripe)

    def _ship(self, batch: OpenBatch[Results]) -> None:
        self._send(
            *(batch.topic, batch.sys_flag, batch.bodies, batch.tails, batch.flags, batch.outcome)
        )

    def flush(self) -> None:
        """Send everything now."""
        for batch in self._batches.due(float("inf")):
            self._ship(batch)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
