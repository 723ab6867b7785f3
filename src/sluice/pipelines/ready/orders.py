"""This module is the pipeline `orders`: orders and payments are reconciled, each counted once.

Orders and payments are topics of JSON. Some messages come twice, some late, some payments do not
fit. Of every order and every payment comes one message, in `output`, with its state:

    paid           a payment of the order's amount came within `pay_minutes`
    wrong amount   a payment came, of another amount
    unpaid         none came in that time
    no order       a payment without an order before it

What comes later than `late_minutes` after its time goes to `late`, as it came and with the reason;
so does what cannot be read, and nothing is dropped unseen. Late is measured against the time at
which the broker stored a message: what is not late by that is never late for Spark's watermark. An
event that claims a time to come counts as of when it was stored.

An order is known to be unpaid, and a payment to be without an order, when events of later times
have come: at the end of `run` the youngest ones wait for the next run.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final

from sluice.pipelines.settings import Settings, Value
from sluice.pipelines.traffic import Event, json_event

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.readwriter import DataStreamWriter

SETTINGS: Final[dict[str, Value]] = {
    "orders": "orders",
    "payments": "payments",
    "output": "orders-checked",
    "late": "orders-late",
    "late_minutes": 10,
    "pay_minutes": 30,
}
_ORDER: Final = "order STRING, customer STRING, cents BIGINT, at BIGINT"
_PAYMENT: Final = "payment STRING, order STRING, cents BIGINT, at BIGINT"
_LATE: Final = "late"
_UNREADABLE: Final = "unreadable"


def pipeline(spark: SparkSession, settings: Settings) -> dict[str, DataStreamWriter]:
    """Two queries: what is set aside, and what becomes of the rest."""
    settings.topics("orders", "payments", "output", "late")
    names = {name: settings.text(name) for name in ("orders", "payments", "output", "late")}
    aside = [
        _aside(_events(spark, settings, names["orders"], _ORDER, "order", "late-orders")),
        _aside(_events(spark, settings, names["payments"], _PAYMENT, "payment", "late-payments")),
    ]
    return {
        "checked": settings.write(_checked(spark, settings), names["output"]),
        "late": settings.write(aside[0].unionByName(aside[1]), names["late"]),
    }


def _events(
    spark: SparkSession, settings: Settings, topic: str, schema: str, key: str, group: str
) -> DataFrame:
    """The events of a topic with their time, and with a fault where there is one."""
    from pyspark.sql import functions as f

    stream = settings.read(
        spark, topic, group=f"pipeline-{settings.name}-{group}", columns="topic,value,timestamp"
    )
    body = f.from_json(f.col("value").cast("string"), schema)
    late = f"INTERVAL {settings.number('late_minutes', 0)} MINUTES"
    stream = stream.select("topic", "value", "timestamp", body.alias("event"))
    stream = stream.select("topic", "value", "timestamp", "event.*")
    time = f.timestamp_millis("at")
    return stream.select(
        "*",
        f.least(time, f.col("timestamp")).alias("time"),
        f.when(
            f.expr(f"{key} IS NULL OR cents IS NULL OR at IS NULL OR order IS NULL"), _UNREADABLE
        )
        .when(f.col("timestamp") > time + f.expr(late), _LATE)
        .alias("fault"),
    )


def _aside(events: DataFrame) -> DataFrame:
    """What is late or cannot be read, as messages."""
    from pyspark.sql import functions as f

    faults = events.where("fault IS NOT NULL")
    said = f.struct("fault", "topic", f.col("value").cast("string").alias("message"))
    return faults.select(f.col("fault").alias("tag"), f.to_json(said).alias("value"))


def _checked(spark: SparkSession, settings: Settings) -> DataFrame:
    """Orders beside their payments, as messages."""
    from pyspark.sql import functions as f

    delay = f"{settings.number('late_minutes', 0)} minutes"

    def once(topic: str, schema: str, key: str) -> DataFrame:
        events = _events(spark, settings, settings.text(topic), schema, key, topic)
        events = events.where("fault IS NULL").withWatermark("time", delay)
        return events.dropDuplicatesWithinWatermark([key])

    orders = once("orders", _ORDER, "order").alias("o")
    payments = once("payments", _PAYMENT, "payment").alias("p")
    pay = f"INTERVAL {settings.number('pay_minutes', 1)} MINUTES"
    fits = f.expr(f"o.order = p.order AND p.time >= o.time AND p.time <= o.time + {pay}")
    state = (
        f.when(f.col("p.order").isNull(), "unpaid")
        .when(f.col("o.order").isNull(), "no order")
        .when(f.col("o.cents") != f.col("p.cents"), "wrong amount")
        .otherwise("paid")
    )
    order = f.coalesce("o.order", "p.order")
    said = f.struct(
        order.alias("order"),
        state.alias("state"),
        f.col("o.cents").alias("cents"),
        f.col("p.payment").alias("payment"),
        f.col("p.cents").alias("paid_cents"),
    )
    joined = orders.join(payments, fits, "full_outer")
    return joined.select(order.alias("key"), f.to_json(said).alias("value"))


def traffic(seed: int, start_ms: int, rate: float) -> Iterator[Event]:
    """Orders, without end, and what comes of them, in the order in which it is sent."""
    chance = random.Random(seed)
    waiting: list[tuple[float, int, Event]] = []  # (when, to keep ties in order, what)
    number = made = 0
    while True:
        after_seconds = number / rate
        while waiting and waiting[0][0] <= after_seconds:
            yield heapq.heappop(waiting)[2]
        for event in _case(chance, seed, number, start_ms, after_seconds):
            made += 1
            heapq.heappush(waiting, (event.after_seconds, made, event))
        number += 1


def _case(
    chance: random.Random, seed: int, number: int, start_ms: int, after_seconds: float
) -> list[Event]:
    """One order with its payment; now and then something is wrong with it."""
    at_ms = start_ms + int(1000 * after_seconds)
    name = f"{start_ms}-{seed}-{number}"
    cents = chance.randrange(100, 100_000)
    order: dict[str, Any] = {
        "order": name,
        "customer": f"c{chance.randrange(500)}",
        "cents": cents,
        "at": at_ms,
    }
    pay_seconds = chance.uniform(1, 30)
    payment: dict[str, Any] = {
        "payment": f"p-{name}",
        "order": name,
        "cents": cents,
        "at": at_ms + int(1000 * pay_seconds),
    }
    kind = chance.choices(
        ("fine", "twice", "unpaid", "wrong", "stray", "late"), (78, 10, 5, 3, 2, 2)
    )[0]
    if kind == "wrong":
        payment["cents"] = cents - chance.randrange(1, 100)
    elif kind == "stray":
        payment["order"] = f"none-{name}"
    elif kind == "late":
        order["at"] -= 6 * 3_600_000
    first = json_event("orders", order, key=name, after_seconds=after_seconds)
    second = json_event(
        "payments", payment, key=payment["order"], after_seconds=after_seconds + pay_seconds
    )
    if kind == "unpaid":
        return [first]
    if kind == "twice":
        again = after_seconds + chance.uniform(0, pay_seconds)
        return [first, first._replace(after_seconds=again), second, second]
    return [first, second]
