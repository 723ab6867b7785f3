"""Transactions that somebody else left open: whoever is there of the group is asked."""

from __future__ import annotations

import contextlib

import pytest

from sluice import (
    Admin,
    Message,
    PullConsumer,
    ReceivedMessage,
    TransactionProducer,
    TransactionState,
)
from sluice.errors import SluiceError
from sluice.testing import Clock, LiveBroker


def is_known(admin: Admin) -> bool:
    """Whether the broker knows a producer of the group."""
    with contextlib.suppress(SluiceError):
        return bool(admin.producer_connection("shop", "paid"))
    return False


@pytest.mark.parametrize("state", [TransactionState.COMMIT, TransactionState.ROLLBACK])
def test_a_producer_that_has_sent_nothing_yet_is_asked(
    sluice_broker: LiveBroker, sluice_clock: Clock, state: TransactionState
) -> None:
    sluice_broker.create_topic("paid")
    asked: list[str] = []

    def checker(message: ReceivedMessage) -> TransactionState:
        asked.append(message.keys)
        return state

    def nobody(message: ReceivedMessage) -> TransactionState:
        raise AssertionError("it has gone")

    address = sluice_broker.nameserver_address
    with TransactionProducer(address, group="shop", checker=nobody) as crashed:
        crashed.begin(Message("paid", b"30", keys="order-1"))
    with TransactionProducer(address, group="shop", checker=checker), Admin(address) as admin:
        sluice_broker.wait_until(lambda: is_known(admin))
        sluice_clock.advance(seconds=60)
        sluice_broker.wait_until(lambda: bool(asked))
        assert asked == ["order-1"]
        with PullConsumer(address, group="ship", topics="paid", start_at="first") as consumer:
            expected = ["order-1"] if state is TransactionState.COMMIT else []
            heard = consumer.poll(timeout_seconds=30 if expected else 0.2)
            assert [message.keys for message in heard] == expected
