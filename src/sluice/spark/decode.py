"""This module turns stored entries into Arrow columns, with no loop over rows.

Fields of fixed places are taken out of all entries at once by numpy; bodies and properties, whose
lengths differ, are cut out of the data as Arrow's binary arrays. Every entry's checksum is compared
(in a loop that runs in C). Entries that are not of the usual form (compressed bodies, batches
stored whole) are taken apart one by one: they are few, or a topic has nothing else.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from isal.isal_zlib import crc32

from sluice.client.core.messages import ReceivedMessage, read_pulled
from sluice.errors import ProtocolError
from sluice.model import Buffer
from sluice.protocol import records
from sluice.protocol.json_members import MessageQueue
from sluice.spark.columns import TIMESTAMP_TYPE

Numbers = npt.NDArray[np.int64]
Bytes = npt.NDArray[np.uint8]

_LEAST_BYTES: Final = 91
_MAGICS: Final = (records.MAGIC_V1, records.MAGIC_V2)
_ODD: Final = records.SYS_COMPRESSED | records.SYS_NEED_UNWRAP | records.SYS_INNER_BATCH
_CRC_NAME: Final = np.frombuffer(b"__CRC32#\x01", np.uint8)
_CRC_BYTES: Final = records.CRC_PROPERTY_BYTES
_SEPARATOR: Final = 2
_POWERS: Final = 10 ** np.arange(10, dtype=np.int64)  # least significant digit first
_MASK_31: Final = 0x7FFFFFFF
_HEX: Final = np.frombuffer(b"0123456789ABCDEF", np.uint8)
# Properties that are no headers of the user's: RocketMQ's own.
_OWN: Final = pa.array(
    [
        *("TAGS", "KEYS", "UNIQ_KEY", "WAIT", "__CRC32#", "CLUSTER", "MSG_REGION", "TRACE_ON"),
        *("MIN_OFFSET", "MAX_OFFSET", "DELAY", "REAL_TOPIC", "REAL_QID", "PGROUP", "TRAN_MSG"),
        *("BORN_HOST", "BORN_TIMESTAMP", "INNER_NUM", "INNER_BASE", "DUP_INFO", "TTL"),
        *("TIMER_OUT_MS", "TIMER_DELIVER_MS", "TIMER_DELAY_SEC", "TIMER_DELAY_MS"),
        *("TIMER_ENQUEUE_MS", "TIMER_DEQUEUE_MS", "TIMER_ROLL_TIMES", "ORIGIN_MESSAGE_ID"),
    ],
    pa.string(),
)


class Place(NamedTuple):
    """Where entries come from, as the rows say it."""

    topic: str
    broker: str
    queue_id: int
    partition: int


class Entries:
    """Stored entries of one queue, as columns of numbers; checked."""

    def __init__(self, data: Buffer, sizes: Numbers, place: Place) -> None:
        self._place = place
        self._bytes: Bytes = np.frombuffer(data, np.uint8)
        self.buffer = pa.py_buffer(self._bytes)
        self.count = len(sizes)
        self._ends = np.cumsum(sizes)
        self._starts = self._ends - sizes
        self._check_frame(sizes)
        self.offsets = self._field(self._starts + 20, ">i8")
        self.sys_flags = self._field(self._starts + 36, ">i4")
        self._find_parts()
        self._check_sums()

    def _wrong(self, index: int, why: str) -> ProtocolError:
        offset = int(self._field(self._starts[index : index + 1] + 20, ">i8")[0])
        place = self._place
        return ProtocolError(
            f"topic {place.topic}, queue {place.queue_id} of broker {place.broker}, offset "
            f"{offset}: {why}; the message is damaged and was not read"
        )

    def _field(self, ats: Numbers, kind: str) -> Numbers:
        """A number at these places of the data."""
        if not len(ats):
            return np.zeros(0, np.int64)
        width = np.dtype(kind).itemsize
        # The data as if every byte began such a number; of these, those that do.
        every: npt.NDArray[Any] = np.ndarray(
            (len(self._bytes) - width + 1,), kind, self._bytes.data, 0, (1,)
        )
        found: Numbers = every[ats].astype(np.int64)
        return found

    def _rows(self, ats: Numbers, width: int) -> Bytes:
        """So many bytes at each of these places."""
        every: Bytes = np.ndarray(
            (len(self._bytes) - width + 1, width), np.uint8, self._bytes.data, 0, (1, 1)
        )
        found: Bytes = every[ats]
        return found

    def _check_frame(self, sizes: Numbers) -> None:
        if not self.count:
            return
        if int(sizes.min()) < _LEAST_BYTES or int(self._ends[-1]) != len(self._bytes):
            raise ProtocolError(f"topic {self._place.topic}: entries do not fill their answer")
        magics = self._field(self._starts + 4, ">u4")
        wrong = (magics != _MAGICS[0]) & (magics != _MAGICS[1])
        wrong |= self._field(self._starts, ">i4") != sizes
        if wrong.any():
            raise self._wrong(int(np.argmax(wrong)), "no entry begins here")
        self._is_long = magics == records.MAGIC_V2

    def _find_parts(self) -> None:
        """Where bodies and properties begin and end."""
        if not self.count:
            empty = np.zeros(0, np.int64)
            self.body_at = self.body_end = self.properties_at = empty
            self._born_wide = empty
            return
        self._born_wide = 12 * ((self.sys_flags & records.SYS_BORN_V6) != 0)
        wide = self._born_wide + 12 * ((self.sys_flags & records.SYS_STORE_V6) != 0)
        ends = self._ends
        self.body_at = self._starts + 88 + wide
        self._require(self.body_at <= ends)
        self.body_end = self.body_at + self._field(self.body_at - 4, ">i4")
        self._require((self.body_end >= self.body_at) & (self.body_end + 3 <= ends))
        topic_bytes = self._bytes[self.body_end].astype(np.int64)
        topic_at = self.body_end + 1
        if self._is_long.any():
            long_bytes = self._field(np.minimum(self.body_end, len(self._bytes) - 2), ">i2")
            topic_bytes = np.where(self._is_long, long_bytes, topic_bytes)
            topic_at = topic_at + self._is_long
        self.properties_at = topic_at + topic_bytes + 2
        self._require((self.properties_at >= topic_at) & (self.properties_at <= ends))
        count = self._field(self.properties_at - 2, ">i2")
        self._require(self.properties_at + count == ends)

    def _require(self, good: npt.NDArray[np.bool_]) -> None:
        if not good.all():
            raise self._wrong(int(np.argmin(good)), "its parts do not add up to its size")

    def _check_sums(self) -> None:
        """Of the whole entry where it has such a checksum, of its body otherwise."""
        if not self.count:
            return
        ends = self._ends
        name_at = ends - _CRC_BYTES
        trailers = self._rows(name_at, _CRC_BYTES)
        has_room = name_at >= self.properties_at
        unlike = (trailers[:, : len(_CRC_NAME)] != _CRC_NAME).sum(axis=1)
        # One damaged byte in the checksum's own name must not turn the check off.
        self._require(~has_room | (unlike != 1))
        whole = has_room & (unlike == 0)
        self._require(~whole | (trailers[:, -1] == _SEPARATOR))
        digits = trailers[:, len(_CRC_NAME) : -1].astype(np.int64) - 48
        expected = np.where(whole, digits @ _POWERS, self._field(self._starts + 8, ">u4"))
        begins = np.where(whole, self._starts, self.body_at)
        stops = np.where(whole, name_at, self.body_end)
        slices = map(slice, begins.tolist(), stops.tolist())
        sums = np.fromiter(
            map(crc32, map(self._bytes.data.__getitem__, slices)), np.int64, self.count
        )
        wrong = (sums & _MASK_31) != expected
        if wrong.any():
            raise self._wrong(int(np.argmax(wrong)), "its checksum does not match")

    @property
    def has_odd(self) -> bool:
        """Whether an entry is not of the usual form."""
        return bool((self.sys_flags & _ODD).any())

    def between(self, start: int, stop: int) -> npt.NDArray[np.bool_]:
        """Which entries lie in [start, stop)."""
        inside: npt.NDArray[np.bool_] = (self.offsets >= start) & (self.offsets < stop)
        return inside

    # -------------------------------------------------------------------------------------- columns

    @property
    def store_ms(self) -> Numbers:
        return self._field(self._starts + 56 + self._born_wide, ">i8")

    @property
    def born_ms(self) -> Numbers:
        return self._field(self._starts + 40, ">i8")

    def bodies(self) -> pa.Array:
        return cut(self.buffer, self.body_at, self.body_end)

    def properties(self) -> pa.Array:
        return cut(self.buffer, self.properties_at, self._ends)

    def message_ids(self) -> pa.Array:
        """RocketMQ's offset message ids: the broker's address and the position, in hex."""
        host_at = self._starts + 64 + self._born_wide
        if (self.sys_flags & records.SYS_STORE_V6).any():
            positions = self._field(self._starts + 28, ">i8").tolist()
            wide = ((self.sys_flags & records.SYS_STORE_V6) != 0).tolist()
            return pa.array(
                [
                    (bytes(self._bytes[at : at + (20 if v6 else 8)]) + number.to_bytes(8, "big"))
                    .hex()
                    .upper()
                    for at, number, v6 in zip(host_at.tolist(), positions, wide, strict=True)
                ],
                pa.string(),
            )
        ids = np.empty((self.count, 16), np.uint8)
        ids[:, :8] = self._rows(host_at, 8)
        ids[:, 8:] = self._rows(self._starts + 28, 8)
        text = np.empty((self.count, 32), np.uint8)
        text[:, 0::2] = _HEX[ids >> 4]
        text[:, 1::2] = _HEX[ids & 15]
        offsets = np.arange(0, 32 * self.count + 1, 32, dtype=np.int32)
        return pa.StringArray.from_buffers(
            self.count, pa.py_buffer(offsets), pa.py_buffer(text.reshape(-1))
        )


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


def property_column(properties: pa.Array, name: bytes) -> pa.Array:
    """The values of one property, null where a message has none or an empty one."""
    mark = b"\x02" + name + b"\x01"
    found = np.asarray(pc.find_substring(properties, mark))
    at_front = np.asarray(pc.starts_with(properties, mark[1:]))
    relative = np.where(found >= 0, found + len(mark), np.where(at_front, len(mark) - 1, -1))
    _, offsets_buffer, data = properties.buffers()
    offsets = np.frombuffer(offsets_buffer, np.int32)[
        properties.offset : properties.offset + len(properties) + 1
    ].astype(np.int64)
    has = relative >= 0
    if not has.any():
        return pa.nulls(len(properties), pa.binary())
    repeated = np.asarray(pc.count_substring(properties, mark)) + at_front > 1
    begins = np.where(has, offsets[:-1] + relative, offsets[:-1])
    # The separator behind each value; the last property of a message need not have one.
    separators = np.flatnonzero(np.frombuffer(data, np.uint8)[: offsets[-1]] == 2)
    separators = np.append(separators, offsets[-1])
    stops = np.minimum(separators[np.searchsorted(separators, begins)], offsets[1:])
    stops = np.where(has, stops, begins)
    values = cut(data, begins, stops)
    if repeated.any():
        # The last one counts where a name stands twice.
        texts = values.to_pylist()
        for index in np.flatnonzero(repeated).tolist():
            texts[index] = records.property_value(properties[index].as_py(), name)
        values = pa.array(texts, pa.binary())
    return pc.if_else(pa.array(has & (stops > begins) | repeated), values, None)


def _text(values: pa.Array) -> pa.Array:
    """Bytes as text; what is no UTF-8 is replaced, as RocketMQ's clients do."""
    try:
        return values.cast(pa.string())
    except pa.ArrowInvalid:
        return pa.array(
            [None if v is None else v.decode("utf-8", "replace") for v in values.to_pylist()],
            pa.string(),
        )


def _headers(properties: pa.Array, kind: pa.DataType) -> pa.Array:
    """Name and value of each property of the user's."""
    items = pc.split_pattern(properties, b"\x02")
    parents = pc.list_parent_indices(items)
    flat = items.flatten()
    mark = np.asarray(pc.find_substring(flat, b"\x01"))
    sizes = np.asarray(pc.binary_length(flat)).astype(np.int64)
    _, offsets_buffer, data = flat.buffers()
    begins = np.frombuffer(offsets_buffer, np.int32)[flat.offset : flat.offset + len(flat)].astype(
        np.int64
    )
    whole = (mark > 0) & (mark + 1 < sizes)
    at = np.where(whole, begins + mark, begins)
    names = _text(cut(data, begins, at))
    values = cut(data, np.where(whole, at + 1, begins), np.where(whole, begins + sizes, begins))
    keep = np.flatnonzero(whole & ~np.asarray(pc.is_in(names, _OWN)))
    owners = np.asarray(parents)[keep]
    counts = np.bincount(owners, minlength=len(properties))
    offsets = np.concatenate(([0], np.cumsum(counts))).astype(np.int32)
    chosen = pa.array(keep)
    struct = pa.StructArray.from_arrays(
        [names.take(chosen), values.take(chosen)], fields=list(kind.value_type)
    )
    return pa.ListArray.from_arrays(pa.array(offsets), struct, type=kind)


def _stamps(millis: Numbers, kind: pa.DataType) -> pa.Array:
    return pa.array(millis * 1000, pa.int64()).cast(kind)


class Decoder:
    """Makes the record batches of one schema, of entries of one queue."""

    def __init__(self, schema: pa.Schema, place: Place, tags: str, keys: tuple[str, ...]) -> None:
        """`tags` and `keys`: what a broker compares by hashes, or not at all, is compared here."""
        self._schema = schema
        self._place = place
        self._tags = [tag.strip().encode() for tag in tags.split("||") if tag.strip()]
        self._keys = {key.encode() for key in keys}

    def batch(self, data: Buffer, sizes: Numbers, start: int, stop: int) -> pa.RecordBatch:
        """The messages of [start, stop) among stored entries; raises ProtocolError where one is
        damaged.
        """
        entries = Entries(data, sizes, self._place)
        if entries.has_odd:
            return self._one_by_one(data, start, stop)
        wanted = entries.between(start, stop)
        properties = pa.nulls(0, pa.binary())
        needed = {"key", "headers", "tag", "keys", "messageId"}
        if self._tags or self._keys or needed.intersection(self._schema.names):
            properties = entries.properties()
            wanted &= self._matching(properties)
        made = [self._column(field, entries, properties) for field in self._schema]
        batch = pa.RecordBatch.from_arrays(made, schema=self._schema)
        return batch if wanted.all() else batch.filter(pa.array(wanted))

    def _matching(self, properties: pa.Array) -> npt.NDArray[np.bool_]:
        wanted = np.ones(len(properties), np.bool_)
        if self._tags:
            tags = property_column(properties, b"TAGS")
            wanted &= np.asarray(pc.is_in(tags, pa.array(self._tags, pa.binary())))
        if self._keys:
            keys = property_column(properties, b"KEYS").to_pylist()
            fits = [k is not None and not self._keys.isdisjoint(k.split(b" ")) for k in keys]
            wanted &= np.array(fits, np.bool_)
        return wanted

    def _column(self, field: pa.Field, entries: Entries, properties: pa.Array) -> pa.Array:
        make = _COLUMNS.get(field.name)
        if make is not None:
            return make(entries, properties, field.type)
        constant = {
            "topic": self._place.topic,
            "partition": self._place.partition,
            "timestampType": TIMESTAMP_TYPE,
            "broker": self._place.broker,
        }[field.name]
        return pa.repeat(pa.scalar(constant, field.type), entries.count)

    # ------------------------------------------------------------------------------- the other ones

    def _one_by_one(self, data: Buffer, start: int, stop: int) -> pa.RecordBatch:
        place = self._place
        queue = MessageQueue(place.topic, place.broker, place.queue_id)
        messages = [
            message
            for message in read_pulled(data, queue)
            if start <= message.queue_offset < stop and self._is_wanted(message)
        ]
        made = [
            pa.array([self._value(field.name, message) for message in messages], field.type)
            for field in self._schema
        ]
        return pa.RecordBatch.from_arrays(made, schema=self._schema)

    def _is_wanted(self, message: ReceivedMessage) -> bool:
        if self._tags and message.tags.encode() not in self._tags:
            return False
        return not self._keys or not self._keys.isdisjoint(message.keys.encode().split(b" "))

    def _value(self, name: str, message: ReceivedMessage) -> Any:
        own = set(_OWN.to_pylist())
        values: dict[str, Callable[[], Any]] = {
            "key": lambda: message.keys.encode() or None,
            "value": lambda: message.body,
            "topic": lambda: self._place.topic,
            "partition": lambda: self._place.partition,
            "offset": lambda: message.queue_offset,
            "timestamp": lambda: message.store_ms * 1000,
            "timestampType": lambda: TIMESTAMP_TYPE,
            "headers": lambda: [
                {"key": key, "value": value.encode()}
                for key, value in message.properties.items()
                if key not in own
            ],
            "tag": lambda: message.tags or None,
            "keys": lambda: [key for key in message.keys.split(" ") if key],
            "bornTimestamp": lambda: message.born_ms * 1000,
            "messageId": lambda: message.message_id,
            "broker": lambda: self._place.broker,
        }
        return values[name]()


def _key_lists(properties: pa.Array, kind: pa.DataType) -> pa.Array:
    keys = _text(property_column(properties, b"KEYS")).to_pylist()
    return pa.array([[key for key in (text or "").split(" ") if key] for text in keys], kind)


def _ids(entries: Entries, properties: pa.Array) -> pa.Array:
    unique = _text(property_column(properties, b"UNIQ_KEY"))
    return unique if not unique.null_count else pc.coalesce(unique, entries.message_ids())


_Make = Callable[[Entries, pa.Array, pa.DataType], pa.Array]
_COLUMNS: Final[dict[str, _Make]] = {
    "key": lambda entries, properties, kind: property_column(properties, b"KEYS"),
    "value": lambda entries, properties, kind: entries.bodies(),
    "offset": lambda entries, properties, kind: pa.array(entries.offsets, kind),
    "timestamp": lambda entries, properties, kind: _stamps(entries.store_ms, kind),
    "headers": lambda entries, properties, kind: _headers(properties, kind),
    "tag": lambda entries, properties, kind: _text(property_column(properties, b"TAGS")),
    "keys": lambda entries, properties, kind: _key_lists(properties, kind),
    "bornTimestamp": lambda entries, properties, kind: _stamps(entries.born_ms, kind),
    "messageId": lambda entries, properties, kind: _ids(entries, properties),
}
