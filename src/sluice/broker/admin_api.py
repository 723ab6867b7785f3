"""This module opens the admin door of a broker: it registers the handlers of all its parts."""

from __future__ import annotations

from sluice.broker.admin_clients import AdminClients
from sluice.broker.admin_groups import AdminGroups
from sluice.broker.admin_info import AdminInfo
from sluice.broker.admin_modes import AdminModes
from sluice.broker.admin_topics import AdminTopics
from sluice.broker.bulk_api import BulkApi
from sluice.broker.core import BrokerCore
from sluice.broker.delay_api import DelayApi
from sluice.broker.kafka_admin_api import KafkaAdminApi
from sluice.broker.pop_api import PopApi
from sluice.broker.remoting_api import RemotingApi
from sluice.broker.reply_api import ReplyApi
from sluice.broker.retry_api import RetryApi
from sluice.broker.staged_api import StagedApi
from sluice.broker.transaction_api import TransactionApi

PARTS = (
    *(AdminTopics, AdminGroups, AdminClients, AdminModes, AdminInfo),
    *(RetryApi, TransactionApi, DelayApi, ReplyApi, PopApi, BulkApi, StagedApi),
    KafkaAdminApi,
)


def install(api: RemotingApi, core: BrokerCore) -> None:
    """Serve what administrators ask."""
    for part in PARTS:
        for code, handle in part(api, core).handlers().items():
            assert code not in api.handlers, f"request {code} has two handlers"
            api.handlers[code] = handle
