"""This module finds messages by key: (topic, key) -> places in the log, in Apache's index files.

A message is found under topic#UNIQ_KEY, topic#key for each blank-separated part of KEYS, and
topic#T#tag, in this order. The hash is Java's String.hashCode made positive; slot = hash % slots.
The caller compares the real key: an index only says where to look.

The files are Apache's, byte for byte; `key_index_file` draws them. What holds here, and why:

- The log can always make the index anew, so nothing here is durable before `sync`. Its marks go
  into the snapshot; after a crash each file is cut back to its mark, and the log adds the rest.
- A message that is added again after `load` or after a failed `write` is not indexed twice.

`KeyBatch` belongs to the store's owner. `KeyIndex` belongs to one background thread at a time and
may wait for the disk. This module reads no log, and a clock only to name files.
"""

from __future__ import annotations

import posixpath
from collections.abc import Callable, Sequence
from datetime import datetime
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from sluice.errors import StoreCorrupt, StoreReadOnly
from sluice.protocol.records import message_keys
from sluice.storage.files import Files
from sluice.storage.key_index_file import I32_MAX, IndexFile, Ints, file_bytes

NAME_DIGITS: Final = 17

# A message has at most 32767 bytes of properties, and a key takes two of them.
_KEYS_PER_MESSAGE_MAX: Final = 1 << 14
_CHUNK_UNITS: Final = 1 << 18


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


# ---------------------------------------------------------------------------------------- gathering


# A message's topic, keys (`records.message_keys`), position and store time.
Found = tuple[bytes, tuple[bytes, bytes, bytes], int, int]


class KeyBatch:
    """The keys of some messages on their way into the index; does no IO.

    Messages are added beside the appends, so that only takes note of them; what the index needs is
    made of it by whoever writes the batch.
    """

    def __init__(self) -> None:
        self._found: list[Found] = []
        self._size_bytes = 0  # of the last message, where it is known

    def add(
        self, topic: bytes, properties: bytes, position: int, store_ms: int, size_bytes: int = 0
    ) -> None:
        """Gather the keys of one message; messages come in the order of the log.

        With `size_bytes` a later start goes on behind the message, without it at the message. Both
        are right, because the index knows what it has.
        """
        self.add_found([(topic, message_keys(properties), position, store_ms)])
        self._size_bytes = size_bytes

    def add_found(self, found: list[Found]) -> None:
        """The same for messages whose keys are known."""
        self._found += found
        self._size_bytes = 0

    @property
    def message_count(self) -> int:
        """All messages that were added, also those without a key."""
        return len(self._found)

    @property
    def first_position(self) -> int:
        """Of the messages that were added; -1: there was none."""
        return self._found[0][2] if self._found else -1

    @property
    def end_position(self) -> int:
        return self._found[-1][2] + self._size_bytes if self._found else -1

    def spread(self) -> tuple[list[bytes], Ints, Ints]:
        """What the messages are found under, and position and store time of each key's message."""
        count = len(self._found)
        if not count:
            return [], np.zeros(0, np.int64), np.zeros(0, np.int64)
        # Column by column, because that runs without the interpreter, which others need.
        topics, keys, places, moments = zip(*self._found, strict=True)
        positions = np.fromiter(places, np.int64, count)
        times = np.fromiter(moments, np.int64, count)
        assert (np.diff(positions) >= 0).all(), "messages come in the order of the log"
        uniques, severals, tags = zip(*keys, strict=True)
        if not any(severals) and not any(tags) and all(uniques):
            marks = {topic: topic + b"#" for topic in set(topics)}
            names = [marks[topic] + unique for topic, unique in zip(topics, uniques, strict=True)]
            return names, positions, times
        names = []
        counts = []
        for topic, (unique, several, tag) in zip(topics, keys, strict=True):
            before = len(names)
            prefix = topic + b"#"
            if unique:
                names.append(prefix + unique)
            if several:
                # A part that equals the unique key is indexed once more, as Apache does.
                if b" " in several:
                    names.extend([prefix + part for part in several.split(b" ") if part])
                else:
                    names.append(prefix + several)
            if tag:
                names.append(prefix + b"T#" + tag)
            counts.append(len(names) - before)
        return names, np.repeat(positions, counts), np.repeat(times, counts)


def key_hashes(keys: Sequence[bytes]) -> Ints:
    """The index's hash of each key (none is empty): Java's String.hashCode made positive."""
    if not keys:
        return np.zeros(0, np.int64)
    joined = b"".join(keys)
    lengths = np.fromiter(map(len, keys), np.int64, len(keys))
    hashes = _hash_units(np.frombuffer(joined, np.uint8), lengths)
    if not joined.isascii():
        # Java hashes UTF-16 units, which are the bytes only where all of them are ASCII.
        wide = [at for at, key in enumerate(keys) if not key.isascii()]
        texts = [
            keys[at].decode("utf-8", "replace").encode("utf-16-be", "surrogatepass") for at in wide
        ]
        lengths = np.fromiter(map(len, texts), np.int64, len(texts)) // 2
        hashes[wide] = _hash_units(np.frombuffer(b"".join(texts), ">u2"), lengths)
    positive = np.abs(hashes.view(np.int32).astype(np.int64))
    positive[positive > I32_MAX] = 0  # the one value whose abs() stays negative in Java
    return positive


def _hash_units(units: npt.NDArray[Any], lengths: Ints) -> npt.NDArray[np.uint32]:
    """The sum of unit x 31^(distance to the key's end), modulo 2^32, of each key."""
    powers = np.full(int(lengths.max()), 31, np.uint32)
    powers[0] = 1
    powers = np.cumprod(powers, dtype=np.uint32)
    if lengths.min() == len(powers):
        # All are of one length, as unique keys mostly are: rows of one table.
        rows = units.reshape(-1, len(powers)).astype(np.uint32)
        return np.asarray((rows * powers[::-1]).sum(axis=1, dtype=np.uint32))
    ends = np.cumsum(lengths)
    hashes = np.empty(len(lengths), np.uint32)
    low = 0
    while low < len(lengths):
        # In parts, because the working arrays are many times larger than the keys.
        base = int(ends[low] - lengths[low])
        high = max(low + 1, int(np.searchsorted(ends, base + _CHUNK_UNITS, "right")))
        part_ends = ends[low:high] - base
        part_lengths = lengths[low:high]
        total = int(part_ends[-1])
        weights = powers[np.repeat(part_ends, part_lengths) - 1 - np.arange(total)]
        products = units[base : base + total].astype(np.uint32) * weights
        hashes[low:high] = np.add.reduceat(products, part_ends - part_lengths, dtype=np.uint32)
        low = high
    return hashes


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
        keys, positions, times = batch.spread()
        hashes = key_hashes(keys)
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
