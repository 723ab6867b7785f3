"""This module stages batches that are stored whole: one entry, as many offsets as it has records.

It does for the batches of Kafka's producers what `Store.stage` does for messages, without a copy of
the batch: head, batch and tail of the entry go to the log as they are, one after the other. It
keeps nothing; everything belongs to the store.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from struct import Struct
from typing import TYPE_CHECKING, Final, NamedTuple

from isal.isal_zlib import crc32, crc32_combine

from sluice.errors import MessageIllegal, SluiceError
from sluice.model import Buffer, Placed
from sluice.protocol import kafka_entries, records
from sluice.storage.flush import Confirmed
from sluice.storage.queue_index import BatchQueueIndex

if TYPE_CHECKING:
    from sluice.storage.store import Store

_MASK_31: Final = 0x7FFFFFFF
_SYS_FLAG: Final = Struct(">36xi")
_OFFSET: Final = Struct(">q")
_UNITS_AT_ONCE: Final = 1000
_new_tuple = tuple.__new__  # half the time of a named tuple's own


def crc_property(crc: int) -> bytes:
    """What `records.crc_property` gives, sooner where the processor's cache has not its tables."""
    return b"%s%s\x02" % (records.CRC_NAME, (b"%010d" % (crc & _MASK_31))[::-1])


class WholeBatch(NamedTuple):
    """A batch on its way into the store. It begins with its offset, which is not known yet;
    `front` is what follows that, `rest` what follows `front`.
    """

    topic: str
    queue_id: int
    front: bytes
    rest: Buffer
    record_count: int
    code: int  # the tags code of its unit
    born_ms: int
    born_host: bytes
    keys: bytes = b""  # of its records, with blanks between them, for the key index


class BatchLane:
    """Where batches of one partition go: what is the same for all of them is known already."""

    __slots__ = (
        *("_encoder", "_host_bytes", "_store", "_tail_fronts", "_topic_field"),
        *("common", "fixed_bytes", "key", "queue"),
    )

    def __init__(self, store: Store, key: tuple[str, int], host_bytes: int) -> None:
        """`host_bytes`: of the addresses of those who send, as entries have them."""
        store.require_writable()
        queue = store.queues.get(key) or store.queue(*key)
        if queue.kind != BatchQueueIndex.kind:
            raise MessageIllegal(f"topic {key[0]} takes single messages only")
        self.key = key
        self.queue = queue
        self._store = store
        self._host_bytes = host_bytes
        self._encoder = encoder = store.encoder
        shape, magic, self._topic_field, sys_flag = encoder.shape(
            queue.topic_bytes, kafka_entries.KAFKA_FLAGS, bytes(host_bytes)
        )
        self.fixed_bytes = shape.size + encoder.crc_bytes
        # What makes the head of an entry, and what all of them have in it.
        self.common = (shape.pack, magic, key[1], sys_flag)
        # What stands between a batch and its properties, by how long those are.
        self._tail_fronts: dict[int, bytes] = {}

    def takes(self, born_host: bytes) -> bool:
        """Whether it still leads to the queue of its name, and is for senders of this kind."""
        store = self._store
        return (
            store.queues.get(self.key) is self.queue
            and store.encoder is self._encoder
            and len(born_host) == self._host_bytes
        )

    def tail(self, properties: bytes) -> bytes:
        """What follows a batch in its entry, up to the checksum."""
        front = self._tail_fronts.get(len(properties))
        if front is None:
            size = len(properties) + self._encoder.crc_bytes
            front = self._tail_fronts[len(properties)] = self._topic_field + size.to_bytes(2, "big")
        return front + properties


# A batch with the lane that it takes: what follows its offset, what follows that, how many records
# it has, the tags code of its unit, when it was born, and keys of its records for the key index. A
# plain tuple, because there is one per batch.
Laid = tuple[BatchLane, bytes, Buffer, int, int, int, bytes]


def place(
    store: Store, batches: Sequence[Laid], born_host: bytes, done: Confirmed | None = None
) -> list[Placed]:
    """Give batches their places, one after the other; `done` is told of each. Raises why the first
    has none; where a later one has none those before it have theirs, and the list is shorter.
    """
    store.require_writable()
    log, encoder, staged = store.log, store.encoder, store.staged
    crc_bytes, bytes_max, store_host = (
        encoder.crc_bytes,
        encoder.entry_bytes_max,
        encoder.store_host,
    )
    store_ms, file_end = store.turn_ms(), log.file_end
    begin = end = log.end
    pieces: list[Buffer] = []
    placed: list[Placed] = []
    try:
        for lane, front, rest, count, code, born_ms, keys in batches:
            queue = lane.queue
            offset = queue.next_offset
            tail = lane.tail(kafka_entries.properties_of(count, offset, code))
            front = _OFFSET.pack(offset) + front
            body_bytes = len(front) + len(rest)
            size = lane.fixed_bytes + body_bytes + len(tail)
            if end + size > file_end:
                if pieces:
                    log.stage_parts(pieces, end - begin)
                    pieces = []
                if size > bytes_max:
                    raise MessageIllegal(f"a batch of {size} bytes does not fit into a log file")
                begin = end = log.position_for(size)
                file_end = log.file_end
            body_crc = crc32(rest, crc32(front))
            pack, magic, queue_id, sys_flag = lane.common
            head = pack(
                size,
                magic,
                body_crc & _MASK_31,
                queue_id,
                0,
                offset,
                end,
                sys_flag,
                born_ms,
                born_host,
                store_ms,
                store_host,
                0,
                0,
                body_bytes,
            )
            if crc_bytes:
                # It follows from those of the parts: no byte is summed up twice.
                crc = crc32(tail, crc32_combine(crc32(head), body_crc, body_bytes))
                tail += crc_property(crc)
            unit = queue.pack(end, size, code, store_ms, offset, count)
            found = ((queue.topic_bytes, (b"", keys, b""), end, store_ms),) if keys else ()
            pieces += (head + front, rest, tail)
            placed.append(_new_tuple(Placed, (end, size, offset, store_ms)))
            end += size
            queue.next_offset = offset + count
            staged.append((queue, unit, count, found, end, done, False))
    except SluiceError:
        if not placed:
            raise
    finally:
        if pieces:
            log.stage_parts(pieces, end - begin)
    return placed


def stage_whole(store: Store, batch: WholeBatch, done: Confirmed | None = None) -> Placed:
    """Give a batch its place. `done` is called exactly once: None = confirmed, or the error."""
    topic, queue_id, front, rest, count, code, born_ms, born_host, keys = batch
    lane = BatchLane(store, (topic, queue_id), len(born_host))
    return place(store, [(lane, front, rest, count, code, born_ms, keys)], born_host, done)[0]


class StoredHead(NamedTuple):
    """The beginning of a batch that is in the log."""

    offset: int
    record_count: int
    store_ms: int
    first: bytes  # the batch's first bytes


def stored_heads(
    store: Store, topic: str, queue_id: int, offset: int, byte_count: int
) -> Iterator[StoredHead]:
    """The batches of a queue from an offset on, also those that are not confirmed yet.

    It may wait for the disk: it is for the start of a broker, or after a failed write.
    """
    queue = store.queues.get((topic, queue_id))
    if queue is None or queue.kind != BatchQueueIndex.kind:
        return
    at = queue.seek(max(offset, queue.start_offset), store.queue_files, wait=True)
    while at < queue.count:
        stop = min(queue.count, at + _UNITS_AT_ONCE)
        raw = queue.units(at, stop, store.queue_files, wait=True)
        for position, size, _, base, count in queue.iterate(raw, at):
            if base < offset:
                continue
            view = store.log.view(position, size)
            (sys_flag,) = _SYS_FLAG.unpack_from(view)
            if kafka_entries.is_kafka(sys_flag):
                body_at = records.origin_place(sys_flag) + 12
                first = bytes(view[body_at : body_at + byte_count])
                yield StoredHead(base, count, records.store_time_ms(view, 0), first)
        at = stop
