"""This module writes the bodies that only administrators read: tables of settings, statistics.

Like `remoting_bodies.py`: JSON as RocketMQ writes it, with keys without quotes where it has them. A
body that cannot be read raises RequestInvalid. No IO, no clock.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import orjson

from sluice.errors import RequestInvalid
from sluice.model import Buffer
from sluice.protocol.json_members import (
    MessageQueue,
    bare_keys,
    flag,
    mapping,
    number,
    objects,
    queue_keys,
    queue_object,
    read_object,
    text,
)
from sluice.protocol.remoting_bodies import REGISTER_BYTES_MAX, DataVersion
from sluice.protocol.remoting_clients import Subscription

_INT32 = 1 << 31

# ---------------------------------------------------------------------------------------- settings


def write_topic_table(topics: Mapping[str, Mapping[str, Any]], version: DataVersion) -> bytes:
    """Topics with their settings (21)."""
    return orjson.dumps(
        {
            "dataVersion": version.members(),
            "mappingDataVersion": DataVersion().members(),
            "topicConfigTable": topics,
            "topicQueueMappingDetailMap": {},
        }
    )


def write_group_table(
    groups: Mapping[str, Mapping[str, Any]],
    forbidden: Mapping[str, Mapping[str, int]],
    version: DataVersion,
) -> bytes:
    """Groups with their settings, and what they may not do by topic (201)."""
    return orjson.dumps(
        {
            "dataVersion": version.members(),
            "forbiddenTable": forbidden,
            "subscriptionGroupTable": groups,
        }
    )


_GROUP_FLAGS = (
    *("consumeEnable", "consumeBroadcastEnable", "consumeFromMinEnable"),
    *("consumeMessageOrderly", "notifyConsumerIdsChangedEnable"),
)
_GROUP_NUMBERS = (
    *("retryQueueNums", "retryMaxTimes", "brokerId", "whichBrokerWhenConsumeSlowly"),
    *("groupSysFlag", "consumeTimeoutMinute"),
)


def read_group_config(body: Buffer) -> dict[str, Any]:
    """The settings of a group (200), every member of its type; what is unknown is left out."""
    return _group_config(read_object(body))


def read_group_configs(body: Buffer) -> list[dict[str, Any]]:
    """The settings of several groups (225)."""
    rows = objects(read_object(body, REGISTER_BYTES_MAX), "groupConfigList")
    return [_group_config(row) for row in rows]


def _group_config(members: Mapping[str, Any]) -> dict[str, Any]:
    config: dict[str, Any] = {"groupName": text(members, "groupName")}
    for name in _GROUP_FLAGS:
        if members.get(name) is not None:
            config[name] = flag(members, name)
    for name in _GROUP_NUMBERS:
        if members.get(name) is not None:
            config[name] = number(members, name)
            if not -_INT32 <= config[name] < _INT32:
                raise RequestInvalid(f"{name} does not fit into 32 bits")
    config["attributes"] = mapping(members, "attributes")
    if members.get("groupRetryPolicy") is not None:
        config["groupRetryPolicy"] = mapping(members, "groupRetryPolicy")
    return config


# -------------------------------------------------------------------------------------- statistics


class StatsSpan(NamedTuple):
    """One span of a statistic (315): sum, per second, per call."""

    total: int
    tps: float
    per_call: float

    def members(self) -> dict[str, Any]:
        return {"avgpt": self.per_call, "sum": self.total, "tps": self.tps}


def write_stats(minute: StatsSpan, hour: StatsSpan, day: StatsSpan) -> bytes:
    return orjson.dumps(
        {
            "statsDay": day.members(),
            "statsHour": hour.members(),
            "statsMinute": minute.members(),
        }
    )


def write_broker_consume_stats(
    broker_address: str, groups: Iterable[tuple[str, list[dict[str, Any]]]], behind: int
) -> bytes:
    """The progress of every group of a broker (317); rows are values of `consume_stats`."""
    return orjson.dumps(
        {
            "brokerAddr": broker_address,
            "consumeStatsList": [{group: rows} for group, rows in groups],
            "totalDiff": behind,
            "totalInflightDiff": 0,
        }
    )


def write_ha_status(log_end: int) -> bytes:
    """How far the replicas of a broker are (907): a master that has none."""
    return orjson.dumps(
        {
            "haClientRuntimeInfo": {
                "activated": False,
                "lastReadTimestamp": 0,
                "lastWriteTimestamp": 0,
                "masterFlushOffset": 0,
                "maxOffset": 0,
                "transferredByteInSecond": 0,
            },
            "haConnectionInfo": [],
            "inSyncSlaveNums": 0,
            "master": True,
            "masterCommitLogMaxOffset": log_end,
        }
    )


class TimeSpan(NamedTuple):
    """Store times of a queue: oldest, newest, consumed; how long the next one waits (303)."""

    queue: MessageQueue
    min_ms: int
    max_ms: int
    consumed_ms: int
    delay_ms: int


def write_time_spans(spans: Iterable[TimeSpan]) -> bytes:
    rows = [
        {
            "consumeTimeStamp": span.consumed_ms,
            "delayTime": span.delay_ms,
            "maxTimeStamp": span.max_ms,
            "messageQueue": queue_object(span.queue),
            "minTimeStamp": span.min_ms,
        }
        for span in spans
    ]
    return orjson.dumps({"consumeTimeSpanSet": rows})


class QueueUnit(NamedTuple):
    """One entry of a queue's index (321)."""

    position: int
    size: int
    tags_code: int


def write_queue_units(
    units: Iterable[QueueUnit],
    min_offset: int,
    max_offset: int,
    subscription: Subscription | None,
    filter_text: str | None,
) -> bytes:
    members: dict[str, Any] = {
        "maxQueueIndex": max_offset,
        "minQueueIndex": min_offset,
        "queueData": [
            {
                "eval": False,
                "physicOffset": unit.position,
                "physicSize": unit.size,
                "tagsCode": unit.tags_code,
            }
            for unit in units
        ],
    }
    if subscription is not None:
        members["subscriptionData"] = subscription.members()
    if filter_text is not None:
        members["filterData"] = filter_text
    return orjson.dumps(members)


# -------------------------------------------------------------------------------- groups and topics


def write_subscription_of(group: str, topic: str, subscription: Subscription | None) -> bytes:
    """What a group wants of a topic (345); left out where nobody is connected."""
    members: dict[str, Any] = {"group": group, "topic": topic}
    if subscription is not None:
        members["subscriptionData"] = subscription.members()
    return orjson.dumps(members)


def write_consumer_status(clients: Mapping[str, Mapping[MessageQueue, int]]) -> bytes:
    """The offsets that running consumers hold, by client (223)."""
    table = {client: queue_keys(queues.items()) for client, queues in clients.items()}
    return orjson.dumps({"consumerTable": table, "messageQueueTable": {}})


def write_forbidden(group: str, topic: str, *, readable: bool) -> bytes:
    """Whether a group may read a topic (353)."""
    return orjson.dumps({"group": group, "readable": readable, "topic": topic})


def write_reset_list(offsets: Mapping[MessageQueue, int]) -> bytes:
    """Offsets by queue in the form that C++ clients read (220)."""
    rows = [{**queue_object(queue), "offset": offset} for queue, offset in offsets.items()]
    return orjson.dumps({"offsetTable": rows})


class AssignmentQuery(NamedTuple):
    """A consumer that lets the broker divide the queues (400)."""

    topic: str
    group: str
    client_id: str
    message_model: str
    strategy: str


def read_assignment_query(body: Buffer) -> AssignmentQuery:
    members = read_object(body)
    return AssignmentQuery(
        text(members, "topic"),
        text(members, "consumerGroup"),
        text(members, "clientId"),
        text(members, "messageModel", "CLUSTERING"),
        text(members, "strategyName", "AVG"),
    )


def write_assignments(queues: Iterable[tuple[MessageQueue, str]] | None) -> bytes:
    """Queues and how they are read (400); None: the consumer keeps what it has."""
    if queues is None:
        return b"{}"
    rows = [{"messageQueue": queue_object(queue), "mode": mode} for queue, mode in queues]
    return orjson.dumps({"messageQueueAssignments": rows})


def read_request_mode(body: Buffer) -> dict[str, Any]:
    """How a group reads a topic (401), every member of its type."""
    members = read_object(body)
    count = number(members, "popShareQueueNum", 0)
    if not -_INT32 <= count < _INT32:
        raise RequestInvalid("popShareQueueNum does not fit into 32 bits")
    return {
        "consumerGroup": text(members, "consumerGroup"),
        "mode": text(members, "mode", "PULL"),
        "popShareQueueNum": count,
        "topic": text(members, "topic"),
    }


def write_request_modes(modes: Mapping[str, Mapping[str, Any]]) -> bytes:
    """How groups read topics, by topic and group (402)."""
    return orjson.dumps({"messageRequestModeMap": modes})


def write_corrections(offsets: Mapping[int, int]) -> bytes:
    """Offsets by queue (308)."""
    return orjson.dumps({"correctionOffsets": bare_keys(offsets)})


def data_version_text(version: DataVersion) -> str:
    """A data version inside a field."""
    return orjson.dumps(version.members()).decode()
