"""This module makes, changes, deletes and looks at consumer groups and who is connected."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from sluice.client.admin import DEAD_PREFIX
from sluice.client.administration.everywhere import Outcomes, each, settled
from sluice.client.administration.topics import TopicDesk
from sluice.client.administration.values import (
    GroupDeleted,
    GroupHealth,
    GroupOverview,
    GroupSet,
    KafkaGroup,
    TopicDeleted,
    read_kafka_group,
)
from sluice.client.group_checks import (
    RETRY_PREFIX,
    GroupMember,
    consumer_queues,
    disagreements_of,
    rebalance_problems,
    stuck_queues,
)
from sluice.client.simple import Refused
from sluice.clock import wall_ms
from sluice.errors import ConfigError, GroupMissing, NotFound, PartlyDone, SluiceError
from sluice.protocol import remoting_reports as reports
from sluice.protocol.json_members import MessageQueue, objects, read_object
from sluice.protocol.remoting_clients import ConsumerConnection
from sluice.protocol.remoting_codes import RequestCode as Request
from sluice.protocol.remoting_codes import ResponseCode as Response
from sluice.protocol.remoting_reports import GroupConfig


class GroupDesk(TopicDesk):
    """Consumer groups of a cluster."""

    async def create_group(
        self,
        group: str | GroupConfig,
        *,
        broker: str | None = None,
        cluster: str | None = None,
    ) -> GroupSet:
        """Make a group, or set all its settings anew, on a broker, a cluster or everywhere."""
        config = GroupConfig(group) if isinstance(group, str) else group
        outcomes = await each(
            await self.places(broker, cluster), lambda address: self.put_group(address, config)
        )
        return settled(GroupSet(config, outcomes), outcomes)

    async def update_group(
        self,
        group: str,
        *,
        broker: str | None = None,
        cluster: str | None = None,
        **changes: Any,
    ) -> GroupSet:
        """Change some settings of a group, by the names of `GroupConfig`; the rest stays."""
        allowed = GroupConfig.__dataclass_fields__.keys() - {"name"}
        unknown = sorted(changes.keys() - allowed)
        if unknown:
            names = ", ".join(sorted(allowed))
            raise ConfigError(f"no setting of a group is called {unknown[0]}; there are {names}")
        last = GroupConfig(group)

        async def change(address: str) -> None:
            nonlocal last
            # Attributes that are sent are changes: without any, they stay as they are.
            kept: dict[str, Any] = {"attributes": {}, **changes}
            last = replace(await self.group_config(address, group), **kept)
            await self.put_group(address, last)

        outcomes = await each(await self.places(broker, cluster), change)
        return settled(GroupSet(last, outcomes), outcomes)

    async def group_config(self, address: str, group: str) -> GroupConfig:
        """The settings of a group on one broker; raises GroupMissing."""
        answer = await self.ask(address, Request.GET_SUBSCRIPTIONGROUP_CONFIG, {"group": group})
        if answer.code == Response.SUBSCRIPTION_GROUP_NOT_EXIST:
            raise GroupMissing(f"{address} has no group {group}; make it with create_group")
        if answer.code != Response.SUCCESS:
            raise Refused(answer.code, answer.remark, f"{address}: the settings of {group}")
        return reports.read_group_config(answer.body)

    async def group_configs(self, group: str) -> dict[str, GroupConfig]:
        """The settings of a group, by the address of each broker that knows it."""
        found = {}
        for address in await self.masters():
            try:
                found[address] = await self.group_config(address, group)
            except GroupMissing:
                continue
        if not found:
            raise GroupMissing(f"no broker knows group {group}; make it with create_group")
        return found

    async def set_group_mode(
        self,
        group: str,
        topic: str,
        mode: str,
        *,
        share_count: int = 0,
        broker: str | None = None,
        cluster: str | None = None,
    ) -> Outcomes:
        """Say whether the consumers of a group pull a topic ("PULL") or pop it ("POP")."""
        if mode not in ("PULL", "POP"):
            raise ConfigError(f"mode {mode!r} is neither PULL nor POP")
        outcomes = await each(
            await self.places(broker, cluster),
            lambda address: self.put_mode(address, group, topic, mode, share_count),
        )
        return settled(outcomes, outcomes)

    async def delete_group(
        self,
        group: str,
        *,
        offsets: bool = False,
        broker: str | None = None,
        cluster: str | None = None,
    ) -> GroupDeleted:
        """Delete a group, with its offsets if asked to; from a cluster, with its retry topics."""
        outcomes = await each(
            await self.places(broker, cluster),
            lambda address: self.remove_group(address, group, offsets=offsets),
        )
        topics: list[TopicDeleted] = []
        if broker is None:
            # Messages that wait for another try belong to the group: nobody else reads them.
            clusters = [cluster] if cluster is not None else await self.clusters()
            topics = [
                await self._delete_own(f"{prefix}{group}", name)
                for name in clusters
                for prefix in (RETRY_PREFIX, DEAD_PREFIX)
            ]
        tables = [table for one in topics for table in (one.brokers, one.nameservers)]
        return settled(GroupDeleted(group, outcomes, topics), outcomes, *tables)

    async def _delete_own(self, topic: str, cluster: str) -> TopicDeleted:
        try:
            return await self.delete_topic(topic, cluster=cluster)
        except PartlyDone as failure:
            deleted: TopicDeleted = failure.result
            return deleted

    async def clusters(self) -> list[str]:
        """The names of all clusters."""
        return sorted({broker.cluster for broker in await self.brokers()})

    # --------------------------------------------------------------------------------- looking

    async def lag(self, group: str, topic: str | None = None) -> int:
        """How many messages a group has not read yet, of all its topics or of one."""
        return max(0, (await self.consume_stats(group, topic)).behind)

    async def group_overviews(self) -> list[GroupOverview]:
        """Every group that a consumer ever connected with, each in one line."""
        found = []
        for group in await self.groups():
            connected = stats = None
            error = ""
            try:
                stats = await self.consume_stats(group)
                connected = await self.consumer_connection(group)
            except NotFound:
                pass  # offline
            except SluiceError as failure:
                error = str(failure)
            found.append(GroupOverview(group, connected, stats, error))
        return found

    async def kafka_groups(self, group: str | None = None) -> list[KafkaGroup]:
        """Groups of Kafka's clients, or the one of a name; a broker that knows none has none."""
        found = []
        for broker in await self.brokers(None):
            after = ""
            while 0 in broker.addresses:
                ext: dict[str, object] = {"after": after, **({"group": group} if group else {})}
                try:
                    answer = await self.done(
                        broker.addresses[0],
                        Request.SLUICE_LIST_KAFKA_GROUPS,
                        ext,
                        what="the list of Kafka's groups",
                    )
                except Refused as refused:
                    if refused.code != Response.REQUEST_CODE_NOT_SUPPORTED:
                        raise
                    break  # one of Apache's
                rows = objects(read_object(answer.body), "groups")
                found += [read_kafka_group(broker.name, row) for row in rows]
                after = answer.ext.get("after", "")
                if not after or group:
                    break
        return found

    async def queue_owners(self, group: str) -> dict[MessageQueue, str]:
        """Which connected client reads which queue, as they say themselves."""
        try:
            _, members = await self.group_members(group)
        except SluiceError:
            return {}
        return {
            queue: member.connection.client_id
            for member in members
            if member.info is not None
            for queue in member.info.queues
        }

    async def group_health(
        self, group: str, *, stacks: bool = False, address: str | None = None
    ) -> GroupHealth:
        """Ask the consumers of a group what they do, and whether they agree."""
        connected, members = await self.group_members(group, stacks=stacks, address=address)
        problems = stuck_queues(members, wall_ms())
        if connected.message_model == "CLUSTERING":
            problems += rebalance_problems(members, await self._shared_queues(connected))
        return GroupHealth(connected, members, all_disagreements(connected, members), problems)

    async def _shared_queues(self, connected: ConsumerConnection) -> dict[str, list[MessageQueue]]:
        """The queues that the members share, of each topic; a retry topic may not be there yet."""
        queues = {}
        for topic in connected.subscriptions:
            if topic.startswith(RETRY_PREFIX):
                continue
            try:
                queues[topic] = consumer_queues(topic, await self.queues(topic, writing=False))
            except SluiceError:
                continue  # nothing to share
        return queues


def all_disagreements(connected: ConsumerConnection, members: list[GroupMember]) -> list[str]:
    """What the members' own words show; else what the broker heard in their heartbeats."""
    return disagreements_of(members) or list(connected.disagreements)
