"""This module gathers the properties of many entries at once, for filters that look at them.

A filter that few messages pass looks at very many, and most of what one costs is the looking. Here
all is done in few steps, of which each works on all entries: their heads are compared with the
queue's units, column by column, and their properties are put into one text, which a pattern can
search from end to end. Such a pattern must not ask for the separator before a property, for the
first one has none, nor need a time that grows faster than the text.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterator
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from sluice.protocol import records
from sluice.storage.queue_index import SIMPLE_ROW

Numbers = npt.NDArray[np.int64]

UNIT_BYTES: Final = SIMPLE_ROW.itemsize
# Where an entry with IPv4 hosts has its size, its position, its flags and the size of its body.
_SIZE: Final = (0, ">i4")
_POSITION: Final = (28, ">i8")
_FLAGS: Final = (36, ">i4")
_BODY_SIZE: Final = (84, ">i4")
_HEAD_BYTES: Final = 88
_WASTE_BYTES_MAX: Final = 1 << 16
_V6_HOSTS: Final = records.SYS_BORN_V6 | records.SYS_STORE_V6


class Gathered:
    """The properties of entries: 0x02, those of the first, 0x02, those of the second, ... 0x02."""

    def __init__(self, text: bytes, sizes: Numbers) -> None:
        self._text = text
        self._sizes = sizes

    def framed(self, screen: re.Pattern[bytes] | None) -> Iterator[tuple[int, bytes]]:
        """Numbers and framed properties of the entries that the screen lets pass."""
        text = self._text
        match = None
        if screen is not None:
            match = screen.search(text)
            if match is None:
                return
        # Where the separator behind each of them is; the one before it belongs to it too.
        ends = np.cumsum(self._sizes + 1).tolist()
        if screen is None:
            start = 0
            for index, end in enumerate(ends):
                yield index, text[start : end + 1]
                start = end
            return
        while match is not None:
            index = bisect_right(ends, match.start())
            yield index, text[ends[index - 1] if index else 0 : ends[index] + 1]
            match = screen.search(text, ends[index])


class Places:
    """Where entries of a queue lie in the file that begins at `base`, and their properties in it.

    Raises ValueError where one is not what its raw unit says, or has IPv6 hosts, whose properties
    begin elsewhere. That an entry is of this queue is looked at when it is returned.
    """

    def __init__(self, view: memoryview, base: int, units: bytes | bytearray, topic: bytes) -> None:
        rows = np.frombuffer(units, SIMPLE_ROW)
        ats = rows["position"] - base
        last_at = len(view) - _HEAD_BYTES
        if ats.min() < 0 or ats.max() > last_at:
            raise ValueError("an entry is elsewhere")

        def column(where: tuple[int, str]) -> Numbers:
            """A field of all heads: of the file as if every byte began an entry, those that do."""
            offset, kind = where
            every: npt.NDArray[Any] = np.ndarray((last_at + 1,), kind, view, offset, (1,))
            chosen: Numbers = every[ats].astype(np.int64)
            return chosen

        sizes, body_sizes = column(_SIZE), column(_BODY_SIZE)
        self._view = view
        self.ats = ats
        # After the head and the body: the topic with its size, and the size of the properties.
        self.starts = ats + body_sizes + (91 + len(topic) + (len(topic) > 127))
        self.ends = ats + sizes
        if (
            (sizes != rows["size"]).any()
            or (column(_POSITION) != rows["position"]).any()
            or (column(_FLAGS) & _V6_HOSTS).any()
            or body_sizes.min() < 0
            or (self.starts > self.ends).any()
        ):
            raise ValueError("an entry is not what its unit says")

    def gathered(self) -> Gathered:
        view = self._view
        places = zip(self.starts.tolist(), self.ends.tolist(), strict=True)
        text = b"\x02".join([b"", *[view[start:end] for start, end in places], b""])
        return Gathered(text, self.ends - self.starts)

    def table(self) -> Table | None:
        """All properties in rows of the same width; None where that would be much wider than they
        are, or where some do not end in 0x02.
        """
        sizes = self.ends - self.starts
        width = int(sizes.max())
        if width * len(sizes) > 2 * int(sizes.sum()) + _WASTE_BYTES_MAX:
            return None
        last_start = len(self._view) - width
        lasts = np.frombuffer(self._view, np.uint8)[self.ends - 1]
        if not width or int(self.starts.max()) > last_start or (lasts != 2).any():
            return None
        # The file as if a row began at every byte of it, and those rows where properties begin.
        every = np.ndarray((last_start + 1,), f"V{width}", self._view, 0, (1,))
        return Table(every[self.starts].tobytes(), width, sizes)


class Table:
    """The properties of entries in rows: behind the shorter ones stands what follows in the log."""

    def __init__(self, text: bytes, width: int, sizes: Numbers) -> None:
        self._text = text
        self._width = width
        self._sizes = sizes

    def framed(self, screen: re.Pattern[bytes]) -> Iterator[tuple[int, bytes]]:
        """Numbers and framed properties of the entries that the screen lets pass."""
        text, width = self._text, self._width
        at = 0
        while (match := screen.search(text, at)) is not None:
            index, column = divmod(match.start(), width)
            size = int(self._sizes[index])
            if column < size:
                start = index * width
                yield index, b"\x02%b\x02" % text[start : start + size]
            at = (index + 1) * width


def gather(view: memoryview, base: int, units: bytes | bytearray, topic: bytes) -> Gathered | None:
    """The properties of entries, by their raw units; None where one needs a closer look."""
    try:
        return Places(view, base, units, topic).gathered()
    except ValueError:
        return None
