"""This module is the collector's loop: it looks which files are there, reads, sends and notes.

    look --> a file is new, known, moved away, or written anew --> Source
    read --> a portion of lines --> sent until acknowledged --> place advanced --> noted

A file has at most one portion under way, and a few files have one at a time. So memory is bounded
by the portions, and a broker that is away stops the reading by itself: the lines wait in the files.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from sluice.client.core.messages import Message
from sluice.collector.finding import Finder
from sluice.collector.following import Followed
from sluice.collector.lines import Rules
from sluice.collector.noting import Noter
from sluice.collector.places import PlaceBook
from sluice.collector.sending import Outages, Sender, Shape, is_hopeless
from sluice.collector.sources import Portion, Rewritten, Source
from sluice.errors import ConfigError, SluiceError

log_lines = logging.getLogger("sluice.collector")

_UNDER_WAY_MAX: Final = 16  # files with a portion under way
_PORTIONS_IN_TURN: Final = 8  # of one file, before others have their turn
_PAUSE_SECONDS: Final = 0.2
_PAUSE_SECONDS_MAX: Final = 5.0
_STOP_SECONDS: Final = 10


class Timing(NamedTuple):
    """When something is done; all in seconds."""

    poll: float = 0.25
    linger: float = 0.2  # what is less than a batch waits so long for more
    event_wait: float = 2.0  # an event of several lines is over after so long
    rotated_wait: float = 30.0  # a file that was rotated away is closed after so long
    give_up: float = 0.0  # a broker that is away so long is an error; 0: never


@dataclass(slots=True)
class Progress:
    """What was done so far."""

    files: int = 0
    lines: int = 0
    sent_bytes: int = 0
    refused: int = 0
    behind_bytes: int = 0


@dataclass(slots=True)
class Options:
    """What to collect, and how."""

    shape: Shape
    rules: Rules = field(default_factory=Rules)
    timing: Timing = field(default_factory=Timing)
    batch_bytes: int = 256 * 1024
    batch_count: int = 1000
    from_end: bool = False


class Stopped(Exception):
    """The collector was told to stop while it waited."""


class Collector:
    """Follows files; `run` until told to stop, or `run_once`."""

    def __init__(
        self,
        finder: Finder,
        book: PlaceBook,
        sender: Sender,
        options: Options,
        *,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._finder = finder
        self._book = book
        self._sender = sender
        self._options = options
        self._now = now
        self._tasks: set[asyncio.Task[None]] = set()
        self._slots = asyncio.Semaphore(_UNDER_WAY_MAX)
        self._stop = asyncio.Event()
        self._failed: BaseException | None = None
        self._outages = Outages(options.timing.give_up, now)
        self._noter: Noter
        self._followed: Followed
        self.progress = Progress()

    def stop(self) -> None:
        self._stop.set()

    # ------------------------------------------------------------------------------------- running

    async def run(self) -> None:
        """Follow until `stop`; what was not acknowledged by then is read again next time."""
        self._open()
        try:
            await self._begin()
            while not self._stop.is_set():
                self._start_reading()
                await self._pause(self._options.timing.poll)
                if self._failed is not None:
                    break
                self._followed.look(await asyncio.to_thread(self._finder.look))
                self._count()
            if self._failed is not None:  # also where it was stopped before that was seen
                raise self._failed
        finally:
            await self._end()

    async def run_once(self) -> None:
        """Read what is there now, to the last byte, and end; raises Stopped where `stop` came."""
        self._open()
        try:
            await self._begin(once=True)
            waiting = {asyncio.create_task(self._read_all(source)) for source in self._followed}
            try:
                while waiting:
                    done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_EXCEPTION)
                    for task in done:
                        task.result()
            finally:
                for task in waiting:
                    task.cancel()
                await asyncio.gather(*waiting, return_exceptions=True)
        finally:
            await self._end()

    def _open(self) -> None:
        self._noter = Noter(self._book)
        self._followed = Followed(
            self._book,
            from_end=self._options.from_end,
            rotated_wait=self._options.timing.rotated_wait,
            changed=self._noter.changed,
            now=self._now,
        )

    async def _begin(self, *, once: bool = False) -> None:
        found = await asyncio.to_thread(self._finder.look)
        self._followed.begin(found, self._finder.patterns, once=once)
        self._count()
        await self._noter.noted()

    def _count(self) -> None:
        self.progress.files = self._followed.count
        self.progress.behind_bytes = self._followed.behind_bytes

    async def _end(self) -> None:
        """Let what is under way end, note it, close everything."""
        self._stop.set()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=_STOP_SECONDS)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._count()
        for source in self._followed:
            source.close()
        await self._noter.close()

    async def _pause(self, seconds: float) -> None:
        """Wait, or return when the collector is told to stop."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._stop.wait()

    # ------------------------------------------------------------------------ reading and sending

    def _start_reading(self) -> None:
        now = self._now()
        rests = {
            source.place.path
            for source in self._followed
            if not source.is_visible
            and (source.is_busy or (source.size > source.place.offset and not source.stalled))
        }
        for source in self._followed:
            if source.is_busy or (source.is_visible and source.place.path in rests):
                continue  # what was rotated away goes first
            ending = self._ending(source, now)
            if ending is None:
                continue
            source.is_busy = True
            task = asyncio.create_task(self._read_some(source, *ending))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def _ending(self, source: Source, now: float) -> tuple[bool, bool] | None:
        """(is_quiet, is_final) where it is time to read, else None."""
        timing = self._options.timing
        place, size = source.place, source.size
        quiet = now - source.changed_at
        if size == place.offset:
            # Nothing new; but a file of the same size may have been written anew.
            return (False, False) if source.checked_ns != source.modified_ns else None
        is_quiet = self._options.rules.start is not None and quiet >= timing.event_wait
        is_final = not source.is_visible and quiet >= timing.rotated_wait
        if source.stalled is not None:
            if source.stalled == (size, is_quiet, is_final):
                return None
        elif 0 < size - place.offset < self._options.batch_bytes and (
            now - source.waiting_since < timing.linger
        ):
            return None
        return is_quiet, is_final

    async def _read_some(self, source: Source, is_quiet: bool, is_final: bool) -> None:
        """One file's task, as long as there is enough for a batch."""
        try:
            goes_on = True
            while goes_on:
                try:
                    async with self._slots:  # given up at times, so that others have a turn
                        goes_on = await self._read_turn(source, is_quiet, is_final)
                except Rewritten:
                    self._followed.restart(source)
                    return
        except Stopped:
            pass
        except OSError as error:
            self._followed.complain(source.path, error)
            self._followed.close(source)
        except Exception as error:
            self._failed = error
        finally:
            source.is_busy = False

    async def _read_turn(self, source: Source, is_quiet: bool, is_final: bool) -> bool:
        """A few portions; whether there is enough for another turn."""
        for _ in range(_PORTIONS_IN_TURN):
            self._check_stop()
            size, modified_ns = source.size, source.modified_ns
            portion = await self._read(source, None, is_quiet, is_final)
            source.checked_ns = modified_ns
            if portion is None:
                source.stalled = (size, is_quiet, is_final)
                return False
            await self._ship(source, portion)
            source.stalled = None
            source.waiting_since = self._now()
            left_bytes = source.status().st_size - source.place.offset
            if left_bytes < self._options.batch_bytes and not (left_bytes and is_final):
                return False
        return True

    def _check_stop(self) -> None:
        if self._stop.is_set():
            raise Stopped

    async def _read_all(self, source: Source) -> None:
        """Everything up to the size that it has now."""
        limit = source.status().st_size
        try:
            async with self._slots:
                while True:
                    self._check_stop()
                    portion = await self._read(source, limit, True, True)
                    if portion is None:
                        return
                    await self._ship(source, portion)
        except Rewritten:
            for fresh in self._followed.restart(source):
                await self._read_all(fresh)
        except OSError as error:
            raise ConfigError(f"{source.path}: {error.strerror}") from error

    async def _read(
        self, source: Source, limit: int | None, is_quiet: bool, is_final: bool
    ) -> Portion | None:
        options = self._options
        return await asyncio.to_thread(
            source.read,
            options.rules,
            options.batch_bytes,
            options.batch_count,
            limit=limit,
            is_quiet=is_quiet,
            is_final=is_final,
        )

    async def _ship(self, source: Source, portion: Portion) -> None:
        """Send until it is acknowledged, then take note of it."""
        if not source.is_marked:
            # A file that is written anew before this is acknowledged gets another id.
            source.mark(portion)
            await self._noter.noted()
        await self._noter.healthy()
        messages = self._options.shape.messages(source.place, portion.lines)
        if messages:
            await self._deliver(messages, source.place.path)
        source.advance(portion)
        self.progress.behind_bytes = max(self.progress.behind_bytes - len(portion.used), 0)
        self._noter.changed()

    async def _deliver(self, messages: Sequence[Message], lane: str) -> None:
        """Send until acknowledged, all but what no broker will ever take."""
        topic = messages[0].topic
        pause = _PAUSE_SECONDS
        while True:
            try:
                await self._sender.send(topic, messages, lane)
            except SluiceError as error:
                if isinstance(error, ConfigError):
                    raise
                if is_hopeless(error):
                    await self._deliver_parts(messages, lane, error)
                    return
                self._outages.failed(topic, error)
            else:
                self._outages.sent(topic)
                self.progress.lines += len(messages)
                self.progress.sent_bytes += sum(len(message.body) for message in messages)
                return
            self._check_stop()
            await self._pause(pause * random.uniform(0.7, 1.0))
            self._check_stop()
            pause = min(pause * 2, _PAUSE_SECONDS_MAX)

    async def _deliver_parts(
        self, messages: Sequence[Message], lane: str, error: SluiceError
    ) -> None:
        """All but those that are refused: one bad line does not hold up a file."""
        if len(messages) > 1:
            half = len(messages) // 2
            await self._deliver(messages[:half], lane)
            await self._deliver(messages[half:], lane)
            return
        properties = messages[0].properties or {}
        self.progress.refused += 1
        log_lines.error(
            "%s: the line at byte %s is refused and left out: %s",
            properties.get("path"),
            properties.get("offset"),
            error,
        )
