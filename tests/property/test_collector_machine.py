"""This module collects logs through random lives of theirs, and looks for what is lost or mangled.

Logs grow, are renamed, copied and truncated, emptied; the collector is restarted, or dies as by
kill -9; sends fail with and without having been stored. Whatever happens, in any order: each line
is sent, no message is anything but a line, a file's lines are in order, and who knows the messages
by their file and offset sees each line once.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sluice.client.core.messages import Message
from sluice.collector import collecting
from sluice.collector.collecting import Collector
from sluice.collector.places import PlaceBook
from sluice.errors import ConfigError, LinkLost
from tests.unit.collector.collect_kit import Bench, FakeSender, eventually, run


class MortalBook(PlaceBook):
    """Places that are not written any more after the process has died."""

    is_dead = False

    def write(self, image: bytes) -> None:
        if not self.is_dead:
            super().write(image)


class MortalSender:
    """Sends nothing any more after the process has died."""

    def __init__(self, sender: FakeSender) -> None:
        self._sender = sender
        self.is_dead = False

    async def send(self, topic: str, messages: Sequence[Message], lane: str) -> None:
        if self.is_dead:
            raise ConfigError("dead")  # not tried again
        await self._sender.send(topic, messages, lane)


class Life:
    """Logs, the collector, and what has to come out of it."""

    def __init__(self, directory: Path, pattern: str) -> None:
        self.bench = Bench(directory, pattern, batch_bytes=300, batch_count=5)
        self.lines: list[str] = []
        self.copies = 0
        self.may_repeat = False
        self._book: MortalBook
        self._sender: MortalSender
        self._collector: Collector
        self._task: asyncio.Task[None]

    async def start(self) -> None:
        self._book = MortalBook.open(str(self.bench.state))
        self._sender = MortalSender(self.bench.sender)
        self._collector = self.bench.collector(self._book, self._sender)
        self._task = asyncio.create_task(self._collector.run())

    async def stop(self, *, dies: bool = False) -> None:
        if dies:
            self._book.is_dead = self._sender.is_dead = True
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self.may_repeat = True
        else:
            self._collector.stop()
            await self._task
        self._book.release()

    def line(self) -> str:
        """A line that no other is like, long enough to know its file by."""
        text = f"line {len(self.lines)} " + "abcdefg " * (8 + len(self.lines) % 5)
        self.lines.append(text)
        return text

    async def settle(self) -> None:
        """Wait until all that was written is sent."""
        wanted = set(self.lines)
        await eventually(lambda: self._task.done() or wanted <= set(self.bench.sender.bodies))
        if self._task.done():
            self._task.result()

    async def step(self, action: str, count: int) -> None:
        bench = self.bench
        if action == "append":
            bench.append("".join(self.line() + "\n" for _ in range(count)))
        elif action == "append slowly":
            text = self.line() + "\n"
            bench.append(text[:count])
            await asyncio.sleep(0.003)
            bench.append(text[count:])
        elif action == "rename":
            for number in range(9, 0, -1):
                old = bench.directory / f"app.log.{number}"
                if old.exists():
                    old.rename(bench.directory / f"app.log.{number + 1}")
            bench.log.rename(bench.directory / "app.log.1")
            bench.append("")
        elif action == "copy and truncate":
            if not any(message for message in bench.sender.messages):
                await self.settle()
            self.copies += 1
            shutil.copy(bench.log, bench.directory / f"app.log-{self.copies}")
            if count % 2:
                await asyncio.sleep(0.004)
            bench.log.write_bytes(b"")
            self.may_repeat = True  # a copy that is known by too little is read again
        elif action == "empty":
            await self.settle()
            bench.log.write_text(self.line() + "\n")
        elif action == "fail":
            bench.sender.failures += [LinkLost("away")] * count
            bench.sender.stores_what_fails = count % 2 == 0
            self.may_repeat = self.may_repeat or bench.sender.stores_what_fails
        elif action == "wait":
            await asyncio.sleep(0.005)
        else:
            await self.stop(dies=action == "die")
            await self.start()

    def check(self) -> None:
        bodies = self.bench.sender.bodies
        counts = Counter(bodies)
        assert set(counts) == set(self.lines)
        if not self.may_repeat:
            assert len(bodies) == len(self.lines)
        by_file: dict[str, dict[int, str]] = {}
        for message in self.bench.sender.messages:
            properties = message.properties or {}
            known = by_file.setdefault(properties["file"], {})
            body = bytes(message.body).decode()
            assert known.setdefault(int(properties["offset"]), body) == body
        order = {line: number for number, line in enumerate(self.lines)}
        for known in by_file.values():
            numbers = [order[known[offset]] for offset in sorted(known)]
            assert numbers == sorted(numbers)


actions = st.tuples(
    st.sampled_from(
        [
            *("append", "append", "append", "append slowly", "wait", "fail"),
            *("rename", "copy and truncate", "empty", "restart", "die"),
        ]
    ),
    st.integers(1, 6),
)


async def live(directory: Path, steps: list[tuple[str, int]]) -> None:
    life = Life(directory, "app.log*")
    life.bench.append(life.line() + "\n")
    await life.start()
    try:
        for action, count in steps:
            await life.step(action, count)
        life.bench.sender.failures.clear()
        await life.settle()
    finally:
        await life.stop()
    life.check()


def live_through(steps: list[tuple[str, int]]) -> None:
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as directory:
        patch.setattr(collecting, "_PAUSE_SECONDS", 0.001)
        patch.setattr(os, "fsync", lambda fd: None)  # no machine crashes here
        run(live(Path(directory), steps))


@settings(max_examples=25)
@given(steps=st.lists(actions, max_size=14))
def test_nothing_is_lost(steps: list[tuple[str, int]]) -> None:
    live_through(steps)


@pytest.mark.soak
@settings(max_examples=2000)
@given(steps=st.lists(actions, max_size=40))
def test_nothing_is_lost_in_long_lives(steps: list[tuple[str, int]]) -> None:
    live_through(steps)
