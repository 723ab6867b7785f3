"""Kafka's Python clients in groups and in transactions: against Sluice, killed and started again,
and beside a real Kafka broker.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from confluent_kafka import KafkaError, KafkaException, Producer, TopicPartition

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


class Transactor(threading.Thread):
    """Writes one number to two partitions in each transaction, whatever happens to the broker."""

    def __init__(self, address: str, topic: str) -> None:
        super().__init__(daemon=True)
        self.settings = {
            "bootstrap.servers": address,
            "transactional.id": "under-fire",
            "transaction.timeout.ms": 10_000,
        }
        self._topic = topic
        self.committed: list[int] = []  # of which the producer was told
        self.tried = 0
        self.stopping = threading.Event()
        self.error: Exception | None = None

    def run(self) -> None:
        try:
            while not self.stopping.is_set():
                self._work()
        except Exception as error:  # shown by the test, which would not see it here
            self.error = error

    def _work(self) -> None:
        """One producer, until it is no good any more."""
        producer = Producer(self.settings)
        self._insist(lambda: producer.init_transactions(30))
        while not self.stopping.is_set():
            number = self.tried
            self.tried += 1
            producer.begin_transaction()
            try:
                for partition in (0, 1):
                    producer.produce(self._topic, b"t%d" % number, partition=partition)
                self._insist(lambda: producer.commit_transaction(30))
                self.committed.append(number)
            except KafkaException as error:
                if not error.args[0].txn_requires_abort():
                    return
                try:
                    self._insist(lambda: producer.abort_transaction(30))
                except KafkaException:
                    return

    def _insist(self, ask: Callable[[], None]) -> None:
        for _ in range(20):
            try:
                ask()
            except KafkaException as error:
                cause: KafkaError = error.args[0]
                if not cause.retriable():
                    raise
            else:
                return


@pytest.mark.soak
def test_kills_under_transactions(tmp_path: Path) -> None:
    """No transaction is lost, seen twice, or seen by half, however often the broker is killed."""
    rounds = int(os.environ.get("SLUICE_KAFKA_KILLS", "10"))
    with KafkaSluice(tmp_path) as broker:
        address, topic = broker.kafka_address, "under-fire"
        make_topic(address, topic)
        worker = Transactor(address, topic)
        worker.start()
        for number in range(rounds):
            before = len(worker.committed)
            wait("some commits", partial(_more, worker, before + 5 + number % 7))
            broker.kill()
            broker.start()
        worker.stopping.set()
        worker.join(LIMIT_S)
        assert worker.error is None
        last = Producer(worker.settings)
        last.init_transactions(LIMIT_S)  # whatever is open is rolled back
        seen = Counter(int(value[1:]) for value in read_all(address, topic, "read_committed"))
        assert set(seen.values()) == {2}, "each number once in each of two partitions"
        assert set(worker.committed) <= set(seen)
        assert len(worker.committed) >= 5 * rounds


def _more(worker: Transactor, count: int) -> bool:
    assert worker.error is None, worker.error
    return len(worker.committed) >= count
