"""This module measures what the machine itself can do with the same bytes: the bar to hold against.

No format, no index, no checks: the same buffers, written by `pwritev` into a file made like a log
file, with or without `fdatasync`, or copied in memory. The figures are messages per second.
"""

import os
import time
from collections.abc import Sequence
from pathlib import Path

FILE_BYTES = 1 << 30


class PlainFile:
    """A sparse file of fixed size, as the log's are, that is written round and round."""

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        self._path = path
        self._end = 0
        self._renew()

    def write_rate(self, turn: Sequence[bytes], *, sync: bool, seconds: float) -> float:
        """Messages per second when every turn is one pwritev, and one fdatasync if `sync`."""
        turn_bytes = sum(map(len, turn))
        count = 0
        begin = time.perf_counter()
        deadline = begin + seconds
        while (now := time.perf_counter()) < deadline:
            if self._end + turn_bytes > FILE_BYTES:
                # Off the clock: the store has its next file made in the background, too.
                pause = time.perf_counter()
                self._renew()
                pause = time.perf_counter() - pause
                begin += pause
                deadline += pause
            written = os.pwritev(self._descriptor, turn, self._end)
            assert written == turn_bytes, "a short write to a file on a disk with room"
            if sync:
                os.fdatasync(self._descriptor)
            self._end += turn_bytes
            count += len(turn)
        rate = count / (now - begin)
        os.fdatasync(self._descriptor)  # what is still in memory must not burden the next one
        return rate

    def close(self) -> None:
        os.close(self._descriptor)
        self._path.unlink()

    def _renew(self) -> None:
        """Fresh blocks for each pass: overwriting allocated ones is cheaper than appending."""
        os.ftruncate(self._descriptor, 0)
        os.ftruncate(self._descriptor, FILE_BYTES)
        self._end = 0


def copy_rate(turn: Sequence[bytes], *, seconds: float) -> float:
    """Messages per second when every turn is joined into one new object, and nothing else."""
    count = 0
    begin = time.perf_counter()
    deadline = begin + seconds
    while (now := time.perf_counter()) < deadline:
        b"".join(turn)
        count += len(turn)
    return count / (now - begin)


def slice_copy_rate(area: memoryview, size: int, batch: int, *, seconds: float) -> float:
    """Messages per second when each read copies `batch` neighbouring pieces out of memory."""
    count = 0
    at = 0
    span = size * batch
    assert span <= len(area)
    begin = time.perf_counter()
    deadline = begin + seconds
    while (now := time.perf_counter()) < deadline:
        if at + span > len(area):
            at = 0
        bytes(area[at : at + span])
        at += span
        count += batch
    return count / (now - begin)


def private_bytes(process: str = "self") -> int:
    """Memory that is the process's own: resident pages that belong to no file."""
    rollup = Path(f"/proc/{process}/smaps_rollup").read_text(encoding="ascii")
    for line in rollup.splitlines():
        name, _, value = line.partition(":")
        if name == "Anonymous":
            return int(value.split()[0]) * 1024
    raise OSError("smaps_rollup has no line 'Anonymous'")
