"""This module reads and writes the bodies that say who is connected and what they subscribe to.

Heartbeats, queue locks, consumer lists and connections. Clients differ: Go leaves members out,
sends tag codes as strings and versions in nanoseconds; a missing expression type means tags; C++
has numbers where others have names. A body that cannot be read raises RequestInvalid: the frame
around it is whole, so the connection stays.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import orjson

from sluice.errors import RequestInvalid
from sluice.model import Buffer
from sluice.protocol.json_members import (
    MessageQueue,
    as_number,
    as_object,
    flag,
    items,
    mapping,
    number,
    objects,
    queue_object,
    read_object,
    read_queue,
    text,
    texts,
)

TAG: Final = "TAG"
SQL92: Final = "SQL92"
_INT32: Final = 1 << 31


class Subscription(NamedTuple):
    """What a group wants of a topic. `version` only grows; its unit is the client's affair."""

    topic: str
    expression: str = "*"
    version: int = 0
    tags: tuple[str, ...] = ()
    codes: tuple[int, ...] = ()  # Java's hashes of the tags
    expression_type: str = TAG
    class_filter: bool = False

    def members(self) -> dict[str, Any]:
        return {
            "classFilterMode": self.class_filter,
            "codeSet": list(self.codes),
            "expressionType": self.expression_type,
            "subString": self.expression,
            "subVersion": self.version,
            "tagsSet": list(self.tags),
            "topic": self.topic,
        }


def read_subscription(members: Mapping[str, Any]) -> Subscription:
    codes = tuple(as_number(code, "a code of codeSet") for code in items(members, "codeSet"))
    if not all(-_INT32 <= code < _INT32 for code in codes):
        raise RequestInvalid("a code of codeSet does not fit into 32 bits")
    return Subscription(
        text(members, "topic"),
        text(members, "subString", "*"),
        number(members, "subVersion", 0),
        texts(members, "tagsSet"),
        codes,
        text(members, "expressionType", TAG) or TAG,
        flag(members, "classFilterMode"),
    )


class ConsumerData(NamedTuple):
    """One consumer group of a client."""

    group: str
    consume_type: str  # CONSUME_ACTIVELY (pull), CONSUME_PASSIVELY (push), CONSUME_POP
    message_model: str  # CLUSTERING, BROADCASTING, LITE_SELECTIVE
    consume_from_where: str
    subscriptions: tuple[Subscription, ...] = ()
    unit_mode: bool = False

    def members(self) -> dict[str, Any]:
        return {
            "consumeFromWhere": self.consume_from_where,
            "consumeType": self.consume_type,
            "groupName": self.group,
            "messageModel": self.message_model,
            "subscriptionDataSet": [row.members() for row in self.subscriptions],
            "unitMode": self.unit_mode,
        }


class Heartbeat(NamedTuple):
    """A client's groups. With a fingerprint other than 0 it may leave out subscriptions."""

    client_id: str
    producer_groups: tuple[str, ...] = ()
    consumers: tuple[ConsumerData, ...] = ()
    fingerprint: int = 0
    without_subscriptions: bool = False


# In the order in which RocketMQ counts them: clients in C++ send the number, all others the name.
CONSUME_TYPES: Final = ("CONSUME_ACTIVELY", "CONSUME_PASSIVELY", "CONSUME_POP")
MESSAGE_MODELS: Final = ("BROADCASTING", "CLUSTERING")
CONSUME_FROM: Final = (
    "CONSUME_FROM_LAST_OFFSET",
    "CONSUME_FROM_LAST_OFFSET_AND_FROM_MIN_WHEN_BOOT_FIRST",
    "CONSUME_FROM_MIN_OFFSET",
    "CONSUME_FROM_MAX_OFFSET",
    "CONSUME_FROM_FIRST_OFFSET",
    "CONSUME_FROM_TIMESTAMP",
)


def _choice(row: Mapping[str, Any], name: str, names: Sequence[str], default: str) -> str:
    value = row.get(name)
    if isinstance(value, int) and not isinstance(value, bool):
        if not 0 <= value < len(names):
            raise RequestInvalid(f"{name} is {value}, of {len(names)} choices")
        return names[value]
    return text(row, name, default)


def read_heartbeat(body: Buffer) -> Heartbeat:
    members = read_object(body)
    consumers = tuple(
        ConsumerData(
            text(row, "groupName"),
            _choice(row, "consumeType", CONSUME_TYPES, "CONSUME_PASSIVELY"),
            _choice(row, "messageModel", MESSAGE_MODELS, "CLUSTERING"),
            _choice(row, "consumeFromWhere", CONSUME_FROM, "CONSUME_FROM_LAST_OFFSET"),
            tuple(read_subscription(one) for one in objects(row, "subscriptionDataSet")),
            flag(row, "unitMode"),
        )
        for row in objects(members, "consumerDataSet")
    )
    return Heartbeat(
        text(members, "clientID"),
        tuple(text(row, "groupName") for row in objects(members, "producerDataSet")),
        consumers,
        number(members, "heartbeatFingerprint", 0),
        flag(members, "withoutSub"),
    )


def write_heartbeat(heartbeat: Heartbeat) -> bytes:
    return orjson.dumps(
        {
            "clientID": heartbeat.client_id,
            "consumerDataSet": [consumer.members() for consumer in heartbeat.consumers],
            "heartbeatFingerprint": heartbeat.fingerprint,
            "producerDataSet": [{"groupName": group} for group in heartbeat.producer_groups],
            "withoutSub": heartbeat.without_subscriptions,
        }
    )


class ClientCheck(NamedTuple):
    """A subscription that is checked before its consumer starts (46)."""

    client_id: str
    group: str
    subscription: Subscription


def read_client_check(body: Buffer) -> ClientCheck:
    members = read_object(body)
    subscription = as_object(members.get("subscriptionData"), "subscriptionData")
    return ClientCheck(
        text(members, "clientId"), text(members, "group"), read_subscription(subscription)
    )


# -------------------------------------------------------------------------------------------- locks


class LockRequest(NamedTuple):
    """Queues that a client wants for itself, or gives back (41, 42)."""

    client_id: str
    group: str
    queues: tuple[MessageQueue, ...]
    only_this_broker: bool = False


def read_lock_request(body: Buffer) -> LockRequest:
    members = read_object(body)
    return LockRequest(
        text(members, "clientId"),
        text(members, "consumerGroup"),
        tuple(read_queue(queue) for queue in objects(members, "mqSet")),
        flag(members, "onlyThisBroker"),
    )


def write_lock_request(request: LockRequest) -> bytes:
    return orjson.dumps(
        {
            "clientId": request.client_id,
            "consumerGroup": request.group,
            "mqSet": [queue_object(queue) for queue in request.queues],
            "onlyThisBroker": request.only_this_broker,
        }
    )


def write_locked_queues(queues: Iterable[MessageQueue]) -> bytes:
    return orjson.dumps({"lockOKMQSet": [queue_object(queue) for queue in queues]})


def read_locked_queues(body: Buffer) -> tuple[MessageQueue, ...]:
    return tuple(read_queue(queue) for queue in objects(read_object(body), "lockOKMQSet"))


# -------------------------------------------------------------------------------------- connections


class ConnectionInfo(NamedTuple):
    """One connected client."""

    client_id: str
    client_address: str
    language: str
    version: int

    def members(self) -> dict[str, Any]:
        return {
            "clientAddr": self.client_address,
            "clientId": self.client_id,
            "language": self.language,
            "version": self.version,
        }


def read_connections(members: Mapping[str, Any]) -> tuple[ConnectionInfo, ...]:
    return tuple(
        ConnectionInfo(
            text(row, "clientId"),
            text(row, "clientAddr"),
            text(row, "language", "JAVA"),
            number(row, "version", 0),
        )
        for row in objects(members, "connectionSet")
    )


class ConsumerConnection(NamedTuple):
    """The connected consumers of a group and what they subscribe to (203).

    RocketMQ's body has one subscription for each topic, the newest. Where the members do not agree,
    Sluice's says so in a member more, which other clients leave unread.
    """

    connections: tuple[ConnectionInfo, ...]
    consume_type: str
    message_model: str
    consume_from_where: str
    subscriptions: dict[str, Subscription]
    disagreements: tuple[str, ...] = ()  # a topic each, with who wants what


def write_consumer_connection(group: ConsumerConnection) -> bytes:
    table = group.subscriptions.items()
    members: dict[str, Any] = {
        "connectionSet": [row.members() for row in group.connections],
        "consumeFromWhere": group.consume_from_where,
        "consumeType": group.consume_type,
        "messageModel": group.message_model,
        "subscriptionTable": {topic: one.members() for topic, one in table},
    }
    if group.disagreements:
        members["unequalSubscriptions"] = list(group.disagreements)
    return orjson.dumps(members)


def read_consumer_connection(body: Buffer) -> ConsumerConnection:
    members = read_object(body)
    table = mapping(members, "subscriptionTable")
    return ConsumerConnection(
        read_connections(members),
        text(members, "consumeType", ""),
        text(members, "messageModel", ""),
        text(members, "consumeFromWhere", ""),
        {topic: read_subscription(as_object(one, topic)) for topic, one in table.items()},
        texts(members, "unequalSubscriptions"),
    )


def write_producer_connection(connections: Iterable[ConnectionInfo]) -> bytes:
    return orjson.dumps({"connectionSet": [row.members() for row in connections]})


def read_producer_connection(body: Buffer) -> tuple[ConnectionInfo, ...]:
    return read_connections(read_object(body))


def write_producer_table(
    groups: Mapping[str, Iterable[ConnectionInfo]], seen_ms: Mapping[str, int]
) -> bytes:
    """All producers by group (328); `seen_ms` has the last heartbeat of each client id."""
    data = {
        group: [
            {
                "clientId": row.client_id,
                "language": row.language,
                "lastUpdateTimestamp": seen_ms.get(row.client_id, 0),
                "remoteIP": f"/{row.client_address}",
                "version": row.version,
            }
            for row in rows
        ]
        for group, rows in groups.items()
    }
    return orjson.dumps({"data": data})


def write_consumer_ids(client_ids: Iterable[str]) -> bytes:
    """The members of a group (38): clients sort them and allocate queues by their place."""
    return orjson.dumps({"consumerIdList": list(client_ids)})


def read_consumer_ids(body: Buffer) -> tuple[str, ...]:
    return texts(read_object(body), "consumerIdList")
