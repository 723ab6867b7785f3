"""What is known to be in memory of a large file: from the second question on, for a moment."""

from __future__ import annotations

from pathlib import Path

import pytest

from sluice.storage.files import RealFiles
from sluice.storage.stretches import STRETCH_BYTES, Stretches

KIB = 1 << 10


class File:
    """Notes what is asked of the system."""

    def __init__(self) -> None:
        self.now_ns = 1
        self.is_cached = True
        self.asked: list[int] = []
        self.stretches = Stretches(lambda: self.now_ns)

    def cached(self, start: int, stop: int) -> bool:
        assert start % STRETCH_BYTES == 0
        assert stop - start == STRETCH_BYTES
        self.asked.append(start // STRETCH_BYTES)
        return self.is_cached

    def hold(self, start: int, size: int = 32 * KIB) -> bool:
        return self.stretches.hold(start, start + size, self.cached)


def test_the_second_question_is_put_for_the_whole_stretch() -> None:
    file = File()
    assert not file.hold(0), "who asks once is answered in another way"
    assert file.asked == []
    assert all(file.hold(at * 32 * KIB) for at in range(1, 128))
    assert file.asked == [0]


def test_an_answer_is_good_for_a_moment() -> None:
    file = File()
    file.hold(0)
    assert file.hold(0)
    file.is_cached = False
    file.now_ns += 49_000_000
    assert file.hold(0)
    file.now_ns += 1_000_000
    assert not file.hold(0)
    assert not file.hold(0)
    assert file.asked == [0, 0]
    assert not file.hold(0), "a no is good for as long"
    assert file.asked == [0, 0]


def test_a_range_over_two_stretches_needs_both() -> None:
    file, at = File(), STRETCH_BYTES - 16 * KIB
    assert [file.hold(at) for _ in range(4)] == [False, False, True, True]
    assert file.asked == [0, 1]


def test_many_stretches_cost_little() -> None:
    file = File()
    for at in range(1000):
        file.hold(at * STRETCH_BYTES)
    assert len(file.stretches._seen) <= 64


def test_it_says_nothing_of_a_closed_file_or_of_what_follows_the_end(tmp_path: Path) -> None:
    size = 2 * STRETCH_BYTES + 10_000
    file = RealFiles().create(f"{tmp_path}/a", size)
    file.pwritev([bytes(size)], 0)
    if not file.resident(0, 4096):
        pytest.skip("this file system cannot be asked what is in memory")
    for _ in range(3):
        assert file.resident(STRETCH_BYTES, STRETCH_BYTES + 4096)
        assert file.resident(size - 4096, size)
        assert not file.resident(size - 4096, size + 1)
    file.close()
    with pytest.raises(OSError, match="Bad file"):
        file.resident(STRETCH_BYTES, STRETCH_BYTES + 4096)
