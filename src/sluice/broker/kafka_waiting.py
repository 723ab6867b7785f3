"""This module lets Kafka's fetches wait until one of their partitions has something new.

A fetch waits for many queues at once, a held read of `long_polling.py` for one. So one read stands
there for each queue that fetches wait for; when it is asked again it wakes all of them. It stays
when they go: the next message takes it away.

It neither reads nor answers: it says who is to look again. Time is an argument.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable
from typing import Final

from sluice.broker.long_polling import HeldRead, LongPolling, QueueName
from sluice.errors import Busy

_FOREVER_MS: Final = 1 << 62
_SPARE: Final = 1000


class Waiter:
    """A fetch that waits: `look(timed_out)` is called once, then it waits no longer."""

    __slots__ = ("is_over", "look", "queues", "until_ms")

    def __init__(
        self, queues: Iterable[QueueName], until_ms: int, look: Callable[[bool], None]
    ) -> None:
        self.queues = tuple(queues)
        self.until_ms = until_ms
        self.look = look
        self.is_over = False


class _Stand:
    """Owner of the read that stands for one queue: limits count by owner."""

    __slots__ = ()


class KafkaWaiting:
    """The fetches of one broker that wait."""

    def __init__(
        self, polls: LongPolling, call_soon: Callable[[Callable[[], None]], object]
    ) -> None:
        self._polls = polls
        self._call_soon = call_soon
        self._waiters: dict[QueueName, dict[Waiter, None]] = {}
        self._standing: set[QueueName] = set()
        self._deadlines: list[tuple[int, int, Waiter]] = []
        self._count = 0  # makes deadlines of the same time differ
        self._active = 0  # those that wait now
        self._woken: list[Waiter] = []

    def wait(self, waiter: Waiter) -> bool:
        """Let a fetch wait; False: it is to be answered now."""
        for queue in waiter.queues:
            if queue not in self._standing and not self._stand(queue):
                waiter.is_over = True
                self._leave(waiter)
                return False
            self._waiters.setdefault(queue, {})[waiter] = None
        self._count += 1
        self._active += 1
        deadlines = self._deadlines
        if len(deadlines) > 2 * self._active + _SPARE:
            # Fetches that were answered long before their time must not pile up until it comes.
            deadlines[:] = [each for each in deadlines if not each[2].is_over]
            heapq.heapify(deadlines)
        heapq.heappush(deadlines, (waiter.until_ms, self._count, waiter))
        return True

    def _stand(self, queue: QueueName) -> bool:
        def resume(timed_out: bool) -> None:
            self._standing.discard(queue)
            self._wake(queue, timed_out)

        self._standing.add(queue)
        try:
            held = self._polls.hold(HeldRead(queue, _FOREVER_MS, None, resume, _Stand()))
        except Busy:
            held = False
        if not held:
            self._standing.discard(queue)
        return held

    def _wake(self, queue: QueueName, timed_out: bool) -> None:
        """Whoever waits for this queue looks again, once for all that comes in this turn."""
        for waiter in self._waiters.pop(queue, ()):
            if waiter.is_over:
                continue
            self._end(waiter)
            if timed_out:  # the broker stops: there is no next turn to count on
                self._leave(waiter)
                waiter.look(True)
                continue
            if not self._woken:
                self._call_soon(self._look)
            self._woken.append(waiter)

    def _look(self) -> None:
        woken, self._woken = self._woken, []
        for waiter in woken:
            self._leave(waiter)
            waiter.look(False)

    def _leave(self, waiter: Waiter) -> None:
        for queue in waiter.queues:
            others = self._waiters.get(queue)
            if others is not None:
                others.pop(waiter, None)
                if not others:
                    del self._waiters[queue]

    def drop(self, waiter: Waiter) -> None:
        """A fetch waits no longer; it is not asked again."""
        self._end(waiter)
        self._leave(waiter)

    def _end(self, waiter: Waiter) -> None:
        if not waiter.is_over:
            waiter.is_over = True
            self._active -= 1

    def start(self) -> None:
        """Nothing waits at a start."""

    def carry(self, jump_ms: int) -> None:
        """The clock jumps: everybody waits for as long as before."""
        self._deadlines = [
            (until_ms + jump_ms, count, waiter) for until_ms, count, waiter in self._deadlines
        ]

    def tick(self, now_ms: int) -> None:
        """Whose time is over looks one last time."""
        deadlines = self._deadlines
        while deadlines and (deadlines[0][0] <= now_ms or deadlines[0][2].is_over):
            _, _, waiter = heapq.heappop(deadlines)
            if not waiter.is_over:
                self.drop(waiter)
                waiter.look(True)
