"""This module shows groups of Kafka's clients beside those of RocketMQ's."""

from __future__ import annotations

from typing import Any, Final

from sluice.client.administration.admin import Admin
from sluice.client.administration.values import KafkaGroup
from sluice.client.printing import Printer, Table, time_text

TYPE: Final = "KAFKA"


def overview_of_kafka(group: KafkaGroup) -> dict[str, Any]:
    """A group in one line, as the others have it."""
    return {
        "group": group.group,
        "count": len(group.members),
        "version": group.state if group.members else "OFFLINE",
        "consumeType": TYPE,
        "messageModel": group.protocol,
        "consumeTps": 0.0,
        "diffTotal": group.behind,
        "unequalSubscriptions": [],
    }


async def show_kafka_group(admin: Admin, name: str, topic: str | None, printer: Printer) -> bool:
    """Show how far a group is behind on each partition; False where there is none of this name."""
    found = await admin.kafka_groups(name)
    rows: list[tuple[object, ...]] = []
    table = []
    for group in found:
        for (each, partition), (high, offset, last_ms) in group.offsets.items():
            if topic is not None and each != topic:
                continue
            rows.append(
                (
                    *(each, group.broker_name, partition, high, offset, high - offset),
                    time_text(last_ms) or "N/A",
                )
            )
            table.append(
                {
                    "topic": each,
                    "brokerName": group.broker_name,
                    "queueId": partition,
                    "brokerOffset": high,
                    "consumerOffset": offset,
                    "diff": high - offset,
                    "lastTimestamp": last_ms,
                }
            )
    if not found:
        return False
    members = [member for group in found for member in group.members]
    document = {
        "consumerGroup": name,
        "consumeType": TYPE,
        "state": found[0].state,
        "members": members,
        "diffTotal": sum(group.behind for group in found),
        "offsetTable": table,
    }
    names = (
        *("Topic", "Broker", "Queue", "Broker Offset", "Consumer Offset"),
        *("Behind", "Last Commit"),
    )
    printer.show(
        document,
        Table(names, rows),
        "",
        f"A group of Kafka's clients: {found[0].state}, {len(members)} members",
        *(f"  {member['memberId']} at {member['host']}" for member in members),
        f"Behind in total: {document['diffTotal']}",
    )
    return True
