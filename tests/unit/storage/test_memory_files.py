"""The simulated disk: what a crash keeps, and what each fault does.

What it has in common with the real disk is tested in test_files.py.
"""

import errno
from collections.abc import Callable
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sluice.storage.crash_model import Ranges, Write
from sluice.storage.memory_files import (
    OPERATIONS,
    KeepAll,
    KeepNothing,
    KeepPrefix,
    KeepRandom,
    MemoryFile,
    MemoryFiles,
)

READ_LIMIT_BYTES = 1 << 31


def durable_file(files: MemoryFiles, path: str = "a", data: bytes = b"") -> MemoryFile:
    file = files.create(path, len(data))
    file.pwritev([data], 0)
    files.sync_many([path])
    return file


def content(files: MemoryFiles) -> dict[str, bytes]:
    return {name: files.read(name, READ_LIMIT_BYTES) for name in files.names("")}


# --------------------------------------------------------------------------- properties of a crash

Operation = tuple[str, int, int, bytes]
operations = st.lists(
    st.tuples(
        st.sampled_from(["write", "write", "write", "resize", "sync", "fail"]),
        st.integers(0, 1),
        st.integers(0, 1200),
        st.binary(min_size=1, max_size=700),
    ),
    max_size=14,
)


class Model:
    """The same two files, the slow way: a history, and replays of it."""

    def __init__(self) -> None:
        self.now = [bytearray(1000), bytearray(1000)]
        self.durable = [bytes(1000), bytes(1000)]
        self.history: list[Operation] = []

    @staticmethod
    def apply(target: bytearray, kind: str, place: int, data: bytes) -> None:
        if kind == "resize":
            del target[place:]
            target.extend(bytes(place - len(target)))
        elif data:
            target.extend(bytes(max(0, place + len(data) - len(target))))
            target[place : place + len(data)] = data

    def run(self, operation: Operation) -> None:
        kind, which, place, data = operation
        if kind == "resize" and place == len(self.now[which]):
            return  # the kernel has nothing to do, even if the disk has another length
        if kind in {"write", "resize"}:
            self.apply(self.now[which], kind, place, data)
            self.history.append(operation)
            return
        mine = [past for past in self.history if past[1] == which]
        self.history = [past for past in self.history if past[1] != which]
        if kind == "sync":
            target = bytearray(self.durable[which])
            for past_kind, _, past_place, past_data in mine:
                self.apply(target, past_kind, past_place, past_data)
            self.durable[which] = bytes(target)

    def prefix(self, n_bytes: int) -> list[bytes]:
        targets = [bytearray(data) for data in self.durable]
        for kind, which, place, data in self.history:
            kept = data if kind == "resize" else data[:n_bytes]
            self.apply(targets[which], kind, place, kept)
            if kind == "write":
                n_bytes -= len(kept)
                if len(kept) < len(data):
                    break
        return [bytes(target) for target in targets]


def play(script: list[Operation]) -> tuple[MemoryFiles, Model]:
    files, model = MemoryFiles(), Model()
    opened = [durable_file(files, name, bytes(1000)) for name in "ab"]
    for operation in script:
        kind, which, place, data = operation
        model.run(operation)
        if kind == "write":
            opened[which].pwritev([data], place)
        elif kind == "resize":
            opened[which].resize(place)
        elif kind == "sync":
            opened[which].sync()
        else:
            files.fail("sync")
            with pytest.raises(OSError, match="Input/output"):
                opened[which].sync()
    return files, model


@settings(deadline=None)
@given(operations)
def test_only_synced_changes_survive_a_power_cut_that_keeps_nothing(
    script: list[Operation],
) -> None:
    files, model = play(script)
    assert list(content(files.crash(KeepNothing())).values()) == model.durable


@settings(deadline=None)
@given(operations)
def test_after_sync_everything_written_survives(script: list[Operation]) -> None:
    files, _ = play([operation for operation in script if operation[0] != "fail"])
    written = content(files)
    files.sync_many(["a", "b"])
    assert files.unsynced_bytes() == 0
    assert content(files.crash(KeepNothing())) == written
    assert content(files.crash(KeepRandom(Random(1)))) == written


@settings(deadline=None)
@given(operations)
def test_everything_written_survives_a_kill(script: list[Operation]) -> None:
    files, model = play(script)
    killed = files.crash(KeepAll())
    assert list(content(killed).values()) == [bytes(data) for data in model.now]
    # The kernel has not written more than before.
    assert killed.unsynced_bytes() == files.unsynced_bytes()
    assert content(killed.crash(KeepNothing())) == content(files.crash(KeepNothing()))


@settings(deadline=None)
@given(operations, st.integers(0, 3000))
def test_a_prefix_is_the_history_up_to_a_byte(script: list[Operation], n_bytes: int) -> None:
    files, model = play(script)
    assert files.unsynced_bytes() == sum(len(p[3]) for p in model.history if p[0] == "write")
    assert list(content(files.crash(KeepPrefix(n_bytes))).values()) == model.prefix(n_bytes)


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 1), st.integers(1, 40)), max_size=8))
def test_longer_prefixes_keep_more(sizes: list[tuple[int, int]]) -> None:
    files = MemoryFiles()
    opened = [durable_file(files, name, bytes(400)) for name in "ab"]
    ends = [0, 0]
    for which, size in sizes:
        opened[which].pwritev([b"\xff" * size], ends[which])
        ends[which] += size
    total_bytes = files.unsynced_bytes()
    assert total_bytes == sum(ends)
    before = {name: bytes(400) for name in "ab"}
    for n_bytes in range(total_bytes + 1):
        found = content(files.crash(KeepPrefix(n_bytes)))
        assert sum(data.count(0xFF) for data in found.values()) == n_bytes
        for name, data in found.items():
            assert all(new >= old for new, old in zip(data, before[name], strict=True))
        before = found
    assert before == content(files)


@settings(deadline=None)
@given(operations, st.integers())
def test_a_random_crash_invents_nothing(script: list[Operation], seed: int) -> None:
    files, model = play(script)
    found = content(files.crash(KeepRandom(Random(seed))))
    assert found == content(files.crash(KeepRandom(Random(seed))))
    for which, data in enumerate(found.values()):
        candidates = [{0, *model.durable[which][i : i + 1]} for i in range(len(data))]
        for kind, owner, place, written in model.history:
            if kind == "write" and owner == which:
                for index, byte in enumerate(written[: max(0, len(data) - place)]):
                    candidates[place + index].add(byte)
        assert all(byte in allowed for byte, allowed in zip(data, candidates, strict=True))


def test_random_crashes_tear_by_bytes_and_by_sectors() -> None:
    change = Write(sequence=0, offset=300, data=b"x" * 1500, before=b"")
    policy = KeepRandom(Random(7))
    seen: list[Ranges] = [policy.decide([change])[0] for _ in range(400)]
    assert () in seen
    assert ((0, 1500),) in seen
    assert any(len(r) == 1 and r[0][0] == 0 and (300 + r[0][1]) % 512 for r in seen if r)
    # Sectors begin at 0, 512, ... of the file, so at 0, 212, 724 and 1236 of this write.
    assert [(0, 212), (724, 1236)] in seen
    assert [(1236, 1500)] in seen


def test_crashes_do_not_touch_the_disk_they_come_from() -> None:
    files = MemoryFiles()
    file = durable_file(files, data=b"old")
    file.pwritev([b"new"], 0)
    file.resize(4)
    for keep in (KeepNothing(), KeepAll(), KeepPrefix(1), KeepRandom(Random(1))):
        crashed = files.crash(keep)
        crashed.open("a").pwritev([b"xxx"], 0)
        crashed.sync_many(["a"])
        crashed.replace("b", b"b")
    assert content(files) == {"a": b"new\0"}
    assert content(files.crash(KeepPrefix(1))) == {"a": b"nld"}
    assert content(files.crash(KeepNothing())) == {"a": b"old"}


def test_a_negative_prefix_is_refused() -> None:
    with pytest.raises(ValueError, match="-1"):
        KeepPrefix(-1)


# ----------------------------------------------------------------------------- names after a crash


def test_a_name_needs_its_directory_synced() -> None:
    files = MemoryFiles()
    file = files.create("a", 3)
    file.pwritev([b"abc"], 0)
    file.sync()
    assert content(files.crash(KeepNothing())) == {}
    assert content(files.crash(KeepAll())) == {"a": b"abc"}
    files.sync_directory(".")
    assert content(files.crash(KeepNothing())) == {"a": b"abc"}


def test_a_name_without_its_data_is_an_empty_file() -> None:
    files = MemoryFiles()
    files.create("a", 3).pwritev([b"abc"], 0)
    files.sync_directory("")
    assert content(files.crash(KeepNothing())) == {"a": b""}
    assert content(files.crash(KeepPrefix(0))) == {"a": bytes(3)}
    assert content(files.crash(KeepPrefix(2))) == {"a": b"ab\0"}


def test_sync_many_makes_data_and_names_durable() -> None:
    files = MemoryFiles()
    files.make_directory("d")
    for path in ("d/a", "d/b", "c"):
        files.create(path, 1).pwritev([b"x"], 0)
    files.sync_many(["d/a", "c"])
    crashed = files.crash(KeepNothing())
    assert crashed.names("") == ["c", "d"]
    assert crashed.read("d/a", 9) == crashed.read("c", 9) == b"x"
    assert crashed.size("d/b") == 0  # its name came along with the directory


def test_renames_and_removes_wait_for_their_directory() -> None:
    files = MemoryFiles()
    durable_file(files, "a", b"a")
    durable_file(files, "b", b"b")
    durable_file(files, "c", b"c")
    files.rename("a", "b")
    files.remove("c")
    assert content(files) == {"b": b"a"}
    assert content(files.crash(KeepNothing())) == {"a": b"a", "b": b"b", "c": b"c"}
    assert content(files.crash(KeepPrefix(0))) == {"b": b"a"}
    outcomes = [content(files.crash(KeepRandom(Random(seed)))) for seed in range(40)]
    for renamed in (True, False):
        for removed in (True, False):
            expected = {"b": b"a"} if renamed else {"a": b"a", "b": b"b"}
            assert expected | ({} if removed else {"c": b"c"}) in outcomes
    files.sync_directory("")
    assert content(files.crash(KeepNothing())) == {"b": b"a"}


def test_a_rename_between_directories_needs_both_synced() -> None:
    files = MemoryFiles()
    files.make_directory("/d")
    files.make_directory("/e")
    durable_file(files, "/d/a", b"a")
    files.rename("/d/a", "/e/a")
    for directory, found in (("/e", "/d/a"), ("/d", "/e/a")):
        files.sync_directory(directory)
        crashed = files.crash(KeepNothing())
        assert [p for p in ("/d/a", "/e/a") if crashed.exists(p)] == [found]


def test_a_durable_remove_is_not_undone_by_an_older_rename() -> None:
    files = MemoryFiles()
    files.make_directory("d")
    durable_file(files, "a", b"a")
    files.rename("a", "d/a")
    files.remove("d/a")
    files.sync_directory("d")
    files.sync_directory("")
    assert not files.crash(KeepNothing()).exists("d/a")


def test_a_removed_file_comes_back_with_its_pending_writes_in_order() -> None:
    files = MemoryFiles()
    durable_file(files, data=b"old").pwritev([b"new"], 0)
    files.remove("a")
    assert files.unsynced_bytes() == 3
    assert content(files.crash(KeepPrefix(2))) == {"a": b"ned"}
    assert content(files.crash(KeepPrefix(3))) == {}


def test_replace_is_durable_at_once() -> None:
    files = MemoryFiles()
    files.create("a", 1).pwritev([b"x"], 0)
    files.replace("a", b"new")
    for keep in (KeepNothing(), KeepAll(), KeepPrefix(0), KeepRandom(Random(3))):
        assert content(files.crash(keep)) == {"a": b"new"}


def test_directories_are_durable_and_locks_are_not() -> None:
    files = MemoryFiles()
    files.make_directory("/d/e")
    files.lock("/d/lock")
    crashed = files.crash(KeepNothing())
    assert crashed.names("/d") == ["e", "lock"]
    assert crashed.names("/") == ["d"]
    crashed.lock("/d/lock")
    with pytest.raises(BlockingIOError):
        files.lock("/d/lock")


# ---------------------------------------------------------------------------------- a failed sync


def test_a_sync_after_a_failed_one_proves_nothing() -> None:
    files = MemoryFiles()
    file = durable_file(files, data=b"......")
    file.pwritev([b"lost"], 0)
    files.fail("sync", error=errno.EIO)
    with pytest.raises(OSError, match="Input/output"):
        file.sync()
    file.pwritev([b"kept"], 2)
    file.sync()
    assert file.pread(9, 0) == b"lokept"
    assert files.unsynced_bytes() == 0
    for keep in (KeepNothing(), KeepPrefix(99), KeepRandom(Random(1))):
        assert content(files.crash(keep)) == {"a": b"..kept"}
    killed = files.crash(KeepAll())
    assert content(killed) == {"a": b"lokept"}
    killed.sync_many(["a"])
    assert content(killed.crash(KeepNothing())) == {"a": b"..kept"}


@pytest.mark.parametrize("operation", ["sync_directory", "sync_many"])
def test_a_failed_sync_of_names_loses_them(operation: str) -> None:
    files = MemoryFiles()
    files.create("a", 1)
    files.fail(operation)
    call: dict[str, Callable[[], None]] = {
        "sync_directory": lambda: files.sync_directory(""),
        "sync_many": lambda: files.sync_many(["a"]),
    }
    with pytest.raises(OSError, match="Input/output"):
        call[operation]()
    call[operation]()
    assert content(files) == {"a": b"\0"}
    assert content(files.crash(KeepPrefix(99))) == {}
    assert content(files.crash(KeepAll())) == {"a": b"\0"}


# ------------------------------------------------------------------------------------------ faults


def _each_operation(files: MemoryFiles) -> dict[str, Callable[[], object]]:
    file = durable_file(files, "a", b"abc")
    durable_file(files, "b", b"b")
    return {
        "pwritev": lambda: file.pwritev([b"X"], 0),
        "pread": lambda: file.pread(1, 0),
        "sync": file.sync,
        "create": lambda: files.create("new", 1),
        "open": lambda: files.open("a"),
        "replace": lambda: files.replace("a", b"X"),
        "rename": lambda: files.rename("a", "z"),
        "remove": lambda: files.remove("b"),
        "sync_directory": lambda: files.sync_directory(""),
        "sync_many": lambda: files.sync_many(["a", "b"]),
        "resize": lambda: file.resize(9),
    }


@pytest.mark.parametrize("operation", sorted(OPERATIONS))
def test_every_operation_can_fail_and_then_has_done_nothing(operation: str) -> None:
    files = MemoryFiles()
    call = _each_operation(files)[operation]
    calls = files.calls[operation]
    files.fail(operation, error=errno.EDQUOT)
    with pytest.raises(OSError, match="quota") as caught:
        call()
    assert caught.value.errno == errno.EDQUOT
    assert files.calls[operation] == calls + 1
    assert content(files) == {"a": b"abc", "b": b"b"}
    call()


def test_the_nth_call_fails() -> None:
    files = MemoryFiles()
    files.replace("a", b"")
    files.fail("open", nth=3)
    outcomes = []
    for _ in range(5):
        try:
            files.open("a")
            outcomes.append("ok")
        except OSError:
            outcomes.append("failed")
    assert outcomes == ["ok", "ok", "failed", "ok", "ok"]


def test_a_fault_waits_for_the_file_that_it_is_meant_for() -> None:
    files = MemoryFiles()
    files.make_directory("log")
    files.fail("replace", within="log/")
    files.replace("mark", b"1")
    with pytest.raises(OSError, match="log/a"):
        files.replace("log/a", b"1")
    files.replace("log/a", b"2")


def test_a_sticky_fault_stays_until_cleared() -> None:
    files = MemoryFiles()
    files.fail("replace", nth=2, sticky=True, error=errno.EROFS)
    files.replace("a", b"1")
    for _ in range(3):
        with pytest.raises(OSError, match="Read-only"):
            files.replace("a", b"2")
    files.clear_faults()
    files.replace("a", b"3")
    assert content(files) == {"a": b"3"}


def test_faults_that_make_no_sense_are_refused() -> None:
    files = MemoryFiles()
    calls: list[Callable[[], None]] = [
        lambda: files.fail("fsnyc"),
        lambda: files.fail("sync", nth=0),
        lambda: files.tear(0, 1),
        lambda: files.tear(1, -1),
    ]
    for call in calls:
        with pytest.raises(ValueError, match=r"no such|counted|cannot tear"):
            call()


def test_a_torn_write_leaves_its_first_bytes() -> None:
    files = MemoryFiles()
    file = durable_file(files, data=b"......")
    files.tear(2, 3)
    file.pwritev([b"a"], 0)
    with pytest.raises(OSError, match="Input/output"):
        file.pwritev([b"bc", b"de"], 1)
    assert file.pread(9, 0) == b"abcd.."
    assert files.unsynced_bytes() == 4
    file.pwritev([b"z"], 5)
    assert content(files.crash(KeepAll())) == {"a": b"abcd.z"}


def test_a_flipped_bit_is_read_at_once_and_after_a_crash() -> None:
    files = MemoryFiles()
    file = durable_file(files, data=b"\x00\x00")
    view = file.view()
    files.flip("a", 11)
    assert bytes(view) == b"\x00\x08"
    assert content(files.crash(KeepNothing())) == {"a": b"\x00\x08"}
    with pytest.raises(ValueError, match="bit 16"):
        files.flip("a", 16)


def test_a_bit_flips_below_a_pending_write_too() -> None:
    files = MemoryFiles()
    file = durable_file(files, data=b"\x00\x00")
    file.pwritev([b"\xff"], 0)
    files.flip("a", 0)
    assert content(files) == {"a": b"\xfe\x00"}
    assert content(files.crash(KeepNothing())) == {"a": b"\x01\x00"}
    assert content(files.crash(KeepPrefix(1))) == {"a": b"\xff\x00"}
    file.pwritev([b"\x07"], 1)
    file.sync()
    assert content(files.crash(KeepNothing())) == {"a": b"\xff\x07"}


def test_cold_ranges_are_warmed_piece_by_piece() -> None:
    files = MemoryFiles()
    file = durable_file(files, data=bytes(100))
    files.cold("a", 20, 60)
    assert file.resident(0, 20)
    assert file.resident(60, 100)
    assert not file.resident(59, 61)
    file.warm(30, 40)
    assert file.resident(30, 40)
    assert not file.resident(20, 31)
    assert not file.resident(39, 60)
    assert file.pread(100, 0) == bytes(100)  # reading works as ever, and warms nothing
    assert not file.resident(0, 100)
    file.warm(0, 100)
    assert file.resident(0, 100)
    assert files.warm_calls == 2


# ------------------------------------------------------------------------------------------- space


def test_a_full_disk_takes_what_fits() -> None:
    files = MemoryFiles(capacity_bytes=3 * 4096)
    file = files.create("a", 100 * 4096)
    assert files.usage("a").used_ratio == 0.0
    with pytest.raises(OSError, match="No space") as caught:
        file.pwritev([b"x" * 4 * 4096], 4000)
    assert caught.value.errno == errno.ENOSPC
    assert file.pread(100 * 4096, 0).strip(b"\0") == b"x" * (3 * 4096 - 4000)
    assert files.usage("a").free_bytes == 0
    file.pwritev([b"y" * 4096], 4096)  # in place: needs nothing new
    for call in (
        lambda: file.pwritev([b"x"], 50 * 4096),
        lambda: files.create("b", 0),
        lambda: files.replace("a", b"x"),
        lambda: files.lock("lock"),
    ):
        with pytest.raises(OSError, match="No space"):
            call()
    assert files.names("") == ["a"]
    with pytest.raises(OSError, match="No space"):
        files.crash(KeepAll()).create("b", 0)


def test_space_comes_back() -> None:
    files = MemoryFiles(capacity_bytes=2 * 4096)
    durable_file(files, "a", b"x" * 8192)
    files.open("a").resize(4096)
    assert files.usage("").free_bytes == 4096
    files.remove("a")
    assert files.usage("").free_bytes == 8192
    durable_file(files, "b", b"y")
    files.capacity_bytes = None
    durable_file(files, "c", b"z" * 99999)


def test_a_read_only_disk_refuses_every_change() -> None:
    files = MemoryFiles()
    calls = _each_operation(files)
    files.open("b").pwritev([b"B"], 0)
    files.create("c", 0)
    found = content(files)
    files.read_only = True
    calls["make_directory"] = lambda: files.make_directory("d")
    calls["lock"] = lambda: files.lock("a")
    for name, call in calls.items():
        if name in {"pread", "sync"}:
            call()  # the file of "sync" has nothing to write
            continue
        with pytest.raises(OSError, match="Read-only") as caught:
            call()
        assert caught.value.errno == errno.EROFS
    assert content(files) == found
    assert files.open("a", writable=False).pread(9, 0) == b"abc"


def test_a_huge_file_costs_what_was_written() -> None:
    files = MemoryFiles()
    size = 1 << 34
    file = files.create("a", size)
    files.sync_many(["a"])
    file.pwritev([b"durable"], size - 7)
    file.sync()
    file.pwritev([b"pending"], 5000)
    crashed = files.crash(KeepPrefix(3)).open("a")
    assert crashed.size == size
    assert crashed.pread(9, 4999) == b"\0pen\0\0\0\0\0"
    assert bytes(crashed.view()[-7:]) == b"durable"
    crashed.resize(5002)
    assert crashed.pread(9999, 4998) == b"\0\0pe"
    assert files.usage("a").total_bytes - files.usage("a").free_bytes == 2 * 4096
