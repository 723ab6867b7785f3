"""Which offsets of a partition are decided, and what of them was rolled back."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from sluice.broker.stable_offsets import StableOffsets


def test_the_oldest_open_transaction_holds_readers() -> None:
    stable = StableOffsets()
    assert stable.stable(100) == 100
    assert stable.is_trivial
    stable.data(1, 10)
    stable.data(2, 20)
    stable.data(1, 30)
    assert stable.stable(100) == 10
    assert stable.stable(5) == 5
    assert (stable.is_open(1), stable.first_offset(2), stable.first_offset(3)) == (True, 20, None)
    stable.marker(1, 40, commit=True)
    assert stable.stable(100) == 20
    stable.marker(2, 41, commit=False)
    assert stable.stable(100) == 100
    assert stable.aborted(0, 100) == [(2, 20)]


def test_an_end_counts_when_it_is_confirmed() -> None:
    stable = StableOffsets()
    stable.data(1, 10)
    stable.marker(1, 15, commit=True)
    assert stable.stable(15) == 10  # the marker is written, and a crash may lose it
    assert stable.stable(16) == 16


def test_a_marker_of_nothing() -> None:
    stable = StableOffsets()
    stable.marker(1, 3, commit=False)
    assert stable.is_trivial


def test_only_what_overlaps_is_told() -> None:
    stable = StableOffsets()
    for number in range(10):
        stable.data(number, number * 10)
        stable.marker(number, number * 10 + 5, commit=False)
    assert stable.aborted(35, 51) == [(3, 30), (4, 40), (5, 50)]
    assert stable.aborted(36, 50) == [(4, 40)]
    stable.forget_below(86)
    assert stable.aborted(0, 1000) == [(9, 90)]


def test_a_long_one_overlaps_short_ones() -> None:
    stable = StableOffsets()
    stable.data(1, 0)
    stable.data(2, 10)
    stable.marker(2, 11, commit=False)
    stable.data(3, 20)
    stable.marker(3, 21, commit=False)
    stable.marker(1, 30, commit=False)
    assert stable.aborted(0, 5) == [(1, 0)]
    assert stable.aborted(12, 15) == [(1, 0)]
    assert stable.aborted(15, 25) == [(3, 20), (1, 0)]


def test_what_could_not_be_written_is_undone() -> None:
    stable = StableOffsets()
    stable.data(1, 0)
    stable.data(2, 5)
    before = stable.row()
    stable.marker(1, 10, commit=False)
    stable.data(3, 11)
    stable.data(1, 12)
    stable.discard_from(10)
    assert stable.row() == before
    assert stable.stable(10) == 0


events = st.lists(
    st.tuples(st.integers(0, 3), st.sampled_from(["data", "commit", "abort"])), max_size=40
)


@given(events, st.data())
def test_readers_see_exactly_what_was_committed(
    history: list[tuple[int, str]], data: st.DataObject
) -> None:
    stable = StableOffsets()
    open_from: dict[int, list[int]] = {}
    outcome: dict[int, str] = {}  # by offset of a data batch
    for offset, (producer, what) in enumerate(history):
        if what == "data":
            stable.data(producer, offset)
            open_from.setdefault(producer, []).append(offset)
        else:
            stable.marker(producer, offset, commit=what == "commit")
            for each in open_from.pop(producer, ()):
                outcome[each] = what
    if data.draw(st.booleans()):
        stable = StableOffsets.from_row(stable.row())
    high = len(history)
    last = stable.stable(high)
    undecided = [offset for offsets in open_from.values() for offset in offsets]
    assert last == min(undecided, default=high)
    start = data.draw(st.integers(0, max(0, last)))
    aborted = sorted(stable.aborted(start, last), key=lambda pair: pair[1])
    dropping: set[int] = set()
    for offset, (producer, what) in list(enumerate(history))[start:last]:
        while aborted and aborted[0][1] <= offset:
            dropping.add(aborted.pop(0)[0])
        if what != "data":
            dropping.discard(producer)
        else:
            assert (outcome[offset] == "commit") == (producer not in dropping)
