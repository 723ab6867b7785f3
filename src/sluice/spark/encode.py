"""This module turns Arrow columns into batches of messages, with no loop over rows.

The columns are those of Spark's Kafka sink (value, key, topic, partition, headers), and `tag` and
`keys` of RocketMQ's. All messages of a record batch are joined to one text, and what goes to one
queue is a stretch of it. They have the form of RocketMQ's batches (`protocol/message_batches.py`),
or are images (`protocol/record_images.py`), which only Sluice's brokers understand.

Properties are text. A key that is none, and headers that are none or that would not be read as
headers, are written as those of Kafka's records are (`protocol/kafka_views.py`), one by one: rows
that have them are the exception.
"""

from __future__ import annotations

import base64
import logging
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from sluice.client.core.messages import RESERVED
from sluice.errors import MessageIllegal
from sluice.model import Buffer
from sluice.protocol import kafka_batches, kafka_views, records
from sluice.protocol.kafka_batches import Header, Record
from sluice.protocol.message_batches import BATCH_COUNT_MAX
from sluice.protocol.record_images import SIZE_BYTES, rest_bytes
from sluice.protocol.records import CRC_PROPERTY_BYTES, PROPERTIES_BYTES_MAX
from sluice.spark.key_hash import key_partitions
from sluice.spark.layout import Column, lay_out

log_lines = logging.getLogger("sluice.spark")

Numbers = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]

WRITTEN: Final = ("value", "key", "topic", "partition", "headers", "tag", "keys")
# Columns that a row has when it was read, and that the broker gives anew.
IGNORED: Final = ("offset", "timestamp", "timestampType", "bornTimestamp", "messageId", "broker")
_HEAD: Final = np.dtype(
    [("size", ">i4"), ("magic", ">i4"), ("crc", ">i4"), ("flag", ">i4"), ("body", ">i4")]
)
_IMAGE_HEAD: Final = np.dtype(
    [("size", ">i4"), ("magic", ">u4"), ("later", "V76"), ("body", ">i4")]
)
_SLICE_BYTES: Final = 64 * 1024 * 1024
_SEPARATORS: Final = "[\x01\x02]"
_NOT_IN_TEXT: Final = r"[\x00-\x02]"
_NULL_PROPERTY: Final = f"{kafka_views.NULL_NAME}\x011\x02".encode()
_RESERVED: Final = pa.array(sorted(RESERVED), pa.string())


class Portion(NamedTuple):
    """Messages for one queue. `partition`: -1 where any queue will do."""

    topic: str
    partition: int
    parts: tuple[Buffer, ...]  # one after the other
    sizes: Numbers  # of each message

    @property
    def byte_count(self) -> int:
        return int(self.sizes.sum()) + SIZE_BYTES * len(self.sizes)

    def with_sizes(self) -> tuple[Buffer, ...]:
        """The messages, and behind them the size of each."""
        return (*self.parts, self.sizes.astype(">i4").tobytes())

    def has_room(self, other: Portion, bytes_max: int) -> bool:
        """Whether the messages of another one for the same queue may follow."""
        count = len(self.sizes) + len(other.sizes)
        return self.byte_count + other.byte_count <= bytes_max and count <= BATCH_COUNT_MAX

    def apart(self) -> Portion:
        """The same in memory of its own: what is kept must not keep all of a record batch."""
        return self._replace(parts=(b"".join(self.parts),))

    def joined(self, other: Portion) -> Portion:
        sizes = np.concatenate((self.sizes, other.sizes))
        return self._replace(parts=self.parts + other.parts, sizes=sizes)


def check_columns(fields: list[tuple[str, str]], topic: str) -> None:
    """Refuse a DataFrame that cannot be written: (name, type as Spark's `simpleString`)."""
    types = {
        "value": ("binary", "string"),
        "key": ("binary", "string"),
        "topic": ("string",),
        "partition": ("int",),
        "headers": ("array<struct<key:string,value:binary>>",),
        "tag": ("string",),
        "keys": ("array<string>",),
    }
    names = [name for name, _ in fields]
    for name, kind in fields:
        if name in types and kind not in types[name]:
            raise MessageIllegal(f"column {name} is {kind}; it must be {' or '.join(types[name])}")
    if "value" not in names:
        raise MessageIllegal("the DataFrame has no column value, which every message needs")
    if not topic and "topic" not in names:
        raise MessageIllegal("name the topic with option topic, or in a column topic")
    others = [name for name in names if name not in types and name not in IGNORED]
    if others:
        # A job of Kafka's sink may have them: it writes the columns that it knows, too.
        log_lines.warning(
            "columns %s are not written; there are %s", ", ".join(others), ", ".join(WRITTEN)
        )


def portions(
    batch: pa.RecordBatch,
    topic: str,
    partition_counts: Callable[[str], int],
    bytes_max: int,
    image_topic: Callable[[str], bytes | None] = lambda topic: None,
) -> Iterator[Portion]:
    """The messages of a record batch, by queue, in portions of at most about `bytes_max`.

    `topic`: of all rows, or empty where a column says; `partition_counts` tells how many partitions
    a topic has, `image_topic` how images call it, None where its messages are no images. Raises
    MessageIllegal where a row is no message.
    """
    if not batch.num_rows:
        return
    step = max(1, batch.num_rows * _SLICE_BYTES // max(1, batch.nbytes))
    for at in range(0, batch.num_rows, step):
        piece = batch.slice(at, step)
        for name, rows in _topics(piece, topic):
            own = piece if len(rows) == piece.num_rows else piece.take(pa.array(rows))
            yield from _portions(own, name, partition_counts(name), bytes_max, image_topic(name))


def _portions(
    batch: pa.RecordBatch, topic: str, count: int, bytes_max: int, image_topic: bytes | None
) -> Iterator[Portion]:
    """The same for rows of one topic, which has so many partitions."""
    keys = _column(batch, "key")
    encoded = keys.dictionary_encode() if keys is not None else None
    targets = _targets(batch, encoded, count, topic)
    # An image may show a record without a value, as Kafka's tombstones are.
    values = _values(batch, may_be_empty=image_topic is not None)
    properties = _properties(batch, encoded)
    if image_topic is not None:
        columns = Column.of(values), Column.of(properties)
        laid = lay_out(image_topic, *columns, targets)
        if laid is not None:
            bounds = np.flatnonzero(np.diff(laid.targets, prepend=-2, append=-2)).tolist()
            for first, stop in pairwise(bounds):
                partition, offsets = int(laid.targets[first]), laid.offsets[first : stop + 1]
                yield from _cut(offsets, laid.data.data, topic, partition, bytes_max)
            return
    messages = _messages(values, properties, image_topic)
    for partition in np.unique(targets).tolist():
        chosen = np.flatnonzero(targets == partition)
        own = messages if len(chosen) == len(messages) else messages.take(pa.array(chosen))
        _, offsets_buffer, data = own.buffers()
        ends = np.frombuffer(offsets_buffer, np.int32)[own.offset : own.offset + len(own) + 1]
        yield from _cut(ends.astype(np.int64), memoryview(data), topic, partition, bytes_max)


def _column(batch: pa.RecordBatch, name: str) -> pa.Array | None:
    index = batch.schema.get_field_index(name)
    return batch.column(index) if index >= 0 else None


def _topics(batch: pa.RecordBatch, topic: str) -> Iterator[tuple[str, Numbers]]:
    """The rows of each topic."""
    if topic:
        yield topic, np.arange(batch.num_rows)
        return
    names = _column(batch, "topic")
    assert names is not None, "checked when the query began"
    if names.null_count:
        raise MessageIllegal(f"{names.null_count} rows name no topic, and option topic is not set")
    encoded = names.dictionary_encode()
    which = np.asarray(encoded.indices)
    for number, name in enumerate(encoded.dictionary.to_pylist()):
        yield name, np.flatnonzero(which == number)


def _targets(
    batch: pa.RecordBatch, keys: pa.DictionaryArray | None, count: int, topic: str
) -> Numbers:
    """The partition of each row: as the row says, by its key, or -1 for any."""
    targets = np.full(batch.num_rows, -1, np.int64)
    if keys is not None and keys.null_count < len(keys):
        hashes = key_partitions(Column.of(keys.dictionary.cast(pa.binary())), count)
        which = np.asarray(keys.indices.fill_null(-1))
        # The last one is for rows without a key: numpy counts -1 from the end.
        targets = np.append(hashes, -1)[which]
    wanted = _column(batch, "partition")
    if wanted is not None and wanted.null_count < len(wanted):
        least, most = pc.min_max(wanted).as_py().values()
        if most >= count or least < 0:
            wrong = most if most >= count else least
            raise MessageIllegal(f"partition {wrong}: topic {topic} has {count} partitions")
        own = np.asarray(wanted.cast(pa.int64()).fill_null(-1))
        targets = np.where(own >= 0, own, targets)
    return targets


def _cut(
    offsets: Numbers, view: memoryview, topic: str, partition: int, bytes_max: int
) -> Iterator[Portion]:
    """Stretches of the bytes that the messages lie in one after the other, about alike in size."""
    count = len(offsets) - 1
    # With the size that may stand behind the messages.
    costs = offsets - offsets[0] + SIZE_BYTES * np.arange(len(offsets))
    at = 0
    while at < count:
        left = int(costs[-1] - costs[at])
        share = left // -(-left // bytes_max)
        stop = min(int(np.searchsorted(costs, costs[at] + share)), count)
        if costs[stop] - costs[at] > bytes_max:
            stop -= 1
        stop = min(max(stop, at + 1), at + BATCH_COUNT_MAX)
        part = view[int(offsets[at]) : int(offsets[stop])]
        yield Portion(topic, partition, (part,), np.diff(offsets[at : stop + 1]))
        at = stop


# ----------------------------------------------------------------------------------------- messages


def _values(batch: pa.RecordBatch, *, may_be_empty: bool) -> pa.Array:
    """The bodies; empty where a value is null, too."""
    values = _column(batch, "value")
    assert values is not None, "checked when the query began"
    values = values.cast(pa.binary())
    values = values.fill_null(b"") if values.null_count else values
    if may_be_empty:
        return values
    empty = int((np.asarray(pc.binary_length(values)) == 0).sum())
    if empty:
        raise MessageIllegal(
            f"{empty} rows have a value that is null or empty; sent at least once, brokers take no "
            "message without one"
        )
    return values


def _messages(values: pa.Array, properties: pa.Array, image_topic: bytes | None) -> pa.Array:
    """Every row in the form that a batch has it in, or as an image of a topic."""
    sizes = np.asarray(pc.binary_length(values)).astype(np.int64)
    property_sizes = np.asarray(pc.binary_length(properties)).astype(np.int64)
    if image_topic is not None:
        return _images(image_topic, values, sizes, properties, property_sizes)
    heads = np.zeros(len(sizes), _HEAD)
    heads["size"] = 22 + sizes + property_sizes
    heads["body"] = sizes
    return pc.binary_join_element_wise(
        _fixed(heads), values, _fixed(property_sizes.astype(">i2")), properties, b""
    )


def _images(
    topic: bytes, values: pa.Array, sizes: Numbers, properties: pa.Array, property_sizes: Numbers
) -> pa.Array:
    magic, field = records.field_of_topic(topic)
    heads = np.zeros(len(sizes), _IMAGE_HEAD)
    heads["size"] = rest_bytes(topic) + sizes + property_sizes
    heads["magic"] = magic
    heads["body"] = sizes
    # The topic, and the size of the properties together with the checksum that will be there.
    middles = np.zeros(len(sizes), [("field", f"V{len(field)}"), ("properties", ">i2")])
    middles["field"] = np.frombuffer(field, f"V{len(field)}")
    middles["properties"] = property_sizes + CRC_PROPERTY_BYTES
    parts = (_fixed(heads), values, _fixed(middles), properties, bytes(CRC_PROPERTY_BYTES))
    return pc.binary_join_element_wise(*parts, b"")


def _fixed(rows: npt.NDArray[Any]) -> pa.Array:
    """Numbers as their bytes, each row a binary value."""
    width = rows.dtype.itemsize
    offsets = np.arange(0, width * len(rows) + 1, width, dtype=np.int32)
    data = pa.py_buffer(np.ascontiguousarray(rows).view(np.uint8).reshape(-1))
    return pa.BinaryArray.from_buffers(pa.binary(), len(rows), [None, pa.py_buffer(offsets), data])


def _properties(batch: pa.RecordBatch, encoded: pa.DictionaryArray | None) -> pa.Array:
    """What a message has beside its body; `encoded` is the column key."""
    parts = []
    keys = _column(batch, "keys")
    if keys is not None:
        parts.append(_one_property("KEYS", _joined_keys(keys), "keys"))
    elif encoded is not None:
        # Each key once: mostly they come again and again.
        named = _key_properties(encoded.dictionary)
        parts.append(pc.fill_null(named.take(encoded.indices), b""))
    tag = _column(batch, "tag")
    if tag is not None:
        parts.append(_one_property("TAGS", tag, "tag"))
    headers = _column(batch, "headers")
    if headers is not None:
        parts.append(_header_properties(headers))
    values = _column(batch, "value")
    if values is not None and values.null_count:
        parts.append(pc.if_else(values.is_null(), _NULL_PROPERTY, b""))
    if not parts:
        return pa.repeat(pa.scalar(b"", pa.binary()), batch.num_rows)
    found = parts[0] if len(parts) == 1 else pc.binary_join_element_wise(*parts, b"")
    longest = pc.max(pc.binary_length(found)).as_py()
    if longest > PROPERTIES_BYTES_MAX - CRC_PROPERTY_BYTES:
        raise MessageIllegal(
            f"key, tag and headers of a row take {longest} bytes; "
            f"{PROPERTIES_BYTES_MAX - CRC_PROPERTY_BYTES} at most"
        )
    return found


def _key_properties(keys: pa.Array) -> pa.Array:
    """Of each of the keys, of which none is null."""
    odd = _is_no_text(keys)
    keys = keys.cast(pa.binary())
    named = pc.binary_join_element_wise(b"KEYS\x01", keys, b"\x02", b"")
    packed = [
        f"{kafka_views.KEY_NAME}\x01{base64.b64encode(key).decode() or '='}\x02".encode()
        for key in keys.filter(pa.array(odd)).to_pylist()
    ]
    return _replaced(named, odd, packed)


def _is_no_text(values: pa.Array) -> Flags:
    """Which values cannot be a property's: they are empty, or no text, or hold a separator."""
    try:
        texts = values.cast(pa.string())
    except pa.ArrowInvalid:
        return np.array([not kafka_views.plain_text(each or b"") for each in values.to_pylist()])
    holds = pc.match_substring_regex(texts, _NOT_IN_TEXT)
    return np.asarray(pc.fill_null(pc.or_(holds, pc.equal(pc.binary_length(texts), 0)), True))


def _replaced(values: pa.Array, which: Flags, others: list[bytes]) -> pa.Array:
    if not others:
        return values
    return pc.replace_with_mask(values, pa.array(which), pa.array(others, pa.binary()))


def _without_nulls(lists: pa.Array) -> pa.Array:
    """Lists without the nulls that are in them."""
    flat = lists.flatten()
    if not flat.null_count:
        return lists
    keep = np.flatnonzero(np.asarray(flat.is_valid()))
    owners = np.asarray(pc.list_parent_indices(lists))[keep]
    counts = np.bincount(owners, minlength=len(lists))
    offsets = np.concatenate(([0], np.cumsum(counts))).astype(np.int32)
    return pa.ListArray.from_arrays(pa.array(offsets), flat.take(pa.array(keep)))


def _joined_keys(keys: pa.Array) -> pa.Array:
    # Spark's split() and array() give lists that hold no null, which is a type of its own to Arrow.
    keys = _without_nulls(keys.cast(pa.list_(pa.string())))
    flat = keys.flatten()
    if pc.any(pc.match_substring(flat, " ")).as_py():
        raise MessageIllegal("column keys holds a key with a blank; blanks separate keys")
    return pc.binary_join(keys, " ")


def _one_property(name: str, values: pa.Array, column: str) -> pa.Array:
    """`name 0x01 value 0x02`, or nothing where there is no value."""
    _refuse_separators(values, f"column {column}")
    values = values.cast(pa.binary())
    whole = pc.binary_join_element_wise(f"{name}\x01".encode(), values, b"\x02", b"")
    has = pc.greater(pc.fill_null(pc.binary_length(values), 0), 0)
    return pc.if_else(has, whole, pa.scalar(b"", pa.binary()))


def _header_properties(headers: pa.Array) -> pa.Array:
    headers = _without_nulls(headers)
    flat = headers.flatten()
    names, values = flat.field("key"), flat.field("value")
    if names.null_count:
        raise MessageIllegal("column headers holds a header without a key")
    own = pc.is_in(names, _RESERVED)
    if pc.any(own).as_py():
        name = names.filter(own)[0].as_py()
        raise MessageIllegal(f"header {name} is RocketMQ's own; use another name")
    items = pc.binary_join_element_wise(names.cast(pa.binary()), values.fill_null(b""), b"\x01")
    items = pc.binary_join_element_wise(items, b"\x02", b"")
    offsets = headers.offsets.to_numpy()
    lists = pa.ListArray.from_arrays(pa.array(offsets - offsets[0]), items)
    found = pc.fill_null(pc.binary_join(lists, b""), b"")
    owners = np.asarray(pc.list_parent_indices(headers))
    coded = names.dictionary_encode()
    odd = _is_no_text(values) | _is_no_name(coded) | _is_repeated(coded, owners)
    if not odd.any():
        return found
    rows = np.zeros(len(headers), np.bool_)
    rows[owners[odd]] = True
    packed = [
        _packed_headers([(each["key"], each["value"]) for each in row])
        for row in headers.filter(pa.array(rows)).to_pylist()
    ]
    return _replaced(found, rows, packed)


def _is_repeated(coded: pa.DictionaryArray, owners: Numbers) -> Flags:
    """Which names their message has already: a property of a name is one, headers may be more."""
    repeated: Flags = np.zeros(len(owners), np.bool_)
    if len(owners) < 2 or (owners[1:] != owners[:-1]).all():
        return repeated  # none has two
    pairs = owners * len(coded.dictionary) + np.asarray(coded.indices)
    order = np.argsort(pairs, kind="stable")
    ordered = pairs[order]
    repeated[order[1:]] = ordered[1:] == ordered[:-1]
    return repeated


def _is_no_name(coded: pa.DictionaryArray) -> Flags:
    """Which names of headers would not be read as such from a property."""
    wrong = [not _is_name(name) for name in coded.dictionary.to_pylist()]
    found: Flags = np.array(wrong or [False], np.bool_)[np.asarray(coded.indices)]
    return found


def _is_name(name: str) -> bool:
    return bool(kafka_views.plain_text(name.encode())) and not kafka_views.is_system(name)


def _packed_headers(headers: list[Header]) -> bytes:
    """Headers that are not all properties: those that can be one, for filters, and all as Kafka's
    records have them, for readers.
    """
    plain: dict[str, str] = {}
    for name, value in headers:
        text = kafka_views.plain_text(value or b"")
        if text and _is_name(name):
            plain.setdefault(name, text)
    packed = bytearray()
    kafka_batches.put_record(packed, Record(0, 0, None, None, tuple(headers)))
    plain[kafka_views.HEADERS_NAME] = base64.b64encode(packed).decode()
    return "".join(f"{name}\x01{text}\x02" for name, text in plain.items()).encode()


def _refuse_separators(values: pa.Array, what: str) -> None:
    if pc.any(pc.match_substring_regex(values, _SEPARATORS)).as_py():
        raise MessageIllegal(f"{what} holds 0x01 or 0x02, which separate properties")
