"""This module holds reads that found nothing until there is something, or their time is over.

A held read is bound to one queue. A message that becomes readable there wakes every read of the
queue that wants it (its tag matches); reads that are woken ask again and may be held again. The
number of held reads is bounded, in all and for one owner: above it a read is refused. It must not
be answered as if there were nothing: a client would ask again at once, and again.

One reader of a queue may stand at its end instead, and keeps its time itself: it hears of whatever
comes at once, with as little ado as possible. That is who waits for each message by itself.

This module does not read and does not answer: it decides who is to be asked again, and when. Time
is an argument.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

from sluice.errors import Busy

HELD_MAX: Final = 100_000
HELD_PER_OWNER_MAX: Final = 10_000
# Consumers of several groups may share a connection; more on one queue than this is no consumer.
HELD_PER_OWNER_AND_QUEUE_MAX: Final = 64
_NEVER_MS: Final = 1 << 62

QueueName = tuple[str, int]


@dataclass(slots=True, eq=False)
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

    def __init__(
        self, held_max: int = HELD_MAX, held_per_owner_max: int = HELD_PER_OWNER_MAX
    ) -> None:
        self._held: dict[QueueName, list[HeldRead]] = {}
        self._by_owner: Counter[object] = Counter()
        self._at_end: dict[QueueName, Callable[[bool], None]] = {}
        self._is_shut = False
        self._first_ms = _NEVER_MS  # before that, no held read's time is over
        # By topic: who wants to hear of whatever comes, in any of its queues.
        self.watchers: dict[str, Callable[[QueueName], None]] = {}
        self.held_count = 0  # with those who stand at an end
        self.held_max = held_max
        self.held_per_owner_max = held_per_owner_max

    @property
    def is_awaited(self) -> bool:
        """Whether anybody would hear of a message that arrives."""
        return bool(self.held_count or self.watchers)

    def hold(self, read: HeldRead) -> bool:
        """Keep a read; False: it is to be answered now. Raises Busy where there is no room."""
        if self._is_shut:
            return False
        self._check_room(read)
        self._held.setdefault(read.queue, []).append(read)
        self._by_owner[read.owner] += 1
        self.held_count += 1
        self._first_ms = min(self._first_ms, read.until_ms)
        return True

    def stand(self, queue: QueueName, look: Callable[[bool], None]) -> bool:
        """Let a reader stand at the end of a queue: `look(timed_out)` is called once, as soon as
        something comes. False: another one stands there, or there is no room; it may be held.
        """
        if self._is_shut or queue in self._at_end or self.held_count >= self.held_max:
            return False
        self._at_end[queue] = look
        self.held_count += 1
        return True

    def leave(self, queue: QueueName) -> None:
        """Who stands at the end of a queue does not wait any longer; it is not asked again."""
        if self._at_end.pop(queue, None) is not None:
            self.held_count -= 1

    def _call(self, queue: QueueName, *, timed_out: bool) -> None:
        """Who stands at the end of a queue looks again."""
        look = self._at_end.pop(queue, None)
        if look is not None:
            self.held_count -= 1
            look(timed_out)

    def _check_room(self, read: HeldRead) -> None:
        if self.held_count >= self.held_max:
            raise Busy(
                f"system busy: {self.held_count} pulls wait for messages, the limit is "
                f"{self.held_max} (held_polls_max); try again"
            )
        count = self._by_owner[read.owner]
        if count >= self.held_per_owner_max:
            raise Busy(
                f"system busy: {count} pulls of this connection wait for messages, the limit is "
                f"{self.held_per_owner_max} (held_polls_per_connection_max); try again"
            )
        if count >= HELD_PER_OWNER_AND_QUEUE_MAX:
            count = sum(held.owner is read.owner for held in self._held.get(read.queue, ()))
            if count >= HELD_PER_OWNER_AND_QUEUE_MAX:
                raise Busy(
                    f"system busy: {count} pulls of this connection wait for messages of queue "
                    f"{read.queue[1]} of {read.queue[0]}, which is the limit; try again"
                )

    def arrived(self, queue: QueueName, tags_code: int) -> None:
        """A message became readable."""
        self._call(queue, timed_out=False)
        if queue in self._held:
            self._wake(
                queue, lambda read: read.wants is None or read.wants(tags_code), timed_out=False
            )
        if queue[0] in self.watchers:
            self.watchers[queue[0]](queue)

    def wake(self, queue: QueueName) -> None:
        """Something else changed for this queue (an offset was reset): everybody asks again."""
        self._call(queue, timed_out=False)
        if queue in self._held:
            self._wake(queue, lambda read: True, timed_out=False)
        if queue[0] in self.watchers:
            self.watchers[queue[0]](queue)

    def wake_first(self, queue: QueueName) -> bool:
        """The one that waits longest asks again; False where nobody waits."""
        held = self._held.get(queue)
        if held is None:
            return False
        first = held[0]
        self._wake(queue, lambda read: read is first, timed_out=False)
        return True

    def waiting(self, queue: QueueName) -> int:
        """How many reads of a queue are held."""
        return len(self._held.get(queue, ()))

    def held(self) -> Iterator[tuple[object, QueueName]]:
        """The owner and the queue of every read that is held."""
        for queue, reads in self._held.items():
            for read in reads:
                yield read.owner, queue

    def tick(self, now_ms: int) -> None:
        """Whose time is over asks one last time."""
        if now_ms < self._first_ms:  # a thousand may be held, and most ticks find none
            return
        for queue in list(self._held):
            self._wake(queue, lambda read: read.until_ms <= now_ms, timed_out=True)
        self._first_ms = min(
            (read.until_ms for reads in self._held.values() for read in reads), default=_NEVER_MS
        )

    def carry(self, jump_ms: int) -> None:
        """The clock jumps: everybody waits for as long as before."""
        for reads in self._held.values():
            for read in reads:
                read.until_ms += jump_ms
        self._first_ms += jump_ms

    def drop(self, owner: object) -> None:
        """A connection closed: nobody waits for its reads any more."""
        if owner in self._by_owner:
            for queue in list(self._held):
                self._take(queue, lambda read: read.owner is owner)

    def shut(self) -> None:
        """The broker stops: everybody gets an answer, and nobody waits any more."""
        self._is_shut = True
        for queue in list(self._at_end):
            self._call(queue, timed_out=True)
        for queue in list(self._held):
            self._wake(queue, lambda read: True, timed_out=True)

    def _wake(
        self, queue: QueueName, chosen: Callable[[HeldRead], bool], *, timed_out: bool
    ) -> None:
        for read in self._take(queue, chosen):
            assert not read.done, "a read is held or asked again, never both"
            read.done = True
            read.resume(timed_out)

    def _take(self, queue: QueueName, chosen: Callable[[HeldRead], bool]) -> list[HeldRead]:
        """The reads of a queue that are chosen; they are not held any more."""
        kept: list[HeldRead] = []
        taken: list[HeldRead] = []
        for read in self._held.get(queue, ()):
            (taken if chosen(read) else kept).append(read)
        if not taken:
            return taken
        if kept:
            self._held[queue] = kept
        else:
            del self._held[queue]
        self.held_count -= len(taken)
        for read in taken:
            self._by_owner[read.owner] -= 1
            if not self._by_owner[read.owner]:
                del self._by_owner[read.owner]
        return taken
