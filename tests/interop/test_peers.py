"""The harness itself: fetching is atomic and says why it failed, and Apache alone behaves with it.

Without this file a failing interop test could mean a broken harness as well as a broken store.
"""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from peers import (
    Artifact,
    ArtifactSet,
    GoPrograms,
    Jars,
    PeerFailed,
    PeerUnavailable,
    RocketMQ,
    fetch,
)
from peers.process import PeerProcess, free_ports
from peers.programs import started
from peers.python import python_packages
from tests.interop.clients import GO_SOURCES, JavaClients
from tests.interop.outcomes import (
    GROUP,
    SEGMENT_BYTES,
    TOPICS,
    check_delivery,
    check_kept_when_killed,
)
from tests.interop.watching import wait_until

SMALL = ArtifactSet("small", (Artifact("group", "name", "1"),))


def fake_tools(directory: Path, **tools: str) -> str:
    """A PATH that holds a `java` that does nothing and tools with the given texts."""
    directory.mkdir()
    for name, text in {"java": "exit 0", **tools}.items():
        tool = directory / name
        tool.write_text(f"#!/bin/sh\n{text}\n", encoding="utf-8")
        tool.chmod(0o755)
    return f"{directory}{os.pathsep}/usr/bin{os.pathsep}/bin"


def test_without_maven_the_peer_is_unavailable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(PeerUnavailable, match="mvn is not installed"):
        fetch(SMALL, cache=tmp_path)


def test_packages_of_python_without_checksums_are_refused_and_leave_no_folder(
    tmp_path: Path,
) -> None:
    cache = tmp_path / "cache"
    cache.mkdir()
    requirements = tmp_path / "unpinned.txt"
    requirements.write_text("pyspark==4.3.0\n", encoding="utf-8")
    with pytest.raises(PeerUnavailable, match=r"(?s)could not install unpinned\.txt.*[Hh]ashes"):
        python_packages(requirements, cache=cache)
    assert [path.suffix for path in cache.iterdir()] == [".lock"]


def test_a_failed_download_says_why_and_leaves_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = fake_tools(tmp_path / "bin", mvn="echo no route to the registry; exit 1")
    monkeypatch.setenv("PATH", path)
    cache = tmp_path / "cache"
    cache.mkdir()
    with pytest.raises(PeerUnavailable, match="no route to the registry"):
        fetch(SMALL, cache=cache)
    assert [name.name for name in cache.iterdir() if name.is_dir()] == []


def test_a_fetched_set_is_not_fetched_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = tmp_path / "calls"
    script = (
        f"echo called >> {calls}\n"
        'for option in "$@"; do case "$option" in\n'
        '  -DoutputDirectory=*) mkdir -p "${option#*=}"; touch "${option#*=}/a.jar";;\n'
        "esac; done"
    )
    monkeypatch.setenv("PATH", fake_tools(tmp_path / "bin", mvn=script))
    cache = tmp_path / "cache"
    cache.mkdir()
    first = fetch(SMALL, cache=cache)
    second = fetch(SMALL, cache=cache)
    assert first == second
    assert [jar.name for jar in first.directory.iterdir()] == ["a.jar"]
    assert calls.read_text(encoding="utf-8") == "called\n"


def test_without_go_its_client_is_unavailable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(PeerUnavailable, match="go is not installed"):
        GoPrograms(GO_SOURCES, home=tmp_path / "home")


def test_go_modules_that_cannot_be_had_say_why_and_leave_no_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = 'case "$1" in env) echo go1;; *) echo no route to the proxy; exit 1;; esac'
    monkeypatch.setenv("PATH", fake_tools(tmp_path / "bin", go=answers))
    monkeypatch.setenv("SLUICE_PEER_CACHE", str(tmp_path / "cache"))
    with pytest.raises(PeerUnavailable, match="no route to the proxy"):
        GoPrograms(GO_SOURCES, home=tmp_path / "home")
    assert [name.name for name in (tmp_path / "cache").iterdir() if name.is_dir()] == []


def test_a_program_that_does_not_say_it_is_done_was_not_stopped_well(tmp_path: Path) -> None:
    script = "trap 'exit 0' TERM; echo '{\"event\":\"ready\"}'; while :; do sleep 0.05; done"
    with started("looper", ["/bin/sh", "-c", script], home=tmp_path) as program:
        program.wait_for("ready", 1, timeout_s=30)
        with pytest.raises(PeerFailed, match="undone"):
            program.stop(timeout_s=30)


def test_events_are_read_as_they_come_and_never_half(tmp_path: Path) -> None:
    script = 'printf \'{"event":"a"}\\nchatter\\n{"event":"b"}\\n{"event":"half\'; sleep 60'
    with started("writer", ["/bin/sh", "-c", script], home=tmp_path) as program:
        program.wait_for("b", 1, timeout_s=30)
        assert [event["event"] for event in program.new_events()] == ["a", "b"]
        assert program.new_events() == []
        assert program.running


def test_ports_are_free_and_never_those_of_outgoing_connections(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first, second = free_ports(2, also=(-2, 1))
    assert abs(first - second) > 1
    assert max(first, second) < 32_768
    monkeypatch.setattr("peers.process._PORTS", range(first, first + 2))
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", first))
        assert free_ports(1) == [first + 1]
        with pytest.raises(PeerFailed, match="no 2 of the ports"):
            free_ports(2)


def test_a_program_that_ends_early_shows_its_log(tmp_path: Path) -> None:
    command = ["/bin/sh", "-c", "echo cannot bind; exit 3"]
    process = PeerProcess("the program", command, log=tmp_path / "log")
    with pytest.raises(PeerFailed, match=r"ended with code 3:\ncannot bind"):
        process.wait_ready("ready", timeout_s=30)


STARTER = """
import sys, time
from pathlib import Path
from peers.process import PeerProcess
from peers.programs import started
server = PeerProcess("server", ["/bin/sleep", "600"], log=Path(sys.argv[1]) / "log")
with started("program", ["/bin/sleep", "600"], home=Path(sys.argv[1])) as program:
    print(server.pid, program.pid, flush=True)
    time.sleep(600)
"""


def test_what_was_started_dies_with_whoever_is_killed(tmp_path: Path) -> None:
    repository = Path(__file__).parents[2]
    with subprocess.Popen(
        [sys.executable, "-c", STARTER, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": str(repository)},
        stdout=subprocess.PIPE,
    ) as starter:
        assert starter.stdout is not None
        pids = [int(word) for word in starter.stdout.readline().split()]
        assert len(pids) == 2
        assert all(is_alive(pid) for pid in pids)
        starter.kill()
    wait_until(lambda: not any(is_alive(pid) for pid in pids), lambda: f"{pids} live on")


def is_alive(pid: int) -> bool:
    """Whether a process does anything: one that nobody waits for is a zombie."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8")
    except (FileNotFoundError, ProcessLookupError):
        return False
    return text.rpartition(")")[2].split()[0] not in "ZX"


def test_apache_delivers_what_apache_stored(
    rocketmq_jars: Jars, java_clients: JavaClients, tmp_path: Path
) -> None:
    with RocketMQ(tmp_path / "apache", jars=rocketmq_jars) as apache:
        check_delivery(java_clients, apache.nameserver_address)
        assert TOPICS[1] in apache.mqadmin("consumerProgress", "-g", GROUP).stdout


@pytest.mark.soak
def test_apache_keeps_what_it_acknowledged_when_it_is_killed(
    rocketmq_jars: Jars, java_clients: JavaClients, tmp_path: Path
) -> None:
    """That it does so is shown with each run by what Sluice takes over from it."""
    config = {"mappedFileSizeCommitLog": SEGMENT_BYTES, "flushDiskType": "SYNC_FLUSH"}
    with RocketMQ(tmp_path / "apache", config=config, jars=rocketmq_jars) as apache:
        check_kept_when_killed(java_clients, apache)
