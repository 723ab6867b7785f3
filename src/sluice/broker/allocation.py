"""This module divides the queues of a topic among the members of a group, as RocketMQ's clients do.

Everybody who knows the same queues and the same members comes to the same result: both are sorted,
and each member takes what falls to its place. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Final

Queue = tuple[str, int]  # broker, queue


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
