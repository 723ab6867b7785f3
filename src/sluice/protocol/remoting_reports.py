"""This module is the administrator's side of `remoting_admin.py`: it reads what brokers and running
consumers report, and writes the settings that administrators send.

Reports come from any RocketMQ broker, so nothing in them is trusted: a body that cannot be read
raises RequestInvalid. No IO, no clock.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import orjson

from sluice.errors import RequestInvalid
from sluice.model import Buffer
from sluice.protocol.json_members import (
    MessageQueue,
    as_number,
    as_object,
    flag,
    mapping,
    number,
    objects,
    read_object,
    read_queue_keys,
    text,
    text_map,
    texts,
)
from sluice.protocol.remoting_admin import StatsSpan
from sluice.protocol.remoting_bodies import (
    REGISTER_BYTES_MAX,
    QueueProgress,
    QueueSpan,
    TopicConfig,
    read_topic_config,
)
from sluice.protocol.remoting_clients import Subscription, read_subscription

# Versions are ordinals of a list in RocketMQ: two for each patch from 4.0.0 on, snapshot first.
_VERSION_4_0_0: Final = 212
_VERSION_HIGHER: Final = 612


def version_text(ordinal: int) -> str:
    """The name of a client's or broker's version, as RocketMQ writes it: V5_5_0."""
    if ordinal < _VERSION_4_0_0:
        return "V3"
    if ordinal >= _VERSION_HIGHER:
        return "HIGHER"
    patches, released = divmod(ordinal - _VERSION_4_0_0, 2)
    name = f"V{4 + patches // 100}_{patches // 10 % 10}_{patches % 10}"
    return name if released else f"{name}_SNAPSHOT"


def _report(body: Buffer) -> dict[str, Any]:
    """A report's object. It is larger than what clients send: a group may read many queues."""
    return read_object(body, REGISTER_BYTES_MAX)


def _decimal(members: Mapping[str, Any], name: str) -> float:
    value = members.get(name, 0)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise RequestInvalid(f"{name} is no number")
    return float(value)


# ---------------------------------------------------------------------------------------- settings


@dataclass(frozen=True, slots=True)
class GroupConfig:
    """The settings of a consumer group on one broker (200)."""

    name: str
    consume_enabled: bool = True
    from_min_enabled: bool = False
    broadcast_enabled: bool = False
    orderly: bool = False
    retry_queue_count: int = 1
    retry_max: int = 16
    broker_id: int = 0
    slow_broker_id: int = 1
    notify_changes: bool = True
    retry_policy: dict[str, Any] | None = None
    attributes: dict[str, str] = field(default_factory=dict)

    def members(self) -> dict[str, Any]:
        return {
            "attributes": self.attributes,
            "brokerId": self.broker_id,
            "consumeBroadcastEnable": self.broadcast_enabled,
            "consumeEnable": self.consume_enabled,
            "consumeFromMinEnable": self.from_min_enabled,
            "consumeMessageOrderly": self.orderly,
            "consumeTimeoutMinute": 15,
            "groupName": self.name,
            "groupRetryPolicy": self.retry_policy or {"type": "CUSTOMIZED"},
            "groupSysFlag": 0,
            "notifyConsumerIdsChangedEnable": self.notify_changes,
            "retryMaxTimes": self.retry_max,
            "retryQueueNums": self.retry_queue_count,
            "whichBrokerWhenConsumeSlowly": self.slow_broker_id,
        }


def write_group_config(group: GroupConfig) -> bytes:
    return orjson.dumps(group.members())


def read_group_config(body: Buffer) -> GroupConfig:
    """The settings of one group (352)."""
    members = _report(body)
    default = GroupConfig(text(members, "groupName"))
    policy = members.get("groupRetryPolicy")
    return GroupConfig(
        default.name,
        flag(members, "consumeEnable", default.consume_enabled),
        flag(members, "consumeFromMinEnable", default.from_min_enabled),
        flag(members, "consumeBroadcastEnable", default.broadcast_enabled),
        flag(members, "consumeMessageOrderly", default.orderly),
        number(members, "retryQueueNums", default.retry_queue_count),
        number(members, "retryMaxTimes", default.retry_max),
        number(members, "brokerId", default.broker_id),
        number(members, "whichBrokerWhenConsumeSlowly", default.slow_broker_id),
        flag(members, "notifyConsumerIdsChangedEnable", default.notify_changes),
        None if policy is None else as_object(policy, "groupRetryPolicy"),
        text_map(members, "attributes"),
    )


def write_request_mode(group: str, topic: str, mode: str, share_count: int) -> bytes:
    """How a group reads a topic (401)."""
    members = {"consumerGroup": group, "mode": mode, "topic": topic}
    return orjson.dumps({**members, "popShareQueueNum": share_count})


def read_one_topic(body: Buffer) -> TopicConfig:
    """The settings of one topic (351); a static topic's queue mapping is left out."""
    return read_topic_config(_report(body))


# ----------------------------------------------------------------------------------------- reports


class TopicStats(NamedTuple):
    """First and next offset of each queue of a topic (202)."""

    spans: dict[MessageQueue, QueueSpan]
    put_tps: float


def read_topic_stats(body: Buffer) -> TopicStats:
    members = _report(body)
    spans = {}
    for queue, value in read_queue_keys(members, "offsetTable").items():
        row = as_object(value, "a value of offsetTable")
        spans[queue] = QueueSpan(
            number(row, "minOffset"), number(row, "maxOffset"), number(row, "lastUpdateTimestamp")
        )
    return TopicStats(spans, _decimal(members, "topicPutTps"))


class ConsumeStats(NamedTuple):
    """How far a group has read each queue (208)."""

    queues: dict[MessageQueue, QueueProgress]
    tps: float

    @property
    def behind(self) -> int:
        """How many messages it has not read yet."""
        return sum(row.broker_offset - row.consumer_offset for row in self.queues.values())

    @property
    def in_flight(self) -> int:
        """How many it was handed out and has not committed yet."""
        return sum(row.pull_offset - row.consumer_offset for row in self.queues.values())


def read_consume_stats(body: Buffer) -> ConsumeStats:
    members = _report(body)
    queues = {}
    for queue, value in read_queue_keys(members, "offsetTable").items():
        row = as_object(value, "a value of offsetTable")
        queues[queue] = QueueProgress(
            number(row, "brokerOffset"),
            number(row, "consumerOffset"),
            number(row, "pullOffset", 0),
            number(row, "lastTimestamp", 0),
        )
    return ConsumeStats(queues, _decimal(members, "consumeTps"))


def read_group_list(body: Buffer) -> tuple[str, ...]:
    """The groups that read a topic (300)."""
    return texts(_report(body), "groupList")


class Stats(NamedTuple):
    """One statistic of a broker (315)."""

    minute: StatsSpan
    hour: StatsSpan
    day: StatsSpan

    @property
    def day_total(self) -> int:
        """The sum of the longest span that has one: a young broker has no day yet."""
        return self.day.total or self.hour.total or self.minute.total


def read_stats(body: Buffer) -> Stats:
    members = _report(body)
    spans = []
    for name in ("statsMinute", "statsHour", "statsDay"):
        row = mapping(members, name)
        spans.append(StatsSpan(number(row, "sum", 0), _decimal(row, "tps"), _decimal(row, "avgpt")))
    return Stats(*spans)


# -------------------------------------------------------------------------------- running consumers


class RunningInfo(NamedTuple):
    """What a running consumer tells of itself (307); tables of numbers are as it sent them."""

    properties: dict[str, str]
    subscriptions: tuple[Subscription, ...]
    queues: dict[MessageQueue, dict[str, Any]]
    popped_queues: dict[MessageQueue, dict[str, Any]]
    rates: dict[str, dict[str, Any]]  # by topic
    user: dict[str, str]
    stacks: str | None

    @property
    def consume_type(self) -> str:
        return self.properties.get("PROP_CONSUME_TYPE", "")

    @property
    def is_orderly(self) -> bool:
        return self.properties.get("PROP_CONSUMEORDERLY", "") == "true"


def read_running_info(body: Buffer) -> RunningInfo:
    members = _report(body)
    stacks = members.get("jstack")
    return RunningInfo(
        _as_texts(mapping(members, "properties")),
        tuple(read_subscription(row) for row in objects(members, "subscriptionSet")),
        _queue_rows(members, "mqTable"),
        _queue_rows(members, "mqPopTable"),
        {topic: as_object(row, topic) for topic, row in mapping(members, "statusTable").items()},
        _as_texts(mapping(members, "userConsumerInfo")),
        None if stacks is None else text(members, "jstack"),
    )


def _queue_rows(members: Mapping[str, Any], name: str) -> dict[MessageQueue, dict[str, Any]]:
    table = read_queue_keys(members, name)
    return {queue: as_object(row, f"a value of {name}") for queue, row in table.items()}


def _as_texts(table: Mapping[str, Any]) -> dict[str, str]:
    """Java's Properties hold whatever was put there: clients send flags and numbers as such."""
    names = {True: "true", False: "false"}
    return {
        name: names[value] if isinstance(value, bool) else str(value)
        for name, value in table.items()
        if value is not None
    }


class DirectResult(NamedTuple):
    """How a client consumed a message that it was told to consume now (309)."""

    result: str
    remark: str
    spent_ms: int


def read_direct_result(body: Buffer) -> DirectResult:
    members = _report(body)
    return DirectResult(
        text(members, "consumeResult", ""),
        text(members, "remark", ""),
        as_number(members.get("spentTimeMills", 0), "spentTimeMills"),
    )
