"""This module drives a store as an event loop would: producers with one append in flight each.

A turn stages one append of every producer that is not waiting, writes them with one call, and then
takes what the background brings back. Nobody else touches the store, so there is no lock.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Literal

from sluice.clock import wall_ms
from sluice.config import StoreConfig
from sluice.errors import SluiceError
from sluice.model import Message
from sluice.storage.background import Threads
from sluice.storage.blocking import pack_host
from sluice.storage.files import RealFiles
from sluice.storage.opening import open_store
from sluice.storage.store import ColdRead, ReadResult

TICK_S = 0.05
BORN_MS = 1_700_000_000_000
STORE_HOST = pack_host("127.0.0.1", 10911)
QUEUES_PER_TOPIC = 1_000


@dataclass(frozen=True, slots=True)
class Load:
    """What is appended: how large, to how many queues, in which portions, by how many producers."""

    body_bytes: int
    queue_count: int
    batch: int = 1
    producers: int = 64

    def queues(self) -> list[tuple[str, int]]:
        """(topic, queue id) of every queue."""
        return [
            (f"bench-{number // QUEUES_PER_TOPIC}", number % QUEUES_PER_TOPIC)
            for number in range(self.queue_count)
        ]

    def messages(self) -> Iterator[Message]:
        """Messages without end; a portion goes to one queue, the next portion to the next queue."""
        body = bytes(range(256)) * (self.body_bytes // 256 + 1)
        body = body[: self.body_bytes]
        number = 0
        for topic, queue_id in cycle(self.queues()):
            for _ in range(self.batch):
                number += 1
                # What Apache's client and broker put on a message of a plain producer.
                properties = b"UNIQ_KEY\x01%032X\x02TAGS\x01TagA\x02WAIT\x01true\x02" % number
                yield Message(topic, queue_id, body, properties, born_ms=BORN_MS)


class Driver:
    """An open store and the turns of its owner."""

    def __init__(self, directory: Path, flush: Literal["sync", "async"]) -> None:
        config = StoreConfig(
            directory=str(directory),
            flush=flush,
            # The benchmark deletes its stores itself; only a full disk may refuse.
            disk_clean_ratio=0.98,
            disk_force_ratio=0.99,
            disk_refuse_ratio=0.995,
        )
        self._returned: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._threads = Threads(self._returned.put)
        self.store = open_store(config, RealFiles(), self._threads, wall_ms, STORE_HOST)
        self._next_tick = 0.0
        self._error: SluiceError | None = None

    def append(self, load: Load, *, seconds: float = 0.0, count: int = 0) -> float:
        """Append for so many seconds, or so many messages; confirmed messages per second."""
        store, messages, batch = self.store, load.messages(), load.batch
        ready = deque(range(load.producers))
        confirmed = 0

        def done(error: SluiceError | None) -> None:
            nonlocal confirmed
            if error is not None:
                self._error = error
            confirmed += batch
            ready.append(0)

        begin = now = time.perf_counter()
        deadline = begin + seconds
        while (now < deadline) if seconds else (confirmed < count):
            for _ in range(len(ready)):
                ready.popleft()
                if batch == 1:
                    store.stage(next(messages), done)
                else:
                    store.stage_batch([next(messages) for _ in range(batch)], done)
            store.write_staged()
            self._take(wait=not ready)
            now = time.perf_counter()
            self._tick(now)
        rate = confirmed / (now - begin)
        while len(ready) < load.producers:
            self._take(wait=True)
        return rate

    def read(self, topic: str, queue_id: int, offset: int, count_max: int) -> ReadResult:
        """Read; what is not in memory is fetched on the spot, as there is nobody else to serve."""
        while True:
            try:
                return self.store.read(topic, queue_id, offset, count_max=count_max)
            except ColdRead as cold:
                cold.work()

    def settle(self) -> None:
        """Let everything that is under way end: flush, index, checkpoint."""
        self._await(self._flush)
        self._await(self.store.housekeeping.checkpoint)

    def close(self) -> None:
        self._await(self.store.shut)
        self._threads.close()

    def _flush(self, done: Callable[[SluiceError | None], None]) -> None:
        flusher, written = self.store.flusher, self.store.log.written
        if flusher.flushed >= written:
            done(None)
        else:
            flusher.wait(written, done)
            flusher.flush_to(written)

    def _await(self, start: Callable[[Callable[[BaseException | None], None]], None]) -> None:
        outcome: list[BaseException | None] = []
        start(outcome.append)
        while not outcome:
            self._take(wait=True)
        if outcome[0] is not None:
            raise outcome[0]

    def _take(self, *, wait: bool) -> None:
        """Run what the background has brought back; wait for something if there is nothing."""
        try:
            while True:
                self._returned.get(block=wait, timeout=TICK_S)()
                wait = False
        except Empty:
            pass
        if self._error is not None:
            raise self._error
        if wait:
            self._tick(time.perf_counter())

    def _tick(self, now: float) -> None:
        if now >= self._next_tick:
            self._next_tick = now + TICK_S
            self.store.tick()
