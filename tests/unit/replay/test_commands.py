"""This module tests `sluice record` and `sluice replay` as a person runs them, beside a broker."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path

import pytest

from sluice import Message, Producer, ReceivedMessage, cli
from sluice.client.core.signing import Credentials
from sluice.protocol.json_members import MessageQueue
from sluice.protocol.remoting import RemotingCommand
from sluice.replay import record_command, replay_command, sending
from sluice.testing import LiveBroker
from tests.unit.client.admin_kit import Done, sluice
from tests.unit.client.client_kit import Answer, fake_cluster
from tests.unit.replay.replay_kit import message, names, piece, queue, record, recording

WAIT_SECONDS = 120.0
_numbers = count()


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveBroker]:
    running = LiveBroker(tmp_path_factory.mktemp("broker"))
    try:
        yield running
    finally:
        running.close()


@pytest.fixture
def topic(broker: LiveBroker) -> str:
    """A topic with three queues and thirty messages, ten in each."""
    name = f"orders{next(_numbers)}"
    broker.create_topic(name, queues=3)
    fill(broker, name, 30)
    return name


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broker: LiveBroker) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NAMESRV_ADDR", broker.nameserver_address)
    return tmp_path


def fill(broker: LiveBroker, topic: str, number: int, start: int = 0) -> None:
    with Producer(broker.nameserver_address) as producer:
        for index in range(start, start + number):
            producer.send(
                Message(
                    topic,
                    f"order {index}",
                    keys=f"k{index}",
                    tags="even" if index % 2 == 0 else "",
                    properties={"index": str(index)},
                ),
                queue=MessageQueue(topic, broker.name, index % 3),
            )


def content(messages: list[ReceivedMessage]) -> list[tuple[int, bytes, str, str, str]]:
    """What has to be the same in a lane, queue by queue and in order."""
    return [
        (each.queue_id, each.body, each.keys, each.tags, each.properties["index"])
        for each in sorted(messages, key=lambda each: (each.queue_id, each.queue_offset))
    ]


def test_a_topic_is_recorded_and_replayed_beside_it(
    broker: LiveBroker, topic: str, here: Path
) -> None:
    done = sluice("record", topic, "--to", "kept")
    assert done == Done(
        0, "recorded 30 messages (230 bytes); the recording has 30 in 1 files\n", ""
    )
    done = sluice("replay", "kept", "--speed", "max", "--to", "shadow")
    assert (done.status, done.err) == (0, "")
    assert done.out.startswith("sent 30 of 30 messages in ")
    assert done.out.endswith("/s); replay-report.html\n")
    lane = broker.messages(f"{topic}-shadow")
    assert content(lane) == content(broker.messages(topic))
    assert {each.queue_id for each in lane} == {0, 1, 2}
    report = json.loads((here / "replay-report.json").read_bytes())
    assert report["topics"] == {topic: f"{topic}-shadow"}
    assert report["messages"] == {
        "total": 30,
        "sent": 30,
        "failed": 0,
        "empty": 0,
        "not_sent": 0,
    }
    assert sum(each["wanted"] for each in report["intervals"]) == 30
    page = (here / "replay-report.html").read_text()
    assert page.count("<svg") == 4
    assert "http" not in page.replace("http://www.w3.org/2000/svg", "")


def test_a_recording_goes_on_without_gap_or_repeat(
    broker: LiveBroker, topic: str, here: Path
) -> None:
    assert sluice("record", topic, "--to", "kept").status == 0
    fill(broker, topic, 6, 30)
    done = sluice("record", topic, "--to", "kept", "--from", "latest", "--until", "now", "--json")
    assert json.loads(done.out.splitlines()[-1]) == {
        "messages": 6,
        "body_bytes": 48,
        "files": 1,
        "lost": 0,
        "behind": 0,
        "total_messages": 36,
        "total_files": 2,
    }
    sluice("replay", "kept", "--speed", "max", "--no-report")
    assert content(broker.messages(f"{topic}-replay")) == content(broker.messages(topic))
    assert names(here) == ["kept"]


def test_times_bound_a_recording(broker: LiveBroker, topic: str, here: Path) -> None:
    stored = sorted(each.store_ms for each in broker.messages(topic))
    end = stored[-1] + 1
    done = sluice("record", topic, "--to", "a", "--from", str(stored[0]), "--until", str(end))
    assert done.out.startswith("recorded 30 ")
    done = sluice("record", topic, "--to", "b", "--until", str(stored[0]))
    assert done.out.startswith("recorded 0 ")
    done = sluice("record", topic, "--to", "c", "--from", str(end + 1))
    assert done.out.startswith("recorded 0 ")
    done = sluice("record", topic, "--to", "d", "--max-bytes", "100")
    assert 12 <= int(done.out.split()[1]) <= 15


def test_the_lane_has_what_the_original_has(broker: LiveBroker, here: Path) -> None:
    attributes = {"message.ttl.ms": "600000", "message.type": "FIFO"}
    broker.create_topic("five", queues=5, attributes=attributes)
    with Producer(broker.nameserver_address) as producer:
        producer.send(Message("five", "x", sharding_key="s"))
    sluice("record", "five", "--to", "kept")
    sluice("replay", "kept", "--speed", "max", "--to", "stage-{topic}", "--no-report")
    done = sluice("admin", "topicRoute", "-t", "stage-five", "--json")
    (row,) = json.loads(done.out)["queueDatas"]
    assert (row["readQueueNums"], row["writeQueueNums"]) == (5, 5)
    (found,) = broker.messages("stage-five")
    assert found.queue_id == broker.messages("five")[0].queue_id
    assert found.sharding_key == "s"


def test_a_cluster_that_does_not_know_the_topic_gets_the_lane(
    broker: LiveBroker, here: Path
) -> None:
    """With the queues that the recording has, also of a broker with another name."""
    source = queue(3, "elsewhere")._replace(broker="broker-z")
    record(here / "kept", [piece(source, 0, [message(source, b"one"), message(source, b"two")])])
    assert sluice("replay", "kept", "--speed", "max", "--no-report").status == 0
    found = broker.messages("elsewhere-replay")
    assert [(each.queue_id, each.body) for each in found] == [(3, b"one"), (3, b"two")]


def test_a_report_that_cannot_be_written_is_refused_before_anything_is_sent(
    broker: LiveBroker, topic: str, here: Path
) -> None:
    sluice("record", topic, "--to", "kept")
    done = sluice("replay", "kept", "--speed", "max", "--to", "lane", "--report", "nowhere/mine")
    assert (done.status, done.out) == (2, "")
    assert "--report: nowhere/mine.json cannot be written: No such file" in done.err
    assert not broker.messages("lane")
    assert sorted(each.name for each in here.iterdir()) == ["kept"]


def test_into_the_original_only_where_that_is_said(
    broker: LiveBroker, topic: str, here: Path
) -> None:
    sluice("record", topic, "--to", "kept")
    done = sluice("replay", "kept", "--speed", "max", "--into-original", "--no-report")
    assert done.status == 0
    assert len(broker.messages(topic)) == 60


def test_copies_with_keys_and_a_mark(broker: LiveBroker, topic: str, here: Path) -> None:
    sluice("record", topic, "--to", "kept")
    words = ["--copies", "2", "--rewrite-key", "load:{key}/{copy}", "-p", "load=yes"]
    assert sluice("replay", "kept", "--rate", "100000/s", *words, "--no-report").status == 0
    found = broker.messages(f"{topic}-replay")
    assert sorted(each.keys for each in found) == sorted(
        f"load:k{index}/{copy}" for index in range(30) for copy in (0, 1)
    )
    assert {each.properties["load"] for each in found} == {"yes"}


def test_a_plan_sends_nothing(broker: LiveBroker, here: Path) -> None:
    recording(here / "kept", {0: [0, 1000], 1: [500, 60_000]})
    done = sluice("replay", "kept", "--speed", "2x", "--dry-run")
    assert done == Done(0, "would send 4 messages in 30.0 s (2x)\n  orders -> orders-replay\n", "")
    done = sluice("replay", "kept", "--rate", "1/s", "--copies", "3", "--dry-run", "--json")
    plan = json.loads(done.out)
    assert (plan["messages"], plan["seconds"], plan["pace"]) == (12, 11, "1/s")
    assert broker.messages("orders-replay") == []


# ----------------------------------------------------------------------------------------- signals


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def run_until(condition: Callable[[str, str], bool], number: int, *words: str) -> Done:
    """Run a command and send this process a signal when its output fulfils a condition."""
    shown, said = Terminal(), io.StringIO()
    over = threading.Event()

    def end() -> None:
        while not over.wait(0.01):
            if condition(said.getvalue(), shown.getvalue()):
                signal.raise_signal(number)
                return

    ender = threading.Thread(target=end)
    ender.start()
    try:
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(shown):
            status = cli.main(list(words))
    finally:
        over.set()
        ender.join()
    return Done(status, said.getvalue(), shown.getvalue())


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_a_recording_in_order(
    topic: str, here: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    monkeypatch.setattr(record_command, "_PROGRESS_SECONDS", 0.01)
    before = signal.getsignal(number)
    done = run_until(
        lambda _, shown: "30 messages" in shown,
        number,
        *("record", topic, "--to", "kept", "--until", "never"),
    )
    assert done.status == 0
    assert done.out.startswith("recorded 30 messages")
    assert done.err.endswith("\r\x1b[K")
    assert signal.getsignal(number) == before
    assert names(here / "kept") == ["manifest.json", "part-000001.parquet"]


def test_a_signal_ends_a_replay_with_a_report(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay_command, "_PROGRESS_SECONDS", 0.01)
    recording(here / "kept", {0: [0, 0, 3_600_000]}, "slow")
    place = here / "out"
    place.mkdir()

    def without_place(_: str, shown: str) -> bool:
        if "2 of 3" not in shown:
            return False
        place.rmdir()  # the report's, while it replays
        return True

    done = run_until(without_place, signal.SIGINT, "replay", "kept", "--report", "out/mine.html")
    assert done.status == 2
    assert "out/mine.json cannot be written" in done.err
    done = run_until(
        lambda _, shown: "2 of 3" in shown, signal.SIGINT, "replay", "kept", "--report", "mine.html"
    )
    assert done.status == 1
    assert "sent 2 of 3 messages" in done.out
    assert "; stopped: interrupted; mine.html\n" in done.out
    assert "[=============       ]  67% 2 of 3, wanted" in done.err
    report = json.loads((here / "mine.json").read_bytes())
    assert (report["outcome"], report["messages"]["not_sent"]) == ("interrupted", 1)


# --------------------------------------------------------------------------------------- bad input


def one_line(done: Done) -> str:
    assert (done.status, done.out) == (2, ""), done
    assert done.err.startswith("sluice: ")
    assert done.err.count("\n") == 1
    return done.err


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["nothere", "--to", "kept"], "topic nothere is not known"),
        (["TOPIC", "nothere", "--to", "kept"], "topic nothere is not known"),
        (["a b", "--to", "kept"], "topic 'a b'"),
        (["TOPIC", "--to", ""], "a directory or s3://bucket/path"),
        (["TOPIC", "--to", "kept", "--from", "soon"], "--from soon: a time is written"),
        (
            ["TOPIC", "--to", "kept", "--from", "now-5m", "--until", "now-9m"],
            "is not before --until",
        ),
        (
            ["TOPIC", "--to", "kept", "--from", "latest", "--until", "now-9m"],
            "--from latest is not before --until now-9m",
        ),
        (["TOPIC", "--to", "hdfs://kept"], "--to hdfs://kept: it is a directory or s3://bucket/"),
        (["TOPIC", "--to", "kept", "--seconds", "x"], "--seconds x: a span"),
        (["TOPIC", "--to", "kept", "--max-bytes", "0"], "--max-bytes 0: a size"),
        (["TOPIC", "--to", "kept", "--file-bytes", "1"], "--file-bytes 1: allowed are"),
    ],
)
def test_recordings_that_cannot_be(topic: str, here: Path, words: list[str], problem: str) -> None:
    done = sluice("record", *(topic if word == "TOPIC" else word for word in words))
    assert problem in one_line(done)
    assert names(here) == []  # nothing is left behind


def test_a_directory_of_other_topics_is_refused(topic: str, here: Path) -> None:
    recording(here / "kept", {0: [1]})
    assert "is a recording of orders;" in one_line(sluice("record", topic, "--to", "kept"))


def test_a_topic_that_was_made_anew_is_refused(broker: LiveBroker, topic: str, here: Path) -> None:
    source = queue(0, topic)._replace(broker=broker.name)
    record(here / "kept", [piece(source, 1000, [message(source, b"old")])])
    assert "it is another topic now" in one_line(sluice("record", topic, "--to", "kept"))
    source = source._replace(broker="gone")
    record(here / "other", [piece(source, 0, [message(source, b"old")])])
    assert "is not known now; is its broker up?" in one_line(
        sluice("record", topic, "--to", "other")
    )


def test_no_nameserver(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record_command, "_FIRST_PATIENCE_MS", 10)
    recording(here / "kept", {0: [1]})
    for words in (["record", "orders", "--to", "x"], ["replay", "kept", "--no-report"]):
        assert "no nameserver answers" in one_line(sluice(*words, "-n", "127.0.0.1:1"))
    assert names(here) == ["kept"]


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["nothere"], "holds no recording"),
        (["kept", "--speed", "0x"], "--speed 0x: a speed is written as 5x"),
        (["kept", "--speed=-2x"], "--speed -2x: a speed is written as 5x"),
        (["kept", "--rate", "0/s"], "--rate 0/s: a rate is written"),
        (["kept", "--curve", "0s:1x,5s:0x"], "--curve 0x: a speed is written"),
        (["kept", "--ramp", "5s"], "--ramp belongs to --rate"),
        (["kept", "--to", "a.b"], "--to a.b: a lane is letters"),
        (["kept", "--to", "{topic}"], "say --into-original"),
        (["kept", "--to", "x", "--into-original"], "leave --to out"),
        (["kept", "--topic", "pays"], "--topic pays: the recording has orders"),
        (["kept", "--copies", "0"], "--copies 0: allowed are"),
        (["kept", "--rewrite-key", "{key.x}"], "the words are {key}"),
        (["kept", "-p", "x"], "-p x: write NAME=VALUE"),
        (["kept", "-p", "KEYS=x"], "KEYS is RocketMQ's own"),
        (["kept", "--in-flight", "0"], "--in-flight 0: allowed are"),
        (["kept", "--stop-errors", "1"], "--stop-errors 1: a share"),
        (["kept", "--stop-window", "0s"], "--stop-window 0s: above 0"),
        (["kept", "--stop-lag", "x"], "--stop-lag x: a span"),
    ],
)
def test_replays_that_cannot_be(here: Path, words: list[str], problem: str) -> None:
    recording(here / "kept", {0: [1]})
    assert problem in one_line(sluice("replay", *words))
    assert names(here) == ["kept"]


def test_into_an_original_that_is_not_there(here: Path) -> None:
    recording(here / "kept", {0: [1]}, "never-made")
    done = sluice("replay", "kept", "--into-original", "--no-report")
    assert "topic never-made is not known" in one_line(done)


def test_two_speeds_are_an_error_of_usage(here: Path) -> None:
    done = sluice("replay", "kept", "--speed", "2x", "--rate", "5/s")
    assert done.status == 2
    assert "not allowed with argument" in done.err
    done = sluice("replay", "kept", "--report", "x", "--no-report")
    assert "--no-report: not allowed with argument --report" in done.err


def test_a_damaged_file_ends_a_replay_with_one_line(here: Path) -> None:
    recording(here / "kept", {0: [1]})
    (here / "kept" / "part-000001.parquet").write_bytes(b"PAR1")
    assert "the recording is damaged" in one_line(sluice("replay", "kept", "--speed", "max"))
    assert names(here) == ["kept"]


def test_a_lane_that_takes_nothing(broker: LiveBroker, here: Path) -> None:
    recording(here / "kept", {0: [0] * 50}, "closed")
    broker.create_topic("closed-replay", queues=1)
    address = broker.broker_address
    done = sluice("admin", "updateTopicPerm", "-t", "closed-replay", "-p", "4", "-b", address)
    assert done.status == 0, done
    broker.registered()
    done = sluice("replay", "kept", "--speed", "max", "--no-report")
    assert "closed-replay has no queue that can be written" in one_line(done)


def test_sends_that_fail_are_told_and_end_it(
    broker: LiveBroker, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sending, "_AFTER_FAILURE_SECONDS", 0.0)
    recording(here / "kept", {0: [0] * 50, 1: [3_600_000]}, "large")
    done = sluice("replay", "kept", "-p", f"large={'x' * 33_000}", "--stop-errors", "1%")
    assert (done.status, done.err) == (1, "")
    assert done.out.startswith("sent 0 of 51 messages in ")
    assert " failed (MessageTooLarge: properties of " in done.out
    assert "; stopped: 100.0% of the sends failed; replay-report.html\n" in done.out
    report = json.loads((here / "replay-report.json").read_bytes())
    failed = report["messages"]["failed"]
    assert 20 <= failed <= 50
    assert report["messages"]["not_sent"] == 51 - failed
    assert sum(each["failed"] for each in report["intervals"]) == failed
    assert "<h2>Errors</h2>" in (here / "replay-report.html").read_text()


def test_without_pyarrow_it_says_how_to_get_it() -> None:
    program = (
        "import sys; sys.modules['pyarrow'] = None\n"
        "from sluice.cli import main\n"
        "sys.exit(main([sys.argv[1], 'x', *sys.argv[2:]]))"
    )
    for words in (["record", "--to", "y"], ["replay"]):
        done = subprocess.run(
            [sys.executable, "-c", program, *words],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            capture_output=True,
            text=True,
            timeout=WAIT_SECONDS,
            check=False,
        )
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr == (
            "sluice: sluice record and sluice replay need pyarrow: "
            "pip install 'sluice-mq[replay]'\n"
        )


SECRET = "a-secret-that-is-never-shown"


def test_a_recorder_signs_what_it_asks_where_the_environment_has_keys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: RemotingCommand) -> Answer:
        return 16, {}, "nobody may"

    async def work() -> None:
        async with fake_cluster(a=refuse) as cluster:
            words = ["record", "orders", "--to", str(tmp_path / "kept"), "-n", cluster.nameserver]
            assert (await asyncio.to_thread(sluice, *words)).status == 2
            asked = cluster.brokers["a"].asked
            assert asked
            assert not any("Signature" in command.ext for command in asked)
            asked.clear()
            monkeypatch.setenv("SLUICE_CLIENT_ACCESS_KEY", "shop")
            monkeypatch.setenv("SLUICE_CLIENT_SECRET_KEY", SECRET)
            done = await asyncio.to_thread(sluice, *words)
            assert SECRET not in done.out + done.err
            assert asked
            for command in asked:
                fields = dict(command.ext)
                signature = fields["Signature"]
                Credentials("shop", SECRET).sign(fields, bytes(command.body))
                assert (fields["AccessKey"], fields["Signature"]) == ("shop", signature)
            monkeypatch.delenv("SLUICE_CLIENT_SECRET_KEY")
            done = await asyncio.to_thread(sluice, *words)
            assert (done.status, "secret_key is missing" in done.err) == (2, True)

    asyncio.run(work())
