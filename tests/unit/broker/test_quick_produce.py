"""This module holds the quick way of batches into the store together with the long one: the same
requests have the same answers, and leave the same log, byte for byte.
"""

from __future__ import annotations

import errno
import struct
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import mock
from uuid import UUID

import cramjam
import pytest

from sluice.broker.kafka_produce import KafkaProduce
from sluice.broker.quick_produce import QuickProduce
from sluice.errors import Busy
from sluice.protocol import kafka_batches, kafka_codes
from sluice.protocol.kafka_batches import Record
from sluice.protocol.kafka_fast import ProducedPart, ProducePart
from tests.unit.broker.broker_kit import broker_config
from tests.unit.broker.kafka_kit import TOPIC, KafkaBroker, Peer, request_bytes

ID, EPOCH = 7, 3
VERSION = 12
STORED = TOPIC.replace(".", "%2E")
LAST = 0x7FFFFFFF
BIG = [bytes([64 + at]) * 1000 for at in range(15)]
Sent = tuple[int, bytes | None]  # partition and batch


class Side:
    """A broker that answers produce requests, with or without the quick way."""

    def __init__(self, *, is_quick: bool, **changes: Any) -> None:
        changed = {**changes, "store": replace(broker_config().store, **changes.get("store", {}))}
        self.broker = KafkaBroker(**changed)
        self.is_quick = is_quick
        self.quick_count = 0
        core = self.broker.core
        KafkaProduce(core, core.kafka_transactions).register(self.broker.api)
        self.broker.topic(TOPIC, 2)

    def send(self, *sent: Sent, version: int = VERSION, topic: str = TOPIC) -> bytes:
        """The answer to a request with these batches."""
        parts = [{"index": partition, "records": data} for partition, data in sent]
        topics = [{"name": topic, "partition_data": parts}]
        values = {"acks": -1, "timeout": 1000, "topic_data": topics}
        _, request = self.broker.api.read(Peer(), request_bytes(0, version, values))
        assert request is not None
        answers: list[bytes] = []
        store = QuickProduce.store

        def counted(
            quick: QuickProduce, parts: list[ProducePart], at: int, results: list[ProducedPart]
        ) -> int:
            reached = store(quick, parts, at, results) if self.is_quick else at
            self.quick_count += reached - at
            return reached

        def answered(values: Any) -> None:
            answers.append(b"".join(values))

        with mock.patch.object(QuickProduce, "store", counted):
            self.broker.api.serve(request, answered)
            self.broker.settle()
        (answer,) = answers
        return answer

    def log(self) -> bytes:
        """All entries."""
        log = self.broker.core.store.log
        return bytes(log.view(log.start, log.written - log.start))

    def known(self) -> Any:
        """What is known of producers."""
        states = [self.broker.core.producers.partition(STORED, each) for each in range(2)]
        return [(each.producers, each.stable.row(), each.end, each.is_changed) for each in states]


class Both:
    """Both sides, which do the same."""

    def __init__(self, **changes: Any) -> None:
        # Ids of topics are by chance, and in the log.
        with mock.patch("uuid.uuid4", return_value=UUID(int=5)):
            self.quick = Side(is_quick=True, **changes)
            self.long = Side(is_quick=False, **changes)

    def send(self, *sent: Sent, **changes: Any) -> bytes:
        answer = self.quick.send(*sent, **changes)
        assert answer == self.long.send(*sent, **changes)
        assert self.quick.log() == self.long.log()
        assert self.quick.known() == self.long.known()
        return answer

    def each(self, change: Callable[[KafkaBroker], object]) -> None:
        for side in (self.quick, self.long):
            change(side.broker)
            side.broker.settle()


def batch(
    first: int, *values: bytes, producer: int = ID, epoch: int = EPOCH, **changes: Any
) -> bytes:
    """A batch of an idempotent producer, the sequence number of its first record given. Records
    that begin with "k" have a key.
    """
    records = [
        Record(at, 0, value[:2] if value[:1] == b"k" else None, value)
        for at, value in enumerate(values)
    ]
    return kafka_batches.build(
        *(0, 1000, 1005, records), producer=(producer, epoch, first), **changes
    )


def code_in(answer: bytes, name: str = TOPIC) -> int:
    """The error code of the first batch in an answer of a flexible version."""
    at = 1 + 1 + len(name) + 1 + 4
    return int(struct.unpack_from(">h", answer, at)[0])


def compressed(first: int, *values: bytes) -> bytes:
    whole = batch(first, *values)
    inside = bytes(cramjam.zstd.compress(whole[kafka_batches.HEAD_BYTES :]))
    codec, count = kafka_batches.CODEC_ZSTD, len(values)
    about = {"last_delta": count - 1, "count": count, "attributes": codec}
    return kafka_batches.wrap(0, 1000, 1005, inside, producer=(ID, EPOCH, first), **about)


@pytest.mark.parametrize("flush", ["async", "sync"])
def test_usual_batches_take_the_quick_way_and_leave_the_same_log(flush: str) -> None:
    both = Both(flush=flush)
    both.send((0, batch(0, *BIG)), (1, batch(0, b"a")))
    assert both.quick.quick_count == 0, "nothing is known of the producer, and nothing is stored"
    both.send((0, batch(15, *BIG)), (1, batch(1, b"b")))
    both.send((0, batch(30, *BIG)))  # its form is known now
    both.send((0, batch(45, b"a", b"bc", b"")), (1, batch(2, *[b"v"] * 200)))
    both.send((0, compressed(48, b"x", b"y")), version=7)
    both.send((0, batch(0, b"of nobody", producer=-1, epoch=-1)), version=9)
    assert both.quick.quick_count == 7
    assert both.long.quick_count == 0
    stats = [side.broker.core.stats for side in (both.quick, both.long)]
    assert (stats[0].put, stats[0].put_bytes) == (stats[1].put, stats[1].put_bytes)


def test_many_batches_of_one_request_have_consecutive_offsets() -> None:
    both = Both()
    both.send((0, batch(0, b"first")))
    answer = both.send(*[(0, batch(1 + 15 * at, *BIG)) for at in range(8)])
    assert both.quick.quick_count == 8
    offsets = [head.base_offset for head, _ in both.quick.broker.batches()]
    assert offsets == [0, *range(1, 1 + 8 * 15, 15)]
    assert code_in(answer) == 0


def test_sequence_numbers_begin_again_after_the_highest() -> None:
    both = Both()
    both.send((0, batch(LAST - 4, b"a")))
    both.send((0, batch(LAST - 3, b"b", b"c", b"d", b"e", b"f", b"g")))
    both.send((0, batch(2, b"h")))
    assert both.quick.quick_count == 2


def unusual() -> dict[str, tuple[bytes | None, int, int]]:
    """What follows ten batches of one record: a batch, its partition, the code that is answered."""
    good = batch(10, *BIG)
    codes = kafka_codes
    far_ms = 1_900_000_000_000 + 400 * 86_400_000
    return {
        "the same again": (batch(9, b"9"), 0, codes.NONE),
        "one of the newest five again": (batch(6, b"6"), 0, codes.NONE),
        "an older one again": (batch(2, b"2"), 0, codes.OUT_OF_ORDER_SEQUENCE_NUMBER),
        "a gap": (batch(12, b"x"), 0, codes.OUT_OF_ORDER_SEQUENCE_NUMBER),
        "an older epoch": (batch(10, b"x", epoch=2), 0, codes.INVALID_PRODUCER_EPOCH),
        "a newer epoch": (batch(0, b"x", epoch=4), 0, codes.NONE),
        "a newer epoch, not from 0": (
            *(batch(10, b"x", epoch=4), 0),
            codes.OUT_OF_ORDER_SEQUENCE_NUMBER,
        ),
        "another producer": (batch(5, b"x", producer=8), 0, codes.NONE),
        "a wrong checksum": (good[:-1] + b"!", 0, codes.CORRUPT_MESSAGE),
        "half of a batch": (good[:900], 0, codes.INVALID_RECORD),
        "records that end early": (ending_early(10), 0, codes.INVALID_RECORD),
        "a record of another length in between": (misled(10), 0, codes.INVALID_RECORD),
        "compressed nonsense": (nonsense(10), 0, codes.UNKNOWN_SERVER_ERROR),
        "of a transaction": (
            *(batch(10, b"x", attributes=kafka_batches.TRANSACTIONAL), 0),
            codes.TRANSACTIONAL_ID_AUTHORIZATION_FAILED,
        ),
        "a control batch": (
            *(batch(10, b"x", attributes=kafka_batches.CONTROL), 0),
            codes.INVALID_RECORD,
        ),
        "far in the future": (
            kafka_batches.build(
                0, far_ms, far_ms, [Record(0, 0, None, b"x")], producer=(ID, EPOCH, 10)
            ),
            0,
            codes.INVALID_TIMESTAMP,
        ),
        "too large": (batch(10, bytes(70_000)), 0, codes.MESSAGE_TOO_LARGE),
        "nothing": (None, 0, codes.INVALID_RECORD),
        "a partition that is not there": (batch(10, b"x"), 2, codes.UNKNOWN_TOPIC_OR_PARTITION),
        "a negative partition": (batch(10, b"x"), -1, codes.UNKNOWN_TOPIC_OR_PARTITION),
    }


def ending_early(first: int) -> bytes:
    inside = batch(first, *BIG)[kafka_batches.HEAD_BYTES :] + b"beyond"
    return kafka_batches.wrap(
        0, 1000, 1005, inside, last_delta=14, count=15, producer=(ID, EPOCH, first)
    )


def misled(first: int) -> bytes:
    """As long as one whose records are alike, and the eighth says that it is shorter."""
    inside = bytearray(batch(first, *BIG)[kafka_batches.HEAD_BYTES :])
    step = len(inside) // 15
    inside[7 * step] -= 2
    return kafka_batches.wrap(
        0, 1000, 1005, bytes(inside), last_delta=14, count=15, producer=(ID, EPOCH, first)
    )


def nonsense(first: int) -> bytes:
    return kafka_batches.wrap(
        *(0, 1000, 1005, b"no zstd at all"),
        last_delta=0,
        count=1,
        attributes=kafka_batches.CODEC_ZSTD,
        producer=(ID, EPOCH, first),
    )


@pytest.mark.parametrize("name", unusual())
def test_what_is_unusual_is_answered_as_ever(name: str) -> None:
    data, partition, code = unusual()[name]
    both = Both(kafka_batch_bytes_max=65_536)
    for at in range(10):
        both.send((0, batch(at, b"%d" % at)))
    both.send((1, batch(0, *BIG)), (1, batch(15, *BIG)), (1, batch(30, *BIG)))  # a form is known
    taken = both.quick.quick_count
    assert code_in(both.send((partition, data))) == code
    assert both.quick.quick_count == taken
    if name != "a newer epoch":
        assert code_in(both.send((0, batch(10, b"next")))) == 0
        assert both.quick.quick_count == taken + 1


def test_a_bad_batch_leaves_its_neighbours_alone() -> None:
    both = Both()
    both.send((0, batch(0, b"a")), (1, batch(0, b"b")))
    both.send((0, ending_early(1)), (1, batch(1, *BIG)), (0, batch(1, *BIG)))
    assert both.quick.quick_count == 2


@pytest.mark.parametrize(
    "change",
    [
        {"kafka_check_records": False},
        {"store": {"kafka_key_index": True}},
        {"store": {"message_crc": False}},
    ],
)
def test_settings_hold_on_the_quick_way(change: dict[str, Any]) -> None:
    both = Both(**change)
    for at in range(3):
        both.send((0, batch(at, b"%d" % at)))
    both.send((0, ending_early(3)))
    is_quick = change in ({"kafka_check_records": False}, {"store": {"message_crc": False}})
    assert bool(both.quick.quick_count) == is_quick


@pytest.mark.parametrize(
    "configs",
    [
        {"message.timestamp.type": "LogAppendTime"},
        {"cleanup.policy": "compact"},
        {"sluice.delay.headers": "true"},
        {"max.message.bytes": "2000"},
    ],
)
def test_topics_that_ask_for_something_have_it(configs: dict[str, str]) -> None:
    both = Both()
    with mock.patch("uuid.uuid4", return_value=UUID(int=6)):
        both.each(lambda broker: broker.core.kafka_topics.create("special", 1, configs))
    for at in range(3):
        both.send((0, batch(at, b"k%d" % at)), topic="special")
    both.send((0, batch(3, *BIG)), topic="special")
    assert both.quick.quick_count == (2 if "max.message.bytes" in configs else 0)


def test_after_a_failed_write_the_log_says_how_things_stand() -> None:
    both = Both()
    both.send((0, batch(0, b"a")))
    both.send((0, batch(1, b"b")))
    both.each(lambda broker: broker.files.fail("pwritev", error=errno.ENOSPC, within="/commitlog/"))
    for side in (both.quick, both.long):  # one by one: looking at what is known reads it again
        answer = side.send((0, batch(2, b"c")))
        assert code_in(answer) == kafka_codes.KAFKA_STORAGE_ERROR
        answer = side.send((0, batch(3, b"d")))
        assert code_in(answer) == kafka_codes.OUT_OF_ORDER_SEQUENCE_NUMBER
    assert code_in(both.send((0, batch(2, b"c")))) == 0
    assert code_in(both.send((0, batch(3, b"d")))) == 0
    heads = [(head.base_offset, head.base_sequence) for head, _ in both.quick.broker.batches()]
    assert heads == [(0, 0), (1, 1), (2, 2), (3, 3)]
    assert both.quick.quick_count >= 2


def closed(broker: KafkaBroker) -> None:
    broker.core.reconfigure(replace(broker.core.config, permission="r"))


def busy(broker: KafkaBroker) -> None:
    admission = broker.core.admission
    admission.free_end = -1
    mock.patch.object(admission, "_check_all", side_effect=Busy("much to do")).start()
    mock.patch.object(admission, "end_turn").start()


def shrunk(broker: KafkaBroker) -> None:
    core = broker.core
    settings = core.topics.get(STORED)
    assert settings is not None
    core.topics.put([replace(settings, read_queues=0, write_queues=0)])


def in_transaction(broker: KafkaBroker) -> None:
    broker.core.producers.stable_offsets(STORED, 0).data(ID, 0)


@pytest.mark.parametrize(
    ("change", "code"),
    [
        (closed, kafka_codes.TOPIC_AUTHORIZATION_FAILED),
        (busy, kafka_codes.REQUEST_TIMED_OUT),
        (shrunk, kafka_codes.UNKNOWN_TOPIC_OR_PARTITION),
        (in_transaction, kafka_codes.INVALID_TXN_STATE),
    ],
)
def test_a_change_holds_for_the_next_batch(
    change: Callable[[KafkaBroker], None], code: int
) -> None:
    both = Both()
    for at in range(2):
        both.send((0, batch(at, b"%d" % at)))
    assert both.quick.quick_count == 1
    try:
        both.each(change)
        assert code_in(both.send((0, batch(2, b"2")))) == code
    finally:
        mock.patch.stopall()


def test_a_lane_does_not_outlive_its_queue() -> None:
    side = Side(is_quick=True)
    for at in range(2):
        side.send((0, batch(at, b"%d" % at)))
    core = side.broker.core
    lane = core.producers.partition(STORED, 0).lane
    assert lane is not None
    assert lane.takes(Peer.born_host)
    assert not lane.takes(bytes(20)), "addresses of another length"
    core.topics.delete(STORED)
    side.broker.settle()
    assert not lane.takes(Peer.born_host)


def test_a_topic_that_was_made_again_begins_at_0() -> None:
    both = Both()
    for at in range(3):
        both.send((0, batch(at, b"%d" % at)))

    def again(broker: KafkaBroker) -> None:
        core = broker.core
        core.topics.delete(STORED)
        core.producers.forget_topic(STORED)
        core.kafka_topics.forget(STORED)
        core.ask_turn()
        broker.settle()
        with mock.patch("uuid.uuid4", return_value=UUID(int=7)):
            broker.topic(TOPIC, 2)

    both.each(again)
    for at in range(2):
        both.send((0, batch(at, b"%d" % at)))
    assert [head.base_offset for head, _ in both.quick.broker.batches()] == [0, 1]


def test_what_is_known_comes_back_after_a_crash() -> None:
    both = Both()
    for at in range(8):
        both.send((0, batch(at, b"%d" % at)))
    for side in (both.quick, both.long):
        side.broker.crash()
        core = side.broker.core
        KafkaProduce(core, core.kafka_transactions).register(side.broker.api)
    assert code_in(both.send((0, batch(5, b"5")))) == 0, "it came before"
    assert code_in(both.send((0, batch(8, b"8")))) == 0
    assert len(both.quick.broker.batches()) == 9
