"""This module is the store as the rest of the package sees it: append, read, query, settings,
positions.

One owner (usually an event loop) calls everything here; slow work goes to the background and comes
back.

    stage(message, done)   decides place and offset, encodes; nothing is written yet write_staged()
    all that was staged in this turn goes to the log in one call ... done(None)         the entry is
    confirmed: durable (flush=sync), or written (flush=async) read(...)              slices of the
    log up to the confirmed position; may raise ColdRead change(...)            settings: an entry
    of the log like any other, effective when durable tick()                 timers: flush,
    checkpoint, retention, offsets; call it some ten times a second

What is staged and cannot be written is undone completely: offsets are given away only once. After a
failed fsync the store is read-only until it is opened anew.

The store knows no wire and no sockets; time comes from `now_ms`, the disk from `Files`.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Final, NamedTuple, TypeVar

from sluice.config import StoreConfig
from sluice.errors import DiskFull, MessageIllegal, SluiceError, StoreReadOnly
from sluice.model import Message, Placed, QueueKey
from sluice.protocol import records
from sluice.storage.background import Background
from sluice.storage.checkpoint import Row
from sluice.storage.commit_log import CommitLog
from sluice.storage.files import FileLock, Files
from sluice.storage.flush import Confirmed, Flusher
from sluice.storage.housekeeping import Housekeeping
from sluice.storage.indexing import Indexing, has_key, indexed
from sluice.storage.offset_commits import OffsetCommits
from sluice.storage.queue_index import BatchQueueIndex, ColdRead, QueueFiles, QueueIndex
from sluice.storage.reads import Accept, Reader, ReadResult, ReadStatus
from sluice.storage.snapshot import ABORT_NAME, DurableMark
from sluice.storage.state import (
    DELAY_TABLE,
    GROUP_TABLE,
    OFFSET_TABLE,
    STATE_TOPIC,
    TOPIC_TABLE,
    Change,
    StateTables,
)

T = TypeVar("T")
QueryDone = Callable[[list[memoryview] | None, BaseException | None], None]

# A topic's name is a directory's name: what both protocols allow, and nothing that leaves the
# directory.
_TOPIC_NAME = re.compile(r"[%|a-zA-Z0-9._-]{1,255}")

_OFFSET_MAX: Final = (1 << 63) - 1

log_lines = logging.getLogger("sluice.storage")


# What `write_staged` needs of each staged entry; a plain tuple, because there is one per message.
_Keys = tuple[bytes, bytes, bytes]
_Staged = tuple[QueueIndex, bytes, Message, _Keys, Placed, Confirmed | None, bool]


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
        self.encoder = records.Encoder(
            store_host,
            with_crc=config.message_crc,
            body_bytes_max=config.message_bytes_max,
            entry_bytes_max=config.segment_bytes - records.BLANK_BYTES,
        )
        self.log = CommitLog(files, f"{self.root}/commitlog", config.segment_bytes, background)
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
        self._staged: list[_Staged] = []
        self._turn_ms = 0
        self._refusal: SluiceError | None = None
        self._delay_levels_ms = config.delay_levels_ms
        self._sync = config.flush == "sync"
        self._dirty: list[QueueIndex] = []
        self.offsets = OffsetCommits(self)
        self._cold_turn = 0
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
        self.last_ms = last_ms
        self._confirmed = self.log.written
        self.flusher = Flusher(
            self.background, self.log.files_between, mark.write, self._flushed, self.log.written
        )
        self.reader = Reader(
            self.log, self.queue_files, recovery.scanned_from, self.config.hot_bytes
        )
        self.housekeeping = Housekeeping(self)

    # --------------------------------------------------------------------------------------- queues

    def queue(self, topic: str, queue_id: int) -> QueueIndex:
        """The queue, made where it is not there yet."""
        queue = self.queues.get((topic, queue_id))
        if queue is None:
            check_topic(topic)
            kind = BatchQueueIndex if self.counts_batches(topic) else QueueIndex
            queue = kind(QueueKey(topic, queue_id), self.root, self.config.queue_file_units)
            self.queues[topic, queue_id] = queue
        return queue

    def counts_batches(self, topic: str) -> bool:
        """Whether an entry of this topic may count many offsets (topic attribute
        queue.type=BatchCQ).
        """
        settings = self.state.tables.get(TOPIC_TABLE, {}).get(topic) or {}
        attributes = settings.get("attributes") or {}
        return bool(attributes.get("queue.type") == "BatchCQ")

    @property
    def confirmed(self) -> int:
        """Everything below this position may be read."""
        return self._confirmed

    # ------------------------------------------------------------------------------------ appending

    def stage(
        self, message: Message, done: Confirmed | None = None, *, durable: bool = False
    ) -> Placed:
        """Give a message its place. `done` is called exactly once: None = confirmed, or the error.

        `durable` is for the store's own entries: they wait for the disk also where flush=async.
        """
        # Settings and positions are stored also when the disk is nearly full: deleting needs them.
        if self._refusal is not None and not (durable and isinstance(self._refusal, DiskFull)):
            raise self._refusal
        queue = self.queues.get((message.topic, message.queue_id))
        if queue is None:
            queue = self._new_queue(message)
        size = self.encoder.measure(message, queue.topic_bytes)
        return self._place(queue, message, size, done, durable)

    def stage_batch(
        self, messages: Sequence[Message], done: Confirmed | None = None
    ) -> list[Placed]:
        """Messages that go into one log file together, with consecutive places."""
        if self._refusal is not None:
            raise self._refusal
        if not messages:
            raise MessageIllegal("an empty batch")
        queues = [self.queues.get((m.topic, m.queue_id)) or self._new_queue(m) for m in messages]
        measure = self.encoder.measure
        sizes = [
            measure(_with_base(m, _OFFSET_MAX), q.topic_bytes)
            if m.sys_flag & records.SYS_INNER_BATCH
            else measure(m, q.topic_bytes)
            for q, m in zip(queues, messages, strict=True)
        ]
        if sum(sizes) > self.log.entry_bytes_max:
            raise MessageIllegal(
                f"a batch of {sum(sizes)} bytes does not fit into a log file of "
                f"{self.config.segment_bytes} bytes; send smaller batches"
            )
        self.log.position_for(sum(sizes))
        last = len(messages) - 1
        return [
            self._place(queues[i], messages[i], sizes[i], done if i == last else None, False)
            for i in range(len(messages))
        ]

    def _new_queue(self, message: Message) -> QueueIndex:
        # The checks come first: a message that is refused must leave no queue behind.
        check_topic(message.topic)
        self.encoder.measure(message, message.topic.encode())
        return self.queue(message.topic, message.queue_id)

    def _place(
        self,
        queue: QueueIndex,
        message: Message,
        size: int,
        done: Confirmed | None,
        durable: bool,
    ) -> Placed:
        if not self._staged:
            # One time for all entries of a turn; it never goes back, the time index relies on it.
            self._turn_ms = self.last_ms = max(self.now_ms(), self.last_ms)
            self.log.newest_ms = self._turn_ms
        store_ms = self._turn_ms
        offset = queue.next_offset
        topic = queue.topic_bytes
        if message.sys_flag & records.SYS_INNER_BATCH:
            message = _with_base(message, offset)
            size = self.encoder.measure(message, topic)
        position = self.log.position_for(size)
        entry = self.encoder.encode(message, topic, size, offset, position, store_ms)
        assert len(entry) == size, "the size decided the place, so it must be right"
        self.log.stage(entry)
        code, keys = 0, records.NO_KEYS
        properties = message.properties
        if properties:
            keys = records.message_keys(properties)
            if topic == records.SCHEDULE_TOPIC:
                code = records.tags_code(topic, properties, store_ms, self._delay_levels_ms)
            elif keys[2]:
                code = records.java_hash(keys[2])
        unit = queue.pack(position, size, code, store_ms, offset, message.count)
        queue.next_offset = offset + message.count
        placed = Placed(position, size, offset, store_ms)
        self._staged.append((queue, unit, message, keys, placed, done, durable))
        return placed

    def write_staged(self) -> None:
        """Write everything staged with one call. Failures reach the `done` callbacks, not the
        caller.
        """
        staged = self._staged
        if not staged:
            return
        self._staged = []
        try:
            self.log.write()
        except SluiceError as error:
            self._undo(staged, error)
            return
        dirty, live, note = self._dirty, self.indexing.live, self.indexing.note
        no_keys = records.NO_KEYS
        for queue, unit, message, keys, placed, _, _ in staged:
            queue.add(unit)
            if not queue.dirty:
                queue.dirty = True
                dirty.append(queue)
            if live and keys is not no_keys and indexed(message.sys_flag):
                note(queue.topic_bytes, keys, placed.position, placed.store_ms)
        self.append_count += len(staged)
        written = self.log.written
        if not self._sync:
            self._confirmed = written
        must_flush = self._sync
        for _, _, _, _, placed, done, durable in staged:
            if durable:
                must_flush = True
            if done is not None:
                if self._sync or durable:
                    self.flusher.wait(placed.position + placed.size, done)
                else:
                    done(None)
        if must_flush:
            self.flusher.flush_to(written)

    def _undo(self, staged: list[_Staged], error: SluiceError) -> None:
        for queue, _, message, *_ in reversed(staged):
            queue.next_offset -= message.count
        if not isinstance(error, DiskFull):
            self.flusher.fail(str(error))
        log_lines.error("append failed, nothing of it was stored: %s", error)
        for *_, done, _ in staged:
            if done is not None:
                done(error)

    def _flushed(self) -> None:
        if self.flusher.failure is not None:
            self._refusal = self.flusher.failure
        elif self._sync:
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
            return ReadResult(ReadStatus.NO_MATCHED_LOGIC_QUEUE, 0, 0, 0)
        return self.reader.read(
            queue, offset, self._confirmed, count_max=count_max, bytes_max=bytes_max, accept=accept
        )

    def min_offset(self, topic: str, queue_id: int) -> int:
        queue = self.queues.get((topic, queue_id))
        return queue.start_offset if queue is not None else 0

    def max_offset(self, topic: str, queue_id: int) -> int:
        """The offset after the newest entry that can be read."""
        queue = self.queues.get((topic, queue_id))
        return self.reader.max_offset(queue, self._confirmed) if queue is not None else 0

    def offset_for_time(
        self, topic: str, queue_id: int, when_ms: int, *, upper: bool = False
    ) -> int:
        """The offset at a time. May raise `ColdRead`."""
        queue = self.queues.get((topic, queue_id))
        if queue is None:
            return 0
        return self.reader.offset_for_time(queue, self._confirmed, when_ms, upper=upper)

    def earliest_ms(self, topic: str, queue_id: int) -> int:
        """When the oldest entry was stored, -1 where there is none. May raise `ColdRead`."""
        queue = self.queues.get((topic, queue_id))
        if queue is None:
            return -1
        return self.reader.earliest_ms(queue, self._confirmed)

    def entry_at(self, position: int) -> memoryview | None:
        """The entry at a position of the log, None where none starts. May raise `ColdRead`."""
        return self.reader.entry(position, self._confirmed)

    def call(
        self, ask: Callable[[], T], done: Callable[[T | None, BaseException | None], None]
    ) -> None:
        """Ask something that may raise `ColdRead`, as often as it takes, without blocking."""
        try:
            result = ask()
        except ColdRead as cold:
            self._cold_turn = (self._cold_turn + 1) % self.config.cold_read_threads
            work = cold.work
            self.background.submit(
                f"cold{self._cold_turn}",
                work,
                lambda _, error: done(None, error) if error is not None else self.call(ask, done),
            )
        except SluiceError as error:
            done(None, error)
        else:
            done(result, None)

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
        topic_bytes, key_bytes = topic.encode(), key.encode()

        def check(positions: list[int]) -> list[memoryview]:
            entries = [self.entry_at(position) for position in positions]
            return [
                entry
                for entry in entries
                if entry is not None and has_key(entry, topic_bytes, key_bytes)
            ]

        def found(positions: list[int] | None, error: BaseException | None) -> None:
            if positions is None:
                done(None, error)
            else:
                self.call(lambda: check(positions), done)

        self.indexing.query(topic_bytes, key_bytes, begin_ms, end_ms, count_max, found)

    # ----------------------------------------------------------------------- settings and positions

    def table(self, name: str) -> dict[str, Any]:
        """A table of settings as it is durable now. Not to be changed by the caller."""
        return self.state.tables.get(name, {})

    def change(self, changes: Sequence[Change], done: Confirmed | None = None) -> None:
        """Change settings, all of these together. They hold when `done(None)` is called.

        The entry is staged with the turn's others; `write_staged` sends it off.
        """
        self.stage_state(self.state.body(changes, self.state_bytes_max), done)

    @property
    def state_bytes_max(self) -> int:
        """The longest body of a state entry: it must fit into a log file with its head."""
        return min(self.config.message_bytes_max, self.log.entry_bytes_max - 512)

    def stage_state(self, body: bytes, done: Confirmed | None = None) -> Placed:
        """An entry of the state topic; it is applied when it is durable."""

        def confirmed(error: SluiceError | None) -> None:
            self.state.under_way.pop(placed.position, None)
            if error is None:
                self.state.apply(body, placed.store_ms)
            if done is not None:
                done(error)

        message = Message(STATE_TOPIC, 0, body, born_ms=self.now_ms())
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

    def shut(self, done: Callable[[SluiceError | None], None]) -> None:
        """Close in order: positions, flush, checkpoint. Afterwards nothing may be called any
        more.
        """

        def checkpointed(error: BaseException | None) -> None:
            # Without the checkpoint the abort file stays: the next start recovers.
            if error is None and self.flusher.failure is None:
                try:
                    self.files.remove(f"{self.root}/{ABORT_NAME}")
                    self.files.sync_directory(self.root)
                except OSError as failure:
                    error = failure
            self.release()
            if error is not None and not isinstance(error, SluiceError):
                error = StoreReadOnly(str(error))
            done(error or self.flusher.failure)

        def flushed(error: SluiceError | None) -> None:
            if error is not None:
                # Behind whatever the background still does to the files.
                self.background.submit("disk", lambda: None, lambda *_: checkpointed(error))
            else:
                self.housekeeping.checkpoint(checkpointed)

        self.closed = True
        self.write_staged()
        self.offsets.send()
        self.write_staged()
        self._refusal = self._refusal or StoreReadOnly("the store is closed")
        if self.flusher.failure is not None:
            flushed(self.flusher.failure)
        elif self.flusher.flushed >= self.log.written:
            flushed(None)
        else:
            self.flusher.wait(self.log.written, flushed)
            self.flusher.flush_to(self.log.written)

    def release(self) -> None:
        """Let go of files and of the lock, whatever state they are in."""
        self.closed = self.released = True
        self.indexing.close()
        self.mark.close()
        self.log.close()
        self.lock.release()


def _with_base(message: Message, offset: int) -> Message:
    """A batch that is stored whole says which offset is its first."""
    # The separator before it: a producer may leave the last one out.
    gap = b"" if not message.properties or message.properties[-1] == 2 else b"\x02"
    base = b"%bINNER_BASE\x01%d\x02" % (gap, offset)
    return replace(message, properties=message.properties + base)


def check_topic(topic: str) -> None:
    """Refuse a name that cannot be a directory's; raises MessageIllegal."""
    if _TOPIC_NAME.fullmatch(topic) is None or topic in (".", ".."):
        raise MessageIllegal(f"topic name {topic!r}: allowed are letters, digits and % | . _ -")


def wall_clock_ms() -> int:
    """The machine's clock; every other module gets it as a parameter."""
    return time.time_ns() // 1_000_000


__all__ = [
    "DELAY_TABLE",
    "GROUP_TABLE",
    "OFFSET_TABLE",
    "STATE_TOPIC",
    "TOPIC_TABLE",
    "Change",
    "ColdRead",
    "Message",
    "Placed",
    "ReadResult",
    "ReadStatus",
    "Store",
    "wall_clock_ms",
]
