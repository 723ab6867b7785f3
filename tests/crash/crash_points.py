"""This module takes crash states out of a running workload: at every operation on the disk, many.

The workload runs once and is never disturbed. Before each operation that changes the disk,
`CrashPoints` asks what would be left if the power went now: of the bytes that were not synced
nothing, everything, a prefix, or any torn mixture. Every such disk is opened and compared with what
was promised at that moment. Some of them live on: they lose what can be made again, take more
entries and crash once more; and some crash inside of the recovery, at each of its operations.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from random import Random

from sluice.config import StoreConfig
from sluice.model import LOOPBACK_HOST
from sluice.storage.memory_files import (
    KeepAll,
    KeepNothing,
    KeepPolicy,
    KeepPrefix,
    KeepRandom,
    MemoryFiles,
)
from sluice.storage.opening import open_store
from sluice.storage.store import Store
from tests.property.store_driver import DERIVED, QUEUES, START_MS, Driver, Pieces
from tests.property.store_model import Contents, Promise, check, contents

CHANGES = frozenset(
    {"pwritev", "sync", "create", "replace", "rename", "remove", "sync_directory", "sync_many",
     "resize"}
)  # fmt: skip

Policies = Callable[[MemoryFiles, Random], Iterator[KeepPolicy]]


# ---------------------------------------------------------------------------------------- policies


def nothing(files: MemoryFiles, random: Random) -> Iterator[KeepPolicy]:
    """A power cut that leaves only what was synced."""
    yield KeepNothing()


def everything(files: MemoryFiles, random: Random) -> Iterator[KeepPolicy]:
    """The process is killed, or the power cut came after the disk had written all of it."""
    yield KeepAll()
    yield KeepPrefix(files.unsynced_bytes())


def prefixes(files: MemoryFiles, random: Random) -> Iterator[KeepPolicy]:
    """The disk writes in order and stops at any byte: some of them, spread evenly."""
    bytes_max = files.unsynced_bytes() + 1
    count = min(bytes_max, 12)
    start = random.random()
    for number in range(count):
        yield KeepPrefix(int((number + start) * bytes_max / count))


def every_prefix(files: MemoryFiles, random: Random) -> Iterator[KeepPolicy]:
    """The disk writes in order and stops at any byte: all of them."""
    for count in range(files.unsynced_bytes() + 1):
        yield KeepPrefix(count)


def mixtures(files: MemoryFiles, random: Random) -> Iterator[KeepPolicy]:
    """The disk writes in no order; each write is kept, dropped, or torn."""
    for _ in range(8):
        yield KeepRandom(Random(random.getrandbits(64)))


POLICIES: dict[str, Policies] = {
    "nothing": nothing,
    "everything": everything,
    "prefixes": prefixes,
    "mixtures": mixtures,
}


# ------------------------------------------------------------------------------------------ states


def watch(files: MemoryFiles, visit: Callable[[], None]) -> None:
    """Call `visit` before each operation that changes this disk."""

    def call(operation: str, path: str) -> None:
        if operation in CHANGES:
            visit()
        MemoryFiles._call(files, operation, path)

    files._call = call  # type: ignore[method-assign]


def open_again(config: StoreConfig, files: MemoryFiles) -> Store:
    """Open a store whose background does nothing."""
    return open_store(config, files, Pieces(), lambda: START_MS, LOOPBACK_HOST)


class CrashPoints:
    """The crash states of one workload: makes, counts and checks them."""

    def __init__(self, driver: Driver, random: Random, policies: Policies) -> None:
        self.driver = driver
        self.random = random
        self.policies = policies
        self.state_count = 0
        watch(driver.files, self.visit)

    def visit(self) -> None:
        """The power goes now."""
        driver = self.driver
        promise = driver.promise()
        for policy in self.policies(driver.files, self.random):
            disk = driver.files.crash(policy)
            self.state_count += 1
            kind = self.state_count % 40
            if kind == 0:
                self._crash_inside_opening(disk, promise)
            elif kind in (10, 20, 30):
                self._live_on(disk, promise)
            else:
                check(open_again(driver.config, disk), promise)

    def _live_on(self, disk: MemoryFiles, promise: Promise) -> None:
        """Derived files are lost as well; after the recovery life goes on, and ends again."""
        random = self.random
        lost = [name for name in DERIVED if random.random() < 0.4]
        driver = Driver.__new__(Driver)
        driver.files = disk
        driver.delete_derived(lost)
        Driver.__init__(driver, self.driver.config, disk, promise, self.driver.serial)
        for _ in range(random.randrange(4)):
            driver.put(random.choice(QUEUES), random, random.randrange(200))
            driver.settle()
        driver.crash(KeepRandom(Random(random.getrandbits(64))))
        self.state_count += 1
        if driver.config.key_index:
            driver.check_keys()

    def _crash_inside_opening(self, disk: MemoryFiles, promise: Promise) -> None:
        """recover(recover(x)) = recover(x), wherever the first one was stopped."""
        config, random = self.driver.config, self.random
        found: list[MemoryFiles] = []

        def visit() -> None:
            found.append(disk.crash(KeepRandom(Random(random.getrandbits(64)))))
            if len(found) % 3 == 0:
                found.append(disk.crash(KeepAll()))

        all_durable = disk.unsynced_bytes() == 0
        watch(disk, visit)
        whole = check(open_again(config, disk), promise)
        visit()
        for once_more in found:
            self.state_count += 1
            again = check(open_again(config, once_more), promise)
            if all_durable:
                assert again == whole, "a recovery that was interrupted came to another end"

    def run_random(self, step_count: int) -> None:
        """A workload of random steps."""
        for _ in range(step_count):
            self.driver.random_step(self.random)
            self.visit()


def reopened(config: StoreConfig, disk: MemoryFiles) -> Contents:
    """What a store on this disk serves."""
    return contents(open_again(config, disk))
