"""This module holds the values that users handle: messages in both directions, results of sends.

A `ReceivedMessage` is a view of the bytes that a pull brought. What a consumer does not look at is
never made into text, so that reading costs little. This module does no IO and asks no clock.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping
from datetime import datetime
from enum import Enum
from functools import lru_cache
from struct import Struct
from struct import error as struct_error
from typing import Any, Final, NamedTuple

from isal.isal_zlib import crc32

from sluice.client.core.given import (
    bytes_of,
    check_flag,
    check_texts,
    delay_ms_of,
    keys_of,
    time_ms_of,
)
from sluice.client.core.ids import KeyRange, key_of
from sluice.errors import MessageIllegal, MessageInvalid, ProtocolError
from sluice.model import Buffer
from sluice.protocol import records
from sluice.protocol.client_frames import ENTRY_HEAD, SentFields
from sluice.protocol.framing import Frame
from sluice.protocol.json_members import MessageQueue
from sluice.protocol.message_batches import split_batch

RETRY_PREFIX: Final = "%RETRY%"
DLQ_PREFIX: Final = "%DLQ%"
DELAY_LEVEL_MAX: Final = 18
# Names that RocketMQ gives a meaning of their own; users set them through arguments.
RESERVED: Final = frozenset(
    (
        *("TRACE_ON", "MSG_REGION", "KEYS", "TAGS", "WAIT", "DELAY", "RETRY_TOPIC", "REAL_TOPIC"),
        *("REAL_QID", "TRAN_MSG", "PGROUP", "MIN_OFFSET", "MAX_OFFSET", "BUYER_ID", "UNIQ_KEY"),
        *("ORIGIN_MESSAGE_ID", "TRANSFER_FLAG", "CORRECTION_FLAG", "MQ2_FLAG", "RECONSUME_TIME"),
        *("MAX_RECONSUME_TIMES", "CONSUME_START_TIME", "CLUSTER", "MSG_TYPE", "POP_CK", "TTL"),
        *("TIMER_DELIVER_MS", "TIMER_DELAY_MS", "TIMER_DELAY_SEC", "TIMER_OUT_MS", "__CRC32#"),
        *("TRAN_PREPARED_QUEUE_OFFSET", "__transactionId__", "CORRELATION_ID", "REPLY_TO_CLIENT"),
    )
)
_FLAG_COMPRESSED: Final = records.SYS_COMPRESSED
_ZLIB: Final = 0x300
COMPRESSED_ZLIB: Final = _FLAG_COMPRESSED | _ZLIB
# Whoever made a message larger than a broker takes, made it to fill the memory of its readers.
_BODY_BYTES_MAX: Final = 64 * 1024 * 1024
_MASK_31: Final = 0x7FFFFFFF


class Message:
    """A message to send. `keys` find it again, `tags` filter it, `properties` are the user's own.

    Of the times at most one: a delay level (1 to 18, RocketMQ's fixed steps), seconds from now,
    or a time. `sharding_key` keeps messages of one key in order: they go to one queue.
    """

    __slots__ = (
        *("body", "delay_level", "delay_ms", "deliver_at_ms", "extra", "flag", "keys"),
        *("properties", "sharding_key", "tags", "topic"),
    )

    def __init__(
        self,
        topic: str,
        body: bytes | bytearray | memoryview | str,
        *,
        tags: str = "",
        keys: str | Iterable[str] = (),
        properties: Mapping[str, str] | None = None,
        sharding_key: str = "",
        delay_level: int = 0,
        delay_seconds: float = 0,
        deliver_at: datetime | float | None = None,
        flag: int = 0,
    ) -> None:
        if type(topic) is not str or not topic:
            raise MessageInvalid(f"a topic is a text that is not empty, not {topic!r}")
        if type(body) is not bytes:
            body = bytes_of(body)
        if not body:
            raise MessageInvalid(f"a message to {topic} has an empty body; brokers refuse those")
        self.topic = topic
        self.body: Buffer = body
        self.tags = tags
        self.keys = keys if isinstance(keys, str) else keys_of(keys) if keys else ""
        self.properties = properties
        self.sharding_key = sharding_key
        self.delay_level = delay_level
        self.delay_ms = 0
        self.deliver_at_ms = 0
        self.flag = flag or 0
        self.extra: dict[str, str] | None = None  # the client's own properties
        if delay_level or delay_seconds or deliver_at is not None:
            self._set_time(delay_level, delay_seconds, deliver_at)
        if tags or self.keys or properties or sharding_key or flag:
            self._check()

    def _set_time(
        self, delay_level: Any, delay_seconds: Any, deliver_at: datetime | float | None
    ) -> None:
        if (delay_level != 0) + (delay_seconds != 0) + (deliver_at is not None) > 1:
            raise MessageInvalid("give one of delay_level, delay_seconds and deliver_at")
        if not isinstance(delay_level, int) or not 0 <= delay_level <= DELAY_LEVEL_MAX:
            raise MessageInvalid(f"delay_level {delay_level!r}: allowed are 1 to 18")
        self.delay_ms = delay_ms_of(delay_seconds)
        if deliver_at is not None:
            self.deliver_at_ms = time_ms_of(deliver_at)

    def _check(self) -> None:
        check_texts(self.tags, self.keys, self.sharding_key, self.properties, RESERVED)
        check_flag(self.flag)

    @property
    def is_plain(self) -> bool:
        """Whether it may go into a batch: no delay, no meaning beyond itself."""
        return not (self.delay_level or self.delay_ms or self.deliver_at_ms or self.extra)

    def wire_properties(self, unique: str) -> bytes:
        """All properties as they go over the wire; `unique` is the id that it is found by."""
        return b"UNIQ_KEY\x01%b\x02%b" % (unique.encode(), self.wire_tail())

    def wire_tail(self) -> bytes:
        """The properties that follow the one with the id."""
        if (
            self.properties is None
            and self.extra is None
            and not (self.keys or self.sharding_key or self.delay_level)
            and not (self.delay_ms or self.deliver_at_ms)
        ):
            return _plain_tail(self.tags) if self.tags else _SHORT_TAIL
        parts = ["WAIT\x01true\x02"]
        pairs: list[tuple[str, object]] = [
            ("TAGS", self.tags),
            ("KEYS", self.keys),
            ("__SHARDINGKEY", self.sharding_key),
            ("DELAY", self.delay_level),
            ("TIMER_DELAY_MS", self.delay_ms),
            ("TIMER_DELIVER_MS", self.deliver_at_ms),
        ]
        parts += (f"{name}\x01{value}\x02" for name, value in pairs if value)
        for table in (self.properties, self.extra):
            if table:
                parts += (f"{name}\x01{value}\x02" for name, value in table.items() if value)
        return "".join(parts).encode()

    def with_properties(self, more: Mapping[str, str]) -> Message:
        """The same message with more properties."""
        copy = self._copy()
        copy.properties = {**(self.properties or {}), **more}
        copy._check()
        return copy

    def _copy(self) -> Message:
        copy = Message.__new__(Message)
        for name in Message.__slots__:
            setattr(copy, name, getattr(self, name))
        return copy

    def with_extra(self, **extra: str) -> Message:
        """The same message with properties of the client's own."""
        copy = self._copy()
        copy.extra = {**(self.extra or {}), **extra}
        return copy

    def __repr__(self) -> str:
        tags = f", tags={self.tags!r}" if self.tags else ""
        return f"Message({self.topic!r}, {len(self.body)} bytes{tags})"


_SHORT_TAIL: Final = b"WAIT\x01true\x02"


@lru_cache(maxsize=1024)
def _plain_tail(tags: str) -> bytes:
    return f"WAIT\x01true\x02TAGS\x01{tags}\x02".encode()


# ------------------------------------------------------------------------------------------ results


class SendStatus(Enum):
    """How well a message is stored. All four mean that it is."""

    OK = 0
    FLUSH_DISK_TIMEOUT = 10
    SLAVE_NOT_AVAILABLE = 11
    FLUSH_SLAVE_TIMEOUT = 12


SEND_STATUSES: Final = {status.value: status for status in SendStatus}


class SendResult:
    """Where a message went, and how well. `message_id` is what a consumer sees as its id."""

    __slots__ = ("_answer", "_index", "_key", "queue", "status")

    def __init__(
        self,
        status: SendStatus,
        key: str | bytes | KeyRange,
        queue: MessageQueue,
        answer: SentFields | Frame,
        index: int = 0,
    ) -> None:
        """`key` is the id, or the properties that begin with it, or those of a whole batch."""
        self.status = status
        self.queue = queue
        self._key = key
        self._answer = answer
        self._index = index  # within a batch

    @property
    def message_id(self) -> str:
        key = self._key
        if isinstance(key, KeyRange):
            return key.at(self._index)
        if isinstance(key, bytes):
            key = self._key = key_of(key)
        return key

    @property
    def _fields(self) -> SentFields:
        answer = self._answer
        if not isinstance(answer, SentFields):
            answer = self._answer = SentFields(answer)
        return answer

    @property
    def queue_offset(self) -> int:
        return self._fields.number("queueOffset") + self._index

    @property
    def queue_id(self) -> int:
        return self._fields.number("queueId")

    @property
    def offset_id(self) -> str:
        """The broker's address and the position in its log."""
        ids = self._fields.ext.get("msgId", "").split(",")
        if self._index >= len(ids):
            raise ProtocolError("the answer to a batch lists less ids than it has messages")
        return ids[self._index]

    @property
    def transaction_id(self) -> str:
        return self._fields.ext.get("transactionId", "")

    @property
    def recall_handle(self) -> str:
        """What `recall` takes a delayed message back by; empty where the broker gave none."""
        return self._fields.ext.get("recallHandle", "")

    def __repr__(self) -> str:
        return f"SendResult({self.status.name}, {self.message_id}, {self.queue})"


class SentBatch(NamedTuple):
    """Where a batch went; the result of a message is made when it is asked for."""

    status: SendStatus
    keys: KeyRange
    queue: MessageQueue
    fields: SentFields

    def result(self, index: int) -> SendResult:
        return SendResult(self.status, self.keys, self.queue, self.fields, index)

    def results(self) -> list[SendResult]:
        return [self.result(index) for index in range(self.keys.number)]


# ----------------------------------------------------------------------------------------- received


class ReceivedMessage:
    """One message of a pull. Its parts are made when they are asked for, and kept.

    It has bytes of its own: who keeps one message does not keep the answer that brought it.
    """

    __slots__ = (
        *("_body", "_head", "_properties", "attempts", "is_done", "queue", "queue_offset"),
        *("stored_body", "stored_bytes", "sys_flag", "wire_properties"),
    )

    # Who makes one sets all of these: a call of __init__ would cost as much as the rest of it.
    queue: MessageQueue
    queue_offset: int
    stored_bytes: int
    sys_flag: int
    _head: bytes | tuple[Any, ...]  # bytes, or a row of `_read_alike`: not taken apart yet
    stored_body: bytes  # as it is stored, packed or not
    wire_properties: bytes
    _body: bytes | None
    _properties: dict[str, str] | None
    is_done: bool
    attempts: int  # by this process, of an ordered message

    @property
    def _fields(self) -> tuple[Any, ...]:
        head = self._head
        if not isinstance(head, bytes):
            if len(head) != _ROW_COUNT:
                return head
            head = _ROW_HEAD.pack(*head[:_ROW_HEAD_COUNT])
        fields = self._head = ENTRY_HEAD.unpack(head)
        return fields

    @property
    def body(self) -> bytes:
        """The body as its producer gave it, unpacked."""
        if not self.sys_flag & _FLAG_COMPRESSED:
            return self.stored_body
        if self._body is None:
            self._body = unpacked(self.stored_body, self.sys_flag)
        return self._body

    @property
    def properties(self) -> dict[str, str]:
        """All properties, the user's and RocketMQ's."""
        if self._properties is None:
            self._properties = records.parse_properties(self.wire_properties)
        return self._properties

    @property
    def topic(self) -> str:
        """The topic that it was sent to, also where it comes again through a retry topic."""
        if self.queue.topic.startswith(RETRY_PREFIX):
            return self.properties.get("RETRY_TOPIC", self.queue.topic)
        return self.queue.topic

    @property
    def tags(self) -> str:
        return self.properties.get("TAGS", "")

    @property
    def keys(self) -> str:
        return self.properties.get("KEYS", "")

    @property
    def sharding_key(self) -> str:
        return self.properties.get("__SHARDINGKEY", "")

    @property
    def message_id(self) -> str:
        return self.properties.get("UNIQ_KEY") or self.offset_id

    @property
    def offset_id(self) -> str:
        """The broker's address and the position in its log."""
        return str((self._fields[11] + self.position.to_bytes(8, "big")).hex().upper())

    @property
    def broker_name(self) -> str:
        return self.queue.broker_name

    @property
    def queue_id(self) -> int:
        return self.queue.queue_id

    @property
    def flag(self) -> int:
        return int(self._fields[4])

    @property
    def position(self) -> int:
        """Where it lies in the broker's log."""
        return int(self._fields[6])

    @property
    def born_ms(self) -> int:
        return int(self._fields[8])

    @property
    def store_ms(self) -> int:
        return int(self._fields[10])

    @property
    def reconsume_times(self) -> int:
        """How often it was given back before."""
        return int(self._fields[12]) + self.attempts

    def __repr__(self) -> str:
        place = f"{self.queue.topic}/{self.queue.queue_id}@{self.queue_offset}"
        return f"ReceivedMessage({place}, {len(self.stored_body)} bytes)"


_BODY_AT: Final = ENTRY_HEAD.size
# Of that head: size, magic, checksum, offset in the queue, flags, size of the body.
_ENTRY_SKETCH: Final = Struct(">iII8xq8xi44xi")
_ODD_FLAGS: Final = (
    records.SYS_BORN_V6 | records.SYS_STORE_V6 | records.SYS_NEED_UNWRAP | records.SYS_INNER_BATCH
)
# Messages are taken for alike where this one behind the first begins as that does.
_ALIKE_AHEAD: Final = 8
# The head of one of those; size and magic are one number. Behind it: the body, the topic and the
# size of the properties, the properties.
_ROW_HEAD: Final = Struct(">QI8sq8si44si")
_ROW_HEAD_COUNT: Final = 8
_ROW_COUNT: Final = _ROW_HEAD_COUNT + 3


def read_pulled(data: Buffer, queue: MessageQueue) -> list[ReceivedMessage]:
    """The messages of an answer to a pull, each with its body's checksum compared.

    Raises ProtocolError where the bytes are no messages: nothing after them can be trusted.
    """
    messages: list[ReceivedMessage] = []
    at, end = 0, len(data)
    try:
        while at < end:
            begin = at
            at = _read_alike(data, at, queue, messages)
            if at == begin:
                if not isinstance(data, bytes):
                    data = bytes(data)  # cutting it up is quicker than with a view
                at = _read_some(data, at, queue, messages)
    except (ValueError, IndexError, struct_error, MessageIllegal) as error:
        raise ProtocolError(f"{queue}: a message that cannot be read: {error}") from error
    return messages


def _read_some(data: bytes, at: int, queue: MessageQueue, messages: list[ReceivedMessage]) -> int:
    """A few messages, whatever their form; where the next one begins."""
    unpack = _ENTRY_SKETCH.unpack_from
    end = len(data)
    for _ in range(_ALIKE_AHEAD):
        if at >= end:
            break
        size, magic, body_crc, queue_offset, sys_flag, body_bytes = unpack(data, at)
        if magic != records.MAGIC_V1 or sys_flag & _ODD_FLAGS:
            entry = records.decode(data, at)
            messages += _odd(entry, queue)
            at += entry.size
            continue
        body_at = at + _BODY_AT
        body_end = body_at + body_bytes
        properties_at = body_end + 3 + data[body_end]
        begin = at
        at += size
        if not body_at <= body_end < properties_at <= at <= end:
            raise ProtocolError(f"{queue}: a message that does not fit into its size")
        body = data[body_at:body_end]
        if crc32(body) & _MASK_31 != body_crc:
            raise ProtocolError(f"{queue}: the body at offset {queue_offset} is damaged")
        message = ReceivedMessage()
        message.queue = queue
        message.queue_offset = queue_offset
        message.stored_bytes = size
        message.sys_flag = sys_flag
        message._head = data[begin:body_at]
        message.stored_body = body
        message.wire_properties = data[properties_at:at]
        message._body = message._properties = None
        message.is_done = False
        message.attempts = 0
        messages.append(message)
    return at


def _read_alike(data: Buffer, at: int, queue: MessageQueue, messages: list[ReceivedMessage]) -> int:
    """The messages from here on whose parts are all as long, taken apart with one form; where the
    next one begins. Nothing is read where that is of no use.
    """
    unpack = _ENTRY_SKETCH.unpack_from
    size, magic, _, _, sys_flag, body_bytes = unpack(data, at)
    ahead = at + _ALIKE_AHEAD * size
    if size <= _BODY_AT or ahead + _BODY_AT > len(data) or sys_flag & _ODD_FLAGS:
        return at
    if magic != records.MAGIC_V1 or unpack(data, ahead)[:2] != (size, magic):
        return at
    body_end = _BODY_AT + body_bytes
    properties_at = body_end + 3 + data[at + body_end]
    if not _BODY_AT <= body_end < properties_at <= size:
        return at
    front, middle = size << 32 | magic, bytes(data[at + body_end : at + properties_at])
    form = _alike_form(size, body_bytes, len(middle))
    for row in form.iter_unpack(memoryview(data)[at : at + (len(data) - at) // size * size]):
        own_front, crc, _, offset, _, flag, _, own_bytes, body, own_middle, properties = row
        if own_front != front or own_middle != middle or flag != sys_flag:
            break
        if own_bytes != body_bytes:
            break
        if crc32(body) & _MASK_31 != crc:
            raise ProtocolError(f"{queue}: the body at offset {offset} is damaged")
        message = ReceivedMessage()
        message.queue = queue
        message.queue_offset = offset
        message.stored_bytes = size
        message.sys_flag = sys_flag
        message._head = row
        message.stored_body = body
        message.wire_properties = properties
        message._body = message._properties = None
        message.is_done = False
        message.attempts = 0
        messages.append(message)
        at += size
    return at


@lru_cache(maxsize=64)
def _alike_form(size: int, body_bytes: int, middle_bytes: int) -> Struct:
    properties_bytes = size - _BODY_AT - body_bytes - middle_bytes
    return Struct(f"{_ROW_HEAD.format}{body_bytes}s{middle_bytes}s{properties_bytes}s")


def _odd(entry: records.Entry, queue: MessageQueue) -> list[ReceivedMessage]:
    """Messages with IPv6 addresses or long topics, or a batch that is stored whole."""
    if not entry.sys_flag & records.SYS_INNER_BATCH:
        body, properties = bytes(entry.body), entry.properties
        return [_of_entry(entry, queue, entry.queue_offset, entry.size, body, properties)]
    base = records.property_value(entry.properties, b"INNER_BASE")
    first = int(base) if base else entry.queue_offset
    result = []
    for offset, (_, inner, properties) in enumerate(split_batch(entry.body), first):
        body, properties = bytes(inner), bytes(properties)
        size = len(body) + len(properties)
        result.append(_of_entry(entry, queue, offset, size, body, properties))
    return result


def _of_entry(
    entry: records.Entry,
    queue: MessageQueue,
    queue_offset: int,
    size: int,
    body: bytes,
    properties: bytes,
) -> ReceivedMessage:
    message = ReceivedMessage()
    message.queue = queue
    message.queue_offset = queue_offset
    message.stored_bytes = size
    message.sys_flag = entry.sys_flag
    message._head = (
        *(entry.size, entry.magic, entry.body_crc, entry.queue_id, entry.flag),
        *(entry.queue_offset, entry.position, entry.sys_flag, entry.born_ms, entry.born_host),
        *(entry.store_ms, entry.store_host, entry.reconsume_times, entry.prepared_offset, 0),
    )
    message.stored_body = body
    message.wire_properties = properties
    message._body = message._properties = None
    message.is_done = False
    message.attempts = 0
    return message


def unpacked(body: bytes, sys_flag: int) -> bytes:
    """A body as its producer gave it; raises ProtocolError where that cannot be had."""
    if not sys_flag & _FLAG_COMPRESSED:
        return body
    kind = sys_flag >> 8 & 7
    if kind not in (0, 3):
        name = {1: "LZ4", 2: "ZSTD"}.get(kind, "an unknown way")
        raise ProtocolError(f"the body is packed by {name}; read it with stored_body")
    unpacker = zlib.decompressobj()
    try:
        data = unpacker.decompress(body, _BODY_BYTES_MAX)
    except zlib.error as error:
        raise ProtocolError(f"the packed body is damaged: {error}") from error
    if not unpacker.eof:
        raise ProtocolError(f"the body unpacks to more than {_BODY_BYTES_MAX} bytes")
    return data


class Reply(NamedTuple):
    """What a request was answered with."""

    body: bytes
    properties: dict[str, str]
