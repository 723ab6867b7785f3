"""This module makes rows of a table from messages, and dead letters of those that do not fit.

    schema not given   rows as they are
    JSON, Avro         the fields of the value, and `_topic`, `_partition`, `_offset`, `_timestamp`
    `_date`            the day of the timestamp (UTC), where the table is divided by it

All of it runs on executors, on Arrow batches; objects here are pickled to get there.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple, Protocol

import pyarrow as pa

from sluice.errors import ConfigError
from sluice.tables.log import Ranges

DATE: Final = "_date"
# Columns of the source that a table keeps beside the fields of the value.
ORIGIN: Final = (
    ("topic", pa.string()),
    ("partition", pa.int32()),
    ("offset", pa.int64()),
    ("timestamp", pa.timestamp("us", "UTC")),
)
NEEDED: Final = ("value", *(name for name, _ in ORIGIN))
HEADERS: Final = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))
DEAD: Final = pa.schema([("value", pa.binary()), ("key", pa.binary()), ("headers", HEADERS)])
NO_VALUE: Final = b"(no value)"  # brokers take no message without a body
_REASON_CHARS: Final = 1000
# With the reason beside it a key must fit into the properties of a message, also as base64.
_KEY_BYTES_MAX: Final = 16 * 1024


class Values(Protocol):
    """What reads values: JsonRows, AvroRows."""

    def parse(self, values: list[bytes | None]) -> tuple[pa.RecordBatch, dict[int, str]]: ...


class Made(NamedTuple):
    """What came of a batch of rows."""

    good: pa.RecordBatch
    dead: pa.RecordBatch  # of the schema DEAD
    ranges: Ranges
    first_bad: str  # where it is and why, in words; empty where all fit
    bad: list[int]  # the numbers of the rows that do not fit


class Rows:
    """How a table's rows are made. `schema` is that of the table, with all columns."""

    def __init__(self, schema: pa.Schema, values: Values | None) -> None:
        self.schema = schema
        self._values = values

    def with_schema(self, schema: pa.Schema) -> Rows:
        return Rows(schema, self._values)

    def make(self, batch: pa.RecordBatch) -> Made:
        if self._values is None:
            good = self._table_columns(
                batch, dict(zip(batch.schema.names, batch.columns, strict=True))
            )
            return Made(good, pa.RecordBatch.from_pylist([], DEAD), ranges(batch), "", [])
        raw = [None if each is None else bytes(each) for each in _of(batch, "value").to_pylist()]
        fields, bad = self._values.parse(raw)
        columns = dict(zip(fields.schema.names, fields.columns, strict=True))
        for name, kind in ORIGIN:
            columns[f"_{name}"] = _of(batch, name).cast(kind)
        first = ""
        if bad:
            number = min(bad)
            at = _origin(batch, number)
            first = f"topic {at[0]}, partition {at[1]}, offset {at[2]}: {bad[number]}"
            is_good = pa.array([number not in bad for number in range(batch.num_rows)])
            columns = {name: column.filter(is_good) for name, column in columns.items()}
        good = self._table_columns(batch, columns)
        return Made(good, dead_letters(batch, raw, bad), ranges(batch), first, sorted(bad))

    def _table_columns(self, batch: pa.RecordBatch, columns: dict[str, pa.Array]) -> pa.RecordBatch:
        if DATE in self.schema.names and DATE not in columns:
            stamp = columns["_timestamp" if "_timestamp" in columns else "timestamp"]
            columns[DATE] = stamp.cast(pa.timestamp("us", "UTC")).cast(pa.date32())
        arrays = [_as(columns[each.name], each.type) for each in self.schema]
        return pa.RecordBatch.from_arrays(arrays, schema=self.schema)


def _as(array: pa.Array, kind: pa.DataType) -> pa.Array:
    return array if array.type.equals(kind) else array.cast(kind)


def _of(batch: pa.RecordBatch, name: str) -> pa.Array:
    return batch.column(batch.schema.get_field_index(name))


def _origin(batch: pa.RecordBatch, number: int) -> tuple[str, str, str]:
    topic, partition, offset = (
        str(_of(batch, name)[number].as_py()) for name in ("topic", "partition", "offset")
    )
    return topic, partition, offset


def check_frame(names: list[str], *, has_schema: bool, partition_by: tuple[str, ...]) -> None:
    """Refuse a DataFrame that lacks what is needed."""
    if has_schema:
        missing = [name for name in NEEDED if name not in names]
        if missing:
            raise ConfigError(
                f"option schema: the DataFrame has no column {missing[0]}; give the rows of "
                "format('sluice') as they are read, and select from the table later"
            )
    elif DATE in partition_by and DATE not in names and "timestamp" not in names:
        raise ConfigError(
            f"option partition_by: {DATE} is the day of the column timestamp, which the DataFrame "
            "does not have"
        )


def ranges(batch: pa.RecordBatch) -> Ranges:
    """The offsets that a batch has of every queue, where it has the columns to tell."""
    names = ("topic", "partition", "offset")
    if not batch.num_rows or any(name not in batch.schema.names for name in names):
        return {}
    table = pa.table({name: _of(batch, name) for name in names}).group_by(["topic", "partition"])
    found: Ranges = {}
    for row in table.aggregate([("offset", "min"), ("offset", "max")]).to_pylist():
        own = found.setdefault(str(row["topic"]), {})
        own[str(row["partition"])] = (row["offset_min"], row["offset_max"] + 1)
    return found


# ------------------------------------------------------------------------------------- dead letters


def dead_letters(
    batch: pa.RecordBatch, raw: list[bytes | None], bad: dict[int, str]
) -> pa.RecordBatch:
    """Messages that hold what did not fit, and say in their properties why and where it was."""
    numbers = sorted(bad)
    has_key = "key" in batch.schema.names
    return pa.RecordBatch.from_pydict(
        {
            "value": [raw[number] or NO_VALUE for number in numbers],
            "key": [
                _key(_of(batch, "key")[number].as_py()) if has_key else None for number in numbers
            ],
            "headers": [_headers(_origin(batch, number), bad[number]) for number in numbers],
        },
        DEAD,
    )


def _headers(origin: tuple[str, str, str], reason: str) -> list[dict[str, Any]]:
    topic, partition, offset = origin
    words = {
        "reason": "".join(c if c >= " " else " " for c in reason)[:_REASON_CHARS],
        "originTopic": topic,
        "originQueue": partition,
        "originOffset": offset,
    }
    return [{"key": name, "value": text.encode(errors="replace")} for name, text in words.items()]


def _key(key: bytes | str | None) -> bytes | None:
    """The key as it was, where a message has room for it."""
    if key is None:
        return None
    raw = key.encode() if isinstance(key, str) else bytes(key)
    return raw if len(raw) <= _KEY_BYTES_MAX else None
