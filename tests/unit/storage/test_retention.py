"""What may be deleted and when, and that nothing else goes with it."""

from __future__ import annotations

import logging
import time
from typing import Any

import pytest

from sluice.errors import DiskFull, SluiceError
from sluice.model import Message
from sluice.storage.background import Steps
from sluice.storage.files import RealFiles
from sluice.storage.memory_files import KeepAll, KeepNothing
from sluice.storage.reads import ReadStatus
from sluice.storage.retention import HOUR_MS, OldFile, RetentionRules, delete_before
from sluice.storage.snapshot import read_snapshot, write_snapshot
from sluice.storage.state import QUEUE_END_TABLE, TOPIC_TABLE
from tests.unit.storage.store_kit import SEGMENT_BYTES, Disk

RULES = RetentionRules(
    retention_hours=72,
    hours_of_day=frozenset({4}),
    clean_ratio=0.75,
    force_ratio=0.85,
    refuse_ratio=0.90,
)
NOW_MS = 1_000 * HOUR_MS
FILES = [OldFile(100 * n, NOW_MS - (80 - 4 * n) * HOUR_MS) for n in range(1, 8)]  # 76 h, 72 h, 68 h


@pytest.mark.parametrize(
    ("hour", "used", "expected"),
    [
        (3, 0.10, 0),
        (4, 0.10, 100),  # 76 hours old: over 72; the next is exactly 72 and stays
        (3, 0.7499, 0),
        (3, 0.75, 100),
        (3, 0.85, 100),  # what is old goes first, and only that
    ],
)
def test_by_age_at_the_hour_and_by_disk_use(hour: int, used: float, expected: int) -> None:
    position = delete_before(FILES, RULES, now_ms=NOW_MS, hour_of_day=hour, used_ratio=used)
    assert position == expected


def test_by_force_the_oldest_file_goes_one_at_a_time() -> None:
    young = [OldFile(100, NOW_MS), OldFile(200, NOW_MS)]
    for used, expected in [(0.84, 0), (0.85, 100), (0.99, 100)]:
        given = delete_before(young, RULES, now_ms=NOW_MS, hour_of_day=4, used_ratio=used)
        assert given == expected
    assert delete_before([], RULES, now_ms=NOW_MS, hour_of_day=4, used_ratio=1.0) == 0


def test_a_young_file_protects_the_old_ones_behind_it() -> None:
    files = [OldFile(100, NOW_MS), OldFile(200, 0)]
    assert delete_before(files, RULES, now_ms=NOW_MS, hour_of_day=4, used_ratio=0.8) == 0


# -------------------------------------------------------------------------------------- in a store


def at_hour(when_ms: int, hour: int) -> int:
    """The next moment at which the local clock shows this hour."""
    while time.localtime(when_ms / 1000).tm_hour != hour:
        when_ms += 60_000
    return when_ms


def log_names(disk: Disk) -> list[str]:
    return disk.files.names("/store/commitlog")


def tick(disk: Disk, times: int = 3) -> None:
    for _ in range(times):
        disk.now_ms += 1_000
        disk.store.tick()


def filled(**changes: Any) -> Disk:
    disk = Disk(**changes)
    disk.open()
    disk.fill(60)
    disk.store.housekeeping.checkpoint()
    return disk


def test_old_files_go_at_the_hour_and_not_before() -> None:
    disk = filled(retention_hours=72, retention_at="04")
    before = log_names(disk)
    disk.now_ms = at_hour(disk.now_ms + 80 * HOUR_MS, 3)
    tick(disk)
    assert log_names(disk) == before
    disk.now_ms = at_hour(disk.now_ms, 4)
    tick(disk)
    assert len(log_names(disk)) < len(before)
    assert log_names(disk)[-1] >= before[-1], "the file that is written stays"
    assert disk.store.housekeeping.deleted_count > 0


def test_files_that_are_not_old_stay_at_the_hour() -> None:
    disk = filled(retention_hours=72, retention_at="04")
    before = log_names(disk)
    disk.now_ms = at_hour(disk.now_ms + 40 * HOUR_MS, 4)
    tick(disk)
    assert log_names(disk) == before


def forget_times(disk: Disk) -> None:
    """Let the snapshot of a closed store not know how old its log files are."""
    snapshot = read_snapshot(disk.files, "/store")
    assert snapshot is not None
    write_snapshot(disk.files, "/store", {**snapshot, "segments": {}})


def test_a_file_whose_age_must_be_read_from_the_disk_does_not_stop_the_owner() -> None:
    disk = filled(retention_hours=72, retention_at="04")
    before = log_names(disk)
    disk.close()
    forget_times(disk)
    disk.background = steps = Steps()
    disk.now_ms = at_hour(disk.now_ms + 80 * HOUR_MS, 4)
    disk.open()
    for path in disk.paths("/store/commitlog"):
        disk.files.cold(path, 0, SEGMENT_BYTES)
    tick(disk)
    assert log_names(disk) == before
    steps.run_all()
    assert len(log_names(disk)) < len(before)


@pytest.mark.parametrize("age_hours", [40, 80])
def test_a_file_whose_age_is_damaged_is_not_taken_for_an_old_one(age_hours: int) -> None:
    disk = filled(retention_hours=72, retention_at="04")
    before = log_names(disk)
    disk.close()
    forget_times(disk)
    # The first entry after the file tells its age: its store time is decades back.
    disk.files.flip(f"/store/commitlog/{before[1]}", (56 + 2) * 8)
    disk.now_ms = at_hour(disk.now_ms + age_hours * HOUR_MS, 4)
    disk.open()
    tick(disk)
    # The entry after that one tells it too, or the file stays.
    assert (before[0] in log_names(disk)) == (age_hours == 40)


def test_a_file_that_a_batch_closes_right_after_a_start_is_as_old_as_it_is() -> None:
    disk = Disk(retention_hours=72, retention_at="04")
    disk.open()
    disk.fill(9)
    disk.reopen()
    disk.store.stage_batch([Message("t", 0, b"x" * 700)] * 3)
    disk.store.write_staged()
    before = log_names(disk)
    assert disk.store.log.written > SEGMENT_BYTES
    disk.store.housekeeping.checkpoint()
    disk.now_ms = at_hour(disk.now_ms, 4)
    tick(disk)
    assert log_names(disk) == before, "it is some hours old, not decades"


def test_what_is_left_is_served_as_before_and_indexes_follow() -> None:
    disk = filled()
    everything = disk.bodies("t", 0)
    disk.store.housekeeping.delete_before(3 * SEGMENT_BYTES)
    low = disk.store.min_offset("t", 0)
    assert 0 < low < len(everything)
    left = {offset: body for offset, body in everything.items() if offset >= low}
    assert disk.bodies("t", 0) == left
    result = disk.read("t", 0, 0)
    assert (result.status, result.next_offset) == (ReadStatus.OFFSET_TOO_SMALL, low)
    first = next(iter(disk.files.names("/store/consumequeue/t/0")))
    assert int(first) // 20 > 0, "queue files below are gone too"
    disk.reopen()
    assert disk.bodies("t", 0) == left
    for path in [*disk.paths("/store/consumequeue"), *disk.paths("/store/sluice")]:
        disk.files.remove(path)
    disk.crash()
    disk.open()
    assert disk.bodies("t", 0) == left


def test_a_queue_that_loses_everything_keeps_its_offsets() -> None:
    disk = Disk()
    disk.open()
    for number in range(5):
        disk.put("quiet", 0, b"%d" % number)
    disk.fill(60)
    disk.store.housekeeping.delete_before(disk.store.log.written // SEGMENT_BYTES * SEGMENT_BYTES)
    assert disk.store.table(QUEUE_END_TABLE)["quiet@0"] == 5
    assert (disk.store.min_offset("quiet", 0), disk.store.max_offset("quiet", 0)) == (5, 5)
    disk.crash(KeepNothing())
    for name in ("sluice", "consumequeue", "config", "index"):
        for path in list(disk.paths(f"/store/{name}")):
            disk.files.remove(path)
    disk.open()
    assert disk.put("quiet", 0, b"next").queue_offset == 5
    assert disk.reopen().max_offset("quiet", 0) == 6


def test_settings_are_written_again_before_their_last_entry_goes() -> None:
    disk = Disk()
    disk.open()
    disk.store.change([(TOPIC_TABLE, "t", {"perm": 6})])
    disk.store.write_staged()
    disk.fill(60)
    disk.store.housekeeping.delete_before(disk.store.log.written // SEGMENT_BYTES * SEGMENT_BYTES)
    disk.crash(KeepNothing())
    for name in ("sluice", "config"):
        for path in list(disk.paths(f"/store/{name}")):
            disk.files.remove(path)
    assert disk.open().table(TOPIC_TABLE) == {"t": {"perm": 6}}


@pytest.mark.parametrize("steps_done", range(0, 16, 2))
def test_a_crash_in_the_middle_of_deletion_loses_nothing_else(steps_done: int) -> None:
    disk = Disk()
    disk.open()
    disk.fill(60)
    everything = disk.bodies("t", 1)
    disk.close()
    disk.background = steps = Steps()
    disk.open()
    disk.store.housekeeping.delete_before(3 * SEGMENT_BYTES)
    for _ in range(steps_done):
        steps.step("disk") or steps.step("flush")
    disk.crash(KeepAll())
    disk.open()
    found = disk.bodies("t", 1)
    low = disk.store.min_offset("t", 1)
    assert found == {offset: body for offset, body in everything.items() if offset >= low}
    assert max(found) == max(everything)


def test_keys_of_deleted_messages_are_not_found_and_others_are() -> None:
    disk = Disk()
    disk.open()
    for number in range(60):
        disk.put("t", 0, b"x" * 200, b"KEYS\x01k%d\x02" % number)
    disk.store.housekeeping.delete_before(3 * SEGMENT_BYTES)
    found: list[Any] = []
    for key in ("k0", "k59"):
        disk.store.query_key("t", key, lambda entries, error: found.append(entries))
    assert [len(entries) for entries in found] == [0, 1]


# ------------------------------------------------------------------------------------ a full disk


def full(disk: Disk, ratio: float) -> None:
    """Let the disk be this full."""
    used = disk.files.usage("/store")
    used_bytes = used.total_bytes - used.free_bytes
    disk.files.capacity_bytes = int(used_bytes / ratio)


def try_put(disk: Disk) -> SluiceError | None:
    outcome: list[SluiceError | None] = []
    try:
        disk.store.stage(Message("t", 0, b"x"), outcome.append)
    except SluiceError as error:
        return error
    disk.store.write_staged()
    return outcome[0]


def test_writes_are_refused_above_the_limit_and_accepted_again_by_themselves(
    caplog: pytest.LogCaptureFixture,
) -> None:
    disk = filled(disk_refuse_ratio=0.9)
    assert try_put(disk) is None
    full(disk, 0.95)
    tick(disk, 1)
    with caplog.at_level(logging.WARNING, "sluice.storage"):
        error = try_put(disk)
        assert isinstance(error, DiskFull)
        assert "95% full, the limit is 90% (disk_refuse_ratio)" in str(error)
        assert disk.bodies("t", 1), "reading goes on"
        disk.files.capacity_bytes = None
        tick(disk, 1)
    assert "writes are accepted" in caplog.text
    assert try_put(disk) is None


def test_by_force_files_go_until_there_is_room() -> None:
    disk = filled(disk_force_ratio=0.85, disk_clean_ratio=0.75)
    before = log_names(disk)
    full(disk, 0.86)
    tick(disk, 1)
    assert log_names(disk)[0] == before[1], "one file at a time"
    tick(disk, 30)
    assert disk.store.housekeeping.used_ratio < 0.85
    assert len(log_names(disk)) > 1, "and no more than needed"


def test_above_the_clean_ratio_old_files_go_at_any_hour() -> None:
    disk = filled(disk_clean_ratio=0.75, retention_hours=72, retention_at="04")
    before = log_names(disk)
    disk.now_ms = at_hour(disk.now_ms + 80 * HOUR_MS, 3)
    tick(disk)
    assert log_names(disk) == before
    full(disk, 0.8)
    tick(disk)
    assert len(log_names(disk)) < len(before)


def test_a_disk_whose_use_cannot_be_told_changes_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    disk = filled(disk_refuse_ratio=0.9)

    def fail(path: str) -> None:
        raise OSError(5, "Input/output error", path)

    monkeypatch.setattr(disk.files, "usage", fail)
    tick(disk, 1)
    assert "cannot tell how full the disk" in caplog.text
    assert try_put(disk) is None


@pytest.mark.parametrize("steps_done", range(12))
def test_nothing_touches_the_disk_after_the_store_was_closed(steps_done: int) -> None:
    """Somebody else may have the directory by then."""
    disk = Disk()
    disk.open()
    disk.fill(60)
    disk.close()
    disk.background = steps = Steps()
    disk.open()
    disk.fill_staged(5)
    disk.store.housekeeping.delete_before(3 * SEGMENT_BYTES)
    for _ in range(steps_done):
        steps.step("disk") or steps.step("flush")
    calls: list[int] = []
    outcome: list[SluiceError | None] = []

    def closed(error: SluiceError | None) -> None:
        outcome.append(error)
        calls.append(disk.files.calls.total())

    disk.store.shut(closed)
    steps.run_all()
    assert outcome == [None]
    assert disk.files.calls.total() == calls[0]
    disk.crash()
    disk.open()
    assert disk.store.max_offset("t", 0) == 33
    assert list(disk.bodies("t", 0)) == list(range(disk.store.min_offset("t", 0), 33))


def test_blocks_that_nobody_may_use_do_not_count_as_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system keeps some for root, or has a quota: we count as `df` and RocketMQ do."""

    class Status:
        f_frsize, f_blocks, f_bfree, f_bavail = 4096, 1000, 800, 300

    monkeypatch.setattr("os.statvfs", lambda path: Status)
    usage = RealFiles().usage("/anywhere")
    assert usage.used_ratio == 200 / 500
    assert usage.free_bytes == 300 * 4096
