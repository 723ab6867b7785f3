"""This module is the pipeline `gifts`: gifts of live streams become leaderboards and hosts' shares.

Gifts come as JSON, some of them twice, as from phones that got no answer: each counts once. Four
boards come of them, by the time at which a gift was given:

    second, minute, day   the viewers who gave most, by coins
    share                 what each host gets of the day's coins, in hundredths of a coin

A message of the output is one line of a board: {"board", "start", "host", "name", "coins"}, with a
key that names it. A line that changes is published again, under the same key, so in order. Only the
first `top` lines of what changed in a batch are published: coins only grow, so whoever is among the
first at the end was so when his line changed last. A reader that keeps the latest of each line has
the board; `sluice.pipelines.board` is one.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from sluice.pipelines.settings import Settings, Value
from sluice.pipelines.traffic import Event, json_event

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession
    from pyspark.sql.streaming.readwriter import DataStreamWriter

TOPIC: Final = "gifts"
SETTINGS: Final[dict[str, Value]] = {
    "topic": TOPIC,
    "output": "gift-board",
    "top": 10,  # lines of a board
    "share_percent": 40,  # of a gift, for its host
    "late_minutes": 10,  # so much later than it was given a gift may come and still count
}
SCHEMA: Final = "id STRING, viewer STRING, host STRING, coins BIGINT, at BIGINT"
_WINDOWS: Final = (("second", "SECOND"), ("minute", "MINUTE"), ("day", "DAY"))
_COINS: Final = (1, 1, 1, 5, 5, 10, 66, 188, 520)
_HOSTS: Final = ("ada", "bo", "cem", "dao")
_REPEATED_PERCENT: Final = 10


def pipeline(spark: SparkSession, settings: Settings) -> dict[str, DataStreamWriter]:
    """One query: all boards are groups of one sum."""
    top = settings.number("top", 1)
    topic, output = settings.topics("topic", "output")
    gifts = once(settings.read(spark, topic, columns="value"), settings)
    totals = lines_of(gifts, settings).groupBy("board", "window", "host", "name").sum("coins")
    return {"board": settings.publish(totals, output, lambda b: ranked(b, top))}


def once(messages: DataFrame, settings: Settings) -> DataFrame:
    """Gifts out of messages, each one once; what is no gift is left out."""
    from pyspark.sql import functions as f

    gift = f.from_json(f.col("value").cast("string"), SCHEMA)
    gifts = messages.select(gift.alias("gift")).select("gift.*")
    gifts = gifts.where("id IS NOT NULL AND host IS NOT NULL AND viewer IS NOT NULL AND coins > 0")
    gifts = gifts.withColumn("time", f.timestamp_millis("at"))
    gifts = gifts.withWatermark("time", f"{settings.number('late_minutes', 0)} minutes")
    return gifts.dropDuplicatesWithinWatermark(["id"])


def lines_of(gifts: DataFrame, settings: Settings) -> DataFrame:
    """For each gift the lines that it adds to, one for every board."""
    from pyspark.sql import functions as f

    def line(board: str, unit: str, host: Column, name: Column, coins: Column) -> Column:
        start = f.date_trunc(unit, "time")
        window = f.struct(start.alias("start"), (start + f.expr(f"INTERVAL 1 {unit}")).alias("end"))
        return f.struct(
            f.lit(board).alias("board"),
            window.alias("window"),
            host.alias("host"),
            name.alias("name"),
            coins.cast("bigint").alias("coins"),
        )

    viewer, host, coins = f.col("viewer"), f.col("host"), f.col("coins")
    lines = [line(board, unit, f.lit(""), viewer, coins) for board, unit in _WINDOWS]
    share = coins * f.lit(settings.number("share_percent", 0))
    lines.append(line("share", "DAY", host, host, share))
    each = gifts.select(f.explode(f.array(*lines)).alias("line")).select("line.*")
    # Windows of different length in one sum: to Spark the column is the window of an event's time,
    # so that it forgets a line when the watermark has passed its end.
    marks = {
        "spark.watermarkDelayMs": settings.number("late_minutes", 0) * 60_000,
        "spark.timeWindow": True,
    }
    return each.withColumn("window", f.col("window").alias("window", metadata=marks))


def ranked(lines: DataFrame, top: int) -> DataFrame:
    """The first lines of each board, as messages."""
    from pyspark.sql import functions as f
    from pyspark.sql.window import Window

    board = Window.partitionBy("board", "window").orderBy(f.desc("sum(coins)"), "name")
    lines = lines.withColumn("rank", f.row_number().over(board)).where(f.col("rank") <= top)
    start = f.unix_millis("window.start")
    return lines.select(
        f.concat_ws("|", "board", start, "name").alias("key"),
        f.col("board").alias("tag"),
        f.to_json(
            f.struct(
                "board", start.alias("start"), "host", "name", f.col("sum(coins)").alias("coins")
            )
        ).alias("value"),
    )


def traffic(seed: int, start_ms: int, rate: float) -> Iterator[Event]:
    """Gifts, without end: some viewers give much more than others, some gifts are sent twice."""
    chance = random.Random(seed)
    number = 0
    while True:
        after_seconds = number / rate
        viewer = min(int(chance.paretovariate(0.9)), 200)
        gift = {
            "id": f"{start_ms}-{seed}-{number}",
            "viewer": f"viewer-{viewer}",
            "host": chance.choice(_HOSTS),
            "coins": chance.choice(_COINS),
            "at": start_ms + int(1000 * after_seconds),
        }
        event = json_event(
            TOPIC, gift, key=str(gift["id"]), tag="gift", after_seconds=after_seconds
        )
        yield event
        if chance.randrange(100) < _REPEATED_PERCENT:
            yield event
        number += 1
