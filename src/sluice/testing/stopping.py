"""This module ends a broker as kill -9 ends a process, within a process that goes on.

First nobody reaches it or hears from it any more; then its disk must be made dead
(`FaultyFiles.is_dead`), so that nothing that is under way changes it; then it is buried. What was
written is in the files, as the system would keep it; what was not is lost.
"""

from __future__ import annotations

import asyncio
import contextlib

from sluice.broker.server import Broker


def cut_off(broker: Broker) -> None:
    """Close the port and all connections, without a word."""
    for listener in broker.listeners:
        listener.stop_accepting()
        for connection in list(listener.connections):
            connection.abort("killed")


async def bury(broker: Broker) -> None:
    """Let go of threads, files and the lock of the directory; nobody is told."""
    background, registering = broker._background, broker._registering
    assert background is not None, "started before it is killed"
    assert registering is not None
    broker._is_stopped = True
    tasks = [registering, *broker._tasks]
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    for nameserver in broker.registrar._nameservers:
        await nameserver.drop()
    broker.store.closed = True
    await asyncio.to_thread(background.close)
    await asyncio.sleep(0)  # what the threads had to say comes before the files go
    with contextlib.suppress(OSError):
        broker.store.release()
    for listener in broker.listeners:
        await listener.stop(0)
