"""This module is the blocking face of the administrator's client: `sluice.Admin`.

It has the methods of `sluice.aio.Admin` that docs/client.md lists, with the same words; a test
compares them. Every call waits for the loop's thread.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from typing import Any, Self, TypeVar

from sluice.client.admin import Track
from sluice.client.administration import admin
from sluice.client.administration.everywhere import Outcomes
from sluice.client.administration.offsets import When
from sluice.client.administration.values import (
    BrokerStatus,
    DeadLetter,
    DelayedMessage,
    DelayedMessages,
    GroupDeleted,
    GroupHealth,
    GroupOverview,
    GroupSet,
    Offsets,
    PermissionSet,
    ResendReport,
    TopicActivity,
    TopicDeleted,
    TopicReaders,
    TopicSet,
    WritePermissionSet,
)
from sluice.client.group_checks import GroupMember
from sluice.client.messages import Sent, StoredMessage
from sluice.client.sync.loop_thread import loop_thread
from sluice.protocol.json_members import MessageQueue
from sluice.protocol.remoting_bodies import BrokerData, Route, TopicConfig
from sluice.protocol.remoting_clients import ConnectionInfo, ConsumerConnection
from sluice.protocol.remoting_reports import (
    ConsumeStats,
    DirectResult,
    GroupConfig,
    RunningInfo,
    TopicStats,
)
from sluice.protocol.remoting_transactions import OpenHalf

Item = TypeVar("Item")


class Admin:
    """One cluster, for its administrator: `with Admin("host:9876") as admin`."""

    def __init__(self, nameservers: str | Sequence[str] | None = None, **options: Any) -> None:
        self._thread = loop_thread()
        self._aio = admin.Admin(nameservers, **options)

    def start(self) -> None:
        """Find the nameservers; raises NoNameserver where none is known."""
        self._thread.run(self._aio.start())

    def close(self) -> None:
        """Close all connections."""
        self._thread.run(self._aio.close())

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def nameservers(self) -> list[str]:
        """The nameservers that are asked."""
        return self._aio.nameservers

    def _each(self, items: AsyncIterator[Item]) -> Iterator[Item]:
        """One after the other, fetched when it is asked for."""

        async def following() -> tuple[Item, ...]:
            async for item in items:
                return (item,)
            return ()

        while found := self._thread.run(following()):
            yield found[0]

    # -------------------------------------------------------------------------------------- topics

    def topics(self) -> list[str]:
        """The names of all topics, sorted."""
        return self._thread.run(self._aio.topics())

    def create_topic(
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
        return self._thread.run(
            self._aio.create_topic(
                topic, queues=queues, attributes=attributes, broker=broker, cluster=cluster
            )
        )

    def update_topic(
        self, topic: str, *, attributes: Mapping[str, str] | str = "", **changes: Any
    ) -> TopicSet:
        """Change some settings of a topic, by the names of `TopicConfig`, wherever it is."""
        return self._thread.run(self._aio.update_topic(topic, attributes=attributes, **changes))

    def set_topic_permission(
        self, topic: str, permission: int, *, broker: str | None = None, cluster: str | None = None
    ) -> PermissionSet:
        """Change what may be done with a topic (2 writing, 4 reading, 6 both), nothing else."""
        return self._thread.run(
            self._aio.set_topic_permission(topic, permission, broker=broker, cluster=cluster)
        )

    def delete_topic(self, topic: str, *, cluster: str | None = None) -> TopicDeleted:
        """Delete a topic from the brokers of a cluster first, then its routes.

        Without a cluster, it has to be on one cluster only.
        """
        return self._thread.run(self._aio.delete_topic(topic, cluster=cluster))

    def route(self, topic: str) -> Route:
        """Where a topic is; raises TopicMissing."""
        return self._thread.run(self._aio.route(topic))

    def topic_configs(self, topic: str) -> dict[str, TopicConfig]:
        """The settings of a topic, by the address of each broker that has it."""
        return self._thread.run(self._aio.topic_configs(topic))

    def topic_stats(self, topic: str, route_of: str | None = None) -> TopicStats:
        """First and next offset of every queue; the route may be another topic's."""
        return self._thread.run(self._aio.topic_stats(topic, route_of))

    def groups_of_topic(self, topic: str) -> list[str]:
        """The groups that read a topic, connected or not."""
        return self._thread.run(self._aio.groups_of_topic(topic))

    def topic_readers(self) -> list[TopicReaders]:
        """All topics but those of groups' own, with their clusters and who reads them."""
        return self._thread.run(self._aio.topic_readers())

    def topic_activity(self, topic: str | None = None) -> list[TopicActivity]:
        """What came in and went out, a row for each group that reads a topic; of one or all."""
        return self._thread.run(self._aio.topic_activity(topic))

    # -------------------------------------------------------------------------------------- groups

    def groups(self) -> list[str]:
        """Every group that a consumer ever connected with: each has a retry topic."""
        return self._thread.run(self._aio.groups())

    def create_group(
        self, group: str | GroupConfig, *, broker: str | None = None, cluster: str | None = None
    ) -> GroupSet:
        """Make a group, or set all its settings anew, on a broker, a cluster or everywhere."""
        return self._thread.run(self._aio.create_group(group, broker=broker, cluster=cluster))

    def update_group(
        self, group: str, *, broker: str | None = None, cluster: str | None = None, **changes: Any
    ) -> GroupSet:
        """Change some settings of a group, by the names of `GroupConfig`; the rest stays."""
        return self._thread.run(
            self._aio.update_group(group, broker=broker, cluster=cluster, **changes)
        )

    def delete_group(
        self,
        group: str,
        *,
        offsets: bool = False,
        broker: str | None = None,
        cluster: str | None = None,
    ) -> GroupDeleted:
        """Delete a group, with its offsets if asked to; from a cluster, with its retry topics."""
        return self._thread.run(
            self._aio.delete_group(group, offsets=offsets, broker=broker, cluster=cluster)
        )

    def group_configs(self, group: str) -> dict[str, GroupConfig]:
        """The settings of a group, by the address of each broker that knows it."""
        return self._thread.run(self._aio.group_configs(group))

    def set_group_mode(
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
        return self._thread.run(
            self._aio.set_group_mode(
                group, topic, mode, share_count=share_count, broker=broker, cluster=cluster
            )
        )

    def consume_stats(
        self, group: str, topic: str | None = None, route_of: str | None = None
    ) -> ConsumeStats:
        """How far a group has read each queue, of all its topics or of one."""
        return self._thread.run(self._aio.consume_stats(group, topic, route_of))

    def lag(self, group: str, topic: str | None = None) -> int:
        """How many messages a group has not read yet, of all its topics or of one."""
        return self._thread.run(self._aio.lag(group, topic))

    def group_overviews(self) -> list[GroupOverview]:
        """Every group that a consumer ever connected with, each in one line."""
        return self._thread.run(self._aio.group_overviews())

    def consumer_connection(self, group: str, address: str | None = None) -> ConsumerConnection:
        """Who of a group is connected, to any broker; raises NotFound where nobody is."""
        return self._thread.run(self._aio.consumer_connection(group, address))

    def producer_connection(self, group: str, topic: str) -> list[ConnectionInfo]:
        """Who of a producer group is connected to the brokers of a topic; raises NotFound."""
        return self._thread.run(self._aio.producer_connection(group, topic))

    def group_members(
        self, group: str, *, stacks: bool = False, address: str | None = None
    ) -> tuple[ConsumerConnection, list[GroupMember]]:
        """The connected consumers of a group, each asked what it does."""
        return self._thread.run(self._aio.group_members(group, stacks=stacks, address=address))

    def running_info(
        self, group: str, client_id: str, *, stacks: bool = False, address: str | None = None
    ) -> RunningInfo:
        """What a running consumer says of itself; the first broker that it answers counts."""
        return self._thread.run(
            self._aio.running_info(group, client_id, stacks=stacks, address=address)
        )

    def queue_owners(self, group: str) -> dict[MessageQueue, str]:
        """Which connected client reads which queue, as they say themselves."""
        return self._thread.run(self._aio.queue_owners(group))

    def group_health(
        self, group: str, *, stacks: bool = False, address: str | None = None
    ) -> GroupHealth:
        """Ask the consumers of a group what they do, and whether they agree."""
        return self._thread.run(self._aio.group_health(group, stacks=stacks, address=address))

    # ------------------------------------------------------------------------------------- offsets

    def offsets(self, group: str, topic: str | None = None) -> Offsets:
        """The offset up to which a group has read each queue; raises NotFound where it has none."""
        return self._thread.run(self._aio.offsets(group, topic))

    def reset_to_time(
        self, group: str, topic: str, when: When, *, backward_only: bool = False
    ) -> Offsets:
        """Move a group to the first messages that were stored at a time or later."""
        return self._thread.run(
            self._aio.reset_to_time(group, topic, when, backward_only=backward_only)
        )

    def reset_to_begin(self, group: str, topic: str) -> Offsets:
        """Move a group to the first messages that there are."""
        return self._thread.run(self._aio.reset_to_begin(group, topic))

    def reset_to_end(self, group: str, topic: str) -> Offsets:
        """Move a group behind all messages that are there now: skip them."""
        return self._thread.run(self._aio.reset_to_end(group, topic))

    def reset_to_offset(self, group: str, queue: MessageQueue, offset: int) -> Offsets:
        """Move a group on one queue to an offset."""
        return self._thread.run(self._aio.reset_to_offset(group, queue, offset))

    def set_offset(self, group: str, queue: MessageQueue, offset: int) -> None:
        """Set how far a group has read a queue; a connected member overwrites it."""
        self._thread.run(self._aio.set_offset(group, queue, offset))

    def clone_offsets(self, source: str, target: str, topic: str) -> dict[MessageQueue, int]:
        """Give a group the offsets that another one has on a topic."""
        return self._thread.run(self._aio.clone_offsets(source, target, topic))

    # ------------------------------------------------------------------------------------ messages

    def messages(
        self,
        topic: str,
        *,
        begin: When | None = None,
        end: When | None = None,
        tags: str = "*",
        queues: list[MessageQueue] | None = None,
    ) -> Iterator[StoredMessage]:
        """The messages of a topic that were stored in a span of time, queue by queue.

        Nobody's place changes by it. It ends with what was there when it began.
        """
        return self._each(self._aio.messages(topic, begin=begin, end=end, tags=tags, queues=queues))

    def message_by_id(
        self, topic: str, message_id: str, cluster: str | None = None
    ) -> StoredMessage:
        """The message with an offset id, or with a producer's unique key; raises NotFound."""
        return self._thread.run(self._aio.message_by_id(topic, message_id, cluster))

    def messages_by_key(
        self, topic: str, key: str, *, begin: When = 0.0, end: When | None = None, count: int = 64
    ) -> list[StoredMessage]:
        """The messages with a key that their producer gave them, the oldest first."""
        return self._thread.run(
            self._aio.messages_by_key(topic, key, begin=begin, end=end, count=count)
        )

    def messages_by_unique_key(self, topic: str, key: str) -> list[StoredMessage]:
        """The messages with the id that a producer made for one, the oldest first.

        More than one where it was sent again. Raises NotFound.
        """
        return self._thread.run(self._aio.messages_by_unique_key(topic, key))

    def message_in(self, queue: MessageQueue, offset: int) -> StoredMessage:
        """The message at an offset of a queue; raises NotFound."""
        return self._thread.run(self._aio.message_in(queue, offset))

    def track(self, message: StoredMessage) -> list[Track]:
        """What became of a message in every group that reads its topic."""
        return self._thread.run(self._aio.track(message))

    def send_again(self, message: StoredMessage) -> Sent:
        """Send a stored message once more, to the queue that it was in if that still exists."""
        return self._thread.run(self._aio.send_again(message))

    def consume_now(self, group: str, client_id: str, message: StoredMessage) -> DirectResult:
        """Let one running push consumer handle a message now; raises NotFound for another kind."""
        return self._thread.run(self._aio.consume_now(group, client_id, message))

    # ------------------------------------------------------------------ what Sluice's brokers tell

    def dead_letters(
        self,
        group: str,
        *,
        topic: str | None = None,
        key: str | None = None,
        begin: When | None = None,
        end: When | None = None,
        count: int | None = None,
    ) -> Iterator[DeadLetter]:
        """The dead letters of a group, up to what was there when the call began.

        Only those that came from a topic, that have a key or unique key, that died in a span of
        time, where this is given.
        """
        return self._each(
            self._aio.dead_letters(group, topic=topic, key=key, begin=begin, end=end, count=count)
        )

    def resend_dead_letters(
        self,
        group: str,
        *,
        ids: Sequence[str] | None = None,
        topic: str | None = None,
        key: str | None = None,
        begin: When | None = None,
        end: When | None = None,
        everything: bool = False,
        to_topic: bool = False,
    ) -> ResendReport:
        """Send dead letters to their group again, each once.

        Those with these ids, or those that `dead_letters` lists with the same words, or everything.
        `to_topic`: to the topic that each came from, for all who read it.
        """
        return self._thread.run(
            self._aio.resend_dead_letters(
                group,
                ids=ids,
                topic=topic,
                key=key,
                begin=begin,
                end=end,
                everything=everything,
                to_topic=to_topic,
            )
        )

    def delayed(
        self, topic: str | None = None, *, cluster: str | None = None, count: int = 100
    ) -> DelayedMessages:
        """Messages that wait for their time, the earliest first; so many of each broker."""
        return self._thread.run(self._aio.delayed(topic, cluster=cluster, count=count))

    def recall(self, delayed: DelayedMessage | str) -> str:
        """Take a timed message back before it is delivered; its id.

        Takes a row of `delayed`, or the `recall_handle` that its producer got.
        """
        return self._thread.run(self._aio.recall(delayed))

    def open_transactions(
        self,
        *,
        topic: str | None = None,
        group: str | None = None,
        cluster: str | None = None,
        count: int = 100,
    ) -> list[OpenHalf]:
        """Transactions that nobody has ended yet, the oldest first; so many of each broker."""
        return self._thread.run(
            self._aio.open_transactions(topic=topic, group=group, cluster=cluster, count=count)
        )

    def resume_check(self, message_id: str, *, cluster: str | None = None) -> StoredMessage:
        """Have a broker ask anew about a half message that is open, or was parked."""
        return self._thread.run(self._aio.resume_check(message_id, cluster=cluster))

    # --------------------------------------------------------------------- brokers and nameservers

    def clusters(self) -> list[str]:
        """The names of all clusters."""
        return self._thread.run(self._aio.clusters())

    def brokers(self, cluster: str | None = None) -> list[BrokerData]:
        """The brokers of a cluster, or of all, by name; raises NotFound for an unknown cluster."""
        return self._thread.run(self._aio.brokers(cluster))

    def broker_statuses(self, cluster: str | None = None) -> list[BrokerStatus]:
        """Every replica with its state; where it does not answer, with the reason."""
        return self._thread.run(self._aio.broker_statuses(cluster))

    def runtime_info(self, address: str) -> dict[str, str]:
        """Counters, rates and state of a broker."""
        return self._thread.run(self._aio.runtime_info(address))

    def broker_config(self, address: str) -> dict[str, str]:
        """The settings of a broker, by RocketMQ's names."""
        return self._thread.run(self._aio.broker_config(address))

    def set_broker_config(
        self,
        name: str,
        value: str,
        *,
        broker: str | None = None,
        cluster: str | None = None,
        replicas: bool = False,
    ) -> Outcomes:
        """Change one setting of running brokers, by RocketMQ's name; of masters, or of all."""
        return self._thread.run(
            self._aio.set_broker_config(
                name, value, broker=broker, cluster=cluster, replicas=replicas
            )
        )

    def set_write_permission(self, broker_name: str, allowed: bool) -> WritePermissionSet:
        """Take a broker out of sending, or back into it, at every nameserver."""
        return self._thread.run(self._aio.set_write_permission(broker_name, allowed))

    def value(self, namespace: str, key: str) -> str | None:
        """One value of the nameservers; None if there is none."""
        return self._thread.run(self._aio.value(namespace, key))

    def set_value(self, namespace: str, key: str, value: str) -> Outcomes:
        """Set a value that the nameservers keep."""
        return self._thread.run(self._aio.set_value(namespace, key, value))

    def delete_value(self, namespace: str, key: str) -> Outcomes:
        """Delete a value that the nameservers keep, whether it is there or not."""
        return self._thread.run(self._aio.delete_value(namespace, key))
