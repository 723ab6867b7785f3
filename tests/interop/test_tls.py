"""Apache's Java client 5.5.0 over TLS: beside plain text on one port, and where TLS is required."""

from __future__ import annotations

from pathlib import Path

import pytest

from peers import Jars, JavaPrograms, PeerUnavailable
from tests.certificates import Certificate, self_signed, signed_by
from tests.interop.clients import JAVA_OPTIONS, JAVA_SOURCES, Clients, SendPlan, kind
from tests.interop.sluice_process import SluiceProcess

TOPICS = ("SecretOrders",)
COUNT = 40


def java(jars: Jars, home: Path, *options: str) -> Clients:
    """The client with its own options for TLS; without any it speaks plain text."""
    try:
        programs = JavaPrograms(JAVA_SOURCES, jars, home=home, options=(*JAVA_OPTIONS, *options))
    except PeerUnavailable as error:
        pytest.skip(error.reason)
    return Clients("java-5", programs)


def trusting(certificate: Certificate, shown: Certificate | None = None) -> list[str]:
    """What makes Apache's client verify a server; its test mode, the default, trusts everybody."""
    options = {
        "tls.enable": "true",
        "tls.test.mode.enable": "false",
        "tls.client.authServer": "true",
        "tls.client.trustCertPath": certificate.file,
    }
    if shown is not None:
        options |= {"tls.client.certPath": shown.file, "tls.client.keyPath": shown.key_file}
    return [f"-D{name}={value}" for name, value in options.items()]


def door(certificate: Certificate, mode: str) -> tuple[str, ...]:
    return (
        *("--tls-mode", mode, "--tls-certificate-file", certificate.file),
        *("--tls-key-file", certificate.key_file),
    )


def test_tls_and_plain_clients_share_a_port_and_see_the_same(
    rocketmq_jars: Jars, tmp_path: Path
) -> None:
    certificate = self_signed(tmp_path, "server")
    secret = java(rocketmq_jars, tmp_path / "secret", *trusting(certificate))
    plain = java(rocketmq_jars, tmp_path / "plain")
    with SluiceProcess(tmp_path / "sluice", *door(certificate, "permissive")) as sluice:
        nameserver = sluice.nameserver_address
        sent = secret.send(nameserver, SendPlan("s", TOPICS, count=COUNT))
        sent += plain.send(nameserver, SendPlan("p", TOPICS, count=COUNT))
        places = {row["id"]: (row["queueId"], row["queueOffset"]) for row in sent}
        assert len(places) == 2 * COUNT
        for clients, group in ((secret, "secret-readers"), (plain, "plain-readers")):
            rows = clients.receive_all(nameserver, TOPICS, group=group)
            assert {
                row["properties"]["id"]: (row["queueId"], row["queueOffset"]) for row in rows
            } == places


def test_where_tls_is_required_both_sides_show_who_they_are(
    rocketmq_jars: Jars, tmp_path: Path
) -> None:
    certificate, authority = self_signed(tmp_path, "server"), self_signed(tmp_path, "authority")
    shown = signed_by(authority, tmp_path, "client")
    flags = (
        *door(certificate, "enforcing"),
        *("--tls-client-auth", "require", "--tls-client-ca-file", authority.file),
        *("--outgoing-tls-certificate-file", shown.file),
        *("--outgoing-tls-key-file", shown.key_file),
    )
    known = java(rocketmq_jars, tmp_path / "known", *trusting(certificate, shown))
    nameless = java(rocketmq_jars, tmp_path / "nameless", *trusting(certificate))
    plain = java(rocketmq_jars, tmp_path / "plain")
    with SluiceProcess(tmp_path / "sluice", *flags) as sluice:
        nameserver = sluice.nameserver_address
        sent = known.send(nameserver, SendPlan("k", TOPICS, count=COUNT))
        pushed = known.receive_push(nameserver, TOPICS, count=COUNT, group="known-readers")
        assert {row["properties"]["id"] for row in pushed} == {row["id"] for row in sent}
        for clients, prefix in ((nameless, "n"), (plain, "p")):
            plan = SendPlan(prefix, TOPICS, count=1)
            with clients.sending(nameserver, plan) as program:
                events = program.finish(timeout_s=120)
            assert kind(events, "sent") == []
            assert len(kind(events, "failed")) == 1
        rows = known.receive_all(nameserver, TOPICS)
        assert len(rows) == COUNT
