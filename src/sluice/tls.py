"""This module makes TLS contexts out of settings: what a listener shows, whom a connector trusts.

TLS 1.2 is the least that is spoken, and a certificate that the other side shows is always verified.
RocketMQ's clients know servers by address and check no names, so a certificate for them often names
none; here the name is checked unless the caller says otherwise. What cannot work is a ConfigError
that names the file. No key, and no part of one, is ever in a message.
"""

from __future__ import annotations

import ssl
from typing import Final

from sluice.config import ListeningConfig
from sluice.config.listening import TlsClientAuth, TlsMode
from sluice.errors import ConfigError

_REASONS: Final = {
    "KEY_VALUES_MISMATCH": "the key does not belong to the certificate",
    "NO_START_LINE": "it holds no PEM",
    "NO_CERTIFICATE_OR_CRL_FOUND": "it holds no certificate",
}
_VERIFY: Final = {"optional": ssl.CERT_OPTIONAL, "require": ssl.CERT_REQUIRED}


def server_tls(
    mode: TlsMode,
    certificate_file: str,
    key_file: str,
    client_auth: TlsClientAuth = "none",
    client_ca_file: str = "",
) -> tuple[ssl.SSLContext | None, TlsMode]:
    """What a listener is given to speak TLS by these settings; raises ConfigError."""
    if mode == "off" or not certificate_file:
        if mode == "enforcing":
            raise ConfigError("tls_mode=enforcing needs tls_certificate_file")
        return None, "off"
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    _strict(context)
    _show(context, certificate_file, key_file)
    if client_auth != "none":
        if not client_ca_file:
            raise ConfigError(f"tls_client_auth={client_auth} needs tls_client_ca_file")
        _trust(context, client_ca_file)
        context.verify_mode = _VERIFY[client_auth]
    return context, mode


def listener_tls(config: ListeningConfig) -> tuple[ssl.SSLContext | None, TlsMode]:
    """TLS of a process for those who connect to it."""
    return server_tls(
        config.tls_mode,
        config.tls_certificate_file,
        config.tls_key_file,
        config.tls_client_auth,
        config.tls_client_ca_file,
    )


def client_tls(
    ca_file: str = "",
    *,
    check_name: bool = True,
    certificate_file: str = "",
    key_file: str = "",
) -> ssl.SSLContext:
    """TLS towards a server whose certificate is signed by `ca_file`, or by whom the system trusts.

    A certificate in `ca_file` need not be a CA's: the server's own one is enough.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    _strict(context)
    context.check_hostname = check_name
    if ca_file:
        _trust(context, ca_file)
        context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    else:
        context.load_default_certs()
    if certificate_file:
        _show(context, certificate_file, key_file)
    return context


def outgoing_tls(config: ListeningConfig) -> ssl.SSLContext | None:
    """TLS of a process towards those it connects to; None where it speaks plain text."""
    if not config.outgoing_tls:
        return None
    return client_tls(
        config.outgoing_tls_ca_file,
        check_name=config.outgoing_tls_check_name,
        certificate_file=config.outgoing_tls_certificate_file,
        key_file=config.outgoing_tls_key_file,
    )


def _strict(context: ssl.SSLContext) -> None:
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.options |= ssl.OP_NO_RENEGOTIATION | ssl.OP_NO_COMPRESSION


def _show(context: ssl.SSLContext, certificate_file: str, key_file: str) -> None:
    """Load what this side shows. Without the callback, an encrypted key would ask on a terminal."""

    def password() -> str:
        raise ConfigError(
            f"{key_file or certificate_file}: cannot be used for TLS: the key has a password; "
            "decrypt the file, and let nobody else read it"
        )

    for file in filter(None, (certificate_file, key_file)):
        _check_readable(file)
    try:
        context.load_cert_chain(certificate_file, key_file or None, password)
    except (OSError, ssl.SSLError) as error:
        blamed = (
            key_file if key_file and _holds_certificates(certificate_file) else certificate_file
        )
        raise _unusable(blamed, error) from error


def _holds_certificates(file: str) -> bool:
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(file)
    except (OSError, ssl.SSLError):
        return False
    return True


def _trust(context: ssl.SSLContext, ca_file: str) -> None:
    _check_readable(ca_file)
    try:
        context.load_verify_locations(ca_file)
    except (OSError, ssl.SSLError) as error:
        raise _unusable(ca_file, error) from error


def _check_readable(file: str) -> None:
    """OpenSSL does not say which of two files is missing."""
    try:
        with open(file, "rb"):
            return
    except OSError as error:
        raise _unusable(file, error) from error


def _unusable(file: str, error: OSError) -> ConfigError:
    reason = getattr(error, "reason", None) or error.strerror or str(error)
    return ConfigError(f"{file}: cannot be used for TLS: {_REASONS.get(reason, reason)}")
