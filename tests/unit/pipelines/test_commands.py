"""`sluice pipeline` and `sluice story` as commands, without Spark."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from sluice.cli import main
from sluice.pipelines import lag, needs
from sluice.testing.site import LiveBroker

LIMIT_SECONDS = 120


def test_what_cannot_be_done_is_one_line_and_two(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setattr(needs, "missing", lambda environ: "")
    monkeypatch.chdir(tmp_path)
    Path("empty.py").touch()
    # Nobody listens on port 1.
    for words, said in (
        (("run", "gifts", "-n", "127.0.0.1:1"), "no nameserver answers"),
        (("run", "empty.py"), "defines no function pipeline"),
        (("serve", "gifts", "--set", "tpoic=x"), "did you mean topic?"),
        (("serve", "gifts", "--conf", "x=y"), "--conf x=y"),
        (("run", "gifts", "--batch-rows", "0"), "--batch-rows 0: at least 1"),
        (("run", "gifts", "--interval", "nan"), "--interval nan"),
        (("run", "gifts", "-n", "nowhere"), "'nowhere' is not host:port"),
        (("generate", "gifts", "--count", "0"), "--count 0: at least 1"),
        (("generate", "gifts", "--rate", "-1"), "--rate -1"),
        (("new", "../x"), "small letters"),
    ):
        assert main(["pipeline", *words]) == 2
        captured = capsys.readouterr()
        assert said in captured.err
        assert captured.err.startswith("sluice: ")
        assert captured.err.count("\n") == 1
        assert captured.out == ""
    assert main(["story", "--seconds", "-1"]) == 2
    assert "--seconds -1" in capsys.readouterr().err


def test_without_spark_the_command_says_what_is_missing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(needs, "missing", lambda environ: "there is no Java; install one")
    assert main(["pipeline", "run", "gifts", "-n", "127.0.0.1:1"]) == 2
    said = "sluice: Spark cannot run here: there is no Java; install one\n"
    assert capsys.readouterr().err == said


def test_new_writes_two_files(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["pipeline", "new", "clicks"]) == 0
    assert "sluice pipeline run clicks.py" in capsys.readouterr().out
    assert sorted(os.listdir()) == ["clicks.py", "test_clicks.py"]


def test_traffic_is_sent_and_its_lag_is_seen(
    capsys: pytest.CaptureFixture[str], sluice_broker: LiveBroker
) -> None:
    address = sluice_broker.nameserver_address
    words = ["generate", "gifts", "--count", "50", "--fast", "--start", "1000", "-n", address]
    assert main(["pipeline", *words]) == 0
    assert capsys.readouterr().out.startswith("gifts: sent 50 messages in ")
    assert len(sluice_broker.messages("gifts")) == 50
    options = {"sluice.bootstrap.servers": address}
    assert lag.LagWatch(options, {"nobody": ("gifts",)}).last() == 50
    assert lag.LagWatch(options, {"nobody": ("nowhere",)}).last() is None


# ------------------------------------------------------------------------------------------ a story


@pytest.fixture
def story(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """`sluice story` with everything but Spark, for as long as it is let."""
    process = subprocess.Popen(
        [sys.executable, "-m", "sluice", "story", "--no-spark", "--rate", "50"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


def lines_until(process: subprocess.Popen[str], text: str) -> list[str]:
    """What it prints, up to a line with a text; the whole where there is none."""
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        lines.append(line)
        if text in line:
            break
    return lines


def children(pid: int) -> list[int]:
    found = Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii")
    return [int(word) for word in found.split()]


def wait_until(condition: Callable[[], bool], what: str) -> None:
    limit = time.monotonic() + LIMIT_SECONDS
    while not condition():
        assert time.monotonic() < limit, what
        time.sleep(0.05)


def is_gone(pid: int) -> bool:
    """Whether a process has ended; one that nobody waits for has, too."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2]
    except OSError:
        return True
    return state.split()[0] in "ZX"


def test_a_story_ends_with_ctrl_c_and_leaves_nothing(
    story: subprocess.Popen[str], tmp_path: Path
) -> None:
    shown = lines_until(story, "day: viewer-")
    assert "day: viewer-" in shown[-1], shown
    started = children(story.pid)
    assert len(started) == 1
    story.send_signal(signal.SIGINT)
    rest = lines_until(story, "everything is stopped")
    assert story.wait(LIMIT_SECONDS) == 0
    assert "everything is stopped" in rest[-1], rest
    assert all(map(is_gone, started))
    assert list(tmp_path.iterdir()) == []


def test_a_story_that_is_killed_takes_its_broker_along(story: subprocess.Popen[str]) -> None:
    lines_until(story, "traffic ")
    wait_until(lambda: len(children(story.pid)) == 1, "the broker is not started")
    (broker,) = children(story.pid)
    story.kill()
    story.wait()
    wait_until(lambda: is_gone(broker), "the broker goes on")


def test_a_story_whose_ports_are_taken_meanwhile_takes_others(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        program = (
            "from sluice.pipelines import story\n"
            f"story._PORTS = {{**story._PORTS, '--nameserver-port': {port}}}\n"
            "story._is_free = lambda port: True\n"
            "raise SystemExit(story.main(['--no-spark', '--seconds', '0.1']))\n"
        )
        done = subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "TMPDIR": str(tmp_path)},
            capture_output=True,
            text=True,
            timeout=LIMIT_SECONDS,
            check=False,
        )
    assert done.returncode == 0, done
    assert "20 messages, " in done.stdout
    assert f":{port}," not in done.stdout
