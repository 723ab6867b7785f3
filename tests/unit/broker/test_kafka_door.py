"""This module tests Kafka's door over loopback: order of answers, versions, and what bad peers
get.
"""

from __future__ import annotations

import asyncio
import ssl
import struct
from pathlib import Path
from typing import Any

import pytest

from sluice.broker.server import Broker
from sluice.errors import ConfigError
from sluice.protocol import kafka_codes
from sluice.storage.memory_files import MemoryFiles
from tests.certificates import self_signed
from tests.unit.broker.broker_kit import broker_config
from tests.unit.broker.kafka_door_kit import batch, fetched, kafka_rig, produced, values_in

API_VERSIONS, METADATA, PRODUCE, FETCH = 18, 3, 0, 1


def test_api_versions_of_every_age() -> None:
    async def run() -> None:
        async with kafka_rig() as rig:
            client = await rig.connect()
            software = {"client_software_name": "a-client", "client_software_version": "1.0"}
            for version in range(5):
                answer = await client.ask(API_VERSIONS, version, software)
                ranges = {
                    row.api_key: (row.min_version, row.max_version) for row in answer.api_keys
                }
                assert ranges[PRODUCE] == (0, 13), "old clients look for version 0"
                assert ranges[FETCH] == (4, 18)
                assert 71 not in ranges, "no telemetry"
            client.send(API_VERSIONS, 4, {}, b"")
            assert await client.is_closed(), "a body that is too short"
            client = await rig.connect()
            client.write(struct.pack(">hhih", API_VERSIONS, 5, 77, -1) + b"\0whatever")
            assert await client.receive_bytes() == (77, bytes.fromhex("0023000000010012000000 04"))
            bad = await client.ask(API_VERSIONS, 3, {**software, "client_software_name": "-x"})
            assert bad.error_code == kafka_codes.INVALID_REQUEST

    asyncio.run(run())


@pytest.mark.parametrize(
    "frame",
    [
        struct.pack(">hhih", METADATA, 99, 1, -1),
        struct.pack(">hhih", 4, 0, 1, -1) + bytes(40),
        struct.pack(">hhih", PRODUCE, 2, 1, -1) + bytes(40),
        struct.pack(">hhih", METADATA, 4, 1, -1) + struct.pack(">i", 2_000_000_000),
        struct.pack(">hhih", PRODUCE, 9, 1, -1) + b"\0\0" + b"\xff" * 30,
        bytes(4),
    ],
)
def test_what_is_no_request_closes_the_connection_and_no_other(frame: bytes) -> None:
    async def run() -> None:
        async with kafka_rig() as rig:
            bad, good = await rig.connect(), await rig.connect()
            bad.write(frame)
            assert await bad.is_closed()
            await good.create("still")

    asyncio.run(run())


def test_a_request_that_is_too_long_closes_the_connection() -> None:
    async def run() -> None:
        async with kafka_rig(kafka_request_bytes_max=64 * 1024) as rig:
            client = await rig.connect()
            client._writer.write(struct.pack(">i", 65 * 1024))
            assert await client.is_closed()

    asyncio.run(run())


def test_answers_keep_the_order_of_the_requests() -> None:
    """A fetch that waits holds back what was asked after it, and a batch is stored meanwhile."""

    async def run() -> None:
        async with kafka_rig() as rig:
            client, other = await rig.connect(), await rig.connect()
            await client.create("t")
            first = client.send(FETCH, 12, fetched({"t": {0: 0}}, wait_ms=60_000))
            second = client.send(PRODUCE, 9, produced("t", batch(b"x")))
            third = client.send(METADATA, 12, {"topics": []})
            number, answer = await client.receive(FETCH, 12)
            assert number == first
            assert values_in(answer.responses[0].partitions[0].records) == [(0, b"x")]
            assert (await client.receive(PRODUCE, 9))[0] == second
            assert (await client.receive(METADATA, 12))[0] == third
            assert (await other.fetch("t", 0)).high_watermark == 1

    asyncio.run(run())


def test_acks_0_gets_no_answer_and_an_error_closes() -> None:
    async def run() -> None:
        async with kafka_rig() as rig:
            client = await rig.connect()
            await client.create("t")
            client.send(PRODUCE, 9, produced("t", batch(b"x"), acks=0))
            answer = await client.ask(METADATA, 12, {"topics": []})
            assert answer.topics == ()
            assert values_in((await client.fetch("t", 0, wait_ms=30_000)).records) == [(0, b"x")]
            client.send(PRODUCE, 9, produced("t", b"no batch", acks=0))
            assert await client.is_closed()

    asyncio.run(run())


def test_a_connection_that_goes_leaves_nothing_behind() -> None:
    async def run() -> None:
        async with kafka_rig() as rig:
            client, other = await rig.connect(), await rig.connect()
            await client.create("t")
            client.send(FETCH, 12, fetched({"t": {0: 0}}, wait_ms=60_000))
            await client.close()
            assert (await other.produce("t", batch(b"x"))).error_code == 0
            assert values_in((await other.fetch("t", 0)).records) == [(0, b"x")]

    asyncio.run(run())


def test_a_stop_answers_the_fetches_that_wait() -> None:
    async def run() -> None:
        async with kafka_rig() as rig:
            client = await rig.connect()
            await client.create("t")
            client.send(FETCH, 12, fetched({"t": {0: 0}}, wait_ms=60_000))
            await asyncio.wait_for(rig.broker.stop(), 20)

    asyncio.run(run())


def test_a_port_that_is_taken() -> None:
    async def run() -> None:
        async with kafka_rig() as rig:
            port = int(rig.broker.kafka_address.rpartition(":")[2])
            config: dict[str, Any] = {"kafka_port": port}
            strict = Broker(broker_config(kafka="on", **config), files=MemoryFiles())
            with pytest.raises(ConfigError, match=r"in use.*--kafka-port"):
                await strict.start()
            lenient = Broker(broker_config(**config), files=MemoryFiles())
            await lenient.start()
            try:
                assert "--kafka-port" in lenient.kafka_refusal
                assert lenient.kafka_address == ""
            finally:
                await lenient.stop()
            off = Broker(broker_config(kafka="off", **config), files=MemoryFiles())
            await off.start()
            try:
                assert (off.kafka_refusal, off.kafka_address) == ("", "")
            finally:
                await off.stop()

    asyncio.run(run())


def test_many_requests_are_open_and_all_are_answered() -> None:
    """More than may be open at one time: the rest waits its turn."""

    async def run() -> None:
        async with kafka_rig() as rig:
            client = await rig.connect()
            await client.create("t")
            client.send(FETCH, 12, fetched({"t": {0: 0}}, wait_ms=60_000))
            for _ in range(2500):
                client.send(METADATA, 12, {"topics": []})
            other = await rig.connect()
            assert (await other.produce("t", batch(b"x"))).error_code == 0
            numbers = [(await client.receive(FETCH, 12))[0]]
            numbers += [(await client.receive(METADATA, 12))[0] for _ in range(2500)]
            assert numbers == sorted(numbers)

    asyncio.run(run())


def test_tls_on_the_same_port(tmp_path: Path) -> None:
    certificate = self_signed(tmp_path, "broker")
    context = ssl.create_default_context(cafile=certificate.file)

    async def run() -> None:
        shown: dict[str, Any] = {
            "tls_certificate_file": certificate.file,
            "tls_key_file": certificate.key_file,
        }
        async with kafka_rig(tls_mode="permissive", **shown) as rig:
            plain, secret = await rig.connect(), await rig.connect(context)
            await plain.create("t")
            assert (await secret.produce("t", batch(b"x"))).error_code == 0
            assert values_in((await secret.fetch("t", 0)).records) == [(0, b"x")]
        async with kafka_rig(tls_mode="enforcing", **shown) as rig:
            plain = await rig.connect()
            plain.send(METADATA, 12, {"topics": []})
            assert await plain.is_closed()

    asyncio.run(run())
