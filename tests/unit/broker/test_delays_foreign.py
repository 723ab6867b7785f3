"""Timers that Apache's broker left behind: what it delivered, wrote anew, or was told to forget."""

from __future__ import annotations

from sluice.broker.topics import TIMER_TOPIC
from sluice.model import Message
from sluice.storage.memory_files import KeepAll
from tests.unit.broker.delay_kit import TOPIC, Box
from tests.unit.storage.store_kit import BEGIN_MS

CHECK = "/store/config/timercheck"


def put(box: Box, body: bytes, due_ms: int, unique: str, **more: str) -> None:
    """An entry as Apache's broker writes it: without an origin."""
    texts = {
        "UNIQ_KEY": unique,
        "TIMER_OUT_MS": str(BEGIN_MS + due_ms),
        "REAL_TOPIC": TOPIC,
        "REAL_QID": "0",
        **more,
    }
    properties = "".join(f"{name}\x01{value}\x02" for name, value in texts.items())
    box.core.append(Message(TIMER_TOPIC, 0, body, properties.encode()))
    box.settle()


def start_after_apache(box: Box, read_to_ms: int) -> None:
    box.core.end_turn()
    box.disk.close()
    read_to = (BEGIN_MS + read_to_ms).to_bytes(8, "big", signed=True)
    box.disk.files.replace(CHECK, read_to + bytes(4088))
    box.open()


def test_what_apache_delivered_stays_delivered_and_the_rest_comes_once() -> None:
    box = Box()
    box.make_topic()
    put(box, b"delivered", 1_000, "u1")
    put(box, b"not yet", 5_000, "u2")
    put(box, b"rolled", 9_000, "u3")
    put(box, b"rolled", 9_000, "u3", TIMER_ROLL_TIMES="1")
    put(box, b"rolled", 9_000, "u3", TIMER_ROLL_TIMES="2")
    put(box, b"sent twice", 9_000, "u4")
    put(box, b"sent twice", 9_000, "u4")
    put(box, b"taken back", 9_000, "u5")
    put(box, b"0", 9_000, "u5", TIMER_DEL_UNIQKEY="u5")
    put(box, b"taken back too", 9_000, "u6")
    put(box, b"0", 9_000, "u6", TIMER_DEL_UNIQKEY=f"{TOPIC}+u6")
    start_after_apache(box, 2_000)
    assert box.core.delays.waiting_timers == 4
    box.disk.now_ms = BEGIN_MS + 5_000
    box.tick()
    assert box.bodies() == [b"not yet"]
    box.pass_ms(1_100)
    # It is known at every later start, too, which of them are Apache's.
    box.crash(KeepAll())
    box.stop_and_start()
    assert box.core.delays.waiting_timers == 3
    box.send(b"ours", TIMER_DELAY_MS="10000")
    box.disk.now_ms = BEGIN_MS + 9_000
    box.tick()
    expected = [b"not yet", b"rolled", b"sent twice", b"sent twice"]
    assert sorted(box.bodies()) == sorted(expected)
    box.pass_ms(60_000)
    box.crash(KeepAll())
    box.pass_ms(60_000)
    assert sorted(box.bodies()) == sorted([*expected, b"ours"])


def test_a_timer_that_says_no_time_is_left_out() -> None:
    box = Box()
    box.make_topic()
    put(box, b"good", 5_000, "u1")
    box.core.append(Message(TIMER_TOPIC, 0, b"bad", b"REAL_TOPIC\x01orders\x02REAL_QID\x010\x02"))
    start_after_apache(box, 1_000)
    assert box.core.delays.waiting_timers == 1
    box.pass_ms(5_000)
    assert box.bodies() == [b"good"]
