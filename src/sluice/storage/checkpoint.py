"""This module brings queues, tables and the key index to the disk, and says so in the snapshot.

A checkpoint is taken at the position below which the log is durable. With the owner it gathers what
is new since the last one; in the background it writes the queue files, makes them durable together,
writes the changed tables and last the snapshot, which makes all of it count. A crash in between
leaves the old snapshot, and recovery makes the same units from the log again, over the same bytes.
Files of deleted topics go first of all, because new ones of the same name have the same paths.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from sluice.model import QueueKey
from sluice.storage import snapshot
from sluice.storage.files import Files
from sluice.storage.queue_index import BatchQueueIndex, FilePart, QueueIndex, QueueWrite

Row = list[Any]
TREES: Final = (QueueIndex.tree, BatchQueueIndex.tree)

# From here on writing the files of a checkpoint would disturb the appends; a child does it.
APART_QUEUES_MIN: Final = 128


@dataclass(slots=True)
class CheckpointJob:
    """Everything a checkpoint writes, gathered at one moment; `run` may be called on any thread."""

    files: Files
    root: str
    log_offset: int
    last_ms: int
    index_ms: int
    content: dict[str, Any]
    writes: list[QueueWrite]
    rows: dict[QueueKey, Row]
    removed_topics: dict[str, int]
    tables: set[str]
    configs: dict[str, bytes]
    sync_index: Callable[[], list[Any] | None]

    def run(self) -> None:
        if self.removed_topics:
            remove_queue_files(self.files, self.root, self.removed_topics)
        if len(self.writes) > APART_QUEUES_MIN:
            self.files.apart(self._write_queues)
        elif self.writes:
            self._write_queues()
        self.files.make_directory(f"{self.root}/config")
        for name, data in self.configs.items():
            self.files.replace(f"{self.root}/config/{name}", data)
        index_marks = self.sync_index()
        if index_marks is None:
            self.content["indexed_to"] = 0
        self.content["index"] = index_marks and [list(mark) for mark in index_marks]
        self.content["queues"] = list(self.rows.values())
        # The snapshot counts with the checkpoint file as it is and as it will be: a crash between
        # the two must not look as if somebody else had written the one.
        fields = snapshot.checkpoint_fields(self.last_ms, self.index_ms, self.log_offset)
        before = snapshot.read_checkpoint(self.files, self.root)
        self.content["checkpoint"] = [before, fields.hex()]
        snapshot.write_snapshot(self.files, self.root, self.content)
        snapshot.write_checkpoint(self.files, self.root, fields)

    def _write_queues(self) -> None:
        """Write the units and make them durable; touches nothing but files."""
        paths = [
            write_part(self.files, write.queue, part)
            for write in self.writes
            for part in write.parts
        ]
        self.files.sync_many(paths)


def write_part(files: Files, queue: QueueIndex, part: FilePart) -> str:
    """Write units into their file, made where it is missing; returns its path. Durable it is
    not yet.
    """
    try:
        file = files.open(part.path)
    except FileNotFoundError:
        files.make_directory(queue.directory)
        file = files.create(part.path, queue.file_units * queue.unit_bytes)
    try:
        file.pwritev([part.data], part.at)
    finally:
        file.close()
    return part.path


def collect(queues: Iterable[QueueIndex], durable: int) -> list[QueueWrite]:
    """What the queues have that is not in their files yet."""
    return [write for queue in queues if (write := queue.collect(durable)) is not None]


def row_of(queue: QueueIndex, write: QueueWrite | None = None) -> Row:
    """A queue's line in the snapshot, as it is when `write` is done."""
    written, end_offset, sums = queue.written, queue.written_offset, queue.sums
    if write is not None:
        written, end_offset, sums = write.stop, write.end_offset, {**sums, **write.sums}
    topic, queue_id = queue.key
    first, start = min(queue.first, written), min(queue.start_offset, end_offset)
    return [topic, queue_id, queue.kind, first, start, written, end_offset, dict(sums)]


def remove_queue_files(files: Files, root: str, topics: Mapping[str, int]) -> None:
    """Remove the queue files of deleted topics, given with the positions of their deletion.

    The snapshot must not name a file that is gone, or the next start would rebuild everything; and
    it need not name these, because from its position on recovery meets the deletion.
    """
    content = snapshot.read_snapshot(files, root)
    if content is not None:
        rows = content["queues"]
        kept = [row for row in rows if topics.get(row[0], -1) < content["log_offset"]]
        if len(kept) < len(rows):
            snapshot.write_snapshot(files, root, {**content, "queues": kept})
    for tree in TREES:
        for topic in topics:
            for queue_id in files.names(f"{root}/{tree}/{topic}"):
                remove_units(files, f"{root}/{tree}/{topic}/{queue_id}")


def remove_units(files: Files, directory: str) -> None:
    """Remove all files of one queue, durably."""
    if files.is_directory(directory):
        _remove_unneeded(files, directory, None)


def remove_left_overs(files: Files, root: str, kept: Mapping[str, QueueIndex]) -> int:
    """Remove files that no queue needs, given copies of all queues by directory; how many it were.

    Whatever is newer than the copies stays: its queue was there, and its file is above the first.
    """
    count = 0
    for tree in TREES:
        for topic in files.names(f"{root}/{tree}"):
            for queue_id in files.names(f"{root}/{tree}/{topic}"):
                directory = f"{root}/{tree}/{topic}/{queue_id}"
                if files.is_directory(directory):
                    count += _remove_unneeded(files, directory, kept.get(directory))
    return count


def _remove_unneeded(files: Files, directory: str, queue: QueueIndex | None) -> int:
    names = [name for name in files.names(directory) if name.isdigit()]
    if queue is not None:
        ends = {name: int(name) // queue.unit_bytes + queue.file_units for name in names}
        bases = {queue.path_of(base) for base in queue.sums}
        names = [n for n in names if ends[n] <= queue.first and f"{directory}/{n}" not in bases]
    for name in names:
        files.remove(f"{directory}/{name}")
    if names:
        files.sync_directory(directory)
    return len(names)
