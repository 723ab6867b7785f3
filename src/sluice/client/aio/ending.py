"""This module ends tasks, and does not wait for ever for one that does not want to end."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from typing import Any, Final

log_lines = logging.getLogger("sluice.client")

_END_SECONDS: Final = 1.0


async def end_tasks(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Cancel tasks and wait until they are over, for a bounded time.

    A handler may catch its cancellation and go on: it is left behind, and said so.
    """
    ending = [task for task in tasks if not task.done()]
    for task in ending:
        task.cancel()
    if not ending:
        return
    _, left = await asyncio.wait(ending, timeout=_END_SECONDS)
    if left:
        log_lines.warning("%d tasks do not end when they are told to; they are left", len(left))
