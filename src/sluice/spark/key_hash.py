"""This module finds the partitions of keys as Kafka's clients do, for a column of keys at once.

Kafka's producers send a record with a key to the partition that murmur2 of the key says, so that
all records of a key are in one partition, whoever sends them. A job that was written for Spark's
Kafka sink, and a producer of Kafka's that fills the same topic, must agree about it.

    key      a word of four bytes a step, all keys that have one together: the longest first
    rest     one to three bytes, and the end
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from sluice.spark.layout import Column, Numbers

_SEED: Final = 0x9747B28C
_M: Final = np.uint32(0x5BD1E995)
_MIX_SHIFT: Final = np.uint32(24)
_END_SHIFTS: Final = (np.uint32(13), np.uint32(15))
_POSITIVE: Final = np.uint32(0x7FFFFFFF)
_WORD_BYTES: Final = 4

Words = npt.NDArray[np.uint32]


def key_partitions(keys: Column, count: int) -> Numbers:
    """The partition of each key, of a topic that has `count` of them."""
    return (murmur2(keys) & _POSITIVE).astype(np.int64) % count


def murmur2(keys: Column) -> Words:
    """The hash of each key, with Kafka's seed."""
    order = np.argsort(-keys.sizes, kind="stable")
    starts, sizes = keys.starts[order], keys.sizes[order]
    hashes = (np.uint32(_SEED) ^ sizes.astype(np.uint32)).astype(np.uint32)
    whole = sizes // _WORD_BYTES
    for step in range(int(whole[0]) if len(whole) else 0):
        having = int(np.searchsorted(-whole, -step, side="left"))
        word = _word(keys.data, starts[:having] + step * _WORD_BYTES, _WORD_BYTES) * _M
        word ^= word >> _MIX_SHIFT
        hashes[:having] = hashes[:having] * _M ^ word * _M
    for left in range(1, _WORD_BYTES):
        ending = np.flatnonzero(sizes % _WORD_BYTES == left)
        word = _word(keys.data, starts[ending] + whole[ending] * _WORD_BYTES, left)
        hashes[ending] = (hashes[ending] ^ word) * _M
    hashes ^= hashes >> _END_SHIFTS[0]
    hashes *= _M
    hashes ^= hashes >> _END_SHIFTS[1]
    found = np.empty_like(hashes)
    found[order] = hashes
    return found


def _word(data: npt.NDArray[np.uint8], places: Numbers, byte_count: int) -> Words:
    """So many bytes from each place on, the lowest first."""
    word = np.zeros(len(places), np.uint32)
    for number in range(byte_count):
        word |= data[places + number].astype(np.uint32) << np.uint32(8 * number)
    return word
