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
from struct import Struct
from typing import TYPE_CHECKING, Final, NamedTuple

from sluice.broker.stable_offsets import Aborted
from sluice.errors import MessageIllegal, RecordDamaged
from sluice.model import PropertyFilter
from sluice.protocol import kafka_batches, kafka_entries, kafka_views, records
from sluice.protocol.kafka_batches import BadBatch, BatchHead
from sluice.storage.store import ReadResult, ReadStatus

if TYPE_CHECKING:
    from sluice.broker.core import BrokerCore

Accept = Callable[[int], bool] | PropertyFilter
KEPT_BYTES_MAX: Final = 32 * 1024 * 1024
_UNITS: Final = 64
_WHOLE_UNITS: Final = 800  # where nothing is unpacked
_PLACE: Final = Struct(">20xq8xi")  # of an entry: its offset and its system flags
_ATTRIBUTES_AT: Final = 21  # of a batch
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
        aborted = [] if stable.is_trivial else stable.rolled_back(offset, result.next_offset)
        chosen: list[memoryview] = []
        byte_count, next_offset = 0, offset
        for shown, after in self._shown(result, aborted, stop):
            for at, entry in shown:
                if (at < offset and not _is_whole(entry)) or not _accepts(accept, entry):
                    continue
                if chosen and (len(chosen) >= count_max or byte_count + len(entry) > bytes_max):
                    return _found(result, chosen, byte_count, at)
                chosen.append(memoryview(entry))
                byte_count += len(entry)
            next_offset = after
        # Where nothing of all that is decided is left, compaction has taken it.
        next_offset = stop if next_offset == offset else min(next_offset, stop)
        if chosen:
            return _found(result, chosen, byte_count, next_offset)
        low, high = result.min_offset, result.max_offset
        return ReadResult(ReadStatus.NO_MATCHED_MESSAGE, next_offset, low, high)

    def read_whole(
        self, topic: str, queue_id: int, offset: int, *, bytes_max: int
    ) -> tuple[ReadResult, list[int]]:
        """Entries as they lie, batches among them, without those that nobody is to see; and the
        size of each. The first may begin below `offset`. May raise `ColdRead`.
        """
        store = self._core.store
        stable = self._core.producers.stable_offsets(topic, queue_id)
        result = store.read(topic, queue_id, offset, count_max=_WHOLE_UNITS, bytes_max=bytes_max)
        if result.status is not ReadStatus.FOUND:
            return result, []
        low, high, next_offset = result.min_offset, result.max_offset, result.next_offset
        stop = stable.stable(high)
        if offset >= stop:
            return ReadResult(ReadStatus.OFFSET_OVERFLOW_ONE, offset, low, offset), []
        aborted = [] if stable.is_trivial else stable.rolled_back(offset, next_offset)
        chosen: list[memoryview] = []
        for view in result.messages:
            base, sys_flag = _PLACE.unpack_from(view)
            if base >= stop:
                break
            if not kafka_entries.is_kafka(sys_flag) or not _is_hidden_entry(
                view, base, sys_flag, aborted
            ):
                chosen.append(view)
        next_offset = min(next_offset, stop)
        sizes = [len(view) for view in chosen]
        if not chosen:
            return ReadResult(ReadStatus.NO_MATCHED_MESSAGE, next_offset, low, high), []
        if len(chosen) == result.count:
            return result, sizes  # in as few slices as they lie
        return _found(result, chosen, sum(sizes), next_offset), sizes

    def _shown(
        self, result: ReadResult, aborted: list[Aborted], stop: int
    ) -> Iterator[tuple[list[_Shown], int]]:
        """The messages of each entry that was read, and the offset behind it."""
        for view in result.messages:
            entry = records.decode(view)
            base = entry.queue_offset
            if base >= stop:
                return
            if not kafka_entries.is_kafka(entry.sys_flag):
                count = records.offset_count(entry.sys_flag, entry.properties)
                yield [_Shown(base, view)], base + count
                continue
            head = _head(entry)
            hidden = _is_hidden(base, head, aborted)
            yield [] if hidden else self._unfolded(entry), base + head.last_delta + 1

    def topic_id(self, stored: str) -> str:
        """What the ids of messages begin with that show records of a topic."""
        topics = self._core.kafka_topics
        name = topics.kafka_name(stored)
        topic = None if name is None else topics.find(name)
        return "" if topic is None else topic.id.hex.upper()

    def _unfolded(self, entry: records.Entry) -> list[_Shown]:
        kept = self._kept.get(entry.position)
        if kept is not None:
            self._kept.move_to_end(entry.position)
            return kept
        topic_id = self.topic_id(entry.topic)
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


def _head(entry: records.Entry) -> BatchHead:
    head = kafka_batches.read_head(entry.body)
    if head is None:
        at = entry.queue_offset
        raise RecordDamaged(entry.topic, at, "no batch is where one must be", at + 1)
    return head


def _is_hidden_entry(view: memoryview, base: int, sys_flag: int, aborted: list[Aborted]) -> bool:
    """The same of an entry that is a batch, at whose head it looks only where it has to."""
    at = records.origin_place(sys_flag) + 12 + _ATTRIBUTES_AT
    attributes = int.from_bytes(view[at : at + 2], "big")
    if attributes & kafka_batches.CONTROL:
        return True
    if not aborted or not attributes & kafka_batches.TRANSACTIONAL:
        return False
    return _is_hidden(base, _head(records.decode(view)), aborted)


def _is_hidden(base: int, head: BatchHead, aborted: list[Aborted]) -> bool:
    """Whether a batch is the mark of a transaction, or part of one that was rolled back."""
    if head.is_control:
        return True
    return head.is_transactional and any(
        each.producer_id == head.producer_id and each.first <= base <= each.last for each in aborted
    )


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


def _is_whole(entry: memoryview | bytes) -> bool:
    """Whether an entry is a batch of RocketMQ's producers, which its reader takes apart: who goes
    on in its middle gets it whole, as the rest of it is nowhere else.
    """
    return bool(_PLACE.unpack_from(entry)[1] & records.SYS_INNER_BATCH)


def _accepts(accept: Accept | None, entry: memoryview | bytes) -> bool:
    """Whether a consumer wants a message: its tag or its properties say so."""
    if accept is None:
        return True
    decoded = records.decode(entry)
    if isinstance(accept, PropertyFilter):
        return accept.matches(decoded.properties)
    code = records.tags_code(decoded.topic.encode(), decoded.properties, decoded.store_ms, ())
    return accept(code)
