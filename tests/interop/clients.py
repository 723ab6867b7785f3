"""This module is the Python side of the programs under `java/` and `go/`: options and events.

A `Clients` is one version of one of RocketMQ's client libraries. Its programs take the same options
and print the same events, so that a test can be run with each of them.
"""

import contextlib
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from peers import GoPrograms, Jars, JavaPrograms, RunningProgram
from peers.rocketmq import BROKER

Event = dict[str, Any]

JAVA_SOURCES = Path(__file__).parent / "java"
GO_SOURCES = Path(__file__).parent / "go"
TIMEOUT_S = 240.0
STOP_TIMEOUT_S = 180.0
RECEIVE_TIMEOUT_S = 240.0
# A client looks at its group every 20 s by itself; what a test changes should show sooner. And an
# ordered queue is given back 20 s after messages were left in it.
JAVA_OPTIONS = (
    "-Drocketmq.client.rebalance.waitInterval=1000",
    "-Drocketmq.client.rebalance.minInterval=200",
    "-Drocketmq.client.unlockDelayTimeMills=500",
)


@dataclass(frozen=True, slots=True)
class SendPlan:
    """What a producer sends; `prefix` makes the ids of one run differ from those of another."""

    prefix: str
    topics: Sequence[str]
    count: int
    queues: int = 4  # 0: the client chooses
    body_bytes: int = 100
    threads: int = 1
    failures: int = 1
    broker: str = BROKER
    modes: Sequence[str] = ("sync",)  # step i is sent in mode i % modes
    batch: int = 8
    per_second: int = 0  # steps; 0: as fast as it goes
    retry: bool = False  # try each step until it succeeds
    brief: bool = False

    def arguments(self) -> list[str]:
        pairs = [
            ("prefix", self.prefix),
            ("count", self.count),
            ("queues", self.queues),
            ("body-bytes", self.body_bytes),
            ("threads", self.threads),
            ("failures", self.failures),
            ("broker", self.broker),
            ("batch", self.batch),
            ("per-second", self.per_second),
            ("retry", _flag(self.retry)),
            ("brief", _flag(self.brief)),
            *(("mode", mode) for mode in self.modes),
            *(("topic", topic) for topic in self.topics),
        ]
        return _options(pairs)

    def ids(self, *modes: str) -> list[str]:
        """The ids of all messages that are sent in one of these modes; without any: of all."""
        wanted = modes or self.modes
        ids: list[str] = []
        for step in range(self.count):
            mode = self.modes[step % len(self.modes)]
            if mode in wanted:
                name = f"{self.prefix}-{step}"
                ids += [f"{name}.{k}" for k in range(self.batch)] if mode == "batch" else [name]
        return ids


class Programs(Protocol):
    """How the programs of one language are started."""

    def run(self, name: str, *arguments: str, timeout_s: float) -> list[Event]: ...

    def started(self, name: str, *arguments: str) -> AbstractContextManager[RunningProgram]: ...


class Clients:
    """One client library, as producer and as consumer."""

    def __init__(self, name: str, programs: Programs) -> None:
        self.name = name  # also part of topics and groups
        self._programs = programs

    def started(self, name: str, *arguments: str) -> AbstractContextManager[RunningProgram]:
        """Run any of the programs in the background."""
        return self._programs.started(name, *arguments)

    def send(self, nameserver: str, plan: SendPlan) -> list[Event]:
        """Send everything; the "sent" events. Without retries, any that failed is an error."""
        events = self._programs.run(
            "Send", "--namesrv", nameserver, *plan.arguments(), timeout_s=TIMEOUT_S
        )
        failed = kind(events, "failed")
        assert plan.retry or not failed, failed[0]
        sent = kind(events, "sent")
        assert [row for row in sent if row["status"] != "SEND_OK"] == []
        assert sorted(row["id"] for row in sent) == sorted(plan.ids("sync", "async", "batch"))
        assert sorted(r["id"] for r in kind(events, "oneway")) == sorted(plan.ids("oneway"))
        return sent

    def sending(self, nameserver: str, plan: SendPlan) -> AbstractContextManager[RunningProgram]:
        """Send in the background; the caller watches the events and may break the broker."""
        return self._programs.started("Send", "--namesrv", nameserver, *plan.arguments())

    @contextlib.contextmanager
    def receiving(
        self, nameserver: str, topics: Sequence[str], *readers: str, brief: bool = False
    ) -> Iterator[RunningProgram]:
        """Read in the background, as MODE:GROUP[:TAGS]; the programs' words say which modes."""
        arguments = self._receive(nameserver, topics, readers, brief=brief)
        with self._programs.started("Receive", *arguments) as program:
            yield program

    def receive_all(
        self, nameserver: str, topics: Sequence[str], *, group: str = "interop-reader"
    ) -> list[Event]:
        """Every message that the topics hold now, whatever the group has committed."""
        arguments = self._receive(nameserver, topics, [f"all:{group}"])
        return received(self._programs.run("Receive", *arguments, timeout_s=TIMEOUT_S))

    def receive_push(
        self, nameserver: str, topics: Sequence[str], count: int, *, group: str, tags: str = "*"
    ) -> list[Event]:
        """What a push consumer of the group gets, from its committed offsets on."""
        with self.receiving(nameserver, topics, f"push:{group}:{tags}") as program:
            program.wait_for("received", count, RECEIVE_TIMEOUT_S)
            return received(program.stop(STOP_TIMEOUT_S))

    def _receive(
        self, nameserver: str, topics: Sequence[str], readers: Sequence[str], *, brief: bool = False
    ) -> list[str]:
        pairs = [
            ("namesrv", nameserver),
            ("brief", _flag(brief)),
            *(("reader", reader) for reader in readers),
            *(("topic", topic) for topic in topics),
        ]
        return _options(pairs)


class JavaClients(Clients):
    """Apache's Java client, which is also an administrator where the jars hold its tools."""

    def __init__(
        self, jars: Jars, *, home: Path, name: str = "java-5", options: Sequence[str] = ()
    ) -> None:
        options = [*JAVA_OPTIONS, *options]
        super().__init__(name, JavaPrograms(JAVA_SOURCES, jars, home=home, options=options))

    def query(
        self,
        nameserver: str,
        topic: str,
        *,
        keys: Sequence[str] = (),
        unique_keys: Sequence[str] = (),
        message_ids: Sequence[str] = (),
        group: str | None = None,
    ) -> list[Event]:
        """ "found" and "missing" events; each repeats what was asked in "by" and "asked".

        With a group, its "progress" events too: a start of Java costs more than all questions.
        """
        pairs = [
            ("namesrv", nameserver),
            ("topic", topic),
            *(("key", key) for key in keys),
            *(("unique", key) for key in unique_keys),
            *(("id", message_id) for message_id in message_ids),
            *([("group", group)] if group else []),
        ]
        return self._programs.run("Query", *_options(pairs), timeout_s=TIMEOUT_S)

    def progress(self, nameserver: str, group: str) -> dict[tuple[str, int], tuple[int, int]]:
        """(topic, queue) -> (committed offset, end offset) as the broker reports them."""
        events = self._programs.run(
            "Query", "--namesrv", nameserver, "--group", group, timeout_s=TIMEOUT_S
        )
        return progress(events)


class GoClients(Clients):
    """Apache's Go client, which has to be told what queues there are to read all of them."""

    def __init__(self, *, home: Path, name: str = "go-2", queues: int = 4) -> None:
        super().__init__(name, GoPrograms(GO_SOURCES, home=home))
        self._queues = queues

    def _receive(
        self, nameserver: str, topics: Sequence[str], readers: Sequence[str], *, brief: bool = False
    ) -> list[str]:
        pairs = [("broker", BROKER), ("queues", self._queues)]
        return [*_options(pairs), *super()._receive(nameserver, topics, readers, brief=brief)]


def kind(events: Sequence[Event], event: str) -> list[Event]:
    """The events of one kind, in the order they were printed."""
    return [row for row in events if row.get("event") == event]


def progress(events: Sequence[Event]) -> dict[tuple[str, int], tuple[int, int]]:
    """(topic, queue) -> (committed offset, end offset), of "progress" events."""
    return {
        (row["topic"], row["queueId"]): (row["committed"], row["end"])
        for row in kind(events, "progress")
    }


def received(events: Sequence[Event]) -> list[Event]:
    """The "received" events of a program that met no error."""
    errors = [*kind(events, "error"), *kind(events, "broken")]
    assert not errors, errors[0]
    return kind(events, "received")


def _flag(value: bool) -> str:
    return "true" if value else "false"


def _options(pairs: Sequence[tuple[str, object]]) -> list[str]:
    return [text for name, value in pairs for text in (f"--{name}", str(value))]
