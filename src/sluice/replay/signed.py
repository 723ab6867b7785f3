"""This module reads from clusters that want to know who asks: every request is signed.

The keys are those that all commands take from the environment; without them nothing is signed.
"""

from __future__ import annotations

import ssl
from collections.abc import Mapping
from typing import Any

from sluice.client.blocking import LinkPool
from sluice.client.core.signing import Credentials
from sluice.protocol.remoting import RemotingCommand
from sluice.spark.cluster import Cluster
from sluice.spark.options import Connection


class SignedPool(LinkPool):
    """Links over which requests go out with a signature."""

    def __init__(self, tls: ssl.SSLContext | None, credentials: Credentials) -> None:
        super().__init__(tls)
        self._credentials = credentials

    def request(
        self,
        address: str,
        code: int,
        ext: Mapping[str, str],
        body: Any = b"",
        timeout_seconds: float = 30.0,
    ) -> RemotingCommand:
        """One request, with who asks among its fields."""
        fields = dict(ext)
        whole = b"".join(body) if isinstance(body, tuple) else body  # signed as one
        self._credentials.sign(fields, whole)
        return super().request(address, code, fields, body, timeout_seconds)


class SignedCluster(Cluster):
    """The nameservers and brokers behind one set of addresses, asked with signatures."""

    def __init__(
        self,
        connection: Connection,
        patience_ms: int,
        tls: ssl.SSLContext | None,
        credentials: Credentials,
    ) -> None:
        super().__init__(connection, patience_ms)
        self._pool = SignedPool(tls, credentials)


def open_cluster(
    connection: Connection,
    patience_ms: int,
    tls: ssl.SSLContext | None,
    credentials: Credentials | None,
) -> Cluster:
    """A cluster to read from; signed where there are keys."""
    if credentials is None:
        return Cluster(connection, patience_ms)
    return SignedCluster(connection, patience_ms, tls, credentials)
