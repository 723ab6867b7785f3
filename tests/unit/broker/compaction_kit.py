"""This module has a broker with a compacted topic, and reads it as clients of both kinds do."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

from sluice.broker.kafka_configs import KafkaConfigs
from sluice.broker.kafka_list_offsets import KafkaListOffsets
from sluice.broker.kafka_log_api import KafkaLogs
from sluice.broker.kafka_reading import read_batches
from sluice.errors import SluiceError
from sluice.model import Message
from sluice.protocol import kafka_batches, records
from sluice.protocol.kafka_batches import Record
from sluice.storage.memory_files import MemoryFiles
from sluice.storage.store import ReadStatus
from tests.unit.broker.kafka_kit import HOST, TOPIC, KafkaBroker, _warm

STORED = "orders%2Enew"
MINUTE_MS = 60_000
HOUR_MS = 3_600_000


class Seen(NamedTuple):
    """A record as a reader gets it."""

    offset: int
    key: bytes | None
    value: bytes | None
    ms: int


class CompactingBroker(KafkaBroker):
    """A broker that looks for work once a second."""

    def __init__(self, files: MemoryFiles | None = None, **changes: Any) -> None:
        limits = {"compaction_interval_ms": 1000, "topic_retention_interval_ms": 1000}
        super().__init__(files, **{**limits, **changes})

    def open(self) -> None:
        super().open()
        KafkaConfigs(self.core).register(self.api)
        KafkaLogs(self.core).register(self.api)
        KafkaListOffsets(self.core).register(self.api)

    def make(self, **configs: str) -> None:
        named = {"cleanup.policy": "compact", "min.cleanable.dirty.ratio": "0.01"}
        named |= {name.replace("_", "."): value for name, value in configs.items()}
        self.core.kafka_topics.create(TOPIC, 2, named)
        self.settle()

    def put(
        self,
        *pairs: tuple[bytes | None, bytes | None],
        attributes: int = 0,
        producer: tuple[int, int, int] = (-1, -1, -1),
    ) -> int:
        """Append a batch; its offset."""
        found = [Record(at, at, key, value) for at, (key, value) in enumerate(pairs)]
        inside = bytearray()
        for record in found:
            kafka_batches.put_record(inside, record)
        codec, packed = kafka_batches.pack(attributes & kafka_batches.CODEC_MASK, inside)
        data = kafka_batches.wrap(
            0,
            self.now_ms,
            self.now_ms + len(pairs) - 1,
            packed,
            last_delta=len(pairs) - 1,
            count=len(pairs),
            attributes=attributes & ~kafka_batches.CODEC_MASK | codec,
            producer=producer,
        )
        return self.append(data)

    def append(self, data: bytes) -> int:
        head = kafka_batches.read_sent(data)
        outcome: list[SluiceError | None] = []
        placed = self.core.producers.append(STORED, 0, head, data, HOST, outcome.append)
        self.core.ask_turn()
        self.settle()
        assert outcome == [None]
        return placed.queue_offset

    def send(self, body: bytes, **properties: str) -> int:
        """Append a message of a RocketMQ producer; its offset."""
        packed = records.format_properties(properties)
        placed = self.core.append(Message(STORED, 0, body, packed, born_ms=self.now_ms))
        self.settle()
        return placed.queue_offset

    def compact(self, seconds: int = 3) -> None:
        """Time passes, in which what is due is compacted."""
        for _ in range(seconds):
            self.now_ms += 1000
            self.core.tick()
            self.settle()
            while self.core.compaction._job is not None:
                self.core.tick()
                self.settle()

    # -------------------------------------------------------------------------------------- reading

    def fetch(self, offset: int = 0) -> list[Seen]:
        """All records from an offset on, as a Kafka consumer fetches them, one batch at a time."""
        store, topic = self.core.store, self.topic()
        high = _warm(partial(store.max_offset, STORED, 0))
        seen: list[Seen] = []
        at = max(offset, store.min_offset(STORED, 0))
        while at < high:
            read = _warm(partial(read_batches, self.core, topic, 0, at, high, 1))
            assert not read.is_outside
            assert read.slices, f"a reader hangs at {at} of {high}"
            for piece in read.slices:
                head = kafka_batches.read_head(piece)
                assert head is not None
                kafka_batches.check_sent(
                    head._replace(
                        base_offset=0,
                        record_count=head.last_delta + 1,
                        producer_id=-1,
                        attributes=head.attributes & ~kafka_batches.CONTROL,
                    ),
                    piece,
                )
                at = head.base_offset + head.last_delta + 1
                if not head.is_control:
                    seen += _records(head, piece)
        start = max(offset, store.min_offset(STORED, 0))
        return [each for each in seen if each.offset >= start]

    def newest(self, offset: int = 0) -> list[tuple[int, bytes | None, bytes | None]]:
        return [each[:3] for each in self.fetch(offset)]

    def pull(self, offset: int = 0) -> list[tuple[int, bytes]]:
        """All messages from an offset on, as a RocketMQ consumer pulls them."""
        seen: list[tuple[int, bytes]] = []
        read = self.core.unfolding.reader(STORED, 0)
        at = max(offset, self.core.store.min_offset(STORED, 0))
        while at < _warm(partial(self.core.store.max_offset, STORED, 0)):
            result = _warm(partial(read, STORED, 0, at, count_max=3))
            for view in result.messages:
                entry = records.decode(view)
                assert (entry.topic, entry.queue_id) == (STORED, 0)
                seen.append((entry.queue_offset, bytes(entry.body)))
            if result.status is ReadStatus.OFFSET_OVERFLOW_ONE:
                break  # the rest is not decided
            assert result.next_offset > at, f"a reader hangs at {at}"
            at = result.next_offset
        return seen

    def hidden(self) -> Sequence[str]:
        """The topics that hold what compaction has kept."""
        return sorted({topic for topic, _ in self.core.store.queues if "_compacted_" in topic})


def _records(head: Any, piece: Any) -> list[Seen]:
    is_append_time = head.attributes & kafka_batches.APPEND_TIME
    return [
        Seen(
            head.base_offset + record.offset_delta,
            record.key,
            record.value,
            head.max_ms if is_append_time else head.base_ms + record.time_delta,
        )
        for record in kafka_batches.read_records(head, piece, 1 << 20)
    ]
