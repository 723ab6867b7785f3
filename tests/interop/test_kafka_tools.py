"""This module runs the programs that come with Apache Kafka against `sluice serve`: those that
measure, those that verify, and those of administrators.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

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

    def run(self, program: str, *words: str, given: str = "") -> str:
        name = program if program.startswith("kafka.") else f"org.apache.kafka.tools.{program}"
        done = subprocess.run(
            [
                *(java_command(), "-Xmx256m", "-XX:TieredStopAtLevel=1"),
                "-Dorg.slf4j.simpleLogger.defaultLogLevel=error",
                *("-cp", self._jars.class_path, name, *words),
            ],
            input=given,
            capture_output=True,
            text=True,
            timeout=TOOL_TIMEOUT_S,
            check=False,
        )
        assert done.returncode == 0, f"{done.stdout[-1000:]} {done.stderr[-1000:]}"
        return done.stdout

    def asked(self, program: str, *words: str, given: str = "") -> str:
        return self.run(program, "--bootstrap-server", self.address, *words, given=given)

    def topic(self, *words: str) -> str:
        return self.asked("TopicCommand", *words)

    def group(self, *words: str) -> list[list[str]]:
        """The words of each line that tells of groups."""
        said = self.asked("consumer.group.ConsumerGroupCommand", *words)
        return [line.split() for line in said.splitlines() if line.strip()]


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
    broker = ("--bootstrap-server", tools.address, "--entity-type", "brokers", "--entity-name", "1")
    change = ("kafka.admin.ConfigCommand", *broker, "--alter")
    tools.run(*change, "--add-config", "log.cleaner.backoff.ms=15002,message.max.bytes=2000000")
    described = tools.run("kafka.admin.ConfigCommand", *broker, "--describe")
    assert "log.cleaner.backoff.ms=15002" in described
    assert "message.max.bytes=2000000" in described
    tools.run(*change, "--delete-config", "log.cleaner.backoff.ms,message.max.bytes")
    assert "15002" not in tools.run("kafka.admin.ConfigCommand", *broker, "--describe")
    offsets = tools.run("GetOffsetShell", "--bootstrap-server", tools.address, "--topic", "managed")
    assert offsets.split() == ["managed:0:0", "managed:1:0", "managed:2:0"]
    latency = tools.run("EndToEndLatency", tools.address, "managed", "100", "all", "100")
    assert "Avg latency" in latency
    tools.topic("--delete", "--topic", "managed")
    assert "managed" not in tools.topic("--list").split()


def _pairs(option: str, *pairs: str) -> list[str]:
    return [word for pair in pairs for word in (option, pair)]


def test_the_programs_of_the_console(tools: Tools, tmp_path: Path) -> None:
    topic = f"typed.{tmp_path.name}"  # another one when it is tried again
    tools.topic("--create", "--topic", topic, "--partitions", "1")
    reading = _pairs("--reader-property", "parse.key=true", "key.separator=:")
    tools.asked("ConsoleProducer", "--topic", topic, *reading, given="a:1\nb:2\n")
    headers = _pairs("--reader-property", "parse.headers=true")
    tools.asked(
        *("ConsoleProducer", "--topic", topic, *reading, *headers),
        *("--compression-codec", "zstd", "--sync"),
        given="h1:x,h2:y\tc:3\n",
    )
    said = tools.asked(
        *("consumer.ConsoleConsumer", "--topic", topic, "--from-beginning"),
        *("--max-messages", "3", "--group", "typists"),
        *_pairs(
            *("--formatter-property", "print.key=true", "print.headers=true", "print.offset=true"),
        ),
    )
    assert said.splitlines() == [
        "Offset:0\tNO_HEADERS\ta\t1",
        "Offset:1\tNO_HEADERS\tb\t2",
        "Offset:2\th1:x,h2:y\tc\t3",
    ]


def test_the_program_of_consumer_groups(tools: Tools, tmp_path: Path) -> None:
    topic, group = f"grouped.{tmp_path.name}", ("--group", "readers")
    tools.topic("--create", "--topic", topic, "--partitions", "1")
    tools.asked("ConsoleProducer", "--topic", topic, given="1\n2\n3\n")
    tools.asked(
        *("consumer.ConsoleConsumer", "--topic", topic, "--from-beginning"),
        *("--max-messages", "3", *group),
    )

    def places() -> list[str]:
        """Topic, partition, offset, end, lag."""
        return tools.group("--describe", *group)[-1][1:6]

    assert ["readers", "Empty"] in tools.group("--list", "--state")
    assert ["readers", "Classic"] in tools.group("--list", "--type")
    assert places() == [topic, "0", "3", "3", "0"]
    state = tools.group("--describe", *group, "--state")[-1]
    assert (state[0], state[-2:]) == ("readers", ["Empty", "0"])
    reset = ("--reset-offsets", "--topic", topic, "--execute")
    assert tools.group(*group, *reset, "--to-earliest")[-1] == ["readers", topic, "0", "0"]
    assert tools.group(*group, *reset, "--shift-by", "2")[-1] == ["readers", topic, "0", "2"]
    assert places() == [topic, "0", "2", "3", "1"]
    deleted = tools.group(*group, "--delete-offsets", "--topic", topic)
    assert deleted[-1] == [topic, "0", "Successful"]
    tools.group(*group, "--delete")
    assert ["readers"] not in tools.group("--list")


def test_programs_of_administrators_for_records_and_transactions(
    tools: Tools, tmp_path: Path
) -> None:
    topic = f"cut.{tmp_path.name}"
    config = ("--topic", topic, "--partitions", "1", "--config", "segment.bytes=2000000")
    tools.topic("--create", *config)
    tools.asked("ConsoleProducer", "--topic", topic, given="1\n2\n3\n")
    cut = {"version": 1, "partitions": [{"topic": topic, "partition": 0, "offset": 2}]}
    (tmp_path / "cut.json").write_text(json.dumps(cut))
    said = tools.asked("DeleteRecordsCommand", "--offset-json-file", str(tmp_path / "cut.json"))
    assert "low_watermark: 2" in said
    for when, expected in (("earliest", 2), ("latest", 3), ("earliest-local", 2)):
        found = tools.asked("GetOffsetShell", "--topic", topic, "--time", when)
        assert found.split() == [f"{topic}:0:{expected}"], when
    described = tools.asked(
        *("kafka.admin.ConfigCommand", "--entity-type", "topics", "--entity-name", topic),
        "--describe",
    )
    assert "{DYNAMIC_TOPIC_CONFIG:segment.bytes=2000000, DEFAULT_CONFIG:log.segment.bytes=" in (
        described
    )
    assert tools.asked("TransactionsCommand", "find-hanging", "--broker-id", "1").count("\n") == 1
    assert f'"partition":"{topic}-0"' in tools.asked(
        "LogDirsCommand", "--describe", "--topic-list", topic
    )
    assert "Fetch(1): 4 to 18" in tools.asked("BrokerApiVersionsCommand")
