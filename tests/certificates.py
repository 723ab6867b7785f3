"""This module makes certificates that are worth nothing, with openssl, for tests of TLS."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import NamedTuple

import pytest

NAMES = "subjectAltName=IP:127.0.0.1,DNS:localhost"


class Certificate(NamedTuple):
    """The files of a certificate and of its key."""

    file: str
    key_file: str


def self_signed(directory: Path, name: str, extension: str = NAMES) -> Certificate:
    """A certificate that its own key has signed; it can sign others."""
    made = Certificate(str(directory / f"{name}.pem"), str(directory / f"{name}.key"))
    _openssl(
        *("req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"),
        *("-subj", f"/CN={name}", "-addext", extension),
        *("-out", made.file, "-keyout", made.key_file),
    )
    return made


def signed_by(issuer: Certificate, directory: Path, name: str) -> Certificate:
    """A certificate that another one's key has signed."""
    made = Certificate(str(directory / f"{name}.pem"), str(directory / f"{name}.key"))
    request, extension = directory / f"{name}.csr", directory / f"{name}.ext"
    extension.write_text(NAMES + "\n", encoding="ascii")
    _openssl(
        *("req", "-newkey", "rsa:2048", "-nodes", "-subj", f"/CN={name}"),
        *("-out", str(request), "-keyout", made.key_file),
    )
    _openssl(
        *("x509", "-req", "-in", str(request), "-days", "2", "-CAcreateserial"),
        *("-CA", issuer.file, "-CAkey", issuer.key_file),
        *("-extfile", str(extension), "-out", made.file),
    )
    return made


def encrypted_key(certificate: Certificate, directory: Path) -> str:
    """The key of a certificate behind a password."""
    file = str(directory / "encrypted.key")
    _openssl(
        *("pkcs8", "-topk8", "-in", certificate.key_file, "-out", file),
        *("-passout", "pass:worth-nothing"),
    )
    return file


def _openssl(*arguments: str) -> None:
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("openssl is not installed, so there is no certificate to test TLS with")
    done = subprocess.run([openssl, *arguments], capture_output=True, check=False)
    if done.returncode != 0:
        pytest.skip(f"openssl makes no certificate: {done.stderr.decode(errors='replace')}")
