"""This module is who handles messages: a task that calls the handler, one call at a time.

A handler that takes too long is given up by cancelling the task, which goes on with other messages.
"""

from __future__ import annotations

import asyncio
from typing import Any

from sluice.client.aio.handler_threads import Portion
from sluice.client.aio.member import Lane
from sluice.client.core.messages import ReceivedMessage


class Worker:
    """One task, and what its handler has now."""

    __slots__ = ("is_hung", "lane", "messages", "portion", "since", "task")

    def __init__(self, task: asyncio.Task[Any] | None = None) -> None:
        self.task = task
        self.lane: Lane | None = None
        self.messages: list[ReceivedMessage] = []  # that the handler has now
        self.portion: Portion | None = None
        self.since = 0.0  # 0: with something that nobody has looked at yet
        self.is_hung = False

    def give_up(self) -> None:
        """Its handler takes too long."""
        assert self.task is not None
        self.is_hung = True
        self.task.cancel()

    def go_on(self) -> None:
        """The handler that was given up caught that and came back."""
        assert self.task is not None
        self.is_hung = False
        self.task.uncancel()


def is_cancelled() -> bool:
    """Whether somebody wants the running task to end."""
    task = asyncio.current_task()
    return task is None or task.cancelling() > 0


def forget_cancelling() -> None:
    """The running task goes on, whoever cancelled it."""
    task = asyncio.current_task()
    assert task is not None
    while task.cancelling():
        task.uncancel()
