"""Pulls without a wire: what is committed on the way, resets, and how long a pull waits."""

from __future__ import annotations

from dataclasses import replace

from sluice.broker.core import BrokerCore
from sluice.broker.pulling import (
    FLAG_COMMIT,
    FLAG_SUBSCRIPTION,
    FLAG_SUSPEND,
    OffsetReset,
    Pull,
    Pulling,
)
from sluice.broker.topics import TopicSettings
from sluice.errors import Busy, SluiceError
from sluice.model import Message
from sluice.protocol import records
from sluice.protocol.message_batches import join_batch
from sluice.storage.background import Inline
from sluice.storage.memory_files import MemoryFiles
from sluice.storage.opening import open_store
from sluice.storage.reads import ReadResult, ReadStatus
from tests.unit.broker.broker_kit import broker_config

Seen = list[ReadResult | OffsetReset | SluiceError | None]
FLAGS = FLAG_SUBSCRIPTION | FLAG_SUSPEND
WAIT_MS = 15_000


class Bench:
    """A broker's core without doors, and a clock that the test turns."""

    def __init__(self) -> None:
        self.now_ms = 1_000_000
        self.turns: list[object] = []
        config = broker_config()
        store = open_store(
            config.store, MemoryFiles(), Inline(), lambda: self.now_ms, bytes([127, 0, 0, 1] * 2)
        )
        self.core = BrokerCore(config, store, lambda: self.now_ms, self.turns.append)
        self.core.topics.put([TopicSettings("orders", 2, 2)])
        self.pulling = Pulling(self.core)
        self.core.end_turn()

    def pull(
        self, offset: int, *, group: str = "readers", flags: int = FLAGS, commit: int = 0
    ) -> Seen:
        seen: Seen = []
        pull = Pull(group, "orders", 0, offset, 32, flags, commit, WAIT_MS, "*", None, 0)
        self.pulling.pull(pull, self, lambda result, error: seen.append(result or error))
        return seen

    def put(self) -> None:
        self.core.append(Message("orders", 0, b"x"))
        self.core.end_turn()


def test_a_pull_that_is_woken_for_nothing_does_not_wait_longer() -> None:
    bench = Bench()
    seen = bench.pull(0)
    assert bench.core.polls.held_count == 1
    bench.now_ms += WAIT_MS - 1
    bench.core.polls.wake(("orders", 0))
    assert (seen, bench.core.polls.held_count) == ([], 1)
    bench.now_ms += 1
    bench.core.polls.tick(bench.now_ms)
    # A client gives up after twice its wait: a new wait at each wake would leave it in the dark.
    assert len(seen) == 1
    assert isinstance(seen[0], ReadResult)
    assert seen[0].status is ReadStatus.NO_MESSAGE_IN_QUEUE


def test_a_pull_commits_unless_a_reset_is_ahead_of_it() -> None:
    bench = Bench()
    for _ in range(3):
        bench.put()
    flags = FLAG_SUBSCRIPTION | FLAG_COMMIT
    bench.pull(1, flags=flags, commit=1)
    assert bench.core.offsets.committed("readers", "orders", 0) == 1
    assert bench.core.offsets.pulled_to("readers", "orders", 0) == 3
    bench.core.offsets.reset("readers", "orders", {0: 0})
    assert bench.pull(3, flags=flags, commit=3) == [OffsetReset(0, 0, 3)]
    assert bench.core.offsets.committed("readers", "orders", 0) == 0
    assert bench.core.offsets.pulled_to("readers", "orders", 0) == 0
    bench.pull(0, flags=flags, commit=2)
    assert bench.core.offsets.committed("readers", "orders", 0) == 2


def test_above_the_bound_of_waiting_pulls_one_is_refused_by_its_name() -> None:
    bench = Bench()
    bench.core.polls.held_max = 1
    assert bench.pull(0) == []
    (answer,) = bench.pull(0)
    # "Nothing found" would make the client ask again at once, and again.
    assert isinstance(answer, Busy)
    assert "1 pulls wait for messages, the limit is 1 (held_polls_max)" in str(answer)
    assert bench.core.polls.held_count == 1


def test_without_long_polling_the_wait_is_short() -> None:
    bench = Bench()
    bench.core.config = replace(bench.core.config, long_polling=False)
    seen = bench.pull(0)
    bench.now_ms += bench.core.config.short_poll_ms
    bench.core.polls.tick(bench.now_ms)
    assert len(seen) == 1


def test_a_batch_that_is_stored_whole_is_given_to_who_asks_for_its_middle() -> None:
    bench = Bench()
    attributes = {"queue.type": "BatchCQ"}
    bench.core.topics.put([TopicSettings("orders", 2, 2, attributes=attributes)])
    flags = records.SYS_INNER_BATCH | records.SYS_NEED_UNWRAP
    body = join_batch([(0, b"%d" % number, b"") for number in range(3)])
    for _ in range(2):
        batch = Message("orders", 0, body, b"INNER_NUM\x013\x02", sys_flag=flags, count=3)
        bench.core.append(batch)
    bench.core.end_turn()
    for offset, bases in ((0, [0, 3]), (1, [0, 3]), (2, [0, 3]), (3, [3]), (5, [3])):
        (found,) = bench.pull(offset)
        assert isinstance(found, ReadResult)
        entries = [records.decode(message) for message in found.messages]
        assert [entry.queue_offset for entry in entries] == bases
        assert found.next_offset == 6
