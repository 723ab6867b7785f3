"""Anything that producers of both kinds write to a compacted topic, in any order with compactions,
crashes and deletions of the log's files: readers find the newest of each key, and nothing that was
rolled back.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from random import Random

import pytest

from sluice.protocol import kafka_batches
from sluice.storage.memory_files import KeepAll, KeepNothing
from tests.unit.broker.broker_kit import broker_config
from tests.unit.broker.compaction_kit import HOUR_MS, MINUTE_MS, STORED, CompactingBroker
from tests.unit.broker.test_compaction import marker

SMALL = replace(
    broker_config().store, segment_bytes=1 << 16, message_bytes_max=1 << 14, queue_file_units=16
)
KEYS = [b"k%d" % number for number in range(9)] + [b"a long key of more than 24 bytes", b"\xff"]


@dataclass
class Model:
    """What a reader may find."""

    committed: dict[int, tuple[bytes, bytes | None]] = field(default_factory=dict)
    open: dict[int, dict[int, tuple[bytes, bytes | None]]] = field(default_factory=dict)
    sequences: dict[int, int] = field(default_factory=dict)
    start: int = 0

    def newest(self, below: int) -> dict[bytes, int]:
        """The newest offset of each key."""
        return {key: at for at, (key, _) in sorted(self.committed.items()) if at < below}


class Walk:
    """Random steps, and what they must lead to."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.broker = CompactingBroker(flush="sync", store=SMALL)
        self.broker.make(delete_retention_ms=str(HOUR_MS))
        self.model = Model()
        self.count = 0

    def step(self) -> None:
        steps = [
            *[self.put] * 5,
            *[self.send] * 2,
            *[self.transact] * 2,
            *[self.compact] * 3,
            *(self.crash, self.wait, self.expire, self.delete),
        ]
        self.random.choice(steps)()

    # -------------------------------------------------------------------------------------- writing

    def pairs(self) -> list[tuple[bytes, bytes | None]]:
        self.count += 1
        return [
            (
                self.random.choice(KEYS),
                None if self.random.random() < 0.2 else b"%d-%d" % (self.count, at),
            )
            for at in range(self.random.randrange(1, 6))
        ]

    def put(self) -> None:
        pairs = self.pairs()
        base = self.broker.put(*pairs, attributes=self.random.randrange(5))
        self.model.committed.update(enumerate(pairs, base))

    def send(self) -> None:
        key = self.random.choice(KEYS[:9])
        self.count += 1
        body = b"m%d" % self.count
        self.model.committed[self.broker.send(body, KEYS=key.decode())] = (key, body)

    def transact(self) -> None:
        """One of two producers goes on with its transaction, or ends it."""
        model, producer_id = self.model, self.random.choice((7, 8))
        written = model.open.get(producer_id)
        if written is not None and self.random.random() < 0.6:
            is_commit = self.random.random() < 0.5
            marker(self.broker, producer_id, commit=is_commit)
            del model.open[producer_id]
            if is_commit:
                model.committed.update(written)
            return
        pairs = self.pairs()
        sequence = model.sequences.get(producer_id, 0)
        model.sequences[producer_id] = sequence + len(pairs)
        base = self.broker.put(
            *pairs, attributes=kafka_batches.TRANSACTIONAL, producer=(producer_id, 0, sequence)
        )
        model.open.setdefault(producer_id, {}).update(enumerate(pairs, base))

    # --------------------------------------------------------------------------------------- others

    def compact(self) -> None:
        self.broker.compact(self.random.randrange(1, 4))

    def crash(self) -> None:
        self.broker.crash(self.random.choice([KeepAll(), KeepNothing()]))

    def wait(self) -> None:
        self.broker.now_ms += self.random.choice([MINUTE_MS, HOUR_MS])

    def expire(self) -> None:
        """The oldest files of the log go, where no transaction needs them."""
        for _ in range(6):
            self.broker.produce(-1, -1, -1, b"x" * 12_000, topic="filler")
        housekeeping = self.broker.core.store.housekeeping
        housekeeping.checkpoint()
        self.broker.now_ms += 100 * HOUR_MS
        for _ in range(3):
            housekeeping.delete_expired()
            self.broker.compact(2)

    def delete(self) -> None:
        """Records of the beginning are deleted."""
        if self.random.random() < 0.3:
            high = self.broker.core.producers.stable_offsets(STORED, 0).stable(self.end)
            wanted = self.random.randrange(self.model.start, high + 1)
            self.broker.core.retention.begin([((STORED, 0), wanted)], lambda error: None)
            self.broker.settle()
            self.model.start = max(self.model.start, wanted)

    # ------------------------------------------------------------------------------------- checking

    @property
    def end(self) -> int:
        queue = self.broker.core.store.queues.get((STORED, 0))
        return 0 if queue is None else queue.end_offset

    def check(self) -> None:
        """What is found is what was written, and of each key the newest at least."""
        broker, model = self.broker, self.model
        if not self.end:
            return
        core = broker.core
        assert core.store.min_offset(STORED, 0) == model.start
        stable = core.producers.stable_offsets(STORED, 0).stable(self.end)
        assert stable == min([self.end, *(min(each) for each in model.open.values())])
        seen = {each.offset: (each.key, each.value) for each in broker.fetch()}
        # A Kafka reader leaves out what it is told was rolled back.
        pulled = dict(broker.pull())
        decided = {at: pair for at, pair in model.committed.items() if model.start <= at < stable}
        assert pulled.keys() <= decided.keys()
        for at, body in pulled.items():
            assert body == (decided[at][1] or b"")
        for at, pair in decided.items():
            if at in pulled:
                assert seen[at] == pair
        for at in model.newest(stable).values():
            if at >= model.start and decided[at][1] is not None:
                assert at in pulled, f"the newest record of a key is lost: {at}"
        for written in model.open.values():
            for at, pair in written.items():
                assert seen[at] == pair

    def finish(self) -> None:
        """Everything is decided and compacted: each key is there once, but for the last entry."""
        for producer_id, written in list(self.model.open.items()):
            marker(self.broker, producer_id, commit=True)
            self.model.committed.update(written)
            del self.model.open[producer_id]
        last = self.broker.put((b"end", b"end"))
        self.model.committed[last] = (b"end", b"end")
        self.broker.compact(5)
        self.check()
        keys = [each.key for each in self.broker.fetch() if each.offset < last]
        assert len(keys) == len(set(keys))


@pytest.mark.parametrize(
    "seed", [*range(4), *(pytest.param(seed, marks=pytest.mark.soak) for seed in range(4, 200))]
)
def test_readers_find_the_newest_of_each_key(seed: int) -> None:
    walk = Walk(seed)
    for _ in range(60):
        walk.step()
        walk.check()
    walk.finish()
