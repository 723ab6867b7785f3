"""`sluice serve` on the network: the addresses that clients get, TLS, and a stop under load."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from sluice.net import own_address
from tests.certificates import self_signed
from tests.unit.test_serve import WAIT_SECONDS, free_port, serving, sluice

EVERYWHERE = "0.0.0.0"  # noqa: S104
FREE_PORTS = ("--listen-port", "0", "--nameserver-port", "0")


def test_who_dials_one_address_of_the_machine_stays_with_it(tmp_path: Path) -> None:
    flags = ("--listen-host", EVERYWHERE, "--auto-create-topics", *FREE_PORTS)
    with serving(tmp_path, *flags) as (_, lines):
        listens, port = lines[0].split()[1].rsplit(":", 1)
        assert listens == EVERYWHERE
        shown = lines[4].split()[-1]
        assert shown == f"{own_address()}:{port}"
        for number, host in enumerate(("127.0.0.1", "127.0.0.2", own_address())):
            sent = sluice("send", f"orders{number}", host, "-n", f"{host}:{port}")
            assert sent.returncode == 0, sent.stderr
        seen = sluice(
            *("tail", "orders1", "-n", f"127.0.0.1:{port}"), "--from-beginning", "--count", "1"
        )
        assert seen.stdout.rstrip().endswith("127.0.0.2")


def test_a_stranger_makes_no_topic(tmp_path: Path) -> None:
    with serving(tmp_path, "--listen-host", EVERYWHERE, *FREE_PORTS) as (_, lines):
        port = lines[0].rsplit(":", 1)[1]
        sent = sluice("send", "orders", "hello", "-n", f"127.0.0.1:{port}")
        assert sent.returncode == 2
        assert "auto_create_topics is off" in sent.stderr


def test_serve_with_tls_required_and_our_own_tools(tmp_path: Path) -> None:
    certificate = self_signed(tmp_path, "server")
    flags = (
        *("--tls-mode", "enforcing", "--tls-certificate-file", certificate.file),
        *("--tls-key-file", certificate.key_file, *FREE_PORTS),
    )
    with serving(tmp_path, *flags) as (process, lines):
        at = ("-n", lines[0].split()[1])
        sent = sluice("send", "orders", "in secret", *at, "--tls-ca", certificate.file)
        assert sent.returncode == 0, sent.stderr
        plain = sluice("send", "orders", "in the open", *at)
        assert plain.returncode == 2
        assert "no nameserver answers" in plain.stderr
        unknown = sluice("send", "orders", "to a stranger", *at, "--tls")
        assert unknown.returncode == 2
        assert "certificate verify failed" in unknown.stderr
        seen = sluice(
            *("tail", "orders", *at, "--from-beginning", "--count", "1"),
            variables={"SLUICE_CLIENT_TLS_CA": certificate.file},
        )
        assert seen.stdout.rstrip().endswith("in secret")
        process.send_signal(signal.SIGTERM)
        assert process.wait(WAIT_SECONDS) == 0


@pytest.mark.parametrize("command", ["serve", "broker", "nameserver"])
def test_a_certificate_that_cannot_be_used_is_one_line(tmp_path: Path, command: str) -> None:
    (tmp_path / "junk.pem").write_text("junk")
    where = {
        "serve": ("--directory", str(tmp_path / "data"), *FREE_PORTS),
        "broker": (
            *("--directory", str(tmp_path / "data"), "--listen-port", "0"),
            *("--nameserver-addresses", "127.0.0.1:9"),
        ),
        "nameserver": ("--listen-port", "0"),
    }
    for file, reason in ((tmp_path / "missing.pem", "No such file"), (tmp_path / "junk.pem", "")):
        done = sluice(command, *where[command], "--tls-certificate-file", str(file))
        assert done.returncode == 2
        assert done.stderr.count("\n") == 1
        assert f"{file}: cannot be used for TLS: {reason}" in done.stderr
    done = sluice(command, *where[command], "--tls-mode", "enforcing")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "tls_mode=enforcing needs tls_certificate_file" in done.stderr
    assert not (tmp_path / "data" / "commitlog").exists()


def test_sigterm_under_load_loses_nothing_that_was_acknowledged(tmp_path: Path) -> None:
    flags = ("--listen-port", str(free_port()), "--nameserver-port", str(free_port()))
    with serving(tmp_path, *flags) as (process, lines):
        at = ("-n", lines[0].split()[1])
        assert sluice("send", "orders", "first", *at).returncode == 0
        sender = subprocess.Popen(
            [sys.executable, "-m", "sluice", "send", "orders", *at, "--json"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        assert sender.stdin is not None
        assert sender.stdout is not None
        sender.stdin.write("".join(f"message {number}\n" for number in range(50_000)))
        sender.stdin.close()
        acknowledged = [sender.stdout.readline() for _ in range(100)]
        process.send_signal(signal.SIGTERM)
        assert process.wait(WAIT_SECONDS) == 0
        acknowledged += sender.stdout.readlines()
        assert sender.wait(WAIT_SECONDS) == 2, "the broker was gone before all was sent"
        sender.stdout.close()
    assert 100 <= len(acknowledged) < 50_000
    places = {(row["queue_id"], row["queue_offset"]) for row in map(json.loads, acknowledged)}
    with serving(tmp_path, *flags) as (_, lines):
        count = str(len(places) + 1)
        seen = sluice("tail", "orders", *at, "--from-beginning", "--count", count, "--json")
        rows = [json.loads(line) for line in seen.stdout.splitlines()]
    found = {(row["queue_id"], row["queue_offset"]) for row in rows}
    assert places <= found
