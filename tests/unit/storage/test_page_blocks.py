"""Writes block by block: the same bytes as one write leaves, and every block begun is filled."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import cast

import pytest

from sluice.model import Buffer
from sluice.storage.background import Steps
from sluice.storage.commit_log import CommitLog
from sluice.storage.files import OpenFile
from sluice.storage.memory_files import MemoryFiles
from sluice.storage.page_blocks import BLOCK_BYTES, write_in_blocks

FILE_BYTES = 5 * BLOCK_BYTES + 1000


class File:
    """A file of zeros that notes its writes."""

    def __init__(self) -> None:
        self.data = bytearray(FILE_BYTES)
        self.writes: list[tuple[int, int]] = []

    def pwritev(self, buffers: Sequence[Buffer], offset: int) -> int:
        joined = b"".join(buffers)
        self.data[offset : offset + len(joined)] = joined
        assert len(self.data) == FILE_BYTES, "it does not grow"
        self.writes.append((offset, offset + len(joined)))
        return len(joined)


def write(file: File, buffers: Sequence[Buffer], offset: int) -> int:
    return write_in_blocks(cast(OpenFile, file), buffers, offset, FILE_BYTES)


@pytest.mark.parametrize("seed", range(20))
def test_it_leaves_what_one_write_leaves(seed: int) -> None:
    rng = random.Random(seed)
    file, plain = File(), bytearray(FILE_BYTES)
    at = rng.choice([0, 1, BLOCK_BYTES - 1, BLOCK_BYTES])
    while at < FILE_BYTES:
        largest = rng.choice([10, 5_000, BLOCK_BYTES, 3 * BLOCK_BYTES])
        buffers: list[Buffer] = []
        room = FILE_BYTES - at
        for _ in range(rng.randrange(1, 6)):
            one = rng.randbytes(min(rng.randrange(largest), room))
            room -= len(one)
            buffers.append(rng.choice([bytes, bytearray, memoryview])(one))
        joined = b"".join(buffers)
        if not joined:
            continue
        assert write(file, buffers, at) == len(joined)
        plain[at : at + len(joined)] = joined
        assert file.data == plain
        at += len(joined)
    for begin, end in file.writes:
        assert begin // BLOCK_BYTES == (end - 1) // BLOCK_BYTES, "never across two blocks"
        if begin % BLOCK_BYTES == 0:
            assert end % BLOCK_BYTES == 0 or end == FILE_BYTES, "who begins a block fills it"


def test_a_block_that_was_begun_is_not_filled_again() -> None:
    file = File()
    write(file, [b"abc"], 0)
    write(file, [b"de", b"f"], 3)
    assert file.writes == [(0, BLOCK_BYTES), (3, 6)]
    assert file.data[:8] == b"abcdef\0\0"


def test_nothing_is_nothing() -> None:
    file = File()
    assert write(file, [], 0) == 0
    assert write(file, [b""], BLOCK_BYTES) == 0
    assert file.writes == []


def test_the_log_is_written_so_where_memory_is_slow() -> None:
    files = {name: MemoryFiles() for name in ("usual", "slow")}
    for name, disk in files.items():
        log = CommitLog(disk, "/log", Steps(), 3 * BLOCK_BYTES + 7)
        log.load()
        log.finish_load(0)
        if name == "slow":
            log._old_pages.begin()
        for number in range(40):
            size = 1 + number * 7919 % 50_000
            log.position_for(size)
            log.stage(bytes((number + 1,)) * size)
            if number % 3 == 0:
                log.write_early()
            log.write()
        log.close()
    usual, slow = (
        [disk.open(f"/log/{name}").pread(1 << 20, 0) for name in disk.names("/log")]
        for disk in files.values()
    )
    assert usual == slow
