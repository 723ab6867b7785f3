"""What becomes of messages whose handler fails, and of queues while something else goes on."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from sluice.aio import PushConsumer
from sluice.client.core.messages import ReceivedMessage
from sluice.errors import LinkLost
from sluice.protocol.remoting_codes import RequestCode as Request
from tests.unit.broker.broker_kit import broker_config
from tests.unit.client.admin_kit import Site
from tests.unit.client.client_kit import send
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
        async with consumer:
            await until(lambda: consumer.consumed_count == 1)
        assert tries == [0, 1]
        assert site.broker.core.topics.get(f"%DLQ%g-{topic}") is None

    run_once(work())
