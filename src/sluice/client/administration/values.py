"""This module holds what an administrator is told, where no protocol has a type for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from sluice.client.administration.everywhere import Outcomes
from sluice.client.group_checks import GroupMember
from sluice.errors import ProtocolError
from sluice.protocol.json_members import MessageQueue, number, objects, text
from sluice.protocol.remoting_bodies import TopicConfig
from sluice.protocol.remoting_clients import ConsumerConnection
from sluice.protocol.remoting_reports import ConsumeStats, GroupConfig, version_text

_HOUR_MS: Final = 3_600_000

# ------------------------------------------------------------------------------------------ topics


class TopicSet(NamedTuple):
    """A topic that was made or changed. `order_config`: what clients of an ordered one look up."""

    config: TopicConfig
    brokers: Outcomes
    order_config: str | None = None


class PermissionSet(NamedTuple):
    """A topic whose permission was changed, with what each broker had before."""

    topic: str
    permission: int
    before: dict[str, int]
    brokers: Outcomes


class TopicDeleted(NamedTuple):
    """Where a topic was deleted."""

    topic: str
    cluster: str
    brokers: Outcomes
    nameservers: Outcomes


class TopicReaders(NamedTuple):
    """A topic, where it is and who reads it."""

    topic: str
    clusters: list[str]
    groups: list[str]


class TopicActivity(NamedTuple):
    """What came into a topic and went out to one group; without a group where none reads it."""

    topic: str
    group: str
    behind: int
    in_tps: float
    out_tps: float | None
    in_day: int
    out_day: int | None


# ------------------------------------------------------------------------------------------ groups


class GroupSet(NamedTuple):
    """A group that was made or changed."""

    config: GroupConfig
    brokers: Outcomes


class GroupDeleted(NamedTuple):
    """Where a group was deleted, and the topics that were its own."""

    group: str
    brokers: Outcomes
    topics: list[TopicDeleted]


class GroupHealth(NamedTuple):
    """The members of a group, whether they want the same, and what is wrong with them."""

    connected: ConsumerConnection
    members: list[GroupMember]
    disagreements: list[str]
    problems: list[str]


@dataclass(frozen=True, slots=True)
class GroupOverview:
    """A group in one line: who is connected and how far behind they are."""

    group: str
    connected: ConsumerConnection | None  # None: nobody
    stats: ConsumeStats | None
    error: str = ""

    @property
    def version(self) -> str:
        """The oldest version among the members."""
        if self.error:
            return "UNKNOWN"
        if self.connected is None:
            return "OFFLINE"
        return version_text(min(row.version for row in self.connected.connections))

    @property
    def behind(self) -> int:
        return 0 if self.stats is None else self.stats.behind


@dataclass(frozen=True, slots=True)
class KafkaGroup:
    """A group of Kafka's clients at one broker."""

    group: str
    broker_name: str
    state: str
    protocol: str
    members: list[dict[str, str]]
    offsets: dict[tuple[str, int], tuple[int, int, int]]  # of the broker, the group; last commit

    @property
    def behind(self) -> int:
        return sum(high - offset for high, offset, _ in self.offsets.values())


def read_kafka_group(broker_name: str, row: Mapping[str, Any]) -> KafkaGroup:
    """A group out of a broker's answer."""
    offsets = {
        (text(each, "topic"), number(each, "queueId")): (
            number(each, "brokerOffset"),
            number(each, "consumerOffset"),
            number(each, "lastTimestamp"),
        )
        for each in objects(row, "offsets")
    }
    names = ("memberId", "instanceId", "clientId", "host")
    members = [{name: text(each, name, "") for name in names} for each in objects(row, "members")]
    return KafkaGroup(
        *(text(row, "group"), broker_name, text(row, "state"), text(row, "protocol", "")),
        *(members, offsets),
    )


# ----------------------------------------------------------------------------------------- brokers


@dataclass(frozen=True, slots=True)
class BrokerStatus:
    """One replica of a broker; `runtime` has all that it says, `error` why it says nothing."""

    cluster: str
    name: str
    broker_id: int
    address: str
    runtime: dict[str, str] = field(default_factory=dict)
    error: str = ""

    @property
    def version(self) -> str:
        return self.runtime.get("brokerVersionDesc", "")

    @property
    def in_tps(self) -> float:
        return self._rate("putTps")

    @property
    def out_tps(self) -> float:
        return self._rate("getTransferredTps")

    @property
    def lock_ms(self) -> int:
        return int(self.number("pageCacheLockTimeMills"))

    @property
    def disk_ratio(self) -> float:
        return self.number("commitLogDiskRatio")

    @property
    def is_active(self) -> bool:
        return self.runtime.get("brokerActive") == "true"

    def hours(self, now_ms: int) -> float:
        """How far its oldest message lies back."""
        oldest_ms = self.number("earliestMessageTimeStamp", "-1")
        return max(0.0, now_ms - oldest_ms) / _HOUR_MS if oldest_ms > 0 else 0.0

    def between(self, name: str, first: str, last: str) -> int:
        """What was counted between two moments that it keeps."""
        return int(self.number(f"{name}{last}") - self.number(f"{name}{first}"))

    def number(self, name: str, default: str = "0") -> float:
        return _number(self.runtime.get(name, default))

    def _rate(self, name: str) -> float:
        """The rate of the last ten seconds: the first of three."""
        return _number((self.runtime.get(name) or "0").split(" ")[0])


def _number(value: str) -> float:
    try:
        return float(value)
    except ValueError:
        return 0.0


class WritePermissionSet(NamedTuple):
    """A broker that was taken out of sending or back into it, with how many topics changed."""

    broker_name: str
    topic_counts: dict[str, int]
    nameservers: Outcomes


# ----------------------------------------------------------------------------------------- offsets

Offsets = dict[MessageQueue, int]


# ------------------------------------------------------------------- what Sluice's brokers tell


class DeadLetter(NamedTuple):
    """A message that was given up, without its body. Of an origin that is not known: None."""

    broker_name: str
    queue_id: int
    offset: int
    message_id: str  # its offset id
    unique_key: str | None
    keys: str | None
    tags: str | None
    origin_topic: str
    origin_message_id: str
    origin_queue_id: int | None
    origin_offset: int | None
    born_ms: int
    dead_ms: int
    tried_times: int
    body_bytes: int
    is_resent: bool


# The members of a dead letter, in the order of the fields behind its broker's name.
LETTER_MEMBERS: Final = {
    "queueId": "queue_id",
    "offset": "offset",
    "msgId": "message_id",
    "uniqKey": "unique_key",
    "keys": "keys",
    "tags": "tags",
    "originTopic": "origin_topic",
    "originMsgId": "origin_message_id",
    "originQueueId": "origin_queue_id",
    "originOffset": "origin_offset",
    "bornTimestamp": "born_ms",
    "deadTimestamp": "dead_ms",
    "reconsumeTimes": "tried_times",
    "bodyBytes": "body_bytes",
    "resent": "is_resent",
}


class Resent(NamedTuple):
    """What became of one dead letter that was to be sent again."""

    broker_name: str
    queue_id: int
    offset: int
    outcome: str  # "resent", "already resent", or why not
    remark: str = ""
    message_id: str = ""  # of the copy

    @property
    def is_fine(self) -> bool:
        return self.outcome in FINE_OUTCOMES


FINE_OUTCOMES: Final = ("resent", "already resent")


class ResendReport(NamedTuple):
    """How many dead letters came to which outcome, and those that were not sent."""

    counts: dict[str, int]
    failed: list[Resent]


class DelayedMessage(NamedTuple):
    """A message that waits for its time, without its body."""

    broker_name: str
    topic: str
    queue_id: int
    due_ms: int
    delay_level: int  # 0: it has a time of its own
    unique_key: str
    keys: str
    message_id: str  # its offset id
    body_bytes: int
    store_ms: int


DELAYED_MEMBERS: Final = {
    "topic": "topic",
    "queueId": "queue_id",
    "dueTimestamp": "due_ms",
    "delayLevel": "delay_level",
    "uniqueKey": "unique_key",
    "keys": "keys",
    "offsetMsgId": "message_id",
    "bodySize": "body_bytes",
    "storeTimestamp": "store_ms",
}


@dataclass(slots=True)
class DelayTotals:
    """How many messages wait in all the brokers that were asked."""

    timer_count: int = 0
    level_count: int = 0


class DelayedMessages(NamedTuple):
    """The first of the messages that wait, and how many there are."""

    messages: list[DelayedMessage]
    totals: DelayTotals


def from_members(
    kind: Any, names: Mapping[str, str], broker_name: str, row: Mapping[str, Any]
) -> Any:
    """A row that a broker sent as a value of this kind; raises ProtocolError."""
    try:
        return kind(
            broker_name=broker_name, **{name: row[member] for member, name in names.items()}
        )
    except (KeyError, TypeError) as error:
        raise ProtocolError(f"{broker_name} sent a row that cannot be read: {error}") from None
