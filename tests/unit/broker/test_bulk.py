"""Bulk reads: stretches of a queue as they lie, filtered, and what is said where data is gone."""

from __future__ import annotations

from typing import Any

import numpy as np
import orjson
import pytest

from sluice.broker import filters
from sluice.errors import SubscriptionIllegal
from sluice.model import PropertyFilter
from sluice.protocol import records
from sluice.protocol.remoting import RemotingCommand
from sluice.protocol.remoting_codes import RequestCode as Request
from sluice.protocol.remoting_codes import ResponseCode as Response
from sluice.storage import bulk_reads
from tests.unit.broker.broker_kit import Rig, broker_config, running
from tests.unit.loops import run_once

MIB = 1 << 20


async def fetch(rig: Rig, offset: int, to: int, topic: str = "t", **more: Any) -> RemotingCommand:
    fields = {"topic": topic, "queueId": 0, "offset": offset, "toOffset": to, "maxBytes": MIB}
    return await rig.ask(Request.SLUICE_BULK_FETCH, {**fields, **more})


def entries(answer: RemotingCommand) -> list[records.Entry]:
    """The entries of an answer, found by the sizes behind them."""
    count = int(answer.ext["count"])
    data = bytes(answer.body)
    cut = len(data) - 4 * count
    result, at = [], 0
    for size in np.frombuffer(data[cut:], ">i4").tolist():
        result.append(records.decode(data, at))
        assert result[-1].size == size
        at += size
    assert at == cut
    return result


def bodies(answer: RemotingCommand) -> list[bytes]:
    assert answer.code == Response.SUCCESS, answer.remark
    return [bytes(entry.body) for entry in entries(answer)]


async def all_of(rig: Rig, to: int, **more: Any) -> list[bytes]:
    found: list[bytes] = []
    offset = 0
    while offset < to:
        answer = await fetch(rig, offset, to, **more)
        found += bodies(answer)
        assert int(answer.ext["nextOffset"]) > offset
        offset = int(answer.ext["nextOffset"])
    return found


def test_a_range_comes_whole_in_its_order_whatever_lies_between() -> None:
    async def work() -> None:
        async with running() as rig:
            await rig.make_topic("t")
            for number in range(200):
                await rig.send("t", b"%d" % number)
                if number % 3 == 0:
                    await rig.send("t", b"other queue", 1)
            answer = await fetch(rig, 0, 1000)
            assert bodies(answer) == [b"%d" % number for number in range(200)]
            assert [entry.queue_offset for entry in entries(answer)] == list(range(200))
            ext = answer.ext
            assert (ext["nextOffset"], ext["minOffset"], ext["maxOffset"]) == ("200", "0", "200")
            assert bodies(await fetch(rig, 5, 8)) == [b"5", b"6", b"7"], "not beyond toOffset"
            small = await fetch(rig, 5, 100, maxBytes=1)
            assert bodies(small) == [b"5"], "the first one whatever its size"
            assert small.ext["nextOffset"] == "6"
            assert await all_of(rig, 200, maxBytes=1000) == [b"%d" % n for n in range(200)]

    run_once(work())


def test_many_pieces_and_files_are_one_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work() -> None:
        async with running(
            store=broker_config().store.__class__(
                directory="/store",
                segment_bytes=64 * 1024,
                flush="async",
                disk_clean_ratio=1.0,
                disk_force_ratio=1.0,
                disk_refuse_ratio=1.0,
                message_bytes_max=8 * 1024,
            )
        ) as rig:
            await rig.make_topic("t")
            for number in range(150):
                await rig.send("t", b"%d-" % number + b"x" * 1900)
                await rig.send("t", b"other", 1)
            monkeypatch.setattr(bulk_reads, "UNITS_MAX", 90)
            found = await all_of(rig, 150)
            assert [body.partition(b"-")[0] for body in found] == [b"%d" % n for n in range(150)]
            assert len(rig.broker.store.log.segments) > 4

    run_once(work())


def test_filters_are_the_brokers_work() -> None:
    async def work() -> None:
        async with running() as rig:
            await rig.make_topic("t")
            for number in range(90):
                tag, key = "ABC"[number % 3], f"k{number % 10} all"
                await rig.send("t", b"%d" % number, TAGS=tag, KEYS=key, price=str(number))

            async def numbers(**more: str) -> list[int]:
                return [int(body) for body in await all_of(rig, 90, **more)]

            assert await numbers(tags="A") == list(range(0, 90, 3))
            assert await numbers(tags="A || C") == [n for n in range(90) if n % 3 != 1]
            assert await numbers(tags="nothing") == []
            assert await numbers(keys="k4") == list(range(4, 90, 10))
            assert await numbers(keys="k4 k7") == [n for n in range(90) if n % 10 in (4, 7)]
            assert await numbers(keys="all") == list(range(90))
            assert await numbers(keys="al") == []
            assert await numbers(sql="price > 80") == list(range(81, 90))
            assert await numbers(sql="price > 80", keys="k4 k5", tags="A") == [84]
            assert await numbers(keys="k5", tags="B") == [25, 55, 85]
            code, words = await rig.refused(
                Request.SLUICE_BULK_FETCH,
                {"topic": "t", "queueId": 0, "offset": 0, "toOffset": 9, "maxBytes": 9, "sql": "("},
            )
            assert code == Response.SUBSCRIPTION_PARSE_FAILED, words

    run_once(work())


def test_what_is_gone_is_said_with_the_next_good_offset() -> None:
    async def work() -> None:
        async with running() as rig:
            await rig.make_topic("t")
            empty = await fetch(rig, 0, 10)
            assert (empty.code, empty.ext["nextOffset"]) == (Response.PULL_NOT_FOUND, "0")
            for number in range(10):
                await rig.send("t", b"%d" % number)
            queue = rig.broker.store.queues["t", 0]
            queue.drop_before(4, 4)
            gone = await fetch(rig, 1, 10)
            assert (gone.code, gone.remark) == (Response.PULL_OFFSET_MOVED, "OFFSET_TOO_SMALL")
            assert (gone.ext["nextOffset"], gone.ext["maxOffset"]) == ("4", "10")
            assert bodies(await fetch(rig, 4, 6)) == [b"4", b"5"]
            end = await fetch(rig, 10, 11)
            assert (end.code, end.ext["nextOffset"]) == (Response.PULL_NOT_FOUND, "10")
            above = await fetch(rig, 11, 12)
            assert (above.code, above.remark) == (
                Response.PULL_OFFSET_MOVED,
                "OFFSET_OVERFLOW_BADLY",
            )
            assert above.ext["nextOffset"] == "10"

    run_once(work())


def test_an_entry_that_is_another_one_is_damaged_and_names_where_to_go_on() -> None:
    async def work() -> None:
        async with running() as rig:
            await rig.make_topic("t")
            for number in range(5):
                await rig.send("t", b"%d" % number)
            queue = rig.broker.store.queues["t", 0]
            unit = queue.unit_bytes
            queue.tail[2 * unit : 3 * unit] = queue.tail[3 * unit : 4 * unit]
            answer = await fetch(rig, 0, 5)
            assert answer.code == Response.SYSTEM_ERROR
            assert "does not match" in (answer.remark or "")
            assert answer.ext["nextOffset"] == "3"
            assert bodies(await fetch(rig, 3, 5)) == [b"3", b"4"]

    run_once(work())


def test_bad_requests_are_refused_with_what_is_wrong() -> None:
    async def work() -> None:
        async with running() as rig:
            await rig.make_topic("t")
            await rig.make_topic("shut", perm=2)
            good = {"topic": "t", "queueId": 0, "offset": 0, "toOffset": 5, "maxBytes": 100}
            for change, code, words in (
                ({"topic": "none"}, Response.TOPIC_NOT_EXIST, "topic[none] not exist"),
                ({"topic": "shut"}, Response.NO_PERMISSION, "forbidden"),
                ({"queueId": 2}, Response.INVALID_PARAMETER, "queueId[2] is illegal"),
                ({"offset": 5}, Response.INVALID_PARAMETER, "no range"),
                ({"offset": -1}, Response.INVALID_PARAMETER, "no range"),
                ({"maxBytes": 0}, Response.INVALID_PARAMETER, "maxBytes 0"),
                ({"maxBytes": 1 << 30}, Response.INVALID_PARAMETER, "maxBytes"),
                ({"keys": " "}, Response.SUBSCRIPTION_PARSE_FAILED, "0 keys"),
            ):
                refused = await rig.refused(Request.SLUICE_BULK_FETCH, {**good, **change})
                assert refused[0] == code, change
                assert words in refused[1], change
            where = {"topic": "t", "queueId": 0}
            for body in (
                b"",
                b"{}",
                b"[]",
                b"[[1]]",
                b'[["a", 2]]',
                b"[[1, 99999999999999999999]]",
            ):
                code, _ = await rig.refused(Request.SLUICE_RANGE_BYTES, where, body)
                assert code == Response.SYSTEM_ERROR, body

    run_once(work())


def test_a_broker_that_may_not_be_read_gives_nothing() -> None:
    async def work() -> None:
        async with running(permission="w") as rig:
            await rig.make_topic("t")
            assert (await fetch(rig, 0, 5)).code == Response.NO_PERMISSION

    run_once(work())


def test_the_bytes_of_ranges_are_told_exactly_or_by_samples(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def work() -> None:
        async with running() as rig:
            await rig.make_topic("t")
            for number in range(300):
                await rig.send("t", b"x" * (number % 7 + 1))
            true = [entry.size for entry in entries(await fetch(rig, 0, 300))]
            ranges = [[0, 300], [10, 20], [290, 999], [400, 500]]

            async def ask() -> Any:
                where = {"topic": "t", "queueId": 0}
                return await rig.json(Request.SLUICE_RANGE_BYTES, where, orjson.dumps(ranges))

            assert await ask() == [sum(true), sum(true[10:20]), sum(true[290:]), 0]
            monkeypatch.setattr(bulk_reads, "_SAMPLES", 5)
            monkeypatch.setattr(bulk_reads, "_SAMPLE_UNITS", 10)
            told = await ask()
            assert abs(told[0] - sum(true)) < sum(true) // 20
            assert told[1] == sum(true[10:20])

    run_once(work())


def test_topics_in_memory_are_read_too() -> None:
    async def work() -> None:
        async with running() as rig:
            await rig.make_topic("t", attributes="+storage=memory")
            for number in range(20):
                await rig.send("t", b"%d" % number, TAGS="AB"[number % 2])
            assert await all_of(rig, 20) == [b"%d" % number for number in range(20)]
            assert await all_of(rig, 20, tags="B") == [b"%d" % number for number in range(1, 20, 2)]

    run_once(work())


def test_a_key_filter_finds_whole_words_only_and_is_bounded() -> None:
    wanted = filters.accept_all("t", None, "a b.c", None)
    assert isinstance(wanted, PropertyFilter)
    for keys, verdict in (("a", 1), ("x a", 1), ("a x", 1), ("b.c", 1), ("bxc", 0), ("aa", 0)):
        data = f"\x02TAGS\x01q\x02KEYS\x01{keys}\x02".encode()
        assert wanted.test(data) is bool(verdict), keys
        assert wanted.screen is not None
        # A word that ends as one of them passes the screen, and is tested.
        assert wanted.screen.search(data) or not verdict, keys
    assert wanted.screen is not None
    assert not wanted.screen.search(b"\x02KEYS\x01ab bxc\x02")
    with pytest.raises(SubscriptionIllegal, match="keys: from 1 to"):
        filters.accept_all("t", None, " ".join(map(str, range(2000))), None)
