"""This module has the admin commands for dead letters: look at them, and send them again."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

from sluice.client.admin_flags import (
    DONE,
    REFUSED,
    Command,
    Flag,
    Options,
    at_least,
    text,
    when_ms,
)
from sluice.client.administration.admin import Admin
from sluice.client.administration.business import LetterChoice, Watch
from sluice.client.administration.values import (
    FINE_OUTCOMES,
    LETTER_MEMBERS,
    DeadLetter,
    Resent,
)
from sluice.client.messages import TIME_MAX
from sluice.client.printing import Printer, Progress, Table, time_text
from sluice.errors import ConfigError

_GROUP: Final = Flag("g", "group", "Name of the consumer group.", text, required=True)
_CHOICE: Final = (
    Flag("t", "originTopic", "Only those that came from this topic.", text),
    Flag("k", "key", "Only those with this key or unique key.", text),
    Flag("b", "beginTimestamp", "Only those that died at this time or later.", when_ms, default=0),
    Flag("e", "endTimestamp", "And at this one or before.", when_ms, default=TIME_MAX),
)


def _choice(options: Options) -> LetterChoice:
    return LetterChoice(
        options.originTopic, options.key, options.beginTimestamp, options.endTimestamp
    )


@contextmanager
def _progress() -> Iterator[Watch]:
    """How far a command is, for people who watch it."""
    shown: list[Progress] = []

    def watch(done: int, total: int) -> None:
        if not shown:
            shown.append(Progress(sys.stderr, "dead letters", total))
        shown[0].at(done)

    try:
        yield watch
    finally:
        for progress in shown:
            progress.end()


# ------------------------------------------------------------------------------------------ listing


def _line(letter: DeadLetter) -> str:
    origin = letter.origin_topic
    if letter.origin_queue_id is not None:
        origin += f"/{letter.origin_queue_id} {letter.origin_offset}"
    parts = [
        time_text(letter.dead_ms),
        f"{letter.broker_name}/{letter.queue_id} {letter.offset}",
        letter.message_id,
        f"from {origin}",
        f"tried {letter.tried_times} times",
        *([f"[{letter.tags}]"] if letter.tags else []),
        *([f"keys={letter.keys}"] if letter.keys else []),
        *(["sent again"] if letter.is_resent else []),
    ]
    return " ".join(parts)


def _members(letter: DeadLetter) -> dict[str, Any]:
    values = {member: getattr(letter, name) for member, name in LETTER_MEMBERS.items()}
    return {"brokerName": letter.broker_name, **values}


async def _list(admin: Admin, options: Options, printer: Printer) -> int:
    await admin.letter_queues(options.group)  # a group without any is refused
    printer.begin_list("deadLetters")
    count = resent = 0
    with _progress() as watch:
        walk = admin.walk_dead_letters(options.group, _choice(options), options.count, watch)
        async for letter in walk:
            printer.item(_members(letter), _line(letter))
            count += 1
            resent += letter.is_resent
    summary = {"group": options.group, "count": count, "resent": resent}
    printer.end_list(summary, f"{count} dead letters of group {options.group}, {resent} sent again")
    return DONE


# ---------------------------------------------------------------------------------------- resending


async def _resend(admin: Admin, options: Options, printer: Printer) -> int:
    choice = _choice(options)
    if options.msgId is not None and (not choice.is_all or options.all):
        raise ConfigError("resendDeadLetters: -i/--msgId names them already; leave the others out")
    if options.msgId is None and choice.is_all and not options.all:
        raise ConfigError("resendDeadLetters: say which: -i, or -k, -t, -b, -e, or --all")

    def told(row: Resent) -> None:
        line = f"{row.broker_name}/{row.queue_id} {row.offset} {row.outcome}"
        if row.remark:
            line += f": {row.remark}"
        members = {
            "brokerName": row.broker_name,
            "queueId": row.queue_id,
            "offset": row.offset,
            "outcome": row.outcome,
            "remark": row.remark,
            "msgId": row.message_id,
        }
        printer.item(members, line)

    group, to_topic = options.group, options.toTopic
    await admin.letter_queues(group)  # a group without any is refused
    printer.begin_list("outcomes")
    with _progress() as watch:
        if options.msgId is not None:
            ids = [one.strip() for one in options.msgId.split(",")]
            report = await admin.resend_named(group, ids, to_topic=to_topic, told=told)
        else:
            report = await admin.resend_chosen(
                group, choice, to_topic=to_topic, told=told, watch=watch
            )
    names = (*FINE_OUTCOMES, *sorted(set(report.counts) - set(FINE_OUTCOMES)))
    rows = [(name, report.counts[name]) for name in names if report.counts.get(name)]
    printer.end_list(
        {"group": group, "counts": dict(rows)},
        Table(("Outcome", "Dead letters"), rows or [("none", 0)]),
    )
    return REFUSED if report.failed else DONE


COMMANDS: Final = (
    Command(
        "deadLetters",
        "Lists the dead letters of a group, and where each came from.",
        (
            _GROUP,
            *_CHOICE,
            Flag("c", "count", "At most so many. Default: all.", at_least(1)),
        ),
        _list,
        "deadLetters -g billing -t orders",
    ),
    Command(
        "resendDeadLetters",
        "Sends dead letters to their group again, each once.",
        (
            _GROUP,
            Flag("i", "msgId", "Only those with these ids, separated by commas.", text),
            *_CHOICE,
            Flag("", "all", "All of the group.", None, default=False),
            Flag(
                "",
                "toTopic",
                "To the topic that each came from, for all who read it, instead of the group.",
                None,
                default=False,
            ),
        ),
        _resend,
        "resendDeadLetters -g billing -k order-500",
    ),
)
