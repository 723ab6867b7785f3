"""Answers of Kafka's groups: one that cannot be sent does not keep the others from theirs."""

from __future__ import annotations

import pytest

from sluice.broker.kafka_group_values import Joined, JoinRequest
from tests.unit.broker.kafka_kit import KafkaBroker


def test_an_answer_that_fails_does_not_take_the_others_with_it() -> None:
    broker = KafkaBroker(kafka_initial_rebalance_delay_ms=1_000)
    groups = broker.core.kafka_groups
    told: list[Joined] = []

    def fails(joined: Joined) -> None:
        raise ConnectionError("gone")

    for number, to in enumerate((fails, told.append)):
        request = JoinRequest(
            *("", None, "client", "/127.0.0.1", 10_000, 10_000, "consumer"),
            (("range", b""),),
            f"client-{number}",
        )
        groups.join("g", request, to)
    with pytest.raises(ConnectionError):
        broker.tick(3_000)
    broker.tick(100)
    assert [joined.generation for joined in told] == [1]
