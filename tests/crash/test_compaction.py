"""Crashes around compaction: readers find what was before it or what comes of it, nothing between.

A compacted topic is written, compacted, and its oldest files are deleted; before each operation
that changes the disk the power goes, and every such disk is opened again. Whatever is left, the
newest value of each key is what producers were told, and each reader gets through to the end.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from random import Random

import pytest

from sluice.storage.memory_files import KeepAll, KeepNothing, KeepPolicy, KeepPrefix, KeepRandom
from tests.crash.crash_points import watch
from tests.unit.broker.broker_kit import broker_config
from tests.unit.broker.compaction_kit import HOUR_MS, STORED, CompactingBroker

Value = tuple[int, bytes]
SHARE = 0.2
SMALL = replace(broker_config().store, segment_bytes=1 << 16, message_bytes_max=1 << 14)


class Workload:
    """A compacted topic at work, and a power cut before each operation on the disk."""

    def __init__(self, seed: int) -> None:
        self.states = 0
        self.failures: list[Exception] = []
        self.told: dict[bytes, Value] = {}  # key -> offset and value that are durable
        self.asked: dict[bytes, Value] = {}  # ... that may be there instead
        self._random = Random(seed)
        self._share = SHARE  # of all operations, those before which the power goes
        self.broker = CompactingBroker(flush="sync", store=SMALL)
        self.broker.make()
        watch(self.broker.files, self.visit)

    def visit(self) -> None:
        if self._random.random() > self._share:
            return
        told, asked = dict(self.told), dict(self.asked)
        for policy in self._policies():
            self.states += 1
            try:
                disk = self.broker.files.crash(policy)
                later = CompactingBroker(disk, now_ms=self.broker.now_ms, flush="sync", store=SMALL)
                if self.states % 5 == 0:
                    later.crash(KeepNothing())  # once more, right after the start
                check(later, told, asked)
                if self.states % 3 == 0:
                    later.compact(2)
                    check(later, told, asked)
            except Exception as error:
                # Raised here it would be a fault of the disk, which the store reports.
                self.failures.append(error)

    def _policies(self) -> Iterator[KeepPolicy]:
        room, random = self.broker.files.unsynced_bytes(), self._random
        yield random.choice([KeepNothing(), KeepAll()]) if room else KeepAll()
        if room:
            yield KeepPrefix(random.randrange(room + 1))
            yield KeepRandom(Random(random.getrandbits(64)))

    def put(self, *keys: bytes) -> None:
        """Append a batch with a new value for each of these keys."""
        base = self.broker.core.store.queues.get((STORED, 0))
        offset = 0 if base is None else base.next_offset
        values = {key: (offset + at, b"%b%d" % (key, offset)) for at, key in enumerate(keys)}
        self.asked = {**self.told, **values}
        self.broker.put(*((key, value) for key, (_, value) in values.items()))
        self.told = self.asked
        self.done()

    def done(self) -> None:
        """No power cut broke a promise."""
        if self.failures:
            raise self.failures[0]

    def compact(self) -> None:
        self.broker.compact(2)
        self.done()

    def expire(self) -> None:
        """The oldest files of the log go."""
        self._share = 0.02
        for _ in range(12):
            self.broker.produce(-1, -1, -1, b"x" * 12_000, topic="filler")
        self._share = SHARE
        core = self.broker.core
        core.store.housekeeping.checkpoint()
        self.broker.now_ms += 100 * HOUR_MS
        start = core.store.log.start
        while core.store.log.start == start:
            core.store.housekeeping.delete_expired()
            self.compact()
        self.done()


def check(broker: CompactingBroker, told: dict[bytes, Value], asked: dict[bytes, Value]) -> None:
    """Each key has the value that somebody was told of, or the one that was on its way."""
    if broker.core.kafka_topics.find("orders.new") is None:
        assert not told
        return
    newest: dict[bytes, Value] = {}
    seen = broker.newest()
    for offset, key, value in seen:
        assert key is not None
        assert value is not None
        newest[key] = (offset, value)
    assert newest in (told, asked)
    assert [each[0] for each in seen] == sorted({each[0] for each in seen})
    assert [at for at, _ in broker.pull()] == [each[0] for each in seen]
    assert broker.core.store.min_offset(STORED, 0) == 0


@pytest.mark.parametrize(
    "seed", [1, *(pytest.param(seed, marks=pytest.mark.soak) for seed in range(2, 20))]
)
def test_power_cuts_while_a_topic_is_compacted(seed: int) -> None:
    work = Workload(seed)
    work.put(b"a", b"b")
    work.put(b"b", b"c")
    work.put(b"a")
    work.compact()
    assert [each[0] for each in work.broker.newest()] == [0, 2, 3, 4]
    work.put(b"c")
    work.put(b"d")
    work.compact()
    work.expire()
    work.put(b"a", b"d")
    work.put(b"e")
    work.compact()
    work.expire()
    assert work.states > 50
    check(work.broker, work.told, work.told)
