"""Apache's Java and Go clients ask Sluice to deliver later: when it does, what is taken back, what
is refused, and what becomes of it when the broker is killed.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from bench.rocketmq_programs import TIMER_PRODUCER, Load, Program, Programs, RunningLoad
from peers import Jars
from sluice.config import StoreConfig
from tests.interop.clients import STOP_TIMEOUT_S, Clients, Event, JavaClients, kind
from tests.interop.sluice_process import SluiceProcess, make_topic
from tests.unit.client.admin_kit import sluice as run_sluice

WAIT_S = 240.0
LEVELS_MS = StoreConfig().delay_levels_ms


@pytest.fixture(scope="module")
def sluice(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SluiceProcess]:
    with SluiceProcess(tmp_path_factory.mktemp("delays")) as process:
        yield process


def options(sluice: SluiceProcess, topic: str, group: str, sends: Sequence[str]) -> list[str]:
    words = ["--namesrv", sluice.nameserver_address, "--topic", topic]
    if group:
        words += ["--group", group]
    return [*words, *(word for send in sends for word in ("--send", send))]


def waiting(sluice: SluiceProcess, topic: str) -> list[dict[str, Any]]:
    """What `sluice admin delayed` shows."""
    words = ("-n", sluice.nameserver_address, "-t", topic, "-m", "100000", "--json")
    done = run_sluice("admin", "delayed", *words)
    assert done.status == 0, done
    rows: list[dict[str, Any]] = json.loads(done.out)["messages"]
    return rows


def least_ms(send: str) -> int:
    """How much later than it was sent a message may come at the earliest."""
    _, kind_of, value = send.split(":")
    if kind_of == "level":
        return LEVELS_MS[min(int(value), len(LEVELS_MS)) - 1]
    return int(value) * (1000 if kind_of == "sec" else 1)


def check_times(events: Sequence[Event], sends: Sequence[str]) -> None:
    """Everything came once, and nothing too early."""
    sent = {event["id"]: event["atMs"] for event in kind(events, "sent")}
    received = {event["id"]: event["atMs"] for event in kind(events, "received")}
    assert len(kind(events, "received")) == len(received), "nothing came twice"
    for send in sends:
        identity = send.split(":")[0]
        assert received[identity] - sent[identity] >= least_ms(send), send


def test_java_messages_come_when_they_are_due_and_not_what_was_taken_back(
    java_clients: JavaClients, sluice: SluiceProcess
) -> None:
    topic = "Later-java"
    make_topic(sluice.broker_address, topic, 2)
    later = ["one:level:1", "two:sec:1", "three:ms:700", "four:at:1234", "five:level:2"]
    at_once = ["past:at:-5000", "zero:level:0"]
    back = ["six:back-sec:5", "seven:back-ms:5000", "eight:back-at:5500"]
    bad = ["far:sec:3456100", "never:ms:-5", "deep:level:-1"]
    long = ["high:level:99", "days:sec:3400000"]
    last = ["last:ms:7000"]  # later than those that were taken back would be
    sends = [*later, *back, *at_once, *bad, *long, *last]
    with java_clients.started("Delays", *options(sluice, topic, "delays", sends)) as program:
        program.wait_for("ready", 1, WAIT_S)
        program.wait_for("received", len(later + at_once + last), WAIT_S)
        events = program.stop(STOP_TIMEOUT_S)
    check_times(events, [*later, *last])
    received = {event["id"]: event for event in kind(events, "received")}
    assert sorted(received) == sorted(s.split(":")[0] for s in [*later, *at_once, *last])
    ids = {event["id"]: event["msgId"] for event in kind(events, "sent")}
    recalled = {event["id"]: event["msgId"] for event in kind(events, "recalled")}
    assert recalled == {name: ids[name] for name in ("six", "seven", "eight")}
    refused = {event["id"]: (event["code"], event["reason"]) for event in kind(events, "refused")}
    assert {name: code for name, (code, _) in refused.items()} == {
        "far": 13, "never": 13, "deep": 13,
    }  # fmt: skip
    assert "the limit is 3456000 s" in refused["far"][1]
    handles = {event["id"]: event["handle"] for event in kind(events, "sent")}
    assert handles["two"]
    assert not handles["one"], "only what is timed can be taken back"
    assert received["two"]["properties"]["TIMER_DELAY_SEC"] == "1"
    assert received["one"]["properties"]["DELAY"] == "1"
    rows = waiting(sluice, topic)
    assert [(row["keys"], row["delayLevel"]) for row in rows] == [("high", 18), ("days", 0)]


def test_go_messages_come_when_they_are_due(go_clients: Clients, sluice: SluiceProcess) -> None:
    topic = "Later-go"
    make_topic(sluice.broker_address, topic, 2)
    sends = ["one:level:1", "five:level:2", "first:level:1"]
    arguments = options(sluice, topic, "go-delays", sends)
    with go_clients.started("Delays", *arguments) as program:
        program.wait_for("ready", 1, WAIT_S)
        program.wait_for("received", len(sends), WAIT_S)
        events = program.stop(STOP_TIMEOUT_S)
    check_times(events, sends)


def test_a_killed_broker_delivers_what_is_overdue_in_order_of_its_time(
    java_clients: JavaClients, tmp_path: Path
) -> None:
    topic = "Killed"
    with SluiceProcess(tmp_path / "sluice") as sluice:
        make_topic(sluice.broker_address, topic, 1)
        sends = ["d:at:1700", "c:level:1", "b:at:900", "e:sec:3", "x:back-sec:2", "a:ms:500"]
        with java_clients.started("Delays", *options(sluice, topic, "", sends)) as program:
            sent = kind(program.finish(WAIT_S), "sent")
            sluice.kill()
        while time.time() * 1000 < max(event["atMs"] for event in sent) + 3_000:
            time.sleep(0.05)
        sluice.start()
        with java_clients.started("Delays", *options(sluice, topic, "after", [])) as program:
            program.wait_for("ready", 1, WAIT_S)
            program.wait_for("received", 5, WAIT_S)
            events = program.stop(STOP_TIMEOUT_S)
        received = sorted(kind(events, "received"), key=lambda event: event["queueOffset"])
        order = [event["id"] for event in received]
        times = {event["id"]: event["atMs"] for event in sent}
        due = {send.split(":")[0]: times[send.split(":")[0]] + least_ms(send)
               for send in sends if "back" not in send}  # fmt: skip
        # Levels count from the store's time, a little after the client's.
        assert sorted(order) == sorted(due)
        assert [name for name in order if name != "c"] == sorted(
            due.keys() - {"c"}, key=due.__getitem__
        )


def failed_count(running: RunningLoad) -> int:
    """Sends that got no answer in time, as a busy machine has them; anything else is an error."""
    output = running.output()
    assert "Exception" not in output, output
    return max((report.failed for report in running.reports()), default=0)


TIMER_CONSUMER = Program("timer.TimerConsumer", "Consume TPS", (), reports_each_second=False)


def test_rocketmqs_own_timer_producer_finds_nothing_wrong(
    rocketmq_jars: Jars, sluice: SluiceProcess, tmp_path: Path
) -> None:
    """It sends what is due from two minutes on; see the other test for what comes then."""
    topic = "BenchmarkTimers"
    make_topic(sluice.broker_address, topic, 4)
    load = Load("delays", TIMER_PRODUCER, ("-tc", "2", "-st", "10", "-mt", "20", "-ms", "100"))
    with Programs(tmp_path, rocketmq_jars).running(
        load, sluice.nameserver_address, topic
    ) as running:
        deadline = time.monotonic() + WAIT_S
        while len(rows := waiting(sluice, topic)) < 400 - failed_count(running):
            assert time.monotonic() < deadline, running.output()
            time.sleep(0.1)
    assert len({row["dueTimestamp"] for row in rows}) == 10, "ten seconds have 40 each"


@pytest.mark.soak
def test_rocketmqs_own_timer_programs_find_nothing_wrong(
    rocketmq_jars: Jars, tmp_path: Path
) -> None:
    topic = "BenchmarkTimers"
    with SluiceProcess(tmp_path / "sluice") as sluice:
        make_topic(sluice.broker_address, topic, 4)
        programs = Programs(tmp_path / "programs", rocketmq_jars)
        options_of = ("-tc", "2", "-st", "20", "-mt", "100", "-ms", "100")
        producing = Load("delays", TIMER_PRODUCER, options_of)
        consuming = Load("delays", TIMER_CONSUMER, ())
        where = (sluice.nameserver_address, topic)
        with programs.running(consuming, *where) as consumer:
            with programs.running(producing, *where) as producer:
                deadline = time.monotonic() + 240
                while len(waiting(sluice, topic)) < 4_000 - failed_count(producer):
                    assert time.monotonic() < deadline, producer.output()
                    time.sleep(0.2)
            while not any(report.rate > 0 for report in consumer.reports()):
                assert time.monotonic() < deadline, consumer.output()
                time.sleep(0.2)
            while waiting(sluice, topic):
                assert time.monotonic() < deadline
                time.sleep(0.2)
            assert "delayedDuration: -" not in consumer.output(), "early"
