"""OpenTelemetry spans, with its own SDK: who sent a message and who handled it are one trace."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanContext, SpanKind, StatusCode

from sluice.aio import Producer, PushConsumer
from sluice.client.aio import spans
from sluice.client.core.messages import Message, ReceivedMessage
from sluice.errors import MessageTooLarge, SendFailed
from tests.unit.client.admin_kit import Site


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    site = Site()
    site.start()
    yield site
    site.stop()


@pytest.fixture
def exporter(monkeypatch: pytest.MonkeyPatch) -> InMemorySpanExporter:
    """What a program sets up; the SDK lets it be set once, so the one of the test is put there."""
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace, "_TRACER_PROVIDER", provider)
    return exporter


def finished(exporter: InMemorySpanExporter, kind: SpanKind) -> list[ReadableSpan]:
    return [span for span in exporter.get_finished_spans() if span.kind is kind]


def id_of(span: ReadableSpan) -> int:
    return int(context_of(span).span_id)


def context_of(span: ReadableSpan) -> SpanContext:
    assert span.context is not None
    context: SpanContext = span.context
    return context


def attributes(span: ReadableSpan) -> dict[str, Any]:
    return dict(span.attributes or {})


async def handled(site: Site, topic: str, count: int, handler: Any, **options: Any) -> None:
    """Let a consumer handle so many messages."""
    left = asyncio.Semaphore(0)

    async def handle(given: ReceivedMessage | list[ReceivedMessage]) -> None:
        try:
            await handler(given)
        finally:
            for _ in range(len(given) if isinstance(given, list) else 1):
                left.release()

    options = {"group": f"g-{topic}", "topics": topic, "start_at": "first", **options}
    async with PushConsumer(site.nameserver.address, handler=handle, **options):
        async with asyncio.timeout(60):
            for _ in range(count):
                await left.acquire()


async def nothing(given: object) -> None:
    pass


def test_without_the_package_there_are_no_spans(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.trace", None)
    assert spans.find_tracer() is None


def test_without_a_provider_nothing_is_watched() -> None:
    """The package alone, which others bring along, must not cost every send a span."""
    code = "from sluice.client.aio import spans; assert spans.find_tracer() is None"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_a_handlers_span_is_the_child_of_the_senders(
    site: Site, exporter: InMemorySpanExporter
) -> None:
    tracer = trace.get_tracer("the program")

    async def work() -> None:
        async with Producer(site.nameserver.address) as producer:
            with tracer.start_as_current_span("checkout"):
                sent = await producer.send(Message("Spans", b"hello"))
        await handled(site, "Spans", 1, nothing)
        (sending,) = finished(exporter, SpanKind.PRODUCER)
        (handling,) = finished(exporter, SpanKind.CONSUMER)
        (outer,) = finished(exporter, SpanKind.INTERNAL)
        assert sending.parent is not None
        assert sending.parent.span_id == id_of(outer)
        assert handling.parent is not None
        assert handling.parent.span_id == id_of(sending)
        assert handling.parent.trace_id == context_of(outer).trace_id
        assert (sending.name, handling.name) == ("Spans send", "Spans process")
        assert attributes(sending)["messaging.message.id"] == sent.message_id
        assert attributes(sending)["messaging.message.body.size"] == 5
        assert attributes(handling)["messaging.message.id"] == sent.message_id
        assert attributes(handling)["messaging.consumer.group.name"] == "g-Spans"
        assert sending.status.status_code is StatusCode.UNSET

    asyncio.run(work())


@pytest.mark.parametrize("batching", [True, False])
def test_every_message_of_a_batch_has_its_span(
    site: Site, exporter: InMemorySpanExporter, batching: bool
) -> None:
    topic = f"Batched{batching}"

    async def work() -> None:
        async with Producer(site.nameserver.address, batching=batching) as producer:
            messages = [Message(topic, f"{i}") for i in range(5)]
            if batching:
                results = await asyncio.gather(*(producer.send(each) for each in messages))
            else:
                results = await producer.send_batch(messages)
        sending = finished(exporter, SpanKind.PRODUCER)
        assert sorted(attributes(span)["messaging.message.id"] for span in sending) == sorted(
            result.message_id for result in results
        )
        await handled(site, topic, 5, nothing)
        parents = {s.parent.span_id for s in finished(exporter, SpanKind.CONSUMER) if s.parent}
        assert parents == {id_of(span) for span in sending}

    asyncio.run(work())


def test_a_handler_of_lists_is_linked_to_all_it_got(
    site: Site, exporter: InMemorySpanExporter
) -> None:
    async def work() -> None:
        async with Producer(site.nameserver.address) as producer:
            queue = (await producer.queues("Lists"))[0]
            for i in range(4):
                await producer.send(Message("Lists", f"{i}"), queue=queue)
        sending = {id_of(span) for span in finished(exporter, SpanKind.PRODUCER)}
        await handled(site, "Lists", 4, nothing, batch_size=4)
        seen = set()
        for span in finished(exporter, SpanKind.CONSUMER):
            assert span.parent is not None
            seen |= {span.parent.span_id, *(link.context.span_id for link in span.links)}
        assert seen == sending

    asyncio.run(work())


def test_errors_are_in_the_spans(site: Site, exporter: InMemorySpanExporter) -> None:
    async def fail(message: ReceivedMessage) -> None:
        raise ValueError("no stock")

    async def work() -> None:
        async with Producer(site.nameserver.address, message_bytes_max=100) as producer:
            await producer.send(Message("Failing", b"x"))
            with pytest.raises(MessageTooLarge):
                await producer.send(Message("Failing", b"x" * 101))
        await handled(site, "Failing", 1, fail)
        good, bad = finished(exporter, SpanKind.PRODUCER)
        (handling,) = finished(exporter, SpanKind.CONSUMER)
        assert good.status.status_code is StatusCode.UNSET
        for span, words in ((bad, "message_bytes_max"), (handling, "no stock")):
            assert span.status.status_code is StatusCode.ERROR
            assert words in str(span.status.description)
            assert [event.name for event in span.events] == ["exception"]

    asyncio.run(work())


def test_a_span_ends_once(exporter: InMemorySpanExporter) -> None:
    tracing = spans.find_tracer()
    assert tracing is not None
    observer = spans.SpanObserver(tracing)
    message = observer.sending(Message("orders", b"x"), "U1")
    assert message.properties is not None
    assert message.properties["traceparent"].startswith("00-")
    error = SendFailed("no")
    observer.sent(message, "U1", None, error, 1.0)
    observer.sent(message, "U1", None, error, 1.0)
    assert len(exporter.get_finished_spans()) == 1
