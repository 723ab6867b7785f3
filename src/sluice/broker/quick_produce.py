"""This module stores batches of the usual kind with as little ado as possible.

Most batches are the next of a producer that is known, to a partition that holds something already,
and in order. For those one look at each thing that matters is enough: head and checksum, lengths of
the records, time, sequence number; what is the same for all batches of a partition is kept with
what is known of its producers (`BatchLane`). Whatever is unusual is left to the long way
(`kafka_produce.py`), which does the same, finds out what is wrong, and says so.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from sluice.broker.core import BrokerCore
from sluice.broker.kafka_partitions import KafkaTopic
from sluice.broker.producer_states import (
    LEADER_EPOCH,
    Done,
    Newest,
    Partition,
    is_next,
    note_next,
)
from sluice.errors import SluiceError
from sluice.protocol import kafka_batches, kafka_checks, kafka_entries
from sluice.protocol.kafka_batches import BadBatch, BatchHead, Fields
from sluice.protocol.kafka_fast import ProducedPart, ProducePart
from sluice.storage.whole_batches import Laid, place

# A batch of at most so many bytes that came alone stays in memory until the next one comes: who
# reads at the end waits for it.
NEWEST_BYTES_MAX: Final = 4096
_PATCHED_BYTES: Final = kafka_batches.PATCHED_BYTES
_UNUSUAL: Final = kafka_batches.TRANSACTIONAL | kafka_batches.APPEND_TIME
_new_tuple = tuple.__new__  # half the time of a named tuple's own

# Of a batch that is usual: its partition, what is known of that, and the producer's id, epoch and
# sequence number.
_Usual = tuple[int, Partition, int, int, int]


class QuickProduce:
    """Stores the batches of one request to one topic that asks for nothing special."""

    __slots__ = (
        *("_ahead_ms", "_batches", "_bytes", "_bytes_max", "_core", "_host", "_partitions"),
        *("_records", "stored"),
    )

    def __init__(self, core: BrokerCore, topic: KafkaTopic, born_host: bytes) -> None:
        config = core.config
        self._core = core
        self._host = born_host
        self._partitions = topic.partitions
        bytes_max = topic.batch_bytes_max
        self._bytes_max = config.kafka_batch_bytes_max if bytes_max is None else bytes_max
        ahead_ms = topic.after_ms_max
        self._ahead_ms = config.kafka_timestamp_ahead_ms_max if ahead_ms is None else ahead_ms
        self._batches = self._records = self._bytes = 0  # that were stored
        self.stored = topic.stored

    @staticmethod
    def of(core: BrokerCore, topic: KafkaTopic, born_host: bytes) -> QuickProduce | None:
        """One for this topic, where there can be one."""
        if (
            not topic.batches
            or not topic.settings.writable
            or topic.is_special
            or core.config.permission == "r"
            or core.store.config.kafka_key_index
        ):
            return None
        return QuickProduce(core, topic, born_host)

    def store(
        self,
        parts: Sequence[ProducePart],
        at: int,
        results: list[ProducedPart],
        done: Done | None = None,
    ) -> int:
        """Give the batches of a request from number `at` on their places, as far as they are usual
        and of different partitions, and note what is answered for each if it is confirmed. The
        number of the first that has no place: it is to be looked at again, or more closely.

        `done` is told of each when it is confirmed, or why it is not; where nobody is, the request
        is.
        """
        usual: list[_Usual] = []
        laid: list[Laid] = []
        self._look(parts, at, usual, laid)
        if not laid:
            return at
        try:
            placed = place(self._core.store, laid, self._host, done)
        except SluiceError:
            return at
        for each, (lane, front, rest, count, *_), (_, size, offset, store_ms) in zip(
            usual, laid, placed, strict=False
        ):
            partition, states, producer_id, epoch, first = each
            note_next(states, producer_id, epoch, first, count, offset, store_ms)
            if done is not None and len(rest) <= NEWEST_BYTES_MAX:
                newest = (offset, offset + count, front, rest)
                states.newest = _new_tuple(Newest, newest)
            self._records += count
            self._bytes += size
            answered = (partition, 0, offset, -1, lane.queue.start_offset, None)
            results[at] = _new_tuple(ProducedPart, answered)
            at += 1
        self._batches += len(placed)
        return at

    def _look(
        self, parts: Sequence[ProducePart], at: int, usual: list[_Usual], laid: list[Laid]
    ) -> None:
        """Find out which batches are usual, until one is not."""
        core, host, bytes_max, stored = self._core, self._host, self._bytes_max, self.stored
        store, known, partitions = core.store, core.producers.known, self._partitions
        if store.log.end > core.admission.free_end:
            return
        newest_ms = store.last_ms + self._ahead_ms
        usual_head, has_alike = kafka_batches.usual_head, kafka_checks.has_alike
        patched, code_of = kafka_batches.patched, kafka_entries.code_of
        seen: set[int] = set()
        for number in range(at, len(parts)):
            partition, data = parts[number]
            if data is None or partition in seen or partition >= partitions:
                return
            seen.add(partition)
            states = known(stored, partition)
            lane = None if states is None else states.lane
            if states is None or lane is None or len(data) > bytes_max or not lane.takes(host):
                return
            fields = usual_head(data)
            if fields is None:
                return
            _, length, _, _, _, attributes, _, _, max_ms, producer_id, epoch, first, count = fields
            if (
                attributes & _UNUSUAL
                or max_ms > newest_ms
                or (producer_id >= 0 and not is_next(states, producer_id, epoch, first))
                or not (has_alike(data, attributes, count) or self._holds(fields, data))
            ):
                return
            usual.append((partition, states, producer_id, epoch, first))
            laid.append(
                (
                    lane,
                    patched(length, LEADER_EPOCH),
                    data[_PATCHED_BYTES:],
                    count,
                    code_of(max_ms, attributes),
                    max_ms if max_ms > 0 else 0,
                    b"",
                )
            )

    def count_stored(self) -> None:
        """All batches of the request were looked at: what was stored is counted, once for all."""
        if self._batches:
            self._core.stats.stored(self.stored, self._records, self._bytes, self._batches)
            self._batches = self._records = self._bytes = 0

    def _holds(self, fields: Fields, data: memoryview) -> bool:
        """Whether a batch holds the records that it says, where that is asked for."""
        config = self._core.config
        if config.kafka_check_records:
            head = _new_tuple(BatchHead, fields)
            try:
                kafka_checks.check_records(head, data, config.kafka_unpacked_bytes_max)
            except BadBatch:
                return False
        return True
