"""This module has the admin commands that move groups: to a time, to the end, to where others
are.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from sluice.client.admin import TO_THE_END_MS
from sluice.client.admin_flags import (
    DONE,
    ROUTE_FLAG,
    Command,
    Flag,
    Options,
    at_least,
    text,
    topic_flag,
    when_ms,
    yes_no,
)
from sluice.client.administration.admin import Admin
from sluice.client.printing import Printer, Table, time_text
from sluice.client.simple import QueueAt
from sluice.errors import ConfigError
from sluice.protocol.json_members import MessageQueue

_GROUP: Final = Flag("g", "group", "Name of the consumer group.", text, required=True)
_FORCE: Final = Flag(
    "f", "force", "Whether offsets may also go forward. Default: true.", yes_no, default=True
)


def _show(
    printer: Printer, group: str, topic: str, timestamp: int, offsets: Mapping[MessageQueue, int]
) -> int:
    document = {
        "group": group,
        "topic": topic,
        "timestamp": timestamp,
        "offsetTable": [
            {"brokerName": queue.broker_name, "queueId": queue.queue_id, "offset": offset}
            for queue, offset in offsets.items()
        ],
    }
    rows = [(queue.broker_name, queue.queue_id, offset) for queue, offset in offsets.items()]
    when = "the end" if timestamp == TO_THE_END_MS else time_text(timestamp) or "the beginning"
    printer.show(
        document,
        f"group {group} goes on with topic {topic} at {when}",
        Table(("Broker", "Queue", "Offset"), rows),
    )
    return DONE


async def _reset(admin: Admin, options: Options, printer: Printer) -> int:
    group, topic, timestamp = options.group, options.topic, options.timestamp
    if options.broker is None and (options.queue is not None or options.offset is not None):
        raise ConfigError("-q/--queue and -o/--offset are of one broker: name it with -b/--broker")
    if (options.broker is None) != (options.queue is None):
        raise ConfigError("-b/--broker is for one queue: name it with -q/--queue")
    if options.broker is None:
        offsets = await admin.reset_offsets(
            group, topic, timestamp, force=options.force, route_of=options.cluster
        )
    else:
        queue = QueueAt(options.broker, "", options.queue)
        offset = options.offset
        if offset is None:
            offset = await admin.offset_at(topic, queue, timestamp)
        offsets = await admin.reset_queue(options.broker, group, topic, options.queue, offset)
    return _show(printer, group, topic, timestamp, offsets)


async def _skip(admin: Admin, options: Options, printer: Printer) -> int:
    offsets = await admin.reset_offsets(
        options.group,
        options.topic,
        TO_THE_END_MS,
        force=options.force,
        route_of=options.cluster,
    )
    return _show(printer, options.group, options.topic, TO_THE_END_MS, offsets)


async def _clone(admin: Admin, options: Options, printer: Printer) -> int:
    source, target, topic = options.srcGroup, options.destGroup, options.topic
    offsets = await admin.clone_offsets(source, target, topic)
    document = {
        "srcGroup": source,
        "destGroup": target,
        "topic": topic,
        "offsetTable": [
            {"brokerName": queue.broker_name, "queueId": queue.queue_id, "offset": offset}
            for queue, offset in offsets.items()
        ],
    }
    rows = [(queue.broker_name, queue.queue_id, offset) for queue, offset in offsets.items()]
    printer.show(
        document,
        f"group {target} goes on with topic {topic} where group {source} is",
        Table(("Broker", "Queue", "Offset"), rows),
    )
    return DONE


COMMANDS: Final = (
    Command(
        "resetOffsetByTime",
        "Moves a group to the messages that were stored at a time, while it runs.",
        (
            _GROUP,
            topic_flag(),
            Flag(
                "s",
                "timestamp",
                "now, milliseconds, or yyyy-MM-dd#HH:mm:ss:SSS.",
                when_ms,
                required=True,
            ),
            _FORCE,
            Flag("b", "broker", "Only on this broker, host:port; with -q.", text),
            Flag("q", "queue", "Only this queue; with -b.", at_least(0)),
            Flag("o", "offset", "To this offset instead of a time; with -b and -q.", at_least(0)),
            ROUTE_FLAG,
            Flag("", "cplus", "Has no effect any more.", None, default=False),
        ),
        _reset,
        "resetOffsetByTime -g billing -t orders -s 2026-01-31#00:00:00:000",
    ),
    Command(
        "skipAccumulatedMessage",
        "Moves a group behind all messages that are there now.",
        (_GROUP, topic_flag(), _FORCE, ROUTE_FLAG),
        _skip,
        "skipAccumulatedMessage -g billing -t orders",
    ),
    Command(
        "cloneGroupOffset",
        "Gives a group the offsets of another one on a topic.",
        (
            Flag("s", "srcGroup", "The group that has the offsets.", text, required=True),
            Flag("d", "destGroup", "The group that gets them.", text, required=True),
            topic_flag(),
            Flag("o", "offline", "Makes no difference: neither has to be connected.", yes_no),
        ),
        _clone,
        "cloneGroupOffset -s billing -d audit -t orders",
    ),
)
