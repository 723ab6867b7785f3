"""This module has the admin commands about messages: print, find, send, read, measure sends."""

from __future__ import annotations

import base64
import sys
import time
from collections import Counter
from typing import Any, Final

from sluice.client.admin_flags import (
    DONE,
    REFUSED,
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
from sluice.client.administration.admin import Admin
from sluice.client.messages import Sent, StoredMessage
from sluice.client.printing import Printer, Progress, Table, time_text
from sluice.client.simple import TOOLS_GROUP
from sluice.clock import wall_ms
from sluice.errors import ConfigError, NotFound, SluiceError

_SHOWN_CHARACTERS_MAX: Final = 4096


def message_members(
    message: StoredMessage, encoding: str = "utf-8", *, with_body: bool = True
) -> dict[str, Any]:
    """A message for scripts; a body that is no text in this encoding is base64."""
    members: dict[str, Any] = {
        "topic": message.topic,
        "brokerName": message.broker_name,
        "queueId": message.queue_id,
        "queueOffset": message.queue_offset,
        "msgId": message.message_id,
        "offsetMsgId": message.offset_id,
        "tags": message.tags,
        "keys": message.keys,
        "bornTimestamp": message.born_ms,
        "bornHost": message.born_host,
        "storeTimestamp": message.store_ms,
        "storeHost": message.store_host,
        "storeSize": message.stored_bytes,
        "commitLogOffset": message.position,
        "reconsumeTimes": message.reconsume_times,
        "preparedTransactionOffset": message.prepared_offset,
        "sysFlag": message.sys_flag,
        "flag": message.flag,
        "bodyCRC": message.body_crc,
        "properties": message.properties,
    }
    if with_body and message.compression is None:
        try:
            body = message.body.decode(encoding)
            body.encode()  # half a surrogate is text to some charsets, but not to JSON
            return {**members, "body": body}
        except UnicodeError:
            pass
    if with_body:
        members["bodyBase64"] = base64.b64encode(message.body).decode()
        members["bodyCompression"] = message.compression
    return members


def message_line(message: StoredMessage, encoding: str = "utf-8", *, with_body: bool = True) -> str:
    """A message for people, in one line."""
    parts = [
        time_text(message.store_ms),
        f"{message.broker_name}/{message.queue_id}",
        str(message.queue_offset),
        message.message_id,
    ]
    if message.tags:
        parts.append(f"[{message.tags}]")
    if message.keys:
        parts.append(f"keys={message.keys}")
    if with_body:
        parts.append(body_text(message, encoding).replace("\n", " "))
    return " ".join(parts)


def body_text(message: StoredMessage, encoding: str) -> str:
    if message.compression is not None:
        return f"({len(message.body)} bytes, compressed by {message.compression})"
    shown = message.body[: 4 * _SHOWN_CHARACTERS_MAX].decode(encoding, "replace")
    if len(shown) > _SHOWN_CHARACTERS_MAX or len(message.body) > 4 * _SHOWN_CHARACTERS_MAX:
        shown = shown[:_SHOWN_CHARACTERS_MAX] + f"... ({len(message.body)} bytes)"
    return shown


# ----------------------------------------------------------------------------------------- printing


async def _print(admin: Admin, options: Options, printer: Printer) -> int:
    topic, encoding = options.topic, options.charsetName
    queues = await admin.queues(options.lmqParentTopic or topic, writing=False)
    spans = [
        await admin.span(topic, q, options.beginTimestamp, options.endTimestamp) for q in queues
    ]
    progress = Progress(sys.stderr, "messages", sum(max(0, stop - at) for at, stop in spans))
    printer.begin_list("messages")
    count = 0
    try:
        for queue, (first, stop) in zip(queues, spans, strict=True):
            walk = admin.walk(topic, queue, first, stop, expression=options.subExpression)
            async for message in walk:
                printer.item(
                    message_members(message, encoding, with_body=options.printBody),
                    message_line(message, encoding, with_body=options.printBody),
                )
                count += 1
                if not sys.stdout.isatty():
                    progress.at(count)
    finally:
        progress.end()
    printer.end_list()
    return DONE


async def _print_queue(admin: Admin, options: Options, printer: Printer) -> int:
    topic, encoding = options.topic, options.charsetName
    queue = await admin.queue(options.brokerName, options.queueId)
    await admin.queues(topic, writing=False)  # of a topic that is not there brokers say: 0 to 0
    first, stop = await admin.span(topic, queue, options.beginTimestamp, options.endTimestamp)
    progress = Progress(sys.stderr, "messages", max(0, stop - first))
    tags: Counter[str] = Counter()
    printer.begin_list("messages")
    try:
        async for message in admin.walk(
            topic, queue, first, stop, expression=options.subExpression
        ):
            if message.tags:
                tags[message.tags] += 1
            if options.printMsg:
                printer.item(
                    message_members(message, encoding, with_body=options.printBody),
                    message_line(message, encoding, with_body=options.printBody),
                )
            if not sys.stdout.isatty() or not options.printMsg:
                progress.at(message.queue_offset - first + 1)
    finally:
        progress.end()
    if options.calculate:
        counted = [{"tag": tag, "count": count} for tag, count in tags.most_common()]
        printer.end_list({"tags": counted}, Table(("Tag", "Count"), tags.most_common()))
    else:
        printer.end_list()
    return DONE


async def _consume(admin: Admin, options: Options, printer: Printer) -> int:
    """Reading as a consumer would; nothing is committed."""
    _check_consume(options)
    if options.queueId is not None:
        queues = [await admin.queue(options.brokerName, options.queueId)]
    else:
        queues = await admin.queues(options.topic, writing=False)
        queues = [q for q in queues if options.brokerName in (None, q.broker_name)]
    printer.begin_list("messages")
    left = options.MessageNumber
    for queue in queues:
        first, stop = await admin.span(
            options.topic, queue, options.beginTimestamp, options.endTimestamp
        )
        if options.offset is not None:
            first = max(first, options.offset)
        walk = admin.walk(
            options.topic, queue, first, min(stop, first + left), group=options.consumerGroup
        )
        async for message in walk:
            printer.item(message_members(message), message_line(message))
            left -= 1
        if left <= 0:
            break
    printer.end_list()
    return DONE


def _check_consume(options: Options) -> None:
    if options.queueId is not None and options.brokerName is None:
        raise ConfigError("-i/--queueId is of one broker: name it with -b/--brokerName")
    if options.offset is not None and options.queueId is None:
        raise ConfigError("-o/--offset is of one queue: name it with -i/--queueId")
    now_ms = wall_ms()
    for name, given in (("-s", options.beginTimestamp), ("-e", options.endTimestamp)):
        if given is not None and given > now_ms:
            raise ConfigError(f"{name} {time_text(given)} is not over yet")
    if (options.beginTimestamp or 0) > (options.endTimestamp or now_ms):
        raise ConfigError("-s/--beginTimestamp is after -e/--endTimestamp")


# ------------------------------------------------------------------------------------------ sending


def sent_members(sent: Sent) -> dict[str, Any]:
    """Where a message went, for scripts."""
    return {
        "brokerName": sent.broker_name,
        "queueId": sent.queue_id,
        "queueOffset": sent.queue_offset,
        "sendStatus": sent.status,
        "msgId": sent.message_id,
        "offsetMsgId": sent.offset_id,
    }


def sent_table(rows: list[dict[str, Any]]) -> Table:
    names = ("Broker", "Queue", "Offset", "Result", "Message", "Offset Id")
    return Table(names, [tuple(row.values()) for row in rows])


async def _send_message(admin: Admin, options: Options, printer: Printer) -> int:
    if options.msgTraceEnable:
        raise ConfigError("-m true: this command writes no message traces")
    if options.qid is not None and options.broker is None:
        raise ConfigError("-i/--qid is a queue of one broker: name it with -b/--broker")
    properties = {"WAIT": "true"}
    if options.tags is not None:
        properties["TAGS"] = options.tags
    if options.key is not None:
        properties["KEYS"] = options.key
    queues = await admin.send_queues(options.topic)
    if options.broker is not None:
        queues = [q for q in queues if q.broker_name == options.broker]
    if options.qid is not None:
        queues = [q for q in queues if q.queue_id == options.qid]
    if not queues:
        number = "" if options.qid is None else f" {options.qid}"
        raise NotFound(
            f"{options.topic} has no queue{number} that can be written on {options.broker}"
        )
    queue = queues[wall_ms() % len(queues)]
    body = options.body.encode()
    row = sent_members(await admin.send_message(options.topic, queue, body, properties))
    printer.show(row, sent_table([row]))
    return DONE


async def _check_rt(admin: Admin, options: Options, printer: Printer) -> int:
    queues = await admin.send_queues(options.topic)
    body = b"a" * options.size
    rows: list[dict[str, Any]] = []
    progress = Progress(sys.stderr, "messages", options.amount)
    try:
        for number in range(options.amount):
            queue = queues[number % len(queues)]
            started_at = time.perf_counter()
            error = ""
            try:
                await admin.send_message(options.topic, queue, body, {})
            except SluiceError as failure:
                error = str(failure)
            rows.append(
                {
                    "brokerName": queue.broker_name,
                    "queueId": queue.queue_id,
                    "sendResult": not error,
                    "rt": (time.perf_counter() - started_at) * 1000,
                    "error": error,
                }
            )
            progress.at(number + 1)
    finally:
        progress.end()
    # The first one also opens connections, so it does not count unless it is the only one.
    counted = [row["rt"] for row in rows[1:] or rows]
    average = sum(counted) / len(counted)
    table = Table(("Broker", "Queue", "Sent", "ms", "Error"), [tuple(row.values()) for row in rows])
    printer.show({"sends": rows, "avgRT": average}, table, "", f"Avg RT: {average:.2f} ms")
    return DONE if all(row["sendResult"] for row in rows) else REFUSED


# ----------------------------------------------------------------------------------------- commands

_CHARSET: Final = Flag(
    "c", "charsetName", "Charset of the bodies. Default: UTF-8.", charset, default="utf-8"
)
_TAGS: Final = Flag(
    "s", "subExpression", "Only these tags: TagA || TagB. Default: *.", text, default="*"
)
_BEGIN: Final = "Stored at this time or later: milliseconds or yyyy-MM-dd#HH:mm:ss:SSS."
_END: Final = "Stored before this time: milliseconds or yyyy-MM-dd#HH:mm:ss:SSS."
COMMANDS: Final = (
    Command(
        "printMsg",
        "Prints the messages of a topic.",
        (
            topic_flag(),
            _CHARSET,
            _TAGS,
            Flag("b", "beginTimestamp", _BEGIN, when_ms),
            Flag("e", "endTimestamp", _END, when_ms),
            Flag("d", "printBody", "Whether to print bodies. Default: true.", yes_no, default=True),
            Flag("l", "lmqParentTopic", "Use the route of this topic instead.", text),
        ),
        _print,
        "printMsg -t orders -b 2026-01-31#00:00:00:000",
    ),
    Command(
        "printMsgByQueue",
        "Prints or counts the messages of one queue.",
        (
            topic_flag(),
            Flag("a", "brokerName", "Name of the broker.", text, required=True),
            Flag("i", "queueId", "Number of the queue.", at_least(0), required=True),
            _CHARSET,
            _TAGS,
            Flag("b", "beginTimestamp", _BEGIN, when_ms),
            Flag("e", "endTimestamp", _END, when_ms),
            Flag(
                "p", "printMsg", "Whether to print messages. Default: false.", yes_no, default=False
            ),
            Flag(
                "d", "printBody", "Whether to print bodies. Default: false.", yes_no, default=False
            ),
            Flag(
                "f",
                "calculate",
                "Whether to count them by tag. Default: false.",
                yes_no,
                default=False,
            ),
        ),
        _print_queue,
        "printMsgByQueue -t orders -a broker-a -i 0 -p true -d true",
    ),
    Command(
        "sendMessage",
        "Sends one message.",
        (
            topic_flag(),
            Flag("p", "body", "The message.", str, required=True),
            Flag("k", "key", "Keys to find it by, separated by blanks.", text),
            Flag("c", "tags", "Tag that consumers filter by.", text),
            Flag("b", "broker", "Name of the broker.", text),
            Flag("i", "qid", "Number of the queue; with -b.", at_least(0)),
            Flag("m", "msgTraceEnable", "Whether to write a trace: not possible here.", yes_no),
        ),
        _send_message,
        "sendMessage -t orders -p hello -k order-500",
    ),
    Command(
        "consumeMessage",
        "Reads messages without moving any group.",
        (
            topic_flag(),
            Flag("b", "brokerName", "Only of this broker.", text),
            Flag("i", "queueId", "Only of this queue; with -b.", at_least(0)),
            Flag("o", "offset", "From this offset on; with -i.", at_least(0)),
            Flag(
                "g",
                "consumerGroup",
                f"Read as this group. Default: {TOOLS_GROUP}.",
                text,
                default=TOOLS_GROUP,
            ),
            Flag("s", "beginTimestamp", _BEGIN, when_ms),
            Flag("e", "endTimestamp", _END, when_ms),
            Flag("c", "MessageNumber", "At most so many. Default: 128.", at_least(1), default=128),
        ),
        _consume,
        "consumeMessage -t orders -c 10",
    ),
    Command(
        "checkMsgSendRT",
        "Sends messages one after the other and says how long each took.",
        (
            topic_flag(),
            Flag("a", "amount", "How many. Default: 100.", at_least(1, 1_000_000), default=100),
            Flag(
                "s", "size", "How large, in bytes. Default: 128.", at_least(1, 1 << 26), default=128
            ),
        ),
        _check_rt,
        "checkMsgSendRT -t orders -a 100 -s 128",
    ),
)
