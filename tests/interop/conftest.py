"""Fixtures that bring the real peers; where one cannot be had, the test is skipped and says why."""

from collections.abc import Mapping
from pathlib import Path

import pytest

from peers import ARTIFACT_SETS, Jars, PeerUnavailable, fetch
from sluice.link import RemotingLink
from sluice.protocol.framing import Frame
from sluice.protocol.remoting import RemotingCommand
from tests.interop.clients import Clients, GoClients, JavaClients

ANSWER_S = 60.0


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A peer on a busy machine may need longer than the three seconds that a link waits for it."""
    request = RemotingLink.request

    async def patiently(
        self: RemotingLink,
        code: int,
        ext: Mapping[str, str] | None = None,
        body: Frame = b"",
        timeout_seconds: float = ANSWER_S,
    ) -> RemotingCommand:
        return await request(self, code, ext, body, timeout_seconds)

    monkeypatch.setattr(RemotingLink, "request", patiently)


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


def clients_named(name: str, home: Path) -> Clients:
    """One of the client libraries that users have; skips the test where it cannot be had."""
    try:
        if name == "go-2":
            return GoClients(home=home, name=name)
        jars = "rocketmq-client-4.9.8" if name == "java-4" else "rocketmq-5.5.0"
        options = ["-Drocketmq.serialize.type=ROCKETMQ"] if name == "java-5-binary" else []
        return JavaClients(fetch(ARTIFACT_SETS[jars]), home=home, name=name, options=options)
    except PeerUnavailable as error:
        pytest.skip(error.reason)


@pytest.fixture(params=["java-5", "java-4", "go-2"])
def clients(request: pytest.FixtureRequest, tmp_path: Path) -> Clients:
    """Each of the client libraries in turn: Java 5.5.0 and 4.9.8, Go 2.1.2; or those named."""
    return clients_named(request.param, tmp_path / "clients")


@pytest.fixture
def go_clients(tmp_path: Path) -> Clients:
    return clients_named("go-2", tmp_path / "go-clients")
