"""This module tells Kafka's clients the offsets of partitions: first, last, and at a time.

By time it is the first record, in the order of offsets, whose timestamp is not below the one asked
for. The units of a partition tell the highest timestamp of each batch, so one batch is unpacked at
most. Of messages that RocketMQ's producers sent, the units do not tell the time of birth: there the
search begins with what was stored at that time or later.
"""

from __future__ import annotations

from collections import Counter
from typing import Any, Final, NamedTuple

import numpy as np

from sluice.broker.core import BrokerCore
from sluice.broker.kafka_api import Answer, KafkaApi, Request
from sluice.broker.kafka_fetch import epoch_code
from sluice.broker.kafka_fetch_again import COMMITTED
from sluice.broker.kafka_partitions import KafkaTopic
from sluice.broker.producer_states import LEADER_EPOCH
from sluice.broker.queue_units import Part, columns, parts_of, times_ms
from sluice.errors import SluiceError
from sluice.protocol import kafka_batches, kafka_codes, kafka_entries, records
from sluice.protocol.kafka_batches import BadBatch
from sluice.protocol.kafka_fast import NO_EPOCH

LATEST: Final = -1
EARLIEST: Final = -2
MAX_TIMESTAMP: Final = -3
EARLIEST_LOCAL: Final = -4
LATEST_TIERED: Final = -5  # of what was moved to another tier, which there is none of
EARLIEST_PENDING: Final = -6  # of what is to be moved there
_ENTRIES_MAX: Final = 1000
# Times that mean something else, and the version of the request that first knew them.
_KNOWN_FROM: Final = {
    LATEST: 1,
    EARLIEST: 1,
    MAX_TIMESTAMP: 7,
    EARLIEST_LOCAL: 8,
    LATEST_TIERED: 9,
    EARLIEST_PENDING: 11,
}


class At(NamedTuple):
    """A place in a partition: offset and timestamp, -1 where there is none."""

    offset: int = -1
    time_ms: int = -1


def _time(at: At) -> int:
    return at.time_ms


def _nothing(part: Any, code: int) -> dict[str, Any]:
    return {
        "partition_index": part.partition_index,
        "error_code": code,
        "timestamp": -1,
        "offset": -1,
        "leader_epoch": NO_EPOCH,
    }


class KafkaListOffsets:
    """Offsets of one broker's partitions."""

    def __init__(self, core: BrokerCore) -> None:
        self._core = core

    def register(self, api: KafkaApi) -> None:
        api.register(kafka_codes.LIST_OFFSETS, 1, 11, self.list_offsets)
        api.register(kafka_codes.OFFSET_FOR_LEADER_EPOCH, 2, 4, self.for_leader_epoch)

    def list_offsets(self, request: Request, answer: Answer) -> None:
        body = request.body
        isolation = getattr(body, "isolation_level", 0)
        topics = [
            (topic.name, {part.partition_index: part for part in topic.partitions})
            for topic in body.topics
        ]
        times = Counter(
            (topic.name, part.partition_index) for topic in body.topics for part in topic.partitions
        )
        wanted = [(name, part) for name, parts in topics for part in parts.values()]
        found: list[dict[str, Any]] = []

        def ask() -> bool:
            for name, part in wanted[len(found) :]:
                if times[name, part.partition_index] > 1:
                    found.append(_nothing(part, kafka_codes.INVALID_REQUEST))
                else:
                    found.append(self._one(name, part, isolation, request.version))
            return True

        def done(result: bool | None, error: BaseException | None) -> None:
            if error is not None:
                request.peer.drop(f"offsets cannot be read: {error}")
                return
            rest = iter(found)
            answer(
                {
                    "topics": [
                        {"name": name, "partitions": [next(rest) for _ in parts]}
                        for name, parts in topics
                    ]
                }
            )

        self._core.store.call(ask, done)

    def _one(self, name: str, part: Any, isolation: int, version: int) -> dict[str, Any]:
        result = _nothing(part, 0)
        when = int(part.timestamp)
        if when < 0 and version < _KNOWN_FROM.get(when, version + 1):
            result["error_code"] = kafka_codes.UNSUPPORTED_VERSION
            return result
        topic = self._core.kafka_topics.find(name)
        if topic is None or not 0 <= part.partition_index < topic.partitions:
            result["error_code"] = kafka_codes.UNKNOWN_TOPIC_OR_PARTITION
            return result
        code = epoch_code(getattr(part, "current_leader_epoch", NO_EPOCH))
        if code:
            result["error_code"] = code
            return result
        try:
            at = self._find(topic, part.partition_index, when, isolation)
        except SluiceError:
            result["error_code"] = kafka_codes.KAFKA_STORAGE_ERROR
            return result
        result["offset"], result["timestamp"] = at
        if at.offset >= 0:
            result["leader_epoch"] = LEADER_EPOCH
        return result

    def _find(self, topic: KafkaTopic, partition: int, when: int, isolation: int) -> At:
        store, stored = self._core.store, topic.stored
        if when in (EARLIEST, EARLIEST_LOCAL):
            return At(store.min_offset(stored, partition))
        if when in (LATEST_TIERED, EARLIEST_PENDING):
            return At()
        high = store.max_offset(stored, partition)
        if isolation == COMMITTED and topic.batches:
            stable = self._core.producers.stable_offsets(stored, partition).stable(high)
            high = max(stable, store.min_offset(stored, partition))
        if when == LATEST:
            return At(high)
        if when == MAX_TIMESTAMP:
            return self._newest(topic, partition, high)
        if topic.batches:
            return self._in_batches(topic, partition, when, high)
        return self._in_messages(topic, partition, when, high)

    # -------------------------------------------------------------------------------------- by time

    def _stored_from(self, part: Part, when: int) -> int:
        """The first unit whose entry was stored at a time or later: that time never goes back."""
        low, high = part.first, part.stop
        while low < high:
            middle = (low + high) // 2
            one = part._replace(first=middle, stop=middle + 1)
            ((_, units),) = columns(self._core.store, one)
            if int(units["store_ms"][0]) < when:
                low = middle + 1
            else:
                high = middle
        return low

    def _parts(self, topic: KafkaTopic, partition: int) -> list[Part]:
        queue = self._core.store.queues.get((topic.stored, partition))
        return [] if queue is None else parts_of(self._core.store, queue)

    def first_shown(self, topic: KafkaTopic, partition: int, when: int) -> int:
        """The first offset whose time is not below one, or the end: of records their own time, of
        single messages of RocketMQ's producers the time of storing. May raise `ColdRead`.
        """
        high = self._core.store.max_offset(topic.stored, partition)
        high = self._core.producers.stable_offsets(topic.stored, partition).stable(high)
        at = self._in_batches(topic, partition, when, high, by_store=True)
        return high if at.offset < 0 else at.offset

    def _in_batches(
        self, topic: KafkaTopic, partition: int, when: int, high: int, *, by_store: bool = False
    ) -> At:
        # No record is further ahead of the clock than is allowed, so what was stored long before
        # need not be looked at.
        ahead_ms = self._core.config.kafka_timestamp_ahead_ms_max
        if topic.after_ms_max is not None:
            ahead_ms = max(ahead_ms, topic.after_ms_max)  # the topic may have had none before
        low = self._core.store.min_offset(topic.stored, partition)
        for part in self._parts(topic, partition):
            later = part._replace(first=self._stored_from(part, when - ahead_ms))
            for _, units in columns(self._core.store, later):
                for index in np.flatnonzero(times_ms(units) >= when):
                    if int(units["offset"][index]) >= high:
                        return At()
                    position = int(units["position"][index])
                    at = self._in_entry(position, when, low, high, by_store=by_store)
                    if at.offset >= 0:
                        return at
        return At()

    def _newest(self, topic: KafkaTopic, partition: int, high: int) -> At:
        """The first record with the highest timestamp."""
        if not topic.batches:
            return self._newest_message(topic, partition, high)
        best, looked = At(), 0
        low = self._core.store.min_offset(topic.stored, partition)
        for part in self._parts(topic, partition):
            for _, units in columns(self._core.store, part):
                times = np.where(units["offset"] < high, times_ms(units), -1)
                # A unit that tells no time of its records counts with the time of storing, which
                # is mostly later: then the next ones may be newer still.
                while int(times.max()) > best.time_ms and looked < _ENTRIES_MAX:
                    index, looked = int(times.argmax()), looked + 1
                    times[index] = -1
                    at = self._in_entry(int(units["position"][index]), None, low, high)
                    best = max(best, at, key=_time)
        return best

    def _in_entry(
        self, position: int, when: int | None, low: int, high: int, *, by_store: bool = False
    ) -> At:
        """The first record of an entry that is not older than a time, or than the others of the
        entry; `by_store`: single messages count by when they were stored. The first entry may
        begin before its partition does.
        """
        view = self._core.store.entry_at(position)
        if view is None:
            return At()
        entry = records.decode(view)
        if not kafka_entries.is_kafka(entry.sys_flag):
            time_ms = entry.store_ms if by_store else entry.born_ms
            is_match = (when is None or time_ms >= when) and entry.queue_offset < high
            return At(entry.queue_offset, time_ms) if is_match else At()
        head = kafka_batches.read_head(entry.body)
        if head is None:
            return At()
        if head.is_control or head.attributes & kafka_batches.APPEND_TIME:
            # The end of a transaction is an entry as any other: its readers step over it.
            return At(max(entry.queue_offset, low), head.max_ms)
        try:
            found = kafka_batches.read_records(
                head, entry.body, self._core.config.kafka_unpacked_bytes_max
            )
        except BadBatch:
            return At(entry.queue_offset, head.max_ms)
        shown = (
            At(offset, head.base_ms + record.time_delta)
            for record in found
            if low <= (offset := entry.queue_offset + record.offset_delta) < high
        )
        if when is None:
            return max(shown, key=_time, default=At())
        return next((at for at in shown if at.time_ms >= when), At())

    def _in_messages(self, topic: KafkaTopic, partition: int, when: int, high: int) -> At:
        store = self._core.store
        offset = store.offset_for_time(topic.stored, partition, when)
        result = store.read(topic.stored, partition, offset, count_max=_ENTRIES_MAX)
        for message in result.messages:
            entry = records.decode(message)
            if entry.born_ms >= when and entry.queue_offset < high:
                return At(entry.queue_offset, entry.born_ms)
        return At()

    def _newest_message(self, topic: KafkaTopic, partition: int, high: int) -> At:
        store = self._core.store
        if high <= store.min_offset(topic.stored, partition):
            return At()
        result = store.read(topic.stored, partition, high - 1, count_max=1)
        for message in result.messages:
            entry = records.decode(message)
            return At(entry.queue_offset, entry.born_ms)
        return At()

    # --------------------------------------------------------------------------------------- epochs

    def for_leader_epoch(self, request: Request, answer: Answer) -> None:
        """Where an epoch ended; there is one, and it ends where the partition does."""
        topics = []
        for topic in request.body.topics:
            found = self._core.kafka_topics.find(topic.topic)
            parts = [self._epoch_end(found, part) for part in topic.partitions]
            topics.append({"topic": topic.topic, "partitions": parts})
        answer({"topics": topics})

    def _epoch_end(self, topic: KafkaTopic | None, part: Any) -> dict[str, Any]:
        result = {"partition": part.partition, "leader_epoch": NO_EPOCH, "end_offset": -1}
        if topic is None or not 0 <= part.partition < topic.partitions:
            return {**result, "error_code": kafka_codes.UNKNOWN_TOPIC_OR_PARTITION}
        code = epoch_code(getattr(part, "current_leader_epoch", NO_EPOCH))
        if code:
            return {**result, "error_code": code}
        if part.leader_epoch == LEADER_EPOCH:  # of any other, nothing is known
            queue = self._core.store.queues.get((topic.stored, part.partition))
            result["leader_epoch"] = LEADER_EPOCH
            result["end_offset"] = 0 if queue is None else queue.end_offset
        return result
