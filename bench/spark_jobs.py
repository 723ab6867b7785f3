"""This module is the PySpark program of the benchmark: one session that both sides are read with.

`python -m bench.spark_jobs SETTINGS` makes a session with these settings (JSON) and then does one
job a line of its input, and answers each with one line. Times are measured here, where a user of
Spark would: from the call that makes the DataFrame to the end of the action.
"""

from __future__ import annotations

import json
import random
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from bench.sides import Side
from bench.spark_senders import KEYS, Sender, sender

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

Answer = dict[str, Any]

ANSWER, ERROR = "answer", "error"
FORMATS = {"ours": "sluice", "peer": "kafka"}
ADDRESSES = {"ours": "sluice.bootstrap.servers", "peer": "kafka.bootstrap.servers"}
WRITE_TASKS = 2
ERROR_CHARS = 1_500
# Between two messages of the latency figures; they differ, so that they do not fall into step with
# the batches.
PAUSES_S = (0.02, 0.08)
FIRST_ROWS_TIMEOUT_S = 120.0
# Evaluated in the executor's JVM for each row, when the sink asks for it.
_NOW_MS = "cast(java_method('java.lang.System', 'currentTimeMillis') as bigint)"


@dataclass(frozen=True, slots=True)
class Job:
    """What to do: fill, check, read, write or latency."""

    do: str
    side: Side
    address: str
    topic: str
    count: int = 0  # messages of the topic, or that are to be sent
    size: int = 0  # of a value, in bytes
    is_value_only: bool = False
    warm_s: float = 0.0
    seconds: float = 0.0  # how long to go on at least

    def words(self) -> str:
        return json.dumps(asdict(self))


def main() -> None:
    session = _session(json.loads(sys.argv[1]))
    _say(ANSWER, {"spark": session.version})
    for line in sys.stdin:
        job = Job(**json.loads(line))
        try:
            _say(ANSWER, JOBS[job.do](session, job))
        except Exception as error:  # a job that fails is told to who asked for it
            _say(ERROR, f"{type(error).__name__}: {error}"[:ERROR_CHARS])


def _say(kind: str, what: object) -> None:
    print(json.dumps({kind: what}), flush=True)


def _session(settings: dict[str, str]) -> SparkSession:
    from pyspark.sql import SparkSession

    session = SparkSession.builder.config(map=dict(settings)).getOrCreate()
    session.sparkContext.setLogLevel("ERROR")
    return session


def _frame(reader: Any, job: Job) -> DataFrame:
    """The topic as a DataFrame: Kafka's seven columns, or the value alone.

    A Python source is not told which columns are wanted, so ours has an option that says so; of
    Kafka's source Spark takes the column.
    """
    reader = reader.format(FORMATS[job.side]).option(ADDRESSES[job.side], job.address)
    reader = reader.option("subscribe", job.topic).option("startingOffsets", "earliest")
    if job.is_value_only and job.side == "ours":
        reader = reader.option("columns", "value")
    frame: DataFrame = reader.load()
    return frame.select("value") if job.is_value_only else frame


def _fill(session: SparkSession, job: Job) -> Answer:
    with sender(job.side, job.address) as producer:
        producer.fill(job.topic, job.count, job.size)
    return {}


def _check(session: SparkSession, job: Job) -> Answer:
    """What is in the topic, as Spark sees it."""
    found = _frame(session.read, job).selectExpr("count(value)", "sum(length(value))").first()
    assert found is not None, "an aggregate has one row"
    return {"rows": found[0], "bytes": found[1] or 0}


def _read(session: SparkSession, job: Job) -> Answer:
    """Read the whole topic into a sink that takes every column of every row and keeps nothing."""

    def once() -> None:
        _frame(session.read, job).write.format("noop").mode("overwrite").save()

    return _repeated(once, job)


def _write(session: SparkSession, job: Job) -> Answer:
    """Write rows that the JVM makes: key and value, as either sink takes them by default."""
    filler = "x" * (job.size - 16)
    rows = session.range(0, job.count, 1, WRITE_TASKS).selectExpr(
        f"cast(concat('key-', id % {KEYS}) as binary) as key",
        f"cast(concat(lpad(cast(id as string), 16, '0'), '{filler}') as binary) as value",
    )

    def once() -> None:
        writer = rows.write.format(FORMATS[job.side]).option(ADDRESSES[job.side], job.address)
        writer.option("topic", job.topic).mode("append").save()

    return _repeated(once, job)


def _repeated(once: Callable[[], None], job: Job) -> Answer:
    """Do it until the time is over; each time is `job.count` rows."""
    begin, rows, seconds = time.perf_counter(), 0, 0.0
    while not rows or seconds < job.seconds:
        once()
        rows += job.count
        seconds = time.perf_counter() - begin
    return {"rows": rows, "seconds": seconds}


# ------------------------------------------------------------------------------------------ latency


def _latency(session: SparkSession, job: Job) -> Answer:
    """Milliseconds from the send of each message to the moment that the sink gets its row.

    A message says whether it counts, and when it was sent. The same clock is read for both.
    """
    from pyspark.sql import functions

    rows = (
        _frame(session.readStream, job)
        .selectExpr("split(cast(value as string), ' ') as words", f"{_NOW_MS} as now")
        .selectExpr("if(words[0] = '1', now - cast(words[1] as bigint), null) as ms")
        .observe("latency", functions.collect_list("ms").alias("ms"))
    )
    with (
        tempfile.TemporaryDirectory() as checkpoint,
        sender(job.side, job.address) as producer,
    ):
        query = rows.writeStream.format("noop").option("checkpointLocation", checkpoint).start()
        try:
            sent = _send_paced(query, producer, job)
            query.processAllAvailable()
            measured = _observed(query)
        finally:
            query.stop()
    if len(measured) != sent:
        raise RuntimeError(f"{sent} messages were sent, and {len(measured)} rows came")
    return {"ms": measured}


def _send_paced(query: StreamingQuery, producer: Sender, job: Job) -> int:
    """Send until the query is warm, and then for as long as is measured; how many count."""
    pauses = random.Random(1)
    deadline = time.monotonic() + FIRST_ROWS_TIMEOUT_S
    while not any(progress.numInputRows for progress in query.recentProgress):
        if time.monotonic() > deadline:
            raise RuntimeError(f"the query has read nothing after {FIRST_ROWS_TIMEOUT_S:.0f} s")
        if (error := query.exception()) is not None:
            raise error
        _send_stamped(producer, job.topic, "0", pauses)
    count = 0
    for mark, seconds in (("0", job.warm_s), ("1", job.seconds)):
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            _send_stamped(producer, job.topic, mark, pauses)
            count += mark == "1"
    return count


def _send_stamped(producer: Sender, topic: str, mark: str, pauses: random.Random) -> None:
    producer.send(topic, b"%s %d" % (mark.encode(), time.time_ns() // 1_000_000))
    time.sleep(pauses.uniform(*PAUSES_S))


def _observed(query: StreamingQuery) -> list[int]:
    found: list[int] = []
    for progress in query.recentProgress:
        if (metrics := progress.observedMetrics.get("latency")) is not None:
            found += metrics["ms"]
    return found


JOBS = {"fill": _fill, "check": _check, "read": _read, "write": _write, "latency": _latency}


if __name__ == "__main__":
    main()
