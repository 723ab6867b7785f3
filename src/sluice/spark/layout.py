"""This module lays images out in memory, queue by queue, and copies each value once.

Arrow joins columns to images (`encode.py`) and then picks those of each queue: two copies of every
value. Where few lengths occur in a column its values can be put straight to their places instead,
all of one length in one call of numpy. That takes half of the time.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from sluice.protocol import records
from sluice.protocol.record_images import HEAD_BYTES, rest_bytes
from sluice.protocol.records import CRC_PROPERTY_BYTES

Numbers = npt.NDArray[np.int64]
Bytes = npt.NDArray[np.uint8]

# So many lengths are few: values of several are copied once more, and each length costs a look at
# all rows.
_VALUE_LENGTHS_MAX: Final = 4
_PROPERTY_LENGTHS_MAX: Final = 32
_INT16_MAX: Final = (1 << 15) - 1
_HEAD: Final = np.dtype([("size", ">i4"), ("magic", ">u4"), ("later", "V76"), ("body", ">i4")])
assert _HEAD.itemsize == HEAD_BYTES


class Laid(NamedTuple):
    """Images by their targets, in the order of the rows where those are the same."""

    data: Bytes
    offsets: Numbers  # where each begins, and where the last one ends
    targets: Numbers  # of each


class Column(NamedTuple):
    """Values of any lengths, one after the other or not."""

    data: Bytes
    starts: Numbers
    sizes: Numbers

    @classmethod
    def of(cls, values: pa.Array) -> Column:
        """The bytes of a binary array that has no nulls, or has nothing behind them."""
        _, offsets, data = values.buffers()
        span = slice(values.offset, values.offset + len(values) + 1)
        ends = np.frombuffer(offsets, np.int32)[span].astype(np.int64)
        found = np.frombuffer(data, np.uint8) if data is not None else np.empty(0, np.uint8)
        return cls(found, ends[:-1], np.diff(ends))


def lay_out(topic: bytes, values: Column, properties: Column, targets: Numbers) -> Laid | None:
    """Images of a topic from the values and properties of rows; None where either has too many
    lengths for it.
    """
    value_lengths = _lengths(values.sizes, _VALUE_LENGTHS_MAX)
    property_lengths = _lengths(properties.sizes, _PROPERTY_LENGTHS_MAX)
    if not value_lengths or not property_lengths:
        return None
    magic, field = records.field_of_topic(topic)
    sizes = rest_bytes(topic) + values.sizes + properties.sizes
    # Of small numbers numpy sorts the digits: a tenth of the time.
    small = targets.astype(np.int16) if int(targets.max()) <= _INT16_MAX else targets
    order = np.argsort(small, kind="stable")
    offsets = np.concatenate(([0], np.cumsum(sizes[order])))
    starts = np.empty(len(sizes), np.int64)
    starts[order] = offsets[:-1]
    out = np.empty(int(offsets[-1]), np.uint8)

    heads = np.zeros(len(sizes), _HEAD)
    heads["size"] = sizes
    heads["magic"] = magic
    heads["body"] = values.sizes
    _every(out, HEAD_BYTES)[starts] = heads.view(f"V{HEAD_BYTES}")
    at = starts + HEAD_BYTES
    _put(out, at, values, value_lengths)
    at += values.sizes
    # The topic, and the size of the properties together with the checksum that will be there.
    middles = np.zeros(len(sizes), [("field", f"V{len(field)}"), ("properties", ">i2")])
    middles["field"] = np.frombuffer(field, f"V{len(field)}")
    middles["properties"] = properties.sizes + CRC_PROPERTY_BYTES
    width = middles.dtype.itemsize
    _every(out, width)[at] = middles.view(f"V{width}")
    at += width
    _put(out, at, properties, property_lengths)
    at += properties.sizes
    _every(out, CRC_PROPERTY_BYTES)[at] = np.zeros(1, f"V{CRC_PROPERTY_BYTES}")
    return Laid(out, offsets, targets[order])


def _lengths(sizes: Numbers, count_max: int) -> list[int]:
    """The lengths that occur; nothing where they are more."""
    found: list[int] = [int(sizes[0])] if (sizes == sizes[0]).all() else np.unique(sizes).tolist()
    return found if len(found) <= count_max else []


def _put(out: Bytes, at: Numbers, column: Column, lengths: list[int]) -> None:
    """Copy each value to its place."""
    for length in lengths:
        if not length:
            continue
        if len(lengths) == 1 and _is_dense(column, length):
            first = int(column.starts[0])
            whole = column.data[first : first + length * len(at)]
            _every(out, length)[at] = whole.view(f"V{length}")
        else:
            rows = np.flatnonzero(column.sizes == length)
            _every(out, length)[at[rows]] = _every(column.data, length)[column.starts[rows]]


def _is_dense(column: Column, length: int) -> bool:
    """Whether values of one length lie one after the other."""
    return int(column.starts[-1] - column.starts[0]) == length * (len(column.starts) - 1)


def _every(data: Bytes, width: int) -> npt.NDArray[Any]:
    """The data as if every byte began so many bytes."""
    return np.ndarray((len(data) - width + 1,), f"V{width}", data.data, 0, (1,))
