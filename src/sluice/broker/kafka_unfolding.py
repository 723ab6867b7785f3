"""This module shows batches of Kafka's producers to RocketMQ's consumers, as the messages that they
are.

A batch is one entry of the log; a consumer gets an entry for each record, at the record's own
offset. Tags and other filters look at each of them. What transactions have not decided yet is not
shown, what they rolled back never is, nor are their marks. Batches that were just unpacked are kept
for the next pull, within a bound.

Entries of a queue that are no such batch are shown as they lie.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Final, NamedTuple

from sluice.errors import MessageIllegal, RecordDamaged
from sluice.model import PropertyFilter
from sluice.protocol import kafka_batches, kafka_entries, kafka_views, records
from sluice.protocol.kafka_batches import BadBatch
from sluice.storage.store import ReadResult, ReadStatus

if TYPE_CHECKING:
    from sluice.broker.core import BrokerCore

Accept = Callable[[int], bool] | PropertyFilter
KEPT_BYTES_MAX: Final = 32 * 1024 * 1024
_UNITS: Final = 64
_PROPERTIES_MAX: Final = records.PROPERTIES_BYTES_MAX - records.CRC_PROPERTY_BYTES - 1


class _Shown(NamedTuple):
    """One message as a consumer sees it."""

    offset: int
    entry: memoryview | bytes


class Unfolding:
    """Reads of RocketMQ's consumers from queues that may hold batches."""

    def __init__(self, core: BrokerCore) -> None:
        self._core = core
        self._kept: OrderedDict[int, list[_Shown]] = OrderedDict()  # by position in the log
        self._kept_bytes = 0

    def reader(self, topic: str, queue_id: int) -> Callable[..., ReadResult]:
        """How a queue is read: as it lies, unless it may hold batches."""
        store = self._core.store
        queue = store.queues.get((topic, queue_id))
        return self.read if queue is not None and queue.kind == "b" else store.read

    def read(
        self,
        topic: str,
        queue_id: int,
        offset: int,
        *,
        count_max: int = 32,
        bytes_max: int = 256 * 1024,
        accept: Accept | None = None,
    ) -> ReadResult:
        """Messages from an offset on, as `Store.read` gives entries; may raise `ColdRead`."""
        store = self._core.store
        stable = self._core.producers.stable_offsets(topic, queue_id)
        result = store.read(topic, queue_id, offset, count_max=_UNITS, bytes_max=bytes_max)
        if result.status is not ReadStatus.FOUND:
            return result
        stop = stable.stable(result.max_offset)
        if offset >= stop:
            # All that there is is undecided: as if it had not come yet.
            return ReadResult(ReadStatus.OFFSET_OVERFLOW_ONE, offset, result.min_offset, offset)
        aborted = [] if stable.is_trivial else stable.aborted(offset, result.next_offset)
        chosen: list[memoryview] = []
        byte_count, next_offset = 0, offset
        for shown, after in self._shown(result, aborted, stop):
            for at, entry in shown:
                if at < offset or not _accepts(accept, entry):
                    continue
                if chosen and (len(chosen) >= count_max or byte_count + len(entry) > bytes_max):
                    return _found(result, chosen, byte_count, at)
                chosen.append(memoryview(entry))
                byte_count += len(entry)
            next_offset = after
        next_offset = min(next_offset, stop)
        if chosen:
            return _found(result, chosen, byte_count, next_offset)
        low, high = result.min_offset, result.max_offset
        return ReadResult(ReadStatus.NO_MATCHED_MESSAGE, next_offset, low, high)

    def _shown(
        self, result: ReadResult, aborted: list[tuple[int, int]], stop: int
    ) -> Iterator[tuple[list[_Shown], int]]:
        """The messages of each entry that was read, and the offset behind it."""
        hidden: set[int] = set()
        for view in result.messages:
            entry = records.decode(view)
            base = entry.queue_offset
            if base >= stop:
                return
            if not kafka_entries.is_kafka(entry.sys_flag):
                count = records.offset_count(entry.sys_flag, entry.properties)
                yield [_Shown(base, view)], base + count
                continue
            head = kafka_batches.read_head(entry.body)
            if head is None:
                raise RecordDamaged(entry.topic, base, "no batch is where one must be", base + 1)
            after = base + head.record_count
            hidden.update(name for name, first in aborted if first < after)
            if head.is_control:
                hidden.discard(head.producer_id)
                yield [], after
            elif head.is_transactional and head.producer_id in hidden:
                yield [], after
            else:
                yield self._unfolded(entry), after

    def _unfolded(self, entry: records.Entry) -> list[_Shown]:
        kept = self._kept.get(entry.position)
        if kept is not None:
            self._kept.move_to_end(entry.position)
            return kept
        topics = self._core.kafka_topics
        name = topics.kafka_name(entry.topic)
        topic = None if name is None else topics.find(name)
        topic_id = "" if topic is None else topic.id.hex.upper()
        try:
            shown = [
                _Shown(*each)
                for each in kafka_views.entries_of(
                    entry,
                    topic_id,
                    self._core.config.kafka_unpacked_bytes_max,
                    properties_max=_PROPERTIES_MAX,
                )
            ]
        except BadBatch as bad:
            at = entry.queue_offset
            raise RecordDamaged(entry.topic, at, str(bad), at + 1) from bad
        size = sum(len(each.entry) for each in shown)
        if size <= KEPT_BYTES_MAX // 4:
            self._kept[entry.position] = shown
            self._kept_bytes += size
            while self._kept_bytes > KEPT_BYTES_MAX:
                _, gone = self._kept.popitem(last=False)
                self._kept_bytes -= sum(len(each.entry) for each in gone)
        return shown

    def one_of(self, view: memoryview, unique: str) -> memoryview:
        """The message of a batch that has this id, as who asks for the batch's place means it;
        what is no batch is given back as it is.
        """
        entry = records.decode(view)
        if not kafka_entries.is_kafka(entry.sys_flag):
            return view
        found = self.message_of(entry, unique)
        if found is None:
            raise MessageIllegal(f"the batch at {entry.position} has no message {unique[:100]}")
        return memoryview(found)

    def message_of(self, batch: records.Entry, unique: str) -> memoryview | bytes | None:
        """The message of a batch that has this id."""
        wanted = unique.encode()
        for shown in self._unfolded(batch):
            if records.message_keys(records.decode(shown.entry).properties)[0] == wanted:
                return shown.entry
        return None


def _found(
    result: ReadResult, chosen: list[memoryview], byte_count: int, next_offset: int
) -> ReadResult:
    return ReadResult(
        ReadStatus.FOUND,
        next_offset,
        result.min_offset,
        result.max_offset,
        chosen,
        len(chosen),
        byte_count,
    )


def _accepts(accept: Accept | None, entry: memoryview | bytes) -> bool:
    """Whether a consumer wants a message: its tag or its properties say so."""
    if accept is None:
        return True
    decoded = records.decode(entry)
    if isinstance(accept, PropertyFilter):
        return accept.matches(decoded.properties)
    code = records.tags_code(decoded.topic.encode(), decoded.properties, decoded.store_ms, ())
    return accept(code)
