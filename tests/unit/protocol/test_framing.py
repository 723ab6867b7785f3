"""Frames come out whole however they went in, and a length is refused before it is believed."""

from __future__ import annotations

import random
import tracemalloc

import pytest

from sluice.protocol.framing import (
    FRAME_BYTES_MAX,
    ROOM_BYTES_MAX,
    SCRATCH_BYTES,
    BadFrame,
    FrameReader,
    frame_of,
)
from tests.unit.protocol.codec import through_buffer

PAYLOADS = [b"four", b"x" * 1000, b"y" * 70_000, b"", b"last"]


def wire(payloads: list[bytes]) -> bytes:
    return b"".join(frame_of(payload) for payload in payloads if payload)


@pytest.mark.parametrize("chunk_bytes", [1, 2, 3, 5, 999, 4096, 65536, 1 << 20])
def test_frames_come_out_of_any_chunks(chunk_bytes: int) -> None:
    data = wire(PAYLOADS)
    expected = [payload for payload in PAYLOADS if payload]
    pieces = [data[at : at + chunk_bytes] for at in range(0, len(data), chunk_bytes)]
    by_feed, by_buffer = FrameReader(), FrameReader(scratch=bytearray(chunk_bytes))
    assert [frame for piece in pieces for frame in by_feed.feed(piece)] == expected
    assert through_buffer(by_buffer, data) == expected
    by_bytearray = FrameReader()
    assert [f for piece in pieces for f in by_bytearray.feed(bytearray(piece))] == expected


@pytest.mark.parametrize("chunk_bytes", [999, 4096, 65536, 65543, 300_000, 1 << 20])
def test_large_frames_come_out_of_any_chunks(chunk_bytes: int) -> None:
    sizes = (300_000, 5, SCRATCH_BYTES + 1, SCRATCH_BYTES, 1_500_000, 70_000, 800_000)
    payloads = [random.Random(size).randbytes(size) for size in sizes]
    data = wire(payloads)
    pieces = [data[at : at + chunk_bytes] for at in range(0, len(data), chunk_bytes)]
    by_feed, by_buffer = FrameReader(), FrameReader(scratch=bytearray(chunk_bytes))
    assert [bytes(frame) for piece in pieces for frame in by_feed.feed(piece)] == payloads
    found = through_buffer(by_buffer, data)
    assert list(map(bytes, found)) == payloads
    assert by_buffer.kept_bytes == by_feed.kept_bytes == 0
    assert all(isinstance(f, bytes) or f.readonly for f in found)


def test_a_large_frame_is_received_where_it_stays() -> None:
    reader = FrameReader(scratch=bytearray(SCRATCH_BYTES))
    data = frame_of(bytes(3_000_000))
    assert reader.feed(data[:400_000]) == []
    at = 400_000
    while at < len(data):
        room = reader.get_buffer()
        assert 0 < len(room) <= min(ROOM_BYTES_MAX, len(data) - at)
        assert room.obj is not reader._scratch.obj  # type: ignore[union-attr]
        frames = reader.buffer_updated(len(room))
        at += len(room)
        assert len(frames) == (at == len(data))
        assert reader.kept_bytes == at % len(data)
    assert reader.get_buffer().obj is reader._scratch.obj  # type: ignore[union-attr]


def test_who_has_sent_a_large_frame_has_room_for_another_at_once() -> None:
    reader = FrameReader(scratch=bytearray(16))
    large, larger = frame_of(bytes(1_500_000)), frame_of(bytes(1_500_001))
    assert reader.feed(large[:100_000]) == []
    assert len(reader.get_buffer()) == 100_000, "as much as it has sent"
    assert len(reader.feed(large[100_000:])) == 1
    assert reader.feed(larger[:100_000]) == []
    assert len(reader.get_buffer()) == 100_000, "it has never sent so much"
    assert len(reader.feed(larger[100_000:])) == 1
    for again in (large, larger):
        assert reader.feed(again[:100_000]) == []
        assert len(reader.get_buffer()) == ROOM_BYTES_MAX
        assert [bytes(frame) for frame in reader.feed(again[100_000:])] == [again[4:]]


def test_a_frame_never_changes_after_it_was_handed_out() -> None:
    """Two connections share one scratch buffer: no byte of one may show up in the other."""
    scratch = bytearray(4096)
    first, second = FrameReader(scratch=scratch), FrameReader(scratch=scratch)
    kept = []
    for letter in b"abcdefgh":
        for reader in (first, second):
            frame = frame_of(bytes([letter]) * 3000)
            kept += [(letter, one) for one in through_buffer(reader, frame[:1000])]
            kept += [(letter, one) for one in through_buffer(reader, frame[1000:])]
    assert len(kept) == 16
    assert all(bytes(frame) == bytes([letter]) * 3000 for letter, frame in kept)


def test_a_large_frame_is_handed_out_read_only() -> None:
    reader = FrameReader()
    frame = frame_of(b"z" * 200_000)
    assert reader.feed(frame[:100_000]) == []
    (large,) = reader.feed(frame[100_000:])
    assert isinstance(large, memoryview)
    assert large.readonly
    assert bytes(large) == b"z" * 200_000


@pytest.mark.parametrize("size", [-1, -(1 << 31), 0, 3, 101, FRAME_BYTES_MAX + 1, 0x47455420])
def test_a_length_out_of_bounds_is_refused_at_its_fourth_byte(size: int) -> None:
    reader = FrameReader(frame_bytes_max=100)
    good = frame_of(b"good frame")
    length = size.to_bytes(4, "big", signed=True)
    with pytest.raises(BadFrame, match=f"{size} bytes") as caught:
        reader.feed(good + length)
    assert caught.value.frames == [b"good frame"], "what came before it can still be answered"
    assert caught.value.closes_connection
    with pytest.raises(BadFrame):
        reader.feed(good)

    reader = FrameReader(frame_bytes_max=100)
    for at in range(3):
        assert reader.feed(length[at : at + 1]) == []
    with pytest.raises(BadFrame):
        reader.feed(length[3:])
    assert reader.kept_bytes == 0


def test_the_limit_can_be_raised_after_a_log_in() -> None:
    reader = FrameReader(frame_bytes_max=100)
    assert reader.feed(frame_of(b"x" * 100)) == [b"x" * 100]
    reader.frame_bytes_max = 200
    assert reader.feed(frame_of(b"x" * 200)) == [b"x" * 200]


@pytest.mark.parametrize("received", [10_000, 100_000])
def test_memory_grows_with_what_came_not_with_what_was_announced(received: int) -> None:
    readers = [FrameReader(scratch=bytearray(16)) for _ in range(50)]
    announced = FRAME_BYTES_MAX.to_bytes(4, "big") + b"x" * received
    tracemalloc.start()
    try:
        for reader in readers:
            assert reader.feed(announced) == []
        used, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert used < 50 * (len(announced) * 2 + 1000)
    assert readers[0].kept_bytes == len(announced)
