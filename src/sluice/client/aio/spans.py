"""This module makes OpenTelemetry spans of sends and of handlers, where OpenTelemetry is installed.

The producer's span travels in the property `traceparent`, as the W3C writes it; the consumer's span
is its child. Without the package, or without a provider set up before the client starts, nothing
is done and nothing is lost by it.
"""

from __future__ import annotations

import importlib
from typing import Any, Final

from sluice.client.aio.observers import Observer
from sluice.client.core.messages import Message, ReceivedMessage, SendResult
from sluice.errors import SluiceError

_SYSTEM: Final = "rocketmq"


class Tracing:
    """The parts of OpenTelemetry that are used."""

    def __init__(self, trace: Any, propagate: Any) -> None:
        self.trace = trace
        self.propagate = propagate
        self.tracer = trace.get_tracer("sluice.client")


def find_tracer() -> Tracing | None:
    """OpenTelemetry, if it is installed and somebody wants its spans."""
    try:
        trace = importlib.import_module("opentelemetry.trace")
        propagate = importlib.import_module("opentelemetry.propagate")
    except ImportError:
        return None
    if isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider):
        return None  # no provider was set up: spans would go nowhere, and cost time
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
                "messaging.operation.type": "send",
                "messaging.destination.name": message.topic,
                "messaging.message.id": message_id,
                "messaging.message.body.size": len(message.body),
            },
        )
        self._open[message_id] = span
        carrier: dict[str, str] = {}
        tracing.propagate.inject(carrier, context=tracing.trace.set_span_in_context(span))
        return message.with_properties(carrier) if carrier else message

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
            if result is not None:
                span.set_attribute("messaging.message.id", result.message_id)
            self._end(span, error)

    def consuming(self, group: str, messages: list[ReceivedMessage]) -> object:
        tracing = self._tracing
        first = messages[0]
        contexts = [tracing.propagate.extract(message.properties) for message in messages]
        # A span has one parent: the other messages of a batch are linked to.
        links = [
            tracing.trace.Link(context)
            for context in map(self._span_context, contexts[1:])
            if context.is_valid
        ]
        return tracing.tracer.start_span(
            f"{first.topic} process",
            context=contexts[0],
            kind=tracing.trace.SpanKind.CONSUMER,
            attributes={
                "messaging.system": _SYSTEM,
                "messaging.operation.type": "process",
                "messaging.destination.name": first.topic,
                "messaging.consumer.group.name": group,
                "messaging.message.id": first.message_id,
                "messaging.batch.message_count": len(messages),
            },
            links=links,
        )

    def consumed(
        self,
        group: str,
        messages: list[ReceivedMessage],
        context: object,
        error: BaseException | None,
        took_ms: float,
    ) -> None:
        if context is not None:
            self._end(context, error)

    def _span_context(self, context: Any) -> Any:
        return self._tracing.trace.get_current_span(context).get_span_context()

    def _end(self, span: Any, error: BaseException | None) -> None:
        if error is not None:
            trace = self._tracing.trace
            span.record_exception(error.__cause__ or error)
            span.set_status(trace.Status(trace.StatusCode.ERROR, str(error)))
        span.end()
