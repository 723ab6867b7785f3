"""This module writes any mix of batches and messages to one queue and reads it through both doors:
the same sequence comes out of each, with the same offsets, from any offset, in any portions.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from sluice.broker.core import BrokerCore
from sluice.broker.kafka_reading import read_batches
from sluice.model import Message
from sluice.protocol import kafka_batches, kafka_views, records
from sluice.protocol.kafka_batches import Record
from sluice.storage.background import Inline
from sluice.storage.memory_files import MemoryFiles
from sluice.storage.opening import open_store
from sluice.storage.store import ReadStatus
from tests.unit.broker.broker_kit import broker_config

NOW_MS = 1_800_000_000_000
HOST = bytes([127, 0, 0, 1, 0, 0, 0x2A, 0x9F])
MANY = 1 << 40

texts = st.binary(max_size=12)
shapes = st.builds(
    Record,
    st.just(0),
    st.integers(0, 50),
    st.none() | texts,
    st.none() | texts,
    st.lists(
        st.tuples(st.sampled_from(["a", "b", "rmq.tags", "KEYS"]), st.none() | texts), max_size=2
    ).map(tuple),
)


@dataclass(frozen=True)
class Sent:
    """A batch of Kafka's, or one message of RocketMQ's."""

    found: list[Record]
    is_message: bool


writes = st.lists(
    st.builds(Sent, st.lists(shapes, min_size=1, max_size=4), st.booleans()), min_size=1, max_size=8
)


class TwoDoors:
    """The services of a broker on a simulated disk, and one topic."""

    def __init__(self) -> None:
        config = broker_config()
        config = replace(config, store=replace(config.store, flush="async"))
        self._soon: deque[Callable[[], object]] = deque()
        store = open_store(config.store, MemoryFiles(), Inline(), lambda: NOW_MS, HOST)
        self.core = BrokerCore(config, store, lambda: NOW_MS, self._soon.append)
        self.core.start()
        self.topic = self.core.kafka_topics.create("t", 1, {})
        self.settle()

    def settle(self) -> None:
        while self._soon:
            self._soon.popleft()()

    def write(self, sent: Sent) -> int:
        """Returns how many records it was."""
        if sent.is_message:
            record = sent.found[0]
            body, properties = kafka_views.content_of(record)
            message = Message("t", 0, body, properties, born_ms=NOW_MS + record.time_delta)
            self.core.append(message)
            self.settle()
            return 1
        found = [each._replace(offset_delta=at) for at, each in enumerate(sent.found)]
        highest = max(NOW_MS + each.time_delta for each in found)
        data = kafka_batches.build(0, NOW_MS, highest, found)
        head = kafka_batches.read_sent(data)
        self.core.producers.append("t", 0, head, data, HOST, lambda error: None)
        self.core.ask_turn()
        self.settle()
        return len(found)

    def by_kafka(self, offset: int, bytes_max: int) -> list[tuple[Any, ...]]:
        """What a Kafka consumer gets from an offset to the end."""
        result: list[tuple[Any, ...]] = []
        while True:
            read = read_batches(self.core, self.topic, 0, offset, MANY, bytes_max)
            if not read.slices:
                return result
            for data in read.slices:
                head = kafka_batches.read_head(data)
                assert head is not None
                kafka_batches.check_sent(head._replace(base_offset=0), data)
                for record in kafka_batches.read_records(head, data, 1 << 20):
                    at = head.base_offset + record.offset_delta
                    if at >= offset:
                        when = head.base_ms + record.time_delta
                        result.append((at, when, record.key, record.value, record.headers))
            offset = read.next_offset

    def by_rocketmq(self, offset: int, count_max: int) -> list[tuple[Any, ...]]:
        """What a RocketMQ consumer gets, as the records that its messages are."""
        result: list[tuple[Any, ...]] = []
        while True:
            read = self.core.unfolding.read("t", 0, offset, count_max=count_max)
            if read.status is not ReadStatus.FOUND:
                return result
            for entry in map(records.decode, read.messages):
                properties = records.parse_properties(records.without_checksum(entry.properties))
                # A message that shows a record of a batch has an id that the record has not.
                shown = kafka_views.record_of(0, 0, bytes(entry.body), properties)
                place = (entry.queue_offset, entry.born_ms)
                result.append((*place, shown.key, shown.value, shown.headers))
            offset = read.next_offset


@given(writes, st.integers(0, 40), st.integers(1, 3000), st.integers(1, 7))
@settings(max_examples=40, deadline=None)
def test_both_doors_show_the_same_sequence(
    sent: list[Sent], start: int, bytes_max: int, count_max: int
) -> None:
    doors = TwoDoors()
    count = sum(doors.write(each) for each in sent)
    expected = [
        (NOW_MS + record.time_delta, record.key, record.value, record.headers)
        for each in sent
        for record in (each.found[:1] if each.is_message else each.found)
    ]
    offset = start % count
    by_kafka = doors.by_kafka(offset, bytes_max)
    assert [place for place, *_ in by_kafka] == list(range(offset, count))
    assert [tuple(rest) for _, *rest in by_kafka] == expected[offset:]
    assert doors.by_rocketmq(offset, count_max) == by_kafka
