"""This module splits the body of a batch into its messages, and reads message ids and addresses.

A batch (request 320) is, repeated for each message:

     0  i32 size          of this message, with this field
     4  i32 magic         0; not looked at
     8  i32 body CRC      0; not looked at
    12  i32 flag          the producer's own
    16  i32 body size, body
        i16 properties size, properties

A message id is the store's address (4 or 16 bytes, and a 32-bit port) and the message's position
in its log, in hex. This module does no IO.
"""

from __future__ import annotations

from collections.abc import Iterable
from ipaddress import ip_address
from struct import Struct
from typing import Final

from sluice.errors import MessageIllegal, RequestInvalid
from sluice.model import Buffer

# The store counts the messages of a batch in 16 bits.
BATCH_COUNT_MAX: Final = 32767

_HEAD: Final = Struct(">iiiii")
_HEAD_READ: Final = Struct(">i8xii")
_HEAD_BYTES: Final = 20
_I16: Final = Struct(">h")
_MESSAGE_BYTES_MIN: Final = 22
_PROPERTIES_BYTES_MAX: Final = 32767
_ID_BYTES: Final = (16, 28)  # with an IPv4 and an IPv6 address
_PORT_MAX: Final = 0xFFFF


# Flag, body (a view of the batch's) and properties of one message.
BatchMessage = tuple[int, memoryview, bytes]


def split_batch(body: Buffer, count_max: int = BATCH_COUNT_MAX) -> list[BatchMessage]:
    """The messages of a batch, in order. Raises MessageIllegal unless all sizes add up."""
    view = memoryview(body)
    messages: list[BatchMessage] = []
    at = 0
    end = len(view)
    while at < end:
        if end - at < _MESSAGE_BYTES_MIN:
            raise MessageIllegal("the batch is cut short")
        size, flag, body_bytes = _HEAD_READ.unpack_from(view, at)
        body_at = at + _HEAD_BYTES
        properties_at = body_at + body_bytes + 2
        at += size
        if body_bytes < 0 or not properties_at <= at <= end:
            raise MessageIllegal("a message of the batch does not fit into its size")
        (properties_bytes,) = _I16.unpack_from(view, properties_at - 2)
        if properties_at + properties_bytes != at:
            raise MessageIllegal("the parts of a batch's message do not add up to its size")
        body_view, properties = view[body_at : properties_at - 2], view[properties_at:at].tobytes()
        messages.append((flag, body_view, properties))
        if len(messages) > count_max:
            raise MessageIllegal(f"a batch holds at most {count_max} messages")
    if not messages:
        raise MessageIllegal("the batch holds no message")
    return messages


def join_batch(messages: Iterable[tuple[int, Buffer, bytes]]) -> bytes:
    """The body of a batch out of (flag, body, properties)."""
    parts: list[Buffer] = []
    for flag, body, properties in messages:
        if len(properties) > _PROPERTIES_BYTES_MAX:
            raise MessageIllegal(f"properties take at most {_PROPERTIES_BYTES_MAX} bytes")
        size = _MESSAGE_BYTES_MIN + len(body) + len(properties)
        parts += (_HEAD.pack(size, 0, 0, flag, len(body)), body)
        parts += (_I16.pack(len(properties)), properties)
    return b"".join(parts)


# ----------------------------------------------------------------------------------- ids, addresses


def parse_message_id(text: str) -> tuple[bytes, int]:
    """(the store's address, the position in its log) of `model.message_id`."""
    try:
        data = bytes.fromhex(text)
    except ValueError:
        data = b""
    # fromhex takes blanks between bytes; an id has none.
    if len(data) not in _ID_BYTES or len(text) != 2 * len(data):
        raise RequestInvalid("a message id is 32 or 56 hexadecimal digits")
    return data[:-8], int.from_bytes(data[-8:], "big", signed=True)


def pack_address(host: str, port: int) -> bytes:
    """An IP address and a port as messages carry them: 4 or 16 bytes, then a 32-bit port."""
    assert 0 <= port <= _PORT_MAX
    return ip_address(host).packed + port.to_bytes(4, "big")


def address_text(packed: bytes) -> str:
    """`host:port`, or `[host]:port` of an IPv6 address."""
    host = ip_address(packed[:-4])
    port = int.from_bytes(packed[-4:], "big")
    return f"{host}:{port}" if host.version == 4 else f"[{host}]:{port}"
