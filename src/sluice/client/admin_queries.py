"""This module has the admin commands that find messages: by id, key, tag, unique key, offset."""

from __future__ import annotations

import argparse
from typing import Final

from sluice.client.admin import Track
from sluice.client.admin_flags import (
    DONE,
    REFUSED,
    ROUTE_FLAG,
    Command,
    Flag,
    Options,
    at_least,
    charset,
    text,
    topic_flag,
    when_ms,
    yes_no,
)
from sluice.client.admin_messages import body_text, message_members, sent_members, sent_table
from sluice.client.administration.admin import Admin
from sluice.client.messages import KEYS, TAGS, TIME_MAX, StoredMessage
from sluice.client.printing import Printer, Table, time_text
from sluice.errors import ConfigError, NotFound


def _detail_lines(message: StoredMessage, encoding: str) -> list[str]:
    fields = (
        ("OffsetID", message.offset_id),
        ("MsgID", message.message_id),
        ("Topic", message.topic),
        ("Tags", message.tags or ""),
        ("Keys", message.keys or ""),
        ("Broker", message.broker_name),
        ("Queue ID", message.queue_id),
        ("Queue Offset", message.queue_offset),
        ("CommitLog Offset", message.position),
        ("Reconsume Times", message.reconsume_times),
        ("Born Timestamp", time_text(message.born_ms)),
        ("Store Timestamp", time_text(message.store_ms)),
        ("Born Host", message.born_host),
        ("Store Host", message.store_host),
        ("System Flag", message.sys_flag),
        ("Properties", ", ".join(f"{n}={v}" for n, v in sorted(message.properties.items()))),
        ("Body", body_text(message, encoding)),
    )
    return [f"{name + ':':<18}{value}".rstrip() for name, value in fields]


async def _show_messages(
    admin: Admin, printer: Printer, messages: list[StoredMessage], encoding: str = "utf-8"
) -> int:
    """All that is known of messages, and what became of each in every group."""
    documents = []
    blocks: list[Table | str] = []
    for message in messages:
        tracks = await admin.track(message)
        documents.append(
            {
                **message_members(message, encoding),
                "messageTrackList": [
                    {"consumerGroup": t.group, "trackType": t.kind, "exceptionDesc": t.detail}
                    for t in tracks
                ],
            }
        )
        blocks += [*([""] if blocks else []), *_detail_lines(message, encoding)]
        blocks.append(_track_table(tracks) if tracks else "\nNo group reads this topic.")
    printer.show({"messages": documents}, *blocks)
    return DONE


def _track_table(tracks: list[Track]) -> Table:
    return Table(("Group", "State", "Detail"), [tuple(track) for track in tracks])


async def _query_id(admin: Admin, options: Options, printer: Printer) -> int:
    ids = [one.strip() for one in options.msgId.split(",") if one.strip()]
    _check_direct(options.consumerGroup, options.clientId)
    messages = [await admin.message_by_id(options.topic, one, options.cluster) for one in ids]
    if options.consumerGroup is not None:
        return await _consume_directly(admin, options, printer, messages)
    if options.sendMessage is None:
        return await _show_messages(admin, printer, messages, options.bodyFormat)
    sent = [
        sent_members(await admin.send_again(message)) for message in messages if options.sendMessage
    ]
    printer.show({"sendResults": sent}, sent_table(sent))
    return DONE


def _check_direct(group: str | None, client_id: str | None) -> None:
    if (group is None) != (client_id is None):
        raise ConfigError("-g/--consumerGroup and -d/--clientId name one consumer together")


async def _consume_directly(
    admin: Admin, options: Options, printer: Printer, messages: list[StoredMessage]
) -> int:
    """Let the consumer that was named consume these messages now."""
    rows = []
    for message in messages:
        result = await admin.consume_now(options.consumerGroup, options.clientId, message)
        rows.append(
            {
                "msgId": message.message_id,
                "consumeResult": result.result,
                "spentTimeMills": result.spent_ms,
                "remark": result.remark,
            }
        )
    names = ("Message", "Result", "ms", "Remark")
    printer.show({"results": rows}, Table(names, [tuple(row.values()) for row in rows]))
    return DONE if all(row["consumeResult"] == "CR_SUCCESS" for row in rows) else REFUSED


async def _query_key(admin: Admin, options: Options, printer: Printer) -> int:
    messages = await admin.query(
        options.topic,
        options.msgKey,
        kind=options.keyType,
        count=options.maxNum,
        begin_ms=options.beginTimestamp,
        end_ms=options.endTimestamp,
        cluster=options.cluster,
        last_key=options.lastKey,
    )
    if not messages:
        raise NotFound(f"no message of {options.topic} has the key {options.msgKey}")
    rows = [
        (m.message_id, m.broker_name, m.queue_id, m.queue_offset, time_text(m.store_ms))
        for m in messages
    ]
    names = ("Message", "Broker", "Queue", "Offset", "Stored")
    printer.show({"messages": [message_members(m) for m in messages]}, Table(names, rows))
    return DONE


async def _query_unique(admin: Admin, options: Options, printer: Printer) -> int:
    _check_direct(options.consumerGroup, options.clientId)
    found = await admin.find_unique(
        options.topic,
        options.msgId,
        begin_ms=options.startTime,
        end_ms=options.endTime,
        cluster=options.cluster,
    )
    if options.consumerGroup is not None:
        return await _consume_directly(admin, options, printer, found[:1])
    return await _show_messages(admin, printer, found if options.showAll else found[:1])


async def _query_offset(admin: Admin, options: Options, printer: Printer) -> int:
    queue = await admin.queue(options.brokerName, options.queueId)
    message = await admin.message_at(options.topic, queue, options.offset)
    return await _show_messages(admin, printer, [message], options.bodyFormat)


_FORMAT: Final = Flag(
    "f", "bodyFormat", "Charset of the body. Default: UTF-8.", charset, default="utf-8"
)
_CONSUMER: Final = (
    Flag("g", "consumerGroup", "Let a consumer of this group consume it now; with -d.", text),
    Flag("d", "clientId", "The consumer that consumes it now; with -g.", text),
)


def _key_kind(value: str) -> str:
    if value not in (KEYS, TAGS):
        raise argparse.ArgumentTypeError(f"{value!r}: K is for keys, T for tags")
    return value


COMMANDS: Final = (
    Command(
        "queryMsgById",
        "Shows messages by their ids, and what became of them in every group.",
        (
            topic_flag(),
            Flag(
                "i", "msgId", "Offset ids or unique keys, separated by commas.", text, required=True
            ),
            *_CONSUMER,
            Flag("s", "sendMessage", "Whether to send them again instead.", yes_no),
            Flag("u", "unitName", "Has no effect.", text),
            _FORMAT,
            ROUTE_FLAG,
        ),
        _query_id,
        "queryMsgById -t orders -i 7F00000100002A9F0000000000000B62",
    ),
    Command(
        "queryMsgByKey",
        "Finds messages by a key that their producer gave them, or by tag.",
        (
            topic_flag(),
            Flag("k", "msgKey", "The key.", text, required=True),
            Flag("b", "beginTimestamp", "Stored after, in milliseconds.", when_ms, default=0),
            Flag("e", "endTimestamp", "Stored before, in milliseconds.", when_ms, default=TIME_MAX),
            Flag(
                "m",
                "maxNum",
                "At most so many of each broker. Default: 64.",
                at_least(1),
                default=64,
            ),
            ROUTE_FLAG,
            Flag("p", "keyType", "K for keys, T for tags. Default: K.", _key_kind, default=KEYS),
            Flag("l", "lastKey", "Go on behind this index key, where a broker has such.", text),
        ),
        _query_key,
        "queryMsgByKey -t orders -k order-500",
    ),
    Command(
        "queryMsgByUniqueKey",
        "Shows the message with a unique key, which a producer makes for each.",
        (
            Flag("i", "msgId", "The unique key.", text, required=True),
            *_CONSUMER,
            topic_flag(),
            Flag(
                "a",
                "showAll",
                "All that have it: a resent message has it again.",
                None,
                default=False,
            ),
            ROUTE_FLAG,
            Flag("s", "startTime", "Stored after, in milliseconds.", when_ms, default=0),
            Flag("e", "endTime", "Stored before, in milliseconds.", when_ms, default=TIME_MAX),
        ),
        _query_unique,
        "queryMsgByUniqueKey -t orders -i AC1100020000000000000B2F0A8D0001",
    ),
    Command(
        "queryMsgByOffset",
        "Shows the message at an offset of a queue.",
        (
            topic_flag(),
            Flag("b", "brokerName", "Name of the broker.", text, required=True),
            Flag("i", "queueId", "Number of the queue.", at_least(0), required=True),
            Flag("o", "offset", "Offset in the queue.", at_least(0), required=True),
            _FORMAT,
            Flag("r", "routeTopic", "Has no effect: the broker is named.", text),
        ),
        _query_offset,
        "queryMsgByOffset -t orders -b broker-a -i 0 -o 12",
    ),
)
