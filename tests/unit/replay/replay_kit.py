"""This module makes recordings without a broker, time that only tests move, and disks that fill."""

from __future__ import annotations

import asyncio
import errno
import heapq
import io
from collections.abc import Coroutine, Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.fs as filesystems

from sluice.model import Message
from sluice.protocol import records
from sluice.replay.fetching import Fetcher, Found, Lost, Piece
from sluice.replay.manifest import Manifest, read_manifest
from sluice.replay.places import Place, open_place
from sluice.replay.recording import Limits, Recorder
from sluice.spark.cluster import Chunk, Queue

HOST = bytes([127, 0, 0, 1, 0, 0, 0x2A, 0x9F])
START_MS = 1_700_000_000_000
NOW_MS = START_MS + 3_600_000


def queue(number: int = 0, topic: str = "orders") -> Queue:
    return Queue(topic, "broker-a", number)


def piece(source: Queue, start: int, messages: Sequence[Message], store_ms: int = NOW_MS) -> Piece:
    """What a bulk read of these messages brings, the first at offset `start`."""
    encoder = records.Encoder(HOST, with_crc=True, body_bytes_max=1 << 24, entry_bytes_max=1 << 24)
    topic = source.topic.encode()
    entries = []
    for offset, message in enumerate(messages, start):
        size = encoder.measure(message, topic)
        entries.append(encoder.encode(message, topic, size, offset, 4096, store_ms + offset))
    sizes = np.array([len(entry) for entry in entries], np.int64)
    return Piece(source, start, Chunk(b"".join(entries), sizes, start + len(entries)))


def message(source: Queue, body: bytes, time_ms: int = 0, **properties: str) -> Message:
    """A message born so long after the start."""
    packed = records.format_properties(properties)
    return Message(source.topic, source.queue_id, body, packed, born_ms=START_MS + time_ms)


class GivenFetcher(Fetcher):
    """Brings what a test gives it."""

    def __init__(self, found: Sequence[Found], items: Sequence[Piece | Lost | Found]) -> None:
        self._given = list(items)
        self._queues = list(found)
        self.behind = 0
        self.is_stopped = False
        self.failure: BaseException | None = None

    def begin(self) -> list[Found]:
        return self._queues

    def stop(self) -> None:
        self.is_stopped = True

    def next(self, timeout_seconds: float) -> Piece | Lost | Found | None:
        if self._given:
            return self._given.pop(0)
        if self.failure is not None:
            raise self.failure
        return None


def record(
    place: Place | Path,
    pieces: Sequence[Piece | Lost | Found],
    limits: Limits | None = None,
    found: Sequence[Found] | None = None,
) -> Recorder:
    """Record these pieces, on top of what the place has."""
    if isinstance(place, Path):
        place = open_place("--to", str(place))
    place.make()
    manifest = read_manifest(place) or Manifest(NOW_MS, NOW_MS)
    if found is None:
        first = {each[0]: each[1] for each in reversed(pieces)}
        found = [Found(source, start) for source, start in sorted(first.items())]
    fetcher = GivenFetcher(found, pieces)
    recorder = Recorder(place, manifest, fetcher, limits or Limits(), now_ms=lambda: NOW_MS)
    recorder.run()
    assert fetcher.is_stopped
    return recorder


def recording(directory: Path, times: Mapping[int, Sequence[int]], topic: str = "orders") -> Place:
    """A recording of queues with messages born at these times; bodies say queue and number."""
    pieces = []
    for number, born in times.items():
        source = queue(number, topic)
        messages = [
            message(source, f"{number}/{index}".encode(), time, KEYS=f"k{index}")
            for index, time in enumerate(born)
        ]
        pieces.append(piece(source, 0, messages))
    record(directory, pieces)
    return open_place("DIR", str(directory))


class VirtualTime:
    """Time that jumps to the next moment for which somebody waits."""

    def __init__(self) -> None:
        self.seconds = 1000.0
        self._sleepers: list[tuple[float, int, asyncio.Future[None]]] = []
        self._numbers = count()

    def now(self) -> float:
        return self.seconds

    async def pause(self, seconds: float) -> None:
        woken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._sleepers, (self.seconds + seconds, next(self._numbers), woken))
        await woken

    def run(self, work: Coroutine[Any, Any, None]) -> None:
        """Run something until it is done."""
        asyncio.run(self._drive(work))

    async def _drive(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        while not task.done():
            for _ in range(10):
                await asyncio.sleep(0)
            if self._sleepers and not task.done():
                self.seconds, _, woken = heapq.heappop(self._sleepers)
                woken.set_result(None)
            elif not task.done():
                await asyncio.sleep(0.001)
        task.result()


class _Filling(io.RawIOBase):
    """A stream to a disk with so much room."""

    def __init__(self, inner: Any, disk: FullDisk) -> None:
        self._inner = inner
        self._disk = disk

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        if self._disk.room_bytes is not None:
            self._disk.room_bytes -= len(data)
            if self._disk.room_bytes < 0:
                raise OSError(errno.ENOSPC, "No space left on device")
        return int(self._inner.write(data))

    def close(self) -> None:
        if not self.closed:
            self._inner.close()
        super().close()


class FullDisk(filesystems.FileSystemHandler):  # type: ignore[misc]
    """A file system of pyarrow's generic kind, as a bucket is one, that may have no room."""

    def __init__(self, directory: Path, room_bytes: int | None = None) -> None:
        self.directory = directory
        self.room_bytes = room_bytes
        self._files = filesystems.SubTreeFileSystem(str(directory), filesystems.LocalFileSystem())

    def place(self, base: str = "bucket") -> Place:
        return Place(f"mem://{base}", filesystems.PyFileSystem(self), base)

    def open_output_stream(self, path: str, metadata: Any) -> Any:
        return pa.PythonFile(_Filling(self._files.open_output_stream(path), self), mode="w")

    def open_append_stream(self, path: str, metadata: Any) -> Any:
        raise NotImplementedError

    def open_input_file(self, path: str) -> Any:
        return self._files.open_input_file(path)

    def open_input_stream(self, path: str) -> Any:
        return self._files.open_input_stream(path)

    def get_type_name(self) -> str:
        return "full-disk"

    def normalize_path(self, path: str) -> str:
        return path

    def get_file_info(self, paths: list[str]) -> Any:
        return self._files.get_file_info(paths)

    def get_file_info_selector(self, selector: Any) -> Any:
        return self._files.get_file_info(selector)

    def create_dir(self, path: str, recursive: bool) -> None:
        self._files.create_dir(path, recursive=recursive)

    def delete_dir(self, path: str) -> None:
        self._files.delete_dir(path)

    def delete_dir_contents(self, path: str, missing_dir_ok: bool) -> None:
        self._files.delete_dir_contents(path)

    def delete_root_dir_contents(self) -> None:
        raise NotImplementedError

    def delete_file(self, path: str) -> None:
        self._files.delete_file(path)

    def move(self, source: str, target: str) -> None:
        self._files.move(source, target)

    def copy_file(self, source: str, target: str) -> None:
        self._files.copy_file(source, target)


def names(directory: Path) -> list[str]:
    """What is in a directory, without the lock."""
    return sorted(path.name for path in directory.iterdir() if path.name != ".lock")
