"""This module keeps how far each group has read each queue: committed, pulled, and to be reset.

Committed offsets are the store's (durable within moments); what is pulled and not yet committed is
in memory only. A reset by an administrator waits beside them until the next pull of its queue: that
pull is told where to go on, and commits of the queue are ignored until then, because they come from
before the reset. Nobody needs to be connected for it, and a broker that was killed remembers it.

This module knows no wire format. It belongs to the store's owner.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from sluice.errors import SluiceError
from sluice.storage.store import OFFSET_TABLE, Change, Store

RESET_TABLE: Final = "reset"  # topic@group@queue -> the offset that its next pull is told
OWN_GROUPS: Final = frozenset({"CID_RMQ_SYS_TRANS"})  # their offsets are the broker's progress
SEPARATOR: Final = "@"  # neither a topic's nor a group's name has one
_TOGETHER_MAX: Final = 1_000  # queues in one entry of the log, whose size has a limit

Done = Callable[[SluiceError | None], None]
QueueName = tuple[str, str, int]  # group, topic, queue
ByQueue = dict[QueueName, int]  # -> offset


@dataclass(frozen=True, slots=True)
class TopicOffsets:
    """All that was known of one topic."""

    committed: dict[str, dict[int, int]]
    pulled: ByQueue
    resets: ByQueue


class Offsets:
    """The offsets of one broker, by "topic@group" and queue, as RocketMQ's files have them."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._committed: dict[str, dict[int, int]] = {
            key: {int(queue): offset for queue, offset in queues.items()}
            for key, queues in store.table(OFFSET_TABLE).items()
        }
        self._pulled: ByQueue = {}
        self._resets: ByQueue = {
            _read_name(name): offset for name, offset in store.table(RESET_TABLE).items()
        }
        # Told of every rewind: group, topic, queue, and the offset that it goes on at.
        self.on_reset: list[Callable[[str, str, int, int], None]] = []
        # Forgotten here, but the store may still have them; with the queues it had.
        self._forgetting: dict[str, set[int]] = {}

    # -------------------------------------------------------------------------------------- looking

    def committed(self, group: str, topic: str, queue_id: int) -> int | None:
        """Where a group goes on; None where it never committed."""
        queues = self._committed.get(f"{topic}{SEPARATOR}{group}")
        return None if queues is None else queues.get(queue_id)

    def of(self, group: str, topic: str) -> dict[int, int]:
        """The committed offsets of a group on a topic, by queue."""
        return dict(self._committed.get(f"{topic}{SEPARATOR}{group}", {}))

    def pulled_to(self, group: str, topic: str, queue_id: int) -> int:
        """How far messages were handed out; at least what is committed."""
        committed = self.committed(group, topic, queue_id) or 0
        return max(committed, self._pulled.get((group, topic, queue_id), 0))

    def handed_out(self, group: str, topic: str, queue_id: int) -> int | None:
        """The offset after what was pulled last since the start; None where nothing was."""
        return self._pulled.get((group, topic, queue_id))

    def topics_of(self, group: str) -> list[str]:
        """The topics that a group has committed offsets of."""
        return [topic for topic, name in self._pairs() if name == group]

    def topics(self) -> set[str]:
        """All topics that anybody has committed offsets of."""
        return {key.partition(SEPARATOR)[0] for key in self._committed}

    def groups_of(self, topic: str) -> list[str]:
        """The groups that have committed offsets of a topic."""
        return [group for name, group in self._pairs() if name == topic]

    def all(self) -> dict[str, dict[int, int]]:
        """Everything committed, by "topic@group"; also what broadcasting groups left behind."""
        return {key: dict(queues) for key, queues in self._committed.items()}

    def by_pair(self) -> list[tuple[str, str, dict[int, int]]]:
        """(topic, group, offset by queue) of everything committed but by broadcasting groups.

        The offsets are the table's own: not to be changed.
        """
        return [
            (topic, group, self._committed[f"{topic}{SEPARATOR}{group}"])
            for topic, group in self._pairs()
        ]

    def _pairs(self) -> list[tuple[str, str]]:
        pairs = []
        for key in self._committed:
            parts = key.split(SEPARATOR)
            if len(parts) == 2:  # a third part marks a broadcasting group
                pairs.append((parts[0], parts[1]))
        return pairs

    # ------------------------------------------------------------------------------------- changing

    def commit(self, group: str, topic: str, queue_id: int, offset: int) -> bool:
        """A consumer has read up to here; False where a reset is ahead of it."""
        if group in OWN_GROUPS:
            return False
        if self._resets and (group, topic, queue_id) in self._resets:
            return False
        # What is below where a queue in memory begins is of messages that are gone.
        floor = self._store.memory.base(topic, queue_id)
        self._set(group, topic, queue_id, max(offset, floor))
        return True

    def note_own(self, group: str, topic: str, queue_id: int, offset: int) -> None:
        """How far a service of the broker has come, which no client may change."""
        self._set(group, topic, queue_id, offset)

    def _set(self, group: str, topic: str, queue_id: int, offset: int) -> None:
        key = f"{topic}{SEPARATOR}{group}"
        queues = self._committed.get(key)
        if queues is None:
            queues = self._committed[key] = {}
            self._forgetting.pop(key, None)
        queues[queue_id] = offset
        self._store.commit_offset(group, topic, queue_id, offset)

    def pulled(self, group: str, topic: str, queue_id: int, next_offset: int) -> None:
        """A pull was answered."""
        # Answers may come out of order, and who reads anew was given the later ones too.
        key = (group, topic, queue_id)
        if next_offset > self._pulled.get(key, -1):
            self._pulled[key] = next_offset

    def clone(self, source: str, target: str, topic: str) -> None:
        """A group goes on where another one is."""
        for queue_id, offset in self.of(source, topic).items():
            self._set(target, topic, queue_id, offset)

    # --------------------------------------------------------------------------------------- resets

    def reset(
        self,
        group: str,
        topic: str,
        offsets: Mapping[int, int],
        done: Done = lambda error: None,
    ) -> None:
        """The group is to go on at these offsets, by queue, whatever its members have read.

        `done` is told when that is safe. Raises what makes it impossible at once.
        """
        resets = {(group, topic, queue_id): offset for queue_id, offset in offsets.items()}
        left = list(resets)
        if not left:
            done(None)
        while left:
            part, left = left[:_TOGETHER_MAX], left[_TOGETHER_MAX:]
            # One entry of the log: an offset without its reset could be undone by a late commit.
            said = {str(key[2]): resets[key] for key in part}
            notes = _notes({key: resets[key] for key in part})
            told = None if left else done  # what is written last is safe last
            self._store.change([(OFFSET_TABLE, f"{topic}{SEPARATOR}{group}", said), *notes], told)
        for queue_id, offset in offsets.items():
            self._set(group, topic, queue_id, offset)
            self._pulled.pop((group, topic, queue_id), None)
        self._resets.update(resets)
        for queue_id, offset in offsets.items():
            self.rewound(group, topic, queue_id, offset)

    def rewound(self, group: str, topic: str, queue_id: int, offset: int) -> None:
        """The group goes on at an offset by an administrator's word, not by what it has read."""
        for tell in self.on_reset:
            tell(group, topic, queue_id, offset)

    def take_reset(self, group: str, topic: str, queue_id: int) -> int | None:
        """What a pull of this queue has to be told; it is told once."""
        if not self._resets:
            return None
        key = (group, topic, queue_id)
        if key not in self._resets:
            return None
        offset = self._resets.pop(key)
        self._write_resets({key: None})
        return offset

    def _write_resets(self, resets: Mapping[QueueName, int | None]) -> None:
        """Note which resets wait and which do not. After a crash that comes first, or where the
        disk is full, one may be told once more: its group then reads some messages again.
        """
        if resets:
            with suppress(SluiceError):
                self._store.change(_notes(resets))

    # ----------------------------------------------------------------------------------- forgetting

    def forget_group(self, group: str, done: Done) -> None:
        """A group was deleted, with its offsets."""
        self._forget_recent(lambda key: key[0] == group)
        self._forget([f"{topic}{SEPARATOR}{group}" for topic in self.topics_of(group)], done)

    def take_topic(self, topic: str) -> TopicOffsets:
        """A topic is being deleted: nobody's offset means anything there. The store knows it."""
        prefix = f"{topic}{SEPARATOR}"
        keys = [key for key in self._committed if key.startswith(prefix)]
        offsets = TopicOffsets(
            {key: self._committed.pop(key) for key in keys},
            {key: self._pulled.pop(key) for key in list(self._pulled) if key[1] == topic},
            {key: self._resets.pop(key) for key in list(self._resets) if key[1] == topic},
        )
        self._write_resets(dict.fromkeys(offsets.resets))
        return offsets

    def give_back(self, offsets: TopicOffsets) -> None:
        """It could not be deleted."""
        self._committed.update(offsets.committed)
        self._pulled.update(offsets.pulled)
        self._resets.update(offsets.resets)
        self._write_resets(offsets.resets)

    def _forget_recent(self, gone: Callable[[QueueName], bool]) -> None:
        self._write_resets(dict.fromkeys(filter(gone, self._resets)))
        for table in (self._pulled, self._resets):
            for key in [key for key in table if gone(key)]:
                del table[key]

    def _forget(self, keys: Iterable[str], done: Done) -> None:
        for key in keys:
            self._forgetting[key] = set(self._committed.pop(key))
        self._write_forgotten(done)

    def _write_forgotten(self, done: Done) -> None:
        keys = list(self._forgetting)
        if not keys:
            done(None)
            return

        def written(error: SluiceError | None) -> None:
            if error is None:
                # Offsets that the store had on their way were written after our entry.
                for key in keys:
                    if not self._is_stored(key):
                        self._forgetting.pop(key, None)
                if any(key in self._forgetting for key in keys):
                    self._write_forgotten(done)
                    return
            done(error)

        self._store.offsets.send()
        try:
            self._store.change([(OFFSET_TABLE, key, None) for key in keys], written)
        except SluiceError as error:
            # Often called from inside a callback of the store, where nobody could catch it.
            done(error)

    def _is_stored(self, key: str) -> bool:
        topic, _, group = key.partition(SEPARATOR)
        queues = self._forgetting.get(key, ())
        return any(self._store.committed_offset(group, topic, q) is not None for q in queues)


def _notes(resets: Mapping[QueueName, int | None]) -> list[Change]:
    """The rows that say which resets wait; None: one waits no more."""
    return [
        (RESET_TABLE, f"{topic}{SEPARATOR}{group}{SEPARATOR}{queue_id}", offset)
        for (group, topic, queue_id), offset in resets.items()
    ]


def _read_name(text: str) -> QueueName:
    topic, _, rest = text.partition(SEPARATOR)
    group, _, queue_id = rest.rpartition(SEPARATOR)
    return group, topic, int(queue_id)
