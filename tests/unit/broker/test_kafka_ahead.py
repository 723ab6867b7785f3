"""This module tests what is looked for before a consumer asks for it: it is what the consumer would
find itself, whatever has happened in between, and it is neither much nor kept for long.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest

from sluice.broker import kafka_ahead
from sluice.broker.kafka_ahead import KEPT_NS, AheadReader
from sluice.broker.kafka_slices import SliceReader, Slices
from sluice.errors import StoreCorrupt
from sluice.storage.background import Steps
from sluice.storage.memory_files import MemoryFiles
from sluice.storage.queue_index import Older
from sluice.storage.store import ColdRead
from tests.unit.broker.kafka_door_kit import batch, fetched, kafka_rig
from tests.unit.broker.kafka_kit import TOPIC
from tests.unit.broker.test_kafka_slices import MANY, Shelf, joined
from tests.unit.loops import run_once, until

LIMIT = 5_000


class Reading(Shelf):
    """A shelf, a reader that looks ahead, and the turns in which it does."""

    def __init__(self, count: int = 150, **changes: Any) -> None:
        super().__init__(count, **changes)
        self.now_ns = 0
        self.later: deque[Callable[[], None]] = deque()
        self.soon: deque[Callable[[], None]] = deque()
        self.reader = AheadReader(
            self.core.store, self.later.append, self.soon.append, lambda: self.now_ns
        )

    def read(
        self, offset: int, bytes_max: int = LIMIT, stop: int | None = None, partition: int = 0
    ) -> Slices:
        stop = self.high(partition) if stop is None else stop
        found = self.reader.read(self.queue(partition), offset, stop, bytes_max)
        assert found is not None
        return found

    def plain(
        self, offset: int, bytes_max: int = LIMIT, stop: int | None = None, partition: int = 0
    ) -> Slices | None:
        """What a reader finds that knows nothing yet."""
        stop = self.high(partition) if stop is None else stop
        fresh = SliceReader(self.core.store, lambda: self.now_ns)
        return fresh.read(self.queue(partition), offset, stop, bytes_max)

    def turns(self) -> int:
        """Have all turns that were asked for; how many."""
        count = 0
        while self.later or self.soon:
            (self.soon or self.later).popleft()()
            count += 1
        return count

    def prepared(self) -> int:
        """Read, and have the next read looked for; its offset."""
        offset = self.read(0).next_offset
        self.turns()
        assert (self.queue(), offset) in self.reader._ahead
        return offset


def same(found: Slices | None, expected: Slices | None) -> None:
    assert found is not None
    assert expected is not None
    assert joined(found.slices) == joined(expected.slices)
    assert found[1:3] == expected[1:3]


@pytest.mark.parametrize("limit", [1, 2_000, 9_000, 20_000])
def test_what_was_looked_for_is_what_a_read_finds(limit: int) -> None:
    reading, chance = Reading(), random.Random(5)
    offsets = [0, 0]
    full_reads = appended = 0
    while any(offset < reading.high(part) for part, offset in enumerate(offsets)):
        for partition in (0, 1):
            offset = offsets[partition]
            if offset < reading.high(partition):
                found = reading.read(offset, limit, partition=partition)
                same(found, reading.plain(offset, limit, partition=partition))
                full_reads += offset > 0 and found.has_more
                offsets[partition] = found.next_offset
        reading.turns()
        if appended < 5:  # what comes meanwhile changes nothing of it
            appended += 1
            reading.produce(-1, -1, -1, bytes(400), partition=chance.randrange(2))
    assert full_reads >= 2
    assert reading.reader.taken_count == full_reads
    assert reading.reader.kept_count == 0


@pytest.mark.parametrize("is_plain", [True, False])
def test_partitions_are_looked_for_together_or_one_in_each_turn_and_none_at_once(
    monkeypatch: pytest.MonkeyPatch, is_plain: bool
) -> None:
    reading = Reading()
    if not is_plain:
        monkeypatch.setattr(reading.reader, "read_together", lambda _: {})
    for partition in (0, 1):
        reading.read(0, partition=partition)
    assert (len(reading.later), len(reading.soon), reading.reader.kept_count) == (1, 0, 0)
    reading.later.popleft()()
    if is_plain:
        assert (len(reading.later), len(reading.soon), reading.reader.kept_count) == (0, 0, 2)
        return
    for kept_count in (0, 1):
        seen = len(reading.later), len(reading.soon), reading.reader.kept_count
        assert seen == (0, 1, kept_count)
        reading.soon.popleft()()
    assert (len(reading.later), len(reading.soon), reading.reader.kept_count) == (0, 0, 2)


def test_who_comes_before_it_was_looked_for_finds_it_himself_and_it_is_not_looked_for() -> None:
    reading = Reading()
    second = reading.read(0).next_offset
    third = reading.read(second).next_offset
    assert reading.turns() == 1
    assert reading.reader.kept_count == 1
    reading.read(third)
    assert reading.reader.taken_count == 1


class Line:
    """Who is sent what was read."""

    unsent_bytes = 100_000


def test_nothing_is_looked_for_while_the_answer_is_being_sent() -> None:
    reading, line = Reading(), Line()
    reading.reader.asked_by = line
    offset = reading.read(0).next_offset
    for _ in range(3):
        reading.later.popleft()()
        assert (len(reading.later), len(reading.soon), reading.reader.kept_count) == (1, 0, 0)
    line.unsent_bytes = 0
    assert reading.turns() == 1
    same(reading.read(offset), reading.plain(offset))
    assert reading.reader.taken_count == 1


def test_who_asks_before_its_answer_was_sent_is_not_looked_for_again() -> None:
    reading = Reading()
    reading.reader.asked_by = Line()
    second = reading.read(0).next_offset
    third = reading.read(second).next_offset
    reading.later.popleft()()
    assert list(reading.reader._wishes) == [(reading.queue(), third)]


def test_a_reader_at_the_end_of_a_queue_costs_nothing() -> None:
    reading = Reading()
    found = reading.read(0, MANY)
    assert found.next_offset == reading.high()
    assert reading.turns() == 0
    reading.queue().go_on_at(
        reading.high() + 5
    )  # offsets that were given away, of which none is left
    assert reading.read(0, MANY).next_offset == reading.high() - 5
    assert reading.turns() == 0


def test_a_reader_of_committed_records_is_not_looked_ahead_for_where_they_end() -> None:
    reading = Reading()
    end = reading.read(0).next_offset
    reading.turns()
    reading.reader = AheadReader(reading.core.store, reading.later.append, reading.soon.append)
    assert reading.read(0, stop=end).has_more
    assert reading.turns() == 0


def test_what_reaches_the_end_is_not_kept() -> None:
    """More of it may come until it is asked for."""
    reading = Reading()
    most_bytes = reading.read(0, MANY).byte_count * 3 // 4
    offset = reading.read(0, most_bytes).next_offset
    assert offset < reading.high()
    assert reading.turns() == 2
    assert reading.reader.kept_count == 0
    reading.produce(-1, -1, -1, b"later")
    assert reading.read(offset, most_bytes).next_offset == reading.high()


# ------------------------------------------------------------------------------ what makes it void


@pytest.mark.parametrize("limit", [LIMIT - 2_000, LIMIT + 4_000])
def test_a_read_with_another_limit_finds_its_own(limit: int) -> None:
    reading = Reading()
    offset = reading.prepared()
    same(reading.read(offset, limit), reading.plain(offset, limit))
    assert reading.reader.taken_count == 0


def test_what_was_looked_for_is_cut_by_no_stop_and_left_where_there_is_one() -> None:
    """A transaction may have begun in the middle of it."""
    reading = Reading()
    offset = reading.prepared()
    expected = reading.plain(offset)
    assert expected is not None
    stop = expected.next_offset - 1
    same(reading.read(offset, stop=stop), reading.plain(offset, stop=stop))
    assert reading.reader.taken_count == 0
    offset = reading.prepared()
    same(reading.read(offset, stop=expected.next_offset), expected)
    assert reading.reader.taken_count == 1


def test_what_retention_took_from_the_queue_is_not_answered() -> None:
    reading = Reading()
    offset, queue = reading.prepared(), reading.queue()
    queue.drop_before(queue.count - 2, reading.high() - 1)
    assert reading.reader.read(queue, offset, reading.high(), LIMIT) is not None
    assert reading.reader.taken_count == 0


def test_what_retention_took_from_the_log_is_not_answered() -> None:
    reading = Reading()
    offset = reading.prepared()
    reading.core.store.log.segments.pop(0)
    queue = reading.queue()
    assert reading.reader.read(queue, offset, reading.high(), LIMIT) is None
    assert reading.reader.taken_count == 0


def test_what_compaction_has_taken_over_is_left_to_it() -> None:
    reading = Reading()
    offset, queue = reading.prepared(), reading.queue()
    queue.older = Older(reading.queue(1), offset + 1, 0, 0)
    assert reading.reader.read(queue, offset, reading.high(), LIMIT) is None
    queue.older = None
    offset = reading.prepared()
    queue.older = Older(reading.queue(1), offset, 0, 0)
    assert reading.reader.read(queue, offset, reading.high(), LIMIT) is not None
    assert reading.reader.taken_count == 1


def test_a_topic_of_the_same_name_has_nothing_of_the_one_before() -> None:
    reading = Reading()
    offset = reading.prepared()
    reading.core.topics.delete(reading.found.stored)
    reading.core.ask_turn()
    reading.settle()
    assert reading.core.kafka_topics.find(TOPIC) is None
    for number in range(60):
        reading.produce(-1, -1, -1, b"of the new one %d" % number, bytes(400))
    found = reading.read(offset, LIMIT)
    same(found, reading.plain(offset))
    assert b"of the new one" in joined(found.slices)
    assert reading.reader.taken_count == 0


def test_nothing_is_looked_for_in_a_queue_that_is_gone() -> None:
    reading = Reading()
    reading.read(0)
    reading.core.topics.delete(reading.found.stored)
    reading.core.ask_turn()
    reading.settle()
    assert reading.turns() == 1
    assert reading.reader.kept_count == 0


def test_what_is_not_in_memory_any_more_is_left_to_the_general_way() -> None:
    reading = Reading()
    store = reading.core.store
    store.reader.hot_bytes = 0
    store.reader._opened_at = store.log.written
    offset = reading.prepared()
    reading.now_ns = KEPT_NS - 1  # what was seen to be in memory counts no longer
    same(reading.read(offset), reading.plain(offset))
    assert reading.reader.taken_count == 1
    offset = reading.prepared()
    reading.files.cold(reading.log_path(), reading.place(offset), store.log.written)
    reading.now_ns += KEPT_NS - 1
    assert reading.reader.read(reading.queue(), offset, reading.high(), LIMIT) is None
    assert reading.reader.taken_count == 1


def test_what_lies_far_apart_is_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """To ask whether all between its ends is in memory would take longer than to look for it."""
    reading = Reading()
    store = reading.core.store
    store.reader.hot_bytes = 0
    store.reader._opened_at = store.log.written
    offset = reading.prepared()
    monkeypatch.setattr("sluice.broker.kafka_slices._STRETCHES_MAX", 0)
    same(reading.read(offset), reading.plain(offset))
    assert reading.reader.taken_count == 0


@pytest.mark.parametrize(
    "error", [ColdRead(lambda: None), StoreCorrupt("a file", 0, "broken"), RuntimeError("a fault")]
)
def test_what_cannot_be_looked_for_now_is_left_to_who_asks(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    reading = Reading()
    offsets = [reading.read(0, partition=partition).next_offset for partition in (0, 1)]

    def fail(*_: Any) -> None:
        raise error

    with monkeypatch.context() as patched:
        patched.setattr(SliceReader, "read", fail)
        patched.setattr(SliceReader, "_units", fail)
        assert reading.turns() == 3
    assert reading.reader.kept_count == 0
    for partition in (0, 1):
        found = reading.read(offsets[partition], partition=partition)
        same(found, reading.plain(offsets[partition], partition=partition))


class Worn(Reading):
    """Nothing of the log is known to be in memory, some of it is not, and threads are steps."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.steps = Steps()
        store = self.core.store
        store.reader.hot_bytes = 0
        store.reader._opened_at = store.log.written
        monkeypatch.setattr(store, "background", self.steps)
        monkeypatch.setattr("sluice.storage.mends.PIECE_BYTES", 1024)

    def lose(self, offset: int, byte_count: int) -> None:
        place = self.place(offset)
        self.files.cold(self.log_path(), place, place + byte_count)


def test_few_pages_that_are_missing_are_brought_back_while_the_consumer_works(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reading = Worn(monkeypatch)
    offset = reading.read(0).next_offset
    reading.now_ns += KEPT_NS
    reading.lose(offset, 100)
    warm_calls = reading.files.warm_calls
    assert reading.turns() == 2
    assert reading.reader.kept_count == 0
    reading.steps.run_all()
    assert reading.files.warm_calls - warm_calls <= 2, "only what is missing is read"
    assert reading.turns() == 1
    same(reading.read(offset), reading.plain(offset))
    assert reading.reader.taken_count == 1


def test_who_comes_before_they_are_there_is_not_looked_for_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reading = Worn(monkeypatch)
    offset = reading.read(0).next_offset
    reading.now_ns += KEPT_NS
    reading.lose(offset, 100)
    reading.turns()
    assert reading.reader.read(reading.queue(), offset, reading.high(), LIMIT) is None
    assert sum(map(len, reading.steps.waiting.values())) == 1, "once for all who ask"
    reading.steps.run_all()
    assert reading.turns() == 0
    same(reading.read(offset), reading.plain(offset))


def test_where_much_is_missing_it_is_left_to_who_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    reading = Worn(monkeypatch)
    offset = reading.read(0).next_offset
    reading.now_ns += KEPT_NS
    reading.lose(offset, reading.core.store.log.written // 2)
    warm_calls = reading.files.warm_calls
    for _ in range(3):
        reading.turns()
        reading.steps.run_all()
    assert reading.files.warm_calls == warm_calls
    assert reading.reader.kept_count == 0
    assert reading.reader.read(reading.queue(), offset, reading.high(), LIMIT) is None
    assert not any(reading.steps.waiting.values()), "it is not tried again and again"
    reading.now_ns += 2 * KEPT_NS
    assert reading.reader.read(reading.queue(), offset, reading.high(), LIMIT) is None
    assert any(reading.steps.waiting.values())


def test_nothing_is_mended_in_a_store_that_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    reading = Worn(monkeypatch)
    offset = reading.read(0).next_offset
    reading.now_ns += KEPT_NS
    reading.lose(offset, 100)
    monkeypatch.setattr(reading.core.store, "closed", True)
    reading.turns()
    assert not any(reading.steps.waiting.values())


# ------------------------------------------------------------------------------------------ limits


def test_what_nobody_comes_for_is_forgotten() -> None:
    reading = Reading()
    offset = reading.prepared()
    reading.now_ns = KEPT_NS - 1
    reading.reader.tick(0)
    assert reading.reader.kept_count == 1
    reading.now_ns = KEPT_NS
    same(reading.read(offset), reading.plain(offset))
    assert reading.reader.taken_count == 0
    assert reading.reader.kept_count == 0
    reading.turns()
    assert reading.reader.kept_count == 1
    reading.now_ns += KEPT_NS
    reading.reader.tick(0)
    assert reading.reader.kept_count == 0
    assert reading.reader._slice_count == 0


def test_only_so_much_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    reading = Reading()
    offset = reading.prepared()
    count = reading.reader._slice_count
    assert count == len(reading.read(offset).slices)
    reading = Reading()
    monkeypatch.setattr(kafka_ahead, "_SLICES_MAX", count)
    monkeypatch.setattr(kafka_ahead, "TOGETHER_MAX", 1)
    for partition in (0, 1):
        reading.read(0, partition=partition)
    assert reading.turns() == 2
    assert reading.reader.kept_count == 1
    assert not reading.reader._wishes
    reading.read(offset)
    assert reading.turns() == 1, "there is room again"
    assert reading.reader.kept_count == 1


def test_only_so_much_is_wished_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kafka_ahead, "_WISHES_MAX", 1)
    reading = Reading()
    for partition in (0, 1):
        reading.read(0, partition=partition)
    assert reading.turns() == 1
    assert reading.reader.kept_count == 1


# ---------------------------------------------------------------------------------- over the wire


def test_a_consumer_that_is_behind_is_answered_with_what_was_looked_for() -> None:
    async def work() -> None:
        async with kafka_rig(MemoryFiles()) as rig:
            client = await rig.connect()
            await client.create("t", 2)
            sent: dict[int, list[bytes]] = {0: [], 1: []}
            for number in range(40):
                data = batch(bytes([number]) * 3_000)
                sent[number % 2].append(data)
                await client.produce("t", data, partition=number % 2)
            (reader,) = (each for each in rig.broker.core.services if isinstance(each, AheadReader))
            offsets, got, session = {0: 0, 1: 0}, {0: b"", 1: b""}, (0, 0)
            for turn in range(5):
                wanted = fetched({"t": offsets}, part_bytes=4 * 3_500, session=session)
                answer = await client.ask(1, 12, wanted)
                session = (answer.session_id, turn + 1)
                for part in answer.responses[0].partitions:
                    got[part.partition_index] += part.records
                    offsets[part.partition_index] += 4
                if turn < 3:  # the last one is not known ahead: it ends where the queue does
                    await until(lambda: reader.kept_count == 2)
            assert reader.taken_count == 2 * 3
            for partition, batches in sent.items():
                # Its place is written into a batch: the first twelve bytes, and four behind them.
                assert len(got[partition]) == sum(map(len, batches))
                for number, data in enumerate(batches):
                    at = number * len(data)
                    assert got[partition][at + 16 : at + len(data)] == data[16:]

    run_once(work())
