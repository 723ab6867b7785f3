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
from sluice.errors import LinkLost, SluiceError
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


def unheard(*_: object, **__: object) -> None:
    raise LinkLost("nobody hears it")


def test_a_block_that_decides_itself(sluice_broker: LiveBroker) -> None:
    producer = sluice_broker.transaction_producer(lambda message: TransactionState.UNKNOWN)
    with producer.transaction(Message("booked", "no")) as transaction:
        transaction.rollback()
    assert transaction.state is TransactionState.ROLLBACK

    def commit_and_fail() -> None:
        with producer.transaction(Message("booked", "yes")) as decided:
            decided.commit()
            raise ValueError("too late")

    with pytest.raises(ValueError, match="too late"):
        commit_and_fail()
    sluice_broker.wait_until(lambda: bool(sluice_broker.messages("booked")))
    assert [message.body for message in sluice_broker.messages("booked")] == [b"yes"]


def test_an_error_is_not_hidden_by_a_rollback_that_nobody_hears(
    sluice_broker: LiveBroker, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    producer = sluice_broker.transaction_producer(lambda message: TransactionState.UNKNOWN)

    def fail(message: Message) -> None:
        raise ValueError("mine")

    monkeypatch.setattr("sluice.client.aio.transactions.TransactionProducer.end", unheard)
    with pytest.raises(ValueError, match="mine"), producer.transaction(Message("booked", "x")):
        raise ValueError("mine")
    with pytest.raises(ValueError, match="mine"):
        producer.send_transaction(Message("booked", "x"), fail)
    assert caplog.text.count("its broker asks for it: nobody hears it") == 2
    with pytest.raises(LinkLost), producer.transaction(Message("booked", "x")):
        pass
