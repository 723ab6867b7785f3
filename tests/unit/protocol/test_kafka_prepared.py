"""Requests and answers of which all but a few numbers is known: the bytes are those of the long
way.
"""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.protocol import kafka_fast
from sluice.protocol.kafka import frame_answer
from sluice.protocol.kafka_codes import FETCH, PRODUCE
from sluice.protocol.kafka_fast import FetchedPart, ProducedPart, read_produce
from sluice.protocol.kafka_prepared import (
    FetchedAnswer,
    StoredAnswer,
    fetch_form,
    sent_form,
)

TOPIC_ID = bytes(range(16))
OFFSETS = st.integers(0, 2**63 - 1)
NUMBERS = st.integers(-(2**31), 2**31 - 1)


@given(st.integers(9, 13), st.integers(0, 2**31 - 1), NUMBERS, OFFSETS, OFFSETS)
def test_an_answer_to_a_batch(
    version: int, partition: int, number: int, base: int, start: int
) -> None:
    topic = TOPIC_ID if version >= kafka_fast.PRODUCE_IDS else "a-topic"
    body = kafka_fast.write_produced(
        version, [(topic, [ProducedPart(partition, 0, base, -1, start)])]
    )
    (whole,) = frame_answer(PRODUCE, version, number, [body])
    assert StoredAnswer(version, topic, partition).of(number, base, start) == whole


@given(
    st.integers(13, 18),
    st.integers(1, 2**31 - 1),
    st.integers(0, 2**31 - 1),
    st.booleans(),
    NUMBERS,
    OFFSETS,
    OFFSETS,
    st.sampled_from([0, 1, 120, 126, 127, 128, 3000, 5000, 16382, 16383, 16384, 3_000_000]),
)
def test_an_answer_to_a_fetch(
    version: int,
    session: int,
    partition: int,
    tells_aborted: bool,
    number: int,
    high: int,
    start: int,
    size: int,
) -> None:
    answers = FetchedAnswer(version, session, TOPIC_ID, partition, tells_aborted=tells_aborted)
    records = [b"r" * (size // 2), b"s" * (size - size // 2)] if size else []
    part = FetchedPart(
        *(partition, 0, high, high, start, [] if tells_aborted else None), records, size
    )
    body = kafka_fast.write_fetched(version, 0, session, [(TOPIC_ID, [part])])
    whole = b"".join(frame_answer(FETCH, version, number, body))
    assert b"".join(answers.of(number, high, start, list(records), size)) == whole
    nothing = kafka_fast.write_fetched(version, 0, session, [])
    assert answers.nothing(number) == b"".join(frame_answer(FETCH, version, number, nothing))


def request(records: bytes, number: int = 1, partition: int = 2) -> bytes:
    """A request with one batch, in a version with ids."""
    size = len(records) + 1
    coded = b""
    while size > 0x7F:
        coded += bytes((size & 0x7F | 0x80,))
        size >>= 7
    coded += bytes((size,))
    head = struct.pack(">hhih", PRODUCE, 13, number, 1) + b"c\0"
    body = b"\0" + struct.pack(">hi", -1, 1000) + b"\2" + TOPIC_ID + b"\2"
    return head + body + struct.pack(">i", partition) + coded + records + b"\0\0\0"


@pytest.mark.parametrize("size", [61, 125, 126, 127, 128, 16382, 16383, 16384, 2_000_000])
def test_a_request_with_one_batch(size: int) -> None:
    frame = request(b"b" * size, 77)
    view = read_produce(frame, 12, 13).topics[0].parts[0].records
    assert view is not None
    form = sent_form(frame, 13, view)
    assert form is not None
    sent, seen = form.read(frame), form.read(memoryview(frame))
    assert sent is not None
    assert sent == seen
    assert (sent.correlation_id, bytes(sent.records)) == (77, b"b" * size)
    other = form.read(request(b"other", 78))
    assert other is not None
    assert (other.correlation_id, bytes(other.records)) == (78, b"other")
    assert other.said == sent.said
    elsewhere = form.read(request(b"other", 78, partition=3))
    assert elsewhere is not None
    assert elsewhere.said != sent.said


@given(st.data())
def test_a_request_that_lies_is_not_taken_for_one(data: st.DataObject) -> None:
    frame = request(b"b" * 200)
    form = sent_form(frame, 13, memoryview(frame)[-203:-3])
    assert form is not None
    spoiled = bytearray(frame)
    for _ in range(data.draw(st.integers(0, 3))):
        spoiled[data.draw(st.integers(0, len(frame) - 1))] = data.draw(st.integers(0, 255))
    cut = bytes(spoiled[: data.draw(st.integers(0, len(frame)))])
    sent, good = form.read(cut), form.read(frame)
    assert good is not None
    if sent is not None and sent.said == good.said:
        ((_, ((partition, records),)),) = read_produce(cut, 12, 13).topics
        assert (partition, records) == (2, sent.records), "as the long way reads it"


def test_old_versions_have_no_form() -> None:
    frame = request(b"b")
    assert sent_form(frame, 8, memoryview(b"b")) is None
    assert sent_form(frame[:-1] + b"\1", 13, memoryview(b"b")) is None
    assert fetch_form(frame, 12, 12) is None


def test_very_large_batches_have_no_form() -> None:
    large = request(bytes(1 << 21))
    assert sent_form(large, 13, memoryview(large)[-(1 << 21) - 3 : -3]) is None
    form = sent_form(request(b"b" * 70), 13, memoryview(b"b" * 70))
    assert form is not None
    assert form.read(large) is None


def fetch(number: int, epoch: int, offset: int | None, session: int = 9) -> bytes:
    head = struct.pack(">hhih", FETCH, 17, number, 1) + b"c\0"
    body = struct.pack(">iiibii", 500, 1, 1 << 20, 0, session, epoch)
    if offset is None:
        return head + body + b"\1\1\1\0"
    place = struct.pack(">iiqiqi", 0, 5, offset, -1, -1, 1 << 20)
    return head + body + b"\2" + TOPIC_ID + b"\2" + place + b"\0\0\1\1\0"


def test_fetches_of_a_session() -> None:
    form = fetch_form(fetch(1, 1, 10), 12, 17)
    assert form is not None
    assert form.read(fetch(2, 2, 11), 0) is None, "nothing was learnt yet"
    form.learn(fetch(1, 1, 10), names_partition=True)
    assert form.read(fetch(2, 2, 11), 0) == (2, 2, (5, 11, 1 << 20))
    assert form.read(fetch(2, 2, 11), 1) is None, "another partition"
    assert form.read(fetch(3, 3, None), 0) is None
    form.learn(fetch(3, 3, None), names_partition=False)
    assert form.read(fetch(4, 4, None), 0) == (4, 4, None)
    assert form.read(fetch(4, 4, None, session=8), 0) is None
    whole = fetch(5, 5, 12)
    for size in range(len(whole)):
        assert form.read(whole[:size], 0) is None, size
