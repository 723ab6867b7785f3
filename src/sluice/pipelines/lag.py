"""This module asks brokers how far the groups of a pipeline are behind, in a thread of its own.

It is what `sluice admin consumerProgress` and `sluice top` show. A broker that does not answer
makes the lag unknown and disturbs nothing else.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Final

from sluice.errors import SluiceError
from sluice.spark.cluster import Cluster
from sluice.spark.options import Connection, read_options

_INTERVAL_SECONDS: Final = 1.0
_PATIENCE_MS: Final = 1000
_REQUEST_MS: Final = "3000"


def connection_of(options: Mapping[str, str]) -> Connection:
    """The address of a cluster, out of options of the data source."""
    given = {"sluice.request.timeout.ms": _REQUEST_MS, **options, "subscribe": "any"}
    return read_options(given).connection


def require_cluster(options: Mapping[str, str]) -> None:
    """Raise where no nameserver answers: before Spark is started, which takes longer."""
    cluster = Cluster(connection_of(options), _PATIENCE_MS)
    try:
        cluster.topics()
    finally:
        cluster.close()


class LagWatch:
    """The lag of some groups, looked up from time to time; use as a context manager."""

    def __init__(self, options: Mapping[str, str], groups: Mapping[str, tuple[str, ...]]) -> None:
        self._options = options
        self._groups = dict(groups)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look_on, name="lag", daemon=True)
        self.lag: int | None = None

    def __enter__(self) -> LagWatch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()

    def look(self, cluster: Cluster) -> int | None:
        """All that the groups have not handled yet; None where a broker does not tell."""
        lag = 0
        try:
            for group, topics in self._groups.items():
                for topic in topics:
                    spans = cluster.spans(topic)
                    done = cluster.committed(group, list(spans))
                    lag += sum(
                        max(0, span.high - done.get(queue, span.low))
                        for queue, span in spans.items()
                    )
        except SluiceError:
            cluster.forget_routes()
            return None
        return lag

    def last(self) -> int | None:
        """The lag now; for the closing line."""
        cluster = Cluster(connection_of(self._options), _PATIENCE_MS)
        try:
            return self.look(cluster)
        finally:
            cluster.close()

    def _look_on(self) -> None:
        cluster = Cluster(connection_of(self._options), _PATIENCE_MS)
        try:
            while not self._over.is_set():
                self.lag = self.look(cluster)
                self._over.wait(_INTERVAL_SECONDS)
        finally:
            cluster.close()
