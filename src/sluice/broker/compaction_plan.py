"""This module decides whether a partition is to be compacted, and how much of it.

    start ......... clean .............. clean_end ........... upto ......... end
      keys are there    here they are       copied as they        read from the
      once already      made unique         lie                   queue itself

A partition is compacted when enough of it is new since the last time (min.cleanable.dirty.ratio),
or when a record has waited for it too long (max.compaction.lag.ms). Young records are left alone
(min.compaction.lag.ms), and so are undecided transactions and the newest entry: a reader that comes
to the end finds it. Where files of the log are about to go that have a part of it, all of the
partition is copied, young or not. The units of the queue tell all of it. May raise `ColdRead`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from sluice.broker.kafka_partitions import CONFIG_PREFIX
from sluice.broker.queue_units import Part, columns, parts_of, sizes, times_ms
from sluice.broker.topics import TopicSettings

if TYPE_CHECKING:
    from sluice.broker.core import BrokerCore
    from sluice.storage.queue_index import QueueIndex

_POLICY: Final = CONFIG_PREFIX + "cleanup.policy"
_LONG_MAX: Final = (1 << 63) - 1
_DAY_MS: Final = 86_400_000


class Policy(NamedTuple):
    """What a topic that is compacted asks for."""

    tombstone_ms: int = _DAY_MS
    lag_min_ms: int = 0
    lag_max_ms: int = _LONG_MAX
    dirty_ratio: float = 0.5

    @property
    def is_timeless(self) -> bool:
        """Whether only new records can make a compaction due, not the passing of time."""
        return not self.lag_min_ms and self.lag_max_ms == _LONG_MAX


class Plan(NamedTuple):
    """From where to where a partition is compacted."""

    start: int
    clean: int
    clean_end: int
    upto: int


def policy_of(settings: TopicSettings) -> Policy | None:
    """How a topic is compacted; None where it is not."""
    attributes = settings.attributes
    if "compact" not in attributes.get(_POLICY, ""):
        return None
    default = Policy()
    named = ("delete.retention.ms", "min.compaction.lag.ms", "max.compaction.lag.ms")
    try:
        tombstone_ms, lag_min_ms, lag_max_ms = (
            int(attributes.get(CONFIG_PREFIX + name, value))
            for name, value in zip(named, default[:3], strict=True)
        )
        ratio = float(attributes.get(CONFIG_PREFIX + "min.cleanable.dirty.ratio", 0.5))
    except ValueError:
        return default
    return Policy(tombstone_ms, lag_min_ms, lag_max_ms, ratio)


def plan(
    core: BrokerCore,
    name: tuple[str, int],
    queue: QueueIndex,
    policy: Policy,
    now_ms: int,
    rescue_below: int = 0,
) -> Plan | None:
    """What is to be done with a partition now; None: nothing.

    `rescue_below`: the log's files below this position are about to go.
    """
    store, start, older = core.store, queue.start_offset, queue.older
    high = store.max_offset(*name)
    stable = core.producers.stable_offsets(*name).stable(high)
    clean, upto = (start, start) if older is None else (older.clean, older.upto)
    clean, upto = max(clean, start), max(upto, start)
    parts = [part for part in parts_of(store, queue) if part.first < part.stop]
    if not parts:
        return None
    last = parts[-1]._replace(first=parts[-1].stop - 1)
    ((_, units),) = columns(store, last)
    clean_end = min(stable, int(units["offset"][0]))
    young_ms = now_ms - policy.lag_min_ms if policy.lag_min_ms else _LONG_MAX
    clean_end, total, oldest_ms = _reach(core, parts, clean, clean_end, young_ms)
    clean_end = max(clean, clean_end)
    clean_bytes, dirty_bytes = total
    is_due = dirty_bytes > 0 and (
        dirty_bytes > policy.dirty_ratio * (clean_bytes + dirty_bytes)
        or oldest_ms < now_ms - policy.lag_max_ms
    )
    if rescue_below:
        # All of it, not only what is about to go: so it is done once while the log's files live.
        reach = max(upto, stable)
        ((_, units),) = columns(store, parts[0]._replace(stop=parts[0].first + 1))
        is_kept = older is not None and parts[0].queue is older.queue
        if reach == upto and not (is_kept and int(units["position"][0]) < rescue_below):
            return None  # a transaction is open: nothing more can be copied now
        return Plan(start, clean, clean_end, max(reach, clean_end))
    return Plan(start, clean, clean_end, max(upto, clean_end)) if is_due else None


def _reach(
    core: BrokerCore, parts: list[Part], clean: int, clean_end: int, young_ms: int
) -> tuple[int, tuple[int, int], int]:
    """Up to where keys are made unique; the bytes below and above `clean` up to there; and the
    lowest time above it.
    """
    clean_bytes = dirty_bytes = 0
    oldest_ms = _LONG_MAX
    for part in parts:
        for _, units in columns(core.store, part):
            offsets, times = units["offset"], times_ms(units)
            young = np.flatnonzero((offsets >= clean) & (times > young_ms))
            if len(young):
                clean_end = min(clean_end, int(offsets[young[0]]))
            own = sizes(units)
            is_dirty = (offsets >= clean) & (offsets < clean_end)
            clean_bytes += int(own[offsets < clean].sum())
            dirty_bytes += int(own[is_dirty].sum())
            oldest_ms = min(oldest_ms, int(times[is_dirty].min(initial=_LONG_MAX)))
    return clean_end, (clean_bytes, dirty_bytes), oldest_ms


def lies_below(core: BrokerCore, queue: QueueIndex, position: int) -> bool:
    """Whether something that readers see of a partition lies below a position of the log."""
    for part in parts_of(core.store, queue):
        for _, units in columns(core.store, part._replace(stop=min(part.stop, part.first + 1))):
            if int(units["position"][0]) < position:
                return True
    return False
