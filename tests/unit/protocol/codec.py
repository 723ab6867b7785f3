"""This module feeds a codec its frames in every way that a network can deliver them."""

from __future__ import annotations

from pathlib import Path

from sluice.protocol.framing import Frame, FrameReader
from sluice.protocol.remoting import RemotingCommand, decode, encode

GOLDEN = Path(__file__).resolve().parents[2] / "golden" / "v1"


def through_buffer(reader: FrameReader, data: bytes) -> list[Frame]:
    """Receive as asyncio's BufferedProtocol does, and spoil the buffer afterwards, where it is the
    one that others have too.
    """
    frames: list[Frame] = []
    while data:
        buffer = reader.get_buffer(-1)
        count = min(len(buffer), len(data))
        buffer[:count] = data[:count]
        frames += reader.buffer_updated(count)
        if reader._scratch is not None and buffer.obj is reader._scratch.obj:
            buffer[:count] = b"\xff" * count
        data = data[count:]
    return frames


def assert_codec(frame: bytes, value: RemotingCommand) -> None:
    """`frame` (with its length) is `value`, whole, in single bytes and with more behind it."""
    assert [decode(one) for one in FrameReader().feed(frame)] == [value]
    assert [decode(one) for one in through_buffer(FrameReader(), frame)] == [value]

    reader = FrameReader()
    for at in range(len(frame) - 1):
        assert reader.feed(frame[at : at + 1]) == []
    assert [decode(one) for one in reader.feed(frame[-1:])] == [value]
    assert reader.kept_bytes == 0

    reader = FrameReader()
    assert [decode(one) for one in reader.feed(frame + frame[:-1])] == [value]
    assert [decode(one) for one in reader.feed(frame[-1:] + frame)] == [value, value]

    assert decode(encode(value)[4:]) == value
