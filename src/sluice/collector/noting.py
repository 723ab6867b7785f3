"""This module writes places down while the collector runs, many changes with one write.

One task writes; while it does, further changes gather for the next write. Who needs a place to be
durable waits for the write after it asked. Where the directory cannot be written, nothing is sent
until it can: each message that is not noted would be sent again after a crash.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Final

from sluice.collector.places import PlaceBook
from sluice.errors import ConfigError

log_lines = logging.getLogger("sluice.collector")

_REST_SECONDS: Final = 0.05  # between two writes
_AGAIN_SECONDS: Final = 1.0


class Noter:
    """Keeps a book's file at its heels."""

    def __init__(self, book: PlaceBook) -> None:
        self._book = book
        self._changed = asyncio.Event()
        self._healthy = asyncio.Event()
        self._healthy.set()
        self._waiting: list[asyncio.Future[None]] = []
        self._writing: asyncio.Future[None] | None = None
        self._task = asyncio.create_task(self._run())

    def changed(self) -> None:
        """A place has changed; it is written soon."""
        self._changed.set()

    async def noted(self) -> None:
        """Returns when everything that is in the book now is durable."""
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(done)
        self._changed.set()
        await done

    async def healthy(self) -> None:
        """Returns at once while places can be written."""
        await self._healthy.wait()

    async def close(self) -> None:
        """Write what is left, once; raises where that fails."""
        self._task.cancel()
        # Its last write goes on in a thread: it must not come after the one that is made here.
        await asyncio.gather(self._task, return_exceptions=True)
        if self._writing is not None:
            await asyncio.gather(self._writing, return_exceptions=True)
        await self._write()

    async def _run(self) -> None:
        while True:
            await self._changed.wait()
            self._changed.clear()
            await self._write_until_done()
            await asyncio.sleep(_REST_SECONDS)

    async def _write_until_done(self) -> None:
        while True:
            try:
                await self._write()
            except ConfigError as error:
                if self._healthy.is_set():
                    log_lines.error("%s; nothing is sent until they can", error)
                self._healthy.clear()
                await asyncio.sleep(_AGAIN_SECONDS)
            else:
                if not self._healthy.is_set():
                    log_lines.warning("%s can be written again", self._book.directory)
                self._healthy.set()
                return

    async def _write(self) -> None:
        waiting, self._waiting = self._waiting, []
        try:
            image = self._book.image()
            self._writing = asyncio.ensure_future(asyncio.to_thread(self._book.write, image))
            await asyncio.shield(self._writing)
        except BaseException:
            self._waiting += waiting
            raise
        for done in waiting:
            if not done.done():
                done.set_result(None)
