"""The benchmark of Kafka's door: what is measured on which topics, and what its programs say."""

from __future__ import annotations

import contextlib
import json
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import pytest

from bench import kafka, kafka_programs, spark
from bench.harness import Failed, Run, Unusable
from bench.kafka_programs import Rates, Rdkafka, Tools
from bench.sides import Side
from peers.fetch import Jars


class FakeContestant(kafka.Contestant):
    """A side whose broker has used a second of processor time whenever it is asked."""

    def __init__(self, side: Side) -> None:
        super().__init__(side, side, 0)
        self._cpu_s = 0.0

    def cpu_seconds(self) -> float:
        self._cpu_s += 1.0
        return self._cpu_s

    @contextlib.contextmanager
    def turn(self) -> Iterator[None]:
        yield


class FakePrograms:
    """Both kinds of programs: ours is twice as good as the peer, and the first turn is bad."""

    def __init__(self) -> None:
        self.made: list[tuple[str, str, int]] = []
        self.calls: list[tuple[str, str, str]] = []
        self.counts: dict[tuple[str, str], int] = {}  # of warm producers: by address and topic

    def make_topic(self, address: str, topic: str, partitions: int) -> None:
        self.made.append((address, topic, partitions))

    def _value(self, kind: str, address: str, topic: str, good: float) -> float:
        assert (address, topic) in [each[:2] for each in self.made], "a topic that nobody made"
        self.calls.append((kind, address, topic))
        count = self.calls.count((kind, address, topic))
        is_warm = (topic != "bench-many" and "-0-" not in topic) or count > 1
        return good if is_warm else 1e9

    def produce(self, address: str, topic: str, count: int, size: int, acks: str = "") -> float:
        return self._value(f"produce {acks}".strip(), address, topic, _better(address))

    def produce_warm(self, address: str, topic: str, count: int, size: int, acks: str) -> Rates:
        self.counts[address, topic] = count
        steady = self._value(f"produce {acks}", address, topic, _better(address))
        return Rates(steady / 2, steady)

    def consume(self, address: str, topic: str, count: int, size: int = 0) -> float:
        kind = "consume of librdkafka" if size else "consume"
        return self._value(kind, address, topic, _better(address))

    def paced_ms(
        self, address: str, topic: str, count: int, size: int, pace: int
    ) -> tuple[float, float]:
        mean_ms = self._value("paced", address, topic, 1 / _better(address))
        return mean_ms, 10 * mean_ms

    def latency_ms(self, address: str, topic: str, count: int) -> float:
        return self._value("latency", address, topic, 1 / _better(address))


def _better(side: str) -> float:
    return 2000 if side == "ours" else 1000


@pytest.fixture
def programs(monkeypatch: pytest.MonkeyPatch) -> FakePrograms:
    fake = FakePrograms()

    def start(run: Run, _: Path, __: object) -> tuple[Any, list[kafka.Contestant]]:
        sides: list[Side] = ["ours"] if run.ours_only else ["ours", "peer"]
        return fake, [FakeContestant(side) for side in sides]

    monkeypatch.setattr(kafka, "_start", start)
    monkeypatch.setattr(kafka, "Rdkafka", lambda: fake)
    return fake


def asked(directory: Path, *only: str, ours_only: bool = False) -> Run:
    return Run(directory=directory, quick=False, only=frozenset(only), ours_only=ours_only)


def test_every_figure_has_both_sides_and_no_warm_up(programs: FakePrograms, tmp_path: Path) -> None:
    figures = {figure.name: figure for figure in kafka.measure(asked(tmp_path))}
    assert list(figures) == list(kafka.UNITS)
    cpu = figures.pop("kafka_cpu_s")
    assert (cpu.ours, cpu.peer) == (1 / 6, 1 / 6), "of six million records, for one"
    assert {figure.ratio for figure in figures.values()} == {2}
    assert figures["kafka_rdkafka_produce_1k"].ours == 2000
    assert figures["kafka_produce_1k_all"].ours == 2000
    assert figures["kafka_produce_1k_first"].ours == figures["kafka_produce_100_first"].ours == 1000
    sizes = {topic: partitions for _, topic, partitions in programs.made}
    assert sizes.pop("bench-many") == kafka.MANY_PARTITIONS
    assert {partitions for topic, partitions in sizes.items() if "latency" not in topic} == {8}
    assert {partitions for topic, partitions in sizes.items() if "latency" in topic} == {1}
    assert len(programs.made) == len(set(programs.made)), "no topic is made twice"


def test_sides_take_turns_for_each_program_and_begin_in_turn(
    programs: FakePrograms, tmp_path: Path
) -> None:
    kafka.measure(asked(tmp_path, "kafka_paced_ms", "kafka_e2e_ms"))
    sides = [(kind, address) for kind, address, _ in programs.calls]
    ours_first = [("paced", "ours"), ("paced", "peer")]
    ours_first += [("latency", "ours"), ("latency", "peer")]
    peer_first = [ours_first[place] for place in (1, 0, 3, 2)]
    assert sides == ours_first + peer_first + ours_first + peer_first


@pytest.mark.parametrize(("rate", "count"), [(1e5, 1_000_000), (3e5, 2_100_000), (1e9, 3_000_000)])
def test_producers_send_for_some_seconds_before_they_are_measured(
    programs: FakePrograms,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    rate: float,
    count: int,
) -> None:
    def in_the_first_round(_: object, address: str, topic: str, *rest: object) -> Rates:
        programs.counts[address, topic] = cast(int, rest[0])
        return Rates(1, rate if address == "peer" and "-0-" in topic else 1)

    monkeypatch.setattr(FakePrograms, "produce_warm", in_the_first_round)
    kafka.measure(asked(tmp_path, "kafka_produce_1k_all"))
    later = [sent for (_, topic), sent in programs.counts.items() if "-0-" not in topic]
    assert set(later) == {count}, "both sides send as many, by the quicker one"
    assert programs.counts["ours", "bench-0-large"] == 1_000_000


def test_no_broker_is_left_with_what_others_were_sent(
    programs: FakePrograms, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All that a whole run sends would not fit on many a disk."""
    there: list[list[str]] = []
    start = kafka._start

    def start_with_a_directory(run: Run, directory: Path, started: Any) -> Any:
        there.append([path.name for path in tmp_path.iterdir()])
        (directory / "ours").mkdir(parents=True)
        return start(run, directory, started)

    monkeypatch.setattr(kafka, "_start", start_with_a_directory)
    kafka.measure(asked(tmp_path))
    assert there == [[]] * len(kafka.GROUPS)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("figure", "calls"),
    [
        ("kafka_consume_1k", {"produce all", "consume"}),
        ("kafka_produce_1k_1", {"produce 1"}),
        ("kafka_produce_1k_1000p", {"produce all"}),
        ("kafka_rdkafka_consume_1k", {"produce", "consume of librdkafka"}),
        ("kafka_produce_100_1", {"produce 1"}),
        ("kafka_paced_p99_ms", {"paced"}),
        ("kafka_e2e_ms", {"latency"}),
    ],
)
def test_only_what_is_wanted_is_measured(
    programs: FakePrograms, tmp_path: Path, figure: str, calls: set[str]
) -> None:
    (measured,) = kafka.measure(asked(tmp_path, figure, ours_only=True))
    assert (measured.name, measured.peer) == (figure, None)
    assert {kind for kind, _, _ in programs.calls} == calls
    with pytest.raises(Unusable, match="kafka_produce_2k"):
        kafka.measure(asked(tmp_path, "kafka_produce_2k"))


@pytest.fixture
def say(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[list[str]]]:
    """Let programs say something; the commands that were run."""

    def let_say(output: str, code: int = 0, complains: str = "what went wrong") -> list[list[str]]:
        commands: list[list[str]] = []

        def run(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
            commands.append(command)
            return subprocess.CompletedProcess(command, code, output, complains)

        monkeypatch.setattr(subprocess, "run", run)
        monkeypatch.setattr(kafka_programs, "java_command", lambda: "java")
        return commands

    return let_say


def test_what_kafkas_programs_say(say: Callable[..., list[list[str]]], tmp_path: Path) -> None:
    tools = Tools(Jars("key", tmp_path))
    say(
        "400 records sent, 80.0 records/sec (0.08 MB/sec), 1.0 ms avg latency\n"
        "1000 records sent, 99.5 records/sec (0.10 MB/sec), 2.0 ms avg latency, 9.0 ms max\n"
    )
    assert tools.produce("a:1", "t", 1000, 1024, "all") == 99.5
    commands = say(
        "400 records sent, 80.0 records/sec (0.08 MB/sec), 1.0 ms avg latency\n"
        "2000 records sent, 100.0 records/sec (0.10 MB/sec), 2.0 ms avg latency, 9.0 ms max\n"
        "1000 steady state records sent, 250.0 records/sec (0.25 MB/sec), 2.0 ms avg latency\n"
    )
    assert tools.produce_warm("a:1", "t", 1000, 1024, "1") == (62.5, 250)  # 20 s, of them 4
    assert {"2000", "1000", "acks=1"} <= set(commands[0])
    say(
        "2000 records sent, 100.0 records/sec (0.10 MB/sec), 2.0 ms avg latency, 9.0 ms max\n"
        "1000 steady state records sent, 250.0 records/sec (0.25 MB/sec), 2.0 ms avg latency\n",
        complains="org.apache.kafka.common.errors.TimeoutException: Expiring 15 record(s)\n",
    )
    with pytest.raises(Failed, match=r"Performance: .*TimeoutException: Expiring 15"):
        tools.produce_warm("a:1", "t", 1000, 1024, "1")
    say("1000 records sent, 99.5 records/sec (0.10 MB/sec)\n")
    with pytest.raises(Failed, match="ProducerPerformance: 1000"):
        tools.produce_warm("a:1", "t", 500, 1024, "all")
    say(
        "1000 records sent, 500.0 records/sec (0.5 MB/sec), 9.00 ms avg latency, 99.00 ms max "
        "latency, 8 ms 50th, 9 ms 95th, 90 ms 99th, 99 ms 99.9th.\n"
        "500 steady state records sent, 500.0 records/sec (0.5 MB/sec), 1.25 ms avg latency, 9 ms "
        "max latency, 1 ms 50th, 2 ms 95th, 7 ms 99th, 9 ms 99.9th.\n"
    )
    assert tools.paced_ms("a:1", "t", 500, 1024, 500) == (1.25, 7)
    say("1000 records sent, and that is all\n")
    with pytest.raises(Failed, match="ProducerPerformance: 1000"):
        tools.paced_ms("a:1", "t", 500, 1024, 500)
    say("start.time, ...\n2026, 2026, 9.7, 6.5, 1000, 666.6, 300, 1200, 8.1, 833.3\n")
    assert tools.consume("a:1", "t", 1000) == 833.3
    say("0\t3.1\nAvg latency: 0.7123 ms\n")
    assert tools.latency_ms("a:1", "t", 10) == 0.7123
    say("nothing of the kind\n")
    with pytest.raises(Failed, match="EndToEndLatency: nothing"):
        tools.latency_ms("a:1", "t", 10)
    say("", code=1)
    with pytest.raises(Failed, match="ConsumerPerformance:  what went wrong"):
        tools.consume("a:1", "t", 8)


def test_what_librdkafka_says(say: Callable[..., list[list[str]]]) -> None:
    commands = say('%4|a warning\n{"count": 1000, "seconds": 0.5}\n')
    assert Rdkafka().produce("a:1", "t", 1000, 1024) == 2000
    assert Rdkafka().consume("a:1", "t", 1000, 1024) == 2000
    jobs = [json.loads(command[-1]) for command in commands]
    assert [(job["kind"], job["topic"], job["count"]) for job in jobs] == [
        ("fill", "t", 1000),
        ("consume", "t", 1000),
    ]
    say("%4|only a warning\n")
    with pytest.raises(Failed, match="no rate came out of it: %4"):
        Rdkafka().consume("a:1", "t", 1000, 1024)


def test_a_peer_that_is_stopped_for_long_is_not_taken_for_dead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kafka's controller waits 9 s for a broker's heartbeat: turns on a slow machine are longer."""
    made: list[dict[str, Any]] = []
    monkeypatch.setattr(kafka, "Kafka", lambda _, **options: made.append(options))
    kafka.peer_broker(tmp_path, Jars("key", tmp_path))
    assert made[0]["config"]["broker.session.timeout.ms"] >= 600_000
    assert "peer_broker(" in Path(spark.__file__).read_text(), "for Spark's benchmark, too"
