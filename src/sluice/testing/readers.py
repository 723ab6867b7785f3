"""This module says who reads what of a broker now: whose pulls it holds, who is in which group.

With what the consumers of this process say of themselves, a test knows that all was handed over.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from sluice.broker.core import BrokerCore
from sluice.testing.members import MemberState, QueueName


@dataclass(slots=True)
class Readers:
    """The consumers of one broker, by what it knows of them."""

    asked: dict[str, set[QueueName]]  # by client: the queues whose next message it waits for
    groups: dict[str, set[str]]  # by group: the clients
    queue_counts: dict[str, int]  # by topic

    def undivided(self, broker_name: str, states: Iterable[MemberState]) -> str:
        """A group of which somebody has not got its part yet; empty where there is none.

        Where not all members are of this process nobody here can know.
        """
        shared: dict[str, list[MemberState]] = {}
        for state in states:
            if state.shares is not None:
                shared.setdefault(state.group, []).append(state)
        for group, members in shared.items():
            if self.groups.get(group, set()) != {state.client_id for state in members}:
                continue
            topics = frozenset.union(*(state.topics for state in members))
            taken = set().union(*((state.shares or {}).get(broker_name, ()) for state in members))
            for topic in topics & self.queue_counts.keys():
                if any((topic, number) not in taken for number in range(self.queue_counts[topic])):
                    if any(state.topics != topics for state in members):
                        return (
                            f"the members of {group} subscribe to different topics, so messages "
                            f"of {topic} stay unread: give each a group of its own"
                        )
                    return f"the members of {group} have not divided {topic} yet"
        return ""


def readers_of(core: BrokerCore) -> Readers:
    """On the broker's thread."""
    channels = {}
    groups = {}
    for name, group in core.clients.consumers.items():
        groups[name] = set(group.members)
        for client in group.connections.values():
            channels[client.channel] = client.client_id
    asked: dict[str, set[QueueName]] = {}
    for owner, queue in core.polls.held():
        client_id = channels.get(owner)
        if client_id is not None:
            asked.setdefault(client_id, set()).add(queue)
    counts = {
        settings.name: settings.read_queues if settings.readable else 0
        for settings in core.topics.all()
    }
    return Readers(asked, groups, counts)
