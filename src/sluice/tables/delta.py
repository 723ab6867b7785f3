"""This module writes a stream into a Delta table, each batch exactly once.

Delta keeps per application the version that it wrote last (`txnAppId`, `txnVersion`), in the commit
itself: here the query's id and the batch's number. The offsets of the batch, and where the table
ends by now, are in the commit's `userMetadata`. Dead letters follow the commit, once for a query
and a batch, so a batch that comes again sends those that are missing and nothing twice.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import orjson
import pyarrow as pa

from sluice.errors import ConfigError
from sluice.tables.log import Ranges
from sluice.tables.rows import DEAD, ORIGIN, Rows
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
    from pyspark.sql.types import StructType

_EXTENSION: Final = "DeltaSparkSessionExtension"
_MARK: Final = "sluice"
_LETTER: Final = "_letter"
_HISTORY_ROWS: Final = 1000


@dataclass(slots=True)
class History:
    """What the commits of a Delta table say of streams."""

    ends: dict[str, dict[str, int]] = field(default_factory=dict)
    batches: dict[str, int] = field(default_factory=dict)  # the last one of each query


def check_session(spark: SparkSession) -> None:
    """Refuse a session that cannot write Delta tables."""
    if _EXTENSION not in (spark.conf.get("spark.sql.extensions", "") or ""):
        raise ConfigError(
            "option format: this session has no Delta Lake. Start it with the jar "
            "io.delta:delta-spark_4.2_2.13, spark.sql.extensions="
            "io.delta.sql.DeltaSparkSessionExtension and spark.sql.catalog.spark_catalog="
            "org.apache.spark.sql.delta.catalog.DeltaCatalog; or use format='parquet'"
        )


def quoted(path: str) -> str:
    """The table's name in SQL."""
    if "`" in path or not path:
        raise ConfigError(f"option path: {path!r} is empty or holds a backtick")
    return f"delta.`{path}`"


def table_schema(spark: SparkSession, path: str) -> StructType | None:
    """The columns of a Delta table, None where there is none."""
    from pyspark.errors import AnalysisException

    try:
        return spark.read.format("delta").load(path).schema
    except AnalysisException as error:
        condition = error.getCondition() or ""
        if "PATH" in condition or "DELTA_TABLE_NOT_FOUND" in condition or "SCHEMA" in condition:
            return None
        raise


def history(spark: SparkSession, path: str) -> History:
    """What the newest commits say; those of other writers say nothing of ours."""
    found = History()
    rows = spark.sql(f"DESCRIBE HISTORY {quoted(path)} LIMIT {_HISTORY_ROWS}").collect()
    for row in sorted(rows, key=lambda row: -int(row.version)):
        try:
            own = orjson.loads(row.userMetadata or "{}").get(_MARK)
            if own is None:
                continue
            found.ends = found.ends or own["ends"]
            found.batches.setdefault(own["query"], own["batch"])
        except (orjson.JSONDecodeError, AttributeError, KeyError, TypeError):
            continue  # somebody else's words
    return found


@dataclass(frozen=True, slots=True)
class Task:
    """Makes the rows of a batch, with a column for letters that are dead; pickled to executors."""

    rows: Rows
    schema: pa.Schema

    def run(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            made = self.rows.make(batch)
            if made.good.num_rows:
                nothing = pa.nulls(made.good.num_rows, self.schema.field(_LETTER).type)
                columns = [*made.good.columns, nothing]
                yield pa.RecordBatch.from_arrays(columns, schema=self.schema)
            if made.bad:
                yield self._dead(batch.take(pa.array(made.bad)), made.dead)

    def _dead(self, origin: pa.RecordBatch, dead: pa.RecordBatch) -> pa.RecordBatch:
        known: dict[str, pa.Array] = {
            f"_{name}": origin.column(origin.schema.get_field_index(name)).cast(kind)
            for name, kind in ORIGIN
        }
        known[_LETTER] = dead.to_struct_array()
        columns = [
            known[each.name] if each.name in known else pa.nulls(dead.num_rows, each.type)
            for each in self.schema
        ]
        return pa.RecordBatch.from_arrays(columns, schema=self.schema)


class DeltaSink:
    """One stream into one Delta table; called with each batch."""

    def __init__(self, settings: Settings, frame: DataFrame) -> None:
        spark = frame.sparkSession
        check_session(spark)
        quoted(settings.path)
        self._settings = settings
        self._history: History | None = None
        table = table_schema(spark, settings.path)
        shape = settings.shape
        self._rows = shape.known(frame)
        if table is not None:
            self._history = history(spark, settings.path)
            if self._rows is None:
                self._rows = shape.kept(table)
            _compare(settings.path, table, spark_of(self._rows.schema))

    # -------------------------------------------------------------------------------------- batches

    def __call__(self, frame: DataFrame, batch: int) -> None:
        query = query_of(frame)
        past = self._history or History()
        last = past.batches.get(query, -1)
        check_replay(self._settings.path, query, batch, last)
        frame = needed_columns(frame, self._settings.shape)
        if self._rows is None:
            self._rows = rows_of(frame, self._settings.shape)
            if self._rows is None:
                return
        rows = self._made(frame).persist()
        try:
            ranges, dead = self._seen(rows)
            check_dead_letters(self._settings.dead_letter_topic, ranges)
            if dead and not self._settings.dead_letter_topic:
                refuse_bad(dead, _first_letter(rows))
            if batch > last:
                if self._settings.check_offsets:
                    is_new = query not in past.batches
                    check_origin(self._settings.path, past.ends, ranges, is_new=is_new)
                self._commit(rows, past, ranges, query, batch)
            if dead:
                letters = rows.where(f"{_LETTER} is not null").select(f"{_LETTER}.*")
                publish_dead_letters(letters, self._settings, query, batch)
        finally:
            rows.unpersist()

    def _made(self, frame: DataFrame) -> DataFrame:
        assert self._rows is not None
        if not self._settings.shape.given and self._rows.schema.names == frame.columns:
            return frame
        loose = [each.with_nullable(True) for each in self._rows.schema]
        letter = pa.field(_LETTER, pa.struct(list(DEAD)))
        schema = pa.schema([*loose, letter])
        return frame.mapInArrow(Task(self._rows, schema).run, spark_of(schema))

    def _seen(self, rows: DataFrame) -> tuple[Ranges, int]:
        """The offsets of every queue, and how many rows do not fit."""
        from pyspark.sql import functions

        prefix = "_" if self._settings.shape.given else ""
        names = [f"{prefix}{name}" for name in ("topic", "partition", "offset")]
        if any(name not in rows.columns for name in names):
            return {}, 0
        letters = functions.count(_LETTER) if _LETTER in rows.columns else functions.lit(0)
        offset = functions.col(names[2])
        found: Ranges = {}
        dead = 0
        grouped = rows.groupBy(*names[:2]).agg(
            functions.min(offset).alias("low"),
            functions.max(offset).alias("high"),
            letters.alias("dead"),
        )
        for row in grouped.collect():
            found.setdefault(str(row[0]), {})[str(row[1])] = (int(row.low), int(row.high) + 1)
            dead += int(row.dead)
        return found, dead

    def _commit(
        self, rows: DataFrame, past: History, ranges: Ranges, query: str, batch: int
    ) -> None:
        ends = {topic: dict(parts) for topic, parts in past.ends.items()}
        for topic, parts in ranges.items():
            ends.setdefault(topic, {}).update({part: stop for part, (_, stop) in parts.items()})
        own = {"query": query, "batch": batch, "ranges": ranges, "ends": ends}
        if _LETTER in rows.columns:
            rows = rows.where(f"{_LETTER} is null").drop(_LETTER)
        writer = rows.write.format("delta").mode("append")
        writer = writer.option("txnAppId", query).option("txnVersion", batch)
        writer = writer.option("userMetadata", orjson.dumps({_MARK: own}).decode())
        writer.partitionBy(*self._settings.shape.partition_by).save(self._settings.path)
        self._history = History(ends, {**past.batches, query: batch})


def _compare(path: str, table: StructType, made: StructType) -> None:
    def words(schema: Any) -> dict[str, str]:
        return {each.name: each.dataType.simpleString() for each in schema.fields}

    if words(table) != words(made):
        raise ConfigError(
            f"option schema: the table {path} has the columns {table.simpleString()}, and this "
            f"stream makes {made.simpleString()}; use another path"
        )


def _first_letter(rows: DataFrame) -> str:
    found: Any = rows.where(f"{_LETTER} is not null").orderBy("_topic", "_offset").first()
    headers = {each.key: bytes(each.value).decode() for each in found[_LETTER].headers}
    place = f"topic {found['_topic']}, partition {found['_partition']}, offset {found['_offset']}"
    return f"{place}: {headers['reason']}"


def optimize(spark: SparkSession, path: str) -> tuple[int, int]:
    """Delta's own compaction; how many files it looked at, and how many are left of them."""
    check_session(spark)
    metrics = spark.sql(f"OPTIMIZE {quoted(path)}").collect()[0].metrics
    before = int(metrics.totalConsideredFiles)
    return before, before - int(metrics.numFilesRemoved) + int(metrics.numFilesAdded)
