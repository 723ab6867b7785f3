"""Deleting a topic: its queues are gone for good, and one of its name starts anew."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from sluice.errors import DiskFull, SluiceError, StoreReadOnly
from sluice.model import Message
from sluice.storage import inspect as command
from sluice.storage.background import Steps
from sluice.storage.memory_files import KeepAll, KeepNothing
from sluice.storage.state import (
    DELETED_TABLE,
    OFFSET_TABLE,
    QUEUE_END_TABLE,
    TOPIC_TABLE,
)
from tests.unit.storage.store_kit import SEGMENT_BYTES, Disk, flip, read_all, real_store

DERIVED = ("consumequeue", "batchconsumequeue", "index", "config", "sluice", "checkpoint")


def opened() -> Disk:
    disk = Disk()
    disk.open()
    return disk


def change(disk: Disk, *changes: tuple[str, str, object]) -> None:
    outcome: list[SluiceError | None] = []
    disk.store.change(list(changes), outcome.append)
    disk.store.write_staged()
    assert outcome == [None]


def delete(disk: Disk, topic: str = "t") -> None:
    outcome: list[SluiceError | None] = []
    disk.store.delete_topic(topic, outcome.append)
    disk.store.write_staged()
    assert outcome == [None]


def commit(disk: Disk, topic: str, offset: int) -> None:
    disk.store.commit_offset("g", topic, 0, offset)
    disk.now_ms += 2_000
    disk.store.tick()


def remove_derived(disk: Disk, *names: str) -> None:
    for name in names:
        path = f"/store/{name}"
        for inner in list(disk.paths(path)) if disk.files.is_directory(path) else [path]:
            if disk.files.exists(inner):
                disk.files.remove(inner)
                disk.files.sync_directory(inner.rpartition("/")[0])


def queue_files(disk: Disk, topic: str = "t") -> list[str]:
    trees = ("consumequeue", "batchconsumequeue")
    return [path for tree in trees for path in disk.paths(f"/store/{tree}/{topic}")]


def found_by_key(disk: Disk, topic: str, key: str) -> list[bytes]:
    answers: list[list[memoryview] | None] = []
    disk.store.query_key(topic, key, lambda entries, error: answers.append(entries))
    assert answers[0] is not None
    return [bytes(entry) for entry in answers[0]]


# --------------------------------------------------------------------------------------- while open


def test_queues_offsets_and_settings_go_and_the_name_starts_anew() -> None:
    disk = opened()
    change(disk, (TOPIC_TABLE, "t", {"perm": 6}), (TOPIC_TABLE, "other", {"perm": 6}))
    disk.fill(30)
    disk.fill(4, topic="other")
    commit(disk, "t", 7)
    commit(disk, "other", 1)
    disk.store.housekeeping.checkpoint()
    assert queue_files(disk)
    delete(disk)
    assert disk.store.max_offset("t", 0) == disk.store.min_offset("t", 0) == 0
    assert disk.store.committed_offset("g", "t", 0) is None
    assert list(disk.store.table(TOPIC_TABLE)) == ["other"]
    assert list(disk.store.table(OFFSET_TABLE)) == ["other@g"]
    assert disk.put("t", 0, b"new").queue_offset == 0
    assert disk.bodies("t", 0) == {0: b"new"}
    assert len(disk.bodies("other", 0)) == 2


def test_files_of_the_old_queues_go_before_new_ones_are_written() -> None:
    disk = opened()
    disk.fill(40)
    disk.store.housekeeping.checkpoint()
    before = len(queue_files(disk))
    delete(disk)
    disk.put("t", 1, b"new")
    disk.store.housekeeping.checkpoint()
    assert len(queue_files(disk)) == 1 < before
    (path,) = queue_files(disk)
    assert not any(disk.files.read(path, 1 << 20)[20:]), "nothing of the old units is left"
    assert disk.store.removal.waiting == {}


def test_what_was_committed_and_not_written_yet_goes_with_the_topic() -> None:
    disk = opened()
    disk.fill(4)
    disk.store.commit_offset("g", "t", 0, 2)
    disk.store.commit_offset("g", "other", 0, 3)
    delete(disk)
    disk.now_ms += 2_000
    disk.store.tick()
    assert disk.store.committed_offset("g", "t", 0) is None
    assert disk.store.committed_offset("g", "other", 0) == 3
    assert list(disk.store.table(OFFSET_TABLE)) == ["other@g"]


def test_keys_of_the_deleted_topic_are_not_found() -> None:
    disk = opened()
    properties = b"KEYS\x01one\x02"
    disk.put("t", 0, b"old", properties)
    disk.put("other", 0, b"other", properties)
    delete(disk)
    assert found_by_key(disk, "t", "one") == []
    disk.put("t", 0, b"new", properties)
    (entry,) = found_by_key(disk, "t", "one")
    assert b"new" in entry
    assert len(found_by_key(disk, "other", "one")) == 1


def test_another_kind_of_queue_may_follow_at_once() -> None:
    disk = opened()
    disk.fill(3)
    disk.store.housekeeping.checkpoint()
    disk.store.delete_topic("t")
    batches = {"attributes": {"queue.type": "BatchCQ"}}
    disk.store.change([(TOPIC_TABLE, "t", batches)])
    placed = disk.put("t", 0, b"new")  # all three in one write
    assert (placed.queue_offset, disk.store.queues["t", 0].kind) == (0, "b")
    disk.reopen()
    assert disk.bodies("t", 0) == {0: b"new"}
    assert disk.store.queues["t", 0].kind == "b"


def test_deleting_what_is_not_there_is_no_error() -> None:
    disk = opened()
    delete(disk, "never")
    assert disk.put("never", 0, b"x").queue_offset == 0
    disk.reopen()
    assert disk.bodies("never", 0) == {0: b"x"}


# ------------------------------------------------------------------------------- what goes wrong


def test_a_deletion_that_cannot_be_written_is_taken_back() -> None:
    disk = opened()
    disk.fill(6)
    before = disk.bodies("t", 0)
    disk.store.commit_offset("g", "t", 0, 2)
    disk.files.fail("pwritev", error=28)
    outcome: list[SluiceError | None] = []
    disk.store.delete_topic("t", outcome.append)
    disk.store.stage(Message("t", 0, b"new"))
    disk.store.write_staged()
    assert isinstance(outcome[0], DiskFull)
    assert disk.bodies("t", 0) == before
    assert disk.put("t", 0, b"next").queue_offset == len(before)
    assert disk.store.committed_offset("g", "t", 0) == 2
    disk.reopen()
    assert len(disk.bodies("t", 0)) == len(before) + 1
    assert disk.store.committed_offset("g", "t", 0) == 2


def test_after_a_failed_fsync_the_next_start_knows() -> None:
    disk = opened()
    disk.fill(6)
    before = disk.bodies("t", 0)
    disk.files.fail("sync")
    outcome: list[SluiceError | None] = []
    disk.store.delete_topic("t", outcome.append)
    disk.store.write_staged()
    assert isinstance(outcome[0], StoreReadOnly)
    assert disk.bodies("t", 0) == before, "nobody was told that it is gone"
    disk.crash(KeepAll())
    disk.open()
    assert disk.bodies("t", 0) == {}


def test_a_checkpoint_that_was_under_way_does_not_bring_a_queue_back() -> None:
    steps = Steps()
    disk = Disk(background=steps)
    disk.open()
    steps.run_all()
    disk.fill_staged(20)
    while steps.step("flush"):
        pass
    disk.store.housekeeping.checkpoint()  # its work waits
    disk.store.delete_topic("t")
    disk.store.stage(Message("t", 0, b"new"))
    disk.store.write_staged()
    while steps.step("flush"):
        pass
    steps.run_all()
    assert ("t", 0) not in disk.store.rows
    disk.store.housekeeping.checkpoint()
    steps.run_all()
    assert len(queue_files(disk)) == 1
    disk.crash(KeepAll())
    disk.open()
    assert not disk.store.recovery.rebuilt
    assert disk.bodies("t", 0) == {0: b"new"}


def test_between_staging_and_the_disk_a_crash_brings_the_topic_back() -> None:
    steps = Steps()
    disk = Disk(background=steps)
    disk.open()
    disk.fill_staged(20)
    steps.run_all()
    disk.store.housekeeping.checkpoint()
    steps.run_all()
    disk.fill_staged(4)  # not in a file yet
    steps.run_all()
    before = disk.bodies("t", 0)
    disk.store.delete_topic("t")
    disk.store.stage(Message("t", 0, b"new"))
    disk.store.write_staged()
    disk.store.housekeeping.checkpoint()
    while steps.step("disk"):
        pass
    assert disk.store.max_offset("t", 0) == 0
    disk.crash(KeepNothing())
    disk.open()
    assert disk.bodies("t", 0) == before


# ---------------------------------------------------------------------------------- after a restart


def kill(disk: Disk) -> None:
    disk.crash(KeepAll())
    disk.open()


def close(disk: Disk) -> None:
    disk.reopen()


@pytest.mark.parametrize("stop", [kill, close], ids=["kill", "close"])
@pytest.mark.parametrize("checkpoint", [False, True], ids=["in the log only", "checkpoint"])
@pytest.mark.parametrize("lost", [(), ("sluice",), ("config",), DERIVED], ids=str)
def test_old_entries_do_not_come_back(
    stop: Callable[[Disk], None], checkpoint: bool, lost: tuple[str, ...]
) -> None:
    disk = opened()
    disk.fill(60)
    commit(disk, "t", 5)
    disk.store.housekeeping.checkpoint()
    disk.fill(5)
    delete(disk)
    disk.put("t", 0, b"new 0")
    if checkpoint:
        disk.store.housekeeping.checkpoint()
    disk.put("t", 0, b"new 1")
    disk.close()
    remove_derived(disk, *lost)
    disk.open()
    for _ in range(2):
        assert disk.bodies("t", 0) == {0: b"new 0", 1: b"new 1"}
        assert disk.bodies("t", 1) == {}
        assert disk.store.committed_offset("g", "t", 0) is None
        stop(disk)
    assert disk.put("t", 0, b"new 2").queue_offset == 2


def test_deleted_twice() -> None:
    disk = opened()
    for generation in range(3):
        disk.fill(10, body_bytes=50 + generation)
        disk.store.housekeeping.checkpoint()
        delete(disk)
    disk.put("t", 0, b"last")
    kill(disk)
    assert disk.bodies("t", 0) == {0: b"last"}
    disk.close()
    remove_derived(disk, *DERIVED)
    disk.open()
    assert disk.bodies("t", 0) == {0: b"last"}


def test_files_that_a_crash_left_behind_are_removed() -> None:
    steps = Steps()
    disk = Disk(background=steps)
    disk.open()
    disk.fill_staged(40)
    steps.run_all()
    disk.store.housekeeping.checkpoint()
    steps.run_all()
    disk.store.delete_topic("t")
    disk.store.write_staged()
    while steps.step("flush"):
        pass
    assert disk.store.removal.waiting
    disk.crash(KeepAll())
    assert queue_files(disk)
    disk.open()
    assert isinstance(disk.background, Steps)
    disk.background.run_all()
    assert queue_files(disk) == []
    assert disk.store.removal.waiting == {}


# -------------------------------------------------------------------------------------- retention


def test_the_position_stays_as_long_as_the_log_may_hold_old_entries() -> None:
    disk = opened()
    disk.fill(40)
    delete(disk)
    position = disk.store.table(DELETED_TABLE)["t"]
    disk.put("t", 0, b"new")
    disk.fill(40, topic="other")
    disk.store.housekeeping.checkpoint()
    disk.store.housekeeping.delete_before(SEGMENT_BYTES)
    assert disk.store.table(DELETED_TABLE) == {"t": position}
    disk.close()
    remove_derived(disk, *DERIVED)
    disk.open()
    assert disk.bodies("t", 0) == {0: b"new"}
    above = position - position % SEGMENT_BYTES + SEGMENT_BYTES
    disk.store.housekeeping.delete_before(above)
    assert disk.store.table(DELETED_TABLE) == {"t": position}, "the files went after it was written"
    disk.store.housekeeping.delete_before(above)
    assert disk.store.table(DELETED_TABLE) == {}
    assert disk.store.table(QUEUE_END_TABLE).get("t@0") == 1
    disk.close()
    remove_derived(disk, *DERIVED)
    disk.open()
    assert disk.put("t", 0, b"next").queue_offset == 1


def test_retention_that_runs_meanwhile_gives_the_new_queue_no_old_end() -> None:
    steps = Steps()
    disk = Disk(background=steps)
    disk.open()
    disk.fill_staged(4)
    disk.fill_staged(60, topic="other")
    steps.run_all()
    disk.store.housekeeping.checkpoint()
    steps.run_all()
    disk.store.housekeeping.delete_before(3 * SEGMENT_BYTES)
    disk.store.delete_topic("t")
    disk.store.write_staged()
    steps.run_all()
    assert disk.store.table(QUEUE_END_TABLE).get("t@0") is None
    disk.store.stage(Message("t", 0, b"new"))
    disk.store.write_staged()
    steps.run_all()
    disk.crash(KeepAll())
    disk.open()
    assert disk.bodies("t", 0) == {0: b"new"}


def test_a_log_file_that_could_not_be_removed_goes_the_next_time() -> None:
    disk = opened()
    disk.fill(80)
    disk.store.housekeeping.checkpoint()
    disk.files.fail("remove")
    disk.store.housekeeping.delete_before(2 * SEGMENT_BYTES)
    disk.files.clear_faults()
    disk.store.housekeeping.delete_before(4 * SEGMENT_BYTES)
    names = disk.files.names("/store/commitlog")
    assert int(names[0]) == 4 * SEGMENT_BYTES, "there is no hole in the log"
    disk.reopen()


# ------------------------------------------------------------------------------------------- tools


def make_store(directory: Path) -> int:
    """A store in which a topic was deleted and made again; returns where its old entries end."""
    with real_store(directory) as store:
        for number in range(30):
            store.put(Message("t", number % 2, b"old %d" % number * 20))
        store.checkpoint()
        store.delete_topic("t")
        position = int(store.table(DELETED_TABLE)["t"])
        for number in range(3):
            store.put(Message("t", 0, b"new %d" % number))
    return position


def inspected(
    capsys: pytest.CaptureFixture[str], directory: Path, *flags: str
) -> tuple[int, list[tuple[str, int, int, int]], list[str]]:
    status = command.main([str(directory), "--json", *flags])
    found = json.loads(capsys.readouterr().out)
    rows = [
        (row["topic"], row["queue_id"], row["min_offset"], row["max_offset"])
        for row in found["queues"]
        if row["topic"] == "t"
    ]
    return status, rows, found["notes"]


@pytest.mark.parametrize("lost", [(), ("config",), ("sluice",), DERIVED], ids=str)
@pytest.mark.parametrize("flags", [(), ("--verify",)], ids=str)
def test_old_entries_are_no_findings(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    lost: tuple[str, ...],
    flags: tuple[str, ...],
) -> None:
    make_store(tmp_path)
    for name in lost:
        shutil.rmtree(tmp_path / name, ignore_errors=True)
    status, rows, notes = inspected(capsys, tmp_path, *flags)
    assert (status, rows) == (0, [("t", 0, 0, 3)])
    # A quick look at a store without config/ does not read the log's older entries.
    known = flags == ("--verify",) or lost != ("config",)
    assert any("topics were deleted" in note for note in notes) == known


def test_a_deletion_after_the_snapshot_is_no_finding(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, copy = tmp_path / "source", tmp_path / "copy"
    with real_store(source) as store:
        for number in range(30):
            store.put(Message("t", number % 2, b"old %d" % number * 20))
        store.checkpoint()
        shutil.copytree(source / "consumequeue", tmp_path / "queues")
        shutil.copytree(source / "sluice", tmp_path / "marks")
        shutil.copy(source / "checkpoint", tmp_path / "checkpoint")
        store.delete_topic("t")
        store.put(Message("t", 0, b"new"))
    # As a kill before the next checkpoint would have left it.
    shutil.copytree(source, copy)
    for name, kept in (("consumequeue", "queues"), ("sluice", "marks")):
        shutil.rmtree(copy / name)
        shutil.copytree(tmp_path / kept, copy / name)
    shutil.copy(tmp_path / "checkpoint", copy / "checkpoint")
    for flags in ((), ("--verify",)):
        status, rows, _ = inspected(capsys, copy, *flags)
        assert (status, rows) == (0, [("t", 0, 0, 1)])
    with real_store(copy) as store:
        assert (store.max_offset("t", 0), store.max_offset("t", 1)) == (1, 0)
    shutil.rmtree(copy / "sluice")  # and the files that the deleted topic left behind
    status, rows, _ = inspected(capsys, copy, "--verify")
    assert (status, rows) == (0, [("t", 0, 0, 1)])


@pytest.mark.parametrize("lost", [(), ("config",), ("sluice",)], ids=str)
def test_salvage_brings_no_deleted_topic_back(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], lost: tuple[str, ...]
) -> None:
    source, out = tmp_path / "source", tmp_path / "out"
    position = make_store(source)
    flip(source / "commitlog" / f"{0:020d}", 300)
    for name in lost:
        shutil.rmtree(source / name)
    assert command.main([str(source), "--salvage", str(out)]) == 1, "something is lost"
    capsys.readouterr()
    with real_store(out) as store:
        assert store.table(DELETED_TABLE) == {"t": position}
        bodies = read_all(lambda offset: store.read("t", 0, offset))
        assert list(bodies.values()) == [b"new 0", b"new 1", b"new 2"]
        assert min(bodies) == 0
        assert store.max_offset("t", 1) < 30 // 2
