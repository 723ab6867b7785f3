"""This module is what a thread holds while a send is under way: a future that costs little.

`concurrent.futures.Future` makes a lock and a condition for each. Here a thread that waits makes
its own lock; where nobody waits there is none. One lock for all guards the change of state.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Final

from sluice.client.core.messages import SendResult
from sluice.errors import RequestTimedOut

log_lines = logging.getLogger("sluice.client")

_guard: Final = threading.Lock()


class SendFuture:
    """The result of a send, or its error, when it is there."""

    __slots__ = ("_calls", "_error", "_is_done", "_result", "_waiters")

    def __init__(self) -> None:
        self._is_done = False
        self._result: SendResult | None = None
        self._error: BaseException | None = None
        self._waiters: list[threading.Lock] | None = None
        self._calls: list[Callable[[SendFuture], None]] | None = None

    def done(self) -> bool:
        return self._is_done

    def result(self, timeout: float | None = None) -> SendResult:
        """Wait for the result; raises its error, or RequestTimedOut after so many seconds."""
        if not self._is_done:
            self._wait(timeout)
        if self._error is not None:
            raise self._error
        assert self._result is not None
        return self._result

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait, and return the error instead of raising it; None where there is none."""
        if not self._is_done:
            self._wait(timeout)
        return self._error

    def add_done_callback(self, call: Callable[[SendFuture], None]) -> None:
        """Have `call(future)` called, on the loop's thread, or now where it is done."""
        with _guard:
            if not self._is_done:
                self._calls = [*(self._calls or ()), call]
                return
        self._tell(call)

    def _wait(self, timeout: float | None) -> None:
        waiter = threading.Lock()
        waiter.acquire()
        with _guard:
            if self._is_done:
                return
            self._waiters = [*(self._waiters or ()), waiter]
        if not waiter.acquire(timeout=-1 if timeout is None else timeout):
            raise RequestTimedOut(f"the send has no result after {timeout:g} s; it goes on")

    # What an operation of the client needs of a future.

    def set_result(self, result: SendResult) -> None:
        self._result = result
        self._finish()

    def set_exception(self, error: BaseException) -> None:
        self._error = error
        self._finish()

    def _finish(self) -> None:
        with _guard:
            self._is_done = True
            waiters, self._waiters = self._waiters, None
            calls, self._calls = self._calls, None
        for waiter in waiters or ():
            waiter.release()
        for call in calls or ():
            self._tell(call)

    def _tell(self, call: Callable[[SendFuture], None]) -> None:
        try:
            call(self)
        except Exception:  # others wait for their results on the same thread
            log_lines.exception("a callback of a send failed")
