"""This module is the pipeline `logs`: lines of logs become error rates, sessions and an archive.

Lines are messages as `sluice collect` sends them:

    2026-11-16T10:00:00.123Z ERROR checkout user=u17 48ms GET /cart

    rates      lines and errors of each service in each minute, to `rates`, as they change
    sessions   what a user did until nothing came for `session_minutes`, to `sessions`, when over
    bad        lines that do not look like this, to `bad`, with the reason
    archive    all lines that do, in the table `archive` (docs/tables.md), by day and service

A line that comes later than `late_minutes` after younger ones is in the archive only; how many such
there were is in the closing line.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Final

from sluice.pipelines.settings import Settings, Value
from sluice.pipelines.traffic import Event

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

    from sluice.pipelines.running import Start

SETTINGS: Final[dict[str, Value]] = {
    "topic": "logs",
    "rates": "log-rates",
    "sessions": "log-sessions",
    "bad": "log-bad",
    "archive": "log-archive",
    "late_minutes": 10,
    "session_minutes": 30,
}
# Time, level, service, user, duration, text.
LINE: Final = (
    r"^(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(?:\.\d{1,6})?Z) (DEBUG|INFO|WARN|ERROR) ([\w-]{1,64})"
    r"(?: user=(\S{1,64}))?(?: (\d{1,9})ms)? ?(.*)$"
)
_ERROR: Final = "ERROR"
_SERVICES: Final = ("cart", "checkout", "search", "users")
# By these the table knows which lines it has.
_ORIGIN: Final = ("topic", "partition", "offset", "timestamp")
_REASON: Final = "not: time, level, service, text"


def pipeline(spark: SparkSession, settings: Settings) -> dict[str, Start]:
    """Four queries over one topic."""
    settings.topics("topic", "rates", "sessions", "bad")
    late = f"{settings.number('late_minutes', 0)} minutes"

    def lines(query: str, *more: str) -> DataFrame:
        return parsed(spark, settings, query, more)

    def good(query: str, *more: str) -> DataFrame:
        return lines(query, *more).where("time IS NOT NULL")

    return {
        "rates": settings.publish(
            _rates(good("rates").withWatermark("time", late)), settings.text("rates")
        ),
        "sessions": settings.write(
            _sessions(good("sessions").withWatermark("time", late), settings),
            settings.text("sessions"),
        ),
        "bad": settings.write(_bad(lines("bad")), settings.text("bad")),
        "archive": settings.table(
            good("archive", *_ORIGIN).select("*", _day()),
            settings.text("archive"),
            partition_by=["day", "service"],
        ),
    }


def parsed(
    spark: SparkSession, settings: Settings, query: str, more: Sequence[str] = ()
) -> DataFrame:
    """The lines of the topic in their parts; the time of one that is none is null.

    `more` are columns of the source to keep beside them.
    """
    from pyspark.sql import functions as f

    group = f"pipeline-{settings.name}-{query}"
    columns = ",".join(("value", *more))
    messages = settings.read(spark, settings.text("topic"), group=group, columns=columns)
    text = messages.select(f.col("value").cast("string").alias("line"), *more)

    def part(number: int) -> Column:
        return f.regexp_extract("line", LINE, number)

    return text.select(
        f.try_to_timestamp(part(1)).alias("time"),
        part(2).alias("level"),
        part(3).alias("service"),
        f.nullif(part(4), f.lit("")).alias("user"),
        part(5).try_cast("bigint").alias("ms"),
        "line",
        *more,
    )


def _day() -> Column:
    from pyspark.sql import functions as f

    return f.date_format("time", "yyyy-MM-dd").alias("day")


def _rates(lines: DataFrame) -> DataFrame:
    from pyspark.sql import functions as f

    errors = f.count_if(f.col("level") == _ERROR)
    grouped = lines.groupBy(f.window("time", "1 minute"), "service")
    counts = grouped.agg(f.count("*").alias("lines"), errors.alias("errors"))
    start = f.unix_millis("window.start")
    said = f.struct(
        "service", start.alias("start"), "lines", "errors",
        (f.col("errors") / f.col("lines")).alias("rate"),
    )  # fmt: skip
    key = f.concat_ws("|", "service", start)
    return counts.select(key.alias("key"), f.to_json(said).alias("value"))


def _sessions(lines: DataFrame, settings: Settings) -> DataFrame:
    from pyspark.sql import functions as f

    gap = f"{settings.number('session_minutes', 1)} minutes"
    grouped = lines.where("user IS NOT NULL").groupBy(f.session_window("time", gap), "user")
    found = grouped.agg(
        f.count("*").alias("lines"),
        f.count_if(f.col("level") == _ERROR).alias("errors"),
        f.max("time").alias("last"),
    )
    said = f.struct(
        "user",
        f.unix_millis("session_window.start").alias("start"),
        f.unix_millis("last").alias("end"),
        "lines",
        "errors",
    )
    return found.select(f.col("user").alias("key"), f.to_json(said).alias("value"))


def _bad(lines: DataFrame) -> DataFrame:
    from pyspark.sql import functions as f

    said = f.struct(f.lit(_REASON).alias("reason"), "line")
    return lines.where("time IS NULL").select(f.to_json(said).alias("value"))


def traffic(seed: int, start_ms: int, rate: float) -> Iterator[Event]:
    """Lines of four services, without end; one of them fails more often than the others."""
    chance = random.Random(seed)
    number = 0
    while True:
        after_seconds = number / rate
        at = datetime.fromtimestamp(start_ms / 1000 + after_seconds, UTC)
        service = chance.choice(_SERVICES)
        fails = chance.random() < (0.2 if service == "checkout" else 0.02)
        level = _ERROR if fails else chance.choice(("INFO", "INFO", "INFO", "WARN"))
        line = (
            f"{at:%Y-%m-%dT%H:%M:%S}.{at.microsecond // 1000:03d}Z {level} {service} "
            f"user=u{chance.randrange(50)} {chance.randrange(1, 500)}ms GET /{service}"
        )
        if chance.random() < 0.01:
            line = f"Traceback: {line[:40]}"
        yield Event("logs", line.encode(), "", "", after_seconds)
        number += 1
