"""This module turns batches of Kafka's producers into columns, with no loop over fields of rows.

The records of many batches are unpacked into one piece of memory. Only the lengths of the records
are followed one by one; all that is inside of them (varints, keys, values, headers) is read for all
records at once by numpy, one field after the other. What does not add up is an error, never a row.

A batch's checksum was compared when it was stored, and the entry's around it by the reader.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from sluice.model import Buffer
from sluice.protocol import kafka_batches, kafka_views
from sluice.protocol.kafka_batches import BadBatch, BatchHead
from sluice.protocol.kafka_codes import INVALID_RECORD
from sluice.spark.cutting import Bytes, Numbers, cut, text_column

UNPACKED_BYTES_MAX: Final = 1 << 30  # of one batch: the most that a broker can be told to take
TOGETHER_BYTES: Final = 8 << 20  # unpacked at once; one batch more, at most
_PADDING: Final = bytes(16)  # a varint that begins at the end is read, then refused
_LOW: Final = np.uint64(0x7F)


class Batch(NamedTuple):
    """One batch as it is stored, and its records as they are unpacked."""

    head: BatchHead
    base_offset: int
    inside: bytes | memoryview


class Headers(NamedTuple):
    """All headers of all records: to which record each belongs, and where it is."""

    owners: Numbers
    name_at: Numbers
    name_end: Numbers
    value_at: Numbers
    value_end: Numbers
    is_null: npt.NDArray[np.bool_]


def unpacked(bodies: Iterable[tuple[int, Buffer]]) -> Iterator[list[Batch]]:
    """Batches (with their offsets) in groups of some megabytes; raises `BadBatch`."""
    group: list[Batch] = []
    byte_count = 0
    for offset, body in bodies:
        head = kafka_batches.read_head(body)
        if head is None or head.base_offset != offset:
            raise BadBatch(INVALID_RECORD, "no batch is where one must be")
        view = memoryview(body)[kafka_batches.HEAD_BYTES :]
        inside = kafka_batches.unpack(head.codec, view, UNPACKED_BYTES_MAX)
        group.append(Batch(head, offset, inside))
        byte_count += len(inside)
        if byte_count >= TOGETHER_BYTES:
            yield group
            group, byte_count = [], 0
    if group:
        yield group


class Rows:
    """The records of some batches, as columns."""

    def __init__(self, batches: list[Batch]) -> None:
        """Raises `BadBatch` where their parts do not add up."""
        joined = b"".join([*(batch.inside for batch in batches), _PADDING])
        self._bytes: Bytes = np.frombuffer(joined, np.uint8)
        self._buffer = pa.py_buffer(joined)
        starts, self._ends = _records(joined, batches)
        self.count = len(starts)
        counts = np.array([batch.head.record_count for batch in batches], np.int64)
        time_deltas, at = self._varints(starts + 1)  # behind the attributes, which mean nothing
        offset_deltas, at = self._varints(at)
        self._key_at, self._key_end, self._no_key = self._field(at)
        self._value_at, self._value_end, self._no_value = self._field(self._key_end)
        self._header_counts, self._headers_at = self._varints(self._value_end)
        room = self._ends - self._headers_at
        _require((self._header_counts >= 0) & (self._header_counts <= room))
        _require((self._header_counts > 0) | (room == 0))
        bases = np.array([batch.base_offset for batch in batches], np.int64)
        self.offsets = np.repeat(bases, counts) + offset_deltas
        lasts = np.array([batch.head.last_delta for batch in batches], np.int64)
        _require((offset_deltas >= 0) & (offset_deltas <= np.repeat(lasts, counts)))
        by_append = np.array(
            [batch.head.attributes & kafka_batches.APPEND_TIME != 0 for batch in batches], np.bool_
        )
        base_ms = np.array([batch.head.base_ms for batch in batches], np.int64)
        append_ms = np.array([batch.head.max_ms for batch in batches], np.int64)
        self.is_append_time = np.repeat(by_append, counts)
        self.times_ms = np.where(
            self.is_append_time,
            np.repeat(append_ms, counts),
            np.repeat(base_ms, counts) + time_deltas,
        )
        self._headers: Headers | None = None

    # ---------------------------------------------------------------------------------------- parts

    def _varints(self, ats: Numbers) -> tuple[Numbers, Numbers]:
        """Zigzag varints at these places of the records, and the places behind them."""
        return self._varints_of(ats, self._ends)

    def _varints_of(self, ats: Numbers, ends: Numbers) -> tuple[Numbers, Numbers]:
        _require(ats < ends)
        first = self._bytes[ats]
        values = first.astype(np.uint64) & _LOW
        after = ats + 1
        more = np.flatnonzero(first > 0x7F)
        shift = 7
        while len(more):
            if shift > 63:
                raise BadBatch(INVALID_RECORD, "a varint of more than ten bytes")
            # Where it runs over its record's end that is seen below; the padding is behind all.
            byte = self._bytes[np.minimum(after[more], len(self._bytes) - 1)]
            values[more] |= (byte.astype(np.uint64) & _LOW) << np.uint64(shift)
            after[more] += 1
            more = more[byte > 0x7F]
            shift += 7
        _require(after <= ends)
        halves = (values >> np.uint64(1)).astype(np.int64)
        return halves ^ -(values & np.uint64(1)).astype(np.int64), after

    def _field(self, ats: Numbers) -> tuple[Numbers, Numbers, npt.NDArray[np.bool_]]:
        """Bytes with their length in front: from where to where, and which are null."""
        return self._field_of(ats, self._ends)

    def _field_of(
        self, ats: Numbers, ends: Numbers
    ) -> tuple[Numbers, Numbers, npt.NDArray[np.bool_]]:
        sizes, after = self._varints_of(ats, ends)
        is_null = sizes < 0
        _require(is_null | (sizes <= ends - after))
        return after, after + np.where(is_null, 0, sizes), is_null

    def _cut(
        self, begins: Numbers, ends: Numbers, is_null: npt.NDArray[np.bool_] | None = None
    ) -> pa.Array:
        found = cut(self._buffer, begins, ends)
        if is_null is None or not is_null.any():
            return found
        return pc.if_else(pa.array(~is_null), found, pa.scalar(None, pa.binary()))

    # -------------------------------------------------------------------------------------- columns

    def keys(self) -> pa.Array:
        return self._cut(self._key_at, self._key_end, self._no_key)

    def values(self) -> pa.Array:
        return self._cut(self._value_at, self._value_end, self._no_value)

    def check_headers(self) -> Headers:
        """Where the headers are; raises `BadBatch` where they do not fill their records."""
        if self._headers is None:
            self._headers = self._find_headers()
        return self._headers

    def _find_headers(self) -> Headers:
        rows = np.flatnonzero(self._header_counts > 0)
        at, left = self._headers_at[rows], self._header_counts[rows]
        found: list[tuple[Numbers, ...]] = []
        nulls: list[npt.NDArray[np.bool_]] = []
        # The first header of all records that have one, then the second of all that have two ...
        while len(rows):
            ends = self._ends[rows]
            name_at, name_end, no_name = self._field_of(at, ends)
            _require(~no_name)
            value_at, value_end, no_value = self._field_of(name_end, ends)
            found.append((rows, name_at, name_end, value_at, value_end))
            nulls.append(no_value)
            left = left - 1
            _require((left > 0) | (value_end == ends))
            more = left > 0
            rows, at, left = rows[more], value_end[more], left[more]
        if not found:
            none = np.zeros(0, np.int64)
            return Headers(none, none, none, none, none, np.zeros(0, np.bool_))
        columns = [np.concatenate(each) for each in zip(*found, strict=True)]
        order = np.argsort(columns[1], kind="stable")  # by place: record by record, in their order
        owners, name_at, name_end, value_at, value_end = (column[order] for column in columns)
        return Headers(owners, name_at, name_end, value_at, value_end, np.concatenate(nulls)[order])

    def headers(self, kind: pa.DataType) -> pa.Array:
        """The headers of each record, in Kafka's type; null where it has none, as with Kafka."""
        headers = self.check_headers()
        counts = np.bincount(headers.owners, minlength=self.count)
        offsets = np.concatenate(([0], np.cumsum(counts))).astype(np.int32)
        names = text_column(self._cut(headers.name_at, headers.name_end))
        values = self._cut(headers.value_at, headers.value_end, headers.is_null)
        struct = pa.StructArray.from_arrays([names, values], fields=list(kind.value_type))
        return pa.ListArray.from_arrays(
            pa.array(offsets), struct, type=kind, mask=pa.array(counts == 0)
        )

    def texts_of(self, name: str) -> pa.Array:
        """What one header says as text: the first of this name that is text at all, or null."""
        headers = self.check_headers()
        wanted = name.encode()
        texts: list[str | None] = [None] * self.count
        names = self._cut(headers.name_at, headers.name_end)
        for index in np.flatnonzero(np.asarray(pc.equal(names, wanted))).tolist():
            owner = int(headers.owners[index])
            value = self._bytes[headers.value_at[index] : headers.value_end[index]].tobytes()
            if texts[owner] is None:
                texts[owner] = kafka_views.plain_text(value) or None
        return pa.array(texts, pa.string())


def _require(good: npt.NDArray[np.bool_]) -> None:
    if not good.all():
        raise BadBatch(INVALID_RECORD, "a record's parts do not add up to its size")


def _records(data: bytes, batches: list[Batch]) -> tuple[Numbers, Numbers]:
    """Where the records of batches that lie one behind the other begin, behind their lengths, and
    end.
    """
    starts: list[int] = []
    ends: list[int] = []
    at = 0
    for batch in batches:
        stop = at + len(batch.inside)
        for _ in range(batch.head.record_count):
            if at >= stop:
                raise BadBatch(INVALID_RECORD, "fewer records than the batch says")
            length = data[at]
            if length > 0x7F:
                size, at = kafka_batches.read_varint(data, at)
            else:
                size, at = length >> 1 if not length & 1 else -1, at + 1
            starts.append(at)
            at += size
            if size < 0 or at > stop:
                raise BadBatch(INVALID_RECORD, f"a record of {size} bytes")
            ends.append(at)
        if at != stop:
            raise BadBatch(INVALID_RECORD, f"{stop - at} bytes after the last record")
    return np.array(starts, np.int64), np.array(ends, np.int64)
