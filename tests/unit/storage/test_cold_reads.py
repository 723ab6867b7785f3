"""Reads that may have to wait for the disk: never on the owner's thread, and always checked."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from sluice.errors import Busy, RecordDamaged, Stopping
from sluice.model import Message
from sluice.protocol import records
from sluice.storage.background import Steps
from sluice.storage.reads import SCAN_UNITS_MAX, ReadResult, ReadStatus
from sluice.storage.store import ColdRead
from tests.unit.storage.store_kit import SEGMENT_BYTES, Disk

COUNT = 40


@pytest.fixture
def disk() -> Disk:
    """A store that was closed and opened again, all of its log behind the page cache."""
    disk = Disk()
    disk.open()
    disk.fill(COUNT, queues=1)
    disk.close()
    disk.background = Steps()
    disk.open()
    for path in disk.paths("/store/commitlog"):
        disk.files.cold(path, 0, SEGMENT_BYTES)
    return disk


class Asked:
    """What came back to the owner."""

    def __init__(self) -> None:
        self.result: Any = None
        self.error: BaseException | None = None
        self.count = 0

    def done(self, result: Any, error: BaseException | None) -> None:
        self.result, self.error = result, error
        self.count += 1


def ask(disk: Disk, offset: int, count_max: int = 1) -> Asked:
    asked = Asked()
    disk.store.call(lambda: disk.store.read("t", 0, offset, count_max=count_max), asked.done)
    return asked


def steps(disk: Disk) -> Steps:
    assert isinstance(disk.background, Steps)
    return disk.background


def cold_step(disk: Disk) -> bool:
    """One piece of work of one of the threads."""
    return any(steps(disk).step(f"cold{n}") for n in range(disk.config.cold_read_threads))


def test_a_cold_read_raises_and_touches_nothing(disk: Disk) -> None:
    warm_calls, reads = disk.files.warm_calls, disk.files.calls["pread"]
    with pytest.raises(ColdRead):
        disk.store.read("t", 0, 3)
    assert (disk.files.warm_calls, disk.files.calls["pread"]) == (warm_calls, reads)


def test_call_finishes_only_after_the_cold_lane_ran(disk: Disk) -> None:
    asked = ask(disk, 3)
    assert asked.count == 0
    assert not steps(disk).step("flush")
    assert not steps(disk).step("disk")
    rounds = 0
    while not asked.count:
        assert cold_step(disk)
        rounds += 1
    assert rounds == 2, "the queue's file, then the log"
    assert asked.error is None
    (entry,) = map(records.decode, asked.result.messages)
    assert (entry.queue_offset, int(bytes(entry.body))) == (3, 3)
    again = ask(disk, 3)
    assert (again.count, cold_step(disk)) == (1, False), "now it is in memory"


def test_cold_reads_take_turns_on_several_threads(disk: Disk) -> None:
    asked = [ask(disk, offset) for offset in range(0, COUNT, 10)]
    waiting = [lane for lane, jobs in steps(disk).waiting.items() if jobs]
    assert len(waiting) == min(len(asked), disk.config.cold_read_threads)
    while not all(each.count for each in asked):
        assert cold_step(disk)
    assert [each.count for each in asked] == [1] * len(asked)


def test_new_messages_are_never_cold(disk: Disk) -> None:
    disk.store.stage(Message("t", 0, b"new"))
    disk.store.write_staged()
    steps(disk).run_all()
    for path in disk.paths("/store/commitlog"):
        disk.files.cold(path, 0, SEGMENT_BYTES)
    result = disk.store.read("t", 0, COUNT)
    assert [bytes(records.decode(m).body) for m in result.messages] == [b"new"]


def test_beyond_hot_bytes_the_system_is_asked() -> None:
    small = Disk(hot_bytes=SEGMENT_BYTES)
    small.open()
    small.fill(COUNT, queues=1)
    for path in small.paths("/store/commitlog"):
        small.files.cold(path, 0, SEGMENT_BYTES)
    with pytest.raises(ColdRead):
        small.store.read("t", 0, 0)
    assert small.store.read("t", 0, COUNT - 1).status is ReadStatus.FOUND


def test_what_was_written_a_while_ago_is_asked_about() -> None:
    disk = Disk()
    disk.open()
    disk.fill(COUNT, queues=1)
    disk.store.tick()
    for path in disk.paths("/store/commitlog"):
        disk.files.cold(path, 0, SEGMENT_BYTES)
    disk.now_ms += 29_000
    disk.store.tick()
    assert disk.store.read("t", 0, 0).status is ReadStatus.FOUND, "nobody has been asked"
    disk.now_ms += 1_000
    disk.store.tick()
    with pytest.raises(ColdRead):
        disk.store.read("t", 0, 0)
    disk.fill(1, queues=1)
    assert disk.store.read("t", 0, COUNT).status is ReadStatus.FOUND, "that is new"


def test_times_positions_and_keys_may_be_cold_too(disk: Disk) -> None:
    with pytest.raises(ColdRead):
        disk.store.entry_at(0)
    with pytest.raises(ColdRead):
        disk.store.offset_for_time("t", 0, disk.now_ms)
    asked = Asked()
    disk.store.query_key("t", "nobody", asked.done)
    steps(disk).run_all()
    assert (asked.result, asked.error) == ([], None)


def test_what_fails_on_the_thread_reaches_the_owner(disk: Disk) -> None:
    asked = ask(disk, 0)
    disk.files.fail("pread", sticky=True)
    while not asked.count:
        assert cold_step(disk)
    assert isinstance(asked.error, OSError)
    disk.files.clear_faults()
    asked = ask(disk, 0)
    while not asked.count:
        assert cold_step(disk)
    assert asked.error is None, "the next one may succeed"


# -------------------------------------------------------------------- what is read back is checked


def reopened(count: int = COUNT, **changes: Any) -> Disk:
    disk = Disk(**changes)
    disk.open()
    disk.fill(count, queues=1)
    disk.reopen()
    return disk


@pytest.mark.parametrize("number", [0, 7, COUNT - 1])
def test_a_rotten_message_is_an_error_with_file_and_place(number: int) -> None:
    disk = reopened()
    entry = next(iter(disk.read("t", 0, number, count_max=1).messages))
    position = records.decode(entry).position
    path = f"/store/commitlog/{position - position % SEGMENT_BYTES:020d}"
    disk.files.flip(path, (position % SEGMENT_BYTES + 120) * 8)
    with pytest.raises(RecordDamaged) as damaged:
        disk.read("t", 0, number, count_max=1)
    assert (damaged.value.path, damaged.value.offset) == (path, position % SEGMENT_BYTES)
    assert damaged.value.next_queue_offset == number + 1, "a reader may go on behind it"
    for offset in {0, 1, COUNT - 2} - {number}:
        assert disk.read("t", 0, offset, count_max=1).status is ReadStatus.FOUND
    with pytest.raises(RecordDamaged) as viewed:
        disk.store.entry_at(position)
    assert (viewed.value.path, viewed.value.offset) == (path, position % SEGMENT_BYTES)


@pytest.mark.parametrize("field_at", [0, 3, 4, 7, 8, 28, 35, 36, 56, 84])
def test_a_damaged_head_is_damage_and_not_the_middle_of_an_entry(field_at: int) -> None:
    disk = reopened()
    (entry,) = disk.read("t", 0, 5, count_max=1).messages
    position = records.decode(entry).position
    path = f"/store/commitlog/{position - position % SEGMENT_BYTES:020d}"
    for bit in range(8):
        disk.files.flip(path, (position % SEGMENT_BYTES + field_at) * 8 + bit)
        with pytest.raises(RecordDamaged):
            disk.store.entry_at(position)
        disk.files.flip(path, (position % SEGMENT_BYTES + field_at) * 8 + bit)
    found = disk.store.entry_at(position)
    assert found is not None
    assert bytes(found) == bytes(entry)
    for middle in range(position + 1, position + len(entry)):
        assert disk.store.entry_at(middle) is None


def test_a_damaged_time_does_not_lead_a_search_astray() -> None:
    disk = Disk()
    disk.open()
    for number in range(COUNT):
        disk.now_ms += 1000
        disk.put("t", 0, b"%d" % number)
    times = [disk.now_ms - 1000 * (COUNT - 1 - number) for number in range(COUNT)]
    disk.reopen()
    assert len(disk.bodies("t", 0)) == COUNT
    for number in (0, 7, 20, COUNT - 1):
        (entry,) = disk.read("t", 0, number, count_max=1).messages
        position = records.decode(entry).position
        path = f"/store/commitlog/{position - position % SEGMENT_BYTES:020d}"
        for at, bit in ((58, 0), (60, 7), (57, 4)):
            disk.files.flip(path, (position % SEGMENT_BYTES + at) * 8 + bit)
            for offset, when_ms in enumerate(times):
                for upper in (False, True):
                    found = disk.store.offset_for_time("t", 0, when_ms, upper=upper)
                    # The damaged entry has no time: it or its neighbour may be found instead.
                    assert found == offset or (
                        number in (found, offset) and abs(found - offset) == 1
                    )
            assert disk.store.earliest_ms("t", 0) == times[number == 0]
            disk.files.flip(path, (position % SEGMENT_BYTES + at) * 8 + bit)


def test_a_query_by_key_never_calls_a_damaged_message_missing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    disk = Disk()
    disk.open()
    for number in range(4):
        disk.put("t", 0, b"%d" % number, b"KEYS\x01k%d same\x02" % number)
    disk.reopen()
    path = f"/store/commitlog/{0:020d}"
    disk.files.flip(path, 88 * 8)
    asked = Asked()
    disk.store.query_key("t", "k0", asked.done)
    assert isinstance(asked.error, RecordDamaged)
    assert (asked.error.path, asked.error.offset) == (path, 0)
    disk.store.query_key("t", "same", asked.done)
    assert [bytes(records.decode(m).body) for m in asked.result] == [b"3", b"2", b"1"]
    assert f"a query by key leaves out a damaged entry: {path}: at byte 0" in caplog.text
    disk.store.query_key("t", "none", asked.done)
    assert asked.result == []


def test_a_unit_that_points_to_another_message_is_noticed() -> None:
    disk = Disk()
    disk.open()
    disk.fill(10, queues=1)
    queue = disk.store.queues["t", 0]
    queue.tail[0:20] = queue.tail[20:40]
    with pytest.raises(RecordDamaged, match="the queue's unit does not match the entry"):
        disk.store.read("t", 0, 0)


# ------------------------------------------------------------------------------ limits and filters


def read(disk: Disk, offset: int, **limits: Any) -> ReadResult:
    return disk.store.read("t", 0, offset, **limits)


def test_limits_and_statuses() -> None:
    disk = Disk(segment_bytes=1 << 20)
    disk.open()
    assert read(disk, 0).status is ReadStatus.NO_MATCHED_LOGIC_QUEUE
    disk.fill(10, queues=1)
    sizes = [len(m) for m in read(disk, 0).messages]
    assert read(disk, 0, count_max=3).count == 3
    assert read(disk, 0, bytes_max=1).count == 1, "the first one whatever its size"
    assert read(disk, 0, bytes_max=sum(sizes[:4])).count == 4
    assert read(disk, 0, bytes_max=sum(sizes[:4]) - 1).count == 3
    whole = read(disk, 2)
    assert (whole.count, whole.byte_count, whole.next_offset) == (8, sum(sizes[2:]), 10)
    assert len(whole.slices) == 1, "neighbours in the log go out as one slice"
    for offset, status, following in [
        (10, ReadStatus.OFFSET_OVERFLOW_ONE, 10),
        (11, ReadStatus.OFFSET_OVERFLOW_BADLY, 10),
        (-1, ReadStatus.OFFSET_TOO_SMALL, 0),
    ]:
        result = read(disk, offset)
        assert (result.status, result.next_offset, result.slices) == (status, following, [])
        assert (result.min_offset, result.max_offset) == (0, 10)


def test_a_slice_never_crosses_a_file() -> None:
    disk = Disk()
    disk.open()
    disk.fill(COUNT, queues=1)
    result = read(disk, 0, count_max=COUNT)
    assert len(result.slices) > 1
    assert [records.decode(m).queue_offset for m in result.messages] == list(range(COUNT))


def test_a_filter_looks_at_a_bounded_number_of_units() -> None:
    disk = Disk(segment_bytes=1 << 20)
    disk.open()
    for number in range(SCAN_UNITS_MAX + 10):
        tag = b"rare" if number == SCAN_UNITS_MAX + 5 else b"other"
        disk.store.stage(Message("t", 0, b"%d" % number, b"TAGS\x01%b\x02" % tag))
    disk.store.write_staged()
    rare = records.java_hash(b"rare")
    result = read(disk, 0, accept=lambda code: code == rare)
    assert (result.status, result.next_offset) == (ReadStatus.NO_MATCHED_MESSAGE, SCAN_UNITS_MAX)
    result = read(disk, result.next_offset, accept=lambda code: code == rare)
    assert [bytes(records.decode(m).body) for m in result.messages] == [
        b"%d" % (SCAN_UNITS_MAX + 5)
    ]
    assert result.next_offset == SCAN_UNITS_MAX + 10


def test_the_offset_at_a_time() -> None:
    disk = Disk()
    disk.open()
    begin_ms = disk.now_ms
    for _ in range(10):
        disk.fill(1, queues=1)
        disk.fill(1, queues=1)
        disk.now_ms += 100
    search = disk.store.offset_for_time
    assert search("t", 0, begin_ms - 1) == 0
    assert search("t", 0, begin_ms + 300) == 6
    assert search("t", 0, begin_ms + 301) == 8
    assert search("t", 0, begin_ms + 10_000) == 20
    assert search("t", 0, begin_ms + 300, upper=True) == 7
    assert search("t", 0, begin_ms + 299, upper=True) == 5
    assert search("t", 0, begin_ms - 1, upper=True) == 0
    assert search("t", 9, begin_ms) == 0


def test_views_outlive_deletion() -> None:
    """A reader that holds slices of a file keeps them when retention takes the file."""
    disk = Disk()
    disk.open()
    disk.fill(COUNT, queues=1)
    held = read(disk, 0, count_max=2)
    disk.store.housekeeping.delete_before(SEGMENT_BYTES)
    assert disk.files.names("/store/commitlog")[0] == f"{SEGMENT_BYTES:020d}"
    assert [int(bytes(records.decode(m).body)) for m in held.messages] == [0, 1]


def test_reads_that_wait_are_bounded_and_the_refusal_names_the_bound(disk: Disk) -> None:
    disk.store.config = replace(disk.store.config, cold_reads_max=3)
    waiting = [ask(disk, 3) for _ in range(3)]
    query = Asked()
    refused = ask(disk, 3)
    disk.store.query_key("t", "k", query.done)
    for asked in (refused, query):
        assert isinstance(asked.error, Busy)
        assert "3 reads wait for the disk, the limit is 3 (cold_reads_max)" in str(asked.error)
    while cold_step(disk):
        pass
    assert [asked.error for asked in waiting] == [None] * 3
    assert disk.store.cold_reads.count == 0
    disk.store.query_key("t", "k", query.done)
    assert disk.store.cold_reads.count == 1
    steps(disk).run_all()
    assert (query.count, query.error, disk.store.cold_reads.count) == (2, None, 0)


def test_reads_that_outlast_the_store_are_refused(disk: Disk) -> None:
    read, query = ask(disk, 3), Asked()
    # One that has to look under two names, one after the other.
    disk.store.reader.real_topics[b"kept"] = b"t"
    disk.store.query_key("t", "k", query.done)
    closed: list[object] = []
    disk.store.shut(closed.append)
    while not closed:
        assert steps(disk).step("disk") or steps(disk).step("flush")
    assert read.count == 0, "its thread is behind"
    steps(disk).run_all()
    late = ask(disk, 3)
    for asked in (read, query, late):
        assert isinstance(asked.error, Stopping)
        assert asked.count == 1
    assert disk.store.cold_reads.count == 0
