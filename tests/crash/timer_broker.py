"""This module is the process that test_business_delays.py kills: it sends delayed messages to
itself and delivers them.

    python timer_broker.py DIRECTORY FIRST_ID POINT COUNT

It kills itself, as kill -9 does, when it comes to a point for the so-manieth time: `deliver` (it is
about to make an entry), `written` (those of a turn are in the file), `confirmed` (they are
confirmed), `note` (progress is staged). With the point `drain` it sends nothing; it ends when
nothing waits, and says what was delivered. Reports on standard output, one line each:

    sent ID DUE_MS          confirmed to the sender
    got ID STORE_MS         delivered, in the order of the queue; only by `drain`
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from functools import partial
from typing import Any

from sluice.broker.core import BrokerCore
from sluice.broker.delay_firing import UsualFired
from sluice.broker.delay_progress import blocking
from sluice.broker.topics import TopicSettings
from sluice.clock import wall_ms
from sluice.config import BrokerConfig, StoreConfig
from sluice.errors import SluiceError
from sluice.model import LOOPBACK_HOST, Message
from sluice.protocol import records
from sluice.storage.background import Threads
from sluice.storage.files import RealFiles
from sluice.storage.opening import open_store
from sluice.storage.store import Store

TOPIC = "orders"


def config(directory: str) -> StoreConfig:
    return StoreConfig(
        directory=directory,
        segment_bytes=1 << 20,
        queue_file_units=1000,
        key_index_slots=64,
        key_index_entries=4096,
        delay_levels="1s 2s",
        checkpoint_interval_ms=300,
        disk_clean_ratio=1.0,
        disk_force_ratio=1.0,
        disk_refuse_ratio=1.0,
    )


def report(*words: object) -> None:
    os.write(sys.stdout.fileno(), (" ".join(map(str, words)) + "\n").encode())


def void(_: object) -> None:
    return


def kill_at(target: Any, name: str, count: int) -> None:
    """Let the process die before the nth call of a method."""
    called = getattr(target, name)
    left = [count]

    def counted(*arguments: Any, **options: Any) -> Any:
        left[0] -= 1
        if not left[0]:
            os.kill(os.getpid(), signal.SIGKILL)
        return called(*arguments, **options)

    setattr(target, name, counted)


def arm(core: BrokerCore, point: str, count: int) -> None:
    delays = core.delays
    if point == "deliver":
        kill_at(UsualFired, "choose", count)
    elif point == "written":
        kill_at(core.store.flusher, "flush_to", count)
    elif point == "confirmed":
        kill_at(delays, "confirmed", count)
    elif point == "note":
        kill_at(delays, "_note", count)


async def main(directory: str, first: int, point: str, count: int) -> None:
    loop = asyncio.get_running_loop()
    background = Threads(lambda callback: void(loop.call_soon_threadsafe(callback)))
    settings = BrokerConfig(store=config(directory))
    store = open_store(settings.store, RealFiles(), background, wall_ms, LOOPBACK_HOST)
    core = BrokerCore(settings, store, wall_ms, loop.call_soon)
    if core.topics.get(TOPIC) is None:
        core.topics.put([TopicSettings(TOPIC, 1, 1)])
    core.start()
    arm(core, point, count)
    number = first
    while point != "drain" or _waits(core):
        if point != "drain":
            for _ in range(10):
                _send(core, number)
                number += 1
        core.tick()
        await asyncio.sleep(0.005)
    for entry in _delivered(store):
        report("got", bytes(entry.body).decode(), entry.store_ms)
    closed: asyncio.Future[SluiceError | None] = loop.create_future()
    core.end_turn()
    store.shut(closed.set_result)
    assert await closed is None
    await asyncio.to_thread(background.close)


def _waits(core: BrokerCore) -> bool:
    delays, store = core.delays, core.store
    is_confirmed = store.confirmed >= store.log.end
    return bool(delays.waiting_timers or delays.waiting_levels or not is_confirmed)


def _send(core: BrokerCore, number: int) -> None:
    if number % 5 == 0:
        due_ms, asked = wall_ms() + 1_000, b"DELAY\x011\x02"
    else:
        due_ms = wall_ms() + number * 37 % 200
        asked = b"TIMER_DELIVER_MS\x01%d\x02" % due_ms
    message = Message(TOPIC, 0, b"%d" % number, asked, born_ms=wall_ms())

    def confirmed(error: SluiceError | None) -> None:
        assert error is None
        report("sent", number, due_ms)

    core.append(core.delays.requested_form(message), confirmed)


def _delivered(store: Store) -> list[records.Entry]:
    found: list[records.Entry] = []
    while len(found) < store.max_offset(TOPIC, 0):
        offset = len(found)
        read = partial(store.read, TOPIC, 0, offset, count_max=500, bytes_max=1 << 20)
        found += map(records.decode, blocking(read).messages)
    return found


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2]), sys.argv[3], int(sys.argv[4])))
