"""This module is what every client has: connections, routes, heartbeats, requests of brokers.

A `Session` belongs to one producer or consumer. It asks nameservers in turn until one answers,
opens each connection once however many wait for it, tells brokers of its owner every 30 s, and
hands what brokers ask to its owner. Closing it ends everything, within a bounded time.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from itertools import count
from typing import Any, Final, TypeVar

from sluice.client.aio.address_server import fetch_nameservers
from sluice.client.aio.ending import end_tasks
from sluice.client.aio.links import ClientLink
from sluice.client.core.refusals import refusal
from sluice.client.core.routes import MASTER, brokers_of, read_address
from sluice.client.core.settings import ClientSettings, split_nameservers
from sluice.errors import (
    ClientClosed,
    LinkError,
    LinkLost,
    NoNameserver,
    NoRoute,
    SluiceError,
    TopicMissing,
)
from sluice.link import RemotingLink
from sluice.net import own_address
from sluice.protocol.remoting import BINARY, JSON, RemotingCommand
from sluice.protocol.remoting_bodies import Route, read_cluster_info, read_route
from sluice.protocol.remoting_clients import Heartbeat, write_heartbeat
from sluice.protocol.remoting_codes import RequestCode as Request
from sluice.protocol.remoting_codes import ResponseCode as Response

log_lines = logging.getLogger("sluice.client")

_SWEEP_SECONDS: Final = 0.1
_ADDRESS_SERVER_SECONDS: Final = 120.0
_numbers: Final = count(1)

OnRequest = Callable[[RemotingLink, RemotingCommand], None]
HeartbeatOf = Callable[[str], Heartbeat]
Shared = TypeVar("Shared")


def make_client_id(instance_name: str) -> str:
    """Who this client is to brokers: the machine, and within it the process and a number."""
    instance = instance_name or f"{os.getpid()}#{next(_numbers)}.{time.monotonic_ns()}"
    return f"{own_address()}@{instance}"


class Session:
    """Connections and routes of one client. Belongs to the event loop's thread."""

    def __init__(self, settings: ClientSettings, client_id: str, heartbeat: HeartbeatOf) -> None:
        self.settings = settings
        self.client_id = client_id
        self._heartbeat_of = heartbeat
        self._nameservers = list(settings.nameservers)
        self._credentials = settings.credentials
        self.links: dict[str, ClientLink] = {}
        self._opening: dict[str, asyncio.Task[ClientLink]] = {}
        self._routes: dict[str, Route] = {}
        self._asking: dict[str, asyncio.Task[Route]] = {}
        self._brokers: dict[str, dict[int, str]] = {}
        self._tasks: set[asyncio.Task[Any]] = set()
        self._greeted: set[str] = set()  # addresses that have had a heartbeat
        self._silent: set[str] = set()  # addresses that did not answer the last one
        self._state = "new"
        self.closed = asyncio.Event()
        self.is_open = False
        self.requests: dict[int, OnRequest] = {}
        self.on_routes: list[Callable[[str], None]] = []
        self.wanted: set[str] = set()  # topics whose routes are asked for again and again
        self.all_replicas = False  # consumers greet followers as well
        self.pending_max = 8192

    # ---------------------------------------------------------------------------------- life

    async def start(self) -> None:
        """Find the nameservers; raises NoNameserver where none is known or answers."""
        if self._state != "new":
            raise ClientClosed("a client is started once; make a new one")
        self._state = "open"
        self.is_open = True
        settings = self.settings
        # Whoever names nameservers keeps them: an address server is asked where nobody did.
        is_asked = not self._nameservers and bool(settings.nameserver_url)
        try:
            if is_asked:
                await self._ask_address_server()
            if not self._nameservers:
                raise NoNameserver(
                    f"the address server {settings.nameserver_url} lists no nameserver"
                    if is_asked
                    else "no nameserver is known; pass nameservers='host:9876', or set NAMESRV_ADDR"
                )
        except BaseException:
            self._state = "closed"
            self.is_open = False
            raise
        self.repeat(_SWEEP_SECONDS, self._sweep)
        self.repeat(settings.route_ms / 1000, self._refresh_routes)
        self.repeat(settings.heartbeat_ms / 1000, self.heartbeat)
        if is_asked:
            self.repeat(_ADDRESS_SERVER_SECONDS, self._ask_address_server)

    def check_open(self) -> None:
        if self._state != "open":
            raise ClientClosed(
                "the client was closed" if self._state == "closed" else "start the client first"
            )

    def spawn(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Run something beside; it ends with the session, and its error is in the log."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            log_lines.error("a task of the client failed", exc_info=task.exception())

    def repeat(self, seconds: float, work: Callable[[], Awaitable[None]]) -> asyncio.Task[Any]:
        """Do something again and again; what goes wrong once does not end it."""

        async def run() -> None:
            while True:
                await asyncio.sleep(seconds)
                try:
                    await work()
                except SluiceError as error:
                    log_lines.warning("%s: %s", self.client_id, error)
                except Exception:
                    log_lines.exception("%s: something unexpected, tried again", self.client_id)

        return self.spawn(run())

    async def close(self) -> None:
        """End all tasks and connections."""
        if self._state == "closed":
            return
        self._state = "closed"
        self.is_open = False
        await end_tasks([*self._tasks, *self._opening.values(), *self._asking.values()])
        await asyncio.gather(*(link.close() for link in self.links.values()))
        self.links.clear()
        self.closed.set()

    async def _sweep(self) -> None:
        now = asyncio.get_running_loop().time()
        for link in list(self.links.values()):
            link.sweep(now)

    # --------------------------------------------------------------------------- connections

    def ready_link(self, address: str) -> ClientLink | None:
        """The connection to an address, if it is open now."""
        link = self.links.get(address)
        return link if link is not None and link.is_open else None

    def known_link(self, broker_name: str, wanted: int) -> ClientLink | None:
        """The connection to a copy of a broker, if both are known now."""
        address = read_address(self._brokers.get(broker_name, {}), wanted)
        return self.ready_link(address) if address is not None else None

    async def link(self, address: str) -> ClientLink:
        """The connection to an address, opened where there is none. Raises LinkLost."""
        link = self.ready_link(address)
        if link is not None:
            return link
        self.check_open()
        opening = self._opening.get(address)
        if opening is None:
            opening = self._share(self._opening, address, self._open(address))
        return await asyncio.shield(opening)

    def _share(
        self,
        table: dict[str, asyncio.Task[Shared]],
        name: str,
        work: Coroutine[Any, Any, Shared],
    ) -> asyncio.Task[Shared]:
        """Do something once for all who want it now, whoever of them goes away meanwhile."""

        def ended(task: asyncio.Task[Shared]) -> None:
            del table[name]
            if not task.cancelled():
                task.exception()  # those who wait have it; perhaps nobody does any more

        task = table[name] = asyncio.get_running_loop().create_task(work)
        task.add_done_callback(ended)
        return task

    async def _open(self, address: str) -> ClientLink:
        link = await ClientLink.open(
            address,
            on_request=self._requested,
            on_lost=self._lost,
            sign=None if self._credentials is None else self._credentials.sign,
            tls=self.settings.tls,
            serialization=JSON if address in self._nameservers else BINARY,
            timeout_seconds=self.settings.connect_ms / 1000,
        )
        assert isinstance(link, ClientLink)
        link.pending_max = self.pending_max
        self.links[address] = link
        return link

    def _lost(self, link: RemotingLink) -> None:
        if self._state == "open":
            reason = link.lost_reason
            log_lines.info("%s: the connection to %s is lost: %s", self.client_id, link, reason)
        self._greeted.discard(str(link))

    def _requested(self, link: RemotingLink, command: RemotingCommand) -> None:
        handler = self.requests.get(command.code)
        if handler is None:
            remark = f" request type {command.code} not supported"
            link.answer(command, Response.REQUEST_CODE_NOT_SUPPORTED, remark=remark)
        else:
            handler(link, command)

    async def ask(
        self,
        address: str,
        code: int,
        ext: Mapping[str, object] | None = None,
        body: bytes = b"",
        timeout_ms: int = 0,
    ) -> RemotingCommand:
        """One request to one address; the answer, whatever its code."""
        link = await self.link(address)
        fields = {name: str(value) for name, value in (ext or {}).items() if value is not None}
        return await link.request(
            code, fields, body, (timeout_ms or self.settings.request_ms) / 1000
        )

    async def done(
        self,
        address: str,
        code: int,
        ext: Mapping[str, object] | None = None,
        body: bytes = b"",
        *,
        what: str,
    ) -> RemotingCommand:
        """One request that has to succeed; raises the refusal."""
        answer = await self.ask(address, code, ext, body)
        if answer.code != Response.SUCCESS:
            raise refusal(answer.code, answer.remark, what)
        return answer

    # -------------------------------------------------------------------------------- routes

    async def _ask_address_server(self) -> None:
        found = split_nameservers(await fetch_nameservers(self.settings.nameserver_url))
        if found:
            self._nameservers = list(found)

    async def ask_nameserver(self, code: int, ext: Mapping[str, str]) -> RemotingCommand:
        """One request to the first nameserver that answers, which is asked first from then on."""
        reasons: list[str] = []
        for address in list(self._nameservers):
            try:
                answer = await self.ask(address, code, ext)
            except LinkError as error:
                reasons.append(str(error))
                continue
            if self._nameservers[0] != address and address in self._nameservers:
                self._nameservers.remove(address)
                self._nameservers.insert(0, address)
            return answer
        raise NoNameserver(
            f"no nameserver answers ({'; '.join(reasons)}); is one running there, and is the "
            "address right?"
        )

    async def route(self, topic: str, *, fresh: bool = False) -> Route:
        """Where a topic is. Raises TopicMissing or NoNameserver."""
        if not fresh and topic in self._routes:
            return self._routes[topic]
        self.check_open()
        asking = self._asking.get(topic)
        if asking is None:
            asking = self._share(self._asking, topic, self._ask_route(topic))
        return await asyncio.shield(asking)

    async def _ask_route(self, topic: str) -> Route:
        ext = {"topic": topic, "acceptStandardJsonOnly": "true"}
        answer = await self.ask_nameserver(Request.GET_ROUTEINFO_BY_TOPIC, ext)
        if answer.code == Response.TOPIC_NOT_EXIST:
            self._routes.pop(topic, None)
            raise TopicMissing(
                f"no nameserver knows topic {topic}; make it (`sluice admin updateTopic`), or "
                "send to a broker that makes topics"
            )
        if answer.code != Response.SUCCESS:
            raise refusal(answer.code, answer.remark, f"the route of {topic}")
        route = read_route(answer.body)
        changed = self._routes.get(topic) != route
        self._routes[topic] = route
        self._brokers.update(brokers_of(route))
        if changed:
            for notify in self.on_routes:
                notify(topic)
        return route

    async def learn_brokers(self) -> None:
        """Find out about all brokers, also those that have none of this client's topics."""
        answer = await self.ask_nameserver(Request.GET_BROKER_CLUSTER_INFO, {})
        if answer.code != Response.SUCCESS:
            raise refusal(answer.code, answer.remark, "the list of brokers")
        for name, broker in read_cluster_info(answer.body).items():
            self._brokers[name] = dict(broker.addresses)

    def known_route(self, topic: str) -> Route | None:
        return self._routes.get(topic)

    async def _refresh_routes(self) -> None:
        for topic in self.wanted | self._routes.keys():
            try:
                await self.route(topic, fresh=True)
            except TopicMissing:
                log_lines.info("%s: no nameserver knows topic %s", self.client_id, topic)

    async def address_of(self, broker_name: str, topic: str, wanted: int = MASTER) -> str:
        """Where a broker is, by the routes; raises NoRoute."""
        for fresh in (False, True):
            if broker_name not in self._brokers or fresh:
                with contextlib.suppress(TopicMissing):
                    await self.route(topic, fresh=fresh)
            address = read_address(self._brokers.get(broker_name, {}), wanted)
            if address is not None:
                return address
        raise NoRoute(f"no address of broker {broker_name} is known; does it still run?")

    @property
    def broker_addresses(self) -> list[str]:
        """Whom to greet: the masters of all routes, of a consumer the followers too."""
        found: dict[str, None] = {}
        for addresses in self._brokers.values():
            for number, address in addresses.items():
                if number == MASTER or self.all_replicas:
                    found[address] = None
        return list(found)

    # ---------------------------------------------------------------------------- heartbeats

    async def heartbeat(self) -> None:
        """Tell all brokers of this client."""
        await asyncio.gather(*(self._greet(address) for address in self.broker_addresses))

    async def greet_new(self) -> None:
        """Tell those brokers that do not know of this client yet."""
        new = [address for address in self.broker_addresses if address not in self._greeted]
        await asyncio.gather(*(self._greet(address) for address in new))

    async def _greet(self, address: str) -> None:
        body = write_heartbeat(self._heartbeat_of(address))
        try:
            answer = await self.ask(address, Request.HEART_BEAT, body=body)
        except (LinkError, LinkLost) as error:
            self._greeted.discard(address)
            level = logging.DEBUG if address in self._silent else logging.WARNING
            self._silent.add(address)  # said once, until it answers again
            log_lines.log(level, "%s: no heartbeat to %s: %s", self.client_id, address, error)
            return
        self._silent.discard(address)
        if answer.code == Response.SUCCESS:
            self._greeted.add(address)
        else:
            log_lines.warning(
                "%s: %s refused the heartbeat: %s (code %d)",
                *(self.client_id, address, answer.remark, answer.code),
            )

    async def unregister(self, **groups: str) -> None:
        """Tell all brokers that this client leaves; those that do not hear it find out later."""
        ext = {"clientID": self.client_id, **groups}

        async def leave(address: str) -> None:
            link = self.ready_link(address)
            if link is not None:
                try:
                    await link.request(Request.UNREGISTER_CLIENT, ext, timeout_seconds=1.0)
                except LinkError as error:
                    log_lines.info("%s: %s was not told: %s", self.client_id, address, error)

        await asyncio.gather(*(leave(address) for address in self.broker_addresses))
