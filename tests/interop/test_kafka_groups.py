"""Kafka's Python clients in groups and in transactions: against Sluice, killed and started again,
and beside a real Kafka broker.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from confluent_kafka import Producer, TopicPartition

from peers import PeerUnavailable
from peers.kafka import Kafka
from peers.process import free_ports
from tests.interop.kafka_codes import CODES, Codes, Wire
from tests.interop.kafka_scenarios import (
    LIMIT_S,
    SCENARIOS,
    TRANSACTION_MS,
    Member,
    admin_of_librdkafka,
    make_topic,
    read_all,
    settle,
    wait,
)
from tests.interop.sluice_process import SluiceProcess


class KafkaSluice(SluiceProcess):
    """`sluice serve` for Kafka's clients, with quick groups."""

    def __init__(self, directory: Path) -> None:
        (self.kafka_port,) = free_ports(1)
        super().__init__(
            directory,
            *("--kafka", "on", "--kafka-port", str(self.kafka_port)),
            *("--kafka-initial-rebalance-delay-ms", "0", "--kafka-session-min-ms", "500ms"),
        )

    @property
    def kafka_address(self) -> str:
        return f"127.0.0.1:{self.kafka_port}"


@pytest.fixture(scope="module")
def sluice(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KafkaSluice]:
    """One broker for all tests of the module."""
    with KafkaSluice(tmp_path_factory.mktemp("kafka-groups")) as broker:
        yield broker


@pytest.fixture
def address(sluice: KafkaSluice) -> str:
    """Where Kafka's clients connect to."""
    return sluice.kafka_address


@pytest.mark.parametrize("name", SCENARIOS)
def test_clients_of_python(name: str, address: str) -> None:
    run, expected = SCENARIOS[name]
    # With names of its own at every try.
    assert run(address, uuid4().hex[:8]) == expected


def noted(address: str, word: str) -> dict[str, Any]:
    wire = Wire(address)
    try:
        return Codes(wire, word).all()
    finally:
        wire.close()


def test_refusals_are_kafkas(address: str) -> None:
    assert noted(address, "s") == CODES


def test_administrators_see_the_groups(sluice: KafkaSluice) -> None:
    """`sluice admin` and `sluice top` show them beside the others."""
    topic, group = "seen", "seen by all"
    make_topic(sluice.kafka_address, topic)
    member = Member(sluice.kafka_address, group, topic)
    settle([member], count=4)
    member.consumer.commit(offsets=[TopicPartition(topic, 0, 4)], asynchronous=False)

    def told(*words: str) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "sluice", *words, "-n", sluice.nameserver_address],
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            text=True,
            timeout=LIMIT_S,
            check=True,
        )
        return done.stdout

    rows = json.loads(told("admin", "consumerProgress", "--json"))["groups"]
    (row,) = [each for each in rows if each["group"] == group]
    assert (row["count"], row["consumeType"], row["diffTotal"]) == (1, "KAFKA", 6)
    one = json.loads(told("admin", "consumerProgress", "-g", group, "--json"))
    assert [(each["queueId"], each["diff"]) for each in one["offsetTable"]] == [(0, 6)]
    assert one["members"][0]["memberId"] == member.consumer.memberid()
    assert f"kafka:{group}" in told("top", "--once")
    member.consumer.close()


def test_a_broker_that_is_killed(tmp_path: Path) -> None:
    """Offsets, groups and transactions are as they were; clients go on by themselves."""
    topic, group = "kill", "kill-group"
    with KafkaSluice(tmp_path) as broker:
        address = broker.kafka_address
        make_topic(address, topic)
        member = Member(address, group, topic)
        settle([member], count=4)
        member.consumer.commit(
            offsets=[TopicPartition(topic, p, p + 1) for p in range(4)], asynchronous=False
        )
        settings = {"transactional.id": "kill-tx", "transaction.timeout.ms": TRANSACTION_MS}
        producer = Producer({"bootstrap.servers": address, **settings})
        producer.init_transactions(LIMIT_S)
        producer.begin_transaction()
        producer.produce(topic, b"t1", partition=0)
        producer.commit_transaction(LIMIT_S)
        producer.begin_transaction()
        producer.produce(topic, b"t2", partition=1)
        assert producer.flush(LIMIT_S) == 0
        broker.kill()
        broker.start()
        assert read_all(address, topic, "read_committed") == ["t1"]
        admin = admin_of_librdkafka.AdminClient({"bootstrap.servers": address})
        described = admin.describe_consumer_groups([group])[group].result(LIMIT_S)
        assert [each.member_id for each in described.members] == [member.consumer.memberid()]
        places = member.consumer.committed([TopicPartition(topic, p) for p in range(4)], LIMIT_S)
        assert [place.offset for place in places] == [1, 2, 3, 4]
        producer.commit_transaction(LIMIT_S)
        assert read_all(address, topic, "read_committed") == ["t1", "t2"]
        # The member reads on as one of the same group.
        member.seen.clear()
        last = Producer({"bootstrap.servers": address})
        last.produce(topic, b"last", partition=3)
        assert last.flush(LIMIT_S) == 0

        def read() -> bool:
            member.poll()
            return b"last" in member.seen

        wait("a record after the start", read)
        member.consumer.close()


@pytest.mark.soak
def test_a_kafka_broker_makes_clients_tell_the_same(tmp_path: Path) -> None:
    try:
        broker = Kafka(tmp_path / "kafka", config={"group.min.session.timeout.ms": 500})
    except PeerUnavailable as error:
        pytest.skip(error.reason)
    with broker:
        for name, (run, expected) in SCENARIOS.items():
            assert run(broker.address, "k") == expected, name
        assert noted(broker.address, "k") == CODES
