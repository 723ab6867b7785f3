"""This module has the admin commands for dead letters: look at them, and send them again.

The broker keeps what was sent again, so a command that was interrupted, or that is run twice, sends
nothing twice. Lists and resends go page by page: there may be very many. These requests are
Sluice's own; Apache's brokers refuse them.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any, Final

import orjson

from sluice.client.admin import DEAD_PREFIX, Admin
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
from sluice.client.messages import TIME_MAX
from sluice.client.printing import Printer, Progress, Table, time_text
from sluice.client.simple import QueueAt
from sluice.errors import ConfigError, NotFound, TopicMissing
from sluice.protocol.remoting_codes import RequestCode as Request

_PAGE: Final = 500  # letters that are listed with one request
_CHUNK: Final = 100  # letters that are sent again with one request
_SECONDS: Final = 60.0
_FINE: Final = ("resent", "already resent")
_GROUP: Final = Flag("g", "group", "Name of the consumer group.", text, required=True)
_CHOICE: Final = (
    Flag("t", "originTopic", "Only those that came from this topic.", text),
    Flag("k", "key", "Only those with this key or unique key.", text),
    Flag("b", "beginTimestamp", "Only those that died at this time or later.", when_ms, default=0),
    Flag("e", "endTimestamp", "And at this one or before.", when_ms, default=TIME_MAX),
)

Letters = list[dict[str, Any]]


async def _queues(admin: Admin, group: str) -> list[QueueAt]:
    try:
        return await admin.queues(f"{DEAD_PREFIX}{group}", writing=False)
    except TopicMissing:
        raise NotFound(f"group {group} has no dead letters") from None


async def _page(
    admin: Admin, queue: QueueAt, options: Options, offset: int, count: int = _PAGE
) -> tuple[Letters, int, int]:
    """Letters from an offset on, where to go on, and the end of the queue."""
    ext: dict[str, object] = {
        "group": options.group,
        "queueId": queue.queue_id,
        "offset": offset,
        "maxNum": count,
        "beginTimestamp": options.beginTimestamp,
        "endTimestamp": options.endTimestamp,
    }
    for name in ("key", "originTopic"):
        if getattr(options, name) is not None:
            ext[name] = getattr(options, name)
    what = f"the dead letters of group {options.group}"
    answer = await admin.done(
        queue.address, Request.SLUICE_LIST_DEAD_LETTERS, ext, what=what, timeout_seconds=_SECONDS
    )
    letters: Letters = orjson.loads(answer.body)["letters"]
    return letters, int(answer.ext["nextOffset"]), int(answer.ext["maxOffset"])


async def _pages(
    admin: Admin, queues: list[QueueAt], options: Options, count_max: int | None = None
) -> AsyncIterator[tuple[QueueAt, Letters]]:
    """Page after page, up to what was there when the command began."""
    ends = [(await _page(admin, queue, options, 0, 1))[2] for queue in queues]
    progress = Progress(sys.stderr, "dead letters", sum(ends))
    found = 0
    try:
        for at, (queue, end) in enumerate(zip(queues, ends, strict=True)):
            offset = 0
            while offset < end and (count_max is None or found < count_max):
                letters, offset, _ = await _page(admin, queue, options, offset)
                letters = [letter for letter in letters if letter["offset"] < end]
                if count_max is not None:
                    letters = letters[: count_max - found]
                found += len(letters)
                progress.at(sum(ends[:at]) + offset)
                yield queue, letters
    finally:
        progress.end()


# ------------------------------------------------------------------------------------------ listing


def _line(queue: QueueAt, letter: dict[str, Any]) -> str:
    origin = letter["originTopic"]
    if letter["originQueueId"] is not None:
        origin += f"/{letter['originQueueId']} {letter['originOffset']}"
    parts = [
        time_text(letter["deadTimestamp"]),
        f"{queue.broker_name}/{letter['queueId']} {letter['offset']}",
        letter["msgId"],
        f"from {origin}",
        f"tried {letter['reconsumeTimes']} times",
        *([f"[{letter['tags']}]"] if letter["tags"] else []),
        *([f"keys={letter['keys']}"] if letter["keys"] else []),
        *(["sent again"] if letter["resent"] else []),
    ]
    return " ".join(parts)


async def _list(admin: Admin, options: Options, printer: Printer) -> int:
    queues = await _queues(admin, options.group)
    printer.begin_list("deadLetters")
    count = resent = 0
    async for queue, letters in _pages(admin, queues, options, options.count):
        for letter in letters:
            printer.item({"brokerName": queue.broker_name, **letter}, _line(queue, letter))
            count += 1
            resent += letter["resent"]
    summary = {"group": options.group, "count": count, "resent": resent}
    printer.end_list(summary, f"{count} dead letters of group {options.group}, {resent} sent again")
    return DONE


# ---------------------------------------------------------------------------------------- resending


async def _resend(admin: Admin, options: Options, printer: Printer) -> int:
    chosen = options.key or options.originTopic or options.beginTimestamp
    chosen = chosen or options.endTimestamp != TIME_MAX
    if options.msgId is not None and (chosen or options.all):
        raise ConfigError("resendDeadLetters: -i/--msgId names them already; leave the others out")
    if options.msgId is None and not chosen and not options.all:
        raise ConfigError("resendDeadLetters: say which: -i, or -k, -t, -b, -e, or --all")
    queues = await _queues(admin, options.group)
    counts: Counter[str] = Counter()
    printer.begin_list("outcomes")
    batches = _named(admin, queues, options) if options.msgId else _chosen(admin, queues, options)
    async for queue, offsets in batches:
        for start in range(0, len(offsets), _CHUNK):
            rows = await _send_again(admin, queue, options, offsets[start : start + _CHUNK])
            for row in rows:
                counts[row["outcome"]] += 1
                line = f"{queue.broker_name}/{queue.queue_id} {row['offset']} {row['outcome']}"
                if row["remark"]:
                    line += f": {row['remark']}"
                members = {"brokerName": queue.broker_name, "queueId": queue.queue_id, **row}
                printer.item(members, line)
    names = (*_FINE, *sorted(set(counts) - set(_FINE)))
    rows_of = [(name, counts[name]) for name in names if counts[name]]
    printer.end_list(
        {"group": options.group, "counts": dict(rows_of)},
        Table(("Outcome", "Dead letters"), rows_of or [("none", 0)]),
    )
    return DONE if set(counts) <= set(_FINE) else REFUSED


async def _named(
    admin: Admin, queues: list[QueueAt], options: Options
) -> AsyncIterator[tuple[QueueAt, list[int]]]:
    """The letters with these ids."""
    topic = f"{DEAD_PREFIX}{options.group}"
    for one in options.msgId.split(","):
        message = await admin.message_by_id(topic, one.strip())
        if message.topic != topic:
            raise NotFound(f"{one.strip()} is no dead letter of group {options.group}")
        for queue in queues:
            if (queue.broker_name, queue.queue_id) == (message.broker_name, message.queue_id):
                yield queue, [message.queue_offset]


async def _chosen(
    admin: Admin, queues: list[QueueAt], options: Options
) -> AsyncIterator[tuple[QueueAt, list[int]]]:
    """The letters that fit and were not sent again yet."""
    async for queue, letters in _pages(admin, queues, options):
        yield queue, [letter["offset"] for letter in letters if not letter["resent"]]


async def _send_again(
    admin: Admin, queue: QueueAt, options: Options, offsets: list[int]
) -> list[dict[str, Any]]:
    ext: dict[str, object] = {
        "group": options.group,
        "queueId": queue.queue_id,
        "toTopic": "true" if options.toTopic else "false",
    }
    answer = await admin.done(
        queue.address,
        Request.SLUICE_RESEND_DEAD_LETTERS,
        ext,
        orjson.dumps({"offsets": offsets}),
        what=f"sending dead letters of group {options.group} again",
        timeout_seconds=_SECONDS,
    )
    rows: list[dict[str, Any]] = orjson.loads(answer.body)["outcomes"]
    return rows


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
