"""This module decides which filters of a query the source answers itself. Pure.

A filter is given back to Spark, which applies it to the rows, unless what is read fulfils it
exactly. Topics, partitions and offsets are exact. Tags are compared by the broker and again, by
their text, when rows are made. Times only narrow what is read, and so does a key, because a message
may have several.

Only with option pushFilters: Spark (4.2, 4.3) keeps what was planned for the last filters of a
DataFrame, and a second query of the same DataFrame may get the rows of the first one's filters.
tests/spark shows it. So whoever asks for this uses a DataFrame for one query.
"""

from __future__ import annotations

import calendar
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from pyspark.sql.datasource import (
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    IsNotNull,
    LessThan,
    LessThanOrEqual,
)

_NEVER_NULL = ("topic", "partition", "offset", "timestamp", "timestampType")
_COMPARISONS = (GreaterThan, GreaterThanOrEqual, LessThan, LessThanOrEqual)
_FAR = 1 << 62


@dataclass(slots=True)
class Pruning:
    """What of a topic is read at all."""

    topics: set[str] | None = None
    partitions: set[int] | None = None
    partition_low: int = 0
    partition_stop: int = _FAR
    offset_low: int = 0
    offset_stop: int = _FAR
    begin_ms: int | None = None
    end_ms: int | None = None  # the last millisecond that is wanted
    tags: set[str] | None = None
    key: str = ""

    def takes_topic(self, topic: str) -> bool:
        return self.topics is None or topic in self.topics

    def takes_partition(self, partition: int) -> bool:
        if self.partitions is not None and partition not in self.partitions:
            return False
        return self.partition_low <= partition < self.partition_stop

    # ------------------------------------------------------------------------------------- learning

    def push(self, filters: Iterable[Filter]) -> list[Filter]:
        """Take what can be taken; gives back what Spark has to apply itself."""
        return [each for each in filters if not self._take(each)]

    def _take(self, one: Filter) -> bool:
        if isinstance(one, IsNotNull):
            return len(one.attribute) == 1 and one.attribute[0] in _NEVER_NULL
        if not isinstance(one, (EqualTo, In, *_COMPARISONS)) or len(one.attribute) != 1:
            return False
        name = one.attribute[0]
        if name in ("topic", "tag") and isinstance(one, (EqualTo, In)):
            return self._take_text(name, _values(one))
        if name in ("partition", "offset"):
            return self._take_number(name, one)
        if name == "timestamp":
            self._take_time(one)
        if name == "key" and isinstance(one, EqualTo):
            self._take_key(one.value)
        return False

    def _take_text(self, name: str, values: list[Any]) -> bool:
        if not all(isinstance(value, str) for value in values):
            return False
        wanted = set(values)
        if name == "topic":
            self.topics = wanted if self.topics is None else self.topics & wanted
            return True
        # A tag that the broker's language cannot name is left to Spark, and so is none at all.
        if not wanted or any(not tag.strip() or tag != tag.strip() or "||" in tag or tag == "*"
                             for tag in wanted):  # fmt: skip
            return False
        self.tags = wanted if self.tags is None else self.tags & wanted
        return True

    def _take_number(self, name: str, one: Any) -> bool:
        values = _values(one)
        if not all(isinstance(v, int) and not isinstance(v, bool) for v in values):
            return False
        if isinstance(one, In) and name == "offset":
            if values:
                self.offset_low = max(self.offset_low, min(values))
                self.offset_stop = min(self.offset_stop, max(values) + 1)
            return False
        if isinstance(one, (EqualTo, In)) and name == "partition":
            wanted = set(values)
            self.partitions = wanted if self.partitions is None else self.partitions & wanted
            return True
        low, stop = _bounds(one, values[0])
        if name == "offset":
            self.offset_low = max(self.offset_low, low)
            self.offset_stop = min(self.offset_stop, stop)
        else:
            self.partition_low = max(self.partition_low, low)
            self.partition_stop = min(self.partition_stop, stop)
        return True

    def _take_time(self, one: Any) -> None:
        if isinstance(one, In) or not isinstance(one.value, datetime):
            return
        when_ms = _millis(one.value)
        if when_ms is None:
            return
        # One millisecond of slack on either side: Spark's times are finer.
        if isinstance(one, (EqualTo, GreaterThan, GreaterThanOrEqual)):
            self.begin_ms = when_ms if self.begin_ms is None else max(self.begin_ms, when_ms)
        if isinstance(one, (EqualTo, LessThan, LessThanOrEqual)):
            self.end_ms = when_ms if self.end_ms is None else min(self.end_ms, when_ms)

    def _take_key(self, value: Any) -> None:
        raw = bytes(value) if isinstance(value, (bytes, bytearray)) else b""
        try:
            text = raw.decode()
        except UnicodeDecodeError:
            return
        if text and not self.key and text.isprintable() and " " not in text and "," not in text:
            self.key = text


def _values(one: Any) -> list[Any]:
    return list(one.value) if isinstance(one, In) else [one.value]


def _bounds(one: Any, value: int) -> tuple[int, int]:
    if isinstance(one, EqualTo):
        return value, value + 1
    if isinstance(one, GreaterThan):
        return value + 1, _FAR
    if isinstance(one, GreaterThanOrEqual):
        return value, _FAR
    return (0, value) if isinstance(one, LessThan) else (0, value + 1)


def _millis(when: datetime) -> int | None:
    """The millisecond that a time lies in; None for one without a zone."""
    if when.tzinfo is None:
        return None
    return calendar.timegm(when.utctimetuple()) * 1000 + when.microsecond // 1000
