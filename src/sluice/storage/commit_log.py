"""This module is the log itself: entries in, positions out, in files of one fixed size.

    commitlog/00000000000000000000    file names are the position of their first byte
    commitlog/00000000001073741824

A position is a byte offset in the whole log. Appends are staged in memory and written together, one
`pwritev` per file and turn; until `write` has returned nothing of them exists. Where megabytes are
staged their writing may begin before (`early_writes.py`). An entry never crosses a file: where it
does not fit, the file is closed with an end-of-file mark and the entry opens the next file.

The log knows nothing of queues, durability or visibility; it never reads a clock and never deletes
what it was not told to delete. Where memory for its files is slow to get, `slow_pages.py` finds it
out and sees to it beforehand, and `old_pages.py` gives back what older parts have.

All methods belong to the owner's thread; only `OpenFile.sync` and `warm` of its files, and writes
that were begun early, may run elsewhere.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Sequence
from functools import partial
from threading import Lock
from typing import Final

from sluice.errors import DiskFull, StoreCorrupt, StoreError, StoreReadOnly
from sluice.model import Buffer
from sluice.protocol import records
from sluice.storage.background import Background
from sluice.storage.early_writes import EarlyWrites, Wrote
from sluice.storage.files import Files, OpenFile
from sluice.storage.old_pages import OldPages, kept_bytes
from sluice.storage.page_blocks import write_in_blocks
from sluice.storage.slow_pages import LARGE_BYTES, SlowPages

NAME_DIGITS: Final = 20
_NO_ROOM: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_REWRITE_BYTES: Final = 1 << 20
# The file that was written, the one that a turn went on in, and the one that was prepared.
_SHORT_FILES_MAX: Final = 3


def segment_name(base: int) -> str:
    return f"{base:0{NAME_DIGITS}d}"


_NOTHING_EARLY: Final = Wrote(0, 0)


class Segment:
    """One file of the log, open for reading and writing."""

    __slots__ = ("base", "file", "last_ms")

    def __init__(self, base: int, file: OpenFile) -> None:
        self.base = base
        self.file = file
        # Store time of the newest entry, known when the file is full or was scanned; retention asks
        # for it.
        self.last_ms: int | None = None


class CommitLog:
    """The ordered files of one log. `start` and `written` bound what may be read."""

    def __init__(
        self,
        files: Files,
        directory: str,
        background: Background,
        segment_bytes: int,
        cached_bytes_min: int = 0,
    ) -> None:
        """`cached_bytes_min`: how much of its end stays in memory, see `old_pages.py`."""
        self._files = files
        self._background = background
        self._early = EarlyWrites(background)
        self.directory = directory
        self.segment_bytes = segment_bytes
        self.segments: dict[int, Segment] = {}  # by base, in order
        kept = kept_bytes(cached_bytes_min)
        self._old_pages = OldPages(self.segments, segment_bytes, kept)
        self._pages = SlowPages(background, on_slow=self._old_pages.begin)
        self.written = 0
        self.newest_ms = 0  # store time of what is being staged; a file that is closed remembers it
        self._active: Segment | None = None
        self._prepared: Segment | None = None
        self._preparing = False
        self._making = Lock()
        self._made: Segment | None = None  # the newest file that was made, behind the lock
        # What is staged: per file the buffers, and where the log ends when they are written.
        self._end = 0
        self._active_end = 0
        self._group: list[Buffer] = []
        self._group_at = 0
        self._full_groups: list[tuple[Segment, int, list[Buffer]]] = []
        self._before_stage: Segment | None = None

    # ------------------------------------------------------------------------------------ opening

    def load(self) -> None:
        """Open the files that are there. Which part of them is the log, recovery finds out."""
        self._files.make_directory(self.directory)
        names = self._files.names(self.directory)
        for name in names:
            path = f"{self.directory}/{name}"
            if len(name) != NAME_DIGITS or not name.isdigit():
                raise StoreCorrupt(path, 0, "not a log file's name; move the file elsewhere")
            base = int(name)
            size = self._files.size(path)
            if base % self.segment_bytes:
                raise StoreCorrupt(
                    path, 0, f"does not start at a multiple of segment_bytes={self.segment_bytes}"
                )
            if self.segments and base != next(reversed(self.segments)) + self.segment_bytes:
                expected = segment_name(next(reversed(self.segments)) + self.segment_bytes)
                raise StoreCorrupt(
                    path, 0, f"the file before it is missing: expected {self.directory}/{expected}"
                )
            # A crash can fall between a file's creation, or the wiping of a tail, and its length.
            newest = name in names[-_SHORT_FILES_MAX:]
            if size != self.segment_bytes and not (newest and size < self.segment_bytes):
                raise StoreCorrupt(
                    path,
                    min(size, self.segment_bytes),
                    f"{size} bytes long, segment_bytes is {self.segment_bytes}; "
                    "start with the segment_bytes that the store was made with",
                )
            self.segments[base] = Segment(base, self._files.open(path))

    def finish_load(self, end: int) -> None:
        """Recovery found the end: the file that holds it is active, an empty one after it is
        prepared.
        """
        self.written = self._end = end
        self._old_pages.start_at(end)
        base = end - end % self.segment_bytes
        for segment in list(self.segments.values())[-_SHORT_FILES_MAX:]:
            if segment.file.size != self.segment_bytes:
                segment.file.resize(self.segment_bytes)
        for later in [b for b in self.segments if b > base]:
            assert self._prepared is None, "recovery leaves at most one file after the end"
            self._prepared = self.segments.pop(later)
        if base not in self.segments:
            self.segments[base] = self._take_next(base)
        self._activate(self.segments[base])

    def sync_names(self) -> None:
        """Make the newest files' names and lengths durable: a killed process may not have."""
        for segment in (self._active, self._prepared):
            if segment is not None:
                segment.file.sync()
        self._files.sync_directory(self.directory)

    def rewrite(self, start: int, stop: int) -> None:
        """Write what is there once more, so that a sync that follows really brings it to the disk.

        After a failed fsync the system may hold pages that it takes for written and that are not.
        """
        while start < stop:
            at = start % self.segment_bytes
            size = min(stop - start, self.segment_bytes - at, _REWRITE_BYTES)
            file = self.segments[start - at].file
            file.pwritev([file.pread(size, at)], at)
            start += size

    def _activate(self, segment: Segment) -> None:
        self._active = segment
        self._active_end = segment.base + self.segment_bytes

    @property
    def start(self) -> int:
        """The lowest position that is still there."""
        return next(iter(self.segments), self.written)

    # ----------------------------------------------------------------------------------- appending

    @property
    def entry_bytes_max(self) -> int:
        return self.segment_bytes - records.BLANK_BYTES

    @property
    def end(self) -> int:
        """Where the log ends once everything staged is written."""
        return self._end

    @property
    def file_end(self) -> int:
        """Up to where entries may reach that go into the same file as the last one."""
        return self._active_end - records.BLANK_BYTES

    def position_for(self, size: int) -> int:
        """The position of the next `size` bytes (one entry, or a batch that must not cross a
        file).
        """
        if self._end + size + records.BLANK_BYTES > self._active_end:
            self._roll()
        return self._end

    def stage(self, entry: Buffer) -> None:
        """Take an entry that was encoded for the position that `position_for` gave."""
        if not self._group:
            self._group_at = self._end
            if self._before_stage is None:
                self._before_stage = self._active
        self._group.append(entry)
        self._end += len(entry)

    def stage_parts(self, parts: Sequence[Buffer], size: int) -> None:
        """The same with an entry in parts, of so many bytes together."""
        if not self._group:
            self._group_at = self._end
            if self._before_stage is None:
                self._before_stage = self._active
        self._group += parts
        self._end += size

    def write_early(self) -> None:
        """Let another thread begin to write what is staged, or do it where that is quick: `write`
        sees to the rest.

        In the order of the log, with the ends of files that became full: what a killed process
        leaves must be a beginning of the turn.
        """
        active = self._active
        if not self._group or active is None:
            return
        early = self._early.do if self._old_pages.is_giving else self._early.begin
        for segment, position, buffers in (
            *self._full_groups,
            (active, self._group_at, self._group),
        ):
            early(self._writing(segment, buffers, position))
        self._full_groups = []
        self._group = []

    def _roll(self) -> None:
        active = self._active
        assert active is not None, "the log is loaded before it is written"
        base = self._active_end
        following = self._take_next(base)  # first, because it can fail
        self.stage(records.blank(self._active_end - self._end))
        self._full_groups.append((active, self._group_at, self._group))
        self._group = []
        active.last_ms = self.newest_ms
        self.segments[base] = following
        self._activate(following)
        self._end = base

    def write(self) -> None:
        """Write everything staged. On failure the log is as it was before: nothing of it exists."""
        if not self._group and not self._full_groups and not self._early:
            return
        active = self._active
        assert active is not None
        try:
            early = self._early.finish() if self._early else _NOTHING_EARLY
            for segment, position, buffers in self._full_groups:
                self._writing(segment, buffers, position)()
            if self._group:
                self._write_group(active)
        except OSError as error:
            self._unwrite(error)
            if error.errno in _NO_ROOM:
                raise DiskFull(
                    f"{active.file.path}: no room on the disk ({error.strerror}); free some space, "
                    "writing goes on by itself"
                ) from error
            raise StoreError(f"{active.file.path}: write failed: {error.strerror}") from error
        self._full_groups = []
        self._group = []
        self._before_stage = None
        self.written = self._end
        if early.byte_count and not self._old_pages.is_giving:
            self._pages.wrote_early(active.base, active.file, self._end, *early)
        if self._end >= self._old_pages.due_at:
            self._old_pages.make_room(self._end)
        if self._end - active.base > self.segment_bytes // 4:
            self._prepare_next()

    def _write_group(self, active: Segment) -> None:
        begin, end, pages = self._group_at, self._end, self._pages
        is_watched = end - begin >= LARGE_BYTES and not self._old_pages.is_giving
        since_ns = pages.begin() if is_watched else 0
        if self._old_pages.is_active:
            self._writing(active, self._group, begin)()
        else:
            active.file.pwritev(self._group, begin - active.base)
        if is_watched:
            pages.wrote(active.base, active.file, begin, end, since_ns)

    def _writing(
        self, segment: Segment, buffers: Sequence[Buffer], position: int
    ) -> Callable[[], int]:
        """What writes these; any thread may call it."""
        file, at = segment.file, position - segment.base
        if self._old_pages.is_active:
            return partial(write_in_blocks, file, buffers, at, self.segment_bytes)
        return partial(file.pwritev, buffers, at)

    def unstage(self) -> None:
        """Forget what is staged and not written."""
        if self._before_stage is not None and self._before_stage is not self._active:
            # The files that staging opened are empty: keep the first as the prepared one.
            for base in [b for b in self.segments if b > self._before_stage.base]:
                extra = self.segments.pop(base)
                if self._prepared is None:
                    self._prepared = extra
                else:
                    extra.file.close()
                    self._files.remove(extra.file.path)
                    self._made = None
            self._activate(self._before_stage)
        self._before_stage = None
        self._full_groups = []
        self._group = []
        self._end = self.written

    def _unwrite(self, reason: OSError) -> None:
        """A write failed half-way: wipe what reached the files, so that no later recovery finds it.

        Cutting the file and giving it its length back needs no space, so it works on a full disk
        too. It must be durable before anybody is told that nothing was stored.
        """
        base = self.written - self.written % self.segment_bytes
        touched = [segment for segment in self.segments.values() if segment.base >= base]
        try:
            for segment in touched:
                segment.file.resize(max(0, self.written - segment.base))
                segment.file.resize(self.segment_bytes)
                segment.file.sync()
            self.unstage()
        except OSError as error:
            raise StoreReadOnly(
                f"{touched[0].file.path}: write failed ({reason.strerror}) and could not be "
                f"undone: {error.strerror}; whether it was stored the next start finds out"
            ) from error

    # --------------------------------------------------------------------------------- preparation

    def _make(self, base: int) -> Segment:
        """Create a file; name and length must be durable before anything in it is acknowledged."""
        path = f"{self.directory}/{segment_name(base)}"
        file = self._files.create(path, self.segment_bytes)
        try:
            file.sync()  # its length: only the newest files may be found with another one
            self._files.sync_directory(self.directory)
        except OSError:
            # A failed sync cannot be repeated, a new file can be made.
            file.close()
            self._files.remove(path)
            raise
        return Segment(base, file)

    def _make_once(self, base: int) -> Segment:
        """The file, whoever comes first: the background that prepares it or the owner in need."""
        with self._making:
            if self._made is None or self._made.base != base:
                self._made = self._make(base)
            return self._made

    def _take_next(self, base: int) -> Segment:
        prepared, self._prepared = self._prepared, None
        if prepared is not None:
            assert prepared.base == base, "the prepared file follows the active one"
            return prepared
        try:
            return self._make_once(base)
        except OSError as error:
            path = f"{self.directory}/{segment_name(base)}"
            if error.errno in _NO_ROOM:
                raise DiskFull(f"{path}: no room on the disk for a new log file") from error
            raise StoreError(f"{path}: cannot create a log file: {error.strerror}") from error

    def _prepare_next(self) -> None:
        if self._prepared is not None or self._preparing:
            return
        base = self._active_end
        self._preparing = True
        self._background.submit("disk", lambda: self._make_once(base), self._next_prepared)

    def _next_prepared(self, segment: Segment | None, error: BaseException | None) -> None:
        self._preparing = False
        # A failure is not reported here: the append that needs the file will meet it and say so.
        # Where the owner needed the file before this report came it is in use already.
        if segment is not None and segment.base == self._active_end:
            self._prepared = segment

    # -------------------------------------------------------------------------------------- reading

    def is_cached(self, start: int, stop: int) -> bool:
        """Whether a part of one file is in memory; False where it takes more than one look."""
        at = start % self.segment_bytes
        if not 0 < stop - start <= self.segment_bytes - at:
            return False
        return self.segments[start - at].file.cached(at, at + stop - start)

    def view(self, position: int, size: int) -> memoryview:
        """The bytes at a position, as a slice of the file's mapping. The caller knows they are
        there.
        """
        at = position % self.segment_bytes
        return self.segments[position - at].file.view(at)[at : at + size]

    def flushed(self, position: int) -> None:
        """The log is on the disk up to here."""
        self._old_pages.flushed(position)

    def note_reads(self) -> None:
        """Once in a while: what is read stays in memory."""
        self._old_pages.note_reads()

    def path_of(self, position: int) -> tuple[str, int]:
        """File and offset in it, for messages to people."""
        at = position % self.segment_bytes
        return f"{self.directory}/{segment_name(position - at)}", at

    def files_between(self, start: int, stop: int) -> list[OpenFile]:
        """The files that hold a range: what a flush must make durable."""
        first = start - start % self.segment_bytes
        return [s.file for s in self.segments.values() if first <= s.base < stop]

    # ------------------------------------------------------------------------------------- deleting

    def detach_before(self, position: int) -> list[str]:
        """Forget the whole files below a position, never the active one; returns their paths.

        Deleting them is slow and is left to the caller's background. They are not closed here:
        reads that are under way hold them, the last one lets go of them.
        """
        gone = [
            base
            for base, segment in self.segments.items()
            if base + self.segment_bytes <= position and segment is not self._active
        ]
        for base in gone:
            self._old_pages.forget(base)
        return [self.segments.pop(base).file.path for base in gone]

    def close(self) -> None:
        self._early.drop()
        for segment in self.segments.values():
            segment.file.close()
        if self._prepared is not None:
            self._prepared.file.close()
