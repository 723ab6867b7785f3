"""This module writes any mix of batches, messages and transactions to one queue and reads it
through both doors and as Spark's tasks do: the same sequence comes out of each, with the same
offsets, from any offset, in any portions.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import cramjam
import pyarrow as pa
from hypothesis import given, settings
from hypothesis import strategies as st

from sluice.broker.bulk import Bulk, BulkRead
from sluice.broker.kafka_reading import read_batches
from sluice.model import Message
from sluice.protocol import kafka_batches, kafka_views, records
from sluice.protocol.kafka_batches import Header, Record
from sluice.spark.decode import Decoder, Place
from sluice.storage.bulk_reads import Stretch
from sluice.storage.store import ReadStatus
from tests.unit.broker.kafka_kit import BEGIN_MS, HOST, KafkaBroker
from tests.unit.broker.test_kafka_transactions import Producer
from tests.unit.spark.test_decode import SCHEMA

TOPIC = "t"
IDS = ("till-1", "till-2")
PACKERS: dict[int, Callable[[bytes], bytes]] = {
    0: bytes,
    2: lambda data: bytes(cramjam.snappy.compress_raw(data)),
    3: lambda data: bytes(cramjam.lz4.compress(data)),
    4: lambda data: bytes(cramjam.zstd.compress(data)),
}


class Seen(NamedTuple):
    """What every reader has to see of one record or message."""

    offset: int
    key: bytes | None
    value: bytes | None
    headers: tuple[Header, ...]  # as Kafka's consumers see them
    time_ms: int


# ------------------------------------------------------------------------------------------- writes


@dataclass(frozen=True)
class Batch:
    """A batch of a Kafka producer: plain, idempotent (1), or of a transaction (2 and 3)."""

    found: list[Record]
    codec: int
    producer: int


@dataclass(frozen=True)
class Sent:
    """Messages of a RocketMQ producer, sent as one batch where they are several."""

    messages: list[tuple[bytes, dict[str, str]]]
    is_packed: bool


@dataclass(frozen=True)
class Exploded:
    """A record that is stored as a message by itself, as topics of RocketMQ's clients have it."""

    record: Record


@dataclass(frozen=True)
class End:
    """A transaction ends."""

    producer: int
    commit: bool


fields = st.none() | st.binary(max_size=12)
shapes = st.builds(
    Record,
    st.just(0),
    st.integers(0, 50),
    fields,
    fields,
    st.lists(
        st.tuples(st.sampled_from(["a", "b", "rmq.tags", "rmq.msgid", "KEYS"]), fields), max_size=2
    ).map(tuple),
)
texts = st.text(st.characters(codec="utf-8", exclude_characters="\0\1\2"), min_size=1, max_size=6)
words = st.dictionaries(
    st.sampled_from(["KEYS", "TAGS", "UNIQ_KEY", "a", "b", "TRACE_ON", "__SHARDINGKEY"]), texts
)
writes = st.lists(
    st.builds(
        Batch,
        st.lists(shapes, min_size=1, max_size=4),
        st.sampled_from(sorted(PACKERS)),
        st.integers(0, 3),
    )
    | st.builds(
        Sent,
        st.lists(st.tuples(st.binary(max_size=12), words), min_size=1, max_size=3),
        st.booleans(),
    )
    | st.builds(Exploded, shapes)
    | st.builds(End, st.integers(2, 3), st.booleans()),
    min_size=1,
    max_size=12,
)


class Doors:
    """One topic, and what its readers have to see of it."""

    def __init__(self) -> None:
        self.broker = KafkaBroker()
        self.core = self.broker.core
        self.topic = self.broker.topic(TOPIC, 1)
        self._sequence = 0
        self._producers = [Producer(self.broker, newer=True, name=name) for name in IDS]
        self._open: dict[int, list[int]] = {}  # offsets of open transactions
        self._hidden: set[int] = set()
        self._all: list[Seen] = []
        self._next = 0
        for producer in self._producers:
            assert producer.init() == 0

    @property
    def stable(self) -> int:
        """Up to where everything is decided."""
        return min((offsets[0] for offsets in self._open.values()), default=self._next)

    def expected(self, start: int) -> list[Seen]:
        return [
            seen
            for seen in self._all
            if start <= seen.offset < self.stable and seen.offset not in self._hidden
        ]

    # -------------------------------------------------------------------------------------- writing

    def write(self, what: Batch | Sent | Exploded | End) -> None:
        if isinstance(what, Batch):
            self._write_batch(what)
        elif isinstance(what, Sent):
            self._send(what)
        elif isinstance(what, Exploded):
            self._explode(what.record)
        else:
            self.end(what)

    def _see(self, record: Record, time_ms: int) -> None:
        self._all.append(Seen(self._next, record.key, record.value, record.headers, time_ms))
        self._next += 1

    def _write_batch(self, what: Batch) -> None:
        found = [each._replace(offset_delta=at) for at, each in enumerate(what.found)]
        inside = bytearray()
        for record in found:
            kafka_batches.put_record(inside, record)
        identity, attributes = (-1, -1, -1), what.codec
        if what.producer == 1:
            identity = (77, 0, self._sequence)
            self._sequence += len(found)
        elif what.producer >= 2:
            producer = self._producers[what.producer - 2]
            identity = (producer.id, producer.epoch, producer.sequences.get(0, 0))
            producer.sequences[0] = identity[2] + len(found)
            attributes |= kafka_batches.TRANSACTIONAL
            offsets = range(self._next, self._next + len(found))
            self._open.setdefault(what.producer, []).extend(offsets)
        data = kafka_batches.wrap(
            *(0, BEGIN_MS, max(BEGIN_MS + each.time_delta for each in found)),
            PACKERS[what.codec](bytes(inside)),
            last_delta=len(found) - 1,
            count=len(found),
            attributes=attributes,
            producer=identity,
        )
        head = kafka_batches.read_sent(data)
        kafka_batches.check_sent(head, data)
        producers = self.core.producers
        verdict = producers.check(producers.partition(TOPIC, 0), head)
        assert (verdict.code, verdict.offset) == (0, -1)
        if what.producer >= 2:
            name = IDS[what.producer - 2]
            code = self.core.kafka_transactions.check_append(
                name, identity[0], identity[1], TOPIC, 0, implicit=True
            )
            assert code == 0
        placed = self.core.producers.append(TOPIC, 0, head, data, HOST, lambda error: None)
        assert placed.queue_offset == self._next
        self.core.ask_turn()
        self.broker.settle()
        for record in found:
            self._see(record, BEGIN_MS + record.time_delta)

    def _send(self, what: Sent) -> None:
        messages = []
        for body, properties in what.messages:
            packed = "".join(f"{name}\x01{text}\x02" for name, text in properties.items())
            flag = records.SYS_COMPRESSED if what.is_packed else 0
            stored = zlib.compress(body) if what.is_packed else body
            born_ms = BEGIN_MS - len(self._all)
            messages.append(
                Message(TOPIC, 0, stored, packed.encode(), sys_flag=flag, born_ms=born_ms)
            )
            record = kafka_views.record_of(0, 0, body, properties)
            assert record.value == body
            self._see(record, born_ms)
        if len(messages) == 1:
            self.core.append(messages[0])
        else:
            self.core.store.stage_batch(messages)
            self.core.ask_turn()
        self.broker.settle()

    def _explode(self, record: Record) -> None:
        head = kafka_batches.BatchHead(0, 0, 0, 2, 0, 0, 0, BEGIN_MS, BEGIN_MS, -1, -1, -1, 1)
        self.core.append(kafka_views.message_of(TOPIC, 0, head, record, HOST))
        self.broker.settle()
        self._see(record, BEGIN_MS + record.time_delta)

    def end(self, what: End) -> None:
        offsets = self._open.pop(what.producer, None)
        if offsets is None:
            return
        assert self._producers[what.producer - 2].end(commit=what.commit) == 0
        if not what.commit:
            self._hidden.update(offsets)
        self._next += 1  # the marker

    # -------------------------------------------------------------------------------------- reading

    def by_kafka(self, offset: int, bytes_max: int) -> list[Seen]:
        """What a Kafka consumer with read_committed gets from an offset to the end."""
        stable = self.core.producers.stable_offsets(TOPIC, 0)
        stop = stable.stable(self.core.store.max_offset(TOPIC, 0))
        result: list[Seen] = []
        start = offset
        while True:
            read = read_batches(self.core, self.topic, 0, offset, stop, bytes_max)
            if not read.slices:
                return result
            # The fetch answer names what was rolled back; the consumer forgets it with its marker.
            aborted = sorted(stable.aborted(offset, read.next_offset), key=lambda pair: pair[1])
            dropping: set[int] = set()
            for data in read.slices:
                head = kafka_batches.read_head(data)
                assert head is not None
                if not head.is_control:
                    kafka_batches.check_sent(head._replace(base_offset=0), data)
                while aborted and aborted[0][1] <= head.base_offset + head.last_delta:
                    dropping.add(aborted.pop(0)[0])
                if head.is_control:
                    dropping.discard(head.producer_id)
                    continue
                if head.is_transactional and head.producer_id in dropping:
                    continue
                for record in kafka_batches.read_records(head, data, 1 << 20):
                    at = head.base_offset + record.offset_delta
                    if at >= start:
                        when = head.base_ms + record.time_delta
                        result.append(Seen(at, record.key, record.value, record.headers, when))
            offset = read.next_offset

    def by_rocketmq(self, offset: int, count_max: int) -> list[Seen]:
        """What a RocketMQ consumer gets, as the records that its messages are."""
        result: list[Seen] = []
        while True:
            read = self.core.unfolding.read(TOPIC, 0, offset, count_max=count_max)
            if read.status not in (ReadStatus.FOUND, ReadStatus.NO_MATCHED_MESSAGE):
                return result
            for entry in map(records.decode, read.messages):
                properties = records.parse_properties(records.without_checksum(entry.properties))
                # A message that shows a record of a batch has an id that the record has not.
                body = kafka_views.plain_body(entry, 1 << 20)
                shown = kafka_views.record_of(0, 0, body, properties)
                result.append(
                    Seen(entry.queue_offset, shown.key, shown.value, shown.headers, entry.born_ms)
                )
            assert read.next_offset > offset
            offset = read.next_offset

    def by_spark(self, offset: int, bytes_max: int, tags: str = "") -> list[dict[str, Any]]:
        """The rows that Spark's tasks make of bulk reads."""
        place = Place(TOPIC, "broker-a", 0, 0)
        decoder = Decoder(SCHEMA, place, tags, ())
        bulk = Bulk(self.core)
        stop, rows = self.stable, []
        while offset < stop:
            wanted = BulkRead(TOPIC, 0, offset, stop, bytes_max, tags=tags or None)
            found = self._bulk(bulk, wanted)
            data, sizes = b"".join(found.result.slices), found.sizes
            if len(sizes):
                topic_id = bulk.topic_id(TOPIC, 0)
                for batch in decoder.batches(data, sizes, offset, stop, topic_id):
                    assert isinstance(batch, pa.RecordBatch)
                    rows += batch.to_pylist()
            assert found.result.next_offset > offset
            offset = found.result.next_offset
        return rows

    def _bulk(self, bulk: Bulk, wanted: BulkRead) -> Stretch:
        found: list[Stretch] = []

        def done(stretch: Stretch | None, error: BaseException | None) -> None:
            assert stretch is not None, error
            found.append(stretch)

        bulk.read(wanted, done)
        self.broker.settle()
        return found[0]


def seen_by_spark(row: dict[str, Any]) -> Seen:
    """A row as Kafka's consumers see it: messages of RocketMQ's have tag and id as columns."""
    headers = tuple((each["key"], each["value"]) for each in row["headers"] or ())
    when = row["timestamp" if row["timestampType"] == 0 else "bornTimestamp"]
    if row["timestampType"] == 1:  # a RocketMQ producer's
        if row["tag"] is not None:
            headers += ((kafka_views.TAGS_HEADER, row["tag"].encode()),)
        if len(row["messageId"]) != 32:  # those that are made of the place are not the message's
            headers += ((kafka_views.ID_HEADER, row["messageId"].encode()),)
    return Seen(row["offset"], row["key"], row["value"], headers, round(when.timestamp() * 1000))


def check(doors: Doors, start: int, bytes_max: int, count_max: int) -> None:
    expected = doors.expected(start)
    assert doors.by_kafka(start, bytes_max) == expected
    assert doors.by_rocketmq(start, count_max) == expected
    rows = doors.by_spark(start, bytes_max)
    assert [seen_by_spark(row) for row in rows] == expected
    # A filter makes the broker give batches as single messages: the rows are the same.
    for tag in {row["tag"] for row in rows if row["tag"] and row["tag"].isalnum()}:
        wanted = [row for row in rows if row["tag"] == tag]
        assert doors.by_spark(start, bytes_max, tags=tag) == wanted


@given(writes, st.floats(0, 0.9), st.integers(1, 3000), st.integers(1, 7))
@settings(max_examples=60, deadline=None)
def test_all_readers_see_the_same_sequence(
    sent: list[Batch | Sent | Exploded | End], part: float, bytes_max: int, count_max: int
) -> None:
    doors = Doors()
    for each in sent:
        doors.write(each)
    start = int(part * doors.stable)
    check(doors, start, bytes_max, count_max)
    for number in (2, 3):
        doors.end(End(number, commit=number == 2))
    check(doors, start, bytes_max, count_max)


def test_a_producer_commits_after_it_has_rolled_back() -> None:
    """Both transactions come in one read: only the first is hidden."""
    doors = Doors()
    for value, commit in ((b"gone", False), (b"kept", True), (b"gone too", False)):
        doors.write(Batch([Record(0, 0, None, value)], 0, 2))
        doors.write(End(2, commit))
    doors.write(Batch([Record(0, 0, None, b"plain")], 0, 0))
    assert [seen.value for seen in doors.by_rocketmq(0, 32)] == [b"kept", b"plain"]
    check(doors, 0, 1 << 20, 32)
