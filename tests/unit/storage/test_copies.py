"""Entries that are made from others: the same bytes as a plain append gives, but for the origin."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sluice.errors import RecordDamaged
from sluice.model import Message
from sluice.protocol import records
from sluice.storage.copies import Original, read_original, stage_copy, takes_copies
from sluice.storage.lanes import tell
from sluice.storage.store import ColdRead
from tests.unit.storage.store_kit import Disk

MESSAGE = Message(
    "from",
    1,
    b"some body",
    b"TAGS\x01TagA\x02KEYS\x01a b\x02UNIQ_KEY\x01u1\x02",
    7,
    0x301,
    123,
    b"\x0a\x00\x00\x01\x00\x00\x20\x00",
    3,
)


@pytest.fixture
def disk() -> Disk:
    disk = Disk(flush="sync")
    disk.open()
    return disk


def original_of(disk: Disk, message: Message = MESSAGE) -> Original:
    placed = disk.put_message(message)
    original = read_original(disk.store, placed.position)
    assert original is not None
    return original


def test_an_original_is_read_as_it_was_written(disk: Disk) -> None:
    original = original_of(disk)
    assert (original.topic, bytes(original.body), original.properties) == (
        b"from", b"some body", MESSAGE.properties,
    )  # fmt: skip
    assert (original.flag, original.sys_flag, original.born_ms) == (7, 0x301, 123)
    assert (original.born_host, original.reconsume_times) == (MESSAGE.born_host, 3)


def test_a_copy_has_the_bytes_of_a_plain_append(disk: Disk) -> None:
    original = original_of(disk)
    properties = original.properties + b"more\x01x\x02"
    plain = replace(
        MESSAGE, topic="to", queue_id=2, properties=properties, prepared_offset=original.position
    )
    first = disk.put_message(plain)
    store, queue = disk.store, disk.store.queues["to", 2]
    assert takes_copies(store, queue)
    told: list[object] = []
    staged = stage_copy(store, queue, original, properties)
    tell(store, told.append)
    store.write_staged()
    assert staged == (first.end, first.size, 1, records.java_hash(b"TagA"))
    assert told == [None]
    copy = store.entry_at(first.end)
    expected = store.encoder.encode(plain, b"to", first.size, 1, first.end, first.store_ms)
    assert copy is not None
    assert bytes(copy) == expected
    units = queue.iterate(queue.units(0, 2, store.queue_files, wait=True), 0)
    assert [unit[1:3] for unit in units] == [(first.size, records.java_hash(b"TagA"))] * 2
    found: list[memoryview] = []
    store.query_key("to", "u1", lambda views, error: found.extend(views or ()))
    assert len(found) == 2, "it is found by its keys"


def test_a_store_with_an_address_of_ipv6_writes_entries_that_can_be_read(disk: Disk) -> None:
    original = original_of(disk)
    disk.store.encoder = records.Encoder(
        bytes(15) + b"\x01\x00\x00\x2a\x9f",
        with_crc=True,
        body_bytes_max=4096,
        entry_bytes_max=disk.store.encoder.entry_bytes_max,
    )
    copied = stage_copy(disk.store, disk.store.queue("to", 0), original, b"UNIQ_KEY\x01u2\x02")
    disk.store.write_staged()
    assert copied is not None
    copy = disk.store.entry_at(copied.position)
    assert copy is not None
    assert bytes(records.decode(copy).body) == bytes(original.body)


def test_what_is_unusual_is_left_to_the_plain_way(disk: Disk) -> None:
    v6 = bytes(15) + b"\x01\x00\x00\x20\x00"
    assert len(v6) == 20
    for message in (
        replace(MESSAGE, born_host=v6),
        replace(MESSAGE, topic="x" * 200),
    ):
        placed = disk.put_message(message)
        assert read_original(disk.store, placed.position) is None
    original = original_of(disk)
    queue = disk.store.queue("to", 0)
    assert stage_copy(disk.store, queue, original, b"a\x01" + b"x" * 32_750 + b"\x02") is None
    assert stage_copy(disk.store, queue, original, b"_SYS_MSG_EXPIRES_MS_\x015\x02") is None
    assert not takes_copies(disk.store, disk.store.queue("SCHEDULE_TOPIC_XXXX", 0))
    assert read_original(disk.store, original.position + 1) is None
    assert read_original(disk.store, disk.store.log.end) is None
    assert disk.store.staged == []


def test_what_the_disk_has_spoilt_is_not_copied(disk: Disk) -> None:
    placed = disk.put_message(MESSAGE)
    disk.reopen()
    body_at = placed.position + 88
    disk.files.flip("/store/commitlog/00000000000000000000", body_at * 8)
    with pytest.raises(RecordDamaged):
        read_original(disk.store, placed.position)


def test_what_is_on_the_disk_only_is_asked_for(disk: Disk) -> None:
    placed = disk.put_message(MESSAGE)
    disk.store.reader.hot_bytes = 0
    disk.files.cold("/store/commitlog/00000000000000000000", 0, 4096)
    with pytest.raises(ColdRead) as cold:
        read_original(disk.store, placed.position)
    cold.value.work()
    assert read_original(disk.store, placed.position) is not None
