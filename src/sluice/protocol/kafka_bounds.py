"""This module walks over a request of Kafka's and refuses lengths that it cannot have, before
anybody makes room for what they announce.

The reader that takes requests apart believes the length of an array, and asks for the memory of all
its items at once. A request of twenty bytes could end the process. So every length is compared with
the bytes that are there, and the items of all arrays together are bounded, because each becomes an
object that takes many times its bytes.

It reads the shapes of messages from the classes that describe them; it makes nothing but a place.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, is_dataclass
from functools import cache
from struct import Struct
from types import NoneType, UnionType
from typing import Any, Final, cast, get_args, get_origin

from sluice.errors import ProtocolError

ITEMS_MAX: Final = 500_000
_I16: Final = Struct(">h")
_I32: Final = Struct(">i")
_FIXED: Final = {
    **dict.fromkeys(("int8", "uint8", "bool"), 1),
    **dict.fromkeys(("int16", "uint16", "error_code"), 2),
    **dict.fromkeys(("int32", "uint32", "timedelta_i32"), 4),
    **dict.fromkeys(("int64", "uint64", "float64", "timedelta_i64", "datetime_i64"), 8),
    "uuid": 16,
}


class BadRequest(ProtocolError):
    """These bytes are no request that Kafka's protocol knows; the connection is closed."""


class _Walk:
    """One walk: the bytes, and how many items they may still have."""

    __slots__ = ("data", "end", "items_left")

    def __init__(self, data: bytes | memoryview) -> None:
        self.data = data
        self.end = len(data)
        self.items_left = ITEMS_MAX


Step = Callable[[_Walk, int], int]


def check_bounds(shape: Any, data: bytes | memoryview, at: int) -> None:
    """Refuse a message of this shape whose lengths lie; raises `BadRequest`."""
    _struct(shape)(_Walk(data), at)


def read_uvarint(data: bytes | bytearray | memoryview, at: int) -> tuple[int, int]:
    """An unsigned varint of at most 32 bits, and the place behind it."""
    try:
        byte = data[at]
        at += 1
        if byte < 0x80:
            return byte, at
        value, shift = byte & 0x7F, 7
        while True:
            byte = data[at]
            at += 1
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                break
            shift += 7
            if shift > 28:
                raise BadRequest("a varint of more than five bytes")
    except IndexError:
        raise BadRequest("a request that ends inside of a varint") from None
    if value > 0xFFFFFFFF:
        raise BadRequest("a varint of more than 32 bits")
    return value, at


@cache
def _struct(shape: Any) -> Step:
    """Walks over one message or a part of it."""
    flexible = bool(shape.__flexible__)
    steps: list[Step] = []
    tagged: dict[int, Step] = {}
    fixed_bytes = 0
    for field in fields(shape):
        if "tag" in field.metadata:
            tagged[int(field.metadata["tag"])] = _field(field, flexible, is_tag=True)
            continue
        size = _fixed_size(field)
        if size:
            fixed_bytes += size
            continue
        if fixed_bytes:
            steps.append(_skip(fixed_bytes))
            fixed_bytes = 0
        steps.append(_field(field, flexible, is_tag=False))
    if fixed_bytes:
        steps.append(_skip(fixed_bytes))
    if flexible:
        steps.append(_tags(tagged))

    def walk(walked: _Walk, at: int) -> int:
        for step in steps:
            at = step(walked, at)
        return at

    return walk


def _fixed_size(field: Any) -> int:
    kind, _ = _without_none(field.type)
    if get_origin(kind) is tuple or is_dataclass(kind):
        return 0
    return _FIXED.get(field.metadata["kafka_type"], 0)


def _field(field: Any, flexible: bool, *, is_tag: bool) -> Step:
    kind, nullable = _without_none(field.type)
    if get_origin(kind) is tuple:
        item, _ = _without_none(get_args(kind)[0])
        inner = (
            _struct(cast(Any, item))
            if is_dataclass(item)
            else _value(field.metadata["kafka_type"], flexible)
        )
        return _array(inner, flexible)
    if is_dataclass(kind):
        inner = _struct(cast(Any, kind))
        return _maybe(inner) if nullable and not is_tag else inner
    return _value(field.metadata["kafka_type"], flexible)


def _without_none(kind: Any) -> tuple[Any, bool]:
    """A type without `| None`, and whether it had that."""
    if get_origin(kind) is UnionType:
        rest = [each for each in get_args(kind) if each is not NoneType]
        return rest[0], len(rest) < len(get_args(kind))
    return kind, False


def _skip(size: int) -> Step:
    def walk(walked: _Walk, at: int) -> int:
        if at + size > walked.end:
            raise BadRequest("a request that ends early")
        return at + size

    return walk


def _value(kafka_type: str, flexible: bool) -> Step:
    size = _FIXED.get(kafka_type)
    if size is not None:
        return _skip(size)
    length = _compact if flexible else (_short if kafka_type == "string" else _long)

    def walk(walked: _Walk, at: int) -> int:
        count, at = length(walked, at)
        if count > 0:
            at += count
            if at > walked.end:
                raise BadRequest(f"a field of {count} bytes that are not there")
        return at

    return walk


def _compact(walked: _Walk, at: int) -> tuple[int, int]:
    count, at = read_uvarint(walked.data, at)
    return count - 1, at


def _short(walked: _Walk, at: int) -> tuple[int, int]:
    if at + 2 > walked.end:
        raise BadRequest("a request that ends early")
    return _I16.unpack_from(walked.data, at)[0], at + 2


def _long(walked: _Walk, at: int) -> tuple[int, int]:
    if at + 4 > walked.end:
        raise BadRequest("a request that ends early")
    return _I32.unpack_from(walked.data, at)[0], at + 4


def _array(item: Step, flexible: bool) -> Step:
    length = _compact if flexible else _long

    def walk(walked: _Walk, at: int) -> int:
        count, at = length(walked, at)
        if count > walked.end - at:
            raise BadRequest(f"{count} items in {walked.end - at} bytes")
        walked.items_left -= max(0, count)
        if walked.items_left < 0:
            raise BadRequest(f"more than {ITEMS_MAX} items in one request")
        for _ in range(count):
            at = item(walked, at)
        return at

    return walk


def _maybe(inner: Step) -> Step:
    def walk(walked: _Walk, at: int) -> int:
        if at >= walked.end:
            raise BadRequest("a request that ends early")
        return at + 1 if walked.data[at] == 0xFF else inner(walked, at + 1)

    return walk


def _tags(known: dict[int, Step]) -> Step:
    def walk(walked: _Walk, at: int) -> int:
        count, at = read_uvarint(walked.data, at)
        if count > walked.end - at:
            raise BadRequest(f"{count} tags in {walked.end - at} bytes")
        for _ in range(count):
            tag, at = read_uvarint(walked.data, at)
            size, at = read_uvarint(walked.data, at)
            if at + size > walked.end:
                raise BadRequest("a tagged field that is longer than the request")
            if tag in known and known[tag](walked, at) != at + size:
                raise BadRequest("a tagged field that is not as long as it says")
            at += size
        return at

    return walk
