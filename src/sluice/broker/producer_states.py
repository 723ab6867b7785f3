"""This module remembers what Kafka's producers sent last, so that no batch is stored twice or out
of order, and appends their batches.

For each partition and producer id: the epoch, and the newest five batches with their sequence
numbers and offsets. All of it follows from the heads of the batches in the log. From time to time
it is noted in the store's tables how things stand and up to which offset; after a crash the batches
from there on are read again. A producer that was silent for a day is forgotten.

    the same batch once more, among the newest five    answered with the offset that it has
    the next sequence number                           stored
    any other                                          out of order
    an older epoch                                     fenced
    a newer epoch                                      begins at 0
    nothing is known of the producer                   any sequence number begins

Ids of producers are given away in blocks, each noted before the first of it is used: none is ever
given twice. Methods belong to the store's owner.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from sluice.broker.stable_offsets import StableOffsets
from sluice.errors import SluiceError
from sluice.model import Buffer, Placed
from sluice.protocol import kafka_batches, kafka_entries
from sluice.protocol.kafka_batches import BatchHead
from sluice.protocol.kafka_codes import (
    INVALID_PRODUCER_EPOCH,
    INVALID_TXN_STATE,
    NONE,
    OUT_OF_ORDER_SEQUENCE_NUMBER,
)
from sluice.protocol.kafka_keys import keys_of
from sluice.storage.state import COMPACTED_PREFIX, KAFKA_PRODUCER_TABLE, Change
from sluice.storage.whole_batches import BatchLane, stored_heads
from sluice.storage.whole_batches import place as place_batches

if TYPE_CHECKING:
    from sluice.broker.core import BrokerCore

KEPT_BATCHES: Final = 5
ID_BLOCK: Final = 1000
_NEXT_ID: Final = "@next"
_NOTE_INTERVAL_MS: Final = 60_000
_LOOK_INTERVAL_MS: Final = 1_000  # there may be many partitions, and next to none is due
_ROWS_AT_ONCE: Final = 500
_SEQUENCE_MASK: Final = 0x7FFFFFFF
_MARKER_KEY_AT: Final = 5  # in a control record: length, attributes, two deltas, key length
LEADER_EPOCH: Final = 0  # one leader, which never changed
_new_tuple = tuple.__new__  # half the time of a named tuple's own
log_lines = logging.getLogger("sluice.kafka")

Done = Callable[[SluiceError | None], None]
# First and last sequence number, and the offset of the first record.
Sent = tuple[int, int, int]


class Producer(NamedTuple):
    """What is known of one producer in one partition."""

    epoch: int
    last_ms: int
    batches: tuple[Sent, ...]  # of this epoch, the newest last


class Newest(NamedTuple):
    """A small batch as it was appended last: where readers at the end find it."""

    offset: int
    next_offset: int
    front: bytes  # what follows the offset, with which a batch begins
    rest: memoryview


class Verdict(NamedTuple):
    """Whether a batch is stored: an error code, or the offset that it has already."""

    code: int = NONE
    offset: int = -1


_NEW: Final = Verdict()


@dataclass(slots=True)
class Partition:
    """The producers of one partition."""

    producers: dict[int, Producer] = field(default_factory=dict)
    stable: StableOffsets = field(default_factory=StableOffsets)
    end: int = 0  # after the newest batch that was taken into account
    noted_ms: int = 0
    is_changed: bool = False
    lane: BatchLane | None = None  # the way of its batches into the store, once one has gone it
    newest: Newest | None = None  # where it came alone


class ProducerStates:
    """The producers of one broker's partitions."""

    def __init__(self, core: BrokerCore) -> None:
        self._core = core
        self._partitions: dict[tuple[str, int], Partition] = {}
        self._lost: set[tuple[str, int]] = set()  # after a failed write: to be read again
        self._looked_ms = 0
        self._next_id = self._id_end = 0
        self._id_waiters: list[Callable[[int], None]] = []

    # ------------------------------------------------------------------------------- start and stop

    def start(self) -> None:
        """Read what the log says since the notes were taken."""
        table = self._core.store.table(KAFKA_PRODUCER_TABLE)
        self._next_id = self._id_end = int(table.get(_NEXT_ID, 0))
        for key, queue in list(self._core.store.queues.items()):
            is_own = key[0].startswith(COMPACTED_PREFIX)
            if queue.kind == "b" and queue.end_offset and not is_own:
                self._restore(key)

    def _restore(self, key: tuple[str, int]) -> Partition:
        topic, queue_id = key
        row = self._core.store.table(KAFKA_PRODUCER_TABLE).get(f"{topic}@{queue_id}")
        partition = self._partitions[key] = _from_row(row)
        first_bytes = kafka_batches.HEAD_BYTES + _MARKER_KEY_AT + 4
        for stored in stored_heads(self._core.store, topic, queue_id, partition.end, first_bytes):
            head = kafka_batches.read_head(stored.first)
            if head is not None:
                _note(partition, head, stored.offset, stored.store_ms, stored.first)
        return partition

    def tick(self, now_ms: int) -> None:
        """Note how things stand where something changed a while ago."""
        if 0 <= now_ms - self._looked_ms < _LOOK_INTERVAL_MS:
            return
        self._looked_ms = now_ms
        due = [
            key
            for key, partition in self._partitions.items()
            if partition.is_changed and now_ms - partition.noted_ms >= _NOTE_INTERVAL_MS
        ]
        if len(due) > _ROWS_AT_ONCE:
            self._looked_ms = 0  # the others with the next ticks
        if due:
            self.note(due[:_ROWS_AT_ONCE], now_ms)

    def note(self, keys: list[tuple[str, int]], now_ms: int) -> None:
        """Write down how partitions stand: where this is in the log, all that it tells of is."""
        store = self._core.store
        if store.refusal is not None:
            return
        changes: list[Change] = []
        expired_ms = now_ms - self._core.config.kafka_producer_expiry_ms
        for key in keys:
            partition = self._partitions[key]
            partition.noted_ms = now_ms
            partition.is_changed = False
            partition.stable.forget_below(store.min_offset(*key))
            for producer_id, producer in list(partition.producers.items()):
                is_open = partition.stable.is_open(producer_id)
                if producer.last_ms < expired_ms and not is_open:
                    del partition.producers[producer_id]
            topic, queue_id = key
            changes.append((KAFKA_PRODUCER_TABLE, f"{topic}@{queue_id}", _to_row(partition)))
        if changes:
            store.change(changes)
            self._core.ask_turn()

    # ------------------------------------------------------------------------------------------ ids

    def new_producer_id(self, then: Callable[[int], None]) -> None:
        """An id that nobody has, now or later; -1 where it could not be noted."""
        if self._next_id < self._id_end and not self._id_waiters:
            self._next_id += 1
            then(self._next_id - 1)
            return
        self._id_waiters.append(then)
        if len(self._id_waiters) > 1:
            return  # the next block is on its way
        end = self._id_end + ID_BLOCK

        def noted(error: SluiceError | None) -> None:
            waiters, self._id_waiters = self._id_waiters, []
            if error is None:
                self._next_id, self._id_end = end - ID_BLOCK, end
            for waiter in waiters:
                if error is not None:
                    waiter(-1)
                else:
                    self.new_producer_id(waiter)

        try:
            self._core.store.change([(KAFKA_PRODUCER_TABLE, _NEXT_ID, end)], noted)
        except SluiceError as error:
            noted(error)
            return
        self._core.ask_turn()

    # ------------------------------------------------------------------------------------ appending

    def partition(self, topic: str, queue_id: int) -> Partition:
        """The producers of a partition."""
        key = (topic, queue_id)
        if self._lost and key in self._lost:
            self._lost.discard(key)
            return self._restore(key)
        partition = self._partitions.get(key)
        if partition is None:
            partition = self._partitions[key] = Partition()
        return partition

    def known(self, topic: str, queue_id: int) -> Partition | None:
        """The same where something is known; None also after a failed write."""
        return None if self._lost else self._partitions.get((topic, queue_id))

    def stable_offsets(self, topic: str, queue_id: int) -> StableOffsets:
        """Which transactions of a partition are open, and which were rolled back."""
        return self.partition(topic, queue_id).stable

    @staticmethod
    def check(partition: Partition, head: BatchHead) -> Verdict:
        """Whether a batch that a client sent is the next one of its producer."""
        producer = partition.producers.get(head.producer_id)
        if producer is None:
            return _NEW
        if head.producer_epoch < producer.epoch:
            return Verdict(INVALID_PRODUCER_EPOCH)
        if head.producer_epoch > producer.epoch:
            return _NEW if head.base_sequence == 0 else Verdict(OUT_OF_ORDER_SEQUENCE_NUMBER)
        first, batches = head.base_sequence, producer.batches
        expected = (batches[-1][1] + 1) & _SEQUENCE_MASK if batches else 0
        if first != expected:
            last = head.last_sequence
            for sent in batches:
                if sent[0] == first and sent[1] == last:
                    return Verdict(NONE, sent[2])
        if not head.is_transactional and partition.stable.is_open(head.producer_id):
            return Verdict(INVALID_TXN_STATE)
        return _NEW if first == expected else Verdict(OUT_OF_ORDER_SEQUENCE_NUMBER)

    def append(
        self,
        topic: str,
        queue_id: int,
        head: BatchHead,
        data: Buffer,
        born_host: bytes,
        done: Done,
    ) -> Placed:
        """Stage a batch that was checked; `done` when it is confirmed, or why it is not."""

        def told(error: SluiceError | None) -> None:
            if error is not None:
                self.lost(topic, queue_id)
            done(error)

        place = (topic, queue_id)
        return self.append_to(self.partition(*place), place, head, data, born_host, told)

    def append_to(
        self,
        partition: Partition,
        place: tuple[str, int],
        head: BatchHead,
        data: Buffer,
        born_host: bytes,
        told: Done | None = None,
    ) -> Placed:
        """The same, and who is told says what is `lost`.

        What is known of its producer holds at once, for the batches that follow in this turn.
        """
        store, max_ms = self._core.store, head.max_ms
        lane = partition.lane
        if lane is None or not lane.takes(born_host):
            lane = partition.lane = BatchLane(store, place, len(born_host))
        view = data if isinstance(data, memoryview) else memoryview(data)
        (placed,) = place_batches(
            store,
            [
                (
                    lane,
                    kafka_batches.patched(head.length, LEADER_EPOCH),
                    view[kafka_batches.PATCHED_BYTES :],
                    head.last_delta + 1,
                    kafka_entries.code_of(max_ms, head.attributes),
                    max_ms if max_ms > 0 else 0,
                    keys_of(head, data) if store.config.kafka_key_index else b"",
                )
            ],
            born_host,
            told,
        )
        _note(partition, head, placed.queue_offset, placed.store_ms, data)
        return placed

    def lost(self, topic: str, queue_id: int) -> None:
        """What was appended to a partition could not be written: the log says how it stands."""
        self._lost.add((topic, queue_id))

    def forget_topic(self, topic: str) -> None:
        """A topic was deleted, and all that was sent to it."""
        for key in [key for key in self._partitions if key[0] == topic]:
            del self._partitions[key]


def _note(partition: Partition, head: BatchHead, offset: int, store_ms: int, data: Buffer) -> None:
    """Take a batch of the log into account."""
    last_delta, attributes, producer_id = head.last_delta, head.attributes, head.producer_id
    partition.end = offset + last_delta + 1
    partition.is_changed = True
    if producer_id < 0:
        return
    before = partition.producers.get(producer_id)
    epoch = head.producer_epoch
    batches = before.batches if before is not None and before.epoch == epoch else ()
    if attributes & kafka_batches.CONTROL:
        # The last four bytes of the first record's key say which way the transaction went.
        is_commit = _marker_commits(data)
        partition.stable.marker(producer_id, offset, commit=is_commit)
    else:
        first = head.base_sequence
        batches = (*batches, (first, (first + last_delta) & _SEQUENCE_MASK, offset))
        if len(batches) > KEPT_BATCHES:
            batches = batches[-KEPT_BATCHES:]
        if attributes & kafka_batches.TRANSACTIONAL:
            partition.stable.data(producer_id, offset)
    partition.producers[producer_id] = _new_tuple(Producer, (epoch, store_ms, batches))


def is_next(partition: Partition, producer_id: int, epoch: int, first: int) -> bool:
    """Whether a sequence number follows the last of its producer, which has no transaction open."""
    producer = partition.producers.get(producer_id)
    if producer is None:
        return False
    known_epoch, _, batches = producer
    return (
        known_epoch == epoch
        and len(batches) > 0
        and (batches[-1][1] + 1) & _SEQUENCE_MASK == first
        and not partition.stable.is_open(producer_id)
    )


def note_next(
    partition: Partition,
    producer_id: int,
    epoch: int,
    first: int,
    count: int,
    offset: int,
    store_ms: int,
) -> None:
    """Take a batch into account that `is_next`, or is of no producer, and of no transaction."""
    partition.end = offset + count
    partition.is_changed = True
    if producer_id >= 0:
        producers = partition.producers
        sent = (first, (first + count - 1) & _SEQUENCE_MASK, offset)
        batches = (*producers[producer_id][2][1 - KEPT_BATCHES :], sent)
        producers[producer_id] = _new_tuple(Producer, (epoch, store_ms, batches))


def _marker_commits(data: Buffer) -> bool:
    """Whether a control batch commits: its key is a version and a type, 1 for a commit."""
    at = kafka_batches.HEAD_BYTES + _MARKER_KEY_AT
    return bytes(data[at + 2 : at + 4]) == b"\x00\x01"


def _to_row(partition: Partition) -> dict[str, Any]:
    return {
        "end": partition.end,
        "producers": {
            str(producer_id): [producer.epoch, producer.last_ms, producer.batches]
            for producer_id, producer in partition.producers.items()
        },
        "stable": partition.stable.row(),
    }


def _from_row(row: dict[str, Any] | None) -> Partition:
    if row is None:
        return Partition()
    producers = {
        int(producer_id): Producer(
            epoch, last_ms, tuple((first, last, offset) for first, last, offset in batches)
        )
        for producer_id, (epoch, last_ms, batches) in row["producers"].items()
    }
    return Partition(producers, StableOffsets.from_row(row["stable"]), int(row["end"]))
