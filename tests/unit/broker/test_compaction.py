"""Compacted topics: of each key the newest record stays, at its offset, for readers of both kinds,
and longer than the log's files.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sluice.broker import compaction
from sluice.broker.topic_deletion import delete_topic
from sluice.protocol import kafka_batches
from sluice.storage.files import RealFiles
from sluice.storage.inspection import inspect_store
from sluice.storage.memory_files import KeepAll, KeepNothing
from tests.unit.broker.broker_kit import broker_config
from tests.unit.broker.compaction_kit import (
    HOUR_MS,
    MINUTE_MS,
    STORED,
    CompactingBroker,
)
from tests.unit.broker.kafka_door_kit import kafka_rig
from tests.unit.broker.test_topic_retention import alter
from tests.unit.loops import run_once

CODECS = range(5)


def filled(rounds: int = 3, **configs: str) -> CompactingBroker:
    """Keys a, b and c, each some times, and an entry at the end that stays as it is."""
    broker = CompactingBroker()
    broker.make(**configs)
    for number in range(rounds):
        broker.put(*((key, b"%b%d" % (key, number)) for key in (b"a", b"b", b"c")))
    broker.put((b"z", b"end"))
    return broker


def test_the_newest_record_of_each_key_stays() -> None:
    broker = filled()
    begin_ms = broker.now_ms
    assert len(broker.newest()) == 10
    broker.compact()
    kept = [(6, b"a", b"a2"), (7, b"b", b"b2"), (8, b"c", b"c2"), (9, b"z", b"end")]
    assert broker.newest() == kept
    assert broker.fetch()[1].ms == begin_ms + 1
    for offset in range(10):
        assert broker.newest(offset) == [each for each in kept if each[0] >= offset]
        assert [at for at, _ in broker.pull(offset)] == [e[0] for e in kept if e[0] >= offset]
    assert broker.pull()[0] == (6, b"a2")
    assert broker.core.store.min_offset(STORED, 0) == 0
    assert broker.put((b"a", b"a3")) == 10
    assert broker.newest() == [*kept, (10, b"a", b"a3")]


def test_it_is_the_same_after_a_crash_and_a_rebuild() -> None:
    broker = filled()
    broker.compact()
    kept = broker.fetch()
    for keep in (KeepAll(), KeepNothing()):
        broker.crash(keep)
        assert broker.fetch() == kept
        assert broker.core.store.min_offset(STORED, 0) == 0
    broker.core.store.release()
    broker.files = broker.files.crash(KeepAll())
    for path in list(broker.files.names("/store/sluice")):
        if path == "snapshot.json":
            broker.files.remove("/store/sluice/snapshot.json")
    broker.open()
    assert broker.core.store.recovery.rebuilt
    assert broker.fetch() == kept
    broker.put((b"a", b"later"))
    broker.put((b"z", b"end"))
    broker.compact()
    assert broker.newest() == [
        (7, b"b", b"b2"),
        (8, b"c", b"c2"),
        (9, b"z", b"end"),
        (10, b"a", b"later"),
        (11, b"z", b"end"),
    ]


@pytest.mark.parametrize("codec", CODECS, ids=kafka_batches.CODECS)
def test_batches_of_all_codecs(codec: int) -> None:
    broker = CompactingBroker()
    broker.make()
    broker.put((b"a", b"1" * 100), (b"b", b"1" * 100), attributes=codec)
    broker.put((b"a", b"2" * 100), attributes=codec)
    broker.put((b"z", b"end"))
    broker.compact()
    assert broker.newest() == [
        (1, b"b", b"1" * 100),
        (2, b"a", b"2" * 100),
        (3, b"z", b"end"),
    ]


def test_the_work_is_counted() -> None:
    broker = CompactingBroker()
    broker.make()
    work = broker.core.compaction.work
    assert (work.passes, work.read_bytes, work.dropped_bytes, work.last_ms) == (0, 0, 0, 0)
    broker.put((b"a", b"1" * 10_000))
    broker.put((b"a", b"2"))
    broker.put((b"z", b"end"))
    broker.compact()
    assert work.passes == 1
    assert 20_000 < work.read_bytes < 22_000, "once for the keys, once to copy what stays"
    assert 9_000 < work.dropped_bytes < 11_000, "all of the first batch"
    assert 0 < work.last_ms <= broker.now_ms


def test_append_times_stay() -> None:
    broker = CompactingBroker()
    broker.make()
    first_ms = broker.now_ms
    broker.put((b"a", b"1"), (b"b", b"1"), attributes=kafka_batches.APPEND_TIME)
    broker.put((b"a", b"2"), (b"z", b"end"))
    broker.put((b"z", b"end"))
    broker.compact()
    assert [(each.offset, each.ms) for each in broker.fetch()] == [
        (1, first_ms + 1),
        (2, first_ms),
        (3, first_ms + 1),
        (4, first_ms),
    ]


def test_tombstones_stay_for_a_time_and_then_go() -> None:
    broker = filled(delete_retention_ms=str(HOUR_MS))
    broker.put((b"a", None))
    broker.put((b"z", b"end"))
    broker.compact()
    kept = [(7, b"b", b"b2"), (8, b"c", b"c2"), (9, b"z", b"end"), (10, b"a", None)]
    kept.append((11, b"z", b"end"))
    assert broker.newest() == kept
    times = [each.ms for each in broker.fetch()]
    assert len(set(times[:2])) == 2
    broker.now_ms += HOUR_MS - 10 * MINUTE_MS
    broker.put((b"z", b"end"))
    broker.compact()
    kept[2:] = [*kept[3:], (12, b"z", b"end")]
    assert broker.newest() == kept
    assert [each.ms for each in broker.fetch()][:3] == [*times[:2], times[3]]
    broker.now_ms += HOUR_MS
    broker.put((b"z", b"end"))
    broker.compact()
    assert broker.newest() == [*kept[:2], (12, b"z", b"end"), (13, b"z", b"end")]


def test_little_that_is_new_is_left_alone() -> None:
    broker = filled(min_cleanable_dirty_ratio="0.7", max_compaction_lag_ms=str(HOUR_MS))
    broker.compact()
    assert len(broker.newest()) == 4
    broker.put((b"a", b"new"))
    broker.put((b"z", b"end"))
    broker.compact()
    assert len(broker.newest()) == 6
    broker.now_ms += HOUR_MS
    broker.compact()
    assert [each[0] for each in broker.newest()] == [7, 8, 9, 10, 11]


def test_young_records_are_left_alone() -> None:
    broker = filled(min_compaction_lag_ms=str(HOUR_MS))
    broker.compact()
    assert len(broker.newest()) == 10
    broker.now_ms += HOUR_MS
    broker.put((b"a", b"young"))
    broker.put((b"z", b"end"))
    broker.compact()
    assert [each[0] for each in broker.newest()] == [6, 7, 8, 9, 10, 11]


def test_messages_of_rocketmqs_producers_count_by_their_keys() -> None:
    broker = CompactingBroker()
    broker.make()
    broker.send(b"one", KEYS="a", TAGS="t")
    broker.put((b"b", b"kafka"))
    broker.send(b"without a key")
    broker.send(b"two", KEYS="b", color="red")
    broker.put((b"a", b"kafka"))
    broker.send(b"three", KEYS="a", color="blue")
    broker.put((b"z", b"end"))
    broker.compact()
    assert broker.newest() == [
        (2, None, b"without a key"),
        (3, b"b", b"two"),
        (5, b"a", b"three"),
        (6, b"z", b"end"),
    ]
    assert broker.pull() == [(2, b"without a key"), (3, b"two"), (5, b"three"), (6, b"end")]
    broker.crash()
    assert [each[0] for each in broker.pull()] == [2, 3, 5, 6]


def marker(broker: CompactingBroker, producer_id: int, *, commit: bool) -> int:
    """Append the mark that ends a transaction."""
    key = b"\x00\x00\x00\x01" if commit else b"\x00\x00\x00\x00"
    attributes = kafka_batches.CONTROL | kafka_batches.TRANSACTIONAL
    record = kafka_batches.Record(0, 0, key, b"\x00\x00\x00\x00\x00\x00")
    data = kafka_batches.build(
        0, broker.now_ms, broker.now_ms, [record], attributes=attributes,
        producer=(producer_id, 0, -1),
    )  # fmt: skip
    return broker.append(data)


def test_what_was_rolled_back_goes_and_what_is_open_stays() -> None:
    broker = CompactingBroker()
    broker.make()
    broker.put((b"a", b"good"))
    broker.put((b"a", b"bad"), attributes=kafka_batches.TRANSACTIONAL, producer=(7, 0, 0))
    marker(broker, 7, commit=False)
    broker.put((b"b", b"old"))
    broker.put((b"b", b"new"), attributes=kafka_batches.TRANSACTIONAL, producer=(7, 0, 1))
    marker(broker, 7, commit=True)
    broker.put((b"a", b"open"), attributes=kafka_batches.TRANSACTIONAL, producer=(8, 0, 0))
    broker.put((b"b", b"newer"))
    broker.put((b"z", b"end"))
    broker.compact()
    assert broker.newest() == [
        (0, b"a", b"good"),
        (4, b"b", b"new"),
        (6, b"a", b"open"),
        (7, b"b", b"newer"),
        (8, b"z", b"end"),
    ]
    assert broker.pull() == [(0, b"good"), (4, b"new")]
    # Nothing that was rolled back is left below: a reader must not be told of it.
    stable = broker.core.producers.stable_offsets(STORED, 0)
    clean = broker.core.compaction.clean_end(STORED, 0)
    assert clean == 6
    assert stable.aborted(max(0, clean), 9) == []
    broker.crash()
    # Sequence numbers go on, also of batches that are gone.
    head = kafka_batches.read_sent(
        kafka_batches.build(0, 0, 0, [kafka_batches.Record(0, 0, b"k", b"")], producer=(7, 0, 2))
    )
    producers = broker.core.producers
    states = producers.partition(STORED, 0)
    assert producers.check(states, head).code == 0
    assert producers.check(states, head._replace(base_sequence=4)).code != 0
    marker(broker, 8, commit=False)
    broker.put((b"z", b"end"))
    broker.compact()
    assert broker.newest() == [
        (0, b"a", b"good"),
        (7, b"b", b"newer"),
        (8, b"z", b"end"),
        (10, b"z", b"end"),
    ]


def test_a_record_without_a_key_is_refused() -> None:
    async def run() -> None:
        async with kafka_rig() as rig:
            client = await rig.connect()
            await client.create("table", cleanup_policy="compact")
            await client.create("log", cleanup_policy="delete")
            for codec in CODECS:
                for keys, code in (((b"a", b"b"), 0), ((b"a", None), 87), ((None,), 87)):
                    data = packed(codec, *keys)
                    assert (await client.produce("table", data)).error_code == code
                    assert (await client.produce("log", data)).error_code == 0
            assert (await client.fetch("table", 0)).high_watermark == 2 * len(CODECS)

    run_once(run())


def packed(codec: int, *keys: bytes | None) -> bytes:
    """A batch of records with these keys."""
    inside = bytearray()
    for at, key in enumerate(keys):
        kafka_batches.put_record(inside, kafka_batches.Record(at, 0, key, b"value"))
    codec, data = kafka_batches.pack(codec, inside)
    last, count = len(keys) - 1, len(keys)
    return kafka_batches.wrap(0, 1000, 1000, data, last_delta=last, count=count, attributes=codec)


def test_an_inspector_finds_nothing_wrong(tmp_path: Path) -> None:
    store = replace(broker_config().store, directory=str(tmp_path))
    disk: Any = RealFiles()
    broker = CompactingBroker(disk, store=store)
    broker.make()
    for number in range(3):
        broker.put((b"a", b"%d" % number), (b"b", b"x"))
    broker.compact()
    broker.core.store.housekeeping.checkpoint()
    broker.settle()
    broker.core.store.release()
    found = inspect_store(RealFiles(), str(tmp_path), verify=True)
    assert found.problems == []
    kinds = {queue.kind for queue in found.queues if "compacted" in queue.topic}
    assert kinds == {"batch"}


def test_what_was_kept_outlives_the_files_of_the_log() -> None:
    broker = filled()
    broker.compact()
    kept = broker.newest()
    core = broker.core
    filler = core.kafka_topics.create("filler", 1, {})
    broker.settle()
    for _ in range(3):
        for _ in range(40):
            broker.produce(-1, -1, -1, b"x" * 50_000, topic="filler")
        core.store.housekeeping.checkpoint()
        before = core.store.log.start
        broker.now_ms += 100 * HOUR_MS
        core.store.housekeeping.delete_expired()
        broker.compact()
        core.store.housekeeping.delete_expired()
        broker.compact()
        assert core.store.log.start > before
        assert broker.newest() == kept
        assert core.store.min_offset(STORED, 0) == 0
    assert core.store.min_offset(filler.stored, 0) > 0
    for keep in (KeepAll(), KeepNothing()):
        broker.crash(keep)
        assert broker.newest() == kept
    assert broker.put((b"a", b"new")) == 10
    broker.put((b"z", b"end"))
    broker.compact()
    assert [each[0] for each in broker.newest()] == [7, 8, 9, 10, 11]
    assert len(broker.hidden()) == 1


def test_what_was_never_compacted_is_not_lost_either() -> None:
    broker = CompactingBroker()
    broker.make(min_compaction_lag_ms=str(10_000 * HOUR_MS))
    broker.put((b"a", b"1"))
    broker.put((b"a", b"2"))
    for _ in range(40):
        broker.produce(-1, -1, -1, b"x" * 50_000, topic="filler")
    broker.core.store.housekeeping.checkpoint()
    broker.now_ms += 100 * HOUR_MS
    broker.core.store.housekeeping.delete_expired()
    broker.compact()
    broker.core.store.housekeeping.delete_expired()
    broker.compact()
    assert broker.core.store.log.start > 0
    assert broker.newest() == [(0, b"a", b"1"), (1, b"a", b"2")]
    broker.crash()
    assert broker.newest() == [(0, b"a", b"1"), (1, b"a", b"2")]


def test_many_keys_are_compacted_in_several_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compaction, "KEYS_MAX", 4)
    broker = CompactingBroker()
    broker.make()
    for number in range(3):
        for key in range(10):
            broker.put((b"%d" % key, b"%d" % number))
    broker.put((b"z", b"end"))
    broker.compact(20)
    assert [each[0] for each in broker.newest()] == [*range(20, 30), 30]


def test_a_deleted_topic_leaves_nothing_behind() -> None:
    broker = filled()
    broker.compact()
    assert len(broker.hidden()) == 1
    done: list[Any] = []
    delete_topic(broker.core, STORED, done.append)
    broker.settle()
    assert done == [None]
    broker.compact()
    assert broker.hidden() == []
    broker.make()
    assert broker.put((b"a", b"new")) == 0
    assert broker.newest() == [(0, b"a", b"new")]
    broker.crash()
    assert broker.newest() == [(0, b"a", b"new")]


def test_half_a_run_is_removed_at_the_start() -> None:
    broker = filled()
    broker.compact()
    kept = broker.newest()
    broker.put((b"a", b"x" * 100))
    broker.put((b"z", b"end"))
    while len(broker.hidden()) < 2:
        broker.now_ms += 100
        broker.core.tick()
        broker.settle()
    broker.crash()
    broker.settle()
    assert len(broker.hidden()) == 1
    assert broker.newest() == [*kept, (10, b"a", b"x" * 100), (11, b"z", b"end")]
    broker.compact()
    assert [each[0] for each in broker.newest()] == [7, 8, 9, 10, 11]


def test_deleted_records_stay_deleted() -> None:
    broker = filled()
    broker.compact()
    done: list[Any] = []
    broker.core.retention.begin([((STORED, 0), 8)], done.append)
    broker.settle()
    assert done == [None]
    kept = [(8, b"c", b"c2"), (9, b"z", b"end")]
    assert broker.newest() == kept
    broker.crash()
    assert broker.core.store.min_offset(STORED, 0) == 8
    assert broker.newest() == kept
    broker.put((b"y", b"more"))
    broker.put((b"z", b"end"))
    broker.compact()
    assert broker.core.store.min_offset(STORED, 0) == 8
    assert [each[0] for each in broker.newest()] == [8, 9, 10, 11]
    broker.crash()
    assert broker.core.store.min_offset(STORED, 0) == 8


def test_a_topic_may_be_compacted_and_forget_too() -> None:
    broker = filled(cleanup_policy="compact,delete", retention_ms=str(HOUR_MS))
    broker.compact()
    assert [each[0] for each in broker.newest()] == [6, 7, 8, 9]
    broker.now_ms += HOUR_MS
    broker.put((b"b", b"new"))
    broker.compact()
    assert broker.core.store.min_offset(STORED, 0) == 10
    assert broker.newest() == [(10, b"b", b"new")]


@pytest.mark.parametrize("limit", [("retention.ms", HOUR_MS), ("retention.bytes", 500)])
def test_what_only_compaction_took_is_not_before_the_beginning(limit: tuple[str, int]) -> None:
    """A consumer that stands there reads on, and is not told that it is out of range."""
    broker = filled(cleanup_policy="compact,delete")
    broker.compact()
    kept = broker.newest()
    assert kept[0][0] == 6
    assert alter(broker, limit[0], str(limit[1])) == 0
    broker.compact()
    assert broker.newest() == kept
    assert broker.core.store.min_offset(STORED, 0) == 0
    # Where a batch is too much, what follows it is the beginning.
    assert alter(broker, "retention.bytes", "100") == 0
    broker.compact()
    assert broker.newest() == kept[3:]
    assert broker.core.store.min_offset(STORED, 0) == 9


def test_offsets_by_time_are_those_of_records_that_stay() -> None:
    broker = filled()
    begin_ms = broker.now_ms
    broker.compact()
    broker.put((b"a", b"later"))

    def at(when: int) -> tuple[int, int]:
        part = {"partition_index": 0, "timestamp": when, "current_leader_epoch": -1}
        topics = [{"name": "orders.new", "partitions": [part]}]
        answer = broker.ask(2, 7, replica_id=-1, isolation_level=0, topics=topics)
        found = answer.topics[0].partitions[0]
        return found.offset, found.timestamp

    assert at(-2) == (0, -1)
    assert at(-1) == (11, -1)
    assert at(begin_ms) == (6, begin_ms)
    assert at(begin_ms + 2) == (8, begin_ms + 2)
    assert at(begin_ms + 3) == (10, broker.now_ms)
    assert at(-3) == (10, broker.now_ms)


def test_a_topic_that_is_not_compacted_any_more_forgets_with_the_log() -> None:
    broker = filled()
    broker.compact()
    topic = broker.topic()
    attributes = {**topic.settings.attributes, "kafka.cleanup.policy": "delete"}
    settings = type(topic.settings)(STORED, 2, 2, attributes=attributes)
    broker.core.topics.put([settings])
    broker.settle()
    assert [each[0] for each in broker.newest()] == [6, 7, 8, 9]
    for _ in range(40):
        broker.produce(-1, -1, -1, b"x" * 50_000, topic="filler")
    broker.core.store.housekeeping.checkpoint()
    broker.now_ms += 100 * HOUR_MS
    broker.core.store.housekeeping.delete_expired()
    broker.compact()
    assert broker.core.store.log.start > 0
    broker.compact()
    assert broker.hidden() == []
    assert broker.newest() == []
    assert broker.put((b"a", b"new")) == 10
    broker.crash()
    assert broker.newest() == [(10, b"a", b"new")]
