"""This module is one index file: the layout, appending to it, walking its chains, mending it.

    index/<yyyyMMddHHmmssSSS, local time of creation>      big-endian, sparse, of one fixed length
        header   i64 begin ms · i64 end ms        store times of the first and the last entry
                 i64 begin position · i64 end position         the same, as places in the log
                 i32 used slots · i32 next number              entries are counted from 1
        slots    i32 x slots                      number of the newest entry of a chain, 0: none
        entries  20 bytes x entries_max           entry 0 is never used
                 i32 hash · i64 position · i32 seconds since begin · i32 previous entry, 0: none

The bytes are those that Apache's broker writes, with its one oddity: the first entry of a file
counts its seconds from the end of the file before. Readers here take its time from the header.

- Entries never change, but slots do, and a power cut keeps any of those that were not synced. So
  what may be torn is made again: the slots follow from the entries, and a checksum covers these.
- A chain only leads to lower numbers: no damage makes a query run in circles or off the file.

An `IndexFile` belongs to one thread at a time and may wait for the disk. Which files there are, and
what is durable of them, is decided in `key_index`; this module makes, names and syncs no file.
"""

from __future__ import annotations

from itertools import pairwise
from struct import Struct
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
from isal.isal_zlib import crc32

from sluice.storage.files import OpenFile

HEADER_BYTES: Final = 40
SLOT_BYTES: Final = 4
ENTRY_BYTES: Final = 20

# A step costs half a microsecond when the file is in memory. Behind a tag that half of all messages
# carry lie millions of entries; a key that shares its slot must not stop the index for minutes.
CHAIN_STEPS_MAX: Final = 1_000_000

# Slots further apart than a page are written apart: nothing is gained by dirtying the page between.
_SLOT_GAP_MAX: Final = 4096 // SLOT_BYTES
_SLOT_SPAN: Final = (1 << 20) // SLOT_BYTES
_CHUNK_ENTRIES: Final = 1 << 16
I32_MAX: Final = (1 << 31) - 1
_I64_MAX: Final = (1 << 63) - 1

_HEADER: Final = Struct(">qqqqii")
_BEGIN: Final = Struct(">qq")
_SLOT: Final = Struct(">i")
_ENTRY: Final = Struct(">iqii")
_SLOT_TYPE: Final = np.dtype(">i4")
_ENTRY_TYPE: Final = np.dtype(
    [("hash", ">i4"), ("position", ">i8"), ("seconds", ">i4"), ("previous", ">i4")]
)
assert _ENTRY_TYPE.itemsize == _ENTRY.size == ENTRY_BYTES

Ints = npt.NDArray[np.int64]


def file_bytes(slots: int, entries_max: int) -> int:
    """The length of an index file."""
    assert 0 < slots <= I32_MAX
    assert 1 < entries_max <= I32_MAX, "entry 0 is never used"
    return HEADER_BYTES + slots * SLOT_BYTES + entries_max * ENTRY_BYTES


class IndexHeader(NamedTuple):
    begin_ms: int = 0
    end_ms: int = 0
    begin_position: int = 0
    end_position: int = 0
    used_slots: int = 0
    next_number: int = 1


class IndexFile:
    """One index file. `header` is the truth while the file is open; the one on disk follows it."""

    def __init__(self, opened: OpenFile, name: str, slots: int, entries_max: int) -> None:
        self._opened = opened
        self._view = opened.view()
        self._entries_at = HEADER_BYTES + slots * SLOT_BYTES
        self._slots = np.frombuffer(self._view, _SLOT_TYPE, slots, HEADER_BYTES)
        self._entries = np.frombuffer(self._view, _ENTRY_TYPE, entries_max, self._entries_at)
        self.path = opened.path
        self.name = name
        self.slots = slots
        self.entries_max = entries_max
        self.crc = 0
        # Whether entries and slots are what was made durable; None: not looked at since the start.
        self.sound: bool | None = True
        self.dirty = False  # has bytes that were not made durable
        self.torn = False  # a write failed between its slots and its header
        header = IndexHeader(*_HEADER.unpack_from(self._view, 0))
        self.header = header._replace(next_number=max(1, header.next_number))

    @property
    def room(self) -> int:
        return self.entries_max - self.header.next_number

    @property
    def header_crc(self) -> int:
        return crc32(_HEADER.pack(*self.header))

    def position(self, number: int) -> int:
        return int(self._entries["position"][number])

    def count_before(self, position: int) -> int:
        """How many entries speak of messages before this position."""
        positions = self._entries["position"][1 : self.header.next_number]
        return int(np.searchsorted(positions, position, "left"))

    def plausible(self) -> bool:
        """Whether the header agrees with the entries; false for a damaged one."""
        header = self.header
        if header.next_number == 1:
            return True
        if header.next_number > self.entries_max or not 0 <= header.used_slots <= self.slots:
            return False
        if header.begin_position != self.position(1):
            return False
        return header.end_position == self.position(header.next_number - 1)

    def append(self, hashes: Ints, positions: Ints, times: Ints, before_end_ms: int) -> None:
        """Add entries; all of them or, with an OSError, none.

        `before_end_ms` is the last store time of the file before this one, 0 where there is none.
        """
        assert not self.torn
        assert 0 < len(hashes) <= self.room
        first = self.header.next_number
        numbers = np.arange(first, first + len(hashes))
        slots = hashes % self.slots
        # Equal slots side by side, in the order of their entries: each links to the one before it,
        # the first one of a slot to what the slot held.
        order = np.argsort(slots, kind="stable")
        ordered = slots[order]
        starts = np.flatnonzero(np.append(True, ordered[1:] != ordered[:-1]))
        touched = ordered[starts]
        heads = self._slots[touched].astype(np.int64)
        heads[(heads < 0) | (heads >= first)] = 0
        linked = np.empty(len(hashes), np.int64)
        linked[1:] = numbers[order[:-1]]
        linked[starts] = heads
        newest = numbers[order[np.append(starts[1:], len(hashes)) - 1]]

        header = self.header
        if first == 1:
            header = IndexHeader(begin_ms=int(times[0]), begin_position=int(positions[0]))
        entries = np.empty(len(hashes), _ENTRY_TYPE)
        entries["hash"] = hashes
        entries["position"] = positions
        entries["seconds"] = _seconds(times, header.begin_ms)
        entries["previous"][order] = linked
        if first == 1:
            entries["seconds"][:1] = _seconds(times[:1], before_end_ms)
        header = header._replace(
            end_ms=int(times[-1]),
            end_position=int(positions[-1]),
            used_slots=min(header.used_slots + int(np.count_nonzero(heads == 0)), self.slots),
            next_number=first + len(hashes),
        )
        data = entries.tobytes()
        self.dirty = True
        self._opened.pwritev([data], self._entries_at + first * ENTRY_BYTES)
        self.torn = True
        self._write_slots(touched, newest)
        self._opened.pwritev([_HEADER.pack(*header)], 0)
        self.torn = False
        if first == 1 or self.crc:
            # A file of which the beginning was not summed up stays without a sum.
            begin = _BEGIN.pack(header.begin_ms, header.begin_position)
            self.crc = crc32(data, crc32(begin) if first == 1 else self.crc)
        self.header = header

    def _write_slots(self, slots: Ints, values: Ints) -> None:
        """Write single slots (ascending), with what lies between near ones."""
        far = np.diff(slots) > _SLOT_GAP_MAX
        far |= slots[1:] // _SLOT_SPAN != slots[:-1] // _SLOT_SPAN
        bounds = [0, *(np.flatnonzero(far) + 1).tolist(), len(slots)]
        for start, stop in pairwise(bounds):
            if start == stop:
                continue  # there was nothing to write at all
            low = int(slots[start])
            span = self._slots[low : int(slots[stop - 1]) + 1].copy()
            span[slots[start:stop] - low] = values[start:stop]
            self._opened.pwritev([span.tobytes()], HEADER_BYTES + low * SLOT_BYTES)

    def checksum(self, count: int) -> int:
        """The sum of begin and entries as they are on disk, 0 where there are none."""
        if count == 1:
            return 0
        # Unlike the rest of the header, these two never change once there is an entry.
        crc = crc32(_BEGIN.pack(self.header.begin_ms, self.header.begin_position))
        stop = self._entries_at + count * ENTRY_BYTES
        step = _CHUNK_ENTRIES * ENTRY_BYTES
        for at in range(self._entries_at + ENTRY_BYTES, stop, step):
            crc = crc32(self._view[at : min(at + step, stop)], crc)
        return crc

    def is_sound(self) -> bool:
        """Compare entries and slots with the checksum, once after a start."""
        if self.sound is None:
            # A file that was found, not made, has no checksum to compare with.
            self.sound = not self.crc or (
                self.checksum(self.header.next_number) == self.crc
                and np.array_equal(self._table(), self._slots)
            )
        return self.sound

    def cut(self, entries: int, crc: int, header_crc: int = 0) -> bool:
        """Forget all but the first entries; false where they are not those with this checksum.

        `header_crc` is the header's when they were made durable, 0 where it is not known.
        """
        count = entries + 1
        if not 1 <= count <= self.entries_max:
            return False
        if crc:
            if self.checksum(count) != crc:
                return False
        elif self.header.next_number < count:
            return False
        old = self.header
        if count == 1:
            self.header = IndexHeader()
        else:
            last = count - 1
            end_ms = old.end_ms
            is_exact = old.next_number == count and old.end_position == self.position(last)
            if not is_exact or header_crc not in (0, self.header_crc):
                # The exact time is gone; the latest that it can be hides nothing.
                seconds = int(self._entries["seconds"][last]) if last > 1 else 0
                end_ms = min(old.begin_ms + seconds * 1000 + 999, _I64_MAX)
            self.header = old._replace(
                end_ms=end_ms, end_position=self.position(last), next_number=count
            )
        self.crc = crc
        self.sound = True
        self.mend()
        return True

    def mend(self) -> None:
        """Make the slots again from the entries: the newest entry of each slot wins."""
        self.torn = True
        table = self._table()
        changed = np.flatnonzero(table != self._slots)
        used_slots = int(np.count_nonzero(table))
        self.header = self.header._replace(used_slots=used_slots)
        data = _HEADER.pack(*self.header)
        if len(changed) or data != self._view[:HEADER_BYTES]:
            self.dirty = True
            self._write_slots(changed, table[changed].astype(np.int64))
            self._opened.pwritev([data], 0)
        self.torn = False

    def _table(self) -> npt.NDArray[np.int32]:
        """The slots as they follow from the entries."""
        count = self.header.next_number
        table = np.zeros(self.slots, np.int32)
        for start in range(1, count, _CHUNK_ENTRIES):
            stop = min(start + _CHUNK_ENTRIES, count)
            hashes = self._entries["hash"][start:stop].astype(np.int64)
            table[hashes % self.slots] = np.arange(start, stop)
        return table

    def find(
        self, key_hash: int, begin_ms: int, end_ms: int, max_count: int, found: list[int]
    ) -> None:
        """Append the positions of matching entries to `found`, newest first, up to `max_count`."""
        view = self._view
        entries_at = self._entries_at
        file_begin_ms = self.header.begin_ms
        limit = self.header.next_number
        slot = key_hash % self.slots
        (number,) = _SLOT.unpack_from(view, HEADER_BYTES + slot * SLOT_BYTES)
        for _ in range(CHAIN_STEPS_MAX):
            if not 0 < number < limit or len(found) >= max_count:
                return
            entry = _ENTRY.unpack_from(view, entries_at + number * ENTRY_BYTES)
            entry_hash, position, seconds, previous = entry
            if seconds >= 0:
                # Known to the second only: what may lie in the range is a candidate.
                entry_ms = file_begin_ms + (seconds * 1000 if number > 1 else 0)
                if entry_ms + 999 < begin_ms:
                    return
                matches = entry_hash == key_hash and entry_ms <= end_ms and position >= 0
                # A message whose key stands there twice is one message.
                if matches and found[-1:] != [position]:
                    found.append(position)
            limit = number
            number = previous

    def close(self) -> None:
        """Close the descriptor; reading goes on through the view."""
        self._opened.close()


def _seconds(times: Ints, begin_ms: int) -> Ints:
    if begin_ms <= 0:
        return np.zeros(len(times), np.int64)
    return np.clip((times - begin_ms) // 1000, 0, I32_MAX)
