"""This module sends the same requests, good and bad, to Apache Kafka and to `sluice serve`, byte by
byte, and compares what comes back.
"""

from __future__ import annotations

import asyncio
import gzip
import struct
from collections.abc import Iterator
from typing import Any

import pytest
from crc32c import crc32c

from peers import PeerUnavailable
from peers.kafka import Kafka
from peers.process import free_ports
from sluice.protocol import kafka_batches
from sluice.protocol.kafka_batches import Record
from tests.interop.sluice_process import SluiceProcess
from tests.unit.broker.kafka_door_kit import KafkaClient, batch, fetched

SILENCE_S = 20
READY_S = 60
PRODUCE, FETCH, LIST_OFFSETS, METADATA, CREATE, DELETE = 0, 1, 2, 3, 19, 20


@pytest.fixture(scope="module")
def addresses(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[str]]:
    """Apache's, and ours."""
    try:
        peer = Kafka(tmp_path_factory.mktemp("apache"))
    except PeerUnavailable as error:
        pytest.skip(error.reason)
    (port,) = free_ports(1)
    ours = SluiceProcess(
        tmp_path_factory.mktemp("ours"), "--kafka", "on", "--kafka-port", str(port)
    )
    with peer, ours:
        yield [peer.address, f"127.0.0.1:{port}"]


def differences(ours: dict[str, Any], theirs: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    return {name: (ours[name], theirs[name]) for name in ours if ours[name] != theirs[name]}


async def connect(address: str) -> KafkaClient:
    host, _, port = address.rpartition(":")
    return KafkaClient(*await asyncio.open_connection(host, int(port)))


def changed(at: int, new: bytes, data: bytes | None = None) -> bytes:
    """A batch with other bytes in it, and the checksum that fits them."""
    data = batch(b"a", b"b") if data is None else data
    data = data[:at] + new + data[at + len(new) :]
    return data[:17] + crc32c(data[21:]).to_bytes(4, "big") + data[21:]


def with_count(count: int) -> bytes:
    lie = changed(57, count.to_bytes(4, "big"))
    return changed(23, (count - 1).to_bytes(4, "big"), lie)


def batches() -> dict[str, bytes]:
    # No records at all (null) are left out: Apache's broker never answers them.
    good = batch(b"a", b"b")
    inside = bytearray()
    kafka_batches.put_record(inside, Record(0, 0, None, b"x"))
    packed = gzip.compress(bytes(inside))
    return {
        "good": good,
        "empty": b"",
        "two": good + good,
        "cut": good[:-1],
        "old magic": good[:16] + b"\x01" + good[17:],
        "no magic": good[:16] + b"\x03" + good[17:],
        "shorter than it says": good[:8] + (len(good) - 11).to_bytes(4, "big") + good[12:],
        "longer than it says": good[:8] + (len(good) - 17).to_bytes(4, "big") + good[12:],
        "a few bytes more": good + bytes(5),
        "zeros behind it": good + bytes(20),
        "flipped": good[:40] + bytes((good[40] ^ 1,)) + good[41:],
        "no records": changed(57, bytes(4)),
        "fewer than it says": with_count(3),
        "more than it says": with_count(1),
        "other last delta": changed(23, b"\0\0\0\x07"),
        "control": changed(21, b"\0\x20"),
        "a producer without sequence": changed(43, bytes(8)),
        "no lz4": changed(21, b"\0\x03"),
        "gzip": kafka_batches.wrap(0, 5, 5, packed, last_delta=0, count=1, attributes=1),
        "cut gzip": kafka_batches.wrap(0, 5, 5, packed[:-9], last_delta=0, count=1, attributes=1),
        "no gzip": changed(21, b"\0\x01"),
        "no snappy": changed(21, b"\0\x02"),
        "no zstd": changed(21, b"\0\x04"),
        "too large": batch(bytes(1_100_000)),
        "ahead of the clock": batch(b"a", ms=1 << 45),
        "sequence 5, then 0": batch(b"a", producer=(4_000_000, 0, 5)),
    }


async def outcome(
    address: str, data: bytes, topic: str = "refused", **how: int
) -> tuple[int, int] | str:
    """Code and offset of a batch, over a connection of its own: some get no answer at all."""
    client = await connect(address)
    try:
        async with asyncio.timeout(SILENCE_S):
            part = await client.produce(topic, data, **how)
    except (TimeoutError, asyncio.IncompleteReadError):
        return "no answer"
    finally:
        await client.close()
    return int(part.error_code), part.base_offset


async def produce_all(address: str) -> dict[str, Any]:
    client = await connect(address)
    await client.create("refused")
    result: dict[str, Any] = {}
    for name, data in batches().items():
        result[name] = await outcome(address, data)
    for name, data in {
        "sequence 0": batch(b"a", producer=(4_000_000, 0, 0)),
        "sequence 6": batch(b"a", producer=(4_000_000, 0, 6)),
        "sequence 6 again": batch(b"a", producer=(4_000_000, 0, 6)),
        "an epoch that begins at 7": batch(b"a", producer=(4_000_000, 1, 7)),
        "an epoch that begins at 0": batch(b"a", producer=(4_000_000, 1, 0)),
        "the old epoch": batch(b"a", producer=(4_000_000, 0, 7)),
    }.items():
        result[name] = await outcome(address, data)
    for acks in (-2, 2):
        result[f"acks {acks}"] = await outcome(address, batch(b"a"), acks=acks)
    result["no such partition"] = await outcome(address, batch(b"a"), partition=9)
    await client.create("copies-in-sync", min_insync_replicas="2")
    result["more copies in sync than there are"] = await outcome(
        address, batch(b"a"), "copies-in-sync", acks=-1
    )
    asked = {"partition_index": 0, "current_leader_epoch": -1, "timestamp": -1}
    topics = [{"name": "refused", "partitions": [asked]}]
    ends = await client.ask(LIST_OFFSETS, 7, {"replica_id": -1, "topics": topics})
    result["end"] = ends.topics[0].partitions[0].offset
    await client.close()
    return result


def test_produce(addresses: list[str]) -> None:
    theirs, ours = [asyncio.run(produce_all(address)) for address in addresses]
    assert differences(ours, theirs) == {}


async def read_all(address: str) -> dict[str, Any]:
    client = await connect(address)
    await client.create("read", 2)
    begin = 1_700_000_000_000
    for number in (5, 9, 7):
        await client.produce("read", batch(b"a" * 500, b"b" * 500, ms=begin + number))
    result: dict[str, Any] = {}
    for offset in (-1, 0, 1, 5, 6, 7, 1 << 40):
        part = await client.fetch("read", offset)
        places = (part.high_watermark, part.last_stable_offset, part.log_start_offset)
        result[f"fetch {offset}"] = (int(part.error_code), places, len(part.records))
    for version in (4, 5, 7, 8, 9, 10, 11, 12):
        answer = await client.ask(FETCH, version, fetched({"read": {0: 2}, "missing": {0: 0}}))
        result[f"fetch v{version}"] = [
            (topic.topic, [(int(part.error_code), len(part.records)) for part in topic.partitions])
            for topic in answer.responses
        ]
    for when in (-1, -2, -3, 0, begin, begin + 6, begin + 9, begin + 10):
        part = {"partition_index": 0, "current_leader_epoch": -1, "timestamp": when}
        asked = {"replica_id": -1, "topics": [{"name": "read", "partitions": [part]}]}
        (found,) = (await client.ask(LIST_OFFSETS, 7, asked)).topics[0].partitions
        result[f"offset at {when}"] = (int(found.error_code), found.offset, found.timestamp)
    for epoch in (0, 1, 7):
        wanted = fetched({"read": {0: 0}})
        wanted["topics"][0]["partitions"][0]["current_leader_epoch"] = epoch
        part = (await client.ask(FETCH, 12, wanted)).responses[0].partitions[0]
        result[f"epoch {epoch}"] = (int(part.error_code), len(part.records))
    wanted = fetched({"read": {0: 0}}, session=(77, 3))
    result["no session"] = int((await client.ask(FETCH, 12, wanted)).error_code)
    await client.close()
    return result


def test_fetch_and_offsets(addresses: list[str]) -> None:
    theirs, ours = [asyncio.run(read_all(address)) for address in addresses]
    assert differences(ours, theirs) == {}


class Session:
    """A fetch session, and what its answers hold: code, whether it goes on, and partitions."""

    def __init__(self, client: KafkaClient) -> None:
        self._client = client
        self.id = 0
        self.epoch = 0

    async def ask(
        self,
        places: dict[str, dict[int, int]],
        forgotten: dict[str, list[int]] | None = None,
        *,
        version: int = 12,
        **changes: Any,
    ) -> tuple[int, bool, list[tuple[str, int, int, int]]]:
        wanted = fetched(places, session=(self.id, self.epoch), **changes)
        wanted["forgotten_topics_data"] = [
            {"topic": topic, "partitions": partitions}
            for topic, partitions in (forgotten or {}).items()
        ]
        answer = await self._client.ask(FETCH, version, wanted)
        if self.epoch == 0:
            self.id = answer.session_id
        self.epoch += 1
        found = [
            (topic.topic, part.partition_index, int(part.error_code), len(part.records or b""))
            for topic in answer.responses
            for part in topic.partitions
        ]
        return int(answer.error_code), answer.session_id == self.id != 0, found


async def store(client: KafkaClient, topic: str, partition: int) -> None:
    """A partition that has just been made may not have its leader yet."""
    async with asyncio.timeout(READY_S):
        code = -1
        while code:
            part = await client.produce(topic, batch(b"a" * 100), partition=partition)
            code = part.error_code


async def use_sessions(address: str) -> dict[str, Any]:
    client = await connect(address)
    await client.create("kept", 3)
    for partition in range(3):
        await store(client, "kept", partition)
    result: dict[str, Any] = {}
    session = Session(client)
    result["first"] = await session.ask({"kept": {0: 0, 1: 1, 2: 0}})
    result["nothing new"] = await session.ask({"kept": {0: 1, 2: 1}})
    await client.produce("kept", batch(b"b" * 50), partition=1)
    await client.produce("kept", batch(b"b" * 70), partition=0)
    result["two are new"] = await session.ask({})
    result["again, the other way round"] = await session.ask({})
    result["one is forgotten"] = await session.ask({"kept": {0: 2, 1: 2}}, {"kept": [2]})
    result["it comes back"] = await session.ask({"kept": {2: 1}})
    result["out of range"] = await session.ask({"kept": {2: 99}})
    result["still out of range"] = await session.ask({})
    result["no more"] = await session.ask({"kept": {2: 1}})
    result["a topic that is not there"] = await session.ask({"missing": {0: 0}})
    result["it is not there yet"] = await session.ask({})
    result["named and forgotten"] = await session.ask({"kept": {0: 0}}, {"kept": [0]})
    session.epoch += 1
    result["an epoch too far"] = await session.ask({})
    session.epoch -= 2
    result["the right one"] = await session.ask({})
    everything = {"kept": [1, 2], "missing": [0]}
    result["all are forgotten"] = await session.ask({}, everything)
    result["it has ended"] = await session.ask({})
    empty = Session(client)
    result["of nothing"] = await empty.ask({})
    result["something at last"] = await empty.ask({"kept": {0: 0}})
    last = Session(client)
    await last.ask({"kept": {0: 0}})
    last.epoch = -1
    result["closed"] = await last.ask({"kept": {1: 0}})
    last.epoch = 1
    result["after it was closed"] = await last.ask({})
    await client.close()
    return result


def test_fetch_sessions(addresses: list[str]) -> None:
    theirs, ours = [asyncio.run(use_sessions(address)) for address in addresses]
    assert differences(ours, theirs) == {}


async def manage(address: str) -> dict[str, Any]:
    client = await connect(address)
    result: dict[str, Any] = {}

    async def create(name: str, count: int = 1, copies: int = 1, **configs: str) -> int:
        named = [{"name": k.replace("_", "."), "value": v} for k, v in configs.items()]
        topic = {"name": name, "num_partitions": count, "replication_factor": copies}
        asked = {"topics": [{**topic, "configs": named}], "timeout": 30_000}
        (made,) = (await client.ask(CREATE, 7, asked)).topics
        return int(made.error_code)

    result["make"] = await create("made")
    result["again"] = await create("made")
    result["no name"] = await create("a/b")
    result["dots"] = await create("..")
    result["long"] = await create("x" * 250)
    result["no partitions"] = await create("none", 0)
    result["too many copies"] = await create("copies", 1, 3)
    result["unknown config"] = await create("config", retention_hours="1")
    result["bad config"] = await create("config", retention_ms="soon")
    for names in (["made"], ["made", "missing"], ["a/b"], []):
        asked = {"topics": [{"name": n} for n in names], "allow_auto_topic_creation": False}
        topics = (await client.ask(METADATA, 12, asked)).topics
        result[f"metadata {names}"] = sorted(
            (each.name, int(each.error_code), len(each.partitions)) for each in topics
        )
    for name in ("missing", "made", "made"):
        asked = {"topics": [{"name": name}], "timeout": 30_000}
        (gone,) = (await client.ask(DELETE, 6, asked)).responses
        result[f"delete {name} {len(result)}"] = int(gone.error_code)
    await client.close()
    return result


def test_topics(addresses: list[str]) -> None:
    theirs, ours = [asyncio.run(manage(address)) for address in addresses]
    assert differences(ours, theirs) == {}


async def is_closed_by(address: str, frame: bytes) -> bool:
    client = await connect(address)
    client.write(frame)
    closed = await client.is_closed()
    await client.close()
    return closed


@pytest.mark.parametrize(
    "frame",
    [
        struct.pack(">hhih", METADATA, 99, 1, -1),
        struct.pack(">hhih", 999, 0, 1, -1),
        struct.pack(">hhih", PRODUCE, 2, 1, -1) + bytes(40),
        struct.pack(">hhih", METADATA, 4, 1, -1) + b"\x7f\xff\xff\xff",
        bytes(4),
    ],
)
def test_what_is_no_request(addresses: list[str], frame: bytes) -> None:
    for address in addresses:
        assert asyncio.run(is_closed_by(address, frame))


def test_the_first_requests_of_a_client_from_the_future(addresses: list[str]) -> None:
    async def ask(address: str) -> tuple[int, bytes]:
        client = await connect(address)
        client.write(struct.pack(">hhih", 18, 9, 5, -1) + b"\0whatever")
        answer = await client.receive_bytes()
        await client.close()
        return answer

    theirs, ours = [asyncio.run(ask(address)) for address in addresses]
    assert ours == theirs
