"""This module has the admin command that lists what waits for its time.

The request is Sluice's own; Apache's brokers refuse it. It goes page by page: there may be very
many.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any, Final

import orjson

from sluice.client.admin import Admin
from sluice.client.admin_flags import DONE, Command, Flag, Options, at_least, text
from sluice.client.printing import Printer, time_text
from sluice.protocol.remoting_codes import RequestCode as Request

_SECONDS: Final = 60.0

Rows = list[dict[str, Any]]


async def _pages(
    admin: Admin, address: str, topic: str | None, counts: dict[str, int]
) -> AsyncIterator[Rows]:
    """What waits in a broker, the earliest first; how much that is, is added to `counts`."""
    after = ""
    is_first = True
    while after or is_first:
        ext: dict[str, object] = {"after": after, **({"topic": topic} if topic else {})}
        answer = await admin.done(
            address,
            Request.SLUICE_LIST_DELAYED,
            ext,
            what="the list of delayed messages",
            timeout_seconds=_SECONDS,
        )
        if is_first:
            counts["timerCount"] += int(answer.ext["timerCount"])
            counts["levelCount"] += int(answer.ext["levelCount"])
        is_first = False
        rows: Rows = orjson.loads(answer.body)["messages"]
        yield rows
        after = answer.ext.get("after", "")


def _line(row: dict[str, Any]) -> str:
    kind = f"level {row['delayLevel']}" if row["delayLevel"] else "timed"
    parts = [
        time_text(row["dueTimestamp"]),
        f"{row['brokerName']} {row['topic']}/{row['queueId']}",
        kind,
        row["uniqueKey"] or row["offsetMsgId"],
        *([f"keys={row['keys']}"] if row["keys"] else []),
        f"{row['bodySize']} bytes",
    ]
    return " ".join(parts)


async def _list(admin: Admin, options: Options, printer: Printer) -> int:
    printer.begin_list("messages")
    counts = {"timerCount": 0, "levelCount": 0}
    shown = 0
    for broker in await admin.brokers(options.cluster):
        if 0 not in broker.addresses:
            continue
        found = 0
        async for rows in _pages(admin, broker.addresses[0], options.topic, counts):
            for row in rows[: options.count - found]:
                row = {"brokerName": broker.name, **row}
                printer.item(row, _line(row))
                found += 1
            if found >= options.count:
                break
        shown += found
    total = f"{counts['timerCount']} timed and {counts['levelCount']} messages with a delay level"
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
