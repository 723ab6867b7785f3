"""This module finds the true end of the log after any stop, and brings everything else in line with
it.

Where it starts: at the snapshot's position when there is a snapshot that fits what lies on the
disk, else at the log's beginning (a store that Apache's broker wrote, a lost snapshot, deleted
queue files). From there every entry is checked (lengths, own position, checksums) and put into its
queue; the first thing that is no entry is the end.

    end is above everything that was known to be durable   a torn tail: cut off, the bytes kept
    beside end is below it                                         damage: the store does not open,
    says where

Cutting leaves zeros behind, durably, because bytes that were left could look like entries to the
next recovery. It is done last and can be done again: recover(recover(x)) = recover(x).

This module runs before the store serves anybody, so it may block; it starts no threads and reads no
clock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from sluice.errors import MessageIllegal, StoreCorrupt
from sluice.protocol import kafka_entries, records
from sluice.storage import snapshot as marks
from sluice.storage.commit_log import CommitLog, Segment
from sluice.storage.files import Files
from sluice.storage.queue_index import QueueIndex
from sluice.storage.state import STATE_TOPIC

_STATE_TOPIC_BYTES: Final = STATE_TOPIC.encode()
_CHUNK_BYTES: Final = 1 << 16
_ZEROS: Final = bytes(_CHUNK_BYTES)
# A power cut can lose pages of the newest files in any order, but not of files that were closed
# long ago.
_TORN_SEGMENTS_MAX: Final = 2

Progress = Callable[[int, int], None]


@dataclass(slots=True)
class Found:
    """What a scan saw."""

    end: int
    last_ms: int = 0
    entry_count: int = 0
    stopped_by: str = ""  # why the scan ended; empty where only zeros follow
    cut_files: list[str] = field(default_factory=list)


@dataclass(slots=True)
class Scan:
    """Walks entries from a position on and hands each to its queue."""

    log: CommitLog
    queue_of: Callable[[str, int], QueueIndex]
    on_state: Callable[[memoryview, int], Iterable[str]]  # gives the topics that the entry deletes
    delay_levels_ms: tuple[int, ...]
    deleted: Mapping[str, int] = field(default_factory=dict)  # topic -> below it, no entry counts
    progress: Progress | None = None
    after_segment: Callable[[int], None] | None = None
    only_state: bool = False
    strict_from: int = 1 << 63  # entries from here on may be torn though no checksum says so
    _queues: dict[tuple[bytes, int], QueueIndex] = field(default_factory=dict)
    _floors: dict[bytes, int] = field(default_factory=dict)

    def run(self, start: int, last_ms: int) -> Found:
        """Scan from `start`, which must be the start of an entry or the end of the log."""
        found = Found(start, last_ms)
        self._floors = {topic.encode(): position for topic, position in self.deleted.items()}
        log = self.log
        position = start
        while (segment := log.segments.get(position - position % log.segment_bytes)) is not None:
            position, closed = self._scan_segment(segment, position, found)
            found.end = position
            if not closed:
                break
            segment.last_ms = found.last_ms
            if self.after_segment is not None:
                self.after_segment(position)
            if self.progress is not None:
                self.progress(position - start, len(log.segments) * log.segment_bytes)
        return found

    def _scan_segment(self, segment: Segment, position: int, found: Found) -> tuple[int, bool]:
        """Returns where the scan stands and whether the file was closed by its end-of-file mark."""
        base, length = segment.base, self.log.segment_bytes
        at = position - base
        if not segment.file.size:
            return base, False  # a crash between its creation and its length
        view = segment.file.view()
        while True:
            size, magic = records.peek(view, at)
            if magic == records.MAGIC_BLANK and size == length - at:
                return base + length, True
            if size == 0 and magic == 0:
                return base + at, False
            try:
                entry = records.summarize(view, at, base + at)
                if base + at >= self.strict_from:
                    records.require_whole(entry.properties)
                if not self.only_state:
                    self._dispatch(entry, base + at)
            except (records.BadRecord, MessageIllegal) as error:
                found.stopped_by = str(error)
                return base + at, False
            if entry.topic == _STATE_TOPIC_BYTES:
                for topic in self.on_state(view[at : at + size], entry.store_ms):
                    self._forget(topic.encode())
            found.last_ms = max(found.last_ms, entry.store_ms)
            found.entry_count += 1
            at += size

    def _dispatch(self, entry: records.Summary, position: int) -> None:
        size, queue_id, offset, sys_flag, store_ms, topic, properties = entry
        if not records.in_queue(sys_flag):
            return
        if self._floors and position < self._floors.get(topic, 0):
            return  # of a topic that was deleted later
        queue = self._queues.get((topic, queue_id))
        if queue is None:
            queue = self.queue_of(topic.decode("utf-8", "replace"), queue_id)
            self._queues[topic, queue_id] = queue
        if sys_flag & records.SYS_INNER_BATCH and kafka_entries.is_kafka(sys_flag):
            code = kafka_entries.code_in(properties)
        else:
            code = records.tags_code(topic, properties, store_ms, self.delay_levels_ms)
        count = records.offset_count(sys_flag, properties) if sys_flag & 0x80 else 1
        unit = queue.pack(position, size, code, store_ms, offset, count)
        queue.add_found(unit, offset, count)

    def _forget(self, topic: bytes) -> None:
        """A topic of this name begins anew."""
        for key in [key for key in self._queues if key[0] == topic]:
            del self._queues[key]


def usable_snapshot(files: Files, root: str, log: CommitLog, durable: int) -> dict[str, Any] | None:
    """The snapshot, if it fits the files that are there."""
    snapshot = marks.read_snapshot(files, root)
    known = max(durable, snapshot["log_offset"] if snapshot else 0)
    if not log.segments:
        if known > 0:
            raise StoreCorrupt(
                log.directory, 0, f"no log files, but the log was durable up to position {known}; "
                "bring the files back or start with an empty directory",
            )  # fmt: skip
        return None
    if snapshot is None:
        return None
    if marks.read_checkpoint(files, root) not in snapshot["checkpoint"]:
        return None  # Apache's broker has run on this store since
    offset = snapshot["log_offset"]
    if not log.start <= offset <= next(reversed(log.segments)) + log.segment_bytes:
        return None
    for topic, queue_id, kind, *_, sums in snapshot["queues"]:
        tree, width = ("consumequeue", 20) if kind == "s" else ("batchconsumequeue", 46)
        for base in sums:
            if not files.exists(f"{root}/{tree}/{topic}/{queue_id}/{int(base) * width:020d}"):
                return None
    return snapshot


def refuse_damage(log: CommitLog, found: Found, start: int, durable: int) -> None:
    """Raise where the log ends before it may: then it is damaged, and cutting would lose data."""
    for segment in log.segments.values():
        if segment.base + segment.file.size < min(start, segment.base + log.segment_bytes):
            raise StoreCorrupt(
                log.path_of(segment.base)[0], segment.file.size,
                f"the file ends here, segment_bytes is {log.segment_bytes}; restore it from a copy",
            )  # fmt: skip
    if found.end >= durable:
        later = [
            segment
            for segment in log.segments.values()
            if segment.base > found.end and any(segment.file.pread(records.BLANK_BYTES, 0))
        ]
        if len(later) < _TORN_SEGMENTS_MAX:
            return
        what = f"{len(later)} files with data follow"
    else:
        what = f"the log was durable up to position {durable}"
    path, at = log.path_of(found.end)
    reason = found.stopped_by or "zeros where entries must be"
    raise StoreCorrupt(
        path, at, f"{reason}; {what}. Restore the file from a copy, or run `sluice inspect` on the "
        "directory to see what is left",
    )  # fmt: skip


def cut_tail(files: Files, root: str, log: CommitLog, found: Found, *, clean: bool) -> None:
    """Take off everything after the end: kept beside first, then wiped durably."""
    if clean and not found.stopped_by:
        return  # closed in order: everything after the end is zero
    end_base = found.end - found.end % log.segment_bytes
    for base, segment in list(log.segments.items()):
        if base < end_base:
            continue
        at = max(0, found.end - base)
        last = _last_data(segment, at)
        if last > at:
            directory = f"{root}/{marks.CUT_DIRECTORY}"
            files.make_directory(directory)
            path = _fresh_name(files, directory, base + at)
            files.replace(path, segment.file.pread(last - at, at))
            found.cut_files.append(path)
            segment.file.resize(at)
            segment.file.resize(log.segment_bytes)
            segment.file.sync()
        if base > end_base + log.segment_bytes:
            # One empty file after the end may stay, as the prepared one.
            del log.segments[base]
            segment.file.close()
            files.remove(segment.file.path)
            files.sync_directory(log.directory)


def _last_data(segment: Segment, start: int) -> int:
    """The end of what is not zero from `start` on; `start` where everything is."""
    file = segment.file
    size = file.size
    last = start
    at = file.data_from(start)
    while at < size:
        data = file.pread(_CHUNK_BYTES, at)
        # Comparing is far quicker than stripping, and nearly every piece is zero.
        if data != _ZEROS[: len(data)]:
            last = at + len(data.rstrip(b"\0"))
        at = file.data_from(at + len(data))
    return last


def _fresh_name(files: Files, directory: str, position: int) -> str:
    number = 0
    while files.exists(path := f"{directory}/{position:020d}.{number}"):
        number += 1
    return path
