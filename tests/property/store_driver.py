"""This module drives a store on a simulated disk, and keeps the model in step with it.

A `Driver` does one thing at a time, as small as the store allows: stage, write, one piece of
background work, the delivery of its result. In between, `crash` takes the disk away under any
policy. Both the state machine and the crash tests are made of it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from random import Random
from typing import Any, TypeVar

from sluice.config import StoreConfig
from sluice.errors import SluiceError
from sluice.model import LOOPBACK_HOST, Message, Placed, QueueKey
from sluice.protocol import records
from sluice.storage.background import Done
from sluice.storage.memory_files import KeepPolicy, MemoryFiles
from sluice.storage.opening import open_store
from sluice.storage.state import GROUP_TABLE, TOPIC_TABLE
from sluice.storage.store import Store
from tests.property.store_model import (
    Contents,
    Item,
    Model,
    Promise,
    check,
    check_keys,
    check_no_keys,
)

T = TypeVar("T")

ROOT = "store"
START_MS = 1_700_000_000_000
LONG_TOPIC = "L" * 130
BATCH_TOPIC = "BATCH"
DELAY_TOPIC = "SCHEDULE_TOPIC_" + "X" * 4
QUEUES = (
    QueueKey("A", 0),
    QueueKey("A", 1),
    QueueKey("B", 3),
    QueueKey(LONG_TOPIC, 0),
    QueueKey(DELAY_TOPIC, 2),
    QueueKey(BATCH_TOPIC, 0),
    QueueKey(BATCH_TOPIC, 1),
)
V6_HOST = bytes(range(16)) + b"\x00\x00\x01\xbb"
# What can be made again from the log.
DERIVED = ("consumequeue", "batchconsumequeue", "index", "config", "sluice", "checkpoint")


def small_config(**settings: Any) -> StoreConfig:
    """Everything small, so that little work reaches every border; retention only when asked."""
    values: dict[str, Any] = {
        "directory": ROOT,
        "segment_bytes": 4096,
        "queue_file_units": 16,
        "key_index_slots": 16,
        "key_index_entries": 64,
        "retention_hours": 24 * 36_500,
        "disk_clean_ratio": 1.0,
        "disk_force_ratio": 1.0,
        "disk_refuse_ratio": 1.0,
        "delay_levels": "1s 5s 10s",
    }
    return StoreConfig(**{**values, **settings})


class Pieces:
    """A background in the smallest steps: `work` runs one piece, `deliver` gives its result."""

    def __init__(self) -> None:
        self.waiting: dict[str, deque[tuple[Callable[[], Any], Done[Any]]]] = {}
        self.finished: dict[str, deque[Callable[[], None]]] = {}

    def submit(self, lane: str, work: Callable[[], T], done: Done[T]) -> None:
        self.waiting.setdefault(lane, deque()).append((work, done))

    def work(self, lane: str) -> bool:
        if not self.waiting.get(lane):
            return False
        work, done = self.waiting[lane].popleft()
        finished = self.finished.setdefault(lane, deque())
        try:
            result = work()
        except (OSError, SluiceError) as error:
            failure = error
            finished.append(lambda: done(None, failure))
        else:
            finished.append(lambda: done(result, None))
        return True

    def deliver(self, lane: str) -> bool:
        if not self.finished.get(lane):
            return False
        self.finished[lane].popleft()()
        return True

    def step(self, lane: str) -> bool:
        return self.work(lane) or self.deliver(lane)

    @property
    def idle(self) -> bool:
        return not any(self.waiting.values()) and not any(self.finished.values())

    def run_all(self) -> None:
        while not self.idle:
            for lane in list(self.waiting):
                self.work(lane)
                self.deliver(lane)

    def close(self) -> None:
        self.run_all()


class Driver:
    """A store, its disk, its clock and the model of what it promised."""

    def __init__(
        self,
        config: StoreConfig,
        files: MemoryFiles | None = None,
        promise: Promise | None = None,
        serial: int = 0,
    ) -> None:
        self.config = config
        self.files = files if files is not None else MemoryFiles()
        self.model = Model() if promise is None else Model.after(promise)
        self.now_ms = START_MS
        self.serial = serial  # bodies are numbered: no two are equal
        self.background = Pieces()
        self.store: Store
        if promise is not None:
            self.reopen(promise)
            return
        self.open()
        self.change(TOPIC_TABLE, BATCH_TOPIC, {"attributes": {"queue.type": "BatchCQ"}})
        self.settle()

    # ---------------------------------------------------------------------------- opening, crashing

    def open(self) -> None:
        self.background = Pieces()
        self.store = open_store(
            self.config, self.files, self.background, lambda: self.now_ms, LOOPBACK_HOST
        )
        housekeeping = self.store.housekeeping
        delete_before = housekeeping.delete_before

        def noted(position: int, done: Callable[[], None] | None = None) -> None:
            self.model.deleted_before = max(self.model.deleted_before, position)
            delete_before(position, done)

        housekeeping.delete_before = noted  # type: ignore[method-assign]

    def crash(self, policy: KeepPolicy) -> Contents:
        """Lose the process, or the power; open what is left, compare it with what was promised."""
        promise = self.promise()
        self.files = self.files.crash(policy)
        return self.reopen(promise)

    def reopen(self, promise: Promise) -> Contents:
        self.open()
        found = check(self.store, promise)
        self.model.recovered(self.store, found)
        return found

    def promise(self) -> Promise:
        promise = self.model.promise(self.store)
        if self.config.flush == "async":
            promise.acked_end = min(promise.acked_end, self.store.flusher.flushed)
        return promise

    def shut(self) -> None:
        """Close in order."""
        answers: list[SluiceError | None] = []
        self.store.shut(answers.append)
        self.background.run_all()
        assert len(answers) == 1

    # ------------------------------------------------------------------------------------ appending

    def message(
        self, queue: QueueKey, random: Random, size: int
    ) -> tuple[Message, tuple[str, ...]]:
        self.serial += 1
        body = b"%d:" % self.serial + random.randbytes(size)
        keys: tuple[str, ...] = ()
        properties = {"UNIQ_KEY": f"u{self.serial}"}
        if random.random() < 0.5:
            properties["KEYS"] = f"k{self.serial} k{self.serial % 5}"
            keys = (f"k{self.serial}", f"k{self.serial % 5}")
        if random.random() < 0.5:
            properties["TAGS"] = f"t{self.serial % 3}"
        sys_flag, count = 0, 1
        if queue.topic == DELAY_TOPIC:
            properties["DELAY"] = str(queue.queue_id + 1)
        # Without the whole-message checksum a torn count of offsets cannot be noticed.
        counts_batches = self.store.state.counts_batches(queue.topic)
        if counts_batches and self.config.message_crc and random.random() < 0.7:
            count = random.choice((1, 2, 3, 7, 40_000))
            sys_flag = records.SYS_NEED_UNWRAP | records.SYS_INNER_BATCH
            properties["INNER_NUM"] = str(count)
        host = V6_HOST if random.random() < 0.2 else LOOPBACK_HOST
        text = records.format_properties(properties)
        if random.random() < 0.2:
            text = text[:-1]  # a producer may leave the last separator out
        message = Message(
            queue.topic, queue.queue_id, body, text, sys_flag=sys_flag, count=count,
            born_ms=self.now_ms, born_host=host, flag=self.serial,
        )  # fmt: skip
        return message, (properties["UNIQ_KEY"], *keys)

    def item(self, message: Message, placed: Placed, keys: tuple[str, ...]) -> Item:
        stored = message
        if message.sys_flag & records.SYS_INNER_BATCH:
            parts = records.parse_properties(message.properties)
            parts["INNER_BASE"] = str(placed.queue_offset)
            stored = Message(
                message.topic, message.queue_id, message.body, records.format_properties(parts),
                sys_flag=message.sys_flag, count=message.count, born_ms=message.born_ms,
                born_host=message.born_host, flag=message.flag,
            )  # fmt: skip
        raw = self.store.encoder.encode(
            stored, message.topic.encode(), placed.size,
            placed.queue_offset, placed.position, placed.store_ms,
        )  # fmt: skip
        return Item(QueueKey(message.topic, message.queue_id), message, placed, raw, keys)

    def put(self, queue: QueueKey, random: Random, size: int) -> bool:
        """Stage one message; False where the store refuses."""
        message, keys = self.message(queue, random, size)
        group: list[Item] = []
        try:
            placed = self.store.stage(message, lambda error: self._answered(group, error))
        except SluiceError:
            return False
        group.append(self.item(message, placed, keys))
        self.model.staged(group[0])
        return True

    def put_batch(self, queues: list[QueueKey], random: Random, size: int) -> bool:
        made = [self.message(queue, random, size) for queue in queues]
        group: list[Item] = []
        try:
            places = self.store.stage_batch(
                [message for message, _ in made], lambda error: self._answered(group, error)
            )
        except SluiceError:
            return False
        for (message, keys), placed in zip(made, places, strict=True):
            group.append(self.item(message, placed, keys))
            self.model.staged(group[-1])
        return True

    def _answered(self, group: list[Item], error: SluiceError | None) -> None:
        self.model.answered(group[-1], group, error)

    def write(self) -> None:
        self.store.write_staged()

    def change(self, table: str, key: str, value: Any) -> bool:
        done = self.model.changing(table, key, value)
        try:
            self.store.change([(table, key, value)], done)
        except SluiceError as error:
            done(error)
            return False
        return True

    def delete_topic(self, topic: str) -> bool:
        """Delete a topic; one whose queues count batches is made again at once."""
        store = self.store
        done = self.model.deleting(topic, store.log.end)
        settled = [done]
        if (TOPIC_TABLE, topic) in self.model.settings:
            settled.append(self.model.changing(TOPIC_TABLE, topic, None))

        def told(error: SluiceError | None) -> None:
            for each in settled:
                each(error)

        try:
            store.delete_topic(topic, told)
        except SluiceError as error:
            told(error)
            return False
        if topic == BATCH_TOPIC:
            self.change(TOPIC_TABLE, topic, {"attributes": {"queue.type": "BatchCQ"}})
        return True

    def commit(self, group: str, queue: QueueKey, offset: int) -> None:
        later = self.model.later_positions.setdefault(f"{queue.topic}@{group}", {})
        later.setdefault(str(queue.queue_id), set()).add(offset)
        self.store.commit_offset(group, *queue, offset)

    # ----------------------------------------------------------------------------------- time, rest

    def settle(self) -> None:
        """Write and flush everything, and let the background come to rest."""
        self.write()
        self.background.run_all()

    def tick(self, advance_ms: int) -> None:
        self.now_ms += advance_ms
        self.store.tick()

    def checkpoint(self) -> None:
        self.store.housekeeping.checkpoint()

    def delete_some(self, fraction: float) -> None:
        """Retention of some of the closed files."""
        if self.store.housekeeping._deleting:
            return
        bases = list(self.store.log.segments)
        self.store.housekeeping.delete_before(bases[int(fraction * (len(bases) - 1))])

    def check(self) -> Contents:
        found = check(self.store, self.promise())
        if self.config.flush == "sync":
            served = {raw for _, _, entries in found.values() for raw in entries}
            for item in self.model.items:
                is_durable = item.placed.end <= self.store.flusher.flushed
                assert is_durable or item.raw not in served, "served before it is durable"
        return found

    def check_keys(self) -> None:
        """Let the key index catch up, then look for everything that can be read."""
        for _ in range(100):
            if self.store.indexing.live or self.store.indexing.failure:
                break
            self.tick(0)
            self.background.run_all()
        self.store.indexing.hand_over()
        self.background.run_all()
        if self.store.indexing.failure:
            return  # the disk is full, or was made to fail
        found = {raw for _, _, entries in self.check().values() for raw in entries}
        check_keys(self.store, [item for item in self.model.items if item.raw in found])
        check_no_keys(self.store, self.model.gone)

    def delete_derived(self, names: list[str]) -> None:
        """Remove what can be made again from the log; only while the store is not open."""
        for name in names:
            remove_tree(self.files, f"{ROOT}/{name}")

    def random_step(self, random: Random) -> None:
        """Do any one thing."""
        choice = random.random()
        if choice < 0.35:
            self.put(random.choice(QUEUES), random, random.choice((0, 1, 30, 200, 900)))
        elif choice < 0.40:
            queues = random.choices(QUEUES, k=random.randrange(1, 6))
            self.put_batch(queues, random, random.choice((1, 60)))
        elif choice < 0.55:
            self.write()
        elif choice < 0.80:
            lanes = list(self.background.waiting)
            if lanes:
                self.background.step(random.choice(lanes))
        elif choice < 0.85:
            self.tick(random.choice((1, 100, 1000, 20_000)))
        elif choice < 0.88:
            self.checkpoint()
        elif choice < 0.92:
            self.change(GROUP_TABLE, f"g{random.randrange(3)}", {"n": self.serial, "x": "y" * 40})
        elif choice < 0.96:
            self.commit(f"g{random.randrange(2)}", random.choice(QUEUES), random.randrange(1000))
        elif choice < 0.98:
            self.delete_topic(random.choice(QUEUES).topic)
        else:
            self.delete_some(random.random())
        self.bound_unsynced()

    def bound_unsynced(self) -> None:
        """More than two files of which nothing is synced cannot be told from damage."""
        store = self.store
        reach = store.flusher.flushed // store.log.segment_bytes + 1
        if store.log._end // store.log.segment_bytes >= reach:
            self.write()
            store.flusher.flush_to(store.log.written)
            while self.background.step("flush"):
                pass


def remove_tree(files: MemoryFiles, path: str) -> None:
    """Remove a file, or everything in a directory, durably."""
    if files.is_directory(path):
        for name in files.names(path):
            remove_tree(files, f"{path}/{name}")
        files.sync_directory(path)
    elif files.exists(path):
        files.remove(path)
        files.sync_directory(path.rpartition("/")[0])
