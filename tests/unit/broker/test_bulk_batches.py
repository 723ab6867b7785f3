"""Bulk reads of queues that hold batches of Kafka's producers, over the wire."""

from __future__ import annotations

import asyncio

import orjson

from sluice.errors import SluiceError
from sluice.protocol import kafka_batches, kafka_entries
from sluice.protocol.kafka_batches import TRANSACTIONAL, Record
from sluice.protocol.remoting_bodies import read_topic_stats
from sluice.protocol.remoting_codes import RequestCode as Request
from sluice.protocol.remoting_codes import ResponseCode as Response
from tests.unit.broker.broker_kit import Rig, running
from tests.unit.broker.test_bulk import bodies, entries, fetch
from tests.unit.loops import run_once

MS = 1_700_000_000_000
HOST = bytes([127, 0, 0, 1, 0, 0, 0x2A, 0x9F])


def make(rig: Rig) -> None:
    rig.broker.core.kafka_topics.create("t", 1, {})


async def produce(rig: Rig, *records_: Record, **more: int) -> None:
    """Store a batch, and wait until readers see it."""
    core, loop = rig.broker.core, asyncio.get_running_loop()
    stored: asyncio.Future[SluiceError | None] = loop.create_future()
    numbered = [each._replace(offset_delta=at) for at, each in enumerate(records_)]
    highest = max(MS + each.time_delta for each in numbered)
    identity = (7, 0, more["sequence"]) if "sequence" in more else (-1, -1, -1)
    attributes = more.get("attributes", 0)
    data = kafka_batches.build(0, MS, highest, numbered, attributes=attributes, producer=identity)
    head = kafka_batches.read_sent(data)
    core.producers.append(
        *("t", 0, head, data, HOST),
        lambda error: loop.call_soon_threadsafe(stored.set_result, error),  # type: ignore[arg-type]
    )
    core.ask_turn()
    assert await stored is None


def test_batches_come_whole_among_the_messages() -> None:
    async def work() -> None:
        async with running() as rig:
            make(rig)
            await produce(rig, Record(0, 0, b"k", b"0"), Record(0, 0, None, b"1"))
            await rig.send("t", b"2", TAGS="A")
            tagged = Record(0, 0, None, b"3", (("rmq.tags", b"A"),))
            await produce(rig, tagged, Record(0, 0, None, b"4"))
            await rig.send("t", b"5", TAGS="B")
            answer = await fetch(rig, 0, 100)
            found = entries(answer)
            assert [entry.queue_offset for entry in found] == [0, 2, 3, 5]
            kinds = [kafka_entries.is_kafka(entry.sys_flag) for entry in found]
            assert kinds == [True, False, True, False]
            assert (answer.ext["nextOffset"], answer.ext["count"]) == ("6", "4")
            topic = rig.broker.core.kafka_topics.find("t")
            assert topic is not None
            assert answer.ext["topicId"] == topic.id.hex.upper()
            inside = await fetch(rig, 4, 5)
            assert entries(inside)[0].queue_offset == 3, "a batch that has the offset"
            chosen = await fetch(rig, 0, 100, tags="A")
            assert bodies(chosen) == [b"2", b"3"], "a filter looks at each record"
            assert [entry.queue_offset for entry in entries(chosen)] == [2, 3]
            flags = [entry.sys_flag & kafka_entries.SYS_KAFKA for entry in entries(chosen)]
            assert flags == [0, kafka_entries.SYS_KAFKA]
            await rig.make_topic("plain")
            await rig.send("plain", b"x")
            assert "topicId" not in (await fetch(rig, 0, 9, topic="plain")).ext

    run_once(work())


def test_the_bytes_of_a_range_are_not_counted_by_entries() -> None:
    async def work() -> None:
        async with running() as rig:
            make(rig)
            for _ in range(10):
                await produce(rig, *[Record(0, 0, None, bytes(100))] * 50)
            answer = await fetch(rig, 0, 500)
            true_bytes = sum(entry.size for entry in entries(answer))
            where = {"topic": "t", "queueId": 0}
            body = orjson.dumps([[0, 500], [0, 250]])
            whole, half = await rig.json(Request.SLUICE_RANGE_BYTES, where, body)
            assert abs(whole - true_bytes) <= true_bytes // 50
            assert abs(half - true_bytes // 2) <= true_bytes // 50

    run_once(work())


def test_times_are_those_of_the_records() -> None:
    async def work() -> None:
        async with running() as rig:
            make(rig)

            async def at(when_ms: int, topic: str = "t") -> tuple[str, str]:
                fields = {"topic": topic, "queueId": 0, "timestamp": when_ms}
                answer = await rig.ask(Request.SLUICE_OFFSET_AT, fields)
                assert answer.code == Response.SUCCESS, answer.remark
                return answer.ext["offset"], answer.ext["isOrdered"]

            await produce(rig, Record(0, 5, None, b""), Record(0, 1, None, b""))
            await produce(rig, Record(0, 9, None, b""), Record(0, 3, None, b""))
            assert await at(MS) == ("0", "false")
            assert await at(MS + 6) == ("2", "false")
            assert await at(MS + 10) == ("4", "false"), "the end"
            await rig.send("t", b"message")
            (message,) = [e for e in entries(await fetch(rig, 4, 9)) if e.queue_offset == 4]
            assert await at(message.store_ms) == ("4", "false"), "a message: when it was stored"
            assert await at(message.store_ms + 1) == ("5", "false")
            await rig.make_topic("plain")
            await rig.send("plain", b"x")
            assert await at(MS, "plain") == ("0", "true")
            assert await at(1 << 42, "plain") == ("1", "true")

    run_once(work())


def test_readers_are_told_up_to_where_all_is_decided() -> None:
    async def work() -> None:
        async with running() as rig:
            make(rig)
            await produce(rig, Record(0, 0, None, b"0"), Record(0, 0, None, b"1"))
            assert await spans(rig) == (2, None)
            await produce(rig, Record(0, 0, None, b"2"), attributes=TRANSACTIONAL, sequence=0)
            await rig.send("t", b"3")
            assert await spans(rig) == (4, 2)
            answer = await fetch(rig, 0, 100)
            assert [entry.queue_offset for entry in entries(answer)] == [0]
            assert answer.ext["nextOffset"] == "2"
            undecided = await fetch(rig, 2, 100)
            assert (undecided.code, undecided.ext["nextOffset"]) == (Response.PULL_NOT_FOUND, "2")

    async def spans(rig: Rig) -> tuple[int, int | None]:
        answer = await rig.ask(Request.GET_TOPIC_STATS_INFO, {"topic": "t"})
        (span,) = read_topic_stats(answer.body).values()
        return span.max_offset, span.stable_offset

    run_once(work())
