"""This module keeps what a consumer has in memory of one queue: what waits, what is under way.

The offset that is committed is that of the oldest message that is not done: what lies behind it
may be done in any order and counts when everything before it is. So nothing is skipped after a
crash, and a message that takes long is no reason to handle others twice as long as its owner lives.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from itertools import islice

from sluice.client.core.messages import ReceivedMessage
from sluice.client.core.settings import ConsumerSettings
from sluice.protocol.json_members import MessageQueue


class ProcessQueue:
    """One queue that this client reads now. `is_dropped`: it belongs to somebody else again."""

    __slots__ = (
        *("_bytes", "_limits", "_order", "_unfinished", "_waiting", "commit_offset"),
        *("committed_offset", "is_dropped", "is_paused", "locked_until", "next_offset", "queue"),
        *("under_way",),
    )

    def __init__(self, queue: MessageQueue, offset: int, limits: ConsumerSettings) -> None:
        self.queue = queue
        self._limits = limits
        self.next_offset = offset  # of the next pull
        self.commit_offset = offset  # everything before it is done
        self.committed_offset = -1  # what the broker knows of it
        self._order: deque[ReceivedMessage] = deque()  # all that are not known to be done
        self._waiting: deque[ReceivedMessage] = deque()  # of these, what no handler has yet
        self._unfinished = 0
        self._bytes = 0
        self.under_way = 0  # messages that handlers have
        self.is_dropped = False
        self.is_paused = False
        self.locked_until = 0.0  # by the event loop's clock; of an ordered consumer

    def put(self, messages: list[ReceivedMessage], next_offset: int) -> None:
        """What a pull brought, and where the next one begins."""
        self._order.extend(messages)
        self._waiting.extend(messages)
        self._unfinished += len(messages)
        self._bytes += sum([message.stored_bytes for message in messages])
        self.next_offset = next_offset
        if not self._order:
            self.commit_offset = max(self.commit_offset, next_offset)

    def take(self, count: int) -> list[ReceivedMessage]:
        """The next messages for a handler, at most so many."""
        waiting = self._waiting
        if count >= len(waiting):
            taken = list(waiting)
            waiting.clear()
        else:
            popleft = waiting.popleft
            taken = [popleft() for _ in range(count)]
        self.under_way += len(taken)
        return taken

    def give_back(self, messages: list[ReceivedMessage]) -> None:
        """A handler did not get through with these: they come first again."""
        self._waiting.extendleft(reversed(messages))
        self.under_way -= len(messages)

    def done(self, messages: list[ReceivedMessage]) -> None:
        """These are handled, or somebody else has them now."""
        size_bytes = 0
        for message in messages:
            message.is_done = True
            size_bytes += message.stored_bytes
        count = len(messages)
        self.under_way -= count
        self._unfinished -= count
        self._bytes -= size_bytes
        order = self._order
        last = None
        if list(islice(order, count)) == messages:  # the usual case: the oldest ones, all of them
            last = messages[-1] if messages else None
            self._forget(count)
        while order and order[0].is_done:
            last = order.popleft()
        if last is not None:
            self.commit_offset = last.queue_offset + 1
        if not order:
            # Behind the last one there may be some that this group does not want.
            self.commit_offset = max(self.commit_offset, self.next_offset)

    def _forget(self, count: int) -> None:
        """So many of the oldest are done."""
        order = self._order
        if count == len(order):
            order.clear()
        else:
            popleft = order.popleft
            for _ in range(count):
                popleft()

    def skip(self, messages: Iterable[ReceivedMessage]) -> None:
        """Handled by nobody: they are not wanted."""
        passed = list(messages)
        self.under_way += len(passed)
        self.done(passed)

    def reset(self, offset: int) -> None:
        """Go on somewhere else; what is in memory is forgotten."""
        self._order.clear()
        self._waiting.clear()
        self._unfinished = self._bytes = self.under_way = 0
        self.next_offset = self.commit_offset = offset

    @property
    def waiting_count(self) -> int:
        return len(self._waiting)

    @property
    def unfinished_count(self) -> int:
        return self._unfinished

    @property
    def unfinished_bytes(self) -> int:
        return self._bytes

    @property
    def span(self) -> int:
        """From the oldest to the newest offset in memory."""
        order = self._order
        return order[-1].queue_offset - order[0].queue_offset if order else 0

    @property
    def oldest(self) -> ReceivedMessage | None:
        return self._order[0] if self._order else None

    def room(self, more_count: int = 0, more_bytes: int = 0) -> tuple[int, int]:
        """How many messages and bytes there is room for, behind those that are to come."""
        limits = self._limits
        count = min(limits.queue_count_max - self._unfinished, limits.queue_span_max - self.span)
        return count - more_count, limits.queue_bytes_max - self._bytes - more_bytes

    def why_full(self, more_count: int = 0, more_bytes: int = 0) -> str:
        """Why nothing more is to be pulled now; empty where it may. `more`: what is to come."""
        limits = self._limits
        count, size_bytes = self._unfinished + more_count, self._bytes + more_bytes
        if count >= limits.queue_count_max:
            return f"{count} messages are in memory (queue_count_max)"
        if size_bytes >= limits.queue_bytes_max:
            return f"{size_bytes} bytes are in memory (queue_bytes_max)"
        if self.span + more_count >= limits.queue_span_max:
            return f"offsets from the oldest on span {self.span} (queue_span_max)"
        return ""
