"""This module does with a broker what people do with kcat, the command that is librdkafka, and
returns what came of each step, in the words of the other clients' programs.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from confluent_kafka import ConsumerGroupTopicPartitions

from peers.debian import Tool
from tests.interop.kafka_scenarios import (
    LIMIT_S,
    PARTITIONS,
    RECORDS,
    SESSION_MS,
    Outcome,
    admin_of_librdkafka,
    make_topic,
    wait,
)

MODE_RECORDS = 10
MODES = {
    "acks 0": ("acks=0",),
    "acks 1": ("acks=1",),
    "acks all": ("acks=all",),
    "idempotent": ("enable.idempotence=true",),
    **{codec: (f"compression.codec={codec}",) for codec in ("gzip", "snappy", "lz4", "zstd")},
}
SHORT_SESSION_MS = 2_000
FORMAT = "%k|%h|%S|%s\n"
# It takes its input in pieces: what comes before this is sent, although the input goes on.
PADDING = "x" * 100_000


class Running:
    """A kcat in the background, and what it has said so far."""

    def __init__(self, process: subprocess.Popen[bytes], output: Path, errors: Path) -> None:
        self.process = process
        self._output = output
        self._errors = errors

    def lines(self) -> list[str]:
        return self._output.read_text().splitlines()

    def partitions(self) -> set[int]:
        """What its group has given it; it says so with each round."""
        rounds = re.findall(r"(assigned|revoked): (.*)", self._errors.read_text())
        if not rounds or rounds[-1][0] == "revoked":
            return set()
        return {int(number) for number in re.findall(r"\[(\d+)\]", rounds[-1][1])}

    def write(self, *values: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("".join(f"{value}\n" for value in values).encode())
        self.process.stdin.flush()

    def end(self, number: int = signal.SIGTERM) -> int:
        """Its code, when it was told to end."""
        self.process.send_signal(number)
        return self.process.wait(LIMIT_S)

    def end_of_input(self) -> int:
        assert self.process.stdin is not None
        self.process.stdin.close()
        return self.process.wait(LIMIT_S)


class Kcat:
    """The scenario, with one broker."""

    def __init__(self, tool: Tool, address: str, word: str, home: Path) -> None:
        self._tool = tool
        self._address = address
        self._word = word
        self._home = home
        self._count = 0
        home.mkdir(parents=True, exist_ok=True)

    def all(self) -> Outcome:
        return {
            **self._in_every_mode(),
            **self._share_and_resume(),
            **self._kill_one(),
            **self._transact(),
            **self._describe(),
        }

    def _named(self, kind: str) -> str:
        return f"kcat.{kind}.{self._word}"

    def _command(self, *words: str) -> list[str]:
        return [self._tool.path, "-b", self._address, *words]

    def _run(self, *words: str, given: str = "") -> str:
        done = subprocess.run(
            self._command(*words),
            env={**os.environ, **self._tool.environment},
            input=given,
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-2000:]
        return done.stdout

    @contextlib.contextmanager
    def _running(self, *words: str) -> Iterator[Running]:
        self._count += 1
        output, errors = (self._home / f"kcat-{self._count}.{end}" for end in ("out", "err"))
        with output.open("wb") as out, errors.open("wb") as err:
            process = subprocess.Popen(
                self._command(*words),
                env={**os.environ, **self._tool.environment},
                stdin=subprocess.PIPE,
                stdout=out,
                stderr=err,
            )
        try:
            yield Running(process, output, errors)
        finally:
            process.kill()
            process.wait()
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError):
                process.stdin.close()

    def _member(
        self, group: str, topic: str, session_ms: int = SESSION_MS
    ) -> contextlib.AbstractContextManager[Running]:
        return self._running(
            *("-u", "-f", "%s\n", "-X", "auto.offset.reset=earliest"),
            *("-X", f"session.timeout.ms={session_ms}", "-X", "heartbeat.interval.ms=200"),
            *("-G", group, topic),
        )

    def _read(self, topic: str, *settings: str, form: str = "%s\n") -> list[str]:
        """A topic from its beginning to its end."""
        more = [word for setting in settings for word in ("-X", setting)]
        return self._run("-C", "-q", "-e", "-o", "beginning", *more, "-t", topic, "-f", form)[
            :-1
        ].split("\n")

    def _in_every_mode(self) -> Outcome:
        topic = self._named("modes")
        make_topic(self._address, topic, partitions=1, records=0)
        for mode, settings in MODES.items():
            values = [f"{mode}-{n}:{_value(mode, n)}\n" for n in range(MODE_RECORDS)]
            more = [word for setting in settings for word in ("-X", setting)]
            self._run(
                *("-P", "-Z", "-K", ":", "-H", f"h={mode}", *more, "-t", topic),
                given="".join(values),
            )
        found = self._read(topic, form=FORMAT)
        wanted = [
            f"{mode}-{n}|h={mode}|{len(_value(mode, n)) or -1}|{_value(mode, n)}"
            for mode in MODES
            for n in range(MODE_RECORDS)
        ]
        counts = {mode: sum(each.startswith(f"{mode}-") for each in found) for mode in MODES}
        return {**counts, "keys, headers and nulls": sorted(found) == sorted(wanted)}

    def _share_and_resume(self) -> Outcome:
        topic, group = self._named("eager"), self._named("group-eager")
        make_topic(self._address, topic)
        with self._member(group, topic) as one:
            wait("the first member", lambda: len(one.partitions()) == PARTITIONS)
            with self._member(group, topic) as two:
                wait("the second", lambda: len(one.partitions()) == len(two.partitions()) == 2)
                overlap = bool(one.partitions() & two.partitions())
                wait("all records", lambda: len({*one.lines(), *two.lines()}) == RECORDS)
                assert two.end() == 0
            wait("the one that is left", lambda: len(one.partitions()) == PARTITIONS)
            assert one.end() == 0
        admin = admin_of_librdkafka.AdminClient({"bootstrap.servers": self._address})
        asked = admin.list_consumer_group_offsets([ConsumerGroupTopicPartitions(group)])
        committed = sum(each.offset for each in asked[group].result(LIMIT_S).topic_partitions)
        with self._member(group, topic) as later:
            wait("the next one", lambda: len(later.partitions()) == PARTITIONS)
            for partition in range(PARTITIONS):
                self._run("-P", "-p", str(partition), "-t", topic, given="last\n")
            wait("the last records", lambda: later.lines().count("last") == PARTITIONS)
            again = len(later.lines()) - PARTITIONS
        return {
            "eager overlap": overlap,
            "eager read": RECORDS,
            "eager committed": committed,
            "eager read again": again,
        }

    def _kill_one(self) -> Outcome:
        topic, group = self._named("kill"), self._named("group-kill")
        make_topic(self._address, topic)
        with self._member(group, topic) as one:
            wait("the first member", lambda: len(one.partitions()) == PARTITIONS)
            with self._member(group, topic, SHORT_SESSION_MS) as two:
                wait("the second", lambda: len(one.partitions()) == len(two.partitions()) == 2)
                two.end(signal.SIGKILL)
            wait("the partitions of the dead", lambda: len(one.partitions()) == PARTITIONS)
            return {"after a kill": len(one.partitions())}

    def _transactional(self, topic: str) -> contextlib.AbstractContextManager[Running]:
        """Its records are one transaction, which ends with its input."""
        return self._running(
            *("-P", "-p", "0", "-t", topic, "-X", "linger.ms=0"),
            *("-X", f"transactional.id={self._named('tx-id')}", "-m", str(int(LIMIT_S))),
        )

    def _values(self, topic: str, isolation: str) -> str:
        found = self._read(topic, f"isolation.level={isolation}")
        return " ".join(sorted(each for each in found if each.startswith("t")))

    def _transact(self) -> Outcome:
        topic = self._named("tx")
        make_topic(self._address, topic)

        def has(value: str) -> bool:
            return value in self._read(topic, "isolation.level=read_uncommitted")

        result: dict[str, Any] = {}
        with self._transactional(topic) as first:
            first.write("t1", "t2")
            assert first.end_of_input() == 0
        with self._transactional(topic) as gone:
            gone.write("t3-gone", PADDING)
            wait("what will be gone", lambda: has("t3-gone"))
            gone.process.send_signal(signal.SIGINT)  # it looks at this when its input ends
            gone.end_of_input()
        with self._transactional(topic) as next_one:
            next_one.write("t4")
            assert next_one.end_of_input() == 0
        result["read committed"] = self._values(topic, "read_committed")
        result["read uncommitted"] = self._values(topic, "read_uncommitted")
        with self._transactional(topic) as opened:
            opened.write("t5-open", PADDING)
            wait("what is open", lambda: has("t5-open"))
            result["while one is open"] = self._values(topic, "read_committed")
            with self._transactional(topic) as later:
                later.write("t7")
                assert later.end_of_input() == 0
            result["shut out"] = opened.end_of_input() != 0
        result["in the end"] = self._values(topic, "read_committed")
        return result

    def _describe(self) -> Outcome:
        topic = self._named("admin")
        make_topic(self._address, topic, partitions=3, records=0)
        described = json.loads(self._run("-L", "-J", "-t", topic))
        (found,) = described["topics"]
        return {"partitions of a topic": len(found["partitions"])}


def _value(mode: str, number: int) -> str:
    """The last of each mode has none."""
    return f"{mode}-{number}" * 20 if number < MODE_RECORDS - 1 else ""
