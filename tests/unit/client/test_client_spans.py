"""Spans, with something that looks like OpenTelemetry from here: the real one need not be there."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest

from sluice.client.aio import spans
from sluice.client.core.messages import Message, read_pulled
from sluice.errors import SendFailed
from tests.unit.client.test_core_messages import QUEUE, entry


class FakeSpan:
    def __init__(self, name: str, parent: Any, attributes: dict[str, Any]) -> None:
        self.name = name
        self.parent = parent
        self.attributes = attributes
        self.errors: list[BaseException] = []
        self.is_ended = False

    def record_exception(self, error: BaseException) -> None:
        self.errors.append(error)

    def end(self) -> None:
        self.is_ended = True


class FakeTelemetry:
    """`opentelemetry.trace` and `opentelemetry.propagate`."""

    class SpanKind:
        PRODUCER = "producer"
        CONSUMER = "consumer"

    def __init__(self) -> None:
        self.spans: list[FakeSpan] = []

    def get_tracer(self, name: str) -> FakeTelemetry:
        return self

    def start_span(
        self, name: str, *, kind: str, attributes: dict[str, Any], context: Any = None
    ) -> FakeSpan:
        span = FakeSpan(name, context, attributes)
        self.spans.append(span)
        return span

    def set_span_in_context(self, span: FakeSpan) -> FakeSpan:
        return span

    def inject(self, carrier: dict[str, str], context: FakeSpan) -> None:
        carrier["traceparent"] = f"00-{context.name}"

    def extract(self, carrier: dict[str, str]) -> str | None:
        return carrier.get("traceparent")


@pytest.fixture
def telemetry(monkeypatch: pytest.MonkeyPatch) -> FakeTelemetry:
    fake: Any = FakeTelemetry()
    root = ModuleType("opentelemetry")
    monkeypatch.setitem(sys.modules, "opentelemetry", root)
    monkeypatch.setitem(sys.modules, "opentelemetry.trace", fake)
    monkeypatch.setitem(sys.modules, "opentelemetry.propagate", fake)
    result: FakeTelemetry = fake
    return result


def test_without_the_package_there_are_no_spans(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.trace", None)
    assert spans.find_tracer() is None


def test_a_consumers_span_is_the_child_of_the_producers(telemetry: FakeTelemetry) -> None:
    tracing = spans.find_tracer()
    assert tracing is not None
    observer = spans.SpanObserver(tracing)
    sent = observer.sending(Message("orders", b"x"), "U1")
    assert sent.extra == {"traceparent": "00-orders send"}
    observer.sent(sent, "U1", None, None, 1.0)
    data = entry(b"x", properties=sent.wire_properties("U1"))
    messages = read_pulled(data, QUEUE)
    context = observer.consuming("billing", messages)
    observer.consumed("billing", messages, context, None, 2.0)
    producing, consuming = telemetry.spans
    assert consuming.parent == "00-orders send"
    assert consuming.attributes["messaging.consumer.group.name"] == "billing"
    assert consuming.attributes["messaging.message.id"] == "U1"
    assert producing.is_ended
    assert consuming.is_ended


def test_errors_are_in_the_span(telemetry: FakeTelemetry) -> None:
    tracing = spans.find_tracer()
    assert tracing is not None
    observer = spans.SpanObserver(tracing)
    message = observer.sending(Message("orders", b"x"), "U1")
    error = SendFailed("no")
    observer.sent(message, "U1", None, error, 1.0)
    observer.sent(message, "U1", None, error, 1.0)  # only once
    (span,) = telemetry.spans
    assert span.errors == [error]
    assert span.is_ended
