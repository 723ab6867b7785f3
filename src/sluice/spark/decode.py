"""This module turns stored entries into Arrow columns, with no loop over rows.

Fields of fixed places are taken out of all entries at once by numpy; bodies and properties, whose
lengths differ, are cut out of the data as Arrow's binary arrays. Every entry's checksum is compared
(in a loop that runs in C). Entries that are not of the usual form (compressed bodies, RocketMQ's
batches stored whole) are taken apart one by one: they are few, or a topic has nothing else. Batches
of Kafka's producers are rows of their own kind (`kafka_decode.py`).

    columns                what a Kafka producer wrote       what a RocketMQ producer wrote
    key, value, headers    the record's                      KEYS, the body, the user's properties
    timestamp              the record's, or of its append    when the broker stored it
    tag, keys, messageId   header rmq.tags, the key as text, TAGS, KEYS, UNIQ_KEY
                           header rmq.msgid
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from copy import copy
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from isal.isal_zlib import crc32

from sluice.client.core.messages import ReceivedMessage, read_pulled
from sluice.errors import ProtocolError
from sluice.model import Buffer
from sluice.protocol import kafka_entries, kafka_views, records
from sluice.protocol.json_members import MessageQueue
from sluice.protocol.kafka_batches import BadBatch
from sluice.spark import kafka_decode
from sluice.spark.columns import CREATE_TIME, STORE_TIME
from sluice.spark.cutting import Bytes, Numbers, cut, text_column
from sluice.spark.property_columns import property_column

_LEAST_BYTES: Final = 91
_MAGICS: Final = (records.MAGIC_V1, records.MAGIC_V2)
_ODD: Final = records.SYS_COMPRESSED | records.SYS_NEED_UNWRAP | records.SYS_INNER_BATCH
_CRC_NAME: Final = np.frombuffer(b"__CRC32#\x01", np.uint8)
_CRC_BYTES: Final = records.CRC_PROPERTY_BYTES
_SEPARATOR: Final = 2
_POWERS: Final = 10 ** np.arange(10, dtype=np.int64)  # least significant digit first
_MASK_31: Final = 0x7FFFFFFF
_HEX: Final = np.frombuffer(b"0123456789ABCDEF", np.uint8)
_KEY_MARK: Final = kafka_views.KEY_NAME.encode() + b"\x01"
_TOGETHER_BYTES: Final = 4 << 20  # of small pieces that become one record batch


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
        self.flags = int(np.bitwise_or.reduce(self.sys_flags))  # all that any of them has
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
        return self.flags & _ODD != 0

    def part(self, start: int, stop: int) -> Entries:
        """Some of the entries."""
        part, which = copy(self), slice(start, stop)
        part.count = stop - start
        part._starts, part._ends = self._starts[which], self._ends[which]
        part.offsets, part.sys_flags = self.offsets[which], self.sys_flags[which]
        part.body_at, part.body_end = self.body_at[which], self.body_end[which]
        part.properties_at = self.properties_at[which]
        part._is_long, part._born_wide = self._is_long[which], self._born_wide[which]
        part.flags = int(np.bitwise_or.reduce(part.sys_flags))
        return part

    def kafka_runs(self) -> Iterator[tuple[bool, Entries]]:
        """Neighbours of one kind: batches of Kafka's, or other entries."""
        flags = kafka_entries.KAFKA_FLAGS
        is_kafka = (self.sys_flags & flags) == flags
        bounds = np.flatnonzero(is_kafka[1:] != is_kafka[:-1]) + 1
        firsts, stops = [0, *bounds.tolist()], [*bounds.tolist(), self.count]
        for first, stop in zip(firsts, stops, strict=True):
            yield bool(is_kafka[first]), self.part(first, stop)

    def batches(self) -> Iterator[tuple[int, memoryview]]:
        """Offsets and bodies of entries that are batches."""
        places = (self.offsets.tolist(), self.body_at.tolist(), self.body_end.tolist())
        for offset, at, end in zip(*places, strict=True):
            yield offset, self._bytes.data[at:end]

    def raw(self) -> memoryview:
        """The entries themselves, which follow each other."""
        return self._bytes.data[int(self._starts[0]) : int(self._ends[-1])]

    def damaged(self, why: str) -> ProtocolError:
        """What to say where the first of the entries cannot be read."""
        return self._wrong(0, why)

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

    @property
    def is_record(self) -> npt.NDArray[np.bool_]:
        """Which entries show a record of a Kafka producer: they were born at its timestamp."""
        found: npt.NDArray[np.bool_] = (self.sys_flags & kafka_entries.SYS_KAFKA) != 0
        return found

    def times_ms(self) -> Numbers:
        """When each was stored, or the timestamp that its producer gave it as a record."""
        if not self.flags & kafka_entries.SYS_KAFKA:
            return self.store_ms
        return np.where(self.is_record, self.born_ms, self.store_ms)

    def time_kinds(self) -> Numbers:
        return np.where(self.is_record, CREATE_TIME, STORE_TIME)

    def bodies(self) -> pa.Array:
        return cut(self.buffer, self.body_at, self.body_end)

    def values(self) -> pa.Array:
        """Bodies, null where they are empty and a property says so."""
        found = self.bodies()
        empty = self.body_at == self.body_end
        if not empty.any():
            return found
        is_null = np.zeros(self.count, np.bool_)
        for index in np.flatnonzero(empty).tolist():
            data = self._bytes[self.properties_at[index] : self._ends[index]].tobytes()
            is_null[index] = kafka_views.NULL_NAME in records.parse_properties(data)
        return pc.if_else(pa.array(~is_null), found, pa.scalar(None, pa.binary()))

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


def _headers(properties: pa.Array, kind: pa.DataType) -> pa.Array:
    """Name and value of each property of the user's; null where there are none, as with Kafka."""
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
    names = text_column(cut(data, begins, at))
    values = cut(data, np.where(whole, at + 1, begins), np.where(whole, begins + sizes, begins))
    coded = names.dictionary_encode()
    known = coded.dictionary.to_pylist()
    if kafka_views.MADE_NAME in known or kafka_views.HEADERS_NAME in known:
        return _record_headers(properties, kind)
    own = np.array([kafka_views.is_system(name) for name in known] or [False], np.bool_)
    keep = np.flatnonzero(whole & ~own[np.asarray(coded.indices)])
    owners = np.asarray(parents)[keep]
    counts = np.bincount(owners, minlength=len(properties))
    offsets = np.concatenate(([0], np.cumsum(counts))).astype(np.int32)
    chosen = pa.array(keep)
    struct = pa.StructArray.from_arrays(
        [names.take(chosen), values.take(chosen)], fields=list(kind.value_type)
    )
    return pa.ListArray.from_arrays(
        pa.array(offsets), struct, type=kind, mask=pa.array(counts == 0)
    )


def _record_headers(properties: pa.Array, kind: pa.DataType) -> pa.Array:
    """The same where messages show records of Kafka's producers, which may have any headers."""
    return pa.array([_header_list(_parsed(each)) for each in properties.to_pylist()], kind)


def _header_list(properties: Mapping[str, str]) -> list[dict[str, Any]] | None:
    headers = kafka_views.headers_of(properties)
    return [{"key": name, "value": value} for name, value in headers] or None


def _parsed(properties: bytes) -> dict[str, str]:
    return records.parse_properties(records.without_checksum(properties))


def _keys(properties: pa.Array) -> pa.Array:
    """Keys as bytes: KEYS, or what a Kafka producer gave that is no text."""
    found = property_column(properties, b"KEYS")
    if not found.null_count or properties.buffers()[2] is None:
        return found
    if bytes(properties.buffers()[2]).find(_KEY_MARK) < 0:
        return found
    return pa.array(
        [kafka_views.key_of(_parsed(each)) for each in properties.to_pylist()], pa.binary()
    )


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

    def batches(
        self, data: Buffer, sizes: Numbers, start: int, stop: int, topic_id: str = ""
    ) -> Iterator[pa.RecordBatch]:
        """The messages of [start, stop) among stored entries; raises ProtocolError where one is
        damaged. `topic_id`: what the ids of records begin with that have none of their own.
        """
        entries = Entries(data, sizes, self._place)
        if not entries.flags & kafka_entries.SYS_KAFKA:
            yield self._batch(entries, start, stop)
            return
        pieces: list[pa.RecordBatch] = []
        byte_count = 0
        for is_kafka, run in entries.kafka_runs():
            made = self._of_kafka(run, start, stop, topic_id) if is_kafka else None
            for piece in made or (self._batch(run, start, stop),):
                pieces.append(piece)
                byte_count += piece.nbytes
                if byte_count >= _TOGETHER_BYTES:
                    yield pa.concat_batches(pieces)
                    pieces, byte_count = [], 0
        if pieces:
            yield pa.concat_batches(pieces)

    def _batch(self, entries: Entries, start: int, stop: int) -> pa.RecordBatch:
        if entries.has_odd:
            return self._one_by_one(entries.raw(), start, stop)
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
        if field.name == "timestampType" and entries.flags & kafka_entries.SYS_KAFKA:
            return pa.array(entries.time_kinds(), field.type)
        return self._constant(field, entries.count)

    def _constant(self, field: pa.Field, count: int) -> pa.Array:
        constant = {
            "topic": self._place.topic,
            "partition": self._place.partition,
            "timestampType": STORE_TIME,
            "broker": self._place.broker,
        }[field.name]
        return pa.repeat(pa.scalar(constant, field.type), count)

    # ------------------------------------------------------------------------------ Kafka's batches

    def _of_kafka(
        self, entries: Entries, start: int, stop: int, topic_id: str
    ) -> Iterator[pa.RecordBatch]:
        """The records of entries that are batches."""
        try:
            for group in kafka_decode.unpacked(entries.batches()):
                yield self._records(kafka_decode.Rows(group), start, stop, topic_id)
        except BadBatch as bad:
            raise entries.damaged(f"a batch in it, or behind it: {bad}") from bad

    def _records(
        self, rows: kafka_decode.Rows, start: int, stop: int, topic_id: str
    ) -> pa.RecordBatch:
        make: dict[str, Callable[[pa.DataType], pa.Array]] = {
            "key": lambda kind: rows.keys(),
            "value": lambda kind: rows.values(),
            "offset": lambda kind: pa.array(rows.offsets, kind),
            "timestamp": lambda kind: _stamps(rows.times_ms, kind),
            "timestampType": lambda kind: pa.array(
                np.where(rows.is_append_time, STORE_TIME, CREATE_TIME), kind
            ),
            "headers": rows.headers,
            "tag": lambda kind: rows.texts_of(kafka_views.TAGS_HEADER),
            "keys": lambda kind: pa.array([_as_keys(key) for key in rows.keys().to_pylist()], kind),
            "bornTimestamp": lambda kind: _stamps(rows.times_ms, kind),
            "messageId": lambda kind: self._record_ids(rows, topic_id),
        }
        columns = [
            make[field.name](field.type)
            if field.name in make
            else self._constant(field, rows.count)
            for field in self._schema
        ]
        batch = pa.RecordBatch.from_arrays(columns, schema=self._schema)
        wanted = (rows.offsets >= start) & (rows.offsets < stop)
        if self._tags:
            tags = pc.cast(rows.texts_of(kafka_views.TAGS_HEADER), pa.binary())
            wanted &= np.asarray(pc.is_in(tags, pa.array(self._tags, pa.binary())))
        if self._keys:
            keys = pa.array(sorted(self._keys), pa.binary())
            wanted &= np.asarray(pc.is_in(rows.keys(), keys))
        return batch if wanted.all() else batch.filter(pa.array(wanted))

    def _record_ids(self, rows: kafka_decode.Rows, topic_id: str) -> pa.Array:
        own = rows.texts_of(kafka_views.ID_HEADER)
        made = [
            kafka_views.record_id(topic_id, self._place.queue_id, offset)
            for offset in rows.offsets.tolist()
        ]
        return pc.coalesce(own, pa.array(made, pa.string()))

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
        is_record = message.sys_flag & kafka_entries.SYS_KAFKA != 0
        values: dict[str, Callable[[], Any]] = {
            "key": lambda: kafka_views.key_of(message.properties),
            "value": lambda: kafka_views.value_of(message.body, message.properties),
            "topic": lambda: self._place.topic,
            "partition": lambda: self._place.partition,
            "offset": lambda: message.queue_offset,
            "timestamp": lambda: 1000 * (message.born_ms if is_record else message.store_ms),
            "timestampType": lambda: CREATE_TIME if is_record else STORE_TIME,
            "headers": lambda: _header_list(message.properties),
            "tag": lambda: message.tags or None,
            "keys": lambda: [key for key in message.keys.split(" ") if key],
            "bornTimestamp": lambda: message.born_ms * 1000,
            "messageId": lambda: message.message_id,
            "broker": lambda: self._place.broker,
        }
        return values[name]()


def _as_keys(key: bytes | None) -> list[str]:
    """The key of a record as a message's keys: none where it is no plain text."""
    text = kafka_views.plain_text(key or b"")
    return [text] if text and " " not in text else []


def _key_lists(properties: pa.Array, kind: pa.DataType) -> pa.Array:
    keys = text_column(property_column(properties, b"KEYS")).to_pylist()
    return pa.array([[key for key in (text or "").split(" ") if key] for text in keys], kind)


def _ids(entries: Entries, properties: pa.Array) -> pa.Array:
    unique = text_column(property_column(properties, b"UNIQ_KEY"))
    return unique if not unique.null_count else pc.coalesce(unique, entries.message_ids())


_Make = Callable[[Entries, pa.Array, pa.DataType], pa.Array]
_COLUMNS: Final[dict[str, _Make]] = {
    "key": lambda entries, properties, kind: _keys(properties),
    "value": lambda entries, properties, kind: entries.values(),
    "offset": lambda entries, properties, kind: pa.array(entries.offsets, kind),
    "timestamp": lambda entries, properties, kind: _stamps(entries.times_ms(), kind),
    "headers": lambda entries, properties, kind: _headers(properties, kind),
    "tag": lambda entries, properties, kind: text_column(property_column(properties, b"TAGS")),
    "keys": lambda entries, properties, kind: _key_lists(properties, kind),
    "bornTimestamp": lambda entries, properties, kind: _stamps(entries.born_ms, kind),
    "messageId": lambda entries, properties, kind: _ids(entries, properties),
}
