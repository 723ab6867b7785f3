"""What becomes of popped messages when the disk fails, retention comes, or a broker starts."""

from __future__ import annotations

from collections.abc import Callable
from errno import ENOSPC
from typing import Any

import orjson
import pytest

from sluice.broker import pop_log
from sluice.broker.pops import INVISIBLE_MS_MAX
from sluice.broker.topics import TopicSettings
from sluice.errors import (
    DiskFull,
    NotInFlight,
    SluiceError,
)
from sluice.model import Message
from sluice.storage.state import POP_TABLE
from sluice.storage.store import ColdRead, ReadResult
from tests.unit.broker.pop_kit import (
    BEGIN_MS,
    GROUP,
    INVISIBLE_MS,
    RETRY_TOPIC,
    TOPIC,
    PopBench,
    pop_in_order,
    taken_of,
)

# --------------------------------------------------------------------------- what cannot be written


def fail_once(bench: PopBench) -> None:
    """The next write finds the disk full; the store goes on when there is room again."""
    bench.files.fail("pwritev", error=ENOSPC)


def test_a_pop_that_cannot_be_written_did_not_happen() -> None:
    bench = PopBench(queues=1)
    bench.put(b"1", b"2")
    fail_once(bench)
    ((popped, _, error),) = bench.ask()
    assert popped is None
    assert isinstance(error, DiskFull)
    assert bench.core.pops.state.in_flight == 0
    assert bench.bodies() == [b"1", b"2"]


def test_an_acknowledgement_that_cannot_be_written_is_none() -> None:
    bench = PopBench(queues=1)
    bench.put(b"1", b"2")
    first, _ = bench.pop()
    outcomes: list[SluiceError | None] = []
    fail_once(bench)
    bench.core.pops.acknowledge((GROUP, TOPIC, 0), 0, first.ticket, outcomes.append)
    bench.settle()
    assert isinstance(outcomes[0], DiskFull)
    bench.ack(first)
    bench.pass_ms(INVISIBLE_MS)
    assert bench.bodies() == [b"2"]


def test_a_change_that_cannot_be_written_leaves_the_old_ticket() -> None:
    bench = PopBench(queues=1)
    bench.put(b"1")
    (message,) = bench.pop()
    fail_once(bench)
    with pytest.raises(AssertionError, match="no room on the disk"):
        bench.change(message, 1_000)
    bench.pass_ms(2_000)
    assert bench.stored(RETRY_TOPIC) == []
    bench.ack(message)


def test_a_copy_that_cannot_be_written_comes_later_and_once() -> None:
    bench = PopBench(queues=1)
    bench.put(b"1", b"2")
    bench.pop()
    bench.now_ms += INVISIBLE_MS
    fail_once(bench)
    bench.core.pops.tick(bench.now_ms)
    bench.settle()
    assert bench.core.pops.state.in_flight == 2
    bench.pass_ms(5_000, step_ms=500)
    assert bench.bodies() == [b"1", b"2"]
    assert len(bench.stored(RETRY_TOPIC)) == 2


def test_order_goes_on_after_a_failure() -> None:
    bench = PopBench(queues=1)
    bench.put(b"1", b"2")
    fail_once(bench)
    ((popped, _, _),) = bench.ask(order=True)
    assert popped is None
    first, second = pop_in_order(bench)
    outcomes: list[SluiceError | None] = []
    for message in (first, second):
        fail_once(bench)
        name = (GROUP, TOPIC, 0)
        bench.core.pops.acknowledge(name, message.offset, message.ticket, outcomes.append)
        bench.settle()
    assert all(isinstance(outcome, DiskFull) for outcome in outcomes)
    assert pop_in_order(bench) == []
    bench.ack(second, first)
    assert pop_in_order(bench) == []
    bench.put(b"3")
    assert [each.body for each in pop_in_order(bench)] == [b"3"]


# ------------------------------------------------------------------------------------------ the log


def fill(bench: PopBench, byte_count: int) -> None:
    """Other messages push the log on."""
    while byte_count > 0:
        bench.put(*[bytes(4_000)] * 8, topic="other")
        byte_count -= 32_000


def test_retention_takes_nothing_that_is_in_flight() -> None:
    bench = PopBench(queues=1)
    bench.core.topics.put([TopicSettings("other", 1, 1)])
    store = bench.core.store
    bench.put(b"old", b"done")
    old, done = bench.pop(invisible_ms=INVISIBLE_MS_MAX)
    bench.ack(done)
    fill(bench, 2 << 20)
    bench.put(b"new")
    (new,) = bench.pop(invisible_ms=INVISIBLE_MS_MAX)
    bench.crash()
    store = bench.core.store
    (ask,) = [each for each in store.housekeeping.rescuers if each.__name__ == "_leave"]
    for _ in range(10):
        if ask(store.log.segment_bytes):
            break
        bench.settle()
    assert ask(store.log.segment_bytes)
    bench.settle()
    # What would be lost comes again early; the other one stays with its consumer.
    assert [bytes(entry.body) for entry in bench.stored(RETRY_TOPIC)] == [b"old"]
    bench.ack(new)
    with pytest.raises(NotInFlight):
        bench.ack(old)
    store.housekeeping.checkpoint()
    store.housekeeping.delete_before(store.log.segment_bytes)
    bench.settle()
    bench.crash()
    assert bench.core.store.log.start > 0
    assert bench.bodies() == [b"old"]


def test_a_start_reads_little_however_long_messages_are_in_flight(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pop_log, "BEHIND_MAX", 10)
    bench = PopBench(queues=1)
    bench.put(b"slow")
    (slow,) = bench.pop(invisible_ms=INVISIBLE_MS_MAX)
    for _ in range(200):
        bench.put(b"quick")
        bench.ack(*bench.pop())
        bench.pass_ms(1_000)
    bench.pass_ms(10_000)
    line = bench.core.store.table(POP_TABLE)[pop_log.LINE]
    ends = {str(n): bench.core.pops.log._end(n) for n in range(8)}
    assert all(ends[n] - line["from"][n] <= 12 for n in ends)
    bench.crash()
    bench.ack(slow)
    assert bench.core.pops.state.in_flight == 0


def test_a_start_reads_the_entries_of_apaches_broker_and_survives_any_other() -> None:
    bench = PopBench(queues=1)
    bench.put(b"1", b"2", b"3")
    bench.core.groups.require(GROUP)
    topic = bench.core.pops.log.topic
    head = {"bn": "broker-a", "c": GROUP, "q": 0, "t": TOPIC, "so": 0, "pt": BEGIN_MS}
    point = {**head, "bm": 0, "it": 1_000, "n": 3, "reviveTime": BEGIN_MS + 1_000, "ro": 0}
    bodies: list[object] = [point, {**head, "ao": 1}, 7, [], {"c": 1}, {**head, "ao": "x"}, None]
    for body in bodies:
        bench.core.append(Message(topic, 0, orjson.dumps(body)))
    bench.core.append(Message(topic, 1, b"{"))
    bench.settle()
    bench.crash()
    bench.pass_ms(1_000)
    assert bench.bodies() == [b"1", b"3"]


def test_a_queue_that_waits_for_the_disk_is_popped_by_one_and_resets_are_seen() -> None:
    bench = PopBench(queues=1)
    bench.put(b"1", b"2", b"3")
    read, waiting = bench.core.store.read, [True]
    work: list[Callable[[], None]] = []

    def cold(*words: Any, **limits: Any) -> ReadResult:
        if waiting[0]:
            raise ColdRead(lambda: None)
        return read(*words, **limits)

    def submit(lane: str, job: Callable[[], None], done: Callable[[None, None], None]) -> None:
        work.append(lambda: done(None, None))

    bench.core.store.read = cold  # type: ignore[method-assign]
    bench.core.store.background.submit = submit  # type: ignore[method-assign,assignment]
    first, second = bench.ask(), bench.ask()
    assert (first, second[0][0]) == ([], None), "the other one does not wait for the same"
    bench.core.offsets.reset(GROUP, TOPIC, {0: 2})
    waiting[0] = False
    work.pop()()
    bench.settle()
    assert [each.body for each in taken_of(first[0][0])] == [b"3"]
    assert bench.pop() == []
