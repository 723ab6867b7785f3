"""This module runs collectors in tests: a sender that remembers, a directory of logs, waiting."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, TypeVar

import uvloop

from sluice.client.core.messages import Message
from sluice.collector.collecting import Collector, Options, Timing
from sluice.collector.finding import Finder
from sluice.collector.places import PlaceBook
from sluice.collector.sending import Sender, Shape
from sluice.errors import LinkLost, SluiceError

WAIT_SECONDS = 180.0
T = TypeVar("T")
QUICK = Timing(poll=0.002, linger=0.0, event_wait=0.02, rotated_wait=0.02)


class FakeSender:
    """Takes messages as a broker does; fails as it is told to."""

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self.batches: list[tuple[str, int]] = []  # lane, messages
        self.failures: list[SluiceError] = []  # of the next sends
        self.stores_what_fails = False
        self.is_away = False
        self.under_way = 0
        self.under_way_most = 0

    async def send(self, topic: str, messages: Sequence[Message], lane: str) -> None:
        self.under_way += 1
        self.under_way_most = max(self.under_way_most, self.under_way)
        try:
            await asyncio.sleep(0)
            error = self.failures.pop(0) if self.failures else None
            if self.is_away:
                error = LinkLost("nobody is there")
            if error is None or self.stores_what_fails:
                assert all(message.topic == topic for message in messages)
                self.messages += messages
                self.batches.append((lane, len(messages)))
            if error is not None:
                raise error
        finally:
            self.under_way -= 1

    @property
    def bodies(self) -> list[str]:
        return [bytes(message.body).decode() for message in self.messages]


class Bench:
    """A directory with logs, and what is needed to collect them."""

    def __init__(self, directory: Path, *patterns: str, **changes: Any) -> None:
        self.directory = directory / "logs"
        self.directory.mkdir(exist_ok=True)
        self.state = directory / "state"
        self.sender = FakeSender()
        self.patterns = [str(self.directory / pattern) for pattern in patterns or ("*.log",)]
        self.options = Options(Shape("logs", "here"), timing=QUICK, **changes)

    @property
    def log(self) -> Path:
        return self.directory / "app.log"

    def append(self, text: str, name: str = "app.log") -> None:
        with (self.directory / name).open("a", encoding="utf-8") as file:
            file.write(text)

    def collector(self, book: PlaceBook, sender: Sender | None = None) -> Collector:
        finder = Finder(self.patterns, state_directory=str(self.state))
        return Collector(finder, book, sender or self.sender, self.options)

    async def once(self) -> Collector:
        """Read what is there."""
        book = PlaceBook.open(str(self.state))
        try:
            collector = self.collector(book)
            await collector.run_once()
        finally:
            book.release()
        return collector

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[Collector]:
        """A collector that follows, until the block ends."""
        book = PlaceBook.open(str(self.state))
        collector = self.collector(book)
        task = asyncio.create_task(collector.run())
        try:
            yield collector
            collector.stop()
            async with asyncio.timeout(WAIT_SECONDS):
                await task
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            book.release()

    async def has(self, *bodies: str) -> None:
        """Wait until exactly these were sent."""
        await eventually(lambda: len(self.sender.messages) >= len(bodies))
        assert self.sender.bodies == list(bodies)


def run(work: Coroutine[Any, Any, T]) -> T:
    """Run a test's coroutine on the loop that the command has."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(work)


async def eventually(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(WAIT_SECONDS):
        while not holds():  # noqa: ASYNC110 - it is a file that is waited for
            await asyncio.sleep(0.002)
