"""This module asks two brokers the same: one serves requests that say what the one before said the
short way, the other serves all of them the long way. Their answers and logs must be the same.
"""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, cast
from unittest import mock
from uuid import UUID

from kio.index import load_request_schema, load_response_schema
from kio.serial import entity_reader

from sluice.broker.kafka_again import ProduceAgain
from sluice.broker.kafka_api import Node, Peer
from sluice.broker.kafka_door import Session, build
from sluice.broker.kafka_fetch_again import FetchAgain
from sluice.net import Connection
from sluice.protocol import kafka, kafka_batches
from sluice.protocol.kafka_batches import Record
from tests.unit.broker.broker_kit import broker_config
from tests.unit.broker.kafka_kit import HOST, TOPIC, KafkaBroker

PRODUCE, FETCH = 0, 1
STORED = TOPIC.replace(".", "%2E")
TOPIC_ID = UUID(int=5)
ID, EPOCH = 7, 3


class Wire:
    """A connection that keeps what is sent."""

    unsent_bytes = 0

    def __init__(self) -> None:
        self.sent: list[bytes] = []
        self.closed = ""

    def send(self, *parts: bytes | memoryview) -> None:
        self.sent.append(b"".join(parts))

    def packed_peer(self) -> bytes:
        return HOST

    def close(self, reason: str) -> None:
        self.closed = reason


class Side:
    """A broker and one connection to it, with or without the short way."""

    def __init__(self, *, is_short: bool, **changes: Any) -> None:
        changed = {**changes, "store": replace(broker_config().store, **changes.pop("store", {}))}
        self.broker = KafkaBroker(**{**changed, **changes})
        self.is_short = is_short
        self.short_count = 0
        self._numbers = iter(range(70, 10**6))
        with mock.patch("uuid.uuid4", return_value=TOPIC_ID):
            self.broker.topic(TOPIC, 3)
        self.api = build(self.broker.core)
        self.wire = Wire()
        self.session, self.other = self._connect(), self._connect()

    def _connect(self) -> Session:
        return Session(self.api, cast(Connection, self.wire), Node(0, "127.0.0.1", 9092))

    def send(self, *frames: bytes) -> list[bytes]:
        """The answers that requests have at once."""
        self.wire.sent = []
        core = self.broker.core

        def number(low: int, high: int) -> int:
            return next(self._numbers)

        def counted(served: Callable[[Any, bytes, Peer], bool]) -> Callable[..., bool]:
            def serve(again: Any, frame: bytes, peer: Peer) -> bool:
                found = self.is_short and served(again, frame, peer)
                self.short_count += found
                return found

            return serve

        with (
            mock.patch("random.randint", number),
            mock.patch.object(ProduceAgain, "serve", counted(ProduceAgain.serve)),
            mock.patch.object(FetchAgain, "serve", counted(FetchAgain.serve)),
        ):
            core.serve(self.wire)
            self.session.received(list(frames), 1 << 20)
            core.served()
            self.broker.settle()
        return self.wire.sent

    def later(self, ms: int) -> list[bytes]:
        """The answers that come with time."""
        self.wire.sent = []
        self.broker.tick(ms)
        return self.wire.sent

    def state(self) -> Any:
        """The log, and what is known of producers."""
        core = self.broker.core
        states = [core.producers.partition(STORED, each) for each in range(3)]
        log = core.store.log
        return (
            bytes(log.view(log.start, log.written - log.start)),
            [(each.producers, each.stable.row(), each.end, each.is_changed) for each in states],
            (core.stats.put, core.stats.put_bytes),
        )


class Both:
    """Both sides, which are asked the same."""

    def __init__(self, **changes: Any) -> None:
        self.short = Side(is_short=True, **changes)
        self.long = Side(is_short=False, **changes)
        self._count = 0
        self.session = (0, 0)

    def send(self, *requests: tuple[int, int, Mapping[str, Any]]) -> list[Any]:
        """What is answered, the same by both."""
        frames = []
        for key, version, values in requests:
            self._count += 1
            frames.append(frame_of(key, version, self._count, values))
        answers = self.short.send(*frames)
        assert answers == self.long.send(*frames)
        assert self.short.state() == self.long.state()
        kinds = [request[:2] for request in requests]
        return [read_answer(*kind, answer) for kind, answer in zip(kinds, answers, strict=False)]

    def produce(
        self, data: bytes | None, partition: int = 0, version: int = 13, **changes: Any
    ) -> Any:
        (answer,) = self.send((PRODUCE, version, sent(data, partition, version, **changes)))
        return answer.responses[0].partition_responses[0]

    def fetch(self, offset: int | None = None, **changes: Any) -> Any:
        """Ask in the session: None says nothing of the partition."""
        answers = self.send((FETCH, 17, asked(self.session, offset, **changes)))
        if not answers:
            return None
        (answer,) = answers
        epoch = self.session[1]
        self.session = (answer.session_id, epoch + 1) if not answer.error_code else (0, 0)
        return answer.responses[0].partitions[0] if answer.responses else answer.error_code

    def each(self, change: Callable[[KafkaBroker], object]) -> None:
        for side in (self.short, self.long):
            change(side.broker)
            side.broker.settle()

    @contextlib.contextmanager
    def another(self) -> Iterator[None]:
        """Requests of a second connection, always the same."""
        sides = (self.short, self.long)
        for side in sides:
            side.session, side.other = side.other, side.session
        yield
        for side in sides:
            side.session, side.other = side.other, side.session

    @property
    def short_count(self) -> int:
        assert self.long.short_count == 0
        return self.short.short_count


def frame_of(key: int, version: int, number: int, values: Mapping[str, Any]) -> bytes:
    out: list[bytes] = []
    kafka._struct_writer(load_request_schema(key, version))(out, values)
    tags = b"\0" if kafka.is_flexible(key, version) else b""
    return struct.pack(">hhih", key, version, number, 4) + b"test" + tags + b"".join(out)


def read_answer(key: int, version: int, framed: bytes) -> Any:
    (size,) = struct.unpack_from(">i", framed)
    assert size == len(framed) - 4
    data = framed[9 if kafka.is_flexible(key, version) else 8 :]
    entity, read = entity_reader(load_response_schema(key, version))(data, 0)
    assert read == len(data)
    return entity


def sent(
    data: bytes | None, partition: int = 0, version: int = 13, **changes: Any
) -> dict[str, Any]:
    part = {"index": partition, "records": data}
    topic = {"topic_id": TOPIC_ID, "name": TOPIC, "partition_data": [part]}
    return {"acks": -1, "timeout": 1000, "topic_data": [topic], **changes}


def asked(session: tuple[int, int], offset: int | None, **changes: Any) -> dict[str, Any]:
    topics = []
    if offset is not None:
        part = {"partition": 0, "fetch_offset": offset, "partition_max_bytes": 1 << 20}
        part |= {"current_leader_epoch": changes.pop("leader_epoch", 0)}
        topics = [{"topic_id": TOPIC_ID, "partitions": [part]}]
    limits = {"max_wait": 0, "min_bytes": 1, "max_bytes": 1 << 20, "isolation_level": 0}
    number, epoch = session
    return {**limits, "session_id": number, "session_epoch": epoch, "topics": topics, **changes}


def batch(first: int, *values: bytes, producer: int = ID, **changes: Any) -> bytes:
    """A batch of an idempotent producer, the sequence number of its first record given."""
    records = [Record(at, 0, None, value) for at, value in enumerate(values)]
    return kafka_batches.build(0, 1000, 1005, records, producer=(producer, EPOCH, first), **changes)


def begun(**changes: Any) -> Both:
    """A topic with three batches, and a session that reads it from its beginning."""
    both = Both(**changes)
    with both.another():
        for number in range(3):
            both.produce(batch(number, b"v%d" % number))
    return both
