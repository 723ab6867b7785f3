"""Commands are what RocketMQ's own classes write, in both serializations."""

from __future__ import annotations

import json
from typing import Any

import orjson
import pytest

from sluice.errors import ProtocolError
from sluice.protocol import remoting
from sluice.protocol.framing import FrameReader, frame_of
from sluice.protocol.remoting import (
    BINARY,
    FIELDS_MAX,
    FLAG_ANSWER,
    FLAG_ONEWAY,
    HEADER_BYTES_MAX,
    JSON,
    LOW_16_ALIASES,
    RemotingCommand,
    answer,
    answer_head,
    decode,
    encode,
)
from sluice.protocol.remoting_codes import RequestCode
from sluice.protocol.remoting_schemas import REQUESTS, Field
from tests.unit.protocol.codec import GOLDEN, assert_codec

SAMPLES = {"s": "v-{}", "i": "7", "l": "1794772393024", "b": "true"}
PROPERTIES = "KEYS\x01key1 key2\x02UNIQ_KEY\x01FD00\x02名\x01值 \x02"


def payload(serialization: int, header: bytes, body: bytes = b"") -> bytes:
    return (serialization << 24 | len(header)).to_bytes(4, "big") + header + body


def sample(fields: tuple[Field, ...]) -> dict[str, str]:
    return {field.name: SAMPLES[field.kind].format(field.name) for field in fields}


def golden_headers() -> list[tuple[str, int, bytes, bytes]]:
    """(class, code, JSON, binary) as the header classes of RocketMQ 5.5.0 wrote them."""
    lines = (GOLDEN / "rocketmq-5.5.0-headers.txt").read_text(encoding="utf-8").splitlines()
    rows = []
    for name_line, text, digits in zip(lines[::3], lines[1::3], lines[2::3], strict=True):
        name, code = name_line.split()
        rows.append((name, int(code), text.strip().encode(), bytes.fromhex(digits)))
    return rows


@pytest.mark.parametrize("row", golden_headers(), ids=lambda row: row[0])
def test_headers_of_the_java_classes(row: tuple[str, int, bytes, bytes]) -> None:
    _, code, text, data = row
    ext = orjson.loads(text).get("extFields", {})
    expected = RemotingCommand(code, 42, 0, ext, b"body", None, "JAVA", 513)
    assert_codec(frame_of(payload(JSON, text, b"body")), expected)
    expected.serialization = BINARY
    assert_codec(frame_of(payload(BINARY, data, b"body")), expected)
    schema = {field.name: field for field in REQUESTS[code].request}
    assert set(ext) <= set(schema) | {"lo", "ns", "nsd", "bname", "oway"}
    assert {name for name, field in schema.items() if field.required} <= set(ext)


@pytest.mark.parametrize("code", REQUESTS)
def test_every_request_code(code: int) -> None:
    schema = REQUESTS[code]
    for serialization in (JSON, BINARY):
        for body in (b"", b"\x00body\xff"):
            request = RemotingCommand(code, -7, 0, sample(schema.request), body)
            request.serialization = serialization
            assert_codec(encode(request), request)
            reply = RemotingCommand(0, -7, FLAG_ANSWER, sample(schema.response), body, "remark")
            reply.serialization = serialization
            assert_codec(answer(request, 0, reply.ext, "remark", body), reply)
            head = answer_head(request, 0, reply.ext, "remark", len(body))
            assert head + body == encode(reply)


def test_vectors_of_captured_headers() -> None:
    route = bytes.fromhex(
        "0069 00 0201 00000000 00000000 00000000 000000130005 746f706963 00000008 4c6162546f706963"
    )
    heartbeat = bytes.fromhex("0022 00 0201 00000003 00000000 00000000 00000000")
    assert_codec(
        frame_of(payload(BINARY, route)),
        RemotingCommand(105, 0, 0, {"topic": "LabTopic"}, b"", None, "JAVA", 513, BINARY),
    )
    assert_codec(
        frame_of(payload(BINARY, heartbeat, b"{}")),
        RemotingCommand(34, 3, 0, {}, b"{}", None, "JAVA", 513, BINARY),
    )
    command = decode(payload(BINARY, route))
    assert encode(command) == frame_of(payload(BINARY, route))


def test_what_go_sends() -> None:
    header = (
        b'{"code":34,"language":"GO","version":317,"opaque":1,"flag":0,"remark":"","extFields":{}}'
    )
    expected = RemotingCommand(34, 1, 0, {}, b"", None, "GO", 317)
    assert_codec(frame_of(payload(JSON, header)), expected)


@pytest.mark.parametrize(
    ("header", "expected"),
    [
        ({"code": 10, "opaque": 5}, RemotingCommand(10, 5, 0, {}, b"", None, "JAVA", 0)),
        (
            {"code": "10", "opaque": "-5", "flag": "2", "version": "401", "language": "KLINGON"},
            RemotingCommand(10, -5, 2, {}, b"", None, "OTHER", 401),
        ),
        (
            {"code": 1, "opaque": 2, "flag": 0, "extFields": {"a": 1, "b": True, "c": None}},
            RemotingCommand(1, 2, 0, {"a": "1", "b": "true"}, b"", None, "JAVA", 0),
        ),
        (
            {"code": 1, "opaque": 2, "extFields": {"a": {"x": [1]}}, "remark": 7, "more": []},
            RemotingCommand(1, 2, 0, {"a": '{"x":[1]}'}, b"", "7", "JAVA", 0),
        ),
        (
            {"code": 1, "opaque": 2, "extFields": None, "language": ["JAVA"]},
            RemotingCommand(1, 2, 0, {}, b"", None, "OTHER", 0),
        ),
    ],
)
def test_odd_json_is_read_as_java_reads_it(header: Any, expected: RemotingCommand) -> None:
    assert decode(payload(JSON, orjson.dumps(header))) == expected


WHOLE = {"code": 10, "opaque": 5, "flag": 0, "version": 513, "language": "JAVA", "extFields": {}}


@pytest.mark.parametrize("name", ["code", "opaque", "flag", "version"])
def test_each_number_of_a_whole_json_header_is_checked(name: str) -> None:
    bad: list[Any] = [1 << 31, -(1 << 31) - 1, 1 << 70, 1.5, "x", [], {}]
    for value in bad:
        with pytest.raises(ProtocolError, match=name):
            decode(payload(JSON, json.dumps(WHOLE | {name: value}).encode()))
    for value in ((1 << 31) - 1, -(1 << 31)):
        command = decode(payload(JSON, orjson.dumps(WHOLE | {name: value})))
        assert getattr(command, name) == value
    command = decode(payload(JSON, orjson.dumps(WHOLE | {name: "77"})))
    assert getattr(command, name) == 77


def test_each_value_of_a_whole_json_header_becomes_text() -> None:
    fields = {"a": 1, "b": "two", "c": None, "d": False, "e": 1.5}
    command = decode(payload(JSON, orjson.dumps(WHOLE | {"extFields": fields, "remark": 9})))
    assert command.ext == {"a": "1", "b": "two", "d": "false", "e": "1.5"}
    assert command.remark == "9"


@pytest.mark.parametrize(
    "header",
    [
        b"",
        b"{",
        b"[]",
        b"1",
        b"null",
        b'"code"',
        b"\xff\xfe",
        b'{"opaque":1}',
        b'{"code":1}',
        b'{"code":1.5,"opaque":1}',
        b'{"code":true,"opaque":1}',
        b'{"code":"--1","opaque":1}',
        b'{"code":"","opaque":1}',
        b'{"code":2147483648,"opaque":1}',
        b'{"code":1,"opaque":99999999999999999999999999}',
        b'{"code":1,"opaque":1,"flag":[]}',
        b'{"code":1,"opaque":1,"extFields":[]}',
        b'{"code":1,"opaque":1,"extFields":"x"}',
        b'{"code":1,"opaque":' + b"9" * 5000 + b"}",
        b'{"code":1,"opaque":"' + b"9" * 5000 + b'"}',
        b'{"a":' * 5000,
        b"[" * 100_000,
        orjson.dumps({"code": 1, "opaque": 1, "extFields": {str(n): "" for n in range(257)}}),
        orjson.dumps({"code": 1, "opaque": 1, "extFields": {str(n): 1 for n in range(257)}}),
    ],
    ids=lambda header: header[:40],
)
def test_json_that_is_no_header_is_refused(header: bytes) -> None:
    with pytest.raises(ProtocolError):
        decode(payload(JSON, header))


def binary_header(**change: Any) -> bytes:
    """A binary header of code 11 with one field, or with parts of it replaced."""
    parts = {
        "fixed": bytes.fromhex("000b 00 0201 00000001 00000000"),
        "remark_size": b"\0\0\0\0",
        "size": b"\0\0\0\x09",
        "fields": b"\0\1a\0\0\0\2bc",
    }
    return b"".join((parts | change).values())


def test_the_binary_header_that_the_bad_ones_are_made_of_is_good() -> None:
    assert decode(payload(BINARY, binary_header())).ext == {"a": "bc"}
    assert (
        decode(payload(BINARY, binary_header(fields=b"\0\1a\0\0\0\0", size=b"\0\0\0\7"))).ext == {}
    )
    many = b"".join(b"\0\2%02x\0\0\0\1x" % n for n in range(256))
    header = binary_header(fields=many, size=len(many).to_bytes(4, "big"))
    assert len(decode(payload(BINARY, header)).ext) == FIELDS_MAX


@pytest.mark.parametrize(
    "header",
    [
        b"",
        binary_header()[:16],
        binary_header()[:20],
        binary_header()[:-1],
        binary_header() + b"x",
        binary_header(size=b"\0\0\0\0"),
        binary_header(size=b"\xff\xff\xff\xff"),
        binary_header(remark_size=b"\x7f\xff\xff\xff"),
        binary_header(remark_size=b"\xff\xff\xff\xff"),
        binary_header(fields=b"\0\1a\0\0\0\3bc"),
        binary_header(fields=b"\0\1a\0\0\0\1bc"),
        binary_header(fields=b"\0\1a\xff\xff\xff\xffbc"),
        binary_header(fields=b"\0\6a\0\0\0\2bc"),
        binary_header(fields=b"\0\7a\0\0\0\2bc"),
        binary_header(fields=b"\xff\xffa\0\0\0\2bc"),
        binary_header(
            fields=b"".join(b"\0\3%03d\0\0\0\1x" % n for n in range(257)),
            size=(257 * 10).to_bytes(4, "big"),
        ),
    ],
    ids=lambda header: header.hex()[:60],
)
def test_a_binary_header_whose_parts_do_not_add_up_is_refused(header: bytes) -> None:
    with pytest.raises(ProtocolError):
        decode(payload(BINARY, header))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\0\0\0",
        b"\0\0\0\x05{}",
        b"\x02\0\0\x02{}",
        b"\xff\0\0\x02{}",
        payload(JSON, b" " * (HEADER_BYTES_MAX + 1)),
    ],
    ids=lambda data: data[:8].hex(),
)
def test_a_frame_that_holds_no_header_is_refused(data: bytes) -> None:
    with pytest.raises(ProtocolError) as caught:
        decode(data)
    assert caught.value.closes_connection


def test_the_largest_properties_fit_into_a_header() -> None:
    ext = sample(REQUESTS[310].request) | {"i": "\x01" * 32767}
    for serialization in (JSON, BINARY):
        command = RemotingCommand(310, 1, 0, ext, b"", serialization=serialization)
        assert decode(encode(command)[4:]).ext == ext


def test_who_reads_answers_may_allow_larger_headers() -> None:
    ids = ",".join(["7F000001000078BF0000000000000B7D"] * 32767)
    frame = encode(RemotingCommand(0, 1, FLAG_ANSWER, {"msgId": ids}))
    with pytest.raises(ProtocolError, match="is over"):
        decode(frame[4:])
    assert decode(frame[4:], header_bytes_max=1 << 24).ext["msgId"] == ids


def test_codes_above_16_bits_are_known_by_their_low_half() -> None:
    documented = {3442: 200050, 3443: 200051, 3444: 200052, 3445: 200053}
    documented |= {3446: 200054, 3447: 200055, 3543: 200151}
    assert documented.items() <= LOW_16_ALIASES.items()
    assert not set(LOW_16_ALIASES) & set(REQUESTS), "no alias hides a defined code"
    for low, code in LOW_16_ALIASES.items():
        frame = encode(RemotingCommand(code, 1, serialization=BINARY))
        assert frame[8:10] == low.to_bytes(2, "big")
        assert decode(frame[4:]).code == code
        reply = encode(RemotingCommand(low, 1, FLAG_ANSWER, serialization=BINARY))
        assert decode(reply[4:]).code == low, "the code of an answer has no alias"


def test_an_empty_value_of_a_binary_header_is_no_value() -> None:
    command = RemotingCommand(14, 1, 0, {"a": "", "topic": "T"}, serialization=BINARY)
    assert decode(encode(command)[4:]).ext == {"topic": "T"}
    command.serialization = JSON
    assert decode(encode(command)[4:]).ext == {"a": "", "topic": "T"}


def test_json_answers_are_compact_and_their_fields_are_text() -> None:
    request = RemotingCommand(34, 9)
    frame = answer(request, 0, {"offset": "5", "p": PROPERTIES})
    header = frame[8:]
    assert b" " not in header.replace("值 ".encode(), b"").replace(b"key1 key2", b"")
    members = orjson.loads(header)
    assert members["extFields"] == {"offset": "5", "p": PROPERTIES}
    assert members["version"] == 513
    assert members["flag"] == FLAG_ANSWER
    assert "remark" not in members
    assert orjson.loads(answer(request, 1)[8:])["extFields"] == {}, "Java reads it unseen"
    assert b"\\u0001" in header, "control characters are escaped"


def test_long_and_foreign_values_take_the_same_form_as_short_ones() -> None:
    ext = {
        "é": "é",
        "名": PROPERTIES,
        "long": "x" * 127,
        "longer": "y" * 128,
        "k" * 300: "v",
        "a": "z" * 70_000,
    }
    command = RemotingCommand(12, 1, FLAG_ONEWAY, ext, b"b", "Grüße", serialization=BINARY)
    assert_codec(encode(command), command)
    assert command.is_oneway
    assert not command.is_answer


def test_bytes_that_are_no_text_become_replacement_characters() -> None:
    fields = b"\0\1\xff\0\0\0\2\xc3x"
    command = decode(payload(BINARY, binary_header(fields=fields)))
    assert command.ext == {"\ufffd": "\ufffdx"}


def test_unknown_languages_are_other() -> None:
    header = bytearray(binary_header())
    header[2] = 200
    assert decode(payload(BINARY, bytes(header))).language == "OTHER"


def test_the_body_of_a_large_frame_is_not_copied() -> None:
    command = RemotingCommand(310, 1, 0, {}, b"x" * 100_000)
    (frame,) = FrameReader().feed(encode(command))
    body = decode(frame).body
    assert isinstance(body, memoryview)
    assert body.obj is frame
    assert body.readonly


def send_header(ext: dict[str, str]) -> bytes:
    """A binary send with its fields in this order, empty ones too."""
    command = RemotingCommand(RequestCode.SEND_MESSAGE_V2, 1, 0, ext, serialization=BINARY)
    return encode(command)[8:]


SEND = {"a": "G", "b": "T", "c": "TBW102", "d": "4", "e": "3", "f": "0", "g": "1794772393024"}
SEND |= {"h": "0", "i": PROPERTIES, "j": "0", "k": "false", "m": "false", "n": "broker-a"}


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"h": "7"},
        {"g": "1"},
        {"g": "12345678901234"},
        {"i": ""},
        {"i": "x" * 32767},
        {"b": "T\0\1g\0\0\0\r1234567890123\0\1h\0\0\0\x010\0\1i"},
        {"b": "\0\1g\0\0\0\r"},
        {"a": "x" * 600},
        {"n": "x" * 600},
        {"n": ""},
        {"i": "\0\1j\0\0\0\x015"},
        {"AccessKey": "k", "Signature": "s"},
    ],
    ids=str,
)
def test_the_short_way_to_read_a_send_ends_where_the_long_one_does(change: dict[str, str]) -> None:
    ext = SEND | change
    header = send_header(ext)
    expected = {name: value for name, value in ext.items() if value}
    for _ in range(2):  # the second time from the cache
        assert decode(payload(BINARY, header)).ext == expected
    # A command's fields are the command's own: the cache does not see what is done to them.
    decode(payload(BINARY, header)).ext["b"] = "changed"
    assert decode(payload(BINARY, header)).ext == expected
    assert remoting.walk_fields(header[21:]) == expected


@pytest.mark.parametrize("cut", range(21, len(send_header(SEND))))
def test_a_send_cut_anywhere_is_refused(cut: int) -> None:
    data = send_header(SEND)
    header = data[:17] + (cut - 21).to_bytes(4, "big") + data[21:cut]
    whole = {name: value for name, value in SEND.items() if value}
    try:
        ext = decode(payload(BINARY, header)).ext
    except ProtocolError:
        return
    # A cut between two fields leaves a header with less of them.
    assert ext == dict(list(whole.items())[: len(ext)])
