"""This module is what both kinds of tables share on the driver: settings, checks, dead letters.

A batch is known by the id of its query, which Spark keeps in the checkpoint, and its number. Spark
replays at most the last one. So a batch that the table has is not written again, and a checkpoint
that is older than the table is refused, as are offsets that the table has from somebody else.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from sluice.errors import ConfigError, SluiceError
from sluice.tables.log import Ranges, overlap
from sluice.tables.rows import NEEDED
from sluice.tables.schemas import SAMPLE_ROWS, Shape

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from sluice.tables.rows import Rows

_QUERY_PROPERTY: Final = "sql.streaming.queryId"


@dataclass(frozen=True, slots=True)
class Settings:
    """What a stream into a table was started with."""

    path: str
    shape: Shape
    dead_letter_topic: str
    sink_options: dict[str, str]
    target_bytes: int
    check_offsets: bool


def query_of(frame: DataFrame) -> str:
    """The id of the query that a batch belongs to: the same after a restart."""
    query = frame.sparkSession.sparkContext.getLocalProperty(_QUERY_PROPERTY)
    if not query:
        raise SluiceError("Spark does not tell the query's id; a table is written by a stream only")
    return str(query)


def needed_columns(frame: DataFrame, shape: Shape) -> DataFrame:
    """Only what is used: every column costs on its way to Python."""
    if not shape.given:
        return frame
    names = (*NEEDED, "key") if "key" in frame.columns else NEEDED
    return frame.select(*names)


def rows_of(frame: DataFrame, shape: Shape) -> Rows | None:
    """How rows are made by what the first ones look like; None where there are none."""
    sample = frame.select("value").limit(SAMPLE_ROWS).collect()
    if not sample:
        return None
    return shape.inferred([None if row.value is None else bytes(row.value) for row in sample])


def check_replay(path: str, query: str, batch: int, last: int) -> None:
    """Refuse a checkpoint that is behind the table."""
    if batch < last:
        raise ConfigError(
            f"option checkpoint: it is older than the table {path}: batch {batch} comes again, and "
            f"the table has batch {last} of query {query}. Was it restored from a copy? Start with "
            "a new checkpoint, and with startingOffsets of sluice.tables.starting_offsets"
        )


def check_origin(
    path: str, ends: Mapping[str, Mapping[str, int]], ranges: Ranges, *, is_new: bool
) -> None:
    """Refuse rows that the table has already, or that are of topics it is not about."""
    if is_new and ends and ranges and not set(ends) & set(ranges):
        raise ConfigError(
            f"option path: the table {path} holds topics {', '.join(sorted(ends))}, and this "
            f"stream reads {', '.join(sorted(ranges))}; use another path"
        )
    twice = overlap(ends, ranges)
    if twice:
        raise ConfigError(
            f"option checkpoint: the table {path} holds rows of this stream that the checkpoint "
            f"does not know of: {twice}. If the checkpoint was lost, start a new one with the "
            "option startingOffsets of sluice.tables.starting_offsets; if the topic was made anew, "
            "use another path"
        )


def check_dead_letters(topic: str, ranges: Ranges) -> None:
    """Refuse dead letters that the stream would read again, and find bad again, for ever."""
    if topic in ranges:
        raise ConfigError(
            f"option dead_letter_topic: this stream reads {topic} itself, and what does not fit "
            "would come again and again; name another topic"
        )


def refuse_bad(count: int, first: str) -> None:
    """Rows that do not fit, and no place for them."""
    raise SluiceError(
        f"{count} rows do not fit the schema, the first is {first}. Nothing of this batch was "
        "written. Option dead_letter_topic names a topic for such rows; or another schema is needed"
    )


def publish_dead_letters(frame: DataFrame, settings: Settings, query: str, batch: int) -> None:
    """Send them, once for a query and a batch however often this runs, unless told otherwise."""
    if not settings.dead_letter_topic:
        raise ConfigError(
            f"option dead_letter_topic: batch {batch} has rows that do not fit, and was begun with "
            "a topic for them; name it"
        )
    from sluice.spark.options import write_options

    writer = frame.write.format("sluice").options(**settings.sink_options)
    writer = writer.option("topic", settings.dead_letter_topic)
    if write_options(settings.sink_options).delivery != "atLeastOnce":
        writer = writer.option("txnAppId", f"table-{query}").option("txnVersion", batch)
    writer.mode("append").save()


def dead_options(topic: str, servers: str | None, more: Mapping[str, Any] | None) -> dict[str, str]:
    """The options of the sink for dead letters, checked."""
    from sluice.spark.options import check_topic, write_options

    check_topic("dead_letter_topic", topic)
    options = {name: str(value) for name, value in (more or {}).items()}
    for name in ("topic", "txnAppId", "txnVersion"):
        if name in options:
            raise ConfigError(f"option sink_options: {name} is set by the table itself")
    if servers is not None:
        options["sluice.bootstrap.servers"] = servers
    if topic:
        write_options(options)
    elif options:
        raise ConfigError("options servers and sink_options are for dead letters: name their topic")
    return options
