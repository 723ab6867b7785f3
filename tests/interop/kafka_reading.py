"""This module reads partitions with librdkafka, without a group, and waits for what comes."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import confluent_kafka

WAIT_S = 60.0


def until(found: Callable[[], bool]) -> None:
    """Wait for a condition."""
    end = time.monotonic() + WAIT_S
    while not found():
        assert time.monotonic() < end, "nothing happened"


def consume(address: str, topic: str, count: int, partition: int = 0, **settings: Any) -> list[Any]:
    """So many messages of a partition from its beginning, by librdkafka without a group."""
    consumer = confluent_kafka.Consumer(
        {
            "bootstrap.servers": address,
            "group.id": "nobody",
            "enable.auto.commit": False,
            **settings,
        }
    )
    consumer.assign([confluent_kafka.TopicPartition(topic, partition, 0)])
    found: list[Any] = []

    def poll() -> bool:
        message = consumer.poll(1.0)
        if message is not None:
            assert message.error() is None, message.error()
            found.append(message)
        return len(found) >= count

    try:
        until(poll)
    finally:
        consumer.close()
    return found
