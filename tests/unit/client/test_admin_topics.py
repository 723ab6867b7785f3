"""`sluice admin`: topics, as a person and as a script sees them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.unit.client.admin_kit import BROKER, CLUSTER, Site, cluster


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    with cluster() as running:
        yield running


def test_update_topic_makes_it_on_a_cluster(site: Site) -> None:
    rows = site.lines("updateTopic", "-c", CLUSTER, "-t", "made", "-r", "3", "-w", "2")
    assert rows == [
        "Topic Broker Read Queues Write Queues Permission Ordered Result",
        f"made {site.broker.address} 3 2 RW (6) false done",
    ]
    settings = site.broker.core.topics.get("made")
    assert settings is not None
    assert (settings.read_queues, settings.write_queues, settings.perm) == (3, 2, 6)


def test_update_topic_on_one_broker_with_all_flags(site: Site) -> None:
    document = site.json(
        *("updateTopic", "-b", site.broker.address, "--topic", "full", "--perm", "4"),
        *("--readQueueNums", "1", "--writeQueueNums=1", "-a", "+message.type=FIFO"),
        *("-o", "true", "-u", "true", "-s", "true"),
    )
    assert document["brokers"] == [{"brokerAddr": site.broker.address, "result": "SUCCESS"}]
    assert document["topicConfig"]["order"] is True
    assert document["topicConfig"]["topicSysFlag"] == 3
    assert document["orderConf"] == f"{BROKER}:1"
    settings = site.broker.core.topics.get("full")
    assert settings is not None
    assert settings.attributes == {"message.type": "FIFO"}
    # A value may begin with a dash.
    site.ok("updateTopic", "-b", site.broker.address, "-t", "full", "-a", "-message.type")
    changed = site.broker.core.topics.get("full")
    assert changed is not None
    assert changed.attributes == {}


def test_an_order_of_one_broker_leaves_those_of_others(site: Site) -> None:
    site.ok("updateKvConfig", "-s", "ORDER_TOPIC_CONFIG", "-k", "sorted", "-v", "broker-z:9")
    update = ("updateTopic", "-t", "sorted", "-w", "2", "-o", "true")
    document = site.json(*update, "-b", site.broker.address)
    assert document["orderConf"] == f"broker-z:9;{BROKER}:2"
    assert site.json(*update, "-c", CLUSTER)["orderConf"] == f"{BROKER}:2"


def test_a_topic_that_the_broker_refuses(site: Site) -> None:
    said = site.refused("updateTopic", "-c", CLUSTER, "-t", "TBW102")
    assert said == (
        f"{site.broker.address}: setting topic TBW102: The topic[TBW102] is conflict with system "
        "topic. (code 29)"
    )
    said = site.refused("updateTopic", "-c", CLUSTER, "-t", "x", "-a", "+no.such=1")
    assert "unsupported key: no.such" in said
    assert site.refused("updateTopic", "-c", "Nowhere", "-t", "x") == (
        f"no cluster Nowhere; there are: {CLUSTER}"
    )


def test_delete_topic_from_brokers_and_nameservers(site: Site) -> None:
    site.ok("updateTopic", "-c", CLUSTER, "-t", "gone")
    rows = site.lines("deleteTopic", "-c", CLUSTER, "-t", "gone")
    assert rows[1:] == [
        f"gone broker {site.broker.address} done",
        f"gone nameserver {site.nameserver.address} done",
    ]
    assert site.broker.core.topics.get("gone") is None
    assert site.refused("topicRoute", "-t", "gone").startswith("topic gone is not known")
    site.ok("updateTopic", "-c", CLUSTER, "-t", "gone")
    document = site.json("deleteTopic", "-c", CLUSTER, "-t", "gone")
    assert document["nameServers"][0]["result"] == "SUCCESS"


def test_update_topic_perm_changes_nothing_else(site: Site) -> None:
    site.ok(
        *("updateTopic", "-c", CLUSTER, "-t", "closing", "-r", "3", "-w", "2", "-o", "true"),
        *("-a", "+message.type=FIFO"),
    )
    before = site.broker.core.topics.get("closing")
    rows = site.lines("updateTopicPerm", "-c", CLUSTER, "-t", "closing", "-p", "4")
    assert rows[1:] == [f"closing {site.broker.address} RW (6) R (4) done"]
    after = site.broker.core.topics.get("closing")
    assert before is not None
    assert after is not None
    assert after.perm == 4
    assert after.to_json() == {**before.to_json(), "perm": 4}
    address = site.broker.address
    document = site.json("updateTopicPerm", "-b", address, "-t", "closing", "-p", "0")
    assert document["brokers"] == [{"brokerAddr": address, "result": "SUCCESS", "oldPerm": 4}]
    said = site.refused("updateTopicPerm", "-b", address, "-t", "unknown", "-p", "4")
    assert said == f"{address} has no topic unknown"


def test_topic_route(site: Site) -> None:
    site.ok("updateTopic", "-c", CLUSTER, "-t", "routed", "-r", "3", "-w", "2")
    rows = site.lines("topicRoute", "-t", "routed", "-l")
    assert rows == [
        "Cluster Broker Id Address Read Queues Write Queues Permission",
        f"{CLUSTER} {BROKER} 0 {site.broker.address} 3 2 RW (6)",
    ]
    document = site.json("topicRoute", "-t", "routed")
    assert document["brokerDatas"][0]["brokerAddrs"] == {"0": site.broker.address}
    assert document["queueDatas"][0]["writeQueueNums"] == 2


def test_topic_list_plain_and_with_groups(site: Site) -> None:
    site.ok("updateTopic", "-c", CLUSTER, "-t", "listed")
    site.join("listeners", {"listed": "*"}, client_id="lists")
    names = site.lines("topicList")
    assert "listed" in names
    assert "%RETRY%listeners" in names
    assert site.json("topicList")["topicList"] == sorted(names)
    rows = site.lines("topicList", "-c")
    assert f"{CLUSTER} listed listeners" in rows
    assert not any("%RETRY%" in row for row in rows)
    topics = site.json("topicList", "--clusterModel")["topics"]
    assert {"clusters": [CLUSTER], "topic": "listed", "groupList": ["listeners"]} in topics


def test_topic_status(site: Site) -> None:
    site.ok("updateTopic", "-c", CLUSTER, "-t", "counted", "-r", "2", "-w", "2")
    site.send("counted", "one", 1)
    site.send("counted", "two", 1)
    rows = site.lines("topicStatus", "-t", "counted")
    assert rows[0] == "Broker Queue Min Offset Max Offset Last Updated"
    assert rows[1] == f"{BROKER} 0 0 0"
    assert rows[2].startswith(f"{BROKER} 1 0 2 20")
    assert rows[-1].startswith("Topic Put TPS: ")
    document = site.json("topicStatus", "-t", "counted", "-c", "counted")
    first, second = document["offsetTable"]
    assert (first["maxOffset"], first["lastUpdateTimestamp"]) == (0, 0)
    assert (second["brokerName"], second["queueId"], second["maxOffset"]) == (BROKER, 1, 2)
    assert second["lastUpdateTimestamp"] > 0
    assert site.refused("topicStatus", "-t", "unknown").startswith("topic unknown is not known")


def test_allocate_shares_queues_as_consumers_do(site: Site) -> None:
    site.ok("updateTopic", "-c", CLUSTER, "-t", "shared", "-r", "4", "-w", "4")
    rows = site.lines("allocateMQ", "-t", "shared", "-i", "a,b,c")
    assert rows[1:] == [f"a {BROKER} 0, 1", f"b {BROKER} 2", f"c {BROKER} 3"]
    result = site.json("allocateMQ", "-t", "shared", "-i", "a,b,c,d,e")["result"]
    assert [len(result[name]) for name in "abcde"] == [1, 1, 1, 1, 0]
    assert result["b"] == [{"brokerName": BROKER, "queueId": 1, "topic": "shared"}]
    assert "separated by one comma" in site.wrong("allocateMQ", "-t", "shared", "-i", "a,,b")


def test_stats_of_topics_and_groups(site: Site) -> None:
    site.ok("updateTopic", "-c", CLUSTER, "-t", "busy", "-r", "1", "-w", "1")
    site.ok("updateTopic", "-c", CLUSTER, "-t", "idle", "-r", "1", "-w", "1")
    site.join("workers", {"busy": "*"}, client_id="works")
    site.send("busy", "one")
    site.send("busy", "two")
    site.commit("workers", "busy", 0, 1)
    (row,) = site.json("statsAll", "-t", "busy")["stats"]
    assert (row["topic"], row["consumerGroup"], row["accumulation"]) == ("busy", "workers", 1)
    assert (row["inMsg24Hour"], row["outMsg24Hour"]) == (2, 0)
    assert row["inTPS"] > 0
    rows = site.lines("statsAll")
    assert rows[0] == "Topic Consumer Group Behind In/s Out/s In 24 h Out 24 h"
    assert any(line.startswith("idle 0 0.00 0") for line in rows)
    active = site.lines("statsAll", "-a")
    assert any(line.startswith("busy workers 1 ") for line in active)
    assert not any(line.startswith("idle") for line in active)
    assert site.refused("statsAll", "-t", "unknown").startswith("topic unknown is not known")
