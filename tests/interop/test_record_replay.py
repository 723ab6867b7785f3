"""This module records and replays beside `sluice serve`, as processes that are killed and stopped.

Whatever was written while recorders died has to be in the recording exactly once, and a replay of
it has to give each queue the same messages in the same order.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import confluent_kafka
import pyarrow.parquet as parquet
import pytest

from peers import Jars
from peers.process import PeerProcess, free_ports
from peers.rocketmq import RocketMQ
from sluice import Message, Producer, PullConsumer, ReceivedMessage
from sluice.protocol.json_members import MessageQueue
from tests.interop.kafka_reading import consume
from tests.interop.sluice_process import SluiceProcess, make_topic, wait_for_route
from tests.unit.client.admin_kit import sluice

WAIT_S = 120.0
QUEUES = 2


class Site:
    """A broker with both doors, and commands beside it."""

    def __init__(self, directory: Path) -> None:
        (port,) = free_ports(1)
        self.kafka = f"127.0.0.1:{port}"
        self.directory = directory
        self.broker = SluiceProcess(
            directory / "broker", "--kafka", "on", "--kafka-port", str(port)
        )
        self._starts = 0

    @property
    def environment(self) -> dict[str, str]:
        return {
            "PYTHONPATH": os.pathsep.join(sys.path),
            "NAMESRV_ADDR": self.broker.nameserver_address,
        }

    def make_topic(self, topic: str) -> None:
        make_topic(self.broker.broker_address, topic, QUEUES)
        wait_for_route(self.broker.nameserver_address, topic)

    def start(self, *words: str) -> PeerProcess:
        self._starts += 1
        return PeerProcess(
            f"sluice {words[0]}",
            [sys.executable, "-m", "sluice", *words],
            log=self.directory / f"{words[0]}.{self._starts}.log",
            environment=self.environment,
        )

    def run(self, *words: str) -> str:
        """The output of a command that has to succeed."""
        done = subprocess.run(
            [sys.executable, "-m", "sluice", *words],
            cwd=self.directory,
            env={**os.environ, **self.environment},
            capture_output=True,
            text=True,
            timeout=WAIT_S,
            check=False,
        )
        assert done.returncode == 0, done
        return done.stdout

    def messages(self, topic: str, count: int) -> dict[int, list[ReceivedMessage]]:
        """So many messages of a topic, by queue."""
        found: dict[int, list[ReceivedMessage]] = {}
        with PullConsumer(
            self.broker.nameserver_address, group=f"r-{topic}", topics=topic, start_at="first"
        ) as consumer:

            def poll() -> bool:
                for message in consumer.poll(timeout_seconds=1):
                    found.setdefault(message.queue_id, []).append(message)
                return sum(map(len, found.values())) >= count

            until(poll)
        return found


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < end, "nothing happened"
        time.sleep(0.01)


def rows(directory: Path) -> list[dict[str, Any]]:
    """All messages of a recording."""
    manifest = json.loads((directory / "manifest.json").read_bytes())
    return [
        row
        for file in manifest["files"]
        for row in parquet.read_table(directory / file["name"]).to_pylist()
    ]


def recorded(directory: Path) -> int:
    """How many messages the manifest counts; none where there is no manifest yet."""
    try:
        manifest = json.loads((directory / "manifest.json").read_bytes())
    except FileNotFoundError:
        return 0
    return sum(file["rows"] for file in manifest["files"])


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    running = Site(tmp_path_factory.mktemp("site"))
    with running.broker:
        yield running


class Writer:
    """Writes to both queues of a topic until it is stopped."""

    def __init__(self, site: Site, topic: str) -> None:
        self._site = site
        self._topic = topic
        self._stop = threading.Event()
        self.count = 0
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        with Producer(self._site.broker.nameserver_address) as producer:
            brokers = {queue.broker_name for queue in producer.queues(self._topic)}
            (broker,) = brokers
            while not self._stop.wait(0.002):
                number = self.count
                message = Message(
                    self._topic, f"body {number}", keys=f"k{number}", properties={"n": str(number)}
                )
                producer.send(message, queue=MessageQueue(self._topic, broker, number % QUEUES))
                self.count += 1

    def stop(self) -> int:
        self._stop.set()
        self._thread.join(WAIT_S)
        assert not self._thread.is_alive()
        return self.count


def test_recorders_that_are_killed_leave_no_gap_and_no_repeat(site: Site) -> None:
    site.make_topic("killed")
    directory = site.directory / "killed"
    words = ("record", "killed", "--to", str(directory), "--until", "never")
    writer = Writer(site, "killed")
    for _ in range(2):
        before = recorded(directory)
        process = site.start(*words, "--file-seconds", "20ms")
        until(lambda before=before: recorded(directory) > before)  # type: ignore[misc]
        process.kill()
    total = writer.stop()
    site.run("record", "killed", "--to", str(directory))
    found = rows(directory)
    assert len(found) == total
    for queue in range(QUEUES):
        own = [row for row in found if row["queue"] == queue]
        assert [row["offset"] for row in own] == list(range(len(own)))
        expected = [f"body {number}".encode() for number in range(queue, total, QUEUES)]
        assert [row["body"] for row in own] == expected

    out = site.run("replay", str(directory), "--speed", "20x", "--to", "again", "--json")
    report = json.loads(out.splitlines()[-1])
    assert report["messages"]["sent"] == total
    before_and_after = [site.messages(topic, total) for topic in ("killed", "killed-again")]
    original, replayed = (
        {
            queue: [(m.body, m.keys, m.properties["n"]) for m in messages]
            for queue, messages in each.items()
        }
        for each in before_and_after
    )
    assert replayed == original
    assert (site.directory / "replay-report.html").read_text().count("<svg") == 4


def test_what_kafka_wrote_comes_back_to_kafka(site: Site) -> None:
    producer = confluent_kafka.Producer(
        {"bootstrap.servers": site.kafka, "transactional.id": "t", "compression.type": "zstd"}
    )
    producer.init_transactions(WAIT_S)
    for word in ("kept", "rolled back", "kept too"):
        producer.begin_transaction()
        for number in range(3):
            producer.produce(
                "kafka.written",
                value=f"{word} {number}".encode(),
                key=b"\xff%d" % number if number == 2 else b"key-%d" % number,
                headers=[("color", b"red"), ("odd", b"\x00\xfe")],
                partition=0,
                timestamp=1_700_000_000_000 + number,
            )
        for nothing in (None, b""):
            producer.produce("kafka.written", value=nothing, key=b"gone", partition=0)
        if word == "rolled back":
            producer.abort_transaction(WAIT_S)
        else:
            producer.commit_transaction(WAIT_S)
    directory = site.directory / "kafka"
    wait_for_route(site.broker.nameserver_address, "kafka%2Ewritten")
    site.run("record", "kafka.written", "--to", str(directory))
    found = rows(directory)
    words = [f"{word} {number}".encode() for word in ("kept", "kept too") for number in range(3)]
    values = [*words[:3], None, b"", *words[3:], None, b""]
    assert [row["body"] for row in found] == [value or b"" for value in values]
    assert {row["kind"] for row in found} == {"kafka"}
    assert [row["key"] for row in found[:3]] == ["key-0", "key-1", None]
    assert found[1]["born_time"].timestamp() * 1000 == 1_700_000_000_001

    site.run("replay", str(directory), "--speed", "max")
    replayed = consume(site.kafka, "kafka.written-replay", 10)
    assert [message.value() for message in replayed] == values
    keys = [message.key() for message in replayed[:5]]
    assert keys == [b"key-0", b"key-1", b"\xff2", b"gone", b"gone"]
    headers = dict(replayed[0].headers())
    assert (headers["color"], headers["odd"]) == (b"red", b"\x00\xfe")


@pytest.mark.soak
def test_apaches_broker_is_recorded_and_replayed(tmp_path: Path, rocketmq_jars: Jars) -> None:
    """It serves no bulk reads: messages are pulled, and the lane is made as its mqadmin would."""
    with RocketMQ(tmp_path / "apache", jars=rocketmq_jars) as apache:
        make_topic(apache.broker_address, "orders", QUEUES)
        wait_for_route(apache.nameserver_address, "orders")
        with Producer(apache.nameserver_address) as producer:
            for number in range(100):
                producer.send(Message("orders", f"body {number}", keys=f"k{number}"))
            producer.send(Message("orders", "packed" * 2000, keys="k100"))
        words = ("-n", apache.nameserver_address)
        directory = tmp_path / "kept"
        assert sluice("record", "orders", "--to", str(directory), *words).status == 0
        found = rows(directory)
        assert len(found) == 101
        assert b"packed" * 2000 in [row["body"] for row in found]
        done = sluice(
            *("replay", str(directory), "--speed", "max", "--copies", "2", "--no-report", *words)
        )
        assert done.status == 0, done
        with PullConsumer(
            apache.nameserver_address, group="r", topics="orders-replay", start_at="first"
        ) as consumer:
            replayed: list[ReceivedMessage] = []

            def poll() -> bool:
                replayed.extend(consumer.poll(timeout_seconds=1))
                return len(replayed) >= 202

            until(poll)
        for queue in range(QUEUES):
            keys = [message.keys for message in replayed if message.queue_id == queue]
            original = [row["key"] for row in found if row["queue"] == queue]
            assert keys == [f"{key}-{copy}" for key in original for copy in (0, 1)]
