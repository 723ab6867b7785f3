"""This module compacts topics that ask for it: of each key the newest record stays, at its offset.

One partition at a time, in steps of some hundred kilobytes, one a tick:

    1. read what is new, and note the newest offset of each key
    2. read all of it, and append what stays to the log, as entries of a topic of the broker's own
    3. write one row of a table: from then on readers get the partition's beginning from there

Before the row nothing has changed for anybody, after it everything has; what a crash leaves of the
first two steps is removed at the start (`storage/compacted.py`). What compaction has kept outlives
the files of the log that it came from: retention asks before it deletes them, and what is in them
is copied first. Methods belong to the store's owner.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from sluice.broker.compaction_plan import Plan, Policy, lies_below, plan, policy_of
from sluice.errors import MessageIllegal, RecordDamaged, SluiceError
from sluice.protocol import kafka_batches, kafka_compaction, kafka_entries, kafka_views, records
from sluice.protocol.kafka_batches import BadBatch
from sluice.protocol.kafka_compaction import Kept, Rules
from sluice.protocol.kafka_keys import keys_of
from sluice.storage.compacted import attach, hidden_topic, message_of
from sluice.storage.state import COMPACTED_PREFIX, COMPACTED_TABLE
from sluice.storage.store import ColdRead, ReadStatus
from sluice.storage.whole_batches import WholeBatch, stage_whole

if TYPE_CHECKING:
    from sluice.broker.core import BrokerCore
    from sluice.storage.queue_index import QueueIndex

QueueName = tuple[str, int]
Done = Callable[[SluiceError | None], None]
KEYS_MAX: Final = 500_000  # noted in one run; what is beyond them is the next one's
_STEP_BYTES: Final = 256 * 1024
_STEP_ENTRIES: Final = 256
_PLANS_A_TICK: Final = 20
log_lines = logging.getLogger("sluice.broker")


class Job:
    """The compaction of one partition."""

    def __init__(
        self, core: BrokerCore, name: QueueName, queue: QueueIndex, policy: Policy, todo: Plan
    ) -> None:
        self.core = core
        self.name = name
        self.queue = queue
        self.todo = todo
        self.policy = policy
        self.clean_end = todo.clean_end
        self.newest: dict[bytes, int] = {}
        self.is_noting = True  # of the newest offsets; then what stays is copied
        self.is_waiting = False
        self.is_over = False
        self.at = todo.clean
        self.kept_count = 0
        self.is_done = False  # it came to its end, and readers see what it has made
        self.read_bytes = self.copied_bytes = self.kept_bytes = 0
        self.hidden = self._free_name()

    def _free_name(self) -> str:
        """The one of the two names that readers do not use."""
        topic, queue_id = self.name
        shown = self.core.kafka_topics.kafka_name(topic)
        found = None if shown is None else self.core.kafka_topics.find(shown)
        topic_id = "none" if found is None else found.id.hex
        older = self.queue.older
        used = "" if older is None else older.queue.key.topic
        first = hidden_topic(topic_id, queue_id, 0)
        return hidden_topic(topic_id, queue_id, 1) if first == used else first

    # ---------------------------------------------------------------------------------------- steps

    def step(self) -> None:
        """Do a little more of it."""
        store = self.core.store
        if self.is_waiting or self.is_over:
            return
        if store.queues.get(self.name) is not self.queue:
            self.is_over = True  # the topic was deleted
            return
        end = self.clean_end if self.is_noting else self.todo.upto
        if self.at < end:
            self.is_waiting = True
            store.call(lambda: self._read(end), self._was_read)
        elif self.is_noting:
            self.is_noting = False
            self.at = self.queue.start_offset
            if (self.hidden, self.name[1]) in store.queues:
                self._give_up("what an earlier run has left is in the way")
        else:
            self._switch()

    def _read(self, end: int) -> tuple[int, list[records.Entry]]:
        """Entries from where the job is, below `end`; and where it is afterwards."""
        store = self.core.store
        try:
            result = store.read(*self.name, self.at, count_max=_STEP_ENTRIES, bytes_max=_STEP_BYTES)
        except RecordDamaged as error:
            # Nobody can read it, and when its file goes it is gone.
            log_lines.error("compaction of %s steps over a damaged entry: %s", self.name, error)
            return max(self.at + 1, error.next_queue_offset), []
        if result.status not in (ReadStatus.FOUND, ReadStatus.NO_MATCHED_MESSAGE):
            return max(self.at + 1, result.min_offset), []
        found = [records.decode(view) for view in result.messages]
        return result.next_offset, [entry for entry in found if entry.queue_offset < end]

    def _was_read(
        self, found: tuple[int, list[records.Entry]] | None, error: BaseException | None
    ) -> None:
        self.is_waiting = False
        if found is None:
            self._give_up(str(error))
            return
        next_offset, entries = found
        byte_count = sum(entry.size for entry in entries)
        self.read_bytes += byte_count
        try:
            if self.is_noting:
                self._note(entries)
            else:
                self.copied_bytes += byte_count
                self._copy(entries)
        except SluiceError as failure:
            self._give_up(str(failure))
            return
        self.at = next_offset

    def _give_up(self, reason: str) -> None:
        self.is_over = True
        log_lines.error("compaction of %s was given up for now: %s", self.name, reason)

    # ----------------------------------------------------------------------------------- what stays

    def _committed(self, entries: list[records.Entry]) -> Iterator[records.Entry]:
        """Those entries of which a record may stay: no transaction has rolled them back."""
        stable = self.core.producers.stable_offsets(*self.name)
        for entry in entries:
            head = kafka_compaction.head_of(entry)
            if head is not None and head.is_transactional and not head.is_control:
                at = entry.queue_offset
                clean = 0 if self.queue.older is None else self.queue.older.clean
                aborted = stable.aborted(max(at, clean), at + 1)
                if any(producer_id == head.producer_id for producer_id, _ in aborted):
                    continue
            yield entry

    def _note(self, entries: list[records.Entry]) -> None:
        newest, unpacked_max = self.newest, self.core.config.kafka_unpacked_bytes_max
        for entry in self._committed(entries):
            if entry.queue_offset >= self.clean_end:
                return
            head = kafka_compaction.head_of(entry)
            if head is not None and head.is_control:
                continue
            try:
                newest.update(kafka_compaction.keys_of(entry, unpacked_max))
            except BadBatch as bad:
                log_lines.error("compaction of %s: a batch is damaged: %s", self.name, bad)
            if len(newest) >= KEYS_MAX:
                self.clean_end = kafka_compaction.end_of(entry)
                return

    def _copy(self, entries: list[records.Entry]) -> None:
        """Append what stays of entries; the next step comes when it is stored."""
        unpacked_max = self.core.config.kafka_unpacked_bytes_max
        rules = Rules(self.newest, self.core.now_ms(), self.policy.tombstone_ms, unpacked_max)
        young = [entry for entry in entries if entry.queue_offset >= self.clean_end]
        old = [entry for entry in entries if entry.queue_offset < self.clean_end]
        kept: list[tuple[records.Entry, Kept]] = []
        for entry in self._committed(old):
            try:
                left = kafka_compaction.kept_of(entry, rules)
            except BadBatch as bad:
                log_lines.error("compaction of %s: a batch is lost: %s", self.name, bad)
                continue
            if left is not None:
                kept.append((entry, left))
        kept += [(entry, _as_it_is(entry)) for entry in young]
        if not kept:
            return
        self.is_waiting = True
        left_count = len(kept)

        def stored(error: SluiceError | None) -> None:
            nonlocal left_count
            left_count -= 1
            if error is not None and not self.is_over:
                self._give_up(str(error))
            self.is_waiting = left_count > 0

        try:
            for entry, each in kept:
                self._append(entry, each, stored)
        except SluiceError:
            self.is_waiting = False
            raise
        finally:
            self.core.ask_turn()
        self.kept_count += sum(each.record_count for _, each in kept)

    def _append(self, entry: records.Entry, kept: Kept, stored: Done) -> None:
        store, queue_id, offset = self.core.store, self.name[1], entry.queue_offset
        queue = store.queues.get((self.hidden, queue_id))
        if queue is None:
            queue = store.queue(self.hidden, queue_id)
            queue.start_at(0, offset)
        queue.next_offset = offset
        if kept.batch is None:
            try:
                self.kept_bytes += store.stage(message_of(entry, self.hidden), stored).size
            except MessageIllegal:
                # The limits were other ones when it came. Those of batches are wider.
                unpacked_max = self.core.config.kafka_unpacked_bytes_max
                batch = kafka_views.batch_of([entry], unpacked_max, append_time=False)
                self._append(entry, Kept(batch, kafka_batches.read_head(batch), 1), stored)
            return
        head = kept.head
        assert head is not None, "a batch has a head"
        whole = WholeBatch(
            self.hidden,
            queue_id,
            kafka_batches.patched(head.length, head.leader_epoch),
            memoryview(kept.batch)[kafka_batches.PATCHED_BYTES :],
            head.last_delta + 1,
            kafka_entries.code_of(head.max_ms, head.attributes),
            entry.born_ms,
            entry.born_host,
            keys_of(head, kept.batch) if store.config.kafka_key_index else b"",
        )
        self.kept_bytes += stage_whole(store, whole, stored).size

    # --------------------------------------------------------------------------------------- ending

    def _switch(self) -> None:
        """All that stays is in the log: one row says so."""
        core, (topic, queue_id) = self.core, self.name
        self.is_waiting = True
        before = self.queue.older
        row = {
            "topic": self.hidden,
            "upto": self.todo.upto,
            "clean": self.clean_end,
            "start": self.queue.start_offset,
        }

        def noted(error: SluiceError | None) -> None:
            self.is_waiting = False
            if error is not None:
                self._give_up(str(error))
                return
            self.is_over = True
            if core.store.queues.get(self.name) is not self.queue:
                return
            self.is_done = True
            attach(core.store, topic, queue_id, row)
            log_lines.info(
                "compacted %s up to offset %d: %d records stay", topic, self.clean_end,
                self.kept_count,
            )  # fmt: skip
            if before is not None:
                remove(core, before.queue.key.topic)

        core.store.change([(COMPACTED_TABLE, f"{topic}@{queue_id}", row)], noted)
        core.ask_turn()


def _as_it_is(entry: records.Entry) -> Kept:
    head = kafka_compaction.head_of(entry)
    if head is None:
        return Kept(None, None, 1)
    return Kept(bytes(entry.body), head, head.record_count)


def remove(core: BrokerCore, hidden: str) -> None:
    """Nobody reads this topic of the broker's own any more."""
    if core.store.has_queues(hidden):
        core.store.delete_topic(hidden)
        core.ask_turn()


@dataclass(slots=True)
class Work:
    """What compaction has done since the start: for metrics."""

    passes: int = 0  # over one partition each, that came to their end
    read_bytes: int = 0  # of all passes: of each, twice what it copied from, at most
    dropped_bytes: int = 0  # entries that it went through, less what it wrote of them
    last_ms: int = 0  # when the last pass ended; 0 where there was none

    def count(self, job: Job, now_ms: int) -> None:
        self.read_bytes += job.read_bytes
        if job.is_done:
            self.passes += 1
            self.last_ms = now_ms
            self.dropped_bytes += max(0, job.copied_bytes - job.kept_bytes)


class Compaction:
    """The compaction of one broker's topics."""

    def __init__(self, core: BrokerCore) -> None:
        self._core = core
        self._looked_ms = core.now_ms()
        self._left: list[QueueName] = []
        self._is_planning = False
        self._job: Job | None = None
        # Partitions in which there was nothing to do, as they were then.
        self._idle: dict[QueueName, tuple[QueueIndex, int, Policy]] = {}
        self.work = Work()
        core.store.housekeeping.rescuers.append(self._is_clear)

    def start(self) -> None:
        """What a crash has left half done goes."""
        self._sweep()

    def tick(self, now_ms: int) -> None:
        job = self._job
        if job is not None:
            job.step()
            if job.is_over:
                self._job = None
                self.work.count(job, now_ms)
                self._sweep()
            return
        if self._is_planning or self._core.store.refusal is not None:
            return
        if not self._left and now_ms - self._looked_ms >= self._core.config.compaction_interval_ms:
            self._looked_ms = now_ms
            self._sweep()
            self._follow()
            self._left = [name for name, _, _ in self._compacted()]
            self._idle = {name: self._idle[name] for name in self._left if name in self._idle}
        for _ in range(min(len(self._left), _PLANS_A_TICK)):
            if self._is_busy():
                return
            self._plan(self._left.pop(0), now_ms)

    def _is_busy(self) -> bool:
        return self._is_planning or self._job is not None

    def _sweep(self) -> None:
        """Remove what no row names and no run is making."""
        store = self._core.store
        named = {row["topic"] for row in store.table(COMPACTED_TABLE).values()}
        if self._job is not None:
            named.add(self._job.hidden)
        for hidden in {topic for topic, _ in store.queues if topic.startswith(COMPACTED_PREFIX)}:
            if hidden not in named:
                try:
                    remove(self._core, hidden)
                except SluiceError as error:
                    log_lines.error("%s could not be removed: %s", hidden, error)

    def _follow(self) -> None:
        """Partitions that are not compacted any more begin where the log still has entries."""
        core = self._core
        for key in core.store.table(COMPACTED_TABLE):
            topic, _, queue_id = key.rpartition("@")
            queue, settings = core.store.queues.get((topic, int(queue_id))), core.topics.get(topic)
            older = None if queue is None else queue.older
            if older is None or settings is None or policy_of(settings) is not None:
                continue
            kept = older.queue
            if kept.count > kept.first:
                older.start = max(older.start, kept.start_offset)
            else:
                self._leave(topic, int(queue_id))

    def _leave(self, topic: str, queue_id: int) -> None:
        """Nothing is left of what was kept of a partition: it is read as it lies."""
        core = self._core

        def noted(error: SluiceError | None) -> None:
            queue = core.store.queues.get((topic, queue_id))
            if error is None and queue is not None:
                queue.older = None

        try:
            core.store.change([(COMPACTED_TABLE, f"{topic}@{queue_id}", None)], noted)
        except SluiceError as error:
            log_lines.error("%s keeps its compacted part for now: %s", topic, error)
            return
        core.ask_turn()

    def _compacted(self) -> Iterator[tuple[QueueName, QueueIndex, Policy]]:
        """All partitions of topics that are compacted."""
        core = self._core
        for topic in core.topics.names():
            settings = core.topics.get(topic)
            policy = policy_of(settings) if settings is not None else None
            if settings is None or policy is None:
                continue
            for queue_id in range(max(settings.read_queues, settings.write_queues)):
                queue = core.store.queues.get((topic, queue_id))
                if queue is not None and queue.kind == "b":
                    yield (topic, queue_id), queue, policy

    def _plan(self, name: QueueName, now_ms: int, rescue_below: int = 0) -> None:
        core = self._core
        queue, settings = core.store.queues.get(name), core.topics.get(name[0])
        if queue is None or settings is None:
            return
        policy = policy_of(settings)
        if policy is None:
            return
        state = (queue, queue.end_offset, policy)
        if self._idle.get(name) == state and not rescue_below:
            return
        self._idle.pop(name, None)

        def planned(todo: Plan | None, error: BaseException | None) -> None:
            self._is_planning = False
            if error is not None:
                log_lines.error("%s cannot be looked at for compaction now: %s", name, error)
            elif todo is None and policy.is_timeless:
                self._idle[name] = state
            elif todo is not None and self._job is None:
                self._job = Job(core, name, queue, policy, todo)

        self._is_planning = True
        core.store.call(lambda: plan(core, name, queue, policy, now_ms, rescue_below), planned)

    def clean_end(self, topic: str, queue_id: int) -> int:
        """Up to which offset a partition was compacted; 0 where it never was."""
        queue = self._core.store.queues.get((topic, queue_id))
        return 0 if queue is None or queue.older is None else queue.older.clean

    # --------------------------------------------------------------------------------------- rescue

    def _is_clear(self, position: int) -> bool:
        """Whether no partition that is compacted needs the log below a position; otherwise one of
        those that do is copied now.
        """
        core = self._core
        try:
            needy = [
                name for name, queue, _ in self._compacted() if lies_below(core, queue, position)
            ]
        except ColdRead:
            self._warm(position)
            return False
        if needy and not self._is_busy() and core.store.refusal is None:
            self._plan(needy[0], core.now_ms(), position)
        return not needy

    def _warm(self, position: int) -> None:
        """Bring into memory what the next question needs."""
        core = self._core
        queues = [queue for _, queue, _ in self._compacted()]
        core.store.call(
            lambda: [lies_below(core, queue, position) for queue in queues], lambda _, error: None
        )
