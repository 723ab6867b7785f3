"""Batches of Kafka's producers become rows: every field of every kind of record, every codec, and
nothing that does not add up.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable
from typing import Any

import cramjam
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sluice.errors import ProtocolError
from sluice.model import Message
from sluice.protocol import kafka_batches, kafka_entries, kafka_views, records
from sluice.protocol.kafka_batches import Record
from sluice.spark import kafka_decode
from sluice.spark.decode import Decoder
from tests.unit.spark.test_decode import PLACE, SCHEMA, V4

BASE_MS = 1_700_000_000_000
TOPIC_ID = "00AA"


def snappy(data: bytes) -> bytes:
    """Two blocks in the form of Java's library."""
    blocks = [bytes(cramjam.snappy.compress_raw(part)) for part in (data[:5], data[5:])]
    framed = b"".join(struct.pack(">i", len(block)) + block for block in blocks)
    return b"\x82SNAPPY\x00" + struct.pack(">ii", 1, 1) + framed


def gzip(data: bytes) -> bytes:
    stream = zlib.compressobj(wbits=31)
    return stream.compress(data) + stream.flush()


PACKERS: list[Callable[[bytes], bytes]] = [
    bytes,
    gzip,
    snappy,
    lambda data: bytes(cramjam.lz4.compress(data)),
    lambda data: bytes(cramjam.zstd.compress(data)),
]


def batch(found: list[Record], base: int, codec: int = 0, attributes: int = 0) -> bytes:
    inside = bytearray()
    for record in found:
        kafka_batches.put_record(inside, record)
    last = found[-1].offset_delta
    return kafka_batches.wrap(
        *(base, BASE_MS, BASE_MS + 99, PACKERS[codec](bytes(inside))),
        last_delta=last,
        count=len(found),
        attributes=codec | attributes,
    )


def entry(body: bytes, offset: int, count: int) -> bytes:
    """A batch as it is stored."""
    encoder = records.Encoder(V4, with_crc=True, body_bytes_max=1 << 26, entry_bytes_max=1 << 26)
    message = Message(
        *("orders", 3, body, kafka_entries.properties_of(count, offset, 0)),
        sys_flag=kafka_entries.KAFKA_FLAGS,
        born_ms=1,
    )
    size = encoder.measure(message, b"orders")
    return encoder.encode(message, b"orders", size, offset, 0, 9_000)


def rows(*entries: bytes, tags: str = "", keys: tuple[str, ...] = (), **bounds: int) -> list[Any]:
    data, sizes = b"".join(entries), np.array([len(each) for each in entries], np.int64)
    decoder = Decoder(SCHEMA, PLACE, tags, keys)
    start, stop = bounds.get("start", 0), bounds.get("stop", 1 << 60)
    found = []
    for made in decoder.batches(data, sizes, start, stop, TOPIC_ID):
        made.validate(full=True)
        assert made.schema.equals(SCHEMA)
        found += made.to_pylist()
    return found


fields = st.none() | st.binary(max_size=200)
shapes = st.builds(
    Record,
    st.just(0),
    st.integers(-(2**40), 2**40),
    fields,
    fields,
    st.lists(st.tuples(st.sampled_from(["a", "rmq.tags", "größe", ""]), fields), max_size=3).map(
        tuple
    ),
)


@given(
    st.lists(
        st.tuples(st.lists(shapes, min_size=1, max_size=5), st.integers(0, 4)),
        min_size=1,
        max_size=4,
    )
)
@settings(max_examples=60, deadline=None)
def test_rows_are_the_records(sent: list[tuple[list[Record], int]]) -> None:
    entries, expected, offset = [], [], 70
    for found, codec in sent:
        numbered = [each._replace(offset_delta=at) for at, each in enumerate(found)]
        entries.append(entry(batch(numbered, offset, codec), offset, len(found)))
        expected += [(offset + each.offset_delta, each) for each in numbered]
        offset += len(found)
    found_rows = rows(*entries)
    assert [row["offset"] for row in found_rows] == [at for at, _ in expected]
    for row, (at, record) in zip(found_rows, expected, strict=True):
        assert (row["key"], row["value"]) == (record.key, record.value)
        assert row["headers"] == ([{"key": k, "value": v} for k, v in record.headers] or None)
        assert row["timestampType"] == 0
        assert round(row["timestamp"].timestamp() * 1000) == BASE_MS + record.time_delta
        # What a RocketMQ consumer is shown of the same record.
        _, properties = kafka_views.content_of(record, f"{TOPIC_ID}00000003{at:016X}")
        shown = records.parse_properties(properties)
        assert row["tag"] == shown.get("TAGS")
        assert row["keys"] == ([shown["KEYS"]] if "KEYS" in shown else [])
        assert row["messageId"] == shown["UNIQ_KEY"]


def test_many_batches_are_unpacked_in_portions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kafka_decode, "TOGETHER_BYTES", 100)
    sent = [entry(batch([Record(0, 0, None, b"%d" % at * 40)], at), at, 1) for at in range(20)]
    assert [row["value"] for row in rows(*sent)] == [b"%d" % at * 40 for at in range(20)]


def test_batches_and_messages_in_one_queue() -> None:
    """In their order; of an answer only what lies in the range that was asked for."""
    encoder = records.Encoder(V4, with_crc=True, body_bytes_max=1 << 20, entry_bytes_max=1 << 20)

    def single(body: bytes, offset: int, **more: Any) -> bytes:
        message = Message("orders", 3, body, b"KEYS\x01k\x02", born_ms=8_000, **more)
        size = encoder.measure(message, b"orders")
        return encoder.encode(message, b"orders", size, offset, 0, 9_000)

    three = [Record(at, at, b"k%d" % at, b"v%d" % at) for at in range(3)]
    packed = zlib.compress(b"packed")
    sent = (
        single(b"first", 4),
        entry(batch(three, 5, 4), 5, 3),
        single(packed, 8, sys_flag=records.SYS_COMPRESSED),
        single(b"shown", 9, sys_flag=kafka_entries.SYS_KAFKA),
        entry(batch(three, 10, attributes=kafka_batches.APPEND_TIME), 10, 3),
    )
    found = rows(*sent)
    values = [b"first", b"v0", b"v1", b"v2", b"packed", b"shown", b"v0", b"v1", b"v2"]
    assert [(row["offset"], row["value"]) for row in found] == list(enumerate(values, 4))
    times = [(row["timestampType"], round(row["timestamp"].timestamp() * 1000)) for row in found]
    created = [(0, BASE_MS), (0, BASE_MS + 1), (0, BASE_MS + 2)]
    assert times == [(1, 9_000), *created, (1, 9_000), (0, 8_000), *[(1, BASE_MS + 99)] * 3]
    assert [row["value"] for row in rows(*sent, start=6, stop=8)] == [b"v1", b"v2"]
    assert [row["offset"] for row in rows(*sent, keys=("k1", "x"))] == [6, 11]
    assert rows(*sent, tags="A") == []


def test_what_rocketmqs_messages_tell_of_records() -> None:
    """A record that is a message of its own is a row like that of its batch."""
    record = Record(0, 0, b"\xff\x00", None, (("a", None), ("a", b"1"), ("rmq.tags", b"T")))
    body, properties = kafka_views.content_of(record)
    encoder = records.Encoder(V4, with_crc=True, body_bytes_max=1 << 20, entry_bytes_max=1 << 20)
    message = Message("orders", 3, body, properties, born_ms=8_000)
    size = encoder.measure(message, b"orders")
    (row,) = rows(encoder.encode(message, b"orders", size, 4, 0, 9_000))
    (other,) = rows(entry(batch([record], 4), 4, 1))
    for name in ("key", "value", "headers", "tag", "keys", "offset"):
        assert row[name] == other[name], name
    assert (row["key"], row["value"]) == (b"\xff\x00", None)
    message = Message("orders", 3, *kafka_views.content_of(Record(0, 0, b"k", b"v")), born_ms=8_000)
    size = encoder.measure(message, b"orders")
    (row,) = rows(encoder.encode(message, b"orders", size, 4, 0, 9_000))
    assert (row["key"], row["headers"]) == (b"k", None)


def _body(inside: bytes, count: int = 1, last: int = 0) -> bytes:
    return kafka_batches.wrap(0, BASE_MS, BASE_MS, inside, last_delta=last, count=count)


@pytest.mark.parametrize(
    "body",
    [
        b"too short",
        _body(b"\x00"),  # a record of no bytes
        _body(b"\x01\x00\x00\x00\x01\x01\x00"),  # of a negative length
        _body(b"\x0c\x00\x00\x00\x01\x01\x00", count=2),  # fewer records than there should be
        _body(b"\x0c\x00\x00\x00\x01\x01\x00\x00"),  # bytes behind the last
        _body(b"\x0e\x00\x00\x00\x01\x01\x00"),  # longer than the batch
        _body(b"\x0c\x00\x00\x00\x7e\x01\x00"),  # a key that is longer than the record
        _body(b"\x0c\x00\x00\x00\x01\x7e\x00"),  # a value
        _body(b"\x0c\x00\x00\x00\x01\x01\x7e"),  # headers that are not there
        _body(b"\x0e\x00\x00\x00\x01\x01\x00\x00"),  # no headers, and a byte more
        _body(b"\x10\x00\x00\x00\x01\x01\x02\x01\x01"),  # a header without a name
        _body(b"\x12\x00\x00\x00\x01\x01\x02\x02a\x7e"),  # a header's value beyond the end
        _body(b"\x0c\x00\x00\x0a\x01\x01\x00"),  # an offset beyond the batch's last
        _body(b"\x0c\x00\x00\x00\x01\x01\xff"),  # a varint that does not end
        _body(b"\x20\x00" + b"\xff" * 12 + b"\x01\x01\x00"),  # one that is too long
        kafka_batches.wrap(0, 0, 0, b"no gzip", last_delta=0, count=1, attributes=1),
        batch([Record(0, 0, None, b"x")], 7),  # of another place
    ],
)
def test_what_does_not_add_up_is_an_error(body: bytes) -> None:
    with pytest.raises(ProtocolError, match="offset 0: a batch in it"):
        rows(entry(body, 0, 1))


def test_one_batch_may_take_as_much_as_a_broker_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kafka_decode, "UNPACKED_BYTES_MAX", 1000)
    with pytest.raises(ProtocolError, match="more than 1000 bytes"):
        rows(entry(batch([Record(0, 0, None, bytes(5000))], 0, 4), 0, 1))
