"""This module tells the nameservers what this broker serves: every 30 s, and at once after a
change.

Brokers register with every nameserver and wait for none: one that is down is tried again at the
next turn. Routes that are a few seconds old are normal in RocketMQ; a registration carries all
topics.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import zlib
from collections.abc import Callable
from typing import Final

from sluice.broker.core import BrokerCore
from sluice.broker.topics import PERM_READ, PERM_WRITE
from sluice.errors import SluiceError
from sluice.link import RemotingLink
from sluice.protocol.remoting_bodies import (
    DataVersion,
    Registration,
    TopicConfig,
    write_registration,
)
from sluice.protocol.remoting_codes import RequestCode as Request
from sluice.protocol.remoting_codes import ResponseCode as Response

log_lines = logging.getLogger("sluice.broker")
_RETRY_SECONDS: Final = 2.0
_PATIENCE_SECONDS: Final = 1.0  # so long an answer waits for slow nameservers
# What the broker's own permission leaves of a topic's.
_ALLOWED: Final = {"rw": ~0, "r": ~PERM_WRITE, "w": ~PERM_READ}
_MASK_31: Final = 0x7FFFFFFF


class Registrar:
    """Registers one broker with its nameservers."""

    def __init__(self, core: BrokerCore, address: str) -> None:
        self._core = core
        self.address = address
        self._links: dict[str, RemotingLink] = {}
        self._changed = asyncio.Event()
        self._complained: set[str] = set()
        self._waiting: list[Callable[[], None]] = []

    def topics_changed(self, names: list[str]) -> None:
        """Somebody waits for a new topic: do not wait for the next turn."""
        self._changed.set()

    def when_registered(self, done: Callable[[], None]) -> None:
        """Register now and call back after it; not much later, though a nameserver is down."""
        if not self._core.config.nameserver_addresses:
            done()
            return
        is_done = False

        def once() -> None:
            nonlocal is_done
            if not is_done:
                is_done = True
                timer.cancel()
                done()

        timer = asyncio.get_running_loop().call_later(_PATIENCE_SECONDS, once)
        self._waiting.append(once)
        self._changed.set()

    async def run(self) -> None:
        """Until cancelled."""
        interval = self._core.config.register_interval_ms / 1000
        while True:
            self._changed.clear()
            waiting, self._waiting = self._waiting, []
            await self.register()
            for done in waiting:
                done()
            # A nameserver that was not there is tried again soon: clients find nobody meanwhile.
            wait = min(interval, _RETRY_SECONDS) if self._complained else interval
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait):
                    await self._changed.wait()

    async def register(self) -> None:
        """Register with all nameservers now."""
        body = self._body()
        addresses = self._core.config.nameserver_addresses
        await asyncio.gather(*(self._register_with(address, body) for address in addresses))

    def _body(self) -> bytes:
        version = self._core.topics.data_version()
        allowed = _ALLOWED[self._core.config.permission]
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
        return write_registration(
            Registration(
                topics,
                DataVersion(version["counter"], version["stateVersion"], version["timestamp"]),
            )
        )

    def _identity(self) -> dict[str, str]:
        config = self._core.config
        return {
            "brokerName": config.broker_name,
            "brokerAddr": self.address,
            "clusterName": config.cluster_name,
            "brokerId": str(config.broker_id),
        }

    async def _register_with(self, address: str, body: bytes) -> None:
        ext = {
            **self._identity(),
            "haServerAddr": self.address,
            "compressed": "false",
            "bodyCrc32": str(zlib.crc32(body) & _MASK_31),
        }
        timeout = self._core.config.register_timeout_ms / 1000
        try:
            link = await self._link(address, timeout)
            answer = await link.request(Request.REGISTER_BROKER, ext, body, timeout)
            if answer.code != Response.SUCCESS:
                raise SluiceError(f"code {answer.code}: {answer.remark}")
        except (OSError, TimeoutError, SluiceError) as error:
            await self._drop(address)
            if address not in self._complained:
                self._complained.add(address)
                log_lines.warning("cannot register with nameserver %s: %s", address, error)
        else:
            if address in self._complained:
                self._complained.discard(address)
                log_lines.info("registered with nameserver %s again", address)

    async def _link(self, address: str, timeout_seconds: float) -> RemotingLink:
        link = self._links.get(address)
        if link is None or not link.is_open:
            link = await RemotingLink.open(address, timeout_seconds=timeout_seconds)
            self._links[address] = link
        return link

    async def _drop(self, address: str) -> None:
        link = self._links.pop(address, None)
        if link is not None:
            await link.close()

    async def leave(self) -> None:
        """Tell the nameservers that this broker goes."""
        for address, link in list(self._links.items()):
            if link.is_open:
                with contextlib.suppress(OSError, TimeoutError, SluiceError):
                    await link.request(Request.UNREGISTER_BROKER, self._identity(), b"", 1.0)
            await self._drop(address)
