"""This module serves /metrics and /healthz over HTTP, and nothing else.

It is made for one monitor on the same machine or network, so it does the least that HTTP/1.1 asks
for: one GET or HEAD per connection, answered and closed. Everything is bounded: the bytes of a
request, the time that it and its answer may take, the connections at one time. Requests that come
while a page is being made get that page: many that ask cost no more than one.
"""

from __future__ import annotations

import asyncio
import errno
import logging
from collections.abc import Awaitable, Callable, Sequence
from http import HTTPStatus
from typing import Final, NamedTuple

from sluice.errors import ConfigError
from sluice.telemetry import CONTENT_TYPE, Page

Collect = Callable[[Page], Awaitable[None]]

HEAD_BYTES_MAX: Final = 8 * 1024
CONNECTIONS_MAX: Final = 32
REQUEST_SECONDS_MAX: Final = 5.0
ANSWER_SECONDS_MAX: Final = 30.0
log_lines = logging.getLogger("sluice.metrics")


class Answer(NamedTuple):
    status: int
    text: str
    content_type: str = "text/plain; charset=utf-8"
    with_body: bool = True  # HEAD wants none


class MetricsListener:
    """One address that says how a process is; that it starts, until `ready` says more."""

    def __init__(self, *, request_seconds: float = REQUEST_SECONDS_MAX) -> None:
        self._collectors: Sequence[Collect] = ()
        self._complaint: Callable[[], str] = lambda: "starting"
        self._request_seconds = request_seconds
        self._server: asyncio.Server | None = None
        self._page: asyncio.Task[str] | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self.address = ""

    async def start(self, host: str, port: int) -> None:
        """Listen; port 0 takes a free one. Raises ConfigError where the address cannot be had."""
        try:
            self._server = await asyncio.start_server(
                self._serve, host, port, limit=HEAD_BYTES_MAX, backlog=CONNECTIONS_MAX
            )
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise ConfigError(f"{host}:{port} is in use; choose another port") from error
            raise ConfigError(f"cannot listen on {host}:{port}: {error.strerror}") from error
        name = self._server.sockets[0].getsockname()
        self.address = f"[{name[0]}]:{name[1]}" if ":" in name[0] else f"{name[0]}:{name[1]}"

    def ready(self, collectors: Sequence[Collect], complaint: Callable[[], str]) -> None:
        """Who fills a page, and why the process is not well; empty while it is."""
        self._collectors, self._complaint = collectors, complaint

    async def stop(self) -> None:
        """Close at once: a monitor asks again."""
        if self._server is not None:
            self._server.close()
        for writer in list(self._writers):
            writer.transport.abort()
        if self._page is not None:
            self._page.cancel()
            await asyncio.gather(self._page, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(self._writers) >= CONNECTIONS_MAX:
            writer.transport.abort()
            return
        self._writers.add(writer)
        try:
            answer = await self._answer(reader)
            if answer.status not in (200, 503):
                peer = writer.get_extra_info("peername")
                log_lines.info("%s: refused with status %d", peer, answer.status)
            async with asyncio.timeout(ANSWER_SECONDS_MAX):
                writer.write(_render(answer))
                await writer.drain()
                writer.close()
                await writer.wait_closed()
        except (OSError, TimeoutError, EOFError):
            pass  # the peer has left, or does not read
        finally:
            self._writers.discard(writer)
            writer.transport.abort()

    async def _answer(self, reader: asyncio.StreamReader) -> Answer:
        try:
            async with asyncio.timeout(self._request_seconds):
                head = await reader.readuntil(b"\r\n\r\n")
        except asyncio.LimitOverrunError:
            return Answer(431, f"a request has at most {HEAD_BYTES_MAX} bytes\n")
        except TimeoutError:
            return Answer(408, f"a request takes at most {self._request_seconds:g} s\n")
        words = head.partition(b"\r\n")[0].split(b" ")
        if len(words) != 3 or not words[2].startswith(b"HTTP/"):
            return Answer(400, "this is no HTTP request\n")
        method, target, version = words
        if not version.startswith(b"HTTP/1."):
            return Answer(505, "HTTP/1.1 is spoken here\n")
        if method not in (b"GET", b"HEAD"):
            return Answer(405, "only GET and HEAD\n")
        answer = await self._find(target.partition(b"?")[0])
        return answer._replace(with_body=method == b"GET")

    async def _find(self, path: bytes) -> Answer:
        if path == b"/metrics":
            try:
                return Answer(200, await self._make_page(), CONTENT_TYPE)
            except Exception:
                log_lines.exception("the metrics page could not be made")
                return Answer(500, "the page could not be made; the log says why\n")
        if path == b"/healthz":
            complaint = self._complaint()
            return Answer(503 if complaint else 200, f"{complaint or 'ok'}\n")
        return Answer(404, "there is /metrics and /healthz\n")

    async def _make_page(self) -> str:
        if self._page is None or self._page.done():
            self._page = asyncio.get_running_loop().create_task(self._collect())
        # Shielded: who leaves must not take the page away from the others that wait for it.
        return await asyncio.shield(self._page)

    async def _collect(self) -> str:
        page = Page()
        for collect in self._collectors:
            await collect(page)
        return page.text()


def _render(answer: Answer) -> bytes:
    body = answer.text.encode()
    allow = "Allow: GET, HEAD\r\n" if answer.status == 405 else ""
    head = (
        f"HTTP/1.1 {answer.status} {HTTPStatus(answer.status).phrase}\r\n"
        f"Content-Type: {answer.content_type}\r\n"
        f"Content-Length: {len(body)}\r\n"
        f"Connection: close\r\n{allow}\r\n"
    )
    return head.encode() + (body if answer.with_body else b"")
