"""This module looks after topics whose messages are in memory only (storage=memory).

At the start their messages are gone. Groups that had read them, or not yet, go on with what comes
now: their committed offsets are put to where the queues begin, so that none is behind by messages
that nobody can read. The bound of all such topics together is a setting of the broker.

Messages that wait for something (a time, a word) are made to outlast a start, so these topics do
not take them. This module knows no wire format.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from sluice.broker.attributes import IN_MEMORY, STORAGE
from sluice.broker.offsets import SEPARATOR
from sluice.broker.topics import TopicSettings
from sluice.errors import MessageIllegal
from sluice.model import Message
from sluice.protocol import records

if TYPE_CHECKING:
    from sluice.broker.core import BrokerCore

_TIMES: Final = (b"TIMER_DELIVER_MS", b"TIMER_DELAY_MS", b"TIMER_DELAY_SEC")


class MemoryQueues:
    """The topics of one broker that are in memory only."""

    def __init__(self, core: BrokerCore) -> None:
        self._core = core
        core.services.append(self)

    def start(self) -> None:
        core, memory = self._core, self._core.store.memory
        memory.bytes_max = core.config.memory_topics_bytes_max
        read: dict[tuple[str, int], dict[str, int]] = {}  # by queue: who has read how far
        for key, queues in core.offsets.all().items():
            topic, _, group = key.partition(SEPARATOR)
            for queue_id, offset in queues.items():
                read.setdefault((topic, queue_id), {})[group] = offset
        for settings in core.topics.all():
            if is_in_memory(settings):
                for queue_id in range(max(settings.read_queues, settings.write_queues)):
                    self._begin(settings.name, queue_id, read.get((settings.name, queue_id), {}))

    def _begin(self, topic: str, queue_id: int, read: dict[str, int]) -> None:
        memory = self._core.store.memory
        memory.begin(topic, queue_id, max(read.values(), default=0))
        base = memory.base(topic, queue_id)
        for group, offset in read.items():
            if offset < base:
                self._core.offsets.commit(group, topic, queue_id, base)

    def tick(self, now_ms: int) -> None:
        self._core.store.memory.bytes_max = self._core.config.memory_topics_bytes_max


def is_in_memory(settings: TopicSettings) -> bool:
    return settings.attributes.get(STORAGE) == IN_MEMORY


def check_does_not_wait(message: Message) -> None:
    """Refuse a message to a topic in memory that would be stored elsewhere first."""
    properties = message.properties
    half = (records.property_value(properties, b"TRAN_MSG") or b"").lower() == b"true"
    level = records.property_value(properties, b"DELAY") or b"0"
    if half or message.sys_flag & records.SYS_TX_MASK:
        what = "transactional"
    elif level.strip(b"0"):
        what = "delayed"
    elif any(records.property_value(properties, name) is not None for name in _TIMES):
        what = "timed"
    else:
        return
    raise MessageIllegal(
        f"topic {message.topic} is in memory (storage=memory): it takes no {what} messages"
    )
