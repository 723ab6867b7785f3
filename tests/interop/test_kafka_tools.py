"""This module runs the programs that come with Apache Kafka against `sluice serve`: those that
measure, those that verify, and those of administrators.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator

import pytest

from peers import Jars, PeerUnavailable, fetch
from peers.artifacts import KAFKA
from peers.java import java_command
from peers.process import free_ports
from tests.interop.sluice_process import SluiceProcess

TOOL_TIMEOUT_S = 300
pytestmark = pytest.mark.soak


class Tools:
    """Kafka's programs and the broker that they are pointed at."""

    def __init__(self, jars: Jars, address: str) -> None:
        self._jars = jars
        self.address = address

    def run(self, program: str, *words: str) -> str:
        name = program if "." in program else f"org.apache.kafka.tools.{program}"
        done = subprocess.run(
            [
                *(java_command(), "-Xmx256m", "-XX:TieredStopAtLevel=1"),
                "-Dorg.slf4j.simpleLogger.defaultLogLevel=error",
                *("-cp", self._jars.class_path, name, *words),
            ],
            capture_output=True,
            text=True,
            timeout=TOOL_TIMEOUT_S,
            check=False,
        )
        assert done.returncode == 0, f"{done.stdout[-1000:]} {done.stderr[-1000:]}"
        return done.stdout

    def topic(self, *words: str) -> str:
        return self.run("TopicCommand", "--bootstrap-server", self.address, *words)


@pytest.fixture(scope="module")
def tools(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tools]:
    try:
        jars = fetch(KAFKA)
    except PeerUnavailable as error:
        pytest.skip(error.reason)
    (port,) = free_ports(1)
    directory = tmp_path_factory.mktemp("kafka-tools")
    with SluiceProcess(directory, "--kafka", "on", "--kafka-port", str(port)):
        yield Tools(jars, f"127.0.0.1:{port}")


@pytest.mark.parametrize("codec", ["none", "gzip", "snappy", "lz4", "zstd"])
def test_the_programs_that_measure(tools: Tools, codec: str) -> None:
    topic = f"perf.{codec}"
    tools.topic("--create", "--topic", topic, "--partitions", "4")
    said = tools.run(
        *("ProducerPerformance", "--topic", topic, "--num-records", "20000"),
        *("--record-size", "200", "--throughput", "-1", "--producer-props"),
        *(f"bootstrap.servers={tools.address}", "acks=all", f"compression.type={codec}"),
    )
    assert "20000 records sent" in said
    said = tools.run(
        *("ConsumerPerformance", "--bootstrap-server", tools.address, "--topic", topic),
        *("--num-records", "20000"),
    )
    assert int(said.strip().splitlines()[-1].split(",")[4]) == 20_000


def test_the_programs_that_verify(tools: Tools) -> None:
    tools.topic("--create", "--topic", "verified", "--partitions", "1")
    said = tools.run(
        *("VerifiableProducer", "--bootstrap-server", tools.address, "--topic", "verified"),
        *("--max-messages", "1000", "--acks", "-1"),
    )
    events = [json.loads(line) for line in said.splitlines() if line.startswith("{")]
    sent = [event["value"] for event in events if event["name"] == "producer_send_success"]
    assert sent == [str(number) for number in range(1000)]
    said = tools.run(
        *("VerifiableConsumer", "--bootstrap-server", tools.address, "--topic", "verified"),
        *("--group-id", "verifiers", "--max-messages", "1000", "--reset-policy", "earliest"),
        "--verbose",
    )
    events = [json.loads(line) for line in said.splitlines() if line.startswith("{")]
    read = [event["value"] for event in events if event["name"] == "record_data"]
    assert read == sent


def test_the_programs_of_administrators(tools: Tools) -> None:
    tools.topic("--create", "--topic", "managed", "--partitions", "2")
    tools.topic("--alter", "--topic", "managed", "--partitions", "3")
    described = tools.topic("--describe", "--topic", "managed")
    assert "PartitionCount: 3" in described
    assert "managed" in tools.topic("--list")
    config = (
        *("--bootstrap-server", tools.address, "--entity-type", "topics"),
        *("--entity-name", "managed"),
    )
    tools.run(
        "kafka.admin.ConfigCommand", *config, "--alter", "--add-config", "retention.ms=100000"
    )
    assert "retention.ms=100000" in tools.run("kafka.admin.ConfigCommand", *config, "--describe")
    offsets = tools.run("GetOffsetShell", "--bootstrap-server", tools.address, "--topic", "managed")
    assert offsets.split() == ["managed:0:0", "managed:1:0", "managed:2:0"]
    latency = tools.run("EndToEndLatency", tools.address, "managed", "100", "all", "100")
    assert "Avg latency" in latency
    tools.topic("--delete", "--topic", "managed")
    assert "managed" not in tools.topic("--list").split()
