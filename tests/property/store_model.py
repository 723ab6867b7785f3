"""This module is what a store promises, in the simplest words: a list of entries, as in the log.

`Model` is told what was staged and what was answered; `Promise` is what it held at one moment, for
example when the power went. `check` compares a store with a promise:

- what was acknowledged is there, at its offset, byte for byte, unless retention took it;
- nothing else is there but entries that were staged and whose fate is open, and of these a prefix;
- offsets have no holes, and the next one is above every one that was acknowledged;
- settings and positions have the acknowledged value, or one that was on its way;
- of a topic that was deleted nothing is there but what was staged after that.

It knows nothing of files, and of the store only what any caller can see.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

from sluice.errors import SluiceError, StoreReadOnly
from sluice.model import Message, Placed, QueueKey
from sluice.protocol import records
from sluice.storage.state import DELETED_TABLE, OFFSET_TABLE, STATE_TOPIC
from sluice.storage.store import ColdRead, Store

T = TypeVar("T")
Contents = dict[QueueKey, tuple[int, int, list[bytes]]]
Positions = dict[str, dict[str, set[int]]]


class Item(NamedTuple):
    """One staged entry, and its bytes as they must lie in the log."""

    queue: QueueKey
    message: Message
    placed: Placed
    raw: bytes
    keys: tuple[str, ...]


class Deletion(NamedTuple):
    """A topic that is being deleted: nobody was told yet whether it is gone."""

    topic: str
    position: int  # entries of the topic below this are concerned
    later_positions: Positions  # committed before, and not durable when it was staged


@dataclass(slots=True)
class Promise:
    """What held at one moment."""

    items: list[Item]  # in the order of the log: acknowledged, or with an open fate
    acked_end: int  # everything below this position was acknowledged
    deleted_before: int  # retention may have taken everything below this position
    floors: dict[QueueKey, int]  # where each queue ended at the last recovery
    checked: bool  # whether entries carry the checksum of the whole message
    settings: dict[tuple[str, str], list[list[Any]]]  # the acknowledged value, those on their way
    positions: dict[str, dict[str, int]]  # committed offsets that were durable
    later_positions: Positions  # ... and those that may have become durable
    deletions: list[Deletion]


@dataclass(slots=True)
class Model:
    """What was asked of the store and what it answered."""

    items: list[Item] = field(default_factory=list)
    acked_end: int = 0
    deleted_before: int = 0
    floors: dict[QueueKey, int] = field(default_factory=dict)
    settings: dict[tuple[str, str], list[list[Any]]] = field(default_factory=dict)
    later_positions: Positions = field(default_factory=dict)
    deletions: list[Deletion] = field(default_factory=list)  # with an open fate
    gone: list[Item] = field(default_factory=list)  # of deleted topics: nobody may find them

    @classmethod
    def after(cls, promise: Promise) -> Model:
        """A model that goes on where a promise was made; `recovered` must follow."""
        return cls(
            list(promise.items),
            promise.acked_end,
            promise.deleted_before,
            dict(promise.floors),
            {key: list(values) for key, values in promise.settings.items()},
            deletions=list(promise.deletions),
        )

    def staged(self, item: Item) -> None:
        self.items.append(item)

    def answered(self, last: Item, group: list[Item], error: SluiceError | None) -> None:
        """The store called `done` for these entries, which were staged together."""
        if error is None:
            self.acked_end = max(self.acked_end, last.placed.end)
        elif not isinstance(error, StoreReadOnly):
            # It was not stored and never will be. After a failed fsync nobody knows.
            gone = {id(item) for item in group}
            self.items = [item for item in self.items if id(item) not in gone]

    def changing(self, table: str, key: str, value: Any) -> Callable[[SluiceError | None], None]:
        """A setting is on its way; the result takes the answer."""
        values = self.settings.setdefault((table, key), [[None]])
        mark = [value]  # an object of its own: the same value can be on its way twice
        values.append(mark)

        def done(error: SluiceError | None) -> None:
            number = next(n for n, other in enumerate(values) if other is mark)
            if error is None:
                del values[:number]
            elif not isinstance(error, StoreReadOnly):
                del values[number]

        return done

    def deleting(self, topic: str, position: int) -> Callable[[SluiceError | None], None]:
        """A topic is being deleted; the result takes the answer."""
        later = self.later_positions
        taken = {key: later.pop(key) for key in list(later) if key.startswith(f"{topic}@")}
        deletion = Deletion(topic, position, taken)
        self.deletions.append(deletion)

        def done(error: SluiceError | None) -> None:
            if error is None:
                self.deletions.remove(deletion)
                self._deleted(deletion)
            elif not isinstance(error, StoreReadOnly):
                self.deletions.remove(deletion)
                for key, queues in taken.items():
                    for queue_id, offsets in queues.items():
                        self.later_positions.setdefault(key, {}).setdefault(queue_id, set())
                        self.later_positions[key][queue_id] |= offsets

        return done

    def _deleted(self, deletion: Deletion) -> None:
        topic, position, _ = deletion

        def is_gone(item: Item) -> bool:
            return item.queue.topic == topic and item.placed.position < position

        self.gone += [item for item in self.items if is_gone(item)]
        self.items = [item for item in self.items if not is_gone(item)]
        self.floors = {queue: end for queue, end in self.floors.items() if queue.topic != topic}

    def promise(self, store: Store) -> Promise:
        return Promise(
            list(self.items),
            self.acked_end,
            self.deleted_before,
            self.floors,
            store.config.message_crc,
            {key: list(values) for key, values in self.settings.items()},
            {key: dict(value) for key, value in store.table(OFFSET_TABLE).items()},
            {k: {q: set(v) for q, v in m.items()} for k, m in self.later_positions.items()},
            list(self.deletions),
        )

    def recovered(self, store: Store, found: Contents) -> None:
        """After a recovery: what is there was confirmed by it, what is not there is gone."""
        for deletion in self.deletions:
            if store.table(DELETED_TABLE).get(deletion.topic, -1) >= deletion.position:
                self._deleted(deletion)
        self.deletions = []
        raws = {position_of(raw): raw for _, _, entries in found.values() for raw in entries}
        self.items = [
            item if item.raw == raw else item._replace(raw=raw, keys=())
            for item in self.items
            if (raw := raws.get(item.placed.position)) is not None
        ]
        self.acked_end = store.log.written
        self.floors = {queue: high for queue, (_, high, _) in found.items()}
        for (table, key), values in self.settings.items():
            values[:] = [[store.table(table).get(key)]]
        self.later_positions = {}


def patiently(ask: Callable[[], T]) -> T:
    """Ask something that may have to wait for the disk."""
    while True:
        try:
            return ask()
        except ColdRead as cold:
            cold.work()


def read_queue(store: Store, queue: QueueKey, step_count: int = 1000) -> list[bytes]:
    """All entries of a queue that can be read."""
    offset = patiently(lambda: store.min_offset(*queue))
    entries: list[bytes] = []
    while True:
        at = offset
        result = patiently(
            lambda: store.read(*queue, at, count_max=step_count, bytes_max=1 << 30)  # noqa: B023
        )
        if not result.count:
            return entries
        entries += [bytes(message) for message in result.messages]
        assert len(result.messages) == result.count
        assert result.next_offset > offset, f"{queue}: a read does not move on from {offset}"
        offset = result.next_offset
        if offset == result.max_offset:
            return entries


def contents(store: Store) -> Contents:
    """Everything that can be read, but for the store's own entries."""
    return {
        QueueKey(*queue): (
            store.min_offset(*queue),
            patiently(lambda: store.max_offset(*queue)),  # noqa: B023
            read_queue(store, QueueKey(*queue)),
        )
        for queue in list(store.queues)
        if queue[0] != STATE_TOPIC
    }


def position_of(raw: bytes) -> int:
    """An entry says where it lies."""
    return int.from_bytes(raw[28:36], "big")


def check(store: Store, promise: Promise) -> Contents:
    """Compare what can be read with what was promised; returns what can be read."""
    found = contents(store)
    ends = [position_of(raw) + len(raw) for _, _, raws in found.values() for raw in raws]
    topics = {queue.topic for queue in found} | {item.queue.topic for item in promise.items}
    for topic in sorted(topics | {queue.topic for queue in promise.floors}):
        check_topic(topic, found, max(ends, default=0), promise)
    check_tables(store, promise)
    return found


def check_topic(topic: str, found: Contents, end: int, promise: Promise) -> None:
    """One topic: as if no deletion that is on its way had happened, or one of them had."""
    queues = {queue: values for queue, values in found.items() if queue.topic == topic}
    cuts = [0, *(deletion.position for deletion in promise.deletions if deletion.topic == topic)]
    for number, cut in enumerate(reversed(cuts), 1):
        try:
            check_queues(topic, queues, end, promise, cut)
        except AssertionError:
            if number == len(cuts):
                raise
        else:
            return


def check_queues(topic: str, found: Contents, end: int, promise: Promise, cut: int) -> None:
    """The queues of one topic, of which everything below `cut` was deleted."""
    items = [i for i in promise.items if i.queue.topic == topic and i.placed.position >= cut]
    staged = {(item.queue, item.placed.queue_offset): item for item in reversed(items)}
    present: set[int] = set()
    for queue, (low, high, entries) in found.items():
        assert 0 <= low <= high, f"{queue}: from {low} to {high}"
        offset = low
        for raw in entries:
            candidate = staged.get((queue, offset))
            assert candidate is not None, f"{queue}: nothing was put at {offset}, but it is served"
            if raw != candidate.raw:
                # Without a checksum of the whole message a torn last entry can pass for whole.
                where = f"{queue}: other bytes are served at {offset}"
                assert not promise.checked, where
                assert candidate.placed.end > promise.acked_end, where
                assert records.decode(raw).body == candidate.message.body, where
            present.add(id(candidate))
            offset += candidate.message.count
        assert offset == high, f"{queue}: entries end at {offset}, the queue at {high}"
    for item in items:
        where = f"{item.queue} offset {item.placed.queue_offset} at {item.placed.position}"
        if id(item) not in present:
            retained = item.placed.position >= promise.deleted_before
            acked = item.placed.end <= promise.acked_end
            assert not (retained and acked), f"{where}: acknowledged and lost"
            assert not (retained and item.placed.end <= end), f"{where}: a hole in the log"
        if item.placed.end <= promise.acked_end:
            high = found[item.queue][1] if item.queue in found else 0
            after = item.placed.queue_offset + item.message.count
            assert high >= after, f"{where}: its offset would be given away again"
    for queue, floor in promise.floors.items():
        if queue.topic == topic and cut == 0:
            high = found[queue][1] if queue in found else 0
            assert high >= floor, f"{queue}: offsets start again"


def check_tables(store: Store, promise: Promise) -> None:
    """Settings and committed offsets."""
    for (table, key), values in promise.settings.items():
        value = store.table(table).get(key)
        assert [value] in values, f"{table}/{key} is {value!r}, expected one of {values!r}"
    table_now = store.table(OFFSET_TABLE)
    for key in promise.positions.keys() | table_now.keys():
        known, seen = promise.positions.get(key, {}), table_now.get(key, {})
        open_deletions = [d for d in promise.deletions if key.startswith(f"{d.topic}@")]
        for queue_id in known.keys() | seen.keys():
            allowed: set[int | None] = {known.get(queue_id), *later(promise, key, queue_id)}
            for deletion in open_deletions:
                allowed |= {None} | deletion.later_positions.get(key, {}).get(queue_id, set())
            offset = seen.get(queue_id)
            assert offset in allowed, f"{key}/{queue_id}: {offset} of {allowed}"


def later(promise: Promise, key: str, queue_id: str) -> set[int]:
    return promise.later_positions.get(key, {}).get(queue_id, set())


def check_keys(store: Store, items: Iterable[Item]) -> None:
    """Every visible entry is found by each of its keys. The index must have caught up."""
    for item in items:
        for key in item.keys:
            found = find(store, item.queue.topic, key)
            assert item.raw in found, f"{item.queue}: key {key} of {item.placed} is not found"


def check_no_keys(store: Store, items: Iterable[Item]) -> None:
    """Nothing is found of topics that were deleted."""
    for item in items:
        for key in item.keys:
            found = find(store, item.queue.topic, key)
            assert item.raw not in found, f"{item.queue}: {item.placed} was deleted, and is found"


def find(store: Store, topic: str, key: str) -> list[bytes]:
    """Entries with a key."""
    found: list[bytes] = []

    def done(entries: list[memoryview] | None, error: BaseException | None) -> None:
        assert entries is not None, f"query failed: {error}"
        found.extend(bytes(entry) for entry in entries)

    store.query_key(topic, key, done, count_max=10_000)
    yield_to_background(store)
    return found


def yield_to_background(store: Store) -> None:
    run_all = getattr(store.background, "run_all", None)
    if run_all is not None:
        run_all()
