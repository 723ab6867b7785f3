"""This module runs the services of a broker on a simulated disk and asks them in Kafka's protocol,
without a socket, with a clock that a test turns.
"""

from __future__ import annotations

import dataclasses
import io
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass, replace
from datetime import timedelta
from functools import partial
from types import NoneType
from typing import Any, Literal, NamedTuple, TypeVar, get_args, get_origin

from kio.index import load_request_schema, load_response_schema
from kio.serial import entity_reader, entity_writer

from sluice.broker.core import BrokerCore
from sluice.broker.kafka_api import Again, AnswerPlace, KafkaApi, Node
from sluice.broker.kafka_group_api import install
from sluice.broker.kafka_partitions import KafkaTopic
from sluice.errors import SluiceError
from sluice.protocol import kafka, kafka_batches, records
from sluice.storage.background import Inline
from sluice.storage.memory_files import KeepAll, KeepPolicy, MemoryFiles
from sluice.storage.opening import open_store
from sluice.storage.store import ColdRead, ReadResult
from tests.unit.broker.broker_kit import broker_config

BEGIN_MS = 1_800_000_000_000
HOST = bytes([127, 0, 0, 1, 0, 0, 0x2A, 0x9F])
TICK_MS = 50
TOPIC = "orders.new"
T = TypeVar("T")


class Peer:
    """A connection."""

    name = "127.0.0.1:5555"
    node = Node(0, "127.0.0.1", 9092)
    born_host = HOST
    unsent_bytes = 0

    def __init__(self) -> None:
        self.again: Again | None = None

    def drop(self, reason: str) -> None:
        raise AssertionError(reason)

    def place(self, key: int, version: int, correlation_id: int) -> AnswerPlace:
        raise AssertionError("only a door has places for answers")


class Produced(NamedTuple):
    """What became of a batch."""

    code: int
    offset: int


class Asked:
    """A request; `body` is there when it is answered."""

    def __init__(self) -> None:
        self.body: Any = None


class KafkaBroker:
    """The services of one broker; `settle` does what an event loop would do next."""

    def __init__(
        self,
        files: MemoryFiles | None = None,
        now_ms: int = BEGIN_MS,
        *,
        flush: Literal["sync", "async"] = "async",
        **changes: Any,
    ) -> None:
        self.files = files if files is not None else MemoryFiles()
        self.now_ms = now_ms
        config = broker_config(**{"kafka_initial_rebalance_delay_ms": 0, **changes})
        self.config = replace(config, store=replace(config.store, flush=flush))
        self._soon: deque[Callable[[], object]] = deque()
        self.core: BrokerCore
        self.api: KafkaApi
        self.open()

    def open(self) -> None:
        self._soon.clear()
        store = open_store(self.config.store, self.files, Inline(), lambda: self.now_ms, HOST)
        self.core = BrokerCore(self.config, store, lambda: self.now_ms, self._soon.append)
        self.core.start()
        self.api = KafkaApi()
        install(self.api, self.core, self.core.kafka_topics)
        self.settle()

    def settle(self) -> None:
        while self._soon:
            self._soon.popleft()()

    def tick(self, ms: int = TICK_MS) -> None:
        end_ms = self.now_ms + ms
        while self.now_ms < end_ms:
            self.now_ms = min(end_ms, self.now_ms + TICK_MS)
            self.core.tick()
            self.settle()

    def pass_ms(self, ms: int) -> None:
        """Much time passes at once, then there is a tick."""
        self.now_ms += ms
        self.core.tick()
        self.settle()

    def crash(self, keep: KeepPolicy | None = None) -> None:
        """What the disk holds after a crash is what the next start finds."""
        self.core.store.release()
        self.files = self.files.crash(keep if keep is not None else KeepAll())
        self.open()

    def topic(self, name: str = TOPIC, partitions: int = 2) -> KafkaTopic:
        found = self.core.kafka_topics.find(name)
        if found is None:
            found = self.core.kafka_topics.create(name, partitions, {})
            self.settle()
        return found

    # ------------------------------------------------------------------------------------- requests

    def begin(self, key: int, version: int, /, **values: Any) -> Asked:
        """Ask something; the answer may come later."""
        _, request = self.api.read(Peer(), request_bytes(key, version, values))
        assert request is not None
        asked = Asked()

        def answer(values: Any) -> None:
            assert asked.body is None, "answered twice"
            data = kafka.encode(key, version, values)
            body, size = entity_reader(load_response_schema(key, version))(data, 0)
            assert size == len(data)
            asked.body = body

        self.api.serve(request, answer)
        self.settle()
        return asked

    def ask(self, key: int, version: int, /, **values: Any) -> Any:
        """Ask something that is answered at once."""
        asked = self.begin(key, version, **values)
        assert asked.body is not None, "no answer"
        return asked.body

    # ------------------------------------------------------------------------------------ producing

    def produce(
        self,
        producer_id: int,
        epoch: int,
        sequence: int,
        *values: bytes,
        transactional_id: str | None = None,
        partition: int = 0,
        implicit: bool = False,
        topic: str = TOPIC,
    ) -> Produced:
        """Append a batch as a producer's request does; 0 records are one of an empty value."""
        stored = self.topic(topic).stored
        sent = [
            kafka_batches.Record(at, 0, None, value) for at, value in enumerate(values or (b"",))
        ]
        attributes = kafka_batches.TRANSACTIONAL if transactional_id is not None else 0
        data = kafka_batches.build(
            0,
            self.now_ms,
            self.now_ms,
            sent,
            attributes=attributes,
            producer=(producer_id, epoch, sequence),
        )
        head = kafka_batches.read_sent(data)
        producers = self.core.producers
        verdict = producers.check(producers.partition(stored, partition), head)
        if verdict.code or verdict.offset >= 0:
            return Produced(verdict.code, verdict.offset)
        if transactional_id is not None:
            code = self.core.kafka_transactions.check_append(
                transactional_id, producer_id, epoch, stored, partition, implicit=implicit
            )
            if code:
                return Produced(code, -1)
        outcome: list[SluiceError | None] = []
        placed = producers.append(stored, partition, head, data, HOST, outcome.append)
        self.core.ask_turn()
        self.settle()
        assert outcome == [None], outcome
        return Produced(0, placed.queue_offset)

    def batches(self, partition: int = 0, topic: str = TOPIC) -> list[tuple[Any, bytes]]:
        """Heads and bytes of all batches of a partition, with their true base offsets."""
        stored = self.topic(topic).stored
        store = self.core.store
        found = []
        offset = store.min_offset(stored, partition)
        while offset < _warm(lambda: store.max_offset(stored, partition)):
            data = _body(_warm(partial(store.read, stored, partition, offset, count_max=1)))
            head = kafka_batches.read_head(data)
            assert head is not None
            found.append((head, data))
            offset = head.base_offset + head.record_count
        return found

    def committed(self, partition: int = 0, topic: str = TOPIC) -> list[bytes]:
        """The values that a reader with read_committed sees."""
        stored = self.topic(topic).stored
        stable = self.core.producers.stable_offsets(stored, partition)
        high = _warm(lambda: self.core.store.max_offset(stored, partition))
        last = stable.stable(high)
        aborted = sorted(stable.aborted(0, last), key=lambda pair: pair[1])
        dropping: set[int] = set()
        seen: list[bytes] = []
        for head, data in self.batches(partition, topic):
            if head.base_offset >= last:
                break
            while aborted and aborted[0][1] <= head.base_offset:
                dropping.add(aborted.pop(0)[0])
            if head.is_control:
                dropping.discard(head.producer_id)
            elif not (head.is_transactional and head.producer_id in dropping):
                found = kafka_batches.read_records(head, data, 1 << 20)
                seen += [record.value or b"" for record in found]
        return seen


def request_bytes(key: int, version: int, values: Mapping[str, Any]) -> bytes:
    """A request as it goes over the wire, without its length."""
    shape = load_request_schema(key, version)
    out = io.BytesIO()
    head = b"".join(
        (
            key.to_bytes(2, "big"),
            version.to_bytes(2, "big"),
            (7).to_bytes(4, "big"),
            (6).to_bytes(2, "big"),
            b"client",
            b"\0" if shape.__flexible__ else b"",
        )
    )
    entity_writer(shape)(out, _entity(shape, values))
    return head + out.getvalue()


def _warm(ask: Callable[[], T]) -> T:
    """Ask something that may have to come from the disk."""
    while True:
        try:
            return ask()
        except ColdRead as cold:
            cold.work()


def _body(result: ReadResult) -> bytes:
    (view,) = result.messages
    return bytes(records.decode(view).body)


def _entity(shape: Any, values: Mapping[str, Any]) -> Any:
    """One of kio's classes from plain values; what is not given has its default."""
    given = {}
    for field in fields(shape):
        if field.name in values:
            given[field.name] = _value(field.type, values[field.name])
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            given[field.name] = _default(field.type)
    unknown = values.keys() - {field.name for field in fields(shape)}
    assert not unknown, f"{shape.__name__} has no {unknown}"
    return shape(**given)


def _plain(kind: Any) -> tuple[Any, bool]:
    args = get_args(kind)
    if NoneType in args:
        return next(each for each in args if each is not NoneType), True
    return kind, False


def _value(kind: Any, value: Any) -> Any:
    kind, _ = _plain(kind)
    if value is None:
        return None
    if get_origin(kind) is tuple:
        return tuple(_value(get_args(kind)[0], each) for each in value)
    if is_dataclass(kind):
        return _entity(kind, value)
    if "Timedelta" in getattr(kind, "__name__", ""):
        return timedelta(milliseconds=value)
    return value


def _default(kind: Any) -> Any:
    kind, nullable = _plain(kind)
    if nullable:
        return None
    if get_origin(kind) is tuple:
        return ()
    for base, default in ((str, ""), (bytes, b""), (bool, False), (int, 0)):
        if isinstance(kind, type) and issubclass(kind, base):
            return default
    if "Timedelta" in getattr(kind, "__name__", ""):
        return timedelta(0)
    return ""
