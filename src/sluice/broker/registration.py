"""This module tells the nameservers what this broker serves: every 30 s, and at once after a
change.

Brokers register with every nameserver and wait for none: each has a task of its own, so one that is
down or hangs delays nobody else, and is tried again by itself. Routes that are a few seconds old
are normal in RocketMQ; a registration carries all topics.

A broker that listens everywhere has no address of its own. It registers the one that faces the
nameserver, and says that it listens everywhere: a Sluice nameserver on the same machine then tells
every client the address that this client dialled.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import ssl
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Final

from sluice.broker.core import BrokerCore
from sluice.broker.topics import AUTO_CREATE_TOPIC, PERM_READ, PERM_WRITE
from sluice.config import is_everywhere, is_loopback
from sluice.errors import SluiceError
from sluice.link import RemotingLink, join_address, split_address
from sluice.protocol.remoting_bodies import (
    EVERYWHERE_FIELD,
    DataVersion,
    QueueData,
    Registration,
    TopicConfig,
    read_route,
    write_registration,
)
from sluice.protocol.remoting_codes import RequestCode as Request
from sluice.protocol.remoting_codes import ResponseCode as Response

log_lines = logging.getLogger("sluice.broker")
_RETRY_SECONDS: Final = 2.0
_PATIENCE_SECONDS: Final = 1.0  # so long an answer waits for slow nameservers
_LEAVE_SECONDS: Final = 1.0
_ROUTE_SECONDS: Final = 3.0
# What the broker's own permission leaves of a topic's.
_ALLOWED: Final = {"rw": ~0, "r": ~PERM_WRITE, "w": ~PERM_READ}
_MASK_31: Final = 0x7FFFFFFF

Tls = ssl.SSLContext | None


class _Nameserver:
    """One nameserver, and what it knows of this broker."""

    __slots__ = ("address", "changed", "link", "slow", "tls", "told", "topics", "trouble")

    def __init__(self, address: str, tls: Tls) -> None:
        self.address = address
        self.tls = tls
        self.link: RemotingLink | None = None
        self.changed = asyncio.Event()
        self.told = 0  # the number of the newest change that it was told
        self.topics: frozenset[str] = frozenset()  # those that it was told last
        self.slow = False  # nobody waits for it until it has answered
        self.trouble = ""  # why it did not take the last registration

    async def drop(self) -> None:
        link, self.link = self.link, None
        if link is not None:
            await link.close()


class Registrar:
    """Registers one broker with its nameservers. `run` does the work until it is cancelled."""

    def __init__(
        self,
        core: BrokerCore,
        address: str,
        *,
        tls: Tls = None,
        tls_by_address: Mapping[str, Tls] | None = None,
    ) -> None:
        self._core = core
        self.address = address  # where clients find the broker, unless it listens everywhere
        exceptions = tls_by_address or {}
        self._nameservers = [
            _Nameserver(each, exceptions.get(each, tls))
            for each in dict.fromkeys(core.config.nameserver_addresses)
        ]
        self._everywhere = ""
        if not core.config.advertised_host and is_everywhere(core.config.listen_host):
            self._everywhere = core.config.listen_host
        self._change_count = 1  # the first one is that there is a broker
        self._waiting: list[tuple[int, Callable[[], None]]] = []
        self._body: tuple[object, bytes, frozenset[str]] = (None, b"", frozenset())
        self._told_default = False
        self._asking: set[asyncio.Task[dict[str, int] | None]] = set()

    @property
    def failed_count(self) -> int:
        """How many nameservers did not take the last registration."""
        return sum(bool(each.trouble) for each in self._nameservers)

    @property
    def registered_count(self) -> int:
        """How many nameservers took it."""
        return sum(each.told > 0 and not each.trouble for each in self._nameservers)

    # ------------------------------------------------------------------------------------- changes

    def topics_changed(self, names: list[str]) -> None:
        """Somebody waits for a new topic: do not wait for the next turn."""
        self._change_count += 1
        for each in self._nameservers:
            each.changed.set()

    def when_registered(self, done: Callable[[], None]) -> None:
        """Call back when the nameservers know all changes up to now; a bounded time later, though
        one of them is down.
        """
        if not self._nameservers:
            done()
            return
        wanted = self._change_count
        is_done = False

        def once() -> None:
            nonlocal is_done
            if not is_done:
                is_done = True
                timer.cancel()
                done()

        def out_of_patience() -> None:
            for each in self._nameservers:
                each.slow = each.slow or each.told < wanted
            self._tell_waiting()

        timer = asyncio.get_running_loop().call_later(_PATIENCE_SECONDS, out_of_patience)
        self._waiting.append((wanted, once))
        self._tell_waiting()

    async def registered(self) -> None:
        """Return when the nameservers that answer know the broker as it is now."""
        done = asyncio.Event()
        self.when_registered(done.set)
        await done.wait()

    def _tell_waiting(self) -> None:
        told = min(
            (each.told for each in self._nameservers if not each.slow), default=self._change_count
        )
        ready = [done for wanted, done in self._waiting if wanted <= told]
        self._waiting = [each for each in self._waiting if each[0] > told]
        for done in ready:
            done()

    # -------------------------------------------------------------------------------- registration

    async def run(self) -> None:
        """Until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            for each in self._nameservers:
                tasks.create_task(self._keep(each))

    async def _keep(self, nameserver: _Nameserver) -> None:
        """See to it that one nameserver knows this broker."""
        while True:
            nameserver.changed.clear()
            change = self._change_count
            await self._register_with(nameserver)
            nameserver.told = change
            nameserver.slow = bool(nameserver.trouble)
            self._tell_waiting()
            # One that was not there is tried again soon: clients find nobody meanwhile.
            wait = self._core.config.register_interval_ms / 1000
            if nameserver.trouble:
                wait = min(wait, _RETRY_SECONDS)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait):
                    await nameserver.changed.wait()

    async def _register_with(self, nameserver: _Nameserver) -> None:
        timeout = self._core.config.register_timeout_ms / 1000
        address = nameserver.address
        try:
            link = nameserver.link
            if link is None or not link.is_open:
                link = nameserver.link = await RemotingLink.open(
                    address, tls=nameserver.tls, timeout_seconds=timeout
                )
            body, topics = self._registration()
            ext = {
                **self._identity(link),
                "haServerAddr": self._address_for(link),
                "compressed": "false",
                "bodyCrc32": str(zlib.crc32(body) & _MASK_31),
            }
            if self._everywhere:
                ext[EVERYWHERE_FIELD] = self._everywhere
            answer = await link.request(Request.REGISTER_BROKER, ext, body, timeout)
            if answer.code != Response.SUCCESS:
                raise SluiceError(f"code {answer.code}: {answer.remark}")
            if topics is not nameserver.topics:
                await self._forget(link, nameserver.topics - topics)
                nameserver.topics = topics
        except (OSError, TimeoutError, SluiceError) as error:
            if not nameserver.trouble:
                log_lines.warning("cannot register with nameserver %s: %s", address, error)
            nameserver.trouble = str(error) or type(error).__name__
            await nameserver.drop()
        else:
            if nameserver.trouble:
                log_lines.info("registered with nameserver %s again", address)
            nameserver.trouble = ""

    async def _forget(self, link: RemotingLink, topics: frozenset[str]) -> None:
        """Take topics that were deleted out of the routes, where a nameserver keeps what it was
        told once. It forgets a topic for a whole cluster: one that others have too stays.
        """
        config = self._core.config
        for topic in sorted(topics):
            queues = await self._queues_of(link, topic)
            if {queue.broker_name for queue in queues} == {config.broker_name}:
                ext = {"topic": topic, "clusterName": config.cluster_name}
                code = Request.DELETE_TOPIC_IN_NAMESRV
                await link.request(code, ext, b"", _ROUTE_SECONDS)

    def _registration(self) -> tuple[bytes, frozenset[str]]:
        """All topics, and their names; made anew only when something of it has changed."""
        version = self._core.topics.data_version()
        permission, creates = self._core.config.permission, self._core.config.creates_topics
        key = (tuple(version.values()), permission, creates)
        if self._body[0] == key:
            return self._body[1:]
        allowed = _ALLOWED[permission]
        topics = {
            settings.name: TopicConfig(
                settings.name,
                settings.read_queues,
                settings.write_queues,
                settings.perm & allowed,
                settings.filter_type,
                settings.sys_flag,
                settings.order,
                settings.attributes,
            )
            for settings in self._core.topics.all()
        }
        self._told_default = self._told_default or creates
        if not creates:
            # Producers take its queues for those of a topic that does not exist, in vain.
            default = topics.pop(AUTO_CREATE_TOPIC, None)
            if default is not None and self._told_default:
                # A nameserver forgets no topic that it was told once: it hears of no use for it.
                topics[AUTO_CREATE_TOPIC] = replace(default, perm=0)
        data_version = DataVersion(
            version["counter"], version["stateVersion"], version["timestamp"]
        )
        body = write_registration(Registration(topics, data_version))
        self._body = (key, body, frozenset(topics))
        return self._body[1:]

    def _identity(self, link: RemotingLink) -> dict[str, str]:
        config = self._core.config
        return {
            "brokerName": config.broker_name,
            "brokerAddr": self._address_for(link),
            "clusterName": config.cluster_name,
            "brokerId": str(config.broker_id),
        }

    def _address_for(self, link: RemotingLink) -> str:
        """Where the clients of that nameserver find this broker, as far as it can be known."""
        host = link.local_host
        if not self._everywhere or not host or is_loopback(host):
            return self.address
        return join_address(host, split_address(self.address)[1])

    # -------------------------------------------------------------------------------------- routes

    def ask_route(self, topic: str, then: Callable[[dict[str, int] | None], None]) -> None:
        """Ask the first nameserver that answers which brokers let a topic be read, and how many
        queues each; None where none knows.
        """
        task = asyncio.get_running_loop().create_task(self._route(topic))
        self._asking.add(task)

        def done(task: asyncio.Task[dict[str, int] | None]) -> None:
            self._asking.discard(task)
            then(None if task.cancelled() else task.result())

        task.add_done_callback(done)

    async def _route(self, topic: str) -> dict[str, int] | None:
        for each in self._nameservers:
            link = each.link
            if link is None or not link.is_open:
                continue
            try:
                queues = await self._queues_of(link, topic)
                if queues:
                    return {q.broker_name: q.read_queue_count for q in queues if q.perm & PERM_READ}
            except (OSError, TimeoutError, SluiceError) as error:
                log_lines.warning("nameserver %s gives no route: %s", each.address, error)
        return None

    @staticmethod
    async def _queues_of(link: RemotingLink, topic: str) -> Sequence[QueueData]:
        """What a nameserver knows of a topic; nothing where it does not know it."""
        ext = {"topic": topic, "acceptStandardJsonOnly": "true"}
        code = Request.GET_ROUTEINFO_BY_TOPIC
        answer = await link.request(code, ext, b"", _ROUTE_SECONDS)
        return read_route(answer.body).queues if answer.code == Response.SUCCESS else ()

    # ------------------------------------------------------------------------------------- leaving

    async def leave(self) -> None:
        """Tell the nameservers that this broker goes; `run` has ended. One that hangs is left."""
        await asyncio.gather(*(self._leave(each) for each in self._nameservers))

    async def _leave(self, nameserver: _Nameserver) -> None:
        link = nameserver.link
        if link is not None and link.is_open:
            with contextlib.suppress(OSError, TimeoutError, SluiceError):
                await link.request(
                    Request.UNREGISTER_BROKER, self._identity(link), b"", _LEAVE_SECONDS
                )
        await nameserver.drop()
