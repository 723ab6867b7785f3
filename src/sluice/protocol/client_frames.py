"""This module writes the frames that a producer sends most, and reads their answers: no IO.

A send repeats almost all of its header. A `SendTemplate` has it ready for one queue, so that a
frame is a few bytes packed and joined. The fields stand in the order in which `remoting_fast.py`
reads them quickly on the other side; Apache's broker takes them in any order. An answer is not
taken apart before somebody asks for what is in it. A test holds all of this to `remoting.py`.
"""

from __future__ import annotations

from struct import Struct
from typing import Final

from sluice.errors import ProtocolError
from sluice.model import Buffer
from sluice.protocol import remoting
from sluice.protocol.framing import Frame
from sluice.protocol.remoting import BINARY, FLAG_ANSWER, VERSION
from sluice.protocol.remoting_codes import RequestCode

_HEAD: Final = Struct(">iIhBhiiII")  # up to and with the size of the fields
_HEADER_BYTES: Final = 21  # of a header without its fields
_ANSWER: Final = Struct(">IhBhiiII")  # an answer without the length in front
ANSWER_BYTES_MIN: Final = _ANSWER.size
_BINARY_ANSWER: Final = BINARY
_PYTHON: Final = remoting.LANGUAGES.index(remoting.LANGUAGE)
_TIME_DIGITS: Final = 13
_U32: Final = Struct(">I")
_BATCH_HEAD: Final = Struct(">iiiii")
_I16: Final = Struct(">h")
BATCH_HEAD_BYTES: Final = 22
# The head of a stored message with IPv4 addresses, as `records.py` draws it, up to its body.
ENTRY_HEAD: Final = Struct(">iIIiiqqiq8sq8siqi")

SEND: Final = int(RequestCode.SEND_MESSAGE_V2)
SEND_BATCH: Final = int(RequestCode.SEND_BATCH_MESSAGE)
SEND_REPLY: Final = int(RequestCode.SEND_REPLY_MESSAGE_V2)


def _field(name: bytes, value: bytes) -> bytes:
    return len(name).to_bytes(2, "big") + name + _U32.pack(len(value)) + value


class SendTemplate:
    """The header of sends of one producer to one queue with one set of flags."""

    __slots__ = ("_after", "_before", "_code", "_fields_bytes")

    def __init__(
        self,
        group: str,
        topic: str,
        queue_id: int,
        broker_name: str,
        *,
        code: int = SEND,
        sys_flag: int = 0,
        default_topic: str = "TBW102",
        default_queue_count: int = 4,
    ) -> None:
        self._code = code
        fields = (
            (b"a", group.encode()),
            (b"b", topic.encode()),
            (b"c", default_topic.encode()),
            (b"d", b"%d" % default_queue_count),
            (b"e", b"%d" % queue_id),
            (b"f", b"%d" % sys_flag),
        )
        time_mark = b"\0\1g" + _U32.pack(_TIME_DIGITS)
        self._before = b"".join(_field(*each) for each in fields) + time_mark
        tail = (
            (b"j", b"0"),
            (b"k", b"false"),
            (b"m", b"true" if code == SEND_BATCH else b"false"),
            (b"n", broker_name.encode()),
        )
        self._after = b"".join(_field(*each) for each in tail)
        # Between the time and what follows: the producer's flag, 0, and the properties' size.
        self._fields_bytes = len(self._before) + _TIME_DIGITS + len(_FLAG) + 4 + len(self._after)

    def frame(self, opaque: int, flag: int, born_ms: int, properties: bytes, body: Buffer) -> bytes:
        """The whole frame; `born_ms` has thirteen digits."""
        properties_bytes = len(properties)
        fields_bytes = self._fields_bytes + properties_bytes
        header_bytes = _HEADER_BYTES + fields_bytes
        return b"".join(
            (
                _HEAD.pack(
                    4 + header_bytes + len(body),
                    BINARY << 24 | header_bytes,
                    self._code,
                    _PYTHON,
                    VERSION,
                    opaque,
                    flag,
                    0,
                    fields_bytes,
                ),
                self._before,
                b"%d" % born_ms,
                _FLAG,
                _U32.pack(properties_bytes),
                properties,
                self._after,
                body,
            )
        )


_FLAG: Final = _field(b"h", b"0") + b"\0\1i"


def batch_parts(flag: int, body: Buffer, properties: bytes) -> tuple[Buffer, ...]:
    """One message of a batch's body, to be joined with the others."""
    body_bytes, properties_bytes = len(body), len(properties)
    size = BATCH_HEAD_BYTES + body_bytes + properties_bytes
    head = _BATCH_HEAD.pack(size, 0, 0, flag, body_bytes)
    return head, body, _I16.pack(properties_bytes), properties


# ---------------------------------------------------------------------------------------- answers


def answer_mark(frame: Frame) -> tuple[int, int] | None:
    """(number, code) of an answer with a binary header; None of anything else."""
    if len(frame) < ANSWER_BYTES_MIN:
        return None
    mark, code, _, _, opaque, flag, _, _ = _ANSWER.unpack_from(frame)
    if mark >> 24 != _BINARY_ANSWER or flag != FLAG_ANSWER:
        return None
    return opaque, code


class SentFields:
    """The fields of the answer to a send, read when they are asked for."""

    __slots__ = ("_ext", "_frame")

    def __init__(self, frame: Frame | None, ext: dict[str, str] | None = None) -> None:
        self._frame = frame
        self._ext = ext

    @property
    def ext(self) -> dict[str, str]:
        if self._ext is None:
            assert self._frame is not None
            self._ext = remoting.decode(self._frame, len(self._frame)).ext
            self._frame = None
        return self._ext

    def number(self, name: str) -> int:
        text = self.ext.get(name, "")
        if not text.lstrip("-").isdecimal() or len(text) > 20:
            raise ProtocolError(f"the answer to a send has no {name}")
        return int(text)
