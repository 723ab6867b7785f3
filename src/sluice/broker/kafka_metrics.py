"""This module says what is measured of Kafka's clients: groups, offsets, transactions; and reads
it. It is a part of `metrics.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

from sluice.telemetry import OTHER, Fold, Metric, Page

if TYPE_CHECKING:
    from sluice.broker.core import BrokerCore

GROUPS: Final = Metric("sluice_kafka_groups", "gauge", "Groups of Kafka's clients.", ("state",))
MEMBERS: Final = Metric(
    "sluice_kafka_group_members", "gauge", "Members of a group of Kafka's clients.", ("group",)
)
LAG: Final = Metric(
    "sluice_kafka_group_lag_messages",
    "gauge",
    "Records of partitions that a group of Kafka's clients has not committed yet, of those that "
    "it has committed anything of.",
    ("topic", "group"),
)
ROUNDS: Final = Metric(
    "sluice_kafka_rebalances_total", "counter", "Assignments that leaders of groups have made."
)
COMMITS: Final = Metric(
    "sluice_kafka_offset_commits_total", "counter", "Offsets that Kafka's clients have committed."
)
EXPIRED: Final = Metric(
    "sluice_kafka_offsets_expired_total",
    "counter",
    "Committed offsets that were forgotten because nobody used them for long.",
)
OPEN: Final = Metric(
    "sluice_kafka_transactions_open", "gauge", "Transactions of Kafka's producers that are open."
)
ENDED: Final = Metric(
    "sluice_kafka_transactions_ended_total",
    "counter",
    "Those that were committed or rolled back.",
    ("result",),
)
TIMED_OUT: Final = Metric(
    "sluice_kafka_transactions_timed_out_total",
    "counter",
    "Those of them that were rolled back because their time was over.",
)

PASSES: Final = Metric(
    "sluice_kafka_compaction_passes_total",
    "counter",
    "Partitions that were gone through because their topics are compacted.",
)
READ: Final = Metric(
    "sluice_kafka_compaction_read_bytes_total", "counter", "Bytes of entries that were read for it."
)
DROPPED: Final = Metric(
    "sluice_kafka_compaction_dropped_bytes_total",
    "counter",
    "Bytes of entries that were not copied, because newer records have their keys.",
)
AGE: Final = Metric(
    "sluice_kafka_compaction_age_seconds",
    "gauge",
    "Time since the last of those partitions was done, or since the start.",
)

METRICS: Final = (
    *(GROUPS, MEMBERS, LAG, ROUNDS, COMMITS, EXPIRED, OPEN, ENDED, TIMED_OUT),
    *(PASSES, READ, DROPPED, AGE),
)

Pair = tuple[str, str]  # (topic, group)


class KafkaMetrics:
    """The numbers of Kafka's clients at one broker."""

    def __init__(self, core: BrokerCore, names_max: int) -> None:
        self._core = core
        self._members: Fold[str] = Fold(names_max)
        self._lag: Fold[Pair] = Fold(names_max)

    def add(self, page: Page) -> None:
        core = self._core
        members: dict[str, int] = {}
        states: dict[str, int] = {}
        for group in core.kafka_groups.all():
            states[group.state.value] = states.get(group.state.value, 0) + 1
            if group.members:
                members[group.name] = len(group.members)
        for state, count in sorted(states.items()):
            page.add(GROUPS, count, state)
        for name, count in self._members.gauges(members).items():
            page.add(MEMBERS, count, name or OTHER)
        offsets, transactions = core.kafka_offsets, core.kafka_transactions
        page.add(ROUNDS, core.kafka_groups.rebalance_count)
        page.add(COMMITS, offsets.commit_count)
        page.add(EXPIRED, offsets.expired_count)
        page.add(OPEN, transactions.open_count)
        page.add(ENDED, transactions.committed_count, "committed")
        page.add(ENDED, transactions.aborted_count, "rolled_back")
        page.add(TIMED_OUT, transactions.timed_out_count)
        work = core.compaction.work
        page.add(PASSES, work.passes)
        page.add(READ, work.read_bytes)
        page.add(DROPPED, work.dropped_bytes)
        page.add(AGE, max(0, core.now_ms() - (work.last_ms or core.started_ms)) / 1000)

    def committed(self) -> list[tuple[str, str, int, int]]:
        """Topic, group, partition and offset of everything committed."""
        core = self._core
        return [
            (topic, group, partition, each.offset)
            for group in core.kafka_offsets.groups()
            for (topic, partition), each in core.kafka_offsets.of(group).items()
            if core.topics.get(topic) is not None
        ]

    def add_lags(
        self,
        page: Page,
        rows: list[tuple[str, str, int, int]],
        highs: Mapping[tuple[str, int], int],
    ) -> None:
        lags: dict[Pair, int] = {}
        for topic, group, partition, offset in rows:
            behind = max(0, highs[topic, partition] - offset)
            lags[topic, group] = lags.get((topic, group), 0) + behind
        for pair, count in self._lag.gauges(lags).items():
            page.add(LAG, count, *(pair or (OTHER, OTHER)))
