"""This module is Sluice's pytest plugin: brokers, time and faults as fixtures.

pytest loads it by itself where Sluice is installed (entry point `pytest11`). Until a test asks for
one of the fixtures it does nothing and imports nothing but pytest. docs/testing.md shows how they
are used; `pytest --fixtures` lists them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from sluice.testing.clock import Clock
    from sluice.testing.faults import Faults
    from sluice.testing.site import BrokerFactory, LiveBroker

_MARKER = (
    "sluice(**settings): settings of the test's brokers, by the names of Sluice's settings: "
    '@pytest.mark.sluice(flush="async", default_queue_count=1)'
)


def pytest_addoption(pluginmanager: pytest.PytestPluginManager) -> None:
    """Spare projects the rewriting of assertions in all of Sluice's modules.

    pytest does that to every package that brings a plugin. Here it would find nothing that is a
    test, and take seconds where byte code is not kept.
    """
    hook = getattr(pluginmanager, "rewrite_hook", None)
    marked = getattr(hook, "_must_rewrite", None)
    known = getattr(hook, "_marked_for_rewrite_cache", None)
    if isinstance(marked, set) and isinstance(known, dict):
        marked.discard("sluice")
        known.clear()


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", _MARKER)


def _settings_of(request: pytest.FixtureRequest) -> dict[str, Any]:
    """What the markers of a test say; the nearest one wins, setting by setting."""
    settings: dict[str, Any] = {}
    for marker in reversed(list(request.node.iter_markers("sluice"))):
        if marker.args:
            raise pytest.UsageError(
                f"pytest.mark.sluice takes settings by name, not {marker.args[0]!r}: "
                '@pytest.mark.sluice(flush="async")'
            )
        settings |= marker.kwargs
    return settings


@pytest.fixture
def _sluice_time() -> Clock:
    """The time of all brokers of a test: the machine's, unless `sluice_clock` stops it."""
    from sluice.testing.clock import Clock

    return Clock()


@pytest.fixture
def sluice_broker_factory(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    _sluice_time: Clock,
) -> Iterator[BrokerFactory]:
    """Makes brokers, for tests that need several or settings of their own.

    `factory(flush="async")` is a broker like `sluice_broker`; `factory(beside=first)` one that
    registers with the nameserver of another. All are stopped when the test is over.
    """
    from sluice.testing.members import watching
    from sluice.testing.site import BrokerFactory

    def make_directory() -> Any:
        return tmp_path_factory.mktemp("sluice-broker")

    with watching():
        factory = BrokerFactory(make_directory, _sluice_time, _settings_of(request))
        try:
            yield factory
        finally:
            factory.close()


@pytest.fixture
def sluice_broker(sluice_broker_factory: BrokerFactory) -> LiveBroker:
    """A broker and its nameserver, running in this process, for one test.

    It has free ports on loopback and a store in a temporary directory. `.nameserver_address` is
    what clients need, of any language; `.producer()` and `.consumer(topic, handler)` are ready and
    closed when the test is over, and so are `await .aio_producer()` and `await .aio_consumer(...)`.
    `.messages(topic)` is all that lies there. `.restart()`, `.kill()` and `.start()` do what they
    say. Settings: `@pytest.mark.sluice(flush="async")`.
    """
    return sluice_broker_factory()


@pytest.fixture(scope="session")
def _sluice_session_broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveBroker]:
    """The broker behind `sluice_shared_broker`."""
    from sluice.testing.members import watching
    from sluice.testing.site import LiveBroker

    with watching():
        broker = LiveBroker(tmp_path_factory.mktemp("sluice-broker"))
        try:
            yield broker
        finally:
            broker.close()


@pytest.fixture
def sluice_shared_broker(_sluice_session_broker: LiveBroker) -> Iterator[LiveBroker]:
    """One broker for all tests of the run (of each worker, with pytest-xdist).

    Tests choose topics and groups of their own. It has no settings, no clock and no faults; clients
    made through it are closed with each test.
    """
    try:
        yield _sluice_session_broker
    finally:
        _sluice_session_broker.clients.close()


@pytest.fixture
def sluice_clock(_sluice_time: Clock) -> Iterator[Clock]:
    """The time of the test's brokers: it stands still until `advance(hours=2)` moves it.

    When `advance` returns, what became due has been delivered, step by step, and the consumers of
    this process are done with it: delayed messages, retries up to the dead letter, questions about
    transactions. `await aio_advance(...)` in coroutines. `.time()` and `.now()` say what time it
    is, `.run()` lets it go on, `.settle()` waits without moving it.
    """
    from sluice.testing.clock import time_of_clients

    _sluice_time.stop()
    with time_of_clients(_sluice_time):
        yield _sluice_time


@pytest.fixture
def sluice_faults(sluice_broker: LiveBroker) -> Faults:
    """What goes wrong with `sluice_broker`, as the test orders it.

    `.drop("send")`, `.delay("pull", seconds=1)`, `.cut()`, `.cut("send", done=True)` and
    `.unreachable()` on the network; `.fail_fsync(nth)`, `.disk_full()` and `.slow_disk()` on the
    disk; `.kill()`, `.restart()`, `.freeze()` and `.thaw()` for the process. Other brokers have
    their own as `.faults`.
    """
    return sluice_broker.faults
