"""This module says what is measured of delayed messages. It is a part of `metrics.py`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from sluice.telemetry import Metric, Page

if TYPE_CHECKING:
    from sluice.broker.core import BrokerCore

WAITING: Final = Metric(
    "sluice_delayed_messages",
    "gauge",
    "Messages that wait for their time: timers, or of a delay level.",
    ("kind",),
    "rocketmq_timer_message_snapshot",
)
DELIVERED: Final = Metric(
    "sluice_delayed_delivered_total",
    "counter",
    "Delayed messages that were delivered.",
    (),
    "rocketmq_timer_dequeue_total",
)
LATE: Final = Metric(
    "sluice_delayed_late_seconds",
    "histogram",
    "How long after its time a delayed message could be read; much after a downtime.",
    (),
    "rocketmq_timer_dequeue_latency",
)
RECALLED: Final = Metric(
    "sluice_delayed_recalled_total", "counter", "Timed messages that producers took back."
)
DROPPED: Final = Metric(
    "sluice_delayed_dropped_total",
    "counter",
    "Delayed messages that were not delivered: their topic was deleted, or they are damaged.",
)
MOVED: Final = Metric(
    "sluice_delayed_moved_total",
    "counter",
    "Waiting messages that were written anew because retention takes the file they were in.",
)

METRICS: Final = (WAITING, DELIVERED, LATE, RECALLED, DROPPED, MOVED)


def add(core: BrokerCore, page: Page) -> None:
    """The numbers of one broker."""
    delays = core.delays
    page.add(WAITING, delays.waiting_timers, "timer")
    page.add(WAITING, delays.waiting_levels, "level")
    page.add(DELIVERED, delays.fired)
    page.add_durations(LATE, delays.lateness)
    page.add(RECALLED, delays.recalled)
    page.add(DROPPED, delays.dropped)
    page.add(MOVED, delays.rescue.moved)
