"""This module tests fetches that find nothing and would not wait: they are held for a moment."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.unit.broker.kafka_again_kit import (
    FETCH,
    PRODUCE,
    STORED,
    Side,
    asked,
    batch,
    frame_of,
    read_answer,
    sent,
)


class Timer:
    """A time that a test lets come."""

    def __init__(self, seconds: float, call: Callable[[], None]) -> None:
        self.seconds = seconds
        self.call = call
        self.is_cancelled = False

    def cancel(self) -> None:
        self.is_cancelled = True


class Reader:
    """A consumer that reads the first partition of a topic of three batches and never waits, and a
    producer on another connection.
    """

    def __init__(self, min_bytes: int = 1, **changes: Any) -> None:
        self._min_bytes = min_bytes
        self.timers: list[Timer] = []
        self.side = Side(is_short=True, **changes)
        self.core = self.side.broker.core
        self.core.call_later = self._call_later
        self._count = 0
        self._sequence = 0
        self._session = (0, 0)
        self.offset = 0
        for number in range(3):
            self.produce(b"v%d" % number)
        for _ in range(4):  # all that there is, and the form of what it asks is known
            self.fetch()
            self.let_pass()
        assert self.side.short_count, "the short way is what is tested here"

    def _call_later(self, seconds: float, call: Callable[[], None]) -> Timer:
        self.timers.append(Timer(seconds, call))
        return self.timers[-1]

    def _ask(self, key: int, version: int, values: dict[str, Any]) -> list[bytes]:
        self._count += 1
        return self.side.send(frame_of(key, version, self._count, values))

    def produce(self, value: bytes) -> list[bytes]:
        """What is sent then, to whomever."""
        side = self.side
        side.session, side.other = side.other, side.session
        answers = self._ask(PRODUCE, 13, sent(batch(self._sequence, value)))
        side.session, side.other = side.other, side.session
        self._sequence += 1
        return answers

    def fetch(self) -> list[bytes]:
        values = asked(self._session, self.offset, min_bytes=self._min_bytes)
        answers = self._ask(FETCH, 17, values)
        for answer in answers:
            self.heard(answer)
        return answers

    def let_pass(self) -> list[bytes]:
        """What is sent when the moment is over."""
        timers, self.timers = self.timers, []
        self.side.wire.sent = []
        for timer in timers:
            if not timer.is_cancelled:
                timer.call()
        for answer in self.side.wire.sent:
            self.heard(answer)
        return self.side.wire.sent

    def heard(self, answer: bytes) -> int:
        """How many bytes of records came; the next fetch asks for what follows."""
        told = read_answer(FETCH, 17, answer)
        assert told.error_code == 0
        self._session = (told.session_id, self._session[1] + 1)
        if not told.responses:
            return 0
        (part,) = told.responses[0].partitions
        self.offset = part.high_watermark
        return len(part.records or b"")


def test_what_comes_in_that_moment_goes_with_its_answer() -> None:
    reader = Reader()
    for number in range(3):
        assert reader.fetch() == []
        (timer,) = reader.timers
        assert timer.seconds == 0.001
        stored, fetched = reader.produce(b"at last %d" % number)
        assert read_answer(PRODUCE, 13, stored).responses[0].partition_responses[0].error_code == 0
        assert b"at last %d" % number in fetched
        assert timer.is_cancelled
        assert reader.heard(fetched)
        reader.timers.clear()
    assert not reader.core.polls.is_awaited


def test_when_the_moment_is_over_it_is_told_that_there_is_nothing() -> None:
    reader = Reader()
    assert reader.fetch() == []
    (answer,) = reader.let_pass()
    assert read_answer(FETCH, 17, answer).responses == ()
    assert not reader.core.polls.is_awaited
    assert len(reader.produce(b"later")) == 1, "the producer's answer alone"
    (answer,) = reader.fetch()
    assert b"later" in answer


def test_less_than_was_asked_for_is_no_reason_to_wait_longer() -> None:
    reader = Reader(min_bytes=10**6)
    assert reader.fetch() == []
    _, fetched = reader.produce(b"little")
    assert b"little" in fetched


def test_without_such_a_moment_it_is_answered_at_once() -> None:
    reader = Reader(kafka_fetch_pause_ms=0)
    assert len(reader.fetch()) == 1
    assert reader.timers == []


def test_the_second_one_who_reads_a_partition_so_is_answered_at_once() -> None:
    reader = Reader()
    asked_again: list[bool] = []
    assert reader.core.polls.stand((STORED, 0), asked_again.append)
    assert len(reader.fetch()) == 1
    assert reader.timers == []
    assert len(reader.produce(b"for the first one")) == 1
    assert asked_again == [False]


def test_who_stands_at_an_end_counts_as_held() -> None:
    reader = Reader(held_polls_max=1)
    polls = reader.core.polls
    assert polls.stand(("another", 0), lambda timed_out: None)
    assert len(reader.fetch()) == 1, "there is no room"
    polls.leave(("another", 0))
    assert reader.fetch() == []
    assert polls.held_count == 1


def test_nobody_hears_of_a_connection_that_is_gone() -> None:
    reader = Reader()
    assert reader.fetch() == []
    reader.side.api.closed(reader.side.session)
    assert reader.timers[0].is_cancelled
    assert not reader.core.polls.is_awaited
    assert len(reader.produce(b"later")) == 1


def test_a_broker_that_stops_answers() -> None:
    reader = Reader()
    assert reader.fetch() == []
    reader.side.wire.sent = []
    reader.core.polls.shut()
    (answer,) = reader.side.wire.sent
    assert reader.heard(answer) == 0
    assert reader.timers[0].is_cancelled
