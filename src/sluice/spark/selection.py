"""This module finds what a query reads: its queues, their partition numbers, and where it begins
and ends. Runs on the driver.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import TypeVar

from sluice.errors import BrokerRefused, ConfigError, TopicMissing
from sluice.spark import positions
from sluice.spark.cluster import Cluster, Queue, Span, name_of
from sluice.spark.options import EARLIEST, LATEST, Bound, PerPartition, ReadOptions
from sluice.spark.positions import Offsets

T = TypeVar("T")


class Selection:
    """The queues of a query as they are now, and what they hold."""

    def __init__(
        self, cluster: Cluster, options: ReadOptions, plain_brokers: Mapping[str, str] | None = None
    ) -> None:
        """`plain_brokers`: whose a topic's numbers without a broker are, where it has several and
        the option does not say it.
        """
        self._cluster = cluster
        self._options = options
        self._plain_brokers = plain_brokers or {}
        self.spans: dict[Queue, Span] = {}
        self.partitions: dict[Queue, int] = {}  # their numbers, as the rows say them
        self.brokers: dict[str, set[str]] = {}
        self.missing: set[str] = set()  # topics that were asked for and are not there
        self._missing_queues: list[str] = []  # and queues, of the topics that are there

    def look(self) -> Selection:
        """Ask for all queues and what they hold."""
        topics = self._options.topics
        if self._options.pattern:
            wanted = re.compile(self._options.pattern)
            # Found anywhere in a name, as Spark's Kafka source does since it asks an admin client.
            topics = tuple(name for name in self._cluster.topics() if wanted.search(name))
        for topic in topics:
            try:
                spans = self._again(partial(self._cluster.spans, topic))
            except TopicMissing:
                self.missing.add(topic)
                continue
            self.brokers[topic] = {queue.broker for queue in spans}
            for number, queue in enumerate(spans):
                self.partitions[queue] = number
            self.spans.update(self._assigned(topic, spans))
        return self

    def _again(self, ask: Callable[[], T]) -> T:
        """Ask as often as the options fetchOffset.* say."""
        tries_left = self._options.tries
        while True:
            try:
                return ask()
            except BrokerRefused:
                if not tries_left:
                    raise
                tries_left -= 1
                time.sleep(self._options.try_interval_ms / 1000)

    def _assigned(self, topic: str, spans: dict[Queue, Span]) -> dict[Queue, Span]:
        if self._options.assigned is None:
            return spans
        chosen = {}
        for key in self._options.assigned[topic]:
            queue = positions.queue_of(
                topic, key, self.brokers[topic], self._plain_broker(topic), "option assign"
            )
            if queue in spans:
                chosen[queue] = spans[queue]
            else:
                self._missing_queues.append(f"{topic} has no queue {key}")
        return chosen

    def require_all(self) -> Selection:
        """Refuse to go on where a topic or a queue that is named does not exist."""
        if self.missing:
            name = "assign" if self._options.assigned is not None else "subscribe"
            raise ConfigError(f"option {name}: topic {min(self.missing)} does not exist")
        if self._missing_queues:
            raise ConfigError(f"option assign: {self._missing_queues[0]}")
        return self

    # --------------------------------------------------------------------------------------- bounds

    def at(self, bound: Bound, which: str) -> Offsets:
        """Where this bound lies in every queue; `which` is "starting" or "ending"."""
        if bound.timestamp_ms is not None:
            stamp = bound.timestamp_ms
            name = f"{which}Timestamp"
            return {queue: self._at_time(queue, stamp, name) for queue in self.spans}
        if bound.timestamps_ms is not None:
            name = f"{which}OffsetsByTimestamp"
            stamps = self._given(bound.timestamps_ms, f"option {name}")
            return {queue: self._at_time(queue, stamps[queue], name) for queue in self.spans}
        if bound.offsets is not None:
            given = self._given(bound.offsets, f"option {which}Offsets")
            return {queue: self._special(span, given[queue]) for queue, span in self.spans.items()}
        return {queue: self._special(span, bound.all_at) for queue, span in self.spans.items()}

    @staticmethod
    def _special(span: Span, offset: int) -> int:
        if offset == EARLIEST:
            return span.low
        return span.high if offset == LATEST else offset

    def _given(self, value: PerPartition, what: str) -> Offsets:
        """Numbers that an option gives for every queue, no more and no less."""
        given = self._offsets(value, what)
        for queue in self.spans:
            if queue not in given:
                raise ConfigError(f"{what}: {name_of(queue)} is missing; all queues are needed")
        for queue in given:
            if queue not in self.spans:
                raise ConfigError(f"{what}: {name_of(queue)} is not read by this query")
        return given

    def _at_time(self, queue: Queue, when_ms: int, option: str) -> int:
        span = self.spans[queue]
        offset, _ = self._again(lambda: self._cluster.offset_at(queue, when_ms))
        if offset < span.high:
            return max(span.low, offset)
        if option.startswith("starting") and self._options.strategy == "error":
            raise ConfigError(
                f"option {option}: {name_of(queue)} has no message at or after {when_ms}; "
                "option startingOffsetsByTimestampStrategy=latest starts at its end instead"
            )
        return span.high

    def parse(self, value: Mapping[str, Mapping[str, int]]) -> Offsets:
        """Offsets of the checkpoint."""
        if not isinstance(value, Mapping):
            raise ConfigError(f"the checkpoint: {value!r} are no offsets of this source")
        return self._offsets(value, "the checkpoint")

    def _offsets(self, value: Mapping[str, Mapping[str, int]], what: str) -> Offsets:
        offsets: Offsets = {}
        for topic, own in value.items():
            plain = self._plain_broker(topic)
            offsets |= positions.from_json({topic: own}, self.brokers, plain, what)
        return offsets

    def _plain_broker(self, topic: str) -> str:
        return self._options.plain_broker or self._plain_brokers.get(topic, "")
