"""This module tests Kafka's record batches: what a broker takes and what it refuses, and records of
both protocols shown as those of the other.
"""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Callable
from contextlib import suppress

import cramjam
import pytest
from crc32c import crc32c
from hypothesis import given, settings
from hypothesis import strategies as st

from sluice.model import Message
from sluice.protocol import kafka_batches, kafka_checks, kafka_codes, kafka_views, records
from sluice.protocol.kafka_batches import BadBatch, BatchHead, Record

UNPACKED_MAX = 1 << 20
PACKERS: dict[int, Callable[[bytes], bytes]] = {
    kafka_batches.CODEC_GZIP: gzip.compress,
    kafka_batches.CODEC_SNAPPY: lambda data: bytes(cramjam.snappy.compress_raw(data)),
    kafka_batches.CODEC_LZ4: lambda data: bytes(cramjam.lz4.compress(data)),
    kafka_batches.CODEC_ZSTD: lambda data: bytes(cramjam.zstd.compress(data)),
}
SOME = [
    Record(0, 0, b"k", b"v", (("h", b"1"), ("none", None))),
    Record(1, 5, None, b"x" * 300),
    Record(2, -7, b"", None),
]


def packed(codec: int, found: list[Record] | None = None) -> bytes:
    inside = bytearray()
    found = SOME if found is None else found
    for record in found:
        kafka_batches.put_record(inside, record)
    data = PACKERS[codec](bytes(inside)) if codec else bytes(inside)
    return kafka_batches.wrap(
        0, 1000, 1005, data, last_delta=len(found) - 1, count=len(found), attributes=codec
    )


def head_of(read: Callable[[bytes], BatchHead], data: bytes) -> BatchHead | int:
    """The head of a batch, or why it has none."""
    try:
        return read(data)
    except BadBatch as bad:
        return bad.code


def read_long(data: bytes) -> BatchHead:
    head = kafka_batches.read_sent(data)
    kafka_batches.check_sent(head, data)
    return head


def check(data: bytes) -> None:
    """Both ways of reading a head come to the same."""
    short = head_of(lambda data: kafka_batches.read_new(memoryview(data)), data)
    assert short == head_of(read_long, data)
    kafka_checks.check_records(read_long(data), data, UNPACKED_MAX)


def refusal(data: bytes) -> int:
    with pytest.raises(BadBatch) as caught:
        check(data)
    return caught.value.code


def changed(at: int, new: bytes, *, data: bytes | None = None) -> bytes:
    """A batch with other bytes in it, and the checksum that fits them."""
    data = packed(0) if data is None else data
    data = data[:at] + new + data[at + len(new) :]
    crc = crc32c(data[21:])
    return data[:17] + crc.to_bytes(4, "big") + data[21:]


@pytest.mark.parametrize("codec", range(5))
def test_records_come_back_from_every_codec(codec: int) -> None:
    data = packed(codec)
    head = kafka_batches.read_sent(data)
    kafka_batches.check_sent(head, data)
    kafka_checks.check_records(head, data, UNPACKED_MAX)
    assert kafka_batches.read_records(head, data, UNPACKED_MAX) == SOME
    assert (head.codec, head.record_count, head.max_ms) == (codec, 3, 1005)


def test_snappy_with_the_head_that_java_writes() -> None:
    inside = bytearray()
    for record in SOME:
        kafka_batches.put_record(inside, record)
    half = len(inside) // 2
    blocks = b"".join(
        len(block).to_bytes(4, "big") + block
        for block in (bytes(cramjam.snappy.compress_raw(p)) for p in (inside[:half], inside[half:]))
    )
    framed = b"\x82SNAPPY\x00" + b"\0\0\0\x01" * 2 + blocks
    assert kafka_batches.unpack(kafka_batches.CODEC_SNAPPY, framed, UNPACKED_MAX) == bytes(inside)


def test_what_the_broker_refuses_has_its_error_code() -> None:
    good = packed(0)
    corrupt, invalid = kafka_codes.CORRUPT_MESSAGE, kafka_codes.INVALID_RECORD
    assert refusal(b"") == invalid
    assert refusal(good + good) == invalid, "two batches"
    assert refusal(good[:-1]) == invalid, "a part of one"
    assert refusal(good[:16] + b"\x01" + good[17:]) == invalid, "an old message format"
    assert refusal(good[:8] + b"\0\0\0\x10" + good[12:]) == corrupt, "too short to be one"
    assert refusal(good[:40] + bytes((good[40] ^ 1,)) + good[41:]) == corrupt, "a flipped bit"
    assert refusal(b"\0\0\0\0\0\0\0\x01" + good[8:]) == invalid, "a base offset of its own"
    assert refusal(changed(23, b"\0\0\0\x07")) == invalid, "last delta and count differ"
    assert refusal(changed(57, b"\0\0\0\x04")) == invalid, "count and last delta differ"
    assert refusal(changed(57, b"\0\0\0\0")) == invalid, "no records"
    assert refusal(changed(21, b"\0\x20")) == invalid, "a control batch"
    assert refusal(changed(21, b"\0\x07")) == kafka_codes.UNSUPPORTED_COMPRESSION_TYPE
    assert refusal(changed(43, bytes(8))) == invalid, "a producer without sequence numbers"
    assert refusal(changed(21, b"\0\x03")) == kafka_codes.UNKNOWN_SERVER_ERROR, "no LZ4 inside"


@pytest.mark.parametrize(
    ("length", "rest", "code"),
    [
        (-11, b"", kafka_codes.CORRUPT_MESSAGE),
        (1, b"", kafka_codes.INVALID_RECORD),
        (1 << 30, b"", kafka_codes.INVALID_RECORD),
        (0, bytes(12), kafka_codes.CORRUPT_MESSAGE),
        (0, bytes(11) + b"\x0e", 0),
        (0, bytes(11) + b"\x0e" + bytes(14), kafka_codes.INVALID_RECORD),
        (0, bytes(11) + b"\x0e" + bytes(4) + b"\x03", kafka_codes.CORRUPT_MESSAGE),
        (0, bytes(5), 0),
    ],
)
def test_a_length_that_is_not_that_of_the_batch(length: int, rest: bytes, code: int) -> None:
    """Its checksum was computed over what is there; what follows and is no batch is left away."""
    good = packed(0)
    sent = good[:8] + (len(good) - 12 + length).to_bytes(4, "big", signed=True) + good[12:] + rest
    found = head_of(lambda data: read_long(bytes(kafka_batches.one_sent(data))), sent)
    assert found == (code or read_long(good))


@pytest.mark.parametrize("magic", [3, 127, 128, 255])
def test_a_format_that_does_not_exist_is_corrupt(magic: int) -> None:
    good = packed(0)
    assert refusal(good[:16] + bytes((magic,)) + good[17:]) == kafka_codes.CORRUPT_MESSAGE


def test_a_count_that_is_not_that_of_the_records_is_refused() -> None:
    for count in (2, 4):
        lie = changed(57, count.to_bytes(4, "big"))
        lie = changed(23, (count - 1).to_bytes(4, "big"), data=lie)
        assert refusal(lie) == kafka_codes.INVALID_RECORD


def alike(count: int, size: int) -> bytearray:
    """A batch of records that are equally long, but that later ones have longer numbers."""
    found = [Record(at, 0, None, b"v" * size) for at in range(count)]
    return bytearray(packed(0, found))


def starts(data: bytearray) -> list[int]:
    """Where each record of a batch that is not compressed begins."""
    found, at = [], kafka_batches.HEAD_BYTES
    while at < len(data):
        found.append(at)
        length, at = kafka_batches.read_varint(bytes(data), at)
        at += length
    return found


def is_counted(data: bytes, count: int) -> bool:
    """Whether so many records end where their batch ends, read one after the other."""
    at = kafka_batches.HEAD_BYTES
    for _ in range(count):
        if at >= len(data):
            return False
        length, at = kafka_batches.read_varint(data, at)
        if length < 0:
            return False
        at += length
    return at == len(data)


def passes(data: bytes, count: int) -> bool:
    head = kafka_batches.read_sent(data)._replace(record_count=count)
    try:
        kafka_checks.check_records(head, data, UNPACKED_MAX)
    except BadBatch:
        return False
    return True


@pytest.mark.parametrize("size", [0, 20, 100, 5_000, 9_000])
@pytest.mark.parametrize("count", [1, 3, 4, 15, 64, 65, 200])
def test_records_of_one_length_are_counted_as_others_are(count: int, size: int) -> None:
    data = alike(count, size)
    check(bytes(data))
    assert is_counted(bytes(data), count)
    assert not passes(bytes(data), count + 1)
    assert count == 1 or not passes(bytes(data), count - 1)
    places = starts(data)
    for place in {places[0], places[count // 2], places[-1]}:
        for at in (place, place + 1):  # most lengths take two bytes
            for change in (2, 254, 1):  # longer and shorter by one, and a negative length
                lie = data[:]
                lie[at] = (lie[at] + change) % 256
                assert passes(bytes(lie), count) == is_counted(bytes(lie), count)
    lie = data[:]
    lie[places[-1]] ^= 2
    assert not passes(bytes(lie), count)


@given(st.lists(st.integers(0, 3), min_size=1, max_size=150), st.integers(60, 70))
@settings(max_examples=100)
def test_records_that_are_nearly_alike_are_counted(more: list[int], size: int) -> None:
    found = [Record(at, 0, None, b"v" * (size + each // 3)) for at, each in enumerate(more)]
    check(packed(0, found))


@pytest.mark.parametrize("codec", sorted(PACKERS))
def test_a_bomb_is_not_unpacked(codec: int) -> None:
    bomb = PACKERS[codec](bytes(8 << 20))
    data = kafka_batches.wrap(0, 0, 0, bomb, last_delta=0, count=1, attributes=codec)
    assert refusal(data) == kafka_codes.INVALID_RECORD


def test_append_time_is_written_with_a_new_checksum() -> None:
    data = packed(kafka_batches.CODEC_ZSTD)
    head, stamped = kafka_batches.with_append_time(kafka_batches.read_sent(data), data, 77_000)
    kafka_batches.check_sent(head, stamped)
    assert kafka_batches.read_sent(stamped) == head
    assert (head.max_ms, head.attributes) == (77_000, kafka_batches.APPEND_TIME | 4)


def test_sequence_numbers_go_on_at_zero() -> None:
    head = BatchHead(0, 0, 0, 2, 0, 0, 4, 0, 0, 1, 0, 0x7FFFFFFD, 5)
    assert head.last_sequence == 1


@given(st.integers(-(1 << 63), (1 << 63) - 1))
def test_varints_come_back(value: int) -> None:
    out = bytearray()
    kafka_batches.put_varint(out, value)
    assert kafka_batches.read_varint(out, 0) == (value, len(out))


byte_texts = st.none() | st.binary(max_size=30)
some_records = st.builds(
    Record,
    st.just(0),
    st.integers(-1000, 1000),
    byte_texts | st.text("ab \x01\x02ü", max_size=5).map(str.encode),
    byte_texts,
    st.lists(
        st.tuples(
            st.text("abKEYSTAGS_.rmqtagsid\x01", max_size=8)
            | st.sampled_from(["rmq.tags", "rmq.msgid", "TAGS", "KEYS", "DELAY", "h", "__x"]),
            byte_texts | st.text("ab\x01ü", max_size=5).map(str.encode),
        ),
        max_size=4,
    ).map(tuple),
)


@given(st.lists(some_records, min_size=1, max_size=5), st.sampled_from(range(5)))
@settings(max_examples=200)
def test_any_records_come_back_from_a_batch(found: list[Record], codec: int) -> None:
    found = [record._replace(offset_delta=at) for at, record in enumerate(found)]
    data = packed(codec, found)
    head = kafka_batches.read_sent(data)
    assert kafka_batches.read_records(head, data, UNPACKED_MAX) == found
    kafka_checks.check_records(head, data, UNPACKED_MAX)


@given(st.binary(max_size=300), st.integers(1, 40), st.sampled_from(range(8)))
def test_any_bytes_are_records_or_refused(inside: bytes, count: int, codec: int) -> None:
    data = kafka_batches.wrap(0, 0, 0, inside, last_delta=count - 1, count=count, attributes=codec)
    head = kafka_batches.read_sent(data)
    with suppress(BadBatch):
        kafka_batches.check_sent(head, data)
        kafka_batches.read_records(head, data, UNPACKED_MAX)
    with suppress(BadBatch):
        kafka_batches.check_sent(head, data)
        kafka_checks.check_records(head, data, UNPACKED_MAX)


# --------------------------------------------------------------------------------------- the views


def stored(message: Message, offset: int = 0) -> records.Entry:
    encoder = records.Encoder(
        bytes(8), with_crc=True, body_bytes_max=1 << 20, entry_bytes_max=1 << 21
    )
    topic = message.topic.encode()
    size = encoder.measure(message, topic)
    return records.decode(encoder.encode(message, topic, size, offset, 0, 123_000))


@given(some_records)
@settings(max_examples=300)
def test_a_record_kept_as_a_message_is_shown_as_the_same_record(record: Record) -> None:
    head = BatchHead(0, 0, 0, 2, 0, 0, 0, 5000, 6000, -1, -1, -1, 1)
    message = kafka_views.message_of("t", 1, head, record, bytes(8))
    shown = kafka_views.batch_of([stored(message, 7)], UNPACKED_MAX, append_time=False)
    shown_head = kafka_batches.read_head(shown)
    assert shown_head is not None
    kafka_batches.check_sent(shown_head._replace(base_offset=0), shown)
    (back,) = kafka_batches.read_records(shown_head, shown, UNPACKED_MAX)
    assert (back.key, back.value, back.headers) == (record.key, record.value, record.headers)
    assert shown_head.base_ms == 5000 + record.time_delta
    assert shown_head.base_offset == 7


def test_a_message_of_rocketmq_is_shown_with_its_keys_tags_and_properties() -> None:
    properties = records.format_properties(
        {"KEYS": "a b", "TAGS": "new", "UNIQ_KEY": "ID1", "color": "red", "WAIT": "true"}
    )
    message = Message("t", 0, b"body", properties, born_ms=42_000)
    shown = kafka_views.batch_of([stored(message)], UNPACKED_MAX, append_time=False)
    head = kafka_batches.read_sent(shown)
    (record,) = kafka_batches.read_records(head, shown, UNPACKED_MAX)
    assert (record.key, record.value, head.max_ms) == (b"a b", b"body", 42_000)
    assert dict(record.headers) == {"color": b"red", "rmq.tags": b"new", "rmq.msgid": b"ID1"}


def test_a_compressed_body_is_shown_unpacked() -> None:
    for flags, pack in ((1, None), (0x101, cramjam.lz4.compress), (0x201, cramjam.zstd.compress)):
        body = zlib.compress(b"text") if pack is None else bytes(pack(b"text"))
        entry = stored(Message("t", 0, body, sys_flag=flags))
        assert kafka_views.plain_body(entry, UNPACKED_MAX) == b"text"
    assert kafka_views.plain_body(stored(Message("t", 0, b"no", sys_flag=1)), 10) == b"no"


def test_a_stored_batch_is_shown_as_messages() -> None:
    found = [Record(0, 0, b"key", b"one", (("rmq.tags", b"T"),)), Record(1, 5, None, None)]
    body = kafka_batches.build(30, 1000, 1005, found)
    entry = stored(Message("t", 2, body, born_ms=1005), 30)
    shown = kafka_views.entries_of(entry, "AB", UNPACKED_MAX, properties_max=32_000)
    first, second = [records.decode(data) for _, data in shown]
    assert [offset for offset, _ in shown] == [30, 31]
    assert (first.queue_offset, first.born_ms, bytes(first.body)) == (30, 1000, b"one")
    assert records.message_keys(first.properties)[1:] == (b"key", b"T")
    assert (second.born_ms, bytes(second.body)) == (1005, b"")
    assert b"__KAFKA_NULL\x011" in second.properties
    ids = {records.message_keys(each.properties)[0] for each in (first, second)}
    assert len(ids) == 2, "each message has an id of its own"
