"""This module reads and sends single messages for tools: by queue, id, key, with all that is known.

It pulls without a group's progress, so that looking at messages changes nothing. Like the rest of
this package it speaks to any RocketMQ broker.
"""

from __future__ import annotations

import ipaddress
import os
import re
import zlib
from collections.abc import AsyncIterator, Mapping
from datetime import UTC, datetime
from itertools import count
from typing import Final, NamedTuple

from sluice.client.simple import PRODUCER_GROUP, TOOLS_GROUP, QueueAt, Refused, SimpleClient
from sluice.clock import wall_ms
from sluice.errors import NotFound, SluiceError
from sluice.protocol import records
from sluice.protocol.remoting import RemotingCommand
from sluice.protocol.remoting_codes import RequestCode as Request
from sluice.protocol.remoting_codes import ResponseCode as Response

PULL_COUNT_MAX: Final = 32
TIME_MAX: Final = (1 << 63) - 1
KEYS, TAGS, UNIQUE = "K", "T", "U"  # what a query looks for

# Whoever made a message larger than a broker takes, made it to fill the memory of its readers.
_BODY_BYTES_MAX: Final = 64 * 1024 * 1024
_COMPRESSIONS: Final = {0: "zlib", 1: "LZ4", 2: "ZSTD", 3: "zlib"}
_FLAG_SUBSCRIPTION: Final = 4
_AUTO_CREATE_TOPIC: Final = "TBW102"
_MESSAGE_ID: Final = re.compile(r"(?:[0-9a-fA-F]{16}|[0-9a-fA-F]{40})([0-9a-fA-F]{16})")
# Stored all the same: the answer only says what else was not done in time.
_SENT: Final = {
    Response.SUCCESS: "SEND_OK",
    Response.FLUSH_DISK_TIMEOUT: "FLUSH_DISK_TIMEOUT",
    Response.FLUSH_SLAVE_TIMEOUT: "FLUSH_SLAVE_TIMEOUT",
    Response.SLAVE_NOT_AVAILABLE: "SLAVE_NOT_AVAILABLE",
}
_NOTHING_HERE: Final = {
    Response.PULL_NOT_FOUND: "NO_NEW_MSG",
    Response.PULL_RETRY_IMMEDIATELY: "NO_MATCHED_MSG",
    Response.PULL_OFFSET_MOVED: "OFFSET_ILLEGAL",
}


class StoredMessage(NamedTuple):
    """One message as a broker stores it."""

    topic: str
    broker_name: str
    queue_id: int
    queue_offset: int
    message_id: str  # the producer's unique key, or where there is none the offset id
    offset_id: str  # the broker's address and the position in its log
    properties: dict[str, str]
    body: bytes
    compression: str | None  # of a body that could not be unpacked
    body_crc: int
    flag: int
    sys_flag: int
    born_ms: int
    born_host: str
    store_ms: int
    store_host: str
    stored_bytes: int
    position: int
    reconsume_times: int
    prepared_offset: int

    @property
    def tags(self) -> str | None:
        return self.properties.get("TAGS")

    @property
    def keys(self) -> str | None:
        return self.properties.get("KEYS")


class Pulled(NamedTuple):
    """What one pull brought; status is FOUND, NO_NEW_MSG, NO_MATCHED_MSG or OFFSET_ILLEGAL."""

    status: str
    messages: list[StoredMessage]
    next_offset: int


class Sent(NamedTuple):
    """Where a message went, and how well."""

    status: str
    message_id: str
    offset_id: str
    broker_name: str
    queue_id: int
    queue_offset: int


class MessageReader(SimpleClient):
    """Messages of a cluster, for tools."""

    async def done(
        self,
        address: str,
        code: int,
        ext: Mapping[str, object] | None = None,
        body: bytes = b"",
        *,
        what: str,
        timeout_seconds: float = 15.0,
    ) -> RemotingCommand:
        """Ask for something that has to succeed; raises Refused with the broker's words."""
        fields = {name: str(value) for name, value in (ext or {}).items()}
        answer = await self.ask(address, code, fields, body, timeout_seconds)
        if answer.code != Response.SUCCESS:
            raise Refused(answer.code, answer.remark, f"{address}: {what}")
        return answer

    async def offset_at(self, topic: str, queue: QueueAt, when_ms: int) -> int:
        """The offset of the first message of a queue that was stored at a time or later."""
        ext = {"topic": topic, "queueId": queue.queue_id, "timestamp": when_ms}
        answer = await self.done(
            queue.address, Request.SEARCH_OFFSET_BY_TIMESTAMP, ext, what=f"the offsets of {topic}"
        )
        return int(answer.ext["offset"])

    async def span(
        self, topic: str, queue: QueueAt, begin_ms: int | None = None, end_ms: int | None = None
    ) -> tuple[int, int]:
        """The first offset of a queue and the one after its last, of a span of time if given."""
        if begin_ms is None:
            first = await self.offset(topic, queue, Request.GET_MIN_OFFSET)
        else:
            first = await self.offset_at(topic, queue, begin_ms)
        if end_ms is None:
            stop = await self.offset(topic, queue, Request.GET_MAX_OFFSET)
        else:
            stop = await self.offset_at(topic, queue, end_ms)
        return first, stop

    async def fetch(
        self,
        topic: str,
        queue: QueueAt,
        offset: int,
        *,
        count: int = PULL_COUNT_MAX,
        expression: str = "*",
        group: str = TOOLS_GROUP,
    ) -> Pulled:
        """Messages from an offset on, as many as there are and at most `count`; never waits."""
        ext = {
            "consumerGroup": group,
            "topic": topic,
            "queueId": str(queue.queue_id),
            "queueOffset": str(offset),
            "maxMsgNums": str(min(count, PULL_COUNT_MAX)),
            "sysFlag": str(_FLAG_SUBSCRIPTION),
            "commitOffset": "0",
            "suspendTimeoutMillis": "0",
            "subscription": expression,
            "subVersion": "0",
            "expressionType": "TAG",
        }
        answer = await self.ask(queue.address, Request.PULL_MESSAGE, ext, timeout_seconds=15.0)
        status = _NOTHING_HERE.get(answer.code)
        if status is not None:
            return Pulled(status, [], int(answer.ext["nextBeginOffset"]))
        if answer.code != Response.SUCCESS:
            raise Refused(answer.code, answer.remark, f"{queue.address}: reading {topic}")
        found = stored_messages(answer.body, queue.broker_name)
        return Pulled("FOUND", found, int(answer.ext["nextBeginOffset"]))

    async def walk(
        self,
        topic: str,
        queue: QueueAt,
        first: int,
        stop: int,
        *,
        expression: str = "*",
        group: str = TOOLS_GROUP,
    ) -> AsyncIterator[StoredMessage]:
        """The messages of a queue from one offset to before another."""
        offset = first
        while offset < stop:
            count = min(stop - offset, PULL_COUNT_MAX)
            pulled = await self.fetch(
                topic, queue, offset, count=count, expression=expression, group=group
            )
            for message in pulled.messages:
                if message.queue_offset < stop:
                    yield message
            if pulled.next_offset <= offset:
                return  # the queue ends before `stop`
            offset = pulled.next_offset

    async def message_at(self, topic: str, queue: QueueAt, offset: int) -> StoredMessage:
        """The message at an offset of a queue; raises NotFound."""
        pulled = await self.fetch(topic, queue, offset, count=1)
        if not pulled.messages or pulled.messages[0].queue_offset != offset:
            raise NotFound(
                f"{topic} queue {queue.queue_id} of {queue.broker_name} has no message at offset "
                f"{offset} ({pulled.status}, go on at {pulled.next_offset})"
            )
        return pulled.messages[0]

    async def message_by_id(
        self, topic: str, message_id: str, cluster: str | None = None
    ) -> StoredMessage:
        """The message with an offset id, or with a producer's unique key; raises NotFound."""
        match = _MESSAGE_ID.fullmatch(message_id)
        if match is not None:
            # An id names the address that the broker knows of itself, which may not be the one that
            # it is reached at: so those that serve the topic are asked, and no other.
            route = await self.route(topic)
            for broker in route.brokers:
                address = broker.addresses.get(0)
                if address is None:
                    continue
                ext = {"topic": topic, "offset": str(int(match[1], 16))}
                answer = await self.ask(address, Request.VIEW_MESSAGE_BY_ID, ext)
                if answer.code == Response.SUCCESS:
                    (message,) = stored_messages(answer.body, broker.name)
                    if message.offset_id == message_id.upper():
                        return message
        found = await self.query(topic, message_id, kind=UNIQUE, cluster=cluster)
        if not found:
            raise NotFound(f"no message of {topic} has the id {message_id}")
        return found[0]

    async def query(
        self,
        topic: str,
        key: str,
        *,
        kind: str = KEYS,
        count: int = PULL_COUNT_MAX,
        begin_ms: int = 0,
        end_ms: int = TIME_MAX,
        cluster: str | None = None,
        last_key: str | None = None,
    ) -> list[StoredMessage]:
        """Messages by key, tag or unique key, of all brokers of the topic, the oldest first."""
        ext = {
            "topic": topic,
            "key": key,
            "maxNum": str(count),
            "beginTimestamp": str(begin_ms),
            "endTimestamp": str(end_ms),
            "_UNIQUE_KEY_QUERY": "true" if kind == UNIQUE else "false",
        }
        if kind != UNIQUE:
            ext["indexType"] = kind
        if last_key:
            ext["lastKey"] = last_key
        result: list[StoredMessage] = []
        for broker in (await self.route(topic)).brokers:
            address = broker.addresses.get(0)
            if address is None or (cluster is not None and cluster != broker.cluster):
                continue
            answer = await self.ask(address, Request.QUERY_MESSAGE, ext, timeout_seconds=15.0)
            if answer.code == Response.QUERY_NOT_FOUND:
                continue
            if answer.code != Response.SUCCESS:
                raise Refused(answer.code, answer.remark, f"{address}: looking for {key}")
            # The index knows hashes of keys: what only has the same hash is left out.
            result += (
                message
                for message in stored_messages(answer.body, broker.name)
                if message.topic == topic and _has_key(message, key, kind)
            )
        return sorted(result, key=lambda message: (message.store_ms, message.queue_offset))

    async def send_message(
        self,
        topic: str,
        queue: QueueAt,
        body: bytes,
        properties: Mapping[str, str],
        *,
        flag: int = 0,
    ) -> Sent:
        """Send one message, with a unique key that it can be found by: its own or a new one."""
        unique = properties.get("UNIQ_KEY") or unique_key()
        ext = {
            "a": PRODUCER_GROUP,
            "b": topic,
            "c": _AUTO_CREATE_TOPIC,
            "d": "4",
            "e": str(queue.queue_id),
            "f": "0",
            "g": str(wall_ms()),
            "h": str(flag),
            "i": records.format_properties({**properties, "UNIQ_KEY": unique}).decode(),
            "j": "0",
            "k": "false",
            "m": "false",
        }
        answer = await self.ask(queue.address, Request.SEND_MESSAGE_V2, ext, body)
        status = _SENT.get(answer.code)
        if status is None:
            raise Refused(answer.code, answer.remark, f"{queue.address}: sending to {topic}")
        return Sent(
            status,
            unique,
            answer.ext["msgId"],
            queue.broker_name,
            int(answer.ext["queueId"]),
            int(answer.ext["queueOffset"]),
        )


_numbers: Final = count()
_maker: Final = os.urandom(10)  # RocketMQ has address, process and class loader here


def unique_key() -> str:
    """A key that no other message has; like RocketMQ's, it holds the time within the month."""
    now = datetime.now(UTC)
    month = now.replace(day=1, hour=0, minute=0, second=0, microsecond=0)
    elapsed_ms = int((now - month).total_seconds() * 1000)
    number = next(_numbers) & 0xFFFF
    return (_maker + elapsed_ms.to_bytes(4, "big") + number.to_bytes(2, "big")).hex().upper()


def stored_messages(body: memoryview | bytes, broker_name: str) -> list[StoredMessage]:
    """The messages that an answer holds one after the other."""
    result = []
    at = 0
    try:
        while at < len(body):
            entry = records.decode(body, at)
            result.append(_stored(entry, broker_name))
            at += entry.size
    except records.BadRecord as error:
        raise SluiceError(f"{broker_name} sent a message that cannot be read: {error}") from error
    return result


def _stored(entry: records.Entry, broker_name: str) -> StoredMessage:
    properties = records.parse_properties(entry.properties)
    offset_id = (entry.store_host + entry.position.to_bytes(8, "big")).hex().upper()
    body, compression = _unpacked(entry)
    return StoredMessage(
        entry.topic,
        broker_name,
        entry.queue_id,
        entry.queue_offset,
        properties.get("UNIQ_KEY", offset_id),
        offset_id,
        properties,
        body,
        compression,
        entry.body_crc,
        entry.flag,
        entry.sys_flag,
        entry.born_ms,
        _host_text(entry.born_host),
        entry.store_ms,
        _host_text(entry.store_host),
        entry.size,
        entry.position,
        entry.reconsume_times,
        entry.prepared_offset,
    )


def _unpacked(entry: records.Entry) -> tuple[bytes, str | None]:
    """The body as its producer gave it; with a name where it is packed in a way not known here."""
    body = bytes(entry.body)
    if not entry.sys_flag & records.SYS_COMPRESSED:
        return body, None
    name = _COMPRESSIONS.get(entry.sys_flag >> 8 & 7, "an unknown way")
    if name != "zlib":
        return body, name
    unpacker = zlib.decompressobj()
    try:
        unpacked = unpacker.decompress(body, _BODY_BYTES_MAX)
    except zlib.error:
        return body, name
    return (unpacked, None) if unpacker.eof else (body, name)


def _host_text(host: bytes) -> str:
    address, port = ipaddress.ip_address(host[:-4]), int.from_bytes(host[-4:], "big")
    return f"[{address}]:{port}" if address.version == 6 else f"{address}:{port}"


def _has_key(message: StoredMessage, key: str, kind: str) -> bool:
    if kind == UNIQUE:
        return message.message_id == key
    if kind == TAGS:
        return message.tags == key
    return key in (message.keys or "").split(" ")
