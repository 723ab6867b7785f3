"""This module turns RocketMQ's frames into commands and back: header, fields and body, no meaning.

A frame, after the length that `framing.py` takes off:

    u8  serialization     0 JSON, 1 binary (RocketMQ calls it ROCKETMQ)
    u24 header size
    header
    body                  the rest

A JSON header is an object: code, flag, opaque, and if there is something to say language, version,
remark, extFields. A binary header is

    i16 code              200050 arrives as 3442: only the low 16 bits fit
    u8  language
    i16 version
    i32 opaque            chosen by the caller, copied into the answer
    i32 flag              bit 0: this is an answer; bit 1: no answer is wanted
    i32 remark size, remark
    i32 fields size, fields: i16 key size, key, i32 value size, value; repeated

The fields ("ext fields") are text on both sides: Go refuses an answer with a number among them. An
empty value in a binary header counts as no value, because RocketMQ reads it as null.

An answer goes out in the serialization of its request: every client decides by the mark of each
frame. What cannot be a header raises ProtocolError: its opaque is unknown, so nobody could be
told, and the connection has to be closed. This module does no IO and keeps no state but a cache
of pieces of headers that producers send with every message.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from struct import Struct
from struct import error as struct_error
from typing import Any, Final

import orjson

from sluice.errors import ProtocolError
from sluice.protocol.framing import Frame
from sluice.protocol.remoting_codes import RequestCode

JSON: Final = 0
BINARY: Final = 1

FLAG_ANSWER: Final = 1
FLAG_ONEWAY: Final = 2

# The version that answers carry is the ordinal of 5.5.0: clients choose features by it.
VERSION: Final = 513
LANGUAGE: Final = "PYTHON"
LANGUAGES: Final = (
    *("JAVA", "CPP", "DOTNET", "PYTHON", "DELPHI", "ERLANG", "RUBY"),
    *("OTHER", "HTTP", "GO", "PHP", "OMS", "RUST", "NODE_JS"),
)
_OTHER: Final = "OTHER"
_LANGUAGE_CODES: Final = {name: code for code, name in enumerate(LANGUAGES)}

# The largest header a client needs is a send with 32767 bytes of properties. Written as JSON each
# of them may take six (a control character, or a part of a name that is not ASCII). 256 KiB holds
# that, with names and signature. Answers may be larger: a batch lists 33 bytes for each message;
# who reads answers passes another limit.
HEADER_BYTES_MAX: Final = 256 * 1024
# RocketMQ's requests have at most 20 fields. The parser needs up to 30 times the bytes of a header
# for a moment; commands that are kept are bounded by this.
FIELDS_MAX: Final = 256

# Codes that do not fit into the 16 bits of a binary header, by what arrives of them. Apache's
# broker knows none of these; no other code has the same low bits, so they can be told apart.
LOW_16_ALIASES: Final = {
    code & 0xFFFF: code
    for code in vars(RequestCode).values()
    if isinstance(code, int) and code > 0x7FFF
}

_U32: Final = Struct(">I")
_I32: Final = Struct(">i")
_FOUR_I32: Final = Struct(">iiii")
_BINARY_HEAD: Final = Struct(">hBhiiI")  # up to and with the size of the remark
_FRAME_HEAD: Final = Struct(">iI")
_FIXED_BYTES: Final = 21
_SIZES: Final = tuple(map(chr, range(128)))
_LARGE_FRAME_BYTES: Final = 16 * 1024  # from here on a view of the body is cheaper than a copy


@dataclass(slots=True)
class RemotingCommand:
    """One request or answer. `body` is never shared with a buffer that is written again."""

    code: int
    opaque: int
    flag: int = 0
    ext: dict[str, str] = field(default_factory=dict)
    body: Frame = b""
    remark: str | None = None
    language: str = LANGUAGE
    version: int = VERSION
    serialization: int = JSON

    @property
    def is_answer(self) -> bool:
        return self.flag & FLAG_ANSWER != 0

    @property
    def is_oneway(self) -> bool:
        """A request that must get no answer, not even an error."""
        return self.flag & FLAG_ONEWAY != 0


# ---------------------------------------------------------------------------------------- reading


def decode(frame: Frame, header_bytes_max: int = HEADER_BYTES_MAX) -> RemotingCommand:
    """The command in a frame (without the length in front of it)."""
    if len(frame) < 4:
        raise ProtocolError(f"a frame of {len(frame)} bytes has no room for a header's size")
    (mark,) = _U32.unpack_from(frame)
    header_bytes = mark & 0xFFFFFF
    body_at = 4 + header_bytes
    if body_at > len(frame):
        raise ProtocolError(f"a header of {header_bytes} bytes does not fit into its frame")
    if header_bytes > header_bytes_max:
        raise ProtocolError(f"a header of {header_bytes} bytes is over {header_bytes_max}")
    body = frame[body_at:] if len(frame) < _LARGE_FRAME_BYTES else memoryview(frame)[body_at:]
    # A frame above some size is a view; its header is small and worth a copy.
    header = bytes(frame[4:body_at])
    serialization = mark >> 24
    if serialization == BINARY:
        return _decode_binary(header, body)
    if serialization == JSON:
        return _decode_json(header, body)
    raise ProtocolError(f"serialization {serialization} is neither 0 (JSON) nor 1 (binary)")


def _decode_json(header: bytes, body: Frame) -> RemotingCommand:
    try:
        members = orjson.loads(header)
    except orjson.JSONDecodeError as error:
        raise ProtocolError(f"the header is not JSON: {error}") from None
    try:
        code, opaque, flag = members["code"], members["opaque"], members["flag"]
        version = members["version"]
        language = _LANGUAGE_CODES[members["language"]]
        ext = members["extFields"]
        remark = members.get("remark", "")
        _FOUR_I32.pack(code, opaque, flag, version)  # all four are integers, and fit
        remark.join(ext.values())  # all are text: the cheapest way to make sure
    except (TypeError, KeyError, AttributeError, struct_error):
        return _decode_odd_json(members, body)
    if len(ext) > FIELDS_MAX:
        raise ProtocolError(f"a header with {len(ext)} fields is over {FIELDS_MAX}")
    return RemotingCommand(
        code, opaque, flag, ext, body, remark or None, LANGUAGES[language], version, JSON
    )


def _decode_odd_json(members: Any, body: Frame) -> RemotingCommand:
    """A header that Java reads too: keys are missing, or numbers are text, or text is numbers."""
    if not isinstance(members, dict):
        raise ProtocolError("the header is JSON, but not an object")
    ext = members.get("extFields")
    if ext is None:
        ext = {}
    elif not isinstance(ext, dict):
        raise ProtocolError("the header's extFields is not an object")
    if len(ext) > FIELDS_MAX:
        raise ProtocolError(f"a header with {len(ext)} fields is over {FIELDS_MAX}")
    texts = {key: _text(value) for key, value in ext.items()}
    return RemotingCommand(
        _number(members, "code", None),
        _number(members, "opaque", None),
        _number(members, "flag", 0),
        {key: value for key, value in texts.items() if value is not None},
        body,
        _text(members.get("remark")) or None,
        _known_language(_text(members.get("language"))),
        _number(members, "version", 0),
        JSON,
    )


def _text(value: Any) -> str | None:
    if value is None or isinstance(value, str):
        return value
    return orjson.dumps(value).decode()


def _known_language(name: str | None) -> str:
    if name is None:
        return "JAVA"  # what RocketMQ assumes where none is named
    return name if name in _LANGUAGE_CODES else _OTHER


def _number(members: dict[str, Any], name: str, default: int | None) -> int:
    value = members.get(name, default)
    if isinstance(value, str) and len(value) <= 11 and value.lstrip("-").isdecimal():
        try:
            value = int(value)
        except ValueError:  # two signs
            value = None
    if not isinstance(value, int) or isinstance(value, bool):
        raise ProtocolError(f"the header's {name} is missing or no number")
    if not -0x80000000 <= value <= 0x7FFFFFFF:
        raise ProtocolError(f"the header's {name} does not fit into 32 bits")
    return value


def _decode_binary(header: bytes, body: Frame) -> RemotingCommand:
    try:
        code, language, version, opaque, flag, remark_bytes = _BINARY_HEAD.unpack_from(header)
        fields_at = _FIXED_BYTES + remark_bytes
        (fields_bytes,) = _U32.unpack_from(header, fields_at - 4)
    except struct_error:
        raise ProtocolError("the binary header is cut short") from None
    if fields_at + fields_bytes != len(header):
        raise ProtocolError("the parts of the binary header do not add up to its size")
    ext = walk_fields(header[fields_at:])
    if flag & FLAG_ANSWER == 0 and code in LOW_16_ALIASES:
        code = LOW_16_ALIASES[code]
    remark = None
    if remark_bytes:
        remark = header[_FIXED_BYTES - 4 : fields_at - 4].decode("utf-8", "replace")
    return RemotingCommand(
        code,
        opaque,
        flag,
        ext,
        body,
        remark,
        LANGUAGES[language] if language < len(LANGUAGES) else _OTHER,
        version,
        BINARY,
    )


_names: Final[dict[bytes, str]] = {}  # fields have few names, and each stands in every request
_NAMES_MAX: Final = 512
_NAME_BYTES_MAX: Final = 64


def _name(raw: bytes) -> str:
    name = raw.decode("utf-8", "replace")
    if len(_names) < _NAMES_MAX and len(raw) <= _NAME_BYTES_MAX:
        _names[raw] = name
    return name


def walk_fields(data: bytes) -> dict[str, str]:
    """The fields that `data` consists of, without a byte left over."""
    fields: dict[str, str] = {}
    at = 0
    end = len(data)
    try:
        while at < end:
            key_end = at + 2 + (data[at] << 8 | data[at + 1])
            (size,) = _U32.unpack_from(data, key_end)
            raw = data[at + 2 : key_end]
            begin = key_end + 4
            at = begin + size
            if size:
                key = _names.get(raw) or _name(raw)
                fields[key] = data[begin:at].decode("utf-8", "replace")
    except (IndexError, struct_error):
        raise ProtocolError("a field of the binary header is cut short") from None
    if at != end:
        raise ProtocolError("a field of the binary header is cut short")
    if len(fields) > FIELDS_MAX:
        raise ProtocolError(f"a header with {len(fields)} fields is over {FIELDS_MAX}")
    return fields


# ---------------------------------------------------------------------------------------- writing


def encode(command: RemotingCommand) -> bytes:
    """The whole frame, with its length in front."""
    return b"".join((encode_head(command, len(command.body)), command.body))


def encode_head(command: RemotingCommand, body_bytes: int) -> bytes:
    """Everything of a frame that stands before its body; who sends it sends the body after it."""
    return head(
        command.serialization,
        command.code,
        command.opaque,
        command.flag,
        command.ext,
        command.remark,
        body_bytes,
        command.language,
        command.version,
    )


def answer_head(
    request: RemotingCommand,
    code: int,
    ext: dict[str, str],
    remark: str | None = None,
    body_bytes: int = 0,
) -> bytes:
    """Everything of an answer that stands before its body, in the request's serialization."""
    return head(request.serialization, code, request.opaque, FLAG_ANSWER, ext, remark, body_bytes)


def answer(
    request: RemotingCommand,
    code: int,
    ext: dict[str, str] | None = None,
    remark: str | None = None,
    body: Frame = b"",
) -> bytes:
    """The whole frame of an answer."""
    fields = {} if ext is None else ext
    return b"".join((answer_head(request, code, fields, remark, len(body)), body))


def head(
    serialization: int,
    code: int,
    opaque: int,
    flag: int,
    ext: dict[str, str],
    remark: str | None,
    body_bytes: int,
    language: str = LANGUAGE,
    version: int = VERSION,
) -> bytes:
    """Length, mark and header of a frame whose body has `body_bytes`."""
    if serialization == BINARY:
        header = _binary_header(code, opaque, flag, ext, remark, language, version)
    else:
        # extFields is written even when it is empty: Java reads it without looking whether it is
        # there. Compact, because Go takes parts of JSON apart by hand.
        members = {
            "code": code,
            "extFields": ext,
            "flag": flag,
            "language": language,
            "opaque": opaque,
            "serializeTypeCurrentRPC": "JSON",
            "version": version,
        }
        if remark is not None:
            members["remark"] = remark
        header = orjson.dumps(members)
    header_bytes = len(header)
    assert header_bytes <= 0xFFFFFF, "a header's size has 24 bits"
    mark = serialization << 24 | header_bytes
    return _FRAME_HEAD.pack(4 + header_bytes + body_bytes, mark) + header


def _binary_header(
    code: int,
    opaque: int,
    flag: int,
    ext: dict[str, str],
    remark: str | None,
    language: str,
    version: int,
) -> bytes:
    try:
        # Short ASCII values, as almost all answers have them: sizes below 128 are ASCII as well.
        fields = "".join(
            [f"{_key_part(key)}\0\0\0{_SIZES[len(value)]}{value}" for key, value in ext.items()]
        ).encode("ascii")
    except (IndexError, UnicodeEncodeError):
        parts: list[bytes] = []
        for key, value in ext.items():
            data = value.encode()
            parts += (_key_part(key).encode("latin-1"), _U32.pack(len(data)), data)
        fields = b"".join(parts)
    note = remark.encode() if remark else b""
    low = code & 0xFFFF
    fixed = _BINARY_HEAD.pack(
        low - 0x10000 if low > 0x7FFF else low,
        _LANGUAGE_CODES[language],
        version,
        opaque,
        flag,
        len(note),
    )
    return b"".join((fixed, note, _U32.pack(len(fields)), fields))


@lru_cache(maxsize=1024)
def _key_part(key: str) -> str:
    """A key with its size in front, one character for each byte."""
    data = key.encode()
    assert len(data) <= 0x7FFF, "a key's size has 15 bits"
    return (len(data).to_bytes(2, "big") + data).decode("latin-1")
