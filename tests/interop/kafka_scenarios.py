"""This module does with a broker what Kafka's Python clients do in groups and in transactions.

Each function takes a broker's address and a word that makes names its own, and returns what came of
each step; the same is expected of every broker. Whatever has to settle is waited for.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import time
import warnings
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import aiokafka
from confluent_kafka import (
    Consumer,
    ConsumerGroupTopicPartitions,
    KafkaException,
    Producer,
    TopicPartition,
)

admin_of_librdkafka: Any = importlib.import_module("confluent_kafka.admin")
with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # of how it reads its own files
    kafka: Any = importlib.import_module("kafka")

LIMIT_S = 120.0
PARTITIONS = 4
RECORDS = 40
# Long: a machine that stands still for a while must not look like a client that is gone.
SESSION_MS = 240_000
ASK_AGAIN_S = 10.0
TRANSACTION_MS = 600_000

Outcome = dict[str, Any]


def wait(what: str, condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline, f"waited in vain for {what}"


def make_topic(
    address: str, name: str, *, partitions: int = PARTITIONS, records: int = RECORDS
) -> None:
    admin = admin_of_librdkafka.AdminClient({"bootstrap.servers": address})
    for future in admin.create_topics([admin_of_librdkafka.NewTopic(name, partitions, 1)]).values():
        future.result(LIMIT_S)
    producer = Producer({"bootstrap.servers": address, "enable.idempotence": True})
    for number in range(records):
        producer.produce(name, b"r%d" % number, partition=number % partitions)
    assert producer.flush(LIMIT_S) == 0


# --------------------------------------------------------------------------------------- librdkafka


class Member:
    """A consumer of librdkafka in a group, and what it has seen."""

    def __init__(self, address: str, group: str, topic: str, **more: Any) -> None:
        settings = {
            "bootstrap.servers": address,
            "group.id": group,
            "auto.offset.reset": "earliest",
            "enable.auto.commit": False,
            "session.timeout.ms": SESSION_MS,
            "heartbeat.interval.ms": 200,
            **{name.replace("_", "."): value for name, value in more.items()},
        }
        self.consumer = Consumer(settings)
        self.topic = topic
        self.seen: list[bytes] = []
        self.rounds = 0
        self.consumer.subscribe([topic], on_assign=self._assigned)

    def _assigned(self, consumer: Consumer, partitions: list[TopicPartition]) -> None:
        self.rounds += 1

    def poll(self) -> None:
        message = self.consumer.poll(0.05)
        if message is not None and message.error() is None:
            self.seen.append(message.value() or b"")

    @property
    def partitions(self) -> set[int]:
        return {each.partition for each in self.consumer.assignment()}

    def is_at_end(self) -> bool:
        places = self.consumer.position(self.consumer.assignment())
        return bool(places) and all(each.offset == RECORDS // PARTITIONS for each in places)


def settle(members: Iterable[Member], *, count: int) -> None:
    """All members together have all partitions, each so many."""
    members = list(members)

    def settled() -> bool:
        for member in members:
            member.poll()
        return all(len(member.partitions) == count for member in members)

    wait(f"{count} partitions each", settled)


def librdkafka_groups(address: str, word: str) -> Outcome:
    topic = f"rd.groups.{word}"
    make_topic(address, topic)
    result: Outcome = {}
    for strategy in ("range", "cooperative-sticky"):
        more = {"partition_assignment_strategy": strategy}
        group = f"{strategy}.{word}"
        one = Member(address, group, topic, **more)
        settle([one], count=4)
        two = Member(address, group, topic, **more)
        settle([one, two], count=2)
        result[f"{strategy} overlap"] = sorted(one.partitions & two.partitions)
        wait("all records", partial(_read_out, one, two))
        result[f"{strategy} seen"] = len({*one.seen, *two.seen})
        for member in (one, two):
            member.consumer.commit(asynchronous=False)
        two.consumer.close()
        settle([one], count=4)
        one.consumer.close()
        later = Member(address, group, topic, **more)
        settle([later], count=4)
        committed = later.consumer.committed(later.consumer.assignment(), LIMIT_S)
        result[f"{strategy} committed"] = sum(each.offset for each in committed)
        for _ in range(10):
            later.poll()
        result[f"{strategy} again"] = len(later.seen)
        later.consumer.close()
    return result


def _read_out(*members: Member) -> bool:
    for member in members:
        member.poll()
    return all(member.is_at_end() for member in members)


def librdkafka_static(address: str, word: str) -> Outcome:
    """A static member that is killed comes back to its partitions, and nobody else notices."""
    topic = f"rd.static.{word}"
    make_topic(address, topic)
    group = f"static.{word}"
    one = Member(address, group, topic, group_instance_id="one")
    two = Member(address, group, topic, group_instance_id="two")
    settle([one, two], count=2)
    before, rounds = two.partitions, one.rounds
    two.consumer.close()  # a static member says nothing when it goes
    back = Member(address, group, topic, group_instance_id="two")
    settle([one, back], count=2)
    result: Outcome = {"same": back.partitions == before, "rounds": one.rounds - rounds}
    # An administrator sends it away, and the other one has all.
    back.consumer.close()
    third = Member(address, group, topic, group_instance_id="two", session_timeout_ms=3_000)
    settle([one, third], count=2)
    third.consumer.close()
    settle([one], count=4)  # after its session
    one.consumer.close()
    return result


def librdkafka_admin(address: str, word: str) -> Outcome:
    topic, group = f"rd.admin.{word}", f"admin.{word}"
    make_topic(address, topic)
    admin = admin_of_librdkafka.AdminClient({"bootstrap.servers": address})
    member = Member(address, group, topic)
    settle([member], count=4)
    member.consumer.commit(
        offsets=[TopicPartition(topic, p, 3, metadata="three") for p in range(4)],
        asynchronous=False,
    )
    result: Outcome = {}
    found = admin.describe_consumer_groups([group])[group].result(LIMIT_S)
    result["state"] = found.state.name
    result["assigned"] = sorted(
        each.partition for m in found.members for each in m.assignment.topic_partitions
    )
    asked = ConsumerGroupTopicPartitions(group, [TopicPartition(topic, 0, 5)])
    done = admin.alter_consumer_group_offsets([asked])[group].result(LIMIT_S)
    result["altered while in use"] = [each.error.name() for each in done.topic_partitions]
    try:
        admin.delete_consumer_groups([group])[group].result(LIMIT_S)
    except KafkaException as error:
        result["deleted while in use"] = error.args[0].name()
    member.consumer.close()
    done = admin.alter_consumer_group_offsets([asked])[group].result(LIMIT_S)
    result["altered"] = [each.error for each in done.topic_partitions]
    asked = ConsumerGroupTopicPartitions(group)
    listed = admin.list_consumer_group_offsets([asked])[group].result(LIMIT_S)
    result["offsets"] = sorted((each.partition, each.offset) for each in listed.topic_partitions)
    admin.delete_consumer_groups([group])[group].result(LIMIT_S)
    names = {each.group_id for each in admin.list_consumer_groups().result(LIMIT_S).valid}
    result["listed"] = group in names
    return result


def librdkafka_transactions(address: str, word: str) -> Outcome:
    topic, group = f"rd.tx.{word}", f"tx-group.{word}"
    make_topic(address, topic)
    settings = {
        "bootstrap.servers": address,
        "transactional.id": f"rd.{word}",
        "transaction.timeout.ms": TRANSACTION_MS,
    }
    result: Outcome = {}
    producer = Producer(settings)
    producer.init_transactions(LIMIT_S)
    for values, is_commit in (((b"t1", b"t2"), True), ((b"t3-gone",), False), ((b"t4",), True)):
        producer.begin_transaction()
        for at, value in enumerate(values):
            producer.produce(topic, value, partition=at)
        if is_commit:
            producer.commit_transaction(LIMIT_S)
        else:
            producer.flush(LIMIT_S)
            producer.abort_transaction(LIMIT_S)
    member = Member(address, group, topic)
    for offset, is_commit in ((7, True), (9, False)):
        producer.begin_transaction()
        producer.send_offsets_to_transaction(
            [TopicPartition(topic, 0, offset)], member.consumer.consumer_group_metadata(), LIMIT_S
        )
        if is_commit:
            producer.commit_transaction(LIMIT_S)
        else:
            producer.abort_transaction(LIMIT_S)
    (place,) = member.consumer.committed([TopicPartition(topic, 0)], LIMIT_S)
    result["offset"] = place.offset
    member.consumer.close()
    result["committed"] = read_all(address, topic, "read_committed")
    result["uncommitted"] = read_all(address, topic, "read_uncommitted")
    producer.begin_transaction()
    producer.produce(topic, b"t5-open", partition=2)
    producer.flush(LIMIT_S)
    result["while open"] = read_all(address, topic, "read_committed")
    later = Producer(settings)
    later.init_transactions(LIMIT_S)
    try:
        producer.produce(topic, b"t6-late", partition=2)
        producer.commit_transaction(LIMIT_S)
        result["shut out"] = False
    except KafkaException as error:
        result["shut out"] = error.args[0].fatal()
    later.begin_transaction()
    later.produce(topic, b"t7", partition=2)
    later.commit_transaction(LIMIT_S)
    result["in the end"] = read_all(address, topic, "read_committed")
    return result


def read_all(address: str, topic: str, isolation: str) -> list[str]:
    """What a reader sees of transactions up to the end that it is told."""
    consumer = Consumer(
        {
            "bootstrap.servers": address,
            "group.id": f"reader.{topic}",
            "isolation.level": isolation,
            "enable.auto.commit": False,
            "enable.partition.eof": True,
        }
    )
    consumer.assign([TopicPartition(topic, p, 0) for p in range(PARTITIONS)])
    ended: set[int] = set()
    values: list[str] = []

    def read() -> bool:
        message = consumer.poll(0.05)
        if message is None:
            return False
        value, partition = message.value() or b"", message.partition()
        if message.error() is not None and partition is not None:
            ended.add(partition)
        elif value.startswith(b"t"):
            values.append(value.decode())
        return len(ended) == PARTITIONS

    wait("the end of the topic", read)
    consumer.close()
    return sorted(values)


# ------------------------------------------------------------------------------------- kafka-python


def kafka_python(address: str, word: str) -> Outcome:
    topic, group = f"kp.{word}", f"kp-group.{word}"
    make_topic(address, topic)
    settings = {
        "bootstrap_servers": address,
        "group_id": group,
        "auto_offset_reset": "earliest",
        "enable_auto_commit": False,
        "session_timeout_ms": SESSION_MS,
        "heartbeat_interval_ms": 200,
        "metadata_max_age_ms": 1000,
    }
    with contextlib.ExitStack() as open_ones:
        return _kafka_python(address, word, topic, settings, open_ones)


def _kafka_python(
    address: str, word: str, topic: str, settings: dict[str, Any], open_ones: contextlib.ExitStack
) -> Outcome:
    """One that is left open when something fails would try to connect for ever."""
    result: Outcome = {}
    one = open_ones.enter_context(contextlib.closing(kafka.KafkaConsumer(topic, **settings)))
    asked_s = time.monotonic()

    def has_all() -> bool:
        """Ask again now and then: it may lead a group before it knows the topic's partitions,
        gives out none then, and forgets that it did when it hears of them while it joins."""
        nonlocal asked_s
        one.poll(50)
        if not one.assignment() and time.monotonic() - asked_s > ASK_AGAIN_S:
            one.unsubscribe()
            one.subscribe([topic])
            asked_s = time.monotonic()
        return len(one.assignment()) == PARTITIONS

    wait("four", has_all)
    two = open_ones.enter_context(contextlib.closing(kafka.KafkaConsumer(topic, **settings)))

    def shared() -> bool:
        one.poll(50)
        two.poll(50)
        return len(one.assignment()) == len(two.assignment()) == 2

    wait("two each", shared)
    result["overlap"] = sorted(one.assignment() & two.assignment())

    def at_end() -> bool:
        shared()
        return all(
            member.position(each) == RECORDS // PARTITIONS
            for member in (one, two)
            for each in member.assignment()
        )

    wait("all records", at_end)
    one.commit()
    two.commit()
    two.close()
    wait("four again", has_all)
    result["committed"] = sum(one.committed(each) for each in one.assignment())
    one.close()
    producer = open_ones.enter_context(
        contextlib.closing(
            kafka.KafkaProducer(
                bootstrap_servers=address,
                transactional_id=f"kp.{word}",
                transaction_timeout_ms=TRANSACTION_MS,
            )
        )
    )
    producer.init_transactions()
    for value, is_commit in ((b"t1", True), (b"t2-gone", False), (b"t3", True)):
        producer.begin_transaction()
        producer.send(topic, value, partition=0).get(LIMIT_S)
        if is_commit:
            producer.commit_transaction()
        else:
            producer.abort_transaction()
    producer.close()
    result["read committed"] = read_all(address, topic, "read_committed")
    return result


# ----------------------------------------------------------------------------------------- aiokafka


def aiokafka_(address: str, word: str) -> Outcome:
    return asyncio.run(_aiokafka(address, word))


async def _until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(LIMIT_S):
        while not condition():  # noqa: ASYNC110  # nothing tells of it
            await asyncio.sleep(0.05)


async def _aiokafka(address: str, word: str) -> Outcome:
    topic, group = f"aio.{word}", f"aio-group.{word}"
    await asyncio.to_thread(make_topic, address, topic)
    settings = {
        "bootstrap_servers": address,
        "group_id": group,
        "auto_offset_reset": "earliest",
        "enable_auto_commit": False,
        "session_timeout_ms": SESSION_MS,
        "heartbeat_interval_ms": 200,
    }
    result: Outcome = {}
    one = aiokafka.AIOKafkaConsumer(topic, **settings)
    await one.start()
    await _until(lambda: len(one.assignment()) == 4)
    two = aiokafka.AIOKafkaConsumer(topic, **settings)
    await two.start()
    await _until(lambda: len(one.assignment()) == len(two.assignment()) == 2)
    result["overlap"] = sorted(one.assignment() & two.assignment())
    for member in (one, two):
        async with asyncio.timeout(LIMIT_S):
            places = [0]
            while min(places) < RECORDS // PARTITIONS:
                await member.getmany(timeout_ms=50)
                places = [await member.position(each) for each in member.assignment()]
        await member.commit()
    await two.stop()
    await _until(lambda: len(one.assignment()) == 4)
    committed = [await one.committed(each) for each in one.assignment()]
    result["committed"] = sum(committed)
    await one.stop()
    producer = aiokafka.AIOKafkaProducer(
        bootstrap_servers=address,
        transactional_id=f"aio.{word}",
        transaction_timeout_ms=TRANSACTION_MS,
    )
    await producer.start()
    for value, is_commit in ((b"t1", True), (b"t2-gone", False), (b"t3", True)):
        await producer.begin_transaction()
        await producer.send_and_wait(topic, value, partition=0)
        if is_commit:
            offset = aiokafka.TopicPartition(topic, 0)
            await producer.send_offsets_to_transaction({offset: 4}, f"aio-tx.{word}")
            await producer.commit_transaction()
        else:
            await producer.abort_transaction()
    await producer.stop()
    result["read committed"] = await asyncio.to_thread(read_all, address, topic, "read_committed")
    return result


SCENARIOS: dict[str, tuple[Callable[[str, str], Outcome], Outcome]] = {
    "librdkafka groups": (
        librdkafka_groups,
        {
            "range overlap": [],
            "range seen": RECORDS,
            "range committed": RECORDS,
            "range again": 0,
            "cooperative-sticky overlap": [],
            "cooperative-sticky seen": RECORDS,
            "cooperative-sticky committed": RECORDS,
            "cooperative-sticky again": 0,
        },
    ),
    "librdkafka static": (librdkafka_static, {"same": True, "rounds": 0}),
    "librdkafka admin": (
        librdkafka_admin,
        {
            "state": "STABLE",
            "assigned": [0, 1, 2, 3],
            "altered while in use": ["UNKNOWN_MEMBER_ID"],
            "deleted while in use": "NON_EMPTY_GROUP",
            "altered": [None],
            "offsets": [(0, 5), (1, 3), (2, 3), (3, 3)],
            "listed": False,
        },
    ),
    "librdkafka transactions": (
        librdkafka_transactions,
        {
            "offset": 7,
            "committed": ["t1", "t2", "t4"],
            "uncommitted": ["t1", "t2", "t3-gone", "t4"],
            "while open": ["t1", "t2", "t4"],
            "shut out": True,
            "in the end": ["t1", "t2", "t4", "t7"],
        },
    ),
    "kafka-python": (
        kafka_python,
        {"overlap": [], "committed": RECORDS, "read committed": ["t1", "t3"]},
    ),
    "aiokafka": (
        aiokafka_,
        {"overlap": [], "committed": RECORDS, "read committed": ["t1", "t3"]},
    ),
}
