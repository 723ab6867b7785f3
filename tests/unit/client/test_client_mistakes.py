"""What the functions and arguments of users do wrong stays theirs: nobody else waits for ever."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from sluice import Producer as BlockingProducer
from sluice.aio import Observer, Producer, PullConsumer, PushConsumer
from sluice.client.aio.verdicts import verdict_of
from sluice.client.core.messages import Message, ReceivedMessage, SendStatus
from sluice.client.sync.futures import SendFuture
from sluice.errors import (
    ClientClosed,
    HandlerFailed,
    MessageInvalid,
    MessageTooLarge,
    SendFailed,
)
from sluice.protocol.json_members import MessageQueue
from sluice.protocol.remoting_codes import RequestCode as Request
from tests.unit.client.admin_kit import Site
from tests.unit.client.client_kit import fake_cluster, send, stored
from tests.unit.loops import run_once, until


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    site = Site()
    site.start()
    yield site
    site.stop()


# ------------------------------------------------------------------------------------------ sending


def test_a_callback_that_raises_is_not_in_the_way_of_others(
    site: Site, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(future: SendFuture) -> None:
        raise ValueError("mine")

    with BlockingProducer(site.nameserver.address, batching=True) as producer:
        futures = [producer.send_async(Message("Callback", f"{i}"), broken) for i in range(5)]
        assert {future.result(60).status for future in futures} == {SendStatus.OK}
    with BlockingProducer(site.nameserver.address) as producer:
        producer.send_async(Message("Callback", "x"), broken).result(60)
        assert producer.send_async(Message("Callback", "y")).result(60).status is SendStatus.OK
    assert caplog.text.count("a callback of a send failed") == 6


def test_a_callback_that_comes_late_raises_nothing_at_its_caller() -> None:
    def broken(future: SendFuture) -> None:
        future.result()

    future = SendFuture()
    future.set_exception(ClientClosed("closed"))
    future.add_done_callback(broken)
    assert future.done()


def test_who_is_cancelled_does_not_take_its_batch_along() -> None:
    async def work() -> None:
        async with (
            fake_cluster(a=stored) as cluster,
            Producer(cluster.nameserver, batching=True, linger_ms=20) as producer,
        ):
            first, second = (producer.send_async(Message("orders", each)) for each in "ab")
            waiting = asyncio.ensure_future(first)
            await asyncio.sleep(0)
            waiting.cancel()
            assert (await second).status is SendStatus.OK
            assert waiting.cancelled()
            assert (await first).status is SendStatus.OK  # nobody else is the worse for it

    run_once(work())


def test_with_a_time_of_its_own_a_message_goes_in_no_batch() -> None:
    async def work() -> None:
        async with (
            fake_cluster(a=stored) as cluster,
            Producer(cluster.nameserver, batching=True, linger_ms=600_000) as producer,
        ):
            await producer.send(Message("orders", "x"), timeout_ms=60_000)
            assert cluster.brokers["a"].count(Request.SEND_MESSAGE_V2) == 1

    run_once(work())


@pytest.mark.parametrize("is_known", [False, True])
def test_a_selector_that_raises_or_returns_nonsense(is_known: bool) -> None:
    """Whether the topic's queues are known already, or have to be asked for."""
    elsewhere = MessageQueue("other", "a", 0)
    wrong: list[tuple[Any, str]] = [
        (lambda queues, message, argument: queues[99], "the selector raised IndexError"),
        (lambda queues, message, argument: 0, "which is no queue"),
        (lambda queues, message, argument: elsewhere, "no queue of topic orders"),
    ]

    async def work() -> None:
        for selector, words in wrong:
            async with (
                fake_cluster(a=stored) as cluster,
                Producer(cluster.nameserver) as producer,
            ):
                if is_known:
                    await producer.send(Message("orders", "x"))
                with pytest.raises(MessageInvalid, match=words):
                    await producer.send(Message("orders", "x"), selector=selector)
                with pytest.raises(MessageInvalid, match=words):
                    await producer.send_oneway(Message("orders", "x"), selector=selector)

    run_once(work())


@pytest.mark.parametrize("queue", ["orders-0", 3, MessageQueue("other", "a", 0)])
def test_what_is_no_queue_of_the_topic(queue: Any) -> None:
    async def work() -> None:
        async with fake_cluster(a=stored) as cluster, Producer(cluster.nameserver) as producer:
            for _ in range(2):  # before the topic is known, and after
                with pytest.raises(MessageInvalid, match="no queue"):
                    await producer.send(Message("orders", "x"), queue=queue)
                with pytest.raises(MessageInvalid, match="no queue"):
                    await producer.send_batch([Message("orders", "x")], queue=queue)
                await producer.send(Message("orders", "x"))

    run_once(work())


@pytest.mark.parametrize("options", [{}, {"selector": lambda q, m, a: q[0]}])
def test_closing_ends_a_send_that_waits_for_its_route(options: dict[str, Any]) -> None:
    asked = asyncio.Event()

    async def say_nothing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        asked.set()
        await reader.read()
        writer.close()

    async def work() -> None:
        server = await asyncio.start_server(say_nothing, "127.0.0.1", 0)
        address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        waits: dict[str, Any] = {"send_ms": 600_000, "request_ms": 600_000, "close_ms": 50}
        producer = Producer(address, **waits)
        await producer.start()
        sent = producer.send_async(Message("orders", "x"), **options)
        await asked.wait()
        await producer.close()
        with pytest.raises(ClientClosed, match="it is not stored"):
            await sent
        server.close()

    run_once(work())


def test_what_nobody_expected_ends_the_send(monkeypatch: pytest.MonkeyPatch) -> None:
    async def broken(*_: object, **__: object) -> None:
        raise RuntimeError("unheard of")

    async def work() -> None:
        async with fake_cluster(a=stored) as cluster, Producer(cluster.nameserver) as producer:
            with monkeypatch.context() as patch:
                patch.setattr(producer.session, "route", broken)
                with pytest.raises(SendFailed, match="unheard of"):
                    await producer.send(Message("orders", "x"))
                with pytest.raises(SendFailed, match="unheard of"):
                    await producer.send(Message("orders", "x"), selector=lambda q, m, a: q[0])
            await producer.publishing("orders")
            with monkeypatch.context() as patch:
                patch.setattr(producer.session, "link", broken)
                with pytest.raises(SendFailed, match="unheard of"):
                    await producer.send(Message("orders", "x"))
            assert (await producer.send(Message("orders", "x"))).status is SendStatus.OK

    run_once(work())


@pytest.mark.parametrize("is_watched", [False, True])
def test_a_batch_goes_where_its_sharding_key_says(is_watched: bool) -> None:
    async def work() -> None:
        observers = [Observer()] if is_watched else []
        async with (
            fake_cluster(a=stored, b=stored) as cluster,
            Producer(cluster.nameserver, observers=observers) as producer,
        ):
            for key in ("order-1", "order-2", "order-3"):
                alone = await producer.send(Message("orders", "x", sharding_key=key))
                for _ in range(4):
                    batch = [Message("orders", f"{n}", sharding_key=key) for n in range(2)]
                    results = await producer.send_batch(message for message in batch)
                    assert {result.queue for result in results} == {alone.queue}
            two = [Message("orders", "x", sharding_key=key) for key in ("order-1", "order-2")]
            with pytest.raises(MessageInvalid, match="'order-1' and 'order-2' may have two"):
                await producer.send_batch(two)
            queue = (await producer.queues("orders"))[0]
            assert (await producer.send_batch(two, queue=queue))[0].queue == queue
            wrong: Any = Message("orders", "x")
            with pytest.raises(MessageInvalid, match="a list of messages"):
                await producer.send_batch(wrong)
            with pytest.raises(MessageTooLarge, match="send it in parts"):
                await producer.send_batch([Message("orders", "x" * 4_000_000)] * 2)

    run_once(work())


def test_who_asks_before_the_start_is_told_so() -> None:
    async def work() -> None:
        with pytest.raises(ClientClosed, match="start the client first"):
            await Producer("127.0.0.1:1").ask(Message("orders", "x"))

    run_once(work())


# ----------------------------------------------------------------------------------------- handling


@pytest.mark.parametrize("orderly", [False, True])
@pytest.mark.parametrize("batch_size", [1, 2])
def test_a_handler_that_leaves_a_cancellation_behind(
    site: Site, orderly: bool, batch_size: int
) -> None:
    """As libraries do that end a wait by cancelling their caller, and never take it back."""

    async def work() -> None:
        topic = f"Left-{orderly}-{batch_size}"
        seen: list[bytes] = []

        async def handle(given: Any) -> None:
            task = asyncio.current_task()
            assert task is not None
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(0)
            messages = given if batch_size > 1 else [given]
            seen.extend(message.body for message in messages)
            if b"escapes" in seen and seen.count(b"escapes") == 1:
                task.cancel()
                await asyncio.sleep(0)

        await send(site, topic, "one")
        async with PushConsumer(
            site.nameserver.address,
            group=f"g-{topic}",
            topics=topic,
            start_at="first",
            handler=handle,
            orderly=orderly,
            batch_size=batch_size,
            concurrency=1,
            suspend_ms=10,
        ):
            for body in (b"one", b"two", b"escapes", b"last"):
                if body != b"one":
                    await send(site, topic, body.decode())
                await until(lambda body=body: body in seen)  # type: ignore[misc]

    run_once(work())


@pytest.mark.parametrize("orderly", [False, True])
def test_a_loop_that_ends_all_its_tasks_ends_those_of_a_consumer(site: Site, orderly: bool) -> None:
    """As asyncio.run does when nobody closed the consumer, also where a handler catches that."""

    async def work() -> None:
        topic = f"Unclosed-{orderly}"
        entered = asyncio.Event()

        async def handle(message: ReceivedMessage) -> None:
            entered.set()
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(3600)

        await send(site, topic, "one")
        consumer = PushConsumer(
            site.nameserver.address,
            group=f"g-{topic}",
            topics=topic,
            start_at="first",
            handler=handle,
            orderly=orderly,
            close_ms=100,
        )
        own = asyncio.all_tasks()
        await consumer.start()
        await entered.wait()
        tasks = asyncio.all_tasks() - own
        for task in tasks:
            task.cancel()
        assert tasks
        await asyncio.wait(tasks)
        await consumer.close()

    run_once(work())


@pytest.mark.parametrize("orderly", [False, True])
def test_a_plain_handler_that_returns_a_coroutine_has_done_nothing(
    site: Site, orderly: bool, caplog: pytest.LogCaptureFixture
) -> None:
    async def handle(message: ReceivedMessage) -> None:
        raise AssertionError("nobody awaits it")

    async def work() -> None:
        topic = f"Lambda-{orderly}"
        await send(site, topic, "one")
        async with PushConsumer(
            site.nameserver.address,
            group=f"g-{topic}",
            topics=topic,
            start_at="first",
            handler=lambda message: handle(message),  # noqa: PLW0108  # what it is about
            orderly=orderly,
        ) as consumer:
            await until(lambda: consumer.failed_count)
            assert consumer.consumed_count == 0

    run_once(work())
    assert "pass the coroutine function itself" in caplog.text


def test_what_handlers_return() -> None:
    fine: list[object] = [None, True, 0, "", [], 5]
    assert [verdict_of(result) for result in fine] == [None] * 6
    assert isinstance(verdict_of(False), HandlerFailed)


def test_a_thread_that_hung_does_not_pass_for_a_quick_one(site: Site) -> None:
    released = threading.Event()

    async def work() -> None:
        await send(site, "Stuck", "one")
        async with PushConsumer(
            site.nameserver.address,
            group="stuck",
            topics="Stuck",
            start_at="first",
            handler=lambda message: released.wait(60) and None,
            consume_ms=50,
            close_ms=100,
        ) as consumer:
            await until(lambda: consumer.failed_count)
            assert consumer._size.count == 1

    try:
        run_once(work())
    finally:
        released.set()


@pytest.mark.parametrize("batch_size", [1, 2])
def test_two_handlers_of_one_portion_hang_and_the_first_does_not_listen(
    site: Site, batch_size: int
) -> None:
    async def work() -> None:
        topic = f"Twice-{batch_size}"
        calls: list[bytes] = []

        async def handle(given: Any) -> None:
            calls.append((given if batch_size == 1 else given[0]).body)
            try:
                await asyncio.sleep(3600)
            except asyncio.CancelledError:
                if len(calls) > 1:
                    raise

        async with Producer(site.nameserver.address) as producer:
            await producer.send_batch([Message(topic, f"{i}") for i in range(2 * batch_size)])
        consumer = PushConsumer(
            site.nameserver.address,
            group=f"g-{topic}",
            topics=topic,
            start_at="first",
            handler=handle,
            batch_size=batch_size,
            concurrency=1,
            consume_ms=50,
            close_ms=100,
        )
        consumer._size.took(0.000_010, 1)  # a quick handler gets many at once
        async with consumer:
            await until(lambda: consumer.failed_count == batch_size)
        assert calls[:2] == [b"0", b"%d" % batch_size]

    run_once(work())


def test_a_topic_that_nobody_may_read_is_no_secret(caplog: pytest.LogCaptureFixture) -> None:
    async def work() -> None:
        async with fake_cluster(a=stored) as cluster:
            cluster.perm = 2
            async with PullConsumer(cluster.nameserver, group="g", topics="orders"):
                pass

    run_once(work())
    assert "no queue of orders may be read" in caplog.text
