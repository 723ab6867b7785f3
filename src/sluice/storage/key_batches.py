"""This module gathers the keys of messages on their way into the index, and hashes them.

A message is found under topic#UNIQ_KEY, topic#key for each blank-separated part of KEYS, and
topic#T#tag, in this order. The hash is Java's String.hashCode made positive. Does no IO.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from sluice.protocol.records import message_keys
from sluice.storage.key_index_file import I32_MAX, Ints

_CHUNK_UNITS: Final = 1 << 18

# A message's topic, keys (`records.message_keys`), position and store time.
Found = tuple[bytes, tuple[bytes, bytes, bytes], int, int]


class KeyRun(NamedTuple):
    """The keys of messages that lie one after the other and differ in their unique keys only."""

    topic: bytes
    uniques: bytes  # joined
    unique_bytes: int  # of each
    keys: bytes
    tag: bytes
    position: int  # of the first
    size: int  # of each
    message_count: int
    store_ms: int

    def one_by_one(self) -> list[Found]:
        topic, uniques, width, keys, tag, position, size, count, store_ms = self
        names = [uniques[at : at + width] for at in range(0, width * count, width)]
        return [
            (topic, (name, keys, tag), position + size * number, store_ms)
            for number, name in enumerate(names)
        ]

    @property
    def last_position(self) -> int:
        return self.position + self.size * (self.message_count - 1)

    @property
    def form(self) -> tuple[bytes, int] | None:
        """Runs with the same form can be hashed together; None: each message by itself."""
        if self.keys or self.tag or not self.uniques.isascii() or not self.topic.isascii():
            return None
        return self.topic, self.unique_bytes


class KeyColumns(NamedTuple):
    """The keys of messages to one topic that have one key each and nothing else to be found by."""

    topic: bytes
    joined: bytes
    lengths: Ints  # of each key
    positions: Ints  # of each message
    store_ms: int

    @property
    def message_count(self) -> int:
        return len(self.positions)

    @property
    def position(self) -> int:
        """Of the first message."""
        return int(self.positions[0])

    @property
    def last_position(self) -> int:
        return int(self.positions[-1])

    def one_by_one(self) -> list[Found]:
        ends = np.cumsum(self.lengths)
        spans = zip((ends - self.lengths).tolist(), ends.tolist(), strict=True)
        keys = [(b"", self.joined[begin:end], b"") for begin, end in spans]
        positions = self.positions.tolist()
        return [(self.topic, *each, self.store_ms) for each in zip(keys, positions, strict=True)]

    def hashed(self) -> tuple[Ints, Ints, Ints]:
        """What `KeyBatch.hashed` gives, of these alone."""
        times = np.full(len(self.positions), self.store_ms, np.int64)
        if not self.joined.isascii() or not self.topic.isascii():
            names = _spread(self.one_by_one())[0]
            return key_hashes(names), self.positions, times
        own = _hash_units(np.frombuffer(self.joined, np.uint8), self.lengths)
        moved = _before(self.topic, int(self.lengths.max()))[self.lengths]
        return _positive(own + moved), self.positions, times


# What is noted of messages: of each by itself, or of many that have much in common.
Noted = Found | KeyRun | KeyColumns


class KeyBatch:
    """The keys of some messages. It belongs to the store's owner.

    Messages are added beside the appends, so that only takes note of them; what the index needs is
    made of it by whoever writes the batch.
    """

    def __init__(self) -> None:
        self._found: list[Noted] = []
        self.message_count = 0  # of all that were added, also those without a key
        self._size_bytes = 0  # of the last message, where it is known

    def add(
        self, topic: bytes, properties: bytes, position: int, store_ms: int, size_bytes: int = 0
    ) -> None:
        """Gather the keys of one message; messages come in the order of the log.

        With `size_bytes` a later start goes on behind the message, without it at the message. Both
        are right, because the index knows what it has.
        """
        self.add_found([(topic, message_keys(properties), position, store_ms)])
        self._size_bytes = size_bytes

    def add_found(self, found: Sequence[Noted]) -> None:
        """The same for messages whose keys are known."""
        self._found += found
        self._size_bytes = 0
        for each in found:
            if type(each) is KeyRun or type(each) is KeyColumns:
                self.message_count += each.message_count
            else:
                self.message_count += 1

    @property
    def first_position(self) -> int:
        """Of the messages that were added; -1: there was none."""
        if not self._found:
            return -1
        first = self._found[0]
        return first.position if isinstance(first, KeyRun | KeyColumns) else first[2]

    @property
    def end_position(self) -> int:
        if not self._found:
            return -1
        last = self._found[-1]
        if isinstance(last, KeyRun | KeyColumns):
            return last.last_position
        return last[2] + self._size_bytes

    def hashed(self) -> tuple[Ints, Ints, Ints]:
        """The hash of each key, and position and store time of its message."""
        parts: list[tuple[Ints, Ints, Ints]] = []
        for form, group in groupby(self._found, _form):
            if isinstance(form, tuple):
                runs = [each for each in group if isinstance(each, KeyRun)]
                parts.append(_hashed_runs(*form, runs))
            elif form is KeyColumns:
                parts += [each.hashed() for each in group if isinstance(each, KeyColumns)]
            else:
                names, positions, times = _spread(_one_by_one(group))
                parts.append((key_hashes(names), positions, times))
        if not parts:
            return np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(0, np.int64)
        hashes, positions, times = (np.concatenate(columns) for columns in zip(*parts, strict=True))
        assert (np.diff(positions) >= 0).all(), "messages come in the order of the log"
        return hashes, positions, times

    def spread(self) -> tuple[list[bytes], Ints, Ints]:
        """What the messages are found under, and position and store time of each key's message."""
        return _spread(_one_by_one(self._found))


def _form(found: Noted) -> tuple[bytes, int] | type[KeyColumns] | None:
    if isinstance(found, KeyColumns):
        return KeyColumns
    return found.form if isinstance(found, KeyRun) else None


def _one_by_one(found: Iterable[Noted]) -> list[Found]:
    singles: list[Found] = []
    for each in found:
        if isinstance(each, KeyRun | KeyColumns):
            singles += each.one_by_one()
        else:
            singles.append(each)
    return singles


def _hashed_runs(topic: bytes, unique_bytes: int, runs: list[KeyRun]) -> tuple[Ints, Ints, Ints]:
    """Hashes, positions and times of messages that are found under their unique keys alone."""
    counts = np.array([run.message_count for run in runs], np.int64)
    firsts = np.array([run.position for run in runs], np.int64)
    sizes = np.array([run.size for run in runs], np.int64)
    numbers = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    positions = np.repeat(firsts, counts) + np.repeat(sizes, counts) * numbers
    times = np.repeat(np.array([run.store_ms for run in runs], np.int64), counts)
    units = np.frombuffer(b"".join([run.uniques for run in runs]), np.uint8)
    own = _hash_units(units, np.full(len(numbers), unique_bytes))
    moved = _before(topic, unique_bytes)[unique_bytes]
    return _positive(own + moved), positions, times


def _before(topic: bytes, length_max: int) -> npt.NDArray[np.uint32]:
    """What topic and separator add to the hash of a key that they stand before, by its length:
    31^length times their own, modulo 2^32.
    """
    prefix = topic + b"#"
    powers = np.full(length_max + 1, 31, np.uint32)
    powers[0] = 1
    own = _hash_units(np.frombuffer(prefix, np.uint8), np.array([len(prefix)]))
    return own * np.cumprod(powers, dtype=np.uint32)


def _spread(found: list[Found]) -> tuple[list[bytes], Ints, Ints]:
    """The same, each with the names of its keys."""
    count = len(found)
    if not count:
        return [], np.zeros(0, np.int64), np.zeros(0, np.int64)
    # Column by column, because that runs without the interpreter, which others need.
    topics, keys, places, moments = zip(*found, strict=True)
    positions = np.fromiter(places, np.int64, count)
    times = np.fromiter(moments, np.int64, count)
    assert (np.diff(positions) >= 0).all(), "messages come in the order of the log"
    uniques, severals, tags = zip(*keys, strict=True)
    if not any(severals) and not any(tags) and all(uniques):
        marks = {topic: topic + b"#" for topic in set(topics)}
        names = [marks[topic] + unique for topic, unique in zip(topics, uniques, strict=True)]
        return names, positions, times
    names = []
    counts = []
    for topic, (unique, several, tag) in zip(topics, keys, strict=True):
        before = len(names)
        prefix = topic + b"#"
        if unique:
            names.append(prefix + unique)
        if several:
            # A part that equals the unique key is indexed once more, as Apache does.
            if b" " in several:
                names.extend([prefix + part for part in several.split(b" ") if part])
            else:
                names.append(prefix + several)
        if tag:
            names.append(prefix + b"T#" + tag)
        counts.append(len(names) - before)
    return names, np.repeat(positions, counts), np.repeat(times, counts)


def key_hashes(keys: Sequence[bytes]) -> Ints:
    """The index's hash of each key (none is empty): Java's String.hashCode made positive."""
    if not keys:
        return np.zeros(0, np.int64)
    joined = b"".join(keys)
    lengths = np.fromiter(map(len, keys), np.int64, len(keys))
    hashes = _hash_units(np.frombuffer(joined, np.uint8), lengths)
    if not joined.isascii():
        # Java hashes UTF-16 units, which are the bytes only where all of them are ASCII.
        wide = [at for at, key in enumerate(keys) if not key.isascii()]
        texts = [
            keys[at].decode("utf-8", "replace").encode("utf-16-be", "surrogatepass") for at in wide
        ]
        lengths = np.fromiter(map(len, texts), np.int64, len(texts)) // 2
        hashes[wide] = _hash_units(np.frombuffer(b"".join(texts), ">u2"), lengths)
    return _positive(hashes)


def _positive(hashes: npt.NDArray[np.uint32]) -> Ints:
    positive = np.abs(hashes.view(np.int32).astype(np.int64))
    positive[positive > I32_MAX] = 0  # the one value whose abs() stays negative in Java
    return positive


def _hash_units(units: npt.NDArray[Any], lengths: Ints) -> npt.NDArray[np.uint32]:
    """The sum of unit x 31^(distance to the key's end), modulo 2^32, of each key."""
    powers = np.full(int(lengths.max()), 31, np.uint32)
    powers[0] = 1
    powers = np.cumprod(powers, dtype=np.uint32)
    if lengths.min() == len(powers):
        # All are of one length, as unique keys mostly are: rows of one table.
        rows = units.reshape(-1, len(powers))
        # Without tables in between: memory for those would cost more than the sums.
        return np.asarray(np.einsum("ij,j->i", rows, powers[::-1], dtype=np.uint32))
    ends = np.cumsum(lengths)
    hashes = np.empty(len(lengths), np.uint32)
    low = 0
    while low < len(lengths):
        # In parts, because the working arrays are many times larger than the keys.
        base = int(ends[low] - lengths[low])
        high = max(low + 1, int(np.searchsorted(ends, base + _CHUNK_UNITS, "right")))
        part_ends = ends[low:high] - base
        part_lengths = lengths[low:high]
        total = int(part_ends[-1])
        weights = powers[np.repeat(part_ends, part_lengths) - 1 - np.arange(total)]
        products = units[base : base + total].astype(np.uint32) * weights
        hashes[low:high] = np.add.reduceat(products, part_ends - part_lengths, dtype=np.uint32)
        low = high
    return hashes
