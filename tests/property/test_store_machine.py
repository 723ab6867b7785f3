"""This module does anything to a store in any order, and compares every answer with the model.

Hypothesis chooses: appends, writes, single steps of the background, timers, settings, retention,
reads, full disks, failing calls, crashes of every kind, clean closes, lost index files. What it
finds it makes small.
"""

from __future__ import annotations

import errno
import logging
from collections.abc import Iterator
from random import Random

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from sluice.errors import StoreReadOnly
from sluice.model import QueueKey
from sluice.protocol import records
from sluice.storage.memory_files import KeepAll, KeepNothing, KeepPolicy, KeepPrefix, KeepRandom
from sluice.storage.reads import ReadStatus
from sluice.storage.state import GROUP_TABLE
from tests.property.store_driver import DERIVED, QUEUES, Driver, small_config
from tests.property.store_model import Item, patiently

SEEDS = st.integers(0, 1 << 32)
SIZES = st.sampled_from((0, 1, 40, 200, 900, 2500))
QUEUE = st.sampled_from(QUEUES)
LANES = st.sampled_from(("flush", "disk", "cold0"))
# Reading is not disturbed here: what a read does about a failing disk is its caller's to see.
FAILING = st.sampled_from(
    ("pwritev", "sync", "create", "replace", "remove", "sync_directory", "sync_many", "resize")
)
BLOCK_BYTES = 4096


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """What goes wrong here goes wrong on purpose: nobody wants to read of it."""
    logger = logging.getLogger("sluice.storage")
    logger.disabled = True
    yield
    logger.disabled = False


class StoreMachine(RuleBasedStateMachine):
    """A store on a simulated disk."""

    driver: Driver

    @initialize(
        crc=st.booleans(),
        flush=st.sampled_from(("sync", "sync", "async")),
        segment_bytes=st.sampled_from((4096, 8192, 16384)),
    )
    def start(self, crc: bool, flush: str, segment_bytes: int) -> None:
        self.driver = Driver(
            small_config(message_crc=crc, flush=flush, segment_bytes=segment_bytes)
        )

    # ---------------------------------------------------------------------------------- appending

    @rule(queue=QUEUE, seed=SEEDS, size=SIZES)
    def put(self, queue: QueueKey, seed: int, size: int) -> None:
        if not self.driver.put(queue, Random(seed), size):
            assert self.is_disturbed, "refused although nothing is wrong"
        self.driver.bound_unsynced()

    @rule(queues=st.lists(QUEUE, min_size=1, max_size=5), seed=SEEDS, size=st.integers(0, 100))
    def put_batch(self, queues: list[QueueKey], seed: int, size: int) -> None:
        if not self.driver.put_batch(queues, Random(seed), size):
            assert self.is_disturbed, "refused although nothing is wrong"
        self.driver.bound_unsynced()

    @rule()
    def write(self) -> None:
        self.driver.write()
        self.driver.bound_unsynced()

    @rule(key=st.sampled_from(("g0", "g1")), remove=st.booleans())
    def change(self, key: str, remove: bool) -> None:
        driver = self.driver
        driver.change(GROUP_TABLE, key, None if remove else {"serial": driver.serial})
        driver.bound_unsynced()

    @rule(group=st.sampled_from(("g0", "g1")), queue=QUEUE, offset=st.integers(0, 1000))
    def commit(self, group: str, queue: QueueKey, offset: int) -> None:
        self.driver.commit(group, queue, offset)
        assert self.driver.store.committed_offset(group, *queue) == offset

    @rule(topic=st.sampled_from(sorted({queue.topic for queue in QUEUES})))
    def delete_topic(self, topic: str) -> None:
        driver = self.driver
        if driver.delete_topic(topic):
            for queue in QUEUES:
                if queue.topic == topic:
                    assert driver.store.max_offset(*queue) == 0, "the name is not free"
        driver.bound_unsynced()

    # ------------------------------------------------------------------------------ time and steps

    @rule(lane=LANES)
    def work(self, lane: str) -> None:
        self.driver.background.work(lane)

    @rule(lane=LANES)
    def deliver(self, lane: str) -> None:
        self.driver.background.deliver(lane)

    @rule()
    def settle(self) -> None:
        self.driver.settle()

    @rule(advance_ms=st.sampled_from((0, 1, 999, 20_000)))
    def tick(self, advance_ms: int) -> None:
        self.driver.tick(advance_ms)
        self.driver.bound_unsynced()

    @rule()
    def checkpoint(self) -> None:
        self.driver.checkpoint()

    @rule(fraction=st.floats(0, 1))
    def delete_before(self, fraction: float) -> None:
        self.driver.delete_some(fraction)

    # ----------------------------------------------------------------------------------- disturbing

    @property
    def is_disturbed(self) -> bool:
        files = self.driver.files
        return (
            bool(files._faults or files._tears)
            or files.capacity_bytes is not None
            or self.driver.store.refusal is not None
            or self.failed_calls > 0
        )

    failed_calls = 0

    @rule(operation=FAILING, nth=st.integers(1, 4), full=st.booleans())
    def fail(self, operation: str, nth: int, full: bool) -> None:
        self.failed_calls += 1
        self.driver.files.fail(operation, nth=nth, error=errno.ENOSPC if full else errno.EIO)

    @rule(nth=st.integers(1, 4), keep_bytes=st.integers(0, 500))
    def tear(self, nth: int, keep_bytes: int) -> None:
        self.failed_calls += 1
        self.driver.files.tear(nth, keep_bytes)

    @rule(room=st.integers(0, 3))
    def fill_disk(self, room: int) -> None:
        files = self.driver.files
        files.capacity_bytes = files._used_blocks() * BLOCK_BYTES + room * BLOCK_BYTES

    @rule()
    def make_room(self) -> None:
        self.driver.files.capacity_bytes = None

    # ------------------------------------------------------------------------------------- crashing

    @rule(policy=st.integers(0, 3), seed=SEEDS, lost=st.sets(st.sampled_from(DERIVED)))
    def crash(self, policy: int, seed: int, lost: set[str]) -> None:
        """Lose the process or the power, perhaps derived files too; recover, twice."""
        driver = self.driver
        promise = driver.promise()
        driver.files = driver.files.crash(self.policy(policy, seed))
        driver.files.capacity_bytes = None
        self.failed_calls = 0
        driver.delete_derived(sorted(lost))
        found = driver.reopen(promise)
        assert driver.crash(KeepAll()) == found, "a second recovery comes to another end"

    def policy(self, number: int, seed: int) -> KeepPolicy:
        prefix = seed % (self.driver.files.unsynced_bytes() + 1)
        choices = (KeepNothing(), KeepAll(), KeepPrefix(prefix), KeepRandom(Random(seed)))
        return choices[number]

    @rule()
    def close_and_open(self) -> None:
        """Close in order: everything that was staged is answered, and is there."""
        driver = self.driver
        driver.shut()
        assert all(values[1:] == [] for values in driver.model.settings.values()) or (
            self.is_disturbed
        ), "a change was not answered"
        driver.files.capacity_bytes = None
        driver.crash(KeepAll())
        self.failed_calls = 0

    # -------------------------------------------------------------------------------------- reading

    @rule()
    def check(self) -> None:
        self.driver.check()

    @precondition(lambda self: self.failed_calls == 0)
    @rule()
    def check_keys(self) -> None:
        self.driver.check_keys()

    def visible(self, queue: QueueKey) -> list[Item]:
        """The items of a queue that can be read, in order."""
        raws = set(self.driver.check().get(queue, (0, 0, []))[2])
        return [item for item in self.driver.model.items if item.raw in raws]

    @rule(
        queue=QUEUE,
        at=st.integers(-1, 50),
        count_max=st.integers(1, 10),
        bytes_max=st.sampled_from((0, 300, 1500, 1 << 20)),
        tag=st.sampled_from((None, "t0", "t1")),
    )
    def read(
        self, queue: QueueKey, at: int, count_max: int, bytes_max: int, tag: str | None
    ) -> None:
        store = self.driver.store
        items = self.visible(queue)
        code = records.java_hash(tag.encode()) if tag is not None else 0
        accept = None if tag is None or queue.topic.startswith("SCHED") else code.__eq__
        result = patiently(
            lambda: store.read(*queue, at, count_max=count_max, bytes_max=bytes_max, accept=accept)
        )
        low, high = store.min_offset(*queue), patiently(lambda: store.max_offset(*queue))
        if not low <= at < high:
            assert not result.count
            assert result.status not in (ReadStatus.FOUND, ReadStatus.NO_MATCHED_MESSAGE)
            return
        expected: list[bytes] = []
        next_offset = at
        for item in items:
            after = item.placed.queue_offset + item.message.count
            if after <= at:
                continue
            if accept is None or tag == tag_of(item):
                size = sum(map(len, expected)) + len(item.raw)
                if expected and (size > bytes_max or len(expected) == count_max):
                    break
                expected.append(item.raw)
            next_offset = after
        assert [bytes(message) for message in result.messages] == expected
        assert result.next_offset == next_offset
        assert (result.status is ReadStatus.FOUND) == bool(expected)

    @rule(queue=QUEUE, back_ms=st.integers(-2, 30_000), upper=st.booleans())
    def offset_for_time(self, queue: QueueKey, back_ms: int, upper: bool) -> None:
        """The binary search finds what a walk over all entries finds."""
        store, items = self.driver.store, self.visible(queue)
        when_ms = self.driver.now_ms - back_ms
        found = patiently(lambda: store.offset_for_time(*queue, when_ms, upper=upper))
        if not items:
            assert found == store.min_offset(*queue)
        elif upper:
            before = [item for item in items if item.placed.store_ms <= when_ms]
            assert found == (before[-1] if before else items[0]).placed.queue_offset
        else:
            after = [item for item in items if item.placed.store_ms >= when_ms]
            end = patiently(lambda: store.max_offset(*queue))
            assert found == (after[0].placed.queue_offset if after else end)

    @invariant()
    def failed_store_says_so(self) -> None:
        failure = self.driver.store.flusher.failure
        if failure is not None:
            assert isinstance(failure, StoreReadOnly)
            assert str(failure).startswith("read-only: ")

    def teardown(self) -> None:
        if hasattr(self, "driver"):
            self.driver.files.capacity_bytes = None
            self.driver.crash(KeepNothing())
            self.driver.settle()
            self.driver.check_keys()


def tag_of(item: Item) -> str | None:
    return records.parse_properties(item.message.properties).get("TAGS")


TestStore = StoreMachine.TestCase
TestStore.settings = settings(
    max_examples=250,
    stateful_step_count=60,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)
