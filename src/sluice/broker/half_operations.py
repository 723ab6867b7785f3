"""This module writes down what became of half messages, and knows how much of it is still needed.

An operation is an entry of its own topic that names half messages by their offsets. Those of
commits are gathered for a tick: until theirs is written the committed message speaks for itself,
because it names its half message as its origin. A rollback leaves no other trace, so its operation
is written in the turn in which the word came.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING

from sluice.broker.half_messages import ASKED_TAG, DONE_TAG, operations
from sluice.errors import SluiceError
from sluice.model import Message

if TYPE_CHECKING:
    from sluice.broker.core import BrokerCore

Done = Callable[[SluiceError | None], None]


class Operations:
    """The operations of one broker."""

    def __init__(self, core: BrokerCore) -> None:
        self._core = core
        self._pending: dict[int, Done | None] = {}  # half messages that are done; who waits for it
        self._asked: list[int] = []  # ... that were asked about
        # Half messages whose operation is not confirmed, with the position of what was made of
        # them: a start must walk the log from there.
        self._unsafe: dict[int, int] = {}
        # Operations that a start reads: offset, and the highest half message that each is about.
        self._written: deque[tuple[int, int]] = deque()
        self._next_offset = 0  # all operations below are known
        self._is_called = False

    def begin(self, written: list[tuple[int, int]], next_offset: int) -> None:
        """What a start has read."""
        self._written = deque(written)
        self._next_offset = next_offset

    # -------------------------------------------------------------------------------------- writing

    def done(self, offset: int, made_at: int, told: Done | None = None) -> None:
        """A half message is done; `told` hears when that is written."""
        self._pending[offset] = told
        self._unsafe[offset] = made_at
        if told is not None and not self._is_called:
            self._is_called = True
            self._core.call_soon(self.write)

    def undone(self, offset: int) -> None:
        """What was made of it could not be stored."""
        self._pending.pop(offset, None)
        self._unsafe.pop(offset, None)

    def asked(self, offset: int) -> None:
        """A half message was asked about."""
        self._asked.append(offset)

    def write(self) -> None:
        """Write down what is waiting for it."""
        self._is_called = False
        now_ms = self._core.now_ms()
        if self._asked:
            asked, self._asked = self._asked, []
            for message, offsets in operations(ASKED_TAG, asked, now_ms):
                self._append(message, offsets, {})
        if self._pending:
            pending, self._pending = self._pending, {}
            for message, offsets in operations(DONE_TAG, pending, now_ms):
                self._append(message, offsets, {offset: pending[offset] for offset in offsets})

    def _append(self, message: Message, offsets: list[int], about: dict[int, Done | None]) -> None:
        row: tuple[int, int] | None = None

        def confirmed(error: SluiceError | None) -> None:
            if error is None:
                for offset in about:
                    self._unsafe.pop(offset, None)
            else:
                # It is tried again, but of those that are open again because what was made of
                # them failed with it. Nobody is told twice.
                self._pending.update(dict.fromkeys(o for o in about if o in self._unsafe))
                if row is not None:
                    self._next_offset = min(self._next_offset, row[0])
                    with suppress(ValueError):  # it may be one that nobody needs any more
                        self._written.remove(row)
            for told in about.values():
                if told is not None:
                    told(error)

        try:
            placed = self._core.append(message, confirmed)
        except SluiceError as error:
            confirmed(error)
            return
        row = (placed.queue_offset, max(offsets))
        self._written.append(row)
        self._next_offset = placed.queue_offset + 1

    # ------------------------------------------------------------------------------------- progress

    def needed_from(self, half_offset: int) -> int:
        """The first operation that says something of half messages from an offset on."""
        written = self._written
        while written and written[0][1] < half_offset:
            written.popleft()
        return written[0][0] if written else self._next_offset

    def walk_from(self, end: int) -> int:
        """Where a start begins to look for what was made of half messages."""
        return min(self._unsafe.values(), default=end)

    def lowest_unsafe(self, offset: int) -> int:
        """The lowest half message that may have to be opened again; the offset where none may."""
        return min(self._unsafe, default=offset)
