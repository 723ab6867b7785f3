"""Queues that are read in order: who gets them, and what a broker that was killed remembers."""

from __future__ import annotations

from unittest import mock

import pytest

from sluice.broker.locks import LOCK_MS
from sluice.errors import DiskFull, SluiceError, SubscriptionMissing
from tests.unit.broker.retry_kit import Broker

QUEUES = [("orders", 0), ("orders", 1)]


@pytest.fixture
def broker() -> Broker:
    broker = Broker()
    broker.make()
    return broker


def lock(
    broker: Broker, client_id: str, queues: list[tuple[str, int]] = QUEUES, *, joined: bool = True
) -> list[tuple[str, int]]:
    if joined:
        broker.join(client_id, "g", "orders")
    told: list[tuple[list[tuple[str, int]], SluiceError | None]] = []
    broker.core.ordering.lock(
        "g", (client_id, client_id), queues, lambda *answer: told.append(answer)
    )
    broker.settle()
    ((owned, error),) = told
    if error is not None:
        raise error
    return owned


def unlock(broker: Broker, client_id: str, queues: list[tuple[str, int]] = QUEUES) -> None:
    broker.core.ordering.unlock("g", (client_id, client_id), queues, lambda error: None)
    broker.settle()


def test_one_owner_until_it_gives_back_or_dies(broker: Broker) -> None:
    assert lock(broker, "one") == QUEUES
    assert lock(broker, "two") == []
    unlock(broker, "two")  # not its own
    assert lock(broker, "two") == []
    unlock(broker, "one", QUEUES[:1])
    assert lock(broker, "two") == QUEUES[:1]
    broker.run(LOCK_MS + 1, LOCK_MS + 1)
    assert lock(broker, "two") == QUEUES, "the first one was silent for too long"
    assert lock(broker, "one") == []


def test_a_stranger_gets_nothing(broker: Broker) -> None:
    with pytest.raises(SubscriptionMissing, match="stranger is no member of group g"):
        lock(broker, "stranger", joined=False)
    assert lock(broker, "one") == QUEUES


def test_queues_that_do_not_exist_are_not_locked(broker: Broker) -> None:
    assert lock(broker, "one", [("orders", 2), ("orders", -1), ("nothing", 0), *QUEUES]) == QUEUES


def test_a_kill_of_the_broker_frees_no_queue(broker: Broker) -> None:
    lock(broker, "one")
    for _ in range(2):
        broker = broker.restarted()
        assert lock(broker, "two") == [], "the owner is at work"
        assert lock(broker, "one") == QUEUES
        broker.run(LOCK_MS // 2)
        assert lock(broker, "one") == QUEUES, "renewed"


def test_who_was_silent_while_the_broker_was_down_loses_its_queues(broker: Broker) -> None:
    lock(broker, "one")
    broker.now_ms += LOCK_MS + 1
    broker = broker.restarted()
    assert lock(broker, "two") == QUEUES


def test_what_was_given_back_is_free_after_a_kill_too(broker: Broker) -> None:
    lock(broker, "one")
    unlock(broker, "one")
    assert lock(broker.restarted(), "two") == QUEUES


def test_another_owner_after_a_kill(broker: Broker) -> None:
    lock(broker, "one")
    unlock(broker, "one", QUEUES[:1])
    lock(broker, "two", QUEUES[:1])
    broker = broker.restarted()
    assert lock(broker, "one") == QUEUES[1:]
    assert lock(broker, "two") == QUEUES[:1]


def test_what_nobody_renewed_is_forgotten_on_the_disk_too(broker: Broker) -> None:
    lock(broker, "one")
    broker.run(3 * LOCK_MS, 10_000)
    broker.core.locks.expire(broker.now_ms)
    broker.run(20_000, 10_000)
    assert broker.core.store.table("lock") == {}


def test_a_lock_that_cannot_be_written_down_is_not_given(broker: Broker) -> None:
    with (
        mock.patch.object(broker.core.store.log, "write", side_effect=DiskFull("no room")),
        pytest.raises(DiskFull),
    ):
        lock(broker, "one")
    broker.core.store.log.unstage()
    assert lock(broker, "one") == QUEUES
    assert lock(broker.restarted(), "two") == []
