"""This module divides the queues of a topic among the members of a group, as RocketMQ's clients do.

All members compute it for themselves and must come to the same result, also those in Java: given
the same sorted queues and the same sorted members. A test compares each strategy with Java's.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from typing import Final

from sluice.errors import ConfigError
from sluice.protocol.json_members import MessageQueue

# (member, members, queues) -> the member's queues; members and queues are sorted.
Strategy = Callable[[str, Sequence[str], Sequence[MessageQueue]], list[MessageQueue]]

_VIRTUAL_NODES: Final = 10


def averagely(
    member: str, members: Sequence[str], queues: Sequence[MessageQueue]
) -> list[MessageQueue]:
    """Neighbours stay together; the first members get one more where it does not come out even."""
    if member not in members:
        return []
    place = members.index(member)
    share, rest = divmod(len(queues), len(members))
    start = place * share + min(place, rest)
    return list(queues[start : start + share + (place < rest)])


def averagely_by_circle(
    member: str, members: Sequence[str], queues: Sequence[MessageQueue]
) -> list[MessageQueue]:
    """One by one, round and round."""
    if member not in members:
        return []
    return list(queues[members.index(member) :: len(members)])


def by_config(chosen: Iterable[MessageQueue]) -> Strategy:
    """Always these, whoever else there is; the members' lists have to fit together."""
    fixed = list(chosen)

    def allocate(
        member: str, members: Sequence[str], queues: Sequence[MessageQueue]
    ) -> list[MessageQueue]:
        known = set(queues)
        return [queue for queue in fixed if queue in known]

    return allocate


def by_machine_room(rooms: Iterable[str]) -> Strategy:
    """Only queues of brokers that are called room@name, of these rooms."""
    wanted = frozenset(rooms)

    def allocate(
        member: str, members: Sequence[str], queues: Sequence[MessageQueue]
    ) -> list[MessageQueue]:
        if member not in members:
            return []
        place = members.index(member)
        near = []
        for queue in queues:
            room, mark, name = queue.broker_name.partition("@")
            if mark and room in wanted and name and "@" not in name:
                near.append(queue)
        share, rest = divmod(len(near), len(members))
        mine = near[place * share : (place + 1) * share]
        if place < rest:
            mine.append(near[place + share * len(members)])
        return mine

    return allocate


def machine_room_nearby(
    inner: Strategy,
    room_of_broker: Callable[[MessageQueue], str],
    room_of_member: Callable[[str], str],
) -> Strategy:
    """Queues go to members of their own room; those of a room without members, to everybody."""

    def room(name: str, what: object) -> str:
        if not name:
            raise ConfigError(f"no machine room is known for {what}")
        return name

    def allocate(
        member: str, members: Sequence[str], queues: Sequence[MessageQueue]
    ) -> list[MessageQueue]:
        if member not in members:
            return []
        queues_of: dict[str, list[MessageQueue]] = {}
        for queue in queues:
            queues_of.setdefault(room(room_of_broker(queue), queue), []).append(queue)
        members_of: dict[str, list[str]] = {}
        for other in members:
            members_of.setdefault(room(room_of_member(other), other), []).append(other)
        own = room_of_member(member)
        mine: list[MessageQueue] = []
        if own in queues_of:
            mine += inner(member, members_of[own], queues_of[own])
        for name in sorted(queues_of):
            if name not in members_of:
                mine += inner(member, members, queues_of[name])
        return mine

    return allocate


def consistent_hash(virtual_nodes: int = _VIRTUAL_NODES) -> Strategy:
    """Few queues move when a member comes or goes."""

    def allocate(
        member: str, members: Sequence[str], queues: Sequence[MessageQueue]
    ) -> list[MessageQueue]:
        if member not in members:
            return []
        ring = {
            _ring_place(f"{other}-{number}"): other
            for other in members
            for number in range(virtual_nodes)
        }
        places = sorted(ring)
        if not places:
            return []

        def owner(queue: MessageQueue) -> str:
            text = (
                f"MessageQueue [topic={queue.topic}, brokerName={queue.broker_name}, "
                f"queueId={queue.queue_id}]"
            )
            at = bisect_left(places, _ring_place(text))
            return ring[places[at if at < len(places) else 0]]

        return [queue for queue in queues if owner(queue) == member]

    return allocate


def _ring_place(text: str) -> int:
    digest = hashlib.md5(text.encode(), usedforsecurity=False).digest()
    return int.from_bytes(digest[:4], "big")


_NAMED: Final[dict[str, Strategy]] = {
    "averagely": averagely,
    "averagely_by_circle": averagely_by_circle,
    "consistent_hash": consistent_hash(),
}


def strategy_of(given: str | Strategy) -> Strategy:
    """A strategy by name, or the given one."""
    if not isinstance(given, str):
        return given
    try:
        return _NAMED[given]
    except KeyError:
        names = ", ".join(sorted(_NAMED))
        raise ConfigError(f"no allocation is called {given}; there are {names}") from None
