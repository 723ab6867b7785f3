"""This module tests Kafka's wire: every version of every answer reads back as it was meant, and
bytes that are no request are refused, whatever they announce.
"""

from __future__ import annotations

import io
import struct
from contextlib import suppress
from datetime import timedelta
from typing import Any
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kio.index import load_payload_module, load_request_schema, load_response_schema
from kio.schema.index import api_key_map, schema_name_map
from kio.serial import entity_reader, entity_writer
from kio.static.constants import EntityType

from sluice.protocol import kafka, kafka_codes, kafka_fast
from sluice.protocol.kafka_bounds import BadRequest
from sluice.protocol.kafka_fast import Faults, FetchedPart, ProducedPart

KEYS = [
    *(0, 1, 2, 3, 8, 9, 10, 11, 12, 13, 14, 15, 16, 18, 19, 20, 21, 22, 23, 24, 25, 26, 28),
    *(32, 33, 35, 37, 42, 44, 47, 60, 61, 65, 66),
]
TOPIC_ID = UUID("11111111-2222-3333-4444-555555555555")


def versions_of(key: int) -> list[int]:
    return [
        v for v, kinds in schema_name_map[api_key_map[key]].items() if EntityType.response in kinds
    ]


def read_back(key: int, version: int, data: bytes) -> Any:
    entity, size = entity_reader(load_response_schema(key, version))(data, 0)
    assert size == len(data), "the whole of it"
    return entity


@pytest.mark.parametrize("key", sorted(KEYS))
def test_an_empty_answer_of_every_version_reads_back(key: int) -> None:
    for version in versions_of(key):
        read_back(key, version, kafka.encode(key, version, {}))


def test_an_answer_has_what_its_version_has_and_no_more() -> None:
    values = {
        "brokers": [{"node_id": 7, "host": "here", "port": 9092, "rack": None}],
        "cluster_id": "c",
        "controller_id": 7,
        "topics": [
            {
                "name": "t",
                "topic_id": TOPIC_ID,
                "error_code": kafka_codes.LEADER_NOT_AVAILABLE,
                "partitions": [
                    {"partition_index": 3, "leader_id": 7, "leader_epoch": 5, "isr_nodes": (7, 8)}
                ],
            }
        ],
    }
    for version in versions_of(kafka_codes.METADATA):
        entity = read_back(
            kafka_codes.METADATA, version, kafka.encode(kafka_codes.METADATA, version, values)
        )
        (topic,) = entity.topics
        assert (topic.name, int(topic.error_code)) == ("t", 5)
        assert getattr(topic, "topic_id", TOPIC_ID) == TOPIC_ID
        assert topic.partitions[0].isr_nodes == (7, 8)
        assert getattr(topic.partitions[0], "leader_epoch", 5) == 5
        assert entity.brokers[0].host == "here"


def test_tagged_fields_are_written_where_they_say_something() -> None:
    features = {
        "finalized_features_epoch": 4,
        "finalized_features": [
            {"name": "transaction.version", "max_version_level": 2, "min_version_level": 2}
        ],
    }
    entity = read_back(18, 3, kafka.encode(18, 3, features))
    assert (entity.finalized_features_epoch, entity.finalized_features[0].name) == (
        4,
        "transaction.version",
    )
    assert read_back(18, 3, kafka.encode(18, 3, {})).finalized_features == ()


def test_the_refusal_of_a_new_api_versions_is_what_kafka_sends() -> None:
    assert kafka.refuse_api_versions(4).hex() == "002300000001001200000004"


def test_the_answer_to_api_versions_has_the_old_head_in_every_version() -> None:
    for version in range(5):
        assert kafka.frame_answer(18, version, 9, [b"xy"]) == [struct.pack(">ii", 6, 9) + b"xy"]
    assert kafka.frame_answer(3, 9, 9, [b"xy"]) == [struct.pack(">ii", 7, 9) + b"\0xy"]
    assert kafka.frame_answer(3, 8, 9, [b"xy"]) == [struct.pack(">ii", 6, 9) + b"xy"]


def test_the_records_of_an_answer_are_not_copied() -> None:
    records = memoryview(bytes(5000))
    parts = kafka.frame_answer(1, 12, 9, [b"head", records])
    assert parts[0] == struct.pack(">ii", 4 + 1 + 4 + 5000, 9) + b"\0"
    assert parts[1] == b"head"
    assert parts[2] is records


def test_the_head_of_a_request() -> None:
    frame = struct.pack(">hhih", 3, 12, 77, 4) + b"me-1" + b"\0" + b"rest"
    head = kafka.read_head(frame)
    assert head == (3, 12, 77, "me-1", 14)
    assert kafka.body_start(frame, head) == 15
    assert kafka.read_head(struct.pack(">hhih", 3, 1, 77, -1)).client_id == ""


@pytest.mark.parametrize(
    "frame",
    [
        b"",
        b"\0\x03",
        struct.pack(">hhih", 3, 1, 77, 5) + b"abc",
        struct.pack(">hhih", 3, 1, 77, 32767) + bytes(40),
    ],
)
def test_a_head_that_lies_is_refused(frame: bytes) -> None:
    with pytest.raises(BadRequest):
        kafka.read_head(frame)


@pytest.mark.parametrize(
    ("key", "version", "body"),
    [
        (3, 12, b"\xff\xff\xff\xff\x0f"),  # four thousand million topics
        (3, 4, struct.pack(">i", 2_000_000_000) + bytes(20)),
        (8, 9, b"\x02g\x00\x00\x00\x01\x02m\x00\xff\xff\xff\xff\x0f"),
        (19, 7, b"\x80\x80\x80\x80\x80\x80"),
    ],
)
def test_a_body_that_announces_more_than_it_has_is_refused(
    key: int, version: int, body: bytes
) -> None:
    with pytest.raises(BadRequest):
        kafka.decode(key, version, body, 0)


def test_bytes_behind_a_request_are_left_alone() -> None:
    assert kafka.decode(3, 12, bytes(7), 0).topics is None, "librdkafka asks for all topics so"


@given(st.sampled_from(sorted(KEYS)), st.integers(0, 13), st.binary(max_size=200))
def test_any_bytes_are_a_request_or_refused(key: int, version: int, body: bytes) -> None:
    if version not in versions_of(key):
        with pytest.raises(BadRequest):
            kafka.decode(key, version, body, 0)
        return
    with suppress(BadRequest):
        kafka.decode(key, version, body, 0)


# ------------------------------------------------------------------------------- produce and fetch


def produce_body(version: int, records: bytes | None) -> bytes:
    """A produce request as kio writes it."""
    request: Any = load_request_schema(kafka_codes.PRODUCE, version)
    module = load_payload_module(kafka_codes.PRODUCE, version, EntityType.request)
    topic = {"topic_id": TOPIC_ID} if version >= 13 else {"name": "orders"}
    value = request(
        transactional_id=None,
        acks=-1,
        timeout=timedelta(milliseconds=30_000),
        topic_data=(
            module.TopicProduceData(
                **topic,
                partition_data=(
                    module.PartitionProduceData(index=3, records=records),
                    module.PartitionProduceData(index=4, records=b""),
                ),
            ),
        ),
    )
    file = io.BytesIO()
    entity_writer(request)(file, value)
    return file.getvalue()


@pytest.mark.parametrize("version", range(3, 14))
def test_a_produce_request_is_read_without_a_copy(version: int) -> None:
    data = bytes(range(256)) * 4
    frame = b"head" + produce_body(version, data)
    request = kafka_fast.read_produce(frame, 4, version)
    (topic,) = request.topics
    assert (request.transactional_id, request.acks, request.timeout_ms) == (None, -1, 30_000)
    assert topic.topic == (TOPIC_ID.bytes if version >= 13 else "orders")
    assert [part.partition for part in topic.parts] == [3, 4]
    first = topic.parts[0].records
    assert isinstance(first, memoryview)
    assert first == data
    assert first.obj is frame


@pytest.mark.parametrize("version", [3, 8, 9, 13])
def test_a_produce_request_without_records(version: int) -> None:
    request = kafka_fast.read_produce(produce_body(version, None), 0, version)
    assert request.topics[0].parts[0].records is None


@given(st.sampled_from([3, 8, 9, 12, 13]), st.integers(0, 400), st.integers(0, 255))
def test_a_damaged_produce_request_is_read_or_refused(version: int, at: int, byte: int) -> None:
    frame = bytearray(produce_body(version, b"abc" * 20))
    frame[at % len(frame)] = byte
    for data in (bytes(frame), bytes(frame[: at % len(frame)])):
        with suppress(BadRequest):
            kafka_fast.read_produce(data, 0, version)


@pytest.mark.parametrize("version", range(3, 14))
def test_the_answer_to_a_produce_request(version: int) -> None:
    key = TOPIC_ID.bytes if version >= 13 else "orders"
    parts = [
        ProducedPart(3, 0, 1 << 40, -1, 12),
        ProducedPart(4, kafka_codes.INVALID_RECORD, reason="no batch"),
        ProducedPart(5, kafka_codes.INVALID_RECORD, reason=Faults("no key", range(0, 600, 2))),
    ]
    entity = read_back(0, version, kafka_fast.write_produced(version, [(key, parts)]))
    (topic,) = entity.responses
    if version >= 13:
        assert topic.topic_id == TOPIC_ID
    else:
        assert topic.name == "orders"
    good, bad, some = topic.partition_responses
    assert (good.index, int(good.error_code), good.base_offset) == (3, 0, 1 << 40)
    assert getattr(good, "log_start_offset", 12) == 12
    assert (int(bad.error_code), getattr(bad, "error_message", "no batch")) == (87, "no batch")
    assert getattr(some, "error_message", "no key") == "no key"
    if version >= 8:
        assert bad.record_errors == ()
        assert [each.batch_index for each in some.record_errors] == list(range(0, 600, 2))
        texts = [each.batch_index_error_message for each in some.record_errors]
        assert texts == ["no key"] * 100 + [None] * 200, "not everything is said 300 times"


FETCH_VERSIONS = range(4, 19)


def fetch_body(version: int, *, is_empty: bool = False) -> bytes:
    """A fetch as kio writes it; an empty one says that nothing has changed."""
    request: Any = load_request_schema(kafka_codes.FETCH, version)
    module = load_payload_module(kafka_codes.FETCH, version, EntityType.request)

    def made(shape: Any, **values: Any) -> Any:
        names = shape.__dataclass_fields__
        return shape(**{name: value for name, value in values.items() if name in names})

    def part(number: int) -> Any:
        return made(
            module.FetchPartition,
            partition=number,
            current_leader_epoch=7,
            fetch_offset=(1 << 40) + number,
            last_fetched_epoch=3,
            log_start_offset=5,
            partition_max_bytes=1 << 20,
            replica_directory_id=TOPIC_ID,  # tagged: to be stepped over
        )

    topics: tuple[Any, ...] = ()
    forgotten: tuple[Any, ...] = ()
    if not is_empty:
        named = {"topic": "orders", "topic_id": TOPIC_ID}
        topics = (made(module.FetchTopic, **named, partitions=(part(3), part(4))),)
        if version >= 7:
            forgotten = (made(module.ForgottenTopic, **named, partitions=(8, 9)),)
    value = made(
        request,
        replica_id=-1,
        cluster_id="c",
        max_wait=timedelta(milliseconds=500),
        min_bytes=1,
        max_bytes=50 << 20,
        isolation_level=1,
        session_id=77,
        session_epoch=12,
        topics=topics,
        forgotten_topics_data=forgotten,
        rack_id="r1",
    )
    file = io.BytesIO()
    entity_writer(request)(file, value)
    return file.getvalue()


@pytest.mark.parametrize("version", FETCH_VERSIONS)
@pytest.mark.parametrize("is_empty", [False, True])
def test_a_fetch_of_every_version_is_read(version: int, is_empty: bool) -> None:
    data = fetch_body(version, is_empty=is_empty)
    request = kafka_fast.read_fetch(b"head" + data + b"rest", 4, version)
    assert request[:4] == (500, 1, 50 << 20, 1)
    assert request[4:6] == ((77, 12) if version >= 7 else (0, -1))
    key = TOPIC_ID.bytes if version >= 13 else "orders"
    epoch = 7 if version >= 9 else -1
    parts = [(number, epoch, (1 << 40) + number, 1 << 20) for number in (3, 4)]
    assert request.topics == ([] if is_empty else [(key, parts)])
    assert request.forgotten == ([] if is_empty or version < 7 else [(key, (8, 9))])
    for end in range(len(data)):
        with pytest.raises(BadRequest):
            kafka_fast.read_fetch(data[:end], 0, version)


@given(st.sampled_from(FETCH_VERSIONS), st.integers(0, 400), st.integers(0, 255))
def test_a_damaged_fetch_is_read_or_refused(version: int, at: int, byte: int) -> None:
    frame = bytearray(fetch_body(version))
    frame[at % len(frame)] = byte
    with suppress(BadRequest):
        kafka_fast.read_fetch(bytes(frame), 0, version)


@pytest.mark.parametrize("version", FETCH_VERSIONS)
def test_the_answer_to_a_fetch(version: int) -> None:
    key = TOPIC_ID.bytes if version >= 13 else "orders"
    parts = [
        FetchedPart(0, 0, 90, 80, 10, [(5, 70)], [b"abc", memoryview(b"defg")], 7),
        FetchedPart(1, kafka_codes.OFFSET_OUT_OF_RANGE, 9, 9, 1),
    ]
    data = b"".join(kafka_fast.write_fetched(version, 0, 0, [(key, parts)]))
    entity = read_back(1, version, data)
    (topic,) = entity.responses
    good, bad = topic.partitions
    assert (good.high_watermark, good.last_stable_offset) == (90, 80)
    assert bytes(good.records) == b"abcdefg"
    assert (good.aborted_transactions[0].producer_id, bad.aborted_transactions) == (5, None)
    assert (int(bad.error_code), bytes(bad.records)) == (1, b"")
