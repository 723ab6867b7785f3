"""Dead letters of RocketMQ's groups, as Kafka's consumers read them."""

from __future__ import annotations

import asyncio

from sluice.broker import retry_forms
from sluice.broker.topics import DEAD_PREFIX, TopicSettings
from sluice.model import Message
from sluice.protocol import kafka_codes, records
from tests.unit.broker.kafka_door_kit import KafkaClient, KafkaRig, kafka_rig
from tests.unit.broker.test_kafka_delays import Found, all_of, sent

ALIAS = "rmq.dlq.losers"


async def fail(rig: KafkaRig, topic: str, offset: int, group: str = "losers") -> None:
    """A group gives a message up."""
    core = rig.broker.core
    read = core.unfolding.reader(topic, 0)(topic, 0, offset, count_max=1)
    entry = records.decode(read.messages[0])
    core.topics.create_inner(f"{DEAD_PREFIX}{group}", 1)
    core.append(retry_forms.dead_form(entry, group, 16))
    core.ask_turn()


async def names(client: KafkaClient) -> dict[str, bool]:
    """All topics, and which of them are internal."""
    answer = await client.ask(3, 12, {"topics": None})
    return {topic.name: topic.is_internal for topic in answer.topics}


def test_a_letter_says_where_it_came_from() -> None:
    async def run() -> None:
        async with kafka_rig() as rig:
            client = await rig.connect()
            await client.create("gifts.new")
            headers = (("color", b"red"), ("none", None))
            await client.produce("gifts.new", sent((b"a", ()), (b"b", headers)))
            rig.broker.core.topics.put([TopicSettings("orders", 1, 1)])
            properties = b"TAGS\x01A\x02KEYS\x01k7\x02UNIQ_KEY\x01U7\x02"
            rig.broker.core.append(Message("orders", 0, b"c", properties, born_ms=5_000))
            rig.broker.core.ask_turn()
            assert ALIAS not in await names(client)
            await all_of(client, "orders", 1)
            await fail(rig, "gifts%2Enew", 1)
            await fail(rig, "orders", 0)
            record, message = await all_of(client, ALIAS, 2)
            assert record == Found(0, b"k", b"b", record.headers, record.time_ms)
            assert record.headers[:2] == headers, "its own come first"
            told = dict(record.headers[2:])
            assert told.pop("rmq.origin.msgid")
            assert told == {
                "rmq.origin.topic": b"gifts.new",
                "rmq.origin.partition": b"0",
                "rmq.origin.offset": b"1",
                "rmq.reconsume.times": b"16",
            }
            assert (message.offset, message.key, message.value) == (1, b"k7", b"c")
            told = dict(message.headers)
            assert (told["rmq.tags"], told["rmq.msgid"]) == (b"A", b"U7")
            assert (told["rmq.origin.topic"], told["rmq.origin.offset"]) == (b"orders", b"0")
            assert (await names(client))[ALIAS] is True, "patterns leave it out"

    asyncio.run(run())


def test_letters_are_only_read() -> None:
    async def run() -> None:
        async with kafka_rig() as rig:
            client = await rig.connect()
            refused = {"name": ALIAS, "num_partitions": 1, "replication_factor": 1}
            made = await client.ask(19, 7, {"topics": [refused], "timeout": 1000})
            assert made.topics[0].error_code == kafka_codes.TOPIC_ALREADY_EXISTS
            missing = await client.ask(3, 12, {"topics": [{"name": ALIAS}]})
            assert missing.topics[0].error_code == kafka_codes.UNKNOWN_TOPIC_OR_PARTITION
            await client.create("t")
            await client.produce("t", sent((b"a", ())))
            await fail(rig, "t", 0)
            await all_of(client, ALIAS, 1)
            denied = kafka_codes.TOPIC_AUTHORIZATION_FAILED
            assert (await client.produce(ALIAS, sent((b"x", ())))).error_code == denied
            gone = await client.ask(20, 6, {"topics": [{"name": ALIAS}], "timeout": 1000})
            assert gone.responses[0].error_code == denied
            grown = await client.ask(
                37, 3, {"topics": [{"name": ALIAS, "count": 4}], "timeout": 1000}
            )
            assert grown.results[0].error_code == denied
            config = {"name": "retention.ms", "config_operation": 0, "value": "1"}
            resource = {"resource_type": 2, "resource_name": ALIAS, "configs": [config]}
            altered = await client.ask(44, 1, {"resources": [resource], "validate_only": False})
            assert altered.responses[0].error_code == denied
            part = {"partition_index": 0, "offset": 1}
            cut = await client.ask(
                21, 2, {"topics": [{"name": ALIAS, "partitions": [part]}], "timeout": 1000}
            )
            assert cut.topics[0].partitions[0].error_code == denied
            assert len(await all_of(client, ALIAS, 1)) == 1

    asyncio.run(run())


def test_groups_whose_names_kafka_cannot_have_are_not_shown() -> None:
    async def run() -> None:
        async with kafka_rig() as rig:
            client = await rig.connect()
            await client.create("t")
            await client.produce("t", sent((b"a", ())))
            await fail(rig, "t", 0, group="ns%losers")
            assert [name for name in await names(client) if "losers" in name] == []

    asyncio.run(run())
