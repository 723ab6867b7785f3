"""The blocking face: the same clients, called from threads."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator

import pytest

import sluice
from sluice import Message, Producer, PullConsumer, PushConsumer, SendStatus
from sluice.client.sync.futures import SendFuture
from sluice.client.sync.loop_thread import loop_thread
from sluice.errors import (
    ClientClosed,
    MessageInvalid,
    NoReply,
    RequestTimedOut,
    SluiceError,
)
from tests.unit.client.admin_kit import Site


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    site = Site()
    site.start()
    yield site
    site.stop()


def test_importing_the_package_brings_nothing_along() -> None:
    """A broker, a tool and a Spark executor import `sluice`; none of them pays for the client."""
    program = (
        "import sys, sluice; assert not any(name.startswith('sluice.client') for name in "
        "sys.modules); assert 'asyncio' not in sys.modules; sluice.Producer; "
        "assert 'sluice.client.sync.producers' in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
    assert set(sluice.__all__) >= {"Producer", "PushConsumer", "PullConsumer", "Message"}
    with pytest.raises(AttributeError, match="nonsense"):
        _ = sluice.nonsense


def test_all_ways_to_send(site: Site) -> None:
    with Producer(site.nameserver.address, group="p") as producer:
        result = producer.send(Message("Blocking", "one"))
        assert (result.status, result.queue_offset) == (SendStatus.OK, 0)
        queue = producer.queues("Blocking")[3]
        assert producer.send(Message("Blocking", "two"), queue=queue).queue_id == 3
        futures = [producer.send_async(Message("Blocking", f"m{i}")) for i in range(50)]
        assert {future.result().status for future in futures} == {SendStatus.OK}
        called = threading.Event()
        producer.send_async(Message("Blocking", "back"), lambda _: called.set())
        assert called.wait(60)
        assert len(producer.send_batch([Message("Blocking", "b1"), Message("Blocking", "b2")])) == 2
        producer.send_oneway(Message("Blocking", "oneway"))
    with pytest.raises(ClientClosed):
        producer.send(Message("Blocking", "late"))
    found: Counter[bytes] = Counter()
    with PullConsumer(
        site.nameserver.address, group="look", topics="Blocking", start_at="first"
    ) as consumer:
        for message in consumer:
            found[message.body] += 1
            if found.total() == 56:
                break
        assert consumer.poll(0.1) == []
        assert {queue.topic for queue in consumer.assignment()} == {"Blocking"}
        first = consumer.assignment()[0]
        consumer.seek(first, 0)
        assert consumer.poll()
        consumer.commit()
        assert consumer.committed(first) == consumer.position(first) > 0
    assert max(found.values()) == 1


def test_errors_reach_the_caller(site: Site) -> None:
    with Producer(site.nameserver.address) as producer:
        with pytest.raises(MessageInvalid):
            producer.send("text")  # type: ignore[arg-type]
        with pytest.raises(MessageInvalid):
            producer.send_async("text")  # type: ignore[arg-type]
        future = producer.send_async(Message("a b", "x"))
        with pytest.raises(SluiceError, match="topic 'a b'"):
            future.result()


def test_futures_of_sends() -> None:
    future = SendFuture()
    called: list[object] = []
    future.add_done_callback(called.append)
    assert not future.done()
    with pytest.raises(RequestTimedOut, match="it goes on"):
        future.result(0.01)
    waiting = threading.Thread(target=lambda: called.append(str(future.exception(60))))
    waiting.start()
    future.set_exception(ValueError("broken"))
    waiting.join()
    assert future.done()
    assert isinstance(future.exception(), ValueError)
    with pytest.raises(ValueError, match="broken"):
        future.result()
    future.add_done_callback(called.append)
    assert sorted(map(str, called)) == sorted([str(future), "broken", str(future)])


def test_batches_from_threads(site: Site) -> None:
    """Futures of batched sends: results, and the error of a batch that failed."""
    with Producer(site.nameserver.address, batching=True) as producer:
        futures = [producer.send_async(Message("Grouped", f"m{i}")) for i in range(300)]
        results = [future.result(60) for future in futures]
        assert len({(result.queue.queue_id, result.queue_offset) for result in results}) == 300
        lost = producer.send_async(Message("a b", "x"))
        with pytest.raises(SluiceError, match="topic 'a b'"):
            lost.result(60)


def test_many_threads_share_a_producer(site: Site) -> None:
    with Producer(site.nameserver.address) as producer:

        def work(name: str) -> None:
            for i in range(50):
                producer.send(Message("Threads", f"{name}-{i}"))

        threads = [threading.Thread(target=work, args=(f"t{i}",)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    bodies: list[bytes] = []
    done = threading.Event()

    def handle(message: sluice.ReceivedMessage) -> None:
        bodies.append(message.body)
        if len(bodies) == 200:
            done.set()

    with PushConsumer(
        site.nameserver.address, group="threads", topics="Threads", start_at="first", handler=handle
    ) as consumer:
        assert done.wait(60)
        consumer.pause()
        consumer.resume()
        assert len(consumer.assignment()) >= 4
        assert not consumer.wait(0)
    assert consumer.wait(0)
    assert consumer.consumed_count == len(set(bodies)) == 200
    assert consumer.failed_count == 0


def test_a_handler_may_use_a_blocking_producer(site: Site) -> None:
    """Request and reply: the handler of one client waits for the answer to its own send."""
    with Producer(site.nameserver.address, group="asking") as producer:
        producer.send(Message("Questions", "warm up"))

        def answer(message: sluice.ReceivedMessage) -> None:
            if "CORRELATION_ID" in message.properties:
                producer.reply(message, b"re: " + message.body)

        with PushConsumer(
            site.nameserver.address, group="answers", topics="Questions", handler=answer
        ):
            reply = producer.ask(Message("Questions", "how much?"), timeout_seconds=60)
            assert reply.body == b"re: how much?"
        with pytest.raises(NoReply, match="does a consumer"):
            producer.ask(Message("Questions", "anybody?"), timeout_seconds=0.3)


def test_a_blocking_call_on_the_loop_is_refused(site: Site) -> None:
    with Producer(site.nameserver.address) as producer:

        async def wrong() -> None:
            producer.send(Message("Loop", "x"))

        with pytest.raises(ClientClosed, match=r"sluice\.aio"):
            asyncio.run_coroutine_threadsafe(wrong(), loop_thread().loop).result(60)


def test_an_iteration_that_ends_early_loses_nothing(site: Site) -> None:
    with Producer(site.nameserver.address) as producer:
        producer.send_batch([Message("Early", f"{number}") for number in range(8)])
    seen: list[str] = []
    options = {"group": "early", "topics": "Early", "start_at": "first"}
    for handled in (1, 3):  # messages that one process gets through
        with PullConsumer(site.nameserver.address, **options) as consumer:
            for message in consumer:
                seen.append(message.body.decode())
                handled -= 1
                if not handled:
                    break
    with PullConsumer(site.nameserver.address, **options) as consumer:
        for message in consumer:
            seen.append(message.body.decode())
            break
        for message in consumer:  # goes on where the other iteration stopped
            seen.append(message.body.decode())
            break
        rest: list[str] = []
        while len(rest) < 2:
            rest += [message.body.decode() for message in consumer.poll(count=1)]
        consumer.commit()
        (queue,) = [each for each in consumer.assignment() if consumer.position(each)]
        assert consumer.committed(queue) == 8
    assert seen + rest == [str(number) for number in range(8)]


def test_a_paused_queue_gives_an_iteration_nothing(site: Site) -> None:
    """Neither what was fetched ahead, nor what lies before the place that was sought."""
    with Producer(site.nameserver.address) as producer:
        queues = producer.queues("Quiet")
        producer.send_batch([Message("Quiet", f"{i}") for i in range(6)], queue=queues[0])
        with PullConsumer(
            site.nameserver.address, group="quiet", topics="Quiet", start_at="first"
        ) as consumer:
            seen: list[bytes] = []
            for message in consumer:
                seen.append(message.body)
                if seen == [b"0"]:
                    consumer.pause([message.queue])
                    producer.send(Message("Quiet", "other"), queue=queues[1])
                elif seen == [b"0", b"other"]:
                    consumer.resume([queues[0]])
                elif seen[-1] == b"2":
                    consumer.seek(queues[0], 5)
                    break
            assert [message.body for message in consumer.poll(60)] == [b"5"]
    assert seen == [b"0", b"other", b"1", b"2"]


def test_who_leaves_with_an_error_has_not_handled_the_last_message(site: Site) -> None:
    with Producer(site.nameserver.address) as producer:
        producer.send_batch([Message("Raised", f"{number}") for number in range(3)])
    options = {"group": "raised", "topics": "Raised", "start_at": "first"}
    seen: list[bytes] = []

    def read() -> None:
        with PullConsumer(site.nameserver.address, **options) as consumer:
            for message in consumer:
                seen.append(message.body)
                if message.body == b"1":
                    raise ValueError("bad")

    with pytest.raises(ValueError, match="bad"):
        read()
    with PullConsumer(site.nameserver.address, **options) as consumer:
        for message in consumer:
            seen.append(message.body)
            break
    assert seen == [b"0", b"1", b"1"]


def test_after_a_fork_the_error_says_so(site: Site) -> None:
    with Producer(site.nameserver.address) as producer:
        producer.send(Message("Fork", "x"))
        child = os.fork()
        if not child:
            try:
                producer.send(Message("Fork", "x"))
            except ClientClosed as error:
                os._exit(0 if "fork" in str(error) else 2)
            finally:
                os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        producer.send(Message("Fork", "x"))
