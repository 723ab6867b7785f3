"""This module tests the metrics of real processes: where they are, and what they say."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from sluice.config import BrokerConfig, NameserverConfig, loads, to_properties
from tests.unit.prometheus_text import Read, read_page

WAIT_SECONDS = 60
ENVIRONMENT = {**os.environ, "SLUICE_METRICS": "true", "SLUICE_NAMESERVER_METRICS": "true"}
_METRICS = re.compile(r"http://([0-9.:]+)/metrics")


@contextmanager
def process(*arguments: str, last_line: str) -> Iterator[str]:
    """What a `sluice` command prints until it is ready."""
    running = subprocess.Popen(
        [sys.executable, "-m", "sluice", *arguments],
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert running.stdout is not None
    try:
        lines: list[str] = []
        while not lines or not lines[-1].startswith(last_line):
            lines.append(running.stdout.readline())
            assert lines[-1], f"it ended after {lines}"
        yield "".join(lines)
        running.terminate()
        assert running.wait(WAIT_SECONDS) == 0
    finally:
        running.kill()
        running.wait(WAIT_SECONDS)
        running.stdout.close()


def ask(address: str, path: str) -> tuple[int, str]:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(f"http://{address}{path}", timeout=WAIT_SECONDS) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def page_at(output: str) -> tuple[str, Read]:
    found = _METRICS.search(output)
    assert found is not None, output
    status, text = ask(found[1], "/metrics")
    assert status == 200
    return found[1], read_page(text)


def test_serve_says_where_its_metrics_are_and_they_have_everything(tmp_path: Path) -> None:
    flags = ("--directory", str(tmp_path / "data"), "--listen-port", "0", "--nameserver-port", "0")
    with process("serve", *flags, "--metrics-port", "0", last_line="try it:") as output:
        assert output.splitlines()[2].startswith("metrics     http://127.0.0.1:")
        address, read = page_at(output)
        assert read.value("sluice_nameserver_brokers") == 1
        assert read.value("sluice_nameserver_clusters") == 1
        assert read.value("sluice_nameserver_connections") == 1
        assert read.value("sluice_nameserver_topics") == read.value("sluice_topics")
        assert read.value("sluice_nameserver_routes") == read.value("sluice_topics")
        assert read.value("sluice_nameservers", state="registered") == 1
        assert read.value("sluice_nameservers", state="failed") == 0
        assert read.value("sluice_store_read_only") == 0
        (labels,) = read.labelled("sluice_build_info")
        assert {name for name, _ in labels} == {"version", "python"}
        assert read.value("process_cpu_seconds_total") > 0
        assert read.value("process_resident_memory_bytes") > 1_000_000
        assert 0 < read.value("process_open_fds") < read.value("process_max_fds")
        assert ask(address, "/healthz") == (200, "ok\n")


def test_a_nameserver_and_a_broker_apart_have_metrics_of_their_own(tmp_path: Path) -> None:
    flags = ("--listen-port", "0", "--metrics-port", "0")
    with process("nameserver", *flags, last_line="metrics on ") as output:
        nameserver = output.split()[3]
        broker = ("--nameserver-addresses", nameserver, "--directory", str(tmp_path / "data"))
        with process("broker", *flags, *broker, last_line="metrics ") as broker_output:
            _, read = page_at(broker_output)
            assert read.value("sluice_log_files") == 1
            assert "sluice_nameserver_brokers" not in read.kinds
            address, read = page_at(output)
            assert "sluice_nameserver_brokers" in read.kinds
            assert "sluice_log_files" not in read.kinds
            assert ask(address, "/healthz") == (200, "ok\n")


@pytest.mark.parametrize(
    "command",
    [
        ["serve", "--nameserver-port", "0"],
        ["broker", "--nameserver-addresses", "127.0.0.1:9"],
        ["nameserver"],
    ],
    ids=lambda command: command[0],
)
def test_a_port_in_use_is_one_line_with_the_flag_and_exit_code_2(
    command: list[str], tmp_path: Path
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        store = tmp_path / "data"
        done = subprocess.run(
            [
                *(sys.executable, "-m", "sluice", *command),
                *("--directory", str(store), "--listen-port", "0", "--metrics-port", port),
            ],
            env=ENVIRONMENT,
            capture_output=True,
            text=True,
            timeout=WAIT_SECONDS,
            check=False,
        )
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1] == (
        f"sluice: 127.0.0.1:{port} is in use; choose another port (--metrics-port)"
    )
    assert not store.exists(), "a port that is taken harms no store"


def test_metrics_can_be_left_out(tmp_path: Path) -> None:
    flags = ("--directory", str(tmp_path / "data"), "--listen-port", "0", "--nameserver-port", "0")
    with process("serve", *flags, "--no-metrics", last_line="try it:") as output:
        assert _METRICS.search(output) is None


def test_rocketmqs_names_are_read() -> None:
    def conf(text: str) -> BrokerConfig:
        loaded = loads(BrokerConfig, text, "broker.conf")
        assert loaded.warnings == ()
        return loaded.config

    assert conf("metricsPromExporterPort=5560").metrics_port == 5560
    assert conf("metricsPromExporterHost=10.0.0.1").metrics_host == "10.0.0.1"
    assert conf("metricsPromExporterHost=").metrics_host == "127.0.0.1"
    assert conf("metricsExporterType=DISABLE").metrics is False
    assert conf("metricsExporterType=PROM").metrics is True
    assert conf("metricsExporterType=OTLP_GRPC").metrics is True
    assert "metricsPromExporterPort=5557" in to_properties(BrokerConfig())


def test_both_listen_on_loopback_and_apart_from_each_other() -> None:
    broker, nameserver = BrokerConfig(), NameserverConfig()
    assert (broker.metrics_host, nameserver.metrics_host) == ("127.0.0.1", "127.0.0.1")
    assert broker.metrics_port != nameserver.metrics_port
