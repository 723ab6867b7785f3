"""This module measures Sluice's Python client beside other clients, each in a process of its own.

RocketMQ's clients all talk to the same `sluice serve`; Kafka's to a Kafka. They take turns, figure
by figure and round by round. A client that cannot be had is left out, one that fails is not tried
with that again, and the run says why. When the time is over no further round begins.
README.md of this folder says what each figure means.
"""

import contextlib
import os
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from bench.client_servers import JavaServer, Kafka, Proxy
from bench.clients.loads import Job, reported
from bench.harness import ROOT, Failed, Figure, Run
from bench.python_clients import python_with
from bench.rocketmq_programs import SOURCES
from bench.rocketmq_servers import Sluice
from bench.sides import Pace, wanted_figures
from peers.artifacts import ROCKETMQ
from peers.errors import PeerFailed, PeerUnavailable
from peers.fetch import fetch
from peers.java import OPEN_MODULES, class_path, java_command
from peers.process import PeerProcess, log_tail

OURS, JAVA = "ours", "java"
JAVA_HEAP_MB = 1024
SIZES = {"1k": 1024, "100": 100}
KINDS = ("sync", "async", "batched", "consume")
FIGURES = {f"client_{kind}_{size}": "msg/s" for kind in KINDS for size in SIZES}
# What --quick measures: it has no time for all. In a full run these have all rounds, others one.
NAMED = ("client_sync_1k", "client_async_1k", "client_batched_100", "client_consume_1k")

FULL = Pace(5.0, 2.0, 3.0, 3)
QUICK = Pace(1.0, 1.0, 2.0, 1)
FULL_FILL = 1_000_000
QUICK_FILL = 300_000
ROUND_BEGINS_S = 540.0  # a round of the named figures takes some two minutes
TURN_TIMEOUT_S = 45.0
FILL_TIMEOUT_S = 180.0
POLL_INTERVAL_S = 0.02


@dataclass(frozen=True, slots=True)
class Contestant:
    """One client: what it is called, what it can do, and where it sends to."""

    key: str
    name: str
    server: str  # sluice, proxy or kafka
    requirements: tuple[str, ...] = ()
    module: str = ""
    kinds: tuple[str, ...] = KINDS


CONTESTANTS = (
    Contestant(OURS, "Sluice's Python client", "sluice", module="ours"),
    Contestant(JAVA, "RocketMQ 5.5.0, Java", "sluice"),
    Contestant("cpp", "rocketmq 0.4.4 (C++)", "sluice", ("rocketmq==0.4.4",), "rocketmq_cpp"),
    Contestant(
        "grpc",
        "rocketmq-python-client 5.1.2",
        "proxy",
        ("rocketmq-python-client==5.1.2",),
        "rocketmq_grpc",
        ("sync", "async", "consume"),
    ),
    Contestant(
        "confluent",
        "confluent-kafka 2.16.1, Kafka",
        "kafka",
        ("confluent-kafka==2.16.1",),
        "kafka_confluent",
    ),
    Contestant("aiokafka", "aiokafka 0.14.0, Kafka", "kafka", ("aiokafka==0.14.0",), "kafka_aio"),
)


def measure(run: Run) -> list[Figure]:
    """The figures that are wanted; of a quick run those that have a name of their own."""
    wanted = wanted_figures(run, FIGURES)
    if run.quick and not run.only:
        wanted &= set(NAMED)
    with contextlib.ExitStack() as started:
        session = Session(run, started)
        session.measure([figure for figure in FIGURES if figure in wanted])
        return session.figures()


class Session:
    """One run: its servers, who takes part, what has been measured so far."""

    def __init__(self, run: Run, started: contextlib.ExitStack) -> None:
        self._run = run
        self._pace = (QUICK if run.quick else FULL).for_seconds(run.seconds)
        self._fill_count = QUICK_FILL if run.quick else FULL_FILL
        self._values: dict[tuple[str, str], list[float]] = defaultdict(list)
        self._commands: dict[str, Callable[[Job], list[str]]] = {}
        self._others: dict[str, JavaServer] = {}  # beside Sluice, stopped between their turns
        self._filled: set[tuple[str, int]] = set()
        self._failed: set[tuple[str, str]] = set()  # clients, and what they cannot do
        self._turns = 0
        self._sluice = Sluice(run.directory / "sluice", flush="async")
        started.callback(self._sluice.kill)
        run.progress("Sluice: starts")
        self._sluice.start_until_first_send()
        for contestant in CONTESTANTS:
            if contestant.key == OURS or not run.ours_only:
                self._enlist(contestant, started)

    def _enlist(self, contestant: Contestant, started: contextlib.ExitStack) -> None:
        """Bring a client and its server, or say why it does not take part."""
        try:
            if contestant.key == JAVA:
                command: Callable[[Job], list[str]] = partial(_java, self._run.directory / "java")
                fetch(ROCKETMQ)
            elif contestant.key == OURS:
                command = partial(_python, Path(sys.executable), contestant.module)
            else:
                interpreter = python_with(*contestant.requirements)
                command = partial(_python, interpreter, contestant.module)
            self._start(contestant.server, started)
        except (PeerUnavailable, PeerFailed) as error:
            self._run.progress(f"{contestant.name} is left out: {error}")
            return
        self._commands[contestant.key] = command

    def _start(self, name: str, started: contextlib.ExitStack) -> None:
        if name == "sluice" or name in self._others:
            return
        directory = self._run.directory / name
        server: JavaServer
        if name == "kafka":
            server = Kafka(directory)
        else:
            server = Proxy(directory, self._sluice.nameserver)
        self._run.progress(f"{server.name}: starts")
        started.callback(server.kill)
        server.start()
        server.pause()
        self._others[name] = server

    # ----------------------------------------------------------------------------------- turns

    def measure(self, figures: list[str]) -> None:
        """A first round of all figures, then more of those with a name, as long as there is time.

        Who asks for some figures gets all rounds of each.
        """
        for number in range(1, self._pace.rounds + 1):
            if number > 1 and time.monotonic() > self._run.begin + ROUND_BEGINS_S:
                self._run.progress(f"no time for round {number} of {self._pace.rounds}")
                return
            for figure in figures:
                if number == 1 or self._run.only or figure in NAMED:
                    self._round(figure)

    def _round(self, figure: str) -> None:
        _, kind, size = figure.split("_")
        for contestant in CONTESTANTS:
            able = contestant.key in self._commands and kind in contestant.kinds
            if able and (contestant.key, kind) not in self._failed:
                self._turn(figure, contestant, kind, SIZES[size])

    def _turn(self, figure: str, contestant: Contestant, kind: str, body_bytes: int) -> None:
        """One measurement; one of another client may fail, and the run says so. Ours has a second
        try, for a machine that was busy with something else, and then must not fail.
        """
        is_ours, rate = contestant.key == OURS, 0.0
        with self._awake(contestant.server):
            for is_last in (not is_ours, True):
                try:
                    topic = self._topic(contestant, kind, body_bytes)
                    rate = self._rate(contestant, kind, topic, body_bytes)
                    break
                except Failed as error:
                    self._run.progress(f"{contestant.name}: {figure} failed: {error}")
                    if is_last and is_ours:
                        raise
                    if is_last:
                        self._failed.add((contestant.key, kind))
                        return
        self._run.progress(f"{contestant.name}: {figure} {rate:,.0f} msg/s")
        self._values[figure, contestant.key].append(rate)

    @contextlib.contextmanager
    def _awake(self, name: str) -> Iterator[None]:
        """Let only the server of this turn have a processor; the proxy needs Sluice beside it."""
        server = self._others.get(name)
        if name == "kafka":
            self._sluice.pause()
        if server is not None:
            server.resume()
        try:
            yield
        finally:
            if server is not None:
                server.pause()
            if name == "kafka":
                self._sluice.resume()

    def _topic(self, contestant: Contestant, kind: str, body_bytes: int) -> str:
        """The topic of a turn; one that is read is filled before, once for each broker and size."""
        broker = "kafka" if contestant.server == "kafka" else "sluice"
        topic = f"bench-{kind}-{body_bytes}"
        if broker == "sluice":
            self._sluice.create_topic(topic)
        if kind == "consume" and (broker, body_bytes) not in self._filled:
            self._run.progress(f"{topic} at {broker} is filled")
            key = "confluent" if broker == "kafka" else OURS
            if key not in self._commands:
                raise Failed("nobody is there who could fill the topic")
            job = self._job("fill", broker, topic, "bench-fill", body_bytes)
            self._run_program(self._commands[key], job)
            os.sync()  # so that the disk is at rest while it is read
            self._filled.add((broker, body_bytes))
        return topic

    def _rate(self, contestant: Contestant, kind: str, topic: str, body_bytes: int) -> float:
        self._turns += 1
        group = f"bench-{kind}-{self._turns}"
        if kind == "consume" and contestant.server != "kafka":
            group = self._sluice.create_group(topic)
        job = self._job(kind, contestant.server, topic, group, body_bytes)
        said = self._run_program(self._commands[contestant.key], job)
        return said["count"] / said["seconds"]

    def _job(self, kind: str, server: str, topic: str, group: str, body_bytes: int) -> Job:
        other = self._others.get(server)
        address = other.address if other is not None else self._sluice.nameserver
        pace = self._pace
        return Job(
            *(kind, address, topic, group, body_bytes),
            *(pace.warm_s, pace.measured_s, self._fill_count),
        )

    def _run_program(self, command: Callable[[Job], list[str]], job: Job) -> Mapping[str, float]:
        """Run a program to its end; what its last line says."""
        log = self._run.directory / "program.out"
        log.unlink(missing_ok=True)
        home = self._run.directory / "home"  # one of them writes logs there
        home.mkdir(exist_ok=True)
        environment = {"PYTHONPATH": f"{ROOT}:{ROOT / 'src'}", "HOME": str(home)}
        with PeerProcess(job.kind, command(job), log=log, environment=environment) as process:
            timeout_s = FILL_TIMEOUT_S if job.kind == "fill" else TURN_TIMEOUT_S
            deadline = time.monotonic() + timeout_s + job.warm_s + job.seconds
            said = None
            while said is None and process.running and time.monotonic() < deadline:
                time.sleep(POLL_INTERVAL_S)
                said = reported(process.output())
            said = said or reported(process.output())
        if said is None or not said["count"]:
            raise Failed(f"no rate came out of it:\n{log_tail(log, 8)}")
        return said

    # --------------------------------------------------------------------------------- figures

    def figures(self) -> list[Figure]:
        """One for each client that ours is beside; the first has Java's."""
        result = []
        for figure, unit in FIGURES.items():
            ours = self._values.get((figure, OURS))
            if not ours:
                continue
            rate = statistics.median(ours)
            others = [each for each in CONTESTANTS if (figure, each.key) in self._values]
            beside = [each for each in others if each.key != OURS]
            if JAVA not in (each.key for each in beside):
                result.append(Figure(figure, unit, rate))
            for each in beside:
                name = figure if each.key == JAVA else f"{figure}_vs_{each.key}"
                peer = statistics.median(self._values[figure, each.key])
                result.append(Figure(name, unit, rate, peer, each.name))
        return result


def _python(interpreter: Path, module: str, job: Job) -> list[str]:
    return [str(interpreter), "-m", f"bench.clients.{module}", job.words()]


def _java(home: Path, job: Job) -> list[str]:
    home.mkdir(parents=True, exist_ok=True)
    jars = fetch(ROCKETMQ)
    return [
        java_command(),
        f"-Xms{JAVA_HEAP_MB}m",
        f"-Xmx{JAVA_HEAP_MB}m",
        *OPEN_MODULES,
        f"-Duser.home={home}",
        # Without it the client would find, among the jars, how a broker is to log.
        "-Drmq.logback.configurationFile=rmq.client.logback.xml",
        *("-cp", class_path(SOURCES, "ClientLoad", jars), "ClientLoad"),
        *("-k", job.kind, "-n", job.address, "-t", job.topic, "-g", job.group),
        *("-s", str(job.body_bytes), "-w", str(job.warm_s), "-m", str(job.seconds)),
        *("-c", str(job.count)),
    ]
