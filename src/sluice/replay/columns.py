"""This module turns stored entries into the columns of a recording, with no loop over rows.

Entries of the usual form are taken apart as Spark's tasks do it; the others (packed bodies, batches
that are stored whole) one by one. Bodies are recorded unpacked. Every checksum is compared.

    kind          what it was when it was sent: transaction, kafka, delay, fifo or normal
    properties    all of them but the store's checksum; those of RocketMQ's own too
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt

from sluice.client.core.messages import read_pulled
from sluice.model import Buffer
from sluice.protocol import kafka_entries, kafka_views, records
from sluice.protocol.json_members import MessageQueue
from sluice.replay.arrow import pa, pc
from sluice.replay.manifest import QueueState
from sluice.spark.decode import Entries, Place
from sluice.spark.property_columns import property_column

Numbers = npt.NDArray[np.int64]

_STAMP: Final = pa.timestamp("ms", "UTC")
_PROPERTIES: Final = pa.map_(pa.string(), pa.string())
SCHEMA: Final = pa.schema(
    [
        pa.field("topic", pa.string(), nullable=False),
        pa.field("broker", pa.string(), nullable=False),
        pa.field("queue", pa.int32(), nullable=False),
        pa.field("offset", pa.int64(), nullable=False),
        pa.field("kind", pa.string(), nullable=False),
        pa.field("key", pa.string()),
        pa.field("tags", pa.string()),
        pa.field("properties", _PROPERTIES, nullable=False),
        pa.field("flag", pa.int32(), nullable=False),
        pa.field("born_time", _STAMP, nullable=False),
        pa.field("store_time", _STAMP, nullable=False),
        pa.field("body", pa.binary(), nullable=False),
    ]
)
# The first that a message has says what it was.
_MARKS: Final = (
    ("kafka", (b"__KAFKA_RECORD\x01",)),
    ("delay", (b"TIMER_OUT_MS\x01", b"REAL_TOPIC\x01")),
    ("fifo", (b"__SHARDINGKEY\x01",)),
)
_CRC_NAME: Final = "__CRC32#"
_BODY_BYTES_MAX: Final = 64 * 1024 * 1024


def has_kafka(data: Buffer, sizes: Numbers) -> bool:
    """Whether some entries are batches of Kafka's, as bulk reads bring them: whole."""
    flags = _numbers(data, np.cumsum(sizes) - sizes + 36)
    return bool(((flags & kafka_entries.KAFKA_FLAGS) == kafka_entries.KAFKA_FLAGS).any())


def _numbers(data: Buffer, ats: Numbers) -> Numbers:
    """The 32-bit numbers at these places."""
    view = np.frombuffer(data, np.uint8)
    every: npt.NDArray[Any] = np.ndarray((max(0, len(view) - 3),), ">i4", view.data, 0, (1,))
    found: Numbers = every[ats].astype(np.int64)
    return found


def batch_of(data: Buffer, sizes: Numbers, queue: QueueState, start: int) -> pa.RecordBatch:
    """The messages from an offset on among stored entries; raises ProtocolError for damage."""
    entries = Entries(data, sizes, Place(queue.topic, queue.broker, queue.queue, queue.queue))
    if entries.has_odd:
        return _one_by_one(data, sizes, queue, start)
    properties = entries.properties()
    flags = _numbers(data, np.cumsum(sizes) - sizes + 16)
    columns = [
        *_places(queue, entries.count),
        pa.array(entries.offsets, pa.int64()),
        _kinds(entries.sys_flags, properties),
        _text(property_column(properties, b"KEYS")),
        _text(property_column(properties, b"TAGS")),
        _maps(properties),
        pa.array(flags, pa.int32()),
        pa.array(entries.born_ms, pa.int64()).cast(_STAMP),
        pa.array(entries.store_ms, pa.int64()).cast(_STAMP),
        entries.bodies(),
    ]
    batch = pa.RecordBatch.from_arrays(columns, schema=SCHEMA)
    wanted = entries.offsets >= start
    return batch if wanted.all() else batch.filter(pa.array(wanted))


def _places(queue: QueueState, count: int) -> list[pa.Array]:
    return [
        pa.repeat(pa.scalar(queue.topic, pa.string()), count),
        pa.repeat(pa.scalar(queue.broker, pa.string()), count),
        pa.repeat(pa.scalar(queue.queue, pa.int32()), count),
    ]


def _kinds(sys_flags: Numbers, properties: pa.Array) -> pa.Array:
    is_committed = (sys_flags & records.SYS_TX_MASK) == records.SYS_TX_COMMIT
    conditions = [pa.array(is_committed), pa.array((sys_flags & kafka_entries.SYS_KAFKA) != 0)]
    for _, marks in _MARKS:
        found = [pc.match_substring(properties, mark) for mark in marks]
        conditions.append(found[0] if len(found) == 1 else pc.or_(*found))
    names = ["transaction", "kafka", *(name for name, _ in _MARKS), "normal"]
    chosen = pa.StructArray.from_arrays(conditions, [str(n) for n in range(len(conditions))])
    return pc.case_when(chosen, *(pa.scalar(name, pa.string()) for name in names))


def _text(values: pa.Array) -> pa.Array:
    """Bytes as text; what is no UTF-8 is replaced, as RocketMQ's clients do."""
    try:
        return values.cast(pa.string())
    except pa.ArrowInvalid:
        texts = [None if v is None else v.decode("utf-8", "replace") for v in values.to_pylist()]
        return pa.array(texts, pa.string())


def _maps(properties: pa.Array) -> pa.Array:
    """Name and value of each property."""
    items = pc.split_pattern(properties, b"\x02")
    parents = np.asarray(pc.list_parent_indices(items))
    flat = items.flatten()
    mark = np.asarray(pc.find_substring(flat, b"\x01"))
    sizes = np.asarray(pc.binary_length(flat))
    keep = np.flatnonzero((mark > 0) & (mark + 1 < sizes))
    if not len(keep):
        return pa.array([[]] * len(properties), _PROPERTIES)
    flat, mark, parents = flat.take(pa.array(keep)), mark[keep], parents[keep]
    # A name, its mark, a value, a name ... of all: every first and every third piece is wanted.
    offsets = np.frombuffer(flat.buffers()[1], np.int32)[: len(flat) + 1]
    cuts = np.empty(3 * len(flat) + 1, np.int32)
    cuts[0::3] = offsets
    cuts[1::3] = offsets[:-1] + mark
    cuts[2::3] = offsets[:-1] + mark + 1
    pieces = pa.BinaryArray.from_buffers(
        pa.binary(), 3 * len(flat), [None, pa.py_buffer(cuts), flat.buffers()[2]]
    )
    numbers = np.arange(0, 3 * len(flat), 3)
    names, values = _text(pieces.take(pa.array(numbers))), pieces.take(pa.array(numbers + 2))
    chosen = np.flatnonzero(np.asarray(pc.not_equal(names, _CRC_NAME)))
    counts = np.bincount(parents[chosen], minlength=len(properties))
    ends = np.concatenate(([0], np.cumsum(counts))).astype(np.int32)
    return pa.MapArray.from_arrays(
        pa.array(ends), names.take(pa.array(chosen)), _text(values.take(pa.array(chosen)))
    )


# ----------------------------------------------------------------------------------- the other ones


def _one_by_one(data: Buffer, sizes: Numbers, queue: QueueState, start: int) -> pa.RecordBatch:
    rows: list[dict[str, Any]] = []
    ends = np.cumsum(sizes).tolist()
    view = memoryview(data)
    for begin, end in zip([0, *ends], ends, strict=False):
        entry = records.decode(view[begin:end])
        if entry.sys_flag & records.SYS_INNER_BATCH:
            source = MessageQueue(queue.topic, queue.broker, queue.queue)
            for message in read_pulled(bytes(view[begin:end]), source):
                properties = message.wire_properties
                rows.append(_row(entry, message.queue_offset, message.body, properties))
        else:
            body = kafka_views.plain_body(entry, _BODY_BYTES_MAX)
            rows.append(_row(entry, entry.queue_offset, body, entry.properties))
    rows = [row for row in rows if row["offset"] >= start]
    places = {"topic": queue.topic, "broker": queue.broker, "queue": queue.queue}
    columns = [
        pa.array([{**places, **row}[field.name] for row in rows], field.type) for field in SCHEMA
    ]
    return pa.RecordBatch.from_arrays(columns, schema=SCHEMA)


def _row(entry: records.Entry, offset: int, body: bytes, properties: bytes) -> dict[str, Any]:
    kind = _kinds(np.array([entry.sys_flag]), pa.array([properties], pa.binary()))[0].as_py()
    found = records.parse_properties(records.without_checksum(properties))
    return {
        "offset": offset,
        "kind": kind,
        "key": found.get("KEYS"),
        "tags": found.get("TAGS"),
        "properties": list(found.items()),
        "flag": entry.flag,
        "born_time": entry.born_ms,
        "store_time": entry.store_ms,
        "body": body,
    }
