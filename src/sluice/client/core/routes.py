"""This module turns routes into the queues that a client writes or reads.

Queues are listed as RocketMQ's Java client lists them: brokers by name, queues by number. What has
no master or lacks the permission is not listed for writing.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import count
from typing import Final

from sluice.protocol.json_members import MessageQueue
from sluice.protocol.remoting_bodies import Route

PERM_READ: Final = 4
PERM_WRITE: Final = 2
MASTER: Final = 0
AUTO_CREATE_TOPIC: Final = "TBW102"


def brokers_of(route: Route) -> dict[str, dict[int, str]]:
    """The addresses of each broker, by its name and their number."""
    return {broker.name: dict(broker.addresses) for broker in route.brokers}


def write_queues(route: Route, topic: str, queue_count_max: int = 0) -> tuple[MessageQueue, ...]:
    """Where a topic can be written now; of a topic that is made by sending at most so many."""
    brokers = brokers_of(route)
    queues: list[MessageQueue] = []
    for data in sorted(route.queues):
        if not data.perm & PERM_WRITE or MASTER not in brokers.get(data.broker_name, {}):
            continue
        number = data.write_queue_count
        if queue_count_max:
            number = min(number, queue_count_max)
        queues += (MessageQueue(topic, data.broker_name, queue_id) for queue_id in range(number))
    return tuple(queues)


def read_queues(route: Route, topic: str) -> tuple[MessageQueue, ...]:
    """What of a topic can be read."""
    return tuple(
        MessageQueue(topic, data.broker_name, queue_id)
        for data in sorted(route.queues)
        if data.perm & PERM_READ
        for queue_id in range(data.read_queue_count)
    )


class Publishing:
    """The queues of a topic that a producer writes, in turn."""

    __slots__ = ("_next", "addresses", "broker_count", "queues", "route", "topic")

    def __init__(self, topic: str, route: Route, queues: tuple[MessageQueue, ...]) -> None:
        self.topic = topic
        self.route = route
        self.queues = queues
        brokers = brokers_of(route)
        self.addresses: Mapping[str, str] = {
            queue.broker_name: brokers[queue.broker_name][MASTER] for queue in queues
        }
        self.broker_count = len(self.addresses)
        self._next = count().__next__

    def turn(self) -> MessageQueue:
        """The next queue."""
        return self.queues[self._next() % len(self.queues)]


def read_address(addresses: Mapping[int, str], wanted: int = MASTER) -> str | None:
    """Where to read: the copy that is wanted, else the master, else any."""
    address = addresses.get(wanted) or addresses.get(MASTER)
    if address is None and addresses:
        address = addresses[min(addresses)]
    return address
