"""When an append is answered: one fsync for many, none tried twice, the timers of flush=async."""

from __future__ import annotations

import errno
from functools import partial
from typing import Any

import pytest

from sluice.errors import DiskFull, MessageIllegal, SluiceError, StoreReadOnly
from sluice.model import Message, Placed
from sluice.storage.background import Steps
from sluice.storage.memory_files import KeepAll, KeepNothing
from sluice.storage.reads import ReadStatus
from tests.unit.storage.store_kit import SEGMENT_BYTES, Disk

Outcome = list[SluiceError | None]


class Stepped(Disk):
    """A store whose background goes on only when the test says so."""

    def __init__(self, **changes: Any) -> None:
        self.steps = Steps()
        super().__init__(self.steps, **changes)
        self.open()
        self.steps.run_all()

    def append(self, body: bytes, *, write: bool = True, durable: bool = False) -> Outcome:
        outcome: Outcome = []
        self.store.stage(Message("t", 0, body), outcome.append, durable=durable)
        if write:
            self.store.write_staged()
        return outcome

    def visible(self) -> int:
        return self.store.max_offset("t", 0)

    @property
    def syncs(self) -> int:
        return self.files.calls["sync"]


# --------------------------------------------------------------------------------------------- sync


def test_an_append_is_answered_after_the_sync_and_seen_only_then() -> None:
    disk = Stepped()
    outcome = disk.append(b"a")
    assert (outcome, disk.visible()) == ([], 0)
    assert disk.store.read("t", 0, 0).status is ReadStatus.NO_MESSAGE_IN_QUEUE
    assert disk.steps.step("flush")
    assert (outcome, disk.visible()) == ([None], 1)
    disk.crash(KeepNothing())
    disk.open()
    assert disk.bodies("t", 0) == {0: b"a"}


def test_all_appends_of_a_turn_are_one_write() -> None:
    disk = Stepped()
    before = disk.files.calls["pwritev"]
    for number in range(10):
        disk.append(b"%d" % number, write=False)
    disk.store.write_staged()
    assert disk.files.calls["pwritev"] == before + 1


def test_one_sync_serves_everybody_who_wrote_before_it_began() -> None:
    disk = Stepped(segment_bytes=1 << 20)
    first = disk.append(b"first")
    waiting = [disk.append(b"%d" % number) for number in range(50)]
    syncs = disk.syncs
    assert disk.steps.step("flush")
    assert first == [None]
    assert not any(waiting), "they were written after it began"
    assert disk.steps.step("flush")
    assert all(outcome == [None] for outcome in waiting)
    assert not disk.steps.step("flush")
    assert disk.syncs == syncs + 2
    assert disk.store.flusher.round_count == 2


def test_answers_come_in_the_order_of_the_log_and_once() -> None:
    disk = Stepped()
    order: list[int] = []

    def answer(number: int, error: SluiceError | None) -> None:
        assert error is None
        order.append(number)

    for number in range(20):
        disk.store.stage(Message("t", number % 3, b"x"), partial(answer, number))
        if number % 4 == 0:
            disk.store.write_staged()
        if number % 5 == 0:
            disk.steps.step("flush")
    disk.store.write_staged()
    disk.steps.run_all()
    assert order == list(range(20))


def test_a_flush_over_two_files_syncs_both() -> None:
    disk = Stepped()
    disk.append(b"x" * (SEGMENT_BYTES // 2))
    outcome = disk.append(b"y" * (SEGMENT_BYTES // 2))
    disk.steps.run_all()
    assert outcome == [None]
    disk.crash(KeepNothing())
    disk.open()
    assert sorted(disk.bodies("t", 0)) == [0, 1]


def test_a_batch_is_answered_once_and_lies_in_one_file() -> None:
    disk = Stepped()
    disk.append(b"x" * 2000)
    outcome: Outcome = []
    placed = disk.store.stage_batch([Message("t", 1, b"y" * 900)] * 3, outcome.append)
    disk.store.write_staged()
    disk.steps.run_all()
    assert outcome == [None]
    assert {place.position // SEGMENT_BYTES for place in placed} == {1}
    assert [place.queue_offset for place in placed] == [0, 1, 2]


@pytest.mark.parametrize(
    "messages",
    [[], [Message("t", 0, b"x" * 1500)] * 3, [Message("t", 0, b"x"), Message("/", 0, b"")]],
)
def test_a_batch_that_is_refused_leaves_nothing_behind(messages: list[Message]) -> None:
    disk = Stepped()
    with pytest.raises(MessageIllegal):
        disk.store.stage_batch(messages)
    disk.store.write_staged()
    disk.steps.run_all()
    assert disk.visible() == 0
    assert disk.append(b"next") == []
    disk.steps.run_all()
    assert disk.bodies("t", 0) == {0: b"next"}


# ----------------------------------------------------------------------------------- a failed fsync


def test_a_failed_sync_stops_the_log_for_good() -> None:
    disk = Stepped()
    safe = disk.append(b"safe")
    disk.steps.run_all()
    disk.files.fail("sync", error=errno.EIO)
    lost, waiting = disk.append(b"lost"), disk.append(b"waiting")
    disk.steps.run_all()
    assert safe == [None]
    for outcome in (lost, waiting):
        (error,) = outcome
        assert isinstance(error, StoreReadOnly)
        assert str(error).startswith("read-only: fsync failed")
    syncs = disk.syncs
    with pytest.raises(StoreReadOnly, match="read-only: fsync failed"):
        disk.append(b"later")
    disk.now_ms += 60_000
    disk.store.tick()
    disk.steps.run_all()
    assert disk.syncs == syncs, "it is never tried again"
    assert isinstance(disk.store.refusal, StoreReadOnly)
    assert disk.bodies("t", 0) == {0: b"safe"}, "reading goes on, up to what was confirmed"


@pytest.mark.parametrize("keep", [KeepAll(), KeepNothing()])
def test_after_a_failed_sync_a_start_finds_all_that_was_answered(
    keep: KeepAll | KeepNothing,
) -> None:
    disk = Stepped()
    disk.append(b"safe")
    disk.steps.run_all()
    disk.files.fail("sync")
    disk.append(b"lost")
    disk.steps.run_all()
    shut: Outcome = []
    disk.store.shut(shut.append)
    disk.steps.run_all()
    assert isinstance(shut[0], StoreReadOnly)
    disk.crash(keep)
    disk.open()
    assert disk.bodies("t", 0)[0] == b"safe"
    assert disk.append(b"on") == []
    disk.background.close()
    assert list(disk.bodies("t", 0).values())[-1] == b"on"


def test_settings_and_offsets_do_not_take_effect_when_the_sync_fails() -> None:
    disk = Stepped()
    disk.files.fail("sync")
    outcome: Outcome = []
    disk.store.change([("topic", "t", {"perm": 6})], outcome.append)
    disk.store.write_staged()
    disk.steps.run_all()
    assert isinstance(outcome[0], StoreReadOnly)
    assert disk.store.table("topic") == {}


# -------------------------------------------------------------------------------- failed writes


def test_a_write_that_fails_half_way_leaves_nothing() -> None:
    disk = Stepped()
    disk.append(b"before")
    disk.steps.run_all()
    disk.files.tear(1, keep_bytes=60)
    outcome = disk.append(b"torn")
    (error,) = outcome
    assert error is not None
    assert "write failed" in str(error)
    disk.crash(KeepAll())
    disk.open()
    assert disk.bodies("t", 0) == {0: b"before"}
    assert disk.files.names("/store/sluice/cut") == [], "it was wiped at once"


def test_a_full_disk_refuses_and_goes_on_by_itself_with_the_same_offset() -> None:
    disk = Stepped(segment_bytes=1 << 20)
    disk.append(b"before")
    disk.steps.run_all()
    disk.files.capacity_bytes = 0
    outcomes = [disk.append(b"x" * 9000) for _ in range(2)]
    for outcome in outcomes:
        assert isinstance(outcome[0], DiskFull)
        assert "no room on the disk" in str(outcome[0])
    disk.files.capacity_bytes = None
    outcome = disk.append(b"after")
    disk.steps.run_all()
    assert outcome == [None]
    assert disk.bodies("t", 0) == {0: b"before", 1: b"after"}
    disk.crash(KeepNothing())
    disk.open()
    assert disk.bodies("t", 0) == {0: b"before", 1: b"after"}


def test_no_room_for_the_next_file_is_said_and_goes_by() -> None:
    disk = Stepped()
    disk.append(b"x" * 900)
    while disk.steps.waiting.get("disk"):
        disk.steps.waiting["disk"].clear()  # the file was not prepared in time
    disk.files.fail("create", error=errno.ENOSPC)
    with pytest.raises(DiskFull, match="no room on the disk for a new log file"):
        disk.append(b"y" * 3500)
    outcome = disk.append(b"z" * 3500)
    disk.steps.run_all()
    assert outcome == [None]
    assert [body[:1] for body in disk.bodies("t", 0).values()] == [b"x", b"z"]


# -------------------------------------------------------------------------------------------- async


def test_async_answers_after_the_write() -> None:
    disk = Stepped(flush="async")
    syncs = disk.syncs
    assert disk.append(b"a") == [None]
    assert disk.visible() == 1
    assert not disk.steps.step("flush")
    assert disk.syncs == syncs
    disk.crash(KeepAll())
    disk.open()
    assert disk.bodies("t", 0) == {0: b"a"}, "a kill -9 loses nothing that was written"


def test_async_flushes_on_rocketmqs_timers() -> None:
    disk = Stepped(flush="async", segment_bytes=1 << 20)
    disk.store.tick()
    disk.steps.run_all()
    start_ms = disk.now_ms

    def flushed_at(later_ms: int) -> bool:
        disk.now_ms = start_ms + later_ms
        disk.store.tick()
        return disk.steps.step("flush")

    disk.append(b"little")
    assert not flushed_at(500), "less than four pages can wait"
    assert not flushed_at(9_999)
    assert flushed_at(10_000), "but not longer than ten seconds"
    disk.append(b"x" * 4 * 4096)
    assert not flushed_at(10_499)
    assert flushed_at(10_500), "four pages every half second"
    assert disk.store.flusher.flushed == disk.store.log.written


def test_async_can_be_told_to_wait() -> None:
    disk = Stepped(flush="async")
    outcome = disk.append(b"a", durable=True)
    assert outcome == []
    disk.steps.step("flush")
    assert outcome == [None]


def test_async_settings_are_durable_all_the_same() -> None:
    disk = Stepped(flush="async")
    outcome: Outcome = []
    disk.store.change([("topic", "t", {"perm": 6})], outcome.append)
    disk.store.write_staged()
    assert outcome == []
    disk.steps.run_all()
    assert outcome == [None]
    disk.crash(KeepNothing())
    assert disk.open().table("topic") == {"t": {"perm": 6}}


def test_async_stops_too_when_its_flush_fails() -> None:
    disk = Stepped(flush="async")
    disk.append(b"a")
    disk.files.fail("sync")
    disk.now_ms += 10_000
    disk.store.tick()
    disk.steps.run_all()
    with pytest.raises(StoreReadOnly, match="fsync failed"):
        disk.append(b"b")


# ---------------------------------------------------------------------------------------- the clock


def test_store_times_never_go_back() -> None:
    disk = Stepped()
    times = []
    for step_ms in (0, 50, -10_000, 0, 20_000):
        disk.now_ms += step_ms
        outcome: list[Placed] = [disk.store.stage(Message("t", 0, b"x"))]
        disk.store.write_staged()
        times.append(outcome[0].store_ms)
    assert times == sorted(times)
    disk.steps.run_all()
    disk.close()
    disk.now_ms -= 1_000_000
    disk.open()
    assert disk.store.stage(Message("t", 0, b"x")).store_ms >= times[-1]
