"""This module sends to topics that Spark reads: it fills them, and sends single messages.

Ordinary producers do it, one for each side, with the same bodies and keys.
"""

import asyncio
import importlib
import random
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Awaitable
from types import TracebackType
from typing import Any

import uvloop

from bench.sides import Side
from sluice import Message, Producer, aio

KEYS = 1_000
UNDER_WAY = 10_000
FLUSH_TIMEOUT_S = 300.0
_NUMBER_DIGITS = 16
_SHIFTS = 997  # how many different bodies there are, but for their number
_LETTERS = b"abcdefghijklmnopqrstuvwxyz0123456789"
_TEXT = bytes(random.Random(7).choices(_LETTERS, k=4096 + _SHIFTS))


def body(number: int, size: int) -> bytes:
    """The body of a message: its number, and text that differs from that of its neighbours."""
    at = number % _SHIFTS
    return b"%0*d" % (_NUMBER_DIGITS, number) + _TEXT[at : at + size - _NUMBER_DIGITS]


def key(number: int) -> str:
    return f"key-{number % KEYS}"


class Sender(ABC):
    """A producer of one side; a context manager."""

    def __enter__(self) -> "Sender":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    @abstractmethod
    def fill(self, topic: str, count: int, size: int) -> None:
        """Send so many messages of this size, as quickly as it goes."""

    @abstractmethod
    def send(self, topic: str, text: bytes) -> None:
        """Send one message and wait for the answer."""

    @abstractmethod
    def close(self) -> None: ...


class OurSender(Sender):
    """Sluice's Python client."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._producer: Producer | None = None

    def fill(self, topic: str, count: int, size: int) -> None:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(self._fill(topic, count, size))

    async def _fill(self, topic: str, count: int, size: int) -> None:
        waiting: deque[Awaitable[Any]] = deque()
        async with aio.Producer(self._address, group="bench-fill", batching=True) as producer:
            for number in range(count):
                message = Message(topic, body(number, size), keys=key(number))
                waiting.append(producer.send_async(message))
                if len(waiting) > UNDER_WAY:
                    await waiting.popleft()
            for each in waiting:
                await each

    def send(self, topic: str, text: bytes) -> None:
        if self._producer is None:
            self._producer = Producer(self._address, group="bench-latency", batching=False)
            self._producer.__enter__()
        self._producer.send(Message(topic, text))

    def close(self) -> None:
        if self._producer is not None:
            self._producer.__exit__(None, None, None)


class KafkaSender(Sender):
    """librdkafka, with acks=all as Kafka's own producers have it."""

    def __init__(self, address: str) -> None:
        kafka: Any = importlib.import_module("confluent_kafka")
        self._settings = {"bootstrap.servers": address, "acks": "all"}
        self._made = kafka.Producer
        self._producer: Any = None

    def fill(self, topic: str, count: int, size: int) -> None:
        producer = self._made(self._settings)
        for number in range(count):
            while True:
                try:
                    producer.produce(topic, body(number, size), key(number))
                    break
                except BufferError:
                    producer.poll(0.1)
        if left := producer.flush(FLUSH_TIMEOUT_S):
            raise RuntimeError(f"{left} messages to {topic} were not sent")

    def send(self, topic: str, text: bytes) -> None:
        if self._producer is None:
            self._producer = self._made({**self._settings, "linger.ms": 0})
        told: list[object] = []
        self._producer.produce(topic, text, on_delivery=lambda error, _: told.append(error))
        while not told:
            self._producer.poll(1)
        if told[0] is not None:
            raise RuntimeError(f"a send to {topic} failed: {told[0]}")

    def close(self) -> None:
        if self._producer is not None:
            self._producer.flush(FLUSH_TIMEOUT_S)


def sender(side: Side, address: str) -> Sender:
    return OurSender(address) if side == "ours" else KafkaSender(address)


def make_kafka_topic(address: str, topic: str, partitions: int) -> None:
    admin: Any = importlib.import_module("confluent_kafka.admin")
    client = admin.AdminClient({"bootstrap.servers": address, "log_level": 4})
    made = client.create_topics([admin.NewTopic(topic, partitions, 1)])
    made[topic].result(FLUSH_TIMEOUT_S)
