"""This module tests `sluice_broker`: a broker for one test, its clients, restarts, settings."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import socket
import threading
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest

from sluice import Message, MessageQueue, PushConsumer, ReceivedMessage
from sluice.aio import Producer as AioProducer
from sluice.errors import ConfigError
from sluice.link import RemotingLink
from sluice.protocol.remoting_codes import RequestCode as Request
from sluice.testing import BrokerFactory, LiveBroker


def bodies(broker: LiveBroker, topic: str) -> list[bytes]:
    return [message.body for message in broker.messages(topic)]


def test_what_is_sent_lies_there_and_is_handled(sluice_broker: LiveBroker) -> None:
    producer = sluice_broker.producer()
    for number in range(20):
        producer.send(Message("orders", f"order {number}", tags="new"))
    assert bodies(sluice_broker, "orders") == [b"order %d" % number for number in range(20)]
    assert sluice_broker.messages("unknown") == []

    seen: list[bytes] = []
    sluice_broker.consumer("orders", lambda message: seen.append(message.body), group="billing")
    sluice_broker.settle()
    assert sorted(seen) == sorted(b"order %d" % number for number in range(20))


def test_a_consumer_is_there_before_its_topic(sluice_broker: LiveBroker) -> None:
    seen: list[bytes] = []
    sluice_broker.consumer("later-made", lambda message: seen.append(message.body))
    sluice_broker.producer().send(Message("later-made", "first"))
    sluice_broker.settle()
    assert seen == [b"first"]


def test_settling_waits_for_what_tags_leave_out_too(sluice_broker: LiveBroker) -> None:
    seen: list[bytes] = []
    sluice_broker.consumer({"mixed": "a"}, lambda message: seen.append(message.body))
    producer = sluice_broker.producer()
    for number in range(10):
        producer.send(Message("mixed", f"{number}", tags="ab"[number % 2]))
    sluice_broker.settle()
    assert sorted(seen) == [b"0", b"2", b"4", b"6", b"8"]


def test_settling_waits_for_a_handler_that_takes_its_time(sluice_broker: LiveBroker) -> None:
    begun, may_end, ended = threading.Event(), threading.Event(), []

    def handle(message: ReceivedMessage) -> None:
        begun.set()
        assert may_end.wait(60)
        ended.append(message.body)

    sluice_broker.consumer("slow", handle)
    sluice_broker.producer().send(Message("slow", "x"))
    assert begun.wait(60)
    threading.Timer(0.05, may_end.set).start()
    sluice_broker.settle()
    assert ended == [b"x"]


def test_a_handler_that_hangs_is_named(sluice_broker: LiveBroker) -> None:
    begun, may_end = threading.Event(), threading.Event()

    def handle(message: ReceivedMessage) -> None:
        begun.set()
        may_end.wait(60)

    sluice_broker.consumer("hung", handle, group="hangs")
    sluice_broker.producer().send(Message("hung", "x"))
    assert begun.wait(60)
    sluice_broker.clock.limit_seconds = 0.2
    with pytest.raises(TimeoutError, match=r"hangs has 1 messages of .*hung.* in its hands"):
        sluice_broker.settle()
    may_end.set()


def shared_queues(consumer: PushConsumer) -> list[MessageQueue]:
    return [queue for queue in consumer.assignment() if queue.topic == "shared"]


def note(seen: list[str], name: str, message: ReceivedMessage) -> None:
    seen.append(name)


def test_members_of_a_group_have_divided_their_queues(sluice_broker: LiveBroker) -> None:
    seen: list[str] = []
    both = [
        sluice_broker.consumer("shared", partial(note, seen, name), group="pair")
        for name in ("one", "two")
    ]
    sluice_broker.wait_until(
        lambda: all(len(shared_queues(each)) == 4 for each in both), what="a share"
    )
    producer = sluice_broker.producer()
    for number in range(40):
        producer.send(Message("shared", f"{number}"))
    sluice_broker.settle()
    assert len(seen) == 40
    assert set(seen) == {"one", "two"}


def test_a_pull_consumer(sluice_broker: LiveBroker) -> None:
    producer = sluice_broker.producer()
    sent = producer.send_batch([Message("events", f"{number}") for number in range(5)])
    consumer = sluice_broker.pull_consumer("events", group="audit")
    found: list[ReceivedMessage] = []
    while len(found) < 5:
        found += consumer.poll()
    assert [message.queue_offset for message in found] == [one.queue_offset for one in sent]


def test_with_asyncio(sluice_broker: LiveBroker) -> None:
    async def main() -> None:
        producer = await sluice_broker.aio_producer()
        seen: list[bytes] = []

        async def handle(message: ReceivedMessage) -> None:
            seen.append(message.body)

        await sluice_broker.aio_consumer("news", handle)
        pulling = await sluice_broker.aio_pull_consumer("news", group="pulls")
        await producer.send(Message("news", "hello"))
        await sluice_broker.aio_wait_until(lambda: seen, what="a message")
        assert [message.body for message in await pulling.poll(60)] == [b"hello"]
        await sluice_broker.aio_settle()

    asyncio.run(main())


def test_clients_of_a_loop_are_closed_with_it(sluice_broker: LiveBroker) -> None:
    made: list[AioProducer] = []

    async def main() -> None:
        producer = await sluice_broker.aio_producer()
        await producer.send(Message("news", "hello"))
        made.append(producer)

    asyncio.run(main())
    assert not made[0].session.is_open


def test_clients_of_a_loop_that_goes_on_are_closed_with_the_test(
    sluice_broker_factory: BrokerFactory,
) -> None:
    broker = sluice_broker_factory()
    loop = asyncio.new_event_loop()
    producer = loop.run_until_complete(broker.aio_producer())
    loop.run_until_complete(producer.send(Message("news", "hello")))
    broker.clients.close()
    assert not producer.session.is_open
    loop.run_until_complete(asyncio.sleep(0))
    for task in asyncio.all_tasks(loop):
        task.cancel()
    loop.run_until_complete(asyncio.sleep(0))
    loop.close()


def test_a_restart_keeps_messages_and_address(sluice_broker: LiveBroker) -> None:
    producer = sluice_broker.producer()
    producer.send(Message("orders", "before"))
    address = sluice_broker.broker_address
    sluice_broker.restart()
    assert sluice_broker.broker_address == address
    producer.send(Message("orders", "after"))
    assert bodies(sluice_broker, "orders") == [b"before", b"after"]


def test_a_broker_that_does_not_run_says_so(sluice_broker: LiveBroker) -> None:
    sluice_broker.stop()
    with pytest.raises(RuntimeError, match="does not run"):
        sluice_broker.messages("orders")
    with pytest.raises(RuntimeError, match="does not run"):
        sluice_broker.stop()
    sluice_broker.start()
    with pytest.raises(RuntimeError, match="runs already"):
        sluice_broker.start()


def test_nobody_gets_the_port_of_a_broker_that_is_down(sluice_broker: LiveBroker) -> None:
    host, _, port = sluice_broker.broker_address.rpartition(":")
    sluice_broker.stop()
    with socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind((host, int(port)))
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((host, int(port)), 60)
    sluice_broker.start()
    socket.create_connection((host, int(port)), 60).close()


def test_topics_with_attributes(sluice_broker: LiveBroker) -> None:
    sluice_broker.create_topic("short-lived", 2, attributes={"message.ttl.ms": "60000"})
    result = sluice_broker.producer().send(Message("short-lived", "x"))
    assert result.queue_id in {0, 1}
    with pytest.raises(Exception, match="unsupported key"):
        sluice_broker.create_topic("strange", attributes={"colour": "blue"})


@pytest.mark.sluice(default_queue_count=3)
class TestSettings:
    @pytest.mark.sluice(flush="async", message_bytes_max="2MiB", transaction_timeout_ms=50)
    def test_markers_add_up(self, sluice_broker: LiveBroker) -> None:
        config = sluice_broker.config
        assert (config.store.flush, config.store.message_bytes_max) == ("async", 2 << 20)
        assert (config.default_queue_count, config.transaction_timeout_ms) == (3, 50)

    @pytest.mark.sluice(default_queue_count=5)
    def test_the_nearest_marker_wins(self, sluice_broker: LiveBroker) -> None:
        assert sluice_broker.config.default_queue_count == 5


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"flusch": "sync"}, "no setting is called flusch; did you mean flush?"),
        ({"flush": "never"}, "flush: 'never' is not known; allowed: sync, async"),
        ({"default_queue_count": 0}, "default_queue_count: 0 is out of limits"),
        ({"segment_bytes": "a lot"}, "segment_bytes: 'a lot' "),
        ({"directory": "./data"}, "directory: every broker of a test has its own"),
    ],
)
def test_wrong_settings(
    sluice_broker_factory: BrokerFactory, settings: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError) as error:
        sluice_broker_factory(**settings)
    assert words in str(error.value)


def test_two_brokers_of_one_nameserver(sluice_broker_factory: BrokerFactory) -> None:
    first = sluice_broker_factory()
    second = sluice_broker_factory(beside=first)
    assert (first.name, second.name) == ("broker-a", "broker-b")
    for broker in (first, second):
        broker.create_topic("orders", 2)
    producer = first.producer(tries_max=5, send_ms=30_000)
    for number in range(8):
        producer.send(Message("orders", f"{number}"))
    assert first.messages("orders")
    assert second.messages("orders")

    second.kill()  # whoever finds it gone goes to the other one
    before = len(first.messages("orders"))
    for number in range(8):
        producer.send(Message("orders", f"again {number}"))
    assert len(first.messages("orders")) == before + 8
    second.start()
    seen: list[bytes] = []
    first.consumer("orders", lambda message: seen.append(message.body), group="all")
    first.settle()
    assert len(set(seen)) == 16


def test_two_brokers_that_know_nothing_of_each_other(
    sluice_broker_factory: BrokerFactory,
) -> None:
    one, other = sluice_broker_factory(), sluice_broker_factory(flush="async")
    assert one.nameserver_address != other.nameserver_address
    one.producer().send(Message("orders", "x"))
    assert (bodies(one, "orders"), bodies(other, "orders")) == ([b"x"], [])


def test_a_broker_is_reached_from_outside(sluice_broker: LiveBroker) -> None:
    """As any client does that is no part of this process."""

    async def ask() -> int:
        link = await RemotingLink.open(sluice_broker.broker_address)
        answer = await link.request(Request.GET_BROKER_RUNTIME_INFO, {}, b"")
        await link.close()
        return answer.code

    assert asyncio.run(ask()) == 0


def open_files() -> set[str]:
    found = set()
    for number in os.listdir("/proc/self/fd"):
        try:
            found.add(os.readlink(f"/proc/self/fd/{number}"))
        except FileNotFoundError:
            continue  # the one that lists the directory
    return found


def broker_threads() -> set[str]:
    names = {thread.name for thread in threading.enumerate()}
    return {name for name in names if name.startswith("sluice-") and name != "sluice-client"}


@pytest.fixture
def no_log() -> Iterator[None]:
    """Log records keep errors, and errors keep what was under way when a broker was killed."""
    logging.disable()
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.usefixtures("no_log")
def test_fifty_brokers_leave_nothing_behind(sluice_broker_factory: BrokerFactory) -> None:
    with_one = sluice_broker_factory(flush="async")
    with_one.producer().send(Message("orders", "x"))
    sluice_broker_factory.close()
    gc.collect()
    threads, files = broker_threads(), open_files()
    for number in range(50):
        broker = sluice_broker_factory(flush="async")
        broker.producer().send(Message("orders", f"{number}"))
        if number % 10 == 9:
            broker.kill()
        sluice_broker_factory.close()
        assert not broker.directory.exists()
        del broker
    gc.collect()
    assert broker_threads() <= threads
    left = {name for name in open_files() - files if "sluice-broker" in name or "socket:" in name}
    assert left == set()


def test_tests_share_a_broker(sluice_shared_broker: LiveBroker) -> None:
    sluice_shared_broker.producer().send(Message("shared-topic", "x"))
    assert bodies(sluice_shared_broker, "shared-topic") == [b"x"]


def test_the_shared_broker_is_the_same_one(sluice_shared_broker: LiveBroker) -> None:
    """It runs after the test above, or alone: what lies there is its own or the other's."""
    producer = sluice_shared_broker.producer()
    producer.send(Message("shared-topic", "x"))
    assert set(bodies(sluice_shared_broker, "shared-topic")) == {b"x"}


def test_consumers_of_different_topics_do_not_miss_messages(sluice_broker: LiveBroker) -> None:
    orders: list[bytes] = []
    payments: list[bytes] = []
    sluice_broker.consumer("orders", lambda message: orders.append(message.body))
    sluice_broker.consumer("orders", lambda message: orders.append(message.body))
    sluice_broker.consumer("payments", lambda message: payments.append(message.body))
    producer = sluice_broker.producer()
    for number in range(8):
        producer.send(Message("orders", f"{number}"))
        producer.send(Message("payments", f"{number}"))
    sluice_broker.clock.limit_seconds = 20
    sluice_broker.settle()
    assert (len(orders), len(payments)) == (8, 8)


def test_settling_says_that_members_want_different_topics(sluice_broker: LiveBroker) -> None:
    for topic in ("orders", "payments"):
        sluice_broker.consumer(topic, lambda message: None, group="one")
    sluice_broker.clock.limit_seconds = 0.3
    with pytest.raises(TimeoutError, match="give each a group of its own"):
        sluice_broker.settle()
