"""This module knows which broker serves which topic: the table behind every route.

    broker group (name) --> addresses by id; 0 leads, the others are copies
    topic --> for each broker group: how many queues, what may be done with them
    (cluster, address) --> when the broker was last heard of, over which channel, its data version

The rules are those of RocketMQ's RouteInfoManager. The leader's topics are taken over at its first
registration, and those that differ from what it said before whenever its data version does; what
was set here by hand holds meanwhile. A topic that it no longer names stays, unless `forget_topics`
says otherwise. One address has one id in its group. Where a leader is gone, the copy with the
lowest id may act for it, to read only.

Pure and deterministic: time is an argument, a channel is whatever the caller uses for one, and what
is returned never changes later. Nothing is sent: who has to be told something is a return value.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from sluice.errors import Busy, SluiceError
from sluice.protocol.remoting_bodies import (
    BrokerData,
    DataVersion,
    QueueData,
    Registration,
    Route,
    TopicConfig,
)

MASTER_ID: Final = 0
PERM_WRITE: Final = 2
PERM_READ: Final = 4
UNIT: Final = 1  # bits of a topic's system flag
UNIT_SUBSCRIPTION: Final = 2
BROKER_TIMEOUT_MS: Final = 120_000
# Topics of this name let the copies of a broker find each other; nobody acts for a leader there.
_MEMBER_TOPIC_PREFIX: Final = "rmq_sys_SYNC_BROKER_MEMBER_"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """What is a matter of configuration. The limits keep one peer from filling the memory."""

    broker_timeout_ms: int = BROKER_TIMEOUT_MS
    acting_master: bool = False
    forget_topics: bool = False
    brokers_max: int = 10_000
    entries_max: int = 1_000_000  # of a topic on a broker group


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokerEntry:
    """Who registers."""

    cluster: str
    name: str
    address: str
    broker_id: int
    ha_address: str = ""
    timeout_ms: int | None = None
    acting_master: bool | None = None  # None: a broker from before 5.0
    zone: str | None = None
    everywhere: str = ""  # "0.0.0.0" or "::": it listens on all addresses of our own machine


class Notice(NamedTuple):
    """The lowest id of a broker group changed: what to tell to whom."""

    addresses: tuple[str, ...]
    lowest_id: int
    lowest_address: str
    offline_address: str | None
    ha_address: str | None


class Sizes(NamedTuple):
    """How much a table holds; a route is a topic on a broker group."""

    clusters: int
    brokers: int
    topics: int
    routes: int


class Registered(NamedTuple):
    """What a registration led to; the addresses are the leader's, told to its copies."""

    is_new: bool
    ha_address: str | None = None
    master_address: str | None = None
    notice: Notice | None = None
    ignored: str = ""  # why nothing was changed


class Gone(NamedTuple):
    """A broker that was taken out of the table."""

    cluster: str
    address: str
    channel: Hashable
    silent_ms: int
    notice: Notice | None


@dataclass(slots=True)
class _Group:
    cluster: str
    addresses: dict[int, str]
    acting_master: bool = False
    zone: str | None = None

    def lowest_id(self) -> int:
        return min(self.addresses)


@dataclass(slots=True)
class _Live:
    heard_ms: int
    timeout_ms: int
    version: DataVersion
    channel: Hashable
    ha_address: str
    everywhere: str


class RouteTable:
    """All brokers and topics that one nameserver knows."""

    def __init__(self, rules: Rules | None = None) -> None:
        self.rules = rules if rules is not None else Rules()
        self._topics: dict[str, dict[str, QueueData]] = {}
        self._entry_count = 0  # the sum of the lengths of those
        # By broker group and topic: what it said last, which is not always what holds.
        self._told: dict[str, dict[str, QueueData]] = {}
        self._groups: dict[str, _Group] = {}
        self._clusters: dict[str, set[str]] = {}
        self._live: dict[tuple[str, str], _Live] = {}
        self._filter_servers: dict[tuple[str, str], tuple[str, ...]] = {}
        self._mappings: dict[str, dict[str, Any]] = {}  # of static topics, as they came

    def sizes(self) -> Sizes:
        return Sizes(len(self._clusters), len(self._live), len(self._topics), self._entry_count)

    # -------------------------------------------------------------------------------- registration

    def register(
        self, entry: BrokerEntry, registration: Registration, channel: Hashable, now_ms: int
    ) -> Registered:
        """A broker and its topics. Raises SluiceError where it has to register otherwise."""
        key = (entry.cluster, entry.address)
        group = self._groups.get(entry.name)
        before = {} if group is None else group.addresses
        lowest_before = min(before, default=MASTER_ID)
        # A copy that was promoted: its address leaves the old id before it gets the new one.
        kept = {i: a for i, a in before.items() if a != entry.address or i == entry.broker_id}
        conflict = self._conflict(entry, kept.get(entry.broker_id), registration.data_version)
        if conflict:
            assert group is not None
            group.addresses = kept
            self._live.pop(key, None)
            return Registered(False, ignored=conflict)
        if entry.broker_id not in kept and len(registration.topics) == 1:
            # One topic alone is told only by a broker that has told all of them before.
            raise SluiceError("register broker failed")
        self._check_room(entry, registration)

        if group is None:
            group = self._groups[entry.name] = _Group(entry.cluster, {})
        self._clusters.setdefault(entry.cluster, set()).add(entry.name)
        group.acting_master = bool(entry.acting_master)
        group.zone = entry.zone
        is_first = entry.broker_id not in kept
        group.addresses = {**kept, entry.broker_id: entry.address}
        if self._speaks_for_group(entry, group):
            self._take_topics(entry, group, registration, is_first=is_first)
        is_new = key not in self._live
        timeout_ms = entry.timeout_ms
        self._live[key] = _Live(
            now_ms,
            self.rules.broker_timeout_ms if timeout_ms is None else timeout_ms,
            registration.data_version,
            channel,
            entry.ha_address,
            entry.everywhere,
        )
        self._filter_servers.pop(key, None)
        if registration.filter_servers:
            self._filter_servers[key] = registration.filter_servers
        notice = None
        if entry.broker_id < lowest_before:
            notice = _notice(group, offline_address=None, ha_address=entry.ha_address)
        return Registered(is_new, *self._master_of(entry, group), notice)

    def _conflict(self, entry: BrokerEntry, holder: str | None, version: DataVersion) -> str:
        """Why another address keeps the id; empty where it does not."""
        if holder is None or holder == entry.address:
            return ""
        live = self._live.get((entry.cluster, holder))
        if live is None or live.version.state_version <= version.state_version:
            return ""
        return (
            f"{holder} has the id {entry.broker_id} of {entry.name} "
            f"with state {live.version.state_version}, newer than {version.state_version}"
        )

    def _check_room(self, entry: BrokerEntry, registration: Registration) -> None:
        if (entry.cluster, entry.address) not in self._live:
            if len(self._live) >= self.rules.brokers_max:
                raise Busy(f"{self.rules.brokers_max} brokers are registered (brokers_max)")
        elif not registration.topics and not registration.queue_mappings:
            return
        new_count = sum(entry.name not in self._topics.get(t, ()) for t in registration.topics)
        new_count += sum(topic not in self._mappings for topic in registration.queue_mappings)
        self._check_entries(new_count)

    def _check_entries(self, new_count: int) -> None:
        count = self._entry_count + len(self._mappings) + new_count
        if new_count and count > self.rules.entries_max:
            raise Busy(f"routes would have {count} entries, over {self.rules.entries_max}")

    def _speaks_for_group(self, entry: BrokerEntry, group: _Group) -> bool:
        if entry.broker_id == MASTER_ID:
            return True
        return entry.acting_master is not None and entry.broker_id == group.lowest_id()

    def _take_topics(
        self, entry: BrokerEntry, group: _Group, registration: Registration, *, is_first: bool
    ) -> None:
        live = self._live.get((entry.cluster, entry.address))
        is_first = is_first or live is None
        changed = live is None or is_first or live.version != registration.data_version
        if self.rules.forget_topics and not registration.queue_mappings:
            for topic_name in self._topics_of(entry.name) - registration.topics.keys():
                self._drop(topic_name, entry.name)
        read_only = entry.broker_id != MASTER_ID and group.acting_master
        told = self._told.setdefault(entry.name, {})
        for topic in registration.topics.values():
            is_known = entry.name in self._topics.get(topic.name, ())
            if not changed and is_known:
                continue
            queue = _queue_data(entry.name, topic, read_only=read_only)
            # A broker tells all its topics when one of them changes: the others stay as they are
            # here, or every change would give a broker back to producers that was taken from them.
            if is_first or not is_known or queue != told.get(topic.name):
                self._put(topic.name, queue)
                told[topic.name] = queue
        if changed:
            for topic_name, info in registration.queue_mappings.items():
                self._mappings.setdefault(topic_name, {})[entry.name] = info

    def _master_of(self, entry: BrokerEntry, group: _Group) -> tuple[str | None, str | None]:
        """Where a copy finds its leader: (for replication, for requests)."""
        if entry.broker_id == MASTER_ID:
            return None, None
        address = group.addresses.get(MASTER_ID)
        live = None if address is None else self._live.get((entry.cluster, address))
        return (None, None) if live is None else (live.ha_address, address)

    def register_topic(self, topic: str, queues: Iterable[QueueData]) -> bool:
        """One topic more, of brokers that are known; False where one of them is not."""
        queues = list(queues)
        if any(queue.broker_name not in self._groups for queue in queues):
            return False
        known = self._topics.get(topic, {})
        self._check_entries(len({queue.broker_name for queue in queues} - known.keys()))
        for queue in queues:
            self._put(topic, queue)
        return True

    def _put(self, topic: str, queue: QueueData) -> None:
        queues = self._topics.setdefault(topic, {})
        self._entry_count += queue.broker_name not in queues
        queues[queue.broker_name] = queue

    def _drop(self, topic: str, broker_name: str) -> None:
        queues = self._topics.get(topic)
        if queues is not None and queues.pop(broker_name, None) is not None:
            self._entry_count -= 1
            self._told.get(broker_name, {}).pop(topic, None)
            if not queues:
                del self._topics[topic]

    # ------------------------------------------------------------------------------------- leaving

    def unregister(self, cluster: str, address: str, name: str, broker_id: int) -> Notice | None:
        """A broker stops. Its topics go with the last copy of its group."""
        self._live.pop((cluster, address), None)
        self._filter_servers.pop((cluster, address), None)
        group = self._groups.get(name)
        if group is None:
            return None
        was_lowest = bool(group.addresses) and broker_id == group.lowest_id()
        group.addresses = {i: a for i, a in group.addresses.items() if a != address}
        if not group.addresses:
            self._remove_group(name)
            return None
        if group.acting_master and MASTER_ID not in group.addresses:
            for topic in self._topics_of(name):
                queue = self._topics[topic][name]
                self._topics[topic][name] = queue._replace(perm=queue.perm & ~PERM_WRITE)
        if was_lowest and group.acting_master:
            return _notice(group, offline_address=address, ha_address=None)
        return None

    def _remove_group(self, name: str) -> None:
        del self._groups[name]
        for cluster, names in list(self._clusters.items()):
            names.discard(name)
            if not names:
                del self._clusters[cluster]
        for topic in self._topics_of(name):
            self._drop(topic, name)
        self._told.pop(name, None)

    def lost(self, channel: Hashable, now_ms: int) -> list[Gone]:
        """A channel is gone, and with it every broker that last registered over it."""
        keys = [key for key, live in self._live.items() if live.channel is channel]
        return [self._gone(key, now_ms) for key in keys]

    def expire(self, now_ms: int) -> list[Gone]:
        """Take out the brokers that were silent for too long."""
        keys = [k for k, live in self._live.items() if live.heard_ms + live.timeout_ms < now_ms]
        return [self._gone(key, now_ms) for key in keys]

    def _gone(self, key: tuple[str, str], now_ms: int) -> Gone:
        cluster, address = key
        live = self._live[key]
        notice = None
        for name, group in list(self._groups.items()):
            ids = [i for i, a in group.addresses.items() if a == address]
            if group.cluster == cluster and ids:
                notice = self.unregister(cluster, address, name, ids[0])
                break
        self._live.pop(key, None)
        self._filter_servers.pop(key, None)
        return Gone(cluster, address, live.channel, now_ms - live.heard_ms, notice)

    # --------------------------------------------------------------------------------- being alive

    def heard(self, cluster: str, address: str, now_ms: int) -> None:
        """A broker is alive; one that is not registered is not known by this."""
        live = self._live.get((cluster, address))
        if live is not None:
            live.heard_ms = now_ms

    def version_of(self, cluster: str, address: str) -> DataVersion | None:
        """The data version that a broker last registered with."""
        live = self._live.get((cluster, address))
        return None if live is None else live.version

    # ------------------------------------------------------------------------------ administration

    def wipe_write_permission(self, name: str) -> int:
        """Take a broker out of sending, until it is given back or comes anew. How many topics it
        had; those that it makes later are not among them.
        """
        return self._change_permission(name, lambda perm: perm & ~PERM_WRITE)

    def add_write_permission(self, name: str) -> int:
        return self._change_permission(name, lambda _: PERM_READ | PERM_WRITE)

    def _change_permission(self, name: str, change: Callable[[int], int]) -> int:
        topics = self._topics_of(name)
        for topic in topics:
            queue = self._topics[topic][name]
            self._topics[topic][name] = queue._replace(perm=change(queue.perm))
        return len(topics)

    def delete_topic(self, topic: str, cluster: str = "") -> None:
        """Forget a topic, on all brokers or on those of a cluster, until it is registered again."""
        names = self._clusters.get(cluster, set()) if cluster else self._topics.get(topic, {})
        for name in list(names):
            self._drop(topic, name)
        if topic not in self._topics:
            self._mappings.pop(topic, None)

    # ------------------------------------------------------------------------------------- looking

    def route(self, topic: str) -> Route | None:
        """Which brokers serve a topic; None where none does."""
        queues = self._topics.get(topic, {})
        brokers = [self._broker_data(name) for name in sorted(queues) if name in self._groups]
        if not brokers:
            return None
        if self.rules.acting_master and not topic.startswith(_MEMBER_TOPIC_PREFIX):
            brokers = [_with_acting_master(broker, queues[broker.name].perm) for broker in brokers]
        filter_servers = {}
        if self._filter_servers:
            filter_servers = {
                address: self._filter_servers.get((broker.cluster, address))
                for broker in brokers
                for address in broker.addresses.values()
            }
        mappings = self._mappings.get(topic)
        return Route(
            tuple(brokers),
            tuple(queues[name] for name in sorted(queues)),
            filter_servers=filter_servers,
            queue_mappings=None if mappings is None else dict(mappings),
        )

    def dialled(self, broker: BrokerData, host: str) -> BrokerData:
        """A group as a client sees it that reached this machine at `host`: a copy that listens
        there on every address is to be reached at the same one.
        """
        addresses = {}
        for broker_id, address in broker.addresses.items():
            live = self._live.get((broker.cluster, address))
            everywhere = live.everywhere if live is not None and host else ""
            if everywhere and (":" not in host or everywhere == "::"):
                _, _, port = address.rpartition(":")
                address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
            addresses[broker_id] = address
        return broker._replace(addresses=addresses)

    def brokers(self) -> list[BrokerData]:
        """All broker groups."""
        return [self._broker_data(name) for name in sorted(self._groups)]

    def member_group(self, cluster: str, name: str) -> BrokerData:
        """The copies of one broker; without addresses where it is not known."""
        group = self._groups.get(name)
        return BrokerData(cluster, name, {} if group is None else dict(group.addresses))

    def topics(self) -> list[str]:
        return sorted(self._topics)

    def topics_of_cluster(self, cluster: str) -> list[str]:
        names = self._clusters.get(cluster, set())
        return sorted(t for t, queues in self._topics.items() if not names.isdisjoint(queues))

    def topics_by_flag(self, bits: int, without_bits: int = 0) -> list[str]:
        """Topics whose system flag has all of `bits` and none of `without_bits`."""
        found = []
        for topic in sorted(self._topics):
            flag = next(iter(self._topics[topic].values())).sys_flag
            if flag & bits == bits and not flag & without_bits:
                found.append(topic)
        return found

    def system_topics(self, host: str = "") -> tuple[list[str], str | None]:
        """The names of clusters and brokers, which are topics too, and the address of a broker, as
        it is seen by a client that reached this machine at `host`.
        """
        names = {*self._clusters, *(name for group in self._clusters.values() for name in group)}
        for broker in self.brokers():
            for address in self.dialled(broker, host).addresses.values():
                return sorted(names), address
        return sorted(names), None

    def _broker_data(self, name: str) -> BrokerData:
        group = self._groups[name]
        addresses = dict(sorted(group.addresses.items()))
        return BrokerData(group.cluster, name, addresses, group.acting_master, group.zone)

    def _topics_of(self, name: str) -> set[str]:
        return {topic for topic, queues in self._topics.items() if name in queues}


def in_zone(route: Route, zone: str) -> Route:
    """The part of a route that a client of this zone shall use; groups without a leader stay."""
    kept = tuple(
        broker
        for broker in route.brokers
        if MASTER_ID not in broker.addresses or (broker.zone or "").lower() == zone.lower()
    )
    removed = {broker.name: broker for broker in route.brokers if broker not in kept}
    gone = {address for broker in removed.values() for address in broker.addresses.values()}
    return route._replace(
        brokers=kept,
        queues=tuple(queue for queue in route.queues if queue.broker_name not in removed),
        filter_servers={a: row for a, row in route.filter_servers.items() if a not in gone},
    )


def _queue_data(name: str, topic: TopicConfig, *, read_only: bool) -> QueueData:
    perm = topic.perm & ~PERM_WRITE if read_only else topic.perm
    return QueueData(name, topic.read_queue_count, topic.write_queue_count, perm, topic.sys_flag)


def _with_acting_master(broker: BrokerData, perm: int) -> BrokerData:
    """The copy with the lowest id as the leader, where there is none and nobody may write."""
    addresses = broker.addresses
    if not broker.acting_master or MASTER_ID in addresses or perm & PERM_WRITE:
        return broker
    lowest = min(addresses)
    acting = {(MASTER_ID if i == lowest else i): a for i, a in addresses.items()}
    return broker._replace(addresses=acting)


def _notice(group: _Group, *, offline_address: str | None, ha_address: str | None) -> Notice:
    lowest = group.lowest_id()
    # After a loss all that are left are told; a new lowest one is told to the others.
    told = [
        address
        for broker_id, address in sorted(group.addresses.items())
        if offline_address is not None or len(group.addresses) == 1 or broker_id != lowest
    ]
    return Notice(tuple(told), lowest, group.addresses[lowest], offline_address, ha_address)
