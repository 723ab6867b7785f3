"""This module reads topics for a recording: chunk after chunk of each queue, up to where it ends.

It runs on a thread of its own, a bounded number of chunks ahead of whoever writes them. Bulk reads
are used where a broker has them; queues with batches of Kafka's are pulled instead, because a pull
shows them as messages and leaves out what their transactions have not decided or rolled back.
"""

from __future__ import annotations

import queue as queues
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Final, Literal, NamedTuple

from sluice.errors import StoreError, TopicMissing
from sluice.protocol.remoting_codes import RequestCode as Request
from sluice.replay.columns import has_kafka
from sluice.spark.cluster import Chunk, Cluster, Gone, Queue, Span, name_of
from sluice.spark.options import Filters

FETCH_BYTES: Final = 4 * 1024 * 1024
AHEAD_MAX: Final = 4
_POLL_SECONDS: Final = 0.2
_ROUTES_SECONDS: Final = 10.0
# What cannot be read for so long is not decided: transactions of Kafka's that are open.
_UNDECIDED_SECONDS: Final = 2.0
_NO_FILTERS: Final = Filters()

Start = int | Literal["earliest", "latest"]  # a number is a time in milliseconds
End = int | Literal["now", "never"]


class Piece(NamedTuple):
    """What was read of a queue: from `start` on, up to `chunk.next_offset`."""

    queue: Queue
    start: int
    chunk: Chunk


class Lost(NamedTuple):
    """Offsets [start, next_offset) are gone."""

    queue: Queue
    start: int
    next_offset: int
    why: str


class Found(NamedTuple):
    """A queue that is recorded from now on."""

    queue: Queue
    start: int


Item = Piece | Lost | Found | BaseException | None


class Fetcher:
    """Reads some topics, from where each queue is, on a thread."""

    def __init__(
        self,
        cluster: Cluster,
        topics: Sequence[str],
        places: dict[Queue, int],
        *,
        start: Start,
        end: End,
        now_ms: Callable[[], int],
    ) -> None:
        """`places`: where queues go on that were recorded before."""
        self._cluster = cluster
        self._topics = topics
        self._known = dict(places)
        self._next: dict[Queue, int] = {}
        self._ends: dict[Queue, int] | None = None
        self._start_at = start
        self._end_at = end
        self._now_ms = now_ms
        self._folded: set[Queue] = set()  # queues with batches of Kafka's
        self._stop = threading.Event()
        self._items: queues.Queue[Item] = queues.Queue(AHEAD_MAX)
        self.behind = 0  # messages that are there and not read yet

    # -------------------------------------------------------------------------------------- threads

    def begin(self) -> list[Found]:
        """Find the queues and where they begin, then read on a thread; raises TopicMissing."""
        found = self._plan()
        threading.Thread(target=self._work, name="sluice-record", daemon=True).start()
        return found

    def stop(self) -> None:
        self._stop.set()

    def next(self, timeout_seconds: float) -> Piece | Lost | Found | None:
        """What comes next. Raises queue.Empty where nothing came in time; None: it is over."""
        item = self._items.get(timeout=timeout_seconds)
        if isinstance(item, BaseException):
            raise item
        return item

    def _work(self) -> None:
        try:
            for item in self._pieces():
                if not self._put(item):
                    return
            self._put(None)
        except BaseException as error:
            self._put(error)

    def _put(self, item: Item) -> bool:
        while not self._stop.is_set():
            try:
                self._items.put(item, timeout=_POLL_SECONDS)
            except queues.Full:
                continue
            return True
        return False

    # -------------------------------------------------------------------------------------- reading

    def _plan(self) -> list[Found]:
        spans: dict[Queue, Span] = {}
        for topic in self._topics:
            spans |= self._cluster.spans(topic)
        for queue, at in self._known.items():
            if queue not in spans:
                raise TopicMissing(
                    f"{name_of(queue)} was recorded before and is not known now; is its broker up?"
                )
            if at > spans[queue].high:
                raise StoreError(
                    f"{name_of(queue)} ends at {spans[queue].high} and was recorded up to {at}: "
                    "it is another topic now; record it elsewhere"
                )
        found = [
            Found(queue, self._known.get(queue, self._first(queue, span)))
            for queue, span in spans.items()
        ]
        self._next = dict(found)
        if self._end_at == "now":
            self._ends = {queue: span.high for queue, span in spans.items()}
        elif self._end_at != "never" and self._end_at <= self._now_ms():
            self._ends = self._ends_at(self._end_at)
        return found

    def _first(self, queue: Queue, span: Span) -> int:
        if queue in self._known or self._start_at == "earliest":
            return span.low
        if self._start_at == "latest":
            return span.high
        return self._at(queue, self._start_at)

    def _ends_at(self, when_ms: int) -> dict[Queue, int]:
        return {queue: self._at(queue, when_ms) for queue in self._next}

    def _at(self, queue: Queue, when_ms: int) -> int:
        """The offset of the first message that was stored at a time or later, else the end."""
        ext = {
            "topic": queue.topic,
            "queueId": str(queue.queue_id),
            "timestamp": str(when_ms),
            "boundaryType": "LOWER",
        }
        code = Request.SEARCH_OFFSET_BY_TIMESTAMP
        return int(self._cluster.tell(queue.broker, queue.topic, code, ext).ext["offset"])

    def _pieces(self) -> Iterator[Piece | Lost | Found]:
        routes_at = went_on_at = time.monotonic()
        while not self._stop.is_set():
            self._look_at_the_clock()
            before = dict(self._next)
            behind = 0
            for topic in self._topics:
                for queue, span in self._cluster.spans(topic).items():
                    if queue not in self._next:
                        if self._ends is not None:
                            continue
                        self._next[queue] = span.low
                        yield Found(queue, span.low)
                    at = self._next[queue]
                    stop = span.high if self._ends is None else min(span.high, self._ends[queue])
                    item = self._read(queue, at, stop) if at < stop else None
                    if item is not None:
                        yield item
                    behind += max(0, stop - self._next[queue])
            self.behind = behind
            now = time.monotonic()
            if self._next != before:
                went_on_at = now
            elif self._ends is not None and (not behind or now - went_on_at > _UNDECIDED_SECONDS):
                return
            else:
                self._stop.wait(_POLL_SECONDS)
            if self._ends is None and now - routes_at > _ROUTES_SECONDS:
                self._cluster.forget_routes()  # queues and brokers may have come
                routes_at = now

    def _look_at_the_clock(self) -> None:
        """A recording that ends at a time ends with what was stored before it."""
        end = self._end_at
        if self._ends is None and isinstance(end, int) and self._now_ms() >= end:
            self._ends = self._ends_at(end)

    def _read(self, queue: Queue, at: int, stop: int) -> Piece | Lost | None:
        """One chunk; None where nothing can be read now."""
        bulk = queue not in self._folded
        try:
            chunk = self._cluster.fetch(queue, at, stop, _NO_FILTERS, FETCH_BYTES, bulk=bulk)
            if bulk and len(chunk.sizes) and has_kafka(chunk.data, chunk.sizes):
                self._folded.add(queue)
                return self._read(queue, at, stop)
        except Gone as gone:
            if gone.next_offset <= at:
                return None
            self._next[queue] = gone.next_offset
            return Lost(queue, at, gone.next_offset, str(gone))
        if chunk.next_offset <= at:
            return None
        self._next[queue] = chunk.next_offset
        return Piece(queue, at, chunk)
