"""Messages that wait longer than the log keeps its files."""

from __future__ import annotations

import pytest

from sluice.broker.delay_desk import DelayDesk
from sluice.broker.delay_forms import Handle
from sluice.broker.topics import SCHEDULE_TOPIC, TIMER_TOPIC
from sluice.protocol import records
from sluice.storage.memory_files import KeepAll
from tests.unit.broker.delay_kit import TOPIC, Box
from tests.unit.storage.store_kit import BEGIN_MS

HOUR_MS = 3_600_000


@pytest.fixture
def box() -> Box:
    box = Box(segment_bytes=16 << 10, retention_hours=1, delay_levels="1s 20h", flush="sync")
    box.make_topic()
    return box


def let_files_go(box: Box, hours: int = 2) -> None:
    """Time passes, other messages come, and old files are deleted."""
    before = box.core.store.log.start
    for _ in range(hours):
        for _ in range(40):
            box.send(bytes(1_000), queue_id=1)
        box.core.store.housekeeping.checkpoint()
        box.pass_ms(HOUR_MS)
        box.core.store.housekeeping.delete_expired()
        box.pass_ms(1_100, steps=6)
    assert box.core.store.log.start > before, "old files are gone"


def test_what_waits_moves_up_and_is_delivered_at_its_time(box: Box) -> None:
    for number in range(30):
        box.send(b"t%d" % number, TIMER_DELAY_MS=str(10 * HOUR_MS + number % 3))
        box.send(b"l%d" % number, DELAY="2", TAGS="a")
    for _ in range(3):
        let_files_go(box)
    delays = box.core.delays
    assert delays.rescue.moved >= 120, "both kinds, more than once"
    assert (delays.waiting_timers, delays.waiting_levels) == (60, 0)
    assert box.core.store.min_offset(SCHEDULE_TOPIC, 1) == 30, "nothing of the old files is left"
    box.disk.now_ms = BEGIN_MS + 10 * HOUR_MS - 1
    box.tick()
    assert box.bodies() == []
    box.pass_ms(10)
    assert sorted(box.bodies()) == sorted(b"t%d" % number for number in range(30))
    box.disk.now_ms = BEGIN_MS + 20 * HOUR_MS - 1
    box.tick()
    assert len(box.bodies()) == 30
    box.pass_ms(10)
    assert box.bodies()[30:] == [b"l%d" % number for number in range(30)]
    moved = records.parse_properties(box.entries()[-1].properties)
    assert (moved["DELAY"], moved["TIMER_OUT_MS"]) == ("2", box.at(20 * HOUR_MS))
    box.crash(KeepAll())
    box.pass_ms(HOUR_MS)
    assert len(box.bodies()) == 60


def test_what_was_moved_can_be_taken_back(box: Box) -> None:
    box.send(b"back", TIMER_DELAY_MS=str(10 * HOUR_MS), UNIQ_KEY="u1")
    let_files_go(box)
    assert box.core.delays.rescue.moved
    told: list[object] = []
    handle = Handle(TOPIC, "broker-a", BEGIN_MS + 10 * HOUR_MS, "u1")
    DelayDesk(box.core, box.core.delays).recall(handle, "", told.append)
    box.settle()
    assert told == [None]
    let_files_go(box)
    box.crash(KeepAll())
    assert box.core.delays.waiting_timers == 0
    box.pass_ms(12 * HOUR_MS)
    assert box.bodies() == []


def test_a_store_without_delayed_messages_lets_its_files_go(box: Box) -> None:
    let_files_go(box)
    assert box.core.delays.rescue.moved == 0
    assert box.core.store.max_offset(TIMER_TOPIC, 0) == 0


def test_a_stopped_broker_has_noted_how_far_it_is(box: Box) -> None:
    box.send(b"x", DELAY="1")
    box.pass_ms(1_000)
    box.send(b"y", DELAY="1")
    box.pass_ms(500)
    box.pass_ms(500)
    assert len(box.bodies()) == 2
    box.core.delays.finish()
    box.core.end_turn()
    assert box.core.store.table("delay") == {"1": 2}
