"""Settings that change while a store is open, and what is cleaned when somebody asks."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sluice.errors import ConfigError, MessageIllegal
from sluice.model import Message
from sluice.storage.background import Steps
from sluice.storage.retention import HOUR_MS
from sluice.storage.state import GROUP_TABLE
from tests.unit.storage.store_kit import SEGMENT_BYTES, Disk


def filled(**changes: object) -> Disk:
    disk = Disk(**changes)  # type: ignore[arg-type]
    disk.open()
    disk.fill(60)
    disk.store.housekeeping.checkpoint()
    return disk


def reconfigure(disk: Disk, **changes: object) -> None:
    disk.store.reconfigure(replace(disk.store.config, **changes))  # type: ignore[arg-type]


def tick(disk: Disk) -> None:
    for _ in range(3):
        disk.now_ms += 1_000
        disk.store.tick()


def test_another_retention_holds_at_once() -> None:
    disk = filled(retention_hours=72, retention_at=";".join(f"{hour:02d}" for hour in range(24)))
    disk.now_ms += 10 * HOUR_MS
    tick(disk)
    count = len(disk.files.names("/store/commitlog"))
    reconfigure(disk, retention_hours=5)
    tick(disk)
    assert len(disk.files.names("/store/commitlog")) < count


def test_another_limit_of_the_disk_holds_at_once() -> None:
    disk = filled()
    disk.files.capacity_bytes = 1 << 18
    tick(disk)
    assert disk.store.refusal is None
    reconfigure(disk, disk_refuse_ratio=0.1)
    tick(disk)
    assert "disk_refuse_ratio" in str(disk.store.refusal)
    reconfigure(disk, disk_refuse_ratio=1.0)
    tick(disk)
    assert disk.store.refusal is None


def test_another_size_of_messages_holds_at_once() -> None:
    disk = filled()
    reconfigure(disk, message_bytes_max=100)
    with pytest.raises(MessageIllegal, match="over the limit of 100"):
        disk.store.stage(Message("t", 0, bytes(101)))
    disk.put("t", 0, bytes(100))
    reconfigure(disk, message_bytes_max=200)
    disk.put("t", 0, bytes(200))


def test_small_messages_do_not_stop_settings_and_retention() -> None:
    disk = filled()
    reconfigure(disk, message_bytes_max=64)
    value = {"name": "g", "text": "x" * 500}
    disk.store.change([(GROUP_TABLE, "g", value)])
    disk.store.write_staged()
    assert disk.store.table(GROUP_TABLE) == {"g": value}
    disk.store.housekeeping.delete_before(2 * SEGMENT_BYTES)
    assert disk.store.log.start == 2 * SEGMENT_BYTES
    disk.reopen()
    assert disk.store.table(GROUP_TABLE) == {"g": value}


@pytest.mark.parametrize(
    "change", [{"flush": "async"}, {"segment_bytes": 8192}, {"directory": "/x"}], ids=str
)
def test_what_takes_effect_at_start_only_is_refused(change: dict[str, object]) -> None:
    disk = filled()
    with pytest.raises(ConfigError, match="takes effect at start only"):
        reconfigure(disk, **change)
    assert disk.store.config == disk.config


# ----------------------------------------------------------------------------------------- cleaning


def test_a_sweep_removes_what_no_queue_needs_and_nothing_else() -> None:
    disk = filled()
    disk.store.housekeeping.delete_before(4 * SEGMENT_BYTES)
    before = disk.bodies("t", 0)
    needed = sorted(disk.paths("/store/consumequeue"))
    left_over = ["consumequeue/t/0/" + "0" * 20, "consumequeue/gone/7/" + "0" * 20]
    left_over += ["batchconsumequeue/t/0/" + "0" * 20]
    for name in left_over:
        assert f"/store/{name}" not in needed
        disk.files.make_directory(f"/store/{name}".rpartition("/")[0])
        disk.files.create(f"/store/{name}", 320).close()
    disk.files.make_directory("/store/consumequeue/t/0")
    disk.files.create("/store/consumequeue/t/0/readme", 1).close()
    disk.store.housekeeping.sweep_queues()
    tick(disk)
    left = sorted(disk.paths("/store/consumequeue"))
    assert left == sorted([*needed, "/store/consumequeue/t/0/readme"])
    assert list(disk.paths("/store/batchconsumequeue")) == []
    disk.files.remove("/store/consumequeue/t/0/readme")
    assert disk.bodies("t", 0) == before
    disk.reopen()
    assert not disk.store.recovery.rebuilt
    assert disk.bodies("t", 0) == before


def test_a_sweep_keeps_where_empty_queues_go_on() -> None:
    disk = filled()
    disk.put("last", 0, b"x" * 3000)
    disk.store.housekeeping.checkpoint()
    disk.store.housekeeping.delete_before(disk.store.log.written // SEGMENT_BYTES * SEGMENT_BYTES)
    end = disk.store.max_offset("t", 0)
    disk.store.housekeeping.sweep_queues()
    tick(disk)
    disk.reopen()
    assert disk.put("t", 0, b"next").queue_offset == end


def test_a_sweep_that_outlasts_the_store_removes_nothing() -> None:
    disk = filled()
    disk.close()
    disk.background = steps = Steps()
    disk.open()
    disk.files.make_directory("/store/consumequeue/gone/7")
    left_over = "/store/consumequeue/gone/7/" + "0" * 20
    disk.files.create(left_over, 320).close()
    housekeeping = disk.store.housekeeping
    housekeeping.sweep_queues()
    tick(disk)
    while not housekeeping._checkpoint_running:
        # The log is behind it; then comes a checkpoint, and what is left over.
        assert steps.step("flush") or steps.step("disk")
    disk.close()
    assert disk.files.exists(left_over)
