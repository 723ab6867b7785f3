"""This module starts the queries of a pipeline, watches them, and ends them between two batches.

`run` handles what was there when it began (AvailableNow) and ends; `serve` goes on until it is
told to stop. Told so, it lets the batches that run come to their end: their results are published
and noted, and the next start does nothing twice. A query that fails ends all of them.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from sluice.errors import ConfigError, PipelineFailed, SluiceError
from sluice.pipelines.files import FUNCTION, Pipeline, fault
from sluice.pipelines.lag import LagWatch
from sluice.pipelines.progress import QueryCount, reason, told
from sluice.pipelines.settings import NoSetting, Settings

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming.query import StreamingQuery
    from pyspark.sql.streaming.readwriter import DataStreamWriter

    # What starts a query: a writer of Spark's, or a function of (checkpoint, trigger).
    Start = DataStreamWriter | Callable[[str, dict[str, Any]], StreamingQuery]

_POLL_SECONDS: Final = 0.2
_STOP_POLL_SECONDS: Final = 0.02
# Spark gives the Python process of a stream ten seconds to start, which cannot be set. On a busy
# machine that is too short; nothing has happened by then, and the query is started again.
_TOO_BUSY: Final = "Python worker failed to connect back"
_STARTS_MAX: Final = 10
_BEGIN_SECONDS: Final = 60.0


@dataclass(frozen=True, slots=True)
class Way:
    """How the queries of a pipeline run."""

    checkpoint: str
    is_once: bool
    interval_seconds: float = 0.0
    stop_seconds: float = 60.0  # so long a batch may take to end, once it is told to stop


@dataclass
class Outcome:
    """What a pipeline did."""

    counts: dict[str, QueryCount] = field(default_factory=dict)
    lag: int | None = None
    is_stopped: bool = False


Show = Callable[[Mapping[str, QueryCount], "int | None"], None]


def run(
    spark: SparkSession,
    pipeline: Pipeline,
    settings: Settings,
    way: Way,
    stop: threading.Event,
    show: Show,
) -> Outcome:
    """Run a pipeline to its end, or until `stop` is set; raises PipelineFailed."""
    queries = _Queries(way, pipeline.name, writers_of(spark, pipeline, settings))
    outcome = Outcome(queries.counts)
    try:
        queries.start(stop)
        with LagWatch(settings.options, settings.groups) as watch:
            while queries.are_active() and not stop.is_set():
                show(outcome.counts, watch.lag)
                stop.wait(_POLL_SECONDS)
            outcome.is_stopped = queries.are_active()
            queries.end()
            outcome.lag = watch.last()
    finally:
        queries.stop_now()
    return outcome


def writers_of(spark: SparkSession, pipeline: Pipeline, settings: Settings) -> dict[str, Start]:
    """What the function of a pipeline returns, by name: queries that are not started yet."""
    from pyspark.errors import PySparkException
    from pyspark.sql.streaming.query import StreamingQuery
    from pyspark.sql.streaming.readwriter import DataStreamWriter

    try:
        given: Any = pipeline.function(spark, settings)
    except NoSetting as error:
        raise ConfigError(
            f"pipeline {pipeline.name}: it has no setting {error}; name it in SETTINGS"
        ) from error
    except PySparkException as error:
        raise PipelineFailed(f"pipeline {pipeline.name}: {reason(str(error))}") from error
    except SluiceError:
        raise
    except Exception as error:  # the program is the user's: whatever is wrong in it
        code = getattr(pipeline.function, "__code__", None)
        path = code.co_filename if code is not None else ""
        raise PipelineFailed(f"pipeline {pipeline.name}: {fault(error, path)}") from error
    if isinstance(given, Mapping):
        named = {str(name): writer for name, writer in given.items()}
    elif isinstance(given, list | tuple):
        named = {f"query-{number}": writer for number, writer in enumerate(given)}
    else:
        named = {"query": given}
    for name, writer in named.items():
        if isinstance(writer, StreamingQuery):
            writer.stop()
            raise ConfigError(
                f"pipeline {pipeline.name}: {FUNCTION}() has started {name}; return "
                "`frame.writeStream...` without start(), trigger and checkpoint"
            )
        if not isinstance(writer, DataStreamWriter) and not callable(writer):
            raise ConfigError(
                f"pipeline {pipeline.name}: {FUNCTION}() returned {type(writer).__name__} for "
                f"{name}; return `frame.writeStream...`, one, several, or by name"
            )
    if not named:
        raise ConfigError(f"pipeline {pipeline.name}: {FUNCTION}() returned no query")
    return named


class _Queries:
    """The queries of a pipeline, running."""

    def __init__(self, way: Way, name: str, writers: Mapping[str, Start]) -> None:
        self._way = way
        self._name = name
        self._writers = writers
        self._running: dict[str, StreamingQuery] = {}
        self._starts = dict.fromkeys(writers, 0)
        self._is_ending = False
        self.counts = {name: QueryCount() for name in writers}
        # Its text comes with the query's error; logged as well it would be on the terminal twice.
        logging.getLogger("py4j").setLevel(logging.CRITICAL)

    def start(self, stop: threading.Event) -> None:
        """One after the other: each starts a Python process, for which Spark waits ten seconds."""
        for name in self._writers:
            self._start(name)
            limit = time.monotonic() + _BEGIN_SECONDS
            while len(self._writers) > 1 and time.monotonic() < limit and self._begins(name):
                if stop.wait(_POLL_SECONDS):
                    return

    def _begins(self, name: str) -> bool:
        """Whether a query has not looked at its source yet."""
        self.are_active()
        query = self._running[name]
        said = query.status
        return query.isActive and not (
            said["isDataAvailable"] or said["message"].startswith(("Processing", "Waiting"))
        )

    def _start(self, name: str) -> None:
        from pyspark.errors import PySparkException

        way = self._way
        trigger: dict[str, Any] = {"availableNow": True}
        if not way.is_once:
            milliseconds = round(1000 * way.interval_seconds)
            trigger = {"processingTime": f"{milliseconds} milliseconds"}
        given = self._writers[name]
        checkpoint = f"{way.checkpoint}/{name}"
        self._starts[name] += 1
        try:
            if callable(given):
                self._running[name] = given(checkpoint, trigger)
            else:
                writer = given.option("checkpointLocation", checkpoint)
                writer = writer.queryName(f"{self._name}-{name}").trigger(**trigger)
                self._running[name] = writer.start()
        except PySparkException as error:
            raise self._failed(name, str(error)) from error

    def _failed(self, name: str, text: str) -> PipelineFailed:
        return PipelineFailed(f"pipeline {self._name}, {name}: {reason(text)}")

    def are_active(self) -> bool:
        """Whether any query runs; counts what they did, raises what one of them failed of."""
        are_active = False
        for name, query in list(self._running.items()):
            is_active = query.isActive
            error = None if is_active else query.exception()
            self.counts[name].add(query.recentProgress)
            if error is not None:
                if _TOO_BUSY not in str(error) or self._starts[name] >= _STARTS_MAX:
                    raise self._failed(name, told(error))
                if not self._is_ending:
                    self._start(name)
                    is_active = True
            are_active = are_active or is_active
        return are_active

    def end(self) -> None:
        """Stop each query when the batch that it is in is done."""
        self._is_ending = True
        limit = time.monotonic() + self._way.stop_seconds
        waiting = {
            name: (query, self._last_batch(query))
            for name, query in self._running.items()
            if query.isActive
        }
        while waiting and time.monotonic() < limit:
            for name, (query, before) in list(waiting.items()):
                is_idle = not query.status["isTriggerActive"]
                if is_idle or not query.isActive or self._last_batch(query) > before:
                    query.stop()
                    del waiting[name]
            time.sleep(_STOP_POLL_SECONDS)
        self.stop_now()
        self.are_active()  # the last batches are counted, and what failed is told

    def _last_batch(self, query: StreamingQuery) -> int:
        last = query.lastProgress
        return int(last["batchId"]) if last is not None else -1

    def stop_now(self) -> None:
        for query in self._running.values():
            if query.isActive:
                query.stop()
