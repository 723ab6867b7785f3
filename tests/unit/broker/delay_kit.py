"""This module runs the services of a broker on a simulated disk, without sockets, with a clock
that a test turns.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from sluice.broker.core import BrokerCore
from sluice.broker.sending import Sending
from sluice.broker.topics import SCHEDULE_TOPIC, TIMER_TOPIC, TopicSettings
from sluice.config import BrokerConfig
from sluice.errors import SluiceError
from sluice.model import Message, Placed
from sluice.protocol import records
from sluice.storage.background import Background
from sluice.storage.memory_files import KeepPolicy
from sluice.storage.store import ColdRead
from tests.unit.storage.store_kit import BEGIN_MS, Disk

TOPIC = "orders"


class Box:
    """A broker's services that can be stopped and killed at any point."""

    def __init__(
        self,
        background: Background | None = None,
        settings: dict[str, Any] | None = None,
        **changes: Any,
    ) -> None:
        changes = {"segment_bytes": 1 << 20, "queue_file_units": 1000, "flush": "async", **changes}
        self.disk = Disk(background, **changes)
        self.settings = settings or {}
        self.soon: deque[Callable[[], None]] = deque()
        self.core: BrokerCore
        self.open()

    def open(self) -> None:
        self.soon.clear()
        config = BrokerConfig(store=self.disk.config, listen_port=0, **self.settings)
        store = self.disk.open()
        self.core = BrokerCore(config, store, lambda: self.disk.now_ms, self.soon.append)
        self.sending = Sending(self.core)
        self.core.start()
        self.settle()

    def settle(self) -> None:
        """Do everything that does not wait for time."""
        while self.soon:
            self.soon.popleft()()

    def pass_ms(self, elapsed_ms: int, *, steps: int = 1) -> None:
        """Time goes by, with a tick after each step."""
        for _ in range(steps):
            self.disk.now_ms += elapsed_ms
            self.tick()

    def tick(self) -> None:
        self.core.tick()
        self.settle()

    def make_topic(self, name: str = TOPIC, queues: int = 2) -> None:
        self.core.topics.put([TopicSettings(name, queues, queues)])
        self.core.end_turn()

    def stage(
        self, body: bytes, topic: str = TOPIC, queue_id: int = 0, **properties: str
    ) -> Placed:
        """A send that is not written yet."""
        text = "".join(f"{name}\x01{value}\x02" for name, value in properties.items())
        message = Message(topic, queue_id, body, text.encode(), born_ms=self.disk.now_ms)
        settings = self.core.topics.get(topic)
        assert settings is not None
        stored = self.sending.stored_form(message, settings)
        return self.core.append(stored, self._confirmed)

    def send(self, body: bytes, topic: str = TOPIC, queue_id: int = 0, **properties: str) -> Placed:
        placed = self.stage(body, topic, queue_id, **properties)
        self.settle()
        return placed

    @staticmethod
    def _confirmed(error: SluiceError | None) -> None:
        assert error is None, error

    def entries(self, topic: str = TOPIC, queue_id: int = 0) -> list[records.Entry]:
        """Everything that can be read of a queue."""
        found: list[records.Entry] = []
        offset = self.core.store.min_offset(topic, queue_id)
        while offset < self.core.store.max_offset(topic, queue_id):
            try:
                result = self.core.store.read(topic, queue_id, offset, count_max=100)
            except ColdRead as cold:
                cold.work()
                continue
            found += map(records.decode, result.messages)
            offset = result.next_offset
        return found

    def bodies(self, topic: str = TOPIC, queue_id: int = 0) -> list[bytes]:
        return [bytes(entry.body) for entry in self.entries(topic, queue_id)]

    def waiting_bodies(self) -> list[bytes]:
        """The bodies of all that waits or waited."""
        queues = [(TIMER_TOPIC, 0), *((SCHEDULE_TOPIC, level) for level in range(18))]
        return [body for queue in queues for body in self.bodies(*queue)]

    def due_of(self, entry: records.Entry) -> int:
        """When an entry that was delivered was due; 0 where it did not wait."""
        texts = records.parse_properties(entry.properties)
        if "TIMER_OUT_MS" in texts:
            return int(texts["TIMER_OUT_MS"])
        if "DELAY" not in texts:
            return 0
        delays_ms = self.disk.config.delay_levels_ms
        origin = self.core.store.entry_at(entry.prepared_offset)
        if origin is None:
            return 0  # retention took it
        return records.store_time_ms(origin, 0) + delays_ms[int(texts["DELAY"]) - 1]

    def crash(self, keep: KeepPolicy | None = None) -> None:
        """The process is killed; the next one finds what the disk kept."""
        self.disk.crash(keep)
        self.open()

    def stop_and_start(self) -> None:
        self.core.end_turn()
        self.disk.close()
        self.open()

    @property
    def now_ms(self) -> int:
        return self.disk.now_ms

    def at(self, elapsed_ms: int) -> str:
        """A time so long after the beginning, as a property has it."""
        return str(BEGIN_MS + elapsed_ms)
