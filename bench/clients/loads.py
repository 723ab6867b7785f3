"""This module is what the programs share: what they are asked for, how they count and report.

It may import nothing that is not in the standard library: most programs run in a Python that has
their client and nothing else.
"""

import asyncio
import itertools
import json
import sys
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

WINDOW = 1_000  # messages under way, sent one by one
BATCHED_WINDOW = 10_000  # and where the client gathers them
# A consumer is warm after this part of the topic at the latest.
WARM_PART = 0.2
FIRST_MESSAGE_S = 10.0
_POLL_S = 0.005
_AT_ONCE = 50
_BODY = b"x"


@dataclass(frozen=True, slots=True)
class Job:
    """What to do: sync, async, batched, consume, or fill."""

    kind: str
    address: str
    topic: str
    group: str
    body_bytes: int
    warm_s: float
    seconds: float
    count: int = 0  # messages that the topic holds, or that fill sends

    def words(self) -> str:
        return json.dumps(asdict(self))

    @property
    def body(self) -> bytes:
        return _BODY * self.body_bytes

    @property
    def window(self) -> int:
        return WINDOW if self.kind == "async" else BATCHED_WINDOW


def read_job() -> Job:
    return Job(**json.loads(sys.argv[1]))


def report(count: int, seconds: float) -> None:
    """The last line of a program."""
    print(json.dumps({"count": count, "seconds": seconds}), flush=True)


def reported(output: str) -> Mapping[str, float] | None:
    """The report in a program's output, once it is there."""
    for line in reversed(output[: output.rfind("\n") + 1].splitlines()):
        if line.startswith('{"count"'):
            return {name: float(value) for name, value in json.loads(line).items()}
    return None


def one_by_one(job: Job, send: Callable[[bytes], object], *, each: int = 1) -> None:
    """Send, wait for the answer, send the next; `each` messages at a time."""
    body = job.body
    for seconds, is_measured in ((job.warm_s, False), (job.seconds, True)):
        begin = now = time.perf_counter()
        count = 0
        while now < begin + seconds:
            send(body)
            count += each
            now = time.perf_counter()
        if is_measured:
            report(count, now - begin)


class Window:
    """Messages under way, of a client that calls back from threads of its own."""

    def __init__(self, size: int) -> None:
        self._room = threading.Semaphore(size)
        self._next = itertools.count(1).__next__
        self.done = 0
        self.error: object = None

    def ended(self) -> None:
        self.done = self._next()
        self._room.release()

    def failed(self, error: object) -> None:
        self.error = error
        self._room.release()

    def flood(self, job: Job, start: Callable[[bytes], object]) -> None:
        """Start one send after the other, with so many under way; report the answers."""
        body = job.body
        for seconds, is_measured in ((job.warm_s, False), (job.seconds, True)):
            begin, done = time.perf_counter(), self.done
            while time.perf_counter() < begin + seconds:
                self._room.acquire()
                start(body)
            if self.error is not None:
                raise SystemExit(f"a send failed: {self.error}")
            if is_measured:
                report(self.done - done, time.perf_counter() - begin)


async def flood(job: Job, start: Callable[[bytes], Awaitable[Any]]) -> None:
    """The same with coroutines: many under way, awaited in the order in which they were sent."""
    body = job.body
    waiting: deque[Awaitable[Any]] = deque()
    for seconds, is_measured in ((job.warm_s, False), (job.seconds, True)):
        begin = time.perf_counter()
        count = 0
        while time.perf_counter() < begin + seconds:
            waiting.extend([start(body) for _ in range(_AT_ONCE)])
            while len(waiting) > job.window:
                await waiting.popleft()
                count += 1
        if is_measured:
            report(count, time.perf_counter() - begin)
    for each in waiting:
        await each


async def fill(job: Job, start: Callable[[bytes], Awaitable[Any]]) -> None:
    """Send so many, as quickly as it goes."""
    body = job.body
    waiting: deque[Awaitable[Any]] = deque()
    begin = time.perf_counter()
    for _ in range(job.count):
        waiting.append(start(body))
        if len(waiting) > job.window:
            await waiting.popleft()
    for each in waiting:
        await each
    report(job.count, time.perf_counter() - begin)


class Reading:
    """How far a consumer is; it begins to count when it is warm and ends with the topic."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._warm_count = int(job.count * WARM_PART)
        self._asked = time.perf_counter()
        self._started = self._begin = 0.0
        self._before = 0

    def is_over(self, count: int) -> bool:
        """Whether enough is read; reports then. To be asked every few milliseconds."""
        job, now = self._job, time.perf_counter()
        if not count:
            if now > self._asked + FIRST_MESSAGE_S:
                raise SystemExit(f"no message came within {FIRST_MESSAGE_S:.0f} s")
            return False
        if not self._started:
            self._started = now
        if not self._begin:
            if count >= job.count:
                raise SystemExit("the topic was read before the consumer was warm")
            if now >= self._started + job.warm_s or count >= self._warm_count:
                self._begin, self._before = now, count
            return False
        if now < self._begin + job.seconds and count < job.count:
            return False
        report(count - self._before, now - self._begin)
        return True

    def watch(self, count: Callable[[], int]) -> None:
        """Look until it is over, from a thread that has nothing else to do."""
        while not self.is_over(count()):
            time.sleep(_POLL_S)

    async def watch_soon(self, count: Callable[[], int]) -> None:
        while not self.is_over(count()):  # noqa: ASYNC110  # it is the time that is waited for
            await asyncio.sleep(_POLL_S)
