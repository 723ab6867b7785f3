"""This module writes runs: messages to one queue that differ in body, flag and properties only.

That is what a producer's batch is. It gives the same bytes as `records.Encoder` would, one by one,
in a third of the time: what is the same in all entries is looked up once. A test holds the two
together. This module may not do IO, read a clock, or log.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from struct import Struct
from typing import Final, NamedTuple

from isal.isal_zlib import crc32

from sluice.model import Buffer, Message
from sluice.protocol import records
from sluice.protocol.message_batches import BATCH_COUNT_MAX

_MASK_31: Final = 0x7FFFFFFF
_ENDS: Final = (b"", b"\x02")  # how the properties of an entry end
_SEPARATOR: Final = 2


@dataclass(slots=True)
class Run:
    """Messages of one producer to one queue; `parts` are flag, body and properties of each."""

    topic: str
    queue_id: int
    sys_flag: int
    born_ms: int
    born_host: bytes
    reconsume_times: int
    parts: Sequence[tuple[int, Buffer, bytes]]

    def message(self, index: int) -> Message:
        """One of them as a message of its own."""
        flag, body, properties = self.parts[index]
        return Message(
            self.topic,
            self.queue_id,
            body,
            properties,
            flag,
            self.sys_flag,
            self.born_ms,
            self.born_host,
            self.reconsume_times,
        )


def measure_run(encoder: records.Encoder, run: Run, topic: bytes) -> list[int]:
    """The size of each entry; refuses what can never be stored. Ends the properties as entries
    have them.
    """
    if not encoder.crc_bytes:
        return [encoder.measure(run.message(index), topic) for index in range(len(run.parts))]
    parts = run.parts
    if any(properties[-1:] not in _ENDS for _, _, properties in parts):
        run.parts = parts = [
            part if part[2][-1:] in _ENDS else (part[0], part[1], part[2] + b"\x02")
            for part in parts
        ]
    # The first says what all have in common; of the rest only the longest can be too long.
    rest_bytes = encoder.measure(run.message(0), topic) - len(parts[0][1]) - len(parts[0][2])
    bodies = [len(body) for _, body, _ in parts]
    properties_bytes = [len(properties) for _, _, properties in parts]
    sizes = [rest_bytes + a + b for a, b in zip(bodies, properties_bytes, strict=True)]
    if (
        max(sizes) > encoder.entry_bytes_max
        or max(bodies) > encoder.body_bytes_max
        or max(properties_bytes) > encoder.properties_bytes_max
    ):
        for index in range(len(parts)):
            encoder.measure(run.message(index), topic)
    return sizes


def encode_run(
    encoder: records.Encoder,
    run: Run,
    topic: bytes,
    sizes: list[int],
    queue_offset: int,
    position: int,
    store_ms: int,
) -> list[bytes]:
    """The entries, ready to be written one after the other from `position` on; `sizes` are what
    `measure_run` gave.
    """
    shape, magic, topic_field, sys_flag = encoder.shape(topic, run.sys_flag, run.born_host)
    pack, crc_bytes, crc_property = shape.pack, encoder.crc_bytes, records.crc_property
    queue_id, born_ms, born_host = run.queue_id, run.born_ms, run.born_host
    store_host, reconsume_times = encoder.store_host, run.reconsume_times
    fields: dict[int, bytes] = {}  # topic and size of the properties, which mostly are alike
    entries: list[bytes] = []
    for (flag, body, properties), size in zip(run.parts, sizes, strict=True):
        field = fields.get(len(properties))
        if field is None:
            field = topic_field + (len(properties) + crc_bytes).to_bytes(2, "big")
            fields[len(properties)] = field
        head = pack(
            size,
            magic,
            crc32(body) & _MASK_31,
            queue_id,
            flag,
            queue_offset,
            position,
            sys_flag,
            born_ms,
            born_host,
            store_ms,
            store_host,
            reconsume_times,
            0,
            len(body),
        )
        entry = b"".join((head, body, field, properties))
        entries.append(entry + crc_property(crc32(entry)) if crc_bytes else entry)
        queue_offset += 1
        position += size
    return entries


# ------------------------------------------------------------- a batch as it came, without a detour


class BatchShape(NamedTuple):
    """What the entries of a producer's batches to one queue have in common."""

    magic: int
    topic_field: bytes
    sys_flag: int
    queue_id: int
    rest_bytes: int  # of an entry, beside body and properties
    body_bytes_max: int
    properties_bytes_max: int
    entry_bytes_max: int
    store_host: bytes

    @property
    def middle_bytes(self) -> int:
        """The size of `middle`, with a born host of eight bytes."""
        return 40 + len(self.store_host)

    def middle(self, born_ms: int, born_host: bytes, store_ms: int, origin: int = 0) -> bytes:
        """What stands between the position of an entry and the size of its body; `origin` is the
        position of the entry that it is made from.
        """
        return b"".join(
            (
                self.sys_flag.to_bytes(4, "big"),
                born_ms.to_bytes(8, "big"),
                born_host,
                store_ms.to_bytes(8, "big"),
                self.store_host,
                bytes(4),  # never tried again
                origin.to_bytes(8, "big"),
            )
        )


class EncodedBatch(NamedTuple):
    """The entries of a batch, joined; the size and the keys of each; all properties, joined."""

    entries: bytes
    properties: bytes
    sizes: list[int]
    keys: list[tuple[bytes, bytes, bytes]]


_BATCH_HEAD: Final = Struct(">i8xii")  # size, flag, size of the body
_BATCH_HEAD_BYTES: Final = 20
_BATCH_MESSAGE_BYTES_MIN: Final = 22
_ENTRY_FRONT: Final = Struct(">iIIiiqq")  # up to and with the position


def encode_batch(
    shape: BatchShape, middle: bytes, data: bytes, queue_offset: int, position: int
) -> EncodedBatch | None:
    """What `split_batch` and `encode_run` make of a batch with whole-message checksums, in one go.

    None where anything about it is unusual: they say what. `middle` is `shape.middle`, `position`
    is where its first entry goes.
    """
    magic, topic_field, _, queue_id, rest_bytes, body_max, properties_max, entry_max, _ = shape
    unpack, pack = _BATCH_HEAD.unpack_from, _ENTRY_FRONT.pack
    message_keys, crc_parts = records.message_keys, records.crc_parts
    middles: dict[int, bytes] = {}
    fields: dict[int, bytes] = {}
    pieces: list[bytes] = []
    sizes: list[int] = []
    keys: list[tuple[bytes, bytes, bytes]] = []
    texts: list[bytes] = []
    at, end = 0, len(data)
    while at < end:
        if end - at < _BATCH_MESSAGE_BYTES_MIN:
            return None
        size, flag, body_bytes = unpack(data, at)
        body_at = at + _BATCH_HEAD_BYTES
        body_end = body_at + body_bytes
        at += size
        properties_bytes = at - body_end - 2
        if body_bytes < 0 or properties_bytes <= 0 or at > end or data[at - 1] != _SEPARATOR:
            return None
        size = rest_bytes + body_bytes + properties_bytes
        if (
            data[body_end] << 8 | data[body_end + 1] != properties_bytes
            or body_bytes > body_max
            or properties_bytes > properties_max
            or size > entry_max
        ):
            return None
        # The sizes are mostly alike, and so is what they are stored as.
        before = middles.get(body_bytes)
        if before is None:
            before = middles[body_bytes] = middle + body_bytes.to_bytes(4, "big")
        field = fields.get(properties_bytes)
        if field is None:
            stored_bytes = properties_bytes + records.CRC_PROPERTY_BYTES
            field = fields[properties_bytes] = topic_field + stored_bytes.to_bytes(2, "big")
        body = data[body_at:body_end]
        properties = data[body_end + 2 : at]
        texts.append(properties)
        keys.append(message_keys(properties))
        crc = crc32(body) & _MASK_31
        front = pack(size, magic, crc, queue_id, flag, queue_offset, position)
        entry = b"".join((front, before, body, field, properties))
        pieces += (entry, *crc_parts(crc32(entry)))
        sizes.append(size)
        queue_offset += 1
        position += size
    if not 0 < len(sizes) <= BATCH_COUNT_MAX:
        return None
    return EncodedBatch(b"".join(pieces), b"".join(texts), sizes, keys)
