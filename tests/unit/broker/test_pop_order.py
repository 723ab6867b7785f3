"""Pops in order: what blocks a queue, what opens it again, and what is refused."""

from __future__ import annotations

import pytest

from sluice.broker.pops import Ticket
from sluice.errors import (
    MessageIllegal,
    NotInFlight,
)
from tests.unit.broker.pop_kit import (
    GROUP,
    INVISIBLE_MS,
    RETRY_TOPIC,
    TOPIC,
    PopBench,
    counts,
    pop_in_order,
    taken_of,
)


def test_order_blocks_a_queue_until_all_before_is_acknowledged() -> None:
    bench = PopBench(queues=1)
    bench.put(b"1", b"2", b"3")
    first, second = pop_in_order(bench, count_max=2)
    assert first.ticket.revive_queue == 999
    assert pop_in_order(bench) == []
    bench.ack(first)
    assert pop_in_order(bench) == []
    seen = bench.ask(order=True, poll_ms=15_000)
    bench.ack(second)
    ((popped, _, _),) = seen
    (third,) = taken_of(popped)
    assert third.body == b"3"
    bench.ack(third)
    assert bench.core.offsets.committed(GROUP, TOPIC, 0) == 3


def test_order_hands_out_the_same_again_when_its_time_is_over_with_counts() -> None:
    bench = PopBench(queues=1)
    bench.put(b"1", b"2", b"3")
    assert counts(bench, count_max=2) == [(-1, 0)]
    bench.pass_ms(INVISIBLE_MS)
    assert counts(bench, count_max=2) == [(0, 1), (1, 1), (-1, 1)]
    bench.pass_ms(INVISIBLE_MS)
    assert counts(bench) == [(0, 2), (1, 2), (-1, 0)]
    assert bench.stored(RETRY_TOPIC) == []


def test_order_does_not_hand_out_again_what_is_acknowledged() -> None:
    bench = PopBench(queues=1)
    bench.put(b"1", b"2", b"3")
    first, second, third = pop_in_order(bench)
    bench.ack(second)
    bench.pass_ms(INVISIBLE_MS)
    first, third = pop_in_order(bench)
    bench.ack(first, third)
    bench.put(b"4")
    assert [each.body for each in pop_in_order(bench)] == [b"4"]


def test_order_knows_who_asks_again() -> None:
    bench = PopBench(queues=1)
    bench.put(b"1", b"2")
    assert counts(bench, attempt="A") == [(-1, 0)]
    assert pop_in_order(bench, attempt="B") == []
    assert counts(bench, attempt="A") == [(-1, 0)]


def test_order_waits_as_long_as_a_changed_time_says() -> None:
    bench = PopBench(queues=1)
    bench.put(b"1")
    (message,) = pop_in_order(bench)
    bench.change(message, 5_000)
    seen = bench.ask(order=True, poll_ms=15_000)
    bench.pass_ms(4_999)
    assert seen == []
    bench.pass_ms(1)
    bench.settle()
    assert len(seen) == 1


def test_order_refuses_what_is_not_its_own() -> None:
    bench = PopBench(queues=1)
    bench.put(b"1", b"2", b"3")
    first, second = pop_in_order(bench, count_max=2)
    name = (GROUP, TOPIC, 0)
    acknowledge = bench.core.pops.acknowledge
    with pytest.raises(MessageIllegal, match="did not have it"):
        acknowledge(name, 2, first.ticket, lambda error: None)
    with pytest.raises(NotInFlight, match="not in flight in order"):
        acknowledge(name, 0, Ticket(0, first.ticket.pop_ms - 1, 999), lambda error: None)
    bench.ack(second)
    with pytest.raises(NotInFlight, match="acknowledged already"):
        acknowledge(name, 1, second.ticket, lambda error: None)
    bench.ack(first)
    with pytest.raises(NotInFlight, match="not in flight in order"):
        acknowledge(name, 0, first.ticket, lambda error: None)
