"""Peers that send too much at once: what waits, who has the next turn, how long the log gets."""

from __future__ import annotations

import asyncio

import pytest

from sluice.errors import ConfigError
from sluice.log_share import LINES_MAX
from sluice.net import Limits, Listener
from sluice.protocol.framing import frame_of
from sluice.tls import client_tls, server_tls
from tests.certificates import Certificate, self_signed
from tests.unit.loops import Run, both_loops, run_once, until
from tests.unit.test_net import HOST, NEVER, Client, Echo, listening


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Certificate:
    return self_signed(tmp_path_factory.mktemp("tls"), "server")


@both_loops
@pytest.mark.parametrize("over_tls", [False, True], ids=["plain", "tls"])
def test_frames_of_who_does_not_read_wait_and_are_served_when_it_reads(
    run: Run, over_tls: bool, certificate: Certificate
) -> None:
    answer_bytes, asked = 64 * 1024, 3_000
    context, mode = server_tls("permissive" if over_tls else "off", *certificate)
    trusted = client_tls(certificate.file) if over_tls else None

    async def work() -> None:
        limits = Limits(unsent_bytes_max=answer_bytes)
        echo = Echo(lambda payload: payload + bytes(answer_bytes - len(payload)))
        async with listening(limits, echo, tls=context, tls_mode=mode) as site:
            greedy = await site.client(tls=trusted)
            payloads = [b"%04d" % number for number in range(asked)]
            greedy.writer.write(b"".join(map(frame_of, payloads)))
            await until(lambda: echo.open and "did not read" in echo.open[0].overdue(NEVER))
            connection = echo.open[0]
            # It is looked at after every 64 frames.
            assert connection.unsent_bytes <= 66 * (answer_bytes + 4)
            assert len(echo.frames) < asked
            for payload in payloads:
                assert (await greedy.answer()).startswith(payload)
            assert connection.received_count == asked
            assert connection.overdue(connection.heard_at) == ""
            assert (await greedy.ask(b"last")).startswith(b"last")

    run(work())


@both_loops
def test_who_floods_leaves_the_others_their_turn(run: Run) -> None:
    """Counted in frames that one connection has served between two answers of another."""
    asked = 100_000
    flood = frame_of(b"flood") * asked

    def answer(payload: bytes) -> bytes:
        return b"seen" if payload == b"flood" else payload

    async def drain(client: Client) -> None:
        for _ in range(asked):
            assert await client.answer() == b"seen"

    async def work() -> None:
        echo = Echo(answer)
        async with listening(handler=echo) as site:
            greedy, other = await site.client(), await site.client()
            assert await other.ask(b"here") == b"here"
            greedy.writer.write(flood)
            reading = asyncio.create_task(drain(greedy))
            gaps = []
            while not reading.done():
                before = len(echo.frames)
                assert await other.ask(b"me too") == b"me too"
                gaps.append(len(echo.frames) - before)
            await reading
            assert len(gaps) > 20
            assert max(gaps) < 10_000, "a few turns of 512 frames each"

    run(work())


@both_loops
def test_all_that_came_before_an_impossible_length_is_served(run: Run) -> None:
    async def work() -> None:
        async with listening(Limits(frame_bytes_max=1000)) as site:
            client = await site.client()
            payloads = [b"%04d" % number for number in range(3_000)]
            client.writer.write(b"".join(map(frame_of, payloads)) + b"\xff" * 8)
            assert [await client.answer() for _ in payloads] == payloads
            assert await client.is_closed()
            assert "bytes is outside of 4 to 1000" in site.handler.reasons[0]

    run(work())


def test_a_peer_over_ipv6_is_known_by_its_short_address(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def work() -> None:
        listener = Listener(echo := Echo(), Limits(connections_per_address_max=1))
        try:
            await listener.start("::", 0)
        except ConfigError as error:
            pytest.skip(f"no IPv6 here: {error}")
        streams = await asyncio.open_connection(HOST, listener.address[1])
        client = Client(*streams)
        assert await client.ask(b"here") == b"here"
        assert (echo.open[0].peer[0], echo.open[0].local[0]) == (HOST, HOST)
        assert len(echo.open[0].packed_peer()) == 8
        await client.close()
        await until(lambda: not echo.open)
        again = Client(*await asyncio.open_connection(HOST, listener.address[1]))
        assert await again.ask(b"here") == b"here", "its place was given back"
        await again.close()
        await listener.stop()

    run_once(work())


def test_refused_connections_do_not_fill_the_log(caplog: pytest.LogCaptureFixture) -> None:
    async def work() -> None:
        async with listening(Limits(connections_max=1)) as site:
            assert await (await site.client()).ask(b"here") == b"here"
            for _ in range(100):
                assert await (await site.client()).is_closed()
            assert site.listener.refused == {"connections_max": 100}

    run_once(work())
    lines = [line for line in caplog.messages if "1 connections are open (connections_max)" in line]
    assert len(lines) == LINES_MAX
    assert "127.0.0.1:" in lines[0]
