"""This module is what the Spark tests share: topics with messages in them, and short forms."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from peers import RocketMQ
from sluice import Message, Producer
from sluice.protocol.remoting_codes import RequestCode as Request
from tests.interop.sluice_process import Question, SluiceProcess, ask, make_topic, wait_for_route

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery
    from pyspark.sql.streaming.readwriter import DataStreamWriter

T = TypeVar("T")

QUERY_SECONDS = 600


class Server:
    """A broker and its nameserver, and what tests do with them."""

    def __init__(self, process: SluiceProcess | RocketMQ) -> None:
        self.process = process
        self.address = process.nameserver_address

    @property
    def is_apache(self) -> bool:
        return isinstance(self.process, RocketMQ)

    def make(self, topic: str, queues: int = 4) -> None:
        make_topic(self.process.broker_address, topic, queues)
        wait_for_route(self.address, topic)

    def send(self, topic: str, count: int, first: int = 0) -> None:
        """Messages `m<number>` with tag, key and property of their number."""
        with Producer(nameservers=[self.address], batching=False) as producer:
            for number in range(first, first + count):
                producer.send(
                    Message(
                        topic,
                        f"m{number}",
                        tags="AB"[number % 2],
                        keys=f"k{number % 10}",
                        properties={"price": str(number)},
                    )
                )

    def ends(self, topic: str, queues: int = 4) -> list[int]:
        """The offset after the newest message of each queue."""
        answers = ask(
            self.process.broker_address,
            *(
                Question(Request.GET_MAX_OFFSET, {"topic": topic, "queueId": str(number)})
                for number in range(queues)
            ),
        )
        return [int(answer.ext["offset"]) for answer in answers]

    def committed(self, group: str, topic: str, queues: int = 4) -> list[int]:
        """How far a group is, -1 where it never said."""
        answers = ask(
            self.process.broker_address,
            *(
                Question(
                    Request.QUERY_CONSUMER_OFFSET,
                    {"consumerGroup": group, "topic": topic, "queueId": str(number)},
                )
                for number in range(queues)
            ),
        )
        return [int(answer.ext.get("offset", "-1")) for answer in answers]

    # ---------------------------------------------------------------------------------------- Spark

    def read(self, spark: SparkSession, topic: str, **options: Any) -> DataFrame:
        reader = spark.read.format("sluice").option("sluice.bootstrap.servers", self.address)
        return reader.option("subscribe", topic).options(**named(options)).load()

    def stream(self, spark: SparkSession, topic: str, **options: Any) -> DataFrame:
        reader = spark.readStream.format("sluice").option("sluice.bootstrap.servers", self.address)
        return reader.option("subscribe", topic).options(**named(options)).load()

    def write(self, frame: DataFrame, topic: str, **options: Any) -> None:
        writer = frame.write.format("sluice").option("sluice.bootstrap.servers", self.address)
        writer.option("topic", topic).options(**named(options)).mode("append").save()

    def write_stream(
        self, frame: DataFrame, topic: str, checkpoint: str, **options: Any
    ) -> StreamingQuery:
        """Everything that is there now goes to a topic."""
        writer = frame.writeStream.format("sluice").option("topic", topic)
        writer = writer.option("sluice.bootstrap.servers", self.address).options(**named(options))
        return finished(writer.option("checkpointLocation", checkpoint))

    def values(self, spark: SparkSession, topic: str, **options: Any) -> list[str]:
        """The bodies of a topic, sorted."""
        rows = self.read(spark, topic, columns="value", **options).collect()
        return sorted(bytes(row.value).decode() for row in rows)


def named(options: dict[str, Any]) -> dict[str, str]:
    """Options with `filter_tags` for `filter.tags`, and all values as text."""
    return {name.replace("_", "."): str(value) for name, value in options.items()}


# Spark gives the Python process of a stream ten seconds to start, which is not to be set, and a
# busy machine takes longer. Nothing has happened by then: the query is started again.
_TOO_BUSY = "Python worker failed to connect back"
_STARTS_MAX = 20


def patiently(work: Callable[[], T]) -> T:
    """Do something with a stream, again where the machine was too busy to begin it."""
    for _ in range(_STARTS_MAX):
        try:
            return work()
        except Exception as error:
            if _TOO_BUSY not in str(error):
                raise
    raise AssertionError(f"{_STARTS_MAX} times: {_TOO_BUSY}")


def finished(writer: DataStreamWriter) -> StreamingQuery:
    """A query over everything that is there now, which ended by itself and well."""

    def work() -> StreamingQuery:
        query = writer.trigger(availableNow=True).start()
        assert query.awaitTermination(QUERY_SECONDS), "the query did not end"
        return query

    return patiently(work)


def into(frame: DataFrame, checkpoint: str, take: Callable[[DataFrame, int], None]) -> None:
    """Everything that is there now goes through a function, batch by batch."""
    writer = frame.writeStream.foreachBatch(take).option("checkpointLocation", checkpoint)
    finished(writer)


def forget_last_commit(checkpoint: str) -> int:
    """Make Spark believe that its last batch was not finished; the batch's number.

    That is what a driver leaves that is killed after the sink's commit and before its own note.
    """
    commits = Path(checkpoint) / "commits"
    last = max(int(file.name) for file in commits.iterdir() if file.name.isdigit())
    for file in (commits / str(last), commits / f".{last}.crc"):
        file.unlink(missing_ok=True)
    return last


def end_offsets(checkpoint: str, batch: int) -> Any:
    """What Spark wrote down as the end of a batch."""
    lines = (Path(checkpoint) / "offsets" / str(batch)).read_text().splitlines()
    return json.loads(lines[-1])


def messages(first: int, stop: int) -> list[str]:
    return sorted(f"m{number}" for number in range(first, stop))
