"""This module tests what a broker's metrics say, against what was really sent and read."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace
from typing import Any

import pytest

from sluice.broker.metrics import METRICS
from sluice.errors import Busy
from sluice.protocol.remoting_codes import RequestCode as Request
from sluice.storage.store import ColdRead
from sluice.telemetry import Page
from tests.unit.broker.broker_kit import (
    FLAG_SUBSCRIPTION,
    FLAG_SUSPEND,
    Rig,
    broker_config,
    pull_fields,
    running,
    send_fields,
)
from tests.unit.broker.pop_kit import pop_fields, ticket
from tests.unit.broker.test_kafka_admin import commit as kafka_commit
from tests.unit.broker.test_kafka_admin import join as kafka_join
from tests.unit.loops import run_once, until
from tests.unit.prometheus_text import Read, read_page


async def page_of(rig: Rig) -> Read:
    page = Page()
    await rig.broker.metrics.collect(page)
    return read_page(page.text())


def batch_of(*payloads: bytes) -> bytes:
    """Messages as the body of a batch: each with its length, no properties."""
    parts = []
    for body in payloads:
        rest = bytes(12) + len(body).to_bytes(4, "big") + body + bytes(2)
        parts.append((len(rest) + 4).to_bytes(4, "big") + rest)
    return b"".join(parts)


def test_sends_and_pulls_are_counted_exactly() -> None:
    async def work() -> None:
        async with running() as rig:
            await rig.make_topic("orders")
            await rig.make_topic("bills", 1)
            before = await page_of(rig)
            for number in range(5):
                await rig.send("orders", b"x" * 100, queue_id=number % 2)
            await rig.send("bills", b"y")
            answer = await rig.ask(
                Request.SEND_BATCH_MESSAGE, send_fields("bills"), batch_of(b"one", b"two", b"three")
            )
            assert answer.code == 0, answer.remark
            first = await rig.pull("orders", 0, 0)
            again = await rig.pull("orders", 1, 0)
            nothing = await rig.pull("orders", 99, 1)
            assert nothing.code != 0
            read = await page_of(rig)

            assert read.value("sluice_appended_messages_total", topic="orders") == 5
            assert read.value("sluice_appended_messages_total", topic="bills") == 4
            appended_bytes = read.value("sluice_appended_bytes_total", topic="orders")
            appended_bytes += read.value("sluice_appended_bytes_total", topic="bills")
            log_bytes = read.value("sluice_log_bytes") - before.value("sluice_log_bytes")
            # Everything that the log got since: the group's settings are an entry too.
            assert 9 * 100 < appended_bytes <= log_bytes

            pair = {"topic": "orders", "group": "readers"}
            assert read.value("sluice_pulled_messages_total", **pair) == 3 + 2
            assert read.value("sluice_pulled_bytes_total", **pair) == (
                len(first.body) + len(again.body)
            )
            assert read.value("sluice_pulls_total", result="found") == 2
            assert read.value("sluice_pulls_total", result="empty") == 1

            assert read.value("sluice_send_seconds_count") == 9
            assert read.value("sluice_send_seconds_sum") > 0
            assert read.value("sluice_pull_seconds_count") == 3
            assert read.value("sluice_held_pull_seconds_count") == 0

    run_once(work())


def test_the_lag_is_what_a_group_has_not_committed() -> None:
    async def work() -> None:
        async with running() as rig:
            await rig.make_topic("orders")
            await rig.make_group("readers")
            await rig.make_group("writers")
            for number in range(7):
                await rig.send("orders", queue_id=number % 2)
            await rig.commit("readers", "orders", 3, queue_id=0)
            await rig.commit("writers", "orders", 1, queue_id=1)
            read = await page_of(rig)
            lag = "sluice_group_lag_messages"
            assert read.value(lag, topic="orders", group="readers") == 1 + 3
            assert read.value(lag, topic="orders", group="writers") == 4 + 2
            await rig.commit("readers", "orders", 4, queue_id=0)
            await rig.commit("readers", "orders", 3, queue_id=1)
            assert (await page_of(rig)).value(lag, topic="orders", group="readers") == 0
            # Ahead of the end, after a loss of data for instance: not less than nothing.
            await rig.commit("readers", "orders", 99, queue_id=0)
            assert (await page_of(rig)).value(lag, topic="orders", group="readers") == 0

    run_once(work())


def test_pulls_that_wait_are_shown_while_they_do_and_timed_apart() -> None:
    async def work() -> None:
        async with running() as rig:
            await rig.make_topic("orders", 1)
            link = await rig.connect()
            flags = FLAG_SUBSCRIPTION | FLAG_SUSPEND
            waiting = asyncio.ensure_future(rig.pull("orders", 0, flags=flags, link=link))
            await until(lambda: rig.broker.core.polls.held_count)
            read = await page_of(rig)
            assert read.value("sluice_held_pulls") == 1
            assert read.value("sluice_held_pulls_max") == rig.broker.core.polls.held_max
            assert read.value("sluice_connections") == 2
            await rig.send("orders")
            assert (await waiting).code == 0
            read = await page_of(rig)
            assert read.value("sluice_held_pulls") == 0
            assert read.value("sluice_held_pull_seconds_count") == 1
            assert read.value("sluice_pull_seconds_count") == 0

    run_once(work())


def test_unequal_subscriptions_are_shown_and_go_away() -> None:
    async def work() -> None:
        async with running() as rig:
            await rig.make_topic("orders")
            other = await rig.connect()
            await rig.join("readers", {"orders": "A"}, client_id="one")
            name = "sluice_group_subscriptions_unequal"
            assert (await page_of(rig)).labelled(name) == {}
            await rig.join(
                "readers", {"orders": "B"}, client_id="two", link=other, producer_groups=("p",)
            )
            read = await page_of(rig)
            assert read.value(name, group="readers") == 1
            assert read.value("sluice_group_consumers", group="readers") == 2
            assert read.value("sluice_producers") == 1
            await rig.join("readers", {"orders": "A"}, client_id="two", link=other)
            assert (await page_of(rig)).labelled(name) == {}

    run_once(work())


def test_names_above_the_limit_share_one_line() -> None:
    async def work() -> None:
        async with running(metrics_names_max=2) as rig:
            for name in ("a", "b", "c", "d"):
                await rig.make_topic(name, 1)
                await rig.send(name)
                await rig.send(name)
            for name in ("a", "b", "c", "d"):
                await rig.pull(name, 0)
                await rig.make_group(f"g{name}")
                await rig.commit(f"g{name}", name, 1)
            read = await page_of(rig)
            appended = {
                dict(labels)["topic"]: value
                for labels, value in read.labelled("sluice_appended_messages_total").items()
            }
            assert appended == {"a": 2, "b": 2, "(other)": 4}
            other = {"topic": "(other)", "group": "(other)"}
            assert read.value("sluice_pulled_messages_total", **other) == 4
            assert read.value("sluice_group_lag_messages", **other) == 2
            await rig.done(Request.DELETE_TOPIC_IN_BROKER, {"topic": "d"})
            read = await page_of(rig)
            assert read.value("sluice_appended_messages_total", topic="(other)") == 4

    run_once(work())


def test_refused_requests_and_connections_are_counted_by_cause() -> None:
    async def work() -> None:
        async with running(auto_create_topics="off", connections_max=2) as rig:
            await rig.refused(Request.SEND_MESSAGE_V2, send_fields("missing"), b"x")
            await rig.refused(Request.PULL_MESSAGE, pull_fields("missing", 0, 0, "g", 0))
            await rig.connect()
            with pytest.raises(Exception, match=r"closed|lost|reset|connect"):
                await rig.ask(Request.GET_BROKER_CONFIG, link=await rig.connect())
            read = await page_of(rig)
            assert read.value("sluice_requests_refused_total", code="17") == 2
            assert read.value("sluice_connections_refused_total", cause="connections_max") == 1
            assert read.value("sluice_connections") == 2

    run_once(work())


def test_the_store_is_described() -> None:
    async def work() -> None:
        async with running() as rig:
            await rig.send("orders")
            store = rig.broker.core.store
            read = await page_of(rig)
            assert read.value("sluice_log_start_position") == 0
            assert read.value("sluice_log_end_position") == store.log.written > 0
            assert read.value("sluice_log_confirmed_position") == store.confirmed
            assert read.value("sluice_log_files") == 1
            assert read.value("sluice_queues") == len(store.queues)
            assert read.value("sluice_topics") == len(rig.broker.core.topics)
            assert read.value("sluice_store_read_only") == 0
            assert read.value("sluice_store_refusing") == 0
            assert rig.broker.metrics.complaint() == ""
            assert read.value("sluice_disk_bytes") >= read.value("sluice_disk_free_bytes")
            done = asyncio.Event()
            count = read.value("sluice_checkpoints_total")
            store.flusher.flush_to(store.log.written)
            store.housekeeping.checkpoint(lambda error: done.set())
            await done.wait()
            read = await page_of(rig)
            assert read.value("sluice_checkpoints_total") > count  # a timer may ask for one too
            assert read.value("sluice_flush_seconds_count") == store.flusher.round_count > 0

    run_once(work())


def sync_store() -> dict[str, Any]:
    return {"store": replace(broker_config().store, flush="sync")}


def test_appends_that_wait_for_the_disk_are_shown_and_then_timed() -> None:
    async def work() -> None:
        async with running(**sync_store()) as rig:
            await rig.make_topic("orders")
            core = rig.broker.core
            # The lane that flushes is busy with something else, until it may go on.
            may_flush = threading.Event()
            core.store.background.submit("flush", may_flush.wait, lambda *_: None)
            try:
                before = await page_of(rig)
                sends = [asyncio.ensure_future(rig.send("orders")) for _ in range(3)]
                await until(lambda: core.store.flusher.waiting_count - core.turns_waiting == 3)
                read = await page_of(rig)
                assert read.value("sluice_waiting_appends") == 3
                assert read.value("sluice_unflushed_bytes") > 0
                assert read.value("sluice_inflight_bytes") == read.value("sluice_unflushed_bytes")
                assert read.value("sluice_send_seconds_count") == 0
            finally:
                may_flush.set()
            await asyncio.gather(*sends)
            read = await page_of(rig)
            assert read.value("sluice_waiting_appends") == 0
            assert read.value("sluice_unflushed_bytes") == 0
            assert read.value("sluice_inflight_bytes") == 0
            assert read.value("sluice_send_seconds_count") == 3
            assert read.value("sluice_flush_seconds_count") > before.value(
                "sluice_flush_seconds_count"
            )

    run_once(work())


def test_a_failed_flush_shows() -> None:
    async def work() -> None:
        async with running(**sync_store()) as rig:
            await rig.make_topic("orders")
            rig.broker.core.store.flusher.fail("the disk is gone")
            read = await page_of(rig)
            assert read.value("sluice_store_read_only") == 1
            assert read.value("sluice_store_refusing") == 1
            assert "the disk is gone" in rig.broker.metrics.complaint()

    with pytest.raises(Exception, match="the disk is gone"):
        run_once(work())


def test_every_metric_is_on_a_page_and_no_other() -> None:
    async def work() -> None:
        settings = {"auto_create_topics": "off", "kafka_initial_rebalance_delay_ms": 0}
        async with running(connections_max=2, **settings) as rig:
            await rig.make_topic("orders")
            await rig.join("readers", {"orders": "A"}, client_id="one")
            await rig.join("readers", {"orders": "B"}, client_id="two")
            await rig.send("orders")
            await rig.pull("orders", 0)
            await rig.commit("readers", "orders", 0)
            await rig.done(Request.POP_MESSAGE, pop_fields())
            await rig.refused(Request.SEND_MESSAGE_V2, send_fields("missing"), b"x")
            rig.broker.listener.refused["connections_max"] += 1
            core = rig.broker.core
            for counts in (
                *(core.dedup.suppressed, core.expiry.passed_over),
                *(core.store.memory.dropped, core.store.memory.refused),
            ):
                counts["orders"] += 1
            await kafka_join(rig, "kafka's")
            await kafka_commit(rig, "kafka's simple one", 0)
            read = await page_of(rig)
            assert read.kinds == {metric.name: metric.kind for metric in METRICS}
            assert read.helps == {metric.name: metric.help for metric in METRICS}

    run_once(work())


def test_popped_messages_are_counted() -> None:
    async def work() -> None:
        async with running() as rig:
            await rig.make_topic("orders")
            for _ in range(3):
                await rig.send("orders")
            answer = await rig.done(Request.POP_MESSAGE, pop_fields())
            await rig.done(Request.ACK_MESSAGE, ticket(answer))
            changed = {**ticket(answer, 1), "invisibleTime": 0}
            await rig.done(Request.CHANGE_MESSAGE_INVISIBLETIME, changed)
            await until(lambda: rig.broker.core.pops.reviving.revived == 1)
            read = await page_of(rig)
            assert read.value("sluice_popped_messages_total") == 3
            assert read.value("sluice_pop_acknowledged_messages_total") == 1
            assert read.value("sluice_pop_changed_messages_total") == 1
            assert read.value("sluice_pop_revived_messages_total", result="retry") == 1
            names = {"topic": "orders", "group": "readers"}
            assert read.value("sluice_pop_inflight_messages", **names) == 1

    run_once(work())


def test_what_has_to_come_from_the_disk_is_read_on_a_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def work() -> None:
        async with running() as rig:
            await rig.make_topic("orders", 1)
            await rig.make_group("readers")
            await rig.send("orders")
            await rig.send("orders")
            await rig.commit("readers", "orders", 1)
            store = rig.broker.core.store
            max_offset = store.max_offset
            read_by: list[str] = []

            def cold(topic: str, queue_id: int) -> int:
                if not read_by:
                    raise ColdRead(lambda: read_by.append(threading.current_thread().name))
                return max_offset(topic, queue_id)

            monkeypatch.setattr(store, "max_offset", cold)
            read = await page_of(rig)
            assert read.value("sluice_group_lag_messages", topic="orders", group="readers") == 1
            assert read_by[0].startswith("sluice-cold")

    run_once(work())


@pytest.mark.parametrize("error", [Busy("too many"), OSError("the disk is gone")])
def test_a_page_without_the_lag_is_better_than_none(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise error

    def cold(topic: str, queue_id: int) -> int:
        raise ColdRead(fail)

    async def work() -> None:
        async with running() as rig:
            await rig.make_topic("orders", 1)
            await rig.make_group("readers")
            await rig.commit("readers", "orders", 0)
            with monkeypatch.context() as patched:
                patched.setattr(rig.broker.core.store, "max_offset", cold)
                read = await page_of(rig)
            assert "sluice_group_lag_messages" not in read.kinds
            assert read.value("sluice_log_files") == 1
            assert "sluice_group_lag_messages" in (await page_of(rig)).kinds

    run_once(work())
