"""This module keeps the offsets that Kafka's groups commit, with their texts and leader epochs.

A commit is one entry of the log (a change of a table), and it is answered and seen when that is
durable. Offsets of a transaction wait beside them until its end says what they are; then they all
count, or none does, by the one entry that ends the transaction (`kafka_transactions.py`).

Offsets of a group are forgotten some days after its last member left, those of a group that never
had members some days after their commit. Topics are known by the names in the store. Offsets of
RocketMQ's groups are elsewhere (`offsets.py`): both may have a group of the same name.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from sluice.broker.kafka_group_values import State
from sluice.broker.kafka_groups import CONSUMER_PROTOCOL
from sluice.errors import SluiceError
from sluice.storage.state import KAFKA_OFFSET_TABLE, KAFKA_PENDING_TABLE, Change

if TYPE_CHECKING:
    from sluice.broker.core import BrokerCore

NO_OFFSET: Final = -1
_SEPARATOR: Final = "@"  # no name of a topic has one; a group's may
_PART_ROWS: Final = 5_000  # that are deleted with one entry

Done = Callable[[SluiceError | None], None]
Partition = tuple[str, int]  # topic as the store has it, partition
Place = tuple[str, str, int]  # group, topic, partition


class Committed(NamedTuple):
    """One committed offset."""

    offset: int
    leader_epoch: int
    text: str
    commit_ms: int
    expires_ms: int = -1  # where the client said so
    number: int = 0  # commits are numbered: a transaction's end does not undo a later one

    def row(self) -> list[Any]:
        return list(self)


class TakenOffsets(NamedTuple):
    """All that was known of one topic."""

    topic: str
    committed: dict[Place, Committed]
    pending: dict[int, dict[Place, Committed]]


class KafkaOffsets:
    """The offsets of Kafka's groups at one broker."""

    def __init__(self, core: BrokerCore) -> None:
        self._core = core
        self._by_group: dict[str, dict[Partition, Committed]] = {}
        self._pending: dict[int, dict[Place, Committed]] = {}  # by producer
        self._unstable: Counter[Place] = Counter()  # how many transactions wait to set it
        self._number = 0  # of the last commit
        self._cuts: dict[str, int] = {}  # deleted topic -> commits up to this number went with it
        self._cuts_mark = 0  # ... of which those below were long ago
        self._looked_ms = 0
        self.commit_count = 0
        self.expired_count = 0

    # -------------------------------------------------------------------------------------- looking

    def get(self, group: str, topic: str, partition: int) -> Committed | None:
        return self._by_group.get(group, {}).get((topic, partition))

    def of(self, group: str) -> Mapping[Partition, Committed]:
        """All offsets of a group; not to be changed."""
        return self._by_group.get(group, {})

    def groups(self) -> Iterator[str]:
        """The groups that have offsets."""
        yield from self._by_group

    def is_unstable(self, group: str, topic: str, partition: int) -> bool:
        """Whether an open transaction may set this offset."""
        return bool(self._unstable) and self._unstable[group, topic, partition] > 0

    def has_pending(self, group: str) -> bool:
        return any(place[0] == group for place in self._unstable)

    def topics(self) -> set[str]:
        return {topic for rows in self._by_group.values() for topic, _ in rows}

    @property
    def count(self) -> int:
        return sum(map(len, self._by_group.values()))

    # ----------------------------------------------------------------------------------- committing

    def commit(
        self, group: str, offsets: Iterable[tuple[Partition, Committed]], done: Done
    ) -> None:
        """A group has read so far; seen, and `done` called, when that is durable."""
        rows = [(where, self._numbered(each)) for where, each in offsets]

        def written(error: SluiceError | None) -> None:
            if error is None:
                self.commit_count += len(rows)
                for where, each in rows:
                    self._put((group, *where), each)
            done(error)

        changes: list[Change] = [
            (KAFKA_OFFSET_TABLE, _name((group, *where)), each.row()) for where, each in rows
        ]
        self._change(changes, written)

    def commit_pending(
        self,
        producer_id: int,
        group: str,
        offsets: Iterable[tuple[Partition, Committed]],
        done: Done,
    ) -> None:
        """A group has read so far, if a producer's open transaction is committed."""
        rows = [((group, *where), self._numbered(each)) for where, each in offsets]
        changes: list[Change] = [
            (KAFKA_PENDING_TABLE, _pending_name(producer_id, place), each.row())
            for place, each in rows
        ]
        # Noted at once: the transaction may end before this is durable, in the same turn.
        for place, each in rows:
            self._put_pending(producer_id, place, each)

        def written(error: SluiceError | None) -> None:
            for place, each in rows if error is not None else ():
                if self._pending.get(producer_id, {}).get(place) is each:
                    self._drop_pending(producer_id, place)
            done(error)

        self._change(changes, written)

    def ending(
        self, producer_id: int, *, commit: bool
    ) -> tuple[dict[Place, Committed], list[Change]]:
        """A producer's transaction ends: what it would set, and the changes that belong to the
        entry which ends it.
        """
        places = dict(self._pending.get(producer_id, {}))
        changes: list[Change] = []
        for place, each in places.items():
            changes.append((KAFKA_PENDING_TABLE, _pending_name(producer_id, place), None))
            newest = self._core.store.state.newest(KAFKA_OFFSET_TABLE, _name(place))
            if commit and (newest is None or Committed(*newest).number < each.number):
                changes.append((KAFKA_OFFSET_TABLE, _name(place), each.row()))
        return places, changes

    def ended(self, producer_id: int, places: Mapping[Place, Committed], *, commit: bool) -> None:
        """That entry is durable."""
        for place, each in places.items():
            self._drop_pending(producer_id, place)
            before = self.get(*place)
            if commit and (before is None or before.number < each.number):
                self._put(place, each)
                self.commit_count += 1

    def _numbered(self, offset: Committed) -> Committed:
        self._number += 1
        return offset._replace(number=self._number)

    def _put(self, place: Place, offset: Committed) -> None:
        group, topic, partition = place
        if offset.number > self._cuts.get(topic, 0):
            self._by_group.setdefault(group, {})[topic, partition] = offset

    def _put_pending(self, producer_id: int, place: Place, offset: Committed) -> None:
        pending = self._pending.setdefault(producer_id, {})
        if place not in pending:
            self._unstable[place] += 1
        pending[place] = offset

    def _drop_pending(self, producer_id: int, place: Place) -> None:
        pending = self._pending.get(producer_id, {})
        if pending.pop(place, None) is not None:
            self._unstable[place] -= 1
            if not self._unstable[place]:
                del self._unstable[place]
        if not pending:
            self._pending.pop(producer_id, None)

    def _change(self, changes: list[Change], done: Done) -> None:
        if not changes:
            done(None)
            return
        try:
            self._core.store.change(changes, done)
        except SluiceError as error:
            done(error)
            return
        self._core.ask_turn()

    # ------------------------------------------------------------------------------------- deleting

    def delete(self, group: str, partitions: Iterable[Partition], done: Done) -> None:
        """Forget some offsets of a group, also those that transactions would set."""
        places = {(group, *where) for where in partitions}
        changes: list[Change] = [
            (KAFKA_OFFSET_TABLE, _name(place), None)
            for place in places
            if self.get(*place) is not None
        ]
        for producer_id, pending in list(self._pending.items()):
            for place in places & pending.keys():
                self._drop_pending(producer_id, place)
                changes.append((KAFKA_PENDING_TABLE, _pending_name(producer_id, place), None))

        def written(error: SluiceError | None) -> None:
            if error is None:
                self._forget(places)
            done(error)

        parts = [changes[at : at + _PART_ROWS] for at in range(0, len(changes), _PART_ROWS)]
        for part in parts[:-1]:
            self._change(part, _ignore)
        self._change(parts[-1] if parts else [], written)

    def _forget(self, places: Iterable[Place]) -> None:
        for group, topic, partition in places:
            rows = self._by_group.get(group)
            if rows is not None:
                rows.pop((topic, partition), None)
                if not rows:
                    del self._by_group[group]

    def delete_group(self, group: str, done: Done) -> None:
        """A group was deleted, with its offsets."""
        pending = {place[1:] for place in self._unstable if place[0] == group}
        self.delete(group, {*self.of(group), *pending}, done)

    def take_topic(self, topic: str) -> TakenOffsets:
        """A topic is being deleted: nobody's offset means anything there. The store knows it."""
        committed = {
            (group, *where): each
            for group, rows in self._by_group.items()
            for where, each in rows.items()
            if where[0] == topic
        }
        pending = {
            producer_id: {place: each for place, each in rows.items() if place[1] == topic}
            for producer_id, rows in self._pending.items()
        }
        self._forget(committed)
        for producer_id, rows in pending.items():
            for place in rows:
                self._drop_pending(producer_id, place)
        self._cuts[topic] = self._number
        return TakenOffsets(topic, committed, pending)

    def give_back(self, taken: TakenOffsets) -> None:
        """It could not be deleted."""
        self._cuts.pop(taken.topic, None)
        for place, each in taken.committed.items():
            self._put(place, each)
        for producer_id, rows in taken.pending.items():
            for place, each in rows.items():
                self._put_pending(producer_id, place, each)

    # --------------------------------------------------------------------------------- start, ticks

    def start(self) -> None:
        store = self._core.store
        for name, row in store.table(KAFKA_OFFSET_TABLE).items():
            topic, partition, group = name.split(_SEPARATOR, 2)
            each = Committed(*row)
            self._number = max(self._number, each.number)
            self._put((group, topic, int(partition)), each)
        for name, row in store.table(KAFKA_PENDING_TABLE).items():
            topic, partition, producer_id, group = name.split(_SEPARATOR, 3)
            each = Committed(*row)
            self._number = max(self._number, each.number)
            self._put_pending(int(producer_id), (group, topic, int(partition)), each)
        for group in self.groups():
            # A group that only commits is one too.
            self._core.kafka_groups.table.make(group, self._core.now_ms())
        self._looked_ms = self._core.now_ms()

    def tick(self, now_ms: int) -> None:
        config = self._core.config
        if now_ms - self._looked_ms < config.kafka_offsets_check_interval_ms:
            return
        self._looked_ms = now_ms
        self._cuts = {topic: at for topic, at in self._cuts.items() if at > self._cuts_mark}
        self._cuts_mark = self._number
        for group in list(self._core.kafka_groups.all()):
            if group.pending:
                continue
            old = self._old(group.name, now_ms, config.kafka_offsets_retention_ms)
            self.expired_count += len(old)
            rest = len(self.of(group.name)) - len(old)
            if old:
                self.delete(group.name, old, _ignore)
            if not rest and group.state == State.EMPTY and not self.has_pending(group.name):
                self._core.kafka_groups.delete(group.name)

    def _old(self, name: str, now_ms: int, retention_ms: int) -> list[Partition]:
        """Offsets whose time is over."""
        group = self._core.kafka_groups.get(name)
        rows = self.of(name)
        if group is None or not rows:
            return []
        subscribed: frozenset[str] = frozenset()
        if group.protocol_type is not None and group.state != State.EMPTY:
            # Members keep the offsets of what they read; the others' age counts from the commit.
            found = self._core.kafka_groups.subscribed(name)
            if group.protocol_type != CONSUMER_PROTOCOL or group.state != State.STABLE:
                return []
            if found is None:
                return []
            subscribed = found
        left_ms = group.since_ms if group.protocol_type is not None else 0
        is_empty = group.state == State.EMPTY
        old = []
        for where, each in rows.items():
            if where[0].replace("%2E", ".") in subscribed:
                continue
            since_ms = max(each.commit_ms, left_ms) if is_empty else each.commit_ms
            due_ms = each.expires_ms if each.expires_ms >= 0 else since_ms + retention_ms
            if now_ms >= due_ms and not self.is_unstable(name, *where):
                old.append(where)
        return old


def _ignore(error: SluiceError | None) -> None:
    """What could not be deleted is found again at the next look."""


def _name(place: Place) -> str:
    group, topic, partition = place
    return f"{topic}{_SEPARATOR}{partition}{_SEPARATOR}{group}"


def _pending_name(producer_id: int, place: Place) -> str:
    group, topic, partition = place
    return _SEPARATOR.join((topic, str(partition), str(producer_id), group))
