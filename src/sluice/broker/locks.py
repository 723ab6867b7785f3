"""This module lends queues to consumers that need order: one owner at a time, for a bounded time.

An owner renews its lock every 20 s; after 60 s (`queue_lock_ms`) without renewal somebody else may
have it, so that a dead member does not stop its queues. It is not taken earlier, also when the
connection is lost: the member may be alive and at work. Pure: time is an argument.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final

LOCK_MS: Final = 60_000

QueueName = tuple[str, int]
LockKey = tuple[str, str, int]  # group, topic, queue


class QueueLocks:
    """The locks of all groups: (group, topic, queue) -> (client, time of the last renewal)."""

    def __init__(self, life_ms: Callable[[], int] = lambda: LOCK_MS) -> None:
        self._life_ms = life_ms
        self._locks: dict[LockKey, tuple[str, int]] = {}
        self.changed: set[LockKey] = set()  # whose owner is another one than was written down

    def lock(
        self, group: str, client_id: str, queues: Iterable[QueueName], now_ms: int
    ) -> list[QueueName]:
        """Take or renew locks; returns the queues that the client has now."""
        owned = []
        life_ms = self._life_ms()
        for topic, queue_id in queues:
            key = (group, topic, queue_id)
            holder = self._locks.get(key)
            if holder is None or holder[0] == client_id or now_ms - holder[1] > life_ms:
                if holder is None or holder[0] != client_id:
                    self.changed.add(key)
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
                self.changed.add(key)

    def restore(self, key: LockKey, client_id: str, since_ms: int) -> None:
        """A lock as it was before the broker stopped."""
        self._locks[key] = (client_id, since_ms)

    def owner(self, key: LockKey) -> str | None:
        """Who has a queue, or had it last."""
        holder = self._locks.get(key)
        return None if holder is None else holder[0]

    def take_changed(self) -> set[LockKey]:
        """What is to be written down; the caller sees to it."""
        changed, self.changed = self.changed, set()
        return changed

    def is_locked(self, group: str, now_ms: int) -> bool:
        """Whether anybody of the group holds a live lock."""
        life_ms = self._life_ms()
        return any(
            key[0] == group and now_ms - since <= life_ms for key, (_, since) in self._locks.items()
        )

    def carry(self, jump_ms: int, is_there: Callable[[str, str], bool]) -> None:
        """The clock jumps: who is there (group, client) keeps its locks for as long as before."""
        for key, (client_id, since_ms) in self._locks.items():
            if is_there(key[0], client_id):
                self._locks[key] = (client_id, since_ms + jump_ms)

    def expire(self, now_ms: int) -> None:
        """Forget locks that nobody renewed for long."""
        old_ms = now_ms - 2 * self._life_ms()
        for key in [key for key, (_, since) in self._locks.items() if since < old_ms]:
            del self._locks[key]
            self.changed.add(key)
