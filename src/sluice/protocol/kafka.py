"""This module is Kafka's wire: request and answer bodies of every API and version, and the headers
around them.

The shapes come from kio, which has one class for each version of each message; they are loaded
when a version is first met. Requests are read with its native readers. Answers are written here,
from plain dictionaries: one dictionary serves all versions, because what a version does not have
is left out, and what nobody gave has its default. Times are whole milliseconds, errors are numbers.

    request   i32 length · i16 key · i16 version · i32 correlation id · client id [· tags] · body
    answer    i32 length · i32 correlation id [· tags] · body

Whatever does not decode is `BadRequest`: the peer's connection is closed, as Kafka does it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from functools import cache
from struct import Struct, error
from types import NoneType, UnionType
from typing import Any, Final, NamedTuple, cast, get_args, get_origin
from uuid import UUID

from sluice.model import Buffer
from sluice.protocol.kafka_bounds import BadRequest, check_bounds, read_uvarint
from sluice.protocol.kafka_codes import API_VERSIONS, OFFSET_COMMIT, UNSUPPORTED_VERSION

_HEAD: Final = Struct(">hhih")  # key, version, correlation id, bytes of the client id
_ANSWER_HEAD: Final = Struct(">ii")
_I16: Final = Struct(">h")
_I32: Final = Struct(">i")
_I64: Final = Struct(">q")
_U32: Final = Struct(">I")
_RETENTION_VERSIONS: Final = range(2, 5)  # of OffsetCommit
_RETENTION_MS_MAX: Final = 10**15  # thirty thousand years
_SMALL_BYTES: Final = 1024
CLIENT_ID_BYTES_MAX: Final = 1024  # nobody's is longer, and it stands in logs and member ids

Put = Callable[[list[bytes], Any], None]


class Head(NamedTuple):
    """What stands in front of a request's body. `body_at`: where the body begins."""

    key: int
    version: int
    correlation_id: int
    client_id: str
    body_at: int


# ----------------------------------------------------------------------------------------- requests


def read_head(frame: Buffer) -> Head:
    """Key, version and who asks; the tags of flexible versions are stepped over."""
    try:
        key, version, correlation_id, size = _HEAD.unpack_from(frame)
    except error:
        raise BadRequest("a request that is shorter than its head") from None
    at = _HEAD.size + max(0, size)
    if size > CLIENT_ID_BYTES_MAX or at > len(frame):
        raise BadRequest(f"a client id of {size} bytes")
    client_id = str(bytes(frame[_HEAD.size : at]), "utf-8", "replace")
    return Head(key, version, correlation_id, client_id, at)


def key_and_version(frame: Buffer) -> tuple[int, int]:
    """What a request of which at least the head is there asks for."""
    head = read_head(frame)
    return head.key, head.version


def body_start(frame: Buffer, head: Head) -> int:
    """Where the body begins: after the tags of a flexible head, which nobody uses yet."""
    at = head.body_at
    if not is_flexible(head.key, head.version):
        return at
    if at < len(frame) and not frame[at]:
        return at + 1
    return skip_tags(frame, at)


def skip_tags(frame: Buffer, at: int) -> int:
    """The place behind tagged fields that are not looked at."""
    count, at = read_uvarint(frame, at)
    for _ in range(count):
        _, at = read_uvarint(frame, at)
        size, at = read_uvarint(frame, at)
        at += size
        if at > len(frame):
            raise BadRequest("a tagged field that is longer than the request")
    return at


def decode(key: int, version: int, frame: bytes | memoryview, at: int) -> Any:
    """The body of a request, as kio's class of its version has it.

    What stands behind it is left alone, as Kafka's broker does: librdkafka sends such bytes.
    """
    check_bounds(_shape(key, version), frame, at)
    if key == OFFSET_COMMIT and version in _RETENTION_VERSIONS:
        frame = _with_retention(frame, at)
    return _reader(key, version)(frame, at)


def _with_retention(frame: bytes | memoryview, at: int) -> bytes | memoryview:
    """A commit whose offsets are kept for no longer than can be counted: some clients write the
    largest number there is.
    """
    (size,) = _I16.unpack_from(frame, at)
    at += 2 + max(0, size) + 4  # group, generation
    (size,) = _I16.unpack_from(frame, at)
    at += 2 + max(0, size)  # member
    (retention_ms,) = _I64.unpack_from(frame, at)
    if -1 <= retention_ms <= _RETENTION_MS_MAX:
        return frame
    changed = bytearray(frame)
    _I64.pack_into(changed, at, _RETENTION_MS_MAX if retention_ms > 0 else -1)
    return bytes(changed)


# kio is loaded with the first request: a broker that no Kafka client asks starts without it.


@cache
def _shape(key: int, version: int) -> Any:
    from kio.index import KioIndexError, load_request_schema

    try:
        return load_request_schema(key, version)
    except KioIndexError as unknown:
        raise BadRequest(f"request {key} version {version} is not known") from unknown


@cache
def _reader(key: int, version: int) -> Callable[[Any, int], Any]:
    from kio.serial import entity_reader
    from kio.serial.errors import SerialError

    read = entity_reader(_shape(key, version))

    def checked(frame: bytes | memoryview, at: int) -> Any:
        try:
            return read(frame, at)[0]
        except (SerialError, ValueError, OverflowError, IndexError, TypeError) as bad:
            raise BadRequest(f"request {key} version {version}: {bad}") from bad

    return checked


@cache
def is_flexible(key: int, version: int) -> bool:
    """Whether a version has compact lengths and tags."""
    return bool(_shape(key, version).__flexible__)


# ------------------------------------------------------------------------------------------ answers


def frame_answer(key: int, version: int, correlation_id: int, parts: list[Buffer]) -> list[Buffer]:
    """Parts of an answer's body with length and head in front of them."""
    # The answer to ApiVersions has the old head in every version: who asks may not know ours.
    tags = b"\0" if key != API_VERSIONS and is_flexible(key, version) else b""
    size = 4 + len(tags) + sum(map(len, parts))
    head = _ANSWER_HEAD.pack(size, correlation_id) + tags
    if size <= _SMALL_BYTES:  # the system takes one part sooner than two
        return [b"".join((head, *parts))]
    return [head, *parts]


def encode(key: int, version: int, values: Mapping[str, Any]) -> bytes:
    """The body of an answer."""
    out: list[bytes] = []
    _answer_writer(key, version)(out, values)
    return b"".join(out)


def refuse_api_versions(highest: int) -> bytes:
    """The answer to an ApiVersions that is too new: in the oldest form, it says what is known."""
    return b"".join(
        (
            _I16.pack(UNSUPPORTED_VERSION),
            _I32.pack(1),
            _I16.pack(API_VERSIONS),
            _I16.pack(0),
            _I16.pack(highest),
        )
    )


@cache
def _answer_writer(key: int, version: int) -> Put:
    from kio.index import load_response_schema

    return _struct_writer(load_response_schema(key, version))


def put_uvarint(out: list[bytes], value: int) -> None:
    """An unsigned varint."""
    while value > 0x7F:
        out.append(_BYTES[value & 0x7F | 0x80])
        value >>= 7
    out.append(_BYTES[value])


_BYTES: Final = tuple(bytes((value,)) for value in range(256))


@cache
def _struct_writer(shape: Any) -> Put:
    """Writes one dictionary in the form of one class of kio's."""
    flexible = bool(shape.__flexible__)
    plain: list[tuple[str, Put, Any]] = []
    tagged: list[tuple[int, str, Put, Any]] = []
    for field in fields(shape):
        put, default = _field_writer(field, flexible)
        tag = field.metadata.get("tag")
        if tag is None:
            plain.append((field.name, put, default))
        else:
            tagged.append((int(tag), field.name, put, default))
    tagged.sort(key=lambda each: each[0])

    def write(out: list[bytes], values: Mapping[str, Any]) -> None:
        get = values.get
        for name, put, default in plain:
            put(out, get(name, default))
        if flexible:
            used = [each for each in tagged if get(each[1], each[3]) != each[3]]
            put_uvarint(out, len(used))
            for tag, name, put, _ in used:
                inner: list[bytes] = []
                put(inner, values[name])
                put_uvarint(out, tag)
                put_uvarint(out, sum(map(len, inner)))
                out.extend(inner)

    return write


def _field_writer(field: Field[Any], flexible: bool) -> tuple[Put, Any]:
    """How a field is written, and its value where nobody gives one."""
    kind, nullable = _without_none(field.type)
    given = _plain(field.default) if field.default is not MISSING else _NOTHING
    if get_origin(kind) is tuple:
        shape: Any
        shape, _ = _without_none(get_args(kind)[0])
        item = (
            _struct_writer(cast(Any, shape))
            if is_dataclass(shape)
            else _writer(field.metadata["kafka_type"], flexible)
        )
        default = given if given is not _NOTHING else (None if nullable else ())
        return _array(item, flexible, nullable), default
    if is_dataclass(kind):
        nested: Any = kind
        put = _struct_writer(nested)
        default = given if given is not _NOTHING else (None if nullable else {})
        is_tag = "tag" in field.metadata
        return (_nullable_struct(put) if nullable and not is_tag else put), default
    kafka_type = field.metadata["kafka_type"]
    default = (
        given if given is not _NOTHING else (None if nullable else _DEFAULTS.get(kafka_type, 0))
    )
    return _writer(kafka_type, flexible, nullable), default


_NOTHING: Final = object()
_DEFAULTS: Final[dict[str, Any]] = {
    "string": "",
    "bytes": b"",
    "records": b"",
    "uuid": None,
    "bool": False,
}


def _plain(value: Any) -> Any:
    """kio's defaults as our dictionaries have them."""
    if hasattr(value, "total_seconds"):
        return round(value.total_seconds() * 1000)
    if hasattr(value, "timestamp"):
        return round(value.timestamp() * 1000)
    return value


def _without_none(kind: Any) -> tuple[Any, bool]:
    """A type without `| None`, and whether it had that."""
    if get_origin(kind) is UnionType:
        rest = [each for each in get_args(kind) if each is not NoneType]
        return rest[0], len(rest) < len(get_args(kind))
    return kind, False


def _number(layout: str) -> Put:
    pack = Struct(layout).pack

    def put(out: list[bytes], value: int) -> None:
        out.append(pack(value))

    return put


def _put_uuid(out: list[bytes], value: UUID | None) -> None:
    out.append(bytes(16) if value is None else value.bytes)


def _put_time(out: list[bytes], value: int | None) -> None:
    out.append(_I64.pack(-1 if value is None else value))


_NUMBERS: Final[dict[str, Put]] = {
    "int8": _number(">b"),
    "int16": _number(">h"),
    "int32": _number(">i"),
    "int64": _number(">q"),
    "uint8": _number(">B"),
    "uint16": _number(">H"),
    "uint32": _number(">I"),
    "uint64": _number(">Q"),
    "float64": _number(">d"),
    "bool": _number(">?"),
    "error_code": _number(">h"),
    "timedelta_i32": _number(">i"),
    "timedelta_i64": _number(">q"),
    "datetime_i64": _put_time,
    "uuid": _put_uuid,
}


def _writer(kafka_type: str, flexible: bool, nullable: bool = False) -> Put:
    number = _NUMBERS.get(kafka_type)
    if number is not None:
        return number
    size = _compact_size if flexible else (_size_16 if kafka_type == "string" else _size_32)
    is_text = kafka_type == "string"

    def put(out: list[bytes], value: Any) -> None:
        if value is None:
            assert nullable, "only what may be null is left out"
            size(out, -1)
            return
        data = value.encode() if is_text else value
        size(out, len(data))
        out.append(data)

    return put


def _compact_size(out: list[bytes], size: int) -> None:
    put_uvarint(out, size + 1)


def _size_16(out: list[bytes], size: int) -> None:
    out.append(_I16.pack(size))


def _size_32(out: list[bytes], size: int) -> None:
    out.append(_I32.pack(size))


def _array(item: Put, flexible: bool, nullable: bool) -> Put:
    size = _compact_size if flexible else _size_32

    def put(out: list[bytes], values: Any) -> None:
        if values is None:
            assert nullable, "only what may be null is left out"
            size(out, -1)
            return
        size(out, len(values))
        for value in values:
            item(out, value)

    return put


def _nullable_struct(write: Put) -> Put:
    def put(out: list[bytes], value: Mapping[str, Any] | None) -> None:
        if value is None:
            out.append(b"\xff")
        else:
            out.append(b"\x01")
            write(out, value)

    return put
