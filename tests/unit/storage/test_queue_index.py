"""Queue units: in memory, in files, checked when they come back, and never ahead of the log."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from isal.isal_zlib import crc32

from sluice.errors import StoreCorrupt
from sluice.model import Message, QueueKey
from sluice.protocol import records
from sluice.storage.checkpoint import collect, write_part
from sluice.storage.memory_files import MemoryFiles
from sluice.storage.queue_index import (
    FILLER_SIZE,
    KEPT_UNIT_COUNT,
    SIMPLE_FILLER,
    SIMPLE_UNIT,
    BatchQueueIndex,
    ColdRead,
    QueueFiles,
    QueueIndex,
)
from sluice.storage.reads import ReadStatus, _choose
from tests.unit.storage.store_kit import Disk

KEY = QueueKey("t", 3)
FILE_UNITS = 16
ENTRY_BYTES = 100


class Queue:
    """One queue on a simulated disk; unit n points to position n * 100."""

    def __init__(self, kind: type[QueueIndex] = QueueIndex) -> None:
        self.files = MemoryFiles()
        self.index = kind(KEY, "/store", FILE_UNITS)
        self.store = QueueFiles(self.files)

    def add(self, count: int = 1, offsets: int = 1) -> None:
        for _ in range(count):
            at = self.index.count * ENTRY_BYTES
            offset = self.index.next_offset
            self.index.add(self.index.pack(at, ENTRY_BYTES, at * 7, at, offset, offsets))
            self.index.next_offset = offset + offsets

    def save(self, durable: int = 1 << 62) -> None:
        for write in collect([self.index], durable):
            for part in write.parts:
                write_part(self.files, self.index, part)
            self.index.collected(write)

    def loaded(self) -> QueueIndex:
        """The queue as another process finds it."""
        old = self.index
        new = type(old)(KEY, "/store", FILE_UNITS)
        new.restore(old.first, old.start_offset, old.written, old.written_offset, dict(old.sums))
        return new

    def positions(self, index: QueueIndex, start: int, stop: int) -> list[int]:
        raw = index.units(start, stop, self.store, wait=True)
        return [unit[0] for unit in index.iterate(raw, start)]


def test_units_come_back_from_memory_from_files_and_from_both() -> None:
    queue = Queue()
    queue.add(300)
    queue.save()
    queue.add(10)
    index = queue.index
    assert index.tail_first == 300 - KEPT_UNIT_COUNT, "most of what is saved leaves the memory"
    expected = [n * ENTRY_BYTES for n in range(310)]
    for start, stop in [(0, 310), (0, 1), (15, 17), (170, 175), (309, 310), (299, 301), (5, 5)]:
        assert queue.positions(index, start, stop) == expected[start:stop]
    names = queue.files.names(index.directory)
    assert names == [f"{n * FILE_UNITS * 20:020d}" for n in range(19)], "named by their first byte"


def test_another_process_reads_the_same_and_goes_on() -> None:
    queue = Queue()
    queue.add(20)
    queue.save()
    index = queue.index = queue.loaded()
    assert (index.start_offset, index.end_offset, index.next_offset) == (0, 20, 20)
    queue.add(20)
    queue.save()
    assert queue.positions(queue.loaded(), 0, 40) == [n * ENTRY_BYTES for n in range(40)]


def test_only_units_of_durable_entries_go_into_files() -> None:
    queue = Queue()
    queue.add(10)
    queue.save(durable=5 * ENTRY_BYTES)
    assert queue.index.written == 5
    queue.save(durable=5 * ENTRY_BYTES + 1)
    assert queue.index.written == 5
    path = queue.index.path_of(0)
    assert queue.files.read(path, 1 << 20)[5 * 20 :] == bytes((FILE_UNITS - 5) * 20)
    queue.save(durable=10 * ENTRY_BYTES)
    assert queue.index.written == 10


@given(st.lists(st.integers(0, 40), max_size=12))
def test_checksums_are_those_of_the_files_however_they_were_written(steps: list[int]) -> None:
    queue = Queue()
    for step in steps:
        queue.add(step)
        queue.save()
    for base, checksum in queue.index.sums.items():
        used = min(queue.index.written - base, FILE_UNITS) * 20
        assert crc32(queue.files.read(queue.index.path_of(base), 1 << 20)[:used]) == checksum
    count = sum(steps)
    assert queue.positions(queue.loaded(), 0, count) == [n * ENTRY_BYTES for n in range(count)]


@pytest.mark.parametrize("bit", [0, 20 * 8 * 7 + 3, 20 * 8 * 16 - 1])
def test_a_flipped_bit_in_a_file_is_noticed_at_the_first_read(bit: int) -> None:
    queue = Queue()
    queue.add(20)
    queue.save()
    index = queue.loaded()
    queue.files.flip(index.path_of(0), bit)
    with pytest.raises(StoreCorrupt, match=r"does not match its checksum.*remove consumequeue"):
        index.units(3, 4, queue.store, wait=True)
    with pytest.raises(ColdRead) as cold:
        index.units(3, 4, queue.store, wait=False)
    with pytest.raises(StoreCorrupt):
        cold.value.work()
    assert queue.positions(index, 16, 20) == [n * ENTRY_BYTES for n in range(16, 20)]


def test_a_file_is_compared_once_and_then_believed() -> None:
    queue = Queue()
    queue.add(16)
    queue.save()
    index = queue.loaded()
    with pytest.raises(ColdRead) as cold:
        index.units(0, 16, queue.store, wait=False)
    cold.value.work()
    reads = queue.files.calls["pread"]
    assert len(index.units(0, 16, queue.store, wait=False)) == 16 * 20
    assert queue.files.calls["pread"] == reads + 1


def test_a_file_that_was_cut_is_noticed() -> None:
    queue = Queue()
    queue.add(16)
    queue.save()
    index = queue.index
    index.tail, index.tail_first = bytearray(), 16
    file = queue.files.open(index.path_of(0))
    file.resize(50)
    with pytest.raises(StoreCorrupt, match="at byte 50: the queue file is shorter"):
        index.units(0, 16, queue.store, wait=True)


def test_units_that_are_not_resident_are_left_to_a_thread() -> None:
    queue = Queue()
    queue.add(300)
    queue.save()
    queue.files.cold(queue.index.path_of(0), 0, FILE_UNITS * 20)
    with pytest.raises(ColdRead) as cold:
        queue.index.units(0, 5, queue.store, wait=False)
    cold.value.work()
    assert len(queue.index.units(0, 5, queue.store, wait=False)) == 100


def test_open_files_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sluice.storage.queue_index.OPEN_FILES_MAX", 3)
    queue = Queue()
    queue.add(KEPT_UNIT_COUNT + 6 * FILE_UNITS)
    queue.save()
    for start in (*range(0, 6 * FILE_UNITS, FILE_UNITS), 0):  # one that fell out is opened again
        with pytest.raises(ColdRead) as cold:
            queue.index.units(start, start + 1, queue.store, wait=False)
        cold.value.work()
        raw = queue.index.units(start, start + 1, queue.store, wait=False)
        assert queue.index.iterate(raw, start)[0][0] == start * ENTRY_BYTES
    assert len(queue.store._open) == 3


# -------------------------------------------------------------------------- beginnings and holes


def test_a_queue_that_begins_in_the_middle_is_padded_as_apache_does_it() -> None:
    queue = Queue()
    unit = queue.index.pack(70_000, 100, 0, 0, 21, 1)
    assert queue.index.add_found(unit, 21, 1)
    queue.save()
    data = queue.files.read(queue.index.path_of(16), 1 << 20)
    assert data[: 5 * 20] == SIMPLE_FILLER * 5
    assert SIMPLE_UNIT.unpack_from(data, 5 * 20) == (70_000, 100, 0)
    assert SIMPLE_UNIT.unpack(SIMPLE_FILLER) == (0, 0x7FFFFFFF, 0)
    assert (queue.index.start_offset, queue.index.end_offset) == (21, 22)


def test_recovery_fills_holes_and_takes_nothing_twice() -> None:
    queue = Queue()
    queue.add(3)
    unit = queue.index.pack(900, 100, 0, 0, 6, 1)
    assert not queue.index.add_found(unit, 2, 1)
    assert queue.index.add_found(unit, 6, 1)
    sizes = [u[1] for u in queue.index.iterate(queue.index.tail, 0)]
    assert sizes == [100] * 3 + [FILLER_SIZE] * 3 + [100]
    assert queue.index.next_offset == 7


@pytest.mark.parametrize("kind", [QueueIndex, BatchQueueIndex])
def test_offsets_that_were_given_away_are_not_given_away_again(kind: type[QueueIndex]) -> None:
    queue = Queue(kind)
    queue.add(3)
    end = queue.index.end_offset
    queue.index.go_on_at(end + 5)
    assert queue.index.next_offset == queue.index.end_offset == end + 5
    assert queue.index.start_offset == 0
    queue.save()
    assert queue.positions(queue.loaded(), 0, 3) == [0, 100, 200], "what was there still is"
    empty = Queue(kind)
    empty.index.go_on_at(7)
    assert (empty.index.start_offset, empty.index.end_offset) == (7, 7)
    empty.add(1)
    empty.save()
    assert empty.loaded().next_offset == 8


def test_the_first_unit_above_a_position() -> None:
    queue = Queue()
    queue.add(20)
    queue.index.add_found(queue.index.pack(5_000, 100, 0, 0, 25, 1), 25, 1)  # after five fillers
    queue.save()
    index = queue.index
    for position, expected in [(0, 0), (1, 1), (100, 1), (1_950, 25), (5_000, 25), (5_001, 26)]:
        assert index.find_first(position, queue.store) == (expected, expected), position


def test_dropping_takes_whole_files_but_never_the_newest() -> None:
    queue = Queue()
    queue.add(40)
    queue.save()
    index = queue.index
    assert index.drop_before(10, 10) == []
    assert index.drop_before(33, 33) == [index.path_of(0), index.path_of(16)]
    assert (index.first, sorted(index.sums)) == (33, [32])
    assert index.drop_before(40, 40) == [], "it says where the offsets go on"
    assert (index.start_offset, index.end_offset) == (40, 40)


def test_a_frozen_copy_does_not_see_what_comes_later() -> None:
    queue = Queue()
    queue.add(200)
    queue.save()
    queue.add(5)
    frozen = queue.index.freeze()
    queue.add(50)
    queue.save()
    assert (frozen.count, frozen.start_offset) == (205, 0)
    assert queue.positions(frozen, 0, 205) == [n * ENTRY_BYTES for n in range(205)]


# ------------------------------------------------------------------------------------ batch queues


def batch(count: int, body: bytes = b"x") -> Message:
    flags = records.SYS_INNER_BATCH | records.SYS_NEED_UNWRAP
    return Message("b", 0, body, b"INNER_NUM\x01%d\x02" % count, sys_flag=flags, count=count)


@pytest.fixture
def disk() -> Disk:
    disk = Disk()
    store = disk.open()
    store.change([("topic", "b", {"attributes": {"queue.type": "BatchCQ"}})])
    store.write_staged()
    return disk


@given(st.lists(st.integers(1, 40_000), min_size=1, max_size=40))
def test_the_unit_of_an_offset_is_found_by_searching(counts: list[int]) -> None:
    queue = Queue(BatchQueueIndex)
    for count in counts:
        queue.add(1, offsets=count)
    queue.save()
    index = queue.loaded()
    bounds = [0]
    for count in counts:
        bounds.append(bounds[-1] + count)
    assert index.end_offset == bounds[-1]
    for number, (first, stop) in enumerate(pairwise(bounds)):
        for offset in {first, (first + stop) // 2, stop - 1}:
            assert index.seek(offset, queue.store, wait=True) == number


@given(
    st.lists(st.integers(100, 1 << 20), min_size=1, max_size=90),
    st.integers(1, 3 << 20),
)
def test_units_that_a_read_does_not_reach_are_left_out(sizes: list[int], bytes_max: int) -> None:
    index = BatchQueueIndex(KEY, "/store", FILE_UNITS)
    raw = b"".join(index.pack(at * 7, size, 0, 0, at, 1) for at, size in enumerate(sizes))
    everything = index.iterate(raw, 0)
    within = index.iterate_within(raw, 0, bytes_max)
    assert within == everything[: len(within)] != []
    limits = (0, 1000, bytes_max, None)
    assert _choose(within, *limits) == _choose(everything, *limits)
    if len(sizes) >= 32:
        assert sum(size for _, size, *_ in within[1:]) <= bytes_max
    assert index.iterate_within(raw, 0, 0) == everything  # no limit: a filter may leave out any


def test_reading_from_inside_a_batch_gives_the_whole_batch(disk: Disk) -> None:
    for count in (3, 5, 40_000):
        disk.put_message(batch(count, b"%d" % count))
    for offset, body, following in [
        (0, b"3", 3),
        (2, b"3", 3),
        (7, b"5", 8),
        (9, b"40000", 40_008),
    ]:
        result = disk.store.read("b", 0, offset, count_max=1)
        assert [bytes(records.decode(m).body) for m in result.messages] == [body]
        assert result.next_offset == following
    assert disk.store.max_offset("b", 0) == 40_008
    assert disk.reopen().max_offset("b", 0) == 40_008
    assert disk.files.names("/store/batchconsumequeue/b") == ["0"]


def test_a_hole_in_a_batch_queue_is_stepped_over(disk: Disk) -> None:
    """A lost entry leaves offsets that no unit has; a reader must not get stuck in them."""
    disk.put_message(batch(5, b"first"))
    queue = disk.store.queue("b", 0)
    queue.next_offset += 5
    disk.put_message(batch(5, b"second"))
    assert disk.bodies("b", 0) == {0: b"first", 10: b"second"}
    for offset in range(5, 10):
        result = disk.store.read("b", 0, offset, count_max=1)
        assert (result.status, result.next_offset) == (ReadStatus.FOUND, 15)
    queue.go_on_at(20)
    result = disk.store.read("b", 0, 17, count_max=1)
    assert (result.status, result.next_offset) == (ReadStatus.NO_MATCHED_MESSAGE, 20)


def test_a_batch_queue_that_retention_emptied_goes_on_after_a_rebuild() -> None:
    disk = Disk()
    store = disk.open()
    store.change([("topic", "b", {"attributes": {"queue.type": "BatchCQ"}})])
    store.write_staged()
    disk.put_message(batch(7))
    disk.fill(60)
    store.housekeeping.delete_before(store.log.written - store.log.written % 4096)
    assert (store.min_offset("b", 0), store.max_offset("b", 0)) == (7, 7)
    disk.close()
    for path in [*disk.paths("/store/sluice"), *disk.paths("/store/batchconsumequeue")]:
        disk.files.remove(path)
    disk.open()
    assert disk.put_message(batch(3, b"new")).queue_offset == 7
    disk.reopen()
    assert disk.bodies("b", 0) == {7: b"new"}
