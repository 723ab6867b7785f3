"""This module asks an address server which nameservers there are: one HTTP GET, bounded.

The body is the list, `host:port;host:port`. Only http is spoken, as RocketMQ's clients do; whoever
wants it protected keeps it within a network that is.
"""

from __future__ import annotations

import asyncio
from typing import Final
from urllib.parse import urlsplit

from sluice.errors import ConfigError, NoNameserver

_SECONDS: Final = 5.0
_BYTES_MAX: Final = 64 * 1024


async def fetch_nameservers(url: str) -> str:
    """The body of the answer; raises NoNameserver where there is none."""
    parts = urlsplit(url)
    if parts.scheme != "http" or not parts.hostname:
        raise ConfigError(f"nameserver_url {url!r} is not http://host[:port]/path")
    path = parts.path or "/"
    if parts.query:
        path += f"?{parts.query}"
    try:
        async with asyncio.timeout(_SECONDS):
            return await _get(parts.hostname, parts.port or 80, path, parts.netloc)
    except (OSError, TimeoutError, ValueError) as error:
        reason = str(error) or f"no answer within {_SECONDS:g} s"
        raise NoNameserver(f"the address server {url} gave no nameservers: {reason}") from error


async def _get(host: str, port: int, path: str, shown: str) -> str:
    reader, writer = await asyncio.open_connection(host, port)
    try:
        request = f"GET {path} HTTP/1.1\r\nHost: {shown}\r\nConnection: close\r\n\r\n"
        writer.write(request.encode("ascii"))
        await writer.drain()
        data = bytearray()
        while len(data) <= _BYTES_MAX:
            chunk = await reader.read(4096)
            if not chunk:
                break
            data += chunk
    finally:
        writer.close()
    head, _, body = bytes(data).partition(b"\r\n\r\n")
    status = head.split(b"\r\n", 1)[0].split(b" ")
    if len(status) < 2 or status[1] != b"200":
        raise ValueError(f"it answers {head[:60]!r}")
    if b"transfer-encoding: chunked" in head.lower():
        body = _unchunked(body)
    return body.decode("ascii").strip()


def _unchunked(body: bytes) -> bytes:
    parts: list[bytes] = []
    while body:
        size_text, _, rest = body.partition(b"\r\n")
        size = int(size_text.split(b";")[0], 16)
        if size == 0:
            break
        parts.append(rest[:size])
        body = rest[size + 2 :]
    return b"".join(parts)
