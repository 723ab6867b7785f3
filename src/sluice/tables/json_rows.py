"""This module reads JSON values into Arrow columns, and says of each row that does not fit why.

Strict where leniency would lose something: a number with a fraction is no INT, a list is no
struct, text after the object is an error. What is lenient loses nothing: a STRING takes any value,
as JSON text. Fields that are missing are null; fields that the schema does not name are left out.

Whole columns of the expected Python types go to Arrow at once; only a column with something else in
it is looked at value by value.
"""

from __future__ import annotations

import base64
import binascii
import datetime
import decimal
import json
import math
import struct
from collections.abc import Callable, Sequence
from typing import Any, Final, NoReturn

import orjson
import pyarrow as pa

from sluice.errors import ConfigError

_NONE: Final = type(None)
_SHOWN_CHARS: Final = 60
_INFERRED_LEVELS_MAX: Final = 100

Converter = Callable[[Any], Any]


class Unfit(Exception):
    """A value does not fit; the text says why."""


class JsonRows:
    """Values of one schema."""

    def __init__(self, schema: pa.Schema) -> None:
        self._schema = schema
        self._convert = [converter(each.type, each.name) for each in schema]
        # Numbers go through doubles where nothing in the schema can tell the difference.
        self._loads = _loads_exactly if any(map(_has_decimal, schema.types)) else _loads

    def parse(self, values: Sequence[bytes | None]) -> tuple[pa.RecordBatch, dict[int, str]]:
        """The columns, and by row number why a row does not fit: its columns mean nothing."""
        bad: dict[int, str] = {}
        documents: list[dict[str, Any]] = []
        for number, value in enumerate(values):
            document: Any = {}
            try:
                document = _object(self._loads, value)
            except Unfit as error:
                bad[number] = str(error)
            documents.append(document)
        columns = []
        for each, convert in zip(self._schema, self._convert, strict=True):
            column = [document.get(each.name) for document in documents]
            columns.append(_array(each, column, convert, bad, values))
        return pa.RecordBatch.from_arrays(columns, schema=nullable(self._schema)), bad


def _object(loads: Callable[[bytes], Any], value: bytes | None) -> dict[str, Any]:
    if not value:
        raise Unfit("the message has no value")
    try:
        document = loads(value)
    except (ValueError, RecursionError) as error:
        raise Unfit(f"is no JSON: {error}") from None
    if type(document) is not dict:
        raise Unfit(f"is no JSON object but {_shown(document)}")
    return document


def _loads(value: bytes) -> Any:
    return orjson.loads(value)


def _loads_exactly(value: bytes) -> Any:
    text = value.decode()
    found = json.loads(text, parse_float=decimal.Decimal, parse_constant=_no_number)
    if "\\ud" in text or "\\uD" in text:
        # Half of a pair is no text, and this parser takes it; as bytes it is refused.
        json.dumps(found, default=str, ensure_ascii=False).encode()
    return found


def _exact(found: Any, value: bytes | None, name: str) -> Any:
    """What was found, or an integer whose digits have been lost because it is so large."""
    if type(found) is not float or abs(found) < 1 << 63 or value is None:
        return found
    try:
        return json.loads(value)[name]
    except ValueError:
        return found


def _no_number(word: str) -> NoReturn:
    raise ValueError(f"{word} is no number of JSON")


def nullable(schema: pa.Schema) -> pa.Schema:
    """The same with columns that may be null, as they are before bad rows are taken out."""
    return pa.schema([each.with_nullable(True) for each in schema])


def _array(
    each: pa.Field,
    values: list[Any],
    convert: Converter,
    bad: dict[int, str],
    raw: Sequence[bytes | None],
) -> pa.Array:
    kinds = set(map(type, values))
    if not each.nullable and _NONE in kinds:
        for number, value in enumerate(values):
            if value is None:
                bad.setdefault(number, f"field {each.name} is missing, and is NOT NULL")
    if kinds <= _at_once(each.type):
        try:
            return pa.array(values, each.type)
        except (pa.ArrowException, OverflowError, ValueError):
            pass  # one of them is out of range: which one is found below
    if pa.types.is_string(each.type) and float in kinds:
        values = [_exact(value, whole, each.name) for value, whole in zip(values, raw, strict=True)]
    converted = []
    for number, value in enumerate(values):
        try:
            converted.append(None if value is None else convert(value))
        except Unfit as error:
            bad.setdefault(number, str(error))
            converted.append(None)
    return pa.array(converted, each.type)


def _at_once(kind: pa.DataType) -> frozenset[type]:
    """Python types that Arrow takes for this one without changing a value."""
    if pa.types.is_integer(kind):
        return frozenset({int, _NONE})
    if pa.types.is_float64(kind):
        return frozenset({float, _NONE})
    if pa.types.is_boolean(kind):
        return frozenset({bool, _NONE})
    if pa.types.is_string(kind):
        return frozenset({str, _NONE})
    return frozenset({_NONE})


def _has_decimal(kind: pa.DataType) -> bool:
    if pa.types.is_decimal(kind):
        return True
    return any(_has_decimal(kind.field(n).type) for n in range(kind.num_fields))


# --------------------------------------------------------------------------------------- converters


def converter(kind: pa.DataType, name: str) -> Converter:
    """From a value of JSON to one that Arrow takes for this type; raises Unfit with the name."""
    if pa.types.is_struct(kind):
        return _struct(kind, name)
    if pa.types.is_list(kind):
        return _list(kind, name)
    if pa.types.is_map(kind):
        return _map(kind, name)
    if pa.types.is_integer(kind):
        return _integer(kind, name)
    if pa.types.is_floating(kind):
        return _float(kind, name)
    if pa.types.is_decimal(kind):
        return _decimal(kind, name)
    if pa.types.is_timestamp(kind):
        return _timestamp(kind, name)
    for is_kind, make in _SIMPLE:
        if is_kind(kind):
            return make(name)
    raise ConfigError(f"option schema: field {name}: {kind} cannot be read from JSON")


def _unfit(name: str, value: object, what: str) -> Unfit:
    return Unfit(f"field {name}: {_shown(value)} is no {what}")


def _shown(value: object) -> str:
    try:
        text = _dumps(value)
    except RecursionError:
        return "a value of too many levels"
    return text if len(text) <= _SHOWN_CHARS else text[: _SHOWN_CHARS - 3] + "..."


def _dumps(value: object) -> str:
    if type(value) is decimal.Decimal:
        return str(value)
    try:
        return orjson.dumps(value, default=str).decode()
    except TypeError:  # a number of more than 64 bits, or hundreds of levels
        return json.dumps(value, default=str, separators=(",", ":"), ensure_ascii=False)


def _integer(kind: pa.DataType, name: str) -> Converter:
    bits = kind.bit_width - 1
    word = {7: "TINYINT", 15: "SMALLINT", 31: "INT", 63: "BIGINT"}[bits]

    def convert(value: Any) -> int:
        is_number = type(value) in (int, float, decimal.Decimal)
        if not is_number or not -(1 << bits) <= value < 1 << bits or value != int(value):
            raise _unfit(name, value, word)
        return int(value)  # also of 5.0

    return convert


def _float(kind: pa.DataType, name: str) -> Converter:
    is_single = pa.types.is_float32(kind)

    def convert(value: Any) -> float:
        if type(value) not in (int, float, decimal.Decimal):
            raise _unfit(name, value, "number")
        try:
            found = float(value)
            if is_single:
                struct.pack("<f", found)
        except OverflowError:
            found = math.inf
        if math.isinf(found):
            raise _unfit(name, value, "FLOAT" if is_single else "DOUBLE")
        return found

    return convert


def _bool(name: str) -> Converter:
    def convert(value: Any) -> bool:
        if type(value) is not bool:
            raise _unfit(name, value, "BOOLEAN")
        return value

    return convert


def _string(name: str) -> Converter:
    def convert(value: Any) -> str:
        if type(value) is str:
            return value
        try:
            return _dumps(value)
        except RecursionError:
            raise _unfit(name, value, "STRING") from None

    return convert


def _binary(name: str) -> Converter:
    def convert(value: Any) -> bytes:
        try:
            return base64.b64decode(value, validate=True)
        except (TypeError, ValueError, binascii.Error):
            raise _unfit(name, value, "BINARY (as base64)") from None

    return convert


def _date(name: str) -> Converter:
    def convert(value: Any) -> datetime.date:
        try:
            return datetime.date.fromisoformat(value)
        except (TypeError, ValueError):
            raise _unfit(name, value, "DATE, as 2026-11-16") from None

    return convert


def _timestamp(kind: pa.DataType, name: str) -> Converter:
    has_zone = kind.tz is not None
    word = "TIMESTAMP" if has_zone else "TIMESTAMP_NTZ"

    def convert(value: Any) -> datetime.datetime:
        try:
            found = datetime.datetime.fromisoformat(value)
        except (TypeError, ValueError):
            raise _unfit(name, value, f"{word}, as 2026-11-16T10:00:00Z") from None
        if not has_zone and found.tzinfo is not None:
            raise _unfit(name, value, f"{word}: it names a zone")
        return found if found.tzinfo or not has_zone else found.replace(tzinfo=datetime.UTC)

    return convert


def _decimal(kind: pa.DataType, name: str) -> Converter:
    step = decimal.Decimal(1).scaleb(-kind.scale)
    word = f"DECIMAL({kind.precision}, {kind.scale})"

    def convert(value: Any) -> decimal.Decimal:
        try:
            if type(value) not in (int, str, decimal.Decimal):
                raise ValueError
            found = decimal.Decimal(value)
            if not found.is_finite():
                raise ValueError
            with decimal.localcontext(prec=kind.precision) as context:
                context.traps[decimal.Inexact] = True
                return found.quantize(step)
        except (ValueError, decimal.DecimalException):
            raise _unfit(name, value, word) from None

    return convert


def _list(kind: pa.DataType, name: str) -> Converter:
    inner = converter(kind.value_type, f"{name}[]")

    def convert(value: Any) -> list[Any]:
        if type(value) is not list:
            raise _unfit(name, value, "ARRAY")
        return [None if each is None else inner(each) for each in value]

    return convert


def _map(kind: pa.DataType, name: str) -> Converter:
    if not pa.types.is_string(kind.key_type):
        raise ConfigError(f"option schema: field {name}: keys of a MAP in JSON are STRING")
    inner = converter(kind.item_type, f"{name}{{}}")

    def convert(value: Any) -> list[tuple[str, Any]]:
        if type(value) is not dict:
            raise _unfit(name, value, "MAP")
        return [(key, None if v is None else inner(v)) for key, v in value.items()]

    return convert


def _struct(kind: pa.DataType, name: str) -> Converter:
    fields = [kind.field(number) for number in range(kind.num_fields)]
    inner = [(each, converter(each.type, f"{name}.{each.name}")) for each in fields]

    def convert(value: Any) -> dict[str, Any]:
        if type(value) is not dict:
            raise _unfit(name, value, "STRUCT")
        row = {}
        for each, convert_one in inner:
            own = value.get(each.name)
            if own is None and not each.nullable:
                raise Unfit(f"field {name}.{each.name} is missing, and is NOT NULL")
            row[each.name] = None if own is None else convert_one(own)
        return row

    return convert


_SIMPLE: Final[tuple[tuple[Callable[[pa.DataType], bool], Callable[[str], Converter]], ...]] = (
    (pa.types.is_boolean, _bool),
    (pa.types.is_string, _string),
    (pa.types.is_binary, _binary),
    (pa.types.is_date32, _date),
)


# ---------------------------------------------------------------------------------------- inference


def infer(values: Sequence[bytes | None]) -> pa.Schema:
    """The schema that a sample fits; raises ConfigError where there is nothing to see.

    Kinds that contradict each other become STRING, which takes any value as JSON text.
    """
    documents = []
    for value in values:
        try:
            documents.append(_object(_loads, value))
        except Unfit:
            continue  # it goes where all go that do not fit
    kind = _common(documents)
    if kind is None or not pa.types.is_struct(kind):
        raise ConfigError(
            f"option schema: none of the first {len(values)} values is a JSON object with fields; "
            "give the schema, as 'host STRING, coins INT'"
        )
    return pa.schema([kind.field(number) for number in range(kind.num_fields)])


def _common(values: Sequence[Any], level: int = 0) -> pa.DataType | None:
    """The type of all these values; None where all are null."""
    if level > _INFERRED_LEVELS_MAX:
        return pa.string()
    kinds = set(map(type, values)) - {_NONE}
    if not kinds:
        return None
    if kinds == {bool}:
        return pa.bool_()
    if kinds == {int}:
        fits = all(-(1 << 63) <= value < 1 << 63 for value in values if value is not None)
        return pa.int64() if fits else pa.float64()
    if kinds <= {int, float}:
        return pa.float64()
    if kinds == {list}:
        each_one = [each for value in values if value is not None for each in value]
        inner = _common(each_one, level + 1)
        return pa.list_(inner or pa.string())
    if kinds == {dict}:
        names: dict[str, list[Any]] = {}
        for value in values:
            for name, own in (value or {}).items():
                names.setdefault(name, []).append(own)
        if names:
            return pa.struct(
                [(name, _common(own, level + 1) or pa.string()) for name, own in names.items()]
            )
    return pa.string()
