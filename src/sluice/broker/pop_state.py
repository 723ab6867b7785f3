"""This module knows what of each queue is in the hands of a group's consumers, and until when.

A pop takes messages of a queue: they are in flight, invisible to others, until they are
acknowledged or their time is over. What was taken together is a check point; it goes when its last
message does. A message is in flight once: who takes it again (after a reset) takes it over.

A group that pops in order has one window on a queue instead: while a message of it is neither
acknowledged nor visible again, nobody gets a later one.

Everything here follows from the state, the event and the time in its arguments. Nothing is read or
written: `pop_entries` has the events as entries of the log, `pops` and its parts have the effects.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import Final

from sluice.broker.topics import REVIVE_QUEUES

QueueName = tuple[str, str, int]  # group, topic, queue

ORDER_REVIVE_QUEUE: Final = 999  # what clients are told instead of a revive queue: taken in order
_BUCKET_MS: Final = 100


@dataclass(slots=True, eq=False)
class CheckPoint:
    """Messages of one queue that were popped together."""

    queue: QueueName
    start: int  # the offset that reading began at
    pop_ms: int
    invisible_ms: int
    revive_queue: int
    offsets: tuple[int, ...]
    waiting: int = 0  # how many of them are in flight by this check point
    due_ms: int = 0  # when those that are left come again
    place: int = 0  # the offset of its entry in the revive queue
    position: int = 0  # of that entry in the log
    oldest: int = -1  # the position of its first message; -1: nobody has looked
    moving: bool = False  # its messages are being read, to come again
    bucket: int = -1  # of the times at which something is due; -1: of none
    suspended: bool = False  # it was put off: when it comes again that is no further try


@dataclass(slots=True, eq=False)
class OrderWindow:
    """Messages of one queue that were popped in order by one consumer."""

    queue: QueueName
    start: int
    pop_ms: int
    invisible_ms: int
    revive_queue: int
    offsets: tuple[int, ...]
    attempt: str = ""  # who asks again under this name gets the same messages again
    counts: dict[int, int] = field(default_factory=dict)  # how often they were popped before
    visible_ms: dict[int, int] = field(default_factory=dict)  # where that was changed
    done: set[int] = field(default_factory=set)  # what was acknowledged when it was closed
    suspended: set[int] = field(default_factory=set)  # put off: the next pop is no further try
    due_ms: int = 0  # when nothing in it is invisible any more
    place: int = 0
    position: int = 0
    bucket: int = -1


Kept = CheckPoint | OrderWindow


@dataclass(slots=True)
class PopQueue:
    """One queue as one group pops it."""

    next_offset: int = -1  # where the next pop begins; -1: as it is committed
    flights: dict[int, CheckPoint] = field(default_factory=dict)  # by offset
    window: OrderWindow | None = None
    early: set[int] = field(default_factory=set)  # acknowledged before those in front of them
    reading: bool = False  # a pop waits for the disk here
    epoch: int = 0  # how often it was reset: what belongs to before must not move it


class PopState:
    """All that is in flight on one broker."""

    def __init__(self) -> None:
        self.queues: dict[QueueName, PopQueue] = {}
        self.in_flight = 0
        # What must be found again after a crash, by revive queue, in the order of their entries.
        self.kept: list[dict[Kept, None]] = [{} for _ in range(REVIVE_QUEUES)]
        self._buckets: dict[int, dict[Kept, None]] = {}
        self._bucket_order: list[int] = []

    def queue(self, name: QueueName) -> PopQueue:
        """The state of a queue, made where there is none."""
        queue = self.queues.get(name)
        if queue is None:
            queue = self.queues[name] = PopQueue()
        return queue

    def count(self, name: QueueName, now_ms: int) -> int:
        """How many messages of a queue are in flight."""
        queue = self.queues.get(name)
        if queue is None:
            return 0
        count = len(queue.flights)
        if queue.window is not None and self._blocks(queue, queue.window, now_ms):
            count += len(self.unacknowledged(queue))
        return count

    # ------------------------------------------------------------------------------------ unordered

    def take(self, point: CheckPoint, next_offset: int) -> None:
        """Messages were popped; the next pop goes on behind them."""
        queue = self.queue(point.queue)
        for offset in point.offsets:
            if offset in queue.flights:
                self._land(queue, offset)
            queue.flights[offset] = point
        point.waiting = len(point.offsets)
        self.in_flight += point.waiting
        queue.next_offset = max(queue.next_offset, next_offset)
        point.due_ms = point.pop_ms + point.invisible_ms
        self._keep(point)

    def give_back(self, point: CheckPoint) -> None:
        """The check point could not be written: its messages were never popped."""
        queue = self.queues.get(point.queue)
        if queue is not None and point.waiting:
            self.land(point, self.left(point))
            queue.next_offset = min(queue.next_offset, point.start)

    def holder(self, name: QueueName, offset: int) -> CheckPoint | None:
        """The check point that a message is in flight by."""
        queue = self.queues.get(name)
        return None if queue is None else queue.flights.get(offset)

    def left(self, point: CheckPoint) -> list[int]:
        """The offsets that are in flight by a check point still."""
        if not point.waiting:
            return []
        flights = self.queue(point.queue).flights
        return [offset for offset in point.offsets if flights.get(offset) is point]

    def land(self, point: CheckPoint, offsets: Iterable[int]) -> None:
        """These messages of a check point are done with: acknowledged, or somewhere else now."""
        queue = self.queue(point.queue)
        for offset in offsets:
            if queue.flights.get(offset) is point:
                self._land(queue, offset)

    def take_over(self, new: CheckPoint, old: CheckPoint) -> None:
        """A check point of one message could not replace another one: that one holds again."""
        offset = new.offsets[0]
        if self.queue(new.queue).flights.get(offset) is new:
            self.lift(old, [offset], old.due_ms)

    def lift(self, point: CheckPoint, offsets: Iterable[int], due_ms: int) -> None:
        """These are in flight after all: what should have ended it could not be written."""
        queue = self.queue(point.queue)
        for offset in offsets:
            if offset in queue.flights:
                self._land(queue, offset)
            queue.flights[offset] = point
            point.waiting += 1
            self.in_flight += 1
        point.due_ms = due_ms
        self._keep(point)
        self._sort()

    def postpone(self, point: CheckPoint, due_ms: int) -> None:
        """What is left of a check point comes at another time."""
        point.due_ms = due_ms
        if point.waiting:
            self._schedule(point)

    def _land(self, queue: PopQueue, offset: int) -> None:
        point = queue.flights.pop(offset)
        point.waiting -= 1
        self.in_flight -= 1
        if not point.waiting:
            self._drop(point)

    # -------------------------------------------------------------------------------------- ordered

    def is_blocked(self, name: QueueName, attempt: str, now_ms: int) -> bool:
        """Whether an earlier message of the queue has to be waited for."""
        queue = self.queues.get(name)
        if queue is None or queue.window is None:
            return False
        if attempt and queue.window.attempt == attempt:
            return False  # its answer got lost on the way
        return self._blocks(queue, queue.window, now_ms)

    def _blocks(self, queue: PopQueue, window: OrderWindow, now_ms: int) -> bool:
        return now_ms < window.due_ms and bool(self.unacknowledged(queue))

    @staticmethod
    def unacknowledged(queue: PopQueue) -> list[int]:
        """What of a window is not acknowledged, in order."""
        window = queue.window
        if window is None:
            return []
        return [offset for offset in window.offsets if offset not in queue.early]

    def open_window(self, window: OrderWindow, *, again: bool = False) -> OrderWindow | None:
        """Messages were popped in order; returns the window before. `again`: it is known whole."""
        queue = self.queue(window.queue)
        old = queue.window
        if old is not None and not again:
            if window.attempt and old.attempt == window.attempt:
                window.counts = {o: n for o, n in old.counts.items() if o in window.offsets}
            else:
                before = frozenset(old.offsets)
                window.counts = {
                    o: old.counts.get(o, 0) + (o not in old.suspended)
                    for o in window.offsets
                    if o in before
                }
        self._put_window(queue, window)
        return old

    def close_window(self, window: OrderWindow, old: OrderWindow | None) -> None:
        """A window could not be written: the one before it holds again."""
        queue = self.queue(window.queue)
        if queue.window is window:
            self._put_window(queue, old)

    def _put_window(self, queue: PopQueue, window: OrderWindow | None) -> None:
        if queue.window is not None:
            self._drop(queue.window)
        queue.window = window
        if window is not None:
            self._look_at(queue, window)
            self._keep(window)

    def acknowledge(self, window: OrderWindow, offset: int) -> int:
        """One of a window is done with; returns the offset that comes next."""
        queue = self.queue(window.queue)
        queue.early.add(offset)
        return self._advance(queue, window)

    def _advance(self, queue: PopQueue, window: OrderWindow) -> int:
        left = self.unacknowledged(queue)
        if left:
            self._look_at(queue, window)
            self._schedule(window)
            return left[0]
        following = window.offsets[-1] + 1
        while following in queue.early:
            following += 1
        queue.next_offset = max(queue.next_offset, following)
        self._unschedule(window)
        if max(queue.early) < following:
            window.done, queue.early = queue.early, set()
            queue.window = None
            self._drop(window)
        # Else it stays, although it blocks nothing: it is what tells of those after a crash.
        return following

    def unacknowledge(self, window: OrderWindow, offset: int) -> None:
        """An acknowledgement could not be written: it was none."""
        queue = self.queue(window.queue)
        if queue.window is None:
            queue.early |= window.done
        queue.early.discard(offset)
        if queue.window in (None, window):
            queue.next_offset = min(queue.next_offset, window.offsets[0])
            self._put_window(queue, window)
            self._sort()

    def change_window(
        self, window: OrderWindow, offset: int, visible_ms: int, *, suspend: bool = False
    ) -> None:
        """A message of a window becomes visible at another time."""
        if self.queue(window.queue).window is not window:
            return
        window.visible_ms[offset] = visible_ms
        if suspend:
            window.suspended.add(offset)
        else:
            window.suspended.discard(offset)
        self._look_at(self.queue(window.queue), window)
        self._schedule(window)

    def _look_at(self, queue: PopQueue, window: OrderWindow) -> None:
        """When the last message of a window that is not acknowledged becomes visible."""
        usual_ms = window.pop_ms + window.invisible_ms
        times = [
            window.visible_ms.get(offset, usual_ms)
            for offset in window.offsets
            if offset not in queue.early
        ]
        window.due_ms = max(times, default=0)

    # ------------------------------------------------------------------------------ all of a queue

    def reset(self, name: QueueName, offset: int) -> None:
        """An administrator moved the group: it goes on there. What is in flight stays so."""
        queue = self.queue(name)
        queue.next_offset = offset
        queue.epoch += 1
        queue.early.clear()
        self._put_window(queue, None)

    def take_out(self, name: QueueName) -> PopQueue | None:
        """The group or the topic is gone: nobody has anything of the queue any more."""
        queue = self.queues.pop(name, None)
        if queue is not None:
            self.in_flight -= len(queue.flights)
            for item in _kept_of(queue):
                self._drop(item)
        return queue

    def put_back(self, name: QueueName, queue: PopQueue) -> None:
        """It is not gone after all."""
        self.take_out(name)
        self.queues[name] = queue
        self.in_flight += len(queue.flights)
        for item in _kept_of(queue):
            self._keep(item)
        self._sort()

    # ----------------------------------------------------------------------------------------- time

    def due(self, now_ms: int, count_max: int) -> Iterator[Kept]:
        """Whose time is over; each is given once. Goes on at the next call where there are more."""
        order = self._bucket_order
        while order and order[0] * _BUCKET_MS <= now_ms:
            bucket = self._buckets[order[0]]
            ready = [item for item in bucket if item.due_ms <= now_ms][:count_max]
            for item in ready:
                del bucket[item]
                item.bucket = -1
            if not bucket:
                del self._buckets[heappop(order)]
            yield from ready
            count_max -= len(ready)
            if bucket or count_max <= 0:
                return

    def next_ms(self) -> int | None:
        """When the next one's time is over; None where there is none."""
        for number in sorted(self._bucket_order):
            if self._buckets[number]:
                return min(item.due_ms for item in self._buckets[number])
        return None

    def _schedule(self, item: Kept) -> None:
        self._unschedule(item)
        item.bucket = item.due_ms // _BUCKET_MS
        bucket = self._buckets.get(item.bucket)
        if bucket is None:
            bucket = self._buckets[item.bucket] = {}
            heappush(self._bucket_order, item.bucket)
        bucket[item] = None

    def _unschedule(self, item: Kept) -> None:
        if item.bucket >= 0:
            self._buckets[item.bucket].pop(item, None)  # an empty one goes when its time comes
            item.bucket = -1

    def _keep(self, item: Kept) -> None:
        kept = self.kept[item.revive_queue]
        kept.pop(item, None)  # what is written anew goes to the end
        kept[item] = None
        self._schedule(item)

    def _sort(self) -> None:
        """Something was added that is older: they stay in the order of their entries."""
        for number, kept in enumerate(self.kept):
            self.kept[number] = dict.fromkeys(sorted(kept, key=lambda item: item.place))

    def _drop(self, item: Kept) -> None:
        self.kept[item.revive_queue].pop(item, None)
        self._unschedule(item)

    def moved(self, item: Kept, place: int, position: int) -> None:
        """Its entry is at another place now, behind all others."""
        item.place, item.position = place, position
        kept = self.kept[item.revive_queue]
        if item in kept:
            del kept[item]
            kept[item] = None


def _kept_of(queue: PopQueue) -> list[Kept]:
    """The check points of a queue, and its window."""
    items: dict[Kept, None] = dict.fromkeys(queue.flights.values())
    if queue.window is not None:
        items[queue.window] = None
    return list(items)
