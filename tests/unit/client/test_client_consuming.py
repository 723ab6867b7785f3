"""Consumers against a whole broker: handlers, order, groups, places, and what goes wrong."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from sluice.aio import Observer, Producer, PullConsumer, PushConsumer
from sluice.client.core.messages import Message, ReceivedMessage
from sluice.errors import ClientClosed, HandlerFailed, HandlerHung
from sluice.net import Connection
from sluice.protocol.remoting import RemotingCommand
from sluice.protocol.remoting_codes import RequestCode as Request
from tests.unit.broker.broker_kit import broker_config
from tests.unit.client.admin_kit import Site
from tests.unit.client.client_kit import Seen, send
from tests.unit.loops import Run, both_loops, run_once, until

# A message that is given back comes again after the third level, which is ten seconds by default.
LEVELS = " ".join(["1s"] * 18)


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    store = replace(broker_config().store, delay_levels=LEVELS)
    site = Site(store=store)
    site.start()
    yield site
    site.stop()


# ----------------------------------------------------------------------------------------- handlers


@both_loops
@pytest.mark.parametrize("kind", ["plain", "soon", "batch"])
def test_every_message_is_handled_once(site: Site, run: Run, kind: str) -> None:
    async def work() -> None:
        topic = f"Handled-{kind}-{'uv' if 'uvloop' in repr(asyncio.get_running_loop()) else 'aio'}"
        wanted = [f"m{i}" for i in range(100)]
        await send(site, topic, *wanted)
        seen = Seen()
        consumer = PushConsumer(
            site.nameserver.address,
            group=f"g-{topic}",
            topics=topic,
            start_at="first",
            handler=getattr(seen, kind),
            batch_size=10 if kind == "batch" else 1,
        )
        async with consumer:
            await until(lambda: len(seen.bodies) >= 100)
        assert sorted(seen.bodies) == sorted(wanted)
        assert consumer.consumed_count == 100
        # All of it is committed: a second consumer of the group has nothing to do.
        again = Seen()
        async with (
            PushConsumer(
                site.nameserver.address, group=f"g-{topic}", topics=topic, handler=again.plain
            ),
            Producer(site.nameserver.address) as producer,
        ):
            await producer.send(Message(topic, "last"))
            await until(lambda: again.bodies)
        assert again.bodies == ["last"]

    run(work())


def test_tags(site: Site) -> None:
    async def work() -> None:
        for tag in "ABC":
            await send(site, "Tagged", f"{tag}1", f"{tag}2", tags=tag)
        seen = Seen()
        async with PushConsumer(
            site.nameserver.address,
            group="tags",
            topics={"Tagged": "A || C"},
            start_at="first",
            handler=seen.soon,
        ):
            await until(lambda: len(seen.bodies) >= 4)
        assert sorted(seen.bodies) == ["A1", "A2", "C1", "C2"]

    run_once(work())


@pytest.mark.parametrize("kind", ["raises", "false", "thread"])
def test_what_a_handler_fails_with_comes_again(site: Site, kind: str) -> None:
    async def work() -> None:
        topic = f"Failing-{kind}"
        await send(site, topic, "good", "bad", "fine")
        tries: list[tuple[str, int, str]] = []

        def handle(message: ReceivedMessage) -> bool:
            tries.append((message.body.decode(), message.reconsume_times, message.topic))
            if message.body == b"bad" and message.reconsume_times < 2:
                if kind == "false":
                    return False
                raise ValueError("not yet")
            return True

        async def handle_soon(message: ReceivedMessage) -> bool:
            return handle(message)

        async with PushConsumer(
            site.nameserver.address,
            group=f"g-{topic}",
            topics=topic,
            start_at="first",
            handler=handle if kind == "thread" else handle_soon,
        ) as consumer:
            await until(lambda: ("bad", 2, topic) in tries)
            await until(lambda: consumer.consumed_count == 3)
        assert Counter(body for body, _, _ in tries) == {"good": 1, "fine": 1, "bad": 3}
        assert {row[2] for row in tries} == {topic}
        assert consumer.failed_count == 2

    run_once(work())


@pytest.mark.parametrize("error", [SystemExit, asyncio.CancelledError, KeyboardInterrupt])
@pytest.mark.parametrize("kind", ["coroutine", "thread"])
def test_no_error_of_a_handler_ends_the_consumer(
    site: Site, kind: str, error: type[BaseException]
) -> None:
    async def work() -> None:
        topic = f"Rude-{kind}-{error.__name__}"
        await send(site, topic, "rude", *(f"m{i}" for i in range(10)))
        seen: list[str] = []

        def handle(message: ReceivedMessage) -> None:
            if message.body == b"rude" and not message.reconsume_times:
                raise error
            seen.append(message.body.decode())

        async def handle_soon(message: ReceivedMessage) -> None:
            handle(message)

        async with PushConsumer(
            site.nameserver.address,
            group=f"g-{topic}",
            topics=topic,
            start_at="first",
            handler=handle if kind == "thread" else handle_soon,
            concurrency=1,
        ):
            await until(lambda: len(seen) == 11)
        assert sorted(seen) == sorted(["rude", *(f"m{i}" for i in range(10))])

    run_once(work())


def test_an_observer_that_raises_is_not_in_the_way(site: Site) -> None:
    class Broken(Observer):
        def consuming(self, group: str, messages: list[ReceivedMessage]) -> object:
            raise RuntimeError("before")

        def consumed(self, *_: object) -> None:
            raise RuntimeError("after")

    async def work() -> None:
        await send(site, "Broken", "m0", "m1")
        seen = Seen()
        for number, handler in enumerate((seen.plain, seen.soon)):
            seen.bodies.clear()
            async with PushConsumer(
                site.nameserver.address,
                group=f"broken-{number}",
                topics="Broken",
                start_at="first",
                handler=handler,
                observers=[Broken()],
            ):
                await until(lambda: len(seen.bodies) == 2)

    run_once(work())


def test_after_the_last_try_it_is_a_dead_letter(site: Site) -> None:
    async def work() -> None:
        await send(site, "Doomed", "bad")
        tries: list[int] = []

        def handle(message: ReceivedMessage) -> None:
            tries.append(message.reconsume_times)
            raise ValueError("never")

        async with (
            PushConsumer(
                site.nameserver.address,
                group="doomed",
                topics="Doomed",
                start_at="first",
                handler=handle,
                tries_max=1,
            ),
            PullConsumer(
                site.nameserver.address, group="look", topics="%DLQ%doomed", start_at="first"
            ) as dead,
        ):
            found: list[ReceivedMessage] = []
            while not found:
                found = await dead.poll()
        assert [message.body for message in found] == [b"bad"]
        assert tries == [0, 1]

    run_once(work())


@pytest.mark.parametrize("kind", ["coroutine", "thread"])
def test_a_handler_that_hangs_is_given_up(site: Site, kind: str) -> None:
    """Its message goes back; messages behind it are handled; closing takes bounded time."""
    released = threading.Event()

    async def work() -> None:
        topic = f"Hanging-{kind}"
        await send(site, topic, "hang", *(f"m{i}" for i in range(20)))
        seen: list[str] = []

        async def hang_soon(message: ReceivedMessage) -> None:
            if message.body == b"hang" and not message.reconsume_times:
                await asyncio.sleep(3600)
            seen.append(message.body.decode())

        def hang(message: ReceivedMessage) -> None:
            if message.body == b"hang" and not message.reconsume_times:
                released.wait()
                return
            seen.append(message.body.decode())

        async with PushConsumer(
            site.nameserver.address,
            group=f"g-{topic}",
            topics=topic,
            start_at="first",
            handler=hang if kind == "thread" else hang_soon,
            consume_ms=400,
            concurrency=2,
            close_ms=2_000,
        ):
            await until(lambda: "hang" in seen)
            await until(lambda: len(seen) == 21)
        assert sorted(seen) == sorted(["hang", *(f"m{i}" for i in range(20))])

    try:
        run_once(work())
    finally:
        released.set()


def test_a_slow_handler_bounds_what_is_in_memory(site: Site) -> None:
    async def work() -> None:
        async with Producer(site.nameserver.address) as producer:
            await producer.send_batch([Message("Slow", f"m{i}") for i in range(500)])
        gate = asyncio.Event()
        seen = Seen()

        async def wait(message: ReceivedMessage) -> None:
            await gate.wait()
            await seen.soon(message)

        async with PushConsumer(
            site.nameserver.address,
            group="slow",
            topics="Slow",
            start_at="first",
            handler=wait,
            queue_count_max=64,
            concurrency=4,
        ) as consumer:
            lanes = consumer.lanes.values()
            await until(lambda: any(lane.process.unfinished_count >= 64 for lane in lanes))
            await asyncio.sleep(0.1)
            assert max(lane.process.unfinished_count for lane in lanes) < 64 + 32
            assert max(lane.process.under_way for lane in lanes) <= 4
            gate.set()
            await until(lambda: len(seen.bodies) == 500)
        assert len(set(seen.bodies)) == 500

    run_once(work())


def test_slow_handlers_cause_no_redelivery(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """However slow they are and however often queues are divided anew: each message comes once.

    When a member joins, only what was with handlers of the queues that move may come twice, never
    what waited in memory.
    """
    given_back: list[RemotingCommand] = []
    plain = site.broker.api.handlers[Request.CONSUMER_SEND_MSG_BACK]

    def send_back(connection: Connection, command: RemotingCommand) -> None:
        given_back.append(command)
        plain(connection, command)

    monkeypatch.setitem(site.broker.api.handlers, Request.CONSUMER_SEND_MSG_BACK, send_back)
    handled: Counter[str] = Counter()

    async def handle(message: ReceivedMessage) -> None:
        await asyncio.sleep(0.02)
        handled[message.body.decode()] += 1

    def member(**options: Any) -> PushConsumer:
        return PushConsumer(
            site.nameserver.address,
            group="storm",
            topics="Storm",
            start_at="first",
            handler=handle,
            concurrency=4,
            rebalance_ms=50,
            commit_ms=50,
            heartbeat_ms=200,
            **options,
        )

    async def work() -> None:
        async with Producer(site.nameserver.address) as producer:
            for queue in await producer.queues("Storm"):
                batch = [Message("Storm", f"{queue.queue_id}-{i}") for i in range(75)]
                await producer.send_batch(batch, queue=queue)
        async with member() as first:
            await until(lambda: len(handled) >= 60)
            assert handled.total() == len(handled)
            async with member() as second:
                await until(lambda: second.lanes and len(first.lanes) <= 3)
                moved = len(second.lanes)
                await until(lambda: len(handled) == 300)
        assert handled.total() - len(handled) <= 4 * moved + 4
        assert given_back == []

    run_once(work())


@pytest.mark.parametrize("kind", ["coroutine", "thread"])
def test_in_order_and_a_failed_one_first_again(site: Site, kind: str) -> None:
    async def work() -> None:
        topic = f"Ordered-{kind}"
        async with Producer(site.nameserver.address) as producer:
            for i in range(60):
                await producer.send(Message(topic, f"k{i % 3}:{i}", sharding_key=f"k{i % 3}"))
        seen: dict[str, list[int]] = defaultdict(list)
        failed: set[str] = set()

        def handle(message: ReceivedMessage) -> None:
            text = message.body.decode()
            key, _, number = text.partition(":")
            if int(number) in (9, 10) and text not in failed:
                failed.add(text)
                raise ValueError("once")
            seen[key].append(int(number))

        async def handle_soon(message: ReceivedMessage) -> None:
            handle(message)

        async with PushConsumer(
            site.nameserver.address,
            group=f"g-{topic}",
            topics=topic,
            start_at="first",
            handler=handle if kind == "thread" else handle_soon,
            orderly=True,
            suspend_ms=10,
        ):
            await until(lambda: sum(map(len, seen.values())) == 60)
        assert len(failed) == 2
        assert dict(seen) == {f"k{k}": list(range(k, 60, 3)) for k in range(3)}

    run_once(work())


def test_closing_commits_what_is_done_and_nothing_more(site: Site) -> None:
    async def work() -> None:
        async with Producer(site.nameserver.address) as producer:
            await producer.send_batch([Message("Rest", f"m{i}") for i in range(40)])
        first = Seen()
        stopped = asyncio.Event()

        async def few(message: ReceivedMessage) -> None:
            if len(first.bodies) >= 10:
                stopped.set()
                await asyncio.sleep(3600)
            await first.soon(message)

        consumer = PushConsumer(
            site.nameserver.address,
            group="rest",
            topics="Rest",
            start_at="first",
            handler=few,
            concurrency=1,
            close_ms=100,
        )
        async with consumer:
            await stopped.wait()
        second = Seen()
        async with PushConsumer(
            site.nameserver.address, group="rest", topics="Rest", handler=second.soon
        ):
            await until(lambda: len(second.bodies) >= 30)
        assert first.bodies == [f"m{i}" for i in range(10)]
        assert sorted(second.bodies) == sorted(f"m{i}" for i in range(10, 40))

    run_once(work())


def test_pausing(site: Site) -> None:
    async def work() -> None:
        seen = Seen()
        async with (
            Producer(site.nameserver.address) as producer,
            PushConsumer(
                site.nameserver.address,
                group="paused",
                topics="Paused",
                start_at="first",
                handler=seen.soon,
                pull_wait_ms=100,
            ) as consumer,
        ):
            await producer.send(Message("Paused", "one"))
            await until(lambda: seen.bodies == ["one"])
            consumer.pause()
            await producer.send(Message("Paused", "two"))
            await asyncio.sleep(0.3)
            assert seen.bodies == ["one"]
            consumer.resume()
            await until(lambda: seen.bodies == ["one", "two"])

    run_once(work())


class Verdicts(Observer):
    """What observers are told of handlers: the error, and what was raised."""

    def __init__(self) -> None:
        self.errors: list[BaseException | None] = []
        self.begun = 0

    def consuming(self, group: str, messages: list[ReceivedMessage]) -> object:
        self.begun += 1
        return None

    def consumed(
        self,
        group: str,
        messages: list[ReceivedMessage],
        context: object,
        error: BaseException | None,
        took_ms: float,
    ) -> None:
        self.errors.append(error)


@pytest.mark.parametrize("kind", ["plain", "soon"])
@pytest.mark.parametrize("orderly", [False, True])
def test_observers_learn_what_became_of_a_handler(site: Site, kind: str, orderly: bool) -> None:
    """One that raised, one that hung, one that was left behind: none is begun and never ended."""
    release = threading.Event()

    def plain(message: ReceivedMessage) -> None:
        if message.body == b"raise":
            raise ValueError("as the test wants it")
        release.wait(60)

    async def soon(message: ReceivedMessage) -> None:
        if message.body == b"raise":
            raise ValueError("as the test wants it")
        await asyncio.sleep(60)

    async def outcome(topic: str, body: str, **options: Any) -> list[BaseException | None]:
        await send(site, topic, body)
        verdicts = Verdicts()
        handler = plain if kind == "plain" else soon
        async with PushConsumer(
            site.nameserver.address,
            group=f"v-{topic}",
            topics=topic,
            start_at="first",
            handler=handler,
            orderly=orderly,
            observers=[verdicts],
            close_ms=200,
            suspend_ms=60_000,
            **options,
        ):
            await until(lambda: verdicts.errors or (verdicts.begun and "close" in topic))
        assert len(verdicts.errors) == verdicts.begun
        return verdicts.errors[:1]

    async def work() -> None:
        name = f"{kind}-{orderly}"
        (raised,) = await outcome(f"raise-{name}", "raise")
        assert isinstance(raised, HandlerFailed)
        assert isinstance(raised.__cause__, ValueError)
        (hung,) = await outcome(f"hang-{name}", "hang", consume_ms=100)
        assert isinstance(hung, HandlerHung)
        assert "consume_ms" in str(hung)
        (left,) = await outcome(f"close-{name}", "hang")
        assert isinstance(left, ClientClosed)

    try:
        run_once(work())
    finally:
        release.set()


def test_observers_see_handlers(site: Site) -> None:
    class Watch(Observer):
        def __init__(self) -> None:
            self.rows: list[tuple[str, object, bool]] = []

        def consuming(self, group: str, messages: list[ReceivedMessage]) -> object:
            return messages[0].message_id

        def consumed(
            self,
            group: str,
            messages: list[ReceivedMessage],
            context: object,
            error: BaseException | None,
            took_ms: float,
        ) -> None:
            self.rows.append((group, context == messages[0].message_id, error is None))

    async def work() -> None:
        await send(site, "Watched", "a")
        for number, orderly in enumerate((False, True)):
            for handler in (Seen().plain, Seen().soon):
                watch = Watch()
                group = f"w{number}-{handler.__name__}"
                async with PushConsumer(
                    site.nameserver.address,
                    group=group,
                    topics="Watched",
                    start_at="first",
                    handler=handler,
                    orderly=orderly,
                    observers=[watch],
                ):
                    await until(lambda watch=watch: watch.rows)  # type: ignore[misc]
                assert watch.rows == [(group, True, True)]

    run_once(work())
