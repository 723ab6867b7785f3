"""This module keeps the files that are followed: new ones, known ones, rotated and truncated ones.

    found, not known                      a new file; or for a while perhaps the copy of another
    found, known by number and marks      goes on at its place
    known by number, with other content   was truncated or replaced: begins anew, and the rest of
                                          the old content is looked for in a copy beside it
    open, and found no more               was rotated away or deleted: read to its end, closed
    known, not open, found no more        looked for beside where it was, by its number

Files that nobody has written to for a while are closed, and opened again when they change.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Final

from sluice.collector import sources
from sluice.collector.finding import Found
from sluice.collector.places import Identity, Place, PlaceBook, new_place
from sluice.collector.sources import Rewritten, Source

log_lines = logging.getLogger("sluice.collector")

_IDLE_SECONDS: Final = 300  # a file without a change for so long is closed until it has one
_COPY_SECONDS: Final = 30  # so long a file may be the unfinished copy of another
_COPY_BYTES_MIN: Final = 64  # files that have less in common are no copies of each other


class Followed:
    """The files that are open, and those that are known. `changed` is told when a place is new."""

    def __init__(
        self,
        book: PlaceBook,
        *,
        from_end: bool,
        rotated_wait: float,
        changed: Callable[[], None],
        now: Callable[[], float],
    ) -> None:
        self._book = book
        self._from_end = from_end
        self._rotated_wait = rotated_wait
        self._changed = changed
        self._now = now
        self._open: dict[Identity, Source] = {}
        self._resting: dict[Identity, Found] = {}  # read to their ends, and closed
        self._held: dict[Identity, float] = {}  # may be copies that are being made
        self._complained: set[str] = set()

    def __iter__(self) -> Iterator[Source]:
        return iter(list(self._open.values()))

    @property
    def count(self) -> int:
        return len(self._open) + len(self._resting)

    @property
    def behind_bytes(self) -> int:
        """What is there and not sent."""
        return sum(max(source.measured() - source.place.offset, 0) for source in self)

    def begin(self, found: list[Found], patterns: Iterable[str], *, once: bool) -> None:
        """The first look: also what was renamed since the last run is found again."""
        self._change_devices(found)
        self._see(found, is_first=True, may_wait=not once)
        for place in list(self._book):
            if place.identity not in self._open and place.identity not in self._resting:
                self._seek_moved(place)
        self._book.forget_old({*self._open, *self._resting})
        self._book.patterns.update(patterns)

    def look(self, found: list[Found]) -> None:
        """What is there now."""
        self._see(found, is_first=False, may_wait=True)

    def _see(self, found: list[Found], *, is_first: bool, may_wait: bool) -> None:
        now = self._now()
        there = {file.identity for file in found}
        # Those that are known first: a new one may turn out to be the copy of one of them.
        found.sort(key=lambda file: self._book.find(file.identity) is None)
        for file in found:
            source = self._open.get(file.identity)
            if source is None:
                self._meet(file, is_first, may_wait)
            else:
                source.path = file.path
                source.is_visible = True
        for identity in [known for known in self._resting if known not in there]:
            del self._resting[identity]
            place = self._book.find(identity)
            if place is not None:
                self._seek_moved(place)
        for identity, source in list(self._open.items()):
            if source.is_busy:
                continue
            source.is_visible = identity in there
            try:
                self._observe(source, now)
            except OSError as error:
                self.complain(source.path, error)
                self.close(source)

    def _observe(self, source: Source, now: float) -> None:
        """Take note of how it changed, and close what needs no reading any more."""
        status = source.status()
        if (status.st_size, status.st_mtime_ns) != (source.size, source.modified_ns):
            source.size, source.modified_ns = status.st_size, status.st_mtime_ns
            source.changed_at = now
        is_done = source.size == source.place.offset
        if is_done:
            source.waiting_since = 0.0
        elif not source.waiting_since:
            source.waiting_since = now
        quiet = now - source.changed_at
        if not source.is_visible:
            if is_done and quiet >= self._rotated_wait:
                self.close(source)
                if status.st_nlink == 0:
                    self._book.forget(source.place)
                    self._changed()
        elif is_done and quiet >= _IDLE_SECONDS:
            self._rest(source)

    def _rest(self, source: Source) -> None:
        found = Found(source.path, "", source.place.identity, source.size, source.modified_ns)
        self._resting[source.place.identity] = found
        self.close(source)

    def close(self, source: Source) -> None:
        """Nothing more is read of it for now."""
        source.close()
        del self._open[source.place.identity]

    def _meet(self, file: Found, is_first: bool, may_wait: bool) -> None:
        """A file that is not open: know it again, or begin with it."""
        resting = self._resting.get(file.identity)
        if resting is not None:
            if (resting.size, resting.modified_ns) == (file.size, file.modified_ns):
                return
            del self._resting[file.identity]
        try:
            place = self._book.find(file.identity)
            if place is not None:
                self._know(place, file)
                return
            if may_wait and self._may_be_copy(file):
                return
            source = self._open_new(file)
            is_new_pattern = is_first and file.pattern not in self._book.patterns
            if self._from_end and is_new_pattern:
                sources.skip_to_end(source)
        except Rewritten:
            return  # the path leads to another file by now; the next look finds it
        except OSError as error:
            self.complain(file.path, error)

    def _know(self, place: Place, file: Found) -> None:
        try:
            source = sources.open_at(place, file.path)
        except Rewritten:
            fresh = new_place(place.path, place.identity)
            self._begin_anew(place, sources.open_at(fresh, file.path))
            return
        self._add(source)
        age_seconds = time.time() - file.modified_ns / 1e9
        if source.size == place.offset and age_seconds > _IDLE_SECONDS:
            self._rest(source)

    def _open_new(self, file: Found) -> Source:
        source = sources.open_at(new_place(file.path, file.identity), file.path)
        self._add(source)
        return source

    def _add(self, source: Source) -> None:
        source.changed_at = self._now()
        self._open[source.place.identity] = source
        self._book.put(source.place)
        self._held.pop(source.place.identity, None)
        self._complained.discard(source.path)
        self._changed()

    def complain(self, path: str, error: OSError) -> None:
        """Once for each file, until it can be opened."""
        if error.errno == errno.ENOENT:
            return  # renamed or deleted a moment ago
        if path not in self._complained:
            self._complained.add(path)
            log_lines.warning("%s: %s; it is tried again", path, error.strerror)

    # -------------------------------------------------------------------- files that change places

    def _change_devices(self, found: list[Found]) -> None:
        """A disk may have another number after a restart of the machine; its files are the same."""
        known = {(place.path, place.inode): place for place in self._book}
        for file in found:
            device, inode = file.identity
            place = known.get((file.path, inode))
            if place is None or place.device == device or place.offset < _COPY_BYTES_MIN:
                continue
            moved = replace(place, device=device)
            with contextlib.suppress(OSError, Rewritten):
                sources.open_at(moved, file.path).close()
                self._book.forget(place)
                self._book.put(moved)

    def _seek_moved(self, place: Place) -> None:
        """A file was renamed while nobody looked: find it beside its place, read its rest."""
        for entry in sources.siblings(place.path):
            with contextlib.suppress(OSError, Rewritten):
                if entry.inode() == place.inode:
                    source = sources.open_at(place, entry.path)
                    self._add(source)
                    source.is_visible = False
                    return

    def restart(self, source: Source) -> list[Source]:
        """Go on with the new content of a file that was truncated while it was open."""
        fresh = source.restarted(new_place(source.place.path, source.place.identity))
        fresh.is_visible = source.is_visible
        self.close(source)
        return self._begin_anew(source.place, fresh)

    def _begin_anew(self, place: Place, source: Source) -> list[Source]:
        """A file was truncated or replaced: `source` begins with it; read the rest of its copy."""
        log_lines.info("%s was truncated or written anew; it is read from its start", source.path)
        copy = self._find_copy(place, source.path)
        self._add(source)
        if copy is None:
            return [source]
        log_lines.info("%s has what was there before; its rest is read too", copy.path)
        self._add(copy)
        return [source, copy]

    def _find_copy(self, place: Place, path: str) -> Source | None:
        """The copy that was made before a file was truncated (logrotate's copytruncate)."""
        if place.offset < _COPY_BYTES_MIN:
            return None
        for entry in sources.siblings(path):
            with contextlib.suppress(OSError, Rewritten):
                status = entry.stat(follow_symlinks=False)
                identity = (status.st_dev, status.st_ino)
                if identity != place.identity and self._book.find(identity) is None:
                    copied = replace(place, device=identity[0], inode=identity[1])
                    return sources.open_at(copied, entry.path)
        return None

    def _may_be_copy(self, file: Found) -> bool:
        """Whether to wait if a new file turns out to be the copy of one that is truncated next."""
        now = self._now()
        held_for = now - self._held.setdefault(file.identity, now)
        if held_for > _COPY_SECONDS:
            return False
        folder, name = os.path.split(file.path)
        for source in self._open.values():
            path = source.path
            # A file that is copied and truncated stays where it is.
            if not source.is_visible or path != source.place.path:
                continue
            stem = os.path.basename(path).partition(".")[0]
            is_beside = folder == os.path.dirname(path) and path != file.path
            if is_beside and name.startswith(stem) and source.place.offset >= _COPY_BYTES_MIN:
                fd = sources.open_file(file.path)
                try:
                    if source.begins_as(fd):
                        return True
                finally:
                    os.close(fd)
        return False
