"""This module has pages made for what will be written to the log next, where that takes long.

The first write to a page of a file has to find memory for it. Mostly that costs less than the copy.
On a virtual machine whose host hands memory out page by page it can cost ten times as much, and who
appends has one thread. So large writes are timed: where they are slow, another thread reads the
next megabytes of the file, which were never written, and meets the cost in the writer's place. When
that is quick again it ends, for then it would only take time from others. Nothing of the log
changes by it, and nothing relies on it.

Times are a thread's own processor time: what it waits for on a busy machine does not count. The
methods belong to the owner's thread.
"""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter_ns, thread_time_ns
from typing import Final, NamedTuple

from sluice.storage.background import Background
from sluice.storage.files import OpenFile

LARGE_BYTES: Final = 4 << 10  # of a write: of smaller ones most is not the pages' cost
_TIMED_PART: Final = 8  # one of so many large writes is timed, because that costs something too
# So many timed bytes are judged together. Where a page took that long, on average, and they were
# written within that time, reading ahead begins.
_JUDGED_BYTES: Final = 1 << 20
_SLOW_PAGE_NS: Final = 8_000
_JUDGED_NS_MAX: Final = 400_000_000
# It ends where a page took less in all of the last steps: slow memory lies between quick one.
_QUICK_PAGE_NS: Final = 3_000
_QUICK_STEPS: Final = 8
_PAGE_BYTES: Final = 4096
# Who appends turn by turn shares the processors with who sends; who waits for megabytes to be
# written leaves one free.
_LANES: Final = ("ahead", "ahead-too")


class _Pace(NamedTuple):
    """How far ahead of writes pages are made, in which steps, by how many threads."""

    lead_bytes: int
    step_bytes: int
    lane_count: int


_USUAL: Final = _Pace(8 << 20, 4 << 20, 1)
# Whoever writes megabytes early is busy between two looks at what is done, and waits for them.
_EARLY: Final = _Pace(96 << 20, 16 << 20, len(_LANES))


class SlowPages:
    """Watches the large writes of one log."""

    def __init__(
        self,
        background: Background,
        *,
        on_slow: Callable[[], None] = lambda: None,
        own_ns: Callable[[], int] = thread_time_ns,
        now_ns: Callable[[], int] = perf_counter_ns,
    ) -> None:
        """`on_slow` is called whenever memory was seen to be slow."""
        self._background = background
        self._on_slow = on_slow
        self._own_ns = own_ns
        self._now_ns = now_ns
        self.is_ahead = False
        self._untimed_count = 0
        self._judged_bytes = self._judged_ns = self._judged_since_ns = 0
        self._ready_to = 0  # a position in the log
        self._free_lanes = list(reversed(_LANES))
        self._quick_count = 0  # steps, one after the other

    def begin(self) -> int:
        """A large write begins: the time, if it is one of those that are timed, or 0."""
        self._untimed_count += 1
        if self.is_ahead or self._untimed_count < _TIMED_PART:
            return 0
        self._untimed_count = 0
        return self._own_ns()

    def wrote(self, base: int, file: OpenFile, begin: int, end: int, since_ns: int) -> None:
        """The log was written from `begin` to `end`, in the file that begins at `base`; `since_ns`
        is what `begin` said.
        """
        if not self.is_ahead and (
            not since_ns or not self._is_slow(end - begin, self._own_ns() - since_ns)
        ):
            return
        self._go_ahead(base, file, end, _USUAL)

    def wrote_early(
        self, base: int, file: OpenFile, end: int, byte_count: int, took_ns: int
    ) -> None:
        """So many bytes up to `end` were written early, which took other threads so long."""
        if self.is_ahead or self._is_slow(byte_count, took_ns):
            self._go_ahead(base, file, end, _EARLY)

    def _is_slow(self, byte_count: int, took_ns: int) -> bool:
        """Take a write into account: whether pages are to be made ahead from now on."""
        self._judged_bytes += byte_count
        self._judged_ns += took_ns
        if self._judged_bytes < _JUDGED_BYTES:
            return False
        page_ns = self._judged_ns * _PAGE_BYTES // self._judged_bytes
        now_ns = self._now_ns()
        in_time = now_ns - self._judged_since_ns < _JUDGED_NS_MAX
        self._judged_bytes = self._judged_ns = 0
        self._judged_since_ns = now_ns
        self.is_ahead = page_ns > _SLOW_PAGE_NS and in_time
        if self.is_ahead:
            self._on_slow()
        return self.is_ahead

    def _go_ahead(self, base: int, file: OpenFile, end: int, pace: _Pace) -> None:
        """See to it that the next megabytes have pages, as far as they lie in the file."""
        least_free = len(_LANES) - pace.lane_count
        while len(self._free_lanes) > least_free and self._ready_to - end < pace.lead_bytes:
            start = max(self._ready_to, end)
            stop = min(start + pace.step_bytes, base + file.size)
            if stop <= start:
                return
            self._ready_to = stop
            self._make(file, start - base, stop - base)

    def _make(self, file: OpenFile, start: int, stop: int) -> None:
        """Have the pages of a part of a file made."""
        lane = self._free_lanes.pop()

        def work() -> int:
            since_ns = self._own_ns()
            file.warm(start, stop)
            return self._own_ns() - since_ns

        def done(took_ns: int | None, error: BaseException | None) -> None:
            self._free_lanes.append(lane)
            if took_ns is None:
                self._quick_count = _QUICK_STEPS  # errors are met by whoever writes there
            elif took_ns * _PAGE_BYTES < _QUICK_PAGE_NS * (stop - start):
                self._quick_count += 1
            else:
                self._quick_count = 0
                self._on_slow()
            if self._quick_count >= _QUICK_STEPS:
                self._quick_count = 0
                self.is_ahead = False
                self._judged_since_ns = self._now_ns()

        self._background.submit(lane, work, done)
