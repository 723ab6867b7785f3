"""The Python client over TLS: every kind of client, and what happens without or with wrong keys."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sluice import Admin, Message, Producer, PullConsumer, ReceivedMessage
from sluice import aio as sluice_aio
from sluice.errors import LinkError, NoNameserver
from sluice.tls import client_tls
from tests.certificates import Certificate, self_signed, signed_by
from tests.unit.client.admin_kit import Site


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tls")


@pytest.fixture(scope="module")
def server(home: Path) -> Certificate:
    return self_signed(home, "server")


@pytest.fixture(scope="module")
def authority(home: Path) -> Certificate:
    return self_signed(home, "authority")


@pytest.fixture(scope="module")
def site(server: Certificate, authority: Certificate) -> Iterator[Site]:
    """A nameserver that speaks both (the broker registers in plain text), a broker that wants to
    see a certificate of whoever asks.
    """
    shown = {"tls_certificate_file": server.file, "tls_key_file": server.key_file}
    site = Site(
        {"tls_mode": "permissive", **shown},
        tls_mode="enforcing",
        tls_client_auth="require",
        tls_client_ca_file=authority.file,
        **shown,
    )
    site.start()
    yield site
    site.stop()


@pytest.fixture(scope="module")
def options(home: Path, server: Certificate, authority: Certificate) -> dict[str, Any]:
    own = signed_by(authority, home, "client")
    context = client_tls(
        server.file, check_name=False, certificate_file=own.file, key_file=own.key_file
    )
    return {"tls": context}


def test_all_clients_speak_it(site: Site, options: dict[str, Any]) -> None:
    address = site.nameserver.address
    with Admin(address, **options) as admin:
        admin.create_topic("Tls", queues=2)
        with Producer(address, **options) as producer:
            for i in range(5):
                producer.send(Message("Tls", f"{i}"))
            producer.send_batch([Message("Tls", "5"), Message("Tls", "6")])
            producer.send_oneway(Message("Tls", "7"))
        with PullConsumer(
            address, group="tls-pull", topics="Tls", start_at="first", **options
        ) as consumer:
            bodies: set[bytes] = set()
            while len(bodies) < 8:
                bodies |= {message.body for message in consumer.poll()}
        assert admin.lag("tls-pull") == 0


def test_with_asyncio(site: Site, options: dict[str, Any]) -> None:
    async def work() -> None:
        seen: asyncio.Queue[bytes] = asyncio.Queue()

        async def handle(message: ReceivedMessage) -> None:
            await seen.put(message.body)

        address = site.nameserver.address
        async with (
            asyncio.timeout(60),
            sluice_aio.Producer(address, **options) as producer,
            sluice_aio.PushConsumer(
                address, group="tls-push", topics="TlsPush", handler=handle, **options
            ),
        ):
            await producer.send(Message("TlsPush", "x"))
            assert await seen.get() == b"x"

    asyncio.run(work())


def test_who_does_not_speak_it_or_is_not_trusted(
    site: Site, server: Certificate, authority: Certificate
) -> None:
    address = site.nameserver.address
    quick: dict[str, Any] = {"send_ms": 1000, "tries_max": 1}
    # The nameserver takes plain text, the broker does not.
    with Producer(address, **quick) as producer, pytest.raises(LinkError):
        raise_cause(producer)
    stranger = client_tls(authority.file, check_name=False)
    with (
        Producer(address, tls=stranger, **quick) as producer,
        pytest.raises(NoNameserver, match="certificate verify failed"),
    ):
        producer.send(Message("Tls", "x"))
    nobody = client_tls(server.file, check_name=False)  # shows no certificate of its own
    with Producer(address, tls=nobody, **quick) as producer, pytest.raises(LinkError):
        raise_cause(producer)


def raise_cause(producer: Producer) -> None:
    """Send, and raise why no broker took it."""
    error = producer.send_async(Message("Tls", "x")).exception(60)
    assert error is not None
    raise error.__cause__ or error
