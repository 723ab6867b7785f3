"""This module writes through one door and reads through the other: Kafka's producers (librdkafka)
and RocketMQ's (Sluice's own client, which is tested against Apache's brokers) on the same topics.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import confluent_kafka
import pytest

from peers.process import free_ports
from sluice import Message, Producer, PullConsumer, PushConsumer
from tests.interop.kafka_reading import WAIT_S, consume, until
from tests.interop.sluice_process import SluiceProcess, make_topic, wait_for_route

confluent_admin: Any = importlib.import_module("confluent_kafka.admin")


class Doors:
    """One broker with both doors."""

    def __init__(self, directory: Path) -> None:
        (port,) = free_ports(1)
        self.kafka = f"127.0.0.1:{port}"
        self.process = SluiceProcess(directory, "--kafka", "on", "--kafka-port", str(port))

    @property
    def rocketmq(self) -> str:
        return self.process.nameserver_address

    def make_kafka_topic(self, name: str, **configs: str) -> None:
        admin = confluent_admin.AdminClient({"bootstrap.servers": self.kafka})
        topic = confluent_admin.NewTopic(name, 1, 1, config=configs)
        admin.create_topics([topic])[name].result(WAIT_S)
        wait_for_route(self.rocketmq, name.replace(".", "%2E"))

    def make_rocketmq_topic(self, name: str) -> None:
        make_topic(self.process.broker_address, name, 1)
        wait_for_route(self.rocketmq, name)

    # -------------------------------------------------------------------------------------- writing

    def produce(self, topic: str, *sent: dict[str, Any], **settings: Any) -> None:
        errors: list[Any] = []
        producer = confluent_kafka.Producer(
            {"bootstrap.servers": self.kafka, "linger.ms": 20, **settings}
        )
        for each in sent:
            producer.produce(
                topic,
                partition=0,
                on_delivery=lambda error, _: errors.append(error) if error else None,
                **each,
            )
        assert producer.flush(WAIT_S) == 0
        assert errors == []

    def send(self, topic: str, *messages: Message) -> None:
        with Producer(self.rocketmq, group="writers") as producer:
            for message in messages:
                assert producer.send(message).status.name == "OK"

    # -------------------------------------------------------------------------------------- reading

    def consume(self, topic: str, count: int, **settings: Any) -> list[Any]:
        return consume(self.kafka, topic, count, **settings)

    def pull(self, topic: str, count: int, group: str, expression: str = "*") -> list[Any]:
        found: list[Any] = []
        with PullConsumer(
            self.rocketmq, group=group, topics={topic: expression}, start_at="first"
        ) as consumer:

            def poll() -> bool:
                found.extend(consumer.poll(1.0))
                return len(found) >= count

            until(poll)
        return found


@pytest.fixture(scope="module")
def doors(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Doors]:
    both = Doors(tmp_path_factory.mktemp("doors"))
    with both.process:
        yield both


@pytest.mark.parametrize("codec", ["none", "zstd"])
def test_rocketmq_reads_what_kafka_wrote(doors: Doors, codec: str) -> None:
    topic = f"written.{codec}"
    doors.make_kafka_topic(topic)
    records = [
        {
            "value": b"body %d" % number,
            "key": b"key-%d" % number,
            "headers": [("color", b"red"), ("rmq.tags", b"even" if number % 2 == 0 else b"odd")],
            "timestamp": 1_700_000_000_000 + number,
        }
        for number in range(100)
    ]
    doors.produce(topic, *records, **{"compression.type": codec})
    found = doors.pull(topic.replace(".", "%2E"), 100, f"all-{codec}")
    assert [message.body for message in found] == [b"body %d" % number for number in range(100)]
    assert [message.queue_offset for message in found] == list(range(100))
    assert [message.keys for message in found[:2]] == ["key-0", "key-1"]
    assert found[3].properties["color"] == "red"
    assert found[3].born_ms == 1_700_000_000_003
    assert len({message.message_id for message in found}) == 100
    even = doors.pull(topic.replace(".", "%2E"), 50, f"even-{codec}", "even")
    assert [message.queue_offset for message in even] == list(range(0, 100, 2))


def test_kafka_reads_what_rocketmq_wrote(doors: Doors) -> None:
    doors.make_rocketmq_topic("orders")
    doors.send(
        "orders",
        *(
            Message(
                "orders", f"body {number}", tags="new", keys=f"k{number}", properties={"a": "b"}
            )
            for number in range(50)
        ),
    )
    found = doors.consume("orders", 50)
    assert [message.value() for message in found] == [b"body %d" % number for number in range(50)]
    assert [message.offset() for message in found] == list(range(50))
    assert found[7].key() == b"k7"
    headers = dict(found[7].headers())
    assert (headers["a"], headers["rmq.tags"]) == (b"b", b"new")
    assert headers["rmq.msgid"]


def test_both_write_and_both_read_the_same_sequence(doors: Doors) -> None:
    doors.make_kafka_topic("mixed")
    for number in range(10):
        doors.produce("mixed", *({"value": b"kafka %d" % number} for _ in range(number + 1)))
        doors.send("mixed", Message("mixed", f"rocketmq {number}"))
    total = 55 + 10
    by_kafka = [(m.offset(), m.value()) for m in doors.consume("mixed", total)]
    by_rocketmq = [(m.queue_offset, m.body) for m in doors.pull("mixed", total, "mixed-readers")]
    assert by_kafka == by_rocketmq
    assert [offset for offset, _ in by_kafka] == list(range(total))


def test_kafka_writes_to_a_topic_of_rocketmq(doors: Doors) -> None:
    doors.make_rocketmq_topic("plain")
    headers = [("twice", b"1"), ("twice", b"2"), ("none", None)]
    doors.produce(
        "plain", {"value": b"one", "key": b"\xff\x00", "headers": headers}, {"value": None}
    )
    first, second = doors.consume("plain", 2)
    assert (first.key(), first.value(), first.headers()) == (b"\xff\x00", b"one", headers)
    assert (second.key(), second.value(), second.headers()) == (None, None, None)
    assert [message.body for message in doors.pull("plain", 2, "plain-readers")] == [b"one", b""]


def test_a_record_that_a_consumer_fails_with_comes_again_alone(doors: Doors) -> None:
    doors.make_kafka_topic("failing")
    doors.produce("failing", *({"value": b"%d" % number} for number in range(5)))
    seen: list[tuple[bytes, int]] = []

    def handle(message: Any) -> None:
        seen.append((message.body, message.reconsume_times))
        if message.body == b"3" and message.reconsume_times == 0:
            raise ValueError("not this time")

    with PushConsumer(
        doors.rocketmq, group="failers", topics="failing", handler=handle, start_at="first"
    ):
        until(lambda: (b"3", 1) in seen)
    assert sorted(body for body, times in seen if times == 0) == [b"%d" % n for n in range(5)]
    assert [body for body, times in seen if times] == [b"3"]


def test_nothing_is_lost_or_doubled_by_a_kill(tmp_path: Path) -> None:
    """An idempotent producer goes on sending while the broker is killed and comes back."""
    both = Doors(tmp_path)
    stored: list[int] = []

    def told(error: Any, message: Any) -> None:
        assert error is None, error
        stored.append(message.offset())

    with both.process:
        both.make_kafka_topic("kept")
        producer = confluent_kafka.Producer(
            {"bootstrap.servers": both.kafka, "enable.idempotence": True, "linger.ms": 1}
        )
        for round_number in range(3):
            for number in range(200):
                producer.produce("kept", b"%d-%d" % (round_number, number), on_delivery=told)
                producer.poll(0)
            if round_number < 2:
                both.process.kill()
                both.process.start()
        assert producer.flush(WAIT_S) == 0
        found = both.consume("kept", 600)
        assert [message.value() for message in found] == [
            b"%d-%d" % (round_number, number) for round_number in range(3) for number in range(200)
        ]
        assert sorted(stored) == list(range(600))
        consumer = confluent_kafka.Consumer({"bootstrap.servers": both.kafka, "group.id": "none"})
        ends = consumer.get_watermark_offsets(
            confluent_kafka.TopicPartition("kept", 0), timeout=WAIT_S
        )
        consumer.close()
        assert ends == (0, 600), "nothing is there twice"


def test_records_come_later_where_the_topic_allows_it(doors: Doors) -> None:
    """Also a batch of which nothing is there at once: consumers go on behind it."""
    doors.make_kafka_topic("patient", **{"sluice.delay.headers": "true"})
    later = [("TIMER_DELAY_MS", b"1500"), ("color", b"red")]
    settings = {"enable.idempotence": True, "linger.ms": 200}
    doors.produce(
        "patient",
        {"value": b"first"},
        {"value": b"later 1", "key": b"k", "headers": later, "timestamp": 1_700_000_000_000},
        {"value": b"second"},
        **settings,
    )
    doors.produce("patient", {"value": b"later 2", "headers": [("DELAY", b"1")]}, **settings)
    doors.produce("patient", {"value": b"third"}, **settings)
    found = doors.consume("patient", 5)
    values = [message.value() for message in found]
    assert sorted(values) == [b"first", b"later 1", b"later 2", b"second", b"third"]
    offsets = {message.value(): message.offset() for message in found}
    # The places that they had in their batches stay empty; each comes behind its batch.
    assert (offsets[b"first"], offsets[b"second"]) == (0, 2)
    assert offsets[b"later 1"] > 2
    assert offsets[b"later 2"] > 3
    timed = found[values.index(b"later 1")]
    assert (timed.key(), timed.headers()) == (b"k", later)
    assert timed.timestamp() == (confluent_kafka.TIMESTAMP_CREATE_TIME, 1_700_000_000_000)
    assert [m.body for m in doors.pull("patient", 5, "patient-readers")] == values


def test_dead_letters_are_read_through_the_other_door(doors: Doors) -> None:
    doors.make_kafka_topic("lost.gifts")
    doors.produce(
        "lost.gifts",
        {"value": b"0"},
        {"value": b"1", "key": b"k", "headers": [("color", b"red")]},
        {"value": b"2"},
    )
    handled: list[bytes] = []

    def handle(message: Any) -> None:
        handled.append(message.body)
        if message.body == b"1":
            raise ValueError("never")

    with PushConsumer(
        doors.rocketmq,
        group="losers",
        topics="lost%2Egifts",
        handler=handle,
        start_at="first",
        tries_max=0,
    ):
        until(lambda: len(set(handled)) == 3)
        admin = confluent_admin.AdminClient({"bootstrap.servers": doors.kafka})
        until(lambda: "rmq.dlq.losers" in admin.list_topics(timeout=WAIT_S).topics)
        (letter,) = doors.consume("rmq.dlq.losers", 1)
    headers = dict(letter.headers())
    assert (letter.key(), letter.value(), headers["color"]) == (b"k", b"1", b"red")
    assert headers["rmq.origin.topic"] == b"lost.gifts"
    assert (headers["rmq.origin.partition"], headers["rmq.origin.offset"]) == (b"0", b"1")
