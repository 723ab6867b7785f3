"""The benchmark of clients: how programs count, what is made of their rates, who is left out."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import sys
import time
from collections import Counter
from collections.abc import Awaitable
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import pytest

from bench import client, client_servers, python_clients
from bench.clients import loads
from bench.harness import Failed, Run
from peers.errors import PeerFailed, PeerUnavailable
from peers.process import free_ports

JOB = loads.Job("async", "127.0.0.1:1", "t", "g", 100, 0.0, 0.01, 1000)


def said(capsys: pytest.CaptureFixture[str]) -> dict[str, float]:
    return dict(json.loads(capsys.readouterr().out.splitlines()[-1]))


def clock(monkeypatch: pytest.MonkeyPatch, step_s: float) -> None:
    ticks = itertools.count()
    monkeypatch.setattr("time.perf_counter", lambda: next(ticks) * step_s)


def test_a_job_comes_through_the_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["program", JOB.words()])
    assert loads.read_job() == JOB
    assert len(JOB.body) == 100
    assert (JOB.window, loads.Job(**{**json.loads(JOB.words()), "kind": "batched"}).window) == (
        loads.WINDOW,
        loads.BATCHED_WINDOW,
    )


def test_sends_one_by_one_are_counted(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock(monkeypatch, 0.001)
    sent: list[bytes] = []
    loads.one_by_one(JOB, sent.append, each=3)
    assert set(sent) == {JOB.body}
    report = said(capsys)
    assert report["count"] == 3 * len(sent)
    assert report["seconds"] == pytest.approx(0.01)


def test_a_window_counts_answers_and_ends_with_an_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock(monkeypatch, 0.001)
    window = loads.Window(2)
    window.flood(JOB, lambda _: window.ended())
    assert said(capsys)["count"] == window.done > 0
    clock(monkeypatch, 0.001)
    with pytest.raises(SystemExit, match="too late"):
        window.flood(JOB, lambda _: window.failed("too late"))


def test_coroutines_are_awaited_in_their_order(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock(monkeypatch, 0.0001)
    sent: list[bytes] = []

    async def answer() -> None:
        await asyncio.sleep(0)

    def start(body: bytes) -> Awaitable[None]:
        sent.append(body)
        return answer()

    asyncio.run(loads.flood(JOB, start))
    report = said(capsys)
    assert report["count"] == len(sent) - loads.WINDOW
    sent.clear()
    asyncio.run(loads.fill(JOB, start))
    assert said(capsys)["count"] == len(sent) == 1000


def test_a_consumer_counts_from_when_it_is_warm_to_the_end_of_the_topic(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = [0.0]
    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    job = loads.Job("consume", "a", "t", "g", 100, 1.0, 5.0, 1000)
    reading = loads.Reading(job)
    assert not reading.is_over(0)
    now[0] = 2.0
    assert not reading.is_over(10)  # the first ones; warm a second later
    now[0] = 3.0
    assert not reading.is_over(100)
    now[0] = 4.0
    assert not reading.is_over(600)
    now[0] = 5.0
    assert reading.is_over(1000)
    assert said(capsys) == {"count": 900, "seconds": 2.0}
    with pytest.raises(SystemExit, match="before the consumer was warm"):
        loads.Reading(job).is_over(1000)
    reading = loads.Reading(job)
    now[0] += loads.FIRST_MESSAGE_S + 1
    with pytest.raises(SystemExit, match="no message"):
        reading.is_over(0)


class Rates:
    """A session whose programs and servers are made up."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, directory: Path, **rates: float) -> None:
        self.rates = rates
        self.jobs: list[loads.Job] = []
        self.turns: list[tuple[str, str, int, frozenset[str]]] = []
        self.lines: list[str] = []
        monkeypatch.setattr(client, "Sluice", FakeSluice)
        monkeypatch.setattr(client, "Kafka", FakeKafka)
        monkeypatch.setattr(client, "Proxy", FakeProxy)
        monkeypatch.setattr("os.sync", lambda: None)
        monkeypatch.setattr(client, "fetch", lambda _: None)
        monkeypatch.setattr(client, "python_with", self.python_with)
        monkeypatch.setattr(client.Session, "_run_program", self.run_program)
        self.run = Run(directory=directory, quick=True)
        monkeypatch.setattr(Run, "progress", lambda _, text: self.lines.append(text))

    def python_with(self, requirement: str) -> Path:
        if requirement.startswith("aiokafka"):
            raise PeerUnavailable("no network")
        return Path("python")

    def run_program(self, command: object, job: loads.Job) -> dict[str, float]:
        self.jobs.append(job)
        words = repr(command)
        key = "java" if "_java" in words else words.partition("'), '")[2].partition("'")[0]
        self.turns.append((key, job.kind, job.body_bytes, frozenset(FakeServer.awake)))
        rate = self.rates.get(key, 100.0)
        if not rate:
            raise Failed("it hangs")
        return {"count": rate * 2, "seconds": 2.0}


class FakeServer:
    name = address = "server"
    awake: ClassVar[set[str]] = set()

    def __init__(self, *_: object) -> None: ...
    def start(self) -> None:
        self.resume()

    def pause(self) -> None:
        self.awake.remove(self.name)

    def resume(self) -> None:
        self.awake.add(self.name)

    def kill(self) -> None:
        self.awake.discard(self.name)


class FakeKafka(FakeServer):
    name = address = "kafka"


class FakeProxy(FakeServer):
    name = address = "proxy"


class FakeSluice(FakeServer):
    name = nameserver = "sluice"

    def __init__(self, *_: object, flush: str) -> None: ...
    def start_until_first_send(self) -> float:
        self.start()
        return 0.0

    def create_topic(self, topic: str) -> None: ...
    def create_group(self, topic: str) -> str:
        return "readers"


def test_figures_have_one_line_for_each_other_client(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    rates = Rates(monkeypatch, tmp_path, ours=300.0, java=100.0, rocketmq_cpp=0.0)
    figures = {figure.name: figure for figure in client.measure(rates.run)}
    assert {name for name in figures if "_vs_" not in name} == set(client.NAMED)
    assert figures["client_sync_1k"].ratio == 3.0
    assert figures["client_sync_1k"].peer_name == "RocketMQ 5.5.0, Java"
    assert "client_sync_1k_vs_confluent" in figures
    assert "client_batched_100_vs_grpc" not in figures  # it has no batches
    assert not [name for name in figures if name.endswith(("_vs_cpp", "_vs_aiokafka"))]
    assert "aiokafka 0.14.0, Kafka is left out: no network" in rates.lines
    assert any("(C++): client_sync_1k failed: it hangs" in line for line in rates.lines)
    fills = [(job.kind, job.address, job.body_bytes) for job in rates.jobs if job.kind == "fill"]
    assert fills == [("fill", "sluice", 1024), ("fill", "kafka", 1024)]


def test_only_the_servers_of_a_turn_are_awake(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    rates = Rates(monkeypatch, tmp_path)
    client.measure(rates.run)
    awake = {(key, kind): servers for key, kind, _, servers in rates.turns if kind != "fill"}
    assert awake["ours", "sync"] == awake["java", "consume"] == {"sluice"}
    assert awake["rocketmq_grpc", "async"] == {"sluice", "proxy"}
    assert {servers for (key, _), servers in awake.items() if "kafka" in key} == {
        frozenset({"kafka"})
    }
    assert FakeServer.awake == set()


def test_a_full_run_has_more_rounds_of_the_named_figures(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    rates = Rates(monkeypatch, tmp_path, rocketmq_cpp=0.0)
    now = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    run = Run(directory=tmp_path, quick=False)
    client.measure(run)
    ours = Counter(turn[1:3] for turn in rates.turns if turn[0] == "ours")
    assert ours["sync", 1024] == ours["batched", 100] == ours["consume", 1024] == 3
    assert ours["sync", 100] == ours["batched", 1024] == ours["consume", 100] == 1
    # Who cannot do something is not asked again, whatever the size.
    failed = [turn[1] for turn in rates.turns if turn[0] == "rocketmq_cpp"]
    assert sorted(failed) == ["async", "batched", "consume", "sync"]
    # A round that would end too late does not begin; the first one always does.
    rates.turns.clear()
    now[0] = run.begin + client.ROUND_BEGINS_S + 1
    figures = client.measure(run)
    assert {figure.name for figure in figures if "_vs_" not in figure.name} == set(client.FIGURES)
    ours = Counter(turn[1:3] for turn in rates.turns if turn[0] == "ours" and turn[1] != "fill")
    assert set(ours.values()) == {1}
    assert "no time for round 2 of 3" in rates.lines
    # Some figures only: all rounds of each.
    rates.turns.clear()
    now[0] = 0.0
    client.measure(replace(run, only=frozenset({"client_sync_100"})))
    ours = Counter(turn[1:3] for turn in rates.turns if turn[0] == "ours")
    assert ours == {("sync", 100): 3}


def test_ours_must_not_fail(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    rates = Rates(monkeypatch, tmp_path, ours=0.0)
    with pytest.raises(Failed, match="hangs"):
        client.measure(rates.run)
    assert [turn[0] for turn in rates.turns] == ["ours", "ours"]  # once more, and no further


def test_the_last_report_in_an_output_counts() -> None:
    assert loads.reported("") is None
    assert loads.reported('{"count": 1, "sec') is None
    assert loads.reported('noise\n{"count": 4, "seconds": 2.0}\nmore\n') == {
        "count": 4.0,
        "seconds": 2.0,
    }


def test_a_client_that_cannot_be_installed_says_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("SLUICE_PEER_CACHE", str(tmp_path))
    calls: list[list[str]] = []

    class Done:
        stdout = "no such package"

        def __init__(self, code: int) -> None:
            self.returncode = code

    def run(command: list[str], **_: object) -> Done:
        calls.append(command)
        return Done(int("pip" in command))

    monkeypatch.setattr("subprocess.run", run)
    with pytest.raises(PeerUnavailable, match="no such package"):
        python_clients.python_with("nothing==1")
    assert calls[1][-1] == "nothing==1"
    with contextlib.suppress(PeerUnavailable):
        python_clients.python_with("nothing==1")
    assert len(calls) == 4  # an environment is whole, or not there


# ------------------------------------------------------------------------------------------ servers


class Program(client_servers.JavaServer):
    """A server that is a few lines of Python."""

    def __init__(self, directory: Path, lines: str) -> None:
        (port,) = free_ports(1)
        super().__init__("the program", port, directory)
        self._lines = lines.replace("PORT", str(port))

    def start(self) -> None:
        self.directory.mkdir()
        self._start([sys.executable, "-c", self._lines])

    @property
    def state(self) -> str:
        assert self._process is not None
        stat = Path(f"/proc/{self._process.pid}/stat").read_text(encoding="utf-8")
        return stat.rpartition(")")[2].split()[0]


def test_a_server_that_does_not_start_is_quoted(tmp_path: Path) -> None:
    with pytest.raises(PeerFailed, match="does not start:\nno memory"):
        Program(tmp_path / "server", "print('no memory')").start()


@pytest.mark.skipif(sys.platform != "linux", reason="states of processes are read from /proc")
def test_a_server_is_stopped_between_its_turns(tmp_path: Path) -> None:
    lines = "import socket; s = socket.create_server(('127.0.0.1', PORT)); [*iter(s.accept, 0)]"
    server = Program(tmp_path / "server", lines)
    server.start()
    try:
        server.pause()
        while server.state != "T":
            time.sleep(0.001)
        server.resume()
        while server.state == "T":
            time.sleep(0.001)
    finally:
        server.kill()
    assert not (tmp_path / "server").exists()


def test_a_tool_that_does_not_end_is_a_peer_that_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_servers, "FORMAT_TIMEOUT_S", 0.01)
    with pytest.raises(PeerFailed, match="did not end"):
        client_servers._output([sys.executable, "-c", "import time; time.sleep(600)"])
