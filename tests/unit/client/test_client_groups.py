"""Groups of consumers and consumers that pull, against a whole broker."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sluice.aio import Producer, PullConsumer, PushConsumer
from sluice.client.core.messages import Message, ReceivedMessage
from sluice.errors import ConfigError, ParameterInvalid
from sluice.protocol.json_members import MessageQueue
from tests.unit.client.admin_kit import Site
from tests.unit.client.client_kit import Seen, send
from tests.unit.loops import run_once, until


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    site = Site()
    site.start()
    yield site
    site.stop()


# ------------------------------------------------------------------------------------------- groups


def test_members_share_the_queues(site: Site) -> None:
    async def work() -> None:
        await send(site, "Shared", "m0")
        seen = [Seen(), Seen(), Seen()]

        def member(number: int) -> PushConsumer:
            return PushConsumer(
                site.nameserver.address,
                group="shared",
                topics="Shared",
                start_at="first",
                handler=seen[number].soon,
            )

        def owned(*consumers: PushConsumer) -> list[MessageQueue]:
            return sorted(q for c in consumers for q in c.lanes if q.topic == "Shared")

        async with member(0) as one, member(1) as two:
            await until(lambda: len(owned(one)) == len(owned(two)) == 2)
            assert len(set(owned(one, two))) == 4
            third = member(2)
            await third.start()
            await until(lambda: sorted(map(len, map(owned, (one, two, third)))) == [1, 1, 2])
            async with Producer(site.nameserver.address) as producer:
                for i in range(1, 101):
                    await producer.send(Message("Shared", f"m{i}"))
            await until(lambda: sum(len(each.bodies) for each in seen) >= 101)
            await third.close()
            await until(lambda: len(owned(one)) == len(owned(two)) == 2)
        counted = Counter(body for each in seen for body in each.bodies)
        assert set(counted) == {f"m{i}" for i in range(101)}
        assert all(each.bodies for each in seen)

    run_once(work())


def test_broadcasting_keeps_its_place_in_a_file(site: Site, tmp_path: Path) -> None:
    def files() -> list[Path]:
        return list(tmp_path.glob("*/everyone/offsets.json"))

    async def work() -> None:
        await send(site, "Everyone", "m0", "m1")

        def member(seen: Seen, name: str) -> PushConsumer:
            return PushConsumer(
                site.nameserver.address,
                group="everyone",
                topics="Everyone",
                start_at="first",
                handler=seen.soon,
                broadcasting=True,
                instance_name=name,
                offset_directory=str(tmp_path),
            )

        one, two = Seen(), Seen()
        async with member(one, "one"), member(two, "two"):
            await until(lambda: len(one.bodies) == len(two.bodies) == 2)
        assert len(files()) == 2
        await send(site, "Everyone", "m2")
        again = Seen()
        async with member(again, "one"):
            await until(lambda: again.bodies)
        assert again.bodies == ["m2"]
        for path in files():
            path.write_text("{broken")
        with pytest.raises(ConfigError, match="delete it"):
            await member(Seen(), "one").start()

    run_once(work())


def test_where_a_new_group_starts(site: Site) -> None:
    async def work() -> None:
        async with Producer(site.nameserver.address) as producer:
            sent = await producer.send_batch([Message("Start", f"m{i}") for i in range(4)])
        queue = sent[0].queue
        # Not the queue of a young topic's first messages: brokers say 0 for those themselves.
        for group, start_at, seconds, expected in (
            ("from-first", "first", 0.0, 0),
            ("from-time", "timestamp", 0.0, 0),
        ):
            async with PullConsumer(
                site.nameserver.address,
                group=group,
                topics="Start",
                start_at=start_at,
                start_timestamp=seconds,
            ) as consumer:
                # A broker tells the nameserver of a new topic after it has answered the send.
                await until(lambda: queue in consumer.assignment())
                assert consumer.position(queue) == expected
                assert len(await consumer.poll()) == 4

    run_once(work())


def test_a_topic_that_comes_later_is_read(site: Site) -> None:
    async def work() -> None:
        seen = Seen()
        async with PushConsumer(
            site.nameserver.address,
            group="early",
            topics="Late",
            start_at="first",
            handler=seen.soon,
        ):
            await send(site, "Late", "m0")
            await until(lambda: seen.bodies == ["m0"])

    run_once(work())


def test_an_administrator_sends_the_group_back(site: Site) -> None:
    async def work() -> None:
        await send(site, "Reset", "m0", "m1", "m2")
        seen = Seen()
        async with PushConsumer(
            site.nameserver.address,
            group="reset",
            topics="Reset",
            start_at="first",
            handler=seen.soon,
            commit_ms=50,
            pull_wait_ms=100,
        ):
            await until(lambda: len(seen.bodies) == 3)
            loop = asyncio.get_running_loop()
            words = ("resetOffsetByTime", "-g", "reset", "-t", "Reset", "-s", "0")
            await loop.run_in_executor(None, lambda: site.ok(*words))
            await until(lambda: len(seen.bodies) == 6)
        assert Counter(seen.bodies) == {"m0": 2, "m1": 2, "m2": 2}

    run_once(work())


def test_administrators_see_the_consumer(site: Site) -> None:
    async def work() -> None:
        await send(site, "Known", "m0")
        seen = Seen()
        async with PushConsumer(
            site.nameserver.address,
            group="known",
            topics={"Known": "*"},
            start_at="first",
            handler=seen.soon,
        ) as consumer:
            await until(lambda: seen.bodies)
            loop = asyncio.get_running_loop()
            client_id = consumer.session.client_id
            words = ("consumerStatus", "-g", "known", "-i", client_id)
            text = await loop.run_in_executor(None, lambda: site.ok(*words))
            assert "Known" in text
            connections = await loop.run_in_executor(
                None, lambda: site.ok("consumerConnection", "-g", "known")
            )
            assert client_id in connections
            assert "PYTHON" in connections

    run_once(work())


def test_a_consumer_needs_a_topic_and_a_handler(site: Site) -> None:
    async def work() -> None:
        nothing: Any = None
        with pytest.raises(ConfigError, match="subscribe"):
            await PushConsumer(site.nameserver.address, group="g", handler=print).start()
        with pytest.raises(ConfigError, match="handler"):
            PushConsumer(site.nameserver.address, group="g", handler=nothing)
        with pytest.raises(ConfigError, match="allocation"):
            PushConsumer(site.nameserver.address, group="g", handler=print, allocation="avg")

    run_once(work())


# ------------------------------------------------------------------------------------------ pulling


def test_polling_and_committing(site: Site) -> None:
    async def work() -> None:
        async with Producer(site.nameserver.address) as producer:
            await producer.send_batch([Message("Polled", f"m{i}") for i in range(10)])
        options: dict[str, Any] = {"group": "poll", "topics": "Polled", "start_at": "first"}
        async with PullConsumer(site.nameserver.address, auto_commit=False, **options) as consumer:
            first = await consumer.poll(count=4)
            assert [message.body for message in first] == [b"m0", b"m1", b"m2", b"m3"]
            queue = first[0].queue
            assert consumer.position(queue) == 0
            await consumer.commit()
            assert await consumer.committed(queue) == consumer.position(queue) == 4
            await consumer.poll(count=2)  # and not committed
        async with PullConsumer(site.nameserver.address, **options) as consumer:
            (again,) = await consumer.poll(count=1)
            assert again.body == b"m4"
            async for message in consumer:
                if message.body == b"m9":
                    break
        async with PullConsumer(site.nameserver.address, **options) as consumer:
            assert await consumer.committed(queue) == 10
            assert await consumer.poll(0.2) == []

    run_once(work())


def test_what_was_not_handled_comes_again(site: Site) -> None:
    async def work() -> None:
        await send(site, "Unhandled", "m0")
        options: dict[str, Any] = {"group": "un", "topics": "Unhandled", "start_at": "first"}

        async def fail() -> None:
            async with PullConsumer(site.nameserver.address, **options) as consumer:
                assert await consumer.poll()
                raise ValueError("mine")

        with pytest.raises(ValueError, match="mine"):
            await fail()
        async with PullConsumer(site.nameserver.address, **options) as consumer:
            assert [message.body for message in await consumer.poll()] == [b"m0"]

    run_once(work())


def test_an_iteration_that_ends_early_handles_what_it_saw(site: Site) -> None:
    async def work() -> None:
        async with Producer(site.nameserver.address) as producer:
            await producer.send_batch([Message("Broken-off", f"{i}") for i in range(6)])
        options: dict[str, Any] = {"group": "off", "topics": "Broken-off", "start_at": "first"}
        seen: list[bytes] = []
        for count in (1, 2):
            async with PullConsumer(site.nameserver.address, **options) as consumer:
                async for message in consumer:
                    seen.append(message.body)
                    count -= 1
                    if not count:
                        break
        async with PullConsumer(site.nameserver.address, **options) as consumer:
            async for message in consumer:
                seen.append(message.body)
                break
            while len(seen) < 6:  # what the iteration has left comes first
                seen += [message.body for message in await consumer.poll(count=1)]
        assert seen == [b"%d" % number for number in range(6)]

    run_once(work())


def test_seeking_pausing_and_assigning(site: Site) -> None:
    site.ok(*("updateTopic", "-b", site.broker.address, "-t", "Moved", "-r", "4", "-w", "4"))

    async def work() -> None:
        async with Producer(site.nameserver.address) as producer:
            for i in range(8):
                await producer.send(Message("Moved", f"m{i}"))
        async with PullConsumer(
            site.nameserver.address, group="moved", pull_wait_ms=200
        ) as consumer:
            every = await consumer.queues("Moved")
            assert len(every) == 4
            await consumer.assign(every[:2])
            assert consumer.assignment() == every[:2]
            # Whatever balanced at the same time: there is one task for each queue.
            pulling = [task for task in asyncio.all_tasks() if "_pull_lane" in repr(task)]
            assert len(pulling) == 2
            await consumer.seek_to_begin(every[0])
            consumer.pause([every[1]])
            found = await consumer.poll()
            assert {message.queue for message in found} == {every[0]}
            consumer.seek(every[0], 1)
            (last,) = await consumer.poll()
            assert last.queue_offset == 1
            await consumer.seek_to_end(every[0])
            assert await consumer.poll(0.3) == []
            consumer.resume([every[1]])
            await consumer.seek_to_time(every[1], 0.0)
            found = await consumer.poll()
            assert {message.queue for message in found} == {every[1]}
            with pytest.raises(ParameterInvalid, match="assignment"):
                consumer.seek(every[3], 0)
            with pytest.raises(ParameterInvalid, match="below 0"):
                consumer.seek(every[0], -1)
            with pytest.raises(ConfigError, match="either"):
                await consumer.subscribe("Moved")

    run_once(work())


def test_subscribing_while_it_runs(site: Site) -> None:
    async def work() -> None:
        await send(site, "One", "m0")
        await send(site, "Two", "m1")
        async with PullConsumer(
            site.nameserver.address, group="both", topics="One", start_at="first"
        ) as consumer:
            assert [message.body for message in await consumer.poll()] == [b"m0"]
            await consumer.subscribe("Two")
            assert [message.body for message in await consumer.poll()] == [b"m1"]
            await consumer.unsubscribe("One")
            assert {queue.topic for queue in consumer.assignment()} == {"Two"}

    run_once(work())


def test_an_offset_that_is_gone_is_corrected(site: Site) -> None:
    async def work() -> None:
        await send(site, "Beyond", "m0")
        async with PullConsumer(
            site.nameserver.address, group="beyond", topics="Beyond", start_at="first"
        ) as consumer:
            (message,) = await consumer.poll()
            consumer.seek(message.queue, 10_000)
            await until(lambda: consumer.lanes[message.queue].process.next_offset == 1)
            async with Producer(site.nameserver.address) as producer:
                await producer.send(Message("Beyond", "m1"), queue=message.queue)
            found: list[ReceivedMessage] = []
            while not found:
                found = await consumer.poll()
            assert [each.body for each in found] == [b"m1"]

    run_once(work())


def test_after_a_seek_a_poll_returns_nothing_of_an_iteration_that_was_left(site: Site) -> None:
    async def work() -> None:
        async with Producer(site.nameserver.address) as producer:
            await producer.send_batch([Message("Sought", f"{i}") for i in range(10)])
        async with PullConsumer(
            site.nameserver.address, group="sought", topics="Sought", start_at="first"
        ) as consumer:
            async for message in consumer:
                consumer.seek(message.queue, 7)
                break
            found = await consumer.poll(timeout_seconds=60, count=2)
            assert [message.body for message in found] == [b"7", b"8"]

    run_once(work())


def test_what_was_fetched_ahead_of_a_paused_queue_waits_until_it_goes_on(site: Site) -> None:
    async def work() -> None:
        async with Producer(site.nameserver.address) as producer:
            queues = await producer.queues("Held")
            held = await producer.send_batch(
                [Message("Held", f"held {i}") for i in range(5)], queue=queues[0]
            )
            async with PullConsumer(
                site.nameserver.address, group="held", topics="Held", start_at="first"
            ) as consumer:
                seen: list[bytes] = []
                async for message in consumer:
                    seen.append(message.body)
                    if seen == [b"held 0", b"held 1"]:
                        consumer.pause([held[0].queue])
                        await producer.send(Message("Held", "other"), queue=queues[1])
                    elif seen[2:] == [b"other"]:
                        break
                assert await consumer.poll(timeout_seconds=0) == []
                consumer.resume([held[0].queue])
                found = await consumer.poll(timeout_seconds=60, count=1)
                assert [message.body for message in found] == [b"held 2"]
                async for message in consumer:
                    seen.append(message.body)
                    if message.body == b"held 4":
                        break
        assert seen == [b"held 0", b"held 1", b"other", b"held 3", b"held 4"]

    run_once(work())


def test_who_waits_in_an_iteration_gets_what_was_held_when_it_goes_on(site: Site) -> None:
    async def work() -> None:
        async with Producer(site.nameserver.address) as producer:
            sent = await producer.send_batch([Message("Woken", f"{i}") for i in range(3)])
        queue = sent[0].queue
        seen: list[bytes] = []
        async with PullConsumer(
            site.nameserver.address, group="woken", topics="Woken", start_at="first"
        ) as consumer:

            async def read() -> None:
                async for message in consumer:
                    seen.append(message.body)
                    if len(seen) == 1:
                        consumer.pause([queue])
                        asyncio.get_running_loop().call_later(0.05, consumer.resume, [queue])
                    if len(seen) == 3:
                        return

            await read()
        assert seen == [b"0", b"1", b"2"]

    run_once(work())


@pytest.mark.parametrize("kind", ["coroutine", "thread"])
def test_an_ordered_message_that_ends_while_its_queue_is_given_up_is_committed(
    site: Site, kind: str
) -> None:
    """The next owner does not get it again: who gives the queue up waits for the handler."""
    entered, release = threading.Event(), threading.Event()

    def handle(message: ReceivedMessage) -> None:
        entered.set()
        release.wait(60)

    async def handle_soon(message: ReceivedMessage) -> None:
        await asyncio.to_thread(handle, message)

    async def work() -> None:
        topic = f"Given-{kind}"
        await send(site, topic, "one")
        async with PushConsumer(
            site.nameserver.address,
            group=f"g-{topic}",
            topics=topic,
            start_at="first",
            handler=handle if kind == "thread" else handle_soon,
            orderly=True,
            close_ms=60_000,
        ) as consumer:
            await until(entered.is_set)
            (lane,) = [each for each in consumer.lanes.values() if each.process.under_way]
            async with consumer._balancing:  # as whoever gives queues up does
                giving_up = asyncio.ensure_future(consumer._drop(lane))
                await until(lambda: lane.process.is_dropped)
                release.set()
                await giving_up
            assert await consumer.committed(lane.queue) == 1

    run_once(work())
