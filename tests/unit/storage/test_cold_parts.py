"""What is read from the disk for a read of pieces of the log that are not in memory."""

from __future__ import annotations

import errno
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from sluice.storage.cold_parts import ColdParts
from sluice.storage.commit_log import CommitLog
from sluice.storage.files import RealFiles
from sluice.storage.store import ColdRead
from sluice.storage.stretches import STRETCH_BYTES

SEGMENT = 4 * STRETCH_BYTES + 4096  # the last stretch of a file is a short one
WRITTEN = SEGMENT + STRETCH_BYTES + 100_000
NOTHING_HOT = 1 << 62
PIECE = 16 << 10


class ColdFile:
    """A file of which nothing is in memory before it was fetched."""

    def __init__(self) -> None:
        self.fetched: list[tuple[int, int]] = []
        self.bad: tuple[int, int] = (0, 0)
        self.looks = 0

    def resident(self, start: int, stop: int) -> bool:
        self.looks += 1
        return any(begin <= start and stop <= end for begin, end in self.fetched)

    def fetch(self, start: int, stop: int) -> None:
        if start < self.bad[1] and self.bad[0] < stop:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        self.fetched.append((start, stop))


class ColdLog:
    """A log of two files, and what reads of it fetch."""

    def __init__(self) -> None:
        self.files = [ColdFile(), ColdFile()]
        self.whole_looks: list[tuple[int, int]] = []
        segments = {n * SEGMENT: SimpleNamespace(file=file) for n, file in enumerate(self.files)}
        log = SimpleNamespace(
            segment_bytes=SEGMENT, segments=segments, written=WRITTEN, is_cached=self._is_cached
        )
        self._parts = ColdParts(cast("CommitLog", log))

    def _is_cached(self, start: int, stop: int) -> bool:
        self.whole_looks.append((start, stop))
        return False

    def read(self, *parts: tuple[int, int], hot_from: int = NOTHING_HOT) -> list[tuple[int, int]]:
        """What was fetched for a read of these parts, by positions of the log."""
        before = [len(file.fetched) for file in self.files]
        try:
            self._parts.require(list(parts), hot_from)
        except ColdRead as cold:
            cold.work()
            self._parts.require(list(parts), hot_from)  # and now all of it is there
        return [
            (number * SEGMENT + start, number * SEGMENT + stop)
            for number, file in enumerate(self.files)
            for start, stop in file.fetched[before[number] :]
        ]


def piece(at: int) -> tuple[int, int]:
    return at, at + PIECE


def test_a_piece_by_itself_is_read_by_itself() -> None:
    log = ColdLog()
    assert log.read(piece(100), piece(STRETCH_BYTES + 5)) == [piece(100), piece(STRETCH_BYTES + 5)]
    assert log.read(piece(100)) == [], "it is in memory"
    assert log.read(piece(SEGMENT + 7)) == [piece(SEGMENT + 7)], "another file"


def test_who_wants_nothing_waits_for_nothing() -> None:
    assert ColdLog().read() == []


def test_who_wants_something_of_the_same_stretch_later_gets_all_of_it() -> None:
    log = ColdLog()
    log.read(piece(100))
    assert log.read(piece(3 << 20)) == [(0, STRETCH_BYTES)]
    assert log.read(piece(1 << 20)) == []


def test_a_good_part_of_a_stretch_is_read_with_the_rest_of_it() -> None:
    log = ColdLog()
    pieces = [piece(at << 17) for at in range(16)]
    assert log.read(*pieces) == [(0, STRETCH_BYTES)]


def test_what_reaches_into_the_next_stretch_is_read_with_it() -> None:
    log = ColdLog()
    parts = [(STRETCH_BYTES - (1 << 20), STRETCH_BYTES + 10)]
    assert log.read(*parts) == [(0, 2 * STRETCH_BYTES)]


def test_nothing_is_read_behind_the_end_of_a_file_or_of_the_log() -> None:
    log = ColdLog()
    last = 4 * STRETCH_BYTES
    for at in (last, last + 2048):
        log.read((at, at + 2048))
    log.read((last + 1000, last + 3000))
    assert log.files[0].fetched[-1] == (last, SEGMENT)
    behind = SEGMENT + STRETCH_BYTES
    log.read(piece(behind))
    assert log.read(piece(behind + PIECE)) == [(behind, WRITTEN)]


def test_what_is_hot_is_not_asked_about() -> None:
    log = ColdLog()
    assert log.read(piece(100), piece(1 << 20), hot_from=1 << 20) == [piece(100)]
    assert log.read(piece(2 << 20), hot_from=1 << 20) == []


def test_a_place_that_cannot_be_read_fails_only_who_wants_it() -> None:
    log = ColdLog()
    log.files[0].bad = (2 << 20, (2 << 20) + 512)
    log.read(piece(100))
    assert log.read(piece(1 << 20)) == [piece(1 << 20)]
    with pytest.raises(OSError, match=os.strerror(errno.EIO)):
        log.read(piece(2 << 20))


def test_one_look_at_all_is_for_what_lies_close_together() -> None:
    log = ColdLog()
    log.read(piece(0), piece(1 << 20), piece(2 << 20))
    assert not log.whole_looks, "three pieces in two megabytes: each is looked at"
    log.read(*(piece(at << 15) for at in range(200, 264)))
    assert log.whole_looks[0] == (200 << 15, (263 << 15) + PIECE)


def test_of_many_stretches_the_oldest_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sluice.storage.cold_parts._TOUCHED_MAX", 2)
    log = ColdLog()
    for number in range(3):
        log.read(piece(number * STRETCH_BYTES))
    again = piece(1 << 20)
    assert log.read(again) == [again], "as if nobody had wanted anything of it"


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells what a mapping was told")
@pytest.mark.parametrize("is_mapped_first", [True, False])
def test_who_looks_at_what_was_fetched_has_nothing_read_ahead(
    tmp_path: Path, *, is_mapped_first: bool
) -> None:
    file = RealFiles().create(f"{tmp_path}/log", 1 << 20)
    if is_mapped_first:
        file.view()
    file.fetch(0, 4096)
    view = file.view()
    assert "rr" in flags_of(tmp_path / "log"), "else the system guesses, and who looks waits"
    assert len(view) == 1 << 20


def flags_of(path: Path) -> list[str]:
    """What the system was told of this process's mapping of a file."""
    is_it = False
    for line in Path("/proc/self/smaps").read_text(encoding="utf-8").splitlines():
        if line.endswith(f" {path}"):
            is_it = True
        elif is_it and line.startswith("VmFlags:"):
            return line.split()[1:]
    raise AssertionError(f"{path} is not mapped")
