"""This module is the store as the rest of the package sees it: append, read, query, settings,
positions.

One owner (usually an event loop) calls everything here; slow work goes to the background and comes
back.

    stage(message, done)   decides place and offset, encodes; nothing is written yet
    write_staged()         all that was staged in this turn goes to the log in one call
    ... done(None)         the entry is confirmed: durable (flush=sync), or written (flush=async)
    read(...)              slices of the log up to the confirmed position; may raise ColdRead
    change(...)            settings: an entry of the log like any other, effective when durable
    tick()                 timers: flush, checkpoint, retention, offsets; some ten times a second

What is staged and cannot be written is undone completely: offsets are given away only once. After a
failed fsync the store is read-only until it is opened anew.

The store knows no wire and no sockets; time comes from `now_ms`, the disk from `Files`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple, TypeVar

from sluice.config import StoreConfig, settings_of
from sluice.errors import (
    ConfigError,
    DiskFull,
    MessageIllegal,
    ParameterInvalid,
    SluiceError,
    StoreReadOnly,
)
from sluice.model import Message, Placed, QueueKey
from sluice.protocol import records
from sluice.protocol.lifetimes import EXPIRES_NAME
from sluice.storage.admission import check_count, check_topic, with_base
from sluice.storage.background import Background
from sluice.storage.checkpoint import Row
from sluice.storage.closing import shut
from sluice.storage.cold_reads import ColdReads
from sluice.storage.commit_log import CommitLog
from sluice.storage.files import FileLock, Files
from sluice.storage.flush import Confirmed, Flusher
from sluice.storage.housekeeping import Housekeeping
from sluice.storage.indexing import Indexing, indexed
from sluice.storage.key_batches import Found, Noted
from sluice.storage.key_queries import QueryDone, query_key
from sluice.storage.memory_topics import MEMORY_FLOOR, MemoryTopics
from sluice.storage.offset_commits import OffsetCommits
from sluice.storage.queue_index import BatchQueueIndex, ColdRead, QueueFiles, QueueIndex
from sluice.storage.reads import Accept, Reader, ReadResult, ReadStatus
from sluice.storage.snapshot import DurableMark
from sluice.storage.state import (
    DELAY_TABLE,
    FORBIDDEN_TABLE,
    GROUP_TABLE,
    OFFSET_TABLE,
    REQUEST_MODE_TABLE,
    SETTING_TABLE,
    STATE_TOPIC,
    TOPIC_TABLE,
    Change,
    StateTables,
)
from sluice.storage.topic_removal import TopicRemoval

T = TypeVar("T")

_OFFSET_MAX: Final = (1 << 63) - 1
_STATE_BYTES_MAX: Final = 4 << 20

log_lines = logging.getLogger("sluice.storage")
_new_tuple = tuple.__new__  # half the time of Placed(), which runs once per message


# What `write_staged` needs of each staged entry; a plain tuple, because there is one per message.
_Keys = tuple[bytes, bytes, bytes]
# Queue, its units, the offsets they take, keys, end in the log, who waits, durable.
Staged = tuple[QueueIndex, bytes, int, Sequence[Noted], int, Confirmed | None, bool]


class Recovery(NamedTuple):
    """What opening the store did, for the log and for `sluice inspect`."""

    scanned_from: int
    end: int
    entry_count: int
    rebuilt: bool
    cut_files: list[str]


class Store:
    """One store, open. Made by `sluice.storage.opening.open_store`."""

    def __init__(
        self,
        config: StoreConfig,
        files: Files,
        background: Background,
        now_ms: Callable[[], int],
        store_host: bytes,
    ) -> None:
        self.config = config
        self.root = config.directory
        self.files = files
        self.background = background
        self.now_ms = now_ms
        self._store_host = store_host
        self.encoder = self._new_encoder(config.message_bytes_max)
        # The store's own entries have a limit of their own: they must not fail for a message's.
        self._state_encoder = self._new_encoder(_STATE_BYTES_MAX)
        log_sizes = (config.segment_bytes, config.log_cached_bytes_min)
        self.log = CommitLog(files, f"{self.root}/commitlog", background, *log_sizes)
        self.queue_files = QueueFiles(files)
        self.queues: dict[tuple[str, int], QueueIndex] = {}
        self.state = StateTables()
        self.rows: dict[QueueKey, Row] = {}
        self.last_ms = 0  # store time of the newest entry: it never goes back
        # Set by `begin`, when recovery is done.
        self.lock: FileLock
        self.mark: DurableMark
        self.flusher: Flusher
        self.reader: Reader
        self.indexing: Indexing
        self.recovery: Recovery
        self.housekeeping: Housekeeping
        self._confirmed = 0
        self.staged: list[Staged] = []
        self._turn_ms = 0
        self._refusal: SluiceError | None = None
        self._delay_levels_ms = config.delay_levels_ms
        self._sync = config.flush == "sync"
        self._dirty: list[QueueIndex] = []
        self.offsets = OffsetCommits(self)
        self.removal = TopicRemoval(self)
        self.memory = MemoryTopics(self)
        self.cold_reads = ColdReads(self)
        self.closed = False
        self.released = False  # the directory may be somebody else's now
        self.append_count = 0

    def begin(
        self,
        lock: FileLock,
        mark: DurableMark,
        indexing: Indexing,
        recovery: Recovery,
        last_ms: int,
    ) -> None:
        """Recovery is done: what it found becomes the store's state."""
        self.lock, self.mark, self.indexing, self.recovery = lock, mark, indexing, recovery
        self.last_ms = self.log.newest_ms = last_ms
        self._confirmed = self.log.written
        self.flusher = Flusher(
            self.background, self.log.files_between, mark.write, self._flushed, self.log.written
        )
        self.reader = Reader(
            self.log, self.queue_files, recovery.scanned_from, self.config.hot_bytes
        )
        self.housekeeping = Housekeeping(self)

    def _new_encoder(self, body_bytes_max: int) -> records.Encoder:
        return records.Encoder(
            self._store_host,
            with_crc=self.config.message_crc,
            body_bytes_max=body_bytes_max,
            entry_bytes_max=self.config.segment_bytes - records.BLANK_BYTES,
        )

    def reconfigure(self, config: StoreConfig) -> None:
        """Take over settings that may change while the store is open."""
        for name, setting in settings_of(StoreConfig).items():
            if not setting.dynamic and getattr(config, name) != getattr(self.config, name):
                raise ConfigError(f"{name}: takes effect at start only")
        self.config = config
        self.encoder = self._new_encoder(config.message_bytes_max)
        self.reader.hot_bytes = config.hot_bytes
        self.housekeeping.reconfigure(config)

    # --------------------------------------------------------------------------------------- queues

    def queue(self, topic: str, queue_id: int, *, batches: bool | None = None) -> QueueIndex:
        """The queue, made where it is not there yet: of the topic's kind, unless one is named."""
        queue = self.queues.get((topic, queue_id))
        if queue is None:
            check_topic(topic)
            if batches is None:
                batches = self.state.counts_batches(topic)
            kind = BatchQueueIndex if batches else QueueIndex
            queue = kind(QueueKey(topic, queue_id), self.root, self.config.queue_file_units)
            self.queues[topic, queue_id] = queue
        return queue

    def has_queues(self, topic: str) -> bool:
        return any(key[0] == topic for key in self.queues)

    @property
    def confirmed(self) -> int:
        """Everything below this position may be read."""
        return self._confirmed

    # ------------------------------------------------------------------------------------ appending

    def stage(
        self,
        message: Message,
        done: Confirmed | None = None,
        keys: _Keys | None = None,
        *,
        durable: bool = False,
    ) -> Placed:
        """Give a message its place. `done` is called exactly once: None = confirmed, or the error.

        `keys` is what `records.message_keys` finds, where somebody has looked already. `durable` is
        for the store's own entries: they wait for the disk also where flush=async.
        """
        # Settings and positions are stored also when the disk is nearly full: deleting needs them.
        if self._refusal is not None and not (durable and isinstance(self._refusal, DiskFull)):
            raise self._refusal
        queue = self.queues.get((message.topic, message.queue_id))
        if queue is None:
            if self.memory.holds(message.topic):
                return self.memory.stage(message, done)
            queue = self.new_queue(message)
        encoder = self._state_encoder if durable else self.encoder
        size = encoder.measure(message, queue.topic_bytes)
        if message.count != 1 or message.sys_flag & records.SYS_INNER_BATCH:
            check_count(message, batches=queue.kind == BatchQueueIndex.kind)
        return self._place(queue, message, size, keys, done, durable)

    def stage_batch(
        self,
        messages: Sequence[Message],
        done: Confirmed | None = None,
        keys: Sequence[_Keys] | None = None,
    ) -> list[Placed]:
        """Messages that go into one log file together, with consecutive places."""
        self.require_writable()
        if not messages:
            raise MessageIllegal("an empty batch")
        if self.memory.holds(messages[0].topic):
            return self.memory.stage_batch(messages, done)
        queues = [self.queues.get((m.topic, m.queue_id)) or self.new_queue(m) for m in messages]
        measure = self.encoder.measure
        sizes = [
            measure(m, q.topic_bytes)
            if m.count == 1 and not m.sys_flag & records.SYS_INNER_BATCH
            else self._measure_whole_batch(q, m)
            for q, m in zip(queues, messages, strict=True)
        ]
        self.require_room(sum(sizes))
        self.log.position_for(sum(sizes))
        known: Sequence[_Keys | None] = keys or [None] * len(messages)
        place = self._place
        placed = [
            place(*each, None, False)
            for each in zip(queues[:-1], messages[:-1], sizes[:-1], known[:-1], strict=True)
        ]
        placed.append(place(queues[-1], messages[-1], sizes[-1], known[-1], done, False))
        return placed

    def require_writable(self) -> None:
        """Raise why appends are refused, if they are."""
        if self._refusal is not None:
            raise self._refusal

    def require_room(self, byte_count: int) -> None:
        """Refuse a batch that is longer than a log file."""
        if byte_count > self.log.entry_bytes_max:
            raise MessageIllegal(
                f"a batch of {byte_count} bytes does not fit into a log file of "
                f"{self.config.segment_bytes} bytes; send smaller batches"
            )

    def _measure_whole_batch(self, queue: QueueIndex, message: Message) -> int:
        check_count(message, batches=queue.kind == BatchQueueIndex.kind)
        return self.encoder.measure(with_base(message, _OFFSET_MAX), queue.topic_bytes)

    def new_queue(self, message: Message) -> QueueIndex:
        """The queue of a message that can be stored."""
        # The checks come first: a message that is refused must leave no queue behind.
        check_topic(message.topic)
        check_count(message, batches=self.state.counts_batches(message.topic))
        self.encoder.measure(message, message.topic.encode())
        return self.queue(message.topic, message.queue_id)

    def _place(
        self,
        queue: QueueIndex,
        message: Message,
        size: int,
        keys: _Keys | None,
        done: Confirmed | None,
        durable: bool,
    ) -> Placed:
        topic = queue.topic_bytes
        store_ms = self.turn_ms(fresh=topic == records.SCHEDULE_TOPIC)
        offset = queue.next_offset
        if message.sys_flag & records.SYS_INNER_BATCH:
            message = with_base(message, offset)
            size = self.encoder.measure(message, topic)
        position = self.log.position_for(size)
        entry = self.encoder.encode(message, topic, size, offset, position, store_ms)
        assert len(entry) == size, "the size decided the place, so it must be right"
        self.log.stage(entry)
        if keys is None:
            properties = message.properties
            keys = records.message_keys(properties) if properties else records.NO_KEYS
        if topic in records.TIMED_TOPICS or EXPIRES_NAME in message.properties:
            code = records.tags_code(topic, message.properties, store_ms, self._delay_levels_ms)
        else:
            code = records.java_hash(keys[2]) if keys[2] else 0
        unit = queue.pack(position, size, code, store_ms, offset, message.count)
        queue.next_offset = offset + message.count
        found: Sequence[Found] = ()
        if keys is not records.NO_KEYS and indexed(message.sys_flag):
            found = ((topic, keys, position, store_ms),)
        self.staged.append((queue, unit, message.count, found, position + size, done, durable))
        return _new_tuple(Placed, (position, size, offset, store_ms))

    def turn_ms(self, *, fresh: bool = False) -> int:
        """One time for the entries of a turn, but for delays that are counted from it (`fresh`).
        It never goes back, the time index relies on it."""
        if fresh or not self.staged:
            self._turn_ms = self.last_ms = max(self.now_ms(), self.last_ms)
            self.log.newest_ms = self._turn_ms
        return self._turn_ms

    def write_staged(self) -> None:
        """Write everything staged with one call. Failures reach the `done` callbacks, not the
        caller.
        """
        if self.memory.unconfirmed:
            self.memory.end_turn()
        staged = self.staged
        if not staged:
            return
        self.staged = []
        try:
            self.log.write()
        except SluiceError as error:
            self._undo(staged, error)
            return
        dirty = self._dirty
        found: list[Noted] = []
        for queue, units, count, keys, _, _, _ in staged:
            queue.add(units)
            if not queue.dirty:
                queue.dirty = True
                dirty.append(queue)
            found += keys
            self.append_count += count
        self.indexing.note(found)
        written = self.log.written
        sync = self._sync
        if not sync:
            self._confirmed = written
        must_flush = sync
        for _, _, _, _, end, done, durable in staged:
            if durable:
                must_flush = True
            if done is not None:
                if sync or durable:
                    self.flusher.wait(end, done)
                else:
                    done(None)
        if must_flush:
            self.flusher.flush_to(written)

    def _undo(self, staged: list[Staged], error: SluiceError) -> None:
        for queue, _, count, *_ in reversed(staged):
            queue.next_offset -= count
            if not queue.next_offset:
                self.queues.pop(queue.key, None)  # nothing is left of it, its kind neither
        if not isinstance(error, DiskFull):
            self.flusher.fail(str(error))
        log_lines.error("append failed, nothing of it was stored: %s", error)
        for *_, done, _ in staged:
            if done is not None:
                done(error)

    def _flushed(self) -> None:
        if self.flusher.failure is not None:
            self._refusal = self.flusher.failure
            return
        self.log.flushed(self.flusher.flushed)
        if self._sync:
            self._confirmed = self.flusher.flushed

    def refuse(self, refusal: SluiceError | None) -> None:
        """Housekeeping found a reason to take no appends, or that it is over."""
        if not isinstance(self._refusal, StoreReadOnly):
            self._refusal = refusal

    @property
    def refusal(self) -> SluiceError | None:
        """Why appends are refused now; None where they are not."""
        return self.flusher.failure or self._refusal

    # -------------------------------------------------------------------------------------- reading

    def read(
        self,
        topic: str,
        queue_id: int,
        offset: int,
        *,
        count_max: int = 32,
        bytes_max: int = 256 * 1024,
        accept: Accept | None = None,
    ) -> ReadResult:
        """Entries from an offset on. Raises `ColdRead`: run its work on a thread, then ask
        again.
        """
        queue = self.queues.get((topic, queue_id))
        if queue is None:
            return self.memory.read(topic, queue_id, offset, count_max, bytes_max, accept)
        return self.reader.read(
            queue, offset, self._confirmed, count_max=count_max, bytes_max=bytes_max, accept=accept
        )

    def min_offset(self, topic: str, queue_id: int) -> int:
        queue = self.queues.get((topic, queue_id))
        return queue.start_offset if queue else self.memory.min_offset(topic, queue_id)

    def max_offset(self, topic: str, queue_id: int) -> int:
        """The offset after the newest entry that can be read."""
        queue = self.queues.get((topic, queue_id))
        if queue is None:
            return self.memory.max_offset(topic, queue_id)
        return self.reader.max_offset(queue, self._confirmed)

    def offset_for_time(
        self, topic: str, queue_id: int, when_ms: int, *, upper: bool = False
    ) -> int:
        """The offset at a time. May raise `ColdRead`."""
        queue = self.queues.get((topic, queue_id))
        if queue is None:
            return self.memory.offset_for_time(topic, queue_id, when_ms, upper=upper)
        return self.reader.offset_for_time(queue, self._confirmed, when_ms, upper=upper)

    def earliest_ms(self, topic: str, queue_id: int) -> int:
        """When the oldest entry was stored, -1 where there is none. May raise `ColdRead`."""
        queue = self.queues.get((topic, queue_id))
        if queue is None:
            return self.memory.earliest_ms(topic, queue_id)
        return self.reader.earliest_ms(queue, self._confirmed)

    def entry_at(self, position: int) -> memoryview | None:
        """The entry at a position of the log, None where none starts.

        Raises `RecordDamaged` where one starts that is not what was written; may raise `ColdRead`.
        """
        if position >= MEMORY_FLOOR:
            return self.memory.entry_at(position)
        return self.reader.entry(position, self._confirmed)

    def call(
        self, ask: Callable[[], T], done: Callable[[T | None, BaseException | None], None]
    ) -> None:
        """Ask something that may raise `ColdRead`, as often as it takes, without blocking."""
        self.cold_reads.call(ask, done)

    def query_key(
        self,
        topic: str,
        key: str,
        done: QueryDone,
        *,
        count_max: int = 64,
        begin_ms: int = 0,
        end_ms: int = 1 << 62,
    ) -> None:
        """Entries with a key (or unique key), newest first."""
        query_key(self, topic, key, done, count_max, (begin_ms, end_ms))

    # ----------------------------------------------------------------------- settings and positions

    def table(self, name: str) -> dict[str, Any]:
        """A table of settings as it is durable now. Not to be changed by the caller."""
        return self.state.tables.get(name, {})

    def change(self, changes: Sequence[Change], done: Confirmed | None = None) -> None:
        """Change settings, all of these together. They hold when `done(None)` is called.

        The entry is staged with the turn's others; `write_staged` sends it off.
        """
        for topic in self.state.topics_of_new_kind(changes):
            if any(key[0] == topic and queue.next_offset for key, queue in self.queues.items()):
                raise ParameterInvalid(
                    f"topic {topic}: queue.type cannot change, its queues have been written to; "
                    "delete the topic first, or make one of another name"
                )
        self.stage_state(self.state.body(changes, self.state_bytes_max), done)

    def delete_topic(self, topic: str, done: Confirmed | None = None) -> None:
        """Forget a topic, its queues and what groups committed there; staged like `change`.

        Its name is free at once: what is appended next starts at offset 0.
        """
        self.removal.delete(topic, self.memory.deleting(topic, done))
        self.memory.drop(topic)

    @property
    def state_bytes_max(self) -> int:
        """The longest body of a state entry: it must fit into a log file with its head."""
        return min(_STATE_BYTES_MAX, self.log.entry_bytes_max - 512)

    def stage_state(self, body: bytes, done: Confirmed | None = None) -> Placed:
        """An entry of the state topic; it is applied when it is durable."""

        def confirmed(error: SluiceError | None) -> None:
            self.state.under_way.pop(placed.position, None)
            if error is None:
                self.state.apply(body, placed.store_ms)
            if done is not None:
                done(error)

        message = Message(STATE_TOPIC, 0, body, born_ms=self.now_ms())
        self.queue(STATE_TOPIC, 0)
        placed = self.stage(message, confirmed, durable=True)
        self.state.under_way[placed.position] = body
        return placed

    def commit_offset(self, group: str, topic: str, queue_id: int, offset: int) -> None:
        """A group's position. Seen at once, durable within `state_batch_ms`."""
        self.offsets.commit(group, topic, queue_id, offset)

    def committed_offset(self, group: str, topic: str, queue_id: int) -> int | None:
        """The newest position of a group that was committed, None where there is none."""
        return self.offsets.get(group, topic, queue_id)

    # --------------------------------------------------------------------------------------- timers

    def tick(self) -> None:
        """What time brings."""
        if self.closed:
            return
        now_ms, config = self.now_ms(), self.config
        self.offsets.tick(now_ms, config.state_batch_ms)
        self.write_staged()
        if not self._sync:
            self.flusher.tick(
                now_ms,
                self.log.written,
                interval_ms=config.flush_interval_ms,
                thorough_ms=config.flush_thorough_interval_ms,
                pages=config.flush_least_pages,
            )
        self.indexing.tick(now_ms, config.key_index_interval_ms)
        self.housekeeping.tick(now_ms)

    def take_dirty(self) -> list[QueueIndex]:
        """The queues that have units which no file holds; the caller sees to them."""
        dirty, self._dirty = self._dirty, []
        for queue in dirty:
            queue.dirty = False
        return dirty

    def mark_dirty(self, queues: Sequence[QueueIndex]) -> None:
        for queue in queues:
            if not queue.dirty:
                queue.dirty = True
                self._dirty.append(queue)

    # -------------------------------------------------------------------------------------- closing

    def shut(self, done: Confirmed) -> None:
        """Close in order. Afterwards nothing may be called any more."""
        shut(self, done)

    def release(self) -> None:
        """Let go of files and of the lock, whatever state they are in."""
        self.closed = self.released = True
        self.indexing.close()
        self.mark.close()
        self.log.close()
        self.lock.release()


__all__ = [
    "DELAY_TABLE",
    "FORBIDDEN_TABLE",
    "GROUP_TABLE",
    "OFFSET_TABLE",
    "REQUEST_MODE_TABLE",
    "SETTING_TABLE",
    "STATE_TOPIC",
    "TOPIC_TABLE",
    "Change",
    "ColdRead",
    "Message",
    "Placed",
    "ReadResult",
    "ReadStatus",
    "Store",
]
