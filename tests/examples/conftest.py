"""A broker for the examples: what takes half a minute on a broker with usual settings is quick."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from sluice.testing import LiveBroker

SETTINGS = {
    "transaction_timeout_ms": 500,
    "transaction_check_interval_ms": 300,
    "queue_lock_ms": 1000,
}


@pytest.fixture(scope="module")
def namesrv(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    broker = LiveBroker(tmp_path_factory.mktemp("broker"), SETTINGS)
    try:
        yield broker.nameserver_address
    finally:
        broker.close()
