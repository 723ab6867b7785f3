"""This module gathers the positions that groups commit: seen at once, durable a little later.

Consumers commit far more often than anybody asks, so what is committed within `state_batch_ms` goes
to the log as one entry. What could not be written waits for the next time; nothing is forgotten.
Methods belong to the store's owner.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sluice.errors import SluiceError
from sluice.storage.state import OFFSET_TABLE, Change

if TYPE_CHECKING:
    from sluice.storage.store import Store

Positions = dict[str, dict[str, int]]  # "topic@group" -> queue -> offset


class OffsetCommits:
    """Positions on their way into the log of one store."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._waiting: Positions = {}  # committed since the last entry
        self._sent: Positions = {}  # in that entry, which is not durable yet
        self._sent_ms = 0

    def commit(self, group: str, topic: str, queue_id: int, offset: int) -> None:
        self._waiting.setdefault(f"{topic}@{group}", {})[str(queue_id)] = offset

    def get(self, group: str, topic: str, queue_id: int) -> int | None:
        """The newest position that was committed, None where there is none."""
        key, queue = f"{topic}@{group}", str(queue_id)
        for table in (self._waiting, self._sent, self._store.table(OFFSET_TABLE)):
            if (offset := table.get(key, {}).get(queue)) is not None:
                return offset
        return None

    def tick(self, now_ms: int, interval_ms: int) -> None:
        if now_ms - self._sent_ms >= interval_ms:
            self._sent_ms = now_ms
            self.send()

    def send(self) -> None:
        """Stage what was committed since the last time."""
        store = self._store
        # One entry at a time; but closing is the last chance for those that came since.
        busy = bool(self._sent) and not store.closed
        if busy or not self._waiting or store.flusher.failure is not None:
            return
        sent = self._sent = self._waiting
        self._waiting = {}
        changes: list[Change] = [(OFFSET_TABLE, key, value) for key, value in sent.items()]
        bodies = store.state.bodies(changes, store.state_bytes_max)

        def confirmed(error: SluiceError | None) -> None:
            self._sent = {}
            if error is not None:
                self.give_back(sent)

        try:
            for body in bodies[:-1]:
                store.stage_state(body)
            store.stage_state(bodies[-1], confirmed)
        except SluiceError as error:
            confirmed(error)

    def take(self, topic: str) -> Positions:
        """Forget what waits for a topic, which is being deleted; returns what that was."""
        taken: Positions = {}
        for key in [key for key in self._sent if key.startswith(f"{topic}@")]:
            taken[key] = self._sent[key]
            self._sent[key] = {}  # not taken out: the entry is under way still
        for key in [key for key in self._waiting if key.startswith(f"{topic}@")]:
            taken[key] = {**taken.get(key, {}), **self._waiting.pop(key)}
        return taken

    def give_back(self, positions: Positions) -> None:
        """These were not stored; what was committed again since then is newer."""
        for key, value in positions.items():
            if value:
                self._waiting[key] = {**value, **self._waiting.get(key, {})}
