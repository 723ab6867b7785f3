"""This module knows who is connected: producers and consumers by group, and what they subscribed
to.

Clients say who they are in a heartbeat every 30 s; who is silent for 120 s, or whose connection
closes, is gone. A change of a consumer group's members or subscriptions is reported to whom it
concerns, so that they divide the queues anew at once. Members of one group that subscribe
differently are reported loudly: each would get messages that another one wanted.

Settings of groups live in the store's state table, in RocketMQ's form. This module sends nothing:
it returns what has to be told to whom. Time is an argument; a channel is whatever the caller uses
for one.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any, Final

from sluice.broker.filters import Subscription
from sluice.broker.settings_table import Done, SettingsTable
from sluice.errors import GroupMissing, MessageIllegal
from sluice.storage.store import FORBIDDEN_TABLE, GROUP_TABLE, Store

CLIENT_EXPIRED_MS: Final = 120_000
_READ: Final = 4  # RocketMQ's permission
GROUP_NAME_BYTES_MAX: Final = 120
CLIENTS_PER_GROUP_MAX: Final = 10_000
BROADCASTING: Final = "BROADCASTING"
_NAME: Final = re.compile(r"[%|a-zA-Z0-9_-]+")
SYSTEM_GROUPS: Final = (
    "TOOLS_CONSUMER",
    "FILTERSRV_CONSUMER",
    "SELF_TEST_C_GROUP",
    "CID_ONS-HTTP-PROXY",
    "CID_ONSAPI_PULL",
    "CID_ONSAPI_PERMISSION",
    "CID_ONSAPI_OWNER",
    "CID_RMQ_SYS_TRANS",
)
SYSTEM_GROUP_PREFIX: Final = "CID_RMQ_SYS_"


@dataclass(frozen=True, slots=True)
class GroupSettings:
    """How a consumer group may use this broker; RocketMQ's SubscriptionGroupConfig."""

    name: str
    consume_enabled: bool = True
    broadcast_enabled: bool = True
    from_min_enabled: bool = True
    orderly: bool = False
    retry_queues: int = 1
    retry_max: int = 16
    broker_id: int = 0
    slow_broker_id: int = 1
    notify_changes: bool = True
    sys_flag: int = 0
    consume_timeout_minutes: int = 15
    extra: dict[str, Any] = field(default_factory=dict)  # members that only RocketMQ reads

    def to_json(self) -> dict[str, Any]:
        return {
            "attributes": {},
            "groupRetryPolicy": {"type": "CUSTOMIZED"},
            **self.extra,
            "brokerId": self.broker_id,
            "consumeBroadcastEnable": self.broadcast_enabled,
            "consumeEnable": self.consume_enabled,
            "consumeFromMinEnable": self.from_min_enabled,
            "consumeMessageOrderly": self.orderly,
            "consumeTimeoutMinute": self.consume_timeout_minutes,
            "groupName": self.name,
            "groupSysFlag": self.sys_flag,
            "notifyConsumerIdsChangedEnable": self.notify_changes,
            "retryMaxTimes": self.retry_max,
            "retryQueueNums": self.retry_queues,
            "whichBrokerWhenConsumeSlowly": self.slow_broker_id,
        }


_KNOWN_MEMBERS: Final = frozenset(GroupSettings("").to_json()) - {"attributes", "groupRetryPolicy"}


def group_from_json(name: str, value: dict[str, Any]) -> GroupSettings:
    """Settings as RocketMQ or we wrote them."""
    default = GroupSettings(name)
    return GroupSettings(
        name,
        bool(value.get("consumeEnable", default.consume_enabled)),
        bool(value.get("consumeBroadcastEnable", default.broadcast_enabled)),
        bool(value.get("consumeFromMinEnable", default.from_min_enabled)),
        bool(value.get("consumeMessageOrderly", default.orderly)),
        int(value.get("retryQueueNums", default.retry_queues)),
        int(value.get("retryMaxTimes", default.retry_max)),
        int(value.get("brokerId", default.broker_id)),
        int(value.get("whichBrokerWhenConsumeSlowly", default.slow_broker_id)),
        bool(value.get("notifyConsumerIdsChangedEnable", default.notify_changes)),
        int(value.get("groupSysFlag", default.sys_flag)),
        int(value.get("consumeTimeoutMinute", default.consume_timeout_minutes)),
        {key: member for key, member in value.items() if key not in _KNOWN_MEMBERS},
    )


@dataclass(slots=True)
class Client:
    """One connected client of a group."""

    client_id: str
    channel: Hashable
    language: str
    version: int
    heard_ms: int


# Broadcasting consumers of one machine have one name, each its own channel.
Connected = tuple[str, Hashable]


@dataclass(slots=True)
class ConsumerGroup:
    """The consumers of one group that are connected now."""

    name: str
    consume_type: str = "CONSUME_PASSIVELY"
    message_model: str = "CLUSTERING"
    from_where: str = "CONSUME_FROM_LAST_OFFSET"
    connections: dict[Connected, Client] = field(default_factory=dict)
    # By name: of those that have one name, who came last.
    members: dict[str, Client] = field(default_factory=dict)
    subscriptions: dict[str, Subscription] = field(default_factory=dict)
    # What each connected one said last: members of one group should all say the same.
    wanted: dict[Connected, dict[str, Subscription]] = field(default_factory=dict)

    def disagreements(self) -> list[str]:
        """Topics on which the members do not agree, each with who wants what."""
        topics: dict[str, dict[str, list[str]]] = {}
        for (client_id, _), subscriptions in self.wanted.items():
            for topic, subscription in subscriptions.items():
                topics.setdefault(topic, {}).setdefault(subscription.label, []).append(client_id)
        result = []
        for topic, expressions in topics.items():
            missing = [who[0] for who, said in self.wanted.items() if topic not in said]
            if missing:
                expressions = {**expressions, "(not subscribed)": missing}
            if len(expressions) > 1:
                what = "; ".join(
                    f"{text!r} by {', '.join(who)}" for text, who in expressions.items()
                )
                result.append(f"{topic}: {what}")
        return result


class Clients:
    """Everybody who is connected to one broker."""

    def __init__(self) -> None:
        self.producers: dict[str, dict[str, Client]] = {}
        self.consumers: dict[str, ConsumerGroup] = {}
        self._disagreed: dict[str, list[str]] = {}

    def producer_said(self, group: str, client: Client) -> None:
        """A producer's heartbeat."""
        members = self.producers.setdefault(group, {})
        if client.client_id not in members and len(members) >= CLIENTS_PER_GROUP_MAX:
            raise MessageIllegal(f"group {group} has {CLIENTS_PER_GROUP_MAX} producers already")
        members[client.client_id] = client

    def consumer_said(
        self,
        group: str,
        client: Client,
        *,
        consume_type: str,
        message_model: str,
        from_where: str,
        subscriptions: list[Subscription],
    ) -> tuple[bool, list[str]]:
        """A consumer's heartbeat. Returns whether the group changed, and new disagreements."""
        members = self.consumers.setdefault(group, ConsumerGroup(group))
        who = (client.client_id, client.channel)
        changed = who not in members.connections
        # Who connects anew may be known by the old connection still: there is room for both.
        limit = CLIENTS_PER_GROUP_MAX * (2 if client.client_id in members.members else 1)
        if changed and len(members.connections) >= limit:
            raise MessageIllegal(f"group {group} has {CLIENTS_PER_GROUP_MAX} consumers already")
        if changed or _is_of(members.members[client.client_id], client.channel):
            members.members[client.client_id] = client
        members.connections[who] = client
        members.consume_type = consume_type
        members.message_model = message_model
        members.from_where = from_where
        said = {subscription.topic: subscription for subscription in subscriptions}
        for topic, subscription in said.items():
            old = members.subscriptions.get(topic)
            if old is None:
                changed = True
            if old is None or subscription.version >= old.version:
                members.subscriptions[topic] = subscription
        for topic in [t for t in members.subscriptions if t not in said]:
            # As RocketMQ: the last heartbeat decides which topics the group reads.
            del members.subscriptions[topic]
            changed = True
        members.wanted[who] = said
        before = self._disagreed.get(group)
        disagreements = self._compare(members)
        return changed, disagreements if disagreements != before else []

    def _compare(self, members: ConsumerGroup) -> list[str]:
        """Remember whether the members of a group agree; returns on what they do not."""
        disagreements = members.disagreements()
        if disagreements:
            self._disagreed[members.name] = disagreements
        else:
            self._disagreed.pop(members.name, None)
        return disagreements

    def producer(self, client_id: str) -> Client | None:
        """A connected producer by its own name, whatever its group."""
        for members in self.producers.values():
            if client_id in members:
                return members[client_id]
        return None

    def groups_of(self, topic: str) -> list[str]:
        """The consumer groups whose connected members subscribe to a topic."""
        return [name for name, group in self.consumers.items() if topic in group.subscriptions]

    def subscription(self, group: str, topic: str) -> Subscription | None:
        """What the connected members of a group want of a topic."""
        members = self.consumers.get(group)
        return None if members is None else members.subscriptions.get(topic)

    def reads(self, group: str, topic: str) -> bool:
        """Whether a group reads a topic, as far as its members say; who is not there may.

        Who pops a topic reads what comes again of it without a word.
        """
        members = self.consumers.get(group)
        if members is None or not members.subscriptions or topic in members.subscriptions:
            return True
        return topic.startswith(f"%RETRY%{group}_")

    def disagreements(self) -> dict[str, list[str]]:
        """Groups whose members subscribe differently now."""
        return dict(self._disagreed)

    def leave(
        self, client_id: str, channel: Hashable, producer_group: str, consumer_group: str
    ) -> list[str]:
        """A client says good-bye, for itself only. Returns the consumer groups that changed."""
        members = self.producers.get(producer_group)
        if members is not None:
            if _is_of(members.get(client_id), channel):
                del members[client_id]
            if not members:
                del self.producers[producer_group]
        group = self.consumers.get(consumer_group)
        client = None if group is None else group.connections.get((client_id, channel))
        if group is None or client is None or not self._forget(group, client):
            return []
        return [consumer_group]

    def closed(self, channel: Hashable) -> list[str]:
        """A connection is gone, and who spoke over it. Returns the groups that changed."""
        return self._remove(lambda client: client.channel is channel)

    def expire(self, now_ms: int) -> list[str]:
        """Who was silent too long is gone. Returns the groups that changed."""
        return self._remove(lambda client: now_ms - client.heard_ms > CLIENT_EXPIRED_MS)

    def is_consumer(self, group: str, client_id: str) -> bool:
        """Whether a client is a connected member of a consumer group."""
        members = self.consumers.get(group)
        return members is not None and client_id in members.members

    def carry(self, jump_ms: int) -> None:
        """The clock jumps: everybody who is here was heard of as lately as before."""
        consumers = [c for group in self.consumers.values() for c in group.connections.values()]
        producers = [c for members in self.producers.values() for c in members.values()]
        for client in {id(client): client for client in (*consumers, *producers)}.values():
            client.heard_ms += jump_ms

    def _remove(self, gone: Callable[[Client], bool]) -> list[str]:
        for name, members in list(self.producers.items()):
            for client_id in [c.client_id for c in members.values() if gone(c)]:
                del members[client_id]
            if not members:
                del self.producers[name]
        changed = []
        for name, group in list(self.consumers.items()):
            leaving = [client for client in group.connections.values() if gone(client)]
            names_gone = [self._forget(group, client) for client in leaving]
            if any(names_gone):
                changed.append(name)
        return changed

    def _forget(self, group: ConsumerGroup, client: Client) -> bool:
        """Returns whether its name is gone with it: then the others have its queues."""
        who = (client.client_id, client.channel)
        del group.connections[who]
        del group.wanted[who]
        twins = [each for name, each in group.connections.items() if name[0] == client.client_id]
        if not twins:
            del group.members[client.client_id]
        elif group.members[client.client_id] is client:
            group.members[client.client_id] = twins[-1]
        if group.connections:
            self._compare(group)
        else:
            del self.consumers[group.name]
            self._disagreed.pop(group.name, None)
        return not twins


class Groups:
    """The settings of the consumer groups of one broker."""

    def __init__(self, store: Store, *, auto_create: Callable[[], bool]) -> None:
        self._store = store
        self._auto_create = auto_create
        self._table = SettingsTable(store, GROUP_TABLE, group_from_json, GroupSettings.to_json)
        self._groups = self._table.rows
        # By group and topic: bits of RocketMQ's permissions that the group does not have there.
        self._forbidden: SettingsTable[dict[str, int]] = SettingsTable(
            store, FORBIDDEN_TABLE, lambda name, value: dict(value), lambda value: value
        )

    def get(self, name: str) -> GroupSettings | None:
        """The settings of a group; of RocketMQ's own groups always, others as they were made."""
        settings = self._groups.get(name)
        if settings is None and is_system_group(name):
            return GroupSettings(name)
        return settings

    def require(self, name: str) -> GroupSettings:
        """The settings of a group, made now where that is allowed; raises GroupMissing."""
        settings = self.get(name)
        if settings is None:
            if not self._auto_create():
                raise GroupMissing(
                    f"subscription group [{name}] does not exist, apply first please!"
                )
            try:
                check_group(name)
            except MessageIllegal as error:
                missing = f"subscription group [{name[:255]}] does not exist: {error}"
                raise GroupMissing(missing) from None
            settings = GroupSettings(name)
            self.put([settings])
        return settings

    def all(self) -> list[GroupSettings]:
        return list(self._groups.values())

    def data_version(self) -> dict[str, int]:
        state = self._store.state
        return {"counter": state.version, "stateVersion": 0, "timestamp": state.changed_ms}

    def put(self, groups: list[GroupSettings], done: Done = lambda error: None) -> None:
        """Create groups or change their settings."""
        self._table.put({settings.name: settings for settings in groups}, done)

    def delete(self, name: str, done: Done = lambda error: None) -> None:
        if name in self._forbidden.rows:
            self._forbidden.delete(name, lambda error: None)
        self._table.delete(name, done)

    # ------------------------------------------------------------------------------------ forbidden

    def may_read(self, group: str, topic: str) -> bool:
        """Whether nobody has forbidden the group to read the topic."""
        rows = self._forbidden.rows
        return not rows or not rows.get(group, {}).get(topic, 0) & _READ

    def forbid(self, group: str, topic: str, *, readable: bool, done: Done) -> None:
        """Forbid a group to read a topic, or allow it again."""
        row = {**self._forbidden.rows.get(group, {})}
        row[topic] = row.get(topic, 0) & ~_READ if readable else row.get(topic, 0) | _READ
        row = {name: bits for name, bits in row.items() if bits}
        if row:
            self._forbidden.put({group: row}, done)
        else:
            self._forbidden.delete(group, done)

    def forbidden(self) -> dict[str, dict[str, int]]:
        return dict(self._forbidden.rows)


def _is_of(client: Client | None, channel: Hashable) -> bool:
    return client is not None and client.channel is channel


def is_system_group(name: str) -> bool:
    return name in SYSTEM_GROUPS or name.startswith(SYSTEM_GROUP_PREFIX)


def check_group(name: str) -> None:
    """Refuse a name that RocketMQ's clients could not use."""
    if not name.strip():
        raise MessageIllegal("the specified group is blank")
    if len(name) > GROUP_NAME_BYTES_MAX:
        raise MessageIllegal(
            f"the specified group is longer than group max length: {GROUP_NAME_BYTES_MAX}."
        )
    if _NAME.fullmatch(name) is None:
        raise MessageIllegal(
            f"the specified group[{name}] contains illegal characters, allowing only "
            "^[%|a-zA-Z0-9_-]+$"
        )
