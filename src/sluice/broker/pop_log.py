"""This module writes what happens to popped messages into the log, and reads it after a start.

Each event is an entry of the revive topic, written with the turn's others. From time to time a line
of the table `pop` says from where on they are needed: from the oldest check point of each revive
queue that has messages in flight. A check point that lags far behind, or whose entry retention is
about to delete, is written anew, so neither a start nor the log grows with how long messages may be
in flight.

A message that comes again is copied first, then its check point is told so, in one turn. A crash
may keep the copy and lose the second entry: such copies stand behind the last entry of the revive
topic and name the message as their origin, so the start finds them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from heapq import merge
from typing import TYPE_CHECKING, Any, Final, TypeVar

from sluice.broker import pop_entries
from sluice.broker.pop_state import CheckPoint, Kept, OrderWindow, PopState, QueueName
from sluice.broker.topics import DEAD_PREFIX, RETRY_PREFIX, REVIVE_QUEUES, REVIVE_TOPIC_PREFIX
from sluice.errors import RecordDamaged, SluiceError
from sluice.model import Message
from sluice.protocol import records
from sluice.storage.origins import made_since
from sluice.storage.state import DELETED_TABLE, OFFSET_TABLE, POP_TABLE
from sluice.storage.store import Change, ColdRead

if TYPE_CHECKING:
    from sluice.broker.core import BrokerCore

T = TypeVar("T")
Done = Callable[[SluiceError | None], None]
Found = tuple[int, int, int, bytes]  # position, revive queue, offset there, body

LINE: Final = "revive"  # the one key of the table
NOTE_INTERVAL_MS: Final = 5_000
NOTE_BYTES: Final = 16 << 20  # of the log, while nothing happens here
BEHIND_MAX: Final = 10_000  # entries of a revive queue that a start has to read for an old one
ANEW_A_TIME: Final = 500
_READ_COUNT: Final = 256
_READ_BYTES: Final = 1 << 20

log_lines = logging.getLogger("sluice.pop")


def retry_topic(group: str, topic: str) -> str:
    """Where the popped messages of a topic come again for a group, as RocketMQ names it."""
    return topic if topic.startswith(RETRY_PREFIX) else f"{RETRY_PREFIX}{group}_{topic}"


class PopLog:
    """The revive topic of one broker."""

    def __init__(self, core: BrokerCore, state: PopState) -> None:
        self._core = core
        self._state = state
        self._broker = core.config.broker_name
        self.topic = f"{REVIVE_TOPIC_PREFIX}{core.config.cluster_name}"
        self._touched: set[QueueName] = set()  # whose committed offset a note has to hold
        self._changed = False
        self._noted_ms = 0
        self._noted_at = 0
        self._noting = False

    # -------------------------------------------------------------------------------------- writing

    def _append(self, revive_queue: int, body: bytes, done: Done | None) -> tuple[int, int]:
        """Returns position and offset of the entry."""
        core = self._core
        message = Message(self.topic, revive_queue, body, born_ms=core.now_ms())
        placed = core.append(message, done, records.NO_KEYS)
        self._changed = True
        return placed.position, placed.queue_offset

    def taken(self, point: CheckPoint, done: Done) -> None:
        """A check point that the state knows already."""
        body = pop_entries.point_body(point, point.offsets, self._broker)
        point.position, point.place = self._append(point.revive_queue, body, done)
        self._touched.add(point.queue)

    def window(self, window: OrderWindow, done: Done | None) -> None:
        queue = self._state.queue(window.queue)
        body = pop_entries.window_body(window, queue, self._broker)
        window.position, window.place = self._append(window.revive_queue, body, done)
        self._touched.add(window.queue)

    def acknowledged(self, item: Kept, offsets: Sequence[int], done: Done | None) -> None:
        body = pop_entries.ack_body(item, offsets, self._broker)
        self._append(item.revive_queue, body, done)
        self._touched.add(item.queue)

    def changed(
        self, window: OrderWindow, offset: int, visible_ms: int, done: Done, *, suspend: bool
    ) -> None:
        body = pop_entries.change_body(window, offset, visible_ms, self._broker, suspend=suspend)
        self._append(window.revive_queue, body, done)

    def reset(self, name: QueueName, offset: int) -> None:
        self._append(0, pop_entries.reset_body(name, offset, self._broker), None)

    def cleared(self, name: QueueName) -> None:
        self._touched.discard(name)
        self._append(0, pop_entries.clear_body(name, self._broker), None)

    # ---------------------------------------------------------------------------------------- notes

    def tick(self, now_ms: int) -> None:
        log = self._core.store.log
        if self._changed:
            if now_ms - self._noted_ms >= NOTE_INTERVAL_MS:
                self._write_old_anew()
                self._note(now_ms)
        elif self._state.in_flight and log.end - self._noted_at > NOTE_BYTES:
            self._note(now_ms)

    def _note(self, now_ms: int) -> None:
        """From where on the revive topic is needed, and the offsets that were popped until now.

        The offsets go with it because a check point that is not read any more said them too.
        """
        if self._noting:
            return
        core = self._core
        first = {}
        for number, kept in enumerate(self._state.kept):
            item = next(iter(kept), None)
            first[str(number)] = self._end(number) if item is None else item.place
        at = core.store.log.end
        changes: list[Change] = [(POP_TABLE, LINE, {"at": at, "from": first})]
        touched, self._touched = self._touched, set()
        for name in touched:
            group, topic, queue_id = name
            if core.topics.get(topic) is None:
                continue
            # What is on its way to being committed has its entries before this one.
            queue = self._state.queues.get(name)
            known = core.offsets.committed(*name)
            offset = max(-1 if known is None else known, -1 if queue is None else queue.next_offset)
            if offset < 0:
                continue
            changes.append((OFFSET_TABLE, f"{topic}@{group}", {str(queue_id): offset}))

        def noted(error: SluiceError | None) -> None:
            self._noting = False
            if error is not None:
                self._touched |= touched
                self._changed = True

        self._noted_ms = now_ms
        try:
            core.store.change(changes, noted)
        except SluiceError as error:
            noted(error)
            return
        self._noting, self._changed, self._noted_at = True, False, at
        core.ask_turn()

    def _end(self, revive_queue: int) -> int:
        queue = self._core.store.queues.get((self.topic, revive_queue))
        return 0 if queue is None else queue.next_offset

    def _write_old_anew(self) -> None:
        for number, kept in enumerate(self._state.kept):
            least = self._end(number) - BEHIND_MAX
            old: list[Kept] = []
            for item in kept:
                if item.place >= least or len(old) == ANEW_A_TIME:
                    break
                old.append(item)
            self._anew(old)

    def _anew(self, items: list[Kept]) -> bool:
        """Write entries once more; False where that is impossible now."""
        state, broker = self._state, self._broker
        for item in items:
            if isinstance(item, CheckPoint):
                body = pop_entries.point_body(item, state.left(item), broker)
            else:
                body = pop_entries.window_body(item, state.queue(item.queue), broker)
            before = (item.place, item.position)

            def written(
                error: SluiceError | None, item: Kept = item, before: tuple[int, int] = before
            ) -> None:
                if error is not None:  # where it was it is still
                    item.place, item.position = before

            try:
                position, place = self._append(item.revive_queue, body, written)
            except SluiceError as error:
                log_lines.warning("check points could not be written anew: %s", error)
                return False
            state.moved(item, place, position)
        return True

    def move_above(self, position: int) -> bool:
        """Retention asks: whether no entry of the log below a position is needed here."""
        old = [item for kept in self._state.kept for item in kept if item.position < position]
        self._anew(old[:ANEW_A_TIME])
        return not old

    # ------------------------------------------------------------------------------------- starting

    def rebuild(self) -> None:
        """Read what happened since the last note, before anybody is served."""
        last = self._noted_at = int(self._line().get("at", 0))
        queues = [self._entries(number) for number in range(REVIVE_QUEUES)]
        deleted = self._core.store.table(DELETED_TABLE)
        for position, revive_queue, place, body in merge(*queues):
            entry = pop_entries.Place(revive_queue, place, position)
            try:
                pop_entries.apply_body(self._state, body, entry, deleted)
            except (LookupError, TypeError, ValueError) as error:
                log_lines.warning("entry %d is no event of popped messages: %r", position, error)
            last = max(last, position)
        self._forget_gone()
        self._touched.update(self._state.queues)  # their offsets may be known from here alone
        self._commit_again()
        if self._state.in_flight:
            self._find_copies(last)

    def _commit_again(self) -> None:
        """Offsets are committed a little later than messages are popped: a crash comes between."""
        for name, queue in self._state.queues.items():
            known = self._core.offsets.committed(*name)
            if queue.next_offset >= 0 and (known is None or known < queue.next_offset):
                self._core.offsets.commit(*name, queue.next_offset)

    def _line(self) -> dict[str, Any]:
        line = self._core.store.table(POP_TABLE).get(LINE, {})
        return line if isinstance(line, dict) else {}

    def _entries(self, revive_queue: int) -> Iterator[Found]:
        store = self._core.store
        first = self._line().get("from", {})
        offset = max(
            int(first.get(str(revive_queue), 0)), store.min_offset(self.topic, revive_queue)
        )
        while offset < self._wait(lambda: store.max_offset(self.topic, revive_queue)):
            try:
                result = self._wait(
                    lambda offset=offset: store.read(  # type: ignore[misc]
                        self.topic,
                        revive_queue,
                        offset,
                        count_max=_READ_COUNT,
                        bytes_max=_READ_BYTES,
                    )
                )
            except RecordDamaged as error:
                log_lines.error("an event of popped messages is lost: %s", error)
                offset = max(offset + 1, error.next_queue_offset)
                continue
            for entry in map(records.decode, result.messages):
                yield entry.position, revive_queue, entry.queue_offset, bytes(entry.body)
            if result.next_offset <= offset:
                return
            offset = result.next_offset

    @staticmethod
    def _wait(ask: Callable[[], T]) -> T:
        while True:
            try:
                return ask()
            except ColdRead as cold:
                cold.work()

    def _forget_gone(self) -> None:
        """What belongs to a topic or a group that is not there any more is nobody's."""
        core, state = self._core, self._state
        for name in list(state.queues):
            group, topic, _ = name
            if core.topics.get(topic) is None or core.groups.get(group) is None:
                state.take_out(name)

    def _find_copies(self, position: int) -> None:
        """Copies behind the last event: the messages that they were made of are done with."""
        store, state = self._core.store, self._state
        wanted: dict[tuple[str, int, int], list[tuple[CheckPoint, int, str]]] = {}
        for (group, topic, queue_id), queue in state.queues.items():
            for offset, point in queue.flights.items():
                wanted.setdefault((topic, queue_id, offset), []).append((point, offset, group))
        for made in made_since(store.log, position):
            if not made.topic.startswith((RETRY_PREFIX, DEAD_PREFIX)):
                continue
            entry = self._entry(made.origin)
            if entry is None:
                continue
            for point, offset, group in wanted.get(
                (entry.topic, entry.queue_id, entry.queue_offset), ()
            ):
                if made.topic in (retry_topic(group, entry.topic), f"{DEAD_PREFIX}{group}"):
                    state.land(point, (offset,))
                    self.acknowledged(point, (offset,), None)

    def _entry(self, position: int) -> records.Entry | None:
        store = self._core.store
        try:
            view = self._wait(lambda: store.entry_at(position))
        except RecordDamaged:
            return None
        return None if view is None else records.decode(view)
