"""This module runs the pop service without a wire: a core on a simulated disk, a clock by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sluice.broker.core import BrokerCore
from sluice.broker.pop_taking import Popped, PopRequest
from sluice.broker.pops import Changed, Ticket
from sluice.broker.topics import TopicSettings
from sluice.errors import SluiceError
from sluice.model import Message
from sluice.protocol import records
from sluice.protocol.remoting import RemotingCommand
from sluice.storage.background import Inline
from sluice.storage.memory_files import KeepAll, KeepPolicy, MemoryFiles
from sluice.storage.opening import open_store
from sluice.storage.store import ColdRead
from tests.unit.broker.broker_kit import BROKER, broker_config

GROUP, TOPIC = "readers", "orders"
RETRY_TOPIC = "%RETRY%readers_orders"
DEAD_TOPIC = "%DLQ%readers"
INVISIBLE_MS = 60_000
BEGIN_MS = 1_794_772_393_000


class Taken:
    """One message that a consumer has, with its ticket."""

    def __init__(self, popped: Popped, mark: str, queue_id: int, start: int, entry: Any) -> None:
        self.mark, self.queue_id = mark, queue_id
        self.offset: int = entry.queue_offset
        self.body = bytes(entry.body)
        self.entry: records.Entry = entry
        self.ticket = Ticket(start, popped.pop_ms, popped.revive_queue)

    @property
    def topic(self) -> str:
        return RETRY_TOPIC if self.mark == "1" else TOPIC


class PopBench:
    """A broker's core without doors."""

    def __init__(
        self,
        queues: int = 2,
        *,
        files: MemoryFiles | None = None,
        now_ms: int = BEGIN_MS,
        **changes: Any,
    ) -> None:
        self.now_ms = now_ms
        self.files = files if files is not None else MemoryFiles()
        self.config = broker_config(**changes)
        self.core: BrokerCore
        self.open()
        if self.core.topics.get(TOPIC) is None:
            self.core.topics.put([TopicSettings(TOPIC, queues, queues)])
        self.settle()

    def open(self) -> None:
        self._soon: list[Callable[[], None]] = []
        store = open_store(
            self.config.store, self.files, Inline(), lambda: self.now_ms, bytes([127, 0, 0, 1] * 2)
        )
        self.core = BrokerCore(self.config, store, lambda: self.now_ms, self._soon.append)
        self.core.start()
        self.settle()

    def crash(self, keep: KeepPolicy | None = None) -> None:
        """Whatever the disk has is all that is left."""
        self.files = self.files.crash(keep if keep is not None else KeepAll())
        self.open()

    def settle(self) -> None:
        """The event loop goes on until it has nothing more to do."""
        while self._soon:
            soon, self._soon[:] = self._soon[:], []
            for call in soon:
                call()

    def pass_ms(self, span_ms: int, step_ms: int = 0) -> None:
        """Time passes, with a tick at its end and every `step_ms` before."""
        end_ms = self.now_ms + span_ms
        while self.now_ms < end_ms:
            self.now_ms = min(end_ms, self.now_ms + (step_ms or span_ms))
            self.core.tick()
            self.settle()

    # ------------------------------------------------------------------------------------ messages

    def put(self, *bodies: bytes, queue_id: int = 0, topic: str = TOPIC, **properties: str) -> None:
        text = "".join(f"{name}\x01{value}\x02" for name, value in properties.items()).encode()
        for body in bodies:
            self.core.append(Message(topic, queue_id, body, text, born_ms=self.now_ms))
        self.settle()
        if self.core.polls.held_count:
            self.core.polls.arrived((topic, queue_id), 0)
        self.settle()

    def request(self, **changes: Any) -> PopRequest:
        fields = {
            "group": GROUP,
            "topic": TOPIC,
            "queue_id": -1,
            "count_max": 32,
            "invisible_ms": INVISIBLE_MS,
            "poll_ms": 0,
            "born_ms": self.now_ms,
            "from_end": False,
            **changes,
        }
        return PopRequest(**fields)

    def ask(self, **changes: Any) -> list[tuple[Popped | None, str, SluiceError | None]]:
        """Ask for messages; the answer comes into the list."""
        seen: list[tuple[Popped | None, str, SluiceError | None]] = []
        self.core.pops.pop(self.request(**changes), self, lambda *answer: seen.append(answer))
        self.settle()
        return seen

    def pop(self, **changes: Any) -> list[Taken]:
        """What is there now."""
        (answer,) = self.ask(**changes)
        popped, _, error = answer
        assert error is None, error
        return taken_of(popped)

    def bodies(self, **changes: Any) -> list[bytes]:
        return [each.body for each in self.pop(**changes)]

    def ack(self, *messages: Taken, group: str = GROUP) -> None:
        outcomes: list[SluiceError | None] = []
        for each in messages:
            name = (group, each.topic, each.queue_id)
            self.core.pops.acknowledge(name, each.offset, each.ticket, outcomes.append)
        self.settle()
        assert outcomes == [None] * len(messages)

    def change(self, message: Taken, invisible_ms: int) -> Changed:
        """A message stays invisible for another time; its ticket is the new one."""
        seen: list[tuple[Changed | None, SluiceError | None]] = []
        name = (GROUP, message.topic, message.queue_id)
        self.core.pops.change(
            name,
            message.offset,
            message.ticket,
            invisible_ms,
            lambda *answer: seen.append(answer),
        )
        self.settle()
        ((changed, error),) = seen
        assert changed is not None, error
        start = message.ticket.start if changed.revive_queue == 999 else message.offset
        message.ticket = Ticket(start, changed.pop_ms, changed.revive_queue)
        return changed

    def stored(self, topic: str, queue_id: int = 0) -> list[records.Entry]:
        while True:
            try:
                found = self.core.store.read(topic, queue_id, 0, count_max=1000, bytes_max=1 << 20)
            except ColdRead as cold:
                cold.work()
            else:
                return [records.decode(message) for message in found.messages]


def taken_of(popped: Popped | None) -> list[Taken]:
    """The messages of an answer."""
    if popped is None:
        return []
    entries = iter([records.decode(piece) for piece in popped.pieces])
    return [
        Taken(popped, part.mark, part.queue_id, part.start, next(entries))
        for part in popped.parts
        for _ in part.offsets
    ]


def pop_in_order(bench: PopBench, **changes: object) -> list[Taken]:
    return bench.pop(order=True, **changes)


def counts(bench: PopBench, **changes: object) -> list[tuple[int, int]]:
    ((popped, _, _),) = bench.ask(order=True, **changes)
    assert popped is not None
    return popped.parts[0].counts


# --------------------------------------------------------------------------------- over the wire


def pop_fields(**changes: object) -> dict[str, object]:
    return {
        "consumerGroup": GROUP,
        "topic": TOPIC,
        "queueId": -1,
        "maxMsgNums": 32,
        "invisibleTime": 60_000,
        "pollTime": 0,
        "bornTime": 0,
        "initMode": 0,
        **changes,
    }


def messages(answer: RemotingCommand) -> list[records.Entry]:
    found, at = [], 0
    body = bytes(answer.body)
    while at < len(body):
        found.append(records.decode(body, at))
        at += found[-1].size
    return found


def ticket(answer: RemotingCommand, number: int = 0) -> dict[str, object]:
    """What Java's client shows of a message of the topic itself: built of the answer's texts."""
    ext = answer.ext
    rows = [row.split(" ") for row in ext["msgOffsetInfo"].split(";")]
    places = [(row, offset) for row in rows for offset in row[2].split(",")]
    (mark, queue_id, _), offset = places[number]
    starts = dict(row.rsplit(" ", 1) for row in ext["startOffsetInfo"].split(";"))
    start = starts[f"{mark} {queue_id}"]
    parts = (start, ext["popTime"], ext["invisibleTime"], ext["reviveQid"], mark, BROKER, queue_id)
    return {
        "consumerGroup": GROUP,
        "topic": TOPIC if mark == "0" else f"%RETRY%{GROUP}_{TOPIC}",
        "queueId": queue_id,
        "offset": offset,
        "extraInfo": " ".join((*parts, offset)),
    }
