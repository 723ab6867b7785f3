"""This module makes, changes, deletes and looks at topics."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from sluice.client.admin import DEAD_PREFIX, ORDER_NAMESPACE, AdminRequests, addresses_of
from sluice.client.administration.everywhere import each, settled
from sluice.client.administration.values import (
    PermissionSet,
    TopicActivity,
    TopicDeleted,
    TopicReaders,
    TopicSet,
)
from sluice.client.group_checks import RETRY_PREFIX
from sluice.errors import ConfigError, SluiceError
from sluice.protocol.remoting_bodies import TopicConfig


def attribute_changes(attributes: Mapping[str, str] | str) -> str:
    """Attributes to set, or changes as mqadmin writes them: "+name=value,-name"."""
    if isinstance(attributes, str):
        return attributes
    return ",".join(f"+{name}={value}" for name, value in attributes.items())


class TopicDesk(AdminRequests):
    """Topics of a cluster."""

    async def places(self, broker: str | None, cluster: str | None) -> list[str]:
        """The address that was named, or the masters of the cluster that was named, or of all."""
        if broker is not None and cluster is not None:
            raise ConfigError("name a broker's address or a cluster, not both")
        return [broker] if broker is not None else await self.masters(cluster)

    async def create_topic(
        self,
        topic: str | TopicConfig,
        *,
        queues: int | None = None,
        attributes: Mapping[str, str] | str = "",
        broker: str | None = None,
        cluster: str | None = None,
    ) -> TopicSet:
        """Make a topic, or set all its settings anew, on a broker, a cluster or everywhere.

        Attributes are a table, or changes as mqadmin writes them: "+name=value,-name".
        """
        config = TopicConfig(topic, 8, 8) if isinstance(topic, str) else topic
        if queues is not None:
            config = replace(config, read_queue_count=queues, write_queue_count=queues)
        changes = attribute_changes(attributes)
        addresses = await self.places(broker, cluster)
        outcomes = await each(addresses, lambda address: self.put_topic(address, config, changes))
        order_config = None
        if config.order:
            done = {address for address, error in outcomes.items() if not error}
            order_config = await self._set_order(config, cluster, done)
        return settled(TopicSet(config, outcomes, order_config), outcomes)

    async def _set_order(
        self, config: TopicConfig, cluster: str | None, addresses: set[str]
    ) -> str:
        """Tell the nameservers which queues an ordered topic has, as clients look it up there."""
        names = [b.name for b in await self.brokers() if b.addresses.get(0) in addresses]
        known: dict[str, str] = {}
        if cluster is None:
            old = await self.value(ORDER_NAMESPACE, config.name) or ""
            known = {part.partition(":")[0]: part for part in old.split(";") if part}
        known |= {name: f"{name}:{config.write_queue_count}" for name in names}
        value = ";".join(known.values())
        for nameserver in self.nameservers:
            await self.put_value(nameserver, ORDER_NAMESPACE, config.name, value)
        return value

    async def update_topic(
        self, topic: str, *, attributes: Mapping[str, str] | str = "", **changes: Any
    ) -> TopicSet:
        """Change some settings of a topic, by the names of `TopicConfig`, wherever it is."""
        allowed = TopicConfig.__dataclass_fields__.keys() - {"name", "attributes"}
        unknown = sorted(changes.keys() - allowed)
        if unknown:
            names = ", ".join(sorted(allowed))
            raise ConfigError(f"no setting of a topic is called {unknown[0]}; there are {names}")
        wanted = attribute_changes(attributes)
        last = TopicConfig(topic)

        async def change(address: str) -> None:
            nonlocal last
            last = replace(await self.topic_config(address, topic), **changes)
            await self.put_topic(address, last, wanted)

        outcomes = await each(addresses_of((await self.route(topic)).brokers), change)
        return settled(TopicSet(last, outcomes), outcomes)

    async def set_topic_permission(
        self,
        topic: str,
        permission: int,
        *,
        broker: str | None = None,
        cluster: str | None = None,
    ) -> PermissionSet:
        """Change what may be done with a topic (2 writing, 4 reading, 6 both), nothing else."""
        before: dict[str, int] = {}

        async def change(address: str) -> None:
            # Only the permission changes: the rest is what this broker has now.
            config = await self.topic_config(address, topic)
            before[address] = config.perm
            await self.put_topic(address, replace(config, perm=permission, attributes={}))

        outcomes = await each(await self.places(broker, cluster), change)
        return settled(PermissionSet(topic, permission, before, outcomes), outcomes)

    async def delete_topic(self, topic: str, *, cluster: str | None = None) -> TopicDeleted:
        """Delete a topic from the brokers of a cluster first, then its routes.

        Without a cluster, it has to be on one cluster only.
        """
        if cluster is None:
            clusters = sorted({one.cluster for one in (await self.route(topic)).brokers})
            if len(clusters) != 1:
                raise ConfigError(f"{topic} is on {', '.join(clusters)}: name one with cluster=")
            cluster = clusters[0]
        name = cluster
        brokers = await each(
            await self.masters(name), lambda address: self.remove_topic(address, topic)
        )
        nameservers = await each(
            self.nameservers, lambda address: self.remove_route(address, topic, name)
        )
        return settled(TopicDeleted(topic, name, brokers, nameservers), brokers, nameservers)

    # --------------------------------------------------------------------------------- looking

    async def topic_configs(self, topic: str) -> dict[str, TopicConfig]:
        """The settings of a topic, by the address of each broker that has it."""
        addresses = addresses_of((await self.route(topic)).brokers)
        return {address: await self.topic_config(address, topic) for address in addresses}

    async def topic_readers(self) -> list[TopicReaders]:
        """All topics but those of groups' own, with their clusters and who reads them."""
        listed = []
        for topic in await self.topics():
            if topic.startswith((RETRY_PREFIX, DEAD_PREFIX)):
                continue
            clusters: list[str] = []
            groups: list[str] = []
            try:
                route = await self.route(topic)
                clusters = sorted({broker.cluster for broker in route.brokers})
                groups = await self.groups_of_topic(topic)
            except SluiceError:
                pass  # topics of the nameserver's own have neither
            listed.append(TopicReaders(topic, clusters, groups))
        return listed

    async def topic_activity(self, topic: str | None = None) -> list[TopicActivity]:
        """What came in and went out, a row for each group that reads a topic; of one or all."""
        if topic is not None:
            return await self._activity_of(topic)
        rows: list[TopicActivity] = []
        for name in await self.topics():
            if name.startswith((RETRY_PREFIX, DEAD_PREFIX)):
                continue
            try:
                rows += await self._activity_of(name)
            except SluiceError:
                continue  # topics of the nameserver's own have no route
        return rows

    async def _activity_of(self, topic: str) -> list[TopicActivity]:
        if topic.startswith((RETRY_PREFIX, DEAD_PREFIX)):
            return []
        addresses = addresses_of((await self.route(topic)).brokers)
        in_tps, in_day = await self._sum(addresses, "TOPIC_PUT_NUMS", topic)
        rows = []
        for group in await self.groups_of_topic(topic) or [""]:
            out_tps, out_day = None, None
            behind = 0
            if group:
                key = f"{topic}@{group}"
                out_tps, out_day = await self._sum(addresses, "GROUP_GET_NUMS", key)
                behind = max(0, (await self.consume_stats(group, topic)).behind)
            rows.append(TopicActivity(topic, group, behind, in_tps, out_tps, in_day, out_day))
        return rows

    async def _sum(self, addresses: list[str], name: str, key: str) -> tuple[float, int]:
        found = [await self.stats(address, name, key) for address in addresses]
        counted = [stats for stats in found if stats is not None]
        return sum((one.minute.tps for one in counted), 0.0), sum(one.day_total for one in counted)
