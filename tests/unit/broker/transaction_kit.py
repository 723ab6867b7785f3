"""This module runs the services of a broker on a simulated disk, with a clock that a test turns."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from sluice.broker.core import BrokerCore
from sluice.broker.groups import Client
from sluice.broker.half_messages import COMMIT, ROLLBACK, Ending, Half
from sluice.broker.sending import Sending
from sluice.broker.topics import CHECK_MAX_TOPIC, HALF_TOPIC, OP_TOPIC, TopicSettings
from sluice.errors import SluiceError
from sluice.model import Message, Placed
from sluice.protocol import records
from sluice.storage.background import Background, Inline
from sluice.storage.files import Files
from sluice.storage.memory_files import KeepAll, KeepPolicy, MemoryFiles
from sluice.storage.opening import open_store
from sluice.storage.store import ColdRead, ReadResult
from tests.unit.broker.broker_kit import broker_config

BEGIN_MS = 1_794_772_393_000
HOST = bytes([127, 0, 0, 1, 0, 0, 0x2A, 0x9F])
TOPIC = "orders"
GROUP = "shop"
TICK_MS = 50


class Broker:
    """The services of one broker; `settle` does what an event loop would do next."""

    def __init__(
        self,
        background: Background | None = None,
        *,
        files: Files | None = None,
        now_ms: int = BEGIN_MS,
        **changes: Any,
    ) -> None:
        names = ("directory", "flush", "segment_bytes")
        store_changes = {name: changes.pop(name) for name in names if name in changes}
        self.config = broker_config(**changes)
        self.config = replace(self.config, store=replace(self.config.store, **store_changes))
        self.files: Files = files if files is not None else MemoryFiles()
        self.background: Background = background if background is not None else Inline()
        self.now_ms = now_ms
        self.asked: list[tuple[str, Half, int]] = []
        self.core: BrokerCore
        self._soon: deque[Callable[[], object]] = deque()
        self.open()

    def open(self) -> None:
        self._soon.clear()
        store = open_store(
            self.config.store, self.files, self.background, lambda: self.now_ms, HOST
        )
        self.core = BrokerCore(self.config, store, lambda: self.now_ms, self._soon.append)
        self.core.transactions.ask = self._note_question
        self.core.start()
        if self.core.topics.get(TOPIC) is None:
            self.core.topics.put([TopicSettings(TOPIC, 4, 4)])
        self.sending = Sending(self.core)
        self.settle()

    def _note_question(self, client: Client, half: Half, checks: int) -> None:
        self.asked.append((client.client_id, half, checks))

    def settle(self) -> None:
        """Everything happens that was put off to the next turn."""
        while self._soon:
            self._soon.popleft()()

    def tick(self, ms: int = TICK_MS) -> None:
        """Time passes, in ticks as an event loop has them."""
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

    @property
    def disk(self) -> MemoryFiles:
        """The simulated disk."""
        assert isinstance(self.files, MemoryFiles)
        return self.files

    def crash(self, keep: KeepPolicy | None = None) -> None:
        """What the disk holds after a crash is what the next start finds."""
        self.core.store.release()
        self.files = self.disk.crash(keep if keep is not None else KeepAll())
        self.open()

    def close(self) -> None:
        """Stop in order."""
        self.core.transactions.stop()
        self.settle()
        outcome: list[SluiceError | None] = []
        self.core.store.shut(outcome.append)
        assert outcome == [None]

    def reopen(self) -> None:
        self.close()
        self.open()

    # -------------------------------------------------------------------------------------- clients

    def message(self, body: bytes = b"hello", /, **properties: str) -> Message:
        text = {"TRAN_MSG": "true", "PGROUP": GROUP, "UNIQ_KEY": f"K{self.now_ms}", **properties}
        queue_id = int(text.pop("queue", 0))
        return Message(
            text.pop("topic", TOPIC),
            queue_id,
            body,
            "".join(f"{k}\x01{v}\x02" for k, v in text.items() if v).encode(),
            0,
            records.SYS_TX_PREPARED,
            self.now_ms,
            HOST,
        )

    def begin(self, body: bytes = b"hello", /, **properties: str) -> Placed:
        """A producer sends a half message; where its answer says that it is."""
        message = self.message(body, **properties)
        settings = self.core.topics.get(message.topic)
        assert settings is not None
        stored = self.sending.stored_form(message, settings)
        outcome: list[SluiceError | None] = []
        placed = self.sending.send(stored, records.message_keys(stored.properties), outcome.append)
        self.settle()
        assert outcome == [None]
        return placed

    def end(
        self,
        placed: Placed,
        verdict: int = COMMIT,
        *,
        group: str = GROUP,
        offset: int | None = None,
        position: int | None = None,
        from_check: bool = False,
    ) -> str:
        """A producer ends its transaction; what it is told, empty where all is well."""
        outcome: list[SluiceError | None] = []
        ending = Ending(
            group,
            placed.queue_offset if offset is None else offset,
            placed.position if position is None else position,
            verdict,
            from_check,
        )
        try:
            self.core.transactions.end(ending, outcome.append)
        except SluiceError as refusal:
            outcome.append(refusal)
        self.settle()
        (error,) = outcome  # a producer is told exactly once
        return "" if error is None else f"{error.rocketmq_code} {error}"

    def commit(self, placed: Placed) -> str:
        return self.end(placed, COMMIT)

    def roll_back(self, placed: Placed) -> str:
        return self.end(placed, ROLLBACK)

    def join(self, client_id: str = "one", group: str = GROUP) -> None:
        """A producer's heartbeat."""
        client = Client(client_id, client_id, "JAVA", 513, self.now_ms)
        self.core.clients.producer_said(group, client)

    def leave(self, client_id: str = "one", group: str = GROUP) -> None:
        self.core.clients.leave(client_id, client_id, group, "")

    # -------------------------------------------------------------------------------------- looking

    def entries(self, topic: str = TOPIC, queue_id: int | None = None) -> list[records.Entry]:
        """All entries of a topic that can be read, queue after queue."""
        found: list[records.Entry] = []
        for queue in range(4) if queue_id is None else (queue_id,):
            offset = self.core.store.min_offset(topic, queue)
            while offset < self.core.store.max_offset(topic, queue):
                result = self._read(topic, queue, offset)
                found += map(records.decode, result.messages)
                offset = result.next_offset
        return found

    def _read(self, topic: str, queue_id: int, offset: int) -> ReadResult:
        while True:
            try:
                return self.core.store.read(topic, queue_id, offset, bytes_max=1 << 20)
            except ColdRead as cold:
                cold.work()

    def bodies(self, topic: str = TOPIC) -> list[bytes]:
        return [bytes(entry.body) for entry in self.entries(topic)]

    def halves(self) -> list[records.Entry]:
        return self.entries(HALF_TOPIC, 0)

    def operations(self) -> list[tuple[str, bytes]]:
        """Tag and body of each."""
        return [
            (records.parse_properties(e.properties)["TAGS"], bytes(e.body))
            for e in self.entries(OP_TOPIC, 0)
        ]

    def parked(self) -> list[records.Entry]:
        return self.entries(CHECK_MAX_TOPIC, 0)

    @property
    def open_count(self) -> int:
        return self.core.transactions.table.open_count
