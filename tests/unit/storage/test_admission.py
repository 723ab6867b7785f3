"""What the store takes: names, sizes, counts of offsets; what it refuses leaves nothing behind."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from sluice.errors import MessageIllegal, ParameterInvalid
from sluice.model import Message
from sluice.protocol import records
from sluice.storage.state import TOPIC_TABLE
from tests.unit.storage.store_kit import ROOT, Disk

BATCH = {"attributes": {"queue.type": "BatchCQ"}}
BATCH_FLAGS = records.SYS_INNER_BATCH | records.SYS_NEED_UNWRAP


@pytest.mark.parametrize("topic", ["", ".", "..", "a/b", "../x", "a\0b", "naïve", "a b", "x" * 256])
def test_topics_that_are_no_directory_names(topic: str) -> None:
    disk = Disk()
    disk.open()
    with pytest.raises(MessageIllegal):
        disk.store.stage(Message(topic, 0, b""))
    assert disk.store.queues == {}
    assert disk.files.names(f"{ROOT}/consumequeue") == []


@pytest.mark.parametrize(
    "make",
    [
        lambda: Message("new", 0, b"x" * 5000),
        lambda: Message("new", -1, b"x"),
        lambda: Message("new", 0, b"x", b"p" * 40_000),
        lambda: Message("new", 0, b"x", born_host=b""),
    ],
)
def test_a_refused_message_leaves_nothing_behind(make: Callable[[], Message]) -> None:
    disk = Disk()
    disk.open()
    with pytest.raises(MessageIllegal):
        disk.store.stage(make())
    disk.store.write_staged()
    assert (disk.store.queues, disk.store.log.written) == ({}, 0)


def test_a_batch_of_which_one_message_is_refused_leaves_nothing_behind() -> None:
    """The base offset is added to a stored batch late, and may make it too long."""
    disk = Disk(segment_bytes=1 << 20)
    disk.open()
    make_batch_topic(disk, "t")
    start = disk.store.log.written
    flags = records.SYS_INNER_BATCH | records.SYS_NEED_UNWRAP
    most = records.PROPERTIES_BYTES_MAX - records.CRC_PROPERTY_BYTES
    properties = b"INNER_NUM\x012\x02a\x01"
    properties += b"x" * (most - len(properties) - 1) + b"\x02"
    messages = [
        Message("t", 0, b"fine"),
        Message("t", 0, b"too long", properties, sys_flag=flags, count=2),
    ]
    with pytest.raises(MessageIllegal):
        disk.store.stage_batch(messages)
    disk.store.write_staged()
    assert disk.store.log.written == start
    assert disk.put("t", 0, b"next").queue_offset == 0


def make_batch_topic(disk: Disk, topic: str) -> None:
    disk.store.change([(TOPIC_TABLE, topic, BATCH)])
    disk.store.write_staged()


@pytest.mark.parametrize(
    ("topic", "properties", "flags", "count", "reason"),
    [
        ("simple", b"INNER_NUM\x013\x02", BATCH_FLAGS, 3, "queue.type=BatchCQ"),
        ("simple", b"", 0, 2, "say 1"),
        ("batch", b"", 0, 2, "say 1"),
        ("batch", b"", 0, 0, "say 1"),
        ("batch", b"INNER_NUM\x013\x02", BATCH_FLAGS, 2, "say 3"),
        ("batch", b"INNER_NUM\x013\x02", BATCH_FLAGS, 1, "say 3"),
    ],
)
@pytest.mark.parametrize("used", [False, True])
def test_a_count_of_offsets_that_the_queue_or_recovery_would_not_see(
    topic: str, properties: bytes, flags: int, count: int, reason: str, used: bool
) -> None:
    disk = Disk()
    disk.open()
    make_batch_topic(disk, "batch")
    if used:
        disk.put(topic, 0, b"first")
    queues, end = dict(disk.store.queues), disk.store.log.written
    message = Message(topic, 0, b"x", properties, sys_flag=flags, count=count)
    with pytest.raises(MessageIllegal, match=reason):
        disk.store.stage(message)
    with pytest.raises(MessageIllegal, match=reason):
        disk.store.stage_batch([Message(topic, 0, b"fine"), message])
    disk.store.write_staged()
    assert disk.store.log.written == end
    if used:
        assert disk.store.queues == queues
        assert disk.put(topic, 0, b"next").queue_offset == 1


def test_the_type_of_queues_that_were_written_to_does_not_change() -> None:
    disk = Disk()
    disk.open()
    disk.put("simple", 3, b"x")
    make_batch_topic(disk, "batch")
    disk.put("batch", 0, b"x")
    end = disk.store.log.written
    for topic, settings in (("simple", BATCH), ("batch", {"perm": 6})):
        with pytest.raises(ParameterInvalid, match=f"topic {topic}: queue.type cannot change"):
            disk.store.change([(TOPIC_TABLE, "other", {}), (TOPIC_TABLE, topic, settings)])
    disk.store.write_staged()
    assert disk.store.log.written == end
    # What is not changed may be said again, and unused topics may change.
    disk.store.change([(TOPIC_TABLE, "simple", {"perm": 4}), (TOPIC_TABLE, "batch", BATCH)])
    make_batch_topic(disk, "unused")
    disk.store.change([(TOPIC_TABLE, "unused", {})])
    disk.store.write_staged()
    disk.reopen()
    assert [bytes(records.decode(m).body) for m in disk.read("batch", 0, 0).messages] == [b"x"]
