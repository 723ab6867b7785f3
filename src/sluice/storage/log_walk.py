"""This module reads a log that may be damaged, from any place to its end, and changes nothing.

Recovery stops at the first thing that is no entry. A person wants to know what lies behind it: this
walk goes on. From the bad byte it looks for the next place where a magic stands, where the entry
names exactly this place as its own, and where every length and checksum holds. What lies between is
a gap.

    entry entry [ gap: reason ] entry | end-of-file mark     next file: entry entry <- end, zeros

It reads with `pread`, not through a mapping: a file that another process cuts, or a sector that the
drive cannot read, is then a gap with a reason and not the end of the program. Nothing here writes,
takes a lock or reads a clock; the store may be in use meanwhile.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from struct import Struct
from typing import Final, NamedTuple

from sluice.protocol import records
from sluice.storage.commit_log import NAME_DIGITS, segment_name
from sluice.storage.files import Files, OpenFile

WINDOW_BYTES: Final = 4 << 20
SECTOR_BYTES: Final = 4096  # what is given up around a place that cannot be read
ENTRY_BYTES_MIN: Final = 92
ZEROS: Final = "zeros where entries must be"

_MAGIC_START: Final = b"\xda\xa3\x20"  # of both layouts
_MAGICS: Final = (records.MAGIC_V1, records.MAGIC_V2)
_HEAD: Final = Struct(">iI20xq")  # size, magic, own position
_HEAD_BYTES: Final = 36

_ZEROS: Final = bytes(WINDOW_BYTES)

OnEntry = Callable[[int, records.Summary], None]
Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class Gap:
    """A range of the log that holds no entry that can be trusted."""

    start: int
    stop: int
    reason: str


class Unreadable(NamedTuple):
    """A range of a file that the disk did not give back."""

    path: str
    start: int
    stop: int
    reason: str


@dataclass(slots=True)
class LogFile:
    """One file of the log; a missing one (a hole between two others) has no `file` and no bytes."""

    base: int
    path: str
    size: int
    file: OpenFile | None
    # What the walk saw; None where it did not come by.
    entry_count: int | None = None
    used: int | None = None  # bytes up to the end of the last entry
    first_ms: int | None = None
    last_ms: int | None = None


@dataclass(slots=True)
class Walk:
    """What a walk saw."""

    start: int
    end: int = 0  # after the last intact entry, or after the end-of-file mark behind it
    entry_count: int = 0
    gaps: list[Gap] = field(default_factory=list)
    # The first thing that is no entry, also where nothing follows it; "" where only zeros do.
    stopped_at: int = 0
    stopped_by: str = ""
    after_stop_count: int = 0  # intact entries behind it
    last_data: int = 0  # everything from here on is zero, as far as was looked

    @property
    def gap_bytes(self) -> int:
        return sum(gap.stop - gap.start for gap in self.gaps)


class LogFiles:
    """The files under commitlog/, open for reading only. `foreign` names what is no log file."""

    def __init__(self, files: Files, directory: str) -> None:
        self.directory = directory
        self.foreign: list[tuple[str, str]] = []
        self.unreadable: list[Unreadable] = []
        self.segment_bytes = 0
        self.segments: dict[int, LogFile] = {}
        found: dict[int, tuple[str, int]] = {}
        for name in files.names(directory):
            path = f"{directory}/{name}"
            if len(name) != NAME_DIGITS or not (name.isascii() and name.isdigit()):
                self.foreign.append((path, "not a log file's name"))
                continue
            try:
                found[int(name)] = (path, files.size(path))
            except FileNotFoundError:
                raise  # a broker that runs has deleted it: the caller looks once more
            except OSError as error:
                self.foreign.append((path, f"no log file: {error.strerror}"))
        self.segment_bytes = _segment_bytes(found)
        for base, (path, size) in found.items():
            if self.segment_bytes == 0:
                continue  # a crash between the first file's name and its length
            if base % self.segment_bytes:
                self.foreign.append((path, f"does not start at a multiple of {self.segment_bytes}"))
                continue
            self._add_missing(base)
            try:
                file = files.open(path, writable=False)
            except BaseException:
                self.close()
                raise
            self.segments[base] = LogFile(base, path, size, file)

    def _add_missing(self, base: int) -> None:
        while self.segments:
            expected = next(reversed(self.segments)) + self.segment_bytes
            if expected >= base:
                return
            path = f"{self.directory}/{segment_name(expected)}"
            self.segments[expected] = LogFile(expected, path, 0, None)

    @property
    def start(self) -> int:
        return next(iter(self.segments), 0)

    @property
    def stop(self) -> int:
        """The end of the last file, whatever it holds."""
        return next(reversed(self.segments), -self.segment_bytes) + self.segment_bytes

    def read(self, segment: LogFile, at: int, size: int) -> bytes:
        """Bytes of a file, always as many as asked for: zeros where there are none to be had."""
        size = min(size, self.segment_bytes - at)
        if segment.file is None:
            return bytes(size)
        try:
            data = segment.file.pread(size, at)
        except OSError as error:
            if size <= SECTOR_BYTES:
                self._note_unreadable(segment.path, at, size, error)
                return bytes(size)
            # A sector that fails must not take its neighbours along.
            half = max(SECTOR_BYTES, size // 2 // SECTOR_BYTES * SECTOR_BYTES)
            return self.read(segment, at, half) + self.read(segment, at + half, size - half)
        return data.ljust(size, b"\0")

    def _note_unreadable(self, path: str, at: int, size: int, error: OSError) -> None:
        last = self.unreadable[-1] if self.unreadable else None
        if last is not None and last.path == path and last.start <= at <= last.stop:
            self.unreadable[-1] = last._replace(stop=max(last.stop, at + size))
        else:
            reason = error.strerror or str(error)
            self.unreadable.append(Unreadable(path, at, at + size, reason))

    def path_of(self, position: int) -> tuple[str, int]:
        """File and offset in it, for messages to people."""
        at = position % self.segment_bytes if self.segment_bytes else 0
        return f"{self.directory}/{segment_name(position - at)}", at

    def holds_data(self, base: int) -> bool:
        """Whether a file begins with something; prepared files are zero."""
        segment = self.segments.get(base)
        return segment is not None and any(self.read(segment, 0, 8))

    def close(self) -> None:
        for segment in self.segments.values():
            if segment.file is not None:
                segment.file.close()


class _Window:
    """The bytes around the place that is looked at; read again when the walk leaves them."""

    def __init__(self, log: LogFiles, segment: LogFile) -> None:
        self._log = log
        self._segment = segment
        self.data = b""
        self.at = 0  # of its first byte in the file

    def need(self, at: int, size: int) -> int:
        """See to it that [at, at + size) is in `data`; returns where `at` is in it."""
        inside = at - self.at
        if inside < 0 or inside + size > len(self.data):
            self.data = self._log.read(self._segment, at, max(size, WINDOW_BYTES))
            self.at = at
            inside = 0
        return inside


class LogWalker:
    """Walks one log. With `thorough` it always looks behind the end, else only with a reason."""

    def __init__(
        self,
        log: LogFiles,
        on_entry: OnEntry,
        *,
        known: int,
        thorough: bool = False,
        progress: Progress | None = None,
    ) -> None:
        self._log = log
        self._on_entry = on_entry
        self._known = known  # the log was durable up to here, so it cannot end before
        self._thorough = thorough
        self._progress = progress
        self._stopped = False
        self.stopped_at: int | None = None  # known as soon as the walk comes by
        self._seen_to = 0
        self.walk = Walk(0)

    def run(self, start: int) -> Walk:
        """Walk from `start`, which must be the start of an entry or of a file."""
        log = self._log
        walk = self.walk = Walk(start, end=start, stopped_at=start, last_data=start)
        self._seen_to = start
        position = start
        while (segment := self._segment_of(position)) is not None:
            position = self._walk_segment(segment, position - segment.base, walk)
            if position < 0:
                break
        if not self._stopped:
            walk.stopped_at = walk.end
        walk.last_data = max(walk.last_data, walk.end)
        if self._progress is not None:
            self._progress(log.stop - start, log.stop - start)
        return walk

    def _segment_of(self, position: int) -> LogFile | None:
        size = self._log.segment_bytes
        return self._log.segments.get(position - position % size) if size else None

    def _walk_segment(self, segment: LogFile, at: int, walk: Walk) -> int:
        """Returns the position to go on from, -1 where the log ends for good."""
        window = _Window(self._log, segment)
        base, length = segment.base, self._log.segment_bytes
        segment.entry_count = segment.entry_count or 0
        while True:
            self._report(base + at, walk.start)
            try:
                summary = self._closed_or_entry(window, base, at)
            except records.BadRecord as error:
                found = self._resync(segment, window, at, str(error), walk)
                if found < 0 or found // length != base // length:
                    return found
                at = found - base
                continue
            if summary is None:
                walk.end = base + length
                return base + length
            self._take(segment, base + at, summary, walk)
            at += summary.size

    def _closed_or_entry(self, window: _Window, base: int, at: int) -> records.Summary | None:
        """The entry at a place, None for the end-of-file mark; BadRecord("") for zeros."""
        left = self._log.segment_bytes - at
        if left < records.BLANK_BYTES:
            raise records.BadRecord(f"only {left} bytes left in the file")
        inside = window.need(at, min(ENTRY_BYTES_MIN, left))
        size, magic = records.peek(window.data, inside)
        if magic == records.MAGIC_BLANK and size == left:
            return None
        if size == 0 and magic == 0:
            raise records.BadRecord("")
        if magic in _MAGICS and left >= ENTRY_BYTES_MIN:
            # Only what fits and names its own place is worth a long read: sizes may be damaged too.
            own_position = _HEAD.unpack_from(window.data, inside)[2]
            if not _entry_fits(size, left):
                raise records.BadRecord(f"size {size} does not fit into the {left} bytes left")
            if own_position != base + at:
                raise records.BadRecord(
                    f"the entry says that it lies at {own_position}, it lies at {base + at}"
                )
            inside = window.need(at, size)
        return records.summarize(window.data, inside, base + at)

    def _take(self, segment: LogFile, position: int, entry: records.Summary, walk: Walk) -> None:
        assert segment.entry_count is not None
        segment.entry_count += 1
        walk.entry_count += 1
        walk.after_stop_count += self._stopped
        walk.end = position + entry.size
        segment.used = walk.end - segment.base
        if segment.first_ms is None:
            segment.first_ms = entry.store_ms
        segment.last_ms = max(segment.last_ms or 0, entry.store_ms)
        self._on_entry(position, entry)

    def _resync(self, segment: LogFile, window: _Window, at: int, reason: str, walk: Walk) -> int:
        """Look for the next intact entry behind a bad byte; -1 where there is none."""
        bad = segment.base + at
        if not self._stopped:
            walk.stopped_at, walk.stopped_by = bad, reason
            self.stopped_at = bad
            if not self._worth_looking(bad, reason):
                return -1
            self._stopped = True
        found = self._search(segment, window, at + 1, walk)
        base = segment.base
        while found < 0 and (following := self._log.segments.get(base + self._log.segment_bytes)):
            base = following.base
            found = self._search(following, _Window(self._log, following), 0, walk)
        if found >= 0:
            walk.gaps.append(Gap(bad, found, reason or ZEROS))
            if not walk.stopped_by:
                walk.stopped_by = ZEROS
        return found

    def _worth_looking(self, bad: int, reason: str) -> bool:
        if self._thorough or reason or bad < self._known:
            return True
        length = self._log.segment_bytes
        return any(self._log.holds_data(b) for b in self._log.segments if b > bad - bad % length)

    def _search(self, segment: LogFile, window: _Window, at: int, walk: Walk) -> int:
        """The position of the first intact entry of a file from `at` on."""
        base, length = segment.base, self._log.segment_bytes
        if segment.file is None:
            return -1
        while at + ENTRY_BYTES_MIN <= length:
            self._report(base + at, walk.start)
            inside = window.need(at, min(WINDOW_BYTES // 2, length - at))
            data = window.data
            if data == _ZEROS[: len(data)]:  # most of an unfinished file: passed by quickly
                at += len(data) - inside
                continue
            used = len(data.rstrip(b"\0"))
            if used > inside:
                walk.last_data = max(walk.last_data, base + window.at + used)
            hit = data.find(_MAGIC_START, inside + 4)
            while hit >= 0:
                place = window.at + hit - 4
                if self._intact(segment, data, hit - 4, base + place):
                    return base + place
                hit = data.find(_MAGIC_START, hit + 1)
            # The last bytes may hold the beginning of a magic: they are looked at once more.
            at = max(at + 1, window.at + len(data) - 4 - len(_MAGIC_START) + 1)
        return -1

    def _intact(self, segment: LogFile, data: bytes, inside: int, position: int) -> bool:
        if inside < 0:
            return False
        if inside + _HEAD_BYTES > len(data):
            data = self._log.read(segment, position - segment.base, _HEAD_BYTES)
            inside = 0
            if len(data) < _HEAD_BYTES:
                return False
        size, _, own_position = _HEAD.unpack_from(data, inside)
        left = self._log.segment_bytes - (position - segment.base)
        if own_position != position or not _entry_fits(size, left):
            return False
        if inside + size > len(data):
            data, inside = self._log.read(segment, position - segment.base, size), 0
        try:
            records.summarize(data, inside, position)
        except records.BadRecord:
            return False
        return True

    def _report(self, position: int, start: int) -> None:
        if self._progress is not None and position - self._seen_to >= WINDOW_BYTES:
            self._seen_to = position
            self._progress(position - start, self._log.stop - start)


def _entry_fits(size: int, left: int) -> bool:
    return ENTRY_BYTES_MIN <= size <= left


def _segment_bytes(found: dict[int, tuple[str, int]]) -> int:
    """The length that the files agree on. One of them may be damaged, the last ones too short."""
    sizes = Counter(size for _, size in found.values() if size)
    likely = sorted(sizes, key=lambda size: (sizes[size], size), reverse=True)
    fitting = [size for size in likely if all(base % size == 0 for base in found)]
    return next(iter(fitting or likely), 0)


def first_entry(log: LogFiles, segment: LogFile) -> records.Summary:
    """The entry that a file begins with, checked; raises BadRecord."""
    data = log.read(segment, 0, _HEAD_BYTES)
    size, magic = records.peek(data, 0)
    if magic in _MAGICS and _entry_fits(size, log.segment_bytes):
        data = log.read(segment, 0, size)
    return records.summarize(data, 0, segment.base)
