"""A broker that stops: what it took is safe and answered, who waits is told, nobody is left."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace
from typing import Any

import pytest

from sluice.broker import server
from sluice.errors import LinkLost, Stopping
from sluice.protocol.remoting_codes import RequestCode as Request
from sluice.protocol.remoting_codes import ResponseCode as Response
from sluice.storage.memory_files import KeepNothing, MemoryFiles
from sluice.storage.store import ColdRead
from tests.unit.broker.broker_kit import (
    FLAG_SUBSCRIPTION,
    FLAG_SUSPEND,
    SlowDisk,
    broker_config,
    running,
    send_fields,
)
from tests.unit.loops import run_once, until

COUNT = 50
SYNC = replace(broker_config().store, flush="sync")


def test_what_was_taken_is_answered_and_safe_and_what_comes_later_is_refused() -> None:
    async def work() -> None:
        disk = SlowDisk()
        async with running(files=disk, store=SYNC) as rig:
            await rig.make_topic("orders")
            await rig.make_topic("empty")
            waits = asyncio.create_task(
                rig.pull("empty", 0, flags=FLAG_SUBSCRIPTION | FLAG_SUSPEND)
            )
            await until(lambda: rig.broker.core.polls.held_count == 1)
            with disk.hanging():
                sends = [
                    asyncio.create_task(
                        rig.ask(Request.SEND_MESSAGE_V2, send_fields("orders"), b"%d" % number)
                    )
                    for number in range(COUNT)
                ]
                await until(lambda: rig.broker.core.stats.put >= COUNT)
                late = await rig.connect()
                await rig.ask(Request.GET_BROKER_CONFIG, link=late)
                stopping = asyncio.create_task(rig.broker.stop())
                held = await waits
                assert held.code == Response.PULL_NOT_FOUND
                # The disk still has to do its part: who asks now may go elsewhere, or come again.
                for code, fields in (
                    (Request.SEND_MESSAGE_V2, send_fields("orders")),
                    (Request.PULL_MESSAGE, {}),
                ):
                    refused = await rig.ask(code, fields, b"late", late)
                    assert (refused.code, refused.remark) == (14, "the broker stops")
                assert [send.result() for send in sends if send.done()] == []
            answers = await asyncio.gather(*sends)
            assert [answer.code for answer in answers] == [0] * COUNT
            await stopping
            await until(lambda: not late.is_open)
        after = disk.crash(KeepNothing())
        async with running(files=after, store=SYNC) as rig:
            found = {int(answer.ext["queueOffset"]) for answer in answers}
            assert found == set(range(COUNT))
            assert rig.broker.store.max_offset("orders", 0) == COUNT

    run_once(work())


def test_under_load_everything_acknowledged_is_there_afterwards() -> None:
    async def work() -> None:
        disk = SlowDisk()
        acknowledged: dict[int, bytes] = {}
        unanswered = 0
        async with running(files=disk, store=SYNC) as rig:
            await rig.make_topic("orders")
            links = [await rig.connect() for _ in range(8)]

            async def load(number: int) -> int:
                for count in range(10_000):
                    body = b"%d of %d" % (count, number)
                    try:
                        answer = await rig.ask(
                            Request.SEND_MESSAGE_V2, send_fields("orders"), body, links[number]
                        )
                    except LinkLost:
                        return 1
                    if answer.code:
                        assert answer.code == Response.SERVICE_NOT_AVAILABLE
                        return 0
                    acknowledged[int(answer.ext["queueOffset"])] = body
                raise AssertionError("the broker never stopped")

            loads = [asyncio.create_task(load(number)) for number in range(len(links))]
            await until(lambda: len(acknowledged) > 200)
            await rig.broker.stop()
            unanswered = sum(await asyncio.gather(*loads))
        assert len(acknowledged) > 200
        async with running(files=disk.crash(KeepNothing()), store=SYNC) as rig:
            highest = rig.broker.store.max_offset("orders", 0)
            # A message whose answer was lost with the connection may be there; it is sent again.
            assert len(acknowledged) <= highest <= len(acknowledged) + unanswered
            for offset, body in acknowledged.items():
                pulled = await rig.pull("orders", offset, maxMsgNums=1)
                assert body in bytes(pulled.body)

    run_once(work())


def test_a_read_that_outlasts_the_stop_is_refused_and_begins_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(server, "_READ_OUT_SECONDS", 0.0)
    gate, rounds = threading.Event(), 0
    told: list[BaseException | None] = []
    complaints: list[dict[str, Any]] = []

    def wait() -> None:
        assert gate.wait(60)

    def ask() -> None:
        nonlocal rounds
        rounds += 1
        raise ColdRead(wait)

    async def work() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, what: complaints.append(what))
        broker = server.Broker(broker_config(), files=MemoryFiles())
        await broker.start()
        broker.store.call(ask, lambda _, error: told.append(error))
        stopping = asyncio.create_task(broker.stop())
        background = broker._background
        assert background is not None
        await until(lambda: background._closed)
        gate.set()
        await stopping
        await until(lambda: told or complaints)

    run_once(work())
    assert complaints == []
    assert isinstance(told[0], Stopping)
    assert (len(told), rounds) == (1, 1)
