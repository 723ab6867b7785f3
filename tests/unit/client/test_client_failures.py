"""What becomes of messages whose handler fails, and of queues while something else goes on."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace

import orjson
import pytest

from sluice.aio import Producer, PushConsumer
from sluice.client.core.messages import Message, ReceivedMessage
from sluice.errors import LinkLost
from sluice.protocol.json_members import queue_keys
from sluice.protocol.remoting import RemotingCommand
from sluice.protocol.remoting_codes import RequestCode as Request
from tests.unit.broker.broker_kit import broker_config
from tests.unit.client.admin_kit import Site
from tests.unit.client.client_kit import Seen, send
from tests.unit.loops import run_once, until


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    store = replace(broker_config().store, delay_levels=" ".join(["1s"] * 18))
    site = Site(store=store)
    site.start()
    yield site
    site.stop()


@pytest.mark.parametrize("way", ["back", "resent"])
def test_a_message_that_is_tried_for_ever_is_given_back(
    site: Site, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Brokers know no limit of -1: Sluice's refuse it, Apache's make a dead letter at once."""

    async def work() -> None:
        topic = f"Stubborn-{way}"
        await send(site, topic, "late")
        tries: list[int] = []

        async def handle(message: ReceivedMessage) -> bool:
            tries.append(message.reconsume_times)
            return message.reconsume_times >= 1

        consumer = PushConsumer(
            site.nameserver.address,
            group=f"g-{topic}",
            topics=topic,
            start_at="first",
            handler=handle,
            tries_max=-1,
        )
        done = consumer.session.done

        async def not_back(address: str, code: int, *arguments: object, **more: object) -> object:
            if code == Request.CONSUMER_SEND_MSG_BACK:
                raise LinkLost("as the test wants it")
            return await done(address, code, *arguments, **more)  # type: ignore[arg-type]

        if way == "resent":
            monkeypatch.setattr(consumer.session, "done", not_back)
            monkeypatch.setattr("sluice.client.aio.push._AGAIN_SECONDS", 0.05)
        async with consumer:
            await until(lambda: consumer.consumed_count == 1)
        assert tries == [0, 1]
        assert site.broker.core.topics.get(f"%DLQ%g-{topic}") is None

    run_once(work())


def test_a_nameserver_that_has_forgotten_a_topic_stops_nobody(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was started anew, and brokers tell it of their topics within half a minute."""

    async def work() -> None:
        await send(site, "Forgotten", "before")
        seen = Seen()
        async with PushConsumer(
            site.nameserver.address,
            group="forgotten",
            topics="Forgotten",
            start_at="first",
            pull_wait_ms=100,
            handler=seen.soon,
        ) as consumer:
            await until(lambda: seen.bodies == ["before"])
            own = [queue for queue in consumer.lanes if queue.topic == "Forgotten"]
            with monkeypatch.context() as patch:
                session = consumer.session

                async def forgotten(*_: object) -> RemotingCommand:
                    return RemotingCommand(17, 0, remark="no such topic")

                patch.setattr(session, "ask_nameserver", forgotten)
                session._routes.clear()
                assert await consumer.rebalance() is False
                assert [queue for queue in consumer.lanes if queue.topic == "Forgotten"] == own
                await send(site, "Forgotten", "meanwhile")
                await until(lambda: seen.bodies == ["before", "meanwhile"])
            # Where the broker says so too, the topic is gone.
            delete = ("deleteTopic", "-c", "DefaultCluster", "-t", "Forgotten")
            await asyncio.to_thread(site.ok, *delete)
            while any(queue.topic == "Forgotten" for queue in consumer.lanes):
                consumer.session._routes.clear()
                await consumer.rebalance()
                await asyncio.sleep(0.01)

    run_once(work())


def test_an_ordered_queue_that_waits_for_its_turn_is_paused_too(site: Site) -> None:
    async def work() -> None:
        async with Producer(site.nameserver.address) as producer:
            await producer.send(Message("Turns", "x"))
            await until(lambda: site.broker.core.topics.get("Turns"))
            for queue in await producer.queues("Turns"):
                await producer.send(Message("Turns", f"{queue.queue_id}"), queue=queue)
        entered, release, count = asyncio.Event(), asyncio.Event(), 0

        async def handle(message: ReceivedMessage) -> None:
            nonlocal count
            count += 1
            entered.set()
            await release.wait()

        async with PushConsumer(
            site.nameserver.address,
            group="turns",
            topics="Turns",
            start_at="first",
            handler=handle,
            orderly=True,
            concurrency=1,
        ) as consumer:
            await entered.wait()
            lanes = list(consumer.lanes.values())
            await until(lambda: sum(lane.process.unfinished_count for lane in lanes) == 5)
            consumer.pause()
            release.set()
            await until(lambda: consumer.consumed_count == 1)
            await asyncio.sleep(0.05)  # nobody tells that a handler was not called
            assert count == 1
            consumer.resume()
            await until(lambda: consumer.consumed_count == 5)

    run_once(work())


def test_a_reset_does_not_wait_for_a_pull_that_is_held(site: Site) -> None:
    """As brokers before Apache's 5.1 tell it: the consumer is told, and the pull stays."""

    async def work() -> None:
        await send(site, "Held", "m0", "m1")
        seen = Seen()
        async with PushConsumer(
            site.nameserver.address,
            group="held",
            topics="Held",
            start_at="first",
            handler=seen.soon,
            pull_wait_ms=3_600_000,
        ) as consumer:
            await until(lambda: len(seen.bodies) == 2)
            lanes = {q: lane for q, lane in consumer.lanes.items() if q.topic == "Held"}
            held = [lane.task for lane in lanes.values()]
            body = orjson.dumps({"offsetTable": queue_keys((queue, 0) for queue in lanes)})
            code = Request.RESET_CONSUMER_CLIENT_OFFSET
            command = RemotingCommand(code, 0, ext={"group": "held", "topic": "Held"}, body=body)
            (link,) = [each for each in consumer.session.links.values() if each.is_open][:1]
            consumer.session.requests[code](link, command)
            await until(lambda: len(seen.bodies) == 4)
            assert all(task is not None and task.done() for task in held)

    run_once(work())
