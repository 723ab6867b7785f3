"""This module tests the listener: every limit, what a bad peer costs, TLS beside plain text."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress

import pytest

from sluice import net
from sluice.config.listening import TlsMode
from sluice.errors import ConfigError, ProtocolError
from sluice.net import Connection, Limits, Listener, connect
from sluice.protocol.framing import Frame, frame_of
from sluice.tls import server_tls
from tests.certificates import Certificate, self_signed
from tests.unit.loops import Run, both_loops, run_once, until

HOST = "127.0.0.1"
NEVER = float("inf")


class Echo:
    """Sends every frame back, or what `answer` makes of it."""

    def __init__(self, answer: Callable[[bytes], bytes] = lambda payload: payload) -> None:
        self.answer = answer
        self.open: list[Connection] = []
        self.reasons: list[str] = []
        self.frames: list[bytes] = []

    def opened(self, connection: Connection) -> None:
        self.open.append(connection)

    def received(self, connection: Connection, frames: list[Frame]) -> None:
        for frame in frames:
            payload = bytes(frame)
            self.frames.append(payload)
            connection.send(frame_of(self.answer(payload)))

    def closed(self, connection: Connection) -> None:
        self.open.remove(connection)
        self.reasons.append(connection.close_reason)


class Client:
    """The other end, as plain streams."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def ask(self, payload: bytes) -> bytes:
        self.writer.write(frame_of(payload))
        return await self.answer()

    async def answer(self) -> bytes:
        size = int.from_bytes(await self.reader.readexactly(4), "big")
        return await self.reader.readexactly(size)

    async def is_closed(self) -> bool:
        try:
            return await self.reader.read() == b""
        except ConnectionError:
            return True

    async def close(self) -> None:
        self.writer.close()
        with suppress(ConnectionError, ssl.SSLError):
            await self.writer.wait_closed()


class Site:
    """One listener and the clients that a test opens to it."""

    def __init__(self, handler: Echo, listener: Listener) -> None:
        self.handler = handler
        self.listener = listener
        self.clients: list[Client] = []

    async def client(
        self, *, source: str | None = None, tls: ssl.SSLContext | None = None
    ) -> Client:
        local = None if source is None else (source, 0)
        streams = await asyncio.open_connection(*self.listener.address, local_addr=local, ssl=tls)
        self.clients.append(Client(*streams))
        return self.clients[-1]


@asynccontextmanager
async def listening(
    limits: Limits | None = None,
    handler: Echo | None = None,
    tls: ssl.SSLContext | None = None,
    tls_mode: TlsMode = "off",
) -> AsyncIterator[Site]:
    echo = handler or Echo()
    listener = Listener(echo, limits or Limits(), tls=tls, tls_mode=tls_mode)
    await listener.start(HOST, 0)
    site = Site(echo, listener)
    try:
        yield site
    finally:
        for client in site.clients:
            await client.close()
        await listener.stop()


# Frames -----------------------------------------------------------------------------------------


@both_loops
def test_frames_come_whole_however_they_were_cut(run: Run) -> None:
    async def work() -> None:
        async with listening() as site:
            client = await site.client()
            data = frame_of(b"first") + frame_of(b"second") + frame_of(b"x" * 100_000)
            for size in (1, 3, 7, 50_000, len(data)):
                client.writer.write(data[:size])
                await client.writer.drain()
                data = data[size:]
            assert [len(await client.answer()) for _ in range(3)] == [5, 6, 100_000]
            assert site.handler.open[0].received_count == 3

    run(work())


@both_loops
def test_answers_of_one_turn_go_out_in_order(run: Run) -> None:
    async def work() -> None:
        async with listening() as site:
            client = await site.client()
            payloads = [b"%04d" % number for number in range(500)]
            client.writer.write(b"".join(map(frame_of, payloads)))
            assert [await client.answer() for _ in payloads] == payloads

    run(work())


@both_loops
@pytest.mark.parametrize(
    "junk", [b"\x7f\xff\xff\xff", b"\xff" * 8, b"\0\0\0\3abc", b"GET / HTTP/1.1"]
)
def test_an_impossible_length_closes_and_what_came_before_is_served(run: Run, junk: bytes) -> None:
    async def work() -> None:
        async with listening(Limits(frame_bytes_max=1000)) as site:
            bystander = await site.client()
            client = await site.client()
            client.writer.write(frame_of(b"good") + junk)
            assert await client.answer() == b"good"
            assert await client.is_closed()
            assert "bytes is outside of 4 to 1000" in site.handler.reasons[0]
            assert await bystander.ask(b"still here") == b"still here"

    run(work())


@both_loops
def test_a_handler_that_does_not_trust_a_frame_closes_the_connection(run: Run) -> None:
    def answer(payload: bytes) -> bytes:
        if payload == b"nonsense":
            raise ProtocolError("not a header")
        return payload

    async def work() -> None:
        async with listening(handler=Echo(answer)) as site:
            client = await site.client()
            client.writer.write(frame_of(b"good") + frame_of(b"nonsense") + frame_of(b"unseen"))
            assert await client.answer() == b"good"
            assert await client.is_closed()
            assert site.handler.reasons == ["not a header"]
            assert b"unseen" not in site.handler.frames

    run(work())


# Limits -----------------------------------------------------------------------------------------


@both_loops
def test_connections_over_the_limit_are_closed_at_once_and_a_free_place_is_given_again(
    run: Run,
) -> None:
    async def work() -> None:
        async with listening(Limits(connections_max=2)) as site:
            first, second = await site.client(), await site.client()
            assert [await c.ask(b"here") for c in (first, second)] == [b"here"] * 2
            assert await (await site.client()).is_closed()
            assert site.listener.refused == {"connections_max": 1}
            assert await second.ask(b"here") == b"here"
            await first.close()
            await until(lambda: len(site.handler.open) == 1)
            assert await (await site.client()).ask(b"here") == b"here"

    run(work())


@both_loops
def test_one_address_cannot_take_the_places_of_others(run: Run) -> None:
    async def work() -> None:
        async with listening(Limits(connections_per_address_max=1)) as site:
            client = await site.client()
            assert await client.ask(b"here") == b"here"
            assert await (await site.client()).is_closed()
            assert await (await site.client(source="127.0.0.2")).ask(b"other") == b"other"
            await client.close()
            await until(lambda: len(site.handler.open) == 1)
            assert await (await site.client()).ask(b"again") == b"again"

    run(work())


class Pipe(asyncio.Transport):
    """A transport that keeps what is written, and lets the test say what the peer does."""

    def __init__(self) -> None:
        super().__init__()
        self.writes: list[bytes] = []
        self.reading = [True]
        self.is_gone = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.writes.append(bytes(data))

    def writelines(self, parts: object) -> None:
        assert isinstance(parts, list)
        self.write(b"".join(parts))

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        pass

    def get_write_buffer_size(self) -> int:
        return 0

    def pause_reading(self) -> None:
        self.reading.append(False)

    def resume_reading(self) -> None:
        self.reading.append(True)

    def is_closing(self) -> bool:
        return self.is_gone

    def close(self) -> None:
        self.is_gone = True

    abort = close


def piped(limits: Limits) -> tuple[Connection, Pipe]:
    connection, pipe = Connection(Echo(), limits), Pipe()
    connection.connection_made(pipe)
    return connection, pipe


def receive(connection: Connection, data: bytes) -> None:
    connection.get_buffer(-1)[: len(data)] = data
    connection.buffer_updated(len(data))


def test_what_is_answered_at_once_goes_at_once() -> None:
    async def work() -> None:
        connection, pipe = piped(Limits())
        receive(connection, frame_of(b"first") + frame_of(b"second"))
        assert pipe.writes == [frame_of(b"first") + frame_of(b"second")]
        connection.send(b"later")
        assert len(pipe.writes) == 1  # others of this turn may come
        receive(connection, frame_of(b"three"))
        assert pipe.writes[1:] == [b"later" + frame_of(b"three")]
        await asyncio.sleep(0)
        assert len(pipe.writes) == 2

    run_once(work())


def test_silence_is_measured_from_what_was_last_heard() -> None:
    async def work() -> None:
        connection, _ = piped(Limits(first_frame_ms=100, idle_ms=1000, frame_ms=500))
        start = connection.opened_at
        assert connection.overdue(start + 0.09) == ""
        assert connection.overdue(start + 0.2) == "no whole frame within 100 ms"
        receive(connection, frame_of(b"hello"))
        heard = connection.heard_at
        assert connection.overdue(heard + 0.9) == ""
        assert connection.overdue(heard + 1.1) == "silent for 1000 ms"

    run_once(work())


def test_a_byte_now_and_then_does_not_put_off_the_end_of_a_frame() -> None:
    async def work() -> None:
        connection, _ = piped(Limits(frame_ms=500, idle_ms=10_000_000))
        receive(connection, frame_of(b"hello") + b"\0")  # the next one begins here
        begun = connection.heard_at
        for byte in frame_of(b"slow")[1:-1]:
            receive(connection, bytes([byte]))
            connection.heard_at += 3600  # as if an hour had passed
        assert connection.overdue(begun + 0.4) == ""
        assert connection.overdue(begun + 0.6) == "a frame took longer than 500 ms"
        receive(connection, b"w")
        assert connection.received_count == 2
        assert connection.overdue(connection.heard_at + 0.6) == ""

    run_once(work())


def test_a_peer_that_does_not_read_is_not_read_from() -> None:
    async def work() -> None:
        connection, pipe = piped(Limits(unsent_ms=100, idle_ms=10))
        receive(connection, frame_of(b"hello"))
        connection.pause_writing()
        assert pipe.reading[-1] is False
        # It cannot be heard of now, so it is not called silent.
        assert connection.overdue(NEVER) == "did not read its answers for 100 ms"
        connection.resume_writing()
        assert pipe.reading == [True, False, True]
        assert connection.overdue(connection.heard_at) == ""

    run_once(work())


def test_what_is_sent_in_one_turn_is_one_write() -> None:
    async def work() -> None:
        connection, pipe = piped(Limits())
        connection.send(b"head", b"body")
        connection.send(b"more")
        assert pipe.writes == []
        await asyncio.sleep(0)
        assert pipe.writes == [b"headbodymore"]
        connection.send(b"last words")
        connection.close("done")
        assert pipe.writes == [b"headbodymore", b"last words"]
        connection.connection_lost(None)
        connection.send(b"into the void")
        connection.close("again")
        connection.abort("again")
        await asyncio.sleep(0)
        assert len(pipe.writes) == 2
        assert (connection.is_open, connection.close_reason) == (False, "done")

    run_once(work())


@both_loops
@pytest.mark.parametrize("begin", [b"", b"\0", b"\0\0\0\x0ahalf"])
def test_who_sends_nothing_or_half_a_frame_is_closed(
    run: Run, begin: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(net, "_SWEEP_SECONDS", 0.01)

    async def work() -> None:
        async with listening(Limits(first_frame_ms=50)) as site:
            client = await site.client()
            client.writer.write(begin)
            assert await client.is_closed()
            assert site.handler.reasons == ["no whole frame within 50 ms"]

    run(work())


@both_loops
def test_a_peer_that_never_reads_costs_a_bounded_amount_and_nobody_else(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(net, "_SWEEP_SECONDS", 0.01)
    asked_bytes, answer_bytes, asked = 64 * 1024, 1024 * 1024, 400

    def answer(payload: bytes) -> bytes:
        return payload if len(payload) < 100 else bytes(answer_bytes)

    async def work() -> None:
        limits = Limits(unsent_bytes_max=answer_bytes, unsent_ms=1500)
        async with listening(limits, Echo(answer)) as site:
            bystander = await site.client()
            assert await bystander.ask(b"small") == b"small"
            greedy = await site.client()
            await until(lambda: len(site.handler.open) == 2)
            connection = site.handler.open[1]
            for _ in range(asked):
                greedy.writer.write(frame_of(bytes(asked_bytes)))
            await until(lambda: "did not read" in connection.overdue(NEVER))
            assert await bystander.ask(b"small") == b"small"
            # One read takes 256 KiB, that is four questions, and the last one may be over.
            assert connection.unsent_bytes <= answer_bytes + 6 * (answer_bytes + 4)
            assert connection.received_count < asked
            await until(lambda: site.handler.reasons)
            assert site.handler.reasons == ["did not read its answers for 1500 ms"]
            assert await bystander.ask(b"small") == b"small"
            greedy.writer.transport.abort()

    run(work())


@both_loops
def test_little_of_what_is_not_sent_lies_in_the_systems_buffer(run: Run) -> None:
    answer = bytes(12 << 20)

    async def work() -> None:
        async with listening(handler=Echo(lambda _: answer)) as site:
            client = await site.client()
            assert await client.ask(b"question") == answer
            transport = site.handler.open[0]._transport
            assert transport is not None
            raw = transport.get_extra_info("socket")
            assert raw.getsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT) == 512 * 1024
            # Some systems pace all connections; within a machine nothing is (tcp.py).
            congestion = raw.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16)
            assert not congestion.startswith(b"bbr")

    run(work())


# Starting and stopping --------------------------------------------------------------------------


@both_loops
def test_a_port_in_use_is_a_config_error(run: Run) -> None:
    async def work() -> None:
        async with listening() as site:
            other = Listener(Echo(), Limits())
            with pytest.raises(ConfigError, match=r"127\.0\.0\.1:\d+ is in use"):
                await other.start(*site.listener.address)
            with pytest.raises(ConfigError, match=r"cannot listen on 192\.0\.2\.1:0"):
                await other.start("192.0.2.1", 0)

    run(work())


@both_loops
def test_a_stop_sends_what_is_waiting_and_closes_all(run: Run) -> None:
    async def work() -> None:
        async with listening() as site:
            client, idle = await site.client(), await site.client()
            assert await client.ask(b"here") == b"here"
            assert await idle.ask(b"here") == b"here"
            for connection in site.handler.open:
                connection.send(frame_of(b"goodbye"))
            await site.listener.stop()
            assert [await c.answer() for c in (client, idle)] == [b"goodbye"] * 2
            assert await client.is_closed()
            assert site.handler.reasons == ["the server stops"] * 2
            assert not site.listener.connections
            with pytest.raises(OSError, match=r"."):
                await site.client()

    run(work())


@both_loops
def test_a_stop_does_not_wait_for_who_does_not_read(run: Run) -> None:
    async def work() -> None:
        async with listening() as site:
            client = await site.client()
            await client.ask(b"here")
            site.handler.open[0].send(bytes(64 * 1024 * 1024))
            await site.listener.stop(drain_seconds=0.05)
            await until(lambda: site.handler.reasons)
            client.writer.transport.abort()

    run(work())


@both_loops
def test_connecting(run: Run) -> None:
    async def work() -> None:
        async with listening() as site:
            here = Echo()
            connection = await connect(*site.listener.address, here, Limits())
            connection.send(frame_of(b"ping"))
            await until(lambda: here.frames)
            assert here.frames[0] == b"ping"
            connection.abort("enough")
            await until(lambda: here.reasons)
            assert here.reasons == ["enough"]
            address = site.listener.address
        with pytest.raises(ConnectionRefusedError):
            await connect(*address, Echo(), Limits())

    run(work())


# TLS --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Certificate:
    return self_signed(tmp_path_factory.mktemp("tls"), "server")


def trusting(certificate_file: str) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=certificate_file)


@both_loops
def test_tls_and_plain_text_share_a_port(run: Run, certificate: Certificate) -> None:
    async def work() -> None:
        context, mode = server_tls("permissive", *certificate)
        assert mode == "permissive"
        async with listening(tls=context, tls_mode=mode) as site:
            plain = await site.client()
            secret = await site.client(tls=trusting(certificate[0]))
            assert secret.writer.get_extra_info("cipher") is not None
            for size in (4, 100_000):
                assert await plain.ask(bytes(size)) == bytes(size)
                assert await secret.ask(bytes(size)) == bytes(size)
            over_tls = await connect(
                *site.listener.address, here := Echo(), Limits(), tls=trusting(certificate[0])
            )
            over_tls.send(frame_of(b"ping"))
            await until(lambda: here.frames)
            over_tls.abort("enough")
            await until(lambda: here.reasons)

    run(work())


@both_loops
def test_plain_text_is_refused_where_tls_is_required(run: Run, certificate: Certificate) -> None:
    async def work() -> None:
        context, mode = server_tls("enforcing", *certificate)
        async with listening(Limits(connections_max=1), tls=context, tls_mode=mode) as site:
            plain = await site.client()
            plain.writer.write(frame_of(b"hello"))
            assert await plain.is_closed()
            assert site.handler.frames == []
            secret = await site.client(tls=trusting(certificate[0]))
            assert await secret.ask(b"hello") == b"hello"

    run(work())


@both_loops
def test_a_handshake_that_never_ends_holds_nothing_up(run: Run, certificate: Certificate) -> None:
    async def work() -> None:
        context, mode = server_tls("permissive", *certificate)
        async with listening(tls=context, tls_mode=mode) as site:
            silent, half = await site.client(), await site.client()
            half.writer.write(b"\x16\x03\x01")
            other = await site.client()
            assert await other.ask(b"here") == b"here"
            await until(lambda: len(site.listener.connections) == 2)
            await site.listener.stop(drain_seconds=3600)
            assert not site.listener.connections
            assert await silent.is_closed()
            assert await half.is_closed()

    run(work())
