"""This module is the service behind every send: checks, the topic, the place in the log.

It takes plain values and gives back where a message went, when that is confirmed. It knows neither
a wire nor a socket.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Final

from sluice.broker.core import BrokerCore
from sluice.broker.topics import (
    CLOSED_TOPICS,
    DEAD_PREFIX,
    RETRY_PREFIX,
    TopicSettings,
    check_name,
)
from sluice.errors import (
    MessageIllegal,
    NoPermission,
    ParameterInvalid,
    SluiceError,
)
from sluice.model import Message, Placed
from sluice.protocol import records
from sluice.protocol.record_runs import Run
from sluice.storage.runs import PlacedRun, stage_run

Sent = Callable[[SluiceError | None], None]
Keys = tuple[bytes, bytes, bytes]  # what `records.message_keys` finds

REGION: Final = "DefaultRegion"
_TIMER_NAMES: Final = (b"TIMER_DELIVER_MS", b"TIMER_DELAY_MS", b"TIMER_DELAY_SEC")
# Where one of these is in a message's properties it may be stored as something else than it is.
_SPECIAL_NAMES: Final = (b"DELAY", b"TIMER_", b"TRAN_MSG")


class Sending:
    """Sends of one broker."""

    def __init__(self, core: BrokerCore) -> None:
        self._core = core
        cluster = core.config.cluster_name
        # What the broker adds to every message: consumers and traces read it.
        self._added = (
            f"MSG_REGION\x01{REGION}\x02CLUSTER\x01{cluster}\x02TRACE_ON\x01true\x02".encode()
        )

    def topic_for(self, name: str, default_topic: str, default_queues: int) -> TopicSettings:
        """The topic that a message is sent to, made where that is allowed; raises why not."""
        core = self._core
        if name in CLOSED_TOPICS:
            raise NoPermission(f"Sending message to topic[{name}] is forbidden.")
        settings = core.topics.get(name)
        if settings is None:
            settings = self._new_topic(name, default_topic, default_queues)
        if not settings.writable or core.config.permission == "r":
            raise NoPermission(f"Sending message to topic[{name}] is forbidden.")
        return settings

    def _new_topic(self, name: str, default_topic: str, default_queues: int) -> TopicSettings:
        core = self._core
        check_sendable(name)
        if name.startswith((RETRY_PREFIX, DEAD_PREFIX)):
            prefix = RETRY_PREFIX if name.startswith(RETRY_PREFIX) else DEAD_PREFIX
            group = core.groups.require(name.removeprefix(prefix))
            return core.topics.create_inner(name, group.retry_queues)
        settings = core.topics.create_by_send(
            name, default_topic, default_queues, allowed=core.config.creates_topics
        )
        core.ask_turn()
        return settings

    def queue_for(self, settings: TopicSettings, queue_id: int) -> int:
        """The queue that a message goes to: the one asked for, or any where none is."""
        if queue_id < 0:
            return random.randrange(settings.write_queues)
        if queue_id >= max(settings.write_queues, settings.read_queues):
            raise ParameterInvalid(
                f"request queueId[{queue_id}] is illegal, topic {settings.name} has "
                f"{settings.write_queues} write and {settings.read_queues} read queues"
            )
        return queue_id

    @staticmethod
    def is_plain(settings: TopicSettings, sys_flag: int, properties: bytes) -> bool:
        """Whether a message is stored as it is, in a topic that asks for nothing special."""
        if settings.attributes or sys_flag & records.SYS_TX_MASK:
            return False
        return not any(name in properties for name in _SPECIAL_NAMES)

    def completed(self, properties: bytes) -> bytes:
        """A message's properties with what the broker adds to them."""
        if properties and properties[-1] != 2:
            properties += b"\x02"
        return properties + self._added

    def stored_form(self, message: Message, settings: TopicSettings) -> Message:
        """What is stored for a message: itself, or what waits in its place for time or a word."""
        if self.is_plain(settings, message.sys_flag, message.properties):
            return message
        self._refuse_unsupported(message.sys_flag, message.properties)
        return message

    def send(self, message: Message, keys: Keys, sent: Sent) -> Placed:
        """Append one message in its stored form."""
        core = self._core
        if core.store.log.end > core.admission.free_end:
            core.admission.admit(message.born_host, len(message.body))
        placed = core.append(message, sent, keys)
        core.stats.stored(message.topic, 1, placed[1])
        return placed

    def send_run(self, run: Run, keys: list[Keys], sent: Sent) -> PlacedRun:
        """Append messages together, into one queue, with consecutive offsets."""
        core = self._core
        if core.store.log.end > core.admission.free_end:
            core.admission.admit(run.born_host, sum(len(body) for _, body, _ in run.parts))
        together = b"\x02".join([properties for _, _, properties in run.parts])
        if run.sys_flag & records.SYS_TX_MASK or b"DELAY" in together or b"TIMER_DEL" in together:
            for _, _, properties in run.parts:
                self._refuse_unsupported(run.sys_flag, properties)
        placed = stage_run(core.store, run, keys, sent)
        core.ask_turn()
        core.stats.stored(run.topic, len(run.parts), placed.byte_count)
        return placed

    @staticmethod
    def _refuse_unsupported(sys_flag: int, properties: bytes) -> None:
        """What would be delivered wrongly is refused: at once instead of later, or undecided."""
        if sys_flag & records.SYS_TX_MASK:
            raise MessageIllegal("transactional messages are not supported by this broker")
        if b"DELAY" in properties or b"TIMER_DEL" in properties:
            level = records.property_value(properties, b"DELAY")
            if level is not None and level != b"0":
                raise MessageIllegal("delayed messages are not supported by this broker")
            for name in _TIMER_NAMES:
                if records.property_value(properties, name) is not None:
                    raise MessageIllegal("timed messages are not supported by this broker")


def check_sendable(name: str) -> None:
    """Refuse names that nobody may send to."""
    try:
        check_name(name)
    except MessageIllegal as error:
        raise ParameterInvalid(str(error)) from None
    if name in CLOSED_TOPICS:
        raise NoPermission(f"Sending message to topic[{name}] is forbidden.")
