"""`sluice admin`: brokers and nameservers, and what happens where one of several is down."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Iterator

import pytest

from sluice.aio import Admin
from sluice.client import admin_brokers
from sluice.errors import LinkLost
from sluice.net import Connection
from sluice.protocol.remoting import RemotingCommand
from sluice.protocol.remoting_codes import RequestCode as Request
from tests.unit.client.admin_kit import BROKER, CLUSTER, Site, cluster, one_line, sluice


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    with cluster() as running:
        yield running


@pytest.fixture
def nowhere() -> Iterator[str]:
    """An address that nobody listens on."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{taken.getsockname()[1]}"


def test_cluster_list(site: Site) -> None:
    rows = site.lines("clusterList")
    assert rows[0] == "Cluster Broker Id Address Version In/s Out/s Lock ms Hours Disk Active"
    assert rows[1].startswith(f"{CLUSTER} {BROKER} 0 {site.broker.address} V5_5_0 ")
    assert rows[1].endswith(" true")
    (broker,) = site.json("clusterList", "-c", CLUSTER)["brokers"]
    assert (broker["brokerAddr"], broker["brokerActive"]) == (site.broker.address, True)
    assert site.refused("clusterList", "-c", "Nowhere").startswith("no cluster Nowhere")


def test_cluster_list_with_totals(site: Site) -> None:
    site.ok("updateTopic", "-c", CLUSTER, "-t", "orders", "-r", "1", "-w", "1")
    before = site.json("clusterList", "-m")["brokers"][0]["inTotalToday"]
    site.send("orders", "one")
    after = site.json("clusterList", "-m")["brokers"][0]
    assert after["inTotalToday"] == before + 1
    assert after["inTotalYest"] == 0
    rows = site.lines("clusterList", "-m")
    assert rows[0] == "Cluster Broker Id In Yesterday Out Yesterday In Today Out Today"


def test_cluster_list_again_and_again(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[float] = []

    async def sleep(seconds: float) -> None:
        waited.append(seconds)
        if len(waited) == 3:
            raise LinkLost("enough")

    monkeypatch.setattr(admin_brokers, "sleep", sleep)
    done = site.admin("clusterList", "-i", "2", "--json")
    assert (done.status, done.err) == (2, "sluice: enough\n")
    assert waited == [2, 2, 2]
    documents = [json.loads(line) for line in done.out.splitlines()]
    assert len(documents) == 3


def test_broker_status_of_one_and_of_a_cluster(site: Site) -> None:
    rows = site.lines("brokerStatus", "-b", site.broker.address)
    assert "brokerVersionDesc V5_5_0" in rows
    assert "unequalSubscriptions none" in rows
    (broker,) = site.json("brokerStatus", "-c", CLUSTER)["brokers"]
    assert broker["table"]["heldPulls"] == "0"
    assert f"broker {site.broker.address}" in site.lines("brokerStatus", "-c", CLUSTER)


def test_get_and_update_broker_config(site: Site) -> None:
    get = ("getBrokerConfig", "-b", site.broker.address)
    assert f"brokerName {BROKER}" in site.lines(*get)
    update = ("updateBrokerConfig", "-k", "autoCreateTopicEnable")
    rows = site.lines(*update, "-b", site.broker.address, "-v", "false")
    assert rows[1] == f"{site.broker.address} autoCreateTopicEnable false done"
    (broker,) = site.json(*get)["brokers"]
    assert broker["properties"]["autoCreateTopicEnable"] == "false"
    document = site.json(*update, "-c", CLUSTER, "-v", "true", "-a", "true")
    assert document["brokers"] == [{"brokerAddr": site.broker.address, "result": "SUCCESS"}]


def test_settings_that_cannot_be_changed(site: Site) -> None:
    update = ("updateBrokerConfig", "-b", site.broker.address)
    assert "Can not update config in black list." in site.refused(
        *update, "-k", "rocketmqHome", "-v", "/tmp"
    )
    assert "noSuchThing" in site.refused(*update, "-k", "noSuchThing", "-v", "1")
    assert "no name of a setting" in site.wrong(*update, "-k", "a=b", "-v", "1")
    assert "more than one line" in site.wrong(*update, "-k", "a", "-v", "1\nrocketmqHome=x")


def test_wipe_and_add_write_permission(site: Site) -> None:
    site.ok("updateTopic", "-c", CLUSTER, "-t", "orders", "-r", "1", "-w", "1")
    rows = site.lines("wipeWritePerm", "-b", BROKER)
    assert rows[1].startswith(f"{BROKER} {site.nameserver.address} ")
    assert site.lines("topicRoute", "-t", "orders")[1].endswith(" R (4)")
    document = site.json("addWritePerm", "-b", BROKER)
    assert document["nameServers"][0]["addTopicCount"] > 0
    assert site.lines("topicRoute", "-t", "orders")[1].endswith(" RW (6)")
    assert site.json("wipeWritePerm", "-b", BROKER)["nameServers"][0]["wipeTopicCount"] > 0
    site.ok("addWritePerm", "-b", BROKER)
    for command in ("wipeWritePerm", "addWritePerm"):
        said = site.refused(command, "-b", "broker-z")
        assert said == f"no broker broker-z; there are: {BROKER}"


def test_values_of_the_nameservers(site: Site) -> None:
    rows = site.lines("updateKvConfig", "-s", "limits", "-k", "orders", "-v", "100")
    assert rows[1] == f"{site.nameserver.address} limits orders done"
    assert stored_value(site, "limits", "orders") == "100"
    document = site.json("updateKvConfig", "-s", "limits", "-k", "orders", "-v", "-1")
    assert document["value"] == "-1"
    assert site.lines("deleteKvConfig", "-s", "limits", "-k", "orders")[1].endswith("done")
    assert stored_value(site, "limits", "orders") is None
    document = site.json("deleteKvConfig", "-s", "limits", "-k", "orders")
    assert document["nameServers"][0]["result"] == "SUCCESS"


def stored_value(site: Site, namespace: str, key: str) -> str | None:
    async def ask() -> str | None:
        async with Admin(site.nameserver.address) as admin:
            return await admin.value(namespace, key)

    return asyncio.run(ask())


# -------------------------------------------------------------------------------- what is not there


def test_a_broker_that_is_not_there(site: Site, nowhere: str) -> None:
    said = site.wrong("brokerStatus", "-b", nowhere)
    assert said == f"{nowhere}: cannot connect: Connection refused"
    assert "is not host:port" in site.wrong("brokerStatus", "-b", "broker-a")


def test_a_broker_that_answers_nonsense(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    def nonsense(connection: Connection, command: RemotingCommand) -> None:
        site.broker.api.answer(connection, command, body=b"not what was asked for")

    monkeypatch.setitem(site.broker.api.handlers, Request.GET_BROKER_RUNTIME_INFO, nonsense)
    assert "the body is not JSON" in site.wrong("brokerStatus", "-b", site.broker.address)


def test_no_nameserver(nowhere: str, monkeypatch: pytest.MonkeyPatch) -> None:
    said = one_line(sluice("admin", "topicList", "-n", nowhere), 2)
    assert said.startswith(f"no nameserver answers ({nowhere}: cannot connect")
    monkeypatch.setenv("NAMESRV_ADDR", nowhere)
    assert nowhere in one_line(sluice("admin", "topicList"), 2)


def test_one_of_several_nameservers_is_enough_to_look(site: Site, nowhere: str) -> None:
    done = sluice("admin", "topicList", "-n", f"{nowhere};{site.nameserver.address}")
    assert (done.status, done.err) == (0, "")


def test_what_one_of_several_does_not_do_is_said(nowhere: str) -> None:
    with cluster() as site:
        both = f"{site.nameserver.address};{nowhere}"
        done = sluice("admin", "updateKvConfig", *("-s", "a", "-k", "b", "-v", "c"), "-n", both)
        assert done.status == 1
        rows = [" ".join(line.split()) for line in done.out.splitlines()]
        assert rows[1] == f"{site.nameserver.address} a b done"
        assert rows[2].startswith(f"{nowhere} a b failed: {nowhere}: cannot connect")
        assert done.err.startswith("sluice: 1 of 2 failed: ")

        site.register_elsewhere("broker-z", CLUSTER, nowhere)
        done = site.admin("updateTopic", "-c", CLUSTER, "-t", "half", "--json")
        assert done.status == 1
        results = json.loads(done.out)["brokers"]
        assert [row["result"] == "SUCCESS" for row in results] == [True, False]
        assert site.broker.core.topics.get("half") is not None

        rows = site.lines("clusterList")
        assert f"{CLUSTER} broker-z 0 {nowhere} 0.00 0.00 0 0.00 0.00 false" in rows
        assert any(row.startswith(f"WARNING: {nowhere}: cannot connect") for row in rows)
        done = site.admin("brokerStatus", "-c", CLUSTER)
        assert done.status == 1
        assert "brokerVersionDesc" in done.out
        assert done.err.startswith("sluice: 1 of 2 failed: ")
