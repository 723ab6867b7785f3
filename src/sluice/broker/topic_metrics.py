"""This module says what is measured of topics that ask for more than to be stored: duplicates,
messages whose life ended, topics in memory.

It is a part of `metrics.py` and reads what the services have counted.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

from sluice.telemetry import OTHER, Fold, Metric, Page

if TYPE_CHECKING:
    from sluice.broker.core import BrokerCore

_TOPIC: Final = ("topic",)

DUPLICATES: Final = Metric(
    "sluice_duplicates_suppressed_total",
    "counter",
    "Messages that were not stored because one with the same key was there (dedup.window.ms).",
    _TOPIC,
)
KEYS: Final = Metric("sluice_dedup_keys", "gauge", "Keys that are remembered for that.")
KEYS_MAX: Final = Metric(
    "sluice_dedup_keys_max", "gauge", "Above so many, new keys are refused (dedup_keys_max)."
)
EXPIRED: Final = Metric(
    "sluice_expired_messages_total",
    "counter",
    "Messages that reads of any group passed over because their time to live was over.",
    _TOPIC,
)
MEMORY: Final = Metric(
    "sluice_memory_topics_bytes", "gauge", "Bytes that topics with storage=memory hold."
)
MEMORY_MAX: Final = Metric(
    "sluice_memory_topics_bytes_max",
    "gauge",
    "How many they may hold together (memory_topics_bytes_max).",
)
DROPPED: Final = Metric(
    "sluice_memory_topics_dropped_messages_total",
    "counter",
    "Messages in memory that had to go for newer ones.",
    _TOPIC,
)
NO_ROOM: Final = Metric(
    "sluice_memory_topics_refused_messages_total",
    "counter",
    "Sends that were refused because a topic in memory was full.",
    _TOPIC,
)

METRICS: Final = (DUPLICATES, KEYS, KEYS_MAX, EXPIRED, MEMORY, MEMORY_MAX, DROPPED, NO_ROOM)


class TopicMetrics:
    """The numbers of one broker's topics."""

    def __init__(self, core: BrokerCore, names_max: int) -> None:
        self._core = core
        self._folds: dict[Metric, Fold[str]] = {
            metric: Fold(names_max) for metric in METRICS if metric.labels
        }

    def add(self, page: Page) -> None:
        core, memory = self._core, self._core.store.memory
        self._add_by_topic(page, DUPLICATES, core.dedup.suppressed)
        page.add(KEYS, core.dedup.key_count)
        page.add(KEYS_MAX, core.config.dedup_keys_max)
        self._add_by_topic(page, EXPIRED, core.expiry.passed_over)
        page.add(MEMORY, memory.byte_count)
        page.add(MEMORY_MAX, memory.bytes_max)
        self._add_by_topic(page, DROPPED, memory.dropped)
        self._add_by_topic(page, NO_ROOM, memory.refused)

    def _add_by_topic(self, page: Page, metric: Metric, counts: Mapping[str, int]) -> None:
        rows = {topic: (count,) for topic, count in counts.items()}
        for name, (count,) in self._folds[metric].counters(rows).items():
            page.add(metric, count, name or OTHER)
