"""This module writes to a file so that the system takes its memory in blocks of one size.

The system chooses how much memory it takes at once by how long a write is and where it begins.
Pieces of all sizes are the result, and when they are given back (`old_pages.py`) a longer write
does not find a piece that it fits into: it takes new memory, which is what was to be avoided. So
each block of the file is written by a call of its own, and who begins a block fills it up: with
zeros, which is what such a file holds behind its end anyway. Those bytes are written twice, for a
tenth of what a new page costs where memory is slow to get. Elsewhere nobody should use it.

It keeps nothing; writes that follow each other in one file must come in that order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from sluice.model import Buffer
from sluice.storage.files import OpenFile

BLOCK_BYTES: Final = 128 << 10
_ZEROS: Final = memoryview(bytes(BLOCK_BYTES))


def write_in_blocks(file: OpenFile, buffers: Sequence[Buffer], offset: int, bytes_max: int) -> int:
    """Do what `OpenFile.pwritev` does to a file of so many bytes that holds zeros from the end of
    these buffers on. Returns how many bytes they had.
    """
    begin, part = offset, list[Buffer]()  # what is not written yet, and where it goes
    room = BLOCK_BYTES - offset % BLOCK_BYTES  # left in the block
    for buffer in buffers:
        rest = buffer
        while len(rest) >= room:
            view = memoryview(rest)
            part.append(view[:room])
            begin += file.pwritev(part, begin)
            rest, part, room = view[room:], [], BLOCK_BYTES
        if len(rest):
            part.append(rest)
            room -= len(rest)
    end = begin - begin % BLOCK_BYTES + BLOCK_BYTES - room
    if part:
        if not begin % BLOCK_BYTES:
            part.append(_ZEROS[: min(room, bytes_max - end)])
        file.pwritev(part, begin)
    return end - offset
