"""Helpers of the key index's tests: Apache's way to write, messages to index, short calls."""

from __future__ import annotations

from itertools import pairwise
from struct import pack_into, unpack_from
from typing import NamedTuple

from hypothesis import strategies as st

from sluice.protocol.records import java_hash
from sluice.storage.files import Files
from sluice.storage.key_batches import KeyBatch
from sluice.storage.key_index import IndexMark, KeyIndex
from sluice.storage.memory_files import MemoryFiles

ROOT = "/store"
DIRECTORY = f"{ROOT}/index"
ASIDE = f"{ROOT}/sluice/foreign-index"
TOPIC = b"LabTopic"
SLOTS = 7
ENTRIES_MAX = 12
BEGIN_MS = 1_794_772_393_000
FOREVER_MS = 1 << 60


class Sent(NamedTuple):
    """A message as far as the index sees it."""

    position: int
    store_ms: int
    keys: tuple[bytes, ...]

    @property
    def size_bytes(self) -> int:
        return 100

    @property
    def properties(self) -> bytes:
        return b"KEYS\x01%b\x02" % b" ".join(self.keys) if self.keys else b"a\x01b\x02"


# ---------------------------------------------------------------------------------------- reference


class Reference:
    """Index files as Apache's putKey makes them: one key at a time, nothing clever."""

    def __init__(self, slots: int = SLOTS, entries_max: int = ENTRIES_MAX) -> None:
        self.slots = slots
        self.entries_max = entries_max
        self.files: list[bytearray] = []

    def put(self, key: bytes, position: int, store_ms: int) -> None:
        if not self.files or unpack_from(">i", self.files[-1], 36)[0] >= self.entries_max:
            self._roll()
        file = self.files[-1]
        begin_ms, _, begin_position, _, used_slots, count = unpack_from(">qqqqii", file, 0)
        key_hash = abs(java_hash(key))
        key_hash = 0 if key_hash == 1 << 31 else key_hash
        slot_at = 40 + key_hash % self.slots * 4
        (head,) = unpack_from(">i", file, slot_at)
        seconds = 0
        if begin_ms > 0:
            seconds = min(max((store_ms - begin_ms) // 1000, 0), (1 << 31) - 1)
        entry_at = 40 + self.slots * 4 + count * 20
        pack_into(">iqii", file, entry_at, key_hash, position, seconds, head)
        pack_into(">i", file, slot_at, count)
        if count == 1:
            begin_ms, begin_position = store_ms, position
        used_slots += head == 0
        header = (begin_ms, store_ms, begin_position, position, used_slots, count + 1)
        pack_into(">qqqqii", file, 0, *header)

    def _roll(self) -> None:
        file = bytearray(40 + self.slots * 4 + self.entries_max * 20)
        pack_into(">i", file, 36, 1)
        if self.files:
            _, end_ms, _, end_position = unpack_from(">qqqq", self.files[-1], 0)
            pack_into(">qqqq", file, 0, end_ms, end_ms, end_position, end_position)
        self.files.append(file)

    def put_all(self, messages: list[Sent]) -> Reference:
        for message in messages:
            for key in message.keys:
                self.put(TOPIC + b"#" + key, message.position, message.store_ms)
        return self


def expected(messages: list[Sent], key: bytes) -> list[int]:
    """What a query for `key` must find, when it has the tests' few keys without a shared hash."""
    return [message.position for message in reversed(messages) if key in message.keys]


# ------------------------------------------------------------------------------------------ helpers


def open_index(
    files: Files,
    *,
    directory: str = DIRECTORY,
    slots: int = SLOTS,
    entries_max: int = ENTRIES_MAX,
    now_ms: int = BEGIN_MS,
) -> KeyIndex:
    return KeyIndex(files, directory, slots=slots, entries_max=entries_max, now_ms=lambda: now_ms)


def batch_of(messages: list[Sent], *, with_sizes: bool = True) -> KeyBatch:
    batch = KeyBatch()
    for message in messages:
        size_bytes = message.size_bytes if with_sizes else 0
        batch.add(TOPIC, message.properties, message.position, message.store_ms, size_bytes)
    return batch


def find(index: KeyIndex, key: bytes, max_count: int = 1000) -> list[int]:
    return index.query(TOPIC, key, 0, FOREVER_MS, max_count)


def contents(files: Files) -> list[bytes]:
    return [files.read(f"{DIRECTORY}/{name}", 1 << 24) for name in files.names(DIRECTORY)]


def numbered(key_count: int, *, start: int = 0) -> list[Sent]:
    return [
        Sent(number * 100, BEGIN_MS + number * 700, (b"k%d" % number,))
        for number in range(start, start + key_count)
    ]


def store_with(messages: list[Sent]) -> tuple[MemoryFiles, list[IndexMark]]:
    """A disk with an index of these messages, synced and closed."""
    files = MemoryFiles()
    index = open_index(files)
    index.load([], clean=True)
    index.write(batch_of(messages))
    marks = index.sync()
    index.close()
    return files, marks


KEYS = [b"a", b"bb", b"key1", b"key2", "ключ".encode(), "中文".encode(), b"k" * 40, b"\xff\x80x"]


@st.composite
def message_lists(draw: st.DrawFn) -> list[Sent]:
    messages = []
    position = draw(st.sampled_from([0, 5000]))
    store_ms = BEGIN_MS
    for _ in range(draw(st.integers(1, 20))):
        keys = draw(st.lists(st.sampled_from(KEYS), max_size=4, unique=True))
        messages.append(Sent(position, store_ms, tuple(keys)))
        position += 100
        # Clocks also go back.
        store_ms += draw(st.sampled_from([0, 1, 999, 1000, 3_600_000, -5000]))
    return messages


@st.composite
def split(draw: st.DrawFn, messages: list[Sent]) -> list[list[Sent]]:
    cuts = draw(st.sets(st.integers(1, len(messages)), max_size=6))
    bounds = [0, *sorted(cuts), len(messages)]
    return [messages[low:high] for low, high in pairwise(bounds)]
