"""Records of Kafka's producers, asked for by key and by id as RocketMQ's clients do."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from sluice.broker import kafka_queries
from sluice.protocol import kafka_batches, kafka_keys, records
from sluice.storage.memory_files import KeepAll
from tests.unit.broker.broker_kit import broker_config
from tests.unit.broker.compaction_kit import HOUR_MS, STORED, CompactingBroker
from tests.unit.broker.test_compaction import marker, packed


def new_broker(**configs: str) -> CompactingBroker:
    broker = CompactingBroker(store=replace(broker_config().store, kafka_key_index=True))
    broker.make(**configs)
    return broker


def ask(broker: CompactingBroker, key: str, *, count_max: int = 32) -> list[tuple[int, bytes]]:
    """Offsets and bodies of the messages that have a key, the newest first."""
    answers: list[Any] = []

    def done(entries: Any, error: BaseException | None) -> None:
        assert error is None, error
        answers.append(kafka_queries.with_key(broker.core, entries, key))

    if not kafka_queries.by_id(broker.core, STORED, key, done):
        broker.core.store.query_key(STORED, key, done, count_max=count_max)
    (found,) = answers
    entries = [records.decode(view) for view in found]
    assert {entry.topic for entry in entries} <= {STORED}
    return [(entry.queue_offset, bytes(entry.body)) for entry in entries]


@pytest.mark.parametrize("codec", range(5), ids=kafka_batches.CODECS)
def test_a_record_is_found_by_its_key(codec: int) -> None:
    broker = new_broker()
    broker.put((b"a", b"1"), (b"b", b"2"), (b"a", b"3"), attributes=codec)
    broker.put((b"b", b"4"), (b"with blank", b"5"), ("ü".encode(), b"6"), attributes=codec)
    broker.send(b"7", KEYS="b other")
    assert ask(broker, "a") == [(2, b"3"), (0, b"1")]
    assert ask(broker, "b") == [(6, b"7"), (3, b"4"), (1, b"2")]
    assert ask(broker, "ü") == [(5, b"6")]
    assert ask(broker, "other") == [(6, b"7")]
    assert ask(broker, "with") == []
    assert ask(broker, "nobody") == []


def test_the_index_is_made_again_from_the_log() -> None:
    broker = new_broker()
    broker.put((b"a", b"1"), (b"b", b"2"))
    broker.put((b"a", b"3"))
    broker.core.store.release()
    broker.files = broker.files.crash(KeepAll())
    for name in broker.files.names("/store/index"):
        broker.files.remove(f"/store/index/{name}")
    broker.files.remove("/store/sluice/snapshot.json")
    broker.open()
    broker.tick(1000)
    assert ask(broker, "a") == [(2, b"3"), (0, b"1")]


def test_a_batch_may_have_more_keys_than_an_index_file() -> None:
    broker = new_broker()
    for number in range(3):
        broker.put(*((b"k%d" % at, b"%d" % number) for at in range(1000)))
    assert ask(broker, "k0") == [(2000, b"2"), (1000, b"1"), (0, b"0")]
    assert ask(broker, "k999") == [(2999, b"2"), (1999, b"1"), (999, b"0")]


def test_without_the_setting_nobody_pays_for_it() -> None:
    broker = CompactingBroker()
    broker.make()
    broker.put((b"a", b"1"))
    assert ask(broker, "a") == []


def test_what_was_not_committed_is_not_found() -> None:
    broker = new_broker()
    flags = kafka_batches.TRANSACTIONAL
    broker.put((b"a", b"bad"), attributes=flags, producer=(7, 0, 0))
    marker(broker, 7, commit=False)
    broker.put((b"a", b"good"), attributes=flags, producer=(7, 0, 1))
    marker(broker, 7, commit=True)
    broker.put((b"a", b"open"), attributes=flags, producer=(7, 0, 2))
    assert ask(broker, "a") == [(2, b"good")]


def test_a_record_is_found_by_the_id_that_it_is_shown_with() -> None:
    broker = CompactingBroker()
    broker.make()
    broker.put((b"a", b"1"), (b"b", b"2"))
    shown = [records.decode(view) for view in broker.core.unfolding.read(STORED, 0, 0).messages]
    ids = [records.message_keys(entry.properties)[0].decode() for entry in shown]
    assert [ask(broker, each) for each in ids] == [[(0, b"1")], [(1, b"2")]]
    assert ask(broker, ids[0][:-1] + "7") == []
    assert ask(broker, "0" * 56) == []


def test_what_compaction_keeps_is_found_once_and_longer_than_the_log() -> None:
    broker = new_broker()
    broker.put((b"a", b"old"), (b"b", b"kept"))
    broker.put((b"a", b"new"))
    broker.send(b"message", KEYS="c")
    broker.put((b"z", b"end"))
    broker.compact()
    assert ask(broker, "b") == [(1, b"kept")]
    assert ask(broker, "c") == [(3, b"message")]
    for _ in range(40):
        broker.produce(-1, -1, -1, b"x" * 50_000, topic="filler")
    broker.core.store.housekeeping.checkpoint()
    broker.now_ms += 100 * HOUR_MS
    for _ in range(2):
        broker.core.store.housekeeping.delete_expired()
        broker.compact()
    assert broker.core.store.log.start > 0
    assert ask(broker, "a") == [(2, b"new")]
    assert ask(broker, "b") == [(1, b"kept")]
    assert ask(broker, "c") == [(3, b"message")]


def test_keys_of_bad_batches_are_none() -> None:
    data = packed(0, b"a", b"b")
    head = kafka_batches.read_sent(data)
    assert kafka_keys.keys_of(head, data) == b"a b"
    assert kafka_keys.keys_of(head._replace(record_count=9), data) == b""
    assert kafka_keys.keys_of(head._replace(attributes=1), data) == b""
    data = packed(0, b"a", b"", None, b"a", b"x\x01", b"\xff", b"b")
    assert kafka_keys.keys_of(kafka_batches.read_sent(data), data) == b"a b"
