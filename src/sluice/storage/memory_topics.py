"""This module holds the topics whose messages are never written: queues in memory, with a bound.

A topic is one of these when it was made with the attribute storage=memory. Its messages have the
form of all others, are read in the same way, and are gone when the process ends. They have
positions too, above any that a log can reach: no two processes give the same one away.

    bound     a topic holds `memory.bytes.max` bytes, all together hold `bytes_max`. Where a message
              has no room the oldest of its topic are dropped, or it is refused (memory.when.full)
    offsets   are given away only once, also across starts: the log's table `memory` has how far
              each queue may go, in blocks, and a message that is beyond it waits until the next
              block is durable. A queue begins where the blocks of the process before end
    earlier   offsets below that belong to messages that are gone. Who asks for one goes on at the
              oldest message that there is, as if nothing had happened

Methods belong to the store's owner. Nothing here waits for a disk.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

from sluice.errors import Busy, MessageIllegal, SluiceError
from sluice.model import Message, Placed, PropertyFilter
from sluice.protocol import records
from sluice.storage.admission import check_topic
from sluice.storage.reads import SCAN_UNITS_MAX, Accept, ReadResult, ReadStatus
from sluice.storage.state import MEMORY_TABLE, TOPIC_TABLE

if TYPE_CHECKING:
    from sluice.storage.store import Store

Done = Callable[[SluiceError | None], None]
Keys = tuple[bytes, bytes, bytes]

MEMORY_FLOOR: Final = 1 << 62  # positions from here on are in memory
BYTES_MAX: Final = 512 << 20
TOPIC_BYTES_MAX: Final = 64 << 20
BLOCK_OFFSETS: Final = 65_536  # that are written down at a time
ENTRY_COST: Final = 200  # bytes that an entry takes beside its own
_POSITION_BITS: Final = 20  # positions in a millisecond: more than a million
_GONE_MAX: Final = 1024  # entries that were dropped and still have their places in a list


class _Held(NamedTuple):
    """A message in its queue."""

    entry: bytes
    tags_code: int
    store_ms: int
    position: int

    @property
    def cost(self) -> int:
        return len(self.entry) + ENTRY_COST


class _Limits(NamedTuple):
    bytes_max: int
    refuses: bool


class _Topic:
    """What the queues of a topic hold together."""

    __slots__ = ("byte_count", "order")

    def __init__(self) -> None:
        self.byte_count = 0
        self.order: deque[_Queue] = deque()  # the queue of each message, the oldest first


class _Queue:
    """One queue: `held[gone]` is the oldest message and has the offset `first + gone`."""

    __slots__ = (
        *("base", "first", "gone", "held", "is_asking", "key", "reserved", "visible", "waiting"),
    )

    def __init__(self, key: str, base: int, reserved: int) -> None:
        self.key = key
        self.base = self.first = base  # where it began in this process
        self.reserved = reserved  # offsets below are written down
        self.is_asking = False  # for more of them
        self.held: list[_Held | None] = []
        self.gone = 0
        self.visible = base  # offsets below can be read
        self.waiting: deque[tuple[int, Done | None]] = deque()  # offsets, and who waits for them

    @property
    def start(self) -> int:
        return self.first + self.gone

    @property
    def next_offset(self) -> int:
        return self.first + len(self.held)

    def get(self, offset: int) -> _Held:
        held = self.held[offset - self.first]
        assert held is not None, "only what is there is asked for"
        return held

    def drop_oldest(self) -> int:
        """The bytes that are free now."""
        held = self.get(self.start)
        self.held[self.gone] = None
        self.gone += 1
        self.visible = max(self.visible, self.start)
        if self.gone > _GONE_MAX and self.gone * 2 > len(self.held):
            del self.held[: self.gone]
            self.first += self.gone
            self.gone = 0
        return held.cost

    def search(self, position: int) -> _Held | None:
        """The message at a position."""
        at = bisect_left(self.held, position, lo=self.gone, key=_position)
        held = self.held[at] if at < len(self.held) else None
        return held if held is not None and held.position == position else None

    def offset_at(self, when_ms: int, *, upper: bool) -> int:
        """The first message stored at or after a time; `upper`: the last one at or before it."""
        stop = self.visible - self.first
        if not upper:
            return self.first + bisect_left(self.held, when_ms, self.gone, stop, key=_store_ms)
        at = bisect_right(self.held, when_ms, self.gone, stop, key=_store_ms)
        return max(self.start, self.first + at - 1)


class MemoryTopics:
    """The topics of one store that are in memory only."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._queues: dict[tuple[str, int], _Queue] = {}
        self._topics: dict[str, _Topic] = {}
        self._deleted: set[str] = set()  # since the start: a new one of the name begins at 0
        self._next_position = 0
        self._last_ms = 0
        self.unconfirmed: set[_Queue] = set()  # that somebody waits for
        self.bytes_max = BYTES_MAX
        self.byte_count = 0
        self.dropped: Counter[str] = Counter()  # by topic: messages that had to go for others
        self.refused: Counter[str] = Counter()  # by topic: messages that had no room

    # ------------------------------------------------------------------------------------- settings

    def holds(self, topic: str) -> bool:
        """Whether a topic's messages are in memory only."""
        return self._limits(topic) is not None

    def _limits(self, topic: str) -> _Limits | None:
        settings = self._store.state.newest(TOPIC_TABLE, topic)
        attributes = settings.get("attributes") if settings else None
        if not attributes or attributes.get("storage") != "memory":
            return None
        bytes_max = int(attributes.get("memory.bytes.max", TOPIC_BYTES_MAX))
        return _Limits(bytes_max, attributes.get("memory.when.full") == "refuse")

    def _queue(self, topic: str, queue_id: int) -> _Queue | None:
        """A queue of a topic that is in memory; None for others."""
        queue = self._queues.get((topic, queue_id))
        if queue is None and self.holds(topic):
            queue = self.begin(topic, queue_id)
        return queue

    def begin(self, topic: str, queue_id: int, at_least: int = 0) -> _Queue:
        """A queue of a topic that is in memory; it begins above all offsets given away before."""
        key = f"{topic}@{queue_id}"
        base = 0 if topic in self._deleted else self._store.table(MEMORY_TABLE).get(key, 0)
        queue = self._queues.get((topic, queue_id))
        if queue is None:
            queue = self._queues[topic, queue_id] = _Queue(key, max(base, at_least), base)
        return queue

    def base(self, topic: str, queue_id: int) -> int:
        """The offset that a queue began with in this process; 0 for queues of the log."""
        queue = self._queues.get((topic, queue_id))
        return 0 if queue is None else queue.base

    # ------------------------------------------------------------------------------------ appending

    def stage(self, message: Message, done: Done | None) -> Placed:
        """Give a message its place; it can be read when the turn ends and its offset is safe."""
        return self.stage_batch([message], done)[0]

    def stage_batch(self, messages: Sequence[Message], done: Done | None) -> list[Placed]:
        """All of them or none; `done` is told when the last one is safe."""
        store = self._store
        sizes = [self._measure(message) for message in messages]
        self._make_room(messages[0].topic, sum(sizes) + ENTRY_COST * len(sizes))
        self._last_ms = max(self._last_ms, store.now_ms(), store.last_ms)
        queues = [self.begin(message.topic, message.queue_id) for message in messages]
        for queue in queues:
            self._reserve(queue, queue.next_offset + len(messages))
        placed = []
        for queue, message, size in zip(queues, messages, sizes, strict=True):
            placed.append(self._add(queue, message, size))
            is_last = len(placed) == len(messages)
            queue.waiting.append((queue.next_offset, done if is_last else None))
            self.unconfirmed.add(queue)
        return placed

    def _measure(self, message: Message) -> int:
        if message.count != 1 or message.sys_flag & records.SYS_INNER_BATCH:
            raise MessageIllegal(
                f"topic {message.topic} is in memory (storage=memory): it takes no batches that "
                "are stored whole"
            )
        check_topic(message.topic)
        return self._store.encoder.measure(message, message.topic.encode())

    def _add(self, queue: _Queue, message: Message, size: int) -> Placed:
        topic = message.topic.encode()
        if not self._next_position:
            self._next_position = MEMORY_FLOOR + (self._store.now_ms() << _POSITION_BITS)
        position = self._next_position
        self._next_position += 1
        offset, store_ms = queue.next_offset, self._last_ms
        entry = self._store.encoder.encode(message, topic, size, offset, position, store_ms)
        code = records.tags_code(topic, message.properties, store_ms, ())
        held = _Held(entry, code, store_ms, position)
        queue.held.append(held)
        group = self._topics.setdefault(message.topic, _Topic())
        group.order.append(queue)
        group.byte_count += held.cost
        self.byte_count += held.cost
        return Placed(position, size, offset, store_ms)

    def _make_room(self, topic: str, byte_count: int) -> None:
        limits = self._limits(topic)
        assert limits is not None, "who stages here has looked"
        group = self._topics.setdefault(topic, _Topic())
        if byte_count > min(limits.bytes_max, self.bytes_max):
            raise MessageIllegal(
                f"{byte_count} bytes do not fit into topic {topic}, which is in memory and holds "
                f"{min(limits.bytes_max, self.bytes_max)} bytes (memory.bytes.max, "
                "memory_topics_bytes_max)"
            )
        while True:
            over = ""
            if group.byte_count + byte_count > limits.bytes_max:
                over = f"topic {topic} holds {group.byte_count} of {limits.bytes_max} bytes "
                over += "in memory (memory.bytes.max)"
            elif self.byte_count + byte_count > self.bytes_max:
                over = f"topics hold {self.byte_count} of {self.bytes_max} bytes in memory "
                over += "(memory_topics_bytes_max)"
            if not over:
                return
            if limits.refuses or not group.order:
                self.refused[topic] += 1
                raise Busy(f"system busy: {over}; try again")
            freed = group.order.popleft().drop_oldest()
            group.byte_count -= freed
            self.byte_count -= freed
            self.dropped[topic] += 1

    # -------------------------------------------------------------------------------------- offsets

    def _reserve(self, queue: _Queue, needed: int) -> None:
        """See to it that offsets are written down before anybody hears of them."""
        if queue.is_asking or needed + BLOCK_OFFSETS // 2 <= queue.reserved:
            return
        reserved = needed + BLOCK_OFFSETS

        def told(error: SluiceError | None) -> None:
            queue.is_asking = False
            if error is None:
                queue.reserved = max(queue.reserved, reserved)
            else:
                self._take_back(queue, error)
            if queue.next_offset > queue.reserved:  # more came meanwhile
                self._reserve_more(queue)
            if queue.waiting:
                self.unconfirmed.add(queue)
                self.end_turn()

        try:
            self._store.change([(MEMORY_TABLE, queue.key, reserved)], told)
        except SluiceError:
            if needed > queue.reserved:
                raise
        else:
            queue.is_asking = True

    def _reserve_more(self, queue: _Queue) -> None:
        try:
            self._reserve(queue, queue.next_offset)
        except SluiceError as error:
            self._take_back(queue, error)

    def _take_back(self, queue: _Queue, error: SluiceError) -> None:
        """Offsets could not be written down: messages that have them are not stored."""
        group = self._topics.get(queue.key.rpartition("@")[0])
        while queue.next_offset > max(queue.reserved, queue.start):
            held = queue.held.pop()
            assert held is not None, "the newest are there"
            assert group is not None, "and their topic"
            self.byte_count -= held.cost
            group.byte_count -= held.cost
            for at in range(len(group.order) - 1, -1, -1):
                if group.order[at] is queue:
                    del group.order[at]
                    break
        failed = [done for end, done in queue.waiting if end > queue.reserved]
        queue.waiting = deque(each for each in queue.waiting if each[0] <= queue.reserved)
        for done in failed:
            if done is not None:
                done(error)

    def end_turn(self) -> None:
        """What was staged can be read now, as far as its offsets are safe."""
        told: list[Done] = []
        for queue in list(self.unconfirmed):
            queue.visible = max(queue.visible, min(queue.next_offset, queue.reserved))
            while queue.waiting and queue.waiting[0][0] <= queue.visible:
                done = queue.waiting.popleft()[1]
                if done is not None:
                    told.append(done)
            self.unconfirmed.discard(queue)  # who still waits does so for the disk
        for done in told:
            done(None)

    # -------------------------------------------------------------------------------------- reading

    def read(
        self,
        topic: str,
        queue_id: int,
        offset: int,
        count_max: int,
        bytes_max: int,
        accept: Accept | None,
    ) -> ReadResult:
        """As `Reader.read`; of a queue that is not here, that it is nowhere."""
        queue = self._queue(topic, queue_id)
        if queue is None:
            return ReadResult(ReadStatus.NO_MATCHED_LOGIC_QUEUE, 0, 0, 0)
        low, high = queue.start, queue.visible
        if offset < queue.base:
            offset = low  # of a process before this one
        if offset < low:
            return ReadResult(ReadStatus.OFFSET_TOO_SMALL, low, low, high)
        if offset >= high:
            status = ReadStatus.OFFSET_OVERFLOW_ONE
            if offset > high:
                status = ReadStatus.OFFSET_OVERFLOW_BADLY
            return ReadResult(status, high, low, high)
        chosen: list[memoryview] = []
        byte_count, at = 0, offset
        for at in range(offset, min(high, offset + SCAN_UNITS_MAX)):
            held = queue.get(at)
            if not _is_wanted(held, accept):
                continue
            if chosen and (len(chosen) >= count_max or byte_count + len(held.entry) > bytes_max):
                break
            chosen.append(memoryview(held.entry))
            byte_count += len(held.entry)
        else:
            at += 1
        status = ReadStatus.FOUND if chosen else ReadStatus.NO_MATCHED_MESSAGE
        return ReadResult(status, at, low, high, chosen, len(chosen), byte_count)

    def min_offset(self, topic: str, queue_id: int) -> int:
        queue = self._queue(topic, queue_id)
        return 0 if queue is None else queue.start

    def max_offset(self, topic: str, queue_id: int) -> int:
        queue = self._queue(topic, queue_id)
        return 0 if queue is None else queue.visible

    def offset_for_time(self, topic: str, queue_id: int, when_ms: int, *, upper: bool) -> int:
        queue = self._queue(topic, queue_id)
        return 0 if queue is None else queue.offset_at(when_ms, upper=upper)

    def earliest_ms(self, topic: str, queue_id: int) -> int:
        queue = self._queue(topic, queue_id)
        if queue is None or queue.start >= queue.visible:
            return -1
        return queue.get(queue.start).store_ms

    def entry_at(self, position: int) -> memoryview | None:
        """The entry at a position, None where it was dropped or never was."""
        for queue in self._queues.values():
            held = queue.search(position)
            if held is not None:
                return memoryview(held.entry)
        return None

    def units(
        self, topic: str, queue_id: int, offset: int, count: int
    ) -> list[tuple[int, int, int, int]] | None:
        """Position, size, tags code and offset of messages; None where the queue is not here."""
        queue = self._queue(topic, queue_id)
        if queue is None:
            return None
        places = range(max(offset, queue.start), min(queue.visible, offset + count))
        found = [(at, queue.get(at)) for at in places]
        return [(held.position, len(held.entry), held.tags_code, at) for at, held in found]

    # ------------------------------------------------------------------------------------- deleting

    def deleting(self, topic: str, done: Done | None) -> Done:
        """Who hears how the deletion of a topic ended."""

        queues = {key: queue for key, queue in self._queues.items() if key[0] == topic}
        group, was_deleted = self._topics.get(topic), topic in self._deleted

        def told(error: SluiceError | None) -> None:
            if error is not None and topic not in self._topics and group is not None:
                self._queues.update(queues)
                self._topics[topic] = group
                self.byte_count += group.byte_count
                if not was_deleted:
                    self._deleted.discard(topic)
            if done is not None:
                done(error)

        return told

    def drop(self, topic: str) -> None:
        """Forget a topic's messages; one of the same name begins anew."""
        told: list[Done] = []
        for key in [key for key in self._queues if key[0] == topic]:
            queue = self._queues.pop(key)
            self.unconfirmed.discard(queue)
            told += [done for _, done in queue.waiting if done is not None]
            queue.waiting.clear()
            self._deleted.add(topic)
        group = self._topics.pop(topic, None)
        if group is not None:
            self.byte_count -= group.byte_count
        for done in told:
            done(None)  # they were taken; that they are gone is what was asked for


def _is_wanted(held: _Held, accept: Accept | None) -> bool:
    if accept is None:
        return True
    if isinstance(accept, PropertyFilter):
        return accept.matches(records.summarize(held.entry, 0, held.position).properties)
    return accept(held.tags_code)


def _position(held: _Held | None) -> int:
    assert held is not None, "dropped ones are not looked at"
    return held.position


def _store_ms(held: _Held | None) -> int:
    assert held is not None, "dropped ones are not looked at"
    return held.store_ms
