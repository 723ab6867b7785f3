"""This module signs requests for brokers that want to know who asks: RocketMQ's ACL, 1 and 2.

A signature is an HMAC-SHA1 over the values of all fields, in the order of their names, and the
body. The secret key is in no text that this module, or a message of it, writes.
"""

from __future__ import annotations

import base64
import hmac
from dataclasses import dataclass, field
from typing import Final

from sluice.errors import ConfigError
from sluice.model import Buffer

ACCESS_KEY: Final = "AccessKey"
SIGNATURE: Final = "Signature"
SECURITY_TOKEN: Final = "SecurityToken"  # noqa: S105 - the name of a field


@dataclass(frozen=True, slots=True)
class Credentials:
    """Who a client is, and what it proves it with."""

    access_key: str
    secret_key: str = field(repr=False)
    security_token: str = field(default="", repr=False)

    def sign(self, fields: dict[str, str], body: Buffer) -> None:
        """Add who asks, and the signature, to the fields of a request."""
        fields[ACCESS_KEY] = self.access_key
        if self.security_token:
            fields[SECURITY_TOKEN] = self.security_token
        fields.pop(SIGNATURE, None)
        mac = hmac.new(self.secret_key.encode(), digestmod="sha1")
        mac.update("".join(fields[name] for name in sorted(fields)).encode())
        mac.update(body)
        fields[SIGNATURE] = base64.b64encode(mac.digest()).decode()


def make_credentials(
    access_key: str, secret_key: str, security_token: str = ""
) -> Credentials | None:
    """Credentials of what a user gave; None where that is nothing."""
    if not access_key and not secret_key and not security_token:
        return None
    if not access_key or not secret_key:
        missing = "secret_key" if access_key else "access_key"
        raise ConfigError(f"access_key and secret_key go together: {missing} is missing")
    return Credentials(access_key, secret_key, security_token)
