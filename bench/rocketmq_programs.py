"""This module runs RocketMQ's own benchmark programs, unmodified, and reads what they report.

One program is ours, `java/AsyncProducer.java`, and reports as theirs do: RocketMQ's Producer puts
no bound on asynchronous sends, and with this version of the client it stops its own network thread
as soon as 65535 of them wait, whichever broker it sends to.

A program counts every second and, once it has ten counts, reports the rate between the first and
the last of them: a line covers nine seconds. All sides get the same program with the same options.
"""

import contextlib
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from bench.harness import Failed
from peers.fetch import Jars
from peers.java import OPEN_MODULES, class_path, java_command
from peers.process import PeerProcess, log_tail

PACKAGE = "org.apache.rocketmq.example.benchmark"
SOURCES = Path(__file__).parent / "java"
HEAP_MB = 1024
REPORT_INTERVAL_MS = 1000
# What a reported rate covers, with the second that may pass until the line is written.
REPORT_SPAN_S = 10.0
# Where RocketMQ's client writes its logs, below the home of the user.
CLIENT_LOGS = Path("logs/rocketmqlogs")


@dataclass(frozen=True, slots=True)
class Program:
    """A benchmark program, and the columns of its report that count here.

    One that does not report each second has lines of another form.
    """

    name: str
    rate_column: str
    failure_columns: tuple[str, ...]
    reports_each_second: bool = True
    is_ours: bool = False


PRODUCER = Program("Producer", "Send TPS", ("Send Failed", "Response Failed"))
BATCH_PRODUCER = Program("BatchProducer", "Send MPS", ("Send Failed", "Send Message Failed"))
TRANSACTION_PRODUCER = Program("TransactionProducer", "Send TPS", ("Send Failed",))
TIMER_PRODUCER = Program(
    "timer.TimerProducer",
    "Send TPS",
    ("Send Failed", "Response Failed"),
    reports_each_second=False,
)
ASYNC_PRODUCER = Program(
    "AsyncProducer", PRODUCER.rate_column, PRODUCER.failure_columns, is_ours=True
)
CONSUMER = Program("Consumer", "Consume TPS", ("Consume Fail",))


@dataclass(frozen=True, slots=True)
class Load:
    """A program and its options: what is done to a broker while a figure is measured."""

    figure: str
    program: Program
    options: tuple[str, ...]


class Report(NamedTuple):
    """One line of a program: messages per second, and what went wrong so far."""

    rate: float
    failed: int


def read_reports(program: Program, output: str) -> list[Report]:
    """The lines "Current Time: ... | Send TPS: 41234 | ... | Send Failed: 0 | ..." of an output.

    Or, of a program that reports more rarely, "Send TPS: 41234, ..., Send Failed: 0, ...". A last
    line that is still being written is left out.
    """
    each_second = program.reports_each_second
    begin, between = ("Current Time:", " | ") if each_second else (program.rate_column, ", ")
    reports = []
    for line in output[: output.rfind("\n") + 1].splitlines():
        if line.startswith(begin):
            pairs = (column.partition(": ") for column in line.split(between))
            columns = {name.strip(): value.strip() for name, _, value in pairs}
            try:
                rate = float(columns[program.rate_column])
                failed = sum(int(columns[name]) for name in program.failure_columns)
            except (KeyError, ValueError) as error:
                raise Failed(f"{program.name} reports in another form: {line}") from error
            reports.append(Report(rate, failed))
    return reports


def reported_rate(reports: list[Report], seconds: float) -> float | None:
    """The mean of the lines that cover nothing but the last so many seconds; None without any."""
    count = 1 + int(seconds - REPORT_SPAN_S) if seconds >= REPORT_SPAN_S else 0
    lines = reports[-count:] if count else []
    return sum(report.rate for report in lines) / len(lines) if lines else None


class RunningLoad:
    """A program at work on one broker."""

    def __init__(self, load: Load, process: PeerProcess, home: Path) -> None:
        self.load = load
        self._process = process
        self._home = home

    def output(self) -> str:
        return self._process.output()

    def reports(self) -> list[Report]:
        return read_reports(self.load.program, self.output())

    def check(self) -> None:
        """Raise Failed if it has ended, or has reported or logged anything that went wrong."""
        name = self.load.program.name
        if not self._process.running:
            raise Failed(f"{name} has ended:\n{log_tail(self._process.log)}")
        if "Exception" in self.output():
            raise Failed(f"{name} is in trouble:\n{log_tail(self._process.log)}")
        if failed := max((report.failed for report in self.reports()), default=0):
            raise Failed(f"{name} reports {failed} failures:\n{log_tail(self._process.log)}")
        for log in sorted((self._home / CLIENT_LOGS).glob("*.log")):
            text = log.read_text("utf-8", errors="replace")
            if trouble := [line for line in text.splitlines() if is_trouble(line)]:
                raise Failed(f"{name} logged {len(trouble)} errors, such as:\n{trouble[0]}")


def is_trouble(log_line: str) -> bool:
    """Whether a line of the client's log tells of a request that failed.

    Not all its warnings do: a consumer whose broker is faster than itself warns of that.
    """
    words = log_line.split(maxsplit=3)
    return (
        len(words) > 3
        and words[2] in {"WARN", "ERROR"}
        and any(sign in words[3] for sign in ("Exception", "exception", "timeout"))
    )


class Programs:
    """Starts programs; each has a home of its own, so that its log is its own."""

    def __init__(self, directory: Path, jars: Jars) -> None:
        self._directory = directory
        self._jars = jars
        self._java = java_command()
        self._numbers = itertools.count(1)

    @contextlib.contextmanager
    def running(self, load: Load, nameserver: str, topic: str) -> Iterator[RunningLoad]:
        """The program runs inside of the block, and is killed at its end."""
        home = self._directory / f"{load.program.name}-{next(self._numbers)}"
        home.mkdir(parents=True)
        command = [
            self._java,
            f"-Xms{HEAP_MB}m",
            f"-Xmx{HEAP_MB}m",
            *OPEN_MODULES,
            f"-Duser.home={home}",
            # Without it the client would find, among the jars, how a broker is to log.
            "-Drmq.logback.configurationFile=rmq.client.logback.xml",
            *self._class(load.program),
            *("-n", nameserver, "-t", topic),
            *(("-ri", str(REPORT_INTERVAL_MS)) if load.program.reports_each_second else ()),
            *load.options,
        ]
        with PeerProcess(load.program.name, command, log=home / "output") as process:
            yield RunningLoad(load, process, home)

    def _class(self, program: Program) -> tuple[str, str, str]:
        """Where Java finds the program, and its name."""
        if program.is_ours:
            return "-cp", class_path(SOURCES, program.name, self._jars), program.name
        return "-cp", self._jars.class_path, f"{PACKAGE}.{program.name}"
