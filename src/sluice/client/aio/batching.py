"""This module sends messages together that were sent alone: a batch for each topic, by a timer.

Who sends gets a ticket. All tickets of a batch wait for one future, so that a message costs no
future of its own.
"""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Awaitable, Callable, Generator
from typing import Any

from sluice.client.core.batches import Accumulator, OpenBatch
from sluice.client.core.messages import (
    COMPRESSED_ZLIB,
    Message,
    SendResult,
    SentBatch,
    UniqueKeys,
)
from sluice.client.core.sends import PROPERTIES_BYTES_MAX, check_size
from sluice.client.core.settings import ProducerSettings
from sluice.clock import wall_ms
from sluice.model import Buffer
from sluice.protocol.client_frames import BATCH_HEAD_BYTES, batch_parts

Results = asyncio.Future[SentBatch]
SendBatch = Callable[[str, int, bytes, list[str], Results], None]


class Ticket(Awaitable[SendResult]):
    """What becomes of one message of a batch."""

    __slots__ = ("_index", "_results")

    def __init__(self, results: Results, index: int) -> None:
        self._results = results
        self._index = index

    def __await__(self) -> Generator[Any, None, SendResult]:
        sent = yield from self._results.__await__()
        return sent.result(self._index)

    @property
    def place(self) -> tuple[Results, int]:
        """The future of its batch, and where in it it stands."""
        return self._results, self._index


class Batcher:
    """The open batches of one producer, and the timer that sends them."""

    def __init__(
        self,
        settings: ProducerSettings,
        keys: UniqueKeys,
        send: SendBatch,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        self._settings = settings
        self._body_bytes_max = settings.message_bytes_max
        self._pack_bytes_min = settings.compress_bytes_min or settings.message_bytes_max + 1
        self._make_key = keys.make
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
        body, sys_flag = message.body, 0
        unique = self._make_key(wall_ms())
        properties = message.wire_properties(unique)
        if len(body) > self._body_bytes_max or len(properties) > PROPERTIES_BYTES_MAX:
            check_size(message, properties, self._body_bytes_max)
        if len(body) >= self._pack_bytes_min:
            body, sys_flag = self._packed(body)
        size_bytes = len(body) + len(properties) + BATCH_HEAD_BYTES
        batch = self._batches.find(message.topic, sys_flag)
        if batch is not None and not self._batches.has_room(batch, size_bytes):
            self._batches.close(batch)
            self._ship(batch)
            batch = None
        if batch is None:
            results: Results = self._loop.create_future()
            batch = self._batches.begin(message.topic, sys_flag, self._loop.time(), results)
            if self._timer is None:
                self._timer = self._loop.call_at(batch.due, self._ripe)
        index = batch.add(batch_parts(message.flag, body, properties), unique, size_bytes)
        if self._batches.is_full(batch):
            self._batches.close(batch)
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
        body = b"".join(batch.parts)
        self._send(batch.topic, batch.sys_flag, body, batch.ids, batch.outcome)

    def flush(self) -> None:
        """Send everything now."""
        for batch in self._batches.due(float("inf")):
            self._ship(batch)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
