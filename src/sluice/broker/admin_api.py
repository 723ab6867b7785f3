"""This module opens the admin door of a broker: it registers the handlers of all its parts."""

from __future__ import annotations

from sluice.broker.admin_clients import AdminClients
from sluice.broker.admin_groups import AdminGroups
from sluice.broker.admin_info import AdminInfo
from sluice.broker.admin_modes import AdminModes
from sluice.broker.admin_topics import AdminTopics
from sluice.broker.core import BrokerCore
from sluice.broker.remoting_api import RemotingApi

PARTS = (AdminTopics, AdminGroups, AdminClients, AdminModes, AdminInfo)


def install(api: RemotingApi, core: BrokerCore) -> None:
    """Serve what administrators ask."""
    for part in PARTS:
        for code, handle in part(api, core).handlers().items():
            assert code not in api.handlers, f"request {code} has two handlers"
            api.handlers[code] = handle
