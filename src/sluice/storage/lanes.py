"""This module stages single messages of one kind to one queue, as fast as a single one can be.

It does what `Store.stage` does for messages that have topic, queue and flags in common, and gives
the same bytes: a test holds the two together. What is the same in all of them is looked up once.
A lane holds as long as its queue and the store's encoder do (`is_current`). Everything it changes
belongs to the store.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from struct import pack
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol, TypeVar

from isal.isal_zlib import crc32

from sluice.errors import SluiceError
from sluice.model import Buffer, Message
from sluice.protocol import records
from sluice.protocol.batch_presses import Alike, Press, Presses, Sent
from sluice.protocol.record_runs import BatchShape, encode_batch
from sluice.storage.flush import Confirmed
from sluice.storage.indexing import indexed
from sluice.storage.key_batches import Found, KeyRun
from sluice.storage.queue_index import SIMPLE_UNIT, QueueIndex

if TYPE_CHECKING:
    from sluice.storage.store import Store

Keys = tuple[bytes, bytes, bytes]

_MASK_31: Final = 0x7FFFFFFF


class PlacedBatch(NamedTuple):
    """Where the messages of a batch went: one after the other in the log and in their queue."""

    positions: Sequence[int]
    byte_count: int
    queue_offset: int
    unique: bytes  # key of the first
    tags_codes: set[int]
    packed: bytes  # the positions, eight bytes each


# A producer's batch on its way: its lane, its bytes, when it was born and at which address.
Arrived = tuple["Lane", Buffer, int, bytes]


class _HasEntries(Protocol):
    @property
    def entries(self) -> bytes: ...


E = TypeVar("E", bound=_HasEntries)


class Lane:
    """Where messages of one topic, queue and flags go."""

    HOST_BYTES: Final = 8  # of a producer's address: IPv4 and a port

    __slots__ = (
        *(
            "_any_queue",
            "_batch_shape",
            "_encoder",
            "_indexed",
            "_key",
            "_magic",
            "_pack",
            "_plain_press",
            "_presses",
            "_queue",
            "_rest_bytes",
            "_store",
        ),
        *("_sys_flag", "_topic", "_topic_field", "queue_id", "topic"),
    )

    def __init__(
        self,
        store: Store,
        topic: str,
        queue_id: int,
        sys_flag: int,
        presses: Presses | None = None,
    ) -> None:
        """`presses` are those of the owner, where it has many lanes."""
        self._store = store
        self.topic = topic
        self.queue_id = queue_id
        self._key = (topic, queue_id)
        self._queue = store.queue(topic, queue_id)
        self._encoder = store.encoder
        self._topic = self._queue.topic_bytes
        shape, self._magic, self._topic_field, self._sys_flag = store.encoder.shape(
            self._topic, sys_flag, bytes(self.HOST_BYTES)
        )
        self._pack = shape.pack
        empty = Message(topic, queue_id, b"", b"", 0, sys_flag, 0, bytes(self.HOST_BYTES))
        self._rest_bytes = store.encoder.measure(empty, self._topic)
        self._indexed = indexed(sys_flag)
        encoder = store.encoder
        self._batch_shape = BatchShape(
            *(self._magic, self._topic_field, self._sys_flag, queue_id),
            *(self._rest_bytes, encoder.body_bytes_max, encoder.properties_bytes_max),
            *(encoder.entry_bytes_max, encoder.store_host),
        )
        self._any_queue = self._batch_shape._replace(queue_id=0)
        self._presses = presses or Presses()
        self._plain_press: Press | None = None  # of which it is known that nothing is special

    @staticmethod
    def fits(store: Store, topic: str, queue_id: int, sys_flag: int, born_host: bytes) -> bool:
        """Whether messages of this kind can take a lane; the others are staged the plain way."""
        queue = store.queues.get((topic, queue_id))
        is_simple = (
            not store.state.counts_batches(topic)
            if queue is None
            else queue.kind == QueueIndex.kind
        )
        return (
            is_simple
            and topic.encode() != records.SCHEDULE_TOPIC
            and not sys_flag & (records.SYS_INNER_BATCH | records.SYS_TX_MASK)
            and store.encoder.crc_bytes != 0
            and len(born_host) == Lane.HOST_BYTES
        )

    @property
    def is_current(self) -> bool:
        store = self._store
        return store.queues.get(self._key) is self._queue and store.encoder is self._encoder

    def place(
        self,
        body: bytes,
        properties: bytes,
        keys: Keys,
        born_ms: int,
        born_host: bytes,
    ) -> tuple[int, int, int]:
        """Give a message its place; nobody is told when it is confirmed, see `tell`.

        `properties` end with their separator. Returns position, size and queue offset.
        """
        store, encoder, queue = self._store, self._encoder, self._queue
        body_bytes, properties_bytes = len(body), len(properties)
        size = self._rest_bytes + body_bytes + properties_bytes
        if (
            body_bytes > encoder.body_bytes_max
            or properties_bytes > encoder.properties_bytes_max
            or size > encoder.entry_bytes_max
        ):
            # It is refused there, in words.
            self._measure(body, properties, born_ms, born_host)
        store.require_writable()
        store_ms = store.turn_ms()
        log = store.log
        position = log.position_for(size)
        offset = queue.next_offset
        head = self._pack(
            size,
            self._magic,
            crc32(body) & _MASK_31,
            self.queue_id,
            0,
            offset,
            position,
            self._sys_flag,
            born_ms,
            born_host,
            store_ms,
            encoder.store_host,
            0,
            0,
            body_bytes,
        )
        properties_size = (properties_bytes + encoder.crc_bytes).to_bytes(2, "big")
        entry = b"".join((head, body, self._topic_field, properties_size, properties))
        log.stage(entry + records.crc_property(crc32(entry)))
        code = records.java_hash(keys[2]) if keys[2] else 0
        queue.next_offset = offset + 1
        found: tuple[Found, ...] = ()
        if self._indexed:
            found = ((self._topic, keys, position, store_ms),)
        unit = SIMPLE_UNIT.pack(position, size, code)
        store.staged.append((queue, unit, 1, found, position + size, None, False))
        return position, size, offset

    def place_batch(
        self,
        data: Buffer,
        born_ms: int,
        born_host: bytes,
        is_special: Callable[[bytes], bool],
        origin: int = 0,
    ) -> PlacedBatch | None:
        """The same for a producer's batch; None where it has to be looked at more closely.

        `is_special` is asked about the properties of all; `origin` is the position of the entry
        that all are made from.
        """
        placed = self.place_alike([(self, data, born_ms, born_host)], is_special, origin)
        if placed is not None:
            return placed[0]
        store, queue = self._store, self._queue
        store_ms = store.turn_ms()
        middle = self._batch_shape.middle(born_ms, born_host, store_ms, origin)
        batch = self._encode(
            lambda offset, position: encode_batch(
                self._batch_shape, middle, bytes(data), offset, position
            )
        )
        if batch is None or is_special(batch.properties):
            return None
        offset, position = queue.next_offset, store.log.end
        store.log.stage(batch.entries)
        *positions, end = accumulate(batch.sizes, initial=position)
        assert end == position + len(batch.entries), "the sizes decided the places"
        java_hash = records.java_hash
        codes = [java_hash(tag) if tag else 0 for _, _, tag in batch.keys]
        units = b"".join(map(SIMPLE_UNIT.pack, positions, batch.sizes, codes))
        queue.next_offset = offset + len(positions)
        found: list[Found] = []
        if self._indexed:
            topic, keys = self._topic, batch.keys
            found = [(topic, key, at, store_ms) for key, at in zip(keys, positions, strict=True)]
        store.staged.append((queue, units, len(positions), found, end, None, False))
        packed = pack(f">{len(positions)}q", *positions)
        return PlacedBatch(positions, end - position, offset, batch.keys[0][0], {*codes}, packed)

    def _encode(self, encode: Callable[[int, int], E | None]) -> E | None:
        """The entries of a batch for the place that it gets: a batch lies in one file."""
        store, log = self._store, self._store.log
        offset, position = self._queue.next_offset, log.end
        batch = encode(offset, position)
        if batch is None:
            return None
        store.require_room(len(batch.entries))
        if log.position_for(len(batch.entries)) != position:  # it begins the next file
            batch = encode(offset, log.end)
            assert batch is not None, "its place does not decide whether it is usual"
        return batch

    def goes_with(self, other: Lane) -> bool:
        """Whether batches of the two can be placed together: they go to one topic."""
        return self._any_queue == other._any_queue and self._presses is other._presses

    def place_alike(
        self, batches: Sequence[Arrived], is_special: Callable[[bytes], bool], origin: int = 0
    ) -> list[PlacedBatch] | None:
        """The same for batches of one size whose lanes go with this one, at most `together_max` of
        them, if all of their messages are alike: they are encoded in one go. None where they are
        not; then nothing is placed, and each may be placed by itself.
        """
        store, log = self._store, self._store.log
        store.require_writable()
        store_ms = store.turn_ms()
        sent = _numbered(batches, store_ms, origin)
        alike = self._press(sent, log.end, is_special)
        if alike is None:
            return None
        position, byte_count = log.end, len(alike.entries)
        if byte_count > log.entry_bytes_max:
            if len(sent) > 1:
                return None  # each may still fit into a file of the log
            store.require_room(byte_count)
        if log.position_for(byte_count) != position:  # they begin the next file
            alike = self._press(sent, log.end, is_special)
            assert alike is not None, "their place does not decide whether they are alike"
        return self._stage_alike(batches, sent, alike, store_ms)

    def _press(
        self, sent: list[Sent], position: int, is_special: Callable[[bytes], bool]
    ) -> Alike | None:
        press = self._plain_press
        if press is not None and press.batch_bytes == len(sent[0][0]):
            alike = press.press(sent, position)
            if alike is not None:
                return alike
        alike = self._presses.press(self._any_queue, sent, position)
        if alike is None or is_special(alike.press.around):
            return None
        self._plain_press = alike.press
        return alike

    def _stage_alike(
        self, batches: Sequence[Arrived], sent: list[Sent], alike: Alike, store_ms: int
    ) -> list[PlacedBatch]:
        store, press, uniques, units = self._store, alike.press, alike.uniques, alike.units
        size, count = press.size, press.message_count
        end = store.log.end
        # They lie one after the other, whatever their queues: one run for all.
        found: tuple[KeyRun, ...] = ()
        if self._indexed:
            parts = (uniques, press.unique_bytes, press.keys, press.tag)
            found = (KeyRun(self._topic, *parts, end, size, count * len(sent), store_ms),)
        store.log.stage(alike.entries)
        byte_count = size * count
        units_bytes, unique_bytes = len(units) // len(sent), press.unique_bytes
        codes = {press.tags_code}
        placed: list[PlacedBatch] = []
        for number, ((lane, *_), (*_, offset)) in enumerate(zip(batches, sent, strict=True)):
            position, end = end, end + byte_count
            queue = lane._queue
            queue.next_offset = offset + count
            at = number * units_bytes
            own_units = units[at : at + units_bytes]
            store.staged.append((queue, own_units, count, found, end, None, False))
            found = ()
            positions = range(position, end, size)
            first = uniques[(at := number * count * unique_bytes) : at + unique_bytes]
            packed = alike.positions[(at := number * count * 8) : at + count * 8]
            placed.append(PlacedBatch(positions, byte_count, offset, first, codes, packed))
        return placed

    def _measure(self, body: bytes, properties: bytes, born_ms: int, born_host: bytes) -> None:
        self._encoder.measure(
            Message(self.topic, self.queue_id, body, properties, 0, 0, born_ms, born_host),
            self._topic,
        )


def _numbered(batches: Sequence[Arrived], store_ms: int, origin: int) -> list[Sent]:
    """Batches whose messages are of one size, each with its first offset: some may go to the same
    queue.
    """
    sent: list[Sent] = []
    offsets: dict[int, int] = {}
    for lane, data, born_ms, born_host in batches:
        queue_id = lane.queue_id
        offset = offsets.get(queue_id, lane._queue.next_offset)
        offsets[queue_id] = offset + len(data) // max(1, int.from_bytes(data[:4], "big"))
        middle = lane._any_queue.middle(born_ms, born_host, store_ms, origin)
        sent.append((data, queue_id, middle, offset))
    return sent


def tell(store: Store, done: Confirmed) -> None:
    """Call `done` when everything that is staged by now is confirmed, or has failed."""
    if not store.staged:  # somebody had it written before the turn's end
        if store.flusher.failure is not None or store.confirmed >= store.log.written:
            done(store.flusher.failure)
        else:
            store.flusher.wait(store.log.written, done)
        return
    queue, units, count, found, end, before, durable = store.staged[-1]

    def both(error: SluiceError | None) -> None:
        assert before is not None
        before(error)
        done(error)

    told = done if before is None else both
    store.staged[-1] = (queue, units, count, found, end, told, durable)
