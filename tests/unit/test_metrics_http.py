"""This module tests the HTTP door of the metrics: what it serves, and what it refuses."""

from __future__ import annotations

import asyncio
import http.client
import shutil
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from sluice.errors import ConfigError
from sluice.metrics_http import CONNECTIONS_MAX, HEAD_BYTES_MAX, MetricsListener
from sluice.telemetry import CONTENT_TYPE, Metric, Page
from tests.unit.loops import Run, both_loops, run_once, until
from tests.unit.prometheus_text import read_page

ASKED = Metric("asked_total", "counter", "How often a page was made.")


class Source:
    """Fills pages, when it may; counts how often."""

    def __init__(self) -> None:
        self.asked = 0
        self.may_answer = asyncio.Event()
        self.may_answer.set()
        self.complaint = ""

    async def collect(self, page: Page) -> None:
        self.asked += 1
        await self.may_answer.wait()
        page.add(ASKED, self.asked)


@asynccontextmanager
async def serving(*, request_seconds: float = 30) -> AsyncIterator[tuple[MetricsListener, Source]]:
    source = Source()
    listener = MetricsListener(request_seconds=request_seconds)
    await listener.start("127.0.0.1", 0)
    listener.ready([source.collect], lambda: source.complaint)
    try:
        yield listener, source
    finally:
        await listener.stop()


async def connect(listener: MetricsListener) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, _, port = listener.address.rpartition(":")
    return await asyncio.open_connection(host, int(port))


async def exchange(listener: MetricsListener, request: bytes) -> bytes:
    """All that comes back for these bytes until the connection is closed."""
    reader, writer = await connect(listener)
    writer.write(request)
    try:
        return await reader.read()
    finally:
        writer.close()


def get(path: str, method: str = "GET") -> bytes:
    return f"{method} {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode()


@both_loops
def test_a_page_is_served_as_http_libraries_and_prometheus_read_it(run: Run) -> None:
    async def work() -> None:
        async with serving() as (listener, _):

            def ask(method: str, path: str) -> tuple[int, str | None, bytes]:
                connection = http.client.HTTPConnection(listener.address, timeout=30)
                connection.request(method, path)
                answer = connection.getresponse()
                body = answer.read()
                connection.close()
                length = answer.getheader("Content-Length")
                assert length is not None
                assert method == "HEAD" or int(length) == len(body)
                return answer.status, answer.getheader("Content-Type"), body

            status, kind, body = await asyncio.to_thread(ask, "GET", "/metrics?x=1")
            assert (status, kind) == (200, CONTENT_TYPE)
            assert read_page(body.decode()).value("asked_total") == 1
            status, kind, body = await asyncio.to_thread(ask, "HEAD", "/metrics")
            assert (status, kind, body) == (200, CONTENT_TYPE, b"")
            status, _, body = await asyncio.to_thread(ask, "GET", "/")
            assert (status, body) == (404, b"there is /metrics and /healthz\n")

    run(work())


@pytest.mark.skipif(shutil.which("curl") is None, reason="there is no curl here")
def test_curl_works() -> None:
    async def work() -> None:
        async with serving() as (listener, _):
            command = ["curl", "-sS", "--fail", f"http://{listener.address}/metrics"]
            done = await asyncio.to_thread(
                subprocess.run, command, capture_output=True, text=True, timeout=60, check=False
            )
            assert (done.returncode, done.stderr) == (0, "")
            assert read_page(done.stdout).value("asked_total") == 1

    run_once(work())


def test_health_says_what_is_wrong() -> None:
    async def work() -> None:
        async with serving() as (listener, source):
            assert (await exchange(listener, get("/healthz"))).endswith(b"\r\n\r\nok\n")
            source.complaint = "the disk is full"
            answer = await exchange(listener, get("/healthz"))
            assert answer.startswith(b"HTTP/1.1 503 Service Unavailable\r\n")
            assert answer.endswith(b"\r\n\r\nthe disk is full\n")

        listener = MetricsListener()
        await listener.start("127.0.0.1", 0)
        answer = await exchange(listener, get("/healthz"))
        assert answer.startswith(b"HTTP/1.1 503 ")
        assert answer.endswith(b"\r\n\r\nstarting\n")
        assert (await exchange(listener, get("/metrics"))).startswith(b"HTTP/1.1 200 ")
        await listener.stop()

    run_once(work())


@both_loops
@pytest.mark.parametrize(
    ("request_bytes", "status"),
    [
        (get("/metrics", "POST"), 405),
        (get("/metrics", "get"), 405),
        (b"GET /metrics HTTP/2.0\r\n\r\n", 505),
        (b"GET /metrics\r\n\r\n", 400),
        (b"\r\n\r\n", 400),
        (b"\x16\x03\x01\x02\x00\x01\r\n\r\n", 400),
        (b"GET /" + b"x" * HEAD_BYTES_MAX, 431),
        (b"x" * (2 * HEAD_BYTES_MAX) + b"\r\n\r\n", 431),
        (b"GET / HTTP/1.1\r\n" + b"A: b\r\n" * HEAD_BYTES_MAX, 431),
        (get("/metrics/../secret"), 404),
    ],
)
def test_what_is_no_request_gets_its_status_and_the_door_stays_open(
    run: Run, request_bytes: bytes, status: int
) -> None:
    async def work() -> None:
        async with serving() as (listener, source):
            try:
                answer = await exchange(listener, request_bytes)
            except ConnectionResetError:
                # The rest of what was sent met a closed door; the answer was lost with it.
                assert status == 431
            else:
                assert answer.startswith(f"HTTP/1.1 {status} ".encode()) or (
                    status == 431 and answer == b""
                )
                assert (status == 405) == (b"\r\nAllow: GET, HEAD\r\n" in answer)
            assert source.asked == 0
            assert b"asked_total 1" in await exchange(listener, get("/metrics"))

    run(work())


def test_a_request_that_takes_too_long_is_ended() -> None:
    async def work() -> None:
        async with serving(request_seconds=0.02) as (listener, _):
            answer = await exchange(listener, b"GET /metrics HT")
            assert answer.startswith(b"HTTP/1.1 408 ")

    run_once(work())


@both_loops
def test_connections_are_limited_and_one_that_leaves_makes_room(run: Run) -> None:
    async def work() -> None:
        async with serving() as (listener, _):
            idle = [await connect(listener) for _ in range(CONNECTIONS_MAX)]
            await until(lambda: len(listener._writers) == CONNECTIONS_MAX)
            reader, writer = await connect(listener)
            try:
                writer.write(get("/metrics"))
                answer = await reader.read()
            except ConnectionResetError:
                answer = b""
            assert answer == b""
            idle[0][1].close()
            await until(lambda: len(listener._writers) < CONNECTIONS_MAX)
            assert b"asked_total 1" in await exchange(listener, get("/metrics"))
            for _, writer in idle:
                writer.close()

    run(work())


def test_many_that_ask_at_once_cost_one_page() -> None:
    async def work() -> None:
        async with serving() as (listener, source):
            source.may_answer.clear()
            asking = [asyncio.ensure_future(exchange(listener, get("/metrics"))) for _ in range(10)]
            await until(lambda: len(listener._writers) == 10 and source.asked)
            leaver = asking.pop()
            leaver.cancel()  # takes the page away from nobody
            source.may_answer.set()
            for answer in await asyncio.gather(*asking):
                assert answer.endswith(b"asked_total 1\n")
            assert b"asked_total 2" in await exchange(listener, get("/metrics"))

    run_once(work())


def test_a_page_that_fails_is_an_answer_and_a_line_of_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def broken(page: Page) -> None:
        raise ValueError("out of numbers")

    async def work() -> None:
        async with serving() as (listener, _):
            listener.ready([broken], lambda: "")
            answer = await exchange(listener, get("/metrics"))
            assert answer.startswith(b"HTTP/1.1 500 ")
            assert b"numbers" not in answer

    run_once(work())
    assert "out of numbers" in caplog.text


def test_a_stop_ends_what_is_open() -> None:
    async def work() -> None:
        async with serving() as (listener, source):
            source.may_answer.clear()
            reader, writer = await connect(listener)
            writer.write(get("/metrics"))
            await until(lambda: source.asked)
            await listener.stop()
            with pytest.raises((ConnectionResetError, asyncio.IncompleteReadError)):
                await reader.readexactly(1)
            writer.close()
            with pytest.raises(OSError, match=r"refused|connect"):
                await connect(listener)

    run_once(work())


@both_loops
def test_an_address_that_cannot_be_had_is_a_config_error(run: Run) -> None:
    async def work() -> None:
        async with serving() as (listener, _):
            port = int(listener.address.rpartition(":")[2])
            with pytest.raises(ConfigError, match=rf"127.0.0.1:{port} is in use; choose another"):
                await MetricsListener().start("127.0.0.1", port)
            with pytest.raises(ConfigError, match=r"cannot listen on 192\.0\.2\.1:0"):
                await MetricsListener().start("192.0.2.1", 0)

    run(work())
