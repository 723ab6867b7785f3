"""This module cuts stretches out of memory as Arrow's arrays, all of a column at once. Pure."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pyarrow as pa

Numbers = npt.NDArray[np.int64]
Bytes = npt.NDArray[np.uint8]


def cut(buffer: pa.Buffer, begins: Numbers, ends: Numbers) -> pa.Array:
    """Stretches of a buffer, which do not overlap and go up, as one binary array."""
    count = len(begins)
    # All of the data as an array: a gap, a stretch, a gap, a stretch ... Then every second one.
    offsets = np.empty(2 * count + 1, np.int32)
    offsets[0] = 0
    offsets[1::2] = begins
    offsets[2::2] = ends
    pieces = pa.BinaryArray.from_buffers(
        pa.binary(), 2 * count, [None, pa.py_buffer(offsets), buffer]
    )
    return pieces.take(pa.array(np.arange(1, 2 * count, 2)))


def text_column(values: pa.Array) -> pa.Array:
    """Bytes as text; what is no UTF-8 is replaced, as RocketMQ's clients do."""
    try:
        return values.cast(pa.string())
    except pa.ArrowInvalid:
        return pa.array(
            [None if v is None else v.decode("utf-8", "replace") for v in values.to_pylist()],
            pa.string(),
        )
