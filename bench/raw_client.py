"""This module speaks to a broker with many requests under way on one connection.

A benchmark that wants the broker to be busy, and not its client, needs frames that cost next to
nothing: they are made from templates, and of an answer only what is asked for is read. Written
apart from Sluice's own codec, as `peers.remoting` is.

    i32 size of what follows | u8 form, u24 header size | header | body

The form is 0 for a header in JSON, 1 for a binary one:

    i16 code, u8 language, i16 version, i32 opaque, i32 flag, i32 size + remark, i32 size + fields
"""

import json
import socket
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from typing import NamedTuple

from bench.harness import Failed
from peers.errors import PeerFailed

SEND_MESSAGE_V2 = 310
PULL_MESSAGE = 11
SEND_BACK = 36
END_TRANSACTION = 37
POP_MESSAGE = 200_050
ACK_MESSAGE = 200_051

SUCCESS = 0
PULL_NOT_FOUND = 19
PULL_RETRY = 20
POLLING_TIMEOUT = 210

READ_BYTES = 1 << 18
FRAME_BYTES_MAX = 1 << 24
TIMEOUT_S = 60.0
# The highest code that fits into a binary header.
BINARY_CODE_MAX = 32_767
BINARY = 1
OTHER_LANGUAGE = 7
_SIZES = struct.Struct(">ii")
_FIXED = struct.Struct(">hbhii")
_OPAQUE_AT = 4 + 4 + 5
_INT = struct.Struct(">i")


class Refused(PeerFailed):
    """The broker answered that it will not."""


class Answer(NamedTuple):
    """What a broker answered."""

    code: int
    opaque: int
    remark: str
    fields: dict[str, str]
    body: bytes

    def wanted(self, *codes: int) -> "Answer":
        """Itself, if its code is one of these, or else 0; Refused otherwise."""
        if self.code not in (codes or (SUCCESS,)):
            raise Refused(f"code {self.code}: {self.remark}")
        return self


def encode(code: int, opaque: int, fields: Mapping[str, object], body: bytes = b"") -> bytes:
    """One request."""
    texts = {name: str(value) for name, value in fields.items()}
    header, form = (
        (_binary_header(code, opaque, texts), BINARY)
        if code <= BINARY_CODE_MAX
        else (_json_header(code, opaque, texts), 0)
    )
    return _SIZES.pack(4 + len(header) + len(body), form << 24 | len(header)) + header + body


def _binary_header(code: int, opaque: int, fields: Mapping[str, str]) -> bytes:
    packed = b""
    for name, text in fields.items():
        value = text.encode()
        packed += struct.pack(">h", len(name)) + name.encode() + _INT.pack(len(value)) + value
    fixed = _FIXED.pack(code, OTHER_LANGUAGE, 0, opaque, 0)
    return fixed + _INT.pack(0) + _INT.pack(len(packed)) + packed


def _json_header(code: int, opaque: int, fields: Mapping[str, str]) -> bytes:
    header = {
        "code": code,
        "language": "OTHER",
        "version": 0,
        "opaque": opaque,
        "flag": 0,
        "extFields": fields,
    }
    return json.dumps(header).encode()


def decode(frame: bytes) -> Answer:
    """An answer, from behind its first size."""
    (word,) = _INT.unpack_from(frame)
    body_at = 4 + (word & 0xFFFFFF)
    header = frame[4:body_at]
    if word >> 24 != BINARY:
        said = json.loads(header)
        fields = said.get("extFields") or {}
        remark = said.get("remark") or ""
        return Answer(said["code"], said["opaque"], remark, fields, frame[body_at:])
    code, _, _, opaque, _ = _FIXED.unpack_from(header)
    (remark_size,) = _INT.unpack_from(header, _FIXED.size)
    at = _FIXED.size + 4
    remark = header[at : at + remark_size].decode()
    return Answer(code, opaque, remark, _fields(header[at + remark_size + 4 :]), frame[body_at:])


def _fields(packed: bytes) -> dict[str, str]:
    fields, at = {}, 0
    while at < len(packed):
        name_end = at + 2 + int.from_bytes(packed[at : at + 2], "big")
        value_end = name_end + 4 + int.from_bytes(packed[name_end : name_end + 4], "big")
        fields[packed[at + 2 : name_end].decode()] = packed[name_end + 4 : value_end].decode()
        at = value_end
    return fields


class Template:
    """A request of which only the opaque and some texts of fixed length change.

    The texts stand in the fields as marks, which are replaced by what `frame` is given.
    """

    def __init__(self, frame: bytes, marks: Iterable[bytes]) -> None:
        self._pieces = [frame[:_OPAQUE_AT]]
        self._sizes = [4]
        rest = frame[_OPAQUE_AT + 4 :]
        for mark in marks:
            before, found, rest = rest.partition(mark)
            assert found, mark
            self._pieces.append(before)
            self._sizes.append(len(mark))
        self._pieces.append(rest)

    def frame(self, opaque: int, *texts: bytes) -> bytes:
        filled = (opaque.to_bytes(4, "big"), *texts)
        assert [len(text) for text in filled] == self._sizes, texts
        parts = [b""] * (2 * len(filled) + 1)
        parts[::2] = self._pieces
        parts[1::2] = filled
        return b"".join(parts)


class Line:
    """One connection to a broker on loopback."""

    def __init__(self, port: int, *, timeout_s: float = TIMEOUT_S) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port), timeout=timeout_s)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._rest = b""

    def __enter__(self) -> "Line":
        return self

    def __exit__(self, *_error: object) -> None:
        self._socket.close()

    def send(self, frames: bytes) -> None:
        self._socket.sendall(frames)

    def receive(self) -> Iterator[bytes]:
        """All whole answers that have come, one at least, from behind their first size."""
        frames, self._rest = split(self._rest)
        while not frames:
            try:
                piece = self._socket.recv(READ_BYTES)
            except TimeoutError as error:
                raise Failed("the broker does not answer any more") from error
            if not piece:
                raise Failed("the broker closed the connection")
            frames, self._rest = split(self._rest + piece)
        yield from frames

    def ask(self, code: int, fields: Mapping[str, object], body: bytes = b"") -> Answer:
        """One request while nothing else is under way."""
        self.send(encode(code, 1, fields, body))
        return decode(next(iter(self.receive())))


def split(received: bytes) -> tuple[list[bytes], bytes]:
    """The whole frames at the beginning, without their sizes, and what is left over."""
    frames, at = [], 0
    while at + 4 <= len(received):
        (size,) = _INT.unpack_from(received, at)
        if not 4 <= size <= FRAME_BYTES_MAX:
            raise Failed(f"an answer of {size} bytes")
        if at + 4 + size > len(received):
            break
        frames.append(received[at + 4 : at + 4 + size])
        at += 4 + size
    return frames, received[at:]


def is_success(frame: bytes) -> bool:
    """Whether a binary answer says that the request was done."""
    return frame[0] == BINARY and frame[4] == 0 and frame[5] == 0


def pump(
    line: Line,
    frames: Iterator[bytes],
    *,
    window: int,
    answered: Callable[[bytes], object] | None = None,
) -> int:
    """Send everything with so many requests under way; how many there were.

    Without `answered`, which looks at each answer, all must be successes, or it is Refused.
    """
    waiting = done = 0
    while True:
        batch = list(islice(frames, window - waiting))
        if batch:
            line.send(b"".join(batch))
            waiting += len(batch)
        if not waiting:
            return done
        for frame in line.receive():
            waiting -= 1
            done += 1
            if answered is not None:
                answered(frame)
            elif not is_success(frame):
                decode(frame).wanted()
