"""This module tests `sluice_faults`: networks, disks and processes fail as they are told to."""

from __future__ import annotations

import asyncio
import threading

import pytest

from sluice import Message, Producer, SendStatus
from sluice.errors import RequestTimedOut, SendFailed, SluiceError
from sluice.link import RemotingLink
from sluice.protocol.remoting_codes import RequestCode as Request
from sluice.testing import BrokerFactory, Clock, Faults, LiveBroker
from sluice.testing.gate import Order

PATIENT = {"tries_max": 5, "send_ms": 60_000}


def bodies(broker: LiveBroker, topic: str = "orders") -> list[bytes]:
    return [message.body for message in broker.messages(topic)]


# ----------------------------------------------------------------------------------------- network


def test_a_connection_cut_before_the_broker_saw_the_message(
    sluice_broker: LiveBroker, sluice_faults: Faults
) -> None:
    producer = sluice_broker.producer(**PATIENT)
    producer.send(Message("orders", "first"))
    order = sluice_faults.cut("send")
    assert producer.send(Message("orders", "second")).status is SendStatus.OK
    assert order.hits == 1
    assert bodies(sluice_broker) == [b"first", b"second"]


def test_a_connection_cut_in_the_middle_of_a_send(
    sluice_broker: LiveBroker, sluice_faults: Faults
) -> None:
    """The message is stored and nobody says so: who tries again stores it twice."""
    producer = sluice_broker.producer(**PATIENT)
    producer.send(Message("orders", "first"))
    sluice_faults.cut("send", done=True)
    assert producer.send(Message("orders", "second")).status is SendStatus.OK
    assert bodies(sluice_broker) == [b"first", b"second", b"second"]


def test_who_tries_once_hears_of_the_cut(sluice_broker: LiveBroker, sluice_faults: Faults) -> None:
    producer = sluice_broker.producer(tries_max=1, send_ms=60_000)
    producer.send(Message("orders", "first"))
    sluice_faults.cut("send")
    with pytest.raises(SendFailed):
        producer.send(Message("orders", "second"))
    assert bodies(sluice_broker) == [b"first"]


def test_requests_get_lost(sluice_broker: LiveBroker, sluice_faults: Faults) -> None:
    producer = sluice_broker.producer(**PATIENT)
    producer.send(Message("orders", "first"))
    order = sluice_faults.drop("send", count=100)
    with pytest.raises(SendFailed):
        producer.send(Message("orders", "second"), timeout_ms=200)
    order.lift()
    assert order.hits > 0
    assert bodies(sluice_broker) == [b"first"]
    producer.send(Message("orders", "third"))
    assert bodies(sluice_broker) == [b"first", b"third"]


def test_answers_get_lost(sluice_broker: LiveBroker, sluice_faults: Faults) -> None:
    producer = sluice_broker.producer(tries_max=1, send_ms=60_000)
    producer.send(Message("orders", "first"))
    with sluice_faults.drop("send", answers=True), pytest.raises(SendFailed):
        producer.send(Message("orders", "second"), timeout_ms=200)
    sluice_broker.wait_until(lambda: bodies(sluice_broker) == [b"first", b"second"])


def test_requests_come_late_and_in_their_order(
    sluice_broker: LiveBroker, sluice_faults: Faults
) -> None:
    sluice_broker.create_topic("orders", 1)
    producer = sluice_broker.producer(**PATIENT)
    producer.send(Message("orders", "0"))
    order = sluice_faults.delay("send", seconds=0.05, count=2)
    futures = [producer.send_async(Message("orders", f"{number}")) for number in range(1, 6)]
    for future in futures:
        assert future.result().status is SendStatus.OK
    assert order.hits == 2
    assert bodies(sluice_broker) == [b"%d" % number for number in range(6)]


def test_all_connections_are_cut(sluice_broker: LiveBroker, sluice_faults: Faults) -> None:
    seen: list[bytes] = []
    sluice_broker.consumer("orders", lambda message: seen.append(message.body))
    producer = sluice_broker.producer(**PATIENT)
    producer.send(Message("orders", "before"))
    sluice_broker.wait_until(lambda: seen == [b"before"])
    sluice_faults.cut()
    producer.send(Message("orders", "after"))
    sluice_broker.wait_until(lambda: set(seen) == {b"before", b"after"})


def test_nobody_reaches_the_broker(sluice_broker: LiveBroker, sluice_faults: Faults) -> None:
    producer = sluice_broker.producer(**PATIENT)
    producer.send(Message("orders", "before"))
    with sluice_faults.unreachable(), pytest.raises(SluiceError):
        producer.send(Message("orders", "lost"), timeout_ms=300)
    sluice_broker.producer(**PATIENT).send(Message("orders", "after"))
    assert bodies(sluice_broker) == [b"before", b"after"]


def test_bulk_reads_are_pulls_too() -> None:
    for code in (Request.PULL_MESSAGE, Request.LITE_PULL_MESSAGE, Request.SLUICE_BULK_FETCH):
        assert Order("drop", "pull", 1).concerns(code, is_kafka=False)
    assert not Order("drop", "pull", 1).concerns(Request.SEND_MESSAGE_V2, is_kafka=False)


def test_a_request_by_its_number(sluice_broker: LiveBroker, sluice_faults: Faults) -> None:
    order = sluice_faults.drop(Request.GET_BROKER_RUNTIME_INFO)

    async def ask() -> int:
        link = await RemotingLink.open(sluice_broker.broker_address)
        with pytest.raises(RequestTimedOut):
            await link.request(Request.GET_BROKER_RUNTIME_INFO, timeout_seconds=0.1)
        answer = await link.request(Request.GET_BROKER_RUNTIME_INFO, timeout_seconds=60)
        await link.close()
        return answer.code

    assert asyncio.run(ask()) == 0
    assert order.hits == 1


@pytest.mark.parametrize(
    ("kind", "count", "words"),
    [("sends", 1, "no kind of request is called 'sends'; there are send,"), ("send", 0, "count")],
)
def test_wrong_orders(sluice_faults: Faults, kind: str, count: int, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        sluice_faults.drop(kind, count=count)


# -------------------------------------------------------------------------------------------- disk


def sent_until_refused(producer: Producer) -> list[bytes]:
    acknowledged: list[bytes] = []
    while len(acknowledged) < 1000:
        try:
            producer.send(Message("orders", f"{len(acknowledged)}"))
        except SluiceError:
            break
        acknowledged.append(b"%d" % len(acknowledged))
    return acknowledged


@pytest.mark.parametrize("nth", [1, 3])
def test_a_failed_fsync_is_an_error_and_loses_nothing_that_was_acknowledged(
    sluice_broker: LiveBroker, sluice_faults: Faults, nth: int
) -> None:
    producer = sluice_broker.producer(tries_max=1, send_ms=60_000)
    producer.send(Message("orders", "before"))
    sluice_faults.fail_fsync(nth)
    acknowledged = [b"before", *sent_until_refused(producer)]
    assert len(acknowledged) <= nth  # each send has an fsync of its own
    with pytest.raises(SluiceError, match="fsync failed"):
        producer.send(Message("orders", "read-only now"))

    sluice_faults.restart()
    assert set(acknowledged) <= set(bodies(sluice_broker))
    sluice_broker.producer(**PATIENT).send(Message("orders", "after"))
    assert bodies(sluice_broker)[-1] == b"after"


def test_fsyncs_are_counted(sluice_broker: LiveBroker, sluice_faults: Faults) -> None:
    producer = sluice_broker.producer()
    producer.send(Message("orders", "x"))
    before = sluice_faults.fsync_count
    producer.send(Message("orders", "y"))
    assert sluice_faults.fsync_count > before


def test_a_failed_write_is_as_bad(sluice_broker: LiveBroker, sluice_faults: Faults) -> None:
    producer = sluice_broker.producer(tries_max=1, send_ms=60_000)
    producer.send(Message("orders", "before"))
    sluice_faults.fail_write()
    with pytest.raises(SluiceError):
        producer.send(Message("orders", "lost"))
    with pytest.raises(SluiceError, match="write failed"):
        producer.send(Message("orders", "read-only now"))
    sluice_faults.restart()
    sluice_broker.producer(**PATIENT).send(Message("orders", "after"))
    assert bodies(sluice_broker) == [b"before", b"after"]


def test_a_full_disk(sluice_broker: LiveBroker, sluice_faults: Faults, sluice_clock: Clock) -> None:
    producer = sluice_broker.producer(tries_max=1, send_ms=60_000)
    producer.send(Message("orders", "before"))
    with sluice_faults.disk_full():
        with pytest.raises(SluiceError, match="no room on the disk"):
            producer.send(Message("orders", "lost"))
        sluice_clock.advance(minutes=1)
        with pytest.raises(SluiceError, match=r"room|full"):
            producer.send(Message("orders", "lost too"))
    sluice_clock.advance(minutes=1)
    producer.send(Message("orders", "after"))
    assert bodies(sluice_broker) == [b"before", b"after"]


def test_a_disk_that_hangs(sluice_broker: LiveBroker, sluice_faults: Faults) -> None:
    producer = sluice_broker.producer(**PATIENT)
    producer.send(Message("orders", "before"))
    with sluice_faults.slow_disk():
        future = producer.send_async(Message("orders", "waits"))
        assert bodies(sluice_broker) == [b"before"]
        assert not future.done()
    assert future.result().status is SendStatus.OK
    assert bodies(sluice_broker) == [b"before", b"waits"]


# ----------------------------------------------------------------------------------------- process


@pytest.mark.parametrize("flush", ["sync", "async"])
def test_kill_loses_nothing_that_was_acknowledged(
    sluice_broker_factory: BrokerFactory, flush: str
) -> None:
    broker = sluice_broker_factory(flush=flush)
    producer = broker.producer(tries_max=1, send_ms=60_000)
    acknowledged: list[bytes] = []
    some = threading.Event()

    def send() -> None:
        for number in range(100_000):
            try:
                producer.send(Message("orders", f"{number}"))
            except SluiceError:
                return
            acknowledged.append(b"%d" % number)
            if number == 50:
                some.set()

    thread = threading.Thread(target=send)
    thread.start()
    assert some.wait(60)
    broker.faults.kill()
    thread.join(60)
    assert not thread.is_alive()
    broker.faults.restart()
    found = bodies(broker)
    assert found[: len(acknowledged)] == acknowledged
    assert len(found) <= len(acknowledged) + 1


def test_kill_in_the_middle_of_an_fsync(sluice_broker: LiveBroker, sluice_faults: Faults) -> None:
    producer = sluice_broker.producer(tries_max=1, send_ms=60_000)
    producer.send(Message("orders", "before"))
    before = sluice_faults.fsync_count
    with sluice_faults.slow_disk():
        future = producer.send_async(Message("orders", "nobody knows"))
        sluice_broker.wait_until(lambda: sluice_broker.files.fsyncs_begun > before)
        sluice_faults.kill()
    with pytest.raises(SluiceError):
        future.result()
    sluice_faults.restart()
    assert bodies(sluice_broker)[:1] == [b"before"]


def test_committed_offsets_survive_a_stop(sluice_broker: LiveBroker) -> None:
    producer = sluice_broker.producer()
    producer.send(Message("orders", "before"))
    consumer = sluice_broker.pull_consumer("orders", group="audit", auto_commit=False)
    [message] = consumer.poll(60)
    consumer.commit()
    consumer.close()
    sluice_broker.restart()
    producer.send(Message("orders", "after"))
    again = sluice_broker.pull_consumer("orders", group="audit", auto_commit=False)
    assert [message.body for message in again.poll(60)] == [b"after"]
    assert message.body == b"before"


def test_a_frozen_broker_answers_nobody_and_goes_on(
    sluice_broker: LiveBroker, sluice_faults: Faults
) -> None:
    producer = sluice_broker.producer(send_ms=60_000, tries_max=1)
    patient = sluice_broker.producer(**PATIENT)
    patient.send(Message("orders", "before"))
    producer.send(Message("orders", "too"))
    with sluice_faults.frozen():
        with pytest.raises(SendFailed):
            producer.send(Message("orders", "late"), timeout_ms=200)
        with pytest.raises(RuntimeError, match="thaw it first"):
            sluice_broker.messages("orders")
        future = patient.send_async(Message("orders", "waits"))
    assert future.result().status is SendStatus.OK
    sluice_broker.wait_until(lambda: len(bodies(sluice_broker)) == 4)
    assert set(bodies(sluice_broker)) == {b"before", b"too", b"late", b"waits"}


def test_what_a_frozen_broker_did_not_see_dies_with_it(
    sluice_broker: LiveBroker, sluice_faults: Faults
) -> None:
    producer = sluice_broker.producer(send_ms=60_000, tries_max=1)
    producer.send(Message("orders", "before"))
    sluice_faults.freeze()
    future = producer.send_async(Message("orders", "unseen"))
    sluice_faults.kill()
    with pytest.raises(SluiceError):
        future.result()
    sluice_faults.restart()
    assert bodies(sluice_broker) == [b"before"]


def test_each_broker_has_its_own_faults(sluice_broker_factory: BrokerFactory) -> None:
    one, other = sluice_broker_factory(), sluice_broker_factory()
    order = one.faults.drop("send", count=100)
    other.producer().send(Message("orders", "x"))
    assert order.hits == 0


def test_a_test_may_end_in_the_middle_of_a_fault(sluice_broker_factory: BrokerFactory) -> None:
    broker = sluice_broker_factory()
    broker.producer().send(Message("orders", "x"))
    broker.faults.freeze()
    broker.files.hold_fsync()
    sluice_broker_factory.close()
    assert not broker.directory.exists()


def test_faults_of_the_network_outlast_a_restart(
    sluice_broker: LiveBroker, sluice_faults: Faults
) -> None:
    producer = sluice_broker.producer(tries_max=1, send_ms=2_000)
    producer.send(Message("orders", "before"))
    sluice_faults.kill()
    order = sluice_faults.cut("send")
    sluice_faults.restart()
    with pytest.raises(SendFailed):
        producer.send(Message("orders", "lost"))
    assert order.hits == 1
    producer.send(Message("orders", "after"))
    with sluice_faults.unreachable():
        sluice_broker.restart()
        with pytest.raises(SendFailed):
            producer.send(Message("orders", "nobody gets through"))
    producer.send(Message("orders", "reached"))
    assert bodies(sluice_broker) == [b"before", b"after", b"reached"]
