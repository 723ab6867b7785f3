"""This module says what a nameserver measures, and reads it off its tables when a page is made."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from sluice.telemetry import Metric, Page

if TYPE_CHECKING:
    from sluice.nameserver.server import Nameserver

CLUSTERS: Final = Metric("sluice_nameserver_clusters", "gauge", "Clusters that brokers named.")
BROKERS: Final = Metric("sluice_nameserver_brokers", "gauge", "Brokers that are registered.")
TOPICS: Final = Metric("sluice_nameserver_topics", "gauge", "Topics that have a route.")
ROUTES: Final = Metric(
    "sluice_nameserver_routes", "gauge", "Entries of the route table: a topic on a broker group."
)
CONNECTIONS: Final = Metric(
    "sluice_nameserver_connections", "gauge", "Connections to the nameserver now."
)
CONNECTIONS_REFUSED: Final = Metric(
    "sluice_nameserver_connections_refused_total",
    "counter",
    "Connections that were closed at once, by the limit that they met.",
    ("cause",),
)

METRICS: Final = (CLUSTERS, BROKERS, TOPICS, ROUTES, CONNECTIONS, CONNECTIONS_REFUSED)


class NameserverMetrics:
    """The numbers of one nameserver that runs."""

    def __init__(self, nameserver: Nameserver) -> None:
        self._nameserver = nameserver

    async def collect(self, page: Page) -> None:
        sizes = self._nameserver.table.sizes()
        page.add(CLUSTERS, sizes.clusters)
        page.add(BROKERS, sizes.brokers)
        page.add(TOPICS, sizes.topics)
        page.add(ROUTES, sizes.routes)
        listener = self._nameserver.listener
        if listener is not None:
            page.add(CONNECTIONS, len(listener.connections))
            for cause, count in sorted(listener.refused.items()):
                page.add(CONNECTIONS_REFUSED, count, cause)
