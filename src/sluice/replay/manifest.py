"""This module is a recording's manifest: which files belong to it, and how far each queue is.

    {"format": "sluice-recording", "version": 1, "created_ms": ..., "updated_ms": ...,
     "queues": [{"topic", "broker", "queue", "first", "next", "lost"}, ...],
     "files": [{"name", "bytes", "rows", "body_bytes", "stretches": [
         [index into queues, rows, first offset, last offset,
          first and last time of birth, first and last time of the store], ...]}, ...],
     "check": checksum of all of the above}

A stretch is one row group of the file: messages of one queue in the order of their offsets. A file
that the manifest does not name is no part of the recording, and `next` counts only what named files
hold. So whoever writes the file first and the manifest then can be killed at any moment.
"""

from __future__ import annotations

import re
import zlib
from dataclasses import asdict, dataclass, field
from typing import Any, Final

import orjson

from sluice.errors import StoreError
from sluice.replay.places import LOCK, Place

NAME: Final = "manifest.json"
BYTES_MAX: Final = 256 * 1024 * 1024
_FORMAT: Final = "sluice-recording"
_VERSION: Final = 1
_INT_MAX: Final = 1 << 62
_LEFT_BEHIND: Final = re.compile(r"part-[0-9]{6,}\.parquet|\.part-[0-9]{6,}\.parquet\.new")


@dataclass(slots=True)
class QueueState:
    """A queue and how much of it is recorded: offsets [first, next)."""

    topic: str
    broker: str
    queue: int
    first: int
    next: int
    lost: int = 0  # offsets that were gone before they could be read

    @property
    def key(self) -> tuple[str, str, int]:
        return self.topic, self.broker, self.queue


@dataclass(slots=True)
class Stretch:
    """A row group: messages of one queue."""

    queue: int
    rows: int
    first: int
    last: int
    born_ms: tuple[int, int]
    store_ms: tuple[int, int]


@dataclass(slots=True)
class DataFile:
    """A Parquet file."""

    name: str
    bytes: int
    rows: int
    body_bytes: int
    stretches: list[Stretch]

    def row(self) -> dict[str, Any]:
        stretches = [
            (each.queue, each.rows, each.first, each.last, *each.born_ms, *each.store_ms)
            for each in self.stretches
        ]
        return {
            "name": self.name,
            "bytes": self.bytes,
            "rows": self.rows,
            "body_bytes": self.body_bytes,
            "stretches": stretches,
        }


@dataclass(slots=True)
class Manifest:
    """All of a recording but its messages."""

    created_ms: int
    updated_ms: int
    queues: list[QueueState] = field(default_factory=list)
    files: list[DataFile] = field(default_factory=list)

    @property
    def topics(self) -> list[str]:
        return sorted({queue.topic for queue in self.queues})

    @property
    def rows(self) -> int:
        return sum(file.rows for file in self.files)

    @property
    def body_bytes(self) -> int:
        return sum(file.body_bytes for file in self.files)

    def image(self) -> bytes:
        """As it is written."""
        table = {
            "format": _FORMAT,
            "version": _VERSION,
            "created_ms": self.created_ms,
            "updated_ms": self.updated_ms,
            "queues": [asdict(queue) for queue in self.queues],
            "files": [file.row() for file in self.files],
        }
        table["check"] = _check(table)
        image = orjson.dumps(table)
        if len(image) > BYTES_MAX:
            raise StoreError("the recording has too many files; go on in another directory")
        return image


def _check(table: dict[str, Any]) -> int:
    return zlib.crc32(orjson.dumps(table))


def read_manifest(place: Place) -> Manifest | None:
    """The manifest of a place; None where the place has none. Raises what is wrong with it."""
    if place.size(NAME) < 0:
        return None
    data = place.read(NAME, BYTES_MAX)
    try:
        table = orjson.loads(data)
        if not isinstance(table, dict) or table.get("format") != _FORMAT:
            raise StoreError(f"{place.text}: {NAME} is not that of a recording")
        if table.get("version") != _VERSION:
            raise StoreError(
                f"{place.text}: a recording of version {table.get('version')}; this Sluice reads "
                f"version {_VERSION}"
            )
        check = table.pop("check", None)
        if check != _check(table):
            raise ValueError("its checksum does not match")
        return _manifest(table)
    except (ValueError, LookupError, TypeError) as error:
        raise StoreError(
            f"{place.text}: {NAME} is damaged ({' '.join(str(error).split())[:200]}); the "
            "recording cannot be used"
        ) from error


def _manifest(table: dict[str, Any]) -> Manifest:
    queues = [
        QueueState(
            *(_text(row["topic"]), _text(row["broker"]), _number(row["queue"])),
            *(_number(row["first"]), _number(row["next"]), _number(row["lost"])),
        )
        for row in table["queues"]
    ]
    if len({queue.key for queue in queues}) != len(queues):
        raise ValueError("a queue stands there twice")
    manifest = Manifest(_number(table["created_ms"]), _number(table["updated_ms"]), queues)
    ends = [queue.first - 1 for queue in queues]
    for row in table["files"]:
        stretches = [_stretch(each) for each in row["stretches"]]
        for each in stretches:
            if not ends[each.queue] < each.first <= each.last < queues[each.queue].next:
                raise ValueError(f"{row['name']}: offsets that do not follow each other")
            ends[each.queue] = each.last
        name = _text(row["name"])
        if "/" in name or name.startswith("."):
            raise ValueError(f"a file is called {name!r}")
        sizes = (_number(row["bytes"]), _number(row["rows"]), _number(row["body_bytes"]))
        manifest.files.append(DataFile(name, *sizes, stretches))
    return manifest


def _stretch(row: list[Any]) -> Stretch:
    numbers = [_number(each) for each in row]
    if len(numbers) != 8:
        raise ValueError(f"a stretch of {len(numbers)} numbers")
    queue, rows, first, last, *times = numbers
    return Stretch(queue, rows, first, last, (times[0], times[1]), (times[2], times[3]))


def _number(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < _INT_MAX:
        raise ValueError(f"{value!r} is no number of it")
    return value


def _text(value: object) -> str:
    if not isinstance(value, str) or not value:
        raise ValueError(f"{value!r} is no name")
    return value


def sweep(place: Place, manifest: Manifest | None) -> None:
    """Delete what a killed recorder left behind; refuse a place that is somebody else's.

    The manifest is written before the first file: without one, no file can be ours.
    """
    known = {NAME, LOCK}
    if manifest is not None:
        known.update(file.name for file in manifest.files)
    for name in place.names():
        if name in known:
            continue
        if name == f".{NAME}.new" or (manifest is not None and _LEFT_BEHIND.fullmatch(name)):
            place.delete(name)
        elif manifest is None:
            raise StoreError(
                f"{place.text} holds other files ({name}) and no recording; name an empty one"
            )


def data_name(number: int) -> str:
    return f"part-{number:06}.parquet"
