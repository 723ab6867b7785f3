"""Crashes around staged writes: a batch is visible whole or not at all, and never twice.

A job writes batches on a simulated disk. Before each operation that changes the disk the power
goes: every such disk is opened again and compared with what the job was told, then the job replays
the batch that it is at, as Spark does, with other tries of its tasks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from random import Random

import pytest

from sluice.broker import staged_writes
from sluice.broker.staged_entries import Handle
from sluice.errors import IllegalOperation
from sluice.storage import images
from sluice.storage.memory_files import KeepAll, KeepNothing, KeepPolicy, KeepPrefix, KeepRandom
from tests.crash.crash_points import watch
from tests.unit.broker.staged_kit import publish, stage
from tests.unit.broker.transaction_kit import Broker

SEGMENT_BYTES = 8192


def rows_of(batch: int) -> list[list[bytes]]:
    """What each of the two tasks of a batch writes."""
    return [[b"%d/%d/%d" % (batch, task, n) + b"." * 40 for n in range(6)] for task in range(2)]


class Job:
    """Writes batches one after the other, and is told about each."""

    def __init__(self, flush: str, as_images: bool) -> None:
        self._flush = flush
        self._images = as_images
        self._random = Random(11)
        self.states = 0
        self.asked = -1  # the newest batch that was to be published
        self.told = -1  # the newest batch that the job knows to be published
        self.broker = Broker(flush=flush, segment_bytes=SEGMENT_BYTES)
        watch(self.broker.disk, self.visit)

    def write(self, batch: int) -> None:
        broker = self.broker
        self._stage(broker, [b"of a task that failed"], 3, batch)
        handles = [self._stage(broker, rows, n, batch) for n, rows in enumerate(rows_of(batch))]
        self.asked = batch
        assert publish(broker, handles, batch)
        self.told = batch

    def _stage(self, broker: Broker, rows: list[bytes], queue: int, batch: int) -> Handle:
        return stage(broker, rows, queue, batch, images=self._images)

    # -------------------------------------------------------------------------------------- crashes

    def visit(self) -> None:
        for policy in self._cuts():
            self.states += 1
            disk = self.broker.disk.crash(policy)
            later = Broker(
                files=disk,
                now_ms=self.broker.now_ms,
                flush=self._flush,
                segment_bytes=SEGMENT_BYTES,
            )
            if self.states % 7 == 0:
                later.crash(KeepNothing())
            later.tick(100)
            self.check(later)

    def _cuts(self) -> Iterator[KeepPolicy]:
        yield KeepNothing()
        yield KeepAll()
        room = self.broker.disk.unsynced_bytes()
        if room:
            yield KeepPrefix(self._random.randrange(room + 1))
            yield KeepRandom(Random(self._random.getrandbits(64)))

    def check(self, broker: Broker) -> None:
        found = Counter(broker.bodies())
        assert not found or max(found.values()) == 1, "a message is there twice"
        for batch in range(self.asked + 2):
            wanted = [row for rows in rows_of(batch) for row in rows]
            there = sum(row in found for row in wanted)
            if batch <= self.told:
                assert there == len(wanted), f"batch {batch} was published and is not there"
            elif batch > self.asked:
                assert there == 0, f"batch {batch} is visible and nobody published it"
            else:
                assert there in (0, len(wanted)), f"half of batch {batch} is visible"
        # The job starts again at the batch that it does not know to be done.
        again = self.told + 1
        handles = [self._stage(broker, rows, n, again) for n, rows in enumerate(rows_of(again))]
        publish(broker, handles, again)
        assert Counter(broker.bodies()) == Counter(
            row for batch in range(again + 1) for rows in rows_of(batch) for row in rows
        )


def write_batches(flush: str, count: int, *, as_images: bool) -> int:
    job = Job(flush, as_images)
    for batch in range(count):
        job.write(batch)
        job.broker.tick()
    return job.states


def write_plainly(monkeypatch: pytest.MonkeyPatch, messages_a_turn: int) -> None:
    """So many messages at once; 0: a staged entry is written whole, images in small blocks."""
    monkeypatch.setattr(images, "_BLOCK_BYTES", 400)
    monkeypatch.setattr(images, "_EARLY_BYTES", 0)
    if messages_a_turn:
        monkeypatch.setattr(staged_writes, "_WHOLE_BYTES_MAX", 0)
        monkeypatch.setattr(staged_writes, "_TURN_MESSAGES_MAX", messages_a_turn)


@pytest.mark.parametrize(
    ("flush", "messages_a_turn", "as_images"),
    [
        *[("sync", 4, False), ("async", 0, False)],
        *[("sync", 0, True), ("async", 0, True), ("async", 4, True)],
    ],
)
def test_power_cuts_while_batches_are_staged_and_published(
    flush: str, messages_a_turn: int, as_images: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_plainly(monkeypatch, messages_a_turn)
    assert write_batches(flush, 2, as_images=as_images) > 25


@pytest.mark.soak
@pytest.mark.parametrize("flush", ["sync", "async"])
@pytest.mark.parametrize("messages_a_turn", [0, 1, 4, 4096])
@pytest.mark.parametrize("as_images", [False, True])
def test_many_power_cuts(
    flush: str, messages_a_turn: int, as_images: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_plainly(monkeypatch, messages_a_turn)
    assert write_batches(flush, 5, as_images=as_images) > 100


def test_a_handle_is_not_good_for_what_lies_in_the_place_of_a_lost_entry() -> None:
    broker = Broker(flush="async", segment_bytes=SEGMENT_BYTES)
    broker.core.store.housekeeping.checkpoint()
    lost = stage(broker, [b"lost"])
    broker.crash(KeepNothing())
    other = stage(broker, [b"here"])
    if other.position == lost.position:
        with pytest.raises(IllegalOperation):
            publish(broker, [lost])
    assert publish(broker, [other])
    assert broker.bodies() == [b"here"]


def test_retention_waits_for_what_is_decided(monkeypatch: pytest.MonkeyPatch) -> None:
    broker = Broker(flush="sync", segment_bytes=SEGMENT_BYTES)
    handle = stage(broker, [b"a"])
    for number in range(30):
        stage(broker, [b"x" * 900], batch=number)
    store = broker.core.store
    position = store.log.written - store.log.written % SEGMENT_BYTES
    assert broker.core.staged.is_clear(position), "what nobody published may go"
    store.housekeeping.checkpoint()
    store.housekeeping.delete_before(position)
    broker.tick()
    assert store.log.start == position
    with pytest.raises(IllegalOperation, match="gone"):
        publish(broker, [handle])
