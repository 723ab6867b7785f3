"""This module keeps the key index at the log's heels without slowing appends.

Normally ("live") the keys of each appended entry are gathered in memory and written in batches by
the background. Where the index is behind the log (its files were deleted, the store comes from
elsewhere) it first catches up: the background walks the log in pieces, and appends are not gathered
until it is there.

The index is advice: it can be deleted at any time, a failure here never stops the log, and who
queries it compares the entries it names with the key.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Final

from sluice.errors import RecordDamaged, SluiceError, StoreCorrupt
from sluice.protocol import kafka_entries, kafka_keys, records
from sluice.storage.background import Background
from sluice.storage.commit_log import CommitLog
from sluice.storage.key_batches import KeyBatch, Noted
from sluice.storage.key_index import IndexMark, KeyIndex

# The more keys are written together, the nearer to each other they lie in the index's table.
_BATCH_MESSAGES: Final = 40_000
_CATCH_UP_ENTRIES: Final = 5_000
_LANE: Final = "disk"  # the same as checkpoints': the index has one user at a time

log_lines = logging.getLogger("sluice.storage")


class Indexing:
    """Feeds one key index from one log. Methods belong to the owner's thread."""

    def __init__(self, background: Background, index: KeyIndex | None, log: CommitLog) -> None:
        self._background = background
        self._index = index
        self._log = log
        self._batch = KeyBatch()
        self._position = 0  # in the log: everything below is gathered or written
        self._catching_up = False
        self._last_write_ms = 0
        self._lane_failed = False
        self.kafka_keys_too = False  # whether keys of Kafka's records are looked for
        self.live = False
        self.failure = "" if index is not None else "switched off (key_index)"

    def start(self, indexed_to: int) -> None:
        """Recovery says how far the index files reach."""
        self._position = max(indexed_to, self._log.start)
        self.live = self._position >= self._log.written and not self.failure

    def note(self, found: Sequence[Noted]) -> None:
        """Entries with keys were appended, in this order."""
        if not self.live or not found:
            return
        self._batch.add_found(found)
        if self._batch.message_count >= _BATCH_MESSAGES:
            self.hand_over()

    @property
    def reached(self) -> int:
        """Everything below is in the index once what was handed over is written."""
        if self.failure:
            return 0  # what is missing is found out by reading the log again
        return self._log.written if self.live else self._position

    def hand_over(self) -> None:
        """Let the background write what is gathered."""
        index = self._index
        if not self._batch.message_count or index is None or self.failure:
            return
        batch, self._batch = self._batch, KeyBatch()

        def work() -> None:
            # More work, and a checkpoint, may be in the lane before `_written` is told.
            if not self._lane_failed:
                self._lane_failed = True
                index.write(batch)
                self._lane_failed = False

        self._background.submit(_LANE, work, self._written)

    def _written(self, _: None, error: BaseException | None) -> None:
        if error is not None and not self.failure:
            self.failure = str(error)
            self.live = False
            log_lines.error(
                "the key index stopped: %s; queries by key find at most older messages until the "
                "next start, which makes it anew",
                error,
            )

    def tick(self, now_ms: int, interval_ms: int) -> None:
        """Write what waits long enough, or go on catching up."""
        if self.failure:
            return
        if not self.live:
            self._catch_up()
        elif now_ms - self._last_write_ms >= interval_ms:
            self._last_write_ms = now_ms
            self.hand_over()

    def _catch_up(self) -> None:
        index, log = self._index, self._log
        if self._catching_up or index is None:
            return
        self._position = max(self._position, log.start)
        if self._position >= log.written:
            self.live = True
            return
        at = self._position % log.segment_bytes
        base = self._position - at
        view = log.segments[base].file.view(at)
        stop = min(log.written - base, log.segment_bytes)
        self._catching_up = True

        def work() -> int:
            batch = KeyBatch()
            reached = gather(view, base, at, stop, batch, kafka_keys_too=self.kafka_keys_too)
            if batch.message_count:
                index.write(batch)
            return reached

        self._background.submit(_LANE, work, self._caught_up)

    def _caught_up(self, reached: int | None, error: BaseException | None) -> None:
        self._catching_up = False
        if reached is not None:
            self._position = reached
        self._written(None, error)

    def sync(self) -> list[IndexMark] | None:
        """Make the index durable and say what it holds; runs in the background's lane.

        None where the index has stopped: the next start makes it anew, checkpoints go on without.
        """
        if self._index is None:
            return []
        if not self.failure and not self._lane_failed:
            try:
                return self._index.sync()
            except (OSError, SluiceError) as error:
                self._written(None, error)
        return None

    def query(
        self,
        topic: bytes,
        key: bytes,
        begin_ms: int,
        end_ms: int,
        count_max: int,
        done: Callable[[list[int] | None, BaseException | None], None],
    ) -> None:
        """Positions that may hold the key, newest first."""
        index = self._index
        if index is None:
            done([], None)
            return
        self.hand_over()

        def work() -> list[int]:
            try:
                return index.query(topic, key, begin_ms, end_ms, count_max)
            except StoreCorrupt:
                self._lane_failed = True
                raise

        def answered(positions: list[int] | None, error: BaseException | None) -> None:
            if isinstance(error, StoreCorrupt):
                self._written(None, error)
            done(positions, error)

        self._background.submit(_LANE, work, answered)

    def delete_before(self, position: int) -> None:
        """Retention; runs in the background's lane."""
        if self._index is not None:
            self._index.delete_before(position)

    def close(self) -> None:
        self.failure = self.failure or "closed"
        if self._index is not None:
            self._index.close()


def gather(
    view: memoryview,
    base: int,
    at: int,
    stop: int,
    batch: KeyBatch,
    *,
    kafka_keys_too: bool = False,
) -> int:
    """Put the keys of the entries in view[at:stop] into a batch, a bounded number of them; returns
    the position after the last one. Damaged entries end the file for the index; reading them is an
    error anyway.
    """
    for _ in range(_CATCH_UP_ENTRIES):
        if at >= stop:
            break
        try:
            entry = records.summarize(view, at, base + at)
        except records.BadRecord:
            return base + len(view)
        if kafka_keys_too and kafka_entries.is_kafka(entry.sys_flag):
            keys = (b"", kafka_keys.keys_in(view[at : at + entry.size]), b"")
            batch.add_found([(entry.topic, keys, base + at, entry.store_ms)])
        elif indexed(entry.sys_flag):
            batch.add(entry.topic, entry.properties, base + at, entry.store_ms)
        at += entry.size
    return base + at


def indexed(sys_flag: int) -> bool:
    """Rolled back messages are not looked for."""
    return sys_flag & records.SYS_TX_MASK != records.SYS_TX_ROLLBACK


def entries_with_key(
    positions: Sequence[int],
    entry_at: Callable[[int], memoryview | None],
    topic: bytes,
    key: bytes,
) -> list[memoryview]:
    """The entries among those that the index named which really have the key.

    Damaged ones are left out with a line in the log, but never taken for "there is none".
    """
    entries: list[memoryview] = []
    damage: RecordDamaged | None = None
    for position in positions:
        try:
            entry = entry_at(position)
        except RecordDamaged as error:
            log_lines.error("a query by key leaves out a damaged entry: %s", error)
            damage = error
            continue
        if entry is not None and has_key(entry, topic, key):
            entries.append(entry)
    if damage is not None and not entries:
        raise damage
    return entries


def has_key(entry: memoryview, topic: bytes, key: bytes) -> bool:
    """Whether an entry that the index named really has the key."""
    summary = records.summarize(entry, 0, int.from_bytes(entry[28:36], "big"))
    if summary.topic != topic:
        return False
    if records.property_value(summary.properties, b"UNIQ_KEY") == key:
        return True
    keys = records.property_value(summary.properties, b"KEYS") or b""
    if key in keys.split(b" ") or kafka_keys.has_key(entry, summary.sys_flag, key):
        return True
    tag = records.property_value(summary.properties, b"TAGS")
    return tag is not None and key == b"T#" + tag
