"""This module tests the broker of a test with Kafka's clients: they join, jump and are cut off."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from confluent_kafka import Consumer, Producer

from sluice.testing import Clock, Faults, LiveBroker

WAIT_SECONDS = 60.0


def send(broker: LiveBroker, *bodies: bytes) -> None:
    producer = Producer({"bootstrap.servers": broker.kafka_address})
    failed: list[object] = []
    for body in bodies:
        producer.produce(
            "orders", body, on_delivery=lambda error, _: failed.append(error) if error else None
        )
    assert producer.flush(WAIT_SECONDS) == 0
    assert failed == []


def received(consumer: Consumer, count: int) -> list[bytes]:
    found: list[bytes] = []
    while len(found) < count:
        for message in consumer.consume(count, timeout=WAIT_SECONDS):
            assert message.error() is None
            body = message.value()
            assert isinstance(body, bytes)
            found.append(body)
    return found


def members(broker: LiveBroker) -> set[str]:
    def find() -> set[str]:
        group = broker._broker.core.kafka_groups.table.groups.get("billing")
        return set() if group is None else set(group.members)

    return broker.host.call(find)


@pytest.fixture
def consumer(sluice_broker: LiveBroker) -> Iterator[Consumer]:
    sluice_broker.create_topic("orders", 1)
    consumer = Consumer(
        {
            "bootstrap.servers": sluice_broker.kafka_address,
            "group.id": "billing",
            "auto.offset.reset": "earliest",
            "session.timeout.ms": 30_000,
        }
    )
    consumer.subscribe(["orders"])
    yield consumer
    consumer.close()


def test_members_of_a_group_join_while_the_clock_stands_and_stay_when_it_jumps(
    sluice_broker: LiveBroker, sluice_clock: Clock, consumer: Consumer
) -> None:
    send(sluice_broker, b"first")
    assert received(consumer, 1) == [b"first"]
    before = members(sluice_broker)
    assert len(before) == 1
    for _ in range(3):
        sluice_clock.advance(hours=10)
        sluice_broker.look()
        assert members(sluice_broker) == before
    send(sluice_broker, b"second")
    assert received(consumer, 1) == [b"second"]
    assert members(sluice_broker) == before
    assert [message.body for message in sluice_broker.messages("orders")] == [b"first", b"second"]


def test_they_come_back_after_a_cut(
    sluice_broker: LiveBroker, sluice_faults: Faults, consumer: Consumer
) -> None:
    send(sluice_broker, b"first")
    assert received(consumer, 1) == [b"first"]
    order = sluice_faults.cut("send")
    send(sluice_broker, b"second")
    assert order.hits == 1
    sluice_faults.cut()
    assert received(consumer, 1) == [b"second"]
