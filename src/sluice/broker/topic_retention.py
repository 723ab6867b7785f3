"""This module lets topics forget sooner than the log does: by age, by size, and where somebody
asks for it.

All topics share one log, whose files go when they are old enough for all. A topic that has a limit
of its own (Kafka's retention.ms and retention.bytes) begins later than the log: nobody sees what is
below its beginning, through neither door, and the bytes go with the log's files. Where partitions
begin is kept in the store's tables, before anybody sees it, and holds after a start too.

    retention.ms      a batch goes when its newest record is older; those behind it are not looked
                      at before it has gone. Messages count by the time they were stored at
    retention.bytes   for each partition: its oldest entries go while the rest has as many bytes
    -1, or not set    only the log's own limits hold

Nothing goes that a transaction has not decided. A topic may ask for less than the log keeps, never
for more. Methods belong to the store's owner.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from sluice.broker.kafka_partitions import CONFIG_PREFIX, number_of
from sluice.broker.queue_units import (
    UNITS_AT_ONCE,
    Columns,
    columns,
    ends,
    parts_of,
    sizes,
    times_ms,
)
from sluice.broker.topics import TopicSettings
from sluice.errors import SluiceError
from sluice.storage.state import KAFKA_START_TABLE, Change

if TYPE_CHECKING:
    from sluice.broker.core import BrokerCore
    from sluice.storage.queue_index import QueueIndex

Done = Callable[[SluiceError | None], None]
QueueName = tuple[str, int]
_RETENTION_MS: Final = CONFIG_PREFIX + "retention.ms"
_RETENTION_BYTES: Final = CONFIG_PREFIX + "retention.bytes"
_POLICY: Final = CONFIG_PREFIX + "cleanup.policy"
_QUEUES_A_TICK: Final = 100
_ROWS_AT_ONCE: Final = 1000
log_lines = logging.getLogger("sluice.broker")


class Limits(NamedTuple):
    """What a topic keeps of each partition; -1: as long as the log does."""

    age_ms: int = -1
    byte_count: int = -1


def limits_of(settings: TopicSettings) -> Limits:
    """The limits that a topic has of its own."""
    attributes = settings.attributes
    if "delete" not in attributes.get(_POLICY, "delete"):
        return Limits()
    return Limits(_limit(attributes.get(_RETENTION_MS)), _limit(attributes.get(_RETENTION_BYTES)))


def _limit(text: str | None) -> int:
    """What is no number limits nothing."""
    number = number_of(text or "")
    return -1 if number is None else number


def _behind(units: Columns, count: int, gone: int) -> int:
    """The offset behind the first `count` batches; `gone`, where there is none of them.

    It is not that of the batch that stays: who reads on where compaction left a gap is not late.
    """
    return int(ends(units[count - 1 : count])[0]) if count else gone


@dataclass(slots=True)
class _Counted:
    """The bytes of a queue's units up to `upto`, so that only new ones have to be counted.

    Marks say how many bytes lie before a unit: what is gone need not be there to be subtracted.
    """

    queue: QueueIndex
    upto: int
    byte_count: int = 0
    marks: list[tuple[int, int]] = field(default_factory=list)


class TopicRetention:
    """Where the queues of one broker begin, if not where the log does."""

    def __init__(self, core: BrokerCore) -> None:
        self._core = core
        self._looked_ms = core.now_ms()
        self._left: list[tuple[QueueName, Limits]] = []  # queues that are still to be looked at
        self._open_count = 0  # queues whose units are on their way from the disk
        self._moves: dict[QueueName, int] = {}
        self._counted: dict[QueueName, _Counted] = {}
        self._is_noting = False

    # ------------------------------------------------------------------------------- start and time

    def start(self) -> None:
        """Queues begin where they began before."""
        for key, offset in self._core.store.table(KAFKA_START_TABLE).items():
            topic, _, queue_id = key.rpartition("@")
            self._begin_at((topic, int(queue_id)), int(offset))

    def tick(self, now_ms: int) -> None:
        """Look at topics with limits of their own, some queues at a time."""
        is_busy = self._left or self._open_count or self._is_noting
        interval_ms = self._core.config.topic_retention_interval_ms
        if not is_busy and now_ms - self._looked_ms >= interval_ms:
            self._looked_ms = now_ms
            self._left = self._limited()
        if not self._left or self._core.store.refusal is not None:
            return
        some, self._left = self._left[:_QUEUES_A_TICK], self._left[_QUEUES_A_TICK:]
        self._open_count += len(some)
        for name, limits in some:
            self._look(name, limits, now_ms)

    def _limited(self) -> list[tuple[QueueName, Limits]]:
        """All queues of topics that have a limit of their own."""
        found: list[tuple[QueueName, Limits]] = []
        for topic in self._core.topics.names():
            settings = self._core.topics.get(topic)
            limits = Limits() if settings is None else limits_of(settings)
            if settings is not None and limits != Limits():
                count = max(settings.read_queues, settings.write_queues)
                found += [((topic, queue_id), limits) for queue_id in range(count)]
        limited = {name for name, _ in found}
        self._counted = {k: each for k, each in self._counted.items() if k in limited}
        return found

    def _look(self, name: QueueName, limits: Limits, now_ms: int) -> None:
        store = self._core.store
        queue = store.queues.get(name)

        def looked(offset: int | None, error: BaseException | None) -> None:
            self._open_count -= 1
            if offset is None:
                log_lines.error("what is old in %s cannot be told now: %s", name, error)
            elif queue is not None and offset > queue.start_offset:
                self._moves[name] = offset
            if not self._left and not self._open_count and self._moves:
                self._note_moves()

        if queue is None:
            looked(0, None)
        else:
            store.call(lambda: self._first_kept(name, queue, limits, now_ms), looked)

    def _note_moves(self) -> None:
        moves, self._moves = list(self._moves.items()), {}
        self._is_noting = True
        left = len(range(0, len(moves), _ROWS_AT_ONCE))

        def noted(error: SluiceError | None) -> None:
            nonlocal left
            left -= 1
            self._is_noting = left > 0
            if error is not None:
                log_lines.error("where topics begin could not be noted: %s", error)

        for at in range(0, len(moves), _ROWS_AT_ONCE):
            self.begin(moves[at : at + _ROWS_AT_ONCE], noted)

    # ------------------------------------------------------------------------------------ beginning

    def begin(self, starts: Sequence[tuple[QueueName, int]], done: Done) -> None:
        """Queues are to begin at these offsets: noted first, then seen."""

        def noted(error: SluiceError | None) -> None:
            if error is None:
                for name, offset in starts:
                    self._begin_at(name, offset)
            done(error)

        changes: list[Change] = [
            (KAFKA_START_TABLE, f"{topic}@{queue_id}", offset)
            for (topic, queue_id), offset in starts
        ]
        try:
            self._core.store.change(changes, noted)
        except SluiceError as error:
            done(error)
            return
        self._core.ask_turn()

    def _begin_at(self, name: QueueName, offset: int) -> None:
        store = self._core.store
        queue = store.queues.get(name)
        if queue is None or offset <= queue.start_offset:
            return
        offset = min(offset, queue.end_offset)
        queue.begin_at(queue.seek(offset, store.queue_files, wait=True), offset)

    # -------------------------------------------------------------------------------------- judging

    def _first_kept(self, name: QueueName, queue: QueueIndex, limits: Limits, now_ms: int) -> int:
        """The offset that a queue is to begin at. May raise `ColdRead`."""
        store = self._core.store
        stop = store.max_offset(*name)
        if queue.kind == "b":
            stop = self._core.producers.stable_offsets(*name).stable(stop)
        offset = queue.start_offset
        if limits.age_ms >= 0:
            offset = max(offset, self._by_age(name, queue, now_ms - limits.age_ms, stop))
        if limits.byte_count >= 0:
            offset = max(offset, self._by_size(name, queue, limits.byte_count, stop))
        return min(offset, stop)

    def _by_age(self, name: QueueName, queue: QueueIndex, oldest_ms: int, stop: int) -> int:
        store = self._core.store
        if queue.kind != "b":
            return store.offset_for_time(*name, oldest_ms)
        gone = queue.start_offset
        for part in parts_of(store, queue):
            for _, units in columns(store, part):
                stays = (times_ms(units) >= oldest_ms) | (ends(units) > stop)
                if stays.any():
                    return _behind(units, int(np.argmax(stays)), gone)
                gone = _behind(units, len(units), gone)
        return stop

    def _by_size(self, name: QueueName, queue: QueueIndex, bytes_max: int, stop: int) -> int:
        store = self._core.store
        parts = parts_of(store, queue)
        excess = self._bytes(name, queue) - bytes_max
        gone = queue.start_offset
        for part in parts if excess > 0 else ():
            for first, units in columns(store, part):
                total = np.cumsum(sizes(units))
                index = int(np.searchsorted(total, excess, "right"))
                if index < len(units):
                    batches = queue.kind == "b"
                    return _behind(units, index, gone) if batches else first + index
                gone = _behind(units, len(units), gone)
                excess -= int(total[-1])
        return queue.start_offset if excess < 0 else stop

    def _bytes(self, name: QueueName, queue: QueueIndex) -> int:
        """How many bytes a queue has in the log."""
        store = self._core.store
        parts = parts_of(store, queue)
        if len(parts) > 1:  # it was compacted, so there is not much of it
            return sum(int(sizes(u).sum()) for part in parts for _, u in columns(store, part))
        (part,) = parts
        counted = self._counted.get(name)
        if counted is None or counted.queue is not queue or counted.upto < part.first:
            counted = self._counted[name] = _Counted(queue, part.first)
        for first, units in columns(store, part._replace(first=counted.upto)):
            if not counted.marks or first - counted.marks[-1][0] >= UNITS_AT_ONCE:
                counted.marks.append((first, counted.byte_count))
            counted.byte_count += int(sizes(units).sum())
            counted.upto = first + len(units)
        marks = counted.marks = [mark for mark in counted.marks if mark[0] >= part.first]
        near, before = marks[0] if marks else (counted.upto, counted.byte_count)
        uncounted = part._replace(stop=near)
        return (
            counted.byte_count
            - before
            + sum(int(sizes(units).sum()) for _, units in columns(store, uncounted))
        )
