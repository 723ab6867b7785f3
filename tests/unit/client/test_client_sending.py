"""Producers against a whole broker, and against brokers that answer as a test wants it."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from sluice.aio import Observer, Producer, PullConsumer
from sluice.client.core.messages import Message, SendResult, SendStatus
from sluice.client.core.recalls import write_handle
from sluice.client.core.selectors import random_selector
from sluice.errors import (
    ClientClosed,
    ConfigError,
    MessageIllegal,
    MessageInvalid,
    MessageTooLarge,
    NoNameserver,
    NoPermission,
    NoRoute,
    ParameterInvalid,
    RequestTimedOut,
    SendFailed,
    SluiceError,
)
from sluice.protocol.json_members import MessageQueue
from sluice.protocol.remoting_codes import RequestCode as Request
from tests.unit.client.admin_kit import Site
from tests.unit.client.client_kit import SENT, fake_cluster, stored
from tests.unit.loops import Run, both_loops, run_once, until


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    site = Site()
    site.start()
    yield site
    site.stop()


async def bodies(site: Site, topic: str, count: int) -> list[bytes]:
    """What a topic holds."""
    found: list[bytes] = []
    async with PullConsumer(
        site.nameserver.address, group=f"look-{topic}", topics=topic, start_at="first"
    ) as consumer:
        while len(found) < count:
            found += [message.body for message in await consumer.poll()]
    return found


# ------------------------------------------------------------------------------ with a real broker


@both_loops
def test_send_and_read(site: Site, run: Run) -> None:
    async def work() -> None:
        async with Producer(site.nameserver.address, group="p") as producer:
            results = [await producer.send(Message("First", f"m{i}")) for i in range(8)]
            assert {result.status for result in results} == {SendStatus.OK}
            assert len({result.message_id for result in results}) == 8
            assert len({(r.queue_id, r.queue_offset) for r in results}) == 8
            assert len({result.queue.queue_id for result in results}) == 4
            assert len(results[0].offset_id) == 32
            assert await producer.queues("First") == tuple(
                MessageQueue("First", "broker-a", i) for i in range(4)
            )
        with pytest.raises(ClientClosed, match="closed"):
            await producer.send(Message("First", b"x"))

    run(work())


def test_many_at_once(site: Site) -> None:
    async def work() -> None:
        async with Producer(site.nameserver.address, waiting_max=100, send_ms=60_000) as producer:
            sent = [producer.send_async(Message("Many", f"m{i}")) for i in range(2000)]
            results = await asyncio.gather(*sent)
        assert len({(r.queue.queue_id, r.queue_offset) for r in results}) == 2000
        assert Counter(await bodies(site, "Many", 2000)) == Counter(
            f"m{i}".encode() for i in range(2000)
        )

    run_once(work())


def test_batches(site: Site) -> None:
    async def work() -> None:
        async with Producer(site.nameserver.address) as producer:
            results = await producer.send_batch([Message("Bulk", f"m{i}") for i in range(5)])
            first = results[0].queue_offset
            assert [result.queue_offset for result in results] == list(range(first, first + 5))
            assert len({result.offset_id for result in results}) == 5
            with pytest.raises(MessageInvalid, match="one topic"):
                await producer.send_batch([Message("Bulk", b"x"), Message("Other", b"x")])
            with pytest.raises(MessageInvalid, match="alone"):
                await producer.send_batch([Message("Bulk", b"x", delay_level=1)])
            with pytest.raises(MessageInvalid, match="not empty"):
                await producer.send_batch([])
        assert await bodies(site, "Bulk", 5) == [f"m{i}".encode() for i in range(5)]

    run_once(work())


def test_automatic_batches(site: Site) -> None:
    """Single sends go out together; each has a result of its own; large ones are packed."""

    async def work() -> None:
        large = b"z" * 10_000
        async with Producer(
            site.nameserver.address, batching=True, linger_ms=20, batch_bytes=20_000
        ) as producer:
            # The route is not known yet: the first batch waits for it, the others go on.
            small = [producer.send_async(Message("Auto", f"m{i}")) for i in range(500)]
            packed = [producer.send_async(Message("Auto", large)) for _ in range(3)]
            alone = await producer.send(Message("Auto", b"keyed", sharding_key="k"))
            results = [await ticket for ticket in (*small, *packed)]
        assert len({result.message_id for result in (*results, alone)}) == 504
        assert len({(r.queue.queue_id, r.queue_offset) for r in (*results, alone)}) == 504
        found = Counter(await bodies(site, "Auto", 504))
        assert found[large] == 3
        assert found[b"keyed"] == 1
        assert len(found) == 502

    run_once(work())


def test_closing_sends_what_lingers(site: Site) -> None:
    async def work() -> None:
        producer = Producer(site.nameserver.address, batching=True, linger_ms=60_000)
        await producer.start()
        ticket = producer.send_async(Message("Linger", b"x"))
        await producer.close()
        assert (await ticket).status is SendStatus.OK

    run_once(work())


def test_packed_bodies_and_oneway(site: Site) -> None:
    async def work() -> None:
        async with Producer(site.nameserver.address) as producer:
            await producer.send(Message("Packed", b"a" * 5000))
            await producer.send(Message("Packed", b"b" * 60_000))
            await producer.send_oneway(Message("Packed", b"oneway"))
        found = sorted(await bodies(site, "Packed", 3))
        assert found == [b"a" * 5000, b"b" * 60_000, b"oneway"]

    run_once(work())


def test_messages_of_one_key_share_a_queue(site: Site) -> None:
    async def work() -> None:
        async with Producer(site.nameserver.address) as producer:
            sent = [
                await producer.send(Message("Keyed", f"{i}", sharding_key=f"k{i % 3}"))
                for i in range(12)
            ]
            by_key = {i: {result.queue for result in sent[i::3]} for i in range(3)}
            assert all(len(queues) == 1 for queues in by_key.values())
            chosen = MessageQueue("Keyed", "broker-a", 2)
            assert (await producer.send(Message("Keyed", b"x"), queue=chosen)).queue_id == 2
            third = await producer.send(
                Message("Keyed", b"x"), selector=lambda queues, m, a: queues[a], argument=3
            )
            assert third.queue_id == 3
            await producer.send(Message("Keyed", b"x"), selector=random_selector)

    run_once(work())


def test_a_queue_that_does_not_exist_is_refused_in_the_brokers_words(site: Site) -> None:
    async def work() -> None:
        async with Producer(site.nameserver.address) as producer:
            await producer.send(Message("Odd", b"x"))
            with pytest.raises(SluiceError, match="queue"):
                await producer.send(Message("Odd", b"x"), queue=MessageQueue("Odd", "broker-a", 77))
            with pytest.raises(NoRoute, match="elsewhere"):
                await producer.send(Message("Odd", b"x"), queue=MessageQueue("Odd", "elsewhere", 0))

    run_once(work())


def test_observers_see_every_send(site: Site) -> None:
    class Seen(Observer):
        def __init__(self) -> None:
            self.rows: list[tuple[str, str, bool]] = []

        def sending(self, message: Message, message_id: str) -> Message:
            return message.with_extra(stamp="1")

        def sent(
            self,
            message: Message,
            message_id: str,
            result: SendResult | None,
            error: SluiceError | None,
            took_ms: float,
        ) -> None:
            self.rows.append((message.topic, message_id, error is None))

    async def work() -> None:
        seen = Seen()
        async with Producer(site.nameserver.address, observers=[seen]) as producer:
            result = await producer.send(Message("Seen", b"x"))
            with pytest.raises(SluiceError):
                await producer.send(
                    Message("Seen", b"x"), queue=MessageQueue("Seen", "broker-a", 77)
                )
        assert [row[2] for row in seen.rows] == [True, False]
        assert seen.rows[0] == ("Seen", result.message_id, True)
        async with PullConsumer(
            site.nameserver.address, group="seen", topics="Seen", start_at="first"
        ) as consumer:
            (message,) = await consumer.poll()
            assert message.properties["stamp"] == "1"

    run_once(work())


def test_a_messages_flag_arrives_whichever_way_it_goes(site: Site) -> None:
    async def work() -> None:
        topic = "Flagged"
        async with (
            Producer(site.nameserver.address) as producer,
            Producer(site.nameserver.address, batching=True) as batcher,
        ):
            await producer.send(Message(topic, "none"))
            await producer.send(Message(topic, "alone", flag=7))
            await producer.send_oneway(Message(topic, "oneway", flag=8))
            await producer.send_batch([Message(topic, "batch", flag=9), Message(topic, "zero")])
            await batcher.send(Message(topic, "gathered", flag=-2))
            await producer.send(Message(topic, "none again"))
        flags: dict[bytes, int] = {}
        async with PullConsumer(
            site.nameserver.address, group="flagged", topics=topic, start_at="first"
        ) as consumer:
            while len(flags) < 7:
                flags |= {message.body: message.flag for message in await consumer.poll()}
        assert flags == {
            b"none": 0,
            b"alone": 7,
            b"oneway": 8,
            b"batch": 9,
            b"zero": 0,
            b"gathered": -2,
            b"none again": 0,
        }

    run_once(work())


def test_a_recall_goes_to_the_broker_that_has_the_message() -> None:
    """The others of the topic cannot take it back."""

    async def work() -> None:
        async with (
            fake_cluster(a=stored, b=stored) as cluster,
            Producer(cluster.nameserver) as producer,
        ):
            for name in ("b", "a", "b"):
                handle = write_handle("orders", name, 1_700_000_000_000, "U1")
                await producer.recall("orders", handle)
            counts = {n: s.count(Request.RECALL_MESSAGE) for n, s in cluster.brokers.items()}
            assert counts == {"a": 1, "b": 2}
            for wrong in ("", "not base64!", "djE=", None):
                with pytest.raises(ParameterInvalid, match="recall_handle"):
                    await producer.recall("orders", wrong)  # type: ignore[arg-type]

    run_once(work())


class Raising(Observer):
    """An observer with mistakes of its own."""

    def sending(self, message: Message, message_id: str) -> Message:
        raise ValueError("mine")

    def sent(
        self,
        message: Message,
        message_id: str,
        result: SendResult | None,
        error: SluiceError | None,
        took_ms: float,
    ) -> None:
        raise ValueError("mine")


@pytest.mark.parametrize("batching", [False, True])
def test_an_observer_that_raises_does_not_stop_a_send(
    site: Site, batching: bool, caplog: pytest.LogCaptureFixture
) -> None:
    async def work() -> None:
        async with Producer(
            site.nameserver.address, observers=[Raising()], batching=batching
        ) as producer:
            for i in range(3):
                assert (await producer.send(Message("Raising", f"{i}"))).status is SendStatus.OK
            await producer.send_batch([Message("Raising", "3")])

    run_once(work())
    assert caplog.text.count("an observer failed") == 8


# ---------------------------------------------------------------------------------- what goes wrong


def test_no_nameserver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NAMESRV_ADDR", raising=False)

    async def work() -> None:
        with pytest.raises(NoNameserver, match="NAMESRV_ADDR"):
            await Producer().start()
        with socket.socket() as unused:
            unused.bind(("127.0.0.1", 0))
            address = f"127.0.0.1:{unused.getsockname()[1]}"
            async with Producer(address) as producer:
                with pytest.raises(NoNameserver, match="is one running there"):
                    await producer.send(Message("orders", b"x"))
                with pytest.raises(NoNameserver):
                    await producer.send_oneway(Message("orders", b"x"))

    run_once(work())


def test_the_second_nameserver_is_asked_where_the_first_is_gone(site: Site) -> None:
    async def work() -> None:
        with socket.socket() as unused:
            unused.bind(("127.0.0.1", 0))
            gone = f"127.0.0.1:{unused.getsockname()[1]}"
            async with Producer(f"{gone};{site.nameserver.address}") as producer:
                await producer.send(Message("Second", b"x"))

    run_once(work())


def test_nameservers_from_the_environment_and_an_address_server(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NAMESRV_ADDR", site.nameserver.address)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        line = await reader.readline()
        while (await reader.readline()).strip():
            pass
        body = b"" if b"?empty" in line else f"{site.nameserver.address}\n".encode()
        status = b"200 OK" if b"/nsaddr" in line else b"404 Not Found"
        writer.write(b"HTTP/1.1 %b\r\nContent-Length: %d\r\n\r\n%b" % (status, len(body), body))
        await writer.drain()
        writer.close()

    async def work() -> None:
        async with Producer() as producer:
            await producer.send(Message("ByName", b"x"))
        monkeypatch.delenv("NAMESRV_ADDR")
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        root = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        async with Producer(nameserver_url=f"{root}/nsaddr") as producer:
            await producer.send(Message("ByName", b"x"))
        with pytest.raises(NoNameserver, match="404"):
            await Producer(nameserver_url=f"{root}/other").start()
        with pytest.raises(NoNameserver, match="lists no nameserver"):
            await Producer(nameserver_url=f"{root}/nsaddr?empty").start()
        with pytest.raises(ConfigError, match="http"):
            Producer(nameserver_url="ftp://x")
        server.close()

    run_once(work())


def test_nameservers_that_were_given_outlast_an_address_server(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: Counter[bytes] = Counter()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        words = (await reader.readline()).split()
        if words:  # a client that closes may have asked for nothing yet
            asked[words[1]] += 1
            writer.write(b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n127.0.0.1:1\n")
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()

    async def work() -> None:
        monkeypatch.setattr("sluice.client.aio.session._ADDRESS_SERVER_SECONDS", 0.001)
        serving: list[asyncio.Task[None]] = []
        server = await asyncio.start_server(
            lambda *streams: serving.append(asyncio.create_task(serve(*streams))), "127.0.0.1", 0
        )
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        async with (
            Producer(site.nameserver.address, nameserver_url=f"{url}/given") as producer,
            Producer(nameserver_url=f"{url}/asked"),
        ):
            await until(lambda: asked[b"/asked"] > 5)
            assert asked[b"/given"] == 0
            await producer.send(Message("Outlasts", b"x"))
        server.close()
        await asyncio.gather(*serving)  # none is left open when the loop ends

    monkeypatch.delenv("NAMESRV_ADDR", raising=False)
    run_once(work())


def test_wrong_types_and_sizes(site: Site) -> None:
    async def work() -> None:
        async with Producer(site.nameserver.address, message_bytes_max=1000) as producer:
            wrong: Any = {"body": "x"}
            with pytest.raises(MessageInvalid, match="not dict"):
                await producer.send(wrong)
            with pytest.raises(MessageInvalid, match="not dict"):
                await producer.send_oneway(wrong)
            with pytest.raises(MessageTooLarge, match="message_bytes_max"):
                await producer.send(Message("Large", b"x" * 1001))
            with pytest.raises(ConfigError, match="topic 'a b'"):
                await producer.send(Message("a b", b"x"))
        async with Producer(site.nameserver.address, compress_bytes_min=0) as producer:
            with pytest.raises(MessageTooLarge, match="never take"):
                await producer.send(Message("Large", b"x" * 100_000))

    run_once(work())


@pytest.mark.parametrize(
    ("code", "status"),
    [
        (10, SendStatus.FLUSH_DISK_TIMEOUT),
        (11, SendStatus.SLAVE_NOT_AVAILABLE),
        (12, SendStatus.FLUSH_SLAVE_TIMEOUT),
    ],
)
def test_stored_but_not_as_well_as_wanted(code: int, status: SendStatus) -> None:
    async def work() -> None:
        async with (
            fake_cluster(a=lambda _: (code, SENT, "slow")) as cluster,
            Producer(cluster.nameserver) as producer,
        ):
            result = await producer.send(Message("orders", b"x"))
            assert (result.status, result.queue_offset) == (status, 5)

    run_once(work())


@pytest.mark.parametrize("code", [1, 2, 14, 16, 17])
def test_another_broker_takes_what_one_refuses(code: int) -> None:
    async def work() -> None:
        async with (
            fake_cluster(a=lambda _: (code, {}, "not now"), b=stored) as cluster,
            Producer(cluster.nameserver, avoid_slow_brokers=False) as producer,
        ):
            for _ in range(8):
                result = await producer.send(Message("orders", b"x"))
                assert result.queue.broker_name == "b"
            assert cluster.brokers["a"].count(310) >= 1

    run_once(work())


def test_a_broker_that_cuts_connections_is_left_alone() -> None:
    async def work() -> None:
        async with (
            fake_cluster(a=stored, b=stored) as cluster,
            Producer(cluster.nameserver) as producer,
        ):
            cluster.brokers["a"].cut_next = True
            for _ in range(20):
                assert (await producer.send(Message("orders", b"x"))).queue.broker_name == "b"
            assert cluster.brokers["a"].count(310) == 1

    run_once(work())


def test_an_ordered_send_is_tried_once() -> None:
    async def work() -> None:
        async with (
            fake_cluster(a=lambda _: (2, {}, "busy"), b=lambda _: (2, {}, "busy")) as cluster,
            Producer(cluster.nameserver) as producer,
        ):
            with pytest.raises(SendFailed, match="tried once"):
                await producer.send(Message("orders", b"x", sharding_key="k"))
            assert sum(server.count(310) for server in cluster.brokers.values()) == 1
            with pytest.raises(SendFailed, match=r"tried 3 times, .*busy"):
                await producer.send(Message("orders", b"x"))
            assert sum(server.count(310) for server in cluster.brokers.values()) == 4

    run_once(work())


def test_a_refusal_that_no_other_broker_would_change_is_raised_at_once() -> None:
    async def work() -> None:
        async with (
            fake_cluster(a=lambda _: (13, {}, "the message is illegal"), b=stored) as cluster,
            Producer(cluster.nameserver) as producer,
        ):
            sent = [producer.send_async(Message("orders", b"x")) for _ in range(4)]
            results = await asyncio.gather(*sent, return_exceptions=True)
            refused = [each for each in results if isinstance(each, MessageIllegal)]
            assert len(refused) == cluster.brokers["a"].count(310) == 2
            assert "never take" in str(refused[0])

    run_once(work())


def test_no_answer_ends_in_time() -> None:
    async def work() -> None:
        async with (
            fake_cluster(a=lambda _: None) as cluster,
            Producer(cluster.nameserver, send_ms=300, close_ms=200) as producer,
        ):
            with pytest.raises(SendFailed, match="did not answer") as failure:
                await producer.send(Message("orders", b"x"))
            assert isinstance(failure.value.__cause__, RequestTimedOut)
            # And what is still under way does not hold a close up.
            left = asyncio.ensure_future(producer.send_async(Message("orders", b"x")))
            await until(lambda: cluster.brokers["a"].count(310) == 2)
        with pytest.raises(SluiceError):
            await left

    run_once(work())


def test_no_queue_can_be_written() -> None:
    async def work() -> None:
        async with fake_cluster(a=stored) as cluster:
            cluster.perm = 4
            async with Producer(cluster.nameserver) as producer:
                with pytest.raises(NoRoute, match="write permission"):
                    await producer.send(Message("orders", b"x"))
                with pytest.raises(NoRoute, match="no broker makes topics"):
                    await producer.send(Message("others", b"x"))

    run_once(work())


def test_permission_is_an_error_of_its_own() -> None:
    async def work() -> None:
        async with (
            fake_cluster(a=lambda _: (16, {}, "Sending is forbidden")) as cluster,
            Producer(cluster.nameserver, tries_max=1) as producer,
        ):
            with pytest.raises(NoPermission, match=r"forbidden.*topicRoute"):
                await producer.send(Message("orders", b"x"))

    run_once(work())


def test_a_broker_that_comes_back_is_used_again() -> None:
    async def work() -> None:
        async with (
            fake_cluster(a=stored) as cluster,
            Producer(cluster.nameserver, send_ms=20_000, tries_max=50) as producer,
        ):
            await producer.send(Message("orders", b"x"))
            server = cluster.brokers["a"]
            port = server.listener.address[1]
            await server.listener.stop(0)
            again = asyncio.ensure_future(producer.send(Message("orders", b"x")))
            await asyncio.sleep(0)
            await server.listener.start("127.0.0.1", port)
            assert (await again).status is SendStatus.OK

    run_once(work())


def test_heartbeats_tell_brokers_of_the_producer() -> None:
    async def work() -> None:
        async with (
            fake_cluster(a=stored) as cluster,
            Producer(cluster.nameserver, group="shop") as producer,
        ):
            await producer.send(Message("orders", b"x"))
            await until(lambda: cluster.brokers["a"].count(Request.HEART_BEAT))
        assert cluster.brokers["a"].count(Request.UNREGISTER_CLIENT) == 1
        beat = next(c for c in cluster.brokers["a"].asked if c.code == Request.HEART_BEAT)
        assert b'"groupName":"shop"' in bytes(beat.body)

    run_once(work())
