"""This module decides when the log goes to the disk, and tells who waits that it is there.

Group commit: one `fdatasync` at a time, everybody whose entry was written before it started is
served by it, and the next one starts as soon as there is somebody to serve. With `flush = "async"`
nobody waits and the disk is asked on RocketMQ's timers: every 500 ms when at least 4 pages are
waiting, every 10 s for less.

A failed fsync is final. The kernel may drop the pages it could not write and call the next fsync a
success, so asking again would acknowledge what is lost. The log stops instead, and recovery at the
next start finds out what is really there.

This module knows no entries and no queues, only positions. Its methods belong to the owner's
thread.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from time import perf_counter_ns
from typing import Final

from sluice.errors import SluiceError, StoreReadOnly
from sluice.storage.background import Background
from sluice.storage.files import OpenFile
from sluice.telemetry import Durations

Confirmed = Callable[[SluiceError | None], None]

_PAGE_BYTES: Final = 4096


class Flusher:
    """Group commit for one log. `flushed` is the position below which everything is on the disk."""

    def __init__(
        self,
        background: Background,
        files_between: Callable[[int, int], list[OpenFile]],
        mark_durable: Callable[[int], None],
        on_flushed: Callable[[], None],
        flushed: int,
    ) -> None:
        self._background = background
        self._files_between = files_between
        self._mark_durable = mark_durable  # runs in the background, right after the disk has it
        self._on_flushed = on_flushed  # also called when `failure` was set
        self.flushed = flushed
        # Below this position nobody waits any more: what is durable there has also taken effect.
        self.settled = flushed
        self.failure: StoreReadOnly | None = None
        self.round_count = 0
        self.times = Durations()  # how long the disk took for each round
        self._running = False
        self._again_to = 0
        self._last_round_ms = 0
        self._waiting: deque[tuple[int, Confirmed]] = deque()

    @property
    def waiting_count(self) -> int:
        """How many wait to be told."""
        return len(self._waiting)

    def wait(self, end: int, done: Confirmed) -> None:
        """Call `done` once everything below `end` is durable, in the order of the log."""
        self._waiting.append((end, done))

    def flush_to(self, written: int) -> None:
        """See to it that everything below `written` becomes durable soon."""
        if self.failure is not None or written <= self.flushed:
            return
        if self._running:
            self._again_to = max(self._again_to, written)
            return
        self._running = True
        self._again_to = 0
        files = self._files_between(self.flushed, written)

        def work() -> int:
            start_ns = perf_counter_ns()
            for file in files:
                file.sync()
            elapsed_ns = perf_counter_ns() - start_ns
            # A sync that failed elsewhere may have taken with it what this one seems to have saved.
            if self.failure is None:
                self._mark_durable(written)
            return elapsed_ns

        def done(elapsed_ns: int | None, error: BaseException | None) -> None:
            if elapsed_ns is not None:
                self.times.add(elapsed_ns)
            self._round_done(written, error)

        self._background.submit("flush", work, done)

    def _round_done(self, target: int, error: BaseException | None) -> None:
        self._running = False
        if self.failure is not None:
            return
        if error is not None:
            self.fail(f"fsync failed: {error}")
            return
        self.flushed = target
        self.round_count += 1
        self._on_flushed()
        waiting = self._waiting
        while waiting and waiting[0][0] <= target:
            end, done = waiting.popleft()
            self.settled = max(self.settled, end)
            done(None)
        self.settled = max(self.settled, target)
        if self._again_to > self.flushed:
            self.flush_to(self._again_to)

    def fail(self, reason: str) -> None:
        """Stop for good: nothing is acknowledged any more, and everybody who waits is told why."""
        if self.failure is None:
            self.failure = StoreReadOnly(
                f"read-only: {reason}; look at the disk, then start again: "
                "recovery finds what is safe"
            )
        self._on_flushed()
        while self._waiting:
            self._waiting.popleft()[1](self.failure)

    def tick(
        self, now_ms: int, written: int, *, interval_ms: int, thorough_ms: int, pages: int
    ) -> None:
        """The timers of the asynchronous mode."""
        age_ms = now_ms - self._last_round_ms
        enough = written - self.flushed >= pages * _PAGE_BYTES
        if (enough and age_ms >= interval_ms) or age_ms >= thorough_ms:
            self._last_round_ms = now_ms
            self.flush_to(written)
