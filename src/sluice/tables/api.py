"""This module is what users of sluice.tables call. Spark and Arrow are imported where needed."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

import orjson

from sluice.errors import ConfigError
from sluice.tables import compaction
from sluice.tables.compaction import KEEP_HOURS, Compaction
from sluice.tables.log import TableLog

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

Format = Literal["parquet", "delta"]
FORMATS: Final = ("parquet", "delta")
TARGET_BYTES: Final = 128 * 1024 * 1024
_TARGET_BYTES_MIN: Final = 1024
_KEEP_HOURS_MAX: Final = 1_000_000
_EARLIEST: Final = -2


def write_stream(
    frame: DataFrame,
    path: str | os.PathLike[str],
    *,
    checkpoint: str | os.PathLike[str],
    format: Format = "parquet",  # noqa: A002
    schema: str | None = None,
    dead_letter_topic: str | None = None,
    servers: str | None = None,
    sink_options: Mapping[str, Any] | None = None,
    partition_by: Sequence[str] = (),
    target_file_bytes: int = TARGET_BYTES,
    check_offsets: bool = True,
    trigger: Mapping[str, Any] | None = None,
    query_name: str | None = None,
) -> StreamingQuery:
    """Start a query that writes every row of a stream into a table, exactly once.

    Killed anywhere and started again in the same way, it goes on where it was. `schema` says how
    values are read (docs/tables.md); rows that do not fit go to `dead_letter_topic`, or fail the
    query where there is none. Raises ConfigError with the option's name for what cannot work.
    """
    if format not in FORMATS:
        raise ConfigError(f"option format: {format!r} is none of {', '.join(FORMATS)}")
    if not frame.isStreaming:
        raise ConfigError("the DataFrame is no stream: read it with spark.readStream")
    if not os.fspath(checkpoint):
        raise ConfigError("option checkpoint is empty; it is the directory that Spark resumes from")
    if target_file_bytes < _TARGET_BYTES_MIN:
        raise ConfigError(f"option target_file_bytes: at least {_TARGET_BYTES_MIN}")
    if isinstance(partition_by, str):
        raise ConfigError("option partition_by is a list of columns, also where it is one")
    from sluice.tables.delta import DeltaSink
    from sluice.tables.parquet import ParquetSink
    from sluice.tables.schemas import Shape
    from sluice.tables.sinks import Settings, dead_options

    if dead_letter_topic is not None and schema is None:
        raise ConfigError("option dead_letter_topic: without a schema every row fits")
    settings = Settings(
        os.fspath(path),
        Shape(schema, partition_by),
        dead_letter_topic or "",
        dead_options(dead_letter_topic or "", servers, sink_options),
        target_file_bytes,
        check_offsets,
    )
    make = ParquetSink if format == "parquet" else DeltaSink
    writer = frame.writeStream.foreachBatch(make(settings, frame))
    writer = writer.option("checkpointLocation", os.fspath(checkpoint))
    if query_name is not None:
        writer = writer.queryName(query_name)
    if trigger is not None:
        writer = writer.trigger(**trigger)
    return writer.start()


def read(spark: SparkSession, path: str | os.PathLike[str]) -> DataFrame:
    """The table as it is now: committed rows, whatever is being written beside it."""
    if _is_delta(path):
        return spark.read.format("delta").load(os.fspath(path))
    from sluice.tables.parquet import read_table

    return read_table(spark, TableLog(path))


def files(path: str | os.PathLike[str]) -> list[Path]:
    """The Parquet files that are the table now, for tools other than Spark."""
    if _is_delta(path):
        raise ConfigError(f"option path: {os.fspath(path)} is a Delta table, which has its own log")
    log = TableLog(path)
    log.require()
    return log.paths()


def starting_offsets(
    path: str | os.PathLike[str], *, queues: int = 0, spark: SparkSession | None = None
) -> str:
    """Where a table ends, in the form of the option startingOffsets: for a lost checkpoint.

    Queues of which the table has no row begin at their first message, if `queues` tells how many a
    topic has. A Delta table needs `spark`.
    """
    if _is_delta(path):
        from sluice.tables.delta import history

        ends = history(_session(spark), os.fspath(path)).ends
    else:
        log = TableLog(path)
        log.require()
        ends = log.refresh().ends
    whole = {
        topic: {**{str(number): _EARLIEST for number in range(queues)}, **parts}
        for topic, parts in ends.items()
    }
    return orjson.dumps(whole).decode()


def compact(
    path: str | os.PathLike[str],
    *,
    target_file_bytes: int = TARGET_BYTES,
    spark: SparkSession | None = None,
) -> Compaction:
    """Join small files to large ones; readers and a running stream are not disturbed.

    Parquet needs no Spark. A Delta table is left to its own OPTIMIZE, and needs `spark`.
    """
    if _is_delta(path):
        from sluice.tables.delta import optimize

        before, after = optimize(_session(spark), os.fspath(path))
        return Compaction(before, after, 0, 0, 0)
    return compaction.compact(TableLog(path), target_file_bytes)


def sweep(path: str | os.PathLike[str], *, keep_hours: float = KEEP_HOURS) -> list[Path]:
    """Delete Parquet files that have not been part of the table for so long; those that went.

    `keep_hours` must be longer than the longest query over the table and its longest batch.
    """
    if _is_delta(path):
        raise ConfigError(f"option path: {os.fspath(path)} is a Delta table: VACUUM sweeps it")
    if not 0 <= keep_hours <= _KEEP_HOURS_MAX:  # and NaN
        raise ConfigError(f"option keep_hours: {keep_hours:g} is not from 0 to {_KEEP_HOURS_MAX}")
    log = TableLog(path)
    log.require()
    return log.sweep(int(keep_hours * 3_600_000))


def _is_delta(path: str | os.PathLike[str]) -> bool:
    """Remote paths are Delta's: a Parquet table here is in a file system."""
    text = os.fspath(path)
    if "://" in text and not text.startswith("file:"):
        return True
    return os.path.isdir(os.path.join(text.removeprefix("file://"), "_delta_log"))


def _session(spark: SparkSession | None) -> SparkSession:
    if spark is None:
        raise ConfigError("this is a Delta table: give spark=, a session with Delta Lake")
    return spark
