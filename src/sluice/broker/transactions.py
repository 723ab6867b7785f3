"""This module is the service of transactional messages: half messages, their ends, the questions.

    a producer sends      -> a half message is stored, nobody can read it
    it says commit        -> the message is stored in its topic, the half message is done
    it says roll back     -> the half message is done
    it says nothing       -> any producer of its group is asked, first when it is as old as
                             `transaction_timeout_ms`, then every `transaction_check_interval_ms`
    nobody ever knows     -> it is parked, in a topic of its own

The first word counts; a later one changes nothing. Half messages are followed as any reader of
their queue would follow it, so what is known here is what the log says. What was made of a half
message names it as its origin, therefore a crash between a commit and the operation that notes it
commits nothing twice.

Who can be asked is known by heartbeats; the question itself is sent by whoever set `ask`. A group
without a connected producer costs a half message none of its questions: it waits for one.

This module knows no wire. Its methods belong to the event loop's thread.
"""

from __future__ import annotations

import logging
from array import array
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from sluice.broker import half_messages as forms
from sluice.broker.browsing import queue_units
from sluice.broker.half_messages import Ending, Half, Rules
from sluice.broker.half_operations import Operations
from sluice.broker.half_recovery import FILLER_SIZE, recover
from sluice.broker.half_table import HalfTable
from sluice.broker.topics import CHECK_MAX_TOPIC, HALF_TOPIC, OP_TOPIC
from sluice.errors import (
    Busy,
    IllegalOperation,
    NotFound,
    ParameterInvalid,
    RecordDamaged,
    SluiceError,
    TopicMissing,
)
from sluice.protocol import records
from sluice.storage.state import TRANSACTION_TABLE as TABLE

if TYPE_CHECKING:
    from sluice.broker.core import BrokerCore
    from sluice.broker.groups import Client

Done = Callable[[SluiceError | None], None]
Asking = Callable[["Client", Half, int], None]

GROUP: Final = "CID_RMQ_SYS_TRANS"
PROGRESS_KEY: Final = "progress"
RESUMED_KEY: Final = "resumed"

LOOKS_A_TICK: Final = 100
COPIES_A_TICK: Final = 32
RESCUED_MAX: Final = 1000
WOKEN_A_TICK: Final = 10_000
SPREAD_SLACK: Final = 100_000  # done ones between open ones, which a start reads in vain
PROGRESS_MS: Final = 1000
PROGRESS_BYTES: Final = 16 << 20
ENDED_MAX: Final = 16_384
_READS_MAX: Final = 128  # that wait for the disk
_ENDS_HELD_MAX: Final = 16
_UNITS: Final = 1024
_HOUR_MS: Final = 3_600_000

log_lines = logging.getLogger("sluice.transactions")


class Transactions:
    """The transactions of one broker."""

    def __init__(self, core: BrokerCore) -> None:
        self._core = core
        self._store = core.store
        self.table = HalfTable()
        self.ask: Asking = lambda client, half, checks: None
        self._operations = Operations(core)
        # Half messages whose group has no producer now, by offset.
        self._waiting: dict[str, array[int]] = {}
        self._reading: set[int] = set()  # half messages whose entries are on their way
        # By first position: half messages that are being copied, and the ends that wait for it.
        self._moving: dict[int, list[tuple[Ending, Done]]] = {}
        self._ended: dict[int, str] = {}  # what became of the last ones, by first position
        self._turn = 0
        self._is_following = False
        self._noted: tuple[int, int, int] = (0, 0, 0)
        self._noted_ms = 0
        self.committed_count = self.rolled_back_count = self.parked_count = self.asked_count = 0
        core.store.housekeeping.rescuers.append(self.rescue)

    # ---------------------------------------------------------------------------------- start, tick

    def start(self) -> None:
        """Read which half messages are open."""
        core, store = self._core, self._store
        noted = store.table(TABLE).get(PROGRESS_KEY) or {}
        half = int(noted.get("half", 0))
        operation = int(noted.get("operation", 0))
        # Where Apache's broker has had the directory meanwhile it is further than we were.
        theirs = core.offsets.committed(GROUP, HALF_TOPIC, 0) or 0
        if theirs > half:
            half, operation = theirs, core.offsets.committed(GROUP, OP_TOPIC, 0) or 0
        due_ms = core.now_ms() + core.config.transaction_timeout_ms
        found = recover(store, self.table, half, operation, int(noted.get("walk", 0)), due_ms)
        self._operations.begin(found.operations, found.next_operation)
        for offset, made_at in found.done:
            self._operations.done(offset, made_at)
        if self.table.open_count:
            log_lines.info("%d half messages are open", self.table.open_count)

    def tick(self, now_ms: int) -> None:
        self.follow()
        self._wake_waiting(now_ms)
        self._look_at_due(now_ms)
        self._move_front()
        self._operations.write()
        self._note_progress(now_ms)
        self.table.trim(self._operations.lowest_unsafe(self.table.next_offset))

    def stop(self) -> None:
        """The broker stops: everything known is written down, so that anybody can go on."""
        self._operations.write()
        self._note_progress(self._core.now_ms() + PROGRESS_MS)

    def follow(self) -> bool:
        """Take up new half messages; whether there are none left that may have to be read first."""
        if not self._is_following:
            self._is_following = True

            def followed(_: None, error: BaseException | None) -> None:
                self._is_following = False
                if error is not None:
                    log_lines.error("the queue of half messages cannot be read: %s", error)

            self._store.call(self.catch_up, followed)
        return not self._is_following

    def catch_up(self) -> None:
        """Take up half messages that can be read now. May raise ColdRead."""
        store, table = self._store, self.table
        high = store.max_offset(HALF_TOPIC, 0)
        if high <= table.next_offset:
            return
        table.skip_to(store.min_offset(HALF_TOPIC, 0))
        due_ms = self._core.now_ms() + self._core.config.transaction_timeout_ms
        while table.next_offset < high:
            units = queue_units(store, HALF_TOPIC, 0, table.next_offset, _UNITS)
            if not units:
                return
            for position, size, _, offset in units:
                if size == FILLER_SIZE:
                    table.skip_to(offset + 1)
                else:
                    table.add(offset, position, due_ms)

    @property
    def rules(self) -> Rules:
        config = self._core.config
        return Rules(
            config.transaction_timeout_ms,
            config.transaction_check_interval_ms,
            config.transaction_check_count_max,
            config.store.retention_hours * _HOUR_MS,
        )

    # --------------------------------------------------------------------------------------- ending

    def end(self, ending: Ending, done: Done) -> None:
        """A producer says what became of its transaction; `done` hears when that is stored."""
        if ending.verdict == forms.UNKNOWN:
            done(None)
            return
        if ending.verdict not in forms.VERDICTS:
            raise ParameterInvalid(
                f"commitOrRollback is {ending.verdict}; it is {forms.COMMIT} to commit, "
                f"{forms.ROLLBACK} to roll back, {forms.UNKNOWN} where it is not known"
            )
        if not self._is_held(ending.position, ending, done):
            self._store.call(
                lambda: self._find(ending.position),
                lambda half, error: self._end_found(half, error, ending, done),
            )

    def _is_held(self, first_position: int, ending: Ending, done: Done) -> bool:
        """Whether an end waits until the half message has its new place."""
        held = self._moving.get(first_position)
        if held is None:
            return False
        if len(held) >= _ENDS_HELD_MAX:
            raise Busy("the half message is being moved; try again")
        held.append((ending, done))
        return True

    def _find(self, position: int) -> Half | None:
        """The half message that lies or lay there. May raise ColdRead."""
        offset = self.table.find(position)
        if offset is None:
            self.catch_up()
            offset = self.table.find(position)
        if offset is not None and self.table.is_open(offset):
            return self._open_half_at(self.table.position(offset))
        return self._half_at(position)

    def _half_at(self, position: int) -> Half | None:
        """The half message at a position, if there is one. May raise ColdRead."""
        entry = self._store.entry_at(position)
        return None if entry is None else forms.read_half(entry)

    def _open_half_at(self, position: int) -> Half | None:
        """The same where one is known to be; it is looked at once if it is in memory for sure."""
        log = self._store.log
        if position >= self._store.reader.hot_from:
            at = position % log.segment_bytes
            with suppress(records.BadRecord):  # the other way tells what is wrong with it
                return forms.read_half(log.segments[position - at].file.view(), at, position)
        return self._half_at(position)

    def _end_found(
        self, half: Half | None, error: BaseException | None, ending: Ending, done: Done
    ) -> None:
        try:
            if error is not None:
                raise error if isinstance(error, SluiceError) else SluiceError(str(error))
            half = forms.check_ending(half, ending)
            if self._is_held(half.first_position, ending, done):
                return
            if not self.table.is_open(half.offset):
                self._end_again(half, ending)
                done(None)
                return
            core = self._core
            forms.check_in_time(half, ending, core.now_ms(), core.config.transaction_timeout_ms)
            if ending.verdict == forms.COMMIT:
                self._commit(half, done)
            else:
                self._roll_back(half, done)
        except SluiceError as refusal:
            done(refusal)

    def _end_again(self, half: Half, ending: Ending) -> None:
        """A second word: it may only repeat the first one."""
        before = self._ended.get(half.first_position, "ended")
        log_lines.info(
            "%s of group %s was %s before: another word changes nothing",
            *(half.unique_key, half.group, before),
        )
        forms.check_repeated(before, ending)

    def _commit(self, half: Half, done: Done) -> None:
        core = self._core
        settings = core.topics.get(half.topic)
        if settings is None:
            raise TopicMissing(f"topic[{half.topic}] not exist: the half message stays open")
        queue_id = half.queue_id
        if queue_id >= max(settings.write_queues, settings.read_queues):
            queue_id %= max(1, settings.write_queues)
        checks = half.checks + self.table.asked(half.offset)
        message = forms.committed_form(half, checks, queue_id)
        keys = records.message_keys(message.properties)

        def confirmed(error: SluiceError | None) -> None:
            if error is not None:
                self.reopen(half.offset, half.position, half.first_position)
            else:
                self.committed_count += 1
                self._settle_key(half, committed=True)
                if core.polls.is_awaited:
                    code = records.java_hash(keys[2]) if keys[2] else 0
                    core.polls.arrived((half.topic, queue_id), code)
            done(error)

        placed = core.append(message, confirmed, keys)
        core.stats.stored(half.topic, 1, placed.size)
        self.committed_to(half.offset, half.first_position, placed.position)

    def committed_to(self, offset: int, first_position: int, made_at: int) -> None:
        """What a half message was about is staged in its topic: nobody else may end it."""
        self._close(offset, first_position, forms.VERDICTS[forms.COMMIT])
        self._operations.done(offset, made_at)

    def is_moving(self, first_position: int) -> bool:
        """Whether it gets a new place just now, for which its end has to wait."""
        return first_position in self._moving

    def _roll_back(self, half: Half, done: Done) -> None:
        def written(error: SluiceError | None) -> None:
            if error is None:
                self.rolled_back_count += 1
                self._settle_key(half, committed=False)
            done(error)

        self._store.require_writable()
        self._close(half.offset, half.first_position, forms.VERDICTS[forms.ROLLBACK])
        self._operations.done(half.offset, self._store.log.written, written)

    def _settle_key(self, half: Half, *, committed: bool) -> None:
        """What became of it is stored: who sends the same business key may be answered."""
        self._core.dedup.ended(
            half.topic, half.entry.properties, half.first_position, committed=committed
        )

    def _close(self, offset: int, first_position: int, outcome: str) -> None:
        self.table.close(offset)
        self._ended[first_position] = outcome
        if len(self._ended) > ENDED_MAX:
            del self._ended[next(iter(self._ended))]

    def reopen(self, offset: int, position: int, first_position: int) -> None:
        """What was to be made of a half message could not be stored: it is open as before."""
        self._operations.undone(offset)
        self._ended.pop(first_position, None)
        self.table.reopen(offset, position, first_position, self._core.now_ms())

    # ------------------------------------------------------------------------------------ questions

    def _wake_waiting(self, now_ms: int) -> None:
        """Producers have come for whom half messages have waited."""
        producers = self._core.clients.producers
        for group in self._waiting.keys() & producers.keys() if self._waiting else ():
            offsets = self._waiting[group]
            for offset in offsets[-WOKEN_A_TICK:]:
                if self.table.is_open(offset):
                    self.table.schedule(offset, now_ms)
            del offsets[-WOKEN_A_TICK:]
            if not offsets:
                del self._waiting[group]

    @property
    def waiting_count(self) -> int:
        """How many wait for a producer of their group; some of them may be done."""
        return sum(map(len, self._waiting.values()))

    def _look_at_due(self, now_ms: int) -> None:
        for _ in range(LOOKS_A_TICK):
            if len(self._reading) >= _READS_MAX:
                return
            offset = self.table.pop_due(now_ms)
            if offset is None:
                return
            self._read(offset, self._look_at)

    def _read(self, offset: int, then: Callable[[Half], None]) -> None:
        """Read an open half message, for something to be done with it if it still is open."""

        def read(half: Half | None, error: BaseException | None) -> None:
            self._reading.discard(offset)
            if not self.table.is_open(offset):
                return
            if half is None and (error is None or isinstance(error, RecordDamaged)):
                self._give_up(offset, error)
                return
            try:
                if half is not None:
                    then(half)
                    return
                problem = error
            except SluiceError as refusal:
                problem = refusal
            log_lines.error("half message %d has to wait: %s", offset, problem)
            self.table.schedule(offset, self._core.now_ms() + self.rules.interval_ms)

        if offset not in self._reading:
            self._reading.add(offset)
            self._store.call(lambda: self._open_half_at(self.table.position(offset)), read)

    def _give_up(self, offset: int, error: BaseException | None) -> None:
        """An entry that cannot be read can be neither asked about nor committed."""
        position = self.table.position(offset)
        log_lines.error(
            "half message %d at %d is lost: %s", offset, position, error or "it is incomplete"
        )
        self.table.close(offset)
        self._operations.done(offset, position)

    def _look_at(self, half: Half) -> None:
        """A half message is due: it is asked about, or parked, or it has to wait."""
        now_ms, table, rules = self._core.now_ms(), self.table, self.rules
        checks = half.checks + table.asked(half.offset)
        step, until_ms = forms.next_step(half, checks, now_ms, rules)
        if step == forms.PARK:
            self._park(half, checks)
            return
        if step == forms.WAIT:
            table.schedule(half.offset, until_ms)
            return
        client = self._producer(half.group)
        if client is None:
            self._waiting.setdefault(half.group, array("q")).append(half.offset)
            table.schedule(half.offset, half.since_ms + rules.age_max_ms + 1)
            return
        table.note_asked(half.offset)
        table.schedule(half.offset, now_ms + rules.interval_ms)
        self._operations.asked(half.offset)
        self.asked_count += 1
        self.ask(client, half, checks + 1)

    def _producer(self, group: str) -> Client | None:
        """One of the producers of a group, another one each time."""
        members = self._core.clients.producers.get(group)
        if not members:
            return None
        self._turn += 1
        return list(members.values())[self._turn % len(members)]

    def _park(self, half: Half, checks: int) -> None:
        core = self._core
        core.topics.create_inner(CHECK_MAX_TOPIC, 1)

        def confirmed(error: SluiceError | None) -> None:
            if error is not None:
                self.reopen(half.offset, half.position, half.first_position)
            else:
                self.parked_count += 1
                self._settle_key(half, committed=False)

        message = forms.parked_form(half.entry, half.first_position, checks)
        placed = core.append(message, confirmed)
        core.stats.stored(CHECK_MAX_TOPIC, 1, placed.size)
        self._close(half.offset, half.first_position, "parked")
        self._operations.done(half.offset, placed.position)
        log_lines.warning(
            "%s of group %s is parked in %s: it was asked about %d times, and nobody knew",
            half.unique_key,
            half.group,
            CHECK_MAX_TOPIC,
            checks,
        )

    def open_half(self, offset: int) -> Half | None:
        """An open half message; None where it is done. May raise ColdRead."""
        return self._half_at(self.table.position(offset)) if self.table.is_open(offset) else None

    def why(self, half: Half) -> tuple[int, int, str]:
        """How often an open half message was asked about, when it is next, what it waits for."""
        core, table, rules = self._core, self.table, self.rules
        if not table.is_open(half.offset):
            return half.checks, -1, "it is being ended"
        checks = half.checks + table.asked(half.offset)
        due_ms = max(table.due_ms(half.offset), core.now_ms())
        if checks >= rules.count_max:
            return checks, due_ms, f"nobody knew, asked {checks} times: it will be parked"
        if not core.clients.producers.get(half.group):
            return checks, -1, f"no producer of group {half.group} is connected"
        if core.topics.get(half.topic) is None:
            return checks, due_ms, f"topic {half.topic} is gone: it cannot be committed"
        if not checks:
            return checks, due_ms, "its producer may still end it: nobody was asked yet"
        return checks, due_ms, "a producer was asked and did not know, or did not answer"

    # --------------------------------------------------------------------------------------- places

    def _move_front(self) -> None:
        """A few that stay open for long must not make a start read everything since them."""
        table = self.table
        lowest = table.lowest_open
        if table.next_offset - lowest <= 2 * table.open_count + SPREAD_SLACK:
            return
        for count, offset in enumerate(table.open_from(lowest), 1):
            self._read(offset, self._copy)
            if count == COPIES_A_TICK:
                return

    def rescue(self, position: int) -> bool:
        """Retention takes everything below a position: what is open there is copied.

        Returns whether nothing open is left there.
        """
        if not self.follow():
            return False
        table = self.table
        for count, offset in enumerate(table.open_from(table.lowest_open)):
            if table.position(offset) >= position or count == RESCUED_MAX:
                break
            if len(self._reading) >= _READS_MAX:
                break  # the disk is asked for as many as it may be
            self._read(offset, self._copy)
        # Of those that were read at once the log has copies, before anything of it goes.
        lowest = table.lowest_open
        return not table.is_open(lowest) or table.position(lowest) >= position

    def _copy(self, half: Half, *, anew: bool = False, done: Done | None = None) -> None:
        """Store an open half message once more, at the end of the queue."""
        table = self.table
        checks = 0 if anew else half.checks + table.asked(half.offset)
        due_ms = table.due_ms(half.offset)
        message = forms.copied_form(half, checks)
        first = half.first_position

        def confirmed(error: SluiceError | None) -> None:
            held = self._moving.pop(first)
            if error is not None:
                table.forget_copy(placed.queue_offset)
                self.reopen(half.offset, half.position, half.first_position)
            elif self.follow() and table.is_open(placed.queue_offset) and not anew:
                table.schedule(placed.queue_offset, max(due_ms, 0))
            for ending, told in held:
                self.end(ending, told)
            if done is not None:
                done(error)

        # Also where the disk is nearly full: without it nothing could be deleted.
        placed = self._store.stage(message, confirmed, durable=True)
        self._core.ask_turn()
        self._moving[first] = []
        table.close(half.offset)
        table.note_copy(placed.queue_offset, first)
        self._operations.done(half.offset, placed.position)
        if half.group in self._waiting:
            self._waiting[half.group].append(placed.queue_offset)

    def resume(self, position: int, done: Done) -> None:
        """Begin anew to ask about a half message that is open or parked."""

        def look() -> memoryview | None:
            self.catch_up()
            offset = self.table.find(position)
            if offset is not None and self.table.is_open(offset):
                return self._store.entry_at(self.table.position(offset))
            return self._store.entry_at(position)

        def found(stored: memoryview | None, error: BaseException | None) -> None:
            try:
                if stored is None:
                    raise NotFound(f"no message can be read at {position} of the log")
                self._resume_entry(stored, done)
            except SluiceError as refusal:
                done(refusal)

        if position in self._moving:
            raise Busy("the half message is being moved; try again")
        self._store.call(look, found)

    def _resume_entry(self, stored: memoryview, done: Done) -> None:
        half = forms.read_half(stored)
        if half is not None and self.table.is_open(half.offset):
            self._copy(half, anew=True, done=done)
            return
        entry = records.decode(stored)
        if entry.topic != CHECK_MAX_TOPIC:
            raise NotFound("the message is neither an open half message nor a parked one")
        key = f"{RESUMED_KEY} {entry.position}"
        if self._store.state.newest(TABLE, key) is not None:
            raise IllegalOperation("the message has been made a half message again already")
        gone = [
            (TABLE, old, None)
            for old in self._store.table(TABLE)
            if old.startswith(RESUMED_KEY) and int(old.split()[1]) < self._store.log.start
        ]
        self._core.append(forms.resumed_form(entry))
        self._store.change([*gone, (TABLE, key, 1)], done)
        self._core.ask_turn()

    # ------------------------------------------------------------------------------------- progress

    def _note_progress(self, now_ms: int) -> None:
        """Write down from where on a start has to read, at most once a second."""
        if now_ms - self._noted_ms < PROGRESS_MS:
            return
        store, table, operations = self._store, self.table, self._operations
        half = table.lowest_open
        operation = operations.needed_from(half)
        walk = operations.walk_from(store.log.written)
        is_stale = table.open_count > 0 and walk - self._noted[2] > PROGRESS_BYTES
        offsets = self._core.offsets
        if (half, operation) == self._noted[:2] and not is_stale:
            # Nobody else has a say in these offsets.
            if offsets.committed(GROUP, HALF_TOPIC, 0) not in (None, half):
                self._tell_apache(half, operation)
            return

        def noted(error: SluiceError | None) -> None:
            if error is None:
                self._tell_apache(half, operation)
            else:
                self._noted = (-1, -1, -1)

        try:
            store.change(
                [(TABLE, PROGRESS_KEY, {"half": half, "operation": operation, "walk": walk})],
                noted,
            )
        except SluiceError:
            return  # the store says itself why it takes nothing; a start reads more instead
        self._core.ask_turn()
        self._noted, self._noted_ms = (half, operation, walk), now_ms

    def _tell_apache(self, half: int, operation: int) -> None:
        """Progress as Apache's broker keeps it; after our own note, which is never behind it."""
        self._core.offsets.note_own(GROUP, HALF_TOPIC, 0, half)
        self._core.offsets.note_own(GROUP, OP_TOPIC, 0, operation)
