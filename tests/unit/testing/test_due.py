"""This module tests what a clock asks a broker: what is due when, and whose time a request has."""

from __future__ import annotations

import asyncio

from sluice import Message
from sluice.broker.half_table import HalfTable
from sluice.client.aio import producer
from sluice.clock import wall_ms
from sluice.link import RemotingLink
from sluice.protocol.remoting import RemotingCommand
from sluice.protocol.remoting_codes import RequestCode as Request
from sluice.testing import Clock, LiveBroker
from sluice.testing.clock import time_of_clients
from tests.unit.broker.pop_kit import INVISIBLE_MS, TOPIC, PopBench, messages, pop_fields


def ask(broker: LiveBroker, code: int, fields: dict[str, object]) -> RemotingCommand:
    async def work() -> RemotingCommand:
        link = await RemotingLink.open(broker.broker_address)
        ext = {name: str(value) for name, value in fields.items()}
        answer = await link.request(code, ext, b"", 60)
        await link.close()
        return answer

    return asyncio.run(work())


def test_when_popped_messages_come_again() -> None:
    bench = PopBench()
    state = bench.core.pops.state
    assert state.next_ms() is None
    bench.put(b"1")
    [taken] = bench.pop()
    assert state.next_ms() == bench.core.now_ms() + INVISIBLE_MS
    bench.ack(taken)
    assert state.next_ms() is None


def test_when_half_messages_are_looked_at() -> None:
    table = HalfTable()
    assert table.next_ms() is None
    table.add(0, 100, 5_000)
    table.add(1, 200, 4_000)
    assert table.next_ms() == 4_000
    table.schedule(1, 9_000)
    assert table.next_ms() == 5_000
    table.close(0)
    assert table.next_ms() == 9_000
    table.close(1)
    assert table.next_ms() is None


def test_pops_of_clients_with_the_machines_time_are_not_late(
    sluice_broker: LiveBroker, sluice_clock: Clock
) -> None:
    sluice_broker.create_topic(TOPIC, 1)
    sluice_clock.advance(days=2)
    sending = sluice_broker.producer()
    for body in ("one", "two"):
        sending.send(Message(TOPIC, body))
    fields = pop_fields(bornTime=wall_ms(), invisibleTime=60_000)
    popped = ask(sluice_broker, Request.POP_MESSAGE, fields)
    assert [bytes(entry.body) for entry in messages(popped)] == [b"one", b"two"]
    assert sluice_clock.next_ms() == sluice_clock.now_ms() + 60_000
    sluice_clock.advance(seconds=59)
    again = ask(sluice_broker, Request.POP_MESSAGE, {**fields, "pollTime": 0})
    assert not again.body
    sluice_clock.advance(seconds=1)
    again = ask(sluice_broker, Request.POP_MESSAGE, {**fields, "bornTime": wall_ms()})
    assert sorted(bytes(entry.body) for entry in messages(again)) == [b"one", b"two"]


def test_clients_have_the_time_of_a_clock_and_then_their_own_again() -> None:
    clock = Clock()
    clock.stop()
    with time_of_clients(clock):
        assert vars(producer)["wall_ms"] == clock.now_ms
    assert vars(producer)["wall_ms"] is wall_ms
