"""This module tests the fetch sessions of Kafka's consumers: which one makes room, when one ends,
and what a fetch is told that was overtaken by the next one.
"""

from __future__ import annotations

import asyncio
from typing import Any

from sluice.broker.kafka_sessions import IDLE_MS, Asked, FetchSessions, Session
from sluice.protocol import kafka_codes
from tests.unit.broker.kafka_door_kit import batch, fetched, kafka_rig

FETCH = 1


class Clock:
    def __init__(self) -> None:
        self.now_ms = 1_000_000

    def __call__(self) -> int:
        return self.now_ms


def asked(count: int) -> list[Asked]:
    return [Asked(("t", number), 0, 1000, -1) for number in range(count)]


def begun(sessions: FetchSessions, count: int) -> Session:
    session = sessions.begin(False, asked(count))
    assert session is not None
    return session


def test_new_sessions_are_not_driven_out() -> None:
    sessions = FetchSessions(lambda: 2, Clock())
    one, two = begun(sessions, 1), begun(sessions, 1)
    assert sessions.begin(False, asked(50)) is None
    assert sessions.find(one.id) is one
    assert sessions.find(two.id) is two


def test_a_session_that_is_idle_makes_room_for_any() -> None:
    clock = Clock()
    sessions = FetchSessions(lambda: 2, clock)
    idle, busy = begun(sessions, 50), begun(sessions, 1)
    clock.now_ms += IDLE_MS + 1
    sessions.use(busy)
    begun(sessions, 1)
    assert sessions.find(idle.id) is None
    assert sessions.find(busy.id) is busy
    assert len(sessions) == 2


def test_among_busy_sessions_the_smallest_makes_room_for_a_larger_one() -> None:
    clock = Clock()
    sessions = FetchSessions(lambda: 2, clock)
    small, large = begun(sessions, 3), begun(sessions, 9)
    clock.now_ms += IDLE_MS + 1
    for session in (small, large):
        sessions.use(session)
    assert sessions.begin(False, asked(3)) is None, "it is not larger"
    new = begun(sessions, 4)
    assert sessions.find(small.id) is None
    assert sessions.find(large.id) is large
    assert sessions.begin(False, asked(5)) is None, "the new one is new"
    assert sessions.find(new.id) is new


def test_where_none_are_allowed_none_are_made() -> None:
    allowed = 1
    sessions = FetchSessions(lambda: allowed, Clock())
    begun(sessions, 1)
    allowed = 0
    assert sessions.begin(False, asked(1)) is None
    assert len(sessions) == 0


def test_what_is_asked_for_and_forgotten_at_once_is_forgotten() -> None:
    session = Session(1, False, 0)
    session.change(asked(2), ())
    session.change(asked(1), [("t", 0)])
    assert list(session.parts) == [("t", 1)]


def test_a_session_without_partitions_ends() -> None:
    async def run() -> None:
        async with kafka_rig() as rig:
            client = await rig.connect()
            await client.create("t", 1)
            places = {"t": {0: 0}}
            first = await client.ask(FETCH, 12, fetched(places, session=(0, 0)))
            forgotten = [{"topic": "t", "partitions": [0]}]
            wanted = fetched({}, session=(first.session_id, 1))
            last = await client.ask(FETCH, 12, {**wanted, "forgotten_topics_data": forgotten})
            assert (last.error_code, last.session_id, last.responses) == (0, 0, ())
            wanted = fetched({}, session=(first.session_id, 2))
            gone = await client.ask(FETCH, 12, wanted)
            assert gone.error_code == kafka_codes.FETCH_SESSION_ID_NOT_FOUND

    asyncio.run(run())


def test_who_was_given_records_is_read_after_the_others() -> None:
    async def run() -> None:
        async with kafka_rig() as rig:
            client = await rig.connect()
            await client.create("t", 3)
            await client.produce("t", batch(b"a"), partition=0)
            places = {"t": {0: 0, 1: 0, 2: 0}}
            first = await client.ask(FETCH, 12, fetched(places, session=(0, 0)))
            for partition in (1, 2):
                await client.produce("t", batch(b"b"), partition=partition)

            async def order(epoch: int, **changes: Any) -> list[int]:
                wanted = fetched({}, session=(first.session_id, epoch), **changes)
                answer = await client.ask(FETCH, 12, wanted)
                return [
                    part.partition_index
                    for topic in answer.responses
                    for part in topic.partitions
                    if part.records
                ]

            assert await order(1, max_bytes=1) == [0], "a whole answer leaves the order as it was"
            assert await order(2, max_bytes=1) == [1]
            assert await order(3, max_bytes=1) == [2]
            assert await order(4) == [0, 1, 2]

    asyncio.run(run())


def test_a_fetch_that_was_overtaken_is_told_so() -> None:
    async def run() -> None:
        async with kafka_rig() as rig:
            client, other = await rig.connect(), await rig.connect()
            await client.create("t", 1)
            first = await client.ask(FETCH, 12, fetched({"t": {0: 0}}, session=(0, 0)))
            number = client.send(
                FETCH, 12, fetched({}, wait_ms=60_000, session=(first.session_id, 1))
            )
            answer: Any = None
            while answer is None or answer.error_code:  # until the first one has arrived
                answer = await other.ask(FETCH, 12, fetched({}, session=(first.session_id, 2)))
            assert answer.session_id == first.session_id
            await other.produce("t", batch(b"a"))
            answered, overtaken = await client.receive(FETCH, 12)
            assert answered == number
            code = kafka_codes.INVALID_FETCH_SESSION_EPOCH
            assert (overtaken.error_code, overtaken.session_id) == (code, first.session_id)
            assert overtaken.responses == ()

    asyncio.run(run())
