"""This module is one nameserver process as an object: start it, ask its address, stop it.

It owns the listener, the scan for silent brokers, the writes of values to disk and the notices to
brokers. Requests are answered within the turn of the event loop in which they came, except those
that wait for the disk. Whatever grows with what peers send is bounded here or in the tables.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Callable
from typing import Final

from sluice.clock import wall_ms
from sluice.config import NameserverConfig
from sluice.errors import ConfigError, LinkError
from sluice.link import RemotingLink, join_address
from sluice.nameserver import kv
from sluice.nameserver.api import Answer, NameserverApi
from sluice.nameserver.routes import Notice, RouteTable, Rules
from sluice.net import Connection, Limits, Listener, limits_of
from sluice.protocol import remoting
from sluice.protocol.framing import Frame
from sluice.protocol.remoting import RemotingCommand
from sluice.protocol.remoting_codes import RequestCode, ResponseCode
from sluice.protocol.remoting_schemas import ext_of
from sluice.storage.files import FileLock, Files, RealFiles
from sluice.tls import listener_tls, outgoing_tls

log_lines = logging.getLogger("sluice.nameserver")

SAVES_WAITING_MAX: Final = 10_000  # answers that wait for the disk
NOTICES_MAX: Final = 100  # under way at one time
_NOTICE_SECONDS: Final = 3.0


class Nameserver:
    """One nameserver. `start` raises ConfigError where the address or the directory is no good."""

    def __init__(
        self,
        config: NameserverConfig,
        now_ms: Callable[[], int] = wall_ms,
        *,
        files: Files | None = None,
        limits: Limits | None = None,
    ) -> None:
        self._config = config
        self._now_ms = now_ms
        self._files = files if files is not None else RealFiles()
        self._limits = limits if limits is not None else limits_of(config)
        self._listener: Listener | None = None
        self._api: NameserverApi | None = None
        self._lock: FileLock | None = None
        self._values = kv.KvTable()
        self._waiting: list[tuple[Connection, RemotingCommand, Answer]] = []
        self._save_wanted = asyncio.Event()
        self._saving = asyncio.Lock()  # so that a stop waits for the write that is under way
        self._outgoing_tls: ssl.SSLContext | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._notices: set[asyncio.Task[None]] = set()
        self.table = RouteTable(
            Rules(
                broker_timeout_ms=config.broker_timeout_ms,
                acting_master=config.acting_master,
                forget_topics=config.forget_topics,
            )
        )

    @property
    def listener(self) -> Listener | None:
        return self._listener

    @property
    def address(self) -> str:
        """Where it listens, as clients write it."""
        assert self._listener is not None, "start() was not called"
        return join_address(*self._listener.address)

    async def start(self) -> None:
        """Listen, with the values that the directory holds."""
        config = self._config
        context, mode = listener_tls(config)
        self._outgoing_tls = outgoing_tls(config)
        if config.directory:
            self._lock, self._values = kv.load(self._files, config.directory)
        self._api = NameserverApi(config, self.table, self._values, self._now_ms, self._send_notice)
        listener = Listener(self, self._limits, tls=context, tls_mode=mode)
        try:
            await listener.start(config.listen_host, config.listen_port, config.connection_backlog)
        except ConfigError:
            self._release()
            raise
        self._listener = listener
        loop = asyncio.get_running_loop()
        self._tasks = {loop.create_task(self._scan()), loop.create_task(self._save())}

    async def stop(self) -> None:
        """Answer what waits for the disk, close all connections, and end."""
        listener, self._listener = self._listener, None
        if listener is None:
            return
        listener.stop_accepting()
        await self._save_once()
        for task in (*self._tasks, *self._notices):
            task.cancel()
        await asyncio.gather(*self._tasks, *self._notices, return_exceptions=True)
        await listener.stop()
        self._release()

    def _release(self) -> None:
        lock, self._lock = self._lock, None
        if lock is not None:
            lock.release()

    # -------------------------------------------------------------------------------- connections

    def opened(self, connection: Connection) -> None:
        log_lines.debug("%s connected", connection)

    def received(self, connection: Connection, frames: list[Frame]) -> None:
        assert self._api is not None
        # A short question may have a long answer. Who reads none is asked nothing more by the
        # listener; until it looks again, that is after some frames, the rest is refused.
        unsent_bytes = 0
        for frame in frames:
            request = remoting.decode(frame)
            if request.is_answer:
                continue
            if unsent_bytes > self._limits.unsent_bytes_max:
                answer = _busy(f"{unsent_bytes} bytes of answers to this connection are unread")
            else:
                answer = self._api.handle(connection, request)
            if answer.after_save and self._config.directory:
                self._wait_for_save(connection, request, answer)
            elif not request.is_oneway:
                unsent_bytes += _send(connection, request, answer)

    def closed(self, connection: Connection) -> None:
        log_lines.debug("%s disconnected: %s", connection, connection.close_reason)
        if self._api is not None:
            self._api.lost(connection)

    # ------------------------------------------------------------------------------ silent brokers

    async def _scan(self) -> None:
        assert self._api is not None
        while True:
            await asyncio.sleep(self._api.config.scan_interval_ms / 1000)
            for gone in self._api.expire():
                if isinstance(gone.channel, Connection):
                    gone.channel.abort("the broker was silent for too long")

    # -------------------------------------------------------------------------------------- values

    def _wait_for_save(
        self, connection: Connection, request: RemotingCommand, answer: Answer
    ) -> None:
        if len(self._waiting) >= SAVES_WAITING_MAX:
            busy = _busy(f"{SAVES_WAITING_MAX} values wait to be written; this one may be lost")
            if not request.is_oneway:
                _send(connection, request, busy)
            return
        self._waiting.append((connection, request, answer))
        self._save_wanted.set()

    async def _save(self) -> None:
        while True:
            await self._save_wanted.wait()
            self._save_wanted.clear()
            await self._save_once()

    async def _save_once(self) -> None:
        """Write all values once, then answer all that waited for it."""
        async with self._saving:
            await self._save_locked()

    async def _save_locked(self) -> None:
        waiting, self._waiting = self._waiting, []
        if not waiting:
            return
        failure: Answer | None = None
        try:
            await asyncio.to_thread(
                kv.save, self._files, self._config.directory, self._values.encode()
            )
        except OSError as error:
            log_lines.error("%s cannot be written: %s", kv.FILE_NAME, error)
            remark = f"is set until the nameserver ends, but cannot be saved: {error.strerror}"
            failure = Answer(ResponseCode.SYSTEM_ERROR, remark=remark)
        for connection, request, answer in waiting:
            if not request.is_oneway:
                _send(connection, request, failure or answer)

    # ------------------------------------------------------------------------------------- notices

    def _send_notice(self, notice: Notice) -> None:
        for address in notice.addresses:
            if len(self._notices) >= NOTICES_MAX:
                log_lines.warning("%s is not told about a new lowest id: too many are", address)
                continue
            task = asyncio.get_running_loop().create_task(self._tell(address, notice))
            self._notices.add(task)
            task.add_done_callback(self._notices.discard)

    async def _tell(self, address: str, notice: Notice) -> None:
        fields = {
            "minBrokerId": notice.lowest_id,
            "minBrokerAddr": notice.lowest_address,
            "offlineBrokerAddr": notice.offline_address,
            "haBrokerAddr": notice.ha_address,
        }
        try:
            link = await RemotingLink.open(
                address, tls=self._outgoing_tls, timeout_seconds=_NOTICE_SECONDS
            )
            link.oneway(RequestCode.NOTIFY_MIN_BROKER_ID_CHANGE, ext_of(fields))
            await link.close("told about a new lowest id")
        except LinkError as error:
            log_lines.warning("%s is not told about a new lowest id: %s", address, error)


def _busy(what: str) -> Answer:
    remark = f"[REJECTREQUEST]system busy, start flow control for a while: {what}"
    return Answer(ResponseCode.SYSTEM_BUSY, remark=remark)


def _send(connection: Connection, request: RemotingCommand, answer: Answer) -> int:
    """Send an answer; how many bytes it has."""
    data = remoting.answer(request, answer.code, answer.ext, answer.remark, answer.body)
    connection.send(data)
    return len(data)
