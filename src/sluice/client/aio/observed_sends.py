"""This module shows observers the sends of a producer that has some: single ones and batches.

An observer that raises is not in the way: its error is in the log. The id of a message in a batch
is made when the batch leaves; until then an observer knows it by another one, and the result has
its own. A producer without observers never comes here.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any

from sluice.client.aio.batching import Batcher, Results, Ticket
from sluice.client.aio.observers import EndedTransaction, Observer
from sluice.client.core.ids import UniqueKeys, key_of
from sluice.client.core.messages import Message, SendResult
from sluice.client.core.transactions import TransactionState
from sluice.clock import wall_ms
from sluice.errors import ClientClosed, SluiceError

log_lines = logging.getLogger("sluice.client")


def guarded(call: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """Who only watches must not be in the way: what it raises is in the log, and None."""
    try:
        return call(*arguments, **options)
    except Exception:
        log_lines.exception("an observer failed")
        return None


class GuardedObserver(Observer):
    """An observer of sends whose errors are its own."""

    def __init__(self, inner: Observer) -> None:
        self._inner = inner

    def sending(self, message: Message, message_id: str) -> Message:
        changed = guarded(self._inner.sending, message, message_id)
        return changed if type(changed) is Message else message

    def sent(
        self,
        message: Message,
        message_id: str,
        result: SendResult | None,
        error: SluiceError | None,
        took_ms: float,
    ) -> None:
        guarded(self._inner.sent, message, message_id, result, error, took_ms)

    def ended(
        self, message: EndedTransaction, state: TransactionState, *, from_check: bool
    ) -> None:
        guarded(self._inner.ended, message, state, from_check=from_check)

    async def close(self) -> None:
        await self._inner.close()


class Watch:
    """The observers of one producer, for messages that go in batches."""

    def __init__(self, observers: Sequence[Observer], keys: UniqueKeys) -> None:
        self._observers = observers
        self._keys = keys

    def sending(self, message: Message) -> tuple[Message, str]:
        """What goes out, and by which id observers know it."""
        message_id = self._keys.make(wall_ms())
        for observer in self._observers:
            message = observer.sending(message, message_id)
        return message, message_id

    def sending_oneway(self, message: Message) -> tuple[Message, bytes]:
        """What goes out, and the id that it gets: no answer will tell another one."""
        mark = self._keys.mark(wall_ms())
        for observer in self._observers:
            message = observer.sending(message, key_of(mark))
        return message, mark

    def sent(
        self,
        message: Message,
        message_id: str,
        result: SendResult | None,
        error: BaseException | None,
        begun: float,
    ) -> None:
        took_ms = (time.monotonic() - begun) * 1000
        known = error if isinstance(error, SluiceError) or error is None else _closed(error)
        for observer in self._observers:
            observer.sent(message, message_id, result, known, took_ms)


def _closed(error: BaseException) -> SluiceError:
    failure = ClientClosed(f"the send was given up: {error!r}")
    failure.__cause__ = error
    return failure


class ObservedBatcher(Batcher):
    """Batches of a producer that has observers."""

    def __init__(self, watch: Watch, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._watch = watch

    def add(self, message: Message) -> Ticket:
        given = message
        message, message_id = self._watch.sending(message)
        try:
            ticket = super().add(message)
        except SluiceError as error:
            self._watch.sent(given, message_id, None, error, time.monotonic())
            raise
        results, index = ticket.place
        results.add_done_callback(partial(self._told, given, message_id, index, time.monotonic()))
        return ticket

    def _told(
        self, message: Message, message_id: str, index: int, begun: float, results: Results
    ) -> None:
        error = asyncio.CancelledError() if results.cancelled() else results.exception()
        result = results.result().result(index) if error is None else None
        self._watch.sent(message, message_id, result, error, begun)


async def send_watched(
    watch: Watch,
    messages: Sequence[Message],
    send: Callable[[Sequence[Message]], Awaitable[list[SendResult]]],
) -> list[SendResult]:
    """Send messages together, each shown to the observers."""
    begun = time.monotonic()
    rows = [watch.sending(message) for message in messages]
    try:
        results = await send([message for message, _ in rows])
    except BaseException as error:
        for message, (_, message_id) in zip(messages, rows, strict=True):
            watch.sent(message, message_id, None, error, begun)
        raise
    for message, (_, message_id), result in zip(messages, rows, results, strict=True):
        watch.sent(message, message_id, result, None, begun)
    return results


async def send_oneway_watched(
    watch: Watch, message: Message, send: Callable[..., Awaitable[None]]
) -> None:
    """Send a message that gets no answer, shown to the observers: without a result."""
    begun = time.monotonic()
    changed, mark = watch.sending_oneway(message)
    try:
        await send(changed, mark=mark)
    except BaseException as error:
        watch.sent(message, key_of(mark), None, error, begun)
        raise
    watch.sent(message, key_of(mark), None, None, begun)
