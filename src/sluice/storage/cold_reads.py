"""This module runs reads that may wait for the disk on threads, and bounds how many there are.

Whoever asks gets an answer exactly once: the result, an error, `Busy` where too many reads wait
already, or `Stopping` where the store has closed meanwhile. Each of them keeps its request in
memory, so their number must not be a client's choice.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from sluice.errors import Busy, SluiceError, Stopping
from sluice.storage.queue_index import ColdRead

if TYPE_CHECKING:
    from sluice.storage.store import Store

T = TypeVar("T")
Told = Callable[[T | None, BaseException | None], None]


class ColdReads:
    """The reads of one store that wait for the disk. Belongs to the store's owner."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._turn = 0
        self.count = 0

    def call(self, ask: Callable[[], T], done: Told[T]) -> None:
        """Ask something that may raise `ColdRead`, as often as it takes, without blocking."""
        if self._store.closed:
            # A read of several rounds may outlast the store: its files and threads go.
            done(None, _stopping())
            return
        try:
            result = ask()
        except ColdRead as cold:
            self._submit(cold.work, ask, done)
        except SluiceError as error:
            done(None, error)
        else:
            done(result, None)

    def _submit(self, work: Callable[[], None], ask: Callable[[], T], done: Told[T]) -> None:
        def again(_: None, error: BaseException | None) -> None:
            if error is not None:
                done(None, error)
            else:
                self.call(ask, done)

        refusal = self.refusal
        if refusal is not None:
            done(None, refusal)
            return
        self._turn = (self._turn + 1) % self._store.config.cold_read_threads
        self._store.background.submit(f"cold{self._turn}", work, self.counted(again))

    @property
    def refusal(self) -> Busy | Stopping | None:
        """Why one more cannot wait; None where it can."""
        if self._store.closed:
            return _stopping()
        count_max = self._store.config.cold_reads_max
        if self.count < count_max:
            return None
        return Busy(
            f"{self.count} reads wait for the disk, the limit is {count_max} (cold_reads_max); "
            "try again"
        )

    def counted(self, done: Told[T]) -> Told[T]:
        """Count a read that begins now, until `done` is called."""
        self.count += 1

        def told(result: T | None, error: BaseException | None) -> None:
            self.count -= 1
            done(result, error)

        return told


def _stopping() -> Stopping:
    return Stopping("the store is closed: ask another broker, or this one when it is back")
