"""This module has the admin command that lists what waits for its time."""

from __future__ import annotations

from typing import Any, Final

from sluice.client.admin_flags import DONE, Command, Flag, Options, at_least, text
from sluice.client.administration.admin import Admin
from sluice.client.administration.values import DELAYED_MEMBERS, DelayedMessage, DelayTotals
from sluice.client.printing import Printer, time_text


def _line(row: DelayedMessage) -> str:
    kind = f"level {row.delay_level}" if row.delay_level else "timed"
    parts = [
        time_text(row.due_ms),
        f"{row.broker_name} {row.topic}/{row.queue_id}",
        kind,
        row.unique_key or row.message_id,
        *([f"keys={row.keys}"] if row.keys else []),
        f"{row.body_bytes} bytes",
    ]
    return " ".join(parts)


def _members(row: DelayedMessage) -> dict[str, Any]:
    values = {member: getattr(row, name) for member, name in DELAYED_MEMBERS.items()}
    return {"brokerName": row.broker_name, **values}


async def _list(admin: Admin, options: Options, printer: Printer) -> int:
    printer.begin_list("messages")
    totals = DelayTotals()
    shown = 0
    walk = admin.walk_delayed(
        totals, topic=options.topic, cluster=options.cluster, count=options.count
    )
    async for message in walk:
        printer.item(_members(message), _line(message))
        shown += 1
    counts = {"timerCount": totals.timer_count, "levelCount": totals.level_count}
    total = f"{totals.timer_count} timed and {totals.level_count} messages with a delay level"
    printer.end_list({"count": shown, **counts}, f"{shown} shown; {total} wait in all")
    return DONE


COMMANDS: Final = (
    Command(
        "delayed",
        "Lists messages that wait for their time, the earliest first.",
        (
            Flag("t", "topic", "Only those for this topic.", text),
            Flag("c", "cluster", "Only brokers of this cluster.", text),
            Flag(
                "m",
                "count",
                "How many of each broker at most. Default: 100.",
                at_least(1, 1_000_000),
                default=100,
            ),
        ),
        _list,
        "delayed -t orders -m 20",
    ),
)
