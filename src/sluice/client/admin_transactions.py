"""This module has the admin commands for transactions that nobody has ended yet.

Asking anew is RocketMQ's request 323, for which mqadmin has no command.
"""

from __future__ import annotations

from collections import Counter
from typing import Final

from sluice.client.admin_flags import DONE, Command, Flag, Options, at_least, text
from sluice.client.administration.admin import Admin
from sluice.client.printing import Printer, time_text
from sluice.clock import wall_ms
from sluice.errors import ConfigError
from sluice.protocol.remoting_transactions import OpenHalf, half_members


def _line(broker: str, half: OpenHalf, now_ms: int) -> str:
    next_check = time_text(half.next_check_ms) if half.next_check_ms >= 0 else "nobody knows when"
    return (
        f"{half.message_id} {half.transaction_id} {broker} {half.topic}/{half.queue_id} "
        f"of group {half.producer_group}, {max(0, now_ms - half.since_ms) // 1000} s old, "
        f"asked {half.check_times} times, next {next_check}: {half.waits_for}"
    )


async def _list(admin: Admin, options: Options, printer: Printer) -> int:
    printer.begin_list("transactions")
    totals: Counter[str] = Counter(openCount=0)
    shown, now_ms = 0, wall_ms()
    walk = admin.walk_transactions(
        totals,
        topic=options.topic,
        group=options.group,
        cluster=options.cluster,
        count=options.count,
    )
    async for name, half in walk:
        printer.item({"brokerName": name, **half_members(half)}, _line(name, half, now_ms))
        shown += 1
    rest = f"{shown} shown; {totals['openCount']} transactions are open in all"
    printer.end_list({"count": shown, **totals}, rest)
    return DONE


async def _resume(admin: Admin, options: Options, printer: Printer) -> int:
    try:
        message = await admin.resume_check(options.msgId, cluster=options.cluster)
    except ConfigError as error:
        raise ConfigError(f"-i/--msgId: {error}") from None
    done = {"brokerName": message.broker_name, "msgId": message.offset_id}
    printer.show(done, f"{message.broker_name} asks about {message.offset_id} anew")
    return DONE


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
