"""This module has the admin commands about topics: settings, routes, offsets, who reads them."""

from __future__ import annotations

from typing import Any, Final

from sluice.client.admin import DEAD_PREFIX, ORDER_NAMESPACE, Admin, addresses_of
from sluice.client.admin_flags import (
    BROKER_FLAGS,
    BROKER_OR_CLUSTER,
    DONE,
    Command,
    Flag,
    Options,
    at_least,
    each,
    result_rows,
    result_text,
    settle,
    text,
    topic_flag,
    yes_no,
)
from sluice.client.group_checks import RETRY_PREFIX, allocate, consumer_queues
from sluice.client.printing import Printer, Table, time_text
from sluice.errors import ConfigError, SluiceError
from sluice.protocol.json_members import queue_object
from sluice.protocol.remoting_bodies import Route, TopicConfig

_QUEUES_MAX: Final = 4096
_UNIT_FLAG, _UNIT_SUBSCRIPTION_FLAG = 1, 2
_PERM: Final = at_least(0, 7)  # 1 inherits, 2 writes, 4 reads


def perm_text(perm: int) -> str:
    """A permission for people: RW (6)."""
    letters = ("R" if perm & 4 else "") + ("W" if perm & 2 else "")
    return f"{letters or 'none'} ({perm})"


async def addresses_for(admin: Admin, options: Options) -> list[str]:
    """The broker that was named, or the masters of the cluster that was named."""
    if options.brokerAddr is not None:
        return [options.brokerAddr]
    return await admin.masters(options.clusterName)


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
    addresses = await addresses_for(admin, options)
    outcomes = await each(
        addresses, lambda address: admin.update_topic(address, topic, options.attributes or "")
    )
    document: dict[str, Any] = {
        "topicConfig": topic.members(),
        "attributes": options.attributes or "",
        "brokers": result_rows(outcomes),
    }
    blocks: list[Table | str] = [_settings_table(topic, outcomes)]
    if options.order:
        done = {address for address, error in outcomes.items() if not error}
        document["orderConf"] = await _set_order(admin, options, done)
        blocks.append(f"ordered: {document['orderConf']}")
    printer.show(document, *blocks)
    return settle(outcomes)


async def _set_order(admin: Admin, options: Options, addresses: set[str]) -> str:
    """Tell the nameservers which queues an ordered topic has, as clients look it up there."""
    names = [b.name for b in await admin.brokers() if b.addresses.get(0) in addresses]
    known: dict[str, str] = {}
    if options.clusterName is None:
        old = await admin.value(ORDER_NAMESPACE, options.topic) or ""
        known = {part.partition(":")[0]: part for part in old.split(";") if part}
    known |= {name: f"{name}:{options.writeQueueNums}" for name in names}
    value = ";".join(known.values())
    for nameserver in admin.nameservers:
        await admin.put_value(nameserver, ORDER_NAMESPACE, options.topic, value)
    return value


async def _delete_topic(admin: Admin, options: Options, printer: Printer) -> int:
    document, table, outcomes = await delete_topic(admin, options.topic, options.clusterName)
    printer.show(document, table)
    return settle(*outcomes)


async def delete_topic(
    admin: Admin, topic: str, cluster: str
) -> tuple[dict[str, Any], Table, list[dict[str, str]]]:
    """Delete a topic from the brokers of a cluster first, then its routes."""
    brokers = await each(
        await admin.masters(cluster), lambda address: admin.delete_topic(address, topic)
    )
    nameservers = await each(
        admin.nameservers, lambda address: admin.delete_route(address, topic, cluster)
    )
    document = {
        "topic": topic,
        "clusterName": cluster,
        "brokers": result_rows(brokers),
        "nameServers": result_rows(nameservers, "namesrvAddr"),
    }
    rows = [(topic, "broker", address, result_text(error)) for address, error in brokers.items()]
    rows += ((topic, "nameserver", a, result_text(error)) for a, error in nameservers.items())
    return (
        document,
        Table(("Topic", "Deleted From", "Address", "Result"), rows),
        [
            brokers,
            nameservers,
        ],
    )


async def _update_perm(admin: Admin, options: Options, printer: Printer) -> int:
    before: dict[str, int] = {}

    async def change(address: str) -> None:
        # Only the permission changes: the rest is what this broker has now.
        topic = await admin.topic_config(address, options.topic)
        before[address] = topic.perm
        changed = TopicConfig(
            topic.name,
            topic.read_queue_count,
            topic.write_queue_count,
            options.perm,
            topic.filter_type,
            topic.sys_flag,
            topic.order,
        )
        await admin.update_topic(address, changed)

    outcomes = await each(await addresses_for(admin, options), change)
    rows = [
        (
            options.topic,
            address,
            perm_text(before[address]) if address in before else "",
            perm_text(options.perm),
            result_text(error),
        )
        for address, error in outcomes.items()
    ]
    document = {
        "topic": options.topic,
        "perm": options.perm,
        "brokers": [
            {**row, "oldPerm": before.get(row["brokerAddr"])} for row in result_rows(outcomes)
        ],
    }
    printer.show(document, Table(("Topic", "Broker", "Before", "Now", "Result"), rows))
    return settle(outcomes)


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
    topics = await admin.topics()
    if not options.clusterModel:
        printer.show({"topicList": topics}, *topics)
        return DONE
    listed = []
    rows: list[tuple[object, ...]] = []
    for topic in topics:
        if topic.startswith((RETRY_PREFIX, DEAD_PREFIX)):
            continue
        clusters: list[str] = []
        groups: list[str] = []
        try:
            route = await admin.route(topic)
            clusters = sorted({broker.cluster for broker in route.brokers})
            groups = await admin.groups_of_topic(topic)
        except SluiceError:
            pass  # topics of the nameserver's own have neither
        listed.append({"clusters": clusters, "topic": topic, "groupList": groups})
        rows += ((", ".join(clusters), topic, group) for group in groups or [""])
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
    rows: list[dict[str, Any]] = []
    topics = await admin.topics() if options.topic is None else [options.topic]
    for topic in topics:
        if topic.startswith((RETRY_PREFIX, DEAD_PREFIX)):
            continue
        try:
            found = await _stats_of(admin, topic)
        except SluiceError:
            if options.topic is not None:
                raise
            continue  # topics of the nameserver's own have no route
        if options.activeTopic:
            found = [row for row in found if row["inMsg24Hour"] or row["outMsg24Hour"]]
        rows += found
    names = ("Topic", "Consumer Group", "Behind", "In/s", "Out/s", "In 24 h", "Out 24 h")
    printer.show({"stats": rows}, Table(names, [tuple(row.values()) for row in rows]))
    return DONE


async def _stats_of(admin: Admin, topic: str) -> list[dict[str, Any]]:
    """What came in and went out of a topic, a row for each group that reads it."""
    addresses = addresses_of((await admin.route(topic)).brokers)
    in_tps, in_day = await _sum(admin, addresses, "TOPIC_PUT_NUMS", topic)
    rows = []
    for group in await admin.groups_of_topic(topic) or [""]:
        out_tps, out_day = None, None
        behind = 0
        if group:
            out_tps, out_day = await _sum(admin, addresses, "GROUP_GET_NUMS", f"{topic}@{group}")
            behind = max(0, (await admin.consume_stats(group, topic)).behind)
        rows.append(
            {
                "topic": topic,
                "consumerGroup": group,
                "accumulation": behind,
                "inTPS": in_tps,
                "outTPS": out_tps,
                "inMsg24Hour": in_day,
                "outMsg24Hour": out_day,
            }
        )
    return rows


async def _sum(admin: Admin, addresses: list[str], name: str, key: str) -> tuple[float, int]:
    found = [await admin.stats(address, name, key) for address in addresses]
    counted = [stats for stats in found if stats is not None]
    return sum((one.minute.tps for one in counted), 0.0), sum(one.day_total for one in counted)


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
