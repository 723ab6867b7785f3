"""This module has the admin commands about connected clients: who they are, what they do, and
whether the members of a group subscribe to the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from sluice.client.admin_flags import DONE, REFUSED, Command, Flag, Options, text, topic_flag
from sluice.client.administration.admin import Admin
from sluice.client.administration.groups import all_disagreements
from sluice.client.group_checks import subscriptions_of, warning_lines
from sluice.client.printing import Printer, Table
from sluice.errors import NotFound
from sluice.protocol.json_members import queue_object
from sluice.protocol.remoting_clients import ConnectionInfo
from sluice.protocol.remoting_reports import RunningInfo, version_text

SAME: Final = "All members of the group have the same subscription."
_SHOWN_NUMBERS: Final = ("cachedMsgCount", "cachedMsgMinOffset", "cachedMsgMaxOffset")
_RATES: Final = (
    *("pullRT", "pullTPS", "consumeRT"),
    *("consumeOKTPS", "consumeFailedTPS", "consumeFailedMsgs"),
)
_GROUP: Final = Flag("g", "consumerGroup", "Name of the consumer group.", text, required=True)
_BROKER: Final = Flag("b", "brokerAddr", "Only ask this broker, host:port.", text)


# -------------------------------------------------------------------------------------- connections


def _connection_rows(connections: Sequence[ConnectionInfo]) -> Table:
    rows = [
        (row.client_id, row.client_address, row.language, version_text(row.version))
        for row in connections
    ]
    return Table(("Client Id", "Address", "Language", "Version"), rows)


def _connection_members(row: ConnectionInfo) -> dict[str, Any]:
    return {**row.members(), "versionDesc": version_text(row.version)}


async def _consumer_connection(admin: Admin, options: Options, printer: Printer) -> int:
    group = options.consumerGroup
    connected = await admin.consumer_connection(group, options.brokerAddr)
    wanted = connected.subscriptions
    document = {
        "connectionSet": [_connection_members(row) for row in connected.connections],
        "consumeFromWhere": connected.consume_from_where,
        "consumeType": connected.consume_type,
        "messageModel": connected.message_model,
        "subscriptionTable": {topic: wanted[topic].members() for topic in sorted(wanted)},
        "unequalSubscriptions": list(connected.disagreements),
    }
    rows = [(topic, wanted[topic].expression) for topic in sorted(wanted)]
    printer.show(
        document,
        _connection_rows(connected.connections),
        Table(("Topic", "Subscription"), rows),
        "",
        f"Consume type: {connected.consume_type}",
        f"Message model: {connected.message_model}",
        f"Consume from where: {connected.consume_from_where}",
        *warning_lines(group, connected.disagreements),
    )
    return DONE


async def _producer_connection(admin: Admin, options: Options, printer: Printer) -> int:
    connections = await admin.producer_connection(options.producerGroup, options.topic)
    document = {"connectionSet": [_connection_members(row) for row in connections]}
    printer.show(document, _connection_rows(connections))
    return DONE


# ------------------------------------------------------------------------------------------- status


async def _consumer_status(admin: Admin, options: Options, printer: Printer) -> int:
    group = options.consumerGroup
    if options.clientId is not None:
        info = await admin.running_info(
            group, options.clientId, stacks=options.jstack, address=options.brokerAddr
        )
        printer.show({"clientId": options.clientId, **_info_members(info)}, *_info_blocks(info))
        return DONE
    health = await admin.group_health(group, stacks=options.jstack, address=options.brokerAddr)
    members, disagreements, problems = health.members, health.disagreements, health.problems
    document = {
        "consumerGroup": group,
        "consumers": [
            {
                **_connection_members(member.connection),
                **({} if member.info is None else _info_members(member.info)),
                "error": member.error,
            }
            for member in members
        ],
        "sameSubscription": not disagreements,
        "unequalSubscriptions": disagreements,
        "problems": problems,
    }
    rows = [
        (
            at,
            member.connection.client_id,
            version_text(member.connection.version),
            None if member.info is None else len(member.info.queues),
            member.error or "running",
        )
        for at, member in enumerate(members, 1)
    ]
    agree = ["", SAME] if not disagreements else warning_lines(group, disagreements)
    printer.show(
        document,
        Table(("Index", "Client Id", "Version", "Queues", "State"), rows),
        *agree,
        *([] if problems else ["Rebalance OK."]),
        *(f"WARNING: {line}" for line in problems),
    )
    return DONE


def _info_members(info: RunningInfo) -> dict[str, Any]:
    return {
        "properties": info.properties,
        "subscriptionSet": [one.members() for one in info.subscriptions],
        "mqTable": [{**queue_object(queue), **info.queues[queue]} for queue in sorted(info.queues)],
        "mqPopTable": [
            {**queue_object(queue), **info.popped_queues[queue]}
            for queue in sorted(info.popped_queues)
        ],
        "statusTable": info.rates,
        "userConsumerInfo": info.user,
        "jstack": info.stacks,
    }


def _info_blocks(info: RunningInfo) -> list[Table | str]:
    queues = [
        (
            *(queue.topic, queue.broker_name, queue.queue_id, row.get("commitOffset")),
            *(row.get(name) for name in _SHOWN_NUMBERS),
            row.get("droped"),
        )
        for queue, row in sorted(info.queues.items())
    ]
    rates = [
        (topic, *(info.rates[topic].get(name) for name in _RATES)) for topic in sorted(info.rates)
    ]
    blocks: list[Table | str] = [
        Table(("Property", "Value"), sorted(info.properties.items())),
        Table(
            ("Topic", "Subscription", "Type"),
            [(one.topic, one.expression, one.expression_type) for one in info.subscriptions],
        ),
        Table(
            (
                *("Topic", "Broker", "Queue", "Offset"),
                *("Cached", "First Cached", "Last Cached", "Dropped"),
            ),
            queues,
        ),
        Table(
            (
                *("Topic", "Pull RT", "Pull/s", "Consume RT"),
                *("OK/s", "Failed/s", "Failed In Hour"),
            ),
            rates,
        ),
    ]
    if info.user:
        blocks.append(Table(("Own Words", "Value"), sorted(info.user.items())))
    if info.stacks is not None:
        blocks += ["", info.stacks.rstrip("\n")]
    return blocks


async def _subscriptions(admin: Admin, options: Options, printer: Printer) -> int:
    groups = await admin.groups() if options.consumerGroup is None else [options.consumerGroup]
    found = []
    rows: list[tuple[object, ...]] = []
    warnings: list[str] = []
    for group in groups:
        try:
            connected, members = await admin.group_members(group)
        except NotFound:
            if options.consumerGroup is not None:
                raise
            continue  # nobody is connected, so nobody disagrees
        disagreements = all_disagreements(connected, members)
        wanted = subscriptions_of(members)
        silent = [member.connection.client_id for member in members if member.info is None]
        found.append(
            {
                "group": group,
                "subscriptions": [
                    {"topic": topic, "subString": expression, "clientIds": clients}
                    for topic, expressions in wanted.items()
                    for expression, clients in expressions.items()
                ],
                "silentClientIds": silent,
                "sameSubscription": not disagreements,
                "unequalSubscriptions": disagreements,
            }
        )
        rows += (
            (
                group,
                topic,
                expression,
                ", ".join(clients),
                "equal" if len(texts) == 1 else "UNEQUAL",
            )
            for topic, texts in wanted.items()
            for expression, clients in texts.items()
        )
        rows += ((group, "", "", client_id, "does not answer") for client_id in silent)
        warnings += warning_lines(group, disagreements)
    names = ("Group", "Topic", "Subscription", "Clients", "Members")
    printer.show({"groups": found}, Table(names, rows), *(warnings or ["", SAME]))
    return REFUSED if any(row["unequalSubscriptions"] for row in found) else DONE


COMMANDS: Final = (
    Command(
        "consumerStatus",
        "Asks the consumers of a group what they do, and whether they agree.",
        (
            _GROUP,
            Flag("i", "clientId", "Only this consumer, with all that it says.", text),
            _BROKER,
            Flag("s", "jstack", "With the stacks of its threads.", None, default=False),
        ),
        _consumer_status,
        "consumerStatus -g billing",
    ),
    Command(
        "consumerConnection",
        "Shows who of a consumer group is connected, and what they subscribe to.",
        (_GROUP, _BROKER),
        _consumer_connection,
        "consumerConnection -g billing",
    ),
    Command(
        "producerConnection",
        "Shows who of a producer group is connected to the brokers of a topic.",
        (
            Flag("g", "producerGroup", "Name of the producer group.", text, required=True),
            topic_flag(),
        ),
        _producer_connection,
        "producerConnection -g shop -t orders",
    ),
    Command(
        "subscriptions",
        "Shows what members of groups subscribe to; exit code 1 where they differ.",
        (Flag("g", "consumerGroup", "Only this group. Default: all.", text),),
        _subscriptions,
        "subscriptions -g billing",
    ),
)
