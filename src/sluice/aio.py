"""This module is the client for asyncio: `from sluice.aio import Producer, PushConsumer`.

The blocking client has the same names in `sluice`; docs/client.md shows both.
"""

from __future__ import annotations

from sluice.client.administration.admin import Admin
from sluice.client.aio.observers import Observer
from sluice.client.aio.pull import PullConsumer
from sluice.client.aio.push import PushConsumer
from sluice.client.aio.requests import Producer
from sluice.client.aio.transactions import Transaction, TransactionProducer

__all__ = [
    "Admin",
    "Observer",
    "Producer",
    "PullConsumer",
    "PushConsumer",
    "Transaction",
    "TransactionProducer",
]
