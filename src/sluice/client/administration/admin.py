"""This module is the administrator's client for asyncio: `sluice.aio.Admin`.

It finds nameservers in the four ways in which producers and consumers do. Connections are opened
when they are needed, and closed with the client.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Any, Self

from sluice.client.administration.business import BusinessDesk
from sluice.client.aio.address_server import fetch_nameservers
from sluice.client.core.settings import AdminSettings, make_settings, split_nameservers
from sluice.errors import ClientClosed, NoNameserver
from sluice.protocol.remoting import RemotingCommand


class Admin(BusinessDesk):
    """One cluster, for its administrator: `async with Admin("host:9876") as admin`.

    Every setting of `AdminSettings` can be given by name. What goes to several brokers raises
    PartlyDone where some did it and some did not.
    """

    def __init__(
        self,
        nameservers: str | Iterable[str] | None = None,
        *,
        properties: Mapping[str, str] | None = None,
        **options: Any,
    ) -> None:
        settings = make_settings(AdminSettings, nameservers, properties, os.environ, options)
        super().__init__(";".join(settings.nameservers), settings.tls, settings.credentials)
        self.settings = settings
        self._is_closed = False

    async def start(self) -> None:
        """Find the nameservers; raises NoNameserver where none is known."""
        if not self._nameservers and self.settings.nameserver_url:
            found = await fetch_nameservers(self.settings.nameserver_url)
            self._nameservers = list(split_nameservers(found))
        if not self._nameservers:
            raise NoNameserver(
                "no nameserver is known; pass nameservers='host:9876', or set NAMESRV_ADDR"
            )

    async def close(self) -> None:
        """Close all connections."""
        self._is_closed = True
        await super().close()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def ask(
        self,
        address: str,
        code: int,
        ext: Mapping[str, str],
        body: bytes = b"",
        timeout_seconds: float = 0.0,
    ) -> RemotingCommand:
        """One request to one address."""
        if self._is_closed:
            raise ClientClosed("this client was closed; make a new one")
        seconds = timeout_seconds or self.settings.request_ms / 1000
        return await super().ask(address, code, ext, body, seconds)
