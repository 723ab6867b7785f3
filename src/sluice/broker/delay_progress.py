"""This module knows how far delayed messages were delivered, and finds it out again after a crash.

Levels are delivered in the order of their queues: an offset says how far each one is, in RocketMQ's
own table. Timers are delivered in the order of their times: the mark is the last one, and all with
an earlier time count as delivered, but for those that came later with an earlier time (the clock
went back, a delivery failed), which are listed.

    mark    time and offset of the last timer that was delivered
    end     timers from this offset on are not covered by the mark
    left    timers below the mark that wait
    foreign timers below this position may be Apache's: their entries have to be read
    at      where in the log to look for what was delivered since

A delivered entry names the position of the one that waited (`storage/origins.py`). What was
delivered after the last note is found by that, so nothing is delivered twice and nothing is lost,
wherever the log was torn off. Entries that were written anew, because the log's old files are about
to go, are found in the same way: until those files are gone, `at` stays where that began.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from struct import Struct
from typing import Any, Final, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from sluice.broker.delay_forms import MOVED_NAME
from sluice.broker.delay_units import LEAST_TIME_MS, Units, WaitingQueue
from sluice.broker.timer_index import OFFSET_BITS, Numbers, TimerIndex, Timers, key_of, pair_of
from sluice.broker.topics import TIMER_TOPIC
from sluice.errors import RecordDamaged
from sluice.protocol import records
from sluice.storage.origins import made_since
from sluice.storage.state import DELAY_TABLE, TIMER_TABLE, Change
from sluice.storage.store import ColdRead, Store

PROGRESS_KEY: Final = "progress"
LEFT_MAX: Final = 10_000
_CHUNK_UNITS: Final = 200_000
_TIMER_CHECK: Final = Struct(">q")  # what Apache's timercheck begins with: the time it reads next
_TIMER_CHECK_BYTES_MAX: Final = 65_536
_TIME_DIGITS_MAX: Final = 14
T = TypeVar("T")

log_lines = logging.getLogger("sluice.delays")


@dataclass(slots=True)
class Progress:
    """How far delivery is."""

    cursors: dict[int, int] = field(default_factory=dict)  # level -> first offset that waits
    mark: int = -1
    seen: int = 0  # the first timer's offset that nobody has looked at
    left: set[int] = field(default_factory=set)
    foreign_to: int = 0
    at: int = -1  # of the last note; -1: there is none, so nothing was ever delivered
    moved_from: int = 0  # where the log ended when entries were first written anew, ...
    moved_to: int = 0  # ... and that holds until the log begins here

    def fired(self, due_ms: int, level: int, offset: int) -> None:
        """Something was delivered, or never will be."""
        if level:
            self.cursors[level] = offset + 1
        else:
            key = key_of(due_ms, offset)
            self.mark = max(self.mark, key)
            self.left.discard(key)

    def came(self, index: TimerIndex, timers: Timers) -> None:
        """Timers wait (again)."""
        index.add_many(timers)
        low = timers.where(timers.due_ms <= self.mark >> OFFSET_BITS)
        keys = map(key_of, low.due_ms.tolist(), low.offsets.tolist())
        self.left.update(key for key in keys if key <= self.mark)

    def moved(self, store: Store, position: int) -> None:
        """An entry is about to be written anew."""
        if self.moved_to <= store.log.start:
            self.moved_from = store.log.end
        self.moved_to = max(self.moved_to, position + 1)

    def changes(self, store: Store) -> list[Change]:
        """The note that holds once everything staged so far is written."""
        at = store.log.end if self.moved_to <= store.log.start else self.moved_from
        table = store.table(DELAY_TABLE)
        changes: list[Change] = [
            (DELAY_TABLE, str(level), offset)
            for level, offset in sorted(self.cursors.items())
            if table.get(str(level), 0) != offset
        ]
        value = {
            "at": at,
            "mark": pair_of(max(0, self.mark)),
            "end": self.seen,
            "left": [pair_of(key) for key in sorted(self.left)],
            "foreign": self.foreign_to if self.foreign_to > store.log.start else 0,
        }
        return [*changes, (TIMER_TABLE, PROGRESS_KEY, value)]


def blocking(ask: Callable[[], T]) -> T:
    """Ask something that may have to come from the disk; nobody is served meanwhile."""
    while True:
        try:
            return ask()
        except ColdRead as cold:
            cold.work()


# ------------------------------------------------------------------------------------ after a start


class _Done(NamedTuple):
    """Positions of waiting entries from which others were made since the last note."""

    fired: Numbers
    otherwise: Numbers  # written anew, or taken back


def recover(
    store: Store, levels: dict[int, WaitingQueue], timers: WaitingQueue, index: TimerIndex
) -> Progress:
    """Read how far delivery was, and fill the index with the timers that wait."""
    progress = Progress()
    note = store.table(TIMER_TABLE).get(PROGRESS_KEY) or {}
    if note:
        progress.mark = key_of(*note["mark"])
        progress.left = {key_of(*each) for each in note["left"]}
        progress.foreign_to = note.get("foreign", 0)
        progress.at = note["at"]
    told = store.table(DELAY_TABLE)
    for level, queue in levels.items():
        # As Apache's broker does, an offset that cannot be is moved to one that can.
        progress.cursors[level] = max(queue.first, min(int(told.get(str(level), 0)), queue.stop))
    progress.seen = timers.stop
    found, recalls = _uncovered(store, timers, progress, note.get("end", 0))
    progress.left.clear()
    if len(found.offsets) or any(q.stop > progress.cursors[level] for level, q in levels.items()):
        done = _done_since(store, progress, recalls)
        for level, queue in levels.items():
            progress.cursors[level] = _after_done(queue, progress.cursors[level], done)
        fired = found.where(np.isin(found.positions, done.fired))
        if len(fired.offsets):
            last = np.lexsort((fired.offsets, fired.due_ms))[-1]
            newest = key_of(int(fired.due_ms[last]), int(fired.offsets[last]))
            progress.mark = max(progress.mark, newest)
        found = found.where(~np.isin(found.positions, np.concatenate(done)))
        progress.came(index, found)
    return progress


def _uncovered(
    store: Store, queue: WaitingQueue, progress: Progress, end: int
) -> tuple[Timers, list[int]]:
    """The timers that the note does not cover, and where entries lie that take some back."""
    apache_ms = _apache_read_to(store)
    mark_ms, mark_offset = pair_of(max(0, progress.mark))
    if apache_ms > mark_ms:
        progress.foreign_to = store.log.end  # Apache's broker has run here since
    left = np.array([pair_of(key)[1] for key in progress.left], np.int64)

    def is_open(due_ms: Numbers, offsets: Numbers) -> Any:
        covered = (due_ms < mark_ms) | ((due_ms == mark_ms) & (offsets <= mark_offset))
        covered &= offsets < end
        covered &= ~np.isin(offsets, left)
        return ~covered & (due_ms > apache_ms)

    parts: list[Timers] = []
    recalls: list[int] = []
    foreign = _Foreign(store)
    for start in range(queue.first, queue.stop, _CHUNK_UNITS):
        units = queue.many(start, min(start + _CHUNK_UNITS, queue.stop), wait=True)
        timers = Timers(np.abs(units.codes), units.offsets, units.positions)
        chosen = units.there & units.timed & is_open(timers.due_ms, timers.offsets)
        is_foreign = units.positions < progress.foreign_to
        foreign.read(units, (units.there & ~units.timed) | (chosen & is_foreign))
        chosen &= ~is_foreign
        recalls += units.positions[chosen & (units.codes < 0)].tolist()
        parts.append(timers.where(chosen & (units.codes > 0)))
    recalls += foreign.recalls
    others = foreign.timers()
    parts.append(others.where(is_open(others.due_ms, others.offsets)))
    return Timers(*(np.concatenate(columns) for columns in zip(*parts, strict=True))), recalls


class _Foreign:
    """Timers that Apache's broker may have written: their entries say what their units do not.

    Its units have no time. One that waits long it writes anew from time to time, and the newest
    stands for all. What takes a message back names it by its unique key.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._found: dict[tuple[str, str, str], list[tuple[int, int, int]]] = {}
        self._recalled: set[tuple[str, str]] = set()
        self.recalls: list[int] = []

    def read(self, units: Units, chosen: npt.NDArray[np.bool_]) -> None:
        pairs = zip(units.offsets[chosen].tolist(), units.positions[chosen].tolist(), strict=True)
        for offset, position in pairs:
            entry = _entry_at(self._store, position)
            if entry is None:
                continue
            texts = records.parse_properties(entry.properties)
            due = texts.get("TIMER_OUT_MS", "")
            if not (due.isascii() and due.isdigit()) or len(due) > _TIME_DIGITS_MAX:
                log_lines.error("the timer at position %d does not say when it is due", position)
                continue
            unique = texts.get("UNIQ_KEY") or str(position)
            if "TIMER_DEL_UNIQKEY" in texts:
                # Some versions have the topic before the key.
                self._recalled.add((due, texts["TIMER_DEL_UNIQKEY"].rpartition("+")[2]))
                if entry.prepared_offset:
                    self.recalls.append(position)
                continue
            name = texts.get("REAL_TOPIC", ""), due, unique
            row = int(due), offset, position
            if MOVED_NAME.decode() in texts:
                self._found[name] = [row]
            else:
                self._found.setdefault(name, []).append(row)

    def timers(self) -> Timers:
        return Timers.of(
            [
                row
                for name, rows in self._found.items()
                for row in rows
                if name[1:] not in self._recalled
            ]
        )


def _entry_at(store: Store, position: int) -> records.Entry | None:
    try:
        view = blocking(lambda: store.entry_at(position))
    except RecordDamaged as error:
        log_lines.error("a delayed message cannot be read and is left out: %s", error)
        return None
    return None if view is None else records.decode(view)


def _apache_read_to(store: Store) -> int:
    """The time up to which Apache's broker says it delivered timers; 0 where it never ran here."""
    path = f"{store.root}/config/timercheck"
    try:
        data = store.files.read(path, _TIMER_CHECK_BYTES_MAX) if store.files.exists(path) else b""
    except OSError:
        return 0
    if len(data) < _TIMER_CHECK.size:
        return 0
    (next_ms,) = _TIMER_CHECK.unpack_from(data)
    return int(next_ms) - 1 if next_ms > LEAST_TIME_MS else 0


def _done_since(store: Store, progress: Progress, recalls: list[int]) -> _Done:
    """What became of waiting entries since the last note."""
    fired: list[int] = []
    otherwise: list[int] = []
    if progress.at >= 0:
        for made in made_since(store.log, progress.at):
            if made.topic != TIMER_TOPIC:
                fired.append(made.origin)
                continue
            otherwise.append(made.origin)
            entry = _entry_at(store, made.position)
            if entry is not None and records.property_value(entry.properties, MOVED_NAME):
                progress.moved_from = progress.at
                progress.moved_to = max(progress.moved_to, made.origin + 1)
    for position in recalls:
        entry = _entry_at(store, position)
        if entry is not None:
            otherwise.append(entry.prepared_offset)
    return _Done(np.array(fired, np.int64), np.array(otherwise, np.int64))


def _after_done(queue: WaitingQueue, cursor: int, done: _Done) -> int:
    """The offset after the last entry of a level that is done: they are done in order."""
    reached = cursor
    for start in range(cursor, queue.stop, _CHUNK_UNITS):
        units = queue.many(start, min(start + _CHUNK_UNITS, queue.stop), wait=True)
        places = np.flatnonzero(np.isin(units.positions, np.concatenate(done)) & units.there)
        if len(places):
            reached = start + int(places[-1]) + 1
    return reached
