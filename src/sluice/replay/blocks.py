"""This module reads a recording in the order in which it is replayed: by time, over all queues.

Each queue is read a row group at a time, in the order of its offsets. A time that is before that of
a message earlier in its queue is raised to it, so that the order of a queue holds whatever clocks
said. All that cannot be overtaken any more, because every queue that goes on is past it, makes a
window; within it messages are sorted by time. So memory holds a row group of each queue.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from itertools import pairwise
from typing import Any, Final, Literal, NamedTuple

import numpy as np

from sluice.client.core.messages import RESERVED
from sluice.errors import ConfigError, StoreError
from sluice.replay.arrow import pa, parquet, pc
from sluice.replay.columns import SCHEMA
from sluice.replay.manifest import DataFile, Manifest, Stretch, read_manifest
from sluice.replay.pacing import Millis
from sluice.replay.places import Place

By = Literal["born", "store"]
_COLUMNS: Final = ["key", "tags", "flag", "body"]
# What brokers write into a message when they store or deliver it, and clients through other means
# than properties: keys and tags are columns of their own.
_BROKERS_OWN: Final = pa.array(
    sorted(
        {
            *RESERVED,
            *("INNER_NUM", "INNER_BASE", "BORN_HOST", "BORN_TIMESTAMP", "DUP_INFO"),
            *("TIMER_ENQUEUE_MS", "TIMER_DEQUEUE_MS", "TIMER_ROLL_TIMES", "TIMER_ROLL_LABEL"),
            *("TIMER_DEL_UNIQKEY", "1ST_POP_TIME", "POP_CK_OFFSET", "__STARTDELIVERTIME"),
        }
    ),
    pa.string(),
)
# What pyarrow raises for bytes that are no Parquet, or not what they say.
_FAULTS: Final = (OSError, ValueError, LookupError, pa.ArrowException)


class Row(NamedTuple):
    """A recorded message; `queue` is its number in the manifest, `properties` are the user's.

    `size` is what it takes in a request, about: all properties count, also those not sent again.
    """

    queue: int
    offset: int
    size: int
    properties: Sequence[tuple[str, str]]
    key: str | None
    tags: str | None
    flag: int
    body: bytes


class Window(NamedTuple):
    """Messages in the order of their times."""

    times_ms: Millis
    rows: list[Row]


class Recording:
    """A recording that is there to be replayed, or a part of its topics."""

    def __init__(self, place: Place, manifest: Manifest, topics: Collection[str]) -> None:
        self._place = place
        self.manifest = manifest
        self._chosen = [
            number for number, queue in enumerate(manifest.queues) if queue.topic in topics
        ]
        self._stretches: dict[int, list[tuple[DataFile, int, Stretch]]] = {
            number: [] for number in self._chosen
        }
        for file in manifest.files:
            for group, stretch in enumerate(file.stretches):
                if stretch.queue in self._stretches:
                    self._stretches[stretch.queue].append((file, group, stretch))

    @property
    def topics(self) -> list[str]:
        return sorted({self.manifest.queues[number].topic for number in self._chosen})

    @property
    def rows(self) -> int:
        return sum(each[2].rows for found in self._stretches.values() for each in found)

    def span_ms(self, by: By) -> tuple[int, int]:
        """The first and the last time of it."""
        spans = [
            each[2].born_ms if by == "born" else each[2].store_ms
            for found in self._stretches.values()
            for each in found
        ]
        return min(span[0] for span in spans), max(span[1] for span in spans)

    def windows(self, by: By) -> Iterator[Window]:
        """All messages; raises StoreError where a file is missing or damaged."""
        sources = {number: self._blocks(number, by) for number in self._chosen}
        loaded: dict[int, Window] = {}
        while True:
            for number in list(sources):
                if number not in loaded:
                    block = next(sources[number], None)
                    if block is None:
                        del sources[number]
                    else:
                        loaded[number] = block
            if not loaded:
                return
            horizon = min(int(block.times_ms[-1]) for block in loaded.values())
            parts = []
            for number in sorted(loaded):
                block = loaded.pop(number)
                stop = int(np.searchsorted(block.times_ms, horizon, "right"))
                parts.append(Window(block.times_ms[:stop], block.rows[:stop]))
                if stop < len(block.rows):
                    loaded[number] = Window(block.times_ms[stop:], block.rows[stop:])
            yield _merged(parts)

    def _blocks(self, number: int, by: By) -> Iterator[Window]:
        """The row groups of one queue, each as a window of its own."""
        last_ms = 0
        name, opened = "", None
        for file, group, stretch in self._stretches[number]:
            if file.name != name:
                name, opened = file.name, self._open(file)
            times, rows = self._read(opened, file.name, group, stretch, by)
            times = np.maximum(np.maximum.accumulate(times), last_ms)
            last_ms = int(times[-1])
            yield Window(times, rows)

    def _open(self, file: DataFile) -> Any:
        size = self._place.size(file.name)
        if size != file.bytes:
            what = "is missing" if size < 0 else f"has {size} bytes instead of {file.bytes}"
            raise StoreError(f"{self._place.text}: {file.name} {what}; the recording is damaged")
        try:
            opened = parquet.ParquetFile(
                self._place.open(file.name), page_checksum_verification=True
            )
            is_ours = opened.schema_arrow.equals(SCHEMA)
        except _FAULTS as error:
            raise self._damaged(file.name, error) from error
        if not is_ours or opened.num_row_groups != len(file.stretches):
            raise StoreError(
                f"{self._place.text}: {file.name} is not the file that was written; the "
                "recording is damaged"
            )
        return opened

    def _damaged(self, name: str, error: Exception) -> StoreError:
        reason = " ".join(str(error).split())[:200]
        return StoreError(f"{self._place.text}: {name} is damaged: {reason}")

    def _read(
        self, opened: Any, name: str, group: int, stretch: Stretch, by: By
    ) -> tuple[Millis, list[Row]]:
        time_name = f"{by}_time"
        try:
            names = ["offset", time_name, "properties", *_COLUMNS]
            table = opened.read_row_group(group, columns=names)
            offsets = table.column("offset").to_pylist()
            times = np.asarray(table.column(time_name).cast(pa.int64())).astype(np.int64)
            maps = table.column("properties").combine_chunks()
            sizes = _sizes(maps, table.column("body").combine_chunks())
            properties = _users_own(maps)
            columns = [table.column(column).to_pylist() for column in _COLUMNS]
        except _FAULTS as error:
            raise self._damaged(name, error) from error
        if not offsets or (offsets[0], offsets[-1]) != (stretch.first, stretch.last):
            raise StoreError(f"{self._place.text}: {name} does not hold what the manifest says")
        numbers = [stretch.queue] * len(offsets)
        return times, list(map(Row, numbers, offsets, sizes, properties, *columns))


def _sizes(maps: pa.Array, bodies: pa.Array) -> list[int]:
    """Bytes of bodies and properties."""
    pairs = pc.add(pc.binary_length(maps.keys), pc.binary_length(maps.items))
    before = np.concatenate(([0], np.cumsum(np.asarray(pairs).astype(np.int64) + 2)))
    offsets = np.asarray(maps.offsets)
    own = np.diff(before[offsets - offsets[0]])
    found: list[int] = (own + np.asarray(pc.binary_length(bodies))).tolist()
    return found


def _users_own(maps: pa.Array) -> list[Sequence[tuple[str, str]]]:
    """The properties of each message that are sent again; most that a broker stores are its own."""
    names, values = maps.keys, maps.items
    wanted = np.asarray(pc.invert(pc.is_in(names, _BROKERS_OWN)))
    chosen = pa.array(np.flatnonzero(wanted))
    pairs = list(zip(names.take(chosen).to_pylist(), values.take(chosen).to_pylist(), strict=True))
    before = np.concatenate(([0], np.cumsum(wanted)))
    offsets = np.asarray(maps.offsets)
    bounds = before[offsets - offsets[0]].tolist()
    return [pairs[begin:end] if end > begin else () for begin, end in pairwise(bounds)]


def _merged(parts: list[Window]) -> Window:
    if len(parts) == 1:
        return parts[0]
    times = np.concatenate([part.times_ms for part in parts])
    # Stable: of one time, a queue's messages stay together and in their order.
    order = np.argsort(times, kind="stable")
    rows = [row for part in parts for row in part.rows]
    return Window(times[order], [rows[index] for index in order.tolist()])


def open_recording(place: Place, topics: Collection[str]) -> Recording:
    """The recording of a place, all of it or some topics; raises where there is nothing to send."""
    manifest = read_manifest(place)
    if manifest is None:
        raise StoreError(f"{place.text} holds no recording; `sluice record TOPIC --to` makes one")
    unknown = sorted(set(topics) - set(manifest.topics))
    if unknown:
        raise ConfigError(
            f"--topic {unknown[0]}: the recording has {', '.join(manifest.topics) or 'no topic'}"
        )
    recording = Recording(place, manifest, topics or manifest.topics)
    if not recording.rows:
        raise StoreError(f"{place.text}: the recording is empty; there is nothing to replay")
    return recording
