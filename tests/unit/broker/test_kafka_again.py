"""This module holds requests that are served as the one before was together with the long way: the
same requests have the same answers, byte for byte, and leave the same log.
"""

from __future__ import annotations

import errno
from dataclasses import replace
from typing import Any
from unittest import mock
from uuid import UUID

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sluice.broker.kafka_again import LINES_MAX, ProduceAgain
from sluice.broker.kafka_ahead import AheadReader
from sluice.protocol import kafka_batches
from tests.unit.broker.kafka_again_kit import (
    FETCH,
    PRODUCE,
    STORED,
    TOPIC_ID,
    Both,
    asked,
    batch,
    begun,
    read_answer,
    sent,
)
from tests.unit.broker.kafka_kit import TOPIC, KafkaBroker

# --------------------------------------------------------------------------------------- producers


@pytest.mark.parametrize("version", [9, 12, 13])
@pytest.mark.parametrize("flush", ["async", "sync"])
def test_the_second_batch_to_a_partition_takes_the_short_way(version: int, flush: str) -> None:
    both = Both(flush=flush)
    for number in range(6):
        stored = both.produce(batch(number, b"v%d" % number), version=version)
        assert (stored.error_code, stored.base_offset) == (0, number)
    # The first makes the partition, the second is the first of the usual kind.
    assert both.short_count >= 4


@pytest.mark.parametrize("size", [1, 40, 100, 150, 4000, 20_000, 300_000])
def test_batches_of_every_size(size: int) -> None:
    both = Both()
    for number in range(5):
        assert both.produce(batch(number, bytes([65 + number]) * size)).base_offset == number
    assert both.short_count >= 2
    for number, length in enumerate((1, size, 60, 120, 5000), 5):
        assert both.produce(batch(number, b"x" * length)).base_offset == number


def test_partitions_are_told_apart() -> None:
    both = Both()
    for number in range(5):
        for partition in range(3):
            stored = both.produce(batch(number, b"v"), partition)
            assert (stored.index, stored.base_offset) == (partition, number)
    assert both.short_count >= 9


def test_requests_under_way_are_answered_in_their_order() -> None:
    both = Both(flush="sync")
    both.produce(batch(0, b"0"))
    both.produce(batch(1, b"1"))
    answers = both.send(*((PRODUCE, 13, sent(batch(2 + at, b"%d" % at))) for at in range(4)))
    parts = [answer.responses[0].partition_responses[0] for answer in answers]
    assert [part.base_offset for part in parts] == [2, 3, 4, 5]
    assert both.short_count >= 4


@pytest.mark.parametrize(
    "changes",
    [
        {"acks": 0},
        {"acks": 1},
        {"acks": 2},
        {"timeout": 999},
        {"transactional_id": "t"},
        {"topic_data": []},
    ],
)
def test_what_says_something_else_is_looked_at(changes: dict[str, Any]) -> None:
    both = Both()
    for number in range(3):
        both.produce(batch(number, b"v"))
    count = both.short_count
    both.send((PRODUCE, 13, sent(batch(3, b"v"), **changes)))
    assert both.short_count == count
    following = both.short.broker.core.producers.partition(STORED, 0).end
    assert both.produce(batch(following, b"v")).base_offset == following
    assert both.short_count == count + 1


@pytest.mark.parametrize(
    "data",
    [
        None,
        b"",
        batch(9, b"v"),
        batch(1, b"v"),
        batch(3, b"v")[:-1] + b"?",
        batch(3, b"v")[:40],
        batch(3, b"v", attributes=kafka_batches.TRANSACTIONAL),
        batch(3, b"v" * 500, attributes=kafka_batches.CODEC_GZIP),
        batch(0, b"v", producer=8),
    ],
)
def test_batches_of_other_kinds_take_the_long_way(data: bytes | None) -> None:
    both = Both()
    for number in range(3):
        both.produce(batch(number, b"v"))
    count = both.short_count
    both.produce(data)
    assert both.short_count == count
    both.produce(batch(0, b"w", producer=99))
    assert both.produce(batch(1, b"w", producer=99)).error_code == 0
    assert both.short_count == count + 1


def test_what_was_known_ends_with_a_change() -> None:
    both = Both()
    for number in range(3):
        both.produce(batch(number, b"v"))

    def change(**settings: Any) -> None:
        def put(broker: KafkaBroker) -> None:
            topic = broker.core.topics.get(STORED)
            assert topic is not None
            broker.core.topics.put([replace(topic, **settings)])

        both.each(put)

    change(perm=4)  # read only
    assert both.produce(batch(3, b"v")).error_code == 29
    change(perm=6)
    assert both.produce(batch(3, b"v")).error_code == 0
    assert both.produce(batch(4, b"v")).error_code == 0
    both.each(lambda broker: broker.core.reconfigure(replace(broker.core.config, permission="r")))
    assert both.produce(batch(5, b"v")).error_code == 29
    both.each(lambda broker: broker.core.reconfigure(replace(broker.core.config, permission="rw")))
    assert both.produce(batch(5, b"v")).error_code == 0


def test_a_batch_that_cannot_be_written_is_refused_and_may_come_again() -> None:
    both = Both()
    for number in range(3):
        both.produce(batch(number, b"v"))
    both.each(lambda broker: broker.files.fail("pwritev", error=errno.ENOSPC, within="/commitlog/"))
    count = both.short_count
    refused = both.produce(batch(3, b"lost"))
    assert (refused.error_code, refused.base_offset) == (56, -1)
    assert both.short_count == count + 1
    assert both.produce(batch(3, b"kept")).base_offset == 3
    both.session = (0, 0)
    assert both.fetch(3).records is not None
    assert b"kept" in both.fetch(3).records
    assert b"lost" not in both.fetch(3).records


def test_what_is_known_of_a_connection_is_bounded() -> None:
    both = Both()
    for number in range(2):
        both.produce(batch(number, b"v"))
    again = both.short.session.again
    assert isinstance(again, ProduceAgain)
    ((said, line),) = again._lines.items()
    for number in range(3 * LINES_MAX):
        again.learn(said + b"%d" % number, line)
    assert len(again._lines) <= LINES_MAX


# --------------------------------------------------------------------------------------- consumers


def test_a_consumer_that_reads_batch_by_batch() -> None:
    both = begun()
    assert both.fetch(0).records.count(b"v") == 3
    assert both.fetch(3) == 0, "all is known that there is"
    assert both.fetch() == 0
    count = both.short_count
    for number in range(3, 9):
        with both.another():
            both.produce(batch(number, b"w%d" % number))
        part = both.fetch()
        assert b"w%d" % number in part.records
        assert (part.high_watermark, part.last_stable_offset) == (number + 1, number + 1)
        assert both.fetch(number + 1) == 0
        assert both.fetch() == 0
    assert both.short_count >= count + 15


@pytest.mark.parametrize("size", [1, 100, 5000, 60_000])
def test_the_newest_batch_is_there_when_it_is_confirmed(size: int) -> None:
    both = begun(flush="sync")
    both.fetch(3)
    both.fetch(3)
    both.fetch()
    for number in range(3, 9):
        with both.another():
            both.produce(batch(number, b"%d" % number * size))
            both.produce(batch(number + 100, b"refused"))
        assert len(both.fetch().records) > size
        both.fetch(number + 1)


def test_it_is_known_whose_answer_is_being_sent_whichever_way_it_was_made() -> None:
    both = begun()
    readers = [
        service
        for side in (both.short, both.long)
        for service in side.broker.core.services
        if isinstance(service, AheadReader)
    ]
    for _ in range(5):
        for reader in readers:
            reader.asked_by = None
        both.fetch(0)
        assert [reader.asked_by for reader in readers] == [both.short.session, both.long.session]
    assert both.short_count


@pytest.mark.parametrize(
    "changes",
    [
        {"offset": 99},
        {"offset": -1},
        {"offset": 3, "leader_epoch": 4},
        {"offset": 3, "leader_epoch": -1},
        {"offset": 0, "max_bytes": 1},
        {"offset": 0, "isolation_level": 1},
        {"offset": 0, "rack_id": "r"},
        {"offset": None, "forgotten_topics_data": [{"topic_id": TOPIC_ID, "partitions": [0]}]},
        {"offset": None, "topics": [{"topic_id": UUID(int=6), "partitions": [{"partition": 0}]}]},
        {"offset": None, "topics": [{"topic_id": TOPIC_ID, "partitions": [{"partition": 1}]}]},
    ],
)
def test_fetches_that_ask_for_something_else(changes: dict[str, Any]) -> None:
    both = begun()
    for offset in (3, 3, None, None):
        both.fetch(offset)
    both.fetch(**changes)
    for offset in (None, 3, None, 0):
        both.fetch(offset)


def test_after_a_change_fetches_are_learnt_anew() -> None:
    both = begun()
    for offset in (3, 3, None, None):
        both.fetch(offset)
    count = both.short_count
    both.each(lambda each: each.core.reconfigure(replace(each.core.config, pull_count_max=7)))
    assert (both.fetch(), both.short_count) == (0, count), "the next one takes the long way"
    assert (both.fetch(), both.short_count) == (0, count + 1)


def test_a_session_of_another_epoch_is_refused() -> None:
    both = begun()
    for offset in (3, 3, None, None):
        both.fetch(offset)
    number, epoch = both.session
    both.session = (number, epoch + 1)
    assert both.fetch() == 71
    assert both.fetch(0).records is not None, "a new session"


def test_a_fetch_that_waits_is_answered_when_there_is_something() -> None:
    both = begun()
    for offset in (0, 0, 0):
        both.fetch(offset, max_wait=500)
    count = both.short_count
    assert both.fetch(3, max_wait=500) is None
    with both.another():
        both.produce(batch(3, b"woken"))
    assert b"woken" in both.short.wire.sent[1]
    assert both.short_count >= count + 2
    both.session = (both.session[0], both.session[1] + 1)
    assert both.fetch(3, max_wait=500).records is not None
    assert both.fetch(4, max_wait=500, min_bytes=10**6) is None
    assert both.short.later(600) == both.long.later(600) != []


def test_a_fetch_that_wants_more_waits_on() -> None:
    both = begun()
    limits = {"max_wait": 500, "min_bytes": 150}
    for offset in (0, 0, 0):
        both.fetch(offset, **limits)
    assert both.fetch(3, **limits) is None
    with both.another():
        both.produce(batch(3, b"first"))
        assert len(both.short.wire.sent) == 1, "not enough"
        both.produce(batch(4, b"second" * 9))
        _, answer = both.short.wire.sent
    assert b"first" in answer
    assert b"second" in answer
    both.session = (both.session[0], both.session[1] + 1)
    assert both.fetch(5, **limits) is None
    with both.another():
        both.produce(batch(5, b"third"))
    answers = both.short.later(600)
    assert answers == both.long.later(600)
    assert b"third" in answers[0]


def test_more_than_one_fetch_of_a_session_under_way() -> None:
    both = begun()
    for offset in (0, 0, 0):
        both.fetch(offset, max_wait=500)
    number, epoch = both.session
    held = (FETCH, 17, asked((number, epoch), 3, max_wait=500))
    following = (FETCH, 17, asked((number, epoch + 1), 3, max_wait=500))
    count = both.short_count
    assert both.send(held) == []
    assert both.short_count == count + 1
    assert both.send(following) == []
    answers = both.short.later(600)
    assert answers == both.long.later(600)
    first, second = (read_answer(FETCH, 17, each) for each in answers)
    assert (first.error_code, second.error_code) == (71, 0)


def test_transactions_are_left_to_the_long_way() -> None:
    both = begun()
    for offset in (3, 3, None, None):
        both.fetch(offset)
    count = both.short_count

    def begin(broker: KafkaBroker) -> None:
        broker.core.producers.partition(STORED, 0).stable.data(50, 3)

    both.each(begin)
    assert both.fetch() == 0
    assert both.short_count == count


def test_a_topic_that_goes_and_comes_again() -> None:
    both = begun()
    for offset in (3, 3, None, None):
        both.fetch(offset)
    both.send((20, 6, {"topics": [{"name": TOPIC, "topic_id": None}], "timeout": 1000}))
    assert both.fetch() is not None
    with mock.patch("uuid.uuid4", return_value=UUID(int=9)):
        both.each(lambda broker: broker.topic(TOPIC, 3))
    both.fetch()
    both.fetch(3)


def held(both: Both) -> None:
    """A fetch waits at the end."""
    for offset in (0, 0, 0):
        both.fetch(offset, max_wait=500)
    count = both.short_count
    assert both.fetch(3, max_wait=500) is None
    assert both.short_count == count + 1


def test_nobody_waits_for_a_connection_that_is_gone() -> None:
    both = begun()
    held(both)
    for side in (both.short, both.long):
        side.api.closed(side.session)
    with both.another():
        both.produce(batch(3, b"later"))
    assert len(both.short.wire.sent) == 1, "the producer's answer"
    assert both.short.later(600) == []


def test_what_cannot_be_told_any_more_is_asked_again() -> None:
    """While it waits, the topic may not be read any more."""
    both = begun()
    held(both)

    def forbid(broker: KafkaBroker) -> None:
        topic = broker.core.topics.get(STORED)
        assert topic is not None
        broker.core.topics.put([replace(topic, perm=2)])

    both.each(forbid)
    (answer,) = both.short.later(600)
    assert read_answer(FETCH, 17, answer).responses == ()
    (answer,) = both.long.later(600)
    both.session = (both.session[0], both.session[1] + 1)
    assert both.fetch().error_code == 29


@settings(max_examples=60)
@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("send"), st.integers(0, 2), st.integers(1, 3), st.integers(0, 200)),
            st.tuples(st.just("again"), st.integers(0, 2)),
            st.tuples(st.just("fetch"), st.none() | st.integers(0, 12)),
            st.tuples(st.just("next")),
            st.tuples(st.just("cut"), st.integers(0, 8)),
        ),
        max_size=40,
    ),
    st.sampled_from(["async", "sync"]),
)
def test_any_mix_of_requests(steps: list[tuple[Any, ...]], flush: str) -> None:
    both = Both(flush=flush)
    sequences, last = [0, 0, 0], [b"", b"", b""]
    for kind, *rest in steps:
        if kind == "send":
            partition, count, size = rest
            last[partition] = batch(sequences[partition], *[b"x" * size] * count)
            sequences[partition] += count
            both.produce(last[partition], partition)
        elif kind == "again" and last[rest[0]]:
            both.produce(last[rest[0]], rest[0])
        elif kind == "fetch":
            both.fetch(0 if both.session == (0, 0) and rest[0] is None else rest[0])
        elif kind == "cut":
            part = {"partition_index": 0, "offset": min(rest[0], sequences[0])}
            topics = [{"name": TOPIC, "partitions": [part]}]
            both.send((21, 2, {"topics": topics, "timeout": 1000}))
        elif kind == "next":
            both.fetch(sequences[0])
