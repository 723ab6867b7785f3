"""Kafka's producers while their broker is killed again and again: nothing is lost, nothing is there
twice, and no transaction is seen by half.

One producer sends numbers, idempotent; another one writes each number to two partitions in a
transaction, together with an offset of a group. Both go on by themselves whatever happens to the
broker, as applications do.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Consumer, KafkaError, KafkaException, Producer, TopicPartition

from tests.interop.kafka_scenarios import make_topic
from tests.interop.test_kafka_groups import KafkaSluice

KILLS = 100
LIMIT_S = 240.0
REQUEST_LIMIT_S = 30.0
GROUP = "under-fire-readers"
SENT, TRANSACTED = "sent", "transacted"
PARTITIONS = {SENT: 4, TRANSACTED: 2}
BURST = 10  # numbers that are sent one after the other
BURST_PAUSE_S = 0.005
WINDOW = 200  # of them under way at most


def wait_until(what: str, condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline, f"waited in vain for {what}"
        time.sleep(0.01)


class Worker(threading.Thread):
    """A producer at work until it is told to stop; what went wrong is kept for the test."""

    def __init__(self, address: str, **settings: Any) -> None:
        super().__init__(daemon=True)
        self.settings: dict[str, Any] = {
            "bootstrap.servers": address,
            # It must not sleep while the broker is back, or little would happen between kills.
            "reconnect.backoff.max.ms": 200,
            # By default librdkafka 2.16 forgets all brokers when none can be reached, and its
            # offsets of transactions then wait for one of the forgotten ones, for ever.
            "metadata.recovery.strategy": "none",
            **{name.replace("_", "."): value for name, value in settings.items()},
        }
        self.stopping = threading.Event()
        self.error: Exception | None = None
        self.tried = 0

    def run(self) -> None:
        try:
            while not self.stopping.is_set():
                self.work()
        except Exception as error:  # shown by the test, which would not see it here
            self.error = error

    def work(self) -> None:
        raise NotImplementedError

    def done_count(self) -> int:
        raise NotImplementedError

    def wait_for(self, count: int) -> None:
        """So many more are done."""
        goal = self.done_count() + count

        def is_there() -> bool:
            assert self.error is None, self.error
            return self.done_count() >= goal

        wait_until(f"{goal} by {type(self).__name__}", is_there)

    def stop(self) -> None:
        self.stopping.set()
        self.join(LIMIT_S)
        assert not self.is_alive()
        assert self.error is None, self.error


class Sender(Worker):
    """Sends numbers, each once, and notes where it was told that they are."""

    def __init__(self, address: str) -> None:
        super().__init__(address, enable_idempotence=True, linger_ms=1)
        self.places: dict[int, tuple[int | None, int | None]] = {}

    def work(self) -> None:
        producer: Any = Producer(self.settings)
        while not self.stopping.wait(BURST_PAUSE_S):
            for number in range(self.tried, self.tried + BURST):
                place = {"topic": SENT, "partition": number % PARTITIONS[SENT]}
                told = partial(self._told, number)
                producer.produce(**place, value=b"%d" % number, on_delivery=told)
            self.tried += BURST
            producer.poll(0)
            while len(producer) > WINDOW and not self.stopping.is_set():
                producer.poll(0.05)
        assert producer.flush(LIMIT_S) == 0

    def _told(self, number: int, error: KafkaError | None, message: Any) -> None:
        assert error is None, f"{number}: {error}"
        assert number not in self.places
        self.places[number] = (message.partition(), message.offset())

    def done_count(self) -> int:
        return len(self.places)


class Transactor(Worker):
    """Writes one number to two partitions and to a group's offset in each transaction."""

    def __init__(self, address: str) -> None:
        # Long, so that a machine that stands still does not end a transaction.
        super().__init__(address, transactional_id="under-fire", transaction_timeout_ms=60_000)
        self.committed: list[int] = []  # of which the producer was told
        reader = Consumer({"bootstrap.servers": address, "group.id": GROUP})
        self._group = reader.consumer_group_metadata()

    def work(self) -> None:
        """One producer, until it is no good any more."""
        producer = Producer(self.settings)
        _insist(lambda: producer.init_transactions(REQUEST_LIMIT_S))
        while not self.stopping.is_set():
            number = self.tried
            self.tried += 1
            producer.begin_transaction()
            try:
                self._transact(producer, number)
            except KafkaException as error:
                if not error.args[0].txn_requires_abort():
                    return
                try:
                    _insist(lambda: producer.abort_transaction(REQUEST_LIMIT_S))
                except KafkaException:
                    return

    def _transact(self, producer: Producer, number: int) -> None:
        for partition in range(PARTITIONS[TRANSACTED]):
            producer.produce(TRANSACTED, b"%d" % number, partition=partition)
        offsets = [TopicPartition(TRANSACTED, 0, number)]
        _insist(lambda: producer.send_offsets_to_transaction(offsets, self._group, REQUEST_LIMIT_S))
        _insist(lambda: producer.commit_transaction(REQUEST_LIMIT_S))
        self.committed.append(number)

    def done_count(self) -> int:
        return len(self.committed)


def _insist(ask: Callable[[], None]) -> None:
    """Ask again as long as the producer says that this is of use."""
    for _ in range(20):
        try:
            ask()
        except KafkaException as error:
            cause: KafkaError = error.args[0]
            if not cause.retriable():
                raise
        else:
            return


def read_committed(address: str, topic: str) -> dict[int, list[tuple[int, int]]]:
    """Offsets and numbers that a reader of committed records sees, by partition."""
    consumer = Consumer(
        {
            "bootstrap.servers": address,
            "group.id": "readers-of-all",
            "isolation.level": "read_committed",
            "enable.auto.commit": False,
            "enable.partition.eof": True,
        }
    )
    found: dict[int, list[tuple[int, int]]] = {p: [] for p in range(PARTITIONS[topic])}
    consumer.assign([TopicPartition(topic, partition, 0) for partition in found])
    ended: set[int | None] = set()
    deadline = time.monotonic() + LIMIT_S
    while len(ended) < len(found):
        assert time.monotonic() < deadline, f"{topic} has no end"
        for message in consumer.consume(1000, 0.1):
            partition, offset, value = message.partition(), message.offset(), message.value()
            if message.error() is not None:
                ended.add(partition)
            else:
                assert partition is not None
                assert offset is not None
                assert value is not None
                found[partition].append((offset, int(value)))
    consumer.close()
    return found


@pytest.mark.soak
def test_kills_under_idempotent_and_transactional_load(tmp_path: Path) -> None:
    with KafkaSluice(tmp_path) as broker:
        address = broker.kafka_address
        for topic, partitions in PARTITIONS.items():
            make_topic(address, topic, partitions=partitions, records=0)
        sender, transactor = Sender(address), Transactor(address)
        sender.start()
        transactor.start()
        for number in range(KILLS):
            if number % 4 != 3:  # else it is killed while its clients are on their way back
                transactor.wait_for(3 + number % 7)
                sender.wait_for(20 + number % 50)
            broker.kill()
            broker.start()
        sender.stop()
        transactor.stop()
        _check_sent(sender, address)
        _check_transacted(transactor, address)


def _check_sent(sender: Sender, address: str) -> None:
    """Every number is there once, in its order, at the place that its producer was told."""
    found = read_committed(address, SENT)
    count = PARTITIONS[SENT]
    for partition, lines in found.items():
        assert [number for _, number in lines] == list(range(partition, sender.tried, count))
        assert [offset for offset, _ in lines] == list(range(len(lines)))
        assert all(sender.places[number] == (partition, offset) for offset, number in lines)
    assert len(sender.places) == sender.tried


def _check_transacted(transactor: Transactor, address: str) -> None:
    """What was committed is seen whole, once and in order, and the offset says the same."""
    last = Producer(transactor.settings)
    last.init_transactions(LIMIT_S)  # whatever is open is rolled back
    found = read_committed(address, TRANSACTED)
    first, second = ([number for _, number in lines] for lines in found.values())
    assert first == second, "half a transaction is seen"
    assert first == sorted(set(first)), "a transaction is there twice, or before its time"
    assert set(transactor.committed) <= set(first), "a transaction is lost"
    assert len(transactor.committed) >= 3 * (KILLS - KILLS // 4)
    reader = Consumer({"bootstrap.servers": address, "group.id": GROUP})
    (place,) = reader.committed([TopicPartition(TRANSACTED, 0)], LIMIT_S)
    assert place.offset == first[-1], "the group's offset is of another transaction"
    reader.close()
