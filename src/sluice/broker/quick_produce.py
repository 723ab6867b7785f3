"""This module stores batches of the usual kind with as little ado as possible.

Most batches are the next of a producer that is known, to a partition that holds something already,
and in order. For those one look at each thing that matters is enough: head and checksum, lengths of
the records, time, sequence number; what is the same for all batches of a partition is kept with
what is known of its producers (`BatchLane`). Whatever is unusual is left to the long way
(`kafka_produce.py`), which does the same, finds out what is wrong, and says so.
"""

from __future__ import annotations

from typing import Final

from sluice.broker.core import BrokerCore
from sluice.broker.kafka_partitions import KafkaTopic
from sluice.broker.producer_states import LEADER_EPOCH, Done, Newest, is_next, note_next
from sluice.errors import SluiceError
from sluice.protocol import kafka_batches, kafka_checks, kafka_entries
from sluice.protocol.kafka_batches import BadBatch, BatchHead, Fields
from sluice.protocol.kafka_fast import ProducedPart

# A batch of at most so many bytes that came alone stays in memory until the next one comes: who
# reads at the end waits for it.
NEWEST_BYTES_MAX: Final = 4096
_PATCHED_BYTES: Final = kafka_batches.PATCHED_BYTES
_UNUSUAL: Final = kafka_batches.TRANSACTIONAL | kafka_batches.APPEND_TIME
_new_tuple = tuple.__new__  # half the time of a named tuple's own


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
        self, partition: int, data: memoryview, done: Done | None = None
    ) -> ProducedPart | None:
        """Give a batch its place, and say what is answered if it is confirmed. None: it has none,
        and is to be looked at more closely.

        `done` is told when it is confirmed, or why it is not; where nobody is, the request is.
        """
        core = self._core
        store = core.store
        states = core.producers.known(self.stored, partition)
        if states is None or partition >= self._partitions:
            return None
        lane = states.lane
        if (
            lane is None
            or len(data) > self._bytes_max
            or store.log.end > core.admission.free_end
            or not lane.takes(self._host)
        ):
            return None
        fields = kafka_batches.usual_head(data)
        if fields is None:
            return None
        _, length, _, _, _, attributes, _, _, max_ms, producer_id, epoch, first, count = fields
        if (
            attributes & _UNUSUAL
            or max_ms > store.last_ms + self._ahead_ms
            or (producer_id >= 0 and not is_next(states, producer_id, epoch, first))
            or not (kafka_checks.has_alike(data, attributes, count) or self._holds(fields, data))
        ):
            return None
        front, rest = kafka_batches.patched(length, LEADER_EPOCH), data[_PATCHED_BYTES:]
        try:
            _, size, offset, store_ms = lane.place(
                front,
                rest,
                count,
                kafka_entries.code_of(max_ms, attributes),
                max_ms if max_ms > 0 else 0,
                self._host,
                b"",
                done,
            )
        except SluiceError:
            return None
        note_next(states, producer_id, epoch, first, count, offset, store_ms)
        if done is not None and length <= NEWEST_BYTES_MAX:
            states.newest = _new_tuple(Newest, (offset, offset + count, front, rest))
        self._batches += 1
        self._records += count
        self._bytes += size
        answered = (partition, 0, offset, -1, lane.queue.start_offset, None)
        return _new_tuple(ProducedPart, answered)

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
