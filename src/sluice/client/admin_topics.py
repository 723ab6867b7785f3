"""This module has the admin commands about topics: settings, routes, offsets, who reads them."""

from __future__ import annotations

from typing import Any, Final

from sluice.client.admin_flags import (
    BROKER_FLAGS,
    BROKER_OR_CLUSTER,
    DONE,
    Command,
    Flag,
    Options,
    at_least,
    result_rows,
    result_text,
    settle,
    text,
    topic_flag,
    tried,
    yes_no,
)
from sluice.client.administration.admin import Admin
from sluice.client.group_checks import allocate, consumer_queues
from sluice.client.printing import Printer, Table, time_text
from sluice.errors import ConfigError
from sluice.protocol.json_members import queue_object
from sluice.protocol.remoting_bodies import Route, TopicConfig

_QUEUES_MAX: Final = 4096
_UNIT_FLAG, _UNIT_SUBSCRIPTION_FLAG = 1, 2
_PERM: Final = at_least(0, 7)  # 1 inherits, 2 writes, 4 reads


def perm_text(perm: int) -> str:
    """A permission for people: RW (6)."""
    letters = ("R" if perm & 4 else "") + ("W" if perm & 2 else "")
    return f"{letters or 'none'} ({perm})"


def _settings_table(topic: TopicConfig, outcomes: dict[str, str]) -> Table:
    rows = [
        (
            topic.name,
            address,
            topic.read_queue_count,
            topic.write_queue_count,
            perm_text(topic.perm),
            topic.order,
            result_text(error),
        )
        for address, error in outcomes.items()
    ]
    names = ("Topic", "Broker", "Read Queues", "Write Queues", "Permission", "Ordered", "Result")
    return Table(names, rows)


async def _update_topic(admin: Admin, options: Options, printer: Printer) -> int:
    sys_flag = (_UNIT_FLAG if options.unit else 0) | (
        _UNIT_SUBSCRIPTION_FLAG if options.hasUnitSub else 0
    )
    topic = TopicConfig(
        options.topic,
        options.readQueueNums,
        options.writeQueueNums,
        options.perm,
        sys_flag=sys_flag,
        order=options.order,
    )
    done = await tried(
        admin.create_topic(
            topic,
            attributes=options.attributes or "",
            broker=options.brokerAddr,
            cluster=options.clusterName,
        )
    )
    document: dict[str, Any] = {
        "topicConfig": topic.members(),
        "attributes": options.attributes or "",
        "brokers": result_rows(done.brokers),
    }
    blocks: list[Table | str] = [_settings_table(topic, done.brokers)]
    if done.order_config is not None:
        document["orderConf"] = done.order_config
        blocks.append(f"ordered: {done.order_config}")
    printer.show(document, *blocks)
    return settle(done.brokers)


async def _delete_topic(admin: Admin, options: Options, printer: Printer) -> int:
    done = await tried(admin.delete_topic(options.topic, cluster=options.clusterName))
    document = {
        "topic": done.topic,
        "clusterName": done.cluster,
        "brokers": result_rows(done.brokers),
        "nameServers": result_rows(done.nameservers, "namesrvAddr"),
    }
    places = (("broker", done.brokers), ("nameserver", done.nameservers))
    rows = [
        (done.topic, kind, address, result_text(error))
        for kind, outcomes in places
        for address, error in outcomes.items()
    ]
    printer.show(document, Table(("Topic", "Deleted From", "Address", "Result"), rows))
    return settle(done.brokers, done.nameservers)


async def _update_perm(admin: Admin, options: Options, printer: Printer) -> int:
    done = await tried(
        admin.set_topic_permission(
            options.topic, options.perm, broker=options.brokerAddr, cluster=options.clusterName
        )
    )
    rows = [
        (
            done.topic,
            address,
            perm_text(done.before[address]) if address in done.before else "",
            perm_text(done.permission),
            result_text(error),
        )
        for address, error in done.brokers.items()
    ]
    document = {
        "topic": done.topic,
        "perm": done.permission,
        "brokers": [
            {**row, "oldPerm": done.before.get(row["brokerAddr"])}
            for row in result_rows(done.brokers)
        ],
    }
    printer.show(document, Table(("Topic", "Broker", "Before", "Now", "Result"), rows))
    return settle(done.brokers)


# ------------------------------------------------------------------------------------------ looking


def _route_document(route: Route) -> dict[str, Any]:
    document: dict[str, Any] = {
        "brokerDatas": [broker.members(quoted=True) for broker in route.brokers],
        "queueDatas": [queue.members() for queue in route.queues],
    }
    if route.order_config is not None:
        document["orderTopicConf"] = route.order_config
    return document


async def _topic_route(admin: Admin, options: Options, printer: Printer) -> int:
    route = await admin.route(options.topic)
    queues = {queue.broker_name: queue for queue in route.queues}
    rows = []
    for broker in sorted(route.brokers, key=lambda one: (one.cluster, one.name)):
        for replica in sorted(broker.addresses):
            queue = queues.get(broker.name)
            rows.append(
                (
                    broker.cluster,
                    broker.name,
                    replica,
                    broker.addresses[replica],
                    None if queue is None else queue.read_queue_count,
                    None if queue is None else queue.write_queue_count,
                    "" if queue is None else perm_text(queue.perm),
                )
            )
    names = ("Cluster", "Broker", "Id", "Address", "Read Queues", "Write Queues", "Permission")
    printer.show(_route_document(route), Table(names, rows))
    return DONE


async def _topic_list(admin: Admin, options: Options, printer: Printer) -> int:
    if not options.clusterModel:
        topics = await admin.topics()
        printer.show({"topicList": topics}, *topics)
        return DONE
    found = await admin.topic_readers()
    listed = [
        {"clusters": one.clusters, "topic": one.topic, "groupList": one.groups} for one in found
    ]
    rows = [
        (", ".join(one.clusters), one.topic, group) for one in found for group in one.groups or [""]
    ]
    printer.show({"topics": listed}, Table(("Cluster", "Topic", "Consumer Group"), rows))
    return DONE


async def _topic_status(admin: Admin, options: Options, printer: Printer) -> int:
    stats = await admin.topic_stats(options.topic, options.cluster)
    rows = [
        (
            queue.broker_name,
            queue.queue_id,
            span.min_offset,
            span.max_offset,
            time_text(span.changed_ms),
        )
        for queue, span in stats.spans.items()
    ]
    document = {
        "topic": options.topic,
        "topicPutTps": stats.put_tps,
        "offsetTable": [
            {
                "brokerName": queue.broker_name,
                "queueId": queue.queue_id,
                "minOffset": span.min_offset,
                "maxOffset": span.max_offset,
                "lastUpdateTimestamp": span.changed_ms,
            }
            for queue, span in stats.spans.items()
        ],
    }
    names = ("Broker", "Queue", "Min Offset", "Max Offset", "Last Updated")
    printer.show(document, Table(names, rows), "", f"Topic Put TPS: {stats.put_tps:.2f}")
    return DONE


async def _allocate(admin: Admin, options: Options, printer: Printer) -> int:
    clients = [client.strip() for client in options.ipList.split(",")]
    if not all(clients) or len(set(clients)) != len(clients):
        raise ConfigError(f"-i {options.ipList}: consumers are separated by one comma, each once")
    queues = consumer_queues(options.topic, await admin.queues(options.topic, writing=False))
    shares = allocate(queues, clients)
    document = {
        "result": {client: [queue_object(queue) for queue in shares[client]] for client in clients}
    }
    rows: list[tuple[object, ...]] = []
    for client in clients:
        brokers = sorted({queue.broker_name for queue in shares[client]})
        for broker in brokers or [""]:
            own = [str(q.queue_id) for q in shares[client] if q.broker_name == broker]
            rows.append((client, broker, ", ".join(own)))
    printer.show(document, Table(("Consumer", "Broker", "Queues"), rows))
    return DONE


# ------------------------------------------------------------------------------------------ numbers


async def _stats_all(admin: Admin, options: Options, printer: Printer) -> int:
    found = await admin.topic_activity(options.topic)
    if options.activeTopic:
        found = [one for one in found if one.in_day or one.out_day]
    rows = [
        {
            "topic": one.topic,
            "consumerGroup": one.group,
            "accumulation": one.behind,
            "inTPS": one.in_tps,
            "outTPS": one.out_tps,
            "inMsg24Hour": one.in_day,
            "outMsg24Hour": one.out_day,
        }
        for one in found
    ]
    names = ("Topic", "Consumer Group", "Behind", "In/s", "Out/s", "In 24 h", "Out 24 h")
    printer.show({"stats": rows}, Table(names, [tuple(row.values()) for row in rows]))
    return DONE


COMMANDS: Final = (
    Command(
        "updateTopic",
        "Creates a topic, or sets all its settings anew.",
        (
            *BROKER_FLAGS,
            topic_flag(),
            Flag("a", "attributes", "Attributes to add and take away: +a=b,-c.", text),
            Flag(
                "r",
                "readQueueNums",
                "Queues to read. Default: 8.",
                at_least(1, _QUEUES_MAX),
                default=8,
            ),
            Flag(
                "w",
                "writeQueueNums",
                "Queues to write. Default: 8.",
                at_least(1, _QUEUES_MAX),
                default=8,
            ),
            Flag("p", "perm", "2 writing, 4 reading, 6 both. Default: 6.", _PERM, default=6),
            Flag(
                "o", "order", "Whether the topic is ordered. Default: false.", yes_no, default=False
            ),
            Flag(
                "u",
                "unit",
                "Whether it is a topic of a unit. Default: false.",
                yes_no,
                default=False,
            ),
            Flag(
                "s",
                "hasUnitSub",
                "Whether units subscribe to it. Default: false.",
                yes_no,
                default=False,
            ),
        ),
        _update_topic,
        "updateTopic -c DefaultCluster -t orders -r 4 -w 4",
        BROKER_OR_CLUSTER,
    ),
    Command(
        "deleteTopic",
        "Deletes a topic from the brokers of a cluster and from the nameservers.",
        (
            topic_flag(),
            Flag("c", "clusterName", "The cluster to delete it from.", text, required=True),
        ),
        _delete_topic,
        "deleteTopic -c DefaultCluster -t orders",
    ),
    Command(
        "updateTopicPerm",
        "Changes what may be done with a topic, and nothing else of it.",
        (
            *BROKER_FLAGS,
            topic_flag(),
            Flag("p", "perm", "2 writing, 4 reading, 6 both.", _PERM, required=True),
        ),
        _update_perm,
        "updateTopicPerm -c DefaultCluster -t orders -p 4",
        BROKER_OR_CLUSTER,
    ),
    Command(
        "topicRoute",
        "Shows which brokers serve a topic.",
        (
            topic_flag(),
            Flag("l", "list", "As a table, which is how it is shown anyway.", None, default=False),
        ),
        _topic_route,
        "topicRoute -t orders",
    ),
    Command(
        "topicList",
        "Lists all topics.",
        (Flag("c", "clusterModel", "With cluster and consumer groups.", None, default=False),),
        _topic_list,
        "topicList -c",
    ),
    Command(
        "topicStatus",
        "Shows the first and the next offset of each queue of a topic.",
        (
            topic_flag(),
            Flag("c", "cluster", "A topic or cluster whose route is used instead.", text),
        ),
        _topic_status,
        "topicStatus -t orders",
    ),
    Command(
        "allocateMQ",
        "Shows how consumers would share the queues of a topic.",
        (
            topic_flag(),
            Flag("i", "ipList", "The consumers, separated by commas.", text, required=True),
        ),
        _allocate,
        "allocateMQ -t orders -i 10.0.0.1,10.0.0.2",
    ),
    Command(
        "statsAll",
        "Shows what comes into topics and goes out to groups.",
        (
            Flag("a", "activeTopic", "Only topics that are used.", None, default=False),
            Flag("t", "topic", "Only this topic.", text),
        ),
        _stats_all,
        "statsAll -t orders",
    ),
)
