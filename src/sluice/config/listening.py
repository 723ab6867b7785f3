"""This module declares the settings that every listening process has: its limits, and TLS.

A process inherits these; what only one of them has stands in processes.py. The rows under "TLS" are
for those who connect to the process, the `outgoing_` ones for whom it connects to itself.
"""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from typing import Final, Literal

from sluice.config.kinds import KIB, MIB
from sluice.config.settings import choice, count, flag, larger_unit, millis, size, text, words

TlsMode = Literal["permissive", "enforcing", "off"]
TlsClientAuth = Literal["none", "optional", "require"]

_HOUR_MS: Final = 3_600_000
_EVERYWHERE: Final = ("0.0.0.0", "::")  # noqa: S104  # it is compared, not listened on


@dataclass(frozen=True, slots=True, kw_only=True)
class ListeningConfig:
    """What one listening process allows its peers, and how both sides prove who they are."""

    frame_bytes_max: int = size(
        16 * MIB,
        "The largest request that is read; a longer one closes the connection.",
        64 * KIB,
        1024 * MIB,
    )
    connections_max: int = count(
        10_000, "Connections at one time; further ones are closed at once.", 1, 1_000_000
    )
    connections_per_address_max: int = count(
        2_000,
        "Connections from one address at one time; further ones are closed at once.",
        1,
        1_000_000,
    )
    connection_idle_ms_max: int = millis(
        120_000,
        "Silence after which a connection is closed.",
        1000,
        24 * _HOUR_MS,
        rocketmq=larger_unit("serverChannelMaxIdleTimeSeconds", 1000, "seconds"),
    )
    connection_backlog: int = count(
        1024,
        "Connections that may wait to be accepted.",
        1,
        65_535,
        rocketmq="serverSocketBacklog",
    )
    first_frame_ms: int = millis(
        10_000, "Time from a connection to its first whole request.", 10, _HOUR_MS
    )
    frame_ms: int = millis(
        30_000, "Time from the first byte of a request to its last.", 10, _HOUR_MS
    )
    unsent_ms: int = millis(
        60_000, "Time after which a peer that does not read its answers is dropped.", 10, _HOUR_MS
    )
    unsent_bytes_max: int = size(
        16 * MIB,
        "Unread answers above which nothing more is read from a peer.",
        64 * KIB,
        1024 * MIB,
    )
    tls_mode: TlsMode = choice(
        ("permissive", "enforcing", "off"),
        "Whether TLS is spoken beside plain text, instead of it, or not; needs a certificate.",
        rocketmq=words(
            "tls.server.mode",
            {"permissive": "permissive", "enforcing": "enforcing", "disabled": "off"},
        ),
    )
    tls_certificate_file: str = text(
        "",
        "Certificate chain to show, as PEM; empty: TLS is not spoken.",
        rocketmq="tls.server.certPath",
    )
    tls_key_file: str = text(
        "",
        "Key of the certificate, as PEM; empty: it is in the same file.",
        rocketmq="tls.server.keyPath",
    )
    tls_client_auth: TlsClientAuth = choice(
        ("none", "optional", "require"),
        "Whether clients are asked for a certificate of their own; one that is shown is verified.",
        rocketmq=words(
            "tls.server.need.client.auth",
            {"none": "none", "optional": "optional", "require": "require"},
        ),
    )
    tls_client_ca_file: str = text(
        "",
        "Certificates, as PEM, that sign those of clients.",
        rocketmq="tls.server.trustCertPath",
    )
    tls_handshake_ms: int = millis(
        5_000, "Time that a TLS connection may take to begin.", 10, _HOUR_MS
    )
    outgoing_tls: bool = flag(
        False,
        "Whether TLS is spoken to nameservers and brokers that this process connects to.",
        rocketmq=("tls.enable", "useTLS"),
    )
    outgoing_tls_ca_file: str = text(
        "",
        "Certificates, as PEM, that sign theirs; empty: those that the system trusts.",
        rocketmq="tls.client.trustCertPath",
    )
    outgoing_tls_check_name: bool = flag(
        True, "Whether their certificates must name the address that was connected to."
    )
    outgoing_tls_certificate_file: str = text(
        "",
        "Certificate chain to show to them, as PEM; empty: none.",
        rocketmq="tls.client.certPath",
    )
    outgoing_tls_key_file: str = text(
        "",
        "Key of that certificate, as PEM; empty: it is in the same file.",
        rocketmq="tls.client.keyPath",
    )


def is_everywhere(host: str) -> bool:
    """Whether listening there means on every address of the machine."""
    return host in _EVERYWHERE


def is_loopback(host: str) -> bool:
    """Whether only this machine can connect to a listener there."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.partition("%")[0]).is_loopback
    except ValueError:
        return False
