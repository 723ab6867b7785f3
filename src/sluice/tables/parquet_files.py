"""This module writes Parquet files: those of a batch, and large ones from many small ones.

A file has its final name from its first byte on. Whether it belongs to the table is said by the
log alone, so a task that dies leaves a file that nobody reads and `sweep` deletes.
"""

from __future__ import annotations

import contextlib
import os
import uuid
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pyarrow.parquet as pq

from sluice.errors import StoreError
from sluice.tables.log import DataFile, sync_directory

MIB: Final = 1024 * 1024
TARGET_BYTES: Final = 128 * MIB
_GROUP_BYTES: Final = 32 * MIB  # of Arrow columns that become one row group
_WAITING_BYTES_MAX: Final = 128 * MIB  # of all files of a task together
_OPEN_MAX: Final = 64  # files of different partitions that one task has open
_NO_VALUE: Final = "__HIVE_DEFAULT_PARTITION__"
# What Spark escapes in the names of directories, and reads back.
_ESCAPED: Final = frozenset([*map(chr, range(32)), *"\"#%'*/:=?\\\x7f{[]^"])
_COMPRESSION: Final = "zstd"


class OneFile:
    """A Parquet file under way."""

    def __init__(self, data: Path, below: str, prefix: str, schema: pa.Schema) -> None:
        name = f"{prefix}-{uuid.uuid4().hex}.parquet"
        self._path = data / below / name
        self._name = f"{below}/{name}" if below else name
        if not self._path.parent.is_dir():
            self._path.parent.mkdir(parents=True, exist_ok=True)
            for number in range(below.count("/") + 1):
                sync_directory(self._path.parents[number + 1])
        self._sink = self._path.open("xb")
        self._writer = pq.ParquetWriter(self._sink, schema, compression=_COMPRESSION)
        self._schema = schema
        self._waiting: list[pa.RecordBatch] = []
        self._waiting_bytes = 0
        self._rows = 0

    def add(self, batch: pa.RecordBatch) -> None:
        self._waiting.append(batch)
        self._waiting_bytes += batch.nbytes
        self._rows += batch.num_rows
        if self._waiting_bytes >= _GROUP_BYTES:
            self.write()

    @property
    def waiting_bytes(self) -> int:
        return self._waiting_bytes

    def write(self) -> None:
        """Write what waits, as a row group."""
        if self._waiting:
            table = pa.Table.from_batches(self._waiting, self._schema)
            self._writer.write_table(table, row_group_size=max(1, table.num_rows))
            self._waiting, self._waiting_bytes = [], 0

    @property
    def size(self) -> int:
        return int(self._sink.tell())

    def finish(self) -> DataFile:
        """Make it whole and durable."""
        self.write()
        self._writer.close()
        self._sink.flush()
        os.fsync(self._sink.fileno())
        size = self.size
        self._sink.close()
        sync_directory(self._path.parent)
        return DataFile(self._name, self._rows, size)

    def drop(self) -> None:
        """It is not wanted any more."""
        with contextlib.suppress(OSError, pa.ArrowException):
            self._writer.close()
            self._sink.close()
        self._path.unlink(missing_ok=True)


class Files:
    """The files that one task writes, by partition."""

    def __init__(
        self,
        data: Path,
        prefix: str,
        schema: pa.Schema,
        partition_by: tuple[str, ...] = (),
        target_bytes: int = TARGET_BYTES,
    ) -> None:
        self._data = data
        self._prefix = prefix
        self._partition_by = partition_by
        self._target_bytes = target_bytes
        self._schema = pa.schema([each for each in schema if each.name not in partition_by])
        self._open: dict[str, OneFile] = {}
        self._done: list[DataFile] = []

    def add(self, batch: pa.RecordBatch) -> None:
        if not batch.num_rows:
            return
        for below, part in self._parts(batch):
            file = self._open.get(below)
            if file is None:
                if len(self._open) >= _OPEN_MAX:
                    self.finish()
                file = OneFile(self._data, below, self._prefix, self._schema)
                self._open[below] = file
            file.add(part)
            if file.size >= self._target_bytes:
                self._done.append(self._open.pop(below).finish())
        if sum(file.waiting_bytes for file in self._open.values()) > _WAITING_BYTES_MAX:
            for file in self._open.values():
                file.write()

    def _parts(self, batch: pa.RecordBatch) -> Iterable[tuple[str, pa.RecordBatch]]:
        if not self._partition_by:
            yield "", batch
            return
        columns = [batch.column(batch.schema.get_field_index(name)) for name in self._partition_by]
        keys = list(zip(*(column.to_pylist() for column in columns), strict=True))
        rest = batch.select(self._schema.names)
        rows: dict[tuple[Any, ...], list[int]] = {}
        for number, key in enumerate(keys):
            rows.setdefault(key, []).append(number)
        for key, numbers in rows.items():
            pairs = zip(self._partition_by, key, strict=True)
            below = "/".join(f"{escaped(name)}={escaped(_text(value))}" for name, value in pairs)
            yield below, rest if len(rows) == 1 else rest.take(pa.array(numbers))

    def finish(self) -> list[DataFile]:
        """All files so far, whole and durable."""
        while self._open:
            _, file = self._open.popitem()
            self._done.append(file.finish())
        return self._done


def _text(value: Any) -> str:
    if value is None or value == "":
        return _NO_VALUE
    return str(value).lower() if isinstance(value, bool) else str(value)


def escaped(text: str) -> str:
    """A name of a directory, as Spark writes it."""
    return "".join(f"%{ord(c):02X}" if c in _ESCAPED else c for c in text)


def merged(data: Path, sources: list[DataFile]) -> DataFile:
    """One new file with the rows of several of one partition, in their order."""
    below = os.path.dirname(sources[0].path)
    assert all(os.path.dirname(source.path) == below for source in sources)
    schema = pq.read_schema(data / sources[0].path)
    target = OneFile(data, below, "compacted", schema)
    try:
        for source in sources:
            with pq.ParquetFile(data / source.path) as file:
                if not file.schema_arrow.equals(schema):
                    raise StoreError(
                        f"{data / source.path} has other columns than {sources[0].path}"
                    )
                for batch in file.iter_batches(batch_size=65536):
                    target.add(batch)
        made = target.finish()
    except (OSError, pa.ArrowException) as error:
        target.drop()
        raise StoreError(f"{data / below}: {error}") from None
    except BaseException:
        target.drop()
        raise
    wanted = sum(source.rows for source in sources)
    if made.rows != wanted:
        (data / made.path).unlink(missing_ok=True)
        raise StoreError(f"{data / below}: {wanted} rows are committed and {made.rows} were read")
    return made
