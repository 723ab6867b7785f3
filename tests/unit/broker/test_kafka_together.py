"""This module tests reads of several queues in one go: they find what each would find alone, and
what is not plain is left out.
"""

from __future__ import annotations

import random
from typing import Any

import pytest

from sluice.broker import kafka_together
from sluice.broker.kafka_slices import SliceReader, Slices
from sluice.broker.kafka_together import Place, TogetherReader
from sluice.storage.store import ColdRead
from tests.unit.broker.test_kafka_slices import FAR, Shelf, joined


class Both(Shelf):
    """A shelf, and a reader of both its partitions that knows where a read of them goes on."""

    def __init__(self, limit: int = 5_000, **changes: Any) -> None:
        super().__init__(400, **changes)
        self.limit = limit
        self.reader = TogetherReader(self.core.store)
        self.places: dict[Place, int] = {}
        for partition in (0, 1):
            self.go_on(partition, 0)

    def go_on(self, partition: int, offset: int) -> None:
        """Read alone, so that it is known where the next read begins."""
        queue = self.queue(partition)
        found = self.reader.read(queue, offset, FAR, self.limit)
        assert found is not None
        self.places[(queue, found.next_offset)] = self.limit

    def alone(self, place: Place) -> Slices:
        found = SliceReader(self.core.store).read(*place, FAR, self.places[place])
        assert found is not None
        return found


def seen(found: Slices) -> tuple[Any, ...]:
    return joined(found.slices), len(found.slices), *found[1:]


def test_each_finds_what_it_finds_alone() -> None:
    chance = random.Random(5)
    for _ in range(40):
        both = Both(chance.randrange(3_000, 90_000))
        found = both.reader.read_together(both.places)
        assert len(found) == 2
        for place, share in found.items():
            assert seen(share) == seen(both.alone(place))
            # And the next one goes on there.
            assert both.reader._places[(place[0], share.next_offset)] == share.unit + len(
                share.slices
            )


def test_limits_that_batches_fill_exactly_are_those_of_reads_alone() -> None:
    """Entries have more bytes than their batches: of those fewer would be within these limits."""
    both, chance = Both(), random.Random(3)
    counts: set[int] = set()
    for _ in range(40):
        expected: dict[Place, int] = {}
        for place in both.places:
            both.places[place] = 1 << 30
            sizes = [len(each) for each in both.alone(place).slices]
            count = chance.randrange(1, 80)
            change = chance.choice((0, -1, sizes[count] - 1))
            both.places[place] = sum(sizes[:count]) + change
            expected[place] = max(1, count - (change < 0))
        found = both.reader.read_together(both.places)
        for place, share in found.items():
            assert seen(share) == seen(both.alone(place))
            assert len(share.slices) == expected[place]
            counts.add(len(share.slices))
    assert len(counts) > 20, "few are left out"


def test_what_has_no_limit_in_sight_is_left_out() -> None:
    both = Both()
    first, second = both.places
    assert list(both.reader.read_together({first: 5_000, second: 1 << 30})) == [first]
    assert list(both.reader.read_together({first: 10, second: 5_000})) == [second], (
        "the first batch is given whatever its size, and that is not plain"
    )


def test_where_nobody_has_read_before_it_is_left_out() -> None:
    both = Both()
    (queue, offset), second = both.places
    assert list(both.reader.read_together({(queue, offset + 1): 5_000, second: 5_000})) == [second]
    both.reader._places[(queue, offset + 1)] = both.reader._places[(queue, offset)]
    assert list(both.reader.read_together({(queue, offset + 1): 5_000, second: 5_000})) == [second]


@pytest.mark.parametrize("at", [0, 12, 20, 28, 38, 84, 88, 96, 104])
def test_where_one_is_damaged_none_is_found(at: int) -> None:
    """Who reads alone finds out which."""
    both = Both()
    queue, offset = next(iter(both.places))
    both.files.flip(both.log_path(), 8 * (both.place(offset) + at) + 6)
    assert queue.key.queue_id == 0
    assert not both.reader.read_together(both.places)


def test_what_is_not_in_memory_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    both = Both()
    store = both.core.store
    store.reader.hot_bytes = 0
    store.reader._opened_at = store.log.written
    assert len(both.reader.read_together(both.places)) == 2
    both.reader._cached_until_ns.clear()
    both.files.cold(both.log_path(), 0, 100)
    assert not both.reader.read_together(both.places)

    def cold(*_: Any) -> None:
        raise ColdRead(lambda: None)

    monkeypatch.setattr(both.reader, "_units", cold)
    assert not both.reader.read_together(both.places)


def test_what_lies_far_apart_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    both = Both()
    monkeypatch.setattr(kafka_together, "_SPAN_BYTES_MAX", 4_000)
    assert not both.reader.read_together(both.places)
