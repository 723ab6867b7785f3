"""This module makes small stores for the tests beside it, on a simulated and on a real disk."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sluice.config import StoreConfig
from sluice.errors import SluiceError
from sluice.model import LOOPBACK_HOST, Message, Placed
from sluice.protocol import records
from sluice.storage.background import Background, Inline, Steps
from sluice.storage.blocking import BlockingStore
from sluice.storage.memory_files import KeepAll, KeepPolicy, MemoryFiles
from sluice.storage.opening import open_store
from sluice.storage.store import ColdRead, ReadResult, Store

ROOT = "/store"
SEGMENT_BYTES = 4096
BEGIN_MS = 1_794_772_393_000


def small_config(directory: str = ROOT, **changes: Any) -> StoreConfig:
    """Settings with which a few messages fill files of every kind."""
    values: dict[str, Any] = {
        "segment_bytes": SEGMENT_BYTES,
        "queue_file_units": 16,
        "key_index_slots": 16,
        "key_index_entries": 64,
        "disk_clean_ratio": 1.0,
        "disk_force_ratio": 1.0,
        "disk_refuse_ratio": 1.0,
        **changes,
    }
    return StoreConfig(directory=directory, **values)


class Disk:
    """A store on the simulated disk, with a clock that a test turns."""

    def __init__(self, background: Background | None = None, **changes: Any) -> None:
        self.files = MemoryFiles()
        self.now_ms = BEGIN_MS
        self.config = small_config(**changes)
        self.background: Background = background if background is not None else Inline()
        self.store: Store

    def open(self) -> Store:
        self.store = open_store(
            self.config, self.files, self.background, lambda: self.now_ms, LOOPBACK_HOST
        )
        return self.store

    def close(self) -> None:
        outcome: list[SluiceError | None] = []
        self.store.shut(outcome.append)
        if isinstance(self.background, Steps):
            self.background.run_all()
        assert outcome == [None]

    def reopen(self) -> Store:
        self.close()
        return self.open()

    def crash(self, keep: KeepPolicy | None = None) -> None:
        """What the disk holds after a crash becomes the disk; the store is gone."""
        self.files = self.files.crash(keep if keep is not None else KeepAll())
        if isinstance(self.background, Steps):
            self.background = Steps()

    def put(self, topic: str, queue_id: int, body: bytes, properties: bytes = b"") -> Placed:
        """Append one message and see it confirmed; only with `Inline`."""
        return self.put_message(Message(topic, queue_id, body, properties))

    def put_message(self, message: Message) -> Placed:
        outcome: list[SluiceError | None] = []
        placed = self.store.stage(message, outcome.append)
        self.store.write_staged()
        assert outcome == [None]
        return placed

    def fill(self, count: int, topic: str = "t", queues: int = 2, body_bytes: int = 200) -> None:
        for number in range(count):
            self.put(topic, number % queues, b"%0*d" % (body_bytes, number))

    def fill_staged(self, count: int, topic: str = "t", queues: int = 2) -> None:
        """Write messages without waiting for them."""
        for number in range(count):
            self.store.stage(Message(topic, number % queues, b"%0200d" % number))
        self.store.write_staged()

    def bodies(self, topic: str, queue_id: int) -> dict[int, bytes]:
        """Every message of a queue that can be read, by offset."""
        return read_all(lambda offset: self.read(topic, queue_id, offset, count_max=7))

    def read(self, topic: str, queue_id: int, offset: int, **limits: Any) -> ReadResult:
        """Read, also what is on the disk only."""
        while True:
            try:
                return self.store.read(topic, queue_id, offset, **limits)
            except ColdRead as cold:
                cold.work()

    def paths(self, directory: str) -> Iterator[str]:
        """All files below a directory."""
        for name in self.files.names(directory):
            path = f"{directory}/{name}"
            if self.files.is_directory(path):
                yield from self.paths(path)
            else:
                yield path

    def contents(self) -> dict[str, bytes]:
        """Every byte of the store but the lock, which is made before anything is looked at."""
        paths = [path for path in self.paths(ROOT) if path != f"{ROOT}/lock"]
        return {path: self.files.read(path, 1 << 30) for path in paths}

    def write(self, path: str, at: int, data: bytes) -> None:
        """Somebody else writes into a file."""
        file = self.files.open(path)
        file.pwritev([data], at)
        file.sync()
        file.close()

    def cut(self, path: str, size: int) -> None:
        file = self.files.open(path)
        file.resize(size)
        file.sync()
        file.close()


def read_all(read: Callable[[int], ReadResult]) -> dict[int, bytes]:
    """Follow a queue from its beginning to its end."""
    found: dict[int, bytes] = {}
    offset = read(0).min_offset
    while True:
        result = read(offset)
        for entry in map(records.decode, result.messages):
            assert entry.queue_offset not in found, "no entry is served twice"
            found[entry.queue_offset] = bytes(entry.body)
        if offset >= result.max_offset:
            return found
        assert result.next_offset > offset, "a reader gets on"
        offset = result.next_offset


@contextmanager
def real_store(directory: Path, **changes: Any) -> Iterator[BlockingStore]:
    with BlockingStore.open(small_config(str(directory), **changes)) as store:
        yield store


def tree_digest(directory: Path) -> str:
    """Names, lengths, contents and times of everything below a directory."""
    digest = hashlib.sha256()
    for folder, folders, names in os.walk(directory):
        folders.sort()
        for name in sorted(names):
            path = Path(folder, name)
            status = path.stat()
            digest.update(f"{path} {status.st_size} {status.st_mtime_ns}\n".encode())
            if name != "lock":  # closing it would give away the lock that this process holds
                digest.update(path.read_bytes())
    return digest.hexdigest()


def flip(path: Path, at: int, mask: int = 1) -> None:
    """Change one byte of a real file."""
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ mask]))
