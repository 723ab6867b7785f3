"""Ordered messages with Apache's Java and Go clients on Sluice, while members come, go and die.

A queue has one reader at a time. Each message of a key is begun with after the one before it was
done with; what a member that was killed had not committed comes again, in order.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from peers import GoPrograms, JavaPrograms, PeerUnavailable, RunningProgram
from tests.interop.clients import GO_SOURCES, JAVA_OPTIONS, JAVA_SOURCES, Event, Programs, kind
from tests.interop.sluice_process import SluiceProcess, make_topic
from tests.interop.test_business_retries import WAIT_S, admin, until

LOCK_MS = 4_000  # so that a member's death costs seconds and not a minute
# A client must ask again well within that, and believe in its lock for less long than the broker.
LOCK_OPTIONS = (
    "-Drocketmq.client.rebalance.lockInterval=1000",
    "-Drocketmq.client.rebalance.lockMaxLiveTime=3000",
)
QUEUES = 4


@pytest.fixture(scope="module")
def sluice(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SluiceProcess]:
    flags = ("--queue-lock-ms", str(LOCK_MS))
    with SluiceProcess(tmp_path_factory.mktemp("orders"), *flags) as process:
        yield process


@pytest.fixture
def java(rocketmq_jars: Any, tmp_path: Path) -> Programs:
    home = tmp_path / "java"
    options = [*JAVA_OPTIONS, *LOCK_OPTIONS]
    return JavaPrograms(JAVA_SOURCES, rocketmq_jars, home=home, options=options)


@pytest.fixture
def go(tmp_path: Path) -> Programs:
    try:
        return GoPrograms(GO_SOURCES, home=tmp_path / "go")
    except PeerUnavailable as error:
        pytest.skip(error.reason)


def spans_of(events: list[Event]) -> list[tuple[Event, int]]:
    """Each beginning of a message, with the moment at which the same handling of it ended.

    A member that loses a queue and gets it back may handle a message once more, so a beginning
    belongs to the first end that comes after it. One that was killed in between has no end.
    """
    spans: list[tuple[Event, int]] = []
    under_way: dict[tuple[int, int], int] = {}
    for row in events:
        place = (row.get("queueId", -1), row.get("queueOffset", -1))
        if row["event"] == "begin":
            under_way[place] = len(spans)
            spans.append((row, row["nowMs"]))
        elif row["event"] == "end":
            at = under_way.pop(place)
            spans[at] = (spans[at][0], row["nowMs"])
    return spans


class Scene:
    """A topic, a sender, and the members of a group that reads it in order."""

    def __init__(
        self, programs: Programs, sluice: SluiceProcess, topic: str, shards: int, work_ms: int = 5
    ) -> None:
        self._programs = programs
        self._work_ms = work_ms
        self._common = ("--namesrv", sluice.nameserver_address, "--topic", topic)
        self._group = f"readers-of-{topic}"
        self._shards = shards
        self._running = ExitStack()
        self.members: list[RunningProgram] = []

    def __enter__(self) -> Scene:
        return self

    def __exit__(self, *error: object) -> None:
        self._running.close()

    def send(self, count: int, pause_ms: int = 0) -> RunningProgram:
        words = ("--shards", str(self._shards), "--count", str(count), "--pause-ms", str(pause_ms))
        started = self._programs.started("Orders", "--role", "send", *self._common, *words)
        return self._running.enter_context(started)

    def join(self) -> RunningProgram:
        words = ("--group", self._group, "--work-ms", str(self._work_ms))
        started = self._programs.started("Orders", "--role", "read", *self._common, *words)
        member = self._running.enter_context(started)
        member.wait_for("ready", 1, WAIT_S)
        self.members.append(member)
        return member

    def wait_for_reader(self, member: RunningProgram) -> None:
        """Wait until a member has something to do."""
        seen = len(kind(member.events(), "end"))
        until(lambda: len(kind(member.events(), "end")) > seen)

    def wait_for_all(self, count: int) -> None:
        wanted = {f"{shard}-{number}" for shard in range(self._shards) for number in range(count)}
        until(
            lambda: wanted <= {row["id"] for m in self.members for row in kind(m.events(), "end")}
        )

    def check(self, *, repeats: int, restarted: bool = False) -> None:
        """In order, one reader of a queue at a time; at most so many messages of a queue again.

        Where the broker was started anew a reader may itself go back to what is committed.
        """
        spans: dict[int, list[tuple[int, int, int, Event]]] = defaultdict(list)
        for number, member in enumerate(self.members):
            for begin, end_ms in spans_of(member.events()):
                spans[begin["queueId"]].append((begin["nowMs"], end_ms, number, begin))
        for queue_id, rows in spans.items():
            rows.sort(key=lambda row: row[0])
            again, last = 0, -1
            for at, (begin_ms, _, number, row) in enumerate(rows):
                before = rows[at - 1] if at else None
                if before is not None and before[2] != number:
                    assert begin_ms >= before[1], (queue_id, "two readers at a time", row)
                offset = row["queueOffset"]
                if offset <= last:
                    again += 1
                    assert before is not None
                    forward = offset > before[3]["queueOffset"] or before[2] != number
                    assert forward or restarted, (queue_id, "back within one reader", row)
                else:
                    assert offset == last + 1, (queue_id, "a message was left out", row)
                last = max(last, offset)
            assert again <= repeats, (queue_id, again)


def test_java_order_while_members_come_go_and_die(java: Programs, sluice: SluiceProcess) -> None:
    make_topic(sluice.broker_address, "JavaOrders", QUEUES)
    count, shards = 150, 8
    with Scene(java, sluice, "JavaOrders", shards) as scene:
        first = scene.join()
        sender = scene.send(count, pause_ms=30)
        scene.wait_for_reader(first)
        second = scene.join()
        scene.wait_for_reader(second)
        second.stop(WAIT_S)
        third = scene.join()
        scene.wait_for_reader(third)
        third.kill()  # its locks live on for a while, then the first one takes them
        sender.finish(WAIT_S)
        scene.wait_for_all(count)
        first.stop(WAIT_S)
    # Each move may repeat what was not committed yet: a member that was killed commits every 5 s.
    scene.check(repeats=shards * count // QUEUES)
    assert all(kind(member.events(), "end") for member in (first, second, third))


def test_java_order_when_the_broker_is_killed(java: Programs, sluice: SluiceProcess) -> None:
    make_topic(sluice.broker_address, "KilledOrders", QUEUES)
    count, shards = 80, 8
    with Scene(java, sluice, "KilledOrders", shards, work_ms=25) as scene:
        scene.send(count).finish(WAIT_S)
        first, second = scene.join(), scene.join()
        scene.wait_for_reader(first)
        scene.wait_for_reader(second)
        sluice.kill()
        sluice.start()
        scene.wait_for_all(count)
        for member in (first, second):
            member.stop(WAIT_S)
    scene.check(repeats=shards * count, restarted=True)


def test_java_global_order(java: Programs, sluice: SluiceProcess) -> None:
    make_topic(sluice.broker_address, "OneQueue", 1)
    count = 150
    with Scene(java, sluice, "OneQueue", 3) as scene:
        first = scene.join()
        sender = scene.send(count, pause_ms=10)
        scene.wait_for_reader(first)
        second = scene.join()  # in vain: there is one queue
        sender.finish(WAIT_S)
        first.kill()
        scene.wait_for_all(count)
        second.stop(WAIT_S)
    scene.check(repeats=3 * count)
    wanted = [f"{shard}-{number}" for number in range(count) for shard in range(3)]
    ids: list[str] = []
    for member in (first, second):
        ids += [row["id"] for row in kind(member.events(), "end") if row["id"] not in set(ids)]
    assert ids == wanted


def test_go_order(go: Programs, sluice: SluiceProcess) -> None:
    make_topic(sluice.broker_address, "GoOrders", QUEUES)
    count, shards = 40, 6
    with Scene(go, sluice, "GoOrders", shards) as scene:
        member = scene.join()
        sent = scene.send(count).finish(WAIT_S)
        scene.wait_for_all(count)
        member.stop(WAIT_S)
    by_shard: dict[str, set[int]] = defaultdict(set)
    for row in kind(sent, "sent"):
        by_shard[row["id"].partition("-")[0]].add(row["queueId"])
    assert all(len(queues) == 1 for queues in by_shard.values()), "a key has one queue"
    scene.check(repeats=0)


def test_go_retries_and_dead_letters(go: Programs, sluice: SluiceProcess) -> None:
    make_topic(sluice.broker_address, "GoRetries", 1)
    words = ["--namesrv", sluice.nameserver_address]
    for group, most, level in (("go-again", -1, 1), ("go-dead", 1, 1)):
        # It would be made by the first heartbeat, but the client asks for its route before that.
        make_topic(sluice.broker_address, f"%RETRY%{group}", 1)
        words += ["--reader", f"push:{group}:GoRetries:{most}:{level}"]
    words += ["--send", "GoRetries:m:times:2"]

    def tries(group: str) -> list[int]:
        rows = kind(program.events(), "received")
        return [row["times"] for row in rows if row["group"] == group]

    with go.started("Failing", *words) as program:
        until(lambda: tries("go-again") == [0, 1, 2])
        until(lambda: tries("go-dead") == [0, 1])
        until(lambda: admin_count(sluice, "go-dead") == 1)
        program.stop(WAIT_S)
    assert (tries("go-again"), tries("go-dead")) == ([0, 1, 2], [0, 1])
    topics = {row["topic"] for row in kind(program.events(), "received")}
    assert topics == {"GoRetries"}


def admin_count(sluice: SluiceProcess, group: str) -> int:
    topics = admin(sluice, "topicList")["topicList"]
    if f"%DLQ%{group}" not in topics:
        return 0
    return int(admin(sluice, "deadLetters", "-g", group)["count"])
