"""This module writes the frames that a producer sends most, and reads their answers: no IO.

A send repeats almost all of its header. A `SendTemplate` has it ready for one queue, so that a
frame is a few bytes packed and joined. The fields stand in the order in which `remoting_fast.py`
reads them quickly on the other side; Apache's broker takes them in any order. An answer is not
taken apart before somebody asks for what is in it. A test holds all of this to `remoting.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
_OPAQUE_AT: Final = 13
# An answer without the length in front: form, code, number, flag.
ANSWER_MARK: Final = Struct(">BxxxhxxxiI")
ANSWER_BYTES_MIN: Final = 25
_PYTHON: Final = remoting.LANGUAGES.index(remoting.LANGUAGE)
_TIME_DIGITS: Final = 13
_U32: Final = Struct(">I")
_BATCH_HEAD: Final = Struct(">iiiii")
_I16: Final = Struct(">h")
BATCH_HEAD_BYTES: Final = 22
_KEY_TAIL_BYTES: Final = 5  # the number of an id, and what ends the property
KEY_BYTES: Final = len(b"UNIQ_KEY\x01\x02") + 32
KEYED_BYTES: Final = BATCH_HEAD_BYTES + KEY_BYTES  # of a message, beside its body and its tail
# The head of a stored message with IPv4 addresses, as `records.py` draws it, up to its body.
ENTRY_HEAD: Final = Struct(">iIIiiqqiq8sq8siqi")

SEND: Final = int(RequestCode.SEND_MESSAGE_V2)
SEND_BATCH: Final = int(RequestCode.SEND_BATCH_MESSAGE)
SEND_REPLY: Final = int(RequestCode.SEND_REPLY_MESSAGE_V2)


def _field(name: bytes, value: bytes) -> bytes:
    return len(name).to_bytes(2, "big") + name + _U32.pack(len(value)) + value


class SendTemplate:
    """The header of sends of one producer to one queue with one set of flags."""

    __slots__ = ("_after", "_before", "_code", "_fields_bytes", "_flag", "_shape", "_shape_of")

    def __init__(
        self,
        group: str,
        topic: str,
        queue_id: int,
        broker_name: str,
        *,
        code: int = SEND,
        sys_flag: int = 0,
        message_flag: int = 0,
        default_topic: str = "TBW102",
        default_queue_count: int = 4,
    ) -> None:
        self._code = code
        self._flag = _field(b"h", b"%d" % message_flag) + b"\0\1i"
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
        # Between the time and what follows: the message's flag, and the properties' size.
        between = len(self._flag) + 4
        self._fields_bytes = len(self._before) + _TIME_DIGITS + between + len(self._after)
        self._shape_of = (-1, -1)
        self._shape = (b"", b"", b"")

    def frame(self, opaque: int, flag: int, born_ms: int, properties: bytes, body: Buffer) -> bytes:
        """The whole frame; `born_ms` has thirteen digits."""
        sizes = (len(properties), len(body))
        if flag or sizes != self._shape_of:
            shape = self._shaped(flag, *sizes)
            if not flag:
                self._shape, self._shape_of = shape, sizes
        else:
            shape = self._shape  # most messages are as long as the one before
        front, middle, end = shape
        return b"".join(
            (
                front,
                opaque.to_bytes(4, "big"),
                middle,
                b"%d" % born_ms,
                end,
                properties,
                self._after,
                body,
            )
        )

    def _shaped(
        self, flag: int, properties_bytes: int, body_bytes: int
    ) -> tuple[bytes, bytes, bytes]:
        """What is before the number, between it and the time, between that and the properties."""
        fields_bytes = self._fields_bytes + properties_bytes
        header_bytes = _HEADER_BYTES + fields_bytes
        head = _HEAD.pack(
            4 + header_bytes + body_bytes,
            BINARY << 24 | header_bytes,
            self._code,
            _PYTHON,
            VERSION,
            0,
            flag,
            0,
            fields_bytes,
        )
        front, middle = head[:_OPAQUE_AT], head[_OPAQUE_AT + 4 :] + self._before
        return front, middle, self._flag + _U32.pack(properties_bytes)


def keyed_batch(
    stamp: bytes,
    first: int,
    bodies: Sequence[Buffer],
    tails: Sequence[bytes],
    flags: Mapping[int, int],
) -> bytes:
    """A batch's body. Each message has the property `stamp` + number, numbers from `first` on.

    `tails` are the properties behind that one; `flags` those of the messages that have one.
    """
    parts: list[Buffer] = []
    tail, body_bytes, flag = b"", -1, 0  # of the message before: most are alike
    head = middle = end = b""
    number = first
    for index, body in enumerate(bodies):
        own_flag = flags.get(index, 0) if flags else 0
        if len(body) != body_bytes or tails[index] is not tail or own_flag != flag:
            body_bytes, tail, flag = len(body), tails[index], own_flag
            properties_bytes = len(stamp) + _KEY_TAIL_BYTES + len(tail)
            size = BATCH_HEAD_BYTES + body_bytes + properties_bytes
            head = _BATCH_HEAD.pack(size, 0, 0, flag, body_bytes)
            middle = _I16.pack(properties_bytes) + stamp
            end = b"\x02" + tail
        parts += (head, body, middle, b"%04X" % (number & 0xFFFF), end)
        number += 1
    return b"".join(parts)


# ---------------------------------------------------------------------------------------- answers


def answer_mark(frame: Frame) -> tuple[int, int] | None:
    """(number, code) of an answer with a binary header; None of anything else."""
    if len(frame) < ANSWER_BYTES_MIN:
        return None
    form, code, opaque, flag = ANSWER_MARK.unpack_from(frame)
    if form != BINARY or flag != FLAG_ANSWER:
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
