"""This module runs the services of a broker on a simulated disk with a clock that tests move."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from sluice.broker.core import BrokerCore
from sluice.broker.filters import parse_tags
from sluice.broker.groups import Client, GroupSettings
from sluice.broker.retries import SendBack
from sluice.broker.topics import TopicSettings
from sluice.errors import SluiceError
from sluice.model import Message, Placed
from sluice.protocol import records
from sluice.storage.background import Inline
from sluice.storage.memory_files import KeepAll, MemoryFiles
from sluice.storage.opening import open_store
from sluice.storage.store import ColdRead
from tests.unit.broker.broker_kit import broker_config

HOST = bytes([127, 0, 0, 1, 0, 0, 0, 1])
BEGIN_MS = 1_800_000_000_000
TICK_MS = 50


class Broker:
    """The services of one broker without doors, and its clock."""

    def __init__(self, files: MemoryFiles | None = None, now_ms: int = BEGIN_MS) -> None:
        self.files = files if files is not None else MemoryFiles()
        self.now_ms = now_ms
        self._soon: deque[Callable[[], object]] = deque()
        config = broker_config()
        store = open_store(config.store, self.files, Inline(), lambda: self.now_ms, HOST)
        self.core = BrokerCore(config, store, lambda: self.now_ms, self._soon.append)
        self.core.start()
        self.settle()

    def settle(self) -> None:
        """Everything that was asked for the end of the turn happens."""
        while self._soon:
            self._soon.popleft()()

    def run(self, span_ms: int, step_ms: int = 1_000) -> None:
        """Time goes on."""
        end_ms = self.now_ms + span_ms
        while self.now_ms < end_ms:
            self.now_ms = min(end_ms, self.now_ms + step_ms)
            self.tick()

    def tick(self) -> None:
        self.core.tick()
        self.settle()

    def restarted(self) -> Broker:
        """The broker after kill -9, on the same disk."""
        return Broker(self.files.crash(KeepAll()), self.now_ms)

    # ---------------------------------------------------------------------------------- short forms

    def make(self, group: str = "g", topic: str = "orders", **settings: object) -> None:
        self.core.topics.put([TopicSettings(topic, 2, 2)])
        self.core.groups.put([GroupSettings(group, **settings)])  # type: ignore[arg-type]
        self.core.topics.create_inner(f"%RETRY%{group}", 1)
        self.core.ask_turn()
        self.settle()

    def send(self, topic: str = "orders", key: str = "U1", **properties: str) -> Placed:
        text = records.format_properties({"UNIQ_KEY": key, **properties})
        placed = self.core.append(Message(topic, 0, b"body", text, born_ms=self.now_ms))
        self.settle()
        return placed

    def entries(self, topic: str, queue_id: int = 0) -> list[records.Entry]:
        """All entries of a queue."""
        found: list[records.Entry] = []
        store = self.core.store
        offset, end = store.min_offset(topic, queue_id), store.max_offset(topic, queue_id)
        while offset < end:
            try:
                result = store.read(topic, queue_id, offset)
            except ColdRead as cold:
                cold.work()
                continue
            found += [records.decode(view) for view in result.messages]
            offset = result.next_offset
        return found

    def copies(self, group: str = "g") -> list[records.Entry]:
        """What waits to be tried again or has come, one for each time that it was stored."""
        waiting = [entry for level in range(18) for entry in self.entries(LEVELS, level)]
        waiting += self.entries(TIMERS)
        real = f"%RETRY%{group}".encode()
        return [e for e in waiting if records.property_value(e.properties, b"REAL_TOPIC") == real]

    def dead(self, group: str = "g") -> list[records.Entry]:
        return self.entries(f"%DLQ%{group}")

    def send_back(
        self,
        position: int,
        delay_level: int = 0,
        *,
        group: str = "g",
        origin_topic: str | None = None,
        times_max: int | None = 16,
    ) -> Placed | None:
        """What the answer would be; raises the refusal."""
        told: list[tuple[Placed | None, SluiceError | None]] = []
        asked = SendBack(group, position, delay_level, origin_topic, times_max)
        self.core.retries.send_back(asked, lambda placed, error: told.append((placed, error)))
        self.settle()
        ((placed, error),) = told
        if error is not None:
            raise error
        return placed

    def send_to_retry(
        self, times: int, key: str = "U1", *, times_max: int | None = 16, **properties: str
    ) -> Placed | None:
        """As a client sends a message back itself."""
        level = {"DELAY": str(2 + times)} if times else {}
        text = records.format_properties({"UNIQ_KEY": key, **level, **properties})
        message = Message("%RETRY%g", 0, b"client's body", text, reconsume_times=times)
        told: list[tuple[Placed | None, SluiceError | None]] = []
        self.core.retries.send(
            message, times_max, lambda placed, error: told.append((placed, error))
        )
        self.settle()
        ((placed, error),) = told
        if error is not None:
            raise error
        return placed

    def commit(self, offset: int, topic: str = "orders", group: str = "g") -> None:
        """A consumer's offset, durable for long."""
        self.core.offsets.commit(group, topic, 0, offset)
        self.run(180_000, 10_000)

    def join(self, client_id: str, group: str = "g", *topics: str) -> None:
        """A consumer's heartbeat; its connection is what its name is."""
        client = Client(client_id, client_id, "JAVA", 513, self.now_ms)
        self.core.clients.consumer_said(
            group,
            client,
            consume_type="CONSUME_PASSIVELY",
            message_model="CLUSTERING",
            from_where="CONSUME_FROM_FIRST_OFFSET",
            subscriptions=[parse_tags(topic, "*", 1) for topic in topics],
        )


LEVELS = "SCHEDULE_TOPIC_XXXX"
TIMERS = "rmq_sys_wheel_timer"


def value(entry: records.Entry, name: str) -> str | None:
    """A property of an entry."""
    found = records.property_value(entry.properties, name.encode())
    return None if found is None else found.decode()
