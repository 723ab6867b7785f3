"""This module tests how a fetch finds its batches quickly: it finds what the general way finds, and
leaves to it whatever is not plain.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest

from sluice.broker import kafka_slices
from sluice.broker.kafka_partitions import KafkaTopic
from sluice.broker.kafka_reading import Read, read_batches
from sluice.broker.kafka_slices import RUN_UNITS_MIN, SliceReader, Slices
from sluice.errors import RecordDamaged
from sluice.model import Buffer, Message
from sluice.storage import page_cache
from sluice.storage.files import RealFiles
from sluice.storage.memory_files import MemoryFiles
from sluice.storage.queue_index import QueueIndex
from sluice.storage.store import ColdRead
from tests.unit.broker.broker_kit import broker_config
from tests.unit.broker.kafka_door_kit import batch, fetched, kafka_rig
from tests.unit.broker.kafka_kit import HOST, KafkaBroker
from tests.unit.loops import run_once, until

FAR = 1 << 60
MANY = 1 << 30


class Shelf(KafkaBroker):
    """A broker whose topic has batches of many sizes in two partitions, between each other."""

    def __init__(self, count: int = 150, **changes: Any) -> None:
        super().__init__(**changes)
        chance = random.Random(7)
        for _ in range(count):
            values = [bytes(chance.randrange(1, 900)) for _ in range(chance.randrange(1, 6))]
            self.produce(-1, -1, -1, *values, partition=chance.randrange(2))

    @property
    def found(self) -> KafkaTopic:
        return self.topic()

    def queue(self, partition: int = 0) -> QueueIndex:
        return self.core.store.queues[(self.found.stored, partition)]

    def high(self, partition: int = 0) -> int:
        return self.core.store.max_offset(self.found.stored, partition)

    def quick(
        self, reader: SliceReader, offset: int, stop: int = FAR, bytes_max: int = MANY
    ) -> Slices | None:
        return reader.read(self.queue(), offset, stop, bytes_max)

    def general(self, partition: int, offset: int, stop: int, bytes_max: int) -> Read:
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(SliceReader, "read", lambda *_: None)
            return read_batches(self.core, self.found, partition, offset, stop, bytes_max)

    def log_path(self) -> str:
        return self.core.store.log.path_of(0)[0]

    def place(self, offset: int) -> int:
        """Where in the log the entry of an offset begins."""
        queue, files = self.queue(), self.core.store.queue_files
        at = queue.seek(offset, files, wait=True)
        return queue.iterate(queue.units(at, at + 1, files, wait=True), at)[0][0]


def joined(slices: Any) -> bytes:
    return b"".join(slices)


def fitting(slices: Sequence[Buffer], bytes_max: int) -> Sequence[Buffer]:
    """As many batches as Kafka would give of these."""
    ends = accumulate(map(len, slices))
    return slices[: max(1, sum(end <= bytes_max for end in ends))]


def test_a_walk_finds_what_the_general_way_finds() -> None:
    shelf, chance = Shelf(), random.Random(11)
    reader = SliceReader(shelf.core.store)
    for _ in range(300):
        partition = chance.randrange(2)
        offset = chance.randrange(shelf.high(partition))
        stop = chance.choice((FAR, chance.randrange(offset + 1, shelf.high(partition) + 2)))
        bytes_max = chance.choice((1, 2_000, 9_000, MANY))
        found = reader.read(shelf.queue(partition), offset, stop, bytes_max)
        whole = shelf.general(partition, offset, stop, MANY)
        expected = fitting(whole.slices, bytes_max)
        assert found is not None
        assert joined(found.slices) == joined(expected)
        assert found.byte_count == len(joined(found.slices))
        if len(expected) == len(whole.slices) > 0:
            assert found.next_offset == whole.next_offset
        elif expected:
            behind = whole.slices[len(expected)]
            assert found.next_offset == int.from_bytes(behind[:8], "big")


@pytest.mark.parametrize("count", [2, RUN_UNITS_MIN - 1, RUN_UNITS_MIN, 60, 250])
@pytest.mark.parametrize("stretch_bytes", [0, 3_000])
def test_a_limit_counts_the_bytes_of_batches_as_kafka_does(
    monkeypatch: pytest.MonkeyPatch, count: int, stretch_bytes: int
) -> None:
    """Around each of them an entry has more bytes than these batches have themselves."""
    shelf = Shelf(0)
    for number in range(count):
        shelf.produce(-1, -1, -1, bytes(number % 3 * 2))
    store = shelf.core.store
    if stretch_bytes:  # only so much of the log is read at once
        monkeypatch.setattr(kafka_slices, "STRETCH_BYTES", stretch_bytes)
        store.reader.hot_bytes = 0
        store.reader._opened_at = store.log.written
    whole = shelf.quick(SliceReader(store), 0)
    assert whole is not None
    assert len(whole.slices) == count
    ends = list(accumulate(map(len, whole.slices)))
    assert ends[-1] < store.log.written / 2
    for fit in {1, 2, count // 2, min(96, count), count - 1, count}:
        for bytes_max, expected in (
            (ends[fit - 1], fit),
            (ends[fit - 1] - 1, max(1, fit - 1)),
            (ends[fit - 1] + len(whole.slices[0]) - 1, fit),
        ):
            found = shelf.quick(SliceReader(store), 0, bytes_max=bytes_max)
            assert found is not None
            assert len(found.slices) == expected
            assert found.slices == whole.slices[:expected]
            assert (found.byte_count, found.next_offset) == (ends[expected - 1], expected)
            assert found.has_more == (expected < count)


def test_a_limit_that_many_small_batches_fill_is_found_in_few_rounds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shelf = Shelf(0)
    for _ in range(250):
        shelf.produce(-1, -1, -1, b"")
    rounds: list[int] = []
    batches_at = kafka_slices.batches_at

    def counted(view: Any, units: Any, *words: Any) -> Any:
        rounds.append(len(units))
        return batches_at(view, units, *words)

    monkeypatch.setattr(kafka_slices, "batches_at", counted)
    reader = SliceReader(shelf.core.store)
    one = shelf.quick(reader, 0, bytes_max=1)
    assert one is not None
    found = shelf.quick(reader, 0, bytes_max=200 * one.byte_count + 1)
    assert found is not None
    assert len(found.slices) == 200
    assert len(rounds) == 1 + 3, "as many as there are looks for units"
    assert max(rounds) <= 96


@pytest.mark.parametrize("count", [3, 40])
def test_what_has_no_room_is_not_looked_at(count: int) -> None:
    """It may be on the disk, and the answer needs nothing of it."""
    shelf = Shelf(0)
    for _ in range(count):
        shelf.produce(-1, -1, -1, bytes(1_000))
    shelf.files.flip(shelf.log_path(), (shelf.place(2) + 104) * 8)  # its magic
    reader = SliceReader(shelf.core.store)
    one = shelf.quick(reader, 0, bytes_max=1)
    assert one is not None
    found = shelf.quick(reader, 0, bytes_max=3 * one.byte_count - 200)
    assert found is not None
    assert len(found.slices) == 2
    assert shelf.quick(reader, 0, bytes_max=3 * one.byte_count) is None


def test_a_reader_goes_on_where_it_ended_without_a_search(monkeypatch: pytest.MonkeyPatch) -> None:
    shelf = Shelf()
    reader, offset, pieces = SliceReader(shelf.core.store), 0, []
    whole = shelf.quick(reader, 0)
    assert whole is not None
    searches: list[int] = []
    seek = type(shelf.queue()).seek

    def counted(self: QueueIndex, offset: int, *words: Any, **named: Any) -> int:
        searches.append(offset)
        return seek(self, offset, *words, **named)

    monkeypatch.setattr(type(shelf.queue()), "seek", counted)
    while offset < shelf.high():
        part = shelf.quick(reader, offset, bytes_max=5_000)
        assert part is not None
        assert part.slices
        pieces += part.slices
        offset = part.next_offset
    assert joined(pieces) == joined(whole.slices)
    assert searches == [0]


def test_a_place_that_is_remembered_wrongly_is_searched_for() -> None:
    shelf = Shelf()
    reader = SliceReader(shelf.core.store)
    first = shelf.quick(reader, 0, bytes_max=5_000)
    assert first is not None
    right = shelf.quick(reader, first.next_offset, bytes_max=5_000)
    assert right is not None
    queue = shelf.queue()
    for wrong in (0, reader._places[(queue, first.next_offset)] + 1, queue.count, queue.count + 9):
        reader._places[(queue, first.next_offset)] = wrong
        found = shelf.quick(reader, first.next_offset, bytes_max=5_000)
        assert found is not None
        assert joined(found.slices) == joined(right.slices)


def test_only_so_many_places_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sluice.broker.kafka_slices._PLACES_MAX", 3)
    shelf = Shelf()
    reader, offset = SliceReader(shelf.core.store), 0
    for _ in range(9):
        found = shelf.quick(reader, offset, bytes_max=1)
        assert found is not None
        offset = found.next_offset
    assert len(reader._places) == 3
    assert (shelf.queue(), offset) in reader._places


def test_what_is_not_confirmed_is_not_seen() -> None:
    shelf = Shelf(20)
    end = shelf.core.store.confirmed
    reader = SliceReader(shelf.core.store)
    before = shelf.quick(reader, 0)
    shelf.produce(-1, -1, -1, b"later")
    after = shelf.quick(reader, 0)
    assert before is not None
    assert after is not None
    assert len(after.slices) == len(before.slices) + 1
    shelf.core.store._confirmed = end
    found = shelf.quick(reader, 0)
    assert found is not None
    assert joined(found.slices) == joined(before.slices)


def test_what_may_be_on_the_disk_is_left_to_the_general_way() -> None:
    shelf = Shelf()
    store = shelf.core.store
    store.reader.hot_bytes = 0
    store.reader._opened_at = store.log.written
    now_ns = 0
    reader = SliceReader(store, lambda: now_ns)
    whole = shelf.quick(reader, 0)
    assert whole is not None, "all of it is in memory, and the system says so"
    shelf.files.cold(shelf.log_path(), shelf.place(0), shelf.place(0) + 100)
    now_ns = 10**9
    assert shelf.quick(reader, 0) is None
    with pytest.raises(ColdRead) as cold:
        read_batches(shelf.core, shelf.found, 0, 0, FAR, MANY)
    cold.value.work()
    read = read_batches(shelf.core, shelf.found, 0, 0, FAR, MANY)
    assert joined(read.slices) == joined(whole.slices)


def test_a_consumer_gets_on_where_the_system_cannot_say_what_is_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page_cache, "NOWAIT", 0)
    monkeypatch.setattr(page_cache, "_cachestat", None)
    config = replace(broker_config().store, directory=str(tmp_path))
    shelf = Shelf(400, files=RealFiles(), flush="sync", store=config)
    store = shelf.core.store
    store.housekeeping.checkpoint()
    assert shelf.queue().tail_first, "older units are in files only"
    store.reader.hot_bytes = 0
    reader, offset = SliceReader(store), 0
    while offset < shelf.high():
        for _ in range(40):  # more than a search for an offset has places to look at
            try:
                read = read_batches(shelf.core, shelf.found, 0, offset, FAR, 20_000, reader)
            except ColdRead as cold:
                cold.work()
            else:
                break
        else:
            raise AssertionError("what was warmed is not taken")
        assert read.next_offset > offset
        offset = read.next_offset
    store.shut(lambda _: None)


def test_the_system_is_asked_once_for_all_partitions(monkeypatch: pytest.MonkeyPatch) -> None:
    shelf = Shelf()
    store = shelf.core.store
    store.reader.hot_bytes = 0
    store.reader._opened_at = store.log.written
    asked: list[tuple[int, int]] = []
    is_cached = store.log.is_cached

    def counted(start: int, stop: int) -> bool:
        asked.append((start, stop))
        return is_cached(start, stop)

    monkeypatch.setattr(store.log, "is_cached", counted)
    now_ns = 0
    reader = SliceReader(store, lambda: now_ns)
    for partition in (0, 1, 0, 1):
        assert reader.read(shelf.queue(partition), 0, FAR, MANY) is not None
    assert asked == [(0, store.log.written)]
    now_ns = 10**9
    assert reader.read(shelf.queue(0), 0, FAR, MANY) is not None
    assert len(asked) == 2, "what was seen does not count for ever"


@pytest.mark.parametrize("at", [0, 12, 20, 28, 36, 84, 88, 96, 104])
def test_an_entry_that_is_not_as_it_must_be_is_never_served(at: int) -> None:
    """Size, queue, offset, position, flags, body size; base offset, length and magic of a batch."""
    shelf = Shelf(20)
    reader = SliceReader(shelf.core.store)
    first = shelf.quick(reader, 0, bytes_max=1)
    assert first is not None
    width = {20: 8, 28: 8, 88: 8, 104: 1}.get(at, 4)
    bit = 7 if at == 36 else 0  # the flag that tells a batch; of others the lowest bit
    shelf.files.flip(shelf.log_path(), (shelf.place(first.next_offset) + at + width - 1) * 8 + bit)
    whole = shelf.quick(reader, 0)
    assert whole is None
    if at != 36:  # an entry that says to be a message is shown as one
        with pytest.raises(RecordDamaged):
            read_batches(shelf.core, shelf.found, 0, 0, FAR, MANY)


def test_what_this_process_neither_wrote_nor_scanned_is_checked_whole() -> None:
    shelf = Shelf(20)
    assert shelf.quick(SliceReader(shelf.core.store), 0) is not None
    shelf.core.store.reader._trusted_from = shelf.core.store.log.written
    assert shelf.quick(SliceReader(shelf.core.store), 0) is None
    shelf.files.flip(shelf.log_path(), (shelf.place(0) + 150) * 8)
    with pytest.raises(RecordDamaged):
        read_batches(shelf.core, shelf.found, 0, 0, FAR, MANY)


def test_messages_between_batches_are_shown_by_the_general_way() -> None:
    shelf = Shelf(10)
    shelf.core.append(Message(shelf.found.stored, 0, b"plain", b"", born_host=HOST))
    shelf.settle()
    shelf.produce(-1, -1, -1, b"behind it")
    assert shelf.quick(SliceReader(shelf.core.store), 0) is None
    read = read_batches(shelf.core, shelf.found, 0, 0, FAR, MANY)
    assert read.next_offset == shelf.high()
    assert b"plain" in joined(read.slices)


def test_slices_stay_when_their_file_is_deleted() -> None:
    shelf = Shelf()
    found = shelf.quick(SliceReader(shelf.core.store), 0)
    assert found is not None
    before = joined(found.slices)
    path = shelf.log_path()
    shelf.core.store.log.segments.pop(0)
    shelf.files.remove(path)
    assert joined(found.slices) == before
    assert shelf.quick(SliceReader(shelf.core.store), 0) is None


def test_answers_that_nobody_reads_stay_whole_and_in_order_when_their_file_goes() -> None:
    """A connection has slices of the log that are not sent yet; the file behind them is deleted."""
    files = MemoryFiles()

    async def work() -> None:
        async with kafka_rig(files) as rig:
            client, other = await rig.connect(), await rig.connect()
            await client.create("t", 2)
            for number in range(12):
                data = batch(bytes([number]) * 200_000)
                assert not (await client.produce("t", data, partition=number % 2)).error_code
            limits: dict[str, Any] = {"max_bytes": 16 << 20, "part_bytes": 16 << 20}
            expected = {
                part: (await other.ask(1, 12, fetched({"t": {part: 0}}, **limits)))
                for part in (0, 1)
            }
            asked = [
                (client.send(1, 12, fetched({"t": {part: 0}}, **limits)), part)
                for part in (0, 1) * 4
            ]
            listener = rig.broker._kafka_listener
            assert listener is not None
            served = 1 + 12 + len(asked)
            await until(
                lambda: any(
                    each.received_count == served and each.unsent_bytes
                    for each in listener.connections
                )
            )
            log = rig.broker.core.store.log
            gone = log.detach_before(log.written)
            assert gone, "a batch is longer than a fifth of a file"
            for path in gone:
                files.remove(path)
            for number, part in asked:
                assert await client.receive(1, 12) == (number, expected[part])

    run_once(work())
