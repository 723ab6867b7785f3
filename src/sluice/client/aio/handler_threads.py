"""This module runs handlers that are plain functions on threads, a portion of messages at a time.

The threads are daemons: a handler that never comes back must not keep a process from ending. What
they did is told to the event loop once for each portion, because waking it up costs more than a
quick handler does.
"""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections.abc import Callable
from typing import Any, Final

from sluice.client.core.messages import ReceivedMessage

_IDLE_SECONDS: Final = 30.0


class Portion:
    """Messages for one thread, and how far it is with them."""

    __slots__ = ("call", "errors", "future", "groups", "is_given_up", "place", "started", "took")

    def __init__(
        self,
        call: Callable[[list[ReceivedMessage]], BaseException | None],
        groups: list[list[ReceivedMessage]],
    ) -> None:
        self.call = call
        self.groups = groups  # one call of the handler for each
        self.errors: list[BaseException | None] = []
        self.place = 0  # the group that is under way
        self.started = time.monotonic()  # of that group
        self.took = 0.0
        self.is_given_up = False
        self.future: asyncio.Future[None] | None = None

    def run(self) -> None:
        """All groups, one after the other; none after it was given up."""
        begun = self.started = time.monotonic()
        for place, group in enumerate(self.groups):
            if self.is_given_up:
                return
            self.place = place
            self.errors.append(self.call(group))
            self.started = time.monotonic()
        self.took = self.started - begun


class HandlerThreads:
    """Threads that come when there is work, and go when there is none."""

    def __init__(self, name: str, loop: asyncio.AbstractEventLoop) -> None:
        self._name = name
        self._loop = loop
        self._work: queue.SimpleQueue[Portion | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._idle = 0
        self._count = 0

    async def run(self, portion: Portion) -> None:
        """Run a portion on some thread and wait for it."""
        portion.future = self._loop.create_future()
        with self._lock:
            if self._idle:
                self._idle -= 1
                start = False
            else:
                self._count += 1
                start = True
        self._work.put(portion)
        if start:
            name = f"{self._name}-{self._count}"
            threading.Thread(target=self._serve, name=name, daemon=True).start()
        await portion.future

    def _serve(self) -> None:
        while True:
            try:
                portion = self._work.get(timeout=_IDLE_SECONDS)
            except queue.Empty:
                with self._lock:
                    # Somebody may count on this thread: its work is in the queue, or comes.
                    if not self._idle:
                        continue
                    self._idle -= 1
                return
            if portion is None:
                return
            portion.run()
            with self._lock:
                self._idle += 1
            try:
                self._loop.call_soon_threadsafe(_tell, portion)
            except RuntimeError:  # the loop has ended
                return

    def close(self) -> None:
        """No more work: threads that wait end now, those that work when they come back."""
        for _ in range(self._count):
            self._work.put(None)


def _tell(portion: Portion) -> None:
    future: asyncio.Future[Any] | None = portion.future
    if future is not None and not future.done():
        future.set_result(None)
