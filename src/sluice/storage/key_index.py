"""This module finds messages by key: (topic, key) -> places in the log, in Apache's index files.

A message is found under topic#UNIQ_KEY, topic#key for each blank-separated part of KEYS, and
topic#T#tag, in this order. The hash is Java's String.hashCode made positive; slot = hash % slots.
The caller compares the real key: an index only says where to look.

The files are Apache's, byte for byte; `key_index_file` draws them. What holds here, and why:

- The log can always make the index anew, so nothing here is durable before `sync`. Its marks go
  into the snapshot; after a crash each file is cut back to its mark, and the log adds the rest.
- A message that is added again after `load` or after a failed `write` is not indexed twice.

`KeyIndex` belongs to one background thread at a time and may wait for the disk; what it is given is
gathered in `key_batches.py`. This module reads no log, and a clock only to name files.
"""

from __future__ import annotations

import posixpath
from collections.abc import Callable
from datetime import datetime
from typing import Final, NamedTuple

import numpy as np

from sluice.errors import StoreCorrupt, StoreReadOnly
from sluice.storage.files import Files
from sluice.storage.key_batches import KeyBatch, key_hashes
from sluice.storage.key_index_file import IndexFile, Ints, file_bytes

NAME_DIGITS: Final = 17

# A message has at most 32767 bytes of properties, and a key takes two of them.
_KEYS_PER_MESSAGE_MAX: Final = 1 << 14


class IndexMark(NamedTuple):
    """What is durable of one index file.

    `entries` counts them; `end_position` is where in the log to go on when nothing after this file
    is left; `crc` covers begin and entries. 0: not known, because the file was found, not made.
    `header_crc` covers the header; 0: not known either, in snapshots that did not have it yet.
    """

    name: str
    entries: int
    end_position: int
    crc: int
    header_crc: int = 0


# ---------------------------------------------------------------------------------------- the index


class KeyIndex:
    """All index files of a store, oldest first; only the newest one is written."""

    def __init__(
        self,
        files: Files,
        directory: str,
        *,
        slots: int,
        entries_max: int,
        now_ms: Callable[[], int],
    ) -> None:
        self._disk = files
        self._directory = directory
        self._slots = slots
        self._entries_max = entries_max
        self._now_ms = now_ms
        self._file_bytes = file_bytes(slots, entries_max)
        self._files: list[IndexFile] = []
        self._end_position = 0
        # The last message that is indexed, and with how many keys, while it may be added again.
        self._resume: tuple[int, int] | None = None
        self._sync_failed = False

    def load(self, marks: list[IndexMark], clean: bool) -> int:
        """Open what is in the directory; returns the log position from which to add entries again.

        `marks` are those of the last snapshot. After a clean stop files are taken as they are, with
        what Apache's broker may have added since. After a crash only what the marks say counts and
        the rest is deleted: `load([], clean=False)` starts an empty index. The first file that does
        not hold what its mark says ends the index, for what follows must be added behind it. Files
        of another length (other settings) and implausible ones are moved aside, not deleted.
        """
        assert not self._files, "loaded once"
        marked = {mark.name: mark for mark in marks}
        names = self._usable_names()
        end_position = 0
        whole = True
        removed = False
        for name in sorted(marked.keys() | names):
            mark = marked.get(name)
            if name not in names:
                # Retention takes the oldest files; a hole behind them is damage.
                whole = whole and not self._files
                continue
            if whole and (clean or mark is not None):
                opened = self._disk.open(self._path(name))
                file = IndexFile(opened, name, self._slots, self._entries_max)
                self._files.append(file)  # first, so that `close` knows it whatever fails
                whole = self._accept(file, mark, clean)
                if whole:
                    if mark is not None and file.header.next_number == mark.entries + 1:
                        end_position = mark.end_position
                    elif file.header.next_number > 1:
                        end_position = file.header.end_position
                    continue
                self._files.pop().close()
            if clean:
                self._set_aside(name)
            else:
                self._disk.remove(self._path(name))
                removed = True
        if removed:
            self._disk.sync_directory(self._directory)
        for file in self._files[:-1]:
            file.close()
        self._end_position = end_position
        self._resume = self._last_indexed()
        return end_position

    def forget_from(self, position: int) -> None:
        """The log ends here: what was indexed behind it is gone, and other messages will come."""
        while self._files:
            newest = self._files[-1]
            kept = newest.count_before(position)
            if kept == 0 and len(self._files) > 1:
                newest.close()
                self._disk.remove(newest.path)
                self._files.pop()
                before = self._files[-1]
                opened = self._disk.open(before.path)
                self._files[-1] = IndexFile(opened, before.name, self._slots, self._entries_max)
                self._files[-1].crc, self._files[-1].sound = before.crc, before.sound
                continue
            # What is damaged is not made to look sound: whoever uses it next finds out.
            if kept < newest.header.next_number - 1 and newest.is_sound():
                newest.cut(kept, newest.checksum(kept + 1) if newest.crc else 0)
            break
        self._end_position = min(self._end_position, position)
        self._resume = self._last_indexed()

    def _usable_names(self) -> set[str]:
        """The index files of our length; others are put out of the way."""
        usable = set()
        for name in self._disk.names(self._directory):
            path = self._path(name)
            is_ours = len(name) == NAME_DIGITS and name.isascii() and name.isdigit()
            if not is_ours or self._disk.is_directory(path):
                continue
            size = self._disk.size(path)
            if size == self._file_bytes:
                usable.add(name)
            elif size == 0:
                self._disk.remove(path)  # a crash came between the file and its length
            else:
                self._set_aside(name)
        return usable

    def _accept(self, file: IndexFile, mark: IndexMark | None, clean: bool) -> bool:
        entries = file.header.next_number - 1
        if clean and mark is None:
            return file.plausible()
        assert mark is not None, "after a crash only marked files are opened"
        same_header = mark.header_crc in (0, file.header_crc)
        if clean and entries > mark.entries:
            # Somebody has added what comes later in the log; a damaged count only looks like it.
            return file.plausible() and file.header.end_position > file.position(mark.entries)
        if clean:
            file.crc, file.sound = mark.crc, None
            return entries == mark.entries and same_header and file.plausible()
        if entries == mark.entries and file.room == 0 and same_header and file.plausible():
            # It was full when it was made durable: nothing came after.
            file.crc, file.sound = mark.crc, None
            return True
        return file.cut(mark.entries, mark.crc, mark.header_crc)

    def _last_indexed(self) -> tuple[int, int] | None:
        """Position and key count of the last message in the files."""
        position = -1
        count = 0
        for file in reversed(self._files):
            for number in range(file.header.next_number - 1, 0, -1):
                entry_position = file.position(number)
                if count == 0:
                    position = entry_position
                if entry_position != position or count == _KEYS_PER_MESSAGE_MAX:
                    return position, count
                count += 1
        return (position, count) if count else None

    def _set_aside(self, name: str) -> None:
        aside = posixpath.join(posixpath.dirname(self._directory), "sluice", "foreign-index")
        self._disk.make_directory(aside)
        target = posixpath.join(aside, name)
        number = 0
        while self._disk.exists(target):
            number += 1
            target = posixpath.join(aside, f"{name}.{number}")
        self._disk.rename(self._path(name), target)
        self._disk.sync_directory(aside)
        self._disk.sync_directory(self._directory)

    def _path(self, name: str) -> str:
        return posixpath.join(self._directory, name)

    def write(self, batch: KeyBatch) -> None:
        """Index a batch. After an OSError the same messages may be given again, in any batches."""
        if batch.first_position < 0:
            return
        self._mend()
        hashes, positions, times = batch.hashed()
        at = self._known_count(positions)
        try:
            while at < len(hashes):
                before_end_ms = self._prepare_room()
                newest = self._files[-1]
                _require_sound(newest)
                stop = min(at + newest.room, len(hashes))
                newest.append(hashes[at:stop], positions[at:stop], times[at:stop], before_end_ms)
                at = stop
            if not self._files:
                # An empty file, so that there is a mark: it spares the next start to look for keys
                # in messages that have none.
                self._create()
        except OSError:
            self._resume = self._last_indexed()
            raise
        self._end_position = batch.end_position

    def _known_count(self, positions: Ints) -> int:
        """How many keys at the start of a batch are indexed already."""
        if self._resume is None:
            return 0
        last_position, key_count = self._resume
        start = int(np.searchsorted(positions, last_position, "left"))
        stop = int(np.searchsorted(positions, last_position, "right"))
        if stop < len(positions):
            # From here on the log goes forward. A follower whose log was cut may write positions
            # anew that are indexed for other messages, and those are not known.
            self._resume = None
        return min(start + key_count, stop)

    def _prepare_room(self) -> int:
        """See to it that the newest file has room; returns the end time of the one before it."""
        if not self._files or self._files[-1].room == 0:
            self._create()
        return self._files[-2].header.end_ms if len(self._files) > 1 else 0

    def _create(self) -> None:
        now_ms = self._now_ms()
        stamp = datetime.fromtimestamp(now_ms // 1000).strftime("%Y%m%d%H%M%S")
        name = f"{stamp}{now_ms % 1000:03d}"
        # Names give the order of the files, also when the clock goes back or summer time ends.
        newest = self._files[-1].name if self._files else ""
        name = max(name, newest)
        while name == newest or self._disk.exists(self._path(name)):
            name = f"{int(name) + 1:0{NAME_DIGITS}d}"
        self._disk.make_directory(self._directory)
        opened = self._disk.create(self._path(name), self._file_bytes)
        if self._files:
            self._files[-1].close()
        file = IndexFile(opened, name, self._slots, self._entries_max)
        file.dirty = True
        self._files.append(file)

    def _mend(self) -> None:
        """Undo a write that failed half-way; a disk that still fails raises again."""
        if self._files and self._files[-1].torn:
            self._files[-1].mend()

    def sync(self) -> list[IndexMark]:
        """Make all durable; returns what the next snapshot has to remember.

        After a failure nobody knows what is on the disk, and trying again would hide it: from then
        on there are no marks until the index is loaded anew.
        """
        if self._sync_failed:
            raise StoreReadOnly("the key index could not be made durable; open the store again")
        self._mend()
        dirty = [file for file in self._files if file.dirty]
        if dirty:
            try:
                self._disk.sync_many([file.path for file in dirty])
            except OSError:
                self._sync_failed = True
                raise
        marks = []
        for file in self._files:
            file.dirty = False
            end_position = file.header.end_position
            if file is self._files[-1]:
                end_position = self._end_position
            entries = file.header.next_number - 1
            marks.append(IndexMark(file.name, entries, end_position, file.crc, file.header_crc))
        return marks

    def delete_before(self, position: int) -> list[str]:
        """Remove files that only speak of messages before `position`; the newest one stays."""
        removed = []
        while len(self._files) > 1 and self._files[0].header.end_position < position:
            self._disk.remove(self._files[0].path)
            removed.append(self._files.pop(0).name)
        if removed:
            self._disk.sync_directory(self._directory)
        return removed

    def close(self) -> None:
        """Close all files. What was not synced is not durable."""
        for file in self._files:
            file.close()
        self._files = []

    def query(
        self, topic: bytes, key: bytes, begin_ms: int, end_ms: int, max_count: int
    ) -> list[int]:
        """Positions of messages that may have the key (a tag: b"T#" + tag), newest first.

        `begin_ms` and `end_ms` limit the store time, both included. The caller reads each message
        and compares: other keys have the same hash, and a damaged entry points anywhere.
        """
        self._mend()
        (key_hash,) = key_hashes([b"%b#%b" % (topic, key)]).tolist()
        found: list[int] = []
        for file in reversed(self._files):
            header = file.header
            if header.next_number == 1:
                continue
            last_ms = max(header.begin_ms, header.end_ms)
            if header.begin_ms <= end_ms and begin_ms <= last_ms:
                _require_sound(file)
                file.find(key_hash, begin_ms, end_ms, max_count, found)
            if header.begin_ms < begin_ms or len(found) >= max_count:
                break
        return found


def _require_sound(file: IndexFile) -> None:
    """What is added to a damaged file would hide the damage; what is found in it may be missing."""
    if not file.is_sound():
        raise StoreCorrupt(file.path, 0, "the index file does not match its checksum")
