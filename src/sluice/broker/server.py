"""This module is the broker as a process: store, services, door, registration, timers; start and
stop.

`Broker(config)` with `start` and `stop` is all a test needs; `sluice broker` and `sluice serve` add
signals and words for people. Stopping drains: no new requests, what was appended is confirmed and
answered, held pulls get their answer, the store closes in order.

An address that clients are given is one that they can connect to. A broker that listens everywhere
has as many as its machine; which one a client gets is decided where it asks for routes.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import socket
import ssl
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Final

from sluice.broker.admin_api import install
from sluice.broker.core import BrokerCore
from sluice.broker.kafka_api import Node
from sluice.broker.kafka_door import KafkaDoor, build
from sluice.broker.metrics import BrokerMetrics
from sluice.broker.registration import Registrar
from sluice.broker.remoting_api import RemotingApi
from sluice.broker.runtime_settings import restored
from sluice.clock import wall_ms
from sluice.config import BrokerConfig, is_everywhere
from sluice.config.listening import TlsMode
from sluice.config.processes import Switch
from sluice.errors import ConfigError, SluiceError, Stopping
from sluice.link import join_address
from sluice.net import Connection, Handler, Listener, limits_of, own_address
from sluice.protocol import remoting
from sluice.protocol.framing import Frame
from sluice.storage.background import Threads
from sluice.storage.blocking import pack_host
from sluice.storage.files import Files, RealFiles
from sluice.storage.opening import open_store
from sluice.storage.store import Store
from sluice.tls import listener_tls, outgoing_tls

_TICK_SECONDS: Final = 0.05
_EXPIRE_SECONDS: Final = 10.0
_READ_OUT_SECONDS: Final = 2.0
log_lines = logging.getLogger("sluice.broker")


class Broker:
    """One broker process: one replica of one broker group."""

    def __init__(
        self,
        config: BrokerConfig,
        *,
        files: Files | None = None,
        now_ms: Callable[[], int] = wall_ms,
        tls_by_address: Mapping[str, ssl.SSLContext | None] | None = None,
        pinned: Collection[str] = (),
        gate: Callable[[Handler], Handler] = lambda door: door,
    ) -> None:
        """`tls_by_address`: nameservers that are spoken to otherwise than the settings say;
        `pinned`: settings that hold whatever was changed while the broker ran before; `gate`: puts
        something in front of each door, which tests do.
        """
        # What depends on circumstances is settled here: whoever asks for it sees what holds.
        creates_topics: Switch = "on" if config.creates_topics else "off"
        self.config = replace(config, auto_create_topics=creates_topics)
        self._tls_by_address = tls_by_address
        self._pinned = pinned
        self._files = files if files is not None else RealFiles()
        self._now_ms = now_ms
        self._background: Threads | None = None
        self._listener: Listener | None = None
        self._door = _Door()
        self._kafka_listener: Listener | None = None
        self._kafka_door = KafkaDoor(self._kafka_node, config.kafka_request_bytes_max)
        self.kafka_refusal = ""  # why Kafka's clients are not served although they might be
        self._gate = gate
        self._is_stopped = False
        self._registering: asyncio.Task[None] | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self.store: Store
        self.core: BrokerCore
        self.api: RemotingApi
        self.registrar: Registrar
        self.metrics: BrokerMetrics

    async def start(self) -> None:
        """Listen first, so that a taken port harms no store; then open the store and serve."""
        loop = asyncio.get_running_loop()
        config = self.config
        context, mode = listener_tls(config)
        outgoing = outgoing_tls(config)
        host, numeric_host = await _client_host(config)
        self._background = Threads(lambda callback: _post(loop, callback))
        self._listener = Listener(
            self._gate(self._door), limits_of(config), tls=context, tls_mode=mode
        )
        await self._listener.start(
            config.listen_host, config.listen_port, config.connection_backlog
        )
        try:
            await self._listen_for_kafka(context, mode)
        except BaseException:
            await self._listener.stop(0)
            self._background.close()
            raise
        try:
            self.store = open_store(
                config.store,
                self._files,
                self._background,
                self._now_ms,
                pack_host(numeric_host, self.port),
            )
        except BaseException:
            await self._stop_listeners(0)
            self._background.close()
            raise
        self.core = BrokerCore(config, self.store, self._now_ms, loop.call_soon)
        self.core.call_later = loop.call_later
        self.core.reconfigure(restored(config, self.store, self._pinned))
        self.api = RemotingApi(self.core)
        self.core.address = join_address(host, self.port)
        self.registrar = Registrar(
            self.core, self.core.address, tls=outgoing, tls_by_address=self._tls_by_address
        )
        self.core.topics.on_change = self.registrar.topics_changed
        self.api.when_registered = self.registrar.when_registered
        self.core.ask_route = self.registrar.ask_route
        install(self.api, self.core)
        self.metrics = BrokerMetrics(self)
        kafka_api = build(self.core)
        self.core.start()
        self._door.open(self.api)
        self._kafka_door.open(self.core, kafka_api)
        self._registering = loop.create_task(self.registrar.run())
        self._tasks = [loop.create_task(self._tick()), loop.create_task(self._expire())]

    # ---------------------------------------------------------------------------------------- Kafka

    async def _listen_for_kafka(self, context: ssl.SSLContext | None, mode: TlsMode) -> None:
        """Listen for Kafka's clients too, unless that is off or, with "auto", the port is taken."""
        config = self.config
        if config.kafka == "off":
            return
        limits = replace(
            limits_of(config),
            frame_bytes_max=config.kafka_request_bytes_max,
            idle_ms=config.kafka_idle_ms_max,
        )
        listener = Listener(self._gate(self._kafka_door), limits, tls=context, tls_mode=mode)
        try:
            await listener.start(config.listen_host, config.kafka_port, config.connection_backlog)
        except ConfigError as error:
            if config.kafka == "on":
                raise ConfigError(f"{error} (--kafka-port, or --kafka off)") from error
            self.kafka_refusal = f"{error} (--kafka-port)"
            log_lines.warning("Kafka's clients are not served: %s", self.kafka_refusal)
            return
        self._kafka_listener = listener

    @property
    def kafka_address(self) -> str:
        """Where Kafka's clients are served; empty where they are not."""
        if self._kafka_listener is None:
            return ""
        return join_address(self.config.listen_host, self._kafka_listener.address[1])

    def _kafka_node(self, connection: Connection) -> Node:
        """This broker as a client knows it: where it listens everywhere, as the client came."""
        assert self._kafka_listener is not None, "who is connected was listened for"
        config = self.config
        port = config.kafka_advertised_port or self._kafka_listener.address[1]
        host = config.client_host
        if is_everywhere(host):
            host = connection.local[0]
        elif host == "localhost" and not config.advertised_host:
            host = "127.0.0.1"
        return Node(config.kafka_node_id, host, port)

    async def _stop_listeners(self, drain_seconds: float = 5.0) -> None:
        for listener in self.listeners:
            await listener.stop(drain_seconds)

    @property
    def listeners(self) -> list[Listener]:
        """All that listen."""
        return [each for each in (self._listener, self._kafka_listener) if each is not None]

    @property
    def listener(self) -> Listener:
        assert self._listener is not None, "started before it is asked"
        return self._listener

    @property
    def port(self) -> int:
        return self.listener.address[1]

    @property
    def address(self) -> str:
        return join_address(self.config.listen_host, self.port)

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
        if self._is_stopped:
            return
        self._is_stopped = True
        assert self._listener is not None, "started before it is stopped"
        assert self._background is not None
        assert self._registering is not None
        self._listener.stop_accepting()
        if self._kafka_listener is not None:
            self._kafka_listener.stop_accepting()
        # First the clients hear that it goes; those that ask meanwhile are served as ever.
        await _cancel(self._registering)
        with contextlib.suppress(Exception):
            await self.registrar.leave()
        self._door.shut()
        self._kafka_door.shut()
        await _cancel(*self._tasks)
        self.core.polls.shut()
        await self._read_out()
        loop = asyncio.get_running_loop()
        closed: asyncio.Future[SluiceError | None] = loop.create_future()
        self.core.transactions.stop()
        self.core.delays.finish()
        self.core.end_turn()
        self.store.shut(closed.set_result)
        error = await closed
        # The answers of what was confirmed last are on their way: they go out before the close.
        await self._stop_listeners()
        await asyncio.to_thread(self._background.close)
        if error is not None:
            raise error

    async def _read_out(self) -> None:
        """Let reads that wait for the disk end, for a bounded time; then they are refused."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_READ_OUT_SECONDS):
                while self.store.cold_reads.count:  # noqa: ASYNC110  # nothing tells of it
                    await asyncio.sleep(_TICK_SECONDS)


class _Door:
    """Stands in the listener: nobody is served before the store is open, or when it closes."""

    def __init__(self) -> None:
        self._api: RemotingApi | None = None
        self._is_shut = False

    def open(self, api: RemotingApi) -> None:
        self._api = api

    def shut(self) -> None:
        """From now on every request is refused, in words that let a client go elsewhere."""
        self._is_shut = True

    def opened(self, connection: Connection) -> None:
        if self._api is None:
            connection.abort("the broker is starting")
        else:
            self._api.opened(connection)

    def received(self, connection: Connection, frames: list[Frame]) -> None:
        if self._api is None:
            return
        if not self._is_shut:
            self._api.received(connection, frames)
            return
        for command in map(remoting.decode, frames):
            if not command.is_answer:
                self._api.refuse(connection, command, Stopping("the broker stops"))

    def closed(self, connection: Connection) -> None:
        if self._api is not None:
            self._api.closed(connection)


def _post(loop: asyncio.AbstractEventLoop, callback: Callable[[], None]) -> None:
    with contextlib.suppress(RuntimeError):  # the loop is gone: so is everybody who waited
        loop.call_soon_threadsafe(callback)


async def _cancel(*tasks: asyncio.Task[None]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def _client_host(config: BrokerConfig) -> tuple[str, str]:
    """The host that clients are given, and its number, which messages carry."""
    host = config.client_host
    if is_everywhere(host):
        host = own_address()
    elif host == "localhost" and not config.advertised_host:
        host = "127.0.0.1"
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return host, await _number_of(host)
    return host, host


async def _number_of(name: str) -> str:
    loop = asyncio.get_running_loop()
    try:
        found = await loop.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except OSError as error:
        raise ConfigError(
            f"the address of {name} is not known ({error.strerror}); "
            "choose another one for clients (--advertised-host)"
        ) from error
    # IPv4 where there is one: older clients read no other in a message.
    return str(min(found, key=lambda each: each[0] != socket.AF_INET)[4][0])
