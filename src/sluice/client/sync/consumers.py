"""This module is the blocking face of consumers: every call waits for the loop's thread."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any, Final, Self

from sluice.client.aio import pull, push
from sluice.client.core.messages import ReceivedMessage
from sluice.client.sync.loop_thread import loop_thread
from sluice.errors import ClientClosed
from sluice.protocol.json_members import MessageQueue

_TELL_SECONDS: Final = 0.05


class PushConsumer:
    """Calls a handler with every message of a group's topics, on threads of its own.

    `with PushConsumer("host:9876", group="billing", topics="orders", handler=handle) as consumer`,
    then `consumer.wait()`, or anything else while messages are handled.
    """

    def __init__(
        self,
        nameservers: str | Sequence[str] | None = None,
        *,
        handler: push.Handler,
        **options: Any,
    ) -> None:
        self._thread = loop_thread()
        self._aio = push.PushConsumer(nameservers, handler=handler, **options)
        self._is_closed = threading.Event()

    def subscribe(self, topic: str, expression: pull.Expression = "*") -> None:
        """Read a topic too; before the start."""
        self._aio.subscribe(topic, expression)

    def start(self) -> None:
        self._thread.run(self._aio.start())

    def close(self) -> None:
        """Let handlers come to an end, for a bounded time; commit what is done; leave."""
        try:
            self._thread.run(self._aio.close())
        finally:
            self._is_closed.set()

    def wait(self, timeout_seconds: float | None = None) -> bool:
        """Wait until somebody closes the consumer; False where that took too long."""
        return self._is_closed.wait(timeout_seconds)

    def pause(self) -> None:
        """Hand over and pull nothing until `resume`."""
        self._thread.call(self._aio.pause)

    def resume(self) -> None:
        self._thread.call(self._aio.resume)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def client_id(self) -> str:
        return self._aio.session.client_id

    @property
    def consumed_count(self) -> int:
        return self._aio.consumed_count

    @property
    def failed_count(self) -> int:
        return self._aio.failed_count

    def assignment(self) -> list[MessageQueue]:
        """The queues that are read now."""
        return sorted(self._aio.lanes.copy())  # the loop's thread may change them meanwhile


class PullConsumer:
    """Reads topics (`subscribe`, shared with the group) or queues (`assign`, one's own choice).

    `with PullConsumer("host:9876", group="reports", topics="orders") as consumer:` and then
    `for message in consumer`, or `consumer.poll()`.
    """

    def __init__(self, nameservers: str | Sequence[str] | None = None, **options: Any) -> None:
        self._thread = loop_thread()
        self._aio = pull.PullConsumer(nameservers, **options)
        # Of an iteration: what is to come, what the caller has now, and what is handled.
        self._ahead: deque[pull.Ahead] = deque()
        self._current: pull.Ahead | None = None
        self._handled: deque[pull.Ahead] = deque()
        self._told_at = 0.0

    def start(self) -> None:
        self._thread.run(self._aio.start())

    def close(self, *, handled: bool = True) -> None:
        """Commit what is handled, and leave. `handled`: whether what was returned last is."""
        self._thread.check()
        if handled:
            self._end_current()
        if self._handled:
            self._thread.call(self._tell)
        self._thread.run(self._aio.close(handled=handled))

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close(handled=kind is None)

    @property
    def client_id(self) -> str:
        return self._aio.session.client_id

    def subscribe(self, topic: str, expression: pull.Expression = "*") -> None:
        """Read a topic too, and share its queues with the other members of the group."""
        self._thread.run(self._aio.subscribe(topic, expression))

    def unsubscribe(self, topic: str) -> None:
        self._thread.run(self._aio.unsubscribe(topic))

    def assign(self, queues: Iterable[MessageQueue]) -> None:
        """Read exactly these queues, whoever else does; no other is read any more."""
        self._thread.run(self._aio.assign(queues))

    def assignment(self) -> list[MessageQueue]:
        """The queues that are read now."""
        return self._thread.call(self._aio.assignment)

    def queues(self, topic: str) -> list[MessageQueue]:
        """All queues of a topic, whoever reads them."""
        return self._thread.run(self._aio.queues(topic))

    def poll(self, timeout_seconds: float = 5.0, count: int = 32) -> list[ReceivedMessage]:
        """The next messages, at most so many; none where none came in time."""
        return self._thread.run(self._poll(timeout_seconds, count))

    async def _poll(self, timeout_seconds: float, count: int) -> list[ReceivedMessage]:
        self._end_current()
        self._tell()
        self._return_ahead()
        return await self._aio.poll(timeout_seconds, count)

    def _return_ahead(self) -> None:
        """What an iteration has left comes first, unless its queue is paused."""
        if self._ahead:
            self._aio.give_back(self._ahead)
            self._ahead.clear()

    async def _more(self) -> None:
        self._tell()
        self._return_ahead()
        self._ahead.extend(await self._aio.take_ahead())

    def _end_current(self) -> None:
        if self._current is not None:
            self._handled.append(self._current)
            self._current = None

    def _tell(self) -> None:
        """On the loop: these messages are handled."""
        handled = [self._handled.popleft() for _ in range(len(self._handled))]
        self._aio.settle(handled)

    def __iter__(self) -> Iterator[ReceivedMessage]:
        """One message after the other until it is closed; handled when the next is taken."""
        self._aio.session.check_open()
        while True:
            self._end_current()  # the one before, perhaps of an iteration that was left
            if not self._ahead or self._ahead[0][0].is_paused:
                try:
                    self._thread.run(self._more())
                except ClientClosed:
                    if self._aio.session.is_open:
                        raise  # it was not closed: this thread may not call it
                    return
                continue
            self._current = self._ahead.popleft()
            if self._current[0].is_dropped:
                self._current = None
                continue
            yield self._current[1]
            self._end_current()
            now = time.monotonic()
            if now - self._told_at > _TELL_SECONDS:
                # The loop learns of it soon; telling it each time would cost more than the rest.
                self._told_at = now
                self._thread.loop.call_soon_threadsafe(self._tell)

    def seek(self, queue: MessageQueue, offset: int) -> None:
        """Go on at an offset; what was fetched ahead is dropped."""
        self._thread.call(self._aio.seek, queue, offset)

    def seek_to_begin(self, queue: MessageQueue) -> None:
        self._thread.run(self._aio.seek_to_begin(queue))

    def seek_to_end(self, queue: MessageQueue) -> None:
        self._thread.run(self._aio.seek_to_end(queue))

    def seek_to_time(self, queue: MessageQueue, when: datetime | float) -> None:
        """Go on at the first message that was stored at a time or later."""
        self._thread.run(self._aio.seek_to_time(queue, when))

    def offset_for_time(self, queue: MessageQueue, when: datetime | float) -> int:
        return self._thread.run(self._aio.offset_for_time(queue, when))

    def position(self, queue: MessageQueue) -> int:
        """The offset up to which everything is handled."""
        return self._thread.call(self._aio.position, queue)

    def committed(self, queue: MessageQueue) -> int | None:
        """The group's offset on a queue; None where it has none."""
        return self._thread.run(self._aio.committed(queue))

    def pause(self, queues: Iterable[MessageQueue]) -> None:
        """Return nothing of these queues until `resume`."""
        self._thread.call(self._aio.pause, queues)

    def resume(self, queues: Iterable[MessageQueue]) -> None:
        self._thread.call(self._aio.resume, queues)

    def commit(self, offsets: Mapping[MessageQueue, int] | None = None) -> None:
        """Commit all that was returned, or these offsets; the broker has it when this returns."""
        self._end_current()
        if self._handled:
            self._thread.call(self._tell)
        self._thread.run(self._aio.commit(offsets))
