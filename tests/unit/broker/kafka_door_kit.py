"""This module runs a whole broker on a simulated disk and speaks Kafka's protocol to it over
loopback, byte by byte.
"""

from __future__ import annotations

import asyncio
import ssl
import struct
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

from kio.index import load_request_schema, load_response_schema
from kio.serial import entity_reader

from sluice.broker.server import Broker
from sluice.protocol import kafka, kafka_batches
from sluice.protocol.kafka_batches import Record
from sluice.storage.memory_files import MemoryFiles
from tests.unit.broker.broker_kit import broker_config

WAIT_SECONDS = 30


class KafkaClient:
    """One connection that sends what it is told to."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._count = 0

    def send(
        self, key: int, version: int, values: Mapping[str, Any], body: bytes | None = None
    ) -> int:
        """Send a request; its number."""
        if body is None:
            out: list[bytes] = []
            kafka._struct_writer(load_request_schema(key, version))(out, values)
            body = b"".join(out)
        self._count += 1
        head = struct.pack(">hhih", key, version, self._count, 4) + b"test"
        tags = b"\0" if kafka.is_flexible(key, version) else b""
        self.write(head + tags + body)
        return self._count

    def write(self, frame: bytes) -> None:
        """Send any bytes as a frame."""
        self._writer.write(struct.pack(">i", len(frame)) + frame)

    async def receive(self, key: int, version: int) -> tuple[int, Any]:
        """The number of the next answer, and what is in it."""
        number, data = await self.receive_bytes()
        if key != 18 and kafka.is_flexible(key, version):
            assert data[0] == 0
            data = data[1:]
        entity, size = entity_reader(load_response_schema(key, version))(data, 0)
        assert size == len(data)
        return number, entity

    async def receive_bytes(self) -> tuple[int, bytes]:
        async with asyncio.timeout(WAIT_SECONDS):
            (size,) = struct.unpack(">i", await self._reader.readexactly(4))
            frame = await self._reader.readexactly(size)
        return struct.unpack(">i", frame[:4])[0], frame[4:]

    async def ask(self, key: int, version: int, values: Mapping[str, Any]) -> Any:
        """Send a request and wait for its answer."""
        number = self.send(key, version, values)
        answered, entity = await self.receive(key, version)
        assert answered == number
        return entity

    async def is_closed(self) -> bool:
        """Wait until the broker has closed the connection."""
        async with asyncio.timeout(WAIT_SECONDS):
            try:
                return await self._reader.read(1) == b""
            except ConnectionError:
                return True

    async def close(self) -> None:
        self._writer.close()

    # ------------------------------------------------------------------------------- the usual ones

    async def create(self, name: str, partitions: int = 1, **configs: str) -> None:
        topic = {
            "name": name,
            "num_partitions": partitions,
            "replication_factor": 1,
            "configs": [
                {"name": key.replace("_", "."), "value": value} for key, value in configs.items()
            ],
        }
        answer = await self.ask(19, 7, {"topics": [topic], "timeout": 1000})
        assert answer.topics[0].error_code == 0, answer.topics[0].error_message

    async def produce(
        self, topic: str, data: bytes | None, *, partition: int = 0, acks: int = -1
    ) -> Any:
        """What became of a batch."""
        answer = await self.ask(0, 9, produced(topic, data, partition=partition, acks=acks))
        return answer.responses[0].partition_responses[0]

    async def fetch(self, topic: str, offset: int, **changes: Any) -> Any:
        """What a partition has from an offset on."""
        answer = await self.ask(1, 12, fetched({topic: {0: offset}}, **changes))
        return answer.responses[0].partitions[0]


def produced(
    topic: str, data: bytes | None, *, partition: int = 0, acks: int = -1
) -> dict[str, Any]:
    part = {"index": partition, "records": data}
    return {
        "acks": acks,
        "timeout": 1000,
        "topic_data": [{"name": topic, "partition_data": [part]}],
    }


def fetched(
    wanted: Mapping[str, Mapping[int, int]],
    *,
    wait_ms: int = 0,
    min_bytes: int = 1,
    max_bytes: int = 1 << 20,
    part_bytes: int = 1 << 20,
    isolation: int = 0,
    session: tuple[int, int] = (0, -1),
) -> dict[str, Any]:
    return {
        "replica_id": -1,
        "max_wait": wait_ms,
        "min_bytes": min_bytes,
        "max_bytes": max_bytes,
        "isolation_level": isolation,
        "session_id": session[0],
        "session_epoch": session[1],
        "topics": [
            {
                "topic": topic,
                "partitions": [
                    {
                        "partition": partition,
                        "fetch_offset": offset,
                        "current_leader_epoch": -1,
                        "last_fetched_epoch": -1,
                        "partition_max_bytes": part_bytes,
                    }
                    for partition, offset in partitions.items()
                ],
            }
            for topic, partitions in wanted.items()
        ],
    }


def batch(
    *values: bytes, producer: tuple[int, int, int] = (-1, -1, -1), ms: int = 1_000_000
) -> bytes:
    """A batch as a producer sends it. `producer`: id, epoch and first sequence number."""
    return kafka_batches.build(
        0,
        ms,
        ms,
        [Record(at, 0, None, value) for at, value in enumerate(values)],
        producer=producer,
    )


def values_in(data: bytes) -> list[tuple[int, bytes | None]]:
    """Offsets and values of the records of batches that follow each other."""
    result: list[tuple[int, bytes | None]] = []
    at = 0
    while at < len(data):
        (length,) = struct.unpack_from(">i", data, at + 8)
        one = data[at : at + 12 + length]
        head = kafka_batches.read_head(one)
        assert head is not None
        kafka_batches.check_sent(head._replace(base_offset=0, attributes=0), one)
        result += [
            (head.base_offset + record.offset_delta, record.value)
            for record in kafka_batches.read_records(head, one, 1 << 24)
        ]
        at += 12 + length
    return result


class KafkaRig:
    """A broker, and connections to it."""

    def __init__(self, broker: Broker) -> None:
        self.broker = broker
        self._clients: list[KafkaClient] = []

    async def connect(self, tls: ssl.SSLContext | None = None) -> KafkaClient:
        host, _, port = self.broker.kafka_address.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port), ssl=tls)
        client = KafkaClient(reader, writer)
        self._clients.append(client)
        return client

    async def close(self) -> None:
        for client in self._clients:
            await client.close()


@asynccontextmanager
async def kafka_rig(files: MemoryFiles | None = None, **changes: Any) -> AsyncIterator[KafkaRig]:
    """A broker with Kafka's door on a free port."""
    config = broker_config(**{"kafka": "on", "kafka_port": 0, **changes})
    broker = Broker(config, files=files or MemoryFiles())
    await broker.start()
    rig = KafkaRig(broker)
    try:
        yield rig
    finally:
        await rig.close()
        await broker.stop()
