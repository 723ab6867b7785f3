"""This module says what is measured of messages that consumers failed with, and reads it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from sluice.telemetry import Metric, Page

if TYPE_CHECKING:
    from sluice.broker.core import BrokerCore

SENT_BACK: Final = Metric(
    "sluice_messages_sent_back_total",
    "counter",
    "Messages that consumers could not handle and that were stored for another try or as dead.",
)
SUPPRESSED: Final = Metric(
    "sluice_send_backs_suppressed_total",
    "counter",
    "The same again, after a restart or a lost answer: nothing was stored.",
)
DEAD: Final = Metric(
    "sluice_dead_letters_total",
    "counter",
    "Messages that became dead letters.",
    (),
    "rocketmq_send_to_dlq_messages_total",
)
RESENT: Final = Metric(
    "sluice_dead_letters_resent_total", "counter", "Dead letters that were sent again."
)
NOTES: Final = Metric(
    "sluice_send_back_notes",
    "gauge",
    "Ranges of offsets that groups sent back and have not committed yet.",
)


METRICS: Final = (SENT_BACK, SUPPRESSED, DEAD, RESENT, NOTES)


def add(core: BrokerCore, page: Page) -> None:
    """Put the numbers as they are now on a page."""
    page.add(SENT_BACK, core.retries.sent_back_count)
    page.add(SUPPRESSED, core.retries.suppressed_count)
    page.add(DEAD, core.retries.dead_count)
    page.add(RESENT, core.dead_letters.resent_count)
    page.add(NOTES, core.retry_notes.range_count)
