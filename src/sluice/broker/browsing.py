"""This module asks the store about many queues, without stopping the event loop for them.

An answer may have to come from the disk, and a topic may have thousands of queues: questions are
asked one after the other, some hundreds in a turn of the event loop. It knows no wire format.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Final, Generic, NamedTuple, TypeVar

from sluice.errors import RecordDamaged
from sluice.protocol import records
from sluice.storage.store import Store

if TYPE_CHECKING:
    from sluice.broker.core import BrokerCore

ASKS_A_TURN: Final = 256
UNITS_MAX: Final = 1024

T = TypeVar("T")
AllDone = Callable[[list[T] | None, BaseException | None], None]


class Unit(NamedTuple):
    """One entry of a queue's index."""

    position: int
    size: int
    tags_code: int
    offset: int


def ask_each(core: BrokerCore, asks: Iterable[Callable[[], T]], done: AllDone[T]) -> None:
    """Ask everything in order; `done` gets all answers, or the first error."""
    _Asking(core, asks, done).go_on()


class _Asking(Generic[T]):
    """A row of questions and the answers so far."""

    def __init__(self, core: BrokerCore, asks: Iterable[Callable[[], T]], done: AllDone[T]) -> None:
        self._core = core
        self._asks = iter(asks)
        self._done = done
        self._answers: list[T] = []
        self._is_asking = False
        self._is_over = False

    def go_on(self) -> None:
        self._is_asking = True
        asked = 0
        while self._is_asking and not self._is_over:
            if asked == ASKS_A_TURN:
                self._core.call_soon(self.go_on)
                return
            ask = next(self._asks, None)
            if ask is None:
                self._is_over = True
                self._done(self._answers, None)
                return
            asked += 1
            count = len(self._answers)
            self._core.store.call(ask, self._answered)
            # Where the disk has to be asked, the answer comes later and goes on from there.
            self._is_asking = len(self._answers) > count

    def _answered(self, answer: T | None, error: BaseException | None) -> None:
        if error is not None:
            self._is_over = True
            self._done(None, error)
            return
        self._answers.append(answer)  # type: ignore[arg-type]  # None may be an answer
        if not self._is_asking:
            self.go_on()


def message_ms(store: Store, topic: str, queue_id: int, offset: int) -> int:
    """When a message was stored, -1 where there is none. May raise ColdRead."""
    if offset < 0:
        return -1
    try:
        found = store.read(topic, queue_id, offset, count_max=1, bytes_max=1)
    except RecordDamaged:
        return -1
    return records.store_time_ms(found.slices[0], 0) if found.count else -1


def first_message_ms(store: Store) -> int:
    """When the oldest entry of the log was stored, -1 where there is none. May raise ColdRead."""
    try:
        entry = store.entry_at(store.log.start)
    except RecordDamaged:
        return -1
    return -1 if entry is None else records.store_time_ms(entry, 0)


def queue_units(
    store: Store, topic: str, queue_id: int, offset: int, count: int
) -> list[Unit] | None:
    """Entries of a queue's index from an offset on; None without a queue. May raise ColdRead."""
    queue = store.queues.get((topic, queue_id))
    if queue is None:
        held = store.memory.units(topic, queue_id, offset, min(count, UNITS_MAX))
        return None if held is None else [Unit(*each) for each in held]
    low, high = queue.start_offset, store.max_offset(topic, queue_id)
    if not low <= offset < high:
        return []
    start = queue.seek(offset, store.queue_files, wait=False)
    stop = min(start + min(count, UNITS_MAX), store.reader.visible_units(queue, store.confirmed))
    raw = queue.units(start, stop, store.queue_files, wait=False)
    return [
        Unit(position, size, tags_code, unit_offset)
        for position, size, tags_code, unit_offset, _ in queue.iterate(raw, start)
    ]
