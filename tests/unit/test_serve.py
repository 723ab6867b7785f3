"""`sluice serve` as a person meets it: started, tried, stopped; and what it says when it cannot."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.unit.unprivileged import make_read_only, run_unprivileged

WAIT_SECONDS = 60


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def sluice(
    *arguments: str, text: str | None = None, variables: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "sluice", *arguments],
        capture_output=True,
        text=True,
        timeout=WAIT_SECONDS,
        check=False,
        input=text,
        env=None if variables is None else {**os.environ, **variables},
    )


@contextmanager
def serving(directory: Path, *flags: str) -> Iterator[tuple[subprocess.Popen[str], list[str]]]:
    """A running `sluice serve` and the lines it printed when it was ready."""
    process = subprocess.Popen(
        [sys.executable, "-m", "sluice", "serve", "--directory", str(directory / "data"), *flags],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert process.stdout is not None
    try:
        lines = [process.stdout.readline().rstrip("\n") for _ in range(5)]
        yield process, lines
    finally:
        process.kill()
        process.wait(WAIT_SECONDS)
        process.stdout.close()


def test_serve_takes_a_message_keeps_it_over_a_stop_and_a_kill(tmp_path: Path) -> None:
    flags = ("--listen-port", str(free_port()), "--nameserver-port", str(free_port()))
    with serving(tmp_path, *flags) as (process, lines):
        nameserver = lines[0].split()[1]
        assert lines[0] == f"nameserver  127.0.0.1:{flags[3]}"
        assert lines[1].startswith(f"broker      127.0.0.1:{flags[1]}  (broker-a, flush=sync")
        assert lines[4] == f"try it:           sluice send orders hello -n {nameserver}"

        sent = sluice(
            "send", "orders", "hello", "-n", nameserver, "-t", "new", "-k", "42", "--json"
        )
        assert sent.returncode == 0, sent.stderr
        assert json.loads(sent.stdout)["queue_offset"] == 0

        process.send_signal(signal.SIGTERM)
        assert process.wait(WAIT_SECONDS) == 0

    with serving(tmp_path, *flags) as (process, _):
        sent = sluice("send", "orders", "-n", nameserver, "--json", text="one\ntwo\n")
        assert sent.returncode == 0, sent.stderr
        assert len(sent.stdout.splitlines()) == 2
        process.send_signal(signal.SIGKILL)
        process.wait(WAIT_SECONDS)

    with serving(tmp_path, *flags):
        seen = sluice(
            "tail", "orders", "-n", nameserver, "--from-beginning", "--count", "3", "--json"
        )
        assert seen.returncode == 0, seen.stderr
        messages = [json.loads(line) for line in seen.stdout.splitlines()]
        assert sorted(message["body"] for message in messages) == ["hello", "one", "two"]
        (first,) = [message for message in messages if message["body"] == "hello"]
        assert first["properties"]["TAGS"] == "new"
        assert first["properties"]["KEYS"] == "42"


def test_a_port_in_use_is_one_line_with_the_flag_and_exit_code_2(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        for flag, other in (
            ("--listen-port", "--nameserver-port"),
            ("--nameserver-port", "--listen-port"),
        ):
            directory = str(tmp_path / flag)
            done = sluice("serve", "--directory", directory, flag, port, other, "0")
            assert done.returncode == 2
            assert done.stderr.splitlines()[-1] == (
                f"sluice: 127.0.0.1:{port} is in use; choose another port ({flag})"
            )


@pytest.mark.parametrize(
    ("command", "line"),
    [
        (["serve", "--nameserver-port", "0"], "directory: x/nameserver: Permission denied"),
        (["broker", "--nameserver-addresses", "127.0.0.1:9"], "x: the directory cannot be written"),
    ],
)
def test_a_directory_that_cannot_be_written_is_one_line(
    tmp_path: Path, command: list[str], line: str
) -> None:
    make_read_only(tmp_path)
    # Once where it fails for another reason: so everything is imported that is needed to fail.
    prepare = f"""
from sluice.cli import main
command = {command} + ["--listen-port", "0", "--directory"]
assert main([*command, "/dev/null/x"]) == 2
"""
    done = run_unprivileged(prepare, "sys.exit(main([*command, 'x']))", tmp_path)
    assert done.returncode == 2, done.stderr
    assert done.stderr.splitlines()[-1].startswith(f"sluice: {line}")
    assert "Traceback" not in done.stderr


def test_a_file_in_the_place_of_the_directory_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "data").write_text("not a directory")
    done = sluice(
        "serve", "--directory", str(tmp_path / "data"), "--listen-port", "0",
        "--nameserver-port", "0",
    )  # fmt: skip
    assert done.returncode == 2
    assert str(tmp_path / "data") in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr


def test_a_bad_setting_is_one_line_with_its_name(tmp_path: Path) -> None:
    config = tmp_path / "broker.conf"
    config.write_text("flushDiskTipe=SYNC_FLUSH\n")
    done = sluice("serve", "-c", str(config))
    assert done.returncode == 2
    assert "flushDiskType" in done.stderr.splitlines()[-1]


def test_a_broker_without_a_nameserver_says_what_to_do(tmp_path: Path) -> None:
    done = sluice("broker", "--directory", str(tmp_path))
    assert done.returncode == 2
    assert "--nameserver-addresses" in done.stderr


def test_sending_without_a_nameserver_says_what_to_do() -> None:
    done = sluice("send", "orders", "hello", "-n", f"127.0.0.1:{free_port()}")
    assert done.returncode == 2
    assert "sluice serve" in done.stderr


def test_tailing_an_unknown_topic_says_what_to_do(tmp_path: Path) -> None:
    with serving(tmp_path, "--listen-port", "0", "--nameserver-port", "0") as (_, lines):
        done = sluice("tail", "nothing", "-n", lines[0].split()[1])
        assert done.returncode == 2
        assert "sluice send" in done.stderr
