"""This module says what is measured of pop consumption. It is a part of `metrics.py`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from sluice.telemetry import OTHER, Fold, Metric, Page

if TYPE_CHECKING:
    from sluice.broker.core import BrokerCore

POPPED: Final = Metric("sluice_popped_messages_total", "counter", "Messages that were popped.")
ACKNOWLEDGED: Final = Metric(
    "sluice_pop_acknowledged_messages_total", "counter", "Popped messages that were acknowledged."
)
CHANGED: Final = Metric(
    "sluice_pop_changed_messages_total",
    "counter",
    "Popped messages whose invisible time a consumer changed, as it does with those that failed.",
)
REVIVED: Final = Metric(
    "sluice_pop_revived_messages_total",
    "counter",
    "Popped messages that nobody acknowledged in time: they come again, or are gone, or dead.",
    ("result",),
    "rocketmq_pop_revive_retry_message_total",
)
IN_FLIGHT: Final = Metric(
    "sluice_pop_inflight_messages",
    "gauge",
    "Messages that consumers have popped and not acknowledged.",
    ("topic", "group"),
    "rocketmq_consumer_inflight_messages",
)
IN_FLIGHT_MAX: Final = Metric(
    "sluice_pop_inflight_messages_max",
    "gauge",
    "How many there may be in all (pop_inflight_max).",
)

METRICS: Final = (POPPED, ACKNOWLEDGED, CHANGED, REVIVED, IN_FLIGHT, IN_FLIGHT_MAX)


class PopMetrics:
    """The numbers of one broker."""

    def __init__(self, core: BrokerCore, names_max: int) -> None:
        self._core = core
        self._in_flight: Fold[tuple[str, str]] = Fold(names_max)

    def add(self, page: Page) -> None:
        pops = self._core.pops
        page.add(POPPED, pops.popped)
        page.add(ACKNOWLEDGED, pops.acknowledged)
        page.add(CHANGED, pops.changed)
        page.add(REVIVED, pops.reviving.revived, "retry")
        page.add(REVIVED, pops.reviving.died, "dead")
        page.add(REVIVED, pops.reviving.lost, "gone")
        for pair, count in self._in_flight.gauges(pops.in_flight_by_pair()).items():
            page.add(IN_FLIGHT, count, *(pair or (OTHER, OTHER)))
        page.add(IN_FLIGHT_MAX, self._core.config.pop_inflight_max)
