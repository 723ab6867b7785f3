"""This module delivers messages when they are due: delay levels and timers.

What waits is an entry of the log (`delay_forms.py`). Of a level the broker keeps one offset, of a
timer eight bytes (`timer_index.py`). When its time has come an entry is read, written into the
queue that it is for, with the position of the one that waited as its origin, and whoever waits
for that queue is told once it is confirmed. How far this is, is noted once a second
(`delay_progress.py`).

    * never early: nothing is delivered before the clock says so;
    * in order of time, levels and timers together, also when much is overdue after a downtime;
    * some hundreds in one turn of the event loop, the rest in the next one.

A message whose topic was deleted meanwhile is dropped, and so is one that is damaged: both are
counted and logged. Everything here belongs to the event loop's thread.
"""

from __future__ import annotations

import logging
from collections import deque
from itertools import groupby, islice, takewhile
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from sluice.broker import delay_forms
from sluice.broker.delay_firing import Target, UsualFired
from sluice.broker.delay_progress import LEFT_MAX, Progress, recover
from sluice.broker.delay_rescue import DelayRescue
from sluice.broker.delay_units import LEAST_TIME_MS, WaitingQueue
from sluice.broker.timer_index import TimerIndex, Timers, key_of
from sluice.broker.topics import CLOSED_TOPICS, SCHEDULE_TOPIC, TIMER_TOPIC
from sluice.errors import Busy, MessageIllegal, RecordDamaged, SluiceError
from sluice.model import Message
from sluice.protocol import records
from sluice.storage.copies import stage_copies, takes_copies
from sluice.storage.copy_tables import stage_alike
from sluice.storage.lanes import tell
from sluice.storage.store import ColdRead
from sluice.telemetry import Durations

if TYPE_CHECKING:
    from sluice.broker.core import BrokerCore

_BATCH_MAX: Final = 1_024  # put in order of time together
_TURN_COUNT_MAX: Final = 1_024
_TURN_BYTES_MAX: Final = 1 << 20
_UNCONFIRMED_BYTES_MAX: Final = 32 << 20
_NEW_UNITS_MAX: Final = 100_000  # looked at in one tick
_NOTE_MS: Final = 1_000
_WALK_BYTES_MAX: Final = 16 << 20
_COMPLAIN_MS: Final = 60_000
_NAMES_MAX: Final = 1_000

log_lines = logging.getLogger("sluice.delays")


class Waiting(NamedTuple):
    """Something that waits in a queue of the broker's own; level 0 is that of timers."""

    due_ms: int
    level: int
    offset: int
    position: int = -1  # in the log; -1: it has gone


class Delays:
    """What waits for its time in one broker."""

    def __init__(self, core: BrokerCore) -> None:
        self._core = core
        self._levels_ms = core.store.config.delay_levels_ms
        self.index = TimerIndex()
        self.progress = Progress()
        self.timers = WaitingQueue(core.store, TIMER_TOPIC, 0)
        self.levels: dict[int, WaitingQueue] = {}
        self.batch: deque[Waiting] = deque()  # due, and not delivered yet; in order
        self.fired = 0
        self.dropped = 0
        self.recalled = 0
        self.lateness = Durations()
        self._is_reading = False
        self._is_failing = False  # then it is tried again at the next tick, not at once
        self._is_asked = False
        self._is_dirty = False
        self._is_noting = False
        self._noted_ms = 0
        self._complained_ms: dict[str, int] = {}
        self._unconfirmed_bytes = 0
        self._missing: set[str] = set()  # topics that were gone, and that the log knows of
        self.rescue = DelayRescue(core, self)
        core.services.append(self)

    # ------------------------------------------------------------------------------------ coming in

    def requested_form(self, message: Message) -> Message:
        """What is stored for a message that a client sent; raises why it cannot be."""
        stored = delay_forms.requested(message, self._core.now_ms(), self._limits())
        if stored.topic == message.topic and b"TIMER_" in message.properties:
            # It is due already: it must not say that it was stored when this turn began.
            self._core.store.turn_ms(fresh=True)
        return stored

    def waiting_form(self, message: Message) -> Message:
        """What is stored for a message of the broker's own: what waits, or the message itself."""
        return delay_forms.waiting_form(message, self._core.now_ms(), self._limits())

    def _limits(self) -> delay_forms.Limits:
        return delay_forms.Limits(len(self._levels_ms), self._core.config.timer_max_delay_ms)

    @property
    def waiting_levels(self) -> int:
        return sum(map(self.waiting_at, self.levels))

    @property
    def waiting_timers(self) -> int:
        return self.index.count + sum(item.level == 0 for item in self.batch)

    def waiting_at(self, level: int) -> int:
        """How many messages of a level wait."""
        return max(0, self.levels[level].stop - self.progress.cursors[level])

    def take_new(self) -> None:
        """Enter the timers that were confirmed since the last look. May raise ColdRead."""
        progress = self.progress
        stop = min(self.timers.stop, progress.seen + _NEW_UNITS_MAX)
        if stop <= progress.seen:
            return
        units = self.timers.many(progress.seen, stop)
        new = units.there & (units.codes > 0)
        timers = Timers(units.codes, units.offsets, units.positions)
        progress.came(self.index, timers.where(new))
        progress.seen = stop

    # ---------------------------------------------------------------------------------- the service

    def start(self) -> None:
        """Find out what waits. A broker that had more levels before delivers theirs too."""
        store = self._core.store
        queue_ids = {queue_id for topic, queue_id in store.queues if topic == SCHEDULE_TOPIC}
        for queue_id in sorted(queue_ids | set(range(len(self._levels_ms)))):
            self.levels[queue_id + 1] = WaitingQueue(store, SCHEDULE_TOPIC, queue_id)
        self.progress = recover(store, self.levels, self.timers, self.index)
        count = self.waiting_levels
        if count or self.index.count:
            log_lines.info("%d delayed and %d timed messages wait", count, self.index.count)

    def tick(self, now_ms: int) -> None:
        if not self.levels:
            return  # nobody started it
        self._is_failing = False
        self._work()
        if self._needs_note(now_ms):
            self._note(now_ms)

    def finish(self) -> None:
        """The broker stops: whoever takes over the directory sees how far delivery is."""
        if self._is_dirty and self.levels and not self._is_noting:
            self._note(self._core.now_ms())

    def soon(self) -> None:
        """Go on in the next turn."""
        if not self._is_asked:
            self._is_asked = True
            self._core.call_soon(self._work)

    # ------------------------------------------------------------------------------------ going out

    def _work(self) -> None:
        """Deliver some of what is due."""
        self._is_asked = False
        if self._is_reading or self._is_failing or self._core.store.closed:
            return
        if self._unconfirmed_bytes > _UNCONFIRMED_BYTES_MAX:
            return  # it goes on when that is confirmed
        now_ms = self._core.now_ms()
        try:
            self.take_new()
            if not self.batch:
                self._fill(now_ms)
            if self.batch:
                self._deliver(now_ms)
        except ColdRead as cold:
            self._wait_for_disk(cold)
        except (SluiceError, OSError) as error:
            self.complain("delayed messages cannot be delivered now: %s", error)

    def _fill(self, now_ms: int) -> None:
        """Put what is due into order, up to a time up to which everything is known."""
        found: list[Waiting] = []
        known_to = now_ms
        for level in self.levels:
            due = self._due_of_level(level, now_ms)
            if len(due) == _BATCH_MAX:
                known_to = min(known_to, due[-1].due_ms)
            found += due
        timers = self.index.take(known_to, _BATCH_MAX)
        if len(timers) == _BATCH_MAX:
            known_to = timers[-1][0]
        chosen = [Waiting(due_ms, 0, offset, at) for due_ms, offset, at in timers]
        if found:
            chosen = sorted([*chosen, *(item for item in found if item.due_ms <= known_to)])
        self.batch.extend(chosen)

    def _due_of_level(self, level: int, now_ms: int) -> list[Waiting]:
        """Entries of a level that are due, in the order of the queue."""
        queue, cursors = self.levels[level], self.progress.cursors
        stop = queue.stop
        cursors[level] = cursor = max(cursors[level], queue.first)
        if cursor >= stop:
            return []
        _, _, code = queue.one(cursor)
        delay_ms = self._delay_ms(level)
        if now_ms < code <= now_ms + delay_ms:
            return []
        units = queue.many(cursor, min(cursor + _BATCH_MAX, stop))
        dues = np.where(units.there, units.codes, 0)
        # What was stored when the levels were others, or by a broker that wrote no time.
        strange = units.there & ((dues < LEAST_TIME_MS) | (dues > now_ms + delay_ms))
        for at in np.flatnonzero(strange).tolist():
            dues[at] = self._due_ms(level, int(units.positions[at]), int(dues[at]))
            if dues[at] > now_ms:
                dues = dues[: at + 1]
                break
        dues = np.maximum.accumulate(dues)
        count = int(np.searchsorted(dues, now_ms, "right"))
        positions = np.where(units.there, units.positions, -1)
        rows = zip(dues[:count].tolist(), positions[:count].tolist(), strict=True)
        return [Waiting(due, level, cursor + at, place) for at, (due, place) in enumerate(rows)]

    def _delay_ms(self, level: int) -> int:
        return self._levels_ms[min(level, len(self._levels_ms)) - 1]

    def _due_ms(self, level: int, position: int, code: int) -> int:
        """When an entry of a level is due: what its queue says, unless that cannot be."""
        delay_ms = self._delay_ms(level)
        if position < 0 or LEAST_TIME_MS <= code <= self._core.now_ms() + delay_ms:
            return code
        try:
            return self._core.store.reader.store_ms(position) + delay_ms
        except RecordDamaged:
            return 0  # it is due, and will be found damaged

    def _deliver(self, now_ms: int) -> None:
        """Write the next ones into the queues that they are for."""
        if self.progress.at < 0 and not self._is_noting:
            # Before the first: where there is no note, nothing was ever delivered.
            self._note(now_ms)
            if not self._is_noting:
                return
        store = self._core.store
        store.require_writable()
        store.turn_ms(fresh=True)  # no entry says that it was stored before it was due
        turn = _Turn(self)
        try:
            while self.batch and turn.count < _TURN_COUNT_MAX and turn.byte_count < _TURN_BYTES_MAX:
                if not self._deliver_together(now_ms, turn):
                    self._deliver_one(self.batch[0], now_ms, turn)
                    self._leave_batch(1)
        finally:
            if turn.items:
                tell(store, turn.told)
                self._core.ask_turn()
                self._count(turn)
        self.soon()  # more may be due than was looked at

    def _deliver_together(self, now_ms: int, turn: _Turn) -> bool:
        """Stage what becomes of the next ones while they are usual; False: the first is not."""
        batch = self.batch
        is_timer = batch[0].level == 0
        room = min(_TURN_COUNT_MAX - turn.count, len(batch))
        items = [*takewhile(lambda item: (item.level == 0) == is_timer, islice(batch, room))]
        usual = UsualFired(is_timer, now_ms, self._target)
        positions = [item.position for item in items]
        store = self._core.store
        shares = stage_alike(store, positions, usual.choose, usual.NAMES)
        shares = shares or stage_copies(store, positions, usual.choose)
        count = sum(share.message_count for share in shares)
        for queue, own_count, byte_count, codes in shares:
            turn.add(queue.key.topic, queue.key.queue_id, own_count, byte_count, codes)
        turn.items += items[:count]
        self._leave_batch(count)
        return count > 0

    def _leave_batch(self, count: int) -> None:
        """Something became of the first ones of what is due."""
        progress = self.progress
        for left in range(count, 0, -1):
            due_ms, level, offset, _ = self.batch.popleft()
            # Of timers the last one stands for those before it.
            if level or left == 1 or progress.left:
                progress.fired(due_ms, level, offset)
        self._is_dirty = True

    def _deliver_one(self, item: Waiting, now_ms: int, turn: _Turn) -> None:
        """The same for one that is unusual. May raise ColdRead."""
        try:
            self._deliver_plainly(item, now_ms, turn)
        except RecordDamaged as error:
            self._drop("a delayed message is damaged and is not delivered: %s", error)
        except (ColdRead, SluiceError):
            raise
        except Exception:
            # One that nobody foresaw must not keep all others back.
            self.dropped += 1
            log_lines.exception("the message that waited at %d is left out", item.position)

    def _target(self, topic_bytes: bytes, queue_text: bytes) -> Target | None:
        """Where messages for a queue go; None where there is no such topic any more."""
        topic = topic_bytes.decode("utf-8", "replace")
        settings = self._core.topics.get(topic)
        if settings is None or topic in CLOSED_TOPICS:
            return None
        queue_id = int(queue_text)
        if queue_id >= max(settings.read_queues, settings.write_queues):
            queue_id %= max(1, settings.write_queues)  # there are fewer than there were
        if settings.attributes:
            return Target(topic, queue_id, None)
        queue = self._core.store.queue(topic, queue_id)
        fits = takes_copies(self._core.store, queue)
        return Target(topic, queue_id, queue if fits else None)

    def entry_of(self, item: Waiting) -> records.Entry | None:
        """The entry that waits; None where the log does not have it. May raise ColdRead."""
        view = None if item.position < 0 else self._core.store.entry_at(item.position)
        return None if view is None else records.decode(view)

    def _deliver_plainly(self, item: Waiting, now_ms: int, turn: _Turn) -> None:
        """The same for what is unusual: it is confirmed or fails by itself."""
        core = self._core
        entry = self.entry_of(item)
        place = None if entry is None else delay_forms.place_of(entry.properties)
        if entry is None or place is None:
            self._drop("entry %d of queue %d is no delayed message", item.offset, item.level - 1)
            return
        target = self._target(*place)
        if target is None:
            self._drop_for(place[0].decode("utf-8", "replace"))
            return
        message = delay_forms.fired_form(entry, target.topic, target.queue_id, now_ms)
        tag = records.property_value(message.properties, b"TAGS")
        alone = _Turn(self)
        try:
            size = core.append(message, alone.told).size
        except (Busy, MessageIllegal) as error:
            # A topic in memory is full, or limits are lower than they were: nobody is to wait.
            self._drop("the delayed message at %d cannot be stored: %s", entry.position, error)
            return
        code = records.java_hash(tag) if tag else 0
        alone.items.append(item)
        alone.add(target.topic, target.queue_id, 1, size, {code})
        self._count(alone)
        turn.count += 1
        turn.byte_count += size

    def _count(self, turn: _Turn) -> None:
        for topic, _, count, byte_count, _ in turn.delivered:
            self._unconfirmed_bytes += byte_count
            self._core.stats.stored(topic, count, byte_count)

    def _drop(self, text: str, *values: object) -> None:
        self.dropped += 1
        self.complain(text, *values)

    def _drop_for(self, topic: str) -> None:
        self.dropped += 1
        if topic not in self._missing:
            if len(self._missing) < _NAMES_MAX:
                self._missing.add(topic)
            log_lines.warning("topic %s is gone: delayed messages for it are dropped", topic)

    def confirmed(self, turn: _Turn) -> None:
        """What was delivered can be read: whoever waits for it is asked again."""
        polls, now_ms = self._core.polls, self._core.now_ms()
        self.fired += len(turn.items)
        for due_ms, same in groupby(item.due_ms for item in turn.items):
            self.lateness.add(max(1, now_ms - due_ms) * 1_000_000, len([*same]))
        for topic, queue_id, _, byte_count, codes in turn.delivered:
            self._unconfirmed_bytes -= byte_count
            if polls.is_awaited:
                for code in codes:
                    polls.arrived((topic, queue_id), code)
        if self.batch:
            self.soon()

    def failed(self, turn: _Turn, error: SluiceError) -> None:
        """Nothing of a turn was written: all of it waits again."""
        self._unconfirmed_bytes -= sum(each.byte_count for each in turn.delivered)
        self._is_failing = True
        self.wait_again(turn.items)
        self.complain("delayed messages could not be delivered, they are kept: %s", error)

    def wait_again(self, items: list[Waiting]) -> None:
        """What was staged in this turn was not written: it waits as before, and all after it."""
        again = [*items, *self.batch]
        self.batch.clear()
        for item in again:
            if item.level:
                cursors = self.progress.cursors
                cursors[item.level] = min(cursors[item.level], item.offset)
        rows = [(i.due_ms, i.offset, i.position) for i in again if not i.level]
        self.progress.came(self.index, Timers.of(rows))

    def _wait_for_disk(self, cold: ColdRead) -> None:
        """Read what comes next on a thread, some hundreds together."""
        works = [cold.work]
        for item in islice(self.batch, 1, _TURN_COUNT_MAX):
            try:
                self.entry_of(item)
            except ColdRead as other:
                works.append(other.work)
            except SluiceError:
                break  # it is met when its turn comes

        def ask() -> None:
            if works:
                todo = works.copy()
                works.clear()

                def work() -> None:
                    for each in todo:
                        each()

                raise ColdRead(work)

        def done(_: None, error: BaseException | None) -> None:
            self._is_reading = False
            if error is not None:
                self.complain("delayed messages cannot be read now: %s", error)
            else:
                self.soon()

        self._is_reading = True
        self._core.store.call(ask, done)

    def complain(self, text: str, *values: object) -> None:
        """Log what goes wrong, each kind not more often than somebody can read."""
        now_ms = self._core.now_ms()
        if not 0 <= now_ms - self._complained_ms.get(text, -_COMPLAIN_MS) < _COMPLAIN_MS:
            self._complained_ms[text] = now_ms
            log_lines.error(text, *values)

    # -------------------------------------------------------------------------------------- looking

    def some_below(self, position: int, count_max: int) -> list[Waiting]:
        """Some of what waits below a position of the log. May raise ColdRead."""
        self.take_new()
        found = list(islice(self.batch, count_max))
        for level, queue in self.levels.items():
            cursor, stop = max(self.progress.cursors[level], queue.first), queue.stop
            for offset in range(cursor, min(stop, cursor + count_max)):
                place, _, code = queue.one(offset)
                if place >= position:
                    break
                found.append(Waiting(self._due_ms(level, place, code), level, offset, place))
        seen = self.progress.seen
        limit = self.timers.first_where(self.timers.first, seen, lambda at, _: at >= position)
        timers = self.index.below(limit, count_max)
        return [*found, *(Waiting(due_ms, 0, offset, at) for due_ms, offset, at in timers)]

    def level_after(self, level: int, begin: Waiting, count_max: int) -> list[Waiting]:
        """What waits of a level after something, in order. May raise ColdRead."""
        queue = self.levels[level]
        cursor, stop = max(self.progress.cursors[level], queue.first), queue.stop
        start = queue.first_where(cursor, stop, lambda _, code: code >= begin.due_ms)
        found = []
        for offset in range(start, stop):
            place, _, code = queue.one(offset)
            item = Waiting(self._due_ms(level, place, code), level, offset, place)
            if item > begin:
                found.append(item)
            if len(found) == count_max:
                break
        return found

    def still_waits(self, item: Waiting) -> bool:
        """Whether nothing became of it since it was looked at, and it is not about to be."""
        if self.batch:
            return False
        if item.level:
            return self.progress.cursors[item.level] == item.offset
        return self.index.has(item.due_ms, item.offset)

    def leave(self, item: Waiting) -> None:
        """It does not wait here any more: another entry does in its place, or somebody took it."""
        if item.level:
            self.progress.cursors[item.level] = item.offset + 1
        else:
            self.index.remove(item.due_ms, item.offset)
            self.progress.left.discard(key_of(item.due_ms, item.offset))
        self._is_dirty = True

    # ------------------------------------------------------------------------------------- progress

    def _needs_note(self, now_ms: int) -> bool:
        if self._is_noting or 0 <= now_ms - self._noted_ms < _NOTE_MS:
            return False
        if self._is_dirty:
            return True
        log, progress = self._core.store.log, self.progress
        if log.end - progress.at <= _WALK_BYTES_MAX or progress.moved_to > log.start:
            return False
        # A start looks through the log from the last note on, if anything waits.
        return bool(self.index.count or self.batch or any(map(self.waiting_at, self.levels)))

    def _note(self, now_ms: int) -> None:
        """Write down how far delivery is, after all that was delivered in this turn."""
        progress, store = self.progress, self._core.store
        if len(progress.left) > LEFT_MAX:
            return  # they go first when their time has come; until then a start reads more
        changes = progress.changes(store)
        at: int = changes[-1][2]["at"]

        def noted(error: SluiceError | None) -> None:
            self._is_noting = False
            if error is None:
                progress.at = at
            else:
                self._is_dirty = True

        try:
            store.change(changes, noted)
        except SluiceError as error:
            self.complain("the progress of delayed messages is not noted: %s", error)
            return
        self._is_noting, self._is_dirty, self._noted_ms = True, False, now_ms
        self._core.ask_turn()


class _Delivered(NamedTuple):
    """What a queue got in one turn."""

    topic: str
    queue_id: int
    message_count: int
    byte_count: int
    tags_codes: set[int]


class _Turn:
    """What was delivered in one turn: all of it is confirmed, or nothing was written."""

    def __init__(self, delays: Delays) -> None:
        self._delays = delays
        self.items: list[Waiting] = []
        self.delivered: list[_Delivered] = []
        self.count = 0  # of the event loop's turn, with what is confirmed by itself
        self.byte_count = 0

    def add(self, topic: str, queue_id: int, count: int, byte_count: int, codes: set[int]) -> None:
        self.delivered.append(_Delivered(topic, queue_id, count, byte_count, codes))
        self.count += count
        self.byte_count += byte_count

    def told(self, error: SluiceError | None) -> None:
        """The store's word on all of them."""
        if error is not None:
            self._delays.failed(self, error)
        else:
            self._delays.confirmed(self)
