"""This module is the service behind every send: checks, the topic, the place in the log.

It takes plain values and gives back where a message went, when that is confirmed. It knows neither
a wire nor a socket.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from typing import Final

from sluice.broker.attributes import BATCHES, QUEUE_TYPE
from sluice.broker.core import BrokerCore
from sluice.broker.expiry import TTL_NAME
from sluice.broker.half_messages import begun
from sluice.broker.memory_queues import check_does_not_wait, is_in_memory
from sluice.broker.priorities import without
from sluice.broker.topics import (
    CLOSED_TOPICS,
    DEAD_PREFIX,
    HALF_TOPIC,
    RETRY_PREFIX,
    UNIT,
    UNIT_SUBSCRIPTION,
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
from sluice.protocol.lifetimes import EXPIRES_NAME
from sluice.protocol.record_runs import Run
from sluice.storage.runs import PlacedRun, stage_run

Sent = Callable[[SluiceError | None], None]
Keys = tuple[bytes, bytes, bytes]  # what `records.message_keys` finds

REGION: Final = "DefaultRegion"
_TIMER_NAMES: Final = (b"TIMER_DELIVER_MS", b"TIMER_DELAY_MS", b"TIMER_DELAY_SEC")
# Where one of these is in a message's properties it may be stored as something else than it is.
TICKET_NAME: Final = b"POP_CK"
_SPECIAL_NAMES: Final = (
    *(b"DELAY", b"TIMER_", b"TRAN_MSG", b"_SYS_MSG_", b"MSG_TTL_MS", TICKET_NAME),
)
_SPECIAL: Final = re.compile(b"|".join(_SPECIAL_NAMES))
_SHORT_BYTES: Final = 512
_INNER_FLAG: Final = records.SYS_INNER_BATCH
_SPECIAL_FLAGS: Final = records.SYS_TX_MASK | _INNER_FLAG


class Sending:
    """Sends of one broker."""

    def __init__(self, core: BrokerCore) -> None:
        self._core = core
        cluster = core.config.cluster_name
        # What the broker adds to every message: consumers and traces read it.
        self._added = (
            f"MSG_REGION\x01{REGION}\x02CLUSTER\x01{cluster}\x02TRACE_ON\x01true\x02".encode()
        )

    def topic_for(
        self, name: str, default_topic: str, default_queues: int, *, of_unit: bool = False
    ) -> TopicSettings:
        """The topic that a message is sent to, made where that is allowed; raises why not.

        `of_unit`: its producer is of a unit, which a topic that is made for it says of itself.
        """
        core = self._core
        if name in CLOSED_TOPICS:
            raise NoPermission(f"Sending message to topic[{name}] is forbidden.")
        settings = core.topics.get(name)
        if settings is None:
            settings = self._new_topic(name, default_topic, default_queues, of_unit)
        if not settings.writable or core.config.permission == "r":
            raise NoPermission(f"Sending message to topic[{name}] is forbidden.")
        return settings

    def _new_topic(
        self, name: str, default_topic: str, default_queues: int, of_unit: bool
    ) -> TopicSettings:
        core = self._core
        check_sendable(name)
        if name.startswith((RETRY_PREFIX, DEAD_PREFIX)):
            if name.startswith(DEAD_PREFIX):
                core.groups.require(name.removeprefix(DEAD_PREFIX))
                return core.topics.create_inner(name, 1)
            group = core.groups.require(name.removeprefix(RETRY_PREFIX))
            flag = UNIT_SUBSCRIPTION if of_unit else 0
            return core.topics.create_inner(name, max(1, group.retry_queues), sys_flag=flag)
        settings = core.topics.create_by_send(
            name,
            default_topic,
            default_queues,
            allowed=core.config.creates_topics,
            sys_flag=UNIT if of_unit else 0,
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
        return not (settings.attributes or sys_flag & _SPECIAL_FLAGS or is_special(properties))

    def completed(self, properties: bytes) -> bytes:
        """A message's properties with what the broker adds to them."""
        if properties and properties[-1] != 2:
            properties += b"\x02"
        return properties + self._added

    def is_half(self, message: Message, settings: TopicSettings) -> bool:
        """Whether a message waits for the word of its producer; raises why it cannot."""
        if message.sys_flag & _INNER_FLAG:
            _check_whole(settings)
        if not (message.sys_flag & records.SYS_TX_MASK or b"TRAN_MSG" in message.properties):
            return False
        rejected = self._core.config.reject_transactions
        return begun(message, rejected=rejected).topic == HALF_TOPIC

    def stored_form(self, message: Message, settings: TopicSettings) -> Message:
        """What is stored for a message: itself, or what waits in its place for time or a word."""
        if self.is_plain(settings, message.sys_flag, message.properties):
            return message
        if message.sys_flag & _INNER_FLAG:
            _check_whole(settings)
        if settings.attributes and is_in_memory(settings):
            check_does_not_wait(message)
        message.properties = self._core.expiry.stamped(message.topic, settings, message.properties)
        if message.sys_flag & records.SYS_TX_MASK or b"TRAN_MSG" in message.properties:
            message = begun(message, rejected=self._core.config.reject_transactions)
            if message.topic == HALF_TOPIC:
                return message
        if message.sys_flag & records.SYS_TX_MASK:
            self._refuse_unsupported(message.sys_flag, message.properties)
        return self._core.expiry.outliving(self._core.delays.requested_form(message))

    def send(self, message: Message, keys: Keys, sent: Sent) -> Placed:
        """Append one message in its stored form."""
        core = self._core
        if core.store.log.end > core.admission.free_end:
            core.admission.admit(message.born_host, len(message.body))
        placed = core.append(message, sent, keys)
        core.stats.stored(message.topic, 1, placed[1])
        return placed

    def send_run(
        self, run: Run, settings: TopicSettings, keys: list[Keys], sent: Sent
    ) -> PlacedRun:
        """Append messages together, into one queue, with consecutive offsets."""
        core = self._core
        if run.sys_flag & _INNER_FLAG:
            _check_whole(settings)
        if core.store.log.end > core.admission.free_end:
            core.admission.admit(run.born_host, sum(len(body) for _, body, _ in run.parts))
        together = b"\x02".join([properties for _, _, properties in run.parts])
        if run.sys_flag & records.SYS_TX_MASK or is_special(together):
            for _, _, properties in run.parts:
                self._refuse_unsupported(run.sys_flag, properties)
        if TICKET_NAME in together:
            run.parts = [(flag, body, unticketed(text)) for flag, body, text in run.parts]
        if settings.attributes or TTL_NAME in together or EXPIRES_NAME in together:
            placed = self._stage_each(run, settings, keys, sent)
        else:
            placed = stage_run(core.store, run, keys, sent)
        core.ask_turn()
        core.stats.stored(run.topic, len(run.parts), placed.byte_count)
        return placed

    def _stage_each(
        self, run: Run, settings: TopicSettings, keys: list[Keys], sent: Sent
    ) -> PlacedRun:
        """The messages of a run that have more of their own than runs can tell."""
        run.parts = [
            (flag, body, self._core.expiry.stamped(run.topic, settings, properties))
            for flag, body, properties in run.parts
        ]
        messages = [run.message(index) for index in range(len(run.parts))]
        placed = self._core.store.stage_batch(messages, sent, keys)
        positions = [place.position for place in placed]
        return PlacedRun(positions, sum(place.size for place in placed), placed[0].queue_offset)

    @staticmethod
    def _refuse_unsupported(sys_flag: int, properties: bytes) -> None:
        """What would be delivered wrongly is refused: at once instead of later, or undecided."""
        is_half = (records.property_value(properties, b"TRAN_MSG") or b"").lower() == b"true"
        if sys_flag & records.SYS_TX_MASK or is_half:
            raise MessageIllegal("transactional messages are not taken in a batch; send each alone")
        if b"DELAY" in properties or b"TIMER_DEL" in properties:
            level = records.property_value(properties, b"DELAY")
            if level is not None and level != b"0":
                raise MessageIllegal("a batch cannot hold delayed messages; send them one by one")
            for name in _TIMER_NAMES:
                if records.property_value(properties, name) is not None:
                    raise MessageIllegal("a batch cannot hold timed messages; send them one by one")


def is_special(properties: bytes) -> bool:
    """Whether a message with these properties may be stored as something else than it is."""
    # Asked once per send: this is the quickest for the properties of one message, which are short,
    # and that for those of a batch.
    if len(properties) < _SHORT_BYTES:
        return _SPECIAL.search(properties) is not None
    return any(properties.find(name) >= 0 for name in _SPECIAL_NAMES)


def unticketed(properties: bytes) -> bytes:
    """Properties without what acknowledges a popped message: who sends one on carries it along,
    and clients would show the old one for the new message.
    """
    return without(properties, TICKET_NAME) if TICKET_NAME in properties else properties


def _check_whole(settings: TopicSettings) -> None:
    """Refuse the flag of a batch that is stored whole where no batch is: readers would take the
    body of the message for one.
    """
    if settings.attributes.get(QUEUE_TYPE) != BATCHES:
        raise MessageIllegal(
            f"sysFlag says that the message is a batch that is stored whole (0x80), which topic "
            f"{settings.name} does not hold (queue.type=BatchCQ); send it without the flag"
        )


def check_sendable(name: str) -> None:
    """Refuse names that nobody may send to."""
    try:
        check_name(name)
    except MessageIllegal as error:
        raise ParameterInvalid(str(error)) from None
    if name in CLOSED_TOPICS:
        raise NoPermission(f"Sending message to topic[{name}] is forbidden.")
