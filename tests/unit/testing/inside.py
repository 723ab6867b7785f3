"""This module looks into a broker of a test, for what no client could ask."""

from __future__ import annotations

import asyncio

from sluice import PushConsumer
from sluice.client.sync.loop_thread import loop_thread
from sluice.testing import LiveBroker

QueueName = tuple[str, int]


def lock_owners(broker: LiveBroker, group: str) -> dict[QueueName, str]:
    """Who has which queue of a group, by locks that hold now."""

    def find() -> dict[QueueName, str]:
        core = broker._broker.core
        life_ms = core.config.queue_lock_ms
        return {
            (topic, queue_id): client_id
            for (name, topic, queue_id), (client_id, since_ms) in core.locks._locks.items()
            if name == group and core.now_ms() - since_ms <= life_ms
        }

    return broker.host.call(find)


def members(broker: LiveBroker, group: str) -> set[str]:
    """The clients of a consumer group that the broker knows."""
    return broker.readers().groups.get(group, set())


def expire_clients(broker: LiveBroker) -> None:
    """What the broker does every ten seconds."""

    def expire() -> None:
        core = broker._broker.core
        core.clients.expire(core.now_ms())
        core.locks.expire(core.now_ms())

    broker.host.call(expire)


def held_pulls(broker: LiveBroker) -> set[int]:
    """The pulls that wait at the broker, each by a number of its own."""

    def find() -> set[int]:
        return {id(read) for reads in broker._broker.core.polls._held.values() for read in reads}

    return broker.host.call(find)


def abandon(consumer: PushConsumer) -> None:
    """End a consumer as if its process was killed: it leaves without a word."""

    async def cut() -> None:
        session = consumer._aio.session
        session._state = "closed"
        tasks = list(session._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for link in session.links.values():
            await link.close()
        consumer._aio.lanes.clear()

    loop_thread().run(cut())
