"""This module gathers what there is to know about a store, without changing a byte of it.

It takes no lock, makes no file and may be used while a broker runs: then the end of the log is
where it was when the walk came by. Quick by default: what the snapshot vouches for is believed and
only the part after it is read. With `verify` everything is read, every checksum is compared, and
every queue unit is held against the entry that it points to.

    Inspection.problems   damage: something that was there is not, or is not what it was
    Inspection.notes      what a person should know and need not act on
    Inspection.first_bad  the first byte that is no entry where one should be, and what follows it

Values only; `inspect_text` makes them readable.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from struct import Struct
from typing import Any, Final

import orjson

from sluice.errors import StoreError
from sluice.protocol import records
from sluice.storage import snapshot as marks
from sluice.storage import state as states
from sluice.storage.files import Files
from sluice.storage.log_walk import (
    ZEROS,
    LogFile,
    LogFiles,
    LogWalker,
    Progress,
    Walk,
    first_entry,
)
from sluice.storage.queue_check import Problem, QueueCheck, QueueRow

# As recovery has it: more files with data behind the end than this are no torn tail.
TORN_SEGMENTS_MAX: Final = 2
# As the log has it: a crash between a file's creation and its length leaves the newest ones short.
_SHORT_FILES_MAX: Final = 3
_ATTEMPTS_MAX: Final = 10
_INDEX_HEADER: Final = Struct(">qqqqii")
_INDEX_NAME_DIGITS: Final = 17
_ABORT_BYTES_MAX: Final = 4096


@dataclass(slots=True)
class SegmentInfo:
    """One file of the log. What only a walk can tell is None where the walk did not come by."""

    name: str
    start: int
    end: int
    used_bytes: int | None
    first_ms: int | None
    last_ms: int | None
    entry_count: int | None
    state: str  # closed, active, prepared, empty, missing


@dataclass(slots=True)
class FirstBad:
    """Where the chain of entries breaks, and what lies behind it."""

    path: str
    offset: int
    position: int
    reason: str
    kind: str  # damage, torn tail, being written
    intact_after_count: int
    gap_count: int
    gap_bytes: int
    data_end: int


@dataclass(slots=True)
class SnapshotInfo:
    log_offset: int
    last_ms: int
    usable: bool
    why_not: str


@dataclass(slots=True)
class QueueInfo:
    """One queue: readable are the offsets from `min_offset` up to, without, `max_offset`."""

    topic: str
    queue_id: int
    kind: str  # simple, batch
    min_offset: int
    max_offset: int
    entry_count: int


@dataclass(slots=True)
class Committed:
    """How far a group has read a queue; `lag` is None where there is no such queue."""

    group: str
    topic: str
    queue_id: int
    offset: int
    lag: int | None


@dataclass(slots=True)
class IndexInfo:
    name: str
    file_bytes: int
    entry_count: int
    begin_ms: int
    end_ms: int
    begin_position: int
    end_position: int


@dataclass(slots=True)
class CutInfo:
    """Bytes that a recovery took off the log: evidence."""

    name: str
    byte_count: int


@dataclass(slots=True)
class DiskInfo:
    """`file_bytes` are lengths; `disk_bytes` is what they take, which for sparse files is less."""

    name: str
    file_bytes: int
    disk_bytes: int
    file_count: int


@dataclass(slots=True)
class Inspection:
    root: str
    verified: bool
    holder_pid: int | None
    abort: str | None  # content of the abort file; None where there is none
    segment_bytes: int = 0
    segments: list[SegmentInfo] = field(default_factory=list)
    log_start: int = 0
    log_end: int = 0
    durable: int = 0  # 0: no mark, or one that is damaged and counts as lost
    snapshot: SnapshotInfo | None = None
    scanned_from: int = 0
    scanned_entry_count: int = 0
    first_bad: FirstBad | None = None
    problems: list[Problem] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    queues: list[QueueInfo] = field(default_factory=list)
    topics: dict[str, Any] = field(default_factory=dict)
    groups: dict[str, Any] = field(default_factory=dict)
    committed: list[Committed] = field(default_factory=list)
    index: list[IndexInfo] = field(default_factory=list)
    cut: list[CutInfo] = field(default_factory=list)
    disk: list[DiskInfo] = field(default_factory=list)
    disk_used_ratio: float = 0.0

    @property
    def whole(self) -> bool:
        return not self.problems


def require_store(files: Files, root: str) -> None:
    """Raise StoreError, in one clear line, where there is no store."""
    if not files.exists(root):
        raise StoreError(f"{root}: no such directory")
    if not files.is_directory(root):
        raise StoreError(f"{root}: not a directory; name the one that holds commitlog/")
    if not files.is_directory(f"{root}/commitlog"):
        raise StoreError(f"{root}: not a store: there is no commitlog/ in it")


def inspect_store(
    files: Files,
    root: str,
    *,
    verify: bool = False,
    holder_pid: int | None = None,
    progress: Progress | None = None,
) -> Inspection:
    """Everything about the store in `root`."""
    require_store(files, root)
    attempt = 0
    while True:
        attempt += 1
        try:
            return _Gatherer(files, root, verify, holder_pid, progress).run()
        except FileNotFoundError as error:
            # A broker that runs deletes old files under our eyes; what is gone is gone for good.
            if attempt == _ATTEMPTS_MAX:
                raise StoreError(f"{error.filename}: went away while it was read") from error
        except OSError as error:
            raise StoreError(
                f"{error.filename or root}: cannot be read: {error.strerror}"
            ) from error


class _Gatherer:
    """One attempt."""

    def __init__(
        self,
        files: Files,
        root: str,
        verify: bool,
        holder_pid: int | None,
        progress: Progress | None,
    ) -> None:
        self._files = files
        self._root = root
        self._progress = progress
        self._verify = verify
        self._tables = states.StateTables()
        # (topic, queue) -> first offset, next offset, entries
        self._queues: dict[tuple[bytes, int], list[int]] = {}
        self._check: QueueCheck | None = None
        self._floors: dict[bytes, int] = {}  # deleted topics: entries below belong to no queue
        self._rows: dict[tuple[bytes, int], QueueRow] = {}
        self._state_topic = states.STATE_TOPIC.encode()
        self.found = Inspection(root, verify, holder_pid, self._abort())

    def run(self) -> Inspection:
        found, root = self.found, self._root
        # The marks first: whatever they vouch for was there before the log is looked at.
        found.durable = marks.DurableMark(self._files, root).read()
        content = marks.read_snapshot(self._files, root)
        self._log = log = LogFiles(self._files, f"{root}/commitlog")
        try:
            self._look_at_files(content)
            usable = self._look_at_snapshot(content)
            self._walk(content if usable else None)
        finally:
            log.close()
        self._add_queues()
        self._add_settings()
        self._add_index()
        self._add_cut()
        found.disk = disk_use(root)
        found.disk_used_ratio = self._files.usage(root).used_ratio
        return found

    def _abort(self) -> str | None:
        try:
            data = self._files.read(f"{self._root}/{marks.ABORT_NAME}", _ABORT_BYTES_MAX)
        except OSError:
            return None
        return data.decode("utf-8", "replace").strip()

    # ------------------------------------------------------------------------------------- the log

    def _problem(self, path: str, offset: int, reason: str) -> None:
        self.found.problems.append(Problem(path, offset, reason))

    def _look_at_files(self, content: dict[str, Any] | None) -> None:
        log, found = self._log, self.found
        found.segment_bytes = log.segment_bytes
        found.log_start = log.start
        for path, reason in log.foreign:
            self._problem(path, 0, f"{reason}; the store does not open while it is there")
        newest = list(log.segments)[-_SHORT_FILES_MAX:]
        for base, segment in log.segments.items():
            if segment.file is None:
                self._problem(segment.path, 0, "the file is missing; the store does not open")
            elif segment.size > log.segment_bytes or (
                segment.size != log.segment_bytes and base not in newest
            ):
                self._problem(
                    segment.path,
                    min(segment.size, log.segment_bytes),
                    f"{segment.size} bytes long, the others are {log.segment_bytes}",
                )
        known = max(found.durable, content["log_offset"] if content else 0)
        if not log.segments and known:
            self._problem(
                log.directory, 0, f"no log files, but the log was durable up to position {known}"
            )

    def _look_at_snapshot(self, content: dict[str, Any] | None) -> bool:
        if content is None:
            if self._files.exists(f"{self._root}/{marks.SNAPSHOT_NAME}"):
                self.found.notes.append(
                    f"{self._root}/{marks.SNAPSHOT_NAME} is damaged and counts as lost"
                )
            return False
        for topic, queue_id, kind, first, start, written, end, sums in content["queues"]:
            row = QueueRow(topic, queue_id, kind, first, start, written, end, sums)
            self._rows[topic.encode(), queue_id] = row
        why_not = self._unusable(content)
        self.found.snapshot = SnapshotInfo(
            content["log_offset"], content["last_ms"], not why_not, why_not
        )
        if why_not:
            self._rows = {}
        return not why_not

    def _unusable(self, content: dict[str, Any]) -> str:
        """Why a start would not use the snapshot, "" where it would."""
        if marks.read_checkpoint(self._files, self._root) not in content["checkpoint"]:
            return "another broker has run on this store since"
        if not self._log.start <= content["log_offset"] <= self._log.stop:
            return "its position is not in the log"
        for row in self._rows.values():
            for path in row.paths(self._root):
                if not self._files.exists(path):
                    return f"{path} is missing"
        return ""

    def _walk(self, content: dict[str, Any] | None) -> None:
        log, found = self._log, self.found
        known = max(found.durable, found.snapshot.log_offset if found.snapshot else 0)
        start = log.start
        if content is not None and not self._verify:
            start = content["log_offset"]
            for key, row in self._rows.items():
                self._queues[key] = [row.start, row.end, row.written - row.first]
        self._load_tables(content is not None and not self._verify)
        if self._verify and content is None and self.found.holder_pid is not None:
            # Files that grow while they are read vouch for nothing; only a snapshot says how far.
            self.found.notes.append("queues are not compared: the broker has no snapshot yet")
        elif self._verify:
            rows = self._rows if content is not None else None
            self._check = QueueCheck(self._files, self._root, rows, log.start, self._floors)
        walker = LogWalker(
            log, self._on_entry, known=known, thorough=self._verify, progress=self._progress
        )
        self._walker, self._known = walker, known
        walk = walker.run(start)
        if self._check is not None:
            found.problems += self._check.finish()
        found.scanned_from, found.scanned_entry_count = start, walk.entry_count
        found.log_end = self._true_end(walk, known)
        self._judge(walk, known)
        for part in log.unreadable:
            self._problem(part.path, part.start, f"{part.stop - part.start} bytes: {part.reason}")
        times = content["segments"] if content is not None else {}
        found.segments = [self._segment(segment, start, times, known) for segment in
                          log.segments.values()]  # fmt: skip

    def _true_end(self, walk: Walk, known: int) -> int:
        """Where the log ends: entries behind a torn place do not count, those behind damage do."""
        damaged = walk.gaps and self._is_damage(walk, known)
        return walk.end if damaged or not walk.gaps else walk.stopped_at

    def _is_damage(self, walk: Walk, known: int) -> bool:
        if walk.stopped_at < known:
            return True
        if self.found.holder_pid is not None:
            return False  # it grew while we walked: what was zero when we came by is not any more
        log = self._log
        later = [b for b in log.segments if b > walk.stopped_at and log.holds_data(b)]
        if len(later) >= TORN_SEGMENTS_MAX:
            return True
        return known == 0 and walk.after_stop_count > 0

    def _judge(self, walk: Walk, known: int) -> None:
        if not walk.stopped_by and walk.end >= known:
            return
        found, log = self.found, self._log
        if not log.segments:
            return
        reason = walk.stopped_by or ZEROS
        path, offset = log.path_of(walk.stopped_at)
        kind = "torn tail"
        if self._is_damage(walk, known):
            kind = "damage"
            why = f"the log was durable up to position {known}" if known else "entries follow it"
            self._problem(path, offset, f"{reason}; {why}")
        elif found.holder_pid is not None:
            kind = "being written"
        else:
            found.notes.append(
                f"the log ends at {walk.stopped_at} in a torn entry that was never durable; "
                "the next start takes it off and keeps it in sluice/cut"
            )
        found.first_bad = FirstBad(
            path,
            offset,
            walk.stopped_at,
            reason,
            kind,
            walk.after_stop_count,
            len(walk.gaps),
            walk.gap_bytes,
            walk.last_data,
        )

    def _segment(
        self, segment: LogFile, start: int, times: dict[str, int], known: int
    ) -> SegmentInfo:
        base, length = segment.base, self._log.segment_bytes
        name = segment.path.rpartition("/")[2]
        info = SegmentInfo(name, base, base + length, None, None, None, None, "closed")
        if segment.file is None:
            info.state = "missing"
            return info
        end = self.found.log_end
        if base > end or (base == end and segment.used is None):
            info.state = "prepared" if not self._log.holds_data(base) else "behind the end"
        elif base + length > end:
            info.state = "active"
        if base >= start:
            info.used_bytes, info.entry_count = segment.used or 0, segment.entry_count
            info.first_ms, info.last_ms = segment.first_ms, segment.last_ms
        else:
            self._look_at_first(segment, info, known)
            info.used_bytes = max(0, min(end - base, length))
            info.last_ms = segment.last_ms or times.get(str(base))
        return info

    def _look_at_first(self, segment: LogFile, info: SegmentInfo, known: int) -> None:
        """A file that the walk did not read: at least its first entry."""
        size, magic = records.peek(self._log.read(segment, 0, records.BLANK_BYTES), 0)
        if magic == records.MAGIC_BLANK and size == self._log.segment_bytes:
            return
        try:
            info.first_ms = first_entry(self._log, segment).store_ms
        except records.BadRecord as error:
            if segment.base < known:
                self._problem(segment.path, 0, f"{error}; run with --verify to see what is left")

    # --------------------------------------------------------------------------- what entries say

    def _on_entry(self, position: int, entry: records.Summary) -> None:
        stopped_at = self._walker.stopped_at
        if stopped_at is not None and 0 < self._known <= stopped_at:
            return  # behind a torn place: a start takes it off with the rest
        floor = self._floors.get(entry.topic, 0)
        if position >= floor and records.in_queue(entry.sys_flag):
            count = records.offset_count(entry.sys_flag, entry.properties)
            key = (entry.topic, entry.queue_id)
            queue = self._queues.get(key)
            if queue is None:
                self._queues[key] = [entry.queue_offset, entry.queue_offset + count, 1]
            elif entry.queue_offset >= queue[1]:
                queue[1] = entry.queue_offset + count
                queue[2] += 1
            if self._check is not None:
                self._check.on_entry(position, entry)
        if entry.topic == self._state_topic:
            self._apply(position, entry)

    def _apply(self, position: int, entry: records.Summary) -> None:
        base = position - position % self._log.segment_bytes
        data = self._log.read(self._log.segments[base], position - base, entry.size)
        try:
            body = records.decode(data).body
            self._tables.apply(body, entry.store_ms)
            for topic, floor in states.deleted_topics(body).items():
                self._forget(topic.encode(), floor)
        except (ValueError, KeyError, TypeError):
            path, at = self._log.path_of(position)
            self._problem(path, at, "an entry of settings that makes no sense")

    def _forget(self, topic: bytes, floor: int) -> None:
        """A topic was deleted: what came before is no queue's, and old files mean nothing."""
        self._floors[topic] = max(floor, self._floors.get(topic, 0))
        for key in [key for key in self._queues if key[0] == topic]:
            del self._queues[key]
        if self.found.snapshot is not None and self.found.snapshot.log_offset <= floor:
            for key in [key for key in self._rows if key[0] == topic]:
                del self._rows[key]
        if self._check is not None:
            self._check.forget(topic)

    def _load_tables(self, quick: bool) -> None:
        config = states.read_files(self._files, f"{self._root}/config")
        self._foreign = config.foreign
        for path in config.damaged:
            self._problem(path, 0, "the file is damaged; a start takes its content from the log")
        if config.damaged and quick:
            self.found.notes.append("settings are shown in part; --verify takes them from the log")
        self._tables.tables = {**config.foreign, **config.ours}
        deleted = self._tables.tables.get(states.DELETED_TABLE, {})
        self._floors.update({topic.encode(): floor for topic, floor in deleted.items()})

    # ------------------------------------------------------------------------------------- tables

    def _add_queues(self) -> None:
        tables = self._tables.tables
        # What somebody else wrote into the files is what the next start takes over.
        for name, table in self._foreign.items():
            tables[name] = table
        for (topic_bytes, queue_id), (first, stop, entry_count) in self._queues.items():
            topic = topic_bytes.decode("utf-8", "replace")
            kind = "batch" if self._tables.counts_batches(topic) else "simple"
            self.found.queues.append(QueueInfo(topic, queue_id, kind, first, stop, entry_count))
        known = {(queue.topic, queue.queue_id): queue for queue in self.found.queues}
        for key, end in tables.get(states.QUEUE_END_TABLE, {}).items():
            topic, _, number = key.rpartition("@")
            queue = known.get((topic, int(number)))
            if queue is None:
                self.found.queues.append(QueueInfo(topic, int(number), "simple", end, end, 0))
            else:
                queue.max_offset = max(queue.max_offset, end)
        for (topic_bytes, queue_id), row in self._rows.items():
            queue = known.get((topic_bytes.decode(), queue_id))
            if self._verify and row.end > (queue.max_offset if queue is not None else 0):
                path = row.directory(self._root)
                have = queue.max_offset if queue is not None else 0
                self._problem(path, 0, f"has offsets up to {row.end}, the log only up to {have}")
        self.found.queues.sort(key=lambda queue: (queue.topic, queue.queue_id))
        if deleted := tables.get(states.DELETED_TABLE):
            self.found.notes.append(
                f"{len(deleted)} topics were deleted; their entries stay in the log until "
                "retention takes them"
            )

    def _add_settings(self) -> None:
        found, tables = self.found, self._tables.tables
        found.topics = dict(sorted(tables.get(states.TOPIC_TABLE, {}).items()))
        found.groups = dict(sorted(tables.get(states.GROUP_TABLE, {}).items()))
        ends = {(queue.topic, queue.queue_id): queue.max_offset for queue in found.queues}
        for key, offsets in sorted(tables.get(states.OFFSET_TABLE, {}).items()):
            topic, _, group = key.partition("@")
            for number, offset in offsets.items():
                queue_id, offset = int(number), int(offset)
                end = ends.get((topic, queue_id))
                lag = max(0, end - offset) if end is not None else None
                found.committed.append(Committed(group, topic, queue_id, offset, lag))
        found.committed.sort(key=lambda each: (each.group, each.topic, each.queue_id))

    # -------------------------------------------------------------------------------- other files

    def _add_index(self) -> None:
        directory = f"{self._root}/index"
        for name in self._files.names(directory):
            path = f"{directory}/{name}"
            if len(name) != _INDEX_NAME_DIGITS or not name.isdigit():
                continue
            file = self._files.open(path, writable=False)
            try:
                head = file.pread(_INDEX_HEADER.size, 0).ljust(_INDEX_HEADER.size, b"\0")
                begin_ms, end_ms, begin, end, _, next_number = _INDEX_HEADER.unpack(head)
                self.found.index.append(
                    IndexInfo(
                        name, file.size, max(0, next_number - 1), begin_ms, end_ms, begin, end
                    )
                )
            finally:
                file.close()

    def _add_cut(self) -> None:
        directory = f"{self._root}/{marks.CUT_DIRECTORY}"
        self.found.cut = [
            CutInfo(name, self._files.size(f"{directory}/{name}"))
            for name in self._files.names(directory)
        ]


def disk_use(root: str) -> list[DiskInfo]:
    """The room that each part of a directory takes, in the order of its names."""
    result = []
    with os.scandir(root) as entries:
        for entry in sorted(entries, key=lambda each: each.name):
            info = DiskInfo(entry.name, 0, 0, 0)
            _add_use(entry, info)
            result.append(info)
    return result


def _add_use(entry: os.DirEntry[str], info: DiskInfo) -> None:
    try:
        if entry.is_dir(follow_symlinks=False):
            with os.scandir(entry.path) as entries:
                for inner in entries:
                    _add_use(inner, info)
            return
        status = entry.stat(follow_symlinks=False)
    except FileNotFoundError:
        return  # a broker that runs removes files
    info.file_count += 1
    info.file_bytes += status.st_size
    info.disk_bytes += status.st_blocks * 512


def to_json(value: Any) -> str:
    """A dataclass of this module (or a dict of plain values) as one JSON object."""
    options = orjson.OPT_INDENT_2 | orjson.OPT_NON_STR_KEYS
    return orjson.dumps(value, option=options).decode()
