"""`sluice admin`: groups, their progress, who is connected, and members that do not agree."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from sluice.clock import wall_ms
from sluice.protocol.json_members import MessageQueue
from tests.unit.client.admin_kit import BROKER, CLUSTER, Site, cluster, one_line


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    with cluster() as running:
        running.ok("updateTopic", "-c", CLUSTER, "-t", "orders", "-r", "2", "-w", "2")
        for number in range(3):
            running.send("orders", f"body-{number}", 1)
        yield running


def queue(number: int) -> MessageQueue:
    return MessageQueue("orders", BROKER, number)


def test_update_group_with_all_flags(site: Site) -> None:
    document = site.json(
        *("updateSubGroup", "-b", site.broker.address, "-g", "full", "-s", "false", "-m", "true"),
        *("-d", "true", "-o", "true", "-q", "2", "-r", "5", "-i", "1", "-w", "2", "-a", "false"),
        *("-p", '{"type":"CUSTOMIZED","customizedRetryPolicy":{"next":[1000]}}'),
    )
    assert document["brokers"] == [{"brokerAddr": site.broker.address, "result": "SUCCESS"}]
    stored = site.broker.core.groups.get("full")
    assert stored is not None
    assert stored.to_json() == document["subscriptionGroupConfig"]
    assert (stored.consume_enabled, stored.broadcast_enabled, stored.retry_max) == (False, True, 5)
    assert stored.to_json()["groupRetryPolicy"]["customizedRetryPolicy"] == {"next": [1000]}


def test_update_group_has_the_defaults_of_mqadmin(site: Site) -> None:
    rows = site.lines("updateSubGroup", "-c", CLUSTER, "-g", "plain")
    assert rows[1:] == [f"plain {site.broker.address} true false false 1 16 done"]
    stored = site.broker.core.groups.get("plain")
    assert stored is not None
    assert (stored.from_min_enabled, stored.notify_changes, stored.slow_broker_id) == (
        False,
        True,
        1,
    )


def test_how_a_group_reads_a_topic(site: Site) -> None:
    site.ok("updateSubGroup", "-c", CLUSTER, "-g", "popping")
    words = ("setConsumeMode", "-c", CLUSTER, "-t", "orders", "-g", "popping")
    document = site.json(*words, "-m", "POP", "-q", "2")
    assert document["brokers"] == [{"brokerAddr": site.broker.address, "result": "SUCCESS"}]
    stored = site.broker.store.table("request_mode")["orders"]["popping"]
    assert (stored["mode"], stored["popShareQueueNum"]) == ("POP", 2)
    rows = site.lines(*words, "-m", "PULL")
    assert rows[1:] == [f"popping orders PULL {site.broker.address} done"]
    assert "neither PULL nor POP" in site.wrong(*words, "-m", "PUSH")
    said = site.refused("setConsumeMode", "-c", CLUSTER, "-t", "gone", "-g", "popping", "-m", "POP")
    assert "topic[gone] not exist" in said


def test_a_group_that_the_broker_refuses(site: Site) -> None:
    said = site.refused("updateSubGroup", "-c", CLUSTER, "-g", "a b")
    assert "contains illegal characters" in said
    said = site.refused("updateSubGroup", "-c", CLUSTER, "-g", "x", "--attributes", "+a=b")
    assert "unsupported key: a" in said
    for policy in ("{", "[]", '{"type":"NONE"}'):
        wrong = site.wrong("updateSubGroup", "-c", CLUSTER, "-g", "x", "-p", policy)
        assert "-p/--groupRetryPolicy" in wrong
    wrong = site.wrong("updateSubGroup", "-c", CLUSTER, "-g", "x", "--attributes", "a=b")
    assert "'a=b' is neither +name=value nor -name" in wrong


def test_delete_group_with_offsets_and_retry_topic(site: Site) -> None:
    site.join("leaving", {"orders": "*"}, client_id="leaves")
    site.commit("leaving", "orders", 1, 2)
    assert "%RETRY%leaving" in site.lines("topicList")
    rows = site.lines("deleteSubGroup", "-c", CLUSTER, "-g", "leaving", "-r", "true")
    assert rows == ["Group Deleted From Result", f"leaving {site.broker.address} done"]
    assert site.broker.core.groups.get("leaving") is None
    assert site.broker.core.offsets.committed("leaving", "orders", 1) is None
    assert "%RETRY%leaving" not in site.lines("topicList")
    site.ok("updateSubGroup", "-c", CLUSTER, "-g", "leaving")
    document = site.json("deleteSubGroup", "-b", site.broker.address, "-g", "leaving")
    assert document["removeOffset"] is False
    assert document["brokers"][0]["result"] == "SUCCESS"


def test_progress_of_one_group_queue_by_queue(site: Site) -> None:
    site.join("readers", {"orders": "*"}, client_id="10.0.0.7@1", queues={queue(1): {}})
    site.commit("readers", "orders", 1, 1)
    rows = site.lines("consumerProgress", "-g", "readers", "-t", "orders")
    assert rows[0] == (
        "Topic Broker Queue Broker Offset Consumer Offset Behind In Flight Last Time"
    )
    assert rows[1] == f"orders {BROKER} 0 0 0 0 0 N/A"
    assert rows[2].startswith(f"orders {BROKER} 1 3 1 2 0 20")
    assert "Behind in total: 2" in rows
    document = site.json("consumerProgress", "-g", "readers", "-s", "true")
    assert (document["diffTotal"], document["unequalSubscriptions"]) == (2, [])
    by_queue = {(row["topic"], row["queueId"]): row for row in document["offsetTable"]}
    assert by_queue["orders", 1]["clientIP"] == "10.0.0.7"
    assert by_queue["orders", 0]["clientIP"] == "N/A"
    assert by_queue["orders", 1]["lastTimestamp"] > 0
    owners = site.lines("consumerProgress", "-g", "readers", "-t", "orders", "-s", "true")
    assert " 3 1 10.0.0.7 2 0 " in owners[2]


def test_progress_of_an_unknown_group(site: Site) -> None:
    assert site.refused("consumerProgress", "-g", "nobody") == (
        "group nobody has no offsets; none of its consumers has connected"
    )


def test_progress_of_all_groups(site: Site) -> None:
    site.join("online", {"orders": "*"}, client_id="on")
    site.commit("online", "orders", 1, 3)
    link = site.join("offline", {"orders": "*"}, client_id="off")
    site.call(link.close())
    rows = site.lines("consumerProgress")
    assert rows[0] == "Group Count Version Type Model TPS Behind Subscriptions"
    assert "online 1 V5_5_0 PUSH CLUSTERING 0.00 0 equal" in rows
    assert "offline 0 OFFLINE 0.00 0" in rows
    groups = {row["group"]: row for row in site.json("consumerProgress")["groups"]}
    assert (groups["online"]["count"], groups["online"]["consumeType"]) == (1, "PUSH")
    assert groups["offline"]["version"] == "OFFLINE"


def test_connected_consumers(site: Site) -> None:
    site.join("seen", {"orders": "TagA || TagB"}, client_id="sees")
    rows = site.lines("consumerConnection", "-g", "seen")
    assert rows[0] == "Client Id Address Language Version"
    assert rows[1].startswith("sees 127.0.0.1:")
    assert rows[1].endswith(" PYTHON V5_5_0")
    assert "orders TagA || TagB" in rows
    assert "Message model: CLUSTERING" in rows
    document = site.json("consumerConnection", "-g", "seen", "-b", site.broker.address)
    assert [row["clientId"] for row in document["connectionSet"]] == ["sees"]
    assert document["connectionSet"][0]["versionDesc"] == "V5_5_0"
    assert document["subscriptionTable"]["orders"]["subString"] == "TagA || TagB"
    assert document["unequalSubscriptions"] == []
    assert site.refused("consumerConnection", "-g", "nobody") == (
        "no consumer of group nobody is connected"
    )


def test_connected_producers(site: Site) -> None:
    site.join("with-producer", {}, client_id="sends", producer_groups=("senders",))
    rows = site.lines("producerConnection", "-g", "senders", "-t", "orders")
    assert rows[1].startswith("sends 127.0.0.1:")
    document = site.json("producerConnection", "-g", "senders", "-t", "orders")
    assert document["connectionSet"][0]["language"] == "PYTHON"
    assert site.refused("producerConnection", "-g", "nobody", "-t", "orders") == (
        "no producer of group nobody is connected to a broker of orders"
    )


def test_status_of_a_group_that_agrees(site: Site) -> None:
    for number in (0, 1):
        site.join(
            "agreeing",
            {"orders": "*"},
            client_id=f"agrees-{number}",
            queues={queue(number): {"commitOffset": 1}},
        )
    rows = site.lines("consumerStatus", "-g", "agreeing")
    assert rows == [
        "Index Client Id Version Queues State",
        "1 agrees-0 V5_5_0 1 running",
        "2 agrees-1 V5_5_0 1 running",
        "",
        "All members of the group have the same subscription.",
        "Rebalance OK.",
    ]
    document = site.json("consumerStatus", "-g", "agreeing")
    assert (document["sameSubscription"], document["problems"]) == (True, [])
    assert document["consumers"][0]["mqTable"] == [
        {"brokerName": BROKER, "queueId": 0, "topic": "orders", "commitOffset": 1}
    ]


def test_status_of_one_consumer(site: Site) -> None:
    site.join(
        "telling",
        {"orders": "*"},
        client_id="tells",
        queues={queue(1): {"commitOffset": 2, "cachedMsgCount": 4, "droped": False}},
    )
    rows = site.lines("consumerStatus", "-g", "telling", "-i", "tells", "-s")
    assert "PROP_CONSUMEORDERLY false" in rows
    assert "orders * TAG" in rows
    assert f"orders {BROKER} 1 2 4 false" in rows
    assert "colour blue" in rows
    assert rows[-1] == "main thread"
    document = site.json("consumerStatus", "-g", "telling", "-i", "tells")
    assert document["clientId"] == "tells"
    assert document["statusTable"]["orders"]["pullTPS"] == 1.5
    assert "not online" in site.refused("consumerStatus", "-g", "telling", "-i", "stranger")


def test_status_says_which_queues_are_read_twice_by_nobody_or_stuck(site: Site) -> None:
    old_ms = wall_ms() - 3_600_000
    stuck = {"lastConsumeTimestamp": old_ms, "cachedMsgCount": 9}
    site.join("troubled", {"orders": "*"}, client_id="one", queues={queue(1): stuck})
    site.join(
        "troubled", {"orders": "*"}, client_id="two", queues={queue(1): {"cachedMsgCount": 0}}
    )
    problems = site.json("consumerStatus", "-g", "troubled")["problems"]
    assert any(line.startswith(f"orders {BROKER}/1 of one consumes nothing") for line in problems)
    assert f"orders {BROKER}/1 is read by one and two" in problems
    assert f"orders {BROKER}/0 is read by nobody" in problems
    rows = site.lines("consumerStatus", "-g", "troubled")
    assert f"WARNING: orders {BROKER}/0 is read by nobody" in rows
    assert "Rebalance OK." not in rows


def test_a_consumer_that_says_nothing_is_shown(site: Site) -> None:
    site.join("shy", {"orders": "*"}, client_id="silent", answers=False)
    (row,) = site.json("consumerStatus", "-g", "shy")["consumers"]
    assert "does not say" in row["error"]
    (group,) = site.json("subscriptions", "-g", "shy")["groups"]
    assert group["silentClientIds"] == ["silent"]


# ---------------------------------------------------------------------------- unequal subscriptions


@pytest.fixture(scope="module")
def divided(site: Site) -> list[str]:
    """A group whose members want different tags; what there is to say of it."""
    site.join("divided", {"orders": "TagA"}, client_id="wants-a", queues={queue(0): {}})
    site.join("divided", {"orders": "TagB"}, client_id="wants-b", queues={queue(1): {}})
    return ["orders: 'TagA' by wants-a; 'TagB' by wants-b"]


WARNING = "WARNING: members of group divided subscribe differently, so messages are missed:"


def test_unequal_subscriptions_are_told_by_the_broker(site: Site, divided: list[str]) -> None:
    assert site.json("consumerConnection", "-g", "divided")["unequalSubscriptions"] == divided
    rows = site.lines("consumerConnection", "-g", "divided")
    assert rows[-2:] == [WARNING, *divided]


def test_unequal_subscriptions_are_told_by_the_members(site: Site, divided: list[str]) -> None:
    document = site.json("consumerStatus", "-g", "divided")
    assert document["sameSubscription"] is False
    assert document["unequalSubscriptions"] == divided
    rows = site.lines("consumerStatus", "-g", "divided")
    assert WARNING in rows
    assert divided[0] in rows


def test_unequal_subscriptions_show_in_progress(site: Site, divided: list[str]) -> None:
    site.commit("divided", "orders", 1, 1)
    document = site.json("consumerProgress", "-g", "divided")
    assert document["unequalSubscriptions"] == divided
    assert WARNING in site.lines("consumerProgress", "-g", "divided")
    rows = site.lines("consumerProgress")
    assert "divided 2 V5_5_0 PUSH CLUSTERING 0.00 2 UNEQUAL" in rows
    assert WARNING in rows
    groups = {row["group"]: row for row in site.json("consumerProgress")["groups"]}
    assert groups["divided"]["unequalSubscriptions"] == divided


def test_subscriptions_lists_groups_and_ends_with_1_where_they_differ(
    site: Site, divided: list[str]
) -> None:
    done = site.admin("subscriptions")
    assert done.status == 1
    rows = [" ".join(line.split()) for line in done.out.splitlines()]
    assert "divided orders TagA wants-a UNEQUAL" in rows
    assert "divided orders TagB wants-b UNEQUAL" in rows
    assert WARNING in rows
    site.join("united", {"orders": "TagA"}, client_id="united")
    assert "united orders TagA united equal" in site.lines("subscriptions", "-g", "united")
    (group,) = site.json("subscriptions", "-g", "united")["groups"]
    assert group["sameSubscription"] is True
    assert group["subscriptions"] == [
        {"topic": "orders", "subString": "TagA", "clientIds": ["united"]}
    ]


def test_subscriptions_of_a_group_that_nobody_uses(site: Site) -> None:
    done = site.admin("subscriptions", "-g", "nobody")
    assert one_line(done, 1) == "no consumer of group nobody is connected"
