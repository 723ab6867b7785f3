"""The benchmark of Spark: what is asked for and answered, what is made of it, who is left out."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import Any

import pytest

from bench import spark, spark_senders
from bench.harness import Failed, Run, Unusable
from bench.kafka import Contestant
from bench.processes import tree_cpu_seconds
from bench.sides import Side
from bench.spark_jobs import Job
from peers.errors import PeerUnavailable
from peers.fetch import Jars


def test_a_job_comes_through_a_line() -> None:
    job = Job("read", "peer", "127.0.0.1:1", "t", count=5, is_value_only=True, seconds=1.5)
    assert "\n" not in job.words()
    assert Job(**json.loads(job.words())) == job


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('{"answer": {"rows": 3}}\n', {"answer": {"rows": 3}}),
        ('{"error": "no topic"}\n', {"error": "no topic"}),
        ('{"level": "WARN"}\n', None),
        ("WARNING: Using incubator modules\n", None),
        ("3\n", None),
        ("{half\n", None),
    ],
)
def test_what_libraries_print_is_no_answer(line: str, said: object) -> None:
    assert spark.said_in(line) == said


def test_bodies_have_their_size_and_differ() -> None:
    bodies = [spark_senders.body(number, 1024) for number in (0, 1, 996, 997, 10**9)]
    assert {len(body) for body in bodies} == {1024}
    assert len({body[16:] for body in bodies[:4]}) == 3  # of 997 kinds, and the number before
    assert len(set(bodies)) == 5
    assert len(spark_senders.body(7, 100)) == 100
    assert spark_senders.key(1007) == spark_senders.key(7)


def test_percentiles_need_enough_messages() -> None:
    assert spark.percentiles(range(1, 102)) == (51, 96)
    with pytest.raises(Failed, match="only 19"):
        spark.percentiles(range(19))


def test_processor_time_is_of_the_whole_tree() -> None:
    assert 0 < tree_cpu_seconds(os.getpid()) <= tree_cpu_seconds(os.getpid())
    assert tree_cpu_seconds(os.getppid()) >= tree_cpu_seconds(os.getpid()) / 2
    assert tree_cpu_seconds(2**30) == 0  # there is no such process


def test_settings_name_the_jars_of_the_peer(tmp_path: Path) -> None:
    assert "spark.jars" not in spark.session_settings(tmp_path, None)
    for name in ("b.jar", "a.jar", "a.txt"):
        (tmp_path / name).touch()
    settings = spark.session_settings(tmp_path, Jars("key", tmp_path))
    assert settings["spark.jars"] == f"{tmp_path / 'a.jar'},{tmp_path / 'b.jar'}"


class FakeContestant(Contestant):
    def __init__(self, side: Side) -> None:
        super().__init__(side, f"address of {side}", 0)

    def cpu_seconds(self) -> float:
        return 0.0

    @contextlib.contextmanager
    def turn(self) -> Any:
        yield


class FakeProgram:
    """Answers at once: ours is twice as good as the peer."""

    version = "4.2.0"

    def __init__(self, *_: object) -> None:
        self.jobs: list[Job] = []
        self.held: dict[tuple[str, str], tuple[int, int]] = {}
        self.cpu_s = 0.0
        self.loses = 0

    def __call__(self, *_: object) -> FakeProgram:
        return self

    def ask(self, job: Job) -> dict[str, Any]:
        self.jobs.append(job)
        better = 2 if job.side == "ours" else 1
        place = job.side, job.topic
        if job.do in ("fill", "write"):
            rows, _ = self.held.get(place, (0, 0))
            self.held[place] = rows + job.count, (rows + job.count) * job.size
        if job.do == "check":
            rows, size = self.held[place]
            return {"rows": rows - self.loses, "bytes": size}
        if job.do == "latency":
            return {"ms": [100 / better] * 95 + [400 / better] * 5}
        self.cpu_s += job.count * 1024 / 1e9 * 6 / better
        return {"rows": job.count, "seconds": job.count / 1000 / better}

    def cpu_seconds(self) -> float:
        return self.cpu_s

    def close(self) -> None: ...


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FakeProgram:
    """Everything but processes and jars."""
    fake = FakeProgram()

    def party(side: Side) -> spark.Party:
        return spark.Party(FakeContestant(side), lambda topic: None)

    monkeypatch.setattr(spark, "Program", fake)
    monkeypatch.setattr(spark, "java_command", lambda: "java")
    monkeypatch.setattr(spark, "fetch", lambda _: Jars("key", tmp_path))
    monkeypatch.setattr(spark, "_start_ours", lambda *_: party("ours"))
    monkeypatch.setattr(spark, "_start_peer", lambda *_: party("peer"))
    monkeypatch.setattr("os.sync", lambda: None)
    return fake


def asked(directory: Path, *only: str, ours_only: bool = False) -> Run:
    return Run(directory=directory, quick=True, only=frozenset(only), ours_only=ours_only)


def test_every_figure_has_both_sides(program: FakeProgram, tmp_path: Path) -> None:
    figures = {figure.name: figure for figure in spark.measure(asked(tmp_path))}
    assert list(figures) == list(spark.UNITS)
    assert (figures["spark_read_1k"].ours, figures["spark_read_1k"].peer) == (2000, 1000)
    assert figures["spark_latency_p50_ms"].ours == 50
    assert figures["spark_latency_p95_ms"].peer == pytest.approx(115)
    assert figures[spark.CPU].ours == pytest.approx(3)
    assert {figure.ratio and round(figure.ratio, 6) for figure in figures.values()} == {2}
    fills = [(job.side, job.size) for job in program.jobs if job.do == "fill"]
    assert sorted(fills) == [("ours", 100), ("ours", 1024), ("peer", 100), ("peer", 1024)]
    topics = [job.topic for job in program.jobs if job.do == "latency"]
    assert len(set(topics)) == len(topics) == 4, "a topic of its own for each turn"


def test_only_what_is_wanted_is_measured(program: FakeProgram, tmp_path: Path) -> None:
    (figure,) = spark.measure(asked(tmp_path, spark.CPU, ours_only=True))
    assert (figure.name, figure.peer) == (spark.CPU, None)
    assert {(job.do, job.side) for job in program.jobs} == {
        ("fill", "ours"),
        ("check", "ours"),
        ("read", "ours"),
    }
    with pytest.raises(Unusable, match="spark_read_2k"):
        spark.measure(asked(tmp_path, "spark_read_2k"))


def test_a_peer_that_cannot_be_had_is_left_out_and_named(
    program: FakeProgram,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def refuse(_: object) -> Jars:
        raise PeerUnavailable("no network")

    monkeypatch.setattr(spark, "fetch", refuse)
    (figure,) = spark.measure(asked(tmp_path, "spark_write_1k"))
    assert (figure.ours, figure.peer) == (2000, None)
    assert "Kafka 4.3.0 is left out: no network" in capsys.readouterr().err


@pytest.mark.parametrize("figure", ["spark_read_100", "spark_write_1k"])
def test_rows_that_are_missing_end_the_run(
    program: FakeProgram, tmp_path: Path, figure: str
) -> None:
    program.loses = 1
    with pytest.raises(Failed, match="instead of"):
        spark.measure(asked(tmp_path, figure))
