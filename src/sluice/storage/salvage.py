"""This module makes a new store of all that is intact in a damaged one, which it never touches.

A store that lost something below its durable mark does not open, and rightly so; but somebody has
to get the rest out. The new store is a log in which every intact entry lies at the position that it
had, so message ids, queue offsets and committed positions stay what they were:

    damaged   entry entry ?????????? entry | ????????????????? | entry entry ??
    new       entry entry [ filler ] entry   [ end-of-file mark  ] entry entry state

- A gap inside of a file becomes filler entries that cover it to the byte. They are of topic
  `rmq_sys_sluice_damaged` (cut short where the gap is) and flagged as rolled back: no queue gets
  them.
- A gap that reaches the end of a file becomes the end-of-file mark; a missing file an empty one.
- At the end stand all settings, as the files under config/ and the intact entries have them, and
  for each queue the offset to go on from: no offset that may have been given away is given away
  again.

Only commitlog/ and config/ are made. The first start sees a store without a snapshot and makes the
rest.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

from sluice.errors import DiskFull, StoreError
from sluice.model import LOOPBACK_HOST, Message
from sluice.protocol import records
from sluice.storage import snapshot as marks
from sluice.storage import state as states
from sluice.storage.commit_log import segment_name
from sluice.storage.files import Files, OpenFile
from sluice.storage.inspection import require_store
from sluice.storage.log_walk import ENTRY_BYTES_MIN, ZEROS, Gap, LogFiles, LogWalker, Progress
from sluice.storage.queue_check import ends_in_files

DAMAGED_TOPIC: Final = b"rmq_sys_sluice_damaged"
_FILLER_BYTES_MAX: Final = 1 << 20
_COPY_BYTES: Final = 4 << 20
_CONFIG_BYTES_MAX: Final = 1 << 30
_STATE_BYTES_MAX: Final = 1 << 20
# Bounds on the offsets that are skipped where nobody knows how many were lost.
_SKIPPED_OFFSETS_MAX: Final = 10_000
_SKIPPED_TOTAL_MAX: Final = 1_000_000

Key = tuple[bytes, int]


@dataclass(slots=True)
class Salvaged:
    """What was done."""

    out: str
    segment_bytes: int
    entry_count: int = 0
    copied_bytes: int = 0
    lost_bytes: int = 0
    gaps: list[Gap] = field(default_factory=list)
    skipped_queue_count: int = 0
    notes: list[str] = field(default_factory=list)


def salvage(files: Files, root: str, out: str, progress: Progress | None = None) -> Salvaged:
    """Make the store `out` of what is intact in `root`; `out` must be new or empty, not inside."""
    require_store(files, root)
    _require_place(files, root, out)
    log = LogFiles(files, f"{root}/commitlog")
    try:
        if not log.segments:
            raise StoreError(f"{log.directory}: there are no log files to save anything from")
        return _Salvage(files, root, out, log).run(progress)
    except OSError as error:
        kind = DiskFull if error.errno == 28 else StoreError
        raise kind(f"{error.filename or out}: {error.strerror}; {out} is not complete") from error
    finally:
        log.close()


def _require_place(files: Files, root: str, out: str) -> None:
    inner, outer = os.path.realpath(out), os.path.realpath(root)
    if inner == outer or inner.startswith(outer + os.sep):
        raise StoreError(
            f"{out}: lies in the damaged store, which is not touched; name another place"
        )
    if files.exists(out) and (not files.is_directory(out) or files.names(out)):
        raise StoreError(f"{out}: is not empty; name a new directory")


class _Salvage:
    def __init__(self, files: Files, root: str, out: str, log: LogFiles) -> None:
        self._files = files
        self._root = root
        self._log = log
        self.done = Salvaged(out, log.segment_bytes)
        self._runs: list[list[int]] = []  # [start, stop): entries without a gap between them
        # (topic, queue) -> next offset, and the position of its last entry
        self._queues: dict[Key, tuple[int, int]] = {}
        self._last_ms = 0
        self._store_host = LOOPBACK_HOST
        self._tables = states.StateTables()
        self._floors: dict[bytes, int] = {}  # deleted topics: entries below belong to no queue
        self._state_topic = states.STATE_TOPIC.encode()
        self._state_from = 0

    def run(self, progress: Progress | None) -> Salvaged:
        files, root = self._files, self._root
        snapshot = marks.read_snapshot(files, root)
        reliable = snapshot["log_offset"] if snapshot is not None else 0
        known = max(marks.DurableMark(files, root).read(), reliable)
        self._state_from = self._load_tables(reliable)
        walker = LogWalker(self._log, self._on_entry, known=known, thorough=True, progress=progress)
        self._walker, self._known = walker, known
        walker.run(self._log.start)
        if not self._runs:
            raise StoreError(f"{self._log.directory}: no intact entry was found")
        self._find_gaps()
        ends = {
            (topic.encode(), queue_id): end
            for topic, queue_id, *_, end, _ in (snapshot or {"queues": []})["queues"]
            if self._floors.get(topic.encode(), -1) < reliable
        }
        if snapshot is None:
            ends = ends_in_files(files, root, self._floors)
            reliable = self._log.stop if ends else 0
        self._set_ends(ends, reliable)
        self._write_log()
        self._copy_config()
        return self.done

    # ------------------------------------------------------------------------------------ reading

    def _load_tables(self, reliable: int) -> int:
        """Settings as config/ has them; returns from where on entries of the log are newer."""
        config = states.read_files(self._files, f"{self._root}/config")
        self._tables.tables = {**config.foreign, **config.ours}
        self._foreign = config.foreign
        deleted = self._tables.tables.get(states.DELETED_TABLE, {})
        self._floors = {topic.encode(): floor for topic, floor in deleted.items()}
        whole = not config.damaged and self._tables.tables
        return reliable if whole else 0

    def _on_entry(self, position: int, entry: records.Summary) -> None:
        stopped_at = self._walker.stopped_at
        if stopped_at is not None and 0 < self._known <= stopped_at:
            return  # a torn tail: recovery takes it off too
        last = self._runs[-1] if self._runs else None
        if last is not None and last[1] == position:
            last[1] += entry.size
        elif last is not None and self._too_narrow(last[1], position):
            self.done.notes.append(f"the entry at {position} leaves no room for a filler: dropped")
            return
        else:
            self._runs.append([position, position + entry.size])
        self.done.entry_count += 1
        self.done.copied_bytes += entry.size
        self._last_ms = max(self._last_ms, entry.store_ms)
        floor = self._floors.get(entry.topic, 0)
        if position >= floor and records.in_queue(entry.sys_flag):
            count = records.offset_count(entry.sys_flag, entry.properties)
            key = (entry.topic, entry.queue_id)
            end = max(self._queues.get(key, (0, 0))[0], entry.queue_offset + count)
            self._queues[key] = (end, position)
        if entry.topic == self._state_topic and position >= self._state_from:
            self._apply(position, entry)

    def _too_narrow(self, start: int, stop: int) -> bool:
        size = self._log.segment_bytes
        return start // size == stop // size and stop - start < ENTRY_BYTES_MIN

    def _apply(self, position: int, entry: records.Summary) -> None:
        decoded = records.decode(self._read(position, entry.size), 0, position)
        self._store_host = decoded.store_host
        try:
            self._tables.apply(decoded.body, entry.store_ms)
            for topic, floor in states.deleted_topics(decoded.body).items():
                self._forget(topic.encode(), floor)
        except (ValueError, KeyError, TypeError):
            self.done.notes.append(f"settings at position {position} make no sense: left out")

    def _forget(self, topic: bytes, floor: int) -> None:
        self._floors[topic] = max(floor, self._floors.get(topic, 0))
        for key in [key for key in self._queues if key[0] == topic]:
            del self._queues[key]

    def _read(self, position: int, size: int) -> bytes:
        at = position % self._log.segment_bytes
        return self._log.read(self._log.segments[position - at], at, size)

    def _find_gaps(self) -> None:
        """What lies between the runs and is no end of a file."""
        size = self._log.segment_bytes
        end = self._log.start
        reasons = {gap.start: gap.reason for gap in self._walker.walk.gaps}
        for start, stop in self._runs:
            closed = end % size and start % size == 0 and start - end < size and end not in reasons
            if start > end and not closed:
                reason = reasons.get(end, "no entries")
                self.done.gaps.append(Gap(end, start, reason))
                self.done.lost_bytes += start - end
            end = stop
        if self._known > end:
            reason = self._walker.walk.stopped_by or ZEROS
            self.done.gaps.append(Gap(end, self._known, reason))
            self.done.lost_bytes += self._known - end

    def _set_ends(self, ends: dict[Key, int], reliable: int) -> None:
        """Queues go on behind every offset that was, or may have been, given away."""
        lost = [gap for gap in self.done.gaps if gap.stop > reliable]
        lost_bytes = sum(gap.stop - max(gap.start, reliable) for gap in lost)
        keys = self._queues.keys() | ends.keys()
        margin = min(lost_bytes // ENTRY_BYTES_MIN, _SKIPPED_OFFSETS_MAX)
        margin = min(margin, max(1, _SKIPPED_TOTAL_MAX // max(1, len(keys))))
        table = self._tables.tables.setdefault(states.QUEUE_END_TABLE, {})
        for topic, queue_id in sorted(keys):
            found, position = self._queues.get((topic, queue_id), (0, -1))
            end = max(found, ends.get((topic, queue_id), 0))
            if lost and position < lost[-1].stop:
                end += margin
            if end > found:
                table[f"{topic.decode('utf-8', 'replace')}@{queue_id}"] = end
                self._queues[topic, queue_id] = (end, position)
                self.done.skipped_queue_count += 1
        for name, values in self._foreign.items():
            self._tables.tables[name] = values

    # ------------------------------------------------------------------------------------ writing

    def _write_log(self) -> None:
        self._files.make_directory(f"{self.done.out}/commitlog")
        size = self._log.segment_bytes
        end = self._runs[-1][1]
        for base in range(self._log.start, end, size):
            file = self._create(base)
            try:
                self._write_segment(file, base, closed=base + size <= end)
                if base + size > end:
                    self._write_state(file, end)
                file.sync()
            finally:
                file.close()
        self._files.sync_directory(f"{self.done.out}/commitlog")

    def _create(self, base: int) -> OpenFile:
        path = f"{self.done.out}/commitlog/{segment_name(base)}"
        return self._files.create(path, self._log.segment_bytes)

    def _write_segment(self, file: OpenFile, base: int, *, closed: bool) -> None:
        at = base
        limit = base + self._log.segment_bytes
        for start, stop in self._runs:
            # A run may go through the ends of files; entries never do, so it is cut there.
            start, stop = max(start, base), min(stop, limit)
            if start >= stop:
                continue
            if start > at:
                file.pwritev(list(self._fillers(at, start)), at - base)
            for part in range(start, stop, _COPY_BYTES):
                data = self._read(part, min(_COPY_BYTES, stop - part))
                file.pwritev([data], part - base)
            at = stop
        if closed:
            file.pwritev([records.blank(limit - at)], at - base)

    def _fillers(self, start: int, stop: int) -> Iterator[bytes]:
        """Entries that cover a gap to the byte, in parts of bounded size."""
        while start < stop:
            size = stop - start
            if size > _FILLER_BYTES_MAX:
                # What is left must not be too small for an entry.
                size = min(_FILLER_BYTES_MAX, stop - start - ENTRY_BYTES_MIN)
            yield filler(start, size, self._last_ms)
            start += size

    def _write_state(self, file: OpenFile, end: int) -> None:
        """All settings at the end of the log; into further files where they do not fit."""
        size = self._log.segment_bytes
        bytes_max = min(_STATE_BYTES_MAX, size - records.BLANK_BYTES - 512)
        encoder = records.Encoder(
            self._store_host, with_crc=True, body_bytes_max=size, entry_bytes_max=size
        )
        offset, _ = self._queues.get((self._state_topic, 0), (0, -1))
        current, base = file, end - end % size
        for body in self._tables.full_bodies(bytes_max):
            message = Message(states.STATE_TOPIC, 0, body, born_ms=self._last_ms)
            need = encoder.measure(message, self._state_topic)
            if end + need + records.BLANK_BYTES > base + size:
                current.pwritev([records.blank(base + size - end)], end - base)
                if current is not file:
                    current.sync()
                    current.close()
                base = end = base + size
                current = self._create(base)
            entry = encoder.encode(message, self._state_topic, need, offset, end, self._last_ms)
            current.pwritev([entry], end - base)
            end += len(entry)
            offset += 1
        if current is not file:
            current.sync()
            current.close()

    def _copy_config(self) -> None:
        source, target = f"{self._root}/config", f"{self.done.out}/config"
        names = [n for n in self._files.names(source) if n.endswith((".json", ".json.bak"))]
        if names:
            self._files.make_directory(target)
        for name in names:
            try:
                data = self._files.read(f"{source}/{name}", _CONFIG_BYTES_MAX)
            except OSError as error:
                self.done.notes.append(f"{source}/{name}: not copied: {error.strerror}")
                continue
            self._files.replace(f"{target}/{name}", data)


def filler(position: int, size: int, store_ms: int) -> bytes:
    """One entry of exactly `size` bytes that no queue takes: it says what it stands for."""
    assert size >= ENTRY_BYTES_MIN
    room = size - ENTRY_BYTES_MIN + 1
    topic = DAMAGED_TOPIC[:room]
    room -= len(topic)
    with_crc = room >= records.CRC_PROPERTY_BYTES
    if with_crc:
        room -= records.CRC_PROPERTY_BYTES
    body = f"{size} bytes were damaged here and could not be saved".encode()[:room]
    message = Message(
        "", 0, body.ljust(room, b"\0"), sys_flag=records.SYS_TX_ROLLBACK, born_ms=store_ms
    )
    encoder = records.Encoder(
        LOOPBACK_HOST, with_crc=with_crc, body_bytes_max=size, entry_bytes_max=size
    )
    entry = encoder.encode(message, topic, size, 0, position, store_ms)
    assert len(entry) == size
    return entry
