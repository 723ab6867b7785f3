"""Topics in memory: read as others are, bounded, and with offsets that are given away only once."""

from __future__ import annotations

import errno
from typing import Any

import pytest

from sluice.errors import Busy, MessageIllegal, SluiceError
from sluice.model import Message, Placed, PropertyFilter
from sluice.protocol import records
from sluice.protocol.records import java_hash
from sluice.storage.background import Steps
from sluice.storage.memory_files import KeepNothing
from sluice.storage.memory_topics import BLOCK_OFFSETS, ENTRY_COST, MEMORY_FLOOR
from sluice.storage.store import TOPIC_TABLE, ReadStatus
from tests.unit.storage.store_kit import Disk

TOPIC = "fleeting"
BYTES_MIN = 65_536


def make(disk: Disk, topic: str = TOPIC, **attributes: str) -> None:
    """Names of attributes have an underscore in the place of a dot."""
    named = {name.replace("_", "."): value for name, value in attributes.items()}
    settings = {"attributes": {"storage": "memory", **named}}
    disk.store.change([(TOPIC_TABLE, topic, settings)])
    disk.store.write_staged()


def opened(**attributes: str) -> Disk:
    disk = Disk()
    disk.open()
    make(disk, **attributes)
    return disk


def bodies(disk: Disk, offset: int = 0, queue_id: int = 0, **limits: Any) -> list[bytes]:
    result = disk.read(TOPIC, queue_id, offset, **limits)
    return [bytes(records.decode(message).body) for message in result.messages]


# ------------------------------------------------------------------------------------------ reading


def test_messages_are_read_as_from_the_log_and_never_written_to_it() -> None:
    disk = opened()
    disk.put(TOPIC, 0, b"first")  # its offsets are written down, once for many
    end = disk.store.log.written
    placed = disk.put(TOPIC, 0, b"second", b"TAGS\x01a\x02")
    assert disk.store.log.written == end
    assert (placed.queue_offset, placed.position > MEMORY_FLOOR) == (1, True)
    result = disk.read(TOPIC, 0, 0)
    assert (result.status, result.next_offset, result.min_offset, result.max_offset) == (
        *(ReadStatus.FOUND, 2),
        *(0, 2),
    )
    entry = records.decode(result.messages[1])
    assert bytes(entry.body) == b"second"
    assert (entry.queue_offset, entry.position) == (1, placed.position)
    assert entry.store_ms == placed.store_ms == disk.now_ms
    found = disk.store.entry_at(placed.position)
    assert found is not None
    assert found == result.messages[1]
    assert disk.store.entry_at(placed.position + 1) is None
    assert TOPIC not in {topic for topic, _ in disk.store.queues}


def test_limits_and_filters_of_a_read() -> None:
    disk = opened()
    for number in range(6):
        disk.put(TOPIC, 0, b"%d" % number, b"TAGS\x01%s\x02" % (b"odd" if number % 2 else b"even"))
    odd = java_hash(b"odd")
    assert bodies(disk, count_max=2) == [b"0", b"1"]
    assert disk.read(TOPIC, 0, 0, count_max=2).next_offset == 2
    assert bodies(disk, bytes_max=1) == [b"0"]
    wanted = disk.read(TOPIC, 0, 0, accept=lambda code: code == odd)
    assert [bytes(records.decode(m).body) for m in wanted.messages] == [b"1", b"3", b"5"]
    assert wanted.next_offset == 6
    none = disk.read(TOPIC, 0, 3, accept=lambda code: False)
    assert (none.status, none.next_offset, none.count) == (ReadStatus.NO_MATCHED_MESSAGE, 6, 0)
    by_properties = PropertyFilter(lambda data: b"\x02TAGS\x01even\x02" in data, 1)
    assert bodies(disk, 1, accept=by_properties) == [b"2", b"4"]


@pytest.mark.parametrize(
    ("offset", "status"),
    [
        (3, ReadStatus.OFFSET_OVERFLOW_ONE),
        (4, ReadStatus.OFFSET_OVERFLOW_BADLY),
        (0, ReadStatus.FOUND),
    ],
)
def test_offsets_outside_of_what_there_is(offset: int, status: ReadStatus) -> None:
    disk = opened()
    disk.fill(3, TOPIC, queues=1)
    result = disk.read(TOPIC, 0, offset)
    assert (result.status, result.next_offset) == (status, 3)


def test_an_empty_queue_and_a_topic_that_is_not_here() -> None:
    disk = opened()
    assert disk.read(TOPIC, 3, 0).status is ReadStatus.OFFSET_OVERFLOW_ONE
    assert disk.read("unknown", 3, 0).status is ReadStatus.NO_MATCHED_LOGIC_QUEUE
    assert (disk.store.min_offset("unknown", 0), disk.store.max_offset("unknown", 0)) == (0, 0)
    assert disk.store.earliest_ms(TOPIC, 0) == -1


def test_offsets_by_time() -> None:
    disk = opened()
    begin = disk.now_ms
    for _ in range(5):
        disk.put(TOPIC, 0, b"x")
        disk.now_ms += 1_000
    store = disk.store
    assert store.earliest_ms(TOPIC, 0) == begin
    assert store.offset_for_time(TOPIC, 0, begin - 1) == 0
    assert store.offset_for_time(TOPIC, 0, begin + 1_001) == 2
    assert store.offset_for_time(TOPIC, 0, begin + 99_000) == 5
    assert store.offset_for_time(TOPIC, 0, begin + 1_001, upper=True) == 1
    assert store.offset_for_time(TOPIC, 0, begin - 1, upper=True) == 0


def test_a_batch_goes_in_whole_or_not_at_all() -> None:
    disk = opened(memory_bytes_max=str(BYTES_MIN), memory_when_full="refuse")
    messages = [Message(TOPIC, 0, b"%d" % number) for number in range(3)]
    outcome: list[SluiceError | None] = []
    placed = disk.store.stage_batch(messages, outcome.append)
    assert bodies(disk) == []  # the turn is not over
    disk.store.write_staged()
    assert (outcome, [each.queue_offset for each in placed]) == ([None], [0, 1, 2])
    assert bodies(disk) == [b"0", b"1", b"2"]
    large = [Message(TOPIC, 0, bytes(3_000)) for _ in range(30)]
    with pytest.raises(MessageIllegal, match="do not fit"):
        disk.store.stage_batch(large)
    assert disk.store.max_offset(TOPIC, 0) == 3


def test_what_is_stored_whole_is_refused() -> None:
    disk = opened()
    message = Message(TOPIC, 0, b"x", b"INNER_NUM\x013\x02", sys_flag=0x80, count=3)
    with pytest.raises(MessageIllegal, match="stored whole"):
        disk.store.stage(message)


# ------------------------------------------------------------------------------------------- bounds


def fill(disk: Disk, count: int, queues: int = 2) -> list[Placed]:
    return [disk.put(TOPIC, number % queues, bytes(1_000)) for number in range(count)]


def test_the_oldest_of_the_topic_are_dropped_whichever_queue_they_are_in() -> None:
    disk = opened(memory_bytes_max=str(BYTES_MIN))
    placed = fill(disk, 5_000)
    store, memory = disk.store, disk.store.memory
    cost = placed[0].size + ENTRY_COST
    assert BYTES_MIN - cost < memory.byte_count <= BYTES_MIN
    kept = BYTES_MIN // cost
    assert memory.dropped == {TOPIC: 5_000 - kept}
    assert (store.min_offset(TOPIC, 0), store.max_offset(TOPIC, 0)) == (2_500 - kept // 2, 2_500)
    too_small = disk.read(TOPIC, 0, 5)
    assert (too_small.status, too_small.next_offset) == (
        ReadStatus.OFFSET_TOO_SMALL,
        2_500 - kept // 2,
    )
    assert len(bodies(disk, 2_500 - kept // 2, count_max=5_000)) == kept // 2
    assert store.entry_at(placed[0].position) is None
    assert store.entry_at(placed[-1].position) is not None


def test_or_sends_are_refused_until_the_bound_is_raised() -> None:
    disk = opened(memory_bytes_max=str(BYTES_MIN), memory_when_full="refuse")
    with pytest.raises(Busy, match=r"memory\.bytes\.max"):
        fill(disk, 5_000)
    assert disk.store.min_offset(TOPIC, 0) == 0
    assert disk.store.memory.refused == {TOPIC: 1}
    make(disk, memory_bytes_max=str(2 * BYTES_MIN), memory_when_full="refuse")
    disk.put(TOPIC, 0, b"more")


def test_all_topics_together_have_a_bound_too() -> None:
    disk = opened()
    make(disk, "other")
    disk.store.memory.bytes_max = BYTES_MIN
    fill(disk, 49)
    with pytest.raises(Busy, match="memory_topics_bytes_max"):
        disk.put("other", 0, bytes(1_000))
    disk.put("other", 0, b"small")
    disk.put("other", 0, bytes(500))  # its own make room for it
    assert disk.store.memory.dropped == {"other": 1}
    assert disk.store.min_offset(TOPIC, 0) == 0  # nobody else's are dropped


# ------------------------------------------------------------------------------------------- starts


@pytest.mark.parametrize("crash", [False, True])
def test_after_a_start_offsets_go_on_above_all_that_were_given_away(crash: bool) -> None:
    disk = opened()
    fill(disk, 10)
    if crash:
        disk.crash(KeepNothing())
        store = disk.open()
    else:
        store = disk.reopen()
    low = store.min_offset(TOPIC, 0)
    assert low == store.max_offset(TOPIC, 0) > 5
    assert disk.put(TOPIC, 0, b"new").queue_offset == low
    # Who was at an offset of before goes on with what is new, and is not sent away.
    for offset in (0, 3, 5, low):
        assert bodies(disk, offset) == [b"new"]
    result = disk.read(TOPIC, 1, 5)
    assert (result.status, result.next_offset) == (
        ReadStatus.OFFSET_OVERFLOW_ONE,
        store.max_offset(TOPIC, 1),
    )


def test_no_offset_is_seen_before_it_is_written_down() -> None:
    disk = Disk(Steps())
    disk.open()
    make(disk)
    disk.background.run_all()  # type: ignore[attr-defined]
    outcome: list[SluiceError | None] = []
    disk.store.stage(Message(TOPIC, 0, b"x"), outcome.append)
    disk.store.write_staged()
    assert (outcome, disk.store.max_offset(TOPIC, 0)) == ([], 0)
    disk.background.run_all()  # type: ignore[attr-defined]
    assert (outcome, disk.store.max_offset(TOPIC, 0)) == ([None], 1)
    # The next ones need no disk, up to the end of the block.
    disk.store.stage(Message(TOPIC, 0, b"x"), outcome.append)
    disk.store.write_staged()
    assert (outcome, disk.store.max_offset(TOPIC, 0)) == ([None, None], 2)


def test_blocks_are_asked_for_before_they_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sluice.storage.memory_topics.BLOCK_OFFSETS", 8)
    disk = Disk(Steps())
    disk.open()
    make(disk)
    outcome: list[SluiceError | None] = []
    for number in range(100):
        disk.store.stage(Message(TOPIC, 0, b"%d" % number), outcome.append)
        disk.store.write_staged()
        if number % 30 == 0:
            disk.background.run_all()  # type: ignore[attr-defined]
    while len(outcome) < 100:
        disk.store.tick()
        disk.background.run_all()  # type: ignore[attr-defined]
    assert outcome == [None] * 100
    disk.crash(KeepNothing())
    disk.open()
    assert disk.store.min_offset(TOPIC, 0) >= 100


def test_offsets_that_cannot_be_written_down_are_not_given_away() -> None:
    disk = opened()
    disk.files.fail("pwritev", error=errno.ENOSPC)
    outcome: list[SluiceError | None] = []
    disk.store.stage_batch([Message(TOPIC, 0, b"x"), Message(TOPIC, 0, b"y")], outcome.append)
    disk.store.write_staged()
    assert [type(error).__name__ for error in outcome] == ["DiskFull"]
    assert (disk.store.max_offset(TOPIC, 0), disk.store.memory.byte_count) == (0, 0)
    assert disk.put(TOPIC, 0, b"z").queue_offset == 0
    assert bodies(disk) == [b"z"]


def test_one_write_is_enough_for_a_block() -> None:
    disk = opened()
    fill(disk, 2)
    writes = disk.files.calls["pwritev"]
    fill(disk, 1_000)
    assert disk.files.calls["pwritev"] == writes
    assert BLOCK_OFFSETS > 1_000


# ----------------------------------------------------------------------------------------- deleting


@pytest.mark.parametrize("restart", [False, True])
def test_a_deleted_topic_is_gone_and_one_of_its_name_begins_anew(restart: bool) -> None:
    disk = opened()
    fill(disk, 4)
    disk.store.delete_topic(TOPIC)
    disk.store.write_staged()
    assert disk.store.memory.byte_count == 0
    assert disk.read(TOPIC, 0, 0).status is ReadStatus.NO_MATCHED_LOGIC_QUEUE
    if restart:
        disk.reopen()
    make(disk)
    assert disk.put(TOPIC, 0, b"new").queue_offset == 0
    assert bodies(disk) == [b"new"]
    disk.crash(KeepNothing())
    disk.open()
    assert disk.store.min_offset(TOPIC, 0) > 0


def test_a_topic_of_the_log_may_take_the_name() -> None:
    disk = opened()
    fill(disk, 4)
    disk.store.delete_topic(TOPIC)
    disk.store.change([(TOPIC_TABLE, TOPIC, {"attributes": {}})])
    disk.store.write_staged()
    placed = disk.put(TOPIC, 0, b"kept")
    assert (placed.queue_offset, placed.position < MEMORY_FLOOR) == (0, True)
    disk.reopen()
    assert bodies(disk) == [b"kept"]


def test_a_deletion_that_fails_changes_nothing() -> None:
    disk = opened()
    fill(disk, 4)
    disk.files.fail("pwritev", error=errno.ENOSPC)
    outcome: list[SluiceError | None] = []
    disk.store.delete_topic(TOPIC, outcome.append)
    disk.store.write_staged()
    assert outcome != [None]
    assert len(bodies(disk)) == 2
    assert disk.put(TOPIC, 0, b"more").queue_offset == 2
    assert disk.store.memory.byte_count > 4 * 1_000
