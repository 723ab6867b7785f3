"""This module finds the keys of the records of a batch, as RocketMQ's clients ask for messages by
them: plain text without blanks. Others are shown in Base64, and nobody finds a message by that.

Only the beginning of each record is read. Pure.
"""

from __future__ import annotations

from typing import Final

from sluice.model import Buffer
from sluice.protocol import kafka_batches, kafka_entries, records
from sluice.protocol.kafka_batches import BadBatch, BatchHead

UNPACKED_MAX: Final = 64 * 1024 * 1024
_NOT_IN_A_KEY: Final = bytes((0, 1, 2, 32))


def keys_of(head: BatchHead, data: Buffer, unpacked_max: int = UNPACKED_MAX) -> bytes:
    """The keys of a batch, each once, with blanks between them; of what cannot be read, none."""
    if head.is_control:
        return b""
    try:
        inside = kafka_batches.unpack(
            head.codec, memoryview(data)[kafka_batches.HEAD_BYTES :], unpacked_max
        )
        return b" ".join(_keys(bytes(inside), head.record_count))
    except (BadBatch, IndexError):
        return b""


def _keys(data: bytes, count: int) -> dict[bytes, None]:
    found: dict[bytes, None] = {}
    read = kafka_batches.read_varint
    at = 0
    for _ in range(count):
        length, at = read(data, at)
        end = at + length
        _, at = read(data, at + 1)
        _, at = read(data, at)
        size, at = read(data, at)
        if size > 0:
            key = data[at : at + size]
            if key not in found and _is_plain(key):
                found[key] = None
        at = end
    return found


def _is_plain(key: bytes) -> bool:
    if key.translate(None, _NOT_IN_A_KEY) != key:
        return False
    if key.isascii():
        return True
    try:
        key.decode()
    except UnicodeDecodeError:
        return False
    return True


def keys_in(view: Buffer) -> bytes:
    """The keys of a stored entry that holds a batch."""
    entry = records.decode(view)
    head = kafka_batches.read_head(entry.body)
    return b"" if head is None else keys_of(head, entry.body)


def has_key(view: Buffer, sys_flag: int, key: bytes) -> bool:
    """Whether a stored entry is a batch with a record of this key."""
    return kafka_entries.is_kafka(sys_flag) and key in keys_in(view).split(b" ")
