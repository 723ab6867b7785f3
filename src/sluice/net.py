"""This module moves frames over TCP: listener and connector for protocols that frame by length.

A `Connection` hands whole frames to a `Handler` and sends bytes. What it guards against:

    too many connections, in all or from one address     refused at once, the listener goes on
    a peer that says nothing, or only half a frame        closed when its time is over
    a frame that is too long, or no frame at all          closed; what came before it is served
    a peer that does not read its answers                 we stop reading from it, so it costs what
                                                          it asked for before; then it is closed
    a peer that sends faster than it can be served        so many frames of it in one turn, then the
                                                          others have theirs

Everything that is sent within one turn of the event loop goes out in one write. TLS and plain text
share a port, as RocketMQ's clients expect: the first byte of a TLS connection is 0x16.

This module knows no protocol beyond the length in front of a frame, and no state of a session.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import ipaddress
import logging
import socket
import ssl
import threading
import time
from collections import Counter
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Final, Protocol, cast

from sluice import tcp
from sluice.config import ListeningConfig
from sluice.config.listening import TlsMode
from sluice.errors import ConfigError, ProtocolError
from sluice.log_share import LogShare
from sluice.model import Buffer
from sluice.protocol.framing import FRAME_BYTES_MAX, SCRATCH_BYTES, BadFrame, Frame, FrameReader

_TLS_FIRST_BYTE: Final = 0x16
_SWEEP_SECONDS: Final = 1.0
# After so many frames it is looked at how many answers wait, and after so many times so many the
# other connections have their turn.
_FRAMES_AT_ONCE: Final = 64
_PARTS_PER_TURN: Final = 8
_PER_ADDRESS: Final = "connections_per_address_max"
# So much of what is not sent yet lies in the system's buffer; what is under way does not count. The
# system would take megabytes, which are out of the processor's cache when the peer gets to them.
_UNSENT_IN_SYSTEM_BYTES: Final = 512 * 1024
_UNSENT_IN_SYSTEM: Final[int] = getattr(socket, "TCP_NOTSENT_LOWAT", 0)  # 0: it has no such limit
log_lines = logging.getLogger("sluice.net")


class _Scratch(threading.local):
    """One buffer to receive into serves all connections of a thread: nothing stays in it between
    two calls. Another thread's event loop would receive into it between the two.
    """

    def __init__(self) -> None:
        self.buffer = bytearray(SCRATCH_BYTES)


_scratch = _Scratch()


class Handler(Protocol):
    """What happens with a connection's frames. Called on the event loop, must not block."""

    def opened(self, connection: Connection) -> None: ...

    def received(self, connection: Connection, frames: list[Frame]) -> None: ...

    def closed(self, connection: Connection) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What one listener allows its peers."""

    connections_max: int = 10_000
    connections_per_address_max: int = 2_000
    frame_bytes_max: int = FRAME_BYTES_MAX
    first_frame_ms: int = 10_000  # from the connection to its first whole frame
    frame_ms: int = 30_000  # from the first byte of a frame to its last
    idle_ms: int = 120_000
    unsent_bytes_max: int = 16 * 1024 * 1024  # above: nothing more is read from the peer
    unsent_ms: int = 60_000  # so long may a peer leave its answers unread
    tls_handshake_ms: int = 5_000


def limits_of(config: ListeningConfig) -> Limits:
    """What a listener allows, by the settings of its process."""
    return Limits(
        connections_max=config.connections_max,
        connections_per_address_max=config.connections_per_address_max,
        frame_bytes_max=config.frame_bytes_max,
        first_frame_ms=config.first_frame_ms,
        frame_ms=config.frame_ms,
        idle_ms=config.connection_idle_ms_max,
        unsent_bytes_max=config.unsent_bytes_max,
        unsent_ms=config.unsent_ms,
        tls_handshake_ms=config.tls_handshake_ms,
    )


class Connection(asyncio.BufferedProtocol):
    """One TCP connection. Belongs to the event loop's thread."""

    __slots__ = (
        "_bad",
        "_flush_waits",
        "_frame_since",
        "_handler",
        "_limits",
        "_loop",
        "_on_lost",
        "_out",
        "_out_bytes",
        "_reader",
        "_stuck_since",
        "_transport",
        "_turn_asked",
        "_waiting",
        "attributes",
        "close_reason",
        "heard_at",
        "local",
        "log_share",
        "opened_at",
        "peer",
        "received_count",
    )

    def __init__(
        self,
        handler: Handler,
        limits: Limits,
        on_lost: Callable[[Connection], None] | None = None,
    ) -> None:
        self._handler = handler
        self._limits = limits
        self._on_lost = on_lost
        self._loop = asyncio.get_running_loop()
        self._reader = FrameReader(limits.frame_bytes_max, _scratch.buffer)
        self._transport: asyncio.Transport | None = None
        self._out: list[Buffer] = []
        self._out_bytes = 0  # of this turn, not handed over yet
        self._flush_waits = False
        self._stuck_since = 0.0  # since when the peer does not read; 0 while it does
        self._frame_since = 0.0  # since when a frame is incomplete; 0 between frames
        self._waiting: list[Frame] = []  # received, and not handed over yet
        self._bad = ""  # why the connection is closed after those
        self._turn_asked = False
        self.peer: tuple[str, int] = ("", 0)
        self.local: tuple[str, int] = ("", 0)
        self.opened_at = self.heard_at = time.monotonic()
        self.received_count = 0
        self.close_reason = ""
        self.log_share = LogShare()
        self.attributes: dict[str, object] = {}  # the handler's own notes

    def __str__(self) -> str:
        return f"{self.peer[0]}:{self.peer[1]}"

    def packed_peer(self) -> bytes:
        """The peer's address as messages carry it: 4 or 16 bytes, and a 4-byte port."""
        address = ipaddress.ip_address(self.peer[0].partition("%")[0])
        return address.packed + self.peer[1].to_bytes(4, "big")

    # ------------------------------------------------------------------------- asyncio's side of it

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(high=self._limits.unsent_bytes_max)
        self.peer = _address(transport.get_extra_info("peername"))
        self.local = _address(transport.get_extra_info("sockname"))
        self._handler.opened(self)

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._reader.get_buffer(sizehint)

    def buffer_updated(self, nbytes: int) -> None:
        self.heard_at = time.monotonic()
        bad: BadFrame | None = None
        try:
            frames = self._reader.buffer_updated(nbytes)
        except BadFrame as error:
            bad, frames = error, error.frames
        if not self._reader.kept_bytes:
            self._frame_since = 0.0
        elif frames or not self._frame_since:
            # Only a new frame starts the clock: one byte a second must not put its end off.
            self._frame_since = self.heard_at
        if bad is not None:
            self._bad = str(bad)
        self.received_count += len(frames)
        if bad is not None or self._waiting or len(frames) > _FRAMES_AT_ONCE:
            self._waiting.extend(frames)
            self._serve_waiting()
        elif frames:
            self._hand_over(frames)
        if nbytes >= SCRATCH_BYTES:
            self._ask_turn()  # there is more where this came from, and the loop would go on reading

    def _hand_over(self, frames: list[Frame]) -> None:
        is_waiting, self._flush_waits = self._flush_waits, True
        try:
            self._handler.received(self, frames)
        except ProtocolError as error:
            self._waiting.clear()
            self.close(str(error))
            return
        finally:
            self._flush_waits = is_waiting
        # What is answered at once goes at once: a turn of the loop takes as long as a small
        # request. And one turn may read many times before its end: answers that pile up stop that
        # reading now; at the turn's end it would be too late.
        self._flush()

    def _serve_waiting(self) -> None:
        """Hand over what waits: a part in each turn, and nothing while the peer does not read."""
        waiting = self._waiting
        for _ in range(_PARTS_PER_TURN):
            if not waiting or self._stuck_since or not self.is_open:
                break
            part = waiting[:_FRAMES_AT_ONCE]
            del waiting[:_FRAMES_AT_ONCE]
            self._hand_over(part)
        if self._stuck_since or not self.is_open:
            return
        if waiting:
            self._ask_turn()
        elif self._bad:
            self.close(self._bad)

    def _ask_turn(self) -> None:
        """Go on in the next turn, and read nothing until then."""
        if not self._turn_asked and self._transport is not None and self.is_open:
            self._turn_asked = True
            self._transport.pause_reading()
            self._loop.call_soon(self._next_turn)

    def _next_turn(self) -> None:
        self._turn_asked = False
        self._serve_waiting()
        self._read_on()

    def _read_on(self) -> None:
        """Read again, unless something of this connection has to come first."""
        if self._waiting or self._stuck_since or self._turn_asked:
            return
        if self._transport is not None and not self._transport.is_closing():
            self._transport.resume_reading()

    def eof_received(self) -> bool:
        self._flush()  # who asked and then closed its side may still read
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.close_reason:
            self.close_reason = str(exc) if exc is not None else "closed by the peer"
        self._transport = None
        self._out.clear()
        self._out_bytes = 0
        self._waiting.clear()
        if self._on_lost is not None:
            self._on_lost(self)
        self._handler.closed(self)

    def pause_writing(self) -> None:
        self._stuck_since = time.monotonic()
        if self._transport is not None:
            self._transport.pause_reading()

    def resume_writing(self) -> None:
        self._stuck_since = 0.0
        if self._waiting:
            self._ask_turn()
        else:
            self._read_on()

    # -------------------------------------------------------------------------------------- sending

    @property
    def is_open(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    def send(self, *parts: Buffer) -> None:
        """Send bytes, together with all others of this turn. After a close it does nothing."""
        if self._transport is None:
            return
        self._out.extend(parts)
        # An answer to a Kafka consumer has some hundred.
        self._out_bytes += len(parts[0]) if len(parts) == 1 else sum(map(len, parts))
        if not self._flush_waits:
            self._flush_waits = True
            self._loop.call_soon(self._end_turn)

    def _end_turn(self) -> None:
        self._flush_waits = False
        self._flush()

    def _flush(self) -> None:
        if self._transport is None or not self._out:
            return
        out, self._out = self._out, []
        self._out_bytes = 0
        if self._transport.is_closing():
            return
        if len(out) == 1:
            self._transport.write(out[0])
        else:
            self._transport.writelines(out)

    @property
    def unsent_bytes(self) -> int:
        """What the peer has not taken yet, with what was sent in this turn."""
        if self._transport is None:
            return 0
        return self._transport.get_write_buffer_size() + self._out_bytes

    def close(self, reason: str) -> None:
        """Send what is waiting, then close."""
        if self._transport is not None and not self._transport.is_closing():
            self.close_reason = self.close_reason or reason
            log_lines.info("%s closed: %s", self, reason)
            self._flush()
            self._transport.close()

    def abort(self, reason: str) -> None:
        """Close at once; what is waiting is dropped."""
        if self._transport is not None:
            self.close_reason = self.close_reason or reason
            log_lines.warning("%s dropped: %s", self, reason)
            self._transport.abort()

    def overdue(self, now: float) -> str:
        """Why this connection has no right to go on; empty where it has."""
        limits = self._limits
        if self._stuck_since and (now - self._stuck_since) * 1000 > limits.unsent_ms:
            return f"did not read its answers for {limits.unsent_ms} ms"
        if not self.received_count and (now - self.opened_at) * 1000 > limits.first_frame_ms:
            return f"no whole frame within {limits.first_frame_ms} ms"
        if self._frame_since and (now - self._frame_since) * 1000 > limits.frame_ms:
            return f"a frame took longer than {limits.frame_ms} ms"
        if not self._stuck_since and (now - self.heard_at) * 1000 > limits.idle_ms:
            return f"silent for {limits.idle_ms} ms"
        return ""


class Listener:
    """Accepts connections on one address until it is stopped."""

    def __init__(
        self,
        handler: Handler,
        limits: Limits,
        *,
        tls: ssl.SSLContext | None = None,
        tls_mode: TlsMode = "off",
    ) -> None:
        self._handler = handler
        self._limits = limits
        self._tls = tls
        self._tls_mode = tls_mode
        self._socket: socket.socket | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._per_address: Counter[str] = Counter()
        self._place_count = 0  # places taken, by connections and by those that become one
        self.connections: set[Connection] = set()
        self._emptied: asyncio.Event | None = None  # set when the last connection of a stop is gone
        self.refused: Counter[str] = Counter()  # connections, by the limit that they met
        self.overdue_count = 0
        self._log_share = LogShare()  # of those who never become a connection
        self.address: tuple[str, int] = ("", 0)

    async def start(self, host: str, port: int, backlog: int = 1024) -> None:
        """Listen; port 0 takes a free one. Raises ConfigError where the address cannot be had."""
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listening = socket.socket(family, socket.SOCK_STREAM)
        try:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listening.setblocking(False)
            listening.bind((host, port))
            listening.listen(backlog)
        except OSError as error:
            listening.close()
            if error.errno == errno.EADDRINUSE:
                raise ConfigError(f"{host}:{port} is in use; choose another port") from error
            raise ConfigError(f"cannot listen on {host}:{port}: {error.strerror}") from error
        self._socket = listening
        self.address = _address(listening.getsockname())
        self._spawn(self._accept(listening))
        self._spawn(self._sweep())

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _accept(self, listening: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                accepted, address = await loop.sock_accept(listening)
                peer = _address(address)
            except OSError as error:
                # Out of descriptors, mostly: those who are connected must not suffer.
                log_lines.error("cannot accept a connection: %s", error)
                await asyncio.sleep(0.1)
                continue
            refusal = self._refusal(peer[0])
            if refusal is not None:
                cause, count_max = refusal
                self.refused[cause] += 1
                where = " from this address" if cause == _PER_ADDRESS else ""
                self._log_share.line(
                    log_lines,
                    logging.WARNING,
                    "%s:%s refused: %d connections%s are open (%s)",
                    *(*peer, count_max, where, cause),
                )
                accepted.close()
                continue
            self._per_address[peer[0]] += 1
            self._place_count += 1
            self._spawn(self._serve(accepted, peer))

    def _refusal(self, host: str) -> tuple[str, int] | None:
        """The limit that keeps a connection out; None where there is room for it."""
        limits = self._limits
        if self._place_count >= limits.connections_max:
            return "connections_max", limits.connections_max
        if self._per_address[host] >= limits.connections_per_address_max:
            return _PER_ADDRESS, limits.connections_per_address_max
        return None

    async def _serve(self, accepted: socket.socket, peer: tuple[str, int]) -> None:
        loop = asyncio.get_running_loop()
        connection: Connection | None = None
        try:
            accepted.setblocking(False)
            tcp.set_up(accepted)
            if _UNSENT_IN_SYSTEM:
                limit = (_UNSENT_IN_SYSTEM, _UNSENT_IN_SYSTEM_BYTES)
                accepted.setsockopt(socket.IPPROTO_TCP, *limit)
            context = await self._choose_tls(accepted)
            connection = Connection(self._handler, self._limits, self._lost)
            wait = self._limits.tls_handshake_ms / 1000 if context is not None else None
            self.connections.add(connection)
            await loop.connect_accepted_socket(
                lambda: connection, accepted, ssl=context, ssl_handshake_timeout=wait
            )
        except (OSError, TimeoutError, ProtocolError) as error:
            reason = str(error) or f"nothing came within {self._limits.first_frame_ms} ms"
            self._log_share.line(log_lines, logging.INFO, "%s:%s closed: %s", *peer, reason)
            self._give_up(accepted, peer[0], connection)
        except asyncio.CancelledError:
            self._give_up(accepted, peer[0], connection)
            raise

    def _give_up(self, accepted: socket.socket, host: str, connection: Connection | None) -> None:
        """A socket that never became a connection leaves its place, unless it has already."""
        accepted.close()
        if connection is None or connection in self.connections:
            self._leave(connection, host)

    async def _choose_tls(self, accepted: socket.socket) -> ssl.SSLContext | None:
        if self._tls is None or self._tls_mode == "off":
            return None
        async with asyncio.timeout(self._limits.first_frame_ms / 1000):
            first = await _peek(accepted)
        if first == _TLS_FIRST_BYTE:
            return self._tls
        if self._tls_mode == "enforcing":
            raise ProtocolError("plain text where TLS is required (tls_mode=enforcing)")
        return None

    async def _all_lost(self) -> None:
        if self.connections:
            self._emptied = asyncio.Event()
            await self._emptied.wait()

    def _lost(self, connection: Connection) -> None:
        if connection in self.connections:
            self._leave(connection, connection.peer[0])

    def _leave(self, connection: Connection | None, host: str) -> None:
        if connection is not None:
            self.connections.discard(connection)
            if not self.connections and self._emptied is not None:
                self._emptied.set()
        self._place_count -= 1
        self._per_address[host] -= 1
        if self._per_address[host] <= 0:
            del self._per_address[host]

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(_SWEEP_SECONDS)
            now = time.monotonic()
            for connection in list(self.connections):
                reason = connection.overdue(now)
                if reason:
                    self.overdue_count += 1
                    connection.abort(reason)

    def stop_accepting(self) -> None:
        """Take no new connections; those that are open go on."""
        for task in list(self._tasks):
            task.cancel()
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    async def stop(self, drain_seconds: float = 5.0) -> None:
        """Close everything: answers that are waiting go out first, for a bounded time."""
        self.stop_accepting()
        for connection in list(self.connections):
            connection.close("the server stops")
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(drain_seconds):
                await self._all_lost()
        for connection in list(self.connections):
            connection.abort("the server stops")
        await asyncio.sleep(0)


async def connect(
    host: str,
    port: int,
    handler: Handler,
    limits: Limits,
    *,
    tls: ssl.SSLContext | None = None,
    timeout_seconds: float = 3.0,
) -> Connection:
    """Open a connection; raises OSError or TimeoutError."""
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(timeout_seconds):
        transport, connection = await loop.create_connection(
            lambda: Connection(handler, limits),
            host,
            port,
            ssl=tls,
            server_hostname=host if tls is not None else None,
        )
    raw = transport.get_extra_info("socket")
    if raw is not None:
        with contextlib.suppress(OSError):
            tcp.set_up(raw)
    return connection


def own_address() -> str:
    """The address of this machine that others most likely reach it at; loopback where it has none.

    Connecting a UDP socket sends nothing: the system only says which address it would send from.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # reserved for documentation: nobody's
            return str(probe.getsockname()[0])
        except OSError:
            return "127.0.0.1"


async def _peek(accepted: socket.socket) -> int:
    """The first byte that the peer sends, left where it is; -1 where it closes instead."""
    loop = asyncio.get_running_loop()
    readable = asyncio.Event()
    loop.add_reader(accepted.fileno(), readable.set)
    try:
        await readable.wait()
    finally:
        loop.remove_reader(accepted.fileno())
    first = accepted.recv(1, socket.MSG_PEEK)
    return first[0] if first else -1


def _address(name: object) -> tuple[str, int]:
    if isinstance(name, tuple) and len(name) >= 2:
        # A listener on :: shows IPv4 peers this way; everybody else knows them by the short form.
        return str(name[0]).removeprefix("::ffff:"), int(name[1])
    return "", 0
