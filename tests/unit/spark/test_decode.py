"""Stored entries become columns: every kind of entry, and none that is damaged."""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.errors import ProtocolError
from sluice.model import Message, message_id
from sluice.protocol import records
from sluice.spark.decode import Decoder, Place
from sluice.spark.property_columns import property_column

PLACE = Place("orders", "broker-a", 3, 7)
V4 = bytes([127, 0, 0, 1, 0, 0, 0x2A, 0x9F])
V6 = bytes(15) + b"\x01\x00\x00\x2a\x9f"
HEADERS = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))
STAMP = pa.timestamp("us", "UTC")
SCHEMA = pa.schema(
    [
        *(("key", pa.binary()), ("value", pa.binary()), ("topic", pa.string())),
        *(("partition", pa.int32()), ("offset", pa.int64()), ("timestamp", STAMP)),
        *(("timestampType", pa.int32()), ("headers", HEADERS), ("tag", pa.string())),
        *(("keys", pa.list_(pa.string())), ("bornTimestamp", STAMP), ("messageId", pa.string())),
        ("broker", pa.string()),
    ]
)


def stored(
    messages: list[Message], *, host: bytes = V4, with_crc: bool = True, topic: str = "orders"
) -> tuple[bytes, Any]:
    """Entries one after the other, and their sizes."""
    encoder = records.Encoder(
        host, with_crc=with_crc, body_bytes_max=1 << 20, entry_bytes_max=1 << 20
    )
    entries, position = [], 1000
    for offset, message in enumerate(messages, 50):
        size = encoder.measure(message, topic.encode())
        entry = encoder.encode(message, topic.encode(), size, offset, position, 9_000 + offset)
        entries.append(entry)
        position += size
    return b"".join(entries), np.array([len(entry) for entry in entries], np.int64)


def message(body: bytes, properties: bytes = b"", **more: Any) -> Message:
    return Message("orders", 3, body, properties, born_ms=8_000, **more)


def rows(data: bytes, sizes: Any, tags: str = "", keys: tuple[str, ...] = ()) -> Any:
    (batch,) = Decoder(SCHEMA, PLACE, tags, keys).batches(data, sizes, 0, 1 << 60)
    batch.validate(full=True)
    assert batch.schema.equals(SCHEMA)
    return batch.to_pylist()


SAMPLES = [
    message(b"one", b"KEYS\x01k1 k2\x02TAGS\x01A\x02price\x015\x02"),
    message(b"", b""),
    message(b"\x02\x01body", b"UNIQ_KEY\x01U1\x02WAIT\x01true\x02a\x01b=c\x02"),
    message(b"x" * 1000, "TAGS\x01B\x02name\x01größe\x02".encode(), born_host=V6),
    message(b"twice", b"KEYS\x01old\x02x\x01y\x02KEYS\x01new\x02"),
]


@pytest.mark.parametrize("with_crc", [True, False])
@pytest.mark.parametrize("host", [V4, V6])
def test_all_columns_of_all_kinds_of_entries(with_crc: bool, host: bytes) -> None:
    data, sizes = stored(SAMPLES, with_crc=with_crc, host=host)
    found = rows(data, sizes)
    assert [row["value"] for row in found] == [m.body for m in SAMPLES]
    assert [row["key"] for row in found] == [b"k1 k2", None, None, None, b"new"]
    assert [row["keys"] for row in found] == [["k1", "k2"], [], [], [], ["new"]]
    assert [row["tag"] for row in found] == ["A", None, None, "B", None]
    assert [row["offset"] for row in found] == [50, 51, 52, 53, 54]
    assert {(r["topic"], r["partition"], r["timestampType"], r["broker"]) for r in found} == {
        ("orders", 7, 1, "broker-a")
    }
    assert [row["timestamp"].timestamp() for row in found] == [9.05, 9.051, 9.052, 9.053, 9.054]
    assert {row["bornTimestamp"].timestamp() for row in found} == {8.0}
    assert found[0]["headers"] == [{"key": "price", "value": b"5"}]
    assert found[1]["headers"] is None, "as Spark's Kafka source has it"
    assert found[2]["headers"] == [{"key": "a", "value": b"b=c"}]
    assert found[3]["headers"] == [{"key": "name", "value": "größe".encode()}]
    assert found[2]["messageId"] == "U1"
    assert found[0]["messageId"] == message_id(host, 1000)


def test_a_topic_with_a_long_name_has_another_head() -> None:
    data, sizes = stored(SAMPLES, topic="t" * 200)
    assert [row["value"] for row in rows(data, sizes)] == [m.body for m in SAMPLES]


def test_filters_that_a_broker_may_have_left_to_us() -> None:
    data, sizes = stored(SAMPLES)
    assert [row["value"] for row in rows(data, sizes, tags="A || C")] == [b"one"]
    assert [row["value"] for row in rows(data, sizes, keys=("k2", "new"))] == [b"one", b"twice"]
    assert rows(data, sizes, tags="A", keys=("new",)) == []


def test_only_what_lies_in_the_range() -> None:
    data, sizes = stored(SAMPLES)
    (batch,) = Decoder(SCHEMA, PLACE, "", ()).batches(data, sizes, 51, 53)
    assert batch.column("offset").to_pylist() == [51, 52]


def test_compressed_bodies_are_unpacked_and_the_others_beside_them_are_kept() -> None:
    packed = zlib.compress(b"large " * 100)
    samples = [
        message(packed, b"TAGS\x01A\x02KEYS\x01k\x02h\x01v\x02", sys_flag=0x301),
        message(b"plain"),
    ]
    data, sizes = stored(samples)
    found = rows(data, sizes)
    assert [row["value"] for row in found] == [b"large " * 100, b"plain"]
    assert (found[0]["tag"], found[0]["key"], found[1]["tag"]) == ("A", b"k", None)
    assert [row["headers"] for row in found] == [[{"key": "h", "value": b"v"}], None]
    assert rows(data, sizes, tags="B") == []


def test_an_empty_answer_is_no_row() -> None:
    assert rows(b"", np.zeros(0, np.int64)) == []


@pytest.mark.parametrize("with_crc", [True, False])
def test_no_damaged_entry_becomes_a_row(with_crc: bool) -> None:
    """Each bit of the entries that a checksum covers: an error, or a value that it does not
    cover.
    """
    data, sizes = stored(SAMPLES[:3], with_crc=with_crc)
    decoder = Decoder(SCHEMA.remove(0).remove(4), PLACE, "", ())
    unnoticed = 0
    for at in range(len(data)):
        bad = bytearray(data)
        bad[at] ^= 0x10
        try:
            (found,) = decoder.batches(bytes(bad), sizes, 0, 1 << 60)
        except ProtocolError:
            continue
        unnoticed += 1
        assert not with_crc, f"byte {at} was changed and nobody noticed"
        values = set(found.column("value").to_pylist())
        assert values <= {sample.body for sample in SAMPLES[:3]}
    assert with_crc or unnoticed, "without that checksum only bodies are covered"


def test_an_error_names_the_place() -> None:
    data, sizes = stored(SAMPLES)
    bad = bytearray(data)
    bad[int(sizes[0]) + 40] ^= 1
    with pytest.raises(ProtocolError, match="topic orders, queue 3 of broker broker-a, offset 51"):
        rows(bytes(bad), sizes)
    for wrong in (sizes[:-1], sizes + 1, np.array([len(data)])):
        with pytest.raises(ProtocolError):
            rows(data, wrong)


@given(
    st.lists(
        st.dictionaries(
            st.sampled_from(["A", "AB", "B", "KEYS", "XKEYS"]),
            st.text(st.characters(exclude_characters="\x01\x02", codec="utf-8"), max_size=4),
            max_size=4,
        ),
        max_size=8,
    )
)
def test_a_property_is_found_as_the_broker_finds_it(tables: list[dict[str, str]]) -> None:
    texts = [
        "".join(f"{k}\x01{v}\x02" for k, v in table.items()).encode()[: -1 if index % 3 else None]
        for index, table in enumerate(tables)
    ]
    column = property_column(pa.array(texts, pa.binary()), b"KEYS")
    assert column.to_pylist() == [records.property_value(t, b"KEYS") or None for t in texts]
