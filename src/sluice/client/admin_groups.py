"""This module has the admin commands about consumer groups: their settings and their progress."""

from __future__ import annotations

import argparse
from typing import Any, Final

import orjson

from sluice.client.admin_flags import (
    BROKER_FLAGS,
    BROKER_OR_CLUSTER,
    DONE,
    ROUTE_FLAG,
    Command,
    Flag,
    Options,
    at_least,
    result_rows,
    result_text,
    settle,
    text,
    tried,
    yes_no,
)
from sluice.client.admin_kafka import overview_of_kafka, show_kafka_group
from sluice.client.administration.admin import Admin
from sluice.client.group_checks import warning_lines
from sluice.client.printing import Printer, Table, time_text
from sluice.errors import NotFound, SluiceError
from sluice.protocol.json_members import queue_object
from sluice.protocol.remoting_reports import GroupConfig

GROUP: Final = Flag("g", "groupName", "Name of the consumer group.", text, required=True)


def _policy(value: str) -> dict[str, Any]:
    """A group's retry policy out of JSON."""
    try:
        policy = orjson.loads(value)
    except orjson.JSONDecodeError as error:
        raise argparse.ArgumentTypeError(f"the retry policy is not JSON: {error}") from None
    if not isinstance(policy, dict) or policy.get("type") not in ("EXPONENTIAL", "CUSTOMIZED"):
        raise argparse.ArgumentTypeError('no object with "type" EXPONENTIAL or CUSTOMIZED')
    return policy


def _mode(value: str) -> str:
    if value not in ("PULL", "POP"):
        raise argparse.ArgumentTypeError(f"{value!r} is neither PULL nor POP")
    return value


def _attributes(value: str) -> dict[str, str]:
    """+a=b,-c as a table of signed names."""
    changes: dict[str, str] = {}
    for part in filter(None, value.split(",")):
        name, equals, new = part.partition("=")
        if name[:1] not in "+-" or bool(equals) != (name[:1] == "+") or name in changes:
            raise argparse.ArgumentTypeError(f"{part!r} is neither +name=value nor -name")
        changes[name] = new
    return changes


# ----------------------------------------------------------------------------------------- settings


async def _update_group(admin: Admin, options: Options, printer: Printer) -> int:
    group = GroupConfig(
        options.groupName,
        options.consumeEnable,
        options.consumeFromMinEnable,
        options.consumeBroadcastEnable,
        options.consumeMessageOrderly,
        options.retryQueueNums,
        options.retryMaxTimes,
        options.brokerId,
        options.whichBrokerWhenConsumeSlowly,
        options.notifyConsumerIdsChanged,
        options.groupRetryPolicy,
        options.attributes or {},
    )
    done = await tried(
        admin.create_group(group, broker=options.brokerAddr, cluster=options.clusterName)
    )
    document = {"subscriptionGroupConfig": group.members(), "brokers": result_rows(done.brokers)}
    rows = [
        (
            group.name,
            address,
            group.consume_enabled,
            group.broadcast_enabled,
            group.orderly,
            group.retry_queue_count,
            group.retry_max,
            result_text(error),
        )
        for address, error in done.brokers.items()
    ]
    names = (
        *("Group", "Broker", "Consumes", "Broadcasts", "Ordered"),
        *("Retry Queues", "Retries", "Result"),
    )
    printer.show(document, Table(names, rows))
    return settle(done.brokers)


async def _set_mode(admin: Admin, options: Options, printer: Printer) -> int:
    group, topic, mode = options.groupName, options.topicName, options.mode
    share_count = options.popShareQueueNum
    outcomes = await tried(
        admin.set_group_mode(
            group,
            topic,
            mode,
            share_count=share_count,
            broker=options.brokerAddr,
            cluster=options.clusterName,
        )
    )
    document = {
        "groupName": group,
        "topicName": topic,
        "mode": mode,
        "popShareQueueNum": share_count,
        "brokers": result_rows(outcomes),
    }
    rows = [
        (group, topic, mode, address, result_text(error)) for address, error in outcomes.items()
    ]
    printer.show(document, Table(("Group", "Topic", "Mode", "Broker", "Result"), rows))
    return settle(outcomes)


async def _delete_group(admin: Admin, options: Options, printer: Printer) -> int:
    group = options.groupName
    done = await tried(
        admin.delete_group(
            group,
            offsets=options.removeOffset,
            broker=options.brokerAddr,
            cluster=options.clusterName,
        )
    )
    document: dict[str, Any] = {
        "groupName": group,
        "removeOffset": options.removeOffset,
        "brokers": result_rows(done.brokers),
    }
    rows = [(group, address, result_text(error)) for address, error in done.brokers.items()]
    printer.show(document, Table(("Group", "Deleted From", "Result"), rows))
    tables = [table for one in done.topics for table in (one.brokers, one.nameservers)]
    return settle(done.brokers, *tables)


# ----------------------------------------------------------------------------------------- progress


async def _progress(admin: Admin, options: Options, printer: Printer) -> int:
    if options.groupName is None:
        return await _progress_of_all(admin, printer)
    group = options.groupName
    try:
        stats = await admin.consume_stats(group, options.topicName, options.cluster)
    except NotFound:
        if not await show_kafka_group(admin, group, options.topicName, printer):
            raise
        return DONE
    if not stats.queues:
        if await show_kafka_group(admin, group, options.topicName, printer):
            return DONE
        raise NotFound(f"group {group} has no offsets; none of its consumers has connected")
    owners = await admin.queue_owners(group) if options.showClientIP else {}
    try:
        disagreements = (await admin.consumer_connection(group)).disagreements
    except SluiceError:
        disagreements = ()  # nobody is connected, so nobody disagrees
    rows: list[tuple[object, ...]] = []
    table = []
    for queue, row in stats.queues.items():
        behind = row.broker_offset - row.consumer_offset
        in_flight = row.pull_offset - row.consumer_offset
        # The address is the first part of a client's name.
        owner = (owners.get(queue, "N/A").partition("@")[0],) if options.showClientIP else ()
        rows.append(
            (
                *(queue.topic, queue.broker_name, queue.queue_id),
                *(row.broker_offset, row.consumer_offset, *owner, behind, in_flight),
                time_text(row.last_ms) or "N/A",
            )
        )
        table.append(
            {
                **queue_object(queue),
                "brokerOffset": row.broker_offset,
                "consumerOffset": row.consumer_offset,
                "pullOffset": row.pull_offset,
                "diff": behind,
                "inflight": in_flight,
                "lastTimestamp": row.last_ms,
                **({"clientIP": owner[0]} if owner else {}),
            }
        )
    document = {
        "consumerGroup": group,
        "consumeTps": stats.tps,
        "diffTotal": stats.behind,
        "inflightTotal": stats.in_flight,
        "offsetTable": table,
        "unequalSubscriptions": list(disagreements),
    }
    names = (
        *("Topic", "Broker", "Queue", "Broker Offset", "Consumer Offset"),
        *(("Client IP",) if options.showClientIP else ()),
        *("Behind", "In Flight", "Last Time"),
    )
    printer.show(
        document,
        Table(names, rows),
        "",
        f"Consume TPS: {stats.tps:.2f}",
        f"Behind in total: {stats.behind}",
        f"In flight in total: {stats.in_flight}",
        *warning_lines(group, disagreements),
    )
    return DONE


async def _progress_of_all(admin: Admin, printer: Printer) -> int:
    found = []
    warnings: list[str] = []
    for one in await admin.group_overviews():
        connected = one.connected
        is_push = connected is not None and connected.consume_type != "CONSUME_ACTIVELY"
        disagreements = [] if connected is None else list(connected.disagreements)
        found.append(
            {
                "group": one.group,
                "count": 0 if connected is None else len(connected.connections),
                "version": one.version,
                "consumeType": "" if connected is None else ("PUSH" if is_push else "PULL"),
                "messageModel": connected.message_model if connected and is_push else "",
                "consumeTps": 0.0 if one.stats is None else one.stats.tps,
                "diffTotal": one.behind,
                "unequalSubscriptions": disagreements,
            }
        )
        if one.error:
            warnings += ["", f"WARNING: group {one.group}: {one.error}"]
        warnings += warning_lines(one.group, disagreements)
    found += [overview_of_kafka(one) for one in await admin.kafka_groups()]
    names = ("Group", "Count", "Version", "Type", "Model", "TPS", "Behind", "Subscriptions")
    rows = [
        (
            *(row["group"], row["count"], row["version"], row["consumeType"]),
            *(row["messageModel"], row["consumeTps"], row["diffTotal"]),
            "UNEQUAL" if row["unequalSubscriptions"] else ("equal" if row["count"] else ""),
        )
        for row in found
    ]
    printer.show({"groups": found}, Table(names, rows), *warnings)
    return DONE


COMMANDS: Final = (
    Command(
        "updateSubGroup",
        "Creates a consumer group, or sets all its settings anew.",
        (
            *BROKER_FLAGS,
            GROUP,
            Flag(
                "s", "consumeEnable", "Whether it may consume. Default: true.", yes_no, default=True
            ),
            Flag(
                "m",
                "consumeFromMinEnable",
                "Whether a new one may begin at the first message. Default: false.",
                yes_no,
                default=False,
            ),
            Flag(
                "d",
                "consumeBroadcastEnable",
                "Whether it may broadcast. Default: false.",
                yes_no,
                default=False,
            ),
            Flag(
                "o",
                "consumeMessageOrderly",
                "Whether it consumes in order. Default: false.",
                yes_no,
                default=False,
            ),
            Flag(
                "q",
                "retryQueueNums",
                "Queues of its retry topic. Default: 1.",
                at_least(0),
                default=1,
            ),
            Flag(
                "r",
                "retryMaxTimes",
                "Tries before a message is given up. Default: 16.",
                at_least(-1),
                default=16,
            ),
            Flag("p", "groupRetryPolicy", "When messages are tried again: a JSON object.", _policy),
            Flag("i", "brokerId", "Replica to consume from. Default: 0.", at_least(0), default=0),
            Flag(
                "w",
                "whichBrokerWhenConsumeSlowly",
                "Replica for who is far behind. Default: 1.",
                at_least(0),
                default=1,
            ),
            Flag(
                "a",
                "notifyConsumerIdsChanged",
                "Whether members hear of others at once. Default: true.",
                yes_no,
                default=True,
            ),
            Flag("", "attributes", "Attributes to add and take away: +a=b,-c.", _attributes),
        ),
        _update_group,
        "updateSubGroup -c DefaultCluster -g billing",
        BROKER_OR_CLUSTER,
    ),
    Command(
        "setConsumeMode",
        "Says whether the consumers of a group pull a topic or pop it.",
        (
            *BROKER_FLAGS,
            Flag("t", "topicName", "Name of the topic.", text, required=True),
            GROUP,
            Flag("m", "mode", "PULL or POP.", _mode, required=True),
            Flag(
                "q",
                "popShareQueueNum",
                "With how many others a consumer shares its queues; 0: with all. Default: 0.",
                at_least(0, (1 << 31) - 1),
                default=0,
            ),
        ),
        _set_mode,
        "setConsumeMode -c DefaultCluster -t orders -g billing -m POP",
        BROKER_OR_CLUSTER,
    ),
    Command(
        "deleteSubGroup",
        "Deletes a consumer group; from a cluster, with its retry topics.",
        (
            *BROKER_FLAGS,
            GROUP,
            Flag(
                "r",
                "removeOffset",
                "Whether its offsets go too. Default: false.",
                yes_no,
                default=False,
            ),
        ),
        _delete_group,
        "deleteSubGroup -c DefaultCluster -g billing -r true",
        BROKER_OR_CLUSTER,
    ),
    Command(
        "consumerProgress",
        "Shows how far behind a group is on each queue, or how far all groups are.",
        (
            Flag("g", "groupName", "Only this group, queue by queue.", text),
            Flag("t", "topicName", "Only this topic of the group.", text),
            Flag(
                "s",
                "showClientIP",
                "Whether to show who reads each queue. Default: false.",
                yes_no,
                default=False,
            ),
            ROUTE_FLAG,
        ),
        _progress,
        "consumerProgress -g billing",
    ),
)
