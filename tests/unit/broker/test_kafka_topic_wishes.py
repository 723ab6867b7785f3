"""This module tests what the configurations of a topic do to the batches of Kafka's producers: how
they are compressed, and how many replicas acks=all asks for.
"""

from __future__ import annotations

import random
from typing import Any

import pytest

from sluice.broker.topics import TopicSettings
from sluice.protocol import kafka_batches, kafka_codes
from sluice.protocol.kafka_batches import Record
from tests.unit.broker.kafka_door_kit import KafkaClient, KafkaRig, batch, produced, values_in
from tests.unit.broker.test_kafka_edges import ALTER_SOME, TOPIC_RESOURCE, create, door

PRODUCE = 0
VALUES = (b"a" * 100, b"b" * 100, b"c" * 100)


def packed(codec: int, *, producer: tuple[int, int, int] = (-1, -1, -1)) -> bytes:
    """A batch that is compressed already."""
    plain = batch(*VALUES, producer=producer)
    head = kafka_batches.read_sent(plain)
    return kafka_batches.with_codec(head, plain, codec, 1 << 20)[1]


@pytest.mark.parametrize("sent", range(5))
@pytest.mark.parametrize(("name", "codec"), kafka_batches.COMPRESSIONS.items())
def test_batches_are_compressed_as_their_topic_says(name: str, codec: int, sent: int) -> None:
    async def test(rig: KafkaRig, client: KafkaClient) -> None:
        await client.create("t", 1, compression_type=name)
        for sequence in (0, 3):  # the second one comes to a partition that is known
            told = await client.produce("t", packed(sent, producer=(5, 0, sequence)))
            assert (told.error_code, told.base_offset) == (0, sequence)
        again = await client.produce("t", packed(sent, producer=(5, 0, 0)))
        assert (again.error_code, again.base_offset) == (0, 0)
        stored = (await client.fetch("t", 0)).records
        assert values_in(stored) == list(enumerate(VALUES * 2))
        head = kafka_batches.read_head(stored)
        assert head is not None
        assert (head.codec, head.producer_id, head.max_ms) == (codec, 5, 1_000_000)

    door(test)


def test_what_is_left_to_producers_stays_as_it_is() -> None:
    async def test(rig: KafkaRig, client: KafkaClient) -> None:
        await client.create("t", 1, compression_type="producer")
        await client.produce("t", packed(kafka_batches.CODEC_ZSTD))
        head = kafka_batches.read_head((await client.fetch("t", 0)).records)
        assert head is not None
        assert head.codec == kafka_batches.CODEC_ZSTD

    door(test)


def test_the_time_of_the_append_and_a_codec_go_together() -> None:
    async def test(rig: KafkaRig, client: KafkaClient) -> None:
        configs = {"compression_type": "lz4", "message_timestamp_type": "LogAppendTime"}
        await client.create("t", 1, **configs)
        told = await client.produce("t", packed(kafka_batches.CODEC_GZIP))
        stored = (await client.fetch("t", 0)).records
        assert values_in(stored) == list(enumerate(VALUES))
        head = kafka_batches.read_head(stored)
        assert head is not None
        assert head.attributes == kafka_batches.CODEC_LZ4 | kafka_batches.APPEND_TIME
        assert head.max_ms == round(told.log_append_time.timestamp() * 1000)

    door(test)


def test_a_batch_may_become_too_large() -> None:
    async def test(rig: KafkaRig, client: KafkaClient) -> None:
        await client.create("t", 1, compression_type="uncompressed", max_message_bytes="300")
        told = await client.produce("t", packed(kafka_batches.CODEC_ZSTD))
        assert told.error_code == kafka_codes.MESSAGE_TOO_LARGE
        assert (await client.fetch("t", 0)).high_watermark == 0

    door(test)


def test_a_batch_that_cannot_be_unpacked_is_refused() -> None:
    async def test(rig: KafkaRig, client: KafkaClient) -> None:
        await client.create("t", 1, compression_type="gzip")
        bad = kafka_batches.wrap(
            *(0, 5, 5, b"no zstd"), last_delta=0, count=1, attributes=kafka_batches.CODEC_ZSTD
        )
        told = await client.produce("t", bad)
        assert told.error_code == kafka_codes.UNKNOWN_SERVER_ERROR

    door(test, kafka_check_records=False)


def test_topics_of_single_messages_compress_nothing() -> None:
    async def test(rig: KafkaRig, client: KafkaClient) -> None:
        rig.broker.core.topics.put([TopicSettings("of_rocketmq", 1, 1)])
        for value, code in (("gzip", kafka_codes.INVALID_CONFIG), ("producer", 0)):
            row = {"name": "compression.type", "value": value, "config_operation": 0}
            resource = {
                "resource_type": TOPIC_RESOURCE,
                "resource_name": "of_rocketmq",
                "configs": [row],
            }
            asked = {"resources": [resource], "validate_only": False}
            (told,) = (await client.ask(ALTER_SOME, 1, asked)).responses
            assert told.error_code == code

    door(test)


def test_an_unknown_codec_is_refused() -> None:
    async def test(rig: KafkaRig, client: KafkaClient) -> None:
        (made,) = await create(client, "t", configs=[{"name": "compression.type", "value": "none"}])
        assert made.error_code == kafka_codes.INVALID_CONFIG

    door(test)


def test_more_replicas_in_sync_than_there_are() -> None:
    async def test(rig: KafkaRig, client: KafkaClient) -> None:
        await client.create("t", 1, min_insync_replicas="2")
        for acks in (-1, 1):
            told = await client.produce("t", batch(b"x"), acks=acks)
            assert told.error_code == 0, "all there are is one"
        client.send(PRODUCE, 9, produced("t", batch(b"y"), acks=0))
        records = [Record(0, 0, None, b"z")]
        await client.produce("t", kafka_batches.build(0, 5, 5, records), acks=1)
        assert [value for _, value in values_in((await client.fetch("t", 0)).records)] == [
            *(b"x", b"x", b"y", b"z")
        ]

    door(test)


@pytest.mark.parametrize("size", [0, 1, 100, 65_536, 200_000])
@pytest.mark.parametrize("codec", range(5))
def test_what_is_packed_is_unpacked(codec: int, size: int) -> None:
    for data in (bytes(size), random.Random(size).randbytes(size)):
        packed_with, inside = kafka_batches.pack(codec, data)
        assert packed_with == codec
        assert bytes(kafka_batches.unpack(codec, inside, 1 << 20)) == data
        assert len(inside) < size + 100


def wrong_ones(told: Any) -> list[int]:
    assert all(each.batch_index_error_message for each in told.record_errors)
    return [each.batch_index for each in told.record_errors]


@pytest.mark.parametrize("codec", [kafka_batches.CODEC_NONE, kafka_batches.CODEC_LZ4])
def test_producers_are_told_which_records_are_wrong(codec: int) -> None:
    async def test(rig: KafkaRig, client: KafkaClient) -> None:
        hour = 3_600_000
        now_ms = rig.broker.core.now_ms()
        await client.create("compacted", 1, cleanup_policy="compact")
        await client.create("t", 1, message_timestamp_before_max_ms=str(hour))

        def packed(*records: Record, ms: int = now_ms) -> bytes:
            plain = kafka_batches.build(0, now_ms, ms, records)
            return kafka_batches.with_codec(kafka_batches.read_sent(plain), plain, codec, 9999)[1]

        keys = (b"k", None, b"k", None)
        bare = packed(*(Record(at, 0, key, b"v") for at, key in enumerate(keys)))
        told = await client.produce("compacted", bare)
        assert (told.error_code, wrong_ones(told)) == (kafka_codes.INVALID_RECORD, [1, 3])
        deltas = (0, -2 * hour, 0)
        old = packed(*(Record(at, delta, None, b"v") for at, delta in enumerate(deltas)))
        told = await client.produce("t", old)
        assert (told.error_code, wrong_ones(told)) == (kafka_codes.INVALID_TIMESTAMP, [1])
        deltas = (0, 0, 2 * hour)
        ahead = [Record(at, delta, None, b"v") for at, delta in enumerate(deltas)]
        told = await client.produce("t", packed(*ahead, ms=now_ms + 2 * hour))
        assert (told.error_code, wrong_ones(told)) == (kafka_codes.INVALID_TIMESTAMP, [2])

    door(test)
