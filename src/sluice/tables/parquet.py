"""This module writes a stream into a Parquet table, each batch exactly once.

Tasks make rows and write files, and tell what they wrote; only what the successful tries tell is
committed. Rows that do not fit are in files of their own, which the same commit names, and are
published from there: whoever is killed when, the batch that comes again finds them.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson
import pyarrow as pa

from sluice.errors import ConfigError
from sluice.tables.log import (
    Commit,
    DataFile,
    Description,
    LastBatch,
    Ranges,
    State,
    TableLog,
    joined,
    ranges_of,
)
from sluice.tables.parquet_files import Files
from sluice.tables.rows import DEAD, Rows
from sluice.tables.schemas import spark_of
from sluice.tables.sinks import (
    Settings,
    check_dead_letters,
    check_origin,
    check_replay,
    needed_columns,
    publish_dead_letters,
    query_of,
    refuse_bad,
    rows_of,
)

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_RESULT = pa.schema([("result", pa.string())])
_DEAD_DIRECTORY = "dead"


@dataclass(frozen=True, slots=True)
class Task:
    """What every task of a batch does; it is pickled to the executors."""

    data: str
    batch: int
    rows: Rows
    partition_by: tuple[str, ...]
    target_bytes: int

    def run(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        prefix = f"b{self.batch:08}"
        schema = self.rows.schema
        files = Files(Path(self.data), prefix, schema, self.partition_by, self.target_bytes)
        dead = Files(Path(self.data) / _DEAD_DIRECTORY, prefix, DEAD)
        ranges: list[Ranges] = []
        first_bad = ""
        for batch in batches:
            made = self.rows.make(batch)
            files.add(made.good)
            dead.add(made.dead)
            ranges.append(made.ranges)
            first_bad = first_bad or made.first_bad
        result = {
            "files": [asdict(file) for file in files.finish()],
            "dead": [asdict(file) for file in dead.finish()],
            "ranges": joined(ranges),
            "first_bad": first_bad,
        }
        yield pa.RecordBatch.from_pydict({"result": [orjson.dumps(result).decode()]}, _RESULT)


class ParquetSink:
    """One stream into one Parquet table; called with each batch."""

    def __init__(self, settings: Settings, frame: DataFrame) -> None:
        self._settings = settings
        self._log = TableLog(settings.path)
        self._rows: Rows | None = None
        known = self._log.describe()
        if known is not None:
            self._take(known, frame)
            return
        rows = settings.shape.known(frame)
        if rows is not None:
            self._create(rows, frame)
        else:
            self._log.directory.mkdir(parents=True, exist_ok=True)

    def _create(self, rows: Rows, frame: DataFrame) -> None:
        shape = self._settings.shape
        self._take(
            self._log.create(
                Description(
                    uuid.uuid4().hex,
                    spark_of(rows.schema).jsonValue(),
                    shape.given,
                    shape.partition_by,
                )
            ),
            frame,
        )

    def _take(self, known: Description, frame: DataFrame) -> None:
        """Go on with a table that is there, if it is the same."""
        from pyspark.sql.types import StructType

        shape, where = self._settings.shape, self._log.directory
        if known.partition_by != shape.partition_by:
            raise ConfigError(
                f"option partition_by: the table {where} is divided by "
                f"{', '.join(known.partition_by) or 'nothing'}; that cannot be changed"
            )
        table = StructType.fromJson(known.schema)
        rows = shape.known(frame)
        if rows is None:
            if known.given.lower() != shape.given.lower():
                raise ConfigError(
                    f"option schema: the table {where} was made with {known.given[:80]!r}; give "
                    "that, or use another path"
                )
            rows = shape.kept(table)
        if spark_of(rows.schema).simpleString() != table.simpleString():
            raise ConfigError(
                f"option schema: the table {where} has the columns {table.simpleString()}, and "
                f"this stream makes {spark_of(rows.schema).simpleString()}; use another path"
            )
        self._rows = rows

    # -------------------------------------------------------------------------------------- batches

    def __call__(self, frame: DataFrame, batch: int) -> None:
        query = query_of(frame)
        last = self._log.refresh().queries.get(query)
        if last is not None:
            check_replay(str(self._log.directory), query, batch, last.batch)
            if last.batch == batch:
                self._publish(frame.sparkSession, query, last)
                return
        frame = needed_columns(frame, self._settings.shape)
        if self._rows is None:
            rows = rows_of(frame, self._settings.shape)
            if rows is None:
                return
            self._create(rows, frame)
        commit = self._written(frame, query, batch)
        if not (commit.add or commit.dead or commit.ranges):
            return
        check_dead_letters(self._settings.dead_letter_topic, commit.ranges)

        def check(state: State) -> bool:
            if state.has(query, batch):
                return False
            if self._settings.check_offsets:
                is_new = query not in state.queries
                check_origin(str(self._log.directory), state.ends, commit.ranges, is_new=is_new)
            return True

        self._log.commit(commit, check)
        self._publish(frame.sparkSession, query, self._log.state.queries[query])

    def _written(self, frame: DataFrame, query: str, batch: int) -> Commit:
        """Run the tasks; what they wrote, which nobody sees yet."""
        assert self._rows is not None
        shape = self._settings.shape
        task = Task(
            str(self._log.data), batch, self._rows, shape.partition_by, self._settings.target_bytes
        )
        told = [
            orjson.loads(row.result)
            for row in frame.mapInArrow(task.run, "result STRING").collect()
        ]
        files = tuple(DataFile(**file) for each in told for file in each["files"])
        dead = tuple(
            DataFile(f"{_DEAD_DIRECTORY}/{file['path']}", file["rows"], file["size"])
            for each in told
            for file in each["dead"]
        )
        if dead and not self._settings.dead_letter_topic:
            first = min(each["first_bad"] for each in told if each["first_bad"])
            for file in (*files, *dead):
                (self._log.data / file.path).unlink(missing_ok=True)
            refuse_bad(sum(file.rows for file in dead), first)
        ranges = joined(ranges_of(each["ranges"]) for each in told)
        return Commit(files, (), query, batch, dead, ranges)

    def _publish(self, spark: SparkSession, query: str, last: LastBatch) -> None:
        if last.dead:
            paths = [str(self._log.data / file.path) for file in last.dead]
            publish_dead_letters(spark.read.parquet(*paths), self._settings, query, last.batch)


def read_table(spark: SparkSession, log: TableLog) -> DataFrame:
    """The committed rows."""
    from pyspark.sql.types import StructType

    schema: Any = StructType.fromJson(log.require().schema)
    paths = [str(path) for path in log.paths()]
    if not paths:
        return spark.createDataFrame([], schema)
    return spark.read.schema(schema).option("basePath", str(log.data)).parquet(*paths)
