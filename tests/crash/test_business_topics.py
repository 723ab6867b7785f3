"""Crashes at every step of what topics promise: keys, ends of lives, offsets of queues in memory.

One run of a broker whose disk does its work step by step. After every step the power goes, in
several ways, a broker starts on what is left, and what senders were told until then must hold.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import pytest

from sluice.broker.half_messages import Ending
from sluice.errors import Busy, SluiceError
from sluice.protocol import records
from sluice.storage.background import Steps
from sluice.storage.memory_files import (
    KeepAll,
    KeepNothing,
    KeepPolicy,
    KeepPrefix,
    KeepRandom,
    MemoryFiles,
)
from tests.unit.broker.topic_kit import Outcome, TopicBroker

WINDOW_MS = 600_000
TTL_MS = 5_000
HALF = {"TRAN_MSG": "true", "PGROUP": "senders"}
COMMIT, ROLLBACK = 8, 12


class Scenario:
    """A broker that is crashed again and again while it goes on, and what it has promised."""

    def __init__(self, policies: Callable[[MemoryFiles], Iterator[KeepPolicy]]) -> None:
        self._policies = policies
        self._steps = Steps()
        self.broker = TopicBroker(background=self._steps)
        self.sent: dict[str, Outcome] = {}
        self.kinds: dict[str, str] = {}  # by key: what was sent
        self.ended: dict[str, int] = {}  # by key: how a transaction was ended
        self.fleeting: list[Outcome] = []
        self.crashes = 0

    def run(self) -> None:
        broker = self.broker
        for topic, attributes in (
            ("once", {"dedup_window_ms": str(WINDOW_MS)}),
            ("timed", {"message_ttl_ms": str(TTL_MS)}),
            ("fleeting", {"storage": "memory"}),
        ):
            broker.make(topic, queues=1, **attributes)
            self._steps.run_all()
        for number in range(3):
            self._send("once", f"plain-{number}")
            self._send("once", f"late-{number}", "late", properties={"DELAY": "1"})
            self._send("once", f"half-{number}", "half", properties=HALF)
            self._send("once", f"gone-{number}", "half", properties=HALF)
            self._end(f"half-{number}", COMMIT)
            self._end(f"gone-{number}", ROLLBACK)
            broker.send("timed")
            self._go_on()
            self.fleeting.append(broker.send("fleeting"))
            self._go_on()
            broker.run(500)
            self._go_on()
        broker.run(2_000)
        self._go_on()

    def _send(self, topic: str, key: str, kind: str = "plain", **more: object) -> None:
        self.kinds[key] = kind
        self.sent[key] = self.broker.send(
            topic, key.encode(), KEYS=key, UNIQ_KEY=f"U-{key}", **more  # type: ignore[arg-type]
        )  # fmt: skip
        self._go_on()

    def _end(self, key: str, verdict: int) -> None:
        first = self.sent[key].first
        told: list[SluiceError | None] = []
        ending = Ending("senders", first.queue_offset, first.position, verdict, from_check=False)

        def done(error: SluiceError | None) -> None:
            told.append(error)
            if error is None:
                self.ended[key] = verdict

        self.broker.core.transactions.end(ending, done)
        self.broker.settle()
        self._go_on()
        assert told == [None]

    def _go_on(self) -> None:
        """The disk does what waits for it, and the power goes after each piece of it."""
        going = True
        while going:
            self._crash()
            going = False
            for lane in list(self._steps.waiting):
                if self._steps.step(lane):
                    going = True
                    self.broker.settle()
                    self._crash()

    # -------------------------------------------------------------------------------------- looking

    def _crash(self) -> None:
        files = self.broker.files
        for policy in self._policies(files):
            self.crashes += 1
            self._look(TopicBroker(files.crash(policy), now_ms=self.broker.now_ms))

    def _look(self, broker: TopicBroker) -> None:
        if broker.core.topics.get("fleeting") is None:
            return
        for key, outcome in self.sent.items():
            self._look_at_key(broker, key, outcome)
        for outcome in self.fleeting:
            if outcome.told:
                low = broker.core.store.min_offset("fleeting", 0)
                assert low > outcome.first.queue_offset
        for _ in range(4):
            broker.run(TTL_MS // 2)  # what waits for its time comes, what ends is over
        assert broker.bodies("timed") == []
        found = [records.property_value(e.properties, b"KEYS") for e in broker.stored("once")]
        assert len(found) == len(set(found)), "no key is there twice"
        for key, kind in self.kinds.items():
            # Whoever was not answered has sent it again: it is there.
            if kind != "half" or self.ended.get(key) == COMMIT:
                assert key.encode() in found, f"{key} is lost"

    def _look_at_key(self, broker: TopicBroker, key: str, outcome: Outcome) -> None:
        try:
            again = broker.send("once", b"again", KEYS=key, UNIQ_KEY="other").first
        except Busy:
            assert self.kinds[key] == "half", "only a transaction can be open"
            assert key not in self.ended, "what is ended is not open"
            return
        if not outcome.told or outcome.error is not None:
            return
        if key not in self.ended and self.kinds[key] == "half":
            return  # it may be committed or rolled back: the word was on its way
        is_same = again.position == outcome.first.position
        assert is_same == (self.ended.get(key) != ROLLBACK)


def nothing(files: MemoryFiles) -> Iterator[KeepPolicy]:
    yield KeepNothing()


def everything(files: MemoryFiles) -> Iterator[KeepPolicy]:
    yield KeepAll()


def torn(files: MemoryFiles) -> Iterator[KeepPolicy]:
    unsynced = files.unsynced_bytes()
    chance = random.Random(unsynced)
    yield KeepPrefix(chance.randrange(unsynced + 1))
    yield KeepRandom(chance)


@pytest.mark.parametrize("policies", [nothing, everything, torn])
def test_what_senders_were_told_holds_wherever_the_power_goes(
    policies: Callable[[MemoryFiles], Iterator[KeepPolicy]],
) -> None:
    scenario = Scenario(policies)
    scenario.run()
    assert scenario.crashes > 80
    assert all(outcome.told for outcome in scenario.sent.values())
    assert len(scenario.ended) == 6
