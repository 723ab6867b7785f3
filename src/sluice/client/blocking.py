"""This module asks brokers over plain sockets that block: one request at a time, large answers.

Spark's tasks read and write megabytes with one request and wait for nothing else meanwhile; for
them an event loop would only stand in the way. An answer is read into memory of its own, so that
whoever takes it apart need not copy it. A link belongs to one thread at a time and never connects
again by itself.
"""

from __future__ import annotations

import os
import socket
import ssl
import threading
from collections.abc import Mapping
from struct import Struct
from typing import Final

import numpy as np

from sluice import tcp
from sluice.client.core.signing import Credentials
from sluice.errors import LinkLost, ProtocolError, RequestTimedOut
from sluice.model import Buffer
from sluice.protocol import remoting
from sluice.protocol.remoting import JSON, RemotingCommand

Body = Buffer | tuple[Buffer, ...]  # in parts, where they lie apart

FRAME_BYTES_MAX: Final = 64 * 1024 * 1024
ANSWER_HEADER_BYTES_MAX: Final = 4 * 1024 * 1024
_IDLE_MAX: Final = 8  # links to one address that are kept for later
_LENGTH: Final = Struct(">i")
_BUFFER_BYTES: Final = 4 * 1024 * 1024


class BlockingLink:
    """One connection."""

    def __init__(
        self, address: str, tls: ssl.SSLContext | None = None, connect_seconds: float = 5.0
    ) -> None:
        """Connect to "host:port"; raises LinkLost."""
        self.address = address
        host, _, port = address.rpartition(":")
        host = host.removeprefix("[").removesuffix("]")
        self._opaque = 0
        self._socket: socket.socket | None = None
        try:
            plain = socket.create_connection((host, int(port)), connect_seconds)
        except ValueError:
            raise LinkLost(f"{address!r} is not host:port") from None
        except OSError as error:
            raise LinkLost(f"{address}: cannot connect: {error.strerror or error}") from error
        tcp.set_up(plain)
        plain.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _BUFFER_BYTES)
        try:
            self._socket = plain if tls is None else tls.wrap_socket(plain, server_hostname=host)
        except OSError as error:
            plain.close()
            raise LinkLost(f"{address}: no TLS: {error}") from error

    @property
    def is_open(self) -> bool:
        return self._socket is not None

    def request(
        self,
        code: int,
        ext: Mapping[str, str],
        body: Body = b"",
        timeout_seconds: float = 30.0,
    ) -> RemotingCommand:
        """Ask and wait for the answer, whatever its code says.

        Raises LinkLost or RequestTimedOut, and the link is closed: whether the peer did what it
        was asked for is unknown.
        """
        if self._socket is None:
            raise LinkLost(f"{self.address}: the connection is closed")
        self._opaque = (self._opaque + 1) & 0x7FFFFFFF
        parts = body if isinstance(body, tuple) else (body,)
        byte_count = sum(map(len, parts))
        head = remoting.head(JSON, code, self._opaque, 0, dict(ext), None, byte_count)
        try:
            self._socket.settimeout(timeout_seconds)
            self._socket.sendall(head)
            for part in parts:
                if len(part):
                    self._socket.sendall(part)
            while True:
                command = remoting.decode(self._frame(), ANSWER_HEADER_BYTES_MAX)
                # What the peer asks by itself is not for a link that only asks.
                if command.is_answer and command.opaque == self._opaque:
                    return command
        except TimeoutError:
            self.close()
            raise RequestTimedOut(
                f"{self.address} did not answer request {code} within {timeout_seconds:g} s"
            ) from None
        except (OSError, ProtocolError) as error:
            self.close()
            raise LinkLost(f"{self.address}: the connection was lost: {error}") from error

    def _frame(self) -> memoryview:
        (size,) = _LENGTH.unpack(self._read(4))
        if not 4 <= size <= FRAME_BYTES_MAX:
            raise ProtocolError(f"a frame of {size} bytes")
        return self._read(size)

    def _read(self, size: int) -> memoryview:
        assert self._socket is not None
        # Not a bytearray: it would be filled with zeros first.
        data = np.empty(size, np.uint8).data
        at = 0
        while at < size:
            count = self._socket.recv_into(data[at:])
            if not count:
                raise OSError("the other side closed it")
            at += count
        return data

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None


class LinkPool:
    """Links that are open and not in use, by address. Any thread may take one."""

    def __init__(
        self, tls: ssl.SSLContext | None = None, credentials: Credentials | None = None
    ) -> None:
        """With credentials every request is signed."""
        self._tls = tls
        self._credentials = credentials
        self._lock = threading.Lock()
        self._idle: dict[str, list[BlockingLink]] = {}
        self._process = os.getpid()

    def request(
        self,
        address: str,
        code: int,
        ext: Mapping[str, str],
        body: Body = b"",
        timeout_seconds: float = 30.0,
    ) -> RemotingCommand:
        """One request over a link of the pool, or a new one."""
        if self._credentials is not None:
            fields = dict(ext)
            self._credentials.sign(fields, b"".join(body) if isinstance(body, tuple) else body)
            ext = fields
        link = self._take(address)
        if link is not None:
            try:
                answer = link.request(code, ext, body, timeout_seconds)
            except LinkLost:
                # Mostly it was closed while nobody looked. Where it was not, the request may be
                # done twice: every request that comes this way may be.
                pass
            else:
                self._give_back(link)
                return answer
        link = BlockingLink(address, self._tls)
        answer = link.request(code, ext, body, timeout_seconds)
        self._give_back(link)
        return answer

    def _take(self, address: str) -> BlockingLink | None:
        with self._lock:
            if self._process != os.getpid():  # links of the process that this one was forked from
                self._idle, self._process = {}, os.getpid()
            idle = self._idle.get(address)
            return idle.pop() if idle else None

    def _give_back(self, link: BlockingLink) -> None:
        with self._lock:
            idle = self._idle.setdefault(link.address, [])
            if len(idle) < _IDLE_MAX:
                idle.append(link)
                return
        link.close()

    def close(self) -> None:
        with self._lock:
            idle, self._idle = self._idle, {}
        for links in idle.values():
            for link in links:
                link.close()
