"""The log of a table: one step at a time, never half a step, whoever else writes."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from sluice.errors import ConfigError, StoreCorrupt, StoreError
from sluice.tables import log as module
from sluice.tables.log import (
    Commit,
    DataFile,
    Description,
    State,
    TableLog,
    joined,
    local_directory,
    overlap,
)

TABLE = Description("t1", {"fields": []}, "a INT", ())


def always(_: State) -> bool:
    return True


def new_batch(query: str, batch: int) -> Callable[[State], bool]:
    return lambda state: not state.has(query, batch)


def table(directory: Path) -> TableLog:
    log = TableLog(directory / "table")
    if log.describe() is None:
        log.create(TABLE)
    return log


def data_file(log: TableLog, name: str, rows: int = 1) -> DataFile:
    (log.data / name).write_bytes(b"x" * rows)
    return DataFile(name, rows, rows)


def test_commits_add_up(tmp_path: Path) -> None:
    log = table(tmp_path)
    first, second = data_file(log, "a.parquet"), data_file(log, "b.parquet")
    dead = data_file(log, "d.parquet")
    ranges = {"t": {"0": (0, 5), "1": (2, 3)}}
    assert log.commit(Commit((first,), (), "q", 0, (dead,), ranges), always)
    assert log.commit(Commit((second,), (), "q", 1, (), {"t": {"0": (5, 9)}}), always)
    state = TableLog(tmp_path / "table").refresh()
    assert state.version == 2
    assert set(state.files) == {"a.parquet", "b.parquet"}
    assert state.ends == {"t": {"0": 9, "1": 3}}
    assert state.has("q", 1)
    assert state.has("q", 0)
    assert not state.has("q", 2)
    assert not state.has("other", 0)
    assert state.queries["q"].dead == ()


def test_what_the_check_refuses_is_not_committed(tmp_path: Path) -> None:
    log = table(tmp_path)
    assert not log.commit(Commit((data_file(log, "a.parquet"),)), lambda _: False)
    assert TableLog(tmp_path / "table").refresh().version == 0


def test_a_file_that_is_gone_is_not_committed(tmp_path: Path) -> None:
    log = table(tmp_path)
    with pytest.raises(StoreError, match="executors do not share this path"):
        log.commit(Commit((DataFile("nowhere.parquet", 1, 1),)), always)
    assert log.refresh().version == 0


def test_many_writers_commit_one_after_the_other(tmp_path: Path) -> None:
    table(tmp_path)

    def write(query: str) -> None:
        log = TableLog(tmp_path / "table")
        for batch in range(30):
            file = data_file(log, f"{query}-{batch}.parquet")
            log.commit(Commit((file,), (), query, batch), new_batch(query, batch))

    threads = [threading.Thread(target=write, args=(f"q{n}",)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    state = TableLog(tmp_path / "table").refresh()
    assert state.version == 120
    assert len(state.files) == 120
    assert {query: last.batch for query, last in state.queries.items()} == dict.fromkeys(
        (f"q{n}" for n in range(4)), 29
    )
    assert not [name for name in os.listdir(tmp_path / "table/_sluice/commits") if name[0] == "."]


def test_snapshots_hold_the_same_as_the_commits(tmp_path: Path) -> None:
    log = table(tmp_path)
    for batch in range(170):
        file = data_file(log, f"{batch:03}.parquet")
        gone = (f"{batch - 1:03}.parquet",) if batch % 10 == 9 else ()
        ranges = {"t": {"0": (batch, batch + 1)}}
        log.commit(Commit((file,), gone, "q", batch, (file,), ranges), always)
    snapshots = sorted(os.listdir(tmp_path / "table/_sluice/snapshots"))
    assert [int(name[:20]) for name in snapshots] == [50, 100, 150]
    assert TableLog(tmp_path / "table").refresh() == log.state
    for name in snapshots:
        (tmp_path / "table/_sluice/snapshots" / name).unlink()
    assert TableLog(tmp_path / "table").refresh() == log.state


def test_a_writer_that_slept_through_a_sweep_does_not_write_into_the_past(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_COMMITS_KEPT_MS", 0)
    log, sleeper = table(tmp_path), table(tmp_path)
    file = data_file(log, "late.parquet")
    woken = False

    def sleeps(_: State) -> bool:
        nonlocal woken
        if not woken:
            woken = True
            for batch in range(60):
                log.commit(Commit((data_file(log, f"{batch}.parquet"),), (), "q", batch), always)
            log.sweep(0)
            data_file(log, file.path)
        return True

    # Its first try goes to version 1, which was swept away.
    assert not (log.directory / "_sluice/commits" / f"{1:020}.json").exists()
    assert sleeper.commit(Commit((file,), (), "late", 0), sleeps)
    state = TableLog(tmp_path / "table").refresh()
    assert (state.version, len(state.files), state.has("late", 0)) == (61, 61, True)
    assert not (log.directory / "_sluice/commits" / f"{1:020}.json").exists()


def test_a_sweep_leaves_what_is_committed_and_what_is_new(tmp_path: Path) -> None:
    log = table(tmp_path)
    kept, old, dead = (data_file(log, f"{name}.parquet") for name in ("kept", "old", "dead"))
    orphan = data_file(log, "orphan.parquet")
    log.commit(Commit((kept, old), (), "q", 0, (dead,)), always)
    log.commit(Commit((), ("old.parquet",)), always)
    assert log.sweep(3_600_000) == []
    hours_ago = (log.data / orphan.path).stat().st_mtime - 7200
    for path in log.data.iterdir():
        os.utime(path, (hours_ago, hours_ago))
    assert [path.name for path in log.sweep(3_600_000)] == ["orphan.parquet"], "old went just now"
    assert [path.name for path in log.sweep(0)] == ["old.parquet"]
    assert sorted(os.listdir(log.data)) == ["dead.parquet", "kept.parquet"]


def test_what_is_no_table_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no table"):
        TableLog(tmp_path / "nowhere").require()
    (tmp_path / "other").mkdir()
    (tmp_path / "other/photo.jpg").touch()
    with pytest.raises(ConfigError, match=r"option path: .* holds photo.jpg"):
        TableLog(tmp_path / "other").describe()
    (tmp_path / "delta/_delta_log").mkdir(parents=True)
    with pytest.raises(ConfigError, match="holds a Delta table"):
        TableLog(tmp_path / "delta").describe()
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="is no directory"):
        TableLog(tmp_path / "file").describe()


def test_who_makes_a_table_second_gets_the_first_ones(tmp_path: Path) -> None:
    table(tmp_path)
    other = Description("t2", {}, "json", ("x",))
    assert TableLog(tmp_path / "table").create(other) == TABLE


def test_a_maker_that_was_killed_is_followed_by_another(tmp_path: Path) -> None:
    for name in ("_sluice/commits", "_data"):
        (tmp_path / "table" / name).mkdir(parents=True)
    assert TableLog(tmp_path / "table").describe() is None
    assert table(tmp_path).require() == TABLE


def test_a_file_system_without_hard_links_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuses)
    with pytest.raises(StoreError, match="needs a file system with hard links"):
        table(tmp_path)


@pytest.mark.parametrize("path", ["s3a://bucket/x", "hdfs://host/x", "", "/tmp/a*b", "/tmp/{a,b}"])
def test_paths_that_cannot_be_tables(path: str) -> None:
    with pytest.raises(ConfigError, match="option path"):
        local_directory(path)


def test_paths_of_files(tmp_path: Path) -> None:
    for text in (str(tmp_path), f"file://{tmp_path}", f"file:{tmp_path}"):
        assert local_directory(text) == tmp_path


def test_damage_is_named(tmp_path: Path) -> None:
    log = table(tmp_path)
    log.commit(Commit((data_file(log, "a.parquet"),)), always)
    commit = log.directory / "_sluice/commits" / f"{1:020}.json"
    for content in (b"{", b"[]", b"{}", b'{"add": [{"x": 1}]}'):
        commit.write_bytes(content)
        with pytest.raises(StoreCorrupt, match=str(commit)):
            TableLog(log.directory).refresh()


def test_ranges() -> None:
    one, two = {"t": {"0": (3, 5)}}, {"t": {"0": (1, 4), "1": (7, 8)}, "u": {"0": (0, 1)}}
    assert joined([one, two]) == {"t": {"0": (1, 5), "1": (7, 8)}, "u": {"0": (0, 1)}}
    assert overlap({"t": {"0": 3}}, one) == ""
    assert overlap({"t": {"0": 4}}, one) == ("topic t, partition 0, offset 3; it has all below 4")
    assert overlap({}, two) == ""
