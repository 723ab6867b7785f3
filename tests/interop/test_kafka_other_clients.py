"""This module runs one scenario with Kafka clients of other languages: Java 4.3 and 3.9, franz-go
and sarama (Go), kafkajs and node-rdkafka (Node.js), and kcat. All of them tell the same of Sluice
and of Apache Kafka 4.3.0.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from peers import ARTIFACT_SETS, GoPrograms, JavaPrograms, PeerUnavailable, RunningProgram, fetch
from peers.debian import kcat
from peers.kafka import Kafka
from peers.node import KAFKAJS, NODE_RDKAFKA, NodePrograms
from tests.interop import kafka_outcomes
from tests.interop.kafka_kcat import Kcat
from tests.interop.test_kafka_groups import KafkaSluice

HERE = Path(__file__).parent
LIMIT_S = 400.0
JAVA_OPTIONS = ("-Dorg.slf4j.simpleLogger.defaultLogLevel=warn",)

Started = contextlib.AbstractContextManager[RunningProgram]
Starter = Callable[[str, str, Path], Started]  # of the broker's address, a word, a folder


class Client(NamedTuple):
    start: Starter
    outcome: dict[str, Any]


def go(client: str, address: str, word: str, home: Path) -> Started:
    return GoPrograms(HERE / "kafka_go", home=home).started("scenario", client, address, word)


def kafkajs(address: str, word: str, home: Path) -> Started:
    programs = NodePrograms(HERE / "kafka_node", KAFKAJS, home=home)
    return programs.started("scenario", "scenario", "kafkajs", address, word)


def node_rdkafka(address: str, word: str, home: Path, *, compiles: bool = False) -> Started:
    programs = NodePrograms(HERE / "kafka_node", NODE_RDKAFKA, home=home, compiles=compiles)
    return programs.started("scenario", "scenario", "node-rdkafka", address, word)


def java(jars: str, address: str, word: str, home: Path) -> Started:
    programs = JavaPrograms(
        HERE / "kafka_java", fetch(ARTIFACT_SETS[jars]), home=home, options=JAVA_OPTIONS
    )
    return programs.started("Groups", address, word)


CLIENTS = {
    "java-4.3": Client(partial(java, "kafka-4.3.0"), kafka_outcomes.JAVA),
    "java-3.9": Client(partial(java, "kafka-clients-3.9.1"), kafka_outcomes.JAVA),
    "franz-go": Client(partial(go, "franz-go"), kafka_outcomes.FRANZ),
    "sarama": Client(partial(go, "sarama"), kafka_outcomes.SARAMA),
    "kafkajs": Client(kafkajs, kafka_outcomes.KAFKAJS),
    "node-rdkafka": Client(node_rdkafka, kafka_outcomes.NODE_RDKAFKA),
}


class Runs:
    """The clients' programs, all of them under way at once: most of their time they wait."""

    def __init__(self, address: str, home: Path, stack: contextlib.ExitStack) -> None:
        self.address = address
        self._home = home
        self._stack = stack
        self._running: dict[str, RunningProgram] = {}
        self._unavailable: dict[str, str] = {}
        self._words = 0

    def start(self, name: str, start: Starter) -> None:
        self._words += 1
        home = self._home / f"{name}-{self._words}"
        self._unavailable.pop(name, None)
        try:
            program = start(self.address, f"s{self._words}", home)
            self._running[name] = self._stack.enter_context(program)
        except PeerUnavailable as error:
            self._unavailable[name] = error.reason

    def outcome(self, name: str, start: Starter) -> dict[str, Any]:
        """What a client's program tells; one that has told already begins anew."""
        if name not in self._running:
            self.start(name, start)
        if name in self._unavailable:
            pytest.skip(self._unavailable[name])
        events = self._running.pop(name).finish(LIMIT_S)
        return {event["event"]: event["value"] for event in events}


@pytest.fixture(scope="module")
def sluice(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KafkaSluice]:
    """One broker for all clients."""
    with KafkaSluice(tmp_path_factory.mktemp("kafka-others")) as broker:
        yield broker


@pytest.fixture(scope="module")
def runs(sluice: KafkaSluice, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    with contextlib.ExitStack() as stack:
        runs = Runs(sluice.kafka_address, tmp_path_factory.mktemp("clients"), stack)
        for name, client in CLIENTS.items():
            runs.start(name, client.start)
        yield runs


def test_kcat(runs: Runs, tmp_path: Path) -> None:
    """First of all: meanwhile the others go on."""
    try:
        tool = kcat()
    except PeerUnavailable as error:
        pytest.skip(error.reason)
    word = tmp_path.name  # another one when it is tried again
    assert Kcat(tool, runs.address, word, tmp_path / "kcat").all() == kafka_outcomes.KCAT


@pytest.mark.parametrize("name", CLIENTS)
def test_clients_of_other_languages(runs: Runs, name: str) -> None:
    client = CLIENTS[name]
    assert runs.outcome(name, client.start) == client.outcome


@pytest.mark.soak
def test_node_rdkafka_even_if_it_has_to_be_compiled(runs: Runs) -> None:
    start = partial(node_rdkafka, compiles=True)
    assert runs.outcome("node-rdkafka", start) == kafka_outcomes.NODE_RDKAFKA


@pytest.fixture(scope="module")
def apache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kafka]:
    directory = tmp_path_factory.mktemp("apache")
    try:
        broker = Kafka(directory, config={"group.min.session.timeout.ms": 500})
    except PeerUnavailable as error:
        pytest.skip(error.reason)
    with broker:
        yield broker


@pytest.mark.soak
@pytest.mark.parametrize("name", [*CLIENTS, "kcat"])
def test_apaches_broker_makes_them_tell_the_same(apache: Kafka, name: str, tmp_path: Path) -> None:
    word = tmp_path.name
    try:
        if name == "kcat":
            told = Kcat(kcat(), apache.address, word, tmp_path).all()
            assert told == kafka_outcomes.KCAT
            return
        starter = CLIENTS[name].start
        if name == "node-rdkafka":
            starter = partial(node_rdkafka, compiles=True)
        with starter(apache.address, word, tmp_path) as program:
            events = program.finish(LIMIT_S)
    except PeerUnavailable as error:
        pytest.skip(error.reason)
    assert {event["event"]: event["value"] for event in events} == CLIENTS[name].outcome
