"""Crashes around the transactions and offsets of Kafka's clients: all of a transaction, or nothing.

A workload runs on a simulated disk, and before each operation that changes the disk the power goes:
every such disk is opened again and compared with what producers and consumers were told.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from random import Random

import pytest

from sluice.storage.memory_files import KeepAll, KeepNothing, KeepPolicy, KeepPrefix, KeepRandom
from tests.crash.crash_points import watch
from tests.unit.broker.kafka_kit import KafkaBroker
from tests.unit.broker.test_kafka_group_api import commit, fetch
from tests.unit.broker.test_kafka_transactions import NAME, Producer

PARTITIONS = (0, 1)


@dataclass
class Told:
    """What was asked for, and what was told to be done."""

    asked: dict[int, bool | None] = field(default_factory=dict)  # transaction -> commit?
    ended: set[int] = field(default_factory=set)
    offsets: list[int] = field(default_factory=list)  # of the plain group, in their order
    offset_told: int = -1

    def copy(self) -> Told:
        return Told(dict(self.asked), set(self.ended), list(self.offsets), self.offset_told)


def seen(broker: KafkaBroker) -> set[int]:
    """The transactions that readers see: each of them whole, and once."""
    by_partition = []
    for partition in PARTITIONS:
        values = Counter(int(value) for value in broker.committed(partition))
        assert not values or max(values.values()) == 1, "a record is there twice"
        by_partition.append(set(values))
    assert by_partition[0] == by_partition[1], "half a transaction is seen"
    return by_partition[0]


def check(broker: KafkaBroker, told: Told) -> None:
    """What a start has found is what clients were told; then work goes on."""
    found = seen(broker)
    for number, is_commit in told.asked.items():
        if number in told.ended:
            assert (number in found) == is_commit
        elif not is_commit:
            assert number not in found, "what nobody committed is seen"
    line = fetch(broker, 7).topics[0].partitions[0]
    # Offsets of a transaction count exactly if its records do.
    assert line.committed_offset == max(found, default=-1)
    plain = fetch(broker, 7, group="plain").topics[0].partitions[1].committed_offset
    assert plain in {told.offset_told, *told.offsets[told.offsets.index(told.offset_told) + 1 :]}
    # The producer comes back; whatever it had open is rolled back, and it goes on.
    producer = Producer(broker)
    assert producer.init() == 0
    assert seen(broker) == found
    line = fetch(broker, 7, stable=True).topics[0].partitions[0]
    assert (line.error_code, line.committed_offset) == (0, max(found, default=-1))
    for partition in PARTITIONS:
        assert producer.send(b"1000", partition) == 0
    assert producer.end(commit=True) == 0
    assert seen(broker) == {*found, 1000}


class Workload:
    """A producer and a consumer at work, and a power cut before each operation on the disk."""

    def __init__(
        self, policies: Callable[[KafkaBroker, Random], Iterator[KeepPolicy]], *, newer: bool
    ) -> None:
        self.told = Told(offsets=[-1])
        self.states = 0
        self.failures: list[Exception] = []
        self._policies = policies
        self._random = Random(11)
        self.broker = KafkaBroker(flush="sync")
        self.broker.topic()
        self.producer = Producer(self.broker, newer=newer)
        assert self.producer.init() == 0
        watch(self.broker.files, self.visit)

    def visit(self) -> None:
        told = self.told.copy()
        if self._random.random() < 0.5:
            return
        for policy in self._policies(self.broker, self._random):
            self.states += 1
            try:
                disk = self.broker.files.crash(policy)
                later = KafkaBroker(disk, self.broker.now_ms, flush="sync")
                if self.states % 4 == 0:
                    later.crash(KeepNothing())  # once more, right after the start
                check(later, told)
            except Exception as error:
                # Raised here it would be a fault of the disk, which the store reports.
                self.failures.append(error)

    def done(self) -> None:
        """No power cut broke a promise."""
        if self.failures:
            raise self.failures[0]

    def transact(self, number: int, *, is_commit: bool) -> None:
        self.told.asked[number] = None
        for partition in PARTITIONS:
            assert self.producer.send(b"%d" % number, partition) == 0
        assert self.producer.commit_offset(number) == 0
        self.told.asked[number] = is_commit
        assert self.producer.end(commit=is_commit) == 0
        self.told.ended.add(number)
        self.done()

    def commit(self, offset: int) -> None:
        self.told.offsets.append(offset)
        assert commit(self.broker, group="plain", partition=1, offset=offset) == 0
        self.told.offset_told = offset
        self.done()


def cuts(broker: KafkaBroker, random: Random) -> Iterator[KeepPolicy]:
    room = broker.files.unsynced_bytes()
    yield random.choice([KeepNothing(), KeepAll()]) if room else KeepAll()
    if room:
        yield KeepPrefix(random.randrange(room + 1))
        yield KeepRandom(Random(random.getrandbits(64)))


@pytest.mark.parametrize("newer", [False, True], ids=["TV1", "TV2"])
def test_power_cuts_while_transactions_begin_and_end(*, newer: bool) -> None:
    work = Workload(cuts, newer=newer)
    work.commit(7)
    work.transact(0, is_commit=True)
    work.transact(1, is_commit=False)
    work.commit(8)
    work.transact(2, is_commit=True)
    work.broker.core.store.housekeeping.checkpoint()
    work.broker.tick(100)
    work.transact(3, is_commit=True)
    assert work.states > 30
    assert seen(work.broker) == {0, 2, 3}


def test_power_cuts_while_time_is_over() -> None:
    work = Workload(cuts, newer=False)
    work.transact(0, is_commit=True)
    work.told.asked[1] = False
    for partition in PARTITIONS:
        assert work.producer.send(b"1", partition) == 0
    assert work.producer.commit_offset(1) == 0
    work.broker.pass_ms(70_000)
    assert seen(work.broker) == {0}
    found = work.broker.core.kafka_transactions.get(NAME)
    assert found is not None
    assert found.phase == "CompleteAbort"
    assert work.states > 5
    work.done()


@pytest.mark.parametrize("cut", range(12))
def test_every_cut_of_an_end(cut: int) -> None:
    """The disk writes an end in order and stops at any byte."""
    broker = KafkaBroker(flush="sync")
    broker.topic()
    producer = Producer(broker)
    producer.init()
    for partition in PARTITIONS:
        producer.send(b"0", partition)
    producer.commit_offset(0)
    states: list[KafkaBroker] = []

    def visit() -> None:
        room = broker.files.unsynced_bytes()
        keep = KeepPrefix(room * cut // 11)
        states.append(KafkaBroker(broker.files.crash(keep), broker.now_ms, flush="sync"))

    watch(broker.files, visit)
    assert producer.end(commit=True) == 0
    for later in states:
        check(later, Told({0: True}, set(), [-1], -1))


def test_a_full_disk_during_an_end() -> None:
    """What is prepared waits until there is room, and ends then."""
    broker = KafkaBroker(flush="sync")
    broker.topic()
    producer = Producer(broker)
    producer.init()
    for partition in PARTITIONS:
        producer.send(b"0", partition)
    producer.commit_offset(0)
    broker.files.fail("pwritev", error=28)
    assert producer.end(commit=True) != 0
    assert seen(broker) == set()
    broker.files.clear_faults()
    broker.tick(1_000)
    assert seen(broker) == {0}
    assert producer.end(commit=True) == 0  # asked once more
    broker.crash(KeepNothing())
    assert seen(broker) == {0}
