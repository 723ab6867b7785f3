"""This module writes a recording: chunks of queues become Parquet files, and a manifest names them.

Messages wait in memory until there are enough for a file, or until the oldest of them has waited
long enough. Then the file is written whole, and after it the manifest with the new places of the
queues. Killed in between, the next recorder reads the same messages again and nobody sees the file
that the manifest does not name: no gap and no repeat.
"""

from __future__ import annotations

import logging
import queue as queues
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np

from sluice.errors import SluiceError
from sluice.replay import columns
from sluice.replay.arrow import pa, parquet, pc
from sluice.replay.fetching import Fetcher, Found, Lost, Piece
from sluice.replay.manifest import (
    NAME,
    DataFile,
    Manifest,
    QueueState,
    Stretch,
    data_name,
)
from sluice.replay.places import Place
from sluice.spark.cluster import Queue

log_lines = logging.getLogger("sluice.record")

_GROUP_BYTES: Final = 2 * 1024 * 1024  # a row group is what a replay has of a queue in memory
_WAIT_SECONDS: Final = 0.2
_DICTIONARIES: Final = ["topic", "broker", "queue", "kind", "tags"]


@dataclass(frozen=True, slots=True)
class Limits:
    """When a file is written, and when it is enough."""

    file_bytes: int = 64 * 1024 * 1024  # in memory; on disk it is less
    file_seconds: float = 30.0
    max_bytes: int | None = None  # of bodies, over all runs
    seconds: float | None = None
    until_ms: int | None = None  # nothing that was stored at or after it


@dataclass(slots=True)
class Progress:
    """What this run did so far."""

    messages: int = 0
    body_bytes: int = 0
    files: int = 0
    lost: int = 0
    behind: int = 0


class Recorder:
    """Writes what a fetcher brings into a place."""

    def __init__(
        self,
        place: Place,
        manifest: Manifest,
        fetcher: Fetcher,
        limits: Limits,
        *,
        now_ms: Callable[[], int],
    ) -> None:
        self._place = place
        self._manifest = manifest
        self._fetcher = fetcher
        self._limits = limits
        self._now_ms = now_ms
        self._numbers = {Queue(*state.key): number for number, state in enumerate(manifest.queues)}
        self._waiting: dict[int, list[pa.RecordBatch]] = {}
        self._places: dict[int, int] = {}  # offsets that the next manifest has
        self._waiting_bytes = 0
        self._waiting_since = 0.0
        self._over: set[int] = set()  # queues that are past the time at which it ends
        self._body_bytes = manifest.body_bytes
        self._is_stopped = False
        self.progress = Progress()

    def stop(self) -> None:
        """End after what was read is written; may be called by a signal's handler."""
        self._is_stopped = True

    def run(self) -> None:
        """Record until the end, or until `stop`; what was read by then is written."""
        for found in self._fetcher.begin():
            self._found(found)
        self._write_manifest()
        started = time.monotonic()
        try:
            while not self._is_stopped and not self._is_enough():
                seconds = self._limits.seconds
                if seconds is not None and time.monotonic() - started >= seconds:
                    break
                try:
                    item = self._fetcher.next(_WAIT_SECONDS)
                    if item is None:
                        break
                    self._take(item)
                except queues.Empty:
                    pass
                except SluiceError:
                    self._flush()  # a broker is away, or data is damaged; the rest is good
                    raise
                self.progress.behind = self._fetcher.behind
                self._flush_if_due()
        finally:
            self._fetcher.stop()
        self._flush()

    def _is_enough(self) -> bool:
        limit = self._limits.max_bytes
        if limit is not None and self._body_bytes >= limit:
            return True
        return bool(self._over) and len(self._over) == len(self._manifest.queues)

    # --------------------------------------------------------------------------------------- taking

    def _take(self, item: Piece | Lost | Found) -> None:
        if isinstance(item, Found):
            self._found(item)
            return
        number = self._numbers[item.queue]
        if number in self._over:
            return
        if isinstance(item, Lost):
            state = self._manifest.queues[number]
            state.lost += item.next_offset - item.start
            self.progress.lost += item.next_offset - item.start
            self._places[number] = item.next_offset
            log_lines.warning("%s; it is not in the recording", item.why)
            return
        batch = pa.RecordBatch.from_pylist([], schema=columns.SCHEMA)
        if len(item.chunk.sizes):
            state = self._manifest.queues[number]
            batch = columns.batch_of(item.chunk.data, item.chunk.sizes, state, item.start)
        batch, next_offset = self._cut(batch, number, item.chunk.next_offset)
        if batch.num_rows:
            if not self._waiting:
                self._waiting_since = time.monotonic()
            self._waiting.setdefault(number, []).append(batch)
            self._waiting_bytes += batch.nbytes
            self.progress.messages += batch.num_rows
            self.progress.body_bytes += _body_bytes(batch)
            self._body_bytes += _body_bytes(batch)
        self._places[number] = next_offset

    def _found(self, found: Found) -> None:
        if found.queue not in self._numbers:
            self._numbers[found.queue] = len(self._manifest.queues)
            self._manifest.queues.append(QueueState(*found.queue, found.start, found.start))

    def _cut(
        self, batch: pa.RecordBatch, number: int, next_offset: int
    ) -> tuple[pa.RecordBatch, int]:
        """Without what is past the time or the bytes at which the recording ends."""
        count = batch.num_rows
        if self._limits.until_ms is not None and count:
            times = np.asarray(batch.column("store_time").cast(pa.int64()))
            late = times >= self._limits.until_ms
            if late.any():
                count = int(np.argmax(late))
                self._over.add(number)
        if self._limits.max_bytes is not None and count:
            sizes = np.asarray(pc.binary_length(batch.column("body"))).astype(np.int64)
            before = np.cumsum(sizes) - sizes
            count = min(count, int((before < self._limits.max_bytes - self._body_bytes).sum()))
        if count == batch.num_rows:
            return batch, next_offset
        return batch.slice(0, count), int(batch.column("offset")[count].as_py())

    # -------------------------------------------------------------------------------------- writing

    def _flush_if_due(self) -> None:
        is_old = (
            bool(self._waiting)
            and time.monotonic() - self._waiting_since >= self._limits.file_seconds
        )
        if self._waiting_bytes >= self._limits.file_bytes or is_old:
            self._flush()

    def _flush(self) -> None:
        """Write what waits; first the file, then the manifest that makes it count."""
        if self._waiting:
            self._manifest.files.append(self._write_file())
            self.progress.files += 1
        self._waiting, self._waiting_bytes = {}, 0
        for number, offset in self._places.items():
            self._manifest.queues[number].next = offset
        self._places = {}
        self._write_manifest()

    def _write_file(self) -> DataFile:
        files = self._manifest.files
        number = int(files[-1].name[5:-8]) + 1 if files else 1
        written = DataFile(data_name(number), 0, 0, 0, [])
        with (
            self._place.writing(written.name) as stream,
            parquet.ParquetWriter(
                stream,
                columns.SCHEMA,
                compression="zstd",
                use_dictionary=_DICTIONARIES,
                write_page_checksum=True,
            ) as writer,
        ):
            for queue in sorted(self._waiting):
                table = pa.Table.from_batches(self._waiting[queue], columns.SCHEMA)
                rows = max(1, table.num_rows * _GROUP_BYTES // max(1, table.nbytes))
                for at in range(0, table.num_rows, rows):
                    group = table.slice(at, rows).combine_chunks()
                    writer.write_table(group, row_group_size=group.num_rows)
                    written.stretches.append(_stretch(queue, group))
                    written.rows += group.num_rows
                    written.body_bytes += _body_bytes(group)
        written.bytes = self._place.size(written.name)
        return written

    def _write_manifest(self) -> None:
        self._manifest.updated_ms = self._now_ms()
        self._place.write(NAME, self._manifest.image())


def _body_bytes(rows: pa.RecordBatch | pa.Table) -> int:
    return int(pc.sum(pc.binary_length(rows.column("body"))).as_py() or 0)


def _stretch(queue: int, group: pa.Table) -> Stretch:
    def both(name: str) -> tuple[int, int]:
        found = pc.min_max(group.column(name).cast(pa.int64()))
        return max(0, found["min"].as_py()), max(0, found["max"].as_py())

    first, last = group.column("offset")[0].as_py(), group.column("offset")[-1].as_py()
    return Stretch(queue, group.num_rows, first, last, both("born_time"), both("store_time"))
