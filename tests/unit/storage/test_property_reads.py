"""Reads that choose entries by their properties: what they see, and where they stop."""

from __future__ import annotations

from typing import Any

import pytest

from sluice.errors import RecordDamaged
from sluice.model import Message, PropertyFilter
from sluice.protocol import records
from sluice.storage import reads
from sluice.storage.queue_index import SIMPLE_FILLER
from sluice.storage.reads import SCAN_UNITS_MAX, ReadResult, ReadStatus
from sluice.storage.store import ColdRead
from tests.unit.storage.store_kit import SEGMENT_BYTES, Disk

EVEN = PropertyFilter(lambda data: b"\x02n\x01even\x02" in data, 1)
NOBODY = PropertyFilter(lambda data: False, 1)
V6_HOST = bytes(range(16)) + b"\x00\x00\x1f\x90"


def filled(count: int, topic: str = "t", *, host: bytes | None = None, **changes: Any) -> Disk:
    disk = Disk(**changes)
    disk.open()
    for number in range(count):
        properties = b"n\x01%b\x02" % (b"odd" if number % 2 else b"even")
        message = Message(topic, 0, b"%d" % number, properties)
        if host is not None:
            message.born_host = host
        disk.store.stage(message)
    disk.store.write_staged()
    return disk


def read(disk: Disk, offset: int = 0, topic: str = "t", **changes: Any) -> ReadResult:
    while True:
        try:
            return disk.store.read(topic, 0, offset, **{"count_max": 1000, **changes})
        except ColdRead as cold:
            cold.work()


def bodies(result: ReadResult) -> list[int]:
    return [int(bytes(records.decode(message).body)) for message in result.messages]


@pytest.mark.parametrize("topic", ["t", "T" * 127, "%RETRY%" + "G" * 200])
@pytest.mark.parametrize("host", [None, V6_HOST])
def test_entries_of_every_form_are_seen(topic: str, host: bytes | None) -> None:
    disk = filled(9, topic, host=host)
    result = read(disk, topic=topic, accept=EVEN)
    assert (result.status, result.next_offset) == (ReadStatus.FOUND, 9)
    assert bodies(result) == [0, 2, 4, 6, 8]
    assert result.byte_count == sum(len(message) for message in result.messages)


def test_a_read_ends_with_what_was_asked_for() -> None:
    disk = filled(20)
    result = read(disk, accept=EVEN, count_max=3)
    assert (bodies(result), result.next_offset) == ([0, 2, 4], 5)
    one_entry = result.byte_count // 3
    result = read(disk, 5, accept=EVEN, bytes_max=2 * one_entry)
    assert (bodies(result), result.next_offset) == ([6, 8], 10)
    result = read(disk, 10, accept=EVEN, bytes_max=1)
    assert (bodies(result), result.next_offset) == ([10], 12)


def test_a_read_looks_at_a_bounded_number_of_entries() -> None:
    disk = filled(SCAN_UNITS_MAX + 10, segment_bytes=1 << 20)
    result = read(disk, accept=NOBODY)
    assert (result.status, result.next_offset) == (ReadStatus.NO_MATCHED_MESSAGE, SCAN_UNITS_MAX)
    result = read(disk, result.next_offset, accept=NOBODY)
    assert (result.status, result.next_offset) == (
        ReadStatus.NO_MATCHED_MESSAGE,
        SCAN_UNITS_MAX + 10,
    )


def test_the_dearer_a_filter_the_fewer_entries_it_sees() -> None:
    disk = filled(100, segment_bytes=1 << 20)
    seen: list[bytes] = []

    def costly(data: bytes) -> bool:
        seen.append(data)
        return False

    result = read(disk, accept=PropertyFilter(costly, reads.SCAN_WORK_MAX // 3000))
    assert 1 < len(seen) < 20
    assert (result.status, result.next_offset) == (ReadStatus.NO_MATCHED_MESSAGE, len(seen))
    seen.clear()
    result = read(disk, 7, accept=PropertyFilter(costly, 1 << 40))
    assert (len(seen), result.next_offset) == (1, 8)  # one at least: a consumer must get on


def test_a_read_looks_at_a_bounded_number_of_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    disk = filled(50, segment_bytes=1 << 20)
    monkeypatch.setattr(reads, "SCAN_BYTES_MAX", 1000)
    result = read(disk, accept=NOBODY)
    assert result.status is ReadStatus.NO_MATCHED_MESSAGE
    assert 0 < result.next_offset < 10
    monkeypatch.setattr(reads, "SCAN_BYTES_MAX", 1)
    assert read(disk, 3, accept=NOBODY).next_offset == 4


def test_units_that_hold_nothing_are_stepped_over() -> None:
    disk = filled(6)
    queue = disk.store.queues["t", 0]
    for unit in (0, 2, 5):
        queue.tail[unit * 20 : unit * 20 + 20] = SIMPLE_FILLER
    result = read(disk, accept=EVEN)
    assert (bodies(result), result.next_offset) == ([4], 6)
    result = read(disk, 5, accept=EVEN)
    assert (result.status, result.next_offset) == (ReadStatus.NO_MATCHED_MESSAGE, 6)


def test_entries_on_the_disk_are_fetched_first() -> None:
    disk = filled(40)
    disk.close()
    disk.open()
    for path in disk.paths("/store/commitlog"):
        disk.files.cold(path, 0, SEGMENT_BYTES)
    read(disk, 39)  # the queue's file is in memory now
    with pytest.raises(ColdRead):
        disk.store.read("t", 0, 0, accept=EVEN)
    assert bodies(read(disk, accept=EVEN)) == list(range(0, 40, 2))


def test_what_is_damaged_is_an_error_and_not_unwanted() -> None:
    disk = filled(3)
    disk.close()
    disk.open()
    entry_bytes = len(read(disk).messages[0])
    path = next(iter(disk.paths("/store/commitlog")))
    disk.files.flip(path, (2 * entry_bytes - 30) * 8)  # in the properties of the second
    disk.store.reader._trusted_from = 1 << 40
    with pytest.raises(RecordDamaged) as caught:
        read(disk, accept=EVEN)
    assert caught.value.next_queue_offset == 2


def test_a_unit_that_points_elsewhere_is_an_error() -> None:
    disk = filled(3)
    entry_bytes = len(read(disk).messages[0])
    path = next(iter(disk.paths("/store/commitlog")))
    for place in (0, 28, 84):  # of its size, of its own position, of the size of its body
        bit = (entry_bytes + place) * 8
        disk.files.flip(path, bit)
        with pytest.raises(RecordDamaged, match="does not match the entry"):
            read(disk, accept=EVEN)
        disk.files.flip(path, bit)
    assert bodies(read(disk, accept=EVEN)) == [0, 2]
