"""This module keeps the topics: their settings, their creation, and what names are allowed.

A topic's settings live in the store's state table in RocketMQ's own form, so that its broker and
ours read the same file. Deleting a topic deletes its queues: one of the same name starts anew.

This module knows no wire format; who wants to hear of changes (routes) gives a callback.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Final

from sluice.broker.settings_table import SettingsTable
from sluice.errors import MessageIllegal, SluiceError, TopicMissing
from sluice.storage.store import STATE_TOPIC, TOPIC_TABLE, Store

PERM_PRIORITY: Final = 8
PERM_READ: Final = 4
PERM_WRITE: Final = 2
PERM_INHERIT: Final = 1
UNIT: Final = 1  # bits of a topic's system flag: made by producers of a unit,
UNIT_SUBSCRIPTION: Final = 2  # or read by consumers of one

RETRY_PREFIX: Final = "%RETRY%"
DEAD_PREFIX: Final = "%DLQ%"
SYSTEM_PREFIX: Final = "rmq_sys_"
AUTO_CREATE_TOPIC: Final = "TBW102"
BENCHMARK_TOPIC: Final = "BenchmarkTest"
SCHEDULE_TOPIC: Final = "SCHEDULE_TOPIC_XXXX"
HALF_TOPIC: Final = "RMQ_SYS_TRANS_HALF_TOPIC"
OP_TOPIC: Final = "RMQ_SYS_TRANS_OP_HALF_TOPIC"
TRACE_TOPIC: Final = "RMQ_SYS_TRACE_TOPIC"
CHECK_MAX_TOPIC: Final = "TRANS_CHECK_MAX_TIME_TOPIC"
SELF_TEST_TOPIC: Final = "SELF_TEST_TOPIC"
OFFSET_MOVED_TOPIC: Final = "OFFSET_MOVED_EVENT"
TIMER_TOPIC: Final = "rmq_sys_wheel_timer"
STAGED_TOPIC: Final = "rmq_sys_sluice_staged"
REVIVE_TOPIC_PREFIX: Final = "rmq_sys_REVIVE_LOG_"  # the cluster's name follows
REVIVE_QUEUES: Final = 8

NAME_BYTES_MAX: Final = 127
LONG_NAME_BYTES_MAX: Final = 255  # retry and dead-letter topics carry a group's name
QUEUES_MAX: Final = 65_536
_NAME: Final = re.compile(r"[%|a-zA-Z0-9_-]+")

# Nobody outside may send to these: what is in them is the broker's own bookkeeping.
CLOSED_TOPICS: Final = frozenset(
    {
        SCHEDULE_TOPIC,
        HALF_TOPIC,
        OP_TOPIC,
        "RMQ_SYS_ROCKSDB_TRANS_HALF_TOPIC",
        "RMQ_SYS_ROCKSDB_TRANS_OP_HALF_TOPIC",
        CHECK_MAX_TOPIC,
        SELF_TEST_TOPIC,
        OFFSET_MOVED_TOPIC,
        STATE_TOPIC,
        TIMER_TOPIC,
        STAGED_TOPIC,
    }
)


@dataclass(frozen=True, slots=True)
class TopicSettings:
    """How a topic is set up on this broker."""

    name: str
    read_queues: int = 8
    write_queues: int = 8
    perm: int = PERM_READ | PERM_WRITE
    filter_type: str = "SINGLE_TAG"
    sys_flag: int = 0
    order: bool = False
    attributes: dict[str, str] = field(default_factory=dict)

    @property
    def readable(self) -> bool:
        return self.perm & PERM_READ != 0

    @property
    def writable(self) -> bool:
        return self.perm & PERM_WRITE != 0

    def to_json(self) -> dict[str, Any]:
        """RocketMQ's TopicConfig."""
        return {
            "attributes": self.attributes,
            "order": self.order,
            "perm": self.perm,
            "readQueueNums": self.read_queues,
            "topicFilterType": self.filter_type,
            "topicName": self.name,
            "topicSysFlag": self.sys_flag,
            "writeQueueNums": self.write_queues,
        }


def from_json(name: str, value: dict[str, Any]) -> TopicSettings:
    """Settings as RocketMQ or we wrote them; what is missing has RocketMQ's default."""
    return TopicSettings(
        name,
        int(value.get("readQueueNums", 16)),
        int(value.get("writeQueueNums", 16)),
        int(value.get("perm", 6)),
        str(value.get("topicFilterType") or "SINGLE_TAG"),
        int(value.get("topicSysFlag", 0)),
        bool(value.get("order", False)),
        dict(value.get("attributes") or {}),
    )


class Topics:
    """The topics of one broker. Belongs to the store's owner."""

    def __init__(
        self, store: Store, *, cluster_name: str, broker_name: str, trace_topic: str = TRACE_TOPIC
    ) -> None:
        """`trace_topic` may be empty: then this broker has none."""
        self._store = store
        self._table = SettingsTable(store, TOPIC_TABLE, from_json, TopicSettings.to_json)
        self._topics = self._table.rows
        # Not the store's version: that one changes with every offset that is committed.
        self._change_count = 0
        self._changed_ms = store.now_ms()
        self.on_change: Callable[[list[str]], None] = lambda names: None
        own = system_topics(cluster_name, broker_name, trace_topic)
        self.system_names = frozenset(settings.name for settings in own)
        missing = [settings for settings in own if settings.name not in self._topics]
        if missing:
            self.put(missing)

    # -------------------------------------------------------------------------------------- looking

    def get(self, name: str) -> TopicSettings | None:
        return self._topics.get(name)

    def __len__(self) -> int:
        return len(self._topics)

    def names(self) -> list[str]:
        return list(self._topics)

    def all(self) -> list[TopicSettings]:
        return list(self._topics.values())

    def is_system(self, name: str) -> bool:
        return name in self.system_names or name.startswith(SYSTEM_PREFIX)

    def data_version(self) -> dict[str, int]:
        """RocketMQ's DataVersion: it changes when a topic does or the broker starts, and only then.

        A nameserver takes over all topics when it changes, and undoes what was set there by hand.
        """
        return {
            "counter": self._change_count,
            "stateVersion": 0,
            "timestamp": self._changed_ms,
        }

    def bump(self, names: list[str] | None = None) -> None:
        """Topics changed, or something else that routes depend on: tell everybody anew."""
        self._change_count += 1
        self._changed_ms = self._store.now_ms()
        self.on_change(names or [])

    # ------------------------------------------------------------------------------------- changing

    def put(
        self,
        topics: list[TopicSettings],
        done: Callable[[SluiceError | None], None] | None = None,
    ) -> None:
        """Create topics or change their settings; raises what makes it impossible at once."""
        by_name = {settings.name: settings for settings in topics}
        self._table.put(by_name, self._changed(list(by_name), done))

    def delete(self, name: str, done: Callable[[SluiceError | None], None] | None = None) -> None:
        """Forget a topic and its queues. Its entries stay in the log until retention takes them."""
        self._table.delete(
            name, self._changed([name], done), lambda told: self._store.delete_topic(name, told)
        )

    def _changed(
        self, names: list[str], done: Callable[[SluiceError | None], None] | None
    ) -> Callable[[SluiceError | None], None]:
        def told(error: SluiceError | None) -> None:
            if error is None:
                self.bump(names)
            if done is not None:
                done(error)

        return told

    def set_default_queues(self, count: int) -> None:
        """How many queues a topic gets that a message creates, as far as its sender asks for."""
        default = self._topics[AUTO_CREATE_TOPIC]
        if (default.read_queues, default.write_queues) != (count, count):
            self.put([replace(default, read_queues=count, write_queues=count)])

    def create_by_send(
        self, name: str, default_topic: str, queue_count: int, *, allowed: bool, sys_flag: int = 0
    ) -> TopicSettings:
        """A message came for an unknown topic: made after the default topic.

        `allowed` counts for the one that all producers know: who names another one knows it, and
        somebody gave that one the permission.
        """
        default = self._topics.get(default_topic)
        allowed = allowed or default_topic != AUTO_CREATE_TOPIC
        if not allowed or default is None or not default.perm & PERM_INHERIT:
            why = "" if allowed else " (auto_create_topics is off)"
            raise TopicMissing(f"topic[{name}] not exist, apply first please!{why}")
        check_name(name)
        queues = max(1, min(queue_count, default.write_queues))
        settings = TopicSettings(
            name, queues, queues, default.perm & ~PERM_INHERIT, default.filter_type, sys_flag
        )
        self.put([settings])
        return settings

    def create_inner(
        self, name: str, queue_count: int, perm: int = 6, *, sys_flag: int = 0
    ) -> TopicSettings:
        """A topic that the broker itself needs (retry, dead letters); nothing where it is there.

        It has a queue in any case, also where a group wants no retries: it may want them later.
        """
        settings = self._topics.get(name)
        queue_count = max(1, queue_count)
        if settings is None or not min(settings.read_queues, settings.write_queues):
            settings = TopicSettings(name, queue_count, queue_count, perm, sys_flag=sys_flag)
            self.put([settings])
        return settings


def check_name(name: str) -> None:
    """Refuse what RocketMQ's clients could not use; raises MessageIllegal with its own words."""
    if not name.strip():
        raise MessageIllegal("The specified topic is blank.")
    if _NAME.fullmatch(name) is None:
        raise MessageIllegal(
            f"The specified topic: {name[:255]}, contains illegal characters, allowing only "
            "^[%|a-zA-Z0-9_-]+$"
        )
    limit = LONG_NAME_BYTES_MAX if name.startswith((RETRY_PREFIX, DEAD_PREFIX)) else NAME_BYTES_MAX
    if len(name) > limit:
        raise MessageIllegal(f"The specified topic is longer than topic max length {limit}.")


def system_topics(cluster_name: str, broker_name: str, trace_topic: str) -> list[TopicSettings]:
    """The topics that every broker has, as RocketMQ 5.5's fresh broker has them."""
    everything = PERM_READ | PERM_WRITE | PERM_INHERIT
    return [
        TopicSettings(SELF_TEST_TOPIC, 1, 1),
        TopicSettings(AUTO_CREATE_TOPIC, 8, 8, everything),
        TopicSettings(BENCHMARK_TOPIC, 1024, 1024),
        TopicSettings(cluster_name, 16, 16, everything),
        TopicSettings(broker_name, 1, 1, everything),
        TopicSettings(OFFSET_MOVED_TOPIC, 1, 1),
        TopicSettings(SCHEDULE_TOPIC, 18, 18),
        *([TopicSettings(trace_topic, 1, 1)] if trace_topic else []),
        TopicSettings(f"{cluster_name}_REPLY_TOPIC", 1, 1),
        TopicSettings(HALF_TOPIC, 1, 1),
        TopicSettings(OP_TOPIC, 1, 1),
        TopicSettings(TIMER_TOPIC, 1, 1),
        TopicSettings(STATE_TOPIC, 1, 1, PERM_READ),
        TopicSettings(
            f"{REVIVE_TOPIC_PREFIX}{cluster_name}", REVIVE_QUEUES, REVIVE_QUEUES, PERM_READ
        ),
    ]
