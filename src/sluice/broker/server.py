"""This module is the broker as a process: store, services, door, registration, timers; start and
stop.

`Broker(config)` with `start` and `stop` is all a test needs; `sluice broker` and `sluice serve` add
signals and words for people. Stopping drains: no new requests, what was appended is confirmed and
answered, held pulls get their answer, the store closes in order.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from typing import Final

from sluice.broker.admin_api import install
from sluice.broker.core import BrokerCore
from sluice.broker.registration import Registrar
from sluice.broker.remoting_api import RemotingApi
from sluice.config import BrokerConfig
from sluice.errors import SluiceError
from sluice.net import Connection, Limits, Listener
from sluice.protocol.framing import Frame
from sluice.storage.background import Threads
from sluice.storage.blocking import pack_host
from sluice.storage.files import Files, RealFiles
from sluice.storage.opening import open_store
from sluice.storage.store import Store, wall_clock_ms

_TICK_SECONDS: Final = 0.05
_EXPIRE_SECONDS: Final = 10.0
log_lines = logging.getLogger("sluice.broker")


class Broker:
    """One broker process: one replica of one broker group."""

    def __init__(
        self,
        config: BrokerConfig,
        *,
        files: Files | None = None,
        now_ms: Callable[[], int] = wall_clock_ms,
    ) -> None:
        self.config = config
        self._files = files if files is not None else RealFiles()
        self._now_ms = now_ms
        self._background: Threads | None = None
        self._listener: Listener | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self.store: Store
        self.core: BrokerCore
        self.api: RemotingApi
        self.registrar: Registrar

    async def start(self) -> None:
        """Listen first, so that a taken port harms no store; then open the store and serve."""
        loop = asyncio.get_running_loop()
        config = self.config
        self._background = Threads(lambda callback: _post(loop, callback))
        door = _Door()
        limits = Limits(
            connections_max=config.connections_max,
            frame_bytes_max=config.frame_bytes_max,
            idle_ms=config.connection_idle_ms_max,
        )
        self._listener = Listener(door, limits)
        await self._listener.start(config.listen_host, config.listen_port)
        try:
            host = _dialable(config.advertised_host or config.listen_host)
            self.store = open_store(
                config.store,
                self._files,
                self._background,
                self._now_ms,
                pack_host(host, self.port),
            )
        except BaseException:
            await self._listener.stop(0)
            self._background.close()
            raise
        self.core = BrokerCore(config, self.store, self._now_ms, loop.call_soon)
        self.api = RemotingApi(self.core)
        self.core.address = f"{host}:{self.port}"
        self.registrar = Registrar(self.core, self.core.address)
        self.core.topics.on_change = self.registrar.topics_changed
        self.api.when_registered = self.registrar.when_registered
        install(self.api, self.core)
        door.open(self.api)
        self._tasks = [
            loop.create_task(self._tick()),
            loop.create_task(self._expire()),
            loop.create_task(self.registrar.run()),
        ]

    @property
    def port(self) -> int:
        assert self._listener is not None, "started before it is asked"
        return self._listener.address[1]

    @property
    def address(self) -> str:
        return f"{self.config.listen_host}:{self.port}"

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(_TICK_SECONDS)
            self.core.tick()

    async def _expire(self) -> None:
        while True:
            await asyncio.sleep(_EXPIRE_SECONDS)
            now_ms = self._now_ms()
            for group in self.core.clients.expire(now_ms):
                self.api.tell_members(group)
            self.core.locks.expire(now_ms)

    async def stop(self) -> None:
        """Drain and close; raises what kept the store from closing in order."""
        assert self._listener is not None, "started before it is stopped"
        assert self._background is not None
        self._listener.stop_accepting()
        with contextlib.suppress(Exception):
            await self.registrar.leave()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self.core.polls.release_all()
        loop = asyncio.get_running_loop()
        closed: asyncio.Future[SluiceError | None] = loop.create_future()
        self.core.end_turn()
        self.store.shut(closed.set_result)
        error = await closed
        # The answers of what was confirmed last are on their way: they go out before the close.
        await self._listener.stop()
        await asyncio.to_thread(self._background.close)
        if error is not None:
            raise error


class _Door:
    """Stands in the listener until the services are there: nobody is served before the store is."""

    def __init__(self) -> None:
        self._api: RemotingApi | None = None

    def open(self, api: RemotingApi) -> None:
        self._api = api

    def opened(self, connection: Connection) -> None:
        if self._api is None:
            connection.abort("the broker is starting")
        else:
            self._api.opened(connection)

    def received(self, connection: Connection, frames: list[Frame]) -> None:
        if self._api is not None:
            self._api.received(connection, frames)

    def closed(self, connection: Connection) -> None:
        if self._api is not None:
            self._api.closed(connection)


def _post(loop: asyncio.AbstractEventLoop, callback: Callable[[], None]) -> None:
    with contextlib.suppress(RuntimeError):  # the loop is gone: so is everybody who waited
        loop.call_soon_threadsafe(callback)


def _dialable(host: str) -> str:
    """An address that a client can connect to: "everywhere" is none."""
    return "127.0.0.1" if host in ("0.0.0.0", "::", "", "localhost") else host  # noqa: S104
