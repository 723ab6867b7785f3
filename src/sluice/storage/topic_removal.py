"""This module deletes topics: an entry of the log says so, queue files follow at a checkpoint.

The entry names a position: entries of the topic below it belong to no queue, whoever reads the log
and whenever. A topic of the same name that is made afterwards starts at offset 0.

    staged     the name is free: what is appended from now on goes into new queues. The old ones are
               still in the snapshot, because a crash now brings the topic back
    durable    the tables forget the topic, its committed offsets and its queues' ends; a crash now
               does not bring it back, recovery meets the entry
    checkpoint the old queues leave the snapshot, then their files go, and only then new queues of
               the same name write theirs, which have the same paths
    retention  drops the position once the log holds nothing below it

What cannot be written is taken back, as if nothing had happened. Methods belong to the owner.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from sluice.errors import SluiceError
from sluice.storage.flush import Confirmed
from sluice.storage.queue_index import QueueIndex
from sluice.storage.state import DELETED_TABLE, Change

if TYPE_CHECKING:
    from sluice.storage.offset_commits import Positions
    from sluice.storage.store import Store


class TopicRemoval:
    """The topics of one store that are being deleted."""

    def __init__(self, store: Store) -> None:
        self._store = store
        # Topic -> the position of its deletion, while its queues' files may still be there.
        self.waiting: dict[str, int] = {}
        self._leaving: set[QueueIndex] = set()  # deleted, but a crash would bring them back

    # ------------------------------------------------------------------------------------- deleting

    def delete(self, topic: str, done: Confirmed | None = None) -> None:
        """Stage the deletion; `done(None)` when it holds for good."""
        store = self._store
        end = store.log.end
        queues = self.queues_of(topic)

        def confirmed(error: SluiceError | None) -> None:
            self._leaving.difference_update(queues)
            if error is None:
                self._gone(topic, end, queues)
            else:
                self._take_back(topic, queues, commits)
            if done is not None:
                done(error)

        body = store.state.body([(DELETED_TABLE, topic, end)], store.state_bytes_max)
        store.stage_state(body, confirmed)
        for queue in queues:
            del store.queues[queue.key]
        self._leaving.update(queues)
        commits = store.offsets.take(topic)

    def queues_of(self, topic: str) -> list[QueueIndex]:
        return [queue for key, queue in self._store.queues.items() if key[0] == topic]

    def _gone(self, topic: str, position: int, queues: list[QueueIndex]) -> None:
        store = self._store
        for queue in queues:
            store.rows.pop(queue.key, None)
            for base in queue.sums:
                store.queue_files.forget(queue.path_of(base))
        store.mark_dirty([queue for queue in store.take_dirty() if queue not in queues])
        self.waiting[topic] = position

    def _take_back(self, topic: str, queues: list[QueueIndex], commits: Positions) -> None:
        store = self._store
        # After a failed fsync nobody knows whether it was stored: new queues may hold entries.
        if not any(queue.count for queue in self.queues_of(topic)):
            store.queues.update({queue.key: queue for queue in queues})
        store.offsets.give_back(commits)

    # ------------------------------------------------------------------------------- for the others

    def dropped(self, topic: str, position: int) -> None:
        """Recovery met the entry of a deletion: what it found of the topic so far is nothing."""
        store = self._store
        for queue in self.queues_of(topic):
            del store.queues[queue.key]
            store.rows.pop(queue.key, None)
        self.waiting[topic] = position

    def is_kept(self, queue: QueueIndex) -> bool:
        """Whether the next start would need this queue: it is in use, or may come back."""
        return queue in self._leaving or self._store.queues.get(queue.key) is queue

    def has_row(self, queue: QueueIndex) -> bool:
        """Whether the snapshot's line of its name is the queue's own; one that leaves has it."""
        return queue in self._leaving or all(old.key != queue.key for old in self._leaving)

    def kept_queues(self) -> list[QueueIndex]:
        return [*self._store.queues.values(), *self._leaving]

    def files_removed(self, removed: Mapping[str, int]) -> None:
        """A checkpoint has done its part; a topic may have been deleted once more meanwhile."""
        for topic, position in removed.items():
            if self.waiting.get(topic) == position:
                del self.waiting[topic]

    def outdated(self, log_start: int) -> list[Change]:
        """Positions that mean nothing any more: the log begins above them."""
        table = self._store.table(DELETED_TABLE)
        return [(DELETED_TABLE, topic, None) for topic, at in table.items() if at <= log_start]
