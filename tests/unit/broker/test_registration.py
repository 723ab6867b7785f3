"""How a broker becomes known: to each nameserver by itself, at an address that clients can dial."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from sluice.broker import registration
from sluice.broker.server import Broker
from sluice.client.simple import SimpleClient
from sluice.config import NameserverConfig
from sluice.errors import ConfigError
from sluice.link import RemotingLink, split_address
from sluice.nameserver import Nameserver
from sluice.net import own_address
from sluice.protocol import lenient_json
from sluice.protocol.remoting_bodies import read_route
from sluice.protocol.remoting_codes import RequestCode as Request
from sluice.storage.memory_files import MemoryFiles
from tests.unit.broker.broker_kit import BROKER, CLUSTER, broker_config, running, topic_fields
from tests.unit.loops import run_once, until

NEVER_SECONDS = 3600.0
EVERYWHERE = "0.0.0.0"  # noqa: S104


@asynccontextmanager
async def nameserver(host: str = "127.0.0.1", port: int = 0) -> AsyncIterator[Nameserver]:
    running_one = Nameserver(NameserverConfig(listen_host=host, listen_port=port))
    await running_one.start()
    try:
        yield running_one
    finally:
        await running_one.stop()


class Hanging:
    """A nameserver that takes connections and requests, and never answers."""

    def __init__(self) -> None:
        self.address = ""
        self.request_bytes = 0
        self._writers: list[asyncio.StreamWriter] = []

    async def _take(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.append(writer)
        while data := await reader.read(65_536):
            self.request_bytes += len(data)

    @asynccontextmanager
    async def listening(self) -> AsyncIterator[Hanging]:
        server = await asyncio.start_server(self._take, "127.0.0.1", 0)
        self.address = "{}:{}".format(*server.sockets[0].getsockname())
        try:
            yield self
        finally:
            server.close()
            for writer in self._writers:
                writer.close()
            await server.wait_closed()


# Nameservers that are down or hang --------------------------------------------------------------


def test_a_nameserver_that_hangs_delays_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work() -> None:
        async with nameserver() as good, Hanging().listening() as bad:
            addresses = (bad.address, good.address)
            monkeypatch.setattr(registration, "_LEAVE_SECONDS", 0.05)
            monkeypatch.setattr(registration, "_PATIENCE_SECONDS", 0.05)
            async with running(
                nameserver_addresses=addresses, register_timeout_ms=3_600_000
            ) as rig:
                await until(lambda: bad.request_bytes)
                # The first one who waits gives up on it, the later ones do not wait at all.
                await rig.make_topic("first")
                monkeypatch.setattr(registration, "_PATIENCE_SECONDS", NEVER_SECONDS)
                for name in ("second", "third"):
                    await rig.make_topic(name)
                    assert name in good.table.topics()
                assert rig.broker.registrar.registered_count == 1
            assert good.table.topics() == []

    run_once(work())


def test_a_nameserver_that_is_down_is_tried_until_it_is_there(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(registration, "_RETRY_SECONDS", 0.01)
    caplog.set_level("INFO", "sluice.broker")

    async def work() -> None:
        async with nameserver() as gone:
            address = gone.address
        async with running(nameserver_addresses=(address,)) as rig:
            registrar = rig.broker.registrar
            await until(lambda: registrar.failed_count == 1)
            await rig.make_topic("orders")
            async with nameserver(port=split_address(address)[1]) as back:
                await until(lambda: "orders" in back.table.topics())
                await until(lambda: registrar.registered_count == 1)
                assert registrar.failed_count == 0
            # It goes again, and the broker notices at its next change.
            await rig.make_topic("more")
            await until(lambda: registrar.failed_count == 1)

    run_once(work())
    complaints = [line for line in caplog.messages if "cannot register with nameserver" in line]
    assert len(complaints) == 2, "one for each time, not one for each try"
    assert len([line for line in caplog.messages if "again" in line]) == 1


def test_a_broker_that_stops_is_out_of_the_routes_and_stays_out() -> None:
    async def work() -> None:
        async with nameserver() as here:
            async with running(
                nameserver_addresses=(here.address,), register_interval_ms=100
            ) as rig:
                await rig.broker.registrar.registered()
                assert here.table.route(BROKER) is not None
            assert here.table.route(BROKER) is None
            assert here.table.brokers() == []

    run_once(work())


def test_a_topic_that_is_deleted_leaves_the_routes_unless_another_broker_has_it() -> None:
    """Kafka's clients delete topics too, and they tell no nameserver."""

    async def work() -> None:
        async with nameserver() as here:
            addresses = (here.address,)
            async with (
                running(nameserver_addresses=addresses) as rig,
                running(nameserver_addresses=addresses, broker_name="broker-b") as other,
            ):
                for name in ("alone", "shared", "kept"):
                    await rig.make_topic(name)
                await other.make_topic("shared")
                for name in ("alone", "shared"):
                    await rig.done(Request.DELETE_TOPIC_IN_BROKER, {"topic": name})
                assert here.table.route("alone") is None
                assert here.table.route("kept") is not None
                route = here.table.route("shared")
                assert route is not None
                assert "broker-b" in [queue.broker_name for queue in route.queues]
                await rig.make_topic("alone")
                assert here.table.route("alone") is not None, "it may be made again"

    run_once(work())


# Addresses --------------------------------------------------------------------------------------


async def addresses_seen(nameserver_address: str) -> set[str]:
    """Every address that a client is given which reaches the nameserver there."""
    link = await RemotingLink.open(nameserver_address)
    try:
        ext = {"topic": "TBW102", "acceptStandardJsonOnly": "true"}
        route = await link.request(Request.GET_ROUTEINFO_BY_TOPIC, ext, timeout_seconds=30)
        seen = {a for broker in read_route(route.body).brokers for a in broker.addresses.values()}
        cluster = await link.request(Request.GET_BROKER_CLUSTER_INFO, {}, timeout_seconds=30)
        table = lenient_json.loads(bytes(cluster.body))["brokerAddrTable"]
        seen |= {a for row in table.values() for a in row["brokerAddrs"].values()}
        ext = {"clusterName": CLUSTER, "brokerName": BROKER}
        group = await link.request(Request.GET_BROKER_MEMBER_GROUP, ext, timeout_seconds=30)
        members = lenient_json.loads(bytes(group.body))["brokerMemberGroup"]
        seen |= set(members["brokerAddrs"].values())
        system = await link.request(Request.GET_SYSTEM_TOPIC_LIST_FROM_NS, {}, timeout_seconds=30)
        seen.add(lenient_json.loads(bytes(system.body))["brokerAddr"])
        return seen
    finally:
        await link.close()


@asynccontextmanager
async def registered(at: Nameserver, **changes: Any) -> AsyncIterator[Broker]:
    """A broker of this machine, registered over loopback."""
    near = f"127.0.0.1:{split_address(at.address)[1]}"
    config = broker_config(nameserver_addresses=(near,), auto_create_topics="on", **changes)
    broker = Broker(config, files=MemoryFiles())
    await broker.start()
    try:
        await broker.registrar.registered()
        yield broker
    finally:
        await broker.stop()


def test_clients_are_given_the_address_that_they_dialled_themselves() -> None:
    async def work() -> None:
        hosts = dict.fromkeys(("127.0.0.1", "127.0.0.2", own_address()))
        async with (
            nameserver(EVERYWHERE) as here,
            registered(here, listen_host=EVERYWHERE) as broker,
        ):
            port = split_address(here.address)[1]
            for host in hosts:
                assert await addresses_seen(f"{host}:{port}") == {f"{host}:{broker.port}"}
                async with SimpleClient(f"{host}:{port}") as client:
                    queue = (await client.send_queues("orders"))[0]
                    assert queue.address == f"{host}:{broker.port}"
                    await client.send("orders", queue, host.encode(), {})
                    entries, _ = await client.pull("orders", queue, 0, expression="*", wait_ms=0)
                    assert bytes(entries[-1].body) == host.encode()
            # Messages carry an address that others can dial too, where there is one.
            assert broker.core.address == f"{own_address()}:{broker.port}"

    run_once(work())


@pytest.mark.parametrize(
    ("changes", "host"),
    [
        ({"listen_host": "127.0.0.1"}, "127.0.0.1"),
        ({"listen_host": "localhost"}, "127.0.0.1"),
        ({"listen_host": EVERYWHERE, "advertised_host": "10.9.8.7"}, "10.9.8.7"),
        ({"listen_host": "127.0.0.1", "advertised_host": "localhost"}, "localhost"),
    ],
)
def test_an_address_that_was_chosen_is_given_as_it_is(changes: dict[str, str], host: str) -> None:
    async def work() -> None:
        async with nameserver(EVERYWHERE) as here, registered(here, **changes) as broker:
            port = split_address(here.address)[1]
            for dialled in ("127.0.0.1", "127.0.0.2"):
                assert await addresses_seen(f"{dialled}:{port}") == {f"{host}:{broker.port}"}

    run_once(work())


def test_over_ipv6_too() -> None:
    async def work() -> None:
        try:
            here = Nameserver(NameserverConfig(listen_host="::", listen_port=0))
            await here.start()
        except ConfigError as error:
            pytest.skip(f"no IPv6 here: {error}")
        try:
            port = split_address(here.address)[1]
            async with registered(here, listen_host="::") as broker:
                assert await addresses_seen(f"[::1]:{port}") == {f"[::1]:{broker.port}"}
                assert await addresses_seen(f"127.0.0.1:{port}") == {f"127.0.0.1:{broker.port}"}
            async with registered(here, listen_host=EVERYWHERE) as broker:
                # Only IPv4 reaches it, whatever the client dialled for the nameserver.
                (address,) = await addresses_seen(f"[::1]:{port}")
                assert address == f"{own_address()}:{broker.port}"
        finally:
            await here.stop()

    run_once(work())


def test_a_nameserver_elsewhere_is_told_the_address_that_faces_it() -> None:
    host = own_address()
    if host.startswith("127."):
        pytest.skip("this machine has no address but loopback")

    async def work() -> None:
        async with nameserver(EVERYWHERE) as here:
            port = split_address(here.address)[1]
            config = broker_config(listen_host=EVERYWHERE, nameserver_addresses=(f"{host}:{port}",))
            broker = Broker(config, files=MemoryFiles())
            await broker.start()
            try:
                await broker.registrar.registered()
                (group,) = here.table.brokers()
                assert group.addresses == {0: f"{host}:{broker.port}"}
            finally:
                await broker.stop()

    run_once(work())


def test_a_name_that_nobody_knows_is_one_line() -> None:
    async def work() -> None:
        files = MemoryFiles()
        config = broker_config(advertised_host="no-such-host.invalid")
        with pytest.raises(ConfigError, match=r"address of no-such-host.invalid is not known"):
            await Broker(config, files=files).start()
        assert not files.exists("/store")

    run_once(work())


# Topics that a message makes --------------------------------------------------------------------


def test_strangers_do_not_make_topics_unless_somebody_allows_it() -> None:
    async def made(**changes: Any) -> bool:
        broker = Broker(broker_config(**changes), files=MemoryFiles())
        await broker.start()
        try:
            async with SimpleClient("") as client:
                fields = {"b": "fresh", "c": "TBW102", "d": "4", "e": "0"}
                rest = {"a": "g", "f": "0", "g": "1", "h": "0", "i": ""}
                address = f"127.0.0.1:{broker.port}"
                answer = await client.ask(address, Request.SEND_MESSAGE_V2, fields | rest, b"x")
                assert (answer.code == 17) == ("auto_create_topics is off" in str(answer.remark))
                return answer.code == 0
        finally:
            await broker.stop()

    async def work() -> None:
        assert await made(listen_host="127.0.0.1")
        assert not await made(listen_host="127.0.0.1", auto_create_topics="off")
        assert not await made(listen_host=EVERYWHERE)
        assert await made(listen_host=EVERYWHERE, auto_create_topics="on")

    run_once(work())


def test_a_topic_that_an_administrator_makes_needs_no_permission() -> None:
    async def work() -> None:
        async with running(auto_create_topics="off") as rig:
            await rig.done(Request.UPDATE_AND_CREATE_TOPIC, topic_fields("orders"))
            await rig.send("orders")
            lines = bytes((await rig.done(Request.GET_BROKER_CONFIG)).body).decode().splitlines()
            assert "autoCreateTopicEnable=false" in lines
            await rig.done(Request.UPDATE_BROKER_CONFIG, body=b"autoCreateTopicEnable=true")
            await rig.send("fresh")

    run_once(work())
