"""Parquet files: by partition, of about a size, and many small ones joined without losing a row."""

from __future__ import annotations

import datetime
import os
import threading
from pathlib import Path
from typing import Any

import orjson
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sluice.cli import main
from sluice.errors import ConfigError, StoreError
from sluice.tables import api, compaction
from sluice.tables.compaction import compact, groups
from sluice.tables.log import Commit, DataFile, Description, State, TableLog
from sluice.tables.parquet_files import Files, escaped

SCHEMA = pa.schema([("id", pa.int64()), ("day", pa.date32()), ("at", pa.timestamp("us", "UTC"))])
SPARK_SCHEMA = {
    "type": "struct",
    "fields": [
        {"name": "id", "type": "long", "nullable": True, "metadata": {}},
        {"name": "at", "type": {"type": "array"}, "nullable": True, "metadata": {}},
    ],
}
DAY = datetime.date(2026, 11, 16)
NOON = datetime.datetime(2026, 11, 16, 12, tzinfo=datetime.UTC)


def batch(first: int, stop: int, days: int = 1) -> pa.RecordBatch:
    numbers = range(first, stop)
    return pa.RecordBatch.from_pydict(
        {
            "id": list(numbers),
            "day": [DAY + datetime.timedelta(n % days) for n in numbers],
            "at": [NOON for _ in numbers],
        },
        SCHEMA,
    )


def table(directory: Path, files: int = 6, by: tuple[str, ...] = ("day",)) -> TableLog:
    """A table with ten rows in every commit."""
    log = TableLog(directory / "table")
    log.create(Description("t", SPARK_SCHEMA, "", by))
    for number in range(files):
        writer = Files(log.data, f"b{number}", SCHEMA, by)
        writer.add(batch(10 * number, 10 * number + 10, 2))
        ranges = {"t": {"0": (10 * number, 10 * number + 10), "11": (0, 1)}}
        commit = Commit(tuple(writer.finish()), (), "q", number, (), ranges)
        assert log.commit(commit, lambda _: True)
    return log


def ids(log: TableLog) -> list[int]:
    tables = [pq.ParquetFile(path).read() for path in TableLog(log.directory).paths()]
    return sorted(each for one in tables for each in one.column("id").to_pylist())


def test_rows_lie_in_directories_of_their_partition(tmp_path: Path) -> None:
    files = Files(tmp_path, "b", SCHEMA, ("day",))
    files.add(batch(0, 10, 2))
    files.add(batch(10, 20, 2))
    done = files.finish()
    assert {os.path.dirname(file.path) for file in done} == {"day=2026-11-16", "day=2026-11-17"}
    assert [file.rows for file in done] == [10, 10]
    for file in done:
        content = pq.ParquetFile(tmp_path / file.path).read()
        assert content.column_names == ["id", "at"]
        assert content.num_rows == 10
        assert file.size == (tmp_path / file.path).stat().st_size


def test_a_task_has_few_files_open(tmp_path: Path) -> None:
    files = Files(tmp_path, "b", SCHEMA, ("day",))
    files.add(batch(0, 500, 100))
    done = files.finish()
    assert sum(file.rows for file in done) == 500
    assert len({os.path.dirname(file.path) for file in done}) == 100


def test_files_end_at_about_their_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sluice.tables.parquet_files._GROUP_BYTES", 1)
    files = Files(tmp_path, "b", SCHEMA, (), 2000)
    for number in range(20):
        files.add(batch(100 * number, 100 * number + 100))
    done = files.finish()
    assert len(done) > 2
    assert sum(file.rows for file in done) == 2000


def test_what_waits_in_memory_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sluice.tables.parquet_files._WAITING_BYTES_MAX", 100)
    files = Files(tmp_path, "b", SCHEMA, ("day",))
    for number in range(4):
        files.add(batch(10 * number, 10 * number + 10, 2))
    done = files.finish()
    assert [file.rows for file in done] == [20, 20]
    assert pq.ParquetFile(tmp_path / done[0].path).num_row_groups > 1


def test_names_of_directories() -> None:
    assert escaped("a/b=c%5") == "a%2Fb%3Dc%255"
    assert escaped("日本 x") == "日本 x"
    schema = pa.schema([("v", pa.string()), ("n", pa.int32())])
    rows = pa.RecordBatch.from_pydict({"v": [None, "", "x"], "n": [1, 2, 3]}, schema)
    found = {
        below: part.num_rows for below, part in Files(Path(), "b", schema, ("v",))._parts(rows)
    }
    assert found["v=x"] == 1
    assert set(found) == {"v=x", "v=__HIVE_DEFAULT_PARTITION__"}


# --------------------------------------------------------------------------------------- compaction


def test_small_files_of_one_directory_become_one(tmp_path: Path) -> None:
    log = table(tmp_path)
    before = set(log.paths())
    assert len(before) == 12
    done = compact(log, 1 << 20)
    assert (done.files_before, done.files_after, done.rows) == (12, 2, 60)
    assert ids(log) == list(range(60))
    assert all(path.is_file() for path in before), "for who reads them still"
    assert log.refresh().has("q", 5)
    assert log.state.ends["t"]["0"] == 60
    again = compact(log, 1 << 20)
    assert (again.files_after, again.rows) == (2, 0)
    assert len(api.sweep(log.directory, keep_hours=0)) == 12
    assert ids(log) == list(range(60))
    kinds = pq.read_schema(log.paths()[0])
    assert kinds.field("at").type == pa.timestamp("us", "UTC")


def test_the_target_bounds_the_files() -> None:
    files = [DataFile(f"{n:02}.parquet", 1, size) for n, size in enumerate([40] * 10 + [60, 300])]
    found = groups(files, 100)
    assert [[file.size for file in group] for group in found] == [[40, 40]] * 5
    assert groups(files, 10) == []
    assert groups(files[:1], 100) == []


def test_a_stream_may_commit_beside_a_compaction(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = table(tmp_path, by=())
    real = TableLog.commit

    def busy(self: TableLog, commit: Commit, check: Any) -> bool:
        monkeypatch.setattr(TableLog, "commit", real)
        stream = TableLog(log.directory)
        writer = Files(stream.data, "late", SCHEMA)
        writer.add(batch(60, 70))
        assert stream.commit(Commit(tuple(writer.finish()), (), "q", 6), lambda _: True)
        return real(self, commit, check)

    monkeypatch.setattr(TableLog, "commit", busy)
    assert compact(log, 1 << 20).files_after == 2
    assert ids(log) == list(range(70))


def test_the_second_of_two_compactions_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = table(tmp_path, by=())
    real = TableLog.commit

    def busy(self: TableLog, commit: Commit, check: Any) -> bool:
        monkeypatch.setattr(TableLog, "commit", real)
        assert compact(TableLog(log.directory), 1 << 20).rows == 60
        return real(self, commit, check)

    monkeypatch.setattr(TableLog, "commit", busy)
    done = compact(log, 1 << 20)
    assert (done.files_after, done.rows) == (1, 0)
    assert ids(log) == list(range(60))
    assert len(list(log.data.glob("compacted-*"))) == 1, "what it wrote is gone"


def test_readers_see_all_rows_all_the_time(tmp_path: Path) -> None:
    log = table(tmp_path, 30, ())
    is_over = threading.Event()
    seen: list[list[int]] = []

    def look() -> None:
        while not is_over.is_set():
            seen.append(ids(log))

    reader = threading.Thread(target=look)
    reader.start()
    try:
        for target in (2_000, 5_000, 1 << 20):
            compact(log, target)
    finally:
        is_over.set()
        reader.join()
    seen.append(ids(log))
    assert all(found == list(range(300)) for found in seen)


def test_a_file_that_lost_rows_stops_a_compaction(tmp_path: Path) -> None:
    log = table(tmp_path, by=())
    path = log.paths()[2]
    rows = pq.ParquetFile(path).read().slice(1)
    pq.write_table(rows, path)
    with pytest.raises(StoreError, match="60 rows are committed and 59 were read"):
        compact(log, 1 << 20)
    path.write_bytes(b"PAR1")
    with pytest.raises(StoreError, match=str(log.data)):
        compact(log, 1 << 20)
    assert log.refresh().version == 6
    assert list(log.data.glob("compacted-*")) == []


# ------------------------------------------------------------------------------- what users call it


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = table(tmp_path)
    directory = str(log.directory)

    def run(*words: str) -> str:
        assert main(["table", *words]) == 0
        return capsys.readouterr().out

    shown = run("show", directory)
    assert "rows       60\n" in shown
    assert "columns    id long, at array\n" in shown
    assert "divided by day\n" in shown
    assert "offsets    t up to 0: 60, 11: 1\n" in shown
    assert orjson.loads(run("show", "--json", directory))["files"] == 12
    assert run("files", directory).splitlines() == [str(path) for path in log.paths()]
    assert run("compact", directory).startswith("12 files became 2: 60 rows in ")
    assert run("compact", directory, "--target", "1m") == "nothing to join: 2 files\n"
    assert run("sweep", directory) == "0 files deleted\n"
    assert run("sweep", directory, "--keep-hours", "0") == "12 files deleted\n"


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["show", "nowhere"], "there is no table in"),
        (["compact", "nowhere"], "there is no table in"),
        (["compact", "nowhere", "--target", "big"], "--target: 'big' is no size"),
        (["files", "delta"], "is a Delta table"),
        (["sweep", "delta"], "VACUUM"),
        (["compact", "delta"], "give spark="),
        (["sweep", "nowhere", "--keep-hours", "-1"], "option keep_hours: -1 is not from 0 to"),
        (["sweep", "nowhere", "--keep-hours", "nan"], "option keep_hours: nan is not from 0 to"),
        (["sweep", "nowhere", "--keep-hours", "inf"], "option keep_hours: inf is not from 0 to"),
    ],
)
def test_the_command_says_what_is_wrong(
    words: list[str],
    told: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "delta/_delta_log").mkdir(parents=True)
    assert main(["table", *words]) == 2
    assert told in capsys.readouterr().err


def test_starting_offsets(tmp_path: Path) -> None:
    log = table(tmp_path, 1)
    assert orjson.loads(api.starting_offsets(log.directory)) == {"t": {"0": 10, "11": 1}}
    filled = orjson.loads(api.starting_offsets(log.directory, queues=2))
    assert filled == {"t": {"0": 10, "1": -2, "11": 1}}


class NoStream:
    isStreaming = False  # noqa: N815


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"format": "orc"}, "option format: 'orc' is none of parquet, delta"),
        ({}, "read it with spark.readStream"),
    ],
)
def test_what_write_stream_refuses_without_spark(options: Any, told: str, tmp_path: Path) -> None:
    frame: Any = NoStream()
    with pytest.raises(ConfigError, match=told):
        api.write_stream(frame, tmp_path, checkpoint=tmp_path, **options)


def test_a_compaction_needs_a_size(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="at least 1"):
        compaction.compact(TableLog(tmp_path), 0)
    assert State().version == 0
