"""This module holds the quick way of a send beside the plain one: same fields, same answer."""

from dataclasses import astuple
from struct import pack

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.protocol import remoting_fast
from sluice.protocol.remoting import BINARY, JSON, RemotingCommand, decode, encode
from sluice.protocol.remoting_codes import RequestCode
from sluice.protocol.remoting_fast import (
    QUICK_BYTES_MIN,
    batch_ids,
    quick_batch_answer,
    quick_send,
    quick_send_answer,
    read_send,
    send_answer,
)

FIELDS = {
    "a": "group",
    "b": "Orders",
    "c": "TBW102",
    "d": "4",
    "e": "3",
    "f": "0",
    "g": "1794772393024",
    "h": "0",
    "i": "UNIQ_KEY\x01FD00\x02WAIT\x01true\x02",
    "j": "0",
    "k": "false",
    "m": "false",
    "n": "broker-a",
}


def frame(fields: dict[str, str], *, code: int = 310, flag: int = 0, kind: int = BINARY) -> bytes:
    command = RemotingCommand(code, 77, flag, fields, b"body", None, "JAVA", 513, kind)
    return encode(command)[4:]


def assert_same(data: bytes) -> None:
    quick = quick_send(data)
    assert quick is not None
    command = decode(data)
    plain = read_send(command)
    opaque, head, born_ms, properties, reconsume_times, body_at = quick
    assert (opaque, 0, data[body_at:]) == (command.opaque, command.flag, command.body)
    assert astuple(head) == (
        plain.topic,
        plain.default_topic,
        plain.default_queue_count,
        plain.queue_id,
        plain.sys_flag,
    )
    assert (born_ms, properties.decode(), reconsume_times) == (
        plain.born_ms,
        plain.properties,
        plain.reconsume_times,
    )


@pytest.mark.parametrize("change", [{}, {"e": "0"}, {"j": "5"}, {"f": "1"}, {"i": "x\x01y"}])
def test_the_usual_send_is_read_as_the_plain_way_reads_it(change: dict[str, str]) -> None:
    assert_same(frame(FIELDS | change))
    assert_same(frame(FIELDS | change))  # from memory


@pytest.mark.parametrize(
    "data",
    [
        frame(FIELDS, kind=JSON),
        frame(FIELDS, code=RequestCode.SEND_BATCH_MESSAGE),
        frame(FIELDS | {"m": "true"}),
        frame(FIELDS | {"l": "16"}),
        frame(FIELDS | {"k": "true"}),
        frame(FIELDS | {"e": "-1"}),
        frame(FIELDS | {"h": "7"}),
        frame(FIELDS | {"i": "kéy\x01v\x02"}),
        frame(FIELDS | {"g": "179477239302x"}),
        frame({name: value for name, value in FIELDS.items() if name != "i"}),
        frame({name: value for name, value in FIELDS.items() if name != "b"}),
        frame(FIELDS)[: QUICK_BYTES_MIN + 20],
    ],
)
def test_what_is_unusual_is_left_to_the_plain_way(data: bytes) -> None:
    assert quick_send(data) is None
    assert quick_send(data) is None


@given(st.data())
def test_a_damaged_header_is_read_as_the_plain_way_reads_it_or_not_at_all(
    data: st.DataObject,
) -> None:
    raw = bytearray(frame(FIELDS))
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    if quick_send(bytes(raw)) is not None:
        assert_same(bytes(raw))


def test_what_is_remembered_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remoting_fast, "_PARTS_MAX", 8)
    for number in range(50):
        assert_same(frame(FIELDS | {"b": f"Topic{number}", "n": f"broker-{number}"}))
    assert len(remoting_fast._heads) <= 8
    assert len(remoting_fast._tails) <= 8


@given(
    opaque=st.integers(-(1 << 31), (1 << 31) - 1),
    position=st.integers(0, (1 << 63) - 1),
    queue_id=st.integers(0, 70000),
    offset=st.integers(0, (1 << 63) - 1),
    unique=st.text("0123456789ABCDEF", min_size=1, max_size=127),
    host=st.sampled_from(["7F00000100002A9F", "00" * 20]),
)
def test_the_quick_answer_says_what_the_plain_one_says(
    opaque: int, position: int, queue_id: int, offset: int, unique: str, host: str
) -> None:
    plain = send_answer(BINARY, opaque, f"{host}{position:016X}", queue_id, offset, unique)
    quick = quick_send_answer(opaque, host.encode(), position, queue_id, offset, unique.encode())
    assert decode(quick[4:]) == decode(plain[4:])
    assert int.from_bytes(quick[:4], "big") == len(quick) - 4


@given(
    opaque=st.integers(-(1 << 31), (1 << 31) - 1),
    positions=st.lists(st.integers(0, (1 << 63) - 1), min_size=1, max_size=40),
    queue_id=st.integers(0, 70000),
    offset=st.integers(0, (1 << 63) - 1),
    unique=st.text("0123456789ABCDEF", min_size=1, max_size=127),
    host=st.sampled_from(["7F00000100002A9F", "00" * 20]),
)
def test_the_quick_answer_to_a_batch_says_what_the_plain_one_says(
    opaque: int, positions: list[int], queue_id: int, offset: int, unique: str, host: str
) -> None:
    expected = ",".join(f"{host}{position:016X}" for position in positions)
    ids = batch_ids(host, pack(f">{len(positions)}q", *positions))
    assert ids == expected
    plain = send_answer(BINARY, opaque, expected, queue_id, offset, unique)
    assert quick_batch_answer(opaque, ids, queue_id, offset, unique.encode()) == plain
