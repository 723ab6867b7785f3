"""This module shows the broker's topics as Kafka's clients know them: names, UUIDs, partitions.

A partition is a queue of the same number. Kafka's names may have dots, which RocketMQ's clients
refuse, so a dot is kept as "%2E": Kafka's names never have a percent sign, the map is one-to-one.
Topics of the broker's own and of retries are not shown; the dead letters of a RocketMQ group are,
as rmq.dlq.GROUP, to be read only.

A topic's UUID is chosen when it is first seen through this door and kept in the store's tables; it
goes with the topic, so one of the same name that is made later has another.

This module knows no wire format.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final
from uuid import UUID

from sluice.broker.attributes import BATCHES, QUEUE_TYPE
from sluice.broker.topics import CLOSED_TOPICS, DEAD_PREFIX, TopicSettings
from sluice.errors import SluiceError
from sluice.storage.state import KAFKA_ID_TABLE

if TYPE_CHECKING:
    from sluice.broker.core import BrokerCore

NAME_MAX: Final = 249
STORED_BYTES_MAX: Final = 255
CONFIG_PREFIX: Final = "kafka."  # of attributes that are configurations of Kafka's
_NAME: Final = re.compile(r"[a-zA-Z0-9._-]+")
_SHOWN: Final = re.compile(r"(?:[a-zA-Z0-9_-]|%2E)+")
_GROUP: Final = re.compile(r"[a-zA-Z0-9_-]{1,200}")
DEAD_ALIAS: Final = "rmq.dlq."  # in front of the group whose dead letters a topic has
DELAY_HEADERS: Final = "sluice.delay.headers"
APPEND_TIME: Final = "LogAppendTime"
PRODUCERS_CODEC: Final = "producer"


@dataclass(frozen=True, slots=True)
class KafkaTopic:
    """A topic as Kafka's clients see it."""

    name: str
    stored: str  # its name in the store
    id: UUID
    partitions: int
    settings: TopicSettings
    batches: bool  # stored whole; a topic of RocketMQ's clients has single messages
    append_time: bool  # records get the time of their append
    batch_bytes_max: int | None  # where the topic has a limit of its own
    compacts: bool  # of each key the newest record stays, so each has one
    delays: bool  # records may ask for a later time
    dead_group: str = ""  # whose dead letters these are
    before_ms_max: int | None = None  # how old a record's time may be, where the topic says it
    after_ms_max: int | None = None  # how far ahead of the clock
    deletes: bool = True  # records go when they are old, or when somebody says so
    compression: str = ""  # of records, where it is not left to their producers
    is_special: bool = False  # batches take the long way into the store: one of the above asks it

    def config(self, name: str) -> str | None:
        """A configuration that somebody set on the topic."""
        return self.settings.attributes.get(CONFIG_PREFIX + name)


def is_name(name: str) -> bool:
    """Whether Kafka's clients may have a topic of this name, and the store can keep it."""
    return (
        _NAME.fullmatch(name) is not None
        and name not in (".", "..")
        and len(name) <= NAME_MAX
        and len(stored_name(name)) <= STORED_BYTES_MAX
    )


def stored_name(name: str) -> str:
    """How a topic of Kafka's is called in the store, and by RocketMQ's clients."""
    if name.startswith(DEAD_ALIAS):
        return DEAD_PREFIX + name.removeprefix(DEAD_ALIAS)
    return name.replace(".", "%2E")


def has_collisions(name: str) -> bool:
    """Whether another name may be written in the same way as this one."""
    return "." in name or "_" in name


def unify(name: str) -> str:
    """A name as Kafka's metrics write it."""
    return name.replace(".", "_")


def settings_of(name: str, partitions: int, configs: dict[str, str]) -> TopicSettings:
    """A topic as it is made by Kafka's clients."""
    attributes = {QUEUE_TYPE: BATCHES}
    attributes.update({CONFIG_PREFIX + key: value for key, value in configs.items()})
    return TopicSettings(stored_name(name), partitions, partitions, attributes=attributes)


def shown(name: str, settings: TopicSettings, topic_id: UUID) -> KafkaTopic:
    """A topic with these settings, as Kafka's clients see it."""
    stored = settings.name

    def config(key: str) -> str:
        return settings.attributes.get(CONFIG_PREFIX + key, "").strip()

    policy = config("cleanup.policy")
    append_time = config("message.timestamp.type") == APPEND_TIME
    compacts, delays = "compact" in policy, config(DELAY_HEADERS).lower() == "true"
    dead_group = stored.removeprefix(DEAD_PREFIX) if stored.startswith(DEAD_PREFIX) else ""
    before_ms_max = number_of(config("message.timestamp.before.max.ms"))
    compression = config("compression.type").removeprefix(PRODUCERS_CODEC)
    return KafkaTopic(
        name,
        stored,
        topic_id,
        max(settings.read_queues, settings.write_queues),
        settings,
        settings.attributes.get(QUEUE_TYPE) == BATCHES,
        append_time,
        number_of(config("max.message.bytes")),
        compacts,
        delays,
        dead_group,
        before_ms_max,
        number_of(config("message.timestamp.after.max.ms")),
        not policy or "delete" in policy,
        compression,
        append_time
        or compacts
        or delays
        or bool(dead_group)
        or before_ms_max is not None
        or bool(compression),
    )


def number_of(text: str) -> int | None:
    """What a configuration says; None where nobody set it, or to what is no number: attributes are
    written by others too, and a topic that cannot be shown could not even be deleted.
    """
    try:
        return int(text)
    except ValueError:
        return None


class KafkaTopics:
    """The topics of one broker that Kafka's clients see."""

    def __init__(self, core: BrokerCore) -> None:
        self._core = core
        self._ids: dict[str, UUID] = {}  # by stored name
        self._names: dict[bytes, str] = {}  # by the bytes of its id
        self._seen: dict[str, KafkaTopic] = {}  # as long as its settings are the same
        for key, value in core.store.table(KAFKA_ID_TABLE).items():
            self._keep(key.removesuffix("@"), UUID(value))

    def _keep(self, stored: str, topic_id: UUID) -> None:
        self._ids[stored] = topic_id
        self._names[topic_id.bytes] = stored

    # -------------------------------------------------------------------------------------- looking

    def kafka_name(self, stored: str) -> str | None:
        """The name that Kafka's clients know a topic by, None where they do not see it."""
        if stored.startswith(DEAD_PREFIX):
            group = stored.removeprefix(DEAD_PREFIX)
            return DEAD_ALIAS + group if _GROUP.fullmatch(group) else None
        if (
            _SHOWN.fullmatch(stored) is None
            or stored in CLOSED_TOPICS
            or self._core.topics.is_system(stored)
        ):
            return None
        name = stored.replace("%2E", ".")
        is_free = name not in (".", "..") and not name.startswith(DEAD_ALIAS)
        return name if len(name) <= NAME_MAX and is_free else None

    def find(self, name: str) -> KafkaTopic | None:
        """The topic of this name; None where there is none, or it is not shown."""
        stored = stored_name(name)
        settings = self._core.topics.get(stored)
        if settings is None:
            return None
        seen = self._seen.get(stored)
        if seen is not None and seen.settings is settings:
            return seen
        if self.kafka_name(stored) != name:
            return None
        topic = shown(name, settings, self._id_of(stored))
        self._seen[stored] = topic
        return topic

    def is_taken(self, name: str) -> bool:
        """Whether the store has a topic of this name, shown or not; nobody may make it again."""
        stored = stored_name(name)
        if name.startswith(DEAD_ALIAS):
            return True  # only a group's failures make it
        return self._core.topics.get(stored) is not None or self.kafka_name(stored) is None

    def unified(self) -> dict[str, str]:
        """The names that have dots or underscores, by how Kafka's metrics write them: as these take
        both for the same, no two topics of Kafka's differ in nothing else.
        """
        names = [self.kafka_name(stored) for stored in self._core.topics.names()]
        return {unify(name): name for name in names if name is not None and has_collisions(name)}

    def by_id(self, topic_id: UUID) -> KafkaTopic | None:
        return self.by_id_bytes(topic_id.bytes)

    def by_id_bytes(self, topic_id: bytes) -> KafkaTopic | None:
        stored = self._names.get(topic_id)
        if stored is None:
            return None
        seen = self._seen.get(stored)
        if seen is not None and seen.settings is self._core.topics.get(stored):
            return seen
        name = self.kafka_name(stored)
        return None if name is None else self.find(name)

    def all(self) -> list[KafkaTopic]:
        """All topics that are shown, by name."""
        names = [self.kafka_name(stored) for stored in self._core.topics.names()]
        found = [self.find(name) for name in sorted(name for name in names if name is not None)]
        return [topic for topic in found if topic is not None]

    def _id_of(self, stored: str) -> UUID:
        topic_id = self._ids.get(stored)
        if topic_id is None:
            topic_id = uuid.uuid4()
            self._keep(stored, topic_id)
            self._core.store.change([(KAFKA_ID_TABLE, f"{stored}@", str(topic_id))])
            self._core.ask_turn()
        return topic_id

    # ------------------------------------------------------------------------------------- changing

    def create(
        self,
        name: str,
        partitions: int,
        configs: dict[str, str],
        done: Callable[[SluiceError | None], None] | None = None,
    ) -> KafkaTopic:
        """Make a topic; the caller has checked its name, its size and its configurations."""
        self._core.topics.put([settings_of(name, partitions, configs)], done)
        self._core.ask_turn()
        topic = self.find(name)
        assert topic is not None, "a topic that was made is seen at once"
        return topic

    def forget(self, stored: str) -> None:
        """A topic was deleted: its name may come again, its UUID does not."""
        self._seen.pop(stored, None)
        topic_id = self._ids.pop(stored, None)
        if topic_id is not None:
            self._names.pop(topic_id.bytes, None)
