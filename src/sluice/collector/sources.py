"""This module reads one file from its place, and knows when the file is not the same any more.

Whatever was read is checked after it was read: the file is still as long, its first bytes and those
before the place are still what they were. So a file that is truncated and written again, at any
moment, is never read from the middle of its new content.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from typing import Final, NamedTuple

from sluice.clock import wall_ms
from sluice.collector.lines import Line, Rules, cut
from sluice.collector.places import MARK_BYTES, Place, digest

_BACK_BYTES: Final = 64 * 1024
# A line that is too long is seen to be so when there is more of it, and whether the next line
# begins an event is seen by its beginning.
_BEHIND_BYTES: Final = 4097


class Rewritten(Exception):
    """The file does not hold any more what was read of it."""


class Portion(NamedTuple):
    """Lines that are sent together, and how far the file is done when they are."""

    lines: list[Line]
    used: bytes
    part: int


class Source:
    """An open file. `path` is where it is now; what was noted of it is in `place`."""

    def __init__(self, place: Place, path: str, fd: int, head: bytes, tail: bytes) -> None:
        self.place = place
        self.path = path
        self.fd = fd
        self._head = head
        self._tail = tail
        self.is_visible = True  # a path or pattern leads to it; else it was rotated away
        self.is_busy = False
        self.size = 0
        self.modified_ns = 0
        self.changed_at = 0.0  # when it was last seen to change
        self.waiting_since = 0.0  # when there was first something to send; 0: there is nothing
        self.checked_ns = 0  # when it was modified that was last looked at
        self.stalled: tuple[int, bool, bool] | None = None  # nothing whole was found: when that was

    def status(self) -> os.stat_result:
        return os.fstat(self.fd)

    def measured(self) -> int:
        """Its size now, or what it was when that could last be seen."""
        try:
            return self.status().st_size
        except OSError:
            return self.size

    def read(
        self,
        rules: Rules,
        bytes_max: int,
        count_max: int,
        *,
        limit: int | None = None,
        is_quiet: bool = False,
        is_final: bool = False,
    ) -> Portion | None:
        """The next lines; None where none is whole. `limit`: the end is here. Raises Rewritten."""
        place = self.place
        longest = max(bytes_max, rules.line_bytes_max + _BEHIND_BYTES)
        for wanted in dict.fromkeys((bytes_max, longest)):
            if limit is not None:
                wanted = min(wanted, limit - place.offset)
            chunk = _read_whole(self.fd, max(wanted, 0), place.offset)
            self._check(place.offset + len(chunk))
            is_last = len(chunk) < wanted or (
                limit is not None and place.offset + len(chunk) == limit
            )
            done = cut(
                chunk,
                place.offset,
                place.part,
                rules,
                bytes_max=bytes_max,
                count_max=count_max,
                is_quiet=is_quiet and is_last,
                is_final=is_final and is_last,
            )
            if done.used_bytes:
                return Portion(done.lines, chunk[: done.used_bytes], done.part)
            if is_last:
                return None
        return None

    @property
    def is_marked(self) -> bool:
        """Whether its place is one of this content, so that its id is told to nobody else."""
        return self.place.head_bytes > 0

    def mark(self, portion: Portion) -> None:
        """Know the file by its first bytes already before they are acknowledged."""
        used, place = portion.used, self.place
        # The head reaches at least to the place, or is full.
        self._head += used[len(self._head) - place.offset : MARK_BYTES - place.offset]
        place.head_bytes, place.head = len(self._head), digest(self._head)

    def advance(self, portion: Portion) -> None:
        """A portion is acknowledged."""
        used, place = portion.used, self.place
        if len(self._head) < MARK_BYTES:
            self.mark(portion)
        self._tail = (self._tail + used[-MARK_BYTES:])[-MARK_BYTES:]
        place.offset += len(used)
        place.part = portion.part
        place.tail_bytes, place.tail = len(self._tail), digest(self._tail)
        place.seen_ms = wall_ms()

    def _check(self, end: int) -> None:
        if self.status().st_size < end:
            raise Rewritten
        if _read_whole(self.fd, len(self._head), 0) != self._head:
            raise Rewritten
        before = self.place.offset - len(self._tail)
        if _read_whole(self.fd, len(self._tail), before) != self._tail:
            raise Rewritten

    def begins_as(self, fd: int) -> bool:
        """Whether another file has the first bytes of this one, as far as it has any."""
        return self._head.startswith(_read_whole(fd, len(self._head), 0))

    def restarted(self, place: Place) -> Source:
        """The same open file from its start on, for its new content."""
        return Source(place, self.path, os.dup(self.fd), b"", b"")

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def _read_whole(fd: int, count: int, offset: int) -> bytes:
    """Bytes up to the end of the file or the count; a single read may bring less."""
    data = os.pread(fd, count, offset)
    while 0 < len(data) < count:
        more = os.pread(fd, count - len(data), offset + len(data))
        if not more:
            break
        data += more
    return data


def open_file(path: str) -> int:
    """A descriptor of a plain file. A pipe, which would make the opener wait, is an OSError."""
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(0, "is no plain file", path)
    return fd


def open_at(place: Place, path: str) -> Source:
    """Open a file to go on at a place. Raises Rewritten where it is another file than was noted."""
    fd = open_file(path)
    try:
        status = os.fstat(fd)
        if (status.st_dev, status.st_ino) != place.identity:
            raise Rewritten
        head = _read_whole(fd, place.head_bytes, 0)
        tail = _read_whole(fd, place.tail_bytes, max(place.offset - place.tail_bytes, 0))
        if status.st_size < place.offset:
            raise Rewritten
        if place.head_bytes and digest(head) != place.head:
            raise Rewritten
        if place.tail_bytes and digest(tail) != place.tail:
            raise Rewritten
        source = Source(place, path, fd, head, tail)
        source.size, source.modified_ns = status.st_size, status.st_mtime_ns
    except BaseException:
        os.close(fd)
        raise
    return source


def skip_to_end(source: Source) -> None:
    """Begin with the line that is written next, or that is not finished yet."""
    end = source.status().st_size
    while end > 0:
        start = max(end - _BACK_BYTES, 0)
        newline = _read_whole(source.fd, end - start, start).rfind(b"\n")
        if newline >= 0:
            end = start + newline + 1
            break
        end = start
    head = _read_whole(source.fd, min(end, MARK_BYTES), 0)
    tail_bytes = min(end, MARK_BYTES)
    tail = _read_whole(source.fd, tail_bytes, end - tail_bytes)
    source._head, source._tail = head, tail
    place = source.place
    place.offset = end
    place.head_bytes, place.head = len(head), digest(head)
    place.tail_bytes, place.tail = len(tail), digest(tail)


def siblings(path: str) -> Iterator[os.DirEntry[str]]:
    """Plain files beside this one that it may have been renamed or copied to."""
    name = os.path.basename(path)
    stem = name.partition(".")[0] or name
    try:
        with os.scandir(os.path.dirname(path)) as entries:
            found = [entry for entry in entries if entry.name.startswith(stem)]
    except OSError:
        return
    for entry in sorted(found, key=lambda entry: entry.name):
        if entry.is_file(follow_symlinks=False):
            yield entry
