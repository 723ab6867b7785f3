"""Messages that Apache's Java and Go clients fail with, on Sluice: when they come again, how often,
and what becomes of those that were given up.
"""

from __future__ import annotations

import json
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import orjson
import pytest

from peers import JavaPrograms, RunningProgram
from peers.rocketmq import BROKER
from sluice.protocol.remoting_codes import RequestCode as Request
from tests.interop.clients import JAVA_OPTIONS, JAVA_SOURCES, Event, kind
from tests.interop.sluice_process import Question, SluiceProcess, done, make_topic
from tests.unit.client.admin_kit import sluice as run_sluice

WAIT_S = 240.0
DEAD = 99  # fails whenever it comes


@pytest.fixture
def sluice(tmp_path: Path) -> Iterator[SluiceProcess]:
    with SluiceProcess(tmp_path / "sluice") as process:
        yield process


def make_group(sluice: SluiceProcess, group: str, **members: object) -> None:
    body = orjson.dumps({"groupName": group, **members})
    done(sluice.broker_address, Question(Request.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP, {}, body))


def end_of(sluice: SluiceProcess, topic: str, queue_id: int = 0) -> int:
    fields = {"topic": topic, "queueId": str(queue_id)}
    return int(done(sluice.broker_address, Question(Request.GET_MAX_OFFSET, fields))["offset"])


def admin(sluice: SluiceProcess, *words: str) -> Any:
    shown_by = run_sluice("admin", *words, "-n", sluice.nameserver_address, "--json")
    assert shown_by.status == 0, shown_by
    return json.loads(shown_by.out)


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.1)


class Failing:
    """Runs of the program Failing, and what its consumers were given."""

    def __init__(self, programs: JavaPrograms, sluice: SluiceProcess) -> None:
        self._programs = programs
        self._sluice = sluice
        self.readers: list[str] = []
        self.messages: list[str] = []

    def reader(
        self, group: str, topic: str, *, mode: str = "push", most: int = -1, level: int = 0
    ) -> None:
        self.readers += ["--reader", f"{mode}:{group}:{topic}:{most}:{level}"]

    def message(self, topic: str, name: str, rule: str, count: int) -> None:
        self.messages += ["--send", f"{topic}:{name}:{rule}:{count}"]

    def started(self, *, with_messages: bool = True) -> Any:
        sends = [*self.messages, "--broker", BROKER] if with_messages else []
        return self._programs.started(
            "Failing", "--namesrv", self._sluice.nameserver_address, *self.readers, *sends
        )


def by_group(program: RunningProgram) -> dict[str, list[Event]]:
    found: dict[str, list[Event]] = defaultdict(list)
    for row in kind(program.events(), "received"):
        found[row["group"]].append(row)
    return found


def tries(rows: list[Event]) -> list[int]:
    return [row["times"] for row in rows]


def check_waits(rows: list[Event], *least_ms: int) -> None:
    """Every try was stored for its topic no earlier than its time after the one that failed."""
    for (before, after), wait_ms in zip(pairwise(rows), least_ms, strict=True):
        assert after["storeMs"] - before["nowMs"] >= wait_ms


@pytest.fixture
def failing(rocketmq_jars: Any, tmp_path: Path, sluice: SluiceProcess) -> Failing:
    programs = JavaPrograms(
        JAVA_SOURCES, rocketmq_jars, home=tmp_path / "java", options=JAVA_OPTIONS
    )
    return Failing(programs, sluice)


def letters_of(sluice: SluiceProcess, group: str) -> list[dict[str, Any]]:
    shown_by = run_sluice(
        "admin", "deadLetters", "-g", group, "-n", sluice.nameserver_address, "--json"
    )
    return json.loads(shown_by.out)["deadLetters"] if shown_by.status == 0 else []


def test_java_retries_and_dead_letters(sluice: SluiceProcess, failing: Failing) -> None:
    rules = {
        "levels": ("times", 2),
        "default": ("times", 1),
        "most": ("times", DEAD),
        "given-up": ("deliveries", 1),
        "of-group": ("times", DEAD),
        "own-times": ("times", 2),
        "in-order": ("times", DEAD),
    }
    for group, (rule, count) in rules.items():
        make_topic(sluice.broker_address, f"t-{group}", 1)
        failing.message(f"t-{group}", f"m-{group}", rule, count)
    failing.message("t-in-order", "m-next", "times", 0)
    make_group(sluice, "of-group", retryMaxTimes=1)
    own = {"type": "CUSTOMIZED", "customizedRetryPolicy": {"next": [1, 1, 300, 1_200]}}
    make_group(sluice, "own-times", groupRetryPolicy=own)
    failing.reader("levels", "t-levels", level=1)
    failing.reader("default", "t-default")
    failing.reader("most", "t-most", most=2, level=1)
    failing.reader("given-up", "t-given-up", level=-1)
    failing.reader("of-group", "t-of-group", level=1)
    failing.reader("own-times", "t-own-times")
    failing.reader("in-order", "t-in-order", mode="orderly", most=2)
    with failing.started() as program:
        program.wait_for("ready", 1, WAIT_S)
        dead = ("most", "given-up", "of-group", "in-order")
        until(lambda: all(letters_of(sluice, group) for group in dead))

        def sent_again() -> bool:
            return len(by_group(program)["given-up"]) == 2

        outcome = admin(sluice, "resendDeadLetters", "-g", "given-up", "--all")
        assert outcome["counts"] == {"resent": 1}
        until(sent_again)
        assert admin(sluice, "resendDeadLetters", "-g", "given-up", "--all")["outcomes"] == []
        until(lambda: tries(by_group(program)["default"]) == [0, 1])
        until(lambda: tries(by_group(program)["own-times"]) == [0, 1, 2])
        program.stop(WAIT_S)
    rows = by_group(program)
    assert tries(rows["levels"]) == [0, 1, 2]
    check_waits(rows["levels"], 1_000, 1_000)
    check_waits(rows["default"], 10_000)
    check_waits(rows["own-times"], 300, 1_200)
    assert tries(rows["most"]) == [0, 1, 2]
    assert tries(rows["of-group"]) == [0, 1]
    assert tries(rows["given-up"]) == [0, 0]
    assert [row["id"] for row in rows["in-order"]] == ["m-in-order"] * 3 + ["m-next"]
    for group, received in rows.items():
        assert {row["topic"] for row in received} == {f"t-{group}"}, "as it was sent"
        assert len({row["msgId"] for row in received if row["id"] != "m-next"}) == 1
    for group in dead:
        (letter,) = letters_of(sluice, group)
        assert (letter["originTopic"], letter["keys"]) == (f"t-{group}", f"m-{group}")
        assert (letter["originQueueId"], letter["originOffset"]) == (0, 0)
        assert letter["uniqKey"] == rows[group][0]["msgId"]


def test_java_consumer_that_is_killed_before_its_offset_is_committed(
    sluice: SluiceProcess, failing: Failing
) -> None:
    count = 30
    make_topic(sluice.broker_address, "orders", 1)
    names = [f"m-{number}" for number in range(count)]
    for name in names:
        failing.message("orders", name, "times", 1)
    failing.reader("billing", "orders", level=3)
    level_queue = 2
    with failing.started() as program:
        until(lambda: end_of(sluice, "SCHEDULE_TOPIC_XXXX", level_queue) == count)
        program.kill()  # everything was sent back, no offset was committed
    first = by_group(program)["billing"]
    assert sorted(row["id"] for row in first) == sorted(names)
    sluice.kill()
    sluice.start()
    with failing.started(with_messages=False) as program:

        def failed_again() -> bool:
            rows = by_group(program)["billing"]
            return len({row["id"] for row in rows if row["times"] == 0}) == count

        until(failed_again)
        until(lambda: sum(row["times"] > 0 for row in by_group(program)["billing"]) >= count)
        program.stop(WAIT_S)
    rows = by_group(program)["billing"]
    assert sorted(row["id"] for row in rows if row["times"] == 1) == sorted(names)
    assert end_of(sluice, "SCHEDULE_TOPIC_XXXX", level_queue) == count
    assert end_of(sluice, "%RETRY%billing") == count
