"""This module is the pipeline `archive`: topics become a table, every message in it once.

`topic` names one or several, with commas. The table in `path` (docs/tables.md) is divided by topic
and by the day on which the broker stored a message. Without `schema` a row has the columns of
Spark's Kafka source, the tag, the user's properties, id and broker; with one (`json`, DDL or Avro)
the fields of the value, and what does not fit goes to the topic `dead`, with the reason. `format`
is parquet or delta, and Delta may be in an object store.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final

from sluice.errors import ConfigError
from sluice.pipelines.settings import Settings, Value
from sluice.pipelines.traffic import Event, json_event

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from sluice.pipelines.running import Start

TOPIC: Final = "events"
SETTINGS: Final[dict[str, Value]] = {
    "topic": TOPIC,
    "path": "archive",
    "format": "parquet",
    "schema": "",
    "dead": "archive-dead",
}
_COLUMNS: Final = "key,value,topic,partition,offset,timestamp,headers,tag,messageId,broker"


def pipeline(spark: SparkSession, settings: Settings) -> dict[str, Start]:
    """One query: rows as they come, or the fields of their values, into a table."""
    topics = [part.strip() for part in settings.text("topic").split(",") if part.strip()]
    if not topics or not settings.text("path"):
        raise ConfigError("pipeline archive: --set topic=NAME and --set path=DIR are needed")
    options: dict[str, Any] = {"format": settings.text("format")}
    schema, dead = settings.text("schema"), settings.text("dead")
    if schema:
        options |= {"schema": schema, "partition_by": ["_topic", "_date"]}
        if dead:
            settings.ensure_topics(dead)
            options["dead_letter_topic"] = dead
        rows = settings.read(spark, topics)
    else:
        options["partition_by"] = ["topic", "_date"]
        rows = settings.read(spark, topics, columns=_COLUMNS)
    return {"files": settings.table(rows, settings.text("path"), **options)}


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
