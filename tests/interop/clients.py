"""This module is the Python side of the Java programs under `java/`: their options and events."""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from peers import Jars, JavaPrograms, RunningProgram
from peers.rocketmq import BROKER

Event = dict[str, Any]

SOURCES = Path(__file__).parent / "java"
TIMEOUT_S = 240.0
# A push consumer that misses its first rebalance waits 20 s for the next one.
RECEIVE_TIMEOUT_S = 120


@dataclass(frozen=True, slots=True)
class SendPlan:
    """What a producer sends; `prefix` makes the ids of one run differ from those of another."""

    prefix: str
    topics: Sequence[str]
    count: int
    queues: int = 4
    body_bytes: int = 100
    threads: int = 1
    failures: int = 1
    broker: str = BROKER

    def arguments(self) -> list[str]:
        pairs = [
            ("prefix", self.prefix),
            ("count", self.count),
            ("queues", self.queues),
            ("body-bytes", self.body_bytes),
            ("threads", self.threads),
            ("failures", self.failures),
            ("broker", self.broker),
            *(("topic", topic) for topic in self.topics),
        ]
        return _options(pairs)


class JavaClients:
    """Apache's Java client, as producer, consumer and administrator."""

    def __init__(self, jars: Jars, *, home: Path) -> None:
        self._programs = JavaPrograms(SOURCES, jars, home=home)

    def send(self, nameserver: str, plan: SendPlan) -> list[Event]:
        """Send everything; the "sent" events. Any send that was not acknowledged is an error."""
        events = self._programs.run(
            "Send", "--namesrv", nameserver, *plan.arguments(), timeout_s=TIMEOUT_S
        )
        failed = kind(events, "failed")
        assert not failed, failed[0]
        sent = kind(events, "sent")
        assert len(sent) == plan.count
        return sent

    @contextlib.contextmanager
    def sending(self, nameserver: str, plan: SendPlan) -> Iterator[RunningProgram]:
        """Send in the background; the caller watches the events and may break the broker."""
        with self._programs.started("Send", "--namesrv", nameserver, *plan.arguments()) as program:
            yield program

    def receive_all(
        self, nameserver: str, topics: Sequence[str], *, group: str = "interop-reader"
    ) -> list[Event]:
        """Every message that the topics hold now, whatever the group has committed."""
        pairs = [("group", group), *(("topic", topic) for topic in topics)]
        return self._receive(nameserver, pairs)

    def receive_push(
        self, nameserver: str, topics: Sequence[str], count: int, *, group: str, tags: str = "*"
    ) -> list[Event]:
        """What a push consumer of the group gets, from its committed offsets on."""
        pairs = [("mode", "push"), ("group", group), ("count", count), ("tags", tags)]
        return self._receive(nameserver, [*pairs, *(("topic", topic) for topic in topics)])

    def query(
        self,
        nameserver: str,
        topic: str,
        *,
        keys: Sequence[str] = (),
        unique_keys: Sequence[str] = (),
        message_ids: Sequence[str] = (),
    ) -> list[Event]:
        """ "found" and "missing" events; each repeats what was asked in "by" and "asked"."""
        pairs = [
            ("namesrv", nameserver),
            ("topic", topic),
            *(("key", key) for key in keys),
            *(("unique", key) for key in unique_keys),
            *(("id", message_id) for message_id in message_ids),
        ]
        return self._programs.run("Query", *_options(pairs), timeout_s=TIMEOUT_S)

    def progress(self, nameserver: str, group: str) -> dict[tuple[str, int], tuple[int, int]]:
        """(topic, queue) -> (committed offset, end offset) as the broker reports them."""
        events = self._programs.run(
            "Query", "--namesrv", nameserver, "--group", group, timeout_s=TIMEOUT_S
        )
        return {
            (row["topic"], row["queueId"]): (row["committed"], row["end"])
            for row in kind(events, "progress")
        }

    def _receive(self, nameserver: str, pairs: Sequence[tuple[str, object]]) -> list[Event]:
        options = _options([*pairs, ("timeout-s", RECEIVE_TIMEOUT_S)])
        events = self._programs.run(
            "Receive", "--namesrv", nameserver, *options, timeout_s=TIMEOUT_S
        )
        errors = kind(events, "error")
        assert not errors, errors[0]
        return kind(events, "received")


def kind(events: Sequence[Event], event: str) -> list[Event]:
    """The events of one kind, in the order they were printed."""
    return [row for row in events if row.get("event") == event]


def _options(pairs: Sequence[tuple[str, object]]) -> list[str]:
    return [text for name, value in pairs for text in (f"--{name}", str(value))]
