"""This module makes the stores whose bits are flipped, and asks them everything that can be asked.

An answer is right, or it is an error that names a file and a byte. `Answers` is what an intact
store says; `judge` compares a store with it, answer by answer: wrong bytes, a wrong queue or
offset, a message that was never stored, a setting that was never made are all failures, and so is
"there is none" for what is there.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import cache, partial
from multiprocessing import get_context
from random import Random
from typing import Any, TypeVar

from sluice.config import StoreConfig
from sluice.errors import RecordDamaged, StoreCorrupt
from sluice.model import LOOPBACK_HOST, Message, Placed, QueueKey
from sluice.storage.memory_files import KeepAll, MemoryFiles
from sluice.storage.opening import open_store
from sluice.storage.state import GROUP_TABLE, OFFSET_TABLE, TOPIC_TABLE
from sluice.storage.store import Store
from tests.property.store_driver import (
    BATCH_TOPIC,
    LONG_TOPIC,
    QUEUES,
    ROOT,
    START_MS,
    Driver,
    Pieces,
    small_config,
)
from tests.property.store_model import patiently, read_queue

T = TypeVar("T")
P = TypeVar("P")

DAMAGE = (RecordDamaged, StoreCorrupt)
BITS = (1, 2, 4, 8, 16, 32, 64, 128)


def spread(work: Callable[[P], T], parts: Sequence[P]) -> list[T]:
    """Do the parts on all processors; a part that fails fails the test."""
    count = min(os.cpu_count() or 1, len(parts))
    # A line for each damage would be a million lines, and pytest would keep them.
    quiet = partial(logging.disable, logging.CRITICAL)
    with ProcessPoolExecutor(count, get_context("fork"), initializer=quiet) as pool:
        return list(pool.map(work, parts))


# ------------------------------------------------------------------------------------------- stores


class FlipDriver(Driver):
    """Keeps what was put where; only some messages have keys, so that the key index stays small."""

    def __init__(self, config: StoreConfig, keyed_every: int) -> None:
        self.keyed_every = keyed_every
        self.placed: list[tuple[QueueKey, Placed, tuple[str, ...]]] = []
        super().__init__(config)

    def message(
        self, queue: QueueKey, random: Random, size: int
    ) -> tuple[Message, tuple[str, ...]]:
        message, keys = super().message(queue, random, size)
        if self.serial % self.keyed_every:
            names = (b"UNIQ_KEY\x01", b"KEYS\x01", *([b"TAGS\x01"] if self.serial % 3 else []))
            parts = [p for p in message.properties.split(b"\x02") if p and not p.startswith(names)]
            message.properties = b"".join(part + b"\x02" for part in parts)
            keys = ()
        return message, keys

    def item(self, message: Message, placed: Placed, keys: tuple[str, ...]) -> Any:
        self.placed.append((QueueKey(message.topic, message.queue_id), placed, keys))
        return super().item(message, placed, keys)


@dataclass(slots=True)
class FlipStore:
    """A store as it lies on the disk, and what it says when nothing is wrong with it."""

    config: StoreConfig
    files: MemoryFiles
    log_end: int
    placed: list[tuple[QueueKey, Placed, tuple[str, ...]]]
    answers: dict[Any, Any]

    def paths(self, directory: str = ROOT) -> Iterator[str]:
        for name in self.files.names(directory):
            path = f"{directory}/{name}"
            if self.files.is_directory(path):
                yield from self.paths(path)
            else:
                yield path

    def log_place(self, position: int) -> tuple[str, int]:
        at = position % self.config.segment_bytes
        return f"{ROOT}/commitlog/{position - at:020d}", at


def make_store(
    config: StoreConfig,
    queues: Sequence[QueueKey],
    sizes: Sequence[int],
    *,
    log_bytes: int,
    keyed_every: int,
    closed: bool,
) -> FlipStore:
    """A store with entries of all layouts; killed with some of them after its last checkpoint."""
    random = Random(5)
    driver = FlipDriver(config, keyed_every)
    driver.change(GROUP_TABLE, "g", {"n": 1})
    number = 0
    while driver.store.log.written < log_bytes:
        driver.put(queues[number % len(queues)], random, random.choice(sizes))
        number += 1
        if number % 100 == 0:
            driver.change(GROUP_TABLE, f"g{number}", {"n": number})
            driver.commit("g", queues[0], number)
            driver.tick(5_000)
        driver.now_ms += 700
        driver.settle()
    driver.commit("g", queues[0], 1)
    driver.tick(5_000)
    driver.settle()
    driver.checkpoint()
    driver.settle()
    driver.put(queues[0], random, sizes[0])
    driver.change(GROUP_TABLE, "after", {"n": 2})
    driver.settle()
    log_end = driver.store.log.written
    if closed:
        driver.shut()
    store = FlipStore(config, driver.files.crash(KeepAll()), log_end, driver.placed, {})
    opened = open_flipped(config, store.files.crash(KeepAll()))
    store.answers = dict(ask(opened, store.placed))
    served = [each for question, each in store.answers.items() if question[0] == "entry"]
    assert len(served) == len(driver.placed)
    assert None not in served
    return store


TINY = small_config(key_index_slots=4, key_index_entries=16, queue_file_units=8)
TINY_QUEUES = (QueueKey("A", 0), QueueKey(LONG_TOPIC, 1), QueueKey(BATCH_TOPIC, 0))
LARGE = small_config(
    segment_bytes=1 << 18, queue_file_units=64, key_index_slots=16, key_index_entries=64
)
LARGE_LOG_BYTES = 1 << 20


@cache
def tiny_store(*, closed: bool) -> FlipStore:
    """So small that it can be opened and read for every bit of it."""
    return make_store(TINY, TINY_QUEUES, (0, 20), log_bytes=900, keyed_every=2, closed=closed)


@cache
def large_store(*, closed: bool) -> FlipStore:
    """A log of 1 MiB in several files, seven queues of both kinds, all layouts of entries."""
    sizes = (0, 100, 500, 2000)
    log_bytes = LARGE_LOG_BYTES + 10 * max(sizes)  # the ends of the log's files are no entries
    return make_store(LARGE, QUEUES, sizes, log_bytes=log_bytes, keyed_every=16, closed=closed)


def open_flipped(config: StoreConfig, files: MemoryFiles) -> Store:
    """Open a store, and let it finish what it begins with."""
    store = open_store(config, files, Pieces(), lambda: START_MS, LOOPBACK_HOST)
    background = store.background
    assert isinstance(background, Pieces)
    background.run_all()
    for _ in range(10):
        if store.indexing.live or store.indexing.failure:
            break
        store.indexing.tick(START_MS, 0)
        background.run_all()
    return store


# ------------------------------------------------------------------------------------------ answers

Answer = tuple[tuple[Any, ...], Any]


def ask(
    store: Store,
    placed: Iterable[tuple[QueueKey, Placed, tuple[str, ...]]],
    *,
    deep: bool = True,
) -> Iterator[Answer]:
    """All that a reader can ask, each question with the answer or the damage that it met.

    Without `deep` only settings and queues: for damage in files that nothing else is read from.
    """
    for name in (TOPIC_TABLE, GROUP_TABLE, OFFSET_TABLE):
        yield ("table", name), {key: store.table(name)[key] for key in store.table(name)}
    for key in sorted({*store.queues, *(each[0] for each in placed)}):
        yield from ask_queue(store, QueueKey(*key))
    for queue, place, keys in placed if deep else ():
        yield (
            ("entry", place.position),
            answer(lambda: bytes_of(store.entry_at(place.position))),  # noqa: B023
        )
        yield (
            ("time", queue, place.queue_offset),
            answer(lambda: store.offset_for_time(*queue, place.store_ms)),  # noqa: B023
        )
        for each in keys:
            yield ("key", queue.topic, each), ask_key(store, queue.topic, each)


def ask_queue(store: Store, queue: QueueKey) -> Iterator[Answer]:
    yield ("range", queue), (
        answer(lambda: store.min_offset(*queue)), answer(lambda: store.max_offset(*queue)),
    )  # fmt: skip
    yield ("queue", queue), answer(lambda: read_queue(store, queue))


def answer(ask_it: Callable[[], Any]) -> Any:
    """What is said, or the damage."""
    try:
        return patiently(ask_it)
    except DAMAGE as damage:
        return damage


def bytes_of(entry: memoryview | None) -> bytes | None:
    return None if entry is None else bytes(entry)


def ask_key(store: Store, topic: str, key: str) -> Any:
    found: list[Any] = []

    def done(entries: list[memoryview] | None, error: BaseException | None) -> None:
        found.append(error if entries is None else [bytes(entry) for entry in entries])

    store.query_key(topic, key, done, count_max=1000)
    background = store.background
    assert isinstance(background, Pieces)
    background.run_all()
    return found[0]


def judge(expected: dict[Any, Any], found: Iterable[Answer], where: str) -> bool:
    """Fail where an answer is wrong; returns whether the damage was noticed."""
    noticed = False
    for question, said in found:
        right = expected.get(question)
        if isinstance(said, DAMAGE):
            assert said.path.startswith(ROOT), f"{where}: {said}"
            assert said.offset >= 0
            noticed = True
        elif question[0] == "time" and said != right:
            # The damaged entry has no time, so its neighbour may be found instead of it, or it
            # instead of its neighbour; reading the queue says that it is damaged.
            assert abs(said - right) == 1, f"{where}: {question} is {said}, not {right}"
        elif question[0] == "key" and said != right:
            # Some of those that share a key may be damaged; the others are still found.
            assert said, f"{where}: {question} is not found"
            assert [each for each in right or () if each in said] == said, f"{where}: {question}"
        else:
            assert said == right, f"{where}: the answer to {question} is wrong"
    return noticed
