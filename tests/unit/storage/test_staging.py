"""Files that staged entries are kept in: what is there, what is durable, what is written over."""

from __future__ import annotations

import errno
from collections.abc import Callable

import pytest

from sluice.errors import SluiceError, StoreError
from sluice.storage import staging
from sluice.storage.background import Background, Inline, Steps
from sluice.storage.memory_files import KeepAll, KeepNothing, MemoryFiles
from sluice.storage.queue_index import ColdRead
from sluice.storage.staging import FLOOR, KEPT_MS, StagingArea

FILE_BYTES = 8192


class Rig:
    """An area on a simulated disk, with a clock that a test turns."""

    def __init__(self, files: MemoryFiles | None = None, background: Background | None = None):
        self.files = files or MemoryFiles()
        self.files.make_directory("/s")
        self.now_ms = 1_000_000_000
        self.outcome: list[SluiceError | None] = []
        self.area = StagingArea(
            *(self.files, "/s/staging", background or Inline(), lambda: self.now_ms, FILE_BYTES)
        )

    def put(self, body: bytes, about: bytes = b"about") -> int:
        position = self.area.put(about, (body[:3], body[3:]))
        assert position is not None
        return position

    def body(self, position: int) -> bytes | None:
        entry = self.area.get(position)
        return None if entry is None else bytes(entry.body)

    def names(self) -> list[str]:
        return self.files.names("/s/staging")

    def again(
        self, keep: object = None, is_needed: Callable[[int, bytes], bool] = lambda *_: True
    ) -> Rig:
        """What the next process finds; without `keep` after a kill."""
        rig = Rig(self.files.crash(keep or KeepAll()))  # type: ignore[arg-type]
        rig.area.open(is_needed)
        return rig


def test_what_is_put_can_be_read_until_somebody_is_done_with_it() -> None:
    rig = Rig()
    first, second = rig.put(b"first"), rig.put(b"second", b"")
    assert FLOOR <= first < second < 10**18, "a handle has 18 digits"
    assert (rig.body(first), rig.body(second)) == (b"first", b"second")
    entry = rig.area.get(first)
    assert entry is not None
    assert bytes(entry.about) == b"about"
    assert rig.body(first + 1) is None
    assert rig.body(FLOOR + (5 << 26)) is None
    assert rig.area.holds(second)
    rig.area.drop([second, 77])
    assert not rig.area.holds(second)
    assert rig.area.holds(first)


def test_files_are_written_again_and_old_positions_are_not_good_for_what_is_there_now() -> None:
    rig = Rig()
    old: list[int] = []
    for _ in range(20):
        batch = [rig.put(b"x" * 3000) for _ in range(4)]
        assert all(rig.body(each) == b"x" * 3000 for each in batch)
        assert not any(rig.area.holds(each) for each in old)
        assert all(rig.body(each) is None for each in old[:-2])
        rig.area.drop(batch)
        old += batch
    assert len(set(old)) == 80
    assert len(rig.names()) <= 3


def test_without_room_there_is_no_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging, "FILES_MAX", 2)
    rig = Rig()
    assert rig.area.put(b"", (b"x" * FILE_BYTES,)) is None, "larger than a file"
    kept = [rig.put(b"x" * 6000), rig.put(b"x" * 6000)]
    assert rig.area.put(b"", (b"x" * 6000,)) is None
    assert rig.put(b"a small one")
    rig.area.drop(kept[:1])
    assert rig.put(b"y" * 6000)


def test_a_disk_that_takes_nothing_is_no_place_and_loses_nothing() -> None:
    rig = Rig()
    first = rig.put(b"first")
    rig.files.fail("pwritev", error=errno.ENOSPC, within="/staging/")
    assert rig.area.put(b"", (b"lost",)) is None
    second = rig.put(b"second")
    assert (rig.body(first), rig.body(second)) == (b"first", b"second")
    rig.files.fail("create", error=errno.ENOSPC, within="/staging/")
    assert rig.area.put(b"", (b"x" * 8150,)) is None


def test_a_killed_process_leaves_what_is_needed_and_room_where_nothing_is() -> None:
    rig = Rig()
    large = [rig.put(b"%d" % n * 3000) for n in range(5)]
    asked: list[tuple[int, bytes]] = []

    def is_needed(position: int, about: bytes) -> bool:
        asked.append((position, about))
        return position == large[2]

    later = rig.again(is_needed=is_needed)
    assert asked == [(position, b"about") for position in large]
    assert later.body(large[2]) == b"2" * 3000
    assert [later.area.holds(each) for each in large] == [False, False, True, False, False]
    new = [later.put(b"n" * 3000) for _ in range(4)]
    assert min(new) > max(large)
    assert len(later.names()) == 3, "files that nobody needs are used"
    assert later.body(large[2]) == b"2" * 3000


def test_what_was_synced_is_there_after_a_power_cut() -> None:
    rig = Rig()
    large = [rig.put(b"%d" % n * 3000) for n in range(5)]
    assert rig.again(KeepNothing()).body(large[4]) is None
    rig.area.sync([large[0], large[4], 77], rig.outcome.append)
    assert rig.outcome == [None]
    calls = rig.files.calls["sync"]
    rig.area.sync([large[0]], rig.outcome.append)
    assert rig.files.calls["sync"] == calls, "nothing is left to do"
    later = rig.again(KeepNothing())
    assert (later.body(large[0]), later.body(large[4])) == (b"0" * 3000, b"4" * 3000)


def test_a_sync_that_fails_is_told_and_what_was_durable_before_stays() -> None:
    rig = Rig()
    before = rig.put(b"before")
    rig.area.sync([before], rig.outcome.append)
    after = rig.put(b"after")
    rig.files.fail("sync", within="/staging/")
    rig.area.sync([after], rig.outcome.append)
    assert rig.outcome[0] is None
    assert isinstance(rig.outcome[1], StoreError)
    assert rig.area.holds(before)
    assert not rig.area.holds(after)
    other = rig.put(b"other")
    assert other - FLOOR >= 1 << 26, "the file is not written any more"
    names = rig.names()
    rig.area.drop([before])
    assert len(rig.names()) == len(names) - 1
    assert rig.body(other) == b"other"


def test_who_waits_behind_a_sync_that_fails_is_told_as_well() -> None:
    steps = Steps()
    rig = Rig(background=steps)
    position = rig.put(b"lost")
    rig.area.sync([position], rig.outcome.append)
    rig.area.sync([position], rig.outcome.append)
    rig.files.fail("sync", within="/staging/")
    steps.run_all()
    assert all(isinstance(each, StoreError) for each in rig.outcome)
    assert len(rig.outcome) == 2


def test_what_a_disk_has_changed_is_not_there() -> None:
    rig = Rig()
    position = rig.put(b"x" * 100)
    later = rig.again()
    assert later.body(position) == b"x" * 100
    later.files.flip("/s/staging/0000", 8 * 90)
    assert later.body(position) is None


def test_what_is_not_in_memory_is_asked_for_and_then_compared() -> None:
    rig = Rig()
    position = rig.put(b"x" * 5000)
    for start, stop in ((0, 10), (4096, 4100)):
        rig.files.cold("/s/staging/0000", start, stop)
        with pytest.raises(ColdRead) as cold:
            rig.area.get(position)
        cold.value.work()
    assert rig.body(position) == b"x" * 5000
    rig.files.flip("/s/staging/0000", 8 * 90)
    assert rig.body(position) is None


def test_what_nobody_asks_for_is_given_up_after_days_and_its_files_go() -> None:
    rig = Rig()
    large = [rig.put(b"%d" % n * 6000) for n in range(3)]
    rig.now_ms += KEPT_MS - 1
    rig.area.tick([])
    assert all(rig.area.holds(each) for each in large)
    rig.now_ms += 1
    rig.area.tick([large[1], 77])
    assert [rig.area.holds(each) for each in large] == [False, True, False]
    assert rig.body(large[1]) == b"1" * 6000
    assert len(rig.names()) == 1
    rig.area.drop([large[1]])
    rig.area.tick([])
    assert rig.names() == []


def test_a_file_that_cannot_be_opened_is_named() -> None:
    rig = Rig()
    rig.put(b"x")
    files = rig.files.crash(KeepAll())
    files.fail("open", within="/staging/")
    with pytest.raises(StoreError, match="/s/staging/0000"):
        Rig(files).area.open(lambda *_: True)
