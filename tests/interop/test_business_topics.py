"""What a topic can be told to do, with Apache's Java client 5.5.0 and mqadmin: no message twice,
a time to live, messages in memory only, priorities.
"""

from __future__ import annotations

import base64
import contextlib
import json
import random
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from peers import Jars, JavaPrograms, RunningProgram
from peers.rocketmq import BROKER, CLUSTER
from tests.interop.clients import JAVA_OPTIONS, JAVA_SOURCES, Event, kind
from tests.interop.sluice_process import SluiceProcess
from tests.unit.client.admin_kit import sluice as run_sluice

WAIT_S = 240.0
RUN_S = 240.0
Told = dict[str, Event]
PLACE = ("offsetMsgId", "queueId", "queueOffset", "transactionId")


@pytest.fixture
def sluice(tmp_path: Path) -> Iterator[SluiceProcess]:
    with SluiceProcess(tmp_path / "sluice") as process:
        yield process


@pytest.fixture
def java(rocketmq_jars: Jars, tmp_path: Path) -> JavaPrograms:
    return JavaPrograms(JAVA_SOURCES, rocketmq_jars, home=tmp_path / "java", options=JAVA_OPTIONS)


class Features:
    """Runs of the program Features."""

    def __init__(self, programs: JavaPrograms, sluice: SluiceProcess) -> None:
        self._programs = programs
        self._words = ["--namesrv", sluice.nameserver_address, "--broker", BROKER]

    def send(self, *sends: Sequence[str], batches: Sequence[Sequence[str]] = ()) -> Told:
        """What became of each message, by its body (of a batch: its first key)."""
        words = _words("send", sends) + _words("batch", batches)
        events = self._programs.run("Features", *self._words, *words, timeout_s=RUN_S)
        return _told(events, len(sends) + len(batches))

    @contextlib.contextmanager
    def reading(
        self, *readers: str, sends: Sequence[Sequence[str]] = ()
    ) -> Iterator[tuple[RunningProgram, Told]]:
        """Send these, and go on as consumers."""
        words = _words("send", sends) + _words("reader", [(reader,) for reader in readers])
        with self._programs.started("Features", *self._words, *words) as program:
            program.wait_for("ready", 1, WAIT_S)
            yield program, _told(program.events(), len(sends))


def _words(name: str, values: Sequence[Sequence[str]]) -> list[str]:
    return [word for value in values for word in (f"--{name}", "\t".join(value))]


def _told(events: Sequence[Event], count: int) -> Told:
    told = {event["body"]: event for event in events if event["event"] in ("sent", "refused")}
    assert len(told) == count
    return told


@pytest.fixture
def features(java: JavaPrograms, sluice: SluiceProcess) -> Features:
    return Features(java, sluice)


def admin(sluice: SluiceProcess, *words: str) -> Any:
    done = run_sluice("admin", *words, "-n", sluice.nameserver_address, "--json")
    assert done.status == 0, done
    return json.loads(done.out)


def make(sluice: SluiceProcess, topic: str, attributes: str, queues: int = 1) -> None:
    count = str(queues)
    admin(
        *(sluice, "updateTopic", "-c", CLUSTER, "-t", topic, "-r", count, "-w", count),
        *("-a", attributes),
    )


def texts(program: RunningProgram, topic: str) -> list[str]:
    return [row["text"] for row in kind(program.events(), "received") if row["topic"] == topic]


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.05)


def place(event: Event) -> list[object]:
    assert event["event"] == "sent", event
    assert event["status"] == "SEND_OK"
    return [event[name] for name in PLACE]


def make_by_mqadmin(java: JavaPrograms, sluice: SluiceProcess) -> None:
    """The first test's topics, and one that cannot be made."""
    commands = [
        "updateTopic -t once -r 4 -w 4 -a +dedup.window.ms=600000",
        "updateTopic -t timed -r 1 -w 1 -a +message.ttl.ms=3000",
        "updateTopic -t bad -a +dedup.window.ms=0",
    ]
    words = [f"{command} -c {CLUSTER}".replace(" ", "\t") for command in commands]
    rows = java.run(
        *("Admin", "--namesrv", sluice.nameserver_address),
        *(word for command in words for word in ("--command", command)),
        timeout_s=RUN_S,
    )
    outputs = [row["output"] + row["errors"] for row in kind(rows, "command")]
    assert "create topic to" in outputs[0]
    assert "allowed: 1 to 86400000" in outputs[2]


def test_no_message_twice_and_a_time_to_live(
    sluice: SluiceProcess, features: Features, java: JavaPrograms
) -> None:
    make_by_mqadmin(java, sluice)
    told = features.send(
        ("once", "first", "keys=order-1", "queue=2"),
        ("once", "again", "keys=order-1", "queue=3"),
        ("once", "by-dedup-key", "DEDUP_KEY=order-1", "keys=x"),
        ("once", "one-way", "keys=order-1", "way=oneway"),
        ("once", "late", "keys=order-2", "delay=1"),
        ("once", "late-again", "keys=order-2"),
        ("once", "undone", "keys=order-3", "way=rollback"),
        ("once", "free", "keys=order-3", "way=patient"),
        ("once", "done", "keys=order-6", "way=commit"),
        ("once", "done-again", "keys=order-6", "way=patient"),
        ("timed", "topic's"),
        ("timed", "shortest", "MSG_TTL_MS=1"),
        ("timed", "longest", "MSG_TTL_MS=600000"),
        ("timed", "wrong", "MSG_TTL_MS=soon"),
        ("timed", "last", "MSG_TTL_MS=600000"),
        batches=[("once", "order-4", "order-1", "order-5", "order-4")],
    )
    assert place(told["again"]) == place(told["first"])
    assert place(told["by-dedup-key"]) == place(told["first"])
    assert place(told["late-again"]) == place(told["late"])
    assert place(told["free"])[2:] != place(told["undone"])[2:]
    assert place(told["done-again"])[1:] == place(told["done"])[1:]
    assert (told["wrong"]["code"], "MSG_TTL_MS" in told["wrong"]["remark"]) == (13, True)
    batch = told["order-4"]["offsetMsgId"].split(",")
    assert (batch[1], batch[3]) == (told["first"]["offsetMsgId"], batch[0])

    ended_s = time.time() + 2  # the shortest life is over, in whole seconds
    # The answers are the same after kill -9, and nothing is stored twice.
    sluice.kill()
    sluice.start()
    until(lambda: time.time() > ended_s)
    more = (
        ("once", "once-more", "keys=order-1"),
        ("once", "still-late", "keys=order-2"),
        ("once", "still-done", "keys=order-6"),
        ("once", "in-the-batch", "keys=order-5"),
    )
    readers = ("once-readers:once", "timed-readers:timed")
    with features.reading(*readers, sends=more) as (program, again):
        assert place(again["once-more"]) == place(told["first"])
        assert place(again["still-late"]) == place(told["late"])
        assert place(again["still-done"]) == place(told["done-again"])
        assert place(again["in-the-batch"])[0] == batch[2]
        wanted = {"first", "late", "free", "done", "in-batch-order-4", "in-batch-order-5"}
        until(lambda: len(texts(program, "once")) >= len(wanted))
        until(lambda: {"longest", "last"} <= set(texts(program, "timed")))
        program.stop(WAIT_S)
        assert sorted(texts(program, "once")) == sorted(wanted)
        # The one whose life ended is passed over; those whose time is not over are all there.
        assert "shortest" not in texts(program, "timed")
    (progress,) = [
        row
        for row in admin(sluice, "consumerProgress", "-g", "timed-readers")["offsetTable"]
        if row["topic"] == "timed"
    ]
    assert (progress["brokerOffset"], progress["consumerOffset"]) == (4, 4)


def test_messages_in_memory_across_a_restart_and_priorities(
    sluice: SluiceProcess, features: Features
) -> None:
    make(sluice, "fleeting", "+storage=memory")
    make(sluice, "tight", "+storage=memory,+memory.bytes.max=65536,+memory.when.full=refuse")
    make(sluice, "urgent", "+message.type=PRIORITY", 4)
    # As the client compresses: some 30,000 bytes each.
    chance = random.Random(1)
    large = [base64.b64encode(chance.randbytes(30_000)).decode() for _ in range(3)]
    readers = ("fleeting-readers:fleeting", "urgent-readers:urgent")
    with features.reading(*readers) as (program, _):
        told = features.send(
            ("fleeting", "before-1", "tags=a"),
            ("fleeting", "before-2"),
            ("fleeting", "delayed", "delay=1"),
            ("fleeting", "half", "way=commit"),
            *(("tight", text) for text in large),
            *(("urgent", f"p{number}", f"priority={number}") for number in (0, 1, 3, 9)),
            ("urgent", "p2-ordered", "priority=2", "__SHARDINGKEY=a", "queue=1"),
            batches=[("fleeting", "a", "b")],
        )
        assert [told[f"p{number}"]["queueId"] for number in (0, 1, 3, 9)] == [0, 1, 3, 3]
        assert told["p2-ordered"]["queueId"] == 1
        for name in ("delayed", "half"):
            assert (told[name]["code"], "storage=memory" in told[name]["remark"]) == (13, True)
        assert [told[text]["event"] for text in large] == ["sent", "sent", "refused"]
        assert told[large[2]]["code"] == 2
        assert "memory.bytes.max" in told[large[2]]["remark"]
        seen = ["before-1", "before-2", "in-batch-a", "in-batch-b"]
        until(lambda: sorted(texts(program, "fleeting")) == seen)
        until(lambda: len(texts(program, "urgent")) == 5)

        # The consumer runs on over the restart: it gets all that comes after, and nothing twice.
        sluice.kill()
        sluice.start()
        after = [f"after-{number}" for number in range(8)]
        told = features.send(*(("fleeting", name) for name in after), ("tight", "new"))
        assert told["after-0"]["queueOffset"] > 4
        until(lambda: set(after) <= set(texts(program, "fleeting")))
        program.stop(WAIT_S)
        assert sorted(texts(program, "fleeting")) == sorted([*seen, *after])

    # So does one that starts anew with the group's offsets.
    sluice.stop()
    sluice.start()
    readers = ("fleeting-readers:fleeting", "new-readers:tight")
    with features.reading(*readers, sends=[("fleeting", "later")]) as (program, _):
        until(lambda: "later" in texts(program, "fleeting"))
        program.stop(WAIT_S)
        assert texts(program, "fleeting") == ["later"]
        assert texts(program, "tight") == []
