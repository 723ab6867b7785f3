"""This module runs the services behind sends and pulls on a simulated disk, without doors and with
a clock that a test moves.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from sluice.broker.core import BrokerCore
from sluice.broker.dedup import First
from sluice.broker.placing import Placing, RunPlace
from sluice.broker.pulling import FLAG_SUBSCRIPTION, OffsetReset, Pull, Pulling
from sluice.broker.sending import Sending
from sluice.broker.topics import TopicSettings
from sluice.errors import SluiceError
from sluice.model import LOOPBACK_HOST, Message
from sluice.protocol import records
from sluice.protocol.record_runs import Run
from sluice.storage.background import Background, Inline
from sluice.storage.memory_files import KeepNothing, KeepPolicy, MemoryFiles
from sluice.storage.opening import open_store
from sluice.storage.store import ReadResult
from tests.unit.broker.broker_kit import broker_config

BEGIN_MS = 1_800_000_000_000


@dataclass
class Outcome:
    """What the sender of a message, or of a batch, was told; nothing yet where it waits."""

    place: First | RunPlace | None = None
    error: SluiceError | None = None
    told: int = 0

    @property
    def first(self) -> First:
        assert self.told == 1
        assert self.error is None, self.error
        assert isinstance(self.place, First)
        return self.place

    @property
    def run(self) -> RunPlace:
        assert self.told == 1
        assert self.error is None, self.error
        assert isinstance(self.place, RunPlace)
        return self.place


class TopicBroker:
    """The services of one broker, and its clock."""

    def __init__(
        self,
        files: MemoryFiles | None = None,
        *,
        now_ms: int = BEGIN_MS,
        background: Background | None = None,
        **changes: Any,
    ) -> None:
        self.files = files if files is not None else MemoryFiles()
        self.now_ms = now_ms
        self._changes = changes
        self._soon: deque[Callable[[], object]] = deque()
        config = broker_config(**changes)
        config = replace(config, store=replace(config.store, flush="sync"))
        store = open_store(
            config.store,
            self.files,
            background if background is not None else Inline(),
            lambda: self.now_ms,
            LOOPBACK_HOST,
        )
        self.core = BrokerCore(config, store, lambda: self.now_ms, self._soon.append)
        self.core.start()
        self.sending = Sending(self.core)
        self.placing = Placing(self.core, self.sending)
        self.pulling = Pulling(self.core)
        self.settle()

    def settle(self) -> None:
        """Everything that was asked for the end of the turn happens."""
        while self._soon:
            self._soon.popleft()()

    def run(self, span_ms: int) -> None:
        """Time goes on."""
        self.now_ms += span_ms
        self.core.tick()
        self.settle()

    def crashed(self, keep: KeepPolicy | None = None) -> TopicBroker:
        """The broker that is started after a loss of power: what was not synced is gone."""
        files = self.files.crash(keep if keep is not None else KeepNothing())
        return TopicBroker(files, now_ms=self.now_ms, **self._changes)

    # ---------------------------------------------------------------------------------- short forms

    def make(self, topic: str = "orders", queues: int = 4, **attributes: str) -> TopicSettings:
        """A topic; names of attributes have an underscore in the place of a dot."""
        named = {name.replace("_", "."): value for name, value in attributes.items()}
        settings = TopicSettings(topic, queues, queues, attributes=named)
        self.core.topics.put([settings])
        self.core.ask_turn()
        self.settle()
        return settings

    def send(
        self,
        topic: str = "orders",
        body: bytes = b"body",
        queue_id: int = 0,
        properties: Mapping[str, str] | None = None,
        **more: str,
    ) -> Outcome:
        """Send one message, as a door does; raises the refusal that comes at once."""
        outcome = self.post(topic, body, queue_id, properties, **more)
        self.settle()
        return outcome

    def post(
        self,
        topic: str = "orders",
        body: bytes = b"body",
        queue_id: int = 0,
        properties: Mapping[str, str] | None = None,
        **more: str,
    ) -> Outcome:
        """The same, without the end of the turn."""
        text = records.format_properties(
            {"UNIQ_KEY": f"U{self.now_ms}", **(properties or {}), **more}
        )
        outcome = Outcome()

        def sent(error: SluiceError | None) -> None:
            outcome.told += 1
            outcome.error = error

        def go() -> None:
            settings = self.sending.topic_for(topic, "TBW102", 4)
            message = Message(topic, queue_id, body, text, born_ms=self.now_ms)
            keys = records.message_keys(text)
            outcome.place = self.placing.place(message, settings, keys, sent, go)

        go()
        return outcome

    def send_batch(
        self, topic: str, parts: list[tuple[bytes, dict[str, str]]], queue_id: int = 0
    ) -> Outcome:
        """Send messages as one batch."""
        outcome = Outcome()

        def sent(error: SluiceError | None) -> None:
            outcome.told += 1
            outcome.error = error

        def go() -> None:
            settings = self.sending.topic_for(topic, "TBW102", 4)
            texts = [records.format_properties(properties) for _, properties in parts]
            rows = [(0, body, text) for (body, _), text in zip(parts, texts, strict=True)]
            run = Run(topic, queue_id, 0, self.now_ms, LOOPBACK_HOST, 0, rows)
            keys = [records.message_keys(text) for text in texts]
            outcome.place = self.placing.place_run(run, settings, keys, sent, go)

        go()
        self.settle()
        return outcome

    def pull(
        self, topic: str = "orders", offset: int = 0, queue_id: int = 0, expression: str = "*"
    ) -> ReadResult:
        """What a consumer gets at once."""
        answers: list[ReadResult] = []

        def done(result: ReadResult | OffsetReset | None, error: SluiceError | None) -> None:
            assert error is None, error
            assert isinstance(result, ReadResult)
            answers.append(result)

        pull = Pull(
            "readers", topic, queue_id, offset, 32, FLAG_SUBSCRIPTION, 0, 0, expression, "TAG", 0
        )
        self.pulling.pull(pull, self, done)
        self.settle()
        (result,) = answers
        return result

    def bodies(
        self, topic: str = "orders", queue_id: int = 0, expression: str = "*"
    ) -> list[bytes]:
        """Everything that a consumer of a queue gets, from its beginning to its end."""
        store = self.core.store
        offset = store.min_offset(topic, queue_id)
        found: list[bytes] = []
        while offset < store.max_offset(topic, queue_id):
            result = self.pull(topic, offset, queue_id, expression)
            found += [bytes(records.decode(message).body) for message in result.messages]
            assert result.next_offset > offset, "a reader gets on"
            offset = result.next_offset
        return found

    def stored(self, topic: str = "orders", queue_id: int = 0) -> list[records.Entry]:
        """All entries of a queue, whether consumers get them or not."""
        store = self.core.store
        offset = store.min_offset(topic, queue_id)
        found: list[records.Entry] = []
        while offset < store.max_offset(topic, queue_id):
            result = store.read(topic, queue_id, offset)
            found += map(records.decode, result.messages)
            offset = result.next_offset
        return found
