"""This module closes entries of one size: a table, of which each column is written with one call.

It gives the bytes that `records.crc_property` gives for each of them; tests of those who use it
hold the two together. Pure.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from isal.isal_zlib import crc32

from sluice.protocol import records

_MASK_31: Final = 0x7FFFFFFF


def _table_of(texts: tuple[bytes, ...]) -> npt.NDArray[np.void]:
    return np.frombuffer(b"".join(texts), f"V{len(texts[0])}")


# What a checksum is written with: by its last four digits, those before them, and the first two.
_FIRST, _MIDDLE, _LAST = map(_table_of, records.DIGIT_TABLES)


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
def _closing_row(size: int) -> np.dtype[Any]:
    """The checksum at the end of an entry."""
    at = size - records.CRC_PROPERTY_BYTES
    widths = [table.itemsize for table in (_FIRST, _MIDDLE, _LAST)]
    places = {
        "crc_first": (f"V{widths[0]}", at),
        "crc_middle": (f"V{widths[1]}", at + widths[0]),
        "crc_last": (f"V{widths[2]}", at + widths[0] + widths[1]),
    }
    return np.dtype(
        {
            "names": list(places),
            "formats": [kind for kind, _ in places.values()],
            "offsets": [at for _, at in places.values()],
            "itemsize": size,
        }
    )
