"""Peers that stop reading, flood, dawdle or talk nonsense: what they cost, and that others notice
nothing.

Everything goes over real sockets. What is asserted is bytes that are kept and requests that are
served to others, never a time.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator

import pytest

from sluice import net
from sluice.log_share import LINES_MAX
from sluice.net import Connection
from sluice.protocol import remoting
from sluice.protocol.remoting import JSON, RemotingCommand
from sluice.protocol.remoting_codes import RequestCode as Request
from tests.unit.broker.broker_kit import FLAG_SUBSCRIPTION, Rig, pull_fields, running, send_fields
from tests.unit.loops import run_once, until

KIB = 1024


@pytest.fixture(autouse=True)
def _quick_sweeps(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(net, "_SWEEP_SECONDS", 0.01)
    caplog.set_level("INFO", "sluice")


class Peer:
    """A socket that does what a client of RocketMQ never would."""

    def __init__(self, rig: Rig, receive_bytes: int = 0) -> None:
        self.socket = socket.socket()
        if receive_bytes:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        self.socket.connect(rig.broker.listener.address)
        self.socket.setblocking(False)
        self.name = "{}:{}".format(*self.socket.getsockname())
        self._rig = rig

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    async def say(self, data: bytes) -> None:
        await asyncio.get_running_loop().sock_sendall(self.socket, data)

    async def hear(self, count: int = 65_536) -> bytes:
        """What comes next; empty where the broker has closed."""
        try:
            return await asyncio.get_running_loop().sock_recv(self.socket, count)
        except ConnectionError:
            return b""

    async def hear_all(self, word: bytes, count: int) -> None:
        """Read until the word has come so many times."""
        rest = b""
        while count > 0:
            data = await self.hear()
            assert data, f"the broker closed, and {word!r} was to come {count} times more"
            count -= (rest + data).count(word)
            rest = (rest + data)[-len(word) + 1 :]

    async def connection(self) -> Connection:
        """The broker's side of it."""

        def found() -> Iterator[Connection]:
            return (c for c in self._rig.broker.listener.connections if str(c) == self.name)

        await until(lambda: any(found()))
        return next(found())

    def lines(self, caplog: pytest.LogCaptureFixture) -> list[str]:
        return [line for line in caplog.messages if self.name in line]


def request(code: int, fields: dict[str, object], body: bytes = b"", opaque: int = 1) -> bytes:
    ext = {name: str(value) for name, value in fields.items()}
    return remoting.encode(RemotingCommand(code, opaque, 0, ext, body, serialization=JSON))


async def others_are_served(rig: Rig, count: int = 20) -> None:
    for _ in range(count):
        await rig.send("orders", b"of a bystander")
        assert (await rig.pull("orders", 0)).code == 0


def test_who_stops_reading_costs_a_bounded_amount_and_is_dropped(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def work() -> None:
        async with running(unsent_bytes_max=256 * KIB, unsent_ms=1500) as rig:
            await rig.make_topic("orders")
            for _ in range(8):
                await rig.send("orders", bytes(60 * KIB))
            pull = request(
                Request.PULL_MESSAGE, pull_fields("orders", 0, 0, "readers", FLAG_SUBSCRIPTION)
            )
            with Peer(rig, receive_bytes=4096) as greedy:
                # Each of these is some 300 bytes, and its answer 256 KiB.
                talking = asyncio.create_task(greedy.say(pull * 50_000))
                connection = await greedy.connection()
                await until(lambda: "did not read" in connection.overdue(float("inf")))
                assert connection.unsent_bytes < 64 * 256 * KIB + 512 * KIB
                await others_are_served(rig)
                assert connection.unsent_bytes < 64 * 256 * KIB + 512 * KIB
                await until(lambda: connection.close_reason)
                await asyncio.gather(talking, return_exceptions=True)
                assert [line.split(" dropped: ")[1] for line in greedy.lines(caplog)] == [
                    "did not read its answers for 1500 ms"
                ]
            await others_are_served(rig)

    run_once(work())


def test_who_floods_with_requests_leaves_the_others_their_turn() -> None:
    async def work() -> None:
        async with running() as rig:
            await rig.make_topic("orders")
            asked = 20_000
            one = request(Request.GET_MAX_OFFSET, {"topic": "orders", "queueId": 0})
            with Peer(rig) as flood:

                async def listen() -> int:
                    total = 0
                    while total < asked * 40 and (data := await flood.hear()):
                        total += len(data)
                    return total

                talking = asyncio.create_task(flood.say(one * asked))
                listening = asyncio.create_task(listen())
                connection = await flood.connection()
                served = 0
                while connection.received_count < asked:
                    await rig.send("orders", b"of a bystander")
                    served += 1
                # A turn takes 512 of its requests, and a bystander's needs a few turns.
                assert served > asked / 512 / 10
                await talking
                assert await listening >= asked * 40

    run_once(work())


def test_who_floods_with_sends_is_answered_and_everything_is_stored() -> None:
    async def work() -> None:
        async with running() as rig:
            await rig.make_topic("orders")
            count = 5_000
            with Peer(rig) as flood:
                talking = asyncio.create_task(
                    flood.say(request(Request.SEND_MESSAGE_V2, send_fields("orders"), b"x") * count)
                )
                await flood.hear_all(b"queueOffset", count)
                await talking
            assert rig.broker.store.max_offset("orders", 0) == count

    run_once(work())


def test_who_sends_a_byte_now_and_then_is_dropped_and_holds_up_nobody(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def work() -> None:
        async with running(frame_ms=300, first_frame_ms=300) as rig:
            await rig.make_topic("orders")
            # More bytes than anybody is served meanwhile.
            frame = request(Request.SEND_MESSAGE_V2, send_fields("orders"), bytes(100_000))
            with Peer(rig) as slow:
                connection = await slow.connection()
                for at in range(len(frame)):
                    try:
                        await slow.say(frame[at : at + 1])
                    except ConnectionError:
                        break
                    await others_are_served(rig, 1)
                    assert connection._reader.kept_bytes <= at + 1
                assert at < len(frame) - 1, "it was dropped before it was ready"
                assert connection.received_count == 0
                assert len(slow.lines(caplog)) == 1
                assert "no whole frame within 300 ms" in slow.lines(caplog)[0]
            await others_are_served(rig)

    run_once(work())


@pytest.mark.parametrize(
    ("junk", "reason"),
    [
        (b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", "a frame of 1195725856 bytes"),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01", "a frame of 369295618 bytes"),  # TLS, and none here
        (b"\x00\x00\x00\x04\x00\x00\x00\xff", "header"),
        (b"\x00\x00\x00\x0c\x00\x00\x00\x08not json", "header"),
        (b"\xff" * 100, "a frame of -1 bytes"),
    ],
    ids=["http", "tls", "a header beyond the frame", "no json", "ones"],
)
def test_junk_closes_its_own_connection_with_one_line(
    junk: bytes, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def work() -> None:
        async with running() as rig:
            await rig.make_topic("orders")
            with Peer(rig) as noisy:
                await noisy.connection()
                await noisy.say(junk)
                while await noisy.hear():
                    pass
                assert len(noisy.lines(caplog)) == 1
                assert reason in noisy.lines(caplog)[0]
            await others_are_served(rig)

    run_once(work())


def test_requests_that_are_refused_do_not_fill_the_log(caplog: pytest.LogCaptureFixture) -> None:
    async def work() -> None:
        async with running() as rig:
            await rig.make_topic("orders")
            with Peer(rig) as noisy:
                bad = request(Request.PULL_MESSAGE, {}) + request(9999, {})
                await noisy.say(bad * 500)
                await noisy.hear_all(b'"opaque"', 1000)
                lines = noisy.lines(caplog)
                assert len(lines) == LINES_MAX
                assert {"refused" in line for line in lines} == {True, False}
            await others_are_served(rig)

    run_once(work())


def test_one_address_has_so_many_connections(caplog: pytest.LogCaptureFixture) -> None:
    async def work() -> None:
        async with running(connections_per_address_max=2) as rig:
            await rig.make_topic("orders")
            with Peer(rig) as second:
                await second.connection()
                with Peer(rig) as third:
                    assert await third.hear() == b""
                    assert len(third.lines(caplog)) == 1
                    assert "2 connections from this address are open" in third.lines(caplog)[0]
                await others_are_served(rig)

    run_once(work())
