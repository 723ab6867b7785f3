"""This module lends queues to consumers that need order: one owner at a time, for a bounded time.

An owner renews its lock every 20 s; after 60 s without renewal somebody else may have it, so that a
dead member does not stop its queues. Pure: time is an argument.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

LOCK_MS: Final = 60_000

QueueName = tuple[str, int]


class QueueLocks:
    """The locks of all groups: (group, topic, queue) -> (client, time of the last renewal)."""

    def __init__(self) -> None:
        self._locks: dict[tuple[str, str, int], tuple[str, int]] = {}

    def lock(
        self, group: str, client_id: str, queues: Iterable[QueueName], now_ms: int
    ) -> list[QueueName]:
        """Take or renew locks; returns the queues that the client has now."""
        owned = []
        for topic, queue_id in queues:
            key = (group, topic, queue_id)
            holder = self._locks.get(key)
            if holder is None or holder[0] == client_id or now_ms - holder[1] > LOCK_MS:
                self._locks[key] = (client_id, now_ms)
                owned.append((topic, queue_id))
        return owned

    def unlock(self, group: str, client_id: str, queues: Iterable[QueueName]) -> None:
        """Give locks back; those of somebody else stay."""
        for topic, queue_id in queues:
            key = (group, topic, queue_id)
            holder = self._locks.get(key)
            if holder is not None and holder[0] == client_id:
                del self._locks[key]

    def is_locked(self, group: str, now_ms: int) -> bool:
        """Whether anybody of the group holds a live lock."""
        return any(
            key[0] == group and now_ms - since <= LOCK_MS for key, (_, since) in self._locks.items()
        )

    def expire(self, now_ms: int) -> None:
        """Forget locks that nobody renewed for long."""
        for key in [k for k, (_, since) in self._locks.items() if now_ms - since > 2 * LOCK_MS]:
            del self._locks[key]
