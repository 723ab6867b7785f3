"""This module says what is measured of transactional messages, and reads it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from sluice.telemetry import Metric, Page

if TYPE_CHECKING:
    from sluice.broker.core import BrokerCore

OPEN: Final = Metric(
    "sluice_transactions_open",
    "gauge",
    "Transactional messages that nobody has ended yet.",
    (),
    "rocketmq_half_messages",
)
UNASKED: Final = Metric(
    "sluice_transactions_without_producer",
    "gauge",
    "Those of them whose group has no connected producer to be asked.",
)
ENDED: Final = Metric(
    "sluice_transactions_ended_total",
    "counter",
    "Transactions that were committed, rolled back, or parked because nobody knew.",
    ("result",),
    "rocketmq_commit_messages_total",
)
QUESTIONS: Final = Metric(
    "sluice_transaction_questions_total",
    "counter",
    "Questions to producers about what became of a transaction.",
)

METRICS: Final = (OPEN, UNASKED, ENDED, QUESTIONS)


def add(core: BrokerCore, page: Page) -> None:
    """Put the numbers as they are now on a page."""
    transactions = core.transactions
    page.add(OPEN, transactions.table.open_count)
    page.add(UNASKED, transactions.waiting_count)
    page.add(ENDED, transactions.committed_count, "committed")
    page.add(ENDED, transactions.rolled_back_count, "rolled_back")
    page.add(ENDED, transactions.parked_count, "parked")
    page.add(QUESTIONS, transactions.asked_count)
