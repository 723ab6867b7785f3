"""This module asks the coordinators of groups and transactions what clients rarely ask, and expects
what Kafka's broker answers.
"""

from __future__ import annotations

from typing import Any

import pytest

from sluice.protocol import kafka_codes as codes
from tests.unit.broker.kafka_kit import TOPIC, KafkaBroker
from tests.unit.broker.test_kafka_group_api import GROUP, commit, delete_offsets, join, member
from tests.unit.broker.test_kafka_transactions import Producer


@pytest.fixture
def broker() -> KafkaBroker:
    made = KafkaBroker()
    made.topic()
    return made


def groups(broker: KafkaBroker) -> list[str]:
    return [each.group_id for each in broker.ask(codes.LIST_GROUPS, 5).groups]


# ------------------------------------------------------------------------------------------- groups


@pytest.mark.parametrize("changes", [{"topic": "unknown"}, {"partition": 7}])
def test_a_commit_of_nothing_that_is_there_makes_no_group(
    broker: KafkaBroker, changes: dict[str, Any]
) -> None:
    missing = codes.UNKNOWN_TOPIC_OR_PARTITION
    assert commit(broker, **changes) == missing
    assert commit(broker, **changes, generation=4, member_id="m") == missing
    assert groups(broker) == []


def test_a_group_that_is_refused_is_so_whatever_its_texts_are(broker: KafkaBroker) -> None:
    long = "x" * 5000
    code = commit(broker, generation=4, member_id="m", metadata=long)
    assert code == codes.ILLEGAL_GENERATION
    assert commit(broker, metadata=long) == codes.OFFSET_METADATA_TOO_LARGE


def test_members_that_nobody_understands_may_read_anything(broker: KafkaBroker) -> None:
    assert commit(broker) == 0
    values = {
        "group_id": GROUP,
        "session_timeout": 10_000,
        "rebalance_timeout": 10_000,
        "protocol_type": "consumer",
        "protocols": [{"name": "odd", "metadata": b"\0"}],
    }
    asked = broker.begin(codes.JOIN_GROUP, 3, member_id="", **values)
    assert asked.body.error_code == 0
    assert delete_offsets(broker) == (0, [codes.GROUP_SUBSCRIBED_TO_TOPIC])


@pytest.mark.parametrize("missing", ["protocol_type", "protocol_name"])
def test_a_newer_member_names_its_protocol(broker: KafkaBroker, missing: str) -> None:
    joined = join(broker, 3)
    names = {"protocol_type": "consumer", "protocol_name": "range"}
    del names[missing]
    synced = broker.ask(
        codes.SYNC_GROUP, 5, group_id=GROUP, member_id=joined.member_id, generation_id=1, **names
    )
    assert synced.error_code == codes.INCONSISTENT_GROUP_PROTOCOL


def test_what_members_have_is_told_while_they_join(broker: KafkaBroker) -> None:
    first = member(broker)
    join(broker, 5, first.member_id)  # the leader, so all join again
    (found,) = broker.ask(codes.DESCRIBE_GROUPS, 5, groups=[GROUP]).groups
    assert found.group_state == "CompletingRebalance"
    assert [each.member_assignment for each in found.members] == [b"all"]


def test_a_group_without_a_name_has_no_offsets_to_delete(broker: KafkaBroker) -> None:
    topics = [{"name": TOPIC, "partitions": [{"partition_index": 0}]}]
    body = broker.ask(codes.OFFSET_DELETE, 0, group_id="", topics=topics)
    assert body.error_code == codes.INVALID_GROUP_ID


# ------------------------------------------------------------------------------------- transactions


def commit_offset(
    broker: KafkaBroker,
    producer: Producer,
    group: str = GROUP,
    topic: str = TOPIC,
    *,
    version: int = 5,
    generation: int = -1,
) -> int:
    line = {"partition_index": 0, "committed_offset": 1, "committed_metadata": ""}
    body = broker.ask(
        codes.TXN_OFFSET_COMMIT,
        version,
        transactional_id=producer.name,
        group_id=group,
        producer_id=producer.id,
        producer_epoch=producer.epoch,
        generation_id=generation,
        topics=[{"name": topic, "partitions": [line]}],
    )
    return int(body.topics[0].partitions[0].error_code)


def test_offsets_that_no_transaction_takes(broker: KafkaBroker) -> None:
    producer = Producer(broker, newer=True)
    producer.init()
    assert commit_offset(broker, producer, "", TOPIC) == codes.INVALID_GROUP_ID
    missing = codes.UNKNOWN_TOPIC_OR_PARTITION
    assert commit_offset(broker, producer, GROUP, "unknown") == missing
    assert groups(broker) == []
    found = broker.core.kafka_transactions.get(producer.name)
    assert found is not None
    assert found.phase == "Empty", "nothing was begun"
    assert commit_offset(broker, producer, GROUP, TOPIC) == 0


def test_a_producer_that_was_shut_out_hears_of_that_first(broker: KafkaBroker) -> None:
    old = Producer(broker, newer=True)
    old.init()
    assert commit_offset(broker, old, generation=4) == codes.ILLEGAL_GENERATION
    Producer(broker, newer=True).init()
    assert commit_offset(broker, old, generation=4) == codes.INVALID_PRODUCER_EPOCH


@pytest.mark.parametrize(
    ("version", "code"), [(3, codes.COORDINATOR_NOT_AVAILABLE), (5, codes.CONCURRENT_TRANSACTIONS)]
)
def test_offsets_while_a_transaction_ends(broker: KafkaBroker, version: int, code: int) -> None:
    producer = Producer(broker, newer=True)
    producer.init()
    found = broker.core.kafka_transactions.get(producer.name)
    assert found is not None
    found.is_busy = True
    assert commit_offset(broker, producer, version=version) == code


@pytest.mark.parametrize("newer", [False, True], ids=["TV1", "TV2"])
def test_whose_transactions_were_ended_by_a_coordinator(broker: KafkaBroker, newer: bool) -> None:
    def seen() -> dict[int, tuple[int, int]]:
        topics = [{"name": TOPIC, "partition_indexes": [0]}]
        (part,) = broker.ask(codes.DESCRIBE_PRODUCERS, 0, topics=topics).topics[0].partitions
        return {
            each.producer_id: (each.coordinator_epoch, each.current_txn_start_offset)
            for each in part.active_producers
        }

    assert broker.produce(900, 0, 0, b"plain").code == 0
    producer = Producer(broker, newer=newer)
    producer.init()
    assert producer.send(b"x") == 0
    assert seen() == {900: (-1, -1), producer.id: (-1, 1)}
    assert producer.end(commit=True) == 0
    assert seen() == {900: (-1, -1), producer.id: (0, -1)}


def test_states_that_kafka_knows_are_known(broker: KafkaBroker) -> None:
    states = ["PrepareEpochFence", "Dead", "Odd"]
    body = broker.ask(codes.LIST_TRANSACTIONS, 2, state_filters=states)
    assert body.unknown_state_filters == ("Odd",)


@pytest.mark.parametrize(
    ("name", "code"),
    [("unknown", codes.UNKNOWN_TOPIC_OR_PARTITION), ("a/b", codes.INVALID_TOPIC_EXCEPTION)],
)
def test_producers_of_topics_that_are_not_there(broker: KafkaBroker, name: str, code: int) -> None:
    topics = [{"name": name, "partition_indexes": [0]}]
    (part,) = broker.ask(codes.DESCRIBE_PRODUCERS, 0, topics=topics).topics[0].partitions
    assert part.error_code == code
