"""Transactions of Kafka's producers: ids and epochs, what they touch, how they end."""

from __future__ import annotations

from typing import Any

import pytest

from sluice.broker.kafka_transactions import marker
from sluice.protocol import kafka_batches
from sluice.protocol import kafka_codes as codes
from tests.unit.broker.kafka_kit import TOPIC, KafkaBroker
from tests.unit.broker.test_kafka_group_api import GROUP, commit, fetch

NAME = "till-7"


class Producer:
    """A transactional producer, of the older kind (TV1) or the newer (TV2)."""

    def __init__(self, broker: KafkaBroker, *, newer: bool = False, name: str = NAME) -> None:
        self.broker = broker
        self.newer = newer
        self.name = name
        self.id = self.epoch = -1
        self.sequences: dict[int, int] = {}

    def init(self, *, timeout_ms: int = 60_000, again: bool = False) -> int:
        told: list[tuple[int, int, int]] = []
        pair = (self.id, self.epoch) if again else (-1, -1)
        self.broker.core.kafka_transactions.init(
            self.name, timeout_ms, *pair, lambda *each: told.append(each)
        )
        self.broker.settle()
        (answer,) = told
        if not answer[0]:
            self.id, self.epoch = answer[1:]
            self.sequences = {}
        return answer[0]

    def add(self, *partitions: int, version: int = 3) -> int:
        body = self.broker.ask(
            codes.ADD_PARTITIONS_TO_TXN,
            version,
            v3_and_below_transactional_id=self.name,
            v3_and_below_producer_id=self.id,
            v3_and_below_producer_epoch=self.epoch,
            v3_and_below_topics=[{"name": TOPIC, "partitions": list(partitions)}],
        )
        (found,) = {
            int(each.partition_error_code)
            for each in body.results_by_topic_v3_and_below[0].results_by_partition
        }
        return found

    def send(self, value: bytes, partition: int = 0) -> int:
        """Write one record; of the newer kind its partition is added by it."""
        if not self.newer:
            code = self.add(partition)
            if code:
                return code
        return self.write(value, partition)

    def write(self, value: bytes, partition: int = 0) -> int:
        sequence = self.sequences.get(partition, 0)
        told = self.broker.produce(
            *(self.id, self.epoch, sequence, value),
            transactional_id=self.name,
            partition=partition,
            implicit=self.newer,
        )
        if not told.code:
            self.sequences[partition] = sequence + 1
        return told.code

    def commit_offset(self, offset: int, version: int | None = None) -> int:
        """Commit a group's offset with the transaction."""
        if version is None:
            version = 5 if self.newer else 3
        names = {
            "transactional_id": self.name,
            "group_id": GROUP,
            "producer_id": self.id,
            "producer_epoch": self.epoch,
        }
        if not self.newer:
            code = self.broker.ask(codes.ADD_OFFSETS_TO_TXN, min(version, 4), **names).error_code
            if code:
                return int(code)
        more = {"generation_id": -1, "member_id": ""} if version >= 3 else {}
        line = {"partition_index": 0, "committed_offset": offset, "committed_metadata": "in a tx"}
        topics = [{"name": TOPIC, "partitions": [line]}]
        body = self.broker.ask(codes.TXN_OFFSET_COMMIT, version, **names, **more, topics=topics)
        return int(body.topics[0].partitions[0].error_code)

    def end(self, *, commit: bool, version: int | None = None) -> int:
        if version is None:
            version = 5 if self.newer else 4
        body = self.broker.ask(
            codes.END_TXN,
            version,
            transactional_id=self.name,
            producer_id=self.id,
            producer_epoch=self.epoch,
            committed=commit,
        )
        if version >= 5 and not body.error_code:
            if (body.producer_id, body.producer_epoch) != (self.id, self.epoch):
                self.sequences = {}
            self.id, self.epoch = body.producer_id, body.producer_epoch
        return int(body.error_code)


@pytest.fixture
def broker() -> KafkaBroker:
    made = KafkaBroker()
    made.topic()
    return made


@pytest.fixture(params=[False, True], ids=["TV1", "TV2"])
def producer(broker: KafkaBroker, request: pytest.FixtureRequest) -> Producer:
    made = Producer(broker, newer=request.param)
    assert made.init() == 0
    return made


def phase(broker: KafkaBroker, name: str = NAME) -> str:
    found = broker.core.kafka_transactions.get(name)
    assert found is not None
    return found.phase.value


def test_a_commit_over_two_partitions(broker: KafkaBroker, producer: Producer) -> None:
    assert [producer.send(b"a"), producer.send(b"b", 1), producer.send(b"c")] == [0, 0, 0]
    assert phase(broker) == "Ongoing"
    assert (broker.committed(0), broker.committed(1)) == ([], [])
    assert producer.end(commit=True) == 0
    assert phase(broker) == "CompleteCommit"
    assert (broker.committed(0), broker.committed(1)) == ([b"a", b"c"], [b"b"])
    # The marker takes an offset in each partition.
    heads = [head for head, _ in broker.batches(0)]
    assert [(head.base_offset, head.is_control) for head in heads] == [
        *((0, False), (1, False)),
        (2, True),
    ]


def test_a_roll_back(broker: KafkaBroker, producer: Producer) -> None:
    producer.send(b"no")
    assert producer.end(commit=False) == 0
    producer.send(b"yes")
    assert producer.end(commit=True) == 0
    assert broker.committed() == [b"yes"]
    stable = broker.core.producers.stable_offsets(broker.topic().stored, 0)
    assert stable.aborted(0, 100) == [(producer.id, 0)]


def test_the_marker_is_kafkas() -> None:
    data = marker(7, 3, 1_000, commit=True)
    head = kafka_batches.read_sent(data)
    assert len(data) == 78
    assert (head.producer_id, head.producer_epoch, head.base_sequence) == (7, 3, -1)
    assert head.attributes == 0x30
    (record,) = kafka_batches.read_records(head, data, 1000)
    assert (record.key, record.value) == (b"\0\0\0\1", bytes(6))


@pytest.mark.parametrize(("newer", "epochs"), [(False, [0, 0, 0]), (True, [0, 1, 2])])
def test_only_the_newer_kind_raises_its_epoch(
    broker: KafkaBroker, *, newer: bool, epochs: list[int]
) -> None:
    producer = Producer(broker, newer=newer)
    producer.init()
    seen = []
    for _ in range(3):
        seen.append(producer.epoch)
        assert producer.send(b"x") == 0
        assert producer.end(commit=True) == 0
    assert seen == epochs
    heads = [head for head, _ in broker.batches()]
    # A marker of the newer kind has the epoch that the producer goes on with.
    markers = [head.producer_epoch for head in heads if head.is_control]
    assert markers == [epoch + newer for epoch in epochs]


# ----------------------------------------------------------------------------------- ids and epochs


def test_a_producer_that_comes_back_shuts_the_old_one_out(
    broker: KafkaBroker, producer: Producer
) -> None:
    producer.send(b"half")
    later = Producer(broker, newer=producer.newer)
    assert later.init() == 0
    assert (later.id, later.epoch) == (producer.id, producer.epoch + 2)  # one to shut out
    assert broker.committed() == []
    assert phase(broker) == "Empty"
    assert producer.write(b"late") == codes.INVALID_PRODUCER_EPOCH
    assert producer.add(0) == codes.PRODUCER_FENCED
    assert producer.add(0, version=1) == codes.INVALID_PRODUCER_EPOCH  # in older words
    assert producer.end(commit=True) == codes.PRODUCER_FENCED
    assert producer.end(commit=True, version=1) == codes.INVALID_PRODUCER_EPOCH
    assert producer.commit_offset(1) in (codes.PRODUCER_FENCED, codes.INVALID_PRODUCER_EPOCH)
    assert later.send(b"whole") == 0
    assert later.end(commit=True) == 0
    assert broker.committed() == [b"whole"]


@pytest.mark.parametrize(
    ("name", "timeout_ms", "code"),
    [
        ("", 1_000, codes.INVALID_REQUEST),
        ("x" * 1025, 1_000, codes.INVALID_REQUEST),
        (NAME, 0, codes.INVALID_TRANSACTION_TIMEOUT),
        (NAME, 900_001, codes.INVALID_TRANSACTION_TIMEOUT),
        (NAME, 900_000, 0),
    ],
)
def test_who_may_begin(broker: KafkaBroker, name: str, timeout_ms: int, code: int) -> None:
    assert Producer(broker, name=name).init(timeout_ms=timeout_ms) == code


def test_ids_have_a_bound() -> None:
    broker = KafkaBroker(kafka_transactional_ids_max=1)
    assert Producer(broker, name="a").init() == 0
    assert Producer(broker, name="b").init() == codes.COORDINATOR_NOT_AVAILABLE
    assert Producer(broker, name="a").init() == 0


def test_a_producer_raises_its_own_epoch(broker: KafkaBroker) -> None:
    producer = Producer(broker)
    producer.init()
    twin = Producer(broker)
    twin.id, twin.epoch = producer.id, producer.epoch
    assert producer.init(again=True) == 0
    assert producer.epoch == 1
    assert twin.init(again=True) == 0  # the same request once more: the same answer
    assert twin.epoch == 1
    Producer(broker).init()
    assert twin.init(again=True) == codes.PRODUCER_FENCED
    twin.id += 1
    assert twin.init(again=True) == codes.PRODUCER_FENCED


def test_a_producer_begins_anew_with_a_transaction_open(
    broker: KafkaBroker, producer: Producer
) -> None:
    """As clients do it after an error that a roll back ends."""
    producer.send(b"half")
    twin = Producer(broker, newer=producer.newer)
    twin.id, twin.epoch = producer.id, producer.epoch
    for each in (producer, twin):  # the same request once more: the same answer
        assert each.init(again=True) == 0
        assert (each.epoch, phase(broker)) == (1, "Empty")
    producer.sequences = {}
    assert producer.send(b"whole") == 0
    assert producer.end(commit=True) == 0
    assert broker.committed() == [b"whole"]


def test_epochs_are_used_up(broker: KafkaBroker) -> None:
    producer = Producer(broker)
    producer.init()
    found = broker.core.kafka_transactions.get(NAME)
    assert found is not None
    found.epoch = 32_766
    old = producer.id
    assert producer.init() == 0
    assert producer.id != old
    assert producer.epoch == 0


def test_epochs_are_used_up_by_ends(broker: KafkaBroker) -> None:
    producer = Producer(broker, newer=True)
    producer.init()
    found = broker.core.kafka_transactions.get(NAME)
    assert found is not None
    found.epoch = producer.epoch = 32_766
    old = producer.id
    assert producer.send(b"last") == 0
    assert producer.end(commit=True) == 0
    assert (producer.id != old, producer.epoch) == (True, 0)
    assert broker.committed() == [b"last"]
    # It did not hear the answer, and asks once more.
    producer.id, producer.epoch = old, 32_766
    assert producer.end(commit=True) == 0
    assert (producer.id != old, producer.epoch) == (True, 0)
    assert producer.send(b"next") == 0


def test_an_id_that_nobody_uses_is_forgotten(broker: KafkaBroker, producer: Producer) -> None:
    producer.send(b"x")
    producer.end(commit=True)
    broker.pass_ms(6 * 24 * 3_600_000)
    assert broker.core.kafka_transactions.get(NAME) is not None
    broker.pass_ms(2 * 24 * 3_600_000)
    assert broker.core.kafka_transactions.get(NAME) is None
    broker.crash()
    assert broker.core.kafka_transactions.get(NAME) is None


# ----------------------------------------------------------------------------------------- refusals


def test_writes_without_a_transaction(broker: KafkaBroker) -> None:
    producer = Producer(broker)
    producer.init()
    assert producer.write(b"x") == codes.INVALID_TXN_STATE
    assert producer.add(0) == 0
    assert producer.write(b"x", 1) == codes.INVALID_TXN_STATE
    assert producer.write(b"x", 0) == 0
    plain = broker.produce(producer.id, producer.epoch, 1, b"plain")
    assert plain.code == codes.INVALID_TXN_STATE
    producer.id += 1
    assert producer.write(b"x", 0) == codes.INVALID_PRODUCER_ID_MAPPING
    assert producer.add(0) == codes.INVALID_PRODUCER_ID_MAPPING
    assert producer.end(commit=True) == codes.INVALID_PRODUCER_ID_MAPPING


def test_partitions_that_are_not_there(broker: KafkaBroker) -> None:
    producer = Producer(broker)
    producer.init()
    body = broker.ask(
        codes.ADD_PARTITIONS_TO_TXN,
        0,
        v3_and_below_transactional_id=NAME,
        v3_and_below_producer_id=producer.id,
        v3_and_below_producer_epoch=producer.epoch,
        v3_and_below_topics=[
            {"name": TOPIC, "partitions": [0, 2]},
            {"name": "unknown", "partitions": [0]},
        ],
    )
    found = [
        (topic.name, each.partition_index, each.partition_error_code)
        for topic in body.results_by_topic_v3_and_below
        for each in topic.results_by_partition
    ]
    assert found == [
        (TOPIC, 0, codes.OPERATION_NOT_ATTEMPTED),
        (TOPIC, 2, codes.UNKNOWN_TOPIC_OR_PARTITION),
        ("unknown", 0, codes.UNKNOWN_TOPIC_OR_PARTITION),
    ]
    assert phase(broker) == "Empty"


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("after", [True, False])
def test_an_end_that_is_asked_for_again(
    broker: KafkaBroker, producer: Producer, *, before: bool, after: bool
) -> None:
    producer.send(b"x")
    old = (producer.id, producer.epoch)
    assert producer.end(commit=before) == 0
    new = (producer.id, producer.epoch)
    producer.id, producer.epoch = old
    assert producer.end(commit=after) == (0 if before == after else codes.INVALID_TXN_STATE)
    if before == after:
        assert (producer.id, producer.epoch) == new
    assert broker.committed() == ([b"x"] if before else [])


def test_the_end_of_nothing(broker: KafkaBroker) -> None:
    older = Producer(broker)
    older.init()
    assert older.end(commit=True) == codes.INVALID_TXN_STATE
    assert older.end(commit=False) == codes.INVALID_TXN_STATE
    newer = Producer(broker, newer=True, name="newer")
    newer.init()
    assert newer.end(commit=True) == codes.INVALID_TXN_STATE
    assert newer.end(commit=False) == 0  # nothing is rolled back, and the epoch goes up
    assert newer.epoch == 1
    assert newer.end(commit=False) == 0
    assert newer.epoch == 2
    assert newer.send(b"x") == 0
    assert newer.end(commit=True) == 0
    assert newer.end(commit=True) == codes.INVALID_TXN_STATE
    assert broker.committed() == [b"x"]


# ------------------------------------------------------------------------------------------ offsets


def committed_offset(broker: KafkaBroker, *, stable: bool = False) -> tuple[int, int]:
    line = fetch(broker, 7, stable=stable).topics[0].partitions[0]
    return int(line.error_code), line.committed_offset


def test_offsets_count_with_the_commit(broker: KafkaBroker, producer: Producer) -> None:
    commit(broker, offset=3)
    assert producer.commit_offset(9) == 0
    assert committed_offset(broker) == (0, 3)
    assert committed_offset(broker, stable=True) == (codes.UNSTABLE_OFFSET_COMMIT, -1)
    assert producer.end(commit=True) == 0
    assert committed_offset(broker, stable=True) == (0, 9)
    broker.crash()
    assert committed_offset(broker, stable=True) == (0, 9)


def test_offsets_go_with_the_roll_back(broker: KafkaBroker, producer: Producer) -> None:
    commit(broker, offset=3)
    assert producer.commit_offset(9) == 0
    broker.crash()
    assert committed_offset(broker, stable=True) == (codes.UNSTABLE_OFFSET_COMMIT, -1)
    assert producer.end(commit=False) == 0
    assert committed_offset(broker, stable=True) == (0, 3)


def test_a_later_commit_is_not_undone_by_an_earlier_one(
    broker: KafkaBroker, producer: Producer
) -> None:
    producer.commit_offset(9)
    commit(broker, offset=20)
    assert producer.end(commit=True) == 0
    assert committed_offset(broker) == (0, 20)
    broker.crash()
    assert committed_offset(broker) == (0, 20)


@pytest.mark.parametrize("version", range(6))
def test_offsets_in_every_version(broker: KafkaBroker, version: int) -> None:
    producer = Producer(broker, newer=version >= 5)
    producer.init()
    assert producer.commit_offset(4, version) == 0
    assert producer.end(commit=True) == 0
    assert committed_offset(broker) == (0, 4)


def test_offsets_without_a_word_before(broker: KafkaBroker) -> None:
    producer = Producer(broker)
    producer.init()
    producer.newer = True  # it leaves out AddOffsetsToTxn, as the newer kind does
    assert producer.commit_offset(4, 3) == codes.INVALID_TXN_STATE


def test_offsets_of_a_member_that_is_none(broker: KafkaBroker, producer: Producer) -> None:
    names = {
        "transactional_id": NAME,
        "group_id": "nobody's",
        "producer_id": producer.id,
        "producer_epoch": producer.epoch,
    }
    assert broker.ask(codes.ADD_OFFSETS_TO_TXN, 3, **names).error_code == 0
    body = broker.ask(
        codes.TXN_OFFSET_COMMIT,
        3,
        **names,
        generation_id=4,
        member_id="m",
        topics=[{"name": TOPIC, "partitions": [{"partition_index": 0, "committed_offset": 1}]}],
    )
    assert body.topics[0].partitions[0].error_code == codes.ILLEGAL_GENERATION


# --------------------------------------------------------------------------------- time and crashes


def test_a_transaction_whose_time_is_over_is_rolled_back(
    broker: KafkaBroker, producer: Producer
) -> None:
    producer.init(timeout_ms=10_000)
    producer.send(b"slow")
    producer.commit_offset(5)
    broker.tick(9_000)
    assert phase(broker) == "Ongoing"
    broker.tick(2_000)
    assert phase(broker) == "CompleteAbort"
    assert broker.committed() == []
    assert committed_offset(broker, stable=True) == (0, -1)
    assert producer.write(b"late") == codes.INVALID_PRODUCER_EPOCH
    refused = codes.INVALID_TXN_STATE if producer.newer else codes.PRODUCER_FENCED
    assert producer.end(commit=True) == refused
    assert broker.core.kafka_transactions.timed_out_count == 1


def test_a_producer_whose_time_is_over_goes_on(broker: KafkaBroker, producer: Producer) -> None:
    producer.init(timeout_ms=10_000)
    producer.send(b"slow")
    epoch = producer.epoch
    broker.tick(11_000)
    code = producer.end(commit=False) if producer.newer else producer.init(again=True)
    assert (code, producer.epoch) == (0, epoch + 1)
    producer.sequences = {}
    assert producer.send(b"new") == 0
    assert producer.end(commit=True) == 0
    assert broker.committed() == [b"new"]


def test_nobody_goes_on_after_another_one_has_begun(broker: KafkaBroker) -> None:
    late = Producer(broker, newer=True)
    late.init(timeout_ms=10_000)
    late.send(b"slow")
    broker.tick(11_000)
    assert Producer(broker, newer=True).init() == 0
    assert late.end(commit=False) == codes.PRODUCER_FENCED
    assert late.init(again=True) == codes.PRODUCER_FENCED


def test_an_open_transaction_survives_a_crash(broker: KafkaBroker, producer: Producer) -> None:
    producer.send(b"before")
    broker.crash()
    assert phase(broker) == "Ongoing"
    assert broker.committed() == []
    assert producer.send(b"after", 1) == 0
    assert producer.end(commit=True) == 0
    assert (broker.committed(0), broker.committed(1)) == ([b"before"], [b"after"])


def test_an_open_transaction_is_rolled_back_after_a_crash(
    broker: KafkaBroker, producer: Producer
) -> None:
    producer.send(b"before")
    broker.crash()
    broker.tick(61_000)
    assert phase(broker) == "CompleteAbort"
    assert broker.committed() == []


# ----------------------------------------------------------------------------------- administrators


def test_what_administrators_see(broker: KafkaBroker, producer: Producer) -> None:
    producer.send(b"x", 1)
    body = broker.ask(codes.DESCRIBE_TRANSACTIONS, 0, transactional_ids=[NAME, "no", ""])
    found, missing, empty = body.transaction_states
    assert (found.transaction_state, found.producer_id) == ("Ongoing", producer.id)
    assert [(each.topic, each.partitions) for each in found.topics] == [(TOPIC, (1,))]
    assert missing.error_code == codes.TRANSACTIONAL_ID_NOT_FOUND
    assert empty.error_code == codes.INVALID_REQUEST
    body = broker.ask(
        codes.DESCRIBE_PRODUCERS, 0, topics=[{"name": TOPIC, "partition_indexes": [0, 1, 2]}]
    )
    none, one, missing = body.topics[0].partitions
    assert none.active_producers == ()
    (active,) = one.active_producers
    assert (active.producer_id, active.current_txn_start_offset) == (producer.id, 0)
    assert missing.error_code == codes.UNKNOWN_TOPIC_OR_PARTITION


@pytest.mark.parametrize(
    ("filters", "names"),
    [
        ({}, {NAME, "other"}),
        ({"state_filters": ["Ongoing"]}, {NAME}),
        ({"state_filters": ["Empty", "Odd"]}, {"other"}),
        ({"producer_id_filters": [12345]}, set()),
        ({"duration_filter": 60_000}, {"other"}),
        ({"duration_filter": 5_000}, {NAME, "other"}),
        ({"transactional_id_pattern": "till-.*"}, {NAME}),
        ({"transactional_id_pattern": "till"}, set()),
        ({"transactional_id_pattern": ""}, {NAME, "other"}),
    ],
)
def test_a_list_of_transactions(
    broker: KafkaBroker, filters: dict[str, Any], names: set[str]
) -> None:
    producer = Producer(broker)
    producer.init()
    producer.send(b"x")
    Producer(broker, name="other").init()
    broker.tick(10_000)
    body = broker.ask(codes.LIST_TRANSACTIONS, 2, **filters)
    assert {each.transactional_id for each in body.transaction_states} == names
    assert body.unknown_state_filters == (
        ("Odd",) if len(filters) and "Odd" in str(filters) else ()
    )


@pytest.mark.parametrize("pattern", ["(a+)+$", "[", "a" * 250, ".*" * 4])
def test_patterns_that_are_not_understood(broker: KafkaBroker, pattern: str) -> None:
    body = broker.ask(codes.LIST_TRANSACTIONS, 2, transactional_id_pattern=pattern)
    assert body.error_code == codes.INVALID_REGULAR_EXPRESSION
