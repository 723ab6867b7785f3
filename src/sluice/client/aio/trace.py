"""This module sends RocketMQ's message trace: lines are gathered, and sent together by a producer.

The trace is never in the way of messages: what cannot be sent is dropped, counted and said in the
log, and no more than some thousand lines wait.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from dataclasses import fields
from typing import TYPE_CHECKING, Final

from sluice.client.aio.observers import EndedTransaction, Observer
from sluice.client.core import tracing
from sluice.client.core.messages import Message, ReceivedMessage, SendResult
from sluice.client.core.settings import ClientSettings
from sluice.client.core.transactions import TransactionState
from sluice.clock import wall_ms
from sluice.errors import SluiceError

if TYPE_CHECKING:
    from sluice.client.aio.producer import Sender

log_lines = logging.getLogger("sluice.client")

_LINES_MAX: Final = 4096
_LINES_AT_ONCE: Final = 100
_LINGER_SECONDS: Final = 0.5
_STATES: Final = {
    TransactionState.COMMIT: "COMMIT_MESSAGE",
    TransactionState.ROLLBACK: "ROLLBACK_MESSAGE",
    TransactionState.UNKNOWN: "UNKNOW",
}
GROUP: Final = "_INNER_TRACE_PRODUCER"


class TraceObserver(Observer):
    """Writes a line for each event, and sends them with a producer of its own."""

    def __init__(self, settings: ClientSettings, producer: Sender | None) -> None:
        self._settings = settings
        self._group = producer.settings.group if producer is not None else ""
        self._lines: list[tuple[str, list[str]]] = []
        self._task: asyncio.Task[None] | None = None
        self._own: Sender | None = None
        self.dropped_count = 0

    def sent(
        self,
        message: Message,
        message_id: str,
        result: SendResult | None,
        error: SluiceError | None,
        took_ms: float,
    ) -> None:
        unique = result.message_id if result is not None else message_id
        kind = tracing.NORMAL
        if message.extra and "TRAN_MSG" in message.extra:
            kind = tracing.HALF
        elif not message.is_plain:
            kind = tracing.DELAYED
        elif message.sharding_key:
            kind = tracing.ORDERED
        line = tracing.published(
            wall_ms(),
            self._group,
            message.topic,
            unique,
            message.tags,
            message.keys,
            result.queue.broker_name if result is not None else "",
            len(message.body),
            int(took_ms),
            kind,
            result.offset_id if result is not None else "",
            error is None,
        )
        self._add(line, [unique, *message.keys.split()])

    def consuming(self, group: str, messages: list[ReceivedMessage]) -> object:
        request_id = uuid.uuid4().hex
        now_ms = wall_ms()
        for message in messages:
            line = tracing.consuming(
                *(now_ms, group, request_id, message.message_id),
                *(message.reconsume_times, message.keys),
            )
            self._add(line, [message.message_id, *message.keys.split()])
        return request_id

    def consumed(
        self,
        group: str,
        messages: list[ReceivedMessage],
        context: object,
        error: BaseException | None,
        took_ms: float,
    ) -> None:
        now_ms = wall_ms()
        outcome = tracing.SUCCESS if error is None else tracing.EXCEPTION
        each_ms = int(took_ms / max(1, len(messages)))
        for message in messages:
            line = tracing.consumed(
                *(str(context), message.message_id, each_ms, error is None),
                *(message.keys, outcome, now_ms, group),
            )
            self._add(line, [message.message_id, *message.keys.split()])

    def ended(
        self, message: EndedTransaction, state: TransactionState, *, from_check: bool
    ) -> None:
        line = tracing.ended_transaction(
            wall_ms(),
            self._group,
            message.topic,
            message.message_id,
            "",
            "",
            message.broker_name,
            message.transaction_id,
            _STATES[state],
            from_check,
        )
        self._add(line, [message.message_id])

    def _add(self, line: str, keys: list[str]) -> None:
        if len(self._lines) >= _LINES_MAX:
            self.dropped_count += 1
            return
        self._lines.append((line, keys))
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._send_later())

    async def _send_later(self) -> None:
        await asyncio.sleep(_LINGER_SECONDS)
        self._task = None
        await self._send()

    async def _send(self) -> None:
        while self._lines:
            rows = self._lines[:_LINES_AT_ONCE]
            del self._lines[:_LINES_AT_ONCE]
            body = "".join(line for line, _ in rows)
            keys = dict.fromkeys(key for _, of_line in rows for key in of_line)
            try:
                producer = await self._producer()
                topic = self._settings.trace_topic
                await producer.send(Message(topic, body, keys=keys))
            except SluiceError as error:
                self.dropped_count += len(rows)
                log_lines.warning("%d lines of the message trace are lost: %s", len(rows), error)
        if self.dropped_count:
            log_lines.warning("%d lines of the message trace were dropped", self.dropped_count)
            self.dropped_count = 0

    async def _producer(self) -> Sender:
        if self._own is None:
            from sluice.client.aio.producer import Sender

            common = {
                each.name: getattr(self._settings, each.name)
                for each in fields(ClientSettings)
                if each.name not in ("trace", "instance_name")
            }
            self._own = Sender(group=GROUP, **common)
            await self._own.start()
        return self._own

    async def close(self) -> None:
        """Send what waits, and end."""
        if self._task is not None:
            self._task.cancel()
            self._task = None
        try:
            async with asyncio.timeout(self._settings.close_ms / 2000):
                await self._send()
        except TimeoutError:
            log_lines.warning("%d lines of the message trace are lost", len(self._lines))
            self._lines.clear()
        if self._own is not None:
            await self._own.close()
