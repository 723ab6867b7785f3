"""Whatever lies in the directory: a clear message with file and offset, never a damaged store."""

from __future__ import annotations

import os
import subprocess
import sys
from itertools import count
from pathlib import Path

import pytest

from sluice.errors import (
    DiskFull,
    RecordDamaged,
    SluiceError,
    StoreCorrupt,
    StoreError,
    StoreInUse,
)
from sluice.model import Message
from sluice.protocol import records
from sluice.storage.blocking import BlockingStore
from sluice.storage.memory_files import KeepAll, KeepNothing, KeepPrefix, MemoryFile, MemoryFiles
from tests.unit.storage.store_kit import (
    ROOT,
    SEGMENT_BYTES,
    Disk,
    flip,
    real_store,
    small_config,
    tree_digest,
)
from tests.unit.unprivileged import make_read_only, run_unprivileged

LOG = f"{ROOT}/commitlog"
COUNT = 60


def name(number: int) -> str:
    return f"{LOG}/{number * SEGMENT_BYTES:020d}"


@pytest.fixture
def disk() -> Disk:
    """A store with several files of everything, closed in order."""
    disk = Disk()
    disk.open()
    disk.fill(COUNT)
    disk.close()
    return disk


def refused(disk: Disk) -> StoreError:
    """Opening fails, nothing is changed by it, and it fails the same way once more."""
    before = disk.contents()
    with pytest.raises(StoreError) as first:
        disk.open()
    assert disk.contents() == before, "a store that does not open is not changed"
    with pytest.raises(StoreError) as second:
        disk.open()
    assert str(first.value) == str(second.value), "the lock was given back"
    return first.value


def all_bodies(disk: Disk) -> dict[tuple[int, int], bytes]:
    return {
        (queue_id, offset): body
        for queue_id in (0, 1)
        for offset, body in disk.bodies("t", queue_id).items()
    }


def expected() -> dict[tuple[int, int], bytes]:
    return {(number % 2, number // 2): b"%0200d" % number for number in range(COUNT)}


def without_snapshot(disk: Disk) -> None:
    disk.files.remove(f"{ROOT}/sluice/snapshot.json")


# -------------------------------------------------------------------------------- files of the log


@pytest.mark.parametrize("foreign", ["notes.txt", "0", "00000000000000000000.bak", "lost+found"])
def test_a_foreign_file_in_commitlog(disk: Disk, foreign: str) -> None:
    disk.files.replace(f"{LOG}/{foreign}", b"mine")
    error = refused(disk)
    assert isinstance(error, StoreCorrupt)
    assert (error.path, error.offset) == (f"{LOG}/{foreign}", 0)
    assert "not a log file's name" in error.reason


def test_a_file_that_starts_nowhere(disk: Disk) -> None:
    path = f"{LOG}/{99 * SEGMENT_BYTES + 1:020d}"
    disk.files.create(path, SEGMENT_BYTES)
    error = refused(disk)
    assert path in str(error)
    assert "does not start at a multiple of segment_bytes" in str(error)


def test_another_segment_size(disk: Disk) -> None:
    disk.config = disk.config.__class__(directory=ROOT, segment_bytes=2 * SEGMENT_BYTES)
    error = refused(disk)
    assert isinstance(error, StoreCorrupt)
    assert error.path == name(0)
    assert f"{SEGMENT_BYTES} bytes long, segment_bytes is {2 * SEGMENT_BYTES}" in error.reason
    disk.config = small_config()
    disk.open()
    assert all_bodies(disk) == expected()


def test_a_missing_file_in_the_middle(disk: Disk) -> None:
    disk.files.remove(name(1))
    error = refused(disk)
    assert isinstance(error, StoreCorrupt)
    assert error.path == name(2)
    assert f"the file before it is missing: expected {name(1)}" in error.reason


def test_missing_files_at_the_end(disk: Disk) -> None:
    for path in list(disk.paths(LOG))[2:]:
        disk.files.remove(path)
    error = refused(disk)
    assert isinstance(error, StoreCorrupt)
    assert "the log was durable up to position" in error.reason


def test_all_files_missing(disk: Disk) -> None:
    for path in list(disk.paths(LOG)):
        disk.files.remove(path)
    error = refused(disk)
    assert "no log files, but the log was durable up to position" in str(error)


def test_missing_files_at_the_beginning_are_retention(disk: Disk) -> None:
    """Somebody deleted the oldest files by hand: what is left is served."""
    disk.files.remove(name(0))
    disk.open()
    found = all_bodies(disk)
    assert found.items() <= expected().items()
    assert 0 < len(found) < COUNT
    assert disk.store.min_offset("t", 0) > 0


@pytest.mark.parametrize("size", [0, 100, SEGMENT_BYTES - 1])
def test_a_file_that_was_cut_short(disk: Disk, size: int) -> None:
    disk.cut(name(0), size)
    error = refused(disk)
    assert isinstance(error, StoreCorrupt)
    assert (error.path, error.offset) == (name(0), size)
    assert "bytes long" in error.reason or "the file ends here" in error.reason


def test_a_directory_in_the_place_of_a_file(disk: Disk) -> None:
    last = f"{LOG}/{50 * SEGMENT_BYTES:020d}"
    disk.files.make_directory(last)
    assert last in str(refused(disk))


# ------------------------------------------------------------------------------- damage in the log


@pytest.mark.parametrize("number", [0, 3, 17, COUNT - 1])
def test_damage_below_the_durable_mark_refuses_to_open(disk: Disk, number: int) -> None:
    disk.open()
    entry = records.decode(next(iter(disk.read("t", number % 2, number // 2).messages)))
    disk.close()
    without_snapshot(disk)
    at = entry.position % SEGMENT_BYTES
    path = f"{LOG}/{entry.position - at:020d}"
    disk.files.flip(path, (at + 130) * 8 + 5)
    error = refused(disk)
    assert isinstance(error, StoreCorrupt)
    assert (error.path, error.offset) == (path, at)
    assert "the whole-message checksum does not match" in error.reason
    assert "the log was durable up to position" in error.reason
    assert "sluice inspect" in error.reason, "it says what to do"


def test_settings_are_not_lost_in_silence(disk: Disk) -> None:
    """They must be taken from the log, and the log has damage before the place where they are."""
    disk.open()
    disk.store.change([("topic", "t", {"perm": 6})])
    disk.store.write_staged()
    disk.close()
    disk.files.flip(name(1), 130 * 8)
    disk.files.remove(f"{ROOT}/config/topics.json")
    error = refused(disk)
    assert isinstance(error, StoreCorrupt)
    assert error.path == name(1)


def test_zeros_below_the_durable_mark_refuse_to_open(disk: Disk) -> None:
    without_snapshot(disk)
    disk.write(name(1), 0, bytes(SEGMENT_BYTES))
    error = refused(disk)
    assert isinstance(error, StoreCorrupt)
    assert (error.path, error.offset) == (name(1), 0)
    assert "zeros where entries must be" in error.reason


def test_damage_below_the_snapshot_is_found_when_it_is_read(disk: Disk) -> None:
    disk.files.flip(name(0), 130 * 8)
    disk.open()
    with pytest.raises(RecordDamaged) as damaged:
        disk.read("t", 0, 0)
    assert (damaged.value.path, damaged.value.offset) == (name(0), 0)
    # Everything else is served.
    assert disk.read("t", 0, damaged.value.next_queue_offset).messages
    assert disk.bodies("t", 1) == {o: body for (q, o), body in expected().items() if q == 1}


def test_a_torn_tail_is_cut_off_and_kept(disk: Disk) -> None:
    disk.open()
    end = disk.store.log.written
    disk.crash(KeepAll())
    tail = Message("t", 0, b"torn")
    encoder = records.Encoder(bytes(8), with_crc=True, body_bytes_max=99, entry_bytes_max=999)
    entry = encoder.encode(tail, b"t", encoder.measure(tail, b"t"), COUNT, end, disk.now_ms)
    torn = entry[:-7]
    disk.write(f"{LOG}/{end - end % SEGMENT_BYTES:020d}", end % SEGMENT_BYTES, torn)
    disk.open()
    assert all_bodies(disk) == expected()
    (kept,) = disk.files.names(f"{ROOT}/sluice/cut")
    assert kept == f"{end:020d}.0"
    assert disk.files.read(f"{ROOT}/sluice/cut/{kept}", 1 << 20) == torn.rstrip(b"\0")
    assert disk.store.recovery.cut_files == [f"{ROOT}/sluice/cut/{kept}"]
    view = disk.store.log.view(end, 100)
    assert not any(view), "nothing of it is left in the log"
    # Once more: the old evidence is not overwritten.
    disk.crash(KeepAll())
    disk.write(f"{LOG}/{end - end % SEGMENT_BYTES:020d}", end % SEGMENT_BYTES, torn)
    disk.open()
    assert disk.files.names(f"{ROOT}/sluice/cut") == [f"{end:020d}.0", f"{end:020d}.1"]


# ------------------------------------------------------------------------- small files and indexes


@pytest.mark.parametrize(
    "path",
    ["sluice/snapshot.json", "sluice/durable", "checkpoint", "config/topics.json", "lock"],
)
@pytest.mark.parametrize("data", [b"", b"x", b"\xff" * 4096, b"{}"])
def test_small_files_that_hold_anything(disk: Disk, path: str, data: bytes) -> None:
    disk.files.replace(f"{ROOT}/{path}", data)
    disk.open()
    assert all_bodies(disk) == expected()
    assert disk.put("t", 0, b"next").queue_offset == COUNT // 2


def test_a_snapshot_that_points_past_the_log_counts_as_damage_not_as_truth(disk: Disk) -> None:
    """Old log files were brought back under a newer snapshot: entries are missing."""
    disk.open()
    disk.crash(KeepNothing())
    old = {path: disk.files.read(path, 1 << 20) for path in disk.paths(LOG)}
    disk.open()
    disk.fill(COUNT)
    disk.close()
    for path in list(disk.paths(LOG)):
        disk.files.remove(path)
    for path, data in old.items():
        disk.files.replace(path, data)
    error = refused(disk)
    assert isinstance(error, StoreCorrupt)
    assert "the log was durable up to position" in error.reason


@pytest.mark.parametrize("field", [0, 8])
def test_a_queue_unit_that_points_past_the_log(disk: Disk, field: int) -> None:
    path = f"{ROOT}/consumequeue/t/0/{0:020d}"
    disk.write(path, field, b"\x7f\x00\x00\x00")
    disk.open()
    with pytest.raises(StoreCorrupt) as corrupt:
        disk.read("t", 0, 0)
    assert corrupt.value.path == path
    assert "remove consumequeue/" in corrupt.value.reason
    disk.close()
    for each in list(disk.paths(f"{ROOT}/consumequeue")):
        disk.files.remove(each)
    disk.open()
    assert all_bodies(disk) == expected()


@pytest.mark.parametrize("place", [40, 40 + 16 * 4 + 20 + 3])
@pytest.mark.parametrize("killed", [False, True])
def test_a_rotten_index_file_is_an_error_and_the_next_start_makes_it_anew(
    place: int, killed: bool
) -> None:
    disk = Disk()
    disk.open()

    def query() -> list[memoryview] | BaseException | None:
        outcome: list[list[memoryview] | BaseException | None] = []
        disk.store.query_key("t", "k7", lambda found, error: outcome.append(error or found))
        return outcome[0]

    for number in range(100):
        disk.put("t", 0, b"%d" % number, b"KEYS\x01k%d\x02" % number)
    disk.close()
    path = f"{ROOT}/index/{disk.files.names(f'{ROOT}/index')[0]}"
    disk.files.flip(path, place * 8 + 1)
    disk.open()
    damage = query()
    assert isinstance(damage, StoreCorrupt)
    assert (damage.path, damage.reason) == (path, "the index file does not match its checksum")
    assert isinstance(query(), StoreCorrupt)
    assert disk.put("t", 0, b"next", b"KEYS\x01k7\x02").queue_offset == 100, "the log goes on"
    if killed:
        disk.store.housekeeping.checkpoint()
        disk.crash(KeepAll())
    else:
        disk.close()
    disk.open()
    while not disk.store.indexing.live:
        disk.store.tick()
    found = query()
    assert isinstance(found, list)
    assert [bytes(records.decode(entry).body) for entry in found] == [b"next", b"7"]


@pytest.mark.parametrize("tree", ["consumequeue", "index", "config", "sluice"])
def test_derived_files_that_are_gone_are_made_again(disk: Disk, tree: str) -> None:
    for path in list(disk.paths(f"{ROOT}/{tree}")):
        disk.files.remove(path)
    disk.open()
    assert all_bodies(disk) == expected()


def test_a_queue_file_that_is_gone_or_cut(disk: Disk) -> None:
    path = f"{ROOT}/consumequeue/t/1/{0:020d}"
    disk.cut(path, 30)
    disk.open()
    with pytest.raises(StoreCorrupt, match=r"does not match its checksum|shorter than it was"):
        disk.read("t", 1, 0)
    disk.close()
    disk.files.remove(path)
    disk.open()
    assert all_bodies(disk) == expected()


# ---------------------------------------------------------------------------------- full, read-only


def test_a_full_disk_at_the_start() -> None:
    disk = Disk()
    disk.files.capacity_bytes = 8192
    with pytest.raises(DiskFull, match="no room on the disk"):
        disk.open()
    disk.files.capacity_bytes = None
    disk.open()
    disk.fill(3)
    assert len(all_bodies(disk)) == 3


def test_a_full_disk_when_an_existing_store_is_opened(disk: Disk) -> None:
    used = disk.files.usage(ROOT)
    disk.files.capacity_bytes = used.total_bytes - used.free_bytes
    with pytest.raises(DiskFull):
        disk.open()
    disk.files.capacity_bytes = None
    disk.open()
    assert all_bodies(disk) == expected()


def test_a_read_only_disk(disk: Disk) -> None:
    disk.files.read_only = True
    error = refused(disk)
    assert "cannot be written" in str(error)


@pytest.mark.parametrize("operation", ["create", "open", "replace", "sync", "sync_directory"])
@pytest.mark.parametrize("nth", [1, 2, 3])
def test_a_disk_that_fails_while_the_store_is_opened(disk: Disk, operation: str, nth: int) -> None:
    disk.files.fail(operation, nth=nth)
    try:
        disk.open()
    except SluiceError:
        disk.files.clear_faults()
        disk.open()
    assert all_bodies(disk) == expected()


_IMPORTS = """
from sluice.config import StoreConfig
from sluice.errors import StoreError
from sluice.storage.blocking import BlockingStore
"""
_OPEN = f"""
try:
    BlockingStore.open(StoreConfig(directory=sys.argv[1], segment_bytes={SEGMENT_BYTES}))
except StoreError as error:
    print(error)
    sys.exit(7)
"""


@pytest.mark.parametrize("name", [".", "new"])
def test_a_real_directory_without_the_right_to_write(tmp_path: Path, name: str) -> None:
    make_read_only(tmp_path)
    done = run_unprivileged(_IMPORTS, _OPEN, tmp_path, name)
    assert done.returncode == 7, done.stderr
    assert "the directory cannot be written: Permission denied" in done.stdout
    assert list(tmp_path.iterdir()) == []


def test_a_real_store_without_the_right_to_write(tmp_path: Path) -> None:
    """Its files may be read by everybody, and are left as they are."""
    store = tmp_path / "store"
    with real_store(store) as writer:
        writer.put(Message("t", 0, b"x"))
    for path in [store, *store.rglob("*")]:
        path.chmod(0o555 if path.is_dir() else 0o444)
    before = tree_digest(store)
    done = run_unprivileged(_IMPORTS, _OPEN, tmp_path, "store")
    assert done.returncode == 7, done.stderr
    assert "the directory cannot be written: Permission denied" in done.stdout
    assert tree_digest(store) == before


def test_a_file_in_the_place_of_the_directory(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(StoreError, match=r"cannot open the store|cannot be written"):
        BlockingStore.open(small_config(str(tmp_path / "file")))


def test_a_link_in_the_place_of_a_file_is_not_followed(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_bytes(bytes(SEGMENT_BYTES))
    store = tmp_path / "store"
    (store / "commitlog").mkdir(parents=True)
    (store / "commitlog" / f"{0:020d}").symlink_to(victim)
    with pytest.raises(StoreError):
        BlockingStore.open(small_config(str(store)))
    assert victim.read_bytes() == bytes(SEGMENT_BYTES)


# ----------------------------------------------------------------------- an open that does not work


class CountingFiles(MemoryFiles):
    """A disk that knows which files are open."""

    def __init__(self) -> None:
        super().__init__()
        self.opened: list[MemoryFile] = []

    def open(self, path: str, *, writable: bool = True) -> MemoryFile:
        self.opened.append(super().open(path, writable=writable))
        return self.opened[-1]

    def create(self, path: str, size: int) -> MemoryFile:
        self.opened.append(super().create(path, size))
        return self.opened[-1]

    def read(self, path: str, limit_bytes: int) -> bytes:
        before = len(self.opened)
        try:
            return super().read(path, limit_bytes)
        finally:
            del self.opened[before:]

    def left_open(self) -> list[str]:
        return [file.path for file in self.opened if not file._closed]


@pytest.mark.parametrize("found", ["closed", "killed", "without indexes"])
def test_an_open_that_fails_leaves_no_file_and_no_lock(found: str) -> None:
    """Whichever call of the disk fails."""
    disk = Disk()
    disk.open()
    for number in range(COUNT):
        disk.put("t", number % 2, b"%0200d" % number, b"KEYS\x01k%d\x02" % number)
    disk.store.housekeeping.checkpoint()
    disk.put("t", 0, b"after the checkpoint")
    if found == "closed":
        disk.close()
    if found == "without indexes":
        for path in [*disk.paths(f"{ROOT}/consumequeue"), *disk.paths(f"{ROOT}/sluice")]:
            disk.files.remove(path)
    stored = disk.files
    failed: set[str] = set()
    for operation in ("create", "open", "replace", "pread", "pwritev", "sync", "resize"):
        for nth in count(1):
            disk.files = files = CountingFiles()
            files.__dict__.update(stored.crash(KeepAll()).__dict__)
            files.fail(operation, nth=nth)
            try:
                disk.open()
            except SluiceError:
                failed.add(operation)
                assert files.left_open() == []
                files.clear_faults()
                assert disk.open().max_offset("t", 1) == COUNT // 2
                continue
            if files._faults:
                break  # the open needs fewer calls
    assert failed >= {"open", "pread", "pwritev"}


def test_a_store_that_is_refused_leaves_no_descriptor_open(tmp_path: Path) -> None:
    with real_store(tmp_path) as store:
        for number in range(COUNT):
            store.put(Message("t", 0, b"%0200d" % number))
    (tmp_path / "sluice" / "snapshot.json").unlink()
    flip(tmp_path / "commitlog" / f"{SEGMENT_BYTES:020d}", 130)
    before = os.listdir("/proc/self/fd")
    with pytest.raises(StoreCorrupt) as refusal:
        BlockingStore.open(small_config(str(tmp_path)))
    # The error still holds everything that the open has made: nothing is closed by chance.
    assert refusal.value.__traceback__ is not None
    assert os.listdir("/proc/self/fd") == before


# --------------------------------------------------------------------------------------- two users


def test_a_second_store_of_the_same_process(disk: Disk, tmp_path: Path) -> None:
    disk.open()
    with pytest.raises(StoreInUse, match="another process uses this store"):
        Disk.open(disk)
    with real_store(tmp_path) as store:
        with pytest.raises(StoreInUse):
            BlockingStore.open(small_config(str(tmp_path)))
        store.put(Message("t", 0, b"still ours"))


_SECOND = f"""
import sys
from sluice.config import StoreConfig
from sluice.errors import StoreInUse
from sluice.storage.blocking import BlockingStore
try:
    BlockingStore.open(StoreConfig(directory=sys.argv[1], segment_bytes={SEGMENT_BYTES}))
except StoreInUse as error:
    print(error)
    sys.exit(7)
"""


def test_a_second_process_on_the_same_directory(tmp_path: Path) -> None:
    def second() -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", _SECOND, str(tmp_path)]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    with real_store(tmp_path, checkpoint_interval_ms=86_400_000) as store:
        store.put(Message("t", 0, b"x"))
        store.checkpoint()
        before = tree_digest(tmp_path)
        refused_process = second()
        assert refused_process.returncode == 7, refused_process.stderr
        assert f"{tmp_path}: another process uses this store" in refused_process.stdout
        assert tree_digest(tmp_path) == before
        store.put(Message("t", 0, b"y"))
    assert second().returncode == 0


def test_a_crash_at_any_byte_of_the_first_start() -> None:
    disk = Disk()
    disk.open()
    for kept in range(disk.files.unsynced_bytes() + 1):
        again = Disk()
        again.files = disk.files.crash(KeepPrefix(kept))
        again.open()
        again.fill(2)
        assert len(all_bodies(again)) == 2
