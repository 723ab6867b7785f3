"""TLS as settings describe it: contexts, both processes on one port, our own tools as clients."""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from sluice.broker.server import Broker
from sluice.client.simple import SimpleClient, add_tls_flags, tls_of
from sluice.config import NameserverConfig
from sluice.errors import ConfigError, LinkError, LinkLost
from sluice.link import RemotingLink
from sluice.nameserver import Nameserver
from sluice.protocol.remoting_codes import RequestCode as Request
from sluice.storage.memory_files import MemoryFiles
from sluice.tls import client_tls, listener_tls, server_tls
from tests.certificates import Certificate, encrypted_key, self_signed, signed_by
from tests.unit.broker.broker_kit import broker_config, running
from tests.unit.loops import run_once, until


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tls")


@pytest.fixture(scope="module")
def certificate(directory: Path) -> Certificate:
    return self_signed(directory, "server")


@pytest.fixture(scope="module")
def client_ca(directory: Path) -> Certificate:
    return self_signed(directory, "client-ca")


@pytest.fixture(scope="module")
def client(directory: Path, client_ca: Certificate) -> Certificate:
    return signed_by(client_ca, directory, "client")


def door(certificate: Certificate, mode: str = "permissive", **changes: Any) -> dict[str, Any]:
    """The settings of a process that speaks TLS."""
    files = {"tls_certificate_file": certificate.file, "tls_key_file": certificate.key_file}
    return {"tls_mode": mode, **files, **changes}


# Contexts ---------------------------------------------------------------------------------------


def test_without_a_certificate_or_switched_off_there_is_no_tls(certificate: Certificate) -> None:
    assert server_tls("permissive", "", "") == (None, "off")
    assert server_tls("off", *certificate) == (None, "off")
    with pytest.raises(ConfigError, match="tls_mode=enforcing needs tls_certificate_file"):
        server_tls("enforcing", "", "")
    with pytest.raises(ConfigError, match="tls_client_auth=require needs tls_client_ca_file"):
        server_tls("permissive", *certificate, "require")


def test_files_that_cannot_be_used_are_named_with_the_reason(
    tmp_path: Path, certificate: Certificate, client: Certificate
) -> None:
    missing, junk = str(tmp_path / "missing.pem"), str(tmp_path / "junk.pem")
    (tmp_path / "junk.pem").write_text("junk", encoding="ascii")
    locked = encrypted_key(certificate, tmp_path)

    def complaint(file: str, key_file: str = "", ca_file: str = "") -> str:
        with pytest.raises(ConfigError) as caught:
            server_tls("permissive", file, key_file, "require" if ca_file else "none", ca_file)
        return str(caught.value)

    assert complaint(missing) == (f"{missing}: cannot be used for TLS: No such file or directory")
    assert complaint(certificate.file, missing).startswith(f"{missing}: cannot be used for TLS: No")
    assert complaint(junk).startswith(f"{junk}: cannot be used for TLS: ")
    assert complaint(certificate.file, junk).startswith(f"{junk}: cannot be used for TLS: ")
    assert complaint(certificate.file, client.key_file) == (
        f"{client.key_file}: cannot be used for TLS: the key does not belong to the certificate"
    )
    assert complaint(certificate.file, locked).startswith(
        f"{locked}: cannot be used for TLS: the key has a password; decrypt the file"
    )
    assert complaint(*certificate, ca_file=junk).startswith(f"{junk}: cannot be used for TLS: ")
    with pytest.raises(ConfigError, match=r"missing\.pem: cannot be used for TLS"):
        client_tls(missing)


# Both processes ---------------------------------------------------------------------------------


async def answers(address: str, **tls: Any) -> bool:
    """Whether a broker serves a client that comes this way."""
    try:
        link = await RemotingLink.open(address, tls=client_tls(**tls) if tls else None)
    except LinkLost:
        return False
    try:
        await link.request(Request.GET_BROKER_CONFIG, timeout_seconds=30)
    except LinkError:  # TLS 1.3 tells a client that it is not trusted only after its handshake
        return False
    finally:
        await link.close()
    return True


def test_a_broker_speaks_tls_and_plain_text_on_one_port(certificate: Certificate) -> None:
    async def work() -> None:
        async with running(**door(certificate)) as rig:
            await rig.send("orders", b"in the open")
            trusted = client_tls(certificate.file)
            secret = await RemotingLink.open(rig.broker.address, tls=trusted)
            rig.link, plain = secret, rig.link
            await rig.send("orders", b"in secret")
            pulled = await rig.pull("orders", 0)
            assert b"in the open" in bytes(pulled.body)
            assert b"in secret" in bytes(pulled.body)
            rig.link = plain
            assert (await rig.pull("orders", 0)).body == pulled.body
            await secret.close()

    run_once(work())


def test_a_broker_that_enforces_tls_serves_nobody_else(certificate: Certificate) -> None:
    async def work() -> None:
        broker = Broker(broker_config(**door(certificate, "enforcing")), files=MemoryFiles())
        await broker.start()
        try:
            assert await answers(broker.address, ca_file=certificate.file)
            assert not await answers(broker.address)
            assert not await answers(broker.address, check_name=True)  # who trusts nobody here
        finally:
            await broker.stop()

    run_once(work())


def test_a_client_without_the_right_certificate_is_refused(
    certificate: Certificate, client_ca: Certificate, client: Certificate
) -> None:
    settings = door(
        certificate, "enforcing", tls_client_auth="require", tls_client_ca_file=client_ca.file
    )
    mine = {"certificate_file": client.file, "key_file": client.key_file}
    foreign = {"certificate_file": certificate.file, "key_file": certificate.key_file}

    async def work() -> None:
        broker = Broker(broker_config(**settings), files=MemoryFiles())
        await broker.start()
        try:
            assert await answers(broker.address, ca_file=certificate.file, **mine)
            assert not await answers(broker.address, ca_file=certificate.file)
            assert not await answers(broker.address, ca_file=certificate.file, **foreign)
        finally:
            await broker.stop()

    run_once(work())


@asynccontextmanager
async def pair(certificate: Certificate, **outgoing: Any) -> AsyncIterator[tuple[str, Broker]]:
    """A nameserver that enforces TLS, and a broker that registers there."""
    settings = door(certificate, "enforcing")
    nameserver = Nameserver(NameserverConfig(listen_port=0, **settings))
    await nameserver.start()
    config = broker_config(nameserver_addresses=(nameserver.address,), **settings, **outgoing)
    broker = Broker(config, files=MemoryFiles())
    await broker.start()
    try:
        await broker.registrar.registered()
        yield nameserver.address, broker
    finally:
        await broker.stop()
        await nameserver.stop()


def test_a_broker_registers_and_our_client_sends_over_tls(
    certificate: Certificate, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work() -> None:
        trust = {"outgoing_tls": True, "outgoing_tls_ca_file": certificate.file}
        async with pair(certificate, **trust) as (nameserver, broker):
            assert broker.registrar.registered_count == 1
            async with SimpleClient(nameserver, client_tls(certificate.file)) as client:
                queue = (await client.send_queues("orders"))[0]
                sent = await client.send("orders", queue, b"hello", {})
                assert sent.queue_offset == 0
            monkeypatch.setenv("SLUICE_CLIENT_TLS_CA", certificate.file)
            async with SimpleClient(nameserver) as client:
                entries, _ = await client.pull("orders", queue, 0, expression="*", wait_ms=0)
                assert [bytes(entry.body) for entry in entries] == [b"hello"]

    run_once(work())


def test_a_broker_does_not_register_with_whom_it_cannot_trust(
    certificate: Certificate, client_ca: Certificate, caplog: pytest.LogCaptureFixture
) -> None:
    async def work() -> None:
        trust = {"outgoing_tls": True, "outgoing_tls_ca_file": client_ca.file}
        async with pair(certificate, **trust) as (address, broker):
            await until(lambda: broker.registrar.failed_count == 1)
            assert broker.registrar.registered_count == 0
            lines = [line for line in caplog.messages if "cannot register" in line]
            assert len(lines) == 1
            assert f"nameserver {address}" in lines[0]
            assert "certificate verify failed" in lines[0]

    run_once(work())


def test_settings_that_cannot_work_are_found_before_anything_is_opened(tmp_path: Path) -> None:
    async def work() -> None:
        missing = str(tmp_path / "missing.pem")
        files = MemoryFiles()
        for changes in (
            {"tls_certificate_file": missing},
            {"outgoing_tls": True, "outgoing_tls_ca_file": missing},
        ):
            with pytest.raises(ConfigError, match=r"missing\.pem: cannot be used for TLS"):
                await Broker(broker_config(**changes), files=files).start()
        assert not files.exists("/store")

    run_once(work())


def test_a_handshake_that_says_nothing_is_one_line_with_the_peer(
    certificate: Certificate, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "sluice.net")

    async def work() -> None:
        async with running(**door(certificate, tls_handshake_ms=50, first_frame_ms=500)) as rig:
            await rig.done(Request.GET_BROKER_CONFIG)
            address = rig.broker.listener.address
            silent, half = [await asyncio.open_connection(*address) for _ in range(2)]
            half[1].write(b"\x16\x03\x01")
            for reader, writer in (silent, half):
                host, port = writer.get_extra_info("sockname")
                assert await reader.read() == b""
                lines = [line for line in caplog.messages if f"{host}:{port} closed: " in line]
                assert len(lines) == 1
                writer.close()
                await writer.wait_closed()
            await rig.done(Request.GET_BROKER_CONFIG)

    run_once(work())


# The command line -------------------------------------------------------------------------------


def test_flags_and_variables_of_the_tools(
    certificate: Certificate, monkeypatch: pytest.MonkeyPatch
) -> None:
    def tls(*arguments: str) -> Any:
        parser = argparse.ArgumentParser()
        add_tls_flags(parser)
        return tls_of(parser.parse_args(arguments))

    assert tls() is None
    assert tls("--tls").check_hostname is True
    assert tls("--tls-any-name").check_hostname is False
    assert len(tls("--tls-ca", certificate.file).get_ca_certs()) == 1
    with pytest.raises(ConfigError, match=r"no-file: cannot be used"):
        tls("--tls-certificate", "no-file")
    monkeypatch.setenv("SLUICE_CLIENT_TLS", "false")
    assert tls() is None
    monkeypatch.setenv("SLUICE_CLIENT_TLS", "1")
    monkeypatch.setenv("SLUICE_CLIENT_TLS_ANY_NAME", "1")
    assert tls().check_hostname is False


def test_a_process_takes_its_tls_from_its_settings(certificate: Certificate) -> None:
    context, mode = listener_tls(broker_config(**door(certificate, "enforcing")))
    assert mode == "enforcing"
    assert context is not None
    assert context.minimum_version.name == "TLSv1_2"
