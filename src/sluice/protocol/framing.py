"""This module cuts a stream of bytes into frames: a 32-bit big-endian length, then that many bytes.

RocketMQ and Kafka frame alike, so both doors use it. The bytes may come in any chunks, through
`get_buffer` and `buffer_updated` (as asyncio's BufferedProtocol has them) or through `feed`.

    socket --> scratch --+--> whole frames, each copied once into bytes of its own
                         +--> the beginning of the last one: kept aside until the rest comes
    socket --> the buffer of a large frame, once enough of it has come

Three rules keep a peer from costing more than it sends:

* A length is checked as soon as its four bytes are there, before anything of the frame is kept.
* What is kept grows with what was received, to twice of that at most, never with what a length
  announces. Who has sent a large frame before, whole, has room for another one of that size at
  once: it has shown that it means it, and costs what it has sent already.
* The scratch buffer holds nothing between two calls. All connections of one event loop can share
  one, so an idle connection costs no buffer; and a frame that was handed out never changes.

This module may not know what is in a frame, and does no IO.
"""

from __future__ import annotations

from struct import Struct
from typing import Final, NoReturn

from sluice.errors import ProtocolError
from sluice.model import Buffer

Frame = bytes | memoryview

SCRATCH_BYTES: Final = 256 * 1024  # one read takes what a fast peer sends in about a millisecond
FRAME_BYTES_MAX: Final = 16 * 1024 * 1024  # Apache's peers close the connection above this
FRAME_BYTES_MIN: Final = 4  # both protocols begin a frame with at least four bytes

_LENGTH: Final = Struct(">i")
_LENGTH_BYTES: Final = 4
# A kept frame below this is copied once more, into bytes, because they are faster to take apart
# than a view; above it the copy would cost more than that.
_COPY_BYTES_MAX: Final = 64 * 1024
# A frame above this has a buffer of its own as soon as so much of it is there. What is kept of
# others is moved from time to time as it grows, which is quicker for less.
_LARGE_BYTES: Final = SCRATCH_BYTES
_LARGE_FROM_BYTES: Final = 64 * 1024
ROOM_BYTES_MAX: Final = 1024 * 1024  # to receive a part of a large frame into, with one read


class BadFrame(ProtocolError):
    """A length is out of bounds. `frames` are the whole ones that came before it in the chunk."""

    def __init__(self, reason: str, frames: list[Frame]) -> None:
        super().__init__(reason)
        self.frames = frames


class FrameReader:
    """The receiving side of one connection. `frame_bytes_max` may be raised after a log-in."""

    __slots__ = ("_broken", "_kept", "_large", "_largest_bytes", "_scratch", "frame_bytes_max")

    def __init__(
        self, frame_bytes_max: int = FRAME_BYTES_MAX, scratch: bytearray | None = None
    ) -> None:
        assert frame_bytes_max >= FRAME_BYTES_MIN
        self.frame_bytes_max = frame_bytes_max
        self._scratch: memoryview | None = None if scratch is None else memoryview(scratch)
        self._kept = bytearray()  # length and beginning of a frame that is not whole yet
        self._large: _LargeFrame | None = None  # or of a large one
        self._largest_bytes = 0  # of a large one that came whole
        self._broken = ""

    @property
    def kept_bytes(self) -> int:
        """What this connection has received of a frame that is not whole yet."""
        return len(self._kept) if self._large is None else self._large.filled

    def get_buffer(self, size_hint: int = -1) -> memoryview:
        """Where to receive, `SCRATCH_BYTES` at most, or `ROOM_BYTES_MAX` of a large frame; the
        bytes have to be announced before anything else is done with it.
        """
        if self._large is not None:
            return self._large.room()
        if self._scratch is None:
            self._scratch = memoryview(bytearray(SCRATCH_BYTES))
        return self._scratch

    def buffer_updated(self, count: int) -> list[Frame]:
        """That many bytes were received into the buffer: the frames that are whole now."""
        if self._large is not None:
            frames: list[Frame] = []
            self._received(self._large, count, frames)
            return frames
        assert self._scratch is not None, "there is no buffer before get_buffer"
        assert 0 <= count <= len(self._scratch)
        return self._take(self._scratch, count)

    def feed(self, data: Buffer) -> list[Frame]:
        """The frames that are whole now that `data` came."""
        return self._take(memoryview(data) if isinstance(data, bytearray) else data, len(data))

    def _take(self, data: bytes | memoryview, count: int) -> list[Frame]:
        if self._broken:
            raise BadFrame(self._broken, [])
        frames: list[Frame] = []
        at = 0
        while self._large is not None and at < count:
            room = self._large.room()
            part = data[at : min(at + len(room), count)]
            room[: len(part)] = part
            at += len(part)
            self._received(self._large, len(part), frames)
        if self._kept:
            at = self._complete(data, count, frames)
        limit = self.frame_bytes_max
        while count - at >= _LENGTH_BYTES:
            (size,) = _LENGTH.unpack_from(data, at)
            if not FRAME_BYTES_MIN <= size <= limit:
                self._refuse(size, frames)
            begin = at + _LENGTH_BYTES
            if begin + size > count:
                break
            at = begin + size
            frames.append(bytes(data[begin:at]))
        if at < count:
            self._kept += data[at:count]
            self._enlarge()
        return frames

    def _complete(self, data: bytes | memoryview, count: int, frames: list[Frame]) -> int:
        """Add to the frame that was begun; returns how many of the new bytes it took."""
        kept = self._kept
        at = 0
        if len(kept) < _LENGTH_BYTES:
            at = min(_LENGTH_BYTES - len(kept), count)
            kept += data[:at]
            if len(kept) < _LENGTH_BYTES:
                return at
        size: int = _LENGTH.unpack_from(kept)[0]
        if not FRAME_BYTES_MIN <= size <= self.frame_bytes_max:
            self._refuse(size, frames)
        end = min(at + _LENGTH_BYTES + size - len(kept), count)
        kept += data[at:end]
        if len(kept) == _LENGTH_BYTES + size:
            view = memoryview(kept).toreadonly()[_LENGTH_BYTES:]
            frames.append(bytes(view) if size <= _COPY_BYTES_MAX else view)
            self._kept = bytearray()  # the old one belongs to the frame now
        else:
            self._enlarge()
        return end

    def _enlarge(self) -> None:
        """Give a large frame of which enough is there a buffer of its own."""
        kept = self._kept
        if len(kept) >= _LARGE_FROM_BYTES:
            size: int = _LENGTH.unpack_from(kept)[0]
            if size > _LARGE_BYTES:
                whole_bytes = _LENGTH_BYTES + size
                is_trusted = whole_bytes <= self._largest_bytes
                self._large = _LargeFrame(kept, whole_bytes, is_trusted=is_trusted)
                self._kept = bytearray()

    def _received(self, large: _LargeFrame, count: int, frames: list[Frame]) -> None:
        """So many more bytes of a large frame are in its buffer."""
        large.filled += count
        if large.filled == large.size:
            frames.append(large.buffer.toreadonly()[_LENGTH_BYTES:])
            self._largest_bytes = max(self._largest_bytes, large.size)
            self._large = None
        elif large.filled == len(large.buffer):
            large.grow(2 * large.filled)

    def _refuse(self, size: int, frames: list[Frame]) -> NoReturn:
        self._kept = bytearray()
        self._broken = (
            f"a frame of {size} bytes is outside of {FRAME_BYTES_MIN} to {self.frame_bytes_max}"
        )
        raise BadFrame(self._broken, frames)


class _LargeFrame:
    """The length and the beginning of a frame, in a buffer that is at most twice as long, or has
    room for the whole of it where who sends it is trusted with that.
    """

    __slots__ = ("buffer", "filled", "size")

    def __init__(self, begin: bytearray, size: int, *, is_trusted: bool) -> None:
        self.size = size
        self.buffer = memoryview(begin)
        self.filled = len(begin)
        self.grow(size if is_trusted else 2 * self.filled)

    def room(self) -> memoryview:
        """Where the next bytes of it go."""
        return self.buffer[self.filled : self.filled + ROOM_BYTES_MAX]

    def grow(self, byte_count: int) -> None:
        """Make room for so many bytes, as far as the frame has them."""
        grown = memoryview(bytearray(min(byte_count, self.size)))
        grown[: self.filled] = self.buffer[: self.filled]
        self.buffer = grown


def frame_of(payload: Buffer) -> bytes:
    """A payload with its length in front of it."""
    return _LENGTH.pack(len(payload)) + payload
