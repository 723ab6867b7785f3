"""This module keeps messages from being stored twice: one business key, one message, in a window.

A topic with `dedup.window.ms` remembers the key of every message for so long, counted from when it
was stored. A message with the same key inside the window is answered with the place of the first
one and stores nothing; it does not make the window longer. The key is the property DEDUP_KEY, or
else the whole text of KEYS; messages without either are not compared.

    new        the message is stored; its key is entered, and the outcome is awaited
    undecided  the first one is not confirmed yet: who comes second waits for the outcome, and is
               looked at again then. If the first failed, the second is stored
    known      answered with the first one's place
    open       the first one is a half message that nobody has committed yet. The same message once
               more is answered like a known one; another one is refused as busy, because neither
               that it is there nor that it is not would be true. Rolled back, the key is free

Keys live in memory. They are read from the log when the broker starts, out of the topic's queues
and of what waits to get there (delayed, undecided transactions), so they last exactly as long as
the messages do; where retention takes messages before that they are written down
(`dedup_notes.py`). Their number is bounded: at the bound new keys are refused, none is forgotten.

This module knows no wire format. It belongs to the store's owner.
"""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from hashlib import blake2b
from struct import Struct
from typing import TYPE_CHECKING, Final, NamedTuple, TypeVar

from sluice.broker.attributes import DEDUP_WINDOW
from sluice.broker.dedup_notes import DedupNotes, Noted
from sluice.broker.delay_forms import handle_of
from sluice.broker.topics import HALF_TOPIC, SCHEDULE_TOPIC, TIMER_TOPIC, TopicSettings
from sluice.errors import Busy, RecordDamaged, SluiceError
from sluice.model import Message
from sluice.protocol import records
from sluice.storage.state import DELETED_TABLE
from sluice.storage.store import ColdRead, ReadResult, ReadStatus

if TYPE_CHECKING:
    from sluice.broker.core import BrokerCore

T = TypeVar("T")

KEY_NAME: Final = b"DEDUP_KEY"

# Where messages wait before they come into the queue they were sent to.
_WAITING_TOPICS: Final = (SCHEDULE_TOPIC, TIMER_TOPIC, HALF_TOPIC)
_KEY_BYTES_MAX: Final = 64  # longer ones are kept as a digest
_DIGEST_BYTES: Final = 24
# Position, queue offset, store time, queue id; the unique key follows, and the handle if any.
_PLACE: Final = Struct(">qqqi")
_ORIGINS_MAX: Final = 64
_READ_COUNT: Final = 512  # messages that are read at a time when a broker starts
_READ_BYTES: Final = 4 << 20
_LOOK_MS: Final = 60_000  # how often it is looked for rows whose windows are over

log_lines = logging.getLogger("sluice.broker")


class First(NamedTuple):
    """Where the first message with a key is, as its sender was told."""

    position: int
    queue_offset: int
    store_ms: int
    queue_id: int
    unique: bytes
    handle: str = ""  # with which a timed message can be taken back
    waits: bool = False  # for its time or a word: it cannot be read yet


class Window:
    """The keys of one topic. Values are packed: there may be millions."""

    __slots__ = ("_order", "_places", "halves", "ms", "undecided")

    def __init__(self, ms: int) -> None:
        self.ms = ms
        self.undecided: dict[bytes, list[Callable[[], None]]] = {}  # with those who wait
        self.halves: set[bytes] = set()  # keys of half messages that are open
        self._places: dict[bytes, bytes] = {}
        self._order: deque[bytes] = deque()  # by the time they were stored

    def __len__(self) -> int:
        return len(self._places)

    def get(self, key: bytes, now_ms: int) -> First | None:
        place = self._places.get(key)
        if place is None:
            return None
        first = _unpack(place)
        return first if now_ms - first.store_ms < self.ms else None

    def enter(self, key: bytes, first: First) -> None:
        self._order.append(key)
        text = first.unique + b"\0" + first.handle.encode() if first.handle else first.unique
        self._places[key] = _PLACE.pack(*first[:4]) + text

    def remove(self, key: bytes) -> None:
        self._places.pop(key, None)  # what is left in the order is met there
        self.halves.discard(key)

    def between(self, start: int, stop: int, now_ms: int) -> Iterator[tuple[bytes, First]]:
        """Keys whose windows are open and whose first messages are at these positions.

        Not those of half messages that are open: such a message stays in the log, or a copy does.
        """
        for key in dict.fromkeys(self._order):
            first = self.get(key, now_ms)
            if first is not None and start <= first.position < stop and key not in self.halves:
                yield key, first

    def forget_old(self, now_ms: int) -> None:
        order, places = self._order, self._places
        while order:
            place = places.get(order[0])
            if place is not None and now_ms - _unpack(place).store_ms < self.ms:
                return
            self.remove(order.popleft())


class Dedup:
    """The keys of one broker's topics."""

    def __init__(self, core: BrokerCore) -> None:
        self._core = core
        self._windows: dict[str, Window] = {}
        self._waiting_count = 0
        self._looked_ms = 0
        self.suppressed: Counter[str] = Counter()  # by topic: messages that were not stored again
        self._notes = DedupNotes(core)
        core.store.housekeeping.rescuers.append(self._rescue)
        core.services.append(self)

    @property
    def key_count(self) -> int:
        return sum(map(len, self._windows.values()))

    # -------------------------------------------------------------------------------------- sending

    def first(
        self, settings: TopicSettings, key: bytes, unique: bytes, again: Callable[[], None]
    ) -> tuple[First | None, bool]:
        """The first message with this key, and whether its outcome has to be awaited.

        Where it has, `again` is called when it is known. (None, False): this is the first one.
        Raises Busy where one more key has no place, or where the first one may come to nothing.
        """
        window = self._window(settings)
        now_ms = self._core.now_ms()
        if key in window.undecided:
            count_max = self._core.config.inflight_requests_max
            if self._waiting_count >= count_max:
                raise Busy(
                    f"system busy: {self._waiting_count} messages wait for others with the same "
                    f"key, the limit is {count_max} (inflight_requests_max); try again"
                )
            self._waiting_count += 1
            window.undecided[key].append(again)
            return None, True
        first = window.get(key, now_ms)
        if first is None:
            self._check_room(now_ms)
        elif key in window.halves and unique != first.unique:
            raise Busy(
                f"system busy: a transaction with the same key is open in topic {settings.name}; "
                "try again when it is committed or rolled back"
            )
        return first, False

    def _check_room(self, now_ms: int) -> None:
        count_max = self._core.config.dedup_keys_max
        if self.key_count < count_max:
            return
        for window in self._windows.values():
            window.forget_old(now_ms)
        if self.key_count >= count_max:
            raise Busy(
                f"system busy: {self.key_count} keys are remembered to suppress duplicates, the "
                f"limit is {count_max} (dedup_keys_max); try again when windows are over, or make "
                "the windows shorter or the limit higher"
            )

    def enter(
        self, settings: TopicSettings, key: bytes, first: First, *, is_half: bool = False
    ) -> Callable[[SluiceError | None], None]:
        """A message got its place; the callback is to be told how it ended."""
        window = self._window(settings)
        window.enter(key, first)
        if is_half:
            window.halves.add(key)
        waiting = window.undecided[key] = []

        def settled(error: SluiceError | None) -> None:
            if window.undecided.pop(key, None) is None:
                return
            if error is not None:
                window.remove(key)
            self._waiting_count -= len(waiting)
            for again in waiting:
                self._core.call_soon(again)

        return settled

    def ended(self, topic: str, properties: bytes, position: int, *, committed: bool) -> None:
        """What became of a half message is stored; `position` is where it was first stored."""
        window = self._windows.get(topic)
        key = key_of(properties)
        first = window.get(key, self._core.now_ms()) if window is not None and key else None
        if window is None or first is None or first.position != position:
            return
        if committed:
            window.halves.discard(key)
        else:
            window.remove(key)

    def is_watched(self, topic: str) -> bool:
        """Whether something is remembered of what was sent to a topic."""
        return topic in self._windows

    def take_topic(self, topic: str) -> Window | None:
        """A topic is being deleted: what was sent to it is nothing to a new one of its name."""
        return self._windows.pop(topic, None)

    def give_back(self, topic: str, window: Window | None) -> None:
        """It could not be deleted."""
        if window is not None:
            self._windows.setdefault(topic, window)

    def _window(self, settings: TopicSettings) -> Window:
        ms = window_ms(settings)
        window = self._windows.get(settings.name)
        if window is None:
            window = self._windows[settings.name] = Window(ms)
        window.ms = ms
        return window

    # -------------------------------------------------------------------------------------- service

    def start(self) -> None:
        """Read the keys of all windows from the log."""
        windows = {
            settings.name: window_ms(settings)
            for settings in self._core.topics.all()
            if window_ms(settings)
        }
        now_ms = self._core.now_ms()
        self._notes.forget_old(now_ms, windows)
        if not windows:
            return
        found: dict[tuple[str, bytes], First] = {}
        halves: set[tuple[str, bytes]] = set()
        for topic, key, first in self._stored(windows, now_ms):
            known = found.get((topic, key))
            if now_ms - first.store_ms < windows[topic] and (known is None or first < known):
                found[topic, key] = first
                (halves.add if first.waits else halves.discard)((topic, key))
        for (topic, key), first in sorted(found.items(), key=lambda each: each[1][2]):
            window = self._windows.setdefault(topic, Window(windows[topic]))
            window.enter(key, first)
            if (topic, key) in halves:
                window.halves.add(key)
        log_lines.info("duplicates: %d keys of %d topics are known", len(found), len(windows))

    def tick(self, now_ms: int) -> None:
        for topic, window in list(self._windows.items()):
            settings = self._core.topics.get(topic)
            if settings is None or not window_ms(settings):
                if not window.undecided:
                    del self._windows[topic]
                continue
            window.ms = window_ms(settings)
            window.forget_old(now_ms)
        if now_ms - self._looked_ms >= _LOOK_MS:
            self._looked_ms = now_ms
            self._notes.forget_old(now_ms, {t: w.ms for t, w in self._windows.items()})

    def _rescue(self, position: int) -> bool:
        """Messages below a position are about to go: their keys must not go with them."""
        now_ms, noted_to = self._core.now_ms(), self._notes.noted_to
        notes = [
            Noted(topic, key, *first[:6])
            for topic, window in self._windows.items()
            for key, first in window.between(noted_to, position, now_ms)
        ]
        if notes:
            self._notes.write(notes, position)
        return not notes

    # -------------------------------------------------------------------------------------- reading

    def _stored(
        self, windows: Mapping[str, int], now_ms: int
    ) -> Iterator[tuple[str, bytes, First]]:
        """Topic, key and place of every message that the store knows of these windows."""
        store = self._core.store
        for note in self._notes.read():
            if note.topic in windows:
                yield note.topic, note.key, First(*note[2:])
        for topic, queue_id in list(store.queues):
            if topic in windows:
                for entry in self._entries(topic, queue_id, now_ms - windows[topic] + 1):
                    key, source = key_of(entry.properties), self._source(entry)
                    if key and source is not None:
                        yield topic, key, self._first(source, entry.queue_id)
        floors = store.table(DELETED_TABLE)
        longest_ms = max(windows.values())
        for waiting, queue_id in list(store.queues):
            if waiting not in _WAITING_TOPICS:
                continue
            for entry in self._entries(waiting, queue_id, now_ms - longest_ms + 1):
                topic, asked = _sent_to(entry.properties)
                key = key_of(entry.properties)
                if not key or topic not in windows or entry.position < floors.get(topic, 0):
                    continue
                if waiting == HALF_TOPIC and not self._is_open(entry):
                    continue  # a committed one was met in its topic, one that was given up is free
                source = self._source(entry)
                if source is not None:
                    first = self._first(source, asked)
                    yield topic, key, first._replace(waits=waiting == HALF_TOPIC)

    def _entries(self, topic: str, queue_id: int, since_ms: int) -> Iterator[records.Entry]:
        store = self._core.store

        def read() -> ReadResult:
            return store.read(topic, queue_id, offset, count_max=count, bytes_max=_READ_BYTES)

        offset = _blocking(lambda: store.offset_for_time(topic, queue_id, since_ms))
        count = _READ_COUNT
        while True:
            try:
                result = _blocking(read)
            except RecordDamaged as error:
                # Those before it are read first, then it is stepped over.
                count = error.next_queue_offset - 1 - offset
                if count <= 0:
                    log_lines.error("duplicates: a key may be missing: %s", error)
                    offset, count = offset + 1, _READ_COUNT
                continue
            count = _READ_COUNT
            is_over = result.next_offset <= offset or result.next_offset >= result.max_offset
            if result.status is not ReadStatus.FOUND and is_over:
                return
            yield from map(records.decode, result.messages)
            offset = result.next_offset

    def _source(self, entry: records.Entry) -> records.Entry | None:
        """What a producer sent: the entry itself, or the one that waited and became this one.

        None where the broker made it from something else: a dead letter that was sent again.
        """
        store = self._core.store
        for _ in range(_ORIGINS_MAX):
            origin = entry.prepared_offset
            if not origin:
                return entry
            try:
                found = _blocking(lambda: store.entry_at(origin))  # noqa: B023
            except RecordDamaged:
                found = None
            if found is None:
                return entry  # retention took it; it is younger than that, but it is what there is
            source = records.decode(found)
            if source.topic not in _WAITING_TOPICS:
                return None
            entry = source
        return entry

    def _is_open(self, half: records.Entry) -> bool:
        return self._core.transactions.table.is_open(half.queue_offset)

    def _first(self, entry: records.Entry, queue_id: int) -> First:
        unique = records.property_value(entry.properties, b"UNIQ_KEY") or b""
        handle = ""
        if entry.topic == TIMER_TOPIC:
            name = self._core.config.broker_name
            message = Message(entry.topic, 0, b"", entry.properties)
            handle = handle_of(message, name, unique.decode("utf-8", "replace"))
        return First(entry.position, entry.queue_offset, entry.store_ms, queue_id, unique, handle)


def window_ms(settings: TopicSettings) -> int:
    """How long keys of a topic are remembered; 0 where they are not."""
    return int(settings.attributes.get(DEDUP_WINDOW, 0)) if settings.attributes else 0


def key_of(properties: bytes, keys: bytes | None = None) -> bytes:
    """The business key of a message, empty where it has none; `keys` is its KEYS if known."""
    key = records.property_value(properties, KEY_NAME) if KEY_NAME in properties else None
    if not key:
        key = records.property_value(properties, b"KEYS") if keys is None else keys
    if not key:
        return b""
    return key if len(key) <= _KEY_BYTES_MAX else blake2b(key, digest_size=_DIGEST_BYTES).digest()


def _unpack(place: bytes) -> First:
    position, queue_offset, store_ms, queue_id = _PLACE.unpack_from(place)
    unique, _, handle = place[_PLACE.size :].partition(b"\0")
    return First(position, queue_offset, store_ms, queue_id, unique, handle.decode())


def _sent_to(properties: bytes) -> tuple[str, int]:
    """Topic and queue that a waiting message was sent to."""
    topic = records.property_value(properties, b"REAL_TOPIC") or b""
    queue = records.property_value(properties, b"REAL_QID") or b""
    return topic.decode("utf-8", "replace"), int(queue) if queue.isdigit() else 0


def _blocking(ask: Callable[[], T]) -> T:
    """Ask the store, and wait for the disk where it has to be asked."""
    while True:
        try:
            return ask()
        except ColdRead as cold:
            cold.work()
