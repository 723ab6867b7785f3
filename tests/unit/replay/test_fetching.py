"""This module tests what is read for a recording: from where, up to where, and in which way."""

from __future__ import annotations

import queue as queues
from collections.abc import Callable
from typing import cast

import pytest

from sluice.errors import LinkLost, StoreError, TopicMissing
from sluice.protocol import kafka_entries
from sluice.protocol.remoting import RemotingCommand
from sluice.replay import fetching
from sluice.replay.fetching import End, Fetcher, Found, Lost, Piece, Start
from sluice.spark.cluster import Chunk, Cluster, Gone, Queue, Span
from sluice.spark.options import Filters
from tests.unit.replay.replay_kit import message, piece, queue

WAIT_SECONDS = 60.0


class Brokers:
    """Queues whose messages are stored at their offset times 10 ms; a test changes their ends."""

    def __init__(self, **spans: tuple[int, int]) -> None:
        self.spans_of = {queue(int(name[1:])): Span(*span) for name, span in spans.items()}
        self.folded: set[Queue] = set()  # with batches of Kafka's, of two records each
        self.gone: dict[Queue, int] = {}
        self.stable: dict[Queue, int] = {}
        self.fetched: list[tuple[int, int, int, bool]] = []
        self.failure: Exception | None = None
        self.after_fetch: Callable[[], None] = lambda: None

    def spans(self, topic: str) -> dict[Queue, Span]:
        if topic != "orders":
            raise TopicMissing(f"topic {topic} is not known")
        return dict(self.spans_of)

    def forget_routes(self) -> None:
        pass

    def tell(
        self, broker: str, topic: str, code: int, ext: dict[str, str], body: bytes = b""
    ) -> RemotingCommand:
        span = self.spans_of[queue(int(ext["queueId"]))]
        offset = min(max(span.low, -(-int(ext["timestamp"]) // 10)), span.high)
        return cast(RemotingCommand, type("Answer", (), {"ext": {"offset": str(offset)}})())

    def fetch(
        self, source: Queue, at: int, stop: int, filters: Filters, bytes_max: int, *, bulk: bool
    ) -> Chunk:
        if self.failure is not None:
            raise self.failure
        self.fetched.append((source.queue_id, at, stop, bulk))
        self.after_fetch()
        if at < self.gone.get(source, 0):
            raise Gone("it is gone", self.gone[source])
        if at >= self.stable.get(source, stop):
            raise Gone("nothing is there", at)
        end = min(at + 10, stop)
        chunk = piece(source, at, [message(source, b"x") for _ in range(end - at)]).chunk
        if source in self.folded and bulk:
            data = bytearray(chunk.data)
            data[36:40] = kafka_entries.KAFKA_FLAGS.to_bytes(4, "big")
            return chunk._replace(data=bytes(data))
        return chunk


class Run:
    """What a fetcher brings."""

    def __init__(
        self,
        brokers: Brokers,
        start: Start = "earliest",
        end: End = "now",
        places: dict[Queue, int] | None = None,
        now_ms: Callable[[], int] = lambda: 1_000_000,
    ) -> None:
        self.fetcher = Fetcher(
            cast(Cluster, brokers), ["orders"], places or {}, start=start, end=end, now_ms=now_ms
        )
        self.found = self.fetcher.begin()
        self.items: list[Piece | Lost | Found] = []

    def take(self) -> Piece | Lost | Found | None:
        item = self.fetcher.next(WAIT_SECONDS)
        if item is not None:
            self.items.append(item)
        return item

    def all(self) -> Run:
        while self.take() is not None:
            pass
        return self

    def offsets(self, number: int = 0) -> list[int]:
        """All that were read of a queue."""
        return [
            offset
            for item in self.items
            if isinstance(item, Piece) and item.queue == queue(number)
            for offset in range(item.start, item.chunk.next_offset)
        ]


def test_from_the_first_to_what_is_there_now() -> None:
    brokers = Brokers(q0=(5, 30), q1=(0, 3), q2=(7, 7))
    brokers.after_fetch = lambda: brokers.spans_of.update({queue(1): Span(0, 99)})
    run = Run(brokers).all()
    assert run.found == [Found(queue(0), 5), Found(queue(1), 0), Found(queue(2), 7)]
    assert run.offsets(0) == list(range(5, 30))
    assert run.offsets(1) == [0, 1, 2]  # what comes later is for later
    assert run.offsets(2) == []


@pytest.mark.parametrize(
    ("start", "end", "offsets"),
    [
        ("latest", "now", []),
        (100, "now", range(10, 30)),
        (101, 155, range(11, 16)),
        (0, 50, range(5)),
        ("earliest", 999_999, range(30)),
    ],
)
def test_times(start: Start, end: End, offsets: range | list[int]) -> None:
    assert Run(Brokers(q0=(0, 30)), start, end).all().offsets() == list(offsets)


def test_where_it_was_beats_from_where() -> None:
    run = Run(Brokers(q0=(0, 30), q1=(0, 30)), "latest", places={queue(0): 20}).all()
    assert run.offsets(0) == list(range(20, 30))
    assert run.offsets(1) == []


def test_a_queue_that_ends_before_what_is_recorded() -> None:
    with pytest.raises(StoreError, match="ends at 30 and was recorded up to 31"):
        Run(Brokers(q0=(0, 30)), places={queue(0): 31})


def test_a_queue_that_was_recorded_and_is_not_known() -> None:
    with pytest.raises(TopicMissing, match="is its broker up"):
        Run(Brokers(q0=(0, 30)), places={queue(4): 1})


def test_what_is_gone_is_told_and_passed_over() -> None:
    brokers = Brokers(q0=(0, 30))
    brokers.gone[queue(0)] = 12
    run = Run(brokers).all()
    assert run.items[0] == Lost(queue(0), 0, 12, "it is gone")
    assert run.offsets() == list(range(12, 30))


def test_queues_with_batches_of_kafkas_are_pulled() -> None:
    brokers = Brokers(q0=(0, 20), q1=(0, 20))
    brokers.folded.add(queue(0))
    run = Run(brokers).all()
    assert run.offsets(0) == run.offsets(1) == list(range(20))
    assert brokers.fetched[:2] == [(0, 0, 20, True), (0, 0, 20, False)]
    assert {bulk for number, at, _, bulk in brokers.fetched if number == 0 and at} == {False}
    assert {bulk for number, _, _, bulk in brokers.fetched if number == 1} == {True}


def test_what_is_not_decided_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetching, "_UNDECIDED_SECONDS", 0.0)
    brokers = Brokers(q0=(0, 30))
    brokers.stable[queue(0)] = 20
    run = Run(brokers).all()
    assert run.offsets() == list(range(20))
    assert run.fetcher.behind == 10


def test_it_follows_and_finds_new_queues() -> None:
    brokers = Brokers(q0=(0, 3))
    run = Run(brokers, end="never")
    run.take()
    assert run.offsets() == [0, 1, 2]
    brokers.spans_of = {queue(0): Span(0, 5), queue(1): Span(2, 4)}
    while len(run.items) < 4:
        run.take()
    assert run.offsets() == list(range(5))
    assert Found(queue(1), 2) in run.items
    assert run.offsets(1) == [2, 3]
    run.fetcher.stop()


def test_a_time_to_come_ends_it_also_while_one_queue_is_busy_and_one_is_quiet() -> None:
    """The clock goes on with every read; the busy queue grows with every read."""
    brokers = Brokers(q0=(0, 30), q1=(0, 0))
    now = 0

    def grow() -> None:
        nonlocal now
        now += 100
        brokers.spans_of[queue(0)] = Span(0, brokers.spans_of[queue(0)].high + 10)

    brokers.after_fetch = grow
    run = Run(brokers, end=500, now_ms=lambda: now).all()
    assert run.offsets()[:50] == list(range(50))


def test_a_broker_that_is_away_is_an_error() -> None:
    brokers = Brokers(q0=(0, 30))
    brokers.failure = LinkLost("no broker")
    run = Run(brokers)
    with pytest.raises(LinkLost, match="no broker"):
        run.all()


def test_no_more_than_some_chunks_are_in_memory() -> None:
    brokers = Brokers(q0=(0, 100_000))
    run = Run(brokers)
    run.take()
    run.fetcher.stop()
    assert len(brokers.fetched) <= fetching.AHEAD_MAX + 2


def test_nothing_new_is_no_end() -> None:
    run = Run(Brokers(q0=(0, 0)), end="never")
    with pytest.raises(queues.Empty):
        run.fetcher.next(0.01)
    run.fetcher.stop()
