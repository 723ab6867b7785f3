"""This module makes copies of entries that are alike: one table, filled column by column.

Timers of one producer mostly differ in body, unique key, queue and time only. Those that are due
together are then rows of a table, of which each column is moved with one call. It gives the bytes
that `copies.py` gives, and takes no entries that are not of this form; a test holds the two
together. Everything here belongs to the store's owner.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np
import numpy.typing as npt
from numpy.lib.stride_tricks import as_strided

from sluice.protocol import records
from sluice.protocol.lifetimes import EXPIRES_NAME
from sluice.protocol.record_tables import close_entries
from sluice.storage.copies import COPIED, HEAD_BYTES, UNUSUAL, Choose, Into, Keys, Share
from sluice.storage.key_batches import Found, KeyRun
from sluice.storage.queue_index import SIMPLE_ROW, QueueIndex

if TYPE_CHECKING:
    from sluice.storage.store import Store

Bytes = npt.NDArray[np.uint8]
Numbers = npt.NDArray[np.int64]

COUNT_MIN: Final = 16  # of fewer, each by itself is as fast
_TABLE_BYTES_MAX: Final = 4 << 20
_SPAN_BYTES: Final = 8 << 20  # of the log, that are looked at together
_GROUPS_MAX: Final = 256
_GROUP_BYTES_MAX: Final = 7  # of what tells one queue from another: they become one number
# Where things stand in an entry's head (`COPIED`).
_SIZE = slice(0, 4)
_MAGIC = slice(4, 8)
_OFFSET = slice(20, 28)
_POSITION = slice(28, 36)
_FLAGS = slice(36, 40)
_STORE_TIME = slice(56, 64)
_ORIGIN = slice(76, 84)
_BODY_SIZE = slice(84, 88)
_QUEUE_ID = slice(12, 16)
# What a copy takes over: checksum of the body, flag, birth, times that it was tried.
_TAKEN_OVER = (slice(8, 12), slice(16, 20), slice(40, 56), slice(72, 76))
_UNIQUE: Final = b"UNIQ_KEY"
_KEYS: Final = b"KEYS"


class Names(NamedTuple):
    """What a `Choose` looks at, so that one answer serves many: the queue it names depends on the
    properties `places` alone, what it adds on the store time alone, and `free` ones on nothing.
    """

    places: frozenset[bytes]
    free: frozenset[bytes]


class _Alike(NamedTuple):
    """Entries that have one form."""

    rows: Bytes
    positions: Numbers
    body_bytes: int
    properties_at: int
    properties_bytes: int  # without the checksum

    def cut(self, count: int) -> _Alike:
        return self._replace(rows=self.rows[:count], positions=self.positions[:count])

    def properties(self, row: int) -> bytes:
        end = self.properties_at + self.properties_bytes
        return self.rows[row, self.properties_at : end].tobytes()

    def store_times(self) -> Numbers:
        return _numbers(self.rows[:, _STORE_TIME])


class _Chosen(NamedTuple):
    """What becomes of them."""

    queues: list[QueueIndex]
    group: Numbers  # of each row: the number of its queue
    closings: list[bytes]
    closing: Numbers  # of each row: the number of what is added
    keys: Keys  # of the first
    unique: slice  # among the properties
    several: slice
    has_own_keys: bool  # the rows differ in KEYS too


def stage_alike(
    store: Store, positions: Sequence[int], choose: Choose, names: Names
) -> list[Share]:
    """Do what `copies.stage_copies` does for the first ones, as long as they are alike.

    Empty: they are not, or too few.
    """
    alike = _read(store, positions)
    chosen = None if alike is None else _choose(alike, choose, names)
    if alike is None or chosen is None:
        return []
    targets = [Into(store, queue) for queue in chosen.queues]
    added_bytes = len(chosen.closings[0])
    encoder, log = store.encoder, store.log
    properties_bytes = alike.properties_bytes + added_bytes + encoder.crc_bytes
    size = targets[0].rest_bytes + alike.body_bytes + properties_bytes
    if (
        size > encoder.entry_bytes_max
        or properties_bytes > records.PROPERTIES_BYTES_MAX
        or alike.body_bytes > encoder.body_bytes_max
    ):
        return []
    position = log.position_for(size)
    count = min(len(alike.rows), (log.file_end - position) // size)
    alike = alike.cut(count)
    entries = _entries(store, alike, chosen, targets, size, position)
    log.stage(entries)
    code = records.java_hash(chosen.keys[2]) if chosen.keys[2] else 0
    units = np.empty(count, SIMPLE_ROW)
    units["position"] = np.arange(position, position + size * count, size)
    units["size"] = size
    units["code"] = code
    found: list[Found | KeyRun] = _found(store, alike, chosen, size, position)
    shares: list[Share] = []
    for number, target in enumerate(targets):
        own = units[chosen.group[:count] == number]
        if len(own):
            target.units.append(own.tobytes())
            target.codes.add(code)
            # The key index takes them in the order of the log, whichever queue they are in.
            shares.append(target.stage(found, position + size * count))
            found = []
    return shares


# ------------------------------------------------------------------------------------ the originals


def _read(store: Store, positions: Sequence[int]) -> _Alike | None:
    """The first ones that are as long, and have as long parts, as the very first."""
    if len(positions) < COUNT_MIN:
        return None
    log = store.log
    base = positions[0] - positions[0] % log.segment_bytes
    # What is before the first, or far behind it, is left for another table.
    easy_from = max(store.reader.trusted_from, log.start, positions[0])
    easy_to = min(store.confirmed, base + log.segment_bytes - HEAD_BYTES, easy_from + _SPAN_BYTES)
    if not positions[0] == easy_from < easy_to:
        return None
    file = log.segments[base].file
    view = file.view()
    first_at = positions[0] - base
    size = int.from_bytes(view[first_at : first_at + 4], "big")
    if not HEAD_BYTES < size <= len(view) - first_at:
        return None
    wanted = np.array(positions[: _TABLE_BYTES_MAX // size], np.int64)
    ends = wanted + size <= base + len(view)
    wanted = wanted[: _prefix((wanted >= easy_from) & (wanted < easy_to) & ends)]
    span = int(wanted[0]) - base, int(wanted.max()) - base + size
    if wanted[0] < store.reader.hot_from and not file.resident(*span):
        return None
    whole = np.frombuffer(view, np.uint8)
    windows = as_strided(whole, (len(whole) - size + 1, size), (1, 1), writeable=False)
    rows = windows[wanted - base]
    body_bytes = int.from_bytes(rows[0, _BODY_SIZE].tobytes(), "big", signed=True)
    flags = int.from_bytes(rows[0, _FLAGS].tobytes(), "big")
    topic_at = HEAD_BYTES + body_bytes
    if body_bytes < 0 or topic_at >= size or flags & UNUSUAL:
        return None
    properties_at = topic_at + 3 + int(rows[0, topic_at])
    columns = np.r_[
        _SIZE, _MAGIC, _FLAGS, _BODY_SIZE, topic_at, properties_at - 2, properties_at - 1
    ]
    if properties_at >= size or rows[0, _MAGIC].tobytes() != records.MAGIC_V1.to_bytes(4, "big"):
        return None
    same = (rows[:, columns] == rows[0, columns]).all(axis=1)
    count = _prefix(same & (_numbers(rows[:, _POSITION]) == wanted))
    first = rows[0, properties_at:].tobytes()
    properties_bytes = len(records.without_checksum(first))
    if count < COUNT_MIN:
        return None
    return _Alike(rows[:count], wanted[:count], body_bytes, properties_at, properties_bytes)


def _prefix(holds: npt.NDArray[np.bool_]) -> int:
    """Of how many first ones it holds."""
    return len(holds) if holds.all() else int(np.argmin(holds))


def _numbers(columns: Bytes) -> Numbers:
    return np.ascontiguousarray(columns).view(">i8")[:, 0].astype(np.int64)


# ----------------------------------------------------------------------------- what becomes of them


def _choose(alike: _Alike, choose: Choose, names: Names) -> _Chosen | None:
    first = alike.properties(0)
    spans = _spans(first)
    may_differ = [*names.places, *names.free, _UNIQUE, _KEYS]
    if EXPIRES_NAME in first or any(len(spans.get(name, ())) > 1 for name in may_differ):
        return None
    differing = _differing(alike)
    if differing is None:
        return None
    places: list[int] = []
    for name in may_differ:
        for span in spans.get(name, ()):
            inside = (differing >= span.start) & (differing < span.stop)
            if name in names.places:
                places += differing[inside].tolist()
            differing = differing[~inside]
    if len(differing) or len(places) > _GROUP_BYTES_MAX:
        return None
    code = np.zeros(len(alike.rows), np.int64)
    for place in places:
        code = code << 8 | alike.rows[:, alike.properties_at + place]
    _, samples, group = np.unique(code, return_index=True, return_inverse=True)
    times, timed, closing = np.unique(alike.store_times(), return_index=True, return_inverse=True)
    if len(samples) > _GROUPS_MAX:
        return None
    nothing = slice(0, 0)
    unique, several = (spans.get(name, [nothing])[0] for name in (_UNIQUE, _KEYS))
    queues: list[QueueIndex] = []
    tag = records.message_keys(first)[2]
    for row in samples.tolist():
        properties = alike.properties(row)
        found = choose(properties, int(times[closing[row]]))
        # Whoever chooses finds the keys in his own way: they have to be those that are found here.
        if found is None or found[2] != (properties[unique], properties[several], tag):
            return None
        queues.append(found[0])
    if any(queue.topic_bytes != queues[0].topic_bytes for queue in queues):
        return None
    closings: list[bytes] = []
    for row, store_ms in zip(timed.tolist(), times.tolist(), strict=True):
        found = choose(alike.properties(row), store_ms)
        if found is None or len(found[1]) != len(closings[0] if closings else found[1]):
            return None
        closings.append(found[1])
    keys = alike.rows[:, _moved(several, alike.properties_at)]
    return _Chosen(
        *(queues, group, closings, closing, (first[unique], first[several], tag), unique, several),
        bool((keys != keys[:1]).any()),
    )


def _spans(properties: bytes) -> dict[bytes, list[slice]]:
    """Where the values of each property are."""
    spans: dict[bytes, list[slice]] = {}
    at = 0
    for item in properties.split(b"\x02"):
        name, mark, value = item.partition(b"\x01")
        end = at + len(item)
        if mark:
            spans.setdefault(name, []).append(slice(end - len(value), end))
        at = end + 1
    return spans


def _differing(alike: _Alike) -> Numbers | None:
    """In which bytes of their properties the rows differ; None: their parts do."""
    begin = alike.properties_at
    end = begin + alike.properties_bytes
    # With the name of the checksum's property: all have it there, or none.
    columns = alike.rows[:, begin : end + len(records.CRC_NAME)]
    differing: Numbers = (columns != columns[0]).any(axis=0).nonzero()[0]
    values = columns[:, differing]
    if ((values == 1) | (values == 2)).any():
        return None
    return differing


def _moved(part: slice, by: int) -> slice:
    return slice(part.start + by, part.stop + by)


# -------------------------------------------------------------------------------------- the copies


def _entries(
    store: Store, alike: _Alike, chosen: _Chosen, targets: list[Into], size: int, position: int
) -> bytearray:
    """The copies, and moves the targets' offsets on."""
    count, body_bytes, encoder = len(alike.rows), alike.body_bytes, store.encoder
    group = chosen.group[:count]
    closings = np.frombuffer(b"".join(chosen.closings), np.uint8).reshape(len(chosen.closings), -1)
    target = targets[0]
    stored_bytes = alike.properties_bytes + closings.shape[1] + encoder.crc_bytes
    flags = int.from_bytes(alike.rows[0, _FLAGS].tobytes(), "big", signed=True)
    head = COPIED.pack(
        *(size, target.magic, bytes(4), 0, bytes(4), 0, 0, flags, bytes(16), store.turn_ms()),
        *(encoder.store_host, bytes(4), 0, body_bytes),
    )
    topic_at = HEAD_BYTES + body_bytes
    fixed = target.topic_field + stored_bytes.to_bytes(2, "big")
    template = b"".join((head, bytes(body_bytes), fixed, bytes(stored_bytes)))
    entries = bytearray(template) * count
    table = np.frombuffer(entries, np.uint8).reshape(count, size)
    for part in (*_TAKEN_OVER, slice(HEAD_BYTES, topic_at)):
        table[:, part] = alike.rows[:, part]
    at = topic_at + len(fixed)
    properties_end = alike.properties_at + alike.properties_bytes
    table[:, at : at + alike.properties_bytes] = alike.rows[:, alike.properties_at : properties_end]
    at += alike.properties_bytes
    if closings.shape[1]:
        table[:, at : at + closings.shape[1]] = closings[chosen.closing[:count]]
    offsets = np.empty(count, np.int64)
    ids = np.array([one.queue_id for one in targets], np.int64)
    for number, one in enumerate(targets):
        own = (group == number).nonzero()[0]
        offsets[own] = np.arange(one.offset, one.offset + len(own))
        one.offset += len(own)
    _put(table, _OFFSET, offsets, ">i8")
    _put(table, _POSITION, np.arange(position, position + size * count, size), ">i8")
    _put(table, _ORIGIN, alike.positions, ">i8")
    _put(table, _QUEUE_ID, ids[group], ">i4")
    close_entries(entries, size)
    return entries


def _put(table: Bytes, part: slice, numbers: Numbers, form: str) -> None:
    width = part.stop - part.start
    table[:, part] = numbers.astype(form).view(np.uint8).reshape(-1, width)


def _found(
    store: Store, alike: _Alike, chosen: _Chosen, size: int, position: int
) -> list[Found | KeyRun]:
    """The keys of the copies, for the index."""
    count, topic, store_ms = len(alike.rows), chosen.queues[0].topic_bytes, store.turn_ms()
    _, several, tag = chosen.keys
    uniques = alike.rows[:, _moved(chosen.unique, alike.properties_at)]
    width = uniques.shape[1]
    if width and not chosen.has_own_keys:
        joined = uniques.tobytes()
        return [KeyRun(topic, joined, width, several, tag, position, size, count, store_ms)]
    found: list[Found | KeyRun] = []
    for row in range(count):
        properties = alike.properties(row)
        keys = (properties[chosen.unique], properties[chosen.several], tag)
        found.append((topic, keys, position + size * row, store_ms))
    return found
