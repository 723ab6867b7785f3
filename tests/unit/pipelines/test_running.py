"""How queries are started, watched and ended, with queries that do as they are told."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, cast

import pytest

pytest.importorskip("pyspark", reason="pyspark is not installed: script/setup does it")

from sluice.errors import ConfigError, PipelineFailed
from sluice.pipelines.files import Pipeline
from sluice.pipelines.running import Way, _Queries, writers_of
from sluice.pipelines.settings import Settings


def report(number: int) -> dict[str, Any]:
    durations = {"triggerExecution": 10, "addBatch": 5}
    return {"batchId": number, "numInputRows": 7, "durationMs": durations}


class Query:
    """A query of Spark, as far as it is asked."""

    def __init__(self, error: str = "") -> None:
        self.isActive = not error
        self.status = {"isTriggerActive": True, "isDataAvailable": True, "message": "Processing"}
        self.recentProgress: list[dict[str, Any]] = []
        self.stops = 0
        self._error = error
        self.looks = 0
        self.done_after_looks = 10**9

    @property
    def lastProgress(self) -> dict[str, Any] | None:  # noqa: N802
        self.looks += 1
        if self.looks == self.done_after_looks:
            self.recentProgress.append(report(len(self.recentProgress)))
        return self.recentProgress[-1] if self.recentProgress else None

    def exception(self) -> str | None:
        return self._error or None

    def stop(self) -> None:
        self.stops += 1
        self.isActive = False


class Writer:
    """What a pipeline returns: gives the next of its queries when it is started."""

    def __init__(self, *queries: Query) -> None:
        self.queries = list(queries)
        self.said: dict[str, Any] = {}

    def option(self, name: str, value: str) -> Writer:
        self.said[name] = value
        return self

    def queryName(self, name: str) -> Writer:  # noqa: N802
        self.said["name"] = name
        return self

    def trigger(self, **given: Any) -> Writer:
        self.said["trigger"] = given
        return self

    def start(self) -> Query:
        return self.queries.pop(0)


def started(way: Way, **writers: Writer) -> _Queries:
    queries = _Queries(way, "p", writers)  # type: ignore[arg-type]
    queries.start(threading.Event())
    return queries


def test_each_query_has_a_name_a_checkpoint_and_a_trigger() -> None:
    first, second = Writer(Query()), Writer(Query())
    started(Way("/c", is_once=True), a=first, b=second)
    assert first.said == {
        "checkpointLocation": "/c/a", "name": "p-a", "trigger": {"availableNow": True},
    }  # fmt: skip
    assert second.said["checkpointLocation"] == "/c/b"
    serving = Writer(Query())
    started(Way("/c", is_once=False, interval_seconds=1.5), a=serving)
    assert serving.said["trigger"] == {"processingTime": "1500 milliseconds"}


def test_what_starts_a_query_itself_is_told_where_and_how() -> None:
    told: list[Any] = []
    query = Query()

    def start(checkpoint: str, trigger: dict[str, Any]) -> Query:
        told.append((checkpoint, trigger))
        return query

    queries = _Queries(Way("/c", is_once=True), "p", {"a": start})  # type: ignore[dict-item]
    queries.start(threading.Event())
    assert told == [("/c/a", {"availableNow": True})]
    assert queries.are_active()


def test_the_batch_that_runs_is_ended_before_the_query() -> None:
    query = Query()
    query.recentProgress.append(report(0))
    query.done_after_looks = 4
    queries = started(Way("/c", is_once=False), a=Writer(query))
    queries.end()
    assert (query.stops, query.looks) == (1, 4), "not before the batch was done"
    assert queries.counts["a"].batches == 2, "and it is counted"


def test_a_query_between_two_batches_is_stopped_at_once() -> None:
    query = Query()
    query.status["isTriggerActive"] = False
    started(Way("/c", is_once=False), a=Writer(query)).end()
    assert query.stops == 1


def test_a_batch_that_does_not_end_is_not_waited_for_without_end() -> None:
    query = Query()
    started(Way("/c", is_once=False, stop_seconds=0.0), a=Writer(query)).end()
    assert query.stops == 1


def test_a_query_that_fails_is_told_in_one_line() -> None:
    text = "[X] Spark says much\nsluice.errors.TopicMissing: topic t does not exist\n"
    queries = started(Way("/c", is_once=True), a=Writer(Query(text)))
    with pytest.raises(PipelineFailed, match=r"^pipeline p, a: topic t does not exist$"):
        queries.are_active()


def test_a_query_for_which_the_machine_was_too_busy_is_started_again() -> None:
    busy = "Python worker failed to connect back."
    writer = Writer(Query(busy), Query(busy), Query())
    queries = started(Way("/c", is_once=True), a=writer)
    assert queries.are_active()
    assert queries.are_active()
    assert writer.queries == []
    never = started(Way("/c", is_once=True), a=Writer(*(Query(busy) for _ in range(30))))
    for _ in range(9):
        assert never.are_active()
    with pytest.raises(PipelineFailed, match="failed to connect back"):
        never.are_active()
    stopped = started(Way("/c", is_once=True), a=Writer(Query(busy)))
    stopped.end()  # and it is not started again


def wanted(function: Callable[..., Any]) -> dict[str, Any]:
    settings = Settings("p", "a:1", {"topic": "t"})
    return cast(
        dict[str, Any], writers_of(cast(Any, None), Pipeline("p", function, {}, ""), settings)
    )


def test_what_a_pipelines_function_raises_is_one_line_with_its_place() -> None:
    def misses(spark: Any, settings: Any) -> Any:
        return settings["nothing"]

    def fails(spark: Any, settings: Any) -> Any:
        return {"a": 1}["b"]

    def misspells(spark: Any, settings: Any) -> Any:
        return spark.readStreem

    with pytest.raises(ConfigError, match="pipeline p: it has no setting 'nothing'"):
        wanted(misses)
    with pytest.raises(PipelineFailed, match=r"pipeline p: line [0-9]+: KeyError: 'b'$"):
        wanted(fails)
    with pytest.raises(PipelineFailed, match="AttributeError: 'NoneType' object"):
        wanted(misspells)
    settings = Settings("p", "a:1", {"topic": "t"})
    assert (settings.get("topic"), settings.get("nothing", 5)) == ("t", 5)
    assert "nothing" not in settings
