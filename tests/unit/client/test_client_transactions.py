"""Transactions that somebody else left open: whoever is there of the group is asked."""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3

import pytest

from sluice import (
    Admin,
    Message,
    PullConsumer,
    ReceivedMessage,
    TransactionProducer,
    TransactionState,
)
from sluice.client.aio import transactions as aio_transactions
from sluice.errors import LinkLost, SluiceError
from sluice.link import RemotingLink
from sluice.protocol.remoting import RemotingCommand
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


def test_the_result_of_an_executor_counts_where_the_broker_does_not_hear_it(
    sluice_broker: LiveBroker, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Whoever got an error would do the local work a second time."""
    producer = sluice_broker.transaction_producer(lambda message: TransactionState.UNKNOWN)
    monkeypatch.setattr("sluice.client.aio.transactions.TransactionProducer.end", unheard)
    result, state = producer.send_transaction(Message("booked", "x"), lambda message: True)
    assert (result.status.name, state) == ("OK", TransactionState.COMMIT)
    assert "the commit of" in caplog.text


def test_an_executor_runs_on_the_thread_of_its_caller(sluice_broker: LiveBroker) -> None:
    producer = sluice_broker.transaction_producer(lambda message: TransactionState.UNKNOWN)
    with contextlib.closing(sqlite3.connect(":memory:")) as database:  # of this thread alone
        database.execute("CREATE TABLE booked (name TEXT)")

        def book(message: Message) -> bool:
            database.execute("INSERT INTO booked VALUES ('x')")
            return True

        _, state = producer.send_transaction(Message("booked", "x"), book)
        assert state is TransactionState.COMMIT
        assert database.execute("SELECT * FROM booked").fetchall() == [("x",)]

    async def refuse(message: Message) -> bool:
        return False

    assert producer.send_transaction(Message("booked", "y"), refuse)[1].name == "ROLLBACK"
    sluice_broker.wait_until(lambda: bool(sluice_broker.messages("booked")))
    assert [message.body for message in sluice_broker.messages("booked")] == [b"x"]


def test_a_block_with_asyncio(sluice_broker: LiveBroker) -> None:
    async def work() -> None:
        producer = await sluice_broker.aio_transaction_producer(lambda message: None)
        async with producer.transaction(Message("booked", "kept")) as transaction:
            assert transaction.message_id
        with pytest.raises(ValueError, match="mine"):
            async with producer.transaction(Message("booked", "dropped")) as dropped:
                raise ValueError("mine")
        assert transaction.state is TransactionState.COMMIT
        assert dropped.state is TransactionState.ROLLBACK

    asyncio.run(work())
    sluice_broker.wait_until(lambda: bool(sluice_broker.messages("booked")))
    assert [message.body for message in sluice_broker.messages("booked")] == [b"kept"]


def test_a_broker_that_does_not_say_its_name_is_answered(
    sluice_broker: LiveBroker, sluice_clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Brokers before Apache's 5.0 ask without it; the answer goes where the question came from."""
    asked: list[str] = []

    def checker(message: ReceivedMessage) -> TransactionState:
        asked.append(message.keys)
        return TransactionState.COMMIT

    check = aio_transactions.TransactionProducer._asked

    def nameless(
        self: aio_transactions.TransactionProducer, link: RemotingLink, command: RemotingCommand
    ) -> None:
        del command.ext["bname"]
        check(self, link, command)

    monkeypatch.setattr(aio_transactions.TransactionProducer, "_asked", nameless)
    sluice_broker.create_topic("paid")
    address = sluice_broker.nameserver_address
    with TransactionProducer(address, group="shop", checker=checker) as crashed:
        crashed.begin(Message("paid", b"30", keys="order-1"))
    with TransactionProducer(address, group="shop", checker=checker), Admin(address) as admin:
        sluice_broker.wait_until(lambda: is_known(admin))
        sluice_clock.advance(seconds=60)
        sluice_broker.wait_until(lambda: bool(sluice_broker.messages("paid")), seconds=10)
    assert asked == ["order-1"]
