"""This module lets single calls to the disk fail, one after the other, and fills the disk.

A scripted workload is run once to count its calls, then once for each call that can fail. The store
may refuse, it may stop, but whatever it acknowledged is there after any crash that follows, and
what it said was not stored never appears.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import suppress
from random import Random

import pytest

from sluice.errors import DiskFull, StoreError, StoreReadOnly
from sluice.model import Message
from sluice.storage.memory_files import KeepAll, KeepNothing, KeepPolicy, KeepPrefix, KeepRandom
from sluice.storage.state import GROUP_TABLE
from tests.crash.crash_points import open_again
from tests.property.store_driver import QUEUES, Driver, small_config
from tests.property.store_model import check, contents

OPERATIONS = (
    "pwritev", "sync", "create", "replace", "remove", "sync_directory", "sync_many",
)  # fmt: skip
BLOCK_BYTES = 4096


def workload(driver: Driver) -> None:
    """Entries over several files, settings, positions, checkpoints, retention."""
    random = Random(6)
    for number in range(12):
        driver.put(QUEUES[number % len(QUEUES)], random, 700)
        driver.put(QUEUES[0], random, 10)
        driver.settle()
        if number % 3 == 0:
            driver.change(GROUP_TABLE, f"g{number}", {"n": number})
            driver.commit("g", QUEUES[0], number)
            driver.tick(2_000)
        if number % 4 == 3:
            driver.checkpoint()
            driver.settle()
        if number == 8:
            driver.delete_some(0.6)
            driver.settle()
    driver.check()


def crashes(driver: Driver) -> Iterator[KeepPolicy]:
    yield KeepNothing()
    yield KeepAll()
    yield KeepPrefix(driver.files.unsynced_bytes() // 2)
    yield KeepRandom(Random(7))


def check_after_crashes(driver: Driver) -> None:
    promise = driver.promise()
    for policy in crashes(driver):
        disk = driver.files.crash(policy)
        disk.capacity_bytes = None
        check(open_again(driver.config, disk), promise)


def live_on(driver: Driver) -> None:
    """The process is restarted, goes on, and then the power fails."""
    driver.crash(KeepAll())
    assert driver.put(QUEUES[0], Random(8), 100)
    driver.settle()
    acknowledged = driver.model.acked_end
    assert acknowledged == driver.store.log.written
    driver.crash(KeepNothing())


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("full", [False, True], ids=["error", "full"])
def test_every_call_that_fails(operation: str, full: bool) -> None:
    driver = Driver(small_config())
    before = driver.files.calls[operation]
    workload(driver)
    call_count = driver.files.calls[operation] - before
    assert call_count > 0
    for nth in range(1, call_count + 1):
        driver = Driver(small_config())
        driver.files.fail(operation, nth=nth, error=errno.ENOSPC if full else errno.EIO)
        workload(driver)
        check_after_crashes(driver)
        live_on(driver)


@pytest.mark.parametrize("keep_bytes", [0, 1, 100, 100_000])
def test_every_write_that_is_torn(keep_bytes: int) -> None:
    driver = Driver(small_config())
    before = driver.files.calls["pwritev"]
    workload(driver)
    for nth in range(1, driver.files.calls["pwritev"] - before + 1):
        driver = Driver(small_config())
        driver.files.tear(nth, keep_bytes)
        workload(driver)
        check_after_crashes(driver)
        live_on(driver)


@pytest.mark.parametrize(("operation", "nth"), [("resize", 1), ("resize", 2), ("sync", 1)])
def test_write_that_cannot_be_undone(operation: str, nth: int) -> None:
    """A write fails half-way, and so does the wiping: the log stops, what is left is in doubt."""
    driver = Driver(small_config())
    driver.put(QUEUES[0], Random(1), 100)
    driver.settle()
    driver.files.tear(1, 200)
    driver.files.fail(operation, nth=nth)
    driver.put(QUEUES[0], Random(2), 20)
    driver.put(QUEUES[1], Random(3), 20)
    driver.settle()
    assert isinstance(driver.store.refusal, StoreReadOnly)
    assert not driver.put(QUEUES[0], Random(4), 20)
    driver.check()
    check_after_crashes(driver)
    live_on(driver)


@pytest.mark.parametrize("room_blocks", range(0, 24, 2))
def test_full_disk(room_blocks: int) -> None:
    """Appends are refused, nothing is lost, and writing goes on by itself when there is room."""
    driver = Driver(small_config())
    files = driver.files
    files.capacity_bytes = (files._used_blocks() + room_blocks) * BLOCK_BYTES
    workload(driver)
    check_after_crashes(driver)
    assert driver.store.flusher.failure is None, "a full disk stops nothing for good"
    files.capacity_bytes = None
    driver.tick(2_000)
    assert driver.put(QUEUES[1], Random(9), 100)
    driver.settle()
    assert driver.model.acked_end == driver.store.log.written
    driver.crash(KeepNothing())


def test_what_a_full_disk_refused_never_appears() -> None:
    driver = Driver(small_config(segment_bytes=16384))
    answers: list[object] = []
    driver.put(QUEUES[0], Random(1), 10)
    driver.settle()
    driver.files.capacity_bytes = driver.files._used_blocks() * BLOCK_BYTES
    for number in range(6):
        driver.store.stage(Message("A", 0, b"refused %d " % number * 100), answers.append)
    driver.write()
    assert len(answers) == 6
    assert all(isinstance(answer, DiskFull) for answer in answers)
    driver.files.capacity_bytes = None
    # The power fails before anything else is written: what the refused write left must be gone.
    for seed in range(200):
        disk = driver.files.crash(KeepRandom(Random(seed)))
        for _, _, entries in contents(open_again(driver.config, disk)).values():
            assert not any(b"refused" in raw for raw in entries)


def test_failed_fsync_stops_the_log() -> None:
    driver = Driver(small_config())
    driver.put(QUEUES[0], Random(1), 10)
    driver.settle()
    confirmed = driver.store.confirmed
    answers: list[object] = []
    driver.files.fail("sync")
    driver.store.stage(Message("A", 0, b"in doubt"), answers.append)
    driver.settle()
    assert len(answers) == 1
    assert isinstance(answers[0], StoreReadOnly)
    assert str(answers[0]).startswith("read-only: fsync failed")
    with pytest.raises(StoreReadOnly, match="read-only: fsync failed"):
        driver.store.stage(Message("A", 0, b"too late"))
    assert driver.store.confirmed == confirmed, "what is in doubt is not served"
    driver.check()
    syncs = driver.files.calls["sync"]
    driver.tick(60_000)
    driver.settle()
    assert driver.files.calls["sync"] == syncs, "a failed fsync is never tried again"


def test_failed_fsync_then_a_kill_then_a_power_cut() -> None:
    """The system believes pages to be written that are not; the next start must not believe it."""
    driver = Driver(small_config())
    driver.files.fail("sync")
    driver.put(QUEUES[0], Random(1), 10)
    driver.settle()
    driver.crash(KeepAll())
    assert driver.put(QUEUES[0], Random(2), 20)
    driver.settle()
    assert driver.model.acked_end == driver.store.log.written
    driver.crash(KeepNothing())


def test_failed_open_can_be_repeated() -> None:
    """Opening fails at any of its calls; the next try comes to the same end as if nothing was."""
    driver = Driver(small_config())
    workload(driver)
    driver.put(QUEUES[0], Random(3), 50)
    driver.write()
    disk = driver.files.crash(KeepPrefix(driver.files.unsynced_bytes() - 20))
    whole = disk.crash(KeepAll())
    expected = contents(open_again(driver.config, whole))
    for operation in (*OPERATIONS, "resize", "open", "pread"):
        for nth in range(1, whole.calls[operation] + 1):
            files = disk.crash(KeepAll())
            files.fail(operation, nth=nth)
            with suppress(StoreError):
                open_again(driver.config, files)
            again = open_again(driver.config, files.crash(KeepRandom(Random(nth))))
            assert contents(again) == expected, f"{operation} {nth}"
