"""`close` comes back in bounded time, whatever handlers, brokers and observers do meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import pytest

from sluice import PullConsumer as BlockingPullConsumer
from sluice import PushConsumer as BlockingPushConsumer
from sluice.aio import Admin, Producer, PullConsumer, PushConsumer
from sluice.client.aio.observers import Observer
from sluice.client.core.messages import Message, ReceivedMessage, SendResult
from sluice.errors import ClientClosed, NoNameserver, SluiceError
from sluice.net import Connection
from sluice.protocol.remoting import RemotingCommand
from sluice.protocol.remoting_codes import RequestCode as Request
from tests.unit.client.admin_kit import Site
from tests.unit.client.client_kit import Answer, FakeCluster, fake_cluster, send, stored

# Far more than `close_ms`, and far less than what is waited for without a bound.
LIMIT_SECONDS = 30


@pytest.fixture
def site() -> Iterator[Site]:
    site = Site()
    site.start()
    yield site
    site.stop()


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(work)


async def closed(client: Producer | PullConsumer | PushConsumer) -> None:
    async with asyncio.timeout(LIMIT_SECONDS):
        await client.close()


async def arrived(cluster: FakeCluster, count: int) -> None:
    """Wait until the broker has so many sends."""
    async with asyncio.timeout(LIMIT_SECONDS):
        while cluster.brokers["a"].count(Request.SEND_MESSAGE_V2) < count:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


class Stuck:
    """A handler that does not come back before the test ends."""

    def __init__(self) -> None:
        self.release = threading.Event()
        self.entered = threading.Event()
        self.is_over = False

    def plain(self, message: ReceivedMessage) -> None:
        self.entered.set()
        self.release.wait(600)

    async def stubborn(self, message: ReceivedMessage) -> None:
        """Does not even listen when it is told to stop."""
        self.entered.set()
        while not self.is_over:
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(0.01)


@pytest.fixture
def stuck() -> Iterator[Stuck]:
    handler = Stuck()
    yield handler
    handler.release.set()


@pytest.mark.parametrize("kind", ["plain", "stubborn"])
@pytest.mark.parametrize("orderly", [False, True])
def test_a_handler_that_never_comes_back(
    site: Site, stuck: Stuck, kind: str, orderly: bool, caplog: pytest.LogCaptureFixture
) -> None:
    async def work() -> None:
        await send(site, "Stuck", "one", "two")
        consumer = PushConsumer(
            site.nameserver.address,
            group="stuck",
            topics="Stuck",
            start_at="first",
            handler=getattr(stuck, kind),
            orderly=orderly,
            concurrency=1,
            close_ms=200,
        )
        try:
            async with asyncio.timeout(LIMIT_SECONDS):
                await consumer.start()
            assert await asyncio.to_thread(stuck.entered.wait, LIMIT_SECONDS)
            await closed(consumer)
        finally:  # also where one of them fails: the loop would wait for it for ever
            stuck.is_over = True
            stuck.release.set()
        # Once they are back their workers end too, or the end of the loop would wait for ever.
        async with asyncio.timeout(LIMIT_SECONDS):
            while len(asyncio.all_tasks()) > 1:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert "still with handlers" in caplog.text
        # It was not done, so the next one gets it.
        seen: asyncio.Queue[bytes] = asyncio.Queue()

        async def handle(message: ReceivedMessage) -> None:
            await seen.put(message.body)

        async with (
            asyncio.timeout(LIMIT_SECONDS),
            PushConsumer(
                site.nameserver.address,
                group="stuck",
                topics="Stuck",
                handler=handle,
                orderly=orderly,
                rebalance_ms=200,
            ),
        ):
            assert {await seen.get(), await seen.get()} == {b"one", b"two"}

    run(work())


def test_the_blocking_face(site: Site, stuck: Stuck) -> None:
    run(send(site, "Face", "one"))
    consumer = BlockingPushConsumer(
        site.nameserver.address,
        group="face",
        topics="Face",
        start_at="first",
        handler=stuck.plain,
        close_ms=200,
    )
    consumer.start()
    assert stuck.entered.wait(LIMIT_SECONDS)
    closing = threading.Thread(target=consumer.close)
    closing.start()
    closing.join(LIMIT_SECONDS)
    assert not closing.is_alive()
    assert consumer.wait(0)
    consumer.close()  # twice does no harm


def test_sends_that_nobody_answers() -> None:
    """They end with an error: nothing is dropped in silence."""

    async def work() -> None:
        async with fake_cluster(a=lambda _: None) as cluster:
            producer = Producer(cluster.nameserver, send_ms=600_000, close_ms=200)
            await producer.start()
            sends = [producer.send_async(Message("orders", f"{i}")) for i in range(10)]
            batch = asyncio.ensure_future(producer.send_batch([Message("orders", "b")]))
            await arrived(cluster, 10)
            await closed(producer)
            results = await asyncio.gather(*sends, batch, return_exceptions=True)
            assert all(isinstance(result, SluiceError) for result in results), results
            with pytest.raises(ClientClosed):
                await producer.send(Message("orders", "late"))
            await closed(producer)

    run(work())


def test_a_trace_that_cannot_be_sent() -> None:
    async def work() -> None:
        async with fake_cluster(a=stored) as cluster:
            producer = Producer(cluster.nameserver, trace=True, trace_topic="orders", close_ms=500)
            await producer.start()
            async with asyncio.timeout(LIMIT_SECONDS):
                for _ in range(20):
                    sends = [producer.send(Message("orders", "x")) for _ in range(100)]
                    await asyncio.gather(*sends)
            cluster.brokers["a"].answer = lambda _: None
            await closed(producer)

    run(work())


class Hanging(Observer):
    """An observer that never ends, and one that raises whenever it is asked."""

    async def close(self) -> None:
        await asyncio.sleep(600)


def test_an_observer_that_hangs() -> None:
    async def work() -> None:
        async with fake_cluster(a=stored) as cluster:
            producer = Producer(cluster.nameserver, observers=[Hanging()], close_ms=200)
            await producer.start()
            await producer.send(Message("orders", "x"))
            await closed(producer)

    run(work())


def silence(connection: Connection, command: RemotingCommand) -> None:
    """A broker that takes a request and says nothing."""


@pytest.mark.parametrize("make", [PushConsumer, PullConsumer])
def test_a_broker_that_says_nothing_any_more(
    site: Site,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    make: Callable[..., PushConsumer | PullConsumer],
) -> None:
    """What could not be committed comes again, and the log says so."""

    async def handle(message: ReceivedMessage) -> None:
        pass

    async def work() -> None:
        await send(site, "Mute", "one")
        more: dict[str, Any] = {"handler": handle} if make is PushConsumer else {}
        consumer = make(
            site.nameserver.address,
            group=f"mute-{make.__name__}",
            topics="Mute",
            start_at="first",
            close_ms=300,
            request_ms=600_000,
            **more,
        )
        await consumer.start()
        if isinstance(consumer, PullConsumer):
            async with asyncio.timeout(LIMIT_SECONDS):
                while not await consumer.poll():
                    pass
        for code in (Request.UPDATE_CONSUMER_OFFSET, Request.UNREGISTER_CLIENT):
            monkeypatch.setitem(site.broker.api.handlers, code, silence)
        await closed(consumer)
        assert "closed without the last commit: no answer within close_ms" in caplog.text

    run(work())


def test_who_iterates_ends_when_the_consumer_is_closed(site: Site) -> None:
    run(send(site, "Ends", "one"))
    consumer = BlockingPullConsumer(
        site.nameserver.address, group="ends", topics="Ends", start_at="first"
    )
    consumer.start()
    first = threading.Event()
    seen: list[bytes] = []

    def read() -> None:
        for message in consumer:
            seen.append(message.body)
            first.set()

    reader = threading.Thread(target=read)
    reader.start()
    assert first.wait(LIMIT_SECONDS)
    consumer.close()
    reader.join(LIMIT_SECONDS)
    assert not reader.is_alive()
    assert seen == [b"one"]


def test_who_could_not_start_can_be_closed() -> None:
    async def work() -> None:
        producer = Producer("127.0.0.1:1")
        await closed(producer)
        consumer = PullConsumer("127.0.0.1:1", group="g", topics="t", connect_ms=200)
        with pytest.raises(NoNameserver):
            await consumer.start()
        await closed(consumer)
        admin = Admin("127.0.0.1:1")
        await admin.close()

    run(work())


def test_every_result_is_shown_before_observers_end() -> None:
    """A send that is answered while the producer closes is seen like any other."""

    class Seen(Observer):
        def __init__(self) -> None:
            self.events: list[str] = []

        def sent(
            self,
            message: Message,
            message_id: str,
            result: SendResult | None,
            error: SluiceError | None,
            took_ms: float,
        ) -> None:
            self.events.append("sent")

        async def close(self) -> None:
            self.events.append("close")

    async def work() -> None:
        gate = asyncio.Event()

        def late(command: RemotingCommand) -> Answer:
            return stored(command) if gate.is_set() else None

        seen = Seen()
        async with fake_cluster(a=late) as cluster:
            producer = Producer(cluster.nameserver, observers=[seen], send_ms=1000, tries_max=50)
            await producer.start()
            sent = asyncio.ensure_future(producer.send(Message("orders", "x"), timeout_ms=500))
            await arrived(cluster, 1)
            await closed(producer)
            with pytest.raises(SluiceError):
                await sent
            assert seen.events == ["sent", "close"]

    run(work())
