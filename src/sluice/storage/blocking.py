"""This module is the store for callers that may wait: tools, tests, programs without an event loop.

Every method can be called from any thread. One lock makes the caller the store's owner for the
moment; waiting for the disk happens outside of it, so that appends of many threads share one flush.
"""

from __future__ import annotations

import ipaddress
import threading
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar

from sluice.clock import wall_ms
from sluice.config import StoreConfig
from sluice.errors import SluiceError
from sluice.model import Message, Placed, message_id
from sluice.storage.background import Background, Threads
from sluice.storage.files import Files, RealFiles
from sluice.storage.flush import Confirmed
from sluice.storage.opening import open_store
from sluice.storage.reads import Accept, ReadResult
from sluice.storage.state import Change
from sluice.storage.store import ColdRead, Store

T = TypeVar("T")
_TICK_SECONDS = 0.05


class BlockingStore:
    """A store with a lock around it and a thread for its timers."""

    def __init__(self, open_with: Callable[[Background], Store]) -> None:
        self._lock = threading.RLock()
        self._threads = Threads(self._post)
        with self._lock:
            try:
                self.store = open_with(self._threads)
            except BaseException:
                self._threads.close()
                raise
        self._stop = threading.Event()
        self._ticker = threading.Thread(target=self._tick, name="sluice-ticks", daemon=True)
        self._ticker.start()

    @classmethod
    def open(
        cls,
        config: StoreConfig,
        *,
        store_host: tuple[str, int] = ("127.0.0.1", 10911),
        files: Files | None = None,
        now_ms: Callable[[], int] = wall_ms,
        progress: Callable[[int, int], None] | None = None,
    ) -> Self:
        """Open the store in `config.directory`."""
        disk = files if files is not None else RealFiles()
        packed = pack_host(*store_host)
        return cls(
            lambda background: open_store(config, disk, background, now_ms, packed, progress)
        )

    def _post(self, callback: Callable[[], None]) -> None:
        with self._lock:
            callback()

    def _tick(self) -> None:
        while not self._stop.wait(_TICK_SECONDS):
            with self._lock:
                self.store.tick()

    # ------------------------------------------------------------------------------------ appending

    def put(self, message: Message) -> Placed:
        """Append a message and wait until it is confirmed."""
        return self._confirmed(lambda done: self.store.stage(message, done))

    def put_batch(self, messages: Sequence[Message]) -> list[Placed]:
        """Append messages together and wait until all are confirmed."""
        return self._confirmed(lambda done: self.store.stage_batch(messages, done))

    def change(self, changes: Sequence[Change]) -> None:
        """Change settings and wait until that is durable."""
        self._confirmed(lambda done: self.store.change(changes, done))

    def delete_topic(self, topic: str) -> None:
        """Forget a topic and its queues, and wait until that is durable."""
        self._confirmed(lambda done: self.store.delete_topic(topic, done))

    def _confirmed(self, stage: Callable[[Confirmed], T]) -> T:
        finished = threading.Event()
        errors: list[SluiceError] = []

        def done(error: SluiceError | None) -> None:
            if error is not None:
                errors.append(error)
            finished.set()

        with self._lock:
            result = stage(done)
            self.store.write_staged()
        finished.wait()
        if errors:
            raise errors[0]
        return result

    # -------------------------------------------------------------------------------------- reading

    def _ask(self, ask: Callable[[], T]) -> T:
        while True:
            try:
                with self._lock:
                    return ask()
            except ColdRead as cold:
                cold.work()

    def read(
        self,
        topic: str,
        queue_id: int,
        offset: int,
        *,
        count_max: int = 32,
        bytes_max: int = 256 * 1024,
        accept: Accept | None = None,
    ) -> ReadResult:
        return self._ask(
            lambda: self.store.read(
                topic, queue_id, offset, count_max=count_max, bytes_max=bytes_max, accept=accept
            )
        )

    def min_offset(self, topic: str, queue_id: int) -> int:
        return self._ask(lambda: self.store.min_offset(topic, queue_id))

    def max_offset(self, topic: str, queue_id: int) -> int:
        return self._ask(lambda: self.store.max_offset(topic, queue_id))

    def offset_for_time(
        self, topic: str, queue_id: int, when_ms: int, *, upper: bool = False
    ) -> int:
        return self._ask(lambda: self.store.offset_for_time(topic, queue_id, when_ms, upper=upper))

    def entry_at(self, position: int) -> memoryview | None:
        return self._ask(lambda: self.store.entry_at(position))

    def query_key(self, topic: str, key: str, *, count_max: int = 64) -> list[memoryview]:
        """Entries with a key, newest first."""
        found: list[memoryview] = self._result(
            lambda done: self.store.query_key(topic, key, done, count_max=count_max)
        )
        return found

    def _result(self, start: Callable[[Callable[..., None]], None]) -> Any:
        finished = threading.Event()
        outcome: list[Any] = []

        def done(result: Any, error: BaseException | None) -> None:
            outcome.extend((result, error))
            finished.set()

        with self._lock:
            start(done)
        finished.wait()
        if outcome[1] is not None:
            raise outcome[1]
        return outcome[0]

    # ----------------------------------------------------------------------- settings and positions

    def table(self, name: str) -> dict[str, Any]:
        with self._lock:
            return dict(self.store.table(name))

    def commit_offset(self, group: str, topic: str, queue_id: int, offset: int) -> None:
        with self._lock:
            self.store.commit_offset(group, topic, queue_id, offset)

    def committed_offset(self, group: str, topic: str, queue_id: int) -> int | None:
        with self._lock:
            return self.store.committed_offset(group, topic, queue_id)

    def checkpoint(self) -> None:
        """Bring queues, tables and index to the disk now."""
        self._result(lambda done: self.store.housekeeping.checkpoint(lambda e: done(None, e)))

    def message_id(self, placed: Placed) -> str:
        return message_id(self.store.encoder.store_host, placed.position)

    # -------------------------------------------------------------------------------------- closing

    def close(self) -> None:
        """Close in order; a second call does nothing."""
        if self._stop.is_set():
            return
        self._stop.set()
        self._ticker.join()
        try:
            self._result(lambda done: self.store.shut(lambda error: done(None, error)))
        finally:
            self._threads.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def pack_host(host: str, port: int) -> bytes:
    """An address as entries carry it."""
    return ipaddress.ip_address(host).packed + port.to_bytes(4, "big")
