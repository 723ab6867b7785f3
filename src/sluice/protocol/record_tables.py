"""This module encodes batches whose messages are alike: one table, filled column by column.

Many producers send messages of one size that differ in body and unique key only, and then a batch
is a table, of which each column is moved with one call. It gives the bytes that `record_runs.py`
gives, and takes no batch that is not of this form; a test holds the two together. Pure.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
from isal.isal_zlib import crc32

from sluice.protocol import records
from sluice.protocol.message_batches import BATCH_COUNT_MAX
from sluice.protocol.record_runs import BatchShape

COUNT_MIN: Final = 8  # of fewer, each by itself is as fast
_HEAD_BYTES: Final = 20  # of a message in a batch: size, magic, checksum, flag, size of the body
_FRONT_BYTES: Final = 36  # of an entry: all up to and with its position
_UNIQUE_NAME: Final = b"UNIQ_KEY\x01"
_MASK_31: Final = 0x7FFFFFFF


def _table_of(texts: tuple[bytes, ...]) -> npt.NDArray[np.void]:
    return np.frombuffer(b"".join(texts), f"V{len(texts[0])}")


# What a checksum is written with: by its last four digits, those before them, and the first two.
_FIRST, _MIDDLE, _LAST = map(_table_of, records.DIGIT_TABLES)


class Alike(NamedTuple):
    """The messages of a batch as what they have in common, and the unique keys, joined."""

    entries: bytearray
    size: int  # of each entry
    message_count: int
    properties: bytes  # of the first; the others differ in their unique keys
    uniques: bytes
    unique_bytes: int  # of each
    keys: bytes
    tag: bytes


def encode_alike(
    shape: BatchShape, middle: bytes, data: bytes, queue_offset: int, position: int
) -> Alike | None:
    """What `record_runs.encode_batch` makes of a batch; None where its messages are not alike."""
    message_bytes = int.from_bytes(data[:4], "big")
    body_bytes = int.from_bytes(data[16:20], "big")
    properties_at = _HEAD_BYTES + body_bytes + 2
    properties = data[properties_at:message_bytes]
    name_at = properties.find(_UNIQUE_NAME)
    unique_at = name_at + len(_UNIQUE_NAME)
    unique_bytes = properties.find(b"\x02", unique_at) - unique_at
    size = shape.rest_bytes + body_bytes + len(properties)
    if (
        not message_bytes
        or not COUNT_MIN * message_bytes <= len(data) <= BATCH_COUNT_MAX * message_bytes
        or len(data) % message_bytes
        or not body_bytes
        or name_at < 0
        or (name_at > 0 and properties[name_at - 1] != 2)
        or unique_bytes <= 0
        or _UNIQUE_NAME in properties[unique_at:]
        or properties[-1] != 2
        or body_bytes > shape.body_bytes_max
        or len(properties) > shape.properties_bytes_max
        or size > shape.entry_bytes_max
    ):
        return None
    count = len(data) // message_bytes
    rows = np.frombuffer(data, _batch_row(message_bytes, body_bytes, unique_at + 2, unique_bytes))
    uniques: bytes = rows["unique"].tobytes()
    if (
        data[properties_at - 2 : properties_at] != len(properties).to_bytes(2, "big")
        or rows["size"].tobytes() != data[:4] * count
        or rows["body_size"].tobytes() != data[16:20] * count
        or rows["before"].tobytes() != data[properties_at - 2 : properties_at + unique_at] * count
        or rows["after"].tobytes() != properties[unique_at + unique_bytes :] * count
        or b"\x01" in uniques
        or b"\x02" in uniques
    ):
        return None
    stored_bytes = len(properties) + records.CRC_PROPERTY_BYTES
    first = b"".join(
        (
            *(size.to_bytes(4, "big"), shape.magic.to_bytes(4, "big"), bytes(4)),
            *(shape.queue_id.to_bytes(4, "big"), bytes(20), middle, data[16:20]),
            *(data[_HEAD_BYTES : _HEAD_BYTES + body_bytes], shape.topic_field),
            *(stored_bytes.to_bytes(2, "big"), properties, bytes(records.CRC_PROPERTY_BYTES)),
        )
    )
    entries = bytearray(first) * count
    fields_bytes = len(middle) + 4 + body_bytes + len(shape.topic_field) + 2
    table = np.frombuffer(
        entries,
        _entry_row(size, len(middle) + 4, body_bytes, fields_bytes + unique_at, unique_bytes),
    )
    table["body"] = rows["body"]
    table["unique"] = rows["unique"]
    table["flag"] = rows["flag"]
    table["offset"] = np.arange(queue_offset, queue_offset + count)
    table["position"] = np.arange(position, position + size * count, size)
    bodies = range(_HEAD_BYTES, len(data), message_bytes)
    table["crc"] = [crc32(data[at : at + body_bytes]) & _MASK_31 for at in bodies]
    close_entries(entries, size)
    _, keys, tag = records.message_keys(properties)
    return Alike(entries, size, count, properties, uniques, unique_bytes, keys, tag)


def close_entries(entries: bytearray, size: int) -> None:
    """Write the property that holds the checksum of all before it, into each entry of a size."""
    table = np.frombuffer(entries, _closing_row(size))
    covered_bytes = size - records.CRC_PROPERTY_BYTES
    view = memoryview(entries)
    checksums = [crc32(view[at : at + covered_bytes]) for at in range(0, len(entries), size)]
    checksum = np.array(checksums, np.int64) & _MASK_31
    upper = checksum // 10_000
    high = upper // 10_000
    table["crc_first"] = _FIRST[checksum - upper * 10_000]
    table["crc_middle"] = _MIDDLE[upper - high * 10_000]
    table["crc_last"] = _LAST[high]


@lru_cache(maxsize=1024)
def _batch_row(
    message_bytes: int, body_bytes: int, before_bytes: int, unique_bytes: int
) -> np.dtype[Any]:
    """A message of a producer's batch."""
    unique_at = _HEAD_BYTES + body_bytes + before_bytes
    places = {
        "size": ("V4", 0),
        "flag": (">i4", 12),
        "body_size": ("V4", 16),
        "body": (f"V{body_bytes}", _HEAD_BYTES),
        "before": (f"V{before_bytes}", _HEAD_BYTES + body_bytes),
        "unique": (f"V{unique_bytes}", unique_at),
        "after": (f"V{message_bytes - unique_at - unique_bytes}", unique_at + unique_bytes),
    }
    return _dtype(places, message_bytes)


@lru_cache(maxsize=1024)
def _entry_row(
    size: int, middle_bytes: int, body_bytes: int, unique_at: int, unique_bytes: int
) -> np.dtype[Any]:
    """An entry of the log; `unique_at` counts from the end of its position on."""
    places = {
        "crc": (">u4", 8),
        "flag": (">i4", 16),
        "offset": (">i8", 20),
        "position": (">i8", 28),
        "body": (f"V{body_bytes}", _FRONT_BYTES + middle_bytes),
        "unique": (f"V{unique_bytes}", _FRONT_BYTES + unique_at),
    }
    return _dtype(places, size)


@lru_cache(maxsize=1024)
def _closing_row(size: int) -> np.dtype[Any]:
    """The checksum at the end of an entry."""
    at = size - records.CRC_PROPERTY_BYTES
    widths = [table.itemsize for table in (_FIRST, _MIDDLE, _LAST)]
    places = {
        "crc_first": (f"V{widths[0]}", at),
        "crc_middle": (f"V{widths[1]}", at + widths[0]),
        "crc_last": (f"V{widths[2]}", at + widths[0] + widths[1]),
    }
    return _dtype(places, size)


def _dtype(places: dict[str, tuple[str, int]], row_bytes: int) -> np.dtype[Any]:
    return np.dtype(
        {
            "names": list(places),
            "formats": [kind for kind, _ in places.values()],
            "offsets": [at for _, at in places.values()],
            "itemsize": row_bytes,
        }
    )
