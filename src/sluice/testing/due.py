"""This module looks into a broker: what it has to do next, when, and whether it is done with all.

It also takes clients along when time jumps: who is connected was heard of just now, whatever the
clock says, and keeps its queues. Everything here belongs to the thread of the broker.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import NamedTuple, Protocol, TypeVar, runtime_checkable

from sluice.broker.core import BrokerCore
from sluice.broker.delay_units import LEAST_TIME_MS

T = TypeVar("T")


@runtime_checkable
class Carried(Protocol):
    """A service that waits for its clients, as Kafka's groups do for their members."""

    def carry(self, jump_ms: int) -> None: ...


class Look(NamedTuple):
    """What a broker is at."""

    is_quiet: bool  # all that is due is done, and whoever waits for it was told
    next_ms: int | None  # when there is something to do next
    written: int  # where the log ends: it moves whenever anything happens
    asked: int  # questions about transactions, ever


async def look(core: BrokerCore) -> Look:
    """Do what is due now, a step of it, and say what is left."""
    core.tick()
    await asyncio.sleep(0)
    next_ms = await ask(core, lambda: _next_ms(core))
    store = core.store
    is_quiet = (
        (next_ms is None or next_ms > core.now_ms())
        and not store.staged
        and store.confirmed >= store.log.written
        and not store.cold_reads.count
    )
    return Look(is_quiet, next_ms, store.log.written, core.transactions.asked_count)


async def ask(core: BrokerCore, ask: Callable[[], T]) -> T:
    """Ask the store something; where the disk has to say it, wait."""
    done: asyncio.Future[T] = asyncio.get_running_loop().create_future()

    def answered(answer: T | None, error: BaseException | None) -> None:
        if done.done():
            return
        if error is not None:
            done.set_exception(error)
        else:
            done.set_result(answer)  # type: ignore[arg-type]  # None may be an answer

    core.store.call(ask, answered)
    return await done


def _next_ms(core: BrokerCore) -> int | None:
    """When the next thing is due, of all that wait for a time. May raise ColdRead."""
    delays = core.delays
    delays.take_new()
    times = [item.due_ms for item in list(delays.batch)[:1]]
    for level, queue in delays.levels.items():
        cursor = max(delays.progress.cursors[level], queue.first)
        if cursor < queue.stop:
            position, _, due_ms = queue.one(cursor)
            # What has no plausible time is looked at, and found out, when the clock stands here.
            times.append(due_ms if position >= 0 and due_ms >= LEAST_TIME_MS else core.now_ms())
    times += [timer.due_ms for timer in delays.index.after(0, 1)]
    others = (core.transactions.table.next_ms(), core.pops.state.next_ms())
    times += [due_ms for due_ms in others if due_ms is not None]
    return min(times, default=None)


def carry(core: BrokerCore, jump_ms: int) -> None:
    """Time jumps: nobody who is there is gone because of it."""
    clients = core.clients
    clients.carry(jump_ms)
    core.locks.carry(jump_ms, clients.is_consumer)
    carry_waits(core, jump_ms)


def carry_waits(core: BrokerCore, jump_ms: int) -> None:
    """Whatever waits for clients, or holds their requests, ends so much later; below 0: earlier."""
    core.polls.carry(jump_ms)
    for service in core.services:
        if isinstance(service, Carried):
            service.carry(jump_ms)
