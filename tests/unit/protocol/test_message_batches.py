"""Batches come apart as RocketMQ put them together, and message ids say where a message lies."""

from __future__ import annotations

import pytest

from sluice.errors import MessageIllegal, RequestInvalid
from sluice.model import message_id
from sluice.protocol.message_batches import (
    address_text,
    join_batch,
    pack_address,
    parse_message_id,
    split_batch,
)
from tests.unit.protocol.codec import GOLDEN

MESSAGES = [(3, b"hello", b"KEYS\x01key1\x02WAIT\x01true\x02TAGS\x01TagA\x02")]
MESSAGES += [(0, "wörld".encode(), b"WAIT\x01true\x02TAGS\x01TagB\x02")]


def golden_batch() -> bytes:
    for line in (GOLDEN / "rocketmq-5.5.0-bodies.txt").read_text(encoding="utf-8").splitlines():
        name, _, text = line.partition(" ")
        if name == "batch":
            return bytes.fromhex(text)
    raise AssertionError("the golden file has no batch")


def test_a_batch_that_java_wrote() -> None:
    batch = golden_batch()
    assert [(f, bytes(b), p) for f, b, p in split_batch(batch)] == MESSAGES
    assert join_batch(MESSAGES) == batch


def test_empty_bodies_and_properties() -> None:
    batch = join_batch([(0, b"", b""), (-1, b"", b"x")])
    assert len(batch) == 45
    assert [(f, bytes(b), p) for f, b, p in split_batch(batch)] == [
        (0, b"", b""),
        (-1, b"", b"x"),
    ]


@pytest.mark.parametrize("cut", range(len(golden_batch())))
def test_a_batch_cut_anywhere_is_refused(cut: int) -> None:
    if cut == 0x39:
        assert len(split_batch(golden_batch()[:cut])) == 1, "the cut is between two messages"
        return
    with pytest.raises(MessageIllegal):
        split_batch(golden_batch()[:cut])


@pytest.mark.parametrize(
    ("at", "value"),
    [(0, 0), (0, -1), (0, 21), (0, 1 << 30), (0, 0x3A), (16, -1), (16, 6), (16, 4), (16, 1 << 30)],
)
def test_sizes_that_do_not_add_up_are_refused(at: int, value: int) -> None:
    batch = bytearray(golden_batch())
    batch[at : at + 4] = value.to_bytes(4, "big", signed=True)
    with pytest.raises(MessageIllegal) as caught:
        split_batch(batch)
    assert caught.value.rocketmq_code == 13


@pytest.mark.parametrize("properties_bytes", [-1, 0, 2, 32767])
def test_a_message_with_bytes_that_belong_to_nothing_is_refused(properties_bytes: int) -> None:
    batch = bytearray(join_batch([(0, b"body", b"p")]))
    batch[24:26] = properties_bytes.to_bytes(2, "big", signed=True)
    with pytest.raises(MessageIllegal, match="do not add up"):
        split_batch(batch)


def test_a_batch_is_bounded_in_number() -> None:
    batch = join_batch([(0, b"", b"")] * 5)
    assert len(split_batch(batch, count_max=5)) == 5
    with pytest.raises(MessageIllegal, match="at most 4"):
        split_batch(batch, count_max=4)
    with pytest.raises(MessageIllegal, match="properties"):
        join_batch([(0, b"", b"x" * 32768)])


def test_the_message_id_of_a_stored_record() -> None:
    host, position = parse_message_id("7F000001000078BF0000000000000B7D")
    assert host == pack_address("127.0.0.1", 30911)
    assert address_text(host) == "127.0.0.1:30911"
    assert position == 2941
    assert message_id(host, position) == "7F000001000078BF0000000000000B7D"
    v6 = pack_address("fd00::2", 10911)
    assert parse_message_id(message_id(v6, 5).lower()) == (v6, 5)
    assert address_text(v6) == "[fd00::2]:10911"


@pytest.mark.parametrize(
    "text",
    ["", "7F", "x" * 32, "7F000001000078BF0000000000000B7", "7F " * 16, "7F" * 15 + "  ", "é" * 32],
)
def test_a_text_that_is_no_message_id(text: str) -> None:
    with pytest.raises(RequestInvalid, match="32 or 56"):
        parse_message_id(text)
