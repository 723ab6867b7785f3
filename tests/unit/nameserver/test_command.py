"""This module tests `sluice nameserver` as people start and stop it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from sluice.cli import main

ROOT = Path(__file__).parents[3]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT / "src")}


@contextmanager
def started(*arguments: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A running nameserver and its address."""
    command = [sys.executable, "-m", "sluice", "nameserver", *arguments]
    process = subprocess.Popen(
        command, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        words = process.stdout.readline().split()
        assert words[:-1] == ["nameserver", "listens", "on"]
        yield process, words[-1]
    finally:
        process.kill()
        process.communicate()


def answer_to_106(address: str) -> bytes:
    host, _, port = address.rpartition(":")
    header = b'{"code":106,"flag":0,"opaque":1}'
    question = (4 + len(header)).to_bytes(4, "big") + len(header).to_bytes(4, "big") + header
    with socket.create_connection((host, int(port)), timeout=30) as connection:
        connection.sendall(question)
        connection.shutdown(socket.SHUT_WR)
        return connection.makefile("rb").read()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_it_says_where_it_listens_answers_and_stops_on_a_signal(number: signal.Signals) -> None:
    with started("--listen-port", "0") as (process, address):
        assert address.startswith("127.0.0.1:")
        assert b'"clusterAddrTable":{}' in answer_to_106(address)
        process.send_signal(number)
        output, errors = process.communicate(timeout=30)
        assert (process.returncode, output) == (0, "")
        assert "Traceback" not in errors


def test_a_port_in_use_is_one_line_and_2(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["nameserver", "--listen-port", str(port)]) == 2
    error = capsys.readouterr().err
    wanted = f"127.0.0.1:{port} is in use; choose another port (--listen-port)"
    assert error == f"sluice: {wanted}\n"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--listen-port", "x"], "--listen-port: 'x' is not a whole number"),
        (["--scan-interval-ms", "0"], "--scan-interval-ms"),
        (["--config", "missing.toml"], "missing.toml: cannot be read"),
        (["--directory", "/dev/null/x"], "/dev/null/x"),
        (["--tls-mode", "enforcing"], "needs tls_certificate_file"),
    ],
)
def test_a_bad_setting_is_one_line_and_2(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["nameserver", "--listen-port", "0", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert words in captured.err


def test_settings_come_from_a_file_and_flags_win(tmp_path: Path) -> None:
    path = tmp_path / "namesrv.conf"
    path.write_text("listenPort=1\nkvConfigPath=/nowhere\n", encoding="ascii")
    directory = tmp_path / "data"
    flags = ("-c", str(path), "--listen-port", "0", "--directory", str(directory))
    with started(*flags) as (process, _):
        process.terminate()
        _, errors = process.communicate(timeout=30)
        assert "no effect here: kvConfigPath" in errors
        assert [entry.name for entry in directory.iterdir()] == ["lock"]
