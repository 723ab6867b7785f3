"""This module shows the records of one protocol as messages of the other, without loss.

    Kafka's record            RocketMQ's message
    value                     body; null: an empty body and __KAFKA_NULL=1
    key                       KEYS, and __SHARDINGKEY; what is no plain text: __KAFKA_KEY_B64
    headers                   one property each; where some cannot be one: __KAFKA_HDR_B64, all
    header rmq.tags           TAGS
    header rmq.msgid          UNIQ_KEY
    timestamp                 the time of birth
    offset, partition         the same

A message that was made from a record says so (__KAFKA_RECORD), so that the way back leads to the
same record, and the system flag 0x4000 tells that its time of birth is the record's timestamp.
Properties that only the broker or RocketMQ's clients understand are not shown to Kafka's. Pure:
bytes in, bytes out.
"""

from __future__ import annotations

import base64
import binascii
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from sluice.model import Message
from sluice.protocol import kafka_batches, kafka_entries, records
from sluice.protocol.kafka_batches import BadBatch, BatchHead, Header, Record

TAGS_HEADER: Final = "rmq.tags"
ID_HEADER: Final = "rmq.msgid"
MADE_NAME: Final = "__KAFKA_RECORD"
NULL_NAME: Final = "__KAFKA_NULL"
KEY_NAME: Final = "__KAFKA_KEY_B64"
HEADERS_NAME: Final = "__KAFKA_HDR_B64"
_SHARDING: Final = "__SHARDINGKEY"
_EMPTY_B64: Final = "="  # a property cannot be empty

# What RocketMQ's clients and brokers say to each other; no word of the application's.
_SYSTEM: Final = frozenset(
    {
        *("KEYS", "TAGS", "WAIT", "DELAY", "RETRY_TOPIC", "REAL_TOPIC", "REAL_QID", "TRAN_MSG"),
        *("ORIGIN_QUEUE_ID", "ORIGIN_QUEUE_OFFSET"),
        *("PGROUP", "MIN_OFFSET", "MAX_OFFSET", "BUYER_ID", "ORIGIN_MESSAGE_ID", "TRANSFER_FLAG"),
        *("CORRECTION_FLAG", "MQ2_FLAG", "RECONSUME_TIME", "MAX_RECONSUME_TIMES", "MSG_REGION"),
        *(
            "TRACE_ON",
            "UNIQ_KEY",
            "EXTEND_UNIQ_INFO",
            "CONSUME_START_TIME",
            "TRAN_PREPARED_QUEUE_OFFSET",
        ),
        *(
            "TRANSACTION_CHECK_TIMES",
            "CHECK_IMMUNITY_TIME_IN_SECONDS",
            "INSTANCE_ID",
            "CORRELATION_ID",
        ),
        *("REPLY_TO_CLIENT", "TTL", "ARRIVE_TIME", "PUSH_REPLY_TIME", "CLUSTER", "MSG_TYPE"),
        *("POP_CK", "POP_CK_OFFSET", "1ST_POP_TIME", "DLQ_ORIGIN_TOPIC", "DLQ_ORIGIN_MESSAGE_ID"),
        *("INNER_NUM", "INNER_BASE", "INNER_MULTI_DISPATCH", "INNER_MULTI_QUEUE_OFFSET"),
        *("TRACE_CONTEXT", "BORN_HOST", "BORN_TIMESTAMP", "SHARDING_KEY", "REDIRECT", "DUP_INFO"),
    }
)
_SYSTEM_STARTS: Final = ("__", "TIMER_", "_SYS_", "%", "MSG_TTL")
_CODEC_MASK: Final = 0x700
_LZ4, _ZSTD = 0x100, 0x200


# ---------------------------------------------------------------------------- a record as a message


def message_of(
    topic: str, queue_id: int, head: BatchHead, record: Record, born_host: bytes
) -> Message:
    """A record of a producer's batch as a message that is stored by itself."""
    body, properties = content_of(record)
    return Message(
        topic,
        queue_id,
        body,
        properties,
        sys_flag=_flag_of(head),
        born_ms=max(0, head.base_ms + record.time_delta),
        born_host=born_host,
    )


def _flag_of(head: BatchHead) -> int:
    """What tells that the time of birth of a message is the timestamp of a record."""
    return 0 if head.attributes & kafka_batches.APPEND_TIME else kafka_entries.SYS_KAFKA


def content_of(record: Record, unique: str = "") -> tuple[bytes, bytes]:
    """Body and properties of the message that shows a record; `unique`: its id, where it has none
    of its own.
    """
    texts = _plain_headers(record.headers)
    properties: dict[str, str] = {MADE_NAME: "1"}
    if record.value is None:
        properties[NULL_NAME] = "1"
    if record.key is not None:
        key = plain_text(record.key)
        if key and " " not in key:
            properties["KEYS"] = properties[_SHARDING] = key
        else:
            properties[KEY_NAME] = _to_base64(record.key)
    tags, own_id = texts.pop(TAGS_HEADER, ""), texts.pop(ID_HEADER, "")
    properties |= texts
    if tags:
        properties["TAGS"] = tags
    if own_id or unique:
        properties["UNIQ_KEY"] = own_id or unique
    if own_id:
        properties[MADE_NAME] = "id"
    if record.headers and record_of(0, 0, b"", properties).headers != record.headers:
        properties[HEADERS_NAME] = _to_base64(_pack_headers(record.headers))
    packed = "".join(f"{name}\x01{value}\x02" for name, value in properties.items())
    return record.value or b"", packed.encode()


def _plain_headers(headers: Sequence[Header]) -> dict[str, str]:
    """Those headers that can be properties: text, not empty, no name twice."""
    result: dict[str, str] = {}
    for name, value in headers:
        text = plain_text(value) if value else ""
        is_name = bool(name) and "\x01" not in name and "\x02" not in name
        if text and is_name and not is_system(name) and name not in result:
            result[name] = text
    return result


def is_system(name: str) -> bool:
    """Whether a property of this name is not the application's."""
    return name in _SYSTEM or name.startswith(_SYSTEM_STARTS)


def plain_text(value: bytes) -> str:
    """Bytes as a property's value; empty where they cannot be one."""
    try:
        text = value.decode()
    except UnicodeDecodeError:
        return ""
    return "" if "\x01" in text or "\x02" in text or "\x00" in text else text


def _pack_headers(headers: Sequence[Header]) -> bytes:
    out = bytearray()
    kafka_batches.put_record(out, Record(0, 0, None, None, tuple(headers)))
    return bytes(out)


def _to_base64(value: bytes) -> str:
    return base64.b64encode(value).decode() or _EMPTY_B64


def _from_base64(text: str) -> bytes:
    if text == _EMPTY_B64:
        return b""
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        return text.encode()  # nobody but us writes it; whoever did gets it back as it is


# ---------------------------------------------------------------------------- a message as a record


def record_of(
    offset_delta: int, time_delta: int, body: bytes, properties: dict[str, str]
) -> Record:
    """The record that shows a message whose body is unpacked already."""
    value = value_of(body, properties)
    headers = _packed_headers(properties)
    if headers is None:
        headers = _all_headers(properties)
    return Record(offset_delta, time_delta, key_of(properties), value, headers)


def value_of(body: bytes, properties: Mapping[str, str]) -> bytes | None:
    """The value of the record that shows a message."""
    return None if not body and NULL_NAME in properties else body


def key_of(properties: Mapping[str, str]) -> bytes | None:
    """The key of the record that shows a message."""
    if "KEYS" in properties:
        return properties["KEYS"].encode()
    packed = properties.get(KEY_NAME)
    return None if packed is None else _from_base64(packed)


def headers_of(properties: Mapping[str, str]) -> tuple[Header, ...]:
    """The application's own headers: those of the record that a message was made from, or its
    properties.
    """
    headers = _packed_headers(properties)
    if headers is not None:
        return headers
    if MADE_NAME in properties:
        return _all_headers(properties)
    return _own_headers(properties)


def _own_headers(properties: Mapping[str, str]) -> tuple[Header, ...]:
    return tuple((name, text.encode()) for name, text in properties.items() if not is_system(name))


def _all_headers(properties: Mapping[str, str]) -> tuple[Header, ...]:
    headers = _own_headers(properties)
    if properties.get("TAGS"):
        headers += ((TAGS_HEADER, properties["TAGS"].encode()),)
    if properties.get(MADE_NAME) in (None, "id") and properties.get("UNIQ_KEY"):
        headers += ((ID_HEADER, properties["UNIQ_KEY"].encode()),)
    return headers


def _packed_headers(properties: Mapping[str, str]) -> tuple[Header, ...] | None:
    packed = properties.get(HEADERS_NAME)
    return None if packed is None else _unpack_headers(_from_base64(packed))


def _unpack_headers(packed: bytes) -> tuple[Header, ...] | None:
    head = BatchHead(0, 0, 0, 2, 0, 0, 0, 0, 0, -1, -1, -1, 1)
    try:
        (record,) = kafka_batches.read_records(
            head, bytes(kafka_batches.HEAD_BYTES) + packed, len(packed)
        )
    except BadBatch:
        return None
    return record.headers


def plain_body(entry: records.Entry, bytes_max: int) -> bytes:
    """A message's body as the application wrote it; as it lies where it cannot be unpacked."""
    body = bytes(entry.body)
    if not entry.sys_flag & records.SYS_COMPRESSED:
        return body
    try:
        codec = entry.sys_flag & _CODEC_MASK
        if codec == _LZ4:
            return bytes(kafka_batches.unpack(kafka_batches.CODEC_LZ4, body, bytes_max))
        if codec == _ZSTD:
            return bytes(kafka_batches.unpack(kafka_batches.CODEC_ZSTD, body, bytes_max))
        stream = zlib.decompressobj()
        result = stream.decompress(body, bytes_max)
        return bytes(result) if stream.eof else body
    except (BadBatch, zlib.error):
        return body


def batch_of(
    entries: Sequence[records.Entry],
    bytes_max: int,
    *,
    append_time: bool,
    more: Callable[[records.Entry], tuple[Header, ...]] | None = None,
) -> bytes:
    """One batch that shows messages which follow each other in their queue; `more`: headers that
    each of them has beside its own.
    """
    first = entries[0]
    times = [entry.store_ms if append_time else entry.born_ms for entry in entries]
    shown = [
        record_of(
            entry.queue_offset - first.queue_offset,
            time - times[0],
            plain_body(entry, bytes_max),
            records.parse_properties(records.without_checksum(entry.properties)),
        )
        for entry, time in zip(entries, times, strict=True)
    ]
    if more is not None:
        shown = [
            record._replace(headers=record.headers + more(entry))
            for record, entry in zip(shown, entries, strict=True)
        ]
    attributes = kafka_batches.APPEND_TIME if append_time else 0
    return kafka_batches.build(
        first.queue_offset, times[0], max(times), shown, attributes=attributes
    )


# ------------------------------------------------------------------- a stored batch as its messages


def record_id(topic_id: str, queue_id: int, offset: int) -> str:
    """The id of the message that shows a record, where the record has none of its own."""
    return f"{topic_id}{queue_id:08X}{offset:016X}"


def entries_of(
    entry: records.Entry, topic_id: str, bytes_max: int, *, properties_max: int
) -> list[tuple[int, bytes]]:
    """The entries that show the records of a stored batch, with their offsets.

    What a message cannot carry is left out of it: headers that take more than properties may.
    """
    head = kafka_batches.read_head(entry.body)
    if head is None or head.is_control:
        return []
    encoder = records.Encoder(
        entry.store_host, with_crc=False, body_bytes_max=1 << 30, entry_bytes_max=1 << 30
    )
    topic = entry.topic.encode()
    result: list[tuple[int, bytes]] = []
    for record in kafka_batches.read_records(head, entry.body, bytes_max):
        offset = entry.queue_offset + record.offset_delta
        unique = record_id(topic_id, entry.queue_id, offset)
        body, properties = content_of(record, unique)
        if len(properties) > properties_max:
            body, properties = content_of(record._replace(headers=()), unique)
        if len(properties) > properties_max:
            body, properties = content_of(record._replace(headers=(), key=None), unique)
        is_append_time = head.attributes & kafka_batches.APPEND_TIME
        born_ms = head.max_ms if is_append_time else head.base_ms + record.time_delta
        message = Message(
            entry.topic,
            entry.queue_id,
            body,
            properties,
            sys_flag=_flag_of(head),
            born_ms=max(0, born_ms),
            born_host=entry.born_host,
        )
        size = encoder.measure(message, topic)
        store_ms = head.max_ms if is_append_time else entry.store_ms
        result.append(
            (offset, encoder.encode(message, topic, size, offset, entry.position, store_ms))
        )
    return result
