"""This module reads the fields of RocketMQ's requests by the table in `remoting_table.py`.

`parse_fields` turns text into typed values. A field that is missing or no number raises
RequestInvalid with the field's name: RocketMQ answers code 1 for it, and names the field in the
remark. docs/protocols.md is written from the same table.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, Final, NamedTuple

from sluice.errors import RequestInvalid
from sluice.protocol import remoting_table
from sluice.protocol.remoting_codes import RequestCode, ResponseCode

TEXT: Final = "s"
INT32: Final = "i"
INT64: Final = "l"
BOOL: Final = "b"
_KIND_NAMES: Final = {TEXT: "text", INT32: "int32", INT64: "int64", BOOL: "bool"}
_LIMITS: Final = {INT32: 1 << 31, INT64: 1 << 63}

# Java's parser takes a sign and the digits of any script. More digits than a 64-bit number has are
# not converted: the time for that grows with their square.
_NUMBER: Final = re.compile(r"[+-]?\d{1,19}")
_FIELD: Final = re.compile(r"(\w+)([!?]?)([ilb]?)")
_SHOWN_CHARACTERS_MAX: Final = 40


class Field(NamedTuple):
    """One field of a request or a response."""

    name: str
    kind: str
    required: bool

    def __str__(self) -> str:
        optional = "" if self.required else "?"
        return f"{self.name}{optional}: {_KIND_NAMES[self.kind]}"


class RequestSchema(NamedTuple):
    """One row of the table."""

    name: str
    code: int
    direction: str
    sentence: str
    request: tuple[Field, ...]
    response: tuple[Field, ...]


class ResponseSchema(NamedTuple):
    """One response code."""

    name: str
    code: int
    sentence: str


def parse_fields(schema: RequestSchema, ext: Mapping[str, str]) -> dict[str, Any]:
    """Typed values by name: str, int or bool; None for what is optional and missing.

    Names that the schema does not know are ignored, as RocketMQ does.
    """
    return read_fields(schema.request, ext)


def read_fields(fields: tuple[Field, ...], ext: Mapping[str, str]) -> dict[str, Any]:
    """`parse_fields` for any list of fields: the client reads answers with it."""
    values: dict[str, Any] = {}
    for name, kind, required in fields:
        text = ext.get(name)
        if text is None or (not text and kind != TEXT):
            if required:
                raise RequestInvalid(f"the custom field <{name}> is null")
            values[name] = None
        elif kind == TEXT:
            values[name] = text
        elif kind == BOOL:
            values[name] = text.lower() == "true"
        else:
            values[name] = _number(name, kind, text)
    return values


def _number(name: str, kind: str, text: str) -> int:
    if _NUMBER.fullmatch(text) is not None:
        value = int(text)
        limit = _LIMITS[kind]
        if -limit <= value < limit:
            return value
    shown = text if len(text) <= _SHOWN_CHARACTERS_MAX else text[:_SHOWN_CHARACTERS_MAX] + "..."
    raise RequestInvalid(f"the custom field <{name}> is no {_KIND_NAMES[kind]}: {shown!r}")


def ext_of(values: Mapping[str, object]) -> dict[str, str]:
    """Fields as the wire has them: None is left out, bool is lower case, all else is its text."""
    return {
        name: str(value).lower() if isinstance(value, bool) else str(value)
        for name, value in values.items()
        if value is not None
    }


# -------------------------------------------------------------------------------------- the table


def _rows(table: str) -> Iterator[tuple[str, str, str, dict[str, str]]]:
    """(name, direction, sentence, field lists by their mark) of every row."""
    for row in re.split(r"\n(?=\w)", table.strip()):
        parts = re.split(r"\n\s+([<>]) ", row)
        name_and_direction, _, sentence = parts[0].partition("|")
        name, _, direction = name_and_direction.strip().partition(" ")
        lists = dict(zip(parts[1::2], parts[2::2], strict=True))
        yield name, direction, " ".join(sentence.split()), lists


def _fields(text: str) -> tuple[Field, ...]:
    fields = []
    for word in text.split():
        match = _FIELD.fullmatch(word)
        assert match is not None, f"{word!r} is no field"
        name, mark, kind = match.groups()
        fields.append(Field(name, kind or TEXT, mark == "!"))
    return tuple(fields)


def _request_schemas() -> dict[int, RequestSchema]:
    schemas = {}
    for name, direction, sentence, lists in _rows(remoting_table.REQUESTS):
        code: int = getattr(RequestCode, name)
        schemas[code] = RequestSchema(
            name,
            code,
            direction,
            sentence,
            _fields(lists.get(">", "")),
            _fields(lists.get("<", "")),
        )
    return schemas


def _response_schemas() -> dict[int, ResponseSchema]:
    schemas = {}
    for name, _, sentence, _ in _rows(remoting_table.RESPONSES):
        code: int = getattr(ResponseCode, name)
        schemas[code] = ResponseSchema(name, code, sentence)
    return schemas


REQUESTS: Final = _request_schemas()
RESPONSES: Final = _response_schemas()

# Any request may carry these; what is not known is ignored.
COMMON_FIELDS: Final = {
    "bname": "name of the broker that the client means",
    "ns": "namespace",
    "nsd": "whether names carry the namespace already",
    "oway": "the request wants no answer",
    "lo": "the queue is a logical one of a static topic",
    "ReqT": "`0` from lite pull and stream clients",
    "AccessKey": "who signed the request",
    "Signature": "base64 of HMAC-SHA1 over the other fields' values, sorted by name, and the body",
    "SecurityToken": "token of a temporary access key",
}


def request_name(code: int) -> str:
    """For logs and metrics: the name of a request code, or the number where it has none."""
    schema = REQUESTS.get(code)
    return str(code) if schema is None else schema.name


# --------------------------------------------------------------------------------------- the page

_PEERS: Final = {
    "admin": "admin",
    "broker": "broker",
    "client": "client",
    "controller": "controller",
    "master": "master",
    "ns": "nameserver",
    "slave": "slave",
}
_UNSENT: Final = {"nobody": "served by nobody", "inside": "never on the wire"}

_TOP: Final = """\
<!-- Written by `script/check --fix` from src/sluice/protocol/. Edits here are lost. -->
# Protocols

## RocketMQ's remoting protocol

These are all request and response codes of RocketMQ 5.5.0. The page says what they mean and which
fields they carry, which is what the codec reads and checks.

A field with `?` is optional. Fields are text on the wire: `int32` and `int64` are decimal digits,
`bool` is `true` or `false`. A request whose needed field is missing or no number is answered with
code 1 and a remark that names the field; the connection stays open.

Any request may also carry:

| Field | Meaning |
|---|---|
"""

_REQUEST_TOP: Final = """
### Requests

| Code | Name | From, to | Request fields | Response fields | What it does |
|---|---|---|---|---|---|
"""

_RESPONSE_TOP: Final = """
### Responses

| Code | Name | Meaning |
|---|---|---|
"""


def _direction(direction: str) -> str:
    if direction in _UNSENT:
        return _UNSENT[direction]
    sender, _, receiver = direction.partition(">")
    return f"{_PEERS[sender]} → {_PEERS[receiver]}"


def _field_cell(fields: tuple[Field, ...]) -> str:
    return ", ".join(f"`{field}`" for field in fields)


def protocols_markdown() -> str:
    """The whole page."""
    lines = [_TOP]
    lines += (f"| `{name}` | {meaning} |\n" for name, meaning in COMMON_FIELDS.items())
    lines.append(_REQUEST_TOP)
    for row in sorted(REQUESTS.values(), key=lambda row: row.code):
        cells = (
            str(row.code),
            row.name,
            _direction(row.direction),
            _field_cell(row.request),
            _field_cell(row.response),
            row.sentence,
        )
        lines.append("| " + " | ".join(cells) + " |\n")
    lines.append(_RESPONSE_TOP)
    for code in sorted(RESPONSES):
        lines.append(f"| {code} | {RESPONSES[code].name} | {RESPONSES[code].sentence} |\n")
    return "".join(lines)
