"""This module tests when delayed messages are delivered, on a clock that the tests turn."""

from __future__ import annotations

import errno
from dataclasses import replace

import orjson
import pytest

from sluice.broker.long_polling import HeldRead
from sluice.broker.topics import SCHEDULE_TOPIC, TIMER_TOPIC
from sluice.errors import MessageIllegal
from sluice.protocol import records
from sluice.storage.background import Steps
from sluice.storage.memory_files import KeepAll
from tests.unit.broker.delay_kit import TOPIC, Box
from tests.unit.storage.store_kit import BEGIN_MS


@pytest.fixture
def box() -> Box:
    box = Box()
    box.make_topic()
    return box


LEVELS_MS = [
    *(1_000, 5_000, 10_000, 30_000),
    *(60_000 * minutes for minutes in (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 20, 30, 60, 120)),
]


def test_each_level_is_delivered_after_its_time_and_not_before(box: Box) -> None:
    for level in range(1, 19):
        box.send(b"%d" % level, DELAY=str(level))
    assert box.bodies() == []
    for level, delay_ms in enumerate(LEVELS_MS, 1):
        box.disk.now_ms = BEGIN_MS + delay_ms - 1
        box.tick()
        assert len(box.bodies()) == level - 1, "not a millisecond early"
        box.pass_ms(1)
        assert len(box.bodies()) == level
    assert box.bodies() == [b"%d" % level for level in range(1, 19)]


@pytest.mark.parametrize(
    ("name", "value", "due_ms"),
    [
        ("TIMER_DELAY_SEC", "3", 3_000),
        ("TIMER_DELAY_MS", "1234", 1_234),
        ("TIMER_DELIVER_MS", str(BEGIN_MS + 77), 77),
        ("TIMER_DELAY_MS", str(40 * 86_400_000), 40 * 86_400_000),
    ],
)
def test_a_timer_fires_at_its_millisecond(box: Box, name: str, value: str, due_ms: int) -> None:
    box.send(b"x", TOPIC, 1, **{name: value})
    box.tick()
    box.disk.now_ms = BEGIN_MS + due_ms - 1
    box.tick()
    assert box.bodies(queue_id=1) == []
    box.pass_ms(1)
    assert box.bodies(queue_id=1) == [b"x"]


# ---------------------------------------------------------------------------------- what is stored


def properties_of(entry: records.Entry) -> dict[str, str]:
    texts = records.parse_properties(entry.properties)
    texts.pop("__CRC32#", None)
    return texts


def test_a_level_message_waits_and_arrives_in_the_form_of_apaches_broker(box: Box) -> None:
    box.send(b"body", queue_id=1, DELAY="3", TAGS="TagA", KEYS="k", UNIQ_KEY="u1")
    (waiting,) = box.entries(SCHEDULE_TOPIC, 2)
    sent = {"DELAY": "3", "TAGS": "TagA", "KEYS": "k", "UNIQ_KEY": "u1"}
    placed = {**sent, "REAL_TOPIC": TOPIC, "REAL_QID": "1"}
    assert properties_of(waiting) == placed
    assert box.core.delays.levels[3].one(0)[2] == BEGIN_MS + 10_000, "the queue says when"
    box.pass_ms(10_000)
    (arrived,) = box.entries(queue_id=1)
    assert properties_of(arrived) == placed
    assert (bytes(arrived.body), arrived.born_ms) == (b"body", BEGIN_MS)
    assert arrived.prepared_offset == waiting.position, "its origin"
    queue = box.core.store.queues[TOPIC, 1]
    _, _, code, _, _ = queue.iterate(queue.units(0, 1, box.core.store.queue_files, wait=True), 0)[0]
    assert code == records.java_hash(b"TagA"), "consumers filter by it"


def test_a_timed_message_waits_and_arrives_in_the_form_of_apaches_broker(box: Box) -> None:
    box.send(b"body", queue_id=1, TIMER_DELAY_MS="2500", UNIQ_KEY="u1")
    (waiting,) = box.entries(TIMER_TOPIC)
    placed = {
        "TIMER_DELAY_MS": "2500",
        "UNIQ_KEY": "u1",
        "REAL_TOPIC": TOPIC,
        "REAL_QID": "1",
        "TIMER_OUT_MS": box.at(2500),
    }
    assert properties_of(waiting) == placed
    box.pass_ms(2600)
    (arrived,) = box.entries(queue_id=1)
    assert properties_of(arrived) == {
        **placed,
        "TIMER_ENQUEUE_MS": box.at(0),
        "TIMER_DEQUEUE_MS": box.at(2600),
    }
    assert arrived.prepared_offset == waiting.position


def test_a_level_above_the_highest_is_the_highest(box: Box) -> None:
    box.send(b"x", DELAY="99")
    (waiting,) = box.entries(SCHEDULE_TOPIC, 17)
    assert properties_of(waiting)["DELAY"] == "18"


def test_the_levels_can_be_set() -> None:
    box = Box(delay_levels="2s 3h")
    box.make_topic()
    box.send(b"a", DELAY="1")
    box.send(b"b", DELAY="2")
    box.send(b"c", DELAY="3")
    box.pass_ms(2_000)
    assert box.bodies() == [b"a"]
    box.pass_ms(3 * 3_600_000 - 2_000)
    assert box.bodies() == [b"a", b"b", b"c"]


def test_level_0_and_times_that_are_over_are_delivered_at_once(box: Box) -> None:
    box.send(b"a", DELAY="0")
    box.send(b"b", TIMER_DELIVER_MS=box.at(0))
    box.send(b"c", TIMER_DELIVER_MS="1")
    box.send(b"d", TIMER_DELAY_SEC="0")
    assert box.bodies() == [b"a", b"b", b"c", b"d"]


def test_of_several_times_the_first_kind_counts_and_a_level_before_them(box: Box) -> None:
    box.send(b"sec", TIMER_DELAY_SEC="2", TIMER_DELAY_MS="2500", TIMER_DELIVER_MS=box.at(1_900))
    box.send(b"level", DELAY="1", TIMER_DELAY_SEC="50")
    assert [properties_of(e).get("TIMER_DELAY_SEC") for e in box.entries(SCHEDULE_TOPIC)] == [None]
    box.pass_ms(1_999)
    assert box.bodies() == [b"level"]
    box.pass_ms(1)
    assert box.bodies() == [b"level", b"sec"]


# --------------------------------------------------------------------------------------- bad input

FORTY_DAYS_MS = 40 * 86_400_000


@pytest.mark.parametrize(
    ("properties", "why"),
    [
        ({"DELAY": "-1"}, "delay level '-1' is not a number from 0 to 18"),
        ({"DELAY": "1.5"}, "delay level '1.5'"),
        ({"DELAY": "x" * 200}, "delay level"),
        ({"DELAY": "9" * 20}, "delay level"),
        ({"DELAY": "\u0661"}, "delay level"),
        ({"TIMER_DELAY_SEC": "-5"}, "TIMER_DELAY_SEC='-5' is not a time"),
        ({"TIMER_DELAY_MS": "soon"}, "TIMER_DELAY_MS='soon' is not a time"),
        ({"TIMER_DELIVER_MS": "1e12"}, "TIMER_DELIVER_MS='1e12' is not a time"),
        ({"TIMER_DELIVER_MS": "9" * 19}, "the limit is 3456000 s"),
        ({"TIMER_DELIVER_MS": "9" * 20}, "is not a time"),
        ({"TIMER_DELAY_MS": str(FORTY_DAYS_MS + 1)}, "the limit is 3456000 s"),
        ({"TIMER_DELAY_SEC": "5", "TIMER_DELAY_MS": "9000"}, "name different times"),
        ({"TIMER_DELAY_SEC": "5", "TIMER_DELIVER_MS": str(BEGIN_MS)}, "name different times"),
        ({"TIMER_OUT_MS": str(BEGIN_MS + 5)}, "TIMER_OUT_MS is the broker's own"),
        ({"TIMER_DEL_UNIQKEY": "u", "TIMER_DELAY_SEC": "5"}, "TIMER_DEL_UNIQKEY is the broker's"),
        ({"TIMER_ENQUEUE_MS": "5"}, "TIMER_ENQUEUE_MS is the broker's own"),
        ({"TIMER_DEQUEUE_MS": "5"}, "TIMER_DEQUEUE_MS is the broker's own"),
        ({"TIMER_ROLL_TIMES": "5"}, "TIMER_ROLL_TIMES is the broker's own"),
        ({"DELAY": "1", "big": "x" * 32_560}, "are over the limit of"),
    ],
)
def test_delays_that_make_no_sense_are_refused_and_nothing_is_stored(
    box: Box, properties: dict[str, str], why: str
) -> None:
    end = box.core.store.log.end
    with pytest.raises(MessageIllegal, match=why) as refusal:
        box.send(b"x", TOPIC, 0, **properties)
    assert refusal.value.rocketmq_code == 13
    assert box.core.store.log.end == end


def test_where_a_message_goes_cannot_be_forged(box: Box) -> None:
    box.make_topic("secret")
    box.send(b"a", DELAY="1", REAL_TOPIC="secret", REAL_QID="7")
    box.send(b"b", TIMER_DELAY_MS="1000", REAL_TOPIC="secret", REAL_QID="-1")
    box.pass_ms(1_000)
    assert (sorted(box.bodies()), box.bodies("secret")) == ([b"a", b"b"], [])


def test_a_message_that_a_consumer_sends_back_may_carry_what_the_broker_gave_it(box: Box) -> None:
    box.make_topic("%RETRY%g", 1)
    carried = {"TIMER_OUT_MS": box.at(-5), "TIMER_DELAY_SEC": "9", "REAL_TOPIC": TOPIC}
    again = {"TIMER_ENQUEUE_MS": "1", "TIMER_DEQUEUE_MS": "2", "REAL_QID": "0"}
    box.send(b"later", "%RETRY%g", 0, DELAY="3", **carried, **again)
    box.send(b"now", "%RETRY%g", 0, **carried, **again)
    assert box.bodies("%RETRY%g") == [b"now"]
    box.pass_ms(10_000)
    assert box.bodies("%RETRY%g") == [b"now", b"later"]
    texts = [properties_of(entry) for entry in box.entries("%RETRY%g")]
    assert not any(name.startswith("TIMER_") for each in texts for name in each)


def test_a_message_that_was_delivered_can_be_sent_again_as_it_is(box: Box) -> None:
    """So does `mqadmin queryMsgById -s true`."""
    box.send(b"x", TIMER_DELAY_MS="500", UNIQ_KEY="u")
    box.pass_ms(500)
    carried = properties_of(box.entries()[0])
    assert {"TIMER_OUT_MS", "TIMER_ENQUEUE_MS", "TIMER_DEQUEUE_MS"} <= carried.keys()
    box.send(b"again", TOPIC, 0, **carried)
    assert box.bodies() == [b"x", b"again"], "at once: it has waited"
    with pytest.raises(MessageIllegal, match="is the broker's own"):
        box.send(b"forged", TOPIC, 0, **carried, TIMER_DEL_UNIQKEY="u")


# ------------------------------------------------------------------------------------------- order


def test_what_is_overdue_after_a_downtime_comes_in_order_of_its_time(box: Box) -> None:
    times = {b"5s": "2", b"1s": "1", b"10s": "3"}
    for body, level in times.items():
        box.send(body, DELAY=level)
    for delay_ms in (7_000, 500, 20_000, 3_000, 9_999, 10_001, 3_000):
        box.send(b"%dms" % delay_ms, TIMER_DELAY_MS=str(delay_ms))
    box.core.end_turn()
    box.disk.close()
    box.disk.now_ms += 3_600_000
    box.open()
    box.tick()
    assert box.bodies() == [
        *(b"500ms", b"1s", b"3000ms", b"3000ms", b"5s"),
        *(b"7000ms", b"9999ms", b"10s", b"10001ms", b"20000ms"),
    ]


def test_thousands_that_are_due_together_come_once_and_in_order(box: Box) -> None:
    for number in range(6_000):
        kind = {"DELAY": "1"} if number % 3 else {"TIMER_DELAY_MS": str(1_000 - number % 7)}
        box.stage(b"%d" % number, TOPIC, number % 2, **kind)
    box.settle()
    turns = 0
    box.disk.now_ms += 1_000
    box.core.tick()
    while box.soon:
        before = len(box.bodies()) + len(box.bodies(queue_id=1))
        box.soon.popleft()()
        assert len(box.bodies()) + len(box.bodies(queue_id=1)) - before <= 1_024, "the loop goes on"
        turns += 1
    assert turns > 5
    arrived = [*box.entries(), *box.entries(queue_id=1)]
    assert sorted(int(bytes(entry.body)) for entry in arrived) == list(range(6_000))
    for entries in (box.entries(), box.entries(queue_id=1)):
        origins = {e.position: e.store_ms for e in box.entries(TIMER_TOPIC)}
        assert origins, "both kinds"
        dues = [
            int(texts["TIMER_OUT_MS"]) if "TIMER_OUT_MS" in texts else BEGIN_MS + 1_000
            for texts in map(properties_of, entries)
        ]
        assert dues == sorted(dues)


def test_the_clock_may_go_back_and_nothing_is_early_or_lost(box: Box) -> None:
    box.send(b"a", TIMER_DELAY_MS="60000")
    box.pass_ms(60_000)
    assert box.bodies() == [b"a"]
    box.disk.now_ms -= 50_000
    box.send(b"b", TIMER_DELAY_MS="20000")
    box.pass_ms(1_500)
    box.stop_and_start()
    box.pass_ms(18_499)
    assert box.bodies() == [b"a"]
    box.pass_ms(1)
    assert box.bodies() == [b"a", b"b"]
    box.pass_ms(2_000)
    box.stop_and_start()
    box.pass_ms(100_000)
    assert box.bodies() == [b"a", b"b"]


def test_the_clock_goes_back_and_the_process_is_killed_before_anything_is_noted(box: Box) -> None:
    box.send(b"a", TIMER_DELAY_MS="60000")
    box.pass_ms(60_000)
    box.pass_ms(1_000)
    box.disk.now_ms -= 50_000
    box.send(b"b", TIMER_DELAY_MS="20000")
    box.crash(KeepAll())
    box.pass_ms(20_000)
    assert box.bodies() == [b"a", b"b"]


def test_levels_that_were_made_shorter_hold_for_what_waits() -> None:
    box = Box(delay_levels="2h")
    box.make_topic()
    box.send(b"old", DELAY="1")
    box.core.end_turn()
    box.disk.close()
    box.disk.config = replace(box.disk.config, delay_levels="10s")
    box.open()
    box.send(b"new", DELAY="1")
    box.pass_ms(9_999)
    assert box.bodies() == []
    box.pass_ms(1)
    assert box.bodies() == [b"old", b"new"]


def test_messages_of_levels_that_there_are_no_more_are_delivered() -> None:
    box = Box(delay_levels="1s 5s 10s")
    box.make_topic()
    box.send(b"x", DELAY="3")
    box.core.end_turn()
    box.disk.close()
    box.disk.config = replace(box.disk.config, delay_levels="1s")
    box.open()
    box.pass_ms(10_000)
    assert box.bodies() == [b"x"]


# ------------------------------------------------------------------------------- what goes wrong


def test_messages_of_a_deleted_topic_are_dropped_and_counted(
    box: Box, caplog: pytest.LogCaptureFixture
) -> None:
    box.make_topic("gone")
    for number in range(3):
        box.send(b"%d" % number, "gone", DELAY="1")
        box.send(b"%d" % number, "gone", TIMER_DELAY_MS="900")
    box.send(b"x", DELAY="1")
    box.core.topics.delete("gone")
    box.core.end_turn()
    box.pass_ms(1_000)
    assert box.bodies() == [b"x"]
    assert (box.core.delays.dropped, box.core.delays.fired) == (6, 1)
    told = [record.message for record in caplog.records if "gone" in record.message]
    assert told == ["topic gone is gone: delayed messages for it are dropped"]


def test_a_topic_with_fewer_queues_than_before_gets_its_messages(box: Box) -> None:
    box.send(b"x", queue_id=1, DELAY="1")
    box.make_topic(queues=1)
    box.pass_ms(1_000)
    assert box.bodies() == [b"x"]


def test_a_full_disk_keeps_what_is_due_until_there_is_room() -> None:
    box = Box(flush="sync")
    box.make_topic()
    for number in range(5):
        box.send(b"level %d" % number, DELAY="1")
        box.send(b"timer %d" % number, TIMER_DELAY_MS="1000")
    box.disk.files.fail("pwritev", error=errno.ENOSPC)
    box.pass_ms(1_000)
    assert box.bodies() == []
    assert box.core.delays.waiting_timers == 5
    box.pass_ms(50)
    assert sorted(box.bodies()) == sorted(
        b"%s %d" % (kind, number) for kind in (b"level", b"timer") for number in range(5)
    )
    box.crash()
    box.pass_ms(5_000)
    assert len(box.bodies()) == 10


def test_entries_that_are_on_the_disk_only_are_read_away_from_the_loop() -> None:
    steps = Steps()
    box = Box(steps)
    steps.run_all()
    box.make_topic()
    steps.run_all()
    for number in range(10):
        box.send(b"%d" % number, DELAY="1")
    box.core.end_turn()
    box.disk.close()
    box.open()
    steps.run_all()
    path = "/store/commitlog/00000000000000000000"
    box.disk.files.cold(path, 0, 1 << 20)
    box.core.store.reader.hot_bytes = 0
    box.pass_ms(1_000)
    assert box.bodies() == [], "nobody waits for the disk"
    for _ in range(4):
        steps.run_all()
        box.tick()
    assert len(box.bodies()) == 10


# ---------------------------------------------------------------------------------------- progress


def test_progress_is_noted_in_rocketmqs_table_and_a_start_goes_on_from_it(box: Box) -> None:
    for number in range(3):
        box.send(b"%d" % number, DELAY="2")
        box.send(b"t%d" % number, TIMER_DELAY_MS=str(4_000 + 1_000 * number))
    box.pass_ms(5_000)
    box.pass_ms(1_000)
    assert box.core.store.table("delay") == {"2": 3}
    assert len(box.bodies()) == 6
    box.stop_and_start()
    box.pass_ms(10_000)
    assert len(box.bodies()) == 6
    content = orjson.loads(box.disk.files.read("/store/config/delayOffset.json", 1 << 20))
    assert content["offsetTable"] == {"2": 3}


def test_a_killed_broker_delivers_nothing_twice_though_it_noted_nothing(box: Box) -> None:
    for number in range(5):
        box.send(b"%d" % number, DELAY="1")
        box.send(b"t%d" % number, TIMER_DELAY_MS="1000")
    box.pass_ms(1_000)
    assert len(box.bodies()) == 10
    box.crash(KeepAll())
    assert (box.core.delays.waiting_timers, box.core.delays.waiting_levels) == (0, 0)
    box.send(b"more", TIMER_DELAY_MS="3000")
    box.pass_ms(3_000)
    box.crash(KeepAll())
    box.pass_ms(60_000)
    assert len(box.bodies()) == 11


def test_a_broker_without_delayed_messages_notes_nothing(box: Box) -> None:
    before = box.core.store.log.end
    box.pass_ms(1_000, steps=5)
    assert box.core.store.log.end == before


def test_the_walk_after_a_start_stays_short() -> None:
    box = Box(segment_bytes=4 << 20)
    box.make_topic()
    box.send(b"waits", DELAY="18")
    box.pass_ms(1_100)
    for _ in range(20):
        box.send(bytes(1 << 20))
        box.pass_ms(1_100)
    assert box.core.store.log.end - box.core.delays.progress.at <= (17 << 20) + (1 << 16)


def test_held_pulls_are_woken_when_a_message_has_become_readable(box: Box) -> None:
    woken: list[list[bytes]] = []

    def resume(timed_out: bool) -> None:
        assert not timed_out
        woken.append(box.bodies())

    box.send(b"x", DELAY="1", TAGS="a")
    for wants in (None, lambda code: code == records.java_hash(b"a"), lambda code: code == 7):
        read = HeldRead((TOPIC, 0), BEGIN_MS + 60_000, wants, resume, object())
        box.core.polls.hold(read)
    box.pass_ms(999)
    assert woken == []
    box.pass_ms(1)
    assert woken == [[b"x"], [b"x"]]


def test_lateness_is_measured(box: Box) -> None:
    box.send(b"x", TIMER_DELAY_MS="1000")
    box.pass_ms(1_250)
    assert box.core.delays.fired == 1
    assert box.core.delays.lateness.total_ns == 250_000_000


def test_what_is_due_when_it_comes_was_not_stored_when_the_turn_began(box: Box) -> None:
    box.stage(b"first of the turn")
    due_ms = box.disk.now_ms + 3
    box.disk.now_ms = due_ms
    box.stage(b"due", TIMER_DELIVER_MS=str(due_ms))
    box.settle()
    first, due = box.entries()
    assert first.store_ms < due.store_ms == due_ms


def test_a_level_counts_from_the_moment_of_the_send_not_from_the_turns_beginning(box: Box) -> None:
    box.stage(b"first")
    box.disk.now_ms += 30
    box.send(b"late", DELAY="1")
    box.disk.now_ms = BEGIN_MS + 1_029
    box.tick()
    assert box.bodies() == [b"first"]
    box.pass_ms(1)
    assert box.bodies() == [b"first", b"late"]


def test_no_entry_says_that_it_was_stored_before_it_was_due(box: Box) -> None:
    box.send(b"timed", TIMER_DELAY_MS="100")
    box.pass_ms(90)
    box.stage(b"the turn begins before")
    box.disk.now_ms += 10
    box.tick()
    times = {bytes(entry.body): entry.store_ms for entry in box.entries()}
    assert times[b"timed"] == BEGIN_MS + 100
