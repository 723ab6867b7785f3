"""This module is what a pipeline is handed beside the session: where the topics are, what was set.

A pipeline names its own settings and their defaults in SETTINGS; `--set name=value` changes them,
and a name that is not there is refused. Reading and writing have short forms here that fill in
addresses, groups and the names of batches; a pipeline may as well use `format("sluice")` itself.
"""

from __future__ import annotations

import difflib
import ssl
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from sluice.client.sync.admin import Admin
from sluice.errors import ConfigError, TopicMissing

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery
    from pyspark.sql.streaming.readwriter import DataStreamWriter

Value = str | int | float | bool

_WORDS: Final = {"true": True, "yes": True, "false": False, "no": False}


class NoSetting(KeyError):
    """A pipeline asks for a setting that it does not have."""


@dataclass(frozen=True)
class Settings(Mapping[str, Value]):
    """The settings of a pipeline by name, and the cluster that it works with."""

    name: str
    nameservers: str  # with ; between them
    chosen: Mapping[str, Value] = field(default_factory=dict)
    connection: Mapping[str, str] = field(default_factory=dict)  # options of format("sluice")
    starting_offsets: str = "earliest"
    batch_rows: int = 100_000
    groups: dict[str, tuple[str, ...]] = field(default_factory=dict)  # with the topics they read
    tls: ssl.SSLContext | None = None

    def __getitem__(self, name: str) -> Value:
        if name not in self.chosen:
            raise NoSetting(name)
        return self.chosen[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.chosen)

    def __len__(self) -> int:
        return len(self.chosen)

    def text(self, name: str) -> str:
        """A setting as text."""
        return str(self[name])

    def number(self, name: str, low: int) -> int:
        """A setting that is a whole number of at least `low`."""
        value = int(self[name])
        if value < low:
            raise ConfigError(f"--set {name}={value}: at least {low}")
        return value

    def topics(self, *names: str) -> list[str]:
        """Settings that each name a topic, no two the same; those that are not there are made."""
        found: dict[str, str] = {}
        for name in names:
            topic = self.text(name)
            if not topic:
                raise ConfigError(f"--set {name}=: name a topic")
            if topic in found:
                raise ConfigError(f"--set {name}={topic}: is {found[topic]} too; use another topic")
            found[topic] = name
        self.ensure_topics(*found)
        return list(found)

    @property
    def options(self) -> dict[str, str]:
        """What every reader and writer of the data source needs."""
        return {
            "sluice.bootstrap.servers": self.nameservers.replace(";", ","),
            **self.connection,
        }

    def read(
        self, spark: SparkSession, topics: str | Sequence[str], *, group: str = "", **options: Any
    ) -> DataFrame:
        """A stream of topics. Its progress is that of a consumer group, so its lag is seen.

        Streams of different queries need groups of different names. Options are those of the
        data source: `columns="value,key"`.
        """
        names = (topics,) if isinstance(topics, str) else tuple(topics)
        group = group or f"pipeline-{self.name}"
        self.groups[group] = names
        reader = spark.readStream.format("sluice").options(**self.options)
        reader = reader.option("subscribe", ",".join(names)).option("groupId", group)
        reader = reader.option("startingOffsets", self.starting_offsets)
        reader = reader.option("maxOffsetsPerTrigger", self.batch_rows)
        return reader.options(**{name: str(value) for name, value in options.items()}).load()

    def write(self, frame: DataFrame, topic: str) -> DataStreamWriter:
        """Rows that only grow in number go to a topic, exactly once."""
        writer = frame.writeStream.format("sluice").options(**self.options)
        return writer.option("topic", topic).outputMode("append")

    def publish(
        self, frame: DataFrame, topic: str, prepare: Callable[[DataFrame], DataFrame] | None = None
    ) -> DataStreamWriter:
        """Rows that change (totals, for example) go to a topic as they change, exactly once.

        `prepare` is given the rows of a batch, as a frame that is no stream: it can be ordered.
        """
        options = {**self.options, "topic": topic}

        def put(batch: DataFrame, number: int) -> None:
            rows = prepare(batch) if prepare is not None else batch
            # The query's id belongs to its checkpoint: a new checkpoint counts batches anew, and
            # under another name they are not taken for those that were there before.
            query = batch.sparkSession.sparkContext.getLocalProperty("sql.streaming.queryId")
            writer = rows.write.format("sluice").options(**options)
            writer = writer.option("txnAppId", str(query)).option("txnVersion", number)
            writer.mode("append").save()

        return frame.writeStream.outputMode("update").foreachBatch(put)

    def table(
        self, frame: DataFrame, path: str, **options: Any
    ) -> Callable[[str, dict[str, Any]], StreamingQuery]:
        """Rows go into a table of files, exactly once; options as of `tables.write_stream`."""
        from sluice import tables

        if options.get("dead_letter_topic"):
            options.setdefault("sink_options", self.options)

        def start(checkpoint: str, trigger: dict[str, Any]) -> StreamingQuery:
            return tables.write_stream(
                frame, path, checkpoint=checkpoint, trigger=trigger, **options
            )

        return start

    def ensure_topics(self, *topics: str, queues: int = 4) -> None:
        """Make the topics that are not there yet."""
        with Admin(self.nameservers, tls=self.tls) as admin:
            for topic in topics:
                try:
                    admin.route(topic)
                except TopicMissing:
                    admin.create_topic(topic, queues=queues)


def read_values(name: str, defaults: Mapping[str, Value], given: Sequence[str]) -> dict[str, Value]:
    """The settings of a pipeline after `--set NAME=VALUE`; a value has its default's type."""
    values = dict(defaults)
    for item in given:
        key, mark, text = item.partition("=")
        if not mark or not key:
            raise ConfigError(f"--set {item}: write NAME=VALUE")
        if key not in defaults:
            near = difflib.get_close_matches(key, defaults, 1)
            known = ", ".join(sorted(defaults)) or "none"
            hint = f"did you mean {near[0]}?" if near else f"it has {known}"
            raise ConfigError(f"--set {item}: pipeline {name} has no setting {key}; {hint}")
        values[key] = _typed(key, text, defaults[key])
    return values


def _typed(name: str, text: str, default: Value) -> Value:
    if isinstance(default, bool):
        if text.lower() not in _WORDS:
            raise ConfigError(f"--set {name}={text}: write true or false")
        return _WORDS[text.lower()]
    if isinstance(default, int | float):
        kind = type(default)
        try:
            return kind(text)
        except ValueError:
            what = "whole number" if kind is int else "number"
            raise ConfigError(f"--set {name}={text}: is no {what}") from None
    return text
