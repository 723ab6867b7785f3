"""This module knows Kafka's record batches (magic 2): their head, what makes one acceptable, and
the records inside.

      0  i64 base offset       the broker writes it; not under the checksum
      8  i32 bytes after this field
     12  i32 leader epoch      the broker writes it; not under the checksum
     16  i8  magic = 2
     17  u32 CRC-32C of all that follows
     21  i16 attributes        bits 0-2 codec, 3 log append time, 4 transactional, 5 control,
                               6 horizon of tombstones
     23  i32 offset of the last record, counted from the base offset
     27  i64 base timestamp
     35  i64 highest timestamp
     43  i64 producer id       -1: none
     51  i16 producer epoch
     53  i32 base sequence     -1: none
     57  i32 number of records
     61      the records, or one compressed block of them

A batch is stored and served as it came; only base offset and epoch are written anew. What is wrong
with one is `BadBatch`, with the error code that Kafka's broker gives. Nothing here does IO, and
what is unpacked is bounded by the caller, whatever a batch says of itself.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from struct import Struct
from typing import Final, NamedTuple

import cramjam
from crc32c import crc32c

from sluice.model import Buffer
from sluice.protocol.kafka_codes import (
    CORRUPT_MESSAGE,
    INVALID_RECORD,
    UNKNOWN_SERVER_ERROR,
    UNSUPPORTED_COMPRESSION_TYPE,
)

HEAD: Final = Struct(">qiibIhiqqqhii")
HEAD_BYTES: Final = 61
PATCHED_BYTES: Final = 16  # base offset, length and epoch: what the broker writes anew
_PATCHED: Final = Struct(">ii")
_FRONT: Final = Struct(">qiibI")
_REST: Final = Struct(">hiqqqhii")  # from the attributes on
_LENGTH_END: Final = 12
_LENGTH_MIN: Final = 14  # of the oldest format
_MAGIC_AT: Final = 16
_CRC_START: Final = 21
MAGIC: Final = 2

CODEC_MASK: Final = 7
CODEC_NONE, CODEC_GZIP, CODEC_SNAPPY, CODEC_LZ4, CODEC_ZSTD = range(5)
CODECS: Final = ("none", "gzip", "snappy", "lz4", "zstd")
COMPRESSIONS: Final = {  # codecs in the words of a topic's configuration
    "uncompressed": CODEC_NONE,
    "gzip": CODEC_GZIP,
    "snappy": CODEC_SNAPPY,
    "lz4": CODEC_LZ4,
    "zstd": CODEC_ZSTD,
}
APPEND_TIME: Final = 0x08
TRANSACTIONAL: Final = 0x10
CONTROL: Final = 0x20
HORIZON: Final = 0x40  # the base timestamp says until when records without a value stay

NO_TIME: Final = -1
NO_PRODUCER: Final = -1
_XERIAL: Final = b"\x82SNAPPY\x00"
_XERIAL_HEAD_BYTES: Final = 16
_I32: Final = Struct(">i")
_GZIP: Final = 31  # window bits: with gzip's own head
_FIRST_OUT_BYTES: Final = 64 * 1024
# Magic, flags, size of a block and their checksum: Kafka's own reader wants blocks that need no
# others, which the library's frames do not have.
_LZ4_HEAD: Final = b"\x04\x22\x4d\x18\x60\x40\x82"
_LZ4_LENGTH: Final = Struct("<I")
_LZ4_BLOCK_BYTES: Final = 65_536
_LZ4_PLAIN: Final = 1 << 31  # of a block's length: it is not compressed
_new_tuple = tuple.__new__  # half the time of a named tuple's own

Header = tuple[str, bytes | None]
Fields = tuple[int, int, int, int, int, int, int, int, int, int, int, int, int]  # of a `BatchHead`


class BadBatch(ValueError):
    """A batch that Kafka's broker refuses, and the error code that it answers with. `wrong`: the
    records that it is refused for, by their places in it, where it is for some of them.
    """

    def __init__(self, code: int, reason: str, wrong: Sequence[int] = ()) -> None:
        super().__init__(reason)
        self.code = code
        self.wrong = wrong


class BatchHead(NamedTuple):
    """The head of a batch."""

    base_offset: int
    length: int
    leader_epoch: int
    magic: int
    crc: int
    attributes: int
    last_delta: int
    base_ms: int
    max_ms: int
    producer_id: int
    producer_epoch: int
    base_sequence: int
    record_count: int

    @property
    def codec(self) -> int:
        return self.attributes & CODEC_MASK

    @property
    def is_control(self) -> bool:
        return self.attributes & CONTROL != 0

    @property
    def is_transactional(self) -> bool:
        return self.attributes & TRANSACTIONAL != 0

    @property
    def last_sequence(self) -> int:
        """The sequence number of the last record; after the highest comes 0."""
        return (self.base_sequence + self.last_delta) & 0x7FFFFFFF


class Record(NamedTuple):
    """One record, its offset and time counted from those of its batch."""

    offset_delta: int
    time_delta: int
    key: bytes | None
    value: bytes | None
    headers: tuple[Header, ...] = ()


# ----------------------------------------------------------------------------------------- checking


def read_sent(data: Buffer) -> BatchHead:
    """The head of the one batch that a producer sent; raises `BadBatch` for what is none."""
    if len(one_sent(data)) != len(data):
        raise BadBatch(INVALID_RECORD, "exactly one whole record batch is expected")
    return BatchHead._make(HEAD.unpack_from(data))


def one_sent(data: Buffer) -> memoryview:
    """The one batch that a producer sent, without what follows it and cannot be another; raises
    `BadBatch` where there is none, or more than one.
    """
    view = memoryview(data)
    size = _batch_bytes(view)
    if not size:
        raise BadBatch(INVALID_RECORD, "exactly one whole record batch is expected")
    if view[_MAGIC_AT] != MAGIC:
        raise BadBatch(INVALID_RECORD, f"record batches of magic {view[_MAGIC_AT]} are not taken")
    if _batch_bytes(view[size:]):
        raise BadBatch(INVALID_RECORD, "exactly one record batch is expected")
    if size < HEAD_BYTES:
        raise BadBatch(CORRUPT_MESSAGE, f"a batch of {size} bytes is too short")
    return view[:size]


def _batch_bytes(data: memoryview) -> int:
    """How many bytes the batch has that these begin with; 0: they are no whole one."""
    if len(data) < _LENGTH_END:
        return 0
    (length,) = _I32.unpack_from(data, 8)
    if length < _LENGTH_MIN:
        raise BadBatch(CORRUPT_MESSAGE, f"a batch of {length} bytes is too short")
    if len(data) <= _MAGIC_AT:
        return 0
    if data[_MAGIC_AT] > MAGIC:
        raise BadBatch(CORRUPT_MESSAGE, f"there is no magic {data[_MAGIC_AT]}")
    size = int(length) + _LENGTH_END
    return size if size <= len(data) else 0


def read_new(data: memoryview) -> BatchHead:
    """The head of a batch that a producer sent and that is in order; raises `BadBatch`.

    The usual one is known at a glance. Of any other, the long way finds out what is wrong with it.
    """
    fields = usual_head(data)
    if fields is not None:
        return _new_tuple(BatchHead, fields)
    head = read_sent(data)
    check_sent(head, data)
    return head


def usual_head(data: memoryview) -> Fields | None:
    """The fields of a `BatchHead`, where the batch is in order; None where it is to be asked why
    it is not. A plain tuple, because there is one per batch.
    """
    size = len(data)
    if size < HEAD_BYTES:
        return None
    fields = HEAD.unpack_from(data)
    base, length, _, magic, crc, attributes, last_delta, _, _, producer, epoch, first, count = (
        fields
    )
    if (
        length == size - _LENGTH_END
        and magic == MAGIC
        and base == 0
        and last_delta + 1 == count > 0
        and not attributes & CONTROL
        and attributes & CODEC_MASK <= CODEC_ZSTD
        and (producer < 0 or (first >= 0 and epoch >= 0))
        and crc32c(data[_CRC_START:]) == crc
    ):
        return fields
    return None


def read_head(data: Buffer) -> BatchHead | None:
    """The head of a batch that is stored; None where these bytes are none.

    It may have fewer records than offsets, none even: what was taken out is elsewhere, or gone.
    """
    if len(data) < HEAD_BYTES:
        return None
    head = BatchHead._make(HEAD.unpack_from(data))
    return head if head.magic == MAGIC and head.record_count >= 0 else None


def check_sent(head: BatchHead, data: Buffer) -> None:
    """Refuse what no broker stores: a wrong checksum, counts that contradict each other."""
    view = data if isinstance(data, memoryview) else memoryview(data)
    if crc32c(view[_CRC_START:]) != head.crc:
        raise BadBatch(CORRUPT_MESSAGE, "the batch's checksum does not match")
    if head.base_offset != 0:
        raise BadBatch(INVALID_RECORD, f"the base offset of a new batch is {head.base_offset}")
    if head.record_count <= 0 or head.last_delta + 1 != head.record_count:
        raise BadBatch(
            INVALID_RECORD,
            f"a batch of {head.record_count} records whose last offset is {head.last_delta}",
        )
    if head.attributes & CONTROL:
        raise BadBatch(INVALID_RECORD, "clients write no control records")
    if head.attributes & CODEC_MASK > CODEC_ZSTD:
        raise BadBatch(UNSUPPORTED_COMPRESSION_TYPE, "an unknown codec")
    if head.producer_id >= 0 and (head.base_sequence < 0 or head.producer_epoch < 0):
        raise BadBatch(INVALID_RECORD, "a producer's id without a sequence number")


def patched(length: int, leader_epoch: int) -> bytes:
    """What follows the offset at the beginning of a stored batch."""
    return _PATCHED.pack(length, leader_epoch)


def with_append_time(head: BatchHead, data: Buffer, now_ms: int) -> tuple[BatchHead, bytes]:
    """A batch of a topic whose records have the time of their append, with its new checksum."""
    changed = head._replace(attributes=head.attributes | APPEND_TIME, max_ms=now_ms)
    return _with_head(changed, data)


def with_create_time(head: BatchHead, data: Buffer) -> tuple[BatchHead, bytes]:
    """A batch whose producer says that its times are those of the append, as one of which nobody
    says so, with its new checksum.
    """
    return _with_head(head._replace(attributes=head.attributes & ~APPEND_TIME), data)


def with_codec(
    head: BatchHead, data: Buffer, codec: int, bytes_max: int
) -> tuple[BatchHead, bytes]:
    """A batch of a topic whose records are compressed in one way, whatever their producers do, with
    its new length and checksum.
    """
    inside = unpack(head.codec, memoryview(data)[HEAD_BYTES:], bytes_max)
    codec, packed = pack(codec, inside)
    batch = wrap(
        *(head.base_offset, head.base_ms, head.max_ms, packed),
        last_delta=head.last_delta,
        count=head.record_count,
        attributes=head.attributes & ~CODEC_MASK | codec,
        producer=(head.producer_id, head.producer_epoch, head.base_sequence),
    )
    return read_sent(batch), batch


def _with_head(changed: BatchHead, data: Buffer) -> tuple[BatchHead, bytes]:
    body = _REST.pack(*changed[5:]) + bytes(memoryview(data)[HEAD_BYTES:])
    changed = changed._replace(crc=crc32c(body))
    return changed, _FRONT.pack(*changed[:5]) + body


# ------------------------------------------------------------------------------------------ reading


def unpack(codec: int, data: Buffer, bytes_max: int) -> bytes | memoryview:
    """The records of a compressed batch; raises `BadBatch` where they take more than allowed.

    For what cannot be unpacked Kafka has no word of its own; a client must not send it again.
    """
    try:
        if codec == CODEC_NONE:
            return data if isinstance(data, (bytes, memoryview)) else bytes(data)
        if codec == CODEC_GZIP:
            return _gunzip(data, bytes_max)
        if codec == CODEC_SNAPPY:
            return _unsnap(data, bytes_max)
        if codec in (CODEC_LZ4, CODEC_ZSTD):
            return _inflate(codec, data, bytes_max)
    except (cramjam.DecompressionError, zlib.error, ValueError) as error:
        if isinstance(error, BadBatch):
            raise
        raise BadBatch(UNKNOWN_SERVER_ERROR, f"{CODECS[codec]}: {error}") from error
    raise BadBatch(UNSUPPORTED_COMPRESSION_TYPE, f"unknown codec {codec}")


def _too_long(bytes_max: int) -> BadBatch:
    return BadBatch(INVALID_RECORD, f"the records take more than {bytes_max} bytes unpacked")


def _gunzip(data: Buffer, bytes_max: int) -> bytes:
    stream = zlib.decompressobj(wbits=_GZIP)
    result = stream.decompress(data, bytes_max + 1)
    if len(result) > bytes_max:
        raise _too_long(bytes_max)
    if not stream.eof:
        raise BadBatch(UNKNOWN_SERVER_ERROR, "gzip: the end is missing")
    return bytes(result)


def _unsnap(data: Buffer, bytes_max: int) -> bytes:
    """One block, or several after the head that Java's library writes."""
    view = memoryview(data)
    if bytes(view[: len(_XERIAL)]) != _XERIAL:
        return _unsnap_block(view, bytes_max)
    parts: list[bytes] = []
    at, room = _XERIAL_HEAD_BYTES, bytes_max
    while at < len(view):
        if at + 4 > len(view):
            raise BadBatch(UNKNOWN_SERVER_ERROR, "snappy: half a block")
        (size,) = _I32.unpack_from(view, at)
        at += 4
        if size < 0 or at + size > len(view):
            raise BadBatch(UNKNOWN_SERVER_ERROR, f"snappy: a block of {size} bytes")
        parts.append(_unsnap_block(view[at : at + size], room))
        room -= len(parts[-1])
        at += size
    return b"".join(parts)


def _unsnap_block(block: memoryview, bytes_max: int) -> bytes:
    size = cramjam.snappy.decompress_raw_len(block)
    if size > bytes_max:
        raise _too_long(bytes_max)
    out = bytearray(size)
    return bytes(out[: cramjam.snappy.decompress_raw_into(block, out)])


def _inflate(codec: int, data: Buffer, bytes_max: int) -> bytes:
    """Unpack into a buffer that grows only as far as it has to: a bomb gets no more than it."""
    library = cramjam.lz4 if codec == CODEC_LZ4 else cramjam.zstd
    room = min(bytes_max, max(_FIRST_OUT_BYTES, len(data) * 4))
    while True:
        out = bytearray(room)
        try:
            return bytes(memoryview(out)[: library.decompress_into(data, out)])
        except cramjam.DecompressionError as error:
            if "whole buffer" not in str(error):
                raise
        if room >= bytes_max:
            raise _too_long(bytes_max)
        room = min(bytes_max, room * 4)


def read_records(head: BatchHead, data: Buffer, bytes_max: int) -> list[Record]:
    """All records of a batch (whose head was read from `data`); raises `BadBatch`."""
    inside = unpack(head.codec, memoryview(data)[HEAD_BYTES:], bytes_max)
    return list(_records(bytes(inside), head.record_count))


def _records(data: bytes, count: int) -> Iterator[Record]:
    if count * 7 > len(data):
        raise BadBatch(INVALID_RECORD, f"{count} records in {len(data)} bytes")
    at = 0
    try:
        for _ in range(count):
            length, at = read_varint(data, at)
            end = at + length
            if not at < end <= len(data):
                raise BadBatch(INVALID_RECORD, f"a record of {length} bytes")
            time_delta, at = read_varint(data, at + 1)
            offset_delta, at = read_varint(data, at)
            key, at = _bytes(data, at, end)
            value, at = _bytes(data, at, end)
            header_count, at = read_varint(data, at)
            if not 0 <= header_count <= end - at:
                raise BadBatch(INVALID_RECORD, f"{header_count} headers in {end - at} bytes")
            headers: list[Header] = []
            for _ in range(header_count):
                name, at = _bytes(data, at, end)
                if name is None:
                    raise BadBatch(INVALID_RECORD, "a header without a name")
                header_value, at = _bytes(data, at, end)
                headers.append((name.decode("utf-8", "replace"), header_value))
            if at != end:
                raise BadBatch(INVALID_RECORD, "a record does not end where it says")
            yield Record(offset_delta, time_delta, key, value, tuple(headers))
    except IndexError:
        raise BadBatch(INVALID_RECORD, "the records are longer than their batch") from None
    if at != len(data):
        raise BadBatch(INVALID_RECORD, f"{len(data) - at} bytes after the last record")


def _bytes(data: bytes, at: int, end: int) -> tuple[bytes | None, int]:
    size, at = read_varint(data, at)
    if size < 0:
        return None, at
    if at + size > end:
        raise BadBatch(INVALID_RECORD, f"a field of {size} bytes")
    return data[at : at + size], at + size


def read_varint(data: Buffer, at: int) -> tuple[int, int]:
    """A zigzag varint of at most 64 bits, and the place behind it."""
    value, at = varint_from(data, at)
    return value >> 1 ^ -(value & 1), at


def varint_from(data: Buffer, at: int) -> tuple[int, int]:
    """A varint as it is, the sign in its lowest bit, and the place behind it."""
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
        if shift > 63:
            raise BadBatch(INVALID_RECORD, "a varint of more than ten bytes")


# ------------------------------------------------------------------------------------------ writing


def put_varint(out: bytearray, value: int) -> None:
    """A zigzag varint."""
    value = value << 1 ^ value >> 63
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)


def put_record(out: bytearray, record: Record) -> None:
    """One record with its length in front of it."""
    body = bytearray(1)  # its attributes, of which there are none
    put_varint(body, record.time_delta)
    put_varint(body, record.offset_delta)
    _put_bytes(body, record.key)
    _put_bytes(body, record.value)
    put_varint(body, len(record.headers))
    for name, value in record.headers:
        _put_bytes(body, name.encode())
        _put_bytes(body, value)
    put_varint(out, len(body))
    out += body


def _put_bytes(out: bytearray, value: bytes | None) -> None:
    if value is None:
        out.append(1)
    else:
        put_varint(out, len(value))
        out += value


def pack(codec: int, data: Buffer) -> tuple[int, bytes]:
    """Records, compressed as a codec says; and that codec, or none for one that is not known."""
    if codec == CODEC_GZIP:
        return codec, bytes(cramjam.gzip.compress(data))
    if codec == CODEC_SNAPPY:
        return codec, bytes(cramjam.snappy.compress_raw(data))
    if codec == CODEC_ZSTD:
        return codec, bytes(cramjam.zstd.compress(data))
    if codec == CODEC_LZ4:
        return codec, _lz4_frame(memoryview(data))
    return CODEC_NONE, bytes(data)


def _lz4_frame(data: memoryview) -> bytes:
    out = bytearray(_LZ4_HEAD)
    for at in range(0, len(data), _LZ4_BLOCK_BYTES):
        plain = data[at : at + _LZ4_BLOCK_BYTES]
        block = cramjam.lz4.compress_block(plain, store_size=False)
        if len(block) < len(plain):
            out += _LZ4_LENGTH.pack(len(block))
            out += memoryview(block)
        else:
            out += _LZ4_LENGTH.pack(len(plain) | _LZ4_PLAIN)
            out += plain
    return bytes(out + _LZ4_LENGTH.pack(0))


def build(
    base_offset: int,
    base_ms: int,
    max_ms: int,
    records: Sequence[Record],
    *,
    attributes: int = 0,
    producer: tuple[int, int, int] = (NO_PRODUCER, -1, -1),
    leader_epoch: int = 0,
) -> bytes:
    """A batch, not compressed. `producer`: id, epoch and first sequence number."""
    inside = bytearray()
    for record in records:
        put_record(inside, record)
    return wrap(
        base_offset,
        base_ms,
        max_ms,
        bytes(inside),
        last_delta=records[-1].offset_delta,
        count=len(records),
        attributes=attributes,
        producer=producer,
        leader_epoch=leader_epoch,
    )


def wrap(
    base_offset: int,
    base_ms: int,
    max_ms: int,
    inside: bytes,
    *,
    last_delta: int,
    count: int,
    attributes: int = 0,
    producer: tuple[int, int, int] = (NO_PRODUCER, -1, -1),
    leader_epoch: int = 0,
) -> bytes:
    """A batch of records that are encoded, and compressed as the attributes say, already."""
    rest = _REST.pack(attributes, last_delta, base_ms, max_ms, *producer, count)
    body = rest + inside
    length = HEAD_BYTES - _LENGTH_END + len(inside)
    return _FRONT.pack(base_offset, length, leader_epoch, MAGIC, crc32c(body)) + body
