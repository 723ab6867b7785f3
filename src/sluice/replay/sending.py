"""This module is the loop of a replay: what is due goes out, each queue in its order.

Messages that are due are handed to the line of their queue. A line has one batch under way and
takes all that has gathered meanwhile into the next one, so a slow broker gets larger batches, not
more of them, and no batch can overtake another. What has no answer yet is bounded; where the bound
is reached the loop waits, and how late messages go out is part of the report.

A message that fails is counted and not sent again: a second copy behind its successors would break
the order, and a load test wants to know.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Final, NamedTuple, Protocol

from sluice.client.core.messages import Message
from sluice.errors import SluiceError
from sluice.protocol.json_members import MessageQueue
from sluice.replay.blocks import Row, Window
from sluice.replay.lanes import Shape
from sluice.replay.measuring import ErrorWatch, Series
from sluice.replay.pacing import Pacer, Schedule

_TICK_SECONDS: Final = 0.002  # what is due within it goes together
_TURN_MAX: Final = 500  # messages that are made before answers have their turn
_LOOK_SECONDS: Final = 0.2  # so often it is asked whether it is enough
_AFTER_FAILURE_SECONDS: Final = 0.1
_ERROR_TEXTS_MAX: Final = 20
_MESSAGE_EXTRA_BYTES: Final = 64  # what a message takes beside its body and properties, about


class Target(Protocol):
    """What takes a batch; it returns when all of it is acknowledged, and raises SluiceError."""

    async def send(self, queue: MessageQueue, messages: list[Message]) -> None: ...


class Limits(NamedTuple):
    """How much goes together, and when it is enough."""

    waiting_max: int = 20_000  # messages without an answer
    batch_count: int = 1000
    batch_bytes: int = 60 * 1024  # a broker takes the shortest way with frames below 64 KiB
    stop_errors: float | None = 0.1  # a share
    stop_window_seconds: float = 10.0
    stop_late_seconds: float | None = None


class Route(NamedTuple):
    """Where the messages of one recorded queue go."""

    topic: str
    target: MessageQueue


@dataclass(slots=True)
class Progress:
    """What a replay did so far; messages are counted with their copies."""

    total: int = 0
    due: int = 0
    sent: int = 0
    sent_bytes: int = 0
    failed: int = 0
    empty: int = 0  # among all these: messages without a body, such as Kafka's tombstones
    late_seconds: float = 0.0
    seconds: float = 0.0


class _Line:
    """What waits for one queue."""

    def __init__(self, target: MessageQueue) -> None:
        self.target = target
        self.waiting: deque[tuple[int, Message]] = deque()  # with its size
        self.task: asyncio.Task[None] | None = None


class Replayer:
    """Sends windows of messages as a schedule says."""

    def __init__(
        self,
        target: Target,
        schedule: Schedule,
        routes: dict[int, Route],
        shape: Shape,
        limits: Limits,
        *,
        copies: int = 1,
        now: Callable[[], float],
        pause: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """`routes`: by the number of the recorded queue. `now`: seconds that never go back."""
        self._target = target
        self._schedule = schedule
        self._shape = shape
        self._limits = limits
        self._copies = copies
        self._now = now
        self._pause = pause
        lines: dict[MessageQueue, _Line] = {}
        self._routes = {
            number: (route.topic, lines.setdefault(route.target, _Line(route.target)))
            for number, route in routes.items()
        }
        self._lines = lines
        self._errors = ErrorWatch(limits.stop_errors, limits.stop_window_seconds)
        self._open = 0  # messages without an answer
        self._changed = asyncio.Event()
        self._begun: float | None = None
        self._is_stopped = False
        self._broken: Exception | None = None  # what is no failure of a send but a fault of ours
        self.why = ""  # it ended before all was sent
        self.reasons: Counter[str] = Counter()
        self.series = Series()
        self.progress = Progress()

    def stop(self, why: str) -> None:
        """End after what is under way is answered."""
        self.why = self.why or why
        self._is_stopped = True
        self._changed.set()

    async def run(self, windows: AsyncIterator[Window]) -> None:
        """Send everything, or until it is enough."""
        try:
            async for window in windows:
                if self._begun is None:
                    self._begun = self._now()  # what it takes to read the first is not late
                due = self._schedule.due(window.times_ms)
                self.series.want(due)
                await self._send(window.rows, Pacer(due))
                if self._is_stopped:
                    break
            while self._open and not self._is_stopped:
                await self._wait(_LOOK_SECONDS)
                self._check()
        finally:
            await self._end()
        if self._broken is not None:
            raise self._broken

    @property
    def _second(self) -> float:
        return self._now() - self._begun if self._begun is not None else 0.0

    # ------------------------------------------------------------------------------------- the loop

    async def _send(self, rows: list[Row], pacer: Pacer) -> None:
        while not pacer.is_over and not self._is_stopped:
            second = self._second
            self.progress.seconds = second
            wait = pacer.wait(second)
            self.progress.late_seconds = max(0.0, -wait)
            if wait > 0:
                self._check()
                await self._pause(min(max(wait, _TICK_SECONDS), _LOOK_SECONDS))
                continue
            room = min(self._limits.waiting_max - self._open, _TURN_MAX)
            taken = pacer.take(second, room)
            if not taken:
                await self._wait(_LOOK_SECONDS)
            else:
                self._hand_over(rows, taken, second, -wait)
                # The lines get their turn, and their answers come in.
                await asyncio.sleep(0)
            self._check()

    def _hand_over(self, rows: list[Row], taken: range, second: float, late: float) -> None:
        interval = self.series.at(second)
        interval.late_ms = max(interval.late_ms, late * 1000)
        self.progress.due += len(taken)
        copies, routes, message = self._copies, self._routes, self._shape.message
        extra_bytes = self._shape.extra_bytes + _MESSAGE_EXTRA_BYTES
        woken: set[MessageQueue] = set()
        for number in taken:
            row = rows[number // copies]
            if not row.body:
                self.progress.empty += 1
            topic, line = routes[row.queue]
            made = message(topic, line.target.topic, row, number % copies)
            line.waiting.append((row.size + extra_bytes, made))
            self._open += 1
            woken.add(line.target)
        for target in woken:
            line = self._lines[target]
            if line.task is None:
                line.task = asyncio.create_task(self._drain(line))

    def _check(self) -> None:
        """Whether it is enough."""
        second = self._second
        limit = self._limits.stop_late_seconds
        if self._errors.is_over(second):
            self.stop(f"{self._errors.share:.1%} of the sends failed")
        elif limit is not None and self.progress.late_seconds > limit:
            self.stop(f"messages go out {self.progress.late_seconds:.1f} s late")

    async def _wait(self, seconds: float) -> None:
        """Until an answer comes, or for so long."""
        self._changed.clear()
        try:
            async with asyncio.timeout(seconds):
                await self._changed.wait()
        except TimeoutError:
            pass

    # ------------------------------------------------------------------------------------- one line

    async def _drain(self, line: _Line) -> None:
        try:
            while line.waiting and not self._is_stopped:
                if not await self._send_batch(line):
                    await self._pause(_AFTER_FAILURE_SECONDS)
        except Exception as error:
            self._broken = self._broken or error
            self.stop("broken")
        finally:
            line.task = None

    async def _send_batch(self, line: _Line) -> bool:
        batch = self._next_batch(line.waiting)
        begun = self._now()
        error: SluiceError | None = None
        try:
            await self._target.send(line.target, batch)
        except SluiceError as raised:
            error = raised
        now = self._now()
        second = self._second
        interval = self.series.at(second)
        count = len(batch)
        if error is None:
            interval.sent += count
            interval.answers.add((now - begun) * 1000, count)
            self.progress.sent += count
            self.progress.sent_bytes += sum(len(message.body) for message in batch)
            self._errors.note(second, count, 0)
        else:
            interval.failed += count
            self.progress.failed += count
            self._errors.note(second, 0, count)
            text = " ".join(f"{type(error).__name__}: {error}".split())[:300]
            if text in self.reasons or len(self.reasons) < _ERROR_TEXTS_MAX:
                self.reasons[text] += count
        self._open -= count
        self._changed.set()
        return error is None

    def _next_batch(self, waiting: deque[tuple[int, Message]]) -> list[Message]:
        """The first messages, as many as go together; one in any case."""
        size, message = waiting.popleft()
        batch = [message]
        left = self._limits.batch_bytes - size
        count = min(self._limits.batch_count - 1, len(waiting))
        while count and waiting[0][0] <= left:
            size, message = waiting.popleft()
            left -= size
            count -= 1
            batch.append(message)
        return batch

    async def _end(self) -> None:
        """Wait for what is under way; what only waited is not sent any more."""
        self._is_stopped = True
        tasks = [line.task for line in self._lines.values() if line.task is not None]
        await asyncio.gather(*tasks)
        self.progress.seconds = self._second
