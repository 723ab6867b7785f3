"""This module makes an entry of the log from another one: the same message in another queue.

That is what becomes of a delayed message when it is due, and it happens tens of thousands of times
in a second. So an entry that this process wrote or scanned is not checked once more, its body's
checksum is taken over, nothing becomes a `Message` in between, and what is due together is made
together (`stage_copies`, and `copy_tables.py` where they are alike). What is unusual (IPv6, a queue
of another kind, a life that ends) is left to `Store.stage`; a test holds the two together.

Everything here belongs to the store's owner.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from struct import Struct
from typing import TYPE_CHECKING, Final, NamedTuple

from isal.isal_zlib import crc32

from sluice.model import Buffer
from sluice.protocol import records
from sluice.protocol.lifetimes import EXPIRES_NAME
from sluice.storage.files import OpenFile
from sluice.storage.indexing import indexed
from sluice.storage.key_batches import Found, KeyRun
from sluice.storage.queue_index import SIMPLE_UNIT, QueueIndex

if TYPE_CHECKING:
    from sluice.storage.store import Store

Keys = tuple[bytes, bytes, bytes]  # what `records.message_keys` finds

# An entry's head as `records.Encoder` writes it, with addresses of IPv4. Of an original: size,
# magic, checksum of the body, flag, position, flags of the system, time and host of birth, store
# time, times it was tried, size of the body; and what a copy has.
_ORIGINAL: Final = Struct(">iI4s4x4s8xqi16sq8x4s8xi")
_WHOLE: Final = Struct(">iIIiiqqiq8sq8siqi")  # each field by itself
COPIED: Final = Struct(">iI4si4sqqi16sq8s4sqi")
HEAD_BYTES: Final = 88
assert _ORIGINAL.size == _WHOLE.size == COPIED.size == HEAD_BYTES
_PREFIX: Final = Struct(">iI")
_AHEAD_BYTES: Final = 1 << 16  # asked about at once: what is copied together often lies together
_V6: Final = records.SYS_BORN_V6 | records.SYS_STORE_V6
UNUSUAL: Final = _V6 | records.SYS_INNER_BATCH | records.SYS_TX_MASK


TargetQueue = QueueIndex  # what copies go into


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


class Share(NamedTuple):
    """What a queue got of some copies."""

    queue: QueueIndex
    message_count: int
    byte_count: int
    tags_codes: set[int]


# Told the properties of an entry (without the checksum) and its store time, it says into which
# queue a copy goes, what is added to its properties, and its keys; None: it is an unusual one.
Choose = Callable[[bytes, int], tuple[QueueIndex, bytes, Keys] | None]


def stage_copies(store: Store, positions: Iterable[int], choose: Choose) -> list[Share]:
    """Stage copies of the entries at some positions, with these as origins, in one piece.

    It stops at the first one that is unusual, damaged, or not in memory: that one has to take the
    plain way. Queues are to be ones that `takes_copies`. Nobody is told when it is confirmed, see
    `lanes.tell`.
    """
    encoder, log = store.encoder, store.log
    store_ms, store_host, crc_bytes = store.turn_ms(), encoder.store_host, encoder.crc_bytes
    body_bytes_max, entry_bytes_max = encoder.body_bytes_max, encoder.entry_bytes_max
    original_at = _Originals(store).at
    pack, crc_parts, without_checksum = COPIED.pack, records.crc_parts, records.without_checksum
    pack_unit, java_hash = SIMPLE_UNIT.pack, records.java_hash
    parts: list[bytes] = []
    found: list[Found] = []
    targets: dict[QueueIndex, Into] = {}
    end = log.end
    for position in positions:
        original = original_at(position)
        if original is None:
            break
        body_crc, flag, sys_flag, born, then_ms, times, body_bytes, rest = original
        properties = without_checksum(rest[body_bytes + 3 + rest[body_bytes] :])
        chosen = choose(properties, then_ms)
        if chosen is None:
            break
        queue, closing, keys = chosen
        target = targets.get(queue)
        if target is None:
            target = targets[queue] = Into(store, queue)
        properties_bytes = len(properties) + len(closing) + crc_bytes
        size = target.rest_bytes + body_bytes + properties_bytes
        if (
            size > entry_bytes_max
            or properties_bytes > records.PROPERTIES_BYTES_MAX
            or body_bytes > body_bytes_max
            or EXPIRES_NAME in properties
        ):
            break
        if not parts:
            end = log.position_for(size)
        elif end + size > log.file_end:
            break
        head = pack(
            *(size, target.magic, body_crc, target.queue_id, flag, target.offset, end, sys_flag),
            *(born, store_ms, store_host, times, position, body_bytes),
        )
        entry = b"".join(
            (
                *(head, rest[:body_bytes], target.topic_field),
                *(properties_bytes.to_bytes(2, "big"), properties, closing),
            )
        )
        parts.append(entry)
        parts += crc_parts(crc32(entry))
        found.append((target.topic, keys, end, store_ms))
        code = java_hash(keys[2]) if keys[2] else 0
        target.codes.add(code)
        target.units.append(pack_unit(end, size, code))
        target.offset += 1
        end += size
    if parts:
        log.stage(b"".join(parts))
    shares: list[Share] = []
    for target in targets.values():
        if target.units:
            # The key index takes them in the order of the log, whichever queue they are in.
            shares.append(target.stage(found, end))
            found = []
    return shares


def original_at(store: Store, position: int, flags: int = 0) -> Original | None:
    """The entry at a position, for a copy that has these flags too.

    None: it needs a closer look, as one that is not in memory for sure, or of unusual form.
    """
    log, reader = store.log, store.reader
    at = position % log.segment_bytes
    if (
        not max(log.start, reader.hot_from, reader.trusted_from) <= position < store.confirmed
        or log.segment_bytes - at < HEAD_BYTES
    ):
        return None
    view = log.segments[position - at].file.view()
    fields = _WHOLE.unpack_from(view, at)
    size, magic, body_crc, _, flag, _, own, sys_flag, born_ms, born_host = fields[:10]
    store_ms, _, times, origin, body_bytes = fields[10:]
    if (
        magic != records.MAGIC_V1
        or own != position
        or sys_flag & UNUSUAL
        or origin
        or not 0 <= body_bytes < size - HEAD_BYTES
        or size > log.segment_bytes - at
    ):
        return None
    body_at = at + HEAD_BYTES
    topic_at = body_at + body_bytes
    rest = bytes(view[topic_at : at + size])
    properties_at = 3 + rest[0]
    return Original(
        position,
        rest[1 : properties_at - 2],
        body_crc,
        flag,
        sys_flag | flags,
        born_ms,
        born_host,
        store_ms,
        times,
        view[body_at:topic_at],
        records.without_checksum(rest[properties_at:]),
    )


class _Originals:
    """Reads the entries that copies are made from."""

    def __init__(self, store: Store) -> None:
        self._log = store.log
        self._segment_bytes = store.log.segment_bytes
        self._start, self._stop = store.log.start, store.confirmed
        self._hot_from, self._trusted_from = store.reader.hot_from, store.reader.trusted_from
        self._easy_from = max(self._hot_from, self._trusted_from)
        self._base = -1
        self._view = memoryview(b"")
        self._file: OpenFile | None = None
        self._resident = (0, 0)  # a part of the file that is known to be in memory

    def at(self, position: int) -> tuple[bytes, bytes, int, bytes, int, bytes, int, bytes] | None:
        """Of the entry at a position what stays as it is, packed where nobody looks into it, its
        flags, store time and size of the body, and all behind its head; None: it needs a closer
        look.
        """
        segment_bytes = self._segment_bytes
        at = position % segment_bytes
        if not self._start <= position < self._stop or segment_bytes - at < HEAD_BYTES:
            return None
        if position - at != self._base:
            self._open(position - at)
        if position < self._easy_from and not self._is_good(position, at):
            return None
        size, magic, body_crc, flag, own, sys_flag, born, then_ms, times, body_bytes = (
            _ORIGINAL.unpack_from(self._view, at)
        )
        if (
            magic != records.MAGIC_V1
            or own != position
            or sys_flag & UNUSUAL
            or not 0 <= body_bytes < size - HEAD_BYTES
            or size > segment_bytes - at
        ):
            return None
        rest = bytes(self._view[at + HEAD_BYTES : at + size])
        return body_crc, flag, sys_flag, born, then_ms, times, body_bytes, rest

    def _open(self, base: int) -> None:
        self._base = base
        self._file = self._log.segments[base].file
        self._view = self._file.view()
        self._resident = (0, 0)

    def _is_good(self, position: int, at: int) -> bool:
        """Whether an entry is in memory, and what was written."""
        is_hot = position >= self._hot_from
        if not is_hot and not self._is_resident(at, at + HEAD_BYTES):
            return False
        size, magic = _PREFIX.unpack_from(self._view, at)
        if magic != records.MAGIC_V1 or not HEAD_BYTES < size <= self._segment_bytes - at:
            return False
        if not is_hot and not self._is_resident(at, at + size):
            return False
        if position < self._trusted_from:
            try:
                records.summarize(self._view, at, position)
            except records.BadRecord:
                return False
        return True

    def _is_resident(self, start: int, stop: int) -> bool:
        if self._resident[0] <= start and stop <= self._resident[1]:
            return True
        assert self._file is not None
        ahead = min(start + _AHEAD_BYTES, self._segment_bytes)
        if stop <= ahead and self._file.resident(start, ahead):
            self._resident = (start, ahead)
            return True
        return self._file.resident(start, stop)


class Into:
    """A queue that copies go into."""

    __slots__ = (
        *("_queue", "_store", "codes", "magic", "offset"),
        *("queue_id", "rest_bytes", "topic", "topic_field", "units"),
    )

    def __init__(self, store: Store, queue: QueueIndex) -> None:
        self._store = store
        self._queue = queue
        self.topic = queue.topic_bytes
        _, self.magic, self.topic_field, _ = store.encoder.shape(self.topic, 0, bytes(8))
        self.rest_bytes = HEAD_BYTES + len(self.topic_field) + 2
        self.queue_id = queue.key.queue_id
        self.offset = queue.next_offset
        self.units: list[bytes] = []
        self.codes: set[int] = set()

    def stage(self, found: Sequence[Found | KeyRun], end: int) -> Share:
        """Take the units that were gathered; `found` are keys of what ends at `end`."""
        queue = self._queue
        queue.next_offset = self.offset
        units = b"".join(self.units)
        count = len(units) // SIMPLE_UNIT.size
        self._store.staged.append((queue, units, count, found, end, None, False))
        byte_count = sum(size for _, size, _ in SIMPLE_UNIT.iter_unpack(units))
        return Share(queue, count, byte_count, self.codes)


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
