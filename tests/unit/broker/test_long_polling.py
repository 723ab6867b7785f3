"""Reads that are held are asked again when their time is over, and not before."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from sluice.broker.long_polling import HeldRead, LongPolling

OWNERS = tuple(object() for _ in range(3))
TIMES = st.integers(0, 50)
STEPS = st.one_of(
    st.tuples(st.just("hold"), TIMES),
    st.tuples(st.just("wake"), st.integers(0, 2)),
    st.tuples(st.just("carry"), st.integers(-20, 50)),
    st.tuples(st.just("drop"), st.integers(0, 2)),
)


@given(st.lists(STEPS, max_size=30))
def test_each_tick_asks_those_whose_time_is_over(steps: list[tuple[str, int]]) -> None:
    polls = LongPolling()
    held: dict[int, HeldRead] = {}
    asked: list[int] = []
    for now_ms, (step, number) in enumerate(steps):
        queue = ("t", number % 3)
        if step == "hold":

            def resume(timed_out: bool, name: int = now_ms) -> None:
                asked.append(name)
                del held[name]  # noqa: B023

            read = HeldRead(queue, now_ms + number, None, resume, OWNERS[queue[1]])
            held[now_ms] = read
            assert polls.hold(read)
        elif step == "wake":
            expected = [name for name, read in held.items() if read.queue == queue]
            polls.wake(queue)
            assert asked == expected
        elif step == "carry":
            polls.carry(number)
        else:
            polls.drop(OWNERS[number])
            held = {name: read for name, read in held.items() if read.owner is not OWNERS[number]}
        asked.clear()
        over = {name for name, read in held.items() if read.until_ms <= now_ms}
        polls.tick(now_ms)
        assert set(asked) == over
        asked.clear()
        assert polls.held_count == len(held)


def test_who_is_held_again_in_a_tick_is_asked_in_time() -> None:
    polls = LongPolling()
    asked: list[int] = []

    def hold(until_ms: int) -> None:
        def resume(timed_out: bool) -> None:
            asked.append(until_ms)
            hold(until_ms + 10)

        polls.hold(HeldRead(("t", 0), until_ms, None, resume, "owner"))

    hold(10)
    for now_ms in range(45):
        polls.tick(now_ms)
    assert asked == [10, 20, 30, 40]
