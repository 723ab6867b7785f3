"""Early writes: in order, whoever writes; a failure takes the turn back; nothing is left behind."""

from __future__ import annotations

import errno
from functools import partial
from threading import Event, current_thread, get_ident

import pytest

from sluice.errors import DiskFull, SluiceError
from sluice.model import Buffer, Message
from sluice.storage.background import Steps, Threads
from sluice.storage.early_writes import EarlyWrites
from sluice.storage.memory_files import MemoryFiles
from tests.unit.storage.store_kit import Disk

LANE = "early"
WAIT_SECONDS = 60.0


class File:
    """Notes who wrote what; may be held up, or fail at a place."""

    path = "/f"
    size = 100

    def __init__(self) -> None:
        self.written: list[tuple[int, bytes]] = []
        self.writers: list[int] = []
        self.begun, self.may_go_on = Event(), Event()
        self.may_go_on.set()
        self.fails_at = -1

    def pwritev(self, buffers: list[Buffer], offset: int) -> int:
        self.begun.set()
        assert self.may_go_on.wait(WAIT_SECONDS)
        if offset == self.fails_at:
            raise OSError(errno.ENOSPC, "no room")
        self.written.append((offset, b"".join(buffers)))
        self.writers.append(get_ident())
        return sum(map(len, buffers))


def begin(early: EarlyWrites, file: File, *offsets: int) -> None:
    for offset in offsets:
        early.begin(partial(file.pwritev, [b"at", b"%d" % offset], offset))


def test_who_finishes_writes_what_nobody_has_begun() -> None:
    background, file = Steps(), File()
    early = EarlyWrites(background)
    begin(early, file, 1, 2, 3)
    assert background.step(LANE)
    assert file.written == [(1, b"at1")]
    assert early
    assert early.finish().byte_count == 9
    assert file.written == [(1, b"at1"), (2, b"at2"), (3, b"at3")]
    assert not early
    background.run_all()  # the thread comes too late for them
    assert len(file.written) == 3


def test_it_waits_for_what_the_thread_writes() -> None:
    background, file = Threads(lambda call: call()), File()
    early = EarlyWrites(background)
    file.may_go_on.clear()
    begin(early, file, 1)
    assert file.begun.wait(WAIT_SECONDS)
    begin(early, file, 2, 3)
    file.may_go_on.set()
    early.finish()
    assert [offset for offset, _ in file.written] == [1, 2, 3]
    assert file.writers[0] != current_thread().ident
    background.close()
    assert len(file.written) == 3


def test_nothing_is_written_after_a_failure() -> None:
    background, file = Steps(), File()
    early = EarlyWrites(background)
    file.fails_at = 2
    begin(early, file, 1, 2, 3)
    background.run_all()
    assert file.written == [(1, b"at1")]
    with pytest.raises(OSError, match="no room"):
        early.finish()
    begin(early, file, 4)  # the next turn begins anew
    early.finish()
    assert file.written == [(1, b"at1"), (4, b"at4")]


def test_what_was_dropped_is_never_written() -> None:
    background, file = Steps(), File()
    early = EarlyWrites(background)
    begin(early, file, 1, 2)
    background.step(LANE)
    early.drop()
    background.run_all()
    early.finish()
    assert file.written == [(1, b"at1")]


def test_what_is_quick_is_written_at_once_behind_what_was_begun_before() -> None:
    background, file = Steps(), File()
    early = EarlyWrites(background)
    begin(early, file, 1)
    early.do(partial(file.pwritev, [b"at2"], 2))
    assert [offset for offset, _ in file.written] == [1, 2]
    background.run_all()
    assert early.finish().byte_count == 6
    assert [offset for offset, _ in file.written] == [1, 2]
    assert not early


def test_what_goes_wrong_at_once_is_met_at_the_end_of_the_turn() -> None:
    file = File()
    early = EarlyWrites(Steps())
    file.fails_at = 2
    for offset in (1, 2, 3):
        early.do(partial(file.pwritev, [b"x"], offset))
    assert file.written == [(1, b"x")]
    with pytest.raises(OSError, match="no room"):
        early.finish()
    early.do(partial(file.pwritev, [b"x"], 4))
    assert early.finish().byte_count == 1


# -------------------------------------------------------------------------------------- in the log


@pytest.mark.parametrize("is_giving", [True, False])
def test_who_appends_writes_at_once_where_memory_was_given_back(is_giving: bool) -> None:
    background = Steps()
    disk = Disk(background)
    disk.open()
    log, outcome = disk.store.log, list[SluiceError | None]()
    log._old_pages.is_giving = is_giving
    stage_two(disk, outcome)
    (piece,) = log._early._pieces
    assert piece.is_over == is_giving
    disk.store.write_staged()
    background.run_all()
    assert outcome == [None, None]


def stage_two(disk: Disk, outcome: list[SluiceError | None]) -> None:
    store = disk.store
    store.stage(Message("t", 0, b"begun early" * 20), outcome.append)
    store.log.write_early()
    store.stage(Message("t", 0, b"with the turn" * 20), outcome.append)


def log_bytes(files: MemoryFiles) -> bytes:
    return b"".join(
        files.read(f"/store/commitlog/{n}", 1 << 20) for n in files.names("/store/commitlog")
    )


@pytest.mark.parametrize("steps", [0, 1])
def test_the_log_holds_the_same_bytes(steps: int) -> None:
    plain, early = Disk(Steps()), Disk(Steps())
    for disk in (plain, early):
        disk.open()
        outcome: list[SluiceError | None] = []
        for _ in range(12):  # through several files of the log
            if disk is plain:
                disk.store.stage(Message("t", 0, b"begun early" * 20), outcome.append)
                disk.store.stage(Message("t", 0, b"with the turn" * 20), outcome.append)
            else:
                stage_two(disk, outcome)
                for _ in range(steps):
                    assert disk.background.step(LANE)  # type: ignore[attr-defined]
            disk.store.write_staged()
            disk.background.run_all()  # type: ignore[attr-defined]
        assert outcome == [None] * 24
    assert len(early.files.names("/store/commitlog")) > 2
    assert log_bytes(early.files) == log_bytes(plain.files)


@pytest.mark.parametrize("steps", [0, 1])
@pytest.mark.parametrize("nth", [1, 2])
def test_a_turn_that_fails_is_taken_back_whole(steps: int, nth: int) -> None:
    background = Steps()
    disk = Disk(background, flush="async")
    disk.open()
    disk.store.stage(Message("t", 0, b"before"))
    disk.store.write_staged()
    before = log_bytes(disk.files)
    disk.files.fail("pwritev", nth=nth, error=errno.ENOSPC, within="/commitlog/")
    outcome: list[SluiceError | None] = []
    stage_two(disk, outcome)
    for _ in range(steps):
        background.step(LANE)
    assert disk.store.max_offset("t", 0) == 1
    disk.store.write_staged()
    assert [type(error) for error in outcome] == [DiskFull, DiskFull]
    assert log_bytes(disk.files) == before
    stage_two(disk, outcome)
    disk.store.write_staged()
    assert outcome[2:] == [None, None]
    assert list(disk.bodies("t", 0)) == [0, 1, 2]


@pytest.mark.parametrize("steps", range(0, 22, 3))
def test_a_turn_over_several_files_that_is_cut_short_is_a_beginning(steps: int) -> None:
    background = Steps()
    disk = Disk(background, flush="async")
    disk.open()
    bodies = [b"%02d" % n * 400 for n in range(16)]
    for body in bodies:
        disk.store.stage(Message("t", 0, body))
        disk.store.log.write_early()
    assert len(disk.store.log.segments) > 3
    for _ in range(steps):
        background.step(LANE)
    disk.crash()
    disk.open()
    found = list(disk.bodies("t", 0).values())
    assert found == bodies[: len(found)]


def test_what_was_begun_is_not_read_before_the_turn_ends() -> None:
    background = Steps()
    disk = Disk(background, flush="async")
    disk.open()
    outcome: list[SluiceError | None] = []
    stage_two(disk, outcome)
    background.step(LANE)
    assert (disk.store.max_offset("t", 0), disk.store.log.written) == (0, 0)
    assert outcome == []
    disk.crash()  # the process is killed: what of the turn was written is a beginning of it
    disk.open()
    assert list(disk.bodies("t", 0).values()) in ([], [b"begun early" * 20])
