"""This module finds one property in the properties of many messages, column by column.

Properties are `name 0x01 value 0x02`, one after the other. Messages of one producer mostly have the
same ones in the same order: then the separators of all of them are a table, with a row for each
message, and a property is a column of it. All others are searched.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from sluice.protocol import records
from sluice.spark.cutting import Bytes, Numbers, cut

_SEPARATOR: Final = 2
Flags = npt.NDArray[np.bool_]


def property_column(properties: pa.Array, name: bytes) -> pa.Array:
    """The values of one property, null where a message has none or an empty one."""
    _, offsets_buffer, data_buffer = properties.buffers()
    if not len(properties) or data_buffer is None:
        return pa.nulls(len(properties), pa.binary())
    first = properties.offset
    offsets = np.frombuffer(offsets_buffer, np.int32)[first : first + len(properties) + 1]
    ends = offsets.astype(np.int64)
    data = np.frombuffer(data_buffer, np.uint8)
    separators = np.flatnonzero(data[ends[0] : ends[-1]] == _SEPARATOR) + ends[0]
    found = _from_table(data, ends, separators, name + b"\x01")
    if found is not None:
        begins, stops = found
        values = cut(data_buffer, begins, stops)
        has = stops > begins
        return values if has.all() else pc.if_else(pa.array(has), values, None)
    return _searched(properties, name, ends, separators)


def _from_table(
    data: Bytes, ends: Numbers, separators: Numbers, mark: bytes
) -> tuple[Numbers, Numbers] | None:
    """Where the values of a property begin and end, where all messages have equally many properties
    and this one at the same place, once. `mark`: its name and what follows it.
    """
    count = len(ends) - 1
    items = len(separators) // count
    if not items or items * count != len(separators):
        return None
    stops = separators.reshape(count, items)
    if not (stops[:, -1] == ends[1:] - 1).all():
        return None  # some have more than others, or do not end with a separator
    begins = np.empty_like(stops)
    begins[:, 0] = ends[:-1]
    begins[:, 1:] = stops[:, :-1] + 1
    # Of an empty item that is its separator, which begins no name; a name need not fit in.
    is_like = data[begins] == mark[0]
    places = [at for at in range(items) if is_like[:, at].any()]
    is_named = {at: _has_mark(data, begins[:, at], stops[:, at], mark) for at in places}
    named = [at for at in places if is_named[at].any()]
    if len(named) != 1 or not is_named[named[0]].all():
        return None
    (at,) = named
    return begins[:, at] + len(mark), stops[:, at]


def _has_mark(data: Bytes, begins: Numbers, stops: Numbers, mark: bytes) -> Flags:
    """Which items begin with these bytes."""
    fits: Flags = stops - begins >= len(mark)
    if not fits.any():
        return fits
    every: Bytes = np.ndarray(
        (len(data) - len(mark) + 1, len(mark)), np.uint8, data.data, 0, (1, 1)
    )
    found = every[np.where(fits, begins, begins[np.argmax(fits)])]
    same: Flags = (found == np.frombuffer(mark, np.uint8)).all(axis=1)
    return same & fits


def _searched(properties: pa.Array, name: bytes, ends: Numbers, separators: Numbers) -> pa.Array:
    """The values of a property that may be anywhere, more than once, or missing."""
    mark = b"\x02" + name + b"\x01"
    found = np.asarray(pc.find_substring(properties, mark))
    at_front = np.asarray(pc.starts_with(properties, mark[1:]))
    relative = np.where(found >= 0, found + len(mark), np.where(at_front, len(mark) - 1, -1))
    has = relative >= 0
    if not has.any():
        return pa.nulls(len(properties), pa.binary())
    repeated = np.asarray(pc.count_substring(properties, mark)) + at_front > 1
    begins = np.where(has, ends[:-1] + relative, ends[:-1])
    # The separator behind each value; the last property of a message need not have one.
    closed = np.append(separators, ends[-1])
    stops = np.minimum(closed[np.searchsorted(closed, begins)], ends[1:])
    stops = np.where(has, stops, begins)
    values = cut(properties.buffers()[2], begins, stops)
    if repeated.any():
        # The last one counts where a name stands twice.
        texts = values.to_pylist()
        for index in np.flatnonzero(repeated).tolist():
            texts[index] = records.property_value(properties[index].as_py(), name)
        values = pa.array(texts, pa.binary())
    return pc.if_else(pa.array(has & (stops > begins) | repeated), values, None)
