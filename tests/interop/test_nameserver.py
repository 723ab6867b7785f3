"""Our nameserver between Apache's broker, clients and mqadmin, and beside Apache's nameserver.

For the comparison one broker registers with both nameservers; both are asked the same, over the
wire and by mqadmin.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson
import pytest

from peers import Jars, RocketMQ
from peers.rocketmq import BROKER, CLUSTER
from sluice.protocol import lenient_json
from sluice.protocol.remoting import RemotingCommand
from tests.interop.clients import JavaClients, SendPlan
from tests.interop.sluice_process import (
    Question,
    SluiceNameserver,
    ask,
    has_route,
    wait_for_route,
)

TOPICS = ("RoutedOrders", "RoutedPayments")
TOPIC = "RoutedAlike"


@pytest.fixture
def ours(tmp_path: Path) -> Iterator[str]:
    """The address of a running `sluice nameserver`."""
    with SluiceNameserver(tmp_path / "nameserver") as nameserver:
        yield nameserver.address


@pytest.mark.slow
def test_apaches_broker_and_clients_work_through_our_nameserver(
    ours: str, rocketmq_jars: Jars, java_clients: JavaClients, tmp_path: Path
) -> None:
    with RocketMQ(tmp_path / "apache", jars=rocketmq_jars, nameserver=ours) as apache:
        assert apache.nameserver_address == ours
        sent = java_clients.send(ours, SendPlan("n", TOPICS, count=200, queues=4))
        pushed = java_clients.receive_push(ours, TOPICS, count=200, group="routed-push")
        assert {row["properties"]["id"] for row in pushed} == {row["id"] for row in sent}
        # A killed broker's connection closes, and its routes are gone with it.
        apache.kill()
        wait_for_route(ours, TOPICS[0], there=False)
        apache.start()
        wait_for_route(ours, TOPICS[0])
        received = java_clients.receive_all(ours, TOPICS)
        assert {row["properties"]["id"] for row in received} == {row["id"] for row in sent}
        apache.stop_broker()
        assert not has_route(ours, TOPICS[0])


# What both are asked; what Apache answers is right.
BROKER_FIELDS = {"brokerName": BROKER, "clusterName": CLUSTER, "brokerId": "0"}
ORDER = "ORDER_TOPIC_CONFIG"
SAME_ANSWER = (
    Question(105, {"topic": TOPIC}),
    Question(105, {"topic": TOPIC, "acceptStandardJsonOnly": "true"}),
    Question(105, {"topic": "NoSuchTopic"}),
    Question(105, {"topic": "TBW102", "__ZONE_MODE": "true", "__ZONE_NAME": "north"}),
    Question(106, {}),
    Question(206, {}),
    Question(224, {"cluster": CLUSTER}),
    Question(224, {"cluster": "NoSuchCluster"}),
    Question(304, {}),
    Question(311, {}),
    Question(312, {}),
    Question(313, {}),
    Question(901, {"clusterName": CLUSTER, "brokerName": BROKER}),
    Question(901, {"clusterName": "x", "brokerName": "y"}),
    Question(101, {"namespace": "n", "key": "k"}),
    Question(219, {"namespace": "n"}),
    Question(102, {"namespace": "n", "key": "k"}),
    Question(100, {"namespace": "n", "key": "k", "value": "v ü"}),
    Question(101, {"namespace": "n", "key": "k"}),
    Question(219, {"namespace": "n"}),
    Question(102, {"namespace": "n", "key": "k"}),
    Question(101, {"namespace": "n", "key": "k"}),
    Question(219, {"namespace": "n"}),
    Question(100, {"namespace": ORDER, "key": TOPIC, "value": f"{BROKER}:4"}),
    Question(205, {"brokerName": BROKER}),
    Question(105, {"topic": TOPIC}),
    Question(327, {"brokerName": BROKER}),
    Question(327, {"brokerName": "nobody"}),
    Question(105, {"topic": "TBW102"}),
    Question(318, {}, b"kvConfigPath=/nowhere\n"),
    Question(318, {}, b"enableTopicList=false\n"),
    Question(224, {"cluster": CLUSTER}),
    Question(311, {}),
    Question(318, {}, b"enableTopicList=true\n"),
    Question(322, {**BROKER_FIELDS, "brokerAddr": "nobody:1"}, b'{"counter":1,"timestamp":1}'),
    Question(904, {**BROKER_FIELDS, "brokerAddr": "nobody:1"}),
    Question(322, {**BROKER_FIELDS, "brokerAddr": "nobody:1"}),
    Question(217, {"topic": "Single"}),
    Question(217, {"topic": "Single"}, b'{"queueDatas":[]}'),
    Question(
        217,
        {"topic": "Single"},
        b'{"queueDatas":[{"brokerName":"broker-a","readQueueNums":2,"writeQueueNums":2,"perm":6,'
        b'"topicSysFlag":1}]}',
    ),
    Question(105, {"topic": "Single"}),
    Question(311, {}),
    Question(216, {"topic": "Single", "clusterName": "NoSuchCluster"}),
    Question(105, {"topic": "Single"}),
    Question(216, {"topic": "Single", "clusterName": CLUSTER}),
    Question(105, {"topic": "Single"}),
    Question(216, {"topic": "OFFSET_MOVED_EVENT"}),
    Question(105, {"topic": "OFFSET_MOVED_EVENT"}),
    Question(103, {**BROKER_FIELDS, "brokerAddr": "x:1", "haServerAddr": "", "bodyCrc32": "7"}),
    Question(
        103,
        {"brokerName": "b", "clusterName": "D", "brokerId": "1"}
        | {"brokerAddr": "b:1", "haServerAddr": "b:2", "enableActingMaster": "false"},
        b'{"topicConfigSerializeWrapper":{"topicConfigTable":{"One":{"topicName":"One"}}}}',
    ),
    Question(
        103,
        {"brokerName": "b", "clusterName": "D", "brokerId": "1"}
        | {"brokerAddr": "b:1", "haServerAddr": "b:2", "enableActingMaster": "true"},
        b'{"topicConfigSerializeWrapper":{"dataVersion":{"counter":1,"timestamp":2},'
        b'"topicConfigTable":{"One":{"topicName":"One","perm":6},"Two":{"topicName":"Two"}}}}',
    ),
    Question(105, {"topic": "One"}),
    Question(105, {"topic": "Two"}),
    Question(
        322,
        {"brokerName": "b", "clusterName": "D", "brokerId": "1", "brokerAddr": "b:1"},
        b'{"counter":1,"timestamp":2}',
    ),
    Question(
        103,
        {"brokerName": "b", "clusterName": "D", "brokerId": "0"}
        | {"brokerAddr": "b:1", "haServerAddr": "b:3", "enableActingMaster": "false"},
        b'{"topicConfigSerializeWrapper":{"topicConfigTable":{"One":{"topicName":"One"},'
        b'"Three":{"topicName":"Three","readQueueNums":1,"writeQueueNums":2,"order":true}}}}',
    ),
    Question(105, {"topic": "One"}),
    Question(106, {}),
    Question(
        103,
        {"brokerName": "b", "clusterName": "D", "brokerId": "2"}
        | {"brokerAddr": "b:9", "haServerAddr": "b:8"},
    ),
    Question(105, {"topic": "Three"}),
    Question(104, {"brokerName": "b", "clusterName": "D", "brokerId": "0", "brokerAddr": "b:1"}),
    Question(1, {}),
    Question(310, {}),
)
# A body that cannot be read. RocketMQ's remark names a class and a line; the code is the same.
# (Where a needed field is missing RocketMQ answers whatever comes of a null; ours says so.)
SAME_CODE = (
    Question(322, {**BROKER_FIELDS, "brokerAddr": "x:1"}, b"junk"),
    Question(217, {"topic": "x"}, b"junk"),
    Question(103, {**BROKER_FIELDS, "brokerAddr": "x:1", "haServerAddr": "x:2"}, b"junk"),
    Question(103, {"brokerName": "b"}),
)


def plain(answer: RemotingCommand) -> dict[str, Any]:
    """An answer without what is no part of its meaning: the order of sets."""
    body: Any = None
    if answer.body:
        body = lenient_json.loads(bytes(answer.body))
        if "topicList" in body:
            body["topicList"].sort()
        if "clusterAddrTable" in body:
            body["clusterAddrTable"] = {k: sorted(v) for k, v in body["clusterAddrTable"].items()}
        for key in ("brokerDatas", "queueDatas"):
            body.get(key, []).sort(key=lambda row: row["brokerName"])
    return {"code": answer.code, "remark": answer.remark, "ext": answer.ext, "body": body}


@pytest.mark.soak
def test_our_answers_are_apaches(ours: str, rocketmq_jars: Jars, tmp_path: Path) -> None:
    apache = RocketMQ(tmp_path / "apache", jars=rocketmq_jars, heap_mb=512)
    theirs = apache.nameserver_address
    apache.config["namesrvAddr"] = f"{theirs};{ours}"
    with apache:
        apache.mqadmin(
            *("updateTopic", "-b", apache.broker_address, "-t", TOPIC, "-r", "4", "-w", "4")
        )
        for address in (theirs, ours):
            wait_for_route(address, TOPIC)
        answers = zip(SAME_ANSWER, ask(theirs, *SAME_ANSWER), ask(ours, *SAME_ANSWER), strict=True)
        different = [
            f"{question}\n  theirs {plain(right)}\n  ours   {plain(answer)}"
            for question, right, answer in answers
            if plain(answer) != plain(right)
        ]
        assert not different, "\n".join(different)
        for question, right, answer in zip(
            SAME_CODE, ask(theirs, *SAME_CODE), ask(ours, *SAME_CODE), strict=True
        ):
            assert (answer.code, answer.ext) == (right.code, right.ext), question
        compare_mqadmin(apache, theirs, ours)


def compare_mqadmin(apache: RocketMQ, theirs: str, ours: str) -> None:
    def shown_by_each(*command: str) -> None:
        right = apache.mqadmin(*command, nameserver=theirs).stdout
        shown = apache.mqadmin(*command, nameserver=ours).stdout
        assert right.strip(), command
        # A list of topics is a set in RocketMQ: in any order.
        lines = sorted(shown.replace(ours, theirs).splitlines())
        assert lines == sorted(right.splitlines()), command

    def done_by_both(*command: str) -> list[str]:
        """What is printed for the one, then for the other; the same but for the address."""
        text = apache.mqadmin(*command, nameserver=f"{theirs};{ours}").stdout
        return [line for line in text.replace(ours, theirs).splitlines() if line.strip()]

    shown_by_each("clusterList", "-m")
    shown_by_each("topicList", "-c")
    shown_by_each("topicRoute", "-t", TOPIC)
    assert "success" in done_by_both("updateKvConfig", "-s", "n", "-k", "k", "-v", "v")[0]
    values = [
        ask(address, Question(101, {"namespace": "n", "key": "k"}))[0].ext["value"]
        for address in (theirs, ours)
    ]
    assert values == ["v", "v"]
    assert "success" in done_by_both("deleteKvConfig", "-s", "n", "-k", "k")[0]
    assert ask(ours, Question(101, {"namespace": "n", "key": "k"}))[0].code == 22
    for command in ("wipeWritePerm", "addWritePerm"):
        first, second = done_by_both(command, "-b", BROKER)
        assert "OK" in first
        assert first == second
        shown_by_each("topicRoute", "-t", TOPIC, "-l")
    config = apache.mqadmin("getNamesrvConfig", nameserver=ours).stdout
    assert "scanNotActiveBrokerInterval" in config
    apache.mqadmin(
        *("updateNamesrvConfig", "-k", "scanNotActiveBrokerInterval", "-v", "4000"), nameserver=ours
    )
    assert b"scanNotActiveBrokerInterval=4000" in bytes(ask(ours, Question(319, {}))[0].body)
    assert orjson.loads(ask(ours, Question(219, {"namespace": ORDER}))[0].body)["table"]
