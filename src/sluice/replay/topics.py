"""This module makes the topics of a lane: as the original is, on the brokers that have it.

Where a cluster does not know the original, which is usual for one that tests are made on, the
recording says how many queues it had. A topic that is there already stays as it is.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Final

from sluice.client.administration.admin import Admin
from sluice.client.administration.topics import attribute_changes
from sluice.client.aio.requests import Producer
from sluice.errors import NoRoute, TopicMissing
from sluice.protocol.remoting_bodies import TopicConfig
from sluice.replay.manifest import Manifest
from sluice.replay.sending import Route

_WAIT_SECONDS: Final = 30.0
_POLL_SECONDS: Final = 0.05
_READ_AND_WRITE: Final = 6
# A replay sends plain messages, whatever the original was for: what decides how messages are kept
# is copied, not what kind of them a topic takes or how its queues are stored.
_COPIED: Final = frozenset({"dedup.window.ms", "message.ttl.ms", "reserve.time"})


async def prepare(admin: Admin, manifest: Manifest, targets: dict[str, str]) -> list[str]:
    """Make what is missing of the lane; the names of what was made."""
    made = []
    for topic, target in targets.items():
        if await _is_known(admin, target):
            continue
        if topic == target:
            raise TopicMissing(f"topic {topic} is not known; without --into-original it is made")
        for address, config in (await _configs(admin, manifest, topic)).items():
            kept = {n: v for n, v in config.attributes.items() if n in _COPIED}
            wanted = replace(config, name=target, perm=_READ_AND_WRITE, attributes={})
            await admin.put_topic(address, wanted, attribute_changes(kept))
        await _routed(admin, target)
        made.append(target)
    return made


async def _is_known(admin: Admin, topic: str) -> bool:
    try:
        await admin.route(topic)
    except TopicMissing:
        return False
    return True


async def _configs(admin: Admin, manifest: Manifest, topic: str) -> dict[str, TopicConfig]:
    """How the topic is set up, by the address of each broker."""
    try:
        return await admin.topic_configs(topic)
    except TopicMissing:
        queues = [queue.queue for queue in manifest.queues if queue.topic == topic]
        config = TopicConfig(topic, max(queues) + 1, max(queues) + 1)
        return dict.fromkeys(await admin.masters(), config)


async def _routed(admin: Admin, topic: str) -> None:
    """Brokers of others tell their nameservers a while later."""
    clock: Callable[[], float] = asyncio.get_running_loop().time
    until = clock() + _WAIT_SECONDS
    while not await _is_known(admin, topic):
        if clock() > until:
            raise NoRoute(f"topic {topic} was made and no nameserver knows it")
        await asyncio.sleep(_POLL_SECONDS)


async def routes_of(
    producer: Producer, manifest: Manifest, targets: dict[str, str]
) -> dict[int, Route]:
    """Where each recorded queue goes: to the queue of the same broker and number, else to one that
    is always the same, so that the order of a queue holds. Connections are open when this returns.
    """
    routes: dict[int, Route] = {}
    for topic, target in targets.items():
        publishing = await producer.publishing(target)
        for address in publishing.addresses.values():
            await producer.session.link(address)
        queues = sorted(publishing.queues)
        by_place = {(queue.broker_name, queue.queue_id): queue for queue in queues}
        for number, state in enumerate(manifest.queues):
            if state.topic == topic:
                other = queues[state.queue % len(queues)]
                routes[number] = Route(topic, by_place.get((state.broker, state.queue), other))
    return routes
