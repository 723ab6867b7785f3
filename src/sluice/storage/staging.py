"""This module keeps staged entries in files of their own, which are written again and again.

    sluice/staging/0000 0001 ...    at most so many files, each filled from its beginning to its end

What is staged lives for seconds. In the log each byte of it would take a new page of the system's
cache and stay until retention; here a file whose entries are all done with is filled once more, and
its pages are in memory already. A place is good for one filling only: positions go up with each,
begin far above those of the log, and every entry holds its own, under its checksum.

An entry can be read as soon as `put` returns, and is there after the process was killed. `sync`
makes entries durable: whoever decides something by them asks for it first. Where all files are full
`put` has no place, and the caller stages elsewhere. Belongs to the store's owner.
"""

from __future__ import annotations

import logging
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from isal.isal_zlib import crc32

from sluice.errors import SluiceError, StoreError
from sluice.model import Buffer
from sluice.storage.background import Background
from sluice.storage.files import Files, OpenFile
from sluice.storage.queue_index import ColdRead

FLOOR: Final = 1 << 59  # positions from here on are staged; of the log and of memory none is
FILE_BYTES: Final = 1 << 26
FILES_MAX: Final = 32
KEPT_MS: Final = 72 * 3_600_000  # so long is an entry good that nobody is done with
_IDLE_MS: Final = 600_000  # then a file that nobody needs is removed
_MAGIC: Final = 0x534C5354
_HEAD: Final = struct.Struct(">IIQII")  # magic, checksum of what follows it, position, two sizes
_SUMMED_AT: Final = 8
_LANE: Final = "staging"

log_lines = logging.getLogger("sluice.storage")

Synced = Callable[[SluiceError | None], None]


class StagedEntry(NamedTuple):
    """What was put, as it lies there: to be copied before it is dropped."""

    about: memoryview
    body: memoryview


@dataclass(slots=True, eq=False)
class _File:
    file: OpenFile
    number: int = -1  # of the filling
    end: int = 0
    synced_end: int = 0
    newest_ms: int = 0
    open_at: set[int] = field(default_factory=set)  # places of entries that are not done with
    is_broken: bool = False  # a sync has failed: nothing more is written to it
    is_ours: bool = True  # all of it was written by this process and has been in memory since


class StagingArea:
    """The staging files of one store."""

    def __init__(
        self,
        files: Files,
        directory: str,
        background: Background,
        now_ms: Callable[[], int],
        file_bytes: int,
    ) -> None:
        self._files = files
        self._directory = directory
        self._background = background
        self._now_ms = now_ms
        self._file_bytes = min(file_bytes, FILE_BYTES)
        self._by_number: dict[int, _File] = {}
        self._free: list[_File] = []
        self._current: _File | None = None
        self._next_number = 0

    def open(self, is_needed: Callable[[int, bytes], bool]) -> None:
        """Find what the last process has left; who knows is asked for each entry, by its position
        and what is told about it, whether it is to be kept. It may wait for the disk.
        """
        for name in self._files.names(self._directory):
            path = f"{self._directory}/{name}"
            try:
                file = self._files.open(path)
            except OSError as error:
                raise StoreError(f"{path}: cannot be opened: {error.strerror}") from error
            place = _File(file, newest_ms=self._now_ms(), is_ours=False)
            for position, about, stop in _walk(place.file):
                place.number, at = divmod(position - FLOOR, FILE_BYTES)
                place.end = stop
                if is_needed(position, about):
                    place.open_at.add(at)
            self._next_number = max(self._next_number, place.number + 1)
            self._by_number[place.number] = place
            self._free_if_done(place)

    # -------------------------------------------------------------------------------------- writing

    def put(self, about: bytes, parts: Sequence[Buffer]) -> int | None:
        """Keep an entry; its position, None where there is no place for it."""
        body_bytes = sum(map(len, parts))
        size = _HEAD.size + len(about) + body_bytes
        try:
            place = self._with_room(size)
            if place is None:
                return None
            position = FLOOR + place.number * FILE_BYTES + place.end
            head = _HEAD.pack(_MAGIC, 0, position, len(about), body_bytes)
            found = crc32(head[_SUMMED_AT:])
            for part in (about, *parts):
                found = crc32(part, found)
            head = _HEAD.pack(_MAGIC, found, position, len(about), body_bytes)
            place.file.pwritev((head, about, *parts), place.end)
        except OSError as error:
            # What was written of it is written over. The log has better words for a full disk.
            log_lines.warning("%s: nothing can be staged here: %s", self._directory, error.strerror)
            return None
        place.open_at.add(place.end)
        place.end += size
        place.newest_ms = self._now_ms()
        return position

    def _with_room(self, size: int) -> _File | None:
        """The file that has room for so many bytes; a new filling where that is needed."""
        place = self._current
        if place is not None and place.end + size <= self._file_bytes:
            return place
        if size > self._file_bytes:
            return None
        following = self._free.pop() if self._free else self._new_file()
        if following is None:
            return None
        if place is not None:
            self._current = None
            self._sync_early(place)
            self._free_if_done(place)
        following.number = self._next_number
        following.end = following.synced_end = 0
        following.is_ours = True
        self._next_number += 1
        self._by_number[following.number] = self._current = following
        return following

    def _new_file(self) -> _File | None:
        if len(self._by_number) >= FILES_MAX:
            return None
        if not self._files.exists(self._directory):
            self._files.make_directory(self._directory)
            self._files.sync_directory(self._directory.rpartition("/")[0])
        taken = set(self._files.names(self._directory))
        names = map("{:04d}".format, range(len(taken) + 1))
        name = next(name for name in names if name not in taken)
        return _File(self._files.create(f"{self._directory}/{name}", self._file_bytes))

    # -------------------------------------------------------------------------------------- reading

    def _place_of(self, position: int) -> tuple[_File | None, int]:
        number, at = divmod(position - FLOOR, FILE_BYTES)
        return self._by_number.get(number), at

    def holds(self, position: int) -> bool:
        """Whether an entry that was put there has not been given up."""
        place, at = self._place_of(position)
        return place is not None and at in place.open_at

    def get(self, position: int) -> StagedEntry | None:
        """The entry at a position; None where none is, or not as it was put. May raise ColdRead."""
        place, at = self._place_of(position)
        if place is None or at + _HEAD.size > place.end:
            return None
        file = place.file
        _require_memory(place, at, at + _HEAD.size)
        view = file.view()
        magic, wanted, own, about_bytes, body_bytes = _HEAD.unpack_from(view, at)
        body_at = at + _HEAD.size + about_bytes
        stop = body_at + body_bytes
        if magic != _MAGIC or own != position or stop > place.end:
            return None
        _require_memory(place, at, stop)
        # A disk may have changed it; what was never read from one need not be looked at again.
        if not place.is_ours and crc32(view[at + _SUMMED_AT : stop]) != wanted:
            return None
        return StagedEntry(view[at + _HEAD.size : body_at], view[body_at:stop])

    # ------------------------------------------------------------------------------------- durable

    def sync(self, positions: Iterable[int], done: Synced) -> None:
        """Make entries durable; `done` is told when they are, or why they cannot be."""
        found = [self._place_of(position)[0] for position in positions if position >= FLOOR]
        places = {place.number: place for place in found if place is not None}
        behind = [place for place in places.values() if place.synced_end < place.end]
        if behind:
            self._sync(behind, done)
        else:
            done(None)

    def _sync(self, places: list[_File], done: Synced) -> None:
        wanted = [(place, place.number, place.end) for place in places]
        files = [place.file for place in places]

        def work() -> None:
            for file in files:
                file.sync()
            self._files.sync_directory(self._directory)

        def told(_: None, error: BaseException | None) -> None:
            reason = str(error) if error is not None else ""
            for place, number, end in wanted:
                if place.number != number or place.is_broken:
                    reason = reason or "another sync has failed"
                elif error is None:
                    place.synced_end = max(place.synced_end, end)
                else:
                    self._give_up(place)  # a sync that failed cannot be repeated
            done(StoreError(f"{self._directory}: it is not durable: {reason}") if reason else None)

        self._background.submit(_LANE, work, told)

    def _sync_early(self, place: _File) -> None:
        """A full file goes to the disk while the next is filled; a failure is met when it counts,
        because then nothing of the file is held any more.
        """
        if place.open_at and place.synced_end < place.end:
            self._sync([place], lambda _: None)

    def _give_up(self, place: _File) -> None:
        """What was durable before stays until somebody is done with it."""
        place.is_broken = True
        place.open_at = {at for at in place.open_at if at < place.synced_end}
        if self._current is place:
            self._current = None
        self._free_if_done(place)

    # ------------------------------------------------------------------------------------ done with

    def drop(self, positions: Iterable[int]) -> None:
        """These entries are done with. Their bytes may be written over from now on."""
        for position in positions:
            if position >= FLOOR:
                place, at = self._place_of(position)
                if place is not None:
                    place.open_at.discard(at)
                    self._free_if_done(place)

    def _free_if_done(self, place: _File) -> None:
        if place.open_at or place is self._current or place.number not in self._by_number:
            return
        del self._by_number[place.number]
        place.number, place.end = -1, 0
        if place.is_broken:
            self._remove(place)
        else:
            self._free.append(place)

    def tick(self, wanted: Iterable[int]) -> None:
        """Give up what is too old, but for these positions; remove files that nobody needs."""
        now_ms = self._now_ms()
        needed = {(position - FLOOR) // FILE_BYTES for position in wanted if position >= FLOOR}
        for place in list(self._by_number.values()):
            if now_ms - place.newest_ms >= KEPT_MS and place.number not in needed:
                if place is self._current:
                    self._current = None
                place.open_at.clear()
                self._free_if_done(place)
        current = self._current
        if current is not None and not current.open_at and now_ms - current.newest_ms >= _IDLE_MS:
            self._current = None
            self._free_if_done(current)
        for place in [each for each in self._free if now_ms - each.newest_ms >= _IDLE_MS]:
            self._free.remove(place)
            self._remove(place)

    def _remove(self, place: _File) -> None:
        path = place.file.path
        place.file.close()
        try:
            self._files.remove(path)
        except OSError as error:
            log_lines.warning("%s: cannot be removed: %s", path, error.strerror)


def _walk(file: OpenFile) -> Iterator[tuple[int, bytes, int]]:
    """Position, about and end of the entries of one filling, without a look at their bodies."""
    at, number, size = 0, -1, file.size
    while at + _HEAD.size <= size:
        magic, _, position, about_bytes, body_bytes = _HEAD.unpack(file.pread(_HEAD.size, at))
        stop = at + _HEAD.size + about_bytes + body_bytes
        own_number, own_at = divmod(position - FLOOR, FILE_BYTES)
        if magic != _MAGIC or own_number < 0 or own_at != at or stop > size:
            return
        if at and own_number != number:
            return  # of an older filling
        number = own_number
        yield position, file.pread(about_bytes, at + _HEAD.size), stop
        at = stop


def _require_memory(place: _File, start: int, stop: int) -> None:
    file = place.file
    if not file.resident(start, stop):
        place.is_ours = False
        raise ColdRead(lambda: file.warm(start, stop))
