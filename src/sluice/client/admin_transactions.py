"""This module has the admin commands for transactions that nobody has ended yet.

The list is Sluice's own request, which Apache's brokers refuse; it goes page by page. Asking anew
is RocketMQ's request 323, for which mqadmin has no command.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from typing import Final

from sluice.client.admin import Admin
from sluice.client.admin_flags import DONE, Command, Flag, Options, at_least, text
from sluice.client.messages import stored_messages
from sluice.client.printing import Printer, time_text
from sluice.clock import wall_ms
from sluice.errors import ConfigError, NotFound
from sluice.protocol.remoting_codes import RequestCode as Request
from sluice.protocol.remoting_codes import ResponseCode as Response
from sluice.protocol.remoting_transactions import OpenHalf, half_members, read_open_halves

_SECONDS: Final = 60.0
_MESSAGE_ID: Final = re.compile(r"(?:[0-9a-fA-F]{16}|[0-9a-fA-F]{40})([0-9a-fA-F]{16})")


async def _pages(
    admin: Admin, address: str, options: Options, counts: dict[str, int]
) -> AsyncIterator[list[OpenHalf]]:
    """The open transactions of a broker, the oldest first; how many, is added to `counts`."""
    offset = 0
    while offset >= 0:
        ext: dict[str, object] = {"offset": offset}
        for name in ("topic", "group"):
            if getattr(options, name) is not None:
                ext[name] = getattr(options, name)
        answer = await admin.done(
            address,
            Request.SLUICE_LIST_TRANSACTIONS,
            ext,
            what="the list of open transactions",
            timeout_seconds=_SECONDS,
        )
        if not offset:
            counts["openCount"] += int(answer.ext["openCount"])
        yield read_open_halves(answer.body)
        offset = int(answer.ext["nextOffset"])


def _line(broker: str, half: OpenHalf, now_ms: int) -> str:
    next_check = time_text(half.next_check_ms) if half.next_check_ms >= 0 else "nobody knows when"
    return (
        f"{half.message_id} {half.transaction_id} {broker} {half.topic}/{half.queue_id} "
        f"of group {half.producer_group}, {max(0, now_ms - half.since_ms) // 1000} s old, "
        f"asked {half.check_times} times, next {next_check}: {half.waits_for}"
    )


async def _list(admin: Admin, options: Options, printer: Printer) -> int:
    printer.begin_list("transactions")
    counts = {"openCount": 0}
    shown, now_ms = 0, wall_ms()
    for broker in await admin.brokers(options.cluster):
        if 0 not in broker.addresses:
            continue
        found = 0
        async for halves in _pages(admin, broker.addresses[0], options, counts):
            for half in halves[: options.count - found]:
                row = {"brokerName": broker.name, **half_members(half)}
                printer.item(row, _line(broker.name, half, now_ms))
                found += 1
            if found >= options.count:
                break
        shown += found
    rest = f"{shown} shown; {counts['openCount']} transactions are open in all"
    printer.end_list({"count": shown, **counts}, rest)
    return DONE


async def _resume(admin: Admin, options: Options, printer: Printer) -> int:
    match = _MESSAGE_ID.fullmatch(options.msgId)
    if match is None:
        raise ConfigError(f"-i/--msgId: {options.msgId!r} is not the id that the list shows")
    for broker in await admin.brokers(options.cluster):
        address = broker.addresses.get(0)
        if address is None:
            continue
        # An id names the address that the broker knows of itself: all are asked whose it is.
        place = {"offset": str(int(match[1], 16))}
        answer = await admin.ask(address, Request.VIEW_MESSAGE_BY_ID, place)
        if answer.code != Response.SUCCESS:
            continue
        (message,) = stored_messages(answer.body, broker.name)
        if message.offset_id != options.msgId.upper():
            continue
        ext: dict[str, object] = {"topic": message.topic, "msgId": message.offset_id}
        what = f"asking about {options.msgId} anew"
        await admin.done(address, Request.RESUME_CHECK_HALF_MESSAGE, ext, what=what)
        done = {"brokerName": broker.name, "msgId": message.offset_id}
        printer.show(done, f"{broker.name} asks about {message.offset_id} anew")
        return DONE
    raise NotFound(f"no broker has a message with the id {options.msgId}")


_CLUSTER: Final = Flag("c", "cluster", "Only brokers of this cluster.", text)

COMMANDS: Final = (
    Command(
        "transactions",
        "Lists transactions that nobody has ended yet, and what each waits for.",
        (
            Flag("t", "topic", "Only those for this topic.", text),
            Flag("g", "group", "Only those of this producer group.", text),
            _CLUSTER,
            Flag(
                "m",
                "count",
                "How many of each broker at most. Default: 100.",
                at_least(1, 1_000_000),
                default=100,
            ),
        ),
        _list,
        "transactions -g shop",
    ),
    Command(
        "resumeCheckHalfMessage",
        "Asks anew about a transactional message that is open, or was parked.",
        (
            Flag(
                "i",
                "msgId",
                "Its offset id, as the list or printMsg shows it.",
                text,
                required=True,
            ),
            _CLUSTER,
        ),
        _resume,
        "resumeCheckHalfMessage -i 7F00000100002A9F0000000000000E4A",
    ),
)
