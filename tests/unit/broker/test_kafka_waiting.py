"""This module tests who of Kafka's fetches is asked again, and when."""

from __future__ import annotations

from collections.abc import Callable

from sluice.broker.kafka_waiting import KafkaWaiting, Waiter
from sluice.broker.long_polling import LongPolling

QUEUES = [("t", number) for number in range(4)]


class Waiting:
    """Fetches that wait, and a loop that is turned by hand."""

    def __init__(self, held_max: int = 100) -> None:
        self.polls = LongPolling(held_max, 10)
        self._soon: list[Callable[[], None]] = []
        self.waiting = KafkaWaiting(self.polls, self._soon.append)
        self.asked: list[tuple[str, bool]] = []

    def wait(self, name: str, *numbers: int, until_ms: int = 1000) -> tuple[Waiter, bool]:
        def look(timed_out: bool) -> None:
            self.asked.append((name, timed_out))

        waiter = Waiter([QUEUES[number] for number in numbers], until_ms, look)
        return waiter, self.waiting.wait(waiter)

    def turn(self) -> list[tuple[str, bool]]:
        """Who was asked again since the last turn."""
        soon, self._soon[:] = self._soon[:], []
        for call in soon:
            call()
        asked, self.asked = self.asked, []
        return asked


def test_a_message_wakes_who_waits_for_its_queue_once() -> None:
    rig = Waiting()
    rig.wait("both", 0, 1)
    rig.wait("one", 1)
    rig.polls.arrived(QUEUES[0], 0)
    rig.polls.arrived(QUEUES[1], 0)
    rig.polls.arrived(QUEUES[1], 0)
    assert rig.turn() == [("both", False), ("one", False)]
    rig.polls.arrived(QUEUES[1], 0)
    assert rig.turn() == []
    assert not rig.polls.is_awaited, "sends need not tell anybody"


def test_whose_time_is_over_is_asked_a_last_time() -> None:
    rig = Waiting()
    rig.wait("early", 0, until_ms=10)
    rig.wait("late", 0, until_ms=20)
    rig.waiting.tick(9)
    assert rig.turn() == []
    rig.waiting.tick(10)
    assert rig.turn() == [("early", True)]
    rig.polls.arrived(QUEUES[0], 0)
    assert rig.turn() == [("late", False)]
    rig.waiting.tick(1000)
    assert rig.turn() == []


def test_who_is_gone_is_not_asked() -> None:
    rig = Waiting()
    waiter, _ = rig.wait("gone", 0)
    rig.wait("there", 0)
    rig.waiting.drop(waiter)
    rig.polls.arrived(QUEUES[0], 0)
    assert rig.turn() == [("there", False)]


def test_there_is_room_for_so_many_and_no_more() -> None:
    rig = Waiting(held_max=1)
    assert rig.wait("first", 0)[1]
    assert rig.wait("same", 0)[1], "it waits with the first"
    assert not rig.wait("other", 0, 1)[1]
    rig.polls.arrived(QUEUES[0], 0)
    assert rig.turn() == [("first", False), ("same", False)]


def test_a_stop_asks_everybody() -> None:
    rig = Waiting()
    rig.wait("a", 0, 1)
    rig.polls.shut()
    assert rig.turn() == [("a", True)]
    assert not rig.wait("b", 0)[1]


def test_fetches_that_were_answered_do_not_pile_up() -> None:
    rig = Waiting()
    for _ in range(5000):
        rig.wait("busy", 0, until_ms=1 << 40)
        rig.polls.arrived(QUEUES[0], 0)
        assert rig.turn() == [("busy", False)]
    assert len(rig.waiting._deadlines) < 1500
