"""This module makes OpenTelemetry spans of sends and of handlers, where OpenTelemetry is installed.

The producer's span travels in the property `traceparent`, as the W3C writes it; the consumer's span
is its child. Without the package, or without a provider set up, nothing is done.
"""

from __future__ import annotations

import importlib
from typing import Any, Final

from sluice.client.aio.observers import Observer
from sluice.client.core.messages import Message, ReceivedMessage, SendResult
from sluice.errors import SluiceError

_SYSTEM: Final = "rocketmq"


class Tracing:
    """The three parts of OpenTelemetry that are used."""

    def __init__(self, trace: Any, propagate: Any) -> None:
        self.trace = trace
        self.propagate = propagate
        self.tracer = trace.get_tracer("sluice.client")


def find_tracer() -> Tracing | None:
    """OpenTelemetry, if it is installed."""
    try:
        trace = importlib.import_module("opentelemetry.trace")
        propagate = importlib.import_module("opentelemetry.propagate")
    except ImportError:
        return None
    return Tracing(trace, propagate)


class SpanObserver(Observer):
    """A span for each send, and one for each call of a handler."""

    def __init__(self, tracing: Tracing) -> None:
        self._tracing = tracing
        self._open: dict[str, Any] = {}

    def sending(self, message: Message, message_id: str) -> Message:
        tracing = self._tracing
        span = tracing.tracer.start_span(
            f"{message.topic} send",
            kind=tracing.trace.SpanKind.PRODUCER,
            attributes={
                "messaging.system": _SYSTEM,
                "messaging.destination.name": message.topic,
                "messaging.message.id": message_id,
                "messaging.message.body.size": len(message.body),
            },
        )
        self._open[message_id] = span
        carrier: dict[str, str] = {}
        tracing.propagate.inject(carrier, context=tracing.trace.set_span_in_context(span))
        return message.with_extra(**carrier) if carrier else message

    def sent(
        self,
        message: Message,
        message_id: str,
        result: SendResult | None,
        error: SluiceError | None,
        took_ms: float,
    ) -> None:
        span = self._open.pop(message_id, None)
        if span is not None:
            if error is not None:
                span.record_exception(error)
            span.end()

    def consuming(self, group: str, messages: list[ReceivedMessage]) -> object:
        tracing = self._tracing
        first = messages[0]
        parent = tracing.propagate.extract(first.properties)
        return tracing.tracer.start_span(
            f"{first.topic} process",
            context=parent,
            kind=tracing.trace.SpanKind.CONSUMER,
            attributes={
                "messaging.system": _SYSTEM,
                "messaging.destination.name": first.topic,
                "messaging.consumer.group.name": group,
                "messaging.message.id": first.message_id,
                "messaging.batch.message_count": len(messages),
            },
        )

    def consumed(
        self,
        group: str,
        messages: list[ReceivedMessage],
        context: object,
        error: BaseException | None,
        took_ms: float,
    ) -> None:
        span: Any = context
        if span is not None:
            if error is not None:
                span.record_exception(error)
            span.end()
