"""This module keeps what waits longer than the log does: it is written anew, further up in the log.

Retention takes whole files, oldest first, and asks before it does. A waiting message below the
position asked about is appended once more as a timer, with the same time and the position of the
old entry as its origin; then retention may take the file. A message of a delay level becomes a
timer by that: its level's queue would count the delay from the beginning again.

It goes on by itself, some hundreds in a turn of the event loop, until nothing is left below.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from sluice.broker import delay_forms
from sluice.errors import RecordDamaged, SluiceError
from sluice.storage.store import ColdRead

if TYPE_CHECKING:
    from sluice.broker.core import BrokerCore
    from sluice.broker.delays import Delays, Waiting

_TURN_COUNT_MAX: Final = 256
_TURN_BYTES_MAX: Final = 1 << 20
_UNCONFIRMED_MAX: Final = 16 * _TURN_COUNT_MAX


class DelayRescue:
    """What stands between waiting messages and retention."""

    def __init__(self, core: BrokerCore, delays: Delays) -> None:
        self._core = core
        self._delays = delays
        self._below = 0  # up to here everything is to be moved
        self._unconfirmed = 0
        self._is_going = False
        self.moved = 0
        core.store.housekeeping.rescuers.append(self.is_clear)

    def is_clear(self, position: int) -> bool:
        """Whether nothing that waits lies below a position; otherwise it is moved away soon."""
        try:
            if not self._unconfirmed and not self._delays.some_below(position, 1):
                return True
        except ColdRead:
            pass  # it is read below
        except SluiceError as error:
            self._delays.complain("old delayed messages cannot be looked at now: %s", error)
            return False
        self._below = max(self._below, position)
        self._go_on()
        return False

    def _go_on(self) -> None:
        if not self._is_going:
            self._is_going = True
            self._core.store.call(
                lambda: self._delays.some_below(self._below, _TURN_COUNT_MAX), self._found
            )

    def _found(self, items: list[Waiting] | None, error: BaseException | None) -> None:
        if items:
            self._core.store.call(lambda: self._move(items), lambda _, error: self._moved(error))
        else:
            self._is_going = False
            if error is not None:
                self._delays.complain("old delayed messages cannot be read now: %s", error)

    def _move(self, items: list[Waiting]) -> None:
        """Append entries anew. May raise ColdRead, having moved some."""
        byte_count = 0
        while items and byte_count < _TURN_BYTES_MAX:
            item = items[0]
            if self._delays.still_waits(item):
                byte_count += self._move_one(item)
            del items[0]

    def _move_one(self, item: Waiting) -> int:
        delays, store = self._delays, self._core.store
        try:
            entry = delays.entry_of(item)
        except RecordDamaged as error:
            delays.complain("a delayed message is damaged and is not kept: %s", error)
            entry = None
        if entry is None:
            delays.leave(item)
            return 0
        message = delay_forms.timer_form(entry, item.due_ms)

        def told(error: SluiceError | None) -> None:
            self._unconfirmed -= 1
            if error is not None:
                delays.wait_again([item])
                delays.complain("old delayed messages could not be moved: %s", error)

        delays.progress.moved(store, entry.position)
        # Also where the disk is full: retention waits for it.
        size = store.stage(message, told, durable=True).size
        self._core.ask_turn()
        self._unconfirmed += 1
        self.moved += 1
        delays.leave(item)
        return size

    def _moved(self, error: BaseException | None) -> None:
        self._is_going = False
        if error is not None:
            self._delays.complain("old delayed messages could not be moved: %s", error)
        elif self._unconfirmed < _UNCONFIRMED_MAX:
            self._core.call_soon(self._go_on)
