"""This module gathers messages that are sent together, until there are enough or they are due.

Messages of one topic share a batch when their flags are equal: whether bodies are packed is said
once for all. Which queue a batch goes to is decided when it leaves.
"""

from __future__ import annotations

from typing import Generic, TypeVar

from sluice.model import Buffer

Outcome = TypeVar("Outcome")


class OpenBatch(Generic[Outcome]):
    """Messages on their way into one request: their bodies, and their properties but the ids."""

    __slots__ = ("bodies", "due", "flags", "outcome", "size_bytes", "sys_flag", "tails", "topic")

    def __init__(self, topic: str, sys_flag: int, due: float, outcome: Outcome) -> None:
        self.topic = topic
        self.sys_flag = sys_flag
        self.due = due
        self.outcome = outcome  # what those who wait for it wait on
        self.bodies: list[Buffer] = []
        self.tails: list[bytes] = []
        self.flags: dict[int, int] = {}  # of those that have one
        self.size_bytes = 0

    def add(self, body: Buffer, tail: bytes, flag: int, size_bytes: int) -> int:
        """Put a message in; its place."""
        index = len(self.bodies)
        self.bodies.append(body)
        self.tails.append(tail)
        if flag:
            self.flags[index] = flag
        self.size_bytes += size_bytes
        return index


class Accumulator(Generic[Outcome]):
    """The batches that are open, one for each topic and set of flags."""

    def __init__(self, bytes_max: int, count_max: int, linger: float) -> None:
        self._bytes_max = bytes_max
        self._count_max = count_max
        self._linger = linger
        self._open: dict[tuple[str, int], OpenBatch[Outcome]] = {}

    def find(self, topic: str, sys_flag: int) -> OpenBatch[Outcome] | None:
        return self._open.get((topic, sys_flag))

    def begin(self, topic: str, sys_flag: int, now: float, outcome: Outcome) -> OpenBatch[Outcome]:
        """A new batch; it is due when it has lingered."""
        assert (topic, sys_flag) not in self._open
        batch = OpenBatch(topic, sys_flag, now + self._linger, outcome)
        self._open[topic, sys_flag] = batch
        return batch

    def has_room(self, batch: OpenBatch[Outcome], size_bytes: int) -> bool:
        """Whether one more message fits; the first one always does."""
        return not batch.bodies or batch.size_bytes + size_bytes <= self._bytes_max

    def is_full(self, batch: OpenBatch[Outcome]) -> bool:
        return len(batch.bodies) >= self._count_max or batch.size_bytes >= self._bytes_max

    def close(self, batch: OpenBatch[Outcome]) -> None:
        """Nothing more goes into it."""
        del self._open[batch.topic, batch.sys_flag]

    def due(self, now: float) -> list[OpenBatch[Outcome]]:
        """What has lingered long enough, closed."""
        ripe = [batch for batch in self._open.values() if batch.due <= now]
        for batch in ripe:
            self.close(batch)
        return ripe

    def next_due(self) -> float | None:
        return min((batch.due for batch in self._open.values()), default=None)
