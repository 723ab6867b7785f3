"""This module looks closer at what the examples promise than what they print."""

from __future__ import annotations

import contextlib
import sqlite3
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from examples import gifts, orders, payment, peak, unpaid
from sluice import Admin, Producer, PullConsumer, PushConsumer, ReceivedMessage
from sluice.testing import Clock, LiveBroker

WAIT_SECONDS = 120.0


def wait_until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_SECONDS
    while not holds():
        assert time.monotonic() < deadline, "it does not come"
        time.sleep(0.02)


# ------------------------------------------------------------------------------------------- orders


def test_an_order_takes_its_steps_in_order_and_once(tmp_path: Path) -> None:
    path = str(tmp_path / "orders.db")
    orders.create_tables(path)
    with pytest.raises(orders.OutOfOrder):
        orders.take_step(path, "m", "o", "paid")
    assert orders.take_step(path, "m", "o", "created") == "done"
    assert orders.take_step(path, "m", "o", "created") == "repeated"
    with pytest.raises(orders.OutOfOrder):
        orders.take_step(path, "m", "o", "shipped")
    for step in ("paid", "shipped"):
        assert orders.take_step(path, "m", "o", step) == "done"
    assert orders.take_step(path, "m", "o", "paid") == "repeated"
    assert orders.orders_at(path, "shipped") == 1
    assert orders.steps_done(path) == 3


# ------------------------------------------------------------------------------------------ payment


def test_what_shipping_hears_is_what_was_paid(
    namesrv: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = str(tmp_path / "bank.db")
    heard = payment.run(namesrv, path, patience_seconds=1.0)
    assert sorted(heard) == ["order-1", "order-4"]
    assert payment.paid_orders(path) == {"order-1": 30, "order-4": 10}
    with contextlib.closing(sqlite3.connect(path)) as database:
        assert database.execute("SELECT balance FROM accounts").fetchone() == (60,)
    # Nothing is left open, and nobody hears of the others later.
    desk = payment.Desk(namesrv, path, 1.0)
    with desk.producer, Admin(namesrv) as admin:
        wait_until(lambda: not admin.open_transactions())
    with PullConsumer(namesrv, group="audit", topics=payment.TOPIC, start_at="first") as consumer:
        found = [message.keys for message in consumer.poll(timeout_seconds=WAIT_SECONDS)]
        while more := consumer.poll(timeout_seconds=1.0):
            found += [message.keys for message in more]
    assert set(found) == {"order-1", "order-4"}


# ------------------------------------------------------------------------------------------- unpaid


def test_a_deadline_that_comes_too_late_to_recall_finds_a_paid_order(namesrv: str) -> None:
    with Admin(namesrv) as admin:
        admin.create_topic(unpaid.TOPIC, queues=4)
    came = threading.Event()
    with Producer(namesrv, group="shop") as producer:
        desk = unpaid.OrderDesk(producer, 0.05)
        desk.create("late-recall")
        # Its deadline is delivered, and nobody has read it yet.
        with Admin(namesrv) as admin:
            wait_until(lambda: not admin.delayed(unpaid.TOPIC).messages)
        assert desk.pay("late-recall")
        assert desk.recalled == 0

        def due(message: ReceivedMessage) -> None:
            desk.due(message)
            came.set()

        with PushConsumer(
            namesrv, group="late", topics=unpaid.TOPIC, handler=due, start_at="first"
        ):
            assert came.wait(WAIT_SECONDS)
    assert desk.states == {"late-recall": "paid"}
    assert desk.came_for_paid == 1


# -------------------------------------------------------------------------------------------- gifts


def test_every_service_counts_every_gift_once(namesrv: str) -> None:
    running = gifts.run(namesrv, gift_count=60)
    expected = gifts.make_gifts(60, seed=7)
    by_viewer: dict[str, int] = {}
    for gift in expected:
        by_viewer[gift.viewer] = by_viewer.get(gift.viewer, 0) + gift.coins
    leaderboard, share, badges = running
    assert leaderboard.totals() == badges.totals() == by_viewer
    assert sum(share.totals().values()) == sum(by_viewer.values()) * gifts.SHARE_PERCENT
    assert [service.counted for service in running] == [60] * 3
    assert [service.repeated for service in running] == [6] * 3
    for service in running:
        service.close()


# --------------------------------------------------------------------------------------------- peak


def test_a_peak_is_cut_at_the_threshold(namesrv: str) -> None:
    door, server = peak.run(
        namesrv,
        request_count=500,
        peak_per_second=5000,
        waiting_max=50,
        per_second=400,
        life_seconds=3600,
    )
    assert door.entered + door.dropped == 500
    assert door.dropped > 0
    assert door.waiting_most <= 50
    assert server.handled == door.entered


def test_requests_that_are_too_old_are_not_handled(
    sluice_broker: LiveBroker, sluice_clock: Clock
) -> None:
    namesrv = sluice_broker.nameserver_address
    server = peak.Server(per_second=1000)
    with Admin(namesrv) as admin, Producer(namesrv, group="door") as producer:
        admin.create_topic(peak.TOPIC, queues=2)
        door = peak.Door(producer, admin, waiting_max=100, life_seconds=5)
        assert all(door.enter(f"old {number}") for number in range(10))
        sluice_clock.advance(seconds=10)
        assert door.enter("new")
        with PushConsumer(
            namesrv,
            group=peak.GROUP,
            topics=peak.TOPIC,
            handler=server.handle,
            start_at="first",
            commit_ms=50,
        ):
            wait_until(lambda: server.handled > 0 and not peak.waiting(admin, otherwise=1))
    assert (server.handled, door.entered) == (1, 11)
