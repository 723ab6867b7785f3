"""A process that writes batches into a table and joins its files is killed: each row is there once.

The batches are written as Spark's driver and tasks do it, without Spark: a killed writer begins
again with the batch that it cannot know to be done, as Spark does.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pyarrow.parquet as pq

from sluice.tables.log import TableLog

ROOT = Path(__file__).resolve().parents[2]
KILLS = 3
LIMIT_SECONDS = 120
WRITER = """
import sys

import pyarrow as pa

from sluice.tables.compaction import compact
from sluice.tables.log import Commit, Description, TableLog
from sluice.tables.parquet_files import Files

log = TableLog(sys.argv[1])
schema = pa.schema([("id", pa.int64())])
if log.describe() is None:
    log.create(Description("t", {}, "", ()))
last = log.refresh().queries.get("q")
batch = last.batch if last is not None else 0  # it may not have heard of its last commit
while True:
    first = 10 * batch
    files = Files(log.data, f"b{batch}", schema)
    files.add(pa.RecordBatch.from_pydict({"id": list(range(first, first + 10))}, schema))
    done = Commit(tuple(files.finish()), (), "q", batch, (), {"t": {"0": (first, first + 10)}})
    log.commit(done, lambda state: not state.has("q", batch))
    if batch % 7 == 6:
        compact(log, 1 << 20)
    batch += 1
"""


def version(path: Path) -> int:
    return TableLog(path).refresh().version if path.is_dir() else 0


def test_a_killed_writer_leaves_every_row_once(tmp_path: Path) -> None:
    path = tmp_path / "table"
    for number in range(KILLS):
        before = version(path)
        writer = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(path)],
            env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
            stderr=subprocess.PIPE,
        )
        until = time.monotonic() + LIMIT_SECONDS
        while version(path) < before + 9 + 4 * number:
            assert writer.poll() is None, writer.communicate()[1].decode()
            assert time.monotonic() < until, "the writer does nothing"
            time.sleep(0.01)
        writer.send_signal(signal.SIGKILL)
        writer.communicate()
    log = TableLog(path)
    state = log.refresh()
    rows = [pq.ParquetFile(file).read().column("id").to_pylist() for file in log.paths()]
    stop = 10 * (state.queries["q"].batch + 1)
    assert state.ends == {"t": {"0": stop}}
    assert sorted(each for one in rows for each in one) == list(range(stop))
    log.sweep(0)
    assert sorted(path.name for path in log.data.iterdir()) == sorted(
        os.path.basename(name) for name in state.files
    )
