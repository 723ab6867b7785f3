"""The client that blocks: answers, lost links, and peers that do not keep to the protocol."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from sluice.client.blocking import BlockingLink, LinkPool
from sluice.errors import LinkLost, RequestTimedOut
from sluice.protocol.remoting_codes import RequestCode as Request
from sluice.protocol.remoting_codes import ResponseCode as Response
from tests.unit.broker.broker_kit import Rig, running, send_fields
from tests.unit.loops import run_once


@contextmanager
def peer(serve: Callable[[socket.socket], None]) -> Iterator[str]:
    """Something that listens, and does one thing with whoever connects."""
    listener = socket.create_server(("127.0.0.1", 0))

    def work() -> None:
        connection, _ = listener.accept()
        with connection:
            serve(connection)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    try:
        yield f"127.0.0.1:{listener.getsockname()[1]}"
    finally:
        thread.join(60)
        listener.close()


def test_requests_and_answers_with_large_bodies() -> None:
    def ask(rig: Rig) -> None:
        pool = LinkPool()
        address = rig.broker.address
        body = b"x" * 60_000
        fields = {name: str(value) for name, value in send_fields("t", 0).items()}
        for number in range(3):
            answer = pool.request(address, Request.SEND_MESSAGE_V2, fields, memoryview(body))
            assert (answer.code, answer.ext["queueOffset"]) == (Response.SUCCESS, str(number))
        ext = {"topic": "t", "queueId": "0", "offset": "0", "toOffset": "9", "maxBytes": "1000000"}
        found = pool.request(address, Request.SLUICE_BULK_FETCH, ext)
        assert found.ext["count"] == "3"
        assert bytes(found.body).count(body) == 3
        assert pool.request(address, 999_999, {}).code == Response.REQUEST_CODE_NOT_SUPPORTED
        pool.close()

    async def work() -> None:
        async with running() as rig:
            await rig.make_topic("t")
            await asyncio.to_thread(ask, rig)

    run_once(work())


def test_a_link_that_was_closed_meanwhile_is_replaced() -> None:
    def ask(pool: LinkPool, address: str) -> int:
        return pool.request(address, Request.GET_BROKER_CONFIG, {}).code

    async def work() -> None:
        pool = LinkPool()
        async with running() as rig:
            address = rig.broker.address
            assert await asyncio.to_thread(ask, pool, address) == Response.SUCCESS
            for connection in list(rig.broker.api.connections):
                connection.abort("as if it had been idle for long")
            assert await asyncio.to_thread(ask, pool, address) == Response.SUCCESS
        pool.close()

    run_once(work())


def test_nobody_there() -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    address = f"127.0.0.1:{listener.getsockname()[1]}"
    listener.close()
    with pytest.raises(LinkLost, match="cannot connect"):
        BlockingLink(address)
    with pytest.raises(LinkLost, match="is not host:port"):
        BlockingLink("nowhere")


def test_a_peer_that_closes_or_sends_nonsense() -> None:
    for reply in (b"", b"\0\0\0\1", b"\x7f\xff\xff\xff", b"\0\0\0\x08\0\0\0\x04junk"):

        def serve(connection: socket.socket, reply: bytes = reply) -> None:
            connection.recv(65536)
            connection.sendall(reply)

        with peer(serve) as address:
            link = BlockingLink(address)
            with pytest.raises(LinkLost, match="the connection was lost"):
                link.request(Request.GET_BROKER_CONFIG, {})
            assert not link.is_open
            with pytest.raises(LinkLost, match="is closed"):
                link.request(Request.GET_BROKER_CONFIG, {})


def test_a_peer_that_never_answers() -> None:
    is_over = threading.Event()

    def wait(connection: socket.socket) -> None:
        is_over.wait(60)

    with peer(wait) as address:
        link = BlockingLink(address)
        with pytest.raises(RequestTimedOut, match="did not answer"):
            link.request(Request.GET_BROKER_CONFIG, {}, timeout_seconds=0.1)
        is_over.set()
        assert not link.is_open
