"""This module reads and completes images: entries of the log but for what their place decides.

Who writes very many messages at once sends them in the layout in which they will lie in the log.
Then nobody has to take them apart one by one: what they say of themselves is compared column by
column, and when they have their places, heads and checksums are filled in column by column, too.

    image     an entry as `records.py` has it, with addresses of IPv4 and a checksum at its end. Of
              its head size, magic, flag and size of the body count; the rest of it and the
              checksum are written later.
    images    one after the other, and behind them the size of each, i32
    sealed    behind that the checksum of each body, u32: whoever took the images has added it

It gives the bytes that `records.Encoder` gives; a test holds the two together. Pure.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
from isal.isal_zlib import crc32

from sluice.errors import MessageIllegal
from sluice.model import Buffer
from sluice.protocol import records
from sluice.protocol.message_batches import BATCH_COUNT_MAX, BatchMessage
from sluice.protocol.record_runs import BatchShape

Numbers = npt.NDArray[np.int64]
Bytes = npt.NDArray[np.uint8]

HEAD_BYTES: Final = 88
SIZE_BYTES: Final = 4  # of the size that stands behind the images, for each
_FLAG_AT: Final = 16
_MASK_31: Final = 0x7FFFFFFF
_SEPARATOR: Final = 2
_KEYS: Final = b"KEYS\x01"
_HEAD: Final = np.dtype(
    [
        *(("size", ">i4"), ("magic", ">u4"), ("crc", ">u4"), ("queue", ">i4"), ("flag", ">i4")),
        *(("offset", ">i8"), ("position", ">i8"), ("middle", "V48"), ("body", ">i4")),
    ]
)
assert _HEAD.itemsize == HEAD_BYTES
_NO_BYTES: Final[Bytes] = np.empty(0, np.uint8)


def _table_of(texts: tuple[bytes, ...]) -> npt.NDArray[np.void]:
    return np.frombuffer(b"".join(texts), f"V{len(texts[0])}")


# What a checksum is written with: by its last four digits, those before them, and the first two.
_DIGITS: Final = [_table_of(texts) for texts in records.DIGIT_TABLES]
_END: Final = np.dtype(
    list(zip(("low", "middle", "high"), [table.dtype for table in _DIGITS], strict=True))
)
assert _END.itemsize == records.CRC_PROPERTY_BYTES


def rest_bytes(topic: bytes) -> int:
    """The size of an image beside its body and properties."""
    return HEAD_BYTES + len(records.field_of_topic(topic)[1]) + 2 + records.CRC_PROPERTY_BYTES


class Keys(NamedTuple):
    """The keys of messages that have nothing but a key: of those that have one, joined."""

    joined: bytes
    lengths: Numbers
    rows: Numbers  # the numbers of those messages


@dataclass(slots=True)
class Images:
    """Images of one topic that add up; `body_at` and so on are places in `data`."""

    data: Bytes
    sizes: Numbers
    starts: Numbers
    body_bytes: Numbers
    properties_at: Numbers
    property_bytes: Numbers  # without the checksum
    sums: Numbers  # of the bodies, where they are sealed
    _keys: tuple[Keys | None] | None = None  # once they were looked for

    def __len__(self) -> int:
        return len(self.sizes)

    def blocks(self, bytes_max: int) -> Iterator[slice]:
        """The numbers of the images in blocks, each of at most so many bytes or of one image."""
        if len(self.data) <= bytes_max:
            yield slice(0, len(self))
            return
        ends = self.starts + self.sizes
        first, count = 0, len(self)
        while first < count:
            begin = int(self.starts[first])
            stop = max(first + 1, int(np.searchsorted(ends, begin + bytes_max, "right")))
            yield slice(first, stop)
            first = stop

    def properties(self) -> bytes:
        """Those of all messages, joined; each ends with its separator."""
        return _joined(self.data, self.properties_at, self.property_bytes)

    def parts(self, which: slice = slice(None)) -> list[BatchMessage]:
        """Flag, body and properties of some messages."""
        view = self.data.data
        flags = _numbers(self.data, self.starts[which] + _FLAG_AT, ">i4")
        return [
            (flag, view[at : at + size], bytes(view[own_at : own_at + own_size]))
            for flag, at, size, own_at, own_size in zip(
                flags.tolist(),
                (self.starts[which] + HEAD_BYTES).tolist(),
                self.body_bytes[which].tolist(),
                self.properties_at[which].tolist(),
                self.property_bytes[which].tolist(),
                strict=True,
            )
        ]

    def seal(self) -> bytes:
        """What has to stand behind the images and their sizes. They are sealed from now on."""
        body_at = self.starts + HEAD_BYTES
        self.sums = _checksums(self.data.data, body_at, body_at + self.body_bytes)
        return self.sums.astype(">u4").tobytes()

    def apart(self) -> Images:
        """What is known of them, without themselves."""
        return replace(self, data=_NO_BYTES)

    def at(self, body: Buffer) -> Images:
        """The same images where they lie now: at the beginning of these bytes."""
        byte_count = int(self.starts[-1] + self.sizes[-1])
        return replace(self, data=np.frombuffer(body, np.uint8, byte_count))

    def keys(self) -> Keys | None:
        """The keys, where messages have no other property; None where one has."""
        if self._keys is None:
            self._keys = (self._find_keys(),)
        return self._keys[0]

    def _find_keys(self) -> Keys | None:
        rows = np.flatnonzero(self.property_bytes)
        at, lengths = self.properties_at[rows], self.property_bytes[rows]
        if not len(rows):
            return Keys(b"", lengths, rows)
        if int(lengths.min()) <= len(_KEYS) + 1:
            return None
        names = _every(self.data, len(_KEYS))[at].tobytes()
        joined = _joined(self.data, at + len(_KEYS), lengths - len(_KEYS))
        if (
            names != _KEYS * len(rows)
            or joined.count(b"\x02") != len(rows)
            or b"\x01" in joined
            or b" " in joined
        ):
            return None
        return Keys(joined.replace(b"\x02", b""), lengths - len(_KEYS) - 1, rows)


def read_images(body: Buffer, count: int, topic: bytes, *, is_sealed: bool = False) -> Images:
    """So many images, whose bodies may be empty. Raises MessageIllegal unless all of them add up
    and are of this topic: those that are sealed were compared already.
    """
    if not 0 < count <= BATCH_COUNT_MAX:
        raise MessageIllegal(f"{count} messages: from 1 to {BATCH_COUNT_MAX} at once")
    whole: Bytes = np.frombuffer(body, np.uint8)
    sizes_end = len(whole) - (SIZE_BYTES * count if is_sealed else 0)
    cut = sizes_end - SIZE_BYTES * count
    magic, field = records.field_of_topic(topic)
    least_bytes = rest_bytes(topic)
    if cut < count * least_bytes:
        raise MessageIllegal("the messages are cut short")
    sizes: Numbers = whole[cut:sizes_end].view(">i4").astype(np.int64)
    sums: Numbers = whole[sizes_end:].view(">u4").astype(np.int64)
    data = whole[:cut]
    ends = np.cumsum(sizes)
    starts = ends - sizes
    if int(sizes.min()) < least_bytes or int(ends[-1]) != cut:
        raise MessageIllegal("the sizes of the messages do not add up")
    body_bytes = _numbers(data, starts + HEAD_BYTES - 4, ">i4")
    property_bytes = sizes - least_bytes - body_bytes
    properties_at = starts + HEAD_BYTES + body_bytes + len(field) + 2
    images = Images(data, sizes, starts, body_bytes, properties_at, property_bytes, sums)
    if not is_sealed:
        _check(images, magic, field)
    return images


def _check(images: Images, magic: int, field: bytes) -> None:
    """Compare what images say of themselves, once their sizes add up."""
    data, starts, body_bytes = images.data, images.starts, images.body_bytes
    properties_at, property_bytes = images.properties_at, images.property_bytes
    if (
        (_numbers(data, starts, ">i4") != images.sizes).any()
        or (_numbers(data, starts + 4, ">u4") != magic).any()
        or int(body_bytes.min()) < 0
        or int(property_bytes.min()) < 0
    ):
        raise MessageIllegal("a message does not fit into its size")
    stored_bytes = _numbers(data, properties_at - 2, ">i2")
    if (stored_bytes != property_bytes + records.CRC_PROPERTY_BYTES).any():
        raise MessageIllegal("the parts of a message do not add up to its size")
    field_at = properties_at - 2 - len(field)
    if _every(data, len(field))[field_at].tobytes() != field * len(images):
        raise MessageIllegal("a message of another topic")
    last = data[properties_at + property_bytes - 1]
    if ((property_bytes > 0) & (last != _SEPARATOR)).any():
        raise MessageIllegal("properties without their separator")


def completed(
    images: Images,
    shape: BatchShape,
    middle: bytes,
    queue_offset: int,
    position: int,
    block_bytes: int,
) -> Iterator[memoryview]:
    """The entries that sealed images become, ready to be written from `position` on, in blocks;
    `middle` is `shape.middle`.
    """
    heads = _heads(images, shape, middle, queue_offset, position)
    for rows in images.blocks(block_bytes):
        starts, sizes = images.starts[rows], images.sizes[rows]
        begin = int(starts[0])
        entries = images.data[begin : int(starts[-1] + sizes[-1])].copy()
        starts = starts - begin
        ends_at = starts + sizes - records.CRC_PROPERTY_BYTES
        _every(entries, HEAD_BYTES)[starts] = heads[rows]
        sums = _checksums(entries.data, starts, ends_at)
        _every(entries, records.CRC_PROPERTY_BYTES)[ends_at] = _ends(sums)
        yield entries.data


def _heads(
    images: Images, shape: BatchShape, middle: bytes, queue_offset: int, position: int
) -> npt.NDArray[np.void]:
    count = len(images)
    heads = np.empty(count, _HEAD)
    heads["size"] = images.sizes
    heads["magic"] = shape.magic
    heads["crc"] = images.sums
    heads["queue"] = shape.queue_id
    heads["flag"] = _numbers(images.data, images.starts + _FLAG_AT, ">i4")
    heads["offset"] = np.arange(queue_offset, queue_offset + count)
    heads["position"] = images.starts + position
    heads["middle"] = np.frombuffer(middle, "V48")
    heads["body"] = images.body_bytes
    return heads.view(f"V{HEAD_BYTES}")


def _ends(sums: Numbers) -> npt.NDArray[np.void]:
    """The properties that close entries with these checksums."""
    upper = sums // 10_000
    high = upper // 10_000
    ends = np.empty(len(sums), _END)
    ends["low"] = _DIGITS[0][sums - upper * 10_000]
    ends["middle"] = _DIGITS[1][upper - high * 10_000]
    ends["high"] = _DIGITS[2][high]
    return ends.view(f"V{_END.itemsize}")


def _checksums(view: memoryview, begins: Numbers, ends: Numbers) -> Numbers:
    slices = map(slice, begins.tolist(), ends.tolist())
    found = np.fromiter(map(crc32, map(view.__getitem__, slices)), np.int64, len(begins))
    return found & _MASK_31


def _every(data: Bytes, width: int) -> npt.NDArray[Any]:
    """The data as if every byte began so many bytes."""
    return np.ndarray((len(data) - width + 1,), f"V{width}", data.data, 0, (1,))


def _numbers(data: Bytes, ats: Numbers, kind: str) -> Numbers:
    width = np.dtype(kind).itemsize
    every: npt.NDArray[Any] = np.ndarray((len(data) - width + 1,), kind, data.data, 0, (1,))
    found: Numbers = every[ats].astype(np.int64)
    return found


def _joined(data: Bytes, ats: Numbers, lengths: Numbers) -> bytes:
    """The bytes at these places, of these lengths, one after the other."""
    moved = ats - (np.cumsum(lengths) - lengths)
    found: Bytes = data[np.repeat(moved, lengths) + np.arange(int(lengths.sum()))]
    return found.tobytes()
