"""This module tests produce and fetch through Kafka's door: error codes, sequence numbers, limits,
waiting, offsets, and what holds after a crash.
"""

from __future__ import annotations

import asyncio
import errno
from typing import Any

import pytest

from sluice.broker import kafka_fetch
from sluice.broker.kafka_reading import read_batches
from sluice.errors import MessageIllegal
from sluice.model import Message
from sluice.protocol import kafka_batches, kafka_codes, kafka_entries
from sluice.protocol.kafka_batches import Record
from sluice.storage.memory_files import KeepAll, MemoryFiles
from sluice.storage.state import KAFKA_PRODUCER_TABLE
from tests.unit.broker.kafka_door_kit import (
    KafkaClient,
    batch,
    fetched,
    kafka_rig,
    produced,
    values_in,
)
from tests.unit.loops import run_once, until

PRODUCE, FETCH, LIST_OFFSETS, METADATA = 0, 1, 2, 3


def test_batches_get_offsets_and_come_back() -> None:
    async def run() -> None:
        async with kafka_rig() as rig:
            client = await rig.connect()
            await client.create("t", 2)
            assert (await client.produce("t", batch(b"a", b"b"))).base_offset == 0
            assert (await client.produce("t", batch(b"c"))).base_offset == 2
            assert (await client.produce("t", batch(b"z"), partition=1)).base_offset == 0
            part = await client.fetch("t", 0)
            assert values_in(part.records) == [(0, b"a"), (1, b"b"), (2, b"c")]
            assert (part.high_watermark, part.last_stable_offset, part.log_start_offset) == (
                3,
                3,
                0,
            )
            middle = await client.fetch("t", 1)
            assert values_in(middle.records)[0] == (0, b"a"), "a batch is sent whole"
            assert values_in((await client.fetch("t", 3)).records) == []

    asyncio.run(run())


def test_what_is_refused_has_kafkas_code_and_stores_nothing() -> None:
    async def run() -> None:
        async with kafka_rig() as rig:
            client = await rig.connect()
            await client.create("t", 1, max_message_bytes="1000")
            good = batch(b"a")
            future = batch(b"a", ms=1 << 45)
            refused = [
                (good[:-1] + b"\xff", kafka_codes.CORRUPT_MESSAGE),
                (b"", kafka_codes.INVALID_RECORD),
                (None, kafka_codes.INVALID_RECORD),
                (good + good, kafka_codes.INVALID_RECORD),
                (batch(bytes(2000)), kafka_codes.MESSAGE_TOO_LARGE),
                (future, kafka_codes.INVALID_TIMESTAMP),
            ]
            for data, code in refused:
                assert (await client.produce("t", data)).error_code == code
            assert (await client.produce("t", good, partition=9)).error_code == 3
            assert (await client.produce("missing", good)).error_code == 3
            assert (await client.produce("t", good, acks=7)).error_code == 21
            assert (await client.fetch("t", 0)).high_watermark == 0

    asyncio.run(run())


def test_topics_by_their_ids() -> None:
    async def run() -> None:
        async with kafka_rig() as rig:
            client = await rig.connect()
            await client.create("t")
            (topic,) = (await client.ask(METADATA, 12, {"topics": [{"name": "t"}]})).topics
            by_id = produced("", batch(b"x"))
            by_id["topic_data"][0]["topic_id"] = topic.topic_id
            answer = await client.ask(PRODUCE, 13, by_id)
            assert answer.responses[0].partition_responses[0].error_code == 0
            wanted = fetched({"": {0: 0}})
            wanted["topics"][0]["topic_id"] = topic.topic_id
            part = (await client.ask(FETCH, 17, wanted)).responses[0].partitions[0]
            assert values_in(part.records) == [(0, b"x")]
            await client.ask(20, 6, {"topics": [{"name": "t"}]})
            await client.create("t")
            (again,) = (await client.ask(METADATA, 12, {"topics": [{"name": "t"}]})).topics
            assert again.topic_id != topic.topic_id, "another topic of the same name"
            answer = await client.ask(PRODUCE, 13, by_id)
            assert answer.responses[0].partition_responses[0].error_code == 100
            part = (await client.ask(FETCH, 17, wanted)).responses[0].partitions[0]
            assert part.error_code == kafka_codes.UNKNOWN_TOPIC_ID

    asyncio.run(run())


# -------------------------------------------------------------------------------- sequence numbers


async def sequence(
    client: KafkaClient, first: int, count: int, epoch: int = 0, partition: int = 0
) -> tuple[int, int]:
    values = [b"%d" % number for number in range(first, first + count)]
    data = batch(*values, producer=(7, epoch, first))
    part = await client.produce("t", data, partition=partition)
    return int(part.error_code), part.base_offset


async def check_sequences(client: KafkaClient) -> None:
    """After batches 0-1, 2-3, ... 10-11 of epoch 0, whose offsets are the same numbers."""
    assert await sequence(client, 10, 2) == (0, 10), "the newest once more"
    assert await sequence(client, 2, 2) == (0, 2), "the fifth newest once more"
    assert await sequence(client, 0, 2) == (45, -1), "the sixth is forgotten"
    assert await sequence(client, 13, 1) == (45, -1), "a gap"
    assert await sequence(client, 12, 1, epoch=1) == (45, -1), "a new epoch begins at 0"


def test_a_batch_that_comes_twice_is_stored_once() -> None:
    async def run() -> None:
        async with kafka_rig() as rig:
            client = await rig.connect()
            await client.create("t")
            for first in range(0, 12, 2):
                assert await sequence(client, first, 2) == (0, first)
            await check_sequences(client)
            assert await sequence(client, 0, 1, epoch=1) == (0, 12)
            assert await sequence(client, 12, 1) == (47, -1), "the old epoch is fenced"
            assert (await client.fetch("t", 0)).high_watermark == 13
            unknown = batch(b"x", producer=(8, 0, 400))
            assert (await client.produce("t", unknown)).error_code == 0

    asyncio.run(run())


def test_sequence_numbers_hold_after_a_crash() -> None:
    async def run() -> None:
        files = MemoryFiles()
        async with kafka_rig(files) as rig:
            client = await rig.connect()
            await client.create("t")
            for first in range(0, 6, 2):
                await sequence(client, first, 2)
            core = rig.broker.core
            core.producers.note([("t", 0)], core.now_ms())  # what follows is read from the log
            for first in range(6, 12, 2):
                await sequence(client, first, 2)
            crashed = files.crash(KeepAll())
        async with kafka_rig(crashed) as rig:
            client = await rig.connect()
            await check_sequences(client)
            assert await sequence(client, 12, 1) == (0, 12)

    asyncio.run(run())


def test_how_producers_stand_is_noted_as_time_goes_by() -> None:
    async def run() -> None:
        async with kafka_rig() as rig:
            client = await rig.connect()
            await client.create("t", 600)
            core = rig.broker.core
            keys = [("t", partition) for partition in range(600)]
            for partition in range(600):
                await sequence(client, 0, 1, partition=partition)
            core.producers.note(keys, core.now_ms())
            await until(lambda: len(core.store.table(KAFKA_PRODUCER_TABLE)) == 600)
            before = dict(core.store.table(KAFKA_PRODUCER_TABLE))
            for partition in range(600):
                await sequence(client, 1, 1, partition=partition)

            now_ms = core.now_ms() + 60_000
            core.producers.tick(now_ms)  # some of them
            core.producers.tick(now_ms + 100)  # the others, with the next one

            def noted() -> int:
                rows = core.store.table(KAFKA_PRODUCER_TABLE)
                return sum(row != before[key] for key, row in rows.items())

            await until(lambda: noted() == 600)

    run_once(run())


def test_sequence_numbers_hold_after_a_write_that_failed() -> None:
    async def run() -> None:
        files = MemoryFiles()
        async with kafka_rig(files) as rig:
            client = await rig.connect()
            await client.create("t")
            assert await sequence(client, 0, 2) == (0, 0)
            files.fail("pwritev", error=errno.ENOSPC, within="/commitlog/")
            code, _ = await sequence(client, 2, 2)
            assert code == kafka_codes.KAFKA_STORAGE_ERROR
            files.clear_faults()
            assert await sequence(client, 2, 2) == (0, 2), (
                "it was not stored, so it is no duplicate"
            )
            assert await sequence(client, 2, 2) == (0, 2)
            assert (await client.fetch("t", 0)).high_watermark == 4

    asyncio.run(run())


def test_every_batch_of_a_request_stands_for_itself() -> None:
    """Some are stored, one was stored before, one is damaged; a write that fails is for all."""

    def request(*parts: tuple[int, bytes]) -> dict[str, Any]:
        found = [{"index": partition, "records": data} for partition, data in parts]
        topic = {"name": "t", "partition_data": found}
        return {"acks": -1, "timeout": 1000, "topic_data": [topic]}

    async def run() -> None:
        files = MemoryFiles()
        async with kafka_rig(files) as rig:
            client = await rig.connect()
            await client.create("t", 4)

            async def sent(*parts: tuple[int, bytes]) -> list[tuple[int, int, int]]:
                answer = await client.ask(0, 9, request(*parts))
                (topic,) = answer.responses
                return [
                    (part.index, int(part.error_code), part.base_offset)
                    for part in topic.partition_responses
                ]

            first = batch(b"0", b"1", producer=(7, 0, 0))
            second = batch(b"2", producer=(7, 0, 2))
            damaged = first[:-1] + bytes((first[-1] ^ 1,))
            assert await sent((0, first)) == [(0, 0, 0)]
            assert await sent((0, first), (1, damaged), (2, first), (0, second), (9, first)) == [
                (0, 0, 0),
                (1, kafka_codes.CORRUPT_MESSAGE, -1),
                (2, 0, 0),
                (0, 0, 2),
                (9, kafka_codes.UNKNOWN_TOPIC_OR_PARTITION, -1),
            ]
            files.fail("pwritev", error=errno.ENOSPC, within="/commitlog/")
            third = batch(b"3", producer=(7, 0, 3))
            codes = [code for _, code, _ in await sent((0, third), (1, damaged), (3, first))]
            storage = kafka_codes.KAFKA_STORAGE_ERROR
            assert codes == [storage, kafka_codes.CORRUPT_MESSAGE, storage]
            files.clear_faults()
            assert await sent((3, first), (0, third)) == [(3, 0, 0), (0, 0, 3)]
            assert (await client.fetch("t", 0)).high_watermark == 4

    asyncio.run(run())


def test_no_producer_id_is_given_twice() -> None:
    async def run() -> None:
        files = MemoryFiles()
        given: list[int] = []
        for _ in range(3):
            async with kafka_rig(files) as rig:
                client = await rig.connect()
                for _ in range(3):
                    answer = await client.ask(22, 4, {"transactional_id": None})
                    assert (int(answer.error_code), answer.producer_epoch) == (0, 0)
                    given.append(answer.producer_id)
                files = files.crash(KeepAll())
        assert len(set(given)) == len(given) == 9

    asyncio.run(run())


# ----------------------------------------------------------------------------------------- fetching


def test_the_limits_of_a_fetch() -> None:
    async def run() -> None:
        async with kafka_rig() as rig:
            client = await rig.connect()
            await client.create("t", 3)
            for partition in range(3):
                for _ in range(3):
                    await client.produce("t", batch(bytes(1000)), partition=partition)

            async def found(**limits: Any) -> list[int]:
                answer = await client.ask(FETCH, 12, fetched({"t": {0: 0, 1: 0, 2: 0}}, **limits))
                parts = answer.responses[0].partitions
                return [len(values_in(part.records)) for part in parts]

            assert await found() == [3, 3, 3]
            assert await found(part_bytes=3000) == [2, 2, 2]
            assert await found(part_bytes=1) == [1, 0, 0], "one batch whatever its size"
            assert await found(max_bytes=1) == [1, 0, 0]
            assert await found(max_bytes=5000) == [3, 1, 0]

    asyncio.run(run())


def test_what_is_behind_a_full_answer_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []

    def counted(*words: Any) -> Any:
        read.append(words[2])
        return read_batches(*words)

    monkeypatch.setattr(kafka_fetch, "read_batches", counted)

    async def run() -> None:
        async with kafka_rig() as rig:
            client = await rig.connect()
            await client.create("t", 40)
            for partition in range(40):
                await client.produce("t", batch(bytes(1000)), partition=partition)
            for part_bytes, expected in (1 << 20, range(4)), (1, range(40)):
                read.clear()
                limits: dict[str, Any] = {"max_bytes": 3_500, "part_bytes": part_bytes}
                wanted = fetched({"t": dict.fromkeys(range(40), 0)}, **limits)
                answer = await client.ask(FETCH, 12, wanted)
                assert read == [*expected], "a limit of one partition is not that of the answer"
                parts = answer.responses[0].partitions
                found = [part.partition_index for part in parts if values_in(part.records)]
                assert found == ([0, 1, 2] if part_bytes > 1 else [0])
                assert {part.high_watermark for part in parts} == {1}

    asyncio.run(run())


def test_offsets_that_are_not_there_and_epochs_that_are_not_ours() -> None:
    async def run() -> None:
        async with kafka_rig() as rig:
            client = await rig.connect()
            await client.create("t")
            await client.produce("t", batch(b"x"))
            for offset in (-1, 2, 1 << 40):
                assert (await client.fetch("t", offset)).error_code == 1
            wanted = fetched({"t": {0: 0}})
            wanted["topics"][0]["partitions"][0]["current_leader_epoch"] = 5
            part = (await client.ask(FETCH, 12, wanted)).responses[0].partitions[0]
            assert part.error_code == kafka_codes.UNKNOWN_LEADER_EPOCH
            assert (await client.fetch("missing", 0)).error_code == 3
            wanted = fetched({"t": {7: 0}})
            part = (await client.ask(FETCH, 12, wanted)).responses[0].partitions[0]
            assert part.error_code == 3

    asyncio.run(run())


def test_a_fetch_waits_for_as_many_bytes_as_it_wants() -> None:
    async def run() -> None:
        async with kafka_rig() as rig:
            reader, writer = await rig.connect(), await rig.connect()
            await writer.create("t", 2)
            wanted = fetched({"t": {0: 0, 1: 0}}, wait_ms=60_000, min_bytes=2000)
            reader.send(FETCH, 12, wanted)
            for number in range(3):
                await writer.produce("t", batch(bytes(800)), partition=number % 2)
            _, answer = await reader.receive(FETCH, 12)
            sizes = [len(part.records) for part in answer.responses[0].partitions]
            assert sum(sizes) >= 2000
            reader.send(FETCH, 12, fetched({"t": {0: 2}}, wait_ms=1, min_bytes=1))
            _, answer = await reader.receive(FETCH, 12)
            assert answer.responses[0].partitions[0].records == b"", "its time was over"

    asyncio.run(run())


@pytest.mark.parametrize("version", [4, 7, 11, 12, 16])
def test_every_shape_of_fetch(version: int) -> None:
    async def run() -> None:
        async with kafka_rig() as rig:
            client = await rig.connect()
            await client.create("t")
            await client.produce("t", batch(b"x"))
            wanted = fetched({"t": {0: 0}})
            (topic,) = (await client.ask(METADATA, 12, {"topics": [{"name": "t"}]})).topics
            wanted["topics"][0]["topic_id"] = topic.topic_id
            part = (await client.ask(FETCH, version, wanted)).responses[0].partitions[0]
            assert values_in(part.records) == [(0, b"x")]

    asyncio.run(run())


async def offset_at(client: KafkaClient, timestamp: int, version: int = 7) -> tuple[int, int]:
    part = {"partition_index": 0, "current_leader_epoch": -1, "timestamp": timestamp}
    asked = {"replica_id": -1, "topics": [{"name": "t", "partitions": [part]}]}
    (found,) = (await client.ask(LIST_OFFSETS, version, asked)).topics[0].partitions
    assert found.error_code == 0
    return found.offset, found.timestamp


@pytest.mark.parametrize("begin_ms", [1_000_000, 10_000_000, 1_700_000_000_000])
def test_the_newest_record_may_be_older_than_any_unit_tells(begin_ms: int) -> None:
    """Units tell times from some hours after 1970 on; tests of clients count from nought."""

    async def run() -> None:
        async with kafka_rig() as rig:
            client = await rig.connect()
            await client.create("t")
            assert await offset_at(client, -3) == (-1, -1)
            records = [Record(at, ms, None, b"a") for at, ms in enumerate((100, 400, 250))]
            data = kafka_batches.build(0, begin_ms, begin_ms + 400, records)
            await client.produce("t", data)
            assert await offset_at(client, -3) == (1, begin_ms + 400)
            for later in (300, 500, 450):
                await client.produce("t", batch(b"b", ms=begin_ms + later))
            assert await offset_at(client, -3) == (4, begin_ms + 500)

    asyncio.run(run())


def test_offsets_by_time() -> None:
    async def run() -> None:
        async with kafka_rig() as rig:
            client = await rig.connect()
            await client.create("t")
            assert await offset_at(client, -1) == (0, -1)
            assert await offset_at(client, 5) == (-1, -1)
            begin = 1_700_000_000_000
            for minute in (5, 9, 7):
                await client.produce("t", batch(b"a", b"b", ms=begin + minute))
            assert await offset_at(client, -1) == (6, -1)
            assert await offset_at(client, -2) == (0, -1)
            assert await offset_at(client, begin + 6) == (2, begin + 9)
            assert await offset_at(client, begin) == (0, begin + 5)
            assert await offset_at(client, begin + 10) == (-1, -1)
            assert await offset_at(client, -3) == (2, begin + 9)

    asyncio.run(run())


def test_deleted_records_are_gone_and_stay_so() -> None:
    async def run() -> None:
        files = MemoryFiles()

        async def delete(client: KafkaClient, offset: int) -> tuple[int, int]:
            part = {"partition_index": 0, "offset": offset}
            asked = {"topics": [{"name": "t", "partitions": [part]}], "timeout": 1000}
            (found,) = (await client.ask(21, 2, asked)).topics[0].partitions
            return int(found.error_code), found.low_watermark

        async with kafka_rig(files) as rig:
            client = await rig.connect()
            await client.create("t")
            for _ in range(4):
                await client.produce("t", batch(b"a", b"b", b"c"))
            assert await delete(client, 7) == (0, 7)
            assert await delete(client, 3) == (0, 7), "what is gone is gone"
            assert await delete(client, 13) == (1, -1)
            assert await offset_at(client, -2) == (7, -1)
            assert (await client.fetch("t", 6)).error_code == 1
            assert values_in((await client.fetch("t", 7)).records)[0] == (6, b"a")
            crashed = files.crash(KeepAll())
        async with kafka_rig(crashed) as rig:
            client = await rig.connect()
            assert await offset_at(client, -2) == (7, -1)
            assert await delete(client, -1) == (0, 12)
            assert values_in((await client.fetch("t", 12)).records) == []
            assert (await client.produce("t", batch(b"x"))).base_offset == 12
            assert values_in((await client.fetch("t", 12)).records) == [(12, b"x")]

    asyncio.run(run())


def test_append_time_is_told_to_the_producer() -> None:
    async def run() -> None:
        async with kafka_rig() as rig:
            client = await rig.connect()
            await client.create("t", 1, message_timestamp_type="LogAppendTime")
            part = await client.produce("t", batch(b"x", ms=5))
            append_ms = round(part.log_append_time.timestamp() * 1000)
            assert append_ms > 1_600_000_000_000
            records = bytes((await client.fetch("t", 0)).records)
            head = kafka_batches.read_head(records)
            assert head is not None
            assert head.attributes & kafka_batches.APPEND_TIME
            assert head.max_ms == append_ms

    asyncio.run(run())


def test_a_batch_of_more_records_than_a_unit_can_count() -> None:
    async def run() -> None:
        files = MemoryFiles()
        values = [b""] * 40_000
        async with kafka_rig(files) as rig:
            client = await rig.connect()
            await client.create("t")
            assert (await client.produce("t", batch(*values))).error_code == 0
            assert (await client.produce("t", batch(b"last"))).base_offset == 40_000
            crashed = files.crash(KeepAll())
        async with kafka_rig(crashed) as rig:
            client = await rig.connect()
            found = values_in((await client.fetch("t", 39_999, part_bytes=1 << 22)).records)
            assert found[-1] == (40_000, b"last")
            assert len(found) == 40_001

    asyncio.run(run())


def test_a_fetch_session_tells_only_what_is_new() -> None:
    async def run() -> None:
        async with kafka_rig(kafka_fetch_sessions_max=2) as rig:
            client = await rig.connect()
            await client.create("t", 3)
            for partition in range(3):
                await client.produce("t", batch(b"x"), partition=partition)
            places = {"t": {0: 1, 1: 1, 2: 0}}
            first = await client.ask(FETCH, 12, fetched(places, session=(0, 0)))
            assert first.session_id > 0
            assert len(first.responses[0].partitions) == 3

            async def go_on(epoch: int, changes: dict[str, dict[int, int]], **more: Any) -> Any:
                wanted = fetched(changes, session=(first.session_id, epoch))
                return await client.ask(FETCH, 12, {**wanted, **more})

            def told(answer: Any) -> dict[int, list[tuple[int, bytes | None]]]:
                parts = [part for topic in answer.responses for part in topic.partitions]
                return {part.partition_index: values_in(part.records) for part in parts}

            assert told(await go_on(1, {"t": {2: 1}})) == {}, "nothing has changed"
            await client.produce("t", batch(b"y"), partition=1)
            assert told(await go_on(2, {})) == {1: [(1, b"y")]}
            forgotten = {"forgotten_topics_data": [{"topic": "t", "partitions": [1]}]}
            assert told(await go_on(3, {}, **forgotten)) == {}, "nobody asks for it any more"
            assert (await go_on(9, {})).error_code == kafka_codes.INVALID_FETCH_SESSION_EPOCH
            ended = await client.ask(FETCH, 12, fetched(places, session=(first.session_id, -1)))
            assert (ended.session_id, len(told(ended))) == (0, 3)
            assert (await go_on(4, {})).error_code == kafka_codes.FETCH_SESSION_ID_NOT_FOUND
            ids = [
                (await client.ask(FETCH, 12, fetched(places, session=(0, 0)))).session_id
                for _ in range(3)
            ]
            assert len(set(ids)) == 3
            assert ids[2] == 0, "there is room for two, and both are new"
            still = await client.ask(FETCH, 12, fetched({}, session=(ids[0], 1)))
            assert (still.error_code, still.session_id) == (0, ids[0])

    asyncio.run(run())


def test_what_is_on_the_disk_only_is_read_without_blocking() -> None:
    async def run() -> None:
        files = MemoryFiles()
        async with kafka_rig(files) as rig:
            client = await rig.connect()
            await client.create("t", 2)
            for partition in range(2):
                await client.produce("t", batch(bytes(500)), partition=partition)
            crashed = files.crash(KeepAll())
        async with kafka_rig(crashed) as rig:
            client = await rig.connect()
            path = f"/store/commitlog/{0:020d}"
            crashed.cold(path, 0, crashed.size(path))
            answer = await client.ask(FETCH, 12, fetched({"t": {0: 0, 1: 0}}))
            parts = answer.responses[0].partitions
            assert [values_in(part.records) for part in parts] == [[(0, bytes(500))]] * 2
            assert crashed.warm_calls > 0

    asyncio.run(run())


def test_no_message_of_rocketmqs_can_look_like_a_batch() -> None:
    async def run() -> None:
        async with kafka_rig() as rig:
            client = await rig.connect()
            await client.create("t")
            forged = Message(
                "t", 0, b"no batch", b"INNER_NUM\x011\x02", sys_flag=kafka_entries.KAFKA_FLAGS
            )
            with pytest.raises(MessageIllegal, match="store's own"):
                rig.broker.core.append(forged)
            assert (await client.fetch("t", 0)).high_watermark == 0

    asyncio.run(run())
