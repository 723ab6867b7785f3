"""This module reads and writes the small files that let a start be quick: snapshot, marks,
evidence.

    sluice/snapshot.json   what is known of everything below `log_offset`: queues, index, times
    sluice/durable         the position below which the log was durable, after each flush
    sluice/cut/            bytes that recovery took off the log: evidence, never deleted by Sluice
    checkpoint             Apache's own: its broker finds its way by it, and changes it when it ran
    abort                  there while a broker runs, or after it was killed
    lock                   held by the process that has the store

All of them can be lost: then a start reads the whole log instead. A damaged one is noticed by its
checksum and counts as lost. The snapshot is always behind the log and never ahead of it.
"""

from __future__ import annotations

import struct
from struct import Struct
from typing import Any, Final

import orjson
from isal.isal_zlib import crc32

from sluice.storage.files import Files, OpenFile

SNAPSHOT_NAME: Final = "sluice/snapshot.json"
DURABLE_NAME: Final = "sluice/durable"
CUT_DIRECTORY: Final = "sluice/cut"
CHECKPOINT_NAME: Final = "checkpoint"
ABORT_NAME: Final = "abort"
LOCK_NAME: Final = "lock"

SNAPSHOT_VERSION: Final = 1
_SNAPSHOT_BYTES_MAX: Final = 1 << 30
_DURABLE: Final = Struct(">qI")
_CHECKPOINT_BYTES: Final = 4096
_CHECKPOINT: Final = Struct(">6q")


def write_snapshot(files: Files, root: str, content: dict[str, Any]) -> None:
    """Replace the snapshot, durably. The first line is a checksum of the second."""
    body = orjson.dumps(content, option=orjson.OPT_NON_STR_KEYS)
    files.replace(f"{root}/{SNAPSHOT_NAME}", b"%08x\n" % crc32(body) + body)


def read_snapshot(files: Files, root: str) -> dict[str, Any] | None:
    """The snapshot, or None where there is none that can be trusted."""
    try:
        data = files.read(f"{root}/{SNAPSHOT_NAME}", _SNAPSHOT_BYTES_MAX)
    except OSError:
        return None
    checksum, _, body = data.partition(b"\n")
    if checksum != b"%08x" % crc32(body):
        return None
    content: dict[str, Any] = orjson.loads(body)
    return content if content.get("version") == SNAPSHOT_VERSION else None


def drop_snapshot(files: Files, root: str) -> None:
    """Before a rebuild touches what the snapshot speaks of: a crash must not bring it back."""
    path = f"{root}/{SNAPSHOT_NAME}"
    if files.exists(path):
        files.remove(path)
        files.sync_directory(path.rpartition("/")[0])


class DurableMark:
    """How far the log was flushed: written after each flush, not flushed itself.

    After a kill -9 it is exact, after a power cut it may be old; it is never ahead. A log whose
    intact part ends below the mark has lost what was acknowledged, and that is not a torn tail.
    """

    def __init__(self, files: Files, root: str) -> None:
        self._files = files
        self._path = f"{root}/{DURABLE_NAME}"
        self._file: OpenFile | None = None

    def read(self) -> int:
        """The position, 0 where none is known. Changes nothing on the disk."""
        try:
            data = self._files.read(self._path, _DURABLE.size)
            offset, checksum = _DURABLE.unpack(data)
        except (OSError, struct.error):
            return 0
        return int(offset) if checksum == crc32(data[:8]) else 0

    def open(self) -> None:
        """Make ready for writing."""
        try:
            self._file = self._files.open(self._path)
        except FileNotFoundError:
            self._file = self._files.create(self._path, _DURABLE.size)
        if self._file.size != _DURABLE.size:
            self._file.resize(_DURABLE.size)

    def write(self, offset: int) -> None:
        """May run in the background."""
        assert self._file is not None, "opened before it is written"
        self._file.pwritev([_DURABLE.pack(offset, crc32(offset.to_bytes(8, "big")))], 0)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


def checkpoint_fields(log_ms: int, index_ms: int, offset: int) -> bytes:
    """The used part of Apache's checkpoint; the snapshot remembers it in hex."""
    return _CHECKPOINT.pack(log_ms, log_ms, index_ms, 0, offset, offset)


def write_checkpoint(files: Files, root: str, fields: bytes) -> None:
    files.replace(f"{root}/{CHECKPOINT_NAME}", fields.ljust(_CHECKPOINT_BYTES, b"\0"))


def read_checkpoint(files: Files, root: str) -> str:
    """Apache's checkpoint as it is now; "" where there is none."""
    try:
        data = files.read(f"{root}/{CHECKPOINT_NAME}", 1 << 20)
    except OSError:
        return ""
    return data[: _CHECKPOINT.size].hex()
