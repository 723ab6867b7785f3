"""This module is what a store promises, in the simplest words: a list of entries, as in the log.

`Model` is told what was staged and what was answered; `Promise` is what it held at one moment, for
example when the power went. `check` compares a store with a promise:

- what was acknowledged is there, at its offset, byte for byte, unless retention took it;
- nothing else is there but entries that were staged and whose fate is open, and of these a prefix;
- offsets have no holes, and the next one is above every one that was acknowledged;
- settings and positions have the acknowledged value, or one that was on its way.

It knows nothing of files, and of the store only what any caller can see.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

from sluice.errors import SluiceError, StoreReadOnly
from sluice.model import Message, Placed, QueueKey
from sluice.protocol import records
from sluice.storage.state import OFFSET_TABLE, STATE_TOPIC
from sluice.storage.store import ColdRead, Store

T = TypeVar("T")
Contents = dict[QueueKey, tuple[int, int, list[bytes]]]


class Item(NamedTuple):
    """One staged entry, and its bytes as they must lie in the log."""

    queue: QueueKey
    message: Message
    placed: Placed
    raw: bytes
    keys: tuple[str, ...]


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
    later_positions: dict[str, dict[str, set[int]]]  # ... and those that may have become durable


@dataclass(slots=True)
class Model:
    """What was asked of the store and what it answered."""

    items: list[Item] = field(default_factory=list)
    acked_end: int = 0
    deleted_before: int = 0
    floors: dict[QueueKey, int] = field(default_factory=dict)
    settings: dict[tuple[str, str], list[list[Any]]] = field(default_factory=dict)
    later_positions: dict[str, dict[str, set[int]]] = field(default_factory=dict)

    @classmethod
    def after(cls, promise: Promise) -> Model:
        """A model that goes on where a promise was made; `recovered` must follow."""
        return cls(
            list(promise.items),
            promise.acked_end,
            promise.deleted_before,
            dict(promise.floors),
            {key: list(values) for key, values in promise.settings.items()},
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
        )

    def recovered(self, store: Store, found: Contents) -> None:
        """After a recovery: what is there was confirmed by it, what is not there is gone."""
        raws = {
            (queue, records.decode(raw).queue_offset): raw
            for queue, (_, _, entries) in found.items()
            for raw in entries
        }
        self.items = [
            item if item.raw == raw else item._replace(raw=raw, keys=())
            for item in self.items
            if (raw := raws.get((item.queue, item.placed.queue_offset))) is not None
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


def check(store: Store, promise: Promise) -> Contents:
    """Compare what can be read with what was promised; returns what can be read."""
    found = contents(store)
    staged: dict[QueueKey, dict[int, Item]] = {}
    for item in promise.items:
        staged.setdefault(item.queue, {})[item.placed.queue_offset] = item
    present: set[int] = set()
    end = 0
    for queue, (low, high, entries) in found.items():
        assert 0 <= low <= high, f"{queue}: from {low} to {high}"
        offset = low
        for raw in entries:
            candidate = staged.get(queue, {}).get(offset)
            assert candidate is not None, f"{queue}: nothing was put at {offset}, but it is served"
            if raw != candidate.raw:
                # Without a checksum of the whole message a torn last entry can pass for whole.
                where = f"{queue}: other bytes are served at {offset}"
                assert not promise.checked, where
                assert candidate.placed.end > promise.acked_end, where
                assert records.decode(raw).body == candidate.message.body, where
            present.add(id(candidate))
            offset += candidate.message.count
            end = max(end, candidate.placed.end)
        assert offset == high, f"{queue}: entries end at {offset}, the queue at {high}"
    for item in promise.items:
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
        high = found[queue][1] if queue in found else 0
        assert high >= floor, f"{queue}: offsets start again"
    check_tables(store, promise)
    return found


def check_tables(store: Store, promise: Promise) -> None:
    """Settings and committed offsets."""
    for (table, key), values in promise.settings.items():
        value = store.table(table).get(key)
        assert [value] in values, f"{table}/{key} is {value!r}, expected one of {values!r}"
    table_now = store.table(OFFSET_TABLE)
    for key, by_queue in promise.positions.items():
        for queue_id, offset in by_queue.items():
            allowed = {offset} | promise.later_positions.get(key, {}).get(queue_id, set())
            seen_offset = table_now.get(key, {}).get(queue_id)
            assert seen_offset in allowed, f"{key}/{queue_id}: {seen_offset} of {allowed}"


def check_keys(store: Store, items: Iterator[Item] | list[Item]) -> None:
    """Every visible entry is found by each of its keys. The index must have caught up."""
    for item in items:
        for key in item.keys:
            found: list[bytes] = []

            def done(
                entries: list[memoryview] | None,
                error: BaseException | None,
                found: list[bytes] = found,
            ) -> None:
                assert entries is not None, f"query failed: {error}"
                found += [bytes(entry) for entry in entries]

            store.query_key(item.queue.topic, key, done, count_max=10_000)
            yield_to_background(store)
            assert item.raw in found, f"{item.queue}: key {key} of {item.placed} is not found"


def yield_to_background(store: Store) -> None:
    run_all = getattr(store.background, "run_all", None)
    if run_all is not None:
        run_all()
