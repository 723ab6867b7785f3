"""This module asks over a connection: requests of RocketMQ's remoting protocol and their answers.

A `RemotingLink` is one connection to a nameserver, a broker or a client. Either side may ask; an
answer is found by its `opaque` number, and answers come in any order.

    request  --> waits, bounded in number and bytes --> answer | RequestTimedOut | LinkLost
    oneway   --> sent, nobody learns what became of it
    the peer's own requests --> `on_request`, which may answer at once, later or not at all

When the connection ends, every request that waits fails at once with the reason. A link never
connects again by itself: when, and to whom, is its owner's decision. It knows no request's meaning.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Callable, Mapping
from typing import Final

from sluice import net
from sluice.errors import LinkBusy, LinkLost, RequestTimedOut, SluiceError
from sluice.net import Connection, Limits
from sluice.protocol import remoting
from sluice.protocol.framing import Frame
from sluice.protocol.remoting import FLAG_ONEWAY, JSON, RemotingCommand
from sluice.protocol.remoting_codes import RequestCode, ResponseCode

log_lines = logging.getLogger("sluice.link")

# Above either, a request is refused at once: a peer that answers slowly must not fill our memory.
WAITING_MAX: Final = 8192
WAITING_BYTES_MAX: Final = 64 * 1024 * 1024
# An answer to a batch lists 33 bytes for each of its messages.
ANSWER_HEADER_BYTES_MAX: Final = 4 * 1024 * 1024
_OPAQUE_MAX: Final = 0x7FFFFFFF
_CLOSE_SECONDS: Final = 1.0

_REQUEST_NAMES: Final = {
    code: name for name, code in vars(RequestCode).items() if not name.startswith("_")
}

OnRequest = Callable[["RemotingLink", RemotingCommand], None]
OnLost = Callable[["RemotingLink"], None]
Sign = Callable[[dict[str, str], Frame], None]  # adds to the fields of a request who asks


def split_address(text: str) -> tuple[str, int]:
    """Host and port of "host:port" or "[v6 address]:port"; raises ValueError."""
    host, _, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not host or not port.isascii() or not port.isdigit() or not 0 < int(port) < 65536:
        raise ValueError(f"{text!r} is not host:port")
    return host, int(port)


def join_address(host: str, port: int) -> str:
    """The inverse of `split_address`."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


class _Waiting:
    """One request that has no answer yet."""

    __slots__ = ("answer", "code", "size_bytes")

    def __init__(self, answer: asyncio.Future[RemotingCommand], code: int, size_bytes: int) -> None:
        self.answer = answer
        self.code = code
        self.size_bytes = size_bytes


class RemotingLink:
    """One connection and the requests that wait on it. Belongs to the event loop's thread."""

    def __init__(
        self,
        *,
        on_request: OnRequest | None = None,
        on_lost: OnLost | None = None,
        sign: Sign | None = None,
        serialization: int = JSON,
        waiting_max: int = WAITING_MAX,
        waiting_bytes_max: int = WAITING_BYTES_MAX,
    ) -> None:
        self._on_request = on_request
        self._on_lost = on_lost
        self._sign = sign
        self._serialization = serialization
        self._waiting_max = waiting_max
        self._waiting_bytes_max = waiting_bytes_max
        self._loop = asyncio.get_running_loop()
        self._connection: Connection | None = None
        self._waiting: dict[int, _Waiting] = {}
        self._waiting_bytes = 0
        self._opaque = 0
        self._is_closed = asyncio.Event()
        self._name = "?"
        self.lost_reason = ""

    @classmethod
    async def open(
        cls,
        address: str,
        *,
        on_request: OnRequest | None = None,
        on_lost: OnLost | None = None,
        sign: Sign | None = None,
        limits: Limits | None = None,
        tls: ssl.SSLContext | None = None,
        serialization: int = JSON,
        timeout_seconds: float = 3.0,
        waiting_max: int = WAITING_MAX,
        waiting_bytes_max: int = WAITING_BYTES_MAX,
    ) -> RemotingLink:
        """Connect to "host:port"; raises LinkLost where that cannot be done."""
        link = cls(
            on_request=on_request,
            on_lost=on_lost,
            sign=sign,
            serialization=serialization,
            waiting_max=waiting_max,
            waiting_bytes_max=waiting_bytes_max,
        )
        link._name = address
        if limits is None:
            # Two sides that both stop reading because the other one does would wait for ever. This
            # side is bounded by what it has asked, so it goes on reading.
            limits = Limits(unsent_bytes_max=2 * waiting_bytes_max)
        try:
            host, port = split_address(address)
            await net.connect(host, port, link, limits, tls=tls, timeout_seconds=timeout_seconds)
        except ValueError as error:
            raise LinkLost(f"cannot connect: {error}") from error
        except TimeoutError as error:
            raise LinkLost(f"{address}: no connection within {timeout_seconds:g} s") from error
        except OSError as error:
            raise LinkLost(f"{address}: cannot connect: {error.strerror or error}") from error
        return link

    def __str__(self) -> str:
        return self._name

    @property
    def local_host(self) -> str:
        """The address of this side; empty where the link is closed."""
        return self._connection.local[0] if self._connection is not None else ""

    @property
    def is_open(self) -> bool:
        return self._connection is not None and self._connection.is_open

    @property
    def waiting_count(self) -> int:
        """How many requests have no answer yet."""
        return len(self._waiting)

    # --------------------------------------------------------------------------------------- asking

    async def request(
        self,
        code: int,
        ext: Mapping[str, str] | None = None,
        body: Frame = b"",
        timeout_seconds: float = 3.0,
    ) -> RemotingCommand:
        """Ask and wait for the answer, whatever its code says.

        Raises LinkLost, RequestTimedOut or LinkBusy. After the first two it is unknown whether the
        peer did what it was asked for.
        """
        return await self.request_now(code, ext, body, timeout_seconds)

    def request_now(
        self,
        code: int,
        ext: Mapping[str, str] | None = None,
        body: Frame = b"",
        timeout_seconds: float = 3.0,
    ) -> asyncio.Future[RemotingCommand]:
        """As `request`, but it is sent when this returns; the future has the answer.

        Who does not want the answer any more cancels the future.
        """
        connection = self._check_room(code, len(body))
        opaque = self._next_opaque()
        waiting = _Waiting(self._loop.create_future(), code, len(body))
        self._send(connection, code, opaque, 0, ext, body)
        self._waiting[opaque] = waiting
        self._waiting_bytes += waiting.size_bytes
        timer = self._loop.call_later(timeout_seconds, self._time_out, opaque, timeout_seconds)

        def forget(_: object) -> None:
            timer.cancel()
            if self._waiting.pop(opaque, None) is not None:
                self._waiting_bytes -= waiting.size_bytes

        waiting.answer.add_done_callback(forget)
        return waiting.answer

    def oneway(self, code: int, ext: Mapping[str, str] | None = None, body: Frame = b"") -> None:
        """Send a request that gets no answer. Raises LinkLost or LinkBusy."""
        connection = self._check_room(code, len(body))
        self._send(connection, code, self._next_opaque(), FLAG_ONEWAY, ext, body)

    def _check_room(self, code: int, body_bytes: int) -> Connection:
        connection = self._connection
        if connection is None or not connection.is_open:
            raise LinkLost(f"{self}: the connection is closed: {self.lost_reason or 'closing'}")
        if len(self._waiting) >= self._waiting_max:
            raise LinkBusy(
                f"{self}: {request_name(code)} refused: {self._waiting_max} requests wait"
            )
        # A single request may be as large as a frame, whatever the limit.
        kept_bytes = max(self._waiting_bytes, connection.unsent_bytes)
        if kept_bytes and kept_bytes + body_bytes > self._waiting_bytes_max:
            raise LinkBusy(f"{self}: {request_name(code)} refused: {kept_bytes} bytes wait")
        return connection

    def _next_opaque(self) -> int:
        # The number of a request that waits since the last round is not given away again.
        while True:
            self._opaque = self._opaque + 1 if self._opaque < _OPAQUE_MAX else 0
            if self._opaque not in self._waiting:
                return self._opaque

    def _send(
        self,
        connection: Connection,
        code: int,
        opaque: int,
        flag: int,
        ext: Mapping[str, str] | None,
        body: Frame,
    ) -> None:
        fields = dict(ext) if ext is not None else {}
        if self._sign is not None:
            self._sign(fields, body)
        head = remoting.head(self._serialization, code, opaque, flag, fields, None, len(body))
        if body:
            connection.send(head, body)
        else:
            connection.send(head)

    def _time_out(self, opaque: int, timeout_seconds: float) -> None:
        waiting = self._waiting.get(opaque)
        if waiting is not None and not waiting.answer.done():
            waiting.answer.set_exception(
                RequestTimedOut(
                    f"{self} did not answer {request_name(waiting.code)} "
                    f"within {timeout_seconds:g} s"
                )
            )

    # ------------------------------------------------------------------------------------ answering

    def answer(
        self,
        request: RemotingCommand,
        code: int,
        ext: dict[str, str] | None = None,
        remark: str | None = None,
        body: Frame = b"",
    ) -> None:
        """Answer a request of the peer's, unless it wants none or the link is gone."""
        if self._connection is not None and not request.is_oneway:
            self._connection.send(remoting.answer(request, code, ext, remark, body))

    def _asked(self, command: RemotingCommand) -> None:
        if self._on_request is None:
            remark = f" request type {command.code} not supported"
            self.answer(command, ResponseCode.REQUEST_CODE_NOT_SUPPORTED, remark=remark)
            return
        try:
            self._on_request(self, command)
        except SluiceError as error:
            log_lines.warning("%s: %s refused: %s", self, request_name(command.code), error)
            self.answer(command, error.rocketmq_code, remark=str(error))

    # ------------------------------------------------------------------------ the connection's side

    def opened(self, connection: Connection) -> None:
        self._connection = connection
        self._name = str(connection)

    def received(self, connection: Connection, frames: list[Frame]) -> None:
        for frame in frames:
            command = remoting.decode(frame, ANSWER_HEADER_BYTES_MAX)
            if not command.is_answer:
                self._asked(command)
                continue
            waiting = self._waiting.get(command.opaque)
            if waiting is None or waiting.answer.done():
                log_lines.debug("%s: answer %d comes too late", self, command.opaque)
            else:
                waiting.answer.set_result(command)

    def closed(self, connection: Connection) -> None:
        self._connection = None
        self.lost_reason = connection.close_reason
        for waiting in self._waiting.values():
            if not waiting.answer.done():
                waiting.answer.set_exception(
                    LinkLost(
                        f"{self}: the connection was lost before the answer to "
                        f"{request_name(waiting.code)} came: {self.lost_reason}"
                    )
                )
        self._is_closed.set()
        if self._on_lost is not None:
            self._on_lost(self)

    async def close(self, reason: str = "not needed any more") -> None:
        """Send what is waiting to be sent, then close. Requests without an answer fail."""
        connection = self._connection
        if connection is None:
            return
        connection.close(reason)
        try:
            async with asyncio.timeout(_CLOSE_SECONDS):
                await self._is_closed.wait()
        except TimeoutError:  # the peer does not read
            connection.abort(reason)
            await self._is_closed.wait()


def request_name(code: int) -> str:
    """A request's name and code, for people."""
    return f"{_REQUEST_NAMES.get(code, 'request')} ({code})"
