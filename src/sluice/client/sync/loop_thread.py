"""This module is the one thread with an event loop that all blocking clients of a process share.

It starts with the first client and lives as long as the process. After a fork the child has no such
thread: its clients make a new one, and those of the parent say that they are of no use.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections.abc import Callable, Coroutine
from typing import Any, Final, TypeVar

from sluice.errors import ClientClosed

Result = TypeVar("Result")


class LoopThread:
    """An event loop on a daemon thread, and ways to have something done there."""

    def __init__(self) -> None:
        self.is_foreign = False  # of the process before a fork
        self.loop = _new_loop()
        self._thread = threading.Thread(target=self._run, name="sluice-client", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_forever()

    def check(self) -> None:
        """Refuse a call that could never come back."""
        if self.is_foreign:
            raise ClientClosed("this client belongs to the process before the fork; make a new one")
        if threading.get_ident() == self._thread.ident:
            raise ClientClosed(
                "a blocking call inside of a coroutine of the client's own loop would wait for "
                "ever; use sluice.aio there"
            )

    def run(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Have a coroutine done and wait for its result."""
        try:
            self.check()
        except ClientClosed:
            work.close()
            raise
        done = asyncio.run_coroutine_threadsafe(work, self.loop)
        try:
            return done.result()
        except BaseException:
            done.cancel()
            raise

    def call(self, function: Callable[..., Result], *arguments: Any) -> Result:
        """Have a plain function called on the loop and wait for its result."""

        async def work() -> Result:
            return function(*arguments)

        return self.run(work())


def _new_loop() -> asyncio.AbstractEventLoop:
    with contextlib.suppress(ImportError):
        import uvloop

        return uvloop.new_event_loop()
    return asyncio.new_event_loop()


class _Shared:
    """The thread of this process, if it has one."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.thread: LoopThread | None = None

    def after_fork(self) -> None:
        """In the child: the thread stayed behind, and whoever held the lock did, too."""
        self.lock = threading.Lock()
        if self.thread is not None:
            self.thread.is_foreign = True
            self.thread = None


_shared: Final = _Shared()
os.register_at_fork(after_in_child=_shared.after_fork)


def loop_thread() -> LoopThread:
    """The process's thread, started where it has none."""
    with _shared.lock:
        if _shared.thread is None:
            _shared.thread = LoopThread()
        return _shared.thread
