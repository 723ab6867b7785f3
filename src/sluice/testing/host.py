"""This module is an event loop on a thread of its own, for a server that a test runs beside itself.

A test that blocks, one that runs a loop of its own and a client in another process can all use such
a server. Every wait has an end: a test that hangs is worth less than one that fails.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Coroutine
from typing import Any, Final, TypeVar

import uvloop

T = TypeVar("T")

PATIENCE_SECONDS: Final = 60.0


class Host:
    """An event loop on a thread."""

    def __init__(self, name: str) -> None:
        self._loop = uvloop.new_event_loop()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._go_on = threading.Event()
        self._go_on.set()
        self._thread.start()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
        finally:
            asyncio.set_event_loop(None)

    def run(self, work: Coroutine[Any, Any, T], seconds: float = PATIENCE_SECONDS) -> T:
        """Have a coroutine done on the thread and wait for its result."""
        if not self._go_on.is_set():
            work.close()
            raise RuntimeError("the broker is frozen; thaw it first (sluice_faults.thaw())")
        if threading.current_thread() is self._thread:
            work.close()
            raise RuntimeError("a broker's own thread cannot wait for itself")
        done = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return done.result(seconds)
        except TimeoutError:
            if not done.done():
                done.cancel()
                raise TimeoutError(f"the broker did not do it within {seconds:g} s") from None
            raise

    def call(self, function: Callable[..., T], *arguments: Any) -> T:
        """Have a plain function called on the thread and wait for its result."""

        async def work() -> T:
            return function(*arguments)

        return self.run(work())

    def freeze(self) -> None:
        """Stop the thread where it is, as SIGSTOP stops a process; returns when it stands."""
        stands = threading.Event()

        def stand() -> None:
            stands.set()
            self._go_on.wait()

        self._go_on.clear()
        self._loop.call_soon_threadsafe(stand)
        if not stands.wait(PATIENCE_SECONDS):
            self._go_on.set()
            raise TimeoutError("the broker could not be stopped")

    def thaw(self) -> None:
        """Go on after `freeze`."""
        self._go_on.set()

    def stop(self) -> None:
        """End the loop and the thread; what still runs there is cancelled."""
        self.thaw()
        with contextlib.suppress(TimeoutError):
            self.run(_cancel_all())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(PATIENCE_SECONDS)
        if not self._thread.is_alive():
            self._loop.close()


async def _cancel_all() -> None:
    tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await asyncio.get_running_loop().shutdown_default_executor()
