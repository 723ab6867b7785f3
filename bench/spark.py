"""This module measures topics as Spark tables: our source and sink beside Spark's own for Kafka.

One Spark session does everything (`bench/spark_jobs.py`), so that version, settings and warmth are
the same; ours reads `sluice serve`, the peer's an Apache Kafka. The sides take turns, figure by
figure; the broker whose turn it is not is stopped. The first turns of a figure warm it.
"""

import contextlib
import importlib.util
import json
import os
import queue
import signal
import statistics
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bench.harness import ROOT, Failed, Figure, Run, Unusable
from bench.kafka import PARTITIONS, Contestant, peer_broker
from bench.processes import tree_cpu_seconds
from bench.rocketmq_servers import QUEUES, Sluice
from bench.sides import Samples, Side, wanted_figures
from bench.spark_jobs import ANSWER, ERROR, Job
from bench.spark_senders import make_kafka_topic
from peers.artifacts import KAFKA, SPARK_KAFKA
from peers.errors import PeerFailed, PeerUnavailable
from peers.fetch import Jars, fetch
from peers.java import java_command
from peers.process import log_tail, tied

PEER = "Spark's Kafka source 4.2.0, Kafka 4.3.0"
ANSWER_TIMEOUT_S = 600.0
END_TIMEOUT_S = 30.0
GB = 1e9
CPU, P50, P95 = "spark_read_cpu_s_per_gb", "spark_latency_p50_ms", "spark_latency_p95_ms"
UNITS = {
    "spark_read_1k": "rows/s",
    "spark_read_100": "rows/s",
    "spark_read_1k_value": "rows/s",
    "spark_write_1k": "rows/s",
    P50: "ms",
    P95: "ms",
    CPU: "s",
}
# Figure -> bytes of a value, and whether it is read alone.
READS = {
    "spark_read_1k": (1024, False),
    "spark_read_100": (100, False),
    "spark_read_1k_value": (1024, True),
}
WRITE_BYTES = 1024


@dataclass(frozen=True, slots=True)
class Amounts:
    """How much there is to read and write, how long a turn takes, and how many turns there are."""

    rows: dict[int, int]  # by the bytes of a value
    written: int  # by one write
    seconds: float
    latency_s: float
    latency_warm_s: float
    warm_rounds: int
    rounds: int

    def for_seconds(self, seconds: float | None) -> "Amounts":
        if seconds is None:
            return self
        return replace(self, seconds=seconds, latency_s=seconds)


FULL = Amounts({1024: 1_000_000, 100: 3_000_000}, 500_000, 6.0, 12.0, 3.0, 2, 3)
QUICK = Amounts({1024: 200_000, 100: 500_000}, 100_000, 2.0, 4.0, 1.0, 1, 1)


@dataclass(frozen=True, slots=True)
class Party:
    """One side, and how a topic is made there."""

    contestant: Contestant
    make_topic: Callable[[str], None]


class Program:
    """The PySpark program, which is asked for one job after the other."""

    def __init__(self, directory: Path, settings: dict[str, str]) -> None:
        directory.mkdir(parents=True)
        self._log = directory / "spark.log"
        self._answers: queue.Queue[dict[str, Any] | None] = queue.Queue()
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                tied([sys.executable, "-m", "bench.spark_jobs", json.dumps(settings)]),
                cwd=directory,
                env={
                    **os.environ,
                    "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'src'}",
                    "PYSPARK_PYTHON": sys.executable,
                    "SPARK_LOCAL_IP": "127.0.0.1",
                },
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                start_new_session=True,
            )
        threading.Thread(target=self._listen, daemon=True).start()
        try:
            self.version = str(self._answer()["spark"])
        except Failed:
            self.close()
            raise

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if (said := said_in(line)) is not None:
                self._answers.put(said)
        self._answers.put(None)

    def ask(self, job: Job) -> dict[str, Any]:
        """Have a job done; Failed with what went wrong."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended, which its answers tell
            self._process.stdin.write(job.words() + "\n")
            self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        try:
            said = self._answers.get(timeout=ANSWER_TIMEOUT_S)
        except queue.Empty:
            raise Failed(f"Spark says nothing:\n{log_tail(self._log)}") from None
        if said is None:
            raise Failed(f"the PySpark program ended:\n{log_tail(self._log)}")
        if ERROR in said:
            raise Failed(said[ERROR])
        answer: dict[str, Any] = said[ANSWER]
        return answer

    def cpu_seconds(self) -> float:
        """Of the program, its JVM and the Python workers."""
        return tree_cpu_seconds(self._process.pid)

    def close(self) -> None:
        """End it; its JVM and the workers end when it does."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()


def said_in(line: str) -> dict[str, Any] | None:
    """The answer or error in a line of the program; None where a library talks."""
    with contextlib.suppress(json.JSONDecodeError):
        said = json.loads(line)
        if isinstance(said, dict) and (ANSWER in said or ERROR in said):
            return said
    return None


def measure(run: Run) -> list[Figure]:
    """All figures that are wanted, each the median of its rounds."""
    wanted = wanted_figures(run, UNITS)
    java_command()
    if importlib.util.find_spec("pyspark") is None:
        raise Unusable("pyspark is not installed: script/setup does it")
    samples = Samples(UNITS, dict.fromkeys(UNITS, PEER))
    with contextlib.ExitStack() as started:
        session = Session(run, started, samples)
        for figure, (size, is_value_only) in READS.items():
            if figure in wanted or (CPU in wanted and figure == "spark_read_1k"):
                session.read(figure, size, is_value_only=is_value_only)
        if "spark_write_1k" in wanted:
            session.write("spark_write_1k")
        if wanted & {P50, P95}:
            session.latency()
    return [samples.figure(name) for name in UNITS if name in wanted]


class Session:
    """One run: both sides, Spark, and what has been measured so far."""

    def __init__(self, run: Run, started: contextlib.ExitStack, samples: Samples) -> None:
        self._run = run
        self._samples = samples
        self._amounts = (QUICK if run.quick else FULL).for_seconds(run.seconds)
        self._filled: set[tuple[Side, int]] = set()
        jars = None if run.ours_only else self._peer_jars()
        self._parties = [_start_ours(run.directory / "ours", started)]
        if jars is not None:
            run.progress("Kafka starts")
            self._parties.append(_start_peer(run.directory / "peer", jars[0], started))
        run.progress("Spark starts")
        settings = session_settings(run.directory / "spark", jars[1] if jars else None)
        self._program = Program(run.directory / "program", settings)
        started.callback(self._program.close)
        run.progress(f"Spark {self._program.version} is there")

    def _peer_jars(self) -> tuple[Jars, Jars] | None:
        try:
            return fetch(KAFKA), fetch(SPARK_KAFKA)
        except (PeerUnavailable, PeerFailed) as error:
            self._run.progress(f"{PEER} is left out: {error}")
            return None

    def _turns(self, turn: Callable[[Party, bool], None]) -> None:
        """Let the sides take turns; `turn` is told whether it counts."""
        for number in range(self._amounts.warm_rounds + self._amounts.rounds):
            for party in self._parties:
                os.sync()  # so that the disk is at rest: the other side has written, too
                with party.contestant.turn():
                    turn(party, number >= self._amounts.warm_rounds)

    def _say(self, party: Party, counts: bool, text: str) -> None:
        self._run.progress(f"{party.contestant.side}{'' if counts else ', warm-up'}: {text}")

    def _job(self, do: str, party: Party, topic: str, **rest: Any) -> Job:
        return Job(do, party.contestant.side, party.contestant.address, topic, **rest)

    def _timed(self, figure: str, party: Party, job: Job, counts: bool) -> tuple[int, float]:
        """Have a job done that gives a rate; its rows, and processor time for 10^9 bytes."""
        contestant = party.contestant
        before_s = self._program.cpu_seconds(), contestant.cpu_seconds()
        done = self._program.ask(replace(job, seconds=self._amounts.seconds))
        after_s = self._program.cpu_seconds(), contestant.cpu_seconds()
        rate = done["rows"] / done["seconds"]
        gigabytes = done["rows"] * job.size / GB
        spark_s, broker_s = (
            (end - begin) / gigabytes for begin, end in zip(before_s, after_s, strict=True)
        )
        self._say(
            party,
            counts,
            f"{figure} {rate:,.0f} rows/s, {rate * job.size / 1e6:,.0f} MB/s, CPU s/GB: "
            f"{spark_s:.2f} Spark, {broker_s:.2f} broker",
        )
        if counts:
            self._samples.add(figure, contestant.side, rate)
        return int(done["rows"]), spark_s + broker_s

    # ------------------------------------------------------------------------------------ reading

    def read(self, figure: str, size: int, *, is_value_only: bool) -> None:
        topic, count = f"bench-{size}", self._amounts.rows[size]

        def turn(party: Party, counts: bool) -> None:
            self._filled_topic(party, topic, size, count)
            job = self._job("read", party, topic, count=count, is_value_only=is_value_only)
            _, cpu_s_per_gb = self._timed(figure, party, replace(job, size=size), counts)
            if counts and figure == "spark_read_1k":
                self._samples.add(CPU, party.contestant.side, cpu_s_per_gb)

        self._turns(turn)

    def _filled_topic(self, party: Party, topic: str, size: int, count: int) -> None:
        """Fill the topic of a size, once; Spark must find all of it."""
        side = party.contestant.side
        if (side, size) in self._filled:
            return
        self._run.progress(f"{side}: {count:,} messages of {size} bytes are sent")
        party.make_topic(topic)
        self._program.ask(self._job("fill", party, topic, count=count, size=size))
        self._check(party, topic, count, size)
        self._filled.add((side, size))

    def _check(self, party: Party, topic: str, count: int, size: int) -> None:
        found = self._program.ask(self._job("check", party, topic, is_value_only=True))
        if found != (wanted := {"rows": count, "bytes": count * size}):
            raise Failed(f"{party.contestant.side}: {topic} holds {found} instead of {wanted}")

    # ------------------------------------------------------------------------------------ writing

    def write(self, figure: str) -> None:
        topic, written = "bench-written", {party.contestant.side: 0 for party in self._parties}

        def turn(party: Party, counts: bool) -> None:
            side = party.contestant.side
            if not written[side]:
                party.make_topic(topic)
            job = self._job("write", party, topic, count=self._amounts.written, size=WRITE_BYTES)
            rows, _ = self._timed(figure, party, job, counts)
            written[side] += rows
            if not counts:
                self._check(party, topic, written[side], WRITE_BYTES)

        self._turns(turn)

    # ------------------------------------------------------------------------------------ latency

    def latency(self) -> None:
        amounts, numbers = self._amounts, iter(range(1, sys.maxsize))

        def turn(party: Party, counts: bool) -> None:
            topic = f"bench-latency-{next(numbers)}"
            party.make_topic(topic)
            job = self._job("latency", party, topic, warm_s=amounts.latency_warm_s)
            measured = self._program.ask(replace(job, seconds=amounts.latency_s))["ms"]
            p50, p95 = percentiles(measured)
            self._say(party, counts, f"p50 {p50:.0f} ms, p95 {p95:.0f} ms of {len(measured)}")
            if counts:
                self._samples.add(P50, party.contestant.side, p50)
                self._samples.add(P95, party.contestant.side, p95)

        self._turns(turn)


def percentiles(values: Sequence[float]) -> tuple[float, float]:
    """The median, and what 95 of 100 do not exceed; Failed with too few values to say."""
    if len(values) < 20:
        raise Failed(f"only {len(values)} messages were measured")
    return statistics.median(values), statistics.quantiles(values, n=20, method="inclusive")[18]


def session_settings(directory: Path, jars: Jars | None) -> dict[str, str]:
    """What the session has that is not Spark's default; it is the same for both sides."""
    settings = {
        "spark.master": "local[2]",
        "spark.app.name": "sluice bench",
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.driver.memory": "2g",
        "spark.local.dir": str(directory / "local"),
        "spark.sql.warehouse.dir": str(directory / "warehouse"),
        "spark.sql.shuffle.partitions": "2",
        "spark.sql.streaming.numRecentProgressUpdates": "100000",
        # As docs/spark.md has it; Kafka's source needs no Python, so it does not matter there.
        "spark.python.unix.domain.socket.enabled": "true",
    }
    if jars is not None:
        settings["spark.jars"] = ",".join(str(jar) for jar in sorted(jars.directory.glob("*.jar")))
    return settings


def _start_ours(directory: Path, started: contextlib.ExitStack) -> Party:
    server = Sluice(directory, flush="async")
    started.callback(server.kill)
    server.start()
    assert QUEUES == PARTITIONS, "both sides have as many"
    return Party(
        _stopped("ours", server.nameserver, server.pids()[0], started), server.create_topic
    )


def _start_peer(directory: Path, jars: Jars, started: contextlib.ExitStack) -> Party:
    server = peer_broker(directory, jars)
    started.enter_context(server)

    def make_topic(topic: str) -> None:
        make_kafka_topic(server.address, topic, PARTITIONS)

    return Party(_stopped("peer", server.address, server.pid, started), make_topic)


def _stopped(side: Side, address: str, pid: int, started: contextlib.ExitStack) -> Contestant:
    """A broker until its first turn. Nobody is killed while it is stopped."""
    started.callback(os.killpg, pid, signal.SIGCONT)
    os.killpg(pid, signal.SIGSTOP)
    return Contestant(side, address, pid)
