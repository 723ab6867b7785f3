"""Entries that are made from others: the same bytes as a plain append gives, but for the origin."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Protocol
from zlib import crc32

import pytest

from sluice.model import Message
from sluice.protocol import records
from sluice.storage.copies import (
    Keys,
    Original,
    TargetQueue,
    stage_copies,
    stage_copy,
    takes_copies,
)
from sluice.storage.lanes import tell
from sluice.storage.store import ColdRead, Store
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


def original_of(message: Message = MESSAGE, position: int = 0) -> Original:
    return Original(
        position, message.topic.encode(), crc32(message.body) & 0x7FFFFFFF, message.flag,
        message.sys_flag, message.born_ms, message.born_host, 0, message.reconsume_times,
        message.body, message.properties,
    )  # fmt: skip


class Way(Protocol):
    """A way in which a copy is made: which properties are added to the original's."""

    def __call__(self, store: Store, queue: TargetQueue, position: int, added: bytes) -> None: ...


def alone(store: Store, queue: TargetQueue, position: int, added: bytes) -> None:
    original = original_of(position=position)
    assert stage_copy(store, queue, original, original.properties + added) is not None


def together(store: Store, queue: TargetQueue, position: int, added: bytes) -> None:
    def choose(properties: bytes, store_ms: int) -> tuple[TargetQueue, bytes, Keys]:
        assert properties == MESSAGE.properties
        assert store_ms == store.turn_ms()
        return queue, added, records.message_keys(properties)

    (share,) = stage_copies(store, [position], choose)
    assert (share.queue, share.message_count) == (queue, 1)
    assert share.tags_codes == {records.java_hash(b"TagA")}


@pytest.mark.parametrize("way", [alone, together])
def test_a_copy_has_the_bytes_of_a_plain_append(disk: Disk, way: Way) -> None:
    origin = disk.put_message(MESSAGE).position
    added = b"more\x01x\x02"
    plain = replace(
        *(MESSAGE,),
        topic="to",
        queue_id=2,
        properties=MESSAGE.properties + added,
        prepared_offset=origin,
    )
    first = disk.put_message(plain)
    store, queue = disk.store, disk.store.queues["to", 2]
    assert takes_copies(store, queue)
    told: list[object] = []
    way(store, queue, origin, added)
    tell(store, told.append)
    store.write_staged()
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


def test_copies_that_are_made_together_go_into_many_queues_and_files(disk: Disk) -> None:
    store = disk.store
    origins = [disk.put_message(replace(MESSAGE, flag=at)).position for at in range(200)]
    queues = [store.queue("to", queue_id) for queue_id in range(3)]
    asked_for = itertools.count()

    def choose(properties: bytes, store_ms: int) -> tuple[TargetQueue, bytes, Keys]:
        return queues[next(asked_for) % 3], b"", (b"", b"", b"")

    made = rounds = 0
    while made < len(origins):
        rounds += 1
        asked_for = itertools.count(made)
        shares = stage_copies(store, origins[made:], choose)
        made += sum(share.message_count for share in shares)
        store.write_staged()
    assert rounds > 1, "one file has no room for them"
    disk.reopen()
    store = disk.store
    for queue_id in range(3):
        flags = []
        for offset in range(store.max_offset("to", queue_id)):
            (view,) = disk.read("to", queue_id, offset, count_max=1).slices
            entry = records.decode(view)
            assert entry.prepared_offset == origins[entry.flag]
            flags.append(entry.flag)
        assert flags == list(range(queue_id, 200, 3))


def asked(disk: Disk, *positions: int) -> int:
    """How many copies are made of the entries at some positions."""
    queue = disk.store.queue("to", 0)
    shares = stage_copies(disk.store, positions, lambda *_: (queue, b"", (b"", b"", b"")))
    disk.store.write_staged()
    return sum(share.message_count for share in shares)


def test_a_store_with_an_address_of_ipv6_writes_entries_that_can_be_read(disk: Disk) -> None:
    original = original_of()
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
    usual = disk.put_message(MESSAGE).position
    for message in (
        replace(MESSAGE, born_host=v6),
        replace(MESSAGE, topic="x" * 200),
        replace(MESSAGE, properties=b"_SYS_MSG_EXPIRES_MS_\x015\x02"),
    ):
        unusual = disk.put_message(message).position
        assert asked(disk, unusual) == 0
        assert asked(disk, usual, unusual, usual) == 1, "and those behind it wait for it"
    original = original_of()
    queue = disk.store.queue("to", 0)
    assert stage_copy(disk.store, queue, original, b"a\x01" + b"x" * 32_750 + b"\x02") is None
    assert stage_copy(disk.store, queue, original, b"_SYS_MSG_EXPIRES_MS_\x015\x02") is None
    assert not takes_copies(disk.store, disk.store.queue("SCHEDULE_TOPIC_XXXX", 0))
    for nowhere in (usual + 1, disk.store.log.end, -1, 1 << 40):
        assert asked(disk, nowhere) == 0
    assert stage_copies(disk.store, [usual], lambda *_: None) == []
    assert disk.store.staged == []


def test_what_the_disk_has_spoilt_is_not_copied(disk: Disk) -> None:
    placed = disk.put_message(MESSAGE)
    disk.reopen()
    assert asked(disk, placed.position) == 1
    disk.files.flip("/store/commitlog/00000000000000000000", (placed.position + 88) * 8)
    assert asked(disk, placed.position) == 0


def test_what_is_on_the_disk_only_is_not_waited_for(disk: Disk) -> None:
    placed = disk.put_message(MESSAGE)
    disk.store.reader.hot_bytes = 0
    disk.files.cold("/store/commitlog/00000000000000000000", 0, 4096)
    assert asked(disk, placed.position) == 0
    for _ in range(2):  # its head says how long it is
        with pytest.raises(ColdRead) as cold:
            disk.store.entry_at(placed.position)
        cold.value.work()
    assert asked(disk, placed.position) == 1
