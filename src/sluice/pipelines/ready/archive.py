"""This module is the pipeline `archive`: topics become Parquet files, every message in them once.

`topic` names one or several, with commas. Files lie in `path`, in folders by topic and by the day
on which the broker stored a message; each row has the columns of Spark's Kafka source, the tag and
the user's properties. Read them with `spark.read.parquet(path)`, which leaves out what a killed run
wrote and did not finish.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from sluice.errors import ConfigError
from sluice.pipelines.settings import Settings, Value
from sluice.pipelines.traffic import Event, json_event

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming.readwriter import DataStreamWriter

TOPIC: Final = "events"
SETTINGS: Final[dict[str, Value]] = {"topic": TOPIC, "path": "archive"}
_COLUMNS: Final = "key,value,topic,partition,offset,timestamp,headers,tag,messageId,broker"


def pipeline(spark: SparkSession, settings: Settings) -> dict[str, DataStreamWriter]:
    """One query: rows as they come, into files."""
    from pyspark.sql import functions as f

    topics = [part.strip() for part in settings.text("topic").split(",") if part.strip()]
    if not topics or not settings.text("path"):
        raise ConfigError("pipeline archive: --set topic=NAME and --set path=DIR are needed")
    rows = settings.read(spark, topics, columns=_COLUMNS)
    rows = rows.withColumn("day", f.date_format("timestamp", "yyyy-MM-dd"))
    writer = rows.writeStream.format("parquet").partitionBy("topic", "day")
    return {"files": writer.option("path", settings.text("path"))}


def traffic(seed: int, start_ms: int, rate: float) -> Iterator[Event]:
    """Readings of sensors, without end."""
    chance = random.Random(seed)
    number = 0
    while True:
        after_seconds = number / rate
        sensor = f"sensor-{chance.randrange(20)}"
        reading = {
            "number": number,
            "sensor": sensor,
            "at": start_ms + int(1000 * after_seconds),
            "value": round(chance.gauss(20, 5), 2),
        }
        yield json_event(TOPIC, reading, key=sensor, tag="reading", after_seconds=after_seconds)
        number += 1
