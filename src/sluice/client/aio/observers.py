"""This module is who watches a client: hooks of users, RocketMQ's message trace, OpenTelemetry.

An observer sees every send and every call of a handler. It must not raise and must not wait. One
that needs neither does nothing here: without observers nothing of this costs anything.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from sluice.client.core.ids import key_of
from sluice.client.core.messages import Message, ReceivedMessage, SendResult
from sluice.client.core.settings import ClientSettings
from sluice.client.core.transactions import TransactionState
from sluice.errors import SluiceError

log_lines = logging.getLogger("sluice.client")

if TYPE_CHECKING:
    from sluice.client.aio.operations import Operation
    from sluice.client.aio.producer import Sender


class EndedTransaction(NamedTuple):
    """The message of a transaction that was ended."""

    topic: str
    message_id: str
    transaction_id: str
    broker_name: str


class Observer:
    """What a hook may override. All are called on the event loop."""

    def sending(self, message: Message, message_id: str) -> Message:
        """Before a message goes out; what is returned is sent.

        In a batch it gets its own id when the batch leaves: then `result` has it, and `message_id`
        only ties `sent` to this.
        """
        return message

    def sent(
        self,
        message: Message,
        message_id: str,
        result: SendResult | None,
        error: SluiceError | None,
        took_ms: float,
    ) -> None:
        """After its result, or its error."""

    def consuming(self, group: str, messages: list[ReceivedMessage]) -> object:
        """Before a handler gets messages; what is returned comes back in `consumed`."""
        return None

    def consumed(
        self,
        group: str,
        messages: list[ReceivedMessage],
        context: object,
        error: BaseException | None,
        took_ms: float,
    ) -> None:
        """After the handler came back, or raised, or was given up."""

    def ended(
        self, message: EndedTransaction, state: TransactionState, *, from_check: bool
    ) -> None:
        """After a broker was told how a transaction ended."""

    async def close(self) -> None:
        """The client ends."""


def tell(
    observers: Sequence[Observer],
    operation: Operation,
    result: SendResult | None,
    error: SluiceError | None,
) -> None:
    """A single send is over."""
    assert operation.message is not None, "a batch is told elsewhere"
    begun = operation.started
    took_ms = (asyncio.get_running_loop().time() - begun) * 1000 if begun else 0.0
    for observer in observers:
        observer.sent(operation.message, key_of(operation.properties), result, error, took_ms)


async def close_observers(observers: Sequence[Observer], seconds: float) -> None:
    """The client ends; who does not come to an end in time is left behind."""
    for observer in observers:
        try:
            async with asyncio.timeout(seconds):
                await observer.close()
        except TimeoutError:
            log_lines.warning("an observer did not end within %g s (close_ms)", seconds)
        except Exception:
            log_lines.exception("an observer failed")


def observers_of(settings: ClientSettings, producer: Sender | None) -> list[Observer]:
    """Those that settings and installed packages ask for."""
    from sluice.client.aio import spans
    from sluice.client.aio.trace import TraceObserver

    observers: list[Observer] = []
    if settings.trace:
        observers.append(TraceObserver(settings, producer))
    tracer = spans.find_tracer()
    if tracer is not None:
        observers.append(spans.SpanObserver(tracer))
    return observers
