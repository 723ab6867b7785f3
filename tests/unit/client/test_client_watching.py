"""Observers of a producer, and who waits for a consumer's end."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from sluice.aio import Observer, Producer, PullConsumer, PushConsumer
from sluice.client.core.messages import Message, ReceivedMessage
from sluice.errors import ConfigError
from tests.unit.client.admin_kit import Site
from tests.unit.loops import run_once, until


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    site = Site()
    site.start()
    yield site
    site.stop()


def test_observers_see_sends_without_an_answer(site: Site) -> None:
    class Marking(Observer):
        def __init__(self) -> None:
            self.rows: list[tuple[Any, ...]] = []

        def sending(self, message: Message, message_id: str) -> Message:
            return message.with_properties({"by": "shop"})

        def sent(self, message: Message, message_id: str, *outcome: Any) -> None:
            self.rows.append((message.body, message_id, *outcome[:2]))

    async def work() -> None:
        marking = Marking()
        async with Producer(site.nameserver.address, observers=[marking]) as producer:
            await producer.send_oneway(Message("Watched-oneway", "seen"))
            with pytest.raises(ConfigError):
                await producer.send_oneway(Message("no topic", "refused"))
        async with PullConsumer(
            site.nameserver.address, group="watch", topics="Watched-oneway", start_at="first"
        ) as consumer:
            found: list[ReceivedMessage] = []
            while not found:
                found = await consumer.poll()
        (message,) = found
        assert message.properties["by"] == "shop"
        assert marking.rows[0] == (b"seen", message.message_id, None, None)
        assert marking.rows[1][0] == b"refused"
        assert isinstance(marking.rows[1][3], ConfigError)

    run_once(work())


def test_who_waits_for_the_end_of_a_consumer(site: Site) -> None:
    async def work() -> None:
        async with Producer(site.nameserver.address) as producer:
            await producer.send(Message("Waited", "x"))
        options: dict[str, Any] = {"group": "waited", "topics": "Waited", "start_at": "first"}
        consumer = PushConsumer(site.nameserver.address, handler=lambda message: None, **options)
        await consumer.start()
        assert consumer.client_id
        await until(lambda: any(queue.topic == "Waited" for queue in consumer.assignment()))
        assert await consumer.wait(0.01) is False
        waiting = asyncio.create_task(consumer.wait())
        await consumer.close()
        assert await waiting is True

    run_once(work())
