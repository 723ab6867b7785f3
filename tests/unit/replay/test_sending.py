"""This module tests the loop of a replay on time that only the test moves."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

import numpy as np
import pytest

from sluice.client.core.messages import Message
from sluice.errors import SendFailed
from sluice.protocol.json_members import MessageQueue
from sluice.replay.blocks import Row, Window
from sluice.replay.lanes import KeyTemplate, Shape
from sluice.replay.pacing import Schedule
from sluice.replay.sending import Limits, Replayer, Route
from sluice.replay.texts import Pace, read_curve, read_speed
from tests.unit.replay.replay_kit import START_MS, VirtualTime

TICK = 0.0021  # what is due within two milliseconds may go together


class Broker:
    """Remembers when it got what; slow, or failing, as a test wants it."""

    def __init__(self, time: VirtualTime, *, seconds: float = 0.0, bad: str = "") -> None:
        self._time = time
        self._seconds = seconds
        self._bad = bad
        self.got: list[tuple[float, int, bytes, str]] = []
        self.batches: list[int] = []
        self.under_way: dict[int, int] = {}
        self.under_way_max = 0
        self.open = 0
        self.open_max = 0

    async def send(self, queue: MessageQueue, messages: list[Message]) -> None:
        number = queue.queue_id
        self.under_way[number] = self.under_way.get(number, 0) + 1
        self.under_way_max = max(self.under_way_max, self.under_way[number])
        self.open += len(messages)
        self.open_max = max(self.open_max, self.open)
        begun = self._time.now()
        if self._seconds:
            await self._time.pause(self._seconds)
        self.under_way[number] -= 1
        self.open -= len(messages)
        if self._bad and any(self._bad.encode() in bytes(each.body) for each in messages):
            raise SendFailed("this one is refused")
        self.batches.append(len(messages))
        self.got += [(begun, number, bytes(each.body), each.keys) for each in messages]

    def bodies(self, number: int | None = None) -> list[bytes]:
        return [body for _, queue, body, _ in self.got if number in (None, queue)]


def window(*given: tuple[int, int]) -> Window:
    """Messages of (queue, milliseconds since the start); bodies say queue and number."""
    rows = [
        Row(queue, number, 20, (), f"k{number}", None, 0, f"{queue}/{number}".encode())
        for number, (queue, _) in enumerate(given)
    ]
    return Window(np.array([START_MS + time for _, time in given], np.int64), rows)


class Case:
    """A replay of windows on virtual time."""

    def __init__(
        self,
        pace: Pace,
        windows: Sequence[Window],
        broker: dict[str, Any] | None = None,
        limits: Limits | None = None,
        template: KeyTemplate | None = None,
        copies: int = 1,
    ) -> None:
        self.time = VirtualTime()
        self.broker = Broker(self.time, **(broker or {}))
        self._windows = windows
        queues = {row.queue for each in windows for row in each.rows}
        routes = {
            number: Route("orders", MessageQueue("lane", "broker-a", number)) for number in queues
        }
        self.replayer = Replayer(
            self.broker,
            Schedule(pace, START_MS, copies),
            routes,
            Shape(template, {}),
            limits or Limits(),
            copies=copies,
            now=self.time.now,
            pause=self.time.pause,
        )
        self.begun = self.time.now()

    async def _all(self) -> AsyncIterator[Window]:
        for each in self._windows:
            yield each

    def run(self) -> Case:
        self.time.run(self.replayer.run(self._all()))
        return self

    def times(self) -> list[float]:
        return [time - self.begun for time, *_ in self.broker.got]


@pytest.mark.parametrize(("speed", "factor"), [("1x", 1.0), ("5x", 5.0), ("0.5x", 0.5)])
def test_true_spacing(speed: str, factor: float) -> None:
    times = [0, 3, 250, 251, 1000, 4000, 4000, 9500]
    case = Case(read_speed("--speed", speed), [window(*((0, time) for time in times))]).run()
    for wanted, sent in zip(times, case.times(), strict=True):
        assert 0 <= sent - wanted / 1000 / factor <= TICK
    assert case.replayer.why == ""
    assert case.replayer.progress.sent == case.replayer.progress.due == 8


def test_a_curve() -> None:
    """1x to 3x within 10 s: after w seconds w + w * w / 10 of the recording are over."""
    pace = read_curve("--curve", "0s:1x,10s:3x")
    case = Case(pace, [window((0, 0), (1, 1100), (0, 7500)), window((1, 20_000), (0, 23_000))])
    for wanted, sent in zip([0, 1, 5, 10, 11], case.run().times(), strict=True):
        assert 0 <= sent - wanted <= TICK


def test_as_fast_as_it_goes_in_large_batches() -> None:
    given = window(*((0, 1000 * index) for index in range(5000)))
    case = Case(read_speed("--speed", "max"), [given], {"seconds": 0.01}).run()
    assert case.broker.bodies() == [b"0/%d" % index for index in range(5000)]
    assert max(case.broker.batches) > 100
    assert len(case.broker.batches) < 30


def test_the_order_of_a_queue_holds_with_one_batch_under_way() -> None:
    given = [(index % 3, index) for index in range(300)]
    case = Case(read_speed("--speed", "100x"), [window(*given)], {"seconds": 0.05}).run()
    assert case.broker.under_way_max == 1
    for queue in range(3):
        numbers = [index for index in range(300) if index % 3 == queue]
        assert case.broker.bodies(queue) == [b"%d/%d" % (queue, index) for index in numbers]


def test_what_has_no_answer_is_bounded_and_lateness_is_told() -> None:
    given = window(*((0, index) for index in range(200)))
    limits = Limits(waiting_max=10)
    case = Case(read_speed("--speed", "1x"), [given], {"seconds": 0.1}, limits).run()
    assert case.broker.open_max <= 10
    assert len(case.broker.got) == 200
    total = case.replayer.series.total()
    assert total.late_ms > 1000
    assert (total.wanted, total.sent) == (200, 200)
    assert [each.wanted for each in case.replayer.series.intervals][:2] == [200, 0]


def test_wanted_and_reached_are_counted_in_their_seconds() -> None:
    given = window((0, 0), (0, 500), (0, 1000), (0, 2900))
    series = Case(read_speed("--speed", "1x"), [given]).run().replayer.series
    assert [(each.wanted, each.sent) for each in series.intervals] == [(2, 2), (1, 1), (1, 1)]
    assert series.total().answers.highest_ms == 0


def test_copies_follow_each_other_with_keys_of_their_own() -> None:
    case = Case(
        read_speed("--speed", "1x"),
        [window((0, 0), (0, 5))],
        template=KeyTemplate("{key}-{copy}"),
        copies=3,
    ).run()
    assert [key for *_, key in case.broker.got] == ["k0-0", "k0-1", "k0-2", "k1-0", "k1-1", "k1-2"]
    assert case.replayer.progress.sent == 6


def test_messages_without_a_body_are_sent_and_counted() -> None:
    given = window((0, 0), (0, 1))
    given.rows[0] = given.rows[0]._replace(body=b"")
    case = Case(read_speed("--speed", "1x"), [given]).run()
    assert case.broker.bodies() == [b"", b"0/1"]
    assert (case.replayer.progress.empty, case.replayer.progress.sent) == (1, 2)


def test_a_failure_is_counted_and_what_follows_is_sent() -> None:
    given = window(*((0, 10 * index) for index in range(10)))
    limits = Limits(stop_errors=None)
    case = Case(read_speed("--speed", "1x"), [given], {"bad": "/4"}, limits).run()
    progress = case.replayer.progress
    assert progress.failed >= 1
    assert progress.sent == 10 - progress.failed
    assert b"0/4" not in case.broker.bodies()
    assert case.broker.bodies()[-1] == b"0/9"
    assert dict(case.replayer.reasons) == {"SendFailed: this one is refused": progress.failed}
    assert case.replayer.why == ""


def test_too_many_errors_end_it() -> None:
    given = window(*((0, 10 * index) for index in range(10_000)))
    case = Case(read_speed("--speed", "1x"), [given], {"bad": "0/"}, Limits(stop_errors=0.01)).run()
    assert case.replayer.why == "100.0% of the sends failed"
    assert case.replayer.progress.seconds < 2
    assert case.replayer.progress.failed < 200


def test_lag_ends_it_where_that_is_wanted() -> None:
    given = window(*((0, index) for index in range(5000)))
    limits = Limits(waiting_max=5, stop_late_seconds=1.0)
    case = Case(read_speed("--speed", "1x"), [given], {"seconds": 0.1}, limits).run()
    assert "late" in case.replayer.why
    assert 1 < case.replayer.progress.late_seconds < 2
    assert case.replayer.progress.sent < 5000


def test_a_signal_ends_it_after_what_is_under_way() -> None:
    given = window(*((0, 1000 * index) for index in range(100)))
    case = Case(read_speed("--speed", "1x"), [given], {"seconds": 0.5})

    async def run() -> None:
        await case.replayer.run(case._all())

    async def stop() -> None:
        await case.time.pause(10.2)
        case.replayer.stop("interrupted")

    async def both() -> None:
        await asyncio.gather(run(), stop())

    case.time.run(both())
    assert case.replayer.why == "interrupted"
    assert case.replayer.progress.sent == 11  # the last was under way and is answered
    assert case.broker.open == 0


def test_a_fault_that_is_no_failed_send_ends_it_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(read_speed("--speed", "1x"), [window((0, 0), (0, 3_600_000))])

    async def broken(queue: MessageQueue, messages: list[Message]) -> None:
        raise RuntimeError("a fault of ours")

    monkeypatch.setattr(case.broker, "send", broken)
    with pytest.raises(RuntimeError, match="a fault of ours"):
        case.run()
    assert case.replayer.progress.seconds < 2


def test_two_recorded_queues_may_share_one() -> None:
    """Where the lane has fewer queues: all goes through one line, in the order of times."""
    time = VirtualTime()
    broker = Broker(time)
    target = MessageQueue("lane", "broker-a", 0)
    replayer = Replayer(
        broker,
        Schedule(read_speed("--speed", "1x"), START_MS),
        {0: Route("orders", target), 1: Route("orders", target)},
        Shape(None, {}),
        Limits(),
        now=time.now,
        pause=time.pause,
    )

    async def windows() -> AsyncIterator[Window]:
        yield window((0, 0), (1, 5), (0, 10), (1, 15))

    time.run(replayer.run(windows()))
    assert broker.bodies(0) == [b"0/0", b"1/1", b"0/2", b"1/3"]
