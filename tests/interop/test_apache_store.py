"""One store directory, two brokers: what Sluice wrote Apache reads, and the other way round.

Apache RocketMQ 5.5.0's own broker is the judge: it checks every size, checksum and file length when
it opens a directory, and its Java client reads the messages back through its own code.
"""

import json
import os
import random
import subprocess
import sys
import zlib
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest

from peers import Jars, RocketMQ
from peers.programs import parse_events
from sluice.model import QueueKey
from sluice.protocol import records
from sluice.storage.blocking import BlockingStore
from sluice.storage.inspect import EXIT_DAMAGED
from sluice.storage.inspect import main as inspect
from tests.interop.clients import Event, JavaClients, SendPlan, kind, progress
from tests.interop.store_load import (
    APACHE_SIZES,
    BORN_MS,
    GROUP,
    QUEUES,
    SEGMENT_BYTES,
    SHARED_KEYS,
    Seen,
    Stored,
    group_settings,
    make_topics,
    open_sluice,
    put_messages,
    sha256,
)

ADDED_PROPERTIES = frozenset(
    {"CLUSTER", "MSG_REGION", "TRACE_ON", "__CRC32#"}  # by the broker that stores
    | {"CONSUME_START_TIME", "MAX_OFFSET", "MIN_OFFSET"}  # by the client that reads
)


def read_queues(store: BlockingStore, queues: dict[str, int]) -> Stored:
    """All messages of these topics, by Sluice; offsets must be continuous from the first on."""
    stored: Stored = {}
    for topic, count in queues.items():
        for queue_id in range(count):
            offset, end = store.min_offset(topic, queue_id), store.max_offset(topic, queue_id)
            while offset < end:
                result = store.read(topic, queue_id, offset, count_max=32)
                assert result.messages, (topic, queue_id, offset, end, result.status)
                for view in result.messages:
                    entry = records.decode(view)
                    assert (entry.topic, entry.queue_id) == (topic, queue_id)
                    assert entry.queue_offset == offset
                    stored[topic, queue_id, offset] = seen_by_sluice(entry)
                    offset += 1
                assert result.next_offset == offset
    return stored


def seen_by_sluice(entry: records.Entry) -> Seen:
    body = bytes(entry.body)
    if entry.sys_flag & records.SYS_COMPRESSED:
        body = zlib.decompress(body)
    return Seen(sha256(body), plain(records.parse_properties(entry.properties)), entry.flag)


def seen_by_java(events: Sequence[Event]) -> Stored:
    """What the Java consumer printed; no message may come twice."""
    stored = {
        (row["topic"], row["queueId"], row["queueOffset"]): Seen(
            row["bodySha256"], plain(row["properties"]), row["flag"]
        )
        for row in events
    }
    assert len(stored) == len(events)
    return stored


def plain(properties: dict[str, str]) -> dict[str, str]:
    """Properties without those that a storing broker or a reading client adds by itself."""
    return {name: value for name, value in properties.items() if name not in ADDED_PROPERTIES}


def assert_same(found: Stored, expected: Stored) -> None:
    """Equal, with a short message: the first differences instead of two dumps of thousands."""
    assert sorted(expected.keys() - found.keys())[:3] == [], "missing"
    assert sorted(found.keys() - expected.keys())[:3] == [], "invented"
    wrong = [place for place, seen in expected.items() if found[place] != seen]
    assert [(place, found[place], expected[place]) for place in sorted(wrong)[:3]] == []


def sent_places(sent: Sequence[Event]) -> dict[tuple[str, int, int], tuple[str, int]]:
    """Where the Java producer was told that its messages went."""
    return {
        (row["topic"], row["queueId"], row["queueOffset"]): (row["bodySha256"], row["flag"])
        for row in sent
    }


def short(stored: Stored) -> dict[tuple[str, int, int], tuple[str, int]]:
    return {place: (seen.body_sha256, seen.flag) for place, seen in stored.items()}


def ends(stored: Stored) -> Counter[QueueKey]:
    """How many messages each queue holds."""
    return Counter(QueueKey(topic, queue_id) for topic, queue_id, _ in stored)


def new_apache(jars: Jars, directory: Path, **config: object) -> RocketMQ:
    return RocketMQ(directory, config={**APACHE_SIZES, **config}, jars=jars)


def segment_count(apache: RocketMQ) -> int:
    return len(list((apache.store_directory / "commitlog").iterdir()))


def write_with_sluice(apache: RocketMQ) -> tuple[Stored, dict[QueueKey, int], list[str]]:
    """A store with topics, a group, committed offsets and messages in several segments.

    Returns the messages, the committed offsets and the message ids by number.
    """
    with open_sluice(apache.store_directory, apache.broker_port) as store:
        make_topics(store)
        store.change([("group", GROUP, group_settings(GROUP))])
        stored, ids = put_messages(store, range(4_000), random.Random(20))
        committed = {queue: count // 2 for queue, count in ends(stored).items()}
        for queue, offset in committed.items():
            store.commit_offset(GROUP, queue.topic, queue.queue_id, offset)
    assert segment_count(apache) > 3
    return stored, committed, ids


def append_and_be_killed(apache: RocketMQ, *, after: int) -> list[Event]:
    """Kill -9 a process that appends with Sluice, once so many appends were acknowledged."""
    words = [str(apache.store_directory), str(apache.broker_port)]
    repository = Path(__file__).parents[2]
    with subprocess.Popen(
        [sys.executable, "-m", "tests.interop.sluice_writer", *words],
        cwd=repository,
        env={**os.environ, "PYTHONPATH": f"{repository / 'src'}{os.pathsep}{repository}"},
        stdout=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None
        try:
            lines = [process.stdout.readline() for _ in range(after)]
        finally:
            process.kill()
        lines += process.stdout.readlines()
    # The last line may have been cut off in the middle.
    return parse_events(b"".join(line for line in lines if line.endswith(b"\n")).decode())


def check_queries(
    apache: RocketMQ, clients: JavaClients, stored: Stored, ids: list[str]
) -> dict[tuple[str, int], tuple[int, int]]:
    """By key, unique key and message id, for messages spread over the whole log.

    Returns how far `GROUP` is, which is asked on the way.
    """
    by_number = {seen.flag: (place, seen) for place, seen in stored.items()}
    offsets = {}
    for topic in ("Orders", "Payments"):
        numbers = [n for n in range(0, len(ids), 97) if by_number[n][0][0] == topic]
        sharing = {n for n in range(3, len(ids), SHARED_KEYS) if by_number[n][0][0] == topic}
        assert len(numbers) > 5
        assert len(sharing) > 1
        found = clients.query(
            apache.nameserver_address,
            topic,
            keys=[f"key-{n}" for n in numbers] + ["key-none", "shared-3"],
            unique_keys=[f"7F000001{n:024X}" for n in numbers],
            message_ids=[ids[n] for n in numbers],
            group=GROUP,
        )
        assert [row["asked"] for row in kind(found, "missing")] == ["key-none"]
        expected = {
            (by, asked): by_number[n][1].body_sha256
            for n in numbers
            for by, asked in (
                ("key", f"key-{n}"),
                ("unique", f"7F000001{n:024X}"),
                ("id", ids[n]),
            )
        }
        rows = kind(found, "found")
        assert {
            (row["by"], row["asked"]): row["bodySha256"]
            for row in rows
            if row["asked"] != "shared-3"
        } == expected
        assert {row["flag"] for row in rows if row["asked"] == "shared-3"} == sharing
        offsets = progress(found)
    return offsets


def test_apache_serves_and_extends_what_sluice_wrote(
    rocketmq_jars: Jars, java_clients: JavaClients, tmp_path: Path
) -> None:
    apache = new_apache(rocketmq_jars, tmp_path / "apache")
    stored, committed, ids = write_with_sluice(apache)
    with apache:
        nameserver = apache.nameserver_address
        received = java_clients.receive_all(nameserver, list(QUEUES))
        assert_same(seen_by_java(received), stored)
        assert {row["bornHost"] for row in received} == {"10.1.2.3:4321"}
        assert {row["bornMs"] - row["flag"] for row in received} == {BORN_MS}
        assert {row["offsetMsgId"] for row in received} == set(ids)
        offsets = check_queries(apache, java_clients, stored, ids)
        count = ends(stored)
        assert offsets == {queue: (committed[queue], count[queue]) for queue in count}
        shown = apache.mqadmin("consumerProgress", "-g", GROUP).stdout
        lag = sum(count.values()) - sum(committed.values())
        assert f"Consume Diff Total: {lag}" in shown

        tagged = java_clients.receive_push(
            nameserver,
            ["Orders"],
            sum(row["topic"] == "Orders" and row["tags"] == "TagA" for row in received),
            group="tagged",
            tags="TagA",
        )
        assert_same(
            seen_by_java(tagged),
            {
                place: seen
                for place, seen in stored.items()
                if place[0] == "Orders" and seen.properties.get("TAGS") == "TagA"
            },
        )

        sent = java_clients.send(
            nameserver, SendPlan("more", ["Orders", "Payments"], count=1_000, queues=2)
        )
        first_new = min(row["queueOffset"] for row in sent if row["topic"] == "Orders")
        assert first_new in (count[QueueKey("Orders", 0)], count[QueueKey("Orders", 1)])
        apache.stop()
    with open_sluice(apache.store_directory, apache.broker_port) as store:
        found = read_queues(store, QUEUES)
    assert short(found) == short(stored) | sent_places(sent)
    assert_same({place: found[place] for place in stored}, stored)


def damage(apache: RocketMQ, numbers: Sequence[int], ids: Sequence[str]) -> None:
    """Let one byte of each of these messages rot on the disk."""
    for number in numbers:
        position = int(ids[number][-16:], 16)
        at = position % SEGMENT_BYTES
        path = apache.store_directory / "commitlog" / f"{position - at:020d}"
        with path.open("r+b") as file:
            file.seek(at + 91)
            byte = file.read(1)[0]
            file.seek(at + 91)
            file.write(bytes([byte ^ 0x10]))


def test_what_is_salvaged_is_a_store_for_sluice_and_for_apache(
    rocketmq_jars: Jars,
    java_clients: JavaClients,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Positions and offsets are kept, so the lost ones are holes in their queues.

    The holes are in the second and later log files: behind a hole Apache's broker goes on at the
    next file, and takes every hole to lie in the first one.
    """
    damaged = new_apache(rocketmq_jars, tmp_path / "damaged")
    stored, _, ids = write_with_sluice(damaged)
    by_number = {seen.flag: place for place, seen in stored.items()}
    first = next(n for n in range(len(ids)) if int(ids[n][-16:], 16) >= SEGMENT_BYTES)
    lost = [first, first + 1, first + 700, first + 701, first + 702, 3_500, len(ids) - 1]
    damage(damaged, lost, ids)
    good = {place: seen for place, seen in stored.items() if seen.flag not in lost}
    assert len(good) == len(stored) - len(lost)

    salvaged = new_apache(rocketmq_jars, tmp_path / "salvaged")
    words = [str(damaged.store_directory), "--salvage", str(salvaged.store_directory), "--json"]
    assert inspect(words) == EXIT_DAMAGED
    done = json.loads(capsys.readouterr().out)
    assert (done["entry_count"] >= len(good), len(done["gaps"])) == (True, 4)
    with open_sluice(salvaged.store_directory, salvaged.broker_port) as store:
        for number, place in by_number.items():
            if number % 50 == 0 or number in lost:
                found = read_one(store, *place)
                assert found == (None if number in lost else stored[place])
    with salvaged:
        received = java_clients.receive_all(salvaged.nameserver_address, list(QUEUES))
    assert_same(seen_by_java(received), good)


def read_one(store: BlockingStore, topic: str, queue_id: int, offset: int) -> Seen | None:
    """The message at an offset; None where the offset was given away, but holds nothing."""
    result = store.read(topic, queue_id, offset, count_max=1)
    for view in result.messages:
        entry = records.decode(view)
        if entry.queue_offset == offset:
            return seen_by_sluice(entry)
    assert result.next_offset > offset
    return None


def test_sluice_reads_what_apache_wrote(
    rocketmq_jars: Jars, java_clients: JavaClients, tmp_path: Path
) -> None:
    topics = ["Alpha", "Beta"]
    # It ends cleanly: there is nothing to be learnt from a disk that each message waits for.
    config = {"flushDiskType": "ASYNC_FLUSH"}
    with new_apache(rocketmq_jars, tmp_path / "apache", **config) as apache:
        nameserver = apache.nameserver_address
        plain_bodies = SendPlan("plain", topics, count=3_000, body_bytes=3_000, threads=4)
        large_bodies = SendPlan("large", topics, count=50, body_bytes=20_000)
        sent = java_clients.send(nameserver, plain_bodies)
        sent += java_clients.send(nameserver, large_bodies)
        received = java_clients.receive_push(nameserver, topics, len(sent), group="apache-readers")
        offsets = java_clients.progress(nameserver, "apache-readers")
        apache.stop()
    assert segment_count(apache) > 2
    with open_sluice(apache.store_directory, apache.broker_port) as store:
        found = read_queues(store, dict.fromkeys(topics, 4))
        by_key = store.query_key("Alpha", "large-10")
        assert [records.decode(view).flag for view in by_key] == [10]
        for topic in topics:
            assert store.table("topic")[topic]["writeQueueNums"] == 4
            for queue_id in range(4):
                expected, _ = offsets[topic, queue_id]
                assert store.committed_offset("apache-readers", topic, queue_id) == expected
    assert short(found) == sent_places(sent)
    assert_same(found, seen_by_java(received))


def test_sluice_takes_over_after_apache_was_killed_and_gives_back(
    rocketmq_jars: Jars, java_clients: JavaClients, tmp_path: Path
) -> None:
    topics = ["Orders", "Payments"]
    source = random.Random(30)
    config = {"flushDiskType": "SYNC_FLUSH"}
    with new_apache(rocketmq_jars, tmp_path / "apache", **config) as apache:
        plan = SendPlan("crash", topics, count=1_000_000, queues=2, body_bytes=2_000, threads=4)
        with java_clients.sending(apache.nameserver_address, plan) as producer:
            producer.wait_for("sent", 2_500, timeout_s=300)
            apache.kill()
            events = producer.finish(timeout_s=300)
        assert kind(events, "failed")
        acknowledged = sent_places(
            [row for row in kind(events, "sent") if row["status"] == "SEND_OK"]
        )
        assert (apache.store_directory / "abort").exists()

        with open_sluice(apache.store_directory, apache.broker_port) as store:
            found = read_queues(store, dict.fromkeys(topics, 2))
            lost = {
                place for place in acknowledged if short(found).get(place) != acknowledged[place]
            }
            assert sorted(lost)[:3] == []
            # At most the sends that were under way are there without having been acknowledged.
            assert len(found) - len(acknowledged) <= len(kind(events, "failed"))
            make_topics(store)
            added, _ = put_messages(store, range(2_000_000, 2_001_000), source)
        assert not added.keys() & found.keys()

        apache.start()
        received = java_clients.receive_all(apache.nameserver_address, list(QUEUES))
    assert_same(seen_by_java(received), found | added)


def test_apache_takes_over_after_sluice_was_killed(
    rocketmq_jars: Jars, java_clients: JavaClients, tmp_path: Path
) -> None:
    apache = new_apache(rocketmq_jars, tmp_path / "apache")
    acknowledged = sent_places(append_and_be_killed(apache, after=1_500))
    assert len(acknowledged) >= 1_500
    assert (apache.store_directory / "abort").exists()
    with apache:
        received = java_clients.receive_all(apache.nameserver_address, list(QUEUES))
        found = short(seen_by_java(received))
    lost = [place for place, sent in acknowledged.items() if found.get(place) != sent]
    assert sorted(lost)[:3] == []
    # One append was under way at most.
    assert len(found) - len(acknowledged) <= 1
