"""This module keeps the faults that the crash tests have found, each as the shortest story of it.

The random tests may never come by the same way again; these always do.
"""

from __future__ import annotations

import errno
from random import Random

import pytest

from sluice.errors import StoreError
from sluice.model import Message, QueueKey
from sluice.protocol import records
from sluice.storage.memory_files import (
    KeepAll,
    KeepNothing,
    KeepPrefix,
    KeepRandom,
    MemoryFiles,
)
from sluice.storage.state import GROUP_TABLE
from tests.crash.crash_points import open_again, watch
from tests.property.store_driver import BATCH_TOPIC, DERIVED, QUEUES, Driver, small_config
from tests.property.store_model import check, contents, yield_to_background

RANDOM = Random(1)
ONLY_QUEUE = QueueKey("only", 0)


def test_entry_torn_where_its_checksum_stands() -> None:
    """An entry whose checksum is cut off must not pass for an entry that never had one."""
    driver = Driver(small_config())
    driver.put(QUEUES[0], RANDOM, 10)
    driver.write()
    promise = driver.promise()
    for missing in range(1, 40):
        disk = driver.files.crash(KeepPrefix(driver.files.unsynced_bytes() - missing))
        check(open_again(driver.config, disk), promise)


def test_entry_torn_in_its_topic() -> None:
    """A name that cannot be a topic's is a torn tail here, not a store that does not open."""
    driver = Driver(small_config(message_crc=False))
    driver.store.stage(Message("LL" * 60, 0, b"body"))
    driver.write()
    for kept in range(driver.files.unsynced_bytes()):
        store = open_again(driver.config, driver.files.crash(KeepPrefix(kept)))
        assert store.queues.keys() <= driver.store.queues.keys()


def test_setting_in_the_same_flush_as_a_checkpoint() -> None:
    """A checkpoint that starts while a flush is being answered covers only what was answered."""
    driver = Driver(small_config())
    driver.store.change([(GROUP_TABLE, "first", {})], lambda _: driver.checkpoint())
    driver.change(GROUP_TABLE, "g", {"n": 1})
    driver.settle()
    driver.crash(KeepNothing())
    assert driver.store.table(GROUP_TABLE)["g"] == {"n": 1}


def test_setting_on_its_way_while_all_tables_are_written_again() -> None:
    """Retention writes all tables; a change that is in the log before them is part of them."""
    driver = Driver(small_config())
    for _ in range(6):
        driver.put(QUEUES[0], RANDOM, 900)
        driver.settle()
    driver.delete_some(1.0)
    driver.background.work("disk")
    driver.background.deliver("disk")  # the ends of the queues are written first
    driver.write()
    driver.background.work("flush")
    driver.change(GROUP_TABLE, "g", {"n": 1})
    driver.write()
    driver.settle()
    assert driver.store.table(GROUP_TABLE)["g"] == {"n": 1}
    driver.crash(KeepNothing())


@pytest.mark.parametrize("kept", [0, 1])
def test_queue_whose_entries_all_lie_in_closed_files(kept: int) -> None:
    """A queue that is complete when a rebuild ends is part of the next snapshot all the same."""
    driver = Driver(small_config())
    driver.put(ONLY_QUEUE, RANDOM, 10)
    for _ in range(8):
        driver.put(QUEUES[0], RANDOM, 900)
        driver.settle()
    promise = driver.promise()
    driver.files = driver.files.crash(KeepAll())
    driver.delete_derived(list(DERIVED[kept:]))
    driver.reopen(promise)
    driver.settle()
    driver.crash(KeepNothing())
    driver.crash(KeepNothing())


@pytest.mark.parametrize("segment_bytes", [4096, 16384])
def test_rebuild_that_is_interrupted(segment_bytes: int) -> None:
    """The old snapshot must not count for queue files that a rebuild has begun to write."""
    driver = Driver(small_config(segment_bytes=segment_bytes))
    for _ in range(12):
        driver.put(QUEUES[0], RANDOM, 600)
        driver.put(QUEUES[2], RANDOM, 10)
        driver.settle()
    driver.checkpoint()
    driver.settle()
    promise = driver.promise()
    disk = driver.files.crash(KeepNothing())
    disk.remove(f"{driver.config.directory}/consumequeue/A/0/{0:020d}")
    found: list[MemoryFiles] = []
    watch(disk, lambda: found.extend(disk.crash(KeepRandom(Random(n))) for n in range(5)))
    yield_to_background(open_again(driver.config, disk))
    assert found
    for once_more in found:
        check(open_again(driver.config, once_more), promise)


def test_recovery_of_a_killed_process_meets_a_power_cut() -> None:
    """What recovery has found is called durable only when it is."""
    driver = Driver(small_config())
    for _ in range(3):
        driver.put(QUEUES[0], RANDOM, 100)
        driver.write()
    promise = driver.promise()
    disk = driver.files.crash(KeepAll())
    found: list[MemoryFiles] = []
    watch(disk, lambda: found.extend(disk.crash(KeepRandom(Random(n))) for n in range(20)))
    open_again(driver.config, disk)
    assert found
    for once_more in found:
        check(open_again(driver.config, once_more), promise)


def test_keys_of_entries_that_were_lost() -> None:
    """What was indexed and then lost with the tail must not hide what is written in its place."""
    driver = Driver(small_config())
    for _ in range(3):
        driver.put(QUEUES[0], RANDOM, 200)
    driver.write()
    driver.checkpoint()  # the index is ahead of what is durable
    while driver.background.step("disk"):
        pass
    driver.crash(KeepNothing())
    for _ in range(4):
        driver.put(QUEUES[1], RANDOM, 100)
        driver.settle()
    driver.check_keys()
    driver.crash(KeepNothing())
    driver.check_keys()


def test_failed_index_does_not_stop_checkpoints() -> None:
    driver = Driver(small_config())
    driver.put(QUEUES[0], RANDOM, 10)
    driver.settle()
    driver.store.indexing.hand_over()
    driver.files.fail("pwritev", nth=1)
    driver.checkpoint()
    driver.background.run_all()
    assert driver.store.indexing.failure
    count = driver.store.housekeeping.checkpoint_count
    driver.put(QUEUES[0], RANDOM, 10)
    driver.settle()
    driver.checkpoint()
    driver.settle()
    assert driver.store.housekeeping.checkpoint_count == count + 1
    driver.crash(KeepNothing())
    driver.check_keys()


def test_checkpoint_that_follows_a_failed_index_at_once() -> None:
    """It runs before the owner is told, and must not say that the keys are indexed."""
    driver = Driver(small_config())
    for _ in range(3):
        driver.put(QUEUES[0], RANDOM, 10)
    driver.settle()
    driver.files.fail("pwritev")
    driver.checkpoint()
    while driver.background.work("disk"):
        pass
    driver.crash(KeepNothing())
    driver.check_keys()


@pytest.mark.parametrize("nth", range(1, 5))
def test_index_that_was_torn_before_a_clean_close(nth: int) -> None:
    """An index that had stopped is made anew, however orderly the store was closed."""
    driver = Driver(small_config())
    for _ in range(10):
        driver.put(QUEUES[0], RANDOM, 10)
    driver.settle()
    driver.check_keys()
    for _ in range(5):
        driver.put(QUEUES[1], RANDOM, 10)
    driver.settle()
    driver.files.tear(nth, 0)
    driver.shut()
    driver.crash(KeepAll())
    driver.check_keys()


def test_crash_between_the_two_lengths_of_a_wiped_file() -> None:
    """Cutting a torn tail makes the file short for a moment, and a prepared file follows it."""
    driver = Driver(small_config())
    for _ in range(2):
        driver.put(QUEUES[0], RANDOM, 900)
        driver.settle()
    assert driver.store.log._prepared is not None
    driver.put(QUEUES[0], RANDOM, 100)
    driver.write()
    promise = driver.promise()
    disk = driver.files.crash(KeepPrefix(driver.files.unsynced_bytes() - 30))
    found = []

    def visit() -> None:
        found.append(disk.crash(KeepPrefix(disk.unsynced_bytes())))

    watch(disk, visit)
    open_again(driver.config, disk)
    segment_bytes = driver.config.segment_bytes
    path = f"{driver.config.directory}/commitlog/{0:020d}"
    assert any(once_more.size(path) < segment_bytes for once_more in found)
    for once_more in found:
        check(open_again(driver.config, once_more), promise)


def test_kill_while_the_next_log_file_is_made() -> None:
    """Its name and length are made durable by the next start, before anything is put into it."""
    driver = Driver(small_config())
    found: list[MemoryFiles] = []
    files = driver.files
    watch(files, lambda: found.append(files.crash(KeepAll())))
    driver.put(QUEUES[0], RANDOM, 900)
    driver.put(QUEUES[0], RANDOM, 900)
    driver.settle()
    promise = driver.promise()
    promise.acked_end = 0  # some of the disks are older
    assert any(len(disk.names(f"{driver.config.directory}/commitlog")) > 1 for disk in found)
    for disk in found:
        later = Driver(driver.config, disk, promise, driver.serial)
        while later.store.log.written < driver.config.segment_bytes:
            later.put(QUEUES[1], RANDOM, 900)
            later.write()
            while later.background.step("flush"):  # and nothing but the log is made durable
                pass
        assert later.model.acked_end == later.store.log.written
        later.crash(KeepNothing())


def test_retention_on_a_full_disk_keeps_the_ends_of_queues() -> None:
    """A queue loses its last entry while its end cannot be written: that is done later."""
    driver = Driver(small_config())
    driver.put(ONLY_QUEUE, RANDOM, 10)
    for _ in range(6):
        driver.put(QUEUES[0], RANDOM, 900)
        driver.settle()
    driver.checkpoint()
    driver.settle()
    driver.delete_some(1.0)
    driver.files.fail("pwritev", error=errno.ENOSPC)
    driver.settle()
    assert driver.store.log.start > 0
    driver.tick(5_000)
    driver.settle()
    promise = driver.promise()
    driver.files = driver.files.crash(KeepNothing())
    driver.delete_derived(list(DERIVED))
    driver.reopen(promise)
    assert driver.store.max_offset(*ONLY_QUEUE) == 1


def test_power_cut_while_several_log_files_are_deleted() -> None:
    """Whatever order the disk forgets names in, the log has no hole."""
    driver = Driver(small_config())
    for _ in range(20):
        driver.put(QUEUES[0], RANDOM, 900)
        driver.settle()
    driver.delete_some(1.0)
    found: list[MemoryFiles] = []
    files = driver.files
    watch(files, lambda: found.extend(files.crash(KeepRandom(Random(n))) for n in range(8)))
    driver.settle()
    promise = driver.promise()
    assert driver.store.log.start > 2 * driver.config.segment_bytes
    for disk in found:
        check(open_again(driver.config, disk), promise)


def test_crash_between_snapshot_and_checkpoint_file() -> None:
    """It must not look as if Apache's broker had written the one: that would mean a rebuild."""
    driver = Driver(small_config())
    driver.put(QUEUES[0], RANDOM, 10)
    driver.settle()
    driver.checkpoint()
    found = []
    files = driver.files
    watch(files, lambda: found.append(files.crash(KeepNothing())))
    driver.settle()
    assert len(found) > 3
    for disk in found:
        assert not open_again(driver.config, disk).recovery.rebuilt


def test_positions_committed_while_others_are_on_their_way() -> None:
    """Closing in order keeps the newest positions, not only those of the last round."""
    driver = Driver(small_config())
    driver.commit("g", QUEUES[0], 1)
    driver.tick(5_000)
    driver.commit("g", QUEUES[0], 2)
    driver.shut()
    driver.open()
    assert driver.store.committed_offset("g", *QUEUES[0]) == 2


def test_flush_that_succeeds_after_another_sync_has_failed() -> None:
    """The failed one may have lost what the other one seems to have saved."""
    driver = Driver(small_config())
    flushed = driver.store.flusher.flushed
    driver.put(QUEUES[0], RANDOM, 10)
    driver.write()
    driver.files.tear(1, 50)
    driver.files.fail("sync")
    driver.put(QUEUES[0], RANDOM, 10)
    driver.write()  # fails, and so does the sync that makes its undoing durable
    driver.background.run_all()
    assert driver.store.flusher.flushed == flushed
    driver.checkpoint()
    driver.background.run_all()
    driver.crash(KeepNothing())


def test_store_that_failed_is_released_after_its_last_work() -> None:
    """Whoever opens the directory next must have it for himself."""
    driver = Driver(small_config())
    driver.put(QUEUES[0], RANDOM, 10)
    driver.settle()
    driver.checkpoint()
    driver.put(QUEUES[0], RANDOM, 10)
    driver.files.fail("pwritev")
    answers: list[object] = []
    driver.store.shut(answers.append)
    was_released = driver.store.released
    assert not was_released
    assert not answers
    driver.background.run_all()
    assert driver.store.released
    assert isinstance(answers[0], StoreError)


def test_batch_queue_that_retention_emptied() -> None:
    """It goes on at its offset, also after everything but the log was lost."""
    driver = Driver(small_config())
    queue = QueueKey(BATCH_TOPIC, 0)
    for _ in range(3):
        driver.put(queue, RANDOM, 10)
        driver.settle()
    for _ in range(6):
        driver.put(QUEUES[0], RANDOM, 900)
        driver.settle()
    driver.delete_some(1.0)
    driver.settle()
    promise = driver.promise()
    driver.files = driver.files.crash(KeepNothing())
    driver.delete_derived(list(DERIVED))
    driver.reopen(promise)
    assert driver.store.min_offset(*queue) == driver.store.max_offset(*queue) > 0
    driver.put(queue, RANDOM, 10)
    driver.settle()
    driver.checkpoint()
    driver.settle()
    driver.crash(KeepNothing())


def test_batch_whose_last_property_has_no_separator() -> None:
    driver = Driver(small_config())
    sys_flag = records.SYS_NEED_UNWRAP | records.SYS_INNER_BATCH
    message = Message(BATCH_TOPIC, 0, b"x", b"INNER_NUM\x013", sys_flag=sys_flag, count=3)
    driver.store.stage(message)
    driver.settle()
    ((low, high, (raw,)),) = contents(driver.store).values()
    properties = records.parse_properties(records.decode(raw).properties)
    assert (low, high) == (0, 3)
    assert properties["INNER_NUM"] == "3"
    assert properties["INNER_BASE"] == "0"


def test_batch_that_cannot_be_staged_is_not_staged_in_part() -> None:
    """The first offset that each of them is told makes them longer: it must be counted before."""
    driver = Driver(small_config())
    sys_flag = records.SYS_NEED_UNWRAP | records.SYS_INNER_BATCH
    batch = [
        Message(BATCH_TOPIC, 0, b"x" * 300, b"INNER_NUM\x013\x02", sys_flag=sys_flag, count=3)
        for _ in range(4)
    ]
    # Without that property they fit exactly into what is left of the file.
    size = sum(driver.store.encoder.measure(m, BATCH_TOPIC.encode()) for m in batch)
    left = driver.config.segment_bytes - driver.store.log.written - records.BLANK_BYTES
    overhead = driver.store.encoder.measure(Message("A", 0, b""), b"A")
    driver.store.stage(Message("A", 0, b"f" * (left - size - overhead)))
    driver.write()
    while driver.background.step("flush"):
        pass
    driver.files.fail("create", sticky=True)
    with pytest.raises(StoreError, match="cannot create a log file"):
        driver.store.stage_batch(batch)
    assert driver.store.queue(BATCH_TOPIC, 0).next_offset == 0
