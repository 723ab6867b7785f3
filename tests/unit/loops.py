"""This module runs a test's coroutine on each event loop that Sluice runs on."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
import uvloop

# A test that hangs fails with a traceback instead; no test is measured by it.
HANG_SECONDS = 180.0

Run = Callable[[Coroutine[Any, Any, None]], None]


def run_on(loop_factory: Callable[[], asyncio.AbstractEventLoop]) -> Run:
    async def guarded(work: Coroutine[Any, Any, None]) -> None:
        async with asyncio.timeout(HANG_SECONDS):
            await work

    def run(work: Coroutine[Any, Any, None]) -> None:
        with asyncio.Runner(loop_factory=loop_factory) as runner:
            runner.run(guarded(work))

    return run


both_loops = pytest.mark.parametrize(
    "run",
    [run_on(asyncio.new_event_loop), run_on(uvloop.new_event_loop)],
    ids=["asyncio", "uvloop"],
)
run_once = run_on(uvloop.new_event_loop)


async def until(condition: Callable[[], object]) -> None:
    """Return when the condition holds; the guard around the test ends a wait that is in vain."""
    while not condition():  # noqa: ASYNC110  # nothing tells when a condition changes
        await asyncio.sleep(0.005)
