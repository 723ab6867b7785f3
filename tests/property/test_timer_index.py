"""The index of timers against a plain set of them: whatever comes, goes, and is asked for."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from sluice.broker.timer_index import TimerIndex, Timers, key_of

HOUR_MS = 3_600_000
BEGIN_MS = 498_548 * HOUR_MS

# Close together and far apart, with many that are due at the same time.
delays = st.one_of(
    st.integers(0, 3),
    st.integers(990, 1_010),
    st.sampled_from([HOUR_MS - 1, HOUR_MS, HOUR_MS + 1, 40 * 24 * HOUR_MS]),
    st.integers(0, 3 * HOUR_MS),
)
steps = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.lists(delays, max_size=8)),
        st.tuples(st.just("pass"), st.one_of(delays, st.integers(-2 * HOUR_MS, 0))),
        st.tuples(st.just("take"), st.integers(1, 5)),
        st.tuples(st.just("remove"), st.integers(0, 30)),
    ),
    max_size=40,
)


@given(steps)
def test_the_index_knows_what_waits(script: list[tuple[str, object]]) -> None:
    index = TimerIndex()
    model: set[tuple[int, int, int]] = set()
    now_ms, offset = BEGIN_MS, 0
    for name, value in script:
        if name == "add":
            assert isinstance(value, list)
            rows = [
                (now_ms + delay, offset + at, offset * 7 + at) for at, delay in enumerate(value)
            ]
            offset += len(rows)
            index.add_many(Timers.of(rows))
            model.update(rows)
        elif name == "pass":
            assert isinstance(value, int)
            now_ms += value
        elif name == "take":
            assert isinstance(value, int)
            due = sorted(row for row in model if row[0] <= now_ms)[:value]
            assert index.take(now_ms, value) == due
            model.difference_update(due)
        else:
            row = next((row for row in sorted(model) if row[1] == value), (now_ms, value, 0))
            assert isinstance(value, int)
            assert index.has(row[0], value) == (row in model)
            assert index.remove(row[0], value) == (row in model)
            model.discard(row)
        assert index.count == len(model)
        assert index.after(-1, 1_000) == sorted(model)
        later = sorted(row for row in model if key_of(row[0], row[1]) > key_of(now_ms, 3))
        assert index.after(key_of(now_ms, 3), 2) == later[:2]
        below = {row for row in model if row[1] < offset // 2}
        assert set(index.below(offset // 2, 1_000)) == below
        assert len(index.below(offset // 2, 2)) == min(2, len(below))
