"""This module says what becomes of usual delayed messages that are due: where each goes, with what.

It is asked about each of them, by `storage/copies.py`, so it remembers what they have in common.
Whatever is not as this broker writes it (`delay_forms.py`) is left to the plain way. It neither
stores nor reads anything.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple

from sluice.broker import delay_forms
from sluice.protocol import records
from sluice.storage.copies import Keys, TargetQueue
from sluice.storage.copy_tables import Names

_TIME_MARK: Final = b"\x02TIMER_OUT_MS\x01"
_TIME_BYTES: Final = len(_TIME_MARK) + 14  # 13 digits and the separator


class Target(NamedTuple):
    """Where messages of a place go; without a queue, each in its own way."""

    topic: str
    queue_id: int
    queue: TargetQueue | None


FindTarget = Callable[[bytes, bytes], Target | None]


class UsualFired:
    """What becomes of the delayed messages of one turn: of timers, or of those of levels."""

    NAMES: Final = Names(
        places=frozenset((b"REAL_TOPIC", b"REAL_QID")),
        free=frozenset(
            (b"TIMER_OUT_MS", b"TIMER_DELIVER_MS", b"TIMER_DELAY_MS", b"TIMER_DELAY_SEC")
        ),
    )

    def __init__(self, is_timer: bool, now_ms: int, find: FindTarget) -> None:
        self._is_timer = is_timer
        self._now_ms = now_ms
        self._find = find
        self._queues: dict[bytes, TargetQueue | None] = {}
        self._closings: dict[int, bytes] = {}

    def choose(self, properties: bytes, store_ms: int) -> tuple[TargetQueue, bytes, Keys] | None:
        """Queue, properties to be added, and keys; None: it is not a usual one."""
        begin = properties.rfind(delay_forms.PLACE_MARK)
        place = properties[begin:]
        closing = b""
        if self._is_timer:
            if place[-_TIME_BYTES:-14] != _TIME_MARK:
                return None
            place = place[: 1 - _TIME_BYTES]
            closing = self._closings.get(store_ms, b"") or self._closing(store_ms)
        queue = self._queues[place] if place in self._queues else self._queue(place)
        if queue is None or begin < 0:
            return None
        return queue, closing, records.message_keys(properties[: begin + 1])

    def _closing(self, store_ms: int) -> bytes:
        closing = delay_forms.fired_properties(b"\x02", True, store_ms, self._now_ms)[1:]
        self._closings[store_ms] = closing
        return closing

    def _queue(self, place: bytes) -> TargetQueue | None:
        """The queue of a place; it has to be written as it is here, with nothing behind it."""
        found = delay_forms.place_of(place)
        queue = None
        if found is not None and place == b"%b%b\x02REAL_QID\x01%b\x02" % (
            *(delay_forms.PLACE_MARK, *found),
        ):
            target = self._find(*found)
            queue = None if target is None else target.queue
        self._queues[place] = queue
        return queue
