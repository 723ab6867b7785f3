"""The parts of `sluice pipeline` that need no Spark: needs, files, settings, progress, boards."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sluice.errors import ConfigError
from sluice.pipelines import board, files, generating, needs, progress, session, starter
from sluice.pipelines.settings import Settings, Value, read_values
from sluice.pipelines.traffic import Event
from sluice.spark.options import write_options


def java_that_says(directory: Path, text: str) -> str:
    java = directory / "bin" / "java"
    java.parent.mkdir()
    java.write_text(f"#!/bin/sh\necho '{text}' >&2\n", encoding="utf-8")
    java.chmod(0o755)
    return str(directory)


def test_what_java_lacks_is_said(tmp_path: Path) -> None:
    pytest.importorskip("pyspark")
    assert "there is no Java; install" in needs.missing({"PATH": str(tmp_path)})
    assert "no bin/java in it" in needs.missing({"JAVA_HOME": str(tmp_path)})
    with pytest.raises(ConfigError, match="Spark cannot run here: there is no Java"):
        needs.require({"PATH": str(tmp_path)})


@pytest.mark.parametrize(
    ("text", "lack"),
    [
        ('openjdk version "17.0.2" 2022-01-18', ""),
        ('openjdk version "21" 2023-09-19', ""),
        ('java version "1.8.0_391"', "is Java 8"),
        ('openjdk version "11.0.2"', "is Java 11"),
        ("hello", "does not tell its version"),
    ],
)
def test_an_old_java_is_told_from_a_new_one(tmp_path: Path, text: str, lack: str) -> None:
    pytest.importorskip("pyspark")
    found = needs.missing({"JAVA_HOME": java_that_says(tmp_path, text)})
    assert lack in found
    assert bool(lack) == bool(found)


def test_what_python_lacks_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert needs.missing({}) == "pyspark is not installed; pip install 'sluice-mq[spark]'"


# -------------------------------------------------------------------------------------------- files


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., str]:
    def writing(text: str, name: str = "mine.py") -> str:
        path = tmp_path / name
        path.write_text(text, encoding="utf-8")
        return str(path)

    return writing


def test_a_file_with_the_function_is_a_pipeline(write: Callable[..., str], tmp_path: Path) -> None:
    write("LATE = 7\n", "beside_it.py")
    found = files.find(
        write(
            '"""Counts things."""\nimport beside_it\n'
            'SETTINGS = {"topic": "t", "late": beside_it.LATE}\n'
            "def pipeline(spark, settings):\n    return []\n"
        )
    )
    assert (found.name, found.summary) == ("mine", "Counts things.")
    assert found.defaults == {"topic": "t", "late": 7}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("x = 1\n", "defines no function pipeline(spark, settings)"),
        ("pipeline = 1\n", "defines no function"),
        ("def pipeline(spark): ...\n", "is called with (spark, settings)"),
        ("x = 1\nraise ValueError('no')\n", "line 2: ValueError: no"),
        ("x = 1\n\ndef f(:\n", "line 3: SyntaxError"),
        ("import nowhere_at_all\n", "No module named 'nowhere_at_all'"),
        ("exit(3)\n", "SystemExit"),
        ("SETTINGS = 3\ndef pipeline(a, b): ...\n", "SETTINGS is no table"),
        ("SETTINGS = {'a': []}\ndef pipeline(a, b): ...\n", "SETTINGS is no table"),
    ],
)
def test_a_file_that_is_none_is_refused(write: Callable[..., str], text: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        files.find(write(text))
    assert words in str(caught.value)
    assert "mine.py" in str(caught.value)


def test_what_java_raised_is_told_without_its_stack() -> None:
    said = "An error occurred.\n: a.NotFound: [GONE] no source\n"
    for stack in ("\tat a.b(C.scala:1)\n\tat d\nCaused by: e\n", "JVM stacktrace:\na.b\n"):
        told = files.fault(ValueError(said + stack), "mine.py")
        assert told == "ValueError: An error occurred. : a.NotFound: [GONE] no source"


def test_a_name_that_is_none_is_refused(write: Callable[..., str]) -> None:
    with pytest.raises(ConfigError, match="did you mean gifts"):
        files.find("gift")
    with pytest.raises(ConfigError, match="ready ones are gifts, orders, logs, archive"):
        files.find("zebra")
    with pytest.raises(ConfigError, match=r"json\.py: json is a module that Spark needs"):
        files.find("json.py")
    with pytest.raises(ConfigError, match="there is no such file"):
        files.find("nowhere.py")
    with pytest.raises(ConfigError, match="rename the file"):
        files.find(write("def pipeline(a, b): ...", "my pipeline.py"))


@pytest.mark.parametrize("name", list(files.READY))
def test_a_ready_pipeline_is_found_and_says_what_it_does(name: str) -> None:
    found = files.find(name)
    assert f"the pipeline `{name}`: " in found.summary
    assert found.defaults


# ----------------------------------------------------------------------------------------- settings


def test_settings_have_the_type_of_their_default() -> None:
    defaults: dict[str, Value] = {"topic": "t", "top": 10, "share": 0.5, "twice": False}
    given = ["topic=a=b", "top=3", "share=1", "twice=yes"]
    assert read_values("p", defaults, given) == {
        "topic": "a=b", "top": 3, "share": 1.0, "twice": True,
    }  # fmt: skip
    for wrong, words in (
        ("top=x", "is no whole number"),
        ("share=x", "is no number"),
        ("twice=maybe", "write true or false"),
        ("tpo=3", "did you mean top?"),
        ("zebra=3", "it has share, top, topic, twice"),
        ("top", "write NAME=VALUE"),
    ):
        with pytest.raises(ConfigError, match=words):
            read_values("p", defaults, [wrong])


def test_settings_are_a_table() -> None:
    settings = Settings("p", "a:1;b:2", {"top": 10}, {"sluice.tls": "true"})
    assert (dict(settings), settings.text("top")) == ({"top": 10}, "10")
    assert settings.options == {"sluice.bootstrap.servers": "a:1,b:2", "sluice.tls": "true"}


class FakeFrame:
    """A DataFrame, its writers and its session, as far as `publish` goes."""

    def __init__(self) -> None:
        self.write = self.writeStream = self.sparkSession = self.sparkContext = self
        self.put: Callable[[FakeFrame, int], None] | None = None
        self.given: dict[str, str] = {}
        self.saved_count = 0

    def outputMode(self, name: str) -> FakeFrame:  # noqa: N802
        assert name == "update"
        return self

    def foreachBatch(self, put: Callable[[FakeFrame, int], None]) -> FakeFrame:  # noqa: N802
        self.put = put
        return self

    def getLocalProperty(self, name: str) -> str:  # noqa: N802
        assert name == "sql.streaming.queryId"
        return "query"

    def format(self, name: str) -> FakeFrame:
        assert name == "sluice"
        return self

    def options(self, **more: Any) -> FakeFrame:
        self.given |= {name: str(value) for name, value in more.items()}
        return self

    def option(self, name: str, value: Any) -> FakeFrame:
        return self.options(**{name: value})

    def mode(self, name: str) -> FakeFrame:
        assert name == "append"
        return self

    def save(self) -> None:
        self.saved_count += 1


def test_what_is_published_is_named_by_the_query() -> None:
    """Also to a topic of a long name: the sink adds the topic by itself, and shortens it."""
    topic = "t" * 249
    frame: Any = FakeFrame()
    Settings("p", "a:1").publish(frame, topic)
    assert frame.put is not None
    frame.put(frame, 7)
    options = write_options(frame.given)
    assert (options.topic, options.sink_id, options.version) == (topic, "query", 7)
    assert frame.saved_count == 1


def test_the_session_is_set_for_its_master() -> None:
    local = session.settings_for("local[*]", {"spark.ui.enabled": "true"}, 4)
    assert local["spark.sql.shuffle.partitions"] == "4"
    assert local["spark.ui.enabled"] == "true", "what is given wins"
    assert local["spark.python.unix.domain.socket.enabled"] == "true"
    cluster = session.settings_for("yarn", {}, 4)
    assert "spark.sql.shuffle.partitions" not in cluster
    assert session.read_conf(["spark.a=b=c"]) == {"spark.a": "b=c"}
    for wrong in ("spark.a", "a=b"):
        with pytest.raises(ConfigError, match=r"write spark\.NAME=VALUE"):
            session.read_conf([wrong])


# ----------------------------------------------------------------------------------------- progress


def report(number: int, rows: int, milliseconds: int, late: int = 0) -> dict[str, object]:
    return {
        "batchId": number,
        "numInputRows": rows,
        "durationMs": {"triggerExecution": milliseconds, "addBatch": 1},
        "stateOperators": [{"numRowsDroppedByWatermark": late, "numRowsTotal": number}, {}],
    }


def test_batches_are_counted_once() -> None:
    count = progress.QueryCount()
    idle = {"batchId": 2, "numInputRows": 0, "durationMs": {"triggerExecution": 1}}
    for _ in range(2):
        count.add([report(0, 100, 500), report(1, 300, 500, late=2), idle])
    assert (count.rows, count.batches, count.late_rows) == (400, 2, 2)
    assert count.rows_per_second == 400
    count.add([report(2, 0, 100)])
    assert (count.batches, count.batch_ms, count.state_rows) == (3, 100, 2)
    text = progress.line("p", {"q": count}, 1200)
    assert text == "p: 400 rows, 364 rows/s, lag 1,200, batch 3 in 100 ms"
    text = progress.summary("p", {"q": count}, None, 2.04, stopped=False)
    assert text == "p: handled 400 rows in 3 batches, 2 too late, 2.0 s, lag unknown"
    assert progress.line("p", {"q": progress.QueryCount()}, 0).startswith("p: 0 rows, 0 rows/s")


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("[X] first\n  at java\nsluice.errors.TopicMissing: topic t is gone\n", "topic t is gone"),
        ("[X] first\nTraceback (most\n  File x\nValueError: no\n  at java", "ValueError: no"),
        ("\n[UNRESOLVED] a column\nmore", "[UNRESOLVED] a column"),
        ("", "no reason is given"),
        ("x" * 1000, "x" * 297 + "..."),
    ],
)
def test_the_reason_is_one_line(text: str, line: str) -> None:
    assert progress.reason(text) == line


class Captured(Exception):
    """An error of Java's as PySpark has it."""

    def __init__(self, text: str, cause: Captured | None = None) -> None:
        super().__init__(text)
        self._cause = cause


def test_what_was_waited_for_is_the_reason() -> None:
    state = Captured("a.StateStoreCommitValidationFailed: [STATE] it failed\nExpected 4 commits")
    waited = Captured("a.SparkException: Exception thrown in awaitResult: ", state)
    query = Captured("Exception thrown in awaitResult: \n=== Streaming Query ===\nId", waited)
    assert progress.told(query) == str(state)
    assert progress.told(state) == str(state)
    unknown = Captured("[STREAM_FAILED] Exception thrown in awaitResult:  SQLSTATE: XXKST")
    assert progress.told(unknown) == str(unknown)
    said = Captured("Exception thrown in awaitResult: no room", state)
    assert progress.told(said) == str(said)


# ------------------------------------------------------------------------------------------ traffic


@pytest.mark.parametrize("name", list(files.READY))
def test_traffic_is_the_same_for_the_same_seed(name: str) -> None:
    def some(seed: int) -> list[Event]:
        return list(generating.events(name, seed=seed, start_ms=10**12, rate=50.0, count=500))

    first = some(1)
    assert first == some(1)
    assert first != some(2)
    times = [event.after_seconds for event in first]
    assert times == sorted(times)
    assert 4 < times[-1] < 20, "about 50 a second"


def test_wrong_rates_are_refused() -> None:
    for rate in (0.0, -1.0, 2e6, float("nan")):
        with pytest.raises(ConfigError, match="--rate"):
            generating.events("gifts", seed=1, start_ms=0, rate=rate, count=1)
    with pytest.raises(ConfigError, match="no such traffic"):
        generating.traffic_of("zebra")


# ------------------------------------------------------------------------------------------- boards


def test_boards_of_single_lines_are_those_of_all_gifts() -> None:
    """What is published of a batch are the first lines of what changed: that is enough."""
    events = itertools.islice(generating.traffic_of("gifts")(4, 1_700_000_000_000, 7.0), 900)
    gifts = [json.loads(event.body) for event in events]
    tally = board.Tally(40, kept=500)
    shown = board.Board(kept=500)
    seen: dict[tuple[str, int], dict[str, int]] = {}
    for number in range(0, len(gifts), 90):
        before = {key: dict(lines) for key, lines in seen.items()}
        for gift in gifts[number : number + 90]:
            tally.take(gift)
        now = tally.board()
        for name in ("second", "minute", "day", "share"):
            for start in now.tops(name, 1):
                lines = dict(now.top(name, start, 1000))
                old = before.get((name, start), {})
                changed = {who: coins for who, coins in lines.items() if old.get(who) != coins}
                ranked = sorted(changed.items(), key=lambda line: (-line[1], line[0]))[:3]
                for who, coins in ranked:
                    shown.take({"board": name, "start": start, "name": who, "coins": coins})
                seen[name, start] = lines
    final = tally.board()
    for name in ("second", "minute", "day", "share"):
        assert shown.tops(name, 3) == final.tops(name, 3)
    assert board.agree(shown, final, 3)
    assert tally.gifts == len({gift["id"] for gift in gifts}) < 900


def test_boards_keep_the_newest_windows_and_forget_the_others() -> None:
    made = board.Board(kept=2)
    for start in (1000, 3000, 2000, 500):
        made.add("second", start, "v", 1)
    assert list(made.tops("second", 1)) == [2000, 3000]
    made.add("second", 3000, "v", 9)
    made.add("second", 3000, "v", 4)  # overtaken on its way
    assert made.top("second", 3000, 5) == [board.Line("v", 9)]
    copied = made.copy()
    made.add("second", 3000, "w", 99)
    assert copied.top("second", 3000, 1) == [board.Line("v", 9)]
    made.take({"board": "other", "start": 1, "name": "v", "coins": 1})


def test_boards_are_drawn() -> None:
    tally = board.Tally(40)
    start = 1_794_787_200_000
    tally.take({"id": "a", "viewer": "v1", "host": "mia", "coins": 1500, "at": start + 1})
    tally.take({"id": "b", "viewer": "v2", "host": "mia", "coins": 5, "at": start + 2})
    assert board.brief(board.Board(), 3) == "no board yet"
    assert board.draw(board.Board(), 3) == []
    assert board.brief(tally.board(), 3) == "day: v1 1,500, v2 5"
    assert board.draw(tally.board(), 1) == [
        "second 00:00:00: v1 1,500, v2 5",
        "minute 00:00                day 2026-11-16              hosts' share 2026-11-16",
        " 1. v1             1,500     1. v1             1,500     1. mia           602.00",
    ]


# ------------------------------------------------------------------------------------------ starter


def test_a_new_pipeline_is_written_and_never_over_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert starter.write("clicks") == ("clicks.py", "test_clicks.py")
    for name in ("clicks.py", "test_clicks.py"):
        compile((tmp_path / name).read_text(encoding="utf-8"), name, "exec")
    pytest.importorskip("pyspark")
    assert files.find("clicks.py").defaults["output"] == "clicks-counts"
    with pytest.raises(ConfigError, match=r"clicks\.py: is there already; nothing was written"):
        starter.write("clicks")
    (tmp_path / "test_other.py").touch()
    with pytest.raises(ConfigError, match="test_other"):
        starter.write("other")
    assert not (tmp_path / "other.py").exists()
    for wrong in ("Clicks", "a b", "../x", "", "1x"):
        with pytest.raises(ConfigError, match="small letters"):
            starter.write(wrong)
    for taken in ("json", "struct", "pyspark"):
        with pytest.raises(ConfigError, match=f"{taken} is a module that Spark needs"):
            starter.write(taken)


def test_the_command_needs_neither_spark_nor_java_to_explain_itself(tmp_path: Path) -> None:
    program = (
        "import sys; sys.modules['pyspark'] = None\n"
        "from sluice.cli import main\n"
        "main(['pipeline', 'list'])\n"
        "sys.exit(main(['pipeline', 'run', 'gifts', '-n', '127.0.0.1:1']))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert "late_minutes=10" in done.stdout
    assert done.stderr == (
        "sluice: Spark cannot run here: pyspark is not installed; pip install 'sluice-mq[spark]'\n"
    )
