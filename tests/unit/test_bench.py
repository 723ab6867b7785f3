"""The harness of the benchmarks: what a ratio means, in which order rounds run, what is written."""

import contextlib
import json
import os
import sys
import time
from pathlib import Path

import pytest

from bench.__main__ import main
from bench.harness import Failed, Figure, Run, Unusable, machine_facts, rounds, table, write_json
from bench.limits import PlainFile, copy_rate, private_bytes, slice_copy_rate
from bench.processes import cpu_seconds, private_in
from bench.processes import private_bytes as private_bytes_of
from bench.registry import BENCHMARKS
from bench.rocketmq import FIGURES, PEER_NAMES, measure
from bench.rocketmq_programs import (
    BATCH_PRODUCER,
    CLIENT_LOGS,
    CONSUMER,
    PRODUCER,
    Load,
    Program,
    Report,
    RunningLoad,
    read_reports,
    reported_rate,
)
from bench.rocketmq_servers import Server
from bench.sides import ColdStart, Samples, Turn, agreed_rate, take_turn
from peers.process import PeerProcess


@pytest.mark.parametrize(
    ("unit", "ours", "peer", "ratio"),
    [
        ("msg/s", 200.0, 100.0, 2.0),
        ("s", 1.0, 4.0, 4.0),
        ("MB", 80.0, 20.0, 0.25),
        ("msg/s", 200.0, None, None),
    ],
)
def test_a_ratio_above_one_means_that_ours_is_better(
    unit: str, ours: float, peer: float | None, ratio: float | None
) -> None:
    assert Figure("figure", unit, ours, peer).ratio == ratio


def test_contestants_take_turns_and_the_median_counts() -> None:
    order: list[str] = []
    values = {"a": iter([1.0, 9.0, 2.0]), "b": iter([5.0, 4.0, 30.0])}

    def contestant(name: str) -> float:
        order.append(name)
        return next(values[name])

    medians = rounds({"a": lambda: contestant("a"), "b": lambda: contestant("b")}, 3)
    assert "".join(order) == "ababab"
    assert medians == {"a": 2.0, "b": 5.0}


def test_figures_are_written_for_people_and_programs(tmp_path: Path) -> None:
    figures = [Figure("append", "msg/s", 12_345.6, 24_691.2, "the disk"), Figure("kept", "MB", 7.5)]
    assert table(figures).splitlines() == [
        "figure  unit     ours    peer  ratio  peer is",
        "append  msg/s  12,346  24,691   0.50  the disk",
        "kept    MB        7.5       -      -  -",
    ]
    write_json(tmp_path / "figures.json", figures)
    assert json.loads((tmp_path / "figures.json").read_text(encoding="utf-8")) == {
        "figures": [
            {
                "name": "append",
                "unit": "msg/s",
                "ours": 12_345.6,
                "peer": 24_691.2,
                "ratio": 0.5,
                "peer_name": "the disk",
            },
            {
                "name": "kept",
                "unit": "MB",
                "ours": 7.5,
                "peer": None,
                "ratio": None,
                "peer_name": None,
            },
        ]
    }


def test_without_a_name_the_benchmarks_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    listed = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in listed] == list(BENCHMARKS)


def test_progress_goes_to_standard_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Run(tmp_path, quick=True).progress("reading")
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.endswith("s  reading\n")


def test_the_machine_is_named(tmp_path: Path) -> None:
    facts = machine_facts(tmp_path)
    assert set(facts) == {"cpu", "memory", "system", "filesystem", "python", "commit"}
    assert all(facts.values())


def test_limits_move_the_bytes_they_count(tmp_path: Path) -> None:
    turn = [b"x" * 100] * 4
    plain = PlainFile(tmp_path / "plain")
    assert plain.write_rate(turn, sync=True, seconds=0.01) > 0
    with (tmp_path / "plain").open("rb") as file:
        assert file.read(400) == b"".join(turn)
    plain.close()
    assert list(tmp_path.iterdir()) == []
    assert copy_rate(turn, seconds=0.01) > 0
    assert slice_copy_rate(memoryview(bytes(1000)), 100, 4, seconds=0.01) > 0
    assert private_bytes() > 1_000_000


PRODUCER_OUTPUT = """\
topic: t, threadCount: 64, messageSize: 1024, keyEnable: false, reportInterval: 1000
Current Time: 2026-01-02 03:04:05,678 | Send TPS: 41000 | Max RT(ms): 90 | Average RT(ms):   \
1.560 | Send Failed: 0 | Response Failed: 0
Current Time: 2026-01-02 03:04:06,678 | Send TPS: 43000 | Max RT(ms): 90 | Average RT(ms):   \
1.490 | Send Failed: 2 | Response Failed: 1
"""
BATCH_OUTPUT = """\
Current Time: 2026-01-02 03:04:05,678 | Send TPS: 3200 | Send MPS: 102400 | Max RT(ms): 30 | \
Average RT(ms):   1.200 | Average Message RT(ms):   0.038 | Send Failed: 0 | Send Message Failed: 64
"""
CONSUMER_OUTPUT = """\
Consumer Started.
Current Time: 2026-01-02 03:04:05,678 | Consume TPS: 150000 | AVG(B2C) RT(ms): 9.100 | \
AVG(S2C) RT(ms): 9.000 | MAX(B2C) RT(ms): 12 | MAX(S2C) RT(ms): 12 | Consume Fail: 0
"""


@pytest.mark.parametrize(
    ("program", "output", "reports"),
    [
        (PRODUCER, PRODUCER_OUTPUT, [(41_000, 0), (43_000, 3)]),
        (BATCH_PRODUCER, BATCH_OUTPUT, [(102_400, 64)]),
        (CONSUMER, CONSUMER_OUTPUT, [(150_000, 0)]),
        (PRODUCER, "Consumer Started.\n", []),
        (PRODUCER, PRODUCER_OUTPUT[:-20], [(41_000, 0)]),
    ],
)
def test_reports_of_the_programs_are_read(
    program: Program, output: str, reports: list[tuple[float, int]]
) -> None:
    assert read_reports(program, output) == reports


def test_a_report_in_another_form_is_an_error() -> None:
    with pytest.raises(Failed, match="another form"):
        read_reports(PRODUCER, CONSUMER_OUTPUT)


def test_only_lines_of_the_measured_seconds_count() -> None:
    reports = [Report(rate, 0) for rate in (1.0, 2.0, 30.0, 50.0)]
    assert reported_rate(reports, 5.0) is None
    assert reported_rate(reports, 10.0) == 50.0
    assert reported_rate(reports, 11.5) == 40.0
    assert reported_rate([], 10.0) is None


def test_the_program_and_the_broker_must_agree() -> None:
    assert agreed_rate(None, 1000.0) == 1000.0
    assert agreed_rate(1400.0, 1000.0) == 1400.0
    with pytest.raises(Failed, match="reports 2,000 msg/s, but 1,000"):
        agreed_rate(2000.0, 1000.0)
    with pytest.raises(Failed, match="no message"):
        agreed_rate(2000.0, 0.0)


def test_a_program_that_ends_or_fails_stops_the_benchmark(tmp_path: Path) -> None:
    def running(script: str, log: str = "") -> RunningLoad:
        home = tmp_path / str(len(list(tmp_path.iterdir())))
        (home / CLIENT_LOGS).mkdir(parents=True)
        (home / CLIENT_LOGS / "client.log").write_text(log, encoding="utf-8")
        (home / "text").write_text(PRODUCER_OUTPUT, encoding="utf-8")
        code = f"import time; text = open('{home / 'text'}').read()\n{script}"
        process = PeerProcess("program", [sys.executable, "-c", code], log=home / "output")
        started.enter_context(process)
        return RunningLoad(Load("figure", PRODUCER, ()), process, home)

    def forever(words: str) -> str:
        return f"print({words}, flush=True); time.sleep(600)"

    def log_line(level: str, text: str) -> str:
        return f"2026-01-02 03:04:05.678 {level:5} [4914] [main] [o.a.r.Client#?:?] - {text}\n"

    with contextlib.ExitStack() as started:
        healthy = running(
            forever("'started'"),
            log_line("INFO", "pullTimeDelayMillsWhenException=1000")
            + log_line("WARN", "the cached message count exceeds the threshold"),
        )
        _await_output(healthy, "started")
        healthy.check()
        for script, log, message in (
            (forever("text"), "", "3 failures"),
            (forever("'java.lang.RuntimeException: no'"), "", "in trouble"),
            (forever("'ready'"), log_line("ERROR", "Send Exception"), "logged 1 errors"),
            ("print('bye')", "", "has ended"),
        ):
            with pytest.raises(Failed, match=message):
                _check_until_failed(running(script, log))


def _await_output(program: RunningLoad, text: str) -> None:
    deadline = time.monotonic() + 60
    while text not in program.output():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def _check_until_failed(program: RunningLoad) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        program.check()
        time.sleep(0.01)


class PausingServer(Server):
    """A side without processes, which remembers when it was let run."""

    def __init__(self, *, is_peer: bool) -> None:
        super().__init__()
        self.name = "side"
        self.is_peer = is_peer
        self.events: list[str] = []

    def start(self) -> None:
        self.events.append("start")

    def pause(self) -> None:
        self.events.append("pause")

    def resume(self) -> None:
        self.events.append("resume")

    def kill(self) -> None:
        self.events.append("kill")

    def pids(self) -> list[int]:
        return []


@pytest.mark.parametrize(
    ("is_peer", "errors", "attempts"),
    [
        (False, [], 1),
        (False, [Failed("a send failed")], None),
        (False, [ColdStart("cold"), ColdStart("cold")], 3),
        (False, [ColdStart("cold"), Failed("a send failed")], None),
        (True, [Failed("a send failed"), ColdStart("cold")], 3),
        (True, [Failed("a send failed")] * 3, None),
    ],
)
def test_a_turn_is_repeated_only_with_an_excuse(
    is_peer: bool, errors: list[Failed], attempts: int | None
) -> None:
    server = PausingServer(is_peer=is_peer)
    said: list[str] = []
    left = list(errors)

    def work() -> Turn:
        assert server.events[-1] == "resume"
        if left:
            raise left.pop(0)
        return Turn(5.0, 1.0)

    if attempts is None:
        with pytest.raises(Failed, match="a send failed"):
            take_turn(server, work, said.append)
    else:
        assert take_turn(server, work, said.append) == Turn(5.0, 1.0)
        assert server.events == ["resume", "pause"] * attempts
        assert len(said) == attempts - 1
    assert server.events[-1] == "pause"


def test_medians_of_both_sides_make_a_figure() -> None:
    samples = Samples(FIGURES, PEER_NAMES)
    for ours, peer in ((3.0, 8.0), (1.0, 9.0), (2.0, 1.0)):
        samples.add("start_s", "ours", ours)
        samples.add("start_s", "peer", peer)
    samples.add("send_sync_1k", "ours", 5.0)
    assert samples.figure("start_s") == Figure("start_s", "s", 2.0, 8.0, "Apache RocketMQ")
    assert samples.figure("start_s").ratio == 4.0
    assert samples.figure("send_sync_1k") == Figure("send_sync_1k", "msg/s", 5.0)
    samples.add("send_sync_1k_durable_vs_async", "ours", 4.0)
    samples.add("send_sync_1k_durable_vs_async", "peer", 5.0)
    versus = samples.figure("send_sync_1k_durable_vs_async")
    assert (versus.ratio, versus.peer_name) == (0.8, "Apache RocketMQ, async flush")


@pytest.mark.parametrize(
    "words",
    [
        ["store", "--only", "read_1k"],
        ["store", "--ours-only"],
        ["store", "--seconds", "3"],
        ["rocketmq", "--seconds", "0"],
    ],
)
def test_what_a_benchmark_cannot_do_is_refused(words: list[str]) -> None:
    with pytest.raises(SystemExit):
        main(words)


def test_an_unknown_figure_is_refused(tmp_path: Path) -> None:
    run = Run(tmp_path, quick=True, only=frozenset({"send_sync_1k", "sent_sync"}))
    with pytest.raises(Unusable, match="no such figure: sent_sync;"):
        measure(run)


SMAPS = """\
00400000-00500000 rw-p 00000000 00:00 0                                  [heap]
Size:               1024 kB
Private_Clean:         4 kB
Private_Dirty:       600 kB
Anonymous:           604 kB
7f00-7f01 rw-s 00000000 fe:00 1                                          /store/commitlog/0
Size:            1048576 kB
Private_Clean:    400000 kB
Private_Dirty:    100000 kB
Anonymous:             0 kB
7f02-7f03 rw-p 00000000 fe:00 2                                          /lib/libc.so
Size:                 64 kB
Private_Clean:        20 kB
Private_Dirty:         8 kB
Anonymous:             8 kB
7f04-7f05 rw-p 00000000 00:00 0
Size:                 64 kB
Private_Clean:         0 kB
Private_Dirty:        12 kB
Anonymous:            40 kB
"""


def test_private_memory_is_without_mapped_files_and_shared_pages() -> None:
    assert private_in(SMAPS) == (604 + 8 + 12) * 1024


def test_a_process_is_measured_by_its_number() -> None:
    pid = os.getpid()
    before = cpu_seconds([pid])
    begin = time.process_time()
    while time.process_time() - begin < 0.1:
        pass
    assert cpu_seconds([pid]) - before >= 0.05
    held = bytearray(os.urandom(1 << 20) * 40)
    assert private_bytes_of([pid]) > len(held)
