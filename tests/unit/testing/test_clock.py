"""This module tests `sluice_clock`: hours pass in milliseconds, each thing at its own time."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from datetime import timedelta
from typing import Any

import pytest

from sluice import Message, ReceivedMessage, TransactionState
from sluice.clock import wall_ms
from sluice.testing import BrokerFactory, Clock, LiveBroker
from tests.unit.testing import inside

HOUR_MS = 3_600_000
RETRY_SECONDS = [
    *(10, 30, 60, 120, 180, 240, 300, 360, 420, 480, 540, 600, 1200, 1800, 3600, 7200),
]


class Seen:
    """A handler that notes what came, and when."""

    def __init__(self, clock: Clock, *, fails: bool = False) -> None:
        self._clock = clock
        self._fails = fails
        self.bodies: list[bytes] = []
        self.times_ms: list[int] = []

    def __call__(self, message: ReceivedMessage) -> None:
        self.bodies.append(message.body)
        self.times_ms.append(self._clock.now_ms())
        if self._fails:
            raise ValueError("as the test wants it")


def test_the_clock_stands_until_it_is_told(sluice_clock: Clock) -> None:
    before_ms = sluice_clock.now_ms()
    assert not sluice_clock.is_running
    sluice_clock.advance(minutes=1, milliseconds=5)
    assert sluice_clock.now_ms() == before_ms + 60_005
    assert sluice_clock.time() == sluice_clock.now_ms() / 1000
    assert sluice_clock.now().utcoffset() == timedelta(0)
    with pytest.raises(ValueError, match="does not go back"):
        sluice_clock.advance(seconds=-1)


def test_a_clock_that_runs(sluice_clock: Clock) -> None:
    sluice_clock.advance(hours=1)
    sluice_clock.run()
    ahead_ms = sluice_clock.now_ms() - wall_ms()
    assert HOUR_MS - 60_000 < ahead_ms <= HOUR_MS
    sluice_clock.advance(hours=1)
    assert sluice_clock.now_ms() - wall_ms() > ahead_ms + HOUR_MS - 60_000
    sluice_clock.stop()
    assert sluice_clock.now_ms() == sluice_clock.now_ms()


def test_every_module_of_the_client_has_the_clocks_time() -> None:
    """Also those that a program imports later: here nobody has done so."""
    program = (
        "import importlib\n"
        "from sluice.testing.clock import Clock, time_of_clients\n"
        "clock = Clock()\n"
        "with time_of_clients(clock):\n"
        "    for name in ('aio.producer', 'aio.trace', 'sync.database'):\n"
        "        module = importlib.import_module(f'sluice.client.{name}')\n"
        "        assert module.wall_ms == clock.now_ms, name\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.mark.parametrize(
    "when", [{"delay_seconds": 7200}, {"delay_level": 18}, {"deliver_at": 7200.0}]
)
def test_a_delay_of_two_hours(
    sluice_broker: LiveBroker, sluice_clock: Clock, when: dict[str, Any]
) -> None:
    seen = Seen(sluice_clock)
    sluice_broker.consumer("reminders", seen)
    sent_ms = sluice_clock.now_ms()
    if "deliver_at" in when:
        when = {"deliver_at": sluice_clock.time() + when["deliver_at"]}
    sluice_broker.producer().send(Message("reminders", "now?", **when))
    sluice_clock.advance(hours=1, minutes=59, seconds=59, milliseconds=999)
    assert seen.bodies == []
    assert sluice_broker.messages("reminders") == []
    sluice_clock.advance(milliseconds=1)
    assert (seen.bodies, seen.times_ms) == ([b"now?"], [sent_ms + 2 * HOUR_MS])
    [message] = sluice_broker.messages("reminders")
    assert (message.born_ms, message.store_ms) == (sent_ms, sent_ms + 2 * HOUR_MS)


def test_all_retries_and_the_dead_letter(sluice_broker: LiveBroker, sluice_clock: Clock) -> None:
    seen = Seen(sluice_clock, fails=True)
    sluice_broker.consumer("orders", seen, group="billing")
    sluice_broker.producer().send(Message("orders", "broken"))
    sluice_broker.settle()
    for number, seconds in enumerate(RETRY_SECONDS, 1):
        sluice_clock.advance(seconds=seconds - 0.001)
        assert len(seen.times_ms) == number
        sluice_clock.advance(milliseconds=1)
        assert len(seen.times_ms) == number + 1
    sluice_clock.advance(days=1)
    assert len(seen.times_ms) == 17
    assert [message.body for message in sluice_broker.messages("%DLQ%billing")] == [b"broken"]


def test_all_retries_in_one_jump(sluice_broker: LiveBroker, sluice_clock: Clock) -> None:
    seen = Seen(sluice_clock, fails=True)
    sluice_broker.consumer("orders", seen, group="billing")
    sluice_broker.producer().send(Message("orders", "broken"))
    sluice_clock.advance(hours=5)
    steps = [
        (later - earlier) // 1000
        for earlier, later in zip(seen.times_ms, seen.times_ms[1:], strict=False)
    ]
    assert steps == RETRY_SECONDS
    assert len(sluice_broker.messages("%DLQ%billing")) == 1


def test_one_jump_without_steps_brings_everything_late(
    sluice_broker: LiveBroker, sluice_clock: Clock
) -> None:
    seen = Seen(sluice_clock, fails=True)
    sluice_broker.consumer("orders", seen, group="billing")
    sluice_broker.producer().send(Message("orders", "broken"))
    sluice_broker.settle()
    begun_ms = sluice_clock.now_ms()
    sluice_clock.advance(hours=5, in_steps=False)
    assert seen.times_ms == [begun_ms, begun_ms + 5 * HOUR_MS]


def test_a_retry_after_a_success_does_not_come(
    sluice_broker: LiveBroker, sluice_clock: Clock
) -> None:
    tries: list[int] = []

    def handle(message: ReceivedMessage) -> None:
        tries.append(message.reconsume_times)
        if len(tries) < 3:
            raise ValueError("not yet")

    sluice_broker.consumer("orders", handle)
    sluice_broker.producer().send(Message("orders", "x"))
    sluice_clock.advance(days=1)
    assert tries == [0, 1, 2]


def test_many_delays_come_in_order(sluice_broker: LiveBroker, sluice_clock: Clock) -> None:
    seen = Seen(sluice_clock)
    sluice_broker.consumer("ticks", seen, orderly=True)
    producer = sluice_broker.producer()
    begun_ms = sluice_clock.now_ms()
    for minutes in (30, 10, 50, 20, 40):
        producer.send(Message("ticks", f"{minutes}", delay_seconds=60 * minutes))
    sluice_clock.advance(hours=1)
    assert seen.bodies == [b"10", b"20", b"30", b"40", b"50"]
    assert seen.times_ms == [begun_ms + 60_000 * minutes for minutes in (10, 20, 30, 40, 50)]


def test_a_transaction_is_asked_for_after_six_seconds(
    sluice_broker: LiveBroker, sluice_clock: Clock
) -> None:
    asked_ms: list[int] = []

    def check(message: ReceivedMessage) -> TransactionState:
        asked_ms.append(sluice_clock.now_ms())
        return TransactionState.COMMIT if len(asked_ms) == 2 else TransactionState.UNKNOWN

    producer = sluice_broker.transaction_producer(check, group="shop")
    producer.begin(Message("order-created", "order 1"))
    begun_ms = sluice_clock.now_ms()
    sluice_clock.advance(seconds=5)
    assert asked_ms == []
    sluice_clock.advance(seconds=1)
    assert asked_ms == [begun_ms + 6_000]
    assert sluice_broker.messages("order-created") == []
    sluice_clock.advance(hours=1)  # asked again after 30 s; nobody asks for what is committed
    assert asked_ms == [begun_ms + 6_000, begun_ms + 36_000]
    assert [message.body for message in sluice_broker.messages("order-created")] == [b"order 1"]


def test_a_transaction_that_nobody_knows_is_parked(
    sluice_broker: LiveBroker, sluice_clock: Clock
) -> None:
    asked: list[str] = []

    def check(message: ReceivedMessage) -> TransactionState:
        asked.append(message.message_id)
        return TransactionState.UNKNOWN

    producer = sluice_broker.transaction_producer(check, group="shop")
    producer.begin(Message("order-created", "order 1"))
    sluice_clock.advance(hours=1)
    assert len(asked) == sluice_broker.config.transaction_check_count_max
    assert len(sluice_broker.messages("TRANS_CHECK_MAX_TIME_TOPIC")) == 1


def test_an_orderly_consumer_keeps_its_queues_over_ten_hours(
    sluice_broker: LiveBroker, sluice_clock: Clock
) -> None:
    sluice_broker.create_topic("steps", 4)
    first, second = Seen(sluice_clock), Seen(sluice_clock)
    one = sluice_broker.consumer("steps", first, orderly=True, group="ordered")
    other = sluice_broker.consumer("steps", second, orderly=True, group="ordered")

    def shares() -> list[set[int]]:
        both = (one.assignment(), other.assignment())
        return [{queue.queue_id for queue in some if queue.topic == "steps"} for some in both]

    sluice_broker.wait_until(lambda: list(map(len, shares())) == [2, 2], what="a fair share")
    before = shares()
    owners = inside.lock_owners(sluice_broker, "ordered")
    assert {("steps", number) for number in range(4)} <= owners.keys()
    producer = sluice_broker.producer()
    for hour in range(3):
        sluice_clock.advance(hours=10)
        producer.send(Message("steps", f"{hour}", sharding_key="k"))
    sluice_broker.settle()
    inside.expire_clients(sluice_broker)
    assert shares() == before
    assert inside.lock_owners(sluice_broker, "ordered") == owners
    assert first.bodies + second.bodies == [b"0", b"1", b"2"]


def test_nobody_is_gone_because_of_a_jump(sluice_broker: LiveBroker, sluice_clock: Clock) -> None:
    consumer = sluice_broker.consumer("orders", lambda _: None, group="alive")
    sluice_clock.advance(days=3)
    inside.expire_clients(sluice_broker)
    assert inside.members(sluice_broker, "alive") == {consumer.client_id}


def test_the_locks_of_who_is_gone_do_not_come_along(
    sluice_broker: LiveBroker, sluice_clock: Clock
) -> None:
    sluice_broker.create_topic("steps", 1)
    dead = sluice_broker.consumer("steps", lambda _: None, orderly=True, group="ordered")
    inside.abandon(dead)
    sluice_broker.wait_until(lambda: not inside.members(sluice_broker, "ordered"))
    seen = Seen(sluice_clock)
    sluice_broker.consumer("steps", seen, orderly=True, group="ordered")
    sluice_broker.producer().send(Message("steps", "x"))
    assert inside.lock_owners(sluice_broker, "ordered")[("steps", 0)] == dead.client_id
    sluice_clock.advance(seconds=61)
    sluice_broker.wait_until(lambda: seen.bodies, what="the lock of the dead member is over")
    assert seen.bodies == [b"x"]


def test_time_passes_while_a_broker_is_down(sluice_broker: LiveBroker, sluice_clock: Clock) -> None:
    seen = Seen(sluice_clock)
    producer = sluice_broker.producer()
    producer.send(Message("reminders", "x", delay_seconds=3600))
    sluice_broker.kill()
    sluice_clock.advance(hours=2)
    sluice_broker.start()
    sluice_broker.consumer("reminders", seen)
    sluice_broker.settle()
    assert (seen.bodies, seen.times_ms) == ([b"x"], [sluice_clock.now_ms()])


def test_two_brokers_have_one_time(
    sluice_broker_factory: BrokerFactory, sluice_clock: Clock
) -> None:
    first = sluice_broker_factory()
    second = sluice_broker_factory(beside=first, flush="async")
    seen = Seen(sluice_clock)
    for broker in (first, second):
        broker.create_topic("ticks", 1)
    producer = first.producer()
    first.consumer("ticks", seen)
    begun_ms = sluice_clock.now_ms()
    for minutes in (10, 20, 30, 40):
        producer.send(Message("ticks", f"{minutes}", delay_seconds=60 * minutes))
    sluice_clock.advance(hours=1)
    assert first.messages("ticks")
    assert second.messages("ticks")
    assert seen.times_ms == [begun_ms + 60_000 * minutes for minutes in (10, 20, 30, 40)]


def test_with_asyncio(sluice_broker: LiveBroker, sluice_clock: Clock) -> None:
    async def main() -> None:
        times_ms: list[int] = []

        async def handle(message: ReceivedMessage) -> None:
            await asyncio.sleep(0)
            times_ms.append(sluice_clock.now_ms())
            raise ValueError("as the test wants it")

        await sluice_broker.aio_consumer("orders", handle, tries_max=2)
        producer = await sluice_broker.aio_producer()
        await producer.send(Message("orders", "x", delay_seconds=60))
        begun_ms = sluice_clock.now_ms()
        await sluice_clock.aio_advance(minutes=2)
        assert times_ms == [begun_ms + 60_000, begun_ms + 70_000, begun_ms + 100_000]
        with pytest.raises(RuntimeError, match="await aio_advance"):
            sluice_clock.advance(minutes=2)

    asyncio.run(main())


def test_a_consumer_that_the_program_made_itself(
    sluice_broker: LiveBroker, sluice_clock: Clock
) -> None:
    from sluice import Producer, PushConsumer

    handled = threading.Event()
    sluice_broker.create_topic("orders")
    with (
        PushConsumer(
            sluice_broker.nameserver_address,
            group="program",
            topics="orders",
            handler=lambda _: handled.set(),
            start_at="first",
        ),
        Producer(sluice_broker.nameserver_address, group="program") as producer,
    ):
        producer.send(Message("orders", "x", delay_seconds=1800))
        sluice_clock.advance(minutes=30)
        assert handled.is_set()


@pytest.mark.sluice(retention_hours=1)
def test_a_message_that_lives_for_a_minute(sluice_broker: LiveBroker, sluice_clock: Clock) -> None:
    sluice_broker.create_topic("short", attributes={"message.ttl.ms": "60000"})
    producer = sluice_broker.producer()
    producer.send(Message("short", "old"))
    sluice_clock.advance(seconds=61)
    producer.send(Message("short", "new"))
    consumer = sluice_broker.pull_consumer("short")
    assert [message.body for message in consumer.poll(60)] == [b"new"]


def test_pulls_are_answered_while_the_clock_stands(
    sluice_broker: LiveBroker, sluice_clock: Clock
) -> None:
    consumer = sluice_broker.pull_consumer("quiet", pull_wait_ms=600)
    assert consumer.poll(timeout_seconds=0) == []
    asked = sluice_broker.wait_until(lambda: inside.held_pulls(sluice_broker), what="a pull")
    sluice_broker.wait_until(lambda: not inside.held_pulls(sluice_broker) & asked, what="an answer")
