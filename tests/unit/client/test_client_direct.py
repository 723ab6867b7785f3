"""Blocking sends that go out from the thread that waits for them, and what happens otherwise."""

from __future__ import annotations

import os
import select
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import cast

import pytest

from sluice import Message, Producer, SendStatus
from sluice.client.sync import direct
from sluice.client.sync.loop_thread import loop_thread
from sluice.errors import ClientClosed, LinkLost, MessageIllegal, MessageTooLarge, SendFailed
from sluice.protocol.remoting import RemotingCommand
from tests.unit.client.admin_kit import Site
from tests.unit.client.client_kit import SENT, Answer, Answering, FakeCluster, stored


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    site = Site()
    site.start()
    yield site
    site.stop()


@contextmanager
def cluster_of(**brokers: Answering) -> Iterator[FakeCluster]:
    """Fake brokers on the loop's thread, for a test that blocks its own."""
    cluster = FakeCluster(**brokers)
    thread = loop_thread()
    thread.run(cluster.start())
    try:
        yield cluster
    finally:
        thread.run(cluster.stop())


@contextmanager
def direct_producer(cluster: FakeCluster, **options: int) -> Iterator[Producer]:
    """A producer that has sent once, so that it knows where the topic is."""
    with Producer(cluster.nameserver, **options) as producer:
        producer.send(Message("orders", "first"))
        yield producer


def lines(producer: Producer) -> dict[str, direct.Line]:
    return producer._direct._lines


def after(count: int, answer: Answering) -> Answering:
    """Take so many sends, and then do as `answer` does."""
    seen: list[RemotingCommand] = []

    def answering(command: RemotingCommand) -> Answer:
        seen.append(command)
        return stored(command) if len(seen) <= count else answer(command)

    return answering


def test_a_plain_send_wakes_no_other_thread(site: Site) -> None:
    with Producer(site.nameserver.address) as producer:
        results = [producer.send(Message("Direct", f"{n}", tags="A")) for n in range(40)]
        assert len(lines(producer)) == 1
        assert len({result.message_id for result in results}) == 40
        places = {(result.queue_id, result.queue_offset) for result in results}
        assert len(places) == 40
        assert {result.queue.queue_id for result in results} == {0, 1, 2, 3}
        with pytest.raises(MessageTooLarge):
            producer.send(Message("Direct", b"x" * (5 * 1024 * 1024)))
    assert not lines(producer)
    with pytest.raises(ClientClosed):
        producer.send(Message("Direct", "late"))


def test_many_threads_share_a_producer(site: Site) -> None:
    sent: list[str] = []
    with Producer(site.nameserver.address) as producer:

        def send() -> None:
            sent.extend(producer.send(Message("Shared", f"{n}")).message_id for n in range(50))

        threads = [threading.Thread(target=send) for _ in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    assert len(set(sent)) == len(sent) == 300


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batching": True}, Message("Around", "x")),
        ({"compress_bytes_min": 1}, Message("Around", "x")),
        ({}, Message("Around", "x", sharding_key="k")),
        ({}, Message("Around", "x", flag=7)),
    ],
)
def test_what_is_not_plain_goes_through_the_loop(
    site: Site, options: dict[str, int], message: Message
) -> None:
    with Producer(site.nameserver.address, **options) as producer:
        for _ in range(3):
            assert producer.send(message).status is SendStatus.OK
        assert not lines(producer)


def test_other_answers_than_the_usual_one() -> None:
    slow = after(1, lambda _: (10, SENT, None))
    with cluster_of(a=slow) as cluster, direct_producer(cluster) as producer:
        assert producer.send(Message("orders", "x")).status is SendStatus.FLUSH_DISK_TIMEOUT
    refused = after(1, lambda _: (13, {}, "illegal"))
    with cluster_of(a=refused) as cluster, direct_producer(cluster) as producer:
        with pytest.raises(MessageIllegal, match="illegal"):
            producer.send(Message("orders", "x"))
        assert lines(producer)  # the connection is as good as before


def test_a_send_that_is_lost_goes_again() -> None:
    with cluster_of(a=stored, b=stored) as cluster, direct_producer(cluster) as producer:
        cluster.brokers["a"].cut_next = True
        for _ in range(10):
            assert producer.send(Message("orders", "x")).queue.broker_name == "b"
        assert cluster.brokers["a"].count(310) <= 2  # the first send may have gone there


def test_no_answer_is_an_error_in_time() -> None:
    mute = after(1, lambda _: None)
    with cluster_of(a=mute) as cluster, direct_producer(cluster, send_ms=200) as producer:
        with pytest.raises(SendFailed, match="did not answer"):
            producer.send(Message("orders", "x"))
        assert not lines(producer)  # what comes over it later is nobody's


def test_closing_ends_a_send_that_waits() -> None:
    asked = threading.Event()

    def never(_: RemotingCommand) -> Answer:
        asked.set()
        return None

    failures: list[BaseException] = []
    with cluster_of(a=after(1, never)) as cluster:
        options = {"send_ms": 60_000, "close_ms": 200}
        with Producer(cluster.nameserver, **options) as producer:
            producer.send(Message("orders", "first"))

            def send() -> None:
                try:
                    producer.send(Message("orders", "x"))
                except (SendFailed, ClientClosed) as error:  # whichever is known first
                    failures.append(error)

            thread = threading.Thread(target=send)
            thread.start()
            assert asked.wait(60)
        thread.join(60)
    assert len(failures) == 1


def test_an_idle_connection_is_not_trusted(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    with Producer(site.nameserver.address) as producer:
        producer.send(Message("Idle", "x"))
        producer.send(Message("Idle", "x"))
        (line,) = lines(producer).values()
        producer.send(Message("Idle", "x"))
        assert list(lines(producer).values()) == [line]
        monkeypatch.setattr(direct, "_IDLE_SECONDS_MAX", -1.0)
        producer.send(Message("Idle", "x"))
        assert list(lines(producer).values()) != [line]


@pytest.mark.parametrize("spin_us", [0, 200])
@pytest.mark.parametrize(
    "answer",
    [b"", b"\0\0", b"\0\0\0\1x", b"\0\0\0\x08\1\0\0\0abcd", b"\x7f\xff\xff\xff"],
)
def test_a_peer_that_talks_nonsense(answer: bytes, spin_us: int) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        line = direct.Line(f"127.0.0.1:{server.getsockname()[1]}", 5, spin_us)
        peer, _ = server.accept()
        with peer:
            peer.sendall(answer)
            peer.shutdown(socket.SHUT_WR)
            with pytest.raises(LinkLost):
                line.exchange(b"question", 1, 5)
        line.close()
    for address in ("127.0.0.1:1", "nonsense"):
        with pytest.raises(LinkLost, match="connect"):
            direct.Line(address, 1)


@pytest.mark.parametrize("spin_us", [0, 1, 10_000])
def test_frames_in_pieces_and_frames_that_are_not_the_answer(spin_us: int) -> None:
    answers: list[tuple[int, Callable[[int], bytes]]] = [(-1, _json_answer), (0, _binary_answer)]
    for code, make in answers:
        with socket.create_server(("127.0.0.1", 0)) as server:
            line = direct.Line(f"127.0.0.1:{server.getsockname()[1]}", 5, spin_us)
            peer, _ = server.accept()
            data = make(6) + make(7)
            with peer:
                peer.sendall(data[:3])
                threading.Timer(0.05, peer.sendall, (data[3:],)).start()
                assert line.exchange(b"question", 7, 60) == (code, make(7)[4:])
            line.close()


def test_who_looked_in_vain_looks_less_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        line, asleep = direct.Line(address, 5, 1), direct.Line(address, 5, 0)
        (peer, _), (other, _) = server.accept(), server.accept()
        with peer, other:
            waits = _looks(line, 40)
            assert waits == [0, 2, 6, 14, 30]
            assert _looks(asleep, 40) == []
            peer.sendall(b"something")
            assert select.select([line._socket], [], [], 60)[0]
            found = next(data for data in iter(line._look, None) if data)
            assert found == b"something"
            assert _looks(line, 7) == [0, 2, 6]  # one that came is reason to look for the next
            monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})
            alone = direct.Line(address, 5, 10_000)
            assert _looks(alone, 4) == []
        for one in (line, asleep, alone):
            one.close()


def _looks(line: direct.Line, count: int) -> list[int]:
    """In which of so many calls the line asked the system whether something has come."""
    looked: list[int] = []
    plain = line._socket

    class Watched:
        def recv(self, size: int, flags: int) -> bytes:
            assert flags == socket.MSG_DONTWAIT
            looked.append(number)
            return plain.recv(size, flags)

    line._set_timeout(60)
    line._socket = cast("socket.socket", Watched())
    number = 0
    while number < count:
        assert line._look() == b""
        number += 1
    line._socket = plain
    return sorted(set(looked))


def _json_answer(number: int) -> bytes:
    from sluice.protocol import remoting

    return bytes(remoting.answer(RemotingCommand(310, number), 0, SENT, None))


def _binary_answer(number: int) -> bytes:
    from sluice.protocol import remoting, remoting_fast

    return bytes(remoting_fast.send_answer(remoting.BINARY, number, "AA", 3, 41, "U1"))
