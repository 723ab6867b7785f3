"""This module remembers what was sent back and what was sent once more, so that it is done once.

A consumer that stops before its offset is committed gets the same messages again and fails with
them again; a client that did not hear our answer asks again. What was stored for an entry once is
not stored a second time. An offset is noted until its group has committed a later one and that is
durable: then nobody is given the entry again. Dead letters that were sent once more are noted until
retention takes them.

The notes are made from the log. Every copy names the entry it was made from (`storage/origins.py`);
the notes up to a position are written to two tables from time to time, and a start walks the log
from there. An administrator's rewind forgets the notes behind it: the messages are to be tried
again then.

The notes have a bound. Where it is reached more is refused, not forgotten: the consumer keeps the
message and asks again.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final

from sluice.broker.offset_ranges import OffsetRanges
from sluice.broker.topics import (
    CLOSED_TOPICS,
    DEAD_PREFIX,
    RETRY_PREFIX,
    SCHEDULE_TOPIC,
    TIMER_TOPIC,
)
from sluice.errors import Busy, RecordDamaged, SluiceError
from sluice.protocol import kafka_entries, records
from sluice.storage.origins import Made, made_since
from sluice.storage.state import DEAD_TABLE, DELETED_TABLE, RETRY_TABLE
from sluice.storage.store import OFFSET_TABLE, Change, ColdRead

if TYPE_CHECKING:
    from sluice.broker.core import BrokerCore

QUEUE_RANGES_MAX: Final = 100_000
RANGES_MAX: Final = 500_000
DEAD_RANGES_MAX: Final = 20_000
_LOOK_MS: Final = 1_000
# A late commit of a queue's former owner may set its offset back a little: notes are kept so long
# after they were passed, while they are few.
_GRACE_MS: Final = 60_000
_GRACE_RANGES_MAX: Final = 1_000
_WALK_BYTES: Final = 16 << 20  # a start walks about so much of the log
_IDLE_WALK_BYTES: Final = 256 << 20  # the same where nothing was noted
_CHANGE_BYTES: Final = 256 << 10
_AT: Final = "at"  # no name of a queue: it has no separator
_SEPARATOR: Final = "@"  # neither a topic's nor a group's name has one

QueueOf = tuple[str, str, int]  # group, topic, queue
DeadQueue = tuple[str, int]  # group, queue of its dead letters

log_lines = logging.getLogger("sluice.broker")


class RetryNotes:
    """The notes of one broker."""

    def __init__(self, core: BrokerCore) -> None:
        self._core = core
        self._sent_back: dict[QueueOf, OffsetRanges] = {}
        self._resent: dict[DeadQueue, OffsetRanges] = {}
        # What was committed when this was last looked at for good, and when that was.
        self._passed: dict[QueueOf, tuple[int, int]] = {}
        self._unsaved: set[QueueOf] = set()
        self._unsaved_dead: set[DeadQueue] = set()
        self._at = 0  # the tables hold everything that was made below it
        self._looked_ms = 0
        self._saving = False
        self._save_now = False
        self.range_count = 0
        core.offsets.on_reset.append(self.rewound)

    # -------------------------------------------------------------------------------------- looking

    def is_sent_back(self, group: str, entry: records.Entry) -> bool:
        ranges = self._sent_back.get((group, entry.topic, entry.queue_id))
        return ranges is not None and entry.queue_offset in ranges

    def is_resent(self, group: str, queue_id: int, offset: int) -> bool:
        ranges = self._resent.get((group, queue_id))
        return ranges is not None and offset in ranges

    def is_passed(self, group: str, topic: str, queue_id: int, offset: int) -> bool:
        """Whether a group has surely gone on behind an entry: durably, so also after a crash."""
        return offset < self._committed(group, topic, queue_id)

    def _committed(self, group: str, topic: str, queue_id: int) -> int:
        """The offset that a group has committed durably, 0 where it has none."""
        row = self._core.store.table(OFFSET_TABLE).get(f"{topic}{_SEPARATOR}{group}", {})
        return int(row.get(str(queue_id), 0))

    def require_room(self, group: str, entry: records.Entry) -> None:
        """Refuse to note one more where a bound is reached."""
        key = (group, entry.topic, entry.queue_id)
        ranges = self._sent_back.get(key, _NONE)
        if not ranges.grows(entry.queue_offset):
            return
        if len(ranges) >= QUEUE_RANGES_MAX:
            self._drop_below(key, self._committed(*key))
        if len(ranges) >= QUEUE_RANGES_MAX or self.range_count >= RANGES_MAX:
            raise Busy(
                f"group {group} sent back {ranges.count()} messages of {entry.topic}/"
                f"{entry.queue_id} and commits no offset behind them; try again when it has"
            )

    # --------------------------------------------------------------------------------------- noting

    def note(self, group: str, entry: records.Entry) -> None:
        """A copy of an entry is on its way into the log."""
        key = (group, entry.topic, entry.queue_id)
        self._add(key, entry.queue_offset)
        self._unsaved.add(key)

    def _add(self, key: QueueOf, offset: int) -> None:
        ranges = self._sent_back.setdefault(key, OffsetRanges())
        before = len(ranges)
        ranges.add(offset)
        self.range_count += len(ranges) - before

    def undo(self, group: str, entry: records.Entry) -> None:
        """It could not be written."""
        key = (group, entry.topic, entry.queue_id)
        ranges = self._sent_back.get(key)
        if ranges is not None:
            self.range_count -= len(ranges)
            ranges.discard(entry.queue_offset)
            self.range_count += len(ranges)
            self._unsaved.add(key)

    def note_resent(self, group: str, queue_id: int, offset: int) -> None:
        """A dead letter is on its way to those who are to get it again."""
        ranges = self._resent.setdefault((group, queue_id), OffsetRanges())
        if len(ranges) >= DEAD_RANGES_MAX and ranges.grows(offset):
            raise Busy(
                f"{len(ranges)} dead letters of group {group} that are no neighbours were sent "
                "again; send the ones between them too, or wait until retention took the oldest"
            )
        ranges.add(offset)
        self._unsaved_dead.add((group, queue_id))

    def undo_resent(self, group: str, queue_id: int, offset: int) -> None:
        ranges = self._resent.get((group, queue_id))
        if ranges is not None:
            ranges.discard(offset)
            self._unsaved_dead.add((group, queue_id))

    def rewound(self, group: str, topic: str, queue_id: int, offset: int) -> None:
        """The group is to get everything from an offset on again, and may fail with it again."""
        key = (group, topic, queue_id)
        ranges = self._sent_back.get(key)
        if ranges is None:
            return
        before = len(ranges)
        if ranges.drop_from(offset):
            self.range_count += len(ranges) - before
            self._unsaved.add(key)
            self._save_now = True  # a walk from before would note them again

    def forget_topic(self, topic: str) -> None:
        """A topic is being deleted: one of its name has other messages at the same offsets."""
        # With a retry topic go the copies that the notes of its group speak of.
        group = topic.removeprefix(RETRY_PREFIX) if topic.startswith(RETRY_PREFIX) else None
        for key in [key for key in self._sent_back if key[1] == topic or key[0] == group]:
            self._drop_below(key, 1 << 62)
        for dead in [dead for dead in self._resent if f"{DEAD_PREFIX}{dead[0]}" == topic]:
            del self._resent[dead]
            self._unsaved_dead.add(dead)
        self._save_forgotten()

    def forget_group(self, group: str) -> None:
        """A group is being deleted: one of its name reads anew, and may fail with all of it."""
        for key in [key for key in self._sent_back if key[0] == group]:
            self._drop_below(key, 1 << 62)
        self._save_forgotten()

    def _save_forgotten(self) -> None:
        if self._unsaved or self._unsaved_dead:
            self._save_now = True
            self._save()

    # --------------------------------------------------------------------------------- start, ticks

    def start(self) -> None:
        store = self._core.store
        at = store.table(RETRY_TABLE).get(_AT)
        if at is None:
            # Nothing was made yet: all entries that have an origin here are somebody else's.
            self._at = store.log.end
            self._save()
            return
        self._at = at
        deleted = store.table(DELETED_TABLE)
        for text, pairs in store.table(RETRY_TABLE).items():
            topic, _, rest = text.partition(_SEPARATOR)
            if text != _AT and deleted.get(topic, 0) <= at:
                group, _, queue_id = rest.partition(_SEPARATOR)
                ranges = self._sent_back[group, topic, int(queue_id)] = OffsetRanges(pairs)
                self.range_count += len(ranges)
        for text, pairs in store.table(DEAD_TABLE).items():
            group, _, queue_id = text.partition(_SEPARATOR)
            if deleted.get(f"{DEAD_PREFIX}{group}", 0) <= at:
                self._resent[group, int(queue_id)] = OffsetRanges(pairs)
        for made in made_since(store.log, at):
            self._learn(made)

    def _learn(self, made: Made) -> None:
        """An entry was made since the tables were written; it may be one of ours."""
        entry, origin = self._entry(made.position), self._entry(made.origin)
        if entry is None or origin is None or origin.topic in CLOSED_TOPICS:
            return  # a timer that fired, a half message that was committed
        if made.origin < self._core.store.table(DELETED_TABLE).get(origin.topic, 0):
            return  # of a topic that was deleted since
        if kafka_entries.is_kafka(origin.sys_flag):
            origin = self._of_batch(origin, entry)
        topic = entry.topic
        if topic in (SCHEDULE_TOPIC, TIMER_TOPIC):
            real = records.property_value(entry.properties, b"REAL_TOPIC") or b""
            topic = real.decode("utf-8", "replace")
        if origin.topic.startswith(DEAD_PREFIX) and entry.reconsume_times == 0:
            group = origin.topic.removeprefix(DEAD_PREFIX)
            dead = (group, origin.queue_id)
            self._resent.setdefault(dead, OffsetRanges()).add(origin.queue_offset)
            self._unsaved_dead.add(dead)
            return
        prefix = next((p for p in (RETRY_PREFIX, DEAD_PREFIX) if topic.startswith(p)), None)
        if prefix is None:
            return
        group = topic.removeprefix(prefix)
        place = (origin.topic, origin.queue_id, origin.queue_offset)
        if self._core.groups.get(group) is not None and not self.is_passed(group, *place):
            self.note(group, origin)

    def _of_batch(self, batch: records.Entry, copy: records.Entry) -> records.Entry:
        """The message of a batch that a copy was made from: both have the same id."""
        unique = records.property_value(copy.properties, b"UNIQ_KEY") or b""
        found = self._core.unfolding.message_of(batch, unique.decode("utf-8", "replace"))
        return batch if found is None else records.decode(found)

    def _entry(self, position: int) -> records.Entry | None:
        store = self._core.store
        while True:
            try:
                view = store.entry_at(position)
            except ColdRead as cold:
                cold.work()
            except RecordDamaged as error:
                log_lines.warning("retries: an entry cannot be read: %s", error)
                return None
            else:
                return None if view is None else records.decode(view, 0, position)

    def tick(self, now_ms: int) -> None:
        if self._save_now:
            self._save()
        if now_ms - self._looked_ms < _LOOK_MS:
            return
        self._looked_ms = now_ms
        self._forget(now_ms)
        busy = self._unsaved or self._unsaved_dead
        grown = self._core.store.log.end - self._at
        if grown > (_WALK_BYTES if busy else _IDLE_WALK_BYTES):
            self._save()

    def _drop_below(self, key: QueueOf, offset: int) -> None:
        ranges = self._sent_back[key]
        before = len(ranges)
        if ranges.drop_below(offset):
            self._unsaved.add(key)
            self.range_count += len(ranges) - before
        if not ranges:
            del self._sent_back[key]
            self._passed.pop(key, None)

    def _forget(self, now_ms: int) -> None:
        """What nobody can ask for any more: passed, deleted, or taken by retention."""
        core = self._core
        for key in list(self._sent_back):
            group, topic, _ = key
            if core.topics.get(topic) is None or core.groups.get(group) is None:
                self._drop_below(key, 1 << 62)
                continue
            committed = self._committed(*key)
            passed, since_ms = self._passed.setdefault(key, (committed, now_ms))
            if len(self._sent_back[key]) > _GRACE_RANGES_MAX:
                self._drop_below(key, committed)
            elif now_ms - since_ms >= _GRACE_MS:
                self._passed[key] = (committed, now_ms)
                self._drop_below(key, min(passed, committed))
        for dead in list(self._resent):
            group, queue_id = dead
            topic = f"{DEAD_PREFIX}{group}"
            low = core.store.min_offset(topic, queue_id)
            if core.topics.get(topic) is None:
                low = 1 << 62
            if self._resent[dead].drop_below(low):
                self._unsaved_dead.add(dead)
            if not self._resent[dead]:
                del self._resent[dead]

    # --------------------------------------------------------------------------------------- saving

    def _save(self) -> None:
        """Write the notes that changed, and up to where they hold; the latter comes last."""
        core = self._core
        if self._saving:
            return
        unsaved, self._unsaved = self._unsaved, set()
        unsaved_dead, self._unsaved_dead = self._unsaved_dead, set()
        changes: list[Change] = []
        for group, topic, queue_id in unsaved:
            ranges = self._sent_back.get((group, topic, queue_id))
            name = f"{topic}{_SEPARATOR}{group}{_SEPARATOR}{queue_id}"
            changes.append((RETRY_TABLE, name, ranges.pairs() if ranges else None))
        for group, queue_id in unsaved_dead:
            ranges = self._resent.get((group, queue_id))
            name = f"{group}{_SEPARATOR}{queue_id}"
            changes.append((DEAD_TABLE, name, ranges.pairs() if ranges else None))
        # All copies that were staged so far are noted, so the next walk may begin behind them.
        at = core.store.log.end
        changes.append((RETRY_TABLE, _AT, at))

        def saved(error: SluiceError | None) -> None:
            self._saving = False
            if error is None:
                self._at = at
            else:
                self._unsaved |= unsaved
                self._unsaved_dead |= unsaved_dead

        self._saving, self._save_now = True, False
        try:
            for part in _parts(changes[:-1]):
                core.store.change(part)
            core.store.change(changes[-1:], saved)
        except SluiceError as error:
            saved(error)
            return
        core.ask_turn()


_NONE: Final = OffsetRanges()


def _parts(changes: list[Change]) -> list[list[Change]]:
    """Rows in groups that fit into one entry of the log each."""
    parts: list[list[Change]] = []
    room = 0
    for change in changes:
        size = 64 + len(change[1]) + 24 * len(change[2] or ())
        if not parts or size > room:
            parts.append([])
            room = _CHANGE_BYTES
        parts[-1].append(change)
        room -= size
    return parts
