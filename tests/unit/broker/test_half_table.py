"""The table of open half messages, beside a plain one."""

from __future__ import annotations

import sys
from random import Random

import pytest

from sluice.broker.half_table import NEVER_MS, HalfTable


def table_of(count: int, first: int = 0) -> HalfTable:
    table = HalfTable()
    for number in range(count):
        table.add(first + number, 1000 + 10 * number, due_ms=number)
    return table


def test_places_are_found_by_offset_and_by_position() -> None:
    table = table_of(5, first=7)
    assert (table.next_offset, table.lowest_open, table.open_count) == (12, 7, 5)
    assert [table.position(offset) for offset in table.open_from(0)] == [
        1000, 1010, 1020, 1030, 1040,
    ]  # fmt: skip
    assert table.find(1020) == 9
    assert table.find(1021) is None
    assert table.find(0) is None
    assert table.find(1 << 60) is None
    table.close(9)
    assert table.find(1020) == 9
    assert not table.is_open(9)
    assert not table.is_open(6)
    assert not table.is_open(12)
    assert list(table.open_from(8)) == [8, 10, 11]


def test_a_copy_is_found_by_the_first_place_and_by_its_own() -> None:
    table = table_of(3)
    table.close(0)
    table.note_copy(3, 1000)
    assert table.find(1000) == 3
    assert not table.is_open(3)
    table.add(3, 2000, due_ms=5)
    assert table.find(1000) == table.find(2000) == 3
    assert table.first_position(3) == 1000
    assert table.first_position(2) == 1020
    table.close(3)
    table.reopen(3, 2000, 1000, due_ms=6)
    assert table.find(1000) == 3
    table.close(3)
    assert table.find(1000) == 0  # where it was
    table.note_copy(4, 1000)
    table.forget_copy(4)
    assert table.find(1000) == 0


def test_each_is_due_once_and_at_its_newest_time() -> None:
    table = table_of(4)
    assert table.pop_due(-1) is None
    assert table.pop_due(0) == 0
    assert table.pop_due(0) is None
    assert table.due_ms(0) == NEVER_MS
    table.schedule(0, 2)
    table.schedule(1, 50)
    table.schedule(2, 2)  # as before
    table.close(3)
    assert [table.pop_due(40) for _ in range(3)] == [0, 2, None]
    assert table.pop_due(50) == 1
    table.schedule(1, 60)
    table.schedule(1, NEVER_MS)
    assert table.pop_due(100) is None


def test_offsets_that_hold_nothing_are_passed_over() -> None:
    table = HalfTable()
    table.skip_to(100)
    assert (table.next_offset, table.lowest_open) == (100, 100)
    table.add(105, 10, due_ms=0)
    assert (table.lowest_open, table.next_offset) == (105, 106)
    table.skip_to(110)
    table.add(112, 20, due_ms=0)
    assert list(table.open_from(0)) == [105, 112]
    assert (table.find(10), table.find(20)) == (105, 112)


def test_what_is_done_is_forgotten_but_never_the_next_offset() -> None:
    table = HalfTable()
    for offset in range(20_000):
        table.add(offset, offset + 1, due_ms=0)
    for offset in range(15_000):
        table.close(offset)
    table.trim(10_000)
    assert table.position(10_000) == 10_001
    with pytest.raises(IndexError):
        table.position(30_000)
    table.reopen(12_000, 12_001, 12_001, due_ms=1)
    assert table.lowest_open == 12_000
    table.close(12_000)
    for offset in range(15_000, 20_000):
        table.close(offset)
    table.trim(20_000)
    assert (table.next_offset, table.lowest_open, table.open_count) == (20_000, 20_000, 0)
    table.add(20_000, 30_000, due_ms=0)
    assert table.lowest_open == 20_000
    assert list(table.open_from(0)) == [20_000]


@pytest.mark.parametrize("seed", range(20))
def test_it_says_what_a_plain_table_says(seed: int) -> None:
    random = Random(seed)
    table = HalfTable()
    plain: dict[int, tuple[int, int]] = {}
    done: dict[int, int] = {}
    position = 0
    for _ in range(3000):
        step = random.random()
        if step < 0.45:
            offset = table.next_offset + (random.random() < 0.05)
            position += random.randrange(1, 100)
            due_ms = random.randrange(1000)
            table.add(offset, position, due_ms)
            plain[offset] = (position, due_ms)
        elif step < 0.8 and plain:
            offset = random.choice(list(plain)) if step < 0.7 else min(plain)
            done[offset] = plain.pop(offset)[0]
            table.close(offset)
        elif step < 0.85 and done:
            offset, place = done.popitem()
            plain[offset] = (place, 5)
            table.reopen(offset, place, place, due_ms=5)
        elif step < 0.9:
            keep = min(done, default=table.next_offset)
            table.trim(keep)
        elif plain:
            due = table.pop_due(500)
            expected = [o for o, (_, due_ms) in plain.items() if 0 <= due_ms <= 500]
            assert (due is None) == (not expected)
            if due is not None:
                assert plain[due][1] == min(plain[o][1] for o in expected)
                plain[due] = (plain[due][0], NEVER_MS)
        if random.random() < 0.02:
            done.clear()  # for good
        assert table.open_count == len(plain)
    assert list(table.open_from(0)) == sorted(plain)
    assert all(table.find(place) == offset for offset, (place, _) in plain.items())
    assert table.lowest_open == min(plain, default=table.next_offset)


def test_a_million_of_them_are_small() -> None:
    table = HalfTable()
    for offset in range(100_000):
        table.add_slot(offset, 10**12 + 300 * offset, due_ms=1_794_772_393_000 + offset)
    table.order()
    columns = (table._is_open, table._positions, table._due_ms, table._asked)
    size = sum(map(sys.getsizeof, columns))
    size += sys.getsizeof(table._heap) + sum(map(sys.getsizeof, table._heap))
    assert size / 100_000 < 100
