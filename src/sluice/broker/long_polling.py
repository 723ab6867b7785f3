"""This module holds reads that found nothing until there is something, or their time is over.

A held read is bound to one queue. A message that becomes readable there wakes every read of the
queue that wants it (its tag matches); reads that are woken ask again and may be held again. The
number of held reads is bounded: above it a read is answered at once instead.

This module does not read and does not answer: it decides who is to be asked again, and when. Time
is an argument.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

HELD_MAX: Final = 100_000

QueueName = tuple[str, int]


@dataclass(slots=True)
class HeldRead:
    """A read that waits: `resume(timed_out)` asks it again."""

    queue: QueueName
    until_ms: int
    wants: Callable[[int], bool] | None  # of a tags code; None = everything
    resume: Callable[[bool], None]
    owner: object  # the connection: when it closes, its reads are dropped
    done: bool = False


class LongPolling:
    """The held reads of one broker."""

    def __init__(self, held_max: int = HELD_MAX) -> None:
        self._held: dict[QueueName, list[HeldRead]] = {}
        self.held_count = 0
        self.held_max = held_max

    def hold(self, read: HeldRead) -> bool:
        """Keep a read; False where there is no room, then it is to be answered now."""
        if self.held_count >= self.held_max:
            return False
        self._held.setdefault(read.queue, []).append(read)
        self.held_count += 1
        return True

    def arrived(self, queue: QueueName, tags_code: int) -> None:
        """A message became readable."""
        reads = self._held.get(queue)
        if not reads:
            return
        woken = [read for read in reads if read.wants is None or read.wants(tags_code)]
        if not woken:
            return
        self._keep(queue, [read for read in reads if read not in woken])
        for read in woken:
            self._resume(read, timed_out=False)

    def wake(self, queue: QueueName) -> None:
        """Something else changed for this queue (an offset was reset): everybody asks again."""
        reads = self._held.pop(queue, [])
        self.held_count -= len(reads)
        for read in reads:
            self._resume(read, timed_out=False)

    def tick(self, now_ms: int) -> None:
        """Whose time is over asks one last time."""
        for queue, reads in list(self._held.items()):
            over = [read for read in reads if read.until_ms <= now_ms]
            if over:
                self._keep(queue, [read for read in reads if read.until_ms > now_ms])
                for read in over:
                    self._resume(read, timed_out=True)

    def drop(self, owner: object) -> None:
        """A connection closed: nobody waits for its reads any more."""
        for queue, reads in list(self._held.items()):
            if any(read.owner is owner for read in reads):
                self._keep(queue, [read for read in reads if read.owner is not owner])

    def release_all(self) -> None:
        """The broker stops: everybody gets an answer."""
        for queue in list(self._held):
            reads = self._held.pop(queue)
            self.held_count -= len(reads)
            for read in reads:
                self._resume(read, timed_out=True)

    def _keep(self, queue: QueueName, reads: list[HeldRead]) -> None:
        self.held_count += len(reads) - len(self._held.get(queue, ()))
        if reads:
            self._held[queue] = reads
        else:
            self._held.pop(queue, None)

    @staticmethod
    def _resume(read: HeldRead, *, timed_out: bool) -> None:
        assert not read.done, "a read is held or asked again, never both"
        read.done = True
        read.resume(timed_out)
