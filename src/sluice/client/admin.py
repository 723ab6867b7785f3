"""This module asks and changes a cluster as its administrator: topics, groups, offsets, brokers.

`AdminRequests` has an async method for each thing that can be asked of a broker, a nameserver, or
all of them; `administration/` makes of it what administrators do. It returns values and prints
nothing. It speaks RocketMQ's admin requests, to any RocketMQ cluster. What a broker refuses is a
`Refused` with the broker's own words; what is not there is NotFound or TopicMissing.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, NamedTuple

from sluice.client.group_checks import RETRY_PREFIX, GroupMember
from sluice.client.messages import TIME_MAX, MessageReader, StoredMessage
from sluice.client.simple import QueueAt, Refused
from sluice.errors import ConfigError, NotFound, SluiceError, TopicMissing
from sluice.protocol import remoting_bodies, remoting_clients
from sluice.protocol import remoting_reports as reports
from sluice.protocol.json_members import MessageQueue
from sluice.protocol.remoting import RemotingCommand
from sluice.protocol.remoting_bodies import BrokerData, TopicConfig
from sluice.protocol.remoting_clients import ConnectionInfo, ConsumerConnection
from sluice.protocol.remoting_codes import RequestCode as Request
from sluice.protocol.remoting_codes import ResponseCode as Response
from sluice.protocol.remoting_reports import (
    ConsumeStats,
    DirectResult,
    GroupConfig,
    RunningInfo,
    Stats,
    TopicStats,
)

DEAD_PREFIX: Final = "%DLQ%"
ORDER_NAMESPACE: Final = "ORDER_TOPIC_CONFIG"
TO_THE_END_MS: Final = -1  # a time that stands for the end of a queue
_AUTO_CREATE_TOPIC: Final = "TBW102"
_CLIENT_SECONDS: Final = 15.0  # a broker waits 10 s for a client's answer


class Track(NamedTuple):
    """What became of a message in one group; kinds are those of RocketMQ's TrackType."""

    group: str
    kind: str
    detail: str = ""


class AdminRequests(MessageReader):
    """Requests to one cluster, of its administrator."""

    # ------------------------------------------------------------------------------------- clusters

    @property
    def nameservers(self) -> list[str]:
        """The nameservers that were named, as they were written."""
        return list(self._nameservers)

    async def brokers(self, cluster: str | None = None) -> list[BrokerData]:
        """The brokers of a cluster, or of all, by name; raises NotFound for an unknown cluster."""
        answer = await self._nameserver_done(
            Request.GET_BROKER_CLUSTER_INFO, {}, "the list of brokers"
        )
        table = remoting_bodies.read_cluster_info(answer.body)
        found = [table[name] for name in sorted(table)]
        if cluster is None:
            return found
        known = sorted({broker.cluster for broker in found})
        if cluster not in known:
            raise NotFound(f"no cluster {cluster}; there are: {', '.join(known) or 'none'}")
        return [broker for broker in found if broker.cluster == cluster]

    async def broker_named(self, name: str) -> BrokerData:
        """One broker; raises NotFound."""
        brokers = {broker.name: broker for broker in await self.brokers()}
        if name not in brokers:
            raise NotFound(f"no broker {name}; there are: {', '.join(brokers) or 'none'}")
        return brokers[name]

    async def masters(self, cluster: str | None = None) -> list[str]:
        """The addresses of the masters of a cluster, or of all."""
        brokers = await self.brokers(cluster)
        return [broker.addresses[0] for broker in brokers if 0 in broker.addresses]

    async def queue(self, broker_name: str, queue_id: int) -> QueueAt:
        """A queue of a broker that is known by name."""
        broker = await self.broker_named(broker_name)
        address = broker.addresses.get(0)
        if address is None:
            raise NotFound(f"broker {broker_name} has no master now")
        return QueueAt(address, broker_name, queue_id)

    async def runtime_info(self, address: str) -> dict[str, str]:
        """Counters, rates and state of a broker."""
        answer = await self.done(
            address, Request.GET_BROKER_RUNTIME_INFO, what="the state of the broker"
        )
        return remoting_bodies.read_kv_table(answer.body)

    async def stats(self, address: str, name: str, key: str) -> Stats | None:
        """One statistic of a broker (TOPIC_PUT_NUMS, GROUP_GET_NUMS, ...); None if never."""
        ext = {"statsName": name, "statsKey": key}
        answer = await self.ask(address, Request.VIEW_BROKER_STATS_DATA, ext)
        if answer.code == Response.SYSTEM_ERROR:
            return None  # how brokers say that nothing was counted under this key
        if answer.code != Response.SUCCESS:
            raise Refused(answer.code, answer.remark, f"{address}: the statistic {name} of {key}")
        return reports.read_stats(answer.body)

    async def broker_config(self, address: str) -> dict[str, str]:
        """The settings of a broker, by RocketMQ's names."""
        answer = await self.done(address, Request.GET_BROKER_CONFIG, what="the settings")
        return remoting_bodies.read_properties(answer.body)

    async def put_broker_setting(self, address: str, name: str, value: str) -> None:
        """Change one setting of a running broker."""
        if not name or not name.replace(".", "").replace("_", "").isalnum():
            raise ConfigError(f"{name!r} is no name of a setting")
        if "\n" in value or "\r" in value:
            raise ConfigError(f"the value of {name} has more than one line")
        escaped = value.replace("\\", "\\\\")
        await self.done(
            address,
            Request.UPDATE_BROKER_CONFIG,
            body=f"{name}={escaped}\n".encode(),
            what=f"changing {name}",
        )

    async def wipe_write_permission(self, nameserver: str, broker_name: str) -> int:
        """Take a broker out of sending; returns how many topics changed."""
        ext = {"brokerName": broker_name}
        what = f"taking {broker_name} out of sending"
        answer = await self.done(nameserver, Request.WIPE_WRITE_PERM_OF_BROKER, ext, what=what)
        return int(answer.ext["wipeTopicCount"])

    async def add_write_permission(self, nameserver: str, broker_name: str) -> int:
        """Take a broker back into sending; returns how many topics changed."""
        ext = {"brokerName": broker_name}
        what = f"taking {broker_name} back into sending"
        answer = await self.done(nameserver, Request.ADD_WRITE_PERM_OF_BROKER, ext, what=what)
        return int(answer.ext["addTopicCount"])

    async def put_value(self, nameserver: str, namespace: str, key: str, value: str) -> None:
        """Set one value of a nameserver."""
        ext = {"namespace": namespace, "key": key, "value": value}
        await self.done(nameserver, Request.PUT_KV_CONFIG, ext, what=f"setting {namespace} {key}")

    async def value(self, namespace: str, key: str) -> str | None:
        """One value of the nameservers; None if there is none."""
        answer = await self.ask_nameserver(
            Request.GET_KV_CONFIG, {"namespace": namespace, "key": key}
        )
        return answer.ext.get("value") if answer.code == Response.SUCCESS else None

    async def remove_value(self, nameserver: str, namespace: str, key: str) -> None:
        """Delete one value of a nameserver, whether it is there or not."""
        ext = {"namespace": namespace, "key": key}
        what = f"deleting {namespace} {key}"
        await self.done(nameserver, Request.DELETE_KV_CONFIG, ext, what=what)

    async def _nameserver_done(self, code: int, ext: dict[str, str], what: str) -> RemotingCommand:
        answer = await self.ask_nameserver(code, ext)
        if answer.code != Response.SUCCESS:
            raise Refused(answer.code, answer.remark, what)
        return answer

    # --------------------------------------------------------------------------------------- topics

    async def topics(self) -> list[str]:
        """The names of all topics, sorted."""
        answer = await self._nameserver_done(
            Request.GET_ALL_TOPIC_LIST_FROM_NAMESERVER, {}, "the list of topics"
        )
        return sorted(remoting_bodies.read_topic_list(answer.body))

    async def topic_config(self, address: str, topic: str) -> TopicConfig:
        """The settings of a topic on one broker."""
        answer = await self.ask(address, Request.GET_TOPIC_CONFIG, {"topic": topic})
        if answer.code == Response.TOPIC_NOT_EXIST:
            raise TopicMissing(f"{address} has no topic {topic}")
        if answer.code != Response.SUCCESS:
            raise Refused(answer.code, answer.remark, f"{address}: the settings of {topic}")
        return reports.read_one_topic(answer.body)

    async def put_topic(self, address: str, topic: TopicConfig, attributes: str = "") -> None:
        """Create a topic on a broker or change it; attributes are "+name=value,-name"."""
        ext: dict[str, object] = {
            "topic": topic.name,
            "defaultTopic": _AUTO_CREATE_TOPIC,
            "readQueueNums": topic.read_queue_count,
            "writeQueueNums": topic.write_queue_count,
            "perm": topic.perm,
            "topicFilterType": topic.filter_type,
            "topicSysFlag": topic.sys_flag,
            "order": "true" if topic.order else "false",
        }
        if attributes:
            ext["attributes"] = attributes
        what = f"setting topic {topic.name}"
        await self.done(address, Request.UPDATE_AND_CREATE_TOPIC, ext, what=what)

    async def remove_topic(self, address: str, topic: str) -> None:
        """Delete a topic from a broker."""
        what = f"deleting topic {topic}"
        await self.done(address, Request.DELETE_TOPIC_IN_BROKER, {"topic": topic}, what=what)

    async def remove_route(self, nameserver: str, topic: str, cluster: str) -> None:
        """Delete a topic's route from a nameserver."""
        ext = {"topic": topic, "clusterName": cluster}
        what = f"deleting the route of {topic}"
        await self.done(nameserver, Request.DELETE_TOPIC_IN_NAMESRV, ext, what=what)

    async def topic_stats(self, topic: str, route_of: str | None = None) -> TopicStats:
        """First and next offset of every queue; the route may be another topic's."""
        spans = {}
        put_tps = 0.0
        for address in addresses_of((await self.route(route_of or topic)).brokers):
            answer = await self.done(
                address,
                Request.GET_TOPIC_STATS_INFO,
                {"topic": topic},
                what=f"the offsets of {topic}",
            )
            stats = reports.read_topic_stats(answer.body)
            spans.update(stats.spans)
            put_tps += stats.put_tps
        return TopicStats({queue: spans[queue] for queue in sorted(spans)}, put_tps)

    async def groups_of_topic(self, topic: str) -> list[str]:
        """The groups that read a topic, connected or not."""
        groups: set[str] = set()
        for address in addresses_of((await self.route(topic)).brokers):
            what = f"the groups of {topic}"
            answer = await self.done(
                address, Request.QUERY_TOPIC_CONSUME_BY_WHO, {"topic": topic}, what=what
            )
            groups.update(reports.read_group_list(answer.body))
        return sorted(groups)

    # --------------------------------------------------------------------------------------- groups

    async def groups(self) -> list[str]:
        """Every group that a consumer ever connected with: each has a retry topic."""
        return [
            topic.removeprefix(RETRY_PREFIX)
            for topic in await self.topics()
            if topic.startswith(RETRY_PREFIX)
        ]

    async def group_addresses(self, group: str, topic: str | None = None) -> list[str]:
        """The masters that know a group: those of its retry topic or of a topic, else all."""
        for name in (f"{RETRY_PREFIX}{group}", topic):
            try:
                if name is not None:
                    return addresses_of((await self.route(name)).brokers)
            except TopicMissing:
                continue
        return await self.masters()

    async def put_group(self, address: str, group: GroupConfig) -> None:
        """Create a group on a broker or change it."""
        await self.done(
            address,
            Request.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP,
            body=reports.write_group_config(group),
            what=f"setting group {group.name}",
        )

    async def put_mode(
        self, address: str, group: str, topic: str, mode: str, share_count: int
    ) -> None:
        """Say whether a group pulls a topic or pops it."""
        body = reports.write_request_mode(group, topic, mode, share_count)
        what = f"setting how group {group} reads {topic}"
        await self.done(address, Request.SET_MESSAGE_REQUEST_MODE, body=body, what=what)

    async def remove_group(self, address: str, group: str, *, offsets: bool) -> None:
        """Delete a group from a broker, with its offsets if asked to."""
        ext = {"groupName": group, "cleanOffset": "true" if offsets else "false"}
        what = f"deleting group {group}"
        await self.done(address, Request.DELETE_SUBSCRIPTIONGROUP, ext, what=what)

    async def consume_stats(
        self, group: str, topic: str | None = None, route_of: str | None = None
    ) -> ConsumeStats:
        """How far a group has read each queue, of all its topics or of one."""
        ext = {"consumerGroup": group} | ({"topic": topic} if topic else {})
        queues = {}
        tps = 0.0
        for address in await self.group_addresses(group, route_of or topic):
            answer = await self.done(
                address, Request.GET_CONSUME_STATS, ext, what=f"the progress of group {group}"
            )
            stats = reports.read_consume_stats(answer.body)
            queues.update(stats.queues)
            tps += stats.tps
        return ConsumeStats({queue: queues[queue] for queue in sorted(queues)}, tps)

    async def consumer_connection(
        self, group: str, address: str | None = None
    ) -> ConsumerConnection:
        """Who of a group is connected, to any broker; raises NotFound where nobody is."""
        addresses = [address] if address else await self.group_addresses(group)
        found: list[ConsumerConnection] = []
        for one in addresses:
            answer = await self.ask(
                one, Request.GET_CONSUMER_CONNECTION_LIST, {"consumerGroup": group}
            )
            if answer.code == Response.SUCCESS:
                found.append(remoting_clients.read_consumer_connection(answer.body))
            elif answer.code != Response.CONSUMER_NOT_ONLINE:
                raise Refused(answer.code, answer.remark, f"{one}: the consumers of {group}")
        members = {row.client_id: row for one in found for row in one.connections}
        if not members:
            raise NotFound(f"no consumer of group {group} is connected")
        merged = found[-1]
        return merged._replace(
            connections=tuple(members[name] for name in sorted(members)),
            subscriptions={
                topic: wanted for one in found for topic, wanted in one.subscriptions.items()
            },
            disagreements=tuple(dict.fromkeys(line for one in found for line in one.disagreements)),
        )

    async def producer_connection(self, group: str, topic: str) -> list[ConnectionInfo]:
        """Who of a producer group is connected to the brokers of a topic; raises NotFound."""
        members: dict[str, ConnectionInfo] = {}
        for address in addresses_of((await self.route(topic)).brokers):
            answer = await self.ask(
                address, Request.GET_PRODUCER_CONNECTION_LIST, {"producerGroup": group}
            )
            if answer.code == Response.SUCCESS:
                rows = remoting_clients.read_producer_connection(answer.body)
                members.update({row.client_id: row for row in rows})
            elif answer.code != Response.SYSTEM_ERROR:  # how brokers say that there is none
                raise Refused(answer.code, answer.remark, f"{address}: the producers of {group}")
        if not members:
            raise NotFound(f"no producer of group {group} is connected to a broker of {topic}")
        return [members[name] for name in sorted(members)]

    async def running_info(
        self, group: str, client_id: str, *, stacks: bool = False, address: str | None = None
    ) -> RunningInfo:
        """What a running consumer says of itself; the first broker that it answers counts."""
        addresses = [address] if address else await self.group_addresses(group)
        ext = {"consumerGroup": group, "clientId": client_id, "jstackEnable": _flag(stacks)}
        failure: SluiceError = NotFound(f"no broker knows group {group}")
        for one in addresses:
            try:
                answer = await self.done(
                    one,
                    Request.GET_CONSUMER_RUNNING_INFO,
                    ext,
                    what=f"asking consumer {client_id}",
                    timeout_seconds=_CLIENT_SECONDS,
                )
                return reports.read_running_info(answer.body)
            except SluiceError as error:
                failure = error
        raise failure

    async def group_members(
        self, group: str, *, stacks: bool = False, address: str | None = None
    ) -> tuple[ConsumerConnection, list[GroupMember]]:
        """The connected consumers of a group, each asked what it does."""
        connected = await self.consumer_connection(group, address)
        members = []
        for row in connected.connections:
            try:
                info = await self.running_info(group, row.client_id, stacks=stacks, address=address)
                members.append(GroupMember(row, info))
            except SluiceError as error:
                members.append(GroupMember(row, None, str(error)))
        return connected, members

    async def consume_directly(
        self, group: str, client_id: str, message: StoredMessage
    ) -> DirectResult:
        """Let one running consumer consume a message now."""
        queue = await self.queue(message.broker_name, message.queue_id)
        ext = {
            "consumerGroup": group,
            "clientId": client_id,
            "msgId": message.offset_id,
            "topic": message.topic,
        }
        answer = await self.done(
            queue.address,
            Request.CONSUME_MESSAGE_DIRECTLY,
            ext,
            what=f"asking consumer {client_id}",
            timeout_seconds=_CLIENT_SECONDS,
        )
        return reports.read_direct_result(answer.body)

    # -------------------------------------------------------------------------------------- offsets

    async def put_offset(self, address: str, group: str, queue: MessageQueue, offset: int) -> None:
        """Set how far a group has read a queue."""
        ext = {
            "consumerGroup": group,
            "topic": queue.topic,
            "queueId": queue.queue_id,
            "commitOffset": offset,
            "brokerName": queue.broker_name,
        }
        what = f"setting an offset of group {group}"
        answer = await self.done(address, Request.UPDATE_CONSUMER_OFFSET, ext, what=what)
        if answer.remark:
            # Not taken, though the code says so: a reset waits for the group's next pull.
            raise Refused(answer.code, answer.remark, f"{address}: {what}")

    async def reset_offsets(
        self, group: str, topic: str, when_ms: int, *, force: bool = True, route_of: str | None
    ) -> dict[MessageQueue, int]:
        """Move a group on all queues of a topic to a time (TO_THE_END_MS: to the end)."""
        offsets: dict[MessageQueue, int] = {}
        for address in addresses_of((await self.route(route_of or topic)).brokers):
            ext = {
                "topic": topic,
                "group": group,
                "timestamp": when_ms,
                "isForce": _flag(force),
                "queueId": -1,
                "offset": -1,
            }
            fields = {name: str(value) for name, value in ext.items()}
            answer = await self.ask(address, Request.INVOKE_BROKER_TO_RESET_OFFSET, fields)
            if answer.code == Response.CONSUMER_NOT_ONLINE:
                offsets.update(await self._reset_offline(address, group, topic, when_ms))
            elif answer.code != Response.SUCCESS:
                what = f"{address}: resetting group {group} on {topic}"
                raise Refused(answer.code, answer.remark, what)
            else:
                offsets.update(remoting_bodies.read_queue_offsets(answer.body))
        return {queue: offsets[queue] for queue in sorted(offsets)}

    async def _reset_offline(
        self, address: str, group: str, topic: str, when_ms: int
    ) -> dict[MessageQueue, int]:
        """Some brokers only move connected groups: then the offsets are committed one by one."""
        stats = await self.topic_stats(topic)
        names = {broker.addresses.get(0): broker.name for broker in await self.brokers()}
        offsets = {}
        for queue, span in stats.spans.items():
            if queue.broker_name != names.get(address):
                continue
            place = QueueAt(address, queue.broker_name, queue.queue_id)
            offset = span.max_offset
            if when_ms != TO_THE_END_MS:
                offset = await self.offset_at(topic, place, when_ms)
            await self.put_offset(address, group, queue, offset)
            offsets[queue] = offset
        return offsets

    async def reset_queue(
        self, address: str, group: str, topic: str, queue_id: int, offset: int
    ) -> dict[MessageQueue, int]:
        """Move a group on one queue to an offset."""
        ext = {
            "topic": topic,
            "group": group,
            "timestamp": 0,
            "isForce": "true",
            "queueId": queue_id,
            "offset": offset,
        }
        what = f"resetting group {group} on {topic}"
        answer = await self.done(address, Request.INVOKE_BROKER_TO_RESET_OFFSET, ext, what=what)
        return remoting_bodies.read_queue_offsets(answer.body)

    async def clone_offsets(self, source: str, target: str, topic: str) -> dict[MessageQueue, int]:
        """Give a group the offsets that another one has on a topic."""
        route = await self.route(topic)
        addresses = {broker.name: broker.addresses.get(0) for broker in route.brokers}
        cloned = {}
        # Asked for the topic, a broker also answers for a group that never read it: with zeros.
        for queue, row in (await self.consume_stats(source)).queues.items():
            address = addresses.get(queue.broker_name)
            if queue.topic == topic and address is not None and row.consumer_offset >= 0:
                await self.put_offset(address, target, queue, row.consumer_offset)
                cloned[queue] = row.consumer_offset
        if not cloned:
            raise NotFound(f"group {source} has no offsets on {topic}")
        return cloned

    # ------------------------------------------------------------------------------------- messages

    async def track(self, message: StoredMessage) -> list[Track]:
        """What became of a message in every group that reads its topic."""
        return [
            await self._track(message, group) for group in await self.groups_of_topic(message.topic)
        ]

    async def _track(self, message: StoredMessage, group: str) -> Track:
        try:
            connected = await self.consumer_connection(group)
        except NotFound:
            return Track(group, "NOT_ONLINE", f"no consumer of group {group} is connected")
        except SluiceError as error:
            return Track(group, "UNKNOWN", str(error))
        if connected.consume_type == "CONSUME_ACTIVELY":
            return Track(group, "PULL")
        if connected.message_model == "BROADCASTING":
            return Track(group, "CONSUME_BROADCASTING")
        if connected.consume_type != "CONSUME_PASSIVELY":
            return Track(group, "UNKNOWN")
        try:
            stats = await self.consume_stats(group, message.topic)
        except SluiceError as error:
            return Track(group, "UNKNOWN", str(error))
        queue = MessageQueue(message.topic, message.broker_name, message.queue_id)
        row = stats.queues.get(queue)
        if row is None or row.consumer_offset <= message.queue_offset:
            return Track(group, "NOT_CONSUME_YET")
        wanted = connected.subscriptions.get(message.topic)
        if wanted is None or not wanted.tags or {"*", message.tags} & set(wanted.tags):
            return Track(group, "CONSUMED")
        return Track(group, "CONSUMED_BUT_FILTERED")

    async def find_unique(
        self,
        topic: str,
        key: str,
        *,
        begin_ms: int = 0,
        end_ms: int = TIME_MAX,
        cluster: str | None = None,
    ) -> list[StoredMessage]:
        """The messages with a producer's unique key, the oldest first; raises NotFound."""
        found = await self.query(
            topic, key, kind="U", begin_ms=begin_ms, end_ms=end_ms, cluster=cluster
        )
        if not found:
            raise NotFound(f"no message of {topic} has the unique key {key}")
        return found


def addresses_of(brokers: Iterable[BrokerData]) -> list[str]:
    """The addresses to ask, one of each broker: its master, or a replica where there is none."""
    return [broker.addresses[min(broker.addresses)] for broker in brokers if broker.addresses]


def _flag(value: bool) -> str:
    return "true" if value else "false"
