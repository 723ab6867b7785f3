"""Values become columns, and each that does not fit says why: nothing is lost or bent silently."""

from __future__ import annotations

import datetime
import decimal
import io
import json
import uuid
from typing import Any

import fastavro
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sluice.errors import ConfigError
from sluice.tables.avro_rows import AvroRows, schema_of
from sluice.tables.json_rows import JsonRows, infer
from sluice.tables.rows import DEAD, ORIGIN, Rows, ranges

STAMP = pa.timestamp("us", "UTC")
UTC = datetime.UTC


def one(kind: pa.DataType, text: str) -> Any:
    """The value of a field, or the reason."""
    batch, bad = JsonRows(pa.schema([("x", kind)])).parse([text.encode()])
    return bad[0] if bad else batch.column(0)[0].as_py()


@pytest.mark.parametrize(
    ("kind", "text", "found"),
    [
        (pa.int32(), '{"x": 5}', 5),
        (pa.int32(), '{"x": 5.0}', 5),
        (pa.int32(), '{"x": 5.5}', "field x: 5.5 is no INT"),
        (pa.int32(), '{"x": "5"}', 'field x: "5" is no INT'),
        (pa.int32(), '{"x": true}', "field x: true is no INT"),
        (pa.int32(), '{"x": 3000000000}', "field x: 3000000000 is no INT"),
        (pa.int64(), '{"x": 3000000000}', 3000000000),
        (pa.int64(), '{"x": 9223372036854775808}', "field x: 9223372036854775808 is no BIGINT"),
        (pa.int8(), '{"x": 128}', "field x: 128 is no TINYINT"),
        (pa.int32(), '{"x": null}', None),
        (pa.int32(), '{"y": 1}', None),
        (pa.float64(), '{"x": 5}', 5.0),
        (pa.float64(), '{"x": true}', "field x: true is no number"),
        (pa.float64(), '{"x": 1e39}', 1e39),
        (pa.float32(), '{"x": 0.5}', 0.5),
        (pa.float32(), '{"x": 1e39}', "field x: 1e+39 is no FLOAT"),
        (pa.float32(), '{"x": -1e39}', "field x: -1e+39 is no FLOAT"),
        (pa.bool_(), '{"x": true}', True),
        (pa.bool_(), '{"x": 1}', "field x: 1 is no BOOLEAN"),
        (pa.string(), '{"x": "a"}', "a"),
        (pa.string(), '{"x": [1, {"b": 2}]}', '[1,{"b":2}]'),
        (pa.string(), '{"x": 1.5}', "1.5"),
        (pa.string(), '{"x": 123456789012345678901234567890}', "123456789012345678901234567890"),
        (pa.binary(), '{"x": "AQI="}', b"\1\2"),
        (pa.binary(), '{"x": "%"}', 'field x: "%" is no BINARY (as base64)'),
        (pa.date32(), '{"x": "2026-11-16"}', datetime.date(2026, 11, 16)),
        (pa.date32(), '{"x": 5}', "field x: 5 is no DATE, as 2026-11-16"),
        (
            STAMP,
            '{"x": "2026-11-16T10:00:00+02:00"}',
            datetime.datetime(2026, 11, 16, 8, tzinfo=UTC),
        ),
        (STAMP, '{"x": "2026-11-16 10:00:00"}', datetime.datetime(2026, 11, 16, 10, tzinfo=UTC)),
        (STAMP, '{"x": 7}', "field x: 7 is no TIMESTAMP, as 2026-11-16T10:00:00Z"),
        (
            pa.timestamp("us"),
            '{"x": "2026-11-16T10:00:00Z"}',
            'field x: "2026-11-16T10:00:00Z" is no TIMESTAMP_NTZ: it names a zone',
        ),
        (pa.decimal128(5, 2), '{"x": 1.25}', decimal.Decimal("1.25")),
        (pa.decimal128(5, 2), '{"x": "1.5"}', decimal.Decimal("1.50")),
        (pa.decimal128(5, 2), '{"x": 1.255}', "field x: 1.255 is no DECIMAL(5, 2)"),
        (pa.decimal128(5, 2), '{"x": 1000}', "field x: 1000 is no DECIMAL(5, 2)"),
        (pa.decimal128(5, 2), '{"x": NaN}', "is no JSON: NaN is no number of JSON"),
        (pa.decimal128(5, 2), '{"x": "NaN"}', 'field x: "NaN" is no DECIMAL(5, 2)'),
        (pa.decimal128(5, 2), '{"x": "-Infinity"}', 'field x: "-Infinity" is no DECIMAL(5, 2)'),
        (
            pa.decimal128(38, 18),
            '{"x": 12345678901234567890.123456789012345678}',
            decimal.Decimal("12345678901234567890.123456789012345678"),
        ),
        (pa.list_(pa.int32()), '{"x": [1, null]}', [1, None]),
        (pa.list_(pa.int32()), '{"x": "ab"}', 'field x: "ab" is no ARRAY'),
        (pa.list_(pa.int32()), '{"x": [1, "b"]}', 'field x[]: "b" is no INT'),
        (pa.map_(pa.string(), pa.int32()), '{"x": {"a": 1}}', [("a", 1)]),
        (pa.map_(pa.string(), pa.int32()), '{"x": {"a": {}}}', "field x{}: {} is no INT"),
        (pa.struct([("a", pa.int32())]), '{"x": {"b": 1}}', {"a": None}),
        (pa.struct([("a", pa.int32())]), '{"x": [["a", 1]]}', 'field x: [["a",1]] is no STRUCT'),
        (
            pa.struct([pa.field("a", pa.int32(), nullable=False)]),
            '{"x": {}}',
            "field x.a is missing, and is NOT NULL",
        ),
        (pa.int32(), "[1]", "is no JSON object but [1]"),
        (pa.int32(), "null", "is no JSON object but null"),
        (pa.int32(), "", "the message has no value"),
    ],
)
def test_a_value_fits_or_says_why(kind: pa.DataType, text: str, found: Any) -> None:
    assert one(kind, text) == found


@pytest.mark.parametrize("number", ["1e999", "1e99999999", "1" + 400 * "0"])
def test_numbers_without_measure_fit_nothing_and_cost_nothing(number: str) -> None:
    for kind in (pa.int64(), pa.float64(), pa.decimal128(38, 2)):
        schema = pa.schema([("x", kind), ("y", pa.decimal128(5, 2))])
        _, bad = JsonRows(schema).parse([f'{{"x": {number}}}'.encode()])
        assert bad[0].startswith("field x: 1")


@pytest.mark.parametrize("text", ["{", '{"x": 1} {"x": 2}', '{"x": 1}x', "[" * 5000, "\xff"])
def test_what_is_no_json(text: str) -> None:
    for kind in (pa.int32(), pa.decimal128(5, 2)):
        _, bad = JsonRows(pa.schema([("x", kind)])).parse([text.encode("latin-1")])
        assert bad[0].startswith("is no JSON: ")


@pytest.mark.parametrize("half", [r'"\ud800"', r'"\uDC00"', r'{"\ud800": 1}', r'["\ud800"]'])
def test_half_of_a_pair_is_no_text(half: str) -> None:
    schema = pa.schema([("x", pa.string()), ("y", pa.decimal128(5, 2))])
    values: list[bytes | None] = [
        f'{{"x": {half}}}'.encode(),
        rb'{"x": "\ud83d\ude00", "y": 1.5}',
        b'{"x": "\xed\xa0\x80"}',
    ]
    batch, bad = JsonRows(schema).parse(values)
    assert all(reason.startswith("is no JSON: ") for reason in bad.values())
    assert sorted(bad) == [0, 2]
    assert batch.column(0)[1].as_py() == "\U0001f600"


@pytest.mark.parametrize("more", [[], [("y", pa.decimal128(5, 2))]])
def test_a_value_of_too_many_levels_is_one_bad_row(more: list[tuple[str, pa.DataType]]) -> None:
    """More than can be written as text again; with it in the sample, the schema is inferred."""
    deep = b"[" * 980 + b"]" * 980
    values: list[bytes | None] = [b'{"x": "a"}', b'{"x": %b}' % deep, deep, b'{"x": [[[1]]]}']
    batch, bad = JsonRows(pa.schema([("x", pa.string()), *more])).parse(values)
    assert sorted(bad) == [1, 2]
    assert all(reason for reason in bad.values())
    assert [batch.column(0)[number].as_py() for number in (0, 3)] == ["a", "[[[1]]]"]
    assert infer(values).names == ["x"]
    assert infer(values[1:2]).names == ["x"]
    _, bad = JsonRows(pa.schema([("x", pa.int32()), *more])).parse(values[1:2])
    assert list(bad) == [0]


def test_rows_around_a_bad_one_are_read() -> None:
    schema = pa.schema([pa.field("a", pa.string(), nullable=False), ("b", pa.int32())])
    values = [b'{"a": "x", "b": 1}', b'{"b": 2}', None, b'{"a": "y", "b": "z"}', b'{"a": "z"}']
    batch, bad = JsonRows(schema).parse(values)
    assert batch.num_rows == 5
    assert [batch.to_pylist()[n] for n in (0, 4)] == [{"a": "x", "b": 1}, {"a": "z", "b": None}]
    assert bad == {
        1: "field a is missing, and is NOT NULL",
        2: "the message has no value",
        3: 'field b: "z" is no INT',
    }


def test_types_that_json_has_not() -> None:
    with pytest.raises(ConfigError, match=r"option schema: field x: .* cannot be read from JSON"):
        JsonRows(pa.schema([("x", pa.duration("us"))]))
    with pytest.raises(ConfigError, match="keys of a MAP"):
        JsonRows(pa.schema([("x", pa.map_(pa.int32(), pa.int32()))]))


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=8,
)
SCHEMA = pa.schema(
    [
        *(("a", pa.int32()), ("b", pa.float64()), ("c", pa.string()), ("d", pa.list_(pa.int64()))),
        *(("e", pa.struct([("f", pa.bool_())])), ("g", pa.decimal128(10, 3)), ("h", STAMP)),
    ]
)


@settings(max_examples=40)
@given(st.lists(st.dictionaries(st.sampled_from("abcdefgh"), json_values), max_size=6))
def test_a_row_is_the_same_among_others_as_alone(documents: list[dict[str, Any]]) -> None:
    rows = JsonRows(SCHEMA)
    values: list[bytes | None] = [json.dumps(document).encode() for document in documents]
    batch, bad = rows.parse(values)
    batch.validate(full=True)
    for number, value in enumerate(values):
        alone, reason = rows.parse([value])
        assert bad.get(number) == reason.get(0)
        if not reason:
            assert batch.slice(number, 1).to_pylist() == alone.to_pylist()


@settings(max_examples=40)
@given(
    st.lists(st.dictionaries(st.text(min_size=1, max_size=3), json_values, min_size=1), min_size=1)
)
def test_what_was_inferred_fits_what_it_was_inferred_from(documents: list[dict[str, Any]]) -> None:
    values: list[bytes | None] = [json.dumps(document).encode() for document in documents]
    try:
        schema = infer(values)
    except ConfigError:
        return
    good = [value for value in values if value and _is_strict(value)]
    _, bad = JsonRows(schema).parse(list(good))
    assert bad == {}


def _is_strict(value: bytes) -> bool:
    """Whether JSON's strict parser takes it: lone surrogates are none."""
    try:
        infer([value])
    except ConfigError:
        return False
    return True


def test_inference() -> None:
    values: list[bytes | None] = [
        b'{"host": "mia", "coins": 5, "ratio": 1, "tags": [], "at": {"x": 1}}',
        b'{"host": 7, "coins": 6, "ratio": 1.5, "tags": ["a"], "at": {"y": null}}',
        b"garbage",
        None,
    ]
    assert infer(values) == pa.schema(
        [
            *(("host", pa.string()), ("coins", pa.int64()), ("ratio", pa.float64())),
            ("tags", pa.list_(pa.string())),
            ("at", pa.struct([("x", pa.int64()), ("y", pa.string())])),
        ]
    )
    with pytest.raises(ConfigError, match="none of the first 2 values is a JSON object"):
        infer([b"x", b"{}"])


# --------------------------------------------------------------------------------------------- Avro

PRICE = {"type": "bytes", "logicalType": "decimal", "precision": 4, "scale": 2}
AVRO = {
    "type": "record",
    "name": "Gift",
    "namespace": "shop",
    "fields": [
        {"name": "host", "type": "string"},
        {"name": "coins", "type": ["null", "int"]},
        {"name": "at", "type": {"type": "long", "logicalType": "timestamp-millis"}},
        {"name": "price", "type": PRICE},
        {"name": "id", "type": {"type": "string", "logicalType": "uuid"}},
        {"name": "kind", "type": {"type": "enum", "name": "Kind", "symbols": ["A", "B"]}},
        {"name": "again", "type": "shop.Kind"},
        {"name": "items", "type": {"type": "array", "items": ["null", "long"]}},
        {"name": "more", "type": {"type": "map", "values": "double"}},
    ],
}  # fmt: skip
ID = uuid.uuid4()
GIFT = {
    "host": "mia",
    "coins": None,
    "at": datetime.datetime(2026, 11, 16, 10, tzinfo=UTC),
    "price": decimal.Decimal("1.25"),
    "id": ID,
    "kind": "A",
    "again": "B",
    "items": [1, None],
    "more": {"x": 0.5},
}


def avro(row: dict[str, Any], schema: Any = AVRO) -> bytes:
    stream = io.BytesIO()
    fastavro.schemaless_writer(stream, fastavro.parse_schema(schema), row)
    return stream.getvalue()


def test_avro_records_are_rows() -> None:
    rows = AvroRows(json.dumps(AVRO))
    assert not rows.schema.field("host").nullable
    assert rows.schema.field("coins").nullable
    batch, bad = rows.parse([avro(GIFT), avro({**GIFT, "coins": 5})])
    assert bad == {}
    first, second = batch.to_pylist()
    assert first == {**GIFT, "id": str(ID), "more": [("x", 0.5)]}
    assert second["coins"] == 5


def test_avro_that_does_not_fit_says_why() -> None:
    good = avro(GIFT)
    values = [good[:-1], good + b"\0\0", b"", None, good, b"\xff" * 9]
    batch, bad = AvroRows(json.dumps(AVRO)).parse(values)
    assert sorted(bad) == [0, 1, 2, 3, 5]
    assert bad[0].startswith("is no Avro record of this schema: ")
    assert bad[1] == "is no Avro record of this schema: 2 bytes are left over"
    assert bad[2] == bad[3] == "the message has no value"
    assert batch.slice(4, 1).to_pylist()[0]["host"] == "mia"


def test_a_decimal_with_too_many_digits_is_one_bad_row() -> None:
    wide = json.loads(json.dumps(AVRO).replace('"precision": 4', '"precision": 9'))
    long = avro({**GIFT, "price": decimal.Decimal("12345.25")}, wide)
    batch, bad = AvroRows(json.dumps(AVRO)).parse([avro(GIFT), long])
    assert sorted(bad) == [1]
    assert batch.slice(0, 1).to_pylist()[0]["host"] == "mia"


@settings(max_examples=40)
@given(st.binary(max_size=60))
def test_no_bytes_break_the_reader(value: bytes) -> None:
    batch, bad = AvroRows(json.dumps(AVRO)).parse([value, avro(GIFT)])
    assert batch.num_rows == 2
    assert 1 not in bad


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ("{", "is no Avro schema"),
        ('{"type": "nothing"}', "is no Avro schema"),
        ('{"type": "array", "items": "int"}', "is a record"),
        (_field := '{"type": "record", "name": "R", "fields": []}', "has no fields"),
        ('["int", "string"]', "is a union of several types"),
        ('["null", {"type": "array", "items": "null"}]', "nothing but null"),
        ('{"type": "int", "logicalType": "time-millis"}', "time-millis has no type"),
        ('["null", "R"]', "holds itself"),
        ('"null"', "null has no type"),
    ],
)
def test_avro_schemas_that_are_no_tables(schema: str, words: str) -> None:
    if not schema.startswith("{") or "logicalType" in schema:
        fields = [{"name": "x", "type": json.loads(schema)}]
        schema = json.dumps({"type": "record", "name": "R", "fields": fields})
    with pytest.raises(ConfigError, match=f"option schema.*{words}"):
        schema_of(schema)


# --------------------------------------------------------------------------------------------- rows


def messages(*values: bytes | None, **more: Any) -> pa.RecordBatch:
    count = len(values)
    stamps = [datetime.datetime(2026, 11, 15 + n, 23, 30, tzinfo=UTC) for n in range(count)]
    return pa.RecordBatch.from_pydict(
        {
            "value": pa.array(values, pa.binary()),
            "topic": ["t"] * count,
            "partition": pa.array([n % 2 for n in range(count)], pa.int32()),
            "offset": pa.array(range(10, 10 + count), pa.int64()),
            "timestamp": pa.array(stamps, pa.timestamp("us", "Asia/Tokyo")),
            **more,
        }
    )


def gift_rows(*more: pa.Field) -> Rows:
    fields = pa.schema([("host", pa.string()), ("coins", pa.int32())])
    origin = [pa.field(f"_{name}", kind) for name, kind in ORIGIN]
    return Rows(pa.schema([*fields, *origin, *more]), JsonRows(fields))


def test_rows_carry_where_they_are_from() -> None:
    rows = gift_rows(pa.field("_date", pa.date32()))
    made = rows.make(messages(b'{"host": "mia", "coins": 5}', b'{"host": "ben"}'))
    first, second = made.good.to_pylist()
    assert first["_date"] == datetime.date(2026, 11, 15), "the day in UTC"
    assert (second["host"], second["_partition"], second["_offset"]) == ("ben", 1, 11)
    assert made.ranges == {"t": {"0": (10, 11), "1": (11, 12)}}
    assert (made.dead.num_rows, made.first_bad, made.bad) == (0, "", [])


def test_dead_letters_say_why_and_where() -> None:
    keys = pa.array([b"k0", b"k1", b"\xff", b""], pa.binary())
    batch = messages(b'{"host": "mia"}', b'{"coins": "\x01"}', b"[]", None, key=keys)
    made = gift_rows().make(batch)
    assert [row["host"] for row in made.good.to_pylist()] == ["mia"]
    assert made.bad == [1, 2, 3]
    assert made.first_bad.startswith("topic t, partition 1, offset 11: is no JSON")
    assert made.dead.schema.equals(DEAD)
    letters = made.dead.to_pylist()
    assert [letter["value"] for letter in letters] == [b'{"coins": "\x01"}', b"[]", b"(no value)"]
    assert [letter["key"] for letter in letters] == [b"k1", b"\xff", b""], "as they were"
    assert [{h["key"]: h["value"] for h in letter["headers"]} for letter in letters][1] == {
        "reason": b"is no JSON object but []",
        "originTopic": b"t",
        "originQueue": b"0",
        "originOffset": b"12",
    }
    assert made.ranges == {"t": {"0": (10, 13), "1": (11, 14)}}, "bad rows are rows of the batch"


def test_the_key_of_a_dead_letter_is_text_or_bytes_and_must_have_room() -> None:
    keys = pa.array(["größe", None, "k" * 20_000])
    made = gift_rows().make(messages(b"1", b"2", b"3", key=keys))
    assert made.dead.column("key").to_pylist() == ["größe".encode(), None, None]


def test_rows_as_they_are() -> None:
    batch = messages(b"a", b"b")
    schema = pa.schema([("offset", pa.int64()), ("timestamp", STAMP), ("value", pa.binary())])
    made = Rows(schema, None).make(batch)
    assert made.good.schema.equals(schema)
    assert made.good.column("offset").to_pylist() == [10, 11]
    assert ranges(batch.select(["value"])) == {}
