"""This module makes an entry of the log from another one: the same message in another queue.

That is what becomes of a delayed message when it is due, and it happens tens of thousands of times
in a second. So an entry that this process wrote or scanned is not checked once more, its body's
checksum is taken over, and nothing becomes a `Message` in between. What is unusual (IPv6, a queue
of another kind, a life that ends) is left to `Store.stage`; a test holds the two together.

Everything here belongs to the store's owner.
"""

from __future__ import annotations

from struct import Struct
from typing import TYPE_CHECKING, Final, NamedTuple

from isal.isal_zlib import crc32

from sluice.errors import RecordDamaged
from sluice.model import Buffer
from sluice.protocol import records
from sluice.protocol.lifetimes import EXPIRES_NAME
from sluice.storage.files import OpenFile
from sluice.storage.indexing import indexed
from sluice.storage.queue_index import SIMPLE_UNIT, ColdRead, QueueIndex

if TYPE_CHECKING:
    from sluice.storage.store import Store

Keys = tuple[bytes, bytes, bytes]  # what `records.message_keys` finds

# As `records.Encoder` writes it, with addresses of IPv4.
_HEAD: Final = Struct(">iIIiiqqiq8sq8siqi")
_FIRST_BYTES: Final = 4096  # looked at first: mostly the whole entry
_V6: Final = records.SYS_BORN_V6 | records.SYS_STORE_V6
_UNUSUAL: Final = _V6 | records.SYS_INNER_BATCH | records.SYS_TX_MASK


Target = QueueIndex  # what copies go into


class Original(NamedTuple):
    """An entry that another one is made from."""

    position: int
    topic: bytes
    body_crc: int
    flag: int
    sys_flag: int
    born_ms: int
    born_host: bytes
    store_ms: int
    reconsume_times: int
    body: Buffer
    properties: bytes  # without the checksum


class Copied(NamedTuple):
    """What was made of it."""

    position: int
    size: int
    queue_offset: int
    tags_code: int


def read_original(store: Store, position: int) -> Original | None:
    """The entry at a position; None: it is unusual, or none, and is read another way.

    May raise `ColdRead`, and `RecordDamaged`.
    """
    log, reader = store.log, store.reader
    at = position % log.segment_bytes
    room = log.segment_bytes - at
    if not log.start <= position < store.confirmed or room < _HEAD.size:
        return None
    file = log.segments[position - at].file
    is_cold = position < reader.hot_from
    if is_cold:
        _require_memory(file, at, at + min(room, _FIRST_BYTES))
    view = file.view()
    fields = _HEAD.unpack_from(view, at)
    size, magic, body_crc, _, flag, _, own_position, sys_flag, born_ms, born_host = fields[:10]
    if magic != records.MAGIC_V1 or own_position != position or sys_flag & _UNUSUAL:
        return None
    body_at, end = at + _HEAD.size, at + size
    topic_at = body_at + fields[14]
    if not body_at <= topic_at < end <= at + room:
        return None
    if is_cold and size > _FIRST_BYTES:
        _require_memory(file, at, end)
    if position < reader.trusted_from:
        try:
            records.summarize(view, at, position)
        except records.BadRecord as error:
            raise RecordDamaged(*log.path_of(position), str(error)) from error
    properties_at = topic_at + 1 + view[topic_at] + 2
    return Original(
        position,
        bytes(view[topic_at + 1 : properties_at - 2]),
        body_crc,
        flag,
        sys_flag,
        born_ms,
        born_host,
        fields[10],
        fields[12],
        view[body_at:topic_at],
        records.without_checksum(bytes(view[properties_at:end])),
    )


def _require_memory(file: OpenFile, start: int, stop: int) -> None:
    if not file.resident(start, stop):
        raise ColdRead(lambda: file.warm(start, stop))


def takes_copies(store: Store, queue: QueueIndex) -> bool:
    """Whether copies can go into a queue in this way."""
    encoder = store.encoder
    return (
        queue.kind == QueueIndex.kind
        and queue.topic_bytes not in records.TIMED_TOPICS
        and encoder.crc_bytes != 0
        and len(encoder.store_host) == 8
    )


def stage_copy(
    store: Store,
    queue: QueueIndex,
    original: Original,
    properties: bytes,
    tags_code: int | None = None,
    keys: Keys | None = None,
) -> Copied | None:
    """Stage an entry with the original's body, and its position as origin.

    None: it has to be staged the plain way. `properties` end with their separator; code and keys
    are found among them where they are not given. Nobody is told when it is confirmed: see
    `lanes.tell`.
    """
    encoder, log = store.encoder, store.log
    topic = queue.topic_bytes
    shape, magic, topic_field, sys_flag = encoder.shape(
        topic, original.sys_flag, original.born_host
    )
    body, properties_bytes = original.body, len(properties) + encoder.crc_bytes
    size = shape.size + len(body) + len(topic_field) + 2 + properties_bytes
    if (
        len(body) > encoder.body_bytes_max
        or properties_bytes > records.PROPERTIES_BYTES_MAX
        or size > encoder.entry_bytes_max
        or EXPIRES_NAME in properties
    ):
        return None
    store_ms = store.turn_ms()
    position, offset = log.position_for(size), queue.next_offset
    head = shape.pack(
        *(size, magic, original.body_crc, queue.key.queue_id, original.flag, offset, position),
        *(sys_flag, original.born_ms, original.born_host, store_ms, encoder.store_host),
        *(original.reconsume_times, original.position, len(body)),
    )
    entry = b"".join((head, body, topic_field, properties_bytes.to_bytes(2, "big"), properties))
    log.stage(entry + records.crc_property(crc32(entry)))
    if keys is None:
        value = records.property_value
        keys = (
            value(properties, b"UNIQ_KEY") or b"",
            value(properties, b"KEYS") or b"",
            value(properties, b"TAGS") or b"",
        )
    if tags_code is None:
        tags_code = records.java_hash(keys[2]) if keys[2] else 0
    found = ((topic, keys, position, store_ms),) if indexed(sys_flag) else ()
    unit = SIMPLE_UNIT.pack(position, size, tags_code)
    queue.next_offset = offset + 1
    store.staged.append((queue, unit, 1, found, position + size, None, False))
    return Copied(position, size, offset, tags_code)
