"""This module divides the queues of a topic among the members of a group, as RocketMQ's clients do.

Everybody who knows the same queues and the same members comes to the same result: both are sorted,
and each member takes what falls to its place. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Final

Queue = tuple[str, int]  # broker, queue
ANY_QUEUE: Final = -1


def _in_rows(queues: Sequence[Queue], place: int, member_count: int) -> Sequence[Queue]:
    """Neighbours stay together; the first members get one more where it does not come out even."""
    share, rest = divmod(len(queues), member_count)
    start = place * share + min(place, rest)
    return queues[start : start + share + (place < rest)]


def _in_turn(queues: Sequence[Queue], place: int, member_count: int) -> Sequence[Queue]:
    """One by one, round and round."""
    return queues[place::member_count]


_STRATEGIES: Final[dict[str, Callable[[Sequence[Queue], int, int], Sequence[Queue]]]] = {
    "AVG": _in_rows,
    "AVG_BY_CIRCLE": _in_turn,
}


def allocate(
    strategy: str, queues: Iterable[Queue], members: Iterable[str], member: str
) -> Sequence[Queue] | None:
    """The queues of one member; None where nobody can tell."""
    ordered = sorted(members)
    divide = _STRATEGIES.get(strategy)
    if divide is None or not ordered:
        return None
    if member not in ordered:
        return ()
    return divide(sorted(queues), ordered.index(member), len(ordered))


def allocate_pops(
    strategy: str, queues: Iterable[Queue], members: Iterable[str], member: str, share: int
) -> Sequence[Queue] | None:
    """The queues that one member pops: shared with the `share` members after it, or all of them.

    All of a broker are its queue -1. Where there are more members than queues each has one.
    """
    every, ordered = sorted(queues), sorted(members)
    if strategy not in _STRATEGIES or not ordered:
        return None
    if share <= 0 or share >= len(ordered) - 1:
        return [(broker, ANY_QUEUE) for broker in dict.fromkeys(broker for broker, _ in every)]
    if member not in ordered or not every:
        return ()
    place = ordered.index(member)
    if len(ordered) > len(every):
        return [every[place % len(every)]]
    chosen: dict[Queue, None] = {}
    for step in range(share + 1):
        other = (place + step) % len(ordered)
        chosen.update(dict.fromkeys(_STRATEGIES[strategy](every, other, len(ordered))))
    return list(chosen)
