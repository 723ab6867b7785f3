"""This module reads Avro values into Arrow columns, by a schema that is given as Avro's JSON.

A value is one record in Avro's plain binary form: no file, no header of a registry. What is shorter
or longer than the schema says does not fit, and the reason is told. fastavro decodes; it is in the
extra `avro`, and imported when it is needed.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final
from uuid import UUID

import pyarrow as pa

from sluice.errors import ConfigError
from sluice.tables.json_rows import nullable

_PLAIN: Final = {
    "boolean": pa.bool_(),
    "int": pa.int32(),
    "long": pa.int64(),
    "float": pa.float32(),
    "double": pa.float64(),
    "bytes": pa.binary(),
    "string": pa.string(),
    "enum": pa.string(),
    "fixed": pa.binary(),
}
_LOGICAL: Final = {
    ("int", "date"): pa.date32(),
    ("long", "timestamp-millis"): pa.timestamp("us", "UTC"),
    ("long", "timestamp-micros"): pa.timestamp("us", "UTC"),
    ("long", "local-timestamp-millis"): pa.timestamp("us"),
    ("long", "local-timestamp-micros"): pa.timestamp("us"),
    ("string", "uuid"): pa.string(),
}
_REFUSED: Final = ("time-millis", "time-micros", "duration", "uuid")  # uuid of a fixed


class AvroRows:
    """Values of one schema."""

    def __init__(self, text: str) -> None:
        self._text = text
        self.schema = schema_of(text)
        self._has_uuids = '"uuid"' in text
        self._read: Callable[[io.BytesIO], Any] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_read": None}

    def _reader(self) -> Callable[[io.BytesIO], Any]:
        if self._read is None:
            fastavro = _fastavro()
            parsed = fastavro.parse_schema(json.loads(self._text))
            self._read = lambda stream: fastavro.schemaless_reader(stream, parsed, None)
        return self._read

    def parse(self, values: Sequence[bytes | None]) -> tuple[pa.RecordBatch, dict[int, str]]:
        """The columns, and by row number why a row does not fit: its columns mean nothing."""
        bad: dict[int, str] = {}
        rows: list[dict[str, Any]] = []
        for number, value in enumerate(values):
            row: dict[str, Any] = {}
            reason = ""
            if not value:
                reason = "the message has no value"
            else:
                row, reason = self._row(value)
            if reason:
                bad[number] = reason
            rows.append(row)
        loose = nullable(self.schema)
        try:
            batch = pa.RecordBatch.from_pylist(rows, loose)
        except (pa.ArrowException, OverflowError, ValueError):
            batch = self._one_by_one(rows, loose, bad)
        return batch, bad

    def _row(self, value: bytes) -> tuple[dict[str, Any], str]:
        stream = io.BytesIO(value)
        try:
            row = self._reader()(stream)
        except MemoryError:
            raise
        except Exception as error:  # the decoder has no class of errors of its own
            return {}, f"is no Avro record of this schema: {type(error).__name__} {error}".rstrip()
        left = len(value) - stream.tell()
        if left:
            return {}, f"is no Avro record of this schema: {left} bytes are left over"
        return _texts(row) if self._has_uuids else row, ""

    @staticmethod
    def _one_by_one(
        rows: list[dict[str, Any]], schema: pa.Schema, bad: dict[int, str]
    ) -> pa.RecordBatch:
        """Find the rows that Arrow refuses: a decimal with more digits than declared."""
        for number, row in enumerate(rows):
            try:
                pa.RecordBatch.from_pylist([row], schema)
            except (pa.ArrowException, OverflowError, ValueError) as error:
                bad.setdefault(number, str(error))
                rows[number] = {}
        return pa.RecordBatch.from_pylist(rows, schema)


def _texts(value: Any) -> Any:
    """UUIDs as text, wherever they are."""
    if type(value) is dict:
        return {name: _texts(each) for name, each in value.items()}
    if type(value) is list:
        return [_texts(each) for each in value]
    return str(value) if type(value) is UUID else value


def _fastavro() -> Any:
    try:
        import fastavro
    except ImportError:
        raise ConfigError(
            "option schema: Avro needs the package fastavro, also where executors run: "
            "pip install 'sluice-mq[avro]'"
        ) from None
    return fastavro


def schema_of(text: str) -> pa.Schema:
    """The columns of an Avro schema; raises ConfigError."""
    fastavro = _fastavro()
    try:
        content = fastavro.parse_schema(json.loads(text))  # with names in full
    except Exception as error:  # the parser has many
        raise ConfigError(f"option schema: is no Avro schema: {error}") from None
    if not isinstance(content, dict) or content.get("type") != "record":
        raise ConfigError("option schema: an Avro schema of a table is a record")
    named: dict[str, Any] = {}
    struct = _kind(content, "", named, ())
    return pa.schema([struct.field(number) for number in range(struct.num_fields)])


def _kind(schema: Any, place: str, named: dict[str, Any], above: tuple[str, ...]) -> pa.DataType:
    if isinstance(schema, str) and schema in named:
        schema = named[schema]
    if isinstance(schema, str):
        schema = {"type": schema}
    if isinstance(schema, list):
        raise ConfigError(
            f"option schema: {place} is a union of several types; a column has one, or null and one"
        )
    kind = schema["type"]
    if isinstance(kind, (dict, list)):
        return _kind(kind, place, named, above)
    if kind in ("record", "error"):
        return _record(schema, place, named, above)
    if schema.get("name"):
        named[schema["name"]] = schema
    if kind in ("array", "map"):
        item = schema["items" if kind == "array" else "values"]
        each, may_be_null = _optional(item)
        if each == "null":
            raise ConfigError(f"option schema: {place} is a list of nothing but null")
        inner = pa.field("element", _kind(each, f"{place}[]", named, above), may_be_null)
        return pa.list_(inner) if kind == "array" else pa.map_(pa.string(), inner.type)
    logical = schema.get("logicalType")
    if logical == "decimal" and kind in ("bytes", "fixed"):
        return pa.decimal128(schema["precision"], schema.get("scale", 0))
    if (kind, logical) in _LOGICAL:
        return _LOGICAL[kind, logical]
    if logical in _REFUSED:
        raise ConfigError(f"option schema: {place}: {logical} has no type in a table")
    if kind not in _PLAIN:
        raise ConfigError(f"option schema: {place}: {kind} has no type in a table")
    return _PLAIN[kind]


def _record(
    schema: Mapping[str, Any], place: str, named: dict[str, Any], above: tuple[str, ...]
) -> pa.DataType:
    name = str(schema["name"])
    if name in above:
        raise ConfigError(f"option schema: {place} holds itself; a table's columns cannot")
    named[name] = schema
    fields = []
    for each in schema["fields"]:
        kind, may_be_null = _optional(each["type"])
        inner = f"{place}.{each['name']}".lstrip(".")
        column = pa.field(each["name"], _kind(kind, inner, named, (*above, name)), may_be_null)
        fields.append(column)
    if not fields:
        raise ConfigError(f"option schema: record {name} has no fields")
    return pa.struct(fields)


def _optional(schema: Any) -> tuple[Any, bool]:
    """A union of null and one type is that type, which may be null."""
    if isinstance(schema, list):
        rest = [each for each in schema if each != "null"]
        if len(rest) == 1:
            return rest[0], len(rest) < len(schema)
    return schema, False
