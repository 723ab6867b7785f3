"""Fixtures that bring the real peers; where one cannot be had, the test is skipped and says why."""

from pathlib import Path

import pytest

from peers import ARTIFACT_SETS, Jars, PeerUnavailable, fetch
from tests.interop.clients import JavaClients


@pytest.fixture(scope="session")
def rocketmq_jars() -> Jars:
    try:
        return fetch(ARTIFACT_SETS["rocketmq-5.5.0"])
    except PeerUnavailable as error:
        pytest.skip(error.reason)


@pytest.fixture
def java_clients(rocketmq_jars: Jars, tmp_path: Path) -> JavaClients:
    try:
        return JavaClients(rocketmq_jars, home=tmp_path / "java-clients")
    except PeerUnavailable as error:
        pytest.skip(error.reason)
