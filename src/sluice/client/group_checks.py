"""This module judges a consumer group by what its members say: do they agree, is each queue read?

Pure: it is given what `Admin` found out, and asks nobody.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

from sluice.client.simple import QueueAt
from sluice.protocol.json_members import MessageQueue
from sluice.protocol.remoting_clients import TAG, ConnectionInfo
from sluice.protocol.remoting_reports import RunningInfo

RETRY_PREFIX: Final = "%RETRY%"
NOT_SUBSCRIBED: Final = "(not subscribed)"
STUCK_MS: Final = 60_000  # as RocketMQ's mqadmin has it


class GroupMember(NamedTuple):
    """A connected consumer of a group, and what it says of itself if it answers."""

    connection: ConnectionInfo
    info: RunningInfo | None
    error: str = ""


def subscriptions_of(members: Sequence[GroupMember]) -> dict[str, dict[str, list[str]]]:
    """By topic and then by expression, the clients that want it; only of clients that answered.

    A retry topic is the group's own: all have it, and it says nothing.
    """
    wanted = {
        member.connection.client_id: {
            one.topic: one.expression
            if one.expression_type == TAG
            else f"{one.expression_type} {one.expression}"
            for one in member.info.subscriptions
            if not one.topic.startswith(RETRY_PREFIX)
        }
        for member in members
        if member.info is not None
    }
    result: dict[str, dict[str, list[str]]] = {}
    for topic in sorted({topic for topics in wanted.values() for topic in topics}):
        result[topic] = {}
        for client_id, topics in wanted.items():
            result[topic].setdefault(topics.get(topic, NOT_SUBSCRIBED), []).append(client_id)
    return result


def disagreements_of(members: Sequence[GroupMember]) -> list[str]:
    """Topics that the consumers of one group do not subscribe to alike, with who wants what.

    Queues are shared out whatever a member subscribes to: who does not want a message that another
    one wants drops it for both.
    """
    result = []
    for topic, expressions in subscriptions_of(members).items():
        if len(expressions) > 1:
            parts = (f"{text!r} by {', '.join(who)}" for text, who in expressions.items())
            result.append(f"{topic}: {'; '.join(parts)}")
    return result


def warning_lines(group: str, disagreements: Sequence[str]) -> list[str]:
    """Lines that cannot be overlooked; none where the members agree."""
    if not disagreements:
        return []
    return [
        "",
        f"WARNING: members of group {group} subscribe differently, so messages are missed:",
        *(f"  {line}" for line in disagreements),
    ]


def rebalance_problems(
    members: Sequence[GroupMember], queues: Mapping[str, Sequence[MessageQueue]]
) -> list[str]:
    """Queues that two members read, or nobody; `queues` has those of each topic.

    Nothing is said where a member did not answer: the missing queues may be its own.
    """
    if any(member.info is None for member in members):
        return []
    readers: dict[MessageQueue, list[str]] = {}
    for member in members:
        assert member.info is not None, "checked above"
        for queue in (*member.info.queues, *member.info.popped_queues):
            readers.setdefault(queue, []).append(member.connection.client_id)
    problems = [
        f"{_name(queue)} is read by {' and '.join(who)}"
        for queue, who in sorted(readers.items())
        if len(who) > 1
    ]
    for topic in sorted(queues):
        problems += (
            f"{_name(queue)} is read by nobody"
            for queue in sorted(queues[topic])
            if queue not in readers
        )
    return problems


def stuck_queues(members: Sequence[GroupMember], now_ms: int) -> list[str]:
    """Queues of push consumers that do not move though they have messages, or have no lock."""
    problems = []
    for member in members:
        if member.info is None or member.info.consume_type != "CONSUME_PASSIVELY":
            continue
        for queue, row in sorted(member.info.queues.items()):
            problem = _stuck(row, member.info.is_orderly, now_ms)
            if problem:
                problems.append(f"{_name(queue)} of {member.connection.client_id} {problem}")
    return problems


def _stuck(row: Mapping[str, Any], is_orderly: bool, now_ms: int) -> str:
    def number(name: str) -> int:
        value = row.get(name, 0)
        return value if isinstance(value, int) else 0

    if is_orderly and row.get("locked") is False:
        return f"has no lock since {now_ms - number('lastLockTimestamp')} ms"
    if is_orderly and row.get("droped") and number("tryUnlockTimes"):
        return f"is not given back after {number('tryUnlockTimes')} attempts"
    waited_ms = now_ms - number("lastConsumeTimestamp")
    if not is_orderly and waited_ms > STUCK_MS and number("cachedMsgCount"):
        return f"consumes nothing since {waited_ms} ms, though messages wait"
    return ""


def _name(queue: MessageQueue) -> str:
    return f"{queue.topic} {queue.broker_name}/{queue.queue_id}"


def consumer_queues(topic: str, queues: Iterable[QueueAt]) -> list[MessageQueue]:
    """Queues as consumers name them, in the order in which they are shared out."""
    return sorted(MessageQueue(topic, queue.broker_name, queue.queue_id) for queue in queues)


def allocate(
    queues: Sequence[MessageQueue], clients: Sequence[str]
) -> dict[str, list[MessageQueue]]:
    """How consumers share the queues of a topic: RocketMQ's default, as evenly as can be."""
    share, rest = divmod(len(queues), len(clients))
    result = {}
    at = 0
    for index, client in enumerate(clients):
        size = share + (1 if index < rest else 0)
        result[client] = list(queues[at : at + size])
        at += size
    return result
